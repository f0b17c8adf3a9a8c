/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 05_bootstrap.c - ranks are processes of a host program that has its own way to tell them things.
 *
 * "launcher" stands for yours: it forks four workers and can do one thing for them, an all-gather
 * of a few bytes, here over pipes through the parent. That callback is all the library needs: it
 * swaps addresses through it and then talks over sockets. With MPI there is
 * colo_comm_create_mpi() in <colobridge/mpi.h> instead; the rest is the same.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <colobridge.h>

enum { RANKS = 4, MOST = 4096 };

/* ---- the launcher: pipes to a parent that collects and hands out ---- */

struct worker {
    int up[2], down[2]; /* pipes: worker to parent, parent to worker */
};

static int all_of(ssize_t (*move)(int, void *, size_t), int fd, void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = move(fd, (char *)data + done, bytes - done);
        if (n <= 0)
            return -1;
        done += (size_t)n;
    }
    return 0;
}

static ssize_t put(int fd, void *data, size_t bytes)
{
    return write(fd, data, bytes);
}

/* The parent's half: as many exchanges as the workers want, until they close their pipes. */
static void serve(struct worker *w)
{
    size_t bytes;
    while (all_of(read, w[0].up[0], &bytes, sizeof bytes) == 0 && bytes <= MOST) {
        static char all[RANKS * MOST];
        for (int r = 0; r < RANKS; r++) {
            size_t same = bytes;
            if ((r > 0 && all_of(read, w[r].up[0], &same, sizeof same)) || same != bytes ||
                all_of(read, w[r].up[0], all + (size_t)r * bytes, bytes))
                return;
        }
        for (int r = 0; r < RANKS; r++)
            all_of(put, w[r].down[1], all, RANKS * bytes);
    }
}

/* The worker's half, as the library wants it. */
static colo_status_t over_pipes(void *user, const void *send, void *recv, size_t bytes)
{
    struct worker *me = user;
    char copy[MOST];
    if (bytes > MOST)
        return COLO_ERR_ARG;
    memcpy(copy, send, bytes);
    if (all_of(put, me->up[1], &bytes, sizeof bytes) || all_of(put, me->up[1], copy, bytes) ||
        all_of(read, me->down[0], recv, RANKS * bytes))
        return COLO_ERR_IO;
    return COLO_OK;
}

/* ---- a worker: encoder on dp=4, LLM on cp=2,dp=2 ---- */

static colo_status_t work(colo_comm_t *world)
{
    colo_grid_t src_grid, dst_grid;
    colo_layout_t src, dst;
    colo_bridge_t *bridge = NULL;
    float x[1 * 8 * 2], d_x[1 * 8 * 2], y[2 * 8 * 2],
        d_y[2 * 8 * 2]; /* [samples, rows, features] */
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &src, .dst = &dst,
                                   .shape = {4, 8, 2, 0}, .dtype = COLO_F32};
    const int32_t me = colo_comm_rank(world);
    colo_status_t st = COLO_OK;

    if ((st = colo_grid_parse(&src_grid, "dp=4", RANKS)) < 0 ||
        (st = colo_grid_parse(&dst_grid, "cp=2,dp=2", RANKS)) < 0 ||
        (st = colo_layout_init_src(&src, &src_grid)) < 0 ||
        (st = colo_layout_init_dst(&dst, &dst_grid)) < 0 ||
        (st = colo_bridge_create(&bridge, &config, world)) < 0)
        return st;
    for (int i = 0; i < 16; i++)
        x[i] = (float)(100 * me + i); /* sample number, then its element */
    for (int i = 0; i < 32; i++)
        d_y[i] = 0.5f;
    colo_tensor_t tx = colo_tensor_host(x, COLO_F32, 3, (int64_t[]){1, 8, 2});
    colo_tensor_t ty = colo_tensor_host(y, COLO_F32, 3, (int64_t[]){2, 8, 2});
    colo_tensor_t tdx = tx, tdy = ty;
    tdx.data = d_x;
    tdy.data = d_y;
    if ((st = colo_bridge_forward(bridge, &tx, &ty, NULL)) == COLO_OK)
        st = colo_bridge_backward(bridge, &tdy, &tdx, NULL);
    colo_bridge_destroy(&bridge);
    for (int i = 0; i < 32 && st == COLO_OK;
         i++) /* ranks 2 and 3 are the second half of the batch */
        if (y[i] != (float)(100 * (me / 2 * 2 + i / 16) + i % 16))
            st = COLO_ERR_STATE;
    for (int i = 0; i < 16 && st == COLO_OK; i++) /* 0.5 from each of two context ranks */
        if (d_x[i] != 1.0f)
            st = COLO_ERR_STATE;
    if (st == COLO_OK && me == 0)
        printf("rank 0 of %d processes over %s: y[1] of sample 1 is %g, its gradient %g\n", RANKS,
               colo_comm_backend(world), (double)y[17], (double)d_x[1]);
    return st;
}

static int worker_main(int rank, struct worker *w)
{
    colo_bootstrap_t bootstrap = {COLO_BOOTSTRAP_INIT, rank, RANKS, over_pipes, &w[rank]};
    colo_comm_t *world = NULL;
    colo_status_t st = colo_comm_create_bootstrap(&bootstrap, &world);

    if (st == COLO_OK)
        st = work(world);
    if (st < 0) {
        fprintf(stderr, "05_bootstrap: rank %d: %s: %s\n", rank, colo_status_name(st),
                colo_last_error());
        colo_comm_abort(world, colo_last_error()); /* or the others hear only that this rank left */
    }
    colo_comm_destroy(&world);
    return st < 0;
}

int main(void)
{
    struct worker w[RANKS];
    pid_t pid[RANKS];
    int failed = 0;

    for (int r = 0; r < RANKS; r++)
        if (pipe(w[r].up) || pipe(w[r].down))
            return 1;
    for (int r = 0; r < RANKS; r++) {
        pid[r] = fork();
        if (pid[r] < 0)
            return 1;
        if (pid[r] == 0) {
            for (int k = 0; k < RANKS; k++) { /* only its own ends stay open */
                close(w[k].up[0]);
                close(w[k].down[1]);
                if (k != r) {
                    close(w[k].up[1]);
                    close(w[k].down[0]);
                }
            }
            return worker_main(r, w);
        }
    }
    for (int r = 0; r < RANKS; r++) {
        close(w[r].up[1]);
        close(w[r].down[0]);
    }
    serve(w);
    for (int r = 0; r < RANKS; r++) {
        int status = 0;
        waitpid(pid[r], &status, 0);
        failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    return failed ? 1 : 0;
}
