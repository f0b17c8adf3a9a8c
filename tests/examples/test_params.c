/* SPDX-License-Identifier: Apache-2.0 */
/* The captioner's parameters: the list, initial values, and cutting for tensor parallelism. */
#include "harness/harness.h"

#include "core/error.h"

#include <math.h>

#include "captioner.h"

static const cap_model_t model = CAP_MODEL_DEFAULT;

static int find(const cap_param_t *table, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(table[i].name, name))
            return i;
    fail_msg("no parameter is called %s", name);
    return -1;
}

T_CASE(the_list_has_the_documented_order_shapes_and_cuts)
{
    static const struct {
        const char *name;
        int64_t rows, cols, layer;
        cap_cut_t cut;
        cap_init_t init;
        bool encoder;
    } want[] = {
        {"enc.w1", 192, 4, -1, CAP_ROWS, CAP_INIT_NORMAL, true},
        {"enc.b1", 192, 1, -1, CAP_ROWS, CAP_INIT_ZERO, true},
        {"enc.w2", 96, 192, -1, CAP_COLS, CAP_INIT_NORMAL, true},
        {"enc.b2", 96, 1, -1, CAP_WHOLE, CAP_INIT_ZERO, true},
        {"embed", 256, 96, -1, CAP_WHOLE, CAP_INIT_NORMAL, false},
        {"pos", 72, 96, -1, CAP_WHOLE, CAP_INIT_NORMAL, false},
        {"layer0.ln1.g", 96, 1, 0, CAP_WHOLE, CAP_INIT_ONE, false},
        {"layer0.ln1.b", 96, 1, 0, CAP_WHOLE, CAP_INIT_ZERO, false},
        {"layer0.wq", 96, 96, 0, CAP_ROWS, CAP_INIT_NORMAL, false},
        {"layer0.bq", 96, 1, 0, CAP_ROWS, CAP_INIT_ZERO, false},
        {"layer0.wk", 96, 96, 0, CAP_ROWS, CAP_INIT_NORMAL, false},
        {"layer0.bk", 96, 1, 0, CAP_ROWS, CAP_INIT_ZERO, false},
        {"layer0.wv", 96, 96, 0, CAP_ROWS, CAP_INIT_NORMAL, false},
        {"layer0.bv", 96, 1, 0, CAP_ROWS, CAP_INIT_ZERO, false},
        {"layer0.wo", 96, 96, 0, CAP_COLS, CAP_INIT_NORMAL, false},
        {"layer0.bo", 96, 1, 0, CAP_WHOLE, CAP_INIT_ZERO, false},
        {"layer0.ln2.g", 96, 1, 0, CAP_WHOLE, CAP_INIT_ONE, false},
        {"layer0.ln2.b", 96, 1, 0, CAP_WHOLE, CAP_INIT_ZERO, false},
        {"layer0.wu", 384, 96, 0, CAP_ROWS, CAP_INIT_NORMAL, false},
        {"layer0.bu", 384, 1, 0, CAP_ROWS, CAP_INIT_ZERO, false},
        {"layer0.wd", 96, 384, 0, CAP_COLS, CAP_INIT_NORMAL, false},
        {"layer0.bd", 96, 1, 0, CAP_WHOLE, CAP_INIT_ZERO, false},
        {"layer1.ln1.g", 96, 1, 1, CAP_WHOLE, CAP_INIT_ONE, false},
    };
    cap_param_t table[CAP_MAX_PARAMS];
    int n = cap_params(&model, table);

    assert_int_equal(n, 41);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        assert_string_equal(table[i].name, want[i].name);
        assert_int_equal(table[i].rows, want[i].rows);
        assert_int_equal(table[i].cols, want[i].cols);
        assert_int_equal(table[i].layer, want[i].layer);
        assert_int_equal(table[i].cut, want[i].cut);
        assert_int_equal(table[i].init, want[i].init);
        assert_int_equal(table[i].encoder, want[i].encoder);
    }
    assert_string_equal(table[38].name, "lnf.g");
    assert_string_equal(table[39].name, "lnf.b");
    assert_string_equal(table[40].name, "head");
    assert_int_equal(table[38].layer, 2);
    assert_int_equal(table[40].layer, 2);
    assert_int_equal(table[40].rows, 256);
    assert_int_equal(table[40].cut, CAP_ROWS);
}

T_CASE(more_layers_than_the_table_holds_are_refused)
{
    cap_param_t table[CAP_MAX_PARAMS];
    cap_model_t m = {.width = 4, .heads = 1, .hidden = 4, .layers = 7};

    assert_int_equal(cap_params(&m, table), 9 + 7 * 16);
    m.layers = 8;
    assert_int_equal(cap_params(&m, table), -1);
    m.layers = -1;
    assert_int_equal(cap_params(&m, table), -1);
}

T_CASE(weights_depend_on_the_seed_and_the_parameter_alone)
{
    cap_param_t table[CAP_MAX_PARAMS];
    int n = cap_params(&model, table);
    int q = find(table, n, "layer0.wq"), k = find(table, n, "layer0.wk");
    static float a[96 * 96], b[96 * 96], c[96 * 96];

    cap_param_init(table, q, 7, a);
    cap_param_init(table, q, 7, b);
    assert_memory_equal(a, b, sizeof a);
    cap_param_init(table, q, 8, b);
    cap_param_init(table, k, 7, c);
    int same_b = 0, same_c = 0;
    for (int i = 0; i < 96 * 96; i++) {
        same_b += a[i] == b[i];
        same_c += a[i] == c[i];
    }
    assert_true(same_b < 10 && same_c < 10);
}

/* 9,216 draws: the mean is within 5 / sqrt(n) = 0.052 standard deviations, the second moment within
 * 5 sqrt(2 / n) = 0.074, the fourth (3 for a normal) within 5 sqrt(96 / n) = 0.51. */
T_CASE(weights_are_normal_with_the_stated_spread)
{
    cap_param_t table[CAP_MAX_PARAMS];
    int n = cap_params(&model, table), q = find(table, n, "layer0.wq");
    static float a[96 * 96];
    double m1 = 0, m2 = 0, m4 = 0, count = 96 * 96;

    cap_param_init(table, q, 1, a);
    for (int i = 0; i < 96 * 96; i++) {
        double z = (double)a[i] / table[q].std;
        m1 += z / count;
        m2 += z * z / count;
        m4 += z * z * z * z / count;
    }
    assert_true(fabs(m1) < 0.052);
    assert_true(fabs(m2 - 1.0) < 0.074);
    assert_true(fabs(m4 - 3.0) < 0.51);
    cap_param_init(table, find(table, n, "layer0.ln1.g"), 1, a);
    assert_true(a[0] == 1.0f && a[95] == 1.0f);
    cap_param_init(table, find(table, n, "layer0.bq"), 1, a);
    assert_true(a[0] == 0.0f && a[95] == 0.0f);
}

T_CASE(shards_put_back_make_the_whole_for_every_width)
{
    static const int64_t widths[] = {1, 2, 3, 4, 6, 12};
    cap_param_t table[CAP_MAX_PARAMS];
    int n = cap_params(&model, table);

    for (int i = 0; i < n; i++) {
        const cap_param_t *p = &table[i];
        int64_t count = p->rows * p->cols;
        COLO_AUTOFREE float *whole = malloc((size_t)count * sizeof(float));
        COLO_AUTOFREE float *back = malloc((size_t)count * sizeof(float));
        COLO_AUTOFREE float *shard = malloc((size_t)count * sizeof(float));

        for (int64_t j = 0; j < count; j++)
            whole[j] = (float)j;
        for (size_t x = 0; x < sizeof widths / sizeof *widths; x++) {
            int64_t w = widths[x], rows, cols, sum = 0;
            memset(back, 0xff, (size_t)count * sizeof(float)); /* NaN */
            for (int64_t t = 0; t < w; t++) {
                cap_param_shard_shape(p, t, w, &rows, &cols);
                sum += rows * cols;
                assert_true(rows * cols <= count);
                cap_param_shard(p, t, w, whole, shard);
                cap_param_unshard(p, t, w, shard, back);
            }
            assert_int_equal(sum, p->cut == CAP_WHOLE ? w * count : count);
            assert_memory_equal(whole, back, (size_t)count * sizeof(float));
        }
    }
}

T_CASE(a_shard_holds_its_own_rows_or_columns)
{
    cap_param_t table[CAP_MAX_PARAMS];
    int n = cap_params(&model, table);
    const cap_param_t *q = &table[find(table, n, "layer0.wq")];
    const cap_param_t *o = &table[find(table, n, "layer0.wo")];
    static float whole[96 * 96], shard[96 * 96];

    for (int j = 0; j < 96 * 96; j++)
        whole[j] = (float)j;
    cap_param_shard(q, 1, 3, whole, shard); /* rows 32..63 */
    assert_true(shard[0] == 32 * 96 && shard[95] == 32 * 96 + 95 && shard[31 * 96] == 63 * 96);
    cap_param_shard(o, 2, 4, whole, shard); /* columns 48..71 */
    assert_true(shard[0] == 48 && shard[23] == 71 && shard[24] == 96 + 48);
    assert_true(shard[95 * 24 + 23] == 95 * 96 + 71);
}

T_CASE(rows_of_the_head_split_unevenly_by_three)
{
    cap_param_t table[CAP_MAX_PARAMS];
    int n = cap_params(&model, table);
    const cap_param_t *head = &table[find(table, n, "head")];
    static const int64_t want[] = {85, 85, 86}; /* cuts at floor(256 / 3), floor(512 / 3) */

    for (int64_t t = 0; t < 3; t++) {
        int64_t rows, cols;
        cap_param_shard_shape(head, t, 3, &rows, &cols);
        assert_int_equal(rows, want[t]);
        assert_int_equal(cols, 96);
    }
}

T_MAIN("examples/params")
