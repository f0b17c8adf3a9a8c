/* SPDX-License-Identifier: Apache-2.0 */
/* report-page.h (private to the report) - its parts; they share svg.h. */
#ifndef EXAMPLES_CAPTIONER_REPORT_PAGE_H
#define EXAMPLES_CAPTIONER_REPORT_PAGE_H

#include <stdio.h>

#include "report.h"
#include "svg.h"

/* Each writes one section. The layout can fail: the plans are made there. */
void cap_put_curves(FILE *f, const cap_report_t *r);
colo_status_t cap_put_layout(FILE *f, const cap_report_t *r);
colo_status_t cap_put_balance(FILE *f, const cap_report_t *r);

/* Begins a table of columns with these titles, up to NULL; # is before those of numbers.
 * </tbody></table> ends it. */
void cap_put_table(FILE *f, const char *caption, const char *const *columns);

#endif
