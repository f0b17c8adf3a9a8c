# SPDX-License-Identifier: Apache-2.0
"""Calls of a bridge of uniform batches as autograd functions, and the memory that peers write into."""
import ctypes as c
import weakref
from typing import Any

import torch

from .. import _structs as s
from .. import bridge as core
from .._lib import check
from ..comm import Comm
from ..errors import STATUS, ArgumentError, Error, FailedError
from ..tensor import contiguous, make, torch_dtype
from . import arena as arenas
from . import moves
from . import ranks as groups
from .functions import Function
from .ready import entry
from .tensors import checked, stream_on
from .ticket import Flight

_FITTING = 1024  # shapes that are known to fit the memory


def about(shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    """What a call is about, for ranks that compare it after a mismatch."""
    return dict(zip(('samples', 'rows', 'features', 'positions'), shape), dtype=str(dtype))


def _grown(need: int, has: int) -> int:
    """At least what is needed, and a quarter more than there is if that is too little."""
    return has if need <= has else max(need, has * 5 // 4)


class Core:
    """The bridge of one dtype on one device of a Bridge, which takes one shape after the other, and the memory that peers
    write into."""

    def __init__(self, owner: Any, comm: Comm, shape: tuple[int, ...], dtype: Any, device: Any):
        self.comm, self.device, self.dtype, self.shape = comm, device, torch_dtype(dtype), shape
        self._between = owner.src, owner.dst, owner._options, comm
        self.no_grad, self.grad_scale = owner.frozen or not dtype.is_floating_point, owner.grad_scale
        self.buffers = 0 if owner.buffers and str(dtype) == 'torch.bool' else owner.buffers  # blocks are made as bytes
        self.region: arenas.Region | None = None
        self._graphs: list[arenas.Region] = []  # regions that a graph has
        self.arenas: Any = weakref.WeakSet()  # in the region
        self._fits: dict[tuple[int, ...], tuple[bool, bool]] = {}  # shapes that do: what is reached of this rank
        transport, reachable = owner.transport, arenas.possible(comm, device)
        self._needed = transport == 'peer'
        if self._needed and device.type != 'cuda' and not reachable:
            raise ArgumentError(arenas.NO_PEERS % device)
        if reachable and owner._options['algo'] == 'exact' and transport != 'nccl' and self._fit(shape):
            transport = 'peer'
        self.bridge, far = owner._by_peers('nccl' if transport == 'auto' else transport, lambda by: core.Bridge(
            comm, owner.src, owner.dst, shape, dtype=s.DTYPES[self.dtype], device=device.type, transport=by,
            allocator=arenas.allocator(device),
            **dict(owner._options, **{'grad': 'none'} if self.no_grad else {})))
        if far:
            self.region = None

    def _reach(self, shape: tuple[int, ...], rank: int) -> Any:
        return moves.reach(*self._between, shape, self.dtype, self.no_grad, rank)

    def stays(self, shape: tuple[int, ...], direction: str) -> Any:
        return moves.stays(*self._between, shape, self.no_grad, direction)

    def _fit(self, shape: tuple[int, ...]) -> bool:
        """Have memory for a shape; what all ranks need is the same everywhere, so all of them come to make it, or
        none. False on all ranks: there is no such memory."""
        if shape in self._fits:
            return True
        each = [self._reach(shape, self.comm.world_rank(r)) for r in range(self.comm.size)]
        counts = max(e[2][0] for e in each), max(e[2][1] for e in each)
        reached = any(e[0][0] for e in each), any(e[0][1] for e in each)
        old, sums = self.region, any(e[1] for e in each)
        if old is not None and old.fits(counts, reached):
            self._fitting(shape, each)
            return True
        if old is not None:
            if old._capturing():
                raise FailedError("bridge: a capture needs memory that peers reach for %s, and there is less; run one "
                                  "step of this shape before" % (shape,), STATUS['ERR_STATE'])
            reached = reached[0] or old.reached[0], reached[1] or old.reached[1]
            counts = _grown(counts[0], old.counts[0]), _grown(counts[1], old.counts[1])
        own, nbytes = self.buffers or 0, arenas.nbytes_of(counts, self.dtype, reached, sums, self.buffers or 0)
        memory = arenas.memory_of(self.comm, nbytes, self._needed, old is not None)
        if memory is None:
            return False
        if old is not None and old.captured:
            self._graphs.append(old)
        self.region = arenas.Region(memory, self.device, self.dtype, counts, reached, sums, own)
        for arena in self.arenas:
            arena.release()
        del old  # and its pool
        outputs = arenas.nbytes_of(counts, self.dtype, reached, sums, 1) - nbytes if self.buffers is None else 0
        self.region.pool = arenas.Pool(self.comm, self.device, outputs)
        self._fits.clear()
        self._fitting(shape, each)
        return True

    def _fitting(self, shape: tuple[int, ...], each: list[Any]) -> None:
        if len(self._fits) >= _FITTING:
            self._fits.clear()
        self._fits[shape] = each[self.comm.rank][0]

    def reached(self, shape: tuple[int, ...]) -> tuple[bool, bool]:
        """The tensors of this rank that peers reach in the shape that the bridge has."""
        return self._fits.get(shape) or self._reach(shape, self.comm.world_rank(self.comm.rank))[0]

    def take(self, shape: tuple[int, ...]) -> None:
        """Be of this shape; all ranks come to the same."""
        if shape == self.shape:
            return
        try:
            if self.region is not None:
                self._fit(shape)
            self.bridge.reshape(shape)
        except Error as why:
            groups.refuse(self.comm, why)
            raise
        self.shape = shape


class Ready:
    """A shape of a bridge, with views that only lack an address: most tensors are contiguous."""

    def __init__(self, core: Core, shape: tuple[int, ...]):
        core.take(shape)
        self.core, self.shape, self.bridge, device = core, shape, core.bridge, core.device
        self.shapes = core.bridge.src_shape, core.bridge.dst_shape
        mem, ordinal = (s.MEM_CUDA, device.index) if device.type == 'cuda' else (s.MEM_HOST, -1)
        self.views = [make(0, core.dtype, shape, contiguous(shape), mem, ordinal) for shape in self.shapes]
        self.stream, self.contiguous, self.strided = stream_on(device), torch.contiguous_format, torch.strided
        self.doing: dict[str, Any] = {}  # what its calls are about
        self._arena: Any = None
        self.run = entry('colo_bridge_forward'), entry('colo_bridge_backward')
        # By direction, from the second call on: what stays, None if something moves. False: the first one was there.
        self.stays: list[Any] = [(), ()]

    @property
    def arena(self) -> Any:
        """Memory that peers write into, of this shape; None where they do not."""
        if self.core.shape != self.shape:
            self.core.take(self.shape)
        region = self.core.region
        if region is not None and (self._arena is None or self._arena.region is not region):
            copied = 0 if self._arena is None else self._arena.copied
            self._arena = arenas.Arena(region, self.shapes, self.core.reached(self.shape))
            self._arena.copied = copied
            self.core.arenas.add(self._arena)
        return None if region is None else self._arena

    def view(self, side: int, t: Any, what: str) -> s.Tensor:
        """Of a tensor on the source's (0) or the destination's side (1)."""
        if t.layout is self.strided and (address := t.data_ptr()) and t.is_contiguous() and \
                t.shape == self.shapes[side] and not t.is_neg():
            raw = self.views[side]
            raw.data = address
            return raw
        return checked(t, what)

    def carry(self, direction: int, x: Any, y: Any, like: Any = None, shape: Any = None,
              flight: Flight | None = None, follows: bool = True) -> Any:
        """y from x, forward (0), or x from y, backward (1), where y and x are gradients. Makes and returns a tensor
        of @shape if there is one: the output, one of the arena's where there is one. This is core.Bridge's forward()
        and backward() without what costs more than they do. Where nothing moves, a gradient is a view. flight: the call
        is started there, and not finished. follows: a backward follows forward."""
        try:
            if not (direction or self.core.no_grad):
                self.bridge.expect_backward(follows)
            stays = self.stays[direction]
            if stays is False:
                stays = self.stays[direction] = self.core.stays(self.shape, ('forward', 'backward')[direction])
            given = y if direction else x
            if (stays and shape is not None and given is not None and given.shape == self.shapes[direction]
                    and self.bridge.handle):
                part = given.narrow(*stays)
                return part if direction and part.is_contiguous() else part.clone(memory_format=self.contiguous)
            arena, stream, lent, made, own = self.arena, self.stream(), None, None, None
            if shape is not None:
                lent = None if arena is None else arena.lend(1 - direction, stream, like, shape)
                made = like.new_empty(shape) if lent is None else lent
                x, y = (made, y) if direction else (x, made)
            if arena is not None and arena.reached[direction]:
                side = arena.side[direction]
                there = y if side else x
                if there is not None and not arena.holds(there, lent is not None):
                    own, there = there, arena.instead(direction, there, stream)
                    x, y = (x, there) if side else (there, y)
            of_y, of_x = self.view(1, y, 'd_y' if direction else 'y'), None
            if x is not None:
                of_x = self.view(0, x, 'd_x' if direction else 'x')
            at_y, at_x = c.addressof(of_y), None if of_x is None else c.addressof(of_x)
            ends = (at_y, at_x) if direction else (at_x, at_y)
            if flight is None or own is not None:
                check(self.run[direction](self.bridge.handle, *ends, stream))
            else:
                flight.begin(('bridge_forward', 'bridge_backward')[direction], self.bridge.handle, *ends, stream,
                             held=[t.detach() for t in (x, y) if t is not None])
            if own is not None and not (direction and arena.sums):
                own.copy_(there)
            if stays == ():
                self.stays[direction] = False
            return made
        except BaseException as why:
            groups.heard(self.bridge.comm, why, dict(self.doing, requires_grad=follows))
            raise


@Function
def Carry(ctx: Any, x: Any, ready: Ready, here: bool, flight: Flight | None, follows: bool) -> Any:
    """y = R x forward, d_x = R^T d_y backward. With a flight forward is begun, and backward ended. follows: backward does,
    which a function is not told."""
    ctx.ready, ctx.here, ctx.shape, ctx.flight = ready, here, x.shape, flight
    y = ready.carry(0, x if here else None, None, x, ready.shapes[1], flight, follows)
    if ready.core.no_grad:
        ctx.mark_non_differentiable(y)
    return y


@Carry.adjoint
def _(ctx: Any, d_y: Any) -> Any:
    if ctx.flight is not None:  # Finish's backward has sent d_y
        d_x = ctx.flight.landed()
    else:
        d_x = ctx.ready.carry(1, None, d_y, d_y, ctx.shape if ctx.here else None)
    if not ctx.here:
        return d_y.new_empty(ctx.shape), None, None, None, None
    scale = ctx.ready.core.grad_scale
    return d_x if scale == 1 else d_x * scale, None, None, None, None
