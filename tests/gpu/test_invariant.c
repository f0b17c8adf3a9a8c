/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_invariant.c - with segments, kernels and products give the same bits on 1, 2, 4 and 8 ranks,
 * which share one GPU, and for any tokens in a call. Rows are long enough for whole runs of the
 * kernels on one rank and too short for them on eight. That the values are right, is tested with
 * the oracle on the host; here they are near those without segments.
 */
#include "loss/loss_case.h"
#include "loss/where.h"

enum { TOKENS = 37, HIDDEN = 72, SEGMENT = 2064, ROWS = 8 * SEGMENT, VOCAB = ROWS - 40 };
enum { LOGPROB, KEEP, LOSS, EARLY, LOGITS, MODES };
static const char *const names[] = {"logprob", "keep", "loss", "early", "logits"};

static uint16_t hidden[TOKENS * HIDDEN], weight[ROWS * HIDDEN], logits[TOKENS * ROWS];
static int64_t targets[TOKENS];
static float upstream[TOKENS];

/* What one run got; of all ranks, which write their columns. */
typedef struct got {
    float logp[TOKENS], entropy[TOKENS];
    uint16_t d_h[TOKENS * HIDDEN], d_logits[TOKENS * ROWS];
    float d_w[ROWS * HIDDEN];
} got_t;

typedef struct job {
    int mode;
    int64_t lo, n, segment, chunk; /* tokens [lo, lo + n) */
    got_t *got;
} job_t;

static colo_tensor_t tensor(void *data, colo_dtype_t dtype, int64_t rows, int64_t columns)
{
    return where_tensor(data, dtype, 2, (int64_t[]){rows, columns});
}

static void *take(const void *from, size_t bytes)
{
    return where.put(from, bytes + COLO_ALIGNMENT);
}

static colo_status_t run_logits(const job_t *j, colo_comm_t *group, int64_t first, int64_t columns)
{
    const size_t n = (size_t)j->n, wide = (size_t)columns * 2;
    colo_logprob_config_t c = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = VOCAB,
                               .want_entropy = true, .segment = j->segment, .chunk_size = j->chunk};
    c.logits.vocab_start = first;
    COLO_AUTOFREE uint16_t *own = malloc(n * wide);
    for (size_t t = 0; t < n; t++)
        memcpy(own + t * (size_t)columns, logits + ((size_t)j->lo + t) * ROWS + first, wide);
    size_t saved_bytes, work_bytes;
    rank_try(colo_logprob_saved_size(&c, COLO_BF16, j->n, &saved_bytes));
    rank_try(colo_logprob_workspace_size(&c, COLO_BF16, j->n, colo_comm_size(group), &work_bytes));
    void *z = where.put(own, n * wide), *dz = take(NULL, n * wide), *kept = take(NULL, saved_bytes),
         *work = take(NULL, work_bytes), *ids = where.put(targets + j->lo, n * 8),
         *logp = take(NULL, n * 4), *entropy = take(NULL, n * 4),
         *up = where.put(upstream + j->lo, n * 4);
    colo_tensor_t x = tensor(z, COLO_BF16, j->n, columns), d = tensor(dz, COLO_BF16, j->n, columns),
                  t = where_tensor(ids, COLO_I64, 1, &j->n);
    colo_logprob_saved_t saved;
    rank_try(colo_logprob_forward(&c, &(colo_logprob_batch_t){.logits = &x, .targets = &t}, group,
                                  &(colo_logprob_out_t){.logp = logp, .entropy = entropy}, &saved,
                                  kept, work, NULL));
    rank_try(colo_logprob_backward(
        &saved, &(colo_logprob_upstream_t){.d_logp = up, .d_entropy = up}, &d, NULL));
    where.get(own, dz, n * wide);
    for (size_t i = 0; i < n; i++)
        memcpy(j->got->d_logits + i * ROWS + first, own + i * (size_t)columns, wide);
    if (colo_comm_rank(group) == colo_comm_size(group) - 1) {
        where.get(j->got->logp, logp, n * 4);
        where.get(j->got->entropy, entropy, n * 4);
    }
    void *all[] = {z, dz, kept, work, ids, logp, entropy, up};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        where.drop(all[i]);
    return COLO_OK;
}

static colo_status_t run_head(const job_t *j, colo_comm_t *group, int64_t first, int64_t columns)
{
    static const colo_linear_mode_t modes[] = {COLO_LINEAR_LOGPROB, COLO_LINEAR_KEEP,
                                               COLO_LINEAR_LOGPROB, COLO_LINEAR_EARLY};
    const size_t n = (size_t)j->n, size = (size_t)columns * HIDDEN;
    colo_linear_logprob_config_t c = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .mode = modes[j->mode]};
    c.logprob.logits.vocab = VOCAB;
    c.logprob.logits.vocab_start = first;
    c.logprob.want_entropy = true;
    c.logprob.segment = j->segment;
    c.logprob.chunk_size = j->chunk;
    c.logits_dtype = COLO_BF16;
    c.d_hidden = colo_comm_size(group) > 1 ? COLO_D_HIDDEN_ALL_REDUCE : COLO_D_HIDDEN_PARTIAL;
    c.d_weight_add = false;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = columns, .hidden = HIDDEN,
                                .dtype = COLO_BF16, .mem = where.mem};
    hc.device = where.device;
    colo_lm_head_t *head = NULL;
    colo_linear_logprob_t *linear = NULL;
    rank_try(colo_lm_head_create(&head, &hc, NULL));
    void *w = where.put(weight + first * HIDDEN, size * 2),
         *h = where.put(hidden + j->lo * HIDDEN, n * HIDDEN * 2),
         *ids = where.put(targets + j->lo, n * 8), *up = where.put(upstream + j->lo, n * 4),
         *logp = take(NULL, n * 4), *entropy = take(NULL, n * 4), *dh = take(NULL, n * HIDDEN * 2),
         *dw = take(NULL, size * 4);
    colo_tensor_t tw = tensor(w, COLO_BF16, columns, HIDDEN),
                  th = tensor(h, COLO_BF16, j->n, HIDDEN),
                  d_h = tensor(dh, COLO_BF16, j->n, HIDDEN),
                  d_w = tensor(dw, COLO_F32, columns, HIDDEN),
                  t = where_tensor(ids, COLO_I64, 1, &j->n);
    rank_try(colo_lm_head_bind(head, &tw, NULL, NULL));
    rank_try(colo_linear_logprob_create(&linear, &c, head, group));
    size_t saved_bytes = 0, bytes, work_bytes = 0;
    for (int pass = 0; pass < 3; pass++) {
        rank_try(
            colo_linear_logprob_workspace_size(linear, (colo_linear_pass_t)pass, j->n, -1, &bytes));
        work_bytes = bytes > work_bytes ? bytes : work_bytes;
    }
    rank_try(colo_linear_logprob_saved_size(linear, j->n, -1, &saved_bytes));
    void *work = take(NULL, work_bytes), *kept = take(NULL, saved_bytes);
    const colo_linear_batch_t batch = {&th, &t, -1, NULL};
    const colo_logprob_out_t out = {.logp = logp, .entropy = entropy};
    const colo_linear_grads_t grads = {&d_h, &d_w, NULL};
    colo_linear_upstream_t u = {.logp = 1, .entropy = 0.5, .d_logp = up, .d_entropy = up};
    colo_linear_logprob_saved_t saved;
    if (j->mode == LOSS) {
        rank_try(colo_linear_logprob_loss(linear, &batch, &u, &out, &grads, work, NULL));
    } else {
        rank_try(j->mode == EARLY
                     ? colo_linear_logprob_early(linear, &batch, &u, &out, &saved, kept, work, NULL)
                     : colo_linear_logprob_forward(linear, &batch, &out, &saved, kept, work, NULL));
        if (j->mode == EARLY)
            u = (colo_linear_upstream_t){.loss = 1};
        rank_try(colo_linear_logprob_backward(linear, &saved, &u, &grads, work, NULL));
    }
    where.get(j->got->d_w + first * HIDDEN, dw, size * 4);
    if (colo_comm_rank(group) == colo_comm_size(group) - 1) {
        where.get(j->got->logp, logp, n * 4);
        where.get(j->got->entropy, entropy, n * 4);
        where.get(j->got->d_h, dh, n * HIDDEN * 2);
    }
    colo_linear_logprob_destroy(&linear);
    colo_lm_head_destroy(&head);
    void *all[] = {w, h, ids, up, logp, entropy, dh, dw, work, kept};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        where.drop(all[i]);
    return COLO_OK;
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    const job_t *j = arg;
    const int64_t columns = ROWS / colo_comm_size(world), first = columns * colo_comm_rank(world);
    colo_comm_t *group = NULL;
    rank_try(where.group(world, &group));
    colo_status_t st = j->mode == LOGITS ? run_logits(j, group, first, columns)
                                         : run_head(j, group, first, columns);
    where.leave(&group);
    return st;
}

static got_t *run(int mode, int32_t ranks, int64_t lo, int64_t n, int64_t segment, int64_t chunk)
{
    job_t j = {mode, lo, n, segment, chunk, calloc(1, sizeof *j.got)};
    assert_ok(colo_comm_threads_run(ranks, on_rank, &j));
    return j.got;
}

static void draw(void)
{
    uint64_t rng = t_seed();
    for (size_t i = 0; i < sizeof hidden / 2; i++)
        loss_store(COLO_BF16, hidden, (int64_t)i, loss_round(COLO_BF16, loss_normal(&rng)));
    for (size_t i = 0; i < sizeof weight / 2; i++)
        loss_store(COLO_BF16, weight, (int64_t)i, loss_round(COLO_BF16, 0.3 * t_uniform(&rng)));
    for (size_t i = 0; i < sizeof logits / 2; i++)
        loss_store(COLO_BF16, logits, (int64_t)i, loss_round(COLO_BF16, 8 * t_uniform(&rng)));
    for (int t = 0; t < TOKENS; t++) {
        targets[t] = t == 3 ? -100 : t_below(&rng, VOCAB);
        upstream[t] = (float)(t_uniform(&rng) + 0.1);
    }
}

#define SAME(member, from, count)                                                             \
    if (memcmp(part->member, whole->member + (from), (size_t)(count) * sizeof *part->member)) \
    fail_msg("%s, W %d, tokens [%d, %d): %s differs", names[mode], (int)ranks, (int)lo,       \
             (int)(lo + n), #member)

static void same_bits(const got_t *part, const got_t *whole, int mode, int32_t ranks, int64_t lo,
                      int64_t n)
{
    SAME(logp, lo, n);
    SAME(entropy, lo, n);
    SAME(d_h, lo * HIDDEN, n * HIDDEN);
    SAME(d_logits, lo * ROWS, n * ROWS);
    if (n == TOKENS)
        SAME(d_w, 0, ROWS * HIDDEN);
}

T_CASE(segments_give_the_same_bits_on_ranks_that_share_a_gpu)
{
    static const int32_t worlds[] = {1, 2, 4, 8};
    static const int64_t cuts[] = {0, 1, 12, TOKENS};
    draw();
    for (int mode = 0; mode < MODES; mode++) {
        got_t *whole = run(mode, 1, 0, TOKENS, SEGMENT, 0), *off = run(mode, 1, 0, TOKENS, 0, 0);
        for (int t = 0; t < TOKENS; t++) {
            assert_true(fabsf(whole->logp[t] - off->logp[t]) < 1e-3f);
            assert_true(t == 3 || whole->logp[t] < -1);
        }
        free(off);
        for (int w = 0; w < 4; w++) {
            got_t *part = run(mode, worlds[w], 0, TOKENS, SEGMENT, 5 * w);
            same_bits(part, whole, mode, worlds[w], 0, TOKENS);
            free(part);
            for (int g = 0; g < 3; g++) {
                const int64_t lo = cuts[g], n = cuts[g + 1] - lo;
                part = run(mode, worlds[w], lo, n, SEGMENT, 0);
                same_bits(part, whole, mode, worlds[w], lo, n);
                free(part);
            }
        }
        free(whole);
    }
}

T_MAIN_IF(where.need(), "gpu/invariant")
