# SPDX-License-Identifier: Apache-2.0
"""cross_entropy() and linear_cross_entropy() as modules, whose options are said once."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..comm import Comm
from .cross_entropy import cross_entropy, linear_cross_entropy
from .head import Head
from .types import as_typed


class _Options(dict[str, Any]):
    """What a module gives its function. Groups are of this process: a copy has the same ones."""

    def __deepcopy__(self, _memo: Any) -> Any:
        return _Options(self)

    def __reduce__(self) -> Any:
        for name, value in self.items():
            if isinstance(value, (Comm, torch.distributed.ProcessGroup)):
                raise TypeError("loss: found one with %s=%s to pickle, expected no group; save the state_dict() of the model, and "
                                "make the module anew where it is loaded" % (name, value))
        return _Options, (dict(self),)


class _Loss(torch.nn.Module):
    weight: torch.Tensor | None
    _function: Callable[..., Any]

    def __init__(self, weight: torch.Tensor | None = None, **options: Any):
        super().__init__()
        names = [name for name, of in inspect.signature(self._function).parameters.items()
                 if of.kind is of.KEYWORD_ONLY and name not in ('weight', 'linear_bias')]
        for name in options:
            if name not in names:
                raise TypeError("%s() got an unexpected option %r, expected one of %s" % (
                    type(self).__name__, name, ', '.join(names)))
        self.register_buffer('weight', weight)
        self.options = _Options(options)

    def extra_repr(self) -> str:
        return ', '.join('%s=%r' % option for option in self.options.items())


class CrossEntropyLoss(_Loss):
    """torch.nn.CrossEntropyLoss of logits whose columns may be shards. A copy has the same groups; one with a group that is pickled
    is a TypeError.

    Args:
        weight: [V] or [Vl], of each class; a buffer.
        **options: cross_entropy()'s.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> loss = ct.CrossEntropyLoss(label_smoothing=0.1)
        >>> round(loss(torch.zeros(2, 4), torch.tensor([1, 2])).item(), 3)
        1.386
    """
    _function = staticmethod(cross_entropy)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """cross_entropy() of the module's weight and options.

        Args:
            input: [T, Vl], as cross_entropy() has it.
            target: [T], as cross_entropy() has it.

        Returns:
            cross_entropy()'s loss.
        """
        return cross_entropy(input, target, self.weight, **self.options)

    if TYPE_CHECKING:
        @as_typed(forward)
        def __call__(self) -> Any: ...


class LinearCrossEntropyLoss(_Loss):
    """linear_cross_entropy() as a module. It has no parameters: the head stays the model's, and comes with each call.

    Args:
        weight: [V] or [Vl], of each class; a buffer.
        **options: linear_cross_entropy()'s.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> loss, head = ct.LinearCrossEntropyLoss(reduction='sum'), torch.nn.Linear(8, 4, bias=False)
        >>> loss(torch.zeros(2, 8), head.weight, torch.tensor([1, 2])).shape
        torch.Size([])
    """
    _function = staticmethod(linear_cross_entropy)

    def forward(self, input: torch.Tensor, linear_weight: torch.Tensor | Head, target: torch.Tensor) -> torch.Tensor:
        """linear_cross_entropy() of the module's weight and options.

        Args:
            input: [T, H], as linear_cross_entropy() has it.
            linear_weight: [Vl, H], or a Head.
            target: [T], as linear_cross_entropy() has it.

        Returns:
            linear_cross_entropy()'s loss.
        """
        return linear_cross_entropy(input, linear_weight, target, weight=self.weight, **self.options)

    if TYPE_CHECKING:
        @as_typed(forward)
        def __call__(self) -> Any: ...
