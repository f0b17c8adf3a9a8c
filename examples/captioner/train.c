/* SPDX-License-Identifier: Apache-2.0 */
/*
 * train.c - Adam on the shards a rank holds, the training loop, and the report at its end.
 *
 * Decides the schedule: a short warmup, then half a cosine down to a twentieth; weights decay
 * apart from the gradient (1,498 images are few), so the checked gradients stay those of the loss.
 * Replicas of a shard see the same gradient bits (sums combine in rank order) and so stay the same
 * without ever being broadcast. Statistics are read around each step, decoding excluded, so that
 * the report can put the bridge's bytes next to the plan's.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"

double cap_rate(const cap_config_t *cfg, int64_t step)
{
    int64_t warmup = cfg->steps / 20 + 1;
    double done;

    if (step < warmup)
        return cfg->lr * (double)(step + 1) / (double)warmup;
    done = (double)(step - warmup) / (double)(cfg->steps > warmup ? cfg->steps - warmup : 1);
    return cfg->lr * (0.05 + 0.95 * 0.5 * (1.0 + cos(3.14159265358979 * (done < 1 ? done : 1))));
}

static void adam(cap_rank_t *r, double rate)
{
    r->adam_step++;
    float fix1 = (float)(1.0 / (1.0 - pow(0.9, (double)r->adam_step)));
    float fix2 = (float)(1.0 / (1.0 - pow(0.99, (double)r->adam_step)));
    for (int side = 0; side < 2; side++)
        r->ops.adam(&r->ops, r->side_count[side], (float)rate, fix1, fix2, r->side_g[side],
                    r->adam_m[side], r->adam_v[side], r->side_w[side]);
}

/* The last stage knows the loss; all ranks get it. */
static colo_status_t share_loss(cap_rank_t *r, double *loss)
{
    *loss = r->back ? r->reduced.value : -INFINITY;
    return colo_comm_all_reduce(r->host, loss, loss, 1, COLO_F64, COLO_REDOP_MAX, NULL);
}

colo_status_t cap_step(cap_rank_t *r, int64_t step, double rate, double *loss)
{
    const cap_config_t *cfg = r->cfg;

    cap_samples(cfg->data, &cfg->task, cfg->seed, step, cfg->batch, r->rows);
    CAP_TRY(cap_load(r, r->rows, true));
    CAP_TRY(cap_forward_backward(r));
    if (rate > 0)
        adam(r, rate);
    CAP_TRY(r->ops.check(&r->ops));
    return share_loss(r, loss);
}

/* ---- at the end ---- */

static int64_t all_params(const cap_rank_t *r)
{
    int64_t sum = 0;
    for (int i = 0; i < r->nparams; i++)
        sum += r->table[i].rows * r->table[i].cols;
    return sum;
}

static bool is_mistake(const cap_sample_t *s)
{
    return strcmp(s->caption, s->want) != 0;
}

static void fill_sample(const cap_config_t *cfg, const int32_t *text, int64_t i, cap_sample_t *s)
{
    const cap_data_t *data = cfg->data;
    int64_t rows[CAP_IMAGES], size = cap_text(cfg);

    cap_held_sample(data, &cfg->task, i, rows);
    memset(s, 0, sizeof *s);
    for (; s->images < cfg->task.most && rows[s->images] >= 0; s->images++)
        s->pixels[s->images] = data->pixels[rows[s->images]];
    s->row = s->images ? rows[0] : -1;
    cap_caption_text(data, &cfg->task, rows, s->want);
    for (int64_t k = 0; k < size; k++)
        s->caption[k] = (char)text[i * size + k];
}

/* At most a third are searched for as mistakes, the rest is spread evenly over the held-out images.
 * Mistakes come first. */
static int64_t topk_samples(const cap_config_t *cfg, const int32_t *text, cap_sample_t *samples)
{
    const cap_data_t *data = cfg->data;
    int64_t n = 0, index[CAP_SAMPLES];

    for (int pass = 0; pass < 2; pass++) {
        int64_t stride = pass ? data->nheld / (CAP_SAMPLES + 1 - n) - 1 : 1;

        if (stride < 1)
            stride = 1;
        for (int64_t i = 0; i < data->nheld && n < (pass ? CAP_SAMPLES : CAP_SAMPLES / 3);
             i += stride) {
            cap_sample_t *s = &samples[n];
            bool shown = false;

            for (int64_t k = 0; k < n; k++)
                shown = shown || index[k] == i;
            if (shown)
                continue;
            index[n] = i;
            fill_sample(cfg, text, i, s);
            n += pass || is_mistake(s);
        }
    }
    for (int64_t i = 1; i < n; i++) /* a mistake among the rest */
        for (int64_t k = i; k > 0 && is_mistake(&samples[k]) && !is_mistake(&samples[k - 1]); k--) {
            cap_sample_t later = samples[k - 1];
            samples[k - 1] = samples[k];
            samples[k] = later;
        }
    return n;
}

static int64_t stats_rows(const cap_rank_t *r, const cap_stats_t *total, int64_t plan_bytes,
                          cap_stats_row_t *rows)
{
    int64_t n = 0;

    for (int i = 0; i < CAP_COMMS; i++)
        for (int k = 0; k < COLO_OP_COUNT; k++)
            for (int o = 0; o < COLO_CATEGORY_COUNT; o++) {
                bool bridge = k == COLO_OP_EXCHANGE && o == COLO_CATEGORY_BRIDGE;
                if (!total->of[i].ops[k][o])
                    continue;
                rows[n] = (cap_stats_row_t){.op = (colo_op_kind_t)k,
                                            .category = (colo_category_t)o,
                                            .ops = total->of[i].ops[k][o],
                                            .bytes = total->of[i].recv_bytes[k][o],
                                            .plan_bytes = bridge ? plan_bytes : -1};
                snprintf(rows[n].where, sizeof rows[n].where, "%s", cap_comm_names[i]);
                n++;
            }
    return n;
}

/** What rank 0 collects for the report. */
struct history {
    cap_point_t *loss, *accuracy;
    int64_t nloss, naccuracy;
    double seconds; /* of training steps */
    int64_t tokens; /* positions in them */
    int32_t *text;
    int64_t exact;
    cap_stats_t stats;
    cap_sample_t samples[CAP_SAMPLES];
    cap_stats_row_t rows[CAP_COMMS * COLO_OP_COUNT * COLO_CATEGORY_COUNT];
};

static void print_json(const cap_config_t *cfg, const struct history *h, bool reported,
                       double bridged, double planned, double rate)
{
    double loss = h->nloss ? h->loss[h->nloss - 1].value : NAN;
    char text[32] = "null";

    if (isfinite(loss))
        snprintf(text, sizeof text, "%.6f", loss);
    printf("{\"ok\":%s,\"steps\":%lld,\"loss\":%s,\"exact\":%lld,\"held_out\":%lld,"
           "\"accuracy\":%.6f,\"seconds\":%.3f,\"tokens_per_second\":%.1f,"
           "\"bridge_recv_bytes\":%.0f,\"plan_recv_bytes\":%.0f,\"world\":%d,"
           "\"src\":\"%s\",\"dst\":\"%s\",\"report\":%s}\n",
           cfg->exit_code ? "false" : "true", (long long)cfg->steps, text, (long long)h->exact,
           (long long)cfg->data->nheld, (double)h->exact / (double)cfg->data->nheld, h->seconds,
           rate, bridged, planned, cfg->world, cfg->src_text, cfg->dst_text,
           reported ? "true" : "false");
}

/* What each move of a step brings, all ranks together. */
static const cap_balance_t *balance(const cap_rank_t *r, const int64_t *planned, double steps,
                                    cap_balance_t *b)
{
    if (!r->ragged)
        return NULL;
    *b = *cap_ragged_balance(r);
    b->pixels = (double)planned[CAP_PIXELS_MOVED] / steps;
    b->embeddings = (double)planned[CAP_EMBEDDINGS_MOVED] / steps;
    b->gradients = (double)planned[CAP_GRADIENTS_MOVED] / steps;
    return b;
}

static void report(cap_rank_t *r, struct history *h)
{
    cap_config_t *cfg = r->cfg;
    double steps = cfg->steps ? (double)cfg->steps : 1;
    cap_balance_t balanced;
    const colo_plan_config_t *plan = colo_plan_config(colo_bridge_plan(r->bridge));
    int64_t planned =
        cfg->algo == COLO_ALGO_EXACT ? cap_planned_bytes(r, &h->stats, cfg->steps) : -1;
    double rate = h->seconds > 0 ? (double)h->tokens / h->seconds : 0;
    int64_t nsamples = topk_samples(cfg, h->text, h->samples), wrong = 0;
    cap_report_t page = {.command = cfg->command,
                         .model = cfg->model,
                         .parameters = all_params(r),
                         .batch = cfg->batch,
                         .steps = cfg->steps,
                         .seed = cfg->seed,
                         .seconds = h->seconds,
                         .tokens_per_second = rate,
                         .backend = colo_comm_backend(r->world),
                         .plan = *plan,
                         .algo = cfg->algo,
                         .balance = balance(r, h->stats.planned, steps, &balanced),
                         .world = cfg->world,
                         .loss = h->loss,
                         .nloss = h->nloss,
                         .accuracy = h->accuracy,
                         .naccuracy = h->naccuracy,
                         .samples = h->samples,
                         .nsamples = nsamples,
                         .held = cfg->data->nheld,
                         .mistakes = cfg->data->nheld - h->exact,
                         .stats = h->rows,
                         .nstats = stats_rows(r, &h->stats, planned, h->rows),
                         .stats_steps = cfg->steps};
    uint64_t bridged = cap_bridge_bytes(&h->stats);
    double accuracy = (double)h->exact / (double)cfg->data->nheld;
    FILE *out = cfg->json ? stderr : stdout;

    cap_show_samples(cfg, h->samples, nsamples);
    for (int64_t i = 0; i < nsamples; i++)
        wrong += is_mistake(&h->samples[i]);
    fprintf(out, "mistakes first: %lld of %lld, then %lld others\n", (long long)wrong,
            (long long)page.mistakes, (long long)(nsamples - wrong));
    fprintf(out,
            "%lld of %lld held-out captions exact (%.1f %%), %.1f s, %.0f tokens/s; bridge moved "
            "%.0f bytes per step, the plan says %.0f\n",
            (long long)h->exact, (long long)cfg->data->nheld, 100 * accuracy, h->seconds, rate,
            (double)bridged / steps, planned < 0 ? -1.0 : (double)planned / steps);
    const char *why = cap_report_write(&page, cfg->report);
    double loss = h->nloss ? h->loss[h->nloss - 1].value : 0;
    if (!isfinite(loss)) {
        fprintf(stderr,
                "colo-captioner: the loss is %g after %lld steps; a smaller --lr may help\n", loss,
                (long long)cfg->steps);
        cfg->exit_code = 1;
    }
    if (why) {
        fprintf(stderr, "colo-captioner: %s\n", why);
        cfg->exit_code = 1;
    } else {
        fprintf(out, "report: %s\n", cfg->report);
    }
    if (planned >= 0 && bridged != (uint64_t)planned) {
        fprintf(stderr, "colo-captioner: the bridge received %llu bytes, planned %lld\n",
                (unsigned long long)bridged, (long long)planned);
        cfg->exit_code = 1;
    }
    if (cfg->json)
        print_json(cfg, h, !why, (double)bridged / steps,
                   planned < 0 ? -1.0 : (double)planned / steps, rate);
}

static colo_status_t evaluate(cap_rank_t *r, struct history *h, int64_t step,
                              cap_progress_t *progress)
{
    CAP_TRY(cap_decode(r, h->text, &h->exact));
    progress->accuracy = (double)h->exact / (double)r->cfg->data->nheld;
    h->accuracy[h->naccuracy++] = (cap_point_t){step, progress->accuracy};
    return COLO_OK;
}

colo_status_t cap_train(cap_rank_t *r)
{
    cap_config_t *cfg = r->cfg;
    bool speaks = colo_comm_rank(r->world) == 0;
    struct history *h = cap_take(&r->arena, 1, sizeof *h);
    cap_progress_t progress;
    cap_stats_t before, after;

    if (!h)
        return COLO_ERR_NOMEM;
    h->loss = cap_take(&r->arena, cfg->steps + 1, sizeof *h->loss);
    h->accuracy = cap_take(&r->arena, cfg->steps / cfg->eval_every + 2, sizeof *h->accuracy);
    h->text = cap_take(&r->arena, cfg->data->nheld * cap_text(cfg), sizeof *h->text);
    if (r->arena.failed)
        return COLO_ERR_NOMEM;
    cap_progress_begin(&progress, cfg);
    for (int64_t step = 0; step < cfg->steps; step++) {
        double begin = cap_seconds(), loss;
        bool last = step + 1 == cfg->steps, eval = last || (step + 1) % cfg->eval_every == 0;

        cap_stats_now(r, &before);
        CAP_TRY(cap_step(r, step, cap_rate(cfg, step), &loss));
        cap_stats_now(r, &after);
        cap_stats_add(&h->stats, &before, &after);
        h->seconds += cap_seconds() - begin;
        h->tokens += r->filled;
        h->loss[h->nloss++] = (cap_point_t){step + 1, loss};
        if (eval)
            CAP_TRY(evaluate(r, h, step + 1, &progress));
        if (speaks)
            cap_progress_step(&progress, step + 1, loss, h->tokens, h->seconds, eval);
    }
    if (!cfg->steps)
        CAP_TRY(evaluate(r, h, 0, &progress));
    CAP_TRY(cap_stats_sum(r, &h->stats));
    if (speaks)
        report(r, h);
    return COLO_OK;
}
