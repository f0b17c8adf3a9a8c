# SPDX-License-Identifier: Apache-2.0
"""cross_entropy() and linear_cross_entropy() of torch.nn.functional, whose classes may be shards of a group of ranks:
their names, order and meanings, and tensors as results. nll() and linear_nll() have more options, and also give
what a mean was made of."""
from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from .calls import operator
from .head import Head, Named, read
from .linear import LINEAR_CROSS_ENTROPY, of_hidden
from .nll import loss_of, of_logits
from .ready import scalars
from .tensors import of_integers, said
from .types import Group, Reduction, Vocab


def _wrong(what: str, input: Any, target: Any, classes: str, other: str) -> str | None:
    """What PyTorch takes and this does not. @classes: the last dim of input; @other: takes more dims"""
    if not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor):
        return "%s: input is %s and target is %s, expected tensors" % (what, said(input), said(target))
    if not 1 <= input.dim() <= 2:
        return "%s: input is %s, expected [T, %s] or [%s]%s" % (
            what, list(input.shape), classes, classes, '' if input.dim() == 0 else
            "; %s takes [..., %s] with a target of [...]" % (other, classes))
    if not of_integers(target):
        return "%s: target is %s of %s, expected class indices %s of an integer dtype; class probabilities are not taken, " \
            "colobridge.torch.distill() has divergences of them" % (
                what, list(target.shape), target.dtype, list(input.shape[:-1]))
    if target.shape != input.shape[:-1]:
        return "%s: target is %s, expected %s, as input is %s" % (
            what, list(target.shape), list(input.shape[:-1]), list(input.shape))
    return None


def _alone(given: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Shape and dtype of the loss"""
    return loss_of(given)[:1]


_WHAT = Named('cross_entropy', class_weight='weight')


@operator(_alone)
def cross_entropy(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, *,
                  ignore_index: int = -100, reduction: Reduction = 'mean',
                  label_smoothing: float = 0.0, tp_group: Group | None = None, reduce_group: Group | None = None,
                  vocab: Vocab | None = None, temperature: float | torch.Tensor = 1.0, softcap: float | None = None,
                  z_loss: float = 0.0, inplace_backward: bool = False) -> torch.Tensor:
    """torch.nn.functional.cross_entropy() of logits whose columns may be shards of the vocabulary.

    Where PyTorch differs: without a token that counts the mean is 0 (PyTorch: NaN), because a rank may well have none. A
    target outside of [0, V) makes the loss NaN (PyTorch: an IndexError, or an assertion on the GPU). [T, V, d1, ...] and class
    probabilities are a ValueError; nll() takes [..., V].

    Args:
        input: [T, Vl], or [Vl] with one target: this rank's columns of the logits; f64, f32, bf16 or f16.
        target: [T] or []: class indices of an integer dtype, on all ranks of tp_group the same.
        weight: [V], or [Vl] of this rank's columns: of each class, nll()'s class_weight.
        ignore_index: the target that counts for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].
        tp_group: the ranks that share the vocabulary; None: no others.
        reduce_group: the ranks that have other tokens (dp x cp), over which a sum or a mean is made once: sum gradients over
            them, do not average.
        vocab: as in logprob().
        temperature: as in logprob().
        softcap: as in logprob().
        z_loss: as in nll().
        inplace_backward: as in logprob().

    Returns:
        A scalar, or of "none" a tensor like target; f32 (f64 of f64 input), also where input has 16 bits, to which PyTorch rounds
        its result.

    Raises:
        ValueError: as nll(), and what only PyTorch takes.
        MismatchError: as nll().
        RuntimeError: as nll().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> x, target = torch.randn(4, 8), torch.tensor([1, 2, 3, -100])
        >>> torch.allclose(ct.cross_entropy(x, target), torch.nn.functional.cross_entropy(x, target))
        True
    """
    why = _wrong(_WHAT, input, target, 'V', 'nll()')
    if why is not None:
        raise ArgumentError(why)
    loss = of_logits(_WHAT, input, target, reduction, None, tp_group, reduce_group, vocab, inplace_backward, scalars(
        _WHAT, temperature, softcap, 1.0, label_smoothing, z_loss, ignore_index, of_tokens=True), None, weight)
    return loss if reduction == 'none' else loss[0]


@operator(_alone)
def linear_cross_entropy(input: torch.Tensor, linear_weight: torch.Tensor | Head, target: torch.Tensor, *,
                         linear_bias: torch.Tensor | None = None, weight: torch.Tensor | None = None,
                         reduction: Reduction = 'mean', ignore_index: int | None = None,
                         label_smoothing: float = 0.0, tp_group: Group | None = None, reduce_group: Group | None = None,
                         z_loss: float = 0.0) -> torch.Tensor:
    """torch.nn.functional.linear_cross_entropy(): cross_entropy() of the logits input x linear_weight^T + linear_bias, which never
    exist as a whole.

    A mean or a sum is linear_nll()'s mode "loss", whose backward can run only once; "none" is its mode "auto". linear_nll() has
    the other modes. Where PyTorch differs: cross_entropy(); a linear_weight [V, d1, ..., H] is a ValueError.

    Args:
        input: [T, H], or [H] with one target: hidden states, on all ranks of tp_group the same.
        linear_weight: [Vl, H], this rank's rows of the head, in rank order, of input's dtype; or a Head.
        target: as in cross_entropy().
        linear_bias: [Vl]; not beside a Head, which has its own.
        weight: of each class, as in cross_entropy().
        reduction: "mean", "sum" or "none".
        ignore_index: the target that counts for nothing; None: -100.
        label_smoothing: in [0, 1].
        tp_group: the ranks that share the vocabulary, if the Head does not say it.
        reduce_group: as in cross_entropy().
        z_loss: as in nll().

    Returns:
        As cross_entropy().

    Raises:
        ValueError: as linear_nll(), and what only PyTorch takes.
        MismatchError: as nll().
        RuntimeError: as linear_nll().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> hidden, head, target = torch.randn(4, 8), torch.nn.Linear(8, 16), torch.tensor([1, 2, 3, -100])
        >>> loss = ct.linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(head(hidden), target))
        True
    """
    what = LINEAR_CROSS_ENTROPY
    why = _wrong(what, input, target, 'H', 'linear_nll()')
    if why is not None:
        raise ArgumentError(why)
    of, head, bias, tp_group = read(what, linear_weight, tp_group)
    if head is linear_weight:
        bias = linear_bias
        if not isinstance(head, torch.Tensor) or head.dim() != 2:
            raise ArgumentError("%s: linear_weight is %s, expected [V, H], or a Head: Head.of(module)" % (what, said(head, '%(shape)s')))
    elif linear_bias is not None:
        raise ArgumentError("%s: linear_weight is a Head and linear_bias is given, expected the Head's bias alone" % what)
    loss = of_hidden(what, input, (of, head, bias, tp_group), target, reduction, None, reduce_group, scalars(
        what, 1.0, of.softcap, of.scale, label_smoothing, z_loss, -100 if ignore_index is None else ignore_index, 0, of.invariant),
        'auto' if reduction == 'none' else 'loss', None, weight, None)
    return loss if reduction == 'none' else loss[0]
