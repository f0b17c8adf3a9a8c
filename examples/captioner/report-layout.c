/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report-layout.c - which rank holds what and what the bridge moves, as two pictures and a table.
 *
 * One picture a way, drawn by tools/picture.c as colo-plan draws it. Ranks that exchange with each
 * other stand together.
 */
#include <stdlib.h>

#include "report-page.h"

#include "picture.h"

/* ---- a picture ---- */

static void put_pass(FILE *f, const cap_report_t *r, const pic_t *pic, colo_pass_t pass)
{
    const pic_flows_t *s = &pic->pass[pass];
    char a[32], b[32], c[32];

    svg_put(f, "<figure class='layout'>\n<figcaption><b>%s</b> ",
            pass == COLO_PASS_FORWARD ? "Forward, activations" : "Backward, gradients");
    if (pass == COLO_PASS_BACKWARD && r->plan.no_grad) {
        fputs("none: the source side is frozen</figcaption>\n</figure>\n", f);
        return;
    }
    if (!s->messages) {
        fputs("no messages: every rank already has its part", f);
    } else {
        fprintf(f, "%s %s, %s in all, at most %s into one rank", svg_count(s->messages, a),
                s->messages == 1 ? "message" : "messages", svg_bytes((double)s->total, b),
                svg_bytes((double)s->most, c));
        if (s->total == s->minimum)
            fputs(". Each receiver gets only what it lacks", f);
        else
            fprintf(f, ". The receivers lack %s", svg_bytes((double)s->minimum, a));
    }
    if (s->collective >= 0)
        fprintf(f, ". An all-%s would bring %s in all",
                pass == COLO_PASS_FORWARD ? "gather" : "reduce",
                svg_bytes((double)s->collective, b));
    fputs(".</figcaption>\n", f);
    if (r->world <= PIC_ROWS_MAX) {
        svg_put(f, "<svg viewBox='0 0 %d %d' role='img' ", SVG_PANEL, pic_draw(NULL, pic, pass));
        svg_put(f, "aria-label='%s messages between ranks'>\n",
                pass == COLO_PASS_FORWARD ? "forward" : "backward");
        pic_draw(f, pic, pass);
        fputs("</svg>\n", f);
    }
    fputs("</figure>\n", f);
}

/* ---- which rank holds what ---- */

static void put_owned(FILE *f, const cap_report_t *r, const colo_layout_t *layout, int32_t rank,
                      bool full_rows)
{
    const colo_shape_t *s = &r->plan.shape;
    colo_layout_t l = *layout;
    colo_run_t run[64];
    colo_owned_t owned;
    int64_t n = 0;

    if (s->positions && layout == r->plan.dst)
        l.positions = s->positions;
    if (colo_layout_owned(
            &l, rank,
            &(colo_shape_t){.samples = s->samples, .rows = s->rows, .features = s->features},
            full_rows, &owned, run, 64, &n) < 0) {
        fputs("in more than 64 pieces", f);
        return;
    }
    if (owned.b0 == owned.b1 || !owned.rows) {
        fputs("nothing", f);
        return;
    }
    fprintf(f, "samples %lld to %lld, rows", (long long)owned.b0, (long long)owned.b1 - 1);
    for (int64_t i = 0; i < n; i++)
        fprintf(f, "%s %lld to %lld", i ? "," : "", (long long)run[i].row,
                (long long)(run[i].row + run[i].count - 1));
}

static void put_holdings(FILE *f, const cap_report_t *r)
{
    bool full = r->plan.output == COLO_OUTPUT_FULL_SEQ;

    fputs("<details>\n<summary>Which rank holds what</summary>\n", f);
    cap_put_table(f, "What each rank holds, before and after the bridge",
                  (const char *[]){"rank", "source holds", "destination gets", NULL});
    for (int32_t rank = 0; rank < r->world; rank++) {
        svg_put(f,
                "<tr role='row'><td role='cell' data-name='rank'>%d</td><td role='cell' "
                "data-name='source holds'>",
                rank);
        put_owned(f, r, r->plan.src, rank, false);
        svg_put(f, "</td><td role='cell' data-name='destination gets'>");
        put_owned(f, r, r->plan.dst, rank, full);
        fputs("</td></tr>\n", f);
    }
    fputs("</tbody>\n</table>\n</details>\n", f);
}

static void put_intro(FILE *f, const cap_report_t *r)
{
    const colo_shape_t *s = &r->plan.shape;
    bool sharded = r->plan.output == COLO_OUTPUT_SHARDED;

    svg_put(f, "<section id='layout'>\n<h2>Layout</h2>\n<p>Encoder on <code>");
    svg_grid(f, &r->plan.src->grid);
    fputs("</code>, language model on <code>", f);
    svg_grid(f, &r->plan.dst->grid);
    fprintf(f,
            "</code>, the same %d ranks. What crosses the bridge each step: %lld samples of %lld "
            "image rows of %lld features (%s), output %s, %s gradients%s. A row is a rank, solid "
            "arrows are messages, dashed lines stay on the rank.</p>\n",
            r->world, (long long)s->samples, (long long)s->rows, (long long)s->features,
            colo_dtype_name(r->plan.dtype), sharded ? "sharded" : "full",
            sharded || r->plan.grad == COLO_GRAD_DISJOINT ? "disjoint" : "partial",
            r->algo == COLO_ALGO_COLLECTIVE
                ? "; this run used whole collectives, the pictures show the exact plan"
                : "");
    if (r->world > PIC_ROWS_MAX)
        fprintf(f, "<p>Pictures are drawn up to %d ranks.</p>\n", PIC_ROWS_MAX);
}

colo_status_t cap_put_layout(FILE *f, const cap_report_t *r)
{
    pic_t pic;
    int64_t *ranks = calloc((size_t)r->world, sizeof *ranks);

    for (int32_t rank = 0; ranks && rank < r->world; rank++)
        ranks[rank] = rank;
    colo_status_t st =
        ranks ? pic_collect(&pic, &r->plan, &(pic_batch_t){0}, ranks, r->world) : COLO_ERR_NOMEM;
    free(ranks);
    if (st < 0)
        return st;
    put_intro(f, r);
    svg_put(f, "<div class='pair'>\n");
    put_pass(f, r, &pic, COLO_PASS_FORWARD);
    put_pass(f, r, &pic, COLO_PASS_BACKWARD);
    fputs("</div>\n", f);
    put_holdings(f, r);
    fputs("</section>\n", f);
    pic_free(&pic);
    return COLO_OK;
}
