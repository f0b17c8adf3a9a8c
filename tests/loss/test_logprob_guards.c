/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logprob_guards.c - what the loss promises about itself: how many collectives, which memory
 * it touches, that chunking changes no bit, that stale state is refused, that a refusal writes
 * nothing.
 */
#include "loss/loss_case.h"

#include <sys/mman.h>
#include <unistd.h>

/* ---- collectives ---- */

static uint64_t total_ops(const colo_ledger_t *l)
{
    uint64_t n = 0;
    for (int k = 0; k < COLO_OP_COUNT; k++)
        for (int o = 0; o < COLO_OWNER_COUNT; o++)
            n += l->ops[k][o];
    return n;
}

static void forward_gathers_once_and_backward_never(void **state)
{
    static const int64_t chunks[] = {0, 1, 3, 1000};
    uint64_t rng = t_seed();
    (void)state;
    for (int32_t w = 1; w <= 8; w++)
        for (int k = 0; k < 4; k++) {
            loss_case_t c;
            loss_case_init(&c, w, 10, 20, COLO_F32, 2, &rng);
            c.config.want_entropy = c.config.want_loss = c.config.want_correct = true;
            c.config.chunk_size = chunks[k];
            assert_ok(loss_case_run(&c));
            for (int r = 0; r < w; r++) {
                const colo_ledger_t *f = &c.after_forward[r], *b = &c.after_backward[r];
                assert_int_equal(f->ops[COLO_OP_ALL_GATHER][COLO_OWNER_LOSS], w > 1);
                assert_int_equal(total_ops(f), w > 1);
                assert_memory_equal(f, b, sizeof *f);
            }
            loss_case_free(&c);
        }
}

/* 10 tokens of f32: header 64, then m, s, x_t (40 each); with entropy u; with correct 80 more */
static void the_gather_carries_a_few_numbers_a_token(void **state)
{
    uint64_t rng = t_seed() + 1;
    loss_case_t c;
    (void)state;
    loss_case_init(&c, 4, 10, 4000, COLO_F32, 2, &rng);
    assert_ok(loss_case_run(&c));
    assert_int_equal(c.after_forward[1].sent_bytes[COLO_OP_ALL_GATHER][COLO_OWNER_LOSS], 64 + 120);
    c.config.want_entropy = c.config.want_correct = true;
    assert_ok(loss_case_run(&c));
    assert_int_equal(c.after_forward[1].sent_bytes[COLO_OP_ALL_GATHER][COLO_OWNER_LOSS],
                     64 + 160 + 80);
    loss_case_free(&c);
}

/* ---- chunks ---- */

static void chunking_changes_no_bit(void **state)
{
    static const int32_t worlds[] = {1, 2, 3, 8};
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};
    enum { T = 33, V = 300 };
    static const int64_t chunks[] = {1, 7, T, T + 5};
    uint64_t rng = t_seed() + 2;
    (void)state;
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++) {
            loss_case_t c;
            loss_case_init(&c, worlds[w], T, V, dtypes[d], 3, &rng);
            loss_case_shard(&c, SHARD_UNEVEN);
            c.targets[3] = -100;
            c.targets[8] = 5000;
            c.config.want_entropy = c.config.want_loss = c.config.want_correct = true;
            c.config.label_smoothing = 0.1;
            assert_ok(loss_case_run(&c)); /* 0: chosen */
            double *dz = c.dz, out[3][T];
            uint8_t correct[T];
            memcpy(correct, c.correct[0], T);
            for (int k = 0; k < 3; k++)
                memcpy(out[k], c.out[0][k], sizeof out[k]);
            c.dz = calloc(T * V, sizeof(double));
            for (int k = 0; k < 4; k++) {
                c.config.chunk_size = chunks[k];
                assert_ok(loss_case_run(&c));
                assert_memory_equal(dz, c.dz, T * V * sizeof(double));
                for (int r = 0; r < worlds[w]; r++) {
                    for (int i = 0; i < 3; i++)
                        assert_memory_equal(out[i], c.out[r][i], sizeof out[i]);
                    assert_memory_equal(correct, c.correct[r], T);
                    assert_int_equal(c.n_valid[r], T - 2);
                    assert_int_equal(c.n_invalid[r], 1);
                }
            }
            free(dz);
            loss_case_free(&c);
        }
}

static void scratch_is_bounded_by_the_chunk_and_never_by_the_vocabulary(void **state)
{
    colo_logprob_config_t cfg = {COLO_LOGPROB_CONFIG_INIT, .vocab = 131072};
    size_t one, many, chosen, eight, wide;
    (void)state;
    cfg.chunk_size = 1;
    assert_ok(colo_logprob_scratch_size(&cfg, COLO_F32, 1000000, 1, &one));
    cfg.chunk_size = 100;
    assert_ok(colo_logprob_scratch_size(&cfg, COLO_F32, 1000000, 1, &many));
    cfg.chunk_size = 0;
    assert_ok(colo_logprob_scratch_size(&cfg, COLO_F32, 1000000, 1, &chosen));
    assert_ok(colo_logprob_scratch_size(&cfg, COLO_F32, 1000000, 8, &eight));
    assert_int_equal(one, 64 + 3 * 8);
    assert_int_equal(many, 64 + 3 * 400);
    assert_true(chosen < 65536);
    assert_int_equal(eight, 8 * (64 + 3 * 4000000));
    cfg.vocab = 7;
    assert_ok(colo_logprob_scratch_size(&cfg, COLO_F32, 1000000, 8, &wide));
    assert_int_equal(eight, wide);
    cfg.want_entropy = cfg.want_loss = cfg.want_correct = true;
    cfg.label_smoothing = 0.1;
    assert_ok(colo_logprob_scratch_size(&cfg, COLO_F64, 5, 3, &wide));
    assert_int_equal(wide, 3 * (64 + 6 * 40));
    assert_ok(colo_logprob_saved_size(&cfg, COLO_BF16, 5, &wide));
    assert_int_equal(wide, 5 * 24);
}

/* ---- one rank, step by step ---- */

enum { T = 4, V = 6, CANARY = 0x5a, MARGIN = 64 };

typedef struct alone {
    colo_comm_t *self;
    colo_logprob_config_t cfg;
    float z[T * V], dz[T * V], logp[T], entropy[T], loss[T], up[T];
    uint8_t correct[T];
    int64_t targets[T], n_valid, n_invalid;
    double stats[3 * T];
    unsigned char scratch[1024];
    uint64_t version, targets_version;
    colo_tensor_t logits, target, d_logits;
    colo_logprob_out_t out;
    colo_logprob_saved_t saved;
    colo_logprob_upstream_t upstream;
} alone_t;

static void alone_init(alone_t *a)
{
    uint64_t rng = 5;
    memset(a, CANARY, sizeof *a);
    a->self = NULL;
    assert_ok(colo_comm_create_self(&a->self));
    a->cfg = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .vocab = V, .want_entropy = true,
                                     .want_loss = true, .want_correct = true};
    for (int i = 0; i < T * V; i++)
        a->z[i] = (float)t_uniform(&rng);
    for (int t = 0; t < T; t++) {
        a->targets[t] = t;
        a->up[t] = 1;
    }
    a->version = a->targets_version = 1;
    a->logits = colo_tensor_host(a->z, COLO_F32, 2, (int64_t[]){T, V});
    a->logits.version = &a->version;
    a->target = colo_tensor_host(a->targets, COLO_I64, 1, (int64_t[]){T});
    a->target.version = &a->targets_version;
    a->d_logits = colo_tensor_host(a->dz, COLO_F32, 2, (int64_t[]){T, V});
    a->out =
        (colo_logprob_out_t){a->logp, a->entropy, a->loss, a->correct, &a->n_valid, &a->n_invalid};
    a->saved = (colo_logprob_saved_t){.valid = false};
    a->upstream = (colo_logprob_upstream_t){.d_logp = a->up};
}

static colo_status_t alone_forward(alone_t *a)
{
    return colo_logprob_forward(&a->cfg, &a->logits, &a->target, a->self, &a->out, &a->saved,
                                a->stats, a->scratch, NULL);
}

static colo_status_t alone_backward(alone_t *a)
{
    return colo_logprob_backward(&a->saved, &a->upstream, &a->d_logits, NULL);
}

static bool painted(const void *p, size_t n)
{
    const unsigned char *b = p;
    for (size_t i = 0; i < n; i++)
        if (b[i] != CANARY)
            return false;
    return true;
}

static void assert_forward_wrote_nothing(const alone_t *a)
{
    assert_true(painted(a->logp, sizeof a->logp) && painted(a->entropy, sizeof a->entropy));
    assert_true(painted(a->loss, sizeof a->loss) && painted(a->correct, sizeof a->correct));
    assert_true(painted(a->stats, sizeof a->stats) && painted(a->scratch, sizeof a->scratch));
    assert_true(painted(&a->n_valid, 8) && painted(&a->n_invalid, 8));
    assert_false(a->saved.valid);
}

static void backward_twice_gives_the_same_bits(void **state)
{
    alone_t a;
    float first[T * V];
    (void)state;
    alone_init(&a);
    a.upstream.d_entropy = a.upstream.d_loss = a.up;
    assert_ok(alone_forward(&a));
    assert_ok(alone_backward(&a));
    memcpy(first, a.dz, sizeof first);
    memset(a.dz, CANARY, sizeof a.dz);
    assert_ok(alone_backward(&a));
    assert_memory_equal(first, a.dz, sizeof first);
    colo_comm_destroy(&a.self);
}

static void logits_written_after_they_were_saved_are_refused(void **state)
{
    alone_t a;
    (void)state;
    alone_init(&a);
    assert_ok(alone_forward(&a));
    a.version = 3;
    assert_fails(alone_backward(&a), COLO_ERR_MODIFIED,
                 "logits were written after they were saved: version 3, saved at 1");
    assert_true(painted(a.dz, sizeof a.dz));
    a.version = 1;
    a.targets_version = 2;
    assert_fails(alone_backward(&a), COLO_ERR_MODIFIED,
                 "targets were written after they were saved: version 2, saved at 1");
    a.targets_version = 1;
    assert_ok(alone_backward(&a));
    a.version = 3; /* also where in place was asked for */
    a.d_logits = a.logits;
    assert_fails(alone_backward(&a), COLO_ERR_MODIFIED, "version 3, saved at 1");
    assert_true(a.saved.valid);
    colo_comm_destroy(&a.self);
}

static void in_place_ends_the_saved_state(void **state)
{
    alone_t a;
    (void)state;
    alone_init(&a);
    assert_fails(alone_backward(&a), COLO_ERR_STATE, "no forward filled it");
    assert_ok(alone_forward(&a));
    assert_ok(alone_backward(&a));
    a.d_logits = a.logits;
    assert_ok(alone_backward(&a));
    assert_memory_equal(a.z, a.dz, sizeof a.z);
    assert_fails(alone_backward(&a), COLO_ERR_STATE, "in place ended it");
    a.d_logits.data = a.dz;
    memset(a.dz, CANARY, sizeof a.dz);
    assert_fails(alone_backward(&a), COLO_ERR_STATE, "in place ended it");
    assert_true(painted(a.dz, sizeof a.dz));
    colo_comm_destroy(&a.self);
}

static void any_other_overlap_with_the_logits_is_refused(void **state)
{
    alone_t a;
    float wide[T * 2 * V + V], before[T * 2 * V + V];
    (void)state;
    alone_init(&a);
    for (int i = 0; i < T * 2 * V + V; i++)
        before[i] = wide[i] = (float)i / 50;
    a.logits = colo_tensor_host(wide, COLO_F32, 2, (int64_t[]){T, V});
    assert_ok(alone_forward(&a));
    a.d_logits.data = wide + 1;
    assert_fails(alone_backward(&a), COLO_ERR_ARG, "overlaps the logits without being them (+4");
    a.d_logits.data = wide + (T - 1) * V + V - 1;
    assert_fails(alone_backward(&a), COLO_ERR_ARG, "overlaps the logits");
    a.d_logits.data = wide; /* same data, other strides */
    a.d_logits.stride[0] = V + 1;
    assert_fails(alone_backward(&a), COLO_ERR_ARG, "row strides 7 and 6");
    assert_memory_equal(wide, before, sizeof wide);
    assert_true(a.saved.valid);
    a.d_logits.stride[0] = V;
    a.d_logits.data = wide + T * V; /* next to it */
    assert_ok(alone_backward(&a));

    /* two halves of one wide buffer: rows interleave, no element is shared */
    memcpy(wide, before, sizeof wide);
    a.logits.stride[0] = a.d_logits.stride[0] = 2 * V;
    assert_ok(alone_forward(&a));
    a.d_logits.data = wide + V;
    assert_ok(alone_backward(&a));
    for (int t = 0; t < T; t++)
        assert_memory_equal(wide + t * 2 * V, before + t * 2 * V, V * sizeof(float));
    memcpy(wide, before, sizeof wide);
    a.d_logits.data = wide + V - 1; /* one column too far left */
    assert_fails(alone_backward(&a), COLO_ERR_ARG, "overlaps");
    a.d_logits.data = wide + V + 1; /* and too far right: meets the next row */
    assert_fails(alone_backward(&a), COLO_ERR_ARG, "overlaps");
    colo_comm_destroy(&a.self);
}

/* stats and scratch of exactly the queried size between canaries, all chunk sizes and dtypes */
static void nothing_is_written_past_the_queried_sizes(void **state)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};
    (void)state;
    for (int d = 0; d < 4; d++)
        for (int64_t chunk = 0; chunk <= T + 1; chunk++)
            for (unsigned wants = 0; wants < 8; wants++) {
                alone_t a;
                double z[T * V] = {0}, dz[T * V], out[3][T];
                size_t stat_bytes, scratch_bytes;
                alone_init(&a);
                a.cfg.chunk_size = chunk;
                a.cfg.want_entropy = wants & 1;
                a.cfg.want_loss = wants & 2;
                a.cfg.want_correct = wants & 4;
                a.cfg.label_smoothing = 0.1;
                a.logits = colo_tensor_host(z, dtypes[d], 2, (int64_t[]){T, V});
                a.d_logits = colo_tensor_host(dz, dtypes[d], 2, (int64_t[]){T, V});
                a.out.logp = out[0];
                a.out.entropy = wants & 1 ? out[1] : NULL;
                a.out.loss = wants & 2 ? out[2] : NULL;
                a.out.correct = wants & 4 ? a.correct : NULL;
                assert_ok(colo_logprob_saved_size(&a.cfg, dtypes[d], T, &stat_bytes));
                assert_ok(colo_logprob_scratch_size(&a.cfg, dtypes[d], T, 1, &scratch_bytes));
                unsigned char *stats = malloc(stat_bytes + 2 * MARGIN);
                unsigned char *scratch = malloc(scratch_bytes + 2 * MARGIN);
                memset(stats, CANARY, stat_bytes + 2 * MARGIN);
                memset(scratch, CANARY, scratch_bytes + 2 * MARGIN);
                assert_ok(colo_logprob_forward(&a.cfg, &a.logits, &a.target, a.self, &a.out,
                                               &a.saved, stats + MARGIN, scratch + MARGIN, NULL));
                assert_true(painted(stats, MARGIN) && painted(scratch, MARGIN));
                assert_true(painted(stats + MARGIN + stat_bytes, MARGIN));
                assert_true(painted(scratch + MARGIN + scratch_bytes, MARGIN));
                /* exact: the last number of both is used */
                assert_false(painted(stats + MARGIN + stat_bytes - 8, 8));
                assert_false(painted(scratch + MARGIN + scratch_bytes - 8, 8));
                free(stats);
                free(scratch);
                colo_comm_destroy(&a.self);
            }
}

/* The whole first page is ignored rows and cannot be read or written. */
static void ignored_rows_are_not_read(void **state)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), row = V * sizeof(float);
    const int64_t dark = (int64_t)(page / row), tokens = dark + 6;
    alone_t a;
    (void)state;
    alone_init(&a);
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(mprotect(memory, page, PROT_NONE), 0);
    int64_t *targets = calloc((size_t)tokens, sizeof *targets);
    float *logp = malloc((size_t)tokens * sizeof *logp), *up = calloc((size_t)tokens, sizeof *up);
    float *dz = malloc((size_t)tokens * row);
    double *stats = malloc((size_t)tokens * 3 * sizeof *stats);
    size_t bytes;
    for (int64_t t = 0; t <= dark; t++)
        targets[t] = -100;
    a.cfg = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .vocab = V};
    assert_ok(colo_logprob_scratch_size(&a.cfg, COLO_F32, tokens, 1, &bytes));
    void *scratch = malloc(bytes);
    a.logits = colo_tensor_host(memory, COLO_F32, 2, (int64_t[]){tokens, V});
    a.target = colo_tensor_host(targets, COLO_I64, 1, &tokens);
    a.d_logits = colo_tensor_host(dz, COLO_F32, 2, (int64_t[]){tokens, V});
    a.out = (colo_logprob_out_t){.logp = logp};
    assert_ok(colo_logprob_forward(&a.cfg, &a.logits, &a.target, a.self, &a.out, &a.saved, stats,
                                   scratch, NULL));
    a.upstream = (colo_logprob_upstream_t){.d_logp = up};
    assert_ok(alone_backward(&a));
    assert_true(logp[0] == 0 && logp[dark] == 0 && logp[dark + 1] < -1);
    munmap(memory, 2 * page);
    free(targets);
    free(logp);
    free(up);
    free(dz);
    free(stats);
    free(scratch);
    colo_comm_destroy(&a.self);
}

static void forward_without_saved_needs_no_stats(void **state)
{
    alone_t a, b;
    (void)state;
    alone_init(&a);
    alone_init(&b);
    assert_ok(alone_forward(&a));
    assert_ok(colo_logprob_forward(&b.cfg, &b.logits, &b.target, b.self, &b.out, NULL, NULL,
                                   b.scratch, NULL));
    assert_memory_equal(a.logp, b.logp, sizeof a.logp);
    assert_true(painted(b.stats, sizeof b.stats));
    colo_comm_destroy(&a.self);
    colo_comm_destroy(&b.self);
}

static void outputs_that_are_null_are_not_written(void **state)
{
    alone_t a;
    (void)state;
    alone_init(&a);
    a.out = (colo_logprob_out_t){.entropy = a.entropy};
    assert_ok(alone_forward(&a));
    assert_true(painted(a.logp, sizeof a.logp) && painted(a.loss, sizeof a.loss));
    assert_true(painted(a.correct, sizeof a.correct) && painted(&a.n_valid, 8));
    assert_true(a.entropy[0] > 1);
    a.upstream.d_loss = a.up; /* the loss itself was not asked for, its gradient may be */
    assert_ok(alone_backward(&a));
    colo_comm_destroy(&a.self);
}

/* ---- rejections ---- */

#define REJECT(change, status, sentence)                   \
    do {                                                   \
        alone_t a;                                         \
        alone_init(&a);                                    \
        change;                                            \
        assert_fails(alone_forward(&a), status, sentence); \
        assert_forward_wrote_nothing(&a);                  \
        colo_comm_destroy(&a.self);                        \
    } while (0)

static void every_bad_config_is_refused_with_its_number(void **state)
{
    const double inf = 1e300 * 1e300;
    (void)state;
    REJECT(a.cfg.struct_size = 8, COLO_ERR_ARG, "struct_size is 8, expected");
    REJECT(a.cfg.vocab = 0, COLO_ERR_ARG, "vocab is 0, expected > 0");
    REJECT(a.cfg.vocab = -3, COLO_ERR_ARG, "vocab is -3");
    REJECT(a.cfg.vocab_start = -1, COLO_ERR_ARG, "vocab_start is -1, expected >= 0");
    REJECT(a.cfg.vocab_start = INT64_MAX, COLO_ERR_ARG, "9223372036854775807 + 6 columns");
    REJECT(a.cfg.temperature = 0, COLO_ERR_ARG, "temperature is 0, expected finite and > 0");
    REJECT(a.cfg.temperature = -1, COLO_ERR_ARG, "temperature is -1");
    REJECT(a.cfg.temperature = inf - inf, COLO_ERR_ARG, "temperature is ");
    REJECT(a.cfg.temperature = inf, COLO_ERR_ARG, "temperature is inf");
    REJECT(a.cfg.temperature = 1e-310, COLO_ERR_ARG, "scale / temperature = 1 / 1e-310");
    REJECT(a.cfg.scale = inf, COLO_ERR_ARG, "scale is inf, expected finite");
    REJECT(a.cfg.softcap = -2, COLO_ERR_ARG, "softcap is -2");
    REJECT(a.cfg.softcap = inf - inf, COLO_ERR_ARG, "softcap is ");
    REJECT(a.cfg.label_smoothing = 1, COLO_ERR_ARG, "label_smoothing is 1, expected in [0, 1)");
    REJECT(a.cfg.label_smoothing = -0.5, COLO_ERR_ARG, "label_smoothing is -0.5");
    REJECT((a.cfg.vocab = 1, a.cfg.label_smoothing = 0.1, a.cfg.megatron_smoothing = true),
           COLO_ERR_ARG, "vocab - 1, and vocab is 1");
    REJECT(a.cfg.z_loss = -1, COLO_ERR_ARG, "z_loss is -1");
    REJECT(a.cfg.z_loss = inf, COLO_ERR_ARG, "z_loss is inf");
    REJECT(a.cfg.chunk_size = -4, COLO_ERR_ARG, "chunk_size is -4, expected >= 0");
    assert_fails(colo_logprob_config_check(NULL), COLO_ERR_ARG, "config is NULL");
}

static void every_bad_tensor_is_refused_with_its_number(void **state)
{
    (void)state;
    REJECT(a.logits.dtype = COLO_I32, COLO_ERR_ARG, "logits: dtype i32");
    REJECT(a.logits.ndim = 1, COLO_ERR_SHAPE, "logits: 1 axes, expected 2");
    REJECT(a.logits.stride[1] = 2, COLO_ERR_SHAPE, "columns are 2 elements apart");
    REJECT(a.logits.data = NULL, COLO_ERR_ARG, "logits: data is NULL");
    REJECT(a.logits.shape[0] = -1, COLO_ERR_SHAPE, "extent -1");
    REJECT(a.target.dtype = COLO_I32, COLO_ERR_ARG, "targets: dtype i32, expected i64");
    REJECT(a.target.shape[0] = 3, COLO_ERR_SHAPE, "3 elements, expected [4]");
    REJECT(a.target.ndim = 0, COLO_ERR_SHAPE, "0 axes");
    REJECT(a.target.mem = COLO_CUDA, COLO_ERR_ARG, "targets: memory kind 1");
    REJECT((a.logits.shape[1] = 5, a.logits.stride[0] = 6), COLO_ERR_SHAPE,
           "columns [0, 5) on a group of one rank, expected the whole vocabulary [0, 6)");
    REJECT(a.cfg.vocab_start = 1, COLO_ERR_SHAPE, "columns [1, 7) on a group of one rank");
}

static void an_output_that_the_config_does_not_want_is_refused(void **state)
{
    (void)state;
    REJECT(a.cfg.want_entropy = false, COLO_ERR_ARG, "out.entropy is given");
    REJECT(a.cfg.want_loss = false, COLO_ERR_ARG, "out.loss is given");
    REJECT(a.cfg.want_correct = false, COLO_ERR_ARG, "out.correct is given");
}

static void every_bad_pointer_is_refused(void **state)
{
    alone_t a;
    size_t n = 77;
    (void)state;
    alone_init(&a);
    assert_fails(colo_logprob_forward(&a.cfg, &a.logits, &a.target, NULL, &a.out, &a.saved, a.stats,
                                      a.scratch, NULL),
                 COLO_ERR_ARG, "group is NULL; colo_comm_create_self()");
    assert_fails(colo_logprob_forward(&a.cfg, NULL, &a.target, a.self, &a.out, &a.saved, a.stats,
                                      a.scratch, NULL),
                 COLO_ERR_ARG, "logits: tensor is NULL");
    assert_fails(colo_logprob_forward(&a.cfg, &a.logits, NULL, a.self, &a.out, &a.saved, a.stats,
                                      a.scratch, NULL),
                 COLO_ERR_ARG, "targets: tensor is NULL");
    assert_fails(colo_logprob_forward(&a.cfg, &a.logits, &a.target, a.self, NULL, &a.saved, a.stats,
                                      a.scratch, NULL),
                 COLO_ERR_ARG, "out is NULL");
    assert_fails(colo_logprob_forward(&a.cfg, &a.logits, &a.target, a.self, &a.out, &a.saved, NULL,
                                      a.scratch, NULL),
                 COLO_ERR_ARG, "stats is NULL; it needs 96 bytes");
    assert_fails(colo_logprob_forward(&a.cfg, &a.logits, &a.target, a.self, &a.out, NULL, a.stats,
                                      a.scratch, NULL),
                 COLO_ERR_ARG, "stats is given, saved is NULL");
    assert_fails(colo_logprob_forward(&a.cfg, &a.logits, &a.target, a.self, &a.out, &a.saved,
                                      a.stats, NULL, NULL),
                 COLO_ERR_ARG, "scratch is NULL");
    assert_fails(colo_logprob_forward(&a.cfg, &a.logits, &a.target, a.self, &a.out, &a.saved,
                                      a.stats, a.scratch + 3, NULL),
                 COLO_ERR_ARG, "scratch: its address is");
    assert_forward_wrote_nothing(&a);
    assert_fails(colo_logprob_scratch_size(&a.cfg, COLO_I8, 4, 1, &n), COLO_ERR_ARG, "dtype i8");
    assert_fails(colo_logprob_scratch_size(&a.cfg, COLO_F32, -1, 1, &n), COLO_ERR_ARG,
                 "tokens is -1");
    assert_fails(colo_logprob_scratch_size(&a.cfg, COLO_F32, 4, 0, &n), COLO_ERR_ARG, "ranks is 0");
    assert_fails(colo_logprob_scratch_size(&a.cfg, COLO_F32, INT64_MAX / 8, 2, &n), COLO_ERR_ARG,
                 "exceeds 2^63 bytes");
    assert_fails(colo_logprob_saved_size(&a.cfg, COLO_F32, INT64_MAX / 8, &n), COLO_ERR_ARG,
                 "exceed 2^63 bytes");
    assert_fails(colo_logprob_saved_size(&a.cfg, COLO_F32, 1, NULL), COLO_ERR_ARG, "bytes is NULL");
    assert_int_equal(n, 77);
    colo_comm_destroy(&a.self);
}

#define REJECT_BACKWARD(change, status, sentence)           \
    do {                                                    \
        alone_t a;                                          \
        alone_init(&a);                                     \
        assert_ok(alone_forward(&a));                       \
        change;                                             \
        assert_fails(alone_backward(&a), status, sentence); \
        assert_true(painted(a.dz, sizeof a.dz));            \
        assert_true(a.saved.valid);                         \
        colo_comm_destroy(&a.self);                         \
    } while (0)

static void every_bad_backward_is_refused(void **state)
{
    alone_t b;
    (void)state;
    REJECT_BACKWARD(a.d_logits.dtype = COLO_F64, COLO_ERR_ARG,
                    "d_logits: dtype f64, the logits are");
    REJECT_BACKWARD(a.d_logits.shape[0] = 3, COLO_ERR_SHAPE, "[3, 6], expected [4, 6]");
    REJECT_BACKWARD(a.d_logits.shape[1] = 5, COLO_ERR_SHAPE, "[4, 5], expected [4, 6]");
    REJECT_BACKWARD(a.d_logits.ndim = 1, COLO_ERR_SHAPE, "d_logits: 1 axes");
    REJECT_BACKWARD(a.d_logits.stride[0] = 5, COLO_ERR_SHAPE, "5 elements apart and overlap");
    REJECT_BACKWARD(a.d_logits.mem = COLO_CUDA, COLO_ERR_ARG, "d_logits: memory kind 1");
    REJECT_BACKWARD(a.d_logits.data = NULL, COLO_ERR_ARG, "d_logits: data is NULL");
    REJECT_BACKWARD((a.saved.config.want_entropy = false, a.upstream.d_entropy = a.up),
                    COLO_ERR_ARG, "d_entropy is given");
    REJECT_BACKWARD((a.saved.config.want_loss = false, a.upstream.d_loss = a.up), COLO_ERR_ARG,
                    "d_loss is given");
    alone_init(&b);
    assert_fails(colo_logprob_backward(NULL, &b.upstream, &b.d_logits, NULL), COLO_ERR_ARG,
                 "saved is NULL");
    assert_ok(alone_forward(&b));
    assert_fails(colo_logprob_backward(&b.saved, NULL, &b.d_logits, NULL), COLO_ERR_ARG,
                 "upstream is NULL");
    assert_fails(colo_logprob_backward(&b.saved, &b.upstream, NULL, NULL), COLO_ERR_ARG,
                 "d_logits: tensor is NULL");
    colo_comm_destroy(&b.self);
}

/* ---- ranks that disagree ---- */

typedef struct disagreement {
    int kind;
    colo_status_t status[2];
    char sentence[2][256];
} disagreement_t;

static colo_status_t disagree(colo_comm_t *world, void *arg)
{
    disagreement_t *d = arg;
    const int r = colo_comm_rank(world);
    colo_logprob_config_t cfg = {COLO_LOGPROB_CONFIG_INIT, .vocab = 8, .vocab_start = 4 * r};
    float z[2 * 4] = {0}, logp[2];
    int64_t targets[2] = {1, 2};
    double stats[6];
    unsigned char scratch[512];
    memset(logp, CANARY, sizeof logp);
    memset(stats, CANARY, sizeof stats);
    if (r == 1 && d->kind == 0)
        cfg.temperature = 2;
    if (r == 1 && d->kind == 1)
        targets[1] = 3;
    if (r == 1 && d->kind == 2)
        cfg.vocab_start = 5;
    if (r == 1 && d->kind == 3)
        cfg.vocab_start = 3;
    if (d->kind == 4)
        cfg.vocab_start = 0;
    if (r == 1 && d->kind == 5)
        cfg.softcap = -1;
    colo_tensor_t logits = colo_tensor_host(z, COLO_F32, 2, (int64_t[]){2, 4});
    colo_tensor_t tg = colo_tensor_host(targets, COLO_I64, 1, (int64_t[]){2});
    colo_logprob_out_t out = {.logp = logp};
    colo_logprob_saved_t saved = {.valid = false};
    d->status[r] =
        colo_logprob_forward(&cfg, &logits, &tg, world, &out, &saved, stats, scratch, NULL);
    snprintf(d->sentence[r], sizeof d->sentence[r], "%s", colo_last_error());
    if (!painted(logp, sizeof logp) || !painted(stats, sizeof stats) || saved.valid)
        return t_rank_fail(__FILE__, __LINE__, "nothing was written");
    if (d->kind == 5)
        return d->status[r];
    return colo_comm_barrier(world, NULL); /* the group lives on */
}

static void ranks_that_disagree_get_the_same_sentence_and_live_on(void **state)
{
    static const char *const sentences[] = {
        "rank 1 has another config or dtype than rank 0",
        "rank 1 has other targets than rank 0",
        "no rank of 2 holds column 4 of the vocabulary of 8",
        "no rank of 2 holds column 7 of the vocabulary of 8",
        "no rank of 2 holds column 4",
    };
    (void)state;
    for (int kind = 0; kind < 5; kind++) {
        disagreement_t d = {.kind = kind};
        assert_ok(colo_comm_threads_run(2, disagree, &d));
        for (int r = 0; r < 2; r++) {
            assert_int_equal(d.status[r], COLO_ERR_MISMATCH);
            if (!strstr(d.sentence[r], sentences[kind]))
                fail_msg("rank %d: \"%s\" lacks \"%s\"", r, d.sentence[r], sentences[kind]);
        }
        assert_string_equal(d.sentence[0], d.sentence[1]);
    }
}

/* Shards that cover everything, one column twice. */
static void a_column_on_two_ranks_is_a_mismatch(void **state)
{
    uint64_t rng = t_seed() + 5;
    loss_case_t c;
    (void)state;
    loss_case_init(&c, 3, 2, 9, COLO_F32, 1, &rng);
    c.start[1] = 2;
    c.columns[1] = 4;
    c.forward_only = true;
    assert_fails(loss_case_run(&c), COLO_ERR_MISMATCH,
                 "3 ranks hold 10 columns, the vocabulary has 9: some are on two ranks");
    loss_case_free(&c);
}

static void a_rank_with_a_bad_argument_does_not_leave_the_others_waiting(void **state)
{
    disagreement_t d = {.kind = 5};
    (void)state;
    assert_fails(colo_comm_threads_run(2, disagree, &d), COLO_ERR_ARG, "rank 1: ");
    assert_int_equal(d.status[1], COLO_ERR_ARG);
    assert_int_equal(d.status[0], COLO_ERR_PEER);
    if (!strstr(d.sentence[0], "softcap is -1"))
        fail_msg("the peer's sentence is \"%s\"", d.sentence[0]);
}

static void cuda_memory_without_a_cuda_build_is_said_so(void **state)
{
    (void)state;
    REJECT((a.logits.mem = a.target.mem = COLO_CUDA, a.logits.device = a.target.device = 0),
           COLO_ERR_UNBUILT, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_gathers_once_and_backward_never),
        cmocka_unit_test(the_gather_carries_a_few_numbers_a_token),
        cmocka_unit_test(chunking_changes_no_bit),
        cmocka_unit_test(scratch_is_bounded_by_the_chunk_and_never_by_the_vocabulary),
        cmocka_unit_test(backward_twice_gives_the_same_bits),
        cmocka_unit_test(logits_written_after_they_were_saved_are_refused),
        cmocka_unit_test(in_place_ends_the_saved_state),
        cmocka_unit_test(any_other_overlap_with_the_logits_is_refused),
        cmocka_unit_test(nothing_is_written_past_the_queried_sizes),
        cmocka_unit_test(ignored_rows_are_not_read),
        cmocka_unit_test(forward_without_saved_needs_no_stats),
        cmocka_unit_test(outputs_that_are_null_are_not_written),
        cmocka_unit_test(every_bad_config_is_refused_with_its_number),
        cmocka_unit_test(every_bad_tensor_is_refused_with_its_number),
        cmocka_unit_test(an_output_that_the_config_does_not_want_is_refused),
        cmocka_unit_test(every_bad_pointer_is_refused),
        cmocka_unit_test(every_bad_backward_is_refused),
        cmocka_unit_test(ranks_that_disagree_get_the_same_sentence_and_live_on),
        cmocka_unit_test(a_column_on_two_ranks_is_a_mismatch),
        cmocka_unit_test(a_rank_with_a_bad_argument_does_not_leave_the_others_waiting),
        cmocka_unit_test(cuda_memory_without_a_cuda_build_is_said_so),
    };
    return cmocka_run_group_tests_name("loss/logprob_guards", tests, NULL, NULL);
}
