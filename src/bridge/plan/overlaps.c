/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overlaps.c - what senders.c, gateways.c and node-sums.c share: looking up a source, and cutting
 * an overlap. Which part goes to which rank is theirs to say.
 */
#include "bridge/plan/routing.h"

#include "core/error.h"

#define SMALL_OVERLAP 65536 /* bytes below which an overlap is not cut */

/* ---- sources, sorted by key and rank ---- */

int colo_source_cmp(const void *a, const void *b)
{
    const colo_source_t *x = a, *y = b;
    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

int64_t colo_source_find(colo_builder_t *w, const colo_source_t *h, int64_t n, int64_t key,
                         int64_t rank)
{
    const colo_source_t want = {key, rank};
    int64_t a = 0;
    while (a < n) {
        int64_t mid = a + (n - a) / 2;
        w->plan->work++;
        if (colo_source_cmp(&h[mid], &want) < 0)
            a = mid + 1;
        else
            n = mid;
    }
    return a;
}

/* ---- where to cut ---- */

bool colo_is_small(const colo_builder_t *w, const colo_extent_t *x)
{
    return x->of[0] * x->of[1] * x->of[2] * (int64_t)w->elem < SMALL_OVERLAP;
}

/* Along which axis an overlap is cut in @n: one that divides, else the longest, whose slices are
 * the smallest. Rows before samples before features, so that boxes stay whole rows if they can. */
int colo_cut_axis(const colo_extent_t *x, int64_t n)
{
    static const int order[3] = {COLO_ROWS, COLO_SAMPLES, COLO_FEATURES};
    int longest = order[0];
    for (int i = 0; i < 3; i++) {
        if (x->of[order[i]] % n == 0)
            return order[i];
        if (x->of[order[i]] > x->of[longest])
            longest = order[i];
    }
    return longest;
}

/* Where part @k of @n of a @length starts, if the longer parts are from @rotation on. */
int64_t colo_part_lo(int64_t length, int64_t n, int64_t k, int64_t rotation)
{
    int64_t longer = length % n, end = rotation + longer, more;
    more = (k < end ? k : end) - rotation;
    more = more > 0 ? more : 0;
    if (end > n)
        more += k < end - n ? k : end - n;
    return k * (length / n) + more;
}

int colo_entry_cmp(const void *a, const void *b)
{
    const colo_entry_t *x = a, *y = b;
    if (x->peer != y->peer)
        return x->peer < y->peer ? -1 : 1;
    if (x->region.addend != y->region.addend)
        return x->region.addend < y->region.addend ? -1 : 1;
    /* what is collected for several destinations may begin at the same element */
    for (int end = 0; end < 2; end++) {
        const int64_t p[3] = {x->region.b[end], x->region.s[end], x->region.h[end]};
        const int64_t q[3] = {y->region.b[end], y->region.s[end], y->region.h[end]};
        for (int axis = 0; axis < 3; axis++)
            if (p[axis] != q[axis])
                return p[axis] < q[axis] ? -1 : 1;
    }
    return 0;
}

/* ---- cutting ---- */

static colo_status_t push_entry(colo_list_t *out, int64_t peer, const colo_entry_t *overlap)
{
    colo_entry_t *e = colo_list_push(out, sizeof *e);
    if (!e)
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)out->n);
    *e = *overlap;
    e->peer = peer;
    return COLO_OK;
}

colo_status_t colo_overlaps_push(colo_builder_t *w, int64_t peer)
{
    const colo_entry_t *p = w->overlaps.items;
    for (int64_t i = 0; i < w->overlaps.n; i++)
        COLO_TRY(push_entry(w->out, peer, &p[i]));
    return COLO_OK;
}

colo_status_t colo_overlaps_cut(colo_builder_t *w, colo_list_t *out, int axis, int64_t lo,
                                int64_t hi, int64_t peer)
{
    const colo_entry_t *p = w->overlaps.items;
    int64_t begin = 0;
    for (int64_t i = 0; i < w->overlaps.n && lo < hi; i++) {
        const int64_t *rows = p[i].region.s, len = rows[1] - rows[0];
        const int64_t a = lo > begin ? lo - begin : 0, b = hi - begin < len ? hi - begin : len;
        begin += axis == COLO_ROWS ? len : 0;
        if (axis == COLO_ROWS && a >= b)
            continue;
        COLO_TRY(push_entry(out, peer, &p[i]));
        colo_entry_t *e = (colo_entry_t *)out->items + out->n - 1;
        int64_t *range = axis == COLO_SAMPLES ? e->region.b : e->region.h;
        if (axis == COLO_ROWS) {
            e->region.s[1] = rows[0] + b;
            e->region.s[0] += a;
            e->offset.src_row += a;
            e->offset.dst_row += a;
        } else {
            range[1] = range[0] + hi;
            range[0] += lo;
        }
    }
    return COLO_OK;
}
