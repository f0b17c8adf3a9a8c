/* SPDX-License-Identifier: Apache-2.0 */
/* culprit.c - see culprit.h. */
#include "faults/culprit.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

static struct held {
    struct held *next;
} * held;
static struct rlimit address_space;

void limit_address_space(rlim_t spare)
{
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld", &pages) != 1 || getrlimit(RLIMIT_AS, &address_space) != 0)
        exit(1);
    fclose(f);
    const rlim_t taken = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
    setrlimit(RLIMIT_AS, &(struct rlimit){taken + spare, address_space.rlim_max});
}

void exhaust_memory(void)
{
    limit_address_space(0);
    for (size_t bytes = 1 << 20; bytes >= 16; bytes = bytes > 1024 ? bytes / 2 : bytes - 16)
        for (struct held *h; (h = malloc(bytes)); held = h)
            h->next = held;
}

void release_memory(void)
{
    for (struct held *next; held; held = next) {
        next = held->next;
        free(held);
    }
    if (address_space.rlim_max)
        setrlimit(RLIMIT_AS, &address_space);
}

colo_status_t carry_batch(struct rank *r, const colo_layout_t *src, const colo_layout_t *dst,
                          int64_t width)
{
    const int64_t rows[] = {4}, zero[] = {0}, pos[] = {is(r, "segments") ? 1 : 2}, length[] = {8};
    const colo_segments_t tables = {COLO_SEGMENTS_INIT, .count = 1,        .rows = rows,
                                    .src_dp = zero,     .seq = zero,       .pos = pos,
                                    .nseqs = 1,         .seq_len = length, .seq_dp = zero};
    const colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = src,        .dst = dst,
                                         .shape.features = width, .dtype = COLO_F32, .mem = r->mem,
                                         .ragged = true};
    float x[64] = {1}, y[64];
    int64_t nx = 0, ny = 0;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    colo_status_t st = colo_bridge_create(&bridge, &config, r->world);
    if (st == COLO_OK)
        st = colo_bridge_set_segments(bridge, &tables, &batch);
    colo_bridge_rows(bridge, &nx, &ny);
    colo_tensor_t tx = colo_tensor_host(x, COLO_F32, 2, (int64_t[]){nx, width}),
                  ty = colo_tensor_host(y, COLO_F32, 2, (int64_t[]){ny, width});
    if (st == COLO_OK)
        st = place_tensor(r, &tx, sizeof x);
    if (st == COLO_OK)
        st = place_tensor(r, &ty, sizeof y);
    if (st == COLO_OK)
        st = wait_ended(r, colo_batch_forward(batch, &tx, &ty, 1, r->stream));
    return st;
}

colo_status_t loss_in_chunks(colo_comm_t *world, bool other)
{
    enum { TOKENS = 4, COLUMNS = 2, HIDDEN = 2 };
    float hidden[TOKENS * HIDDEN] = {1, 2, 3}, weight[COLUMNS * HIDDEN] = {1}, logp[TOKENS];
    int64_t target[TOKENS] = {0, 1, 2, 3};
    const colo_tensor_t h = colo_tensor_host(hidden, COLO_F32, 2, (int64_t[]){TOKENS, HIDDEN}),
                        w = colo_tensor_host(weight, COLO_F32, 2, (int64_t[]){COLUMNS, HIDDEN}),
                        t = colo_tensor_host(target, COLO_I64, 1, (int64_t[]){TOKENS}),
                        of_logp = colo_tensor_host(logp, COLO_F32, 1, (int64_t[]){TOKENS});
    const colo_lm_head_config_t of_head = {COLO_LM_HEAD_CONFIG_INIT, .rows = COLUMNS,
                                           .hidden = HIDDEN, .dtype = COLO_F32};
    colo_linear_logprob_config_t config = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .frozen_hidden = true,
                                           .frozen_weight = true};
    config.logprob.logits.vocab = (int64_t)COLUMNS * colo_comm_size(world);
    config.logprob.logits.vocab_start = (int64_t)COLUMNS * colo_comm_rank(world);
    config.logprob.chunk_size = other ? 3 : 2;
    colo_lm_head_t *head = NULL;
    colo_linear_logprob_t *linear = NULL;
    size_t bytes = 0;
    colo_status_t st = colo_lm_head_create(&head, &of_head, NULL);
    if (st == COLO_OK)
        st = colo_lm_head_bind(head, &w, NULL, NULL);
    if (st == COLO_OK)
        st = colo_linear_logprob_create(&linear, &config, head, world);
    if (st == COLO_OK)
        st = colo_linear_logprob_workspace_size(linear, COLO_LINEAR_LOGPROB_LOSS, TOKENS, TOKENS,
                                                &bytes);
    void *workspace = aligned_alloc(COLO_ALIGNMENT, (bytes / COLO_ALIGNMENT + 1) * COLO_ALIGNMENT);
    if (st == COLO_OK)
        st = colo_linear_logprob_loss(
            linear,
            &(colo_linear_logprob_batch_t){COLO_LINEAR_LOGPROB_BATCH_INIT, .hidden = &h,
                                           .targets = &t, .max_valid = TOKENS},
            &(colo_linear_logprob_upstream_t){COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = 1},
            &(colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .logp = &of_logp},
            &(colo_linear_logprob_grads_t){COLO_LINEAR_LOGPROB_GRADS_INIT, .d_hidden = NULL},
            workspace, NULL);
    free(workspace);
    colo_linear_logprob_destroy(&linear);
    colo_lm_head_destroy(&head);
    return st;
}
