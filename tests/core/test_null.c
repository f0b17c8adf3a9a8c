/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_null.c - what returns no status has no way to say "this is NULL": getters answer 0, -1,
 * false, NULL or "", and destructors do nothing. What returns a status is tested with its noun.
 */
#include "harness/harness.h"

#include <colobridge.h>

T_CASE(getters_of_a_comm)
{
    colo_comm_stats_t stats;
    char text[8];
    assert_int_equal(colo_comm_rank(NULL), -1);
    assert_int_equal(colo_comm_size(NULL), 0);
    assert_int_equal(colo_comm_world_rank(NULL, 0), -1);
    assert_int_equal(colo_comm_find(NULL, 0), -1);
    assert_string_equal(colo_comm_backend(NULL), "none");
    assert_string_equal(colo_comm_name(NULL), "");
    assert_int_equal(colo_comm_check_level(NULL), 0);
    assert_int_equal(colo_comm_dump(NULL, text, sizeof text), 4);
    assert_string_equal(text, "null");
    assert_int_equal(colo_comm_dump(NULL, NULL, 9), 4);
    colo_comm_set_name(NULL, "x");
    colo_comm_abort(NULL, NULL);
    colo_comm_stats(NULL, &stats);
    colo_comm_stats_reset(NULL);
}

T_CASE(getters_of_a_grid)
{
    char text[4] = "abc";
    assert_int_equal(colo_grid_print(NULL, text, sizeof text), 0);
    assert_string_equal(text, "");
    assert_int_equal(colo_grid_print(NULL, NULL, 9), 0);
    assert_int_equal(colo_grid_dim(NULL, "tp"), -1);
    assert_int_equal(colo_grid_extent(NULL, NULL), 1);
    assert_false(colo_grid_has_rank(NULL, 0));
    assert_true(colo_grid_equal(NULL, NULL));
    assert_int_equal(colo_grid_hash(NULL), colo_grid_hash(NULL));
    assert_int_equal(colo_group_member(NULL, 0), -1);
    assert_int_equal(colo_group_find(NULL, 0), -1);
}

T_CASE(getters_of_layouts_plans_and_bridges)
{
    int64_t shape[3] = {7, 7, 7}, nregions = 9;
    int32_t n = 9;
    colo_layout_clear(NULL, COLO_ROWS);
    assert_false(colo_layout_holds(NULL, 0));
    assert_int_equal(colo_layout_hash(NULL), colo_layout_hash(NULL));
    assert_int_equal(colo_plan_rank(NULL), -1);
    colo_nodes_destroy(NULL);
    assert_null(colo_plan_sends(NULL, COLO_FORWARD, &n));
    assert_int_equal(n, 0);
    n = 9;
    assert_null(colo_plan_recvs(NULL, COLO_FORWARD, &n));
    assert_int_equal(n, 0);
    assert_null(colo_plan_locals(NULL, COLO_FORWARD, &nregions));
    assert_int_equal(nregions, 0);
    assert_int_equal(colo_plan_bytes(NULL, COLO_FORWARD).recv, 0);
    assert_int_equal(colo_plan_addends(NULL), 0);
    assert_int_equal(colo_plan_direction(NULL), COLO_EQUAL);
    assert_int_equal(colo_plan_scale(NULL), 0);
    assert_int_equal(colo_plan_hash(NULL), 0);
    assert_null(colo_plan_config(NULL));
    assert_int_equal(colo_bridge_src_shape(NULL, shape), 0);
    assert_int_equal(colo_bridge_dst_shape(NULL, shape), 0);
    assert_int_equal(shape[0], 7);
    assert_null(colo_bridge_plan(NULL));
    assert_int_equal(colo_bridge_workspace_size(NULL), 0);
    assert_int_equal(colo_partition_count(NULL), 0);
    assert_int_equal(colo_partition_index(NULL, 0), -1);
}

/* A plan that is there, asked for a way that is none, or without a place for the count. */
T_CASE(a_way_that_is_none_has_no_messages)
{
    colo_grid_t grid;
    colo_layout_t src, dst;
    colo_plan_t *plan = NULL;
    int32_t n = 9;
    assert_ok(colo_grid_parse(&grid, "dp=2", 2));
    assert_ok(colo_layout_init_src(&src, &grid));
    assert_ok(colo_grid_parse(&grid, "cp=2", 2));
    assert_ok(colo_layout_init_dst(&dst, &grid));
    colo_plan_config_t config = {COLO_PLAN_CONFIG_INIT, .src = &src,       .dst = &dst,
                                 .shape = {2, 4, 1, 0}, .dtype = COLO_F32, .output = COLO_SHARDED};
    assert_ok(colo_plan_create(&plan, &config, 0));
    assert_non_null(colo_plan_sends(plan, COLO_FORWARD, NULL));
    assert_non_null(colo_plan_recvs(plan, COLO_FORWARD, NULL));
    assert_non_null(colo_plan_locals(plan, COLO_FORWARD, NULL));
    assert_null(colo_plan_sends(plan, (colo_pass_t)2, &n));
    assert_int_equal(n, 0);
    assert_int_equal(colo_plan_bytes(plan, (colo_pass_t)2).recv, 0);
    colo_plan_destroy(&plan);
}

T_CASE(getters_of_a_topology)
{
    colo_topology_machine_t machine;
    char text[4] = "abc";
    colo_topology_machine(NULL, &machine);
    assert_int_equal(machine.pus, 0);
    colo_topology_machine(NULL, NULL);
    assert_null(colo_topology_device(NULL, 0));
    assert_int_equal(colo_topology_gpu_rank(NULL, 0, 0), -1);
    assert_int_equal(colo_topology_cpus(NULL, 0, text, sizeof text), 0);
    assert_string_equal(text, "");
    assert_int_equal(colo_topology_cpus(NULL, 0, NULL, 9), 0);
    colo_topology_create_env(NULL, 1);
}

T_CASE(getters_of_tensors_and_variables)
{
    float x = 0;
    bool from_env = true;
    assert_int_equal(colo_tensor_count(NULL), -1);
    assert_false(colo_tensor_is_contiguous(NULL));
    assert_null(colo_tensor_host(&x, COLO_F32, 1, NULL).data);
    assert_null(colo_tensor_cuda(&x, COLO_F32, 0, 1, NULL).data);
    assert_null(colo_env_value(NULL, &from_env));
    assert_null(colo_env_variable(-1));
}

T_CASE(getters_of_losses_and_memory)
{
    int64_t first = -1, count = -1;
    const colo_lm_head_grads_t grads = {NULL, NULL, false};
    const colo_sequence_t unset = {.batch = 3, .positions = 4};
    assert_null(colo_lm_head_config(NULL));
    assert_null(colo_lm_head_group(NULL));
    assert_int_equal(colo_lm_head_state(NULL), COLO_LM_HEAD_NOT_AVAILABLE);
    colo_lm_head_rows(NULL, &first, &count);
    assert_int_equal(first, 0);
    assert_int_equal(count, 0);
    colo_lm_head_rows(NULL, NULL, NULL);
    assert_int_equal(colo_lm_head_gathered_size(NULL), 0);
    assert_int_equal(colo_lm_head_reduce_size(NULL, &grads), 0);
    assert_int_equal(colo_linear_logprob_mode(NULL, 1), COLO_LINEAR_AUTO);
    assert_int_equal(colo_linear_logprob_chunk(NULL, 1), 0);
    assert_int_equal(colo_sequence_count(NULL), 0);
    assert_int_equal(colo_sequence_count(&unset), 0); /* cp is 0 */
    assert_int_equal(colo_loss_weighted_workspace_size(-1), colo_loss_weighted_workspace_size(1));
    assert_null(colo_memory_data(NULL));
    assert_int_equal(colo_memory_bytes(NULL), 0);
    assert_false(colo_memory_is_p2p(NULL));
    assert_false(colo_memory_find(NULL, &first, 1));
}

T_CASE(names_of_what_is_unknown)
{
    assert_string_equal(colo_op_name((colo_op_kind_t)99), "?");
    assert_string_equal(colo_category_name((colo_category_t)99), "?");
    assert_string_equal(colo_direction_name((colo_direction_t)99), "?");
    assert_non_null(colo_bind_name((colo_bind_t)99));
    assert_non_null(colo_dtype_name((colo_dtype_t)99));
    assert_non_null(colo_status_name((colo_status_t)-99));
    assert_non_null(colo_status_string((colo_status_t)-99));
    assert_int_equal(colo_dtype_size((colo_dtype_t)99), 0);
}

T_CASE(destructors_take_null)
{
    colo_comm_t *comm = NULL;
    colo_bridge_t *bridge = NULL;
    colo_plan_t *plan = NULL;
    colo_topology_t *place = NULL;
    colo_hypergrid_t *hyper = NULL;
    colo_tape_t *tape = NULL;
    colo_lm_head_t *head = NULL;
    colo_linear_logprob_t *linear = NULL;
    colo_memory_t *memory = NULL;
    colo_comm_destroy(&comm);
    colo_bridge_destroy(&bridge);
    colo_plan_destroy(&plan);
    colo_topology_destroy(&place);
    colo_hypergrid_destroy(&hyper);
    colo_tape_destroy(&tape);
    colo_lm_head_destroy(&head);
    colo_linear_logprob_destroy(&linear);
    colo_memory_destroy(&memory);
    colo_comm_destroy(NULL);
    colo_bridge_destroy(NULL);
    colo_plan_destroy(NULL);
    colo_topology_destroy(NULL);
    colo_hypergrid_destroy(NULL);
    colo_tape_destroy(NULL);
    colo_lm_head_destroy(NULL);
    colo_linear_logprob_destroy(NULL);
    colo_memory_destroy(NULL);
    colo_tape_reset(NULL);
}

T_MAIN("core/null")
