/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tape.c - the tape on hand-made nodes of small integers, exact. Every node here logs that it
 * ran, so order and skipping are seen, not guessed.
 */
#include "core/tape_node.h"
#include "harness/harness.h"

enum { N = 4, LOG = 32 };

static char ran[LOG];  /* one letter a node that ran */
static int freed[LOG]; /* how often each state was freed, by its id */

/* out = factor[0] * in[0] + factor[1] * in[1] + ...; with nout 2 the second output is -out */
typedef struct linear {
    int id;
    char letter;
    double factor[3];
    colo_status_t fails;
} linear_t;

static colo_status_t linear_backward(const colo_tensor_t *d_out, int32_t nout,
                                     const colo_tensor_t *d_in, int32_t nin, void *state)
{
    const linear_t *l = state;
    size_t index = strlen(ran);
    ran[index] = l->letter;
    ran[index + 1] = 0;
    for (int32_t i = 0; i < nin; i++) {
        double *g = d_in[i].data;
        if (!g)
            continue;
        for (int64_t k = 0; k < colo_tensor_count(&d_in[i]); k++)
            g[k] = l->factor[i] *
                   (((double *)d_out[0].data)[k] - (nout > 1 ? ((double *)d_out[1].data)[k] : 0));
    }
    return l->fails;
}

static void free_linear(void *state)
{
    freed[((linear_t *)state)->id]++;
    free(state);
}

static linear_t *linear(int id, char letter, double a, double b, double c)
{
    linear_t *l = malloc(sizeof *l);
    *l = (linear_t){.id = id, .letter = letter, .factor = {a, b, c}};
    return l;
}

static double some[N]; /* activations: their values do not matter to a linear node */

static colo_tensor_t vec(double *data)
{
    return colo_tensor_host(data, COLO_F64, 1, (int64_t[]){N});
}

static colo_tape_t *tape; /* of the case that runs */

static int start(void **state)
{
    memset(ran, 0, sizeof ran);
    memset(freed, 0, sizeof freed);
    return colo_tape_create(&tape);
}

static int finish(void **state)
{
    colo_tape_destroy(&tape);
    return 0;
}

static colo_value_t leaf(void)
{
    colo_tensor_t t = vec(some);
    colo_value_t v = -7;
    assert_ok(colo_tape_leaf(tape, &t, NULL, &v));
    return v;
}

static colo_value_t node(linear_t *l, colo_value_t a, colo_value_t b)
{
    colo_tensor_t t = vec(some);
    colo_value_t in[2] = {a, b}, out = -7;
    assert_ok(t_node(tape, "linear", in, 2, &t, &out, linear_backward, l, free_linear));
    return out;
}

static void retain(const colo_value_t *v, int n)
{
    for (int i = 0; i < n; i++)
        assert_ok(colo_tape_retain_gradient(tape, v[i]));
}

static void gradient_is(colo_value_t v, double want)
{
    colo_tensor_t g;
    assert_ok(colo_tape_gradient(tape, v, &g));
    assert_true(colo_tensor_is_contiguous(&g) && g.ndim == 1 && g.shape[0] == N);
    for (int k = 0; k < N; k++)
        if (((double *)g.data)[k] != want)
            fail_msg("gradient of value %d is %g, expected %g", v, ((double *)g.data)[k], want);
}

/* ---- flow ---- */

T_CASE(gradients_of_several_consumers_add_up)
{
    colo_value_t x = leaf(), y = leaf();
    colo_value_t a = node(linear(0, 'a', 2, 3, 0), x, y);   /* a = 2x + 3y */
    colo_value_t b = node(linear(1, 'b', 5, 7, 0), a, x);   /* b = 5a + 7x */
    colo_value_t c = node(linear(2, 'c', 11, 13, 0), a, b); /* c = 11a + 13b */
    colo_value_t d = node(linear(3, 'd', 1, 1, 0), c, x);   /* d = c + x */
    retain((colo_value_t[]){a, b, c, d}, 4);
    assert_ok(colo_tape_backward(tape, d, NULL));
    assert_string_equal(ran, "dcba");
    gradient_is(d, 1);
    gradient_is(c, 1);
    gradient_is(b, 13);
    gradient_is(a, 11 + 13 * 5);
    gradient_is(x, 1 + 13 * 7 + (11 + 13 * 5) * 2);
    gradient_is(y, (11 + 13 * 5) * 3);
    colo_tape_destroy(&tape);
    assert_null(tape);
    for (int i = 0; i < 4; i++)
        assert_int_equal(freed[i], 1);
}

T_CASE(a_value_used_twice_by_one_node_gets_both)
{
    colo_value_t x = leaf();
    colo_value_t a = node(linear(0, 'a', 2, 5, 0), x, x);
    colo_value_t b = node(linear(1, 'b', 3, 4, 0), a, a);
    retain(&a, 1);
    assert_ok(colo_tape_backward(tape, b, NULL));
    gradient_is(a, 7);
    gradient_is(x, 49);
}

T_CASE(nodes_that_no_node_needs_are_skipped)
{
    colo_tensor_t g;
    colo_value_t x = leaf(), unused = leaf();
    colo_value_t a = node(linear(0, 'a', 2, 0, 0), x, COLO_NO_VALUE);
    colo_value_t side = node(linear(1, 's', 100, 100, 0), a, unused);
    colo_value_t b = node(linear(2, 'b', 3, 0, 0), a, COLO_NO_VALUE);
    colo_value_t later = node(linear(3, 'l', 100, 0, 0), b, COLO_NO_VALUE);
    assert_fails(colo_tape_gradient(tape, x, &g), COLO_ERR_MISSING, "backward has not run");
    assert_ok(colo_tape_backward(tape, b, NULL));
    assert_string_equal(ran, "ba");
    gradient_is(x, 6);
    assert_fails(colo_tape_gradient(tape, side, &g), COLO_ERR_MISSING, "none reached value 3");
    assert_fails(colo_tape_gradient(tape, unused, &g), COLO_ERR_MISSING, "none reached value 1");
    assert_fails(colo_tape_gradient(tape, later, &g), COLO_ERR_MISSING, "none reached value 5");
}

T_CASE(the_gradient_of_an_output_is_released_unless_it_is_retained)
{
    colo_tensor_t g;
    colo_value_t x = leaf();
    colo_value_t a = node(linear(0, 'a', 2, 0, 0), x, COLO_NO_VALUE);
    colo_value_t b = node(linear(1, 'b', 3, 0, 0), a, COLO_NO_VALUE);
    colo_value_t c = node(linear(2, 'c', 5, 0, 0), b, COLO_NO_VALUE);
    retain(&b, 1);
    assert_fails(colo_tape_retain_gradient(tape, 9), COLO_ERR_ARG,
                 "retain_gradient: value 9, the tape has 4");
    assert_fails(colo_tape_retain_gradient(NULL, a), COLO_ERR_ARG, "tape is NULL");
    assert_ok(colo_tape_backward(tape, c, NULL));
    gradient_is(x, 30);
    gradient_is(b, 5);
    assert_fails(colo_tape_gradient(tape, a, &g), COLO_ERR_MISSING,
                 "that of value 1 was released when node 0 'linear' had run");
    assert_fails(colo_tape_gradient(tape, c, &g), COLO_ERR_MISSING, "that of value 3 was released");
    assert_fails(colo_tape_retain_gradient(tape, a), COLO_ERR_STATE, "backward has run");
}

T_CASE(an_output_that_no_node_consumed_brings_zeros)
{
    colo_tensor_t two[2] = {vec(some), vec(some)};
    for (int which = 0; which < 2; which++) {
        colo_value_t out[2], x;
        colo_tensor_t g;
        for (int step = 0; step < 2; step++) { /* second step: buffers hold old numbers */
            x = leaf();
            assert_ok(colo_tape_record(
                tape,
                &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, "two", &x, 1, two, 2, out, NULL, 0,
                                      linear_backward, linear(step, 't', 3, 0, 0), free_linear}));
            colo_value_t b = node(linear(step + 2, 'b', 5, 0, 0), out[which], COLO_NO_VALUE);
            retain(out, 2);
            assert_ok(colo_tape_backward(tape, b, NULL));
            gradient_is(x, which ? -15 : 15); /* 3 (d_out[0] - d_out[1]) */
            gradient_is(out[which], 5);
            assert_fails(colo_tape_gradient(tape, out[!which], &g), COLO_ERR_MISSING,
                         "none reached");
            colo_tape_reset(tape);
        }
    }
}

T_CASE(a_seed_scales_and_a_leaf_may_be_where_it_starts)
{
    double seed[N] = {2, 2, 2, 2};
    colo_tensor_t s = vec(seed);
    colo_value_t x = leaf();
    colo_value_t a = node(linear(0, 'a', 3, 0, 0), x, COLO_NO_VALUE);
    assert_ok(colo_tape_backward(tape, a, &s));
    gradient_is(x, 6);
    colo_tape_reset(tape);
    x = leaf();
    assert_ok(colo_tape_backward(tape, x, &s));
    gradient_is(x, 2);
}

T_CASE(a_callers_gradient_is_added_to)
{
    double mine[N] = {10, 10, 10, 10};
    colo_tensor_t t = vec(some), d = vec(mine), g;
    for (int step = 1; step <= 3; step++) {
        colo_value_t x = -1;
        assert_ok(colo_tape_leaf(tape, &t, &d, &x));
        colo_value_t a = node(linear(0, 'a', 2, 3, 0), x, x);
        colo_value_t b = node(linear(0, 'b', 1, 1, 0), a, x);
        assert_ok(colo_tape_backward(tape, b, NULL));
        assert_ok(colo_tape_gradient(tape, x, &g));
        assert_ptr_equal(g.data, mine);
        gradient_is(x, 10 + step * 6);
        colo_tape_reset(tape);
    }
    colo_tape_destroy(&tape);
    assert_true(mine[0] == 28); /* the caller's memory is the caller's */
}

T_CASE(half_precision_gradients_add_in_fp32)
{
    static const uint16_t one[2] = {0x3f80, 0x3c00}, two[2] = {0x4000, 0x4000};
    static const colo_dtype_t dtypes[2] = {COLO_BF16, COLO_F16};
    for (int d = 0; d < 2; d++) {
        uint16_t mine[N] = {one[d], one[d], one[d], one[d]};
        colo_tensor_t t = colo_tensor_host(some, dtypes[d], 1, (int64_t[]){N});
        colo_tensor_t g = colo_tensor_host(mine, dtypes[d], 1, (int64_t[]){N});
        colo_value_t x;
        assert_ok(colo_tape_leaf(tape, &t, &g, &x));
        assert_ok(colo_tape_backward(tape, x, NULL)); /* ones */
        assert_memory_equal(mine, ((uint16_t[]){two[d], two[d], two[d], two[d]}), sizeof mine);
        colo_tape_reset(tape);
    }
}

/* ---- versions and failure ---- */

/* A node that saves two tensors. */
static colo_value_t gelu(linear_t *l, colo_value_t x, const colo_tensor_t *saved)
{
    colo_tensor_t t = vec(some);
    colo_value_t out;
    assert_ok(colo_tape_record(tape, &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, "gelu", &x, 1, &t,
                                                           1, &out, saved, 2, linear_backward, l,
                                                           free_linear}));
    return out;
}

T_CASE(every_version_is_checked_before_any_node_runs)
{
    uint64_t version = 1;
    colo_tensor_t t = vec(some), saved[2] = {vec(some), vec(some)};
    double mine[N] = {0};
    colo_tensor_t d = vec(mine);
    colo_value_t x, a, b, side;
    saved[1].version = &version;
    assert_ok(colo_tape_leaf(tape, &t, &d, &x));
    a = gelu(linear(0, 'g', 2, 0, 0), x, saved);
    b = node(linear(1, 'b', 3, 0, 0), a, COLO_NO_VALUE);
    side = node(linear(2, 's', 3, 0, 0), x, COLO_NO_VALUE);
    version = 3;
    assert_fails(
        colo_tape_backward(tape, b, NULL), COLO_ERR_MODIFIED,
        "node 0 'gelu': saved tensor 1 was written after it was saved: version 3, saved at 1");
    assert_string_equal(ran, "");
    assert_true(mine[0] == 0);
    version = 1; /* nothing ran: it may be tried again */
    assert_ok(colo_tape_backward(tape, b, NULL));
    assert_true(mine[0] == 6);
    colo_tape_reset(tape);

    /* what a skipped node saved may change */
    assert_ok(colo_tape_leaf(tape, &t, &d, &x));
    a = gelu(linear(3, 'g', 2, 0, 0), x, saved);
    side = node(linear(4, 's', 3, 0, 0), x, COLO_NO_VALUE);
    version = 9;
    assert_ok(colo_tape_backward(tape, side, NULL));
}

T_CASE(a_node_that_fails_is_named_and_leaves_the_callers_gradients)
{
    double mine[2][N] = {{4, 4, 4, 4}, {4, 4, 4, 4}};
    colo_tensor_t t = vec(some), d[2] = {vec(mine[0]), vec(mine[1])}, g;
    colo_value_t x, y;
    linear_t *bad = linear(0, 'a', 1, 0, 0);
    bad->fails = COLO_ERR_PEER;
    assert_ok(colo_tape_leaf(tape, &t, &d[0], &x));
    assert_ok(colo_tape_leaf(tape, &t, &d[1], &y));
    colo_value_t a = node(bad, x, COLO_NO_VALUE);
    colo_value_t b = node(linear(1, 'b', 1, 1, 0), a, y);
    assert_fails(colo_tape_backward(tape, b, NULL), COLO_ERR_PEER, "node 0 'linear': ");
    assert_string_equal(ran, "ba");
    for (int k = 0; k < N; k++)
        assert_true(mine[0][k] == 4 && mine[1][k] == 4);
    assert_fails(colo_tape_gradient(tape, a, &g), COLO_ERR_MISSING, "none reached");
    assert_fails(colo_tape_backward(tape, b, NULL), COLO_ERR_STATE, "reset it and record anew");
}

T_CASE(after_backward_only_reset_helps)
{
    colo_tensor_t t = vec(some);
    colo_value_t v = 77;
    colo_value_t x = leaf();
    colo_value_t a = node(linear(0, 'a', 1, 0, 0), x, COLO_NO_VALUE);
    assert_ok(colo_tape_backward(tape, a, NULL));
    assert_fails(colo_tape_backward(tape, a, NULL), COLO_ERR_STATE,
                 "backward has run on this tape of 1 nodes");
    assert_fails(colo_tape_leaf(tape, &t, NULL, &v), COLO_ERR_STATE, "leaf: backward has run");
    assert_fails(
        t_node(tape, "n", &x, 1, &t, &v, linear_backward, linear(1, 'n', 1, 0, 0), free_linear),
        COLO_ERR_STATE, "record: backward has run");
    assert_int_equal(v, 77);
    assert_int_equal(freed[0], 0);
    assert_int_equal(freed[1], 1); /* recording failed: taken and freed */
    colo_tape_reset(tape);
    assert_int_equal(freed[0], 1);
    assert_ok(colo_tape_leaf(tape, &t, NULL, &v));
    assert_int_equal(v, 0); /* numbers start anew */
    colo_tape_destroy(&tape);
    assert_int_equal(freed[0], 1);
}

T_CASE(a_recording_that_is_refused_frees_its_state_once_and_adds_nothing)
{
    colo_tensor_t t = vec(some), ints = t, gone = t, device = t;
    colo_value_t out = 77, far = 5, before = -2, x = leaf();
    int id = 0;
    ints.dtype = COLO_I64;
    gone.data = NULL;
    device.mem = (colo_mem_t)7;
#define REFUSED(change, text)                                                                   \
    do {                                                                                        \
        colo_tape_record_t r = {                                                                \
            COLO_TAPE_RECORD_INIT,    "n",        &x, 1, &t, 1, &out, NULL, 0, linear_backward, \
            linear(id, 'r', 1, 1, 1), free_linear};                                             \
        change;                                                                                 \
        assert_fails(colo_tape_record(tape, &r), COLO_ERR_ARG, text);                           \
        assert_int_equal(freed[id++], 1);                                                       \
        assert_int_equal(out, 77);                                                              \
    } while (0)
    REFUSED(r.in = &far, "record 'n': input 0 is value 5, the tape has 1");
    REFUSED(r.in = &before, "is value -2");
    REFUSED(r.nin = -1, "-1 inputs");
    REFUSED(r.nout = 0, "0 outputs");
    REFUSED(r.nsaved = -1, "-1 saved");
    REFUSED(r.name = NULL, "name is NULL");
    REFUSED(r.in = NULL, "in is NULL");
    REFUSED(r.out = NULL, "out is NULL");
    REFUSED(r.out_values = NULL, "out_values is NULL");
    REFUSED(r.nsaved = 1, "saved is NULL");
    REFUSED(r.backward = NULL, "backward is NULL");
    REFUSED(r.out = &ints, "record 'n': output 0: output: dtype i64 has no gradient");
    REFUSED(r.out = &gone, "data is NULL");
    REFUSED(r.out = &device, "memory kind 7 is unknown");
#undef REFUSED
    assert_fails(
        t_node(NULL, "n", &x, 1, &t, &out, linear_backward, linear(id, 'r', 1, 1, 1), free_linear),
        COLO_ERR_ARG, "tape is NULL");
    assert_int_equal(freed[id], 1);
    assert_fails(colo_tape_record(tape, NULL), COLO_ERR_ARG, "record is NULL");
    assert_int_equal(leaf(), 1); /* nothing was appended in between */
}

T_CASE(borrowed_state_is_not_freed)
{
    linear_t mine = {.letter = 'm', .factor = {2}};
    colo_tensor_t scalar = colo_tensor_host(some, COLO_F64, 0, NULL), g;
    colo_value_t x, out;
    assert_ok(colo_tape_leaf(tape, &scalar, NULL, &x));
    assert_ok(t_node(tape, "mine", &x, 1, &scalar, &out, linear_backward, &mine, NULL));
    assert_ok(colo_tape_backward(tape, out, NULL));
    assert_ok(colo_tape_gradient(tape, x, &g));
    assert_true(g.ndim == 0 && *(double *)g.data == 2);
    colo_tape_destroy(&tape);
    colo_tape_destroy(&tape); /* takes NULL */
    colo_tape_destroy(NULL);
    colo_tape_reset(NULL);
}

/* What needs no device to be refused. */
T_CASE(a_gradient_lives_where_its_value_does)
{
    colo_tensor_t host = vec(some);
    colo_tensor_t there = colo_tensor_cuda(some, COLO_F64, 2, 1, (int64_t[]){N}), other = there;
    colo_value_t v = 0;
    other.device = 1;
    assert_fails(colo_tape_leaf(tape, &there, &host, &v), COLO_ERR_ARG,
                 "d_t of a leaf: in host memory (device -1), its value is in CUDA memory (device "
                 "2)");
    assert_fails(colo_tape_leaf(tape, &there, &other, &v), COLO_ERR_ARG, "(device 1)");
    assert_fails(colo_tape_leaf(tape, &host, &there, &v), COLO_ERR_ARG, "in CUDA memory");
    other = host;
    other.device = 0; /* says nothing on the host */
    assert_ok(colo_tape_leaf(tape, &host, &other, &v));
    assert_ok(colo_tape_leaf(tape, &there, NULL, &v));
    assert_fails(colo_tape_backward(tape, v, NULL), COLO_ERR_ARG,
                 "seed is NULL, which stands for ones on the host");
    assert_fails(colo_tape_backward(tape, v, &host), COLO_ERR_ARG, "seed: in host memory");
}

T_CASE(bad_leaves_and_seeds_are_refused)
{
    double data[2 * N];
    colo_tensor_t t = vec(some), bad = vec(data), g = vec(data);
    colo_value_t v = 77;
    assert_fails(colo_tape_create(NULL), COLO_ERR_ARG, "NULL");
    assert_fails(colo_tape_leaf(NULL, &t, NULL, &v), COLO_ERR_ARG, "tape is NULL");
    assert_fails(colo_tape_leaf(tape, NULL, NULL, &v), COLO_ERR_ARG, "leaf: tensor is NULL");
    assert_fails(colo_tape_leaf(tape, &t, NULL, NULL), COLO_ERR_ARG, "value is NULL");
    bad.dtype = COLO_F32;
    assert_fails(colo_tape_leaf(tape, &t, &bad, &v), COLO_ERR_SHAPE,
                 "d_t of a leaf: dtype f32, its value is f64");
    bad = vec(data);
    bad.shape[0] = 3;
    assert_fails(colo_tape_leaf(tape, &t, &bad, &v), COLO_ERR_SHAPE, "extent 3, its value has 4");
    bad = vec(data);
    bad.stride[0] = 2;
    assert_fails(colo_tape_leaf(tape, &t, &bad, &v), COLO_ERR_SHAPE, "not contiguous");
    assert_int_equal(v, 77);
    v = leaf();
    assert_fails(colo_tape_backward(tape, v, &bad), COLO_ERR_SHAPE, "seed: not contiguous");
    bad = vec(data);
    bad.ndim = 0;
    assert_fails(colo_tape_backward(tape, v, &bad), COLO_ERR_SHAPE, "seed: 0 axes");
    assert_fails(colo_tape_backward(tape, 1, NULL), COLO_ERR_ARG, "value 1, the tape has 1");
    assert_fails(colo_tape_backward(tape, -1, NULL), COLO_ERR_ARG, "value -1");
    assert_fails(colo_tape_backward(NULL, 0, NULL), COLO_ERR_ARG, "tape is NULL");
    assert_fails(colo_tape_gradient(NULL, 0, &g), COLO_ERR_ARG, "tape is NULL");
    assert_fails(colo_tape_gradient(tape, 4, &g), COLO_ERR_ARG, "value 4, the tape has 1");
    assert_fails(colo_tape_gradient(tape, v, NULL), COLO_ERR_ARG, "d_value is NULL");
    assert_ptr_equal(g.data, data);
    assert_ok(colo_tape_backward(tape, v, NULL)); /* none of that used the tape up */
}

T_CASE(a_tape_of_ten_thousand_nodes_is_no_trouble)
{
    enum { NODES = 10000 };
    static linear_t same = {.letter = 0, .factor = {1, 1}};
    colo_tensor_t t = vec(some);
    colo_value_t x = leaf(), v = x;
    for (int i = 0; i < NODES; i++)
        assert_ok(t_node(tape, "same", &v, 1, &t, &v, linear_backward, &same, NULL));
    assert_int_equal(v, NODES);
    assert_ok(colo_tape_backward(tape, v, NULL));
    gradient_is(x, 1);
}

T_MAIN_EACH("core/tape", start, finish)
