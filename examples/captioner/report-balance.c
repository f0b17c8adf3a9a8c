/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report-balance.c - a ragged run's layout: how many rows each rank encodes, and how many it would
 * have to without the balance.
 */
#include "report-page.h"

/* Which replica @rank encodes for; -1: none. */
static int64_t replica_of(const colo_layout_t *layout, int32_t rank)
{
    const colo_grid_t *grid = &layout->grid;
    int64_t index = 0;

    if (!colo_layout_holds(layout, rank))
        return -1;
    for (int i = 0; i < layout->nsplits[COLO_AXIS_SAMPLES]; i++) {
        int32_t dim = layout->split[COLO_AXIS_SAMPLES][i].dim;
        int64_t coord = 0;

        if (colo_grid_coord(grid, rank, grid->name[dim], &coord) < 0)
            return -1;
        index = index * grid->extent[dim] + coord;
    }
    return index;
}

static void put_rows(FILE *f, const char *name, int64_t rows, int64_t most)
{
    char text[32];

    svg_put(f,
            "<td role='cell' class='num' data-name='%s'>%s <svg class='bar' viewBox='0 0 100 10' "
            "role='img' aria-label='%s rows'><rect width='%.1f' height='10'/></svg></td>",
            name, svg_count(rows, text), text, most ? 100.0 * (double)rows / (double)most : 0.0);
}

colo_status_t cap_put_balance(FILE *f, const cap_report_t *r)
{
    const cap_balance_t *b = r->balance;
    int64_t most = 0;
    char text[32];

    svg_put(f, "<section id='layout'>\n<h2>Rows per rank</h2>\n<p>Encoder on <code>");
    svg_grid(f, &r->plan.src->grid);
    fputs("</code>, language model on <code>", f);
    svg_grid(f, &r->plan.dst->grid);
    fprintf(f,
            "</code>, the same %d ranks. Samples have any number of images, and images any number "
            "of rows, so the replica that reads a sample may get much more to encode than others. "
            "<code>colo_segments_balance()</code> deals the images out anew. ",
            r->world);
    if (b->steps)
        fprintf(f,
                "The most loaded replica had %.2f times the mean before and has %.2f times after, "
                "as a mean over all steps. ",
                b->most_before / (double)b->steps, b->most_after / (double)b->steps);
    fprintf(f, "A step moves %s of pixels to the replicas that encode them, ",
            svg_bytes(b->pixels, text));
    fprintf(f, "%s of embeddings to the language model, ", svg_bytes(b->embeddings, text));
    fprintf(f, "and %s of gradients back. ", svg_bytes(b->gradients, text));
    fputs("The table shows the last step; ranks of one replica share its rows.</p>\n", f);
    for (int64_t d = 0; d < b->replicas; d++) {
        most = b->before[d] > most ? b->before[d] : most;
        most = b->after[d] > most ? b->after[d] : most;
    }
    cap_put_table(f, "Rows that ranks encode in the last step",
                  (const char *[]){"rank", "replica", "#rows before", "#rows after", NULL});
    for (int32_t rank = 0; rank < r->world; rank++) {
        int64_t d = replica_of(r->plan.src, rank);

        svg_put(f, "<tr role='row'><td role='cell' data-name='rank'>%d</td>", rank);
        if (d < 0) {
            svg_put(f, "<td role='cell' data-name='replica'>encodes nothing</td><td role='cell' "
                       "class='num'></td>"
                       "<td role='cell' class='num'></td></tr>\n");
            continue;
        }
        svg_put(f, "<td role='cell' data-name='replica'>%lld</td>", (long long)d);
        put_rows(f, "rows before", b->before[d], most);
        put_rows(f, "rows after", b->after[d], most);
        fputs("</tr>\n", f);
    }
    fputs("</tbody>\n</table>\n</section>\n", f);
    return COLO_OK;
}
