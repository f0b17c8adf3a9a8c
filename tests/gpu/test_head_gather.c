/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_head_gather.c - a head that is sharded over all ranks, gathered into registered memory: with
 * late ranks and memory in use again at once, captured and replayed, and what is refused.
 *
 * An element of the head is (step, row, column) in 32 bits of an f32 head's word, so a part that
 * comes from another place, another rank or another step is told apart.
 */
#include "gpu/gpu_ranks.h"

#include "core/error.h"

#include <unistd.h>

enum { ROWS = 61, HIDDEN = 37, AT = 512, DEEP = 6 };

static uint32_t word(int64_t step, int64_t row, int64_t column)
{
    return (uint32_t)(step << 16 | row << 8 | column); /* a finite float */
}

/* A head, its shard, and registered memory at whose byte AT it is gathered. The shard's rows are
 * @step elements apart; they may lie in their place of that memory. */
struct stand {
    colo_lm_head_t *head;
    colo_memory_t *memory;
    int64_t first, rows, pitch, step;
    size_t bytes;
    uint32_t *weight, *own, *bias, *kept[DEEP], *from[DEEP]; /* device; from: weight, then bias */
    uint32_t *host;
};

static colo_status_t bind_at(t_gpu_rank_t *r, struct stand *s, void *gathered)
{
    colo_tensor_t w =
        colo_tensor_cuda(s->weight, COLO_F32, r->device, 2, (int64_t[]){s->rows, HIDDEN});
    w.stride[0] = s->step;
    colo_tensor_t b = colo_tensor_cuda(s->bias, COLO_F32, r->device, 1, (int64_t[]){s->rows});
    return colo_lm_head_bind(s->head, &w, &b, gathered);
}

static colo_status_t stand_up(t_gpu_rank_t *r, bool registered, struct stand *s)
{
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = ROWS,
                                    .hidden = HIDDEN,         .dtype = COLO_F32,
                                    .mem = COLO_MEM_CUDA,     .has_bias = true};
    *s = (struct stand){.memory = NULL};
    config.device = r->device;
    rank_try(colo_lm_head_create(&s->head, &config, r->gpus));
    colo_lm_head_rows(s->head, &s->first, &s->rows);
    s->bytes = colo_lm_head_gathered_size(s->head);
    if (registered) {
        rank_try(colo_memory_alloc(r->gpus, AT + 2 * s->bytes, &s->memory));
        rank_check(colo_memory_is_p2p(s->memory));
    }
    const size_t shard = (size_t)(s->rows + 1) * (HIDDEN + 1) * sizeof(uint32_t);
    rank_cuda(cudaMalloc((void **)&s->own, shard));
    s->weight = s->own;
    s->step = HIDDEN;
    rank_cuda(cudaMalloc((void **)&s->bias, shard));
    for (int i = 0; i < DEEP; i++) {
        rank_cuda(cudaMalloc((void **)&s->kept[i], s->bytes));
        rank_cuda(cudaMalloc((void **)&s->from[i], shard));
    }
    s->host = malloc(s->bytes > shard ? s->bytes : shard);
    rank_check(s->host);
    return registered ? bind_at(r, s, (char *)colo_memory_data(s->memory) + AT) : COLO_OK;
}

static colo_status_t lie_down(t_gpu_rank_t *r, struct stand *s)
{
    rank_try(t_gpu_quiet(r));
    colo_lm_head_destroy(&s->head);
    colo_memory_destroy(&s->memory);
    cudaFree(s->own);
    cudaFree(s->bias);
    for (int i = 0; i < DEEP; i++) {
        cudaFree(s->kept[i]);
        cudaFree(s->from[i]);
    }
    free(s->host);
    return colo_comm_barrier(r->host, NULL);
}

/* The shard of @step, on the device. */
static colo_status_t shard_of(struct stand *s, int64_t step, uint32_t *to)
{
    uint32_t *p = s->host;
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t k = 0; k < HIDDEN; k++)
            *p++ = word(step, s->first + row, k);
    for (int64_t row = 0; row < s->rows; row++)
        *p++ = word(step, s->first + row, HIDDEN);
    rank_cuda(t_to_device(to, s->host, (size_t)(s->rows * (HIDDEN + 1)) * sizeof *to));
    return COLO_OK;
}

static colo_status_t use_shard(t_gpu_rank_t *r, struct stand *s, const uint32_t *from)
{
    const size_t width = HIDDEN * sizeof *from;
    if (s->rows > 0)
        rank_cuda(cudaMemcpy2DAsync(s->weight, (size_t)s->step * sizeof *from, from, width, width,
                                    (size_t)s->rows, cudaMemcpyDeviceToDevice, r->stream));
    rank_cuda(cudaMemcpyAsync(s->bias, from + s->rows * HIDDEN, (size_t)s->rows * sizeof *from,
                              cudaMemcpyDeviceToDevice, r->stream));
    return COLO_OK;
}

static colo_status_t gather(t_gpu_rank_t *r, struct stand *s, uint32_t *kept)
{
    colo_tensor_t w, b;
    rank_try(colo_lm_head_acquire(s->head, r->stream, &w, &b));
    rank_check(w.shape[0] == ROWS && b.shape[0] == ROWS && w.stride[0] == b.stride[0]);
    rank_check((uint32_t *)b.data == (uint32_t *)w.data + HIDDEN);
    s->pitch = w.stride[0];
    rank_cuda(cudaMemcpyAsync(kept, w.data, s->bytes, cudaMemcpyDeviceToDevice, r->stream));
    return colo_lm_head_release(s->head, r->stream);
}

static colo_status_t compare(t_gpu_rank_t *r, struct stand *s, const uint32_t *kept, int64_t step)
{
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_cuda(cudaMemcpy(s->host, kept, s->bytes, cudaMemcpyDeviceToHost));
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t k = 0; k <= HIDDEN; k++)
            if (s->host[row * s->pitch + k] != word(step, row, k))
                return colo_fail(COLO_ERR_STATE,
                                 "step %d: row %d, column %d is %08x, expected %08x", (int)step,
                                 (int)row, (int)k, s->host[row * s->pitch + k], word(step, row, k));
    return COLO_OK;
}

/* ---- what is gathered ---- */

/* The shard in its place of the memory, where rows are padded to 16 bytes with their bias. */
static colo_status_t move_in(t_gpu_rank_t *r, struct stand *s)
{
    char *gathered = (char *)colo_memory_data(s->memory) + AT;
    s->step = (HIDDEN + 4) / 4 * 4;
    s->weight = (uint32_t *)(void *)gathered + s->first * s->step;
    return bind_at(r, s, gathered);
}

/* Nothing but the stream's order between one gather and the next, of other values. */
static colo_status_t in_a_row(t_gpu_rank_t *r, void *arg)
{
    struct stand s;
    uint64_t rng = t_seed() + 31 * (uint64_t)r->rank;
    const bool *in_place = arg;
    rank_try(stand_up(r, true, &s));
    if (*in_place)
        rank_try(move_in(r, &s));
    for (int64_t rep = 0; rep < t_scaled(40); rep++) {
        for (int i = 0; i < DEEP; i++)
            rank_try(shard_of(&s, rep * DEEP + i, s.from[i]));
        for (int i = 0; i < DEEP; i++) {
            rank_try(t_gpu_late_at_random(r, &rng));
            rank_try(use_shard(r, &s, s.from[i]));
            rank_try(gather(r, &s, s.kept[i]));
        }
        for (int i = 0; i < DEEP; i++)
            rank_try(compare(r, &s, s.kept[i], rep * DEEP + i));
    }
    return lie_down(r, &s);
}

T_CASE(late_ranks_and_memory_in_use_again_do_no_harm)
{
    assert_ok(t_gpus_run(t_gpu_count(), false, in_a_row, &(bool){false}));
}

T_CASE(shards_that_lie_in_their_place_are_gathered_from_there)
{
    assert_ok(t_gpus_run(t_gpu_count(), false, in_a_row, &(bool){true}));
}

/* Copies of other ranks' parts in a graph: NCCL has none. */
static colo_status_t count_copies(cudaGraph_t graph, int64_t part, int32_t *copies)
{
    size_t n = 0;
    rank_cuda(cudaGraphGetNodes(graph, NULL, &n));
    COLO_AUTOFREE cudaGraphNode_t *node = calloc(n + 1, sizeof *node);
    rank_check(node);
    rank_cuda(cudaGraphGetNodes(graph, node, &n));
    *copies = 0;
    for (size_t i = 0; i < n; i++) {
        enum cudaGraphNodeType type;
        struct cudaMemcpy3DParms p;
        rank_cuda(cudaGraphNodeGetType(node[i], &type));
        if (type != cudaGraphNodeTypeMemcpy)
            continue;
        rank_cuda(cudaGraphMemcpyNodeGetParams(node[i], &p));
        *copies += (int64_t)(p.extent.width * p.extent.height * p.extent.depth) == part;
    }
    return COLO_OK;
}

T_CASE_ON_GPUS(t_gpu_count(), a_captured_gather_copies_and_replays)
{
    struct stand s;
    uint64_t rng = t_seed() + 7 * (uint64_t)r->rank;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int32_t copies = 0;
    rank_try(stand_up(r, true, &s));
    rank_try(shard_of(&s, 1, s.from[0]));
    rank_try(use_shard(r, &s, s.from[0]));
    rank_try(gather(r, &s, s.kept[0]));
    rank_try(compare(r, &s, s.kept[0], 1));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    colo_status_t st = use_shard(r, &s, s.from[0]);
    if (st == COLO_OK)
        st = gather(r, &s, s.kept[0]);
    rank_cuda(cudaStreamEndCapture(r->stream, &graph));
    rank_try(st);
    const int64_t each = (ROWS + r->size - 1) / r->size;
    rank_try(count_copies(graph, each * s.pitch * (int64_t)sizeof(uint32_t), &copies));
    if (copies != r->size - 1)
        return colo_fail(COLO_ERR_STATE, "%d copies of other ranks' parts, expected %d",
                         (int)copies, (int)r->size - 1);
    rank_cuda(cudaGraphInstantiate(&exec, graph, 0));
    rank_cuda(cudaGraphUpload(exec, r->stream));
    rank_try(t_gpu_quiet(r));
    for (int64_t step = 2; step < 2 + t_scaled(1000); step++) {
        rank_try(shard_of(&s, step, s.from[0]));
        if (step % 8 == 0)
            rank_try(t_gpu_late_at_random(r, &rng));
        rank_cuda(cudaGraphLaunch(exec, r->stream));
        rank_try(compare(r, &s, s.kept[0], step));
    }
    rank_try(colo_comm_check(r->gpus));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaGraphExecDestroy(exec));
    rank_cuda(cudaGraphDestroy(graph));
    return lie_down(r, &s);
}

/* A head without registered memory and one with it, on one comm. */
T_CASE_ON_GPUS(t_gpu_count(), heads_with_and_without_registered_memory_share_a_comm)
{
    struct stand here, there;
    void *own = NULL;
    rank_try(stand_up(r, true, &here));
    rank_try(stand_up(r, false, &there));
    rank_cuda(cudaMalloc(&own, there.bytes));
    rank_try(bind_at(r, &there, own));
    for (int64_t step = 0; step < 4; step++) {
        struct stand *s[2] = {&here, &there};
        for (int i = 0; i < 2; i++) {
            rank_try(shard_of(s[i], 2 * step + i, s[i]->from[0]));
            rank_try(use_shard(r, s[i], s[i]->from[0]));
            rank_try(gather(r, s[i], s[i]->kept[0]));
        }
        for (int i = 0; i < 2; i++)
            rank_try(compare(r, s[i], s[i]->kept[0], 2 * step + i));
    }
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaFree(own));
    rank_try(lie_down(r, &there));
    return lie_down(r, &here);
}

/* ---- what is refused ---- */

enum { ELSEWHERE, ON_SOME, ELSEWHERE_LATER, MISSING, IN_A_CAPTURE };

typedef struct verdict {
    int how;
    colo_status_t status[8];
    char error_message[8][600];
} verdict_t;

static colo_status_t goes_wrong(t_gpu_rank_t *r, void *arg)
{
    verdict_t *v = arg;
    struct stand s;
    colo_tensor_t w;
    colo_status_t st = COLO_OK;
    cudaGraph_t graph = NULL;
    rank_try(stand_up(r, true, &s));
    char *place = (char *)colo_memory_data(s.memory) + AT;
    rank_try(shard_of(&s, 1, s.from[0]));
    rank_try(use_shard(r, &s, s.from[0]));
    if (v->how == ELSEWHERE_LATER || v->how == MISSING) {
        rank_try(gather(r, &s, s.kept[0]));
        rank_try(compare(r, &s, s.kept[0], 1));
    }
    rank_try(t_gpu_quiet(r));
    if (v->how == MISSING)
        rank_try(colo_comm_set_timeout(r->gpus, 500));
    if (r->rank == 1 && (v->how == ELSEWHERE || v->how == ELSEWHERE_LATER))
        rank_try(bind_at(r, &s, place + s.bytes)); /* not in what others copy meanwhile */
    if (r->rank == 1 && v->how == ON_SOME)
        rank_try(bind_at(r, &s, s.kept[1]));
    if (v->how == IN_A_CAPTURE) {
        rank_try(colo_comm_barrier(r->gpus, r->stream)); /* connects */
        rank_try(t_gpu_quiet(r));
        rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    }
    if (r->rank != 1 || v->how != MISSING)
        st = colo_lm_head_acquire(s.head, r->stream, &w, NULL);
    snprintf(v->error_message[r->rank], sizeof v->error_message[0], "%s",
             st < 0 ? colo_last_error() : "");
    if (v->how == IN_A_CAPTURE) {
        rank_cuda(cudaStreamEndCapture(r->stream, &graph)); /* the head's stream has joined it */
        rank_cuda(cudaGraphDestroy(graph));
    }
    rank_cuda(cudaStreamSynchronize(r->stream));
    for (int i = 0; i < 300 && st == COLO_OK; i++) { /* kernels have said it; the watchdog looks */
        usleep(10000);
        st = colo_comm_check(r->gpus);
        snprintf(v->error_message[r->rank], sizeof v->error_message[0], "%s",
                 st < 0 ? colo_last_error() : "");
    }
    v->status[r->rank] = st;
    rank_try(colo_comm_barrier(r->host, NULL)); /* no rank copies from here any more */
    rank_cuda(cudaMemsetAsync(place, 1, s.bytes, r->stream)); /* the GPU is well */
    rank_cuda(cudaStreamSynchronize(r->stream));
    return lie_down(r, &s);
}

static const verdict_t *went_wrong(int how)
{
    static verdict_t v;
    memset(&v, 0, sizeof v);
    v.how = how;
    t_share(&v, sizeof v);
    assert_ok(t_gpus_run(t_gpu_count(), false, goes_wrong, &v));
    return &v;
}

static void all_must_fail(int how, colo_status_t want, const char *text)
{
    const verdict_t *v = went_wrong(how);
    for (int k = 0; k < t_gpu_count(); k++)
        if (v->status[k] != want || !strstr(v->error_message[k], text))
            fail_msg("rank %d: %s: %s", k, colo_status_name(v->status[k]), v->error_message[k]);
}

T_CASE(places_that_differ_are_refused_on_all_ranks)
{
    all_must_fail(ELSEWHERE, COLO_ERR_MISMATCH, "at the same place of it, on all ranks or on none");
    all_must_fail(ON_SOME, COLO_ERR_MISMATCH, "at the same place of it, on all ranks or on none");
    all_must_fail(IN_A_CAPTURE, COLO_ERR_STATE, "run one before the capture");
}

/* Some rank at least says what happened, the others that or that a rank failed. */
static void some_must_fail(int how, colo_status_t want, const char *text)
{
    const verdict_t *v = went_wrong(how);
    int said = 0;
    for (int k = 0; k < t_gpu_count(); k++) {
        if (k == 1 && how == MISSING)
            continue; /* it learns of it, or not yet */
        if (v->status[k] != want && v->status[k] != COLO_ERR_PEER)
            fail_msg("rank %d: %s: %s", k, colo_status_name(v->status[k]), v->error_message[k]);
        said += v->status[k] == want && strstr(v->error_message[k], text) != NULL;
    }
    if (!said)
        fail_msg("no rank says %s: %s", text, v->error_message[0]);
}

T_CASE(a_rank_that_goes_elsewhere_or_stays_away_is_found)
{
    some_must_fail(ELSEWHERE_LATER, COLO_ERR_MISMATCH, "another place in registered memory");
    some_must_fail(MISSING, COLO_ERR_TIMEOUT, "waited");
}

T_MAIN_IF(t_gpus_enough(2) ? 0 : T_EXIT_SKIP, "gpu/head_gather")
