/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_product.c - products in host memory by a CBLAS and by loops: shapes that end in the middle
 * of a block, every dtype, rows of a pass that come in any company; and which CBLAS is believed.
 *
 * Tolerance, with u of the sums (2^-24; 2^-53 for f64): blocks of 128 terms are added in fp64, so
 * an element is off by at most (min(k, 128) + 2) u sum |a b| (k terms for f64), and one rounding to
 * the dtype of what is written.
 */
#include "harness/harness.h"

#include "core/half.h"
#include "loss/linear/linear.h"

#include <dlfcn.h>
#include <math.h>

/* Libraries made of odd_cblas.c are in T_CBLAS_DIR. */
static const char *cblas(const char *name)
{
    static char path[1000];
    snprintf(path, sizeof path, "%s/lib%s_cblas.so", getenv("T_CBLAS_DIR"), name);
    return path;
}

static int ways(void)
{
    return getenv("T_CBLAS_DIR") ? 3 : 2;
}

static const char *way(int w)
{
    return w == 0 ? "loops" : w == 1 ? "auto" : cblas("odd");
}

#ifndef NO_CBLAS
#define NO_CBLAS 0 /* 1: built with -Dcblas=disabled */
#endif
#define HAS_ODD (!NO_CBLAS && getenv("T_CBLAS_DIR"))

static uint64_t rng;

static double get(colo_dtype_t dtype, const void *p, int64_t i)
{
    return dtype == COLO_F64    ? ((const double *)p)[i]
           : dtype == COLO_F32  ? (double)((const float *)p)[i]
           : dtype == COLO_BF16 ? (double)colo_bf16_to_f32(((const uint16_t *)p)[i])
                                : (double)colo_f16_to_f32(((const uint16_t *)p)[i]);
}

static struct colo_linear_matrix draw(colo_dtype_t dtype, int64_t rows, int64_t stride)
{
    const int64_t n = rows * stride;
    unsigned char *p = calloc((size_t)n + 1, colo_dtype_size(dtype));
    for (int64_t i = 0; i < n; i++) {
        float v = (float)t_uniform(&rng) - 0.5f;
        if (dtype == COLO_F64)
            ((double *)p)[i] = t_uniform(&rng) - 0.5;
        else if (dtype == COLO_F32)
            ((float *)p)[i] = v;
        else
            ((uint16_t *)p)[i] = dtype == COLO_BF16 ? colo_f32_to_bf16(v) : colo_f32_to_f16(v);
    }
    return (struct colo_linear_matrix){p, stride, dtype};
}

/* ---- one product ---- */

static struct colo_linear_gemm make(enum colo_linear_product what, colo_dtype_t dtype,
                                    colo_dtype_t out, int64_t rows, int64_t columns, int64_t hidden,
                                    int64_t gap)
{
    const colo_dtype_t sum = dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    struct colo_linear_gemm g = {
        .product = what, .rows = rows, .columns = columns, .hidden = hidden};
    g.h = draw(dtype, rows, hidden + gap);
    g.w = draw(what == COLO_LINEAR_D_WEIGHT ? sum : dtype, columns, hidden + gap);
    g.z = draw(what == COLO_LINEAR_LOGITS ? out : dtype, rows, columns + gap);
    return g;
}

static void drop(struct colo_linear_gemm *g)
{
    free(g->h.data);
    free(g->w.data);
    free(g->z.data);
    free((void *)(uintptr_t)g->bias);
}

static struct colo_linear_matrix *written(struct colo_linear_gemm *g, int64_t *m, int64_t *n,
                                          int64_t *terms)
{
    const bool w = g->product == COLO_LINEAR_D_WEIGHT, z = g->product == COLO_LINEAR_LOGITS;
    *m = w ? g->columns : g->rows;
    *n = z ? g->columns : g->hidden;
    *terms = z ? g->hidden : w ? g->rows : g->columns;
    return z ? &g->z : w ? &g->w : &g->h;
}

static double term(const struct colo_linear_gemm *g, int64_t i, int64_t j, int64_t k)
{
    switch (g->product) {
    case COLO_LINEAR_LOGITS:
        return get(g->h.dtype, g->h.data, i * g->h.stride + k) *
               get(g->w.dtype, g->w.data, j * g->w.stride + k);
    case COLO_LINEAR_D_HIDDEN:
        return get(g->z.dtype, g->z.data, i * g->z.stride + k) *
               get(g->w.dtype, g->w.data, k * g->w.stride + j);
    default:
        return get(g->z.dtype, g->z.data, k * g->z.stride + i) *
               get(g->h.dtype, g->h.data, k * g->h.stride + j);
    }
}

static colo_status_t run(const char *gemm, struct colo_linear_gemm *g)
{
    const colo_gemm_ops_t *ops = &colo_gemm_host;
    const struct colo_linear_shape shape = {
        .dtype = g->h.dtype, .columns = g->columns, .hidden = g->hidden};
    void *made = NULL;
    setenv("COLO_GEMM", gemm, 1);
    colo_status_t st = ops->create(&shape, &made);
    if (st == COLO_OK) {
        const size_t bytes = (size_t)ops->workspace(made);
        assert_int_equal(bytes % 256, 0);
        unsigned char *work = aligned_alloc(256, bytes + 256);
        memset(work, 0xff, bytes + 256); /* NaN: nothing in it may count */
        g->workspace = work;
        st = ops->run(made, g, NULL);
        for (int i = 0; i < 256; i++)
            assert_int_equal(work[bytes + (size_t)i], 0xff);
        free(work);
    }
    ops->destroy(made);
    unsetenv("COLO_GEMM");
    return st;
}

/* What must come, in fp64, and the sum of magnitudes. */
typedef struct oracle {
    double *want, *size;
} oracle_t;

static oracle_t oracle_of(struct colo_linear_gemm *g, const void *before)
{
    int64_t m, n, terms;
    struct colo_linear_matrix *to = written(g, &m, &n, &terms);
    const size_t all = (size_t)(m * n) + 1;
    const double scale = g->scale ? (double)g->scale[0] : 1;
    oracle_t o = {calloc(all, sizeof(double)), calloc(all, sizeof(double))};
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double want = g->beta != 0 ? get(to->dtype, before, i * to->stride + j) : 0,
                   size = fabs(want);
            if (g->bias)
                want += get(g->h.dtype, g->bias, j);
            for (int64_t k = 0; k < terms; k++) {
                const double t = scale * term(g, i, j, k);
                want += t;
                size += fabs(t);
            }
            o.want[i * n + j] = want;
            o.size[i * n + j] = size;
        }
    return o;
}

static void compare(const char *gemm, struct colo_linear_gemm *g, const void *before,
                    const oracle_t *o)
{
    static const double ulp[COLO_DTYPE_COUNT] = {
        [COLO_F32] = 0x1p-24, [COLO_F64] = 0x1p-53, [COLO_BF16] = 0x1p-8, [COLO_F16] = 0x1p-11};
    int64_t m, n, terms;
    struct colo_linear_matrix *to = written(g, &m, &n, &terms);
    const bool f64 = g->h.dtype == COLO_F64;
    const double u = (f64 ? 0x1p-53 : 0x1p-24) * (double)((f64 || terms < 128 ? terms : 128) + 2);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < to->stride; j++) {
            const int64_t index = i * to->stride + j;
            const double got = get(to->dtype, to->data, index);
            if (j >= n) {
                if (got != get(to->dtype, before, index))
                    fail_msg("%s: the gap at [%d, %d] was written", gemm, (int)i, (int)j);
                continue;
            }
            const double want = o->want[i * n + j], size = o->size[i * n + j];
            const double most = u * size + ulp[to->dtype] * (fabs(want) + u * size) +
                                (to->dtype == COLO_F16 ? 0x1p-25 : 0) +
                                (f64 ? (double)terms * 0x1p-53 * size : 0); /* the oracle's own */
            if (!(fabs(got - want) <= most))
                fail_msg(
                    "%s: product %d of %s, %d rows from %d, %d columns, hidden %d: [%d, %d] is "
                    "%.9g, expected %.9g +- %.2g",
                    gemm, (int)g->product, colo_dtype_name(g->h.dtype), (int)g->rows, (int)g->first,
                    (int)g->columns, (int)g->hidden, (int)i, (int)j, got, want, most);
        }
}

/* rows, columns, hidden: around the edges of blocks of 64, 128 and 512, and nothing at all */
static const int64_t shapes[][3] = {{1, 1, 1},     {3, 7, 5},     {128, 512, 128}, {129, 513, 129},
                                    {127, 65, 63}, {300, 3, 130}, {5, 1025, 2},    {2, 9, 600},
                                    {0, 9, 4},     {9, 0, 4},     {9, 4, 0},       {257, 130, 40}};

static void check_product(int nth, enum colo_linear_product what, colo_dtype_t dtype,
                          const int64_t n[3])
{
    const colo_dtype_t out = nth % 2 && dtype != COLO_F64 ? COLO_F32 : dtype;
    struct colo_linear_gemm g = make(what, dtype, out, n[0], n[1], n[2], nth % 3);
    int64_t m, width, terms;
    struct colo_linear_matrix *to = written(&g, &m, &width, &terms);
    const size_t bytes = (size_t)(m * to->stride) * colo_dtype_size(to->dtype);
    void *before = malloc(bytes + 1);
    memcpy(before, to->data, bytes);
    g.first = nth % 5 * 50;
    g.beta = what != COLO_LINEAR_LOGITS && nth % 2;
    const float scale[COLO_LINEAR_SCALE] = {0.3F, 0, 1};
    if (what != COLO_LINEAR_LOGITS && nth % 4 < 2)
        g.scale = scale;
    if (what == COLO_LINEAR_LOGITS && nth % 2)
        g.bias = draw(dtype, n[1], 1).data;
    oracle_t o = oracle_of(&g, before);
    for (int w = 0; w < ways(); w++) {
        memcpy(to->data, before, bytes);
        assert_ok(run(way(w), &g));
        compare(way(w), &g, before, &o);
    }
    free(o.want);
    free(o.size);
    free(before);
    drop(&g);
}

/* ---- which ---- */

struct lines {
    int count;
    char last[1100];
};

static void collect(colo_log_level_t level, const char *line, void *user)
{
    struct lines *l = user;
    l->count++;
    snprintf(l->last, sizeof l->last, "%s", line);
}

static colo_status_t created(const char *gemm)
{
    struct colo_linear_gemm g = make(COLO_LINEAR_LOGITS, COLO_F32, COLO_F32, 1, 1, 1, 0);
    colo_status_t st = run(gemm, &g);
    drop(&g);
    return st;
}

/* First of all: a process is told once. */
T_CASE_IF(HAS_ODD, a_process_is_told_once_which)
{
    struct lines l = {0};
    colo_log_set(collect, &l, COLO_LOG_INFO);
    assert_ok(created("loops"));
    assert_ok(created("auto"));
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    assert_int_equal(l.count, 1);
    assert_string_equal(l.last, "lm_head: products in host memory by loops: COLO_GEMM");
}

T_CASE_IF(HAS_ODD, a_cblas_that_cannot_be_used_is_refused)
{
    assert_fails(created("lops"), COLO_ERR_ARG, "COLO_GEMM is 'lops', expected auto, cblas");
    assert_fails(created(""), COLO_ERR_ARG, "COLO_GEMM is ''");
    assert_fails(created(cblas("no_such")), COLO_ERR_UNBUILT, "cannot be loaded");
    assert_fails(created(cblas("half")), COLO_ERR_UNBUILT, "has no cblas_dgemm");
    assert_fails(created(cblas("wrong")), COLO_ERR_UNBUILT, "gives wrong products; name another");
    assert_ok(created(cblas("odd")));
}

T_CASE_IF(NO_CBLAS, a_build_without_cblas_says_so)
{
    assert_fails(created("cblas"), COLO_ERR_UNBUILT,
                 "COLO_GEMM is 'cblas', but this library was built with -Dcblas=disabled");
    assert_ok(created("auto"));
    assert_ok(created("loops"));
}

/* What is odd is odd: called plainly, it gives a row other bits in other company. */
T_CASE_IF(HAS_ODD, the_odd_cblas_tells_rows_apart)
{
    void (*sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int,
                  float, float *, int);
    float a[40 * 30], b[30 * 20], c[40 * 20], d[40 * 20];
    int differ = 0;
    void *so = dlopen(cblas("odd"), RTLD_NOW | RTLD_LOCAL);
    assert_non_null(so);
    *(void **)&sgemm = dlsym(so, "cblas_sgemm");
    for (int i = 0; i < 40 * 30; i++)
        a[i] = (float)t_uniform(&rng);
    for (int i = 0; i < 30 * 20; i++)
        b[i] = (float)t_uniform(&rng);
    sgemm(101, 111, 111, 40, 20, 30, 1, a, 30, b, 20, 0, c, 20);
    sgemm(101, 111, 111, 39, 20, 30, 1, a, 30, b, 20, 0, d, 20);
    for (int i = 0; i < 39 * 20; i++)
        differ += c[i] != d[i];
    assert_true(differ > 39 * 20 / 4);
    dlclose(so);
}

/* ---- products ---- */

T_CASE(products_are_what_their_formulas_say)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F64, COLO_F16};
    int nth = 0;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int d = 0; d < 4; d++)
            for (int what = 0; what < 3; what++, nth++)
                if (!T_LEFT_OUT({(int64_t)s, sizeof shapes / sizeof *shapes}, {d, 4}, {what, 3}))
                    check_product(nth, (enum colo_linear_product)what, dtypes[d], shapes[s]);
}

/* A pass of 300 rows at once, and the same rows in pieces. */
T_CASE(a_rows_bits_do_not_depend_on_its_company)
{
    static const int64_t cut[][2] = {{0, 1}, {5, 3}, {100, 200}, {127, 2}, {128, 64}, {299, 1}};
    for (int what = 0; what < 2; what++)
        for (int d = 0; d < 3; d++)
            for (int w = 0; w < ways(); w++) {
                const colo_dtype_t dtype = d == 0 ? COLO_F32 : d == 1 ? COLO_BF16 : COLO_F64;
                const size_t elem = colo_dtype_size(dtype);
                int64_t m, n, terms;
                /* an output wide enough to show a bit */
                struct colo_linear_gemm g = make((enum colo_linear_product)what, dtype,
                                                 d == 2 ? COLO_F64 : COLO_F32, 300, 40, 140, 0);
                struct colo_linear_matrix *to = written(&g, &m, &n, &terms);
                const size_t pitch = (size_t)to->stride * colo_dtype_size(to->dtype);
                unsigned char *all = malloc((size_t)m * pitch);
                assert_ok(run(way(w), &g));
                memcpy(all, to->data, (size_t)m * pitch);
                for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
                    struct colo_linear_gemm part = g;
                    const size_t from = (size_t)cut[i][0];
                    part.first = cut[i][0];
                    part.rows = cut[i][1];
                    part.h.data = (char *)g.h.data + from * (size_t)g.h.stride * elem;
                    part.z.data =
                        (char *)g.z.data + from * (size_t)g.z.stride * colo_dtype_size(g.z.dtype);
                    memset(to->data, 0x5a, (size_t)m * pitch);
                    assert_ok(run(way(w), &part));
                    if (memcmp(all + from * pitch, (char *)to->data + from * pitch,
                               (size_t)part.rows * pitch) != 0)
                        fail_msg("%s: product %d of %s: rows from %d differ when %d come", way(w),
                                 what, colo_dtype_name(dtype), (int)from, (int)part.rows);
                }
                free(all);
                drop(&g);
            }
}

T_MAIN_AFTER(0, rng = t_seed(), "loss/product")
