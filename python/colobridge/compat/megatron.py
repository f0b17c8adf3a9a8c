# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Megatron-LM's cross entropy over vocabulary shards."""
from __future__ import annotations

from typing import Any

import torch

from ..torch.calls import eager
from ..torch.logprob import outputs
from ..torch.types import Group
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
