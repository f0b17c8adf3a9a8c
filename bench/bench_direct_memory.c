/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_direct_memory.c - what a bridge over peers' memory takes of each GPU, step by step.
 *
 * usage: bench_direct_memory [RANKS]    processes with a GPU each (2)
 *
 * MiB that a GPU has less of than before the step, whichever process took it; the most of any GPU.
 * What the caller registers is subtracted.
 */
#include "ranks.h"

#include <colobridge/bootstrap.h>
#include <colobridge/nccl.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 16, CARD = 4096 };
enum { CONTEXT, COMM, MEMORY, BRIDGE, CALL, STEPS };
static const char *const names[STEPS] = {NULL, "colo_comm_create_nccl()",
                                         "colo_memory_alloc(), in addition to what it returns",
                                         "colo_bridge_create()", "the first forward and backward"};

static struct board {
    _Atomic int32_t arrived;
    int32_t size;
    unsigned char cards[MOST * CARD];
    size_t free[STEPS][MOST], registered[MOST];
} * board;

static colo_status_t over_board(void *user, const void *send, void *recv, size_t bytes)
{
    memcpy(board->cards + (size_t) * (int32_t *)user * bytes, send, bytes);
    atomic_fetch_add(&board->arrived, 1);
    while (atomic_load(&board->arrived) < board->size)
        usleep(1000);
    memcpy(recv, board->cards, bytes * (size_t)board->size);
    return COLO_OK;
}

/* What is free now, with every rank's step behind it and no rank's next one begun. */
static colo_status_t note(colo_comm_t *world, int step)
{
    size_t all;
    CUDA(cudaDeviceSynchronize());
    TRY(colo_comm_barrier(world, NULL));
    CUDA(cudaMemGetInfo(&board->free[step][colo_comm_rank(world)], &all));
    return colo_comm_barrier(world, NULL);
}

static colo_status_t on_rank(int32_t rank)
{
    const colo_bootstrap_t boot = {COLO_BOOTSTRAP_INIT, rank, board->size, over_board, &rank};
    colo_comm_t *world = NULL, *gpus = NULL;
    colo_memory_t *memory = NULL;
    colo_bridge_t *bridge = NULL;
    colo_layout_t src, dst;
    char source[64], destination[64];
    int64_t s[3];
    cudaStream_t stream;
    TRY(colo_comm_create_bootstrap(&boot, &world));
    TRY(colo_comm_barrier(world, NULL));
    CUDA(cudaSetDevice(rank));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    TRY(note(world, CONTEXT));
    TRY(colo_comm_create_nccl(world, -1, &gpus));
    TRY(note(world, COMM));
    TRY(colo_memory_alloc(gpus, (size_t)1 << 30, &memory));
    board->registered[rank] = colo_memory_bytes(memory);
    TRY(note(world, MEMORY));
    snprintf(source, sizeof source, "tp=1,dp=%d", (int)board->size);
    snprintf(destination, sizeof destination, "tp=1,cp=%d,dp=1", (int)board->size);
    TRY(bench_layouts(source, destination, &src, &dst));
    const colo_bridge_config_t cfg = {
        COLO_BRIDGE_CONFIG_INIT,      .src = &src,        .dst = &dst,
        .shape = {16, 1024, 4096, 0}, .dtype = COLO_BF16, .output = COLO_OUTPUT_SHARDED,
        .mem = COLO_MEM_CUDA};
    TRY(colo_bridge_create(&bridge, &cfg, gpus));
    TRY(note(world, BRIDGE));
    char *data = colo_memory_data(memory);
    int32_t nd = colo_bridge_src_shape(bridge, s);
    const colo_tensor_t x = colo_tensor_cuda(data, COLO_BF16, rank, nd, s);
    nd = colo_bridge_dst_shape(bridge, s);
    const colo_tensor_t y = colo_tensor_cuda(data + (512 << 20), COLO_BF16, rank, nd, s);
    TRY(colo_bridge_forward(bridge, &x, &y, stream));
    TRY(colo_bridge_backward(bridge, &y, &x, stream));
    TRY(note(world, CALL));
    colo_bridge_destroy(&bridge);
    TRY(colo_comm_barrier(world, NULL));
    colo_memory_destroy(&memory);
    colo_comm_destroy(&gpus);
    colo_comm_destroy(&world);
    return COLO_OK;
}

int main(int argc, char **argv)
{
    const int32_t n = argc > 1 ? atoi(argv[1]) : 2;
    bool failed = n < 2 || n > MOST;
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED || failed) {
        fprintf(stderr, "usage: bench_direct_memory [2 to %d ranks]\n", MOST);
        return 2;
    }
    board->size = n;
    for (int32_t r = 0; r < n; r++)
        if (fork() == 0) {
            const colo_status_t st = on_rank(r);
            if (st < 0)
                fprintf(stderr, "rank %d: %s: %s\n", (int)r, colo_status_name(st),
                        colo_last_error());
            _exit(st < 0);
        }
    for (int32_t r = 0; r < n; r++) {
        int status = 0;
        failed |= wait(&status) < 0 || status != 0;
    }
    if (failed)
        return 1;
    printf("| step | MiB |\n|---|---|\n");
    for (int k = COMM; k < STEPS; k++) {
        int64_t most = INT64_MIN;
        for (int32_t r = 0; r < n; r++) {
            const int64_t took = (int64_t)board->free[k - 1][r] - (int64_t)board->free[k][r] -
                                 (k == MEMORY ? (int64_t)board->registered[r] : 0);
            most = took > most ? took : most;
        }
        printf("| %s | %.1f |\n", names[k], (double)most / (1 << 20));
    }
    return 0;
}
