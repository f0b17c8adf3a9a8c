/* SPDX-License-Identifier: Apache-2.0 */
/* mean.c - the kernels of mean.h in plain C. */
#include "loss/mean.h"

#include "loss/loss.h"
#include "loss/scalar.h"

#include <math.h>

colo_status_t colo_host_mean_local(const struct colo_mean_args *args, colo_stream_t stream)
{
    struct colo_mean_part sum = {0, 0, 0, 0};
    for (int64_t i = 0; i < args->count; i++) {
        if (args->mask && !args->mask[i])
            continue;
        const double w = args->weights ? colo_scalar_get(args->dtype, args->weights, i) : 1;
        sum.num += (args->weighs == COLO_MEAN_WEIGHTED ? 1 : w) *
                   colo_scalar_get(args->dtype, args->values, i);
        sum.weight += w;
        sum.den++;
    }
    if (args->counted)
        sum.den = *args->counted;
    sum.weighs = args->weighs;
    args->parts[args->rank] = sum;
    return COLO_OK;
}

/* The numbers of mean.c */
static void put_mean(const struct colo_mean_args *args, const colo_loss_weighted_t *all, bool alike)
{
    const struct colo_mean_divisor by = colo_mean_divisor_of(args, all->weight, all->den);
    const double over = alike ? by.over : NAN;
    colo_scalar_put(args->dtype, args->mean.value, 0, all->num / over);
    *args->mean.num = all->num;
    *args->mean.den = by.den;
    *args->mean.factor = 1 / over;
}

colo_status_t colo_host_mean_finish(const struct colo_mean_args *args, colo_stream_t stream)
{
    colo_loss_weighted_t all = {0, 0, 0, 0};
    bool alike = true;
    for (int32_t r = 0; r < args->ranks; r++) {
        alike = alike && args->parts[r].weighs == args->parts[0].weighs;
        all.num += args->parts[r].num;
        all.weight += args->parts[r].weight;
        all.den += args->parts[r].den;
    }
    all.num = alike ? all.num : NAN;
    all.value = !alike ? NAN : all.den ? all.num / (double)all.den : 0;
    if (args->out)
        *args->out = all;
    else
        put_mean(args, &all, alike);
    for (int64_t i = 0; i < args->count && args->d_values; i++) {
        double g = 0;
        if (!alike)
            g = NAN;
        else if (!args->mask || args->mask[i]) /* then den > 0 */
            g = (args->weights ? colo_scalar_get(args->dtype, args->weights, i) : 1) /
                (double)all.den;
        colo_scalar_put(args->dtype, args->d_values, i, g);
    }
    return COLO_OK;
}

colo_status_t colo_host_mean_grad(const struct colo_mean_grad_args *args, colo_stream_t stream)
{
    double g = args->d_num ? *args->d_num : 0;
    if (args->d_value)
        g += colo_scalar_get(args->dtype, args->d_value, 0) * *args->factor;
    for (int64_t i = 0; i < args->count; i++)
        colo_scalar_put(args->dtype, args->d_values, i, g);
    return COLO_OK;
}
