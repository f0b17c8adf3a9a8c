/* SPDX-License-Identifier: Apache-2.0 */
/* bridge_random.c - see bridge_random.h. */
#include "harness/bridge_random.h"

#include "harness/harness.h"

static ref_cut_t random_block(uint64_t *r)
{
    return t_chance(r, 20) ? REF_CEIL : REF_BLOCK;
}

ref_side_t t_random_dims(uint64_t *r, int64_t most, const int likely[5], int64_t largest)
{
    static const char *const names[] = {"dp", "tp", "cp", "pp", "ep"};
    ref_side_t side = {0};
    int64_t left = most;
    int first = (int)t_below(r, 3); /* any of dp, tp, cp may take the lion's share */
    for (int k = 0; k < 5; k++) {
        int i = k < 3 ? (k + first) % 3 : k;
        int64_t e = t_chance(r, likely[i]) ? t_pick(r, 1, left < largest ? left : largest) : 1;
        if (e == 1 && t_chance(r, 50))
            continue;                                /* a dim of extent 1 may be named or not */
        int index = (int)t_below(r, side.ndims + 1); /* any order */
        for (int j = side.ndims; j > index; j--) {
            side.name[j] = side.name[j - 1];
            side.extent[j] = side.extent[j - 1];
        }
        side.name[index] = names[i];
        side.extent[index] = e;
        side.ndims++;
        left /= e;
    }
    if (!side.ndims) {
        side.name[0] = "dp";
        side.extent[side.ndims++] = 1;
    }
    return side;
}

static ref_side_t random_side(uint64_t *r, int64_t most, bool is_src)
{
    ref_side_t side = t_random_dims(r, most, (const int[]){90, 60, 50, 25, 10}, 5);
    if (ref_side_extent(&side, "dp") > 1 || t_chance(r, 50))
        for (int i = 0; i < side.ndims; i++)
            if (strcmp(side.name[i], "dp") == 0)
                t_side_split(&side, 0, "dp", random_block(r), false);
    if (ref_side_extent(&side, "cp") > 1)
        t_side_split(&side, 1, "cp", t_chance(r, 80) ? REF_ZIGZAG : random_block(r), true);
    int64_t tp = ref_side_extent(&side, "tp"), pp = ref_side_extent(&side, "pp");
    if (tp > 1 && t_chance(r, 30))
        t_side_split(&side, 1, "tp", random_block(r), false);
    else if (tp > 1 && t_chance(r, 15))
        t_side_split(&side, 2, "tp", random_block(r), false);
    if (ref_side_extent(&side, "ep") > 1 && t_chance(r, 30))
        t_side_split(&side, 0, "ep", random_block(r), false);
    if (pp > 1) {
        side.stage_dim = "pp";
        side.stage = t_chance(r, 80) ? (is_src ? pp - 1 : 0) : t_below(r, pp);
    }
    return side;
}

/* what must divide the positions of a side; the last split may be uneven by CEIL */
static int64_t unit(const ref_side_t *side)
{
    int64_t u = 1;
    for (int i = 0; i < side->nsplits[1]; i++)
        u *= i == side->nsplits[1] - 1 && side->split[1][i].cut == REF_CEIL
                 ? 1
                 : ref_side_extent(side, side->split[1][i].dim) *
                       (side->split[1][i].cut == REF_ZIGZAG ? 2 : 1);
    return u;
}

static void random_map(uint64_t *r, ref_side_t *side, int64_t rows, int64_t *table)
{
    int64_t u = unit(side), extra = t_pick(r, 0, 2);
    side->positions = (rows + u - 1) / u * u + extra * u;
    if (t_chance(r, 50)) {
        side->map = REF_OFFSET;
        side->map_offset = t_pick(r, 0, side->positions - rows);
        return;
    }
    side->map = REF_TABLE;
    side->table = table;
    int64_t n = 0; /* distinct positions; half of the time ascending */
    for (int64_t p = 0; p < side->positions && n < rows; p++)
        if (t_below(r, side->positions - p) < rows - n)
            table[n++] = p;
    if (t_chance(r, 50))
        for (int64_t i = rows - 1; i > 0; i--) {
            int64_t j = t_below(r, i + 1), v = table[i];
            table[i] = table[j];
            table[j] = v;
        }
}

static bool has_sp(const ref_side_t *side)
{
    for (int i = 0; i < side->nsplits[1]; i++)
        if (!side->split[1][i].context)
            return true;
    return false;
}

static bool has_pp(const t_case_t *c)
{
    return ref_side_extent(&c->src, "pp") > 1 || ref_side_extent(&c->dst, "pp") > 1;
}

/* DP sizes of which neither divides the other */
static bool is_ragged(const t_case_t *c)
{
    int64_t a = ref_side_dp(&c->src), b = ref_side_dp(&c->dst);
    return (a > b ? a % b : b % a) != 0;
}

t_case_t t_random_case(uint64_t seed, int64_t ranks, int64_t *src_table, int64_t *dst_table,
                       t_shares_t *t)
{
    static const char *const axes[] = {"bsh", "sbh", "th", "hbs"};
    static const colo_dtype_t floats[] = {COLO_F32, COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    uint64_t state = seed, *r = &state;
    t_case_t c = {0};
    bool want_ragged = t_chance(r, 40), want_scp = t_chance(r, 25), want_pp = t_chance(r, 25);
    bool want_sp = t_chance(r, 25), want_dcp = t_chance(r, 30);
    for (int tries = 0; tries < 2000; tries++) { /* what is rare by luck is asked for */
        int64_t most = t_pick(r, want_ragged ? 6 : 2, ranks);
        c.src = random_side(r, most, true);
        c.dst = random_side(r, most, false);
        if (t_chance(r, 15))
            c.src.offset = t_below(r, ranks + 1 - ref_side_size(&c.src));
        if (t_chance(r, 15))
            c.dst.offset = t_below(r, ranks + 1 - ref_side_size(&c.dst));
        if (t_case_world(&c) >= 2 && (!want_ragged || is_ragged(&c)) &&
            (!want_scp || ref_side_extent(&c.src, "cp") > 1) && (!want_pp || has_pp(&c)) &&
            (!want_sp || has_sp(&c.src) || has_sp(&c.dst)) &&
            (!want_dcp || ref_side_extent(&c.dst, "cp") > 1))
            break;
    }
    int64_t n;
    bool map_src = t_chance(r, 10), map_dst = t_chance(r, 35);
    if (map_src && map_dst)
        n = t_pick(r, 1, 10);
    else if (map_src)
        n = unit(&c.dst) * t_pick(r, 1, 2);
    else if (map_dst)
        n = unit(&c.src) * t_pick(r, 1, 2);
    else
        n = t_lcm(unit(&c.src), unit(&c.dst));
    while (n > 48 && !map_dst) { /* too long for tiny tensors: let the map bend the sequence */
        map_dst = true;
        n = map_src ? t_pick(r, 1, 10) : unit(&c.src);
    }
    if (map_src)
        random_map(r, &c.src, n, src_table);
    if (map_dst)
        random_map(r, &c.dst, n, dst_table);
    int64_t ds = ref_side_dp(&c.src), dd = ref_side_dp(&c.dst), dp = ds > dd ? ds : dd;
    c.shape = (ref_shape_t){t_chance(r, 40) ? dp : t_pick(r, 0, 2 * dp), n, t_pick(r, 1, 3)};
    c.output = t_chance(r, 50) ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ;
    c.grad = t_chance(r, 50) ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT;
    c.dtype = floats[t_below(r, 5)];
    bool sums = c.output == COLO_OUTPUT_FULL_SEQ && c.grad == COLO_GRAD_PARTIAL;
    if (!sums && t_chance(r, 15))
        c.dtype = (colo_dtype_t)t_pick(r, COLO_I8, COLO_I64);
    c.axes = axes[t_below(r, 4)];
    c.stride = (t_stride_t)t_below(r, T_STRIDE_COUNT);
    c.ranks_per_node = t_chance(r, 30) ? t_pick(r, 1, 8) : 0;
    c.check = t_chance(r, 20) ? 2 : 1;
    c.steps = 1 + t_chance(r, 20);
    bool scp = ref_side_extent(&c.src, "cp") > 1, sp = has_sp(&c.src) || has_sp(&c.dst);
    bool pp = has_pp(&c);
    t->ragged += is_ragged(&c);
    t->uneven += c.shape.b % ds || c.shape.b % dd;
    t->source_cp += scp;
    t->pp += pp;
    t->sp += sp;
    t->any += scp || pp || sp;
    t->maps += map_src || map_dst;
    t->full += c.output == COLO_OUTPUT_FULL_SEQ;
    t->sharded += c.output == COLO_OUTPUT_SHARDED;
    t->partial += sums && ref_side_addends(&c.dst) > 1;
    t->disjoint += !sums && c.output == COLO_OUTPUT_FULL_SEQ && ref_side_addends(&c.dst) > 1;
    t->features += c.src.nsplits[2] || c.dst.nsplits[2];
    t->offsets += c.src.offset || c.dst.offset;
    return c;
}
