/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare.c - several pairs of layouts side by side: counted, ordered as given, the one with
 * the least bridge time marked.
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

enum { COUNT_MAX = 131072, BAR = 40, TOTALS = 10 };

/* ---- counting ---- */

static int64_t *total(plan_sums_t *s, int i)
{
    plan_totals_t *t = &s->pass[i / 5];
    return i % 5 == 0   ? &t->recv_total
           : i % 5 == 1 ? &t->messages_total
           : i % 5 == 2 ? &t->slow_total
           : i % 5 == 3 ? &t->slow_minimum
                        : &t->slow_one_level;
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
    for (int64_t i = 0; i < PLAN_SAMPLE && e->ranks < COUNT_MAX; i++) {
        plan_part_t part;
        rc = plan_part_find(ask, plan_sample_rank(ask, i), &part);
        if (rc != TOOL_OK)
            break;
        plan_sums_merge(&e->sums, &part.sums);
        e->ranks += part.n;
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
    e->ranks = e->ask.world - e->ask.first;
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

double plan_entry_seconds(const plan_entry_t *e)
{
    return e->sums.pass[0].seconds + e->sums.pass[1].seconds;
}

static double in_all(const plan_entry_t *e)
{
    return (double)e->sums.pass[0].recv_total + (double)e->sums.pass[1].recv_total;
}

static bool better(const plan_entry_t *a, const plan_entry_t *b)
{
    if (plan_entry_seconds(a) != plan_entry_seconds(b))
        return plan_entry_seconds(a) < plan_entry_seconds(b);
    if (in_all(a) != in_all(b))
        return in_all(a) < in_all(b);
    return a->sums.memory_max < b->sums.memory_max;
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

const char *plan_entry_name(char *out, size_t cap, const plan_entry_t *e, bool dst_only)
{
    static const char *const sp[] = {"", ", sp src", ", sp dst", ", sp both"};
    const colo_plan_config_t *c = &e->ask.config;
    char src[600] = "", dst[600];
    if (!dst_only)
        colo_grid_print(&e->ask.src.grid, src, sizeof src);
    colo_grid_print(&e->ask.dst.grid, dst, sizeof dst);
    snprintf(out, cap, "%s%s%s, %s%s", src, dst_only ? "" : " -> ", dst,
             c->output == COLO_SHARDED ? "sharded"
             : c->grad == COLO_PARTIAL ? "full, partial"
                                       : "full, disjoint",
             sp[e->sp]);
    return out;
}

void plan_model_print(const plan_ask_t *ask, char line[3][200])
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

enum { COLS = 9, CELL = 24 };

static void fill(char (*cell)[CELL], const plan_entry_t *e)
{
    const plan_sums_t *s = &e->sums;
    char b[24];
    int k = 0;
    for (int w = 0; w < 2; w++) {
        snprintf(cell[k++], CELL, "%s", tool_bytes(b, s->pass[w].recv_max));
        snprintf(cell[k++], CELL, "%s", tool_bytes(b, s->pass[w].recv_total));
    }
    int64_t most = s->pass[0].messages_max > s->pass[1].messages_max ? s->pass[0].messages_max
                                                                     : s->pass[1].messages_max;
    snprintf(cell[k++], CELL, "%lld", (long long)most);
    snprintf(cell[k++], CELL, "%lld",
             (long long)(s->pass[0].messages_total + s->pass[1].messages_total));
    snprintf(cell[k++], CELL, "%s", tool_bytes(b, s->pass[0].slow_total + s->pass[1].slow_total));
    snprintf(cell[k++], CELL, "%s", tool_bytes(b, s->memory_max));
    snprintf(cell[k++], CELL, "%s", plan_time(b, plan_entry_seconds(e)));
}

static void print_table(const plan_entry_t *entries, int n, int best)
{
    static const char *const group[COLS] = {"forward", "",        "backward", "",    "messages",
                                            "",        "between", "memory",   "time"};
    static const char *const name[COLS] = {"max per rank", "in all",   "max per rank",
                                           "in all",       "per rank", "in all",
                                           "nodes",        "per rank", ""};
    char cell[PLAN_ENTRIES_MAX][COLS][CELL];
    int width[COLS];
    for (int i = 0; i < n; i++)
        fill(cell[i], &entries[i]);
    for (int c = 0; c < COLS; c++) {
        width[c] = (int)strlen(name[c]) > (int)strlen(group[c]) ? (int)strlen(name[c])
                                                                : (int)strlen(group[c]);
        for (int i = 0; i < n; i++)
            width[c] = (int)strlen(cell[i][c]) > width[c] ? (int)strlen(cell[i][c]) : width[c];
    }
    for (int row = -2; row < n; row++) {
        if (row < 0)
            printf("    ");
        else
            printf("%c%3d", row == best ? '*' : ' ', row + 1);
        for (int c = 0; c < COLS && !(row == -1 && !*name[c] && c + 1 == COLS); c++)
            printf("%s%*s", c % 2 && c < 6 ? "  " : "    ", width[c],
                   row == -2   ? group[c]
                   : row == -1 ? name[c]
                               : cell[row][c]);
        printf("\n");
    }
}

/* ---- bars ---- */

static double bar_value(const plan_entry_t *e, int what)
{
    const plan_sums_t *s = &e->sums;
    switch (what) {
    case 0:
        return plan_entry_seconds(e);
    case 1:
        return (double)s->pass[0].recv_max + (double)s->pass[1].recv_max;
    case 2:
        return (double)s->pass[0].slow_total + (double)s->pass[1].slow_total;
    case 3:
        return (double)s->pass[0].slow_one_level + (double)s->pass[1].slow_one_level;
    case 4:
        return s->pass[0].seconds_one_level + s->pass[1].seconds_one_level;
    default:
        return (double)s->memory_max;
    }
}

static void print_bars(const plan_entry_t *entries, int n, int best, int what, const char *title)
{
    double most = 0;
    for (int i = 0; i < n; i++)
        most = fmax(most, bar_value(&entries[i], what));
    if (most == 0)
        return;
    printf("\n%s\n", title);
    for (int i = 0; i < n; i++) {
        double v = bar_value(&entries[i], what);
        int len = (int)ceil(BAR * v / most - 1e-9);
        char text[24];
        printf(" %3d  ", i + 1);
        for (int k = 0; k < len; k++)
            putchar('#');
        printf("%s%s%s\n", len ? " " : "",
               what % 4 ? tool_bytes(text, (int64_t)v) : plan_time(text, v),
               what == 0 && i == best ? "  least bridge time" : "");
    }
}

static int print_text(const plan_entry_t *entries, int n, int best)
{
    const colo_plan_config_t *c = &entries[0].ask.config;
    char line[3][200], name[1300];
    if (*plan_compare_warning(line[0], entries, n))
        printf("%s\n", line[0]);
    printf("%lld samples x %lld rows x %lld features, %s; ", (long long)c->shape.samples,
           (long long)c->shape.rows, (long long)c->shape.features, colo_dtype_name(c->dtype));
    printf("%s\n", plan_nodes_text(name, &entries[0].ask));
    if (*plan_assumed(line[0], &entries[0].ask))
        printf("%s\n", line[0]);
    if (*plan_positions(line[0], &entries[0].ask))
        printf("%s\n", line[0]);
    for (int i = 0; i < n; i++) {
        const plan_entry_t *e = &entries[i];
        printf("%c%3d  %s: %lld ranks", i == best ? '*' : ' ', i + 1,
               plan_entry_name(name, sizeof name, e, false),
               (long long)(e->ask.world - e->ask.first));
        if (e->parts)
            printf(", estimated from %lld in %lld parts%s", (long long)e->ranks,
                   (long long)e->parts, e->alike ? ", all alike" : "");
        printf("\n");
    }
    printf("\n");
    print_table(entries, n, best);
    print_bars(entries, n, best, 0, "Estimated time, forward + backward");
    print_bars(entries, n, best, 1, "Bytes into the busiest rank, forward + backward");
    print_bars(entries, n, best, 2, "Bytes between nodes, forward + backward");
    bool saves = false;
    for (int i = 0; i < n; i++)
        saves |= bar_value(&entries[i], 3) > bar_value(&entries[i], 2);
    if (saves) {
        print_bars(entries, n, best, 3, "Bytes between nodes on one level");
        print_bars(entries, n, best, 4, "Estimated time on one level");
    }
    print_bars(entries, n, best, 5, "Memory per rank: input, output, staging");
    plan_model_print(&entries[0].ask, line);
    printf("\n%s", best < 0
                       ? ""
                       : "* least bridge time; on a tie the fewest bytes, then the least memory\n");
    for (int i = 0; i < 3; i++)
        printf("%s\n", line[i]);
    return TOOL_OK;
}

int plan_compare(plan_entry_t *entries, int n)
{
    char warning[200];
    int best = 0;
    for (int i = 0; i < n; i++) {
        int rc = count(&entries[i]);
        if (rc != TOOL_OK)
            return rc;
        if (better(&entries[i], &entries[best]))
            best = i;
    }
    if (*plan_compare_warning(warning, entries, n))
        best = -1;
    if (entries[0].ask.svg) {
        int rc = plan_compare_draw(entries, n, best);
        if (rc != TOOL_OK)
            return rc;
    }
    return entries[0].ask.json ? plan_compare_json(entries, n, best) : print_text(entries, n, best);
}
