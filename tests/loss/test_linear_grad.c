/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_grad.c - gradients of the lm_head path against central differences of its own
 * forward, in fp64 on two ranks: that forward and backward belong together, whatever the oracle
 * thinks.
 *
 * A central difference of step s errs by s^2/6 times the third derivative plus eps |f| / s. With
 * weights and hidden states of order 1 and five of them a logit, third derivatives are of order
 * 1000 at most, f of order 100: with s = 1e-5 some 2e-8 + 2e-9. Asked is 1e-6 relative to
 * 1 + |gradient|.
 */
#include "loss/linear_case.h"

#define STEP 1e-5
#define TOL 1e-6

enum { T = 4, V = 9, H = 3 };

static double objective(linear_case_t *c)
{
    double sum = 0;
    c->no_saved = true;
    assert_ok(linear_case_run(c));
    c->no_saved = false;
    for (int64_t t = 0; t < T; t++)
        for (int k = 0; k < 3; k++)
            sum += c->factor[k] * c->up[0][k][t] * c->out[0][k][t];
    return sum;
}

static double slope(linear_case_t *c, double *x)
{
    const double was = *x;
    *x = was + STEP;
    double above = objective(c);
    *x = was - STEP;
    double below = objective(c);
    *x = was;
    return (above - below) / (2 * STEP);
}

static void check(const char *what, int mode, int64_t i, double got, double want)
{
    if (!(fabs(got - want) <= TOL * (1 + fabs(want))))
        fail_msg("mode %d: %s[%d] is %.12g, central difference %.12g", mode, what, (int)i, got,
                 want);
}

T_CASE(gradients_are_central_differences_of_forward)
{
    uint64_t rng = t_seed();
    for (int mode = 0; mode < 3; mode++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 2, 1, T, V, H, COLO_F64, &rng);
        linear_case_shard(&c, SHARD_UNEVEN);
        c.has_bias = true;
        c.config.mode = mode == 1 ? COLO_LINEAR_KEEP : COLO_LINEAR_LOGPROB;
        c.config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
        colo_logprob_config_t *k = &c.config.logprob;
        k->chunk_size = 3;
        k->want_entropy = k->want_loss = true;
        k->logits.temperature = 0.8;
        k->logits.scale = 1.2;
        k->logits.softcap = 3;
        k->label_smoothing = 0.1;
        k->z_loss = 0.03;
        c.factor[1] = -1.5;
        c.targets[0][1] = -100;
        c.loss_mode = mode == 2;
        assert_ok(linear_case_run(&c));
        double d_h[T * H], d_w[V * H], d_b[V];
        memcpy(d_h, c.d_h[1], sizeof d_h);
        memcpy(d_w, c.d_w, sizeof d_w);
        memcpy(d_b, c.d_b, sizeof d_b);
        c.loss_mode = false;
        for (int64_t i = 0; i < T * H; i++)
            check("d_hidden", mode, i, d_h[i], slope(&c, &c.h[0][i]));
        for (int64_t i = 0; i < V * H; i++)
            check("d_weight", mode, i, d_w[i], slope(&c, &c.w[i]));
        for (int64_t i = 0; i < V; i++)
            check("d_bias", mode, i, d_b[i], slope(&c, &c.b[i]));
    }
}

T_MAIN("loss/linear_grad")
