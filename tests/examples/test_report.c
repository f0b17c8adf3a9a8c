/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The captioner's page, made from invented runs: well-formed, everything in it that went in, text
 * escaped, and a file that is whole or not there. T_KEEP_REPORT=PATH keeps the first page.
 */
#include "harness/harness.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report.h"

static const char hostile[] = "colo-captioner --src tp=2,dp=4 --report '<a&b>\"' \x01\xff\xc3\xa9";

struct run {
    colo_grid_t src_grid, dst_grid;
    colo_layout_t src, dst;
    cap_point_t loss[301], accuracy[7];
    uint8_t pixels[3][CAP_PIXELS];
    cap_sample_t samples[3];
    cap_stats_row_t stats[4];
    cap_report_t report;
    const char *dir;
    char path[1024];
};

static struct run r; /* of the case that runs, and its page */
static const char *text;

/* 48 samples x 16 rows x 96 floats = 294,912 bytes: V/8 is 36,864 */
static void invent(const char *src, const char *dst)
{
    memset(&r, 0, sizeof r);
    assert_ok(colo_grid_parse(&r.src_grid, src, 0));
    assert_ok(colo_grid_parse(&r.dst_grid, dst, 0));
    assert_ok(colo_layout_init_src(&r.src, &r.src_grid));
    assert_ok(colo_layout_init_dst(&r.dst, &r.dst_grid));
    assert_ok(colo_layout_map_offset(&r.dst, 0, 24));
    for (int i = 0; i < 301; i++)
        r.loss[i] = (cap_point_t){.step = i, .value = 5.4 * exp(-i / 60.0) + 0.02 * sin(i)};
    for (int i = 0; i < 7; i++)
        r.accuracy[i] = (cap_point_t){.step = 50 * i, .value = 1.0 - exp(-i / 1.7)};
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < CAP_PIXELS; i++)
            r.pixels[k][i] = (uint8_t)((i * (k + 3) + i / 8) % 17);
        r.samples[k] = (cap_sample_t){.row = 5 + 6 * k, .images = 1, .pixels = {r.pixels[k]}};
        strcpy(r.samples[k].want, cap_caption(k + 5));
    }
    strcpy(r.samples[0].caption, "five");
    strcpy(r.samples[1].caption, "<b>&\x07");
    r.stats[0] = (cap_stats_row_t){.where = "world",
                                   .op = COLO_OP_EXCHANGE,
                                   .category = COLO_CATEGORY_BRIDGE,
                                   .ops = 8 * 2 * 300,
                                   .bytes = 300 * 589824,
                                   .plan_bytes = 300 * 589824};
    r.stats[1] = (cap_stats_row_t){.where = "dst.tp",
                                   .op = COLO_OP_ALL_GATHER,
                                   .category = COLO_CATEGORY_LOSS,
                                   .ops = 8 * 300,
                                   .bytes = 300 * 12345 + 150,
                                   .plan_bytes = -1};
    r.stats[2] = (cap_stats_row_t){.where = "dst.<tp>",
                                   .op = COLO_OP_ALL_REDUCE,
                                   .category = COLO_CATEGORY_USER,
                                   .ops = 8 * 8 * 300,
                                   .bytes = 300 * 1000 + 1,
                                   .plan_bytes = 300 * 1000};
    r.report = (cap_report_t){.command = hostile,
                              .model = CAP_MODEL_DEFAULT,
                              .parameters = 298656,
                              .batch = 48,
                              .steps = 300,
                              .seed = 7,
                              .seconds = 12.5,
                              .tokens_per_second = 6543.2,
                              .backend = "threads",
                              .plan = {COLO_PLAN_CONFIG_INIT, .src = &r.src, .dst = &r.dst,
                                       .shape = {.samples = 48, .rows = 16, .features = 96},
                                       .dtype = COLO_F32, .output = COLO_OUTPUT_SHARDED},
                              .world = (int32_t)r.src_grid.size,
                              .loss = r.loss,
                              .nloss = 301,
                              .accuracy = r.accuracy,
                              .naccuracy = 7,
                              .samples = r.samples,
                              .nsamples = 3,
                              .held = 359,
                              .mistakes = 5,
                              .stats = r.stats,
                              .nstats = 3,
                              .stats_steps = 300};
    r.dir = t_folder();
    snprintf(r.path, sizeof r.path, "%s/report.html", r.dir);
}

static int files_in(const char *dir)
{
    DIR *d = opendir(dir);
    int n = 0;
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static const char *page(void)
{
    static char kept[1 << 22];
    FILE *f = fopen(r.path, "r");
    assert_non_null(f);
    kept[fread(kept, 1, sizeof kept - 1, f)] = '\0';
    fclose(f);
    return kept;
}

/* The page is well-formed XML, whatever is in it. */
static void draw(void)
{
    static const char begin[] = "<!DOCTYPE html>", end[] = "</html>\n";
    const char *why = cap_report_write(&r.report, r.path);
    if (why)
        fail_msg("%s", why);
    text = page();
    assert_int_equal(strncmp(text, begin, strlen(begin)), 0);
    assert_string_equal(text + strlen(text) - strlen(end), end);
    assert_int_equal(system(t_text(PYTHON " -c 'import sys, xml.etree.ElementTree as tree; "
                                          "tree.parse(sys.argv[1])' %s",
                                   r.path)),
                     0);
}

/* How often @what is in @in. */
static int count(const char *in, const char *what)
{
    int n = 0;
    for (; (in = strstr(in, what)); in += strlen(what))
        n++;
    return n;
}

static int start(void **state)
{
    invent("tp=2,dp=4", "tp=2,cp=2,dp=2");
    return 0;
}

static int finish(void **state)
{
    unlink(r.path);
    return rmdir(r.dir); /* nothing else is in it */
}

static void invent_again(const char *src, const char *dst)
{
    assert_int_equal(finish(NULL), 0);
    invent(src, dst);
}

static void has(const char *what)
{
    if (!strstr(text, what))
        fail_msg("the page lacks \"%s\"", what);
}

static void has_times(const char *what, int times)
{
    int n = count(text, what);
    if (n != times)
        fail_msg("\"%s\" is there %d times, expected %d", what, n, times);
}

static void has_message(int from, int to, int times)
{
    has_times(t_text(">rank %d to rank %d: 36864 bytes<", from, to), times);
}

T_CASE(the_page_is_well_formed_and_needs_nothing_from_outside)
{
    draw();
    has_times("http", 0);
    has_times("src=", 0);
    has_times("<script", 0);
    has_times("url(", 0);
    has_times("@import", 0);
    has("prefers-color-scheme:dark");
    has("width=device-width");
    has_times("<main>", 1);
    has_times("</main>", 1);
    has_times("<table role=\"table\">\n<caption>", 2); /* who holds what, operations */
    has_times("<thead role=\"rowgroup\"><tr role=\"row\"><th role=\"columnheader\" scope=\"col\"",
              2);
    has_times("display:none", 0); /* screen readers keep the titles on a phone, too */
    has_times("<tr><", 0);
    has_times("<td class", 0);
    has_times("<td data", 0);
    if (getenv("T_KEEP_REPORT"))
        cap_report_write(&r.report, getenv("T_KEEP_REPORT"));
}

T_CASE(curves_samples_and_facts_are_on_the_page)
{
    draw();
    has_times("<path class=\"curve\" d=\"M", 2);
    const char *loss = strstr(text, "<path class=\"curve\" d=\"M");
    const char *second = strstr(loss + 1, "<path class=\"curve\" d=\"M");
    char line[16384] = "";
    strncat(line, loss, (size_t)(strchr(loss, '>') - loss));
    assert_int_equal(count(line, " L"), 300);
    line[0] = 0;
    strncat(line, second, (size_t)(strchr(second, '>') - second));
    assert_int_equal(count(line, " L"), 6);
    has("at step 300");
    has_times("<div class=\"sample right\">", 1);
    has_times("<div class=\"sample wrong\">", 2);
    has("Mistakes come first: 2 of its 5 mistakes in 359 images, then 1 other.<");
    has("<b>five</b>");
    has("(nothing)");
    has("is six");
    has("row 17");
    int lit = 0;
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < CAP_PIXELS; i++)
            lit += r.pixels[k][i] > 0;
    has_times("fill-opacity", lit);
    has(">298,656<");
    has(">6,543<");
    has(">12.5 s<");
}

T_CASE(foreign_text_is_escaped)
{
    draw();
    has("&#39;&lt;a&amp;b&gt;&quot;&#39; \\x01\\xff\xc3\xa9");
    has("&lt;b&gt;&amp;\\x07");
    has("dst.&lt;tp&gt;");

    /* overlong, surrogate, too large, cut off: none of them is UTF-8 */
    r.report.command = "\xc0\xaf|\xed\xa0\x80|\xf5\x80\x80\x80|\xe2\x82";
    draw();
    has("\\xc0\\xaf|\\xed\\xa0\\x80|\\xf5\\x80\\x80\\x80|\\xe2\\x82");
}

/* Worked by hand (TP2/DP4 to TP2/DP2/CP2): pairs 0-2 1-3 4-6 5-7, V/8 = 36 KiB each way. */
T_CASE(the_layout_pictures_show_every_message_with_its_bytes)
{
    assert_ok(colo_layout_map_offset(&r.dst, 0, 16)); /* a zigzag of the image rows alone */
    draw();
    for (int a = 0; a < 8; a++)
        has_message(a, a ^ 2, 2); /* forward and backward */
    has_times(" to rank ", 16);
    has("<b>Forward, activations</b> 8 messages, 288 KiB in all, "
        "at most 36 KiB into one rank. Each receiver gets only what it lacks");
    has_times("<text class=\"rank\"", 2 * 2 * 8);
    has(">tp 1  dp 3<");
    has(">tp 1  cp 1<");
    has("samples 24 to 47, rows 0 to 3, 12 to 15");

    assert_int_equal(cap_report_plan_bytes(&r.report.plan, 8, COLO_PASS_FORWARD), 294912);
    assert_int_equal(cap_report_plan_bytes(&r.report.plan, 8, COLO_PASS_BACKWARD), 294912);
}

T_CASE(a_ragged_page_has_several_images_a_sample_and_rows_per_rank)
{
    invent_again("tp=2,cp=2,dp=2", "tp=2,cp=2,dp=2");
    const int64_t before[] = {70, 1, 2, 3}, after[] = {19, 20, 21, 1016};
    cap_balance_t balance = {.replicas = 4,
                             .before = before,
                             .after = after,
                             .steps = 4,
                             .most_before = 10.0,
                             .most_after = 4.2,
                             .pixels = 2048,
                             .embeddings = 1536,
                             .gradients = 96};
    assert_ok(colo_layout_init(&r.src, &r.src_grid));
    assert_ok(colo_layout_split(&r.src, COLO_AXIS_SAMPLES, "dp", COLO_SPLIT_BLOCK));
    assert_ok(colo_layout_split(&r.src, COLO_AXIS_SAMPLES, "cp", COLO_SPLIT_BLOCK));
    r.report.balance = &balance;
    r.samples[2].images = 3;
    for (int k = 0; k < 3; k++)
        r.samples[2].pixels[k] = r.pixels[k];
    strcpy(r.samples[2].want, "five six seven");
    r.samples[0].images = 0;
    strcpy(r.samples[0].want, "none");
    draw();
    has("is five six seven");
    has_times("viewBox=\"0 0 8 8\"", 4);
    has("2.50 times the mean before and has 1.05 times after");
    has("moves 2 KiB of pixels to the replicas that encode them, 1.5 KiB of embeddings to "
        "the language model, and 96 B of gradients back.");
    /* tp varies fastest, then cp: ranks 2d and 2d + 1 are replica d, with dp as its high digit */
    for (int rank = 0; rank < 8; rank++) {
        has(t_text("\"rank\">%d</td><td role=\"cell\" data-name=\"replica\">%d<", rank, rank / 2));
    }
    has_times("\"rows before\">70 <", 2);
    has_times("\"rows after\">1,016 <", 2);
    assert_null(strstr(text, "Forward, activations"));
}

/* TP4/DP2 to TP1/CP2/DP4: nothing forward; backward V/8 from each rank to the others of its four */
T_CASE(a_way_without_messages_says_so)
{
    invent_again("tp=4,dp=2", "tp=1,cp=2,dp=4");
    assert_ok(colo_layout_map_offset(&r.dst, 0, 16));
    draw();
    has("<b>Forward, activations</b> no messages: every rank already has its part");
    has("<b>Backward, gradients</b> 24 messages, 864 KiB in all");
    has_times(" to rank ", 24);
    for (int a = 0; a < 8; a++)
        for (int b = a / 4 * 4; b < a / 4 * 4 + 4; b++)
            has_message(a, b, a != b);
    has_times(" keeps 36864 bytes", 16);
    assert_int_equal(cap_report_plan_bytes(&r.report.plan, 8, COLO_PASS_FORWARD), 0);
    assert_int_equal(cap_report_plan_bytes(&r.report.plan, 8, COLO_PASS_BACKWARD), 24 * 36864);
}

T_CASE(the_stats_stand_next_to_the_plan)
{
    draw();
    has("<td role=\"cell\" data-name=\"operation\">exchange</td>");
    has("data-name=\"bytes per step\">589,824<");
    has("data-name=\"plan\">589,824<");
    has("data-name=\"calls per step\">16<");
    has("data-name=\"bytes per step\">12345.50<");
    has_times("\xe2\x9c\x93 yes", 1);
    has("\xe2\x9c\x97 no, +1 in all"); /* one byte in 300 steps too many */
    has("1 of 2 planned rows moved something else");
    r.stats[2].bytes--;
    draw();
    has_times("\xe2\x9c\x93 yes", 2);
    has("Every planned row moved exactly what was planned");
}

T_CASE(empty_and_broken_runs_still_make_a_page)
{
    invent_again("dp=1", "tp=1");
    r.report.nloss = r.report.naccuracy = r.report.nsamples = r.report.nstats = 0;
    r.report.plan.no_grad = true;
    draw();
    has("was not recorded");
    has("No samples were recorded");
    has("the source side is frozen");

    r.report.nloss = 3; /* good, not a number, good: two strokes, no "nan" in a path */
    r.report.naccuracy = 1;
    r.loss[1].value = NAN;
    draw();
    const char *d = strstr(text, "class=\"curve\" d=\"");
    assert_non_null(d);
    char line[256] = "";
    strncat(line, d + 17, strcspn(d + 17, "\""));
    assert_int_equal(count(line, "M"), 2);
    assert_int_equal(count(line, "L"), 0);
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));

    r.loss[0].value = r.loss[2].value = INFINITY;
    draw();
    assert_null(strstr(text, "inf"));
    has("not a number");
}

T_CASE(large_and_staged_worlds_are_handled)
{
    invent_again("cp=1,tp=2,dp=4", "tp=2,pp=2,dp=2");
    draw();
    has("<h1>Captioner: tp=2,dp=4 \xe2\x86\x92 tp=2,pp=2,dp=2</h1>");
    has_times("<g class=\"cell none\">", 2 * 4); /* pp 1, both pictures */

    invent_again("tp=8,dp=16", "tp=4,dp=32");
    draw();
    has("Pictures are drawn up to 64 ranks");
    has_times("<text class=\"rank\"", 0);
}

T_CASE(a_page_that_cannot_be_written_leaves_nothing)
{
    const char *why;

    const char *path = t_text("%s/no/report.html", r.dir);
    why = cap_report_write(&r.report, path);
    assert_non_null(why);
    assert_non_null(strstr(why, path));
    assert_non_null(strstr(why, "No such file or directory"));
    why = cap_report_write(&r.report, r.dir);
    assert_non_null(why);
    assert_non_null(strstr(why, "is a directory"));
    assert_int_equal(files_in(r.dir), 0);

    /* a disk that is full after 4 KiB */
    struct rlimit was, small;
    getrlimit(RLIMIT_FSIZE, &was);
    small = was;
    small.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    why = cap_report_write(&r.report, r.path);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_non_null(why);
    assert_non_null(strstr(why, "File too large"));
    assert_int_equal(files_in(r.dir), 0);
}

static void *drain(void *arg)
{
    static char last[16];
    char part[4096];
    int fd = open(arg, O_RDONLY);
    size_t end = 0;

    for (ssize_t n; (n = read(fd, part, sizeof part)) > 0;)
        for (ssize_t i = 0; i < n; i++)
            last[end++ % 8] = part[i];
    close(fd);
    char tail[9] = "";
    for (size_t i = 0; i < 8 && end >= 8; i++)
        tail[i] = last[(end + i) % 8];
    memcpy(last, tail, sizeof tail);
    return last;
}

/* Renaming over a pipe or a device would replace it. */
T_CASE(a_pipe_is_written_in_place)
{
    struct stat st;
    pthread_t reader;
    void *last = NULL;

    assert_int_equal(mkfifo(r.path, 0600), 0);
    assert_int_equal(pthread_create(&reader, NULL, drain, r.path), 0);
    const char *why = cap_report_write(&r.report, r.path);
    bool fifo = stat(r.path, &st) == 0 && S_ISFIFO(st.st_mode);
    if (!fifo) { /* let the reader go */
        pthread_detach(reader);
        fail_msg("the pipe was replaced by a file");
    }
    pthread_join(reader, &last);
    assert_null(why);
    assert_string_equal(last, "</html>\n");
}

T_CASE(a_plan_that_cannot_be_made_keeps_the_old_page)
{
    draw();
    char *old = strdup(text);
    assert_ok(colo_layout_map_offset(&r.dst, 0, 18)); /* 2 cp does not divide 18 */
    const char *why = cap_report_write(&r.report, r.path);
    assert_non_null(why);
    assert_non_null(strstr(why, "18"));
    assert_int_equal(files_in(r.dir), 1);
    assert_string_equal(page(), old);
    free(old);
    assert_int_equal(cap_report_plan_bytes(&r.report.plan, 8, COLO_PASS_FORWARD), -1);

    r.report.world = 0;
    assert_non_null(strstr(cap_report_write(&r.report, r.path), "has 0"));
    r.report.world = 8;
    r.report.stats_steps = 0;
    assert_non_null(strstr(cap_report_write(&r.report, r.path), "over 0 steps"));
}

T_MAIN_EACH("examples/report", start, finish)
