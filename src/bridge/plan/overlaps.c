/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overlaps.c - cuts an overlap. Which part goes to which rank, senders.c and gateways.c say.
 */
#include "bridge/plan/overlaps.h"

#include "core/error.h"

#define SMALL_OVERLAP 65536 /* bytes below which an overlap is not cut */

/* ---- where to cut ---- */

bool colo_is_small(const colo_extent_t *extent, size_t elem)
{
    return colo_extent_count(extent) * (int64_t)elem < SMALL_OVERLAP;
}

/* The slices of the longest axis are the smallest. Rows come before samples and features, so that
 * boxes stay whole rows if they can. */
int colo_cut_axis(const colo_extent_t *extent, int64_t n)
{
    static const int order[3] = {COLO_AXIS_ROWS, COLO_AXIS_SAMPLES, COLO_AXIS_FEATURES};
    int longest = order[0];
    for (int i = 0; i < 3; i++) {
        if (extent->of[order[i]] % n == 0)
            return order[i];
        if (extent->of[order[i]] > extent->of[longest])
            longest = order[i];
    }
    return longest;
}

int64_t colo_part_lo(int64_t length, int64_t n, int64_t k, int64_t rotation)
{
    int64_t longer = length % n, end = rotation + longer, more;
    more = (k < end ? k : end) - rotation;
    more = more > 0 ? more : 0;
    if (end > n)
        more += k < end - n ? k : end - n;
    return k * (length / n) + more;
}

int colo_entry_cmp(const void *first, const void *second)
{
    const colo_entry_t *one = first, *other = second;
    if (one->peer != other->peer)
        return one->peer < other->peer ? -1 : 1;
    if (one->region.addend != other->region.addend)
        return one->region.addend < other->region.addend ? -1 : 1;
    /* what is collected for several destinations may begin at the same element */
    for (int end = 0; end < 2; end++) {
        const int64_t keys[3] = {one->region.b[end], one->region.s[end], one->region.h[end]};
        const int64_t others[3] = {other->region.b[end], other->region.s[end],
                                   other->region.h[end]};
        for (int axis = 0; axis < 3; axis++)
            if (keys[axis] != others[axis])
                return keys[axis] < others[axis] ? -1 : 1;
    }
    return 0;
}

/* ---- cutting ---- */

colo_status_t colo_overlap_push(const colo_overlap_t *overlap, int64_t peer, colo_list_t *out)
{
    const int64_t n = overlap->n;
    if (n == 0)
        return COLO_OK;
    COLO_FAIL_IF(!colo_list_reserve(out, out->n + n, sizeof(colo_entry_t)), COLO_ERR_NOMEM,
                 "plan: %lld regions", (long long)(out->n + n));
    colo_entry_t *entry = (colo_entry_t *)out->items + out->n;
    for (int64_t i = 0; i < n; i++) {
        entry[i] = overlap->region[i];
        entry[i].peer = peer;
    }
    out->n += n;
    return COLO_OK;
}

colo_status_t colo_overlap_cut(const colo_overlap_t *overlap, int axis, int64_t lo, int64_t hi,
                               int64_t peer, colo_list_t *out)
{
    int64_t begin = 0;
    for (int64_t i = 0; i < overlap->n && lo < hi; i++) {
        const int64_t *rows = overlap->region[i].region.s, len = rows[1] - rows[0];
        const int64_t first = lo > begin ? lo - begin : 0,
                      last = hi - begin < len ? hi - begin : len;
        begin += axis == COLO_AXIS_ROWS ? len : 0;
        if (axis == COLO_AXIS_ROWS && first >= last)
            continue;
        colo_entry_t entry = overlap->region[i];
        entry.peer = peer;
        int64_t *range = axis == COLO_AXIS_SAMPLES ? entry.region.b : entry.region.h;
        if (axis == COLO_AXIS_ROWS) {
            entry.region.s[1] = rows[0] + last;
            entry.region.s[0] += first;
            entry.offset.src_row += first;
            entry.offset.dst_row += first;
        } else {
            range[1] = range[0] + hi;
            range[0] += lo;
        }
        COLO_PUSH(out, "plan: %lld regions", entry);
    }
    return COLO_OK;
}
