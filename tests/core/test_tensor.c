/* SPDX-License-Identifier: Apache-2.0 */
/* test_tensor.c - views: dtypes, strides, narrowing, and every reason to refuse one. */
#include "harness/harness.h"

static const struct {
    colo_dtype_t dtype;
    const char *name;
    size_t size;
    bool is_float;
    const char *also[3];
} dtypes[] = {
    {COLO_F32, "f32", 4, true, {"fp32", "float32", "float"}},
    {COLO_F64, "f64", 8, true, {"fp64", "float64", "double"}},
    {COLO_BF16, "bf16", 2, true, {"bfloat16", NULL, NULL}},
    {COLO_F16, "f16", 2, true, {"fp16", "float16", "half"}},
    {COLO_I8, "i8", 1, false, {"int8", NULL, NULL}},
    {COLO_U8, "u8", 1, false, {"uint8", NULL, NULL}},
    {COLO_I16, "i16", 2, false, {"int16", NULL, NULL}},
    {COLO_I32, "i32", 4, false, {"int32", NULL, NULL}},
    {COLO_I64, "i64", 8, false, {"int64", NULL, NULL}},
};

T_CASE(dtypes_have_names_sizes_and_kinds)
{
    assert_int_equal(sizeof dtypes / sizeof dtypes[0], COLO_DTYPE_COUNT);
    for (int i = 0; i < COLO_DTYPE_COUNT; i++) {
        colo_dtype_t got = COLO_DTYPE_COUNT, d = dtypes[i].dtype;
        assert_int_equal(colo_dtype_size(d), dtypes[i].size);
        assert_string_equal(colo_dtype_name(d), dtypes[i].name);
        assert_int_equal(colo_dtype_is_float(d), dtypes[i].is_float);
        assert_ok(colo_dtype_parse(dtypes[i].name, &got));
        assert_int_equal(got, d);
        for (int k = 0; k < 3 && dtypes[i].also[k]; k++) {
            got = COLO_DTYPE_COUNT;
            assert_ok(colo_dtype_parse(dtypes[i].also[k], &got));
            assert_int_equal(got, d);
        }
    }
    static const int foreign[] = {-1, COLO_DTYPE_COUNT, 1000};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(colo_dtype_size((colo_dtype_t)foreign[i]), 0);
        assert_string_equal(colo_dtype_name((colo_dtype_t)foreign[i]), "?");
        assert_false(colo_dtype_is_float((colo_dtype_t)foreign[i]));
    }
}

T_CASE(unknown_dtype_names_are_refused)
{
    static const char *const wrong[] = {"", "f", "F32", "f32 ", " f32", "float3", "i128", "bf-16"};
    colo_dtype_t d = COLO_I16;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_fails(colo_dtype_parse(wrong[i], &d), COLO_ERR_ARG, wrong[i]);
    assert_fails(colo_dtype_parse(NULL, &d), COLO_ERR_ARG, "NULL");
    assert_fails(colo_dtype_parse("f32", NULL), COLO_ERR_ARG, "NULL");
    assert_int_equal(d, COLO_I16);
}

T_CASE(contiguous_views_are_row_major)
{
    float x[24];
    colo_tensor_t t = colo_tensor_host(x, COLO_F32, 3, (int64_t[]){2, 3, 4});
    assert_ptr_equal(t.data, x);
    assert_int_equal(t.mem, COLO_MEM_HOST);
    assert_int_equal(t.device, -1);
    assert_int_equal(t.stride[0], 12);
    assert_int_equal(t.stride[1], 4);
    assert_int_equal(t.stride[2], 1);
    assert_null(t.version);
    assert_int_equal(colo_tensor_count(&t), 24);
    assert_true(colo_tensor_is_contiguous(&t));
    assert_ok(colo_tensor_check(&t, "x"));
    colo_tensor_t g = colo_tensor_cuda(x, COLO_BF16, 3, 1, (int64_t[]){24});
    assert_int_equal(g.mem, COLO_MEM_CUDA);
    assert_int_equal(g.device, 3);
    colo_tensor_t scalar = colo_tensor_host(x, COLO_F64, 0, NULL);
    assert_int_equal(colo_tensor_count(&scalar), 1);
    assert_ok(colo_tensor_check(&scalar, "scalar"));
}

T_CASE(too_many_axes_give_an_empty_view)
{
    int64_t shape[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    float x;
    colo_tensor_t t = colo_tensor_host(&x, COLO_F32, 9, shape);
    assert_int_equal(t.ndim, 0);
    assert_null(t.data);
    t = colo_tensor_host(&x, COLO_F32, -1, shape);
    assert_int_equal(t.ndim, 0);
    assert_null(t.data);
    t = colo_tensor_host(&x, COLO_F32, 8, shape);
    assert_int_equal(t.ndim, 8);
}

T_CASE(narrowing_moves_the_pointer_and_keeps_strides)
{
    int16_t x[60];
    colo_tensor_t t = colo_tensor_host(x, COLO_I16, 3, (int64_t[]){3, 4, 5});
    colo_tensor_t n = colo_tensor_narrow(colo_tensor_narrow(t, 1, 1, 2), 2, 3, 2);
    assert_ptr_equal(n.data, x + 5 + 3);
    assert_int_equal(n.shape[0], 3);
    assert_int_equal(n.shape[1], 2);
    assert_int_equal(n.shape[2], 2);
    assert_int_equal(n.stride[0], 20);
    assert_int_equal(n.stride[1], 5);
    assert_false(colo_tensor_is_contiguous(&n));
    assert_int_equal(colo_tensor_count(&n), 12);
    colo_tensor_t rows = colo_tensor_narrow(t, 0, 1, 2);
    assert_true(colo_tensor_is_contiguous(&rows));
    colo_tensor_t null = colo_tensor_host(NULL, COLO_I16, 1, (int64_t[]){0});
    assert_null(colo_tensor_narrow(null, 0, 0, 0).data);
}

T_CASE(axes_of_extent_one_do_not_break_contiguity)
{
    float x[6];
    colo_tensor_t t = colo_tensor_host(x, COLO_F32, 3, (int64_t[]){2, 1, 3});
    t.stride[1] = 777;
    assert_true(colo_tensor_is_contiguous(&t));
    t.stride[0] = 4;
    assert_false(colo_tensor_is_contiguous(&t));
    t.shape[2] = 0; /* nothing is always contiguous */
    assert_true(colo_tensor_is_contiguous(&t));
    assert_int_equal(colo_tensor_count(&t), 0);
}

T_CASE(counts_notice_overflow_and_negative_extents)
{
    colo_tensor_t t =
        colo_tensor_host(NULL, COLO_U8, 2, (int64_t[]){INT64_C(1) << 31, INT64_C(1) << 31});
    assert_true(colo_tensor_count(&t) == INT64_C(1) << 62);
    t.shape[1] *= 2;
    assert_int_equal(colo_tensor_count(&t), -1);
    t.shape[0] = 0;
    assert_int_equal(colo_tensor_count(&t), 0);
    t.shape[0] = -1;
    assert_int_equal(colo_tensor_count(&t), -1);
}

T_CASE(views_beyond_63_bits_are_noticed)
{
    enum { AXES = 3 };
    float x[1] = {0};
    const int64_t big = INT64_C(1) << 40;
    colo_tensor_t t = colo_tensor_host(x, COLO_F32, AXES, (int64_t[]){2, big, big});
    assert_int_equal(t.stride[0], INT64_MAX); /* the product, cut */
    assert_fails(colo_tensor_check(&t, "x"), COLO_ERR_SHAPE, "past 2^63");
    t = colo_tensor_host(x, COLO_F32, AXES, (int64_t[]){big, big, 2});
    assert_int_equal(colo_tensor_count(&t), -1);
    assert_false(colo_tensor_is_contiguous(&t));
    memset(t.stride, 0, sizeof t.stride); /* one element, replicated too often to count */
    assert_fails(colo_tensor_check(&t, "x"), COLO_ERR_SHAPE, "more than 2^63 bytes");
    t = colo_tensor_host(x, COLO_F32, 2, (int64_t[]){2, 2});
    t.stride[0] = t.stride[1] = INT64_MAX; /* each fits, both do not */
    assert_fails(colo_tensor_check(&t, "x"), COLO_ERR_SHAPE, "past 2^63");
}

T_CASE(a_view_of_too_many_or_negative_axes_has_no_count)
{
    float x[1] = {0};
    colo_tensor_t t = colo_tensor_host(x, COLO_F32, 8, (int64_t[]){1, 1, 1, 1, 1, 1, 1, 1});
    assert_int_equal(colo_tensor_count(&t), 1);
    assert_true(colo_tensor_is_contiguous(&t));
    for (int i = 0; i < 2; i++) {
        t.ndim = i ? -1 : COLO_NDIM_MAX + 1;
        assert_int_equal(colo_tensor_count(&t), -1);
        assert_false(colo_tensor_is_contiguous(&t));
    }
}

T_CASE(every_bad_view_is_refused_by_name)
{
    float x[6];
    const colo_tensor_t good = colo_tensor_host(x, COLO_F32, 2, (int64_t[]){2, 3});
    assert_ok(colo_tensor_check(&good, "logits"));
    assert_fails(colo_tensor_check(NULL, "logits"), COLO_ERR_ARG, "logits: tensor is NULL");
#define BAD(change, status, text)                                    \
    do {                                                             \
        colo_tensor_t t = good;                                      \
        change;                                                      \
        assert_fails(colo_tensor_check(&t, "logits"), status, text); \
    } while (0)
    BAD(t.dtype = (colo_dtype_t)99, COLO_ERR_ARG, "logits: dtype 99");
    BAD(t.mem = (colo_mem_t)5, COLO_ERR_ARG, "logits: memory kind 5");
    BAD(t.ndim = 9, COLO_ERR_SHAPE, "logits: 9 axes");
    BAD(t.ndim = -1, COLO_ERR_SHAPE, "logits: -1 axes");
    BAD(t.shape[1] = -3, COLO_ERR_SHAPE, "axis 1 has extent -3");
    BAD(t.stride[0] = -3, COLO_ERR_SHAPE, "axis 0 has stride -3");
    BAD(t.stride[0] = t.stride[1] = INT64_MAX, COLO_ERR_SHAPE, "past 2^63");
    /* the elements are few, the bytes between them too many */
    BAD(t.stride[0] = INT64_MAX / 2, COLO_ERR_SHAPE, "2^63 bytes");
    BAD(t.data = NULL, COLO_ERR_ARG, "data is NULL for 6 elements");
    BAD(t.data = (char *)good.data + 1, COLO_ERR_ARG, "is no multiple of 4 bytes, an element");
#undef BAD
    colo_tensor_t t = good; /* replicated rows are a legal view */
    t.stride[0] = 0;
    assert_ok(colo_tensor_check(&t, "logits"));
    t.shape[0] = 0; /* and of nothing anything is */
    for (int i = 0; i < 2; i++) {
        t.data = i ? (char *)good.data + 1 : NULL;
        assert_ok(colo_tensor_check(&t, "logits"));
    }
}

T_MAIN("core/tensor")
