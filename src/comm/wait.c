/* SPDX-License-Identifier: Apache-2.0 */
/* wait.c - see wait.h: spinning, yielding, sleeping, asking whether to go on; and the error
 * messages of what was in vain. */
#include "comm/wait.h"

#include <sched.h>
#include <stdio.h>

enum { SPINS = 64 };                        /* polls before the first yield */
static const double YIELD_SECONDS = 200e-6; /* of yielding before the first sleep */

bool colo_wait_spin(colo_wait_t *wait)
{
    if (++wait->polls >= SPINS)
        return false;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
    return true;
}

double colo_wait_nap(double waited)
{
    if (waited >= YIELD_SECONDS)
        return waited / 8 < 1e-3 ? waited / 8 : 1e-3;
    sched_yield();
    return 0;
}

/* ---- interrupted ---- */

static const double ASK_SECONDS = 50e-3;
static _Thread_local struct {
    colo_interrupted_fn interrupted;
    void *user;
    double asked;
} asking;

void colo_interrupt_set(colo_interrupted_fn interrupted, void *user)
{
    asking.interrupted = interrupted;
    asking.user = user;
}

bool colo_interrupted(double waited)
{
    if (!asking.interrupted || waited < ASK_SECONDS)
        return false;
    const double now = colo_now();
    if (now - asking.asked < ASK_SECONDS)
        return false;
    asking.asked = now;
    return asking.interrupted(asking.user);
}

/* ---- error messages ---- */

/* "'cp' (world ranks 0 2 4 6)" */
static const char *describe_group(char *text, size_t cap, const colo_waiter_t *me)
{
    enum { SHOWN = 8 };
    colo_text_t group = {.data = text, .cap = cap};
    colo_put(&group, "'%s' (world ranks", me->group);
    for (int32_t r = 0; r < me->size && r < SHOWN; r++)
        colo_put(&group, " %lld", (long long)me->world_rank[r]);
    colo_put(&group, "%s)", me->size > SHOWN ? " ..." : "");
    return text;
}

static const char *describe_last(char *text, size_t cap, colo_last_op_t last)
{
    if (last.seq == 0)
        return "none";
    return colo_op_describe(text, cap, colo_op_unpack(last.desc, last.count), last.seq);
}

void colo_blame_missing(char text[COLO_BLAME], const colo_waiter_t *me, int64_t timeout_ms,
                        bool arrived)
{
    char mine[96], last[96], group[160], how[64] = "has left the communicator", known[48] = "";
    if (timeout_ms > 0)
        snprintf(how, sizeof how, "%s within %lld ms",
                 arrived ? "did not finish" : "did not arrive", (long long)timeout_ms);
    if (me->hearsay)
        snprintf(known, sizeof known, ", as far as rank %d knows", (int)me->rank);
    snprintf(text, COLO_BLAME,
             "%s on %s: rank %d waited for rank %d (world rank %lld), which %s; the last operation "
             "of rank %d is %s%s",
             colo_op_describe(mine, sizeof mine, me->op, me->seq),
             describe_group(group, sizeof group, me), (int)me->rank, (int)me->peer,
             (long long)me->world_rank[me->peer], how, (int)me->peer,
             describe_last(last, sizeof last, me->last), known);
}

void colo_blame_interrupted(char text[COLO_BLAME], const colo_waiter_t *me)
{
    char mine[96], group[160];
    snprintf(text, COLO_BLAME,
             "rank %d was interrupted in %s on %s, where it waited for rank %d (world rank %lld)",
             (int)me->rank, colo_op_describe(mine, sizeof mine, me->op, me->seq),
             describe_group(group, sizeof group, me), (int)me->peer,
             (long long)me->world_rank[me->peer]);
}

void colo_blame_mismatch(char text[COLO_BLAME], const colo_waiter_t *me, const char *found,
                         bool left)
{
    char mine[96], last[96], group[160], passed[200];
    snprintf(passed, sizeof passed, "went past #%llu without it%s; its last operation is %s",
             (unsigned long long)me->seq, left ? " and left" : "",
             describe_last(last, sizeof last, me->last));
    snprintf(text, COLO_BLAME, "on %s rank %d is in %s, but rank %d %s",
             describe_group(group, sizeof group, me), (int)me->rank,
             colo_op_describe(mine, sizeof mine, me->op, me->seq), (int)me->peer,
             found ? found : passed);
}
