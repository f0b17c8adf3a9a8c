# SPDX-License-Identifier: Apache-2.0
"""Names for what public functions take, which checkers of types read."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..comm import Comm
    from ..grid import Grid
    from ..layout import Layout
    from .support import Support

Group: TypeAlias = 'ProcessGroup | DeviceMesh | Comm'
"""Ranks that make a call together."""
# What src=, dst= and llm= may be.
Side: TypeAlias = 'Layout | Grid | DeviceMesh | str | Mapping[str, int]'
# V, or (the id of this rank's first column, V or None).
Vocab: TypeAlias = 'int | tuple[int, int | None]'
Reduction: TypeAlias = Literal['none', 'mean', 'sum']
Divergence: TypeAlias = Literal['forward_kl', 'reverse_kl', 'jsd', 'tv', 'acceptance']
# What logprob() and linear_logprob() return besides, if they are asked for it.
Output: TypeAlias = Literal['correct', 'argmax', 'lse', 'sum_p2', 'mean_logits']
Mode: TypeAlias = Literal['auto', 'logprob', 'keep']
Device: TypeAlias = 'torch.device | str'
# Integers in host memory.
Integers: TypeAlias = 'Iterable[int] | torch.Tensor'
Numbers: TypeAlias = 'Iterable[float] | torch.Tensor'


class LogprobOptions(TypedDict, total=False):
    """Of logprob() and nll() alike"""
    tp_group: Group | None
    vocab: Vocab | None
    temperature: float | torch.Tensor
    softcap: float | None
    label_smoothing: float
    z_loss: float
    ignore_index: int
    inplace_backward: bool
    support: Support | None
    invariant: bool | int


class NllOptions(LogprobOptions, total=False):
    """Of nll()"""
    mask: torch.Tensor | None
    reduce_group: Group | None
    class_weight: torch.Tensor | None


class DistillOptions(TypedDict, total=False):
    """Of distill(), whatever it returns"""
    target_temperature: float | torch.Tensor
    mask: torch.Tensor | None
    tp_group: Group | None
    vocab: Vocab | None
    temperature: float | torch.Tensor
    softcap: float | None
    inplace_backward: bool


class DivergenceOptions(DistillOptions, total=False):
    """Of distill() with a kind"""
    beta: float
    reduce_group: Group | None


class LinearDistillOptions(TypedDict, total=False):
    """Of linear_distill()"""
    kind: Divergence
    beta: float
    temperature: float
    teacher_temperature: float | None
    mask: torch.Tensor | None
    reduce_group: Group | None
    tp_group: Group | None
    chunk_size: int | None


class TopkDistillOptions(TypedDict, total=False):
    """Of topk_distill()"""
    kind: Literal['forward_kl', 'reverse_kl']
    tail: bool
    mask: torch.Tensor | None
    reduce_group: Group | None
    tp_group: Group | None
    vocab: Vocab | None
    temperature: float | torch.Tensor
    softcap: float | None
    ignore_index: int
    inplace_backward: bool


class LinearOptions(TypedDict, total=False):
    """Of linear_logprob() and linear_nll() alike"""
    tp_group: Group | None
    temperature: float | torch.Tensor
    label_smoothing: float
    z_loss: float
    ignore_index: int
    chunk_size: int | None
    support: Support | None


class LinearLogprobOptions(LinearOptions, total=False):
    """Of linear_logprob()"""
    mode: Mode


class LinearNllOptions(LinearOptions, total=False):
    """Of linear_nll()"""
    mask: torch.Tensor | None
    reduce_group: Group | None
    class_weight: torch.Tensor | None
    upstream: float | torch.Tensor | None


F = TypeVar('F')


def as_typed(of: F) -> Callable[[Any], F]:
    """Gives __call__ of a module the type of its forward, which torch.nn.Module has as Any."""
    return lambda _: of
