/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_spec.c - spec strings: what is read, what is refused and at which byte, what is printed, and
 * a seeded fuzz whose judge is a POSIX regular expression of the grammar plus the rules of a grid
 * worked out again from the text.
 */
#include "harness/harness.h"

#include <ctype.h>
#include <regex.h>

static void check_dims(const colo_grid_t *g, const char *const *name, const int64_t *extent, int n)
{
    int64_t step = 1;
    assert_int_equal(g->ndims, n);
    for (int i = 0; i < n; i++) {
        assert_string_equal(g->name[i], name[i]);
        assert_true(g->extent[i] == extent[i]);
        assert_true(g->stride[i] == step);
        step *= extent[i];
    }
    assert_true(g->size == step);
}

T_CASE(both_styles_give_the_same_grid)
{
    static const char *const name[] = {"tp", "cp", "dp"};
    static const int64_t extent[] = {2, 3, 12};
    colo_grid_t a, b;
    assert_ok(colo_grid_parse(&a, "tp=2,cp=3,dp=12", 72));
    check_dims(&a, name, extent, 3);
    assert_int_equal(a.offset, 0);
    assert_ok(colo_grid_parse(&b, "tp2-cp3-dp12", 72));
    assert_memory_equal(&a, &b, sizeof a);
    assert_ok(colo_grid_parse(&a, "tp=2,cp=3,dp=12@8", 80));
    assert_int_equal(a.offset, 8);
    assert_ok(colo_grid_parse(&b, "tp2-cp3-dp12@8", 80));
    assert_memory_equal(&a, &b, sizeof a);
}

T_CASE(odd_but_legal_specs_are_read)
{
    static const struct {
        const char *spec, *name[2];
        int64_t extent[2];
        int n;
    } of[] = {{"x=7", {"x"}, {7}, 1},
              {"x7@0", {"x"}, {7}, 1},
              {"a1=2,b_2=3", {"a1", "b_2"}, {2, 3}, 2},
              {"_2-a1_3", {"_", "a1_"}, {2, 3}, 2},
              {"fifteen_bytes_x7", {"fifteen_bytes_x"}, {7}, 1},
              {"x=9223372036854775807", {"x"}, {INT64_MAX}, 1}};
    colo_grid_t g;
    for (int i = 0; i < 6; i++) {
        assert_ok(colo_grid_parse(&g, of[i].spec, 0));
        check_dims(&g, of[i].name, of[i].extent, of[i].n);
    }
    assert_ok(colo_grid_parse(&g, "x=1@9223372036854775806", INT64_MAX));
    assert_true(g.offset == INT64_MAX - 1);
    assert_ok(colo_grid_parse_n(&g, "x=7,y", 3, 0)); /* the length ends it */
    check_dims(&g, of[0].name, of[0].extent, 1);
}

/* ---- refusals ---- */

/* Whatever came in, an error message is short, printable ASCII without '"', and names a byte of the
 * text.
 */
static void check_error_message(size_t len)
{
    const char *s = colo_last_error();
    unsigned long long pos;
    if (strlen(s) > 240)
        fail_msg("%zu bytes of error message: %s", strlen(s), s);
    for (const char *c = s; *c; c++)
        if (*c < 0x20 || *c > 0x7e || *c == '"')
            fail_msg("byte 0x%02x in an error message", (unsigned)(unsigned char)*c);
    if (sscanf(s, "grid spec, byte %llu:", &pos) != 1 || pos > len)
        fail_msg("no byte within 0..%zu: %s", len, s);
}

static void refuse_n(const char *spec, size_t len, int64_t world, size_t pos, const char *words)
{
    colo_grid_t g, sentinel;
    memset(&g, 0xa5, sizeof g);
    memset(&sentinel, 0xa5, sizeof sentinel);
    const char *where = t_text("grid spec, byte %zu: ", pos);
    assert_fails(colo_grid_parse_n(&g, spec, len, world), COLO_ERR_ARG, where);
    if (!strstr(colo_last_error(), words))
        fail_msg("\"%s\" lacks \"%s\"", colo_last_error(), words);
    check_error_message(len);
    assert_memory_equal(&g, &sentinel, sizeof g);
}

T_CASE(every_mistake_is_named_with_its_byte)
{
    static const struct {
        const char *spec;
        size_t pos;
        const char *words;
    } bad[] = {
        {"", 0, "no dims, expected a dim name, found the end"},
        {"@8", 0, "no dims, expected a dim name, found '@8'"},
        {",tp=2", 0, "expected a dim name, found ',tp=2'"},
        {"tp=2,", 5, "empty part, expected a dim name, found the end"},
        {"tp=2,,dp=2", 5, "empty part, expected a dim name, found ',dp=2'"},
        {"tp2--dp2", 4, "empty part, expected a dim name, found '-dp2'"},
        {"tp2-", 4, "empty part"},
        {"=2", 0, "dim 0 has an empty name"},
        {"tp=2,=2", 5, "dim 1 has an empty name"},
        {"2-3", 0, "dim 0 has an empty name"},
        {"tp", 2, "expected a decimal extent, found the end"},
        {"tp-dp2", 2, "expected a decimal extent, found '-dp2'"},
        {"tp=", 3, "expected a decimal extent, found the end"},
        {"tp=,dp=2", 3, "expected a decimal extent, found ',dp=2'"},
        {"tp=x", 3, "expected a decimal extent, found 'x'"},
        {"tp=-2", 3, "expected a decimal extent, found '-2'"},
        {"tp=+2", 3, "expected a decimal extent, found '+2'"},
        {"tp= 2", 3, "expected a decimal extent, found ' 2'"},
        {"tp=02", 3, "the extent has a leading zero, found '02'"},
        {"tp=2,cp02", 9, "expected '=' after a dim name, found the end"},
        {"cp02", 2, "the extent has a leading zero"},
        {"tp=0", 3, "dim 0 'tp' has extent 0, expected at least 1"},
        {"tp2-cp0-dp2", 6, "dim 1 'cp' has extent 0"},
        {"tp=2 ", 4, "no spaces: expected ',', '@' or the end, found ' '"},
        {" tp=2", 0, "no spaces: no dims, expected a dim name, found ' tp=2'"},
        {"tp =2", 2, "no spaces: expected a decimal extent, found ' =2'"},
        {"tp=2, cp=2", 5, "no spaces: empty part, expected a dim name, found ' cp=2'"},
        {"tp=2@ 8", 5, "no spaces: expected a decimal rank offset, found ' 8'"},
        {"tp1 dp4", 3, "no spaces: expected '-', '@' or the end, found ' dp4'"},
        {"tp1dp4", 0, "dim 0: the name 'tp1dp' has a letter after a digit at 3; put ',' or '-'"},
        {"tp2-cp1dp4", 4, "dim 1: the name 'cp1dp' has a letter after a digit at 3"},
        {"tp1dp=4", 0, "dim 0: the name 'tp1dp' has a letter after a digit at 3"},
        {"a=1,b22C=4", 4, "dim 1: the name 'b22C' has a letter after a digit at 3"},
        {"tp=2x", 4, "expected ',', '@' or the end, found 'x'"},
        {"tp=0x10", 3, "dim 0 'tp' has extent 0"},
        {"tp=2.5", 4, "expected ',', '@' or the end, found '.5'"},
        {"tp=2-cp=2", 4, "expected ',', '@' or the end, found '-cp=2'"},
        {"tp=2-cp2", 4, "found '-cp2'"},
        {"tp2,cp2", 3, "expected '-', '@' or the end, found ',cp2'"},
        {"tp2-cp=2", 6, "one style per string, found '=2'"},
        {"tp=2,cp2", 8, "expected '=' after a dim name, found the end"},
        {"1tp=2", 0, "the name '1tp' starts with a digit"},
        {"tp=2,2cp=2", 5, "the name '2cp' starts with a digit"},
        {"tp=2,dp=3,tp=2", 10, "dim 2: duplicate dim name 'tp', already dim 0"},
        {"tp2-tp2", 4, "dim 1: duplicate dim name 'tp', already dim 0"},
        {"sixteen_bytes_xx=2", 0, "the name 'sixteen_bytes_xx' has 16 bytes, at most 15"},
        {"a=1,sixteen_bytes_xx=2", 4, "dim 1: the name 'sixteen_bytes_xx' has 16 bytes"},
        {"tp=2@", 5, "expected a decimal rank offset, found the end"},
        {"tp=2@-8", 5, "expected a decimal rank offset, found '-8'"},
        {"tp=2@08", 5, "the rank offset has a leading zero"},
        {"tp=2@8@9", 6, "expected the end after the rank offset, found '@9'"},
        {"tp=2@8,dp=2", 6, "expected the end after the rank offset, found ',dp=2'"},
        {"tp=9223372036854775808", 3,
         "the extent does not fit in 63 bits, found '9223372036854775808'"},
        {"tp=2@9223372036854775808", 5, "the rank offset does not fit in 63 bits"},
        {"a=2,b=4611686018427387904", 6, "overflows 63 bits at dim 1 'b': 2 x 4611686018427387904"},
        {"a=2@9223372036854775807", 23, "rank offset 9223372036854775807 + size 2 overflows"},
        {"tp=2,cp=2,dp=16", 15, "size 64 is over sized: a world of 63 ranks has 63"},
        {"tp=2,dp=31@2", 12, "a world of 63 ranks has 61 from rank offset 2 on"},
        {"a1-b1-c1-d1-e1-f1-g1-h1-i1-j1-k1-l1-m1-n1-o1-p1-q1", 48, "more than 16 dims"},
        {"t\xc3\xa9=2", 1, "expected a decimal extent, found '\\xc3\\xa9=2'"},
        {"\xef\xbb\xbftp=2", 0, "expected a dim name, found '\\xef\\xbb\\xbftp=2'"},
        {"tp=2\n", 4, "expected ',', '@' or the end, found '\\x0a'"},
        {"tp=\xd9\xa2", 3, "expected a decimal extent, found '\\xd9\\xa2'"}, /* Arabic digit two */
        {"tp='2'\"\\", 3, "found '\\x272\\x27\\x22\\x5c'"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        colo_grid_t g;
        refuse_n(bad[i].spec, strlen(bad[i].spec), 63, bad[i].pos, bad[i].words);
        assert_fails(colo_grid_parse(&g, bad[i].spec, 63), COLO_ERR_ARG, bad[i].words);
    }
}

T_CASE(a_nul_byte_is_a_mistake_at_its_offset)
{
    refuse_n("tp=2\0", 5, 0, 4, "expected ',', '@' or the end, found '\\x00'");
    refuse_n("tp=2,\0cp=2", 10, 0, 5, "empty part, expected a dim name, found '\\x00cp=2'");
    refuse_n("t\0p=2", 5, 0, 1, "expected a decimal extent, found '\\x00p=2'");
    refuse_n("tp=2@8\0", 7, 0, 6, "expected the end after the rank offset");
    refuse_n("", 1, 0, 0, "expected a dim name, found '\\x00'");
}

T_CASE(null_arguments_are_refused)
{
    colo_grid_t g, sentinel;
    memset(&g, 0xa5, sizeof g);
    memset(&sentinel, 0xa5, sizeof sentinel);
    assert_fails(colo_grid_parse(&g, NULL, 0), COLO_ERR_ARG, "byte 0: the text is NULL");
    assert_fails(colo_grid_parse_n(&g, NULL, 9, 0), COLO_ERR_ARG, "byte 0: the text is NULL");
    assert_fails(colo_grid_parse(NULL, "tp=2", 0), COLO_ERR_ARG, "byte 0: the output is NULL");
    assert_memory_equal(&g, &sentinel, sizeof g);
}

/* 100 KB and 1 MB of: a name, digits, zeros, parts, separators, UTF-8, NULs, and a long tail. */
T_CASE(huge_strings_are_refused_with_short_error_messages)
{
    static const size_t sizes[] = {100 * 1000, 1000 * 1000};
    for (int k = 0; k < 2; k++) {
        size_t n = sizes[k];
        char *s = malloc(n + 1);
        assert_non_null(s);
        s[n] = '\0';
        memset(s, 'a', n);
        char words[64];
        snprintf(words, sizeof words, "aaa...' has %zu bytes, at most 15", n);
        refuse_n(s, n, 0, 0, words);
        s[n - 2] = '=';
        s[n - 1] = '2';
        snprintf(words, sizeof words, "aaa...' has %zu bytes, at most 15", n - 2);
        refuse_n(s, n, 0, 0, words);
        memset(s, '9', n);
        refuse_n(s, n, 0, 0, "dim 0 has an empty name");
        memcpy(s, "tp=", 3);
        refuse_n(s, n, 0, 3, "the extent does not fit in 63 bits, found '999");
        memset(s, '0', n);
        memcpy(s, "tp=", 3);
        refuse_n(s, n, 0, 3, "the extent has a leading zero");
        memcpy(s, "tp", 2);
        s[2] = '1';
        refuse_n(s, n, 0, 2, "the extent does not fit in 63 bits, found '1000");
        for (size_t i = 0; i < n; i++)
            s[i] = "ab=1,"[i % 5];
        refuse_n(s, n, 0, 5, "duplicate dim name 'ab'");
        memset(s, ',', n);
        refuse_n(s, n, 0, 0, "expected a dim name, found ',,,");
        memset(s, '-', n);
        refuse_n(s, n, 0, 0, "expected a dim name, found '---");
        for (size_t i = 0; i < n; i++)
            s[i] = "\xe6\x97\xa5"[i % 3];
        refuse_n(s, n, 0, 0, "expected a dim name, found '\\xe6\\x97\\xa5\\xe6");
        memset(s, 0, n);
        refuse_n(s, n, 0, 0, "expected a dim name, found '\\x00\\x00");
        memset(s, ' ', n);
        memcpy(s, "tp=2,dp=4", 9);
        refuse_n(s, n, 0, 9, "expected ',', '@' or the end, found '   ");
        free(s);
    }
}

/* ---- printing ---- */

T_CASE(printing_gives_the_first_style_and_its_length)
{
    colo_grid_t g;
    char text[64];
    assert_ok(colo_grid_parse(&g, "tp2-cp3-dp12", 0));
    assert_int_equal(colo_grid_print(&g, text, sizeof text), 15);
    assert_string_equal(text, "tp=2,cp=3,dp=12");
    assert_ok(colo_grid_parse(&g, "tp2-dp4@80", 0));
    assert_int_equal(colo_grid_print(&g, text, sizeof text), 12);
    assert_string_equal(text, "tp=2,dp=4@80");
}

T_CASE(printing_stays_inside_any_capacity)
{
    static const char want[] = "tp=2,dp=4@80";
    colo_grid_t g;
    assert_ok(colo_grid_parse(&g, want, 0));
    assert_int_equal(colo_grid_print(&g, NULL, 0), 12);
    assert_int_equal(colo_grid_print(&g, NULL, 9), 12);
    for (size_t cap = 0; cap <= 16; cap++) {
        char text[20];
        size_t n = cap == 0 ? 0 : cap - 1 < 12 ? cap - 1 : 12;
        memset(text, '#', sizeof text);
        assert_int_equal(colo_grid_print(&g, text, cap), 12);
        assert_memory_equal(text, want, n);
        if (cap > 0)
            assert_int_equal(text[n], '\0');
        for (size_t i = cap == 0 ? 0 : n + 1; i < sizeof text; i++)
            assert_int_equal(text[i], '#');
    }
}

T_CASE(printing_a_grid_of_too_many_dims_reads_those_there_are)
{
    colo_dim_t dims[COLO_DIMS_MAX];
    colo_grid_t g;
    char name[COLO_DIMS_MAX][2], text[100];
    for (int i = 0; i < COLO_DIMS_MAX; i++) {
        name[i][0] = (char)('a' + i);
        name[i][1] = '\0';
        dims[i] = (colo_dim_t){name[i], 1};
    }
    assert_ok(colo_grid_init(&g, dims, COLO_DIMS_MAX, 0, 0));
    g.ndims = COLO_DIMS_MAX + 1;
    assert_int_equal(colo_grid_print(&g, text, sizeof text), COLO_DIMS_MAX * 4 - 1);
}

/* ---- fuzz ---- */

typedef struct judge {
    regex_t assign, dash;
} judge;

/* Does @text keep the grammar and every rule of a grid? Works from the text, dim by dim. */
static bool legal(const judge *j, const char *text, size_t len, int64_t world)
{
    char name[16][16];
    int n = 0;
    __extension__ unsigned __int128 size = 1, offset = 0;
    if (strlen(text) != len)
        return false;
    bool assign = regexec(&j->assign, text, 0, NULL, 0) == 0;
    if (!assign && regexec(&j->dash, text, 0, NULL, 0) != 0)
        return false;
    while (*text && *text != '@') {
        size_t part = strcspn(text, assign ? ",@" : "-@"), digits = part;
        while (digits > 0 && strchr("0123456789", text[digits - 1]))
            digits--;
        size_t bytes = assign ? digits - 1 : digits;
        if (part - digits > 19 || bytes > 15 || n == 16)
            return false;
        memcpy(name[n], text, bytes);
        name[n][bytes] = '\0';
        for (size_t i = 1; i < bytes; i++)
            if (isdigit((unsigned char)name[n][i - 1]) && isalpha((unsigned char)name[n][i]))
                return false;
        for (int i = 0; i < n; i++)
            if (strcmp(name[i], name[n]) == 0)
                return false;
        n++;
        size *= strtoull(text + digits, NULL, 10); /* <= 63 bits times < 2^64 */
        if (size == 0 || size > INT64_MAX)
            return false;
        text += part;
        text += *text && *text != '@';
    }
    if (*text == '@') {
        if (strlen(text + 1) > 19)
            return false;
        offset = strtoull(text + 1, NULL, 10);
    }
    return offset + size <= (world ? (uint64_t)world : INT64_MAX);
}

static int accepted, refused;

static void try_one(const judge *j, const char *text, size_t len, int64_t world)
{
    colo_grid_t g, again, sentinel;
    char printed[COLO_KEY_MAX + 16 * 21 + 24], *exact = malloc(len ? len : 1);
    assert_non_null(exact);
    memcpy(exact, text, len); /* no NUL behind it: a sanitizer sees a read past the end */
    memset(&g, 0xa5, sizeof g);
    memset(&sentinel, 0xa5, sizeof sentinel);
    colo_status_t st = colo_grid_parse_n(&g, exact, len, world);
    free(exact);
    if ((st == COLO_OK) != legal(j, text, len, world))
        fail_msg("'%s' (world %lld): %s (%s)", text, (long long)world, colo_status_name(st),
                 st ? colo_last_error() : "");
    if (st != COLO_OK) {
        assert_int_equal(st, COLO_ERR_ARG);
        check_error_message(len);
        assert_memory_equal(&g, &sentinel, sizeof g);
        refused++;
        return;
    }
    size_t n = colo_grid_print(&g, printed, sizeof printed);
    assert_true(n < sizeof printed);
    assert_ok(colo_grid_parse(&again, printed, world));
    assert_memory_equal(&again, &g, sizeof g);
    accepted++;
}

static size_t random_valid(uint64_t *rng, char *text, size_t cap)
{
    static const char *const names[] = {"tp", "cp", "dp", "pp", "ep", "a_b", "_", "Xy"};
    bool assign = t_below(rng, 2);
    int dims = 1 + (int)t_below(rng, 5);
    size_t n = 0;
    for (int d = 0; d < dims; d++)
        n += (size_t)snprintf(text + n, cap - n, "%s%s%s%d",
                              d == 0   ? ""
                              : assign ? ","
                                       : "-",
                              names[t_below(rng, 8)], assign ? "=" : "", (int)t_below(rng, 12));
    if (t_below(rng, 3) == 0)
        n += (size_t)snprintf(text + n, cap - n, "@%d", (int)t_below(rng, 100));
    return n;
}

static void mutate(uint64_t *rng, char *text, size_t *len, size_t cap)
{
    static const char common[] = "=,-@0123456789tpcd _\xc3\xa9";
    size_t pos = (size_t)t_below(rng, (int64_t)*len + 1);
    char byte = t_below(rng, 8) ? common[t_below(rng, sizeof common)] : (char)t_below(rng, 256);
    switch (t_below(rng, 4)) {
    case 0: /* replace */
        if (pos < *len)
            text[pos] = byte;
        break;
    case 1: /* delete */
        if (pos < *len)
            memmove(text + pos, text + pos + 1, --*len - pos);
        break;
    case 2: /* insert */
        if (*len + 1 < cap) {
            memmove(text + pos + 1, text + pos, (*len)++ - pos);
            text[pos] = byte;
        }
        break;
    default: /* double the tail */
        if (*len + (*len - pos) + 1 < cap) {
            memmove(text + *len, text + pos, *len - pos);
            *len += *len - pos;
        }
    }
    text[*len] = '\0';
}

T_CASE(fuzzed_specs_are_judged_as_the_grammar_does)
{
    judge j;
    uint64_t rng = t_seed();
    char text[512];
    assert_int_equal(regcomp(&j.assign,
                             "^[A-Za-z_][A-Za-z0-9_]*=(0|[1-9][0-9]*)"
                             "(,[A-Za-z_][A-Za-z0-9_]*=(0|[1-9][0-9]*))*(@(0|[1-9][0-9]*))?$",
                             REG_EXTENDED | REG_NOSUB),
                     0);
    /* all digits at the end of a part are its extent, so what is before them ends in no digit */
    assert_int_equal(regcomp(&j.dash,
                             "^([A-Za-z_]|[A-Za-z_][A-Za-z0-9_]*[A-Za-z_])(0|[1-9][0-9]*)"
                             "(-([A-Za-z_]|[A-Za-z_][A-Za-z0-9_]*[A-Za-z_])(0|[1-9][0-9]*))*"
                             "(@(0|[1-9][0-9]*))?$",
                             REG_EXTENDED | REG_NOSUB),
                     0);
    accepted = refused = 0;
    for (int step = 0; step < t_scaled(60000); step++) {
        size_t len = random_valid(&rng, text, 128);
        int edits = (int)t_below(&rng, 4);
        for (int e = 0; e < edits; e++)
            mutate(&rng, text, &len, sizeof text);
        try_one(&j, text, len, t_below(&rng, 2) ? 0 : 1 + t_below(&rng, 200));
    }
    /* neither side is idle */
    assert_true(accepted > t_scaled(5000) && refused > t_scaled(5000));
    for (int step = 0; step < t_scaled(60000); step++) { /* bytes of any kind */
        size_t len = (size_t)t_below(&rng, 48);
        for (size_t i = 0; i < len; i++)
            text[i] = t_below(&rng, 2) ? (char)t_below(&rng, 256) : "tp=2,-@1"[t_below(&rng, 8)];
        text[len] = '\0';
        try_one(&j, text, len, 0);
    }
    regfree(&j.assign);
    regfree(&j.dash);
}

T_MAIN("grid/spec")
