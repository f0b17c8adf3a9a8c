/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample.c - the smallest program worth planting a bug under: it shows that planting works at all
 * (README.md). Not a test of tensors; those are in tests/core.
 */
#include "harness/harness.h"

T_CASE(a_narrowed_view_starts_at_its_first_element)
{
    float x[3][4];
    colo_tensor_t whole = colo_tensor_host(x, COLO_F32, 2, (int64_t[]){3, 4});
    colo_tensor_t part = colo_tensor_narrow(whole, 0, 1, 2);
    assert_ptr_equal(part.data, &x[1][0]);
}

T_CASE(a_narrowed_view_has_the_length_asked_for)
{
    float x[3][4];
    colo_tensor_t whole = colo_tensor_host(x, COLO_F32, 2, (int64_t[]){3, 4});
    colo_tensor_t part = colo_tensor_narrow(whole, 1, 1, 2);
    assert_int_equal(part.shape[0], 3);
    assert_int_equal(part.shape[1], 2);
}

T_MAIN("mutants/sample")
