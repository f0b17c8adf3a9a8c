/* SPDX-License-Identifier: Apache-2.0 */
/* loss.c - any options, shards and targets: refused with a reason, or equal to the fp64 oracle. */
#include "fuzz.h"

#include "loss/loss_case.h"

static double take_double(fuzz_t *f, const double *some, int n)
{
    const int k = (int)fuzz_range(f, 0, n);
    double v;
    if (k < n)
        return some[k];
    fuzz_bytes(f, &v, sizeof v);
    return fabs(v) > 0.1 && fabs(v) < 10 ? v : NAN;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const double taus[] = {1, 1, 0.5, 2, 0}, scales[] = {1, 1, -1, 0.25, 0},
                        caps[] = {0, 0, 5, 30}, smooth[] = {0, 0, 0.1, 0.9, 1},
                        z_losses[] = {0, 0, 1e-4, 0.5};
    fuzz_t f = {data, size};
    uint64_t rng = fuzz_u8(&f) + 1u;
    T_ENDS(loss_case_free) loss_case_t c;
    const int32_t ranks = (int32_t)fuzz_range(&f, 1, 2);
    const int64_t tokens = fuzz_range(&f, 0, 5), vocab = fuzz_range(&f, 1, 40);
    loss_case_init(&c, ranks, tokens, vocab, loss_dtypes[fuzz_range(&f, 0, 3)], 3, &rng);
    loss_case_shard(&c, (shard_kind_t)fuzz_range(&f, 0, SHARD_KINDS - 1));
    colo_logprob_config_t *o = &c.config;
    o->logits.temperature = take_double(&f, taus, 5);
    o->logits.scale = take_double(&f, scales, 5);
    o->logits.softcap = take_double(&f, caps, 4);
    o->label_smoothing = take_double(&f, smooth, 5);
    o->z_loss = take_double(&f, z_losses, 4);
    const uint8_t bits = fuzz_u8(&f);
    o->megatron_smoothing = bits & 1;
    o->want_entropy = bits & 2;
    o->want_loss = bits & 4;
    o->want_correct = (bits & 8) && o->logits.softcap == 0; /* a cap makes ties that fp64 lacks */
    o->lenient_targets = bits & 16;
    o->want_lse = bits & 2;
    o->has_temperature = bits & 128;
    o->want_sum_p2 = o->want_mean_logits = bits & 128;
    o->want_argmax = o->want_sum_p2 && o->logits.softcap == 0;
    c.in_place = bits & 32;
    c.row_gap = bits & 64 ? 3 : 0;
    o->chunk_size = fuzz_range(&f, 0, 6) - 1;
    for (int64_t t = 0; t < tokens; t++)
        if (fuzz_range(&f, 0, 3) == 0)
            c.targets[t] = fuzz_i64(&f);
    snprintf(c.label, sizeof c.label,
             "%s T %d V %d tau %g scale %g cap %g smooth %g z %g bits %02x",
             colo_dtype_name(c.dtype), (int)tokens, (int)vocab, o->logits.temperature,
             o->logits.scale, o->logits.softcap, o->label_smoothing, o->z_loss, bits);
    const colo_status_t st = loss_case_run(&c);
    if (st < 0)
        FUZZ_REFUSED(st);
    else
        loss_case_compare(&c, c.label); /* ends the program if they differ */
    return 0;
}
