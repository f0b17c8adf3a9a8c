# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""verl's log-probabilities and entropies over vocabulary shards."""
from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..torch.calls import eager
from ..torch.types import Group, Reduction
from .megatron import vocab_parallel_cross_entropy
from .shared import equal_shards, from_hidden


@eager
def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0, reduction: Reduction = 'none',
                         dist_process_group: Group | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's log-probabilities and entropy of hidden states.

    The gradient of hidden is this rank's part, which the caller sums over tp, as in the original.

    Args:
        hidden: [..., H], of a floating-point dtype; it is cast to weight's.
        weight: [Vl, H], this rank's rows; f64, f32, bf16 or f16. A DTensor, which says which rows it has, or a parameter of
            DeepSpeed's ZeRO-3; shards are equal, in rank order, but for a DTensor.
        labels: [...], global ids of an integer dtype, the same on all ranks of dist_process_group.
        temperature: > 0.
        reduction: of the log-probabilities: "none", "sum" or "mean".
        dist_process_group: the ranks that share the vocabulary; None: no others.

    Returns:
        (logprobs, entropy), both [T] and f32; with reduction "sum" or "mean" the former is []. A label outside of the
        vocabulary has the log-probability 0.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'linear_cross_entropy'
    if reduction not in ('none', 'sum', 'mean'):
        raise ArgumentError("%s: reduction is %r, expected 'none', 'sum' or 'mean'" % (what, reduction))
    logp, entropy = from_hidden(what, hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1),
                                *equal_shards(what, weight, dist_process_group), dist_process_group, None, False, temperature,
                                True)
    return (logp if reduction == 'none' else logp.sum() if reduction == 'sum' else logp.mean()), entropy


@eager
def vocab_parallel_log_probs_from_logits(logits: torch.Tensor, labels: torch.Tensor, tp_group: Group | None = None) -> torch.Tensor:
    """verl's log-probabilities of labels under logits whose columns are shards of the vocabulary.

    Args:
        logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
        labels: [...], global ids of an integer dtype, the same on all ranks of tp_group.
        tp_group: as in vocab_parallel_entropy().

    Returns:
        The log-probabilities [...], f32; of a label that no rank holds as vocab_parallel_cross_entropy() has it.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: tp_group is None, and none was set; another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return -vocab_parallel_cross_entropy(logits, labels, tp_group=tp_group)
