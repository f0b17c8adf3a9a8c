/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_stats.c - counters by kind and owner with bytes derived here, the ring of 256, and the dump
 * as JSON that another program can read, also while the comm is at work.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "core/error.h"

#include <jansson.h>
#include <locale.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- counters ---- */

struct tally {
    uint64_t ops, sent, recv;
};

static bool has(const colo_comm_stats_t *l, colo_op_kind_t kind, colo_category_t category,
                struct tally want)
{
    bool ok = l->ops[kind][category] == want.ops && l->sent_bytes[kind][category] == want.sent &&
              l->recv_bytes[kind][category] == want.recv;
    if (!ok)
        printf("%s/%s: %llu ops, %llu sent, %llu received; expected %llu, %llu, %llu\n",
               colo_op_name(kind), colo_category_name(category),
               (unsigned long long)l->ops[kind][category],
               (unsigned long long)l->sent_bytes[kind][category],
               (unsigned long long)l->recv_bytes[kind][category], (unsigned long long)want.ops,
               (unsigned long long)want.sent, (unsigned long long)want.recv);
    return ok;
}

static uint64_t total(const colo_comm_stats_t *l, int category)
{
    uint64_t n = 0;
    for (int k = 0; k < COLO_OP_COUNT; k++)
        for (int w = 0; w < COLO_CATEGORY_COUNT; w++)
            n += category < 0 || w == category ? l->ops[k][w] : 0;
    return n;
}

static colo_status_t count_rank(colo_comm_t *c, void *arg)
{
    int32_t n = colo_comm_size(c), me = colo_comm_rank(c), check = *(int32_t *)arg;
    float x[64] = {0}, y[64 * 8];
    colo_comm_stats_t l;
    rank_try(colo_comm_set_check(c, check));
    rank_try(colo_comm_all_gather(c, x, y, 10, COLO_F32, NULL));
    rank_try(colo_comm_all_gather(c, x, y, 3, COLO_I8, NULL));
    rank_try(colo_comm_all_reduce(c, x, y, 7, COLO_F32, COLO_REDOP_SUM, NULL));
    rank_try(colo_comm_reduce_scatter(c, y, x, 5, COLO_F64, COLO_REDOP_SUM, NULL));
    rank_try(colo_comm_broadcast(c, y, 9, COLO_I16, 1, NULL));
    rank_try(colo_comm_barrier(c, NULL));
    rank_try(colo_comm_barrier(c, NULL));
    /* to the right 6 elements in two boxes, to the left nothing */
    colo_box_t out[2] = {{x, {1, 2, 2}, {0, 2, 1}}, {x, {1, 1, 2}, {0, 0, 1}}};
    colo_box_t in[2] = {{y, {1, 2, 2}, {0, 2, 1}}, {y + 8, {1, 1, 2}, {0, 0, 1}}};
    colo_message_t send = {(me + 1) % n, 2, out}, recv = {(me + n - 1) % n, 2, in};
    rank_try(colo_comm_exchange(c, &send, 1, &recv, 1, COLO_F32, NULL));
    rank_try(colo_comm_all_gather_for(c, COLO_CATEGORY_LOSS, x, y, 4, COLO_F32, NULL));
    rank_try(
        colo_comm_all_reduce_for(c, COLO_CATEGORY_HEAD, x, y, 4, COLO_F32, COLO_REDOP_MAX, NULL));
    uint64_t seq;
    rank_try(colo_comm_exchange_begin(
        c, &(colo_exchange_t){.op = {COLO_OP_EXCHANGE, COLO_BF16, 0, 0, COLO_CATEGORY_BRIDGE}},
        NULL, &seq));
    rank_try(colo_comm_finish(c, seq, COLO_OK));
    colo_comm_t *child = NULL;
    rank_try(colo_comm_split_color_for(c, COLO_CATEGORY_BRIDGE, me, 0, &child));
    rank_check(child != NULL);
    colo_comm_destroy(&child);

    t_comm_stats(c, &l);
    uint64_t p = (uint64_t)n - 1, ring = 28 * 2 * p / (uint64_t)n, ring2 = 16 * 2 * p / (uint64_t)n;
    rank_check(has(&l, COLO_OP_ALL_GATHER, COLO_CATEGORY_USER, (struct tally){2, 43, 43 * p}));
    rank_check(has(&l, COLO_OP_ALL_REDUCE, COLO_CATEGORY_USER, (struct tally){1, ring, ring}));
    rank_check(
        has(&l, COLO_OP_REDUCE_SCATTER, COLO_CATEGORY_USER, (struct tally){1, 40 * p, 40 * p}));
    rank_check(has(&l, COLO_OP_BROADCAST, COLO_CATEGORY_USER,
                   me == 1 ? (struct tally){1, 18, 0} : (struct tally){1, 0, 18}));
    rank_check(has(&l, COLO_OP_BARRIER, COLO_CATEGORY_USER, (struct tally){2, 0, 0}));
    rank_check(has(&l, COLO_OP_EXCHANGE, COLO_CATEGORY_USER, (struct tally){1, 24, 24}));
    rank_check(has(&l, COLO_OP_ALL_GATHER, COLO_CATEGORY_LOSS, (struct tally){1, 16, 16 * p}));
    rank_check(has(&l, COLO_OP_ALL_REDUCE, COLO_CATEGORY_HEAD, (struct tally){1, ring2, ring2}));
    rank_check(has(&l, COLO_OP_EXCHANGE, COLO_CATEGORY_BRIDGE, (struct tally){1, 0, 0}));
    rank_check(has(&l, COLO_OP_SPLIT, COLO_CATEGORY_BRIDGE, (struct tally){1, 16, 16 * p}));
    /* from check 1 on, that all ranks made the split's child; fingerprints of check 2: one gather
     * per operation (11 without the split), two for an exchange */
    rank_check(total(&l, COLO_CATEGORY_CHECK) == (check == 2 ? 14u : (uint64_t)check));
    rank_check(total(&l, -1) - total(&l, COLO_CATEGORY_CHECK) == 12);

    colo_comm_stats_reset(c);
    t_comm_stats(c, &l);
    rank_check(total(&l, -1) == 0);
    return COLO_OK;
}

T_CASE(counters_are_exactly_what_was_called)
{
    for (int32_t check = 0; check <= 2; check++)
        for (int32_t n = 2; n <= 8; n += 3)
            assert_ok(colo_comm_threads_run(n, count_rank, &check));
}

T_CASE_ON_THREADS(4, a_split_by_dims_moves_nothing_but_its_agreement)
{
    colo_comm_stats_t l;
    colo_grid_t grid;
    rank_try(colo_grid_parse(&grid, "tp=2,dp=2", 4));
    for (int32_t check = 0; check <= 2; check++) {
        rank_try(colo_comm_set_check(world, check));
        rank_try(colo_comm_barrier(world, NULL));
        colo_comm_stats_reset(world);
        colo_comm_t *child = NULL;
        rank_try(colo_comm_split(world, &grid, "tp", &child));
        const uint64_t id = child->id; /* by which flight records tell comms apart */
        colo_comm_destroy(&child);
        t_comm_stats(world, &l);
        rank_check(has(&l, COLO_OP_SPLIT, COLO_CATEGORY_USER, (struct tally){1, 0, 0}));
        rank_check(total(&l, COLO_CATEGORY_CHECK) == (check > 0));
        rank_check(total(&l, -1) == 1u + (check > 0));
        uint64_t ids[4];
        rank_try(colo_comm_all_gather(world, &id, ids, 1, COLO_I64, NULL));
        rank_check(ids[0] == ids[1] && ids[2] == ids[3] && ids[0] != ids[2]);
    }
    return COLO_OK;
}

T_CASE(a_comm_of_one_counts_operations_without_bytes)
{
    colo_comm_t *c = NULL;
    colo_comm_stats_t l;
    float x[4] = {0};
    assert_ok(colo_comm_create_self(&c));
    assert_ok(colo_comm_all_gather(c, x, x, 4, COLO_F32, NULL));
    assert_ok(colo_comm_broadcast(c, x, 4, COLO_F32, 0, NULL));
    t_comm_stats(c, &l);
    assert_true(has(&l, COLO_OP_ALL_GATHER, COLO_CATEGORY_USER, (struct tally){1, 0, 0}));
    assert_true(has(&l, COLO_OP_BROADCAST, COLO_CATEGORY_USER, (struct tally){1, 0, 0}));
    colo_comm_destroy(&c);
    l.ops[0][0] = 77;
    assert_fails(colo_comm_stats(NULL, &l), COLO_ERR_ARG, "comm_stats: the comm is NULL");
    assert_int_equal(l.ops[0][0], 77);
    colo_comm_stats_reset(NULL);
}

T_CASE(names_are_known_and_foreign_numbers_are_not)
{
    static const char *const ops[] = {"all_gather", "all_reduce", "reduce_scatter", "broadcast",
                                      "barrier",    "exchange",   "split"};
    static const char *const categories[] = {"user", "bridge", "loss", "head", "check"};
    for (int i = 0; i < COLO_OP_COUNT; i++)
        assert_string_equal(colo_op_name((colo_op_kind_t)i), ops[i]);
    for (int i = 0; i < COLO_CATEGORY_COUNT; i++)
        assert_string_equal(colo_category_name((colo_category_t)i), categories[i]);
    assert_string_equal(colo_op_name((colo_op_kind_t)99), "?");
    assert_string_equal(colo_category_name((colo_category_t)-1), "?");
}

/* ---- the dump ---- */

static json_t *parse(const colo_comm_t *c)
{
    size_t need = colo_comm_dump(c, NULL, 0);
    char *text = malloc(need + 1);
    assert_int_equal(colo_comm_dump(c, text, need + 1), need);
    assert_int_equal(strlen(text), need);
    json_error_t error;
    json_t *j = json_loads(text, 0, &error);
    if (!j)
        fail_msg("%s at %d: %s", error.text, error.position, text);
    free(text);
    return j;
}

static int64_t integer(const json_t *j, const char *key)
{
    assert_true(json_is_integer(json_object_get(j, key)));
    return json_integer_value(json_object_get(j, key));
}

static const char *string(const json_t *j, const char *key)
{
    assert_true(json_is_string(json_object_get(j, key)));
    return json_string_value(json_object_get(j, key));
}

T_CASE(split_that_leaves_this_rank_out_has_no_peers)
{
    colo_comm_t *c = NULL, *child = NULL;
    colo_grid_t grid;
    assert_ok(colo_comm_create_self(&c));
    assert_ok(colo_grid_parse(&grid, "dp=1@1", 0));
    assert_ok(colo_comm_split(c, &grid, "dp", &child));
    assert_null(child);
    json_t *j = parse(c);
    assert_int_equal(integer(json_array_get(json_object_get(j, "ring"), 0), "peers"), 0);
    json_decref(j);
    colo_comm_destroy(&c);
}

T_CASE(the_ring_holds_the_last_256_operations)
{
    static const int counts[] = {0, 1, 255, 256, 257, 1000};
    for (size_t t = 0; t < sizeof counts / sizeof counts[0]; t++) {
        colo_comm_t *c = NULL;
        char x[1000];
        assert_ok(colo_comm_create_self(&c));
        for (int i = 1; i <= counts[t]; i++)
            assert_ok(i % 3 ? colo_comm_all_gather(c, x, x, i, COLO_U8, NULL)
                            : colo_comm_barrier(c, NULL));
        json_t *j = parse(c), *ring = json_object_get(j, "ring");
        int kept = counts[t] < 256 ? counts[t] : 256;
        assert_int_equal(json_array_size(ring), kept);
        double before = 0;
        for (int k = 0; k < kept; k++) {
            json_t *e = json_array_get(ring, (size_t)k);
            int seq = counts[t] - kept + 1 + k;
            assert_int_equal(integer(e, "seq"), seq);
            assert_string_equal(string(e, "op"), seq % 3 ? "all_gather" : "barrier");
            assert_string_equal(string(e, "category"), "user");
            assert_string_equal(string(e, "status"), "COLO_OK");
            if (seq % 3)
                assert_string_equal(string(e, "dtype"), "u8");
            double begin = json_number_value(json_object_get(e, "begin"));
            double end = json_number_value(json_object_get(e, "end"));
            assert_true(before <= begin && begin <= end);
            before = end;
        }
        assert_int_equal(integer(j, "seq"), counts[t]);
        assert_true(before <= json_number_value(json_object_get(j, "now")));
        json_decref(j);
        colo_comm_destroy(&c);
    }
}

struct record {
    char *text[3];
};

static colo_status_t dump_rank(colo_comm_t *c, void *arg)
{
    struct record *r = arg;
    int32_t me = colo_comm_rank(c);
    double x[6] = {0}, y[18];
    rank_try(colo_comm_all_gather(c, x, y, 6, COLO_F64, NULL));
    rank_try(colo_comm_set_timeout(c, 200));
    if (me == 1)
        while (colo_comm_check(c) == COLO_OK)
            usleep(500);
    else
        rank_check(colo_comm_all_reduce(c, x, x, 6, COLO_F64, COLO_REDOP_SUM, NULL) ==
                   COLO_ERR_TIMEOUT);
    colo_comm_set_name(c, "a \"name\"\\ \n\xc3\xa9");
    size_t need = colo_comm_dump(c, NULL, 0);
    r->text[me] = malloc(need + 1);
    rank_check(colo_comm_dump(c, r->text[me], need + 1) == need);
    return COLO_OK;
}

T_CASE(the_dump_of_a_dead_comm_tells_the_story)
{
    struct record r = {{NULL}};
    assert_ok(colo_comm_threads_run(3, dump_rank, &r));
    for (int me = 0; me < 3; me++) {
        json_error_t error;
        json_t *j = json_loads(r.text[me], 0, &error);
        if (!j)
            fail_msg("%s: %s", error.text, r.text[me]);
        assert_string_equal(string(j, "name"),
                            "a \"name\"\\ \n\xc3\x83\xc2\xa9"); /* bytes as Latin-1 */
        assert_string_equal(string(j, "backend"), "threads");
        assert_string_equal(string(j, "status"), "COLO_ERR_TIMEOUT");
        assert_non_null(strstr(string(j, "error"), "did not arrive within 200 ms"));
        assert_int_equal(integer(j, "rank"), me);
        assert_int_equal(integer(j, "size"), 3);
        assert_int_equal(integer(j, "world_rank"), me);
        assert_int_equal(json_array_size(json_object_get(j, "members")), 3);
        assert_int_equal(integer(j, "pid"), getpid());
        assert_int_equal(integer(j, "seq"), me == 1 ? 1 : 2);
        json_t *stats = json_object_get(j, "stats"), *ring = json_object_get(j, "ring");
        assert_int_equal(json_array_size(stats), 1); /* what failed is not counted */
        json_t *row = json_array_get(stats, 0);
        assert_string_equal(string(row, "op"), "all_gather");
        assert_string_equal(string(row, "category"), "user");
        assert_int_equal(integer(row, "ops"), 1);
        assert_int_equal(integer(row, "sent_bytes"), 48);
        assert_int_equal(integer(row, "recv_bytes"), 96);
        assert_int_equal(json_array_size(ring), me == 1 ? 1 : 2);
        if (me != 1) {
            json_t *last = json_array_get(ring, 1);
            assert_string_equal(string(last, "status"), "COLO_ERR_TIMEOUT");
            assert_int_equal(integer(last, "peers"), 2);
            assert_int_equal(integer(last, "sent_bytes"), 64); /* 48 * 2 * 2 / 3 */
        }
        json_decref(j);
        free(r.text[me]);
    }
}

/* A locale of glibc whose decimal point is a comma, and nothing else. */
static bool set_comma(const char *folder)
{
    static const unsigned char lc_numeric[] =
        "\x14\x11\x03\x20\6\0\0\0\x20\0\0\0\x22\0\0\0\x23\0\0\0"
        "\x24\0\0\0\x28\0\0\0\x2c\0\0\0,\0\0\0,\0\0\0.\0\0\0UTF-8";
    const char *dir = t_text("%s/comma", folder), *path = t_text("%s/LC_NUMERIC", dir);
    assert_int_equal(mkdir(dir, 0700), 0);
    FILE *f = fopen(path, "w");
    assert_true(f && fwrite(lc_numeric, sizeof lc_numeric, 1, f) == 1 && fclose(f) == 0);
    setenv("LOCPATH", folder, 1);
    const bool set = setlocale(LC_NUMERIC, "comma") != NULL;
    unsetenv("LOCPATH");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(dir), 0);
    return set;
}

T_CASE(numbers_have_a_point_in_each_locale)
{
    const char *folder = t_folder();
    char text[4096];
    colo_comm_t *c = NULL;
    assert_true(set_comma(folder));
    const char *number = t_text("%.1f", 0.5);
    assert_ok(colo_comm_create_self(&c));
    assert_ok(colo_comm_set_timeout(c, 1234));
    assert_ok(colo_comm_barrier(c, NULL));
    const size_t need = colo_comm_dump(c, text, sizeof text);
    const colo_status_t recorded = colo_comm_flight_record(c, t_text("%s/rank", folder));
    colo_comm_destroy(&c);
    setlocale(LC_NUMERIC, "C");
    assert_string_equal(number, "0,5");
    assert_true(need < sizeof text);
    json_t *doc = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    assert_true(json_number_value(json_object_get(doc, "now")) > 0);
    json_decref(doc);
    assert_int_equal(recorded, COLO_OK);
    const char *path = t_text("%s/rank0", folder);
    doc = json_load_file(path, JSON_REJECT_DUPLICATES, NULL);
    json_t *comm = json_array_get(json_object_get(doc, "comms"), 0);
    assert_true(json_number_value(json_object_get(comm, "now")) > 0);
    assert_int_equal(json_integer_value(json_object_get(comm, "timeout_ms")), 1234);
    json_decref(doc);
    assert_true(unlink(path) == 0 && rmdir(folder) == 0);
}

T_CASE(a_short_buffer_gets_the_beginning)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    assert_ok(colo_comm_create_self(&c));
    assert_ok(colo_comm_barrier(c, NULL));
    char whole[4096], part[4096];
    size_t need = colo_comm_dump(c, whole, sizeof whole);
    char *now = strstr(whole, "\"now\""); /* moves on; compare what lies before it */
    assert_non_null(now);
    for (size_t cap = 0; cap < need + 3; cap++) {
        memset(part, 'x', sizeof part);
        size_t again = colo_comm_dump(c, part, cap);
        assert_true(again + 8 > need && again < need + 8);
        if (cap == 0) {
            assert_int_equal(part[0], 'x');
            continue;
        }
        size_t len = strlen(part), same = (size_t)(now - whole);
        assert_int_equal(len, cap - 1 < again ? cap - 1 : again);
        assert_memory_equal(part, whole, len < same ? len : same);
        assert_int_equal(part[cap], 'x');
    }
    assert_int_equal(colo_comm_dump(NULL, part, sizeof part), 4);
    assert_string_equal(part, "null");
}

/* ---- dump while it runs ---- */

struct watch {
    colo_comm_t *comm;
    _Atomic int stop, dumps;
    int bad;
};

static void *watcher(void *arg)
{
    struct watch *w = arg;
    char text[80000];
    while (!atomic_load(&w->stop)) {
        colo_comm_stats_t l;
        size_t need = colo_comm_dump(w->comm, text, sizeof text);
        json_error_t error;
        json_t *j = json_loads(text, 0, &error);
        w->bad += need >= sizeof text || !j;
        json_decref(j);
        t_comm_stats(w->comm, &l);
        w->dumps++;
        usleep(200);
    }
    return NULL;
}

T_CASE_ON_THREADS(3, other_threads_may_dump_at_any_time)
{
    struct watch w = {.comm = world};
    pthread_t thread;
    rank_check(pthread_create(&thread, NULL, watcher, &w) == 0);
    colo_status_t st = COLO_OK;
    enum { DUMPS = 20 };
    int64_t x[2] = {0}; /* ranks, and those whose thread has dumped less than this */
    int wrong = 0;
    for (int i = 0; (i <= COLO_RECORDS || x[1] > 0) && st == COLO_OK; i++) { /* round the ring */
        x[0] = 1;
        x[1] = atomic_load(&w.dumps) < DUMPS;
        st = colo_comm_all_reduce(world, x, x, 2, COLO_I64, COLO_REDOP_SUM, NULL);
        wrong += x[0] != colo_comm_size(world);
        if (i % 100 == 0)
            colo_comm_set_name(world, i % 200 ? "odd" : "even");
    }
    atomic_store(&w.stop, 1);
    pthread_join(thread, NULL);
    rank_try(st);
    rank_check(wrong == 0 && w.bad == 0 && w.dumps >= DUMPS);
    return COLO_OK;
}

static void *dump_hung(void *arg)
{
    struct watch *w = arg;
    char text[4096];
    do { /* until the barrier below is on record */
        usleep(500);
        colo_comm_dump(w->comm, text, sizeof text);
    } while (!strstr(text, "COLO_PENDING"));
    json_t *j = json_loads(text, 0, NULL);
    json_t *last = json_array_get(json_object_get(j, "ring"), 0);
    w->bad = !last || !json_is_null(json_object_get(last, "end")) ||
             strcmp(json_string_value(json_object_get(last, "op")), "barrier") != 0;
    json_decref(j);
    colo_comm_abort(w->comm, "seen enough");
    return NULL;
}

T_CASE_ON_THREADS(2, an_operation_that_hangs_is_in_the_dump_as_pending)
{
    if (colo_comm_rank(world) == 1) {
        while (colo_comm_check(world) == COLO_OK)
            usleep(500);
        return COLO_OK;
    }
    struct watch w = {.comm = world, .bad = 1};
    pthread_t thread;
    rank_check(pthread_create(&thread, NULL, dump_hung, &w) == 0);
    colo_status_t st = colo_comm_barrier(world, NULL);
    pthread_join(thread, NULL);
    rank_check(st == COLO_ERR_ABORTED && w.bad == 0);
    return COLO_OK;
}

T_MAIN("comm/stats")
