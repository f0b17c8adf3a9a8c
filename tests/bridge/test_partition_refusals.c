/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_partition_refusals.c - partitions and tensors that do not fit: refused by every call, and
 * nothing is written. tests/gpu links the same program with tensors on a GPU.
 */
#include "bridge/there.h"

/* ---- refusals ---- */

T_CASE(bad_partitions_are_refused_by_every_call)
{
    static const int64_t late[] = {1, 8, 16}, back[] = {0, 12, 8, 16}, shorter[] = {0, 8, 12},
                         odd[] = {0, 8, 14, 16}, negative[] = {0, -4, 16};
    static const struct {
        colo_partition_t p; /* of 16 positions */
        colo_status_t want;
        const char *words;
    } bad[] = {
        {{COLO_PARTITION_INIT, .cp = 0, .tp = 1}, COLO_ERR_ARG, "cp is 0, expected at least 1"},
        {{COLO_PARTITION_INIT, .cp = 1, .tp = -1}, COLO_ERR_ARG, "tp is -1, expected at least 1"},
        {{COLO_PARTITION_INIT, .cp = 2, .cp_rank = 2, .tp = 1},
         COLO_ERR_ARG,
         "cp rank 2 is outside [0, 2)"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 2, .tp_rank = -1},
         COLO_ERR_ARG,
         "tp rank -1 is outside [0, 2)"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 1, .positions = -16},
         COLO_ERR_ARG,
         "-16 positions in 0 segments"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 1, .segments = -1},
         COLO_ERR_ARG,
         "16 positions in -1 segments"},
        {{COLO_PARTITION_INIT, .cp = 3, .tp = 1},
         COLO_ERR_LAYOUT,
         "16 positions do not divide by 2 * cp = 6"},
        {{COLO_PARTITION_INIT, .cp = 16, .tp = 1}, COLO_ERR_LAYOUT, "do not divide by 2 * cp = 32"},
        {{COLO_PARTITION_INIT, .cp = INT64_MAX, .tp = 1},
         COLO_ERR_LAYOUT,
         "do not divide by 2 * cp = 18446744073709551614"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 3},
         COLO_ERR_LAYOUT,
         "8 positions of a cp rank do not divide by tp = 3"},
        {{COLO_PARTITION_INIT, .cp = 1, .tp = 3},
         COLO_ERR_LAYOUT,
         "16 positions of a cp rank do not divide by tp = 3"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 1, .segments = 2},
         COLO_ERR_ARG,
         "cu_padded is NULL for 2 segments"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 1, .segments = 2, .cu_padded = late},
         COLO_ERR_LAYOUT,
         "cu_padded[0] is 1, expected 0"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 1, .segments = 3, .cu_padded = back},
         COLO_ERR_LAYOUT,
         "not ascending at segment 1: from 12 to 8"},
        {{COLO_PARTITION_INIT, .cp = 1, .tp = 1, .segments = 2, .cu_padded = negative},
         COLO_ERR_LAYOUT,
         "not ascending at segment 0: from 0 to -4"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 1, .segments = 2, .cu_padded = shorter},
         COLO_ERR_LAYOUT,
         "cu_padded ends at 12, expected 16 positions"},
        {{COLO_PARTITION_INIT, .cp = 2, .tp = 1, .segments = 3, .cu_padded = odd},
         COLO_ERR_LAYOUT,
         "segment 1 has padded length 6, which does not divide by 2 * cp = 4"},
        {{COLO_PARTITION_INIT, .cp = 1, .tp = 3, .segments = 3, .cu_padded = odd},
         COLO_ERR_LAYOUT,
         "16 positions of a cp rank do not divide by tp = 3"},
    };
    int64_t sentinel[16];
    colo_tensor_t tg, tl;
    memset(sentinel, 0xa5, sizeof sentinel);
    there(NULL, COLO_I64, 1, (int64_t[]){16}, &tg);
    there(NULL, COLO_I64, 1, (int64_t[]){8}, &tl);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        colo_partition_t one = bad[i].p, *p = &one;
        one.positions = one.positions ? one.positions : 16;
        assert_fails(colo_partition_check(p), bad[i].want, bad[i].words);
        assert_fails(colo_partition_shard(p, &tg, 0, &tl, NULL), bad[i].want, bad[i].words);
        assert_fails(colo_partition_unshard(p, &tl, 0, &tg, NULL), bad[i].want, bad[i].words);
        assert_fails(colo_partition_next_token(p, &tg, -1, &tg, NULL), bad[i].want, bad[i].words);
    }
    assert_fails(colo_partition_check(NULL), COLO_ERR_ARG, "partition: part is NULL");
    assert_there(tg.data, sentinel, sizeof sentinel);
    assert_there(tl.data, sentinel, sizeof sentinel / 2);
    where.drop(tg.data);
    where.drop(tl.data);
    colo_partition_t fine = {COLO_PARTITION_INIT, .cp = 1,       .tp = 1,
                             .positions = 16,     .segments = 3, .cu_padded = odd};
    assert_ok(colo_partition_check(&fine)); /* any length will do without cp */
}

T_CASE(tensors_that_do_not_fit_are_refused)
{
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .tp = 1, .positions = 8};
    int64_t sentinel[24];
    colo_tensor_t tg, tl, t;
    memset(sentinel, 0xa5, sizeof sentinel);
    there(NULL, COLO_I64, 2, (int64_t[]){8, 3}, &tg);
    void *l = there(NULL, COLO_I64, 2, (int64_t[]){4, 3}, &tl);
#define both_refuse(glob, loc, axis, want, words)                                     \
    do {                                                                              \
        assert_fails(colo_partition_shard(&p, glob, axis, loc, NULL), want, words);   \
        assert_fails(colo_partition_unshard(&p, loc, axis, glob, NULL), want, words); \
    } while (0)
    both_refuse(&tg, &tl, 2, COLO_ERR_ARG, "axis 2 is outside [0, 2)");
    both_refuse(&tg, &tl, -1, COLO_ERR_ARG, "axis -1 is outside [0, 2)");
    both_refuse(&tg, &tl, 1, COLO_ERR_SHAPE, "global axis 1 has 3 positions, expected 8");
    both_refuse(&tg, &tg, 0, COLO_ERR_SHAPE, "local axis 0 has extent 8, expected 4");
    both_refuse(NULL, &tl, 0, COLO_ERR_ARG, "global: tensor is NULL");
    both_refuse(&tg, NULL, 0, COLO_ERR_ARG, "local: tensor is NULL");
    t = where_tensor(l, COLO_I64, 2, (int64_t[]){4, 2});
    both_refuse(&tg, &t, 0, COLO_ERR_SHAPE, "local axis 1 has extent 2, expected 3");
    t = where_tensor(l, COLO_I64, 1, (int64_t[]){4});
    both_refuse(&tg, &t, 0, COLO_ERR_SHAPE, "global has 2 axes, local has 1");
    t = where_tensor(l, COLO_F64, 2, (int64_t[]){4, 3});
    both_refuse(&tg, &t, 0, COLO_ERR_SHAPE, "global is i64, local is f64");
    t = colo_tensor_cuda(l, COLO_I64, 1, 2, (int64_t[]){4, 3});
    both_refuse(&tg, &t, 0, COLO_ERR_ARG,
                "partition: local: memory kind 1 on device 1, global is kind");
    t = colo_tensor_host(l, COLO_I64, 2, (int64_t[]){4, 3});
    if (where.mem == COLO_MEM_CUDA)
        both_refuse(&tg, &t, 0, COLO_ERR_ARG,
                    "local: memory kind 0 on device -1, global is kind 1 on device 0");
    t = where_tensor(NULL, COLO_I64, 2, (int64_t[]){4, 3});
    both_refuse(&tg, &t, 0, COLO_ERR_ARG, "local: data is NULL");
    t = tl;
    t.stride[1] = 0; /* fine to read, not to write */
    assert_fails(colo_partition_shard(&p, &tg, 0, &t, NULL), COLO_ERR_SHAPE,
                 "local is written, but axis 1 has stride 0");
    t = tg;
    t.stride[0] = 0;
    assert_fails(colo_partition_unshard(&p, &tl, 0, &t, NULL), COLO_ERR_SHAPE,
                 "global is written, but axis 0 has stride 0");
    t = tl;
    t.stride[0] = 1;
    assert_fails(colo_partition_shard(&p, &tg, 0, &t, NULL), COLO_ERR_SHAPE,
                 "local is written, but by its strides elements share an address");
    t = tg;
    t.stride[0] = 1;
    assert_fails(colo_partition_unshard(&p, &tl, 0, &t, NULL), COLO_ERR_SHAPE,
                 "global is written, but by its strides elements share an address");
    t = tl;
    t.data = (char *)l + 4;
    both_refuse(&tg, &t, 0, COLO_ERR_ARG, "is no multiple of 8 bytes, an element");
    t.data = (char *)tg.data + 3 * 8;
    both_refuse(&tg, &t, 0, COLO_ERR_ARG, "partition: global and local overlap in memory");
    /* device memory is judged alike, before anything asks for a device */
    colo_tensor_t far[2] = {
        colo_tensor_cuda((void *)(uintptr_t)0x10000, COLO_I64, 0, 2, (int64_t[]){8, 3}),
        colo_tensor_cuda((void *)(uintptr_t)0x20000, COLO_I64, 0, 2, (int64_t[]){4, 3})};
    far[1].stride[0] = 2;
    assert_fails(colo_partition_shard(&p, &far[0], 0, &far[1], NULL), COLO_ERR_SHAPE,
                 "local is written, but by its strides elements share an address");
    far[1].data = (void *)(uintptr_t)0x20001;
    both_refuse(&far[0], &far[1], 0, COLO_ERR_ARG, "is no multiple of 8 bytes, an element");
    assert_there(tg.data, sentinel, sizeof sentinel);
    assert_there(tl.data, sentinel, sizeof sentinel / 2);
    where.drop(tg.data);
    where.drop(tl.data);
}

T_CASE(bad_targets_are_refused)
{
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 1, .tp = 1, .positions = 8};
    int64_t sentinel[16];
    colo_tensor_t tf, tt;
    memset(sentinel, 0xa5, sizeof sentinel);
    void *from = there(NULL, COLO_I64, 2, (int64_t[]){2, 8}, &tf);
    void *to = there(NULL, COLO_I64, 2, (int64_t[]){2, 8}, &tt);
#define refused(tokens, targets, want, words) \
    assert_fails(colo_partition_next_token(&p, tokens, -1, targets, NULL), want, words)
    colo_tensor_t t = where_tensor(from, COLO_I32, 2, (int64_t[]){2, 8});
    refused(&t, &tt, COLO_ERR_SHAPE, "tokens is i32, expected i64");
    t = where_tensor(to, COLO_F64, 2, (int64_t[]){2, 8});
    refused(&tf, &t, COLO_ERR_SHAPE, "targets is f64, expected i64");
    t = where_tensor(from, COLO_I64, 0, NULL);
    refused(&t, &tt, COLO_ERR_SHAPE, "tokens has no axis");
    t = where_tensor(from, COLO_I64, 2, (int64_t[]){2, 7});
    refused(&t, &tt, COLO_ERR_SHAPE, "tokens has 7 positions, expected 8");
    t = where_tensor(to, COLO_I64, 1, (int64_t[]){8});
    refused(&tf, &t, COLO_ERR_SHAPE, "tokens has 2 axes, targets has 1");
    t = where_tensor(to, COLO_I64, 2, (int64_t[]){1, 8});
    refused(&tf, &t, COLO_ERR_SHAPE, "targets axis 0 has extent 1, expected 2");
    t = tt;
    t.stride[0] = 0;
    refused(&tf, &t, COLO_ERR_SHAPE, "targets is written, but axis 0 has stride 0");
    t = tt;
    t.stride[0] = 1;
    refused(&tf, &t, COLO_ERR_SHAPE,
            "targets is written, but by its strides elements share an address");
    t = tf;
    t.data = (char *)tf.data + 8;
    t.stride[0] = 9;
    refused(&tf, &t, COLO_ERR_ARG, "partition: tokens and targets overlap in memory");
    t = colo_tensor_cuda(to, COLO_I64, 3, 2, (int64_t[]){2, 8});
    refused(&tf, &t, COLO_ERR_ARG, "partition: targets: memory kind 1 on device 3, tokens is kind");
    refused(NULL, &tt, COLO_ERR_ARG, "tokens: tensor is NULL");
    assert_there(to, sentinel, sizeof sentinel);
    assert_there(from, sentinel, sizeof sentinel);
    where.drop(from);
    where.drop(to);
}

/* Without a GPU, or without CUDA in this build; where there is one, because this is host memory. */
T_CASE(host_memory_called_a_gpu_s_is_refused)
{
    int64_t g[8], l[4], sentinel[8];
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .tp = 1, .positions = 8};
    colo_tensor_t tg = colo_tensor_cuda(g, COLO_I64, 0, 1, (int64_t[]){8});
    colo_tensor_t tl = colo_tensor_cuda(l, COLO_I64, 0, 1, (int64_t[]){4});
    memset(g, 0xa5, sizeof g);
    memset(l, 0xa5, sizeof l);
    memset(sentinel, 0xa5, sizeof sentinel);
    for (int pass = 0; pass < 3; pass++) {
        colo_status_t st = pass == 0   ? colo_partition_shard(&p, &tg, 0, &tl, NULL)
                           : pass == 1 ? colo_partition_unshard(&p, &tl, 0, &tg, NULL)
                                       : colo_partition_next_token(&p, &tg, -1, &tg, NULL);
        assert_true(st == (where.mem == COLO_MEM_CUDA ? COLO_ERR_ARG : COLO_ERR_UNBUILT) ||
                    st == COLO_ERR_ARG);
        assert_non_null(strstr(colo_last_error(), "partition: "));
    }
    assert_memory_equal(g, sentinel, sizeof g);
    assert_memory_equal(l, sentinel, sizeof l);
}

T_CASE(columns_of_one_buffer_share_no_element)
{
    static const int mine[] = {0, 1, 6, 7}; /* cp 0 of 2, zigzag */
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .tp = 1, .positions = 8};
    int64_t from[48], got[48], want[48];
    for (int i = 0; i < 48; i++)
        from[i] = want[i] = 100 + i;
    int64_t *offset = where.put(from, sizeof from);
    colo_tensor_t global = where_tensor(offset, COLO_I64, 2, (int64_t[]){8, 3});
    colo_tensor_t local = where_tensor(offset + 3, COLO_I64, 2, (int64_t[]){4, 3});
    global.stride[0] = local.stride[0] = 6; /* columns 0..2 of [8][6], columns 3..5 of its rows */
    assert_ok(colo_partition_shard(&p, &global, 0, &local, NULL));
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 3; h++)
            want[6 * i + 3 + h] = from[6 * mine[i] + h];
    where.get(got, offset, sizeof got);
    assert_memory_equal(got, want, sizeof got);
    where.drop(offset);
}

T_MAIN_IF(where.need(), "bridge/partition_refusals")
