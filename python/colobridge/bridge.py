# SPDX-License-Identifier: Apache-2.0
"""Carry encoder activations into the LLM's layout, and gradients back; docs/concepts/bridge.md."""
import ctypes as c
from collections.abc import Sequence
from typing import Any, cast

from . import _structs as s
from ._lib import Handle, call, lib, result, text
from .comm import Comm
from .errors import ArgumentError
from .layout import Layout
from .packing import Packing
from .plan import ALGOS, TRANSPORTS, Bytes, choice, config
from .plan import bytes_of as plan_bytes
from .segments import Segments
from .view import view

KINDS = {'uniform': (False, False, s.PLACEMENT_PACKED), 'ragged': (True, False, s.PLACEMENT_PACKED),
         'merged': (True, False, s.PLACEMENT_MERGED), 'packed': (False, True, s.PLACEMENT_PACKED)}  # ragged, packed, placement


class Bridge(Handle):
    """Plan, communicator, workspace; .handle is the colo_bridge_t pointer. Collective over the ranks of comm that are in a
    grid.

    Args:
        comm: its world ranks are the grids' ranks.
        src: layout of x.
        dst: layout of y.
        shape: (samples, rows, features[, positions of the LLM]), global; (features,) unless uniform.
        dtype: of x and y: "f32", "f64", "bf16", "f16", "i8", "u8", "i16", "i32" or "i64".
        axes: "bsh", "sbh", any permutation, "th" (samples and rows flattened; always unless uniform), or "bh"
            ([samples, features]; rows is 1).
        output: "full" (own samples, all rows) or "sharded" (own rows).
        grad: "partial" (gradients are summed over cp), "disjoint" (declared to be zero outside of own rows), or "none" (there
            is no backward).
        algo: "exact" or "collective".
        ranks_per_node: 0 asks comm which ranks share a node.
        device: "cpu" or "cuda".
        transport: between GPUs, the same on all ranks: "auto" (as the memory of each call says), "nccl", or "peer" (what other
            ranks reach must be a Memory's); COLO_TRANSPORT overrides it.
        kind: "uniform": batches of one shape, by forward() and backward(). "ragged": of Segments, set by set_segments(); y has the
            rows of the batch only. "merged": of Segments, too, which go to their positions in the caller's buffer. "packed":
            from one Packing to another, set by set_packing(); output and grad at their defaults.
        max_rows: unless uniform, most rows of a source rank, for which memory is allocated at once.
        one_level: as Plan's; between GPUs of one node always.
        allocator: of the memory that workspace_size counts, as C functions that outlive the bridge; None: the library's.

    Raises:
        ValueError: sizes, layouts that do not fit.
        KeyError: a peer is not in comm.
        MismatchError: ranks disagree; on all ranks.
        RuntimeError: another rank failed.
        TimeoutError: a rank did not come.

    Example:
        >>> import ctypes, colobridge as cb
        >>> def one_rank(world):
        ...     bridge = cb.Bridge(world, cb.Layout.src('dp=2'), cb.Layout.dst('tp=2'), (2, 1, 1))
        ...     x, y = (ctypes.c_float * 1 * 1 * 1)(), (ctypes.c_float * 1 * 1 * 2)()
        ...     x[0][0][0] = world.rank
        ...     bridge.forward(x, y)                             # each rank has a sample, then both have both
        ...     return [sample[0][0] for sample in y]
        >>> cb.run_threads(2, one_rank)
        [[0.0, 1.0], [0.0, 1.0]]
    """
    _gone = 'this bridge was destroyed, or its communicator'

    def __init__(self, comm: Comm, src: Layout, dst: Layout, shape: tuple[int, ...], *,
                 dtype: str = 'f32', axes: str = 'bsh', output: str = 'full',
                 grad: str = 'partial', algo: str = 'exact', ranks_per_node: int = 0,
                 device: str = 'cpu', transport: str = 'auto', kind: str = 'uniform', max_rows: int = 0,
                 one_level: bool = False, allocator: s.Allocator | None = None):
        self._src, self._dst, self.comm = src, dst, comm
        ragged, packed, placement = choice('kind', kind, KINDS)
        if kind != 'uniform' and len(shape) == 1:
            shape, axes = (0, 0, *shape), 'th' if axes == 'bsh' else axes
        self._tables = src._table, dst._table  # borrowed; a layout may get another one
        with comm._telling():
            raw = config(s.BridgeConfig, src, dst, shape, dtype, output, grad, ranks_per_node, one_level)
            raw.ragged, raw.packed, raw.max_rows = ragged, packed, max_rows
            raw.placement = placement
            raw.axes = text(axes)
            raw.algo = choice('algo', algo, ALGOS)
            raw.mem = choice('device', device, {'cpu': s.MEM_HOST, 'cuda': s.MEM_CUDA})
            raw.transport = choice('transport', transport, TRANSPORTS)
            if allocator is not None:
                raw.allocator = allocator
        self._handle, self._follows = c.c_void_p(), True
        call('colo_bridge_create', c.byref(self._handle), raw, comm.handle)
        comm.serves(self._handle, 'colo_bridge_destroy')
        self._batches: dict[int, c.c_void_p] = {}  # handles, because a collected cycle has no weak references

    def destroy(self) -> None:
        """Local; the second time does nothing. Batches are destroyed with it."""
        while self._batches:
            self.comm.ends(self._batches.popitem()[1], 'colo_batch_destroy')
        if self._handle:
            self.comm.ends(self._handle, 'colo_bridge_destroy')

    def forward(self, x: Any, y: Any, stream: int | None = None) -> None:
        """y = x under the destination's layout.

        Args:
            x: of src_shape and the bridge's dtype, any strides; None on ranks that own nothing of the source.
            y: of dst_shape, as x; written.
            stream: of the GPU, as an address; None: the default one.

        Raises:
            ValueError: a shape, dtype or device that does not fit.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed.
            TimeoutError: a rank did not come.
        """
        with self.comm._telling():
            call('colo_bridge_forward', self.handle, _arg(x, 'x'), _arg(y, 'y', True), stream)

    def backward(self, d_y: Any, d_x: Any, stream: int | None = None) -> None:
        """d_x = the gradient of x from the gradient of y.

        Args:
            d_y: as y; it is not written.
            d_x: as x; written.
            stream: as forward()'s.

        Raises:
            ValueError: as forward().
            MismatchError: as forward().
            RuntimeError: as forward(); the bridge was created with grad="none".
            TimeoutError: as forward().
        """
        with self.comm._telling():
            call('colo_bridge_backward', self.handle, _arg(d_y, 'd_y'), _arg(d_x, 'd_x', True), stream)

    def set_segments(self, segments: Segments) -> 'Batch':
        """A batch with these tables; local, nothing waits. Its first forward or backward compares the tables between all ranks.
        Batches set before stay valid.

        Args:
            segments: the tables, the same on all ranks.

        Returns:
            The batch.

        Raises:
            ValueError: names the segment or the sequence.
        """
        if not isinstance(segments, Segments):  # pyright: ignore[reportUnnecessaryIsInstance]
            with self.comm._telling():
                raise ArgumentError("bridge: segments is a %s, expected Segments" % type(segments).__name__)
        return Batch(self, 'colo_bridge_set_segments', segments)

    def set_packing(self, src: Packing, dst: Packing) -> 'Batch':
        """A batch that moves the rows of packed sequences from one cut to another; as set_segments().

        Args:
            src: how the sequences are cut at the source.
            dst: how they are at the destination.

        Returns:
            The batch.

        Raises:
            ValueError: names the sequence.
        """
        for name, packing in (('src', src), ('dst', dst)):
            if not isinstance(packing, Packing):  # pyright: ignore[reportUnnecessaryIsInstance]
                with self.comm._telling():
                    raise ArgumentError("bridge: %s is a %s, expected Packing" % (name, type(packing).__name__))
        return Batch(self, 'colo_bridge_set_packing', src, dst)

    def reshape(self, shape: tuple[int, ...]) -> None:
        """Another batch, length or width from now on; local, all ranks must do the same.

        Args:
            shape: as the bridge's.

        Raises:
            ValueError: layouts that do not fit.
        """
        call('colo_bridge_reshape', self.handle, s.Shape(*shape))

    def expect_backward(self, follows: bool) -> None:
        """Does a backward follow forwards from now on? Yes, at first. All ranks say the same: forward compares it.

        Args:
            follows: whether it does.
        """
        if follows is not self._follows:
            lib().colo_bridge_expect_backward(self.handle, follows)
            self._follows = follows

    @property
    def src_shape(self) -> tuple[int, ...]:
        """Extents of this rank's x."""
        return self._shape('colo_bridge_src_shape')

    @property
    def dst_shape(self) -> tuple[int, ...]:
        """Extents of this rank's y."""
        return self._shape('colo_bridge_dst_shape')

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = (s.i64 * 3)()
        return tuple(shape[:getattr(lib(), name)(self.handle, shape)])

    @property
    def workspace_size(self) -> int:
        """Bytes that the bridge allocated."""
        return lib().colo_bridge_workspace_size(self.handle)


def _arg(t: Any, what: str, writes: bool = False) -> s.Tensor | None:
    return None if t is None else view(t, what, writes=writes)


class Batch(Handle):
    """A batch of a bridge, made by Bridge.set_segments() or set_packing(); .handle is its colo_batch_t pointer. Several may be
    outstanding.

    Attributes:
        rows: those of this rank's x and y.
    """
    _gone = 'this batch was destroyed, or its bridge or communicator'

    def __init__(self, bridge: Bridge, setter: str, *tables: Segments | Packing):
        self._bridge, self._comm = bridge, bridge.comm
        self._handle = result(c.c_void_p, setter, bridge.handle, *(t._raw for t in tables))
        self._comm.serves(self._handle, 'colo_batch_destroy')
        bridge._batches[id(self._handle)] = self._handle
        src, dst = s.i64(), s.i64()
        lib().colo_bridge_rows(bridge.handle, c.byref(src), c.byref(dst))
        self.rows = src.value, dst.value

    def destroy(self) -> None:
        """Local; the second time does nothing."""
        self._bridge._batches.pop(id(self._handle), None)
        if self._handle:
            self._comm.ends(self._handle, 'colo_batch_destroy')

    def forward(self, x: Any, y: Any, stream: int | None = None) -> None:
        """y is x under the destination's layout.

        Args:
            x: a [rows, features] tensor, or a list of several that move in the same messages; None on a rank without such rows.
            y: as x; written.
            stream: as Bridge.forward()'s.

        Raises:
            ValueError: as Bridge.forward().
            MismatchError: as Bridge.forward(); the tables differ.
            RuntimeError: as Bridge.forward().
            TimeoutError: as Bridge.forward().
        """
        with self._comm._telling():
            self._run('colo_batch_forward', x, 'x', y, 'y', stream)

    def backward(self, d_y: Any, d_x: Any, stream: int | None = None) -> None:
        """d_x = the gradient of x from that of y. Leave out tensors without a gradient.

        Args:
            d_y: as y.
            d_x: as x; written.
            stream: as Bridge.forward()'s.

        Raises:
            ValueError: as forward().
            MismatchError: as forward().
            RuntimeError: as forward(); the bridge was created with grad="none".
            TimeoutError: as forward().
        """
        with self._comm._telling():
            self._run('colo_batch_backward', d_y, 'd_y', d_x, 'd_x', stream)

    def _run(self, name: str, given: Any, given_name: str, out: Any, out_name: str, stream: int | None) -> None:
        n, (a, b) = 1, (given, out)
        if isinstance(given, (list, tuple)) or isinstance(out, (list, tuple)):
            sizes = [len(cast(list[Any], t)) if isinstance(t, (list, tuple)) else -1
                     for t in cast(list[Any], (given, out)) if t is not None]
            if sizes[0] != sizes[-1]:
                raise ArgumentError("bridge: %s and %s are %s; expected as many tensors in both" % (
                    given_name, out_name, ' and '.join('a list of %d' % n if n >= 0 else 'one tensor' for n in sizes)))
            n = sizes[0]
        else:
            a, b = None if given is None else [given], None if out is None else [out]
        call(name, self.handle, _args(a, given_name), _args(b, out_name, True), n, stream)

    def runs(self) -> list[tuple[int, int]]:
        """(first, count) of rows of y that forward writes, in the order of positions."""
        n = lib().colo_batch_runs(self.handle, None, 0)
        raw = (s.Run * max(n, 1))()
        lib().colo_batch_runs(self.handle, raw, n)
        return [(run.local, run.count) for run in raw[:n]]

    def bytes(self, direction: str) -> Bytes:
        """Bytes of this rank for a tensor of the bridge's features and dtype.

        Args:
            direction: "forward" or "backward".

        Returns:
            What it receives, sends and keeps.

        Raises:
            ValueError: another direction.
        """
        return plan_bytes(lib().colo_batch_plan(self.handle), direction)


def views(tensors: Sequence[s.Tensor | None] | None) -> Any:
    """An array for a call; an empty tensor stands for one that this rank lacks."""
    if tensors is None:
        return None
    out: Any = (s.Tensor * max(len(tensors), 1))(*(s.Tensor() if t is None else t for t in tensors))
    out.held = list(tensors)  # which hold memory
    return out


def _args(tensors: Any, what: str, writes: bool = False) -> Any:
    return None if tensors is None else views(
        [None if t is None else view(t, '%s[%d]' % (what, i), writes=writes) for i, t in enumerate(tensors)])
