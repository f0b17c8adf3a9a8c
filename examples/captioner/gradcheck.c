/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gradcheck.c - are the gradients of all ranks together those of the model.
 *
 * Decides: raw gradients are compared, before Adam (a step of Adam hides any wrong scale), with the
 * serial fp64 run of oracle.c from the very same weights, which are gathered from the ranks. Twice:
 * at the initial weights, where every part still works on noise, and after some parallel training
 * steps, where wrong steps would have taken replicas apart. The error of a parameter is relative to
 * its own norm, but to no less than a thousandth of the largest parameter's: a key bias has no
 * gradient but rounding.
 *
 * Two runs whose gradients are the same bits print the same "bits". With --loss linear the same
 * batch goes through the logits, too, and both gradients are compared by the same measure.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"

#define LIMIT 1e-5
enum { MOMENTS = 2 };

struct check {
    float *w[CAP_MAX_PARAMS], *g[CAP_MAX_PARAMS]; /* whole */
    float *logits[CAP_MAX_PARAMS];                /* gradients by way of the logits */
    double against_logits[MOMENTS];               /* the worst parameter's difference from these */
    uint64_t bits;                                /* a hash of weights and gradients so far */
    double *want[CAP_MAX_PARAMS];
    double error[MOMENTS][CAP_MAX_PARAMS];
    double loss[MOMENTS], loss_want[MOMENTS];
    bool same[MOMENTS];
    cap_stats_t stats; /* of the two checked passes */
};

static colo_status_t take(cap_rank_t *r, struct check *k)
{
    for (int i = 0; i < r->nparams; i++) {
        int64_t count = r->table[i].rows * r->table[i].cols;
        k->w[i] = cap_take(&r->arena, count, sizeof(float));
        k->g[i] = cap_take(&r->arena, count, sizeof(float));
        if (r->cfg->loss_linear)
            k->logits[i] = cap_take(&r->arena, count, sizeof(float));
        if (colo_comm_rank(r->world) == 0)
            k->want[i] = cap_take(&r->arena, count, sizeof(double));
    }
    return r->arena.failed ? COLO_ERR_NOMEM : COLO_OK;
}

static double value_of(const float *f, const double *d, int64_t j)
{
    return f ? (double)f[j] : d[j];
}

/* Relative differences of k->g from @f or @d, parameter by parameter */
static void compare(const cap_rank_t *r, const struct check *k, float *const *f, double *const *d,
                    double *error)
{
    double norm[CAP_MAX_PARAMS], most = 0;

    for (int i = 0; i < r->nparams; i++) {
        int64_t count = r->table[i].rows * r->table[i].cols;
        double differ = 0;

        norm[i] = 0;
        for (int64_t j = 0; j < count; j++) {
            double want = value_of(f ? f[i] : NULL, d ? d[i] : NULL, j);
            double off = (double)k->g[i][j] - want;
            differ += off * off;
            norm[i] += want * want;
        }
        norm[i] = sqrt(norm[i]);
        error[i] = sqrt(differ);
        most = norm[i] > most ? norm[i] : most;
    }
    for (int i = 0; i < r->nparams; i++)
        error[i] /= norm[i] > 1e-3 * most ? norm[i] : 1e-3 * most;
}

static uint64_t hash_floats(uint64_t h, const float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, x + i, sizeof word);
        h = (h ^ word) * UINT64_C(0x100000001b3);
    }
    return h;
}

/* The same batch at the same weights, by way of the logits. */
static colo_status_t compare_with_logits(cap_rank_t *r, struct check *k, int moment, int64_t step)
{
    double error[CAP_MAX_PARAMS], loss, worst = 0;

    r->loss_linear = false;
    CAP_TRY(cap_step(r, step, 0, &loss));
    r->loss_linear = true;
    CAP_TRY(cap_gather(r, r->g, k->logits));
    compare(r, k, k->logits, NULL, error);
    for (int i = 0; i < r->nparams; i++)
        if (!(error[i] <= worst) && isfinite(worst))
            worst = error[i]; /* a NaN stays */
    k->against_logits[moment] = worst;
    return COLO_OK;
}

/* One batch without an update; rank 0 then runs the oracle while the others wait. */
static colo_status_t check_at(cap_rank_t *r, struct check *k, int moment, int64_t step)
{
    const cap_config_t *cfg = r->cfg;
    cap_stats_t before, after;

    cap_stats_now(r, &before);
    CAP_TRY(cap_step(r, step, 0, &k->loss[moment]));
    cap_stats_now(r, &after);
    cap_stats_add(&k->stats, &before, &after);
    CAP_TRY(cap_gather(r, r->w, k->w));
    CAP_TRY(cap_gather(r, r->g, k->g));
    CAP_TRY(cap_replicas(r, &k->same[moment]));
    for (int i = 0; i < r->nparams; i++) {
        int64_t count = r->table[i].rows * r->table[i].cols;
        k->bits = hash_floats(hash_floats(k->bits, k->w[i], count), k->g[i], count);
    }
    if (cfg->loss_linear)
        CAP_TRY(compare_with_logits(r, k, moment, step));
    if (colo_comm_rank(r->world) == 0) {
        fprintf(stderr, "serial run %d of %d in fp64: %lld samples\n", moment + 1, MOMENTS,
                (long long)cfg->batch);
        k->loss_want[moment] = cap_oracle(&cfg->model, &cfg->task, cfg->data, r->rows, cfg->batch,
                                          (const float *const *)k->w, k->want);
        compare(r, k, NULL, k->want, k->error[moment]);
    }
    return colo_comm_barrier(r->host, NULL);
}

static void print_table(const cap_rank_t *r, const struct check *k, FILE *out)
{
    fprintf(out, "%-14s %14s %17s %2lld\n", "parameter", "at the start",
            "after steps:", (long long)r->cfg->steps);
    for (int i = 0; i < r->nparams; i++)
        fprintf(out, "%-14s %14.3e %20.3e%s\n", r->table[i].name, k->error[0][i], k->error[1][i],
                k->error[0][i] <= LIMIT && k->error[1][i] <= LIMIT ? "" : "   FAILS");
    fprintf(out, "%-14s %14.8f %20.8f\n%-14s %14.8f %20.8f\n", "loss, ranks", k->loss[0],
            k->loss[1], "loss, serial", k->loss_want[0], k->loss_want[1]);
}

/* JSON has no NaN. */
static void print_losses(const char *name, const double *loss)
{
    printf(",\"%s\":[", name);
    for (int m = 0; m < MOMENTS; m++)
        printf(isfinite(loss[m]) ? "%s%.9g" : "%snull", m ? "," : "", loss[m]);
    printf("]");
}

static void verdict(cap_rank_t *r, struct check *k)
{
    cap_config_t *cfg = r->cfg;
    int64_t plan = cap_planned_bytes(r, &k->stats, MOMENTS);
    uint64_t moved = cap_bridge_bytes(&k->stats);
    bool ok = true, replicas = true, finite = true;
    double worst = -1;
    int worst_at = 0;

    for (int m = 0; m < MOMENTS; m++) {
        for (int i = 0; i < r->nparams; i++) {
            finite = finite && isfinite(k->error[m][i]);
            if (!(k->error[m][i] <= worst) && isfinite(worst)) {
                worst = k->error[m][i];
                worst_at = i;
            }
        }
        replicas = replicas && k->same[m];
        ok = ok && k->against_logits[m] <= LIMIT;
        ok = ok && fabs(k->loss[m] - k->loss_want[m]) <= LIMIT * fabs(k->loss_want[m]);
    }
    bool planned = cfg->algo != COLO_ALGO_EXACT || (plan >= 0 && moved == (uint64_t)plan);
    ok = ok && finite && worst <= LIMIT && replicas && planned;

    print_table(r, k, stdout);
    if (!replicas)
        printf("replicas of a shard differ\n");
    if (!planned)
        printf("the bridge received %llu bytes, the plan says %lld\n",
               (unsigned long long)moved / MOMENTS, (long long)plan / MOMENTS);
    printf("{\"ok\":%s,\"worst_error\":", ok ? "true" : "false");
    printf(finite ? "%.3e" : "null", worst);
    printf(",\"worst_parameter\":\"%s\",\"limit\":%.0e,\"steps\":[0,%lld]", r->table[worst_at].name,
           LIMIT, (long long)cfg->steps);
    print_losses("loss_parallel", k->loss);
    print_losses("loss_oracle", k->loss_want);
    if (cfg->loss_linear)
        print_losses("against_logits", k->against_logits);
    printf(",\"bits\":\"%016llx\"", (unsigned long long)k->bits);
    printf(",\"replicas_identical\":%s,\"collectives\":{", replicas ? "true" : "false");
    for (int o = 0; o < COLO_OP_COUNT; o++) {
        uint64_t ops = 0;
        for (int i = 0; i < CAP_COMMS; i++)
            for (int w = 0; w < COLO_CATEGORY_COUNT; w++)
                ops += k->stats.of[i].ops[o][w];
        printf("%s\"%s\":%llu", o ? "," : "", colo_op_name((colo_op_kind_t)o),
               (unsigned long long)ops / MOMENTS);
    }
    printf("},\"bridge_recv_bytes\":%llu,\"plan_recv_bytes\":%lld,\"world\":%d,\"src\":\"%s\","
           "\"dst\":\"%s\"}\n",
           (unsigned long long)moved / MOMENTS, (long long)plan / MOMENTS, cfg->world,
           cfg->src_text, cfg->dst_text);
    cfg->exit_code = ok ? 0 : 1;
}

colo_status_t cap_check_gradients(cap_rank_t *r)
{
    struct check *k = cap_take(&r->arena, 1, sizeof *k);
    double loss;

    if (!k)
        return COLO_ERR_NOMEM;
    CAP_TRY(take(r, k));
    CAP_TRY(check_at(r, k, 0, 0));
    for (int64_t step = 0; step < r->cfg->steps; step++)
        CAP_TRY(cap_step(r, step, r->cfg->lr, &loss));
    CAP_TRY(check_at(r, k, 1, r->cfg->steps));
    CAP_TRY(cap_stats_sum(r, &k->stats));
    if (colo_comm_rank(r->world) == 0)
        verdict(r, k);
    return COLO_OK;
}
