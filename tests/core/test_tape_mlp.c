/* SPDX-License-Identifier: Apache-2.0 */
/* test_tape_mlp.c - gradients of an MLP with a residual, recorded on a tape, against central
 * differences. */
#include "harness/harness.h"

#include "core/tape_node.h"

#include <math.h>

/* ---- an MLP: h = tanh(x W1), y = h W2 + x (a residual), loss = sum y^2 / 2 ---- */

enum { B = 3, D = 4, H = 5 };

typedef struct mlp {
    double x[B * D], w1[D * H], w2[H * D], h[B * H], p[B * D], y[B * D], loss;
    double d_w1[D * H];
} mlp_t;

typedef struct matmul {
    const double *a, *b;
    int m, k, n;
} matmul_t;

static void matmul_forward(const matmul_t *s, double *c)
{
    for (int i = 0; i < s->m; i++)
        for (int j = 0; j < s->n; j++) {
            c[i * s->n + j] = 0;
            for (int k = 0; k < s->k; k++)
                c[i * s->n + j] += s->a[i * s->k + k] * s->b[k * s->n + j];
        }
}

static colo_status_t matmul_backward(const colo_tensor_t *d_out, int32_t nout,
                                     const colo_tensor_t *d_in, int32_t nin, void *state)
{
    const matmul_t *s = state;
    const double *d = d_out[0].data;
    double *da = d_in[0].data, *db = d_in[1].data;
    for (int i = 0; da && i < s->m; i++)
        for (int k = 0; k < s->k; k++) {
            da[i * s->k + k] = 0;
            for (int j = 0; j < s->n; j++)
                da[i * s->k + k] += d[i * s->n + j] * s->b[k * s->n + j];
        }
    for (int k = 0; db && k < s->k; k++)
        for (int j = 0; j < s->n; j++) {
            db[k * s->n + j] = 0;
            for (int i = 0; i < s->m; i++)
                db[k * s->n + j] += s->a[i * s->k + k] * d[i * s->n + j];
        }
    return COLO_OK;
}

static colo_status_t tanh_backward(const colo_tensor_t *d_out, int32_t nout,
                                   const colo_tensor_t *d_in, int32_t nin, void *state)
{
    const double *h = state;
    for (int i = 0; i < B * H; i++)
        ((double *)d_in[0].data)[i] = ((double *)d_out[0].data)[i] * (1 - h[i] * h[i]);
    return COLO_OK;
}

static colo_status_t sum_backward(const colo_tensor_t *d_out, int32_t nout,
                                  const colo_tensor_t *d_in, int32_t nin, void *state)
{
    for (int32_t k = 0; k < nin; k++)
        memcpy(d_in[k].data, d_out[0].data, B * D * sizeof(double));
    return COLO_OK;
}

static colo_status_t square_backward(const colo_tensor_t *d_out, int32_t nout,
                                     const colo_tensor_t *d_in, int32_t nin, void *state)
{
    const double *y = state;
    for (int i = 0; i < B * D; i++)
        ((double *)d_in[0].data)[i] = y[i] * *(double *)d_out[0].data;
    return COLO_OK;
}

static double mlp_forward(mlp_t *m)
{
    matmul_forward(&(matmul_t){m->x, m->w1, B, D, H}, m->h);
    for (int i = 0; i < B * H; i++)
        m->h[i] = tanh(m->h[i]);
    matmul_forward(&(matmul_t){m->h, m->w2, B, H, D}, m->p);
    m->loss = 0;
    for (int i = 0; i < B * D; i++) {
        m->y[i] = m->p[i] + m->x[i];
        m->loss += m->y[i] * m->y[i] / 2;
    }
    return m->loss;
}

static void mlp_record(colo_tape_t *tape, mlp_t *m, colo_value_t *values)
{
    colo_tensor_t x = colo_tensor_host(m->x, COLO_F64, 2, (int64_t[]){B, D});
    colo_tensor_t w1 = colo_tensor_host(m->w1, COLO_F64, 2, (int64_t[]){D, H});
    colo_tensor_t w2 = colo_tensor_host(m->w2, COLO_F64, 2, (int64_t[]){H, D});
    colo_tensor_t d_w1 = colo_tensor_host(m->d_w1, COLO_F64, 2, (int64_t[]){D, H});
    colo_tensor_t h = colo_tensor_host(m->h, COLO_F64, 2, (int64_t[]){B, H});
    colo_tensor_t y = colo_tensor_host(m->y, COLO_F64, 2, (int64_t[]){B, D});
    colo_tensor_t loss = colo_tensor_host(&m->loss, COLO_F64, 0, NULL);
    matmul_t *first = malloc(sizeof *first), *second = malloc(sizeof *second);
    *first = (matmul_t){m->x, m->w1, B, D, H};
    *second = (matmul_t){m->h, m->w2, B, H, D};
    colo_value_t *v = values;
    assert_ok(colo_tape_leaf(tape, &x, NULL, &v[0]));
    assert_ok(colo_tape_leaf(tape, &w1, &d_w1, &v[1]));
    assert_ok(colo_tape_leaf(tape, &w2, NULL, &v[2]));
    assert_ok(t_node(tape, "x W1", (colo_value_t[]){v[0], v[1]}, 2, &h, &v[3], matmul_backward,
                     first, free));
    assert_ok(colo_tape_record(tape, &(colo_tape_record_t){"tanh", &v[3], 1, &h, 1, &v[4], &h, 1,
                                                           tanh_backward, m->h, NULL}));
    assert_ok(
        colo_tape_record(tape, &(colo_tape_record_t){"h W2", (colo_value_t[]){v[4], v[2]}, 2, &y, 1,
                                                     &v[5], &h, 1, matmul_backward, second, free}));
    assert_ok(t_node(tape, "residual", (colo_value_t[]){v[5], v[0]}, 2, &y, &v[6], sum_backward,
                     NULL, NULL));
    assert_ok(colo_tape_record(tape, &(colo_tape_record_t){"square", &v[6], 1, &loss, 1, &v[7], &y,
                                                           1, square_backward, m->y, NULL}));
}

static void compare_differences(mlp_t *m, double *weights, int n, const double *grad, double scale)
{
    const double step = 1e-5; /* error step^2 f''' / 6 + eps f / step: some 1e-9 */
    for (int i = 0; i < n; i++) {
        double keep = weights[i];
        weights[i] = keep + step;
        double up = mlp_forward(m);
        weights[i] = keep - step;
        double down = mlp_forward(m);
        weights[i] = keep;
        double slope = (up - down) / (2 * step) * scale;
        if (fabs(slope - grad[i]) > 1e-7 * (1 + fabs(slope)))
            fail_msg("element %d: %.12g, difference %.12g", i, grad[i], slope);
    }
    mlp_forward(m);
}

T_CASE(an_mlp_agrees_with_central_differences_on_every_step)
{
    uint64_t rng = t_seed();
    mlp_t m = {.loss = 0};
    colo_tape_t *tape;
    colo_value_t v[8];
    colo_tensor_t d_x, d_w2;
    assert_ok(colo_tape_create(&tape));
    for (int i = 0; i < B * D; i++)
        m.x[i] = t_uniform(&rng) * 2 - 1;
    for (int i = 0; i < D * H; i++) {
        m.w1[i] = t_uniform(&rng) * 2 - 1;
        m.w2[i] = t_uniform(&rng) * 2 - 1;
    }
    for (int step = 1; step <= 3;
         step++) { /* d_w1 is the caller's and adds up, the others do not */
        mlp_forward(&m);
        mlp_record(tape, &m, v);
        assert_ok(colo_tape_backward(tape, v[7], NULL));
        assert_ok(colo_tape_gradient(tape, v[0], &d_x));
        assert_ok(colo_tape_gradient(tape, v[2], &d_w2));
        compare_differences(&m, m.x, B * D, d_x.data, 1);
        compare_differences(&m, m.w2, H * D, d_w2.data, 1);
        compare_differences(&m, m.w1, D * H, m.d_w1, step);
        colo_tape_reset(tape);
    }
    colo_tape_destroy(&tape);
}

T_MAIN("core/tape_mlp")
