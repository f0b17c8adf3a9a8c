/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tickets.c - calls that are started and finished in host memory: the oracle's values in any
 * order of finishing, and what is said of tickets that are not finished. test_ragged_random.c
 * starts and finishes batches.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"

#include <pthread.h>
#include <unistd.h>

static t_case_t the_case(void)
{
    return (t_case_t){
        .src = t_side("tp=2,dp=2", true), .dst = t_side("cp=2,dp=2", false), .shape = {6, 8, 5}};
}

/* ---- several at a time ---- */

enum { STEPS = 4 };

typedef struct step {
    t_buffer_t in, out;
    colo_ticket_t *ticket;
} step_t;

static colo_status_t start(colo_bridge_t *bridge, const t_case_t *c, int64_t rank, bool forward,
                           int salt, step_t *s)
{
    rank_try(t_case_tensor(c, forward ? T_X : T_DY, rank, salt, true, &s->in));
    rank_try(t_case_tensor(c, forward ? T_Y : T_DX, rank, salt, false, &s->out));
    rank_try(forward ? colo_bridge_forward_start(bridge, &s->in.t, &s->out.t, NULL, &s->ticket)
                     : colo_bridge_backward_start(bridge, &s->in.t, &s->out.t, NULL, &s->ticket));
    rank_check(s->ticket != NULL);
    return COLO_OK;
}

static colo_status_t finish(const t_case_t *c, int64_t rank, bool forward, int salt, step_t *s)
{
    rank_try(colo_ticket_finish(&s->ticket, NULL));
    rank_check(s->ticket == NULL);
    rank_try(t_case_compare(c, forward ? T_Y : T_DX, rank, salt, &s->out));
    t_buffer_free(&s->in);
    t_buffer_free(&s->out);
    return COLO_OK;
}

T_CASE_FOR(4, calls_finished_in_another_order_give_the_oracle_s_values, int32_t, check, 0, 1, 2)
{
    const t_case_t c = the_case();
    const int64_t rank = colo_comm_rank(world);
    static const int order[STEPS] = {2, 0, 3, 1};
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    step_t step[2][STEPS] = {{{.ticket = NULL}}};
    rank_try(colo_comm_set_check(world, check));
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    for (int i = 0; i < STEPS; i++) {
        rank_try(start(bridge, &c, rank, true, i, &step[0][i]));
        rank_try(start(bridge, &c, rank, false, STEPS + i, &step[1][i]));
        rank_try(t_case_step(bridge, rank, &c, 2 * STEPS + i)); /* without a ticket in between */
    }
    for (int i = 0; i < STEPS; i++)
        for (int pass = 0; pass < 2; pass++)
            rank_try(finish(&c, rank, pass == 0, STEPS * pass + order[i], &step[pass][order[i]]));
    return COLO_OK;
}

/* ---- records ---- */

static int32_t count_of(const char *text, const char *word)
{
    int32_t n = 0;
    for (; (text = strstr(text, word)); text++)
        n++;
    return n;
}

T_CASE_ON(4, records_name_the_ticket_of_an_operation)
{
    static _Thread_local char text[1 << 17];
    const t_case_t c = the_case();
    const int64_t rank = colo_comm_rank(world);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    step_t step[2] = {{.ticket = NULL}};
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    for (int i = 0; i < 2; i++) {
        rank_try(start(bridge, &c, rank, true, i, &step[i]));
        rank_try(t_case_step(bridge, rank, &c, 5));
    }
    for (int i = 0; i < 2; i++)
        rank_try(finish(&c, rank, true, i, &step[i]));
    rank_check(colo_comm_dump(world, text, sizeof text) < sizeof text);
    rank_check(count_of(text, "\"ticket\":1,") == 1 && count_of(text, "\"ticket\":2,") == 1);
    rank_check(count_of(text, "\"op\":\"exchange\"") >= 6 + 1); /* with those of "stats" */
    return COLO_OK;
}

/* ---- refusals ---- */

T_CASE_ON(4, more_tickets_than_there_can_be_are_refused)
{
    const t_case_t c = the_case();
    const int64_t rank = colo_comm_rank(world);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    static const int first = 0;
    step_t step[COLO_TICKETS_MAX] = {{.ticket = NULL}};
    colo_ticket_t *more = (colo_ticket_t *)step;
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    for (int i = first; i < COLO_TICKETS_MAX; i++)
        rank_try(start(bridge, &c, rank, true, 0, &step[i]));
    rank_check(colo_bridge_forward_start(bridge, &step[0].in.t, &step[0].out.t, NULL, &more) ==
                   COLO_ERR_STATE &&
               says("64 tickets are not finished, the first is 1 (forward)") && more == NULL);
    rank_try(finish(&c, rank, true, 0, &step[5])); /* the comm lives, and there is place for one */
    rank_try(start(bridge, &c, rank, true, 0, &step[5]));
    for (int i = first; i < COLO_TICKETS_MAX; i++)
        rank_try(finish(&c, rank, true, 0, &step[i]));
    return COLO_OK;
}

T_CASE_ON(4, a_ticket_that_is_not_finished_by_the_deadline_is_named)
{
    const t_case_t c = the_case();
    const int64_t rank = colo_comm_rank(world);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    step_t step = {.ticket = NULL};
    colo_ticket_t *more = NULL;
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    rank_try(start(bridge, &c, rank, true, 0, &step));
    rank_try(colo_comm_barrier(world, NULL));
    rank_try(colo_comm_set_timeout(world, 1));
    usleep(3000);
    rank_check(colo_bridge_backward_start(bridge, &step.in.t, &step.out.t, NULL, &more) ==
               COLO_ERR_TIMEOUT);
    rank_check(says("ticket 1 (forward) was started") && says("the deadline is 0.0 s"));
    rank_try(colo_ticket_finish(&step.ticket, NULL));
    t_buffer_free(&step.in);
    t_buffer_free(&step.out);
    return COLO_OK;
}

static colo_status_t destroyed_rank(colo_comm_t *world, void *arg)
{
    const t_case_t c = {
        .src = t_side("dp=1", true), .dst = t_side("dp=1", false), .shape = {2, 3, 4}};
    colo_bridge_t *bridge = NULL;
    colo_comm_t *comm = NULL;
    step_t step[3] = {{.ticket = NULL}};
    rank_try(colo_comm_split_color(world, 0, 0, &comm));
    rank_try(t_case_bridge(&bridge, &c, comm, COLO_MEM_HOST));
    rank_try(start(bridge, &c, 0, true, 0, &step[0]));
    rank_try(start(bridge, &c, 0, false, 1, &step[1]));
    rank_try(start(bridge, &c, 0, true, 2, &step[2]));
    colo_ticket_t *again = step[0].ticket;
    rank_try(finish(&c, 0, true, 0, &step[0]));
    rank_fails(colo_ticket_finish(&again, NULL), COLO_ERR_ARG, "ticket 1 (forward) is finished");
    rank_check(again == NULL);
    colo_bridge_destroy(&bridge);
    if (*(const bool *)arg)
        colo_comm_destroy(&comm);
    for (int i = 1; i < 3; i++) { /* valid, but ended */
        rank_fails(colo_ticket_finish(&step[i].ticket, NULL), COLO_ERR_STATE,
                   i == 1 ? "bridge 1 was destroyed while ticket 2 (backward) was not finished"
                          : "bridge 1 was destroyed while ticket 3 (forward) was not finished");
        rank_check(step[i].ticket == NULL);
        t_buffer_free(&step[i].in);
        t_buffer_free(&step[i].out);
    }
    colo_comm_destroy(&comm);
    return COLO_OK;
}

T_CASE(a_bridge_that_is_destroyed_names_its_tickets_and_finish_refuses_them)
{
    for (int i = 0; i < 2; i++) {
        bool comm_too = i == 1;
        t_lines_t said = {0};
        colo_log_set(t_keep_line, &said, COLO_LOG_ERROR);
        assert_ok(t_run_ranks(1, destroyed_rank, &comm_too, sizeof comm_too));
        colo_log_set(NULL, NULL, COLO_LOG_OFF);
        assert_non_null(strstr(said.last, "ticket 3 (forward) is not finished"));
    }
}

static colo_ticket_t *forgotten;
static colo_status_t sink_finished;

static void finish_it(colo_log_level_t level, const char *line, void *user)
{
    (void)level, (void)line, (void)user;
    sink_finished = colo_ticket_finish(&forgotten, NULL);
}

/* as a garbage collector that runs while a line is written */
T_CASE_ON(1, a_sink_may_finish_the_tickets_of_a_bridge_that_is_destroyed)
{
    const t_case_t c = {
        .src = t_side("dp=1", true), .dst = t_side("dp=1", false), .shape = {2, 3, 4}};
    colo_bridge_t *bridge = NULL;
    step_t step = {.ticket = NULL};
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    rank_try(start(bridge, &c, 0, true, 0, &step));
    forgotten = step.ticket;
    colo_log_set(finish_it, NULL, COLO_LOG_ERROR);
    colo_bridge_destroy(&bridge);
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    rank_check(sink_finished == COLO_ERR_STATE && !forgotten);
    t_buffer_free(&step.in);
    t_buffer_free(&step.out);
    return COLO_OK;
}

/* As a garbage collector of a program does it. */
static void *finish_elsewhere(void *ticket)
{
    const bool good = colo_ticket_finish(ticket, NULL) == COLO_OK;
    return good ? ticket : NULL;
}

T_CASE_ON(2, another_thread_finishes_tickets_while_calls_are_started)
{
    const t_case_t c = {
        .src = t_side("dp=2", true), .dst = t_side("cp=2", false), .shape = {2, 4, 3}};
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    const int64_t rank = colo_comm_rank(world);
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    for (int i = 0; i < 200; i++) { /* more than there are at a time */
        step_t step[2] = {{.ticket = NULL}};
        pthread_t thread;
        void *good = NULL;
        rank_try(start(bridge, &c, rank, true, i, &step[0]));
        rank_check(pthread_create(&thread, NULL, finish_elsewhere, &step[0].ticket) == 0);
        rank_try(start(bridge, &c, rank, false, i, &step[1]));
        rank_check(pthread_join(thread, &good) == 0 && good && !step[0].ticket);
        rank_try(t_case_compare(&c, T_Y, rank, i, &step[0].out));
        t_buffer_free(&step[0].in);
        t_buffer_free(&step[0].out);
        rank_try(finish(&c, rank, false, i, &step[1]));
    }
    return COLO_OK;
}

T_CASE_ON(4, one_rank_s_wrong_argument_reaches_the_others)
{
    const t_case_t c = the_case();
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    colo_ticket_t *none = NULL;
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    rank_check(colo_ticket_finish(NULL, NULL) == COLO_ERR_ARG &&
               colo_ticket_finish(&none, NULL) == COLO_ERR_ARG && says("ticket is NULL"));
    rank_check(colo_bridge_forward_start(NULL, NULL, NULL, NULL, &none) == COLO_ERR_ARG);
    rank_check(colo_bridge_backward_start(NULL, NULL, NULL, NULL, &none) == COLO_ERR_ARG);
    rank_check(colo_batch_forward_start(NULL, NULL, NULL, 1, NULL, &none) == COLO_ERR_ARG);
    rank_check(colo_batch_backward_start(NULL, NULL, NULL, 1, NULL, &none) == COLO_ERR_ARG);
    rank_try(colo_comm_barrier(world, NULL));
    if (colo_comm_rank(world) == 0) { /* others would wait for it: they are told */
        rank_fails(colo_bridge_forward_start(bridge, NULL, NULL, NULL, NULL), COLO_ERR_ARG,
                   "rank 0: ticket is NULL");
    } else {
        T_ENDS(t_buffer_free) t_buffer_t x = {0}, y = {0};
        rank_try(t_case_tensor(&c, T_X, colo_comm_rank(world), 0, true, &x));
        rank_try(t_case_tensor(&c, T_Y, colo_comm_rank(world), 0, false, &y));
        const colo_status_t st = colo_bridge_forward_start(bridge, &x.t, &y.t, NULL, &none);
        rank_check((st == COLO_ERR_PEER || st == COLO_OK) && (none == NULL) == (st < 0));
        rank_check(st < 0 || colo_ticket_finish(&none, NULL) == COLO_OK);
        rank_check(colo_comm_barrier(world, NULL) == COLO_ERR_PEER);
    }
    return COLO_OK;
}

T_MAIN("bridge/tickets")
