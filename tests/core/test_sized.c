/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sized.c - structs of programs that were compiled with another version of the headers. A
 * shorter struct is served and its missing members take their defaults; a longer one is refused.
 *
 * Each struct is given with every size from 0 to some more than its own. Bytes behind the size are
 * 0xff, which no call would take for a default, and none is written.
 */
#include "loss/loss_alone.h"

#include "core/hash.h"
#include "loss/linear/head.h"
#include "loss/linear/workspace.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MORE = 24, LONGEST = 512, LONGEST_OUTPUT = 4096 };

#define UP_TO(struct_, member) offsetof(__typeof__(struct_), member)

/* ---- what a call makes of a struct: a status, and a number that depends on its members ---- */

static colo_layout_t src, dst;

static colo_status_t hash_of(colo_status_t st, colo_plan_t *plan, int64_t *result)
{
    *result = st == COLO_OK ? (int64_t)colo_plan_hash(plan) : 0;
    colo_plan_destroy(&plan);
    return st;
}

static colo_status_t use_plan(const void *config, int64_t *result)
{
    colo_plan_t *plan = NULL;
    const colo_status_t st = colo_plan_create(&plan, config, 0);
    return hash_of(st, plan, result);
}

static colo_status_t use_collective(const void *config, int64_t *result)
{
    *result = 0;
    return colo_plan_collective_check(config);
}

static colo_status_t use_ragged(const void *config, int64_t *result)
{
    const colo_segments_t none = {COLO_SEGMENTS_INIT};
    colo_plan_t *plan = NULL;
    const colo_status_t st = colo_plan_create_ragged(&plan, config, &none, 0);
    return hash_of(st, plan, result);
}

static colo_status_t use_packed(const void *config, int64_t *result)
{
    const colo_packing_t none = {COLO_PACKING_INIT};
    colo_plan_t *plan = NULL;
    const colo_status_t st = colo_plan_create_packed(&plan, config, &none, &none, 0);
    return hash_of(st, plan, result);
}

static colo_status_t use_bridge(const void *config, int64_t *result)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    colo_status_t st = colo_bridge_create(&bridge, config, t_self());
    *result = st == COLO_OK ? (int64_t)colo_plan_hash(colo_bridge_plan(bridge)) : 0;
    return st;
}

static colo_status_t use_place(const void *config, int64_t *result)
{
    T_ENDS(colo_topology_destroy) colo_topology_t *place = NULL;
    colo_topology_spot_t spot = {COLO_TOPOLOGY_SPOT_INIT};
    colo_status_t st = colo_topology_create(&place, config);
    if (st == COLO_OK)
        assert_ok(colo_topology_spot(place, 3, &spot));
    *result = spot.host * 100 + spot.core;
    return st;
}

static colo_status_t use_lm_head(const void *config, int64_t *result)
{
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_status_t st = colo_lm_head_create(&head, config, NULL);
    const colo_lm_head_config_t *c = colo_lm_head_config(head);
    *result = c ? (int64_t)c->struct_size + c->mem * 1000 + c->device * 10000 + c->has_bias : 0;
    return st;
}

/* @saved_bytes of its saved struct; 0: it has none */
static colo_status_t use_loss(loss_t loss, const void *config, size_t saved_bytes, int64_t *result)
{
    static _Alignas(16) unsigned char saved[3 * LONGEST];
    size_t bytes[2] = {0};
    alone_t a;
    alone_init(&a, loss);
    a.out = (colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .logp = &a.of_logp};
    a.arg.config = config;
    a.arg.saved = memset(saved, 0xff, sizeof saved);
    memcpy(saved, &saved_bytes, sizeof saved_bytes);
    colo_status_t st = alone_workspace_size(&a, COLO_F32, 1000, 2, &bytes[0]);
    if (st == COLO_OK && saved_bytes)
        st = alone_saved_size(&a, COLO_F32, 1000, &bytes[1]);
    if (st == COLO_OK)
        st = alone_forward(&a);
    if (st == COLO_OK && saved_bytes) {
        for (size_t i = saved_bytes; i < sizeof saved; i++)
            assert_int_equal(saved[i], 0xff);
        st = alone_backward(&a);
    }
    uint64_t hash = colo_hash_bytes(COLO_HASH_INIT, bytes, sizeof bytes);
    hash = colo_hash_bytes(hash, a.logp, sizeof a.logp);
    hash = colo_hash_bytes(hash, a.kl, sizeof a.kl);
    *result = (int64_t)colo_hash_bytes(hash, a.dz, sizeof a.dz);
    return st;
}

static colo_status_t use_logprob(const void *config, int64_t *result)
{
    const colo_status_t st = colo_logprob_config_check(config);
    return st < 0 ? st : use_loss(LOGPROB, config, sizeof(colo_logprob_saved_t), result);
}

static colo_status_t use_topk(const void *config, int64_t *result)
{
    const colo_status_t st = colo_topk_config_check(config);
    return st < 0 ? st : use_loss(GIVEN, config, sizeof(colo_topk_saved_t), result);
}

static colo_status_t use_distill(const void *config, int64_t *result)
{
    const colo_status_t st = colo_distill_config_check(config);
    return st < 0 ? st : use_loss(DISTILL, config, sizeof(colo_distill_saved_t), result);
}

static colo_status_t use_sampling(const void *config, int64_t *result) /* saves nothing */
{
    const colo_status_t st = colo_sampling_config_check(config);
    return st < 0 ? st : use_loss(SAMPLING, config, 0, result);
}

static colo_status_t use_linear(const void *config, int64_t *result)
{
    const colo_lm_head_config_t shape = {COLO_LM_HEAD_CONFIG_INIT, .rows = 4, .hidden = 2,
                                         .dtype = COLO_F32};
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    T_ENDS(colo_linear_logprob_destroy) colo_linear_logprob_t *linear = NULL;
    assert_ok(colo_lm_head_create(&head, &shape, NULL));
    colo_status_t st = colo_linear_logprob_create(&linear, config, head, t_self());
    *result = st == COLO_OK ? colo_linear_logprob_chunk(linear, 100000) * 10 +
                                  (int64_t)colo_linear_logprob_mode(linear, 100000)
                            : 0;
    return st;
}

static colo_status_t use_linear_batch(const void *given, int64_t *result)
{
    colo_lm_head_t head = {.config = {.mem = COLO_MEM_HOST, .device = -1}};
    const struct colo_linear_logprob of = {
        .head = &head, .dtype = COLO_F32, .hidden = 2, .columns = V};
    colo_linear_logprob_batch_t batch;
    const colo_status_t st = colo_linear_check_batch(&of, given, &batch);
    *result = st == COLO_OK ? batch.max_valid * 10 + !batch.class_weight : 0;
    return st;
}

static colo_status_t use_sequence(const void *seq, int64_t *result)
{
    *result = colo_sequence_count(seq);
    return colo_sequence_check(seq);
}

static colo_status_t use_partition(const void *part, int64_t *result)
{
    *result = colo_partition_count(part) * 100 + colo_partition_index(part, 1);
    return colo_partition_check(part);
}

static colo_status_t no_gradient(const colo_tensor_t *d_out, int32_t nout,
                                 const colo_tensor_t *d_in, int32_t nin, void *state)
{
    (void)d_out, (void)nout, (void)d_in, (void)nin, (void)state;
    return COLO_OK;
}

static colo_value_t out_value;

static colo_status_t use_record(const void *record, int64_t *result)
{
    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
    assert_ok(colo_tape_create(&tape));
    out_value = 77;
    const colo_status_t st = colo_tape_record(tape, record);
    *result = out_value;
    return st;
}

static colo_status_t gather_alone(void *user, const void *send, void *recv, size_t bytes)
{
    (void)user;
    memcpy(recv, send, bytes);
    return COLO_OK;
}

static colo_status_t use_bootstrap(const void *bootstrap, int64_t *result)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *comm = NULL;
    const colo_status_t st = colo_comm_create_bootstrap(bootstrap, &comm);
    *result = colo_comm_size(comm);
    return st;
}

static colo_status_t use_comm_config(const void *config, int64_t *result)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *comm = NULL;
    colo_comm_config_t now = {COLO_COMM_CONFIG_INIT};
    assert_ok(colo_comm_create_self(&comm));
    const colo_status_t st = colo_comm_configure(comm, config);
    assert_ok(colo_comm_config(comm, &now));
    *result = now.timeout_ms * 100 + now.check * 10 + (now.flight_recorder != NULL);
    return st;
}

static float mean_value;
static const colo_lm_head_config_t lm_head;

static colo_status_t use_loss_mean(const void *out, int64_t *result)
{
    static _Alignas(256) unsigned char work[4096];
    static int64_t valid = 2;
    static float loss[2] = {1, 2};
    const colo_tensor_t losses = colo_tensor_host(loss, COLO_F32, 1, (int64_t[]){2});
    mean_value = 0;
    const colo_status_t st = colo_loss_mean_forward(&losses, T_TENSOR(&valid, COLO_I64, 1), true,
                                                    t_self(), out, work, NULL);
    *result = (int64_t)(mean_value * 10);
    return st;
}

static colo_status_t use_loss_mean_upstream(const void *upstream, int64_t *result)
{
    double factor = 0.5;
    float d_loss[2] = {0};
    const colo_tensor_t d_losses = colo_tensor_host(d_loss, COLO_F32, 1, (int64_t[]){2});
    const colo_status_t st =
        colo_loss_mean_backward(T_TENSOR(&factor, COLO_F64, 1), upstream, &d_losses, NULL);
    *result = (int64_t)(d_loss[1] * 10);
    return st;
}

static colo_status_t use_lm_head_grads(const void *grads, int64_t *result)
{
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_tensor_t d = {.ndim = 0};
    assert_ok(colo_lm_head_create(&head, &lm_head, NULL));
    const colo_status_t st = colo_lm_head_gradient(head, grads, NULL, NULL, &d, NULL);
    *result = d.ndim * 100 + (int64_t)colo_lm_head_reduce_size(head, grads);
    return st;
}

static colo_status_t use_segments(const void *segments, int64_t *result)
{
    *result = 0;
    return colo_segments_check(segments, &src, &dst);
}

/* ---- the structs ---- */

#define SHAPE                                  \
    {                                          \
        .samples = 2, .rows = 4, .features = 8 \
    }

static const colo_plan_config_t plan = {COLO_PLAN_CONFIG_INIT, .src = &src, .dst = &dst,
                                        .shape = SHAPE, .dtype = COLO_F32};
static const colo_plan_config_t ragged = {COLO_PLAN_CONFIG_INIT, .src = &src, .dst = &dst,
                                          .shape.features = 8, .dtype = COLO_F32};
static const colo_bridge_config_t bridge = {COLO_BRIDGE_CONFIG_INIT, .src = &src, .dst = &dst,
                                            .shape = SHAPE, .dtype = COLO_F32};
static const colo_topology_config_t place = {COLO_TOPOLOGY_CONFIG_INIT, .topology = "core:4 pu:1",
                                             .world = 4};
static const colo_lm_head_config_t lm_head = {COLO_LM_HEAD_CONFIG_INIT, .rows = 4, .hidden = 2,
                                              .dtype = COLO_F32};
static const colo_logprob_config_t logprob = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V};
static const colo_topk_config_t pick = {COLO_TOPK_CONFIG_INIT, .logits.vocab = V, .k = K};
static const colo_distill_config_t distill = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = V};
static const colo_sampling_config_t sampling = {COLO_SAMPLING_CONFIG_INIT, .logits.vocab = V};
static const colo_linear_logprob_config_t linear = {
    COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true, .logprob.logits.vocab = 4};
static int64_t ids[T];
static float states[T * 2];
static const colo_tensor_t hidden = {.data = states,
                                     .dtype = COLO_F32,
                                     .device = -1,
                                     .ndim = 2,
                                     .shape = {T, 2},
                                     .stride = {2, 1}},
                           targets = {.data = ids,
                                      .dtype = COLO_I64,
                                      .device = -1,
                                      .ndim = 1,
                                      .shape = {T},
                                      .stride = {1}};
static const colo_linear_logprob_batch_t linear_batch = {
    COLO_LINEAR_LOGPROB_BATCH_INIT, .hidden = &hidden, .targets = &targets, .max_valid = T};
static const colo_sequence_t sequence = {COLO_SEQUENCE_INIT, .batch = 2, .positions = 4};
static const colo_segments_t segments = {COLO_SEGMENTS_INIT};
static const colo_partition_t partition = {COLO_PARTITION_INIT, .cp = 2, .cp_rank = 1, .tp = 1,
                                           .positions = 8};
static float number;
static const colo_tensor_t made_by_node = {.data = &number, .dtype = COLO_F32, .device = -1};
static const colo_tape_record_t record = {COLO_TAPE_RECORD_INIT,    .name = "n",
                                          .out = &made_by_node,     .nout = 1,
                                          .out_values = &out_value, .backward = no_gradient};
static double num, den, mean_factor;
static float d_mean = 3, gradient[8];
#define NUMBER(at, type)                                                                  \
    {                                                                                     \
        .data = at, .dtype = type, .device = -1, .ndim = 1, .shape = {1}, .stride = { 1 } \
    }
static const colo_tensor_t of_value = NUMBER(&mean_value, COLO_F32),
                           of_num = NUMBER(&num, COLO_F64), of_den = NUMBER(&den, COLO_F64),
                           of_factor = NUMBER(&mean_factor, COLO_F64),
                           of_d_mean = NUMBER(&d_mean, COLO_F32);
static const colo_loss_mean_t mean = {COLO_LOSS_MEAN_INIT, .value = &of_value, .num = &of_num,
                                      .den = &of_den, .factor = &of_factor};
static const colo_loss_mean_upstream_t mean_upstream = {COLO_LOSS_MEAN_UPSTREAM_INIT,
                                                        .d_value = &of_d_mean};
static const colo_tensor_t d_weight = {.data = gradient,
                                       .dtype = COLO_F32,
                                       .device = -1,
                                       .ndim = 2,
                                       .shape = {4, 2},
                                       .stride = {2, 1}};
static const colo_lm_head_grads_t grads = {COLO_LM_HEAD_GRADS_INIT, .d_weight = &d_weight};
static const colo_comm_config_t comm_config = {COLO_COMM_CONFIG_INIT, .timeout_ms = 1234};
static const colo_bootstrap_t bootstrap = {COLO_BOOTSTRAP_INIT, .size = 1,
                                           .all_gather = gather_alone};

#define SIZED(struct_, least, use)                 \
    {                                              \
#use, &struct_, sizeof struct_, least, use \
    }

static const struct sized {
    const char *name;
    const void *given; /* every member that may be missing has its default */
    size_t whole, least;
    colo_status_t (*use)(const void *given, int64_t *result);
} table[] = {
    SIZED(plan, UP_TO(plan, output), use_plan),
    SIZED(plan, UP_TO(plan, output), use_collective),
    SIZED(ragged, UP_TO(ragged, output), use_ragged),
    SIZED(ragged, UP_TO(ragged, output), use_packed),
    SIZED(bridge, UP_TO(bridge, axes), use_bridge),
    SIZED(place, UP_TO(place, ranks_per_node), use_place),
    SIZED(lm_head, UP_TO(lm_head, mem), use_lm_head),
    SIZED(logprob, UP_TO(logprob, label_smoothing), use_logprob),
    SIZED(pick, UP_TO(pick, topk), use_topk),
    SIZED(distill, UP_TO(distill, targets), use_distill),
    SIZED(sampling, UP_TO(sampling, top_k), use_sampling),
    SIZED(linear, UP_TO(linear, mode), use_linear),
    SIZED(linear_batch, UP_TO(linear_batch, class_weight), use_linear_batch),
    SIZED(sequence, UP_TO(sequence, padded), use_sequence),
    SIZED(segments, UP_TO(segments, packing), use_segments),
    SIZED(partition, UP_TO(partition, segments), use_partition),
    SIZED(record, UP_TO(record, state), use_record),
    SIZED(mean, sizeof mean, use_loss_mean),
    SIZED(mean_upstream, sizeof mean_upstream, use_loss_mean_upstream),
    SIZED(grads, sizeof grads, use_lm_head_grads),
    SIZED(comm_config, UP_TO(comm_config, check), use_comm_config),
    SIZED(bootstrap, UP_TO(bootstrap, user), use_bootstrap),
};
enum { STRUCTS = sizeof table / sizeof table[0] };

/* What the call makes of the first @size bytes. */
static colo_status_t give(const struct sized *s, size_t size, int64_t *result)
{
    _Alignas(16) unsigned char bytes[LONGEST];
    memset(bytes, 0xff, sizeof bytes);
    memcpy(bytes, s->given, size < s->whole ? size : s->whole);
    memcpy(bytes, &size, sizeof size);
    return s->use(bytes, result);
}

static bool is_built(const struct sized *s)
{
    int64_t result;
    return give(s, s->whole, &result) != COLO_ERR_UNBUILT; /* a place needs hwloc */
}

T_CASE(struct_of_another_size_is_served_with_defaults_or_refused_with_its_size)
{
    for (int i = 0; i < STRUCTS; i++) {
        const struct sized *s = &table[i];
        int64_t whole, result;
        if (!is_built(s))
            continue;
        print_message("%s: %zu to %zu bytes\n", s->name, s->least, s->whole);
        const colo_status_t right = give(s, s->whole, &whole);
        for (size_t size = 0; size < s->whole + MORE; size++) {
            const bool longer = size > s->whole;
            if (!longer && size >= s->least && size % 8 == 0) {
                if (give(s, size, &result) != right)
                    fail_msg("%s of %zu bytes: %s", s->name, size, colo_last_error());
                assert_int_equal(result, whole);
                continue;
            }
            assert_fails(give(s, size, &result), COLO_ERR_ARG,
                         longer
                             ? t_text("struct_size is %zu, expected at most %zu, ", size, s->whole)
                             : t_text("struct_size is %zu, expected a multiple of 8 from ", size));
            assert_true(says(longer ? colo_version() : "start from COLO_"));
            assert_true(!longer || says("compiled with a newer header"));
        }
    }
}

static sigjmp_buf read_on;

static void at_fault(int signal)
{
    siglongjmp(read_on, signal);
}

/* The struct ends where the readable memory does. */
T_CASE(struct_is_not_read_beyond_its_size)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *memory =
        mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(mprotect(memory + page, page, PROT_NONE), 0);
    struct sigaction before, now = {.sa_handler = at_fault};
    assert_int_equal(sigaction(SIGSEGV, &now, &before), 0);
    for (int i = 0; i < STRUCTS; i++)
        for (size_t size = 8; size <= table[i].whole; size += 8) {
            const struct sized *s = &table[i];
            unsigned char *given = memory + page - size;
            int64_t result;
            memcpy(given, s->given, size);
            memcpy(given, &size, sizeof size);
            if (sigsetjmp(read_on, 1))
                fail_msg("%s of %zu bytes: the call reads more", s->name, size);
            const colo_status_t st = s->use(given, &result);
            assert_true(size >= s->least || st == COLO_ERR_ARG || !is_built(s));
        }
    sigaction(SIGSEGV, &before, NULL);
    munmap(memory, 2 * page);
}

/* ---- what calls write ---- */

static colo_status_t write_plan_bytes(void *out)
{
    T_ENDS(colo_plan_destroy) colo_plan_t *made = NULL;
    assert_ok(colo_plan_create(&made, &plan, 0));
    return colo_plan_bytes(made, COLO_PASS_FORWARD, out);
}

static colo_status_t write_node_bytes(void *out)
{
    T_ENDS(colo_plan_destroy) colo_plan_t *made = NULL;
    assert_ok(colo_plan_create(&made, &plan, 0));
    return colo_plan_node_bytes(made, COLO_PASS_FORWARD, out);
}

static colo_status_t write_stats(void *out)
{
    colo_comm_t *comm = t_self();
    colo_comm_stats_reset(comm);
    assert_ok(colo_comm_barrier(comm, NULL));
    return colo_comm_stats(comm, out);
}

static colo_status_t write_topology(void *out, int kind)
{
    static colo_topology_t *made;
    colo_grid_t grid;
    if (!made)
        assert_ok(colo_topology_create(&made, &place));
    assert_ok(colo_grid_parse(&grid, "tp=2,dp=2", 4));
    return kind == 0   ? colo_topology_machine(made, out)
           : kind == 1 ? colo_topology_spot(made, 3, out)
           : kind == 2 ? colo_topology_cut(made, &grid, "tp", out)
                       : colo_topology_cut(made, &grid, "tp-dp", out);
}

static colo_status_t write_machine(void *out)
{
    return write_topology(out, 0);
}

static colo_status_t write_spot(void *out)
{
    return write_topology(out, 1);
}

static colo_status_t write_cut(void *out)
{
    return write_topology(out, 2);
}

static colo_status_t write_cut_of_two(void *out)
{
    return write_topology(out, 3);
}

static colo_status_t write_comm_config(void *out)
{
    return colo_comm_config(t_self(), out);
}

static colo_status_t write_bootstrap(void *out)
{
    return colo_bootstrap_from_comm(t_self(), out);
}

static const struct output {
    const char *name;
    size_t whole;
    colo_status_t (*write)(void *out);
    bool needs_hwloc;
} outputs[] = {
    {"plan_bytes: bytes", sizeof(colo_plan_bytes_t), write_plan_bytes, false},
    {"plan_node_bytes: bytes", sizeof(colo_plan_node_bytes_t), write_node_bytes, false},
    {"comm_stats: stats", sizeof(colo_comm_stats_t), write_stats, false},
    {"comm_config: config", sizeof(colo_comm_config_t), write_comm_config, false},
    {"bootstrap_from_comm: bootstrap", sizeof(colo_bootstrap_t), write_bootstrap, false},
    {"machine: machine", sizeof(colo_topology_machine_t), write_machine, true},
    {"spot: spot", sizeof(colo_topology_spot_t), write_spot, true},
    {"cut: cut", sizeof(colo_topology_cut_t), write_cut, true},
    {"cut: cut", sizeof(colo_topology_cut_t), write_cut_of_two, true},
};

T_CASE(shorter_output_gets_what_it_has_and_no_byte_behind_it_is_written)
{
    static _Alignas(16) unsigned char whole[LONGEST_OUTPUT], out[LONGEST_OUTPUT],
        untouched[LONGEST_OUTPUT];
    memset(untouched, 0xff, sizeof untouched);
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++) {
        const struct output *o = &outputs[i];
        if (o->needs_hwloc && !colo_topology_version())
            continue;
        memcpy(whole, untouched, sizeof whole);
        memcpy(whole, &o->whole, sizeof o->whole);
        assert_ok(o->write(whole));
        assert_memory_equal(whole + o->whole, untouched, MORE);
        for (size_t size = 0; size < o->whole + MORE; size++) {
            const bool served = size <= o->whole && size >= 16 && size % 8 == 0;
            memcpy(out, untouched, sizeof out);
            memcpy(out, &size, sizeof size);
            if (served)
                assert_ok(o->write(out));
            else
                assert_fails(o->write(out), COLO_ERR_ARG,
                             t_text("%s.struct_size is %zu, expected ", o->name, size));
            assert_memory_equal(out, &size, sizeof size);
            const size_t written = served ? size : sizeof size;
            assert_memory_equal(out + 8, whole + 8, written - 8);
            assert_memory_equal(out + written, untouched, sizeof out - written);
        }
        assert_fails(o->write(NULL), COLO_ERR_ARG, t_text("%s is NULL; start from COLO_", o->name));
    }
}

T_MAIN_AFTER(0, assert_ok(t_layouts("dp=1", "dp=1", &src, &dst)), "core/sized")
