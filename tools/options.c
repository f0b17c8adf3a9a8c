/* SPDX-License-Identifier: Apache-2.0 */
/*
 * options.c - reading a command line strictly, and complaining in one line.
 *
 * A command line may hold anything: 100 KB specs, bytes that are no text, numbers of 40 digits.
 * Whatever it is, the answer is one printable line of at most 200 bytes that names the option, so
 * that a script's log stays readable and a terminal is never reprogrammed by an argument. Nothing
 * is guessed: an option given twice, abbreviated, or with a stray letter in its number is wrong
 * use. What the values mean is each tool's business, but grids and contracts are read here for all.
 */
#include "options.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define LINE_MAX_BYTES 200

static bool printable(unsigned char c)
{
    return c >= 0x20 && c < 0x7f;
}

/* Escapes @text into @out [cap]; returns the length. Room for one escape (4) and the NUL is kept.
 */
static size_t escape(char *out, size_t cap, const char *text)
{
    size_t n = 0;
    for (; *text && n + 5 <= cap; text++) {
        unsigned char c = (unsigned char)*text;
        if (printable(c))
            out[n++] = (char)c;
        else
            n += (size_t)snprintf(out + n, cap - n, "\\x%02x", c);
    }
    out[n] = '\0';
    return n;
}

int tool_complain(int code, const char *fmt, ...)
{
    char error_message[4096], safe[4 * sizeof error_message];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(error_message, sizeof error_message, fmt, ap);
    va_end(ap);
    size_t n = escape(safe, sizeof safe, error_message);
    size_t left = LINE_MAX_BYTES - strlen(tool_name) - 3; /* ": " and the newline */
    if (n > left) { /* both ends say something: the option is in front, the limit at the back */
        size_t tail = left / 4, head = left - tail - 3;
        memmove(safe + head + 3, safe + n - tail, tail + 1);
        memcpy(safe + head, "...", 3);
    }
    fprintf(stderr, "%s: %s\n", tool_name, safe);
    return code;
}

const char *tool_quote(char out[TOOL_QUOTE_MAX], const char *text)
{
    size_t n = escape(out + 1, TOOL_QUOTE_MAX - 5, text); /* two quotes and "..." fit, too */
    size_t used = 0, i = 0;
    while (used < n) { /* how many bytes of @text the escaped part stands for */
        used += printable((unsigned char)text[i]) ? 1 : 4;
        i++;
    }
    out[0] = '"';
    strcpy(out + 1 + n, text[i] ? "...\"" : "\"");
    return out;
}

/* The row of the name that @name begins with, @len bytes; NULL: none. */
static tool_option_t *find(tool_option_t *options, int count, const char *name, size_t len)
{
    for (int i = 0; i < count; i++)
        if (strlen(options[i].name) == len && memcmp(options[i].name, name, len) == 0)
            return &options[i];
    return NULL;
}

/* "--name" or "-n", but not "->dp=2" */
static bool is_name(const char *arg)
{
    return arg[0] == '-' && (arg[1] == '-' || (arg[1] >= 'a' && arg[1] <= 'z'));
}

static int parse(tool_option_t *options, int count, int argc, char **argv)
{
    char q[TOOL_QUOTE_MAX];
    for (int i = 1; i < argc; i++) {
        const char *arg = strcmp(argv[i], "-h") ? argv[i] : "--help", *eq = strchr(arg, '=');
        size_t len = eq ? (size_t)(eq - arg) : strlen(arg);
        tool_option_t *o = find(options, count, arg, len);
        if (!o)
            return tool_refuse("argument %d: unknown option %s; see --help", i, tool_quote(q, arg));
        if (o->given)
            return tool_refuse("%s: given twice, again as argument %d", o->name, i);
        o->given = true;
        if (o->flag) {
            if (eq)
                return tool_refuse("%s: takes no value, found %s", o->name, tool_quote(q, eq + 1));
            if (strcmp(o->name, "--help") == 0 || strcmp(o->name, "--version") == 0)
                return TOOL_OK;
            continue;
        }
        if (o->list && !eq) {
            o->values = (const char *const *)&argv[i + 1];
            while (i + 1 < argc && !is_name(argv[i + 1])) {
                o->count++;
                i++;
            }
            if (o->count == 0)
                return tool_refuse("%s: a value is missing after argument %d", o->name, i);
            continue;
        }
        if (o->list)
            return tool_refuse("%s: its values are arguments of their own", o->name);
        if (eq)
            o->value = eq + 1;
        else if (i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0)
            o->value = argv[++i];
        else
            return tool_refuse("%s: a value is missing after argument %d", o->name, i);
    }
    return TOOL_OK;
}

const char *tool_bold = "", *tool_dim = "", *tool_plain = "";
int tool_columns;

/* Bytes of @text that fit @columns, up to a blank if there is one; escape sequences take no column.
 */
static size_t fitting(const char *text, int columns)
{
    size_t n = 0, last = 0;
    for (int seen = 0; text[n]; n++) {
        if (text[n] == '\033') {
            n += strcspn(text + n, "m");
            continue;
        }
        if (text[n] == ' ' && n > 0 && text[n - 1] != ' ')
            last = n;
        if (seen++ == columns)
            return last ? last : n;
    }
    return n;
}

/* Where the lines go on that @line is broken into: behind a word that two blanks set apart, or two
 * columns to the right of its own beginning. */
static int hanging(const char *line)
{
    const int lead = (int)strspn(line, " "), word = (int)strcspn(line + lead, " ");
    const int blanks = (int)strspn(line + lead + word, " ");
    const int indent = lead >= 8 ? lead : blanks >= 2 ? lead + word + blanks : lead + 2;
    return indent < tool_columns / 2 ? indent : tool_columns / 4;
}

static void put_line(const char *line)
{
    const int indent = hanging(line);
    size_t n = fitting(line, tool_columns);
    const size_t lead = strspn(line, " ");
    if (n <= lead)
        n = lead + strcspn(line + lead, " "); /* a word that does not fit */
    for (int pad = 0; printf("%*s%.*s\n", pad, "", (int)n, line), line[n]; pad = indent) {
        line += n + strspn(line + n, " ");
        n = fitting(line, tool_columns - indent);
        if (!*line)
            break;
    }
}

void tool_say(const char *fmt, ...)
{
    static char line[8192];
    static size_t n;
    va_list ap;
    va_start(ap, fmt);
    if (tool_columns == 0) {
        vprintf(fmt, ap);
    } else {
        vsnprintf(line + n, sizeof line - n, fmt, ap);
        for (char *end, *rest; (end = strchr(line, '\n')); memmove(line, rest, strlen(rest) + 1)) {
            *end = '\0';
            rest = end + 1;
            put_line(line);
        }
        n = strlen(line);
    }
    va_end(ap);
}

static void look_at_terminal(void)
{
    struct winsize size;
    if (isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0)
        tool_columns = size.ws_col;
    const char *no = getenv("NO_COLOR"), *term = getenv("TERM");
    if (!isatty(STDOUT_FILENO) || (no && *no) || (term && strcmp(term, "dumb") == 0))
        return;
    tool_bold = "\033[1m";
    tool_dim = "\033[2m";
    tool_plain = "\033[0m";
}

int tool_start(tool_option_t *options, int count, int argc, char **argv, const char *help,
               const char *examples)
{
    TOOL_TRY(parse(options, count, argc, argv));
    look_at_terminal();
    if (find(options, count, "--help", 6)->given) /* both are in the table of each tool */
        printf("%s%s", help, examples);
    else if (find(options, count, "--version", 9)->given)
        printf("%s %s\n", tool_name, colo_version());
    else
        return TOOL_GO_ON;
    return tool_finish(TOOL_OK);
}

int tool_i64(const tool_option_t *option, int64_t lo, int64_t hi, int64_t *value)
{
    if (!option->given)
        return TOOL_OK;
    char q[TOOL_QUOTE_MAX];
    const char *s = option->value;
    size_t digits = strspn(s, "0123456789");
    if (s[digits] || digits == 0)
        return tool_refuse("%s: %s is no whole number (byte %zu)", option->name, tool_quote(q, s),
                           digits);
    errno = 0;
    long long v = strtoll(s, NULL, 10);
    if (errno || v < lo || v > hi)
        return tool_refuse("%s: %s is outside %lld..%lld", option->name, tool_quote(q, s),
                           (long long)lo, (long long)hi);
    *value = v;
    return TOOL_OK;
}

int tool_pair(const tool_option_t *option, double lo, double hi, double v[2])
{
    if (!option->given)
        return TOOL_OK;
    char q[TOOL_QUOTE_MAX];
    const char *s = option->value;
    double found[2];
    int n = 0;
    do {
        size_t whole = strspn(s, "0123456789"), part = 0;
        if (s[whole] == '.')
            part = 1 + strspn(s + whole + 1, "0123456789");
        if (whole == 0 || part == 1 || whole + part > 20)
            break;
        found[n] = strtod(s, NULL); /* the C locale: no tool sets another */
        if (found[n] < lo || found[n] > hi)
            return tool_refuse("%s: %s is outside %g..%g", option->name, tool_quote(q, s), lo, hi);
        n++;
        s += whole + part;
    } while (n < 2 && *s == ',' && *++s);
    if (n == 0 || *s || s[-1] == ',')
        return tool_refuse("%s: %s is not one or two numbers like 8 or 7.5,12 (byte %d)",
                           option->name, tool_quote(q, option->value), (int)(s - option->value));
    v[0] = found[0];
    v[1] = found[n - 1];
    return TOOL_OK;
}

int tool_word(const tool_option_t *option, const char *const *words, int *index)
{
    if (!option->given)
        return TOOL_OK;
    char q[TOOL_QUOTE_MAX], all[96] = "";
    for (int i = 0; words[i]; i++) {
        if (strcmp(words[i], option->value) == 0) {
            *index = i;
            return TOOL_OK;
        }
        size_t n = strlen(all);
        snprintf(all + n, sizeof all - n, "%s%s", i ? ", " : "", words[i]);
    }
    return tool_refuse("%s: found %s, expected one of %s", option->name,
                       tool_quote(q, option->value), all);
}

int tool_wrong(const tool_option_t *option)
{
    return tool_refuse("%s: %s", option->name, colo_last_error());
}

int tool_grid(const tool_option_t *option, int64_t most, colo_grid_t *grid)
{
    if (colo_grid_parse(grid, option->value, 0) < 0)
        return tool_wrong(option);
    if (grid->size > most || grid->offset > most - grid->size)
        return tool_refuse("%s: %lld ranks from rank %lld on; worlds up to %lld are counted",
                           option->name, (long long)grid->size, (long long)grid->offset,
                           (long long)most);
    return TOOL_OK;
}

int tool_layouts(const tool_option_t *src, const tool_option_t *dst, const char *extra,
                 int64_t most, colo_layout_t *from, colo_layout_t *to)
{
    colo_grid_t src_grid, dst_grid;
    TOOL_TRY(tool_grid(src, most, &src_grid));
    TOOL_TRY(tool_grid(dst, most, &dst_grid));
    if (colo_layout_init_src_extra(from, &src_grid, extra) < 0)
        return tool_wrong(src);
    return colo_layout_init_dst_extra(to, &dst_grid, extra) < 0 ? tool_wrong(dst) : TOOL_OK;
}

int tool_dtype(const tool_option_t *option, colo_dtype_t *dtype)
{
    char q[TOOL_QUOTE_MAX];
    if (!option->given || colo_dtype_parse(option->value, dtype) == COLO_OK)
        return TOOL_OK;
    return tool_refuse("%s: %s is no dtype; see --help", option->name,
                       tool_quote(q, option->value));
}

int tool_output(const tool_option_t *option, colo_output_t *output)
{
    static const char *const words[] = {
        [COLO_OUTPUT_FULL_SEQ] = "full", [COLO_OUTPUT_SHARDED] = "sharded", NULL};
    int index = (int)*output;
    TOOL_TRY(tool_word(option, words, &index));
    *output = (colo_output_t)index;
    return TOOL_OK;
}

int tool_grad(const tool_option_t *option, colo_grad_t *grad)
{
    static const char *const words[] = {
        [COLO_GRAD_PARTIAL] = "partial", [COLO_GRAD_DISJOINT] = "disjoint", NULL};
    int index = (int)*grad;
    TOOL_TRY(tool_word(option, words, &index));
    *grad = (colo_grad_t)index;
    return TOOL_OK;
}

const char *tool_bytes(char out[24], int64_t bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double v = (double)bytes;
    int u = 0;
    while (v >= 1023.95 && u < 6) { /* what would print as 1024.0 is 1.0 of the next unit */
        v /= 1024;
        u++;
    }
    snprintf(out, 24, u ? "%.1f %s" : "%.0f %s", v, unit[u]);
    return out;
}

int tool_svg(int code, const char *path, int error)
{
    char q[TOOL_QUOTE_MAX];
    return error ? tool_complain(code, "--svg: %s: %s", tool_quote(q, path), strerror(error))
                 : TOOL_OK;
}

int tool_finish(int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    return tool_problem("standard output: %s", strerror(errno));
}
