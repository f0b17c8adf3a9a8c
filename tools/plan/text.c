/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text.c - the plan for people: what was asked, one row a rank, what it means.
 *
 * A table is written to memory first and measured, then printed, so that columns are as wide as
 * their widest entry and no wider. ASCII only; colour (bold titles, dim idle ranks) only
 * on a terminal. Programs read plan/json.c's output; this one may change.
 */
#include "plan-tool.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { CELL = 40, COLUMNS_MAX = 1 + 2 * COLO_DIMS_MAX + 2 + 8 };

typedef struct table {
    const char *text, *shape, *idle;
    int width[COLUMNS_MAX];
} table_t;

/* Blanks before column @c. */
static int gap(const table_t *t, int c)
{
    return c == 0 ? 0 : isupper((unsigned char)t->shape[c]) ? 4 : 2;
}

/* The first column, and those from @begin up to @end. */
static void put_columns(const table_t *t, int begin, int end)
{
    const char *idle = t->idle;
    int c = 0, line = 0, owed = 0; /* owed: blanks before what is next */
    size_t n;
    for (const char *s = t->text; *s; s += n + 1) {
        n = strcspn(s, "\t\n");
        const int more = t->width[c] - (int)n;
        const bool left = (idle && line == 0) || strchr("lL", t->shape[c]);
        if (c == 0 && idle) {
            const size_t row = strcspn(s, "\n"), len = strlen(idle);
            fputs(line < 2                                         ? tool_bold
                  : row > len && !memcmp(s + row - len, idle, len) ? tool_dim
                                                                   : "",
                  stdout);
        }
        if (c == 0 || (c >= begin && c < end)) {
            owed += gap(t, c) + (left ? 0 : more);
            if (n > 0) {
                printf("%*s%.*s", owed, "", (int)n, s);
                owed = 0;
            }
            owed += left ? more : 0;
        }
        c++;
        if (s[n] == '\n') {
            printf("%s\n", idle ? tool_plain : "");
            c = owed = 0;
            line++;
        }
    }
}

/* The end of the columns from @begin on that fit the terminal: groups, or one of them in parts. */
static int fits(const table_t *t, int begin, int columns)
{
    int used = t->width[0], group = 0, part = 0;
    for (int c = begin; c < columns && (tool_columns == 0 || used <= tool_columns); c++) {
        used += gap(t, c) + t->width[c];
        if (tool_columns > 0 && used > tool_columns)
            break;
        const char next = t->shape[c + 1];
        group = isupper((unsigned char)next) || !next ? c + 1 : group;
        part = next == 'r' || group == c + 1 ? c + 1 : part;
    }
    return group ? group : part ? part : columns;
}

void plan_table(const char *text, const char *shape, const char *idle)
{
    table_t t = {text, shape, idle, {0}};
    const int columns = (int)strlen(shape);
    int c = 0, line = 0;
    size_t n;
    for (const char *s = text; *s; s += n + 1) {
        n = strcspn(s, "\t\n");
        const bool title = idle && line == 0 && islower((unsigned char)shape[c + 1]);
        t.width[c] = title || t.width[c] > (int)n ? t.width[c] : (int)n;
        c = s[n] == '\n' ? 0 : c + 1;
        line += c == 0;
    }
    for (int begin = 1, end; begin < columns; begin = end) {
        end = fits(&t, begin, columns);
        if (begin > 1)
            printf("\n");
        put_columns(&t, begin, end);
    }
}

/* "1-3,5", or as many as fit and the count: "0,2,4,... (64)" */
static void peers(char *out, const pic_list_t *list)
{
    const colo_plan_message_t *m = list->message;
    const int32_t count = list->n;
    char part[44];
    size_t n = 0, columns = 24;
    snprintf(out, CELL, "%s", count ? "" : "-");
    for (int32_t i = 0, j; i < count; i = j) {
        for (j = i + 1; j < count && m[j].peer == m[j - 1].peer + 1; j++)
            ;
        if (j - i < 3)
            j = i + 1;
        if (j - i == 1)
            snprintf(part, sizeof part, "%s%" PRId64, n ? "," : "", m[i].peer);
        else
            snprintf(part, sizeof part, "%s%" PRId64 "-%" PRId64, n ? "," : "", m[i].peer,
                     m[j - 1].peer);
        if (n + strlen(part) > columns) {
            snprintf(out + n, CELL - n, "%s... (%d)", n ? "," : "", count);
            return;
        }
        n += (size_t)snprintf(out + n, CELL - n, "%s", part);
    }
}

static void bytes_cell(char *out, int64_t bytes)
{
    char text[24];
    snprintf(out, CELL, "%s", bytes ? tool_bytes(text, bytes) : "-");
}

static void put_coords(FILE *f, const colo_grid_t *grid, int64_t rank)
{
    int64_t c[COLO_DIMS_MAX];
    bool in = colo_grid_has_rank(grid, rank) && colo_grid_coords(grid, rank, c) == COLO_OK;
    for (int32_t i = 0; i < grid->ndims; i++)
        if (in)
            fprintf(f, "\t%" PRId64, c[i]);
        else
            fputs("\t-", f);
}

static void put_row(FILE *f, const plan_ask_t *ask, const colo_plan_t *plan)
{
    const int64_t rank = colo_plan_rank(plan);
    int64_t rows[2];
    fprintf(f, "%" PRId64, rank);
    put_coords(f, &ask->src.grid, rank);
    put_coords(f, &ask->dst.grid, rank);
    colo_plan_rows(plan, &rows[0], &rows[1]);
    if (ask->batch)
        fprintf(f, "\t%" PRId64 "\t%" PRId64, rows[0], rows[1]);
    for (colo_pass_t pass = COLO_PASS_FORWARD; pass <= COLO_PASS_BACKWARD; pass++) {
        colo_plan_bytes_t b = {COLO_PLAN_BYTES_INIT};
        (void)colo_plan_bytes(plan, pass, &b);
        pic_list_t list[PIC_EXCHANGES][2];
        pic_lists(plan, pass, list);
        for (int sends = 0; sends < 2; sends++) {
            char bytes[CELL], cell[4 * CELL], more[CELL];
            bytes_cell(bytes, sends ? b.send : b.recv);
            peers(cell, &list[PIC_FIRST][sends]);
            for (int i = PIC_SUMS; i < PIC_EXCHANGES; i++) {
                if (list[i][sends].n == 0)
                    continue;
                peers(more, &list[i][sends]);
                const size_t pos = strcmp(cell, "-") ? strlen(cell) : 0;
                snprintf(cell + pos, sizeof cell - pos, "%s+%s", pos ? " " : "", more);
            }
            fprintf(f, "\t%s\t%.*s", bytes, CELL - 1, cell);
        }
    }
    fputc('\n', f);
}

/* Both lines of titles; writes @shape. */
static void put_head(FILE *f, const plan_ask_t *ask, char shape[COLUMNS_MAX + 1])
{
    const colo_grid_t *const grid[] = {&ask->src.grid, &ask->dst.grid};
    int n = 0;
    shape[n++] = 'r';
    for (int side = 0; side < 2; side++)
        for (int32_t i = 0; i < grid[side]->ndims; i++) {
            fprintf(f, "\t%s", i ? "" : side ? "dst" : "src");
            shape[n++] = i ? 'r' : 'R';
        }
    snprintf(shape + n, (size_t)(COLUMNS_MAX + 1 - n), ask->batch ? "RrRlrlRlrl" : "RlrlRlrl");
    fprintf(f, "%s\tforward\t\t\t\tbackward\t\t\t\nrank", ask->batch ? "\trows\t" : "");
    for (int side = 0; side < 2; side++)
        for (int32_t i = 0; i < grid[side]->ndims; i++)
            fprintf(f, "\t%s", grid[side]->name[i]);
    fprintf(f, "%s\treceives\tfrom\tsends\tto\treceives\tfrom\tsends\tto\n",
            ask->batch ? "\tsrc\tdst" : "");
}

static int print_table(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t rows)
{
    char shape[COLUMNS_MAX + 1], *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    if (f)
        put_head(f, ask, shape);
    for (int64_t r = 0; f && r < rows; r++)
        put_row(f, ask, plans[r]);
    const bool bad = !f || ferror(f);
    if ((f && fclose(f) != 0) || bad) {
        free(text);
        return tool_problem("no memory for a table of %lld ranks", (long long)rows);
    }
    printf("\n");
    plan_table(text, shape, "\t-\t-\t-\t-\t-\t-\t-\t-");
    free(text);
    return TOOL_OK;
}

const char *plan_size_warning(char out[200], const plan_ask_t *ask)
{
    long long src = ask->src.grid.size, dst = ask->dst.grid.size;
    out[0] = '\0';
    if (src != dst)
        snprintf(out, 200,
                 "warning: --src has %lld ranks, --dst %lld: the larger grid has ranks that "
                 "take part on one side only",
                 src, dst);
    return out;
}

const char *plan_shape(char out[200], const plan_ask_t *ask, const char *times)
{
    const colo_shape_t *shape = &ask->config.shape;
    snprintf(out, 200, "%lld samples %s %lld rows %s %lld features, %s", (long long)shape->samples,
             times, (long long)shape->rows, times, (long long)shape->features,
             colo_dtype_name(ask->config.dtype));
    return out;
}

const char *plan_batch_bytes(char out[24], const plan_ask_t *ask)
{
    const colo_shape_t *shape = &ask->config.shape;
    const int64_t samples = ask->batch ? 1 : shape->samples,
                  rows = ask->batch ? ask->batch->rows : shape->rows;
    int64_t bytes = (int64_t)colo_dtype_size(ask->config.dtype);
    const bool fits = !__builtin_mul_overflow(bytes, samples, &bytes) &&
                      !__builtin_mul_overflow(bytes, rows, &bytes) &&
                      !__builtin_mul_overflow(bytes, shape->features, &bytes);
    if (fits)
        return tool_bytes(out, bytes);
    snprintf(out, 24, "more than 2^63 bytes");
    return out;
}

const char *plan_positions(char out[200], const plan_ask_t *ask)
{
    out[0] = '\0';
    if (ask->dst.map == COLO_MAP_OFFSET)
        snprintf(out, 200, "row 0 of a sample is position %lld of the LLM's %lld",
                 (long long)ask->dst.offset, (long long)ask->dst.positions);
    return out;
}

const char *plan_assumed(char out[200], const plan_ask_t *ask)
{
    static const char *const name[] = {"--batch", "--seq", "--hidden"};
    const colo_shape_t *shape = &ask->config.shape;
    const int64_t size[] = {shape->samples, shape->rows, shape->features};
    size_t n = 0;
    out[0] = '\0';
    for (int i = 0; i < 3; i++)
        if (ask->assumed[i])
            n += (size_t)snprintf(out + n, 200 - n, "%s%s %" PRId64,
                                  n ? ", " : "colo-plan assumed ", name[i], size[i]);
    if (n)
        snprintf(out + n, 200 - n, ", because the command line does not say");
    return out;
}

static void print_ask(const plan_ask_t *ask)
{
    char line[200];
    const colo_plan_config_t *c = &ask->config;
    char src[COLO_KEY_MAX * 2], dst[COLO_KEY_MAX * 2], bytes[24];
    colo_grid_print(&ask->src.grid, src, sizeof src);
    colo_grid_print(&ask->dst.grid, dst, sizeof dst);
    if (*plan_size_warning(line, ask))
        tool_say("%s\n", line);
    tool_say("%s%s -> %s%s\n", tool_bold, src, dst, tool_plain);
    plan_batch_bytes(bytes, ask);
    if (ask->batch)
        tool_say("%s, %lld features, %s: %s\n", plan_batch_size(line, ask),
                 (long long)c->shape.features, colo_dtype_name(c->dtype), bytes);
    else
        tool_say("%s, %s: %s\n", plan_shape(line, ask, "x"), ask->axes, bytes);
    if (*plan_assumed(line, ask))
        tool_say("%s\n", line);
    if (*plan_positions(line, ask))
        tool_say("%s\n", line);
    if (ask->batch && ask->batch->packed)
        tool_say("%s\n",
                 plan_sharded(ask) || ask->batch->heads[1]
                     ? "gradients: each rank returns those of the rows and features that it has"
                     : "gradients partial: each context rank returns all rows, the bridge "
                       "sums them");
    else if (c->output == COLO_OUTPUT_SHARDED)
        tool_say(
            "output sharded: each rank gets the rows that it owns and returns their gradient\n");
    else
        tool_say("output full: each rank gets all rows of its samples\n%s\n",
                 c->grad == COLO_GRAD_PARTIAL
                     ? "gradients partial: each rank returns all rows, the bridge sums them over cp"
                     : "gradients disjoint: each rank's gradient is zero outside the rows it owns");
}

/* One line of the footer: what arrives, and what @collective would bring. */
static void print_meaning(const char *pass, const char *collective, const plan_totals_t *totals)
{
    char most[24], all[24], other[24];
    tool_say("  %-9s ", pass);
    if (totals->recv_max == 0)
        tool_say("No rank receives anything.");
    else
        tool_say("The busiest rank receives %s, all ranks together %s.",
                 tool_bytes(most, totals->recv_max), tool_bytes(all, totals->recv_total));
    if (totals->collective_max == 0) {
        tool_say("\n%*s%s would move nothing%s.", 12, "", collective,
                 totals->recv_max ? "" : ", too");
    } else if (totals->collective_max > 0) {
        tool_say("\n%*s%s would bring %s to the busiest rank", 12, "", collective,
                 tool_bytes(other, totals->collective_max));
        double times = (double)totals->collective_max / (double)totals->recv_max;
        if (totals->recv_max == 0)
            tool_say(".");
        else if (totals->collective_max == totals->recv_max)
            tool_say(", the same number of bytes.");
        else
            tool_say(", %.*f times as much.", times < 1 ? 2 : 1, times);
    }
    tool_say("\n");
}

/* What enters nodes, and what the second level saves. */
static void print_nodes_meaning(const plan_totals_t *totals)
{
    char in[24], least[24], one[24];
    tool_say("%*sInto nodes come %s, the minimum is %s", 12, "", tool_bytes(in, totals->slow_total),
             tool_bytes(least, totals->slow_minimum));
    if (totals->slow_one_level > totals->slow_total)
        tool_say("; on one level it would be %s, %.1f times as much",
                 tool_bytes(one, totals->slow_one_level),
                 (double)totals->slow_one_level / (double)totals->slow_total);
    tool_say(".\n%*sEstimated time %s", 12, "", plan_time(in, totals->seconds));
    if (totals->slow_one_level > totals->slow_total)
        tool_say(", on one level %s", plan_time(one, totals->seconds_one_level));
    tool_say(".\n");
}

static int print_nodes(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans)
{
    int64_t n;
    plan_sums_t *node = plan_nodes(ask, plans, nplans, &n);
    if (!node)
        return TOOL_PROBLEM;
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    if (f)
        fputs("Into each node\t\t\tforward\t\t\tbackward\t\t\n"
              "node\tranks\tlevels\tin\tminimum\tone level\tin\tminimum\tone level\n",
              f);
    for (int64_t i = 0; f && i < n; i++) {
        const plan_totals_t *pass = node[i].pass;
        bool two = false;
        if (node[i].ranks == 0)
            continue;
        for (int w = 0; w < 2; w++)
            two |= pass[w].slow_one_level > pass[w].slow_total;
        fprintf(f, "%lld\t%lld\t%s", (long long)i, (long long)node[i].ranks, two ? "two" : "one");
        for (int w = 0; w < 2; w++) {
            char cell[3][CELL];
            bytes_cell(cell[0], pass[w].slow_total);
            bytes_cell(cell[1], pass[w].slow_minimum);
            bytes_cell(cell[2], pass[w].slow_one_level);
            fprintf(f, "\t%s\t%s\t%s", cell[0], cell[1], cell[2]);
        }
        fputc('\n', f);
    }
    const bool bad = !f || ferror(f);
    if ((f && fclose(f) != 0) || bad) {
        free(node);
        free(text);
        return tool_problem("no memory for a table of %lld nodes", (long long)n);
    }
    printf("\n");
    plan_table(text, "rrrRrrRrr", "\t");
    free(text);
    free(node);
    return TOOL_OK;
}

int plan_print_text(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                    const plan_sums_t *sums)
{
    char scale[32] = "no integer scale";
    if (sums->scale > 0)
        snprintf(scale, sizeof scale, "scale %lld", (long long)sums->scale);
    print_ask(ask);
    tool_say("%s, %s, %lld ranks\n", colo_direction_name(sums->direction), scale,
             (long long)ask->world);
    if (nplans > 0) {
        TOOL_TRY(print_table(ask, plans, nplans));
        if (plan_several_nodes(ask))
            TOOL_TRY(print_nodes(ask, plans, nplans));
    } else {
        tool_say("The table is left out, because %lld ranks are more than --max-ranks %lld.\n",
                 (long long)ask->world, (long long)ask->max_ranks);
    }
    tool_say("\n%sWhat this means%s\n", tool_bold, tool_plain);
    for (int w = 0; w < 2; w++) {
        print_meaning(w ? "backward" : "forward", w ? "An all-reduce" : "An all-gather",
                      &sums->pass[w]);
        if (plan_several_nodes(ask))
            print_nodes_meaning(&sums->pass[w]);
        if (ask->batch)
            plan_batch_print_minimum(&sums->pass[w]);
    }
    if (sums->rejects[0])
        tool_say("  Collectives cannot carry this pair: %s\n", sums->rejects);
    if (ask->batch && !ask->batch->packed)
        plan_batch_print_balance(ask);
    return TOOL_OK;
}

static void print_box(const colo_region_t *g, int64_t features)
{
    tool_say(" samples %lld..%lld rows %lld..%lld", (long long)g->b[0], (long long)g->b[1] - 1,
             (long long)g->s[0], (long long)g->s[1] - 1);
    if (g->h[0] != 0 || g->h[1] != features)
        tool_say(" features %lld..%lld", (long long)g->h[0], (long long)g->h[1] - 1);
}

static void print_messages(const char *verb, const char *to, const pic_list_t *list,
                           const plan_ask_t *ask)
{
    char b[24];
    for (int32_t i = 0; i < list->n; i++) {
        const colo_plan_message_t *m = &list->message[i];
        tool_say("  %s %s %s rank %lld:", verb, tool_bytes(b, m->bytes), to, (long long)m->peer);
        for (int64_t k = 0; k < m->nregions; k++) {
            tool_say("%s", k ? "," : "");
            if (ask->batch)
                plan_batch_print_rows(ask, &m->regions[k]);
            else
                print_box(&m->regions[k], ask->config.shape.features);
        }
        tool_say("\n");
    }
}

static void print_owned(const char *side, const colo_layout_t *layout, const plan_ask_t *ask,
                        bool full_rows, int64_t ragged_rows)
{
    const colo_shape_t *n = &ask->config.shape;
    colo_owned_t o = {0};
    int64_t rank = ask->rank;
    if (!colo_grid_has_rank(&layout->grid, rank)) {
        tool_say("%s: this grid does not have the rank\n", side);
        return;
    }
    int64_t c[COLO_DIMS_MAX];
    tool_say("%s:", side);
    if (colo_grid_coords(&layout->grid, rank, c) == COLO_OK)
        for (int32_t i = 0; i < layout->grid.ndims; i++)
            tool_say(" %s %lld", layout->grid.name[i], (long long)c[i]);
    if (ask->batch) {
        tool_say(", %lld rows\n", (long long)ragged_rows);
        return;
    }
    if (colo_layout_owned(
            layout, rank,
            &(colo_shape_t){.samples = n->samples, .rows = n->rows, .features = n->features},
            full_rows, &o, NULL, 0, NULL) != COLO_OK ||
        (o.b1 - o.b0) * o.rows * (o.h1 - o.h0) == 0) {
        tool_say(", the rank holds nothing\n");
        return;
    }
    long long b = o.b1 - o.b0, s = o.rows, h = o.h1 - o.h0;
    tool_say(", samples %lld..%lld, tensor %s [", (long long)o.b0, (long long)o.b1 - 1, ask->axes);
    if (strcmp(ask->axes, "th") == 0)
        tool_say("%lld, %lld]\n", b * s, h);
    else if (strcmp(ask->axes, "sbh") == 0)
        tool_say("%lld, %lld, %lld]\n", s, b, h);
    else
        tool_say("%lld, %lld, %lld]\n", b, s, h);
}

int plan_print_rank(const plan_ask_t *ask, const colo_plan_t *plan)
{
    static const char *const name[] = {"forward", "backward"};
    static const char *const verbs[] = {"receives",        "sends",         "then receives sums",
                                        "then sends sums", "then receives", "then sends"};
    int64_t rows[2];
    print_ask(ask);
    tool_say("\n%srank %lld%s\n", tool_bold, (long long)ask->rank, tool_plain);
    colo_plan_rows(plan, &rows[0], &rows[1]);
    print_owned("src", &ask->src, ask, false, rows[0]);
    print_owned("dst", &ask->dst, ask, ask->config.output == COLO_OUTPUT_FULL_SEQ, rows[1]);
    for (colo_pass_t pass = COLO_PASS_FORWARD; pass <= COLO_PASS_BACKWARD; pass++) {
        char local[24];
        colo_plan_bytes_t b = {COLO_PLAN_BYTES_INIT};
        pic_list_t list[PIC_EXCHANGES][2];
        int32_t n = 0;
        pic_lists(plan, pass, list);
        (void)colo_plan_bytes(plan, pass, &b);
        tool_say("\n%s%s%s: the rank keeps %s of its own\n", tool_bold, name[pass], tool_plain,
                 tool_bytes(local, b.local));
        for (int k = 0; k < 2 * PIC_EXCHANGES; k++) {
            print_messages(verbs[k], k % 2 ? "to" : "from", &list[k / 2][k % 2], ask);
            n += list[k / 2][k % 2].n;
        }
        if (n == 0)
            tool_say("  it exchanges nothing\n");
    }
    return TOOL_OK;
}
