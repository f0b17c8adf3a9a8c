/* SPDX-License-Identifier: Apache-2.0 */
/* config.c - structs of any size with any bytes in them: refused with a reason, or served. */
#include "fuzz.h"

#include "harness/bridge_case.h"

#include <math.h>

#define TAKE(f, config)                                 \
    do { /* a third: a legal size */                    \
        fuzz_bytes(f, &(config), sizeof(config));       \
        if ((config).struct_size % 3 == 0)              \
            (config).struct_size = sizeof(config);      \
        else                                            \
            (config).struct_size %= 2 * sizeof(config); \
    } while (0)

/* Bools are bytes that are 0 or 1: another is no value of the type. */
#define MEND_BOOL(b) ((b) = *(const volatile uint8_t *)&(b)&1)

static void plan(fuzz_t *f)
{
    const ref_side_t sides[] = {t_side("tp=2,dp=2", true), t_side("tp=2,cp=2", false)};
    colo_layout_t src, dst;
    colo_plan_config_t c;
    T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
    FUZZ_CHECK(t_layout(&src, &sides[0]) == COLO_OK && t_layout(&dst, &sides[1]) == COLO_OK,
               "layout");
    TAKE(f, c);
    MEND_BOOL(c.no_grad);
    MEND_BOOL(c.one_level);
    c.src = c.src ? &src : NULL;
    c.dst = c.dst ? &dst : NULL;
    c.nodes = NULL;
    if (fuzz_range(f, 0, 1))
        c.shape = (colo_shape_t){8, 8, 8, 8};
    const colo_status_t st = colo_plan_create(&plan, &c, fuzz_range(f, 0, 5));
    if (st < 0)
        FUZZ_REFUSED(st);
    FUZZ_CHECK((st == COLO_OK) == (plan != NULL), "status %d", (int)st);
}

static void logprob(fuzz_t *f)
{
    colo_logprob_config_t c;
    size_t saved = 0, workspace = 0;
    TAKE(f, c);
    MEND_BOOL(c.megatron_smoothing);
    MEND_BOOL(c.want_entropy);
    MEND_BOOL(c.want_loss);
    MEND_BOOL(c.want_correct);
    MEND_BOOL(c.lenient_targets);
    MEND_BOOL(c.local_smoothing);
    MEND_BOOL(c.has_class_weight);
    MEND_BOOL(c.want_argmax);
    MEND_BOOL(c.want_lse);
    MEND_BOOL(c.want_sum_p2);
    MEND_BOOL(c.want_mean_logits);
    MEND_BOOL(c.has_temperature);
    if (fuzz_range(f, 0, 1))
        c.logits = (colo_logits_options_t){16, 0, 1.0, 1.0, 0.0};
    const int64_t tokens = fuzz_i64(f);
    const int32_t ranks = (int32_t)fuzz_i64(f);
    const colo_dtype_t dtype = (colo_dtype_t)fuzz_range(f, 0, 12);
    colo_status_t st = colo_logprob_config_check(&c);
    if (st == COLO_OK && c.struct_size == sizeof c)
        FUZZ_CHECK(c.logits.vocab > 0 && c.logits.temperature > 0 &&
                       isfinite(c.logits.temperature) && c.logits.softcap >= 0 &&
                       isfinite(c.logits.softcap) && isfinite(c.logits.scale) &&
                       c.label_smoothing >= 0 && c.label_smoothing < 1 && c.z_loss >= 0,
                   "options out of their range are taken");
    if (st == COLO_OK)
        st = colo_logprob_saved_size(&c, dtype, tokens, &saved);
    if (st == COLO_OK)
        st = colo_logprob_workspace_size(&c, dtype, tokens, ranks, &workspace);
    if (st < 0)
        FUZZ_REFUSED(st);
    else
        FUZZ_CHECK(tokens >= 0 && ranks >= 1, "%lld tokens on %d ranks", (long long)tokens,
                   (int)ranks);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_t f = {data, size};
    if (fuzz_range(&f, 0, 1))
        plan(&f);
    else
        logprob(&f);
    return 0;
}
