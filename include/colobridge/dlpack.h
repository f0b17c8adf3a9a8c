/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlpack.h - tensors of other libraries as views, and views as tensors for other libraries,
 * without a copy. Opt-in: not part of colobridge.h, needs <dlpack/dlpack.h>, or DLPack's header
 * included before this one from wherever it is; 0.6 or later, for versioned tensors 1.0.
 *
 * In: a view of a DLTensor borrows its memory, shapes are copied: it is valid as long as the owner
 * of the DLTensor keeps it. Out: a managed tensor, legacy or versioned, owns shapes and strides of
 * its own, borrows the memory, and calls back once when its taker is done. Everything here is
 * inline and local.
 */
#ifndef COLOBRIDGE_DLPACK_H
#define COLOBRIDGE_DLPACK_H

#ifndef DLPACK_DLPACK_H_
#include <dlpack/dlpack.h>
#endif

#include <stdlib.h>
#include <string.h>

#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * colo_tensor_from_dlpack() - a view of @in, legacy or versioned (their member dl_tensor)
 * @tensor:  out  bool becomes u8; page-locked host memory is COLO_MEM_HOST, managed memory
 *                COLO_MEM_CUDA; the version counter is NULL
 * Errors:   COLO_ERR_ARG, without an error message (the function calls nothing of the library):
 *           NULL, lanes other than 1, a dtype or device that the library does not know, more than
 *           COLO_NDIM_MAX axes, a negative extent or stride, 2^63 elements or more where
 *           strides are NULL
 */
static inline colo_status_t colo_tensor_from_dlpack(colo_tensor_t *tensor, const DLTensor *in)
{
    static const struct {
        uint8_t code, bits;
        colo_dtype_t dtype;
    } known[] = {{kDLFloat, 32, COLO_F32},     {kDLFloat, 64, COLO_F64}, {kDLBfloat, 16, COLO_BF16},
                 {kDLFloat, 16, COLO_F16},     {kDLInt, 8, COLO_I8},     {kDLUInt, 8, COLO_U8},
                 {kDLInt, 16, COLO_I16},       {kDLInt, 32, COLO_I32},   {kDLInt, 64, COLO_I64},
                 {6 /* kDLBool */, 8, COLO_U8}};
    colo_tensor_t t;
    size_t k = 0;
    int64_t n = 1;

    if (!tensor || !in || in->dtype.lanes != 1 || in->ndim < 0 || in->ndim > COLO_NDIM_MAX ||
        (in->ndim > 0 && !in->shape))
        return COLO_ERR_ARG;
    while (k < sizeof known / sizeof known[0] &&
           (known[k].code != in->dtype.code || known[k].bits != in->dtype.bits))
        k++;
    if (k == sizeof known / sizeof known[0])
        return COLO_ERR_ARG;
    memset(&t, 0, sizeof t);
    t.dtype = known[k].dtype;
    t.ndim = in->ndim;
    t.data = in->data ? (char *)in->data + in->byte_offset : NULL;
    if (in->device.device_type == kDLCPU || in->device.device_type == kDLCUDAHost) {
        t.mem = COLO_MEM_HOST;
        t.device = -1;
    } else if (in->device.device_type == kDLCUDA || in->device.device_type == kDLCUDAManaged) {
        t.mem = COLO_MEM_CUDA;
        t.device = in->device.device_id;
    } else {
        return COLO_ERR_ARG;
    }
    for (int32_t i = in->ndim - 1; i >= 0; i--) {
        t.shape[i] = in->shape[i];
        t.stride[i] = in->strides ? in->strides[i] : n; /* NULL: row-major, before DLPack 1.2 */
        if (t.shape[i] < 0 || t.stride[i] < 0)
            return COLO_ERR_ARG;
        if (!in->strides && t.shape[i] > 0) {
            if (n > INT64_MAX / t.shape[i])
                return COLO_ERR_ARG;
            n *= t.shape[i];
        }
    }
    *tensor = t;
    return COLO_OK;
}

/* What a managed tensor made here carries along. */
typedef struct colo_dlpack_given_t {
    union {
        DLManagedTensor legacy;
#ifdef DLPACK_MAJOR_VERSION
        struct DLManagedTensorVersioned versioned; /* 1.0 has no typedef of it in C */
#endif
    } managed;
    int64_t shape[COLO_NDIM_MAX], stride[COLO_NDIM_MAX];
    void (*done)(void *user);
    void *user;
} colo_dlpack_given_t;

static inline void colo_dlpack_done_(void *manager)
{
    colo_dlpack_given_t *given = (colo_dlpack_given_t *)manager;
    if (given->done)
        given->done(given->user);
    free(given);
}

static inline void colo_dlpack_delete_(DLManagedTensor *self)
{
    colo_dlpack_done_(self->manager_ctx);
}

/* The parts that both kinds share; NULL: no memory, or a view that cannot be exported. */
static inline colo_dlpack_given_t *colo_dlpack_give_(const colo_tensor_t *tensor, DLTensor *out,
                                                      void (*done)(void *), void *user)
{
    static const uint8_t code[COLO_DTYPE_COUNT] = {kDLFloat, kDLFloat, kDLBfloat, kDLFloat, kDLInt,
                                                   kDLUInt,  kDLInt,   kDLInt,    kDLInt};
    static const uint8_t bits[COLO_DTYPE_COUNT] = {32, 64, 16, 16, 8, 8, 16, 32, 64};
    colo_dlpack_given_t *given;

    if (!tensor || tensor->ndim < 0 || tensor->ndim > COLO_NDIM_MAX ||
        (unsigned)tensor->dtype >= COLO_DTYPE_COUNT)
        return NULL;
    given = (colo_dlpack_given_t *)calloc(1, sizeof *given);
    if (!given)
        return NULL;
    memcpy(given->shape, tensor->shape, sizeof given->shape);
    memcpy(given->stride, tensor->stride, sizeof given->stride);
    given->done = done;
    given->user = user;
    memset(out, 0, sizeof *out);
    out->data = tensor->data;
    out->device.device_type = tensor->mem == COLO_MEM_CUDA ? kDLCUDA : kDLCPU;
    out->device.device_id = tensor->mem == COLO_MEM_CUDA ? tensor->device : 0;
    out->ndim = tensor->ndim;
    out->dtype.code = code[tensor->dtype];
    out->dtype.bits = bits[tensor->dtype];
    out->dtype.lanes = 1;
    out->shape = given->shape;
    out->strides = given->stride;
    return given;
}

/**
 * colo_tensor_to_dlpack() - a managed tensor over the memory of @tensor; the receiver owns it
 * @done:   called once by its deleter, with @user; may be NULL. The memory is borrowed until then
 * Returns  NULL when there is no memory, or @tensor is no view; then @done is not called
 */
static inline DLManagedTensor *colo_tensor_to_dlpack(const colo_tensor_t *tensor,
                                                     void (*done)(void *user), void *user)
{
    DLTensor parts;
    colo_dlpack_given_t *given = colo_dlpack_give_(tensor, &parts, done, user);
    if (!given)
        return NULL;
    given->managed.legacy.dl_tensor = parts;
    given->managed.legacy.manager_ctx = given;
    given->managed.legacy.deleter = colo_dlpack_delete_;
    return &given->managed.legacy;
}

#ifdef DLPACK_MAJOR_VERSION
static inline void colo_dlpack_delete_versioned_(struct DLManagedTensorVersioned *self)
{
    colo_dlpack_done_(self->manager_ctx);
}

/**
 * colo_tensor_to_dlpack_versioned() - the same as DLPack 1.x has it
 * @flags:  DLPACK_FLAG_BITMASK_...; 0: may be written
 */
static inline struct DLManagedTensorVersioned *
colo_tensor_to_dlpack_versioned(const colo_tensor_t *tensor, uint64_t flags,
                                void (*done)(void *user), void *user)
{
    DLTensor parts;
    colo_dlpack_given_t *given = colo_dlpack_give_(tensor, &parts, done, user);
    if (!given)
        return NULL;
    given->managed.versioned.version.major = DLPACK_MAJOR_VERSION;
    given->managed.versioned.version.minor = DLPACK_MINOR_VERSION;
    given->managed.versioned.flags = flags;
    given->managed.versioned.dl_tensor = parts;
    given->managed.versioned.manager_ctx = given;
    given->managed.versioned.deleter = colo_dlpack_delete_versioned_;
    return &given->managed.versioned;
}
#endif

#ifdef __cplusplus
}
#endif
#endif
