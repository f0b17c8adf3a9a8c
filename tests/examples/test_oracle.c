/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The captioner's fp64 oracle: its forward against a number computed elsewhere and against cases
 * with a closed form, its backward against central differences of its forward.
 *
 * Differences use four points, f' = (8(f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h with h = 2^-11: the
 * truncation is h^4/30 f5 = 2e-15 f5, the rounding 1e-15 / h = 2e-12. Weights are multiples of
 * 2^-16 below 8, so that w + h and w - h are exact in fp32. An error counts relative to the larger
 * of the entry and 1e-3 of the largest gradient entry of all (some gradients, as that of a key
 * bias, are zero in exact arithmetic).
 */
#include "harness/harness.h"

#include <math.h>

#include "captioner.h"

enum { MAX_ROWS = 12, ALL = -1 };
static const cap_task_t uniform = CAP_TASK_DEFAULT;

struct fixture {
    cap_data_t data;
    cap_model_t model;
    cap_param_t table[CAP_MAX_PARAMS];
    int n;
    float *whole[CAP_MAX_PARAMS];
    double *grads[CAP_MAX_PARAMS], *other[CAP_MAX_PARAMS];
    cap_task_t task;
    int64_t rows[MAX_ROWS], nrows; /* samples */
};

static struct fixture f; /* of the case that runs */

static int64_t count_of(int i)
{
    return f.table[i].rows * f.table[i].cols;
}

static int close_model(void **state)
{
    for (int i = 0; i < f.n; i++) {
        free(f.whole[i]);
        free(f.grads[i]);
        free(f.other[i]);
    }
    cap_data_free(&f.data);
    f.n = 0;
    return 0;
}

static void open_model(cap_model_t model, double std, uint64_t seed)
{
    const char *path = getenv("CAPTIONER_DATA");
    char why[256];

    close_model(NULL);
    memset(&f, 0, sizeof f);
    if (cap_data_load(&f.data, path ? path : "examples/captioner/data/digits.csv", why,
                      sizeof why) < 0)
        fail_msg("%s", why);
    f.model = model;
    f.task = uniform;
    f.n = cap_params(&model, f.table);
    for (int i = 0; i < f.n; i++) {
        int64_t count = count_of(i);
        f.whole[i] = malloc((size_t)count * sizeof(float));
        f.grads[i] = malloc((size_t)count * sizeof(double));
        f.other[i] = malloc((size_t)count * sizeof(double));
        for (int64_t j = 0; j < count; j++) {
            /* the sum of 4 uniforms has variance 1/3 */
            double z = t_uniform(&seed) + t_uniform(&seed) + t_uniform(&seed) + t_uniform(&seed);
            double w = (z - 2.0) * sqrt(3.0) * std + (f.table[i].init == CAP_INIT_ONE);
            f.whole[i][j] = (float)(nearbyint(w * 65536.0) / 65536.0);
        }
    }
}

static double run(double **grads)
{
    return cap_oracle(&f.model, &f.task, &f.data, f.rows, f.nrows, (const float *const *)f.whole,
                      (double *const *)grads);
}

static int find(const char *name)
{
    for (int i = 0; i < f.n; i++)
        if (!strcmp(f.table[i].name, name))
            return i;
    fail_msg("no parameter is called %s", name);
    return -1;
}

/* ---- forward ---- */

/*
 * Computed by a separate program (plain Python, whole padded sequences of 22, erfc, no maximum
 * taken out of any softmax): 1 layer, width 8, 2 heads, hidden 6, rows 0, 7 and 1000, and element j
 * of parameter i = float(0.25 sin(0.7 i + 1.3 j + 0.5)).
 */
static void open_sines(void)
{
    open_model((cap_model_t){.width = 8, .heads = 2, .hidden = 6, .layers = 1}, 0.0, 1);
    for (int i = 0; i < f.n; i++)
        for (int64_t j = 0; j < count_of(i); j++)
            f.whole[i][j] = (float)(0.25 * sin(0.7 * i + 1.3 * (double)j + 0.5));
}

/* Samples of 1, no, 3 and 2 images. */
static void ragged_samples(void)
{
    static const int64_t rows[] = {0, -1, -1, -1, -1, -1, 7, 1000, 3, 1796, 5, -1};

    f.task = (cap_task_t){.ragged = true, .least = 0, .most = 3};
    f.nrows = 4;
    memcpy(f.rows, rows, sizeof rows);
}

T_CASE(loss_equals_a_number_computed_elsewhere)
{
    open_sines();
    f.nrows = 3;
    f.rows[0] = 0, f.rows[1] = 7, f.rows[2] = 1000;
    double loss = run(f.grads);
    if (!(fabs(loss - 5.485644292637598) < 1e-13))
        fail_msg("loss %.17g, expected 5.485644292637598", loss);
}

/* The same program, for samples of 1, no, 3 and 2 images that are cropped, on one packed sequence
 * of 113 positions with a mask between samples. */
T_CASE(ragged_loss_equals_a_number_computed_elsewhere)
{
    open_sines();
    ragged_samples();
    double loss = run(f.grads);
    if (!(fabs(loss - 5.467671040790365) < 1e-13))
        fail_msg("loss %.17g, expected 5.467671040790365", loss);
}

T_CASE(a_zero_head_makes_every_byte_equally_likely)
{
    open_model((cap_model_t)CAP_MODEL_DEFAULT, 0.2, 2);
    int head = find("head");
    memset(f.whole[head], 0, (size_t)count_of(head) * sizeof(float));
    f.nrows = 2;
    f.rows[0] = 3, f.rows[1] = 11;
    assert_true(fabs(run(f.grads) - log(256.0)) < 1e-12);

    /* and then no gradient reaches anything but the head */
    for (int i = 0; i < f.n; i++) {
        double sum = 0.0;
        for (int64_t j = 0; j < count_of(i); j++)
            sum += fabs(f.grads[i][j]);
        if (i == head)
            assert_true(sum > 1.0);
        else
            assert_true(sum == 0.0);
    }
}

/* "three" has 6 target tokens, "one" 4: the mean over tokens is not the mean over samples. */
T_CASE(the_loss_is_a_mean_over_tokens_of_the_batch)
{
    open_model((cap_model_t){.width = 8, .heads = 2, .hidden = 4, .layers = 1}, 0.2, 3);
    f.nrows = 1;
    f.rows[0] = 3;
    double three = run(f.other);
    f.rows[0] = 1;
    double one = run(f.grads);
    int head = find("head");
    double expect_grad = (6.0 * f.other[head][0] + 4.0 * f.grads[head][0]) / 10.0;
    f.nrows = 2;
    f.rows[1] = 3;
    assert_int_equal(f.data.label[1], 1);
    assert_int_equal(f.data.label[3], 3);
    assert_true(fabs(run(f.grads) - (6.0 * three + 4.0 * one) / 10.0) < 1e-13);
    assert_true(fabs(f.grads[head][0] - expect_grad) < 1e-14);
    assert_true(fabs(three - one) > 1e-4);
}

/* ---- backward ---- */

static double difference(int i, int64_t j)
{
    const float h = 0x1p-11f, w = f.whole[i][j];
    double offset[4];
    static const float step[] = {-2.0f, -1.0f, 1.0f, 2.0f};

    for (int k = 0; k < 4; k++) {
        f.whole[i][j] = w + step[k] * h;
        offset[k] = run(f.other);
    }
    f.whole[i][j] = w;
    return (8.0 * (offset[2] - offset[1]) - (offset[3] - offset[0])) / (12.0 * (double)h);
}

static double largest(int i, int64_t *where)
{
    double max = 0.0;
    for (int64_t j = 0; j < count_of(i); j++)
        if (fabs(f.grads[i][j]) > max) {
            max = fabs(f.grads[i][j]);
            *where = j;
        }
    return max;
}

static void compare(int i, int64_t j, double floor)
{
    double numeric = difference(i, j), found = f.grads[i][j];
    double error = fabs(numeric - found) / fmax(fabs(numeric), floor);
    if (!(error <= 1e-6))
        fail_msg("%s[%lld]: gradient %.12g, central difference %.12g, relative error %.2g",
                 f.table[i].name, (long long)j, found, numeric, error);
}

/* @random entries of every parameter (ALL: each) and the one with the largest gradient */
static void check_gradients(int64_t random, uint64_t seed)
{
    int64_t where = 0;
    double floor = 0.0;

    assert_true(isfinite(run(f.grads)));
    for (int i = 0; i < f.n; i++)
        floor = fmax(floor, 1e-3 * largest(i, &where));
    for (int i = 0; i < f.n; i++) {
        int64_t count = count_of(i), tries = random == ALL ? count : random;
        where = 0;
        double max = largest(i, &where);
        assert_true(strstr(f.table[i].name, ".bk") || max > 1e-6); /* a key bias has none */
        compare(i, where, floor);
        for (int64_t k = 0; k < tries; k++)
            compare(i, random == ALL ? k : t_below(&seed, count), floor);
    }
}

/* Has the last patch of image @row a pixel? Without layers no other patch reaches a target, and the
 * weights that pixels are multiplied with have a gradient only if one does. */
static bool ends_in_ink(int64_t row)
{
    float patch[CAP_PATCHES][CAP_PATCH], sum = 0.0f;
    cap_patches(f.data.pixels[row], patch[0]);
    for (int i = 0; i < CAP_PATCH; i++)
        sum += patch[CAP_PATCHES - 1][i];
    return sum > 0.0f;
}

T_CASE(gradients_are_central_differences_in_a_tiny_model)
{
    static const cap_model_t models[] = {
        {.width = 4, .heads = 2, .hidden = 3, .layers = 1},
        {.width = 6, .heads = 1, .hidden = 5, .layers = 2},
        {.width = 6, .heads = 3, .hidden = 8, .layers = 3},
        {.width = 8, .heads = 8, .hidden = 2, .layers = 0},
    };
    uint64_t seed = t_seed();
    bool whole = t_scaled(100) == 100; /* every entry of one of them, 4 runs each */

    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        open_model(models[m], 0.2, seed + m);
        f.nrows = 3;
        for (int i = 0; i < 3; i++)
            do
                f.rows[i] = t_below(&seed, f.data.n);
            while (i == 0 && !ends_in_ink(f.rows[i]));
        check_gradients(m == 0 && whole ? ALL : 25, seed);
    }
}

T_CASE(ragged_gradients_are_central_differences)
{
    uint64_t seed = t_seed();

    open_model((cap_model_t){.width = 6, .heads = 2, .hidden = 5, .layers = 2}, 0.2, seed);
    ragged_samples();
    check_gradients(25, seed);
}

T_CASE(gradients_are_central_differences_in_the_default_model)
{
    uint64_t seed = t_seed();

    open_model((cap_model_t)CAP_MODEL_DEFAULT, 0.2, seed);
    f.nrows = 1;
    f.rows[0] = 1201;
    check_gradients(0, seed);
}

T_CASE(positions_and_bytes_that_no_target_sees_have_no_gradient)
{
    open_model((cap_model_t){.width = 8, .heads = 2, .hidden = 4, .layers = 2}, 0.2, 5);
    int pos = find("pos"), embed = find("embed");
    f.nrows = 2;
    f.rows[0] = 1, f.rows[1] = 3; /* "one", "three" */
    for (int i = 0; i < f.n; i++)
        memset(f.grads[i], 0xff, (size_t)count_of(i) * sizeof(double));
    run(f.grads); /* over NaNs: gradients are written, not added */
    for (int64_t s = 0; s < CAP_POSITIONS; s++) {
        double sum = 0.0;
        for (int i = 0; i < 8; i++)
            sum += fabs(f.grads[pos][s * 8 + i]);
        /* "three" starts at 16; its last byte, at 20, still predicts the NUL */
        assert_true(s <= 20 ? sum > 1e-6 : sum == 0.0);
    }
    for (int64_t b = 0; b < CAP_VOCAB; b++) {
        double sum = 0.0;
        for (int i = 0; i < 8; i++)
            sum += fabs(f.grads[embed][b * 8 + i]);
        assert_true(b && strchr("onethr", (int)b) ? sum > 1e-6 : sum == 0.0);
    }
}

T_MAIN_EACH("examples/oracle", NULL, close_model)
