# SPDX-License-Identifier: Apache-2.0
"""Log-probability, entropy and loss of targets under vocabulary-parallel logits, as autograd functions.

Forward reads the logits once and does one all-gather over the vocabulary group; backward does none,
reads the logits again and writes their gradient. Formulas and special values: docs/concepts/loss.md.
"""
from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch

from .. import _structs as s
from .._lib import call, check, size_of
from ..comm import Comm
from ..errors import ArgumentError, FailedError
from ..tensor import contiguous, make, torch_dtype
from . import alike
from . import ranks as groups
from .calls import operator
from .functions import Function, saved_tensors
from .head import Columns, Named, columns_of
from .ready import SLACK, SMALL, HostWorkspace, View, aligned, entry, like, made_like, pointed, scalars, table
from .rows import Rows, rows_of
from .support import Accompanied, Classes, ClassWeight, Support, accompanied, meta, of_rows, of_tokens
from .tensors import checked, of_integers, stream_of, written
from .types import Group, LogprobOptions, Output, Vocab

DIFFERENTIABLE = ('logp', 'entropy', 'loss', 'ce', 'kl', 'lse', 'tail')
# What outputs= may ask for, and its dtype as callers have it; None: that of logp.
OUTPUTS = {'correct': torch.bool, 'argmax': torch.int64, 'lse': None, 'sum_p2': None, 'mean_logits': None}
NAMES = {(h, loss): ('logp',) + ('entropy',) * h + ('loss',) * loss
         for h in (False, True) for loss in (False, True)}


@functools.lru_cache(maxsize=256)
def config_of(what: str, name: str, start: int, vocab: int, **members: Any) -> Any:
    """The C config of that name for function @what, of shards that begin at @start; members: its own, or those of its logits."""
    kind = getattr(s, name.capitalize() + 'Config')
    raw = kind(struct_size=c.sizeof(kind), logits=s.LogitsOptions(vocab, start, temperature=1.0, scale=1.0))
    for member, value in members.items():
        at = raw.logits if hasattr(raw.logits, member) else raw
        setattr(at, member, value)
        if isinstance(value, int) and getattr(at, member) != value:
            raise ArgumentError("%s: %s is %d, which has too many bits" % (what, member, value))
    try:
        call('colo_%s_config_check' % name, raw)
    except ArgumentError as why:
        raise ArgumentError(str(why).replace(name, what, 1), why.status) from None
    return raw


def shard(comm: Comm, group: Any, columns: int, start: int | None, end: int | None,
          vocab: int | None) -> tuple[int, int]:
    """(first column, V) of this rank's shard of @group, whose communicator is @comm. Without V it is the
    largest end of all shards, gathered on the host once for a group and a shard; where a group serves vocabularies
    whose shards are equal on some ranks and differ on others, it has to be said."""
    size = comm.size
    if start is None:
        start = comm.rank * columns if vocab is None or size > 1 else 0
    if end is None:
        end = start + columns
    if end - start > columns or start < 0 or end < start:
        raise ArgumentError("vocab: [%d, %d) are not the ids of %d columns" % (start, end, columns))
    if vocab is not None:
        return start, vocab
    if size == 1:
        return start, end
    known = comm.__dict__.setdefault('_shards', {})
    if (start, end) not in known:
        host = comm if comm.backend != 'nccl' else groups.comm_of(group, torch.device('cpu'))
        with groups.telling(comm):
            ends = host.gather_bytes(b'%020d' % end)
        known[start, end] = max(map(int, ends))
    return start, known[start, end]


def targets_of(what: Named, rows: Rows, given: Any, support: Support | None, class_weight: ClassWeight | None, start: int, vocab: int,
               columns: int, heat: bool) -> View:
    """Of the targets of logits or hidden states @given, and of what comes with them. heat: do temperatures?"""
    like = torch.empty(rows.shape if rows.plain else (rows.count,), dtype=torch.int64, device=given.device)
    if support is None and class_weight is None and not heat:
        return View(like, '%s: %s' % (what, what.target), (rows.count,), (1,))
    made = Accompanied(like, '%s: %s' % (what, what.target), (rows.count,), (1,))
    made.listed, made.classes = support is not None, None if class_weight is None else Classes(
        class_weight, given, real_of(given.dtype), start, vocab, columns)
    made.heat = View(torch.empty(rows.count, dtype=torch.float32, device=given.device), what + ': temperature') if heat else None
    return made


def targets_for(rows: Rows, target: Any, ignore_index: int) -> Any:
    """As targets_of() has them; mostly the target itself."""
    if target.dtype is not torch.int64:
        target = target.to(torch.int64)
    if rows.plain and target.is_contiguous():
        return target
    target = rows.spread(target, ignore_index)
    return target.view(rows.shape) if rows.plain else target


class _Call:
    """The C structs of one call under way."""
    __slots__ = ('saved', 'logits', 'targets', 'mask', 'support', 'd_logits', 'out', 'made', 'upstream', 'on_host', 'batch',
                 'forward', 'backward', 'at_out', 'at_made', 'mean', 'of', 'outputs', 'upstreams', 'heats')

    def __init__(self, plan: 'LogprobPlan'):
        batch, out, saved, upstream = (getattr(s, plan.NAME.capitalize() + part) for part in ('Batch', 'Out', 'Saved', 'Upstream'))
        self.saved = saved(c.sizeof(saved), config=plan.config, logits=plan.logits.raw, valid=True)
        self.logits = self.saved.logits  # a view into it
        self.targets = plan.targets and plan.targets.copy()
        if plan.KEEPS:  # this one, too
            self.saved.targets = plan.targets.raw
            self.targets = self.saved.targets
        self.mask = plan.mask and plan.mask.copy()
        self.d_logits = self.logits if plan.in_place else s.Tensor.from_buffer_copy(plan.d_logits)
        self.out, self.made, self.upstream = out(c.sizeof(out)), saved(c.sizeof(saved)), upstream(c.sizeof(upstream))
        self.outputs = pointed(self.out, {name: plan.view(name) for name, _ in plan.out})
        self.upstreams = plan.gradient_views()
        self.on_host, self.mean, self.of = HostWorkspace(), None, 0  # the last two: NllPlan's
        self.batch = batch(c.sizeof(batch), *(t and c.pointer(t) for t in (self.logits, self.targets, self.mask)[:plan.INPUTS]))
        if isinstance(plan.targets, Accompanied):
            self.support = plan.targets.attach(self.targets, self.saved, self.batch)
        self.heats = pointed(self.batch, {name: view.copy() for name, view in plan.heats.items()})
        self.forward = c.addressof(plan.config), c.addressof(self.batch)
        self.at_out, self.at_made = c.addressof(self.out), c.addressof(self.made)
        self.backward = (c.addressof(self.saved), c.addressof(self.upstream),
                         c.addressof(self.d_logits))


class Plan:
    """What calls of the same shapes, strides, dtypes, device and options share: of a tensor [.., n] that is read as @rows, and
    of outputs."""
    __slots__ = 'what', 'rows', 'plain', 'config', 'device', 'cuda', 'real', 'out', 'grads', 'counts'

    def __init__(self, what: Named, of: Any, rows: Rows, config: Any, names: tuple[str, ...]):
        self.what, self.rows, self.plain, self.config, self.device = what, rows, rows.plain, config, of.device
        self.cuda, self.real = of.device.type == 'cuda', real_of(of.dtype)
        self.out = self.outputs(names)
        self.grads = [(i, 'd_' + name) for i, name in enumerate(names) if name in DIFFERENTIABLE]
        self.counts = [i for i, name in enumerate(names) if name not in DIFFERENTIABLE]

    def outputs(self, names: tuple[str, ...]) -> list[tuple[str, Any]]:
        """(name, what they are like) of tensors that outputs are written to"""
        kinds = {'correct': torch.uint8, 'argmax': torch.int64, 'n_valid': torch.int64, 'n_invalid': torch.int64}
        per_token = self.rows.shape if self.plain else (self.rows.count,)
        return [(name, like(() if name[0] == 'n' else per_token, kinds.get(name, self.real), self.device))
                for name in names]

    def view(self, name: str) -> s.Tensor:
        """The library's view of an output of that name, or of its gradient: all but the address."""
        kinds = {'correct': 'u8', 'argmax': 'i64', 'n_valid': 'i64', 'n_invalid': 'i64', 'ids': 'i64'}
        shape = (1,) if name[0] == 'n' else (self.rows.count, *self.trailing(name))
        return make(0, s.DTYPE[kinds[name]] if name in kinds else torch_dtype(self.real), shape, contiguous(shape),
                    *((s.MEM_CUDA, self.device.index) if self.cuda else (s.MEM_HOST, -1)))

    def trailing(self, name: str) -> tuple[int, ...]:
        """Axes of an output of that name behind that of the tokens."""
        return ()

    def gradient_views(self) -> dict[str, tuple[s.Tensor, Any]]:
        """A view of each upstream gradient, and a pointer to it."""
        views = {name: self.view(name[2:]) for _, name in self.grads}
        return {name: (view, c.pointer(view)) for name, view in views.items()}

    def gathered(self, out: list[Any]) -> list[Any]:
        """Those of the tokens that the caller has."""
        return out if self.plain else [
            t if name[0] == 'n' else self.rows.gather(t) for (name, _), t in zip(self.out, out)]

    def gradients(self, now: Any, upstream: Any, _stats: int) -> Any:
        """Says where the upstream gradients are; what it returns has to live as long as the call. stats:
        where that is which was kept."""
        held = []
        for i, name in self.grads:
            g, at = upstream[i], None
            if g is not None:
                if not (self.plain and g.is_contiguous()):
                    g = self.rows.spread(g, 0)
                held.append(g)
                view, at = now.upstreams[name]
                view.data = g.data_ptr()
            setattr(now.upstream, name, at)
        return held


class LogprobPlan(Plan):
    """Of logits that are read without a copy, and of their targets [shape]; losses.py has plans of other losses."""
    __slots__ = ('copies', 'in_place', 'logits', 'targets', 'mask', 'heats', 'd_logits', 'gradient', 'saved', 'workspace', 'calls',
                 'small', 'run_forward', 'run_backward')
    EXTRA = 0  # doubles that are kept for backward in addition to the library's
    NAME = 'logprob'  # of C functions and structs
    KEEPS = True  # does backward read targets
    INPUTS: int = 2  # tensors of a batch; with 3 targets are [T, n], and a mask tells which tokens count
    NEEDS = "%s: logits are a %s and target is a %s, expected torch tensors"
    IN_PLACE = ("%s: inplace_backward needs logits with contiguous columns whose rows do not overlap, found shape %s and "
                "strides %s",  # and if rows lie between
                "%s: inplace_backward would write the rows between those of a slice; shape %s, strides %s")

    def __init__(self, what: Named, given: Any, second: Any, mask: Any, names: tuple[str, ...], comm: Comm, tp_group: Any,
                 columns: Columns, in_place: bool, members: dict[str, Any], support: Support | None, class_weight: ClassWeight | None):
        """Checks the arguments of planned(). copies: do logits have to be copied?"""
        if given.dim() < 1 or not given.dtype.is_floating_point:
            raise ArgumentError("%s: logits are %s of %s, expected [..., Vl] of a floating-point dtype"
                                % (what, list(given.shape), given.dtype))
        self.check(what, given, second, mask)
        start, vocab = shard(comm, tp_group, given.shape[-1], *columns)
        logits, rows = rows_of(given)
        self.copies, self.in_place = logits is not given, in_place
        self.heats: dict[str, View] = {}  # temperatures of tokens, by their names in a batch with a mask
        if self.INPUTS == 2:
            members = logprob_members(members, vocab, names, class_weight)
            self.targets, self.mask = targets_of(what, rows, given, support, class_weight, start, vocab, rows.columns,
                                                 'has_temperature' in members), None
        else:
            second, mask = arranged(rows, second, mask)
            self.targets = None if second is None else View(
                second, '%s: %s' % (what, self.SECOND), (rows.count, second.shape[-1]), (second.shape[-1], 1))
            self.mask = None if mask is None else View(mask, what + ': mask', (rows.count,), (1,))
            for name in ('temperature', 'target_temperature'):
                if 'has_' + name in members:
                    self.heats[name] = View(torch.empty(rows.count, dtype=torch.float32, device=given.device), '%s: %s' % (what, name))
        config = config_of(what, self.NAME, start, vocab, order=rows.order, **members)
        if in_place and (self.copies or rows.gap):
            raise ArgumentError(self.IN_PLACE[not self.copies] % (what, list(given.shape), list(given.stride())))
        super().__init__(what, logits, rows, config, names)
        self.logits = View(logits, what + ': logits', (rows.count, rows.columns), (rows.stride, 1))
        dtype, mem, ordinal = self.logits.raw.dtype, self.logits.raw.mem, self.logits.raw.device
        self.d_logits = make(0, dtype, (rows.count, rows.columns), (max(rows.columns, 1), 1), mem,
                             ordinal)
        self.gradient = like(tuple(logits.shape) if rows.plain else (rows.count, rows.columns),
                             logits.dtype, self.device)
        self.workspace = size_of('colo_%s_workspace_size' % self.NAME, config, dtype, rows.count, comm.size)
        given_dtype = (dtype,) if self.INPUTS == 2 else ()
        self.saved = size_of('colo_%s_saved_size' % self.NAME, config, *given_dtype, rows.count) // 8
        kept = self.saved + self.EXTRA
        self.small = None if self.cuda or 8 * kept > SMALL else c.c_double * (kept + SLACK)
        self.calls: list[_Call] = []
        self.run_forward = entry('colo_%s_forward' % self.NAME)
        self.run_backward = entry('colo_%s_backward' % self.NAME)

    def memory(self, now: _Call, keeps: bool, size_of_workspace: int) -> tuple[Any, Any, Any, int]:
        """(what is kept for backward, its address; what holds workspace, its address). On the host what is
        small is no tensor, which would cost more."""
        kept = address = apart = None
        size, words = self.saved + self.EXTRA if keeps else 0, 0
        if size_of_workspace > SMALL:
            apart = torch.empty((size_of_workspace + 7) // 8 + SLACK, dtype=torch.float64, device=self.device)
            workspace = aligned(apart.data_ptr())
        elif self.cuda:
            workspace, words = 0, (size_of_workspace + 7) // 8
        else:
            workspace = now.on_host.of(size_of_workspace)
        if keeps and self.small is not None:
            kept = self.small()
            address = aligned(c.addressof(kept))
        elif keeps or words:
            held = torch.empty(size + words + 2 * SLACK, dtype=torch.float64, device=self.device)
            address = aligned(held.data_ptr())
            if words:
                apart, workspace = held, aligned(address + 8 * size)
            if keeps:  # from its first number on: what a hook or a recomputation brings back lies elsewhere
                begin = (address - held.data_ptr()) // 8
                kept = held if self.cuda and not begin else held[begin:begin + size + words + SLACK]
        return kept, address, apart, workspace

    @classmethod
    def check(cls, what: str, logits: Any, second: Any, _mask: Any) -> None:
        """ValueError, if what comes with the logits does not fit them."""
        check_target(what, second, list(logits.shape[:-1]), "the logits' shape without the last axis", logits.device,
                     'logits are')

    def call(self) -> _Call:
        """The structs of a call that is over, or new ones."""
        try:
            return self.calls.pop()  # in one step: threads may run backward at once
        except IndexError:
            return _Call(self)

    def launch(self, now: _Call, logits: Any, target: Any, mask: Any, comm: Comm, kept: int | None, workspace: int) -> None:
        """forward() in C. kept: where that is which backward needs."""
        self.logits.point(now.logits, logits)
        if target is not None:
            self.targets.point(now.targets, target)
        if mask is not None:
            self.mask.point(now.mask, mask)
        check(self.run_forward(*now.forward, comm.handle, now.at_out, None if kept is None else now.at_made, kept,
                               workspace, stream_of(self.device) if self.cuda else None))

    def forward(self, logits: Any, target: Any, comm: Comm, keeps: bool, more: Any) -> tuple[Any, Any]:
        """(outputs [shape], what backward needs: None unless @keeps). more: the mask"""
        now = self.call()
        try:
            out = made_like(self.out, now.outputs)
            stats, address, apart, workspace = self.memory(now, keeps, self.workspace)
            self.launch(now, logits, target, more, comm, address if keeps else None, workspace)
        except BaseException as why:
            groups.heard(comm, why)
            raise
        self.calls.append(now)
        del apart
        return self.gathered(out), stats

    def keep(self, ctx: Any, logits: Any, target: Any, stats: Any) -> None:
        ctx.plan, ctx.ended = self, False
        ctx.set_materialize_grads(False)
        kept = (logits, *target[:3]) if isinstance(target, tuple) else (logits, target)
        if self.small is None:
            ctx.save_for_backward(*kept, stats)
        else:
            ctx.stats = stats
            ctx.save_for_backward(*kept)

    def backward(self, ctx: Any, upstream: Any) -> Any:
        """The gradient of the logits; @upstream has one of each output, or None."""
        if ctx.ended:
            raise FailedError("%s: a second backward, but the first one wrote the gradient over the "
                              "logits (inplace_backward=True)" % self.what)
        logits, target, *rest = saved_tensors(ctx, self.what + ': the logits or the target')
        if isinstance(self.targets, Accompanied):
            target = target, rest.pop(0), rest.pop(0)
        stats = rest[0].data_ptr() if rest else aligned(c.addressof(ctx.stats))
        now = self.call()
        held = self.gradients(now, upstream, stats)
        logits = self.logits.again(now.logits, logits)
        if self.KEEPS:
            target = self.targets.again(now.targets, target)
        now.saved.memory = stats
        if self.in_place:
            d_logits = logits.detach()
            now.saved.valid = True  # the call before wrote over its logits
            ctx.ended = True
            written(logits)
        else:
            d_logits = torch.empty_like(self.gradient)
            now.d_logits.data = d_logits.data_ptr()
            if not self.plain:
                d_logits = self.rows.columns_of(d_logits)
        check(self.run_backward(*now.backward, stream_of(self.device) if self.cuda else None))
        self.calls.append(now)
        del held
        return d_logits


@Function
def VocabParallel(ctx: Any, logits: Any, second: Any, o: tuple[LogprobPlan, Comm, bool, Any]) -> Any:
    """(logits, what comes with them, (LogprobPlan, Comm, is a backward to be prepared, what else forward() of the plan
    takes)) -> the outputs that were asked for. Inside of a function autograd does not say whether gradients are
    wanted."""
    plan, comm, grad, more = o
    keeps = grad and ctx.needs_input_grad[0]
    out, stats = plan.forward(logits, second, comm, keeps, more)
    if keeps:
        plan.keep(ctx, logits, second if plan.KEEPS else None, stats)
    if plan.counts:
        ctx.mark_non_differentiable(*(out[i] for i in plan.counts))
    return tuple(out)


@VocabParallel.backward
def _(ctx: Any, *upstream: Any) -> Any:
    return ctx.plan.backward(ctx, upstream), None, None


# Names of the C config's members that calls of ours give, in this order.
MEMBERS = ('temperature', 'softcap', 'scale', 'label_smoothing', 'z_loss', 'ignore_index', 'chunk_size', 'segment')


def logprob_members(members: dict[str, Any], vocab: int, names: tuple[str, ...],
                    class_weight: ClassWeight | None) -> dict[str, Any]:
    """With what outputs are wanted, and segment -1 as the columns of one of 8 segments"""
    if members.get('segment') == -1:
        members['segment'] = -(-vocab // 128) * 16
    return dict(members, has_class_weight=class_weight is not None,
                **{'want_' + name: name in names for name in ('entropy', 'loss', *OUTPUTS)})


def planned(what: Named, logits: Any, second: Any, names: tuple[str, ...], tp_group: Any, columns: Columns,
            in_place: bool, values: tuple[Any, ...], members: tuple[str, ...] = MEMBERS, kind: Any = LogprobPlan,
            support: Support | None = None, more: Any = None, class_weight: ClassWeight | None = None,
            beside: tuple[Any, ...] = ()) -> tuple[Any, Any, tuple[Any, Comm, bool, Any]]:
    """(logits, what comes with them, (a plan of this kind, .., more)) as VocabParallel takes them. second: targets, or with
    3 inputs [.., n] or None, and more is the mask then, or None. beside: what else of tokens alike.of_tokens() compares."""
    masked = kind.INPUTS == 3
    mask, other = (more, more) if masked else (None, second)
    if not isinstance(logits, torch.Tensor) or not isinstance(other, torch.Tensor) and not (masked and other is None):
        raise ArgumentError(kind.NEEDS % (what, type(logits).__name__, type(other).__name__))
    device = logits.device
    heat, values, members = of_tokens(what, values, members, second.shape, device) if not masked else \
        of_rows(what, values, members, logits.shape[:-1], device)
    comm = groups.comm_of(tp_group, device, what + ': tp_group')
    kept = table(comm, '_logprobs')
    if logits.layout is not torch.strided:
        checked(logits, what + ': logits')
    key = (what, logits.shape, None if logits.is_contiguous() else logits.stride(), logits.dtype, device,
           second is None or (second.shape, second.dtype, second.device),
           mask is None or (mask.shape, mask.dtype, mask.device), names, columns, in_place, values, members, kind,
           support is None, meta(class_weight))
    plan = kept.found if key == kept.key else kept.get(key)  # mostly as in the call before
    if plan is None:
        plan = kept.add(key, kind(what, logits, second, mask, names, comm, tp_group, columns, in_place,
                                  dict(zip(members, values)), support, class_weight))
    if plan.copies:
        logits = logits.contiguous()
    if not masked and comm.check_level > 1:
        alike.compare(what, comm, tp_group, alike.of_tokens(second, heat, plan.config.ignore_index, *beside))
    if masked:
        second, more = arranged(plan.rows, second, mask)
        if heat:
            more = more, *(plan.rows.spread(t.given.detach().to(torch.float32), 1.0) for t in heat)
    elif not (second.dtype is torch.int64 and plan.plain and second.is_contiguous()):
        second = targets_for(plan.rows, second, plan.config.ignore_index)
    if support is not None or class_weight is not None or not masked and heat is not None:
        second = accompanied(what, second, plan, support, class_weight, heat)
    return logits, second, (plan, comm, torch.is_grad_enabled(), more)


def arranged(rows: Rows, second: Any, mask: Any) -> tuple[Any, Any]:
    """[.., n] and a mask, each of which may be None, as the library reads them."""
    if second is not None:
        second = second.contiguous() if rows.plain else rows.spread(second, 0)
    if mask is not None:
        mask = ((mask != 0).contiguous() if rows.plain else rows.spread(mask != 0, False)).view(torch.uint8)
    return second, mask


def check_target(what: str, target: Any, shape: list[int], why: str, device: Any, source: str) -> None:
    """ValueError, if it does not fit what the loss is of."""
    if list(target.shape) != shape:
        raise ArgumentError("%s: target is %s, expected %s, %s" % (what, list(target.shape), shape, why))
    if not of_integers(target):
        raise ArgumentError("%s: target is of %s, expected an integer dtype" % (what, target.dtype))
    if target.device != device:
        raise ArgumentError("%s: target is on %s, %s on %s" % (what, target.device, source, device))


def outputs(what: str, logits: Any, target: Any, names: tuple[str, ...], *, tp_group: Any = None, start: int | None = None,
            end: int | None = None, vocab: int | None = None, in_place: bool = False, support: Support | None = None,
            **members: Any) -> tuple[Any, ...]:
    """The outputs @names of logits [..., Vl] and target [...]; @members are the C config's."""
    return VocabParallel.apply(*planned(Named(what), logits, target, names, tp_group, (start, end, vocab), in_place,
                                        tuple(members.values()), tuple(members), support=support))


def real_of(dtype: Any) -> Any:
    """Of outputs per token, of logits or hidden states of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def first_of(given: dict[str, Any]) -> Any:
    """Logits or hidden states among the arguments of a loss"""
    return next(given[name] for name in ('vocab_parallel_logits', 'hidden', 'input') if name in given)


def per_token(given: dict[str, Any]) -> list[tuple[Any, Any]]:
    shape, real = given['target'].shape, real_of(first_of(given).dtype)
    return [(shape, real)] * (1 + bool(given.get('entropy')) + bool(given.get('loss'))) + [
        (shape, OUTPUTS[name] or real) for name in given.get('outputs') or ()]


def without_gradient(options: dict[str, Any]) -> tuple[int, ...]:
    """Which of per_token()'s"""
    first = 1 + bool(options.get('entropy')) + bool(options.get('loss'))
    return tuple(first + i for i, name in enumerate(options.get('outputs') or ()) if name not in DIFFERENTIABLE)


def names_of(what: str, entropy: Any, loss: Any, more: Any, support: Any) -> tuple[str, ...]:
    """What a call asks for. ValueError: what is no output, or asked for twice"""
    names = NAMES[bool(entropy), bool(loss)]
    if more is None:
        return names
    if not isinstance(more, (tuple, list)) or not all(name in OUTPUTS for name in more) or len(set(more)) < len(more):
        raise ArgumentError("%s: outputs is %r, expected a tuple of some of %s, each once" % (what, more, ', '.join(map(repr, OUTPUTS))))
    if support is not None and 'mean_logits' in more:
        raise ArgumentError("%s: outputs has 'mean_logits', which is over the vocabulary, and support is given; leave one out" % what)
    return (*names, *more)


def returned(out: tuple[Any, ...], more: Any, names: tuple[str, ...]) -> Any:
    """As callers have what they asked for"""
    if more is None:
        return out[0] if len(out) == 1 else out
    return tuple(t.view(torch.bool) if name == 'correct' else t for t, name in zip(out, names))


LOGPROB = Named('logprob')


@overload
def logprob(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, entropy: Literal[False] = False,
            loss: Literal[False] = False, **options: Unpack[LogprobOptions]) -> torch.Tensor: ...
@overload
def logprob(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, entropy: Literal[True], loss: Literal[False] = False,
            **options: Unpack[LogprobOptions]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def logprob(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, entropy: Literal[False] = False, loss: Literal[True],
            **options: Unpack[LogprobOptions]) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def logprob(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, entropy: Literal[True], loss: Literal[True],
            **options: Unpack[LogprobOptions]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def logprob(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, entropy: bool = False, loss: bool = False,
            outputs: Sequence[Output], **options: Unpack[LogprobOptions]) -> tuple[torch.Tensor, ...]: ...
@overload
def logprob(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, entropy: bool = False, loss: bool = False,
            outputs: Sequence[Output] | None = None, **options: Unpack[LogprobOptions]) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@operator(per_token, fixed=without_gradient)
def logprob(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, *, tp_group: Group | None = None, vocab: Vocab | None = None,
            entropy: bool = False, loss: bool = False, outputs: Sequence[Output] | None = None, temperature: float | torch.Tensor = 1.0,
            softcap: float | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100,
            inplace_backward: bool = False, support: Support | None = None, invariant: bool | int = False) -> Any:
    """Log-probability of targets under logits whose columns are shards of the vocabulary.

    logp = (x_t - M) - log Sum, x = logits / temperature, with a softcap softcap * tanh(logits / softcap) / temperature:
    docs/concepts/loss.md. Logits may have any strides; they are copied only if columns are not contiguous or rows overlap.
    Rows lie in one order on all ranks: if some ranks copied a transposed batch, all do, and if a shard is empty, all logits
    are contiguous. DTensors: docs/guides/sharded-heads.md#dtensors.

    Args:
        vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
        target: [...], ids of an integer dtype, the same on all ranks of tp_group. ignore_index gives 0, another one outside of
            [0, V) NaN.
        tp_group: the ranks that share the vocabulary; None: no others.
        vocab: V, of equal shards in rank order, or (the id of this rank's first column, V or None). Columns >= V are padding.
            Without V it is the end of the last shard, for which ranks are asked once a shard; say V if the group also serves
            another vocabulary whose shard is the same on some ranks.
        entropy: also return the entropy, in nats.
        loss: also return the cross entropy, with label_smoothing and z_loss.
        outputs: also return what is named, of the same read and gather: "correct" (bool: is the target the argmax?), "argmax" (int64:
            the id of the largest x, the lowest one on ties), "lse" (M + log Sum, differentiable), "sum_p2" (the sum of p^2),
            "mean_logits" (the mean of x over [0, V)). An ignored token has False, -1 and 0, a row of NaN False, -1 and NaN.
        temperature: > 0; or [...], one of each token, a constant of a floating-point dtype, the same on all ranks of tp_group; that
            of an ignored token is not read. On a GPU one that is not above 0 makes its token NaN.
        softcap: > 0, or None: no cap.
        label_smoothing: in [0, 1], of the loss alone; logp is never smoothed.
        z_loss: factor of (log Sum)^2 in the loss, >= 0.
        ignore_index: the target that counts for nothing.
        inplace_backward: the gradient is written over the logits; a later backward of another function that saved them is a
            RuntimeError.
        support: lists of ids that take the place of the vocabulary; entropy and loss are then theirs, too.
        invariant: True: the same bits on 1, 2, 4 and 8 ranks and for any tokens in a call, if the vocabulary is padded to a
            multiple of 128 and cut evenly; a number: the columns of a segment.

    Returns:
        logp [...], or a tuple (logp, entropy, loss) of those that were asked for, each differentiable in the logits; f32 (f64 of
        f64 logits), the same bits on every rank. With outputs a tuple: these, and behind them the outputs in their order.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks differ in targets or options, shards have a hole, or ranks all have the same logits.
        RuntimeError: a destroyed group, another rank's error, logits that were written since forward.
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> logits = torch.zeros(2, 4, requires_grad=True)
        >>> logp, entropy = ct.logprob(logits, torch.tensor([1, -100]), entropy=True)
        >>> [round(x, 3) for x in logp.tolist()]
        [-1.386, 0.0]
        >>> logp, argmax, lse = ct.logprob(logits, torch.tensor([1, 2]), outputs=("argmax", "lse"))
        >>> argmax.tolist(), [round(x, 3) for x in lse.tolist()]
        ([0, 0], [1.386, 1.386])
    """
    if not loss and (label_smoothing or z_loss):
        raise ArgumentError("logprob: label_smoothing and z_loss act on the loss, and logp is never "
                            "smoothed; ask for loss=True, or use nll()")
    names = names_of(LOGPROB, entropy, loss, outputs, support)
    return returned(VocabParallel.apply(*planned(
        LOGPROB, vocab_parallel_logits, target, names, tp_group, columns_of(LOGPROB, vocab), inplace_backward,
        scalars(LOGPROB, temperature, softcap, 1.0, label_smoothing, z_loss, ignore_index, 0, invariant, True),
        support=support)), outputs, names)
