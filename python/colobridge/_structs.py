# SPDX-License-Identifier: Apache-2.0
"""The public C structs and enums, member by member. tests/test_abi.py compiles a C program that
prints their sizes and offsets and compares."""
from __future__ import annotations

import ctypes as c

MAX_NDIM = 8
MAX_DIMS = 16
DIM_NAME_MAX = 16
KEY_MAX = MAX_DIMS * DIM_NAME_MAX
MAX_SPLITS = 4

DTYPES = ('f32', 'f64', 'bf16', 'f16', 'i8', 'u8', 'i16', 'i32', 'i64')
DTYPE = {name: i for i, name in enumerate(DTYPES)}
DTYPE_SIZE = (4, 8, 2, 2, 1, 1, 2, 4, 8)
HOST, CUDA = 0, 1
FULL_SEQ, SHARDED = 0, 1
PARTIAL, DISJOINT = 0, 1
EXACT, COLLECTIVE = 0, 1
AUTO, NCCL, PEER = 0, 1, 2
PACKED, MERGED = 0, 1
EQUAL, FAN_IN, FAN_OUT = 0, 1, 2
FORWARD, BACKWARD = 0, 1
SAMPLES, ROWS, FEATURES = 0, 1, 2
REPLICATE, BLOCK, ZIGZAG, CEIL = 0, 1, 2, 3
SUM, MAX = 0, 1
STAGE_ANY, STAGE_LAST = -1, -2
LINEAR_FORWARD, LINEAR_BACKWARD, LINEAR_LOSS, LINEAR_INFERENCE = 0, 1, 2, 3
LINEAR_AUTO, LINEAR_LOGPROB, LINEAR_KEEP, LINEAR_EARLY = 0, 1, 2, 3
OPS = ('all_gather', 'all_reduce', 'reduce_scatter', 'broadcast', 'barrier', 'exchange', 'split')
OWNERS = ('user', 'bridge', 'loss', 'head', 'check')

i32, i64, u64, size_t = c.c_int32, c.c_int64, c.c_uint64, c.c_size_t


class Tensor(c.Structure):
    """colo_tensor_t"""
    _fields_ = [('data', c.c_void_p), ('dtype', c.c_int), ('mem', c.c_int), ('device', i32),
                ('ndim', i32), ('shape', i64 * MAX_NDIM), ('stride', i64 * MAX_NDIM),
                ('version', c.POINTER(u64))]


class Dim(c.Structure):
    """colo_dim_t"""
    _fields_ = [('name', c.c_char_p), ('extent', i64)]


class Grid(c.Structure):
    """colo_grid_t"""
    _fields_ = [('ndims', i32), ('name', (c.c_char * DIM_NAME_MAX) * MAX_DIMS),
                ('extent', i64 * MAX_DIMS), ('stride', i64 * MAX_DIMS), ('offset', i64),
                ('size', i64)]


class Group(c.Structure):
    """colo_group_t"""
    _fields_ = [('base', i64), ('size', i64), ('index', i64), ('ordinal', i64), ('count', i64),
                ('nd', i32), ('extent', i64 * MAX_DIMS), ('stride', i64 * MAX_DIMS)]


class Split(c.Structure):
    """colo_split_t"""
    _fields_ = [('dim', i32), ('kind', c.c_int), ('context', c.c_bool)]


class Layout(c.Structure):
    """colo_layout_t"""
    _fields_ = [('grid', Grid), ('nsplits', i32 * 3), ('split', (Split * MAX_SPLITS) * 3),
                ('map', c.c_int), ('offset', i64), ('table', c.POINTER(i64)), ('table_rows', i64),
                ('positions', i64), ('stage_dim', i32), ('stage', i64)]


class Run(c.Structure):
    """colo_run_t"""
    _fields_ = [('row', i64), ('count', i64), ('local', i64)]


class Owned(c.Structure):
    """colo_owned_t"""
    _fields_ = [('b0', i64), ('b1', i64), ('h0', i64), ('h1', i64), ('rows', i64)]


class Shape(c.Structure):
    """colo_shape_t"""
    _fields_ = [('samples', i64), ('rows', i64), ('features', i64), ('positions', i64)]


class PlanConfig(c.Structure):
    """colo_plan_config_t"""
    _fields_ = [('struct_size', size_t), ('src', c.POINTER(Layout)), ('dst', c.POINTER(Layout)),
                ('shape', Shape), ('dtype', c.c_int), ('output', c.c_int), ('grad', c.c_int),
                ('no_grad', c.c_bool), ('ranks_per_node', i64), ('nodes', c.c_void_p),
                ('one_level', c.c_bool)]


class Region(c.Structure):
    """colo_region_t"""
    _fields_ = [('b', i64 * 2), ('s', i64 * 2), ('h', i64 * 2), ('addend', i32)]


class PlanMessage(c.Structure):
    """colo_plan_message_t"""
    _fields_ = [('peer', i64), ('bytes', i64), ('nregions', i64), ('regions', c.POINTER(Region))]


class PlanBytes(c.Structure):
    """colo_plan_bytes_t"""
    _fields_ = [('recv', i64), ('send', i64), ('local', i64), ('minimum', i64),
                ('collective_recv', i64)]


# void *(*)(void *user, size_t bytes); void (*)(void *user, void *data)
AllocateFn = c.CFUNCTYPE(c.c_void_p, c.c_void_p, size_t)
ReleaseFn = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p)


class Allocator(c.Structure):
    """colo_allocator_t"""
    _fields_ = [('allocate', AllocateFn), ('release', ReleaseFn), ('user', c.c_void_p)]


class BridgeConfig(c.Structure):
    """colo_bridge_config_t"""
    _fields_ = [('struct_size', size_t), ('src', c.POINTER(Layout)), ('dst', c.POINTER(Layout)),
                ('shape', Shape), ('dtype', c.c_int), ('axes', c.c_char_p), ('output', c.c_int),
                ('grad', c.c_int), ('algo', c.c_int), ('no_grad', c.c_bool),
                ('ranks_per_node', i64), ('mem', c.c_int), ('transport', c.c_int), ('ragged', c.c_bool),
                ('placement', c.c_int), ('max_rows', i64), ('one_level', c.c_bool),
                ('peer_blocks', c.c_int32), ('allocator', Allocator), ('packed', c.c_bool)]


class Packing(c.Structure):
    """colo_packing_t"""
    _fields_ = [('struct_size', size_t), ('nseqs', i64), ('seq_len', c.POINTER(i64)),
                ('seq_dp', c.POINTER(i64)), ('seq_cp', c.POINTER(i64)), ('seq_first', c.POINTER(i64)),
                ('split', c.c_int), ('piece_start', c.POINTER(i64)), ('piece_len', c.POINTER(i64)),
                ('piece_owner', c.POINTER(i64))]


class Segments(c.Structure):
    """colo_segments_t"""
    _fields_ = [('struct_size', size_t), ('count', i64), ('rows', c.POINTER(i64)),
                ('src_dp', c.POINTER(i64)), ('seq', c.POINTER(i64)), ('pos', c.POINTER(i64)),
                ('row_pos', c.POINTER(i64)), ('nseqs', i64), ('seq_len', c.POINTER(i64)),
                ('seq_dp', c.POINTER(i64)), ('packing', c.POINTER(Packing))]


# colo_status_t (*)(void *user, const void *send, void *recv, size_t bytes)
AllGatherFn = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, size_t)
# colo_status_t (*)(colo_comm_t *world, void *arg)
RankFn = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)


class Bootstrap(c.Structure):
    """colo_bootstrap_t"""
    _fields_ = [('rank', i32), ('size', i32), ('all_gather', AllGatherFn), ('user', c.c_void_p)]


class Stats(c.Structure):
    """colo_comm_stats_t"""
    _fields_ = [('ops', (u64 * len(OWNERS)) * len(OPS)),
                ('sent_bytes', (u64 * len(OWNERS)) * len(OPS)),
                ('recv_bytes', (u64 * len(OWNERS)) * len(OPS))]


class Partition(c.Structure):
    """colo_partition_t"""
    _fields_ = [('cp', i64), ('cp_rank', i64), ('tp', i64), ('tp_rank', i64), ('positions', i64),
                ('segments', i64), ('cu_padded', c.POINTER(i64))]


class LogitsOptions(c.Structure):
    """colo_logits_options_t"""
    _fields_ = [('vocab', i64), ('vocab_start', i64), ('temperature', c.c_double),
                ('scale', c.c_double), ('softcap', c.c_double)]


class LogprobConfig(c.Structure):
    """colo_logprob_config_t"""
    _fields_ = [('struct_size', size_t), ('logits', LogitsOptions), ('label_smoothing', c.c_double), ('megatron_smoothing', c.c_bool),
                ('z_loss', c.c_double), ('ignore_index', i64), ('chunk_size', i64),
                ('want_entropy', c.c_bool), ('want_loss', c.c_bool), ('want_correct', c.c_bool),
                ('lenient_targets', c.c_bool), ('local_smoothing', c.c_bool), ('segment', i64), ('order', i64)]


class Support(c.Structure):
    """colo_support_t"""
    _fields_ = [('ids', c.POINTER(Tensor)), ('begin', c.POINTER(Tensor)), ('end', c.POINTER(Tensor))]


class SupportSaved(c.Structure):
    """colo_support_saved_t"""
    _fields_ = [('ids', Tensor), ('begin', Tensor), ('end', Tensor), ('version', u64)]


class LogprobBatch(c.Structure):
    """colo_logprob_batch_t"""
    _fields_ = [('logits', c.POINTER(Tensor)), ('targets', c.POINTER(Tensor)),
                ('support', c.POINTER(Support))]


class LogprobOut(c.Structure):
    """colo_logprob_out_t"""
    _fields_ = [('logp', c.c_void_p), ('entropy', c.c_void_p), ('loss', c.c_void_p),
                ('correct', c.c_void_p), ('n_valid', c.c_void_p), ('n_invalid', c.c_void_p)]


class LogprobUpstream(c.Structure):
    """colo_logprob_upstream_t"""
    _fields_ = [('d_logp', c.c_void_p), ('d_entropy', c.c_void_p), ('d_loss', c.c_void_p)]


class LogprobSaved(c.Structure):
    """colo_logprob_saved_t"""
    _fields_ = [('logits', Tensor), ('targets', Tensor), ('support', SupportSaved),
                ('logits_version', u64), ('targets_version', u64), ('memory', c.c_void_p),
                ('valid', c.c_bool), ('config', LogprobConfig)]


class TopkConfig(c.Structure):
    """colo_topk_config_t"""
    _fields_ = [('struct_size', size_t), ('logits', LogitsOptions), ('k', i64), ('topk', c.c_bool),
                ('ignore_index', i64), ('order', i64)]


class TopkBatch(c.Structure):
    """colo_topk_batch_t"""
    _fields_ = [('logits', c.POINTER(Tensor)), ('ids', c.POINTER(Tensor)), ('mask', c.POINTER(Tensor))]


class TopkOut(c.Structure):
    """colo_topk_out_t"""
    _fields_ = [('logp', c.c_void_p), ('ids', c.c_void_p), ('n_invalid', c.c_void_p)]


class TopkUpstream(c.Structure):
    """colo_topk_upstream_t"""
    _fields_ = [('d_logp', c.c_void_p)]


class TopkSaved(c.Structure):
    """colo_topk_saved_t"""
    _fields_ = [('logits', Tensor), ('logits_version', u64),
                ('memory', c.c_void_p), ('valid', c.c_bool), ('config', TopkConfig)]


class SamplingConfig(c.Structure):
    """colo_sampling_config_t"""
    _fields_ = [('struct_size', size_t), ('logits', LogitsOptions), ('top_k', i64), ('top_p', c.c_double)]


class DistillConfig(c.Structure):
    """colo_distill_config_t"""
    _fields_ = [('struct_size', size_t), ('logits', LogitsOptions), ('targets', c.c_int),
                ('target_temperature', c.c_double), ('target_scale', c.c_double), ('order', i64)]


class DistillBatch(c.Structure):
    """colo_distill_batch_t"""
    _fields_ = [('logits', c.POINTER(Tensor)), ('targets', c.POINTER(Tensor)), ('mask', c.POINTER(Tensor))]


class DistillOut(c.Structure):
    """colo_distill_out_t"""
    _fields_ = [('ce', c.c_void_p), ('kl', c.c_void_p)]


class DistillUpstream(c.Structure):
    """colo_distill_upstream_t"""
    _fields_ = [('d_ce', c.c_void_p), ('d_kl', c.c_void_p)]


class DistillSaved(c.Structure):
    """colo_distill_saved_t"""
    _fields_ = [('logits', Tensor), ('targets', Tensor),
                ('logits_version', u64), ('targets_version', u64), ('memory', c.c_void_p),
                ('valid', c.c_bool), ('config', DistillConfig)]


class Sequence(c.Structure):
    """colo_sequence_t"""
    _fields_ = [('struct_size', size_t), ('batch', i64), ('positions', i64), ('padded', i64),
                ('lengths', c.c_void_p), ('cu_padded', c.c_void_p), ('left_padded', c.c_bool),
                ('cp', i64), ('cp_rank', i64), ('device_lengths', c.c_void_p),
                ('device_cu_padded', c.c_void_p)]


class Reduced(c.Structure):
    """colo_reduced_t"""
    _fields_ = [('num', c.c_double), ('den', i64), ('value', c.c_double)]


class LossMean(c.Structure):
    """colo_loss_mean_t"""
    _fields_ = [('value', c.c_void_p), ('num', c.c_void_p), ('den', c.c_void_p),
                ('factor', c.c_void_p)]


class LossMeanUpstream(c.Structure):
    """colo_loss_mean_upstream_t"""
    _fields_ = [('d_value', c.c_void_p), ('d_num', c.c_void_p)]


class LmHeadConfig(c.Structure):
    """colo_lm_head_config_t"""
    _fields_ = [('struct_size', size_t), ('rows', i64), ('hidden', i64), ('dtype', c.c_int),
                ('mem', c.c_int), ('device', i32), ('has_bias', c.c_bool), ('partition', c.c_int)]


class LinearConfig(c.Structure):
    """colo_linear_logprob_config_t"""
    _fields_ = [('struct_size', size_t), ('logprob', LogprobConfig), ('mode', c.c_int),
                ('logits_dtype', c.c_int), ('budget', size_t), ('d_hidden', c.c_int),
                ('frozen_hidden', c.c_bool), ('frozen_weight', c.c_bool),
                ('d_weight_dtype', c.c_int), ('d_weight_add', c.c_bool),
                ('keep_in_place', c.c_bool), ('share_d_weight', c.c_bool)]


class LinearBatch(c.Structure):
    """colo_linear_batch_t"""
    _fields_ = [('hidden', c.POINTER(Tensor)), ('targets', c.POINTER(Tensor)), ('max_valid', i64),
                ('support', c.POINTER(Support))]


class LinearUpstream(c.Structure):
    """colo_linear_upstream_t"""
    _fields_ = [('logp', c.c_double), ('entropy', c.c_double), ('loss', c.c_double),
                ('d_logp', c.c_void_p), ('d_entropy', c.c_void_p), ('d_loss', c.c_void_p),
                ('mean', c.c_bool)]


class LinearGrads(c.Structure):
    """colo_linear_grads_t"""
    _fields_ = [('d_hidden', c.POINTER(Tensor)), ('d_weight', c.POINTER(Tensor)),
                ('d_bias', c.POINTER(Tensor))]


class LinearSaved(c.Structure):
    """colo_linear_logprob_saved_t"""
    _fields_ = [('of', c.c_void_p), ('hidden', Tensor), ('targets', Tensor),
                ('support', SupportSaved), ('hidden_version', u64), ('targets_version', u64), ('weight_version', u64),
                ('max_valid', i64), ('memory', c.c_void_p), ('d_weight', c.c_void_p), ('valid', c.c_bool)]


# C name of each, for the test that compares them with the headers.
C_NAMES = {
    'colo_tensor_t': Tensor, 'colo_dim_t': Dim, 'colo_grid_t': Grid, 'colo_group_t': Group,
    'colo_packing_t': Packing, 'colo_split_t': Split, 'colo_layout_t': Layout, 'colo_run_t': Run, 'colo_owned_t': Owned,
    'colo_shape_t': Shape, 'colo_plan_config_t': PlanConfig, 'colo_region_t': Region,
    'colo_plan_message_t': PlanMessage, 'colo_plan_bytes_t': PlanBytes,
    'colo_allocator_t': Allocator, 'colo_bridge_config_t': BridgeConfig, 'colo_bootstrap_t': Bootstrap, 'colo_comm_stats_t': Stats,
    'colo_partition_t': Partition, 'colo_logits_options_t': LogitsOptions,
    'colo_logprob_config_t': LogprobConfig,
    'colo_support_t': Support, 'colo_support_saved_t': SupportSaved, 'colo_logprob_batch_t': LogprobBatch,
    'colo_logprob_out_t': LogprobOut, 'colo_logprob_upstream_t': LogprobUpstream,
    'colo_lm_head_config_t': LmHeadConfig, 'colo_linear_logprob_config_t': LinearConfig,
    'colo_linear_batch_t': LinearBatch, 'colo_linear_upstream_t': LinearUpstream,
    'colo_linear_grads_t': LinearGrads, 'colo_linear_logprob_saved_t': LinearSaved,
    'colo_logprob_saved_t': LogprobSaved, 'colo_reduced_t': Reduced,
    'colo_topk_config_t': TopkConfig, 'colo_topk_batch_t': TopkBatch, 'colo_topk_out_t': TopkOut,
    'colo_topk_upstream_t': TopkUpstream, 'colo_topk_saved_t': TopkSaved, 'colo_distill_config_t': DistillConfig,
    'colo_sampling_config_t': SamplingConfig,
    'colo_distill_batch_t': DistillBatch, 'colo_distill_out_t': DistillOut,
    'colo_distill_upstream_t': DistillUpstream, 'colo_distill_saved_t': DistillSaved,
    'colo_sequence_t': Sequence, 'colo_loss_mean_t': LossMean,
    'colo_loss_mean_upstream_t': LossMeanUpstream, 'colo_segments_t': Segments,
}
