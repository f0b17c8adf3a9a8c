/* SPDX-License-Identifier: Apache-2.0 */
/* compare-svg.c - a comparison as bar charts, one panel a quantity, a bar an entry. */
#include "plan-tool.h"

#include <string.h>

#include "svg.h"

enum { ROW = 42, TOP = 26, BAR_MAX = 236, TIME_BAR_MAX = 150 /* words follow */ };

static const plan_quantity_t drawn[] = {PLAN_TIME, PLAN_FORWARD, PLAN_BACKWARD,
                                        PLAN_SLOW, PLAN_MEMORY,  PLAN_MESSAGES};
enum { CHARTS = sizeof drawn / sizeof drawn[0] };

typedef struct chart {
    const plan_entry_t *entries;
    int n, best;
    bool dst_only;
    plan_quantity_t what;
} chart_t;

static void put_name(FILE *f, const chart_t *c, int i)
{
    char name[1300], text[1400];
    plan_entry_name(name, sizeof name, &c->entries[i], c->dst_only);
    char *arrow = strstr(name, " -> ");
    if (arrow)
        snprintf(text, sizeof text, "%d  %.*s \xe2\x86\x92 %s", i + 1, (int)(arrow - name), name,
                 arrow + 4);
    else
        snprintf(text, sizeof text, "%d  %s", i + 1, name);
    svg_fit(f, "strong", 52, 340, text);
}

static int draw(FILE *f, const void *what)
{
    const chart_t *c = what;
    const double most = plan_entry_most(c->entries, c->n, c->what);
    svg_put(f, "<text class='head2' x='0' y='14'>%s</text>\n", plan_quantity_title[c->what]);
    if (most == 0)
        svg_put(f, "<text x='0' y='34'>None in any of them.</text>\n");
    for (int i = 0; i < c->n && most > 0; i++) {
        int widest = c->what == PLAN_TIME ? TIME_BAR_MAX : BAR_MAX;
        double v = plan_entry_value(&c->entries[i], c->what), width = widest * v / most;
        bool best = c->what == PLAN_TIME && i == c->best;
        char text[32];
        if (c->what == PLAN_TIME)
            plan_time(text, v);
        else if (c->what == PLAN_MESSAGES)
            svg_count((int64_t)v, text);
        else
            svg_bytes(v, text);
        svg_put(f, "<g transform='translate(0 %d)'>", TOP + i * ROW);
        put_name(f, c, i);
        svg_bar(f, 0, 20, widest, width, best);
        svg_put(f, "<text class='%s' x='%d' y='31'>%s%s</text></g>\n", best ? "good" : "strong",
                widest + 8, text, best ? " least bridge time" : "");
    }
    return TOP + (most > 0 ? c->n * ROW : ROW / 2);
}

int plan_compare_draw(const plan_entry_t *entries, int n, int best)
{
    const plan_ask_t *ask = &entries[0].ask;
    chart_t chart[CHARTS];
    char src[160], text[3][200], nodes[48], words[200], from[180] = "";
    svg_page_t page = {.title = "Layouts compared",
                       .label = "bar charts of several pairs of layouts"};
    bool same = true, sampled = false;
    for (int i = 0; i < n; i++) {
        same &= colo_grid_equal(&entries[i].ask.src.grid, &ask->src.grid);
        sampled |= entries[i].parts > 0;
    }
    colo_grid_print(&ask->src.grid, src, sizeof src);
    if (*plan_compare_warning(words, entries, n))
        svg_add_line(&page, "%s.", words);
    if (same)
        snprintf(from, sizeof from, "From %s. ", src);
    svg_add_line(&page, "%s%s; %s.", from, plan_shape(words, ask, "\xc3\x97"),
                 plan_nodes_text(nodes, ask));
    if (*plan_assumed(words, ask))
        svg_add_line(&page, "%s.", words);
    if (*plan_positions(words, ask))
        svg_add_line(&page, "%s.", words);
    if (sampled)
        svg_add_line(&page, "Worlds of more than %d ranks are estimated from parts drawn by lot.",
                     PLAN_EXACT_MAX);
    plan_model_print(ask, text);
    for (int i = 0; i < 3; i++)
        svg_add_line(&page, "%s", text[i]);
    for (int i = 0; i < CHARTS; i++) {
        if (drawn[i] == PLAN_SLOW && ask->config.ranks_per_node == 0 && !ask->config.nodes)
            continue;
        chart[i] = (chart_t){entries, n, best, same, drawn[i]};
        svg_add_panel(&page, draw, &chart[i]);
    }
    return plan_page(ask, &page);
}
