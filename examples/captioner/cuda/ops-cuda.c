/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops-cuda.c - a rank's arithmetic on its GPU: cuBLAS for products, a kernel for the rest.
 *
 * Decides the numerics as ops-host.c does: fp32 products, and no TF32 (a gradient would be wrong in
 * its fourth digit), fp64 sums over tokens. All is enqueued on one stream of the rank; put() and
 * get() wait, for the host's side of them is ordinary memory. A failure is kept until check(),
 * which the model calls once a step: after an error CUDA refuses what follows, so nothing runs on
 * wrong numbers unseen.
 *
 * Kernels are loaded when the process starts to use CUDA (CUDA_MODULE_LOADING=EAGER, unless
 * somebody chose otherwise): loading one later waits for the device, which may be waiting for
 * another rank, whose thread would wait for the load.
 */
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cublas-lib.h"

struct block {
    struct block *next;
    void *data;
};

struct state {
    cap_cublas_t lib;
    cublasHandle_t blas;
    struct block *blocks;
    bool said;
    char why[200]; /* the first failure */
};

static void keep(const cap_ops_t *o, const char *what, const char *library, const char *says)
{
    struct state *s = o->state;
    if (!s->why[0])
        snprintf(s->why, sizeof s->why, "%s: %s says: %s", what, library, says);
}

static void cuda(const cap_ops_t *o, const char *what, cudaError_t e)
{
    if (e != cudaSuccess)
        keep(o, what, "CUDA", cudaGetErrorString(e));
}

static void blas(const cap_ops_t *o, const char *what, cublasStatus_t e)
{
    if (e != CUBLAS_STATUS_SUCCESS)
        keep(o, what, "cuBLAS", ((struct state *)o->state)->lib.status_name(e));
}

/* ---- memory ---- */

static void *take(cap_ops_t *o, int64_t bytes)
{
    struct state *s = o->state;
    struct block *b = malloc(sizeof *b);
    size_t size = bytes ? (size_t)bytes : 1;

    if (!b || cudaMalloc(&b->data, size) != cudaSuccess) {
        free(b);
        return NULL;
    }
    b->next = s->blocks;
    s->blocks = b;
    cuda(o, "zeros", cudaMemsetAsync(b->data, 0, size, o->stream));
    return b->data;
}

static void zero(const cap_ops_t *o, void *p, int64_t bytes)
{
    cuda(o, "zeros", cudaMemsetAsync(p, 0, (size_t)bytes, o->stream));
}

static void move(const cap_ops_t *o, void *to, const void *from, int64_t bytes,
                 enum cudaMemcpyKind kind)
{
    if (bytes)
        cuda(o, "copy", cudaMemcpyAsync(to, from, (size_t)bytes, kind, o->stream));
    if (kind != cudaMemcpyDeviceToDevice)
        cuda(o, "copy", cudaStreamSynchronize(o->stream));
}

static void copy(const cap_ops_t *o, void *to, const void *from, int64_t bytes)
{
    move(o, to, from, bytes, cudaMemcpyDeviceToDevice);
}

static void put(const cap_ops_t *o, void *to, const void *from_host, int64_t bytes)
{
    move(o, to, from_host, bytes, cudaMemcpyHostToDevice);
}

static void get(const cap_ops_t *o, void *to_host, const void *from, int64_t bytes)
{
    move(o, to_host, from, bytes, cudaMemcpyDeviceToHost);
}

static colo_status_t check(const cap_ops_t *o)
{
    struct state *s = o->state;

    cuda(o, "a step", cudaStreamSynchronize(o->stream));
    if (!s->why[0])
        return COLO_OK;
    if (!s->said)
        fprintf(stderr, "colo-captioner: GPU %d: %s\n", (int)o->device, s->why);
    s->said = true;
    return COLO_ERR_CUDA;
}

static void destroy(cap_ops_t *o)
{
    struct state *s = o->state;

    if (!s)
        return;
    if (s->blas)
        s->lib.destroy(s->blas);
    while (s->blocks) {
        struct block *b = s->blocks;
        s->blocks = b->next;
        cudaFree(b->data);
        free(b);
    }
    if (o->stream)
        cudaStreamDestroy(o->stream);
    free(s);
    o->state = NULL;
}

/* ---- products: cuBLAS counts columns first, so every matrix here is the transpose of its own ----
 */

static void gemm(const cap_ops_t *o, const char *what, cublasOperation_t first,
                 cublasOperation_t second, int64_t m, int64_t n, int64_t k, const float *a,
                 int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    struct state *s = o->state;
    const float one = 1.0f;

    blas(o, what,
         s->lib.sgemm(s->blas, first, second, (int)m, (int)n, (int)k, &one, a, (int)lda, b,
                      (int)ldb, &beta, c, (int)ldc));
}

static void linear(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *x,
                   const float *w, const float *b, float *y)
{
    if (!t || !out)
        return;
    if (in)
        gemm(o, "linear", CUBLAS_OP_T, CUBLAS_OP_N, out, t, in, w, in, x, in, 0.0f, y, out);
    else
        zero(o, y, t * out * (int64_t)sizeof *y);
    if (b)
        cuda(o, "bias", cap_k_add_rows(t, out, NULL, b, y, o->stream));
}

static void linear_d_weight(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *x,
                            const float *d_y, float *d_w)
{
    if (t && in && out)
        gemm(o, "d_weight", CUBLAS_OP_N, CUBLAS_OP_T, in, out, t, x, in, d_y, out, 1.0f, d_w, in);
}

static void linear_d_bias(const cap_ops_t *o, int64_t t, int64_t out, const float *d_y, float *d_b)
{
    cuda(o, "d_bias", cap_k_sum_rows(t, out, d_y, NULL, d_b, o->stream));
}

static void linear_d_input(const cap_ops_t *o, int64_t t, int64_t in, int64_t out, const float *d_y,
                           const float *w, float beta, float *d_x)
{
    if (!t || !in)
        return;
    if (out)
        gemm(o, "d_input", CUBLAS_OP_N, CUBLAS_OP_N, in, t, out, w, in, d_y, out, beta, d_x, in);
    else if (beta == 0.0f) /* an empty shard adds nothing */
        zero(o, d_x, t * in * (int64_t)sizeof *d_x);
}

/* ---- kernels ---- */

static void gelu(const cap_ops_t *o, int64_t count, const float *z, float *act, float *slope)
{
    cuda(o, "gelu", cap_k_gelu(count, z, act, slope, o->stream));
}

static void scale(const cap_ops_t *o, int64_t count, const float *by, float *y)
{
    cuda(o, "scale", cap_k_scale(count, by, y, o->stream));
}

static void add_rows(const cap_ops_t *o, int64_t t, int64_t d, const float *skip, const float *bias,
                     float *y)
{
    cuda(o, "add_rows", cap_k_add_rows(t, d, skip, bias, y, o->stream));
}

static void norm(const cap_ops_t *o, int64_t t, int64_t d, const float *x, const float *gain,
                 const float *bias, float *x_hat, float *r, float *y)
{
    cuda(o, "norm", cap_k_norm(t, d, x, gain, bias, x_hat, r, y, o->stream));
}

static void norm_backward(const cap_ops_t *o, int64_t t, int64_t d, const float *d_y,
                          const float *gain, const float *x_hat, const float *r,
                          const float *d_skip, float *d_x, float *d_gain, float *d_bias)
{
    cuda(o, "d_gain", cap_k_sum_rows(t, d, d_y, x_hat, d_gain, o->stream));
    cuda(o, "d_bias", cap_k_sum_rows(t, d, d_y, NULL, d_bias, o->stream));
    cuda(o, "norm", cap_k_norm_d_x(t, d, d_y, gain, x_hat, r, d_skip, d_x, o->stream));
}

static int64_t attend_work(const cap_sequence_t *s)
{
    return s->b * s->h * s->n * s->window;
}

static void attend(const cap_ops_t *o, const cap_sequence_t *s, const float *q, const float *kv,
                   float *prob, float *out, float *work)
{
    cuda(o, "attend", cap_k_attend(s, q, kv, prob, out, o->stream));
}

static void attend_backward(const cap_ops_t *o, const cap_sequence_t *s, const float *q,
                            const float *kv, const float *prob, const float *d_out, float *d_q,
                            float *d_kv, float *work)
{
    cuda(o, "attend_backward",
         cap_k_attend_backward(s, q, kv, prob, d_out, d_q, d_kv, work, o->stream));
}

static void merge(const cap_ops_t *o, const cap_sequence_t *s, int64_t d, int64_t yn,
                  const float *y, const float *embed, const float *table, float *x)
{
    cuda(o, "merge", cap_k_merge(s, d, yn, y, embed, table, x, o->stream));
}

static void merge_backward(const cap_ops_t *o, const cap_sequence_t *s, int64_t d, int64_t yn,
                           const float *d_x, float *d_y, float *d_embed, float *d_table)
{
    if (d_y)
        zero(o, d_y, s->b * yn * d * (int64_t)sizeof *d_y);
    cuda(o, "merge_backward",
         cap_k_merge_backward(s, d, yn, d_x, d_y, d_embed, d_table, o->stream));
}

static void adam(const cap_ops_t *o, int64_t count, float rate, float fix1, float fix2,
                 const float *g, float *m, float *v, float *w)
{
    cuda(o, "adam", cap_k_adam(count, rate, fix1, fix2, g, m, v, w, o->stream));
}

static const cap_ops_t table = {
    .mem = COLO_MEM_CUDA,
    .take = take,
    .zero = zero,
    .copy = copy,
    .put = put,
    .get = get,
    .check = check,
    .destroy = destroy,
    .linear = linear,
    .linear_d_weight = linear_d_weight,
    .linear_d_bias = linear_d_bias,
    .linear_d_input = linear_d_input,
    .gelu = gelu,
    .scale = scale,
    .add_rows = add_rows,
    .norm = norm,
    .norm_backward = norm_backward,
    .attend_work = attend_work,
    .attend = attend,
    .attend_backward = attend_backward,
    .merge = merge,
    .merge_backward = merge_backward,
    .adam = adam,
};

/* ---- making one ---- */

int cap_gpus(char *why, size_t why_size)
{
    int found = 0;

    (void)why, (void)why_size;
    setenv("CUDA_MODULE_LOADING", "EAGER",
           0); /* read when CUDA starts, which is in the next line */
    return cudaGetDeviceCount(&found) == cudaSuccess ? found : 0;
}

static cublasStatus_t open_blas(struct state *s, colo_stream_t stream)
{
    cublasStatus_t e = s->lib.create(&s->blas);

    if (e == CUBLAS_STATUS_SUCCESS)
        e = s->lib.set_stream(s->blas, stream);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = s->lib.set_math_mode(s->blas, CUBLAS_PEDANTIC_MATH);
    return e;
}

bool cap_ops_cuda(cap_ops_t *o, int32_t device, char *why, size_t why_size)
{
    struct state *s = calloc(1, sizeof *s);
    cudaError_t e = cudaSetDevice(device);

    *o = table;
    o->device = device;
    o->state = s;
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&o->stream, cudaStreamNonBlocking);
    if (!s || e != cudaSuccess) {
        snprintf(why, why_size, "GPU %d: %s", (int)device,
                 s ? cudaGetErrorString(e) : "no host memory");
        destroy(o);
        return false;
    }
    if (!cap_cublas_load(&s->lib, why, why_size)) {
        destroy(o);
        return false;
    }
    cublasStatus_t blas_says = open_blas(s, o->stream);
    if (blas_says != CUBLAS_STATUS_SUCCESS) {
        snprintf(why, why_size, "GPU %d: cuBLAS says: %s", (int)device,
                 s->lib.status_name(blas_says));
        destroy(o);
        return false;
    }
    return true;
}
