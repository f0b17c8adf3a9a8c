/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 03_loss.c - log-probability and its gradient when the vocabulary is cut over four ranks.
 *
 * Ten words, three tokens; rank r has the columns [floor(10 r / 4), floor(10 (r + 1) / 4)), so two
 * or three each. Forward does one all-gather of a few numbers per token, backward none. Every rank
 * then compares its shard of the gradient of -sum(logp), softmax minus one-hot, with the same
 * computed in one piece.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <colobridge.h>

enum { RANKS = 4, TOKENS = 3, VOCAB = 10 };

static const int64_t target[TOKENS] = {2, 9, 4};

struct job {
    double logp[RANKS][TOKENS], error[RANKS];
    uint64_t gathers[RANKS];
};

/* any logits; each rank could compute all of them, but each rank only makes its columns */
static double logit(int64_t t, int64_t v)
{
    return 2.0 * sin(1.7 * (double)t + 0.9 * (double)v);
}

/* softmax(z)[v] - [v == target]: the gradient of -logp */
static double expected(int64_t t, int64_t v)
{
    double sum = 0.0;
    for (int64_t j = 0; j < VOCAB; j++)
        sum += exp(logit(t, j));
    return exp(logit(t, v)) / sum - (v == target[t] ? 1.0 : 0.0);
}

static colo_status_t rank_main(colo_comm_t *tp, void *arg)
{
    struct job *job = arg;
    int r = colo_comm_rank(tp);
    int64_t v0 = r * VOCAB / RANKS, v1 = (r + 1) * VOCAB / RANKS, local = v1 - v0;
    double z[TOKENS * VOCAB], dz[TOKENS * VOCAB], up[TOKENS] = {-1.0, -1.0, -1.0}, logp[TOKENS];
    colo_logprob_config_t config = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = VOCAB,
                                    .logits.vocab_start = v0};
    size_t saved_size, workspace_size;

    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t v = v0; v < v1; v++)
            z[t * local + v - v0] = logit(t, v);

    colo_status_t st = colo_logprob_saved_size(&config, COLO_F64, TOKENS, &saved_size);
    if (st < 0)
        return st;
    st = colo_logprob_workspace_size(&config, COLO_F64, TOKENS, RANKS, &workspace_size);
    if (st < 0)
        return st;
    void *kept = aligned_alloc(COLO_ALIGNMENT, saved_size);
    void *workspace = aligned_alloc(COLO_ALIGNMENT, workspace_size);
    colo_tensor_t logits = colo_tensor_host(z, COLO_F64, 2, (int64_t[]){TOKENS, local});
    colo_tensor_t d_logits = colo_tensor_host(dz, COLO_F64, 2, (int64_t[]){TOKENS, local});
    colo_tensor_t targets = colo_tensor_host((void *)target, COLO_I64, 1, (int64_t[]){TOKENS});
    colo_tensor_t of_logp = colo_tensor_host(logp, COLO_F64, 1, (int64_t[]){TOKENS});
    colo_tensor_t d_logp = colo_tensor_host(up, COLO_F64, 1, (int64_t[]){TOKENS});
    colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &logits, .targets = &targets};
    colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &of_logp};
    colo_logprob_upstream_t upstream = {COLO_LOGPROB_UPSTREAM_INIT, .d_logp = &d_logp};
    colo_logprob_saved_t saved = {COLO_LOGPROB_SAVED_INIT};

    st = colo_logprob_forward(&config, &batch, tp, &out, &saved, kept, workspace, NULL);
    if (st >= 0)
        st = colo_logprob_backward(&saved, &upstream, &d_logits, NULL);
    if (st >= 0) {
        colo_comm_stats_t stats = {COLO_COMM_STATS_INIT};
        st = colo_comm_stats(tp, &stats);
        job->gathers[r] = stats.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS];
        for (int64_t t = 0; t < TOKENS; t++) {
            job->logp[r][t] = logp[t];
            for (int64_t v = v0; v < v1; v++)
                job->error[r] = fmax(job->error[r], fabs(dz[t * local + v - v0] - expected(t, v)));
        }
    }
    free(kept);
    free(workspace);
    return st;
}

int main(void)
{
    static struct job job;
    int bad = 0;

    if (colo_comm_threads_run(RANKS, rank_main, &job) < 0) {
        fprintf(stderr, "03_loss: %s\n", colo_last_error());
        return 1;
    }
    for (int r = 0; r < RANKS; r++) {
        printf("rank %d, words %d to %d: logp", r, r * VOCAB / RANKS, (r + 1) * VOCAB / RANKS - 1);
        for (int t = 0; t < TOKENS; t++)
            printf(" %.12f", job.logp[r][t]);
        printf(", largest gradient error %.1e, all-gathers %llu\n", job.error[r],
               (unsigned long long)job.gathers[r]);
        bad |= !(job.error[r] < 1e-12) || job.gathers[r] != 1;
    }
    return bad;
}
