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

static int by_cost(const void *first, const void *second)
{
    const item_t *one = first, *other = second;
    if (one->cost != other->cost)
        return one->cost > other->cost ? -1 : 1;
    return (one->index > other->index) - (one->index < other->index);
}

static bool lighter(const heap_t *heap, int64_t bin, int64_t other)
{
    return heap->load[bin] != heap->load[other] ? heap->load[bin] < heap->load[other] : bin < other;
}

/* The load of @bin has grown: it sinks. */
static void sink(heap_t *heap, int64_t bin)
{
    int64_t i = heap->where[bin];
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child + 1 < heap->n && lighter(heap, heap->bin[child + 1], heap->bin[child]))
            child++;
        if (child >= heap->n || !lighter(heap, heap->bin[child], bin))
            break;
        heap->bin[i] = heap->bin[child];
        heap->where[heap->bin[i]] = i;
        i = child;
    }
    heap->bin[i] = bin;
    heap->where[bin] = i;
}

static colo_status_t check(const int64_t *assign, const int64_t *cost, int64_t count, int64_t n,
                           const int64_t *current, double stick, int64_t *total)
{
    *total = 0;
    COLO_FAIL_IF(count < 0 || n < 1, COLO_ERR_ARG, "balance: %s is %lld, expected at least %d",
                 count < 0 ? "count" : "n", (long long)(count < 0 ? count : n), count >= 0);
    COLO_FAIL_IF(count > 0 && (!assign || !cost), COLO_ERR_ARG, "balance: %s is NULL",
                 assign ? "cost" : "assign");
    COLO_FAIL_IF(current && !(stick >= 0), COLO_ERR_ARG,
                 "balance: stick is %g, expected at least 0", stick);
    for (int64_t segment = 0; segment < count; segment++) {
        COLO_FAIL_IF(cost[segment] < 0, COLO_ERR_ARG,
                     "balance: segment %lld costs %lld, expected at least 0", (long long)segment,
                     (long long)cost[segment]);
        COLO_FAIL_IF(!colo_add_ok(*total, cost[segment], total), COLO_ERR_ARG,
                     "balance: the costs up to segment %lld exceed 63 bits", (long long)segment);
        COLO_FAIL_IF(current && (current[segment] < 0 || current[segment] >= n), COLO_ERR_ARG,
                     "balance: segment %lld is on replica %lld, expected 0..%lld",
                     (long long)segment, (long long)current[segment], (long long)n - 1);
    }
    return COLO_OK;
}

colo_status_t colo_segments_balance(int64_t *assign, const int64_t *cost, int64_t count, int64_t n,
                                    const int64_t *current, double stick)
{
    int64_t total;
    COLO_TRY(check(assign, cost, count, n, current, stick, &total));
    COLO_AUTOFREE item_t *item = calloc((size_t)count + 1, sizeof *item);
    COLO_AUTOFREE int64_t *of_bins = calloc((size_t)n, 3 * sizeof *of_bins);
    COLO_FAIL_IF(!item || !of_bins, COLO_ERR_NOMEM, "balance: %lld segments over %lld replicas",
                 (long long)count, (long long)n);
    heap_t heap = {.n = n, .bin = of_bins, .where = of_bins + n, .load = of_bins + 2 * n};
    for (int64_t i = 0; i < n; i++)
        heap.bin[i] = heap.where[i] = i;
    for (int64_t segment = 0; segment < count; segment++)
        item[segment] = (item_t){cost[segment], segment};
    qsort(item, (size_t)count, sizeof *item, by_cost);
    const double most = (1.0 + stick) * ((double)total / (double)n);
    for (int64_t i = 0; i < count; i++) {
        const int64_t segment = item[i].index;
        int64_t to = heap.bin[0];
        /* not <=: if all costs are 0 and stick is infinite, most is NaN, and all segments stay */
        if (current && !((double)(heap.load[current[segment]] + cost[segment]) > most))
            to = current[segment];
        assign[segment] = to;
        heap.load[to] += cost[segment];
        sink(&heap, to);
    }
    return COLO_OK;
}
