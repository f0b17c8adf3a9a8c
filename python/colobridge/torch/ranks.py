# SPDX-License-Identifier: Apache-2.0
"""Torch process groups as the library's communicators.

A group argument is a torch process group, a DeviceMesh, a colobridge.Comm (ranks that are threads, say), or None for
a group of one. From a torch group come its ranks; they meet through the key-value store that
torch.distributed was initialised with, so no torch collective runs and the backend of the group does
not matter. Host tensors then go over sockets; for CUDA tensors the library makes its own NCCL
communicator. Communicators are kept for the next call, until shutdown() or the end of the process.

An error kills a communicator for all its ranks. Each of them hears of it once, as the exception of the
call that it is in or comes to; its next call makes the communicator anew, together with the others. So
ranks stay in step: no call of one meets a later call of another.

A rank that ends a call with an error says so in each group of the call, and waits for no other rank: it aborts the
communicator that the others may wait in, or it says at their next meeting that it does not come. So the order of
groups does not matter, nor how many ranks make the mistake.
"""
import atexit
import collections
import datetime
import functools
import hashlib
import sys
import json
import multiprocessing.process
import multiprocessing.util
import os
import re
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.multiprocessing.spawn import _wrap

from .. import comm as comms
from .._lib import lib
from ..comm import Comm
from ..errors import STATUS, ArgumentError, DeadlineError, Error, FailedError, MismatchError
from ..mesh import groups_of, is_mesh, ranks_of, shown

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .types import Group

_lock = threading.Lock()
_made: dict[Any, '_Ranks'] = {}  # by ranks, or Own
_owners: collections.Counter[tuple[int, ...]] = collections.Counter()
_alone = threading.local()
_ended: list[Any] = []
_GLANCE = datetime.timedelta(milliseconds=50)  # after which a rank that is a thread looks whether the others have ended
_PART = datetime.timedelta(milliseconds=400)  # at most, between two questions to a store
_ALONE = 'forward without backward'  # how the library says that a rank's forward has none
_FOLLOWED = re.compile(r'\bforward\b(?! without)')  # that another's has one
_PATIENCE = 1.0  # seconds, for what other ranks say of a mismatch
_failure: tuple[str, Any] = '', None  # an exception that a hook or multiprocessing has shown, and _counted() then


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


class Own(NamedTuple):
    """World ranks with communicators that serve one object alone, the @number-th of these ranks; 0: all that are alike;
    -1: all that plan. names: what the ranks are to the communicators."""
    ranks: tuple[int, ...]
    number: int
    names: tuple[int, ...]

    @classmethod
    def of(cls, ranks: tuple[int, ...], names: tuple[int, ...] | None = None) -> 'Own':
        """The next one; ranks make theirs in one order."""
        _owners[ranks] += 1
        return cls(ranks, _owners[ranks], names or ranks)


def named(ranks: tuple[int, ...], names: tuple[int, ...]) -> 'tuple[int, ...] | Own':
    """The same ranks, which are @names to their communicators."""
    return ranks if ranks == names else Own(ranks, 0, names)


def counted_of(ranks: tuple[int, ...]) -> 'tuple[int, ...] | Own':
    """The same ranks, which are 0, 1, .. to their communicators."""
    return named(ranks, tuple(range(len(ranks))))


class _Ranks:
    """A set of ranks and their communicators: of host memory, and of GPUs. key: the ranks, or Own."""

    def __init__(self, key: Any, me: int, store: Any, host: Comm | None = None):
        # Not held: as long as somebody has the store, its server answers in the next one's place.
        self.key, self.me, self.store = key, me, store and weakref.ref(store)
        self.ranks: tuple[int, ...] = key.ranks if isinstance(key, Own) else key
        self.host, self.gpu, self.given, self.forks = host, None, host, comms._forks
        self.name = 'colobridge/' + hashlib.sha1(repr(tuple(key)).encode()).hexdigest()[:16]

    def comm(self, device: Any) -> Comm:
        """The communicator for tensors on @device; collective the first time, and after an error of which this rank has
        heard. One that an error has killed of which it has not says so when it is used: a rank that has a mistake of
        its own hears of that."""
        host = self.host
        if host is not None and self.store is not None and (
                host.told[0] or host._above is not None and host._above.told[0] and _is_dead(host)):
            self.destroy()
        if self.host is None:
            self.host = _Meeting(self).comm()
            _end_child(os.getpid())
            run = self.given and self.given._run
            if run:
                run.anew.setdefault(self.me, []).append(self.host)
        if device.type != 'cuda':
            return self.host
        if self.gpu is None:
            self.gpu = self.host.nccl(device.index if device.index is not None else -1)
            self.gpu._board = getattr(self.host, '_board', None)  # type: ignore[attr-defined]
            self.gpu.told = self.host.told
        return self.gpu

    def refuse(self, why: BaseException) -> None:
        """Tells the other ranks that a call of this one ended with an error, unless they have it from where it came."""
        reached = _reached(why)
        if id(self) in reached or self.host is not None and id(self.host.told) in reached:
            return
        if self.host is not None and not self.host.told[0]:
            for comm in (self.host, self.gpu):
                refuse(comm, why)  # of one that is dead already this rank hears by its own error
        elif self.store is not None:
            reached.add(id(self))
            _Meeting(self).refuse(_said(why))

    def leave(self, why: str) -> None:
        """Tells the other ranks, wherever they wait for this one, that it comes no more."""
        if self.host is not None and self.host._handle:  # a program may destroy it
            self.host.abort(why)
        if len(self.ranks) > 1 and self.store is not None and self.store() is not None:
            try:
                _Meeting(self).refuse(why)
            except Exception:
                pass  # the store's server has ended

    def destroy(self) -> None:
        if self.host is not None:
            self.host.told[0] = True
        for comm in (self.gpu, self.host):
            if comm is not None and comm is not self.given:
                comm.destroy()
        self.host = self.gpu = None


def _reached(why: BaseException) -> set[int]:
    """Ids of what has told other ranks of an error, or this one."""
    return why.__dict__.setdefault('told_to', set())


def _is_dead(comm: Comm) -> bool:
    return lib().colo_comm_check(comm.handle) < 0


def _hear(comm: Comm) -> None:
    """This rank has heard of the error that killed @comm; of one that ended the whole world, too."""
    comm.told[0] = True
    if comm._above is not None and comm._above._handle and _is_dead(comm._above):
        _hear(comm._above)


def heard(comm: Comm, why: BaseException, doing: dict[str, Any] | None = None) -> None:
    """Notes that this rank has heard of the error that killed a communicator. An error that the library
    does not know of is told to the other ranks, which would wait for this one. doing: what this rank's
    call is about, to be compared with the others' after a mismatch."""
    if not getattr(why, 'status', 0):
        refuse(comm, why)
        return
    _reached(why).add(id(comm.told))  # the library told them, whether or not the communicator lives on
    if doing and isinstance(why, MismatchError) and _ALONE in str(why) and _FOLLOWED.search(str(why)):
        why.args = ('%s; x requires grad and autograd records %s, expected the same on all ranks; on a rank whose encoder is '
                    'frozen or whose x is None, pass frozen=True to the Bridge on all ranks, or use torch.no_grad() on all'
                    % (why, 'here' if doing['requires_grad'] else 'elsewhere, not here'), *why.args[1:])
    if isinstance(why, MismatchError):  # on all of them: what they know of each other's shards may be wrong
        for known in ('_shards', '_distilled', '_logprobs', '_linear_plans'):
            comm.__dict__.pop(known, None)
    if comm._handle and _is_dead(comm):
        _hear(comm)
        board = _board_of(comm) if isinstance(why, MismatchError) else None
        if doing and board is not None:
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


def _board_of(comm: Comm) -> _Board | None:
    """Ranks of run_threads() use none of the run's communicators any more after the first that an error killed, so those
    share a board."""
    made: _Board | None = getattr(comm, '_board', None)
    if made is None and comm._run is not None:
        of = _ranks_of(comm)
        store = of.store and of.store()
        made = store and _Board(store, of.name, of.ranks, of.me)
    return made


class telling:
    """heard() around what uses communicators. If they are several: of those that live on, other ranks may not be in the one
    that the error came from. before: is called if there is an error."""

    def __init__(self, *comms: Comm | None, doing: dict[str, Any] | None = None, before: Callable[[], None] | None = None):
        self.comms, self.doing, self.before = comms, doing, before

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, why: Any, trace: Any) -> None:
        if kind is None:
            return
        if self.before is not None:
            self.before()
        several = [comm for comm in self.comms if comm is not None and comm.size > 1]
        for comm in several:
            if len(several) == 1 or comm._handle and _is_dead(comm):
                heard(comm, why, self.doing)
            else:
                refuse(comm, why)


def _table() -> Any:
    """Of torch's process groups: the numbers of the ranks in each."""
    c10d: Any = dist.distributed_c10d
    state: Any = getattr(c10d, '_world', None)  # torch 1.13 has the table itself
    return c10d._pg_group_ranks if state is None else state.pg_group_ranks


def of_mesh(name: str) -> list[tuple[int, ...]]:
    """World ranks of this rank's process groups that a DeviceMesh made for its dim of that name."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [tuple(sorted(ranks)) for group, ranks in _table().items()
            if getattr(group, 'group_desc', '') == 'mesh_' + name and dist.get_rank() in ranks]


def group_ranks(group: 'ProcessGroup | DeviceMesh | None', what: str = 'group') -> tuple[int, ...]:
    """World ranks of a torch process group, in group order, or of a DeviceMesh, along its dim or ascending.

    Args:
        group: the group.
        what: its name in errors.

    Returns:
        Its ranks.

    Raises:
        ValueError: neither, or one without this rank.
        RuntimeError: torch.distributed is not initialised, or the group was destroyed.
    """
    outside, mesh = dist.is_available() and dist.GroupMember.NON_GROUP_MEMBER, is_mesh(group)
    if dist.is_available() and group is not dist.group.WORLD and group is not outside and not mesh and \
            not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("%s is a %s, expected a torch process group, a DeviceMesh, a colobridge.Comm or None"
                            % (what, type(group).__name__))
    if not (dist.is_available() and dist.is_initialized()):
        raise FailedError("%s: torch.distributed is not initialised (or was destroyed); call "
                          "init_process_group() first" % what, STATUS['ERR_STATE'])
    if group is dist.group.WORLD or group is dist.distributed_c10d._get_default_group():
        return tuple(range(dist.get_world_size()))
    if group is outside:
        raise ArgumentError("%s is a group without this rank %d" % (what, dist.get_rank()))
    if not mesh and group not in _table():
        raise FailedError("%s: this process group was destroyed before its last use" % what,
                          STATUS['ERR_STATE'])
    ranks = (ranks_of(group) if group.mesh.dim() == 1 else tuple(sorted(ranks_of(group)))) if mesh else tuple(sorted(_table()[group], key=_table()[group].get))
    if dist.get_rank() not in ranks:
        raise ArgumentError("%s has ranks %s, which is a group without this rank %d"
                            % (what, list(ranks), dist.get_rank()))
    return ranks


def require_alive(group: Any, what: str) -> None:
    """RuntimeError when a group that was alive is not any more; cheap."""
    if not (dist.is_initialized() and (group is dist.group.WORLD or alive(group))):
        group_ranks(group, what)


def _timeout() -> datetime.timedelta:
    # What is not allowed is refused when the ranks have met, on all of them.
    allowed = lib().colo_env_check(b'COLO_TIMEOUT_MS') == 0
    ms = lib().colo_env_value(b'COLO_TIMEOUT_MS', None) if allowed else b'600000'
    return datetime.timedelta(milliseconds=int(ms))


class _Meeting:
    """One meeting of ranks at a store, where each says what the others wait for, or that it does not come."""

    def __init__(self, of: _Ranks):
        self.of, self.step, self.store = of, 0, of.store()
        # How often this rank met those, which the store counts: it may be one that served a torch.distributed
        # before, and still have what was said then.
        self.name = '%s/%d' % (of.name, self.store.add('%s/%d' % (of.name, of.me), 1))

    def _keys(self, step: int) -> list[str]:
        return ['%s/%d/%d' % (self.name, step, rank) for rank in self.of.ranks]

    def comm(self) -> Comm:
        """A host communicator of the ranks; collective over them."""
        of = self.of
        try:
            made = Comm.from_all_gather(of.ranks.index(of.me), len(of.ranks), self._all_gather)
            self._all_gather(b'')  # else a rank that is done may refuse its call, which ends this for slower ones
        except BaseException as why:
            if id(of) not in _reached(why):
                _reached(why).add(id(of))
                self.refuse(_said(why))
            raise
        made.set_world_ranks(of.key.names if isinstance(of.key, Own) else of.ranks)
        made._board = _Board(self.store, self.name, of.ranks, of.me)  # type: ignore[attr-defined]
        return made

    def _all_gather(self, mine: bytes) -> list[bytes]:
        self.step += 1
        keys, limit = self._keys(self.step), _timeout()
        self.store.set(keys[self.of.ranks.index(self.of.me)], b'+' + mine)
        try:
            self._wait(keys, limit)
        except FailedError:
            raise
        except Exception as why:
            there = getattr(self.store, 'check', lambda _keys: False)  # torch 1.13 has none
            missing = [rank for rank, key in zip(self.of.ranks, keys) if not there([key])]
            raise DeadlineError(
                "rank %d waited %s for ranks %s of %s to make a communicator (%s)"
                % (self.of.me, limit, missing, list(self.of.ranks), why), STATUS['ERR_TIMEOUT']) from why
        said = [bytes(self.store.get(key)) for key in keys]
        for words in said:
            if words[:1] != b'+':
                why_not = FailedError(words[1:].decode(), STATUS['ERR_PEER'])
                _reached(why_not).add(id(self.of))  # all of them, from where it came
                raise why_not
        return [words[1:] for words in said]

    def _wait(self, keys: list[str], limit: datetime.timedelta) -> None:
        """Waits until all ranks have answered. It asks the store, ever less often, because PyTorch warns of a wait that ends
        early; between two questions Python hears signals. A rank that is a thread may end and not know of this meeting, so
        those that wait look for that themselves, before each question: what a rank answered before it ended is there by then."""
        run, begin = self.of.given and self.of.given._run, time.monotonic()
        asks = hasattr(self.store, 'check')  # not in torch 1.13, where a wait that ends early leaves its answer to the next question
        while True:
            why_not = run and run.why_not(self.of.ranks)
            try:
                if not asks:
                    return self.store.wait(keys, min(limit, _GLANCE) if run else limit)
                if self.store.check(keys):
                    return
            except Exception:
                if asks or not run:
                    raise
            if why_not:
                raise FailedError(why_not, STATUS['ERR_PEER'])
            waited = time.monotonic() - begin
            if waited > limit.total_seconds():
                raise TimeoutError('the deadline is over')
            if asks:
                time.sleep(min(max(waited / 8, .001), (_GLANCE if run else _PART).total_seconds()))

    def refuse(self, why: str) -> None:
        """This rank does not come, or no further. Nothing waits, neither here nor, from now on, at the meeting: this answers
        for all of its ranks, at the step of this one and at the next, where a faster one may wait already."""
        for step in {max(self.step, 1), self.step + 1}:
            for key in self._keys(step):
                try:
                    self.store.set(key, '-rank %d: %s' % (self.of.me, why))
                except Exception:
                    pass  # its server has ended


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


def comm_of_ranks(ranks: Sequence[int] | Own, device: 'torch.device') -> Comm:
    """The communicator of world ranks; collective over them the first time.

    Args:
        ranks: with the one that it is called on.
        device: of the tensors that it will be used for.

    Returns:
        The one that all calls of colobridge.torch on these ranks share.

    Raises:
        TimeoutError: a rank did not come.
    """
    key = ranks if isinstance(ranks, Own) else tuple(ranks)
    members = key.ranks if isinstance(key, Own) else key
    if len(members) == 1:
        return alone(key.names[0] if isinstance(key, Own) else members[0])
    return _ranks(key).comm(device)


def _ranks(key: Any) -> _Ranks:
    store = dist.distributed_c10d._get_default_store()
    with _lock:
        made = old = _made.get(key)
        if made is None or made.store() is not store:  # none, or of a torch.distributed that has ended
            made = _made[key] = _Ranks(key, dist.get_rank(), store)
    if old is not None and made is not old:
        old.destroy()
    return made


def known(group: Any) -> bool:
    """Is it a process group that torch.distributed has? Costs little."""
    return dist.is_available() and isinstance(group, dist.ProcessGroup) and group in _table()


def alive(group: Any) -> bool:
    """Does torch.distributed know this group? Costs little; False: ask require_alive()."""
    return group in _table() or is_mesh(group)


def _store_of(group: Comm) -> Any:
    """Where ranks of run_threads() meet; None: of no other ones."""
    run = group._run
    if run is not None and dist.is_available():
        with _lock:
            run.store = run.store or dist.HashStore()
    return run and run.store


def _ranks_of(group: Comm, key: tuple[int, ...] | Own | None = None) -> _Ranks:
    """Of a communicator of the caller's, of some of its world ranks, or of those that plan, where it is collective if these
    ranks do not meet. Ranks of run_threads() can make another one after an error."""
    kept: dict[Any, _Ranks] = group.__dict__.setdefault('_torch_made', {})
    made = kept.get(key)
    if made is None:
        store, again = _store_of(group), group._run is not None and group.told[0]  # an error killed it: these ranks meet without the others
        if isinstance(key, Own):
            host = None if store else group.split_color(0, group.rank)
        else:
            host = group if key is None else None if again else group.part(key)
        made = kept[key] = _Ranks(key or world_ranks(group), group.world_rank(group.rank), store, host)
        made.given = group
    return made


def comm_of_part(group: Comm, ranks: tuple[int, ...], device: Any) -> Comm:
    """The communicator of some world ranks of @group, this one among them, for tensors on @device; collective over these
    where it is made for it."""
    if len(ranks) == 1:
        return alone(ranks[0])
    made = _ranks_of(group, ranks)
    if made.host is not None and made.host.backend == 'nccl' and not made.host.told[0]:
        return made.host
    return made.comm(device)


def another(group: Any, what: str) -> Own | Comm:
    """Another communicator for all ranks of a group, of one object alone. Of a Comm it is made, by all of them."""
    return group.split_color(0, group.rank) if isinstance(group, Comm) else Own.of(group_ranks(group, what))


def planning(group: Any, own: Own | Comm | None, what: str) -> '_Ranks | None':
    """The ranks of a group, and the communicator on which they plan beside their calls, so perhaps on another thread: @own, or
    one of all objects on these ranks. None: this one alone."""
    ranks = world_ranks(group, what)
    if len(ranks) == 1:
        return None
    key = own or Own(ranks, -1, ranks)
    if isinstance(key, Comm):
        return _ranks_of(key)
    return _ranks_of(group, key) if isinstance(group, Comm) else _ranks(key)


def require_line(group: Any, what: str) -> None:
    """ValueError: a DeviceMesh of several dims, where ranks count along one."""
    if is_mesh(group) and group.mesh.dim() > 1:
        raise ArgumentError("%s is a %s, expected one dim of it, such as mesh['%s']" % (
            what, shown(group), (group.mesh_dim_names or ['tp'])[-1]))


def comm_of(group: 'Group | None', device: 'torch.device', what: str = 'group', *, whole: bool = False) -> Comm:
    """The communicator of a group argument.

    Args:
        group: a torch process group, a DeviceMesh of one dim, a colobridge.Comm, or None: this rank alone.
        device: of the tensors that it will be used for.
        what: the group's name in errors.
        whole: all ranks of a DeviceMesh of several dims are meant.

    Returns:
        The one that all calls of colobridge.torch on these ranks share.

    Raises:
        ValueError: as group_ranks().
        RuntimeError: as group_ranks().
    """
    if group is None:
        return alone()
    if not whole:
        require_line(group, what)
    if isinstance(group, Comm):
        again = group.told[0] and group._run is not None  # an error killed it
        if group.size == 1 or not again and (device.type != 'cuda' or group.backend == 'nccl'):
            return group
        return _ranks_of(group).comm(device)
    return comm_of_ranks(group_ranks(group, what), device)


def world_ranks(group: Any, what: str = 'group') -> tuple[int, ...]:
    """World ranks of a group argument; none of no group."""
    if group is None or isinstance(group, Comm):
        return tuple(map(group.world_rank, range(group.size))) if group else ()
    return group_ranks(group, what)


def require_apart(what: str, tp: Comm, name: str, other: Comm | None) -> None:
    """ValueError: ranks that share the vocabulary, which have the same tokens, are in a group whose ranks have other ones."""
    if other is None or tp.size == 1 or other.size == 1 or other.__dict__.get('_apart') is tp:
        return
    if tp.told is other.told or tp.knows_world and other.knows_world:  # else each may number its ranks in its own way
        both = sorted(set(world_ranks(tp)) & set(world_ranks(other)))
        if len(both) > 1:
            raise ArgumentError("%s: ranks %s are in tp_group %s and in %s %s; ranks of tp_group have the same tokens, those of "
                                "%s have others (dp x cp), so that no two ranks are in both" % (
                                    what, both, list(world_ranks(tp)), name, list(world_ranks(other)), name))
    other._apart = tp  # type: ignore[attr-defined]


def size_and_rank(group: Any, what: str = 'group') -> tuple[int, int]:
    """Of a group argument; no communication."""
    if group is None:
        return 1, 0
    if isinstance(group, Comm):
        return group.size, group.rank
    if known(group):  # what follows costs 20 us a call
        return group.size(), group.rank()
    require_line(group, what)
    ranks = group_ranks(group, what)
    return len(ranks), ranks.index(dist.get_rank())


def refuse(comm: Comm | None, error: BaseException) -> None:
    """Tells the other ranks of @comm why this one does not come: they get the error message of @error at once,
    not a timeout. Nothing to tell to a group of one."""
    try:
        if comm is not None and comm.size > 1:
            _reached(error).add(id(comm.told))
            comm.abort('rank %d: %s' % (comm.world_rank(comm.rank), _said(error)))
            _hear(comm)
    except Error:
        pass  # destroyed


def _group_of(value: Any) -> _Ranks | None:
    """The ranks of an argument that is a group, or has one; None: it has none, or this rank is alone in it."""
    if isinstance(value, _Ranks):
        return value
    value = getattr(value, 'ds_process_group', value)
    talks = getattr(value, '_talks_to', None)  # a Bridge's
    value = value if talks is None else talks
    if isinstance(value, tuple) and isinstance(value[0], Comm):
        return _ranks_of(*value) if len(value[1]) > 1 else None
    if isinstance(value, Comm):
        return _ranks_of(value) if value.size > 1 else None
    key = group_ranks(value) if talks is None else talks
    return _ranks(key) if len(key.ranks if isinstance(key, Own) else key) > 1 else None


def tell(error: BaseException, arguments: Iterable[Any]) -> None:
    """Tells the groups among the arguments of a call of the error that it ended with."""
    for value in arguments:
        try:
            if hasattr(value, 'placements'):  # a DTensor
                found = [_ranks(of) for of in groups_of(value) if len(of) > 1]
            else:
                found = [_group_of(value)]
        except Exception:  # no group
            continue
        for of in found:
            if of is not None:
                of.refuse(error)


def end(key: Own) -> None:
    """Destroys communicators whose object is gone; local."""
    with _lock:
        made = _made.pop(key, None)
    if made is not None:
        made.destroy()


def shutdown() -> None:
    """Destroys all communicators made from torch groups. Also done at exit."""
    with _lock:
        made = list(_made.values())
        _made.clear()
    for of in made:
        of.destroy()


def _said(why: BaseException) -> str:
    return str(why) or type(why).__name__  # KeyboardInterrupt has no words


def _words(why: BaseException) -> str:
    return '%s: %s' % (type(why).__name__, why)


def _cause(why: BaseException | None) -> str:
    """Of the end of the program by an exception. torch.multiprocessing, which catches one, ends by SystemExit."""
    why = why.__context__ if isinstance(why, SystemExit) else why
    return '' if why is None else _words(why)


def _end() -> None:
    """At exit. After an exception that nothing caught, or that ends a process of multiprocessing, which catches it, the
    other ranks hear which one it was; so they do if a script catches it and gives it to sys.excepthook(). Those that make a
    communicator anew after an error wait for this rank, however it ends."""
    words = _cause(sys.exc_info()[1] or getattr(sys, 'last_value', None))
    if not words and _failure[1] == _counted():  # else the script has gone on since
        words = _failure[0]
    with _lock:
        made = list(_made.values())
    for of in made:
        if of.forks == comms._forks and (words or of.host is not None and (of.host.died or of.host._handle and _is_dead(of.host))):  # not those of a parent
            of.leave(words or 'its process has ended')
    shutdown()


def _counted() -> list[Any]:
    """What all communicators have done; another list after each operation."""
    with _lock:
        return [of.host.stats() for of in _made.values() if of.host is not None and of.host._handle]


def _shown(why: BaseException | None) -> None:
    global _failure
    _failure = _cause(why), _counted()


@functools.lru_cache(maxsize=None)
def _hear_hook() -> None:
    """Lets sys.excepthook tell this module of the exceptions that it shows."""
    show = sys.excepthook

    @functools.wraps(show)
    def hook(kind: Any, why: Any, trace: Any) -> None:
        try:
            show(kind, why, trace)
        finally:
            _shown(why)
    sys.excepthook = hook


def _note_exception() -> None:
    """Makes multiprocessing, and that of PyTorch, note an exception that ends its process, when it puts it into words: from
    Python 3.13 on, it runs _end() when nothing is left of that."""
    ends = {multiprocessing.process.BaseProcess._bootstrap.__code__, _wrap.__code__}

    def note(words: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(words)
        def noted(*args: Any, **options: Any) -> Any:
            if sys._getframe(1).f_code in ends:
                _shown(sys.exc_info()[1])
            return words(*args, **options)
        return noted
    traceback.print_exc, traceback.format_exc = note(traceback.print_exc), note(traceback.format_exc)


@functools.lru_cache(maxsize=None)
def _end_child(_pid: int) -> None:
    """Lets a process of multiprocessing, which knows no atexit if it is a fork, end as others do."""
    _hear_hook()
    if multiprocessing.process.parent_process() is not None:
        _note_exception()
        multiprocessing.util.Finalize(None, _end, exitpriority=0)


atexit.register(_end)
