/* SPDX-License-Identifier: Apache-2.0 */
/* ref_sequence.h - which token every element of every context rank is, by cutting lists. */
#ifndef TESTS_REF_REF_SEQUENCE_H
#define TESTS_REF_REF_SEQUENCE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ref_token {
    int64_t row, x; /* token x of a row; x is -1 for padding */
} ref_token_t;

/* One row of @length tokens in a list of @capacity: at its front, or in the last of its first
 * @columns.
 */
void ref_sequence_row(int64_t row, int64_t length, int64_t capacity, int64_t columns, bool left,
                      ref_token_t *list);
/* Appends what context rank @rank of @cp has of @list [n] to @out, zigzag or one part in cp;
 * returns how many. */
int64_t ref_sequence_cut(const ref_token_t *list, int64_t n, int64_t cp, int64_t rank,
                         bool contiguous, ref_token_t *out);

#endif
