/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_rows.c - the CUDA table of the lm_head path against plain loops: packing, per-token values,
 * hidden rows, sums, conversions bit for bit where nothing is added, products within the error of
 * fp32 accumulation, and a row's product the same bits whatever rows it comes with.
 */
#include "gpu/gpu.h"

#include "loss/product_case.h"

static uint64_t rng;
static const colo_dtype_t floats[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};

static void *fetch(const void *device, size_t bytes)
{
    void *host = malloc(bytes + 1);
    gpu_get(host, device, bytes);
    return host;
}

static double *draw(colo_dtype_t dtype, int64_t n, void **device)
{
    return product_draw(dtype, n, &rng, device);
}

/* ---- packing ---- */

typedef struct packing {
    struct colo_linear_rows r;
    int64_t *targets, *row_of, *token_of, *row_targets, counts[4]; /* as they should be */
    void *device[5];
} packing_t;

static void packing_init(packing_t *p, int64_t tokens, int64_t rows, int64_t stride, double ignored,
                         double invalid)
{
    const int64_t ignore = -100, vocab = 50;
    *p = (packing_t){.targets = malloc((size_t)(tokens * stride + 1) * 8),
                     .row_of = malloc((size_t)(tokens + 1) * 8),
                     .token_of = malloc((size_t)(rows + 1) * 8),
                     .row_targets = malloc((size_t)(rows + 1) * 8)};
    int64_t index = 0;
    for (int64_t i = 0; i < tokens * stride; i++)
        p->targets[i] = 7; /* between tokens: not to be read */
    for (int64_t t = 0; t < tokens; t++) {
        double u = t_uniform(&rng);
        int64_t target = u < ignored             ? ignore
                         : u < ignored + invalid ? vocab + t_below(&rng, 9)
                                                 : t_below(&rng, vocab);
        p->targets[t * stride] = target;
        p->row_of[t] = target == ignore ? -1 : index < rows ? index : -2;
        if (target == ignore)
            continue;
        bool good = target < vocab && index < rows;
        p->counts[COLO_LINEAR_COUNTED]++;
        p->counts[good ? COLO_LINEAR_VALID : COLO_LINEAR_INVALID]++;
        if (index < rows) {
            p->token_of[index] = t;
            p->row_targets[index++] = target;
        }
    }
    for (; index < rows; index++) {
        p->token_of[index] = -1;
        p->row_targets[index] = ignore;
    }
    p->device[0] = gpu_put(p->targets, (size_t)(tokens * stride) * 8);
    p->device[1] = gpu_put(NULL, (size_t)tokens * 8);
    p->device[2] = gpu_put(NULL, (size_t)rows * 8);
    p->device[3] = gpu_put(NULL, (size_t)rows * 8);
    p->device[4] = gpu_put(NULL, 32);
    p->r = (struct colo_linear_rows){.tokens = tokens,
                                     .rows = rows,
                                     .targets = p->device[0],
                                     .target_stride = stride,
                                     .ignore_index = ignore,
                                     .vocab = vocab,
                                     .row_of = p->device[1],
                                     .token_of = p->device[2],
                                     .row_targets = p->device[3],
                                     .counts = p->device[4]};
}

static void packing_free(packing_t *p)
{
    for (int i = 0; i < 5; i++)
        gpu_free(p->device[i]);
    free(p->targets);
    free(p->row_of);
    free(p->token_of);
    free(p->row_targets);
}

static void compare_words(const int64_t *device, const int64_t *want, int64_t n, const char *what)
{
    COLO_AUTOFREE int64_t *got = fetch(device, (size_t)n * 8);
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i])
            fail_msg("%s[%lld] of %lld is %lld, expected %lld", what, (long long)i, (long long)n,
                     (long long)got[i], (long long)want[i]);
}

T_CASE(tokens_that_count_are_packed_in_order)
{
    static const int64_t sizes[] = {0, 1, 3, 4095, 4096, 4097, 20000};
    for (int64_t i = 0; i < 42; i++) {
        int64_t tokens = sizes[i % 7], kind = i / 7 % 6;
        double ignored = kind == 0 ? 0 : kind == 1 ? 1 : 0.4;
        int64_t rows = kind < 3 ? tokens : kind == 3 ? tokens / 3 : kind == 4 ? 0 : tokens - 1;
        T_ENDS(packing_free) packing_t p;
        packing_init(&p, tokens, rows < 0 ? 0 : rows, 1 + i % 3, ignored, kind == 2 ? 0.3 : 0.05);
        assert_ok(gpu_loss()->rows_compact(&p.r, NULL));
        compare_words(p.r.row_of, p.row_of, tokens, "row_of");
        compare_words(p.r.token_of, p.token_of, p.r.rows, "token_of");
        compare_words(p.r.row_targets, p.row_targets, p.r.rows, "row_targets");
        compare_words(p.r.counts, p.counts, 3, "counts");
    }
}

/* ---- per-token values ---- */

T_CASE(values_go_to_rows_and_back)
{
    for (int i = 0; i < 24; i++) {
        const colo_dtype_t dtype = i % 2 ? COLO_F64 : COLO_F32;
        const int64_t tokens = 700;
        T_ENDS(packing_free) packing_t p;
        packing_init(&p, tokens, i % 3 ? tokens : 200, 1, i == 5 ? 1 : 0.3, 0.1);
        assert_ok(gpu_loss()->rows_compact(&p.r, NULL));
        void *from[2], *rows[3], *back[3], *correct = gpu_put(NULL, (size_t)p.r.rows),
                                           *spread = gpu_put(NULL, (size_t)tokens),
                                           *n[2] = {gpu_put(NULL, 8), gpu_put(NULL, 8)};
        double *v[2] = {draw(dtype, tokens, &from[0]), draw(dtype, tokens, &from[1])};
        const size_t elem = colo_dtype_size(dtype);
        for (int k = 0; k < 3; k++) {
            rows[k] = gpu_put(NULL, (size_t)p.r.rows * elem);
            back[k] = gpu_put(NULL, (size_t)tokens * elem);
        }
        const double factor[3] = {2, -0.5, 3};
        const bool mean = i / 6 % 2;
        struct colo_linear_upstream_rows u = {.rows = &p.r,
                                              .dtype = dtype,
                                              .from = {from[0], NULL, from[1]},
                                              .factor = {factor[0], factor[1], factor[2]},
                                              .to = {rows[0], rows[1], i % 4 ? rows[2] : NULL},
                                              .mean = mean};
        assert_ok(gpu_loss()->rows_upstream(&u, NULL));
        for (int k = 0; k < (i % 4 ? 3 : 2); k++) {
            COLO_AUTOFREE void *got = fetch(rows[k], (size_t)p.r.rows * elem);
            for (int64_t r = 0; r < p.r.rows; r++) {
                double want = 0, valid = (double)p.counts[COLO_LINEAR_VALID];
                if (p.token_of[r] >= 0)
                    want = factor[k] * (k == 1 ? 1 : v[k / 2][p.token_of[r]]);
                if (mean)
                    want = valid > 0 ? want / valid : 0;
                if (loss_load(dtype, got, r) != loss_round(dtype, want))
                    fail_msg("case %d: upstream %d of row %d is %.9g, expected %.9g", i, k, (int)r,
                             loss_load(dtype, got, r), want);
            }
        }
        assert_cuda(cudaMemset(correct, 1, (size_t)p.r.rows + 1));
        struct colo_linear_scatter s = {
            .rows = &p.r,
            .dtype = dtype,
            .from = {.logp = rows[0], .entropy = rows[1], .correct = correct},
            .to = {.logp = back[0],
                   .entropy = back[1],
                   .correct = spread,
                   .n_valid = n[0],
                   .n_invalid = n[1]}};
        assert_ok(gpu_loss()->rows_scatter(&s, NULL));
        uint8_t *ones = fetch(spread, (size_t)tokens);
        for (int k = 0; k < 2; k++) {
            COLO_AUTOFREE void *got = fetch(back[k], (size_t)tokens * elem),
                               *row = fetch(rows[k], (size_t)p.r.rows * elem);
            for (int64_t t = 0; t < tokens; t++) {
                double g = loss_load(dtype, got, t);
                bool ok = p.row_of[t] >= 0    ? g == loss_load(dtype, row, p.row_of[t])
                          : p.row_of[t] == -1 ? g == 0
                                              : isnan(g);
                if (!ok || ones[t] != (p.row_of[t] >= 0))
                    fail_msg("case %d: value %d of token %d in row %d is %g, correct %d", i, k,
                             (int)t, (int)p.row_of[t], g, ones[t]);
            }
        }
        compare_words(n[0], &p.counts[COLO_LINEAR_VALID], 1, "n_valid");
        compare_words(n[1], &p.counts[COLO_LINEAR_INVALID], 1, "n_invalid");
        free(ones);
        for (int k = 0; k < 3; k++) {
            gpu_free(rows[k]);
            gpu_free(back[k]);
        }
        for (int k = 0; k < 2; k++) {
            gpu_free(from[k]);
            gpu_free(n[k]);
            free(v[k]);
        }
        gpu_free(correct);
        gpu_free(spread);
    }
}

/* ---- hidden rows ---- */

T_CASE(hidden_rows_are_taken_put_and_cleared)
{
    for (int i = 0; i < 32; i++) {
        const colo_dtype_t dtype = floats[i % 4];
        const int64_t elem = (int64_t)colo_dtype_size(dtype), tokens = 90, hidden = 1 + i * 5 % 67,
                      stride = hidden + i % 3 * 3, shift = i / 4 % 3;
        T_ENDS(packing_free) packing_t p;
        packing_init(&p, tokens, i % 2 ? tokens : 30, 1, 0.3, 0.1);
        assert_ok(gpu_loss()->rows_compact(&p.r, NULL));
        void *far, *taken = gpu_put(NULL, (size_t)(p.r.rows * hidden * elem)), *to;
        COLO_AUTOFREE double *v = draw(dtype, tokens * stride + shift, &far);
        const size_t bytes = (size_t)((tokens * stride + shift) * elem);
        to = gpu_put(NULL, bytes);
        struct colo_linear_matrix from = {(char *)far + shift * elem, stride, dtype},
                                  dest = {(char *)to + shift * elem, stride, dtype};
        const int64_t half = p.r.rows / 2;
        struct colo_linear_move first = {&p.r, 0, half, hidden, from, taken},
                                second = {&p.r,   half, p.r.rows,
                                          hidden, from, (char *)taken + half * hidden * elem};
        assert_ok(gpu_loss()->rows_gather(&first, NULL));
        assert_ok(gpu_loss()->rows_gather(&second, NULL));
        void *got = fetch(taken, (size_t)(p.r.rows * hidden * elem));
        for (int64_t r = 0; r < p.r.rows; r++)
            for (int64_t k = 0; k < hidden; k++) {
                double want = p.token_of[r] < 0 ? 0 : v[shift + p.token_of[r] * stride + k];
                if (loss_load(dtype, got, r * hidden + k) != want)
                    fail_msg("case %d: row %d, element %d", i, (int)r, (int)k);
            }
        free(got);
        first.tokens = second.tokens = dest;
        assert_ok(gpu_loss()->rows_restore(&first, NULL));
        assert_ok(gpu_loss()->rows_restore(&second, NULL));
        assert_ok(gpu_loss()->rows_clear(&first, NULL));
        COLO_AUTOFREE unsigned char *all = fetch(to, bytes);
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t k = 0; k < stride; k++) {
                const int64_t index = shift + t * stride + k;
                double g = loss_load(dtype, all, index);
                bool ok = k >= hidden         ? all[index * elem] == 0xa5
                          : p.row_of[t] >= 0  ? g == v[index]
                          : p.row_of[t] == -1 ? g == 0
                                              : isnan(g);
                if (!ok)
                    fail_msg("case %d: token %d (row %d), element %d is %g", i, (int)t,
                             (int)p.row_of[t], (int)k, g);
            }
        gpu_free(far);
        gpu_free(taken);
        gpu_free(to);
    }
}

/* ---- sums and conversions ---- */

T_CASE(rows_are_summed)
{
    for (int i = 0; i < 32; i++) {
        const colo_dtype_t dtype = floats[i % 4], sum = dtype == COLO_F64 ? COLO_F64 : COLO_F32;
        const int64_t rows = i * 37 % 131, columns = 1 + i * 53 % 401, step = 1 + i % 2,
                      stride = (columns + 15) / 16 * 16 + (i / 4 % 2 ? 1 : 0);
        const double beta = i / 8 % 2;
        void *z, *to;
        COLO_AUTOFREE double *v = draw(dtype, rows * stride, &z),
                             *was = draw(sum, columns * step, &to);
        static const float factor = 0.3F;
        GPU_AUTOFREE float *scale = i / 16 % 2 ? gpu_put(&factor, sizeof factor) : NULL;
        const struct colo_linear_sum pass = {
            {z, stride, dtype}, rows, columns, scale, to, step, beta};
        assert_ok(gpu_loss()->rows_sum(&pass, NULL));
        COLO_AUTOFREE void *got = fetch(to, (size_t)(columns * step) * colo_dtype_size(sum));
        for (int64_t j = 0; j < columns * step; j++) {
            double want = was[j], size = fabs(want);
            if (j % step == 0) {
                want = beta * was[j];
                for (int64_t r = 0; r < rows; r++) {
                    want += (scale ? (double)factor : 1) * v[r * stride + j / step];
                    size += fabs(v[r * stride + j / step]);
                }
            }
            /* rows + 2 additions, each within half an ulp of a partial sum below size */
            double most = (double)(rows + 2) * (sum == COLO_F64 ? 0x1p-53 : 0x1p-24) * size;
            double g = loss_load(sum, got, j);
            if (!(fabs(g - want) <= most) || (j % step && g != want))
                fail_msg("case %d: column %d is %.9g, expected %.9g", i, (int)j, g, want);
        }
        gpu_free(z);
        gpu_free(to);
    }
}

T_CASE(dtypes_are_converted_with_one_rounding)
{
    for (int i = 0; i < 64; i++) {
        const colo_dtype_t a = floats[i % 4], b = floats[i / 4 % 4];
        const int64_t rows = 1 + i % 5, columns = i % 3 ? 12 + 4 * (i % 7) : 7 + i,
                      from_stride = i % 11 == 0 ? 0 : columns + 4, to_stride = columns + 8;
        void *from, *to = gpu_put(NULL, (size_t)(rows * to_stride) * colo_dtype_size(b));
        COLO_AUTOFREE double *v = draw(a, rows * (columns + 4), &from);
        const struct colo_linear_convert pass = {
            {to, to_stride, b}, {from, from_stride, a}, rows, columns};
        assert_ok(gpu_loss()->rows_convert(&pass, NULL));
        COLO_AUTOFREE unsigned char *got =
            fetch(to, (size_t)(rows * to_stride) * colo_dtype_size(b));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < to_stride; j++) {
                const int64_t index = r * to_stride + j;
                bool ok = j < columns
                              ? loss_load(b, got, index) == loss_round(b, v[r * from_stride + j])
                              : got[index * (int64_t)colo_dtype_size(b)] == 0xa5;
                if (!ok)
                    fail_msg("%s to %s: row %d, column %d", colo_dtype_name(a), colo_dtype_name(b),
                             (int)r, (int)j);
            }
        gpu_free(from);
        gpu_free(to);
    }
}

/* ---- products ---- */

static const float scales[COLO_LINEAR_SCALE] = {0.3F, 0, 1};
static const struct colo_linear_shape any; /* nothing is pinned */

static void product_init(product_case_t *p, enum colo_linear_product what, colo_dtype_t dtype,
                         colo_dtype_t out, const int64_t n[3], int64_t gap, bool bias, double beta)
{
    const colo_dtype_t sum = dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    product_case_init(p, what, dtype, what == COLO_LINEAR_D_WEIGHT && beta != 0 ? sum : out, n, gap,
                      (n[1] + 63) / 64 * 64 + gap % 2, bias, &rng);
    p->g.beta = beta;
}

T_CASE(products_are_what_their_formulas_say)
{
    void *made = NULL, *workspace, *scale = gpu_put(scales, sizeof scales);
    assert_ok(gpu_loss()->gemm->create(&any, &made));
    workspace = gpu_put(NULL, (size_t)gpu_loss()->gemm->workspace(made));
    for (int i = 0; i < 180; i++) {
        const enum colo_linear_product what = (enum colo_linear_product)(i % 3);
        const colo_dtype_t dtype = floats[i / 3 % 4];
        const bool wide = i / 12 % 2, logits = what == COLO_LINEAR_LOGITS,
                   bias = logits && i / 24 % 2;
        const colo_dtype_t out = wide && dtype != COLO_F64 ? COLO_F32 : dtype;
        int64_t n[3];
        for (int k = 0; k < 3; k++)
            n[k] = i < 90 ? 8 * (1 + t_below(&rng, 20)) : 1 + t_below(&rng, 100);
        if (i % 17 == 0)
            n[i / 17 % 2] = 0; /* no rows, or no columns */
        T_ENDS(product_case_free) product_case_t p;
        product_init(&p, what, dtype, out, n, i < 90 ? 0 : t_below(&rng, 9), bias,
                     !logits && i / 48 % 2);
        p.g.workspace = workspace;
        if (what != COLO_LINEAR_LOGITS && (dtype == COLO_BF16 || dtype == COLO_F16) && i / 6 % 2)
            p.g.scale = scale, p.scale = (double)scales[0];
        if (what == COLO_LINEAR_D_HIDDEN && i < 90 && p.g.beta == 0) /* a gap has to stay; NaN must
                                                                      * not count */
            assert_cuda(
                cudaMemset(p.g.h.data, 0xff, (size_t)(n[0] * n[2]) * colo_dtype_size(p.g.h.dtype)));
        const char *label = t_text("product %d of %s to %s, %d rows, %d columns, hidden %d%s",
                                   (int)what, colo_dtype_name(dtype), colo_dtype_name(out),
                                   (int)n[0], (int)n[1], (int)n[2], bias ? ", bias" : "");
        colo_status_t st = gpu_loss()->gemm->run(made, &p.g, NULL);
        if (st < 0)
            fail_msg("%s: %s", label, colo_last_error());
        product_case_compare(&p, (double)(p.terms + 2) * (dtype == COLO_F64 ? 0x1p-53 : 0x1p-24),
                             label);
    }
    gpu_free(workspace);
    gpu_free(scale);
    gpu_loss()->gemm->destroy(made);
}

/* Rows [from, from + n) alone against the same rows of all. */
T_CASE(a_rows_bits_do_not_depend_on_its_company)
{
    static const int64_t cut[][2] = {{0, 1}, {5, 3}, {100, 1100}, {2047, 2}, {0, 2048}};
    void *made = NULL, *workspace;
    assert_ok(gpu_loss()->gemm->create(&any, &made));
    workspace = gpu_put(NULL, (size_t)gpu_loss()->gemm->workspace(made));
    for (int i = 0; i < 10; i++) {
        const enum colo_linear_product what = i % 2 ? COLO_LINEAR_D_HIDDEN : COLO_LINEAR_LOGITS;
        const colo_dtype_t dtype = i / 2 % 2 ? COLO_F32 : COLO_BF16;
        T_ENDS(product_case_free) product_case_t p;
        product_init(&p, what, dtype, dtype, (int64_t[]){3000, 1000, 512}, 0, false, 0);
        p.g.workspace = workspace;
        assert_ok(gpu_loss()->gemm->run(made, &p.g, NULL));
        const struct colo_linear_matrix *m = p.to;
        const int64_t elem = (int64_t)colo_dtype_size(dtype), pitch = m->stride * elem,
                      rows = p.rows;
        COLO_AUTOFREE unsigned char *all = fetch(m->data, (size_t)(rows * pitch));
        struct colo_linear_gemm part = p.g;
        part.rows = cut[i / 2][1];
        part.h.data = (char *)p.g.h.data + cut[i / 2][0] * p.g.h.stride * elem;
        part.z.data = (char *)p.g.z.data + cut[i / 2][0] * p.g.z.stride * elem;
        assert_cuda(cudaMemset(m->data, 0xa5, (size_t)(rows * pitch)));
        assert_ok(gpu_loss()->gemm->run(made, &part, NULL));
        COLO_AUTOFREE unsigned char *some = fetch(m->data, (size_t)(rows * pitch));
        for (int64_t r = cut[i / 2][0]; r < cut[i / 2][0] + part.rows; r++)
            if (memcmp(all + r * pitch, some + r * pitch, (size_t)(p.columns * elem)) != 0)
                fail_msg("product %d of %s: row %d differs when it comes with %d rows", (int)what,
                         colo_dtype_name(dtype), (int)r, (int)part.rows);
    }
    gpu_free(workspace);
    gpu_loss()->gemm->destroy(made);
}

T_CASE(host_memory_is_refused)
{
    T_ENDS(packing_free) packing_t p;
    int64_t host[4] = {0};
    packing_init(&p, 4, 4, 1, 0.5, 0);
    struct colo_linear_rows r = p.r;
    r.targets = host;
    assert_fails(gpu_loss()->rows_compact(&r, NULL), COLO_ERR_ARG, "targets");
    const struct colo_linear_move move = {&p.r, 0, 4, 1, {host, 1, COLO_F32}, p.device[1]};
    assert_fails(gpu_loss()->rows_gather(&move, NULL), COLO_ERR_ARG, "hidden");
    assert_fails(gpu_loss()->rows_clear(&move, NULL), COLO_ERR_ARG, "d_hidden");
}

T_MAIN_AFTER(gpu_need(1), rng = t_seed(), "gpu/rows")
