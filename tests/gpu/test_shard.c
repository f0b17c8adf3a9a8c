/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_shard.c - what the partition guarantees on a GPU alone: few launches, graphs that replay,
 * offsets past 2^31, addresses at any byte, pointers that are refused before anything is written.
 * That values arrive is test_partition.c's, which runs on GPUs, too.
 */
#include "gpu/gpu.h"

#include "perf/probe.h"
#include "loss/loss_case.h"

enum { SEGMENTS = 1000, LONGEST = 12, H = 3 };

/* ---- launches and graphs ---- */

typedef struct batch {
    colo_partition_t part;
    int64_t cu[SEGMENTS + 1];
    colo_tensor_t x, local, back, tokens;
} batch_t;

/* All three calls, the tokens in place. */
static void calls(const batch_t *b, int which, cudaStream_t stream)
{
    if (which & 1)
        assert_ok(colo_partition_shard(&b->part, &b->x, 0, &b->local, stream));
    if (which & 2)
        assert_ok(colo_partition_unshard(&b->part, &b->local, 0, &b->back, stream));
    if (which & 4)
        assert_ok(colo_partition_next_token(&b->part, &b->tokens, -1, &b->tokens, stream));
}

static cudaGraph_t capture(const batch_t *b, int which, cudaStream_t stream, size_t *nodes)
{
    cudaGraph_t graph;
    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    calls(b, which, stream);
    assert_cuda(cudaStreamEndCapture(stream, &graph));
    assert_cuda(cudaGraphGetNodes(graph, NULL, nodes));
    return graph;
}

static size_t launches(const batch_t *b, int which, cudaStream_t stream)
{
    size_t nodes;
    assert_cuda(cudaGraphDestroy(capture(b, which, stream, &nodes)));
    return nodes;
}

static void make(batch_t *b, bool packed)
{
    uint64_t rng = t_seed();
    for (int j = 0; j < SEGMENTS; j++)
        b->cu[j + 1] = b->cu[j] + 4 * (1 + t_below(&rng, LONGEST / 4));
    int64_t s = b->cu[SEGMENTS];
    b->part =
        (colo_partition_t){COLO_PARTITION_INIT, .cp = 2, .cp_rank = 1, .tp = 1, .positions = s};
    if (packed) {
        b->part.segments = SEGMENTS;
        b->part.cu_padded = b->cu;
    }
    void *p[4];
    for (int i = 0; i < 4; i++)
        p[i] = gpu_put(NULL, (size_t)(s * H) * 8);
    b->x = colo_tensor_cuda(p[0], COLO_F32, 0, 2, (int64_t[]){s, H});
    b->local = colo_tensor_cuda(p[1], COLO_F32, 0, 2, (int64_t[]){s / 2, H});
    b->back = colo_tensor_cuda(p[2], COLO_F32, 0, 2, (int64_t[]){s, H});
    b->tokens = colo_tensor_cuda(p[3], COLO_I64, 0, 1, &s);
    calls(b, 7, NULL); /* kernels are loaded when they are first launched */
    assert_cuda(cudaDeviceSynchronize());
}

static void drop(batch_t *b)
{
    gpu_free(b->x.data);
    gpu_free(b->local.data);
    gpu_free(b->back.data);
    gpu_free(b->tokens.data);
}

T_CASE(calls_take_few_launches)
{
    COLO_AUTOFREE batch_t *b = calloc(1, sizeof *b);
    cudaStream_t stream;
    assert_non_null(b);
    assert_cuda(cudaStreamCreate(&stream));
    make(b, false);
    for (int which = 1; which < 8; which *= 2)
        assert_int_equal(launches(b, which, stream), 1);
    drop(b);
    make(b, true); /* rank 1 of 2 has one run a segment, in two boxes; two gaps, in one box */
    assert_int_equal(launches(b, 1, stream), (2 * SEGMENTS + 255) / 256);
    assert_int_equal(launches(b, 2, stream), (3 * SEGMENTS + 1 + 255) / 256);
    assert_int_equal(launches(b, 4, stream), (SEGMENTS + 255) / 256);
    drop(b);
    assert_cuda(cudaStreamDestroy(stream));
}

T_CASE(a_graph_replays_with_other_values)
{
    COLO_AUTOFREE batch_t *b = calloc(1, sizeof *b);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t nodes;
    assert_non_null(b);
    assert_cuda(cudaStreamCreate(&stream));
    make(b, true);
    int64_t s = b->part.positions;
    COLO_AUTOFREE float *x = malloc((size_t)(s * H) * sizeof *x),
                        *got = malloc((size_t)(s * H) * sizeof *got);
    COLO_AUTOFREE int64_t *tokens = malloc((size_t)s * sizeof *tokens),
                          *is = malloc((size_t)s * sizeof *is);
    COLO_AUTOFREE int *mine = calloc((size_t)s, sizeof *mine);
    assert_true(x && got && tokens && is && mine);
    for (int64_t i = 0; i < s / 2; i++)
        mine[colo_partition_index(&b->part, i)] = 1;
    graph = capture(b, 7, stream, &nodes);
    assert_cuda(cudaGraphInstantiate(&exec, graph, 0));
    for (int replay = 0; replay < 3; replay++) {
        for (int64_t i = 0; i < s * H; i++)
            x[i] = (float)(i % 100003 + replay);
        for (int64_t i = 0; i < s; i++)
            tokens[i] = 10 * i + replay;
        assert_cuda(t_to_device(b->x.data, x, (size_t)(s * H) * 4));
        assert_cuda(t_to_device(b->tokens.data, tokens, (size_t)s * 8));
        assert_cuda(cudaMemset(b->back.data, 0xa5, (size_t)(s * H) * 4));
        assert_cuda(cudaGraphLaunch(exec, stream));
        gpu_get(got, b->back.data, (size_t)(s * H) * 4);
        for (int64_t i = 0; i < s * H; i++)
            assert_true(got[i] == (mine[i / H] ? x[i] : 0));
        gpu_get(is, b->tokens.data, (size_t)s * 8);
        for (int64_t i = 0, j = 0; i < s; i++) {
            j += i == b->cu[j + 1];
            assert_int_equal(is[i], i + 1 == b->cu[j + 1] ? -1 : 10 * (i + 1) + replay);
        }
    }
    assert_cuda(cudaGraphExecDestroy(exec));
    assert_cuda(cudaGraphDestroy(graph));
    assert_cuda(cudaStreamDestroy(stream));
    drop(b);
}

/* ---- sizes and addresses ---- */

/* [2, S, 3] bytes, more than 2^32 in all: what was moved twice is compared whole, and single
 * elements with where they come from. */
T_CASE(offsets_past_two_to_the_31_arrive)
{
    const int64_t s = INT64_C(3) << 28, n = 2 * s * H;
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .cp_rank = 0, .tp = 1, .positions = s};
    GPU_AUTOFREE unsigned char *x = NULL, *local = NULL, *back = NULL, *again = NULL;
    unsigned long long *wrong, found;
    uint64_t rng = t_seed();
    if (t_scaled(100) < 100)
        skip(); /* a sanitizer would take minutes */
    assert_true(n > INT64_C(1) << 32);
    assert_cuda(cudaMalloc((void **)&x, (size_t)n));
    assert_cuda(cudaMalloc((void **)&back, (size_t)n));
    assert_cuda(cudaMalloc((void **)&local, (size_t)n / 2));
    assert_cuda(cudaMalloc((void **)&again, (size_t)n / 2));
    assert_cuda(cudaMalloc((void **)&wrong, 8));
    assert_cuda(cudaMemset(wrong, 0, 8));
    assert_cuda(colo_k_probe_fill(x, n, 1, t_rand(&rng), NULL));
    assert_cuda(cudaMemset(back, 0xa5, (size_t)n));
    colo_tensor_t tx = colo_tensor_cuda(x, COLO_U8, 0, 3, (int64_t[]){2, s, H});
    colo_tensor_t tb = colo_tensor_cuda(back, COLO_U8, 0, 3, (int64_t[]){2, s, H});
    colo_tensor_t tl = colo_tensor_cuda(local, COLO_U8, 0, 3, (int64_t[]){2, s / 2, H});
    colo_tensor_t ta = colo_tensor_cuda(again, COLO_U8, 0, 3, (int64_t[]){2, s / 2, H});
    assert_ok(colo_partition_shard(&p, &tx, 1, &tl, NULL));
    assert_ok(colo_partition_unshard(&p, &tl, 1, &tb, NULL));
    assert_ok(colo_partition_shard(&p, &tb, 1, &ta, NULL));
    assert_cuda(colo_k_probe_diff(local, again, n / 2, wrong, NULL));
    gpu_get(&found, wrong, 8);
    assert_int_equal(found, 0);
    for (int k = 0; k < 1000; k++) {
        unsigned char is, want;
        int64_t row = t_below(&rng, 2), offset = k < 2 ? k * (s - 1) : t_below(&rng, s);
        int64_t i = (row * s + offset) * H + t_below(&rng, H);
        bool mine = offset < s / 4 || offset >= s / 4 * 3;
        assert_cuda(cudaMemcpy(&want, x + i, 1, cudaMemcpyDeviceToHost));
        assert_cuda(cudaMemcpy(&is, back + i, 1, cudaMemcpyDeviceToHost));
        assert_int_equal(is, mine ? want : 0);
    }
    gpu_free(wrong);
}

/* From any element on, not only where 16 bytes begin; in the middle of an element, refused. */
T_CASE(shards_move_from_any_element_and_from_nowhere_else)
{
    float x[8][H], want[8][H] = {{0}}, got[8][H];
    unsigned char *mem = gpu_put(NULL, 512), before[513], after[513];
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .cp_rank = 1, .tp = 1, .positions = 8};
    for (int i = 0; i < 8; i++)
        for (int h = 0; h < H; h++)
            x[i][h] = (float)(1 + 10 * i + h);
    memcpy(want[2], x[2], 4 * sizeof x[0]);
    assert_cuda(t_to_device(mem + 4, x, sizeof x));
    colo_tensor_t g = colo_tensor_cuda(mem + 4, COLO_F32, 0, 2, (int64_t[]){8, H});
    colo_tensor_t l = colo_tensor_cuda(mem + 260, COLO_F32, 0, 2, (int64_t[]){4, H});
    assert_ok(colo_partition_shard(&p, &g, 0, &l, NULL));
    assert_ok(colo_partition_unshard(&p, &l, 0, &g, NULL));
    gpu_get(got, mem + 4, sizeof got);
    assert_memory_equal(got, want, sizeof want);
    gpu_get(before, mem, 512);
    colo_tensor_t odd = g;
    odd.data = mem + 1;
    assert_fails(colo_partition_shard(&p, &odd, 0, &l, NULL), COLO_ERR_ARG,
                 "is no multiple of 4 bytes, an element");
    assert_fails(colo_partition_unshard(&p, &l, 0, &odd, NULL), COLO_ERR_ARG,
                 "is no multiple of 4 bytes, an element");
    g = colo_tensor_cuda(mem + 4, COLO_I64, 0, 1, (int64_t[]){8});
    assert_fails(colo_partition_next_token(&p, &g, -1, &g, NULL), COLO_ERR_ARG,
                 "is no multiple of 8 bytes, an element");
    gpu_get(after, mem, 512);
    assert_memory_equal(after, before, 512);
    gpu_free(mem);
}

T_CASE(memory_that_kernels_cannot_use_is_refused)
{
    int64_t host[8], sentinel[8], *pinned, *there = gpu_put(NULL, sizeof host), got[8];
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .tp = 1, .positions = 8};
    memset(host, 0xa5, sizeof host);
    memset(sentinel, 0xa5, sizeof sentinel);
    colo_tensor_t g = colo_tensor_cuda(there, COLO_I64, 0, 1, (int64_t[]){8});
    colo_tensor_t l = colo_tensor_cuda(host, COLO_I64, 0, 1, (int64_t[]){4});
    colo_tensor_t h = colo_tensor_cuda(host, COLO_I64, 0, 1, (int64_t[]){8});
    assert_fails(colo_partition_shard(&p, &g, 0, &l, NULL), COLO_ERR_ARG, "partition: local: ");
    assert_fails(colo_partition_unshard(&p, &l, 0, &g, NULL), COLO_ERR_ARG,
                 "is host memory that CUDA does not know");
    assert_fails(colo_partition_next_token(&p, &g, -1, &h, NULL), COLO_ERR_ARG,
                 "partition: targets: ");
    h = colo_tensor_cuda(there, COLO_I64, 7, 1, (int64_t[]){8});
    assert_fails(colo_partition_next_token(&p, &h, -1, &h, NULL), COLO_ERR_ARG,
                 "a tensor of device 7, the current device is 0");
    assert_memory_equal(host, sentinel, sizeof sentinel);
    gpu_get(got, there, sizeof got);
    assert_memory_equal(got, sentinel, sizeof sentinel);
    assert_cuda(cudaMallocHost((void **)&pinned, sizeof host)); /* which kernels reach */
    for (int i = 0; i < 8; i++)
        pinned[i] = i;
    h = colo_tensor_cuda(pinned, COLO_I64, 0, 1, (int64_t[]){8});
    assert_ok(colo_partition_next_token(&p, &h, -1, &g, NULL));
    gpu_get(got, there, sizeof got);
    for (int i = 0; i < 8; i++)
        assert_int_equal(got[i], i < 7 ? i + 1 : -1);
    assert_cuda(cudaFreeHost(pinned));
    gpu_free(there);
}

T_MAIN_IF(gpu_need(1), "gpu/shard")
