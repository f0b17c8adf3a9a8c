# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of vocabulary-parallel logits, summed or averaged once over all ranks: docs/concepts/loss.md."""
from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, Unpack, overload

import torch

from .. import _structs as s
from .._lib import check, lib
from ..comm import Comm
from ..errors import ArgumentError
from ..tensor import make, torch_dtype
from . import ranks as groups
from .calls import operator
from .functions import Function
from .grouped import Grouping
from .head import Named, columns_of
from .logprob import LogprobPlan, VocabParallel, _Call, first_of, planned, real_of
from .ready import SLACK, aligned, entry, like, pointed, scalars
from .support import ClassWeight, Support
from .tensors import checked, of_integers, refuse_complex, said, stream_of
from .types import Group, NllOptions, Numbers, Reduction, Vocab


Kind = TypeVar('Kind')


def _scalar(kind: type[Kind]) -> type[Kind]:
    """A tuple whose first member stands for it where PyTorch's own losses, which are tensors, would be: backward(), item(),
    arithmetic, torch's functions. Unpacking, indices and members are those of a tuple. These kinds have no common base
    class: pytrees of older PyTorch, 1.13 among them, take only direct subclasses of tuple for named tuples."""
    of: Any = kind
    made: Callable[[Any], tuple[Any, ...]] = lambda value: value

    def own(value: Any) -> Any:
        if isinstance(value, kind):
            return made(value)[0]
        return type(value)(map(own, value)) if type(value) in (list, tuple) else value

    def member(self: Any, name: str) -> Any:
        if name.startswith('__'):  # what copy, pickle and numpy ask for
            raise AttributeError("%s has no %s" % (of.__name__, name))
        return getattr(self[0], name)

    def function(_cls: Any, fn: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*own(tuple(args)), **{name: own(value) for name, value in (kwargs or {}).items()})

    def operation(name: str) -> Any:
        def run(self: Any, *args: Any) -> Any:
            return getattr(self[0], name)(*own(args))
        return run
    of.__getattr__, of.__torch_function__ = member, classmethod(function)
    for name in ('add', 'radd', 'sub', 'rsub', 'mul', 'rmul', 'truediv', 'rtruediv', 'floordiv', 'mod', 'pow', 'neg', 'abs',
                 'lt', 'le', 'gt', 'ge', 'int', 'float', 'format'):
        setattr(of, '__%s__' % name, operation('__%s__' % name))
    return kind


@_scalar
class Loss(NamedTuple):
    """What nll() and linear_nll() return of a mean or a sum, over all ranks of reduce_group.

    A tuple; in arithmetic, in torch's functions, and for backward(), item() and what else a tensor has it is its loss. It is no
    instance of torch.Tensor: give GradScaler.scale() and torch.as_tensor() its .loss.

    Attributes:
        loss: num / den of a mean, num of a sum.
        num: the sum over tokens, f64.
        den: the tokens that count, or the sum of their weights, f64.
    """
    loss: torch.Tensor
    num: torch.Tensor
    den: torch.Tensor

    def backward(self, gradient: torch.Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False) -> None:
        """loss.backward().

        Args:
            gradient: as torch.Tensor.backward() has it.
            retain_graph: as torch.Tensor.backward() has it.
            create_graph: as torch.Tensor.backward() has it.
        """
        self.loss.backward(gradient, retain_graph, create_graph)

    def item(self) -> float:
        """loss.item()"""
        return self.loss.item()

    def detach(self) -> torch.Tensor:
        """loss.detach()"""
        return self.loss.detach()

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


@_scalar
class GroupedLoss(NamedTuple):
    """What nll() and linear_nll() return with groups=, over all ranks of reduce_group.

    A tuple; in arithmetic, in torch's functions, and for backward(), item() and what else a tensor has it is its total, as Loss
    is its loss.

    Attributes:
        total: the sum over groups of group_weight times loss, a scalar.
        loss: [G], num / den of a mean, 0 where den is 0; num of a sum.
        num: [G], the sum over a group's tokens, f64.
        den: [G], the tokens of a group that count, or the sum of their weights, f64.
    """
    total: torch.Tensor
    loss: torch.Tensor
    num: torch.Tensor
    den: torch.Tensor

    def backward(self, gradient: torch.Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False) -> None:
        """total.backward().

        Args:
            gradient: as torch.Tensor.backward() has it.
            retain_graph: as torch.Tensor.backward() has it.
            create_graph: as torch.Tensor.backward() has it.
        """
        self.total.backward(gradient, retain_graph, create_graph)

    def item(self) -> float:
        """total.item()"""
        return self.total.item()

    def detach(self) -> torch.Tensor:
        """total.detach()"""
        return self.total.detach()

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


def across(reduce_group: Any, device: Any, what: str) -> Comm:
    """The communicator of a reduce_group, for tensors on @device; None: of none, which somebody else
    refuses."""
    return groups.comm_of(None if device is None else reduce_group, device, what + ': reduce_group')


@functools.lru_cache(maxsize=None)
def mean_workspace(ranks: int) -> int:
    """Bytes of workspace of a mean over so many ranks."""
    return lib().colo_loss_weighted_workspace_size(ranks)


def _weighted(comm: Comm, device: Any, values: s.Tensor | None, weights: s.Tensor | None,
              mask: s.Tensor | None = None, d_values: s.Tensor | None = None) -> Any:
    """Num, weight, den, which is an i64, and value (colo_loss_weighted_t) as one tensor of fp64."""
    at = [None if t is None else c.addressof(t) for t in (values, weights, mask, d_values)]
    parts = mean_workspace(comm.size)
    memory = torch.empty(SLACK + parts // 8 + 4, dtype=torch.float64, device=device)
    address = aligned(memory.data_ptr())
    check(entry('colo_loss_weighted_sum')(*at[:3], comm.handle, address + parts, at[3], address, stream_of(device)))
    return memory.narrow(0, (address + parts - memory.data_ptr()) // 8, 4)


class MeanCall:
    """The C structs of one sum or mean under way."""
    __slots__ = ('losses', 'weights', 'out', 'upstream', 'at_losses', 'at_weights', 'at_out', 'n_valid', 'value', 'num', 'den',
                 'factor', 'd_value', 'd_num', 'at_n_valid', 'at_factor', 'at_d_value', 'at_d_num')

    def __init__(self, mean: 'Mean'):
        def one(dtype: int) -> s.Tensor:
            return make(0, dtype, (1,), (1,), mean.losses.mem, mean.losses.device)

        real, wide = mean.losses.dtype, s.DTYPE['f64']
        self.losses, self.weights = (s.Tensor.from_buffer_copy(mean.losses) for _ in range(2))
        self.n_valid, self.d_value, self.d_num = one(s.DTYPE['i64']), one(real), one(wide)
        self.value, self.num, self.den, self.factor = one(real), one(wide), one(wide), one(wide)
        self.out, self.upstream = s.LossMean(c.sizeof(s.LossMean)), s.LossMeanUpstream(c.sizeof(s.LossMeanUpstream))
        pointed(self.out, {name: getattr(self, name) for name in ('value', 'num', 'den', 'factor')})
        self.at_losses, self.at_weights, self.at_out, self.at_n_valid, self.at_factor = (
            c.addressof(t) for t in (self.losses, self.weights, self.out, self.n_valid, self.factor))
        self.at_d_value, self.at_d_num = c.pointer(self.d_value), c.pointer(self.d_num)


class Mean:
    """Sums and means of @count losses of dtype @real on a device, and their gradients. Addresses: n_valid
    of the losses, factor where what backward needs is left."""
    __slots__ = ('losses', 'value', 'wide', 'factor', 'bytes', 'device', 'cuda', 'run_forward', 'run_weighted', 'run_backward')

    def __init__(self, count: int, real: Any, device: Any):
        number, self.cuda = torch_dtype(real), device.type == 'cuda'
        self.losses = make(0, number, (count,), (1,), *(
            (s.MEM_CUDA, device.index) if self.cuda else (s.MEM_HOST, -1)))
        self.bytes = (count * s.DTYPE_SIZE[number] + 7) // 8 * 8
        self.value, self.wide = (like((), dtype, device) for dtype in (real, torch.float64))
        self.factor = like((1,), torch.float64, device)
        self.device = device
        self.run_forward, self.run_weighted, self.run_backward = map(entry, (
            'colo_loss_mean_forward', 'colo_loss_mean_weighted', 'colo_loss_mean_backward'))

    def forward(self, now: MeanCall, losses: int, valid: int, factor: int, workspace: int, mean: bool,
                comm: Comm, weighs: bool = False) -> tuple[Any, Any, Any]:
        """(value, num, den), over the ranks in rank order. valid: how many count, or if @weighs, as much as what [T] each
        counts in den"""
        try:
            run, of, at = (self.run_weighted, now.weights, now.at_weights) if weighs else \
                (self.run_forward, now.n_valid, now.at_n_valid)
            new = torch.empty_like
            value, num, den = new(self.value), new(self.wide), new(self.wide)
            now.losses.data, of.data, now.factor.data = losses, valid, factor
            now.value.data, now.num.data, now.den.data = value.data_ptr(), num.data_ptr(), den.data_ptr()
            check(run(now.at_losses, at, mean, comm.handle, now.at_out, workspace,
                      stream_of(self.device) if self.cuda else None))
        except BaseException as why:
            groups.heard(comm, why)
            raise
        return value, num, den

    def weighted(self, losses: int, weights: Any, mean: bool, comm: Comm) -> tuple[Any, Any, Any, Any]:
        """(value, num, den, d value / d num, fp64) of losses that count as much as @weights [T], which are
        of their dtype"""
        with groups.telling(comm):
            values, weigh = (s.Tensor.from_buffer_copy(self.losses) for _ in range(2))
            values.data, weigh.data = losses, weights.data_ptr()
            num, den, _, _ = _weighted(comm, self.device, values, weigh).unbind()
            factor = torch.where(den > 0, den.reciprocal(), 1.0) if mean else torch.ones_like(den)
            return (num * factor).to(self.value.dtype), num.clone(), den.clone(), factor

    def backward(self, now: MeanCall, factor: int, d_value: Any, d_num: Any, d_losses: int) -> None:
        """The gradient of each loss: one number for all. It is that of the whole as it is, for each
        rank's part appears once in it."""
        now.losses.data, up = d_losses, now.upstream
        up.d_value = up.d_num = None
        if d_value is not None:
            now.d_value.data, up.d_value = d_value.data_ptr(), now.at_d_value
        if d_num is not None:
            now.d_num.data, up.d_num = d_num.data_ptr(), now.at_d_num
        now.factor.data = factor
        check(self.run_backward(now.at_factor, c.addressof(up), now.at_losses, stream_of(self.device) if self.cuda else None))


class NllPlan(LogprobPlan):
    """Of calls whose "loss" and "n_valid" the caller sees as one number only."""
    __slots__ = ('mean',)
    EXTRA = 1

    def __init__(self, *of: Any):
        super().__init__(*of)
        self.counts.clear()  # n_valid is no output here
        self.mean = Mean(self.rows.count, self.real, self.device)

    def forward(self, logits: Any, target: Any, comm: Comm, keeps: bool, more: Any) -> tuple[Any, Any]:
        """((value, num), what backward needs: None unless @keeps). more: mean or sum, reduce group, a list, into which
        den is put, which has no gradient: an output costs more."""
        mean, group, side = more
        now = self.call()
        now.mean = now.mean or MeanCall(self.mean)
        # Workspace: parts of the mean, the loss's own, the mean's factor, n_valid, losses. What is kept: the
        # loss's own, and the factor.
        try:
            parts = mean_workspace(group.size)
            stats, address, apart, workspace = self.memory(now, keeps, parts + 16 + self.mean.bytes + self.workspace)
            n_valid, out = workspace + parts + self.workspace + 8, now.outputs
            if now.of != n_valid:
                now.of = out['n_valid'].data = n_valid
                out['loss'].data = n_valid + 8
            self.launch(now, logits, target, None, comm, address if keeps else None, workspace + parts)
        except BaseException as why:
            groups.heard(comm, why)
            raise
        factor = address + 8 * self.saved if keeps else n_valid - 8
        value, num, den = self.mean.forward(now.mean, n_valid + 8, n_valid, factor, workspace, mean, group)
        self.calls.append(now)
        del apart
        side.append(den)
        return (value, num), stats

    def gradients(self, now: _Call, upstream: Any, stats: int) -> Any:
        if now.mean is None:
            now.mean = MeanCall(self.mean)
        held, workspace = now.on_host.reserve(self.mean.bytes, self.device, self.cuda)
        self.mean.backward(now.mean, stats + 8 * self.saved, *upstream, workspace)
        view, now.upstream.d_loss = now.upstreams['d_loss']
        view.data = workspace
        return held


_mean = functools.lru_cache(maxsize=256)(Mean)


@Function
def Reduced(ctx: Any, loss: Any, valid: Any, weights: Any, mean: bool, comm: Comm, side: list[Any]) -> Any:
    """(loss of each token, number of valid ones or a float for each, what it counts in den, weight of each or None, mean or
    sum, reduce group, a list) -> value, num"""
    made = _mean(loss.numel(), loss.dtype, loss.device)
    ctx.made, ctx.shape = made, loss.shape
    ctx.set_materialize_grads(False)
    rows = loss.contiguous()
    if weights is None:
        memory = torch.empty(1 + SLACK + mean_workspace(comm.size) // 8, dtype=torch.float64, device=loss.device)
        address, valid = memory.data_ptr(), valid.contiguous()
        value, num, den = made.forward(MeanCall(made), rows.data_ptr(), valid.data_ptr(), address,
                                       aligned(address + 8), mean, comm, valid.is_floating_point())
        ctx.save_for_backward(memory, None)
    else:
        weights = weights.contiguous()
        value, num, den, factor = made.weighted(rows.data_ptr(), weights, mean, comm)
        ctx.save_for_backward(factor, weights)
    side.append(den)
    return value, num


@Reduced.adjoint
def _(ctx: Any, d_value: Any, d_num: Any) -> Any:
    made, (factor, weights) = ctx.made, ctx.saved_tensors  # held: a hook may have made them for this call alone
    if weights is None:
        d = torch.empty(ctx.shape, dtype=made.value.dtype, device=made.device)
        made.backward(MeanCall(made), factor.data_ptr(), d_value, d_num, d.data_ptr())
    else:
        by = 0 if d_value is None else d_value * factor
        d = weights * (by if d_num is None else by + d_num).to(weights.dtype)
    return d, None, None, None, None, None


def reduced(loss: Any, valid: Any, weights: Any, mean: bool, comm: Comm) -> Loss:
    """Mean or sum of a per-token loss, over the group once; valid: how many tokens count here, or the class weight of
    each; weights: of each token, instead, or in addition to its class's."""
    side: list[Any] = []
    if weights is not None and valid.is_floating_point():
        loss, valid, weights = loss * weights, valid * weights, None
    value, num = Reduced.apply(loss, valid, weights, mean, comm, side)
    return Loss(value, num, side[0])


def loss_of(given: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Shapes and dtypes of nll() and linear_nll()."""
    real = real_of(first_of(given).dtype)
    if given.get('reduction') == 'none':
        return [(given['target'].shape, real)]
    if given.get('groups') is not None:
        each = len(given['group_weight']),
        return [((), real), (each, real), (each, torch.float64), (each, torch.float64)]
    return [((), real), ((), torch.float64), ((), torch.float64)]


def made_of(*outputs: Any) -> Loss | GroupedLoss:
    """What nll() and linear_nll() return of them."""
    return Loss(*outputs) if len(outputs) == 3 else GroupedLoss(*outputs)


NLL = Named('nll')


@overload
def nll(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, groups: torch.Tensor, group_weight: Numbers,
        reduction: Literal['mean', 'sum'] = 'mean', **options: Unpack[NllOptions]) -> GroupedLoss: ...
@overload
def nll(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, reduction: Literal['mean', 'sum'] = 'mean',
        **options: Unpack[NllOptions]) -> Loss: ...
@overload
def nll(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, reduction: Literal['none'],
        **options: Unpack[NllOptions]) -> torch.Tensor: ...
@overload
def nll(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, reduction: Reduction,
        **options: Unpack[NllOptions]) -> Loss | torch.Tensor: ...


@operator(loss_of, made_of, fixed=lambda options: (2 + ('groups' in options),))
def nll(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, reduction: Reduction = 'mean', mask: torch.Tensor | None = None,
        tp_group: Group | None = None, reduce_group: Group | None = None, vocab: Vocab | None = None,
        temperature: float | torch.Tensor = 1.0, softcap: float | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
        ignore_index: int = -100, inplace_backward: bool = False, support: Support | None = None,
        invariant: bool | int = False, class_weight: torch.Tensor | None = None, groups: torch.Tensor | None = None,
        group_weight: Numbers | None = None) -> Any:
    """Cross entropy of targets under logits whose columns are shards of the vocabulary: docs/concepts/loss.md.

    A mean is num / den, 0 when den is 0, and already divided by the tokens of all ranks: sum gradients over reduce_group, do
    not average. Nothing waits for the GPU, but the first call for a vocabulary on several ranks, which looks at what they
    bring.

    Args:
        vocab_parallel_logits: [..., Vl], as logprob() has them.
        target: [...], ids, as logprob() has them.
        reduction: "mean", "sum", or "none": per token, 0 if ignored.
        mask: [...], bools or integers: tokens where it is 0 do not count. Floats weigh tokens: a token's loss is multiplied by
            its weight, and den is the sum of the weights. All ranks of reduce_group give such a one then.
        tp_group: the ranks that share the vocabulary; None: no others.
        reduce_group: the ranks over whose tokens a sum or a mean is made once (dp x cp), of which none but this one is in
            tp_group; None: this rank's.
        vocab: as in logprob().
        temperature: as in logprob().
        softcap: as in logprob().
        label_smoothing: e in [0, 1].
        z_loss: factor of (log Sum)^2, >= 0.
        ignore_index: the target that counts for nothing.
        inplace_backward: as in logprob().
        support: as in logprob().
        invariant: as in logprob().
        class_weight: [V], or [Vl] of this rank's columns: PyTorch's weight=, constants of a floating-point dtype. The loss is
            w_t ((1 - e)(lse - x_t) + z_loss lse^2) + e/V sum_j w_j (lse - x_j), and den the sum of w_t, times the mask's. All
            ranks give one then. A class of weight 0 adds nothing, also where its logit is -inf.
        groups: [...], integers in [0, G): which loss a token belongs to, say the depth of multi-token prediction, or where the
            data is from. The tokens of each are counted before the losses are made, in one reduction of G numbers; an
            integer outside is a ValueError (one wait for the GPU; in a graph that is captured NaN). With class_weight they count
            by the weights of their classes, which tp_group adds up before, one number per token.
        group_weight: [G] constants, G <= 64, on all ranks the same: the weight of each group's loss in the total.

    Returns:
        GroupedLoss(total, loss, num, den) with groups: total is the sum of group_weight times loss; of each group [G] the loss,
        num and den, all differentiable.
        Loss(loss, num, den) of "mean" and "sum": num is the sum over tokens, den how many they are, both f64. Of "none" the loss
        [...] of each token. f32 (f64 of f64 logits).

    Raises:
        ValueError: as logprob(); a weight of a token that is NaN, infinite or negative (one wait for the GPU; none while a graph
            is captured, where NaN makes the loss NaN).
        MismatchError: as logprob().
        RuntimeError: as logprob().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> logits = torch.zeros(2, 4, requires_grad=True)
        >>> loss, num, den = ct.nll(logits, torch.tensor([1, -100]))
        >>> round(loss.item(), 3), den.item()
        (1.386, 1.0)
        >>> loss.backward()
    """
    return of_logits(NLL, vocab_parallel_logits, target, reduction, mask, tp_group, reduce_group, vocab, inplace_backward, scalars(
        NLL, temperature, softcap, 1.0, label_smoothing, z_loss, ignore_index, 0, invariant, True), support, class_weight,
        None if groups is group_weight is None else (groups, group_weight))


def of_logits(what: Named, logits: Any, target: Any, reduction: str, mask: Any, tp_group: Any, reduce_group: Any, vocab: Any,
              inplace_backward: bool, numbers: tuple[Any, ...], support: Support | None, class_weight: Any, grouped: Any = None) -> Any:
    """nll() as the function @what. numbers: scalars()'s; grouped: (groups, group_weight) or None"""
    if reduction not in ('none', 'mean', 'sum'):
        raise ArgumentError("%s: reduction is %r, expected 'mean', 'sum' or 'none'" % (what, reduction))
    target, weights = masked(what, mask, target, numbers[5])
    grouping = None if grouped is None else Grouping(what, *grouped, target, numbers[5], reduction)
    class_weight, columns = ClassWeight.of(what, class_weight), columns_of(what, vocab)
    if reduction == 'none':
        loss = VocabParallel.apply(*planned(what, logits, target, ('loss',), tp_group, columns,
                                            inplace_backward, numbers, support=support, class_weight=class_weight,
                                            beside=(weights,)))[0]
        return loss if weights is None else loss * weights.to(loss.dtype)
    comm = across(reduce_group, getattr(logits, 'device', None), what)
    mean, side = reduction == 'mean', []
    if grouping is not None:
        o = planned(what, logits, target, ('loss',), tp_group, columns, inplace_backward, numbers, support=support,
                    class_weight=class_weight, beside=(weights, grouping))
        groups.require_apart(what, o[2][1], 'reduce_group', comm)
        plan = o[2][0]
        grouping.counts(counted(weights, target, plan.config, plan.real), weights_of_targets(plan, o[2][1], target, class_weight), mean, comm)
        return GroupedLoss(*grouping.losses(VocabParallel.apply(*o)[0]))
    at_once = weights is None and class_weight is None
    kind, more = (NllPlan, (mean, comm, side)) if at_once else (LogprobPlan, None)
    o = planned(what, logits, target, ('loss', 'n_valid' if class_weight is None else 'weight'), tp_group,
                columns, inplace_backward, numbers, kind=kind, support=support, more=more, class_weight=class_weight,
                beside=(weights,))
    groups.require_apart(what, o[2][1], 'reduce_group', comm)
    if at_once:
        return Loss(*VocabParallel.apply(*o), side[0])
    if weights is not None:
        weights = counted(weights, target, o[2][0].config, o[2][0].real)  # before any rank waits for this one
    return reduced(*VocabParallel.apply(*o), weights, mean, comm)


def masked(what: str, mask: Any, target: Any, ignore_index: int) -> tuple[Any, Any]:
    """The target where the mask is not 0, and ignored elsewhere; and the mask, if it weighs tokens, else
    None. ValueError: a mask that is no tensor, not of the target's shape, on another device, of complex numbers, or
    has a weight that is none."""
    if mask is None or not of_integers(target):
        return target, None  # such a target is refused by the function that reads it
    if not isinstance(mask, torch.Tensor) or mask.shape != target.shape or mask.device != target.device:
        raise ArgumentError("%s: mask is %s, expected %s, as the target is" % (what, said(mask), said(target)))
    refuse_complex(what, mask)
    weights = weights_of(what, mask)
    return target.to(torch.int64).masked_fill(mask == 0, ignore_index), weights


def weights_of(what: str, mask: Any) -> Any:
    """The mask, if it weighs tokens, else None. ValueError: a weight that is none."""
    weights = mask.detach() if mask.dtype.is_floating_point else None
    if weights is not None and not (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        bad = ~((weights >= 0) & (weights < float('inf')))
        if bad.any():
            index = bad.nonzero()[0].tolist()
            raise ArgumentError("%s: mask: found %s at %s, expected weights that are finite and not "
                                "negative; pass a mask of bools to count tokens"
                                % (what, float(weights[tuple(index)]), index))
    return weights


def weights_of_targets(plan: Any, comm: Comm, target: Any, class_weight: ClassWeight | None) -> Any:
    """The class weight of each target, 0 of one that is no class, or None without class weights. Over @comm one reduction,
    in which each has one addend."""
    if class_weight is None:
        return None
    here = plan.targets.classes.of(class_weight.given)
    at = target.to(torch.int64) - plan.config.logits.vocab_start
    own = (at >= 0) & (at < len(here))
    made = torch.where(own, torch.nn.functional.pad(here, (0, 1))[torch.where(own, at, len(here))], 0.0)
    if comm.size > 1:
        made = made.contiguous()
        with groups.telling(comm):
            comm.all_reduce(checked(made, 'class weights of targets'), stream=stream_of(made.device))
    return made


def counted(weights: Any, target: Any, config: s.LogprobConfig, real: Any) -> Any:
    """The weights of tokens that have a legal target, 0 of others; of the dtype of the losses. weights: None: 1"""
    weights = torch.ones_like(target, dtype=real) if weights is None else weights
    vocab, ignored = config.logits.vocab, config.ignore_index
    illegal = target != target.clamp(0, vocab - 1)  # in two operations, each of which costs as much as a small loss
    if 0 <= ignored < vocab:
        illegal |= target == ignored
    return weights.to(real).masked_fill(illegal, 0)
