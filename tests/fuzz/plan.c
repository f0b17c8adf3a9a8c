/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c - any two layouts: refused with a reason, or planned as the oracle of integers says. */
#include "fuzz.h"

#include "harness/plan_world.h"

static ref_side_t take_side(fuzz_t *f, bool is_src)
{
    ref_side_t side = t_side_ordered((int)fuzz_range(f, 0, T_ORDERS - 1), fuzz_range(f, 1, 3),
                                     fuzz_range(f, 1, 3), fuzz_range(f, 1, 3), is_src);
    static const char *const dims[] = {"tp", "cp", "dp", "pp"};
    for (int64_t k = fuzz_range(f, 0, 2); k > 0; k--) {
        const int axis = (int)fuzz_range(f, 0, 2);
        const char *dim = dims[fuzz_range(f, 0, 3)];
        const ref_cut_t cut = (ref_cut_t)fuzz_range(f, REF_BLOCK, REF_CEIL);
        if (side.nsplits[axis] < REF_MAX_SPLITS)
            t_side_split(&side, axis, dim, cut, axis == 1 && fuzz_range(f, 0, 1));
    }
    side.offset = fuzz_range(f, 0, 3);
    if (fuzz_range(f, 0, 3) == 0) {
        side.map = REF_OFFSET;
        side.map_offset = fuzz_range(f, 0, 4);
        side.positions = fuzz_range(f, 0, 24);
    }
    return side;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_t f = {data, size};
    t_case_t c = {.dtype = COLO_F32};
    c.src = take_side(&f, true);
    c.dst = take_side(&f, false);
    c.shape = (ref_shape_t){fuzz_range(&f, 0, 12), fuzz_range(&f, 0, 24), fuzz_range(&f, 0, 12)};
    c.output = (colo_output_t)fuzz_range(&f, 0, 1);
    c.grad = (colo_grad_t)fuzz_range(&f, 0, 1);
    c.no_grad = fuzz_range(&f, 0, 7) == 0;
    c.ranks_per_node = fuzz_range(&f, 0, 4);
    t_plans_t w;
    if (!t_plans_make(&w, &c)) { /* refused, then by the first rank */
        FUZZ_CHECK(w.why[0] && !(w.plan && w.plan[0]), "%s: %s", t_case_text(&c), w.why);
        t_plans_free(&w);
        return 0;
    }
    FUZZ_CHECK(t_plans_judge(&w, COLO_PASS_FORWARD), "%s: %s", t_case_text(&c), w.why);
    FUZZ_CHECK(c.no_grad || t_plans_judge(&w, COLO_PASS_BACKWARD), "%s: %s", t_case_text(&c),
               w.why);
    t_plans_free(&w);
    return 0;
}
