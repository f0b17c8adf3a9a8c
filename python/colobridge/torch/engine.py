# SPDX-License-Identifier: Apache-2.0
"""What is behind the modules of bridge.py and tower.py: ranks, communicators and memory of a bridge. What a call does is
uniform.py and ragged.py."""
import collections
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _structs as s
from .. import bridge as core
from .._lib import Unique
from ..comm import Comm
from ..errors import STATUS, ArgumentError, Error
from ..layout import Layout, parts_of
from ..packing import Repacking
from ..plan import ALGOS, GRADS, OUTPUTS, TRANSPORTS, choice
from ..segments import Segments
from . import alike
from . import arena as arenas
from . import moves
from . import ragged as ragged_batches
from . import ranks as groups
from . import calls, sides
from .calls import eager, watched
from .ready import number
from .ticket import Asked
from .uniform import Carry, Core, Ready, about

ENGINES: Any = weakref.WeakValueDictionary()  # by number
_numbers = itertools.count()
COMMS = {'shared': 0, 'own': 1}
_KEPT = 64  # shapes whose views are kept


def _me() -> int:
    return dist.get_rank()


class Engine(Unique):
    """What of a bridge belongs to this process: ranks, communicators, memory. A copy of a bridge has the same one; one that is
    pickled is made anew, of the same layouts and options.

    kind: "uniform", "ragged" or "packed"; the other arguments, and members without words here, are those of the modules
    (bridge.py), whose errors it raises.
    comm: also an Own, which whoever gives it ends."""

    def __init__(self, src: Any, dst: Any, *, group: Any, axes: str = 'bsh',
                 output: str = 'full', grad: str = 'partial', algo: str = 'exact',
                 frozen: bool = False, ranks_per_node: int = 0, transport: str = 'auto',
                 buffers: int | None = None, extra: str | Sequence[str] = (),
                 comm: str | groups.Own = 'shared', grad_scale: float = 1.0, kind: str = 'uniform'):
        if group is None:
            raise ArgumentError("bridge: group is None; pass torch.distributed.group.WORLD, another "
                                "process group with all ranks of the grids, or a colobridge.Comm")
        self.group, self.kind = group, kind
        self._ranks: tuple[int, ...] | None = None  # of torch's, that it concerns; None: the group is a Comm
        self._names: tuple[int, ...] = ()  # what they are in the grids
        self._part: tuple[int, ...] | None = None  # of a Comm, if it does not concern all of its ranks
        self._own = comm if isinstance(comm, groups.Own) else None  # instead of the ranks, if not all calls have its communicators
        self._owned = False
        try:
            self.grad_scale = number('bridge: grad_scale', grad_scale)
            self._create(src, dst, axes, output, grad, algo, frozen, ranks_per_node, transport, buffers, extra, comm)
        except BaseException as why:
            self._refuse(why, comm)
            raise
        self._given: dict[str, Any] = dict(self._options, frozen=frozen, transport=transport, buffers=buffers, grad_scale=self.grad_scale,
                                           kind=kind)

    def __reduce__(self) -> Any:
        if self.group is not dist.group.WORLD or self._own is not None:
            raise TypeError("bridge: found one %s to pickle, expected torch.distributed.group.WORLD and comm='shared'; save the "
                            "state_dict() of the model, and make the module anew where it is loaded"
                            % ("with comm='own'" if self._owned or self._own else 'of a group of its own'))
        return _loaded, (self.src, self.dst, self._given)

    def _create(self, src: Any, dst: Any, axes: str, output: str, grad: str, algo: str, frozen: bool,
                ranks_per_node: int, transport: str, buffers: int | None, extra: str | Sequence[str],
                comm: str | groups.Own) -> None:
        group, packed = self.group, self.kind == 'packed'
        count = groups.group_ranks(group, 'bridge: group') if packed and not isinstance(group, Comm) else None
        self.src = sides.layout_of('bridge: src', src, Layout.src, extra, count)
        self.dst = sides.layout_of('bridge: dst', dst, Layout.dst, extra, count)
        for name, side, other, layout in (('src', src, dst, self.src), ('dst', dst, src, self.dst)):
            sides.compare('bridge: ' + name, side, layout.grid, group, (other,), count)
        choice('output', output, OUTPUTS), choice('grad', grad, GRADS), choice('algo', algo, ALGOS)
        choice('transport', transport, TRANSPORTS)
        if self._own is None:
            choice('comm', comm, COMMS)
        if transport == 'peer' and algo == 'collective':
            raise ArgumentError("bridge: transport is 'peer' and algo 'collective', which runs collectives of "
                                "the communicator; take algo='exact' or transport='auto'")
        if buffers is not None and (
                not isinstance(buffers, int) or isinstance(buffers, bool) or buffers < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError("bridge: buffers is %r, expected how many outputs of a shape are in memory "
                                "that peers reach, 0 or more, or None" % (buffers,))
        if sorted(axes) != sorted('bsh') and axes not in ('th', 'bh'):
            raise ArgumentError("bridge: axes '%s', expected a permutation of 'bsh', 'th' or 'bh'" % axes)
        if self.kind != 'uniform' and buffers:
            raise ArgumentError("bridge: %s with buffers %s; expected None or 0" % (self.kind, buffers))
        if self.kind == 'ragged':
            Segments([], src=[], seq=[], pos=[], seq_len=[], seq_dp=[]).check(self.src, self.dst)
        self._owned = comm == 'own'
        if isinstance(group, Comm):
            inside = tuple(map(group.world_rank, range(group.size)))
            ranks = self._concerned(inside, group.world_rank(group.rank))
            self._part = None if ranks == inside else ranks
            if self._owned:
                among = self.comm(torch.device('cpu'))
                self.group, self._part = among.split_color(0, among.rank), None
        self.axes = axes
        self._options: dict[str, Any] = {'axes': axes, 'output': output, 'grad': grad, 'algo': algo,
                                         'ranks_per_node': ranks_per_node}
        self.frozen, self.transport, self.buffers = frozen, transport, buffers
        # into how many parts the source cuts samples, rows and features
        self._parts = tuple(parts_of(self.src, axis) for axis in (s.AXIS_SAMPLES, s.AXIS_ROWS, s.AXIS_FEATURES))
        self._dst_features = parts_of(self.dst, s.AXIS_FEATURES)
        self._ragged: dict[Any, ragged_batches.Ragged] = {}  # by device
        self._checked: Segments | Repacking | None = None  # tables that fit the layouts, the last ones
        self._repackings: collections.deque[Repacking] = collections.deque(maxlen=ragged_batches.KEPT)  # the last ones
        self._cores: dict[Any, Core] = {}  # by dtype and device
        self._kept: collections.OrderedDict[Any, Ready] = collections.OrderedDict()
        self._comm: Comm | None = None
        self._last: Any = None  # what was asked for the last time, and its Ready
        self._again: Any = None  # the same for a call like it, which goes without the rest
        # By which a graph knows it. Of a number that is another one for each bridge torch.compile() makes a variable.
        self._number = str(next(_numbers))
        self._units: dict[int, int] = {}  # by axis
        ENGINES[self._number] = self
        if not isinstance(group, Comm):
            self._members()
        self._traceable = self._ranks is not None and self.kind == 'uniform' and self.src.holds(_me()) and self.dst.holds(_me())
        if self._owned and self._ranks is not None:
            self._own = groups.Own.of(self._ranks, self._names)
            self.comm(torch.device('cpu'))  # now: ranks whose threads meet at the store in other orders would wait in vain

    def _refuse(self, why: BaseException, comm: str | groups.Own) -> None:
        """Tells the ranks that come to this bridge, which they have made, that this one has none. If the layouts do not tell
        which ranks these are: all of the group."""
        if not isinstance(self.group, Comm):
            try:
                if self._ranks is None:
                    self._members()
            except Exception:
                try:
                    self._ranks = groups.group_ranks(self.group)
                except Exception:  # no group: no rank to tell
                    return
                self._names = tuple(range(len(self._ranks))) if self.kind == 'packed' else self._ranks
            if comm == 'own' and self._own is None and self._ranks is not None:
                self._own = groups.Own.of(self._ranks, self._names)
        groups.tell(why, (self,))

    def _members(self) -> None:
        """Checks that the group has all ranks of the grids, and sets which of them this bridge is made for."""
        inside, me = groups.group_ranks(self.group, 'bridge: group'), dist.get_rank()
        have = tuple(range(len(inside))) if self.kind == 'packed' else inside
        for name, layout in (('src', self.src), ('dst', self.dst)):
            missing = [r for r in layout.grid.ranks() if r not in have][:4]
            if missing:
                raise ArgumentError("bridge: ranks %s of the %s grid %s are not in the group of %d ranks"
                                    % (missing, name, layout.grid, len(inside)))
        if self.kind == 'uniform' and moves.plain(self.src) and moves.plain(self.dst):
            self._names = self._ranks = moves.component(self.src.grid, self.dst.grid, me)
        else:
            self._names = self._concerned(have, have[inside.index(me)])
            self._ranks = tuple(inside[have.index(name)] for name in self._names)

    def _concerned(self, have: tuple[int, ...], me: int) -> tuple[int, ...]:
        """Of these ranks, as the grids count them, those of both grids; @me alone if it is in neither."""
        grids = self.src.grid, self.dst.grid
        if not any(grid.has_rank(me) for grid in grids):
            return me,
        return tuple(r for r in have if any(grid.has_rank(r) for grid in grids))

    @property
    def _talks_to(self) -> Any:
        """World ranks, with a number if they have a communicator for this bridge alone, or a Comm, or ranks of one: for
        groups.tell()"""
        if self._ranks is None:
            return self.group if self._part is None else (self.group, self._part)
        return self._own or groups.named(self._ranks, self._names)

    def comm(self, device: Any) -> Comm:
        if self._part is not None:
            return groups.comm_of_part(self.group, self._part, device)
        if self._ranks is None:
            return groups.comm_of(self.group, device, 'bridge: group')
        groups.require_alive(self.group, 'bridge: group')
        return groups.comm_of_ranks(self._talks_to, device)

    def check_samples(self, src: Any, dst: Any) -> None:
        if self._ranks is None:
            comm = self.comm(torch.device('cpu'))
        else:  # all ranks of the grids, not those alone that exchange samples with this one
            groups.require_alive(self.group, 'bridge: group')
            comm = groups.comm_of_ranks(self._concerned(groups.group_ranks(self.group), _me()), torch.device('cpu'))
        alike.samples(comm, self.src, self.dst, (src, dst))

    def global_shape(self, x: Any, samples: int | None = None) -> tuple[int, int, int]:
        axes = self.axes
        if x.dim() != len(axes):
            raise ArgumentError("bridge: x is %s, expected %d axes in the order of '%s'"
                                % (list(x.shape), len(axes), axes))
        dp, parts, features = self._parts
        features *= x.shape[axes.index('h')]
        if axes == 'th':
            if samples is None:
                raise ArgumentError("bridge: x is flattened, so shape=(samples, rows, features) or "
                                    "samples= is needed")
            mine = samples // dp if samples % dp == 0 else None
            if not mine or x.shape[0] % mine:
                raise ArgumentError("bridge: %d flattened rows are not those of %d samples over dp=%d; "
                                    "pass shape=(samples, rows, features)" % (x.shape[0], samples, dp))
            return samples, x.shape[0] // mine * parts, features
        rows = 1 if axes == 'bh' else x.shape[axes.index('s')] * parts
        return (x.shape[axes.index('b')] * dp if samples is None else samples), rows, features

    def _core(self, comm: Comm, shape: tuple[int, ...], dtype: Any, device: Any) -> Ready:
        if comm is not self._comm:  # the first, or one that an error killed was made anew
            self._kept.clear()
            self._cores.clear()
            self._comm = comm
        key = (shape, dtype, device)
        ready = self._kept.get(key)
        if ready is None:
            doing = about(shape, dtype)
            with groups.telling(comm, doing=doing):
                made = self._cores.get((dtype, device))
                if made is None:
                    made = self._cores[dtype, device] = Core(self, comm, shape, dtype, device)
                ready = self._kept[key] = Ready(made, shape)
            ready.doing = doing
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return ready

    def _by_peers(self, transport: str, made: Callable[[str], core.Bridge]) -> tuple[core.Bridge, bool]:
        """What @made makes, and was that through NCCL because ranks that exchange are out of reach? All ranks
        hear of that alike, when they make the bridge."""
        try:
            return made(transport), False
        except Error as why:
            if self.transport == 'peer' or transport != 'peer' or why.status != STATUS['ERR_UNBUILT']:
                raise
        return made('nccl'), True

    @property
    def is_p2p(self) -> bool | None:
        if self._ragged:
            return any(ragged.workspace is not None for ragged in self._ragged.values())
        return None if self._last is None else self._last[1].arena is not None

    @property
    def copied(self) -> int:
        if self._ragged:
            return sum(ragged.workspace.copied for ragged in self._ragged.values() if ragged.workspace is not None)
        arena = None if self._last is None else self._last[1].arena
        return 0 if arena is None else arena.copied

    def _ragged_of(self, device: Any) -> ragged_batches.Ragged:
        made, ranks = self._ragged.get(device), self._ranks
        if made is not None and not made.comm.told[0] and ranks is not None and len(ranks) > 1 and groups.known(self.group):
            return made  # comm() would find the same one
        comm = self.comm(device)
        if made is None or made.comm is not comm:  # the first, or an error killed the communicator
            made = self._ragged[device] = ragged_batches.Ragged(self, comm, device)
        return made

    def _ragged_bridge(self, comm: Comm, device: Any, merged: bool) -> core.Bridge:
        # Tensors of any number of features go through it: any multiple of what the layouts divide.
        units, transport = math.lcm(self._parts[2], self._dst_features), self.transport
        if transport == 'auto':  # as all ranks found, when they asked for memory that peers reach
            transport = 'nccl' if self._ragged[device].workspace is None else 'peer'
        options = {name: self._options[name] for name in ('output', 'ranks_per_node')}
        bridge, far = self._by_peers(transport, lambda by: core.Bridge(
            comm, self.src, self.dst, (units,), grad='none' if self.frozen else self._options['grad'],
            kind='merged' if merged else self.kind, device=device.type, transport=by,
            allocator=arenas.allocator(device), **options))
        if far:
            self._ragged[device].workspace = None
        return bridge

    def rows(self, segments: Segments, device: Any = 'cpu') -> tuple[int, int]:
        ragged = self._ragged_of(torch.empty(0, device=device).device)  # with the number of its GPU
        with groups.telling(ragged.comm):
            return ragged.batch(segments, False, carried=False).batch.rows

    def index(self, segments: Segments, device: Any = 'cpu') -> Any:
        device = torch.empty(0, device=device).device
        ragged = self._ragged_of(device)
        with groups.telling(ragged.comm):
            return ragged.batch(segments, True, carried=False).written(device)

    def _tables(self, src: Any, dst: Any) -> Any:
        if src is None and dst is None:
            return None
        for made in self._repackings:
            if made.src is src and made.dst is dst:
                return made  # whose call may be prepared
        made = Repacking(src, dst)
        self._repackings.append(made)
        return made

    def carry(self, x: Any, samples: int | None, shape: tuple[int, ...] | None, like: Any = None) -> Any:
        """A call of a uniform bridge, outside of torch.compile()."""
        again = self._again
        if again is not None and type(x) is again[0] and not again[3]() and not again[2][0] and \
                again[1] == (x.shape, x.dtype, x.device, samples, shape) and (self._ranks is None or groups.alive(self.group)):
            return again[4](x, again[5], True, None, x.requires_grad and torch.is_grad_enabled())
        return call(self, False, x, None, None, samples, shape, like)

    def _shape_of_y(self, x: Any, samples: int | None, shape: tuple[int, ...] | None) -> list[Any]:
        """Of this rank, by the layouts alone. A size that is a symbol of a graph stays one, where all multiples of a
        number are cut alike."""
        whole = self.global_shape(x, samples) if shape is None else shape
        if shape is not None and self.axes == 'bh' and len(shape) == 2:
            whole = shape[0], 1, shape[1]
        units = [self._unit(axis) if isinstance(n, torch.SymInt) else 0 for axis, n in enumerate(whole[:3])]
        units = [unit if unit and n % unit == 0 else 0 for unit, n in zip(units, whole)]
        cut = self._cut(*(unit or int(n) for unit, n in zip(units, whole)))
        n = dict(zip('bsh', (n // unit * mine if unit else mine for unit, n, mine in zip(units, whole, cut))))
        return [n['b'] * n['s'], n['h']] if self.axes == 'th' else [n[axis] for axis in self.axes]

    def _cut(self, *whole: int) -> tuple[int, int, int]:
        """How many samples, rows and features of y this rank has."""
        owned = self.dst.owned(_me(), *whole, full_rows=self._options['output'] == 'full')
        return owned.samples[1] - owned.samples[0], len(owned.rows), owned.features[1] - owned.features[0]

    def _unit(self, axis: int) -> int:
        """A size of which this rank has the same part as of its multiples; 0: there is none."""
        if axis not in self._units:
            rows = axis == s.AXIS_ROWS
            unit = parts_of(self.dst, axis) * (2 if rows else 1)  # zigzag cuts twice

            def part(n: int) -> int:
                return self._cut(*(n if a == axis else 2 * parts_of(self.dst, a) for a in range(3)))[axis]
            mapped = self.dst._raw.map != s.MAP_IDENTITY  # a table has one length
            self._units[axis] = 0 if mapped or any(part(k * unit) != k * part(unit) for k in (2, 3, 5)) else unit
        return self._units[axis]

    def destroy(self) -> None:
        for made in self._cores.values():
            made.bridge.destroy()
        for ragged in self._ragged.values():
            ragged.destroy()
        self._kept.clear(), self._cores.clear(), self._ragged.clear()
        self._comm = self._last = self._again = None
        if self._owned and self._own is not None:
            groups.end(self._own)
        elif self._owned:
            self.group.destroy()


def _carried(x: Any, bridge: str, samples: Any, shape: Any) -> Any:
    return ENGINES[bridge].carry(x, samples, shape)


calls.OPERATORS['bridge'] = _carried, lambda given: [(ENGINES[given['bridge']]._shape_of_y(
    given['x'], given['samples'], given['shape']), given['x'].dtype)], calls.called, lambda options: ()


def _uniform(self: Engine, x: Any, samples: int | None, shape: tuple[int, ...] | None, like: Any) -> Asked:
    """A call on one tensor from one uniform layout to another."""
    told = like if x is None else x
    if not isinstance(told, torch.Tensor):
        raise ArgumentError("bridge: x is a %s, expected a torch.Tensor%s"
                            % (type(told).__name__, ', or like= one' if x is None else ''))
    here = x is not None
    if x is None:
        if shape is None:
            raise ArgumentError("bridge: x is None, so shape=(samples, rows, features) is needed")
        # Outputs have gradients when an input has.
        x = torch.empty(0, dtype=told.dtype, device=told.device,
                        requires_grad=told.dtype.is_floating_point and not self.frozen)
    if shape is not None:
        shape = tuple(shape)
        if self.axes == 'bh' and len(shape) == 2:
            shape = shape[0], 1, shape[1]
    device = x.device
    comm = self.comm(device)
    asked = x.shape, x.dtype, device, samples, shape
    if self._last is None or comm is not self._comm or self._last[0] != asked:
        if shape is None:
            shape = self.global_shape(x, samples)
        self._last = asked, self._core(comm, shape, x.dtype, device)
    # What a call after this one needs. A group of one belongs to its thread, so it is asked for each time.
    ready, lasts = self._last[1], here and (self._ranks is None or len(self._ranks) > 1)
    self._again = (type(x), self._last[0], self._comm.told, watched, Carry.apply, ready) if lasts else None
    given, follows = x.shape if here else None, x.requires_grad and torch.is_grad_enabled()
    return Asked(device, ready.bridge, lambda flight: (Carry.apply(x, ready, here, flight, follows),),
                 lambda d_ys, back: ready.carry(1, None, d_ys[0], d_ys[0], given, back), [0], operator.itemgetter(0))


@eager  # all of it, so that the others hear of any error
def call(self: Engine, halves: bool, x: Any, segments: Any = None, into: Any = None, samples: Any = None, shape: Any = None,
         like: Any = None, add: bool = False, inplace: bool | None = None, src: Any = None, dst: Any = None) -> Any:
    """A call of a bridge, its Ticket if @halves. It has what its kind of bridge has."""
    if self.kind == 'packed' and not halves:
        y = ragged_batches.again(self, x, src, dst)
        if y is not None:
            return y
    if self.kind != 'uniform':
        tables = self._tables(src, dst) if self.kind == 'packed' else segments
        asked = ragged_batches.asked(self, x, tables, into, like, add, inplace)
    else:
        asked = _uniform(self, x, samples, shape, like)
    return asked.start(self) if halves else asked.arrived(asked.carry(None))


def _loaded(src: Layout, dst: Layout, given: dict[str, Any]) -> Engine:
    return Engine(src, dst, group=dist.group.WORLD, **given)
