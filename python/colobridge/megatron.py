# SPDX-License-Identifier: Apache-2.0
"""HyperCommGrid and ColocatedBridgeCommunicator under the names that Megatron-style runtimes use.

    from colobridge.megatron import ColocatedBridgeCommunicator, HyperCommGrid

Torch process groups are made by torch.distributed.new_subgroups_by_enumeration, for the rest of a model
takes them; which rank is where, what moves, and moving it are the library's. Nothing here imports torch
before a call that needs it, and torch's functions are looked up at the call.
"""
import enum
import importlib
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._structs import AXIS_SAMPLES
from .compat.megatron import linear_cross_entropy
from .grid import Grid
from .layout import Layout, parts_of, replica_of
from .megatron_relayout import (CpPartitionModeConverter, convert_cp_partition_mode,
                                convert_module_input_tensors_cp_partition_mode, prebuild_thd_cp_partition_routes)
from .megatron_shard import PartitionAdapter, PartitionConfig
from .mesh import dims_of, is_mesh
from .plan import ALGOS, GRADS, OUTPUTS, TRANSPORTS, choice, collective_check

if TYPE_CHECKING:
    import torch

    from .segments import Segments

__all__ = ['BridgeDirection', 'ColocatedBridgeCommunicator', 'CpPartitionModeConverter', 'HyperCommGrid', 'PartitionAdapter',
           'PartitionConfig', 'SliceInfo', 'convert_cp_partition_mode', 'convert_module_input_tensors_cp_partition_mode',
           'install', 'linear_cross_entropy', 'prebuild_thd_cp_partition_routes', 'uninstall']

_NAME = re.compile(r'(?!.*[0-9][A-Za-z])[A-Za-z_][A-Za-z0-9_]{0,14}$')


def __getattr__(name: str) -> Any:
    if name == 'dist':  # as other modules have it, for programs that patch it here
        import torch.distributed
        return torch.distributed
    raise AttributeError("module 'colobridge.megatron' has no attribute '%s'" % name)


def _dist() -> Any:
    patched = globals().get('dist')
    if patched is not None:
        return patched
    import torch.distributed
    return torch.distributed


def _list(dims: str | Sequence[str]) -> list[str]:
    return [dims] if isinstance(dims, str) else list(dims)


def _core(shape: Sequence[int], names: Sequence[str], offset: int) -> tuple[Grid, dict[str, str]]:
    """The library's grid and what it calls each dim: names that it would not take get another."""
    alias = {name: name if _NAME.match(name) else 'dim%d_' % i for i, name in enumerate(names)}
    return Grid([(alias[name], int(n)) for name, n in zip(names, shape)], offset=offset), alias


def _is_process_group_member(group: Any) -> bool:
    """Is this rank a member of what new_subgroups_by_enumeration() or new_group() returned."""
    return group is not None and group is not _dist().GroupMember.NON_GROUP_MEMBER


@dataclass
class _View:
    """One factorisation of the grid's ranks. core: of _core()"""
    name: str
    shape: list[int]
    dim_names: list[str]
    shared_dims: list[str]
    core: tuple[Grid, dict[str, str]]

    def checked(self, dims: str | Sequence[str]) -> list[str]:
        wanted = _list(dims)
        for dim in wanted:
            if dim not in self.dim_names:
                raise ValueError("'%s' is not in view '%s' with dim_names %s" % (dim, self.name, self.dim_names))
        return wanted

    def enum(self, dims: Sequence[str], as_given: bool = False) -> list[list[int]]:
        """All groups."""
        grid, alias = self.core
        names = [alias[dim] for dim in dims]
        groups = grid.groups(names)
        if as_given:
            groups = [grid.group(names, group[0], as_given=True) for group in groups]
        return [group.ranks() for group in groups]


class HyperCommGrid:
    """Ranks rank_offset .. rank_offset + size - 1 as a grid of named dims, the first one fastest.

    Args:
        shape: how many ranks each dim has.
        dim_names: of equal length, the name of each dim.
        rank_offset: the first of the ranks, >= 0.
        backend: of the process groups, as torch.distributed has it; None: torch's default.

    Attributes:
        size: ranks of the grid.

    Raises:
        ValueError: lengths differ, a negative offset, a WORLD_SIZE that is no number.
        RuntimeError: the world's size is unknown or too small.
    """

    def __init__(self, shape: list[int], dim_names: list[str], rank_offset: int = 0,
                 backend: str | None = None):
        if len(shape) != len(dim_names):
            raise ValueError("len(shape) %s != len(dim_names) %s" % (shape, dim_names))
        if 'WORLD_SIZE' in os.environ:
            said = os.environ['WORLD_SIZE']
            if not (said.isascii() and said.isdigit() and int(said) > 0):
                raise ValueError("WORLD_SIZE is '%s', expected a number of ranks, at least 1" % said)
            world = int(said)
        elif _dist().is_available() and _dist().is_initialized():
            world = _dist().get_world_size()
        else:
            raise RuntimeError("Cannot determine world size: neither is WORLD_SIZE set in the "
                               "environment nor torch.distributed initialized")
        if rank_offset < 0:
            raise ValueError("rank_offset must be non-negative, got %d" % rank_offset)
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.backend = rank_offset, backend
        self.size = math.prod(int(n) for n in shape)
        if self.size > world - rank_offset:
            raise RuntimeError("Grid shape %s is over sized with world size %d and rank offset %d"
                               % (shape, world, rank_offset))
        self._pgs: dict[Any, Any] = {}
        self._views = {'base': _View('base', list(shape), list(dim_names), list(dim_names),
                                     _core(shape, dim_names, rank_offset))}

    # ---- views ----

    def register_view(self, name: str, shape: list[int], dim_names: list[str],
                      shared_dims: list[str] | None = None) -> None:
        """Names another factorisation of the same ranks. Groups over shared dims only are the base grid's.

        Args:
            name: of the view.
            shape: how many ranks each dim has; their product is the grid's size.
            dim_names: of equal length, the name of each dim, none twice.
            shared_dims: dims whose groups are the same ranks in the same order in the view and the base grid; None: none.

        Raises:
            ValueError: the name is taken, lengths, duplicates, sizes, shared dims whose groups are not the same ranks in the
                same order in both.
        """
        shared = [] if shared_dims is None else _list(shared_dims)
        if name in self._views:
            raise ValueError("View '%s' is already registered" % name)
        if len(shape) != len(dim_names):
            raise ValueError("len(shape) %s != len(dim_names) %s" % (shape, dim_names))
        if len(set(dim_names)) != len(dim_names):
            raise ValueError("View '%s' has duplicate dim_names: %s" % (name, dim_names))
        sizes = [self._extent(name, shape, n) for n in shape]
        if math.prod(sizes) != self.size:
            raise ValueError("View '%s' has size %d, but the grid size is %d"
                             % (name, math.prod(sizes), self.size))
        if len(set(shared)) != len(shared):
            raise ValueError("View '%s' has duplicate shared_dims: %s" % (name, shared))
        for dim in shared:
            if dim not in self.dim_names:
                raise ValueError("Shared dim '%s' of view '%s' is not in the base view %s"
                                 % (dim, name, self.dim_names))
            if dim not in dim_names:
                raise ValueError("Shared dim '%s' of view '%s' is not in the view's dim_names %s"
                                 % (dim, name, dim_names))
        base, view = self._views['base'], _View(name, sizes, list(dim_names), shared, _core(sizes, dim_names, self.rank_offset))
        for dim in shared:
            if view.enum([dim]) != base.enum([dim]):
                raise ValueError("Shared dim '%s' has different membership in view '%s' and in the base "
                                 "view" % (dim, name))
        if len(shared) > 1 and view.enum(shared) != base.enum(shared):
            raise ValueError("Shared dims %s have different membership in view '%s' and in the base view"
                             % (shared, name))
        self._views[name] = view

    @staticmethod
    def _extent(name: str, shape: Any, n: Any) -> int:
        try:
            value = operator.index(n)
        except TypeError:
            value = 0
        if value <= 0 or isinstance(n, bool):
            raise ValueError("View '%s' shape must be positive ints, got %s" % (name, shape))
        return value

    def _view(self, view: str | None) -> _View:
        name = 'base' if view is None else view
        if name not in self._views:
            raise KeyError("View '%s' is not registered" % name)
        return self._views[name]

    # ---- ranks ----

    def _gen_rank_enum(self, dims: str | list[str]) -> list[list[int]]:
        """Groups of the base grid in the order as given: the last dim varies fastest in a group."""
        base = self._views['base']
        return base.enum(base.checked(dims), True)

    def get_rank_enum(self, dims: str | list[str], *, view: str | None = None) -> list[list[int]]:
        """All groups of a dim set.

        Args:
            dims: a name of a dim, or a list of names, in any order.
            view: the name of a registered view; None: the base grid.

        Returns:
            The ranks of each group, in canonical order: members ascend.

        Raises:
            KeyError: no such view.
            ValueError: no such dim.
        """
        chosen = self._view(view)
        return chosen.enum(chosen.checked(dims))

    @staticmethod
    def _order_dims_for(dim_names: list[str], dims: str | list[str]) -> tuple[list[str], str]:
        """(dims in reversed naming order, those joined by "-")."""
        wanted = _list(dims)
        ordered = [dim for dim in reversed(dim_names) if dim in wanted]
        return ordered, '-'.join(ordered)

    def is_current_rank_in_grid(self) -> bool:
        """Is this rank one of the grid's."""
        return self.rank_offset <= _dist().get_rank() < self.rank_offset + self.size

    # ---- groups ----

    def _stored(self, dims: str | Sequence[str], view: str | None) -> tuple[_View, list[str], Any]:
        """(the view whose groups are meant, dims in canonical order, key): the base view's when all
        dims are shared."""
        chosen = self._view(view)
        ordered, key = self._order_dims_for(chosen.dim_names, chosen.checked(dims))
        if all(dim in chosen.shared_dims for dim in ordered):
            ordered, key = self._order_dims_for(self.dim_names, ordered)
            return self._views['base'], ordered, key
        return chosen, ordered, (chosen.name, tuple(ordered))

    def create_pg(self, dims: str | list[str], *, view: str | None = None, **kwargs: Any) -> Any:
        """Makes a process group of dims for all groups at once; collective.

        Args:
            dims: a name of a dim, or a list of names, in any order.
            view: the name of a registered view; None: the base grid.
            **kwargs: go to torch.distributed.new_subgroups_by_enumeration().

        Returns:
            This rank's process group.

        Raises:
            KeyError: made before; no such view.
            ValueError: no such dim.
        """
        chosen, ordered, key = self._stored(dims, view)
        if key in self._pgs:
            raise KeyError("Process group %s%s has already been created"
                           % (ordered, '' if chosen.name == 'base' else " for view '%s'" % chosen.name))
        made = _dist().new_subgroups_by_enumeration(chosen.enum(ordered), backend=self.backend, **kwargs)
        self._pgs[key] = made[0]
        return made[0]

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> Any:
        """The process group that create_pg() made.

        Args:
            dims: a name of a dim, or a list of names, in any order.
            view: the name of a registered view; None: the base grid.

        Returns:
            This rank's process group.

        Raises:
            KeyError: create_pg() did not make it; no such view.
            ValueError: no such dim.
        """
        chosen, ordered, key = self._stored(dims, view)
        if key not in self._pgs:
            raise KeyError("Process group for %s%s hasn't been created"
                           % (ordered, '' if chosen.name == 'base' else " for view '%s'" % chosen.name))
        return self._pgs[key]

    def destroy(self) -> None:
        """Destroys every process group that this rank is a member of, once."""
        dist = _dist()
        seen: list[Any] = []
        for group in self._pgs.values():
            if not _is_process_group_member(group) or any(group is other for other in seen):
                continue
            seen.append(group)
            dist.destroy_process_group(group)
        self._pgs.clear()


def _layout(make: Callable[..., Layout], grid: Any, extra: Iterable[str], data: list[str]) -> Layout:
    """The usual layout of a side with each dp rank's samples split on over the dims of @data"""
    core, alias = _core(grid.shape, grid.dim_names, grid.rank_offset)
    inner = [alias[name] for name in data if name in alias]
    layout = make(core, extra=[*(alias[name] for name in extra if name in alias), *inner])
    for name in inner:
        layout.split('samples', name)
    return layout


class _MeshGrid:
    """A DeviceMesh as a grid."""

    def __init__(self, mesh: Any):
        dims, self.rank_offset = dims_of(mesh)
        self.dim_names, self.shape = [name for name, _ in dims], [n for _, n in dims]
        self.get_pg = mesh.get_group


class BridgeDirection(str, enum.Enum):
    """Which side has more data-parallel replicas. Each equals its string: FAN_IN == "fan_in".

    Attributes:
        FAN_IN: the source has more.
        FAN_OUT: the destination has more.
        EQUAL: both have as many.
    """
    FAN_IN = 'fan_in'
    FAN_OUT = 'fan_out'
    EQUAL = 'equal'


@dataclass(frozen=True)
class SliceInfo:
    """Samples [start, start + size) of a batch.

    Args:
        start: the first sample.
        size: how many samples.
    """
    start: int
    size: int


class ColocatedBridgeCommunicator:
    """Carries activations from src_grid's ranks to dest_grid's, which are the same ranks, and gradients back, summed over the
    destination's cp.

    By default the limits are those of the all-gather / all-reduce algorithm, in its order and its words (ValueError): tp and dp
    in both grids, equal ranks, pp 1, source cp 1, cp before dp, dp sizes that divide; a batch that divides. Keywords lift them:
    docs/guides/megatron.md#switching-a-runtime-three-imports.

    Args:
        src_grid: of the encoder: a HyperCommGrid, a DeviceMesh with named dims, or anything with shape, dim_names and
            rank_offset.
        dest_grid: of the LLM, as src_grid.
        src_module_name: what messages call the source.
        dest_module_name: what messages call the destination.
        dim_mapping: which axes of a tensor are batch "b", sequence "s" and hidden "h"; {'b': 0, 'h': 1} for flattened ones.
            None: {'b': 0, 's': 1, 'h': 2}.
        algo: "exact", for any pair of layouts, or "collective"; None: the limits above, or with output="sharded" "exact".
        output: "full", or "sharded": each context rank its own rows; it is exact, too.
        grad: "partial" or "disjoint", as colobridge.torch.Bridge has it.
        positions: the length of the LLM's sequence, if rows are a part of it.
        position_offset: where the rows begin in it.
        transport: "auto", "nccl" or "peer", as colobridge.torch.Bridge has it.
        buffers: as colobridge.torch.Bridge has it.
        extra: names of dims other than tp, cp, pp, dp and ep, along which ranks hold copies.
        data: names of such dims along which samples are split on inside of a dp rank; dp sizes and the ranks' positions then
            count these.
        grad_scale: factor of the gradient that reaches the encoder: docs/guides/megatron.md#scale-of-gradients.

    Attributes:
        direction: a BridgeDirection.
        scale: how many times more replicas the one side has than the other; None: they do not divide.
        src_tp_size: ranks of the source's tp.
        src_dp_size: parts of its samples.
        dest_tp_size: ranks of the destination's tp.
        dest_dp_size: parts of its samples.
        dest_cp_size: ranks of its cp.
        rank_to_src_pos: (dp, tp) of each rank of the source.
        rank_to_dest_pos: (dp, tp) of each first context rank of the destination.
        rank_to_dest_coords: (dp, tp, cp) of each rank of the destination.
        current_rank: this rank in the world.
        gather_group_ranks: the ranks whose batches concatenate, group by group.
        gather_pg: this rank's process group of those; None: there is none.
        dest_cp_pg: this rank's process group of the destination's cp; None: cp is 1.

    Raises:
        ValueError: layouts beyond the limits, names of dims, options, dim_mapping.
    """

    def __init__(self, src_grid: Any, dest_grid: Any, src_module_name: str = 'src',
                 dest_module_name: str = 'dest', dim_mapping: dict[str, int] | None = None, *,
                 algo: str | None = None, output: str = 'full', grad: str = 'partial',
                 positions: int | None = None, position_offset: int = 0, transport: str = 'auto',
                 buffers: int | None = None, extra: str | Sequence[str] = (), data: str | Sequence[str] = (),
                 grad_scale: float = 1.0):
        src_grid, dest_grid = (_MeshGrid(grid) if is_mesh(grid) else grid for grid in (src_grid, dest_grid))
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.src_module_name, self.dest_module_name = src_module_name, dest_module_name
        self.dim_mapping = {'b': 0, 's': 1, 'h': 2} if dim_mapping is None else dict(dim_mapping)
        if sorted(self.dim_mapping) not in (['b', 'h', 's'], ['b', 'h']) or \
                sorted(self.dim_mapping.values()) != list(range(len(self.dim_mapping))):
            raise ValueError("dim_mapping is %s, expected 'b', 's', 'h' (or 'b', 'h') and the axis of "
                             "each" % self.dim_mapping)
        if algo is not None:
            choice('algo', algo, ALGOS)
        choice('output', output, OUTPUTS)
        choice('grad', grad, GRADS)
        choice('transport', transport, TRANSPORTS)
        self._exact = algo == 'exact' or (algo is None and output == 'sharded')
        # Without "exact", collective_check() refuses all other dims, in its order.
        copies = _list(extra) if self._exact else \
            {*src_grid.dim_names, *dest_grid.dim_names} - {'cp', 'pp', 'dp'}
        shares = _list(data)
        if not self._exact and shares:
            raise ValueError("data is %s; only algo='exact' splits samples over other dims than dp" % shares)
        if 'dp' in shares or {*shares} & {*_list(extra)}:
            raise ValueError("data is %s and extra %s; expected other dims than dp, each in one of them"
                             % (shares, _list(extra)))
        self._src = _layout(Layout.src, src_grid, copies, shares)
        self._dst = _layout(Layout.dst, dest_grid, copies, shares)
        self._positions, self._position_offset = positions, position_offset
        src, dst = self._src.grid, self._dst.grid
        self.src_tp_size, self.dest_tp_size = src.extent('tp'), dst.extent('tp')
        self.src_dp_size = parts_of(self._src, AXIS_SAMPLES)
        self.dest_dp_size = parts_of(self._dst, AXIS_SAMPLES)
        self.dest_cp_size = dst.extent('cp')
        few, many = sorted((self.src_dp_size, self.dest_dp_size))
        if not self._exact:
            # A batch that divides, and positions that do: those are asked for when there is one.
            collective_check(self._src, self._dst, (many, 2 * self.dest_cp_size, 1))
        self.direction = (BridgeDirection.FAN_IN if self.src_dp_size > self.dest_dp_size else
                          BridgeDirection.FAN_OUT if self.src_dp_size < self.dest_dp_size else
                          BridgeDirection.EQUAL)
        self.scale = many // few if many % few == 0 else None
        # (dp, tp) of each rank, and (dp, tp, cp); on the destination's side the former are of its first context ranks
        self.rank_to_src_pos = {r: (replica_of(self._src, r), src.coords(r).get('tp', 0)) for r in src.ranks()}
        self.rank_to_dest_coords = {r: (replica_of(self._dst, r), dst.coords(r).get('tp', 0), dst.coords(r).get('cp', 0))
                                    for r in dst.ranks()}
        self.rank_to_dest_pos = {r: (dp, tp) for r, (dp, tp, cp) in self.rank_to_dest_coords.items() if cp == 0}
        self.current_rank = _dist().get_rank()
        self.gather_group_ranks = self._gather_groups()
        self.gather_pg: Any = self._new_group(self.gather_group_ranks) if self.gather_group_ranks else None
        self._own_pgs = [self.gather_pg]
        self.dest_cp_pg = self._cp_group() if self.dest_cp_size > 1 else None
        self._options: dict[str, Any] = {'algo': algo or 'exact', 'output': output, 'grad': grad,
                                         'transport': transport, 'buffers': buffers, 'grad_scale': grad_scale}
        self._bridge: Any = None
        self._ragged: Any = None  # of batches with segments
        self._destroyed = False

    # ---- where each rank is ----

    def _gather_groups(self) -> list[list[int]]:
        """Siblings whose batches concatenate, in that order; none when dp sizes are equal or (exact
        only) do not divide, or the two grids are not the same ranks."""
        if self.direction is BridgeDirection.EQUAL or self.scale is None or \
                set(self.rank_to_src_pos) != set(self.rank_to_dest_coords):
            return []
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for rank, (src_dp, src_tp) in self.rank_to_src_pos.items():
            dp, tp, cp = self.rank_to_dest_coords[rank]
            if self.is_fan_in():
                key, place = (dp, src_tp, 0), src_dp
            else:
                key, place = (src_dp, tp, cp), dp
            groups.setdefault(key, []).append((place, rank))
        return [[rank for _, rank in sorted(members)] for _, members in sorted(groups.items())]

    def _new_group(self, ranks: list[list[int]]) -> Any:
        return _dist().new_subgroups_by_enumeration(ranks, backend=getattr(self.dest_grid, 'backend', None))[0]

    def _cp_group(self) -> Any:
        """The destination's cp group: the one its grid has, else one of our own."""
        try:
            return self.dest_grid.get_pg('cp')
        except (KeyError, AttributeError):
            group = self._new_group([group.ranks() for group in self._dst.grid.groups('cp')])
            self._own_pgs.append(group)
            return group

    def is_fan_in(self) -> bool:
        """Has the source more dp ranks."""
        return self.direction is BridgeDirection.FAN_IN

    def is_fan_out(self) -> bool:
        """Has the destination more dp ranks."""
        return self.direction is BridgeDirection.FAN_OUT

    def get_slice_info(self, batch_size: int) -> SliceInfo:
        """Which samples of a batch are this rank's.

        They are those of its input in fan-out, of the gathered gradient in fan-in; all of them when equal.

        Args:
            batch_size: samples of the batch.

        Returns:
            The samples as a SliceInfo.

        Raises:
            ValueError: the batch does not divide.
            RuntimeError: this rank is outside of the grids.
        """
        if self.direction is BridgeDirection.EQUAL:
            return SliceInfo(0, batch_size)
        self._divides(batch_size)
        assert self.scale is not None
        size = batch_size // self.scale
        places = (self.rank_to_src_pos if self.is_fan_in() else self.rank_to_dest_coords)
        if self.current_rank not in places:
            raise RuntimeError("rank %d is outside of the grids, no samples are its own"
                               % self.current_rank)
        return SliceInfo(places[self.current_rank][0] % self.scale * size, size)

    def _divides(self, batch: int) -> None:
        if self.scale is None or batch % self.scale:
            raise ValueError("%s -> %s: batch dim size %d is not divisible by %s scale=%s."
                             % (self.src_module_name, self.dest_module_name, batch,
                                self.direction.value, self.scale))

    # ---- data ----

    def communicate(self, tensor: 'torch.Tensor', *, samples: int | None = None, segments: 'Segments | None' = None,
                    into: Any = None) -> 'torch.Tensor':
        """The tensor under the destination's layout; differentiable.

        A rank outside of the grids gets its tensor back at once, and need not call. If the LLM has several pipeline stages
        (algo="exact"), ranks of the others get an empty tensor, and run backward through it: the encoder's gradient comes from
        stage 0. Of several modalities, each has a call.

        Args:
            tensor: this rank's part of the source, with the axes of dim_mapping, of any dtype that a bridge carries; of a
                ragged batch [rows, H].
            samples: the global batch if dp does not divide it (algo="exact").
            segments: of a ragged batch (algo="exact"), as colobridge.torch.RaggedBridge has them.
            into: of a ragged batch, as there.

        Returns:
            This rank's part of the destination, of the tensor's dtype.

        Raises:
            ValueError: axes, batch; segments without algo="exact".
            RuntimeError: after destroy(); another rank failed.
            TimeoutError: a rank did not come.
            MismatchError: ranks disagree.
        """
        if self._destroyed:
            raise RuntimeError('communicate: this communicator was destroyed')
        inside = self.current_rank in self.rank_to_src_pos or self.current_rank in self.rank_to_dest_coords
        given = segments is not None or into is not None
        if given and self._exact:
            return self._communicate_ragged(tensor, segments, into) if inside else tensor if into is None else into
        bridge = self._uniform() if inside else None
        try:
            if given:
                raise ValueError("communicate: segments are given; only algo='exact' carries ragged batches")
            if tensor.dim() != len(self.dim_mapping):
                raise ValueError("communicate: the tensor is %s, expected %d axes (%s)"
                                 % (list(tensor.shape), len(self.dim_mapping), self.dim_mapping))
            if bridge is None:
                return tensor
            if self.is_fan_out() and not self._exact:
                self._divides(tensor.shape[self.dim_mapping['b']])
            flat = len(self.dim_mapping) == 2
            if flat:  # a token is a sample of one row
                tensor = tensor.unsqueeze(1)
            shape = bridge.global_shape(tensor, samples)
        except Exception as why:
            if bridge is not None:
                from .torch.ranks import tell
                tell(why, (bridge,))  # in which the others wait for this rank
            raise
        if self._positions is None and self._options['output'] == 'full' and \
                self._options['grad'] == 'partial':
            # No rank's rows are cut: any length will do, and the library wants one that would divide.
            unit = 2 * self.dest_cp_size
            shape += (-(-shape[1] // unit) * unit,)
        out = bridge(tensor, shape=shape)
        return out.squeeze(1) if flat else out

    def check_samples(self, src: Any, dest: Any) -> None:
        """Has the LLM the text of the samples that the encoder has? A rank outside of the grids need not call.

        Args:
            src: ids of this rank's samples of the source, as colobridge.torch.Bridge.check_samples() has them: a tensor or a
                list of whole numbers below 2^63, or None.
            dest: of this rank's samples of the destination.

        Raises:
            MismatchError: on all ranks, where a sample differs.
        """
        if self.current_rank in self.rank_to_src_pos or self.current_rank in self.rank_to_dest_coords:
            self._uniform().check_samples(src, dest)

    def _uniform(self) -> Any:
        if self._bridge is None:
            from .torch import Bridge
            axes = [name for name, _ in sorted(self.dim_mapping.items(), key=lambda item: item[1])]
            if len(axes) == 2:
                axes.insert(1, 's')
            if self._position_offset or self._positions:
                self._dst.map_offset(self._position_offset, self._positions or 0)
            self._bridge = Bridge(self._src, self._dst, group=_dist().group.WORLD,
                                  axes=''.join(axes), **self._options)
        return self._bridge

    def _communicate_ragged(self, tensor: Any, segments: Any, into: Any) -> Any:
        if self._ragged is None:
            from .torch import RaggedBridge
            options = {name: value for name, value in self._options.items() if name != 'algo'}
            self._ragged = RaggedBridge(self._src, self._dst, group=_dist().group.WORLD, **options)
        return self._ragged(tensor, segments, into=into)

    def destroy(self) -> None:
        """Destroys the process groups made here; the second time does nothing."""
        dist = _dist()
        for group in self._own_pgs:
            if _is_process_group_member(group):
                dist.destroy_process_group(group)
        self._own_pgs = []
        self.gather_pg = None
        for bridge in self._bridge, self._ragged:
            if bridge is not None:
                bridge.destroy()
        self._destroyed = True


# Where megatron-core (0.18, 0.19) defines the classes that ours replace.
_UPSTREAM = {'HyperCommGrid': 'megatron.core.hyper_comm_grid',
             'ColocatedBridgeCommunicator': 'megatron.core.models.mimo.comm.colocated_communicator'}
_replaced: list[tuple[Any, str, Any]] = []  # module, name, what it was


def install() -> list[str]:
    """Puts HyperCommGrid and ColocatedBridgeCommunicator of this module in the place of megatron-core's, in the modules that
    define them and in every module that has imported them by name.

    Modules that are imported later find ours. Call it before the program makes a grid.

    Returns:
        The places, "module.name"; none the second time.

    Raises:
        ImportError: no megatron-core, or one without these classes.
    """
    old: dict[int, tuple[Any, Any]] = {}
    for name, where in _UPSTREAM.items():
        try:
            theirs = getattr(importlib.import_module(where), name)
        except (ImportError, AttributeError) as why:
            raise ImportError("install: megatron-core has no %s.%s (%s); it needs one with the MIMO model"
                              % (where, name, why)) from why
        if theirs is not globals()[name]:
            old[id(theirs)] = theirs, globals()[name]
    places: list[str] = []
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, '__dict__', {}).items()):
            if id(value) in old and module is not sys.modules[__name__]:
                setattr(module, name, old[id(value)][1])
                _replaced.append((module, name, value))
                places.append('%s.%s' % (module.__name__, name))
    return places


def uninstall() -> None:
    """Puts back what install() replaced."""
    while _replaced:
        setattr(*_replaced.pop())
