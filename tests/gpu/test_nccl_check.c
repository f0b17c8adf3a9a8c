/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_check.c - what COLO_CHECK=2 finds on GPUs, and memory and streams that a bridge
 * refuses: replicas that differ, gradients that were promised zero, host pointers, another device's
 * memory and stream, a capture on one rank. Every rank hears of it, outputs are untouched, the
 * bridge works afterwards. Also the mean of a loss that lives on devices, and losses of ranks that
 * ask for different things, which is NaN there.
 */
#include "gpu/gpu_ranks.h"

#include "core/error.h"

#include <math.h>

enum { RANKS = 2 };
static bool one_device;

/* ---- declared preconditions ---- */

typedef struct contract {
    t_case_t c;
    bool backward;
    int64_t rank, ib, is, ih; /* the element that breaks it */
    const char *words[3];     /* in the error message of the rank that says CONTRACT */
    bool on_all;              /* every rank says CONTRACT; else the others say PEER */
} contract_t;

static colo_status_t contract_rank(t_gpu_rank_t *r, void *arg)
{
    const contract_t *p = arg;
    const t_case_t *c = &p->c;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_ENDS(ref_part_free) ref_part_t part = {0};
    rank_try(colo_comm_set_check(r->gpus, 2));
    rank_try(t_case_bridge(&bridge, c, r->gpus, COLO_MEM_CUDA));
    ref_part_make(&part, p->backward ? &c->dst : &c->src, c->shape, r->rank,
                  p->backward && c->output == COLO_OUTPUT_FULL_SEQ);
    for (int step = 0; step < 2; step++) { /* broken, then kept */
        T_GPU_CALL(k);
        rank_try(t_gpu_call_make(&k, r, c, 0, p->backward));
        rank_try(t_gpu_quiet(r));
        if (!step && r->rank == p->rank) {
            float bad = 7.5f;
            const unsigned char *there =
                t_buffer_at(&k.in.host, c->axes, part.ns, p->ib, p->is, p->ih);
            rank_cuda(t_to_device(k.in.data + (there - k.in.host.raw), &bad, sizeof bad));
        }
        const colo_status_t st = t_gpu_call_run(&k, bridge, r->stream);
        const char *said = t_text("%.399s", colo_last_error());
        rank_try(t_gpu_quiet(r));
        if (step) {
            rank_try(st);
            rank_try(t_gpu_call_compare(&k));
        } else {
            bool here = p->on_all || r->rank == p->rank;
            if (st != (here ? COLO_ERR_CONTRACT : COLO_ERR_PEER))
                return t_rank_fail(__FILE__, __LINE__, said);
            for (int i = 0; here && i < 3; i++)
                if (p->words[i] && !strstr(said, p->words[i]))
                    return t_rank_fail(__FILE__, __LINE__, said);
            rank_try(t_download(r, &k.out));
            rank_check(untouched(&k.out.host));
            rank_check(colo_comm_check(r->gpus) == COLO_OK);
        }
    }
    return COLO_OK;
}

static void run_contract(const contract_t *p)
{
    contract_t copy = *p;
    colo_status_t st = t_gpus_run(RANKS, false, contract_rank, &copy);
    if (st < 0)
        fail_msg("%s: %s", t_case_text(&copy.c), colo_last_error());
}

T_CASE(replicas_that_differ_break_a_contract_that_names_them)
{
    t_case_t c = t_between("tp=2,dp=1", "dp=2", 4, 8, 3); /* ranks 0 and 1 hold the same x */
    run_contract(&(contract_t){c, false, 1, 1, 3, 2, {"0", "1", "x"}, true});
    c.stride = T_SPREAD;
    c.axes = "sbh";
    run_contract(&(contract_t){c, false, 0, 3, 7, 0, {"0", "1", "x"}, true});
    c = t_between("dp=2", "tp=2,dp=1", 4, 8, 3); /* and the same d_y */
    run_contract(&(contract_t){c, true, 1, 0, 5, 1, {"0", "1", "d_y"}, true});
}

T_CASE(a_disjoint_gradient_that_is_not_zero_names_row_and_rank)
{
    t_case_t c = t_between("dp=2", "tp=1,cp=2,dp=1", 4, 8, 3);
    c.grad = COLO_GRAD_DISJOINT;
    /* zigzag of 8 rows over cp 2: rank 0 owns rows 0 1 6 7, rank 1 rows 2 3 4 5 */
    run_contract(
        &(contract_t){c, true, 0, 1, 3, 2, {"rank 0", "row 3 of sample 1", "DISJOINT"}, false});
    c.axes = "sbh";
    c.stride = T_REVERSED;
    run_contract(
        &(contract_t){c, true, 1, 3, 6, 0, {"rank 1", "row 6 of sample 3", "DISJOINT"}, false});
    c.axes = "th";
    c.stride = T_PADDED;
    run_contract(
        &(contract_t){c, true, 1, 0, 0, 0, {"rank 1", "row 0 of sample 0", "DISJOINT"}, false});
}

/* ---- memory and streams of elsewhere ---- */

enum { HOST_POINTER, OTHER_DEVICE, OTHER_STREAM, WRONG_LABEL, IN_A_CAPTURE, PLACES };

struct place {
    int kind, level;
    bool output;
};

static colo_status_t place_rank(t_gpu_rank_t *r, void *arg)
{
    static const char *const words[] = {"is host memory", "is memory of device",
                                        "the stream is one of device", "a tensor of device",
                                        "captured: rank 1 of"};
    const struct place *p = arg;
    t_case_t c = t_between("dp=2", "tp=2,dp=1", 4, 8, 3);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    const bool culprit = r->rank == 1, captures = p->kind == IN_A_CAPTURE;
    cudaStream_t stream = r->stream;
    cudaGraph_t graph;
    void *far = NULL, *near = calloc(1, 4096);
    rank_try(colo_comm_set_check(r->gpus, p->level));
    rank_try(t_case_bridge(&bridge, &c, r->gpus, COLO_MEM_CUDA));
    rank_try(t_gpu_call_make(&k, r, &c, 0, false));
    const int32_t other = r->device == 0; /* the label of a device that is not this rank's */
    if (culprit && r->device != 0) {      /* something of device 0 */
        rank_cuda(cudaSetDevice(0));
        rank_cuda(cudaMalloc(&far, 4096));
        if (p->kind == OTHER_STREAM)
            rank_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        rank_cuda(cudaSetDevice(r->device));
    }
    rank_try(t_gpu_quiet(r));
    colo_tensor_t tx = k.in.t, ty = k.out.t, *bad = p->output ? &ty : &tx;
    if (culprit && p->kind == HOST_POINTER)
        bad->data = near;
    if (culprit && p->kind == OTHER_DEVICE)
        bad->data = far;
    if (culprit && p->kind == WRONG_LABEL)
        bad->device = other;
    if (culprit && captures)
        rank_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    colo_status_t st = colo_bridge_forward(bridge, &tx, &ty, stream);
    const char *said = t_text("%.399s", colo_last_error());
    if (culprit && captures) {
        rank_cuda(cudaStreamEndCapture(stream, &graph));
        rank_cuda(cudaGraphDestroy(graph));
    }
    if (culprit &&
        (st != (captures ? COLO_ERR_MISMATCH : COLO_ERR_ARG) || !strstr(said, words[p->kind])))
        return t_rank_fail(__FILE__, __LINE__, said);
    if (p->level == 2) {
        rank_check(culprit || st == (captures ? COLO_ERR_MISMATCH : COLO_ERR_PEER));
        rank_check(colo_comm_check(r->gpus) == COLO_OK);
        rank_try(t_gpu_quiet(r));
        rank_try(t_download(r, &k.out));
        rank_check(untouched(&k.out.host));
        rank_try(t_gpu_call_run(&k, bridge, r->stream));
        rank_try(t_gpu_quiet(r));
        rank_try(t_gpu_call_compare(&k));
    } else {
        (void)cudaStreamSynchronize(r->stream); /* torn down: it ends */
        rank_check(colo_comm_check(r->gpus) < 0);
    }
    if (culprit && p->kind == OTHER_STREAM)
        cudaStreamDestroy(stream);
    cudaFree(far);
    free(near);
    return COLO_OK;
}

T_CASE(memory_and_streams_of_elsewhere_are_refused_on_all_ranks)
{
    for (int kind = 0; kind < PLACES; kind++)
        for (int output = 0; output < 2; output++) {
            struct place p = {kind, 2, output != 0};
            if (one_device && (kind == OTHER_DEVICE || kind == OTHER_STREAM))
                continue; /* there is no other */
            if (t_gpus_run(RANKS, false, place_rank, &p) < 0)
                fail_msg("kind %d: %s", kind, colo_last_error());
        }
}

T_CASE(below_level_2_the_comm_is_dead_and_no_rank_waits)
{
    struct place p = {HOST_POINTER, 1, false};
    assert_ok(t_gpus_run(RANKS, false, place_rank, &p));
}

/* ---- views that begin anywhere ---- */

T_CASE_ON_GPUS(RANKS, a_misaligned_view_is_carried_exactly)
{
    t_case_t c = t_between("dp=2", "tp=1,cp=2,dp=1", 4, 8, 13);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    c.dtype = COLO_BF16;
    rank_try(t_case_bridge(&bridge, &c, r->gpus, COLO_MEM_CUDA));
    for (size_t shift = 0; shift <= 14; shift += 2)
        for (int pass = 0; pass < 2; pass++) {
            T_ENDS(t_placed_free) t_placed_t in = {0}, out = {0};
            void *moved[2];
            rank_try(t_place(r, &c, pass ? T_DY : T_X, 0, true, &in));
            rank_try(t_place(r, &c, pass ? T_DX : T_Y, 0, false, &out));
            rank_cuda(cudaMalloc(&moved[0], in.host.bytes + 16));
            rank_cuda(cudaMalloc(&moved[1], out.host.bytes + 16));
            rank_cuda(t_to_device((char *)moved[0] + shift, in.host.raw, in.host.bytes));
            rank_cuda(t_to_device((char *)moved[1] + 14 - shift, out.host.raw, out.host.bytes));
            colo_tensor_t a = in.t, b = out.t;
            a.data = (char *)moved[0] + shift + ((char *)in.t.data - in.data);
            b.data = (char *)moved[1] + 14 - shift + ((char *)out.t.data - out.data);
            rank_try(t_gpu_quiet(r));
            rank_try(pass ? colo_bridge_backward(bridge, &a, &b, r->stream)
                          : colo_bridge_forward(bridge, &a, &b, r->stream));
            rank_try(t_gpu_quiet(r));
            rank_cuda(cudaMemcpy(out.host.raw, (char *)moved[1] + 14 - shift, out.host.bytes,
                                 cudaMemcpyDeviceToHost));
            rank_try(t_case_compare(&c, pass ? T_DX : T_Y, r->rank, 0, &out.host));
            cudaFree(moved[0]);
            cudaFree(moved[1]);
        }
    return COLO_OK;
}

/* ---- the mean of a loss ---- */

enum { TOKENS = 5000 };

static double value_of(int32_t rank, int i)
{
    return (double)((i * 7 + rank * 13) % 257) / 8; /* every order of adding gives the same */
}

static bool counts(int32_t rank, int i)
{
    return (i + rank) % (rank + 2) == 0;
}

T_CASE_ON_GPUS(RANKS, the_mean_over_ranks_of_values_on_devices_is_the_serial_one)
{
    double num = 0;
    int64_t den = 0;
    colo_loss_reduced_t got = {0, 0, 0};
    for (int32_t k = 0; k < r->size; k++)
        for (int i = 0; i < TOKENS; i++)
            if (counts(k, i)) {
                num += value_of(k, i);
                den++;
            }
    for (int d = 0; d < 2; d++) {
        static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64};
        const size_t elem = colo_dtype_size(dtypes[d]);
        double f64[TOKENS];
        float f32[TOKENS];
        uint8_t mask[TOKENS];
        void *values, *dmask;
        for (int i = 0; i < TOKENS; i++) {
            mask[i] = counts(r->rank, i);
            f64[i] = mask[i] ? value_of(r->rank, i) : NAN;
            f32[i] = (float)f64[i];
        }
        rank_cuda(cudaMalloc(&values, elem * TOKENS));
        rank_cuda(cudaMalloc(&dmask, TOKENS));
        rank_cuda(cudaMemcpyAsync(values, d ? (void *)f64 : (void *)f32, elem * TOKENS,
                                  cudaMemcpyHostToDevice, r->stream));
        rank_cuda(cudaMemcpyAsync(dmask, mask, TOKENS, cudaMemcpyHostToDevice, r->stream));
        rank_try(colo_loss_reduce(values, dtypes[d], dmask, TOKENS, r->gpus, &got, r->stream));
        rank_check(got.num == num && got.den == den && got.value == num / (double)den);
        rank_try(colo_loss_reduce(NULL, dtypes[d], NULL, 0, r->gpus, &got, r->stream));
        rank_check(got.num == 0 && got.den == 0 && got.value == 0);
        rank_try(t_gpu_quiet(r));
        cudaFree(values);
        cudaFree(dmask);
    }
    colo_comm_stats_t l;
    t_comm_stats(r->gpus, &l);
    rank_check(l.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS] == 4);
    rank_try(colo_comm_set_check(r->gpus, 2)); /* host memory on one rank: told to all */
    float *d, host[4] = {0};
    rank_cuda(cudaMalloc((void **)&d, 16));
    colo_status_t st =
        colo_loss_reduce(r->rank == 0 ? host : d, COLO_F32, NULL, 4, r->gpus, &got, r->stream);
    rank_check(st == (r->rank == 0 ? COLO_ERR_ARG : COLO_ERR_PEER));
    cudaFree(d);
    return colo_comm_check(r->gpus);
}

/* ---- losses of ranks that differ: after the first call the host does not look any more ---- */

enum { VOCAB = 8, SHARD = VOCAB / 2, K = 2, ROWS = 3, FLOATS = 256, WORKSPACE = 8192 };

struct loss_call {
    char *memory; /* zeroed, on the device: what follows, 256 bytes each; then the workspace */
    colo_tensor_t logits, targets;
    float *out[2];
    double *numbers;
    void *workspace;
};

static colo_status_t loss_make(struct loss_call *k, const t_gpu_rank_t *r)
{
    float logits[ROWS * SHARD];
    for (int i = 0; i < ROWS * SHARD; i++)
        logits[i] = (float)((i + r->rank) % 5) / 4;
    rank_cuda(cudaMalloc((void **)&k->memory, 8 * 256 + WORKSPACE));
    rank_cuda(cudaMemsetAsync(k->memory, 0, 8 * 256 + WORKSPACE, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_cuda(t_to_device(k->memory, logits, sizeof logits));
    k->logits = colo_tensor_cuda(k->memory, COLO_F32, r->device, 2, (int64_t[]){ROWS, SHARD});
    k->targets = colo_tensor_cuda(k->memory + 256, COLO_I64, r->device, 1, (int64_t[]){ROWS});
    k->out[0] = (float *)(void *)(k->memory + 512);
    k->out[1] = (float *)(void *)(k->memory + 768);
    k->numbers = (double *)(void *)(k->memory + 1024);
    k->workspace = k->memory + 2048;
    return COLO_OK;
}

#define OUTPUT(k, r, i, ...) T_CUDA_TENSOR((k).out[i], COLO_F32, (r)->device, __VA_ARGS__)

/* Are the first @n numbers of both outputs NaN, or is none? */
static colo_status_t look(struct loss_call *k, t_gpu_rank_t *r, int n, bool nan)
{
    float got[FLOATS / 2];
    rank_try(t_gpu_quiet(r));
    for (int i = 0; i < 2; i++) {
        rank_cuda(cudaMemcpyAsync(got, k->out[i], sizeof(float) * (size_t)n, cudaMemcpyDeviceToHost,
                                  r->stream));
        rank_cuda(cudaStreamSynchronize(r->stream));
        for (int j = 0; j < n; j++)
            if ((isnan(got[j]) != 0) != nan)
                return colo_fail(COLO_ERR_STATE, "output %d: number %d is %g", i, j,
                                 (double)got[j]);
    }
    return COLO_OK;
}

T_CASE_ON_GPUS(RANKS, a_loss_of_ranks_with_other_configs_is_nan_on_devices)
{
    struct loss_call k;
    rank_try(loss_make(&k, r));
    for (int differs = 0; differs < 3;
         differs++) { /* in nothing, the temperature, the rows' order */
        const double temperature = differs == 1 && r->rank == 1 ? 2 : 1;
        const int64_t start = SHARD * r->rank, order = differs == 2 ? r->rank : 7;
        colo_logprob_config_t a = {COLO_LOGPROB_CONFIG_INIT, .want_entropy = true};
        a.logits = (colo_logits_options_t){VOCAB, start, temperature, 1, 0};
        a.order = order;
        const colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, &k.logits, &k.targets, NULL,
                                            NULL};
        const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = OUTPUT(k, r, 0, ROWS),
                                        .entropy = OUTPUT(k, r, 1, ROWS)};
        rank_try(
            colo_logprob_forward(&a, &batch, r->gpus, &out, NULL, NULL, k.workspace, r->stream));
        rank_try(look(&k, r, ROWS, differs));
        colo_topk_config_t b = {COLO_TOPK_CONFIG_INIT, .k = K, .topk = true};
        b.logits = a.logits;
        b.order = order;
        for (int i = 0; i < 2; i++)
            rank_try(colo_topk_forward(
                &b, &(colo_topk_batch_t){COLO_TOPK_BATCH_INIT, .logits = &k.logits}, r->gpus,
                &(colo_topk_out_t){COLO_TOPK_OUT_INIT, .logp = OUTPUT(k, r, i, ROWS, K)}, NULL,
                NULL, k.workspace, r->stream));
        rank_try(look(&k, r, ROWS * K, differs));
        colo_distill_config_t c = {COLO_DISTILL_CONFIG_INIT, .targets = COLO_DISTILL_LOGITS};
        c.logits = a.logits;
        c.order = order;
        const colo_distill_batch_t soft = {COLO_DISTILL_BATCH_INIT, &k.logits, &k.logits, NULL};
        const colo_distill_out_t divergences = {COLO_DISTILL_OUT_INIT, .ce = OUTPUT(k, r, 0, ROWS),
                                                .kl = OUTPUT(k, r, 1, ROWS)};
        rank_try(colo_distill_forward(&c, &soft, r->gpus, &divergences, NULL, NULL, k.workspace,
                                      r->stream));
        rank_try(look(&k, r, ROWS, differs));
    }
    rank_cuda(cudaFree(k.memory));
    return COLO_OK;
}

/* The first call and those at COLO_CHECK=2 tell all ranks which member differs. In others only the
 * ranks whose vocabulary is new compare, and must not wait for the rest. */
T_CASE_ON_GPUS(RANKS, ranks_whose_vocabularies_part_wait_for_none)
{
    static const struct {
        int64_t vocab[RANKS];
        colo_status_t st[RANKS];
        const char *member;
        int32_t level;
    } calls[] = {
        {{8, 7}, {COLO_ERR_MISMATCH, COLO_ERR_MISMATCH}, "vocab", 1},
        {{8, 8}, {COLO_OK, COLO_OK}, NULL, 1},
        {{8, 7}, {COLO_OK, COLO_ERR_MISMATCH}, NULL, 1},
        {{7, 7}, {COLO_OK, COLO_OK}, NULL, 1},
        {{8, 6}, {COLO_ERR_MISMATCH, COLO_ERR_MISMATCH}, "vocab", 2},
    };
    struct loss_call k;
    rank_try(loss_make(&k, r));
    for (int i = 0; i < 5; i++) {
        colo_logprob_config_t a = {COLO_LOGPROB_CONFIG_INIT};
        a.logits = (colo_logits_options_t){calls[i].vocab[r->rank], SHARD * r->rank, 1, 1, 0};
        rank_try(colo_comm_set_check(r->gpus, calls[i].level));
        const colo_status_t st = colo_logprob_forward(
            &a, &(colo_logprob_batch_t){COLO_LOGPROB_BATCH_INIT, &k.logits, &k.targets, NULL, NULL},
            r->gpus, &(colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .logp = OUTPUT(k, r, 0, ROWS)},
            NULL, NULL, k.workspace, r->stream);
        rank_check(st == calls[i].st[r->rank]);
        rank_check(st == COLO_OK || strstr(colo_last_error(), "rank 1"));
        rank_check(!calls[i].member || strstr(colo_last_error(), calls[i].member));
        rank_try(t_gpu_quiet(r));
        rank_try(colo_comm_check(r->gpus));
    }
    rank_cuda(cudaFree(k.memory));
    return COLO_OK;
}

/* In each call until one was right; then at COLO_CHECK=2. */
T_CASE_ON_GPUS(RANKS, the_same_logits_on_all_devices_are_refused)
{
    struct loss_call k;
    float logits[ROWS * SHARD];
    rank_try(loss_make(&k, r));
    for (int call = 0; call < 5; call++) {
        const bool same = call != 2;
        colo_logprob_config_t a = {COLO_LOGPROB_CONFIG_INIT};
        a.logits = (colo_logits_options_t){VOCAB, SHARD * r->rank, 1, 1, 0};
        for (int i = 0; i < ROWS * SHARD; i++)
            logits[i] = (float)((i + (same ? 0 : r->rank)) % 5) / 4;
        rank_cuda(t_to_device(k.memory, logits, sizeof logits));
        rank_try(colo_comm_set_check(r->gpus, call == 4 ? 2 : 1));
        const colo_status_t st = colo_logprob_forward(
            &a, &(colo_logprob_batch_t){COLO_LOGPROB_BATCH_INIT, &k.logits, &k.targets, NULL, NULL},
            r->gpus, &(colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .logp = OUTPUT(k, r, 0, ROWS)},
            NULL, NULL, k.workspace, r->stream);
        rank_check(st == (call == 2 || call == 3 ? COLO_OK : COLO_ERR_MISMATCH));
        rank_check(st == COLO_OK || strstr(colo_last_error(), "these are the same logits on"));
        rank_try(t_gpu_quiet(r));
    }
    rank_cuda(cudaFree(k.memory));
    return COLO_OK;
}

/* Sums: rank 1 weighs its values while rank 0 counts them, or both do the same. */
T_CASE_ON_GPUS(RANKS, a_sum_of_ranks_that_weigh_and_ranks_that_count_is_nan_on_devices)
{
    struct loss_call k;
    double mean[4], sum[4];
    rank_try(loss_make(&k, r));
    const colo_tensor_t values =
        colo_tensor_cuda(k.memory, COLO_F32, r->device, 1, (int64_t[]){ROWS});
    const colo_tensor_t d_values =
        colo_tensor_cuda(k.out[1], COLO_F32, r->device, 1, (int64_t[]){ROWS});
    const colo_tensor_t *n_valid = T_CUDA_TENSOR(k.targets.data, COLO_I64, r->device, 1);
    for (int how = 0; how < 3; how++) {
        const bool weighs = how == 2 ? r->rank == 1 : how;
        const colo_loss_mean_t out = {COLO_LOSS_MEAN_INIT, .value = OUTPUT(k, r, 0, 1),
                                      .num = T_CUDA_TENSOR(k.numbers, COLO_F64, r->device, 1),
                                      .den = T_CUDA_TENSOR(k.numbers + 1, COLO_F64, r->device, 1),
                                      .factor =
                                          T_CUDA_TENSOR(k.numbers + 2, COLO_F64, r->device, 1)};
        rank_try(weighs ? colo_loss_weighted_sum(&values, NULL, NULL, r->gpus,
                                                 (colo_loss_weighted_t *)(void *)(k.numbers + 4),
                                                 &d_values, k.workspace, r->stream)
                        : colo_loss_mean_forward(&values, n_valid, true, r->gpus, &out, k.workspace,
                                                 r->stream));
        rank_try(t_gpu_quiet(r));
        rank_cuda(cudaMemcpyAsync(mean, k.numbers, sizeof mean, cudaMemcpyDeviceToHost, r->stream));
        rank_cuda(
            cudaMemcpyAsync(sum, k.numbers + 4, sizeof sum, cudaMemcpyDeviceToHost, r->stream));
        rank_cuda(cudaStreamSynchronize(r->stream));
        const double *num = weighs ? &sum[0] : &mean[0], *last = weighs ? &sum[3] : &mean[2];
        rank_check((isnan(*num) != 0) == (how == 2) && (isnan(*last) != 0) == (how == 2));
        if (weighs)
            rank_try(look(&(struct loss_call){.out = {k.out[1], k.out[1]}}, r, ROWS, how == 2));
        else
            rank_try(look(&(struct loss_call){.out = {k.out[0], k.out[0]}}, r, 1, how == 2));
    }
    rank_cuda(cudaFree(k.memory));
    return COLO_OK;
}

T_MAIN_AFTER(t_gpus_enough(RANKS) ? 0 : T_EXIT_SKIP, one_device = t_device_count() < 2,
             "gpu/nccl_check")
