/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 06_embedder.c - a runtime with threads, sockets and tensors of its own takes all that a step
 * needs.
 *
 * Four ranks are threads of this process; each makes its own world over an all-gather on
 * socketpairs. Images of any number of rows go from the encoder (dp=4) to the LLM (tp=2,dp=2);
 * while they do, packed sequences go from zigzag cuts to blocks. Two ranks share the vocabulary of
 * the loss. The tape carries its gradient back to the encoder, where each rank compares it with
 * softmax minus one-hot. C11, and C++17 as it stands.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <colobridge.h>

enum { RANKS = 4, IMAGES = 5, ROWS = 12, HELD = 6, VOCAB = 6, MINE = VOCAB / 2 };

/* Row g of all images is made by source replica made_by[g]; LLM replica r holds rows held[r]. */
static const int64_t rows[IMAGES] = {3, 1, 2, 2, 4}, made_by[IMAGES] = {0, 1, 1, 2, 3},
                     first[IMAGES] = {0, 3, 4, 6, 8}, seq[IMAGES] = {0, 0, 1, 2, 3},
                     pos[IMAGES] = {0, 3, 0, 1, 0}, seq_len[4] = {4, 2, 3, 4},
                     seq_dp[4] = {0, 1, 0, 1},
                     held[2][HELD] = {{0, 1, 2, 3, 6, 7}, {4, 5, 8, 9, 10, 11}};
static const int64_t text_len[3] = {8, 4, 4}, text_dp[3] = {0, 1, 1};

/* All that a rank owns; rank_end() frees it, whatever was made. */
struct rank {
    int32_t rank;
    int to[RANKS]; /* sockets; to[rank] is not used */
    pthread_t thread;
    colo_status_t status;
    colo_comm_t *world, *tp;
    colo_bridge_t *images, *texts;
    colo_batch_t *image_batch, *text_batch;
    colo_tape_t *tape;
    void *saved_memory, *workspace;
    colo_logprob_saved_t saved;
    float x[ROWS * VOCAB], d_x[ROWS * VOCAB], y[HELD * VOCAB], logp[HELD], error;
    int64_t target[HELD];
};

#define TRY(call)                       \
    do {                                \
        const colo_status_t st_ = call; \
        if (st_ < 0)                    \
            return st_;                 \
    } while (0)

/* What the runtime has already: @bytes fit into the buffer of a socket, so all may send first. */
static colo_status_t all_gather(void *user, const void *send_from, void *recv_to, size_t bytes)
{
    const struct rank *me = (const struct rank *)user;
    char *out = (char *)recv_to;
    if (bytes > 1 << 15)
        return COLO_ERR_ARG;
    memmove(out + (size_t)me->rank * bytes, send_from, bytes);
    for (int r = 0; r < RANKS; r++)
        if (r != me->rank && send(me->to[r], send_from, bytes, MSG_NOSIGNAL) != (ssize_t)bytes)
            return COLO_ERR_IO;
    for (int r = 0; r < RANKS; r++)
        if (r != me->rank &&
            recv(me->to[r], out + (size_t)r * bytes, bytes, MSG_WAITALL) != (ssize_t)bytes)
            return COLO_ERR_IO;
    return COLO_OK;
}

static float value(int64_t row, int64_t column)
{
    return sinf((float)(row * VOCAB + column));
}

static colo_tensor_t matrix(float *data, int64_t n, int64_t columns)
{
    const int64_t shape[2] = {n, columns};
    return colo_tensor_host(data, COLO_F32, 2, shape);
}

/* ---- images to the LLM, and a text between its ranks meanwhile ---- */

static colo_status_t make_bridges(struct rank *me)
{
    colo_grid_t encoder, llm, context;
    colo_layout_t src, dst, cut;
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT};
    colo_segments_t segments = {COLO_SEGMENTS_INIT};
    TRY(colo_grid_parse(&encoder, "dp=4", RANKS));
    TRY(colo_grid_parse(&llm, "tp=2,dp=2", RANKS));
    TRY(colo_grid_parse(&context, "cp=2,dp=2", RANKS));
    TRY(colo_layout_init_src(&src, &encoder));
    TRY(colo_layout_init_dst(&dst, &llm));
    TRY(colo_layout_init_dst(&cut, &context));
    TRY(colo_comm_split(me->world, &llm, "tp", &me->tp));
    config.src = &src;
    config.dst = &dst;
    config.shape.features = VOCAB;
    config.ragged = true;
    TRY(colo_bridge_create(&me->images, &config, me->world));
    segments.count = IMAGES;
    segments.rows = rows;
    segments.src_dp = made_by;
    segments.seq = seq;
    segments.pos = pos;
    segments.nseqs = 4;
    segments.seq_len = seq_len;
    segments.seq_dp = seq_dp;
    TRY(colo_bridge_set_segments(me->images, &segments, &me->image_batch));
    config.src = config.dst = &cut;
    config.shape.features = 1;
    config.ragged = false;
    config.packed = true;
    return colo_bridge_create(&me->texts, &config, me->world);
}

/* Each position is 100 times its sequence and its place there, so that it can be told afterwards.
 */
static colo_status_t move_text(struct rank *me)
{
    colo_packing_t zigzag = {COLO_PACKING_INIT}, block;
    const colo_layout_t *cut = colo_plan_config(colo_bridge_plan(me->texts))->dst;
    int64_t n, m, index[2 * 8];
    float from[8], to[8];
    zigzag.nseqs = 3;
    zigzag.seq_len = text_len;
    zigzag.seq_dp = text_dp;
    block = zigzag;
    zigzag.split = COLO_PACKING_ZIGZAG;
    block.split = COLO_PACKING_BLOCK;
    TRY(colo_packing_rows(&zigzag, cut, me->rank, &n));
    TRY(colo_packing_rows(&block, cut, me->rank, &m));
    TRY(colo_packing_index(&zigzag, cut, me->rank, index));
    for (int64_t i = 0; i < n; i++)
        from[i] = (float)(100 * index[n + i] + index[i]);
    const colo_tensor_t x = matrix(from, n, 1), y = matrix(to, m, 1);
    TRY(colo_bridge_set_packing(me->texts, &zigzag, &block, &me->text_batch));
    TRY(colo_batch_forward(me->text_batch, &x, &y, 1, NULL));
    TRY(colo_packing_index(&block, cut, me->rank, index));
    for (int64_t i = 0; i < m; i++)
        me->error = fmaxf(me->error, fabsf(to[i] - (float)(100 * index[m + i] + index[i])));
    return COLO_OK;
}

/* ---- nodes of the tape ---- */

static colo_status_t images_backward(const colo_tensor_t *d_y, int32_t ny, const colo_tensor_t *d_x,
                                     int32_t nx, void *state)
{
    struct rank *me = (struct rank *)state;
    colo_ticket_t *ticket = NULL;
    (void)nx;
    TRY(colo_batch_backward_start(me->image_batch, d_y, d_x, ny, NULL, &ticket));
    return colo_ticket_finish(&ticket, NULL);
}

/* Each rank of tp has the gradient of its columns; the bridge wants all columns on both. */
static colo_status_t loss_backward(const colo_tensor_t *d_logp, int32_t nout,
                                   const colo_tensor_t *d_y, int32_t nin, void *state)
{
    struct rank *me = (struct rank *)state;
    const colo_tensor_t mine = colo_tensor_narrow(*d_y, 1, MINE * colo_comm_rank(me->tp), MINE);
    colo_logprob_upstream_t upstream = {COLO_LOGPROB_UPSTREAM_INIT};
    (void)nout, (void)nin;
    upstream.d_logp = d_logp;
    memset(d_y->data, 0, sizeof(float) * HELD * VOCAB);
    TRY(colo_logprob_backward(&me->saved, &upstream, &mine, NULL));
    return colo_comm_all_reduce(me->tp, d_y->data, d_y->data, HELD * VOCAB, COLO_F32,
                                COLO_REDOP_SUM, NULL);
}

static colo_status_t make_loss(struct rank *me, const colo_tensor_t *y)
{
    colo_logprob_config_t config = {COLO_LOGPROB_CONFIG_INIT};
    const int64_t tokens = HELD, start = MINE * colo_comm_rank(me->tp);
    const colo_tensor_t logits = colo_tensor_narrow(*y, 1, start, MINE),
                        targets = colo_tensor_host(me->target, COLO_I64, 1, &tokens),
                        logp = colo_tensor_host(me->logp, COLO_F32, 1, &tokens);
    colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT};
    colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT};
    size_t saved, workspace;
    config.logits.vocab = VOCAB;
    config.logits.vocab_start = start;
    me->saved.struct_size = sizeof me->saved;
    batch.logits = &logits;
    batch.targets = &targets;
    out.logp = &logp;
    TRY(colo_logprob_saved_size(&config, COLO_F32, HELD, &saved));
    TRY(colo_logprob_workspace_size(&config, COLO_F32, HELD, 2, &workspace));
    if (posix_memalign(&me->saved_memory, COLO_ALIGNMENT, saved) ||
        posix_memalign(&me->workspace, COLO_ALIGNMENT, workspace))
        return COLO_ERR_NOMEM;
    return colo_logprob_forward(&config, &batch, me->tp, &out, &me->saved, me->saved_memory,
                                me->workspace, NULL);
}

static colo_status_t record(colo_tape_t *tape, const char *name, const colo_value_t *in,
                            const colo_tensor_t *out, colo_value_t *made, colo_backward_fn backward,
                            struct rank *me)
{
    colo_tape_record_t node = {COLO_TAPE_RECORD_INIT};
    node.name = name;
    node.in = in;
    node.nin = 1;
    node.out = out;
    node.nout = 1;
    node.out_values = made;
    node.backward = backward;
    node.state = me;
    return colo_tape_record(tape, &node);
}

/* ---- a step ---- */

static colo_status_t step(struct rank *me)
{
    colo_ticket_t *ticket = NULL;
    colo_value_t x_value, y_value, logp_value;
    int64_t made = 0, rows_here, tokens = HELD, ids[ROWS];
    float minus_one[HELD];
    TRY(make_bridges(me));
    for (int i = 0; i < IMAGES; i++)
        for (int64_t r = 0; r < rows[i] && made_by[i] == me->rank; r++)
            ids[made++] = first[i] + r;
    colo_bridge_rows(me->images, &rows_here, NULL);
    if (rows_here != made)
        return COLO_ERR_STATE;
    for (int64_t i = 0; i < made * VOCAB; i++)
        me->x[i] = value(ids[i / VOCAB], i % VOCAB);
    for (int i = 0; i < HELD; i++) {
        me->target[i] = held[me->rank / 2][i] % VOCAB;
        minus_one[i] = -1;
    }
    const colo_tensor_t x = matrix(me->x, made, VOCAB), d_x = matrix(me->d_x, made, VOCAB),
                        y = matrix(me->y, HELD, VOCAB),
                        logp = colo_tensor_host(me->logp, COLO_F32, 1, &tokens),
                        seed = colo_tensor_host(minus_one, COLO_F32, 1, &tokens);
    TRY(colo_batch_forward_start(me->image_batch, &x, &y, 1, NULL, &ticket));
    const colo_status_t text = move_text(me); /* finish in any case */
    TRY(colo_ticket_finish(&ticket, NULL));
    TRY(text);
    TRY(make_loss(me, &y));
    TRY(colo_tape_create(&me->tape));
    TRY(colo_tape_leaf(me->tape, &x, &d_x, &x_value));
    TRY(record(me->tape, "images", &x_value, &y, &y_value, images_backward, me));
    TRY(record(me->tape, "loss", &y_value, &logp, &logp_value, loss_backward, me));
    TRY(colo_tape_backward(me->tape, logp_value, &seed));
    for (int64_t i = 0; i < made * VOCAB; i++) { /* the gradient of -logp */
        const int64_t id = ids[i / VOCAB];
        float sum = 0;
        for (int64_t v = 0; v < VOCAB; v++)
            sum += expf(value(id, v));
        const float wanted = expf(me->x[i]) / sum - (i % VOCAB == id % VOCAB ? 1.0f : 0.0f);
        me->error = fmaxf(me->error, fabsf(me->d_x[i] - wanted));
    }
    return COLO_OK;
}

static void *rank_main(void *arg)
{
    struct rank *me = (struct rank *)arg;
    colo_bootstrap_t bootstrap = {COLO_BOOTSTRAP_INIT};
    bootstrap.rank = me->rank;
    bootstrap.size = RANKS;
    bootstrap.all_gather = all_gather;
    bootstrap.user = me;
    me->status = colo_comm_create_bootstrap(&bootstrap, &me->world);
    if (me->status == COLO_OK)
        me->status = step(me);
    if (me->status < 0) {
        fprintf(stderr, "06_embedder: rank %d: %s: %s\n", (int)me->rank,
                colo_status_name(me->status), colo_last_error());
        colo_comm_abort(me->world, colo_last_error()); /* the others do not wait for the deadline */
    }
    colo_tape_destroy(&me->tape);
    colo_batch_destroy(&me->text_batch);
    colo_batch_destroy(&me->image_batch);
    colo_bridge_destroy(&me->texts);
    colo_bridge_destroy(&me->images);
    colo_comm_destroy(&me->tp);
    colo_comm_destroy(&me->world);
    free(me->saved_memory);
    free(me->workspace);
    return NULL;
}

int main(void)
{
    struct rank *ranks = (struct rank *)calloc(RANKS, sizeof *ranks);
    int failed = 0;
    if (!ranks)
        return 1;
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < a; b++) {
            int ends[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
                abort();
            ranks[a].to[b] = ends[0];
            ranks[b].to[a] = ends[1];
        }
    for (int r = 0; r < RANKS; r++) {
        ranks[r].rank = r;
        if (pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]))
            abort();
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(ranks[r].thread, NULL);
        failed |= ranks[r].status < 0 || !(ranks[r].error < 1e-5f);
        printf("rank %d: logp of its first token %.6f, largest error of text and gradient %.1e\n",
               r, (double)ranks[r].logp[0], (double)ranks[r].error);
        for (int other = 0; other < RANKS; other++)
            if (other != r)
                close(ranks[r].to[other]);
    }
    free(ranks);
    return failed;
}
