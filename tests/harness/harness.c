/* SPDX-License-Identifier: Apache-2.0 */
/* harness.c - see harness.h */
#include "harness/harness.h"

#include "core/error.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static struct CMUnitTest cases[64];
static size_t ncases;

void t_add_case(const char *name, void (*run)(void **state))
{
    if (ncases == sizeof cases / sizeof *cases)
        abort();
    cases[ncases++] = (struct CMUnitTest){.name = name, .test_func = run};
}

int t_main(const char *name)
{
    return t_main_around(name, NULL, NULL);
}

int t_main_around(const char *name, int (*setup)(void **state), int (*teardown)(void **state))
{
    cmocka_set_test_filter(getenv("T_CASES"));
    return _cmocka_run_group_tests(name, cases, ncases, setup, teardown);
}

int t_main_each(const char *name, int (*setup)(void **state), int (*teardown)(void **state))
{
    for (size_t i = 0; i < ncases; i++) {
        cases[i].setup_func = setup;
        cases[i].teardown_func = teardown;
    }
    return t_main(name);
}

colo_status_t t_rank_fail(const char *file, int line, const char *what)
{
    return colo_fail(COLO_ERR_STATE, "%s:%d: %s is false", file, line, what);
}

colo_status_t t_rank_fail_otherwise(const char *file, int line, colo_status_t got,
                                    colo_status_t want, const char *text)
{
    return colo_fail(COLO_ERR_STATE, "%s:%d: %s (%s), expected %s with \"%s\"", file, line,
                     colo_status_name(got), colo_last_error(), colo_status_name(want), text);
}

const char *t_text(const char *format, ...)
{
    static _Thread_local char text[8][1024];
    static _Thread_local unsigned made;
    char *to = text[made++ % 8];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(to, sizeof text[0], format, arguments);
    va_end(arguments);
    return to;
}

const char *t_folder(void)
{
    static char folder[1024];
    const char *below = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/colo-XXXXXX", below ? below : "/tmp");
    assert_non_null(mkdtemp(folder));
    return folder;
}

void t_keep_line(colo_log_level_t level, const char *line, void *lines)
{
    t_lines_t *l = lines;
    l->count++;
    l->level = level;
    snprintf(l->last, sizeof l->last, "%s", line);
}

colo_comm_t *t_self(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* ranks that are threads ask, too */
    static colo_comm_t *self;
    pthread_mutex_lock(&lock);
    const colo_status_t st = self ? COLO_OK : colo_comm_create_self(&self);
    pthread_mutex_unlock(&lock);
    assert_ok(st);
    return self;
}

colo_status_t t_layout_of(const char *text, bool is_src, colo_layout_t *layout)
{
    colo_grid_t grid;
    rank_try(colo_grid_parse(&grid, text, 0));
    return (is_src ? colo_layout_init_src : colo_layout_init_dst)(layout, &grid);
}

colo_status_t t_layouts(const char *from, const char *to, colo_layout_t *src, colo_layout_t *dst)
{
    rank_try(t_layout_of(from, true, src));
    return t_layout_of(to, false, dst);
}

static uint64_t seed;

static void read_seed(void)
{
    const char *text = getenv("T_SEED");
    seed = text ? strtoull(text, NULL, 0) : UINT64_C(20261121);
    printf("seed %llu (set T_SEED to change it)\n", (unsigned long long)seed);
}

uint64_t t_seed(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT; /* ranks that are threads ask, too */
    (void)pthread_once(&once, read_seed);
    return seed;
}

int64_t t_long_wait(void)
{
    const char *text = getenv("COLO_TIMEOUT_MS");
    return text ? strtoll(text, NULL, 10) : 20000;
}

bool t_returns(void (*run)(void))
{
    int status = -1;
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGFPE, SIG_DFL); /* CMocka's handlers would go on */
        signal(SIGSEGV, SIG_DFL);
        setrlimit(RLIMIT_CPU, &(struct rlimit){1, 1});
        run();
        _exit(0);
    }
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static int64_t percent_of_cases(void)
{
    const char *text = getenv("T_SCALE");
    long percent = text ? strtol(text, NULL, 10) : 100;
    return percent < 1 || percent > 100 ? 100 : percent;
}

int64_t t_scaled(int64_t count)
{
    const int64_t percent = percent_of_cases();
    return count < 1 ? count : (count * percent + 99) / 100;
}

bool t_left_out(int64_t nth)
{
    return nth % 100 * 61 % 100 >= percent_of_cases();
}

enum { LOOPS = 8 };

/* Cases that have all pairs, [count]: first those with the most pairs that no earlier one has. */
static bool *pairs_of_loops(const t_loop_t *loops, int n, int64_t count)
{
    int64_t first[LOOPS], values = 0;
    for (int i = 0; i < n; i++) {
        first[i] = values;
        values += loops[i].places;
    }
    bool *kept = calloc((size_t)count, sizeof *kept);
    bool *met = calloc((size_t)(values * values), sizeof *met);
    if (!kept || !met)
        abort();
    for (int least = n * (n - 1) / 2; least > 0; least--)
        for (int64_t nth = 0; nth < count; nth++) {
            int64_t value[LOOPS], rest = nth;
            int fresh = 0;
            for (int i = n - 1; i >= 0; rest /= loops[i--].places)
                value[i] = first[i] + rest % loops[i].places;
            for (int i = 0; i < n; i++)
                for (int j = 0; j < i; j++)
                    fresh += !met[value[i] * values + value[j]];
            if (fresh < least)
                continue;
            kept[nth] = true;
            for (int i = 0; i < n; i++)
                for (int j = 0; j < i; j++)
                    met[value[i] * values + value[j]] = true;
        }
    free(met);
    return kept;
}

bool t_left_out_of(const t_loop_t *loops, int n)
{
    static int64_t places[LOOPS];
    static bool *kept; /* of loops of so many places */
    int64_t nth = 0, count = 1;
    bool same = kept != NULL;
    if (percent_of_cases() == 100)
        return false;
    if (n < 2 || n > LOOPS)
        abort();
    for (int i = 0; i < LOOPS; i++) {
        const int64_t of = i < n ? loops[i].places : 0;
        same = same && places[i] == of;
        places[i] = of;
        count *= i < n ? of : 1;
        nth = i < n ? nth * of + loops[i].place : nth;
    }
    if (!same) {
        free(kept);
        kept = pairs_of_loops(loops, n, count);
    }
    return !kept[nth] && t_left_out(nth);
}
