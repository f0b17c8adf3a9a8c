/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss_case.c - see loss_case.h; loss_run.c runs and compares.
 *
 * Tolerances. Let u be the unit roundoff of the outputs (2^-24, or 2^-53 for f64 logits).
 * A per-token output is made of log Sum, x_t - M and U / Sum, each of magnitude at most
 * D = 1 + log V + range(x), from statistics rounded once (u each: s, u, x_t - m, d) and combined in
 * fp64. Four such terms and the final rounding of the output give
 *     |error| <= 4 u D + u |value|,   plus 4 u lambda |lse| (|lse| + D) for the z-loss.
 * lse and mean_logits are M plus such a term. log of sum_p2 is twice one: 8 u D times its value.
 * Class weights w multiply terms of the loss by at most W = max(1, |w|), and their sum of a shard
 * is a fifth statistic: 5 u in the place of 4 u, times W. So it is with gradients.
 * In f64 the sums themselves round (at most V u relative, here and in the oracle) and so does x
 * (2 u |x|, by the order in which scale and temperature are applied):
 *     u -> (V + 16) u,  D -> D + 4 max|x|.
 * A gradient is |scale / tau| times terms bounded by G D with
 * G = |g_p| + |g_l| (1 + 2 lambda |lse|) + |g_h| D + |g_s|, of lse: the same 4 u, plus one rounding
 * to the dtype of the logits (2^-9 relative for bf16, 2^-12 and 2^-26 absolute for f16, doubled for
 * safety).
 */
#include "loss/loss_case.h"
#include "ref/ref_half.h"

static struct ref_format format_of(colo_dtype_t dtype)
{
    return dtype == COLO_F16 ? ref_f16 : ref_bf16;
}

double loss_round(colo_dtype_t dtype, double v)
{
    if (dtype == COLO_F64 || isnan(v))
        return v;
    return dtype == COLO_F32
               ? (double)(float)v
               : ref_half_value(format_of(dtype), ref_half_round(format_of(dtype), v));
}

void loss_store(colo_dtype_t dtype, void *base, int64_t i, double v)
{
    if (dtype == COLO_F64)
        ((double *)base)[i] = v;
    else if (dtype == COLO_F32)
        ((float *)base)[i] = (float)v;
    else
        ((uint16_t *)base)[i] = ref_half_round(format_of(dtype), v);
}

double loss_load(colo_dtype_t dtype, const void *base, int64_t i)
{
    return dtype == COLO_F64   ? ((const double *)base)[i]
           : dtype == COLO_F32 ? (double)((const float *)base)[i]
                               : ref_half_value(format_of(dtype), ((const uint16_t *)base)[i]);
}

double loss_normal(uint64_t *rng)
{
    double s = 0;
    for (int i = 0; i < 12; i++)
        s += t_uniform(rng);
    return s - 6;
}

/* Nothing is drawn, so that the numbers of a case are the same with weights and without. */
void loss_draw_weights(double *weights, int64_t n)
{
    for (int64_t j = 0; j < n; j++)
        weights[j] = j % 5 == 3 ? 0 : loss_round(COLO_F32, 0.1 + fmod(0.7 * (double)j, 2));
}

/* As those */
void loss_draw_temperature(double *temperature, int64_t n)
{
    for (int64_t t = 0; t < n; t++)
        temperature[t] = loss_round(COLO_F32, 0.5 + fmod(0.37 * (double)(t + 1), 1.5));
}

double loss_heaviest(const double *weights, int64_t n)
{
    double most = 1;
    for (int64_t j = 0; j < n && weights; j++)
        most = fabs(weights[j]) > most ? fabs(weights[j]) : most;
    return most;
}

void loss_case_init(loss_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab,
                    colo_dtype_t dtype, double spread, uint64_t *rng)
{
    const size_t n = (size_t)(tokens * vocab) + 1, t = (size_t)tokens + 1, w = (size_t)ranks;
    *c = (loss_case_t){.ranks = ranks, .tokens = tokens, .vocab = vocab, .dtype = dtype};
    c->config = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = vocab};
    c->pad = 1000;
    const size_t v = (size_t)vocab;
    c->bytes = (2 * n + v + (2 + LOSS_UPS + (2 + LOSS_OUTS) * w) * t) * sizeof(double) + w * t;
    c->memory = calloc(c->bytes, 1);
    c->z = c->memory;
    c->dz = c->z + n;
    c->targets = (int64_t *)(c->dz + n);
    for (int64_t i = 0; i < tokens * vocab; i++)
        c->z[i] = loss_round(dtype, loss_round(COLO_F32, spread * loss_normal(rng)));
    for (int64_t i = 0; i < tokens; i++)
        c->targets[i] = t_below(rng, vocab);
    double *next = c->dz + n + t;
    for (int k = 0; k < LOSS_UPS; k++, next += t) {
        c->up[k] = next;
        for (int64_t i = 0; i < tokens; i++)
            c->up[k][i] = loss_round(COLO_F32, loss_normal(rng));
    }
    for (int i = 0; i < LOSS_OUTS * ranks; i++, next += t)
        c->out[i / LOSS_OUTS][i % LOSS_OUTS] = next;
    for (int r = 0; r < ranks; r++, next += t)
        c->argmax[r] = (int64_t *)next;
    for (int r = 0; r < ranks; r++, next += t)
        c->weight[r] = next;
    c->temperature = next;
    next += t;
    loss_draw_temperature(c->temperature, tokens);
    c->class_weight = next;
    next += v;
    loss_draw_weights(c->class_weight, vocab);
    for (int r = 0; r < ranks; r++)
        c->correct[r] = (uint8_t *)next + (size_t)r * t;
    loss_case_shard(c, SHARD_EVEN);
}

void loss_case_free(loss_case_t *c)
{
    free(c->memory);
    free(c->in);
    free(c->ids);
    free(c->begin);
    free(c->end);
}

void loss_case_take(loss_case_t *c, const loss_case_t *from, int64_t lo, int64_t hi)
{
    uint64_t rng = 1;
    const size_t n = (size_t)(hi - lo), row = (size_t)from->vocab * sizeof *c->z;
    loss_case_init(c, from->ranks, hi - lo, from->vocab, from->dtype, 1, &rng);
    c->config = from->config;
    c->row_gap = from->row_gap;
    memcpy(c->no_up, from->no_up, sizeof c->no_up);
    memcpy(c->start, from->start, sizeof c->start);
    memcpy(c->columns, from->columns, sizeof c->columns);
    memcpy(c->z, from->z + lo * c->vocab, n * row);
    memcpy(c->targets, from->targets + lo, n * sizeof *c->targets);
    memcpy(c->class_weight, from->class_weight, (size_t)c->vocab * sizeof *c->class_weight);
    memcpy(c->temperature, from->temperature + lo, n * sizeof *c->temperature);
    for (int k = 0; k < LOSS_UPS; k++)
        memcpy(c->up[k], from->up[k] + lo, n * sizeof *c->up[k]);
}

void loss_case_same(const loss_case_t *c, const loss_case_t *whole, int64_t lo, const char *label)
{
    const size_t n = (size_t)c->tokens, row = (size_t)c->vocab * sizeof *c->dz;
    for (int r = 0; r < c->ranks; r++) {
        for (int k = 0; k < LOSS_OUTS; k++)
            if (memcmp(c->out[r][k], whole->out[0][k] + lo, n * sizeof(double)) != 0)
                fail_msg("%s: %s, W %d, rank %d, tokens from %d: output %d differs", label,
                         colo_dtype_name(c->dtype), (int)c->ranks, r, (int)lo, k);
        assert_memory_equal(c->correct[r], whole->correct[0] + lo, n);
        assert_memory_equal(c->argmax[r], whole->argmax[0] + lo, n * sizeof(int64_t));
        if (c->tokens == whole->tokens &&
            (c->n_valid[r] != whole->n_valid[0] || c->n_invalid[r] != whole->n_invalid[0]))
            fail_msg("%s: rank %d counts %d valid tokens, expected %d", label, r,
                     (int)c->n_valid[r], (int)whole->n_valid[0]);
    }
    if (memcmp(c->dz, whole->dz + lo * c->vocab, n * row) != 0)
        fail_msg("%s: %s, W %d, tokens from %d: the gradient differs", label,
                 colo_dtype_name(c->dtype), (int)c->ranks, (int)lo);
}

void loss_case_shard(loss_case_t *c, shard_kind_t kind)
{
    const int64_t v = c->vocab, w = c->ranks, each = (v + w - 1) / w;
    for (int64_t r = 0; r < w; r++) {
        int64_t lo = r * v / w, hi = (r + 1) * v / w;
        switch (kind) {
        case SHARD_UNEVEN: /* 1 : 2 : 3 ... */
            lo = v * r * (r + 1) / (w * (w + 1));
            hi = v * (r + 1) * (r + 2) / (w * (w + 1));
            break;
        case SHARD_EMPTY: /* all on the last rank but one column; the first ranks have none */
            lo = r == w - 1 ? (w > 1) : 0;
            hi = r == w - 1 ? v : r == w - 2 ? 1 : 0;
            break;
        case SHARD_PADDED: /* as a vocabulary padded to a multiple of W, and three more */
            lo = r * (each + 3);
            hi = lo + each + 3;
            break;
        default:
            break;
        }
        c->start[r] = lo;
        c->columns[r] = hi - lo;
    }
}

ref_logprob_opts_t loss_case_opts(const loss_case_t *c, int64_t t)
{
    const colo_logprob_config_t *k = &c->config;
    return (ref_logprob_opts_t){
        .temperature =
            k->logits.temperature * (k->has_temperature && t >= 0 ? c->temperature[t] : 1),
        .scale = k->logits.scale,
        .softcap = k->logits.softcap,
        .smoothing = k->label_smoothing,
        .z_loss = k->z_loss,
        .megatron = k->megatron_smoothing,
        .lenient = k->lenient_targets,
        .ignore_index = k->ignore_index,
        .class_weight = k->has_class_weight ? c->class_weight : NULL,
    };
}

void loss_options(colo_logprob_config_t *config, unsigned bits)
{
    config->logits.temperature = bits & WITH_TAU ? 0.7 : 1;
    config->logits.scale = bits & WITH_TAU ? 1.3 : 1;
    config->logits.softcap = bits & WITH_CAP ? 5 : 0;
    config->label_smoothing = !(bits & WITH_SMOOTH) ? 0 : bits & WITH_ZLOSS ? 1 : 0.1;
    config->megatron_smoothing = bits & WITH_MEGATRON;
    config->z_loss = bits & WITH_ZLOSS ? 1e-2 : 0;
    config->want_entropy = bits & WITH_ENTROPY;
    config->want_loss = bits & WITH_LOSS;
    config->want_correct = bits & WITH_CORRECT;
    config->has_class_weight = bits & WITH_WEIGHTS;
    config->want_lse = bits & WITH_LSE;
    config->has_temperature = bits & WITH_HEAT;
    config->want_argmax = config->want_sum_p2 = bits & WITH_MORE;
    config->want_mean_logits = bits & WITH_MORE && !(bits & WITH_WEIGHTS && bits & WITH_SMOOTH);
}

const char *const loss_out_names[LOSS_OUTS] = {"logp", "entropy", "loss",
                                               "lse",  "sum_p2",  "mean_logits"};

void loss_wanted(const colo_logprob_config_t *config, bool wanted[LOSS_OUTS])
{
    const bool all[LOSS_OUTS] = {true,
                                 config->want_entropy,
                                 config->want_loss,
                                 config->want_lse,
                                 config->want_sum_p2,
                                 config->want_mean_logits};
    memcpy(wanted, all, sizeof all);
}

double loss_grad_rounding(colo_dtype_t dtype, double g, double u)
{
    return dtype == COLO_F32    ? u * fabs(g)
           : dtype == COLO_BF16 ? 0x1p-8 * fabs(g)
           : dtype == COLO_F16  ? 0x1p-11 * fabs(g) + 0x1p-25
                                : 0;
}
