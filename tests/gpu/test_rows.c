/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_rows.c - the CUDA table of the lm_head path: packing, per-token values, hidden rows and
 * conversions against the host's, which the oracle judges in tests/loss; sums against plain loops,
 * products within the error of fp32 accumulation, also those of few rows and of a large d_weight,
 * and a row's product the same bits whatever rows it comes with.
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

/* ---- rows: both tables do the same to memory that was the same ---- */

static const colo_loss_kernels_t *of[2]; /* the host's table and the GPU's */

static struct array {
    unsigned char *at[2];
    int64_t n;
    colo_dtype_t dtype;
} arrays[32];
static int count;

/* @n numbers of @from, or drawn ones, or 0xa5 everywhere; the next array. */
static int array(colo_dtype_t dtype, int64_t n, const void *from, bool drawn)
{
    const size_t bytes = (size_t)n * colo_dtype_size(dtype);
    assert_true(count < (int)(sizeof arrays / sizeof *arrays));
    struct array *t = &arrays[count];
    *t = (struct array){.n = n, .dtype = dtype, .at[0] = malloc(bytes + 1)};
    memset(t->at[0], 0xa5, bytes);
    if (from)
        memcpy(t->at[0], from, bytes);
    for (int64_t i = 0; i < n && drawn; i++)
        loss_store(dtype, t->at[0], i, loss_round(dtype, 2 * t_uniform(&rng) - 1));
    t->at[1] = gpu_put(t->at[0], bytes);
    return count++;
}

static void *on(int side, int nth, int64_t first)
{
    return arrays[nth].at[side] + first * (int64_t)colo_dtype_size(arrays[nth].dtype);
}

/* Numbers are equal but for @units roundings; drops all arrays. */
static void same(const char *what, int nth, double units)
{
    for (int k = 0; k < count; k++) {
        const struct array *t = &arrays[k];
        const size_t bytes = (size_t)t->n * colo_dtype_size(t->dtype);
        const double u = units * (t->dtype == COLO_F64 ? 0x1p-53 : 0x1p-24);
        COLO_AUTOFREE unsigned char *got = fetch(t->at[1], bytes);
        for (int64_t i = 0; i < t->n && memcmp(got, t->at[0], bytes) != 0; i++) {
            const bool number = colo_dtype_is_float(t->dtype);
            const double g = number ? loss_load(t->dtype, got, i) : 0,
                         want = number ? loss_load(t->dtype, t->at[0], i) : 0;
            const size_t elem = colo_dtype_size(t->dtype), byte = (size_t)i * elem;
            if (number ? !near(g, want, u * fabs(want))
                       : memcmp(got + byte, t->at[0] + byte, elem) != 0)
                fail_msg("%s, case %d: element %lld of array %d is %.9g, the host's is %.9g", what,
                         nth, (long long)i, k, g, want);
        }
        free(t->at[0]);
        gpu_free(t->at[1]);
    }
    count = 0;
}

/* Tokens packed by both tables. */
static void pack(struct colo_linear_rows r[2], int64_t tokens, int64_t rows, int64_t stride,
                 double ignored, double invalid)
{
    const int64_t ignore = -100, vocab = 50, n = tokens * stride;
    COLO_AUTOFREE int64_t *targets = malloc((size_t)(n + 1) * sizeof *targets);
    for (int64_t i = 0; i < n; i++) {
        const double u = t_uniform(&rng);
        targets[i] = i % stride              ? 7 /* between tokens: not to be read */
                     : u < ignored           ? ignore
                     : u < ignored + invalid ? vocab + t_below(&rng, 9)
                                             : t_below(&rng, vocab);
    }
    const int all[] = {array(COLO_I64, n, targets, false), array(COLO_I64, tokens, NULL, false),
                       array(COLO_I64, rows, NULL, false), array(COLO_I64, rows, NULL, false),
                       array(COLO_I64, COLO_LINEAR_COUNTS, NULL, false)};
    for (int side = 0; side < 2; side++) {
        r[side] = (struct colo_linear_rows){.tokens = tokens,
                                            .rows = rows,
                                            .targets = on(side, all[0], 0),
                                            .target_stride = stride,
                                            .ignore_index = ignore,
                                            .vocab = vocab,
                                            .row_of = on(side, all[1], 0),
                                            .token_of = on(side, all[2], 0),
                                            .row_targets = on(side, all[3], 0),
                                            .counts = on(side, all[4], 0)};
        assert_ok(of[side]->rows_compact(&r[side], NULL));
    }
}

T_CASE(tokens_that_count_are_packed_in_order)
{
    static const int64_t sizes[] = {0, 1, 3, 4095, 4096, 4097, 20000};
    for (int i = 0; i < 42; i++) {
        int64_t tokens = sizes[i % 7], kind = i / 7 % 6;
        double ignored = kind == 0 ? 0 : kind == 1 ? 1 : 0.4;
        int64_t rows = kind < 3 ? tokens : kind == 3 ? tokens / 3 : kind == 4 ? 0 : tokens - 1;
        struct colo_linear_rows r[2];
        pack(r, tokens, rows < 0 ? 0 : rows, 1 + i % 3, ignored, kind == 2 ? 0.3 : 0.05);
        same("packing", i, 0);
    }
}

T_CASE(values_go_to_rows_and_back)
{
    for (int i = 0; i < 24; i++) {
        const colo_dtype_t dtype = i % 2 ? COLO_F64 : COLO_F32;
        const int64_t tokens = 700, rows = i % 3 ? tokens : 200;
        const bool mean = i / 6 % 2;
        COLO_AUTOFREE uint8_t *ones = memset(malloc((size_t)rows), 1, (size_t)rows);
        struct colo_linear_rows r[2];
        pack(r, tokens, rows, 1, i == 5 ? 1 : 0.3, 0.1);
        int from[2], row[4], back[2], n[2];
        COLO_AUTOFREE int64_t *ids = malloc((size_t)rows * sizeof *ids);
        for (int64_t k = 0; k < rows; k++)
            ids[k] = 7 * k;
        const int correct = array(COLO_U8, rows, ones, false),
                  spread = array(COLO_U8, tokens, NULL, false),
                  argmax = array(COLO_I64, rows, ids, false),
                  found = array(COLO_I64, tokens, NULL, false),
                  lse = array(dtype, tokens, NULL, false);
        for (int k = 0; k < 4; k++) {
            row[k] = array(dtype, rows, NULL, false);
            if (k > 1)
                continue;
            from[k] = array(dtype, tokens, NULL, true);
            back[k] = array(dtype, tokens, NULL, false);
            n[k] = array(COLO_I64, 1, NULL, false);
        }
        for (int s = 0; s < 2; s++) {
            struct colo_linear_upstream_rows u = {
                .rows = &r[s],
                .dtype = dtype,
                .from = {on(s, from[0], 0), NULL, on(s, from[1], 0), on(s, from[0], 0)},
                .factor = {2, -0.5, 3, 0.75},
                .to = {on(s, row[0], 0), on(s, row[1], 0), i % 4 ? on(s, row[2], 0) : NULL,
                       on(s, row[3], 0)},
                .mean = mean};
            assert_ok(of[s]->rows_upstream(&u, NULL));
            struct colo_linear_scatter scatter = {.rows = &r[s],
                                                  .dtype = dtype,
                                                  .from = {.logp = on(s, row[0], 0),
                                                           .entropy = on(s, row[1], 0),
                                                           .correct = on(s, correct, 0),
                                                           .argmax = on(s, argmax, 0),
                                                           .lse = on(s, row[3], 0)},
                                                  .to = {.logp = on(s, back[0], 0),
                                                         .entropy = on(s, back[1], 0),
                                                         .correct = on(s, spread, 0),
                                                         .argmax = on(s, found, 0),
                                                         .lse = on(s, lse, 0),
                                                         .n_valid = on(s, n[0], 0),
                                                         .n_invalid = on(s, n[1], 0)}};
            assert_ok(of[s]->rows_scatter(&scatter, NULL));
        }
        same("values", i, mean ? 4 : 0); /* a product and a quotient in either order */
    }
}

T_CASE(hidden_rows_are_taken_put_and_cleared)
{
    for (int i = 0; i < 32; i++) {
        const colo_dtype_t dtype = floats[i % 4];
        const int64_t tokens = 90, hidden = 1 + i * 5 % 67, stride = hidden + i % 3 * 3,
                      shift = i / 4 % 3, rows = i % 2 ? tokens : 30, half = rows / 2;
        struct colo_linear_rows r[2];
        pack(r, tokens, rows, 1, 0.3, 0.1);
        const int far = array(dtype, tokens * stride + shift, NULL, true),
                  taken = array(dtype, rows * hidden, NULL, false),
                  to = array(dtype, tokens * stride + shift, NULL, false);
        for (int s = 0; s < 2; s++) {
            const struct colo_linear_matrix from = {on(s, far, shift), stride, dtype},
                                            dest = {on(s, to, shift), stride, dtype};
            struct colo_linear_move first = {&r[s], 0, half, hidden, from, on(s, taken, 0)},
                                    second = {&r[s],  half, rows,
                                              hidden, from, on(s, taken, half * hidden)};
            assert_ok(of[s]->rows_gather(&first, NULL));
            assert_ok(of[s]->rows_gather(&second, NULL));
            first.tokens = second.tokens = dest;
            assert_ok(of[s]->rows_restore(&first, NULL));
            assert_ok(of[s]->rows_restore(&second, NULL));
            assert_ok(of[s]->rows_clear(&first, NULL));
        }
        same("hidden rows", i, 0);
    }
}

T_CASE(dtypes_are_converted_with_one_rounding)
{
    for (int i = 0; i < 64; i++) {
        const colo_dtype_t a = floats[i % 4], b = floats[i / 4 % 4];
        const int64_t rows = 1 + i % 5, columns = i % 3 ? 12 + 4 * (i % 7) : 7 + i,
                      from_stride = i % 11 == 0 ? 0 : columns + 4, to_stride = columns + 8;
        const int from = array(a, rows * (columns + 4), NULL, true),
                  to = array(b, rows * to_stride, NULL, false);
        for (int s = 0; s < 2; s++) {
            const struct colo_linear_convert pass = {
                {on(s, to, 0), to_stride, b}, {on(s, from, 0), from_stride, a}, rows, columns};
            assert_ok(of[s]->rows_convert(&pass, NULL));
        }
        same(t_text("%s to %s", colo_dtype_name(a), colo_dtype_name(b)), i, 0);
    }
}

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
                     !bias && i / 48 % 2);
        p.g.workspace = workspace;
        if (what != COLO_LINEAR_LOGITS && (dtype == COLO_BF16 || dtype == COLO_F16) && i / 6 % 2)
            p.g.scale = scale, p.scale = (double)scales[0];
        else if (!bias)
            p.g.factor = i % 5 ? 1 : -0.75;
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
        /* cuBLASLt's sums are of fp32, but whether a kernel rounds one to 16 bits before it adds it
         * to what is there is its own matter (seen: bf16 in 64 rows, 104 columns, hidden 32). A
         * bias that no kernel adds is there. */
        product_case_compare(&p, (double)(p.terms + 2) * (dtype == COLO_F64 ? 0x1p-53 : 0x1p-24),
                             p.g.beta != 0 || bias, label);
    }
    gpu_free(workspace);
    gpu_free(scale);
    gpu_loss()->gemm->destroy(made);
}

/* A pass of few rows: d_hidden's sum over the columns is cut into parts, by the rows of the pass,
 * not of the product. A part adds at most terms + 2 roundings, the parts at most 8 more. */
T_CASE(sums_of_a_pass_of_few_rows_are_right_and_know_no_chunks)
{
    void *made = NULL, *workspace, *scale = gpu_put(scales, sizeof scales);
    int differ = 0;
    assert_ok(gpu_loss()->gemm->create(&any, &made));
    workspace = gpu_put(NULL, (size_t)gpu_loss()->gemm->workspace(made));
    for (int i = 0; i < 24; i++) {
        const colo_dtype_t dtype = i % 2 ? COLO_F16 : COLO_BF16, out = i / 2 % 2 ? COLO_F32 : dtype;
        const int64_t all = 40 + t_below(&rng, 60), rows = i % 6 ? all : 1 + t_below(&rng, 30),
                      columns = 2048 + t_below(&rng, 8000);
        T_ENDS(product_case_free) product_case_t p;
        product_init(&p, COLO_LINEAR_D_HIDDEN, dtype, out,
                     (int64_t[]){rows, columns, 8 * (1 + t_below(&rng, 6))}, i % 5 == 4 ? 3 : 0,
                     false, i / 4 % 2);
        p.g.workspace = workspace;
        p.g.all = all;
        if (i / 8 % 2)
            p.g.scale = scale, p.scale = (double)scales[0];
        else
            p.g.factor = -0.75;
        const char *label =
            t_text("%s to %s, %d of %d rows, %d columns, beta %g", colo_dtype_name(dtype),
                   colo_dtype_name(out), (int)rows, (int)all, (int)columns, p.g.beta);
        colo_status_t st = gpu_loss()->gemm->run(made, &p.g, NULL);
        if (st < 0)
            fail_msg("%s: %s", label, colo_last_error());
        product_case_compare(&p, (double)(columns + 10) * 0x1p-24, false, label);
        if (p.g.beta != 0 || i % 5 == 4)
            continue;
        const int64_t pitch = p.g.h.stride * (int64_t)colo_dtype_size(out),
                      from = rows / 3 / 2 * 2; /* aligned as row 0 is */
        COLO_AUTOFREE unsigned char *whole = fetch(p.g.h.data, (size_t)(rows * pitch));
        struct colo_linear_gemm part = p.g;
        part.rows = rows - from;
        part.h.data = (char *)p.g.h.data + from * pitch;
        part.z.data = (char *)p.g.z.data + from * p.g.z.stride * 2;
        assert_ok(gpu_loss()->gemm->run(made, &part, NULL));
        COLO_AUTOFREE unsigned char *chunk = fetch(p.g.h.data, (size_t)(rows * pitch));
        if (memcmp(whole, chunk, (size_t)(rows * pitch)) != 0)
            fail_msg("%s: rows from %d on alone have other bits", label, (int)from);
        part = p.g;
        part.all = 0;
        assert_ok(gpu_loss()->gemm->run(made, &part, NULL));
        COLO_AUTOFREE unsigned char *sum = fetch(p.g.h.data, (size_t)(rows * pitch));
        differ += out == COLO_F32 && memcmp(whole, sum, (size_t)(rows * pitch)) != 0;
    }
    assert_true(differ > 0); /* sums were cut */
    gpu_free(workspace);
    gpu_free(scale);
    gpu_loss()->gemm->destroy(made);
}

/* A d_weight with as many tiles as run at a time is made by a kernel of ours on Hopper; one that is
 * not aligned, by cuBLASLt. */
T_CASE(large_gradients_of_a_weight_are_what_their_formula_says)
{
    static const struct colo_linear_shape shape = {
        .dtype = COLO_BF16, .columns = 17000, .hidden = 264};
    void *made = NULL, *workspace, *scale = gpu_put(scales, sizeof scales);
    assert_ok(gpu_loss()->gemm->create(&shape, &made));
    workspace = gpu_put(NULL, (size_t)gpu_loss()->gemm->workspace(made));
    for (int i = 0; i < 9; i++) {
        static const int64_t rows[] = {1, 64, 70, 131};
        const colo_dtype_t dtype = i % 2 ? COLO_F16 : COLO_BF16, out = i % 3 < 2 ? COLO_F32 : dtype;
        T_ENDS(product_case_free) product_case_t p;
        product_init(&p, COLO_LINEAR_D_WEIGHT, dtype, out,
                     (int64_t[]){rows[i % 4], 16896 + t_below(&rng, 100), i % 4 ? 264 : 256},
                     i == 8 ? 3 : i % 2 * 8, false, i % 3 == 0);
        p.g.workspace = workspace;
        if (i % 2)
            p.g.scale = scale, p.scale = (double)scales[0];
        else
            p.g.factor = -0.75;
        const char *label = t_text("%s to %s, %d rows, beta %g", colo_dtype_name(dtype),
                                   colo_dtype_name(out), (int)p.g.rows, p.g.beta);
        colo_status_t st = gpu_loss()->gemm->run(made, &p.g, NULL);
        if (st < 0)
            fail_msg("%s: %s", label, colo_last_error());
        product_case_compare(&p, (double)(p.terms + 4) * 0x1p-24, false, label);
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
    int64_t host[4] = {0};
    struct colo_linear_rows r[2];
    pack(r, 4, 4, 1, 0.5, 0);
    const struct colo_linear_move move = {&r[1], 0, 4, 1, {host, 1, COLO_F32}, r[1].row_of};
    assert_fails(of[1]->rows_gather(&move, NULL), COLO_ERR_ARG, "hidden");
    assert_fails(of[1]->rows_clear(&move, NULL), COLO_ERR_ARG, "d_hidden");
    r[1].targets = host;
    assert_fails(of[1]->rows_compact(&r[1], NULL), COLO_ERR_ARG, "targets");
    same("packing", 0, 0);
}

T_MAIN_AFTER(gpu_need(1), (rng = t_seed(), of[0] = &colo_loss_host, of[1] = gpu_loss()), "gpu/rows")
