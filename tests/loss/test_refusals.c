/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_refusals.c - what every loss of logits refuses: status, error message, and that nothing was
 * written; how much memory it asks for, and that it writes no more; ranks that disagree.
 */
#include "loss/loss_alone.h"
#include "loss/validate.h"

#include <stdatomic.h>
#include <unistd.h>

enum {
    OF_LOGPROB = 1 << LOGPROB,
    OF_GIVEN = 1 << GIVEN,
    OF_LARGEST = 1 << LARGEST,
    OF_DISTILL = 1 << DISTILL,
    OF_SAMPLING = 1 << SAMPLING,
    OF_TOPK = OF_GIVEN | OF_LARGEST,
    OF_MASKED = OF_TOPK | OF_DISTILL,
    OF_BACKWARD = OF_LOGPROB | OF_MASKED,
    OF_ALL = OF_BACKWARD | OF_SAMPLING
};
static const char *const names[] = {"logprob", "topk at ids", "topk", "distill", "sampling"};

/* @run, of each of @losses, in which @a is painted and then changed; @after holds then */
#define REFUSED(losses, before, change, run, status, error_message, after)                     \
    for (int l_ = 0; l_ < LOSSES; l_++)                                                        \
        if ((losses) >> l_ & 1) {                                                              \
            alone_t a;                                                                         \
            alone_init(&a, (loss_t)l_);                                                        \
            before;                                                                            \
            change;                                                                            \
            if ((run) != (status) || !says(error_message))                                     \
                fail_msg("%s: %s: %s, expected %s: %s", names[l_], #change, colo_last_error(), \
                         colo_status_name(status), error_message);                             \
            assert_true(painted(a.dz, sizeof a.dz));                                           \
            assert_true(after(&a));                                                            \
        }
#define REJECT(losses, change, status, error_message) \
    REFUSED(losses, (void)0, change, alone_forward(&a), status, error_message, all_is_as_it_was)
#define REJECT_BACKWARD(losses, change, status, error_message)                        \
    REFUSED(losses, assert_ok(alone_forward(&a)), change, alone_backward(&a), status, \
            error_message, alone_valid) /* it may be tried again */
#define ARG(losses, change, error_message) REJECT(losses, change, COLO_ERR_ARG, error_message)
#define SHAPE(losses, change, error_message) REJECT(losses, change, COLO_ERR_SHAPE, error_message)

static bool all_is_as_it_was(const alone_t *a)
{
    return alone_wrote_nothing(a) && painted(a->workspace, sizeof a->workspace);
}

T_CASE(every_bad_config_is_refused_with_its_number)
{
    const double inf = INFINITY;
    ARG(OF_ALL, a.cfg.struct_size = 3, "struct_size is 3, expected");
    ARG(OF_ALL, a.cfg.logits.vocab = 0, "vocab is 0, expected > 0");
    ARG(OF_ALL, a.cfg.logits.vocab = -3, "vocab is -3");
    ARG(OF_ALL, a.cfg.logits.vocab_start = -1, "vocab_start is -1, expected >= 0");
    ARG(OF_LOGPROB, a.cfg.logits.vocab_start = INT64_MAX, "9223372036854775807 + 6 columns");
    ARG(OF_ALL, a.cfg.logits.temperature = 0, "logprob: temperature is 0, expected finite and > 0");
    ARG(OF_ALL, a.cfg.logits.temperature = -1, "temperature is -1");
    ARG(OF_ALL, a.cfg.logits.temperature = NAN, "temperature is ");
    ARG(OF_ALL, a.cfg.logits.temperature = inf, "temperature is inf");
    ARG(OF_ALL, a.cfg.logits.temperature = 1e-310, "scale / temperature = 1 / 1e-310");
    ARG(OF_ALL, a.cfg.logits.scale = inf, "scale is inf, expected finite");
    ARG(OF_ALL, a.cfg.logits.softcap = -2, "softcap is -2");
    ARG(OF_ALL, a.cfg.logits.softcap = NAN, "softcap is ");
    ARG(OF_ALL, a.cfg.logits.softcap = 1e-50, "softcap / temperature = 1e-50 / 1, expected what");
    ARG(OF_ALL, (a.cfg.logits.softcap = 1e30, a.cfg.logits.temperature = 1e-20),
        "softcap / temperature = 1e+30 / 1e-20, expected what an f32 holds");
    ARG(OF_LOGPROB, a.cfg.logprob.label_smoothing = 1.5,
        "label_smoothing is 1.5, expected in [0, 1]");
    ARG(OF_LOGPROB, a.cfg.logprob.label_smoothing = -0.5, "label_smoothing is -0.5");
    ARG(OF_LOGPROB,
        (a.cfg.logits.vocab = 1, a.cfg.logprob.label_smoothing = 0.1,
         a.cfg.logprob.megatron_smoothing = true),
        "vocab - 1, and vocab is 1");
    ARG(OF_LOGPROB, a.cfg.logprob.z_loss = -1, "z_loss is -1");
    ARG(OF_LOGPROB, a.cfg.logprob.z_loss = inf, "z_loss is inf");
    ARG(OF_LOGPROB, a.cfg.logprob.chunk_size = -4, "chunk_size is -4, expected >= 0");
    ARG(OF_LOGPROB, a.cfg.logprob.has_class_weight = true,
        "class_weight: the batch has none, config.has_class_weight is true");
    ARG(OF_LOGPROB, a.cfg.logprob.has_class_weight = a.cfg.logprob.lenient_targets = true,
        "has_class_weight with lenient_targets: a target that is no token has no weight");
    ARG(OF_LOGPROB, a.cfg.logprob.has_class_weight = a.cfg.logprob.local_smoothing = true,
        "has_class_weight with local_smoothing");
    ARG(OF_TOPK, a.cfg.topk.k = 0, "k is 0, expected 1..256");
    ARG(OF_TOPK, a.cfg.topk.k = 257, "k is 257, expected 1..256");
    ARG(OF_LARGEST, a.cfg.topk.k = 7, "k is 7, expected at most 6");
    ARG(OF_LARGEST, a.cfg.topk.want_tail = true, "want_tail and topk are true");
    ARG(OF_LARGEST, a.cfg.topk.has_temperature = true, "has_temperature and topk are true");
    ARG(OF_GIVEN, a.cfg.topk.has_temperature = true,
        "temperature: the batch has none, config.has_temperature is true");
    ARG(OF_DISTILL, a.cfg.distill.has_temperature = true,
        "temperature: the batch has none, config.has_temperature is true");
    ARG(OF_DISTILL, a.cfg.distill.has_target_temperature = true,
        "target_temperature: the batch has none, config.has_target_temperature is true");
    ARG(OF_DISTILL,
        (a.cfg.distill.has_target_temperature = true, a.cfg.distill.targets = COLO_DISTILL_PROBS),
        "has_target_temperature is true, but targets are probabilities");
    ARG(OF_DISTILL, a.cfg.distill.targets = 2, "targets is 2, expected logits (0) or probs (1)");
    ARG(OF_DISTILL, a.cfg.distill.target_temperature = 0, "target_temperature is 0");
    ARG(OF_DISTILL, a.cfg.distill.target_temperature = NAN, "target_temperature is ");
    ARG(OF_DISTILL, a.cfg.distill.target_scale = inf, "target_scale / target_temperature = inf");
    ARG(OF_DISTILL, a.cfg.distill.target_softcap = -1, "target_softcap is -1, expected finite");
    ARG(OF_DISTILL, a.cfg.distill.divergence = 5, "divergence is 5, expected 0 to 4");
    ARG(OF_DISTILL, a.cfg.distill.divergence = -1, "divergence is -1, expected 0 to 4");
    ARG(OF_DISTILL,
        (a.cfg.distill.divergence = COLO_DIVERGENCE_TV, a.cfg.distill.targets = COLO_DISTILL_PROBS),
        "divergence is 3, but targets are probabilities");
    ARG(OF_DISTILL, (a.cfg.distill.divergence = COLO_DIVERGENCE_JSD, a.cfg.distill.beta = 1),
        "beta is 1, expected between 0 and 1");
    ARG(OF_DISTILL, (a.cfg.distill.divergence = COLO_DIVERGENCE_JSD, a.cfg.distill.beta = 0),
        "beta is 0, expected between 0 and 1");
    ARG(OF_SAMPLING, a.cfg.logits.scale = -1, "scale is -1 and softcap is 0");
    ARG(OF_SAMPLING, a.cfg.logits.scale = 0, "scale is 0 and softcap is 0");
    ARG(OF_SAMPLING, a.cfg.logits.softcap = 2, "scale is 1 and softcap is 2");
    ARG(OF_SAMPLING, a.cfg.sampling.top_k = -1, "top_k is -1, expected >= 0");
    ARG(OF_SAMPLING, a.cfg.sampling.top_p = -0.1, "top_p is -0.1, expected in [0, 1]");
    ARG(OF_SAMPLING, a.cfg.sampling.top_p = 1.5, "top_p is 1.5");
    ARG(OF_SAMPLING, a.cfg.sampling.top_p = NAN, "top_p is nan");
    assert_fails(colo_logprob_config_check(NULL), COLO_ERR_ARG, "config is NULL");
}

T_CASE(every_bad_tensor_is_refused_with_its_number)
{
    ARG(OF_ALL, a.logits.dtype = COLO_I8, "logits: dtype i8");
    SHAPE(OF_ALL, a.logits.ndim = 1, "logits: 1 axes, expected 2");
    SHAPE(OF_ALL, a.logits.stride[1] = 2, "columns are 2 elements apart");
    ARG(OF_ALL, a.logits.data = NULL, "logits: data is NULL");
    SHAPE(OF_ALL, a.logits.shape[0] = -1, "extent -1");
    SHAPE(OF_ALL, a.cfg.logits.vocab_start = 1, "columns [1, 7) on a group of one rank");
    SHAPE(OF_LOGPROB | OF_TOPK, (a.logits.shape[1] = 5, a.logits.stride[0] = 6),
          "columns [0, 5) on a group of one rank, expected the whole vocabulary [0, 6)");
    SHAPE(OF_SAMPLING, (a.logits.shape[1] = 5, a.d_logits.shape[1] = 5),
          "columns [0, 5) on a group of one rank");
    ARG(OF_LOGPROB, a.target.dtype = COLO_I32, "targets: dtype i32, expected i64");
    SHAPE(OF_LOGPROB, a.target.shape[0] = 3, "3 elements, expected [4]");
    SHAPE(OF_LOGPROB, a.target.ndim = 0, "0 axes");
    ARG(OF_LOGPROB, a.arg.targets = NULL, "targets: tensor is NULL");
    ARG(OF_LOGPROB | OF_DISTILL, a.target.mem = COLO_MEM_CUDA, "targets: memory kind 1");
    ARG(OF_GIVEN, a.arg.targets = NULL, "ids: tensor is NULL");
    ARG(OF_LARGEST, a.arg.targets = &a.target, "ids are given, config.topk chooses them");
    ARG(OF_GIVEN, a.target.dtype = COLO_I32, "ids: dtype i32, expected i64");
    SHAPE(OF_GIVEN, a.target.shape[1] = 1, "expected [4, 2]");
    SHAPE(OF_GIVEN, a.target.stride[1] = 2, "columns are 2 elements apart");
    ARG(OF_GIVEN, a.target.mem = COLO_MEM_CUDA, "ids: memory kind 1");
    ARG(OF_DISTILL, a.target.dtype = COLO_BF16, "targets: dtype bf16, expected f32 or");
    SHAPE(OF_DISTILL, a.target.shape[0] = 2, "targets: [2, 6], expected [4, 6]");
    SHAPE(OF_DISTILL, (a.target.shape[1] = 5, a.target.stride[0] = 6), "targets: [4, 5]");
    SHAPE(OF_DISTILL, a.target.stride[1] = 2, "targets: columns are 2 elements apart");
    ARG(OF_DISTILL, a.target.data = NULL, "targets: data is NULL");
    ARG(OF_MASKED, a.masked.dtype = COLO_F32, "mask: dtype f32, expected u8");
    SHAPE(OF_MASKED, a.masked.shape[0] = 2, "mask: 1 axes, 2 elements, expected [4]");
    ARG(OF_MASKED, a.masked.data = NULL, "mask: data is NULL");
    SHAPE(OF_MASKED, (a.masked.ndim = 2, a.masked.shape[1] = a.masked.stride[1] = 1),
          "mask: 2 axes");
    SHAPE(OF_SAMPLING, a.d_logits.shape[0] = 2, "out: [2, 6], expected [4, 6]");
    ARG(OF_SAMPLING, a.d_logits.dtype = COLO_I32, "out: dtype i32");
    ARG(OF_SAMPLING, a.d_logits.dtype = COLO_F64, "out: dtype f64, the logits are f32");
    SHAPE(OF_SAMPLING, a.d_logits.stride[0] = 5, "out: ");
    ARG(OF_SAMPLING, a.d_logits.data = a.z + 1, "out: overlaps the logits without being them");
    REJECT(OF_ALL & ~OF_LARGEST,
           (a.logits.mem = a.target.mem = a.masked.mem = a.d_logits.mem = COLO_MEM_CUDA,
            a.logits.device = a.target.device = a.masked.device = a.d_logits.device = 0,
            a.out.logp = a.out.entropy = a.out.loss = a.out.correct = a.out.n_valid =
                a.out.n_invalid = a.picks.logp = a.picks.ids = a.picks.n_invalid =
                    a.divergences.ce = a.divergences.kl = NULL),
           COLO_ERR_UNBUILT, "");
}

/* An array that is narrower than what is written would let the memory behind it be overwritten. */
T_CASE(arrays_of_another_dtype_length_or_memory_are_refused)
{
    static const struct {
        int losses;
        size_t at; /* of its tensor in an alone_t */
        colo_dtype_t dtype;
        int64_t count;
        const char *what;
    } arrays[] = {
        {OF_LOGPROB | OF_TOPK, offsetof(alone_t, of_logp), COLO_F32, T, "out.logp"},
        {OF_LOGPROB, offsetof(alone_t, of_entropy), COLO_F32, T, "out.entropy"},
        {OF_LOGPROB, offsetof(alone_t, of_losses), COLO_F32, T, "out.loss"},
        {OF_LOGPROB, offsetof(alone_t, of_correct), COLO_U8, T, "out.correct"},
        {OF_LOGPROB, offsetof(alone_t, of_n_valid), COLO_I64, 1, "out.n_valid"},
        {OF_LOGPROB | OF_TOPK, offsetof(alone_t, of_n_invalid), COLO_I64, 1, "out.n_invalid"},
        {OF_LARGEST, offsetof(alone_t, of_chosen), COLO_I64, T, "out.ids"},
        {OF_DISTILL, offsetof(alone_t, of_ce), COLO_F32, T, "out.ce"},
        {OF_DISTILL, offsetof(alone_t, of_kl), COLO_F32, T, "out.kl"},
        {OF_BACKWARD, offsetof(alone_t, of_up), COLO_F32, T, NULL},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
#define OF(change) ((colo_tensor_t *)(void *)((char *)&a + arrays[i].at))->change
#define WRONG(change, status, ...)                                       \
    do {                                                                 \
        char text_[160];                                                 \
        snprintf(text_, sizeof text_, __VA_ARGS__);                      \
        if (arrays[i].what) {                                            \
            REJECT(arrays[i].losses, OF(change), status, text_)          \
        } else {                                                         \
            REJECT_BACKWARD(arrays[i].losses, OF(change), status, text_) \
        }                                                                \
    } while (0)
        const char *what = arrays[i].what ? arrays[i].what : "d_";
        WRONG(dtype = COLO_F64, COLO_ERR_ARG, "dtype f64, expected %s",
              colo_dtype_name(arrays[i].dtype));
        WRONG(dtype = COLO_BF16, COLO_ERR_ARG, "%s", what);
        WRONG(shape[0]--, COLO_ERR_SHAPE, "expected [%d", (int)arrays[i].count);
        WRONG(shape[0]++, COLO_ERR_SHAPE, "%s", what);
        WRONG(ndim = 0, COLO_ERR_SHAPE, "0 axes, 1 elements, expected [%d", (int)arrays[i].count);
        WRONG(mem = COLO_MEM_CUDA, COLO_ERR_ARG, "memory kind 1 on device -1, expected kind 0");
        WRONG(data = NULL, COLO_ERR_ARG, "data is NULL");
        if (arrays[i].count > 1)
            WRONG(stride[0]++, COLO_ERR_SHAPE, "elements apart, expected contiguous");
    }
    /* more numbers than the memory has, as they are wider */
    static double z[T * V];
    ARG(OF_LOGPROB | OF_TOPK, (a.logits.data = z, a.logits.dtype = COLO_F64),
        "out.logp: dtype f32, expected f64");
    ARG(OF_DISTILL, (a.logits.data = z, a.logits.dtype = COLO_F64),
        "out.ce: dtype f32, expected f64");
    SHAPE(OF_TOPK, a.of_logp.shape[1] = 1, "out.logp: 2 axes, 4 elements, expected [4, 2]");
    SHAPE(OF_TOPK, a.of_logp.ndim = 1, "out.logp: 1 axes, 4 elements, expected [4, 2]");
}

T_CASE(every_bad_pointer_is_refused)
{
    ARG(OF_ALL, a.arg.group = NULL, "group is NULL; colo_comm_create_self()");
    ARG(OF_ALL, a.arg.logits = NULL, "logits: tensor is NULL");
    ARG(OF_BACKWARD, a.arg.no_out = true, "out is NULL");
    ARG(OF_LOGPROB, a.cfg.logprob.want_entropy = false, "out.entropy is given");
    ARG(OF_LOGPROB, a.cfg.logprob.want_loss = false, "out.loss is given");
    ARG(OF_LOGPROB, a.cfg.logprob.want_correct = false, "out.correct is given");
    ARG(OF_LOGPROB, a.out.argmax = &a.of_chosen,
        "out.argmax is given, config.want_argmax is false");
    ARG(OF_LOGPROB, a.out.lse = &a.of_ce, "out.lse is given, config.want_lse is false");
    ARG(OF_LOGPROB, a.out.sum_p2 = &a.of_ce, "out.sum_p2 is given, config.want_sum_p2 is false");
    ARG(OF_LOGPROB, a.out.mean_logits = &a.of_ce,
        "out.mean_logits is given, config.want_mean_logits is false");
    ARG(OF_LOGPROB, (a.cfg.logprob.want_argmax = true, a.out.argmax = &a.of_correct),
        "out.argmax: dtype u8, expected i64");
    ARG(OF_LOGPROB, (a.cfg.logprob.want_lse = true, a.out.lse = &a.of_chosen),
        "out.lse: dtype i64, expected f32");
    ARG(OF_LOGPROB, (a.cfg.logprob.want_sum_p2 = true, a.out.sum_p2 = &a.of_chosen),
        "out.sum_p2: dtype i64, expected f32");
    ARG(OF_LOGPROB, (a.cfg.logprob.want_mean_logits = true, a.out.mean_logits = &a.of_chosen),
        "out.mean_logits: dtype i64, expected f32");
    ARG(OF_LOGPROB, a.cfg.logprob.want_mean_logits = a.cfg.logprob.local_smoothing = true,
        "want_mean_logits with local_smoothing, which has a sum of x of its own");
    ARG(OF_LOGPROB,
        (a.cfg.logprob.want_mean_logits = a.cfg.logprob.has_class_weight = true,
         a.cfg.logprob.label_smoothing = 0.1),
        "want_mean_logits with has_class_weight and label_smoothing");
    ARG(OF_GIVEN, a.picks.tail = &a.of_chosen, "out.tail is given, config.want_tail is false");
    ARG(OF_LOGPROB, a.cfg.logprob.has_temperature = true,
        "temperature: the batch has none, config.has_temperature is true");
    ARG(OF_GIVEN, a.picks.ids = &a.of_chosen, "out.ids is given, config.topk is false");
    ARG(OF_LOGPROB | OF_DISTILL, a.arg.stats = NULL, "saved memory is NULL; it needs 256 bytes");
    ARG(OF_TOPK, a.arg.stats = NULL, "saved memory is NULL; it needs 512 bytes");
    ARG(OF_BACKWARD, a.arg.saved = NULL, "saved memory is given, saved is NULL");
    ARG(OF_ALL, a.arg.workspace = NULL, "workspace is NULL");
    ARG(OF_DISTILL, (a.arg.saved = NULL, a.arg.stats = a.arg.workspace = NULL),
        "workspace is NULL");
    ARG(OF_ALL, a.arg.workspace = a.workspace + 3, "workspace is 3 past a multiple of 256");
    for (int past = 8; past < COLO_ALIGNMENT; past *= 2) {
        ARG(OF_ALL, a.arg.workspace = a.workspace + past,
            t_text("workspace is %d past a multiple of 256 bytes, ", past));
        ARG(OF_BACKWARD, a.arg.stats = (char *)a.stats + past,
            t_text("saved memory is %d past a multiple of 256 bytes, ", past));
    }
}

T_CASE(saved_structs_of_no_size_and_members_that_are_reserved_are_refused)
{
    ARG(OF_BACKWARD, a.saved.struct_size = 0, "saved.struct_size is 0, expected a multiple of 8");
    ARG(OF_BACKWARD, a.saved.struct_size += 8, "compiled with a newer header");
    REJECT_BACKWARD(OF_BACKWARD, a.saved.struct_size = 16, COLO_ERR_ARG, "saved.struct_size is 16");
    ARG(OF_LOGPROB, a.cfg.logprob.reserved[6] = 1, "logprob: config.reserved[6] is 1, expected 0");
    ARG(OF_TOPK, a.cfg.topk.reserved[0] = 1, "topk: config.reserved[0] is 1, expected 0");
    ARG(OF_DISTILL, a.cfg.distill.reserved[3] = 1, "distill: config.reserved[3] is 1, expected 0");
}

T_CASE(a_call_without_a_batch_is_refused)
{
    alone_t a;
    alone_init(&a, LOGPROB);
    assert_fails(colo_logprob_forward(&a.cfg.logprob, NULL, t_self(), &a.out, &a.saved.logprob,
                                      a.stats, a.workspace, NULL),
                 COLO_ERR_ARG, "logprob: batch is NULL; start from COLO_LOGPROB_BATCH_INIT");
    assert_true(all_is_as_it_was(&a));
}

T_CASE(every_bad_backward_is_refused)
{
    alone_t b;
    REFUSED(OF_BACKWARD, (void)0, (void)0, alone_backward(&a), COLO_ERR_STATE,
            "no forward filled it", all_is_as_it_was);
    REFUSED(OF_BACKWARD, (void)0, a.arg.saved = NULL, alone_backward(&a), COLO_ERR_ARG,
            "saved is NULL", all_is_as_it_was);
    REJECT_BACKWARD(OF_BACKWARD, a.arg.no_upstream = true, COLO_ERR_ARG, "upstream is NULL");
    REJECT_BACKWARD(OF_TOPK, a.d_picks.d_logp = NULL, COLO_ERR_ARG, "d_logp is NULL");
    REJECT_BACKWARD(OF_BACKWARD, a.d_logits.dtype = COLO_F64, COLO_ERR_ARG,
                    "d_logits: dtype f64, the logits are");
    REJECT_BACKWARD(OF_BACKWARD, a.d_logits.shape[0] = 3, COLO_ERR_SHAPE,
                    "[3, 6], expected [4, 6]");
    REJECT_BACKWARD(OF_BACKWARD, a.d_logits.shape[1] = 5, COLO_ERR_SHAPE,
                    "[4, 5], expected [4, 6]");
    REJECT_BACKWARD(OF_BACKWARD, a.d_logits.ndim = 1, COLO_ERR_SHAPE, "d_logits: 1 axes");
    REJECT_BACKWARD(OF_BACKWARD, a.d_logits.stride[0] = 5, COLO_ERR_SHAPE,
                    "5 elements apart and overlap");
    REJECT_BACKWARD(OF_BACKWARD, a.d_logits.mem = COLO_MEM_CUDA, COLO_ERR_ARG,
                    "d_logits: memory kind 1");
    REJECT_BACKWARD(OF_BACKWARD, a.d_logits.data = NULL, COLO_ERR_ARG, "d_logits: data is NULL");
    REJECT_BACKWARD(OF_BACKWARD, a.d_logits.data = a.z + 1, COLO_ERR_ARG,
                    "overlaps the logits without being them (+4");
    REJECT_BACKWARD(OF_BACKWARD, (a.d_logits.data = a.z, a.d_logits.stride[0] = V + 1),
                    COLO_ERR_ARG, "row strides 7 and 6");
    REJECT_BACKWARD(OF_DISTILL, a.d_logits.data = a.w, COLO_ERR_ARG,
                    "d_logits: overlaps the targets (+0 bytes)");
    REJECT_BACKWARD(OF_BACKWARD, a.version = 3, COLO_ERR_MODIFIED,
                    "logits were written after they were saved: version 3, saved at 1");
    REJECT_BACKWARD(OF_BACKWARD, (a.version = 3, a.d_logits = a.logits), COLO_ERR_MODIFIED,
                    "version 3, saved at 1"); /* also where in place was asked for */
    REJECT_BACKWARD(OF_LOGPROB | OF_DISTILL, a.targets_version = 2, COLO_ERR_MODIFIED,
                    "targets were written after they were saved: version 2, saved at 1");
    REJECT_BACKWARD(OF_LOGPROB,
                    (a.saved.logprob.config.want_entropy = false, a.upstream.d_entropy = &a.of_up),
                    COLO_ERR_ARG, "d_entropy is given");
    REJECT_BACKWARD(OF_LOGPROB,
                    (a.saved.logprob.config.want_loss = false, a.upstream.d_loss = &a.of_up),
                    COLO_ERR_ARG, "d_loss is given");
    REJECT_BACKWARD(OF_LOGPROB, a.upstream.d_lse = &a.of_up, COLO_ERR_ARG,
                    "d_lse is given, forward ran with want_lse false");
    alone_init(&b, LOGPROB);
    assert_ok(alone_forward(&b));
    assert_fails(colo_logprob_backward(&b.saved.logprob, &b.upstream, NULL, NULL), COLO_ERR_ARG,
                 "d_logits: tensor is NULL");
}

T_CASE(in_place_has_the_bits_of_apart_and_ends_the_saved_state)
{
    for (int l = 0; l < SAMPLING; l++) {
        alone_t a;
        alone_init(&a, (loss_t)l);
        a.upstream.d_entropy = a.upstream.d_loss = &a.of_up;
        assert_ok(alone_forward(&a));
        assert_ok(alone_backward(&a));
        a.d_logits = a.logits;
        assert_ok(alone_backward(&a));
        assert_memory_equal(a.z, a.dz, sizeof a.z);
        assert_fails(alone_backward(&a), COLO_ERR_STATE, "in place ended it");
        a.d_logits.data = a.dz;
        memset(a.dz, CANARY, sizeof a.dz);
        assert_fails(alone_backward(&a), COLO_ERR_STATE, "in place ended it");
        assert_true(painted(a.dz, sizeof a.dz));
    }
}

/* ---- memory ---- */

T_CASE(sizes_that_cannot_be_are_refused)
{
    static const int64_t parts[LOSSES] = {8, 100, 100, 72,
                                          4096}; /* of 2^63, with 8 ranks too many */
    size_t n = 77;
    for (int l = 0; l < LOSSES; l++) {
        alone_t a;
        alone_init(&a, (loss_t)l);
#define REFUSE(dtype, tokens, ranks, bytes, text) \
    assert_fails(alone_workspace_size(&a, dtype, tokens, ranks, bytes), COLO_ERR_ARG, text)
        REFUSE(COLO_I8, 4, 1, &n, "dtype i8");
        REFUSE(COLO_F32, -1, 1, &n, "tokens is -1");
        REFUSE(COLO_F32, 4, 0, &n, "ranks is 0");
        REFUSE(COLO_F32, INT64_MAX / parts[l], 8, &n, "exceeds 2^63 bytes");
        REFUSE(COLO_F32, 1, 1, NULL, "bytes is NULL");
#undef REFUSE
        if (l == SAMPLING)
            continue;
        assert_fails(alone_saved_size(&a, COLO_F32, INT64_MAX / 8, &n), COLO_ERR_ARG,
                     "exceed 2^63 bytes");
        assert_fails(alone_saved_size(&a, COLO_F32, -1, &n), COLO_ERR_ARG, "tokens is -1");
        assert_fails(alone_saved_size(&a, COLO_F32, 1, NULL), COLO_ERR_ARG, "bytes is NULL");
    }
    assert_int_equal(n, 77);
}

/* Logits of 65535 x 2^20 in bf16 are 128 GiB: no buffer may know V. */
T_CASE(no_buffer_grows_with_the_vocabulary)
{
    enum { ROWS = 65535, RANKS = 8, PICKS = 64, OWN = 56 + 16 * PICKS };
    static const int64_t vocabs[] = {1000, 151936, 1 << 20};
    static const struct {
        loss_t loss;
        size_t saved, apart, block; /* bytes a token: in the workspace apart from the blocks */
        size_t odd;                 /* arrays of 4 bytes a token, which begin at multiples of 8 */
    } of[] = {{GIVEN, OWN, OWN, 12 + PICKS * 4, 3},
              {LARGEST, OWN, OWN, 12 + PICKS * 12, 3},
              {DISTILL, 64, 64, 32, 8},
              {SAMPLING, 0, 24, 8 + 2048, 0}};
    for (int i = 0; i < 12; i++) {
        alone_t a;
        size_t saved = 0, workspace;
        const size_t block = of[i / 3].block, apart = of[i / 3].apart;
        alone_init(&a, of[i / 3].loss);
        a.cfg.logits.vocab = vocabs[i % 3];
        if (OF_TOPK >> a.loss & 1)
            a.cfg.topk.k = PICKS;
        if (a.loss != SAMPLING)
            assert_ok(alone_saved_size(&a, COLO_BF16, ROWS, &saved));
        assert_ok(alone_workspace_size(&a, COLO_BF16, ROWS, RANKS, &workspace));
        assert_int_equal(saved, t_rounded(ROWS * of[i / 3].saved));
        assert_int_equal(workspace, t_rounded(t_rounded(ROWS * apart) +
                                              RANKS * (64 + ROWS * block + 4 * of[i / 3].odd)));
    }
}

/* Saved memory and workspace of exactly the queried sizes, between canaries. */
static void run_exact(alone_t *a, colo_dtype_t dtype, bool saved, bool every_byte)
{
    size_t stat_bytes = 0, workspace_bytes;
    if (a->loss != SAMPLING)
        assert_ok(alone_saved_size(a, dtype, T, &stat_bytes));
    assert_ok(alone_workspace_size(a, dtype, T, 1, &workspace_bytes));
    COLO_AUTOFREE unsigned char *s = t_aligned(stat_bytes + 2 * MARGIN),
                                *x = t_aligned(workspace_bytes + 2 * MARGIN);
    memset(s, CANARY, stat_bytes + 2 * MARGIN);
    memset(x, CANARY, workspace_bytes + 2 * MARGIN);
    a->arg.saved = saved ? &a->saved : NULL;
    a->arg.stats = saved ? s + MARGIN : NULL;
    a->arg.workspace = x + MARGIN;
    assert_ok(alone_forward(a));
    assert_true(painted(s, MARGIN) && painted(x, MARGIN));
    assert_true(painted(s + MARGIN + stat_bytes, MARGIN));
    assert_true(painted(x + MARGIN + workspace_bytes, MARGIN));
    assert_true(painted(s + MARGIN, stat_bytes) == !saved);
    /* numbers of both are less than one alignment from the end */
    assert_true(!every_byte ||
                (!painted(s + stat_bytes, MARGIN) && !painted(x + workspace_bytes, MARGIN)));
}

T_CASE(nothing_is_written_past_the_queried_sizes)
{
    alone_t a;
    float logp[T * K]; /* without saved memory */
    for (int i = 0; i < 2 * LOSSES; i++) {
        alone_init(&a, (loss_t)(i / 2));
        run_exact(&a, COLO_F32, i % 2 && a.loss != SAMPLING, false);
        if (i % 2 == 0)
            memcpy(logp, a.logp, sizeof logp);
        assert_memory_equal(logp, a.logp, sizeof logp);
        if (a.loss == SAMPLING)
            assert_true(a.dz[5] == 5 && a.dz[4] == 4 && isinf(a.dz[3]));
    }
    for (int d = 0; d < 4; d++)
        for (int64_t chunk = 0; chunk <= T + 1; chunk++)
            for (unsigned wants = 0; wants < 64; wants += wants < 8 ? 1 : 9) {
                double z[T * V] = {0}, out[6][T];
                int64_t argmax[T];
                alone_init(&a, LOGPROB);
                a.cfg.logprob.chunk_size = chunk;
                a.cfg.logprob.want_entropy = wants & 1;
                a.cfg.logprob.want_loss = wants & 2;
                a.cfg.logprob.want_correct = wants & 4;
                a.cfg.logprob.label_smoothing = 0.1;
                a.logits = colo_tensor_host(z, loss_dtypes[d], 2, (int64_t[]){T, V});
                const colo_dtype_t stat = loss_dtypes[d] == COLO_F64 ? COLO_F64 : COLO_F32;
                a.out.logp = T_TENSOR(out[0], stat, T);
                a.out.entropy = wants & 1 ? T_TENSOR(out[1], stat, T) : NULL;
                a.out.loss = wants & 2 ? T_TENSOR(out[2], stat, T) : NULL;
                a.out.correct = wants & 4 ? &a.of_correct : NULL;
                a.cfg.logprob.want_argmax = a.cfg.logprob.want_lse = wants & 8;
                a.cfg.logprob.want_sum_p2 = wants & 16;
                a.cfg.logprob.want_mean_logits = wants & 32;
                a.out.argmax = wants & 8 ? T_TENSOR(argmax, COLO_I64, T) : NULL;
                a.out.lse = wants & 8 ? T_TENSOR(out[5], stat, T) : NULL;
                a.out.sum_p2 = wants & 16 ? T_TENSOR(out[3], stat, T) : NULL;
                a.out.mean_logits = wants & 32 ? T_TENSOR(out[4], stat, T) : NULL;
                run_exact(&a, loss_dtypes[d], true, true);
            }
}

/* ---- ranks that disagree, or of which one errs ---- */

/* What rank 1 has otherwise than rank 0, of which losses the ranks then say so, and how. */
#define CHANGES(ROW)                                                                            \
    ROW(TEMPERATURE, OF_ALL, a->cfg.logits.temperature = 2,                                     \
        "temperature: rank 1 of 'world' has 2, rank 0 ")                                        \
    ROW(Z_LOSS, OF_LOGPROB, a->cfg.logprob.z_loss = 2,                                          \
        "another config, dtype or order of rows than rank 0: z_loss: rank 1 of 'world' has 2, " \
        "rank 0 0")                                                                             \
    ROW(IGNORED, OF_GIVEN, a->cfg.topk.ignore_index = -1,                                       \
        "ids' ignore_index: rank 1 of 'world' has -1, ")                                        \
    ROW(KIND, OF_DISTILL, a->cfg.distill.targets = COLO_DISTILL_PROBS,                          \
        "targets: rank 1 of 'world' has probs, rank 0 logits")                                  \
    ROW(DIVERGENCE, OF_DISTILL, a->cfg.distill.divergence = COLO_DIVERGENCE_REVERSE_KL,         \
        "divergence: rank 1 of 'world' has 1, rank 0 0")                                        \
    ROW(TOP_K, OF_SAMPLING, a->cfg.sampling.top_k = 3, "top_k: rank 1 of 'world' has 3, ")      \
    ROW(TOP_P, OF_SAMPLING, a->cfg.sampling.top_p = 0.5, "top_p: rank 1 of 'world' has 0.5, ")  \
    ROW(TARGET, OF_LOGPROB | OF_GIVEN, a->targets[3]++, "rank 1 has other targets than rank 0") \
    ROW(PICK, OF_GIVEN, a->targets[0]++, "rank 1 has other targets")                            \
    ROW(MASK, OF_MASKED, a->mask[1] = 0, "rank 1 has other targets")                            \
    ROW(HOLE, OF_ALL, a->cfg.logits.vocab_start = 5,                                            \
        "no rank of 2 holds column 4 of the vocabulary of 8")                                   \
    ROW(TWICE, OF_LOGPROB | OF_DISTILL, a->cfg.logits.vocab_start = 3,                          \
        "no rank of 2 holds column 7 of the vocabulary of 8")                                   \
    ROW(LOST, OF_LOGPROB, a->cfg.logits.vocab_start = 0, /* on both ranks */                    \
        "no rank of 2 holds column 4")                                                          \
    ROW(TOKENS, OF_LOGPROB,                                                                     \
        a->logits.shape[0] = a->target.shape[0] = a->of_logp.shape[0] = a->of_losses.shape[0] = \
            T - 1,                                                                              \
        "rank 1 has 3 tokens, rank 0 has 4")                                                    \
    /* of cases of their own */                                                                 \
    ROW(WANTS, 0, (a->cfg.logprob.want_entropy = false, a->out.entropy = NULL), "")             \
    ROW(WRONG, 0, a->cfg.logits.softcap = -1, "")                                               \
    ROW(PASS, 0, (void)0, "") /* as a device's pass that cannot use a pointer */
#define NAME_OF(name, losses, change, words) name,
#define ROW_OF(name, losses, change, words) {losses, words},
#define CASE_OF(name, losses, change, words) \
    case name:                               \
        change;                              \
        break;

typedef enum { CHANGES(NAME_OF) } change_t;
static const struct {
    int losses;
    const char *words;
} table[] = {CHANGES(ROW_OF)};

typedef struct disagreement {
    change_t change;
    loss_t loss;
    int check; /* COLO_CHECK */
    colo_status_t status[2], ended;
    char error_message[2][256];
} disagreement_t;
static atomic_int peer_is_back;

static void change(alone_t *a, change_t what)
{
    switch (what) {
        CHANGES(CASE_OF)
    }
}

/* Each rank has half of 8 columns. */
static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    disagreement_t *d = arg;
    const int r = colo_comm_rank(world);
    size_t bytes;
    alone_t a;
    rank_try(colo_comm_set_timeout(world, 3000));
    rank_try(colo_comm_set_check(world, d->check));
    alone_init(&a, d->loss);
    memset(a.mask, 1, sizeof a.mask);
    a.cfg.logits.vocab = 8;
    a.cfg.logits.vocab_start = 4 * r;
    a.logits.shape[1] = a.d_logits.shape[1] = 4;
    if (a.loss == DISTILL)
        a.target.shape[1] = 4;
    rank_try(alone_workspace_size(&a, COLO_F32, T, 2, &bytes));
    if (d->change == TOKENS) { /* blocks of equal size all the same */
        a.cfg.logprob.want_entropy = a.cfg.logprob.want_correct = false;
        a.out.entropy = NULL;
        a.out.correct = NULL;
    }
    if (r == 1 || d->change == LOST)
        change(&a, d->change);
    a.arg.group = world;
    a.arg.workspace = t_aligned(bytes);
    d->status[r] = d->change == PASS && r == 1
                       ? colo_loss_fail_on(world, colo_fail(COLO_ERR_ARG, "logits: no device's"))
                       : alone_forward(&a);
    snprintf(d->error_message[r], sizeof d->error_message[r], "%s", colo_last_error());
    free(a.arg.workspace);
    rank_check(alone_wrote_nothing(&a));
    if (d->change == PASS || (d->change == WRONG && d->check < 2)) {
        /* stay: only the mark on the group may wake the peer before its deadline */
        if (r == 0)
            atomic_store(&peer_is_back, 1);
        for (int i = 0; i < 6000 && !atomic_load(&peer_is_back); i++)
            usleep(1000);
        return d->status[r];
    }
    return colo_comm_barrier(world, NULL); /* the group lives on */
}

static disagreement_t disagree(change_t what, loss_t loss, int check)
{
    disagreement_t d = {.change = what, .loss = loss, .check = check};
    atomic_store(&peer_is_back, 0);
    d.ended = colo_comm_threads_run(2, on_rank, &d);
    return d;
}

T_CASE(ranks_that_disagree_get_the_same_error_message_and_live_on)
{
    for (size_t i = 0; i < 2 * LOSSES * sizeof table / sizeof table[0]; i++) {
        const size_t loss = i / 2 % LOSSES, nth = i / 2 / LOSSES;
        if (!(table[nth].losses >> loss & 1))
            continue;
        const disagreement_t d = disagree((change_t)nth, (loss_t)loss, 1 + (int)i % 2);
        assert_ok(d.ended);
        for (int r = 0; r < 2; r++)
            if (d.status[r] != COLO_ERR_MISMATCH || !strstr(d.error_message[r], table[nth].words))
                fail_msg("%s, rank %d: %s: \"%s\" lacks \"%s\"", names[loss], r,
                         colo_status_name(d.status[r]), d.error_message[r], table[nth].words);
        assert_string_equal(d.error_message[0], d.error_message[1]);
    }
}

/* Their headers never meet: the gather is refused, and below COLO_CHECK=2 that ends the group. */
T_CASE(blocks_of_other_sizes_are_a_mismatch_of_the_gather)
{
    for (int check = 1; check <= 2; check++) {
        const disagreement_t d = disagree(WANTS, LOGPROB, check);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(d.status[r], COLO_ERR_MISMATCH);
            assert_non_null(strstr(d.error_message[r], "all_gather"));
            assert_true(check == 2 ||
                        strstr(d.error_message[r], ": in a loss they have other numbers of"));
        }
        assert_int_equal(d.ended == COLO_OK, check == 2);
    }
}

/* Also what only a pass finds out, after the ranks have compared notes. */
T_CASE(a_rank_or_a_pass_that_fails_does_not_leave_the_others_waiting)
{
    for (int i = 0; i < 6; i++) {
        const int check = i / 2;
        const disagreement_t d = disagree(i % 2 ? PASS : WRONG, LOGPROB, check);
        assert_int_equal(d.status[1], COLO_ERR_ARG);
        assert_int_equal(d.status[0], COLO_ERR_PEER);
        assert_non_null(
            strstr(d.error_message[0], i % 2 ? "logits: no device's" : "softcap is -1"));
        /* at 2 the group of what was refused lives: its barrier ends well */
        assert_int_equal(d.ended == COLO_OK, check == 2 && i % 2 == 0);
    }
    /* alone: no rank waits, nothing to mark */
    assert_int_equal(colo_loss_fail_on(t_self(), COLO_ERR_ARG), COLO_ERR_ARG);
    assert_ok(colo_comm_check(t_self()));
}

/* Shards that cover everything, one column twice. */
T_CASE(a_column_on_two_ranks_is_a_mismatch)
{
    uint64_t rng = t_seed() + 5;
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 3, 2, 9, COLO_F32, 1, &rng);
    c.start[1] = 2;
    c.columns[1] = 4;
    c.forward_only = true;
    assert_fails(loss_case_run(&c), COLO_ERR_MISMATCH,
                 "3 ranks hold 10 columns, the vocabulary has 9: some are on two ranks");
}

T_MAIN("loss/refusals")
