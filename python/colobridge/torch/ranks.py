# SPDX-License-Identifier: Apache-2.0
"""Torch process groups as the library's communicators.

A group argument is a torch process group, a colobridge.Comm (ranks that are threads, say), or None for
a group of one. From a torch group come its ranks; they meet through the key-value store that
torch.distributed was initialised with, so no torch collective runs and the backend of the group does
not matter. Host tensors then go over sockets; for CUDA tensors the library makes its own NCCL
communicator. Communicators are kept for the next call, until shutdown() or the end of the process.

An error kills a communicator for all its ranks. Each of them hears of it once, as the exception of the
call that it is in or comes to; its next call makes the communicator anew, together with the others. So
ranks stay in step: no call of one meets a later call of another.
"""
from __future__ import annotations

import atexit
import datetime
import hashlib
import sys
import json
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from .. import comm as comms
from .._lib import lib
from ..comm import Comm
from ..errors import STATUS, ArgumentError, DeadlineError, Error, FailedError, MismatchError

_lock = threading.Lock()
_made: dict[Any, '_Made'] = {}
_alone = threading.local()
_ended: list[Any] = []
_PATIENCE = 1.0  # seconds, for what other ranks say of a mismatch


class _Thread:
    """One thread's groups of one, by world rank; a forked child makes its own. Plans in them hold tensors.
    A tensor that is freed while the interpreter ends a thread that C made crashes it, because
    PyGILState_Release() then runs inside of itself. So the groups of a thread that ends are left for the
    next thread to free."""

    def __init__(self) -> None:
        self.comms: dict[int | None, Comm] = {}
        self.forks = comms._forks

    def __del__(self, ended: list[Any] = _ended) -> None:
        ended.append(self.comms)


class _Made:
    """Communicators of one set of ranks: host memory, and GPUs."""

    def __init__(self, host: Comm, store: Any = None):
        # Not held: as long as somebody has the store, its server answers in the next one's place.
        self.host, self.store = host, store and weakref.ref(store)
        self.gpu: Comm | None = None

    def dead(self) -> bool:
        """Did an error kill it, of which this rank has heard? Raises that error where it has not."""
        for comm in (self.gpu, self.host):
            if comm is not None and _is_dead(comm):
                if not self.host.told[0]:
                    try:
                        with telling(comm):
                            comm.check()
                    except MismatchError as why:
                        why.comm = comm  # type: ignore[attr-defined] # what this rank does, its call knows
                        raise
                return True
        return False

    def destroy(self) -> None:
        self.host.told[0] = True
        for comm in (self.gpu, self.host):
            if comm is not None:
                comm.destroy()


def _is_dead(comm: Comm) -> bool:
    return lib().colo_comm_check(comm.handle) < 0


def heard(comm: Comm | None, why: BaseException, doing: dict[str, Any] | None = None) -> None:
    """Notes that this rank has heard of the error that killed a communicator. An error that the library
    does not know of is told to the other ranks, which would wait for this one. doing: what this rank's
    call is about, to be compared with the others' after a mismatch."""
    if comm is None:
        return
    if not getattr(why, 'status', 0):
        refuse(comm, why)
    elif comm._handle and _is_dead(comm):
        comm.told[0] = True
        board: _Board | None = getattr(comm, '_board', None)
        if isinstance(why, MismatchError) and doing and board is not None:
            differs = board.compare(doing)
            if differs:
                why.args = ('%s (%s)' % (differs, why), *why.args[1:])


class _Board:
    """Where the ranks of a communicator that a mismatch killed tell each other what they were doing. The
    library sees that one makes a bridge and another runs one; why, each rank knows by itself."""

    def __init__(self, store: Any, name: str, ranks: tuple[int, ...], me: int):
        self.store, self.name, self.ranks, self.me = weakref.ref(store), name, ranks, me

    def compare(self, doing: dict[str, Any]) -> str:
        """"rows: ranks 0, 1, 3 have 8, rank 2 has 12", of the ranks that say so within a second."""
        store = self.store()
        if store is None:
            return ''
        store.set('%s/doing/%d' % (self.name, self.me), json.dumps(doing))
        store.add('%s/said/%d' % (self.name, self.me), 1)
        said: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + _PATIENCE
        while len(said) < len(self.ranks) and time.monotonic() < end:
            for rank in self.ranks:  # add() does not wait, get() would
                if rank not in said and store.add('%s/said/%d' % (self.name, rank), 0):
                    said[rank] = json.loads(store.get('%s/doing/%d' % (self.name, rank)))
            time.sleep(0.005)
        words = []
        for field in doing:
            having: dict[Any, list[str]] = {}
            for rank in sorted(said):
                having.setdefault(said[rank].get(field), []).append(str(rank))
            if len(having) > 1:
                words.append('%s: %s' % (field, ', '.join(
                    ('ranks %s have %s' if on[1:] else 'rank %s has %s') % (', '.join(on), value)
                    for value, on in having.items())))
        return '; '.join(words)


class telling:
    """heard() around what uses a communicator."""

    def __init__(self, comm: Comm | None, doing: dict[str, Any] | None = None):
        self.comm, self.doing = comm, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, why: Any, trace: Any) -> None:
        if kind is not None:
            heard(self.comm, why, self.doing)


def _default_group(dist: Any) -> Any:
    return dist.distributed_c10d._get_default_group()


def group_ranks(group: Any, what: str = 'group') -> tuple[int, ...]:
    """World ranks of a torch process group, in group order. ValueError: not a group, or one without
    this rank; RuntimeError: torch.distributed is not initialised, or the group was destroyed."""
    import torch.distributed as dist
    if not (dist.is_available() and dist.is_initialized()):
        raise FailedError("%s: torch.distributed is not initialised (or was destroyed); call "
                          "init_process_group() first" % what, STATUS['ERR_STATE'])
    world = _default_group(dist)
    if group is dist.group.WORLD or group is world:
        return tuple(range(dist.get_world_size()))
    if group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        what_it_is = ('is a group without this rank %d' % dist.get_rank()
                      if group is dist.GroupMember.NON_GROUP_MEMBER
                      else 'is a %s, expected a torch process group, a colobridge.Comm or None'
                      % type(group).__name__)
        raise ArgumentError("%s %s" % (what, what_it_is))
    c10d: Any = dist.distributed_c10d
    state: Any = getattr(c10d, '_world', None)  # torch 1.13 has the table itself
    table: Any = c10d._pg_group_ranks if state is None else state.pg_group_ranks
    if group not in table:
        raise FailedError("%s: this process group was destroyed before its last use" % what,
                          STATUS['ERR_STATE'])
    ranks = tuple(sorted(table[group], key=table[group].get))
    if dist.get_rank() not in ranks:
        raise ArgumentError("%s has ranks %s, which is a group without this rank %d"
                            % (what, list(ranks), dist.get_rank()))
    return ranks


def require_alive(group: Any, what: str) -> None:
    """RuntimeError when a group that was alive is not any more; cheap."""
    import torch.distributed as dist
    if dist.is_initialized():
        state = getattr(dist.distributed_c10d, '_world', None)
        if state is not None and (group is dist.group.WORLD or group in state.pg_group_ranks):
            return
    group_ranks(group, what)


def _timeout() -> datetime.timedelta:
    # What is not allowed is refused when the ranks have met, on all of them.
    allowed = lib().colo_env_check(b'COLO_TIMEOUT_MS') == 0
    ms = lib().colo_env_value(b'COLO_TIMEOUT_MS', None) if allowed else b'600000'
    return datetime.timedelta(milliseconds=int(ms))


def _meet(ranks: tuple[int, ...]) -> Comm:
    """A host communicator of @ranks through the default store; collective over them."""
    import torch.distributed as dist
    me, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    name = hashlib.sha1(repr(ranks).encode()).hexdigest()[:16]
    # How often this rank met those, which the store counts: it may be one that served a torch.distributed
    # before, and still have what was said then.
    meeting = store.add('colobridge/%s/%d' % (name, me), 1)
    index = ranks.index(me)

    def key(rank: int, step: int) -> str:
        return 'colobridge/%s/%d/%d/%d' % (name, meeting, step, rank)

    steps = [0]

    def all_gather(mine: bytes) -> list[bytes]:
        steps[0] += 1
        store.set(key(me, steps[0]), mine)  # type: ignore[arg-type]
        keys = [key(rank, steps[0]) for rank in ranks]
        try:
            store.wait(keys, _timeout())
        except Exception as why:
            there = getattr(store, 'check', lambda _keys: False)  # torch 1.13 has none
            missing = [rank for rank, k in zip(ranks, keys) if not there([k])]
            raise DeadlineError(
                "rank %d waited %s for ranks %s of %s to make a communicator (%s)"
                % (me, _timeout(), missing, list(ranks), why), STATUS['ERR_TIMEOUT']) from why
        return [bytes(store.get(k)) for k in keys]

    comm = Comm.from_all_gather(index, len(ranks), all_gather)
    comm.set_world_ranks(ranks)
    comm._board = _Board(store, 'colobridge/%s/%d' % (name, meeting), ranks, me)  # type: ignore
    return comm


def alone(world_rank: int | None = None) -> Comm:
    """This thread's group of one, for host and CUDA tensors. The one of no group (None) is not that of a
    group of rank 0 alone, or rank 0 would find objects made with the one when it has the other, and
    go on while other ranks make theirs together."""
    thread = getattr(_alone, 'thread', None)
    if thread is None or thread.forks != comms._forks:
        thread = _alone.thread = _Thread()
        _ended.clear()
    made = thread.comms.get(world_rank)
    if made is None:
        made = thread.comms[world_rank] = Comm.self()
        made.set_world_ranks([world_rank or 0])
    return made


def comm_of_ranks(ranks: Sequence[int], device: Any) -> Comm:
    """The communicator of world ranks, for tensors on @device (a torch.device); collective over them
    the first time. The rank that it is called on is one of them."""
    import torch.distributed as dist
    ranks = tuple(ranks)
    if len(ranks) == 1:
        return alone(ranks[0])
    store = dist.distributed_c10d._get_default_store()
    with _lock:
        made = _made.get(ranks)
        # dead, or of a torch.distributed that was destroyed and initialised again
        stale = made is not None and (made.store() is not store or made.dead())
        if stale:
            del _made[ranks]
    if made is not None and stale:
        made.destroy()
    if made is None or stale:
        made = _Made(_meet(ranks), store)
        with _lock:
            _made[ranks] = made
    return _for_device(made, device)


def alive(group: Any) -> bool:
    """Does torch.distributed know this group? Costs little; False: ask require_alive()."""
    c10d: Any = sys.modules['torch.distributed'].distributed_c10d
    state = getattr(c10d, '_world', None)
    return group in (c10d._pg_group_ranks if state is None else state.pg_group_ranks)


def _for_device(made: Any, device: Any) -> Comm:
    if device.type != 'cuda':
        return made.host
    if made.gpu is None:
        made.gpu = made.host.nccl(device.index if device.index is not None else -1)
        made.gpu._board, made.gpu.told = getattr(made.host, '_board', None), made.host.told
    return made.gpu


def comm_of(group: Any, device: Any, what: str = 'group') -> Comm:
    """The communicator of a group argument for tensors on @device. See group_ranks() for errors."""
    if group is None:
        return alone()
    if isinstance(group, Comm):
        if group.size == 1 or device.type != 'cuda' or group.backend == 'nccl':
            return group
        made = getattr(group, '_torch_made', None)
        if made is None:
            made = _Made(group)
            group._torch_made = made  # type: ignore[attr-defined]
        return _for_device(made, device)
    return comm_of_ranks(group_ranks(group, what), device)


def size_and_rank(group: Any, what: str = 'group') -> tuple[int, int]:
    """Of a group argument; no communication."""
    if group is None:
        return 1, 0
    if isinstance(group, Comm):
        return group.size, group.rank
    import torch.distributed as dist
    ranks = group_ranks(group, what)
    return len(ranks), ranks.index(dist.get_rank())


def refuse(comm: Comm | None, error: BaseException) -> None:
    """Tells the other ranks of @comm why this one does not come: they get the error message of @error at once,
    not a timeout. Nothing to tell to a group of one."""
    try:
        if comm is not None and comm.size > 1:
            error.__dict__.setdefault('told_to', set()).add(id(comm))
            comm.abort('rank %d: %s' % (comm.world_rank(comm.rank), error))
            comm.told[0] = True
    except Error:
        pass  # destroyed


def told(error: Exception, device: Any, *of: Any) -> Exception:
    """@error, of which the other ranks of the groups have heard, so that they do not wait for this one."""
    for group in of:
        try:
            made = _Made(group) if isinstance(group, Comm) else _made.get(group_ranks(group))
            # Of these the others have heard already: comm_of() would wait for them to make a new one.
            if made is not None and (getattr(error, 'status', 0) and made.dead() or
                                     {id(made.gpu), id(made.host)} & error.__dict__.get('told_to', set())):
                continue
            refuse(comm_of(group, device), error)
        except Exception:
            pass  # no group, or a rank did not come
    return error


def tell(error: Exception, arguments: tuple[Any, ...]) -> None:
    """Tells the groups among the arguments of a call of an error that Python found on this rank."""
    if getattr(error, 'status', 0):
        return
    import torch
    devices = [value.device for value in arguments if isinstance(value, torch.Tensor)] + [torch.device('cpu')]
    told(error, devices[0], *(getattr(value, 'cp_group', value) for value in arguments))


def shutdown() -> None:
    """Destroys all communicators made from torch groups. Also done at exit."""
    with _lock:
        made = list(_made.values())
        _made.clear()
    for comms in made:
        comms.destroy()


def _end() -> None:
    """At exit. After an exception that nothing caught, the other ranks hear which one it was."""
    why = getattr(sys, 'last_value', None)
    if why is not None:
        with _lock:
            made = list(_made.values())
        for comms in made:
            comms.host.abort('%s: %s' % (type(why).__name__, why))
    shutdown()


atexit.register(_end)
