/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm_head.c - a head that is here, or gathered when it is needed.
 *
 * Decides how shards lie on the transport. E = ceil(Vl / D) rows a rank, so that what all ranks
 * bring, one after another, is the whole head, contiguous, with padding at its end only: one plain
 * all-gather in place. A bias travels as one more column of its row (and a few of padding, to keep
 * rows 16-byte aligned), so that weight and bias are one collective, forward and back. Gradients
 * return the same way, as fp32: one reduce-scatter in place, whose rank order makes a sharded head
 * the same bits as a resident one. What lies in padding is sent and never read.
 *
 * The gather runs on a lane, a stream of the head's own: between start and finish the caller's
 * stream is free. A state machine of three states fixes the order of calls; every rank of the group
 * comes through it alike, with or without rows, with or without tokens, because nothing here looks
 * at either. Leaves to pipeline.c which passes need the weight at all.
 */
#include "loss/linear/linear.h"

#include "comm/comm.h"
#include "core/memory.h"
#include "core/error.h"
#include "core/sized.h"
#include "loss/validate.h"
#include "loss/loss.h"

#include <inttypes.h>
#include <stdlib.h>

enum { READY = 0, GATHERED = 1, EVENTS = 2 };

struct colo_lm_head {
    colo_lm_head_config_t config;
    colo_comm_t *group; /* NULL: resident */
    const colo_ops_t *ops;
    const colo_loss_ops_t *loss;
    void *lane;
    int64_t each;         /* E */
    int64_t first, count; /* rows here */
    colo_lm_head_state_t state;
    bool bound;
    colo_tensor_t weight, bias; /* as bound */
    void *gathered;
};

/* ---- sizes ---- */

static colo_dtype_t sum_dtype(const colo_lm_head_t *h)
{
    return h->config.dtype == COLO_F64 ? COLO_F64 : COLO_F32;
}

/* Elements from one travelling row to the next. */
static int64_t pitch(const colo_lm_head_t *h, colo_dtype_t dtype)
{
    int64_t step = 16 / (int64_t)colo_dtype_size(dtype);
    return h->config.has_bias ? (h->config.hidden + step) / step * step : h->config.hidden;
}

static int64_t padded_rows(const colo_lm_head_t *h)
{
    return h->group ? h->each * colo_comm_size(h->group) : h->config.rows;
}

static size_t bytes_of(const colo_lm_head_t *h, colo_dtype_t dtype)
{
    int64_t bytes = padded_rows(h) * pitch(h, dtype) * (int64_t)colo_dtype_size(dtype);
    (void)colo_mem_round_ok(bytes, &bytes); /* create has left room for it */
    return (size_t)bytes;
}

size_t colo_lm_head_gathered_size(const colo_lm_head_t *h)
{
    if (!h || !h->group)
        return 0;
    return bytes_of(h, h->config.dtype);
}

/* Do gradients go straight into the caller's memory? */
static bool direct(const colo_lm_head_t *h, const colo_lm_head_grads_t *grads)
{
    return !h->group && grads->d_weight->dtype == sum_dtype(h);
}

size_t colo_lm_head_reduce_size(const colo_lm_head_t *h, const colo_lm_head_grads_t *grads)
{
    if (!h || !grads || !grads->d_weight || direct(h, grads))
        return 0;
    return bytes_of(h, sum_dtype(h));
}

/* ---- create ---- */

static colo_status_t check_config(const colo_lm_head_config_t *c)
{
    int64_t bytes;
    if (!colo_dtype_is_float(c->dtype))
        return colo_fail(COLO_ERR_ARG, "lm_head: dtype %s, expected f32, f64, bf16 or f16",
                         colo_dtype_name(c->dtype));
    if (c->rows < 0)
        return colo_fail(COLO_ERR_ARG, "lm_head: rows is %" PRId64 ", expected >= 0", c->rows);
    if (c->hidden <= 0)
        return colo_fail(COLO_ERR_ARG, "lm_head: hidden is %" PRId64 ", expected > 0", c->hidden);
    /* room for padding of up to 4096 ranks and of a bias */
    if (c->rows > INT64_MAX - 8192 || c->hidden > INT64_MAX - 64 ||
        !colo_mul_ok(c->rows + 8192, (c->hidden + 16) * 8, &bytes))
        return colo_fail(COLO_ERR_ARG, "lm_head: %" PRId64 " x %" PRId64 " passes 2^63 bytes",
                         c->rows, c->hidden);
    if (c->mem != COLO_HOST && c->mem != COLO_CUDA)
        return colo_fail(COLO_ERR_ARG, "lm_head: memory kind %d is unknown", (int)c->mem);
    return COLO_OK;
}

static void add_fields(colo_fields_t *f, const colo_lm_head_config_t *c)
{
    colo_fields_add(f, "rows", "%lld", (long long)c->rows);
    colo_fields_add(f, "hidden", "%lld", (long long)c->hidden);
    colo_fields_add(f, "dtype", "%s", colo_dtype_name(c->dtype));
    colo_fields_add(f, "mem", "%s", c->mem == COLO_HOST ? "host" : "cuda");
    colo_fields_add(f, "has_bias", "%d", c->has_bias);
}

static colo_status_t open_ops(const colo_lm_head_config_t *given, colo_lm_head_config_t *c,
                              const colo_ops_t **ops, const colo_loss_ops_t **loss)
{
    COLO_TRY(COLO_SIZED_READ(c, given, mem, "lm_head: config", "COLO_LM_HEAD_CONFIG_INIT"));
    COLO_TRY(check_config(c));
    COLO_TRY(colo_ops_for(c->mem, ops));
    return colo_loss_ops_for(c->mem, loss);
}

static colo_status_t check_group(const colo_lm_head_config_t *c, const colo_comm_t *group)
{
    colo_tensor_t like = {.mem = c->mem, .device = c->device};
    return group ? colo_loss_i_check_place(&like, group, "lm_head") : COLO_OK;
}

colo_status_t colo_lm_head_create(colo_lm_head_t **head, const colo_lm_head_config_t *config,
                                  colo_comm_t *group)
{
    const colo_ops_t *ops = NULL;
    const colo_loss_ops_t *loss = NULL;
    colo_lm_head_t *h = NULL;
    colo_lm_head_config_t own = {COLO_LM_HEAD_CONFIG_INIT};
    colo_status_t st = head ? open_ops(config, &own, &ops, &loss)
                            : colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    config = &own;
    if (st == COLO_OK)
        st = check_group(config, group);
    if (st == COLO_OK) {
        h = calloc(1, sizeof *h);
        if (!h)
            st = colo_fail(COLO_ERR_NOMEM, "lm_head: %zu bytes", sizeof *h);
    }
    if (st == COLO_OK) {
        h->config = *config;
        h->ops = ops;
        h->loss = loss;
        st = ops->stream_create(EVENTS, &h->lane);
    }
    if (group && colo_comm_size(group) > 1) {
        colo_fields_t fields = {COLO_FIELDS_INIT};
        if (st == COLO_OK)
            add_fields(&fields, config);
        if (colo_comm_check_level(group) >= 1)
            st = colo_comm_i_agree_fields(group, "lm_head create", &fields, st);
        else if (st < 0)
            st = colo_comm_i_fail(group, st);
    }
    if (st < 0) {
        colo_lm_head_destroy(&h);
        return st;
    }
    h->group = group;
    h->count = config->rows;
    h->state = COLO_LM_HEAD_AVAILABLE;
    if (group) {
        const int64_t d = colo_comm_rank(group), ranks = colo_comm_size(group), rows = config->rows;
        h->each = rows / ranks + (rows % ranks > 0);
        h->first = d * h->each < rows ? d * h->each : rows;
        h->count = rows - h->first < h->each ? rows - h->first : h->each;
        h->state = COLO_LM_HEAD_NOT_AVAILABLE;
    }
    *head = h;
    return COLO_OK;
}

void colo_lm_head_destroy(colo_lm_head_t **head)
{
    colo_lm_head_t *h = head ? *head : NULL;
    if (!h)
        return;
    if (h->ops)
        h->ops->stream_destroy(h->lane); /* waits for its stream */
    free(h);
    *head = NULL;
}

const colo_lm_head_config_t *colo_lm_head_config(const colo_lm_head_t *h)
{
    return h ? &h->config : NULL;
}

colo_comm_t *colo_lm_head_group(const colo_lm_head_t *h)
{
    return h ? h->group : NULL;
}

colo_lm_head_state_t colo_lm_head_state(const colo_lm_head_t *h)
{
    return h ? h->state : COLO_LM_HEAD_NOT_AVAILABLE;
}

void colo_lm_head_rows(const colo_lm_head_t *h, int64_t *first, int64_t *count)
{
    if (first)
        *first = h ? h->first : 0;
    if (count)
        *count = h ? h->count : 0;
}

/* ---- bind ---- */

/* @axes: 2 for a matrix [rows here, H], 1 for a vector [rows here] */
static colo_status_t check_param(const colo_lm_head_t *h, const colo_tensor_t *x, int32_t axes,
                                 const char *what)
{
    COLO_TRY(colo_tensor_check(x, what));
    if (x->ndim != axes || x->shape[0] != h->count ||
        (axes == 2 && x->shape[1] != h->config.hidden))
        return colo_fail(COLO_ERR_SHAPE,
                         "%s: %d axes, [%" PRId64 ", %" PRId64 "], expected %d: [%" PRId64
                         ", %" PRId64 "], rows %" PRId64 " to %" PRId64 " of %" PRId64,
                         what, (int)x->ndim, x->shape[0], axes == 2 ? x->shape[1] : 1, (int)axes,
                         h->count, axes == 2 ? h->config.hidden : 1, h->first, h->first + h->count,
                         h->config.rows);
    if (x->shape[axes - 1] > 1 && x->stride[axes - 1] != 1)
        return colo_fail(COLO_ERR_SHAPE,
                         "%s: its last axis has stride %" PRId64 ", expected contiguous elements",
                         what, x->stride[axes - 1]);
    if (axes == 2 && x->shape[0] > 1 && x->stride[0] < x->shape[1])
        return colo_fail(COLO_ERR_SHAPE,
                         "%s: rows of %" PRId64 " elements are %" PRId64 " apart and overlap", what,
                         x->shape[1], x->stride[0]);
    if (x->mem != h->config.mem || (x->mem == COLO_CUDA && x->device != h->config.device))
        return colo_fail(COLO_ERR_ARG,
                         "%s: memory kind %d on device %d, the head is kind %d on device %d", what,
                         (int)x->mem, (int)x->device, (int)h->config.mem, (int)h->config.device);
    return COLO_OK;
}

static colo_status_t check_has_bias(const colo_lm_head_t *h, const colo_tensor_t *bias,
                                    const char *what)
{
    if (h->config.has_bias != (bias != NULL))
        return colo_fail(COLO_ERR_ARG, "%s is %s, the head has %s bias", what,
                         bias ? "given" : "NULL", h->config.has_bias ? "a" : "no");
    return COLO_OK;
}

static void *element(void *data, colo_dtype_t dtype, int64_t i)
{
    return (char *)data + i * (int64_t)colo_dtype_size(dtype);
}

/* Where this rank's rows lie in @gathered. */
static void *place_in(const colo_lm_head_t *h, void *gathered)
{
    const colo_dtype_t dtype = h->config.dtype;
    return element(gathered, dtype, colo_comm_rank(h->group) * h->each * pitch(h, dtype));
}

static bool is_in_place(const colo_lm_head_t *h, const colo_tensor_t *x, const void *place)
{
    return x->data == place && (h->count == 1 || x->stride[0] == pitch(h, h->config.dtype));
}

/* In its place of what is gathered, or apart: else a gather would overwrite what it is to read. */
static colo_status_t check_apart(const colo_lm_head_t *h, const colo_tensor_t *x, void *gathered,
                                 const char *what)
{
    const colo_dtype_t dtype = h->config.dtype;
    const int64_t hidden = h->config.hidden, width = x->ndim == 2 ? hidden : 1;
    const int64_t end = (h->count - 1) * x->stride[0] + width;
    const void *place = element(place_in(h, gathered), dtype, x->ndim == 2 ? 0 : hidden);
    if (h->count == 0 || is_in_place(h, x, place) ||
        (uintptr_t)element(x->data, dtype, end) <= (uintptr_t)gathered ||
        (uintptr_t)x->data >= (uintptr_t)gathered + colo_lm_head_gathered_size(h))
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG,
                     "%s: %p, rows %" PRId64 " elements apart, lies in gathered (%p); there its "
                     "place is %p, rows %" PRId64 " apart",
                     what, x->data, x->stride[0], gathered, place, pitch(h, dtype));
}

colo_status_t colo_lm_head_bind(colo_lm_head_t *h, const colo_tensor_t *weight,
                                const colo_tensor_t *bias, void *gathered)
{
    if (!h)
        return colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    COLO_TRY(check_param(h, weight, 2, "weight"));
    COLO_TRY(check_has_bias(h, bias, "bias"));
    if (bias)
        COLO_TRY(check_param(h, bias, 1, "bias"));
    for (int i = 0; i < 2; i++) {
        const colo_tensor_t *x = i ? bias : weight;
        if (x && x->dtype != h->config.dtype)
            return colo_fail(COLO_ERR_ARG, "%s: dtype %s, the head is %s", i ? "bias" : "weight",
                             colo_dtype_name(x->dtype), colo_dtype_name(h->config.dtype));
        if (x && h->group && gathered)
            COLO_TRY(check_apart(h, x, gathered, i ? "bias" : "weight"));
    }
    if (h->group && !gathered && colo_lm_head_gathered_size(h) > 0)
        return colo_fail(COLO_ERR_ARG, "lm_head: gathered is NULL; a sharded head needs %zu bytes",
                         colo_lm_head_gathered_size(h));
    COLO_TRY(colo_mem_check_aligned(gathered, "lm_head", "gathered"));
    if (h->group && h->state != COLO_LM_HEAD_NOT_AVAILABLE)
        return colo_fail(COLO_ERR_STATE,
                         "lm_head: bind while a gather is %s; colo_lm_head_release() first",
                         h->state == COLO_LM_HEAD_IN_FLIGHT ? "in flight" : "in use");
    h->weight = *weight;
    h->bias = bias ? *bias : (colo_tensor_t){.data = NULL};
    h->gathered = gathered;
    h->bound = true;
    return COLO_OK;
}

colo_status_t colo_lm_head_i_bound(const colo_lm_head_t *h, uint64_t *version)
{
    if (!h->bound)
        return colo_fail(COLO_ERR_STATE,
                         "lm_head: no weight is bound; colo_lm_head_bind() says where it is");
    *version = (h->weight.version ? *h->weight.version : 0) +
               (h->bias.data && h->bias.version ? *h->bias.version : 0);
    return COLO_OK;
}

/* ---- gather ---- */

static colo_box_t box_of(void *data, int64_t rows, int64_t columns, int64_t stride)
{
    return (colo_box_t){.data = data, .extent = {1, rows, columns}, .stride = {0, stride, 1}};
}

/* This rank's rows into its place of the gathered head, unless they are there, then the one
 * all-gather. */
static colo_status_t gather(colo_lm_head_t *h, colo_stream_t stream)
{
    const colo_dtype_t dtype = h->config.dtype;
    const int64_t hidden = h->config.hidden, step = pitch(h, dtype), slab = h->each * step;
    void *own = place_in(h, h->gathered);
    const size_t elem = colo_dtype_size(dtype);
    if (h->count > 0 && !is_in_place(h, &h->weight, own)) {
        colo_box_t to = box_of(own, h->count, hidden, step),
                   from = box_of(h->weight.data, h->count, hidden, h->weight.stride[0]);
        COLO_TRY(h->ops->box_copy(&to, &from, elem, stream));
    }
    if (h->count > 0 && h->config.has_bias) {
        colo_box_t to = box_of(element(own, dtype, hidden), h->count, 1, step),
                   from = box_of(h->bias.data, h->count, 1, 1);
        COLO_TRY(h->ops->box_copy(&to, &from, elem, stream));
    }
    return colo_comm_i_all_gather(h->group, COLO_CATEGORY_HEAD, own, h->gathered, slab, dtype,
                                  stream);
}

colo_status_t colo_lm_head_start(colo_lm_head_t *h, colo_stream_t stream)
{
    uint64_t version;
    if (!h)
        return colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    colo_status_t st = colo_lm_head_i_bound(h, &version);
    if (!h->group)
        return st;
    if (st == COLO_OK && h->state != COLO_LM_HEAD_NOT_AVAILABLE)
        st = colo_fail(COLO_ERR_STATE, "lm_head: start, but it is already %s",
                       h->state == COLO_LM_HEAD_IN_FLIGHT ? "in flight" : "available");
    COLO_TRY(colo_loss_i_ready(h->group, "lm_head start", st));
    colo_stream_t lane = h->ops->stream_of(h->lane);
    st = h->ops->event_record(h->lane, READY, stream);
    if (st == COLO_OK)
        st = h->ops->event_wait(h->lane, READY, lane);
    if (st == COLO_OK)
        st = gather(h, lane);
    if (st == COLO_OK)
        st = h->ops->event_record(h->lane, GATHERED, lane);
    if (st < 0)
        return colo_comm_i_fail(h->group, st);
    h->state = COLO_LM_HEAD_IN_FLIGHT;
    return COLO_OK;
}

static void views(const colo_lm_head_t *h, colo_tensor_t *weight, colo_tensor_t *bias)
{
    colo_tensor_t w = h->weight, b = h->bias;
    if (h->group) {
        w.data = h->gathered;
        w.shape[0] = h->config.rows;
        w.stride[0] = pitch(h, h->config.dtype);
        w.version = NULL;
        if (h->config.has_bias) {
            b.data = element(h->gathered, h->config.dtype, h->config.hidden);
            b.shape[0] = h->config.rows;
            b.stride[0] = w.stride[0];
            b.version = NULL;
        }
    }
    if (weight)
        *weight = w;
    if (bias)
        *bias = b;
}

colo_status_t colo_lm_head_finish(colo_lm_head_t *h, colo_stream_t stream, colo_tensor_t *weight,
                                  colo_tensor_t *bias)
{
    uint64_t version;
    if (!h)
        return colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    COLO_TRY(colo_lm_head_i_bound(h, &version));
    if (h->group && h->state != COLO_LM_HEAD_IN_FLIGHT)
        return colo_fail(COLO_ERR_STATE, "lm_head: finish, but %s",
                         h->state == COLO_LM_HEAD_AVAILABLE ? "it is available already"
                                                            : "no gather was started");
    if (h->group)
        COLO_TRY(h->ops->event_wait(h->lane, GATHERED, stream));
    h->state = COLO_LM_HEAD_AVAILABLE;
    views(h, weight, bias);
    return COLO_OK;
}

colo_status_t colo_lm_head_acquire(colo_lm_head_t *h, colo_stream_t stream, colo_tensor_t *weight,
                                   colo_tensor_t *bias)
{
    if (!h)
        return colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    if (h->state == COLO_LM_HEAD_NOT_AVAILABLE)
        COLO_TRY(colo_lm_head_start(h, stream));
    if (!h->group || h->state == COLO_LM_HEAD_IN_FLIGHT)
        return colo_lm_head_finish(h, stream, weight, bias);
    views(h, weight, bias);
    return COLO_OK;
}

colo_status_t colo_lm_head_release(colo_lm_head_t *h, colo_stream_t stream)
{
    (void)stream; /* what comes next on it comes after what read the views */
    if (!h)
        return colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    if (!h->group)
        return COLO_OK;
    if (h->state != COLO_LM_HEAD_AVAILABLE)
        return colo_fail(COLO_ERR_STATE, "lm_head: release, but %s",
                         h->state == COLO_LM_HEAD_IN_FLIGHT
                             ? "its gather is in flight; colo_lm_head_finish() first"
                             : "it is not available");
    h->state = COLO_LM_HEAD_NOT_AVAILABLE;
    return COLO_OK;
}

/* ---- gradients ---- */

static colo_status_t check_grads(const colo_lm_head_t *h, const colo_lm_head_grads_t *g,
                                 const void *workspace)
{
    if (!g || !g->d_weight)
        return colo_fail(COLO_ERR_ARG, "lm_head: d_weight is NULL");
    COLO_TRY(check_param(h, g->d_weight, 2, "d_weight"));
    COLO_TRY(check_has_bias(h, g->d_bias, "d_bias"));
    if (g->d_bias)
        COLO_TRY(check_param(h, g->d_bias, 1, "d_bias"));
    const colo_dtype_t dtype = g->d_weight->dtype;
    if (dtype != sum_dtype(h) && dtype != h->config.dtype)
        return colo_fail(COLO_ERR_ARG, "d_weight: dtype %s, expected %s or the head's %s",
                         colo_dtype_name(dtype), colo_dtype_name(sum_dtype(h)),
                         colo_dtype_name(h->config.dtype));
    if (g->d_bias && g->d_bias->dtype != dtype)
        return colo_fail(COLO_ERR_ARG, "d_bias: dtype %s, d_weight is %s",
                         colo_dtype_name(g->d_bias->dtype), colo_dtype_name(dtype));
    if (g->add && dtype != sum_dtype(h))
        return colo_fail(COLO_ERR_ARG,
                         "d_weight: dtype %s cannot be added to without losing digits, expected %s",
                         colo_dtype_name(dtype), colo_dtype_name(sum_dtype(h)));
    size_t bytes = colo_lm_head_reduce_size(h, g);
    if (bytes > 0 && !workspace)
        return colo_fail(COLO_ERR_ARG, "lm_head: workspace is NULL, expected %zu bytes", bytes);
    return colo_mem_check_aligned(workspace, "lm_head", "workspace");
}

static colo_tensor_t view_of(const colo_lm_head_t *h, void *data, int32_t axes, int64_t stride)
{
    colo_tensor_t v = {.data = data,
                       .dtype = sum_dtype(h),
                       .mem = h->config.mem,
                       .device = h->config.mem == COLO_HOST ? -1 : h->config.device,
                       .ndim = axes,
                       .shape = {h->config.rows, axes == 2 ? h->config.hidden : 0},
                       .stride = {stride, axes == 2 ? 1 : 0}};
    return v;
}

colo_status_t colo_lm_head_i_gradient(colo_lm_head_t *h, const colo_lm_head_grads_t *grads,
                                      void *workspace, colo_tensor_t *d_weight,
                                      colo_tensor_t *d_bias, bool *fresh)
{
    if (!h)
        return colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    COLO_TRY(check_grads(h, grads, workspace));
    if (direct(h, grads)) {
        *fresh = !grads->add;
        *d_weight = *grads->d_weight;
        *d_bias = grads->d_bias ? *grads->d_bias : (colo_tensor_t){.data = NULL};
        return COLO_OK;
    }
    *fresh = true;
    *d_weight = view_of(h, workspace, 2, pitch(h, sum_dtype(h)));
    *d_bias = (colo_tensor_t){.data = NULL};
    if (h->config.has_bias)
        *d_bias = view_of(h, element(workspace, sum_dtype(h), h->config.hidden), 1,
                          pitch(h, sum_dtype(h)));
    return COLO_OK;
}

/* Zeros in rows of a view, at once where they are back to back. */
static colo_status_t clear(const colo_lm_head_t *h, const colo_tensor_t *d, colo_stream_t stream)
{
    const int64_t width = d->ndim == 2 ? d->shape[1] : 1;
    if (d->data && d->stride[0] == width)
        return colo_mem_zero(h->config.mem, d->data,
                             (size_t)(d->shape[0] * width) * colo_dtype_size(d->dtype), stream);
    for (int64_t i = 0; d->data && i < d->shape[0]; i++)
        COLO_TRY(colo_mem_zero(h->config.mem, element(d->data, d->dtype, i * d->stride[0]),
                               (size_t)width * colo_dtype_size(d->dtype), stream));
    return COLO_OK;
}

colo_status_t colo_lm_head_gradient(colo_lm_head_t *h, const colo_lm_head_grads_t *grads,
                                    void *workspace, colo_stream_t stream, colo_tensor_t *d_weight,
                                    colo_tensor_t *d_bias)
{
    colo_tensor_t w, b;
    bool fresh = false;
    COLO_TRY(colo_lm_head_i_gradient(h, grads, workspace, &w, &b, &fresh));
    if (fresh && !direct(h, grads)) {
        COLO_TRY(
            colo_mem_zero(h->config.mem, workspace, colo_lm_head_reduce_size(h, grads), stream));
    } else if (fresh) {
        COLO_TRY(clear(h, &w, stream));
        COLO_TRY(clear(h, &b, stream));
    }
    if (d_weight)
        *d_weight = w;
    if (d_bias)
        *d_bias = b;
    return COLO_OK;
}

/* rows x columns of @from, sums, into the caller's @to */
static colo_status_t deliver(const colo_lm_head_t *h, const colo_tensor_t *to, void *from,
                             int64_t columns, bool add, colo_stream_t stream)
{
    const int64_t step = pitch(h, sum_dtype(h)), to_step = to->stride[0];
    if (h->count == 0)
        return COLO_OK;
    if (!add) {
        struct colo_linear_matrix dst = {to->data, to_step, to->dtype},
                                  src = {from, step, sum_dtype(h)};
        return h->loss->rows_convert(&dst, &src, h->count, columns, stream);
    }
    colo_box_t dst = box_of(to->data, h->count, columns, to_step),
               addends[2] = {dst, box_of(from, h->count, columns, step)};
    return h->ops->box_sum(&dst, addends, 2, to->dtype, stream);
}

colo_status_t colo_lm_head_reduce(colo_lm_head_t *h, const colo_lm_head_grads_t *grads,
                                  void *workspace, colo_stream_t stream)
{
    if (!h)
        return colo_fail(COLO_ERR_ARG, "lm_head: head is NULL");
    colo_status_t st = check_grads(h, grads, workspace);
    if (!h->group) {
        COLO_TRY(st);
        if (direct(h, grads))
            return COLO_OK;
    }
    const int64_t slab = h->each * pitch(h, sum_dtype(h));
    void *own = workspace;
    if (h->group) {
        COLO_TRY(colo_loss_i_ready(h->group, "lm_head reduce", st));
        own = element(workspace, sum_dtype(h), colo_comm_rank(h->group) * slab);
        COLO_TRY(colo_comm_i_reduce_scatter(h->group, COLO_CATEGORY_HEAD, workspace, own, slab,
                                            sum_dtype(h), COLO_SUM, stream));
    }
    COLO_TRY(deliver(h, grads->d_weight, own, h->config.hidden, grads->add, stream));
    if (!h->config.has_bias)
        return COLO_OK;
    return deliver(h, grads->d_bias, element(own, sum_dtype(h), h->config.hidden), 1, grads->add,
                   stream);
}
