/* SPDX-License-Identifier: Apache-2.0 */
/*
 * record.c - what bridges do in seeded cases, as hashes: a line for each case, with one number for
 * each recorder. tools/same-program.sh runs this program on two builds of the library and compares.
 *
 * It knows the public interface, what lies below the bridge (comm.h, direct.h, device.h), and
 * adapt.h: nothing of the inside of src/bridge, so that it can judge another inside.
 *
 *   record FIRST END SEED        cases FIRST to END - 1
 *   record --text CASE SEED      the records of one case, as text
 */
#include "record.h"

#include "adapt.h"
#include "core/error.h"
#include "core/hash.h"
#include "harness/bridge_random.h"
#include "harness/harness.h"
#include "harness/ragged_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef COLO_PLAN_BYTES_INIT /* a commit whose library returns them by value */
#define t_plan_bytes colo_plan_bytes
#define t_plan_node_bytes colo_plan_node_bytes
#endif

/* ---- what reaches the comm ---- */

static void say_messages(const char *name, const colo_message_t *m, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        say(EXCHANGES, "  %s rank %d: %d boxes", name, m[i].peer, m[i].nboxes);
        for (int32_t k = 0; k < m[i].nboxes; k++)
            say(EXCHANGES, "    %s", box_name(&m[i].boxes[k]).text);
    }
}

static void guard_exchange(const colo_exchange_t *x, bool is_part, colo_stream_t stream)
{
    say(EXCHANGES, "exchange %x of %s%s, stage %s of %zu, stream %d", (uint32_t)x->op.param,
        colo_dtype_name(x->op.dtype), x->subconnection ? " over a subconnection" : "",
        place_name(x->stage).text, x->stage_bytes, stream != NULL);
    if (is_part)
        say(EXCHANGES, "  part of more: %d peers, %ld bytes sent, %ld received", x->more_peers,
            x->more_sent, x->more_received);
    say_messages("to", x->send, x->nsends);
    say_messages("from", x->recv, x->nrecvs);
}

static void guard_collective(const char *name, const void *send, const void *recv, int64_t count,
                             colo_dtype_t dtype)
{
    say(EXCHANGES, "%s of %ld %s, %s to %s", name, count, colo_dtype_name(dtype),
        place_name(send).text, place_name(recv).text);
}

/* ---- a case ---- */

typedef enum kind { UNIFORM, COLLECTIVE, RAGGED } kind_t;
typedef struct job {
    int64_t number;
    kind_t kind;
    int64_t src_table[T_RANDOM_TABLE], dst_table[T_RANDOM_TABLE];
    t_case_t c;
    t_ragged_t r;
    int32_t world, check;
    bool gpu, one_level, reshapes;
    reach_t reach;
    colo_transport_t transport;
    bool registered[4]; /* by role */
    int32_t tensors;    /* of a call */
    int64_t gap, max_rows, ranks_per_node;
    int32_t faulty; /* a rank whose tensor is refused; -1: none */
    int fault;
    char nodes[64];
} job_t;

/* Context ranks of the destination that hold addends, more of them than luck gives. */
static void make_partial(job_t *j, uint64_t *r)
{
    static const colo_dtype_t floats[] = {COLO_F32, COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    const int64_t cp = 2 + t_below(r, 3), tp = 1 + t_below(r, 2), dp = 1 + t_below(r, 2);
    t_case_t *c = &j->c;
    c->src =
        t_side_ordered((int)t_below(r, T_ORDERS), 1 + t_below(r, 2), 1, 1 + t_below(r, 4), true);
    c->dst = t_side_ordered((int)t_below(r, T_ORDERS), tp, cp, dp, false);
    c->shape = (ref_shape_t){1 + t_below(r, 5), 2 * cp * (1 + t_below(r, 2)), 1 + t_below(r, 3)};
    c->output = COLO_OUTPUT_FULL_SEQ;
    c->grad = COLO_GRAD_PARTIAL;
    c->dtype = floats[t_below(r, 5)];
    c->world = 0;
}

/* Grids of as many ranks, as COLLECTIVE wants them. */
static void make_collective(job_t *j, uint64_t *r)
{
    const int cp = 1 + (int)t_below(r, 3), scale = 1 + (int)t_below(r, 2),
              dp = 1 + (int)t_below(r, 2);
    char src[64], dst[64];
    if (t_chance(r, 50)) {
        snprintf(src, sizeof src, "tp=%d,dp=%d", cp, dp * scale);
        snprintf(dst, sizeof dst, "tp=%d,cp=%d,dp=%d", scale, cp, dp);
    } else {
        snprintf(src, sizeof src, "tp=%d,dp=%d", cp * scale, dp);
        snprintf(dst, sizeof dst, "tp=1,cp=%d,dp=%d", cp, dp * scale);
    }
    j->c = t_collective(src, dst, 4 * (1 + t_below(r, 2)), 2 * cp * (1 + t_below(r, 2)),
                        1 + t_below(r, 3));
    t_case_kind(&j->c, (int)t_below(r, T_KINDS));
    j->c.dtype = t_chance(r, 50) ? COLO_F32 : COLO_BF16;
}

/* Some ranks share a node, in any order. */
static void make_nodes(job_t *j, uint64_t *r)
{
    const int64_t nodes = 2 + t_below(r, 2);
    const bool mixed = t_chance(r, 25);
    for (int32_t k = 0; k < j->world; k++) {
        j->nodes[2 * k] = (char)('a' + (mixed ? t_below(r, nodes) : k * nodes / j->world));
        j->nodes[2 * k + 1] = k + 1 < j->world ? ',' : '\0';
    }
}

static void make_job(job_t *j, int64_t number, uint64_t seed)
{
    uint64_t state = seed * 1000003 + (uint64_t)number, *r = &state;
    t_shares_t shares = {0};
    const int kind = (int)t_below(r, 100);
    const int64_t most = t_chance(r, 10) ? 16 : 6 + t_below(r, 4);
    memset(j, 0, sizeof *j);
    j->number = number;
    j->kind = kind < 5 ? COLLECTIVE : kind < 55 ? UNIFORM : RAGGED;
    j->gpu = j->kind != COLLECTIVE && t_chance(r, 50);
    j->check = t_chance(r, 20) ? 2 : 1;
    if (j->kind == RAGGED) {
        t_ragged_random(&j->r, t_rand(r), most < 12 ? most : 12);
        j->world = j->r.world;
        j->tensors = 1 + (int32_t)t_below(r, T_RAGGED_FEW);
        j->max_rows = t_chance(r, 25) ? 10000 : 0;
    } else {
        if (j->kind == COLLECTIVE)
            make_collective(j, r);
        else
            j->c = t_random_case(t_rand(r), most, j->src_table, j->dst_table, &shares);
        if (j->kind == UNIFORM && t_chance(r, 30))
            make_partial(j, r);
        j->world = t_case_world(&j->c);
        j->tensors = 1;
        j->c.no_grad = t_chance(r, 4);
    }
    j->gap = t_below(r, 3);
    j->one_level = t_chance(r, 10);
    j->reshapes = t_chance(r, 15);
    j->ranks_per_node = t_chance(r, 25) ? 1 + t_below(r, 4) : 0;
    if (t_chance(r, j->c.grad == COLO_GRAD_PARTIAL ? 60 : 40))
        make_nodes(j, r);
    j->transport = t_chance(r, 15) ? COLO_TRANSPORT_PEER : COLO_TRANSPORT_AUTO;
    if (t_chance(r, 20))
        j->transport = COLO_TRANSPORT_NCCL;
    j->reach = (reach_t)(t_chance(r, 50) ? REACH_ALL : t_below(r, 4));
    /* an error of one rank at COLO_CHECK=1 ends the others' waits when it happens to arrive */
    const bool all = t_chance(r, 60) || (j->transport == COLO_TRANSPORT_PEER && j->check < 2);
    for (int i = 0; i < 4; i++)
        j->registered[i] = all || t_chance(r, 50);
    j->faulty = j->check == 2 && t_chance(r, 25) ? (int32_t)t_below(r, j->world) : -1;
    j->fault = (int)t_below(r, 4);
}

static void print_job(const job_t *j)
{
    static const char *const kinds[] = {"uniform", "collective", "ragged"};
    static const char *const transports[] = {"auto", "nccl", "peer"};
    static const char *const reaches[] = {"all", "of threes", "some pairs", "none"};
    printf("%s, %s, %d ranks, check %d, nodes %s, %d ranks a node%s%s%s", kinds[j->kind],
           j->gpu ? "as on GPUs" : "host", (int)j->world, (int)j->check,
           j->nodes[0] ? j->nodes : "one", (int)j->ranks_per_node,
           j->one_level ? ", one level" : "", j->reshapes ? ", reshaped" : "",
           j->faulty >= 0 ? ", one tensor refused" : "");
    if (j->gpu)
        printf(", transport %s, ranks that reach each other: %s, registered %d%d%d%d",
               transports[j->transport], reaches[j->reach], j->registered[T_X], j->registered[T_Y],
               j->registered[T_DY], j->registered[T_DX]);
    printf("; %s", j->kind == RAGGED ? t_ragged_text(&j->r) : t_case_text(&j->c));
    if (j->kind == RAGGED)
        printf(" %d tensors, gap %d", (int)j->tensors, (int)j->gap);
    printf("\n");
}

/* ---- plans ---- */

static void say_region(const char *name, const colo_region_t *r)
{
    say(PLAN, "  %s samples %ld..%ld, rows %ld..%ld, features %ld..%ld, addend %d", name, r->b[0],
        r->b[1], r->s[0], r->s[1], r->h[0], r->h[1], r->addend);
}

static void say_plan(const colo_plan_t *plan)
{
    static const char *const passes[] = {"forward", "backward"};
    int64_t rows[2], n;
    int32_t count;
    colo_plan_rows(plan, &rows[0], &rows[1]);
    say(PLAN, "plan %lx of rank %ld: %ld rows, %ld rows, %ld addends, %s, scale %ld",
        colo_plan_hash(plan), colo_plan_rank(plan), rows[0], rows[1], colo_plan_addends(plan),
        colo_direction_name(colo_plan_direction(plan)), colo_plan_scale(plan));
    for (int pass = 0; pass < 2; pass++) {
        const colo_plan_bytes_t b = t_plan_bytes(plan, (colo_pass_t)pass);
        const colo_plan_node_bytes_t nb = t_plan_node_bytes(plan, (colo_pass_t)pass);
        say(PLAN,
            "%s: %ld bytes received, %ld sent, %ld local, minimum %ld, collective %ld, node %ld "
            "%ld",
            passes[pass], b.recv, b.send, b.local, b.minimum, b.collective_recv, nb.in, nb.minimum);
        for (int k = 0; k < 2 * GUARD_EXCHANGES; k++) {
            const colo_plan_message_t *m =
                guard_messages(plan, (colo_pass_t)pass, k / 2, k % 2 == 0, &count);
            for (int32_t i = 0; i < count; i++) {
                say(PLAN, " %s, exchange %d, %s rank %ld: %ld bytes", passes[pass], k / 2,
                    k % 2 ? "from" : "to", m[i].peer, m[i].bytes);
                for (int64_t q = 0; q < m[i].nregions; q++)
                    say_region("", &m[i].regions[q]);
            }
        }
        const colo_region_t *local = colo_plan_locals(plan, (colo_pass_t)pass, &n);
        for (int64_t i = 0; i < n; i++)
            say_region("stays", &local[i]);
    }
}

/* ---- tensors ---- */

/* The same code gives the same bits, 0 gives 0, and sums depend on their order. */
static void encode(colo_dtype_t dtype, const double *code, void *out)
{
    uint64_t v, h = 0;
    memcpy(&v, code, sizeof v);
    if (v)
        h = t_rand(&v);
    const uint64_t sign = h >> 63, power = h >> 32 & 0xff;
    switch (dtype) {
    case COLO_F64:
        h = !h ? 0 : sign << 63 | (1013 + power % 20) << 52 | (h & 0xfffffffff) << 16;
        break;
    case COLO_F32:
        h = !h ? 0 : sign << 31 | (119 + power % 16) << 23 | (h & 0x7fffff);
        break;
    case COLO_BF16:
        h = !h ? 0 : sign << 15 | (119 + power % 16) << 7 | (h & 0x7f);
        break;
    case COLO_F16:
        h = !h ? 0 : sign << 15 | (10 + power % 10) << 10 | (h & 0x3ff);
        break;
    default:
        break;
    }
    memcpy(out, &h, colo_dtype_size(dtype));
}

/* @code: of each element in order, tight; NULL: leaves it as it is. */
static void fill(const colo_tensor_t *t, const double *code)
{
    const int64_t n = colo_tensor_count(t);
    for (int64_t i = 0; code && i < n; i++) {
        int64_t rest = i, at = 0;
        for (int32_t axis = t->ndim; axis-- > 0; rest /= t->shape[axis])
            at += rest % t->shape[axis] * t->stride[axis];
        encode(t->dtype, &code[i], (char *)t->data + at * (int64_t)colo_dtype_size(t->dtype));
    }
}

/* What calls of this rank have; memory is known to the records while it is here. */
typedef struct tensors {
    t_buffer_t buffer[2][T_RAGGED_FEW]; /* in, out */
    colo_tensor_t tensor[2][T_RAGGED_FEW];
    int32_t n;
} tensors_t;

static const char *const names[4][T_RAGGED_FEW] = {
    {"x0", "x1", "x2"}, {"y0", "y1", "y2"}, {"dy0", "dy1", "dy2"}, {"dx0", "dx1", "dx2"}};

static void tensors_drop(tensors_t *t)
{
    for (int i = 0; i < 2 * t->n; i++) {
        memory_forget(t->buffer[i % 2][i / 2].raw);
        t_buffer_free(&t->buffer[i % 2][i / 2]);
    }
    memset(t, 0, sizeof *t);
}

static colo_status_t uniform_tensor(const job_t *j, t_role_t role, int64_t rank, int64_t salt,
                                    t_buffer_t *b)
{
    const bool in = role == T_X || role == T_DY;
    t_case_t codes = j->c;
    T_ENDS(t_buffer_free) t_buffer_t code = {0};
    codes.dtype = COLO_F64;
    codes.stride = T_TIGHT;
    rank_try(t_case_tensor(&j->c, role, rank, salt, false, b));
    rank_try(t_case_tensor(&codes, role, rank, salt, true, &code));
    fill(&b->t, in ? code.t.data : NULL);
    return COLO_OK;
}

static colo_status_t ragged_tensor(const job_t *j, t_role_t role, int64_t rank, int32_t i,
                                   t_buffer_t *b)
{
    static const ref_role_t roles[] = {REF_X, REF_Y, REF_DY, REF_DX};
    const bool in = role == T_X || role == T_DY;
    ref_ragged_t c = j->r.c;
    int64_t rows, features;
    c.h *= 1 + i;
    ref_ragged_tensor(&c, roles[role], rank, "f64", i, NULL, &rows, &features);
    double *code = calloc((size_t)(rows * features) + 1, sizeof *code);
    if (!code)
        abort();
    ref_ragged_tensor(&c, roles[role], rank, "f64", i, code, &rows, &features);
    const t_stride_t stride = j->gap == 0 ? T_TIGHT : j->gap == 1 ? T_PADDED : T_SPREAD;
    colo_status_t st = t_buffer_make(b, "th", t_ragged_dtype(&j->r, i), stride, rows, 1, features);
    if (st == COLO_OK)
        fill(&b->t, in ? code : NULL);
    free(code);
    return st;
}

/* Makes a tensor smaller: a larger one would reach into what lies behind it, which is luck. */
static void damage(const job_t *j, int32_t rank, tensors_t *t)
{
    colo_tensor_t *x = &t->tensor[j->fault % 2][0];
    if (rank != j->faulty || t->n == 0)
        return;
    if (j->fault < 2 && x->dtype != COLO_I8)
        x->dtype = COLO_I8;
    else if (x->shape[0] > 0)
        x->shape[0]--;
}

static colo_status_t tensors_make(const job_t *j, bool backward, int64_t rank, int64_t salt,
                                  tensors_t *t)
{
    const bool sums = backward && j->kind == RAGGED && j->r.c.full && j->r.c.partial;
    memset(t, 0, sizeof *t);
    for (int32_t i = 0; i < j->tensors; i++) {
        if (sums && !colo_dtype_is_float(t_ragged_dtype(&j->r, i)))
            continue; /* has no gradient */
        for (int out = 0; out < 2; out++) {
            const t_role_t role = backward ? (out ? T_DX : T_DY) : out ? T_Y : T_X;
            t_buffer_t *b = &t->buffer[out][t->n];
            rank_try(j->kind == RAGGED ? ragged_tensor(j, role, rank, i, b)
                                       : uniform_tensor(j, role, rank, salt, b));
            b->t.mem = j->gpu ? COLO_MEM_CUDA : COLO_MEM_HOST;
            t->tensor[out][t->n] = b->t;
            memory_is(b->raw, b->bytes, names[role][i], j->registered[role]);
        }
        t->n++;
    }
    return COLO_OK;
}

/* ---- calls ---- */

/* What a call has said, but for addresses; false: it was an error, which all ranks have. */
static bool said(const char *call, colo_status_t st)
{
    char text[1024];
    size_t n = 0;
    for (const char *c = st < 0 ? colo_last_error() : ""; *c && n + 1 < sizeof text; n++) {
        text[n] = *c++;
        if (text[n] == 'x' && n > 0 && text[n - 1] == '0')
            c += strspn(c, "0123456789abcdef");
    }
    text[n] = '\0';
    say(STATUS, "%s: %s %s", call, colo_status_name(st), text);
    return st == COLO_OK;
}

static bool call(const job_t *j, colo_bridge_t *bridge, colo_batch_t *batch, int64_t rank,
                 bool backward, int64_t salt)
{
    tensors_t t;
    colo_status_t st = tensors_make(j, backward, rank, salt, &t);
    if (st < 0)
        return said("tensors", st);
    damage(j, (int32_t)rank, &t);
    const colo_tensor_t *in = t.tensor[0], *out = t.tensor[1];
    /* what holds nothing may be NULL or an empty view: take turns */
    if ((j->number + salt) % 2 && colo_tensor_count(in) == 0)
        in = NULL;
    if ((j->number + salt) % 2 && colo_tensor_count(out) == 0)
        out = NULL;
    st = batch ? (backward ? colo_batch_backward(batch, in, out, t.n, NULL)
                           : colo_batch_forward(batch, in, out, t.n, NULL))
               : (backward ? colo_bridge_backward(bridge, in, out, NULL)
                           : colo_bridge_forward(bridge, in, out, NULL));
    const bool ok = said(backward ? "backward" : "forward", st);
    for (int32_t i = 0; i < 2 * t.n; i++) {
        const t_buffer_t *b = &t.buffer[i % 2][i / 2];
        say(OUTPUTS, "%s %s %d: %lx", backward ? "backward" : "forward", i % 2 ? "out" : "in",
            i / 2, colo_hash_bytes(COLO_HASH_INIT, b->raw, b->bytes));
    }
    tensors_drop(&t);
    return ok;
}

static bool both_ways(const job_t *j, colo_bridge_t *bridge, colo_batch_t *batch, int64_t rank,
                      int64_t salt)
{
    if (!call(j, bridge, batch, rank, false, salt))
        return false;
    return j->c.no_grad || call(j, bridge, batch, rank, true, salt);
}

static bool create(const job_t *j, colo_comm_t *comm, colo_bridge_t **bridge)
{
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    if (!said("config", j->kind == RAGGED ? t_ragged_config(&j->r, &src, &dst, &config)
                                          : t_case_config(&j->c, &src, &dst, &config)))
        return false;
    config.mem = j->gpu ? COLO_MEM_CUDA : COLO_MEM_HOST;
    config.transport = j->transport;
    config.one_level = j->one_level;
    config.ranks_per_node = j->ranks_per_node;
    config.max_rows = j->max_rows;
    return said("create", colo_bridge_create(bridge, &config, comm));
}

static void uniform(const job_t *j, colo_comm_t *comm, int64_t rank)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    bool go = create(j, comm, &bridge);
    if (go)
        say_plan(colo_bridge_plan(bridge));
    for (int64_t salt = 0; go && salt < (j->c.steps ? j->c.steps : 1); salt++)
        go = both_ways(j, bridge, NULL, rank, salt);
    if (go && j->reshapes) {
        job_t other = *j;
        other.c.shape.b += j->kind == COLLECTIVE ? j->c.shape.b : 1;
        const colo_shape_t shape = {other.c.shape.b, other.c.shape.n, other.c.shape.h, 0};
        go = said("reshape", colo_bridge_reshape(bridge, &shape));
        if (go)
            say_plan(colo_bridge_plan(bridge));
        if (go)
            both_ways(&other, bridge, NULL, rank, 3);
    }
    say(STATUS, "workspace of %zu", colo_bridge_workspace_size(bridge));
}

static void ragged(const job_t *j, colo_comm_t *comm, int64_t rank)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    const colo_segments_t segments = t_ragged_segments(&j->r);
    const bool go = create(j, comm, &bridge) &&
                    said("segments", colo_bridge_set_segments(bridge, &segments, &batch));
    if (go) {
        colo_run_t run[256];
        int64_t rows[2];
        colo_bridge_rows(bridge, &rows[0], &rows[1]);
        say_plan(colo_batch_plan(batch));
        const int64_t n = colo_batch_runs(batch, run, 256);
        say(PLAN, "%ld rows, %ld rows, %ld runs", rows[0], rows[1], n);
        for (int64_t i = 0; i < n && i < 256; i++)
            say(PLAN, "  rows %ld from %ld, at %ld", run[i].count, run[i].row, run[i].local);
        both_ways(j, bridge, batch, rank, 0);
    }
    say(STATUS, "workspace of %zu", colo_bridge_workspace_size(bridge));
}

static colo_status_t on_rank(colo_comm_t *comm, void *arg)
{
    const job_t *j = arg;
    const int32_t rank = colo_comm_rank(comm);
    log_of_rank(rank);
    rank_try(colo_comm_set_check(comm, j->check));
    if (j->gpu)
        rank_try(peers_join(comm));
    if (j->kind == RAGGED)
        ragged(j, comm, rank);
    else
        uniform(j, comm, rank);
    peers_leave(comm);
    log_of_rank(-1);
    return COLO_OK;
}

static colo_status_t run_case(int64_t number, uint64_t seed, bool text)
{
    static job_t j;
    make_job(&j, number, seed);
    if (text)
        print_job(&j);
    fflush(stdout);
    log_reset(text);
    peers_init(j.reach, seed + (uint64_t)number);
    setenv("COLO_NODE", j.nodes, 1);
    const colo_status_t st = colo_comm_threads_run(j.world, on_rank, &j);
    if (text) {
        log_print();
    } else {
        printf("%lld", (long long)number);
        for (int k = 0; k < RECORDERS; k++)
            printf(" %016llx", (unsigned long long)log_hash((recorder_t)k));
        printf("\n");
    }
    if (st < 0)
        fprintf(stderr, "case %lld: %s\n", (long long)number, colo_last_error());
    if (j.kind == RAGGED)
        t_ragged_free(&j.r);
    return st;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: record FIRST END SEED | record --text CASE SEED\n");
        return 2;
    }
    const bool text = strcmp(argv[1], "--text") == 0;
    const int64_t first = strtoll(argv[text ? 2 : 1], NULL, 10);
    const int64_t end = text ? first + 1 : strtoll(argv[2], NULL, 10);
    bool ok = true;
    unsetenv("COLO_TRANSPORT");
    unsetenv("COLO_CHECK");
    device_init();
    for (int64_t i = first; i < end; i++)
        ok = run_case(i, strtoull(argv[3], NULL, 10), text) == COLO_OK && ok;
    return ok ? 0 : 1;
}
