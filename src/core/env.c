/* SPDX-License-Identifier: Apache-2.0 */
/*
 * env.c - every environment knob is one row of this table; nothing else calls getenv().
 *
 * Decides what a knob is worth when it is unset or nonsense (its fallback, with one warning).
 * Values are read when asked for, so a test may set them; objects copy what they need at create.
 */
#include "core/env.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const colo_env_knob_t knobs[] = {
    {"COLO_LOG", "off", "what the library says on stderr: off, error, warn, info, debug"},
    {"COLO_TIMEOUT_MS", "600000", "deadline of every wait for another rank, in milliseconds"},
    {"COLO_CHECK", "1",
     "0 local checks only; 1 also agreement at create; 2 also a fingerprint before every operation "
     "and the verification of promises"},
    {"COLO_BIND", "none", "processors of a rank: none, core, scatter, numa, package"},
    {"COLO_BACKEND_DIR", "", "folder of libcolobridge-*.so; empty: beside libcolobridge.so"},
    {"COLO_SOCKETS", "auto",
     "between processes without MPI: auto is Unix sockets on one host and TCP elsewhere; tcp "
     "always"},
    {"COLO_TRANSPORT", "auto",
     "bridges between GPUs: auto is peers' memory where it is registered and reachable, else NCCL; "
     "nccl and peer insist"},
    {"COLO_GEMM", "auto",
     "products of the lm_head in host memory: auto is a CBLAS where one is found, else loops; "
     "cblas insists; loops; or a CBLAS by the name of its library, libmkl_rt.so.2"},
};

int colo_env_count(void)
{
    return (int)(sizeof knobs / sizeof knobs[0]);
}

const colo_env_knob_t *colo_env_knob(int i)
{
    return i >= 0 && i < colo_env_count() ? &knobs[i] : NULL;
}

static const colo_env_knob_t *find(const char *name)
{
    for (int i = 0; i < colo_env_count() && name; i++)
        if (strcmp(knobs[i].name, name) == 0)
            return &knobs[i];
    return NULL;
}

const char *colo_env_value(const char *name, bool *from_env)
{
    const colo_env_knob_t *k = find(name);
    if (!k)
        return NULL;
    const char *set = getenv(k->name);
    if (from_env)
        *from_env = set != NULL;
    return set ? set : k->fallback;
}

static bool parse(const char *text, int64_t lo, int64_t hi, int64_t *value)
{
    char *end = NULL;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    *value = v;
    return end != text && !*end && !errno && v >= lo && v <= hi;
}

int64_t colo_env_i64(const char *name, int64_t lo, int64_t hi)
{
    const colo_env_knob_t *k = find(name);
    if (!k)
        return lo;
    const char *set = getenv(k->name);
    int64_t v;
    if (set && parse(set, lo, hi, &v))
        return v;
    if (set)
        colo_log(COLO_LOG_WARN, "%s=%s is not a number in %lld..%lld; using %s", k->name, set,
                 (long long)lo, (long long)hi, k->fallback);
    return parse(k->fallback, lo, hi, &v) ? v : lo;
}
