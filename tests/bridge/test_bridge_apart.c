/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge_apart.c - input and output of a bridge in one buffer: accepted where no element is
 * shared, refused where one is. One rank; its bridge copies x to y.
 */
#include "harness/harness.h"

#include <colobridge.h>

enum { B = 2, N = 3, H = 2, CAPACITY = 256 };

static colo_bridge_t *bridge;
static colo_comm_t *self;

static int make_bridge(void **state)
{
    colo_grid_t grid;
    colo_layout_t src, dst;
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &src,       .dst = &dst,
                                   .shape = {B, N, H, 0},   .dtype = COLO_I32, .no_grad = true};
    return colo_grid_parse(&grid, "dp=1", 1) || colo_layout_init_src(&src, &grid) ||
           colo_layout_init_dst(&dst, &grid) || colo_comm_create_self(&self) ||
           colo_bridge_create(&bridge, &config, self);
}

static int end_bridge(void **state)
{
    colo_bridge_destroy(&bridge);
    colo_comm_destroy(&self);
    return 0;
}

static colo_tensor_t view(int32_t *data, const int64_t *stride)
{
    colo_tensor_t t = colo_tensor_host(data, COLO_I32, 3, (int64_t[]){B, N, H});
    memcpy(t.stride, stride, 3 * sizeof *stride);
    return t;
}

/* Element by element, which ones of the buffer a view touches. */
static void touch(bool *used, int64_t first, const int64_t *stride)
{
    for (int b = 0; b < B; b++)
        for (int s = 0; s < N; s++)
            for (int h = 0; h < H; h++)
                used[first + b * stride[0] + s * stride[1] + h * stride[2]] = true;
}

/* Forward within one buffer; true when it was accepted, and then it was right. */
static bool forward(int64_t xat, const int64_t *xs, int64_t yat, const int64_t *ys)
{
    int32_t memory[CAPACITY], was[CAPACITY];
    bool in[CAPACITY] = {false}, out[CAPACITY] = {false}, shared = false;
    touch(in, xat, xs);
    touch(out, yat, ys);
    for (int i = 0; i < CAPACITY; i++) {
        was[i] = memory[i] = 1000 + i;
        shared = shared || (in[i] && out[i]);
    }
    colo_tensor_t x = view(memory + xat, xs), y = view(memory + yat, ys);
    colo_status_t st = colo_bridge_forward(bridge, &x, &y, NULL);
    if (st != COLO_OK) {
        assert_fails(st, COLO_ERR_ARG, "x and y overlap in memory");
        assert_memory_equal(memory, was, sizeof memory);
        /* such an error kills its comm */
        end_bridge(NULL);
        assert_int_equal(make_bridge(NULL), 0);
        return false;
    }
    if (shared)
        fail_msg("x at %d by %d %d %d and y at %d by %d %d %d share an element", (int)xat,
                 (int)xs[0], (int)xs[1], (int)xs[2], (int)yat, (int)ys[0], (int)ys[1], (int)ys[2]);
    for (int b = 0; b < B; b++)
        for (int s = 0; s < N; s++)
            for (int h = 0; h < H; h++)
                assert_int_equal(memory[yat + b * ys[0] + s * ys[1] + h * ys[2]],
                                 was[xat + b * xs[0] + s * xs[1] + h * xs[2]]);
    for (int i = 0; i < CAPACITY; i++)
        assert_true(out[i] || memory[i] == was[i]);
    return true;
}

/* An output whose elements meet each other is refused, wherever the input is. */
static void refuse_itself(int64_t xat, const int64_t *xs, int64_t yat, const int64_t *ys)
{
    int32_t memory[CAPACITY], was[CAPACITY];
    for (int i = 0; i < CAPACITY; i++)
        was[i] = memory[i] = 1000 + i;
    colo_tensor_t x = view(memory + xat, xs), y = view(memory + yat, ys);
    assert_fails(colo_bridge_forward(bridge, &x, &y, NULL), COLO_ERR_SHAPE, "rank 0: y");
    assert_non_null(strstr(colo_last_error(), "elements share an address"));
    assert_memory_equal(memory, was, sizeof memory);
    end_bridge(NULL);
    assert_int_equal(make_bridge(NULL), 0);
}

T_CASE(columns_and_rows_of_one_buffer_are_apart)
{
    static const int64_t wide[] = {12, 4, 1}, gaps[] = {20, 4, 1}, interleaved[] = {12, 2, 1};
    assert_true(forward(0, wide, 2, wide));    /* left and right columns */
    assert_true(forward(2, wide, 0, wide));    /* the other way round */
    assert_true(forward(0, gaps, 18, wide));   /* samples elsewhere, columns 2 and 3 of 4 */
    assert_true(forward(0, interleaved, 6, interleaved)); /* samples in turn */
    assert_true(forward(0, wide, 100, interleaved));      /* nowhere near */
    assert_false(forward(0, wide, 0, wide));
    assert_false(forward(0, wide, 1, wide)); /* a column of both */
    assert_false(forward(0, wide, 3, wide)); /* column 3 and the next row's 0 */
    assert_false(forward(0, interleaved, 5, interleaved));
    assert_false(forward(0, interleaved, 4, wide));
}

T_CASE(what_is_accepted_shares_no_element)
{
    uint64_t seed = t_seed();
    int accepted = 0, refused = 0;
    for (int64_t i = t_scaled(3000); i > 0; i--) {
        int64_t xs[3], ys[3];
        for (int a = 0; a < 3; a++) {
            xs[a] = (int64_t)t_below(&seed, 4) ? 1 + (int64_t)t_below(&seed, 12) : 24;
            ys[a] = (int64_t)t_below(&seed, 2) ? xs[a] : 1 + (int64_t)t_below(&seed, 12);
        }
        bool seen[CAPACITY] = {false};
        touch(seen, 0, ys);
        int distinct = 0;
        for (int k = 0; k < CAPACITY; k++)
            distinct += seen[k];
        const int64_t xat = (int64_t)t_below(&seed, 24), yat = (int64_t)t_below(&seed, 24);
        if (distinct == B * N * H)
            accepted += forward(xat, xs, yat, ys);
        else
            refuse_itself(xat, xs, yat, ys), refused++;
    }
    assert_true(accepted > 0 && refused > 0);
}

T_MAIN_AROUND("bridge/bridge_apart", make_bridge, end_bridge)
