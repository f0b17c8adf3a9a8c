/* SPDX-License-Identifier: Apache-2.0 */
/* validate.h (private) - the refusals of the logits path; colo_logprob_config_check() is public. */
#ifndef COLO_LOSS_VALIDATE_H
#define COLO_LOSS_VALIDATE_H

#include "core/memory.h"
#include "loss/loss.h"
#include "comm/comm.h"
#include "loss/args.h"

/* The caller's config, its missing members filled in; values are not checked. */
colo_status_t colo_logprob_read(const colo_logprob_config_t *given, colo_logprob_config_t *own);

/* [T, Vl] of a float dtype with contiguous columns; @written: rows may not overlap. */
colo_status_t colo_loss_check_matrix(const colo_tensor_t *matrix, const char *what, bool written);
/* @support may be NULL; @like is in the memory that it has to be in. */
colo_status_t colo_loss_check_support(const colo_support_t *support,
                                      const colo_logprob_config_t *config,
                                      const colo_tensor_t *targets, const colo_tensor_t *like);
colo_support_saved_t colo_loss_save_support(const colo_support_t *support);
struct colo_support_lists colo_loss_support(const colo_support_saved_t *saved);
/* COLO_ERR_MODIFIED when it was written since it was saved */
colo_status_t colo_loss_check_support_version(const colo_support_saved_t *saved);
/* In the same memory as @like */
colo_status_t colo_loss_check_memory(const colo_tensor_t *tensor, const colo_tensor_t *like,
                                     const char *what);
/* In memory @mem, of a GPU on @device */
colo_status_t colo_loss_check_in(const colo_tensor_t *tensor, colo_mem_t mem, int32_t device,
                                 const char *what);
colo_status_t colo_loss_check_is(const colo_tensor_t *tensor, colo_dtype_t dtype, const char *what);
/* [@count] of @dtype, @as the logits' rows; @count -1: any */
colo_status_t colo_loss_check_line(const colo_tensor_t *tensor, const char *what,
                                   colo_dtype_t dtype, int64_t count, const char *as);
/* Is @weight there iff @config has it, for the @columns of this rank? @like: as above; its size
 * does not matter. */
colo_status_t colo_loss_check_class_weight(const colo_tensor_t *weight,
                                           const colo_logprob_config_t *config, int64_t columns,
                                           const colo_tensor_t *like);
/* Are temperatures @what of tokens there iff @has, as above, for each row of the @mask? */
colo_status_t colo_loss_check_heat(const colo_tensor_t *heat, const char *what, bool has,
                                   const colo_tensor_t *mask, const colo_tensor_t *logits);
/* Is @temperature there iff @config has it, for each of the @targets? In host memory its values are
 * looked at. @like: as above */
colo_status_t colo_loss_check_temperature(const colo_tensor_t *temperature,
                                          const colo_logprob_config_t *config,
                                          const colo_tensor_t *targets, const colo_tensor_t *like);
/* Is @array, if it is given, [@rows] of @dtype, or [@rows, @columns] if @columns > 0, contiguous
 * and in the memory of @like? Every array that a loss writes, and every upstream gradient */
colo_status_t colo_loss_check_array(const colo_tensor_t *array, const char *what,
                                    colo_dtype_t dtype, int64_t rows, int64_t columns,
                                    const colo_tensor_t *like);
static inline void *colo_loss_address(const colo_tensor_t *array)
{
    return array ? array->data : NULL;
}
/* Only outputs that are wanted are given; numbers are of @dtype. */
colo_status_t colo_logprob_check_out(const colo_logprob_config_t *config,
                                     const colo_logprob_out_t *out, const char *name,
                                     colo_dtype_t dtype, const colo_tensor_t *logits);
struct colo_logprob_out colo_logprob_addresses(const colo_logprob_out_t *out);
/* u8, one for each row of the logits; NULL is fine. */
colo_status_t colo_loss_check_mask(const colo_tensor_t *mask, const colo_tensor_t *logits);
/* What a forward fills and uses: @saved_memory, of @bytes, iff there is a @saved, and @workspace.
 */
colo_status_t colo_loss_check_buffers(const char *what, bool saved, const void *saved_memory,
                                      int64_t bytes, const void *workspace);
/* Columns end below 2^63, and are the whole vocabulary on a group of one. */
colo_status_t colo_loss_check_shard(const colo_logprob_config_t *config,
                                    const colo_tensor_t *logits, const colo_comm_t *group);
/* With segments rows of a GPU begin at 16-byte words. */
colo_status_t colo_loss_check_words(const colo_logprob_config_t *config,
                                    const colo_tensor_t *logits);
/* Does @group move the memory that the logits are in? */
colo_status_t colo_loss_check_place(const colo_tensor_t *logits, const colo_comm_t *group,
                                    const char *what);
/* Do the bytes from the first to the last element of two matrices overlap? */
bool colo_loss_ranges_overlap(const colo_tensor_t *a, const colo_tensor_t *b);
static inline uint64_t colo_loss_version(const colo_tensor_t *tensor)
{
    return tensor->version ? *tensor->version : 0;
}
/* COLO_ERR_MODIFIED when the version counter of @tensor is no longer @saved_at */
colo_status_t colo_loss_check_version(const colo_tensor_t *tensor, uint64_t saved_at,
                                      const char *what);
/* @d, named @what, is as @logits, and is them (@in_place: out) or shares nothing with
 * them.
 */
colo_status_t colo_loss_check_gradient(const colo_tensor_t *d, const char *what,
                                       const colo_tensor_t *logits, bool *in_place);

/* Before a collective, @mine the verdict on this rank's own arguments: at COLO_CHECK=2 all ranks
 * hear of an error and @group lives on, below that the error marks @group failed. */
colo_status_t colo_loss_ready(colo_comm_t *group, const char *what, colo_status_t mine);

/* What came of a step between that and the collective. An error (on a GPU: a pointer that no kernel
 * can use, a launch) marks @group failed, for the others are on their way into the collective. */
colo_status_t colo_loss_fail_on(colo_comm_t *group, colo_status_t st);

/* Adds to @fields all that the header's hash of the config is of. */
typedef void colo_loss_describe_t(const struct colo_logprob_args *args, colo_fields_t *fields);
/* How the blocks of all ranks are compared. */
struct colo_loss_comparison {
    const char *name; /* of the call */
    colo_loss_describe_t *describe;
    const struct colo_logprob_args *of; /* what it describes: the kind's, not their base alone */
    /* By these, logits are known of which each rank has all columns: */
    int64_t m, s; /* byte offsets in a block; -1: not there */
    colo_dtype_t dtype;
    const int64_t *targets; /* as args have them */
    int64_t target_stride;
};
/* The logits path's, of the block and the targets of @args */
struct colo_loss_comparison colo_loss_make_comparison(const char *name,
                                                      colo_loss_describe_t *describe,
                                                      const struct colo_logprob_args *args);

/* call.c: one gather of the blocks of all ranks, in memory @mem; @comparison: then a look at them,
 * on a device in the first call for a vocabulary and at COLO_CHECK=2; NULL: none */
colo_status_t colo_loss_gather(colo_comm_t *group, const struct colo_logprob_args *args,
                               const struct colo_loss_comparison *comparison, colo_mem_t mem,
                               colo_stream_t stream);
/* Does each rank compare this call, so that a mismatch is on all of them? On a device ranks have
 * the same keys of calls that they compared. With none of them all compare; with some, those whose
 * vocabulary is new, and where vocabularies part these are not all. */
bool colo_loss_all_compare(const colo_comm_t *group, colo_mem_t mem);
/* The gathered headers, in host memory: COLO_ERR_MISMATCH, the same error message on every rank.
 * @config: it is the config, of which only hashes are there */
colo_status_t colo_logprob_check_headers(const struct colo_logprob_args *args, bool *config);
void colo_logprob_describe(const struct colo_logprob_args *args, colo_fields_t *fields);
/* of struct colo_distill_args */
void colo_distill_describe(const struct colo_logprob_args *base, colo_fields_t *fields);
/* Does every rank bring the same logits? As the headers. @told: could the blocks tell? */
colo_status_t colo_loss_check_shards(const struct colo_logprob_args *args,
                                     const struct colo_loss_comparison *comparison, bool *told);

#endif
