# SPDX-License-Identifier: Apache-2.0
"""Any loss of logits straight from hidden states, a chunk of tokens at a time."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from ..errors import ArgumentError, FailedError
from . import placed
from . import ranks as groups
from .autocast import autocast, autocasts, cast, under
from .calls import eager
from .functions import Function, saved_tensors
from .head import FIELDS, PLAIN, Head, Named, read
from .ready import integer
from .tensors import said, stream_of
from .types import Group

Out = TypeVar('Out', bound='torch.Tensor | tuple[torch.Tensor, ...]')


# Of a Head, what a chunk's logits are made with, and what is compared with the placement of a DTensor, or done to its gradient.
_READ = 'weight', 'bias', 'tp_group', 'd_hidden', 'lora'
_PLACED = 'vocab', 'grad_reduction'
_WHAT = Named('over_chunks')


def _rows_of(hidden: Any, step: int) -> list[slice]:
    return [slice(i, i + step) for i in range(0, max(len(hidden), 1), step)]  # also of no tokens


@Function
def Logits(ctx: Any, z: Any) -> Any:
    """The leaf that a chunk's gradient is of -> the same memory, which a function may write in place."""
    return z.detach()


@Logits.differentiable
def _(ctx: Any, g: Any) -> Any:
    return g


def _called(fn: Any, z: Any, rows: slice) -> tuple[Any, ...]:
    """fn's outputs for a chunk, each with a number or more per token."""
    out = fn(z, rows)
    outs = out if isinstance(out, tuple) else (out,)
    for i, o in enumerate(outs):
        if not isinstance(o, torch.Tensor) or o.shape[:1] != z.shape[:1]:
            raise ArgumentError("over_chunks: output %d of fn is %s for %d tokens, expected a tensor [%d, ..]"
                                % (i, said(o, '%(shape)s'), len(z), len(z)))
    if not outs:
        raise ArgumentError("over_chunks: fn returned no output, expected a tensor or a tuple of them")
    return outs


def _captured(outs: Any, leaf: Any, params: Any) -> None:
    """ArgumentError, if outputs depend on a leaf that is neither the chunk's nor in @params or before one of them:
    backward would give it no gradient."""
    known = {(p.grad_fn, p.output_nr) for p in params if p.grad_fn is not None}
    own = {id(leaf), *map(id, params)}
    for i, o in enumerate(outs):
        seen, edges = set(), [(o.grad_fn, o.output_nr)]
        found = [o] if o.requires_grad and o.grad_fn is None else []
        while edges:
            edge = edges.pop()
            node = edge[0]
            if node is None or node in seen or edge in known:
                continue
            seen.add(node)
            edges += node.next_functions
            if type(node).__name__ == 'AccumulateGrad':
                found.append(node.variable)
        for t in found:
            if id(t) not in own and (t.numel() or hasattr(t, 'ds_tensor')):
                raise ArgumentError(
                    "over_chunks: output %d of fn depends on a tensor %s of %s that requires a gradient and is not fn's "
                    "argument, so it would get none; pass params=[..] with it, or detach() it" % (i, list(t.shape), t.dtype))


class _Random:
    """States of the generators that a fn draws from: those of the host and of a device."""

    def __init__(self, device: Any):
        self.device, self.cuda = device, device.type == 'cuda'

    def captures(self) -> bool:
        return self.cuda and torch.cuda.is_current_stream_capturing()

    def now(self) -> Any:
        on_device = torch.cuda.get_rng_state(self.device) if self.cuda and not self.captures() else None
        return torch.get_rng_state(), on_device

    def again(self, states: Any) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self.device)

    @contextlib.contextmanager
    def restored(self) -> Any:
        """Afterwards they are as before."""
        before = self.now()
        try:
            yield
        finally:
            self.again(before)

    @contextlib.contextmanager
    def refused(self) -> Any:
        """RuntimeError, if something is drawn while a graph is captured: states cannot be read there."""
        if not self.captures():
            yield
            return
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if torch.Tag.nondeterministic_seeded in func.tags:
                    raise FailedError("over_chunks: fn draws random numbers (%s) while a CUDA graph is captured, and backward "
                                      "could not draw the same; draw them before, for all tokens" % func)
                return func(*args, **kwargs or {})
        with Watch():
            yield


def _same(a: Any, b: Any) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b))


def _sums(t: Any) -> Any:
    """The dtype in which gradients of @t are added up"""
    return torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else t.dtype


# fn, tokens a chunk, communicator, does it sum d_hidden, are gradients recorded, scale of the LoRA
Call = tuple[Any, int, Any, bool, bool, float]


def _made(h: Any, head: Any, scale: float) -> tuple[Any, Any]:
    """(logits, hA^T or None) of a chunk; head: weight, bias, A and B as they are multiplied"""
    weight, bias, a, b = head
    z = torch.nn.functional.linear(h, weight, bias)
    if a is None:
        return z, None
    narrow = torch.nn.functional.linear(h, a)
    return z.addmm_(narrow, b.t(), alpha=scale), narrow


def _multiplied(hidden: Any, weight: Any, bias: Any, a: Any, b: Any, product: Any) -> list[Any]:
    """weight, bias, A and B in the dtype of a product"""
    kind = cast(hidden[:0], product).dtype
    return [cast(weight, product), cast(bias, product), *(None if t is None else t.to(kind) for t in (a, b))]


@Function
def OverChunks(ctx: Any, o: Call, hidden: Any, weight: Any, bias: Any, a: Any, b: Any, *params: Any) -> Any:
    """(Call, hidden [T, H], weight, bias, A and B of a LoRA, what else fn's outputs depend on) -> fn's outputs [T, ..].
    Logits are made again in backward, under the autocast and with the random numbers of forward."""
    fn, step, _, _, grad, scale = o
    need = ctx.needs_input_grad[1:]
    keeps, trains = grad and any(need), grad and any(need[:5])
    product, random = autocasts(hidden.device), _Random(hidden.device)
    head, whole, ctx.flags, ctx.states = _multiplied(hidden, weight, bias, a, b, product), [], [], []
    after = random.now() if keeps else None
    for rows in _rows_of(hidden, step):
        z, _ = _made(cast(hidden[rows], product), head, scale)
        with torch.set_grad_enabled(grad), random.refused() if keeps else contextlib.nullcontext():
            outs = _called(fn, Logits.apply(z.requires_grad_()) if trains else z, rows)
        if grad:
            _captured(outs, z, params)
        if keeps:
            before, after = after, random.now()
            ctx.states.append(None if _same(before, after) else before)
        if not whole:
            whole = [t.detach().new_empty((len(hidden), *t.shape[1:])) for t in outs]
        if [(t.shape[1:], t.dtype) for t in outs] != [(t.shape[1:], t.dtype) for t in whole]:
            raise ArgumentError("over_chunks: fn's outputs are %s for tokens %d to %d, expected those of the first chunk, %s" % (
                _kinds(outs), rows.start, rows.stop, _kinds(whole)))
        for t, part in zip(whole, outs):
            t[rows].copy_(part.detach())  # at once: the next chunk may write over it
        ctx.flags.append([t.requires_grad for t in outs])
        del z, outs
    if keeps:
        ctx.save_for_backward(hidden, weight, bias, a, b, *params)
        ctx.o, ctx.product, ctx.random = o, product, random
        ctx.params = params  # as fn has them
        ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(t for t, some in zip(whole, zip(*ctx.flags)) if not any(some)))
    return tuple(whole)


def _kinds(outs: Any) -> str:
    return ', '.join('[n%s] of %s' % (''.join(', %d' % n for n in t.shape[1:]), t.dtype) for t in outs)


@OverChunks.backward
def _(ctx: Any, *upstream: Any) -> Any:
    hidden, *head = saved_tensors(ctx, 'over_chunks: hidden, weight, bias, lora or params')[:5]
    (fn, step, comm, add, _, scale), need, product = ctx.o, ctx.needs_input_grad[1:], ctx.product
    d_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if need[0] else None
    d_weight, d_bias, d_a, d_b = (torch.zeros_like(t, dtype=_sums(t), memory_format=torch.contiguous_format) if wanted else None
                                  for t, wanted in zip(head, need[1:]))
    params, d_params = [t for t, wanted in zip(ctx.params, need[5:]) if wanted], {}
    trains = any(need[:5])
    with groups.telling(comm), ctx.random.restored(), under(product):
        w, _, a, b = made_with = _multiplied(hidden, *head, product)
        for rows, states, flags in zip(_rows_of(hidden, step), ctx.states, ctx.flags):
            h = cast(hidden[rows], product)
            z, narrow = _made(h, made_with, scale)
            if states is not None:
                ctx.random.again(states)
            with torch.enable_grad():
                outs = _called(fn, Logits.apply(z.requires_grad_()) if trains else z, rows)
            if [t.requires_grad for t in outs] != flags:
                raise FailedError("over_chunks: which outputs of fn require a gradient: %s in backward, %s in forward; fn has to "
                                  "return the same in both" % ([t.requires_grad for t in outs], flags))
            used = [(t, g[rows]) for t, g in zip(outs, upstream) if g is not None and t.requires_grad]
            of = [z] * trains + params
            made = torch.autograd.grad([t for t, _ in used], of, [g for _, g in used], allow_unused=True) if used else ()
            for i, d in enumerate(made[int(trains):]):
                if d is not None:
                    d_params[i] = d_params[i].add_(d) if i in d_params else d.to(_sums(d), copy=True)  # d may be upstream's
            d = made[0] if trains and made else None
            if d is None:
                continue
            d_narrow = None if narrow is None else scale * (d @ b)
            if d_hidden is not None:
                d_hidden[rows] = d @ w if d_narrow is None else torch.addmm(d @ w, d_narrow, a)
            if d_a is not None and d_narrow is not None:
                d_a += d_narrow.t() @ h
            if d_b is not None:
                d_b.add_(d.t() @ narrow, alpha=scale)
            if d_weight is not None:
                d_weight += d.t() @ h
            if d_bias is not None:
                d_bias += d.sum(0, dtype=d_bias.dtype)
        if d_a is not None and comm.size > 1:
            comm.all_reduce(d_a, stream=stream_of(d_a.device))
        if d_hidden is not None and add:
            comm.all_reduce(d_hidden, stream=stream_of(d_hidden.device))
    found = iter([d_params[i].to(t.dtype) if i in d_params else None for i, t in enumerate(params)])
    return (None, d_hidden, *(None if d is None else d.to(t.dtype) for d, t in zip((d_weight, d_bias, d_a, d_b), head)),
            *(next(found) if wanted else None for wanted in need[5:]))


@eager
def over_chunks(fn: Callable[[torch.Tensor, slice], Out], hidden: torch.Tensor, weight: torch.Tensor | Head, *,
                chunk_size: int = 2048, tp_group: Group | None = None, params: Iterable[torch.Tensor] = ()) -> Out:
    """fn's outputs for the logits hidden x weight^T (+ a bias, + a LoRA), of which one chunk of tokens exists at a time; backward
    makes them again. For losses that linear_logprob() does not have: docs/guides/distillation.md#other-losses.

    fn's collectives run for each chunk, in forward and again in backward, both under the autocast of forward and with the same
    numbers of torch's default generators, of the host and of hidden's device. Other generators draw anew. Gradients of weight,
    bias, lora and params are added up in fp32 (fp64 of fp64), that of A over tp_group, too. DTensors: as linear_logprob(); rows
    that ranks share are gathered once in forward, and stay until backward.

    Args:
        fn: fn(logits [n, Vl], rows) returns a tensor [n, ..] or a tuple of them, numbers per token; rows is the slice of the T
            tokens that the chunk has, and a token's outputs depend on its logits only. It may write its logits in place, and
            runs again in backward, where it has to return the same.
        hidden: [..., H], on all ranks of tp_group the same.
        weight: [Vl, H]; or a Head with a bias, a lora, tp_group, d_hidden "all_reduce" or "partial", and if its weight is a DTensor
            vocab and grad_reduction.
        chunk_size: tokens a chunk, > 0, the same on all ranks.
        tp_group: the ranks that share the vocabulary, if the Head does not say it.
        params: the other tensors that outputs depend on and that get gradients, of this rank's part: a scale of the logits, say.

    Returns:
        What fn returns, of all tokens: [..., ..].

    Raises:
        ValueError: shapes; an output that depends on a tensor that wants a gradient and is not in params; a Head with what fn
            would not hear of, such as softcap or scale.
        RuntimeError: another rank failed; fn returned other outputs in backward.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> hidden, head = torch.randn(10, 8), torch.nn.Linear(8, 16, bias=False)
        >>> largest = ct.over_chunks(lambda logits, rows: logits.amax(-1), hidden, head.weight, chunk_size=4)
        >>> torch.allclose(largest, head(hidden).amax(-1), atol=1e-5)
        True
    """
    return _over_chunks(fn, hidden, *read(_WHAT, weight, tp_group), chunk_size, params)


def _over_chunks(fn: Any, hidden: Any, head: Head, weight: Any, bias: Any, tp_group: Any, chunk_size: int, params: Any) -> Any:
    is_placed = placed.is_placed(weight) or placed.is_placed(bias)
    for name in FIELDS:
        if name in _READ or name in _PLACED and is_placed or getattr(head, name) == getattr(PLAIN, name):
            continue
        raise ArgumentError("over_chunks: the Head has %s=%r, which %s" % (
            name, getattr(head, name), "is of the ranks that share a DTensor, and its weight is no DTensor: fn's logits are this "
            "rank's columns, the weight's gradient that of its tokens; leave it out" if name in _PLACED else
            "is not done to the logits of fn; leave it out, and do it in fn"))
    d_hidden = head.d_hidden
    if d_hidden not in ('all_reduce', 'partial') or integer('over_chunks: chunk_size', chunk_size) < 1:
        raise ArgumentError("over_chunks: d_hidden is %r and chunk_size %s, expected 'all_reduce' or 'partial' and "
                            "a number above 0" % (d_hidden, chunk_size))
    if isinstance(hidden, torch.Tensor) and is_placed:
        comm = groups.comm_of(tp_group, hidden.device, 'over_chunks: tp_group')
        weight, bias = placed.gathered(_WHAT, head, hidden, weight, bias, comm)
    given = hidden, weight, bias
    h, w, b = (tuple(t.shape) if isinstance(t, torch.Tensor) and t.layout is torch.strided else () for t in given)
    if not h or len(w) != 2 or h[-1] != w[1] or bias is not None and b != w[:1]:
        raise ArgumentError("over_chunks: hidden is %s and weight %s, expected [..., H] and [Vl, H]; bias is %s, expected "
                            "[Vl] or None" % tuple(said(t, '%(shape)s') for t in given))
    if autocast(hidden.device.type) is None and {hidden.dtype, weight.dtype} != {getattr(bias, 'dtype', weight.dtype)}:
        raise ArgumentError("over_chunks: hidden is of %s, weight of %s and bias of %s, expected one dtype"
                            % (hidden.dtype, weight.dtype, getattr(bias, 'dtype', None)))
    a, b, scale = None, None, 0.0
    if head.lora is not None:
        a, b, scale = placed.factors(_WHAT, head, hidden, groups.comm_of(tp_group, hidden.device, 'over_chunks: tp_group'), False)
        if not (a.dim() == b.dim() == 2 and a.shape == (b.shape[1], h[-1]) and len(b) == w[0] and len(a) and
                a.is_floating_point() and b.is_floating_point() and a.device == b.device == hidden.device):
            raise ArgumentError("over_chunks: the Head's lora is A %s and B %s, expected [r, %d] and [%d, r] of a floating-point dtype on %s" % (
                *(said(t, '%(shape)s of %(dtype)s on %(device)s') for t in (a, b)), h[-1], w[0], hidden.device))
    asked: Any = params
    others: list[Any] = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, torch.Tensor) else [asked]
    for t in others:
        if not isinstance(t, torch.Tensor):
            raise ArgumentError("over_chunks: params have a %s, expected torch.Tensors" % type(t).__name__)
    others = list({id(t): t for t in others}.values())  # each once
    comm = groups.comm_of(tp_group, hidden.device, 'over_chunks: tp_group')
    shape = hidden.shape[:-1]
    out = OverChunks.apply((fn, chunk_size, comm, d_hidden == 'all_reduce' and comm.size > 1, torch.is_grad_enabled(), scale),
                           hidden.reshape(-1, hidden.shape[-1]), weight, bias, a, b, *others)
    first, *rest = (t.reshape(shape + t.shape[1:]) for t in out)
    return (first, *rest) if rest else first
