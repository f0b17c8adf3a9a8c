/* SPDX-License-Identifier: Apache-2.0 */
/* test_env_log.c - knobs with their fallbacks, and that the library is silent unless asked. */
#include "harness/harness.h"

#include "core/env.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static int clean(void **state)
{
    unsetenv("COLO_LOG");
    unsetenv("COLO_TIMEOUT_MS");
    unsetenv("COLO_CHECK");
    colo_log_set(NULL, NULL, COLO_LOG_OFF);
    return 0;
}

/* ---- knobs ---- */

static void knobs_are_listed_with_fallback_and_help(void **state)
{
    static const char *const expected[][2] = {{"COLO_LOG", "off"},
                                              {"COLO_TIMEOUT_MS", "600000"},
                                              {"COLO_CHECK", "1"},
                                              {"COLO_BACKEND_DIR", ""}};
    int found = 0;
    for (int i = 0; i < colo_env_count(); i++) {
        const colo_env_knob_t *k = colo_env_knob(i);
        assert_true(strncmp(k->name, "COLO_", 5) == 0 && k->help[0]);
        for (int e = 0; e < 4; e++)
            if (strcmp(k->name, expected[e][0]) == 0) {
                assert_string_equal(k->fallback, expected[e][1]);
                found++;
            }
    }
    assert_int_equal(found, 4);
    assert_null(colo_env_knob(-1));
    assert_null(colo_env_knob(colo_env_count()));
}

static void a_value_says_where_it_comes_from(void **state)
{
    bool from_env = true;
    assert_string_equal(colo_env_value("COLO_CHECK", &from_env), "1");
    assert_false(from_env);
    setenv("COLO_CHECK", "2", 1);
    assert_string_equal(colo_env_value("COLO_CHECK", &from_env), "2");
    assert_true(from_env);
    assert_string_equal(colo_env_value("COLO_CHECK", NULL), "2");
    assert_null(colo_env_value("COLO_NO_SUCH_KNOB", &from_env));
    assert_null(colo_env_value("PATH", NULL)); /* not ours */
}

struct lines {
    int count;
    colo_log_level_t level;
    char last[1100];
};

static void collect(colo_log_level_t level, const char *line, void *user)
{
    struct lines *l = user;
    l->count++;
    l->level = level;
    snprintf(l->last, sizeof l->last, "%s", line);
}

static void nonsense_falls_back_with_a_warning(void **state)
{
    static const char *const nonsense[] = {
        "", "x", "12x", " ", "0", "1000000", "-3", "1e3", "99999999999999999999999"};
    struct lines l = {0};
    colo_log_set(collect, &l, COLO_LOG_DEBUG);
    setenv("COLO_TIMEOUT_MS", "250", 1);
    assert_int_equal(colo_env_i64("COLO_TIMEOUT_MS", 1, 999999), 250);
    assert_int_equal(l.count, 0);
    for (size_t i = 0; i < sizeof nonsense / sizeof nonsense[0]; i++) {
        l.count = 0;
        setenv("COLO_TIMEOUT_MS", nonsense[i], 1);
        assert_int_equal(colo_env_i64("COLO_TIMEOUT_MS", 1, 999999), 600000);
        assert_int_equal(l.count, 1);
        assert_int_equal(l.level, COLO_LOG_WARN);
        assert_non_null(strstr(l.last, "COLO_TIMEOUT_MS="));
        assert_non_null(strstr(l.last, "1..999999"));
    }
    unsetenv("COLO_TIMEOUT_MS");
    l.count = 0;
    assert_int_equal(colo_env_i64("COLO_TIMEOUT_MS", 1, 999999), 600000);
    assert_int_equal(l.count, 0);
}

static void a_comm_takes_its_settings_from_the_knobs(void **state)
{
    colo_comm_t *c = NULL;
    setenv("COLO_CHECK", "0", 1);
    assert_ok(colo_comm_create_self(&c));
    assert_int_equal(colo_comm_check_level(c), 0);
    colo_comm_destroy(&c);
    setenv("COLO_CHECK", "7", 1);
    assert_ok(colo_comm_create_self(&c));
    assert_int_equal(colo_comm_check_level(c), 1);
    colo_comm_destroy(&c);
}

/* ---- log ---- */

static void lines_above_the_level_are_dropped(void **state)
{
    struct lines l = {0};
    for (int level = COLO_LOG_OFF; level <= COLO_LOG_DEBUG; level++) {
        colo_log_set(collect, &l, (colo_log_level_t)level);
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

static void stderr_is_silent_unless_the_environment_asks(void **state)
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

struct storm {
    _Atomic int inside;
    int overlaps, lines; /* plain: only the promise "never concurrently" orders them */
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

static void the_sink_is_never_called_concurrently(void **state)
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(knobs_are_listed_with_fallback_and_help, clean, clean),
        cmocka_unit_test_setup_teardown(a_value_says_where_it_comes_from, clean, clean),
        cmocka_unit_test_setup_teardown(nonsense_falls_back_with_a_warning, clean, clean),
        cmocka_unit_test_setup_teardown(a_comm_takes_its_settings_from_the_knobs, clean, clean),
        cmocka_unit_test_setup_teardown(lines_above_the_level_are_dropped, clean, clean),
        cmocka_unit_test_setup_teardown(stderr_is_silent_unless_the_environment_asks, clean, clean),
        cmocka_unit_test_setup_teardown(the_sink_is_never_called_concurrently, clean, clean),
    };
    return cmocka_run_group_tests_name("core/env_log", tests, NULL, NULL);
}
