# SPDX-License-Identifier: Apache-2.0
"""Bridges as modules of PyTorch: encoder activations in the LLM's layout, gradients back."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from ..comm import Comm
from ..grid import Grid
from ..layout import Layout
from ..packing import Packing
from ..segments import Segments
from . import calls
from .engine import Engine, call
from .ticket import Ticket
from .types import Device, Group, Side, as_typed

_LAYOUTS = 32  # pairs of layouts and options for which bridge() keeps a Bridge


class _Module(torch.nn.Module):
    """What all bridges have."""
    _engine: Engine

    @property
    def group(self) -> Group | None:
        """The ranks that call."""
        return self._engine.group

    @property
    def src(self) -> Layout:
        """The layout that rows come from."""
        return self._engine.src

    @property
    def dst(self) -> Layout:
        """The layout that rows go to."""
        return self._engine.dst

    @property
    def frozen(self) -> bool:
        """Does no gradient flow back?"""
        return self._engine.frozen

    @property
    def is_p2p(self) -> bool | None:
        """Do peers write straight into this rank's memory? None before the first call."""
        return self._engine.is_p2p

    @property
    def copied(self) -> int:
        """Calls that copied between the workspace and a tensor: of the last shape, or of all tables. See buffers."""
        return self._engine.copied

    def comm(self, device: torch.device) -> Comm:
        """The communicator for tensors on a device; collective the first time.

        Args:
            device: of the tensors.

        Returns:
            The colobridge.Comm of the ranks that this one talks to.
        """
        return self._engine.comm(device)

    def destroy(self) -> None:
        """Frees workspace, and a communicator of its own; a shared one is kept for others. The second time does nothing."""
        self._engine.destroy()

    def extra_repr(self) -> str:
        return '%s -> %s' % (self.src.grid, self.dst.grid)

    @property
    def _talks_to(self) -> Any:
        return self._engine._talks_to


class Bridge(_Module):
    """Carries [b, n, H] activations from one layout to another. A torch.nn.Module without parameters.

    bridge(x) returns y; both may be any strided tensors, x is not copied. All ranks of the grids call in the same order, and
    run backward through their y, also when it is empty. x requires grad on all ranks or on none (an x that is None does, unless
    frozen): forward says where it differs, and with it torch.no_grad(). Values move bitwise; dtypes stay as they are (autocast
    does not matter). x is not saved.

    A copy (copy.deepcopy() of a model) shares communicator and memory with the bridge; destroy() is of both. One that is pickled
    has group=torch.distributed.group.WORLD and comm="shared", and so has what is loaded; TypeError: another one.

    Args:
        src: a Layout; or a grid, for the usual layout of that side: a DeviceMesh with named dims, a spec ("tp=2,dp=4"), whose first
            dim is the fastest, a dict of dims, or a Grid. A spec that has ranks elsewhere than the mesh of the call, or that of
            the process groups, is refused.
        dst: as src.
        group: a torch process group, a DeviceMesh or a colobridge.Comm with all ranks of the grids; communication stays among
            ranks that exchange, and ranks outside of both grids need not call.
        axes: of x and y: "bsh", "sbh", any permutation, "th" (samples and rows flattened), or "bh" (rows is 1; shape may be
            (samples, features)).
        output: "full" (own samples, all rows) or "sharded" (own rows).
        grad: "partial" (gradients are summed over cp) or "disjoint" (declared to be zero outside of own rows).
        algo: "exact" or "collective".
        frozen: no gradient flows back.
        ranks_per_node: 0: ask which ranks share a node.
        transport: "auto", "nccl" or "peer": how CUDA tensors of ranks that reach each other's memory travel
            (docs/runtime/gpu.md); the same on all ranks. COLO_TRANSPORT overrides it.
        buffers: None, or how many blocks that peers reach y and d_x take turns in: docs/runtime/gpu.md.
        extra: for specs, dims above 1 with other names than tp, cp, pp, dp and ep, declared as dims along which ranks hold copies.
        comm: "shared": the communicator of these ranks, which all calls of colobridge.torch on them have in common, so ranks make
            these calls in one order, on one thread. "own": another one, for this bridge alone; two such bridges may be at work at
            once, on two threads or streams, in any order. All ranks make the bridge, in one order among such ones; it connects
            then.
        grad_scale: factor of x's gradient, as EncoderParallel has it (docs/guides/vision.md).

    Raises:
        ValueError: shape, dtype, device, layouts that do not fit.
        MismatchError: ranks disagree.
        RuntimeError: a destroyed group; another rank failed.
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge as cb, colobridge.torch as ct, torch
        >>> def one_rank(world):
        ...     carry = ct.Bridge('dp=2', 'tp=2', group=world)       # each rank has a sample, then both have both
        ...     return carry(torch.full((1, 1, 1), float(world.rank))).flatten().tolist()
        >>> cb.run_threads(2, one_rank)
        [[0.0, 1.0], [0.0, 1.0]]
    """

    def __init__(self, src: Side, dst: Side, *, group: Group | None, axes: str = 'bsh', output: Literal['full', 'sharded'] = 'full',
                 grad: Literal['partial', 'disjoint'] = 'partial', algo: Literal['exact', 'collective'] = 'exact',
                 frozen: bool = False, ranks_per_node: int = 0, transport: Literal['auto', 'nccl', 'peer'] = 'auto',
                 buffers: int | None = None, extra: str | Sequence[str] = (), comm: Literal['shared', 'own'] = 'shared', grad_scale: float = 1.0):
        super().__init__()
        self._engine = Engine(src, dst, group=group, axes=axes, output=output, grad=grad, algo=algo, frozen=frozen,
                              ranks_per_node=ranks_per_node, transport=transport, buffers=buffers, extra=extra, comm=comm,
                              grad_scale=grad_scale)

    @property
    def axes(self) -> str:
        """The axes of x and y."""
        return self._engine.axes

    def global_shape(self, x: torch.Tensor, samples: int | None = None) -> tuple[int, int, int]:
        """The shape of the whole from this rank's x.

        Args:
            x: as in the call.
            samples: the global batch, if dp does not divide it.

        Returns:
            (samples, rows, features).

        Raises:
            ValueError: x alone does not say: samples that dp does not divide, rows or features split on the source side.
        """
        return self._engine.global_shape(x, samples)

    def check_samples(self, src: torch.Tensor | Sequence[int] | None, dst: torch.Tensor | Sequence[int] | None) -> None:
        """Has the LLM the text of the samples that the encoder has? Before training, with a batch of each side's data loader.
        Every rank of the grids calls; the ids of all go to all, over the host.

        Args:
            src: ids, whole numbers below 2^63, of this rank's samples of the source: a tensor or a list. None: it has none. A rank on
                another pipeline stage than the one that holds x may bring those of its replica, or None.
            dst: of this rank's samples of the destination.

        Raises:
            MismatchError: on all ranks: what a sample is to the ranks that have it, on both sides, or numbers of samples.
        """
        self._engine.check_samples(src, dst)

    def forward(self, x: torch.Tensor | None, *, samples: int | None = None, shape: tuple[int, ...] | None = None,
                like: torch.Tensor | None = None) -> torch.Tensor:
        """y = x under the destination's layout.

        Args:
            x: this rank's part of the source, a strided tensor; None, with like=, on a rank that holds nothing of it.
            samples: the global batch, if dp does not divide it.
            shape: (samples, rows, features[, positions]), if x does not determine it.
            like: a tensor whose dtype and device are used if x is None; then shape is needed.

        Returns:
            This rank's part of the destination.
        """
        engine = self._engine
        if calls.compiling():  # not what is kept of the last call, on which no graph depends
            # An operator of a tensor that goes from one uniform layout to another, on ranks of torch's that hold it.
            given = {'x': x.detach() if engine.frozen and x is not None else x, 'bridge': engine._number, 'samples': samples,
                     'shape': None if shape is None else tuple(shape)}
            graphs = calls.compiled
            if graphs is not None and engine._traceable and x is not None and graphs.fits(given):
                return graphs.traced('bridge', given, None)
            return call(engine, False, x, None, None, samples, shape, like)
        return engine.carry(x, samples, shape, like)

    if TYPE_CHECKING:
        @as_typed(forward)
        def __call__(self) -> Any: ...

    def start(self, x: torch.Tensor | None, *, samples: int | None = None, shape: tuple[int, ...] | None = None,
              like: torch.Tensor | None = None) -> Ticket[torch.Tensor]:
        """Begins bridge(x, ...): start(x).finish() is y.

        On a GPU what is enqueued in between runs while rows move, in backward, too. Until finish() nothing writes x. All ranks start
        the same calls in the same order; up to 64 may be under way. A call whose tensor must be copied into memory that peers reach
        (see buffers) runs in start() as a whole: docs/concepts/bridge.md. Hooks of the module hear of no call in halves.

        Args:
            x: as in the call.
            samples: as in the call.
            shape: as in the call.
            like: as in the call.

        Returns:
            A Ticket of y.
        """
        return call(self._engine, True, x, None, None, samples, shape, like)


class RaggedBridge(_Module):
    """Carries batches of images that have any number of rows, and samples any number of images, as their tables say:
    docs/concepts/ragged.md. A torch.nn.Module without parameters. Copies are as those of Bridge.

    Args:
        src: a Layout; or a grid, for the usual layout of that side: a DeviceMesh with named dims, a spec ("tp=2,dp=4"), whose first
            dim is the fastest, a dict of dims, or a Grid. A spec that has ranks elsewhere than the mesh of the call, or that of
            the process groups, is refused.
        dst: as src.
        group: a torch process group, a DeviceMesh or a colobridge.Comm with all ranks of the grids; communication stays among
            ranks that exchange, and ranks outside of both grids need not call.
        output: as in Bridge.
        grad: as in Bridge.
        frozen: no gradient flows back.
        ranks_per_node: 0: ask which ranks share a node.
        transport: "auto", "nccl" or "peer": how CUDA tensors of ranks that reach each other's memory travel
            (docs/runtime/gpu.md); the same on all ranks. COLO_TRANSPORT overrides it.
        buffers: None or 0.
        extra: for specs, dims above 1 with other names than tp, cp, pp, dp and ep, declared as dims along which ranks hold copies.
        comm: "shared": the communicator of these ranks, which all calls of colobridge.torch on them have in common, so ranks make
            these calls in one order, on one thread. "own": another one, for this bridge alone; two such bridges may be at work at
            once, on two threads or streams, in any order. All ranks make the bridge, in one order among such ones; it connects
            then.
        grad_scale: factor of x's gradient, as EncoderParallel has it (docs/guides/vision.md).

    Raises:
        ValueError: shape, dtype, device, layouts that do not fit.
        MismatchError: ranks disagree.
        RuntimeError: a destroyed group; another rank failed.
        TimeoutError: a rank did not come.
    """

    def __init__(self, src: Side, dst: Side, *, group: Group | None, output: Literal['full', 'sharded'] = 'full',
                 grad: Literal['partial', 'disjoint'] = 'partial', frozen: bool = False,
                 ranks_per_node: int = 0, transport: Literal['auto', 'nccl', 'peer'] = 'auto', buffers: int | None = None, extra: str | Sequence[str] = (),
                 comm: Literal['shared', 'own'] = 'shared', grad_scale: float = 1.0):
        super().__init__()
        self._engine = Engine(src, dst, group=group, output=output, grad=grad, frozen=frozen, ranks_per_node=ranks_per_node,
                              transport=transport, buffers=buffers, extra=extra, comm=comm, grad_scale=grad_scale, kind='ragged')

    def rows(self, segments: Segments, device: Device = 'cpu') -> tuple[int, int]:
        """Rows of this rank. Collective the first time, unless x was carried on the device before.

        Args:
            segments: the tables of the batch.
            device: of x.

        Returns:
            (rows of x, rows of y without into=).
        """
        return self._engine.rows(segments, device)

    def index(self, segments: Segments, device: Device = 'cpu') -> torch.Tensor:
        """Where this rank's rows are. Collective the first time, as rows() is.

        Args:
            segments: the tables of the batch.
            device: of the result, and of x.

        Returns:
            int64 [rows of y without into=] on the device: row i of y belongs at position index[i] of into.view(-1, features).
        """
        return self._engine.index(segments, device)

    @overload
    def forward(self, x: torch.Tensor | None, segments: Segments | None = None, *, into: torch.Tensor | None = None,
                like: torch.Tensor | None = None, add: bool = False, inplace: bool | None = None) -> torch.Tensor: ...

    @overload
    def forward(self, x: tuple[torch.Tensor, ...], segments: Segments | None = None, *,
                into: tuple[torch.Tensor | None, ...] | None = None, like: torch.Tensor | None = None, add: bool = False,
                inplace: bool | None = None) -> tuple[torch.Tensor, ...]: ...

    def forward(self, x: Any, segments: Segments | None = None, *, into: Any = None, like: Any = None, add: bool = False,
                inplace: bool | None = None) -> Any:
        """y = x under the destination's layout.

        Args:
            x: [rows, features], the rows of this rank's segments, in the order of the tables, or a nested tensor of them;
                [0, features], or None and like=, without any; or a tuple of tensors with one routing.
            segments: the tables of the batch, the same on all ranks.
            into: embeddings [.., positions, features] that the rows are written into; None: y has the rows of the batch in the order
                of their positions. Of a tuple x a tuple, whose entries may be None.
            like: a tensor whose dtype and device are used if x is None.
            add: add to into: docs/concepts/ragged.md#from-python. The same on all ranks.
            inplace: write into itself, the same on all ranks.

        Returns:
            y, or a tuple of as many tensors as x has.
        """
        return call(self._engine, False, x, segments, into, None, None, like, add, inplace)

    if TYPE_CHECKING:
        @as_typed(forward)
        def __call__(self) -> Any: ...

    @overload
    def start(self, x: torch.Tensor | None, segments: Segments | None = None, *, into: torch.Tensor | None = None,
              like: torch.Tensor | None = None, add: bool = False, inplace: bool | None = None) -> Ticket[torch.Tensor]: ...

    @overload
    def start(self, x: tuple[torch.Tensor, ...], segments: Segments | None = None, *,
              into: tuple[torch.Tensor | None, ...] | None = None, like: torch.Tensor | None = None, add: bool = False,
              inplace: bool | None = None) -> Ticket[tuple[torch.Tensor, ...]]: ...

    def start(self, x: Any, segments: Segments | None = None, *, into: Any = None, like: Any = None, add: bool = False,
              inplace: bool | None = None) -> Ticket[Any]:
        """Begins bridge(x, segments, ...), as Bridge.start() does. Until finish() nothing writes x or uses into.

        Args:
            x: as in the call.
            segments: as in the call.
            into: as in the call.
            like: as in the call.
            add: as in the call.
            inplace: as in the call.

        Returns:
            A Ticket of what the call returns.
        """
        return call(self._engine, True, x, segments, into, None, None, like, add, inplace)


class PackedBridge(_Module):
    """Carries rows of packed sequences whose cut changes, from one Packing to another: docs/concepts/ragged.md. A torch.nn.Module
    without parameters. Copies are as those of Bridge.

    Args:
        src: as in Bridge; the grids count the ranks of a torch group from 0, and name those of a Comm by its world_rank().
        dst: as in Bridge.
        group: as in Bridge.
        frozen: no gradient flows back.
        ranks_per_node: 0: ask which ranks share a node.
        transport: "auto", "nccl" or "peer": how CUDA tensors of ranks that reach each other's memory travel
            (docs/runtime/gpu.md); the same on all ranks. COLO_TRANSPORT overrides it.
        buffers: None or 0.
        extra: for specs, dims above 1 with other names than tp, cp, pp, dp and ep, declared as dims along which ranks hold copies.
        comm: "shared": the communicator of these ranks, which all calls of colobridge.torch on them have in common, so ranks make
            these calls in one order, on one thread. "own": another one, for this bridge alone; two such bridges may be at work at
            once, on two threads or streams, in any order. All ranks make the bridge, in one order among such ones; it connects
            then.
        grad_scale: factor of x's gradient, as EncoderParallel has it (docs/guides/vision.md).

    Raises:
        ValueError: shape, dtype, device, layouts that do not fit.
        MismatchError: ranks disagree.
        RuntimeError: a destroyed group; another rank failed.
        TimeoutError: a rank did not come.
    """

    def __init__(self, src: Side, dst: Side, *, group: Group | None, frozen: bool = False, ranks_per_node: int = 0, transport: Literal['auto', 'nccl', 'peer'] = 'auto',
                 buffers: int | None = None, extra: str | Sequence[str] = (), comm: Literal['shared', 'own'] = 'shared', grad_scale: float = 1.0):
        super().__init__()
        self._engine = Engine(src, dst, group=group, frozen=frozen, ranks_per_node=ranks_per_node, transport=transport,
                              buffers=buffers, extra=extra, comm=comm, grad_scale=grad_scale, kind='packed')

    @overload
    def forward(self, x: torch.Tensor | None, src: Packing | None = None, dst: Packing | None = None, *,
                like: torch.Tensor | None = None) -> torch.Tensor: ...

    @overload
    def forward(self, x: tuple[torch.Tensor, ...], src: Packing | None = None, dst: Packing | None = None, *,
                like: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]: ...

    def forward(self, x: Any, src: Packing | None = None, dst: Packing | None = None, *, like: Any = None) -> Any:
        """The rows that this rank holds by one Packing, from those that it holds by another one of the same sequences.

        Args:
            x: [rows, features], [0, features], or None and like=; or a tuple of tensors with one routing.
            src: by which x is cut.
            dst: by which y is cut.
            like: a tensor whose dtype and device are used if x is None.

        Returns:
            y, or a tuple of as many tensors as x has.
        """
        return call(self._engine, False, x, None, None, None, None, like, False, None, src, dst)

    if TYPE_CHECKING:
        @as_typed(forward)
        def __call__(self) -> Any: ...

    @overload
    def start(self, x: torch.Tensor | None, src: Packing | None = None, dst: Packing | None = None, *,
              like: torch.Tensor | None = None) -> Ticket[torch.Tensor]: ...

    @overload
    def start(self, x: tuple[torch.Tensor, ...], src: Packing | None = None, dst: Packing | None = None, *,
              like: torch.Tensor | None = None) -> Ticket[tuple[torch.Tensor, ...]]: ...

    def start(self, x: Any, src: Packing | None = None, dst: Packing | None = None, *, like: Any = None) -> Ticket[Any]:
        """Begins bridge(x, src, dst), as Bridge.start() does.

        Args:
            x: as in the call.
            src: as in the call.
            dst: as in the call.
            like: as in the call.

        Returns:
            A Ticket of what the call returns.
        """
        return call(self._engine, True, x, None, None, None, None, like, False, None, src, dst)


Made = TypeVar('Made', bound=_Module)


def _of(make: Callable[..., Any], group: Any, *key: Any) -> Any:
    return make(group, *key)


# Ranks make the same calls, so the same ones go on all of them.
_keeping = functools.lru_cache(maxsize=_LAYOUTS)
_of_groups = _keeping(_of)


def kept(make: Callable[..., Made], group: Any, *key: Any) -> Made:
    """make(group, *key), made at the first call and kept until 32 others have been used since."""
    of = _of_groups
    if isinstance(group, Comm):  # ranks that are threads: one Bridge each, which lives with its Comm
        of = group.__dict__.get('_bridges') or group.__dict__.setdefault('_bridges', _keeping(_of))
    return of(make, group, *key)


def _bridge(group: Any, src: Any, dst: Any, options: tuple[Any, ...]) -> Bridge:
    return Bridge(src, dst, group=group, **dict(options))


def bridge(x: torch.Tensor | None, src: Side, dst: Side, *, group: Group | None, samples: int | None = None,
           shape: tuple[int, ...] | None = None, like: torch.Tensor | None = None, extra: str | Sequence[str] = (),
           **options: Any) -> torch.Tensor:
    """y = x, carried from one layout to another. The Bridge is made at the first call and kept until 32 others have been used since.

    Args:
        x: as in Bridge's call.
        src: as in Bridge.
        dst: as in Bridge.
        group: as in Bridge.
        samples: as in Bridge's call.
        shape: as in Bridge's call.
        like: as in Bridge's call.
        extra: as in Bridge.
        **options: Bridge's.

    Returns:
        This rank's part of the destination.

    Raises:
        ValueError: as Bridge.
        RuntimeError: as Bridge.
    """
    src, dst = (Grid(side) if isinstance(side, dict) else side for side in (src, dst))  # a key
    if not (isinstance(src, Layout) and isinstance(dst, Layout)):
        options['extra'] = extra if isinstance(extra, str) else tuple(extra)
    made = kept(_bridge, group, src, dst, tuple(sorted(options.items())))
    return made.forward(x, samples=samples, shape=shape, like=like)
