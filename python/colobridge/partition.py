# SPDX-License-Identifier: Apache-2.0
"""Shard embeddings, labels and masks along the sequence; docs/concepts/layouts.md."""
import ctypes as c
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from . import _structs as s
from ._lib import call, lib, result
from .plan import choice
from .view import view


CUTS = {'zigzag': 0, 'contiguous': 1}


class Partition:
    """Which positions of a sequence a rank has: zigzag over cp, then blocks over tp.

    Args:
        positions: global.
        cp: ranks of context parallelism.
        cp_rank: this one's among them.
        tp: ranks of tensor parallelism.
        tp_rank: this one's among them.
        cu_padded: [segments + 1], starts of padded segments of a packed batch, which are then split one by one.
        split: "contiguous": each cp rank has one interval of all positions.

    Raises:
        ValueError: what does not divide.

    Example:
        >>> import colobridge
        >>> colobridge.Partition(8, cp=2, cp_rank=1).index()
        [2, 3, 4, 5]
    """

    def __init__(self, positions: int, *, cp: int = 1, cp_rank: int = 0, tp: int = 1,
                 tp_rank: int = 0, cu_padded: Sequence[int] | None = None,
                 split: Literal['zigzag', 'contiguous'] = 'zigzag'):
        self._raw = s.Partition(c.sizeof(s.Partition), cp, cp_rank, tp, tp_rank, positions,
                                contiguous=bool(choice('split', split, CUTS)))
        if cu_padded is not None:
            self._cu = (s.i64 * len(cu_padded))(*(int(n) for n in cu_padded))
            self._raw.segments = len(cu_padded) - 1
            self._raw.cu_padded = c.addressof(self._cu)
        call('colo_partition_check', self._raw)

    def __reduce__(self) -> Any:
        raw = self._raw
        cu = list(self._cu) if raw.cu_padded else None
        return functools.partial(Partition, cp=raw.cp, cp_rank=raw.cp_rank, tp=raw.tp, tp_rank=raw.tp_rank,
                                 cu_padded=cu, split='contiguous' if raw.contiguous else 'zigzag'), (raw.positions,)

    def __len__(self) -> int:
        """Local positions."""
        return lib().colo_partition_count(self._raw)

    def index(self) -> list[int]:
        """Global position of each local one."""
        fn = lib().colo_partition_index
        return [fn(self._raw, i) for i in range(len(self))]

    @property
    def positions(self) -> int:
        """Global positions."""
        return self._raw.positions

    def shard(self, whole: Any, dim: int, local: Any, stream: int | None = None) -> None:
        """local = whole[index] along a dim. Both in host memory, or on the current GPU.

        Args:
            whole: [.., positions, ..], any dtype.
            dim: of the positions.
            local: [.., local positions, ..] of the dtype of whole; written.
            stream: None is torch's current one for its tensors, else the default stream.

        Raises:
            ValueError: a shape, dtype or device that does not fit.
        """
        call('colo_partition_shard', self._raw, view(whole, 'whole'), dim,
             view(local, 'local', writes=True), _stream(local, stream))

    def unshard(self, local: Any, dim: int, whole: Any, stream: int | None = None) -> None:
        """The adjoint: whole = 0, but whole[index] = local.

        Args:
            local: as shard()'s.
            dim: of the positions.
            whole: as shard()'s; written.
            stream: as shard()'s.

        Raises:
            ValueError: as shard().
        """
        call('colo_partition_unshard', self._raw, view(local, 'local'), dim,
             view(whole, 'whole', writes=True), _stream(whole, stream))

    def next_token(self, tokens: Any, targets: Any, last: int = -100, stream: int | None = None) -> None:
        """targets[i] = tokens[i + 1] on the global sequence, per segment when packed.

        Args:
            tokens: [.., positions], i64.
            targets: as tokens, and may be the same; written.
            last: what the last position of a sequence or segment gets.
            stream: as shard()'s.

        Raises:
            ValueError: as shard().
        """
        call('colo_partition_next_token', self._raw, view(tokens, 'tokens'), last,
             view(targets, 'targets', writes=True), _stream(targets, stream))


def _stream(written: Any, stream: int | None) -> int | None:
    if stream is None and getattr(written, 'is_cuda', False):
        from .torch.tensors import stream_of
        return stream_of(written.device)
    return stream


# Tokens of a rank come in multiples of so many, as megatron-core 0.19 has it for each recipe.
RECIPES = {'delayed': 16, 'tensorwise': 16, 'blockwise': 16, 'mxfp8': 32, 'nvfp4': 128, 'grouped': 256}


def padded(length: int, *, tp: int = 1, cp: int = 1, fp8: bool = False, recipe: str | None = None) -> int:
    """The smallest length, at least the given one, that every split accepts, and of which each cp rank's part is a multiple of what
    the recipe of quantised products wants.

    Args:
        length: in positions.
        tp: ranks of tensor parallelism.
        cp: ranks of context parallelism.
        fp8: as recipe, 16.
        recipe: 16 for "delayed", "tensorwise" and "blockwise" (FP8), 32 for "mxfp8", 128 for "nvfp4", 256 for "grouped" kernels.

    Returns:
        The length, in positions.

    Raises:
        ValueError: a size, or an unknown recipe.

    Example:
        >>> import colobridge
        >>> colobridge.padded(13, tp=2, cp=2)
        16
    """
    out = result(s.i64, 'colo_partition_padded', length, tp, cp, fp8)
    if recipe is None:
        return out.value
    unit = math.lcm(2 * tp * cp if cp > 1 else tp, choice('recipe', recipe, RECIPES) * cp, 16 * cp if fp8 else 1)
    return -(-length // unit) * unit
