/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct-wait.cuh - words that ranks write into each other's mailboxes, and waiting for them: up to
 * a deadline, until the host says stop, or until the peer gives up. The rank that gives up says
 * why, once. For direct.cu and gather.cu.
 */
#ifndef COLO_KERNELS_DIRECT_WAIT_CUH
#define COLO_KERNELS_DIRECT_WAIT_CUH

#include "direct.h"

namespace
{

constexpr unsigned ALL = 0xffffffffu;

/* ---- words that others see ---- */

__device__ uint64_t clock_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ void put(uint64_t *p, uint64_t v)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ uint64_t get(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

/* What any thread wrote before it is visible after it to this thread and those it syncs with. */
__device__ uint64_t acquire(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

__device__ unsigned is_dead(const colo_k_direct_t &d)
{
    return *(volatile unsigned *)&d.control->dead;
}

/* The first one to give up says why. */
__device__ void give_up(const colo_k_direct_t &d, uint64_t code, int32_t rank, uint64_t call,
                        uint64_t memory)
{
    if (atomicCAS(&d.control->dead, 0u, 1u) != 0)
        return;
    put(&d.report->peer, (uint64_t)rank);
    put(&d.report->call, call);
    put(&d.report->memory, memory);
    __threadfence_system();
    put(&d.report->code, code);
}

/* Polls until ready() on all lanes of @mask; false when this wait has ended otherwise. Each lane
 * may wait for a partner of its own. @since: when the deadline began, which several waits share;
 * the first one finds 0. */
template <typename F>
__device__ bool wait_for(const colo_k_direct_t &d, const colo_k_partner_t &p, uint64_t call,
                         unsigned mask, uint64_t &since, F ready)
{
    for (unsigned poll = 0;; poll++) {
        const bool here = ready();
        if (__all_sync(mask, here))
            return true;
        if (poll % 32 != 31)
            continue;
        uint64_t code = COLO_K_FINE, t = clock_ns();
        since = since ? since : t;
        if (get(p.mine + COLO_K_POISON))
            code = COLO_K_PEER_FAILED;
        else if (!here && (int64_t)(t - since) > (int64_t)d.deadline_ns) /* it may step back */
            code = COLO_K_TIMEOUT;
        else if (poll % 4096 == 4095 && get(&d.report->stop))
            code = COLO_K_STOPPED;
        if (code)
            give_up(d, code, p.rank, call, 0);
        if (__any_sync(mask, code || is_dead(d)))
            return false;
    }
}

__device__ uint32_t half_of(uint64_t v, int k)
{
    return (uint32_t)(v >> (32 * k));
}

} // namespace

#endif
