/* SPDX-License-Identifier: Apache-2.0 */
/*
 * harness.h - what every CMocka program here includes: the order cmocka.h wants, assertions on a
 * status with its error message, a seeded generator that prints its seed.
 */
#ifndef TESTS_HARNESS_HARNESS_H
#define TESTS_HARNESS_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <colobridge.h>

#include "harness/ranks.h"
#include "harness/structs.h"

#define T_EXIT_SKIP 77

/* T_CASE(name) { ... } is a test case. T_MAIN, or t_main() where there is more to do, runs those of
 * the file in their order, or those whose names match the pattern T_CASES (*, ?) of the
 * environment;
 * @name is that of the suite and of the program. */
#define T_CASE(name) T_CASE_IF(true, name)
/* One where @cond is true when the program starts */
#define T_CASE_IF(cond, name)                                       \
    static void name(void **state);                                 \
    __attribute__((constructor)) static void t_case_of_##name(void) \
    {                                                               \
        if (cond)                                                   \
            t_add_case(#name, name);                                \
    }                                                               \
    static void name(void **state __attribute__((unused)))
/* A case whose body runs on each of @n ranks, of comm @world; it returns COLO_OK or its error. On
 * threads alone: ranks that share what the file has. */
#define T_CASE_ON(n, name) \
    T_CASE_BY(t_run_ranks(n, t_ranks_of_##name, NULL, 0), name, colo_comm_t *world)
#define T_CASE_ON_THREADS(n, name) \
    T_CASE_BY(colo_comm_threads_run(n, t_ranks_of_##name, NULL), name, colo_comm_t *world)
/* ... on 1, 2, 3 and 8 ranks, one after the other. */
#define T_CASE_ON_SIZES(name) \
    T_CASE_BY(t_run_sizes(t_ranks_of_##name, NULL), name, colo_comm_t *world)
/* ... once for each of the values, as @var of @type. */
#define T_CASE_FOR(n, name, type, var, ...)                                                   \
    T_CASE_FOR_BY(t_run_ranks(n, t_ranks_of_##name, t_one_, sizeof *t_one_), name, type, var, \
                  world, __VA_ARGS__)
/* @run: with *t_one_, of comm @comm */
#define T_CASE_FOR_BY(run, name, type, var, comm, ...)                         \
    static colo_status_t t_body_of_##name(colo_comm_t *comm, type var);        \
    static colo_status_t t_ranks_of_##name(colo_comm_t *comm, void *arg)       \
    {                                                                          \
        return t_body_of_##name(comm, *(type *)arg);                           \
    }                                                                          \
    T_CASE(name)                                                               \
    {                                                                          \
        type t_of_[] = {__VA_ARGS__};                                          \
        for (size_t t_i_ = 0; t_i_ < sizeof t_of_ / sizeof t_of_[0]; t_i_++) { \
            type *t_one_ = &t_of_[t_i_];                                       \
            if ((run) < 0)                                                     \
                fail_msg(#var " %zu: %s", t_i_, colo_last_error());            \
        }                                                                      \
    }                                                                          \
    static colo_status_t t_body_of_##name(colo_comm_t *comm, type var)
#define T_CASE_BY(run, name, rank)                           \
    static colo_status_t t_ranks_of_##name(rank, void *arg); \
    T_CASE(name)                                             \
    {                                                        \
        assert_ok(run);                                      \
    }                                                        \
    static colo_status_t t_ranks_of_##name(rank, void *arg)
#define T_MAIN(name) T_MAIN_IF(0, name)
/* @need is 0, or what main() returns at once; T_MAIN_AFTER: else @first comes first. */
#define T_MAIN_IF(need, name) T_MAIN_AFTER(need, (void)0, name)
#define T_MAIN_AFTER(need, first, name) T_MAIN_BY(need, first, t_main(name))
/* With what CMocka calls before and after: all cases, or each; NULL: nothing. */
#define T_MAIN_AROUND(name, setup, teardown) \
    T_MAIN_BY(0, (void)0, t_main_around(name, setup, teardown))
#define T_MAIN_EACH(name, setup, teardown) T_MAIN_BY(0, (void)0, t_main_each(name, setup, teardown))
#define T_MAIN_BY(need, first, run) \
    int main(void)                  \
    {                               \
        int t_rc_ = (need);         \
        if (t_rc_)                  \
            return t_rc_;           \
        first;                      \
        return run;                 \
    }
void t_add_case(const char *name, void (*run)(void **state));
int t_main(const char *name);
int t_main_around(const char *name, int (*setup)(void **state), int (*teardown)(void **state));
int t_main_each(const char *name, int (*setup)(void **state), int (*teardown)(void **state));

/* A status is OK; the failure shows its name and error message. */
#define assert_ok(expr)                                                                \
    do {                                                                               \
        colo_status_t t_st_ = (expr);                                                  \
        if (t_st_ != COLO_OK)                                                          \
            fail_msg("%s: %s: %s", #expr, colo_status_name(t_st_), colo_last_error()); \
    } while (0)

/* A status is exactly this error, and its error message contains @text. */
#define assert_fails(expr, want, text)                                                           \
    do {                                                                                         \
        colo_status_t t_st_ = (expr);                                                            \
        if (t_st_ != (want))                                                                     \
            fail_msg("%s: %s, expected %s (%s)", #expr, colo_status_name(t_st_),                 \
                     colo_status_name(want), colo_last_error());                                 \
        if (!strstr(colo_last_error(), (text)))                                                  \
            fail_msg("%s: error message \"%s\" lacks \"%s\"", #expr, colo_last_error(), (text)); \
    } while (0)

/* Is @word in the calling thread's error message? */
static inline bool says(const char *word)
{
    return strstr(colo_last_error(), word) != NULL;
}

/* Inside rank functions (threads): CMocka's longjmp must stay on the main thread, so return
 * instead. */
#define rank_check(cond)                                   \
    do {                                                   \
        if (!(cond))                                       \
            return t_rank_fail(__FILE__, __LINE__, #cond); \
    } while (0)
/* assert_fails() there */
#define rank_fails(expr, want, text)                                             \
    do {                                                                         \
        const colo_status_t t_st_ = (expr);                                      \
        if (t_st_ != (want) || !says(text))                                      \
            return t_rank_fail_otherwise(__FILE__, __LINE__, t_st_, want, text); \
    } while (0)
#define rank_try(expr)                \
    do {                              \
        colo_status_t t_st_ = (expr); \
        if (t_st_ < 0)                \
            return t_st_;             \
    } while (0)
colo_status_t t_rank_fail(const char *file, int line,
                          const char *what); /* COLO_ERR_STATE with the place */
colo_status_t t_rank_fail_otherwise(const char *file, int line, colo_status_t got,
                                    colo_status_t want, const char *text);
/* A variable of a rank function that @end ends with its scope, however that is left:
 * T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL; */
#define T_ENDS(end) __attribute__((cleanup(end)))

/* What printf() would print, of at most 1023 characters; the calling thread's, until it has made
 * seven more. */
const char *t_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A new folder below TMPDIR, or /tmp. The case empties and removes it; where a mutant keeps it from
 * that, must-fail.py does. The path is kept until the next call. */
const char *t_folder(void);

/* What the log said: colo_log_set(t_keep_line, &lines, LEVEL) */
typedef struct t_lines {
    int count;
    colo_log_level_t level; /* of the last one */
    char last[1100];
} t_lines_t;
void t_keep_line(colo_log_level_t level, const char *line, void *lines);

/* A comm of one rank, which the program keeps: for calls that leave it as it is */
colo_comm_t *t_self(void);

/* What a member that is a tensor points to until the block ends; NULL if there is no memory. */
static inline const colo_tensor_t *t_given(colo_tensor_t *at, colo_tensor_t tensor)
{
    *at = tensor;
    return tensor.data ? at : NULL;
}
#define T_GIVEN(tensor) t_given((colo_tensor_t[1]){{.data = NULL}}, tensor)

/* The usual layouts on grids as colo_grid_parse() reads them, in a world of any size */
colo_status_t t_layout_of(const char *grid, bool is_src, colo_layout_t *layout);
colo_status_t t_layouts(const char *from, const char *to, colo_layout_t *src, colo_layout_t *dst);
/* A config @name between them, with its other members; of a bridge, in a rank. */
#define T_PLAN_CONFIG(name, from, to, ...) \
    T_CONFIG_BY(assert_ok, colo_plan_config_t, name, from, to, __VA_ARGS__)
#define T_BRIDGE_CONFIG(name, from, to, ...) \
    T_CONFIG_BY(rank_try, colo_bridge_config_t, name, from, to, __VA_ARGS__)
#define T_CONFIG_BY(check, type, name, from, to, ...)               \
    colo_layout_t t_src_of_##name, t_dst_of_##name;                 \
    check(t_layouts(from, to, &t_src_of_##name, &t_dst_of_##name)); \
    type name = {                                                   \
        .struct_size = sizeof name, .src = &t_src_of_##name, .dst = &t_dst_of_##name, __VA_ARGS__}

/* A tensor of host memory for one call: its data, dtype and extents */
#define T_SHAPE(...)                                             \
    (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / 8), (int64_t[]) \
    {                                                            \
        __VA_ARGS__                                              \
    }
#define T_TENSOR(data, dtype, ...) \
    ((const colo_tensor_t[]){colo_tensor_host(data, dtype, T_SHAPE(__VA_ARGS__))})
#define T_CUDA_TENSOR(data, dtype, device, ...) \
    ((const colo_tensor_t[]){colo_tensor_cuda(data, dtype, device, T_SHAPE(__VA_ARGS__))})

/* What a size query gives for so many bytes */
static inline size_t t_rounded(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Workspace or saved memory of exactly @bytes, for free(); NULL without memory */
static inline void *t_aligned(size_t bytes)
{
    void *p = NULL;
    return posix_memalign(&p, COLO_ALIGNMENT, bytes) == 0 ? p : NULL;
}

/* splitmix64: state in, number out; the same on every machine */
static inline uint64_t t_rand(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}
static inline int64_t t_below(uint64_t *state, int64_t n)
{
    return (int64_t)(t_rand(state) % (uint64_t)n);
}
static inline int64_t t_pick(uint64_t *state, int64_t lo, int64_t hi) /* both included */
{
    return lo + t_below(state, hi - lo + 1);
}
static inline bool t_chance(uint64_t *state, int percent)
{
    return t_below(state, 100) < percent;
}
static inline double t_uniform(uint64_t *state) /* [0, 1) */
{
    return (double)(t_rand(state) >> 11) * 0x1p-53;
}
uint64_t t_seed(void); /* T_SEED from the environment, else fixed; printed once */

/* The deadline, in ms, of a wait that must end long before it: COLO_TIMEOUT_MS, which is short
 * where a planted bug may make it the end of the wait, else 20 s. */
int64_t t_long_wait(void);

/* Does @run return within a second of processor time? In a child process, where it may crash or
 * never end. */
bool t_returns(void (*run)(void));

/* @count random cases, or T_SCALE percent of them (at least 1): sanitizer reruns ask for fewer */
int64_t t_scaled(int64_t count);
/* Is case number @nth of an exhaustive list one that T_SCALE leaves out? Never number 0. The rest
 * is spread over odd and even numbers, by which lists take turns. */
bool t_left_out(int64_t nth);
/* The same of a case of nested loops: {place, places} of each, at most 8. What is left has any
 * place of a loop together with any place of each other loop, though T_SCALE asks for fewer. */
typedef struct t_loop {
    int64_t place, places;
} t_loop_t;
#define T_LEFT_OUT(...)                            \
    t_left_out_of((const t_loop_t[]){__VA_ARGS__}, \
                  (int)(sizeof((const t_loop_t[]){__VA_ARGS__}) / sizeof(t_loop_t)))
bool t_left_out_of(const t_loop_t *loops, int n);

#endif
