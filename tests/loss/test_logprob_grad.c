/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logprob_grad.c - the gradient against central differences, twice: of the oracle, so that the
 * oracle's closed form is itself checked, and of the library's own forward in fp64, so that forward
 * and backward are known to belong together.
 *
 * A central difference of step h errs by h^2/6 times the third derivative plus eps |f| / h; with
 * f of order 10, third derivatives of order 10 and h = 1e-4 that is about 2e-8 + 2e-11: 1e-6 is
 * asked, relative to 1 + |gradient|.
 */
#include "loss/gather_case.h"

#define STEP 1e-4
#define TOL 1e-6

enum { T = 3, V = 11 };

static const struct {
    const char *name;
    double temperature, scale, softcap, smoothing, z_loss;
    bool megatron;
} settings[] = {
    {"plain", 1, 1, 0, 0, 0, false},       {"temperature", 0.6, 1, 0, 0, 0, false},
    {"scale", 1, -1.7, 0, 0, 0, false},    {"softcap", 1, 1, 2.5, 0, 0, false},
    {"smoothing", 1, 1, 0, 0.2, 0, false}, {"megatron smoothing", 1, 1, 0, 0.2, 0, true},
    {"z-loss", 1, 1, 0, 0, 0.05, false},   {"all", 0.8, 1.2, 3, 0.1, 0.03, true},
};
enum { SETTINGS = sizeof settings / sizeof *settings };

/* Upstream gradients: each output alone, then all at once. */
static const double weights[4][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {0.7, -1.3, 0.9}};

static void configure(loss_case_t *c, int s)
{
    c->config.logits.temperature = settings[s].temperature;
    c->config.logits.scale = settings[s].scale;
    c->config.logits.softcap = settings[s].softcap;
    c->config.label_smoothing = settings[s].smoothing;
    c->config.megatron_smoothing = settings[s].megatron;
    c->config.z_loss = settings[s].z_loss;
    c->config.want_entropy = c->config.want_loss = true;
}

static double weighted_ref(const ref_logprob_opts_t *o, const double *z, int64_t target,
                           const double *g)
{
    ref_logprob_row_t row;
    ref_logprob(o, z, V, target, &row);
    return g[0] * row.logp + g[1] * row.entropy + g[2] * row.loss;
}

T_CASE(the_oracle_is_its_own_central_difference)
{
    uint64_t rng = t_seed();
    for (int s = 0; s < SETTINGS; s++)
        for (int w = 0; w < 4; w++) {
            T_ENDS(loss_case_free) loss_case_t c;
            double dz[V];
            loss_case_init(&c, 1, 1, V, COLO_F64, 2, &rng);
            configure(&c, s);
            ref_logprob_opts_t o = loss_case_opts(&c);
            const double *g = weights[w];
            ref_logprob_grad(&o, c.z, V, c.targets[0], g[0], g[1], g[2], dz);
            for (int j = 0; j < V; j++) {
                double offset = c.z[j];
                c.z[j] = offset + STEP;
                double up = weighted_ref(&o, c.z, c.targets[0], g);
                c.z[j] = offset - STEP;
                double down = weighted_ref(&o, c.z, c.targets[0], g);
                c.z[j] = offset;
                double slope = (up - down) / (2 * STEP);
                if (fabs(slope - dz[j]) > TOL * (1 + fabs(dz[j])))
                    fail_msg("%s, output %d, column %d: %g, difference %g", settings[s].name, w, j,
                             dz[j], slope);
            }
        }
}

static loss_case_t moved; /* of the case that runs, and its weights */
static const double *factor;

static colo_status_t run(void)
{
    return loss_case_run(&moved);
}

static double weighted(int64_t t)
{
    return factor[0] * moved.out[0][0][t] + factor[1] * moved.out[0][1][t] +
           factor[2] * moved.out[0][2][t];
}

T_CASE(the_library_is_its_own_central_difference_on_three_ranks)
{
    uint64_t rng = t_seed() + 1;
    for (int i = 0; i < 4 * SETTINGS; i++) {
        if (t_left_out(i)) /* on processes each of a case's 23 runs makes a world */
            continue;
        print_message("%s, output %d\n", settings[i / 4].name, i % 4);
        loss_case_init(&moved, 3, T, V, COLO_F64, 2, &rng);
        loss_case_shard(&moved, SHARD_UNEVEN);
        configure(&moved, i / 4);
        factor = weights[i % 4];
        for (int k = 0; k < 3 * T; k++)
            moved.up[k % 3][k / 3] = factor[k % 3];
        gather_central(&moved, moved.z, moved.dz, run, weighted);
        loss_case_free(&moved);
    }
}

/* p near 1: the target's gradient 1 - p is small, and must not come out as 0 in fp64 */
T_CASE(the_targets_gradient_survives_a_probability_near_one)
{
    uint64_t rng = t_seed() + 3;
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 2, 1, 4, COLO_F64, 0, &rng);
    c.targets[0] = 2;
    c.z[2] = 30;
    c.up[0][0] = 1;
    assert_ok(loss_case_run(&c));
    double expected = 3 * exp(-30.0) / (1 + 3 * exp(-30.0)); /* 2.8e-13 */
    assert_true(fabs(c.dz[2] - expected) < 5e-16);
    assert_true(c.dz[2] > 0);
}

T_MAIN("loss/logprob_grad")
