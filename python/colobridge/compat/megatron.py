# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Megatron-LM's cross entropy over vocabulary shards."""
from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..torch.calls import eager
from ..torch.head import Head, Named, read
from ..torch.linear import of_hidden
from ..torch.logprob import outputs
from ..torch.ready import scalars
from ..torch.types import Group, Reduction
from .shared import NONE_IGNORED, f32, tp_of


@eager
def vocab_parallel_cross_entropy(vocab_parallel_logits: torch.Tensor, target: torch.Tensor,
                                 label_smoothing: float = 0.0, tp_group: Group | None = None, *,
                                 local_smoothing: bool = False) -> torch.Tensor:
    """Megatron's cross entropy of targets under logits whose columns are shards of the vocabulary.

    Smoothing is e V / (V - 1) with the global V.

    Args:
        vocab_parallel_logits: [s, b, Vl], this rank's columns; f64, f32, bf16 or f16.
        target: [s, b], global ids of an integer dtype, the same on all ranks of tp_group.
        label_smoothing: e in [0, 1].
        tp_group: as in vocab_parallel_entropy().
        local_smoothing: as in the original, each rank smooths over its own n columns: e n / (n - 1), and the mean of their
            log-probabilities. The ranks' losses differ then.

    Returns:
        The loss [s, b], f32. A target that no rank holds has no term of its own: its loss is log Sum (smoothed as the others),
        its gradient p.

    Raises:
        ValueError: local_smoothing with n < 2; shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: tp_group is None, and none was set; another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return cross_entropy_of(vocab_parallel_logits, target, tp_of(tp_group, 'vocab_parallel_cross_entropy'),
                            label_smoothing, local_smoothing)


@eager
def cross_entropy_of(logits: Any, target: Any, group: Any, smoothing: float, local_smoothing: bool) -> Any:
    return f32(outputs('vocab_parallel_cross_entropy', logits, target, ('loss',), tp_group=group,
                       label_smoothing=float(smoothing), megatron_smoothing=True, local_smoothing=bool(local_smoothing),
                       lenient_targets=True, ignore_index=NONE_IGNORED)[0])


@eager
def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: Group | None) -> torch.Tensor:
    """Megatron's fused cross entropy of targets under logits whose columns are shards of the vocabulary.

    Args:
        vocab_parallel_logits: [s, b, Vl], this rank's columns, as many on each rank, in rank order; f64, f32, bf16 or f16. They are not
            written.
        target: [s, b], global ids of an integer dtype, the same on all ranks of tp_group.
        tp_group: the ranks that share the vocabulary; None: no others.

    Returns:
        The loss [s, b], f32; of a target that no rank holds as vocab_parallel_cross_entropy() has it.

    Raises:
        ValueError: shapes, dtypes, devices.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return cross_entropy_of(vocab_parallel_logits, target, tp_group, 0.0, False)


_LINEAR = Named('linear_cross_entropy', target='labels')


@eager
def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tp_group: Group | None = None,
                         reduction: Reduction = 'mean', ignore_index: int = -100, sequence_parallel: bool = False) -> torch.Tensor:
    """Megatron's (dev) cross entropy of labels under the logits hidden x weight^T, which never exist as a whole.

    A mean or a sum makes its gradients in forward, so that backward can run only once.

    Args:
        hidden: [s, b, H] or [T, H]; with sequence_parallel this rank's part [s / tp, b, H] of the first axis. The gradient is summed
            over tp, and with sequence_parallel scattered.
        weight: [Vl, H], this rank's rows, as many on each rank, in rank order; of hidden's dtype. A DTensor, or a parameter of
            DeepSpeed's ZeRO-3.
        labels: [s, b] or [T], global ids of an integer dtype, the same on all ranks of tp_group.
        tp_group: the ranks that share the vocabulary; None: no others.
        reduction: "mean" (0 without a token that counts), "sum" or "none".
        ignore_index: the label that counts for nothing.
        sequence_parallel: hidden is cut over tp_group.

    Returns:
        A scalar, or of "none" the loss of each label; f32 (f64 of f64 hidden). A label outside of the vocabulary makes it NaN.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, a group was destroyed, or a second backward of a mean or a sum.
        TimeoutError: a rank did not come.
    """
    if reduction not in ('none', 'sum', 'mean'):
        raise ArgumentError("%s: reduction is %r, expected 'mean', 'sum' or 'none'" % (_LINEAR, reduction))
    head = Head(weight, d_hidden='reduce_scatter' if sequence_parallel else 'all_reduce')
    loss = of_hidden(_LINEAR, hidden, read(_LINEAR, head, tp_group), labels, reduction, None, None,
                     scalars(_LINEAR, 1.0, None, 1.0, 0.0, 0.0, ignore_index), 'auto' if reduction == 'none' else 'loss', None, None, None)
    return loss if reduction == 'none' else loss[0]
