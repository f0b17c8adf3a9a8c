/* SPDX-License-Identifier: Apache-2.0 */
/* weighted.c - the passes of weighted.h in plain C. */
#include "loss/weighted.h"

#include "loss/loss.h"
#include "loss/scalar.h"

#include <math.h>

colo_status_t colo_host_weighted_local(const struct colo_weighted_pass *pass, colo_stream_t stream)
{
    struct colo_weighted_part sum = {0, 0, 0, 0};
    for (int64_t i = 0; i < pass->count; i++) {
        if (pass->mask && !pass->mask[i])
            continue;
        const double w = pass->weights ? colo_scalar_get(pass->dtype, pass->weights, i) : 1;
        sum.num += w * colo_scalar_get(pass->dtype, pass->values, i);
        sum.weight += w;
        sum.den++;
    }
    if (pass->counted)
        sum.den = *pass->counted;
    sum.weighs = pass->out != NULL;
    pass->parts[pass->rank] = sum;
    return COLO_OK;
}

/* The numbers of mean.c */
static void put_mean(const struct colo_weighted_pass *pass, const colo_weighted_t *all, bool alike)
{
    const double over = !alike ? NAN : pass->divide && all->den > 1 ? (double)all->den : 1;
    colo_scalar_put(pass->dtype, pass->mean.value, 0, all->num / over);
    *pass->mean.num = all->num;
    *pass->mean.den = (double)all->den;
    *pass->mean.factor = 1 / over;
}

colo_status_t colo_host_weighted_finish(const struct colo_weighted_pass *pass, colo_stream_t stream)
{
    colo_weighted_t all = {0, 0, 0, 0};
    bool alike = true;
    for (int32_t r = 0; r < pass->ranks; r++) {
        alike = alike && pass->parts[r].weighs == pass->parts[0].weighs;
        all.num += pass->parts[r].num;
        all.weight += pass->parts[r].weight;
        all.den += pass->parts[r].den;
    }
    all.num = alike ? all.num : NAN;
    all.value = !alike ? NAN : all.den ? all.num / (double)all.den : 0;
    if (pass->out)
        *pass->out = all;
    else
        put_mean(pass, &all, alike);
    for (int64_t i = 0; i < pass->count && pass->d_values; i++) {
        double g = 0;
        if (!alike)
            g = NAN;
        else if (!pass->mask || pass->mask[i]) /* then den > 0 */
            g = (pass->weights ? colo_scalar_get(pass->dtype, pass->weights, i) : 1) /
                (double)all.den;
        colo_scalar_put(pass->dtype, pass->d_values, i, g);
    }
    return COLO_OK;
}

colo_status_t colo_host_mean_grad(const struct colo_mean_grad_pass *pass, colo_stream_t stream)
{
    double g = pass->d_num ? *pass->d_num : 0;
    if (pass->d_value)
        g += colo_scalar_get(pass->dtype, pass->d_value, 0) * *pass->factor;
    for (int64_t i = 0; i < pass->count; i++)
        colo_scalar_put(pass->dtype, pass->d_values, i, g);
    return COLO_OK;
}
