/* SPDX-License-Identifier: Apache-2.0 */
/* ref_sampling.h - which columns of a whole row top-k and top-p keep. */
#ifndef TESTS_REF_REF_SAMPLING_H
#define TESTS_REF_REF_SAMPLING_H

#include <stdbool.h>
#include <stdint.h>

/* kept [V]; x = factor z, top_k 0: all. False: a sum is so close to top_p that roundings decide. */
bool ref_sampling(double factor, const double *z, int64_t vocab, int64_t top_k, double top_p,
                  bool *kept);

#endif
