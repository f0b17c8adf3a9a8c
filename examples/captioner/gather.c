/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gather.c - what all ranks hold together: whole parameters, agreement of replicas, statistics.
 *
 * Decides: everything goes by sums over the host's world comm, which every rank joins in the same
 * order. One replica of each shard puts its values into zeros, so the sum is exact. No rank looks
 * into another's memory. The statistics are those of the comms that carry the model's tensors.
 */
#include <string.h>

#include "rank.h"

/* One rank speaks for a shard: the first of its replicas. */
static bool speaks_for(const cap_rank_t *r, int i)
{
    const cap_side_t *s = r->table[i].encoder ? &r->src : &r->dst;
    if (cap_head_sharded(r, i))
        return r->w[i]; /* each for its rows */
    return r->w[i] && !s->d && !s->c && (r->table[i].cut != CAP_WHOLE || !s->t);
}

colo_status_t cap_gather(cap_rank_t *r, float *const *shards, float *const *whole)
{
    for (int i = 0; i < r->nparams; i++) {
        const cap_param_t *p = &r->table[i];
        const cap_side_t *s = p->encoder ? &r->src : &r->dst;

        memset(whole[i], 0, (size_t)(p->rows * p->cols) * sizeof(float));
        if (speaks_for(r, i)) {
            int64_t first = 0;
            if (cap_head_sharded(r, i)) {
                memset(r->shard, 0, (size_t)(p->rows * p->cols) * sizeof(float));
                first = r->head_first * p->cols;
            }
            r->ops.get(&r->ops, r->shard + first, shards[i], r->count[i] * (int64_t)sizeof(float));
            cap_param_unshard(p, s->t, s->tp, r->shard, whole[i]);
        }
        CAP_TRY(cap_sum(r->host, whole[i], p->rows * p->cols, NULL));
    }
    return COLO_OK;
}

/* Largest and smallest 32-bit words agree, so all do; words as integers, since NaN != NaN. */
static colo_status_t same_words(colo_comm_t *comm, const float *values, int64_t count, bool *same)
{
    for (int64_t offset = 0; offset < count; offset += 512) {
        int64_t n = count - offset < 512 ? count - offset : 512, most[1024];

        for (int64_t i = 0; i < n; i++) {
            int32_t word;
            memcpy(&word, values + offset + i, sizeof word);
            most[2 * i] = word;
            most[2 * i + 1] = -(int64_t)word;
        }
        CAP_TRY(colo_comm_all_reduce(comm, most, most, 2 * n, COLO_I64, COLO_REDOP_MAX, NULL));
        for (int64_t i = 0; i < n; i++)
            *same = *same && most[2 * i] == -most[2 * i + 1];
    }
    return COLO_OK;
}

colo_status_t cap_replicas(cap_rank_t *r, bool *same)
{
    int64_t differs;

    *same = true;
    for (int i = 0; i < r->nparams; i++) {
        const cap_side_t *s = r->table[i].encoder ? &r->src : &r->dst;
        if (!r->w[i] || cap_head_sharded(r, i))
            continue;
        r->ops.get(&r->ops, r->shard, r->w[i], r->count[i] * (int64_t)sizeof(float));
        CAP_TRY(same_words(s->mean_host, r->shard, r->count[i], same));
        if (r->table[i].cut == CAP_WHOLE)
            CAP_TRY(same_words(s->tp_host, r->shard, r->count[i], same));
    }
    differs = !*same;
    CAP_TRY(colo_comm_all_reduce(r->host, &differs, &differs, 1, COLO_I64, COLO_REDOP_MAX, NULL));
    *same = !differs;
    return COLO_OK;
}

/* ---- statistics ---- */

const char *const cap_comm_names[CAP_COMMS] = {"world",  "src.tp", "src.cp", "src.pp",  "src.mean",
                                               "dst.tp", "dst.cp", "dst.pp", "dst.mean"};

void cap_stats_now(const cap_rank_t *r, cap_stats_t *now)
{
    const colo_comm_t *comm[CAP_COMMS] = {r->world,       r->src.tp_comm,   r->src.cp_comm,
                                          r->src.pp_comm, r->src.mean_comm, r->dst.tp_comm,
                                          r->dst.cp_comm, r->dst.pp_comm,   r->dst.mean_comm};

    memset(now, 0, sizeof *now);
    if (r->ragged)
        memcpy(now->planned, cap_ragged_planned(r), sizeof now->planned);
    for (int i = 0; i < CAP_COMMS; i++) {
        now->of[i].struct_size = sizeof now->of[i];
        if (comm[i])
            (void)colo_comm_stats(comm[i], &now->of[i]);
    }
}

void cap_stats_add(cap_stats_t *total, const cap_stats_t *before, const cap_stats_t *after)
{
    for (int m = 0; m < CAP_MOVES; m++)
        total->planned[m] += after->planned[m] - before->planned[m];
    for (int i = 0; i < CAP_COMMS; i++)
        for (int k = 0; k < COLO_OP_COUNT; k++)
            for (int o = 0; o < COLO_CATEGORY_COUNT; o++) {
                colo_comm_stats_t *t = &total->of[i];
                const colo_comm_stats_t *a = &after->of[i], *b = &before->of[i];

                t->ops[k][o] += a->ops[k][o] - b->ops[k][o];
                t->sent_bytes[k][o] += a->sent_bytes[k][o] - b->sent_bytes[k][o];
                t->recv_bytes[k][o] += a->recv_bytes[k][o] - b->recv_bytes[k][o];
            }
}

/* Statistics are a size and 64-bit counters, all far below the sign bit. */
_Static_assert(sizeof(colo_comm_stats_t) ==
                   (1 + 3 * COLO_OP_MAX * COLO_CATEGORY_MAX) * sizeof(int64_t),
               "statistics hold counters only");

colo_status_t cap_stats_sum(cap_rank_t *r, cap_stats_t *total)
{
    return colo_comm_all_reduce(r->host, total, total, (int64_t)(sizeof *total / sizeof(int64_t)),
                                COLO_I64, COLO_REDOP_SUM, NULL);
}

int64_t cap_planned_bytes(const cap_rank_t *r, const cap_stats_t *total, int64_t steps)
{
    const colo_plan_config_t *plan = colo_plan_config(colo_bridge_plan(r->bridge));
    int64_t bytes = 0;

    for (int m = 0; m < CAP_MOVES; m++)
        bytes += total->planned[m];
    for (int pass = COLO_PASS_FORWARD; !r->ragged && pass <= COLO_PASS_BACKWARD; pass++) {
        int64_t each = cap_report_plan_bytes(plan, r->cfg->world, (colo_pass_t)pass);
        if (each < 0)
            return -1;
        bytes += steps * each;
    }
    return bytes;
}

uint64_t cap_bridge_bytes(const cap_stats_t *total)
{
    uint64_t bytes = 0;

    for (int i = 0; i < CAP_COMMS; i++)
        for (int k = 0; k < COLO_OP_COUNT; k++)
            bytes += total->of[i].recv_bytes[k][COLO_CATEGORY_BRIDGE];
    return bytes;
}
