# SPDX-License-Identifier: Apache-2.0
"""The bridge in PyTorch: encoder activations in the LLM's layout, gradients back. What a call does is uniform.py and
ragged.py."""
import collections
import functools
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
from ..grid import Grid
from ..layout import Layout, parts_of
from ..packing import Packing, Repacking
from ..plan import ALGOS, GRADS, OUTPUTS, TRANSPORTS, choice
from ..segments import Segments
from . import arena as arenas
from . import calls, sides
from . import moves
from . import ragged as ragged_batches
from . import ranks as groups
from .calls import eager, watched
from .ready import number
from .ticket import Asked, Ticket
from .uniform import Carry, Core, Ready, about

_BRIDGES: Any = weakref.WeakValueDictionary()  # by number
_numbers = itertools.count()
_COMMS = {'shared': 0, 'own': 1}
_KEPT = 64  # shapes whose views are kept
_LAYOUTS = 32  # pairs of layouts and options for which bridge() keeps a Bridge


def _me() -> int:
    return dist.get_rank()


class Bridge(Unique):
    """Carries [b, n, H] activations from layout @src to layout @dst.

    src, dst: Layout; or a grid, for the usual layout of that side: a DeviceMesh with named dims, a spec ("tp=2,dp=4"), whose
    first dim is the fastest, or a Grid. A spec that has ranks elsewhere than the mesh of the call, or that of the process
    groups, is refused. group: a torch process group, a DeviceMesh or a colobridge.Comm with all ranks of the grids; communication stays among
    ranks that exchange, and ranks outside of both grids need not call. axes, output, grad, algo: as colobridge.Bridge() has them; of axes "bh" shape may be (samples,
    features). frozen: no gradient flows back. extra: for specs, dims above 1 with other names than tp, cp, pp, dp
    and ep, declared as dims along which ranks hold copies (Layout.src()).

    transport: "auto", "nccl" or "peer"; buffers: None, or how many blocks: how CUDA tensors of ranks that reach each other's
    memory travel, where y and d_x are then, and when these are PyTorch's own, as nothing moves:
    docs/python.md#memory-that-gpus-reach. transport is the same on all ranks; COLO_TRANSPORT overrides it.

    bridge(x) returns y; both may be any strided tensors, x is not copied. A rank that holds nothing of
    the source passes None and says like=. All ranks of the grids call in the same order, and run
    backward through their y, also when it is empty. x requires grad on all ranks or on none (an x that is None does, unless
    frozen): forward says where it differs, and with it torch.no_grad(). Values move bitwise; dtypes stay as they are
    (autocast does not matter). x is not saved.

    ragged: batches of images that have any number of rows, and samples any number of images. A call has
    tables then, bridge(x, segments); axes and algo stay at their defaults, and buffers is None or 0.

    comm: "shared": the communicator of these ranks, which all calls of colobridge.torch on them have in common, so
    ranks make these calls in one order, on one thread. "own": another one, for this bridge alone; two such bridges may be
    at work at once, on two threads or streams, in any order. All ranks make the bridge, in one order among such ones;
    it connects then.

    grad_scale: factor of x's gradient, as EncoderParallel has it (docs/for-vision.md).

    packed: batches of packed sequences, whose cut changes: bridge(x, src=, dst=), two Packings that say what each rank
    has, so output and grad stay at their defaults, too. The grids count the ranks of @group from 0. docs/packed.md.

    Raises ValueError (shape, dtype, device, layouts that do not fit), RuntimeError (a destroyed group,
    another rank failed), TimeoutError, MismatchError (ranks disagree).
    """

    def __init__(self, src: Any, dst: Any, *, group: Any, axes: str = 'bsh',
                 output: str = 'full', grad: str = 'partial', algo: str = 'exact',
                 frozen: bool = False, ranks_per_node: int = 0, transport: str = 'auto',
                 buffers: int | None = None, extra: str | Sequence[str] = (), ragged: bool = False,
                 comm: str = 'shared', packed: bool = False, grad_scale: float = 1.0):
        if group is None:
            raise ArgumentError("bridge: group is None; pass torch.distributed.group.WORLD, another "
                                "process group with all ranks of the grids, or a colobridge.Comm")
        self.group, self.ragged, self.packed = group, ragged or packed, packed
        self._ranks: tuple[int, ...] | None = None  # of torch's, that it concerns; None: the group is a Comm
        self._names: tuple[int, ...] = ()  # what they are in the grids
        self._part: tuple[int, ...] | None = None  # of a Comm, if it does not concern all of its ranks
        self._own: groups.Own | None = None  # instead of the ranks, if no other object has its communicators
        self._owned = False
        try:
            self.grad_scale = number('bridge: grad_scale', grad_scale)
            self._create(src, dst, axes, output, grad, algo, frozen, ranks_per_node, transport, buffers, extra, ragged, comm)
        except BaseException as why:
            self._refuse(why, comm)
            raise

    def _create(self, src: Any, dst: Any, axes: str, output: str, grad: str, algo: str, frozen: bool,
                ranks_per_node: int, transport: str, buffers: int | None, extra: str | Sequence[str], ragged: bool,
                comm: str) -> None:
        group, packed = self.group, self.packed
        count = groups.group_ranks(group, 'bridge: group') if packed and not isinstance(group, Comm) else None
        self.src = sides.layout_of('bridge: src', src, Layout.src, extra, count)
        self.dst = sides.layout_of('bridge: dst', dst, Layout.dst, extra, count)
        for name, side, other, layout in (('src', src, dst, self.src), ('dst', dst, src, self.dst)):
            sides.compare('bridge: ' + name, side, layout.grid, group, (other,), count)
        choice('output', output, OUTPUTS), choice('grad', grad, GRADS), choice('algo', algo, ALGOS)
        choice('transport', transport, TRANSPORTS), choice('comm', comm, _COMMS)
        if transport == 'peer' and algo == 'collective':
            raise ArgumentError("bridge: transport is 'peer' and algo 'collective', which runs collectives of "
                                "the communicator; take algo='exact' or transport='auto'")
        if buffers is not None and (
                not isinstance(buffers, int) or isinstance(buffers, bool) or buffers < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError("bridge: buffers is %r, expected how many outputs of a shape are in memory "
                                "that peers reach, 0 or more, or None" % (buffers,))
        if sorted(axes) != sorted('bsh') and axes not in ('th', 'bh'):
            raise ArgumentError("bridge: axes '%s', expected a permutation of 'bsh', 'th' or 'bh'" % axes)
        if (ragged or packed) and (axes not in ('bsh', 'th') or algo != 'exact' or buffers):
            raise ArgumentError("bridge: %s with axes '%s', algo '%s' and buffers %s; expected the defaults"
                                % ('packed' if packed else 'ragged', axes, algo, buffers))
        if packed and (ragged or output != 'full' or grad != 'partial'):
            raise ArgumentError("bridge: packed with ragged=%s, output '%s' and grad '%s'; expected the defaults, because "
                                "packings say what a rank has" % (ragged, output, grad))
        if ragged:
            Segments([], src=[], seq=[], pos=[], seq_len=[], seq_dp=[]).check(self.src, self.dst)
        self._owned = bool(_COMMS[comm])
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
        self._parts = tuple(parts_of(self.src, axis) for axis in (s.SAMPLES, s.ROWS, s.FEATURES))
        self._dst_features = parts_of(self.dst, s.FEATURES)
        self._ragged: dict[Any, ragged_batches.Ragged] = {}  # by device
        self._checked: Segments | Repacking | None = None  # tables that fit the layouts, the last ones
        self._cores: dict[Any, Core] = {}  # by dtype and device
        self._kept: collections.OrderedDict[Any, Ready] = collections.OrderedDict()
        self._comm: Comm | None = None
        self._last: Any = None  # what was asked for the last time, and its Ready
        self._again: Any = None  # the same for a call like it, which goes without the rest
        # By which a graph knows it. Of a number that is another one for each bridge torch.compile() makes a variable.
        self._number = str(next(_numbers))
        self._units: dict[int, int] = {}  # by axis
        _BRIDGES[self._number] = self
        if not isinstance(group, Comm):
            self._members()
        self._traceable = self._ranks is not None and not self.ragged and self.src.holds(_me()) and self.dst.holds(_me())
        if self._owned and self._ranks is not None:
            self._own = groups.Own.of(self._ranks, self._names)
            self.comm(torch.device('cpu'))  # now: ranks whose threads meet at the store in other orders would wait in vain

    def _refuse(self, why: BaseException, comm: str) -> None:
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
                self._names = tuple(range(len(self._ranks))) if self.packed else self._ranks
            if comm == 'own' and self._own is None and self._ranks is not None:
                self._own = groups.Own.of(self._ranks, self._names)
        groups.tell(why, (self,))

    def _members(self) -> None:
        """Sets the ranks of a torch group that it concerns."""
        inside, me = groups.group_ranks(self.group, 'bridge: group'), dist.get_rank()
        have = tuple(range(len(inside))) if self.packed else inside
        for name, layout in (('src', self.src), ('dst', self.dst)):
            missing = [r for r in layout.grid.ranks() if r not in have][:4]
            if missing:
                raise ArgumentError("bridge: ranks %s of the %s grid %s are not in the group of %d ranks"
                                    % (missing, name, layout.grid, len(inside)))
        if not self.ragged and moves.plain(self.src) and moves.plain(self.dst):
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
        """The communicator for tensors on @device; collective the first time."""
        if self._part is not None:
            return groups.comm_of_part(self.group, self._part, device)
        if self._ranks is None:
            return groups.comm_of(self.group, device, 'bridge: group')
        groups.require_alive(self.group, 'bridge: group')
        return groups.comm_of_ranks(self._talks_to, device)

    def global_shape(self, x: Any, samples: int | None = None) -> tuple[int, int, int]:
        """(samples, rows, features) of the whole from this rank's x. ValueError where x alone does not
        say: samples that dp does not divide, rows or features split on the source side."""
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
        """Do peers write straight into this rank's memory? None before the first call."""
        if self._ragged:
            return any(ragged.workspace is not None for ragged in self._ragged.values())
        return None if self._last is None else self._last[1].arena is not None

    @property
    def copied(self) -> int:
        """Calls of the last shape that copied between the workspace and a tensor; ragged: of all tables. See
        buffers."""
        if self._ragged:
            return sum(ragged.workspace.copied for ragged in self._ragged.values() if ragged.workspace is not None)
        arena = None if self._last is None else self._last[1].arena
        return 0 if arena is None else arena.copied

    def _ragged_of(self, device: Any) -> ragged_batches.Ragged:
        comm, made = self.comm(device), self._ragged.get(device)
        if made is None or made.comm is not comm:  # the first, or an error killed the communicator
            made = self._ragged[device] = ragged_batches.Ragged(self, comm, device)
        return made

    def _ragged_bridge(self, comm: Comm, device: Any, merged: bool) -> core.Bridge:
        # Tensors of any number of features go through it: any multiple of what the layouts divide.
        units, transport = math.lcm(self._parts[2], self._dst_features), self.transport
        if transport == 'auto':  # as all ranks found, when they asked for memory that peers reach
            transport = 'nccl' if self._ragged[device].workspace is None else 'peer'
        options = {name: self._options[name] for name in ('output', 'grad', 'ranks_per_node')}
        options['packed' if self.packed else 'ragged'] = True
        bridge, far = self._by_peers(transport, lambda by: core.Bridge(
            comm, self.src, self.dst, (units,), no_grad=self.frozen,
            placement='merged' if merged else 'packed', device=device.type, transport=by,
            allocator=arenas.allocator(device), **options))
        if far:
            self._ragged[device].workspace = None
        return bridge

    def rows(self, segments: Segments, device: Any = 'cpu') -> tuple[int, int]:
        """Ragged: rows of this rank's x, and of its y without into=. Collective the first time, unless x was
        carried on @device before."""
        self._need_ragged(True)
        ragged = self._ragged_of(torch.empty(0, device=device).device)  # with the number of its GPU
        with groups.telling(ragged.comm):
            return ragged.batch(segments, False, carried=False).batch.rows

    def index(self, segments: Segments, device: Any = 'cpu') -> Any:
        """Ragged: where this rank's rows are, int64 [rows of y without into=] on @device: row i of y belongs at
        position index[i] of into.view(-1, features). Collective the first time, as rows() is."""
        self._need_ragged(True)
        device = torch.empty(0, device=device).device
        ragged = self._ragged_of(device)
        with groups.telling(ragged.comm):
            return ragged.batch(segments, True, carried=False).written(device)

    def _tables(self, segments: Any, into: Any, src: Any, dst: Any) -> Any:
        """The tables of a call, which the bridge has or has not."""
        if self.packed:
            last = self._checked
            if isinstance(last, Repacking) and last.src is src and last.dst is dst:
                return last  # whose call is prepared
            return segments if src is None and dst is None else Repacking(src, dst)
        self._need_ragged(segments is not None or into is not None)
        return segments

    def _need_ragged(self, asked: bool) -> None:
        if asked != self.ragged:
            raise ArgumentError("bridge: segments are %s, and the bridge was made with ragged=%s"
                                % ('given' if asked else 'missing', self.ragged))

    def __call__(self, x: Any, segments: Segments | None = None, *, into: Any = None,
                 samples: int | None = None, shape: tuple[int, ...] | None = None, like: Any = None,
                 add: bool = False, inplace: bool | None = None, src: Packing | None = None,
                 dst: Packing | None = None) -> Any:
        """y under the destination's layout. samples: the global batch if dp does not divide it;
        shape: (samples, rows, features[, positions]) if x does not determine it; like: a tensor whose
        dtype and device are used if x is None (then shape is needed).

        Ragged: segments are the tables of the batch, the same on all ranks. x: the rows of this rank's segments, in the
        order of the tables, or a nested tensor of them; [0, features], or None and like=, without any; or a tuple of
        tensors with one routing. into: embeddings [.., positions, features] that they are written into; None: y has the
        rows of the batch in the order of their positions. add, inplace, entries of into that are None:
        docs/ragged.md#from-python; the same on all ranks.

        Packed: the rows that this rank holds by @src become those that it holds by @dst, both Packings of the same
        sequences; x as with ragged, without into."""
        if calls.compiling():  # not what is kept of the last call, on which no graph depends
            # An operator of a tensor that goes from one uniform layout to another, on ranks of torch's that hold it.
            given = {'x': x.detach() if self.frozen and x is not None else x, 'bridge': self._number, 'samples': samples,
                     'shape': None if shape is None else tuple(shape)}
            graphs = calls.compiled
            if graphs is not None and self._traceable and segments is None and x is not None and graphs.fits(given):
                return graphs.traced('bridge', given, None)
        else:
            again = self._again
            if again is not None and type(x) is again[0] and not again[3]() and not again[2][0] and segments is None and \
                    into is None and again[1] == (x.shape, x.dtype, x.device, samples, shape) and \
                    (self._ranks is None or groups.alive(self.group)):
                return again[4](x, again[5], True, None, x.requires_grad and torch.is_grad_enabled())
        return _called(self, False, x, segments, into, samples, shape, like, add, inplace, src, dst)

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
            rows = axis == s.ROWS
            unit = parts_of(self.dst, axis) * (2 if rows else 1)  # zigzag cuts twice

            def part(n: int) -> int:
                return self._cut(*(n if a == axis else 2 * parts_of(self.dst, a) for a in range(3)))[axis]
            mapped = self.dst._raw.map != s.MAP_IDENTITY  # a table has one length
            self._units[axis] = 0 if mapped or any(part(k * unit) != k * part(unit) for k in (2, 3, 5)) else unit
        return self._units[axis]

    def start(self, x: Any, segments: Segments | None = None, *, into: Any = None, samples: int | None = None,
              shape: tuple[int, ...] | None = None, like: Any = None, add: bool = False, inplace: bool | None = None,
              src: Packing | None = None, dst: Packing | None = None) -> Ticket:
        """Begins bridge(x, ...), with its arguments: start(x).finish() is y. On a GPU what is enqueued in between runs
        while rows move, in backward, too. Until finish() nothing writes x or uses into. All ranks start the same calls in
        the same order; up to 64 may be under way. A call whose tensor must be copied into memory that peers reach (see
        buffers) runs in start() as a whole. docs/overlap.md."""
        return _called(self, True, x, segments, into, samples, shape, like, add, inplace, src, dst)

    def destroy(self) -> None:
        """Frees workspace, and a communicator of its own; a shared one is kept for others. The second time does nothing."""
        for made in self._cores.values():
            made.bridge.destroy()
        for ragged in self._ragged.values():
            ragged.destroy()
        self._kept.clear(), self._cores.clear(), self._ragged.clear()
        self._comm = self._last = self._again = None
        if self._own is not None:
            groups.end(self._own)
        elif self._owned:
            self.group.destroy()


def _carried(x: Any, bridge: str, samples: Any, shape: Any) -> Any:
    return _BRIDGES[bridge](x, samples=samples, shape=shape)


calls.OPERATORS['bridge'] = _carried, lambda given: [(_BRIDGES[given['bridge']]._shape_of_y(
    given['x'], given['samples'], given['shape']), given['x'].dtype)], calls.called, lambda options: ()


def _uniform(self: Bridge, x: Any, samples: int | None, shape: tuple[int, ...] | None, like: Any) -> Asked:
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
def _called(self: Bridge, halves: bool, x: Any, segments: Any, into: Any, samples: Any, shape: Any, like: Any, add: bool,
            inplace: bool | None, src: Any, dst: Any) -> Any:
    tables = self._tables(segments, into, src, dst)
    asked = ragged_batches.asked(self, x, tables, into, like, add, inplace) if self.ragged else _uniform(
        self, x, samples, shape, like)
    return asked.start(self) if halves else asked.arrived(asked.carry(None))


def _of(make: Callable[..., Bridge], group: Any, *key: Any) -> Bridge:
    return make(group, *key)


# Ranks make the same calls, so the same ones go on all of them.
_keeping = functools.lru_cache(maxsize=_LAYOUTS)
_of_groups = _keeping(_of)


def kept(make: Callable[..., Bridge], group: Any, *key: Any) -> Bridge:
    """make(group, *key), made at the first call and kept until 32 others have been used since."""
    of = _of_groups
    if isinstance(group, Comm):  # ranks that are threads: one Bridge each, which lives with its Comm
        of = group.__dict__.get('_bridges') or group.__dict__.setdefault('_bridges', _keeping(_of))
    return of(make, group, *key)


def _bridge(group: Any, src: Any, dst: Any, options: tuple[Any, ...]) -> Bridge:
    return Bridge(src, dst, group=group, **dict(options))


def bridge(x: Any, src: Any, dst: Any, *, group: Any, samples: int | None = None,
           shape: tuple[int, ...] | None = None, like: Any = None, extra: str | Sequence[str] = (),
           **options: Any) -> Any:
    """y = x, carried from layout @src to layout @dst; the arguments are Bridge()'s and its call's. The
    Bridge is made at the first call and kept until 32 others have been used since."""
    src, dst = (Grid(side) if isinstance(side, dict) else side for side in (src, dst))  # a key
    if not (isinstance(src, Layout) and isinstance(dst, Layout)):
        options['extra'] = extra if isinstance(extra, str) else tuple(extra)
    made = kept(_bridge, group, src, dst, tuple(sorted(options.items())))
    return made(x, samples=samples, shape=shape, like=like)
