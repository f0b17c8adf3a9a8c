# SPDX-License-Identifier: Apache-2.0
"""Ragged batches as an autograd function: what RaggedBridge and PackedBridge do with a call."""
import array
import collections
import ctypes as c
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

import torch

from .. import _structs as s
from .. import bridge as core
from .._lib import check, lib
from ..errors import STATUS, ArgumentError, FailedError
from ..layout import Layout, parts_of, replica_of
from ..packing import Repacking
from ..segments import Segments
from ..tensor import contiguous, make, torch_dtype
from . import arena as arenas
from . import ranks as groups
from .functions import Function
from .tensors import checked, said, stream_of
from .ticket import Asked, Flight

KEPT = 8  # batches of other tables
Tables = Union[Segments, Repacking]


class _Batch:
    """A batch of the library, and the rows that its forward writes."""

    def __init__(self, batch: core.Batch):
        self.batch = batch
        self.most: tuple[int, int] | None = None  # of the fullest ranks, by _most_rows()
        self.merged: _Batch | None = None  # of a packed one: the same tables, to say where its rows go
        self._written: Any = None

    def written(self, device: Any) -> Any:
        """Indices of rows of y, on @device."""
        if self._written is None or self._written._version:  # index() gave it to somebody who wrote to it
            with torch.inference_mode(False):  # a later call's backward may need it
                runs = torch.tensor(self.batch.runs(), dtype=torch.int64, device='cpu').reshape(-1, 2)
                first, count = runs[:, 0], runs[:, 1]
                skipped = torch.repeat_interleave(first - (count.cumsum(0) - count), count)
                self._written = (torch.arange(len(skipped), device='cpu') + skipped).to(device)
        return self._written


def _most_rows(segments: Segments, src: Layout, dst: Layout, merged: bool, full: bool) -> tuple[int, int]:
    """Rows of the fullest x, and of the fullest d_y that is summed (merged), or at most of the fullest y (packed)."""
    host: dict[str, Any] = {'dtype': torch.int64, 'device': 'cpu'}  # whatever the default device is
    tables, packing = segments._tables, segments.packing
    if packing is not None:
        tables = dict(tables, seq_len=packing._tables['seq_len'], seq_dp=packing._tables['seq_dp'] or array.array('q', bytes(8 * len(packing))))
    rows, made, seq, seq_len, seq_dp = (torch.frombuffer(t, dtype=torch.int64) if t else torch.zeros(0, **host)
                                        for t in (tables[n] for n in ('rows', 'src', 'seq', 'seq_len', 'seq_dp')))

    def most(replicas: int, of: Any, count: Any) -> int:
        return int(torch.zeros(replicas, **host).index_add_(0, of, count).max())
    x = most(parts_of(src, s.AXIS_SAMPLES), made, rows)
    replicas, axis, y = parts_of(dst, s.AXIS_SAMPLES), [(seq_dp, seq_len)], [(seq_dp.index_select(0, seq), rows)]
    at_most = [most(replicas, *t) for t in (axis if merged else y)]
    if not full and packing is None:  # no more than its part of the sequences
        at_most.append(most(replicas, *axis[0]) // parts_of(dst, s.AXIS_ROWS))
    return -(-x // parts_of(src, s.AXIS_ROWS)), min(at_most)


class Ragged:
    """The library's bridges of one Bridge, on one device: packed, and merged into the caller's buffers. Each is made when it
    is first asked for, by all ranks together. No cycle holds them: a dropped Bridge gives its memory back at once."""

    def __init__(self, owner: Any, comm: Any, device: Any):
        self.owner, self.comm, self.device = weakref.proxy(owner), comm, device
        self._bridges: dict[bool, core.Bridge] = {}
        self._batches: collections.OrderedDict[Any, _Batch] = collections.OrderedDict()
        self._asked: dict[Any, _Batch] = {}  # at most one, which this rank alone asked for
        self.telling = groups.telling(comm, before=lambda me=weakref.proxy(self): me.forget())
        # The last calls, as many as batches, so that those of each are kept; the last one last.
        self.calls: list[_Call] = []
        self._capturing = arenas.capturing(device)
        self._graphs: dict[int, Any] = {}  # by address: indices that a graph reads, as long as there is the bridge
        self.workspace: Any = None  # which peers reach
        if owner.transport != 'nccl' and arenas.possible(comm, device):
            self.workspace = arenas.Workspace(comm, device, owner.transport == 'peer', owner.buffers is None)

    def reserve(self, batch: _Batch, segments: Tables, merged: bool, xs: list[Any], widths: list[int]) -> None:
        """Memory for what peers reach of this call and of its backward; collective where it grows. The same on
        all ranks: tables, widths and dtypes tell how much the fullest of them needs."""
        if self.workspace is None:
            return
        owner, dtypes = self.owner, [torch_dtype(x.dtype) for x in xs]
        rows = batch.most = batch.most or (segments.most_rows(owner.src, owner.dst) if isinstance(segments, Repacking) else
                                           _most_rows(segments, owner.src, owner.dst, merged, owner._options['output'] == 'full'))
        sums = segments._sums(owner._options, owner.dst)
        x, y = (arenas.nbytes_of_call([(rows[side], t.shape[1] if side == 0 else w, n) for t, w, n in zip(xs, widths, dtypes)])
                for side in (0, 1))
        # x of a merged call is read, y of a packed one written; d_y is read where it is summed, d_x written elsewhere.
        there, back = (x if merged else y), 0 if owner.frozen else (y if sums else x)
        if not self.workspace.reserve(max(there, back), (0 if merged else y) + (0 if sums else back)):
            self.workspace = None

    def batch(self, segments: Tables, merged: bool, carried: bool = True) -> _Batch:
        """The batch of these tables. Ranks find or make it alike, because content decides: a batch compares
        its tables between the ranks in its first call, to which all of them have to come. So a rank that
        asks alone, not carried, changes nothing of which batches are kept."""
        key = merged, segments
        made = self._batches.get(key) or self._asked.get(key)
        if (made is None or carried and key not in self._batches) and self._capturing():
            raise FailedError("bridge: a capture has new tables: found %r, expected those of an earlier call, of which "
                              "the last %d are kept; run one step with them before" % (segments, KEPT),
                              STATUS['ERR_STATE'])
        if made is None:
            if merged not in self._bridges:
                if self.workspace is not None and not self.workspace.reserve(1):
                    self.workspace = None
                self._bridges[merged] = self.owner._ragged_bridge(self.comm, self.device, merged)
            made = _Batch(segments._batch(self._bridges[merged]))
        if not carried:
            if key not in self._batches:
                self._asked = {key: made}
            return made
        self._asked.pop(key, None)
        self._batches[key] = made
        self._batches.move_to_end(key)
        if len(self._batches) > KEPT:
            self._batches.popitem(last=False)
        return made

    def prepared(self, xs: list[Any], segments: Tables, intos: list[Any], merged: bool) -> '_Call | None':
        """The call on such tensors with these tables, so that only what may change without them is left to check. None: there
        is none yet. Its batch becomes the last that was used, as it does on ranks that have to prepare it."""
        kinds, calls = [[_kind(t) for t in side] for side in (xs, intos)], self.calls
        for i in range(len(calls) - 1, -1, -1):
            call = calls[i]
            if segments is call.segments and merged is call.merged and kinds == call.kinds:
                self.latest(call)
                return call
        return None

    def latest(self, call: '_Call') -> bool:
        """Makes it the last one that was used, in the same order on all ranks. False: it was forgotten."""
        calls = self.calls
        if calls and calls[-1] is call:
            return True
        for i, one in enumerate(calls):
            if one is call:
                calls.append(calls.pop(i))
                self._batches.move_to_end((call.merged, call.segments))
                return True
        return False

    def add(self, call: '_Call') -> '_Call':
        self.calls.append(call)
        del self.calls[:-KEPT]
        return call

    def forget(self) -> None:
        """Batches and memory, after an error, when ranks may have different ones."""
        self._batches.clear(), self._asked.clear(), self.calls.clear()
        if self.workspace is not None:
            self.workspace.forget()

    def written(self, batch: _Batch, device: Any) -> Any:
        """Indices of rows of y, for work on the current stream."""
        index = batch.written(device)
        if self._capturing():
            self._graphs[index.data_ptr()] = index
        return index

    def destroy(self) -> None:
        self.forget()
        for bridge in self._bridges.values():
            bridge.destroy()


class _Views:
    """The library's array of tensors of these shapes, which only lack addresses. what: their name in errors."""

    def __init__(self, shapes: list[Any], dtypes: list[Any], device: Any, what: str):
        place = (s.MEM_CUDA, device.index) if device.type == 'cuda' else (s.MEM_HOST, -1)
        self.array = core.views([make(0, torch_dtype(dtype), shape, contiguous(shape), *place)
                                 for shape, dtype in zip(shapes, dtypes)])
        self.shapes, self.what, self.raws = shapes, what, [self.array[i] for i in range(len(shapes))]

    def of(self, tensors: Sequence[Any]) -> Any:
        for raw, t, shape in zip(self.raws, tensors, self.shapes):
            raw.data = address = t.data_ptr()
            if not address or t.shape != shape or not t.is_contiguous() or t.is_neg():
                return core.views([checked(t, '%s[%d]' % (self.what, i)) for i, t in enumerate(tensors)])
        return self.array


class _Call:
    """What forwards and backwards with the tables, shapes and dtypes of one call share: all but addresses. It does not hold the
    Ragged, which holds it; each backward that is to come does."""

    def __init__(self, ragged: Ragged, batch: _Batch, segments: Tables, xs: list[Any], widths: list[int],
                 intos: list[Any], merged: bool):
        self.ragged, self.held, self.segments, self.merged = weakref.ref(ragged), batch, segments, merged
        self.n, self.widths = len(xs), widths
        self.grad_scale = ragged.owner.grad_scale
        self.sums = segments._sums(ragged.owner._options, ragged.owner.dst)
        self.kinds = [[_kind(t) for t in side] for side in (xs, intos)]
        self.floating = [i for i, x in enumerate(xs) if x.dtype.is_floating_point]
        self.passed = [] if ragged.owner.frozen else self.floating  # whose ys have gradients
        self.constant = [i for i in range(self.n) if i not in self.passed]
        rows = batch.batch.rows[1]
        sides = [x.shape for x in xs], [(intos[i].numel() // w if merged and w else rows, w) for i, w in enumerate(widths)]
        self.shapes = sides[0]
        # by pass: views of what is given and of what is written
        self.views = [[_Views([sides[side][i] for i in taken], [xs[i].dtype for i in taken], ragged.device, name)
                       for side, name in order]
                      for taken, order in ((range(self.n), ((0, 'x'), (1, 'y'))), (self.floating, ((1, 'd_y'), (0, 'd_x'))))]
        library = lib()
        self.entries = library.colo_batch_forward, library.colo_batch_backward

    def run(self, backward: bool, given: Sequence[Any], out: Sequence[Any], stream: int | None,
            flight: Flight | None = None, follows: bool = True) -> None:
        """One call of the library on tensors [rows, features]. flight: it is started there, and not finished. follows: a
        backward follows forward."""
        ragged = self.ragged()
        ragged.telling.doing = {'requires_grad': follows}
        with ragged.telling:
            if not (backward or ragged.owner.frozen):
                self.held.batch._bridge.expect_backward(follows)
            reached = self._reached(backward, given, out, stream)
            arrays = [views.of(tensors) for views, tensors in zip(self.views[backward], reached)]
            if flight is None or any(a is not b for a, b in zip((*given, *out), (*reached[0], *reached[1]))):
                check(self.entries[backward](self.held.batch.handle, *arrays, len(given), stream))
            else:
                flight.begin(('batch_forward', 'batch_backward')[backward], self.held.batch.handle,
                             *(c.addressof(array) for array in arrays), len(given), stream,
                             held=[t.detach() for t in (*given, *out)])
            if reached[1] is not out:
                for t, here in zip(out, reached[1]):
                    if here is not t:
                        t.copy_(here)

    def gradients(self, d_ys: Sequence[Any], flight: Flight | None = None) -> list[Any]:
        """Of each x, from those of each y; None without one."""
        d_xs: list[Any] = [None] * self.n
        stream = stream_of(self.ragged().device)
        for i in self.floating:
            d_xs[i] = self.empty(d_ys[i], self.shapes[i], stream)
        self.run(True, [d_ys[i] for i in self.floating], [d_xs[i] for i in self.floating], stream, flight)
        return d_xs

    def empty(self, like: Any, shape: Any, stream: int | None) -> Any:
        """A new output, where peers reach it if they write it and there is space."""
        workspace = self.ragged().workspace
        return like.new_empty(shape) if workspace is None else workspace.empty(like, shape, stream)

    def _reached(self, backward: bool, given: Any, out: Any, stream: int | None) -> tuple[Any, Any]:
        """Input and output. The one that peers reach is in memory that they reach: y, or x of a merged call; d_x, or
        d_y if gradients are added up."""
        workspace = self.ragged().workspace
        if workspace is None:
            return given, out
        writes = not (self.sums if backward else self.merged)
        rows = self.held.batch.rows[backward != writes]
        mine = out if writes else given
        if rows == 0 or any(len(t) != rows for t in mine):  # the library says what is wrong
            return given, out
        here = workspace.instead(mine, stream, not writes)
        return (given, here) if writes else (here, out)


@Function
def CarryRagged(ctx: Any, call: _Call, flight: Flight | None, intos: Any, follows: bool, _anchor: Any, *xs: Any) -> Any:
    """ys [rows, features] from xs: new tensors, or the memory of the buffers that are given, of which Written tells autograd."""
    ctx.call, ctx.ragged, ctx.flight, stream = call, call.ragged(), flight, stream_of(call.ragged().device)
    if call.merged:
        flat: Any = [into.detach().view(-1, width) for into, width in zip(intos, call.widths)]
    else:
        rows = call.held.batch.rows[1]
        flat = tuple(call.empty(x, (rows, width), stream) for x, width in zip(xs, call.widths))
    call.run(False, xs, flat, stream, flight, follows)
    # Autograd refuses that others write into a view which a function returns: Written does, and Finish.
    ys = tuple(t.new_empty(0).set_(t) for t in flat) if call.merged else flat
    if call.constant:
        ctx.mark_non_differentiable(*(ys[i] for i in call.constant))
    return ys


@CarryRagged.adjoint
def _(ctx: Any, *d_ys: Any) -> Any:
    call, flight = ctx.call, ctx.flight
    if flight is not None and flight.back:  # finish's backward has begun it
        d_xs = flight.landed()
    else:
        d_xs = call.gradients(d_ys)
    if call.grad_scale != 1:
        d_xs = [None if d is None else d * call.grad_scale for d in d_xs]
    return (None, None, None, None, None, *d_xs)


@Function
def Written(ctx: Any, into: Any, call: _Call, y: Any) -> Any:
    """(into, a call, its y in the memory of into) -> into. Rows that were written lose the gradient of what was there. Of a
    function that writes into a view, autograd takes the first input's gradient for the view's, and allows it one output. So
    each buffer has a function of its own, and into comes first."""
    ctx.call, ctx.ragged, ctx.shape = call, call.ragged(), y.shape
    ctx.mark_dirty(into)
    if ctx.needs_input_grad[0]:
        call.held.written(into.device)  # before a CUDA graph is captured, not in it
    return into


@Written.adjoint
def _(ctx: Any, d_into: Any) -> Any:
    d_y, call, before = d_into.reshape(ctx.shape), ctx.call, None
    if ctx.needs_input_grad[0]:
        before = d_y.index_fill(0, ctx.ragged.written(call.held, d_y.device), 0).view(d_into.shape)
    return before, None, d_y


def _rows_of(x: Any) -> Any:
    """A nested tensor's rows, one after the other."""
    if not getattr(x, 'is_nested', False):
        return x
    if x.layout is getattr(torch, 'jagged', ()):
        if x.lengths() is not None:
            raise ArgumentError("bridge: x is a jagged tensor with holes; call contiguous() on it first")
        return x.values()
    return torch.cat(x.unbind())


def _list(t: Any) -> list[Any]:
    return list(t) if isinstance(t, (list, tuple)) else [t]


def _kind(t: Any) -> Any:
    """What its checks depend on; None: no tensor, or a nested one, whose checks read more."""
    return (t.shape, t.dtype, t.device, t.stride()) if isinstance(t, torch.Tensor) and not getattr(
        t, 'is_nested', False) and t.layout is torch.strided else None


def _check_x(x: Any, what: str, like: Any, device: Any) -> Any:
    """x as [rows, features]; without rows if the rank holds none of the source."""
    if x is None and isinstance(like, torch.Tensor):
        return like.detach().new_empty((0, like.shape[-1] if like.dim() else 0))
    if not isinstance(x, torch.Tensor):
        raise ArgumentError("bridge: %s is a %s, expected a torch.Tensor%s" % (
            what, type(x).__name__, ', or like= a tensor of its dtype, device and features' if x is None else ''))
    x = _rows_of(x)
    if x.layout is not torch.strided:
        raise ArgumentError("bridge: %s has layout %s, expected torch.strided" % (what, x.layout))
    if x.dim() != 2:
        raise ArgumentError("bridge: %s is %s, expected [rows, features]" % (what, list(x.shape)))
    if x.device != device:
        raise ArgumentError("bridge: %s is on %s, expected %s, as the first tensor" % (what, x.device, device))
    torch_dtype(x.dtype, 'bridge: ' + what)
    return x


def _check_into(into: Any, what: str, x: Any, width: int) -> None:
    """Can the rows of x be written into it."""
    if not isinstance(into, torch.Tensor) or into.layout is not torch.strided or into.dim() < 2:
        raise ArgumentError("bridge: %s is %s, expected a torch.Tensor of [.., positions, features]" % (
            what, said(into, '%(shape)s')))
    for name, found, expected in (('of dtype', into.dtype, x.dtype), ('on', into.device, x.device),
                                  ('of features:', into.shape[-1], width)):
        if found != expected:
            raise ArgumentError("bridge: %s is %s %s, expected %s, as x gives it" % (what, name, found, expected))
    try:
        into.detach().view(-1, width)
    except RuntimeError:
        raise ArgumentError("bridge: %s has shape %s and strides %s, expected positions that lie one behind the "
                            "other; call contiguous() on it first" % (what, list(into.shape), into.stride())) from None


def _check_order(owner: Any, segments: Any, into: Any, what: str, rank: int) -> None:
    """Positions of a sequence lie one behind the other. [positions, sequences, features] has as many, in another order."""
    if into.dim() != 3 or segments.packing is not None:
        return
    length, count = into.shape[:2]
    parts = parts_of(owner.dst, s.AXIS_ROWS) if owner._options['output'] == 'sharded' else 1
    mine = [n for n, at in zip(segments.seq_len, segments.seq_dp) if at == replica_of(owner.dst, rank)]
    if min(length, count) > 1 and length != count == len(mine) and set(mine) == {length * parts}:
        raise ArgumentError("bridge: %s is %s, and the tables have %d sequences of %d positions; expected [%d, %d, %d]: "
                            "transpose(0, 1).contiguous()" % (what, list(into.shape), count, length * parts, count, length, into.shape[2]))


def _is_view(into: Any) -> bool:
    """Is it a view with history. A write in place would give the view another one, without the hooks that it has, as FSDP2's
    on what a module returns."""
    return isinstance(into, torch.Tensor) and into.requires_grad and into._base is not None


def _check_leaf(into: Any, what: str) -> None:
    """Does forward write over a leaf."""
    for t, words in ((into, ''), (into._base, 'a view of ')):
        if t is not None and t.is_leaf and t.requires_grad:
            raise ArgumentError("bridge: %s is %sa leaf that requires grad, which forward would write over; pass "
                                "what an embedding layer returned, or clone() it" % (what, words))


def _prepared(self: Any, x: Any, segments: Any, into: Any, like: Any, told: Any) -> Any:
    """(xs, intos, features of each y); all that this rank can know by itself is refused here."""
    if not isinstance(segments, Repacking if self.kind == 'packed' else Segments):
        raise ArgumentError("bridge: %s, expected %s" % (
            "src is None" if self.kind == 'packed' and segments is None else "segments is a " + type(segments).__name__,
            "src= and dst=, colobridge.Packing" if self.kind == 'packed' else "colobridge.Segments"))
    if told is None:
        raise ArgumentError("bridge: x is a %s, expected a torch.Tensor, or like= one" % type(x).__name__)
    if self.transport == 'peer' and told.device.type != 'cuda':
        raise ArgumentError(arenas.NO_PEERS % told.device)
    intos = [] if into is None else _list(into)
    xs = [None] * max(len(intos), 1) if x is None else _list(x)
    if into is not None and len(xs) != len(intos) or not xs:
        raise ArgumentError("bridge: %d tensors and %d buffers to write them into; expected as many of both"
                            % (len(xs), len(intos)))
    names = ['[%d]' % i if len(xs) > 1 else '' for i in range(len(xs))]
    parts = self._parts[2], self._dst_features
    if intos and x is None:
        xs = [like if like is not None else None if t is None else
              t.detach().new_empty((0, t.shape[-1] * parts[1] // parts[0])) for t in intos]
        like = None
    for t, name in [*zip(xs, ['x' + n for n in names]), *zip(intos, ['into' + n for n in names])]:
        if hasattr(t, 'placements'):
            raise ArgumentError("bridge: %s is a DTensor with %s, expected a plain tensor, this rank's part" % (name, t.placements))
    xs = [_check_x(t, 'x' + name, like, told.device) for t, name in zip(xs, names)]
    widths = [t.shape[1] * parts[0] // parts[1] for t in xs]
    for t, name, x, width in zip(intos, names, xs, widths):
        if t is not None:
            _check_into(t, 'into' + name, x, width)
    if self._checked is not segments:  # here, so that ranks hear of it, which may be in a batch that was compared
        segments.check(self.src, self.dst)
        self._checked = segments
    return xs, intos, widths


def _placed(ragged: Ragged, batch: _Batch, into: Any, name: str, y: Any, add: bool, inplace: bool) -> Any:
    """into with the packed rows y at their positions, or added there: PyTorch's operation, also in backward."""
    rows = into.view(-1, y.shape[1]) if inplace else into.reshape(-1, y.shape[1])
    where = batch.merged.batch.rows[1]
    if rows.shape[0] != where:
        raise ArgumentError("bridge: %s is %s, of %d positions, expected %d, as the tables have for this rank"
                            % (name, list(into.shape), rows.shape[0], where))
    what = ('index_add' if add else 'index_copy') + '_' * inplace
    made = getattr(rows, what)(0, ragged.written(batch.merged, y.device), y)
    return into if inplace else made.view(into.shape)


class _Last(NamedTuple):
    """One of the last calls of a packed bridge, which had one tensor."""
    tables: Repacking
    ragged: Ragged
    call: _Call


def again(self: Any, x: Any, src: Any, dst: Any) -> Any:
    """The result of a call that differs from one of the last ones in values alone, without what it would find again; None: it
    differs."""
    for tables, ragged, call in self._again or ():
        if tables.dst is dst and tables.src is src and call.kinds[0][0] == _kind(x):
            break
    else:
        return None
    grads = torch.is_grad_enabled() and call.passed
    if grads and not x.requires_grad or ragged.comm.told[0] or not groups.known(self.group) or not ragged.latest(call):
        return None
    return CarryRagged.apply(call, None, (), bool(grads), None, x if grads else x.detach())[0]


def asked(self: Any, given: Any, segments: Any, into: Any, like: Any, add: bool, inplace: bool | None) -> Asked:
    """A call of a ragged bridge. Rows are merged by the library if all go into buffers that are written in place; else they
    come packed, and those that have a buffer are placed there. A copy of a buffer is written in place, too, so ranks need
    not have one alike."""
    if inplace is None:
        inplace = True
        into = [t.clone() if _is_view(t) else t for t in into] if isinstance(into, (list, tuple)) else (
            into.clone() if _is_view(into) else into)
    told = given if isinstance(given, torch.Tensor) else next(
        (t for t in _list(given) + _list(into) + [like] if isinstance(t, torch.Tensor)), None)
    device = torch.device('cpu') if told is None else told.device
    ragged = self._ragged.get(device)
    xs, intos = _list(given), [] if into is None else _list(into)
    merged = bool(intos) and inplace and not add and not any(t is None for t in intos)
    names = ['into[%d]' % i if len(intos) > 1 else 'into' for i in range(len(intos))]
    if into is None and (add or not inplace):
        raise ArgumentError("bridge: %s is given without into; expected the tensor that rows go to"
                            % ('add=True' if add else 'inplace=False'))
    call = None if ragged is None else ragged.prepared(xs, segments, intos, merged)
    if call is not None:
        widths = call.widths
    else:
        xs, intos, widths = _prepared(self, given, segments, into, like, told)
    for t, name in zip(intos, names):
        if inplace and t is not None:
            _check_leaf(t, name)
    found, ragged = ragged, self._ragged_of(device)
    if call is None or found is not ragged:  # another communicator
        with ragged.telling:
            batch = ragged.batch(segments, merged)
            if intos and not merged and batch.merged is None:
                batch.merged = ragged.batch(segments, True, carried=False)
            ragged.reserve(batch, segments, merged, xs, widths)
            for t, name in zip(intos, names):
                if t is not None:
                    _check_order(self, segments, t, name, ragged.comm.world_rank(ragged.comm.rank))
            call = ragged.add(_Call(ragged, batch, segments, xs, widths, intos, merged))
    if self.kind == 'packed':
        if isinstance(given, torch.Tensor) and call.kinds[0][0] is not None and self._ranks is not None and len(self._ranks) > 1:
            others = [last for last in self._again or () if last.ragged is ragged and last.call is not call]
            self._again = [*others[-3:], _Last(segments, ragged, call)]
    grad = torch.is_grad_enabled() and not self.frozen and call.floating
    if self.frozen:
        xs = [x.detach() for x in xs]
    # y has a gradient on every rank, or on none: also on those whose x is without rows
    anchor = torch.empty(0, device=device, requires_grad=True) if grad and not any(
        xs[i].requires_grad for i in call.floating) else None

    def arrived(ys: Any) -> Any:
        if merged:
            for buffer, y in zip(intos, ys):
                Written.apply(buffer, call, y)
            ys = tuple(intos)
        elif intos:
            with ragged.telling:
                ys = tuple(y if t is None else _placed(ragged, call.held, t, name, y, add, inplace)
                           for y, t, name in zip(ys, intos, names))
        return ys if isinstance(given, (list, tuple)) or isinstance(into, (list, tuple)) else ys[0]

    def begun(d_ys: Any, back: Flight) -> Any:
        of = dict(zip(call.passed, d_ys))
        return call.gradients([of.get(i) for i in range(call.n)], back)
    return Asked(device, call.held.batch, lambda flight: CarryRagged.apply(call, flight, intos, bool(grad), anchor, *xs), begun, call.passed,
                 arrived)
