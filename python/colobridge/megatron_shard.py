# SPDX-License-Identifier: Apache-2.0
"""PartitionAdapter and PartitionConfig of Megatron's MIMO model: each context and tensor rank's part of merged
embeddings, labels and masks. Import them from colobridge.megatron."""
from dataclasses import dataclass
from typing import Any

from .errors import ArgumentError
from .partition import Partition
from .torch.functions import Function
from .torch.partition import shard
from .torch.ranks import comm_of, size_and_rank
from .torch.tensors import stream_of


@dataclass(frozen=True)
class PartitionConfig:
    """What PartitionAdapter needs to know.

    Args:
        seq_parallel: rows are cut over tp_group, too.
        use_cp: rows are cut over cp_group.
        tp_comm_overlap: the length has to be max_seq_len then, if seq_parallel.
        max_seq_len: positions of the language model.
        kv_format: Megatron's, which decides nothing here: packed_seq_params tell.
        cp_group: the context ranks: a torch process group, a DeviceMesh of one dim, or a colobridge.Comm; None: no others.
        tp_group: the ranks of sequence parallelism, of such a kind; None: no others.
    """
    seq_parallel: bool
    use_cp: bool
    tp_comm_overlap: bool
    max_seq_len: int
    kv_format: str = 'sbhd'
    cp_group: Any = None
    tp_group: Any = None

    @classmethod
    def from_mp_config(cls, mp: Any, *, max_seq_len: int, kv_format: str = 'sbhd', cp_group: Any = None,
                       tp_group: Any = None) -> 'PartitionConfig':
        """From Megatron's ModelParallelConfig. No global state is asked for a group.

        Args:
            mp: the ModelParallelConfig, of which context_parallel_size, sequence_parallel and tp_comm_overlap are read.
            max_seq_len: positions of the language model.
            kv_format: as in PartitionConfig.
            cp_group: as in PartitionConfig.
            tp_group: as in PartitionConfig.

        Returns:
            The PartitionConfig.

        Raises:
            ValueError: it has context or sequence parallelism without the group.
        """
        for name, wanted, group in (('cp_group', mp.context_parallel_size > 1, cp_group),
                                    ('tp_group', mp.sequence_parallel, tp_group)):
            if wanted and group is None:
                raise ArgumentError("PartitionConfig: %s is None, but context_parallel_size is %d and "
                                    "sequence_parallel is %s; pass the language model's group"
                                    % (name, mp.context_parallel_size, mp.sequence_parallel))
        return cls(mp.sequence_parallel, size_and_rank(cp_group)[0] > 1, mp.tp_comm_overlap, max_seq_len, kv_format,
                   cp_group, tp_group)


class PartitionAdapter:
    """This rank's part of a language model's inputs, zigzag over cp, then blocks over tp with sequence parallelism.

    Packed batches need no Transformer Engine.

    Args:
        cfg: a PartitionConfig, ours or Megatron's.
    """

    def __init__(self, cfg: Any):
        self.cfg = cfg

    def shard(self, embeddings: Any, labels: Any, loss_mask: Any, packed_seq_params: Any = None
              ) -> tuple[Any, Any, Any, Any]:
        """Cuts embeddings, labels and masks.

        Args:
            embeddings: [S, B, H], of a floating-point dtype, or None.
            labels: [B, S], or None.
            loss_mask: [B, S], or None.
            packed_seq_params: Megatron's, with cu_seqlens_q_padded or cu_seqlens_q; None: the batch is dense.

        Returns:
            (embeddings [S/(cp tp), B, H], labels [B, S/cp], loss_mask [B, S/cp], packed_seq_params), each of its dtype; None
            stays None. Gradients of embeddings: 0 at other context ranks' positions, gathered over tp.

        Raises:
            AssertionError: a length that does not divide; with tp_comm_overlap one that is not max_seq_len.
        """
        cfg = self.cfg
        cp, cp_rank = size_and_rank(cfg.cp_group) if cfg.use_cp else (1, 0)
        tp, tp_rank = size_and_rank(cfg.tp_group) if cfg.seq_parallel else (1, 0)
        packed: Any = None if getattr(packed_seq_params, 'qkv_format', 'sbhd') == 'sbhd' else packed_seq_params
        if embeddings is not None and packed is None:
            factor = tp * (2 * cp if cp > 1 else 1)
            if embeddings.shape[0] % factor:
                raise AssertionError("Sequence length should be divisible by %d for Sequence/Context parallelism: "
                                     "found %d" % (factor, embeddings.shape[0]))
            if cfg.seq_parallel and cfg.tp_comm_overlap and embeddings.shape[0] != cfg.max_seq_len:
                raise AssertionError("TP Comm overlap requires Vision+Text token length == "
                                     "language_max_sequence_length: found %d, expected %d"
                                     % (embeddings.shape[0], cfg.max_seq_len))
        if cp > 1:
            cu = None
            if packed is not None:
                cu = packed.cu_seqlens_q_padded
                cu = (packed.cu_seqlens_q if cu is None else cu).tolist()
            embeddings, labels, loss_mask = (
                None if t is None else shard(t, Partition(t.shape[axis], cp=cp, cp_rank=cp_rank, cu_padded=cu), axis)
                for t, axis in ((embeddings, 0), (labels, 1), (loss_mask, 1)))
        if embeddings is not None and tp > 1:
            if embeddings.shape[0] % tp:
                raise AssertionError("Sequence length should be divisible by %d for Sequence parallelism: found %d"
                                     % (tp, embeddings.shape[0]))
            embeddings = _Scatter.apply(embeddings, cfg.tp_group, tp, tp_rank)
        return embeddings, labels, loss_mask, packed_seq_params


@Function
def _Scatter(ctx: Any, x: Any, group: Any, size: int, rank: int) -> Any:
    """This tp rank's block of rows that all of them hold; gradients are gathered."""
    ctx.group = group
    return x.chunk(size)[rank].contiguous()


@_Scatter.adjoint
def _(ctx: Any, g: Any) -> Any:
    comm = comm_of(ctx.group, g.device, 'PartitionAdapter: tp_group')
    whole = g.new_empty((comm.size * g.shape[0], *g.shape[1:]))
    comm.all_gather(g.contiguous(), whole, stream=stream_of(g.device) if g.is_cuda else None)
    return whole, None, None, None
