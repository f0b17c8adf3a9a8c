/* SPDX-License-Identifier: Apache-2.0 */
/* markup.h - is a text well-formed XML, as strictly as pictures need it. */
#ifndef TESTS_TOOLS_MARKUP_H
#define TESTS_TOOLS_MARKUP_H

/* NULL, or what is wrong and where, in static memory: one root, elements nested and closed,
 * attributes named once and quoted, the five entities and numbers only, no control bytes, UTF-8. */
const char *markup_check(const char *text);

/* A text file of less than 4 MiB, kept until the next but one is read; NULL: it is none. */
const char *markup_read(const char *path);

/* How often @what is in @text. */
int markup_count(const char *text, const char *what);

#endif
