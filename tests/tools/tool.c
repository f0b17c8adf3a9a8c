/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tool.c - a child process with its output in unnamed files, so that no pipe can fill up.
 *
 * The child gets a plain environment: no NO_COLOR, TERM=xterm. A terminal is a pseudo-terminal
 * whose other end is read after the child has ended (what it writes here is small).
 */
#include "harness/harness.h"

#include "tool.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ARGS_MAX 64

static char *program;

/* What the last runs wrote; the oldest goes. */
static char *keep(char *text)
{
    static char *kept[24];
    static size_t n;
    char **place = &kept[n++ % (sizeof kept / sizeof kept[0])];
    free(*place);
    return *place = text;
}

bool tool_path(int argc, char **argv, const char *env)
{
    const char *given = argc > 1 ? argv[1] : getenv(env);
    free(program);
    program = given ? realpath(given, NULL) : NULL;
    return given != NULL;
}

const char *const *words(const char *line, ...)
{
    static struct {
        char *text;
        const char *args[ARGS_MAX + 1];
    } kept[12];
    static size_t calls;
    const size_t index = calls++ % (sizeof kept / sizeof kept[0]);
    size_t bytes = 0;
    int n = 0;
    va_list list;
    free(kept[index].text);
    FILE *text = open_memstream(&kept[index].text, &bytes);
    va_start(list, line);
    for (; *line; line++)
        if (line[0] == '%' && line[1] == 's') {
            fputs(va_arg(list, const char *), text);
            line++;
        } else {
            fputc(*line == ' ' ? '\0' : *line, text);
        }
    va_end(list);
    if (ftell(text) > 0)
        fputc('\0', text);
    fclose(text);
    for (char *c = kept[index].text; c < kept[index].text + bytes; c += strlen(c) + 1) {
        assert_true(n < ARGS_MAX);
        kept[index].args[n++] = c;
    }
    kept[index].args[n] = NULL;
    return kept[index].args;
}

static char *slurp(int fd, size_t *size)
{
    size_t cap = 4096, n = 0;
    char *text = malloc(cap);
    for (;;) {
        if (n + 1 == cap)
            text = realloc(text, cap *= 2);
        if (!text)
            abort();
        ssize_t got = read(fd, text + n, cap - n - 1);
        if (got <= 0) /* 0, or EIO of a terminal whose child is gone */
            break;
        n += (size_t)got;
    }
    text[n] = '\0';
    *size = n;
    return keep(text);
}

static tool_output_t run(const char *const *args, int out, bool no_color)
{
    tool_output_t s = {.exit = -1};
    FILE *err = tmpfile();
    char *argv[ARGS_MAX + 2] = {program};
    for (int i = 0; i < ARGS_MAX && args[i]; i++)
        argv[i + 1] = (char *)args[i];
    if (!err)
        abort();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(out, STDOUT_FILENO);
        dup2(fileno(err), STDERR_FILENO);
        setenv("TERM", "xterm", 1);
        if (no_color)
            setenv("NO_COLOR", "1", 1);
        else
            unsetenv("NO_COLOR");
        execv(program, argv);
        _exit(126);
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        abort();
    if (WIFEXITED(status))
        s.exit = WEXITSTATUS(status);
    lseek(fileno(err), 0, SEEK_SET);
    s.err = slurp(fileno(err), &s.err_size);
    fclose(err);
    return s;
}

tool_output_t tool_run(const char *const *args)
{
    FILE *out = tmpfile();
    if (!out)
        abort();
    tool_output_t s = run(args, fileno(out), false);
    lseek(fileno(out), 0, SEEK_SET);
    s.out = slurp(fileno(out), &s.out_size);
    fclose(out);
    return s;
}

tool_output_t tool_run_tty(const char *const *args, bool no_color)
{
    int master = posix_openpt(O_RDWR | O_NOCTTY), slave = -1;
    const char *name =
        master >= 0 && !grantpt(master) && !unlockpt(master) ? ptsname(master) : NULL;
    if (name)
        slave = open(name, O_RDWR | O_NOCTTY);
    if (slave < 0) {
        if (master >= 0)
            close(master);
        return (tool_output_t){.exit = -1};
    }
    tool_output_t s = run(args, slave, no_color);
    close(slave);
    s.out = slurp(master, &s.out_size);
    close(master);
    return s;
}

tool_output_t tool_run_closed(const char *const *args)
{
    int fd = open("/dev/null", O_RDONLY);
    if (fd < 0)
        abort();
    tool_output_t s = run(args, fd, false);
    close(fd);
    s.out = "";
    return s;
}

char tool_folder[64];

int tool_folder_enter(void **state)
{
    strcpy(tool_folder, "/tmp/colo-tool-XXXXXX");
    return mkdtemp(tool_folder) ? chdir(tool_folder) : -1;
}

/* Of each file @visit, if it is given; how many there are. */
static int each_file(int (*visit)(const char *name))
{
    int n = 0;
    DIR *d = opendir(tool_folder);
    for (struct dirent *e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            n++;
            if (visit)
                (void)visit(e->d_name);
        }
    if (d)
        closedir(d);
    return n;
}

int tool_folder_leave(void **state)
{
    each_file(unlink);
    return chdir("/") == 0 ? rmdir(tool_folder) : 1;
}

int tool_folder_files(void)
{
    return each_file(NULL);
}

void tool_write(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

void tool_refused(tool_output_t s, const char *name, int exit, const char *text)
{
    const char *newline = strchr(s.err, '\n');
    if (s.exit != exit || s.out_size != 0 || !newline || newline[1] || s.err_size > 201)
        fail_msg("exit %d, %zu bytes on stdout, stderr (%zu bytes): %s; expected exit %d, \"%s\"",
                 s.exit, s.out_size, s.err_size, s.err, exit, text);
    for (const char *c = s.err; c < newline; c++)
        if (*c < 0x20 || *c > 0x7e)
            fail_msg("byte 0x%02x on stderr: %s", (unsigned char)*c, s.err);
    if (strncmp(s.err, name, strlen(name)) != 0 || strncmp(s.err + strlen(name), ": ", 2) != 0 ||
        !strstr(s.err, text))
        fail_msg("\"%s\" lacks \"%s\"", s.err, text);
}

void tool_refuses(const char *name, const char *const *args, int exit, const char *text)
{
    tool_refused(tool_run(args), name, exit, text);
}
