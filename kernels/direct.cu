/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.cu - a bridge's way between GPUs that reach each other: handshake, boxes for others, own
 * boxes, all in one launch, nothing staged. What happens to a tile is direct-tile.cuh's.
 *
 *   block 0        posts a record of each of this rank's tensors to every rank that will reach it
 *   every block    takes tiles of two queues, the partners' and its own, half of the blocks
 *                  beginning with either, so that links and memory work at once
 *   before a tile  of a partner: waits for its record, which names memory, offset and strides
 *   after a tile   of a small call: fence, then the block reports this part to the partner
 *   after the last tile of the first queue of another: fence, then done to every partner
 *   block 0        at the end: waits for done from every rank that was posted to and for the other
 *                  blocks, resets, counts the call
 *
 * A call of more tiles than blocks is preceded by one small block, which posts and waits for the
 * records of all partners at once (wait_first). So the kernel of many blocks leaves the
 * multiprocessors alone while a peer is late.
 *
 * No block waits for another one of its grid before it has moved its tiles, and the launcher starts
 * no more blocks than fit the device. A record travels in words of 32 bits of
 * value and 32 bits of call number, each valid by itself: no fence, no second trip. Its poster's
 * kernel ends only when all are done, so a mailbox is never written before it was read.
 *
 * Counters live in device memory and kernels count calls themselves, so a captured graph may be
 * replayed. Every wait ends at a deadline, when the host says stop, or when the peer gives up; the
 * way is dead then, this launch and later ones do nothing, and peers are told.
 */
#include "direct.h"

#include "arch.cuh"
#include "direct-tile.cuh"
#include "direct-wait.cuh"

#include <climits>

namespace
{

/* What was enqueued before has ended. */
__device__ void follow()
{
    if constexpr (COMPILED_FOR >= 900)
        asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* ---- handshake ---- */

/* Block 0: lanes 0..8 of a warp write the records of a partner. Earlier kernels of the stream have
 * ended, so nothing of theirs is under way here; what they wrote is made known where it is read. */
__device__ void expose(const colo_k_direct_t &d, const uint32_t *calls)
{
    const int lane = threadIdx.x % 32;
    if (lane >= COLO_K_RECORD)
        return;
    for (int n = threadIdx.x / 32; n < d.npartners * d.tensors; n += blockDim.x / 32) {
        const int i = n / d.tensors, k = n % d.tensors;
        const colo_k_partner_t &p = d.partner[i];
        const colo_k_tensor_t &t = d.tensor[k];
        if (!(p.exposes & 1))
            continue;
        uint32_t word = t.memory;
        if (lane == 1 || lane == 2)
            word = half_of(t.offset, lane - 1);
        if (lane >= 3) {
            const int64_t *stride = d.addends || d.pull ? t.in_stride : t.out_stride;
            word = half_of((uint64_t)stride[(lane - 3) / 2], (lane - 3) % 2);
        }
        if (d.addends || d.pull)
            __threadfence_system();
        put(p.remote + k * COLO_K_RECORD + lane, (uint64_t)calls[i] << 32 | word);
    }
}

struct record {
    char *base;
    int64_t stride[3];
};

/* Warp 0: waits for a partner's record of tensor @k and translates it; @since as in wait_for(). */
__device__ bool take(const colo_k_direct_t &d, int64_t partner, const uint32_t *calls, int k,
                     uint64_t &since, record &r)
{
    const colo_k_partner_t &p = d.partner[partner];
    const int lane = threadIdx.x % 32;
    const uint64_t call = calls[partner];
    const uint64_t *row = d.table + p.rank * COLO_K_MEMORIES;
    const uint64_t known = get(row + lane); /* on its way while this warp waits */
    uint64_t word = 0;
    if (!wait_for(d, p, call, ALL, since, [&] {
            if (lane > COLO_K_RECORD)
                return true;
            word =
                acquire(p.mine + (lane < COLO_K_RECORD ? k * COLO_K_RECORD + lane : COLO_K_POISON));
            if (lane == COLO_K_RECORD)
                return true;
            return word >> 32 == call;
        }))
        return false;
    if (__shfl_sync(ALL, word, COLO_K_RECORD)) {
        give_up(d, COLO_K_PEER_FAILED, p.rank, call, 0);
        return false;
    }
    uint32_t v = (uint32_t)word;
    const uint32_t memory = __shfl_sync(ALL, v, 0);
    uint64_t base = __shfl_sync(ALL, known, memory % 32);
    if (memory >= 32)
        base = memory < COLO_K_MEMORIES ? row[memory] : 0;
    if (!base) {
        give_up(d, COLO_K_UNKNOWN, p.rank, call, memory);
        return false;
    }
    uint64_t wide[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        wide[i] = __shfl_sync(ALL, v, 1 + 2 * i) | (uint64_t)__shfl_sync(ALL, v, 2 + 2 * i) << 32;
    r.base = (char *)(base + wide[0]);
    for (int i = 0; i < 3; i++)
        r.stride[i] = (int64_t)wide[1 + i];
    return true;
}

/* Tiles of a queue. */
__device__ int64_t all_tiles(const colo_k_direct_t &d, int q)
{
    return d.tiles[q] * d.tensors;
}

/* What a partner waits for: call, and how many such words there are. */
__device__ void put_done(const colo_k_partner_t &p, uint32_t call, int part, int parts)
{
    put(p.remote + COLO_K_DONE + part, (uint64_t)call << 32 | (uint32_t)parts);
}

/* Have all parts of this call come? All lanes of a warp ask. */
__device__ bool all_done(const colo_k_partner_t &p, uint32_t call)
{
    const int lane = threadIdx.x % 32;
    const uint64_t *word = p.mine + COLO_K_DONE;
    uint64_t mine = acquire(word + lane);
    const uint64_t first = __shfl_sync(ALL, mine, 0);
    if (first >> 32 != call)
        return false;
    for (int i = lane; i < (int)(uint32_t)first; i += 32) {
        if ((i == lane ? mine : acquire(word + i)) >> 32 != call)
            return false;
    }
    return true;
}

/* Thread 0 of a block that has moved a tile of a segment of @partner. */
__device__ void report_part(const colo_k_direct_t &d, const uint32_t *calls, int64_t partner,
                            int64_t tile)
{
    const colo_k_partner_t &p = d.partner[partner];
    const int k = (int)(tile / d.tiles[0]);
    __threadfence_system();
    put_done(p, calls[partner], (int)(tile - k * d.tiles[0]) - p.first + k * p.count,
             p.count * d.tensors);
}

/* Warp 0 of a block that has moved @mine tiles of the first queue; the block that brings the
 * last ones tells the partners. */
__device__ void count_moved(const colo_k_direct_t &d, const uint32_t *calls,
                            unsigned long long mine)
{
    const int lane = threadIdx.x % 32;
    const unsigned long long all = (unsigned long long)all_tiles(d, 0);
    int last = mine == all;
    if (!last) {
        if (lane == 0) {
            __threadfence_system();
            last = atomicAdd(&d.control->moved, mine) + mine == all;
            __threadfence_system(); /* what other blocks moved comes before what is put below */
        }
        if (!__shfl_sync(ALL, last, 0))
            return;
        __syncwarp(); /* by any lane */
    }
    __threadfence_system();
    for (int i = lane; i < d.npartners; i += 32)
        if (d.partner[i].exposes & 2)
            put_done(d.partner[i], calls[i], 0, 1);
}

/* Block 0, which waits for the others of the grid and for the partners at the same time. */
__device__ void finish(const colo_k_direct_t &d, const uint32_t *calls)
{
    int dead = 0;
    uint64_t since = 0;
    if (threadIdx.x == THREADS - 1) {
        /* ends: every wait of the other blocks has a deadline */
        while (*(volatile unsigned *)&d.control->finished != gridDim.x - 1)
            ;
        __threadfence();
        dead = is_dead(d); /* no other block can change it any more */
    }
    for (int i = threadIdx.x / 32; i < d.npartners; i += THREADS / 32)
        if (d.partner[i].exposes & 1)
            dead |= !wait_for(d, d.partner[i], calls[i], ALL, since,
                              [&] { return all_done(d.partner[i], calls[i]); });
    dead = __syncthreads_or(dead);
    for (int i = threadIdx.x; i < d.npartners; i += THREADS) {
        const colo_k_partner_t &p = d.partner[i];
        if (dead)
            put(p.remote + COLO_K_POISON, 1);
        else
            p.mine[COLO_K_CALLS] = calls[i];
    }
    if (threadIdx.x == 0) {
        d.control->ticket[0] = d.control->ticket[1] = d.control->moved = 0;
        d.control->finished = 0;
    }
}

/* ---- queues ---- */

/* Warp 0: the segment of a tile. Every lane looks at the end of one of 32 parts of what is left: a
 * ragged batch has thousands. */
__device__ int segment_of(const colo_k_direct_t &d, int q, int64_t tile)
{
    const int lane = threadIdx.x % 32;
    for (int base = 0, n = d.segments[q];;) {
        const int part = (n + 31) / 32, end = (lane + 1) * part < n ? (lane + 1) * part : n;
        const unsigned past = __ballot_sync(ALL, d.segment[q][base + end - 1].tile_end > tile);
        const int first = (__ffs((int)past) - 1) * part;
        if (part == 1)
            return base + first;
        base += first;
        n = n - first < part ? n - first : part;
    }
}

__device__ const char *inside(const colo_k_tensor_t &v, const char *base, const int64_t *pos,
                              const int64_t *stride)
{
    return base + pos[0] * stride[0] + pos[1] * stride[1] + pos[2] * v.per * stride[2];
}

struct mover {
    task t;

    __device__ bool prepare(const colo_k_direct_t &d, const uint32_t *calls, int q, int i, int k)
    {
        const colo_transfer_t &p = d.segment[q][i];
        const colo_k_tensor_t &v = d.tensor[k];
        record in = {(char *)v.in, {v.in_stride[0], v.in_stride[1], v.in_stride[2]}};
        record out = {v.out, {v.out_stride[0], v.out_stride[1], v.out_stride[2]}};
        uint64_t since = 0;
        if (p.peer >= 0 && !take(d, p.peer, calls, k, since, d.pull ? in : out))
            return false;
        if (threadIdx.x == 0) {
            const int64_t extent[3] = {p.extent[0], p.extent[1], p.extent[2] * v.per};
            t.dst = (char *)inside(v, out.base, p.there, out.stride);
            t.src = inside(v, in.base, p.here, in.stride);
            plan_move(t, extent, out.stride, in.stride, v.elem);
        }
        return true;
    }
    __device__ void run(const colo_k_direct_t &d, int64_t pos, int64_t tile, int k)
    {
        move_tile(t, pos, tile, d.tensor[k].elem);
    }
};

template <typename D> struct adder {
    sum_task t;

    __device__ bool prepare(const colo_k_direct_t &d, const uint32_t *calls, int q, int i, int n)
    {
        const colo_transfer_t &p = d.segment[q][i];
        const colo_k_tensor_t &v = d.tensor[n];
        const colo_addend_t *a = d.addend + (int64_t)(i + (q ? d.segments[0] : 0)) * d.addends;
        uint64_t since = 0; /* of all addends: the deadlines of late partners do not add up */
        int k = 0;
        for (; k < d.addends && a[k].peer != COLO_NO_ADDEND; k++) {
            record r = {(char *)v.in, {v.in_stride[0], v.in_stride[1], v.in_stride[2]}};
            if (a[k].peer >= 0 && !take(d, a[k].peer, calls, n, since, r))
                return false;
            if (threadIdx.x == 0) {
                t.src[k] = inside(v, r.base, a[k].begin, r.stride);
                for (int x = 0; x < 3; x++)
                    t.from[k][x] = r.stride[x];
            }
        }
        if (threadIdx.x == 0) {
            const int64_t extent[3] = {p.extent[0], p.extent[1], p.extent[2] * v.per};
            t.dst = (char *)inside(v, v.out, p.there, v.out_stride);
            for (int x = 0; x < 3; x++)
                t.to[x] = v.out_stride[x];
            t.addends = k;
            plan_sum(t, extent, k, v.elem);
        }
        return true;
    }
    __device__ void run(const colo_k_direct_t &d, int64_t pos, int64_t tile, int k)
    {
        sum_tile<D>(t, t.addends, pos, tile);
    }
};

template <typename M> struct block {
    M m;
    unsigned long long ticket;
    int64_t lo, hi; /* tiles of the prepared segment */
    int64_t peer;   /* its partner */
    int ok, tensor;
    uint32_t call[COLO_K_PARTNERS]; /* the number of this call, with each partner */
};

/* Takes tiles of a queue until there is none; false when the way is dead. */
template <typename M> __device__ bool drain(const colo_k_direct_t &d, block<M> &s, int q)
{
    const bool first = threadIdx.x == 0;
    unsigned long long mine = 0, next = 0;
    if (!d.single)
        __syncthreads(); /* all have seen the ticket that ended the queue before */
    if (first) {
        s.ticket = d.single ? (q ? blockIdx.x - all_tiles(d, 0) : blockIdx.x)
                            : atomicAdd(&d.control->ticket[q], 1ull);
        s.lo = s.hi = 0;
    }
    __syncthreads();
    for (int64_t tile; (tile = (int64_t)s.ticket) < all_tiles(d, q); mine++) {
        if (first) /* on its way while this tile moves */
            next = d.single ? ~0ull >> 1 : atomicAdd(&d.control->ticket[q], 1ull);
        if (tile < s.lo || tile >= s.hi) {
            __syncthreads(); /* all have looked */
            if (threadIdx.x < 32) {
                const int k = (int)(tile / d.tiles[q]);
                const int64_t base = k * d.tiles[q];
                int i = segment_of(d, q, tile - base);
                bool ok = s.m.prepare(d, s.call, q, i, k);
                if (first) {
                    s.lo = base + (i ? d.segment[q][i - 1].tile_end : 0);
                    s.hi = base + d.segment[q][i].tile_end;
                    s.peer = d.segment[q][i].peer;
                    s.tensor = k;
                    s.ok = ok;
                }
            }
            __syncthreads();
            if (!s.ok)
                return false;
        }
        const int64_t elements = d.tile * d.tensor[s.tensor].per;
        s.m.run(d, (tile - s.lo) * elements, elements, s.tensor);
        __syncthreads();
        if (d.single) {
            if (first && q == 0 && d.parts)
                report_part(d, s.call, s.peer, tile);
            mine++;
            break;
        }
        if (first)
            s.ticket = next;
        __syncthreads();
    }
    if (q == 0 && mine > 0 && threadIdx.x < 32 && !d.parts)
        count_moved(d, s.call, mine);
    return true;
}

template <typename M>
__global__ void __launch_bounds__(THREADS, 1)
    direct_kernel(const __grid_constant__ colo_k_direct_t d)
{
    __shared__ block<M> s;
    follow();
    if (threadIdx.x < d.npartners)
        s.call[threadIdx.x] = (uint32_t)d.partner[threadIdx.x].mine[COLO_K_CALLS] + 1;
    if (threadIdx.x == THREADS - 1)
        s.ok = !is_dead(d);
    __syncthreads();
    if (s.ok) {
        if (blockIdx.x == 0 && !d.posted)
            expose(d, s.call);
        const int q = (int)blockIdx.x < d.pushers ? 0 : 1;
        if (drain(d, s, q) && !d.single)
            (void)drain(d, s, 1 - q);
    }
    __syncthreads();
    if (blockIdx.x == 0) {
        finish(d, s.call);
    } else if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&d.control->finished, 1u);
    }
}

/* Before a kernel of many blocks, which therefore does not occupy them while a peer is late: posts
 * to all partners, waits until all that this rank moves for have posted, a thread for each. */
__global__ void __launch_bounds__(COLO_K_PARTNERS)
    wait_first(const __grid_constant__ colo_k_direct_t d)
{
    __shared__ uint32_t call[COLO_K_PARTNERS];
    const bool partner = threadIdx.x < d.npartners;
    const int i = partner ? threadIdx.x : 0;
    uint64_t since = 0;
    follow();
    if (is_dead(d))
        return;
    if (partner)
        call[i] = (uint32_t)d.partner[i].mine[COLO_K_CALLS] + 1;
    __syncthreads();
    expose(d, call);
    (void)wait_for(d, d.partner[i], call[i], ALL, since, [&] {
        return !partner || !(d.partner[i].exposes & 2) || get(d.partner[i].mine) >> 32 == call[i];
    });
}

/* @kernel may begin to launch while the one before it ends; it waits in follow(). */
template <typename K>
cudaError_t start(K kernel, int64_t blocks, int threads, const colo_k_direct_t &d,
                  cudaStream_t stream)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = d.early ? 1 : 0;
    void *args[] = {(void *)&d}; /* cudaLaunchKernelEx() would copy @d first */
    return cudaLaunchKernelExC(&config, (const void *)kernel, args);
}

template <typename M> cudaError_t launch(colo_k_direct_t *d, cudaStream_t stream)
{
    const int64_t each[2] = {d->tiles[0] * d->tensors, d->tiles[1] * d->tensors};
    const int64_t tiles = each[0] + each[1];
    int64_t blocks = tiles < d->blocks ? tiles : d->blocks;
    d->single = tiles <= d->blocks;
    d->pushers = (int32_t)each[0];
    d->parts = d->single && d->addends == 0 && each[0] <= COLO_K_PARTS;
    d->posted = !d->single;
    if (!d->single) { /* half and half, but no more than there is to do */
        int64_t half = (blocks + 1) / 2, stay = each[1] < half ? each[1] : blocks - half;
        int64_t push = blocks - stay;
        d->pushers = (int32_t)(each[0] < push ? each[0] : push);
    }
    blocks = blocks ? blocks : 1; /* one block must wait */
    cudaError_t e = d->posted ? start(wait_first, 1, COLO_K_PARTNERS, *d, stream) : cudaSuccess;
    return e == cudaSuccess ? start(direct_kernel<M>, blocks, THREADS, *d, stream) : e;
}

/* As kernels reach memory of peers, not as copies do. */
__global__ void try_pages(const uint64_t *page, uint64_t *back, int32_t ranks, int32_t me)
{
    for (int32_t r = threadIdx.x; r < ranks; r += blockDim.x) {
        uint64_t *pos = (uint64_t *)page[r] + me;
        if (!page[r])
            continue;
        put(pos, COLO_K_TRIAL + (uint64_t)me);
        __threadfence_system();
        back[r] = get(pos);
    }
}

template <typename M> cudaError_t fit(int32_t *blocks)
{
    int device = 0, sms = 0, each = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess)
        e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, direct_kernel<M>, THREADS, 0);
    each = each > 2 ? 2 : each;
    if (sms * each < *blocks)
        *blocks = sms * each;
    return e;
}

} // namespace

extern "C" cudaError_t colo_k_direct(colo_k_direct_t *d, cudaStream_t stream)
{
    if (d->npartners == 0 && d->tiles[0] + d->tiles[1] == 0)
        return cudaSuccess;
    if (d->addends == 0)
        return launch<mover>(d, stream);
    return with_dtype(d->dtype, [&](auto e) { return launch<adder<decltype(e)>>(d, stream); });
}

extern "C" cudaError_t colo_k_direct_try(const uint64_t *page, uint64_t *back, int32_t ranks,
                                         int32_t me, cudaStream_t stream)
{
    try_pages<<<1, 256, 0, stream>>>(page, back, ranks, me);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_direct_fit(int32_t *blocks, bool *early)
{
    int driver = 0, arch = 0;
    static_assert(sizeof(colo_k_direct_t) <= 4096, "the limit of a kernel's parameters");
    *blocks = INT_MAX;
    const cudaError_t e[] = {code_of(direct_kernel<mover>, &arch),
                             cudaDriverGetVersion(&driver),
                             fit<mover>(blocks),
                             fit<adder<f32>>(blocks),
                             fit<adder<f64>>(blocks),
                             fit<adder<bf16>>(blocks),
                             fit<adder<f16>>(blocks)};
    /* Code for older devices does not wait in follow(), also if a newer device runs it. Drivers
     * before 12.3 refuse such launches in graphs. */
    *early = arch >= 900 && driver >= 12030;
    for (cudaError_t one : e)
        if (one != cudaSuccess)
            return one;
    return cudaSuccess;
}
