/* SPDX-License-Identifier: Apache-2.0 */
/* test_harness.c - what T_SCALE leaves of lists of cases. */
#include "harness/harness.h"

static const char *const scales[] = {"1", "2", "10", "20", "50", "99", "100"};

T_CASE(a_list_is_thinned_evenly)
{
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        int64_t left = 0, odd = 0;
        setenv("T_SCALE", scales[i], 1);
        assert_false(t_left_out(0)); /* a short list is not empty */
        for (int64_t nth = 0; nth < 1000; nth++) {
            left += !t_left_out(nth);
            odd += nth % 2 && !t_left_out(nth);
        }
        assert_true(i == 0 || (odd * 3 >= left && odd * 3 <= 2 * left)); /* 1 %: one of a hundred */
        assert_int_equal(left, 10 * atoi(scales[i]));
        assert_int_equal(left, t_scaled(1000));
    }
}

T_CASE(nested_loops_keep_all_pairs_of_their_places)
{
    static const int64_t places[][4] = {{3, 4, 5, 6}, {8, 3, 3, 1}, {2, 2, 2, 2}, {1, 9, 1, 4}};
    for (size_t l = 0; l < sizeof places / sizeof *places; l++)
        for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
            const int64_t *of = places[l];
            bool met[4][9][4][9] = {{{{false}}}};
            int64_t left = 0, at[4];
            setenv("T_SCALE", scales[i], 1);
            for (at[0] = 0; at[0] < of[0]; at[0]++)
                for (at[1] = 0; at[1] < of[1]; at[1]++)
                    for (at[2] = 0; at[2] < of[2]; at[2]++)
                        for (at[3] = 0; at[3] < of[3]; at[3]++) {
                            if (T_LEFT_OUT({at[0], of[0]}, {at[1], of[1]}, {at[2], of[2]},
                                           {at[3], of[3]}))
                                continue;
                            left++;
                            for (int a = 0; a < 4; a++)
                                for (int b = 0; b < 4; b++)
                                    met[a][at[a]][b][at[b]] = true;
                        }
            for (int a = 0; a < 4; a++)
                for (int b = 0; b < a; b++)
                    for (int64_t x = 0; x < of[a]; x++)
                        for (int64_t y = 0; y < of[b]; y++)
                            assert_true(met[a][x][b][y]);
            const int64_t all = of[0] * of[1] * of[2] * of[3];
            assert_in_range(left, t_scaled(all) - 1, all); /* of a part of a hundred, perhaps */
            if (l == 0 && i == 0) /* 360 cases, 30 of them are a bound from below */
                assert_in_range(left, 30, 60);
        }
}

T_MAIN("core/harness")
