# SPDX-License-Identifier: Apache-2.0
"""Other losses over vocabulary-parallel logits: log-probabilities of the k largest or of given ids,
distillation, entropy alone; and weighted sums of per-token values. docs/concepts/loss.md.

Those of logits are calls of logprob.py's autograd function with plans of their own, which are made once for
shapes, strides, dtypes, device and options, and kept with the communicator.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch

from ..errors import ArgumentError
from . import ranks as groups
from .calls import eager, operator
from .functions import Function
from .head import Named, columns_of
from .logprob import LogprobPlan, NAMES, VocabParallel, planned, real_of
from .nll import Loss, _scalar, _weighted, across, reduced, weights_of
from .ready import OfTokens, integer, like, number, scalars
from .tensors import checked, of_integers, refuse_complex, said
from .types import DistillOptions, Divergence, DivergenceOptions, Group, Reduction, TopkDistillOptions, Vocab


# ---- over logits ----

class _Masked(LogprobPlan):
    """Of calls that take a mask, and whose backward has nothing to do if no output has a gradient."""
    __slots__ = ()
    INPUTS = 3
    SECOND = 'targets'  # what comes with the logits, in errors
    NEEDS = "%s: logits are a %s and mask is a %s, expected torch.Tensors, or None as mask"
    IN_PLACE = ("%s: inplace_backward needs logits with contiguous columns, whose rows do not overlap and have no others "
                "between them; found shape %s and strides %s",) * 2

    @classmethod
    def check(cls, what: str, logits: Any, second: Any, mask: Any) -> None:
        shape = list(logits.shape)
        if mask is not None and (mask.shape != logits.shape[:-1] or mask.device != logits.device):
            raise ArgumentError("%s: mask is %s on %s, expected %s on %s" % (
                what, list(mask.shape), mask.device, shape[:-1], logits.device))
        refuse_complex(what, mask)
        if second is not None and (second.shape[:-1] != logits.shape[:-1] or second.dim() != logits.dim()
                                   or second.device != logits.device):
            raise ArgumentError("%s: logits are %s on %s and %s on %s, expected the same shape but for the "
                                "last axis, on one device" % (what, shape, logits.device, list(second.shape),
                                                              second.device))

    def launch(self, now: Any, logits: Any, target: Any, mask: Any, comm: Any, kept: int | None, workspace: int) -> None:
        """mask: or a tuple of it and of temperatures of tokens"""
        if isinstance(mask, tuple):
            mask, *heats = mask
            for (name, view), t in zip(self.heats.items(), heats):
                view.point(now.heats[name], t)
        super().launch(now, logits, target, mask, comm, kept, workspace)

    def backward(self, ctx: Any, upstream: Any) -> Any:
        if all(upstream[i] is None for i, _ in self.grads):
            return None
        return super().backward(ctx, upstream)


class _Topk(_Masked):
    __slots__ = ()
    NAME = 'topk'
    KEEPS, SECOND = False, 'ids'
    MEMBERS = 'k', 'topk', 'ignore_index', 'want_tail', 'temperature', 'softcap', 'scale'

    def outputs(self, names: tuple[str, ...]) -> list[tuple[str, Any]]:
        rows = self.rows.shape if self.plain else (self.rows.count,)
        return [(name, like((*rows, *self.trailing(name)), torch.int64 if name == 'ids' else self.real, self.device))
                for name in names]

    def trailing(self, name: str) -> tuple[int, ...]:
        return () if name == 'tail' else (self.config.k,)

    def gradients(self, now: Any, upstream: Any, stats: int) -> Any:
        if upstream[0] is None:  # the library wants that of logp
            upstream = [torch.zeros(self.outputs(('logp',))[0][1].shape, dtype=self.real, device=self.device), *upstream[1:]]
            held = super().gradients(now, upstream, stats)
            return held, upstream
        return super().gradients(now, upstream, stats)


class _Distill(_Masked):
    __slots__ = ()
    NAME = 'distill'
    MEMBERS = 'targets', 'target_temperature', 'target_scale', 'divergence', 'beta', 'temperature', 'softcap', 'scale'


_TOPK_LOGPROB, _LOGPROB_AT, _DISTILL, _TOPK_DISTILL, _ENTROPY = map(Named, (
    'topk_logprob', 'logprob_at', 'distill', 'topk_distill', 'entropy'))


class TopK(NamedTuple):
    """What topk_logprob() returns.

    Attributes:
        logp: [..., k], differentiable; f32 (f64 of f64 logits).
        ids: [..., k], global, int64; the choice has no gradient.
    """
    logp: torch.Tensor
    ids: torch.Tensor


@eager
def topk_logprob(vocab_parallel_logits: torch.Tensor, k: int, *, mask: torch.Tensor | None = None, tp_group: Group | None = None,
                 vocab: Vocab | None = None, temperature: float = 1.0, softcap: float | None = None,
                 inplace_backward: bool = False) -> TopK:
    """The k largest of logits, over all shards: their log-probabilities and global ids.

    logp_i = (x_i - M) - log Sum over the whole vocabulary: docs/concepts/loss.md. The largest comes first; of equal logits, the
    lowest id. One gather forward, none backward.

    Args:
        vocab_parallel_logits: [..., Vl], as in logprob().
        k: at most 256.
        mask: [...]: where it is 0, ids are -1, logp 0, and the row is not read.
        tp_group: the ranks that share the vocabulary; None: no others.
        vocab: as in logprob().
        temperature: > 0.
        softcap: as in logprob().
        inplace_backward: as in logprob().

    Returns:
        TopK(logp, ids), both [..., k], the same on all ranks.

    Raises:
        ValueError: as logprob().
        MismatchError: as logprob().
        RuntimeError: as logprob().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> ct.topk_logprob(torch.tensor([[0.0, 2.0, 1.0]]), 2).ids
        tensor([[1, 2]])
    """
    return TopK(*VocabParallel.apply(*planned(
        _TOPK_LOGPROB, vocab_parallel_logits, None, ('logp', 'ids'), tp_group, columns_of(_TOPK_LOGPROB, vocab),
        inplace_backward, (integer('topk_logprob: k', k), True, -100, 0, *scalars(_TOPK_LOGPROB, temperature, softcap)[:3]), _Topk.MEMBERS, _Topk, more=mask)))


@eager
def logprob_at(vocab_parallel_logits: torch.Tensor, ids: torch.Tensor, *, mask: torch.Tensor | None = None, tp_group: Group | None = None,
               vocab: Vocab | None = None, temperature: float | torch.Tensor = 1.0, softcap: float | None = None,
               ignore_index: int = -100, inplace_backward: bool = False) -> torch.Tensor:
    """Log-probabilities of given ids: those of a teacher's or a sampler's top k, say.

    Args:
        vocab_parallel_logits: [..., Vl], as in logprob().
        ids: [..., k], global, of an integer dtype, k <= 256, the same on every rank of tp_group. ignore_index gives 0, one outside
            of [0, V) NaN; one that occurs twice in a row counts twice.
        mask: [...]: where it is 0, logp is 0, and the row is not read.
        tp_group: the ranks that share the vocabulary; None: no others.
        vocab: as in logprob().
        temperature: > 0, or [...], one of each token, as in logprob().
        softcap: as in logprob().
        ignore_index: the id that counts for nothing.
        inplace_backward: as in logprob().

    Returns:
        logp [..., k], differentiable; f32 (f64 of f64 logits).

    Raises:
        ValueError: as logprob().
        MismatchError: as logprob().
        RuntimeError: as logprob().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> logp = ct.logprob_at(torch.zeros(1, 4), torch.tensor([[3, 0, -100]]))
        >>> [round(x, 3) for x in logp[0].tolist()]
        [-1.386, -1.386, 0.0]
    """
    if not of_integers(ids) or ids.dim() < 1:
        raise ArgumentError("logprob_at: ids are %s, expected an integer tensor [..., k]" % said(ids, '%(dtype)s'))
    return VocabParallel.apply(*planned(
        _LOGPROB_AT, vocab_parallel_logits, ids.to(torch.int64), ('logp',), tp_group, columns_of(_LOGPROB_AT, vocab),
        inplace_backward, (ids.shape[-1], False, integer('logprob_at: ignore_index', ignore_index), 0,
                           *scalars(_LOGPROB_AT, temperature, softcap, of_tokens=True)[:3]),
        _Topk.MEMBERS, _Topk, more=mask))[0]


class Distilled(NamedTuple):
    """What distill() returns, per token.

    Attributes:
        ce: [...], -sum_j q_j log p_j.
        kl: [...], sum_j q_j (log q_j - log p_j).
    """
    ce: torch.Tensor
    kl: torch.Tensor


DIVERGENCES = 'forward_kl', 'reverse_kl', 'jsd', 'tv', 'acceptance'  # their places are the library's numbers


@overload
def distill(vocab_parallel_logits: torch.Tensor, targets: torch.Tensor, *, soft_labels: bool = False,
            **options: Unpack[DistillOptions]) -> Distilled: ...
@overload
def distill(vocab_parallel_logits: torch.Tensor, targets: torch.Tensor, *, kind: Divergence, reduction: Literal['mean', 'sum'] = 'mean',
            **options: Unpack[DivergenceOptions]) -> Loss: ...
@overload
def distill(vocab_parallel_logits: torch.Tensor, targets: torch.Tensor, *, kind: Divergence, reduction: Literal['none'],
            **options: Unpack[DivergenceOptions]) -> torch.Tensor: ...
@overload
def distill(vocab_parallel_logits: torch.Tensor, targets: torch.Tensor, *, kind: Divergence, reduction: Reduction,
            **options: Unpack[DivergenceOptions]) -> Loss | torch.Tensor: ...


@eager
def distill(vocab_parallel_logits: torch.Tensor, targets: torch.Tensor, *, soft_labels: bool = False,
            target_temperature: float | torch.Tensor = 1.0, mask: torch.Tensor | None = None, tp_group: Group | None = None,
            vocab: Vocab | None = None, temperature: float | torch.Tensor = 1.0, softcap: float | None = None,
            inplace_backward: bool = False, kind: Divergence | None = None, beta: float = 0.5, reduction: Reduction | None = None,
            reduce_group: Group | None = None) -> Any:
    """Divergence of a student's logits from a teacher's: docs/concepts/loss.md.

    With p = softmax(student), q = softmax(teacher), the divergence D of a token is, of kind

    - "forward_kl": sum q log(q/p);
    - "reverse_kl": sum p log(p/q);
    - "jsd": beta sum q log(q/m) + (1 - beta) sum p log(p/m), m = beta q + (1 - beta) p, GKD's generalised Jensen-Shannon
      divergence (Agarwal et al. 2024);
    - "tv": 1/2 sum |p - q|;
    - "acceptance": -log sum min(p, q), of the probability that a speculative draft p is accepted by q (Leviathan et al. 2023).

    Near 0 it keeps its digits. One gather forward ("jsd", "tv", "acceptance": two), none backward. The usual factor
    temperature^2 is the caller's.

    Args:
        vocab_parallel_logits: [..., Vl], the student's, as in logprob().
        targets: [..., Vl], sharded like them: a teacher's logits, q = softmax(targets / target_temperature); f32, or of the
            logits' dtype. They get no gradient.
        soft_labels: targets are probabilities q as they are, not normalised.
        target_temperature: > 0, or [...], one of each token.
        mask: [...]: where it is 0, the token does not count, its D, ce and kl are 0, and its rows are not read. With a kind,
            floats weigh tokens, as in nll().
        tp_group: the ranks that share the vocabulary; None: no others.
        vocab: as in logprob().
        temperature: > 0, or [...], one of each token, as in logprob().
        softcap: as in logprob().
        inplace_backward: as in logprob().
        kind: of D; None: cross entropy and forward KL of each token.
        beta: of "jsd", 0 < beta < 1.
        reduction: of D: "mean" (None), "sum", or "none": of each token.
        reduce_group: as in nll().

    Returns:
        Without a kind Distilled(ce, kl), both [...]. With one Loss(loss, num, den) as nll(), or of reduction "none" D [...].
        Differentiable in the logits; f32 (f64 of f64 logits).

    Raises:
        ValueError: as logprob(); soft labels with a kind; a weight of a token that is NaN, infinite or negative, as in nll().
        MismatchError: as logprob().
        RuntimeError: as logprob().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> logits = torch.randn(2, 8)
        >>> ct.distill(logits, logits).kl.abs().max().item() < 1e-6
        True
        >>> ct.distill(torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]]), kind="tv").item()
        0.5
    """
    if kind is None and (reduction is not None or reduce_group is not None):
        raise ArgumentError("distill: reduction is %r and reduce_group is %s, expected kind=, one of %s, of whose sum or mean they "
                            "are" % (reduction, None if reduce_group is None else 'given', ', '.join(map(repr, DIVERGENCES))))
    if kind is not None and kind not in DIVERGENCES or reduction not in (None, 'none', 'mean', 'sum'):
        raise ArgumentError("distill: kind is %r and reduction is %r, expected one of %s, and 'mean', 'sum' or 'none'" % (
            kind, reduction, ', '.join(map(repr, DIVERGENCES))))
    if kind is not None and soft_labels:
        raise ArgumentError("distill: soft_labels is True and kind is %r, expected logits as targets: give the logarithms of "
                            "the probabilities" % kind)
    if not isinstance(targets, torch.Tensor) or not targets.dtype.is_floating_point or \
            targets.shape[-1:] != getattr(vocab_parallel_logits, 'shape', ())[-1:]:
        raise ArgumentError("distill: targets are %s, expected floats of the logits' shape %s" % (
            said(targets, '%(shape)s of %(dtype)s'), said(vocab_parallel_logits, '%(shape)s')))
    o = planned(_DISTILL, vocab_parallel_logits, targets.detach(), ('ce', 'kl')[kind is not None:], tp_group,
                columns_of(_DISTILL, vocab), inplace_backward,
                (int(bool(soft_labels)), OfTokens(target_temperature) if isinstance(target_temperature, torch.Tensor) and target_temperature.dim()
                 else number('distill: target_temperature', target_temperature), 1.0,
                 DIVERGENCES.index(kind or 'forward_kl'), number('distill: beta', beta),
                 *scalars(_DISTILL, temperature, softcap, of_tokens=True)[:3]), _Distill.MEMBERS, _Distill, more=mask)
    if kind is None:
        return Distilled(*VocabParallel.apply(*o))
    return diverged(_DISTILL, o, mask, reduction or 'mean', reduce_group)


def diverged(what: Named, o: Any, mask: Any, reduction: str, reduce_group: Any) -> Any:
    """The loss of each token that planned() @o makes, reduced. mask: which tokens count, or as how much"""
    return averaged(what, lambda: VocabParallel.apply(*o)[0], o, mask, reduction, reduce_group)


def averaged(what: Named, made: Callable[[], Any], o: Any, mask: Any, reduction: str, reduce_group: Any) -> Any:
    """The loss of each token that @made returns, reduced. Other ranks do not wait for what is refused before."""
    weights = None if mask is None else weights_of(what, mask)
    if reduction == 'none':
        loss = made()
        return loss if weights is None else loss * weights.to(loss.dtype)
    device = o[0].device
    comm = across(reduce_group, device, what)
    groups.require_apart(what, o[2][1], 'reduce_group', comm)
    loss = made()
    count = torch.full((), loss.numel(), dtype=torch.int64, device=device) if mask is None else (mask != 0).sum()
    return reduced(loss, count, None if weights is None else weights.to(loss.dtype), reduction == 'mean', comm)


@overload
def topk_distill(vocab_parallel_logits: torch.Tensor, ids: torch.Tensor, logp: torch.Tensor, *,
                 reduction: Literal['mean', 'sum'] = 'mean', **options: Unpack[TopkDistillOptions]) -> Loss: ...
@overload
def topk_distill(vocab_parallel_logits: torch.Tensor, ids: torch.Tensor, logp: torch.Tensor, *, reduction: Literal['none'],
                 **options: Unpack[TopkDistillOptions]) -> torch.Tensor: ...
@overload
def topk_distill(vocab_parallel_logits: torch.Tensor, ids: torch.Tensor, logp: torch.Tensor, *, reduction: Reduction,
                 **options: Unpack[TopkDistillOptions]) -> Loss | torch.Tensor: ...


@eager
def topk_distill(vocab_parallel_logits: torch.Tensor, ids: torch.Tensor, logp: torch.Tensor, *,
                 kind: Literal['forward_kl', 'reverse_kl'] = 'forward_kl', tail: bool = True, mask: torch.Tensor | None = None,
                 reduction: Reduction = 'mean', reduce_group: Group | None = None, tp_group: Group | None = None,
                 vocab: Vocab | None = None, temperature: float | torch.Tensor = 1.0, softcap: float | None = None, ignore_index: int = -100,
                 inplace_backward: bool = False) -> Any:
    """Divergence from the k most probable tokens of a teacher that was run elsewhere: docs/concepts/loss.md.

    With tail, all other columns together are one outcome more: its probability is the sum of the student's over them, and what
    the teacher's k leave of 1. Without, D is the sum over the k alone, of probabilities as they are, which may be negative.

    Args:
        vocab_parallel_logits: [..., Vl], the student's, as in logprob().
        ids: [..., k], as in logprob_at(); with tail those of a token differ, or its D is NaN.
        logp: [..., k], the teacher's log-probabilities of these ids, floats, the same on all ranks of tp_group. They get no
            gradient. NaN or +inf: D and its gradient are NaN. Where the id is ignore_index, not read.
        kind: "forward_kl", sum q log(q/p), or "reverse_kl", sum p log(p/q). Reverse, where the teacher leaves nothing for the tail:
            infinite.
        tail: is the remainder an outcome?
        mask: as in distill() with a kind.
        reduction: "mean", "sum", or "none": of each token.
        reduce_group: as in nll().
        tp_group: the ranks that share the vocabulary; None: no others.
        vocab: as in logprob().
        temperature: as in logprob().
        softcap: as in logprob().
        ignore_index: the id that counts for nothing.
        inplace_backward: as in logprob().

    Returns:
        Loss(loss, num, den) as nll(), or of reduction "none" D [...]. Differentiable in the logits; f32 (f64 of f64 logits).

    Raises:
        ValueError: as logprob(); shapes of ids and logp; a weight of a token that is NaN, infinite or negative.
        MismatchError: as logprob().
        RuntimeError: as logprob().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> teacher, student = torch.randn(2, 3, 50)
        >>> logp, ids = ct.topk_logprob(teacher, 8)
        >>> ct.topk_distill(teacher, ids, logp).item() < 1e-6 < ct.topk_distill(student, ids, logp).item()
        True
    """
    if kind not in ('forward_kl', 'reverse_kl') or reduction not in ('none', 'mean', 'sum'):
        raise ArgumentError("topk_distill: kind is %r and reduction is %r, expected 'forward_kl' or 'reverse_kl', and 'mean', "
                            "'sum' or 'none'" % (kind, reduction))
    if not of_integers(ids) or ids.dim() < 1 or not isinstance(logp, torch.Tensor) or not logp.is_floating_point() or \
            logp.shape != ids.shape or logp.device != ids.device:
        raise ArgumentError("topk_distill: ids are %s and logp is %s, expected integers [..., k] and floats of their shape" % (
            said(ids), said(logp)))
    ids = ids.to(torch.int64)
    o = planned(_TOPK_DISTILL, vocab_parallel_logits, ids, ('logp', 'tail')[:1 + bool(tail)], tp_group,
                columns_of(_TOPK_DISTILL, vocab), inplace_backward,
                (ids.shape[-1], False, integer('topk_distill: ignore_index', ignore_index), int(bool(tail)),
                 *scalars(_TOPK_DISTILL, temperature, softcap, of_tokens=True)[:3]), _Topk.MEMBERS, _Topk, more=mask)
    lq = logp.detach().double().masked_fill(ids == ignore_index, -torch.inf)

    def made() -> Any:
        lp, *rest = VocabParallel.apply(*o)
        real, q = lp.dtype, lq
        lp = lp.double().masked_fill(ids == ignore_index, -torch.inf)
        if tail:
            left, beyond = (-torch.expm1(q.logsumexp(-1, keepdim=True))).clamp(min=0), rest[0].double()[..., None]
            # where the student has no other column, what rounding of the teacher's leaves is nothing: sum q |log q| is at most log k
            left = left.masked_fill((beyond == -torch.inf) & (left <= 4 * torch.finfo(logp.dtype).eps), 0.0).log()
            nothing = (ids == ignore_index).all(-1, keepdim=True)  # the tail is all there is
            lp, q = torch.cat([lp, beyond], -1), torch.cat([q, left.masked_fill(nothing, 0.0)], -1)
        d = _Divergence.apply(lp, q, kind == 'reverse_kl')
        return (d if mask is None else d.masked_fill(mask == 0, 0.0)).to(real)
    return averaged(_TOPK_DISTILL, made, o, mask, reduction, reduce_group)


@Function
def _Divergence(ctx: Any, lp: Any, lq: Any, reverse: bool) -> Any:
    """(log p [.., n], log q [.., n], which KL) -> D [..], 0 log 0 = 0"""
    weight = lp if reverse else lq
    ratio = (weight - (lq if reverse else lp)).masked_fill(weight == -torch.inf, 0.0)
    p = weight.exp()
    d = torch.where(p == 0, torch.zeros_like(p), p * ratio).sum(-1)
    d = d.masked_fill((lp.isnan() | lq.isnan() | (lq == torch.inf)).any(-1), torch.nan)  # also where p or q is 0
    if ctx.needs_input_grad[0]:
        by = torch.where(p == 0, torch.zeros_like(p), p * (ratio + 1)) if reverse else -p
        ctx.save_for_backward(by.masked_fill((d.isnan() | (reverse & (d == torch.inf)))[..., None], torch.nan))
    return d


@_Divergence.backward
def _(ctx: Any, up: Any) -> Any:
    by, = ctx.saved_tensors
    return up[..., None] * by, None, None


@operator(lambda given: [(given['vocab_parallel_logits'].shape[:-1], real_of(given['vocab_parallel_logits'].dtype))])
def entropy(vocab_parallel_logits: torch.Tensor, *, mask: torch.Tensor | None = None, tp_group: Group | None = None,
            vocab: Vocab | None = None, temperature: float | torch.Tensor = 1.0, softcap: float | None = None,
            inplace_backward: bool = False) -> torch.Tensor:
    """Entropy of logits, in nats: logprob(entropy=True)'s, without targets.

    Of packed sequences Sequence.mask() is a mask, and Sequence.gather() takes the result.

    Args:
        vocab_parallel_logits: [..., Vl], as in logprob().
        mask: [...]: where it is 0, the entropy is 0, and the row is not read.
        tp_group: the ranks that share the vocabulary; None: no others.
        vocab: as in logprob().
        temperature: as in logprob().
        softcap: as in logprob().
        inplace_backward: as in logprob().

    Returns:
        [...], differentiable; f32 (f64 of f64 logits).

    Raises:
        ValueError: as logprob().
        MismatchError: as logprob().
        RuntimeError: as logprob().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> round(ct.entropy(torch.zeros(4)).item(), 3)
        1.386
    """
    logits = vocab_parallel_logits
    if not isinstance(logits, torch.Tensor) or logits.dim() < 1 or \
            mask is not None and (not isinstance(mask, torch.Tensor) or mask.device != logits.device
                                  or mask.shape != logits.shape[:-1]):
        raise ArgumentError("entropy: logits are %s and mask is %s, expected [..., Vl] and [...] on one device"
                            % (said(logits), said(mask)))
    target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    refuse_complex('entropy', mask)
    if mask is not None:
        target.masked_fill_(mask == 0, -100)
    return VocabParallel.apply(*planned(_ENTROPY, logits, target, NAMES[True, False], tp_group,
                                        columns_of(_ENTROPY, vocab), inplace_backward,
                                        scalars(_ENTROPY, temperature, softcap, of_tokens=True)))[1]


# ---- of per-token values ----

@_scalar
class Weighted(NamedTuple):
    """What weighted_sum() returns, over all ranks. As a Loss is its loss, it is its value.

    Attributes:
        value: num / den, 0 if den is 0.
        num: the sum of weight * value, f64.
        weight: the sum of weights, f64.
        den: how many tokens count, int64.
    """
    value: torch.Tensor
    num: torch.Tensor
    weight: torch.Tensor
    den: torch.Tensor

    def backward(self, gradient: torch.Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False) -> None:
        """value.backward().

        Args:
            gradient: as torch.Tensor.backward() has it.
            retain_graph: as torch.Tensor.backward() has it.
            create_graph: as torch.Tensor.backward() has it.
        """
        self.value.backward(gradient, retain_graph, create_graph)

    def item(self) -> float:
        """value.item()"""
        return self.value.item()

    def detach(self) -> torch.Tensor:
        """value.detach()"""
        return self.value.detach()

    # For checkers of types; _scalar() writes them.
    def __float__(self) -> float: ...
    def __neg__(self) -> torch.Tensor: ...
    def __add__(self, other: Any) -> torch.Tensor: ...  # type: ignore[override]
    def __radd__(self, other: Any) -> torch.Tensor: ...
    def __sub__(self, other: Any) -> torch.Tensor: ...
    def __rsub__(self, other: Any) -> torch.Tensor: ...
    def __mul__(self, other: Any) -> torch.Tensor: ...  # type: ignore[override]
    def __rmul__(self, other: Any) -> torch.Tensor: ...  # type: ignore[override]
    def __truediv__(self, other: Any) -> torch.Tensor: ...
    def __rtruediv__(self, other: Any) -> torch.Tensor: ...


@Function
def _Sum(ctx: Any, values: Any, comm: Any, weights: Any, mask: Any, grad: bool) -> Any:
    """(values, communicator, weights, mask, is a backward to be prepared) -> the members of Weighted"""
    keeps = grad and ctx.needs_input_grad[0]
    with groups.telling(comm):
        d = torch.empty_like(values) if keeps else None
        tensors = [None if t is None else checked(t.reshape(-1), what) for t, what in (
            (values, 'values'), (weights, 'weights'), (mask, 'mask'), (d, 'd_values'))]
        out = _weighted(comm, values.device, *tensors)
    num, weight, _, value = out.unbind()
    den = out.view(torch.int64)[2]
    out = value.to(values.dtype), num.clone(), weight.clone(), den.clone()
    if keeps:
        ctx.save_for_backward(d, den)
        ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*out[2:])
    return out


@_Sum.adjoint
def _(ctx: Any, value: Any, num: Any, _weight: Any, _den: Any) -> Any:
    d, den = ctx.saved_tensors
    by = 0 if value is None else value.double()
    by = by if num is None else by + num * den
    return None if isinstance(by, int) else d * by.to(d.dtype), None, None, None, None


@eager
def weighted_sum(values: torch.Tensor, weights: torch.Tensor | None = None, mask: torch.Tensor | None = None, *,
                 reduce_group: Group | None = None) -> Weighted:
    """The sum of weights * values, divided once by the number of tokens that count: advantages times log-probabilities, say.

    Sums are f64, in a fixed order: the same bits on every rank. One gather forward, none backward; every rank calls, one without
    tokens, too. Nothing waits for the GPU. Sum gradients over the group, as of nll(). The formula is colo_loss_weighted_sum()'s.

    Args:
        values: [...], floats.
        weights: [...], or None: 1. They get no gradient.
        mask: [...], or None; tokens where it is 0 do not count and are not read.
        reduce_group: the ranks with other tokens (dp x cp, never tp); None: this one alone.

    Returns:
        Weighted(value, num, weight, den); value and num are differentiable in values.

    Raises:
        ValueError: shapes, dtypes, devices.
        RuntimeError: another rank failed.
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> ct.weighted_sum(torch.tensor([1., 2., 3.]), mask=torch.tensor([1, 1, 0])).value
        tensor(1.5000)
    """
    device = getattr(values, 'device', None)
    for name, t in (('values', values), ('weights', weights), ('mask', mask)):
        if not isinstance(t, torch.Tensor) and (t is not None or name == 'values') or t is not None and (
                t.shape != values.shape or t.device != device):
            expected = 'torch.Tensor' if name == 'values' else 'tensor like values, ' + said(values)
            raise ArgumentError("weighted_sum: %s is %s, expected a %s" % (name, said(t), expected))
    if not values.dtype.is_floating_point or weights is not None and weights.is_complex():
        raise ArgumentError("weighted_sum: values are of %s and weights of %s, expected floats and numbers"
                            % (values.dtype, getattr(weights, 'dtype', None)))
    refuse_complex('weighted_sum', mask)
    comm = across(reduce_group, device, 'weighted_sum')
    values = values.to(real_of(values.dtype)).contiguous()
    weights = None if weights is None else weights.detach().to(values.dtype).contiguous()
    mask = None if mask is None else (mask != 0).contiguous().view(torch.uint8)
    return Weighted(*_Sum.apply(values, comm, weights, mask, torch.is_grad_enabled()))
