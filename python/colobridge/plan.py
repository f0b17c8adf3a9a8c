# SPDX-License-Identifier: Apache-2.0
"""What one rank sends and receives between two layouts, without communication; docs/concepts/plan.md."""
import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from . import _structs as s
from ._lib import Unique, call, lib
from .layout import Layout

T = TypeVar('T')

OUTPUTS = {'full': s.OUTPUT_FULL_SEQ, 'sharded': s.OUTPUT_SHARDED}
GRADS = {'partial': s.GRAD_PARTIAL, 'disjoint': s.GRAD_DISJOINT, 'none': s.GRAD_PARTIAL}  # none: no_grad of the C config
ALGOS = {'exact': s.ALGO_EXACT, 'collective': s.ALGO_COLLECTIVE}
TRANSPORTS = {'auto': s.TRANSPORT_AUTO, 'nccl': s.TRANSPORT_NCCL, 'peer': s.TRANSPORT_PEER}
DIRECTIONS = {s.DIRECTION_EQUAL: 'equal', s.DIRECTION_FAN_IN: 'fan_in', s.DIRECTION_FAN_OUT: 'fan_out'}
_DIRECTIONS = {'forward': s.PASS_FORWARD, 'backward': s.PASS_BACKWARD}


def choice(what: str, value: str, table: dict[str, T]) -> T:
    """The value of a word. ValueError names the words that would do."""
    if value not in table:
        raise ValueError("%s is %r, expected %s" % (what, value, ' or '.join(map(repr, table))))
    return table[value]


@dataclass(frozen=True)
class Region:
    """A box in global indices, half-open.

    Attributes:
        samples: [b0, b1).
        rows: [s0, s1).
        features: [h0, h1).
        addend: which addend of PARTIAL's backward.
    """
    samples: tuple[int, int]
    rows: tuple[int, int]
    features: tuple[int, int]
    addend: int


@dataclass(frozen=True)
class Message:
    """What goes to, or comes from, one other rank.

    Attributes:
        peer: the other rank.
        bytes: of all regions.
        regions: boxes of the tensor.
    """
    peer: int
    bytes: int
    regions: list[Region]


@dataclass(frozen=True)
class Bytes:
    """Bytes of one rank in one direction.

    Attributes:
        recv: from other ranks.
        send: to other ranks.
        local: what stays on the rank.
        minimum: what the rank must receive at least.
        collective_recv: what COLLECTIVE would receive; None if it rejects the pair.
    """
    recv: int
    send: int
    local: int
    minimum: int
    collective_recv: int | None


def config(kind: type, src: Layout, dst: Layout, shape: tuple[int, ...], dtype: str, output: str,
           grad: str, ranks_per_node: int, one_level: bool) -> c.Structure:
    """The members that a plan's and a bridge's config share."""
    if len(shape) not in (3, 4):
        raise ValueError("shape is %r, expected (samples, rows, features) or also positions"
                         % (shape,))
    raw = kind(struct_size=c.sizeof(kind), dtype=choice('dtype', dtype, s.DTYPE),
               output=choice('output', output, OUTPUTS), grad=choice('grad', grad, GRADS),
               no_grad=grad == 'none', ranks_per_node=ranks_per_node, one_level=one_level)
    raw.src, raw.dst = c.pointer(src._raw), c.pointer(dst._raw)
    raw.shape = s.Shape(*shape)
    return raw


class Plan(Unique):
    """What a world rank sends and receives.

    Args:
        src: layout of x.
        dst: layout of y.
        shape: (samples, rows, features[, positions of the LLM]), global.
        rank: the world rank.
        dtype: "f32", "f64", "bf16", "f16", "i8", "u8", "i16", "i32" or "i64".
        output: "full" (own samples, all rows) or "sharded" (own rows).
        grad: "partial" (gradients are summed over cp), "disjoint", or "none" (there is no backward).
        ranks_per_node: consecutive ranks that share a node; 0: one node, or nodes.
        nodes: [ranks] integers, what names the node of each rank, in place of ranks_per_node.
        one_level: each rank gets all that it lacks from ranks that hold it; else what several ranks of a node lack enters it
            once.

    Raises:
        ValueError: sizes, layouts that do not fit.

    Example:
        >>> import colobridge as cb
        >>> plan = cb.Plan(cb.Layout.src('dp=2'), cb.Layout.dst('tp=2'), (2, 3, 4), rank=0)
        >>> plan.bytes('forward').recv                   # the other sample: 3 * 4 * 4 bytes
        48
        >>> plan.recvs('forward')[0].regions
        [Region(samples=(1, 2), rows=(0, 3), features=(0, 4), addend=0)]
    """

    def __init__(self, src: Layout, dst: Layout, shape: tuple[int, ...], rank: int, *,
                 dtype: str = 'f32', output: str = 'full', grad: str = 'partial',
                 ranks_per_node: int = 0,
                 nodes: Sequence[int] | None = None, one_level: bool = False):
        self._src, self._dst, self._nodes = src, dst, c.c_void_p()
        raw = config(s.PlanConfig, src, dst, shape, dtype, output, grad, ranks_per_node, one_level)
        if nodes is not None:
            call('colo_nodes_create', c.byref(self._nodes), (c.c_int32 * len(nodes))(*nodes), len(nodes))
            raw.nodes = self._nodes
        self._tables = src._table, dst._table  # borrowed; a layout may get another one
        self._handle = c.c_void_p()
        call('colo_plan_create', c.byref(self._handle), raw, rank)

    def __del__(self) -> None:
        if getattr(self, '_handle', None):
            lib().colo_plan_destroy(c.byref(self._handle))
        if getattr(self, '_nodes', None):
            lib().colo_nodes_destroy(c.byref(self._nodes))

    @property
    def rank(self) -> int:
        """The rank that it is of."""
        return lib().colo_plan_rank(self._handle)

    @property
    def addends(self) -> int:
        """Terms of the longest sum of a gradient."""
        return lib().colo_plan_addends(self._handle)

    @property
    def hash(self) -> int:
        """The same on all ranks whose plans fit together."""
        return lib().colo_plan_hash(self._handle)

    @property
    def direction(self) -> str:
        """"fan_in", "fan_out" or "equal"."""
        return DIRECTIONS[lib().colo_plan_direction(self._handle)]

    @property
    def scale(self) -> int | None:
        """max(Ds, Dd) / min(Ds, Dd), None when it is no integer."""
        return lib().colo_plan_scale(self._handle) or None

    def bytes(self, direction: str) -> Bytes:
        """Bytes of this rank.

        Args:
            direction: "forward" or "backward".

        Returns:
            What it receives, sends and keeps.

        Raises:
            ValueError: another direction.
        """
        return bytes_of(self._handle, direction)

    def sends(self, direction: str) -> list[Message]:
        """What this rank sends.

        Args:
            direction: "forward" or "backward".

        Returns:
            Messages, peers ascending.

        Raises:
            ValueError: another direction.
        """
        return self._messages('colo_plan_sends', direction)

    def recvs(self, direction: str) -> list[Message]:
        """What this rank receives.

        Args:
            direction: "forward" or "backward".

        Returns:
            Messages, peers ascending.

        Raises:
            ValueError: another direction.
        """
        return self._messages('colo_plan_recvs', direction)

    def _messages(self, name: str, direction: str) -> list[Message]:
        return [Message(raw.peer, raw.bytes, [_region(raw.regions[k]) for k in range(raw.nregions)])
                for raw in self._listed(c.c_int32, name, direction)]

    def _listed(self, kind: Any, name: str, direction: str) -> Any:
        """The C function's array as a list; the function writes its length to a number of type @kind."""
        count = kind()
        raw = getattr(lib(), name)(self._handle, choice('direction', direction, _DIRECTIONS), c.byref(count))
        return raw[:count.value]

    def reached(self, direction: str) -> bool:
        """Do other ranks write into this rank's output in a direction? If gradients add up, they read its input instead. That
        tensor is what a caller places in registered memory (colobridge.Memory).

        Args:
            direction: "forward" or "backward".

        Returns:
            Whether they do.

        Raises:
            ValueError: another direction.
        """
        sums = direction == 'backward' and self.addends > 1
        return bool(self._listed(c.c_int32, 'colo_plan_sends' if sums else 'colo_plan_recvs', direction))

    def locals(self, direction: str) -> list[Region]:
        """What stays on the rank.

        Args:
            direction: "forward" or "backward".

        Returns:
            Boxes of the tensor.

        Raises:
            ValueError: another direction.
        """
        return [_region(raw) for raw in self._listed(s.i64, 'colo_plan_locals', direction)]


def bytes_of(handle: Any, direction: str) -> Bytes:
    """Bytes of a colo_plan_t pointer in one direction."""
    raw = s.PlanBytes(struct_size=c.sizeof(s.PlanBytes))
    call('colo_plan_bytes', handle, choice('direction', direction, _DIRECTIONS), raw)
    return Bytes(raw.recv, raw.send, raw.local, raw.minimum,
                 None if raw.collective_recv < 0 else raw.collective_recv)


def _region(raw: s.Region) -> Region:
    return Region(tuple(raw.b), tuple(raw.s), tuple(raw.h), raw.addend)


def collective_check(src: Layout, dst: Layout, shape: tuple[int, ...], *, dtype: str = 'f32',
                     output: str = 'full', grad: str = 'partial') -> None:
    """Does the COLLECTIVE algorithm take this pair (docs/concepts/bridge.md)?

    Args:
        src: layout of x.
        dst: layout of y.
        shape: as Plan's.
        dtype: as Plan's.
        output: as Plan's.
        grad: as Plan's.

    Raises:
        ValueError: it would not.
    """
    call('colo_plan_collective_check',
         config(s.PlanConfig, src, dst, shape, dtype, output, grad, 0, False))
