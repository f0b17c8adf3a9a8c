# SPDX-License-Identifier: Apache-2.0
"""Log-probability and loss straight from hidden states, token chunk by token chunk: the product with
the lm_head and the loss of its logits as one autograd function; never all logits. Formulas and modes:
docs/linear_logprob.md; a head that is sharded over data parallel ranks: docs/lm_head.md.

What the library keeps from call to call (streams, events, cuBLASLt handles) belongs to the vocabulary
group's communicator; memory comes from torch at each call, so caching allocator and CUDA graphs see it.
"""
from __future__ import annotations

import collections
import ctypes as c
import functools
import math
from dataclasses import dataclass
from typing import Any

from .. import _structs as s
from .._lib import call, lib
from ..comm import Comm
from ..errors import STATUS, ArgumentError, FailedError
from ..tensor import torch_dtype
from . import ranks as groups
from .logprob import Loss, Rows, _config, _control, check_mask, reduced, rows_of, shard, sum_over
from .tensors import checked, eager, once, saved_tensors, stream_of

MODES = {'auto': s.LINEAR_AUTO, 'logprob': s.LINEAR_LOGPROB, 'keep': s.LINEAR_KEEP}
D_HIDDEN = {'partial': 0, 'all_reduce': 1, 'reduce_scatter': 2}
_KEPT = 32  # C objects of other sizes or options, for a communicator
_REAL = {'f64': 'f64'}  # dtype of sums and outputs of a head's dtype; f32 else


class _Core:
    """A colo_linear_logprob_t with its head: for one size, dtype, device and set of options."""

    def __init__(self, comm: Comm, head_comm: Comm | None, head: s.LmHeadConfig,
                 config: s.LinearConfig):
        self.comms = tuple(group for group in (comm, head_comm) if group is not None)  # live as long
        self.head, self.linear = c.c_void_p(), c.c_void_p()
        call('colo_lm_head_create', c.byref(self.head), head,
             head_comm.handle if head_comm is not None else None)
        for group in self.comms:
            group.serves(self.head, 'colo_lm_head_destroy')
        call('colo_linear_logprob_create', c.byref(self.linear), config, self.head, comm.handle)
        for group in self.comms:
            group.serves(self.linear, 'colo_linear_logprob_destroy')
        self.gathered = lib().colo_lm_head_gathered_size(self.head)
        self.sizes: dict[Any, int] = {}  # what the queries below said

    def __del__(self) -> None:
        for group in self.comms:  # the second one finds NULL
            group.ends(self.linear, 'colo_linear_logprob_destroy')
            group.ends(self.head, 'colo_lm_head_destroy')

    def alive(self) -> '_Core':
        """Itself. RuntimeError: a communicator of its was destroyed, by an error or shutdown()."""
        if not self.linear:
            raise FailedError('linear_logprob: a communicator of the forward pass was destroyed since',
                              STATUS['ERR_STATE'])
        return self

    def workspace(self, which: int, tokens: int, max_valid: int) -> int:
        return self._size('colo_linear_logprob_workspace_size', which, tokens, max_valid)

    def saved(self, tokens: int, max_valid: int) -> int:
        return self._size('colo_linear_logprob_saved_size', tokens, max_valid)

    def _size(self, *asked: Any) -> int:
        known = self.sizes.get(asked)
        if known is None:
            size = c.c_size_t()
            call(asked[0], self.linear, *asked[1:], c.byref(size))
            if len(self.sizes) >= 256:  # batches of ever other lengths
                self.sizes.clear()
            known = self.sizes[asked] = size.value
        return known


@dataclass(frozen=True)
class _Options:
    """Of one call, for the autograd functions."""
    rows: Rows  # how hidden states are read
    comm: Comm
    head_comm: Comm | None
    head_rows: int
    logprob: s.LogprobConfig
    members: tuple[tuple[str, Any], ...]  # of colo_linear_logprob_config_t
    outputs: tuple[str, ...]
    max_valid: int
    main: tuple[Any, Any] | None  # main_grad of weight and bias
    scatter: bool  # hidden is this rank's slice of the tokens
    grad: bool  # is a backward to be prepared (inside of a function autograd does not say)

    def core(self, hidden: Any, bias: bool, d_weight: Any, **members: Any) -> _Core:
        """The C objects; made at the first call, in the same order on all ranks."""
        dtype = torch_dtype(hidden.dtype, 'hidden')
        mem, ordinal = (s.CUDA, hidden.device.index) if hidden.device.type == 'cuda' else (s.HOST, -1)
        key = (self.head_comm, self.head_rows, hidden.shape[-1], dtype, mem, ordinal, bias,
               bytes(self.logprob), self.members, d_weight, tuple(members.items()))
        kept = self.comm.__dict__.setdefault('_linears', collections.OrderedDict())
        core = kept.get(key)
        if core is None:
            config = s.LinearConfig(struct_size=c.sizeof(s.LinearConfig), logprob=self.logprob,
                                    d_weight_dtype=torch_dtype(d_weight, 'main_grad'),
                                    **dict(self.members), **members)
            head = s.LmHeadConfig(struct_size=c.sizeof(s.LmHeadConfig), rows=self.head_rows,
                                  hidden=hidden.shape[-1], dtype=dtype, mem=mem, device=ordinal,
                                  has_bias=bias)
            with groups.telling(self.comm), groups.telling(self.head_comm):
                core = kept[key] = _Core(self.comm, self.head_comm, head, config)
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return core


def _room(size: int, device: Any) -> tuple[Any, int]:
    """(the tensor that holds it, address of @size bytes at a multiple of 256)"""
    import torch
    memory = torch.empty(size + 255, dtype=torch.uint8, device=device)
    return memory, (memory.data_ptr() + 255) & ~255


def _tokens(o: _Options, hidden: Any, saved: bool = False) -> tuple[Any, s.Tensor]:
    """(what holds them, [T, H]) of all tokens: hidden itself, or gathered over the vocabulary group."""
    import torch
    if o.scatter:
        whole = torch.empty((o.rows.count, o.rows.columns), dtype=hidden.dtype, device=hidden.device)
        with groups.telling(o.comm):
            o.comm.all_gather(checked(hidden, 'hidden', saved=saved), checked(whole, 'hidden'),
                              stream=stream_of(hidden.device))
        return whole, checked(whole, 'hidden')
    raw = checked(hidden, 'hidden', saved=saved)
    raw.ndim = 2
    raw.shape[:2] = o.rows.count, o.rows.columns
    raw.stride[:2] = o.rows.stride, 1
    return hidden, raw


class _Bound:
    """What a call passes of the head: views that stay alive for the call, and the gather's scratch."""

    def __init__(self, core: _Core, weight: Any, bias: Any, saved: bool = False):
        self.weight = checked(weight, 'weight', saved=saved)
        self.bias = None if bias is None else checked(bias, 'bias', saved=saved)
        self.memory, room = _room(core.gathered, weight.device) if core.gathered else (None, None)
        call('colo_lm_head_bind', core.head, self.weight, self.bias, room)


def _outputs(o: _Options, hidden: Any) -> dict[str, Any]:
    import torch
    real = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    kinds = {'correct': torch.uint8, 'n_valid': torch.int64, 'n_invalid': torch.int64}
    return {name: torch.empty(1 if name[0] == 'n' else o.rows.count, dtype=kinds.get(name, real),
                              device=hidden.device) for name in o.outputs}


def _d_hidden(o: _Options, hidden: Any) -> tuple[Any, Any]:
    """(contiguous [T, H] to write, the gradient in hidden's shape: a view of it)"""
    import torch
    if o.scatter:
        grad = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        return grad.view(-1, o.rows.columns), grad
    grad = torch.empty((o.rows.count, o.rows.columns), dtype=hidden.dtype, device=hidden.device)
    return grad, o.rows.columns_of(grad)


def _pointer(t: Any, what: str) -> Any:
    return None if t is None else c.pointer(checked(t, what))


def _grads(d_rows: Any, d_weight: Any, d_bias: Any) -> s.LinearGrads:
    return s.LinearGrads(_pointer(d_rows, 'd_hidden'), _pointer(d_weight, 'd_weight'),
                         _pointer(d_bias, 'd_bias'))


@functools.lru_cache(maxsize=None)
def _functions() -> tuple[Any, Any]:
    """The autograd functions; made at the first call, for torch is imported then."""
    import torch

    class Linear(torch.autograd.Function):
        """(hidden, weight, bias, rows' targets [T], _Options) -> the outputs that were asked for."""

        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any,
                    o: _Options) -> Any:
            device = hidden.device
            need = ctx.needs_input_grad
            backward = o.grad and any(need[:3])
            core = o.core(hidden, bias is not None,
                          o.main[0].dtype if o.main else weight.dtype,
                          frozen_hidden=backward and not need[0],
                          frozen_weight=backward and not (need[1] or need[2]),
                          d_weight_add=o.main is not None)
            out = _outputs(o, hidden)
            held, tokens = _tokens(o, hidden)
            bound = _Bound(core, weight, bias)
            which = s.LINEAR_FORWARD if backward else s.LINEAR_INFERENCE
            work, room = _room(core.workspace(which, o.rows.count, o.max_valid), device)
            kept, buffer = (_room(core.saved(o.rows.count, o.max_valid), device) if backward
                            else (None, None))
            saved = s.LinearSaved() if backward else None
            with groups.telling(o.comm), groups.telling(o.head_comm):
                call('colo_linear_logprob_forward', core.linear,
                     s.LinearBatch(c.pointer(tokens), _pointer(targets, 'target'), o.max_valid),
                     s.LogprobOut(**{name: t.data_ptr() for name, t in out.items()}), saved, buffer,
                     room, stream_of(device))
            del held, bound, work
            if backward:
                ctx.o, ctx.core = o, core
                ctx.save_for_backward(hidden, weight, bias, targets, kept)
            results = tuple(t if name[0] == 'n' else o.rows.gather(t) for name, t in out.items())
            ctx.mark_non_differentiable(*(t for t, name in zip(results, o.outputs)
                                          if name not in ('logp', 'entropy', 'loss')))
            return results

        @staticmethod
        @once
        def backward(ctx: Any, *upstream: Any) -> Any:
            o, core = ctx.o, ctx.core.alive()
            hidden, weight, bias, targets, kept = saved_tensors(
                ctx, 'linear_logprob: hidden, weight, bias or target')
            need = ctx.needs_input_grad
            given = {name: o.rows.spread(g, 0) for name, g in zip(o.outputs, upstream)
                     if name in ('logp', 'entropy', 'loss') and g is not None}
            factors = s.LinearUpstream(**{name: 1.0 for name in given},
                                       **{'d_' + name: g.data_ptr() for name, g in given.items()})
            held, tokens = _tokens(o, hidden, saved=True)
            bound = _Bound(core, weight, bias, saved=True)
            d_rows, d_hidden = _d_hidden(o, hidden) if need[0] else (None, None)
            d_weight = d_bias = None
            if need[1] or need[2]:
                d_weight, d_bias = o.main or (torch.empty(weight.shape, dtype=weight.dtype,
                                                          device=weight.device),
                                              None if bias is None else torch.empty_like(bias))
            saved = s.LinearSaved(
                of=core.linear, hidden=tokens, targets=checked(targets, 'target', saved=True),
                max_valid=o.max_valid, buffer=(kept.data_ptr() + 255) & ~255, valid=True)
            work, room = _room(core.workspace(s.LINEAR_BACKWARD, o.rows.count, o.max_valid),
                               hidden.device)
            with groups.telling(o.comm), groups.telling(o.head_comm):
                call('colo_linear_logprob_backward', core.linear, saved, factors,
                     _grads(d_rows, d_weight, d_bias), room, stream_of(hidden.device))
            del held, bound, work
            if o.main is not None:
                d_weight = d_bias = None
            return d_hidden, d_weight if need[1] else None, d_bias if need[2] else None, None, None

    class LinearLoss(torch.autograd.Function):
        """(hidden, weight, bias, rows' targets, factor [T], _Options) -> sum of factor * loss, f64.
        Gradients are made here; backward multiplies them by the upstream gradient, one number."""

        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, factor: Any,
                    o: _Options) -> Any:
            device = hidden.device
            need = ctx.needs_input_grad
            grads_dtype = o.main[0].dtype if o.main else weight.dtype
            core = o.core(hidden, bias is not None, grads_dtype, frozen_hidden=not need[0],
                          frozen_weight=not (need[1] or need[2]), d_weight_add=False)
            out = _outputs(o, hidden)
            held, tokens = _tokens(o, hidden)
            bound = _Bound(core, weight, bias)
            d_rows, d_hidden = _d_hidden(o, hidden) if need[0] else (None, None)
            d_weight = d_bias = None
            if need[1] or need[2]:
                d_weight = torch.empty(weight.shape, dtype=grads_dtype, device=device)
                d_bias = None if bias is None else torch.empty(bias.shape, dtype=grads_dtype,
                                                               device=device)
            work, room = _room(core.workspace(s.LINEAR_LOSS, o.rows.count, o.max_valid), device)
            with groups.telling(o.comm), groups.telling(o.head_comm):
                call('colo_linear_logprob_loss', core.linear,
                     s.LinearBatch(c.pointer(tokens), _pointer(targets, 'target'), o.max_valid),
                     s.LinearUpstream(loss=1.0, d_loss=factor.data_ptr()),
                     s.LogprobOut(**{name: t.data_ptr() for name, t in out.items()}),
                     _grads(d_rows, d_weight, d_bias), room, stream_of(device))
            del held, bound, work
            ctx.o, ctx.made, ctx.need = o, (d_hidden, d_weight, d_bias), need
            return (out['loss'].double() * factor).sum()

        @staticmethod
        @once
        def backward(ctx: Any, g: Any) -> Any:
            if ctx.made is None:
                raise FailedError("linear_nll: a second backward, but mode=\"loss\" makes gradients once; "
                                  "mode=\"logprob\" keeps what a second one needs")
            (d_hidden, d_weight, d_bias), ctx.made, main = ctx.made, None, ctx.o.main
            if d_hidden is not None:
                d_hidden.mul_(g)
            if main is not None and d_weight is not None:
                for sums, grad in zip(main, (d_weight, d_bias)):
                    if grad is not None:
                        sums.addcmul_(grad, g.to(sums.dtype))
                d_weight = d_bias = None
            for grad in (d_weight, d_bias):
                if grad is not None:
                    grad.mul_(g)
            return (d_hidden, d_weight if ctx.need[1] else None, d_bias if ctx.need[2] else None,
                    None, None, None)

    return Linear, LinearLoss


def _autocast(device: str) -> Any:
    """The dtype that autocast computes products in now, None outside of it."""
    import torch
    try:
        on = torch.is_autocast_enabled(device)
    except TypeError:  # before 2.4 the question has no argument
        if device == 'cuda':
            return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_dtype(device) if on else None


def _local(t: Any, what: str, wanted: Any = None) -> tuple[Any, Any, int | None]:
    """(this rank's rows, the group that shares them, all rows) of a parameter: a DTensor that is
    Shard(0) or Replicate() over one mesh dimension, or a tensor, which is what it is."""
    if not hasattr(t, 'placements') or not hasattr(t, 'to_local'):
        return t, None, None
    if len(t.placements) != 1:
        raise ArgumentError("%s: a DTensor over %d mesh dimensions, expected one; pass to_local(), "
                            "head_group= and head_rows=" % (what, len(t.placements)))
    placed = t.placements[0]
    if placed.is_replicate():
        return t.to_local(), None, None
    if type(placed).__name__ != 'Shard' or placed.dim != 0:
        raise ArgumentError("%s: a DTensor with %s, expected Shard(0) or Replicate()" % (what, placed))
    return t.to_local(), t.device_mesh.get_group(), t.shape[0]


def _prepare(what: str, hidden: Any, weight: Any, bias: Any, target: Any, names: tuple[str, ...], *,
             tp_group: Any, vocab_start: int | None, vocab_end: int | None, vocab_size: int | None,
             head_group: Any, head_rows: int | None, mode: str, d_hidden: str, main_grad: bool,
             budget: int, max_valid: int | None, logits_dtype: Any,
             **members: Any) -> tuple[Any, Any, Any, Any, _Options]:
    """Checked arguments as the autograd functions take them. What is wrong is told to the other ranks
    of both groups before it is raised."""
    import torch
    for name, t in (('hidden', hidden), ('weight', weight), ('target', target)):
        if not isinstance(t, torch.Tensor):
            raise ArgumentError("%s: %s is a %s, expected a torch.Tensor"
                                % (what, name, type(t).__name__))
    comm = groups.comm_of(tp_group, hidden.device, what + ': tp_group')
    head_comm: Comm | None = None
    try:
        if mode not in MODES or d_hidden not in D_HIDDEN:
            raise ArgumentError("%s: mode is %r and d_hidden %r, expected one of %s and one of %s"
                                % (what, mode, d_hidden, ', '.join(MODES), ', '.join(D_HIDDEN)))
        main = _main_grads(what, weight, bias) if main_grad else None
        weight, mesh_group, mesh_rows = _local(weight, what + ': weight')
        if bias is not None:
            bias, bias_group, bias_rows = _local(bias, what + ': bias')
            if bias_rows != mesh_rows:
                raise ArgumentError("%s: weight has %s sharded rows and bias %s; shard both alike"
                                    % (what, mesh_rows, bias_rows))
        if mesh_group is not None:
            head_group, head_rows = mesh_group, mesh_rows
        if head_group is not None:
            head_comm = groups.comm_of(head_group, hidden.device, what + ': head_group')
            if head_rows is None:
                raise ArgumentError("%s: head_group is given, so head_rows= (the rows of all its ranks "
                                    "together) is needed" % what)
        product = _autocast(hidden.device.type)
        if product is not None and hidden.dtype != torch.float64:
            hidden, weight = hidden.to(product), weight.to(product)
            bias = None if bias is None else bias.to(product)
        if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
            raise ArgumentError("%s: hidden is %s and weight %s, expected [..., H] and [Vl, H]"
                                % (what, list(hidden.shape), list(weight.shape)))
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ArgumentError("%s: bias is %s, expected [%d], the weight's rows"
                                % (what, list(bias.shape), weight.shape[0]))
        for name, t in (('weight', weight), ('bias', bias)):
            if t is not None and (t.dtype != hidden.dtype or t.device != hidden.device):
                raise ArgumentError("%s: %s is %s on %s, hidden is %s on %s"
                                    % (what, name, t.dtype, t.device, hidden.dtype, hidden.device))
        if not hidden.dtype.is_floating_point:
            raise ArgumentError("%s: hidden is of %s, expected a floating-point dtype"
                                % (what, hidden.dtype))
        scatter = d_hidden == 'reduce_scatter' and comm.size > 1
        shape = list(hidden.shape[:-1])
        if scatter and shape:
            shape[0] *= comm.size
        if list(target.shape) != shape:
            raise ArgumentError("%s: target is %s, expected %s, %s"
                                % (what, list(target.shape), shape,
                                   "hidden's first axis times the group's %d ranks" % comm.size
                                   if scatter else "hidden's shape without the last axis"))
        if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
            raise ArgumentError("%s: target is of %s, expected an integer dtype"
                                % (what, target.dtype))
        if target.device != hidden.device:
            raise ArgumentError("%s: target is on %s, hidden is on %s"
                                % (what, target.device, hidden.device))
        rows_here = weight.shape[0] if head_comm is None else head_rows
        start, vocab = shard(comm, _control(tp_group, comm), rows_here, vocab_start, vocab_end,
                             vocab_size)
        for name in ('entropy', 'loss', 'correct'):
            members['want_' + name] = name in names
        config = _config(start, vocab, **members)
        if weight.stride(1) != 1 and weight.shape[1] > 1:
            weight = weight.contiguous()
        if bias is not None:
            bias = bias.contiguous()
        if scatter:
            hidden = hidden.contiguous()
            n = math.prod(shape)
            steps = rows_of(target.unsqueeze(-1).contiguous())[1].step
            rows = Rows(tuple(shape), steps, n, False, hidden.shape[-1], hidden.shape[-1])
        else:
            hidden, rows = rows_of(hidden)
            n = math.prod(shape)
        number = torch_dtype(hidden.dtype)
        logits = s.DTYPE[_REAL.get(s.DTYPES[number], 'f32')] if logits_dtype is None \
            else torch_dtype(logits_dtype, 'logits_dtype')
        linear = {'mode': MODES[mode], 'logits_dtype': logits, 'budget': budget,
                  'd_hidden': D_HIDDEN[d_hidden]}
    except Exception as why:
        groups.refuse(comm, why)
        groups.refuse(head_comm, why)
        raise
    target = rows.spread(target.to(torch.int64), config.ignore_index)
    o = _Options(rows, comm, head_comm, rows_here, config, tuple(linear.items()), names,
                 n if max_valid is None else max_valid, main, scatter, torch.is_grad_enabled())
    return hidden, weight, bias, target, o


def _main_grads(what: str, weight: Any, bias: Any) -> tuple[Any, Any]:
    found = []
    for name, t in (('weight', weight), ('bias', bias)):
        grad = None if t is None else getattr(t, 'main_grad', None)
        if t is not None:
            if grad is None:
                raise ArgumentError("%s: main_grad=True, but %s has no attribute main_grad" % (what, name))
            grad = _local(grad, name + '.main_grad')[0].detach()
            if grad.dtype not in _wide():
                raise ArgumentError("%s: %s.main_grad is of %s, expected torch.float32 (or float64 of a "
                                    "float64 head)" % (what, name, grad.dtype))
        found.append(grad)
    return found[0], found[1]


def _wide() -> Any:
    import torch
    return torch.float32, torch.float64


@eager
def linear_logprob(hidden: Any, weight: Any, bias: Any = None, *, target: Any, tp_group: Any = None,
                   vocab_start: int | None = None, vocab_end: int | None = None,
                   vocab_size: int | None = None, entropy: bool = False, loss: bool = False,
                   temperature: float = 1.0, softcap: float | None = None,
                   label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100,
                   mode: str = 'auto', chunk_size: int | None = None, budget: int = 0,
                   max_valid: int | None = None, logits_dtype: Any = None,
                   d_hidden: str = 'all_reduce', main_grad: bool = False, head_group: Any = None,
                   head_rows: int | None = None) -> Any:
    """logp [...] of target [...] under the logits hidden [..., H] x weight [Vl, H]^T + bias [Vl],
    which never exist as a whole; with entropy= and loss=, a tuple of those, each differentiable.

    mode: "logprob" makes logits again in backward, "keep" keeps them, "auto" keeps them when they fit
    into budget bytes (0: 1 GiB). chunk_size: tokens a chunk, 0 or None: from budget. max_valid: an upper
    bound of the tokens that are not ignored, which saves products. logits_dtype: of the scratch, float32
    or hidden's. d_hidden: over tp_group the gradient of hidden is "all_reduce": the sum, on every rank;
    "partial": this rank's part, which the caller sums; "reduce_scatter": hidden is this rank's slice of
    the first axis (sequence parallel), gathered here, and its gradient is the sum's slice.
    main_grad: weight's gradient is added to weight.main_grad (float32) and weight.grad stays None.

    A head that is sharded by rows over data parallel ranks: weight is a DTensor with Shard(0) (FSDP2), or
    this rank's rows [d E, (d+1) E) with E = ceil(Vl / D), head_group= those D ranks and head_rows= Vl
    (ZeRO-3). One gather a pass; weight's gradient, this rank's rows, is the sum over the group (not the
    mean) and takes one reduce-scatter. All ranks of the group call, also with no token.
    Inside of autocast, hidden, weight and bias are cast as F.linear() would. Other arguments, special
    values and errors: logprob().
    """
    if not loss and (label_smoothing or z_loss):
        raise ArgumentError("linear_logprob: label_smoothing and z_loss act on the loss, and logp is "
                            "never smoothed; ask for loss=True, or use linear_nll()")
    names = ('logp',) + ('entropy',) * entropy + ('loss',) * loss
    *tensors, o = _prepare(
        'linear_logprob', hidden, weight, bias, target, names, tp_group=tp_group,
        vocab_start=vocab_start, vocab_end=vocab_end, vocab_size=vocab_size, head_group=head_group,
        head_rows=head_rows, mode=mode, d_hidden=d_hidden, main_grad=main_grad, budget=budget,
        max_valid=max_valid, logits_dtype=logits_dtype, temperature=temperature,
        softcap=softcap or 0.0, label_smoothing=label_smoothing, z_loss=z_loss,
        ignore_index=ignore_index, chunk_size=chunk_size or 0)
    out = _functions()[0].apply(*tensors, o)
    return out if len(names) > 1 else out[0]


@eager
def linear_nll(hidden: Any, weight: Any, bias: Any = None, *, target: Any, reduction: str = 'mean',
               mask: Any = None, reduce_group: Any = None, tp_group: Any = None,
               vocab_start: int | None = None, vocab_end: int | None = None,
               vocab_size: int | None = None, temperature: float = 1.0,
               softcap: float | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
               ignore_index: int = -100, mode: str = 'loss', chunk_size: int | None = None,
               budget: int = 0, max_valid: int | None = None, logits_dtype: Any = None,
               d_hidden: str = 'all_reduce', main_grad: bool = False, head_group: Any = None,
               head_rows: int | None = None) -> Any:
    """Cross entropy straight from hidden states: nll() of linear_logprob()'s logits.

    mode "loss", for reduction "mean" and "sum": gradients are made in forward, chunk by chunk, and
    logits only once; between forward and backward the gradients of hidden and weight are held, and
    backward, which runs once, multiplies them by its upstream gradient. Loss.num has no gradient. The
    other modes and arguments are linear_logprob()'s, reductions, mask [...] and reduce_group nll()'s.
    Without gradients (torch.no_grad()) "loss" is "logprob".
    """
    import torch
    if reduction not in ('none', 'mean', 'sum'):
        raise ArgumentError("linear_nll: reduction is %r, expected 'mean', 'sum' or 'none'"
                            % (reduction,))
    if mode == 'loss' and reduction == 'none':
        raise ArgumentError("linear_nll: mode=\"loss\" makes gradients of a mean or a sum, and reduction "
                            "is 'none'; use mode=\"auto\"")
    if mask is not None and isinstance(target, torch.Tensor):
        check_mask('linear_nll', mask, target, tp_group, head_group, reduce_group)
        target = torch.where(mask.to(torch.bool), target, torch.full_like(target, ignore_index))
    trains = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias))
    in_forward = mode == 'loss' and trains
    names = ('loss',) if in_forward or reduction == 'none' else ('loss', 'n_valid')
    *tensors, o = _prepare(
        'linear_nll', hidden, weight, bias, target, names, tp_group=tp_group,
        vocab_start=vocab_start, vocab_end=vocab_end, vocab_size=vocab_size, head_group=head_group,
        head_rows=head_rows, mode='logprob' if mode == 'loss' else mode, d_hidden=d_hidden,
        main_grad=main_grad, budget=budget, max_valid=max_valid, logits_dtype=logits_dtype,
        temperature=temperature, softcap=softcap or 0.0, label_smoothing=label_smoothing,
        z_loss=z_loss, ignore_index=ignore_index, chunk_size=chunk_size or 0)
    if not in_forward:
        out = _functions()[0].apply(*tensors, o)
        if reduction == 'none':
            return out[0]
        return reduced(out[0], out[1][0], reduction, reduce_group, 'linear_nll')
    targets = tensors[3]
    counted = (targets != ignore_index) & (targets >= 0) & (targets < o.logprob.vocab)
    den = counted.sum().to(torch.float64)
    across = None if reduce_group is None else groups.comm_of(reduce_group, targets.device,
                                                              'linear_nll: reduce_group')
    if across is not None and across.size == 1:
        across = None
    if across is not None:
        with groups.telling(across):
            across.all_reduce(den, stream=stream_of(targets.device))
    over = den.clamp(min=1)
    real = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    factor = (1 / over if reduction == 'mean' else torch.ones_like(den)).to(real)
    value = _functions()[1].apply(*tensors, factor.expand(o.rows.count).contiguous(), o)
    if across is not None:
        value = sum_over().apply(value, across)
    num = value.detach() * over if reduction == 'mean' else value.detach()
    return Loss(value.to(real), num, den)
