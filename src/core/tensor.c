/* SPDX-License-Identifier: Apache-2.0 */
/* tensor.c - views: making, narrowing, checking. Knows dtypes and strides, nothing of layouts. */
#include <colobridge/tensor.h>

#include "core/error.h"

#include <string.h>

static const struct {
    const char *name;
    size_t size;
    bool is_float;
    const char *also[3];
} dtypes[COLO_DTYPE_COUNT] = {
    [COLO_F32] = {"f32", 4, true, {"fp32", "float32", "float"}},
    [COLO_F64] = {"f64", 8, true, {"fp64", "float64", "double"}},
    [COLO_BF16] = {"bf16", 2, true, {"bfloat16", NULL, NULL}},
    [COLO_F16] = {"f16", 2, true, {"fp16", "float16", "half"}},
    [COLO_I8] = {"i8", 1, false, {"int8", NULL, NULL}},
    [COLO_U8] = {"u8", 1, false, {"uint8", NULL, NULL}},
    [COLO_I16] = {"i16", 2, false, {"int16", NULL, NULL}},
    [COLO_I32] = {"i32", 4, false, {"int32", NULL, NULL}},
    [COLO_I64] = {"i64", 8, false, {"int64", NULL, NULL}},
};

/* Before colo_tensor_check() it may be any number. */
static bool ndim_ok(const colo_tensor_t *tensor)
{
    return tensor->ndim >= 0 && tensor->ndim <= COLO_NDIM_MAX;
}

static bool known(colo_dtype_t dtype)
{
    return (unsigned)dtype < COLO_DTYPE_COUNT;
}

size_t colo_dtype_size(colo_dtype_t dtype)
{
    return known(dtype) ? dtypes[dtype].size : 0;
}

const char *colo_dtype_name(colo_dtype_t dtype)
{
    return known(dtype) ? dtypes[dtype].name : "?";
}

bool colo_dtype_is_float(colo_dtype_t dtype)
{
    return known(dtype) && dtypes[dtype].is_float;
}

colo_status_t colo_dtype_parse(const char *text, colo_dtype_t *dtype)
{
    COLO_FAIL_IF(!text || !dtype, COLO_ERR_ARG, "dtype: %s is NULL",
                 text ? "the output" : "the text");
    for (int i = 0; i < COLO_DTYPE_COUNT; i++) {
        bool hit = strcmp(text, dtypes[i].name) == 0;
        for (int k = 0; k < 3 && dtypes[i].also[k]; k++)
            hit = hit || strcmp(text, dtypes[i].also[k]) == 0;
        if (hit) {
            *dtype = (colo_dtype_t)i;
            return COLO_OK;
        }
    }
    return colo_fail(COLO_ERR_ARG,
                     "dtype '%.40s' is unknown; known are f32 f64 bf16 f16 i8 u8 i16 i32 i64",
                     text);
}

static colo_tensor_t contiguous(void *data, colo_dtype_t dtype, colo_mem_t mem, int32_t device,
                                int32_t ndim, const int64_t *shape)
{
    colo_tensor_t tensor = {
        .data = data, .dtype = dtype, .mem = mem, .device = device, .ndim = ndim};
    if (ndim < 0 || ndim > COLO_NDIM_MAX || (ndim > 0 && !shape)) {
        tensor.ndim = 0;
        tensor.data = NULL;
        return tensor;
    }
    int64_t next = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        tensor.shape[i] = shape[i];
        tensor.stride[i] = next;
        /* a product that overflows is caught by colo_tensor_check(); here it must only not trap */
        if (shape[i] > 1 && !colo_mul_ok(next, shape[i], &next))
            next = INT64_MAX;
    }
    return tensor;
}

colo_tensor_t colo_tensor_host(void *data, colo_dtype_t dtype, int32_t ndim, const int64_t *shape)
{
    return contiguous(data, dtype, COLO_MEM_HOST, -1, ndim, shape);
}

colo_tensor_t colo_tensor_cuda(void *data, colo_dtype_t dtype, int32_t device, int32_t ndim,
                               const int64_t *shape)
{
    return contiguous(data, dtype, COLO_MEM_CUDA, device, ndim, shape);
}

colo_tensor_t colo_tensor_narrow(colo_tensor_t tensor, int32_t axis, int64_t start, int64_t length)
{
    if (tensor.data)
        tensor.data =
            (void *)((uintptr_t)tensor.data + (uintptr_t)start * (uintptr_t)tensor.stride[axis] *
                                                  colo_dtype_size(tensor.dtype));
    tensor.shape[axis] = length;
    return tensor;
}

int64_t colo_tensor_count(const colo_tensor_t *tensor)
{
    int64_t n = 1;
    bool fits = true;
    if (!tensor || !ndim_ok(tensor))
        return -1;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0)
            return -1;
        if (tensor->shape[i] == 0)
            return 0;
        fits = fits && colo_mul_ok(n, tensor->shape[i], &n);
    }
    return fits ? n : -1;
}

bool colo_tensor_is_contiguous(const colo_tensor_t *tensor)
{
    int64_t next = 1;
    if (!tensor || !ndim_ok(tensor))
        return false;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] == 0)
            return true;
        if (tensor->shape[i] != 1 && tensor->stride[i] != next)
            return false;
        if (!colo_mul_ok(next, tensor->shape[i], &next))
            return false;
    }
    return true;
}

colo_status_t colo_tensor_check(const colo_tensor_t *tensor, const char *what)
{
    COLO_FAIL_IF(!tensor, COLO_ERR_ARG, "%s: tensor is NULL", what);
    COLO_FAIL_IF(!known(tensor->dtype), COLO_ERR_ARG, "%s: dtype %d is unknown", what,
                 (int)tensor->dtype);
    COLO_FAIL_IF(tensor->mem != COLO_MEM_HOST && tensor->mem != COLO_MEM_CUDA, COLO_ERR_ARG,
                 "%s: memory kind %d is unknown", what, (int)tensor->mem);
    COLO_FAIL_IF(!ndim_ok(tensor), COLO_ERR_SHAPE, "%s: %d axes, expected 0..%d", what,
                 (int)tensor->ndim, COLO_NDIM_MAX);
    int64_t reach = 0;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        int64_t span;
        COLO_FAIL_IF(tensor->shape[i] < 0, COLO_ERR_SHAPE, "%s: axis %d has extent %lld", what,
                     (int)i, (long long)tensor->shape[i]);
        COLO_FAIL_IF(tensor->stride[i] < 0, COLO_ERR_SHAPE,
                     "%s: axis %d has stride %lld, expected >= 0", what, (int)i,
                     (long long)tensor->stride[i]);
        COLO_FAIL_IF(tensor->shape[i] > 1 &&
                         (!colo_mul_ok(tensor->shape[i] - 1, tensor->stride[i], &span) ||
                          !colo_add_ok(reach, span, &reach)),
                     COLO_ERR_SHAPE, "%s: its strides reach past 2^63 elements", what);
    }
    int64_t n = colo_tensor_count(tensor), bytes;
    COLO_FAIL_IF(n < 0 || !colo_add_ok(reach, 1, &reach) ||
                     !colo_mul_ok(reach, (int64_t)dtypes[tensor->dtype].size, &bytes),
                 COLO_ERR_SHAPE, "%s: more than 2^63 bytes", what);
    COLO_FAIL_IF(n > 0 && !tensor->data, COLO_ERR_ARG, "%s: data is NULL for %lld elements", what,
                 (long long)n);
    COLO_FAIL_IF(n > 0 && (uintptr_t)tensor->data % dtypes[tensor->dtype].size, COLO_ERR_ARG,
                 "%s: data %p is no multiple of %zu bytes, an element", what, tensor->data,
                 dtypes[tensor->dtype].size);
    return COLO_OK;
}
