/* SPDX-License-Identifier: Apache-2.0 */
/* test_env_log.c - environment variables with their fallbacks, and that the library is silent
 * unless asked. */
#include "harness/harness.h"

#include "core/env.h"
#include "core/error.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int clean(void **state)
{
    unsetenv("COLO_LOG");
    unsetenv("COLO_TIMEOUT_MS");
    unsetenv("COLO_CHECK");
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    return 0;
}

/* ---- environment variables ---- */

T_CASE(variables_are_listed_with_fallback_and_help)
{
    static const char *const expected[][2] = {{"COLO_LOG", "off"},
                                              {"COLO_TIMEOUT_MS", "600000"},
                                              {"COLO_CHECK", "1"},
                                              {"COLO_BACKEND_DIR", ""}};
    int found = 0;
    for (int i = 0; i < colo_env_count(); i++) {
        const colo_env_variable_t *k = colo_env_variable(i);
        assert_true(strncmp(k->name, "COLO_", 5) == 0 && k->help[0]);
        for (int e = 0; e < 4; e++)
            if (strcmp(k->name, expected[e][0]) == 0) {
                assert_string_equal(k->fallback, expected[e][1]);
                found++;
            }
    }
    assert_int_equal(found, 4);
    assert_null(colo_env_variable(-1));
    assert_null(colo_env_variable(colo_env_count()));
}

T_CASE(a_value_says_where_it_comes_from)
{
    bool from_env = true;
    assert_string_equal(colo_env_value("COLO_CHECK", &from_env), "1");
    assert_false(from_env);
    setenv("COLO_CHECK", "2", 1);
    assert_string_equal(colo_env_value("COLO_CHECK", &from_env), "2");
    assert_true(from_env);
    assert_string_equal(colo_env_value("COLO_CHECK", NULL), "2");
    assert_null(colo_env_value("COLO_NO_SUCH_VARIABLE", &from_env));
    assert_null(colo_env_value("PATH", NULL)); /* not ours */
}

static colo_status_t must_not_run(colo_comm_t *world, void *arg)
{
    *(bool *)arg = true;
    return COLO_OK;
}

static const struct {
    const char *name, *value, *allowed;
} nonsense[] = {
    {"COLO_TIMEOUT_MS", "abc", "expected a number from 1 to 1000000000000"},
    {"COLO_TIMEOUT_MS", "0", "expected a number from 1"},
    {"COLO_TIMEOUT_MS", "-1", "expected a number from 1"},
    {"COLO_TIMEOUT_MS", "+5", "expected a number from 1"},
    {"COLO_TIMEOUT_MS", " 5", "expected a number from 1"},
    {"COLO_TIMEOUT_MS", "5 ", "expected a number from 1"},
    {"COLO_TIMEOUT_MS", "1e3", "expected a number from 1"},
    {"COLO_TIMEOUT_MS", "0x10", "expected a number from 1"},
    {"COLO_TIMEOUT_MS", "1000000000001", "expected a number from 1"},
    {"COLO_TIMEOUT_MS", "18446744073709551617", "expected a number from 1"},
    {"COLO_CHECK", "3", "expected a number from 0 to 2"},
    {"COLO_LOG", "loud", "expected off, error, warn, info or debug"},
    {"COLO_BIND", "cores", "expected none, core, scatter, numa or package"},
    {"COLO_NVTX", "2", "expected a number from 0 to 1"},
    {"COLO_TRANSPORT", "pear", "expected auto, nccl, peer or ucx"},
    {"COLO_PEER_BLOCKS", "1025", "expected a number from 0 to 1024"},
    {"COLO_FLIGHT_RECORDER", "/nowhere/at/all/rank",
     "expected the beginning of a path, in a folder"},
    {"COLO_FLIGHT_RECORDER", "nowhere/rank", "expected the beginning of a path, in a folder"},
    {"COLO_GEMM", "lops", "expected auto, cblas, loops or the name of a library"},
};

T_CASE(value_that_is_not_allowed_is_refused_by_every_create)
{
    char found[64];
    for (size_t i = 0; i < sizeof nonsense / sizeof nonsense[0]; i++) {
        colo_comm_t *c = NULL;
        bool ran = false;
        snprintf(found, sizeof found, "%s is '%s', ", nonsense[i].name, nonsense[i].value);
        setenv(nonsense[i].name, nonsense[i].value, 1);
        assert_fails(colo_env_check(nonsense[i].name), COLO_ERR_ARG, nonsense[i].allowed);
        assert_fails(colo_env_check(NULL), COLO_ERR_ARG, found);
        assert_fails(colo_comm_create_self(&c), COLO_ERR_ARG, found);
        assert_fails(colo_comm_threads_run(2, must_not_run, &ran), COLO_ERR_ARG, found);
        assert_true(!c && !ran);
        unsetenv(nonsense[i].name);
        assert_ok(colo_env_check(nonsense[i].name));
    }
    assert_ok(colo_env_check(NULL));
    assert_fails(colo_env_check("PATH"), COLO_ERR_MISSING, "'PATH'");
}

T_CASE(empty_variable_is_one_that_is_not_set)
{
    for (int i = 0; i < colo_env_count(); i++) {
        const colo_env_variable_t *variable = colo_env_variable(i);
        T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
        const char *text = NULL;
        bool from_env = true;
        setenv(variable->name, "", 1);
        assert_ok(colo_env_check(variable->name));
        assert_ok(colo_comm_create_self(&c));
        assert_string_equal(colo_env_value(variable->name, &from_env), variable->fallback);
        assert_false(from_env);
        assert_ok(colo_env_text(variable->name, &text));
        assert_string_equal(text, variable->fallback);
        unsetenv(variable->name);
    }
}

T_CASE(flight_records_may_begin_in_each_folder_that_can_be_written)
{
    static const char *const prefix[] = {"", "rank", "./rank", "/tmp/rank", "/tmp/"};
    for (size_t i = 0; i < sizeof prefix / sizeof prefix[0]; i++) {
        setenv("COLO_FLIGHT_RECORDER", prefix[i], 1);
        assert_ok(colo_env_check("COLO_FLIGHT_RECORDER"));
    }
    unsetenv("COLO_FLIGHT_RECORDER");
}

T_CASE(every_variable_but_free_text_refuses_something)
{
    static const char *const free_text[] = {"COLO_BACKEND_DIR", "COLO_NODE"};
    for (int i = 0; i < colo_env_count(); i++) {
        const char *name = colo_env_variable(i)->name;
        bool found = false;
        for (int k = 0; k < 2; k++)
            found = found || strcmp(name, free_text[k]) == 0;
        for (size_t k = 0; k < sizeof nonsense / sizeof nonsense[0]; k++)
            found = found || strcmp(name, nonsense[k].name) == 0;
        if (!found)
            fail_msg("%s has no row above", name);
    }
}

T_CASE(long_value_is_refused_and_not_cut)
{
    char text[5001];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    memcpy(text + 4990, ".so", 3);
    for (int i = 0; i < colo_env_count(); i++) {
        setenv(colo_env_variable(i)->name, text, 1);
        assert_fails(colo_env_check(colo_env_variable(i)->name), COLO_ERR_ARG,
                     "has 5000 bytes, expected at most 4000");
        unsetenv(colo_env_variable(i)->name);
    }
    text[60] = '\0';
    setenv("COLO_CHECK", text, 1);
    assert_fails(colo_env_check(NULL), COLO_ERR_ARG, "aaaa...', expected a number from 0 to 2");
}

T_CASE(value_that_is_allowed_counts)
{
    int64_t ms = 0;
    int32_t word = 7;
    const char *text = NULL;
    setenv("COLO_TIMEOUT_MS", "250", 1);
    assert_ok(colo_env_i64("COLO_TIMEOUT_MS", &ms));
    assert_int_equal(ms, 250);
    setenv("COLO_TIMEOUT_MS", "25O", 1); /* a program that goes on has the fallback */
    assert_fails(colo_env_i64("COLO_TIMEOUT_MS", &ms), COLO_ERR_ARG, "'25O'");
    assert_int_equal(ms, 600000);
    unsetenv("COLO_TIMEOUT_MS");
    assert_ok(colo_env_word("COLO_TRANSPORT", &word));
    assert_int_equal(word, 0);
    setenv("COLO_TRANSPORT", "peer", 1);
    assert_ok(colo_env_word("COLO_TRANSPORT", &word));
    assert_int_equal(word, 2);
    unsetenv("COLO_TRANSPORT");
    setenv("COLO_GEMM", "/opt/lib/libmine.so", 1);
    assert_ok(colo_env_word("COLO_GEMM", &word));
    assert_int_equal(word, -1);
    assert_ok(colo_env_text("COLO_GEMM", &text));
    assert_string_equal(text, "/opt/lib/libmine.so");
    unsetenv("COLO_GEMM");
}

/* The library's only way to the environment: in a set-user-ID program it answers NULL. */
static bool more_rights;
char *secure_getenv(const char *name)
{
    return more_rights ? NULL : getenv(name);
}

T_CASE(program_with_more_rights_reads_no_variable)
{
    bool from_env = true;
    const char *text = NULL;
    setenv("COLO_BACKEND_DIR", "/of/a/stranger", 1);
    setenv("COLO_GEMM", "/of/a/stranger/lib.so", 1);
    setenv("COLO_CHECK", "3", 1);
    more_rights = true;
    assert_string_equal(colo_env_value("COLO_BACKEND_DIR", &from_env), "");
    assert_false(from_env);
    assert_ok(colo_env_text("COLO_BACKEND_DIR", &text));
    assert_string_equal(text, "");
    assert_ok(colo_env_text("COLO_GEMM", &text));
    assert_string_equal(text, "auto");
    assert_ok(colo_env_check(NULL));
    more_rights = false;
    assert_ok(colo_env_text("COLO_BACKEND_DIR", &text));
    assert_string_equal(text, "/of/a/stranger");
    unsetenv("COLO_BACKEND_DIR");
    unsetenv("COLO_GEMM");
}

T_CASE(a_comm_takes_its_settings_from_the_variables)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *c = NULL;
    setenv("COLO_CHECK", "0", 1);
    assert_ok(colo_comm_create_self(&c));
    assert_int_equal(colo_comm_check_level(c), 0);
}

/* ---- log ---- */

T_CASE(lines_above_the_level_are_dropped)
{
    t_lines_t l = {0};
    for (int level = COLO_LOG_OFF; level <= COLO_LOG_DEBUG; level++) {
        colo_log_set(t_keep_line, &l, (colo_log_level_t)level);
        for (int line = COLO_LOG_ERROR; line <= COLO_LOG_DEBUG; line++) {
            l.count = 0;
            colo_log((colo_log_level_t)line, "line %d", line);
            assert_int_equal(l.count, line <= level);
            assert_int_equal(colo_log_on((colo_log_level_t)line), line <= level);
        }
    }
    assert_int_equal(l.level, COLO_LOG_DEBUG);
    assert_string_equal(l.last, "line 4");
}

/* What the call of @fn writes to stderr. */
static void capture(void (*fn)(void), char *text, size_t cap)
{
    int pipe_fd[2], old = dup(2);
    assert_int_equal(pipe(pipe_fd), 0);
    dup2(pipe_fd[1], 2);
    fn();
    fflush(stderr);
    dup2(old, 2);
    close(old);
    close(pipe_fd[1]);
    ssize_t n = read(pipe_fd[0], text, cap - 1);
    close(pipe_fd[0]);
    text[n > 0 ? n : 0] = '\0';
}

static void talk(void)
{
    colo_log(COLO_LOG_ERROR, "an error %d", 1);
    colo_log(COLO_LOG_WARN, "a warning");
    colo_log(COLO_LOG_INFO, "some news");
    colo_log(COLO_LOG_DEBUG, "detail");
}

T_CASE(stderr_is_silent_unless_the_environment_asks)
{
    char text[1024];
    capture(talk, text, sizeof text);
    assert_string_equal(text, "");
    setenv("COLO_LOG", "warn", 1);
    capture(talk, text, sizeof text);
    assert_string_equal(text, "colobridge: error: an error 1\ncolobridge: warn: a warning\n");
    setenv("COLO_LOG", "loud", 1); /* unknown: off */
    capture(talk, text, sizeof text);
    assert_string_equal(text, "");
}

static volatile sig_atomic_t signals;
static void count_signal(int number)
{
    (void)number;
    signals++;
}

static void talk_to_nobody(void)
{
    int pipe_fd[2];
    assert_int_equal(pipe(pipe_fd), 0);
    dup2(pipe_fd[1], 2);
    close(pipe_fd[0]);
    close(pipe_fd[1]);
    talk();
}

T_CASE(stderr_that_nobody_reads_raises_no_signal)
{
    char text[1024];
    setenv("COLO_LOG", "warn", 1);
    signal(SIGPIPE, count_signal);
    capture(talk_to_nobody, text, sizeof text);
    signal(SIGPIPE, SIG_DFL);
    assert_int_equal(signals, 0);
    clearerr(stderr);
}

struct storm {
    _Atomic int inside;
    int overlaps, lines; /* plain: only "never concurrently" orders them */
};

static void in_storm(colo_log_level_t level, const char *line, void *user)
{
    struct storm *s = user;
    s->overlaps += atomic_fetch_add(&s->inside, 1) != 0;
    s->lines++;
    atomic_fetch_sub(&s->inside, 1);
}

static void *shout(void *arg)
{
    for (int i = 0; i < 500; i++)
        colo_log(COLO_LOG_INFO, "%d", i);
    return NULL;
}

T_CASE(the_sink_is_never_called_concurrently)
{
    struct storm s = {.lines = 0};
    pthread_t thread[4];
    colo_log_set(in_storm, &s, COLO_LOG_INFO);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, shout, NULL), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    assert_int_equal(s.overlaps, 0);
    assert_int_equal(s.lines, 2000);
}

/* ---- a sink that uses the library ---- */

struct busy {
    int calls;
    bool done;
    char after[100]; /* the error message that the caller of colo_log() then finds */
};

static void use_library(colo_log_level_t level, const char *line, void *user)
{
    struct busy *b = user;
    colo_comm_t *c = NULL;
    if (b->calls++ > 3) /* not without end when it goes wrong */
        return;
    colo_log(COLO_LOG_WARN, "from the sink");
    (void)colo_comm_create_self(NULL); /* an error of its own */
    if (colo_comm_create_self(&c) == COLO_OK)
        colo_comm_destroy(&c);
    colo_log_set(use_library, b, COLO_LOG_WARN);
}

static void *log_one_line(void *arg)
{
    struct busy *b = arg;
    colo_log_set(use_library, b, COLO_LOG_WARN);
    (void)colo_fail(COLO_ERR_ARG, "the caller's own error");
    colo_log(COLO_LOG_WARN, "a line");
    snprintf(b->after, sizeof b->after, "%s", colo_last_error());
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    b->done = true;
    return NULL;
}

/* ---- fork() while a thread logs ---- */

static _Atomic int logging; /* 1: in the sink, 2: may leave it */

static void wait_in_sink(colo_log_level_t level, const char *line, void *user)
{
    logging = 1;
    while (logging != 2)
        usleep(1000);
}

static void *log_slowly(void *arg)
{
    colo_log(COLO_LOG_WARN, "a line");
    return NULL;
}

T_CASE(child_logs_though_its_parent_was_logging)
{
    pthread_t thread;
    int status = 1;
    colo_log_set(wait_in_sink, NULL, COLO_LOG_WARN);
    assert_int_equal(pthread_create(&thread, NULL, log_slowly, NULL), 0);
    while (logging != 1)
        usleep(1000);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        t_lines_t l = {0};
        alarm(3);
        colo_log_set(t_keep_line, &l, COLO_LOG_WARN);
        colo_log(COLO_LOG_WARN, "a line of the child");
        _exit(l.count != 1);
    }
    logging = 2;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
}

/* Last: a thread that hangs keeps the log. */
T_CASE(sink_may_call_the_library)
{
    static struct busy b;
    pthread_t thread;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 10;
    assert_int_equal(pthread_create(&thread, NULL, log_one_line, &b), 0);
    assert_int_equal(pthread_timedjoin_np(thread, NULL, &end), 0);
    assert_true(b.done);
    assert_int_equal(b.calls, 1); /* what it caused is not logged */
    assert_string_equal(b.after, "the caller's own error");
}

T_MAIN_EACH("core/env_log", clean, NULL)
