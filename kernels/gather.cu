/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gather.cu - what comes before and after copies out of peers' memory: all ranks are there, and
 * all are through. The copies between are the copy engines', so that a gather during products
 * takes one small block of a multiprocessor, twice, and nothing while data moves.
 *
 *   begin   posts which memory, at which offset, this rank offers; waits for every partner's; they
 *           must be the same, for the host has made addresses of them before it could ask
 *   end     says done to every partner, waits for done from all, counts the call
 *
 * A thread a partner. Mailboxes, calls and deadlines are direct.cu's.
 */
#include "direct-wait.cuh"

namespace
{

constexpr int WORDS = 3; /* of a record: memory, offset */

__device__ uint32_t call_of(const colo_k_partner_t &p)
{
    return (uint32_t)p.mine[COLO_K_CALLS] + 1;
}

__global__ void __launch_bounds__(COLO_K_PARTNERS) begin(const __grid_constant__ colo_k_direct_t d)
{
    if (threadIdx.x >= d.npartners || is_dead(d))
        return;
    const colo_k_partner_t &p = d.partner[threadIdx.x];
    const uint32_t call = call_of(p);
    const uint32_t mine[WORDS] = {d.tensor[0].memory, half_of(d.tensor[0].offset, 0),
                                  half_of(d.tensor[0].offset, 1)};
    uint32_t theirs[WORDS];
    uint64_t since = 0;
    __threadfence_system(); /* what is offered is seen where it is read */
    for (int k = 0; k < WORDS; k++)
        put(p.remote + k, (uint64_t)call << 32 | mine[k]);
    if (!wait_for(d, p, call, 1u << threadIdx.x % 32, since, [&] {
            for (int k = 0; k < WORDS; k++) {
                const uint64_t word = get(p.mine + k);
                if (word >> 32 != call)
                    return false;
                theirs[k] = (uint32_t)word;
            }
            return true;
        }))
        return;
    __threadfence_system();
    for (int k = 0; k < WORDS; k++)
        if (theirs[k] != mine[k])
            give_up(d, COLO_K_ELSEWHERE, p.rank, call, theirs[0]);
}

__global__ void __launch_bounds__(COLO_K_PARTNERS) end(const __grid_constant__ colo_k_direct_t d)
{
    const bool partner = threadIdx.x < d.npartners;
    const colo_k_partner_t &p = d.partner[partner ? threadIdx.x : 0];
    const uint32_t call = partner ? call_of(p) : 0;
    uint64_t since = 0;
    int dead = is_dead(d) != 0;
    if (partner && !dead) {
        put(p.remote + COLO_K_DONE, call);
        dead = !wait_for(d, p, call, 1u << threadIdx.x % 32, since,
                         [&] { return get(p.mine + COLO_K_DONE) == call; });
    }
    dead = __syncthreads_or(dead);
    if (!partner)
        return;
    if (dead)
        put(p.remote + COLO_K_POISON, 1);
    else
        p.mine[COLO_K_CALLS] = call;
}

} // namespace

extern "C" cudaError_t colo_k_gather_begin(const colo_k_direct_t *d, cudaStream_t stream)
{
    begin<<<1, COLO_K_PARTNERS, 0, stream>>>(*d);
    return cudaGetLastError();
}

extern "C" cudaError_t colo_k_gather_end(const colo_k_direct_t *d, cudaStream_t stream)
{
    end<<<1, COLO_K_PARTNERS, 0, stream>>>(*d);
    return cudaGetLastError();
}
