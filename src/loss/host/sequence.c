/* SPDX-License-Identifier: Apache-2.0 */
/* sequence.c - the kernels of sequence-args.h in plain C. */
#include "loss/sequence-place.h"

#include "loss/loss.h"

#include <string.h>

colo_status_t colo_host_sequence_targets(const struct colo_sequence_args *args,
                                         colo_stream_t stream)
{
    for (int64_t i = 0; i < args->count; i++) {
        const struct colo_sequence_place found = colo_sequence_locate(args, args->cp_rank, i);
        args->targets[i] = colo_sequence_has_target(args, &found)
                               ? args->tokens[colo_sequence_next(args, &found)]
                               : args->ignore;
    }
    return COLO_OK;
}

colo_status_t colo_host_sequence_mask(const struct colo_sequence_args *args, colo_stream_t stream)
{
    for (int64_t i = 0; i < args->count; i++) {
        const struct colo_sequence_place found = colo_sequence_locate(args, args->cp_rank, i);
        args->mask[i] = args->what == COLO_SEQUENCE_TOKENS ? colo_sequence_has_token(&found)
                                                           : colo_sequence_has_target(args, &found);
    }
    return COLO_OK;
}

/* The elements of context ranks [@from, @to) that have a target, from or to their places in the
 * batch. */
static void move(const struct colo_sequence_args *args, int64_t from, int64_t to, bool to_batch)
{
    const size_t elem = colo_dtype_size(args->dtype);
    char *element = args->elements;
    for (int64_t r = from; r < to; r++)
        for (int64_t i = 0; i < args->count; i++, element += elem) {
            const struct colo_sequence_place found = colo_sequence_locate(args, r, i);
            if (!colo_sequence_has_target(args, &found))
                continue;
            char *place = (char *)args->table +
                          (size_t)(found.row * args->table_stride + found.column) * elem;
            memcpy(to_batch ? place : element, to_batch ? element : place, elem);
        }
}

colo_status_t colo_host_sequence_scatter(const struct colo_sequence_args *args,
                                         colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(args->dtype);
    for (int64_t b = 0; b < args->batch; b++)
        memset((char *)args->table + (size_t)(b * args->table_stride) * elem, 0,
               (size_t)(args->positions - 1) * elem);
    move(args, 0, args->cp, true);
    return COLO_OK;
}

colo_status_t colo_host_sequence_gather(const struct colo_sequence_args *args, colo_stream_t stream)
{
    memset(args->elements, 0,
           (size_t)((args->to - args->from) * args->count) * colo_dtype_size(args->dtype));
    move(args, args->from, args->to, false);
    return COLO_OK;
}
