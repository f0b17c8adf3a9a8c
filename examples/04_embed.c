/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 04_embed.c - the library inside a host program that has its own tensors, memory and errors.
 *
 * "rt" stands for your runtime: it has an arena, tensors with a version counter, and errors that
 * carry a code and a text. The library takes none of that over: views borrow rt's memory, nothing
 * is printed, nothing exits, every failure comes back as a status with an error message, which rt
 * turns into its own error. The part between the two lines below is all there is to learn; the rest
 * is the runtime that you have already.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <colobridge.h>

/* ---- the host's runtime ---- */

struct rt_tensor {
    float *data;
    int64_t shape[3];
    uint64_t version; /* incremented by code that writes in place */
};

struct rt {
    unsigned char arena[1 << 16];
    size_t used;
    colo_bridge_t *bridge;
    int error; /* rt's codes: 0, or 1 and a text */
    char text[256];
};

/* rt's allocator: a bump pointer, freed all at once */
static struct rt_tensor rt_new(struct rt *rt, const int64_t *shape)
{
    struct rt_tensor t = {.shape = {shape[0], shape[1], shape[2]}};
    size_t bytes = (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float);

    if (bytes <= sizeof rt->arena - rt->used) {
        t.data = (float *)(void *)(rt->arena + rt->used);
        rt->used += (bytes + 63) / 64 * 64;
    }
    return t;
}

/* ---- 20 lines that embed the library -------------------------------------------------------- */

static int rt_check(struct rt *rt, colo_status_t status) /* a status becomes the host's own error */
{
    if (status < 0 && !rt->error) {
        rt->error = 1;
        snprintf(rt->text, sizeof rt->text, "%s: %s", colo_status_name(status), colo_last_error());
    }
    return status < 0;
}
static colo_tensor_t rt_view(struct rt_tensor *t) /* borrows: the library frees and keeps nothing */
{
    colo_tensor_t view = colo_tensor_host(t->data, COLO_F32, 3, t->shape);
    view.version = &t->version;
    return view;
}
static int rt_step(struct rt *rt, struct rt_tensor *x, struct rt_tensor *y) /* values, gradients */
{
    colo_tensor_t in = rt_view(x), d_in = rt_view(x + 1), out = rt_view(y), d_out = rt_view(y + 1);
    return rt_check(rt, colo_bridge_forward(rt->bridge, &in, &out, NULL)) ||
           rt_check(rt, colo_bridge_backward(rt->bridge, &d_out, &d_in, NULL));
}

/* ---- end of the 20 lines -------------------------------------------------------------------- */

struct job {
    colo_layout_t src, dst;
    char text[256]; /* what rank 0 heard about its deliberate mistake */
    float first;
};

static colo_status_t rank_main(colo_comm_t *world, void *arg)
{
    struct job *job = arg;
    static _Thread_local struct rt rt;
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &job->src, .dst = &job->dst,
                                   .shape = {4, 8, 2, 0}, .dtype = COLO_F32};
    int64_t in[3], out[3];

    memset(&rt, 0, sizeof rt);
    if (rt_check(&rt, colo_bridge_create(&rt.bridge, &config, world)))
        return COLO_ERR_STATE;
    colo_bridge_src_shape(rt.bridge, in);
    colo_bridge_dst_shape(rt.bridge, out);
    struct rt_tensor x[2] = {rt_new(&rt, in), rt_new(&rt, in)};
    struct rt_tensor y[2] = {rt_new(&rt, out), rt_new(&rt, out)};
    for (int64_t i = 0; i < in[0] * in[1] * in[2]; i++)
        x[0].data[i] = 1.0f;
    for (int64_t i = 0; i < out[0] * out[1] * out[2]; i++)
        y[1].data[i] = 0.5f;

    colo_status_t st = rt_step(&rt, x, y) ? COLO_ERR_STATE : COLO_OK;
    if (st == COLO_OK && colo_comm_rank(world) == 0) {
        job->first = x[1].data[0]; /* 0.5 from each of the two context ranks */
        colo_shape_t bad = {4, -8, 2, 0};
        rt_check(&rt, colo_bridge_reshape(rt.bridge, &bad)); /* a local call: no rank waits */
        snprintf(job->text, sizeof job->text, "%s", rt.text);
    }
    colo_bridge_destroy(&rt.bridge);
    return st;
}

int main(void)
{
    static struct job job;
    colo_grid_t src, dst;

    if (colo_grid_parse(&src, "dp=4", 4) < 0 || colo_grid_parse(&dst, "cp=2,dp=2", 4) < 0 ||
        colo_layout_init_src(&job.src, &src) < 0 || colo_layout_init_dst(&job.dst, &dst) < 0 ||
        colo_comm_threads_run(4, rank_main, &job) < 0) {
        fprintf(stderr, "04_embed: %s\n", colo_last_error());
        return 1;
    }
    printf("gradient that came back: %g\nthe host's own error: %s\n", (double)job.first, job.text);
    return job.first == 1.0f && job.text[0] ? 0 : 1;
}
