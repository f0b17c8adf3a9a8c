/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weight-product.cu - the gradient of the lm_head's weight on Hopper: d_W (+)= zT h of 16-bit operands.
 *
 * Its sum is over rows, so both operands have their lines in columns, and the engine takes boxes of 64
 * rows and 64 columns. fp32 results are added to what is there by the engine, in the L2 cache, while
 * other products go on: adding costs a tenth of the product's time where a kernel that reads d_W first
 * takes a third. Tiles go on along hidden, whose rows all blocks read, so d_logits are read once.
 */
#include "tiles.cuh"

namespace
{

struct weight_args {
    int32_t depths, row_tiles, column_tiles; /* row_tiles: of a cluster, along columns of z */
    float factor;
    const float *scale;
};

struct place {
    int row, column;
};
__device__ __forceinline__ place place_of(const weight_args &p, int64_t tile)
{
    const int row = (int)(tile / p.column_tiles);
    return {row, (int)(tile - (int64_t)row * p.column_tiles)};
}

template <typename D, writes WRITES, bool ADDS>
__global__ void __launch_bounds__(THREADS, 1)
    weight_kernel(const __grid_constant__ CUtensorMap z, const __grid_constant__ CUtensorMap h,
                  const __grid_constant__ CUtensorMap w, const __grid_constant__ weight_args p)
{
    if constexpr (HAS_WGMMA) {
        constexpr int WIDTH = 64, BOX = DEPTH * WIDTH * 2, OF_A = BLOCK_ROWS / WIDTH,
                      OF_B = COLUMNS / WIDTH / CLUSTER;
        const int64_t tiles = (int64_t)p.row_tiles * p.column_tiles;
        copy_and_multiply(
            p.depths,
            [&](const memory &m, int rank) {
                copy_tiles(m, tiles, p.depths, [&](int64_t i, int k, int stage, uint32_t full) {
                    const place at = place_of(p, i);
                    for (int b = 0; b < OF_A; b++)
                        tile_load(m.a(stage) + b * BOX, &z, full,
                                  (at.row * CLUSTER + rank) * BLOCK_ROWS + b * WIDTH, k * DEPTH);
                    for (int b = rank * OF_B; b < (rank + 1) * OF_B; b++)
                        tile_load_for(m.b(stage) + b * BOX, &h, full, at.column * COLUMNS + b * WIDTH,
                                      k * DEPTH, (1 << CLUSTER) - 1);
                });
            },
            [&](const memory &m, int rank, group &g) {
                turn t = {0, 0};
                float c[128];
                const float factor = p.factor * (p.scale ? *p.scale : 1);
                for_each_tile(tiles, [&](int64_t i) {
                    const place at = place_of(p, i);
                    multiply<D, true>(c, m, g, t, p.depths);
#pragma unroll
                    for (int j = 0; j < 128; j++)
                        c[j] *= factor;
                    write<D, WRITES, ADDS>(c, m, g, w, at.column * COLUMNS,
                                           (at.row * CLUSTER + rank) * BLOCK_ROWS + g.number * ROWS);
                });
            });
    }
}

template <typename D, writes WRITES, bool ADDS>
cudaError_t launch(const colo_linear_summed &g, cudaStream_t stream)
{
    CUtensorMap z, h, w;
    cudaError_t e = map_of(g.z, g.rows, g.columns, DEPTH, &z);
    if (e == cudaSuccess)
        e = map_of(g.h, g.rows, g.hidden, DEPTH, &h);
    if (e == cudaSuccess)
        e = map_of(g.w, g.columns, g.hidden, ROWS, &w);
    const weight_args p = {(int32_t)((g.rows - 1) / DEPTH + 1),
                           (int32_t)((g.columns - 1) / (BLOCK_ROWS * CLUSTER) + 1),
                           (int32_t)((g.hidden - 1) / COLUMNS + 1), (float)g.factor, g.scale};
    return e != cudaSuccess ? e
                            : launch_tiles(weight_kernel<D, WRITES, ADDS>, WRITES,
                                           (int64_t)p.row_tiles * p.column_tiles, g.clusters, stream,
                                           z, h, w, p);
}

template <typename D> cudaError_t launch_of(const colo_linear_summed &g, cudaStream_t stream)
{
    return g.w.dtype != COLO_F32 ? launch<D, NARROW, false>(g, stream)
           : g.adds              ? launch<D, WIDE, true>(g, stream)
                                 : launch<D, WIDE, false>(g, stream);
}

} // namespace

extern "C" cudaError_t colo_k_weight_product(const colo_linear_summed *p, cudaStream_t stream)
{
    if (p->columns == 0 || p->hidden == 0)
        return cudaSuccess;
    return p->z.dtype == COLO_BF16 ? launch_of<bf16>(*p, stream) : launch_of<f16>(*p, stream);
}
