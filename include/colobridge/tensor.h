/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor.h - a borrowed view of memory: pointer, dtype, shape, strides.
 *
 * A view owns nothing and is copied by value. Sizes are elements, int64. Strides follow DLPack.
 */
#ifndef COLOBRIDGE_TENSOR_H
#define COLOBRIDGE_TENSOR_H

#include <colobridge/status.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_NDIM_MAX 8

/* Callers give calls two kinds of memory: workspace, which a call uses until it is done, and saved
 * memory, which the library uses from a forward to its last backward. Both begin at a multiple of
 * COLO_ALIGNMENT bytes, as cudaMalloc() and aligned_alloc() give it. The ..._size() functions tell
 * how many bytes each needs, a multiple of COLO_ALIGNMENT, so several can follow each other in one
 * block. */
#define COLO_ALIGNMENT 256

/* The very same type as cudaStream_t; NULL on the host. */
typedef struct CUstream_st *colo_stream_t;

typedef enum colo_dtype_t {
    COLO_F32 = 0,
    COLO_F64 = 1,
    COLO_BF16 = 2,
    COLO_F16 = 3,
    COLO_I8 = 4,
    COLO_U8 = 5,
    COLO_I16 = 6,
    COLO_I32 = 7,
    COLO_I64 = 8,
    COLO_DTYPE_COUNT = 9
} colo_dtype_t;

typedef enum colo_mem_t { COLO_MEM_HOST = 0, COLO_MEM_CUDA = 1 } colo_mem_t;

typedef struct colo_tensor_t {
    void *data;
    colo_dtype_t dtype;
    colo_mem_t mem;
    int32_t device; /* CUDA ordinal, -1 for host memory */
    int32_t ndim;
    int64_t shape[COLO_NDIM_MAX];  /* elements, outermost axis first */
    int64_t stride[COLO_NDIM_MAX]; /* elements, as in DLPack; >= 0 */
    const uint64_t *version; /* borrowed, may be NULL: bumped by the owner on each in-place write */
} colo_tensor_t;

/** colo_dtype_size() - bytes of one element, 0 for an unknown dtype */
COLO_API size_t colo_dtype_size(colo_dtype_t dtype);
/** colo_dtype_name() - "f32", "bf16", "i64" ...; "?" for an unknown dtype */
COLO_API const char *colo_dtype_name(colo_dtype_t dtype);
/** colo_dtype_parse() - from the name above, also fp32, float32, bfloat16, half, int64 ...
 *  Errors: COLO_ERR_ARG, with the names that are known; @dtype is then untouched */
COLO_API colo_status_t colo_dtype_parse(const char *text, colo_dtype_t *dtype);
/** colo_dtype_is_float() - true for f32, f64, bf16, f16 */
COLO_API bool colo_dtype_is_float(colo_dtype_t dtype);

/** colo_tensor_host() - contiguous host view; ndim > COLO_NDIM_MAX, or no @shape,
 *  gives a view of ndim 0, data NULL */
COLO_API colo_tensor_t colo_tensor_host(void *data, colo_dtype_t dtype, int32_t ndim,
                                        const int64_t *shape);
/** colo_tensor_cuda() - contiguous view of memory on CUDA device @device */
COLO_API colo_tensor_t colo_tensor_cuda(void *data, colo_dtype_t dtype, int32_t device,
                                        int32_t ndim, const int64_t *shape);
/** colo_tensor_narrow() - the view of [start, start + length) along @axis; no copy, no check */
COLO_API colo_tensor_t colo_tensor_narrow(colo_tensor_t t, int32_t axis, int64_t start,
                                          int64_t length);
/**
 * colo_tensor_count() - number of elements; -1 if the product overflows, an extent is negative,
 * ndim is out of range, or @t is NULL
 */
COLO_API int64_t colo_tensor_count(const colo_tensor_t *t);
/** colo_tensor_is_contiguous() - row-major without gaps (axes of extent 1 do not matter) */
COLO_API bool colo_tensor_is_contiguous(const colo_tensor_t *t);
/**
 * colo_tensor_check() - ndim, shape, strides, dtype and data pointer (a multiple of an element)
 * are usable
 * @what:  name of the argument for the error message ("logits")
 * Errors: COLO_ERR_ARG, COLO_ERR_SHAPE
 */
COLO_API colo_status_t colo_tensor_check(const colo_tensor_t *t, const char *what);

#ifdef __cplusplus
}
#endif
#endif
