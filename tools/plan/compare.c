/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare.c - several pairs of layouts side by side: counted, printed and drawn, ordered as given,
 * the one with the least bridge time marked.
 *
 * That is the least estimated time of forward and backward together; then the fewest bytes in all,
 * then the least memory, then the first. Worlds of different size are not compared that way: more
 * ranks move less each, and cost more. Worlds up to PLAN_EXACT_MAX ranks are counted rank by
 * rank. Of larger ones parts are drawn by lot (plan/parts.c): a maximum is over the ranks looked
 * at, a total is the mean per rank of each part drawn, times the world. Where all parts drawn are
 * alike that is the exact total of a world made of such parts.
 */
#include "plan-tool.h"

#include <math.h>
#include <string.h>

enum { COUNT_MAX = 131072, BAR = 40, TOTALS = 2 * (PLAN_COUNTS - PLAN_MOST) };

/* ---- counting ---- */

/* The @k-th of what all ranks have together, of both passes. */
static int64_t *total(plan_sums_t *s, int k)
{
    return &s->pass[k % 2].count[PLAN_MOST + k / 2];
}

static int count_sample(plan_entry_t *e)
{
    const plan_ask_t *ask = &e->ask;
    int64_t world = ask->world - ask->first;
    double mean[TOTALS] = {0};
    plan_part_t first = {.n = 0};
    int rc = TOOL_OK;
    e->alike = true;
    plan_sums_init(&e->sums);
    for (int64_t i = 0; i < PLAN_SAMPLE && e->sums.ranks < COUNT_MAX; i++) {
        plan_part_t part;
        rc = plan_part_find(ask, plan_sample_rank(ask, i), &part);
        if (rc != TOOL_OK)
            break;
        plan_sums_merge(&e->sums, &part.sums);
        e->parts++;
        for (int k = 0; k < TOTALS; k++)
            mean[k] +=
                ((double)*total(&part.sums, k) / (double)part.n - mean[k]) / (double)e->parts;
        if (first.n == 0) {
            first = part;
        } else {
            e->alike &= plan_part_alike(&first, &part);
            plan_part_free(&part);
        }
    }
    for (int k = 0; k < TOTALS && rc == TOOL_OK; k++) {
        int64_t *t = total(&e->sums, k);
        double estimate = mean[k] * (double)world;
        if (e->alike && !first.cut && world % first.n == 0) {
            if (__builtin_mul_overflow(*total(&first.sums, k), world / first.n, t))
                e->sums.overflow = true;
        } else if (estimate < 9e18) {
            *t = llround(estimate);
        } else {
            e->sums.overflow = true;
        }
    }
    plan_part_free(&first);
    if (rc == TOOL_OK && e->sums.overflow)
        rc = tool_refuse("the bytes of %lld ranks do not fit in 63 bits", (long long)ask->world);
    if (colo_plan_collective_check(&ask->config) < 0)
        e->sums.pass[0].collective_max = e->sums.pass[1].collective_max = -1;
    return rc;
}

static int count(plan_entry_t *e)
{
    if (e->ask.world - e->ask.first > PLAN_EXACT_MAX)
        return count_sample(e);
    return plan_sweep(&e->ask, NULL, &e->sums);
}

/* ---- which is best ---- */

const char *plan_compare_warning(char out[200], const plan_entry_t *entries, int n)
{
    int64_t least = INT64_MAX, most = 0;
    for (int i = 0; i < 2 * n; i++) {
        const plan_ask_t *ask = &entries[i / 2].ask;
        int64_t size = i % 2 ? ask->dst.grid.size : ask->src.grid.size;
        least = size < least ? size : least;
        most = size > most ? size : most;
    }
    out[0] = '\0';
    if (least != most)
        snprintf(out, 200,
                 "warning: grids of %lld to %lld ranks are compared: a shorter time on more "
                 "ranks is no better layout",
                 (long long)least, (long long)most);
    return out;
}

/* What entries are compared by. */
#define BOTH(member) ((double)s->pass[0].member + (double)s->pass[1].member)
#define QUANTITIES(X)                                                             \
    X(TIME, "Estimated time, forward + backward", BOTH(seconds))                  \
    X(FORWARD, "Forward: most bytes into a rank", (double)s->pass[0].recv_max)    \
    X(BACKWARD, "Backward: most bytes into a rank", (double)s->pass[1].recv_max)  \
    X(BUSIEST, "Bytes into the busiest rank, forward + backward", BOTH(recv_max)) \
    X(RECEIVED, "Bytes into all ranks, forward + backward", BOTH(recv_total))     \
    X(SLOW, "Bytes between nodes, forward + backward", BOTH(slow_total))          \
    X(SLOW_ONE_LEVEL, "Bytes between nodes on one level", BOTH(slow_one_level))   \
    X(TIME_ONE_LEVEL, "Estimated time on one level", BOTH(seconds_one_level))     \
    X(MEMORY, "Memory per rank: input, output, staging", (double)s->memory_max)   \
    X(MESSAGES, "Messages of all ranks, forward + backward", BOTH(messages_total))
#define NAME(name, title, value) name,
#define TITLE(name, title, value) title,
#define VALUE(name, title, value) value,
enum quantity { QUANTITIES(NAME) };
static const char *const titles[] = {QUANTITIES(TITLE)};

static double value_of(const plan_entry_t *e, enum quantity what)
{
    const plan_sums_t *s = &e->sums;
    const double value[] = {QUANTITIES(VALUE)};
    return value[what];
}

static double most_of(const plan_entry_t *entries, int n, enum quantity what)
{
    double most = 0;
    for (int i = 0; i < n; i++)
        most = fmax(most, value_of(&entries[i], what));
    return most;
}

static bool better(const plan_entry_t *a, const plan_entry_t *b)
{
    static const enum quantity order[] = {TIME, RECEIVED, MEMORY};
    for (int i = 0; i < 3; i++) {
        const double x = value_of(a, order[i]), y = value_of(b, order[i]);
        if (x != y)
            return x < y;
    }
    return false;
}

/* ---- words ---- */

const char *plan_time(char out[24], double s)
{
    if (s >= 1)
        snprintf(out, 24, "%.2f s", s);
    else if (s >= 1e-3)
        snprintf(out, 24, "%.2f ms", 1e3 * s);
    else if (s > 0)
        snprintf(out, 24, "%.1f us", 1e6 * s);
    else
        snprintf(out, 24, "0 s");
    return out;
}

static const char *name_of(char *out, size_t cap, const plan_entry_t *e, bool dst_only)
{
    static const char *const sp[] = {"", ", sp src", ", sp dst", ", sp both"};
    const colo_plan_config_t *c = &e->ask.config;
    char src[600] = "", dst[600];
    if (!dst_only)
        colo_grid_print(&e->ask.src.grid, src, sizeof src);
    colo_grid_print(&e->ask.dst.grid, dst, sizeof dst);
    snprintf(out, cap, "%s%s%s, %s%s", src, dst_only ? "" : " -> ", dst,
             c->output == COLO_OUTPUT_SHARDED ? "sharded"
             : c->grad == COLO_GRAD_PARTIAL   ? "full, partial"
                                              : "full, disjoint",
             sp[e->sp]);
    return out;
}

static void print_model(const plan_ask_t *ask, char line[3][200])
{
    const plan_model_t *m = &ask->model;
    snprintf(
        line[0], 200,
        "A message takes alpha + bytes / beta: %g us and %g GB/s inside a node, %g us and %g GB/s "
        "between nodes.",
        1e6 * m->alpha[0], 1e-9 * m->beta[0], 1e6 * m->alpha[1], 1e-9 * m->beta[1]);
    snprintf(
        line[1], 200, "%s",
        ask->own_model
            ? "Both come from the command line (--alpha, --beta)."
            : "These are the defaults: NCCL send/recv between two H200 GPUs over NVLink, measured; "
              "one 400 Gb/s InfiniBand port per rank, not measured.");
    snprintf(
        line[2], 200,
        "Each rank sends its messages one after another and receives meanwhile. The slowest rank "
        "sets the time. Copies inside a rank cost nothing.");
}

/* ---- the table ---- */

static void print_table(const plan_entry_t *entries, int n, int best)
{
    char text[(PLAN_ENTRIES_MAX + 2) * 200], b[4][24];
    int len = snprintf(text, sizeof text, "%s",
                       "\tforward\t\tbackward\t\tmessages\t\tbetween\tmemory\ttime\n"
                       "\tmax per rank\tin all\tmax per rank\tin all\tper rank\tin all\tnodes"
                       "\tper rank\t\n");
    for (int i = 0; i < n; i++) {
        const plan_sums_t *s = &entries[i].sums;
        const plan_totals_t *w = s->pass;
        const int64_t *many = &w[w[0].messages_max < w[1].messages_max].messages_max;
        len += snprintf(text + len, sizeof text - (size_t)len, "%c%3d\t%s\t%s\t%s\t%s",
                        i == best ? '*' : ' ', i + 1, tool_bytes(b[0], w[0].recv_max),
                        tool_bytes(b[1], w[0].recv_total), tool_bytes(b[2], w[1].recv_max),
                        tool_bytes(b[3], w[1].recv_total));
        len +=
            snprintf(text + len, sizeof text - (size_t)len, "\t%lld\t%lld\t%s\t%s\t%s\n",
                     (long long)*many, (long long)(w[0].messages_total + w[1].messages_total),
                     tool_bytes(b[0], w[0].slow_total + w[1].slow_total),
                     tool_bytes(b[1], s->memory_max), plan_time(b[2], value_of(&entries[i], TIME)));
    }
    plan_table(text, "rRrRrRrRRR", NULL);
}

/* ---- bars ---- */

static void print_bars(const plan_entry_t *entries, int n, int best, enum quantity what)
{
    const double most = most_of(entries, n, what);
    const bool time = what == TIME || what == TIME_ONE_LEVEL;
    if (most == 0)
        return;
    const int room = tool_columns - (int)strlen("   1   949.9 us  least bridge time");
    const int bar = tool_columns == 0 || room > BAR ? BAR : room < BAR / 5 ? BAR / 5 : room;
    tool_say("\n%s\n", titles[what]);
    for (int i = 0; i < n; i++) {
        const double v = value_of(&entries[i], what);
        const int len = (int)ceil(bar * v / most - 1e-9);
        char text[24];
        printf(" %3d  ", i + 1);
        for (int k = 0; k < len; k++)
            putchar('#');
        printf("%s%s%s\n", len ? " " : "", time ? plan_time(text, v) : tool_bytes(text, (int64_t)v),
               what == TIME && i == best ? "  least bridge time" : "");
    }
}

static int print_text(const plan_entry_t *entries, int n, int best)
{
    char line[3][200], name[1300];
    if (*plan_compare_warning(line[0], entries, n))
        tool_say("%s\n", line[0]);
    tool_say("%s; %s\n", plan_shape(line[0], &entries[0].ask, "x"),
             plan_nodes_text(name, &entries[0].ask));
    if (*plan_assumed(line[0], &entries[0].ask))
        tool_say("%s\n", line[0]);
    if (*plan_positions(line[0], &entries[0].ask))
        tool_say("%s\n", line[0]);
    for (int i = 0; i < n; i++) {
        const plan_entry_t *e = &entries[i];
        tool_say("%c%3d  %s: %lld ranks", i == best ? '*' : ' ', i + 1,
                 name_of(name, sizeof name, e, false), (long long)(e->ask.world - e->ask.first));
        if (e->parts)
            tool_say(", estimated from %lld in %lld parts%s", (long long)e->sums.ranks,
                     (long long)e->parts, e->alike ? ", all alike" : "");
        tool_say("\n");
    }
    tool_say("\n");
    print_table(entries, n, best);
    print_bars(entries, n, best, TIME);
    print_bars(entries, n, best, BUSIEST);
    print_bars(entries, n, best, SLOW);
    bool saves = false;
    for (int i = 0; i < n; i++)
        saves |= value_of(&entries[i], SLOW_ONE_LEVEL) > value_of(&entries[i], SLOW);
    if (saves) {
        print_bars(entries, n, best, SLOW_ONE_LEVEL);
        print_bars(entries, n, best, TIME_ONE_LEVEL);
    }
    print_bars(entries, n, best, MEMORY);
    print_model(&entries[0].ask, line);
    tool_say("\n%s",
             best < 0 ? ""
                      : "* least bridge time; on a tie the fewest bytes, then the least memory\n");
    for (int i = 0; i < 3; i++)
        tool_say("%s\n", line[i]);
    return TOOL_OK;
}

/* ---- the picture: one panel a quantity, a bar an entry ---- */

enum { ROW = 42, TOP = 26, BAR_MAX = 236, TIME_BAR_MAX = 150 /* words follow */ };

static const enum quantity drawn[] = {TIME, FORWARD, BACKWARD, SLOW, MEMORY, MESSAGES};
enum { CHARTS = sizeof drawn / sizeof drawn[0] };

typedef struct chart {
    const plan_entry_t *entries;
    int n, best;
    bool dst_only;
    enum quantity what;
} chart_t;

static void put_name(FILE *f, const chart_t *c, int i)
{
    char name[1300], text[1400];
    name_of(name, sizeof name, &c->entries[i], c->dst_only);
    char *arrow = strstr(name, " -> ");
    if (arrow)
        snprintf(text, sizeof text, "%d  %.*s \xe2\x86\x92 %s", i + 1, (int)(arrow - name), name,
                 arrow + 4);
    else
        snprintf(text, sizeof text, "%d  %s", i + 1, name);
    svg_fit(f, "strong", 0, 14, 52, 340, text);
}

static int draw_chart(FILE *f, const void *what)
{
    const chart_t *c = what;
    const double most = most_of(c->entries, c->n, c->what);
    svg_put(f, "<text class='head2' x='0' y='14'>%s</text>\n", titles[c->what]);
    if (most == 0)
        svg_put(f, "<text x='0' y='34'>None in any of them.</text>\n");
    for (int i = 0; i < c->n && most > 0; i++) {
        int widest = c->what == TIME ? TIME_BAR_MAX : BAR_MAX;
        double v = value_of(&c->entries[i], c->what), width = widest * v / most;
        bool best = c->what == TIME && i == c->best;
        char text[32];
        if (c->what == TIME)
            plan_time(text, v);
        else if (c->what == MESSAGES)
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

static int draw_page(const plan_entry_t *entries, int n, int best)
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
    print_model(ask, text);
    for (int i = 0; i < 3; i++)
        svg_add_line(&page, "%s", text[i]);
    for (int i = 0; i < CHARTS; i++) {
        if (drawn[i] == SLOW && ask->config.ranks_per_node == 0 && !ask->config.nodes)
            continue;
        chart[i] = (chart_t){entries, n, best, same, drawn[i]};
        svg_add_panel(&page, draw_chart, &chart[i]);
    }
    return plan_page(ask, &page);
}

int plan_compare(plan_entry_t *entries, int n)
{
    char warning[200];
    int best = 0;
    for (int i = 0; i < n; i++) {
        TOOL_TRY(count(&entries[i]));
        if (better(&entries[i], &entries[best]))
            best = i;
    }
    if (*plan_compare_warning(warning, entries, n))
        best = -1;
    if (entries[0].ask.svg)
        TOOL_TRY(draw_page(entries, n, best));
    return entries[0].ask.json ? plan_compare_json(entries, n, best) : print_text(entries, n, best);
}
