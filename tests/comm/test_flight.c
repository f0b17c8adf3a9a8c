/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_flight.c - flight records: whose operations they number, what is said of a file that cannot
 * be written, a file system that hangs.
 */
#include "harness/harness.h"

#include "core/error.h"

#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static json_int_t integer(const json_t *object, const char *key)
{
    return json_integer_value(json_object_get(object, key));
}

struct flight {
    const char *prefix;
    char text[2][1 << 16];
};

static colo_status_t fly(colo_comm_t *c, void *arg)
{
    struct flight *f = arg;
    const int32_t me = colo_comm_rank(c);
    colo_comm_t *child = NULL;
    double x[4] = {0}, y[8];
    rank_try(colo_comm_split_color(c, 0, me, &child)); /* an all_gather of the world */
    for (int i = 0; i < 5; i++)
        rank_try(colo_comm_all_gather(child, x, y, 4, COLO_F64, NULL));
    rank_try(colo_comm_barrier(c, NULL));
    for (int k = 0; k < 2; k++) {
        rank_try(colo_comm_flight_record(c, f->prefix));
        if (me == 0) {
            FILE *file = fopen(t_text("%s0", f->prefix), "r");
            rank_check(file && fread(f->text[k], 1, sizeof f->text[k] - 1, file) > 0);
            fclose(file);
        }
        colo_comm_destroy(&child);
    }
    rank_check(unlink(t_text("%s%d", f->prefix, (int)me)) == 0);
    return COLO_OK;
}

T_CASE(the_flight_record_numbers_operations_of_all_comms)
{
    static struct flight f;
    const char *folder = t_folder();
    f.prefix = t_text("%s/rank", folder);
    assert_ok(colo_comm_threads_run(2, fly, &f));
    assert_int_equal(rmdir(folder), 0);
    json_t *record[2], *comms[2], *ring;
    for (int k = 0; k < 2; k++) {
        record[k] = json_loads(f.text[k], JSON_REJECT_DUPLICATES, NULL);
        comms[k] = json_object_get(record[k], "comms");
        assert_int_equal(json_array_size(comms[k]), 2 - k);
    }
    assert_int_equal(integer(record[0], "ended"), 0);
    json_t *world = json_array_get(comms[0], 0), *child = json_array_get(comms[0], 1);
    assert_string_equal(json_string_value(json_object_get(world, "status")), "COLO_OK");
    assert_null(json_object_get(child, "status")); /* asked of the comm of the call only */
    assert_string_not_equal(json_string_value(json_object_get(world, "id")),
                            json_string_value(json_object_get(child, "id")));
    assert_int_equal(json_array_size(json_object_get(child, "members")), 2);
    ring = json_object_get(child, "ring");
    assert_int_equal(integer(child, "seq"), 5);
    assert_int_equal(json_array_size(ring), 5);
    assert_int_equal(integer(json_array_get(ring, 4), "count"), 4);
    /* the child's five are gone, but still counted */
    assert_int_equal(integer(record[1], "ended"), 5);
    assert_int_equal(integer(json_array_get(comms[1], 0), "seq"), integer(world, "seq"));
    json_decref(record[0]);
    json_decref(record[1]);
}

/* Of four comms, each with all that is kept of it: several times the memory of a short record. */
T_CASE(a_flight_record_of_many_operations_is_whole)
{
    enum { COMMS = 4, KEPT = 256 };
    colo_comm_t *c[COMMS];
    const char *folder = t_folder(), *path = t_text("%s/rank0", folder);
    assert_ok(colo_comm_create_self(&c[0]));
    for (int k = 1; k < COMMS; k++)
        assert_ok(colo_comm_split_color(c[0], 0, 0, &c[k]));
    for (int k = 0; k < COMMS; k++)
        for (int i = 0; i < KEPT; i++)
            assert_ok(colo_comm_barrier(c[k], NULL));
    assert_ok(colo_comm_flight_record(c[0], t_text("%s/rank", folder)));
    json_t *record = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
    assert_true(unlink(path) == 0 && rmdir(folder) == 0);
    json_t *comms = json_object_get(record, "comms");
    assert_int_equal(json_array_size(comms), COMMS);
    for (int k = 0; k < COMMS; k++)
        assert_int_equal(json_array_size(json_object_get(json_array_get(comms, (size_t)k), "ring")),
                         KEPT);
    json_decref(record);
    for (int k = COMMS - 1; k >= 0; k--)
        colo_comm_destroy(&c[k]);
}

static volatile sig_atomic_t signals;

T_CASE(a_flight_record_that_cannot_be_written_says_why)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    assert_ok(colo_comm_create_self(&c));
    assert_fails(colo_comm_flight_record(c, "/nowhere/at/all/rank"), COLO_ERR_IO,
                 "/nowhere/at/all/rank0");
    assert_fails(colo_comm_flight_record(c, ""), COLO_ERR_ARG, "no prefix");
}

/* Another user can leave a link in a folder of all, and know the name beforehand. */
T_CASE(flight_record_follows_no_link_where_it_is_written)
{
    const char *folder = t_folder(), *prefix = t_text("%s/rank", folder),
               *other = t_text("%s/other", folder), *record = t_text("%s0", prefix),
               *part = t_text("%s.%d.part", record, (int)getpid());
    char word[8] = "";
    colo_comm_t *c = NULL;
    FILE *f = fopen(other, "w");
    assert_true(f && fputs("theirs", f) >= 0 && fclose(f) == 0);
    assert_int_equal(symlink(other, part), 0);
    assert_ok(colo_comm_create_self(&c));
    assert_ok(colo_comm_flight_record(c, prefix));
    colo_comm_destroy(&c);
    f = fopen(other, "r");
    assert_true(f && fgets(word, sizeof word, f) && fclose(f) == 0);
    assert_string_equal(word, "theirs");
    assert_true(unlink(record) == 0 && unlink(other) == 0 && rmdir(folder) == 0);
}

T_CASE(a_flight_record_that_finds_a_full_disk_leaves_no_descriptor_open)
{
    const int before = dup(2); /* the lowest number that is free */
    const char *folder = t_folder();
    struct rlimit was;
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    close(before);
    assert_ok(colo_comm_create_self(&c));
    for (int i = 0; i < 64; i++) /* more than stdio's buffer holds */
        assert_ok(colo_comm_barrier(c, NULL));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &(struct rlimit){100, was.rlim_max}), 0);
    const colo_status_t st = colo_comm_flight_record(c, t_text("%s/rank", folder));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(st, COLO_ERR_IO);
    const int after = dup(2);
    close(after);
    assert_int_equal(after, before);
    assert_int_equal(rmdir(folder), 0); /* and no file, and the program was not killed */
}

static void count_signal(int number)
{
    (void)number;
    signals++;
}

T_CASE(a_flight_record_that_is_too_large_raises_no_signal_and_takes_none)
{
    const char *folder = t_folder();
    struct rlimit was;
    sigset_t pipe, pending;
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    signal(SIGXFSZ, count_signal);
    signal(SIGPIPE, count_signal);
    pthread_sigmask(SIG_BLOCK, &pipe, NULL);
    raise(SIGPIPE); /* the program's own, which waits */
    assert_ok(colo_comm_create_self(&c));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &(struct rlimit){100, was.rlim_max}), 0);
    const colo_status_t st = colo_comm_flight_record(c, t_text("%s/rank", folder));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_fails(st, COLO_ERR_IO, "File too large");
    assert_int_equal(signals, 0);
    assert_true(sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1);
    pthread_sigmask(SIG_UNBLOCK, &pipe, NULL);
    assert_int_equal(signals, 1);
    raise(SIGXFSZ); /* as before, it is not blocked */
    assert_int_equal(signals, 2);
    signal(SIGXFSZ, SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    assert_int_equal(rmdir(folder), 0);
}

/* The rank that ends the job knows most of it: aborts, or comes back with an error. */
static colo_status_t end_the_job(colo_comm_t *c, void *arg)
{
    rank_try(colo_comm_barrier(c, NULL));
    if (colo_comm_rank(c) == 1 && *(bool *)arg)
        return colo_fail(COLO_ERR_IO, "no more data");
    if (colo_comm_rank(c) == 1)
        colo_comm_abort(c, "no more data");
    else
        rank_check(colo_comm_barrier(c, NULL) < 0);
    return COLO_OK;
}

T_CASE(a_rank_that_ends_the_job_leaves_a_flight_record_too)
{
    const char *folder = t_folder();
    assert_int_equal(setenv("COLO_FLIGHT_RECORDER", t_text("%s/rank", folder), 1), 0);
    for (int fails = 0; fails < 2; fails++) {
        bool arg = fails;
        assert_int_equal(colo_comm_threads_run(3, end_the_job, &arg),
                         fails ? COLO_ERR_IO : COLO_OK);
        for (int r = 0; r < 3; r++) {
            const char *path = t_text("%s/rank%d", folder, r);
            json_t *record = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
            json_t *world = json_array_get(json_object_get(record, "comms"), 0);
            const char *why = json_string_value(json_object_get(world, "error"));
            assert_true(why && strstr(why, "no more data"));
            json_decref(record);
            assert_int_equal(unlink(path), 0);
        }
    }
    assert_int_equal(unsetenv("COLO_FLIGHT_RECORDER"), 0);
    assert_int_equal(rmdir(folder), 0);
}

/* One record is written of a world; a comm that asks for none leaves it to the next that fails. */
T_CASE(a_comm_without_a_flight_recorder_takes_no_record_from_another)
{
    const char *folder = t_folder(), *prefix = t_text("%s/rank", folder);
    const colo_comm_config_t config = {COLO_COMM_CONFIG_INIT, .flight_recorder = prefix};
    T_ENDS(colo_comm_destroy) colo_comm_t *world = NULL;
    T_ENDS(colo_comm_destroy) colo_comm_t *without = NULL;
    T_ENDS(colo_comm_destroy) colo_comm_t *with = NULL;
    assert_ok(colo_comm_create_self(&world));
    assert_ok(colo_comm_split_color(world, 0, 0, &without));
    assert_ok(colo_comm_split_color(world, 0, 0, &with));
    assert_ok(colo_comm_configure(with, &config));
    colo_comm_abort(without, "first");
    assert_int_equal(rmdir(folder), 0); /* no file */
    assert_int_equal(mkdir(folder, 0700), 0);
    colo_comm_abort(with, "second");
    assert_true(unlink(t_text("%s0", prefix)) == 0 && rmdir(folder) == 0);
}

/* A file system that hangs, for ten seconds at most: then what waits for it shows. */
static atomic_bool hangs, goes_on;

int rename(const char *from, const char *to)
{
    for (int ms = 0; hangs && !goes_on && ms < 10000; ms++)
        usleep(1000);
    hangs = false;
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}

struct recorder {
    colo_comm_t *comm;
    const char *prefix;
    colo_status_t status;
};

static void *record(void *arg)
{
    struct recorder *r = arg;
    r->status = colo_comm_flight_record(r->comm, r->prefix);
    return NULL;
}

T_CASE(a_file_system_that_hangs_keeps_no_communicator_from_being_made)
{
    const char *folder = t_folder();
    struct recorder r = {.prefix = t_text("%s/rank", folder), .status = COLO_ERR_STATE};
    pthread_t thread;
    colo_comm_t *other;
    assert_ok(colo_comm_create_self(&r.comm));
    hangs = true;
    goes_on = false;
    assert_int_equal(pthread_create(&thread, NULL, record, &r), 0);
    const char *path = t_text("%s0.%d.part", r.prefix, (int)getpid());
    while (access(path, F_OK) != 0)
        usleep(100);
    assert_ok(colo_comm_create_self(&other));
    colo_comm_destroy(&other);
    const bool still = hangs;
    goes_on = true;
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(still);
    assert_ok(r.status);
    colo_comm_destroy(&r.comm);
    assert_true(unlink(t_text("%s0", r.prefix)) == 0 && rmdir(folder) == 0);
}

T_MAIN("comm/flight")
