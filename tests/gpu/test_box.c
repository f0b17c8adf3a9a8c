/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_box.c - the box kernels, bit for bit against plain host loops: any strides, any order of
 * axes, pointers at any byte, all dtypes, empty boxes, lists, more than 2^31 elements.
 *
 * A case lives in two arenas of random bytes. The loops below copy on the host, the kernel on the
 * device, and then the whole arenas are compared: what lies between the boxes must not change.
 */
#include "gpu/gpu.h"

#include "loss/loss_case.h"
#include "perf/probe.h"

static uint64_t rng;

/* ---- random boxes ---- */

/* Axes in a random order with random gaps; returns the elements spanned. */
static int64_t draw_strides(const int64_t *extent, int64_t *stride)
{
    int order[3] = {0, 1, 2};
    for (int i = 2; i > 0; i--) {
        int k = (int)t_below(&rng, i + 1), o = order[i];
        order[i] = order[k];
        order[k] = o;
    }
    if (t_below(&rng, 2)) /* as memory mostly is */
        for (int i = 0; i < 3; i++)
            order[i] = i;
    int64_t span = 1;
    bool tight = t_below(&rng, 2);
    for (int i = 2; i >= 0; i--) {
        stride[order[i]] = span;
        if (i == 2 && t_below(&rng, 4) == 0)
            stride[order[i]] = span = 1 + t_below(&rng, 3);
        span *= extent[order[i]] > 0 ? extent[order[i]] : 1;
        span += tight ? 0 : t_below(&rng, 2) ? 8 * t_below(&rng, 3) : t_below(&rng, 5);
    }
    return span + 16;
}

static void draw_extent(int64_t *extent)
{
    for (int i = 0; i < 3; i++)
        extent[i] = 1 + t_below(&rng, t_below(&rng, 3) ? 9 : 40);
    extent[2] *= t_below(&rng, 2) ? 8 : 1;
    if (t_below(&rng, 20) == 0)
        extent[t_below(&rng, 3)] = 0;
}

/* Bytes to shift a box by: mostly none or elements, now and then what no element is aligned to. */
static int64_t draw_shift(int64_t elem)
{
    int64_t kind = t_below(&rng, 8);
    return kind < 4 ? 0 : kind < 7 ? elem * t_below(&rng, 16) : t_below(&rng, 16);
}

static void copy_loop(unsigned char *dst, const int64_t *to, const unsigned char *src,
                      const int64_t *from, const int64_t *extent, int64_t elem)
{
    for (int64_t i = 0; i < extent[0]; i++)
        for (int64_t j = 0; j < extent[1]; j++)
            for (int64_t k = 0; k < extent[2]; k++)
                for (int64_t b = 0; b < elem; b++)
                    dst[(i * to[0] + j * to[1] + k * to[2]) * elem + b] =
                        src ? src[(i * from[0] + j * from[1] + k * from[2]) * elem + b] : 0;
}

static colo_box_t box(void *data, const int64_t *extent, const int64_t *stride)
{
    return (colo_box_t){.data = data,
                        .extent = {extent[0], extent[1], extent[2]},
                        .stride = {stride[0], stride[1], stride[2]}};
}

static unsigned char *random_bytes(int64_t n)
{
    unsigned char *p = malloc((size_t)n);
    for (int64_t i = 0; i < n; i++)
        p[i] = (unsigned char)t_rand(&rng);
    return p;
}

/* ---- copies ---- */

/* @n boxes one after the other in arenas as large as they need, copied in one call. */
static void run_list(int n, int64_t elem)
{
    COLO_AUTOFREE colo_box_t *to = calloc((size_t)n, sizeof *to),
                             *from = calloc((size_t)n, sizeof *from);
    int64_t *offset = calloc((size_t)n * 2, sizeof *offset), size[2] = {64, 64};
    for (int i = 0; i < n; i++) {
        int64_t extent[3], ds[3], ss[3];
        draw_extent(extent);
        int64_t span[2];
        span[0] = draw_strides(extent, ds);
        span[1] = draw_strides(extent, ss);
        if (t_below(&rng, 20) == 0)
            ss[1] = 0; /* a source may repeat */
        to[i] = box(NULL, extent, ds);
        from[i] = box(NULL, extent, ss);
        for (int s = 0; s < 2; s++) {
            offset[2 * i + s] = size[s] + draw_shift(elem);
            size[s] = (offset[2 * i + s] + span[s] * elem + 63) & ~INT64_C(63);
        }
    }
    COLO_AUTOFREE unsigned char *dst = random_bytes(size[0]), *src = random_bytes(size[1]);
    COLO_AUTOFREE unsigned char *got = malloc((size_t)size[0]);
    GPU_AUTOFREE unsigned char *d_dst = gpu_put(dst, (size_t)size[0]),
                               *d_src = gpu_put(src, (size_t)size[1]);
    for (int i = 0; i < n; i++) {
        to[i].data = d_dst + offset[2 * i];
        const bool zeros = t_below(&rng, 5) == 0; /* a source without data */
        from[i].data = zeros ? NULL : d_src + offset[2 * i + 1];
        copy_loop(dst + offset[2 * i], to[i].stride, zeros ? NULL : src + offset[2 * i + 1],
                  from[i].stride, to[i].extent, elem);
    }
    if (n == 1)
        assert_ok(gpu_device()->box_copy(to, from, (size_t)elem, NULL));
    else
        assert_ok((t_below(&rng, 2) ? gpu_device()->box_list : gpu_device()->box_list_narrow)(
            to, from, n, (size_t)elem, NULL));
    gpu_get(got, d_dst, (size_t)size[0]);
    for (int64_t i = 0; i < size[0]; i++)
        if (got[i] != dst[i])
            fail_msg("%d boxes of %d-byte elements: byte %lld is %02x, expected %02x", n, (int)elem,
                     (long long)i, got[i], dst[i]);
    free(offset);
}

T_CASE(a_box_arrives_bit_for_bit_whatever_its_strides)
{
    for (int64_t i = 0; i < t_scaled(600); i++)
        run_list(1, INT64_C(1) << i % 4);
}

T_CASE(a_list_of_boxes_arrives_bit_for_bit)
{
    static const int counts[] = {2, 7, 32, 33, 256, 300};
    for (int64_t i = 0; i < t_scaled(24); i++)
        run_list(counts[i % 6], INT64_C(1) << i / 6 % 4);
}

T_CASE(two_hundred_boxes_are_one_launch_and_can_be_replayed)
{
    enum { N = 200, EACH = 24 };
    colo_box_t to[N], from[N];
    unsigned char *src = random_bytes(N * EACH), got[N * EACH];
    GPU_AUTOFREE unsigned char *d_src = gpu_put(src, N * EACH), *d_dst = gpu_put(NULL, N * EACH);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t nodes = 0;
    for (int i = 0; i < N; i++) { /* in reverse order */
        to[i] = (colo_box_t){d_dst + i * EACH, {1, 1, EACH}, {EACH, EACH, 1}};
        from[i] = (colo_box_t){d_src + (N - 1 - i) * EACH, {1, 1, EACH}, {EACH, EACH, 1}};
    }
    assert_cuda(cudaStreamCreate(&stream));
    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_ok(gpu_device()->box_list(to, from, N, 1, stream));
    assert_cuda(cudaStreamEndCapture(stream, &graph));
    assert_cuda(cudaGraphGetNodes(graph, NULL, &nodes));
    assert_int_equal(nodes, 1);
    assert_cuda(cudaGraphInstantiate(&exec, graph, 0));
    for (int replay = 0; replay < 3; replay++) {
        for (int i = 0; i < N * EACH; i++)
            src[i] = (unsigned char)t_rand(&rng);
        assert_cuda(t_to_device(d_src, src, N * EACH));
        assert_cuda(cudaGraphLaunch(exec, stream));
        gpu_get(got, d_dst, N * EACH);
        for (int i = 0; i < N; i++)
            assert_memory_equal(got + i * EACH, src + (N - 1 - i) * EACH, EACH);
    }
    assert_cuda(cudaGraphExecDestroy(exec));
    assert_cuda(cudaGraphDestroy(graph));
    assert_cuda(cudaStreamDestroy(stream));
    free(src);
}

/* There and back through another order of axes, and single elements on the way. */
static void big_box(const int64_t *extent, const int64_t *stride, int64_t elem)
{
    const int64_t plain[3] = {extent[1] * extent[2], extent[2], 1};
    const int64_t n = extent[0] * plain[0];
    const size_t bytes = ((size_t)(n * elem) + 15) & ~(size_t)15;
    GPU_AUTOFREE unsigned char *a = NULL, *b = NULL, *c = NULL;
    unsigned long long *wrong = gpu_put(NULL, 8), found = 0;
    assert_true(n > INT64_C(1) << 31);
    assert_cuda(cudaMalloc((void **)&a, bytes));
    assert_cuda(cudaMalloc((void **)&b, bytes));
    assert_cuda(cudaMalloc((void **)&c, bytes));
    assert_cuda(colo_k_probe_fill(a, (int64_t)bytes, 1, t_rand(&rng), NULL));
    assert_cuda(cudaMemcpy(c + bytes - 16, a + bytes - 16, 16, cudaMemcpyDeviceToDevice));
    assert_cuda(cudaMemset(wrong, 0, 8));
    colo_box_t from = box(a, extent, plain), mid = box(b, extent, stride),
               back = box(c, extent, plain);
    assert_ok(gpu_device()->box_copy(&mid, &from, (size_t)elem, NULL));
    assert_ok(gpu_device()->box_copy(&back, &mid, (size_t)elem, NULL));
    assert_cuda(colo_k_probe_diff(a, c, (int64_t)bytes, wrong, NULL));
    gpu_get(&found, wrong, 8);
    assert_int_equal(found, 0);
    for (int s = 0; s < 1000; s++) {
        int64_t e[3], offset = 0, it = 0;
        unsigned char x[8], y[8];
        for (int i = 0; i < 3; i++) {
            e[i] = s == 0 ? extent[i] - 1 : t_below(&rng, extent[i]);
            offset += e[i] * plain[i];
            it += e[i] * stride[i];
        }
        assert_cuda(cudaMemcpy(x, a + offset * elem, (size_t)elem, cudaMemcpyDeviceToHost));
        assert_cuda(cudaMemcpy(y, b + it * elem, (size_t)elem, cudaMemcpyDeviceToHost));
        assert_memory_equal(x, y, (size_t)elem);
    }
    gpu_free(wrong);
}

T_CASE(more_than_two_to_the_31_elements_arrive)
{
    if (t_scaled(100) < 100)
        skip(); /* a sanitizer would take minutes */
    big_box((int64_t[]){5, 7, 62 << 20}, (int64_t[]){62 << 20, 5 * (62 << 20), 1}, 2);
    big_box((int64_t[]){1291, 1290, 1304}, (int64_t[]){1, 1291, 1291 * 1290}, 1);
    big_box((int64_t[]){1, 2, (INT64_C(1) << 30) + 8}, (int64_t[]){1, (INT64_C(1) << 30) + 8, 1},
            2);
}

T_CASE(pageable_host_memory_is_refused)
{
    const int64_t extent[3] = {1, 1, 8}, stride[3] = {8, 8, 1};
    unsigned char host[8] = {0}, *device = gpu_put(NULL, 8), *pinned;
    colo_box_t bad = box(host, extent, stride), good = box(device, extent, stride);
    assert_fails(gpu_device()->box_copy(&good, &bad, 1, NULL), COLO_ERR_ARG, "copy: source: ");
    assert_fails(gpu_device()->box_copy(&bad, &good, 1, NULL), COLO_ERR_ARG,
                 "is host memory that CUDA does not know");
    assert_fails(gpu_device()->box_sum(&good, &bad, 1, COLO_F32, NULL), COLO_ERR_ARG,
                 "sum: addend");
    /* of a list the first box that is there: neither an empty one nor zeros without a source */
    colo_box_t none = box(host, (int64_t[]){1, 0, 8}, stride), zeros = box(NULL, extent, stride);
    colo_box_t to[] = {none, good, good}, from[] = {none, zeros, bad};
    assert_fails(gpu_device()->box_list(to, from, 3, 1, NULL), COLO_ERR_ARG, "copy: source: ");
    assert_fails(gpu_device()->box_list((colo_box_t[]){none, bad}, to, 2, 1, NULL), COLO_ERR_ARG,
                 "copy: destination: ");
    assert_fails(gpu_device()->box_shift((colo_box_t[]){none, bad}, to, 2, -1, NULL), COLO_ERR_ARG,
                 "shift: destination: ");
    assert_cuda(cudaMallocHost((void **)&pinned, 8));
    memset(pinned, 7, 8);
    bad.data = pinned;
    assert_ok(gpu_device()->box_copy(&good, &bad, 1, NULL));
    gpu_get(host, device, 8);
    assert_memory_equal(host, pinned, 8);
    assert_cuda(cudaFreeHost(pinned));
    gpu_free(device);
}

/* ---- sums ---- */

static const colo_dtype_t floats[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};

/* The sum of one element by the stated rule, converted by arithmetic on exponents (loss_case.c). */
static double sum_rule(colo_dtype_t dtype, const double *v, int n)
{
    if (dtype == COLO_F64) {
        double s = v[0];
        for (int i = 1; i < n; i++)
            s += v[i];
        return s;
    }
    float s = (float)v[0];
    for (int i = 1; i < n; i++)
        s += (float)v[i];
    return loss_round(dtype, s);
}

/* A destination and its addends, which may have dtypes of their own. */
typedef struct sum {
    int n;
    int64_t offset[COLO_MAX_ADDENDS + 1];
    colo_box_t box[COLO_MAX_ADDENDS + 1]; /* the destination, then the addends */
    colo_dtype_t dtype[COLO_MAX_ADDENDS + 1];
} sum_t;

/* Draws a sum of @n addends behind @capacity bytes of the arena; returns where it ends. @dtype:
 * everyone's, NULL: any. */
static int64_t draw_sum(sum_t *m, int n, const colo_dtype_t *dtype, int64_t capacity)
{
    static const colo_dtype_t narrow[] = {COLO_F32, COLO_BF16, COLO_F16};
    const bool wild = t_below(&rng, dtype ? 2 : 3) == 0, f64 = t_below(&rng, 16) == 0;
    int64_t extent[3], stride[3];
    draw_extent(extent);
    int64_t span = draw_strides(extent, stride);
    m->n = n;
    for (int i = 0; i <= n; i++) {
        m->dtype[i] = dtype ? *dtype : f64 ? COLO_F64 : narrow[t_below(&rng, 3)];
        const int64_t elem = (int64_t)colo_dtype_size(m->dtype[i]);
        if (wild)
            span = draw_strides(extent, stride);
        m->box[i] = box(NULL, extent, stride);
        m->offset[i] = capacity + (wild ? elem * t_below(&rng, 8) : 0);
        capacity = (m->offset[i] + span * elem + 63) & ~INT64_C(63);
    }
    if (t_below(&rng, 3) == 0) { /* in place of an addend */
        const int64_t q = 1 + t_below(&rng, n);
        m->box[0] = m->box[q];
        m->dtype[0] = m->dtype[q];
        m->offset[0] = m->offset[q];
    }
    return capacity;
}

static int64_t index_in(const colo_box_t *b, int64_t i, int64_t j, int64_t k)
{
    return i * b->stride[0] + j * b->stride[1] + k * b->stride[2];
}

/* Fills the addends, or adds them up in place, by the rule. Of random bytes only what is not finite
 * is filled. */
enum fill { RANDOM, MODERATE, ADD };
static void fill_sum(const sum_t *m, unsigned char *arena, enum fill what)
{
    const int64_t *e = m->box[0].extent;
    double v[COLO_MAX_ADDENDS];
    for (int64_t i = 0; i < e[0]; i++)
        for (int64_t j = 0; j < e[1]; j++)
            for (int64_t k = 0; k < e[2]; k++) {
                for (int a = 1; a <= m->n; a++) {
                    const colo_dtype_t dtype = m->dtype[a];
                    unsigned char *at = arena + m->offset[a];
                    const int64_t n = index_in(&m->box[a], i, j, k);
                    v[a - 1] = loss_load(dtype, at, n);
                    if (what == MODERATE || (what == RANDOM && !isfinite(v[a - 1])))
                        loss_store(
                            dtype, at, n,
                            loss_round(dtype, loss_round(COLO_F32, 8 * t_uniform(&rng) - 4)));
                }
                if (what == ADD)
                    loss_store(m->dtype[0], arena + m->offset[0], index_in(&m->box[0], i, j, k),
                               sum_rule(m->dtype[0], v, m->n));
            }
}

static void place_sum(sum_t *m, unsigned char *arena)
{
    for (int a = 0; a <= m->n; a++)
        m->box[a].data = arena + m->offset[a];
}

/* @n sums of at most @most addends in one call; or one of @most of @dtype. @raw: any finite bits,
 * against the host's table; else moderate values, against the rule. */
static void run_sums(int n, int most, const colo_dtype_t *dtype, bool raw)
{
    COLO_AUTOFREE sum_t *m = calloc((size_t)n, sizeof *m);
    COLO_AUTOFREE colo_mixed_sum_t *sums = calloc((size_t)n, sizeof *sums);
    const int64_t off = t_below(&rng, 6) == 0; /* a byte */
    int64_t capacity = 0;
    for (int i = 0; i < n; i++)
        capacity = draw_sum(&m[i], dtype ? most : 1 + (int)t_below(&rng, most), dtype, capacity);
    COLO_AUTOFREE unsigned char *host = random_bytes(capacity), *got = malloc((size_t)capacity);
    for (int i = 0; i < n; i++)
        fill_sum(&m[i], host, raw ? RANDOM : MODERATE);
    GPU_AUTOFREE unsigned char *device = gpu_put(NULL, (size_t)(capacity + off));
    assert_cuda(t_to_device(device + off, host, (size_t)capacity));
    for (int i = 0; i < n; i++) {
        place_sum(&m[i], device + off);
        sums[i] = (colo_mixed_sum_t){.to = m[i].box[0],
                                     .from = m[i].box + 1,
                                     .from_dtype = m[i].dtype + 1,
                                     .dtype = m[i].dtype[0],
                                     .n = m[i].n};
    }
    assert_ok(dtype ? gpu_device()->box_sum(m->box, m->box + 1, most, *dtype, NULL)
                    : gpu_device()->box_sums(sums, n, NULL));
    gpu_get(got, device + off, (size_t)capacity);
    place_sum(m, host);
    if (raw)
        assert_ok(colo_device_host.box_sum(m->box, m->box + 1, most, *dtype, NULL));
    for (int i = 0; i < n && !raw; i++)
        fill_sum(&m[i], host, ADD);
    for (int64_t i = 0; i < capacity; i++)
        if (got[i] != host[i])
            fail_msg("%d sums of up to %d addends of %s: byte %lld is %02x, expected %02x (%s, "
                     "destination at %lld, extents %d %d %d, strides %d %d %d, pointers + %d)",
                     n, most, dtype ? colo_dtype_name(*dtype) : "any dtype", (long long)i, got[i],
                     host[i], raw ? "raw bits" : "moderate", (long long)m->offset[0],
                     (int)m->box->extent[0], (int)m->box->extent[1], (int)m->box->extent[2],
                     (int)m->box->stride[0], (int)m->box->stride[1], (int)m->box->stride[2],
                     (int)off);
}

T_CASE(sums_follow_the_rule_to_the_bit)
{
    static const int counts[] = {1, 2, 3, 8, 9, 31, 256};
    for (int64_t i = 0; i < t_scaled(112); i++)
        run_sums(1, counts[i / 4 % 7], &floats[i % 4], false);
}

T_CASE(sums_of_any_finite_bits_are_the_hosts)
{
    static const int counts[] = {1, 2, 4, 8, 12};
    for (int64_t i = 0; i < t_scaled(80); i++)
        run_sums(1, counts[i / 4 % 5], &floats[i % 4], true);
}

T_CASE(lists_of_sums_of_several_dtypes_follow_the_rule_to_the_bit)
{
    static const int sizes[][2] = {{1, 1}, {1, 8}, {8, 3}, {9, 8}, {70, 4}, {5, 12}, {2, 256}};
    for (int64_t i = 0; i < t_scaled(112); i++)
        run_sums(sizes[i % 7][0], sizes[i % 7][1], NULL, false);
}

T_CASE(sums_of_nothing_or_of_integers_are_refused)
{
    const int64_t extent[3] = {1, 1, 4}, none[3] = {0, 1, 4}, stride[3] = {4, 4, 1};
    GPU_AUTOFREE void *device = gpu_put(NULL, 16);
    colo_box_t b = box(device, extent, stride), e = box(NULL, none, stride);
    assert_fails(gpu_device()->box_sum(&b, &b, 0, COLO_F32, NULL), COLO_ERR_ARG, "0 addends");
    assert_fails(gpu_device()->box_sum(&b, &b, 257, COLO_F32, NULL), COLO_ERR_ARG, "257 addends");
    assert_fails(gpu_device()->box_sum(&b, &b, 1, COLO_I32, NULL), COLO_ERR_ARG, "float dtype");
    assert_ok(gpu_device()->box_sum(&e, &e, 1, COLO_F32, NULL));
    assert_ok(gpu_device()->box_copy(&e, &e, 4, NULL));
    assert_ok(gpu_device()->box_list(NULL, NULL, 0, 4, NULL));
}

T_MAIN_AFTER(gpu_need(1), rng = t_seed(), "gpu/box")
