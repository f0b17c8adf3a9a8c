/* SPDX-License-Identifier: Apache-2.0 */
/*
 * decode.c - greedy captions of the held-out images, by the ranks together.
 *
 * Decides: images go through in batches of the training size (the last one is filled up with images
 * that are not counted), so that nothing is allocated or planned anew. The encoder and the bridge
 * run once a batch, the layers once a byte. The byte after position s is known to the ranks that
 * own s; they tell their cp siblings and, from the last stage, the stages before.
 */
#include <string.h>

#include "rank.h"

/* Where this rank has the position before byte @k of own sample @i; -1: another cp rank has it. */
static int64_t asked_at(const cap_rank_t *r, int64_t i, int64_t k)
{
    int64_t offset = r->text_at[i] + k - 1, s = offset % r->S;

    return r->part_of[s] == r->dst.c ? offset / r->S * r->n + r->local_of[s] : -1;
}

/* Byte @k of the own samples that this cp rank is asked for: the best over all tp ranks; the lowest
 * byte wins a tie. */
static colo_status_t choose(cap_rank_t *r, const float *top, int64_t k)
{
    int64_t D = r->cfg->model.width, b = 0, W = r->dst.tp;
    int64_t Vl = (r->dst.t + 1) * CAP_VOCAB / W - r->logprob.logits.vocab_start;

    for (int64_t i = 0; i < r->dst.b; i++) {
        int64_t offset = asked_at(r, i, k);
        if (offset >= 0)
            r->ops.copy(&r->ops, r->d_t1 + b++ * D, top + offset * D, D * (int64_t)sizeof *top);
    }
    if (!b)
        return COLO_OK;
    cap_head_logits(r, b, r->d_t1);
    r->ops.get(&r->ops, r->logits_host, r->logits, b * Vl * (int64_t)sizeof(float));
    for (int64_t i = 0; i < b; i++) {
        const float *z = r->logits_host + i * Vl;
        int64_t best = 0;

        for (int64_t j = 1; j < Vl; j++)
            best = z[j] > z[best] ? j : best;
        r->best[2 * i] = z[best];
        r->best[2 * i + 1] = (float)(r->logprob.logits.vocab_start + best);
    }
    CAP_TRY(colo_comm_all_gather(r->dst.tp_host, r->best, r->best_all, 2 * b, COLO_F32, NULL));
    for (int64_t i = 0, own = 0; i < r->dst.b; i++) {
        const float *best = r->best_all + 2 * own;

        if (asked_at(r, i, k) < 0)
            continue;
        for (int64_t w = 1; w < W; w++) {
            const float *other = r->best_all + 2 * (w * b + own);
            best = other[0] > best[0] ? other : best;
        }
        r->chosen[i] = (int32_t)best[1];
        own++;
    }
    return COLO_OK;
}

/* Byte @k of every own sample: appended to the tokens of all ranks that hold the sample. */
static colo_status_t next_byte(cap_rank_t *r, int64_t k)
{
    const float *top;

    CAP_TRY(cap_stack(r, NULL, &top));
    memset(r->chosen, 0, (size_t)r->dst.b * sizeof *r->chosen);
    if (r->back)
        CAP_TRY(choose(r, top, k));
    if (r->back && r->dst.cp > 1)
        CAP_TRY(colo_comm_all_reduce(r->dst.cp_host, r->chosen, r->chosen, r->dst.b, COLO_I32,
                                     COLO_REDOP_SUM, NULL));
    if (r->dst.pp > 1)
        CAP_TRY(colo_comm_broadcast(r->dst.pp_host, r->chosen, r->dst.b, COLO_I32,
                                    (int32_t)r->dst.pp - 1, NULL));
    for (int64_t i = 0; i < r->dst.b; i++)
        r->tokens[r->text_at[i] + k] = r->chosen[i];
    cap_put_tokens(r);
    return COLO_OK;
}

colo_status_t cap_decode(cap_rank_t *r, int32_t *text, int64_t *exact)
{
    const cap_config_t *cfg = r->cfg;
    const cap_data_t *data = cfg->data;
    int64_t B = cfg->batch, most = cfg->task.most, size = cap_text(cfg);
    bool writes = r->dst.in && !r->dst.t && !r->dst.c && !r->dst.p; /* one rank a sample */

    memset(text, 0, (size_t)(data->nheld * size) * sizeof *text);
    if (r->back)
        CAP_TRY(cap_head_open(r));
    for (int64_t start = 0; start < data->nheld; start += B) {
        for (int64_t i = 0; i < B; i++)
            cap_held_sample(data, &cfg->task, (start + i) % data->nheld, r->rows + i * most);
        CAP_TRY(cap_load(r, r->rows, false));
        CAP_TRY(cap_encode(r, NULL));
        for (int64_t k = 0; r->dst.in && k < size; k++)
            CAP_TRY(next_byte(r, k));
        for (int64_t i = 0; writes && i < r->dst.b && start + r->dst.b0 + i < data->nheld; i++)
            for (int64_t k = 0; k < size; k++)
                text[(start + r->dst.b0 + i) * size + k] = (int32_t)r->tokens[r->text_at[i] + k];
    }
    if (r->back)
        CAP_TRY(cap_head_close(r));
    CAP_TRY(colo_comm_all_reduce(r->host, text, text, data->nheld * size, COLO_I32, COLO_REDOP_SUM,
                                 NULL));
    *exact = 0;
    for (int64_t i = 0; i < data->nheld; i++) {
        int64_t rows[CAP_IMAGES], k = 0;
        char want[CAP_SAID];

        cap_held_sample(data, &cfg->task, i, rows);
        cap_caption_text(data, &cfg->task, rows, want);
        while (k < size && want[k] && text[i * size + k] == (unsigned char)want[k])
            k++;
        *exact += k < size && !want[k] && !text[i * size + k];
    }
    return COLO_OK;
}
