/* SPDX-License-Identifier: Apache-2.0 */
/*
 * head-product.cu - the lm_head's product of 16-bit operands on Hopper, whose logits become
 * statistics where they are made, in registers, as fp32 or after they are rounded to a logits_dtype of
 * 16 bits. They are written if something reads them later.
 *
 * A cluster has the same columns of neighbouring rows (tiles.cuh). Tiles are in groups of rows whose
 * hidden states fit into the L2 cache several times; in a group the blocks go on from columns to
 * columns, so all of them read the same few rows of the weight.
 *
 * A row's sum over hidden and the order of its statistics depend on nothing but the row.
 */
#include "tiles.cuh"

#include <cmath>

namespace
{

constexpr int NEAR_BYTES = 16 << 20; /* of hidden states of a group of tiles */
static_assert(COLUMNS == COLO_LOGPROB_TILE, "a tile's columns");

/* What is kept of a tile's row */
enum keeps { MOST, EVERYTHING };

struct product_args {
    int64_t lo, rows, columns, true_columns, start;
    const int64_t *targets;
    int64_t target_stride;
    const void *bias;
    float factor, cap, by_cap;
    bool plain, entropy, narrow; /* narrow: logits are of D */
    float *tiles;
    int64_t tiles_stride;
    int32_t numbers, depths, row_tiles, column_tiles, group; /* row_tiles, group: of a cluster */
};

struct place {
    int row, column; /* of tiles; row: of a cluster's */
};

__device__ __forceinline__ place place_of(const product_args &p, int64_t tile)
{
    const int64_t each = (int64_t)p.group * p.column_tiles;
    const int group = (int)(tile / each), rest = (int)(tile - group * each),
              rows = min(p.group, p.row_tiles - group * p.group);
    return {group * p.group + rest % rows, rest / rows};
}

/* The threads of a row are four neighbours. */
__device__ __forceinline__ float row_max(float v)
{
    v = max_nan(v, __shfl_xor_sync(~0u, v, 1));
    return max_nan(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float row_sum(float v)
{
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ int row_min(int v)
{
    v = min(v, __shfl_xor_sync(~0u, v, 1));
    return min(v, __shfl_xor_sync(~0u, v, 2));
}

/* ---- a tile ---- */

/* Two columns of the tile's bias, a thread's; it waits for them after the products. */
template <typename D> __device__ __forceinline__ uint32_t load_bias(const product_args &p, int tile)
{
    const int64_t column = (int64_t)tile * COLUMNS + threadIdx.x % 128 * 2;
    const typename D::elem *bias = (const typename D::elem *)p.bias;
    const uint32_t first = column < p.columns ? bias[column] : 0,
                   second = column + 1 < p.columns ? bias[column + 1] : 0;
    return first | second << 16;
}

template <typename D>
__device__ __forceinline__ void add_bias(float (&z)[128], const memory &m, const group &g,
                                         uint32_t own)
{
    const uint32_t all = m.bias(g.number);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(all + threadIdx.x % 128 * 4), "r"(own) : "memory");
    group_sync(1 + g.number);
#pragma unroll
    for (int j = 0; j < 32; j++) {
        uint32_t two;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(two) : "r"(all + j * 16 + g.lane % 4 * 4));
        const float b[2] = {D::load((typename D::elem)(two & 0xffff)),
                            D::load((typename D::elem)(two >> 16))};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            z[4 * j + e] += b[e];
            z[4 * j + 2 + e] += b[e];
        }
    }
    group_sync(1 + g.number);
}

template <typename D> __device__ __forceinline__ void round_all(float (&z)[128])
{
#pragma unroll
    for (int j = 0; j < 128; j += 2)
        round_two<D>(z[j], z[j + 1]);
}

/* Statistics of a row of the tile, as colo_logprob_tiles_stride() says. @target: in the tile, or -1 */
template <keeps KEEP>
__device__ __forceinline__ void keep_row(const float (&x)[128], const product_args &p, int r,
                                         float factor, int64_t row, int target, int tile, int lane)
{
    const int first = lane % 4 * 2, real = (int)min(p.true_columns - (int64_t)tile * COLUMNS,
                                                    (int64_t)COLUMNS);
    float top = -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < 32; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            top = max_nan(top, x[4 * j + 2 * r + e]);
    top = row_max(top);
    const float m = factor * top, base = m == -CUDART_INF_F ? 0 : m;
    float s[4] = {0, 0, 0, 0}, u[4] = {0, 0, 0, 0}, sum = 0;
    int arg = COLUMNS;
    const auto take = [&](auto with_u) {
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float v = x[4 * j + 2 * r + e], d = fmaf(factor, v, -base),
                            exponential = exp_of(d);
                s[(2 * j + e) % 4] += exponential;
                if (decltype(with_u)::value) /* not 0 * -inf */
                    u[(2 * j + e) % 4] = fmaf(exponential, fmaxf(d, -1e4f), u[(2 * j + e) % 4]);
                if (KEEP == EVERYTHING && first + 8 * j + e < real) {
                    sum += d;
                    arg = arg == COLUMNS && v == top ? first + 8 * j + e : arg;
                }
            }
    };
    if (KEEP == EVERYTHING || p.entropy)
        take(std::true_type());
    else
        take(std::false_type());
    const float all = row_sum((s[0] + s[1]) + (s[2] + s[3])),
                all_u = row_sum((u[0] + u[1]) + (u[2] + u[3]));
    float *of = p.tiles + row * p.tiles_stride, *to = of + 1 + (int64_t)tile * p.numbers;
    if (KEEP == EVERYTHING) {
        sum = row_sum(sum);
        arg = row_min(arg);
    }
    if (row < p.rows) {
        if (lane % 4 == 0)
            to[0] = m;
        if (lane % 4 == 1)
            to[1] = all;
        if (lane % 4 == 2 && (KEEP == EVERYTHING || p.entropy))
            to[2] = all_u;
        if (KEEP == EVERYTHING && lane % 4 == 3) {
            to[3] = sum;
            to[4] = (float)arg;
        }
    }
    if (__any_sync(~0u, target >= 0)) /* seldom */
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (target == first + 8 * j + e)
                    of[0] = x[4 * j + 2 * r + e];
}

template <typename D, keeps KEEP, writes WRITES>
__device__ __forceinline__ void multiply_all(const memory &m, group &g, const product_args &p,
                                             const CUtensorMap &to, int rank)
{
    turn t = {0, 0};
    float z[128];
    for_each_tile((int64_t)p.row_tiles * p.column_tiles, [&](int64_t i) {
        const place at = place_of(p, i);
        const int first_row = (at.row * CLUSTER + rank) * BLOCK_ROWS + g.number * ROWS;
        const int64_t row = first_row + g.warp * 16 + g.lane / 4,
                      first = (int64_t)at.column * COLUMNS + g.lane % 4 * 2;
        int target[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t j = row + 8 * r < p.rows
                                  ? p.targets[(p.lo + row + 8 * r) * p.target_stride] - p.start -
                                        (int64_t)at.column * COLUMNS
                                  : -1;
            target[r] = j >= 0 && j < COLUMNS ? (int)j : -1;
        }
        const uint32_t bias = p.bias ? load_bias<D>(p, at.column) : 0;
        multiply<D, false>(z, m, g, t, p.depths);
        if (p.bias)
            add_bias<D>(z, m, g, bias);
        if constexpr (WRITES != NOTHING)
            write<D, WRITES>(z, m, g, to, at.column * COLUMNS, first_row);
        else if (p.narrow)
            round_all<D>(z);
        const bool plain = KEEP == MOST && p.plain;
        if (p.cap > 0)
#pragma unroll
            for (int j = 0; j < 128; j++)
                z[j] = product(p.cap, tanhf(product(p.by_cap, z[j])));
        else if (!plain)
#pragma unroll
            for (int j = 0; j < 128; j++)
                z[j] = product(p.factor, z[j]);
        if ((at.column + 1) * (int64_t)COLUMNS > p.true_columns)
#pragma unroll
            for (int j = 0; j < 32; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (first + 8 * j + e >= p.true_columns)
                        z[4 * j + e] = z[4 * j + 2 + e] = -CUDART_INF_F;
#pragma unroll
        for (int r = 0; r < 2; r++)
            keep_row<KEEP>(z, p, r, plain ? p.factor : 1, row + 8 * r, target[r], at.column, g.lane);
    });
}

template <typename D, keeps KEEP, writes WRITES>
__global__ void __launch_bounds__(THREADS, 1)
    head_kernel(const __grid_constant__ CUtensorMap h, const __grid_constant__ CUtensorMap w,
                const __grid_constant__ CUtensorMap z, const __grid_constant__ product_args p)
{
    if constexpr (HAS_WGMMA) {
        const int64_t tiles = (int64_t)p.row_tiles * p.column_tiles;
        copy_and_multiply(
            p.depths,
            [&](const memory &m, int rank) {
                copy_tiles(m, tiles, p.depths, [&](int64_t i, int k, int stage, uint32_t full) {
                    const place at = place_of(p, i);
                    tile_load(m.a(stage), &h, full, k * DEPTH, (at.row * CLUSTER + rank) * BLOCK_ROWS);
                    tile_load_for(m.b(stage) + rank * (B_BYTES / CLUSTER), &w, full, k * DEPTH,
                                  at.column * COLUMNS + rank * (COLUMNS / CLUSTER), (1 << CLUSTER) - 1);
                });
            },
            [&](const memory &m, int rank, group &g) {
                multiply_all<D, KEEP, WRITES>(m, g, p, z, rank);
            });
    }
}

/* ---- launching ---- */

product_args args_of(const colo_linear_tiled &given)
{
    const colo_logprob_args &stats = *given.stats;
    product_args p = {};
    p.lo = stats.lo;
    p.rows = stats.hi - stats.lo;
    p.columns = stats.columns;
    p.true_columns = stats.true_columns;
    p.start = stats.config.logits.vocab_start;
    p.targets = stats.targets;
    p.target_stride = stats.target_stride;
    p.bias = given.bias;
    p.factor = (float)stats.factor;
    p.cap = (float)stats.cap;
    p.by_cap = (float)(stats.cap > 0 ? stats.factor / stats.cap : 0);
    p.plain = is_plain(stats);
    p.entropy = stats.block.u >= 0;
    p.narrow = stats.dtype != COLO_F32;
    p.tiles = stats.tiles;
    p.tiles_stride = colo_logprob_tiles_stride(&stats.block, stats.columns);
    p.numbers = colo_logprob_tile_numbers(&stats.block);
    p.depths = (int32_t)((given.hidden - 1) / DEPTH + 1);
    p.row_tiles = (int32_t)((p.rows - 1) / (BLOCK_ROWS * CLUSTER) + 1);
    p.column_tiles = (int32_t)((p.columns - 1) / COLUMNS + 1);
    p.group = (int32_t)std::max<int64_t>(
        NEAR_BYTES / (given.hidden * 2) / (BLOCK_ROWS * CLUSTER), 1);
    return p;
}

template <typename D, keeps KEEP, writes WRITES>
cudaError_t launch(const colo_linear_tiled &given, cudaStream_t stream)
{
    const product_args p = args_of(given);
    CUtensorMap h, w, z;
    cudaError_t e = map_of(given.h, p.rows, given.hidden, BLOCK_ROWS, &h);
    if (e == cudaSuccess)
        e = map_of(given.w, p.columns, given.hidden, COLUMNS / CLUSTER, &w);
    z = h;
    if (e == cudaSuccess && WRITES != NOTHING)
        e = map_of(given.z, p.rows, p.columns, ROWS, &z);
    return e != cudaSuccess ? e
                            : launch_tiles(head_kernel<D, KEEP, WRITES>, WRITES,
                                           (int64_t)p.row_tiles * p.column_tiles, given.clusters,
                                           stream, h, w, z, p);
}

template <typename D, keeps KEEP>
cudaError_t launch_with(const colo_linear_tiled &given, cudaStream_t stream)
{
    return !given.z.data                ? launch<D, KEEP, NOTHING>(given, stream)
           : given.z.dtype == COLO_F32 ? launch<D, KEEP, WIDE>(given, stream)
                                       : launch<D, KEEP, NARROW>(given, stream);
}

template <typename D> cudaError_t launch_of(const colo_linear_tiled &given, cudaStream_t stream)
{
    return colo_logprob_tile_numbers(&given.stats->block) == COLO_LOGPROB_TILE_NUMBERS
               ? launch_with<D, EVERYTHING>(given, stream)
               : launch_with<D, MOST>(given, stream);
}

} // namespace

extern "C" cudaError_t colo_k_head_fit(int32_t *clusters)
{
    auto *kernel = head_kernel<bf16, MOST, WIDE>;
    bool has = false;
    int n = 0;
    *clusters = 0;
    cudaError_t e = code_has_wgmma(kernel, &has);
    if (e != cudaSuccess || !has)
        return e;
    cudaLaunchAttribute attribute = in_clusters();
    cudaLaunchConfig_t config = {};
    config.gridDim = CLUSTER;
    config.blockDim = THREADS;
    config.dynamicSmemBytes = bytes_of(WIDE);
    config.attrs = &attribute;
    config.numAttrs = 1;
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_of(WIDE));
    if (e == cudaSuccess)
        e = cudaOccupancyMaxActiveClusters(&n, kernel, &config);
    *clusters = n;
    return e;
}

extern "C" cudaError_t colo_k_head_product(const colo_linear_tiled *p, cudaStream_t stream)
{
    if (p->stats->hi <= p->stats->lo || p->stats->columns <= 0)
        return cudaSuccess;
    return p->h.dtype == COLO_BF16 ? launch_of<bf16>(*p, stream) : launch_of<f16>(*p, stream);
}
