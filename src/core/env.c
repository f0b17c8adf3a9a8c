/* SPDX-License-Identifier: Apache-2.0 */
/*
 * env.c - each environment variable is one row of this table; nothing else reads the environment.
 *
 * Decides which values are allowed. One that is not is refused by whatever uses it, and by every
 * call that makes a first communicator, whichever variable it is: a typo is an error, not a
 * default. An empty value is none, as of a variable that is not set. A program with more rights
 * than its user (set-user-ID) ignores them all, because some name code to load.
 *
 * Values are read when asked for, so a test may set them; objects copy what they need at create.
 */
#include "core/env.h"

#include "core/error.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TEXT_MAX = 4000, SHOWN = 40 };

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static const struct row {
    colo_env_variable_t variable;
    const char *const *words; /* allowed, up to NULL; NULL when it is a number */
    const char *open;         /* allowed besides: what it is, and what it then contains */
    const char *part;
    int64_t lo, hi; /* of a number */
    bool is_path;   /* of files in a folder to which this process can write */
} rows[] = {
    {.variable = {"COLO_LOG", "off",
                  "what the library says on stderr: off, error, warn, info, debug", NULL},
     .words = WORDS("off", "error", "warn", "info", "debug")},
    {.variable = {"COLO_TIMEOUT_MS", "600000",
                  "deadline of every wait for another rank, in milliseconds",
                  "colo_comm_config_t.timeout_ms"},
     .lo = 1,
     .hi = COLO_TIMEOUT_MAX},
    {.variable =
         {"COLO_CHECK", "1",
          "0: each rank checks its own arguments; 1: the ranks also agree at create; 2: they "
          "also compare every operation before it runs, and verify declared preconditions",
          "colo_comm_config_t.check"},
     .lo = 0,
     .hi = 2},
    {.variable = {"COLO_BIND", "none", "processors of a rank: none, core, scatter, numa, package",
                  NULL},
     .words = WORDS("none", "core", "scatter", "numa", "package")},
    {.variable = {"COLO_BACKEND_DIR", "",
                  "folder of libcolobridge-*.so; empty: next to libcolobridge.so", NULL},
     .open = "a folder",
     .part = ""},
    {.variable = {"COLO_NODE", "",
                  "name of this process's node, or of each rank's (0,0,1,1); ranks reach no GPU "
                  "memory of another node; empty: the host, by boot id and name",
                  NULL},
     .open = "any text",
     .part = ""},
    {.variable = {"COLO_FLIGHT_RECORDER", "",
                  "after a failure each rank writes its last operations as JSON into the file of "
                  "this name and its number, for `python -m colobridge flight`; empty: no file",
                  "colo_comm_config_t.flight_recorder"},
     .open = "the beginning of a path, in a folder to which this process can write",
     .part = "",
     .is_path = true},
    {.variable = {"COLO_NVTX", "0",
                  "1: each public operation is an NVTX range of its name, for Nsight Systems; read "
                  "when a communicator is made",
                  NULL},
     .lo = 0,
     .hi = 1},
    {.variable = {"COLO_TRANSPORT", "auto",
                  "bridges between GPUs: auto is peers' memory if it is registered and reachable, "
                  "else NCCL; nccl, peer: only that one; ucx: processes use UCX, also on one host "
                  "unless COLO_NODE puts them on one node",
                  "colo_comm_config_t.transport"},
     .words = WORDS("auto", "nccl", "peer", "ucx")},
    {.variable =
         {"COLO_PEER_BLOCKS", "0",
          "the most blocks of a bridge's peer-to-peer kernel, which holds as many multiprocessors "
          "while it moves boxes or waits for a peer; 0: as few as keep the links busy",
          "colo_bridge_config_t.peer_blocks"},
     .lo = 0,
     .hi = 1024},
    {.variable =
         {"COLO_GEMM", "auto",
          "products of the lm_head in host memory: auto is a CBLAS if the process has loaded one, "
          "else loops; cblas: that one, else OpenBLAS; loops; or the name of a CBLAS, "
          "libmkl_rt.so.2",
          "colo_lm_head_config_t.gemm"},
     .words = WORDS("auto", "cblas", "loops"),
     .open = "the name of a library (libmkl_rt.so.2)",
     .part = ".so"},
};

int colo_env_count(void)
{
    return (int)(sizeof rows / sizeof rows[0]);
}

const colo_env_variable_t *colo_env_variable(int i)
{
    return i >= 0 && i < colo_env_count() ? &rows[i].variable : NULL;
}

static const struct row *find(const char *name)
{
    for (int i = 0; i < colo_env_count() && name; i++)
        if (strcmp(rows[i].variable.name, name) == 0)
            return &rows[i];
    return NULL;
}

static const char *set_to(const struct row *row)
{
    const char *set = secure_getenv(row->variable.name);
    return set && set[0] ? set : NULL;
}

const char *colo_env_value(const char *name, bool *from_env)
{
    const struct row *row = find(name);
    if (!row)
        return NULL;
    const char *set = set_to(row);
    if (from_env)
        *from_env = set != NULL;
    return set ? set : row->variable.fallback;
}

/* ---- what is allowed ---- */

static bool parse(const struct row *row, const char *text, int64_t *value)
{
    char *end = NULL;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    *value = v;
    return text[0] >= '0' && text[0] <= '9' && !*end && !errno && v >= row->lo && v <= row->hi;
}

static int32_t find_word(const struct row *row, const char *text)
{
    for (int32_t i = 0; row->words && row->words[i]; i++)
        if (strcmp(row->words[i], text) == 0)
            return i;
    return -1;
}

/* Looked at when a communicator is made: after a fault it would be too late. */
static bool can_write(const char *path)
{
    char folder[TEXT_MAX + 1];
    const char *end = strrchr(path, '/');
    snprintf(folder, sizeof folder, "%.*s", end ? (int)(end - path) + 1 : 1, end ? path : ".");
    return faccessat(AT_FDCWD, folder, W_OK | X_OK, AT_EACCESS) == 0;
}

static bool is_allowed(const struct row *row, const char *text)
{
    int64_t value;
    if (strlen(text) > TEXT_MAX)
        return false;
    if (row->is_path)
        return can_write(text);
    if (row->hi)
        return parse(row, text, &value);
    return find_word(row, text) >= 0 || (row->open && strstr(text, row->part));
}

/* "auto, nccl or peer" */
static void describe_allowed(const struct row *row, char *text, size_t cap)
{
    if (row->hi) {
        snprintf(text, cap, "a number from %lld to %lld", (long long)row->lo, (long long)row->hi);
        return;
    }
    colo_text_t list = {.data = text, .cap = cap};
    text[0] = '\0';
    for (int i = 0; row->words && row->words[i]; i++) {
        const bool last = !row->open && !row->words[i + 1];
        colo_put(&list, "%s%s", i == 0 ? "" : last ? " or " : ", ", row->words[i]);
    }
    if (row->open)
        colo_put(&list, "%s%s", list.len ? " or " : "", row->open);
}

/* @what: where @text is from */
static colo_status_t refuse(const struct row *row, const char *what, const char *text)
{
    const size_t bytes = strlen(text);
    char allowed[160], value[SHOWN + 4];
    COLO_FAIL_IF(bytes > TEXT_MAX, COLO_ERR_ARG, "%s has %zu bytes, expected at most %d", what,
                 bytes, TEXT_MAX);
    describe_allowed(row, allowed, sizeof allowed);
    snprintf(value, sizeof value, "%.*s%s", SHOWN, text, bytes > SHOWN ? "..." : "");
    return colo_fail(COLO_ERR_ARG, "%s is '%s', expected %s", what, value, allowed);
}

static colo_status_t read_text(const struct row *row, const char **text)
{
    *text = row->variable.fallback;
    const char *set = set_to(row);
    if (!set)
        return COLO_OK;
    if (!is_allowed(row, set))
        return refuse(row, row->variable.name, set);
    *text = set;
    return COLO_OK;
}

colo_status_t colo_env_would_allow(const char *name, const char *what, const char *text)
{
    const struct row *row = find(name);
    return is_allowed(row, text) ? COLO_OK : refuse(row, what, text);
}

colo_status_t colo_env_check(const char *name)
{
    const char *text;
    const struct row *row = find(name);
    if (name)
        return row ? read_text(row, &text)
                   : colo_fail(COLO_ERR_MISSING,
                               "env_check: this library reads no variable '%.40s'", name);
    for (int i = 0; i < colo_env_count(); i++)
        COLO_TRY(read_text(&rows[i], &text));
    return COLO_OK;
}

/* ---- values ---- */

colo_status_t colo_env_text(const char *name, const char **text)
{
    return read_text(find(name), text);
}

colo_status_t colo_env_i64(const char *name, int64_t *value)
{
    const struct row *row = find(name);
    const char *text;
    colo_status_t st = read_text(row, &text);
    parse(row, text, value);
    return st;
}

colo_status_t colo_env_word(const char *name, int32_t *index)
{
    const struct row *row = find(name);
    const char *text;
    colo_status_t st = read_text(row, &text);
    *index = find_word(row, text);
    return st;
}
