# SPDX-License-Identifier: Apache-2.0
"""The version, and the C structs, enumerators and functions that the package uses; python/generate.py makes this file."""
import ctypes as c
from typing import Any

P, BOOL, INT, DOUBLE, CHARS, _p = c.c_void_p, c.c_bool, c.c_int, c.c_double, c.c_char_p, c.POINTER
i32, i64, u64, size_t = c.c_int32, c.c_int64, c.c_uint64, c.c_size_t

VERSION = '0.2.0'
CATEGORY_MAX = 8
OP_MAX = 16
DIMS_MAX = 16
DIM_NAME_MAX = 16
KEY_MAX = DIMS_MAX * DIM_NAME_MAX
SPLITS_MAX = 4
STAGE_ANY = -1
STAGE_LAST = -2
NDIM_MAX = 8
ALGO_EXACT, ALGO_COLLECTIVE = 0, 1
PLACEMENT_PACKED, PLACEMENT_MERGED = 0, 1
REDOP_SUM, REDOP_MAX = 0, 1
TRANSPORT_AUTO, TRANSPORT_NCCL, TRANSPORT_PEER, TRANSPORT_UCX = 0, 1, 2, 3
OWNERS = ('user', 'bridge', 'loss', 'head', 'check')
OPS = ('all_gather', 'all_reduce', 'reduce_scatter', 'broadcast', 'barrier', 'exchange', 'split')
AXIS_SAMPLES, AXIS_ROWS, AXIS_FEATURES = 0, 1, 2
SPLIT_REPLICATE, SPLIT_BLOCK, SPLIT_ZIGZAG, SPLIT_CEIL = 0, 1, 2, 3
MAP_IDENTITY, MAP_OFFSET, MAP_TABLE = 0, 1, 2
LINEAR_LOGPROB_AUTO, LINEAR_LOGPROB_LOGPROB, LINEAR_LOGPROB_KEEP, LINEAR_LOGPROB_EARLY = 0, 1, 2, 3
LINEAR_LOGPROB_FORWARD, LINEAR_LOGPROB_BACKWARD, LINEAR_LOGPROB_LOSS, LINEAR_LOGPROB_INFERENCE = 0, 1, 2, 3
GEMM_AUTO, GEMM_CBLAS, GEMM_LOOPS = 0, 1, 2
OUTPUT_FULL_SEQ, OUTPUT_SHARDED = 0, 1
GRAD_PARTIAL, GRAD_DISJOINT = 0, 1
DIRECTION_EQUAL, DIRECTION_FAN_IN, DIRECTION_FAN_OUT = 0, 1, 2
PASS_FORWARD, PASS_BACKWARD = 0, 1
DTYPES = ('f32', 'f64', 'bf16', 'f16', 'i8', 'u8', 'i16', 'i32', 'i64')
MEM_HOST, MEM_CUDA = 0, 1

DTYPE = {name: i for i, name in enumerate(DTYPES)}
DTYPE_SIZE = tuple(int(''.join(filter(str.isdigit, name))) // 8 for name in DTYPES)


class Tensor(c.Structure):
    _fields_ = [('data', P), ('dtype', INT), ('mem', INT), ('device', i32), ('ndim', i32), ('shape', i64 * NDIM_MAX),
                ('stride', i64 * NDIM_MAX), ('version', P)]


class Run(c.Structure):
    _fields_ = [('row', i64), ('count', i64), ('local', i64)]


class Grid(c.Structure):
    _fields_ = [('ndims', i32), ('name', (c.c_char * DIM_NAME_MAX) * DIMS_MAX), ('extent', i64 * DIMS_MAX),
                ('stride', i64 * DIMS_MAX), ('offset', i64), ('size', i64)]


class Split(c.Structure):
    _fields_ = [('dim', i32), ('kind', INT), ('context', BOOL)]


class Layout(c.Structure):
    _fields_ = [('grid', Grid), ('nsplits', i32 * 3), ('split', (Split * SPLITS_MAX) * 3), ('map', INT),
                ('offset', i64), ('table', P), ('table_rows', i64), ('positions', i64), ('stage_dim', i32),
                ('stage', i64), ('reserved', i64 * 16)]


class Shape(c.Structure):
    _fields_ = [('samples', i64), ('rows', i64), ('features', i64), ('positions', i64)]


AllocateFn = c.CFUNCTYPE(P, P, size_t)
ReleaseFn = c.CFUNCTYPE(None, P, P)


class Allocator(c.Structure):
    _fields_ = [('allocate', AllocateFn), ('release', ReleaseFn), ('user', P)]


class BridgeConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('src', _p(Layout)), ('dst', _p(Layout)), ('shape', Shape), ('dtype', INT),
                ('axes', CHARS), ('output', INT), ('grad', INT), ('algo', INT), ('no_grad', BOOL),
                ('ranks_per_node', i64), ('mem', INT), ('transport', INT), ('ragged', BOOL), ('packed', BOOL),
                ('placement', INT), ('max_rows', i64), ('one_level', BOOL), ('peer_blocks', i32),
                ('allocator', Allocator)]


class Packing(c.Structure):
    _fields_ = [('struct_size', size_t), ('nseqs', i64), ('seq_len', P), ('seq_dp', P), ('seq_cp', P),
                ('seq_first', P), ('split', INT), ('piece_start', P), ('piece_len', P), ('piece_owner', P),
                ('seq_room', P), ('halo_before', i64)]


class Segments(c.Structure):
    _fields_ = [('struct_size', size_t), ('count', i64), ('rows', P), ('src_dp', P), ('seq', P), ('pos', P),
                ('row_pos', P), ('nseqs', i64), ('seq_len', P), ('seq_dp', P), ('packing', _p(Packing))]


class CommConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('timeout_ms', i64), ('check', i32), ('transport', INT),
                ('flight_recorder', CHARS)]


AllGatherFn = c.CFUNCTYPE(INT, P, P, P, size_t)


class Bootstrap(c.Structure):
    _fields_ = [('struct_size', size_t), ('rank', i32), ('size', i32), ('all_gather', AllGatherFn), ('user', P),
                ('config', _p(CommConfig))]


class CommStats(c.Structure):
    _fields_ = [('struct_size', size_t), ('ops', (u64 * CATEGORY_MAX) * OP_MAX),
                ('sent_bytes', (u64 * CATEGORY_MAX) * OP_MAX), ('recv_bytes', (u64 * CATEGORY_MAX) * OP_MAX)]


RankFn = c.CFUNCTYPE(INT, P, P)


class LogitsOptions(c.Structure):
    _fields_ = [('vocab', i64), ('vocab_start', i64), ('temperature', DOUBLE), ('scale', DOUBLE), ('softcap', DOUBLE)]


class DistillConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', LogitsOptions), ('targets', INT), ('target_temperature', DOUBLE),
                ('target_scale', DOUBLE), ('order', i64), ('divergence', i64), ('beta', DOUBLE),
                ('target_softcap', DOUBLE), ('has_temperature', BOOL), ('has_target_temperature', BOOL),
                ('reserved', i64 * 4)]


class DistillSaved(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', Tensor), ('targets', Tensor), ('logits_version', u64),
                ('targets_version', u64), ('memory', P), ('valid', BOOL), ('config', DistillConfig)]


class DistillUpstream(c.Structure):
    _fields_ = [('struct_size', size_t), ('d_ce', _p(Tensor)), ('d_kl', _p(Tensor))]


class DistillBatch(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', _p(Tensor)), ('targets', _p(Tensor)), ('mask', _p(Tensor)),
                ('temperature', _p(Tensor)), ('target_temperature', _p(Tensor))]


class DistillOut(c.Structure):
    _fields_ = [('struct_size', size_t), ('ce', _p(Tensor)), ('kl', _p(Tensor))]


class Group(c.Structure):
    _fields_ = [('base', i64), ('size', i64), ('index', i64), ('ordinal', i64), ('count', i64), ('nd', i32),
                ('extent', i64 * DIMS_MAX), ('stride', i64 * DIMS_MAX)]


class Dim(c.Structure):
    _fields_ = [('name', CHARS), ('extent', i64)]


InterruptedFn = c.CFUNCTYPE(BOOL, P)


class Owned(c.Structure):
    _fields_ = [('b0', i64), ('b1', i64), ('h0', i64), ('h1', i64), ('rows', i64)]


class LinearDistillSaved(c.Structure):
    _fields_ = [('struct_size', size_t), ('of', P), ('hidden', Tensor), ('teacher_hidden', Tensor), ('mask', Tensor),
                ('hidden_version', u64), ('teacher_hidden_version', u64), ('mask_version', u64),
                ('weight_version', u64), ('teacher_version', u64), ('max_valid', i64), ('memory', P), ('d_weight', P),
                ('valid', BOOL), ('lora_a', Tensor), ('lora_b', Tensor), ('teacher_lora_a', Tensor),
                ('teacher_lora_b', Tensor), ('lora_scale', DOUBLE), ('teacher_lora_scale', DOUBLE),
                ('lora_version', u64)]


class LinearDistillUpstream(c.Structure):
    _fields_ = [('struct_size', size_t), ('loss', DOUBLE), ('d_loss', _p(Tensor)), ('mean', BOOL)]


class LinearLogprobGrads(c.Structure):
    _fields_ = [('struct_size', size_t), ('d_hidden', _p(Tensor)), ('d_weight', _p(Tensor)), ('d_bias', _p(Tensor)),
                ('d_lora_a', _p(Tensor)), ('d_lora_b', _p(Tensor))]


class LinearDistillConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('distill', DistillConfig), ('mode', INT), ('logits_dtype', INT),
                ('teacher_logits_dtype', INT), ('budget', size_t), ('chunk_size', i64), ('d_hidden', INT),
                ('frozen_hidden', BOOL), ('frozen_weight', BOOL), ('d_weight_dtype', INT), ('d_weight_add', BOOL),
                ('share_d_weight', BOOL), ('lora', i64), ('frozen_lora', BOOL), ('teacher_lora', i64)]


class Lora(c.Structure):
    _fields_ = [('a', _p(Tensor)), ('b', _p(Tensor)), ('scale', DOUBLE)]


class LinearDistillBatch(c.Structure):
    _fields_ = [('struct_size', size_t), ('hidden', _p(Tensor)), ('teacher_hidden', _p(Tensor)), ('mask', _p(Tensor)),
                ('max_valid', i64), ('lora', _p(Lora)), ('teacher_lora', _p(Lora))]


class LinearDistillOut(c.Structure):
    _fields_ = [('struct_size', size_t), ('loss', _p(Tensor)), ('n_valid', _p(Tensor)), ('n_invalid', _p(Tensor))]


class SupportSaved(c.Structure):
    _fields_ = [('ids', Tensor), ('begin', Tensor), ('end', Tensor), ('version', u64)]


class LinearLogprobSaved(c.Structure):
    _fields_ = [('struct_size', size_t), ('of', P), ('hidden', Tensor), ('targets', Tensor),
                ('support', SupportSaved), ('class_weight', Tensor), ('hidden_version', u64),
                ('targets_version', u64), ('class_weight_version', u64), ('weight_version', u64), ('max_valid', i64),
                ('memory', P), ('d_weight', P), ('valid', BOOL), ('lora_a', Tensor), ('lora_b', Tensor),
                ('lora_scale', DOUBLE), ('lora_version', u64)]


class LinearLogprobUpstream(c.Structure):
    _fields_ = [('struct_size', size_t), ('logp', DOUBLE), ('entropy', DOUBLE), ('loss', DOUBLE),
                ('d_logp', _p(Tensor)), ('d_entropy', _p(Tensor)), ('d_loss', _p(Tensor)), ('mean', BOOL),
                ('lse', DOUBLE), ('d_lse', _p(Tensor))]


class LogprobConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', LogitsOptions), ('label_smoothing', DOUBLE),
                ('megatron_smoothing', BOOL), ('local_smoothing', BOOL), ('z_loss', DOUBLE),
                ('has_class_weight', BOOL), ('lenient_targets', BOOL), ('ignore_index', i64), ('want_entropy', BOOL),
                ('want_loss', BOOL), ('want_correct', BOOL), ('chunk_size', i64), ('segment', i64), ('order', i64),
                ('want_argmax', BOOL), ('want_lse', BOOL), ('want_sum_p2', BOOL), ('want_mean_logits', BOOL),
                ('has_temperature', BOOL), ('reserved', i64 * 7)]


class LinearLogprobConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('logprob', LogprobConfig), ('mode', INT), ('logits_dtype', INT),
                ('budget', size_t), ('d_hidden', INT), ('frozen_hidden', BOOL), ('frozen_weight', BOOL),
                ('d_weight_dtype', INT), ('d_weight_add', BOOL), ('keep_in_place', BOOL), ('share_d_weight', BOOL),
                ('lora', i64), ('frozen_lora', BOOL), ('without_logits', size_t)]


class Support(c.Structure):
    _fields_ = [('ids', _p(Tensor)), ('begin', _p(Tensor)), ('end', _p(Tensor))]


class LinearLogprobBatch(c.Structure):
    _fields_ = [('struct_size', size_t), ('hidden', _p(Tensor)), ('targets', _p(Tensor)), ('max_valid', i64),
                ('support', _p(Support)), ('class_weight', _p(Tensor)), ('lora', _p(Lora)),
                ('temperature', _p(Tensor))]


class LogprobOut(c.Structure):
    _fields_ = [('struct_size', size_t), ('logp', _p(Tensor)), ('entropy', _p(Tensor)), ('loss', _p(Tensor)),
                ('correct', _p(Tensor)), ('n_valid', _p(Tensor)), ('n_invalid', _p(Tensor)), ('weight', _p(Tensor)),
                ('argmax', _p(Tensor)), ('lse', _p(Tensor)), ('sum_p2', _p(Tensor)), ('mean_logits', _p(Tensor))]


class LmHeadConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('rows', i64), ('hidden', i64), ('dtype', INT), ('mem', INT),
                ('device', i32), ('has_bias', BOOL), ('partition', INT), ('gemm', INT)]


class LogprobSaved(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', Tensor), ('targets', Tensor), ('support', SupportSaved),
                ('class_weight', Tensor), ('logits_version', u64), ('targets_version', u64),
                ('class_weight_version', u64), ('memory', P), ('valid', BOOL), ('config', LogprobConfig)]


class LogprobUpstream(c.Structure):
    _fields_ = [('struct_size', size_t), ('d_logp', _p(Tensor)), ('d_entropy', _p(Tensor)), ('d_loss', _p(Tensor)),
                ('d_lse', _p(Tensor))]


class LogprobBatch(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', _p(Tensor)), ('targets', _p(Tensor)), ('support', _p(Support)),
                ('class_weight', _p(Tensor)), ('temperature', _p(Tensor))]


class LossMeanUpstream(c.Structure):
    _fields_ = [('struct_size', size_t), ('d_value', _p(Tensor)), ('d_num', _p(Tensor))]


class LossMean(c.Structure):
    _fields_ = [('struct_size', size_t), ('value', _p(Tensor)), ('num', _p(Tensor)), ('den', _p(Tensor)),
                ('factor', _p(Tensor))]


class LossWeighted(c.Structure):
    _fields_ = [('num', DOUBLE), ('weight', DOUBLE), ('den', i64), ('value', DOUBLE)]


class Partition(c.Structure):
    _fields_ = [('struct_size', size_t), ('cp', i64), ('cp_rank', i64), ('tp', i64), ('tp_rank', i64),
                ('positions', i64), ('segments', i64), ('cu_padded', P), ('contiguous', BOOL)]


class PlanBytes(c.Structure):
    _fields_ = [('struct_size', size_t), ('recv', i64), ('send', i64), ('local', i64), ('minimum', i64),
                ('collective_recv', i64)]


class PlanConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('src', _p(Layout)), ('dst', _p(Layout)), ('shape', Shape), ('dtype', INT),
                ('output', INT), ('grad', INT), ('no_grad', BOOL), ('ranks_per_node', i64), ('nodes', P),
                ('one_level', BOOL)]


class Region(c.Structure):
    _fields_ = [('b', i64 * 2), ('s', i64 * 2), ('h', i64 * 2), ('addend', i32)]


class PlanMessage(c.Structure):
    _fields_ = [('peer', i64), ('bytes', i64), ('nregions', i64), ('regions', _p(Region))]


class SamplingConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', LogitsOptions), ('top_k', i64), ('top_p', DOUBLE)]


class Sequence(c.Structure):
    _fields_ = [('struct_size', size_t), ('batch', i64), ('positions', i64), ('padded', i64), ('lengths', P),
                ('cu_padded', P), ('left_padded', BOOL), ('cp', i64), ('cp_rank', i64), ('device_lengths', P),
                ('device_cu_padded', P), ('contiguous', BOOL), ('depth', i64)]


class TopkConfig(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', LogitsOptions), ('k', i64), ('topk', BOOL), ('ignore_index', i64),
                ('order', i64), ('want_tail', BOOL), ('has_temperature', BOOL), ('reserved', i64 * 7)]


class TopkSaved(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', Tensor), ('logits_version', u64), ('memory', P), ('valid', BOOL),
                ('config', TopkConfig)]


class TopkUpstream(c.Structure):
    _fields_ = [('struct_size', size_t), ('d_logp', _p(Tensor)), ('d_tail', _p(Tensor))]


class TopkBatch(c.Structure):
    _fields_ = [('struct_size', size_t), ('logits', _p(Tensor)), ('ids', _p(Tensor)), ('mask', _p(Tensor)),
                ('temperature', _p(Tensor))]


class TopkOut(c.Structure):
    _fields_ = [('struct_size', size_t), ('logp', _p(Tensor)), ('ids', _p(Tensor)), ('n_invalid', _p(Tensor)),
                ('tail', _p(Tensor))]


# name: (returns, arguments). Structs that have no members in a header, and addresses of numbers, are void pointers.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    'colo_batch_backward': (INT, [P, _p(Tensor), _p(Tensor), i32, P]),
    'colo_batch_backward_start': (INT, [P, _p(Tensor), _p(Tensor), i32, P, _p(P)]),
    'colo_batch_destroy': (None, [_p(P)]),
    'colo_batch_forward': (INT, [P, _p(Tensor), _p(Tensor), i32, P]),
    'colo_batch_forward_start': (INT, [P, _p(Tensor), _p(Tensor), i32, P, _p(P)]),
    'colo_batch_plan': (P, [P]),
    'colo_batch_runs': (i64, [P, _p(Run), i64]),
    'colo_bridge_backward': (INT, [P, _p(Tensor), _p(Tensor), P]),
    'colo_bridge_backward_start': (INT, [P, _p(Tensor), _p(Tensor), P, _p(P)]),
    'colo_bridge_create': (INT, [_p(P), _p(BridgeConfig), P]),
    'colo_bridge_destroy': (None, [_p(P)]),
    'colo_bridge_dst_shape': (i32, [P, P]),
    'colo_bridge_expect_backward': (None, [P, BOOL]),
    'colo_bridge_forward': (INT, [P, _p(Tensor), _p(Tensor), P]),
    'colo_bridge_forward_start': (INT, [P, _p(Tensor), _p(Tensor), P, _p(P)]),
    'colo_bridge_reshape': (INT, [P, _p(Shape)]),
    'colo_bridge_rows': (None, [P, P, P]),
    'colo_bridge_set_packing': (INT, [P, _p(Packing), _p(Packing), _p(P)]),
    'colo_bridge_set_segments': (INT, [P, _p(Segments), _p(P)]),
    'colo_bridge_src_shape': (i32, [P, P]),
    'colo_bridge_workspace_size': (size_t, [P]),
    'colo_comm_abort': (None, [P, CHARS]),
    'colo_comm_all_gather': (INT, [P, P, P, i64, INT, P]),
    'colo_comm_all_reduce': (INT, [P, P, P, i64, INT, INT, P]),
    'colo_comm_backend': (CHARS, [P]),
    'colo_comm_barrier': (INT, [P, P]),
    'colo_comm_broadcast': (INT, [P, P, i64, INT, i32, P]),
    'colo_comm_check': (INT, [P]),
    'colo_comm_check_level': (i32, [P]),
    'colo_comm_config': (INT, [P, _p(CommConfig)]),
    'colo_comm_configure': (INT, [P, _p(CommConfig)]),
    'colo_comm_create_bootstrap': (INT, [_p(Bootstrap), _p(P)]),
    'colo_comm_create_nccl': (INT, [P, i32, _p(P)]),
    'colo_comm_create_self': (INT, [_p(P)]),
    'colo_comm_destroy': (None, [_p(P)]),
    'colo_comm_dump': (size_t, [P, CHARS, size_t]),
    'colo_comm_find': (i32, [P, i64]),
    'colo_comm_flight_record': (INT, [P, CHARS]),
    'colo_comm_name': (CHARS, [P]),
    'colo_comm_node': (i32, [P, i32]),
    'colo_comm_nodes': (i32, [P]),
    'colo_comm_part': (INT, [P, P, i32, _p(P)]),
    'colo_comm_rank': (i32, [P]),
    'colo_comm_reduce_scatter': (INT, [P, P, P, i64, INT, INT, P]),
    'colo_comm_set_check': (INT, [P, i32]),
    'colo_comm_set_name': (None, [P, CHARS]),
    'colo_comm_set_timeout': (INT, [P, i64]),
    'colo_comm_set_world_ranks': (INT, [P, P]),
    'colo_comm_size': (i32, [P]),
    'colo_comm_split': (INT, [P, _p(Grid), CHARS, _p(P)]),
    'colo_comm_split_color': (INT, [P, i64, i64, _p(P)]),
    'colo_comm_stats': (INT, [P, _p(CommStats)]),
    'colo_comm_stats_reset': (None, [P]),
    'colo_comm_threads_run': (INT, [i32, RankFn, P]),
    'colo_comm_world_rank': (i64, [P, i32]),
    'colo_distill_backward': (INT, [_p(DistillSaved), _p(DistillUpstream), _p(Tensor), P]),
    'colo_distill_config_check': (INT, [_p(DistillConfig)]),
    'colo_distill_forward': (INT, [_p(DistillConfig), _p(DistillBatch), P, _p(DistillOut), _p(DistillSaved), P, P,
        P]),
    'colo_distill_saved_size': (INT, [_p(DistillConfig), i64, P]),
    'colo_distill_workspace_size': (INT, [_p(DistillConfig), INT, i64, i32, P]),
    'colo_env_check': (INT, [CHARS]),
    'colo_env_value': (CHARS, [CHARS, P]),
    'colo_grid_coords': (INT, [_p(Grid), i64, P]),
    'colo_grid_equal': (BOOL, [_p(Grid), _p(Grid)]),
    'colo_grid_group': (INT, [_p(Grid), CHARS, i64, _p(Group)]),
    'colo_grid_group_as_given': (INT, [_p(Grid), CHARS, i64, _p(Group)]),
    'colo_grid_group_at': (INT, [_p(Grid), CHARS, i64, _p(Group)]),
    'colo_grid_hash': (u64, [_p(Grid)]),
    'colo_grid_init': (INT, [_p(Grid), _p(Dim), i32, i64, i64]),
    'colo_grid_key': (INT, [_p(Grid), CHARS, CHARS]),
    'colo_grid_parse_n': (INT, [_p(Grid), CHARS, size_t, i64]),
    'colo_grid_print': (size_t, [_p(Grid), CHARS, size_t]),
    'colo_grid_rank': (INT, [_p(Grid), P, P]),
    'colo_group_member': (i64, [_p(Group), i64]),
    'colo_interrupt_set': (None, [InterruptedFn, P]),
    'colo_last_error': (CHARS, []),
    'colo_layout_check': (INT, [_p(Layout), i64, i64, i64]),
    'colo_layout_clear': (None, [_p(Layout), INT]),
    'colo_layout_hash': (u64, [_p(Layout)]),
    'colo_layout_holds': (BOOL, [_p(Layout), i64]),
    'colo_layout_init': (INT, [_p(Layout), _p(Grid)]),
    'colo_layout_init_dst_extra': (INT, [_p(Layout), _p(Grid), CHARS]),
    'colo_layout_init_src_extra': (INT, [_p(Layout), _p(Grid), CHARS]),
    'colo_layout_map_offset': (INT, [_p(Layout), i64, i64]),
    'colo_layout_map_table': (INT, [_p(Layout), P, i64, i64]),
    'colo_layout_owned': (INT, [_p(Layout), i64, _p(Shape), BOOL, _p(Owned), _p(Run), i64, P]),
    'colo_layout_split': (INT, [_p(Layout), INT, CHARS, INT]),
    'colo_layout_split_context': (INT, [_p(Layout), CHARS, INT]),
    'colo_layout_stage': (INT, [_p(Layout), CHARS, i64]),
    'colo_linear_distill_backward': (INT, [P, _p(LinearDistillSaved), _p(LinearDistillUpstream),
        _p(LinearLogprobGrads), P, P]),
    'colo_linear_distill_create': (INT, [_p(P), _p(LinearDistillConfig), P, P, P]),
    'colo_linear_distill_destroy': (None, [_p(P)]),
    'colo_linear_distill_early': (INT, [P, _p(LinearDistillBatch), _p(LinearDistillUpstream), _p(LinearDistillOut),
        _p(LinearDistillSaved), P, P, P]),
    'colo_linear_distill_forward': (INT, [P, _p(LinearDistillBatch), _p(LinearDistillOut), _p(LinearDistillSaved), P,
        P, P]),
    'colo_linear_distill_loss': (INT, [P, _p(LinearDistillBatch), _p(LinearDistillUpstream), _p(LinearDistillOut),
        _p(LinearLogprobGrads), P, P]),
    'colo_linear_distill_saved_size': (INT, [P, i64, i64, P]),
    'colo_linear_distill_workspace_size': (INT, [P, INT, i64, i64, P]),
    'colo_linear_logprob_backward': (INT, [P, _p(LinearLogprobSaved), _p(LinearLogprobUpstream),
        _p(LinearLogprobGrads), P, P]),
    'colo_linear_logprob_create': (INT, [_p(P), _p(LinearLogprobConfig), P, P]),
    'colo_linear_logprob_destroy': (None, [_p(P)]),
    'colo_linear_logprob_early': (INT, [P, _p(LinearLogprobBatch), _p(LinearLogprobUpstream), _p(LogprobOut),
        _p(LinearLogprobSaved), P, P, P]),
    'colo_linear_logprob_forward': (INT, [P, _p(LinearLogprobBatch), _p(LogprobOut), _p(LinearLogprobSaved), P, P,
        P]),
    'colo_linear_logprob_loss': (INT, [P, _p(LinearLogprobBatch), _p(LinearLogprobUpstream), _p(LogprobOut),
        _p(LinearLogprobGrads), P, P]),
    'colo_linear_logprob_saved_size': (INT, [P, i64, i64, P]),
    'colo_linear_logprob_workspace_size': (INT, [P, INT, i64, i64, P]),
    'colo_lm_head_bind': (INT, [P, _p(Tensor), _p(Tensor), P]),
    'colo_lm_head_create': (INT, [_p(P), _p(LmHeadConfig), P]),
    'colo_lm_head_destroy': (None, [_p(P)]),
    'colo_lm_head_gathered_size': (size_t, [P]),
    'colo_logprob_backward': (INT, [_p(LogprobSaved), _p(LogprobUpstream), _p(Tensor), P]),
    'colo_logprob_config_check': (INT, [_p(LogprobConfig)]),
    'colo_logprob_forward': (INT, [_p(LogprobConfig), _p(LogprobBatch), P, _p(LogprobOut), _p(LogprobSaved), P, P,
        P]),
    'colo_logprob_saved_size': (INT, [_p(LogprobConfig), INT, i64, P]),
    'colo_logprob_workspace_size': (INT, [_p(LogprobConfig), INT, i64, i32, P]),
    'colo_loss_mean_backward': (INT, [_p(Tensor), _p(LossMeanUpstream), _p(Tensor), P]),
    'colo_loss_mean_forward': (INT, [_p(Tensor), _p(Tensor), BOOL, P, _p(LossMean), P, P]),
    'colo_loss_mean_weighted': (INT, [_p(Tensor), _p(Tensor), BOOL, P, _p(LossMean), P, P]),
    'colo_loss_weighted_sum': (INT, [_p(Tensor), _p(Tensor), _p(Tensor), P, _p(LossWeighted), _p(Tensor), P, P]),
    'colo_loss_weighted_workspace_size': (size_t, [i32]),
    'colo_memory_alloc': (INT, [P, size_t, _p(P)]),
    'colo_memory_bytes': (size_t, [P]),
    'colo_memory_data': (P, [P]),
    'colo_memory_destroy': (None, [_p(P)]),
    'colo_memory_is_p2p': (BOOL, [P]),
    'colo_memory_register': (INT, [P, P, size_t, _p(P)]),
    'colo_nodes_create': (INT, [_p(P), P, i64]),
    'colo_nodes_destroy': (None, [_p(P)]),
    'colo_packing_index': (INT, [_p(Packing), _p(Layout), i64, P]),
    'colo_packing_most_rows': (INT, [_p(Packing), _p(Layout), P]),
    'colo_packing_pieces': (INT, [_p(Packing), _p(Layout), i64, P, P]),
    'colo_packing_rows': (INT, [_p(Packing), _p(Layout), i64, P]),
    'colo_partition_check': (INT, [_p(Partition)]),
    'colo_partition_count': (i64, [_p(Partition)]),
    'colo_partition_index': (i64, [_p(Partition), i64]),
    'colo_partition_next_token': (INT, [_p(Partition), _p(Tensor), i64, _p(Tensor), P]),
    'colo_partition_padded': (INT, [i64, i64, i64, BOOL, P]),
    'colo_partition_shard': (INT, [_p(Partition), _p(Tensor), i32, _p(Tensor), P]),
    'colo_partition_unshard': (INT, [_p(Partition), _p(Tensor), i32, _p(Tensor), P]),
    'colo_plan_addends': (i64, [P]),
    'colo_plan_bytes': (INT, [P, INT, _p(PlanBytes)]),
    'colo_plan_collective_check': (INT, [_p(PlanConfig)]),
    'colo_plan_create': (INT, [_p(P), _p(PlanConfig), i64]),
    'colo_plan_destroy': (None, [_p(P)]),
    'colo_plan_direction': (INT, [P]),
    'colo_plan_hash': (u64, [P]),
    'colo_plan_locals': (_p(Region), [P, INT, P]),
    'colo_plan_rank': (i64, [P]),
    'colo_plan_recvs': (_p(PlanMessage), [P, INT, P]),
    'colo_plan_scale': (i64, [P]),
    'colo_plan_sends': (_p(PlanMessage), [P, INT, P]),
    'colo_sampling_config_check': (INT, [_p(SamplingConfig)]),
    'colo_sampling_keep': (INT, [_p(SamplingConfig), _p(Tensor), _p(Tensor), P, P, P]),
    'colo_sampling_workspace_size': (INT, [_p(SamplingConfig), INT, i64, i32, P]),
    'colo_segments_balance': (INT, [P, P, i64, i64, P, DOUBLE]),
    'colo_segments_check': (INT, [_p(Segments), _p(Layout), _p(Layout)]),
    'colo_segments_free': (None, [_p(_p(Segments))]),
    'colo_segments_gather': (INT, [_p(_p(Segments)), _p(Segments), P]),
    'colo_sequence_check': (INT, [_p(Sequence)]),
    'colo_sequence_count': (i64, [_p(Sequence)]),
    'colo_sequence_gather': (INT, [_p(Sequence), _p(Tensor), _p(Tensor), P, P, P]),
    'colo_sequence_gather_backward': (INT, [_p(Sequence), INT, _p(Tensor), _p(Tensor), P, P, P]),
    'colo_sequence_mask': (INT, [_p(Sequence), INT, _p(Tensor), P]),
    'colo_sequence_pack': (INT, [P, i64, i64, i64, BOOL, P]),
    'colo_sequence_targets': (INT, [_p(Sequence), _p(Tensor), i64, _p(Tensor), P]),
    'colo_sequence_workspace_size': (INT, [_p(Sequence), INT, P]),
    'colo_ticket_finish': (INT, [_p(P), P]),
    'colo_topk_backward': (INT, [_p(TopkSaved), _p(TopkUpstream), _p(Tensor), P]),
    'colo_topk_config_check': (INT, [_p(TopkConfig)]),
    'colo_topk_forward': (INT, [_p(TopkConfig), _p(TopkBatch), P, _p(TopkOut), _p(TopkSaved), P, P, P]),
    'colo_topk_saved_size': (INT, [_p(TopkConfig), i64, P]),
    'colo_topk_workspace_size': (INT, [_p(TopkConfig), INT, i64, i32, P]),
    'colo_version': (CHARS, []),
    'colo_version_number': (c.c_uint32, []),
}
