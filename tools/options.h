/* SPDX-License-Identifier: Apache-2.0 */
/*
 * options.h - what the tools share: strict options, one-line complaints, bytes for people, colour.
 *
 * Exit codes of every tool: 0 ok, 1 found a problem, 2 wrong use.
 */
#ifndef TOOLS_OPTIONS_H
#define TOOLS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <colobridge.h>

#define TOOL_OK 0
#define TOOL_PROBLEM 1
#define TOOL_WRONG_USE 2
#define TOOL_GO_ON (-1) /* no exit code */

#define TOOL_TRY(expr)      \
    do {                    \
        int rc_ = (expr);   \
        if (rc_ != TOOL_OK) \
            return rc_;     \
    } while (0)

#define TOOL_QUOTE_MAX 64

/* One row of a tool's option table. A flag takes no value; a list takes all arguments up to the
 * next that looks like an option; the others take exactly one, as "--name value" or "--name=value".
 */
typedef struct tool_option {
    const char *name; /* "--batch" */
    bool flag;
    bool given;
    const char *value; /* points into argv */
    bool list;
    int count;                 /* of a list */
    const char *const *values; /* [count], points into argv */
    unsigned uses;             /* the tool's own: of which subcommands it is */
} tool_option_t;

/* A tool lists its options once, #define OPTIONS(X) X(SRC, .name = "--src") ..., for the enum of
 * their rows, which begin with OPT_, and for the table. */
#define TOOL_OPTION_ID(id, ...) OPT_##id,
#define TOOL_OPTION_ROW(id, ...) [OPT_##id] = {__VA_ARGS__},

/* "colo-plan": each tool defines its own. */
extern const char tool_name[];

/* One line on stderr, "TOOL: error message": printable ASCII, at most 200 bytes; returns @code. */
int tool_complain(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
#define tool_refuse(...) tool_complain(TOOL_WRONG_USE, __VA_ARGS__)
#define tool_problem(...) tool_complain(TOOL_PROBLEM, __VA_ARGS__)

/* Fills given and value, and does what --help, two texts, and --version ask for, at which it stops,
 * whatever follows. Returns TOOL_GO_ON, or what the tool ends with. */
int tool_start(tool_option_t *options, int count, int argc, char **argv, const char *help,
               const char *examples);

/* Decimal digits only, lo <= *value <= hi. Leaves *value alone when the option was not given. */
int tool_i64(const tool_option_t *option, int64_t lo, int64_t hi, int64_t *value);

/* "8" or "7.5,12": one or two decimal numbers, lo <= v <= hi; one stands for both. Leaves v alone
 * when the option was not given. */
int tool_pair(const tool_option_t *option, double lo, double hi, double v[2]);

/* Index in @words (NULL-terminated) of the option's value, left alone when not given. */
int tool_word(const tool_option_t *option, const char *const *words, int *index);

/* The option's name and the library's error message about its value; returns TOOL_WRONG_USE. */
int tool_wrong(const tool_option_t *option);

/* The grid of a spec string, all of whose ranks are below @most. */
int tool_grid(const tool_option_t *option, int64_t most, colo_grid_t *grid);

/* The layouts of two such grids, as colo_layout_init_src_extra() and ..._dst_extra() make them. */
int tool_layouts(const tool_option_t *src, const tool_option_t *dst, const char *extra,
                 int64_t most, colo_layout_t *from, colo_layout_t *to);

/* A dtype that the library knows. */
int tool_dtype(const tool_option_t *option, colo_dtype_t *dtype);

/* "full" or "sharded", "partial" or "disjoint"; left alone when not given. */
int tool_output(const tool_option_t *option, colo_output_t *output);
int tool_grad(const tool_option_t *option, colo_grad_t *grad);

/* "text" in quotes, non-printable bytes as \xNN, cut with ... to fit TOOL_QUOTE_MAX; returns @out
 */
const char *tool_quote(char out[TOOL_QUOTE_MAX], const char *text);

/* "0 B", "512 B", "1.5 KiB", "64.0 MiB"; returns @out */
const char *tool_bytes(char out[24], int64_t bytes);

/* What makes text on stdout bold, dim and plain again: "" but on a terminal that wants colour, TERM
 * not "dumb", NO_COLOR unset or empty. tool_start() finds out. */
extern const char *tool_bold, *tool_dim, *tool_plain;

/* Columns of the terminal that stdout is; 0: it is none, or does not say. tool_start() finds out.
 */
extern int tool_columns;

/* printf() of text for people: a line that is wider than the terminal is broken at blanks. */
void tool_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Complains of the picture @path if @error is an errno; returns @code then, else TOOL_OK. */
int tool_svg(int code, const char *path, int error);

/* Flushes stdout; a full disk or closed pipe is TOOL_PROBLEM with a complaint, else @code. */
int tool_finish(int code);

#endif
