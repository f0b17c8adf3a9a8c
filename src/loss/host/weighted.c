/* SPDX-License-Identifier: Apache-2.0 */
/* weighted.c - the passes of weighted.h in plain C. */
#include "loss/weighted.h"

#include "loss/loss.h"
#include "loss/scalar.h"

#include <math.h>

colo_status_t colo_host_weighted_local(const struct colo_weighted_pass *p, colo_stream_t stream)
{
    struct colo_weighted_part sum = {0, 0, 0, 0};
    (void)stream;
    for (int64_t i = 0; i < p->count; i++) {
        if (p->mask && !p->mask[i])
            continue;
        const double w = p->weights ? colo_scalar_get(p->dtype, p->weights, i) : 1;
        sum.num += w * colo_scalar_get(p->dtype, p->values, i);
        sum.weight += w;
        sum.den++;
    }
    if (p->counted)
        sum.den = *p->counted;
    sum.weighs = p->out != NULL;
    p->parts[p->rank] = sum;
    return COLO_OK;
}

/* The numbers of mean.c */
static void put_mean(const struct colo_weighted_pass *p, const colo_weighted_t *all, bool alike)
{
    const double over = !alike ? NAN : p->divide && all->den > 1 ? (double)all->den : 1;
    colo_scalar_put(p->dtype, p->mean.value, 0, all->num / over);
    *p->mean.num = all->num;
    *p->mean.den = (double)all->den;
    *p->mean.factor = 1 / over;
}

colo_status_t colo_host_weighted_finish(const struct colo_weighted_pass *p, colo_stream_t stream)
{
    colo_weighted_t all = {0, 0, 0, 0};
    bool alike = true;
    (void)stream;
    for (int32_t r = 0; r < p->ranks; r++) {
        alike = alike && p->parts[r].weighs == p->parts[0].weighs;
        all.num += p->parts[r].num;
        all.weight += p->parts[r].weight;
        all.den += p->parts[r].den;
    }
    all.num = alike ? all.num : NAN;
    all.value = !alike ? NAN : all.den ? all.num / (double)all.den : 0;
    if (p->out)
        *p->out = all;
    else
        put_mean(p, &all, alike);
    for (int64_t i = 0; i < p->count && p->d_values; i++) {
        double g = 0;
        if (!alike)
            g = NAN;
        else if (!p->mask || p->mask[i]) /* then den > 0 */
            g = (p->weights ? colo_scalar_get(p->dtype, p->weights, i) : 1) / (double)all.den;
        colo_scalar_put(p->dtype, p->d_values, i, g);
    }
    return COLO_OK;
}

colo_status_t colo_host_mean_grad(const struct colo_mean_grad_pass *p, colo_stream_t stream)
{
    (void)stream;
    double g = p->d_num ? *p->d_num : 0;
    if (p->d_value)
        g += colo_scalar_get(p->dtype, p->d_value, 0) * *p->factor;
    for (int64_t i = 0; i < p->count; i++)
        colo_scalar_put(p->dtype, p->d_values, i, g);
    return COLO_OK;
}
