/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tape_sums.c - how gradients of bf16 and fp16 values add up: in fp32, rounded once, or not at
 * all if the caller's gradient is fp32.
 *
 * What nodes write are multiples of 1/8 below 2048, exact in both dtypes or rounded by the oracle
 * first; sums of them are exact in fp32. So the oracle is a sum of doubles, rounded by the
 * definition of the dtype (ref_half.h), and the comparison is of bits. T_BACKENDS is the folder
 * with the CUDA backend whose device is the host; without it, as mutants run, only host memory is
 * tested.
 */
#include "harness/harness.h"

#include "core/tape_node.h"

#include "ref/ref_half.h"

enum { N = 37, MOST = 40 };

static const colo_dtype_t dtypes[2] = {COLO_BF16, COLO_F16};

static struct ref_format format(colo_dtype_t dtype)
{
    return dtype == COLO_BF16 ? ref_bf16 : ref_f16;
}

static int memories(void)
{
    if (getenv("T_BACKENDS"))
        assert_int_equal(setenv("COLO_BACKEND_DIR", getenv("T_BACKENDS"), 1), 0);
    return getenv("T_BACKENDS") ? 2 : 1;
}

static colo_tensor_t vec(void *data, colo_dtype_t dtype, int mem)
{
    colo_tensor_t t = colo_tensor_host(data, dtype, 1, (int64_t[]){N});
    if (mem)
        t.mem = COLO_MEM_CUDA, t.device = 0;
    return t;
}

/* A node that writes given numbers, whatever it gets. */
typedef struct writer {
    uint16_t d_in[3][N];
    colo_status_t fails;
} writer_t;

static colo_status_t write_given(const colo_tensor_t *d_out, int32_t nout,
                                 const colo_tensor_t *d_in, int32_t nin, void *state)
{
    const writer_t *w = state;
    for (int32_t i = 0; i < nin; i++)
        if (d_in[i].data)
            memcpy(d_in[i].data, w->d_in[i], sizeof w->d_in[i]);
    return w->fails;
}

/* d_in = d_out, for each input */
static colo_status_t pass(const colo_tensor_t *d_out, int32_t nout, const colo_tensor_t *d_in,
                          int32_t nin, void *state)
{
    for (int32_t i = 0; i < nin; i++)
        memcpy(d_in[i].data, d_out[0].data, N * sizeof(uint16_t));
    return COLO_OK;
}

static writer_t writers[MOST];

/* Fills @n writers of @nin inputs; adds what they write to @sum. Large and small numbers in turn:
 * if a sum is rounded each time, the small ones are lost. */
static void choose(uint64_t *seed, colo_dtype_t dtype, int n, int nin, double *sum)
{
    memset(writers, 0, sizeof writers);
    for (int w = 0; w < n; w++)
        for (int i = 0; i < nin; i++)
            for (int k = 0; k < N; k++) {
                int64_t v = w ? t_below(seed, 9) : 4096 + t_below(seed, 8192);
                writers[w].d_in[i][k] = ref_half_round(format(dtype), (double)v / 8);
                sum[k] += ref_half_value(format(dtype), writers[w].d_in[i][k]);
            }
}

static colo_value_t record(colo_tape_t *tape, const colo_tensor_t *t, writer_t *w, colo_value_t x,
                           colo_value_t chain, int uses)
{
    const colo_value_t in[3] = {x, uses > 1 ? x : COLO_NO_VALUE, chain};
    colo_value_t out;
    assert_ok(t_node(tape, "writer", in, 3, t, &out, write_given, w, NULL));
    return out;
}

/* @n nodes, one after the other, use x @uses times each. */
static colo_value_t consumers(colo_tape_t *tape, const colo_tensor_t *t, colo_value_t x, int n,
                              int uses)
{
    colo_value_t chain = COLO_NO_VALUE;
    for (int w = n; w-- > 0;) /* writers[0] runs first */
        chain = record(tape, t, &writers[w], x, chain, uses);
    return chain;
}

T_CASE(several_consumers_of_a_half_value_add_in_fp32_and_are_rounded_once)
{
    uint64_t seed = t_seed();
    for (int mem = 0; mem < memories(); mem++)
        for (int d = 0; d < 2; d++)
            for (int n = 1; n <= MOST; n = 3 * n - 1 + (n == 1))
                for (int uses = 1; uses <= 2; uses++) {
                    double sum[N] = {0};
                    uint16_t some[N] = {0};
                    colo_tensor_t t = vec(some, dtypes[d], mem), g;
                    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
                    colo_value_t leaf, x;
                    choose(&seed, dtypes[d], n, uses, sum);
                    assert_ok(colo_tape_create(&tape));
                    assert_ok(colo_tape_leaf(tape, &t, NULL, &leaf));
                    assert_ok(t_node(tape, "pass", &leaf, 1, &t, &x, pass, NULL, NULL));
                    assert_ok(colo_tape_retain_gradient(tape, x));
                    colo_tensor_t one = t;
                    assert_ok(colo_tape_backward(tape, consumers(tape, &t, x, n, uses), &one));
                    for (int which = 0; which < 2; which++) { /* the node's output; then the leaf */
                        assert_ok(colo_tape_gradient(tape, which ? leaf : x, &g));
                        assert_int_equal(g.dtype, dtypes[d]);
                        for (int k = 0; k < N; k++) {
                            uint16_t want = ref_half_round(format(dtypes[d]), sum[k]);
                            if (((uint16_t *)g.data)[k] != want)
                                fail_msg("%s, %d consumers: %g, expected %g",
                                         colo_dtype_name(dtypes[d]), n,
                                         ref_half_value(format(dtypes[d]), ((uint16_t *)g.data)[k]),
                                         ref_half_value(format(dtypes[d]), want));
                        }
                    }
                }
}

/* Three steps without setting the main gradient to zero. The caller's own is fp32, or the dtype. */
T_CASE(a_callers_gradient_takes_the_sum_of_a_step_at_once)
{
    uint64_t seed = t_seed();
    for (int mem = 0; mem < memories(); mem++)
        for (int d = 0; d < 2; d++)
            for (int wide = 0; wide < 2; wide++)
                for (int n = 1; n <= 8; n = 3 * n - 1 + (n == 1)) {
                    uint16_t some[N] = {0}, half[N];
                    float main[N];
                    double want[N];
                    colo_tensor_t t = vec(some, dtypes[d], mem), g;
                    colo_tensor_t d_t = wide ? vec(main, COLO_F32, mem) : vec(half, dtypes[d], mem);
                    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
                    for (int k = 0; k < N; k++) {
                        main[k] = (float)(k + 1) * 3;
                        half[k] = ref_half_round(format(dtypes[d]), (double)main[k]);
                        want[k] =
                            wide ? (double)main[k] : ref_half_value(format(dtypes[d]), half[k]);
                    }
                    assert_ok(colo_tape_create(&tape));
                    for (int step = 0; step < 3; step++) {
                        colo_value_t leaf;
                        choose(&seed, dtypes[d], n, 1, want);
                        assert_ok(colo_tape_leaf(tape, &t, &d_t, &leaf));
                        assert_ok(colo_tape_backward(tape, consumers(tape, &t, leaf, n, 1), &t));
                        assert_ok(colo_tape_gradient(tape, leaf, &g));
                        assert_ptr_equal(g.data, d_t.data);
                        assert_int_equal(g.dtype, d_t.dtype);
                        for (int k = 0; k < N; k++) {
                            if (!wide)
                                want[k] = ref_half_value(
                                    format(dtypes[d]), ref_half_round(format(dtypes[d]), want[k]));
                            double got =
                                wide ? (double)main[k] : ref_half_value(format(dtypes[d]), half[k]);
                            if (got != want[k])
                                fail_msg("%s into %s, %d consumers, step %d: %g, expected %g",
                                         colo_dtype_name(dtypes[d]), colo_dtype_name(d_t.dtype), n,
                                         step, got, want[k]);
                        }
                        colo_tape_reset(tape);
                    }
                }
}

T_CASE(a_node_that_fails_leaves_an_fp32_main_gradient)
{
    for (int n = 1; n <= 3; n++) {
        uint16_t some[N] = {0};
        float main[N];
        double sum[N] = {0};
        uint64_t seed = 7;
        colo_tensor_t t = vec(some, COLO_BF16, 0), d_t = vec(main, COLO_F32, 0);
        T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
        colo_value_t leaf;
        for (int k = 0; k < N; k++)
            main[k] = 5;
        choose(&seed, COLO_BF16, n, 1, sum);
        writers[n - 1].fails = COLO_ERR_PEER; /* the last to run */
        assert_ok(colo_tape_create(&tape));
        assert_ok(colo_tape_leaf(tape, &t, &d_t, &leaf));
        assert_fails(colo_tape_backward(tape, consumers(tape, &t, leaf, n, 1), &t), COLO_ERR_PEER,
                     "node 0 'writer'");
        for (int k = 0; k < N; k++)
            assert_true(main[k] == 5);
    }
}

T_CASE(a_gradient_of_another_dtype_is_refused)
{
    static const struct {
        colo_dtype_t t, d_t;
        const char *says;
    } bad[] = {
        {COLO_BF16, COLO_F16, "d_t of a leaf: dtype f16, its value is bf16; expected that or f32"},
        {COLO_F16, COLO_F64, "d_t of a leaf: dtype f64, its value is f16; expected that or f32"},
        {COLO_F32, COLO_BF16, "d_t of a leaf: dtype bf16, its value is f32"},
        {COLO_F64, COLO_F32, "d_t of a leaf: dtype f32, its value is f64"},
    };
    double data[N] = {0};
    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
    colo_value_t leaf = 77;
    assert_ok(colo_tape_create(&tape));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        colo_tensor_t t = vec(data, bad[i].t, 0), d_t = vec(data, bad[i].d_t, 0);
        assert_fails(colo_tape_leaf(tape, &t, &d_t, &leaf), COLO_ERR_SHAPE, bad[i].says);
        assert_int_equal(leaf, 77);
    }
    colo_tensor_t t = vec(data, COLO_BF16, 0), seed = vec(data, COLO_F32, 0);
    assert_ok(colo_tape_leaf(tape, &t, NULL, &leaf));
    assert_fails(colo_tape_backward(tape, leaf, &seed), COLO_ERR_SHAPE,
                 "seed: dtype f32, its value is bf16"); /* a seed is no main gradient */
}

T_MAIN("core/tape_sums")
