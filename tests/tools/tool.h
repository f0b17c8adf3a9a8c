/* SPDX-License-Identifier: Apache-2.0 */
/* tool.h - runs a built tool and keeps what it output. */
#ifndef TESTS_TOOLS_TOOL_H
#define TESTS_TOOLS_TOOL_H

#include <stdbool.h>
#include <stddef.h>

typedef struct tool_output {
    int exit;        /* code, or -1 when a signal ended it */
    const char *out; /* NUL-terminated; a NUL that the tool wrote would end it early */
    const char *err;
    size_t out_size, err_size;
} tool_output_t;

/* The program to run, wherever the test is then: argv[1], or the variable @env. False: neither is
 * given. */
bool tool_path(int argc, char **argv, const char *env);
#define T_TOOL_MAIN(env, name)                                          \
    int main(int argc, char **argv)                                     \
    {                                                                   \
        return tool_path(argc, argv, env) ? t_main(name) : T_EXIT_SKIP; \
    }

/* The words of @line, which single spaces separate; %s stands for a text, whatever is in it. Kept
 * for a dozen calls. */
const char *const *words(const char *line, ...) __attribute__((format(printf, 1, 2)));

/* @args: NULL-terminated, without the program's name. What it wrote is kept for a dozen runs. */
tool_output_t tool_run(const char *const *args);
/* The same with stdout on a new terminal, and with NO_COLOR set or unset. If the system has no
 * pseudo-terminals, as a chroot without /dev/pts, nothing runs and out is NULL. */
tool_output_t tool_run_tty(const char *const *args, bool no_color);
/* The same with a stdout that no program can write to. */
tool_output_t tool_run_closed(const char *const *args);

/* What CMocka calls before and after: a new folder, in which the test then is; the end of it and of
 * its files. */
extern char tool_folder[];
int tool_folder_enter(void **state);
int tool_folder_leave(void **state);
int tool_folder_files(void); /* how many */
void tool_write(const char *path, const char *text);

/* Fails the test case unless the tool ended with @exit, wrote nothing to stdout, and to stderr one
 * line that begins with its name and contains @text. */
void tool_refused(tool_output_t s, const char *name, int exit, const char *text);
/* The same, of a run with @args. */
void tool_refuses(const char *name, const char *const *args, int exit, const char *text);

#endif
