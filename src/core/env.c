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
};

int colo_env_count(void)
{
    return (int)(sizeof knobs / sizeof knobs[0]);
}

const colo_env_knob_t *colo_env_knob(int i)
{
    return i >= 0 && i < colo_env_count() ? &knobs[i] : NULL;
}

const char *colo_env_value(const char *name, bool *from_env)
{
    for (int i = 0; i < colo_env_count() && name; i++) {
        if (strcmp(knobs[i].name, name) != 0)
            continue;
        const char *set = getenv(name);
        if (from_env)
            *from_env = set != NULL;
        return set ? set : knobs[i].fallback;
    }
    return NULL;
}

int64_t colo_env_i64(const char *name, int64_t lo, int64_t hi)
{
    bool from_env = false;
    const char *text = colo_env_value(name, &from_env);
    if (!text)
        return lo;
    for (int pass = 0; pass < 2; pass++) {
        char *end = NULL;
        errno = 0;
        long long v = strtoll(text, &end, 10);
        if (end != text && !*end && !errno && v >= lo && v <= hi)
            return v;
        for (int i = 0; i < colo_env_count(); i++)
            if (strcmp(knobs[i].name, name) == 0) {
                if (from_env)
                    colo_log(COLO_LOG_WARN, "%s=%s is not a number in %lld..%lld; using %s", name,
                             text, (long long)lo, (long long)hi, knobs[i].fallback);
                text = knobs[i].fallback;
            }
    }
    return lo;
}
