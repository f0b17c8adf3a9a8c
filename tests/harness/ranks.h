/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks.h - the same rank functions on threads or on forked processes.
 *
 * T_RANKS says which: threads (default); sockets; ucx; mixed, which is two nodes with Unix sockets
 * inside and UCX between. Rank functions write what they saw into @arg, each rank its own part; on
 * processes those bytes are brought together afterwards, so that the judge sees what it would have
 * seen on threads. What @arg points to is not brought along unless it was named by t_share().
 */
#ifndef TESTS_HARNESS_RANKS_H
#define TESTS_HARNESS_RANKS_H

#include <colobridge.h>

#ifdef T_COVERAGE /* a rank that ends by _exit() keeps no counts by itself */
#include <unistd.h>
void __gcov_dump(void);
#define _exit(status) (__gcov_dump(), _exit(status))
#endif

/* As colo_comm_threads_run(); @arg has @bytes. */
colo_status_t t_run_ranks(int32_t nranks, colo_rank_fn fn, void *arg, size_t bytes);
/* The same on 1, 2, 3 and 8 ranks, one after the other; they only read @arg. */
colo_status_t t_run_sizes(colo_rank_fn fn, void *arg);

/*
 * The same for cases that come in large numbers, on T_LATER_RANKS ranks at most: many of them run
 * one after another in one world, because a world of processes costs more than a case. @arg and
 * what is shared live until @after, which gets the status of that world. A world runs when it has
 * enough cases; t_run_rest() runs the rest, and the program fails if that was forgotten.
 */
enum { T_LATER_RANKS = 12 };
void t_run_later(int32_t nranks, colo_rank_fn fn, void *arg, size_t bytes,
                 void (*after)(void *arg, colo_status_t st));
void t_run_rest(void);

/* Memory that rank functions write, too; until t_unshare(). */
void t_share(void *data, size_t bytes);
void t_unshare(void *data);

bool t_ranks_are_threads(void);

/* In a CMocka test that needs shared memory or threads. */
#define T_THREADS_ONLY()            \
    do {                            \
        if (!t_ranks_are_threads()) \
            skip();                 \
    } while (0)

#endif
