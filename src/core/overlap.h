/* SPDX-License-Identifier: Apache-2.0 */
/* overlap.h (private) - do views share an element: two of them, or one with itself? */
#ifndef COLO_CORE_OVERLAP_H
#define COLO_CORE_OVERLAP_H

#include <colobridge/tensor.h>

/* All views here are some that colo_tensor_check() accepts. */

/* Do two elements of @t share an address? Exact, but for absurd strides, of which it says yes: then
 * the search stops after a bounded number of moves. */
bool colo_tensor_overlaps(const colo_tensor_t *t);

/* Do @a and @b share no element: other memory, other columns of the same rows, or rows in turn?
 * Exact, but for absurd strides, of which it says no. */
bool colo_tensors_apart(const colo_tensor_t *a, const colo_tensor_t *b);

#endif
