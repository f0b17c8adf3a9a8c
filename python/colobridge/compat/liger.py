# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Liger Kernel's cross entropies, of logits and from hidden states, with what they return besides; classes may be shards."""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError
from ..torch.calls import eager
from ..torch.head import Head, Named, columns_of, read
from ..torch.linear import Linear, prepare
from ..torch.logprob import VocabParallel, planned
from ..torch.support import ClassWeight
from ..torch.types import Group, Reduction, as_typed

# Options of the C config that calls here give
_MEMBERS = 'softcap', 'label_smoothing', 'ignore_index'


@dataclasses.dataclass
class CrossEntropyOutput:
    """What a loss returns that is asked for more than the loss; what was not asked for is None.

    Args:
        loss: with the z-loss in it.
        z_loss: as the loss is reduced, without a gradient.
        token_accuracy: the share of targets that are the likeliest id; of reduction "none" 1 or 0 of each token.
        predicted_tokens: [T], the likeliest id; -1 of an ignored token.
    """
    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


@dataclasses.dataclass
class _Options:
    what: Named
    class_weight: Any
    ignore_index: int
    z: float
    label_smoothing: float
    reduction: str
    softcap: Any
    extras: tuple[bool, bool, bool]  # z-loss, accuracy, predictions
    by_probability: bool = False

    def names(self) -> tuple[str, ...]:
        """Of outputs that are needed"""
        z, accuracy, predictions = self.extras
        return ('loss', 'n_valid') + ('weight',) * (self.class_weight is not None) + ('lse',) * bool(self.z or z) + \
            ('correct',) * accuracy + ('argmax',) * predictions + ('logp',) * self.by_probability

    def numbers(self) -> tuple[Any, ...]:
        return float(self.softcap or 0.0), float(self.label_smoothing), int(self.ignore_index)

    def reduced(self, made: dict[str, Any]) -> Any:
        """The caller's result, of outputs of each token"""
        loss, valid = made['loss'], made['n_valid'].clamp(min=1)
        z_loss = self.z * made['lse'].square() if 'lse' in made else None
        accuracy = made['correct'].to(torch.float32) if 'correct' in made else None
        if self.by_probability:
            p = made['logp'].detach().exp()
            loss, z_loss = loss * p, None if z_loss is None else z_loss * p
        if self.reduction != 'none':
            mean = self.reduction == 'mean'
            den = made['weight'].sum() if 'weight' in made else valid
            loss, z_loss = loss.sum(), None if z_loss is None else z_loss.sum()
            if mean:
                loss, z_loss = loss / den.masked_fill(den == 0, 1), None if z_loss is None else z_loss / valid
            accuracy = None if accuracy is None else accuracy.sum() / valid
        if self.z and z_loss is not None:
            loss = loss + z_loss
        if not any(self.extras):
            return loss
        return CrossEntropyOutput(loss, z_loss.detach() if self.extras[0] and z_loss is not None else None, accuracy, made.get('argmax'))


@eager
def _of_logits(options: _Options, logits: Any, target: Any, tp_group: Any) -> Any:
    names = options.names()
    made = VocabParallel.apply(*planned(
        options.what, logits, target, names, tp_group, columns_of(options.what, None), False, options.numbers(), _MEMBERS,
        class_weight=ClassWeight.of(options.what, options.class_weight)))
    return options.reduced(dict(zip(names, made)))


@eager
def _of_hidden(options: _Options, hidden: Any, weight: Any, bias: Any, target: Any, tp_group: Any) -> Any:
    names = options.names()
    head = weight if isinstance(weight, Head) else Head(weight, bias)
    made = Linear.apply(*prepare(options.what, hidden, read(options.what, head, tp_group), target, names, 'auto', None, options.numbers(),
                                 _MEMBERS, class_weight=ClassWeight.of(options.what, options.class_weight)))
    return options.reduced(dict(zip(names, made)))


class _Loss(torch.nn.Module):
    def __init__(self, what: Named, class_weight: Any, ignore_index: int, z: float, label_smoothing: float, reduction: str, softcap: Any,
                 extras: tuple[bool, bool, bool], tp_group: Any, by_probability: bool = False):
        super().__init__()
        if reduction not in ('none', 'mean', 'sum') or not 0 <= label_smoothing <= 1 or softcap is not None and not softcap > 0:
            raise ArgumentError("%s: reduction is %r, label_smoothing %r and softcap %r, expected 'mean', 'sum' or 'none', 0 to 1, and a number "
                                "above 0 or None" % (what, reduction, label_smoothing, softcap))
        self.options, self.tp_group = _Options(what, class_weight, ignore_index, float(z), label_smoothing, reduction, softcap, extras,
                                               by_probability), tp_group


class LigerCrossEntropyLoss(_Loss):
    """Cross entropy of logits.

    Args:
        weight: [V], of each class, or None. The z-loss has no weights, as in the original.
        ignore_index: the target that counts for nothing.
        lse_square_scale: factor of the z-loss, lse^2.
        label_smoothing: in [0, 1].
        reduction: "mean", "sum" or "none".
        softcap: > 0, or None: no cap.
        return_z_loss: also return the z-loss.
        return_token_accuracy: also return the accuracy.
        return_predicted_tokens: also return the likeliest ids.
        tp_group: the ranks that share the classes, as many on each, in rank order; None: no others.

    Raises:
        ValueError: an option that is none of these.
    """

    def __init__(self, weight: torch.Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
                 reduction: Reduction = 'mean', softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
                 return_predicted_tokens: bool = False, *, tp_group: Group | None = None):
        super().__init__(Named('LigerCrossEntropyLoss', class_weight='weight'), weight, ignore_index, lse_square_scale, label_smoothing, reduction,
                         softcap, (return_z_loss, return_token_accuracy, return_predicted_tokens), tp_group)

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        """The loss, or with a return_ option a CrossEntropyOutput.

        Args:
            _input: [T, Vl], this rank's columns; f64, f32, bf16 or f16.
            target: [T], ids of an integer dtype.

        Returns:
            A scalar, or of "none" [T], f32; a mean over no token is 0.

        Raises:
            ValueError: shapes, dtypes, devices.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        return _of_logits(self.options, _input, target, self.tp_group)

    if TYPE_CHECKING:
        @as_typed(forward)
        def __call__(self) -> Any: ...


class LigerFusedLinearCrossEntropyLoss(_Loss):
    """Cross entropy from hidden states, whose logits never exist as a whole.

    Args:
        ce_weight: [V], of each class, or None. The z-loss has no weights, as in the original.
        ignore_index: the target that counts for nothing.
        lse_square_scale: factor of the z-loss, lse^2.
        label_smoothing: in [0, 1].
        reduction: "mean", "sum" or "none".
        softcap: > 0, or None: no cap.
        return_z_loss: also return the z-loss.
        accum_dtype: None or torch.float32, in which gradients are summed.
        use_token_scaling: the loss and the z-loss of each token are multiplied by the probability of its target, without a
            gradient; what a mean divides by is not.
        return_token_accuracy: also return the accuracy.
        return_predicted_tokens: also return the likeliest ids.
        tp_group: the ranks that share the classes, as many on each, in rank order; None: no others.

    Raises:
        ValueError: an option that is none of these.
    """

    def __init__(self, ce_weight: torch.Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
                 reduction: Reduction = 'mean', softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
                 use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False, *,
                 tp_group: Group | None = None):
        if accum_dtype not in (None, torch.float32):
            raise ArgumentError("LigerFusedLinearCrossEntropyLoss: accum_dtype is %s, expected None or torch.float32, in which gradients are "
                                "summed" % accum_dtype)
        super().__init__(Named('LigerFusedLinearCrossEntropyLoss', hidden='_input', weight='lin_weight', class_weight='ce_weight'), ce_weight,
                         ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
                         (return_z_loss, return_token_accuracy, return_predicted_tokens), tp_group, bool(use_token_scaling))

    def forward(self, lin_weight: torch.Tensor | Head, _input: torch.Tensor, target: torch.Tensor,
                bias: torch.Tensor | None = None) -> torch.Tensor | CrossEntropyOutput:
        """The loss, or with a return_ option a CrossEntropyOutput.

        Args:
            lin_weight: [Vl, H], this rank's rows; or a Head, which has the bias.
            _input: [T, H], hidden states of the weight's dtype.
            target: [T], ids of an integer dtype.
            bias: [Vl] or None.

        Returns:
            A scalar, or of "none" [T], f32; a mean over no token is 0. Differentiable in _input, weight and bias, any number of times.

        Raises:
            ValueError: shapes, dtypes, devices.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        return _of_hidden(self.options, _input, lin_weight, bias, target, self.tp_group)

    if TYPE_CHECKING:
        @as_typed(forward)
        def __call__(self) -> Any: ...
