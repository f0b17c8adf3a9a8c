/* SPDX-License-Identifier: Apache-2.0 */
/*
 * call.h (private) - what logprob, topk, distill and sampling do alike: they read a config, tell
 * how much memory they need, check a call, and run kernels around one gather. A kind says what
 * differs.
 */
#ifndef COLO_LOSS_CALL_H
#define COLO_LOSS_CALL_H

#include "loss/distill-args.h"
#include "loss/loss.h"
#include "loss/sampling-args.h"
#include "loss/topk-args.h"
#include "loss/validate.h"

/* Each begins with struct_size and the options of logits. */
union colo_loss_config {
    size_t struct_size;
    colo_logprob_config_t logprob;
    colo_topk_config_t topk;
    colo_distill_config_t distill;
    colo_sampling_config_t sampling;
};
union colo_loss_batch {
    struct colo_loss_batch_base { /* what all begin with; of sampling this is all */
        size_t struct_size;
        const colo_tensor_t *logits;
    } base;
    colo_logprob_batch_t logprob;
    colo_topk_batch_t topk;
    colo_distill_batch_t distill;
};
union colo_loss_out {
    colo_logprob_out_t logprob;
    colo_topk_out_t topk;
    colo_distill_out_t distill;
};
union colo_loss_upstream {
    colo_logprob_upstream_t logprob;
    colo_topk_upstream_t topk;
    colo_distill_upstream_t distill;
};
union colo_loss_args {
    struct colo_logprob_args base;
    struct colo_topk_args topk;
    struct colo_distill_args distill;
    struct colo_sampling_args sampling;
};

/* A struct of the caller's, as core/sized.h reads it */
struct colo_loss_sized {
    const void *defaults; /* NULL: it is only checked, not read */
    size_t size, least;
    const char *what, *init;
};

struct colo_loss_call;
struct colo_loss_kind {
    const char *name;                                           /* in error messages */
    struct colo_loss_sized config, batch, out, upstream, state; /* size 0: there is none */

    /* ---- the config ---- */
    bool is_base;  /* it is the logits path's own; else that has only logits and these: */
    size_t order;  /* where the config has it; 0: nowhere */
    size_t heat;   /* has_temperature, likewise, and those that follow it */
    int32_t heats; /* so many */
    int64_t ignore_index;
    colo_status_t (*check_config)(const union colo_loss_config *c); /* beyond the base's; or NULL */

    /* ---- memory: bytes per token ---- */
    /* from forward to backward, if not is_base; times config's k; 8 more for each of the heats */
    int64_t saved, saved_by_k;
    size_t k;         /* where the config has it; 0: nowhere */
    bool behind;      /* without a backward the same lies in the workspace, behind the blocks */
    int64_t per_rank; /* in the workspace, in addition to a block */
    bool chunked;     /* on a group of one a block is of one chunk */
    const colo_block_array_t *arrays; /* [narrays] of a block */
    int32_t narrays;
    uint32_t (*wanted)(const struct colo_logprob_args *args); /* bit i: array i; NULL: all */

    /* ---- a call; each args begins one of the kind ---- */
    colo_status_t (*check)(const struct colo_loss_call *call); /* all tensors but the logits */
    /* Members behind the base, from config and batch (NULL in backward), or NULL */
    void (*fill)(const struct colo_loss_call *call, struct colo_logprob_args *args);
    uint64_t (*hash_config)(const struct colo_logprob_args *args);
    colo_loss_describe_t *describe;                                /* what that hash is of */
    uint64_t (*hash_inputs)(const struct colo_logprob_args *args); /* in host memory; or NULL */
    /* where a block has what the logits path's has elsewhere; or NULL */
    void (*compare)(const struct colo_logprob_args *args, struct colo_loss_comparison *comparison);
    /* before the gather, and after it */
    colo_status_t (*local)(const struct colo_loss_call *call, struct colo_logprob_args *args);
    colo_status_t (*merge)(const struct colo_loss_call *call, struct colo_logprob_args *args);
};
#define COLO_LOSS_SIZED(noun, type, optional, macro)                          \
    {                                                                         \
        .what = noun, .defaults = &(const type){macro}, .size = sizeof(type), \
        .least = offsetof(type, optional), .init = #macro                     \
    }
/* What backward needs: all of it up to the config must be there. */
#define COLO_LOSS_STATE(noun, type, macro)                                          \
    {                                                                               \
        .what = noun, .size = sizeof(type),                                         \
        .least = offsetof(type, config) + sizeof((type *)0)->config, .init = #macro \
    }
#define COLO_LOSS_ARRAYS(list) .arrays = list, .narrays = sizeof list / sizeof *list

struct colo_loss_call {
    const struct colo_loss_kind *kind;
    const void *given, *given_batch, *given_out; /* the caller's config and so on */
    void *given_saved;
    const colo_tensor_t *logits, *targets; /* the latter only of the logits path */
    colo_comm_t *group;
    void *saved_memory, *workspace;
    colo_stream_t stream;
    bool valid; /* backward: the saved state, of logits of this version */
    uint64_t version;

    /* made by open and reopen */
    union colo_loss_config config;
    union colo_loss_batch batch;
    union colo_loss_out out;
    union colo_loss_upstream upstream;
    colo_logprob_config_t base;
    const colo_loss_kernels_t *kernels;
    bool in_place; /* d_logits are the logits: the saved state ends */
};

colo_status_t colo_loss_check_config(const struct colo_loss_kind *kind, const void *given);
colo_status_t colo_loss_saved_size(const struct colo_loss_kind *kind, const void *given,
                                   int64_t tokens, size_t *bytes);
colo_status_t colo_loss_workspace_size(const struct colo_loss_kind *kind, const void *given,
                                       colo_dtype_t dtype, int64_t tokens, int32_t ranks,
                                       size_t *bytes);
colo_status_t colo_loss_check_dtype(const char *name, colo_dtype_t logits);
/* Saved memory and workspace of @call: the last check of outputs */
colo_status_t colo_loss_check_call_memory(const struct colo_loss_call *call);

/* Checks a forward, tells the other ranks, and makes the arguments. Nothing is written. */
colo_status_t colo_loss_open(struct colo_loss_call *call, struct colo_logprob_args *args);
/* Kernels and gather */
colo_status_t colo_loss_run(const struct colo_loss_call *call, struct colo_logprob_args *args);

/* Writes @own to the caller's saved struct, if there is one. */
colo_status_t colo_loss_save(const struct colo_loss_call *call, const void *own);
/* Is the caller's saved struct, which backward gets, whole? Before its members are read */
colo_status_t colo_loss_check_saved(const struct colo_loss_kind *kind, const void *saved);

/* Checks a backward of logits that @call names, but for the members of @upstream and for other
 * saved tensors than the logits, and makes the arguments of the kernel that writes @d_logits. */
colo_status_t colo_loss_reopen(struct colo_loss_call *call, const void *upstream,
                               const colo_tensor_t *d_logits, struct colo_logprob_args *args);

#endif
