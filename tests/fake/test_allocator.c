/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_allocator.c - a bridge whose memory a caller's allocator has: behind a call that fails, and
 * without memory in a call.
 */
#include "fake.h"
#include "gpu/gpu_ranks.h"

#include <unistd.h>

enum { RANKS = 4 };

static t_case_t the_case(void)
{
    return T_BETWEEN("tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 4, .output = COLO_FULL_SEQ,
                     .grad = COLO_PARTIAL, .dtype = COLO_F32);
}

T_CASE_ON_GPUS(RANKS, a_failed_call_uses_no_memory_of_an_allocator_that_has_it_back)
{
    const t_case_t c = the_case();
    t_gpu_owner_t o = {.early = false};
    colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    rank_try(t_gpu_owned(r, &c, &o, COLO_TRANSPORT_NCCL, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 0, true));
    rank_try(t_gpu_call_make(&k, r, &c, 0, true));
    rank_try(t_gpu_owner_late(r, &o));
    if (r->rank == 1)
        fake_fail_name(r->device, "colo_k_box_sum");
    const colo_status_t st = t_gpu_call_run(&k, bridge, r->stream);
    rank_check(r->rank != 1 || (st < 0 && strstr(colo_last_error(), "sum")));
    colo_bridge_destroy(&bridge);
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_check(r->rank != 1 || !o.early); /* others may have heard of it before their call */
    return COLO_OK;
}

/* The comm has peers, so that a bridge without registered tensors allocates in its first call. */
T_CASE_ON_GPUS(RANKS, an_allocator_without_memory_in_a_call_is_an_error_on_all_ranks)
{
    const t_case_t c = the_case();
    t_gpu_owner_t o = {.past = true};
    colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    rank_try(colo_memory_alloc(r->gpus, 1 << 16, &r->memory));
    rank_try(t_gpu_owned(r, &c, &o, COLO_TRANSPORT_AUTO, &bridge));
    rank_check(o.live == 0);
    o.refuses = r->rank == 1;
    rank_try(colo_comm_set_timeout(r->gpus, 3000));
    rank_try(t_gpu_call_make(&k, r, &c, 0, true));
    rank_try(t_gpu_quiet(r));
    colo_status_t st = t_gpu_call_run(&k, bridge, r->stream);
    for (int i = 0; st == COLO_OK && i < 1000; i++) {
        usleep(1000);
        st = colo_comm_check(r->gpus);
    }
    rank_fails(st, r->rank == 1 ? COLO_ERR_NOMEM : COLO_ERR_PEER,
               "config.allocator returned NULL, expected ");
    rank_cuda(cudaStreamSynchronize(r->stream));
    colo_bridge_destroy(&bridge);
    rank_check(o.live == 0);
    return COLO_OK;
}

T_MAIN("fake/allocator")
