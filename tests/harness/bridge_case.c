/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge_case.c - see bridge_case.h. Turns a description into library calls, fills inputs with
 * position codes, and compares outputs with the oracle byte by byte, gaps included. Which element
 * holds which number comes from tests/ref/ alone; nothing asks the plan under test.
 */
#include "harness/bridge_case.h"
#include "harness/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/error.h"

#define GAP 0xA5

static const char *const dim_names[] = {"tp", "cp", "dp", "pp", "ep", "xp", "sp", "gtp_remat"};

ref_side_t t_side(const char *dims, bool is_src)
{
    ref_side_t side = {0};
    const char *p = dims;
    while (*p) {
        size_t len = strcspn(p, "=");
        const char *name = NULL;
        for (size_t i = 0; i < sizeof dim_names / sizeof dim_names[0]; i++)
            if (strlen(dim_names[i]) == len && strncmp(dim_names[i], p, len) == 0)
                name = dim_names[i];
        if (!name || p[len] != '=') {
            fprintf(stderr, "test: bad side \"%s\"\n", dims);
            abort();
        }
        char *end;
        side.name[side.ndims] = name;
        side.extent[side.ndims++] = strtoll(p + len + 1, &end, 10);
        p = *end == ',' ? end + 1 : end;
        if (*end == '@') {
            side.offset = strtoll(end + 1, &end, 10);
            p = end;
        }
    }
    for (int i = 0; i < side.ndims; i++) {
        if (strcmp(side.name[i], "dp") == 0)
            t_side_split(&side, 0, "dp", REF_BLOCK, false);
        if (strcmp(side.name[i], "cp") == 0)
            t_side_split(&side, 1, "cp", REF_ZIGZAG, true);
        if (strcmp(side.name[i], "pp") == 0) {
            side.stage_dim = "pp";
            side.stage = is_src ? side.extent[i] - 1 : 0;
        }
    }
    return side;
}

ref_side_t t_side_ordered(int order, int64_t tp, int64_t cp, int64_t dp, bool is_src)
{
    static const char *const format[] = {"tp=%d,cp=%d,dp=%d", "tp=%d,dp=%d,cp=%d",
                                         "cp=%d,tp=%d,dp=%d", "cp=%d,dp=%d,tp=%d",
                                         "dp=%d,tp=%d,cp=%d", "dp=%d,cp=%d,tp=%d"};
    static const int pick[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                   {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    int e[3] = {(int)tp, (int)cp, (int)dp};
    return t_side(t_text(format[order], e[pick[order][0]], e[pick[order][1]], e[pick[order][2]]),
                  is_src);
}

/* The layout of @n ranks after @d; false, and before the first one, if there are no more. */
static bool next_layout(int64_t *d, int64_t n)
{
    do {
        if (++d[1] > n) {
            d[0]++;
            d[1] = 1;
        }
    } while (d[0] <= n && n % (d[0] * d[1]));
    const bool more = d[0] <= n;
    d[2] = more ? n / d[0] / d[1] : 0;
    if (!more)
        memcpy(d, (int64_t[]){1, 0}, 2 * sizeof *d);
    return more;
}

bool t_next_pair(t_pair_t *p, int64_t hi)
{
    p->nth++;
    while (!next_layout(p->dst, p->n))
        while (!next_layout(p->src, p->n))
            if (++p->n > hi)
                return false;
    return true;
}

int64_t t_lcm(int64_t a, int64_t b)
{
    int64_t x = a, y = b;
    while (y) {
        int64_t z = x % y;
        x = y;
        y = z;
    }
    return a / x * b;
}

void t_side_split(ref_side_t *side, int axis, const char *dim, ref_cut_t cut, bool context)
{
    side->split[axis][side->nsplits[axis]++] = (ref_split_t){dim, cut, context};
}

colo_grid_t t_grid(const ref_side_t *side)
{
    colo_grid_t grid;
    colo_dim_t dims[REF_MAX_DIMS];
    for (int i = 0; i < side->ndims; i++)
        dims[i] = (colo_dim_t){side->name[i], side->extent[i]};
    if (colo_grid_init(&grid, dims, side->ndims, side->offset, 0) != COLO_OK) {
        fprintf(stderr, "test: %s\n", colo_last_error());
        abort();
    }
    return grid;
}

colo_status_t t_layout(colo_layout_t *layout, const ref_side_t *side)
{
    colo_grid_t grid = t_grid(side);
    COLO_TRY(colo_layout_init(layout, &grid));
    for (int axis = 0; axis < 3; axis++)
        for (int k = 0; k < side->nsplits[axis]; k++) {
            const ref_split_t *sp = &side->split[axis][k];
            colo_split_kind_t kind = sp->cut == REF_ZIGZAG ? COLO_SPLIT_ZIGZAG
                                     : sp->cut == REF_CEIL ? COLO_SPLIT_CEIL
                                                           : COLO_SPLIT_BLOCK;
            if (axis == 1 && sp->context)
                COLO_TRY(colo_layout_split_context(layout, sp->dim, kind));
            else
                COLO_TRY(colo_layout_split(layout, (colo_axis_t)axis, sp->dim, kind));
        }
    layout->positions = side->positions;
    if (side->map == REF_OFFSET)
        COLO_TRY(colo_layout_map_offset(layout, side->map_offset, side->positions));
    if (side->stage_dim)
        COLO_TRY(colo_layout_stage(layout, side->stage_dim, side->stage));
    return COLO_OK;
}

/* A table needs its length, which only the case knows. */
static colo_status_t layout_of(colo_layout_t *layout, const ref_side_t *side, int64_t rows)
{
    COLO_TRY(t_layout(layout, side));
    if (side->map == REF_TABLE)
        COLO_TRY(colo_layout_map_table(layout, side->table, rows, side->positions));
    return COLO_OK;
}

t_case_t t_between(const char *src, const char *dst, int64_t b, int64_t n, int64_t h)
{
    return (t_case_t){.src = t_side(src, true), .dst = t_side(dst, false), .shape = {b, n, h}};
}

t_case_t t_pair_case(const t_pair_t *p, int64_t src_order, int64_t dst_order)
{
    const int64_t *s = p->src, *d = p->dst;
    return (t_case_t){.src = t_side_ordered((int)src_order % T_ORDERS, s[0], s[1], s[2], true),
                      .dst = t_side_ordered((int)dst_order % T_ORDERS, d[0], d[1], d[2], false),
                      .shape = {s[2] > d[2] ? s[2] : d[2], 2 * t_lcm(s[1], d[1]), 1}};
}

t_case_t t_collective(const char *src, const char *dst, int64_t b, int64_t n, int64_t h)
{
    t_case_t c = t_between(src, dst, b, n, h);
    c.algo = COLO_ALGO_COLLECTIVE;
    return c;
}

void t_case_kind(t_case_t *c, int kind)
{
    c->output = kind % 3 == 0 ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ;
    c->grad = kind < 2 ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL;
}

int32_t t_case_world(const t_case_t *c)
{
    if (c->world)
        return c->world;
    int64_t a = c->src.offset + ref_side_size(&c->src), b = c->dst.offset + ref_side_size(&c->dst);
    return (int32_t)(a > b ? a : b);
}

colo_status_t t_case_config(const t_case_t *c, colo_layout_t *src, colo_layout_t *dst,
                            colo_bridge_config_t *config)
{
    COLO_TRY(layout_of(src, &c->src, c->shape.n));
    COLO_TRY(layout_of(dst, &c->dst, c->shape.n));
    *config = (colo_bridge_config_t){COLO_BRIDGE_CONFIG_INIT,
                                     .src = src,
                                     .dst = dst,
                                     .shape = {c->shape.b, c->shape.n, c->shape.h, 0},
                                     .dtype = c->dtype,
                                     .axes = c->axes,
                                     .output = c->output,
                                     .grad = c->grad,
                                     .algo = c->algo,
                                     .no_grad = c->no_grad,
                                     .ranks_per_node = c->ranks_per_node};
    return COLO_OK;
}

colo_status_t t_case_bridge(colo_bridge_t **bridge, const t_case_t *c, colo_comm_t *comm,
                            colo_mem_t mem)
{
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    COLO_TRY(t_case_config(c, &src, &dst, &config));
    config.mem = mem;
    return colo_bridge_create(bridge, &config, comm);
}

static const char *axes_of(const char *axes)
{
    return axes ? axes : "bsh";
}

colo_status_t t_buffer_make(t_buffer_t *b, const char *axes, colo_dtype_t dtype, t_stride_t stride,
                            int64_t nb, int64_t ns, int64_t nh)
{
    memset(b, 0, sizeof *b);
    axes = axes_of(axes);
    int32_t nd = (int32_t)strlen(axes);
    colo_tensor_t *t = &b->t;
    t->dtype = dtype;
    t->mem = COLO_MEM_HOST;
    t->device = -1;
    t->ndim = nd;
    for (int32_t i = 0; i < nd; i++)
        t->shape[i] = axes[i] == 't' ? nb * ns : axes[i] == 'b' ? nb : axes[i] == 's' ? ns : nh;
    int64_t gap = stride == T_TIGHT ? 0 : 3, step = stride == T_SPREAD ? 2 : 1;
    for (int32_t k = 0; k < nd; k++) {
        int32_t i = stride == T_REVERSED ? k : nd - 1 - k;
        t->stride[i] = step;
        step = step * t->shape[i] + gap + (stride != T_TIGHT && k == 1 ? 2 : 0);
    }
    size_t es = colo_dtype_size(dtype);
    int64_t last = 0, count = 1;
    for (int32_t i = 0; i < nd; i++) {
        last += (t->shape[i] - 1) * t->stride[i];
        count *= t->shape[i];
    }
    /* a gap in front and behind, so that a write outside is seen as a changed byte */
    b->bytes = (size_t)(count ? last + 1 + 16 : 16) * es;
    b->raw = malloc(b->bytes);
    if (!b->raw)
        return colo_fail(COLO_ERR_NOMEM, "test buffer of %zu bytes", b->bytes);
    memset(b->raw, GAP, b->bytes);
    t->data = count ? b->raw + 8 * es : NULL;
    return COLO_OK;
}

void t_buffer_free(t_buffer_t *b)
{
    free(b->raw);
    memset(b, 0, sizeof *b);
}

colo_status_t t_buffer_rows(t_buffer_t *b, colo_dtype_t dtype, int64_t rows, int64_t n, int64_t row,
                            int64_t step)
{
    memset(b, 0, sizeof *b);
    b->bytes = (size_t)(rows * row) * colo_dtype_size(dtype) + 1;
    b->raw = malloc(b->bytes);
    rank_check(b->raw);
    memset(b->raw, GAP, b->bytes);
    b->t = colo_tensor_host(b->raw, dtype, 2, (int64_t[]){rows, n});
    b->t.stride[0] = row;
    b->t.stride[1] = step;
    return COLO_OK;
}

colo_status_t t_buffer_put(const t_ragged_where_t *w, t_buffer_t *b)
{
    if (!w)
        return COLO_OK;
    rank_try(w->put(w->arg, b->raw, b->bytes, &b->there));
    b->t.mem = COLO_MEM_CUDA;
    b->t.device = w->device;
    b->t.data = b->there;
    return COLO_OK;
}

colo_status_t t_buffer_get(const t_ragged_where_t *w, t_buffer_t *b)
{
    if (!w)
        return COLO_OK;
    rank_try(w->get(w->arg, b->raw, b->there, b->bytes));
    w->drop(w->arg, b->there);
    b->there = NULL;
    return COLO_OK;
}

colo_status_t t_buffers_quiet(const t_ragged_where_t *w)
{
    return w ? w->quiet(w->arg) : COLO_OK;
}

unsigned char *t_buffer_at(const t_buffer_t *b, const char *axes, int64_t ns, int64_t ib,
                           int64_t is, int64_t ih)
{
    axes = axes_of(axes);
    int64_t pos = 0;
    for (int32_t i = 0; i < b->t.ndim; i++) {
        int64_t k = axes[i] == 't' ? ib * ns + is : axes[i] == 'b' ? ib : axes[i] == 's' ? is : ih;
        pos += k * b->t.stride[i];
    }
    return (unsigned char *)b->t.data + (size_t)pos * colo_dtype_size(b->t.dtype);
}

static bool is_partial(const t_case_t *c)
{
    return c->output == COLO_OUTPUT_FULL_SEQ && c->grad == COLO_GRAD_PARTIAL;
}

/* What the oracle says that the features of one row of a rank's tensor hold. */
static void expected_row(const t_case_t *c, t_role_t role, const ref_part_t *own,
                         const ref_part_t *part, int64_t salt, int64_t ib, int64_t is,
                         t_buffer_t *buffer)
{
    const char *dtype = colo_dtype_name(c->dtype);
    const int64_t b = part->b[ib], s = part->s[is], addends = ref_side_addends(&c->dst);
    const int bits = ref_partial_bits(dtype);
    const bool none = role == T_DY && !is_partial(c) && !ref_list_has(own->s, own->ns, s);
    for (int64_t ih = 0; ih < part->nh; ih++) {
        const int64_t h = part->h[ih];
        void *out = t_buffer_at(buffer, c->axes, part->ns, ib, is, ih);
        if (role == T_X || role == T_Y) {
            ref_encode_move(dtype, ref_code_x(c->shape, b, s, h) + 3 * salt, out);
        } else if (is_partial(c)) {
            int64_t v = 0;
            if (role == T_DY)
                v = ref_code_partial(part->addend, b, s, h + 977 * salt, bits);
            else
                for (int64_t addend = 0; addend < addends; addend++)
                    v += ref_code_partial(addend, b, s, h + 977 * salt, bits);
            ref_encode_number(dtype, (double)v, out);
        } else if (none) {
            memset(out, 0, ref_dtype_size(dtype)); /* DISJOINT: zero outside the rank's own rows */
        } else {
            ref_encode_move(dtype, ref_code_d(c->shape, b, s, h) + 5 * salt, out);
        }
    }
}

static void parts_of(const t_case_t *c, t_role_t role, int64_t rank, ref_part_t *own,
                     ref_part_t *part)
{
    bool at_src = role == T_X || role == T_DX;
    const ref_side_t *side = at_src ? &c->src : &c->dst;
    ref_part_make(own, side, c->shape, rank, false);
    ref_part_make(part, side, c->shape, rank, !at_src && c->output == COLO_OUTPUT_FULL_SEQ);
}

colo_status_t t_case_tensor(const t_case_t *c, t_role_t role, int64_t rank, int64_t salt, bool fill,
                            t_buffer_t *b)
{
    T_ENDS(ref_part_free) ref_part_t own = {0}, part = {0};
    parts_of(c, role, rank, &own, &part);
    colo_status_t st = t_buffer_make(b, c->axes, c->dtype, c->stride, part.nb, part.ns, part.nh);
    for (int64_t ib = 0; st == COLO_OK && fill && ib < part.nb; ib++)
        for (int64_t is = 0; is < part.ns; is++)
            expected_row(c, role, &own, &part, salt, ib, is, b);
    return st;
}

static const char *const role_name[] = {"x", "y", "d_y", "d_x"};

colo_status_t t_case_compare(const t_case_t *c, t_role_t role, int64_t rank, int64_t salt,
                             const t_buffer_t *got)
{
    T_ENDS(t_buffer_free) t_buffer_t want = {0};
    COLO_TRY(t_case_tensor(c, role, rank, salt, true, &want));
    colo_status_t st = COLO_OK;
    if (want.bytes != got->bytes || memcmp(want.raw, got->raw, want.bytes) != 0) {
        T_ENDS(ref_part_free) ref_part_t own = {0}, part = {0};
        parts_of(c, role, rank, &own, &part);
        size_t es = colo_dtype_size(c->dtype);
        st = colo_fail(COLO_ERR_STATE,
                       "%s of rank %lld: a byte between or around the elements changed",
                       role_name[role], (long long)rank);
        bool found = false;
        for (int64_t ib = 0; !found && ib < part.nb; ib++)
            for (int64_t is = 0; !found && is < part.ns; is++)
                for (int64_t ih = 0; !found && ih < part.nh; ih++) {
                    unsigned char *w = t_buffer_at(&want, c->axes, part.ns, ib, is, ih);
                    unsigned char *g = t_buffer_at(got, c->axes, part.ns, ib, is, ih);
                    if (memcmp(w, g, es) == 0)
                        continue;
                    uint64_t wv = 0, gv = 0;
                    memcpy(&wv, w, es);
                    memcpy(&gv, g, es);
                    found = true;
                    st = colo_fail(
                        COLO_ERR_STATE,
                        "%s of rank %lld, element sample %lld row %lld feature %lld (local "
                        "%lld %lld %lld): bits %llx, expected %llx",
                        role_name[role], (long long)rank, (long long)part.b[ib],
                        (long long)part.s[is], (long long)part.h[ih], (long long)ib, (long long)is,
                        (long long)ih, (unsigned long long)gv, (unsigned long long)wv);
                }
    }
    return st;
}

/* Does the bridge say the same shape as the oracle? A rank that holds nothing has no elements. */
static colo_status_t check_shape(const t_case_t *c, t_role_t role, int64_t rank, int32_t ndim,
                                 const int64_t *shape, const t_buffer_t *want)
{
    T_ENDS(ref_part_free) ref_part_t own = {0}, part = {0};
    parts_of(c, role, rank, &own, &part);
    bool same = ndim == want->t.ndim;
    int64_t count = 1;
    for (int32_t i = 0; i < ndim; i++) {
        count *= shape[i];
        same = same && shape[i] == want->t.shape[i];
    }
    if (part.holds ? same : count == 0)
        return COLO_OK;
    return colo_fail(COLO_ERR_STATE,
                     "%s of rank %lld has %d axes and %lld elements, expected %d "
                     "and %lld",
                     role_name[role], (long long)rank, ndim, (long long)count, want->t.ndim,
                     (long long)colo_tensor_count(&want->t));
}

void t_stand_end(t_stand_t *s)
{
    for (int role = 0; role < 4; role++)
        t_buffer_free(&s->t[role]);
    colo_bridge_destroy(&s->bridge);
}

colo_status_t t_stand_fill(t_stand_t *s, int64_t salt)
{
    s->salt = salt;
    for (int role = 0; role < 4; role++) {
        t_buffer_free(&s->t[role]);
        COLO_TRY(t_case_tensor(s->c, (t_role_t)role, s->rank, salt, role == T_X || role == T_DY,
                               &s->t[role]));
    }
    return COLO_OK;
}

colo_status_t t_stand_make(t_stand_t *s, const t_case_t *c, colo_comm_t *comm)
{
    s->c = c;
    s->comm = comm;
    s->rank = colo_comm_world_rank(comm, colo_comm_rank(comm));
    if (c->check)
        COLO_TRY(colo_comm_set_check(comm, c->check));
    COLO_TRY(t_case_bridge(&s->bridge, c, comm, COLO_MEM_HOST));
    return t_stand_fill(s, 0);
}

colo_status_t t_stand_call(t_stand_t *s, colo_pass_t pass)
{
    return (pass == COLO_PASS_FORWARD ? colo_bridge_forward : colo_bridge_backward)(
        s->bridge, &t_stand_in(s, pass)->t, &t_stand_out(s, pass)->t, NULL);
}

colo_status_t t_stand_compare(t_stand_t *s, t_role_t role)
{
    return t_case_compare(s->c, role, s->rank, s->salt, &s->t[role]);
}

colo_status_t t_stand_step(t_stand_t *s, int64_t salt)
{
    return t_case_step(s->bridge, s->rank, s->c, salt);
}

static colo_status_t one_way(colo_bridge_t *bridge, int64_t rank, const t_case_t *c, int64_t salt,
                             bool backward)
{
    t_role_t in_role = backward ? T_DY : T_X, out_role = backward ? T_DX : T_Y;
    T_ENDS(t_buffer_free) t_buffer_t in = {0}, out = {0};
    COLO_TRY(t_case_tensor(c, in_role, rank, salt, true, &in));
    COLO_TRY(t_case_tensor(c, out_role, rank, salt, false, &out));
    int64_t shape[3] = {0};
    if (!backward) {
        COLO_TRY(check_shape(c, T_X, rank, colo_bridge_src_shape(bridge, shape), shape, &in));
        COLO_TRY(check_shape(c, T_Y, rank, colo_bridge_dst_shape(bridge, shape), shape, &out));
    }
    /* what holds nothing may be NULL or an empty view: take turns */
    const colo_tensor_t *pin = !in.t.data && salt % 2 ? NULL : &in.t;
    const colo_tensor_t *pout = !out.t.data && salt % 2 ? NULL : &out.t;
    COLO_TRY((backward ? colo_bridge_backward : colo_bridge_forward)(bridge, pin, pout, NULL));
    COLO_TRY(t_case_compare(c, out_role, rank, salt, &out));
    return t_case_compare(c, in_role, rank, salt, &in); /* never written */
}

colo_status_t t_case_step(colo_bridge_t *bridge, int64_t rank, const t_case_t *c, int64_t salt)
{
    COLO_TRY(one_way(bridge, rank, c, salt, false));
    if (!c->no_grad)
        COLO_TRY(one_way(bridge, rank, c, salt, true));
    return COLO_OK;
}

colo_status_t t_case_on(colo_comm_t *world, const t_case_t *c)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    if (c->check)
        COLO_TRY(colo_comm_set_check(world, c->check));
    COLO_TRY(t_case_bridge(&bridge, c, world, COLO_MEM_HOST));
    int64_t rank = colo_comm_world_rank(world, colo_comm_rank(world));
    for (int32_t i = 0; i < (c->steps ? c->steps : 1); i++)
        COLO_TRY(t_case_step(bridge, rank, c, i));
    return COLO_OK;
}

static colo_status_t run_rank(colo_comm_t *world, void *arg)
{
    colo_status_t st = t_case_on(world, arg);
    return st < 0 ? colo_fail_prefix(st, "%s", t_case_text(arg)) : st;
}

colo_status_t t_case_run(const t_case_t *c)
{
    t_case_t copy = *c;
    return t_run_ranks(t_case_world(c), run_rank, &copy, 0);
}

static void after(void *arg, colo_status_t st)
{
    free(arg);
    assert_ok(st);
}

void t_case_later(const t_case_t *c)
{
    t_case_t *copy = malloc(sizeof *copy);
    *copy = *c;
    t_run_later(t_case_world(c), run_rank, copy, 0, after);
}

size_t t_side_text(const ref_side_t *side, char *text, size_t cap)
{
    size_t n = 0;
    for (int i = 0; i < side->ndims && n < cap; i++)
        n += (size_t)snprintf(text + n, cap - n, "%s%s=%lld", i ? "," : "", side->name[i],
                              (long long)side->extent[i]);
    if (side->offset && n < cap)
        n += (size_t)snprintf(text + n, cap - n, "@%lld", (long long)side->offset);
    static const char axis_name[] = "bsh";
    for (int axis = 0; axis < 3; axis++)
        for (int k = 0; k < side->nsplits[axis] && n < cap; k++)
            n += (size_t)snprintf(text + n, cap - n, " %c:%s%s%s", axis_name[axis],
                                  side->split[axis][k].dim,
                                  side->split[axis][k].cut == REF_ZIGZAG ? "/zz"
                                  : side->split[axis][k].cut == REF_CEIL ? "/ceil"
                                                                         : "",
                                  side->split[axis][k].context ? "+" : "");
    if (side->map && n < cap)
        n += (size_t)snprintf(text + n, cap - n, side->map == REF_TABLE ? " table" : " map+%lld",
                              (long long)side->map_offset);
    if (side->positions && n < cap)
        n += (size_t)snprintf(text + n, cap - n, " S=%lld", (long long)side->positions);
    if (side->stage_dim && n < cap)
        n += (size_t)snprintf(text + n, cap - n, " %s==%lld", side->stage_dim,
                              (long long)side->stage);
    return n < cap ? n : cap - 1;
}

const char *t_case_text(const t_case_t *c)
{
    static _Thread_local char text[1024];
    size_t n = 0, cap = sizeof text;
    text[n++] = '[';
    n += t_side_text(&c->src, text + n, cap - n);
    n += (size_t)snprintf(text + n, cap - n, " -> ");
    n += t_side_text(&c->dst, text + n, cap - n);
    snprintf(text + n, cap - n, " | B%lld N%lld H%lld %s %s %s %s %s stride %d]",
             (long long)c->shape.b, (long long)c->shape.n, (long long)c->shape.h,
             c->output == COLO_OUTPUT_SHARDED ? "SHARDED" : "FULL_SEQ",
             c->grad == COLO_GRAD_PARTIAL ? "PARTIAL" : "DISJOINT",
             c->algo == COLO_ALGO_EXACT ? "EXACT" : "COLLECTIVE", colo_dtype_name(c->dtype),
             axes_of(c->axes), (int)c->stride);
    return text;
}

colo_status_t t_case_lacking_rank(colo_comm_t *world, void *arg)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *sub = NULL;
    colo_bridge_t *bridge = NULL;
    int64_t rank = colo_comm_rank(world);
    rank_try(colo_comm_split_color(world, rank < 2 ? 0 : -1, rank, &sub));
    if (rank >= 2)
        return COLO_OK;
    rank_check(t_case_bridge(&bridge, arg, sub, COLO_MEM_HOST) == COLO_ERR_MISSING && !bridge);
    rank_check(says(rank == 0 ? "rank 2" : "rank 3"));
    rank_check(colo_comm_check(sub) == COLO_OK);
    return COLO_OK;
}
