/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture.c - the plan as an SVG page: one panel forward, one backward.
 *
 * A world of up to 64 ranks is drawn whole. Of a larger one a part is drawn, the one that moves
 * most among those looked at, and the page says of how many and how many were looked at. What has
 * more than 64 ranks, or more than 400 arrows one way, is folded to one row per role. If there are
 * more than 64 roles, too, the first 64 rows are drawn and the page says how many messages are not.
 */
#include "bars.h"

#include <stdlib.h>
#include <string.h>

#include "picture.h"

typedef struct drawing {
    const plan_ask_t *ask;
    pic_t pic;
    int64_t ranks; /* behind the rows */
    svg_page_t page;
} drawing_t;

/* ---- which ranks ---- */

typedef struct kinds {
    int64_t seeds, alike; /* parts looked at, and how many are like the one shown */
    double parts;         /* how many there are */
    bool exact;
    bool all_alike;
} kinds_t;

static int64_t moved(const plan_part_t *p)
{
    return p->sums.pass[0].recv_total + p->sums.pass[1].recv_total;
}

/* Takes @part or drops it: the one that moves most is shown, the first of equals. */
static void consider(plan_part_t *shown, plan_part_t *part, kinds_t *kinds, double weight)
{
    kinds->seeds++;
    kinds->parts += weight;
    if (shown->n && plan_part_alike(shown, part)) {
        kinds->alike++;
        plan_part_free(part);
    } else if (!shown->n || moved(part) > moved(shown)) {
        kinds->all_alike = !shown->n;
        kinds->alike = 1;
        plan_part_free(shown);
        *shown = *part;
    } else {
        kinds->all_alike = false;
        plan_part_free(part);
    }
}

/* Every part of a world that is walked whole, or those of ranks drawn by lot. */
static int walk(const plan_ask_t *ask, plan_part_t *shown, kinds_t *kinds)
{
    const int64_t world = ask->world - ask->first;
    kinds->exact = world <= PLAN_EXACT_MAX;
    const bool all = kinds->exact;
    bool *seen = calloc(all ? (size_t)ask->world : 1, sizeof *seen);
    int rc = seen ? TOOL_OK : tool_problem("no memory for %lld ranks", (long long)ask->world);
    for (int64_t i = 0; rc == TOOL_OK && i < (all ? world : PLAN_SAMPLE); i++) {
        const int64_t rank = all ? ask->first + i : plan_sample_rank(ask, i);
        plan_part_t part;
        if (all && seen[rank])
            continue;
        rc = plan_part_find(ask, rank, &part);
        if (rc != TOOL_OK)
            break;
        for (int64_t k = 0; all && k < part.n; k++)
            seen[part.rank[k]] = true;
        kinds->exact &= !part.cut; /* its other end may look like a part of its own */
        consider(shown, &part, kinds, all ? 1 : (double)world / PLAN_SAMPLE / (double)part.n);
    }
    if (rc == TOOL_OK && !all && kinds->all_alike)
        kinds->parts = (double)(world / shown->n);
    free(seen);
    return rc;
}

/* ---- words ---- */

static void print_ask(drawing_t *drawing)
{
    const colo_plan_config_t *c = &drawing->ask->config;
    const plan_batch_t *batch = drawing->ask->batch;
    char bytes[24], n[32], more[200], output[48];
    const bool full = c->output == COLO_OUTPUT_FULL_SEQ;
    snprintf(output, sizeof output, " Output %s%s.", full ? "full" : "sharded",
             !full     ? ""
             : c->grad ? ", gradients disjoint"
                       : ", gradients partial");
    svg_count(drawing->ask->world - drawing->ask->first, n);
    if (*plan_size_warning(more, drawing->ask))
        svg_add_line(&drawing->page, "%s.", more);
    if (batch)
        svg_add_line(&drawing->page, "%s; %lld features, %s.%s %s ranks.",
                     plan_batch_size(more, drawing->ask), (long long)c->shape.features,
                     colo_dtype_name(c->dtype), batch->packed ? "" : output, n);
    else
        svg_add_line(&drawing->page, "%s: %s.%s %s ranks.",
                     plan_shape(more, drawing->ask, "\xc3\x97"),
                     plan_batch_bytes(bytes, drawing->ask), output, n);
    if (*plan_assumed(more, drawing->ask))
        svg_add_line(&drawing->page, "%s.", more);
    if (*plan_positions(more, drawing->ask))
        svg_add_line(&drawing->page, "%s.", more);
}

static void print_part(drawing_t *drawing, const plan_part_t *part, const kinds_t *kinds)
{
    char n[32], m[32];
    const plan_ask_t *ask = drawing->ask;
    const char *cut = part->cut ? "at least " : "";
    if (ask->rank >= 0)
        svg_add_line(&drawing->page,
                     "Shown: the %s%s ranks that rank %lld exchanges with, directly or not.", cut,
                     svg_count(part->n, n), (long long)ask->rank);
    else if (kinds->parts > 1.5 || !kinds->exact)
        svg_add_line(
            &drawing->page,
            "Shown: one of %s%s parts that exchange nothing with each other; it has %s%s ranks.",
            kinds->exact || kinds->all_alike ? "" : "about ",
            svg_count((int64_t)(kinds->parts + 0.5), n), cut, svg_count(part->n, m));
    if (ask->rank < 0 && kinds->seeds > 1) {
        if (kinds->all_alike)
            svg_add_line(&drawing->page, "%s %s looked at; they are alike.",
                         svg_count(kinds->seeds, n),
                         kinds->exact ? "were" : "of them, drawn by lot, were");
        else
            svg_add_line(&drawing->page, "%s parts looked at, %s like this one; it moves the most.",
                         svg_count(kinds->seeds, n), svg_count(kinds->alike, m));
    }
}

static void print_rows(drawing_t *drawing)
{
    const bool nodes = drawing->ask->config.ranks_per_node || drawing->ask->config.nodes;
    char text[48];
    char n[32], m[32];
    bool folded = drawing->ranks > drawing->pic.nrows && drawing->pic.outside == 0;
    if (drawing->pic.outside)
        svg_add_line(
            &drawing->page, "%d of %s ranks are drawn; %s messages from or to others are not.",
            drawing->pic.nrows, svg_count(drawing->ranks, m), svg_count(drawing->pic.outside, n));
    svg_add_line(
        &drawing->page,
        "A row is %s: its place in the source grid and in the destination grid. Arrows are "
        "messages%s, dashed lines stay on the rank.",
        folded ? "a rank that stands for all that do the same" : "a rank",
        nodes ? ", thick ones cross nodes" : "");
    if (nodes)
        svg_add_line(&drawing->page, "%s.%s", plan_nodes_text(text, drawing->ask),
                     drawing->pic.passes_on
                         ? " What several ranks of a node lack enters it once; they pass it on."
                         : "");
}

/* ---- panels ---- */

typedef struct panel {
    const drawing_t *drawing;
    colo_pass_t pass;
} panel_t;

enum { CAPTION = 62 };

static int draw_panel(FILE *f, const void *what)
{
    const panel_t *p = what;
    const pic_flows_t *s = &p->drawing->pic.pass[p->pass];
    char a[32], b[32], c[32], text[200];
    svg_put(f, "<text class='head2' x='0' y='14'>%s</text>\n",
            p->pass == COLO_PASS_FORWARD ? "Forward: activations" : "Backward: gradients");
    if (s->messages == 0)
        snprintf(text, sizeof text, "No messages: every rank already has its part.");
    else
        snprintf(text, sizeof text, "%s %s, %s in all; at most %s into a rank.",
                 svg_count(s->messages, a), s->messages == 1 ? "message" : "messages",
                 svg_bytes((double)s->total, b), svg_bytes((double)s->most, c));
    if (s->collective > 0)
        snprintf(text + strlen(text), sizeof text - strlen(text), " An %s would move %s.",
                 p->pass == COLO_PASS_FORWARD ? "all-gather" : "all-reduce",
                 svg_bytes((double)s->collective, a));
    svg_lines(f, text, "text", SVG_COLUMNS, 15);
    svg_put(f, "<g transform='translate(0 %d)'>\n", CAPTION);
    const int height = pic_draw(f, &p->drawing->pic, p->pass);
    fputs("</g>\n", f);
    return CAPTION + height;
}

/* A place that stays empty, so that both passes stand side by side. */
static int draw_nothing(FILE *f, const void *what)
{
    (void)f;
    (void)what;
    return 0;
}

static int prepare(drawing_t *drawing)
{
    const plan_ask_t *ask = drawing->ask;
    plan_part_t part = {.n = 0};
    kinds_t kinds = {.seeds = 0};
    int64_t n = ask->world - ask->first;
    bool all = n <= PIC_ROWS_MAX && ask->rank < 0;
    if (all) {
        part.rank = calloc((size_t)n + 1, sizeof *part.rank);
        for (; part.rank && part.n < n; part.n++)
            part.rank[part.n] = ask->first + part.n;
        if (!part.rank)
            return tool_problem("no memory for %lld ranks", (long long)n);
    } else {
        int rc = ask->rank >= 0 ? plan_part_find(ask, ask->rank, &part) : walk(ask, &part, &kinds);
        if (rc != TOOL_OK) {
            plan_part_free(&part);
            return rc;
        }
    }
    drawing->ranks = part.n;
    print_ask(drawing);
    if (!all)
        print_part(drawing, &part, &kinds);
    const pic_batch_t batch = plan_tables(ask);
    colo_status_t st = pic_collect(&drawing->pic, &ask->config, &batch, part.rank, (int32_t)part.n);
    plan_part_free(&part);
    if (st < 0)
        return plan_complain(ask, st, colo_last_error());
    bool many = drawing->pic.nrows > PIC_ROWS_MAX || drawing->pic.pass[0].n > PIC_FLOWS_MAX ||
                drawing->pic.pass[1].n > PIC_FLOWS_MAX;
    if (many && drawing->pic.outside == 0 && !pic_fold(&drawing->pic))
        return tool_problem("no memory for %lld ranks", (long long)drawing->ranks);
    pic_cut(&drawing->pic, PIC_ROWS_MAX);
    print_rows(drawing);
    return TOOL_OK;
}

int plan_page(const plan_ask_t *ask, const svg_page_t *page)
{
    return tool_svg(TOOL_WRONG_USE, ask->svg, svg_page(page, ask->svg));
}

int plan_draw(const plan_ask_t *ask)
{
    static drawing_t drawing;
    char src[600], dst[600], title[1300];
    drawing = (drawing_t){.ask = ask};
    int rc = prepare(&drawing);
    if (rc == TOOL_OK) {
        const panel_t panel[2] = {{&drawing, COLO_PASS_FORWARD}, {&drawing, COLO_PASS_BACKWARD}};
        const plan_batch_t *batch = ask->batch;
        colo_grid_print(&ask->src.grid, src, sizeof src);
        colo_grid_print(&ask->dst.grid, dst, sizeof dst);
        snprintf(title, sizeof title, "%s \xe2\x86\x92 %s", src, dst);
        drawing.page.title = title;
        drawing.page.label =
            batch && batch->packed ? "how packed sequences are cut in the source and in "
                                     "the destination, and the messages forward and "
                                     "backward"
            : batch                ? "the rows of a ragged batch, its packed sequences, and the "
                                     "messages forward and backward"
                    : "which rank sends what to which between two layouts, forward and "
                      "backward";
        if (batch)
            (batch->packed ? plan_packing_panels : plan_segments_panels)(&drawing.page, ask);
        if (drawing.page.npanels % 2)
            svg_add_panel(&drawing.page, draw_nothing, NULL);
        for (int w = 0; w < 2; w++)
            svg_add_panel(&drawing.page, draw_panel, &panel[w]);
        rc = plan_page(ask, &drawing.page);
    }
    pic_free(&drawing.pic);
    return rc;
}
