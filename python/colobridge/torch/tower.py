# SPDX-License-Identifier: Apache-2.0
"""An encoder on all ranks of an LLM's grid: each image is encoded once, on the rank that balance() assigns it to, and its
rows go to their positions among the embeddings. docs/guides/vision.md."""
from __future__ import annotations

import itertools
import json
import math
import operator
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from .. import _structs as s
from ..comm import Comm
from ..errors import ArgumentError
from ..grid import Grid
from ..layout import Layout, part_of, parts_of, replica_of
from ..packing import Packing
from ..plan import choice
from ..tables import one_of, require_entries
from ..tables import table as as_table
from ..tensor import _TORCH, torch_dtype
from . import ranks as groups
from . import sides
from .alike import checksums, differing
from .calls import eager
from .engine import COMMS, Engine, call
from .tensors import said
from .tower_plan import Table, Text, TowerPlan, mismatch, own_parts, share
from .types import Device, Group, Integers, Side, as_typed


class _Last(NamedTuple):
    """The last call. times: when the one before it began, and it began and ended. carry: what carried its rows."""
    plan: TowerPlan
    times: tuple[Any, Any, Any]
    moved: dict[str, int]
    carry: Engine


class EncoderParallel(torch.nn.Module):
    """Encodes each image of a step once, on one rank of an LLM's grid, and carries its rows to their positions. A torch.nn.Module,
    whose parameters are those of the tower: "tower.NAME". docs/guides/vision.md.

    A deep copy has a copy of the tower, and shares communicators and memory. One that is pickled has
    group=torch.distributed.group.WORLD and comm="shared", and so has what is loaded; TypeError: another one. Bad input of one rank
    is an error on all of them.

    Args:
        tower: the encoder, as it is or in DDP, fully_shard() or ZeRO-3, with the same parameters on all ranks of the grid.
        group: a torch process group, a DeviceMesh or a colobridge.Comm with exactly the grid's ranks.
        llm: the LLM's grid, a DeviceMesh with named dims (its last one is the fastest) or a spec (its first one is), or its
            Layout.
        cost: cost(grid) -> a number per image in any unit, at least 0, on the rank that brings the image; or alpha of
            p (p + alpha) for p patches of a frame; None: alpha is 6 times the tower's width, as the products and the attention of
            a transformer's layer have it. fit() measures it.
        run: run(tower, pixels, grid) -> the rows [rows, H], in the order of the images, or a list of such tensors (DeepStack).
            None: Hugging Face's towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL (of pixels and grid_thw) and of SigLIP's kind (of pixels
            [images, channels, height, width], all rows of the last layer).
        rows: rows(grid) -> how many rows an image has, of its row of grid_thw, () without one. None: patches /
            spatial_merge_size^2, or SigLIP's number of patches.
        smallest: (pixels, grid_thw) of the smallest legal input, with values; None: one image of zeros as the tower's config has
            it. A rank without images runs it, so that it takes part in all collectives of a sharded tower; its gradient is
            exactly 0.
        stick: as balance() has it, for images that are on a rank already.
        grad_scale: factor of the gradient that reaches the tower: docs/guides/vision.md has a table.
        output: of the rows, as Bridge has it.
        grad: of the rows, as Bridge has it.
        extra: as Bridge has it.
        comm: "shared": calls go over the communicator of these ranks, as those of Bridge do, and plan() over another one, which
            all plan() on these ranks have in common; so one thread calls, and one, perhaps another, plans. "own": over two of its
            own. All ranks make such ones in one order; they connect then. Of a Comm they all make the first "shared" one, too,
            which connects then.
        split_frames: a video of grid (t, h, w) is balanced as t images, whose rows follow each other. "auto": with
            Qwen's towers, whose attention is within a frame (config.model_type says qwen), and no run of one's own. stats() and plans count frames then.

    Raises:
        ValueError: arguments that do not fit the grid or the tower.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed.
        TimeoutError: a rank did not come.

    Example:
        >>> import colobridge as cb, colobridge.torch as ct, torch
        >>> def one_rank(world):
        ...     tower = torch.nn.Linear(6, 16, bias=False)
        ...     torch.nn.init.ones_(tower.weight)                      # the same on all ranks
        ...     vision = ct.EncoderParallel(tower, group=world, llm='tp=2', rows=lambda grid: grid[2],
        ...                                 run=lambda tower, pixels, grid: tower(pixels), smallest=(torch.zeros(1, 6), [[1, 1, 1]]))
        ...     into = torch.zeros(1, 4, 16)                           # both ranks have this sequence, and its two images
        ...     hidden = vision(torch.ones(2, 6), [[1, 1, 1], [1, 1, 1]], seq=[0, 0], pos=[1, 2], into=into)
        ...     return hidden[0, :, 0].tolist(), vision.stats()['images']
        >>> cb.run_threads(2, one_rank)[0]
        ([0.0, 6.0, 6.0, 0.0], [1, 1])
    """

    @eager  # so that the others hear of an error
    def __init__(self, tower: torch.nn.Module, *, group: Group | None, llm: Side,
                 cost: Callable[[tuple[int, ...]], float] | float | None = None,
                 run: Callable[[Any, torch.Tensor, Any], torch.Tensor | Sequence[torch.Tensor]] | None = None, rows: Callable[[tuple[int, ...]], int] | None = None,
                 smallest: tuple[torch.Tensor, Integers | Sequence[Sequence[int]] | None] | None = None, stick: float = 0.0, grad_scale: float = 1.0,
                 output: Literal['full', 'sharded'] = 'full', grad: Literal['partial', 'disjoint'] = 'partial',
                 extra: str | Sequence[str] = (), comm: Literal['shared', 'own'] = 'shared',
                 split_frames: bool | Literal['auto'] = 'auto'):
        super().__init__()
        choice('comm', comm, COMMS)
        # Before anything else may fail: of what does, the others hear there.
        self._own: Any = groups.another(group, 'tower: group') if comm == 'own' else None
        self._plans: Any = groups.another(group, 'tower: group') if comm == 'own' else None
        self.tower, self.stick, self.grad_scale = tower, stick, grad_scale
        self.llm = sides.layout_of('tower: llm', llm, Layout.dst, extra)
        sides.compare('tower: llm', llm, self.llm.grid, group)
        self._config = getattr(getattr(tower, 'module', tower), 'config', None)
        self._merge: int | None = getattr(self._config, 'spatial_merge_size', None)
        self._run, self.output = run or _run, output
        given = smallest if smallest is not None else self._of_config()
        if given[0].is_meta:
            raise ArgumentError("tower: smallest has pixels %s on meta, expected a tensor with values, on any other device: a rank "
                                "without images runs it" % list(given[0].shape))
        self._smallest: tuple[Any, tuple[int, ...]] = given[0].detach(), () if given[1] is None else tuple(
            _integers(given[1], 'smallest')[0])
        # Attention of Qwen's towers is within a frame. Others that merge as they do may have it over a whole video.
        within = run is None and str(getattr(self._config, 'model_type', '')).startswith('qwen')
        self._frames = bool(self._smallest[1]) and (within if split_frames == 'auto' else bool(split_frames))
        if rows is not None:
            self.rows = rows
        self.alpha = 6.0 * (getattr(self._config, 'embed_dim', None) or getattr(self._config, 'hidden_size', 1024))
        if callable(cost):
            self.cost = cost
        elif cost is not None:
            alpha = _number(cost)
            if isinstance(alpha, str):
                raise ArgumentError("tower: cost is %s, expected a function of an image's grid, or a finite number of at least 0"
                                    % alpha)
            self.alpha = alpha
        towers = Layout.src(Grid([('dp', self.llm.grid.size)], offset=self.llm.grid.offset))
        of: dict[str, Any] = {'group': self._own if isinstance(self._own, Comm) else group, 'kind': 'ragged',
                              'comm': self._own if isinstance(self._own, groups.Own) else 'shared'}
        self._pixels = Engine(towers, Layout.dst(towers.grid), frozen=True, **of)
        self._carries = tuple(Engine(towers, self.llm, output=output, grad=grad, frozen=frozen, **of) for frozen in (False, True))
        self._last: _Last | None = None
        self._rank: int | None = None  # by _me()
        self._compared = False  # what ranks must have alike
        if comm == 'own':  # now: ranks whose threads meet at the store in other orders would wait in vain
            self._comm(), _planning(self._at())
        else:
            self._at()  # where a rank that ends before it plans says so; of a Comm it is made here, not beside calls

    @property
    def group(self) -> Group | None:
        """The ranks that call."""
        return self._pixels.group

    @property
    def last(self) -> TowerPlan | None:
        """The plan of the last call."""
        return None if self._last is None else self._last.plan

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__, _last=None, _rank=None, _compared=False)

    def _apply(self, fn: Any, *args: Any, **options: Any) -> Any:
        """to() and its like, of the smallest input, too: it is none of the buffers, which wrappers compare and send."""
        made = super()._apply(fn, *args, **options)
        pixels, grid = self._smallest
        like = fn(pixels)  # which may be memory without its values
        self._smallest = pixels.to(like.dtype if like.is_meta else like), grid  # "meta" would lose them
        return made

    def extra_repr(self) -> str:
        return 'llm=%s' % self.llm.grid

    def _of_config(self) -> tuple[Any, Any]:
        """On the CPU: also a tower that is made on "meta" has one with values."""
        of, m = self._config, self._merge
        dtype = next((p.dtype for p in self.tower.parameters()), torch.get_default_dtype())
        if of is not None and hasattr(of, 'patch_size'):
            channels = getattr(of, 'in_channels', None) or getattr(of, 'in_chans', None) or getattr(of, 'num_channels', 3)
            if m is not None:
                return torch.zeros((m * m, channels * getattr(of, 'temporal_patch_size', 1) * of.patch_size ** 2),
                                   dtype=dtype, device='cpu'), [[1, m, m]]
            if isinstance(getattr(of, 'image_size', None), int):
                return torch.zeros((1, channels, of.image_size, of.image_size), dtype=dtype, device='cpu'), None
        raise ArgumentError("tower: its config does not say what its smallest input is; pass smallest=(pixels, grid_thw)")

    def rows(self, grid: tuple[int, ...]) -> int:
        """Rows of an image.

        Args:
            grid: its row of grid_thw, () without one.

        Returns:
            How many they are.

        Raises:
            ValueError: the tower's config does not say it, and no rows= was given.
        """
        if grid and self._merge is not None:
            return math.prod(grid) // self._merge ** 2
        if not grid and hasattr(self._config, 'patch_size'):
            return math.prod(n // self._config.patch_size for n in self._smallest[0].shape[-2:])
        raise ArgumentError("tower: its config does not say how many rows an image has; pass rows=")

    def _rows(self, grid: tuple[int, ...]) -> int:
        try:
            return operator.index(self.rows(grid))
        except TypeError as why:
            raise ArgumentError("tower: rows of an image of grid %s: %s; expected a whole number" % (grid, why)) from None

    def cost(self, grid: tuple[int, ...]) -> float:
        """Cost of an image: attention is within a frame.

        Args:
            grid: its row of grid_thw, () without one.

        Returns:
            p (p + alpha) of the p patches of a frame, times the frames.
        """
        frames, patches = (grid[0], math.prod(grid[1:])) if grid else (1, 1)
        return frames * patches * (patches + self.alpha)

    def _comm(self) -> Comm:
        """The host's communicator of calls."""
        return self._pixels.comm(torch.device('cpu'))

    def _me(self) -> int:
        """This rank in the grid."""
        if self._rank is not None:
            return self._rank
        ranks, grid = groups.world_ranks(self.group, 'tower: group'), self.llm.grid
        if ranks != tuple(grid.ranks()):
            raise ArgumentError("tower: the group has ranks %s, expected those of the grid %s, %s" % (
                list(ranks[:8]), grid, list(grid.ranks())[:8]))
        self._rank = self.group.rank if isinstance(self.group, Comm) else dist.get_rank() - ranks[0]
        return self._rank

    @property
    def _device(self) -> Any:
        """Where the tower runs; one without parameters and buffers where its smallest input is."""
        return next(itertools.chain(self.tower.parameters(), self.tower.buffers(), self._smallest[:1])).device

    @property
    def _talks_to(self) -> Any:
        """For groups.tell()"""
        return self._own or self._pixels._talks_to

    def plan(self, pixels: torch.Tensor | None, grid_thw: torch.Tensor | Sequence[Sequence[int]] | None = None, *, seq: Integers = (),
             pos: Integers | None = None, row_pos: Integers | None = None, packing: Packing | Integers | None = None,
             load: Sequence[float] | None = None) -> TowerPlan:
        """Which rank encodes which image, by one host all-gather.

        It may come a step ahead, on a thread of its own (a data loader's): vision(pixels, plan=plan, into=...). All ranks plan their
        steps in one order. The first one connects the ranks that the constructor did not. An error reaches plan() of the other
        ranks, and no call.

        Args:
            pixels: as in the call.
            grid_thw: as in the call.
            seq: as in the call.
            pos: as in the call.
            row_pos: as in the call.
            packing: as in the call, and needed, as there is no into that tells the lengths.
            load: what each rank of the grid has to do beside these images, in the unit of cost, the same on all ranks: that of
                another tower, say.

        Returns:
            The plan, the same on all ranks.

        Raises:
            ValueError: bad input of any rank.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed.
            TimeoutError: a rank did not come.
        """
        return _planned(self._at(), self._plan, pixels, grid_thw, seq, pos, row_pos, packing, load)

    def _at(self) -> Any:
        """The ranks where this group plans, for groups.tell(); None: this one alone."""
        return groups.planning(self.group, self._plans, 'tower: group')

    def _plan(self, comm: Comm, *given: Any, load: Sequence[float] | None = None) -> TowerPlan:
        made = self._gathered(comm, *given)
        with groups.telling(comm):
            share([made], self.stick, load)
        return made

    def _gathered(self, comm: Comm, *given: Any) -> TowerPlan:
        """A plan without ranks."""
        self._me()
        table = self._local(*given)
        with groups.telling(comm):
            said = comm.gather_bytes(table.write(), ragged=True)
            return TowerPlan(self, [Table.read(part) for part in said])

    def _local(self, pixels: Any, grid_thw: Any, seq: Any, pos: Any, row_pos: Any, packing: Any) -> Table:
        grids = [] if grid_thw is None else _integers(grid_thw, 'grid_thw')
        if pixels is None:
            if grids:
                raise ArgumentError("tower: grid_thw has %d images, and pixels is None" % len(grids))
            count, kind = 0, ()
        elif not isinstance(pixels, torch.Tensor):
            raise ArgumentError("tower: pixels is a %s, expected a torch.Tensor" % type(pixels).__name__)
        else:
            count = len(grids) if self._smallest[1] else len(pixels)
            kind = torch_dtype(pixels.dtype, 'tower: pixels'), int(pixels.device.type == 'cuda'), *pixels.shape[1:]
            need, columns = sum(map(math.prod, grids)) if self._smallest[1] else count, len(self._smallest[1])
            if len(pixels) != need or any(len(g) != columns or min(g, default=1) < 1 for g in grids):
                raise ArgumentError("tower: pixels has %d patches, grid_thw %s says %d; expected grids of %d numbers above 0, "
                                    "and their patches" % (len(pixels), grids[:4], need, columns))
        shapes: list[tuple[int, ...]] = [tuple(grid) for grid in grids] if self._smallest[1] else [()] * count
        rows = [self._rows(shape) for shape in shapes]
        seq = as_table('tower', 'seq', seq)
        if count:
            one_of('tower', ('pos', pos), ('row_pos', row_pos))
        at = as_table('tower', 'pos', () if pos is None else pos)
        each = as_table('tower', 'row_pos', () if row_pos is None else row_pos)
        require_entries('tower', 'seq', seq, count, 'image')
        require_entries('tower', 'pos', at, 0 if pos is None else count, 'image')
        require_entries('tower', 'row_pos', each, 0 if row_pos is None else sum(rows), 'row')
        if self._frames:
            frames, seq, at = [grid[0] for grid in shapes], seq.tolist(), at.tolist()
            shapes = [(1, *grid[1:]) for grid in shapes for _ in range(grid[0])]
            whole, rows = rows, [self._rows(shape) for shape in shapes]
            ends = [0, *itertools.accumulate(frames)]
            for n, a, b in zip(whole, ends, ends[1:]):
                if sum(rows[a:b]) != n:
                    raise ArgumentError("tower: a video of %d frames has %d rows, and its frames %s; pass split_frames=False"
                                        % (b - a, n, rows[a:b][:4]))
            seq = [q for q, n in zip(seq, frames) for _ in range(n)]
            at = [p + k * rows[a] for p, a, n in zip(at, ends, frames) for k in range(n)]
        places = [each[end - n:end].tolist() for n, end in zip(rows, itertools.accumulate(rows))] if row_pos is not None else [
            [p] for p in at]
        return Table(shapes, [_number(self.cost(shape)) for shape in shapes], list(map(int, seq)), places,
                      row_pos is not None and count > 0, kind, self._trains(), self._text(packing))

    def _trains(self) -> bool:
        return any(p.requires_grad for p in self.tower.parameters())

    def _text(self, packing: Any) -> Text:
        """The sequences of this rank's replica."""
        if isinstance(packing, Packing):
            me = self.llm.grid.offset + self._me()
            return packing._of(replica_of(self.llm, me), parts_of(self.llm, s.AXIS_SAMPLES))
        edges = [] if packing is None else as_table('tower', 'packing', packing)
        return [b - a for a, b in zip(edges, edges[1:])]

    @eager
    def forward(self, pixels: torch.Tensor | None, grid_thw: torch.Tensor | Sequence[Sequence[int]] | None = None, *, seq: Integers = (),
                pos: Integers | None = None, row_pos: Integers | None = None,
                into: torch.Tensor | Sequence[torch.Tensor | None] | None = None, packing: Packing | Integers | None = None,
                plan: TowerPlan | None = None, inplace: bool | None = None, load: Sequence[float] | None = None) -> torch.Tensor | Any:
        """into, with the rows of all images at their positions.

        Every rank calls, also in a step without images, and runs backward through what it gets. What a rank has is in the table of
        docs/guides/vision.md.

        Args:
            pixels: [patches, ...], of this rank's images, or None.
            grid_thw: [images, 3], patches of each; None for towers without it.
            seq: [images]: the sequence of each in this rank's LLM replica.
            pos: [images]: where its rows begin there.
            row_pos: [rows]: where each row goes, instead of pos.
            into: embeddings [batch, positions, H]; None on a rank that holds no sequences (another pipeline stage). A tuple has an
                entry for each tensor of the tower, None: packed.
            packing: the sequences' cumulative lengths, or a Packing, if into does not tell.
            plan: of plan(), instead of grid_thw, seq, pos and packing.
            inplace: as RaggedBridge has it.
            load: as in plan().

        Returns:
            into; with a tower of several tensors (DeepStack) a list of it and of the packed rows of the others, which index() places.
        """
        me = self._me()
        intos = list(into) if isinstance(into, (list, tuple)) else [into]
        held = self.llm.holds(self.llm.grid.offset + me)
        if held and into is None:
            raise ArgumentError("tower: into is None on rank %d, which holds sequences; expected their embeddings"
                                % (self.llm.grid.offset + me))
        if plan is None and packing is None and held:
            packing = self._cumulative(intos)
        before, begin = self._last and self._last.times[1], _now(self._device)
        if plan is None:
            plan = self._plan(self._comm(), pixels, grid_thw, seq, pos, row_pos, packing, load=load)
        outs = self._encode(plan, me, pixels)
        # run() may have parameters of its own
        carry = self._carries[not any(t.requires_grad for t in itertools.chain(self.tower.parameters(), outs))]
        outs += [None] * (len(intos) - len(outs))
        intos += [None] * (len(outs) - len(intos))
        if into is None:
            intos[0] = outs[0].new_empty((0, outs[0].shape[1]))
        self._compare(plan, me, pixels, intos if held else [], carry)
        made = call(carry, False, tuple(outs), plan.segments, tuple(intos), inplace=inplace)
        self._last = _Last(plan, (before, begin, _now(self._device)), self._bytes(plan, me, outs, carry), carry)
        return made[0] if len(made) == 1 else list(made)

    if TYPE_CHECKING:
        @as_typed(forward)
        def __call__(self) -> Any: ...

    def _cumulative(self, intos: list[Any]) -> list[int]:
        """The sequences of a batch [batch, positions, H], or one of [positions, H]."""
        like = next((t for t in intos if t is not None), None)
        if like is None or like.dim() not in (2, 3):
            raise ArgumentError("tower: into is %s, which does not say how long sequences are; expected [batch, positions, H], or "
                                "packing=, their cumulative lengths" % said(like, '%(shape)s'))
        batch = like.shape[0] if like.dim() == 3 else 1
        parts = parts_of(self.llm, s.AXIS_ROWS) if self.output == 'sharded' else 1
        length = math.prod(like.shape[:-1]) // batch * parts if batch else 0
        return [length * k for k in range(batch + 1)]

    def _encode(self, plan: TowerPlan, me: int, pixels: Any) -> list[Any]:
        """The tower's tensors of this rank's images."""
        device, mine, (small, least) = self._device, plan.of(me), self._smallest
        given = small if plan._kind is None else self._bring(plan, plan._kind, me, pixels)
        if mine:
            grids = [plan.grid[e] for e in mine]
        else:
            given, grids = small.to(given.dtype), [least]
        grid = torch.tensor(grids, dtype=torch.int64, device=device) if least else None
        outs = self._run(self.tower, given.to(device, non_blocking=True), grid)
        outs = list(outs) if isinstance(outs, (list, tuple)) else [outs]
        rows = sum(plan._rows[e] for e in mine)
        if not mine:
            outs = [t[:0] for t in outs]
        for t in outs:
            if t.dim() != 2 or len(t) != rows:
                raise ArgumentError("tower: it returned %s for images of %d rows; expected [rows, features]; pass rows= or run="
                                    % (list(t.shape), rows))
            if self.grad_scale != 1 and t.requires_grad:
                t.register_hook(lambda g: g * self.grad_scale)
        return outs

    def _bring(self, plan: TowerPlan, kind: tuple[Any, ...], me: int, pixels: Any) -> Any:
        """Pixels of the images that this rank encodes; each comes from one rank that has them."""
        dtype, cuda, *shape = kind
        if pixels is None:
            name = next(name for name, kind in _TORCH.items() if kind == s.DTYPES[dtype])
            pixels = torch.empty((0, *shape), dtype=getattr(torch, name),
                                 device=self._device if cuda else 'cpu')
        own = [e for e, owner in enumerate(plan._owner) if owner == me]
        had = own_parts(plan, me)
        if own != list(had):  # not all of them, or in another order
            parts = [pixels.narrow(0, *had[e]) for e in own]
            pixels = torch.cat(parts) if parts else pixels[:0]
        if plan._owner != plan.rank:
            pixels = call(self._pixels, False, pixels.detach().reshape(len(pixels), math.prod(shape)), plan._pixels)
        return pixels.reshape(len(pixels), *shape)

    def _compare(self, plan: TowerPlan, me: int, pixels: Any, intos: list[Any], carry: Engine) -> None:
        """MismatchError on all ranks: pixels of an image that several ranks bring, the text of a replica, or what the towers
        hold in common is not the same. In the first call, at COLO_CHECK=2 in each."""
        comm, offset = self._comm(), plan._offset
        if comm.size == 1 or comm.check_level < 1 + self._compared:
            return
        named = list(_replicated(self.tower))
        images = [(e, part) for e, part in own_parts(plan, me).items() if len(plan._brought[e]) > 1]
        index = carry.index(plan.segments, self._device)  # by all ranks
        most = int(index.max()) if len(index) else -1
        texts = [(i, t.detach().reshape(-1, t.shape[-1])) for i, t in enumerate(intos) if t is not None]
        texts = [(i, t.index_fill(0, index.to(t.device), 0) if len(t) > most else t) for i, t in texts]  # without the images' rows
        sums = checksums([*(pixels.narrow(0, *part) for _, part in images), *(t for _, t in texts), *(t for _, _, t in named)])
        keys = [*((0, e) for e, _ in images), *((1, i) for i, _ in texts), *((2, k, *key) for k, (_, key, _) in enumerate(named))]
        with groups.telling(comm):
            said = [json.loads(part) for part in comm.gather_bytes(json.dumps([len(named), keys, sums]).encode(), ragged=True)]
            held: dict[tuple[Any, ...], dict[int, int]] = {}
            count = differing({offset + r: n for r, (n, _, _) in enumerate(said)})
            if count:
                mismatch("the towers of %s have other numbers of parameters" % count)
            for r, (_, keys, sums) in enumerate(said):
                part = [part_of(self.llm, axis, offset + r) for axis in (s.AXIS_SAMPLES, s.AXIS_FEATURES)]
                part.append(part_of(self.llm, s.AXIS_ROWS, offset + r) if self.output == 'sharded' else 0)
                for (kind, *key), number in zip(keys, sums):
                    held.setdefault((kind, *key, *(part if kind == 1 else ())), {})[offset + r] = number
            for (kind, at, *_), of in sorted(held.items()):
                ranks = differing(of)
                if ranks:
                    mismatch((
                        "%s bring an image of sequence %d at position %d, with other pixels" % (
                            ranks, plan._places[at][0], (plan._places[at][1] or [-1])[0]) if kind == 0 else
                        "%s bring other text for one replica of %s, in into%s beside the rows of images" % (
                            ranks, self.llm.grid, '[%d]' % at if at else '') if kind == 1 else
                        "the towers of %s have other values of parameter %s" % (ranks, named[at][0])))
        self._compared = True

    def index(self, device: Device | None = None) -> torch.Tensor:
        """Positions of this rank's rows of the last call.

        They are for the packed tensors: hidden.view(-1, H).index_add(0, vision.index(), deep).

        Args:
            device: of the result; None: the tower's.

        Returns:
            int64 [rows], positions in into.view(-1, H).

        Raises:
            ValueError: there was no call.
        """
        if self._last is None:
            raise ArgumentError("tower: index() is that of the last call, and there was none")
        return self._last.carry.index(self._last.plan.segments, self._device if device is None else device)

    def fit(self, small: tuple[int, ...], large: tuple[int, ...]) -> float:
        """Sets alpha of the cost p (p + alpha), from the times of forward on two images of zeros, on the first rank. Every rank
        calls.

        Args:
            small: the grid (1, h, w) of the one image, in patches.
            large: the grid of the other one.

        Returns:
            alpha, the same on all ranks.
        """
        (pixels, _), comm, times = self._smallest, self._comm(), []
        device = self._device
        for grid in (small, large):
            zeros = torch.zeros((math.prod(grid), *pixels.shape[1:]), dtype=pixels.dtype, device=device)
            with torch.no_grad():
                for _ in range(2):  # the first one makes what the second finds
                    begin = _now(device)
                    self._run(self.tower, zeros, torch.tensor([grid], device=device))
                times.append(_seconds(begin, _now(device)))
        (t, u), (p, q) = struct.unpack('dd', comm.gather_bytes(struct.pack('dd', *times))[0]), map(math.prod, (small, large))
        curved = u * p - t * q  # 0 if time grows as the number of patches
        self.alpha = min(max((t * q * q - u * p * p) / curved, 0.0), 1e9) if curved > 0 else 1e9
        return self.alpha

    def destroy(self) -> None:
        """Frees workspace, and communicators of its own; shared ones are kept for others. The second time does nothing."""
        for engine in (self._pixels, *self._carries):
            engine.destroy()
        for own in filter(None, (self._own, self._plans)):
            if isinstance(own, Comm):
                own.destroy()
            else:
                groups.end(own)

    def _bytes(self, plan: TowerPlan, me: int, outs: list[Any], carry: Engine) -> dict[str, int]:
        moves = [(n, owner, to) for n, owner, to in zip(plan.patches, plan._owner, plan.rank) if owner != to]
        width = 0 if plan._kind is None else math.prod(plan._kind[2:]) * s.DTYPE_SIZE[plan._kind[0]]
        planned = carry._ragged[outs[0].device].calls[-1].held.batch.bytes('forward')
        unit = math.lcm(carry._parts[2], carry._dst_features) * 4  # of the bridge, in f32
        row = sum(t.shape[1] * t.element_size() for t in outs)
        return {'pixels_sent': sum(n for n, owner, _ in moves if owner == me) * width,
                'pixels_received': sum(n for n, _, to in moves if to == me) * width,
                'rows_sent': planned.send // unit * row, 'rows_received': planned.recv // unit * row}

    def stats(self) -> dict[str, Any]:
        """Numbers of the last call. If the tower is on a GPU, the host waits for it.

        Returns:
            A dict. cost: of each rank; balance: the most of any rank over the mean; images and patches: of each rank;
            pixels_sent, pixels_received, rows_sent, rows_received: bytes of this rank, rows in forward; seconds: of this rank
            in the call; share: of the time since the call before began, None of the first.

        Raises:
            ValueError: there was no call.
        """
        if self._last is None:
            raise ArgumentError("tower: stats() are those of the last call, and there was none")
        plan, (before, begin, end), moved, _ = self._last
        ranks, mean = range(len(plan.cost)), sum(plan.cost) / len(plan.cost)
        seconds = _seconds(begin, end)
        return {'cost': plan.cost, 'balance': max(plan.cost) / mean if mean else 1.0,
                'images': [len(plan.of(r)) for r in ranks],
                'patches': [sum(plan.patches[e] for e in plan.of(r)) for r in ranks], **moved,
                'seconds': seconds, 'share': None if before is None else seconds / _seconds(before, begin)}


def plan_towers(*towers: tuple[EncoderParallel, dict[str, Any]]) -> list[TowerPlan]:
    """Plans of several towers of one grid, whose work is balanced together: of all images and clips the heaviest first, in
    the unit of cost, which fit() of each tower measures. All ranks call.

    Args:
        towers: (tower, arguments of its plan()), in one order on all ranks.

    Returns:
        A plan for each: vision(pixels, plan=plans[0], into=...), audio(clips, plan=plans[1], into=...).

    Raises:
        ValueError: towers of several grids. What plan() raises.
    """
    first = towers[0][0]
    for tower, _ in towers:
        if tower.llm.grid != first.llm.grid:
            raise ArgumentError("plan_towers: towers of the grids %s and %s, expected one" % (first.llm.grid, tower.llm.grid))
    return _planned_together(first._at(), towers)


@eager
def _planned_together(at: Any, towers: Any) -> list[TowerPlan]:
    comm = _planning(at)
    names = ('pixels', 'grid_thw', 'seq', 'pos', 'row_pos', 'packing')
    plans = []
    for tower, given in towers:
        extra = set(given) - set(names)
        if extra:
            raise ArgumentError("plan_towers: unknown argument %s, expected some of %s" % (sorted(extra), ', '.join(names)))
        plans.append(tower._gathered(comm, *(given.get(name, () if name == 'seq' else None) for name in names)))
    with groups.telling(comm):
        share(plans, min(tower.stick for tower, _ in towers), None)
    return plans


def _planning(at: Any) -> Comm:
    return groups.alone() if at is None else at.comm(torch.device('cpu'))


@eager
def _planned(at: Any, plan: Callable[..., TowerPlan], pixels: Any, grid_thw: Any, seq: Any, pos: Any, row_pos: Any,
             packing: Any, load: Any) -> TowerPlan:
    """plan(), of whose errors the others hear where they plan."""
    return plan(_planning(at), pixels, grid_thw, seq, pos, row_pos, packing, load=load)


def _now(device: Any) -> Any:
    """On the current stream of a GPU, or on the host."""
    if device.type != 'cuda':
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _integers(table: Any, name: str) -> list[list[int]]:
    rows = table.tolist() if hasattr(table, 'tolist') else [list(row) for row in table]
    if any(not isinstance(row, list) for row in rows):
        raise ArgumentError("tower: %s is %s, expected [images, columns]" % (name, rows[:4]))
    return rows


def _number(value: Any) -> float | str:
    """A cost, or the words for what is none, of which all ranks hear."""
    try:
        if not isinstance(value, (str, bytes)) and not getattr(value, 'ndim', 0) and 0 <= (found := float(value)) < math.inf:
            return found
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    return ' '.join(repr(value).split())[:100]


def _replicated(tower: Any) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Parameters of which ranks have copies: (name, coordinates of this rank's part, the part). Those of FSDP1 and
    of ZeRO-3 are parts that do not say which."""
    if any(of.__name__ == 'FullyShardedDataParallel' for module in tower.modules() for of in type(module).__mro__):
        return
    for name, p in tower.named_parameters():
        if p.is_meta or hasattr(p, 'ds_id'):
            continue
        placements: Any = getattr(p, 'placements', None)
        if placements is None:
            yield name, (), p
        elif (at := p.device_mesh.get_coordinate()) is not None:
            yield name, tuple(c for c, placed in zip(at, placements) if not placed.is_replicate()), p.detach().to_local()


def _run(tower: Any, pixels: Any, grid: Any) -> Any:
    """Hugging Face's towers: those of Qwen return merged rows, and DeepStack's; SigLIP's all rows of all images."""
    if grid is None:
        out = tower(pixels)
        out = out if isinstance(out, torch.Tensor) else out[0]  # last_hidden_state
        return out.reshape(-1, out.shape[-1])
    out = tower(pixels, grid)
    if isinstance(out, (torch.Tensor, tuple)):  # before transformers 5
        return out if isinstance(out, torch.Tensor) else [out[0], *out[1]]
    return [out.pooler_output, *(getattr(out, 'deepstack_features', None) or ())]
