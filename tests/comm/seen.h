/* SPDX-License-Identifier: Apache-2.0 */
/* seen.h - what each rank saw of an operation that goes wrong; the main thread judges. */
#ifndef TESTS_COMM_SEEN_H
#define TESTS_COMM_SEEN_H

#include "harness/harness.h"

#include "comm/comm.h"

enum { MOST = 8 };

struct seen {
    colo_status_t status[MOST];
    char error_message[MOST][1200];
    double seconds[MOST];
    _Atomic int arrived;
};

/* Runs @expr as rank @r and notes how it went. */
#define NOTE(s, r, expr)                                                   \
    do {                                                                   \
        double t_begin_ = colo_now();                                      \
        (s)->status[r] = (expr);                                           \
        (s)->seconds[r] = colo_now() - t_begin_;                           \
        snprintf((s)->error_message[r], sizeof(s)->error_message[r], "%s", \
                 (s)->status[r] < 0 ? colo_last_error() : "");             \
    } while (0)

static inline void expect(const struct seen *s, int r, colo_status_t want, const char *text)
{
    if (s->status[r] != want)
        fail_msg("rank %d: %s, expected %s (%s)", r, colo_status_name(s->status[r]),
                 colo_status_name(want), s->error_message[r]);
    if (!strstr(s->error_message[r], text))
        fail_msg("rank %d: error message \"%s\" lacks \"%s\"", r, s->error_message[r], text);
}

#endif
