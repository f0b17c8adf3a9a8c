/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 02_bridge.c - eight ranks carry an activation from TP2/DP4 to TP2/CP2/DP2 and back.
 *
 * Every element knows where it belongs: its value is 10000 sample + 100 row + feature, so a wrong
 * element is seen at once and says where it came from. Each rank prints what it got from which
 * rank, checks that it got exactly its part, then sends what it got back as if it were the
 * gradient.
 */
#include <stdio.h>
#include <stdlib.h>

#include <colobridge.h>

enum { RANKS = 8, SAMPLES = 8, ROWS = 8, FEATURES = 4, TEXT = 2048 };

struct job {
    colo_layout_t src, dst;
    char said[RANKS][TEXT]; /* ranks are threads: each writes its own, main prints in order */
};

/* Visits every element of a rank's part, in memory order, with its global place: fills it, or
 * counts those that are not what they should be. */
static int64_t visit(const colo_layout_t *layout, int64_t rank, float *data, bool fill)
{
    colo_owned_t own;
    colo_run_t run[2 * RANKS];
    int64_t nruns, wrong = 0;

    if (colo_layout_owned(layout, rank,
                          &(colo_shape_t){.samples = SAMPLES, .rows = ROWS, .features = FEATURES},
                          false, &own, run, 2 * RANKS, &nruns) < 0)
        return -1;
    for (int64_t b = own.b0; b < own.b1; b++)
        for (int64_t r = 0; r < nruns; r++)
            for (int64_t s = run[r].row; s < run[r].row + run[r].count; s++)
                for (int64_t h = own.h0; h < own.h1; h++, data++) {
                    float code = (float)(10000 * b + 100 * s + h);
                    if (fill)
                        *data = code;
                    else
                        wrong += *data != code;
                }
    return wrong;
}

static int tell(char *text, int used, const colo_plan_t *plan, colo_pass_t pass)
{
    int32_t n;
    const colo_plan_message_t *m = colo_plan_recvs(plan, pass, &n);

    for (int32_t i = 0; i < n; i++) {
        used += snprintf(text + used, TEXT - (size_t)used, "  %s from rank %lld, %lld bytes:",
                         pass == COLO_PASS_FORWARD ? "activation" : "gradient",
                         (long long)m[i].peer,
                         (long long)m[i].bytes);
        for (int64_t k = 0; k < m[i].nregions; k++) {
            const colo_region_t *g = &m[i].regions[k];
            used += snprintf(text + used, TEXT - (size_t)used,
                             "%s samples %lld to %lld, rows %lld to %lld", k ? ";" : "",
                             (long long)g->b[0], (long long)g->b[1] - 1, (long long)g->s[0],
                             (long long)g->s[1] - 1);
        }
        used += snprintf(text + used, TEXT - (size_t)used, "\n");
    }
    return used;
}

static colo_status_t rank_main(colo_comm_t *world, void *arg)
{
    struct job *job = arg;
    int rank = colo_comm_rank(world), used = 0;
    char *text = job->said[rank];
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &job->src, .dst = &job->dst,
                                   .shape = {SAMPLES, ROWS, FEATURES, 0}, .dtype = COLO_F32,
                                   .output = COLO_OUTPUT_SHARDED};
    colo_bridge_t *bridge = NULL;
    colo_status_t st = colo_bridge_create(&bridge, &config, world);
    if (st < 0)
        return st;

    static _Thread_local float xs[SAMPLES * ROWS * FEATURES], ys[SAMPLES * ROWS * FEATURES];
    int64_t x_shape[3], y_shape[3];
    colo_bridge_src_shape(bridge, x_shape);
    colo_bridge_dst_shape(bridge, y_shape);
    colo_tensor_t x = colo_tensor_host(xs, COLO_F32, 3, x_shape);
    colo_tensor_t y = colo_tensor_host(ys, COLO_F32, 3, y_shape);

    visit(&job->src, rank, xs, true);
    st = colo_bridge_forward(bridge, &x, &y, NULL);
    int64_t wrong_y = visit(&job->dst, rank, ys, false), wrong_x = 0;
    if (st >= 0) {
        for (int i = 0; i < SAMPLES * ROWS * FEATURES; i++)
            xs[i] = -1.0f;
        st = colo_bridge_backward(bridge, &y, &x, NULL);
        wrong_x = visit(&job->src, rank, xs, false);
    }
    if (st >= 0) {
        used += snprintf(text, TEXT, "rank %d: [%lld, %lld, %lld] -> [%lld, %lld, %lld], ", rank,
                         (long long)x_shape[0], (long long)x_shape[1], (long long)x_shape[2],
                         (long long)y_shape[0], (long long)y_shape[1], (long long)y_shape[2]);
        used += snprintf(text + used, TEXT - (size_t)used, "%lld wrong there, %lld wrong back\n",
                         (long long)wrong_y, (long long)wrong_x);
        used = tell(text, used, colo_bridge_plan(bridge), COLO_PASS_FORWARD);
        tell(text, used, colo_bridge_plan(bridge), COLO_PASS_BACKWARD);
    }
    colo_bridge_destroy(&bridge);
    return st < 0 || (wrong_y == 0 && wrong_x == 0) ? st : COLO_ERR_STATE;
}

int main(void)
{
    static struct job job;
    colo_grid_t src, dst;

    if (colo_grid_parse(&src, "tp=2,dp=4", RANKS) < 0 ||
        colo_grid_parse(&dst, "tp=2,cp=2,dp=2", RANKS) < 0 ||
        colo_layout_init_src(&job.src, &src) < 0 || colo_layout_init_dst(&job.dst, &dst) < 0 ||
        colo_comm_threads_run(RANKS, rank_main, &job) < 0) {
        fprintf(stderr, "02_bridge: %s\n", colo_last_error());
        return 1;
    }
    for (int r = 0; r < RANKS; r++)
        fputs(job.said[r], stdout);
    return 0;
}
