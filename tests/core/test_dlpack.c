/* SPDX-License-Identifier: Apache-2.0 */
/* test_dlpack.c - DLPack's tensors in and out: every dtype, both kinds, when what is freed. */
#include "core/dlpack_abi.h"

#include <colobridge/dlpack.h>

#include "harness/harness.h"

static const struct {
    uint8_t code, bits;
} dtypes[COLO_DTYPE_COUNT] = {{kDLFloat, 32}, {kDLFloat, 64}, {kDLBfloat, 16},
                              {kDLFloat, 16}, {kDLInt, 8},    {kDLUInt, 8},
                              {kDLInt, 16},   {kDLInt, 32},   {kDLInt, 64}};

static void count(void *user)
{
    ++*(int *)user;
}

static void same(const colo_tensor_t *a, const colo_tensor_t *b)
{
    assert_ptr_equal(a->data, b->data);
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->mem, b->mem);
    assert_int_equal(a->device, b->device);
    assert_int_equal(a->ndim, b->ndim);
    for (int32_t i = 0; i < a->ndim; i++) {
        assert_int_equal(a->shape[i], b->shape[i]);
        assert_int_equal(a->stride[i], b->stride[i]);
    }
}

T_CASE(every_dtype_goes_out_and_comes_back)
{
    double memory[64];
    for (int d = 0; d < COLO_DTYPE_COUNT; d++)
        for (int cuda = 0; cuda < 2; cuda++) {
            const int64_t shape[] = {2, 3, 4};
            int done = 0;
            colo_tensor_t t = cuda ? colo_tensor_cuda(memory, (colo_dtype_t)d, 5, 3, shape)
                                   : colo_tensor_host(memory, (colo_dtype_t)d, 3, shape);
            colo_tensor_t back;
            t = colo_tensor_narrow(t, 2, 1, 2); /* strides that are not row-major */
            DLManagedTensor *m = colo_tensor_to_dlpack(&t, count, &done);
            struct DLManagedTensorVersioned *v =
                colo_tensor_to_dlpack_versioned(&t, 1, count, &done);
            assert_non_null(m);
            assert_non_null(v);
            assert_int_equal(m->dl_tensor.dtype.code, dtypes[d].code);
            assert_int_equal(m->dl_tensor.dtype.bits, dtypes[d].bits);
            assert_int_equal(m->dl_tensor.dtype.lanes, 1);
            assert_int_equal(v->dl_tensor.device.device_type, cuda ? kDLCUDA : kDLCPU);
            assert_int_equal(v->dl_tensor.device.device_id, cuda ? 5 : 0);
            assert_int_equal(v->version.major, DLPACK_MAJOR_VERSION);
            assert_int_equal(v->flags, 1);
            assert_int_equal(colo_tensor_from_dlpack(&back, &m->dl_tensor), COLO_OK);
            same(&back, &t);
            assert_int_equal(colo_tensor_from_dlpack(&back, &v->dl_tensor), COLO_OK);
            same(&back, &t);
            assert_null(back.version);
            assert_int_equal(done, 0);
            m->deleter(m);
            assert_int_equal(done, 1);
            v->deleter(v);
            assert_int_equal(done, 2);
        }
}

T_CASE(offsets_missing_strides_and_kinds_of_memory_are_understood)
{
    float memory[64];
    int64_t shape[] = {2, 0, 4}, plain[] = {2, 3, 4};
    DLTensor in = {.data = memory,
                   .device = {kDLCUDAHost, 0},
                   .ndim = 3,
                   .dtype = {kDLFloat, 32, 1},
                   .shape = plain,
                   .byte_offset = 8};
    colo_tensor_t t;
    assert_int_equal(colo_tensor_from_dlpack(&t, &in), COLO_OK);
    assert_ptr_equal(t.data, memory + 2);
    assert_int_equal(t.mem, COLO_MEM_HOST);
    assert_int_equal(t.device, -1);
    assert_true(colo_tensor_is_contiguous(&t));
    in.shape = shape;
    in.device = (DLDevice){kDLCUDAManaged, 3};
    in.dtype = (DLDataType){6, 8, 1}; /* bool */
    in.data = NULL;
    assert_int_equal(colo_tensor_from_dlpack(&t, &in), COLO_OK);
    assert_null(t.data);
    assert_int_equal(t.mem, COLO_MEM_CUDA);
    assert_int_equal(t.device, 3);
    assert_int_equal(t.dtype, COLO_U8);
    assert_int_equal(colo_tensor_count(&t), 0);
}

T_CASE(what_has_no_view_is_refused_and_nothing_written)
{
    int64_t shape[] = {2, 3}, stride[] = {3, 1}, negative[] = {-3, 1};
    int64_t large[] = {INT64_C(1) << 32, INT64_C(1) << 31};
    const DLTensor good = {.device = {kDLCPU, 0},
                           .ndim = 2,
                           .dtype = {kDLFloat, 32, 1},
                           .shape = shape,
                           .strides = stride};
    colo_tensor_t t, before;
    memset(&t, 0x5a, sizeof t);
    before = t;
#define REFUSED(change)                                                   \
    do {                                                                  \
        DLTensor in = good;                                               \
        change;                                                           \
        assert_int_equal(colo_tensor_from_dlpack(&t, &in), COLO_ERR_ARG); \
        assert_memory_equal(&t, &before, sizeof t);                       \
    } while (0)
    REFUSED(in.dtype.lanes = 4);
    REFUSED(in.dtype.bits = 24);
    REFUSED(in.dtype.code = kDLComplex);
    REFUSED(in.device.device_type = kDLVulkan);
    REFUSED(in.ndim = COLO_NDIM_MAX + 1);
    REFUSED(in.ndim = -1);
    REFUSED(in.strides = negative);
    REFUSED((in.shape = large, in.strides = NULL)); /* row-major strides of 2^63 elements */
    REFUSED(in.shape = NULL);
#undef REFUSED
    assert_int_equal(colo_tensor_from_dlpack(&t, NULL), COLO_ERR_ARG);
    assert_int_equal(colo_tensor_from_dlpack(NULL, &good), COLO_ERR_ARG);
    t.ndim = COLO_NDIM_MAX + 1;
    int done = 0;
    assert_null(colo_tensor_to_dlpack(&t, count, &done));
    assert_null(colo_tensor_to_dlpack_versioned(NULL, 0, count, &done));
    assert_int_equal(done, 0);
}

T_MAIN("core/dlpack")
