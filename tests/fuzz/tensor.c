/* SPDX-License-Identifier: Apache-2.0 */
/* tensor.c - DLPack tensors with any numbers: refused, or a view that names the same elements. */
#include "fuzz.h"

#include "core/dlpack_abi.h"

#include <colobridge/dlpack.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_t f = {data, size};
    int64_t shape[16], stride[16];
    static char memory[64];
    DLTensor in = {.data = memory, .shape = shape, .strides = fuzz_range(&f, 0, 1) ? stride : NULL};
    in.ndim = (int32_t)fuzz_range(&f, 0, 16) - 2;
    in.device.device_type = (DLDeviceType)fuzz_range(&f, 0, 15);
    in.device.device_id = (int32_t)fuzz_i64(&f);
    in.dtype.code = fuzz_u8(&f) % 20;
    in.dtype.bits = fuzz_u8(&f);
    in.dtype.lanes = (uint16_t)fuzz_range(&f, 0, 3);
    in.byte_offset = fuzz_u8(&f) % sizeof memory;
    for (int i = 0; i < 16; i++) {
        shape[i] = fuzz_i64(&f);
        stride[i] = fuzz_i64(&f);
    }
    colo_tensor_t t, before;
    memset(&t, 0x5a, sizeof t);
    before = t;
    if (colo_tensor_from_dlpack(&t, &in) < 0) {
        FUZZ_CHECK(memcmp(&t, &before, sizeof t) == 0, "a refused tensor was written");
        return 0;
    }
    FUZZ_CHECK(t.ndim == in.ndim && (char *)t.data == memory + in.byte_offset, "view");
    FUZZ_CHECK(colo_dtype_size(t.dtype) * 8 == in.dtype.bits, "%s of %d bits",
               colo_dtype_name(t.dtype), (int)in.dtype.bits);
    for (int32_t i = 0; i < t.ndim; i++)
        FUZZ_CHECK(t.shape[i] == shape[i] && t.shape[i] >= 0 && t.stride[i] >= 0 &&
                       (!in.strides || t.stride[i] == stride[i]),
                   "axis %d", (int)i);
    (void)colo_tensor_count(&t);
    return 0;
}
