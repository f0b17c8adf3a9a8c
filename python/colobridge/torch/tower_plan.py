# SPDX-License-Identifier: Apache-2.0
"""Which rank encodes which image of a step: the tables of all ranks, and a balance over one tower or several."""
from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Union, cast

from .. import _structs as s
from ..errors import STATUS, ArgumentError, MismatchError
from ..layout import context_of, replica_of
from ..packing import Packing, joined
from ..segments import Segments, balance

if TYPE_CHECKING:
    from .tower import EncoderParallel

Text = Union[Packing, list[int]]  # sequences of a replica: cut by themselves, or lengths that are cut as the layout says


# What all ranks find alike in what they gathered has a status, by which they know that no rank need be told.
def mismatch(words: str) -> NoReturn:
    raise MismatchError('tower: %s; expected the same' % words, STATUS['ERR_MISMATCH'])


def refuse(words: str) -> NoReturn:
    raise ArgumentError('tower: ' + words, STATUS['ERR_ARG'])


class TowerPlan:
    """A step's images, and the rank that encodes each; the same on all ranks. EncoderParallel.plan() makes it.

    Images are in the order in which ranks bring them; one that several ranks of an LLM replica have is there once. Ranks are
    counted in the grid.

    Attributes:
        cost: of each rank's images, in the unit of EncoderParallel's cost.
        load: of each rank, cost with what it has to do beside them.
        rank: of each image, the rank that encodes it.
        patches: of each image, how many it has.
        grid: of each image, what grid_thw says of it.
        segments: the tables of the rows.
    """

    def __init__(self, vision: 'EncoderParallel', tables: list[Any]):
        grid, self._offset = vision.llm.grid, vision.llm.grid.offset
        found: dict[tuple[int, int, int], int] = {}
        self.patches, self.grid, self._brought = [], [], []
        rows: list[int] = []
        costs: list[float] = []
        into: list[tuple[int, int, list[int]]] = []  # replica, sequence there, positions of the rows
        texts: dict[int, tuple[int, Text]] = {}  # by replica: the rank that says so
        kinds: dict[tuple[Any, ...], int] = {}
        scattered = any(t.scattered for t in tables)
        if len({t.trains for t in tables}) > 1:
            on, off = ([self._offset + r for r, t in enumerate(tables) if t.trains is trains] for trains in (True, False))
            mismatch("requires_grad of the tower's parameters: ranks %s have it, ranks %s have it of none" % (on, off))
        for r, table in enumerate(tables):
            replica = replica_of(vision.llm, self._offset + r)
            if table.text:
                first, said = texts.setdefault(replica, (r, table.text))
                if said != table.text:
                    mismatch("the sequences of ranks %d and %d, which are in one replica of %s, have %s and %s positions"
                              % (self._offset + first, self._offset + r, grid, shown(said), shown(table.text)))
            if table.seq:
                kinds.setdefault(table.kind, r)
            for e, cost in enumerate(table.cost):
                if isinstance(cost, str):
                    refuse("cost of image %d of rank %d, of grid %s, is %s; expected a finite number of at least 0"
                            % (e, self._offset + r, table.grid[e], cost))
                count = vision._rows(table.grid[e])
                at = places(table.pos[e], count)
                key = replica, table.seq[e], at[0] if at else -1 - len(found)  # without rows: never the same
                if key in found:
                    other = found[key]
                    first = next(iter(self._brought[other]))
                    if r in self._brought[other]:
                        refuse("images %d and %d of rank %d are at position %d of sequence %d; expected one image at a position"
                                % (self._brought[other][r], e, self._offset + r, key[2], key[1]))
                    self._brought[other][r] = e
                    for what, mine, its in (('grids', self.grid[other], table.grid[e]),
                                            ('rows at positions', places(into[other][2], count), at)):
                        if mine != its:
                            mismatch("ranks %d and %d bring an image of sequence %d at position %d, with %s %s and %s" % (
                                self._offset + first, self._offset + r, *key[1:], what, mine, its))
                    continue
                found[key] = len(rows)
                self._brought.append({r: e})  # rank: its own number of the image
                self.grid.append(table.grid[e]), self.patches.append(math.prod(table.grid[e]))
                rows.append(count), costs.append(cost)
                into.append((replica, table.seq[e], table.pos[e]))
        if len(kinds) > 1:
            mismatch("pixels of ranks %s are %s" % ([self._offset + r for r in kinds.values()], ' and '.join(
                '%s on a %s with patches of %s' % (s.DTYPES[k[0]], 'GPU' if k[1] else 'CPU', list(k[2:])) for k in kinds)))
        if len({getattr(text, 'split', None) for _, text in texts.values()}) > 1:
            mismatch("the sequences of ranks %s are cut in different ways, %s" % (
                [self._offset + r for r, _ in texts.values()], ' and '.join(shown(text) for _, text in texts.values())))
        self._kind = next(iter(kinds), None)
        self._costs, self._rows, self._vision = costs, rows, vision
        self._held = into, {replica: texts[replica][1] for replica in sorted(texts)}, scattered

    def _settle(self, ranks: list[int], load: list[float]) -> None:
        """@ranks encode the images, and have @load to do beside them."""
        size, sends = self._vision.llm.grid.size, [0] * self._vision.llm.grid.size
        self.rank = ranks
        self.cost = by_rank(self._costs, ranks, size)
        self.load: list[float] = [a + b for a, b in zip(load, self.cost)]
        self._owner: list[int] = []
        for n, to, brought_by in zip(self.patches, ranks, self._brought):
            owner = to if to in brought_by else min(brought_by, key=lambda r: (sends[r], r))
            self._owner.append(owner)
            sends[owner] += n if owner != to else 0
        self._tables(*self._held)
        del self._vision, self._held  # the tower keeps its last plan

    def _tables(self, into: Any, texts: dict[int, Text], scattered: bool) -> None:
        rows, vision, size = self._rows, self._vision, self._vision.llm.grid.size
        at, pos = [0] * size, []
        for n, to in zip(self.patches, self.rank):
            pos.append(at[to])
            at[to] += n
        self._pixels = Segments(self.patches, src=self._owner, seq=self.rank, pos=pos, seq_len=at, seq_dp=range(size))
        first, nseqs = {}, 0
        for replica, text in texts.items():
            first[replica], nseqs = nseqs, nseqs + len(text)
        for e, (replica, seq, _) in enumerate(into):
            if not 0 <= seq < len(texts.get(replica, [])):
                refuse("an image of rank %d is in sequence %d, expected one of the %d sequences of its replica" % (
                    self._offset + next(iter(self._brought[e])), seq, len(texts.get(replica, []))))
        where: dict[str, list[int]] = {'pos': [at[0] for _, _, at in into]}
        if scattered:
            where = {'row_pos': [p for n, (_, _, at) in zip(rows, into) for p in places(at, n)]}
        packed = {replica: text for replica, text in texts.items() if isinstance(text, Packing)}
        held: dict[str, Any] = {'packing': joined(packed, context_of(vision.llm))} if packed else {
            'seq_len': [n for text in texts.values() for n in cast(list[int], text)],
            'seq_dp': [replica for replica, text in texts.items() for _ in range(len(text))]}
        self.segments = Segments(rows, src=self.rank, seq=[first[replica] + seq for replica, seq, _ in into], **held, **where)
        self._places = [(seq, at) for _, seq, at in into]

    def of(self, rank: int) -> list[int]:
        """Images that a rank encodes.

        Args:
            rank: counted in the grid.

        Returns:
            Their numbers in the plan.
        """
        return [e for e, to in enumerate(self.rank) if to == rank]


def share(plans: list[TowerPlan], stick: float, load: Sequence[float] | None) -> None:
    """Ranks of the images of one or more towers: as few as possible leave a rank that has them; which of them sends is the
    least busy one. load: what ranks have to do beside them."""
    size = plans[0]._vision.llm.grid.size
    beside = [0.0] * size if load is None else list(map(float, load))
    if len(beside) != size or not all(0 <= cost < math.inf for cost in beside):
        refuse("load is %s, expected the costs of %d ranks" % (beside[:8], size))
    given = [cost for plan in plans for cost in plan._costs]
    # Integers for balance(), of any unit: their sum stays below 2^52, so floats hold it, too.
    shift = 52 - math.frexp(max(given + beside))[1] - (len(given) + size).bit_length()
    costs, begun = ([round(math.ldexp(cost, shift)) for cost in of] for of in (given, beside))
    busy, now = list(begun), []
    for cost, brought_by in zip(costs, (by for plan in plans for by in plan._brought)):
        now.append(min(brought_by, key=lambda r: (busy[r], r)))
        busy[now[-1]] += cost
    # What ranks have beside the images are images that stay; balance() has no others than its own.
    ranks = _beside(costs, begun, now, stick) if any(begun) else balance(costs, size, current=now, stick=stick)
    if max(busy) <= (1 + stick) * max(a + b for a, b in zip(begun, by_rank(costs, ranks, size))):
        ranks = now  # as they are; balance() moves each image that is more than the mean
    for plan in plans:
        n = len(plan._costs)
        plan._settle(ranks[:n], beside)
        ranks, beside = ranks[n:], plan.load


def _beside(costs: list[int], load: list[int], now: list[int], stick: float) -> list[int]:
    """balance() of ranks that have a load already."""
    load, ranks = list(load), list(now)
    most = (1 + stick) * (sum(costs) + sum(load)) / len(load)
    for e in sorted(range(len(costs)), key=lambda e: -costs[e]):
        if load[now[e]] + costs[e] > most:
            ranks[e] = min(range(len(load)), key=lambda r: (load[r], r))
        load[ranks[e]] += costs[e]
    return ranks


class Table(NamedTuple):
    """What a rank's data loader has, as all ranks hear of it. pos: of each row, if scattered, else of the first one. cost: of
    each image, words if it is no number."""
    grid: list[tuple[int, ...]]
    cost: list[float | str]
    seq: list[int]
    pos: list[list[int]]
    scattered: bool
    kind: tuple[int, ...]  # dtype, is it on a GPU, shape of a patch; () without pixels
    trains: bool  # does a parameter require grad
    text: Text

    def write(self) -> bytes:
        text = self.text
        if isinstance(text, Packing):
            text = {name: t.tolist() if hasattr(t, 'tolist') else t for name, t in text._again.items()}
        return json.dumps((*self[:-1], text)).encode()

    @classmethod
    def read(cls, said: bytes) -> 'Table':
        grid, cost, seq, pos, scattered, kind, trains, text = json.loads(said)
        return cls([tuple(g) for g in grid], cost, seq, pos, scattered, tuple(kind), trains,
                   Packing(**text) if isinstance(text, dict) else text)


def places(at: list[int], rows: int) -> list[int]:
    """Positions of an image's rows, of all of them or of the first one."""
    return at if len(at) == rows else list(range(at[0], at[0] + rows))


def own_parts(plan: TowerPlan, me: int) -> dict[int, tuple[int, int]]:
    """Of each image that a rank brings, in its order: the first of its patches, and how many they are."""
    had = sorted((by[me], e) for e, by in enumerate(plan._brought) if me in by)
    ends = list(itertools.accumulate(plan.patches[e] for _, e in had))
    return {e: (end - plan.patches[e], plan.patches[e]) for (_, e), end in zip(had, ends)}


def by_rank(values: list[Any], ranks: list[int], size: int) -> list[Any]:
    """Sums."""
    out: list[Any] = [0] * size
    for value, rank in zip(values, ranks):
        out[rank] += value
    return out


def shown(text: Text) -> str:
    return repr(text) if isinstance(text, Packing) else str(text[:8])
