/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tape.c - a reverse-mode tape: which nodes run, in which order, and where gradients add up.
 *
 * A tape is a list of nodes in the order they were recorded, which is a topological order: an input
 * is always recorded before the node that uses it. Backward marks what the wanted value depends on,
 * checks the versions of everything those nodes saved, makes every buffer, and only then runs the
 * marked nodes from last to first. So a refusal comes before any node has run.
 *
 * A node writes its input gradients; the tape adds. The first gradient that reaches a value is
 * written straight into the value's buffer, a later one (another consumer, or the same value twice
 * in one node) into a spare buffer and then added, in fp32 for bf16 and fp16, so the order of
 * addition is the reverse order of recording, always. A caller's own gradient (d_t of a leaf) is
 * added to once, after the last node has succeeded: a backward that fails leaves it as it was.
 *
 * A gradient lives in its value's kind of memory. On a device zeros, copies and sums are those of
 * ops.h, enqueued on the tape's stream, and the host waits for nothing: a node enqueues there, too.
 *
 * Buffers live in a pool: reset returns them, and the next step, which needs the same sizes, takes
 * them again. Versions, not copies, protect saved tensors; the tape owns no activation.
 */
#include <colobridge/tape.h>

#include "core/half.h"
#include "core/memory.h"
#include "core/ops.h"
#include "core/try.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { NAME = 48 };

struct buffer {
    void *data;
    size_t bytes;
    colo_mem_t mem;
    bool taken;
};

struct value {
    colo_tensor_t t;
    colo_tensor_t caller; /* data NULL where the tape owns the gradient */
    void *grad;           /* from the pool; contiguous */
    int32_t node;         /* that made it; -1 for a leaf */
    bool wanted;          /* lies on a way from the value that backward starts at */
    bool reached;         /* grad holds something */
};

struct saved {
    const uint64_t *version;
    uint64_t at;
};

struct node {
    char name[NAME];
    int32_t nin, nout, nsaved, first_out; /* outputs are values first_out .. first_out + nout - 1 */
    colo_value_t *in;
    struct saved *saved;
    void **spare; /* [nin], only during backward */
    colo_backward_fn backward;
    void *state;
    void (*free_state)(void *);
};

struct colo_tape {
    struct value *values;
    struct node *nodes;
    struct buffer *pool;
    int64_t nvalues, nnodes, npool, cap_values, cap_nodes, cap_pool;
    colo_stream_t stream; /* of gradients on a device */
    bool ran;
};

/* ---- memory ---- */

/* Room for @more elements behind @n; the array may move. */
static colo_status_t grow(void **array, int64_t *cap, int64_t n, int64_t more, size_t elem)
{
    if (n + more <= *cap)
        return COLO_OK;
    int64_t want = *cap * 2 > n + more ? *cap * 2 : n + more + 16;
    void *moved = realloc(*array, (size_t)want * elem);
    if (!moved)
        return colo_fail(COLO_ERR_NOMEM, "tape: %zu bytes", (size_t)want * elem);
    *array = moved;
    *cap = want;
    return COLO_OK;
}

/* The smallest free buffer that is large enough, else a new one. */
static colo_status_t take(colo_tape_t *tape, colo_mem_t mem, size_t bytes, void **data)
{
    struct buffer *best = NULL;
    for (int64_t i = 0; i < tape->npool; i++) {
        struct buffer *b = &tape->pool[i];
        if (!b->taken && b->mem == mem && b->bytes >= bytes && (!best || b->bytes < best->bytes))
            best = b;
    }
    if (!best) {
        COLO_TRY(grow((void **)&tape->pool, &tape->cap_pool, tape->npool, 1, sizeof *tape->pool));
        best = &tape->pool[tape->npool];
        *best = (struct buffer){.bytes = bytes, .mem = mem};
        colo_status_t st = colo_mem_alloc(mem, bytes ? bytes : 1, &best->data);
        if (st < 0)
            return colo_fail_prefix(st, "tape: gradient of %zu bytes", bytes);
        tape->npool++;
    }
    best->taken = true;
    *data = best->data;
    return COLO_OK;
}

static void give(colo_tape_t *tape, const void *data)
{
    for (int64_t i = 0; i < tape->npool; i++)
        if (tape->pool[i].data == data)
            tape->pool[i].taken = false;
}

colo_status_t colo_tape_create(colo_tape_t **tape)
{
    if (!tape)
        return colo_fail(COLO_ERR_ARG, "tape: where to put it is NULL");
    colo_tape_t *made = calloc(1, sizeof *made);
    if (!made)
        return colo_fail(COLO_ERR_NOMEM, "tape: %zu bytes", sizeof *made);
    *tape = made;
    return COLO_OK;
}

static void node_free(struct node *n)
{
    if (n->free_state)
        n->free_state(n->state);
    free(n->in);
    free(n->saved);
    free(n->spare);
}

void colo_tape_set_stream(colo_tape_t *tape, colo_stream_t stream)
{
    if (tape)
        tape->stream = stream;
}

void colo_tape_reset(colo_tape_t *tape)
{
    if (!tape)
        return;
    for (int64_t i = tape->nnodes; i-- > 0;)
        node_free(&tape->nodes[i]);
    for (int64_t i = 0; i < tape->npool; i++)
        tape->pool[i].taken = false;
    tape->nnodes = tape->nvalues = 0;
    tape->ran = false;
}

void colo_tape_destroy(colo_tape_t **tape)
{
    if (!tape || !*tape)
        return;
    colo_tape_reset(*tape);
    for (int64_t i = 0; i < (*tape)->npool; i++)
        colo_mem_free((*tape)->pool[i].mem, (*tape)->pool[i].data);
    free((*tape)->pool);
    free((*tape)->nodes);
    free((*tape)->values);
    free(*tape);
    *tape = NULL;
}

/* ---- recording ---- */

static colo_status_t check_value_tensor(const colo_tensor_t *t, const char *what)
{
    COLO_TRY(colo_tensor_check(t, what));
    if (!colo_dtype_is_float(t->dtype))
        return colo_fail(COLO_ERR_ARG,
                         "%s: dtype %s has no gradient, expected f32, f64, bf16 or f16", what,
                         colo_dtype_name(t->dtype));
    return COLO_OK;
}

/* A gradient: like @t in shape and dtype, and contiguous. */
static colo_status_t check_like(const colo_tensor_t *g, const colo_tensor_t *t, const char *what)
{
    COLO_TRY(check_value_tensor(g, what));
    if (g->mem != t->mem || g->device != t->device)
        return colo_fail(COLO_ERR_ARG,
                         "%s: in %s memory (device %d), its value is in %s memory (device %d)",
                         what, g->mem == COLO_CUDA ? "CUDA" : "host", (int)g->device,
                         t->mem == COLO_CUDA ? "CUDA" : "host", (int)t->device);
    if (g->dtype != t->dtype)
        return colo_fail(COLO_ERR_SHAPE, "%s: dtype %s, its value is %s", what,
                         colo_dtype_name(g->dtype), colo_dtype_name(t->dtype));
    if (g->ndim != t->ndim)
        return colo_fail(COLO_ERR_SHAPE, "%s: %d axes, its value has %d", what, (int)g->ndim,
                         (int)t->ndim);
    for (int32_t i = 0; i < t->ndim; i++)
        if (g->shape[i] != t->shape[i])
            return colo_fail(COLO_ERR_SHAPE,
                             "%s: axis %d has extent %" PRId64 ", its value has %" PRId64, what,
                             (int)i, g->shape[i], t->shape[i]);
    if (!colo_tensor_is_contiguous(g))
        return colo_fail(COLO_ERR_SHAPE, "%s: not contiguous", what);
    return COLO_OK;
}

static colo_status_t check_open(const colo_tape_t *tape, const char *what)
{
    if (!tape)
        return colo_fail(COLO_ERR_ARG, "%s: tape is NULL", what);
    if (tape->ran)
        return colo_fail(COLO_ERR_STATE,
                         "%s: backward has run on this tape of %" PRId64
                         " nodes; reset it and record anew",
                         what, tape->nnodes);
    return COLO_OK;
}

static colo_status_t check_room(const colo_tape_t *tape, int64_t more)
{
    if (tape->nvalues + more > INT32_MAX)
        return colo_fail(COLO_ERR_ARG, "tape: %" PRId64 " values, at most %d", tape->nvalues + more,
                         INT32_MAX);
    return COLO_OK;
}

colo_status_t colo_tape_leaf(colo_tape_t *tape, const colo_tensor_t *t, const colo_tensor_t *d_t,
                             colo_value_t *value)
{
    COLO_TRY(check_open(tape, "leaf"));
    COLO_TRY(check_value_tensor(t, "leaf"));
    if (d_t)
        COLO_TRY(check_like(d_t, t, "d_t of a leaf"));
    if (!value)
        return colo_fail(COLO_ERR_ARG, "leaf: value is NULL");
    COLO_TRY(check_room(tape, 1));
    COLO_TRY(
        grow((void **)&tape->values, &tape->cap_values, tape->nvalues, 1, sizeof *tape->values));
    struct value *v = &tape->values[tape->nvalues];
    *v = (struct value){.t = *t, .node = -1};
    if (d_t)
        v->caller = *d_t;
    *value = (colo_value_t)tape->nvalues++;
    return COLO_OK;
}

static colo_status_t check_record(const colo_tape_t *tape, const char *name, const colo_value_t *in,
                                  int32_t nin, const colo_tensor_t *out, int32_t nout,
                                  const colo_value_t *out_values, const colo_tensor_t *saved,
                                  int32_t nsaved, colo_backward_fn backward)
{
    COLO_TRY(check_open(tape, "record"));
    if (!name)
        return colo_fail(COLO_ERR_ARG, "record: name is NULL");
    if (nin < 0 || nout < 1 || nsaved < 0)
        return colo_fail(COLO_ERR_ARG,
                         "record '%s': %d inputs, %d outputs, %d saved tensors, expected >= 0, "
                         ">= 1, >= 0",
                         name, (int)nin, (int)nout, (int)nsaved);
    if ((nin && !in) || !out || !out_values || (nsaved && !saved) || !backward)
        return colo_fail(COLO_ERR_ARG, "record '%s': %s is NULL", name,
                         nin && !in         ? "in"
                         : !out             ? "out"
                         : !out_values      ? "out_values"
                         : nsaved && !saved ? "saved"
                                            : "backward");
    for (int32_t i = 0; i < nin; i++)
        if (in[i] != COLO_NO_VALUE && (in[i] < 0 || in[i] >= tape->nvalues))
            return colo_fail(COLO_ERR_ARG,
                             "record '%s': input %d is value %d, the tape has %" PRId64, name,
                             (int)i, (int)in[i], tape->nvalues);
    for (int32_t i = 0; i < nout; i++) {
        colo_status_t st = check_value_tensor(&out[i], "output");
        if (st < 0)
            return colo_fail_prefix(st, "record '%s': output %d", name, (int)i);
    }
    return check_room(tape, nout);
}

static colo_status_t append_node(colo_tape_t *tape, const char *name, const colo_value_t *in,
                                 int32_t nin, const colo_tensor_t *out, int32_t nout,
                                 const colo_tensor_t *saved, int32_t nsaved,
                                 colo_backward_fn backward)
{
    COLO_TRY(
        grow((void **)&tape->values, &tape->cap_values, tape->nvalues, nout, sizeof *tape->values));
    COLO_TRY(grow((void **)&tape->nodes, &tape->cap_nodes, tape->nnodes, 1, sizeof *tape->nodes));
    struct node n = {
        .nin = nin,
        .nout = nout,
        .nsaved = nsaved,
        .first_out = (int32_t)tape->nvalues,
        .in = calloc((size_t)nin + 1, sizeof *n.in),
        .saved = calloc((size_t)nsaved + 1, sizeof *n.saved),
        .spare = calloc((size_t)nin + 1, sizeof *n.spare),
        .backward = backward,
    };
    if (!n.in || !n.saved || !n.spare) {
        node_free(&n);
        return colo_fail(COLO_ERR_NOMEM, "record '%s': %d inputs, %d saved tensors", name, (int)nin,
                         (int)nsaved);
    }
    size_t len = strlen(name);
    memcpy(n.name, name, len < NAME ? len : NAME - 1);
    for (int32_t i = 0; i < nin; i++)
        n.in[i] = in[i];
    for (int32_t i = 0; i < nsaved; i++)
        n.saved[i] = (struct saved){saved[i].version, saved[i].version ? *saved[i].version : 0};
    for (int32_t i = 0; i < nout; i++)
        tape->values[tape->nvalues + i] =
            (struct value){.t = out[i], .node = (int32_t)tape->nnodes};
    tape->nvalues += nout;
    tape->nodes[tape->nnodes++] = n;
    return COLO_OK;
}

colo_status_t colo_tape_record(colo_tape_t *tape, const char *name, const colo_value_t *in,
                               int32_t nin, const colo_tensor_t *out, int32_t nout,
                               colo_value_t *out_values, const colo_tensor_t *saved, int32_t nsaved,
                               colo_backward_fn backward, void *state, void (*free_state)(void *))
{
    colo_status_t st =
        check_record(tape, name, in, nin, out, nout, out_values, saved, nsaved, backward);
    if (st == COLO_OK)
        st = append_node(tape, name, in, nin, out, nout, saved, nsaved, backward);
    if (st < 0) {
        if (free_state)
            free_state(state);
        return st;
    }
    struct node *n = &tape->nodes[tape->nnodes - 1];
    n->state = state;
    n->free_state = free_state;
    for (int32_t i = 0; i < nout; i++)
        out_values[i] = n->first_out + i;
    return COLO_OK;
}

/* ---- elements ---- */

static size_t bytes_of(const colo_tensor_t *t)
{
    return (size_t)colo_tensor_count(t) * colo_dtype_size(t->dtype);
}

static void add_on_host(void *sum, const void *more, const colo_tensor_t *like)
{
    int64_t n = colo_tensor_count(like);
    float *f = sum;
    double *d = sum;
    uint16_t *h = sum;
    for (int64_t i = 0; i < n; i++)
        switch (like->dtype) {
        case COLO_F64:
            d[i] += ((const double *)more)[i];
            break;
        case COLO_BF16:
            h[i] = colo_f32_to_bf16(colo_bf16_to_f32(h[i]) +
                                    colo_bf16_to_f32(((const uint16_t *)more)[i]));
            break;
        case COLO_F16:
            h[i] = colo_f32_to_f16(colo_f16_to_f32(h[i]) +
                                   colo_f16_to_f32(((const uint16_t *)more)[i]));
            break;
        default:
            f[i] += ((const float *)more)[i];
        }
}

/* A contiguous gradient on a device is one long box. */
static colo_box_t line(void *data, const colo_tensor_t *like)
{
    return (colo_box_t){data, {1, 1, colo_tensor_count(like)}, {0, 0, 1}};
}

static colo_status_t add_to(const colo_tape_t *tape, void *sum, const void *more,
                            const colo_tensor_t *like)
{
    const colo_ops_t *ops;
    if (like->mem == COLO_HOST) {
        add_on_host(sum, more, like);
        return COLO_OK;
    }
    COLO_TRY(colo_ops_for(like->mem, &ops));
    colo_box_t to = line(sum, like), addends[] = {to, line((void *)more, like)};
    return ops->box_sum(&to, addends, 2, like->dtype, tape->stream);
}

static colo_status_t copy_to(const colo_tape_t *tape, void *to, const void *from,
                             const colo_tensor_t *like)
{
    const colo_ops_t *ops;
    COLO_TRY(colo_ops_for(like->mem, &ops));
    colo_box_t dst = line(to, like), src = line((void *)from, like);
    return ops->box_copy(&dst, &src, colo_dtype_size(like->dtype), tape->stream);
}

static void fill_ones(void *data, const colo_tensor_t *like)
{
    int64_t n = colo_tensor_count(like);
    for (int64_t i = 0; i < n; i++)
        switch (like->dtype) {
        case COLO_F64:
            ((double *)data)[i] = 1;
            break;
        case COLO_BF16:
            ((uint16_t *)data)[i] = colo_f32_to_bf16(1);
            break;
        case COLO_F16:
            ((uint16_t *)data)[i] = colo_f32_to_f16(1);
            break;
        default:
            ((float *)data)[i] = 1;
        }
}

/* A value's gradient as a contiguous view of @data. */
static colo_tensor_t grad_view(const struct value *v, void *data)
{
    colo_tensor_t g = colo_tensor_host(data, v->t.dtype, v->t.ndim, v->t.shape);
    g.mem = v->t.mem;
    g.device = v->t.device;
    return g;
}

/* ---- backward ---- */

static bool is_wanted(const colo_tape_t *tape, const struct node *n)
{
    for (int32_t i = 0; i < n->nout; i++)
        if (tape->values[n->first_out + i].wanted)
            return true;
    return false;
}

static void mark(colo_tape_t *tape, colo_value_t from)
{
    for (int64_t i = 0; i < tape->nvalues; i++)
        tape->values[i].wanted = false;
    tape->values[from].wanted = true;
    for (int64_t k = tape->nnodes; k-- > 0;) {
        const struct node *n = &tape->nodes[k];
        if (!is_wanted(tape, n))
            continue;
        for (int32_t i = 0; i < n->nin; i++)
            if (n->in[i] != COLO_NO_VALUE)
                tape->values[n->in[i]].wanted = true;
    }
}

static colo_status_t check_versions(const colo_tape_t *tape)
{
    for (int64_t k = 0; k < tape->nnodes; k++) {
        const struct node *n = &tape->nodes[k];
        if (!is_wanted(tape, n))
            continue;
        for (int32_t i = 0; i < n->nsaved; i++)
            if (n->saved[i].version && *n->saved[i].version != n->saved[i].at)
                return colo_fail(COLO_ERR_MODIFIED,
                                 "node %" PRId64 " '%s': saved tensor %d was written after it was "
                                 "saved: version %" PRIu64 ", saved at %" PRIu64,
                                 k, n->name, (int)i, *n->saved[i].version, n->saved[i].at);
    }
    return COLO_OK;
}

/* Every wanted value, and every output of a node that will run, gets its buffer. */
static colo_status_t make_buffers(colo_tape_t *tape)
{
    for (int64_t i = 0; i < tape->nvalues; i++) {
        struct value *v = &tape->values[i];
        bool runs = v->node >= 0 && is_wanted(tape, &tape->nodes[v->node]);
        if (!v->grad && (v->wanted || runs))
            COLO_TRY(take(tape, v->t.mem, bytes_of(&v->t), &v->grad));
    }
    return COLO_OK;
}

/* Where input @i of @n is to be written: its value's own buffer when nothing is there yet. */
static colo_status_t place(colo_tape_t *tape, struct node *n, int32_t i, colo_tensor_t *d_in)
{
    n->spare[i] = NULL;
    *d_in = (colo_tensor_t){.device = -1};
    if (n->in[i] == COLO_NO_VALUE)
        return COLO_OK;
    struct value *v = &tape->values[n->in[i]];
    void *data = v->grad;
    if (v->reached) {
        COLO_TRY(take(tape, v->t.mem, bytes_of(&v->t), &n->spare[i]));
        data = n->spare[i];
    }
    v->reached = true;
    *d_in = grad_view(v, data);
    return COLO_OK;
}

static colo_status_t run_node(colo_tape_t *tape, int64_t k)
{
    struct node *n = &tape->nodes[k];
    COLO_AUTOFREE void *views = calloc((size_t)n->nin + (size_t)n->nout, sizeof(colo_tensor_t));
    if (!views)
        return colo_fail(COLO_ERR_NOMEM, "node %" PRId64 " '%s': %d views", k, n->name,
                         (int)(n->nin + n->nout));
    colo_tensor_t *d_out = views, *d_in = d_out + n->nout;
    for (int32_t i = 0; i < n->nout; i++) {
        struct value *v = &tape->values[n->first_out + i];
        if (!v->reached)
            COLO_TRY(colo_mem_zero(v->t.mem, v->grad, bytes_of(&v->t), tape->stream));
        d_out[i] = grad_view(v, v->grad);
    }
    for (int32_t i = 0; i < n->nin; i++)
        COLO_TRY(place(tape, n, i, &d_in[i]));
    colo_status_t st = n->backward(d_out, n->nout, d_in, n->nin, n->state);
    if (st < 0)
        return colo_fail_prefix(st, "node %" PRId64 " '%s'", k, n->name);
    for (int32_t i = 0; i < n->nin; i++)
        if (n->spare[i]) {
            const struct value *v = &tape->values[n->in[i]];
            COLO_TRY(add_to(tape, v->grad, n->spare[i], &v->t));
            give(tape, n->spare[i]);
        }
    return COLO_OK;
}

colo_status_t colo_tape_backward(colo_tape_t *tape, colo_value_t value, const colo_tensor_t *seed)
{
    COLO_TRY(check_open(tape, "backward"));
    if (value < 0 || value >= tape->nvalues)
        return colo_fail(COLO_ERR_ARG, "backward: value %d, the tape has %" PRId64, (int)value,
                         tape->nvalues);
    struct value *from = &tape->values[value];
    if (seed)
        COLO_TRY(check_like(seed, &from->t, "seed"));
    else if (from->t.mem != COLO_HOST)
        return colo_fail(COLO_ERR_ARG,
                         "backward: seed is NULL, which stands for ones on the host; "
                         "value %d is in CUDA memory and needs one",
                         (int)value);
    mark(tape, value);
    COLO_TRY(check_versions(tape));
    COLO_TRY(make_buffers(tape));

    tape->ran = true; /* from here on nodes may have used up what they saved */
    if (seed && bytes_of(&from->t))
        COLO_TRY(copy_to(tape, from->grad, seed->data, &from->t));
    if (!seed)
        fill_ones(from->grad, &from->t);
    from->reached = true;
    for (int64_t k = tape->nnodes; k-- > 0;)
        if (is_wanted(tape, &tape->nodes[k])) {
            colo_status_t st = run_node(tape, k);
            if (st < 0) {
                for (int64_t i = 0; i < tape->nvalues; i++)
                    tape->values[i].reached = false;
                return st;
            }
        }
    for (int64_t i = 0; i < tape->nvalues; i++) {
        struct value *v = &tape->values[i];
        if (v->reached && v->caller.data)
            COLO_TRY(add_to(tape, v->caller.data, v->grad, &v->t));
    }
    return COLO_OK;
}

colo_status_t colo_tape_gradient(const colo_tape_t *tape, colo_value_t value,
                                 colo_tensor_t *d_value)
{
    if (!tape)
        return colo_fail(COLO_ERR_ARG, "gradient: tape is NULL");
    if (value < 0 || value >= tape->nvalues)
        return colo_fail(COLO_ERR_ARG, "gradient: value %d, the tape has %" PRId64, (int)value,
                         tape->nvalues);
    if (!d_value)
        return colo_fail(COLO_ERR_ARG, "gradient: d_value is NULL");
    const struct value *v = &tape->values[value];
    if (!v->reached)
        return colo_fail(COLO_ERR_MISSING, "gradient: none reached value %d%s", (int)value,
                         tape->ran ? "" : "; backward has not run");
    *d_value = v->caller.data ? v->caller : grad_view(v, v->grad);
    return COLO_OK;
}
