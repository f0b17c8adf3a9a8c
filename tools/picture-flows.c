/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture-flows.c - what a picture shows: collected from the plans, ordered, folded.
 *
 * Everything comes from colo_plan_create() of every rank shown: the receives are drawn, and the
 * sends are not looked at, since both sides of a message derive the same list. Rows that exchange
 * stand together, which keeps arrows short.
 *
 * Folding is colour refinement: ranks start in one class, and a pass splits those whose exchanges
 * with the classes of the pass before differ, until a pass splits nothing. Ranks of one class
 * then send and receive the same bytes to and from the same classes, and one of them can stand for
 * all.
 */
#include "picture.h"

#include <stdlib.h>
#include <string.h>

int pic_by_number(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static bool push(pic_flows_t *s, pic_flow_t flow)
{
    if (s->n == s->capacity) {
        int64_t capacity = s->capacity ? 2 * s->capacity : 64;
        pic_flow_t *more = realloc(s->flow, (size_t)capacity * sizeof *more);
        if (!more)
            return false;
        s->flow = more;
        s->capacity = capacity;
    }
    s->flow[s->n++] = flow;
    return true;
}

/* ---- order ---- */

static int flow_cmp(const void *a, const void *b)
{
    const pic_flow_t *x = a, *y = b;
    if (x->to != y->to)
        return x->to < y->to ? -1 : 1;
    if (x->from != y->from)
        return x->from < y->from ? -1 : 1;
    if (x->own != y->own)
        return x->own ? -1 : 1;
    if (x->far != y->far)
        return x->far ? 1 : -1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int row_cmp(const void *a, const void *b)
{
    const pic_row_t *x = a, *y = b;
    if (x->part != y->part)
        return x->part < y->part ? -1 : 1;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static int32_t root(int32_t *up, int32_t i)
{
    while (up[i] != i)
        i = up[i] = up[up[i]];
    return i;
}

/* Flows between rows that have got the numbers @now. */
static void renumber(pic_flows_t *s, const int32_t *now)
{
    for (int64_t i = 0; i < s->n; i++) {
        s->flow[i].from = now[s->flow[i].from];
        s->flow[i].to = now[s->flow[i].to];
    }
    if (s->n > 0)
        qsort(s->flow, (size_t)s->n, sizeof *s->flow, flow_cmp);
}

/* Parts by union-find, numbered by their first rank; then rows by (part, rank), flows to match. */
static bool order(pic_t *pic)
{
    int32_t n = pic->nrows, *up = calloc((size_t)n + 1, sizeof *up);
    if (!up)
        return false;
    for (int32_t i = 0; i < n; i++)
        up[i] = pic->row[i].was = i;
    for (int w = 0; w < 2; w++)
        for (int64_t i = 0; i < pic->pass[w].n; i++) {
            int32_t a = root(up, pic->pass[w].flow[i].from), b = root(up, pic->pass[w].flow[i].to);
            if (a < b)
                up[b] = a;
            else
                up[a] = b;
        }
    pic->nparts = 0;
    for (int32_t i = 0; i < n; i++) { /* roots come first, and rows ascend by rank here */
        int32_t r = root(up, i);
        pic->row[i].part = r == i ? pic->nparts++ : pic->row[r].part;
    }
    if (n > 0)
        qsort(pic->row, (size_t)n, sizeof *pic->row, row_cmp);
    for (int32_t i = 0; i < n; i++)
        up[pic->row[i].was] = i;
    for (int w = 0; w < 2; w++)
        renumber(&pic->pass[w], up);
    free(up);
    return true;
}

/* ---- collect ---- */

void pic_lists(const colo_plan_t *plan, colo_pass_t pass, pic_list_t list[PIC_EXCHANGES][2])
{
    for (int sends = 0; sends < 2; sends++) {
        pic_list_t *first = &list[PIC_FIRST][sends], *sums = &list[PIC_SUMS][sends],
                   *relays = &list[PIC_RELAYS][sends];
        first->message = (sends ? colo_plan_sends : colo_plan_recvs)(plan, pass, &first->n);
        sums->message = colo_plan_sums(plan, pass, sends, &sums->n);
        relays->message = colo_plan_relays(plan, pass, sends, &relays->n);
    }
}

int64_t pic_node(const colo_plan_config_t *c, int64_t rank)
{
    return c->nodes            ? colo_nodes_find(c->nodes, rank)
           : c->ranks_per_node ? rank / c->ranks_per_node
                               : 0;
}

static bool add_plan(pic_t *pic, const colo_plan_t *plan, colo_pass_t pass, const int64_t *ranks,
                     int32_t n, int32_t me)
{
    pic_flows_t *s = &pic->pass[pass];
    colo_plan_bytes_t b = {COLO_PLAN_BYTES_INIT};
    const colo_plan_config_t *c = colo_plan_config(plan);
    pic_list_t list[PIC_EXCHANGES][2];

    (void)colo_plan_bytes(plan, pass, &b);
    pic_lists(plan, pass, list);
    if (b.local > 0 &&
        !push(s, (pic_flow_t){.from = me, .to = me, .bytes = b.local, .times = 1, .own = true}))
        return false;
    for (int k = 0; k < PIC_EXCHANGES; k++) {
        const pic_list_t *in = &list[k][0];
        for (int32_t i = 0; i < in->n; i++) {
            const int64_t peer = in->message[i].peer;
            const int64_t *index = bsearch(&peer, ranks, (size_t)n, sizeof *ranks, pic_by_number);
            if (!index)
                pic->outside++;
            else if (!push(s, (pic_flow_t){.from = (int32_t)(index - ranks),
                                           .to = me,
                                           .bytes = in->message[i].bytes,
                                           .times = 1,
                                           .far = pic_node(c, peer) != pic_node(c, ranks[me])}))
                return false;
        }
        s->messages += in->n;
    }
    pic->passes_on |= list[PIC_RELAYS][0].n > 0;
    s->total += b.recv;
    s->minimum += b.minimum;
    if (b.recv > s->most)
        s->most = b.recv;
    if (b.collective_recv < 0)
        s->collective = -1;
    else if (s->collective >= 0)
        s->collective += b.collective_recv;
    return true;
}

colo_status_t pic_plan(colo_plan_t **plan, const colo_plan_config_t *config,
                       const pic_batch_t *batch, int64_t rank)
{
    const colo_packing_t *packing = batch->packing;
    return packing           ? colo_plan_create_packed(plan, config, &packing[0], &packing[1], rank)
           : batch->segments ? colo_plan_create_ragged(plan, config, batch->segments, rank)
                             : colo_plan_create(plan, config, rank);
}

colo_status_t pic_collect(pic_t *pic, const colo_plan_config_t *config, const pic_batch_t *batch,
                          const int64_t *ranks, int32_t n)
{
    *pic = (pic_t){.src = config->src, .dst = config->dst, .nrows = n};
    pic->row = calloc((size_t)n + 1, sizeof *pic->row);
    colo_status_t st = pic->row ? COLO_OK : COLO_ERR_NOMEM;
    for (int32_t i = 0; i < n && st >= 0; i++) {
        colo_plan_t *plan = NULL;
        pic->row[i].rank = ranks[i];
        st = pic_plan(&plan, config, batch, ranks[i]);
        if (st < 0)
            break;
        for (colo_pass_t pass = COLO_PASS_FORWARD; pass <= COLO_PASS_BACKWARD; pass++)
            if (!(pass == COLO_PASS_BACKWARD && config->no_grad) &&
                !add_plan(pic, plan, pass, ranks, n, i))
                st = COLO_ERR_NOMEM;
        colo_plan_destroy(&plan);
    }
    if (st >= 0 && !order(pic))
        st = COLO_ERR_NOMEM;
    if (st < 0)
        pic_free(pic);
    return st;
}

void pic_free(pic_t *pic)
{
    free(pic->row);
    free(pic->pass[0].flow);
    free(pic->pass[1].flow);
    *pic = (pic_t){.nrows = 0};
}

/* ---- fold ---- */

static uint64_t mix(uint64_t h, uint64_t v)
{
    h ^= v + 0x9e3779b97f4a7c15u + (h << 6) + (h >> 2);
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

/* One pass: the sum over a rank's flows does not depend on their order. */
static void refine(const pic_t *pic, const uint64_t *colour, uint64_t *next)
{
    for (int32_t r = 0; r < pic->nrows; r++) {
        const pic_row_t *row = &pic->row[r];
        next[r] = mix(colour[r], (uint64_t)colo_layout_holds(pic->src, row->rank) * 2 +
                                     (uint64_t)colo_layout_holds(pic->dst, row->rank));
    }
    for (int w = 0; w < 2; w++)
        for (int64_t i = 0; i < pic->pass[w].n; i++) {
            const pic_flow_t *f = &pic->pass[w].flow[i];
            uint64_t what = mix((uint64_t)f->bytes, (uint64_t)w + 2 * f->own + 4 * f->far);
            next[f->to] += mix(what, colour[f->from]);
            next[f->from] += mix(what + 1, mix(colour[f->to], 7));
        }
}

static int64_t distinct(const uint64_t *colour, int32_t n, int64_t *sorted)
{
    int64_t k = 0;
    memcpy(sorted, colour, (size_t)n * sizeof *colour);
    qsort(sorted, (size_t)n, sizeof *sorted, pic_by_number);
    for (int32_t i = 0; i < n; i++)
        k += i == 0 || sorted[i] != sorted[i - 1];
    return k;
}

/* Flows between classes; those that have become equal are one. */
static void merge(pic_flows_t *s, const int32_t *class_of)
{
    int64_t n = 0;
    renumber(s, class_of);
    for (int64_t i = 0; i < s->n; i++)
        if (n && flow_cmp(&s->flow[n - 1], &s->flow[i]) == 0)
            s->flow[n - 1].times += s->flow[i].times;
        else
            s->flow[n++] = s->flow[i];
    s->n = n;
}

bool pic_fold(pic_t *pic)
{
    const size_t n = (size_t)pic->nrows;
    uint64_t *colours = calloc(3 * n + 1, sizeof *colours), *colour = colours;
    int32_t *class_of = calloc(n + 1, sizeof *class_of), k = 0;
    const bool ok = colours && class_of;

    for (int64_t classes = -1, now = 0; ok && now != classes;) {
        uint64_t *next = colour == colours ? colours + n : colours;
        classes = now;
        refine(pic, colour, next);
        colour = next;
        now = distinct(colour, pic->nrows, (int64_t *)(colours + 2 * n));
    }
    /* a class is named by its smallest rank: visit rows by rank, open a class at a new colour */
    for (int32_t i = 0; ok && i < pic->nrows; i++) {
        pic->row[i].was = i;
        pic->row[i].part = 0;
    }
    if (ok && n > 0)
        qsort(pic->row, n, sizeof *pic->row, row_cmp);
    for (int32_t i = 0; ok && i < pic->nrows; i++) {
        const pic_row_t row = pic->row[i];
        int32_t class = 0;
        while (class < k && colour[pic->row[class].was] != colour[row.was])
            class ++;
        if (class == k)
            pic->row[k++] = row;
        else
            pic->row[class].alike++;
        class_of[row.was] = class;
    }
    if (ok) {
        pic->nrows = k;
        merge(&pic->pass[0], class_of);
        merge(&pic->pass[1], class_of);
    }
    free(class_of);
    free(colours);
    return ok && order(pic);
}

void pic_cut(pic_t *pic, int32_t rows)
{
    if (pic->nrows <= rows)
        return;
    pic->nrows = rows;
    for (int w = 0; w < 2; w++) {
        pic_flows_t *s = &pic->pass[w];
        int64_t n = 0;
        for (int64_t i = 0; i < s->n; i++)
            if (s->flow[i].from < rows && s->flow[i].to < rows)
                s->flow[n++] = s->flow[i];
            else
                pic->outside += s->flow[i].times;
        s->n = n;
    }
}
