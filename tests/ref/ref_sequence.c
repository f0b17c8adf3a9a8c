/* SPDX-License-Identifier: Apache-2.0 */
/* ref_sequence.c - no index is computed: lists are written, cut into chunks, and strung together.
 */
#include "ref/ref_sequence.h"

void ref_sequence_row(int64_t row, int64_t length, int64_t capacity, int64_t columns, bool left,
                      ref_token_t *list)
{
    int64_t index = 0, x = 0;
    while (left && index + length < columns)
        list[index++] = (ref_token_t){row, -1};
    while (x < length)
        list[index++] = (ref_token_t){row, x++};
    while (index < capacity)
        list[index++] = (ref_token_t){row, -1};
}

int64_t ref_sequence_cut(const ref_token_t *list, int64_t n, int64_t cp, int64_t rank,
                         bool contiguous, ref_token_t *out)
{
    int64_t made = 0, chunk = n / (2 * cp);
    for (int64_t i = 0; contiguous && i < n / cp; i++)
        out[made++] = list[rank * (n / cp) + i];
    if (contiguous)
        return made;
    if (cp == 1) {
        for (int64_t i = 0; i < n; i++)
            out[made++] = list[i];
        return made;
    }
    for (int64_t c = 0; c < 2 * cp; c++)
        if (c == rank || c == 2 * cp - 1 - rank)
            for (int64_t i = 0; i < chunk; i++)
                out[made++] = list[c * chunk + i];
    return made;
}
