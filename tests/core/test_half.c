/* SPDX-License-Identifier: Apache-2.0 */
/* test_half.c - bf16 and fp16 against their definition in double arithmetic, exhaustively. */
#include "harness/harness.h"
#include "ref/ref_half.h"

#include "core/half.h"

struct format {
    const char *name;
    struct ref_format ref;
    float (*up)(uint16_t);
    uint16_t (*down)(float);
};
static const struct format formats[] = {
    {"bf16", {8, 7}, colo_bf16_to_f32, colo_f32_to_bf16},
    {"fp16", {5, 10}, colo_f16_to_f32, colo_f32_to_f16},
};

T_CASE(every_code_has_its_value)
{
    for (const struct format *f = formats; f < formats + 2; f++)
        for (uint32_t code = 0; code < 0x10000; code++) {
            double want = ref_half_value(f->ref, (uint16_t)code);
            float got = f->up((uint16_t)code);
            if (isnan(want) ? !isnan(got) : (double)got != want || !signbit(got) != !signbit(want))
                fail_msg("%s: code %04x: %a, expected %a", f->name, code, (double)got, want);
        }
}

T_CASE(every_code_comes_back)
{
    for (const struct format *f = formats; f < formats + 2; f++)
        for (uint32_t code = 0; code < 0x10000; code++) {
            float v = f->up((uint16_t)code);
            uint16_t back = f->down(v);
            if (isnan(v)) {
                if (!isnan(ref_half_value(f->ref, back)) || ((back ^ code) & 0x8000))
                    fail_msg("%s: NaN %04x comes back as %04x", f->name, code, back);
            } else if (back != code) {
                fail_msg("%s: code %04x comes back as %04x", f->name, code, back);
            }
        }
}

static void check_one(const struct format *f, float v)
{
    uint16_t want = ref_half_round(f->ref, (double)v), got = f->down(v);
    if (got != want)
        fail_msg("%s: %a rounds to %04x, expected %04x", f->name, (double)v, got, want);
}

/* between any two neighbours: the midpoint and the floats next to it and next to both ends */
T_CASE(rounding_is_to_nearest_even_between_all_neighbours)
{
    for (const struct format *f = formats; f < formats + 2; f++) {
        int top = ((1 << f->ref.exp_bits) - 1) << f->ref.man_bits;
        for (int code = 0; code < top; code++) {
            double a = ref_half_value(f->ref, (uint16_t)code);
            double b = code + 1 == top
                           ? ldexp(1, 1 << (f->ref.exp_bits - 1)) /* where infinity begins */
                           : ref_half_value(f->ref, (uint16_t)(code + 1));
            float mid = (float)((a + b) / 2), index[] = {(float)a, mid, (float)b};
            for (int i = 0; i < 3; i++)
                for (int s = 0; s < 2; s++) {
                    float v = s ? -index[i] : index[i];
                    check_one(f, v);
                    check_one(f, nextafterf(v, INFINITY));
                    check_one(f, nextafterf(v, -INFINITY));
                }
        }
    }
}

T_CASE(every_float_rounds_right_in_a_seeded_sample)
{
    for (const struct format *f = formats; f < formats + 2; f++) {
        uint64_t seed = t_seed();
        for (int i = 0; i < 2000000; i++) {
            uint32_t u = (uint32_t)t_rand(&seed);
            float v;
            memcpy(&v, &u, sizeof v);
            if (!isnan(v))
                check_one(f, v);
            else if (!isnan(ref_half_value(f->ref, f->down(v))))
                fail_msg("%s: NaN %08x rounds to %04x", f->name, u, f->down(v));
        }
    }
}

T_MAIN("core/half")
