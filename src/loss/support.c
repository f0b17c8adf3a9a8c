/* SPDX-License-Identifier: Apache-2.0 */
/*
 * support.c - lists of ids that take the place of the vocabulary: what is refused, and how kernels
 * see them.
 *
 * Lists are in the caller's memory and are read by all ranks. What they say is checked in host
 * memory only: there a call may look at every id. On a GPU the stats kernel makes such a row NaN.
 */
#include "loss/validate.h"

#include "core/error.h"

#include <inttypes.h>

static colo_status_t check_one(const colo_tensor_t *tensor, const char *what, int64_t count,
                               const colo_tensor_t *like)
{
    COLO_TRY(colo_loss_check_line(tensor, what, COLO_I64, count, ""));
    COLO_FAIL_IF(count < 0 && tensor->shape[0] > 1 && tensor->stride[0] != 1, COLO_ERR_SHAPE,
                 "%s: elements are %" PRId64 " apart, expected contiguous ones", what,
                 tensor->stride[0]);
    return colo_loss_check_memory(tensor, like, what);
}

static colo_status_t check_list(const struct colo_support_lists *lists, int64_t vocab,
                                int64_t token)
{
    const int64_t begin = lists->begin[token * lists->begin_stride],
                  end = lists->end[token * lists->end_stride];
    COLO_FAIL_IF(begin < 0 || begin > end || end > lists->count, COLO_ERR_ARG,
                 "support: token %" PRId64 " has ids [%" PRId64 ", %" PRId64
                 "), expected a range of [0, %" PRId64 ")",
                 token, begin, end, lists->count);
    for (int64_t i = begin; i < end; i++) {
        COLO_FAIL_IF(lists->ids[i] < 0 || lists->ids[i] >= vocab, COLO_ERR_ARG,
                     "support: token %" PRId64 " has id %" PRId64 ", expected one of [0, %" PRId64
                     ")",
                     token, lists->ids[i], vocab);
        COLO_FAIL_IF(i > begin && lists->ids[i] < lists->ids[i - 1], COLO_ERR_ARG,
                     "support: token %" PRId64 " has id %" PRId64 " behind id %" PRId64
                     ", expected ascending ids; sort each list",
                     token, lists->ids[i], lists->ids[i - 1]);
    }
    return COLO_OK;
}

colo_status_t colo_loss_check_support(const colo_support_t *support,
                                      const colo_logprob_config_t *config,
                                      const colo_tensor_t *targets, const colo_tensor_t *like)
{
    if (!support)
        return COLO_OK;
    COLO_FAIL_IF(config->want_loss && config->label_smoothing > 0, COLO_ERR_ARG,
                 "support: label_smoothing is %g, expected 0: it is over the vocabulary",
                 config->label_smoothing);
    COLO_FAIL_IF(config->want_mean_logits, COLO_ERR_ARG,
                 "support: want_mean_logits is true, expected false: it is over the vocabulary");
    const int64_t tokens = targets->shape[0];
    COLO_TRY(check_one(support->ids, "support: ids", -1, like));
    COLO_TRY(check_one(support->begin, "support: begin", tokens, like));
    COLO_TRY(check_one(support->end, "support: end", tokens, like));
    if (like->mem != COLO_MEM_HOST)
        return COLO_OK;
    const colo_support_saved_t views = colo_loss_save_support(support);
    const struct colo_support_lists lists = colo_loss_support(&views);
    for (int64_t token = 0; token < tokens; token++)
        if (((const int64_t *)targets->data)[token * targets->stride[0]] != config->ignore_index)
            COLO_TRY(check_list(&lists, config->logits.vocab, token));
    return COLO_OK;
}

static uint64_t version_of(const colo_support_saved_t *saved)
{
    const colo_tensor_t *const all[] = {&saved->ids, &saved->begin, &saved->end};
    uint64_t sum = 0;
    for (int i = 0; i < 3; i++)
        sum += colo_loss_version(all[i]);
    return sum;
}

colo_support_saved_t colo_loss_save_support(const colo_support_t *support)
{
    colo_support_saved_t saved = {.version = 0};
    if (!support)
        return saved;
    saved = (colo_support_saved_t){*support->ids, *support->begin, *support->end, 0};
    saved.version = version_of(&saved);
    return saved;
}

struct colo_support_lists colo_loss_support(const colo_support_saved_t *saved)
{
    struct colo_support_lists lists = {.begin = NULL};
    if (saved->begin.ndim == 1)
        lists = (struct colo_support_lists){
            .ids = saved->ids.data,
            .count = saved->ids.shape[0],
            .begin = saved->begin.data,
            .end = saved->end.data,
            .begin_stride = saved->begin.stride[0],
            .end_stride = saved->end.stride[0],
        };
    return lists;
}

colo_status_t colo_loss_check_support_version(const colo_support_saved_t *saved)
{
    COLO_FAIL_IF(version_of(saved) != saved->version, COLO_ERR_MODIFIED,
                 "support: found it written between forward and backward, expected it as "
                 "it was; keep its tensors until the last backward");
    return COLO_OK;
}
