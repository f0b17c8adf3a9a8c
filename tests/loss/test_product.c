/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_product.c - products in host memory by a CBLAS and by loops: shapes that end in the middle
 * of a block, every dtype, rows of a pass that come in any company; and which CBLAS is believed.
 *
 * Tolerance, with u of the sums (2^-24; 2^-53 for f64): blocks of 128 terms are added in fp64, so
 * an element is off by at most (min(k, 128) + 2) u sum |a b| (k terms for f64), and one rounding to
 * the dtype of what is written.
 */
#include "loss/product_case.h"

#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

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

#ifndef NO_CBLAS
#define NO_CBLAS 0 /* 1: built with -Dcblas=disabled */
#endif
#define HAS_ODD (!NO_CBLAS && getenv("T_CBLAS_DIR"))
#define HAS_OPENBLAS (!NO_CBLAS && has_openblas())
#ifdef __SANITIZE_ADDRESS__
#define SANITIZED 1 /* which needs all of the address space */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

/* In a process of its own, which then has it. */
static bool has_openblas(void)
{
    static int has = -1;
    if (has < 0) {
        const pid_t child = fork();
        if (child == 0)
            _exit(dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL) ? 0 : 1);
        (void)waitpid(child, &has, 0);
        has = has == 0;
    }
    return has;
}

static const char *way(int w)
{
    return w == 0 ? "loops" : w == 1 ? (HAS_OPENBLAS ? "cblas" : "auto") : cblas("odd");
}

static uint64_t rng;

static colo_gemm_t choice; /* of the head's config */

static colo_status_t run(const char *gemm, struct colo_linear_gemm *g)
{
    const colo_gemm_backend_t *backend = &colo_gemm_host;
    const struct colo_linear_shape shape = {
        .dtype = g->h.dtype, .columns = g->columns, .hidden = g->hidden, .gemm = choice};
    void *made = NULL;
    if (gemm)
        setenv("COLO_GEMM", gemm, 1);
    colo_status_t st = backend->create(&shape, &made);
    if (st == COLO_OK) {
        const size_t bytes = (size_t)backend->workspace(made);
        assert_int_equal(bytes % 256, 0);
        COLO_AUTOFREE unsigned char *work = aligned_alloc(256, bytes + 256);
        memset(work, 0xff, bytes + 256); /* NaN: nothing in it may count */
        g->workspace = work;
        st = backend->run(made, g, NULL);
        for (int i = 0; i < 256; i++)
            assert_int_equal(work[bytes + (size_t)i], 0xff);
    }
    backend->destroy(made);
    unsetenv("COLO_GEMM");
    return st;
}

/* rows, columns, hidden: around the edges of blocks of 64, 128 and 512, and nothing at all */
static const int64_t shapes[][3] = {{1, 1, 1},     {3, 7, 5},     {128, 512, 128}, {129, 513, 129},
                                    {127, 65, 63}, {300, 3, 130}, {5, 1025, 2},    {2, 9, 600},
                                    {0, 9, 4},     {9, 0, 4},     {9, 4, 0},       {257, 130, 40}};

static void check_product(int nth, enum colo_linear_product what, colo_dtype_t dtype,
                          const int64_t n[3])
{
    const bool f64 = dtype == COLO_F64, logits = what == COLO_LINEAR_LOGITS;
    const colo_dtype_t wide = f64 ? COLO_F64 : COLO_F32;
    const float scale[COLO_LINEAR_SCALE] = {0.3F, 0, 1};
    T_ENDS(product_case_free) product_case_t p;
    product_case_init(&p, what, dtype,
                      what == COLO_LINEAR_D_WEIGHT || (logits && nth % 2) ? wide : dtype, n,
                      nth % 3, n[1] + nth % 3, logits && nth % 2, &rng);
    p.g.first = nth % 5 * 50;
    p.g.beta = logits ? !p.bias && nth / 12 % 2 : nth % 2;
    if (!logits && nth % 4 < 2) {
        p.g.scale = scale;
        p.scale = (double)scale[0];
    } else if (!p.bias)
        p.g.factor = nth % 5 ? 1 : -0.75;
    const double terms = (double)p.terms, /* the oracle's own of f64, too */
        u = f64 ? (2 * terms + 2) * 0x1p-53 : ((terms < 128 ? terms : 128) + 2) * 0x1p-24;
    for (int w = 0; w < ways(); w++) {
        for (int64_t i = 0; i < p.rows * p.to->stride; i++)
            loss_store(p.to->dtype, p.to->data, i, p.was[i]);
        assert_ok(run(way(w), &p.g));
        product_case_compare(&p, u, false, way(w));
    }
}

/* ---- which ---- */

static colo_status_t created(const char *gemm)
{
    T_ENDS(product_case_free) product_case_t p;
    product_case_init(&p, COLO_LINEAR_LOGITS, COLO_F32, COLO_F32, (int64_t[]){1, 1, 1}, 0, 1, false,
                      &rng);
    colo_status_t st = run(gemm, &p.g);
    return st;
}

/* Each in a process of its own, which has loaded no CBLAS. */
static bool in_child(bool (*what)(void))
{
    int how = -1;
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        alarm(30); /* OpenBLAS may spin */
        _exit(what() ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    return how == 0;
}

static bool is_loaded(void)
{
    return dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) != NULL;
}

static bool loads_nothing(void)
{
    choice = COLO_GEMM_AUTO;
    const bool unset = created(NULL) == COLO_OK && !is_loaded();
    choice = COLO_GEMM_CBLAS; /* which the environment overrides */
    const bool set = created("auto") == COLO_OK && created("loops") == COLO_OK && !is_loaded();
    return unset && set;
}

static bool loads_what_is_chosen(void)
{
    choice = COLO_GEMM_CBLAS;
    const bool loaded = created(NULL) == COLO_OK && is_loaded();
    choice = COLO_GEMM_AUTO; /* it is there */
    return loaded && created(NULL) == COLO_OK;
}

static bool takes_what_is_there(void)
{
    t_lines_t l = {0};
    choice = COLO_GEMM_AUTO;
    if (!dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL))
        return false;
    colo_log_set(t_keep_line, &l, COLO_LOG_INFO);
    return created(NULL) == COLO_OK &&
           strcmp(l.last, "lm_head: products in host memory by libopenblas.so.0") == 0;
}

static bool has_no_room(void)
{
    struct rlimit all;
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld", &pages) != 1 || fclose(f) || getrlimit(RLIMIT_AS, &all))
        return false;
    all.rlim_cur = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + (rlim_t)(60 << 20);
    if (setrlimit(RLIMIT_AS, &all))
        return false;
    /* OpenBLAS, if it were loaded, would ask for memory for ever, on all processors. */
    if (setrlimit(RLIMIT_CPU, &(struct rlimit){2, 2}))
        return false;
    choice = COLO_GEMM_CBLAS;
    const bool refused = created(NULL) == COLO_ERR_NOMEM &&
                         strstr(colo_last_error(), "lm_head: libopenblas.so.0 takes up to ") &&
                         !is_loaded();
    choice = COLO_GEMM_AUTO;
    return refused && created(NULL) == COLO_OK;
}

/* First of all: a process that has loaded it keeps it. */
T_CASE_IF(HAS_OPENBLAS, a_cblas_is_loaded_if_the_program_chooses_it)
{
    assert_true(in_child(loads_nothing));
    assert_true(in_child(loads_what_is_chosen));
    assert_true(in_child(takes_what_is_there));
    choice = COLO_GEMM_AUTO;
}

T_CASE_IF(HAS_OPENBLAS && !SANITIZED, a_cblas_is_not_loaded_where_memory_is_short)
{
    assert_true(in_child(has_no_room));
    choice = COLO_GEMM_AUTO;
}

/* A process is told once. */
T_CASE_IF(HAS_ODD, a_process_is_told_once_which)
{
    t_lines_t l = {0};
    colo_log_set(t_keep_line, &l, COLO_LOG_INFO);
    assert_ok(created("loops"));
    assert_ok(created("auto"));
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    assert_int_equal(l.count, 1);
    assert_string_equal(l.last, "lm_head: products in host memory by loops: COLO_GEMM");
}

T_CASE_IF(HAS_ODD, a_cblas_that_cannot_be_used_is_refused)
{
    assert_fails(created("lops"), COLO_ERR_ARG, "COLO_GEMM is 'lops', expected auto, cblas");
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
    choice = COLO_GEMM_CBLAS;
    assert_fails(created(NULL), COLO_ERR_UNBUILT, "config.gemm is COLO_GEMM_CBLAS, but this");
    choice = COLO_GEMM_AUTO;
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
                T_ENDS(product_case_free) product_case_t p;
                /* an output wide enough to show a bit */
                product_case_init(&p, (enum colo_linear_product)what, dtype,
                                  what || d == 2 ? dtype : COLO_F32, (int64_t[]){300, 40, 140}, 0,
                                  40, false, &rng);
                struct colo_linear_matrix *to = p.to;
                const size_t pitch = (size_t)to->stride * colo_dtype_size(to->dtype),
                             bytes = (size_t)p.rows * pitch;
                COLO_AUTOFREE unsigned char *all = malloc(bytes);
                assert_ok(run(way(w), &p.g));
                memcpy(all, to->data, bytes);
                for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
                    struct colo_linear_gemm part = p.g;
                    const size_t from = (size_t)cut[i][0];
                    part.first = cut[i][0];
                    part.rows = cut[i][1];
                    part.h.data = (char *)p.g.h.data + from * (size_t)p.g.h.stride * elem;
                    part.z.data = (char *)p.g.z.data +
                                  from * (size_t)p.g.z.stride * colo_dtype_size(p.g.z.dtype);
                    memset(to->data, 0x5a, bytes);
                    assert_ok(run(way(w), &part));
                    if (memcmp(all + from * pitch, (char *)to->data + from * pitch,
                               (size_t)part.rows * pitch) != 0)
                        fail_msg("%s: product %d of %s: rows from %d differ when %d come", way(w),
                                 what, colo_dtype_name(dtype), (int)from, (int)part.rows);
                }
            }
}

T_MAIN_AFTER(0, rng = t_seed(), "loss/product")
