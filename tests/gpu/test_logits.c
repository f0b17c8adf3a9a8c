/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logits.c - the loss kernels against the fp64 oracle, in their own precision, over options,
 * dtypes, shards, widths and alignments; special values against the host's passes; bits against
 * other chunks, places, replays. What the host is tested with: tests/loss/test_logprob.c.
 */
#include "gpu/loss_gpu.h"

#include "perf/probe.h"
#include "loss/where.h"

extern where_t where_host; /* of loss/where_host.c */
static uint64_t rng;
static const colo_dtype_t floats[] = {COLO_BF16, COLO_F32, COLO_F16, COLO_F64};

/* ---- options ---- */

static void draw_options(loss_case_t *c, int i)
{
    colo_logprob_config_t *k = &c->config;
    k->want_entropy = i & 1;
    k->want_loss = i & 2;
    k->want_correct = i & 4;
    k->want_lse = t_below(&rng, 2);
    k->want_sum_p2 = t_below(&rng, 3) == 0;
    k->want_mean_logits = t_below(&rng, 2);
    if (k->want_loss && t_below(&rng, 2)) {
        k->label_smoothing = t_below(&rng, 4) ? 0.1 + 0.3 * t_uniform(&rng) : 1;
        k->megatron_smoothing = t_below(&rng, 2);
    }
    if (k->want_loss && t_below(&rng, 2))
        k->z_loss = 1e-3;
    if (t_below(&rng, 2))
        k->logits.temperature = 0.5 + t_uniform(&rng);
    if (t_below(&rng, 3) == 0)
        k->logits.scale = t_below(&rng, 3) ? 0.25 : -0.5;
    if (t_below(&rng, 3) == 0)
        k->logits.softcap = 20;
    for (int u = 0; u < LOSS_UPS; u++)
        c->no_up[u] = t_below(&rng, 5) == 0;
    k->want_argmax = k->logits.softcap == 0 && t_below(&rng, 2); /* a cap makes ties */
    k->has_temperature = t_below(&rng, 3) == 0;
    k->lenient_targets = t_below(&rng, 3) == 0;
    c->in_place = t_below(&rng, 3) == 0;
    c->row_gap = t_below(&rng, 2) ? 0 : t_below(&rng, 9);
}

static void spoil_targets(loss_case_t *c)
{
    for (int64_t t = 0; t < c->tokens; t++)
        switch (t_below(&rng, 8)) {
        case 0:
            c->targets[t] = c->config.ignore_index;
            break;
        case 1:
            c->targets[t] = t_below(&rng, 2) ? c->vocab : -1;
            break;
        default:
            break;
        }
}

T_CASE(every_option_agrees_with_the_oracle)
{
    static const int64_t widths[] = {1, 2, 7, 8, 63, 64, 65, 1000, 4099, 20011};
    for (int i = 0; i < (int)t_scaled(320); i++) {
        T_ENDS(loss_case_free) loss_case_t c;
        int64_t vocab = widths[i % 10], tokens = vocab > 1000 ? 3 : 1 + t_below(&rng, 9);
        loss_case_init(&c, 1, tokens, vocab, floats[i / 10 % 4], t_below(&rng, 2) ? 1 : 5, &rng);
        c.shift[0] = t_below(&rng, 2) ? 0 : t_below(&rng, 9);
        c.shift[1] = t_below(&rng, 2) ? c.shift[0] : t_below(&rng, 9);
        draw_options(&c, i % 8);
        spoil_targets(&c);
        if (c.config.megatron_smoothing && vocab == 1)
            c.config.megatron_smoothing = false;
        const char *label = t_text("case %d, %s, V %d, softcap %g, scale %g, shifts %d %d", i,
                                   colo_dtype_name(c.dtype), (int)vocab, c.config.logits.softcap,
                                   c.config.logits.scale, (int)c.shift[0], (int)c.shift[1]);
        assert_ok(loss_case_run(&c));
        gpu_case_compare(&c, label);
    }
}

T_CASE(shards_merge_to_what_the_whole_row_gives)
{
    for (int i = 0; i < (int)t_scaled(96); i++) {
        T_ENDS(loss_case_free) loss_case_t c;
        loss_case_init(&c, 2 + (int)t_below(&rng, 7), 5, 30 + t_below(&rng, 3000), floats[i % 4], 3,
                       &rng);
        draw_options(&c, i % 8);
        spoil_targets(&c);
        loss_case_shard(&c, (shard_kind_t)(i / 4 % SHARD_KINDS));
        const char *label = t_text("case %d, %s, %d shards of kind %d", i, colo_dtype_name(c.dtype),
                                   (int)c.ranks, i / 4 % SHARD_KINDS);
        assert_ok(loss_case_run(&c));
        gpu_case_compare(&c, label);
    }
}

T_CASE(a_large_offset_of_the_logits_costs_no_digits)
{
    static const double offsets[] = {5000, -5000, -200};
    for (int i = 0; i < 3; i++) {
        T_ENDS(loss_case_free) loss_case_t c;
        loss_case_init(&c, 1, 4, 1024, COLO_F32, 1, &rng);
        for (int64_t k = 0; k < 4 * 1024; k++)
            c.z[k] = loss_round(COLO_F32, c.z[k] + offsets[i]);
        c.config.want_entropy = true;
        assert_ok(loss_case_run(&c));
        gpu_case_compare(&c, "offset");
    }
}

/* p of the target rounds to 1 in bf16, its gradient must not round to 0 */
T_CASE(a_sure_target_keeps_its_gradient)
{
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 1, 2, 512, COLO_BF16, 0, &rng);
    for (int t = 0; t < 2; t++) {
        c.z[t * 512 + 9] = 16;
        c.targets[t] = 9;
        c.up[0][t] = 1;
    }
    assert_ok(loss_case_run(&c));
    gpu_case_compare(&c, "sure");
    assert_true(c.dz[9] > 5e-5 && c.dz[9] < 6e-5); /* 511 e^-16 / (1 + 511 e^-16) */
}

/* The largest logit twice or thrice; the target is the first of them, or a later one. */
T_CASE(of_equal_maxima_the_first_is_the_argmax)
{
    static const int64_t widths[] = {5, 9, 40, 300, 5000};
    for (int i = 0; i < (int)t_scaled(80); i++) {
        T_ENDS(loss_case_free) loss_case_t c;
        int64_t vocab = widths[i % 5];
        uint8_t want[16];
        int64_t best[16];
        loss_case_init(&c, 1, 16, vocab, floats[i / 5 % 4], 1, &rng);
        c.config.want_correct = c.config.want_argmax = true;
        c.config.want_sum_p2 = i % 3 == 0;
        c.row_gap = t_below(&rng, 4);
        c.shift[0] = t_below(&rng, 9);
        for (int t = 0; t < 16; t++) {
            int64_t first = vocab, j = 0;
            for (int k = 0; k < 3; k++) {
                j = t_below(&rng, vocab);
                c.z[t * vocab + j] = 20;
                first = j < first ? j : first;
            }
            c.targets[t] = t % 2 ? first : j;
            want[t] = c.targets[t] == first;
            best[t] = first;
        }
        assert_ok(loss_case_run(&c));
        for (int t = 0; t < 16; t++)
            if (c.correct[0][t] != want[t] || c.argmax[0][t] != best[t])
                fail_msg("%s, V %d, shift %d, token %d: correct is %d, argmax %d, expected %d",
                         colo_dtype_name(c.dtype), (int)vocab, (int)c.shift[0], t, c.correct[0][t],
                         (int)c.argmax[0][t], (int)best[t]);
    }
}

/* Ascending logits, so that every later one raises the maximum of its thread. */
T_CASE(a_nan_is_not_forgotten_when_larger_logits_follow)
{
    static const int64_t widths[] = {5, 30, 5000, 20000};
    for (int i = 0; i < 64; i++) {
        T_ENDS(loss_case_free) loss_case_t c;
        int64_t vocab = widths[i % 4];
        loss_case_init(&c, 1, 2, vocab, floats[i / 4 % 4], 1, &rng);
        c.shift[0] = i / 16 * 3;
        c.config.want_correct = c.config.want_argmax = c.config.want_lse = true;
        c.config.want_sum_p2 = c.config.want_mean_logits = i % 2;
        for (int64_t t = 0; t < 2; t++) {
            for (int64_t j = 0; j < vocab; j++)
                c.z[t * vocab + j] = loss_round(c.dtype, (double)(8 * j / vocab));
            c.z[t * vocab + vocab - 1] = 9;
            c.z[t * vocab + t_below(&rng, vocab - 1)] = NAN;
            c.targets[t] = t ? vocab - 1 : -1; /* -1: as the argmax of such a row */
        }
        assert_ok(loss_case_run(&c));
        for (int64_t t = 0; t < 2; t++) {
            bool wanted[LOSS_OUTS];
            loss_wanted(&c.config, wanted);
            for (int k = 0; k < LOSS_OUTS; k++)
                assert_true(!wanted[k] || isnan(c.out[0][k][t]));
            assert_int_equal(c.correct[0][t], 0);
            assert_int_equal(c.argmax[0][t], -1);
        }
        assert_true(all_of(IS_NAN, c.dz, 2 * vocab));
    }
}

/* ---- special values: the host's passes say what should come out ---- */

static void plant(loss_case_t *c)
{
    static const double what[] = {NAN, INFINITY, -INFINITY, -INFINITY, 3e38, -3e38, 100, 0};
    for (int64_t t = 0; t < c->tokens; t++) {
        double *row = c->z + t * c->vocab;
        int64_t kind = t_below(&rng, 6), n = t_below(&rng, 4);
        if (kind == 0)
            for (int64_t j = 0; j < c->vocab; j++)
                row[j] = -INFINITY;
        if (kind == 1) /* a wide run, so that whole tiles are -inf */
            for (int64_t j = t_below(&rng, c->vocab); j < c->vocab && t_below(&rng, 200); j++)
                row[j] = -INFINITY;
        if (kind == 2 && c->targets[t] >= 0 && c->targets[t] < c->vocab)
            row[c->targets[t]] = -INFINITY;
        if (kind > 3)
            n = 0;
        for (int64_t i = 0; i < n; i++) {
            double v = what[t_below(&rng, 8)];
            if (c->dtype == COLO_F16 && isfinite(v))
                v = v > 0 ? 65504 : -65504;
            row[t_below(&rng, c->vocab)] = loss_round(c->dtype, loss_round(COLO_F32, v));
        }
    }
}

static void like(double got, double host, double tol, const char *label, const char *what,
                 const loss_case_t *c, int t, int64_t j)
{
    if (isnan(host) ? isnan(got) : isinf(host) ? got == host : fabs(got - host) <= tol)
        return;
    const double *z = c->z + t * c->vocab;
    double top = -INFINITY;
    for (int64_t i = 0; i < c->vocab; i++)
        top = z[i] > top ? z[i] : top;
    fail_msg(
        "%s: token %d, target %d, logp %g: %s is %g, the host's is %g (within %g); logit %d is "
        "%g, the row's largest %g",
        label, t, (int)c->targets[t], c->out[0][0][t], what, got, host, tol, (int)j, z[j], top);
}

T_CASE(special_values_come_out_as_on_the_host)
{
    static const int64_t widths[] = {5, 64, 300, 5000};
    for (int i = 0; i < (int)t_scaled(240); i++) {
        T_ENDS(loss_case_free) loss_case_t c, h;
        uint64_t index = rng;
        int64_t vocab = widths[i % 4];
        for (int k = 0; k < 2; k++) { /* the same case twice */
            loss_case_t *x = k ? &h : &c;
            rng = index;
            loss_case_init(x, 1, 12, vocab, floats[i / 4 % 4], 2, &rng);
            draw_options(x, (i / 3) % 8);
            x->config.logits.scale = i % 5 == 0 ? 64 : 1; /* 3e38 overflows fp32 */
            x->config.logits.temperature = 1;
            for (int64_t t = 0; t < x->tokens && x->config.has_temperature; t++)
                x->temperature[t] = t % 2 ? 0.5 : 2; /* others round 3e38 by more than e^x holds */
            spoil_targets(x);
            plant(x);
        }
        const char *label = t_text("case %d, %s, V %d, softcap %g", i, colo_dtype_name(c.dtype),
                                   (int)vocab, c.config.logits.softcap);
        assert_ok(loss_case_run(&c));
        const where_t device = where;
        where = where_host;
        assert_ok(loss_case_run(&h));
        where = device;
        assert_int_equal(c.n_valid[0], h.n_valid[0]);
        assert_int_equal(c.n_invalid[0], h.n_invalid[0]);
        for (int t = 0; t < 12; t++) {
            bool asked[LOSS_OUTS];
            loss_wanted(&c.config, asked);
            for (int k = 0; k < LOSS_OUTS; k++)
                if (asked[k]) /* of ordinary size, or a hair of something huge */
                    like(c.out[0][k][t], h.out[0][k][t], 1e-3 + 1e-5 * fabs(h.out[0][k][t]), label,
                         loss_out_names[k], &c, t, 0);
            /* where softcap saturates, the last bit of tanh makes ties */
            if (c.config.want_correct && !c.config.logits.softcap &&
                c.correct[0][t] != h.correct[0][t])
                fail_msg("%s: token %d: correct is %d", label, t, c.correct[0][t]);
            if (c.config.want_argmax && c.argmax[0][t] != h.argmax[0][t])
                fail_msg("%s: token %d: argmax is %d, the host's is %d", label, t,
                         (int)c.argmax[0][t], (int)h.argmax[0][t]);
            for (int64_t j = 0; j < vocab; j++) {
                double want = h.dz[t * vocab + j],
                       tol = 1e-3 * (1 + 100 * (c.config.logits.scale > 1));
                like(c.dz[t * vocab + j], want, tol + 0x1p-7 * fabs(want), label, "gradient", &c, t,
                     j);
            }
        }
    }
}

/* ---- bits ---- */

T_CASE(chunks_and_places_change_no_bit)
{
    enum { TOKENS = 37, VOCAB = 3001 };
    static const int64_t chunks[] = {0, 1, 7, TOKENS, TOKENS + 5};
    for (int d = 0; d < 4; d++) {
        loss_case_t c, again;
        loss_case_init(&c, 1, TOKENS, VOCAB, floats[d], 3, &rng);
        draw_options(&c, 7);
        spoil_targets(&c);
        c.config.logits.temperature = 0.7;
        c.in_place = false;
        assert_ok(loss_case_run(&c));
        for (int k = 1; k < 10; k++) {
            loss_case_take(&again, &c, 0, TOKENS);
            again.config.chunk_size = chunks[k / 2];
            again.in_place = k % 2;
            assert_ok(loss_case_run(&again));
            const char *label = t_text("chunk %d, in place %d", (int)chunks[k / 2], k % 2);
            loss_case_same(&again, &c, 0, label);
            loss_case_free(&again);
        }
        loss_case_free(&c);
    }
}

/* So many rows that all can be under way at once if none is read ahead, and parts of them that are
 * read ahead: kernels/logprob-stats.cu chooses by their number. */
T_CASE(reading_ahead_changes_no_bit)
{
    enum { VOCAB = 9001 }; /* several batches a thread */
    int multiprocessors = 0;
    assert_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    const int64_t tokens = 10 * multiprocessors;
    const size_t bytes = (size_t)tokens * sizeof(double);
    double *first[2] = {malloc(bytes), malloc(bytes)};
    for (int d = 0; d < 6; d++) {
        T_ENDS(loss_case_free) loss_case_t c;
        loss_case_init(&c, 1, tokens, VOCAB, floats[d / 2], 3, &rng);
        c.forward_only = true;
        c.config.want_entropy = d % 2;
        for (int k = 0; k < 3; k++) { /* in turn: 10, 8 and 2, 5 and 5 rows a multiprocessor */
            c.config.chunk_size = multiprocessors * (k == 0 ? 0 : k == 1 ? 8 : 5);
            assert_ok(loss_case_run(&c));
            for (int out = 0; out < 1 + c.config.want_entropy; out++) {
                if (k == 0)
                    memcpy(first[out], c.out[0][out], bytes);
                else if (memcmp(first[out], c.out[0][out], bytes) != 0)
                    fail_msg("%s, chunks of %d rows: other bits", colo_dtype_name(c.dtype),
                             (int)c.config.chunk_size);
            }
        }
    }
    free(first[0]);
    free(first[1]);
}

/* ---- sizes ---- */

/* The fp64 oracle for row @t of device logits of bf16 that probe_fill made. */
static void check_big_row(const unsigned char *z, const unsigned char *dz, const float *logp,
                          int64_t t, int64_t vocab, int64_t target)
{
    const ref_logprob_opts_t o = {.temperature = 1, .scale = 1, .ignore_index = -100};
    const bool asked[LOSS_OUTS] = {true};
    const double up[LOSS_UPS + 1] = {1, [LOSS_UPS] = 1};
    COLO_AUTOFREE uint16_t *raw = malloc((size_t)vocab * 2);
    double *row = malloc((size_t)vocab * 8), *grad = malloc((size_t)vocab * 8),
           got[LOSS_OUTS] = {0};
    float one;
    gpu_get(raw, z, (size_t)vocab * 2);
    for (int64_t j = 0; j < vocab; j++)
        row[j] = loss_load(COLO_BF16, raw, j);
    gpu_get(raw, dz, (size_t)vocab * 2);
    for (int64_t j = 0; j < vocab; j++)
        grad[j] = loss_load(COLO_BF16, raw, j);
    gpu_get(&one, logp + t, sizeof one);
    got[0] = one;
    gpu_row_compare(&o, COLO_BF16, row, vocab, target, got, asked, up, grad, "big");
    free(row);
    free(grad);
}

/* Forward and backward of bf16 logits, which are still to fill, with upstream gradients of 1. */
typedef struct step {
    colo_logprob_config_t config;
    unsigned char *z, *dz;
    void *stats, *workspace, *targets, *up, *counts;
    float *logp;
    colo_tensor_t logits, target, d_logits;
    colo_logprob_saved_t saved;
} step_t;

static void step_make(step_t *s, int64_t tokens, int64_t vocab, bool entropy, int64_t *targets)
{
    const size_t n = (size_t)tokens, bytes = n * (size_t)vocab * 2 + 16;
    COLO_AUTOFREE float *ones = malloc(n * sizeof *ones);
    size_t stat_bytes, workspace_bytes;
    for (int64_t t = 0; t < tokens; t++) {
        targets[t] = t_below(&rng, vocab);
        ones[t] = 1;
    }
    s->config = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = vocab,
                                        .want_entropy = entropy};
    assert_ok(colo_logprob_saved_size(&s->config, COLO_BF16, tokens, &stat_bytes));
    assert_ok(colo_logprob_workspace_size(&s->config, COLO_BF16, tokens, 1, &workspace_bytes));
    assert_cuda(cudaMalloc((void **)&s->z, bytes));
    assert_cuda(cudaMalloc((void **)&s->dz, bytes));
    s->stats = gpu_put(NULL, stat_bytes);
    s->workspace = gpu_put(NULL, workspace_bytes);
    s->targets = gpu_put(targets, n * sizeof *targets);
    s->up = gpu_put(ones, n * sizeof *ones);
    s->logp = gpu_put(NULL, n * sizeof *s->logp);
    s->counts = gpu_put(NULL, 16);
    s->logits = colo_tensor_cuda(s->z, COLO_BF16, 0, 2, (int64_t[]){tokens, vocab});
    s->d_logits = colo_tensor_cuda(s->dz, COLO_BF16, 0, 2, (int64_t[]){tokens, vocab});
    s->target = colo_tensor_cuda(s->targets, COLO_I64, 0, 1, &tokens);
}

static void step_run(step_t *s, cudaStream_t stream)
{
    const int64_t tokens = s->logits.shape[0];
    const colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &s->logits,
                                        .targets = &s->target};
    const colo_tensor_t d = colo_tensor_cuda(s->up, COLO_F32, 0, 1, &tokens);
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT,
                                    .logp = T_CUDA_TENSOR(s->logp, COLO_F32, 0, tokens),
                                    .n_valid = T_CUDA_TENSOR(s->counts, COLO_I64, 0, 1)};
    const colo_logprob_upstream_t up = {COLO_LOGPROB_UPSTREAM_INIT, .d_logp = &d,
                                        .d_entropy = s->config.want_entropy ? &d : NULL};
    s->saved = (colo_logprob_saved_t){COLO_LOGPROB_SAVED_INIT};
    assert_ok(colo_logprob_forward(&s->config, &batch, t_self(), &out, &s->saved, s->stats,
                                   s->workspace, stream));
    assert_ok(colo_logprob_backward(&s->saved, &up, &s->d_logits, stream));
}

static void step_end(step_t *s)
{
    void *all[] = {s->z, s->dz, s->stats, s->workspace, s->targets, s->up, s->counts, s->logp};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        gpu_free(all[i]);
}

static void run_big(int64_t tokens, int64_t vocab, const int64_t *look, int n)
{
    COLO_AUTOFREE int64_t *targets = malloc((size_t)tokens * 8);
    T_ENDS(step_end) step_t s;
    step_make(&s, tokens, vocab, false, targets);
    assert_cuda(colo_k_probe_fill(s.z, tokens * vocab * 2 + 16, 3, t_rand(&rng), NULL));
    step_run(&s, NULL);
    for (int i = 0; i < n; i++)
        check_big_row(s.z + look[i] * vocab * 2, s.dz + look[i] * vocab * 2, s.logp, look[i], vocab,
                      targets[look[i]]);
}

T_CASE(more_than_two_to_the_31_logits_are_right)
{
    static const int64_t look[] = {0, 16383, 16384, 16385, 16999};
    if (t_scaled(100) < 100)
        skip();
    run_big(17000, 131072, look, 5); /* row 16384 begins at element 2^31 */
}

T_CASE(more_rows_than_a_grid_has_in_y_are_right)
{
    static const int64_t look[] = {0, 65534, 65535, 65536, 69999};
    run_big(70000, 67, look, 5);
}

/* ---- graphs ---- */

T_CASE(a_captured_step_follows_its_inputs)
{
    enum { TOKENS = 64, VOCAB = 4000, REPLAYS = 50 };
    const size_t bytes = (size_t)TOKENS * VOCAB * 2;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int64_t targets[TOKENS], n = 0;
    COLO_AUTOFREE unsigned char *got = malloc(bytes), *want = malloc(bytes);
    GPU_AUTOFREE void *other = gpu_put(NULL, bytes);
    T_ENDS(step_end) step_t s;
    step_make(&s, TOKENS, VOCAB, true, targets);
    assert_cuda(cudaStreamCreate(&stream));
    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step_run(&s, stream);
    assert_cuda(cudaStreamEndCapture(stream, &graph));
    assert_cuda(cudaGraphInstantiate(&exec, graph, 0));
    s.d_logits.data = other;
    for (int i = 0; i < REPLAYS; i++) {
        assert_cuda(colo_k_probe_fill(s.z, (int64_t)bytes, 3, t_rand(&rng), stream));
        assert_cuda(cudaGraphLaunch(exec, stream));
        gpu_get(got, s.dz, bytes);
        gpu_get(&n, s.counts, 8);
        assert_int_equal(n, TOKENS);
        step_run(&s, stream);
        gpu_get(want, other, bytes);
        assert_memory_equal(got, want, bytes);
    }
    assert_cuda(cudaGraphExecDestroy(exec));
    assert_cuda(cudaGraphDestroy(graph));
    assert_cuda(cudaStreamDestroy(stream));
}

/* ---- refusals ---- */

T_CASE(pointers_that_no_kernel_can_use_are_refused)
{
    float host[8] = {0};
    int64_t two = 2, targets[2] = {0, 1};
    GPU_AUTOFREE unsigned char *z = gpu_put(host, 64);
    GPU_AUTOFREE void *tg = gpu_put(targets, 16), *workspace = gpu_put(NULL, 4096),
                      *stats = gpu_put(NULL, 64);
    float *logp = gpu_put(NULL, 8), before[2], after[2];
    colo_logprob_config_t cfg = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = 4};
    colo_tensor_t zt = colo_tensor_cuda(z, COLO_F32, 0, 2, (int64_t[]){2, 4});
    colo_tensor_t tt = colo_tensor_cuda(tg, COLO_I64, 0, 1, &two), dt = zt;
    colo_tensor_t of_logp = colo_tensor_cuda(logp, COLO_F32, 0, 1, &two);
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &of_logp};
    const colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &zt, .targets = &tt};
    colo_logprob_saved_t saved = {COLO_LOGPROB_SAVED_INIT};
    const colo_logprob_upstream_t up = {COLO_LOGPROB_UPSTREAM_INIT,
                                        .d_logp = T_CUDA_TENSOR(host, COLO_F32, 0, 2)};
    gpu_get(before, logp, 8);
#define FORWARD() colo_logprob_forward(&cfg, &batch, t_self(), &out, &saved, stats, workspace, NULL)
    zt.data = host;
    assert_fails(FORWARD(), COLO_ERR_ARG, "logits: ");
    assert_fails(FORWARD(), COLO_ERR_ARG, "is host memory that CUDA does not know");
    zt.data = z + 2;
    assert_fails(FORWARD(), COLO_ERR_ARG, "is no multiple of 4 bytes");
    zt.data = z;
    tt.data = targets;
    assert_fails(FORWARD(), COLO_ERR_ARG, "targets: ");
    tt.data = tg;
    of_logp.data = host;
    assert_fails(FORWARD(), COLO_ERR_ARG, "out.logp: ");
    of_logp.data = logp;
    gpu_get(after, logp, 8);
    assert_memory_equal(before, after, 8);
    assert_ok(FORWARD());
#undef FORWARD
    assert_fails(colo_logprob_backward(&saved, &up, &dt, NULL), COLO_ERR_ARG, "d_logp: ");
    gpu_free(logp);
}

T_MAIN_AFTER(gpu_need(1), rng = t_seed(), "gpu/logits")
