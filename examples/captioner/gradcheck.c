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
    double *want[CAP_MAX_PARAMS];
    double error[MOMENTS][CAP_MAX_PARAMS];
    double loss[MOMENTS], loss_want[MOMENTS];
    bool same[MOMENTS];
    cap_ledgers_t ledgers; /* of the two checked passes */
};

static colo_status_t take(cap_rank_t *r, struct check *k)
{
    for (int i = 0; i < r->nparams; i++) {
        int64_t count = r->table[i].rows * r->table[i].cols;
        k->w[i] = cap_take(&r->arena, count, sizeof(float));
        k->g[i] = cap_take(&r->arena, count, sizeof(float));
        if (colo_comm_rank(r->world) == 0)
            k->want[i] = cap_take(&r->arena, count, sizeof(double));
    }
    return r->arena.failed ? COLO_ERR_NOMEM : COLO_OK;
}

static void compare(const cap_rank_t *r, struct check *k, int moment)
{
    double norm[CAP_MAX_PARAMS], most = 0;

    for (int i = 0; i < r->nparams; i++) {
        int64_t count = r->table[i].rows * r->table[i].cols;
        double differ = 0;

        norm[i] = 0;
        for (int64_t j = 0; j < count; j++) {
            double d = (double)k->g[i][j] - k->want[i][j];
            differ += d * d;
            norm[i] += k->want[i][j] * k->want[i][j];
        }
        norm[i] = sqrt(norm[i]);
        k->error[moment][i] = sqrt(differ);
        most = norm[i] > most ? norm[i] : most;
    }
    for (int i = 0; i < r->nparams; i++)
        k->error[moment][i] /= norm[i] > 1e-3 * most ? norm[i] : 1e-3 * most;
}

/* One batch without an update; rank 0 then runs the oracle while the others wait. */
static colo_status_t check_at(cap_rank_t *r, struct check *k, int moment, int64_t step)
{
    const cap_config_t *cfg = r->cfg;
    cap_ledgers_t before, after;

    cap_ledgers_now(r, &before);
    CAP_TRY(cap_step(r, step, 0, &k->loss[moment]));
    cap_ledgers_now(r, &after);
    cap_ledgers_add(&k->ledgers, &before, &after);
    CAP_TRY(cap_gather(r, r->w, k->w));
    CAP_TRY(cap_gather(r, r->g, k->g));
    CAP_TRY(cap_replicas(r, &k->same[moment]));
    if (colo_comm_rank(r->world) == 0) {
        k->loss_want[moment] = cap_oracle(&cfg->model, cfg->data, r->rows, cfg->batch,
                                          (const float *const *)k->w, k->want);
        compare(r, k, moment);
    }
    return colo_comm_barrier(r->host, NULL);
}

static void print_table(const cap_rank_t *r, const struct check *k, FILE *out)
{
    fprintf(out, "%-14s %14s %17s %2d\n", "parameter", "at the start",
            "after steps:", CAP_CHECK_STEPS);
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
        printf(isfinite(loss[m]) ? "%s%.9f" : "%snull", m ? "," : "", loss[m]);
    printf("]");
}

static void verdict(cap_rank_t *r, struct check *k)
{
    cap_config_t *cfg = r->cfg;
    const colo_plan_config_t *plan = colo_plan_config(colo_bridge_plan(r->bridge));
    int64_t forward = cap_report_plan_bytes(plan, cfg->world, COLO_FORWARD);
    int64_t backward = cap_report_plan_bytes(plan, cfg->world, COLO_BACKWARD);
    uint64_t moved = cap_bridge_bytes(&k->ledgers) / MOMENTS;
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
        ok = ok && fabs(k->loss[m] - k->loss_want[m]) <= LIMIT * fabs(k->loss_want[m]);
    }
    bool planned = cfg->algo != COLO_EXACT ||
                   (forward >= 0 && backward >= 0 && moved == (uint64_t)(forward + backward));
    ok = ok && finite && worst <= LIMIT && replicas && planned;

    print_table(r, k, stdout);
    if (!replicas)
        printf("replicas of a shard differ\n");
    if (!planned)
        printf("the bridge received %llu bytes, the plan says %lld\n", (unsigned long long)moved,
               (long long)(forward + backward));
    printf("{\"ok\":%s,\"worst_error\":", ok ? "true" : "false");
    printf(finite ? "%.3e" : "null", worst);
    printf(",\"worst_parameter\":\"%s\",\"limit\":%.0e,\"steps\":[0,%d]", r->table[worst_at].name,
           LIMIT, CAP_CHECK_STEPS);
    print_losses("loss_parallel", k->loss);
    print_losses("loss_oracle", k->loss_want);
    printf(",\"replicas_identical\":%s,\"collectives\":{", replicas ? "true" : "false");
    for (int o = 0; o < COLO_OP_COUNT; o++) {
        uint64_t ops = 0;
        for (int i = 0; i < CAP_COMMS; i++)
            for (int w = 0; w < COLO_OWNER_COUNT; w++)
                ops += k->ledgers.of[i].ops[o][w];
        printf("%s\"%s\":%llu", o ? "," : "", colo_op_name((colo_op_kind_t)o),
               (unsigned long long)ops / MOMENTS);
    }
    printf("},\"bridge_recv_bytes\":%llu,\"plan_recv_bytes\":%lld,\"world\":%d,\"src\":\"%s\","
           "\"dst\":\"%s\"}\n",
           (unsigned long long)moved, (long long)(forward + backward), cfg->world, cfg->src_text,
           cfg->dst_text);
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
    for (int64_t step = 0; step < CAP_CHECK_STEPS; step++)
        CAP_TRY(cap_step(r, step, r->cfg->lr, &loss));
    CAP_TRY(check_at(r, k, 1, CAP_CHECK_STEPS));
    CAP_TRY(cap_ledgers_sum(r, &k->ledgers));
    if (colo_comm_rank(r->world) == 0)
        verdict(r, k);
    return COLO_OK;
}
