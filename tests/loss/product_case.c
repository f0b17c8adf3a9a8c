/* SPDX-License-Identifier: Apache-2.0 */
/* product_case.c - see product_case.h */
#include "loss/product_case.h"

double *product_draw(colo_dtype_t dtype, int64_t n, uint64_t *rng, void **data)
{
    double *v = malloc((size_t)(n + 1) * sizeof *v);
    const size_t bytes = (size_t)n * colo_dtype_size(dtype);
    COLO_AUTOFREE void *host = malloc(bytes + 1);
    for (int64_t i = 0; i < n; i++) {
        v[i] = loss_round(dtype, 2 * t_uniform(rng) - 1);
        loss_store(dtype, host, i, v[i]);
    }
    *data = where.put(host, bytes);
    return v;
}

void product_case_init(product_case_t *p, enum colo_linear_product what, colo_dtype_t dtype,
                       colo_dtype_t to, const int64_t n[3], int64_t gap, int64_t z_stride,
                       bool bias, uint64_t *rng)
{
    void *data = NULL;
    const bool z = what == COLO_LINEAR_LOGITS, w = what == COLO_LINEAR_D_WEIGHT;
    *p = (product_case_t){.g = {.product = what,
                                .factor = 1,
                                .rows = n[0],
                                .columns = n[1],
                                .hidden = n[2],
                                .h = {NULL, n[2] + gap, z || w ? dtype : to},
                                .w = {NULL, n[2] + gap, w ? to : dtype},
                                .z = {NULL, z_stride, z ? to : dtype}},
                          .scale = 1,
                          .rows = w ? n[1] : n[0],
                          .columns = z ? n[1] : n[2],
                          .terms = z   ? n[2]
                                   : w ? n[0]
                                       : n[1]};
    p->h = product_draw(p->g.h.dtype, n[0] * p->g.h.stride, rng, &p->g.h.data);
    p->w = product_draw(p->g.w.dtype, n[1] * p->g.w.stride, rng, &p->g.w.data);
    p->z = product_draw(p->g.z.dtype, n[0] * z_stride, rng, &p->g.z.data);
    if (bias)
        p->bias = product_draw(dtype, n[1], rng, &data);
    p->g.bias = data;
    p->to = z ? &p->g.z : w ? &p->g.w : &p->g.h;
    p->was = z ? p->z : w ? p->w : p->h;
}

void product_case_free(product_case_t *p)
{
    void *all[] = {p->g.h.data, p->g.w.data, p->g.z.data, (void *)(uintptr_t)p->g.bias};
    for (int i = 0; i < 4; i++)
        where.drop(all[i]);
    free(p->h);
    free(p->w);
    free(p->z);
    free(p->bias);
}

static double term(const product_case_t *p, int64_t i, int64_t j, int64_t k)
{
    const int64_t hs = p->g.h.stride, ws = p->g.w.stride, zs = p->g.z.stride;
    switch (p->g.product) {
    case COLO_LINEAR_LOGITS:
        return p->h[i * hs + k] * p->w[j * ws + k];
    case COLO_LINEAR_D_HIDDEN:
        return p->z[i * zs + k] * p->w[k * ws + j];
    default:
        return p->z[k * zs + i] * p->h[k * hs + j];
    }
}

/* The element [i, j] of what is written; *size: the sum of magnitudes; *product: without what it is
 * added to. */
static double element(const product_case_t *p, int64_t i, int64_t j, double *size, double *product)
{
    double there = p->g.beta != 0 ? p->was[i * p->to->stride + j] : 0;
    there += p->bias && p->g.product == COLO_LINEAR_LOGITS ? p->bias[j] : 0;
    *size = fabs(there);
    *product = 0;
    for (int64_t k = 0; k < p->terms; k++) {
        const double t = p->g.factor * p->scale * term(p, i, j, k);
        *product += t;
        *size += fabs(t);
    }
    return there + *product;
}

void product_case_compare(const product_case_t *p, double u, bool twice, const char *label)
{
    static const double ulp[COLO_DTYPE_COUNT] = {
        [COLO_F32] = 0x1p-24, [COLO_F64] = 0x1p-53, [COLO_BF16] = 0x1p-8, [COLO_F16] = 0x1p-11};
    const colo_dtype_t dtype = p->to->dtype;
    const double tiny = dtype == COLO_F16 ? 0x1p-25 : 0; /* subnormal */
    const size_t bytes = (size_t)(p->rows * p->to->stride) * colo_dtype_size(dtype);
    COLO_AUTOFREE void *all = malloc(bytes + 1);
    where.get(all, p->to->data, bytes);
    for (int64_t i = 0; i < p->rows; i++)
        for (int64_t j = 0; j < p->to->stride; j++) {
            const double got = loss_load(dtype, all, i * p->to->stride + j);
            double size, product;
            if (j >= p->columns) {
                if (got != p->was[i * p->to->stride + j])
                    fail_msg("%s: the gap at [%d, %d] was written", label, (int)i, (int)j);
                continue;
            }
            const double want = element(p, i, j, &size, &product);
            double most = u * size; /* before it is rounded */
            if (twice && colo_dtype_size(dtype) == 2)
                most += ulp[dtype] * (fabs(product) + most) + tiny;
            most += ulp[dtype] * (fabs(want) + most) + tiny;
            if (!(fabs(got - want) <= most))
                fail_msg("%s: product %d to %s, %d rows from %d, %d columns, hidden %d: [%d, %d] "
                         "is %.9g, expected %.9g +- %.2g",
                         label, (int)p->g.product, colo_dtype_name(dtype), (int)p->g.rows,
                         (int)p->g.first, (int)p->g.columns, (int)p->g.hidden, (int)i, (int)j, got,
                         want, most);
        }
}
