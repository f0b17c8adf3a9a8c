/* SPDX-License-Identifier: Apache-2.0 */
/* culprit.h - what the rank at fault does in a drill: without memory, or in calls beyond the job.
 */
#ifndef TESTS_FAULTS_CULPRIT_H
#define TESTS_FAULTS_CULPRIT_H

#include "faults/drill.h"

#include <sys/resource.h>

/* From now on this process gets @spare bytes of address space more, until release_memory(). */
void limit_address_space(rlim_t spare);
/* And takes what malloc() can give without any. */
void exhaust_memory(void);
void release_memory(void);

/* A ragged batch between @src and @dst, both of float rows of @width; collective. The rank at fault
 * "segments" has the image at another position. */
colo_status_t carry_batch(struct rank *r, const colo_layout_t *src, const colo_layout_t *dst,
                          int64_t width);
/* The loss of four tokens over a vocabulary that all ranks share, two tokens at a time; collective.
 * @other: this rank takes three. */
colo_status_t loss_in_chunks(colo_comm_t *world, bool other);

#endif
