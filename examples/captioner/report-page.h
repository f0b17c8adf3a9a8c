/* SPDX-License-Identifier: Apache-2.0 */
/* report-page.h (private to the report) - what its parts share: escaping, numbers, the parts. */
#ifndef CAPTIONER_REPORT_PAGE_H
#define CAPTIONER_REPORT_PAGE_H

#include <stdio.h>

#include "report.h"

enum { CAP_DRAWN_RANKS = 64 }; /* pictures of larger worlds help nobody */

/* Text as HTML: markup characters as entities, control bytes and broken UTF-8 as \xNN. */
void cap_put_text(FILE *f, const char *text);
/* "tp=2,dp=4": the spec without dims of extent 1 */
void cap_put_grid(FILE *f, const colo_grid_t *grid);
/* "96 B", "24.0 KiB"; returns text */
const char *cap_bytes(double bytes, char text[32]);
/* "1,234,567"; returns text */
const char *cap_count(int64_t n, char text[32]);

/* Each writes one section. The layout can fail: the plans are made there. */
void cap_put_curves(FILE *f, const cap_report_t *r);
colo_status_t cap_put_layout(FILE *f, const cap_report_t *r);

#endif
