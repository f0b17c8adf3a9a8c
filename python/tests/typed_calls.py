# SPDX-License-Identifier: Apache-2.0
"""Each public function and class with the type of its result, which pyright and mypy check; it is not run. A line that
ends with "refused" must be an error. See typed.py."""
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, assert_type

import colobridge as cb
import colobridge.torch as ct
import torch
import torch.distributed as dist
from colobridge import compat, megatron
from torch.distributed.device_mesh import DeviceMesh

Tensor = torch.Tensor
Two: TypeAlias = tuple[Tensor, Tensor]
Three: TypeAlias = tuple[Tensor, Tensor, Tensor]


def losses(z: Tensor, t: Tensor, ids: Tensor, group: dist.ProcessGroup, mesh: DeviceMesh, word: Literal['none', 'mean', 'sum'],
           on: bool) -> None:
    assert_type(ct.nll(z, t), ct.Loss)
    assert_type(ct.nll(z, t, reduction='sum', mask=t != 0, tp_group=mesh, reduce_group=group, vocab=100), ct.Loss)
    assert_type(ct.nll(z, t, reduction='none', class_weight=z[0], vocab=(3, None), label_smoothing=0.1, z_loss=1e-4), Tensor)
    assert_type(ct.nll(z, t, reduction=word, support=ct.Support(ids), invariant=True), ct.Loss | Tensor)
    assert_type(ct.nll(z, t).loss, Tensor)
    assert_type(ct.nll(z, t) / 8, Tensor)
    assert_type(ct.nll(z, t).backward(), None)
    assert_type(ct.nll(z, t).item(), float)
    _, num, den = ct.nll(z, t)
    assert_type(num / den, Tensor)
    ct.nll("not a tensor", 5, reduction="maen")  # refused
    ct.nll(z, t, reduction='maen')  # refused
    ct.nll(z, t, temprature=2.0)  # refused
    ct.cross_entropy("not a tensor", 5, reduction="maen")  # refused 3 times
    ct.linear_cross_entropy("not a tensor", z, 5, reduction="maen")  # refused 3 times
    assert_type(ct.logprob(z, t), Tensor)
    assert_type(ct.logprob(z, t, entropy=True, tp_group=group), Two)
    assert_type(ct.logprob(z, t, loss=True, softcap=30.0, temperature=0.7), Two)
    assert_type(ct.logprob(z, t, entropy=True, loss=True, ignore_index=0, inplace_backward=True), Three)
    assert_type(ct.logprob(z, t, entropy=on), Tensor | tuple[Tensor, ...])
    assert_type(ct.logprob(z, t, temperature=z[0]), Tensor)
    assert_type(ct.nll(z, t, temperature=z[0]), ct.Loss)
    assert_type(ct.linear_nll(z, z, t, temperature=z[0]), ct.Loss)
    ct.topk_logprob(z, 4, temperature=z[0])  # refused
    assert_type(ct.logprob(z, t, outputs=('argmax', 'lse')), tuple[Tensor, ...])
    assert_type(ct.logprob(z, t, entropy=True, outputs=['correct']), tuple[Tensor, ...])
    ct.logprob(z, t, outputs=('argmin',))  # refused
    ct.logprob(z, None)  # refused
    assert_type(ct.cross_entropy(z, t, z[0], label_smoothing=0.1, tp_group=group, reduce_group=mesh), Tensor)
    assert_type(ct.cross_entropy(z, t, reduction=word), Tensor)
    assert_type(ct.entropy(z, mask=t != 0, tp_group=group), Tensor)
    assert_type(ct.topk_logprob(z, 4, tp_group=group), ct.TopK)
    assert_type(ct.topk_logprob(z, 4).ids, Tensor)
    assert_type(ct.logprob_at(z, ids, vocab=(0, 100)), Tensor)
    assert_type(ct.distill(z, z, soft_labels=True, target_temperature=2.0), ct.Distilled)
    assert_type(ct.distill(z, z, temperature=z[0], target_temperature=z[0]).kl, Tensor)
    assert_type(ct.distill(z, z, kind='jsd', beta=0.1, reduce_group=group), ct.Loss)
    assert_type(ct.distill(z, z, kind='tv', reduction='none', mask=t != 0), Tensor)
    ct.distill(z, z, kind='kl')  # refused
    assert_type(ct.topk_distill(z, ids, z, tail=False, reduce_group=group), ct.Loss)
    assert_type(ct.topk_distill(z, ids, z, kind='reverse_kl', reduction='none', temperature=z[0]), Tensor)
    ct.topk_distill(z, ids, z, kind='jsd')  # refused
    assert_type(ct.weighted_sum(z, z, t != 0, reduce_group=group), ct.Weighted)
    assert_type(ct.weighted_sum(z) * 2, Tensor)
    assert_type(ct.Support(ids, t, ascending=True), ct.Support)
    module = ct.CrossEntropyLoss(tp_group=group)
    assert_type(module(z, t), Tensor)


def heads(h: Tensor, w: Tensor, t: Tensor, layer: torch.nn.Linear, group: dist.ProcessGroup, word: Literal['none', 'mean', 'sum']) -> None:
    head = ct.Head(w, softcap=30.0, tp_group=group, vocab=(0, 100), d_hidden='partial', logits_dtype=torch.float32)
    assert_type(head.weight, Tensor)
    assert_type(ct.Head.of(layer, main_grad=True), ct.Head)
    ct.Head(w, d_hidden='partly')  # refused
    assert_type(ct.linear_nll(h, head, t, reduce_group=group, chunk_size=512), ct.Loss)
    assert_type(ct.linear_nll(h, w, t, reduction='sum', upstream=0.5), ct.Loss)
    assert_type(ct.linear_distill(h, head, h, w, kind='reverse_kl', teacher_temperature=0.5), ct.Loss)
    assert_type(ct.linear_distill(h, head, h, w, reduction='none', mode='logprob', mask=t != 0), Tensor)
    assert_type(ct.reshard_head(w, (0, 50), group=group), Tensor)
    assert_type(ct.linear_nll(h, w, t, reduction='none', mode='auto'), Tensor)
    assert_type(ct.linear_nll(h, w, t, groups=t, group_weight=[1.0, 0.3], mode='logprob'), ct.GroupedLoss)
    assert_type(ct.nll(h, t, groups=t, group_weight=w[0], reduction='sum') * 2, Tensor)
    ct.linear_nll(h, w, t, groups=[0, 1], group_weight=[1.0])  # refused
    assert_type(ct.linear_nll(h, ct.Head(w, lora=(w, w, 2.0)), t), ct.Loss)
    ct.Head(w, lora=(w, w))  # refused
    assert_type(ct.Sequence(2, 3).targets(t, depth=1), Tensor)
    assert_type(ct.linear_nll(h, w, t, reduction=word), ct.Loss | Tensor)
    ct.linear_nll(h, layer, t)  # refused
    assert_type(ct.linear_logprob(h, w, t), Tensor)
    assert_type(ct.linear_logprob(h, w, t, entropy=True, mode='keep'), Two)
    assert_type(ct.linear_logprob(h, head, t, entropy=True, loss=True), Three)
    assert_type(ct.linear_logprob(h, head, t, outputs=('sum_p2', 'mean_logits')), tuple[Tensor, ...])
    assert_type(ct.linear_cross_entropy(h, head, t, reduction='sum', weight=w[0]), Tensor)
    assert_type(ct.over_chunks(lambda z, rows: z.sum(-1), h, head, chunk_size=256, params=[w]), Tensor)
    assert_type(ct.over_chunks(lambda z, rows: (z.sum(-1), z[:, 0]), h, w), Two)
    module = ct.LinearCrossEntropyLoss(reduction='sum')
    assert_type(module(h, layer.weight, t), Tensor)


def bridges(x: Tensor, group: dist.ProcessGroup, mesh: DeviceMesh, world: cb.Comm, segments: cb.Segments, packing: cb.Packing) -> None:
    carry = ct.Bridge('tp=2,dp=2', mesh, group=group, axes='sbh', output='sharded')
    assert_type(carry(x), Tensor)
    assert_type(carry(None, shape=(4, 8, 16), like=x), Tensor)
    assert_type(carry.start(x).finish(), Tensor)
    assert_type(carry.global_shape(x), tuple[int, int, int])
    carry.check_samples(x, [1, 2])
    assert_type(carry.src, cb.Layout)
    assert_type(carry.comm(x.device), cb.Comm)
    carry([1.0, 2.0])  # refused
    ct.Bridge('tp=2', mesh, group=group, output='whole')  # refused
    ct.Bridge('tp=2', 'tp=1,dp=2', group='tp')  # refused
    assert_type(ct.bridge(x, {'dp': 4}, cb.Layout.dst('tp=2,dp=2'), group=dist.group.WORLD), Tensor)
    ragged = ct.RaggedBridge('dp=4', 'tp=2,dp=2', group=world, comm='own')
    assert_type(ragged(x, segments), Tensor)
    assert_type(ragged((x, x), segments, into=(x, None)), tuple[Tensor, ...])
    assert_type(ragged.start((x, x), segments).finish(), tuple[Tensor, ...])
    assert_type(ragged.start(x, segments), ct.Ticket[Tensor])
    assert_type(ragged.index(segments), Tensor)
    assert_type(ragged.rows(segments, 'cuda'), tuple[int, int])
    packed = ct.PackedBridge('cp=4', 'cp=4', group=group)
    assert_type(packed(x, packing, packing.with_split('block')), Tensor)
    assert_type(ct.relayout(x, [0, 8], 'zigzag', 'block', group=group, dim=1), Tensor)
    ct.relayout(x, [0, 8], 'zigzag', 'blocks', group=group)  # refused
    assert_type(ct.halo(x, [0, 8], 3, split='zigzag', group=group), Two)
    part = cb.Partition(16, cp=2, cp_rank=1)
    assert_type(ct.shard(x, part), Tensor)
    assert_type(ct.unshard(x, part, dim=0), Tensor)
    assert_type(ct.next_token(x, part), Tensor)
    seq = ct.Sequence(2, 8, lengths=[7, 8], cu_padded=ct.Sequence.pack([7, 8], cp=2), cp_group=group)
    assert_type(seq.targets(x), Tensor)
    assert_type(seq.mask('targets', x.device), Tensor)
    assert_type(seq.gather(x, 'sum'), Tensor)
    assert_type(ct.comm_of(group, x.device), cb.Comm)
    assert_type(ct.comm_of_ranks([0, 1], x.device), cb.Comm)
    assert_type(ct.group_ranks(group), tuple[int, ...])
    assert_type(ct.shutdown(), None)
    of: ct.Group = mesh
    ct.nll(x, x, tp_group=of)


def towers(tower: torch.nn.Module, pixels: Tensor, grid: Tensor, into: Tensor, group: dist.ProcessGroup) -> None:
    vision = ct.EncoderParallel(tower, group=group, llm='tp=2,dp=2', cost=lambda grid: 1.0 * grid[0], rows=lambda grid: grid[1],
                                smallest=(pixels, [[1, 2, 2]]), run=lambda tower, pixels, grid: pixels)
    hidden: Tensor = vision(pixels, grid, seq=[0], pos=[3], into=into)
    plan = vision.plan(pixels, grid, seq=[0], pos=[3], packing=[0, 8])
    assert_type(plan, ct.TowerPlan)
    assert_type(plan.segments, cb.Segments)
    assert_type(plan.of(0), list[int])
    assert_type(ct.plan_towers((vision, {'pixels': pixels})), list[ct.TowerPlan])
    assert_type(vision.last, ct.TowerPlan | None)
    assert_type(vision.index(), Tensor)
    assert_type(vision.fit((1, 8, 8), (1, 16, 16)), float)
    assert_type(vision.stats(), dict[str, Any])
    vision(3)  # refused
    hidden.sum()


def core(world: cb.Comm, rows: Sequence[int]) -> None:
    grid = cb.Grid({'tp': 2, 'dp': 4})
    assert_type(grid.size, int)
    assert_type(grid.offset, int)
    assert_type(grid.names, list[str])
    assert_type(grid.shape, list[int])
    assert_type(grid.group('tp', 0), cb.Group)
    assert_type(grid.group('tp', 0).size, int)
    layout = cb.Layout.src(grid)
    assert_type(layout.owned(0, 4, 8, 16), cb.Owned)
    assert_type(cb.collective_check(layout, cb.Layout.dst('tp=8'), (8, 4, 16)), None)
    plan = cb.Plan(layout, cb.Layout.dst('tp=8'), (8, 4, 16), rank=0)
    assert_type(plan.rank, int)
    assert_type(plan.hash, int)
    assert_type(cb.run_threads(2, lambda comm: comm.rank), list[int])
    assert_type(world.rank, int)
    assert_type(world.backend, str)
    bridge = cb.Bridge(world, layout, layout, (8, 4, 16))
    assert_type(bridge.workspace_size, int)
    segments = cb.Segments([2], src=[0], seq=[0], pos=[0], seq_len=[4], seq_dp=[0])
    assert_type(bridge.set_segments(segments), cb.Batch)
    assert_type(cb.Packing([0, 4], split='block').seq_len, list[int])
    assert_type(cb.balance([1, 2, 3], 2), list[int])
    assert_type(cb.padded(3, cp=2), int)
    assert_type(cb.Memory.alloc(world, 64).nbytes, int)
    assert_type(cb.library_version(), str)
    try:
        cb.Grid('tp=0')
    except (cb.Error, cb.ArgumentError, cb.NamingError, cb.FailedError, cb.DeadlineError, cb.MismatchError) as why:
        assert_type(why.status, int)


def of_megatron(encoder: megatron.HyperCommGrid, llm: megatron.HyperCommGrid, x: Tensor) -> None:
    carry = megatron.ColocatedBridgeCommunicator(encoder, llm, 'images', 'llm')
    assert_type(carry.communicate(x), Tensor)
    assert_type(carry.direction, megatron.BridgeDirection)
    assert_type(carry.get_slice_info(8), megatron.SliceInfo)
    assert_type(megatron.HyperCommGrid([1, 4], ['tp', 'dp']), megatron.HyperCommGrid)
    assert_type(megatron.PartitionAdapter(megatron.PartitionConfig(True, False, False, 8)), megatron.PartitionAdapter)
    assert_type(megatron.install(), list[str])
    assert_type(megatron.uninstall(), None)
    _ = megatron.CpPartitionModeConverter, megatron.convert_cp_partition_mode, megatron.convert_module_input_tensors_cp_partition_mode
    _ = megatron.prebuild_thd_cp_partition_routes


def of_compat(z: Tensor, t: Tensor, h: Tensor, w: Tensor, cu: Tensor, group: dist.ProcessGroup, model: torch.nn.Module) -> None:
    assert_type(compat.set_tensor_parallel_group(group), None)
    assert_type(compat.DistributedLogprob.apply(z, t, 0, 8, group), Tensor)
    assert_type(compat.ChunkedDistributedLogprob.apply(z, t, 0, 8, 4, group), Tensor)
    assert_type(compat.ChunkedDistributedGatherLogprob.apply(z, t, 0, 8, 4, group), Tensor)
    assert_type(compat.ChunkedDistributedEntropy.apply(z, 4, group), Tensor)
    assert_type(compat.DistributedLogprobWithSampling.apply(z, t, group, 4, 0.9), Tensor)
    assert_type(compat.ChunkedDistributedLogprobWithSampling.apply(z, t, group, None, 0.9, 4), Tensor)
    assert_type(compat.FusedLinearChunkedDistributedLogprob.apply(h, w, t, 0, 8, 4, group), Tensor)
    assert_type(compat.from_parallel_logits_to_logprobs(z, t, 0, 8, group), Tensor)
    assert_type(compat.from_parallel_logits_to_logprobs_packed_sequences(z, t, cu, 8, 0, 8, group), Tensor)
    assert_type(compat.from_parallel_logits_to_logprobs_packed_sequences_nemo_rl(z, t, cu, 8, 0, 8, group), Tensor)
    assert_type(compat.from_parallel_hidden_to_logprobs(h, w, t, 0, 8, group), Tensor)
    assert_type(compat.from_parallel_hidden_to_logprobs_packed_sequences(h, w, t, cu, 8, 0, 8, group), Tensor)
    assert_type(compat.from_parallel_hidden_to_entropy_packed_sequences(h, w, cu, 8, 4, t, None, None, group), Two)
    assert_type(compat.linear_cross_entropy(h, w, t), Two)
    assert_type(compat.vocab_parallel_entropy(z, tp_group=group), Tensor)
    assert_type(compat.vocab_parallel_entropy_weighted_sum(z, t), Tensor)
    assert_type(compat.vocab_parallel_entropy_packed_sequences(z, cu, 8, 4, t, None, None), Two)
    assert_type(compat.vocab_parallel_log_probs_from_logits(z, t), Tensor)
    assert_type(compat.vocab_parallel_cross_entropy(z, t, 0.1, group), Tensor)
    assert_type(compat.chunked_cross_entropy_loss(h, w, 256, t), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(compat.fuse_lm_head(model), Callable[[], None])
    assert_type(compat.cp_shift_next(t, group, fill=0), Tensor)
    assert_type(compat.allgather_cp_sharded_tensor(z, group), Tensor)
    assert_type(compat.allgather_cp_sharded_packed_tensor(z, cu, group), Tensor)
    assert_type(compat.cp_load_balanced_to_contiguous(z, cp_group=group), Tensor)
    assert_type(compat.group_all_reduce_sum(z, group), Tensor)
    assert_type(compat.group_all_reduce_sum_with_grad(z, group), Tensor)
    assert_type(compat.distributed_vocab_topk(z, 4, group, vocab_start_index=0, vocab_end_index=8), Two)
    assert_type(compat.vocab_parallel_log_softmax(z, 1.0, tp_group=group), Tensor)
    assert_type(compat.vocab_parallel_full_log_softmax(z, 1.0, tp_group=group), Tensor)
    assert_type(compat.vocab_parallel_gather_columns(z, t, tp_group=group), Tensor)
    assert_type(compat.vocab_parallel_argmax(z, tp_group=group), Tensor)
    assert_type(compat.get_logprobs_from_vocab_parallel_logits(z, t), Tensor)
    assert_type(compat.get_next_token_logprobs_from_logits(t, z), Tensor)
    assert_type(compat.get_distillation_topk_logprobs_from_logits(z, z, t, True, False), tuple[Tensor, Tensor, Tensor | None])
    assert_type(compat.DistributedCrossEntropy.apply(z, z, group), Tensor)
    assert_type(compat.draft_soft_ce(z, z, t), Tensor)
    assert_type(compat.draft_soft_ce_topk(z, z, t, 4), Tensor)
    assert_type(compat.fused_vocab_parallel_cross_entropy(z, t, group), Tensor)
    assert_type(megatron.linear_cross_entropy(h, w, t, group), Tensor)
    assert_type(compat.LigerCrossEntropyLoss(return_z_loss=True)(z, t), Tensor | compat.CrossEntropyOutput)
    assert_type(compat.LigerFusedLinearCrossEntropyLoss()(w, h, t), Tensor | compat.CrossEntropyOutput)
    logp, entropy, *_ = compat.ChunkedLogProbFunction.apply(h, w, None, t, 1.0, 256)
    assert_type(logp, Tensor)
    assert_type(entropy, Tensor | None)
    compat.vocab_parallel_entropy('x')  # refused
