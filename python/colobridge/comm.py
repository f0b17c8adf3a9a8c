# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that talk: in-process ranks, processes over sockets, GPUs; docs/runtime/comm.md."""
import atexit
import contextlib
import ctypes as c
import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from . import _structs as s
from ._lib import Handle, call, check as checked, error_message, hear_signals, lib, result, text
from .errors import STATUS, Error, exception
from .grid import Grid, _joined
from .plan import TRANSPORTS, choice
from .view import view

_REDUCE = {'sum': s.REDOP_SUM, 'max': s.REDOP_MAX}
_TRANSPORTS = {**TRANSPORTS, 'ucx': s.TRANSPORT_UCX}
_FIRST = 4088  # bytes that gather_bytes() moves with their number
_forks: int = 0  # between the process that loaded this and the one that runs


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)
_alive: 'weakref.WeakSet[Comm]' = weakref.WeakSet()


def _end() -> None:
    """At exit, because later the modules that destroy() needs may be gone."""
    for comm in list(_alive):
        comm.destroy()


atexit.register(_end)


class _Run:
    """One call of run_threads(). anew: by rank, communicators that took the place of ones that an error killed, which
    the library's run does not know of, some of them destroyed since; store: where ranks meet to make them."""

    def __init__(self) -> None:
        self.worlds: dict[int, Comm] = {}
        self.anew: dict[int, list[Comm]] = {}
        self.store: Any = None
        self.interrupted = False
        self._left: dict[int, str] = {}  # by rank: how it ended

    def why_not(self, ranks: Iterable[int]) -> str:
        """Why these ranks do not meet any more; '': they may."""
        return 'interrupted' if self.interrupted else next((self._left[r] for r in ranks if r in self._left), '')

    def begin(self, comm: 'Comm') -> None:
        comm._run, self.worlds[comm.rank] = self, comm
        if self.interrupted:
            self._abort(comm, 'interrupted')

    def end(self, rank: int, why: BaseException | None) -> None:
        self._left[rank] = 'rank %d%s' % (rank, ' has ended' if why is None else ': %s: %s' % (type(why).__name__, why))
        for comm in self.anew.pop(rank, []):
            if why is not None:
                self._abort(comm, self._left[rank])
            comm.destroy()
        del self.worlds[rank]

    @staticmethod
    def _abort(comm: 'Comm', why: str) -> None:
        if comm._handle:
            comm.abort(why)

    def interrupt(self) -> None:
        """Ends the waits of all ranks."""
        self.interrupted = True
        for comm in [*self.worlds.values(), *itertools.chain.from_iterable(self.anew.values())]:
            self._abort(comm, 'interrupted')


def _config(config: s.CommConfig, timeout: float | None, check: int | None, transport: str | None,
            flight_recorder: 'str | os.PathLike[str] | None') -> s.CommConfig:
    """@config with what is not None."""
    if timeout is not None:
        config.timeout_ms = max(int(timeout * 1000), 1)
    if check is not None:
        config.check = check
    if transport is not None:
        config.transport = choice('transport', transport, _TRANSPORTS)
    if flight_recorder is not None:
        config.flight_recorder = os.fsencode(flight_recorder)
    return config


class Comm(Handle):
    """A communicator; .handle is its colo_comm_t pointer. One thread at a time uses it. Exception: any thread may call abort()
    and dump().

    Make one with run_threads(), Comm.self(), Comm.from_all_gather(), split(), or Comm.nccl(). Calls are collective and raise
    TimeoutError, MismatchError or RuntimeError as the library's error message says.

    Attributes:
        rank: this one's, from 0.
        size: how many ranks.
    """
    _gone = 'this communicator was destroyed'

    def __init__(self, handle: c.c_void_p, *, owned: bool = True, parent: 'Comm | None' = None):
        self._handle = handle
        self._owned = owned
        self._forks = _forks
        self.died = False  # had an operation failed when it was destroyed
        # Has this rank heard of the error that killed it? Of those made from each other an error kills all.
        self.told = [False] if parent is None else parent.told
        self._run: _Run | None = None if parent is None else parent._run
        self._named = parent is not None and parent._named
        self._above: Comm | None = None  # whose part it is
        self._parts: dict[int | None, Comm] = {}  # by handle
        self._users: list[tuple[c.c_void_p, str]] = []
        _alive.add(self)
        self.rank: int = lib().colo_comm_rank(handle)
        self.size: int = lib().colo_comm_size(handle)

    # ---- making ----

    @classmethod
    def self(cls) -> 'Comm':
        """A group of one."""
        return cls(result(c.c_void_p, 'colo_comm_create_self'))

    @classmethod
    def from_all_gather(cls, rank: int, size: int, all_gather: Callable[[bytes], list[bytes]], *,
                        timeout: float | None = None, check: int | None = None, transport: str | None = None,
                        flight_recorder: 'str | os.PathLike[str] | None' = None) -> 'Comm':
        """Processes that talk over Unix sockets, or over UCX between hosts; collective. The arguments of configure() hold while
        the ranks connect, too.

        Args:
            rank: this process's, from 0.
            size: how many ranks.
            all_gather: moves a few bytes: all_gather(mine) returns what every rank brought, by rank. What it raises, this
                raises.
            timeout: as configure()'s.
            check: as configure()'s.
            transport: as configure()'s, or "ucx".
            flight_recorder: as configure()'s.

        Returns:
            The communicator of these processes.

        Raises:
            RuntimeError: another rank failed.
            TimeoutError: a rank did not come.
        """
        raised: list[BaseException] = []

        def gather(_user: int, send: int, recv: int, count: int) -> int:
            try:
                parts = all_gather(c.string_at(send, count))
                if len(parts) != size or any(len(part) != count for part in parts):
                    raise ValueError("the all-gather returned parts of %s bytes, expected %d of %d"
                                     % ([len(part) for part in parts], size, count))
                c.memmove(recv, b''.join(parts), count * size)
                return 0
            except BaseException as why:  # nothing may pass through C
                raised.append(why)
                return STATUS['ERR_STATE']

        config = _config(s.CommConfig(c.sizeof(s.CommConfig), 0, 1), timeout, check, transport, flight_recorder)
        hear_signals()
        handle = c.c_void_p()
        boot = s.Bootstrap(c.sizeof(s.Bootstrap), rank, size, s.AllGatherFn(gather), None, c.pointer(config))
        status = lib().colo_comm_create_bootstrap(boot, c.byref(handle))
        if raised:
            lib().colo_comm_destroy(c.byref(handle))
            raise raised[0]
        checked(status)
        return cls(handle)

    def nccl(self, device: int = -1) -> 'Comm':
        """GPUs, one per rank of this communicator, which is kept for control; collective.

        Args:
            device: ordinal of this rank's GPU; -1: the current one.

        Returns:
            The communicator of the GPUs.

        Raises:
            RuntimeError: no GPU, or NCCL failed.
        """
        return Comm(result(c.c_void_p, 'colo_comm_create_nccl', self.handle, device), parent=self)

    def split(self, grid: Any, dims: Any) -> 'Comm | None':
        """This rank's group of dims; collective.

        Args:
            grid: a Grid, or what Grid() takes ("tp=2,dp=4").
            dims: names joined by "-", or a list of them.

        Returns:
            The group's communicator; None on ranks outside the grid.

        Raises:
            ValueError: unknown dim.
            KeyError: a member of the group is not in this communicator.
            MismatchError: ranks passed different grids or dims.
        """
        grid = grid if isinstance(grid, Grid) else Grid(grid)
        handle = result(c.c_void_p, 'colo_comm_split', self.handle, grid._raw, text(_joined(dims)))
        return Comm(handle, parent=self) if handle else None

    def split_color(self, color: int, key: int = 0) -> 'Comm | None':
        """Ranks of one color; collective.

        Args:
            color: below 0: none.
            key: ranks are ordered by (key, rank).

        Returns:
            Their communicator; None if color < 0.
        """
        handle = result(c.c_void_p, 'colo_comm_split_color', self.handle, color, key)
        return Comm(handle, parent=self) if handle else None

    def part(self, world_ranks: Sequence[int]) -> 'Comm':
        """The communicator of some of its ranks; local, and no other rank has to call. The same ranks get the same one each
        time, all of them get this one; destroy() ends it.

        Args:
            world_ranks: distinct, this one among them.

        Returns:
            Their communicator.

        Raises:
            KeyError: a rank that is not in it.
        """
        handle = result(c.c_void_p, 'colo_comm_part', self.handle, (s.i64 * max(len(world_ranks), 1))(*world_ranks),
                        len(world_ranks))
        if handle.value == self.handle.value:
            return self
        made = self._parts.get(handle.value)
        if made is None:
            made = self._parts[handle.value] = Comm(handle, owned=False)
            made._above, made._run = self, self._run
            made._named = self._named
        return made

    def destroy(self) -> None:
        """Local; the second time does nothing. Parts, and bridges made from it, are destroyed with it. The last
        communicator of processes waits at most a second for the others to destroy theirs."""
        while self._parts:
            self._parts.popitem()[1].destroy()
        if self._handle and self._forks == _forks and lib().colo_comm_check(self._handle) < 0:
            self.died = True
        users, self._users = self._users, []
        for handle, end in reversed(users):
            self.ends(handle, end)
        if self._handle and self._owned:
            self.ends(self._handle, 'colo_comm_destroy')
        self._handle = c.c_void_p()

    def serves(self, handle: c.c_void_p, end: str) -> None:
        """Notes an object that borrows this communicator; function @end destroys it and sets it to NULL.
        Objects end in any order, when a cycle is collected or the interpreter goes: so this one ends
        what is left of them before itself."""
        self._users.append((handle, end))

    def ends(self, handle: c.c_void_p, end: str) -> None:
        """Destroys an object that serves() noted, once. In a fork of the process that made it, it is
        only forgotten: connections, GPUs and the word to other ranks are the parent's."""
        self._users = [user for user in self._users if user[0] is not handle]
        if handle and self._forks == _forks:
            getattr(lib(), end)(c.byref(handle))
        handle.value = None

    # ---- what it is ----

    @property
    def backend(self) -> str:
        """What carries: "loopback", "process", "mpi" or "nccl"."""
        return lib().colo_comm_backend(self.handle).decode()

    @property
    def check_level(self) -> int:
        """How much ranks compare: COLO_CHECK."""
        return lib().colo_comm_check_level(self.handle)

    @property
    def name(self) -> str:
        """The name of the communicator in messages; it can be set."""
        return lib().colo_comm_name(self.handle).decode('utf-8', 'replace')  # cut after 31 bytes

    @name.setter
    def name(self, value: str) -> None:
        lib().colo_comm_set_name(self.handle, text(value))

    def world_rank(self, rank: int) -> int:
        """World rank of a rank.

        Args:
            rank: of this communicator.

        Returns:
            The world rank, -1 if out of range.
        """
        return lib().colo_comm_world_rank(self.handle, rank)

    def find(self, world_rank: int) -> int:
        """Rank of a world rank.

        Args:
            world_rank: the world rank.

        Returns:
            Its rank here, -1 when it is no member.
        """
        return lib().colo_comm_find(self.handle, world_rank)

    @property
    def knows_world(self) -> bool:
        """Are its world ranks those of a program, by set_world_ranks() or run_threads(), or just 0, 1, ..?"""
        return self._named or self._run is not None

    @property
    def nodes(self) -> int:
        """Hosts of its ranks."""
        return lib().colo_comm_nodes(self.handle)

    def node(self, rank: int) -> int:
        """The node of a rank.

        Args:
            rank: of this communicator.

        Returns:
            The node, numbered by its first rank; -1 if out of range.
        """
        return lib().colo_comm_node(self.handle, rank)

    def node_of_world_ranks(self, ranks: int) -> list[int] | None:
        """The nodes of world ranks, as Plan takes them.

        Args:
            ranks: of world ranks 0 to ranks - 1 or more.

        Returns:
            The node of each, -1 where it is no member; None if there is one node.
        """
        if self.nodes < 2:
            return None
        found = {self.world_rank(r): self.node(r) for r in range(self.size)}
        return [found.get(r, -1) for r in range(max(ranks, max(found) + 1))]

    def set_world_ranks(self, world_ranks: Sequence[int]) -> None:
        """Which world ranks the members are, the same on all of them; before anything is made from it.

        Args:
            world_ranks: [size], by rank.

        Raises:
            ValueError: another length.
        """
        if len(world_ranks) != self.size:
            raise ValueError("world_ranks has %d entries, expected %d" % (len(world_ranks), self.size))
        call('colo_comm_set_world_ranks', self.handle, (s.i64 * self.size)(*world_ranks))
        self._named = True

    def configure(self, *, timeout: float | None = None, check: int | None = None, transport: str | None = None,
                  flight_recorder: 'str | os.PathLike[str] | None' = None) -> None:
        """What holds for this communicator, its parts, and those that are made from it later; local. None: what held before. An
        environment variable that is set overrides its argument. The same on all ranks, but for flight_recorder.

        Args:
            timeout: seconds, the deadline of every wait (COLO_TIMEOUT_MS).
            check: 0, 1 or 2 (COLO_CHECK).
            transport: "auto", "nccl" or "peer", of bridges that name none; "ucx" is for from_all_gather() (COLO_TRANSPORT).
            flight_recorder: the beginning of a path, where each rank writes its last operations after a failure; "": no file
                (COLO_FLIGHT_RECORDER).

        Raises:
            ValueError: a value that is not allowed.
        """
        config = _config(self._configured(), timeout, check, transport, flight_recorder)
        call('colo_comm_configure', self.handle, config)

    def _configured(self) -> s.CommConfig:
        config = s.CommConfig(c.sizeof(s.CommConfig))
        call('colo_comm_config', self.handle, config)
        return config

    @property
    def config(self) -> dict[str, Any]:
        """What is in force, as the arguments of configure()."""
        config = self._configured()
        return {'timeout': config.timeout_ms / 1000, 'check': config.check,
                'transport': next(word for word, value in _TRANSPORTS.items() if value == config.transport),
                'flight_recorder': os.fsdecode(config.flight_recorder or b'')}

    def set_timeout(self, seconds: float) -> None:
        """Deadline of every wait; communicators made later inherit it.

        Args:
            seconds: the deadline.

        Raises:
            ValueError: a value that is not allowed.
        """
        call('colo_comm_set_timeout', self.handle, max(int(seconds * 1000), 1))

    def set_check(self, level: int) -> None:
        """COLO_CHECK for this communicator.

        Args:
            level: 0, 1 or 2.

        Raises:
            ValueError: another level.
        """
        call('colo_comm_set_check', self.handle, level)

    def __repr__(self) -> str:
        if not self._handle:
            return 'Comm(destroyed)'
        return "Comm(rank %d of %d, %s)" % (self.rank, self.size, self.backend)

    # ---- operations ----

    def barrier(self, stream: int | None = None) -> None:
        """No rank goes on before all ranks have come.

        Args:
            stream: on a GPU, the work that follows on it waits; an address, None: the default one.
        """
        call('colo_comm_barrier', self.handle, stream)

    def all_gather(self, send: Any, recv: Any, stream: int | None = None) -> None:
        """recv = every rank's send, by rank.

        Args:
            send: contiguous.
            recv: contiguous, of the dtype of send and size times its elements; written.
            stream: of the GPU, as barrier()'s.

        Raises:
            ValueError: other elements or dtypes.
        """
        (a, n), (b, m) = self._pair(send, recv)
        _counts('all_gather', n * self.size, m)
        call('colo_comm_all_gather', self.handle, a.data, b.data, n, a.dtype, stream)

    def all_reduce(self, send: Any, recv: Any | None = None, op: str = 'sum',
                   stream: int | None = None) -> None:
        """recv = the sum or max over ranks, combined in rank order. Returns None.

        Args:
            send: contiguous, of floats, i32 or i64.
            recv: as send; written. None: send, in place.
            op: "sum" or "max".
            stream: of the GPU, as barrier()'s.

        Raises:
            ValueError: other elements or dtypes.
        """
        (a, n), (b, m) = self._pair(send, send if recv is None else recv)
        _counts('all_reduce', n, m)
        call('colo_comm_all_reduce', self.handle, a.data, b.data, n, a.dtype, _REDUCE[op], stream)

    def reduce_scatter(self, send: Any, recv: Any, op: str = 'sum',
                       stream: int | None = None) -> None:
        """recv = this rank's slice of the sum or max over ranks.

        Args:
            send: contiguous, of floats, i32 or i64.
            recv: contiguous, of the dtype of send, which has size times its elements; written.
            op: "sum" or "max".
            stream: of the GPU, as barrier()'s.

        Raises:
            ValueError: other elements or dtypes.
        """
        (a, n), (b, m) = self._pair(send, recv)
        _counts('reduce_scatter', n, m * self.size)
        call('colo_comm_reduce_scatter', self.handle, a.data, b.data, m, a.dtype, _REDUCE[op], stream)

    def broadcast(self, buffer: Any, root: int = 0, stream: int | None = None) -> None:
        """The buffer of one rank to all ranks.

        Args:
            buffer: contiguous, of the same elements and dtype on all ranks; written on the others.
            root: the rank whose it is.
            stream: of the GPU, as barrier()'s.

        Raises:
            ValueError: it is not contiguous.
        """
        t, count = _flat(buffer, 'buffer', writes=self.rank != root)
        call('colo_comm_broadcast', self.handle, t.data, count, t.dtype, root, stream)

    def _pair(self, send: Any, recv: Any) -> tuple[tuple[s.Tensor, int], tuple[s.Tensor, int]]:
        a, b = _flat(send, 'send'), _flat(recv, 'recv', writes=True)
        if a[0].dtype != b[0].dtype:
            raise ValueError("send is %s, recv %s" % (s.DTYPES[a[0].dtype], s.DTYPES[b[0].dtype]))
        return a, b

    def gather_bytes(self, mine: bytes, ragged: bool = False) -> list[bytes]:
        """What every rank brought, by rank.

        Args:
            mine: of the same length on all ranks.
            ragged: of any length, by one exchange, two if a rank brings more than 4,088 bytes.

        Returns:
            The bytes of each rank.
        """
        if ragged:
            first = [(int.from_bytes(part[:8], 'little'), part[8:]) for part in self.gather_bytes(
                len(mine).to_bytes(8, 'little') + mine[:_FIRST].ljust(_FIRST, b'\0'))]
            more = max(n for n, _ in first) - _FIRST
            rest = self.gather_bytes(mine[_FIRST:].ljust(more, b'\0')) if more > 0 else [b''] * self.size
            return [(part + others)[:n] for (n, part), others in zip(first, rest)]
        n = len(mine)
        send = c.create_string_buffer(mine, max(n, 1))
        recv = c.create_string_buffer(max(n * self.size, 1))
        call('colo_comm_all_gather', self.handle, c.addressof(send), c.addressof(recv), n,
             s.DTYPE['u8'], None)
        return [recv.raw[i * n:(i + 1) * n] for i in range(self.size)]

    # ---- failure, statistics ----

    def abort(self, why: str) -> None:
        """From any thread: every wait on this communicator and its relatives ends.

        Args:
            why: what the errors of these waits say.
        """
        lib().colo_comm_abort(self.handle, text(why))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Around a collective call: an argument that Python refuses on this rank ends the others' waits."""
        try:
            yield
        except Exception as why:
            if not getattr(why, 'status', 0) and self._handle and self.size > 1:
                self.abort('rank %d: %s' % (self.world_rank(self.rank), why))
            raise

    def check(self) -> None:
        """Raises the error that killed the communicator, if one did."""
        call('colo_comm_check', self.handle)

    def stats(self) -> dict[str, dict[str, dict[str, int]]]:
        """{category: {operation: {"ops", "sent", "recv"}}} so far, bytes of this rank; zeros are left out."""
        raw = s.CommStats(struct_size=c.sizeof(s.CommStats))
        call('colo_comm_stats', self.handle, raw)
        out: dict[str, dict[str, dict[str, int]]] = {}
        for k, op in enumerate(s.OPS):
            for o, owner in enumerate(s.OWNERS):
                if raw.ops[k][o]:
                    out.setdefault(owner, {})[op] = {
                        'ops': raw.ops[k][o], 'sent': raw.sent_bytes[k][o],
                        'recv': raw.recv_bytes[k][o]}
        return out

    def stats_reset(self) -> None:
        """stats() counts from here."""
        lib().colo_comm_stats_reset(self.handle)

    def dump(self) -> dict[str, Any]:
        """Counters and the last 256 operations; keys as in docs/runtime/comm.md."""
        need = lib().colo_comm_dump(self.handle, None, 0)
        raw = c.create_string_buffer(need + 4096)
        lib().colo_comm_dump(self.handle, raw, len(raw))
        return json.loads(raw.value)

    def flight_record(self, prefix: str) -> None:
        """Writes this rank's last 256 operations, and those of the other communicators of its world, as JSON, which `python -m
        colobridge flight` reads.

        Args:
            prefix: the path of the file without the rank's number.

        Raises:
            RuntimeError: the file cannot be written.
        """
        call('colo_comm_flight_record', self.handle, text(prefix))


def _flat(obj: Any, what: str, *, writes: bool = False) -> tuple[s.Tensor, int]:
    """(view, elements) of a contiguous tensor. The view may be all that holds the memory, so the caller
    keeps it until the call has returned."""
    t = view(obj, what, writes=writes)
    count = 1
    for n in t.shape[:t.ndim]:
        count *= n
    expected = 1
    for axis in reversed(range(t.ndim)):
        if t.shape[axis] > 1 and count and t.stride[axis] != expected:
            raise ValueError("%s is not contiguous: shape %s, strides %s"
                             % (what, t.shape[:t.ndim], t.stride[:t.ndim]))
        expected *= t.shape[axis]
    return t, count


def _counts(what: str, send: int, recv: int) -> None:
    if send != recv:
        raise ValueError("%s: recv has %d elements, expected %d" % (what, recv, send))


T = TypeVar('T')


def run_threads(nranks: int, fn: Callable[[Comm], T]) -> list[T]:
    """fn(world) on threads of this process, each with its communicator.

    If a rank raises, the waits of the others end, and the first rank's own exception is raised. Ctrl-C ends the waits of all.

    Args:
        nranks: how many ranks.
        fn: what each of them runs.

    Returns:
        What fn returned, by rank.

    Example:
        >>> import colobridge
        >>> colobridge.run_threads(2, lambda world: world.rank)
        [0, 1]
    """
    results: list[Any] = [None] * nranks
    run = _Run()
    raised: list[tuple[int, BaseException]] = []
    lock = threading.Lock()

    def rank(world: int, _arg: int) -> int:
        comm = Comm(c.c_void_p(world), owned=False)
        me, failed = comm.rank, None
        run.begin(comm)
        try:
            results[me] = fn(comm)
            return 0
        except BaseException as why:  # nothing may pass through C
            failed = why
            with lock:
                raised.append((me, why))
            status = why.status if isinstance(why, Error) else 0
            return status or STATUS['ERR_STATE']
        finally:
            try:
                run.end(me, failed)
            finally:
                del failed
                comm.destroy()  # what it serves; itself is the library's

    run_ranks = lib().colo_comm_threads_run  # here, where an error of loading reaches the caller
    ended: list[tuple[int, str]] = []
    # Two events, because Ctrl-C may interrupt Thread.start(), and a join() that it interrupts takes the thread for ended.
    begin, end = threading.Event(), threading.Event()

    def start() -> None:
        begin.wait()
        try:
            if not run.interrupted:
                ended.append((run_ranks(nranks, s.RankFn(rank), None), error_message()))
        finally:
            end.set()

    try:  # the main thread, which alone runs handlers of signals, does not wait in C
        threading.Thread(target=start).start()
        begin.set()
        end.wait()
    except BaseException:
        run.interrupt()
        begun = begin.is_set()
        begin.set()
        if begun:
            end.wait()
        raise
    if raised:
        handed_on = STATUS['ERR_PEER'], STATUS['ERR_ABORTED']
        own = [pair for pair in raised if getattr(pair[1], 'status', 0) not in handed_on]
        me, why = (own or raised)[0]
        if hasattr(why, 'add_note'):
            why.add_note('on rank %d of %d' % (me, nranks))
        raise why
    status, message = ended[0]
    if status < 0:
        raise exception(status, message)
    return results
