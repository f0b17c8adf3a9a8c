# SPDX-License-Identifier: Apache-2.0
"""Log-probability and loss straight from hidden states, token chunk by token chunk: the product with
the lm_head and the loss of its logits as one autograd function; never all logits. Formulas and modes:
docs/concepts/lm_head.md; a head that is sharded over data parallel ranks: docs/concepts/lm_head.md.

What the library keeps from call to call (streams, events, cuBLASLt handles) belongs to the vocabulary
group's communicator; memory comes from torch at each call, so caching allocator and CUDA graphs see it.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch

from ..comm import Comm
from ..errors import STATUS, ArgumentError, FailedError
from . import alike, placed
from . import ranks as groups
from .autocast import autocast
from .calls import operator
from .functions import Function, anchor, saved_tensors
from .grouped import Grouping
from .head import ORDINARY, Head, Named, columns_of, factors_of, partitioned, read
from .linear_plan import LinearPlan
from .logprob import MEMBERS, names_of, per_token, returned, targets_for, without_gradient
from .nll import GroupedLoss, Loss, across, counted, loss_of, made_of, masked, reduced, weights_of_targets
from .ready import number, scalars, table
from .support import ClassWeight, Support, accompanied, meta, of_tokens
from .tensors import checked
from .types import Group, LinearLogprobOptions, LinearNllOptions, Mode, Numbers, Output, Reduction

_runs = itertools.count()  # of forwards that added to main_grad


# How a loss that makes its gradients in forward is reduced; a plain tuple, because that costs least:
#   den      what the caller divides by; None: the tokens of the group, or the sum of their weights
#   group    over which the loss is reduced
#   mean     is the value num / den?
#   side     gets what has no gradient
#   weights  of tokens, or None
#   entropy  is the sum of entropies wanted, too? Then backward may run twice
#   known    the upstream gradient, a tensor of one element, or None
#   anchor   of hidden, weight and bias, if backward reads none of them
Of = tuple[Any, Comm, bool, list[Any], Any, bool, Any, Any]
# Of one call, for the autograd functions: its plan, vocabulary group, head's group, main_grad of weight and
# bias, and whether a backward is to be prepared (inside of a function autograd does not say).
Call = tuple[LinearPlan, Comm, Comm | None, Any, bool]


def _all_of(target: Any) -> Any:
    """(targets, ids of a support or None, class weights or None)"""
    return target[:3] if isinstance(target, tuple) else (target, None, None)


@functools.lru_cache(maxsize=None)
def _doing(need: tuple[bool, ...], grad: bool) -> dict[str, Any]:
    """What ranks compare after a mismatch, of ctx.needs_input_grad."""
    names = 'hidden', 'weight', 'bias', 'A of the LoRA', 'B of the LoRA'
    return {'requires_grad': ', '.join(n for n, d in zip(names, need) if d and grad) or 'nothing'}


@Function
def Linear(ctx: Any, hidden: Any, weight: Any, bias: Any, a: Any, b: Any, target: Any, o: Call) -> Any:
    """(hidden, weight, bias, A and B of the LoRA, targets, Call) -> the outputs that were asked for."""
    plan, comm, head_comm, main, grad = o
    need = ctx.needs_input_grad[:5]
    d_head, d_lora = need[1] or need[2], need[3] or need[4]
    backward = grad and (need[0] or d_head or d_lora)
    with groups.telling(comm, head_comm, doing=_doing(need, grad)):
        ready = plan.ready(comm, head_comm, backward and not need[0], backward and not d_head,
                           main is not None, frozen_lora=backward and not d_lora)
        out, kept, ctx.kept = ready.forward(comm, hidden, weight, bias, a, b, target, backward)
    if backward:
        ctx.ready, ctx.o = ready, o
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, a, b, *_all_of(target), kept)
    out = plan.gathered(out)
    if plan.counts:
        ctx.mark_non_differentiable(*(out[i] for i in plan.counts))
    return tuple(out)


def _saved(plan: LinearPlan) -> str:
    what = plan.what
    return '%s: %s, %s, %s%s or %s' % (what, what.hidden, what.weight, what.bias, '' if plan.lora is None else ', lora', what.target)


@Linear.backward
def _(ctx: Any, *upstream: Any) -> Any:
    ready, (_, comm, head_comm, main, _) = ctx.ready, ctx.o
    ready.core.alive(ready.plan.what)
    saved = saved_tensors(ctx, _saved(ready.plan))
    need = ctx.needs_input_grad
    with groups.telling(comm, head_comm, doing=_doing(need, True)):
        made = ready.backward(comm, saved, ctx.kept, upstream, main)
    return (*(d if wanted else None for d, wanted in zip(made, need)), None, None)


@Function
def LinearLoss(ctx: Any, hidden: Any, weight: Any, bias: Any, a: Any, b: Any, target: Any, of: Of, o: Call) -> Any:
    """(hidden, weight, bias, A and B of the LoRA, targets, Of, Call) -> value, or (value, sum of entropies). Into side of Of,
    because outputs of functions cost more: num, den, and what else the plan makes beyond the loss, per row; if it makes that
    alone, the losses of the tokens.
    Where the plan is early, the gradients of the logits of the sum of losses are kept, and backward makes
    those of hidden, weight and bias, multiplied by the upstream gradient and by 1 / den where products
    are summed, in fp32: in 16 bits the first overflows, the second underflows. Else gradients of the sum
    are made here, those of weight and bias in fp32, and backward multiplies them. If the upstream gradient is
    known, they are made with it, and backward compares. Gradients of entropies are made in backward, if it asks
    for them."""
    plan, comm, head_comm, main, grad = o
    den, group, mean, side, weights, ctx.entropy, known, anchor = of
    need = ctx.needs_input_grad if grad else (False,) * 5
    d_head = need[1] or need[2]
    early = plan.early and d_head
    with groups.telling(comm, head_comm, doing=_doing(need, grad)):
        ready = plan.ready(comm, head_comm, not need[0], not d_head,
                           (early or known is not None) and main is not None, early, not (need[3] or need[4]))
        if weights is not None:
            weights = plan.rows.spread(weights, 0)
        out, losses, made = ready.loss(comm, hidden, weight, bias, a, b, target, weights, group, known, main, early)
    ctx.of = main, need, early, ready, comm
    if early:
        kept, ctx.kept, shared = made
        ctx.save_for_backward(hidden, weight, bias, a, b, *_all_of(target), kept, shared)
        made = ()
    ctx.made, ctx.known = made, known
    if known is not None:
        ctx.run = torch.tensor(next(_runs), device='cpu')
        ctx.groups = comm, head_comm, group
        ctx.save_for_backward(anchor, ctx.run)
    elif anchor is not None:
        ctx.save_for_backward(anchor)
    if ctx.entropy:  # autograd frees them after a backward that does not retain the graph
        ctx.save_for_backward(*made, hidden, weight, bias, a, b, target)
        ctx.set_materialize_grads(False)
        ctx.made = ()
    value, num, tokens, factor = ready.total(mean and den is None, weights, group, out)
    del losses
    if den is not None:
        factor = 1 / den
        value = (num * factor).to(plan.real)
    ctx.factor = factor if weights is None and den is None else factor.reshape(1)
    side += num, tokens, *(() if plan.weighs else plan.gathered(out) if plan.names == ('loss',) else out[1:])
    if not ctx.entropy:
        return value
    return value, out[plan.names.index('entropy')].sum(dtype=torch.float64).to(plan.real)


@LinearLoss.backward
def _(ctx: Any, g: Any, g_entropy: Any = None) -> Any:
    if ctx.made is None:
        raise FailedError("%s: a second backward, but %s" % (ctx.of[3].plan.what, "a mean or a sum makes its gradients once; "
                          "reduction=\"none\" keeps what a second one needs" if ctx.of[3].plan.what == LINEAR_CROSS_ENTROPY else
                          "mode=\"loss\" makes gradients once; mode=\"logprob\" keeps what a second one needs"))
    made, (main, needs, early, ready, comm) = ctx.made, ctx.of
    plan = ready.plan
    if ctx.known is not None:
        ctx.made = None
        try:
            _compared(ctx, g, [d for d in made if d is not None] or [main[0][:1]])
        except BaseException as why:
            for of in ctx.groups:
                groups.refuse(of, why)
            raise
        return (*(d if need else None for d, need in zip(made, needs)), None, None, None)
    # The factor is not 0-dim: then the dtype of what multiplies would not count.
    by = None if g is None else (ctx.factor * g).to(plan.real)
    if early:
        ready.core.alive(ready.plan.what)
        saved = saved_tensors(ctx, _saved(plan))
        with groups.telling(comm):
            made = ready.backward(comm, saved, ctx.kept, None, main, by)
        if saved[9] is not None:
            ctx.made = None
        return (*(d if need else None for d, need in zip(made, needs)), None, None, None)
    if ctx.entropy:
        *made, hidden, weight, bias, a, b, target = saved_tensors(ctx, _saved(plan))
    else:
        ctx.made = None
        saved_tensors(ctx, plan.what)
    if g_entropy is not None:
        ready.core.alive(ready.plan.what)
        more, by_more = (ready.entropy(comm, hidden, weight, bias, a, b, target),
                         g_entropy.to(plan.real).reshape(1))
        if by is not None:
            more = [None if e is None else d * by + e * by_more for d, e in zip(made, more)]
            by_more = torch.ones_like(by)
        made, by = more, by_more
    if by is None:
        return (None,) * 8
    d_hidden, d_weight, d_bias, *d_lora = made
    if main is not None and d_weight is not None:
        for sums, grad in zip(main, (d_weight, d_bias)):
            if grad is not None:
                sums.addcmul_(grad, by.to(sums.dtype))
        d_weight = d_bias = None
    return (*(None if d is None or not need else torch.mul(d, by, out=(
        d if d.dtype is plan.dtype and not ctx.entropy else torch.empty_like(d, dtype=plan.dtype)))
              for d, need in zip((d_hidden, d_weight, d_bias), needs)),
            *(None if d is None or not need else d * by for d, need in zip(d_lora, needs[3:])), None, None, None)


def _compared(ctx: Any, g: Any, made: list[Any]) -> None:
    """Are gradients that were made with the upstream gradient those of @g, which came? What multiplies the loss
    in fp32 in another order may differ by 8 roundings. On a GPU, which nothing waits for, @made become NaN."""
    if saved_tensors(ctx, 'linear_nll')[1] != ctx.run:
        raise FailedError("linear_nll: upstream: a checkpoint ran forward twice, and main_grad has the gradient "
                          "twice; leave linear_nll() out of the checkpoint, or pass it use_reentrant=True",
                          STATUS['ERR_STATE'])
    same = (g - ctx.known).abs() <= ctx.known.abs() * 2.0 ** -20
    if g.is_cuda:
        for d in made:
            d.mul_(torch.where(same, 1.0, math.nan))
    elif not same:
        raise ArgumentError("linear_nll: upstream: backward found %.9g as the gradient of the loss, expected "
                            "%.9g, with which forward has made gradients; pass the number that multiplies the "
                            "loss" % (float(g), float(ctx.known)))


def prepare(what: Named, hidden: Any, head: tuple[Head, Any, Any, Any], target: Any, names: tuple[str, ...], mode: str,
            begins: str | None, values: tuple[Any, ...], members: tuple[str, ...] = MEMBERS,
            support: Support | None = None, class_weight: ClassWeight | None = None,
            beside: tuple[Any, ...] = ()) -> tuple[Any, Any, Any, Any, Any, Any, Call]:
    """Checked arguments as the autograd functions take them. head: read()'s. begins: do gradients begin in forward: 'loss' in
    either way, 'sums' as sums for later, in fp32, 'known' as they will be, None if not at all. beside: as planned() has it."""
    of, weight, bias, tp_group = head
    if not (isinstance(hidden, torch.Tensor) and isinstance(weight, torch.Tensor) and
            isinstance(target, torch.Tensor) and (bias is None or isinstance(bias, torch.Tensor))):
        for name, t in ((what.hidden, hidden), (what.weight, weight), (what.target, target), (what.bias, bias)):
            if not isinstance(t, torch.Tensor):
                raise ArgumentError("%s: %s is a %s, expected a torch.Tensor%s" % (
                    what, name, type(t).__name__, ', or a Head: Head.of(module)' if t is weight else ''))
    heat, values, members = of_tokens(what, values, members, target.shape, target.device)
    device = hidden.device
    if hidden.layout is not torch.strided or device.type == 'meta':
        checked(hidden, '%s: %s' % (what, what.hidden))
    comm = of_tp = groups.comm_of(tp_group, device, what + ': tp_group')
    head_comm: Comm | None = None
    main = None
    shard_group, rows, columns = of.shard_group, of.rows, columns_of(what, of.vocab)
    if weight.numel() == 0 and hasattr(weight, 'ds_tensor'):
        if bias is not None:
            raise ArgumentError("%s: %s is a parameter of DeepSpeed's ZeRO-3 and %s is %s, expected a head without one: "
                                "bias=False" % (what, what.weight, what.bias, list(bias.shape)))
        weight, shard_group, rows = partitioned(weight, shard_group)
        if of.rows not in (None, rows):
            raise ArgumentError("%s: the Head has rows=%s, and DeepSpeed's ZeRO-3 has %d of its weight; leave it out" % (
                what, of.rows, rows))
    if of.main_grad:
        main = placed.main_grads(what, weight, bias)
    if (type(weight) not in ORDINARY or type(bias) not in ORDINARY) and (placed.is_placed(weight) or placed.is_placed(bias)):
        comm, head_comm, weight, bias, rows, columns = placed.head(
            what, of, columns, hidden, weight, bias, target, comm, dict(zip(members, values)).get('ignore_index', -100), main is not None)
    elif shard_group is not None:
        head_comm = groups.comm_of(shard_group, device, what + ': shard_group')
        if of.grad_reduction is not None:
            weight, bias = placed.averaged(what, weight, bias, weight, of.grad_reduction, head_comm.size, None,
                                           main is not None)
    elif of.grad_reduction is not None or rows is not None:
        raise ArgumentError("%s: the Head has %s, and no ranks share its weight: it is no DTensor, and shard_group is None; "
                            "pass shard_group=, or leave it out" % (
                                what, 'rows=%s' % rows if of.grad_reduction is None else 'grad_reduction=%r' % of.grad_reduction))
    if head_comm is not None:
        groups.require_apart(what, comm, 'shard_group', head_comm)
    a, b, lora = None, None, None
    if of.lora is not None:
        a, b, scale = placed.factors(what, of, hidden, of_tp, comm is not of_tp)
        lora = a.shape, a.dtype, a.device, b.shape, b.dtype, b.device, scale
    product = autocast(device.type)
    if product is not None and hidden.dtype != torch.float64:
        hidden, weight = hidden.to(product), weight.to(product)
        bias = None if bias is None else bias.to(product)
    kept = table(comm, '_linear_plans')
    flat = shard_group is not None and weight.dim() == 1
    linear = mode, of.d_hidden, of.gemm, of.budget, of.max_valid, of.logits_dtype, begins
    key = (what, hidden.shape, None if hidden.is_contiguous() else hidden.stride(), hidden.dtype, device,
           weight.shape, None if weight.is_contiguous() else weight.stride(), weight.dtype,
           weight.device, None if bias is None else (bias.shape, bias.dtype, bias.device),
           target.shape, target.dtype, target.device,
           None if main is None else (_meta(main[0]), _meta(main[1])), names, columns, head_comm,
           rows, flat, linear, values, members, support is None, meta(class_weight), lora)
    plan = kept.found if key == kept.key else kept.get(key)  # mostly as in the call before
    if plan is None:
        plan = kept.add(key, LinearPlan(what, hidden, weight, bias, target, names, comm, tp_group, columns, head_comm, rows,
                                        flat, linear, main, dict(zip(members, values)), support, class_weight, lora))
    if plan.copies_hidden:
        hidden = hidden.contiguous()
    if plan.copies_weight:
        weight = weight.contiguous()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if comm.check_level > 1:
        given = {**alike.of_tokens(target, heat, plan.config.ignore_index, *beside), **({} if a is None else {"the LoRA's A": a})}
        if hidden.shape[:-1].numel() == target.numel():  # else each rank has tokens of its own (reduce_scatter)
            given['hidden states'] = alike.used(hidden, target, plan.config.ignore_index)
        alike.compare(what, comm, tp_group, given)
    if not (target.dtype is torch.int64 and plan.plain and target.is_contiguous()):
        target = targets_for(plan.rows, target, plan.config.ignore_index)
    if support is not None or class_weight is not None or heat is not None:
        target = accompanied(what, target, plan, support, class_weight, heat)
    return hidden, weight, bias, a, b, target, (plan, comm, head_comm, main, torch.is_grad_enabled())


def _meta(t: Any) -> Any:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


LINEAR_LOGPROB, LINEAR_NLL = Named('linear_logprob'), Named('linear_nll')
LINEAR_CROSS_ENTROPY = Named('linear_cross_entropy', hidden='input', weight='linear_weight', bias='linear_bias', class_weight='weight')


@overload
def linear_logprob(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, entropy: Literal[False] = False,
                   loss: Literal[False] = False, **options: Unpack[LinearLogprobOptions]) -> torch.Tensor: ...
@overload
def linear_logprob(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, entropy: Literal[True],
                   loss: Literal[False] = False, **options: Unpack[LinearLogprobOptions]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def linear_logprob(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, entropy: Literal[False] = False,
                   loss: Literal[True], **options: Unpack[LinearLogprobOptions]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def linear_logprob(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, entropy: Literal[True],
                   loss: Literal[True], **options: Unpack[LinearLogprobOptions]
                   ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def linear_logprob(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, entropy: bool = False, loss: bool = False,
                   outputs: Sequence[Output], **options: Unpack[LinearLogprobOptions]) -> tuple[torch.Tensor, ...]: ...
@overload
def linear_logprob(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, entropy: bool = False, loss: bool = False,
                   outputs: Sequence[Output] | None = None, **options: Unpack[LinearLogprobOptions]
                   ) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@operator(per_token, fixed=without_gradient)
def linear_logprob(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, tp_group: Group | None = None, entropy: bool = False, loss: bool = False,
                   outputs: Sequence[Output] | None = None, temperature: float | torch.Tensor = 1.0, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100,
                   mode: Mode = 'auto', chunk_size: int | None = None, support: Support | None = None) -> Any:
    """logprob() of the logits hidden x weight^T (+ a bias), which never exist as a whole.

    Inside of autocast, hidden, weight and bias are cast as torch.nn.functional.linear() would.

    Args:
        hidden: [..., H], on all ranks of tp_group the same.
        weight: [Vl, H], this rank's rows; or a Head, which has the bias and what else belongs to a head: softcap, vocab, shards,
            main_grad.
        target: [...], as in logprob().
        tp_group: the ranks that share the vocabulary in equal shards, if the Head does not say it.
        entropy: as in logprob().
        loss: as in logprob().
        outputs: as in logprob().
        temperature: as in logprob().
        label_smoothing: as in logprob().
        z_loss: as in logprob().
        ignore_index: as in logprob().
        mode: "logprob" makes logits again in backward, "keep" keeps them, "auto" keeps them if they fit into the Head's budget:
            docs/guides/sharded-heads.md#the-head-and-modes.
        chunk_size: tokens a chunk; 0 or None: from the budget.
        support: as in logprob().

    Returns:
        As logprob(), differentiable in hidden, weight and bias.

    Raises:
        ValueError: as logprob().
        MismatchError: as logprob().
        RuntimeError: as logprob().
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> hidden, head = torch.randn(3, 8), torch.nn.Linear(8, 16)
        >>> logp = ct.linear_logprob(hidden, ct.Head.of(head), torch.tensor([1, 2, -100]))
        >>> want = head(hidden).log_softmax(-1)
        >>> torch.allclose(logp, torch.stack([want[0, 1], want[1, 2], torch.zeros(())]), atol=1e-5)
        True
    """
    if not loss and (label_smoothing or z_loss):
        raise ArgumentError("linear_logprob: label_smoothing and z_loss act on the loss, and logp is "
                            "never smoothed; ask for loss=True, or use linear_nll()")
    names = names_of(LINEAR_LOGPROB, entropy, loss, outputs, support)
    head = read(LINEAR_LOGPROB, weight, tp_group)
    of = head[0]
    return returned(Linear.apply(*prepare(
        LINEAR_LOGPROB, hidden, head, target, names, mode, None,
        scalars(LINEAR_LOGPROB, temperature, of.softcap, of.scale, label_smoothing, z_loss, ignore_index, chunk_size, of.invariant, True),
        support=support)), outputs, names)


def _without_gradient(options: dict[str, Any]) -> tuple[int, ...]:
    last = 2 + ('groups' in options)
    return tuple(range(1 if options.get('mode', 'loss') == 'loss' else last, last + 1))


@overload
def linear_nll(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, groups: torch.Tensor, group_weight: Numbers,
               reduction: Literal['mean', 'sum'] = 'mean', mode: Literal['loss', 'auto', 'logprob', 'keep'] = 'loss',
               **options: Unpack[LinearNllOptions]) -> GroupedLoss: ...
@overload
def linear_nll(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *,
               reduction: Literal['mean', 'sum'] = 'mean', mode: Literal['loss', 'auto', 'logprob', 'keep'] = 'loss',
               **options: Unpack[LinearNllOptions]) -> Loss: ...
@overload
def linear_nll(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, reduction: Literal['none'], mode: Mode,
               **options: Unpack[LinearNllOptions]) -> torch.Tensor: ...
@overload
def linear_nll(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, reduction: Reduction,
               mode: Literal['loss', 'auto', 'logprob', 'keep'] = 'loss',
               **options: Unpack[LinearNllOptions]) -> Loss | torch.Tensor: ...


@operator(loss_of, made_of, fixed=_without_gradient)
def linear_nll(hidden: torch.Tensor, weight: torch.Tensor | Head, target: torch.Tensor, *, reduction: Reduction = 'mean',
               mask: torch.Tensor | None = None, reduce_group: Group | None = None, tp_group: Group | None = None, temperature: float | torch.Tensor = 1.0, label_smoothing: float = 0.0, z_loss: float = 0.0,
               ignore_index: int = -100, mode: Literal['loss', 'auto', 'logprob', 'keep'] = 'loss', chunk_size: int | None = None, support: Support | None = None,
               class_weight: torch.Tensor | None = None, upstream: float | torch.Tensor | None = None, groups: torch.Tensor | None = None,
               group_weight: Numbers | None = None) -> Any:
    """nll() of the logits hidden x weight^T (+ a bias), which never exist as a whole.

    Mode "loss", for a mean or a sum, makes logits only once. Either forward keeps the gradients of the logits, in hidden's
    dtype, or it makes those of hidden (in its dtype), weight and bias (in fp32), which backward multiplies and can do only once:
    docs/guides/sharded-heads.md#the-head-and-modes. Without gradients (torch.no_grad()) "loss" is "logprob".

    Args:
        hidden: [..., H], on all ranks of tp_group the same.
        weight: [Vl, H], this rank's rows; or a Head.
        target: [...], as in logprob().
        reduction: "mean", "sum" or "none", as in nll(). "none" wants another mode than "loss".
        mask: [...], as in nll().
        reduce_group: as in nll().
        tp_group: the ranks that share the vocabulary in equal shards, if the Head does not say it.
        temperature: as in logprob().
        label_smoothing: as in nll().
        z_loss: as in nll().
        ignore_index: as in nll().
        mode: "loss", or linear_logprob()'s.
        chunk_size: tokens a chunk; 0 or None: from the Head's budget.
        support: as in logprob().
        class_weight: as in nll().
        upstream: the gradient that backward will bring to loss, if it is known before forward: a number, or a tensor of one
            element on hidden's device; for mode "loss" and reduction "sum". Forward then makes the gradients of hidden, weight and
            bias with it, and adds those of weight and bias to main_grad at once, whether or not backward comes. Without
            main_grad backward returns them.
        groups: as in nll(). One product and one gather of the head for all groups.
        group_weight: as in nll().

    Returns:
        As nll(); in mode "loss" Loss.num has no gradient, and of a GroupedLoss only total has one.

    Raises:
        ValueError: as nll(); mode "loss" with reduction "none"; an upstream that is not what backward brings.
        MismatchError: as nll().
        RuntimeError: as nll(); a second backward of mode "loss".
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> hidden, head, target = torch.randn(4, 8), torch.nn.Linear(8, 16), torch.tensor([1, 2, 3, -100])
        >>> loss = ct.linear_nll(hidden, ct.Head.of(head), target).loss
        >>> loss.backward()
        >>> head.weight.grad.shape
        torch.Size([16, 8])
    """
    head = read(LINEAR_NLL, weight, tp_group)
    return of_hidden(LINEAR_NLL, hidden, head, target, reduction, mask, reduce_group, scalars(
        LINEAR_NLL, temperature, head[0].softcap, head[0].scale, label_smoothing, z_loss, ignore_index, chunk_size, head[0].invariant, True),
        mode, support, class_weight, upstream, None if groups is group_weight is None else (groups, group_weight))


def of_hidden(what: Named, hidden: Any, head: tuple[Head, Any, Any, Any], target: Any, reduction: str, mask: Any, reduce_group: Any,
              numbers: tuple[Any, ...], mode: str, support: Support | None, class_weight: Any, upstream: Any, grouped: Any = None) -> Any:
    """linear_nll() as the function @what. head: read()'s; numbers: scalars()'s; grouped: (groups, group_weight) or None"""
    if reduction not in ('none', 'mean', 'sum'):
        raise ArgumentError("%s: reduction is %r, expected 'mean', 'sum' or 'none'" % (what, reduction))
    if mode == 'loss' and reduction == 'none':
        raise ArgumentError("linear_nll: mode=\"loss\" makes gradients of a mean or a sum, and reduction "
                            "is 'none'; use mode=\"auto\"")
    known = None if upstream is None else _known(upstream, reduction, mode, hidden)
    target, weights = masked(what, mask, target, numbers[5])
    trains = torch.is_grad_enabled() and any(
        getattr(t, 'requires_grad', False) for t in (hidden, *head[1:3], *factors_of(head[0])))
    grouping = None if grouped is None else Grouping(what, *grouped, target, numbers[5], reduction)
    class_weight = ClassWeight.of(what, class_weight)
    names = ('loss',) if reduction == 'none' or grouping is not None else ('loss', 'n_valid' if class_weight is None else 'weight')
    group = across(reduce_group, getattr(hidden, 'device', None), what)
    *tensors, o = prepare(
        what, hidden, head, target, names, 'logprob' if mode == 'loss' else mode,
        ('loss' if known is None else 'known') if mode == 'loss' and trains else None,
        numbers, support=support, class_weight=class_weight, beside=(weights, grouping))
    groups.require_apart(what, o[1], 'reduce_group', group)
    if weights is not None or grouping is not None:
        weights = counted(weights, target, o[0].config, o[0].real)
    if grouping is not None:
        grouping.counts(weights, weights_of_targets(o[0], o[1], target, class_weight), reduction == 'mean', group)
        weights = grouping.alpha()
    if known is not None:
        known = known.to(o[0].real)
    mean = reduction == 'mean'
    if not (mode == 'loss' and trains):
        out = Linear.apply(*tensors, o)
        if grouping is not None:
            return GroupedLoss(*grouping.losses(out[0]))
        if reduction == 'none':
            return out[0] if weights is None else out[0] * weights
        return reduced(out[0], out[1], weights, mean, group)
    side: list[Any] = []
    reads = o[0].early and any(t is not None and t.requires_grad for t in tensors[1:3])
    value = LinearLoss.apply(*tensors, (None, group, mean and grouping is None, side, weights, False, known,
                                        None if reads else anchor(*tensors[:5])), o)
    return Loss(value, *side) if grouping is None else GroupedLoss(*grouping.losses(side[2], value))


def _known(upstream: Any, reduction: str, mode: str, hidden: Any) -> Any:
    """An upstream gradient as an fp64 tensor of one element on hidden's device. ValueError: what is none."""
    device = getattr(hidden, 'device', None)
    if mode != 'loss' or reduction != 'sum':
        raise ArgumentError(
            "linear_nll: upstream is given, mode is %r and reduction %r, expected 'loss' and 'sum'; %s" % (
                mode, reduction, "what a mean divides by is known after the last chunk: pass reduction='sum' and "
                "upstream=factor / tokens" if mode == 'loss' else "other modes take any gradient: leave it out"))
    if isinstance(upstream, torch.Tensor):
        if upstream.numel() != 1 or upstream.device != device:
            raise ArgumentError("linear_nll: upstream is %s on %s, expected one element on %s, where hidden is; "
                                "pass float(upstream)" % (list(upstream.shape), upstream.device, device))
        return upstream.detach().reshape(1).double().resolve_neg()
    if not math.isfinite(number('upstream', upstream)):
        raise ArgumentError("linear_nll: upstream is %s, expected a finite number" % upstream)
    return torch.full((1,), upstream, dtype=torch.float64, device=device)
