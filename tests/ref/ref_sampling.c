/* SPDX-License-Identifier: Apache-2.0 */
/* ref_sampling.c - see ref_sampling.h: sorts the row, then adds from its largest logit on. */
#include "ref/ref_sampling.h"

#include <math.h>
#include <stdlib.h>

typedef struct id {
    double z;
    int64_t j;
} ref_id_t;

static int before(const void *a, const void *b)
{
    const ref_id_t *x = a, *y = b;
    return x->z != y->z ? (x->z > y->z ? -1 : 1) : (x->j > y->j) - (x->j < y->j);
}

bool ref_sampling(double factor, const double *z, int64_t vocab, int64_t top_k, double top_p,
                  bool *kept)
{
    const int64_t most = top_k > 0 && top_k < vocab ? top_k : vocab;
    ref_id_t *order = malloc((size_t)vocab * sizeof *order);
    long double sum = 0, reach = 0;
    bool sure = true;
    int64_t n = 0;
    for (int64_t j = 0; j < vocab; j++) {
        order[j] = (ref_id_t){z[j], j};
        kept[j] = false;
    }
    qsort(order, (size_t)vocab, sizeof *order, before);
    for (int64_t i = 0; i < most; i++)
        sum += expl((long double)factor * (order[i].z - order[0].z));
    for (; n < most && (top_p == 1 || n == 0 || reach < top_p * sum); n++) {
        reach += expl((long double)factor * (order[n].z - order[0].z));
        /* sums of ones are exact */
        sure = sure &&
               (top_p == 1 || order[n].z == order[0].z || fabsl(reach - top_p * sum) > 1e-9L * sum);
        kept[order[n].j] = true;
    }
    free(order);
    return sure;
}
