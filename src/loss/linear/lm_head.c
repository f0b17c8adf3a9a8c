/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm_head.c - a head that is here, or gathered when it is needed.
 *
 * Decides how shards lie on the transport. E = ceil(Vl / D) rows a rank, so that what all ranks
 * bring, one after another, is the whole head, contiguous, with padding at its end only: one plain
 * all-gather in place. A bias travels as one more column of its row (and a few of padding, to keep
 * rows 16-byte aligned), so that weight and bias are one collective, forward and back. Gradients
 * return the same way, as fp32: one reduce-scatter in place, whose rank order makes a sharded head
 * the same bits as a resident one. What lies in padding is sent and never read. Flat parts lie in
 * the same way, because the whole is contiguous: only where one ends and the next begins is no
 * row's edge.
 *
 * The gather runs on an auxiliary stream, the head's own: between start and finish the caller's
 * stream is free. A state machine of three states fixes the order of calls; every rank of the group
 * comes through it alike, with or without rows, with or without tokens, because nothing here looks
 * at either. Leaves to workspace.c which passes need the weight at all.
 */
#include "loss/linear/head.h"

#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"
#include "loss/validate.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { READY = 0, GATHERED = 1, EVENTS = 2 };

size_t colo_lm_head_gathered_size(const colo_lm_head_t *head)
{
    if (!head || !head->group)
        return 0;
    return colo_head_bytes_of(head, head->config.dtype);
}

/* ---- create ---- */

static colo_status_t check_config(const colo_lm_head_config_t *config)
{
    int64_t bytes;
    COLO_FAIL_IF(!colo_dtype_is_float(config->dtype), COLO_ERR_ARG,
                 "lm_head: dtype %s, expected f32, f64, bf16 or f16",
                 colo_dtype_name(config->dtype));
    COLO_FAIL_IF(config->rows < 0, COLO_ERR_ARG, "lm_head: rows is %" PRId64 ", expected >= 0",
                 config->rows);
    COLO_FAIL_IF(config->hidden <= 0, COLO_ERR_ARG, "lm_head: hidden is %" PRId64 ", expected > 0",
                 config->hidden);
    /* room for padding of up to 4096 ranks and of a bias */
    COLO_FAIL_IF(config->rows > INT64_MAX - 8192 || config->hidden > INT64_MAX / 8 - 16 ||
                     !colo_mul_ok(config->rows + 8192, (config->hidden + 16) * 8, &bytes),
                 COLO_ERR_ARG, "lm_head: %" PRId64 " x %" PRId64 " passes 2^63 bytes", config->rows,
                 config->hidden);
    COLO_FAIL_IF((unsigned)config->gemm > COLO_GEMM_LOOPS, COLO_ERR_ARG,
                 "lm_head: gemm %d is unknown", (int)config->gemm);
    COLO_FAIL_IF(config->mem != COLO_MEM_HOST && config->mem != COLO_MEM_CUDA, COLO_ERR_ARG,
                 "lm_head: memory kind %d is unknown", (int)config->mem);
    return COLO_OK;
}

static void add_fields(colo_fields_t *fields, const colo_lm_head_config_t *config)
{
    colo_fields_add(fields, "rows", "%lld", (long long)config->rows);
    colo_fields_add(fields, "hidden", "%lld", (long long)config->hidden);
    colo_fields_add(fields, "dtype", "%s", colo_dtype_name(config->dtype));
    colo_fields_add(fields, "mem", "%s", config->mem == COLO_MEM_HOST ? "host" : "cuda");
    colo_fields_add(fields, "has_bias", "%d", config->has_bias);
    colo_fields_add(fields, "partition", "%s",
                    config->partition == COLO_LM_HEAD_FLAT ? "flat" : "rows");
}

static colo_status_t check_group(const colo_lm_head_config_t *config, const colo_comm_t *group)
{
    colo_tensor_t like = {.mem = config->mem, .device = config->device};
    COLO_FAIL_IF((unsigned)config->partition > COLO_LM_HEAD_FLAT, COLO_ERR_ARG,
                 "lm_head: partition %d is unknown", (int)config->partition);
    COLO_FAIL_IF(config->partition == COLO_LM_HEAD_FLAT && (config->has_bias || !group),
                 COLO_ERR_ARG,
                 "lm_head: a flat partition with %s, expected %s; take COLO_LM_HEAD_ROWS",
                 config->has_bias ? "a bias" : "no group", config->has_bias ? "none" : "one");
    return group ? colo_loss_check_place(&like, group, "lm_head") : COLO_OK;
}

static colo_status_t open_head(const colo_lm_head_config_t *given, const colo_comm_t *group,
                               colo_lm_head_t **made)
{
    colo_lm_head_t *head = *made = calloc(1, sizeof *head);
    COLO_FAIL_IF(!head, COLO_ERR_NOMEM, "lm_head: %zu bytes", sizeof *head);
    head->config = (colo_lm_head_config_t){COLO_LM_HEAD_CONFIG_INIT};
    COLO_TRY(
        COLO_SIZED_READ(&head->config, given, mem, "lm_head: config", "COLO_LM_HEAD_CONFIG_INIT"));
    COLO_TRY(check_config(&head->config));
    COLO_TRY(colo_device_for(head->config.mem, &head->device));
    COLO_TRY(colo_loss_kernels_for(head->config.mem, &head->kernels));
    COLO_TRY(check_group(&head->config, group));
    return head->device->stream_create(EVENTS, &head->aux);
}

colo_status_t colo_lm_head_create(colo_lm_head_t **head, const colo_lm_head_config_t *config,
                                  colo_comm_t *group)
{
    COLO_RANGE();
    colo_lm_head_t *made = NULL;
    colo_status_t st =
        head ? open_head(config, group, &made) : colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    if (group && colo_comm_size(group) > 1) {
        colo_fields_t fields = {COLO_FIELDS_INIT};
        if (st == COLO_OK)
            add_fields(&fields, &made->config);
        if (colo_comm_check_level(group) >= 1)
            st = colo_comm_agree_fields(group, "lm_head create", &fields, st);
        else if (st < 0)
            st = colo_comm_fail(group, st);
    }
    if (st < 0) {
        colo_lm_head_destroy(&made);
        return st;
    }
    config = &made->config;
    made->group = group;
    made->count = config->rows;
    made->state = COLO_LM_HEAD_AVAILABLE;
    if (group) {
        const int64_t rank = colo_comm_rank(group), ranks = colo_comm_size(group),
                      all = config->rows * (colo_head_is_flat(made) ? config->hidden : 1);
        made->each = all / ranks + (all % ranks > 0);
        made->first = rank * made->each < all ? rank * made->each : all;
        made->count = all - made->first < made->each ? all - made->first : made->each;
        made->state = COLO_LM_HEAD_NOT_AVAILABLE;
    }
    *head = made;
    return COLO_OK;
}

void colo_lm_head_destroy(colo_lm_head_t **head)
{
    colo_lm_head_t *object = head ? *head : NULL;
    if (!object)
        return;
    if (object->device)
        object->device->stream_destroy(object->aux); /* waits for its stream */
    free(object);
    *head = NULL;
}

const colo_lm_head_config_t *colo_lm_head_config(const colo_lm_head_t *head)
{
    return head ? &head->config : NULL;
}

colo_comm_t *colo_lm_head_group(const colo_lm_head_t *head)
{
    return head ? head->group : NULL;
}

colo_lm_head_state_t colo_lm_head_state(const colo_lm_head_t *head)
{
    return head ? head->state : COLO_LM_HEAD_NOT_AVAILABLE;
}

void colo_lm_head_rows(const colo_lm_head_t *head, int64_t *first, int64_t *count)
{
    if (first)
        *first = head ? head->first : 0;
    if (count)
        *count = head ? head->count : 0;
}

/* ---- bind ---- */

/* A flat part, with its padding or without. */
static colo_status_t check_part(const colo_lm_head_t *head, const colo_tensor_t *tensor,
                                const char *what)
{
    if (tensor->ndim == 1 && (tensor->shape[0] == head->count || tensor->shape[0] == head->each))
        return COLO_OK;
    return colo_fail(COLO_ERR_SHAPE,
                     "%s: %d axes, %" PRId64 " elements, expected 1 axis of %" PRId64 " or %" PRId64
                     ", elements %" PRId64 " to %" PRId64 " of %" PRId64 " x %" PRId64,
                     what, (int)tensor->ndim, tensor->shape[0], head->count, head->each,
                     head->first, head->first + head->count, head->config.rows,
                     head->config.hidden);
}

/* @axes: 2 for a matrix [rows here, H], 1 for a vector [rows here] */
colo_status_t colo_head_check_param(const colo_lm_head_t *head, const colo_tensor_t *tensor,
                                    int32_t axes, const char *what)
{
    COLO_TRY(colo_tensor_check(tensor, what));
    if (colo_head_is_flat(head)) {
        COLO_TRY(check_part(head, tensor, what));
        axes = 1;
    } else if (tensor->ndim != axes || tensor->shape[0] != head->count ||
               (axes == 2 && tensor->shape[1] != head->config.hidden))
        return colo_fail(COLO_ERR_SHAPE,
                         "%s: %d axes, [%" PRId64 ", %" PRId64 "], expected %d: [%" PRId64
                         ", %" PRId64 "], rows %" PRId64 " to %" PRId64 " of %" PRId64,
                         what, (int)tensor->ndim, tensor->shape[0],
                         axes == 2 ? tensor->shape[1] : 1, (int)axes, head->count,
                         axes == 2 ? head->config.hidden : 1, head->first,
                         head->first + head->count, head->config.rows);
    COLO_FAIL_IF(tensor->shape[axes - 1] > 1 && tensor->stride[axes - 1] != 1, COLO_ERR_SHAPE,
                 "%s: its last axis has stride %" PRId64 ", expected contiguous elements", what,
                 tensor->stride[axes - 1]);
    COLO_FAIL_IF(axes == 2 && tensor->shape[0] > 1 && tensor->stride[0] < tensor->shape[1],
                 COLO_ERR_SHAPE,
                 "%s: rows of %" PRId64 " elements are %" PRId64 " apart and overlap", what,
                 tensor->shape[1], tensor->stride[0]);
    return colo_loss_check_in(tensor, head->config.mem, head->config.device, what);
}

colo_status_t colo_head_check_has_bias(const colo_lm_head_t *head, const colo_tensor_t *bias,
                                       const char *what)
{
    COLO_FAIL_IF(head->config.has_bias != (bias != NULL), COLO_ERR_ARG,
                 "%s is %s, the head has %s bias", what, bias ? "given" : "NULL",
                 head->config.has_bias ? "a" : "no");
    return COLO_OK;
}

/* Where this rank's rows lie in @gathered. */
static void *place_in(const colo_lm_head_t *head, void *gathered)
{
    const colo_dtype_t dtype = head->config.dtype;
    return colo_linear_element(gathered, dtype,
                               colo_comm_rank(head->group) * colo_head_slab(head, dtype));
}

static bool is_in_place(const colo_lm_head_t *head, const colo_tensor_t *tensor, const void *place)
{
    return tensor->data == place &&
           (head->count == 1 || colo_head_is_flat(head) ||
            tensor->stride[0] == colo_head_pitch(head, head->config.dtype));
}

/* In its place of what is gathered, or apart: else a gather would overwrite what it is to read. */
static colo_status_t check_apart(const colo_lm_head_t *head, const colo_tensor_t *tensor,
                                 void *gathered, const char *what)
{
    const colo_dtype_t dtype = head->config.dtype;
    const int64_t hidden = head->config.hidden, width = tensor->ndim == 2 ? hidden : 1;
    const int64_t end = (head->count - 1) * tensor->stride[0] + width;
    const bool is_bias = tensor->ndim == 1 && !colo_head_is_flat(head);
    const void *place = colo_linear_element(place_in(head, gathered), dtype, is_bias ? hidden : 0);
    if (head->count == 0 || is_in_place(head, tensor, place) ||
        (uintptr_t)colo_linear_element(tensor->data, dtype, end) <= (uintptr_t)gathered ||
        (uintptr_t)tensor->data >= (uintptr_t)gathered + colo_lm_head_gathered_size(head))
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG,
                     "%s: %p, rows %" PRId64 " elements apart, lies in gathered (%p); there its "
                     "place is %p, rows %" PRId64 " apart",
                     what, tensor->data, tensor->stride[0], gathered, place,
                     colo_head_pitch(head, dtype));
}

colo_status_t colo_lm_head_bind(colo_lm_head_t *head, const colo_tensor_t *weight,
                                const colo_tensor_t *bias, void *gathered)
{
    COLO_FAIL_IF(!head, COLO_ERR_ARG, "lm_head: head is NULL");
    COLO_TRY(colo_head_check_param(head, weight, 2, "weight"));
    COLO_TRY(colo_head_check_has_bias(head, bias, "bias"));
    if (bias)
        COLO_TRY(colo_head_check_param(head, bias, 1, "bias"));
    for (int i = 0; i < 2; i++) {
        const colo_tensor_t *tensor = i ? bias : weight;
        COLO_FAIL_IF(tensor && tensor->dtype != head->config.dtype, COLO_ERR_ARG,
                     "%s: dtype %s, the head is %s", i ? "bias" : "weight",
                     colo_dtype_name(tensor->dtype), colo_dtype_name(head->config.dtype));
        if (tensor && head->group && gathered)
            COLO_TRY(check_apart(head, tensor, gathered, i ? "bias" : "weight"));
    }
    COLO_FAIL_IF(head->group && !gathered && colo_lm_head_gathered_size(head) > 0, COLO_ERR_ARG,
                 "lm_head: gathered is NULL; a sharded head needs %zu bytes",
                 colo_lm_head_gathered_size(head));
    COLO_TRY(colo_mem_check_aligned(gathered, "lm_head", "gathered"));
    COLO_FAIL_IF(head->group && head->state != COLO_LM_HEAD_NOT_AVAILABLE, COLO_ERR_STATE,
                 "lm_head: bind while a gather is %s; colo_lm_head_release() first",
                 head->state == COLO_LM_HEAD_IN_FLIGHT ? "in flight" : "in use");
    head->weight = *weight;
    head->bias = bias ? *bias : (colo_tensor_t){.data = NULL};
    head->gathered = gathered;
    head->bound = true;
    return COLO_OK;
}

colo_status_t colo_lm_head_bound(const colo_lm_head_t *head, uint64_t *version)
{
    COLO_FAIL_IF(!head->bound, COLO_ERR_STATE,
                 "lm_head: no weight is bound; call colo_lm_head_bind() first");
    *version =
        colo_loss_version(&head->weight) + (head->bias.data ? colo_loss_version(&head->bias) : 0);
    return COLO_OK;
}

const colo_tensor_t *colo_lm_head_resident(const colo_lm_head_t *head)
{
    return head->group ? NULL : &head->weight;
}

/* ---- gather ---- */

/* This rank's rows into its place of the gathered head, unless they are there, then the one
 * all-gather. */
static colo_status_t gather(colo_lm_head_t *head, colo_stream_t stream)
{
    const colo_dtype_t dtype = head->config.dtype;
    const int64_t hidden = head->config.hidden, step = colo_head_pitch(head, dtype);
    void *own = place_in(head, head->gathered);
    const size_t elem = colo_dtype_size(dtype);
    if (head->count > 0 && !is_in_place(head, &head->weight, own)) {
        colo_box_t to = colo_box_rows(own, colo_head_rows_of(head), colo_head_columns_of(head),
                                      step),
                   from = colo_box_rows(head->weight.data, colo_head_rows_of(head),
                                        colo_head_columns_of(head), head->weight.stride[0]);
        COLO_TRY(head->device->box_copy(&to, &from, elem, stream));
    }
    if (head->count > 0 && head->config.has_bias) {
        colo_box_t to =
                       colo_box_rows(colo_linear_element(own, dtype, hidden), head->count, 1, step),
                   from = colo_box_rows(head->bias.data, head->count, 1, 1);
        COLO_TRY(head->device->box_copy(&to, &from, elem, stream));
    }
    return colo_comm_all_gather_for(head->group, COLO_CATEGORY_HEAD, own, head->gathered,
                                    colo_head_slab(head, dtype), dtype, stream);
}

colo_status_t colo_lm_head_start(colo_lm_head_t *head, colo_stream_t stream)
{
    COLO_RANGE();
    uint64_t version;
    COLO_FAIL_IF(!head, COLO_ERR_ARG, "lm_head: head is NULL");
    colo_status_t st = colo_lm_head_bound(head, &version);
    if (!head->group)
        return st;
    if (st == COLO_OK && head->state != COLO_LM_HEAD_NOT_AVAILABLE)
        st = colo_fail(COLO_ERR_STATE, "lm_head: start, but it is already %s",
                       head->state == COLO_LM_HEAD_IN_FLIGHT ? "in flight" : "available");
    COLO_TRY(colo_loss_ready(head->group, "lm_head start", st));
    colo_stream_t aux = head->device->stream_of(head->aux);
    st = head->device->event_record(head->aux, READY, stream);
    COLO_THEN(st, head->device->event_wait(head->aux, READY, aux));
    COLO_THEN(st, gather(head, aux));
    COLO_THEN(st, head->device->event_record(head->aux, GATHERED, aux));
    if (st < 0) {
        st = colo_comm_fail(head->group, st);
        const colo_error_t why = colo_error_save();
        /* the gathered head is the caller's again after @stream's work so far */
        if (head->device->event_record(head->aux, GATHERED, aux) == COLO_OK)
            (void)head->device->event_wait(head->aux, GATHERED, stream);
        return colo_error_restore(st, &why);
    }
    head->state = COLO_LM_HEAD_IN_FLIGHT;
    return COLO_OK;
}

static void views(const colo_lm_head_t *head, colo_tensor_t *weight, colo_tensor_t *bias)
{
    colo_tensor_t w = head->weight, b = head->bias;
    if (head->group) {
        w.data = head->gathered;
        w.ndim = 2;
        w.shape[0] = head->config.rows;
        w.shape[1] = head->config.hidden;
        w.stride[0] = colo_head_pitch(head, head->config.dtype);
        w.stride[1] = 1;
        w.version = NULL;
        if (head->config.has_bias) {
            b.data = colo_linear_element(head->gathered, head->config.dtype, head->config.hidden);
            b.shape[0] = head->config.rows;
            b.stride[0] = w.stride[0];
            b.version = NULL;
        }
    }
    if (weight)
        *weight = w;
    if (bias)
        *bias = b;
}

colo_status_t colo_lm_head_finish(colo_lm_head_t *head, colo_stream_t stream, colo_tensor_t *weight,
                                  colo_tensor_t *bias)
{
    COLO_RANGE();
    uint64_t version;
    COLO_FAIL_IF(!head, COLO_ERR_ARG, "lm_head: head is NULL");
    COLO_TRY(colo_lm_head_bound(head, &version));
    COLO_FAIL_IF(head->group && head->state != COLO_LM_HEAD_IN_FLIGHT, COLO_ERR_STATE,
                 "lm_head: finish, but %s",
                 head->state == COLO_LM_HEAD_AVAILABLE ? "it is available already"
                                                       : "no gather was started");
    if (head->group)
        COLO_TRY(head->device->event_wait(head->aux, GATHERED, stream));
    head->state = COLO_LM_HEAD_AVAILABLE;
    views(head, weight, bias);
    return COLO_OK;
}

colo_status_t colo_lm_head_acquire(colo_lm_head_t *head, colo_stream_t stream,
                                   colo_tensor_t *weight, colo_tensor_t *bias)
{
    COLO_RANGE();
    COLO_FAIL_IF(!head, COLO_ERR_ARG, "lm_head: head is NULL");
    if (head->state == COLO_LM_HEAD_NOT_AVAILABLE)
        COLO_TRY(colo_lm_head_start(head, stream));
    if (!head->group || head->state == COLO_LM_HEAD_IN_FLIGHT)
        return colo_lm_head_finish(head, stream, weight, bias);
    views(head, weight, bias);
    return COLO_OK;
}

colo_status_t colo_lm_head_release(colo_lm_head_t *head, colo_stream_t stream)
{
    COLO_RANGE();
    (void)stream; /* what comes next on it comes after what read the views */
    COLO_FAIL_IF(!head, COLO_ERR_ARG, "lm_head: head is NULL");
    if (!head->group)
        return COLO_OK;
    COLO_FAIL_IF(head->state != COLO_LM_HEAD_AVAILABLE, COLO_ERR_STATE, "lm_head: release, but %s",
                 head->state == COLO_LM_HEAD_IN_FLIGHT
                     ? "its gather is in flight; colo_lm_head_finish() first"
                     : "it is not available");
    head->state = COLO_LM_HEAD_NOT_AVAILABLE;
    return COLO_OK;
}
