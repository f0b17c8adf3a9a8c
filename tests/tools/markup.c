/* SPDX-License-Identifier: Apache-2.0 */
/* markup.c - see markup.h. No DTD, no comments, no processing instructions: pictures have none. */
#include "markup.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { DEPTH = 32, NAMES = 32, NAME = 40 };

static const char *wrong(const char *text, const char *from, const char *what)
{
    static char error_message[200];
    snprintf(error_message, sizeof error_message, "byte %d: %s: \"%.60s\"", (int)(from - text),
             what, from);
    return error_message;
}

static int character(const char *s) /* length, 0: not allowed */
{
    const unsigned char *u = (const unsigned char *)s;
    if (*u == '&') {
        static const char *const entity[] = {"&amp;", "&lt;", "&gt;", "&quot;"};
        for (int i = 0; i < 4; i++)
            if (strncmp(s, entity[i], strlen(entity[i])) == 0)
                return (int)strlen(entity[i]);
        int n = 2;
        while (s[1] == '#' && isdigit((unsigned char)s[n]))
            n++;
        return n > 2 && s[n] == ';' ? n + 1 : 0;
    }
    if (*u == '\n' || (*u >= 0x20 && *u < 0x7f))
        return *u == '<' ? 0 : 1;
    int n = *u >> 5 == 6 ? 2 : *u >> 4 == 14 ? 3 : *u >> 3 == 30 ? 4 : 0;
    for (int i = 1; i < n; i++)
        if (u[i] >> 6 != 2)
            return 0;
    return n;
}

static int name(const char *s, char out[NAME])
{
    int n = 0;
    while (isalnum((unsigned char)s[n]) || (n > 0 && (s[n] == '-' || s[n] == ':')))
        n++;
    if (n == 0 || n >= NAME || isdigit((unsigned char)s[0]))
        return 0;
    memcpy(out, s, (size_t)n);
    out[n] = '\0';
    return n;
}

/* Attributes up to > or />; *s moves behind. NULL or what is wrong. */
static const char *attributes(const char *text, const char **s, bool *empty)
{
    char seen[NAMES][NAME];
    int n = 0;
    while (**s == ' ') {
        char *me = seen[n];
        int len;
        (*s)++;
        if (n == NAMES - 1 || !(len = name(*s, me)))
            return wrong(text, *s, "no attribute");
        for (int i = 0; i < n; i++)
            if (strcmp(seen[i], me) == 0)
                return wrong(text, *s, "attribute twice");
        n++;
        *s += len;
        if ((*s)[0] != '=' || (*s)[1] != '"')
            return wrong(text, *s, "value without quotes");
        for (*s += 2; **s != '"'; *s += len)
            if (!**s || !(len = character(*s)))
                return wrong(text, *s, "in a value");
        (*s)++;
    }
    *empty = (*s)[0] == '/';
    *s += *empty;
    if (**s != '>')
        return wrong(text, *s, "tag without end");
    (*s)++;
    return NULL;
}

const char *markup_check(const char *text)
{
    char open[DEPTH][NAME], tag[NAME];
    int depth = 0, roots = 0, len;
    const char *s = text;
    while (*s) {
        if (*s != '<') {
            if (!(len = character(s)) || (depth == 0 && *s != '\n'))
                return wrong(text, s, "in text");
            s += len;
            continue;
        }
        bool closing = s[1] == '/', empty = false;
        s += 1 + closing;
        if (!(len = name(s, tag)))
            return wrong(text, s, "no tag");
        s += len;
        if (closing) {
            if (depth == 0 || strcmp(open[--depth], tag) != 0 || *s++ != '>')
                return wrong(text, s, "closes another element");
            continue;
        }
        const char *why = attributes(text, &s, &empty);
        if (why)
            return why;
        roots += depth == 0;
        if (!empty && depth == DEPTH)
            return wrong(text, s, "too deep");
        if (!empty)
            strcpy(open[depth++], tag);
    }
    return depth        ? wrong(text, s, "not closed")
           : roots != 1 ? wrong(text, s, "not one root")
                        : NULL;
}

int markup_count(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)); text += strlen(what))
        n++;
    return n;
}

const char *markup_read(const char *path)
{
    static char kept[2][1 << 22];
    static unsigned calls;
    char *text = kept[calls++ % 2];
    FILE *f = fopen(path, "rb");
    const size_t n = f ? fread(text, 1, sizeof kept[0], f) : sizeof kept[0];
    if (f)
        fclose(f);
    if (n == sizeof kept[0])
        return NULL;
    text[n] = '\0';
    return strlen(text) == n ? text : NULL;
}
