/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge.c - a bridge on device memory where all movement is local, and what is refused.
 */
#include "gpu/gpu.h"

static void init(colo_layout_t *src, colo_layout_t *dst, const char *from, const char *to, int n)
{
    colo_grid_t g;
    assert_ok(colo_grid_parse(&g, from, n));
    assert_ok(colo_layout_init_src(src, &g));
    assert_ok(colo_grid_parse(&g, to, n));
    assert_ok(colo_layout_init_dst(dst, &g));
}

/* [B, S, H] on one rank, into rows that lie apart, and back */
T_CASE(one_rank_copies_into_any_strides)
{
    enum { B = 3, S = 5, H = 24, GAP = 8, N = B * S * H, WIDE = B * S * (H + GAP) };
    colo_layout_t src, dst;
    T_ENDS(colo_comm_destroy) colo_comm_t *self = NULL;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    uint16_t x[N], y[WIDE], back[N];
    for (int i = 0; i < N; i++)
        x[i] = (uint16_t)(3 * i + 1);
    init(&src, &dst, "tp=1,dp=1", "tp=1,cp=1,dp=1", 1);
    colo_bridge_config_t cfg = {COLO_BRIDGE_CONFIG_INIT, .src = &src,        .dst = &dst,
                                .shape = {B, S, H, 0},   .dtype = COLO_BF16, .mem = COLO_MEM_CUDA};
    assert_ok(colo_comm_create_self(&self));
    assert_ok(colo_bridge_create(&bridge, &cfg, self));
    GPU_AUTOFREE void *dx = gpu_put(x, sizeof x), *dy = gpu_put(NULL, sizeof y),
                      *db = gpu_put(NULL, sizeof x);
    colo_tensor_t in = colo_tensor_cuda(dx, COLO_BF16, 0, 3, (int64_t[]){B, S, H});
    colo_tensor_t out = colo_tensor_cuda(dy, COLO_BF16, 0, 3, (int64_t[]){B, S, H}), ret = in;
    out.stride[0] = S * (H + GAP);
    out.stride[1] = H + GAP;
    ret.data = db;
    assert_ok(colo_bridge_forward(bridge, &in, &out, NULL));
    assert_ok(colo_bridge_backward(bridge, &out, &ret, NULL));
    gpu_get(y, dy, sizeof y);
    gpu_get(back, db, sizeof back);
    for (int i = 0; i < WIDE; i++)
        assert_int_equal(y[i], i % (H + GAP) < H ? x[i / (H + GAP) * H + i % (H + GAP)] : 0xa5a5);
    assert_memory_equal(back, x, sizeof x);
}

T_MAIN_IF(gpu_need(1), "gpu/bridge")
