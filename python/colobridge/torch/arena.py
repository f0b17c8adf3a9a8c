# SPDX-License-Identifier: Apache-2.0
"""Memory of one bridge that peers write into, and the tensors in it.

Peers reach registered memory only. So a bridge registers a block out of which PyTorch's own allocator makes its
outputs (Pool). For outputs that lie elsewhere it has a region: a workspace, out of which an output is copied, and,
when it is asked for, a few blocks that are handed out as outputs themselves and come back when no tensor has the
storage any more. Shapes share it, each by an arena of its own, and it grows to the largest one.
Where an output lies is a rank's own business: its word to the others carries the address. So ranks need
not agree on it, a rank that has no block left copies, and no rank waits for another's garbage collector.

Order is that of streams. What peers write, they write after this rank's earlier work on the call's stream.
A block that comes back is used again on its stream, or on another one that waits for it; so is the workspace.
A captured call takes the workspace: its graph may be replayed when a block has long been somebody else's.

Left to others: which tensors are reached, and when memory is made (bridge.py).
"""
import collections
import ctypes as c
import functools
import gc
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _structs as s
from .._lib import lib
from ..comm import Comm
from ..dlpack import Array, Loan
from ..errors import STATUS, Error, FailedError
from ..memory import Memory
from ..tensor import torch_dtype
from .ready import storage_of
from .tensors import stream_of

_ROUND = 512
_SMALL = 1 << 20  # up to here PyTorch's allocator keeps tensors apart from larger ones
NO_PEERS = "bridge: transport is 'peer' and x is on %s, but peers reach memory of GPUs only; take transport='auto'"


def _padded(count: int, elem: int) -> int:
    return -(-count * elem // _ROUND) * _ROUND


def capturing(device: Any) -> Callable[[], bool]:
    """Is the current stream being captured, for tensors on @device?"""
    return torch._C._cuda_isCurrentStreamCapturing if device.type == 'cuda' else bool


def _behind(device: Any, last: int) -> None:
    """The current stream of @device waits for stream @last."""
    other = torch.cuda.ExternalStream(last, device=device) if last else torch.cuda.default_stream(device)
    torch.cuda.current_stream(device).wait_stream(other)


@functools.lru_cache(maxsize=None)
def _into_pool() -> tuple[Any, ...] | None:
    """What torch.cuda.use_mem_pool() calls before and after, which takes a third of its time. None: this version of
    PyTorch has other functions."""
    names = '_cuda_beginAllocateCurrentThreadToPool', '_cuda_endAllocateToPool', '_cuda_releasePool'
    found = tuple(getattr(torch._C, name, None) for name in names)
    return None if None in found else found


@functools.lru_cache(maxsize=None)
def allocator(device: Any) -> s.Allocator | None:
    """PyTorch's, for what bridges own on a GPU. None for the host, where PyTorch aligns to less than the library."""
    if device.type != 'cuda':
        return None
    give_back = torch.cuda.caching_allocator_delete

    def allocate(_: Any, nbytes: int) -> int | None:
        try:
            stream = torch.cuda.current_stream(device)
            address = torch.cuda.caching_allocator_alloc(nbytes, device, stream)
            stream.synchronize()  # earlier work may still use it, and calls are on any stream
            return address
        except BaseException:  # the library would read an address that was never written
            return None

    made = s.Allocator(s.AllocateFn(allocate), s.ReleaseFn(lambda _, address: give_back(address)))
    c.pythonapi.Py_IncRef(c.py_object(made))  # bridges end when the interpreter does, in any order
    return made


def possible(comm: Comm, device: Any) -> bool:
    """May ranks of @comm reach tensors on @device?"""
    return device.type == 'cuda' and comm.size > 1


def _shared(comm: Comm, why: Error) -> bool:
    """Did making memory fail while all ranks were at it, so that all of them may go on? Else one of them is
    somewhere else, or was refused before they met, and would be waited for. By words: a rank's own error
    has what the others hear of it after "peer memory: rank n failed: "."""
    if lib().colo_comm_check(comm.handle) < 0 or why.status == STATUS['ERR_MISMATCH']:
        return False
    return why.status not in (STATUS['ERR_PEER'], STATUS['ERR_ARG']) or str(why).startswith(
        ('peer memory: ', 'memory: ', 'register: '))


def memory_of(comm: Comm, nbytes: int, needed: bool, grows: bool) -> Memory | None:
    """Memory that all ranks of @comm reach, @nbytes of this rank's; collective. None on all of them: they do not reach each
    other, or there is none. An exception instead where there is none and it is @needed, and where what is there @grows."""
    try:
        memory = Memory.alloc(comm, nbytes)
    except Error as first:
        if not _shared(comm, first):
            raise
        gc.collect()  # dropped bridges, which hold memory
        torch.cuda.empty_cache()
        try:
            memory = Memory.alloc(comm, nbytes)
        except Error as why:
            if needed or grows or not _shared(comm, why):
                raise
            warnings.warn("bridge: no memory that peers reach, so it goes through NCCL: %s" % why)
            return None
    if grows and not memory.is_p2p:
        raise FailedError("bridge: ranks cannot open each other's memory; COLO_LOG=info says why", STATUS['ERR_UNBUILT'])
    return memory if memory.is_p2p else None


def nbytes_of(counts: tuple[int, int], dtype: int, reached: tuple[bool, bool], sums: bool, buffers: int) -> int:
    """Of a region; the arguments are Region's."""
    sizes = [_padded(n, s.DTYPE_SIZE[dtype]) for n in counts]
    return (max(reached[0] * sizes[1], reached[1] * sizes[1 if sums else 0])
            + buffers * (reached[0] * sizes[1] + (reached[1] and not sums) * sizes[0]))


class Pool:
    """Memory that peers reach, out of which PyTorch's allocator makes tensors: the only block, of @nbytes, of a private
    pool of its. They are ordinary tensors in every respect, so record_stream() holds them, too. Collective over
    @comm. A rank may be without: PyTorch before 2.5, no memory left, memory that no other process can open."""

    def __init__(self, comm: Comm, device: Any, nbytes: int):
        self._device, self.nbytes, self._pool, self._begin = device, nbytes, None, 0
        # What torch.multiprocessing's StorageWeakRef calls, whose frames of Python take longer.
        self._expired, self._free = torch.UntypedStorage._expired, torch.UntypedStorage._free_weak_ref
        self._live: list[tuple[int, int]] = []  # weak references to storages in the block, and their bytes
        self._used = 0  # bytes of these
        block = self._block() if nbytes > _SMALL else None
        try:
            memory = Memory.register(comm, block)
        except Error as why:
            self._pool = None
            if not _shared(comm, why):
                raise
            return
        if memory.is_p2p:
            self._memory, self._begin = memory, memory.data
            memory.owner, memory._view = self._pool, None  # the block is free in the pool
        else:
            self._pool = None

    def _block(self) -> Any:
        if self._device.type != 'cuda' or not hasattr(torch.cuda, 'use_mem_pool'):
            return None
        try:
            with torch.cuda.device(self._device):
                self._pool, self._stream = torch.cuda.MemPool(), stream_of(self._device)
            self._where = self._device.index, self._pool.id
            return self._new(torch.empty(0, dtype=torch.uint8, device=self._device), (self.nbytes,))
        except RuntimeError:  # no memory left
            return None

    def _new(self, like: Any, shape: Any) -> Any:
        calls, where = _into_pool(), self._where
        if calls is None:
            with torch.cuda.use_mem_pool(self._pool, self._device.index):
                return like.new_empty(shape)
        begin, end, release = calls
        begin(*where)
        try:
            return like.new_empty(shape)
        finally:
            end(*where), release(*where)

    def holds(self, t: Any) -> bool:
        """Does a tensor lie in the block?"""
        return self._begin <= t.data_ptr() < self._begin + self.nbytes and self._begin > 0

    def empty(self, like: Any, shape: Any, nbytes: int, stream: int | None) -> Any:
        """A new tensor in the block, for the current @stream; nbytes: _padded(). None if it has no place: small ones,
        those of another stream than the block's, and more than the block has."""
        if not self._begin or nbytes <= _SMALL or stream != self._stream:
            return None
        for one in self._live[:]:
            if self._expired(one[0]):
                self._live.remove(one)
                self._used -= one[1]
                self._free(one[0])
        if self._used + nbytes > self.nbytes:
            return None  # or the allocator would add a block that peers do not reach
        t = self._new(like, shape)
        self._live.append((storage_of(t)._weak_ref(), nbytes))
        self._used += nbytes
        return t

    def __del__(self) -> None:
        for weak, _ in self._live:
            self._free(weak)


class _Block(Loan):
    """A tensor of one shape at @offset of a region; owner: of the region's memory."""

    def __init__(self, view: s.Tensor, side: int, offset: int, owner: Any):
        super().__init__(view)
        self.side, self.offset, self.owner = side, offset, owner


def _returned(block: Any) -> None:
    block.owner.free[block.side].append(block.offset)


class _Ordered:
    """A workspace that streams use one after the other."""
    _last: int | None = None
    _capturing: Callable[[], bool]

    def _follow(self, stream: int | None, device: Any) -> None:
        # In captures the program that replays them keeps the order, as it does for bridges.
        if stream is not None and stream != self._last and not self._capturing():
            if self._last is not None:
                _behind(device, self._last)
            self._last = stream


class Region(_Ordered):
    """counts: elements of x's side (0) and y's (1), at most. reached: may peers reach this rank's tensor, forward
    (its y) and backward (its d_x, or with sums its d_y). buffers: blocks of each output."""

    def __init__(self, memory: Memory, device: Any, dtype: int, counts: tuple[int, int],
                 reached: tuple[bool, bool], sums: bool, buffers: int):
        self.memory, self.device, self.dtype = memory, device, dtype
        self.counts, self.reached, self.sums = counts, reached, sums
        self.side = 1, 1 if sums else 0  # of the tensor that is reached
        self.begin, self.end = memory.data, memory.data + memory.nbytes
        self.captured = False  # by a graph, which may be replayed at any time
        self.pool: Pool | None = None
        self._capturing = capturing(device)
        sizes = [_padded(n, s.DTYPE_SIZE[dtype]) for n in counts]
        size = max((sizes[self.side[direction]] for direction in (0, 1) if reached[direction]), default=0)
        self.free: list[Any] = [collections.deque(), collections.deque()]  # offsets of blocks
        self.streams: dict[int, int | None] = {}  # by offset: on which the block was somebody's tensor
        for direction in (0, 1):
            if reached[direction] and not (direction and sums):
                for _ in range(buffers):
                    self.free[1 - direction].append(size)
                    size += sizes[1 - direction]

    def fits(self, counts: tuple[int, int], reached: tuple[bool, bool]) -> bool:
        """Is there room for tensors of so many elements."""
        return all(map(int.__le__, counts, self.counts)) and all(map(bool.__le__, reached, self.reached))


class Arena:
    """What a shape has of a region. shapes: of x's side (0) and y's (1). reached: as Region's, in this shape."""

    def __init__(self, region: Region, shapes: tuple[Any, Any], reached: tuple[bool, bool]):
        self._take = torch.utils.dlpack.from_dlpack
        self.region: Any = region
        self.reached, self.sums, self.side = reached, region.sums, region.side
        self.memory: Any = region.memory
        self._shapes = shapes
        self._nbytes = [_padded(math.prod(shape), s.DTYPE_SIZE[region.dtype]) for shape in shapes]
        self.copied = 0
        self._blocks: dict[tuple[int, int], _Block] = {}  # by side and offset
        self.workspace: list[Any] = [
            self._take(self._array(0, self.side[direction]).__dlpack__()) if reached[direction] else None
            for direction in (0, 1)]

    def release(self) -> None:
        """The region, which another one replaces."""
        self.region = self.memory = None
        self.workspace.clear(), self._blocks.clear()

    def _array(self, offset: int, side: int) -> Array:
        region = self.region
        return region.memory.array(s.DTYPES[region.dtype], self._shapes[side], offset,
                                   device=region.device.index if region.device.type == 'cuda' else -1)

    def holds(self, t: Any, lent: bool = False) -> bool:
        """Does a tensor lie in this memory, so that peers reach it. lent: for this call."""
        region = self.region
        return region.begin <= t.data_ptr() < region.end or (
            region.pool is not None and region.pool.holds(t) and (lent or not region._capturing()))

    def lend(self, side: int, stream: int | None, like: Any, shape: Any) -> Any:
        """A tensor of this memory for the current @stream, None where there is none, or none for a captured
        call."""
        region = self.region
        if region.pool is not None and region.pool.nbytes:
            if not self.reached[1 - side] or side != self.side[1 - side] or region._capturing():
                return None
            return region.pool.empty(like, shape, self._nbytes[side], stream)
        free = region.free[side]
        if not free or not self.reached[1 - side] or region._capturing():
            return None
        try:
            offset = free.popleft()
        except IndexError:  # another thread was faster
            return None
        last = region.streams.get(offset)
        if last is not None and last != stream:
            _behind(region.device, last)
        region.streams[offset] = stream
        block = self._blocks.get((side, offset))
        if block is None:
            block = self._blocks[side, offset] = _Block(self._array(offset, side).view, side, offset, region)
        return self._take(block.give(_returned))

    def instead(self, direction: int, own: Any, stream: int | None) -> Any:
        """The workspace, for a tensor that peers do not reach. What a call reads is copied here, what it
        writes is copied by the caller."""
        workspace, region = self.workspace[direction], self.region
        region.captured = region.captured or region._capturing()
        region._follow(stream, region.device)
        if direction and self.sums:
            workspace.copy_(own)
        self.copied += 1
        return workspace


class Workspace(_Ordered):
    """Memory that peers reach, for the tensors of one call of a ragged bridge: what they read is copied here,
    what they write is copied out, unless it lies in the pool. Both grow to the largest call, on all ranks together:
    the bytes that a call needs follow from the tables and are the same everywhere."""

    def __init__(self, comm: Comm, device: Any, needed: bool, pools: bool):
        self._take, self._comm, self._device, self._needed = torch.utils.dlpack.from_dlpack, comm, device, needed
        self._memory: Memory | None = None
        self._pool: Pool | None = None
        self._pools, self._outputs = pools, 0  # bytes of the pool, on ranks that have none, too
        self._kept: list[Memory] = []  # that a graph has
        self._capturing = capturing(device)
        self._wait = torch.cuda.synchronize if device.type == 'cuda' else lambda device: None
        self._captured, self._stale, self.copied = False, False, 0

    def forget(self) -> None:
        """After an error, when ranks may have memory of different sizes, the next call makes it anew on all."""
        self._stale = True

    def reserve(self, nbytes: int, outputs: int = 0) -> bool:
        """Have so many bytes, and a pool for @outputs; collective where they grow. False on all ranks: there is
        no such memory."""
        old = self._memory
        if old is not None and nbytes <= old.nbytes and outputs <= self._outputs and not self._stale:
            return True
        if self._capturing():
            raise FailedError("bridge: a capture needs %d bytes that peers reach, and there are %d; run one step "
                              "with these tables before" % (nbytes, 0 if old is None else old.nbytes),
                              STATUS['ERR_STATE'])
        self._wait(self._device)
        stale, self._stale = self._stale, False
        if old is None or nbytes > old.nbytes or stale:
            nbytes = max(nbytes, 1 if old is None or stale else old.nbytes * 5 // 4)
            self._memory = memory_of(self._comm, nbytes, self._needed, old is not None)
            # All ranks were there, with nothing on its way: no rank reaches the old one any more.
            if old is not None and self._captured:
                self._kept.append(old)
            elif old is not None:
                old.destroy()
            self._captured = False
        if self._memory is not None and (outputs > self._outputs or stale and self._outputs):
            outputs = max(outputs, self._outputs * (4 if stale else 5) // 4)
            self._pool = None  # before there is a larger one
            self._outputs, self._pool = outputs, Pool(self._comm, self._device, outputs if self._pools else 0)
        return self._memory is not None

    def empty(self, like: Any, shape: Any, stream: int | None) -> Any:
        """A new tensor for the current @stream, in the pool if it fits."""
        made = None if self._pool is None or self._capturing() else self._pool.empty(
            like, shape, _padded(math.prod(shape), like.element_size()), stream)
        return like.new_empty(shape) if made is None else made

    def _holds(self, t: Any) -> bool:
        return self._pool is not None and self._pool.holds(t) and not self._capturing()

    def instead(self, tensors: list[Any], stream: int | None, copy: bool) -> list[Any]:
        """Tensors here of the shapes of those, and with @copy of their values; those of the pool are themselves."""
        memory, offset, out = self._memory, 0, []
        assert memory is not None
        if all(map(self._holds, tensors)):
            return tensors
        self._captured = self._captured or self._capturing()
        self._follow(stream, self._device)
        ordinal = self._device.index if self._device.type == 'cuda' else -1
        for t in tensors:
            if self._holds(t):
                out.append(t)
                continue
            number = torch_dtype(t.dtype)
            here = self._take(memory.array(s.DTYPES[number], tuple(t.shape), offset, device=ordinal).__dlpack__())
            offset += _padded(t.numel(), s.DTYPE_SIZE[number])
            if copy:
                here.copy_(t.view(here.dtype))  # masks are bytes here
            out.append(here)
        self.copied += 1
        return out


def nbytes_of_call(tensors: Sequence[tuple[int, int, int]]) -> int:
    """What instead() needs of (rows, features, dtype) each."""
    return sum(_padded(rows * features, s.DTYPE_SIZE[dtype]) for rows, features, dtype in tensors)
