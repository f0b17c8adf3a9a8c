/* SPDX-License-Identifier: Apache-2.0 */
/* test_options.c - what tools print about arguments and bytes, whatever the argument was. */
#include "harness/harness.h"

#include "options.h"

#include <unistd.h>

const char tool_name[] = "colo-x";

/* What a complaint leaves on stderr. */
static void complaint(char *line, size_t cap, const char *text)
{
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stderr);
    int keep = dup(STDERR_FILENO);
    dup2(fileno(file), STDERR_FILENO);
    int code = tool_refuse("%s", text);
    fflush(stderr);
    dup2(keep, STDERR_FILENO);
    close(keep);
    rewind(file);
    line[fread(line, 1, cap - 1, file)] = '\0';
    fclose(file);
    assert_int_equal(code, 2);
}

T_CASE(a_complaint_is_one_printable_line_of_200_bytes_at_most)
{
    char text[5000], line[20000];
    complaint(line, sizeof line, "--batch: no");
    assert_string_equal(line, "colo-x: --batch: no\n");
    complaint(line, sizeof line, "a\nb\t\x1b[31m\x7f\xff");
    assert_string_equal(line, "colo-x: a\\x0ab\\x09\\x1b[31m\\x7f\\xff\n");
    for (size_t n = 180; n < sizeof text; n += n < 210 ? 1 : 1595) {
        memset(text, '\n', n);
        text[n] = '\0';
        memcpy(text, "front", 5);
        memset(text + 5, 'x', 180 - 5); /* the end is what may be cut out */
        complaint(line, sizeof line, text);
        assert_true(strlen(line) <= 200);
        assert_ptr_equal(strchr(line, '\n'), line + strlen(line) - 1);
        assert_int_equal(strncmp(line, "colo-x: front", 13), 0);
    }
    assert_non_null(strstr(line, "..."));
}

T_CASE(a_quote_is_escaped_and_cut)
{
    static const char *const cases[][2] = {
        {"", "\"\""},
        {"tp=2", "\"tp=2\""},
        {"\x01\xc3\xa9", "\"\\x01\\xc3\\xa9\""},
        {"0123456789012345678901234567890123456789012345678901234567890123456789",
         "\"01234567890123456789012345678901234567890123456789012345"},
    };
    char q[TOOL_QUOTE_MAX];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t whole = strlen(cases[i][0]) < 40;
        tool_quote(q, cases[i][0]);
        if (whole)
            assert_string_equal(q, cases[i][1]);
        else
            assert_non_null(strstr(q, "...\""));
        assert_int_equal(strncmp(q, cases[i][1], 40), 0);
    }
    for (size_t n = 0; n < 200; n++) { /* every length, of plain and of escaped bytes */
        char text[200];
        for (int c = 0; c < 2; c++) {
            memset(text, c ? 0xff : 'x', n);
            text[n] = '\0';
            tool_quote(q, text);
            assert_true(strlen(q) < TOOL_QUOTE_MAX && q[0] == '"' && q[strlen(q) - 1] == '"');
            bool whole = n <= (c ? 14 : 55); /* 56 and 55 bytes; two quotes, "..." and NUL: 62 */
            assert_int_equal(strstr(q, "...") == NULL, whole);
            assert_true(!whole || strlen(q) == 2 + n * (c ? 4 : 1));
        }
    }
}

T_CASE(bytes_have_one_decimal_and_never_1024_of_a_unit)
{
    static const struct {
        int64_t bytes;
        const char *text;
    } cases[] = {
        {0, "0 B"},
        {1, "1 B"},
        {1023, "1023 B"},
        {1024, "1.0 KiB"},
        {1536, "1.5 KiB"},
        {1048575, "1.0 MiB"},
        {1048576, "1.0 MiB"},
        {INT64_C(1) << 30, "1.0 GiB"},
        {INT64_C(3) << 39, "1.5 TiB"},
        {INT64_MAX, "8.0 EiB"},
    };
    char text[24];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_string_equal(tool_bytes(text, cases[i].bytes), cases[i].text);
}

T_MAIN("tools/options")
