/* SPDX-License-Identifier: Apache-2.0 */
/*
 * balance.c - assign segments to replicas so that the loads are alike.
 *
 * Longest first: segments by descending cost, each to the least loaded replica. A heap of replicas
 * that knows where each of them is, because a segment that stays also adds to a replica's load.
 */
#include <colobridge/segments.h>

#include "core/error.h"

#include <stdlib.h>

typedef struct item {
    int64_t cost, index;
} item_t;

typedef struct heap {
    int64_t n;
    int64_t *bin;   /* [n] the least loaded first */
    int64_t *where; /* [n] of each bin in bin[] */
    int64_t *load;  /* [n] */
} heap_t;

static int by_cost(const void *a, const void *b)
{
    const item_t *x = a, *y = b;
    if (x->cost != y->cost)
        return x->cost > y->cost ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

static bool lighter(const heap_t *h, int64_t a, int64_t b)
{
    return h->load[a] != h->load[b] ? h->load[a] < h->load[b] : a < b;
}

/* The load of @bin has grown: it sinks. */
static void sink(heap_t *h, int64_t bin)
{
    int64_t i = h->where[bin];
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child + 1 < h->n && lighter(h, h->bin[child + 1], h->bin[child]))
            child++;
        if (child >= h->n || !lighter(h, h->bin[child], bin))
            break;
        h->bin[i] = h->bin[child];
        h->where[h->bin[i]] = i;
        i = child;
    }
    h->bin[i] = bin;
    h->where[bin] = i;
}

static colo_status_t check(const int64_t *assign, const int64_t *cost, int64_t count, int64_t n,
                           const int64_t *current, double stick, int64_t *total)
{
    *total = 0;
    if (count < 0 || n < 1)
        return colo_fail(COLO_ERR_ARG, "balance: %s is %lld, expected at least %d",
                         count < 0 ? "count" : "n", (long long)(count < 0 ? count : n), count >= 0);
    if (count > 0 && (!assign || !cost))
        return colo_fail(COLO_ERR_ARG, "balance: %s is NULL", assign ? "cost" : "assign");
    if (current && !(stick >= 0))
        return colo_fail(COLO_ERR_ARG, "balance: stick is %g, expected at least 0", stick);
    for (int64_t e = 0; e < count; e++) {
        if (cost[e] < 0)
            return colo_fail(COLO_ERR_ARG, "balance: segment %lld costs %lld, expected at least 0",
                             (long long)e, (long long)cost[e]);
        if (!colo_add_ok(*total, cost[e], total))
            return colo_fail(COLO_ERR_ARG, "balance: the costs up to segment %lld exceed 63 bits",
                             (long long)e);
        if (current && (current[e] < 0 || current[e] >= n))
            return colo_fail(COLO_ERR_ARG,
                             "balance: segment %lld is on replica %lld, expected 0..%lld",
                             (long long)e, (long long)current[e], (long long)n - 1);
    }
    return COLO_OK;
}

colo_status_t colo_balance(int64_t *assign, const int64_t *cost, int64_t count, int64_t n,
                           const int64_t *current, double stick)
{
    int64_t total;
    COLO_TRY(check(assign, cost, count, n, current, stick, &total));
    COLO_AUTOFREE item_t *item = calloc((size_t)count + 1, sizeof *item);
    COLO_AUTOFREE int64_t *of_bins = calloc((size_t)n, 3 * sizeof *of_bins);
    if (!item || !of_bins)
        return colo_fail(COLO_ERR_NOMEM, "balance: %lld segments over %lld replicas",
                         (long long)count, (long long)n);
    heap_t h = {.n = n, .bin = of_bins, .where = of_bins + n, .load = of_bins + 2 * n};
    for (int64_t i = 0; i < n; i++)
        h.bin[i] = h.where[i] = i;
    for (int64_t e = 0; e < count; e++)
        item[e] = (item_t){cost[e], e};
    qsort(item, (size_t)count, sizeof *item, by_cost);
    const double most = (1.0 + stick) * ((double)total / (double)n);
    for (int64_t i = 0; i < count; i++) {
        const int64_t e = item[i].index;
        int64_t to = h.bin[0];
        /* not <=: if all costs are 0 and stick is infinite, most is NaN, and all segments stay */
        if (current && !((double)(h.load[current[e]] + cost[e]) > most))
            to = current[e];
        assign[e] = to;
        h.load[to] += cost[e];
        sink(&h, to);
    }
    return COLO_OK;
}
