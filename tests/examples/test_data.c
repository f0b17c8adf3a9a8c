/* SPDX-License-Identifier: Apache-2.0 */
/* The digits data set: what is in it, how it is split and walked, and what the reader refuses. */
#include "harness/harness.h"

#include <unistd.h>

#include "captioner.h"

static const char *data_path(void)
{
    const char *path = getenv("CAPTIONER_DATA");
    return path ? path : "examples/captioner/data/digits.csv";
}

static int load(void **state)
{
    static cap_data_t data;
    char why[256] = "";
    if (cap_data_load(&data, data_path(), why, sizeof why) < 0) {
        print_error("%s\n", why);
        return -1;
    }
    *state = &data;
    return 0;
}

static int unload(void **state)
{
    cap_data_free(*state);
    return 0;
}

T_CASE(the_file_has_1797_digits_of_which_299_are_held_out)
{
    const cap_data_t *d = *state;
    int64_t per_label[10] = {0};

    assert_int_equal(d->n, 1797);
    assert_int_equal(d->ntrain, 1498);
    assert_int_equal(d->nheld, 299);
    for (int64_t i = 0; i < d->n; i++) {
        assert_true(d->label[i] <= 9);
        per_label[d->label[i]]++;
        for (int k = 0; k < CAP_PIXELS; k++)
            assert_true(d->pixels[i][k] <= 16);
    }
    /* the counts that the data set's own description gives */
    static const int64_t want[] = {178, 182, 177, 183, 181, 182, 181, 179, 174, 180};
    for (int k = 0; k < 10; k++)
        assert_int_equal(per_label[k], want[k]);
    static const uint8_t row0[] = {0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0};
    assert_memory_equal(d->pixels[0], row0, sizeof row0);
    assert_int_equal(d->label[1796], 8);
}

T_CASE(every_sixth_row_is_held_out_and_no_other)
{
    const cap_data_t *d = *state;
    uint8_t seen[1797] = {0};

    for (int64_t i = 0; i < d->nheld; i++) {
        assert_int_equal(d->held[i] % 6, 5);
        seen[d->held[i]]++;
    }
    for (int64_t i = 0; i < d->ntrain; i++) {
        assert_int_not_equal(d->train[i] % 6, 5);
        seen[d->train[i]]++;
    }
    for (int i = 0; i < 1797; i++)
        assert_int_equal(seen[i], 1);
}

T_CASE(captions_are_words_that_fit_the_text)
{
    static const char *const want[] = {"zero", "one", "two",   "three", "four",
                                       "five", "six", "seven", "eight", "nine"};
    for (int k = 0; k < 10; k++) {
        assert_string_equal(cap_caption(k), want[k]);
        assert_true(strlen(cap_caption(k)) < CAP_TEXT);
    }
    assert_string_equal(cap_caption(-1), "");
    assert_string_equal(cap_caption(10), "");
}

T_CASE(patches_are_two_by_two_row_by_row)
{
    uint8_t pixels[CAP_PIXELS];
    float got[CAP_PATCHES * CAP_PATCH];

    for (int i = 0; i < CAP_PIXELS; i++)
        pixels[i] = (uint8_t)i; /* position-coded; the reader's limit of 16 is not its concern */
    cap_patches(pixels, got);
    /* patch 0 is pixels 0 1 8 9, patch 1 is 2 3 10 11, patch 4 is 16 17 24 25, ... */
    static const int patch[] = {0, 1, 4, 6, 15};
    static const int first[] = {0, 2, 16, 20, 54};
    for (int k = 0; k < 5; k++) {
        const float *p = got + patch[k] * CAP_PATCH;
        assert_true(p[0] == (float)first[k] / 16.0f);
        assert_true(p[1] == (float)(first[k] + 1) / 16.0f);
        assert_true(p[2] == (float)(first[k] + 8) / 16.0f);
        assert_true(p[3] == (float)(first[k] + 9) / 16.0f);
    }
}

T_CASE(crop_moves_ink_to_the_corner_and_keeps_patches_with_a_pixel)
{
    uint8_t pixels[CAP_PIXELS] = {0};
    float got[CAP_PATCHES * CAP_PATCH];
    int64_t place[CAP_PATCHES];

    assert_int_equal(cap_crop(pixels, got, place), 0); /* no ink, no rows */
    /* ink in rows 3 to 5, columns 2 to 6: 3 x 5 pixels, so 2 x 3 patches */
    pixels[3 * 8 + 6] = 16;
    pixels[4 * 8 + 2] = 8;
    pixels[5 * 8 + 3] = 4;
    assert_int_equal(cap_crop(pixels, got, place), 6);
    static const int64_t want[] = {0, 1, 2, 4, 5, 6};
    assert_memory_equal(place, want, sizeof want);
    float patches[6][CAP_PATCH] = {{0, 0, 0.5f, 0}, {0}, {1, 0, 0, 0}, {0, 0.25f, 0, 0}};
    assert_memory_equal(got, patches, sizeof patches);

    memset(pixels, 1, sizeof pixels);
    assert_int_equal(cap_crop(pixels, got, place), CAP_PATCHES);
    assert_int_equal(place[CAP_PATCHES - 1], CAP_PATCHES - 1);
}

T_CASE(ragged_samples_have_0_to_3_images_of_their_part_of_the_data)
{
    const cap_data_t *d = *state;
    const cap_task_t task = {.ragged = true, .least = 0, .most = 3};
    int64_t rows[100 * 3], again[100 * 3], held[3];
    int count[2][4] = {{0}};

    cap_samples(d, &task, 5, 7, 100, rows);
    cap_samples(d, &task, 5, 7, 100, again);
    assert_memory_equal(rows, again, sizeof rows);
    cap_samples(d, &task, 6, 7, 100, again);
    assert_memory_not_equal(rows, again, sizeof rows);
    for (int i = 0; i < 299; i++) {
        cap_held_sample(d, &task, i, held);
        for (int side = i < 100 ? 0 : 1; side < 2; side++) {
            const int64_t *sample = side ? held : rows + 3 * i;
            int n = 0;

            while (n < 3 && sample[n] >= 0)
                assert_true((sample[n++] % 6 == 5) == (side == 1));
            count[side][n]++;
            for (; n < 3; n++)
                assert_int_equal(sample[n], -1);
        }
    }
    for (int n = 0; n < 4; n++) { /* a quarter each, within 4 deviations */
        assert_in_range(count[0][n], 25 - 17, 25 + 17);
        assert_in_range(count[1][n], 75 - 30, 75 + 30);
    }
}

T_CASE(ragged_captions_name_all_digits_or_none)
{
    const cap_data_t *d = *state;
    const cap_task_t task = {.ragged = true, .least = 0, .most = 3};
    char text[CAP_SAID];

    cap_caption_text(d, &task, (const int64_t[]){-1, -1, -1}, text);
    assert_string_equal(text, "none");
    cap_caption_text(d, &task, (const int64_t[]){7, 3, -1}, text);
    assert_string_equal(text, "seven three");
    cap_caption_text(d, &task, (const int64_t[]){3, 7, 3}, text);
    assert_string_equal(text, "three seven three"); /* none is longer */
    assert_int_equal(strlen(text) + 1, CAP_SAID);
    assert_int_equal(d->label[3], 3);
    assert_int_equal(d->label[7], 7);
}

T_CASE(an_epoch_of_batches_covers_every_training_row_once)
{
    const cap_data_t *d = *state;
    static const int64_t batches[] = {1, 7, 48, 749, 1000, 1498}; /* 48 straddles epochs */

    for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
        int64_t batch = batches[b], rows[1498];
        int count[1797] = {0};
        int epochs = 0;
        for (int64_t k = 0; epochs < 3; k += batch) {
            cap_batch(d, 3, k / batch, batch, rows);
            for (int64_t i = 0; i < batch; i++) {
                count[rows[i]]++;
                if ((k + i) % 1498 != 1497)
                    continue;
                for (int64_t r = 0; r < 1797; r++) { /* an epoch ended */
                    assert_int_equal(count[r], r % 6 != 5);
                    count[r] = 0;
                }
                epochs++;
            }
        }
    }
}

T_CASE(batches_are_reproducible_and_differ_by_seed_step_and_epoch)
{
    const cap_data_t *d = *state;
    int64_t a[48], b[48], whole[96];

    cap_batch(d, 1, 5, 48, a);
    cap_batch(d, 1, 5, 48, b);
    assert_memory_equal(a, b, sizeof a);
    cap_batch(d, 2, 5, 48, b);
    assert_memory_not_equal(a, b, sizeof a);
    cap_batch(d, 1, 6, 48, b);
    assert_memory_not_equal(a, b, sizeof a);

    /* batches are cut from one walk: two of 48 are one of 96 */
    cap_batch(d, 1, 0, 96, whole);
    cap_batch(d, 1, 0, 48, a);
    cap_batch(d, 1, 1, 48, b);
    assert_memory_equal(whole, a, sizeof a);
    assert_memory_equal(whole + 48, b, sizeof b);

    /* the second epoch has another order */
    int64_t first[1498], second[1498];
    cap_batch(d, 1, 0, 1498, first);
    cap_batch(d, 1, 1, 1498, second);
    int same = 0;
    for (int i = 0; i < 1498; i++)
        same += first[i] == second[i];
    assert_true(same < 20); /* a random permutation fixes one place on average */
}

/* ---- what the reader refuses ---- */

/* A row of 65 fields, 0s and label 3, with field @field replaced by @text (NULL: left out). */
static void put_row(FILE *f, int field, const char *text, const char *end)
{
    for (int i = 0; i < 65; i++) {
        if (i == field && !text)
            continue;
        fprintf(f, "%s%s", i ? "," : "", i == field ? text : i == 64 ? "3" : "0");
    }
    fputs(end, f);
}

struct bad {
    int row, field; /* which of three rows, which field */
    const char *text, *end;
    const char *want; /* after "PATH:LINE: " */
};

static void check_refused(const char *path, const char *want)
{
    cap_data_t data, before;
    char why[512] = "", full[512];

    memset(&data, 0x5a, sizeof data);
    before = data;
    snprintf(full, sizeof full, "%s%s", path, want);
    assert_int_equal(cap_data_load(&data, path, why, sizeof why), -1);
    assert_string_equal(why, full);
    assert_memory_equal(&data, &before, sizeof data); /* untouched */
}

T_CASE(bad_rows_are_refused_with_file_line_and_what_was_found)
{
    static const struct bad bad[] = {
        {0, 0, "17", "\n", ":1: field 1 of 65: found 17, expected a pixel 0 to 16"},
        {1, 63, "99999999999", "\n", ":2: field 64 of 65: found 9999..., expected a pixel 0 to 16"},
        {2, 64, "10", "\n", ":3: field 65 of 65: found 10, expected a label 0 to 9"},
        {1, 4, "-1", "\n", ":2: field 5 of 65: expected a number, found '-'"},
        {1, 4, " 1", "\n", ":2: field 5 of 65: expected a number, found byte 0x20"},
        {1, 4, "1 ", "\n", ":2: after field 5 of 65: expected a comma, found byte 0x20"},
        {1, 4, "1.5", "\n", ":2: after field 5 of 65: expected a comma, found '.'"},
        {1, 4, "", "\n", ":2: field 5 of 65: expected a number, found ','"},
        {1, 4, "x", "\n", ":2: field 5 of 65: expected a number, found 'x'"},
        {1, 4, "\xc3\xa9", "\n", ":2: field 5 of 65: expected a number, found byte 0xc3"},
        {1, 4, NULL, "\n", ":2: found 64 fields, expected 65"},
        {2, 64, NULL, "", ":3: found 64 fields, expected 65"},
        {1, 64, "3,7", "\n", ":2: after field 65 of 65: expected the end of the line, found ','"},
        {1, 64, "3", "\r\n",
         ":2: after field 65 of 65: expected the end of the line, found byte 0x0d"},
        {1, 64, "3", "\n\n", ":3: field 1 of 65: expected a number, found the end of the line"},
        {2, 64, "", "", ":3: field 65 of 65: expected a number, found the end of the file"},
    };
    const char *folder = t_folder(), *path = t_text("%s/digits.csv", folder);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        for (int row = 0; row < 3; row++) {
            bool here = row == bad[i].row;
            put_row(f, here ? bad[i].field : -1, bad[i].text, here ? bad[i].end : "\n");
        }
        fclose(f);
        check_refused(path, bad[i].want);
    }
    assert_true(unlink(path) == 0 && rmdir(folder) == 0);
}

T_CASE(files_without_rows_are_refused)
{
    const char *folder = t_folder(), *path = t_text("%s/digits.csv", folder);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    check_refused(path, ":1: found no rows, expected lines of 65 numbers");
    assert_true(fwrite("\0", 1, 2, f) == 2 && fclose(f) == 0);
    check_refused(path, ":1: field 1 of 65: expected a number, found byte 0x00");
    assert_true(unlink(path) == 0 && rmdir(folder) == 0);
    check_refused(path, ": No such file or directory");
    check_refused("/", ":1: Is a directory");
}

T_CASE(a_last_line_without_newline_is_read)
{
    const char *folder = t_folder(), *path = t_text("%s/digits.csv", folder);
    char why[128] = "";
    FILE *f = fopen(path, "w");
    cap_data_t d;

    assert_non_null(f);
    for (int row = 0; row < 7; row++)
        put_row(f, 2, row == 6 ? "16" : "1", row == 6 ? "" : "\n");
    fclose(f);
    if (cap_data_load(&d, path, why, sizeof why) < 0)
        fail_msg("%s", why);
    assert_int_equal(d.n, 7);
    assert_int_equal(d.ntrain, 6);
    assert_int_equal(d.nheld, 1);
    assert_int_equal(d.held[0], 5);
    assert_int_equal(d.pixels[6][2], 16);
    assert_int_equal(d.label[6], 3);
    cap_data_free(&d);
    assert_null(d.pixels);
    assert_true(unlink(path) == 0 && rmdir(folder) == 0);
}

T_CASE(a_short_error_message_buffer_is_not_overrun)
{
    cap_data_t d;
    char why[8] = "1234567";

    assert_int_equal(cap_data_load(&d, "/nowhere/digits.csv", why, 4), -1);
    assert_string_equal(why, "/no");
    assert_int_equal(why[4], '5');
    assert_int_equal(cap_data_load(&d, "/nowhere/digits.csv", NULL, 0), -1);
}

T_MAIN_AROUND("examples/data", load, unload)
