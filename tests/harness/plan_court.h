/* SPDX-License-Identifier: Apache-2.0 */
/* plan_court.h - which rank holds and which needs a cell of one pass, for plan_world.c. */
#ifndef TESTS_HARNESS_PLAN_COURT_H
#define TESTS_HARNESS_PLAN_COURT_H

#include "harness/plan_world.h"

/* One rank's part as membership tables; features by cell. */
typedef struct member {
    bool holds;
    int64_t addend;
    bool *b, *s, *h;
} member_t;

typedef struct court {
    t_plans_t *w;
    colo_pass_t pass;
    int64_t nb, ns, nc, addends;
    int64_t *edge; /* [nc + 1] boundaries of the cells */
    member_t *has; /* what each rank can give */
    member_t *wants;
} court_t;

void t_court_open(court_t *k, t_plans_t *w, colo_pass_t pass);
void t_court_close(court_t *k);
void t_make_member(court_t *k, member_t *m, const ref_side_t *side, int64_t rank, bool full);

static inline bool gives(const member_t *m, int64_t addend, int64_t b, int64_t s, int64_t h)
{
    return m->holds && m->addend == addend && m->b[b] && m->s[s] && m->h[h];
}

static inline bool takes(const member_t *m, int64_t b, int64_t s, int64_t h)
{
    return m->holds && m->b[b] && m->s[s] && m->h[h];
}

#endif
