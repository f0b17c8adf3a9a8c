# SPDX-License-Identifier: Apache-2.0
"""Packed sequences whose cut changes, as an autograd function, against owners of positions by hand: processes over
gloo, ranks that are threads, checkpointing, gradients that are None, two batches outstanding, bad input."""
import importlib
import os
import pickle
import random
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge import compat  # noqa: E402
from world import meet, refused  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get('T_SEED', '1'))


# ---- by hand: which rank has a position ----

def owner(cut, length, n, p, first=0):
    """The context rank of position p, or None: all."""
    if cut in ('whole', 'heads'):
        return None
    pieces = 2 * n if cut == 'zigzag' and n > 1 else n
    k = p // (length // pieces)
    return first + (k if k < n else 2 * n - 1 - k)


def rows_of(lengths, cut, size, rank):
    """Indices, among all rows, of those that a rank has."""
    out, start = [], 0
    if cut == 'contiguous':
        return [i for i in range(sum(lengths)) if i * size // sum(lengths) == rank]
    for length in lengths:
        out += [start + p for p in range(length) if owner(cut, length, size, p) in (None, rank)]
        start += length
    return out


def part(whole, lengths, cut, size, rank):
    mine = whole[rows_of(lengths, cut, size, rank)]
    if cut != 'heads':
        return mine
    heads = whole.shape[1] // size
    return mine[:, rank * heads:(rank + 1) * heads]


def gradient(whole_d_y, lengths, src, dst, size, rank):
    """Of a rank's x; @whole_d_y: [size, rows, ..], of each rank's y, if all have all rows, else its own part counts."""
    if dst == 'whole':
        return part(whole_d_y.sum(0), lengths, src, size, rank)
    return part(whole_d_y[0], lengths, src, size, rank)


def cu_of(lengths):
    out = [0]
    for n in lengths:
        out.append(out[-1] + n)
    return out


def relayouts(rank, size, group, seeds):
    """Each pair of cuts on random lengths: bits, and gradients of small integers."""
    for seed in seeds:
        rng = random.Random(seed)
        src, dst = (rng.choice(('zigzag', 'block', 'contiguous', 'whole', 'heads')) for _ in range(2))
        lengths = [2 * size * rng.randrange(0, 4) for _ in range(rng.randrange(0, 5))]
        if not {'zigzag', 'block'} & {src, dst}:  # lengths of any kind, whose sum the ranks divide
            lengths = [rng.randrange(0, 9) for _ in lengths]
            lengths.append(-sum(lengths) % size)
        g = torch.Generator().manual_seed(seed)
        shape = (sum(lengths), 2 * size, 3)
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64))
        whole = torch.randn(shape, generator=g).to(dtype)
        d_y = torch.randint(-4, 5, (size, *shape), generator=g).to(dtype)
        d_y = d_y if dst == 'whole' else d_y[:1].expand(size, *shape)
        x = part(whole, lengths, src, size, rank).clone().requires_grad_()
        tables = cu_of(lengths)
        cu = rng.choice((tables, torch.tensor(tables), torch.tensor(tables, dtype=torch.int32)))
        y = ct.relayout(x, cu, src, dst, group=group)
        want = part(whole, lengths, dst, size, rank)
        assert y.shape == want.shape and torch.equal(y, want), (seed, src, dst, lengths)
        y.backward(part(d_y[rank], lengths, dst, size, rank))
        want = gradient(d_y, lengths, src, dst, size, rank)
        assert torch.equal(x.grad, want), (seed, src, dst, lengths, 'gradient')


@pytest.mark.parametrize('size', [1, 2, 3, 4])
def test_relayouts_on_threads_are_those_by_hand(size):
    def one_rank(world):
        world.set_check(seed % 3)
        relayouts(world.rank, size, world, [seed])
    for seed in range(SEED, SEED + 40):
        cb.run_threads(size, one_rank)


def on_processes(rank, seeds):
    relayouts(rank, 4, dist.group.WORLD, seeds)


def test_relayouts_on_processes_are_those_by_hand(world):
    world.run(on_processes, range(SEED + 100, SEED + 140))


def test_a_contiguous_rank_has_one_interval_of_all_rows():
    """Of 5 + 4 + 3 rows on 3 ranks: 0..3 of the first, its last and 0..2 of the second, the rest."""
    p = cb.Packing([0, 5, 9, 12], split='contiguous')
    assert [p.positions(rank, 'cp=3') for rank in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 0, 1, 2]]
    assert [p.cu_seqlens(rank, 'cp=3') for rank in range(3)] == [[0, 4], [0, 1, 4], [0, 1, 4]]
    assert [p.continues(rank, 'cp=3') for rank in range(3)] == [False, True, True]
    assert not cb.Packing([0, 6, 12], split='contiguous').continues(1, 'cp=2')
    assert cb.Packing([0, 0, 0], split='contiguous').positions(1, 'cp=2') == []
    with pytest.raises(ValueError, match='table seq_cp is given, expected NULL with split CONTIGUOUS'):
        cb.Packing([0, 8], split='contiguous', cp=2).rows(0, 'cp=2')


# ---- padding, sequence parallelism ----

def least_rooms(lengths, cut, cp, tp):
    """By trying: the least that cp, and then tp, can cut; what a sequence lacks by itself, the rest behind the last one."""
    rooms = []
    for n in lengths:
        while cut == 'zigzag' and cp > 1 and n % (2 * cp) or cut == 'block' and n % cp:
            n += 1
        rooms.append(n)
    while rooms and any(len(rows_of(rooms, cut, cp, c)) % tp for c in range(cp)) or cut == 'contiguous' and sum(rooms) % (cp * tp):
        rooms[-1] += 2 * cp if cut == 'zigzag' and cp > 1 else cp if cut == 'block' else 1
    return rooms


def padded(whole, lengths, cut, cp, tp, c, t, junk=0.0):
    """A rank's rows, @junk where it has padding."""
    rooms = least_rooms(lengths, cut, cp, tp)
    spread = torch.full((sum(rooms), *whole.shape[1:]), junk, dtype=whole.dtype)
    at, to = 0, 0
    for n, room in zip(lengths, rooms):
        spread[to:to + n] = whole[at:at + n]
        at, to = at + n, to + room
    mine = part(spread, rooms, cut, cp, c)
    return mine.view(tp, -1, *mine.shape[1:])[t] if len(mine) else mine


def pads_and_parts(rank):
    """cp 2 and tp 2, tp 3 alone, cp 4 alone: lengths of any kind, tensors whose rows are cut over both groups."""
    for cp_ranks, tp_ranks, seeds in (([[0, 2], [1, 3]], [[0, 1], [2, 3]], 24), ([[0], [1], [2]], [[0, 1, 2]], 8),
                                      ([[0, 1, 2, 3]], [[0], [1], [2], [3]], 8)):
        made = [[dist.new_group(ranks) for ranks in of] for of in (cp_ranks, tp_ranks)]
        mine = [[(g, ranks.index(rank)) for g, ranks in zip(groups, of) if rank in ranks]
                for groups, of in zip(made, (cp_ranks, tp_ranks))]
        if not all(mine):
            continue
        (((group, c),), ((tp_group, t),)), cp, tp = mine, len(cp_ranks[0]), len(tp_ranks[0])
        for seed in range(SEED, SEED + seeds):
            rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
            src, dst = (rng.choice(('zigzag', 'block', 'contiguous', 'whole', 'heads')) for _ in range(2))
            lengths = [rng.randrange(0, 11) for _ in range(rng.randrange(0, 5))]
            whole = torch.randn((sum(lengths), 2 * cp, 3), generator=g).double()
            d_y = torch.randint(-4, 5, (cp if dst == 'whole' else 1, *whole.shape), generator=g).double().expand(cp, *whole.shape)
            x = padded(whole, lengths, src, cp, tp, c, t, junk=rank + 7.5).clone().requires_grad_()
            for _ in range(2):  # a rank's memory of the first is that of the second
                x.grad = None
                y = ct.relayout(x, cu_of(lengths), src, dst, group=group, tp_group=tp_group, pad=True)
                assert torch.equal(y, padded(whole, lengths, dst, cp, tp, c, t)), (seed, src, dst, lengths)
                y.backward(padded(d_y[c], lengths, dst, cp, tp, c, t, junk=rank + 5.25))
                want = d_y.sum(0) if dst == 'whole' else d_y[0]
                assert torch.equal(x.grad, padded(want, lengths, src, cp, tp, c, t)), (seed, src, dst, lengths, 'gradient')
            if src == 'whole' or dst == 'whole' or sum(lengths) % (2 * cp * tp):
                continue
            a = torch.zeros(3, sum(lengths) // cp // tp, 2 * cp, 1) + rank  # dense
            assert ct.relayout(a, None, 'block', 'zigzag' if sum(lengths) % (2 * cp * tp) == 0 else 'block', group=group,
                               tp_group=tp_group, dim=1).shape == a.shape


def test_padding_differs_by_side_and_tp_cuts_what_a_rank_has(world):
    world.run(pads_and_parts)


def wrong_groups(rank):
    row, everyone = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], dist.group.WORLD
    x = torch.zeros(4, 1)
    return [refused(lambda: ct.relayout(x, [0, 16], 'block', 'block', group=row, tp_group=row)),
            refused(lambda: ct.relayout(x, [0, 16], 'block', 'block', group=everyone, tp_group=everyone)),
            refused(lambda: ct.relayout(x, None, 'block', 'block', group=everyone, pad=True))]


def test_groups_of_one_dim_are_refused(world):
    for said in world.run(wrong_groups):
        assert 'group has ranks' in said[0] and 'expected two dims of one grid' in said[0], said
        assert 'expected two dims of one grid' in said[1], said
        assert 'pad=True without cu_seqlens' in said[2], said


def what_the_last_call_had(rank):
    """Calls that differ from the one before in one thing only, and those that do not."""
    group, cu = dist.group.WORLD, [0, 16, 24]
    src, dst = (cb.Packing(cu, split=split) for split in ('zigzag', 'block'))
    carry = ct.PackedBridge('cp=4', 'cp=4', group=group)
    x = torch.arange(12.).view(6, 2) + 100 * rank
    want = carry(x, src, dst)
    for like in (x.clone(), x.double(), torch.cat([x, x], 1), x.clone().requires_grad_(), x.clone(), (x.clone(),), x.clone()):
        y = carry(like, src, dst)
        one, of = (y[0], like[0]) if isinstance(like, tuple) else (y, like)
        assert torch.equal(one, torch.cat([want, want], 1).to(of.dtype)[:, :of.shape[1]]) and one.dtype == of.dtype
    y = carry(x.clone().requires_grad_(), src, dst)
    for leaf in (x.clone().requires_grad_(), x.clone()):  # y has a gradient on every rank, also of those whose x has none
        y = carry(leaf, src, dst)
        assert y.requires_grad
        y.sum().backward()
    with torch.no_grad():
        assert not carry(x.clone().requires_grad_(), src, dst).requires_grad
        assert torch.equal(carry(x, src, dst), want) and torch.equal(carry(x, src, src), x)
        assert torch.equal(carry(want, src.with_split('block'), dst), want)
    assert torch.equal(carry(want, dst, src), x)
    return refused(lambda: carry(x[:5], src, dst))


def test_a_call_is_checked_by_what_the_last_call_had(world):
    for said in world.run(what_the_last_call_had):
        assert 'expected' in said and '5' in said, said


def test_padding_of_a_packing():
    p = cb.Packing([0, 3, 8], split='zigzag', pad_to=4)
    assert [p.positions(rank, 'cp=2') for rank in range(2)] == [[0, 3, 0, 1, 6, 7], [1, 2, 2, 3, 4, 5]]
    assert [p.sequence_ids(rank, 'cp=2') for rank in range(2)] == [[0, 0, 1, 1, 1, 1]] * 2
    assert cb.Packing([0, 3, 8], split='contiguous', pad_to=4).rows(3, 'cp=4') == 2  # 3 + 5 need none
    assert cb.Packing(seq_len=[3, 2, 5], dp=[0, 1, 0], split='contiguous', pad_to=4).rows(2, 'cp=2,dp=2') == 2  # 2 + 2 of padding
    assert p.with_split('block', pad_to=[3, 5]) == cb.Packing([0, 3, 8], split='block', pad_to=[3, 5]) != p.with_split('block')
    assert cb.Packing(**p._again) == p and pickle.loads(pickle.dumps(p)) == p
    for wrong, words in ((0, 'pad_to is 0, expected at least 1'), ([4], 'pad_to has 1 entries, expected 2'),
                         ([2, 8], 'sequence 0 has 3 positions and seq_room 2, expected at least as many')):
        with pytest.raises(ValueError, match=words):
            cb.Packing([0, 3, 8], pad_to=wrong).rows(0, 'cp=2')


# ---- groups, dense tensors ----

def pairs_of_ranks(rank):
    """Two groups of ranks that do not follow each other, each with sequences of its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    for which, ranks in enumerate(([0, 2], [3, 1])):
        if rank in ranks:
            relayouts(sorted(ranks).index(rank), 2, groups[which], range(SEED + 200 + which, SEED + 210 + which))


def test_a_group_counts_its_ranks_from_zero(world):
    world.run(pairs_of_ranks)


def of_a_split(world):
    """Comms of two ranks of four, which do not follow each other, and in another order than the world has them"""
    for which, group in enumerate((world.split('tp=2,cp=2', 'cp'), world.split_color(world.rank % 2, -world.rank))):
        ranks = [group.world_rank(r) for r in range(2)]
        assert ranks == [world.rank % 2, world.rank % 2 + 2][::-1 if which else 1]
        relayouts(group.rank, 2, group, range(SEED + 220 + which, SEED + 230 + which))
        x = torch.tensor(([0., 1, 4, 5], [2., 3, 6, 7])[group.rank])[:, None]  # two sequences of 4 positions, in blocks
        rows, cu = ct.halo(x, [0, 4, 8], 1, split='block', group=group)
        assert rows.flatten().tolist() == ([0, 0, 1, 0, 4, 5], [1, 2, 3, 5, 6, 7])[group.rank] and cu.tolist() == [0, 3, 6]
        whole = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(world.rank % 2))
        chunks = whole.chunk(4, 1)
        mine = torch.cat([chunks[group.rank], chunks[3 - group.rank]], 1)
        assert torch.equal(compat.cp_load_balanced_to_contiguous(mine, cp_group=group), whole.chunk(2, 1)[group.rank])
    if world.rank == 3:
        ct.relayout(x, [0, 7], 'block', 'zigzag', group=group)
    ct.relayout(x, [0, 8], 'block', 'zigzag', group=group)


def test_a_split_communicator_counts_its_ranks_from_zero():
    with pytest.raises(ValueError, match='sequence 0 has 7 positions, expected'):
        cb.run_threads(4, of_a_split)


def dense(rank):
    whole = torch.arange(3 * 16 * 4 * 2, dtype=torch.float32).view(3, 16, 4, 2)

    def mine(cut):
        rows = rows_of([16], cut, 4, rank)
        return whole[:, rows] if cut != 'heads' else whole[:, :, rank:rank + 1]
    for src, dst in (('zigzag', 'block'), ('block', 'zigzag'), ('zigzag', 'heads'), ('heads', 'zigzag'), ('block', 'whole')):
        x = mine(src).clone().requires_grad_()
        y = ct.relayout(x, None, src, dst, group=dist.group.WORLD, dim=1)
        assert torch.equal(y, mine(dst)), (src, dst)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 4 if dst == 'whole' else 1)), (src, dst)
        first = mine(src).transpose(0, 1)  # [rows, samples, ..]: not contiguous
        if 'heads' not in (src, dst):
            assert torch.equal(ct.relayout(first, None, src, dst, group=dist.group.WORLD), mine(dst).transpose(0, 1))
    none = whole[:0, :4]
    assert ct.relayout(none, None, 'zigzag', 'whole', group=dist.group.WORLD, dim=1).shape == (0, 16, 4, 2)
    one = whole[:1, rows_of([8, 8], 'zigzag', 4, rank)]  # packed, [1, rows, ..]
    assert torch.equal(ct.relayout(one, [0, 8, 16], 'zigzag', 'block', group=dist.group.WORLD, dim=1),
                       whole[:1, rows_of([8, 8], 'block', 4, rank)])


def test_dense_tensors_are_samples_of_one_length(world):
    world.run(dense)


def written_again(rank):
    """A tensor of lengths is read again if it was written; of the last eight tensors, any comes again."""
    cu = torch.tensor([0, 16, 24])
    whole = torch.arange(24.).view(-1, 1)
    for lengths in ([16, 8], [8, 16]):
        cu.copy_(torch.tensor(cu_of(lengths)))
        y = ct.relayout(part(whole, lengths, 'zigzag', 4, rank), cu, 'zigzag', 'block', group=dist.group.WORLD)
        assert torch.equal(y, part(whole, lengths, 'block', 4, rank)), lengths
    tables = [torch.tensor([0, 8 * i, 24]) for i in range(3)] * 4
    for t in tables:
        lengths = t.diff().tolist()
        y = ct.relayout(part(whole, lengths, 'zigzag', 4, rank), t, 'zigzag', 'block', group=dist.group.WORLD)
        assert torch.equal(y, part(whole, lengths, 'block', 4, rank)), lengths


def test_lengths_that_are_written_again_are_read_again(world):
    world.run(written_again)


# ---- packings ----

def dealt(rank):
    """Sequences on context ranks of their own, then pieces from a table."""
    lengths, cp, first = [8, 6, 0, 5], [4, 1, 2, 1], [0, 3, 1, 1]
    src = cb.Packing(seq_len=lengths, split='zigzag', cp=cp, first=first)
    pieces = [[(3, 2), (0, 0), (5, 1)], [(6, 2)], [], [(1, 0), (4, 3)]]
    dst = cb.Packing(cu_of(lengths), pieces=pieces)
    carry = ct.PackedBridge('cp=4', 'cp=4', group=dist.group.WORLD)
    whole = torch.arange(19., dtype=torch.float64).view(-1, 1) + torch.tensor([0., 100.])

    def mine(of):
        at, start = [], cu_of(lengths)
        for q, length in enumerate(lengths):
            if of is src:
                at += [start[q] + p for p in range(length) if owner('zigzag', length, cp[q], p, first[q]) == rank]
            else:
                has = [rank_of for n, rank_of in pieces[q] for _ in range(n)]
                at += [start[q] + p for p in range(length) if has[p] == rank]
        return at
    for p in (src, dst):
        assert p.rows(rank) == len(mine(p))
        assert [cu_of(lengths)[q] + at for q, at in zip(p.sequence_ids(rank), p.positions(rank))] == mine(p)
        ids, cu = p.sequence_ids(rank), p.cu_seqlens(rank)
        assert cu[0] == 0 and cu[-1] == len(ids) and len(cu) - 1 == len(set(ids))
        assert all(len(set(ids[a:b])) == 1 for a, b in zip(cu, cu[1:]))
        assert pickle.loads(pickle.dumps(p)) == p and hash(p) == hash(pickle.loads(pickle.dumps(p)))
    x = whole[mine(src)].requires_grad_()
    y = carry(x, src=src, dst=dst)
    assert torch.equal(y, whole[mine(dst)])
    y.backward(y.detach() * 3)
    assert torch.equal(x.grad, x.detach() * 3)
    ticket = carry.start(x, src=src, dst=dst)
    assert torch.equal(ticket.finish(), y)
    two = carry((x.detach(), torch.tensor(mine(src)).view(-1, 1)), src=src, dst=dst)  # of any dtype, in one message
    assert torch.equal(two[0], y) and two[1].flatten().tolist() == mine(dst)
    carry.destroy()


def test_a_call_like_the_one_before_is_prepared_once(monkeypatch):
    ragged, made = importlib.import_module('colobridge.torch.ragged'), []

    class Counted(ragged._Call):
        def __init__(self, *of):
            made.append(of)
            super().__init__(*of)
    monkeypatch.setattr(ragged, '_Call', Counted)
    comm = cb.Comm.self()
    x, cu = torch.arange(32.0).view(16, 2).requires_grad_(), torch.tensor([0, 4, 16])
    for tables, calls in ((cu, 1), (cu, 1), ([0, 4, 16], 1), ([0, 8, 16], 2), (cu, 2)):
        y = ct.relayout(x, tables, 'zigzag', 'block', group=comm)
        y.backward(x.detach())
        assert torch.equal(y, x) and torch.equal(x.grad, x)
        x.grad = None
        assert len(made) == calls
    ct.relayout(x[:, :1], cu, 'zigzag', 'block', group=comm)
    assert len(made) == 3


def in_turns(rank):
    """More tables than are kept. A rank whose strides change prepares each call, the others do not, and all keep the same
    tables."""
    carry, size = ct.PackedBridge('cp=4', 'cp=4', group=dist.group.WORLD), 4
    sides = [(cb.Packing([0, 8 * n]), cb.Packing([0, 8 * n], split='block')) for n in range(1, 11)]
    rng = random.Random(SEED)
    for step, k in enumerate([*range(8), 0, 8, 0, 1, *(rng.randrange(len(sides)) for _ in range(40))]):
        lengths, columns = [8 * (k + 1)], 2 + step if rank == 0 else 1
        whole = torch.arange(lengths[0] * 1.0).view(-1, 1) + 100 * step
        x = torch.cat([part(whole, lengths, 'zigzag', size, rank)] * columns, 1)[:, :1].requires_grad_()
        y = carry(x, *sides[k])
        assert torch.equal(y, part(whole, lengths, 'block', size, rank)), (step, k)
        y.backward(2 * y.detach())
        assert torch.equal(x.grad, 2 * x.detach()), (step, k)


def test_ranks_keep_the_same_tables_if_one_prepares_each_call(world):
    world.run(in_turns)


def test_each_sequence_may_have_ranks_of_its_own(world):
    world.run(dealt)


def replicas(rank):
    """Sequences move between replicas."""
    carry = ct.PackedBridge('cp=2,dp=2', 'dp=4', group=dist.group.WORLD)
    src, dst = cb.Packing([0, 4, 8], dp=[1, 0]), cb.Packing([0, 4, 8], dp=[3, 0], split='whole')
    whole = torch.arange(8.).view(-1, 1)
    at = [] if rank // 2 not in (0, 1) else [4 * (1 - rank // 2) + p for p in ((0, 3) if rank % 2 == 0 else (1, 2))]
    y = carry(whole[at], src=src, dst=dst)
    assert y.flatten().tolist() == {0: [4., 5., 6., 7.], 3: [0., 1., 2., 3.]}.get(rank, [])
    carry.destroy()


def test_sequences_move_between_replicas(world):
    world.run(replicas)


# ---- segments ----

def images(rank):
    """Images among text, of sequences on context ranks of their own."""
    lengths = [8, 4, 6]
    carry = ct.RaggedBridge('dp=4', 'cp=4', group=dist.group.WORLD, output='sharded')
    made, at = [0, 1, 2, 3], [(0, 1), (0, 5), (1, 0), (2, 2)]  # by image: its rank; sequence and first position
    for cp, first in (([4, 1, 1], [0, 2, 3]), ([1, 2, 3], [3, 0, 1])):
        packing = cb.Packing(seq_len=lengths, split='zigzag', cp=cp, first=first)
        segments = cb.Segments([3] * 4, src=made, seq=[q for q, _ in at], pos=[p for _, p in at], packing=packing)
        text = torch.full((packing.rows(rank, 'cp=4'), 2), -1., requires_grad=True)
        x = (torch.arange(6.).view(3, 2) + 10 * rank).requires_grad_()
        y = carry(x, segments, into=text * 1)
        want = torch.full_like(text, -1)
        for i, (q, p) in enumerate(zip(packing.sequence_ids(rank, 'cp=4'), packing.positions(rank, 'cp=4'))):
            for e, (of, start) in enumerate(at):
                if of == q and start <= p < start + 3:
                    want[i] = torch.arange(6.).view(3, 2)[p - start] + 10 * e
        assert torch.equal(y, want)
        y.pow(2).sum().backward()
        assert torch.equal(x.grad, 2 * x.detach()) and torch.equal(text.grad, torch.where(want == -1, -2., 0.))
        assert pickle.loads(pickle.dumps(segments)) == segments
    with pytest.raises(ValueError, match='packing is given, and seq_len'):
        cb.Segments([3], src=[0], seq=[0], pos=[0], seq_len=[4], packing=packing)
    carry.destroy()


def test_segments_of_a_packing_arrive_on_its_ranks(world):
    world.run(images)


# ---- autograd ----

LENGTHS = [16, 8]


def swap(t, src='zigzag', dst='block'):
    return ct.relayout(t, cu_of(LENGTHS), src, dst, group=dist.group.WORLD)


def autograd(rank):
    whole = torch.randn(24, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mine = part(whole, LENGTHS, 'zigzag', 4, rank)

    def layer(t):
        return swap(swap(t.sin()).cos(), 'block', 'zigzag')
    x = mine.clone().requires_grad_()
    layer(x).pow(2).sum().backward()
    want = mine.clone().requires_grad_()
    want.sin().cos().pow(2).sum().backward()
    assert torch.equal(x.grad, want.grad)
    for again in range(2):  # the same bits twice, and twice through one graph
        z = mine.clone().requires_grad_()
        loss = layer(z).pow(2).sum()
        loss.backward(retain_graph=True)
        assert torch.equal(z.grad, want.grad)
        loss.backward()
        assert torch.equal(z.grad, 2 * want.grad)
    for reentrant in (False, True):
        z = mine.clone().requires_grad_()
        checkpoint(layer, z, use_reentrant=reentrant).pow(2).sum().backward()
        assert torch.equal(z.grad, want.grad), reentrant
    # a gradient that is None: of a tensor that nothing used; and an x without one on this rank
    a, b = mine.clone().requires_grad_(), mine.clone().requires_grad_()
    carry = ct.PackedBridge('cp=4', 'cp=4', group=dist.group.WORLD)
    p = cb.Packing(cu_of(LENGTHS))
    ya, _ = carry((a, b), src=p, dst=p.with_split('block'))
    ya.sum().backward()
    assert torch.equal(a.grad, torch.ones_like(a)) and (b.grad is None or not b.grad.any())
    constant = mine.clone().requires_grad_(rank != 1)
    swap(constant).sum().backward()
    assert (constant.grad is None) == (rank == 1)
    # two batches outstanding, the first backward first
    q = cb.Packing([0, 8], split='block')
    c = torch.full((2, 3), float(rank), dtype=torch.float64, requires_grad=True)
    d = mine.clone().requires_grad_()
    first, second = carry(d, src=p, dst=p.with_split('block')), carry(c, src=q, dst=q.with_split('zigzag'))
    (2 * first).sum().backward()
    (3 * second).sum().backward()
    assert torch.equal(d.grad, torch.full_like(d, 2)) and torch.equal(c.grad, torch.full_like(c, 3))
    carry.destroy()


def test_gradients_return_by_the_same_path(world):
    world.run(autograd)


class Gathered(torch.autograd.Function):
    """All ranks' rows, for a loss that all ranks have alike: each brings its own part of the gradient."""

    @staticmethod
    def forward(ctx, y):
        out = [torch.empty_like(y) for _ in range(4)]
        dist.all_gather(out, y.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, d):
        n = len(d) // 4
        return d[n * dist.get_rank():n * (dist.get_rank() + 1)]


class Spread(torch.autograd.Function):
    """A rank's rows of what all ranks have; the gradients of all ranks are brought together."""

    @staticmethod
    def forward(ctx, whole, index):
        ctx.index, ctx.shape = index, whole.shape
        return whole[index]

    @staticmethod
    def backward(ctx, d):
        whole = d.new_zeros(ctx.shape)
        whole[ctx.index] = d
        dist.all_reduce(whole)
        return whole, None


def checked(rank, dst):
    lengths = [8, 0, 8]
    index = torch.tensor(rows_of(lengths, 'zigzag', 4, rank))
    whole = torch.randn(16, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)

    def fn(t):
        y = ct.relayout(Spread.apply(t, index), cu_of(lengths), 'zigzag', dst, group=dist.group.WORLD)
        weight = torch.arange(y.numel(), dtype=torch.float64).view(y.shape).sin() * (1 + rank)
        return Gathered.apply((y.exp() * weight).flatten(1))
    assert torch.autograd.gradcheck(fn, (whole,))


@pytest.mark.parametrize('dst', ['block', 'whole', 'heads'])
def test_gradients_are_those_of_finite_differences(world, dst):
    world.run(checked, dst)


# ---- the example, the page ----

def hybrid(rank):
    return [example().compared(dist.group.WORLD, lengths, 8, 4) for lengths in ([16, 8, 32], [8], [8, 0, 24])]


def example():
    sys.path.insert(0, str(ROOT / 'examples/torch_hybrid'))
    import hybrid as made
    return made


def test_a_hybrid_layer_has_the_gradients_of_one_rank(world):
    # fp64, and sums of at most a few hundred terms in another order: some 1e-14 of the largest
    assert all(worst < 1e-12 for of_rank in world.run(hybrid) for worst in of_rank)


def page(rank):
    """Its first lines, with a scan that needs rows in order."""
    code = re.search(r'```python\n(.*?)```', (ROOT / 'docs/guides/hybrid.md').read_text(), re.S).group(1)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cp, lengths = rank // 2, [8, 4]
    whole = torch.arange(12., dtype=torch.float64).view(12, 1)
    hidden = part(whole, lengths, 'zigzag', 2, cp).requires_grad_()
    before = part(torch.arange(12.).view(12, 1).double(), lengths, 'contiguous', 2, cp)

    def scan(rows):
        assert torch.equal(rows, before)
        return rows * 2
    names = {'hidden': hidden, 'cu_seqlens': torch.tensor(cu_of(lengths)), 'cp_group': groups[rank % 2], 'scan': scan}
    exec(compile(code, 'hybrid.md', 'exec'), names)
    assert torch.equal(names['hidden'], 3 * hidden)
    names['hidden'].sum().backward()
    assert torch.equal(hidden.grad, torch.full_like(hidden, 3))


def test_the_lines_of_the_page_run_as_they_stand(world):
    world.run(page)


# ---- bad input ----

def bad_input(rank):
    good = cu_of(LENGTHS)
    x = torch.zeros(6, 4)
    for words, kind, call in (
            ("sequence 1 has 6 positions, expected a multiple of 2 \\* cp=4 = 8", ValueError,
             lambda: ct.relayout(x, [0, 16, 22], 'zigzag', 'block', group=dist.group.WORLD)),
            ("src is 'thd', expected one of zigzag, block, contiguous, whole, heads", ValueError,
             lambda: ct.relayout(x, good, 'thd', 'block', group=dist.group.WORLD)),
            ("6 heads, expected a multiple of the 4 ranks", ValueError,
             lambda: ct.relayout(torch.zeros(6, 6, 2), good, 'zigzag', 'heads', group=dist.group.WORLD)),
            ("expected an axis of heads behind axis 0", ValueError,
             lambda: ct.relayout(torch.zeros(6), good, 'zigzag', 'heads', group=dist.group.WORLD)),
            ("expected axes of size 1 before axis 1", ValueError,
             lambda: ct.relayout(torch.zeros(2, 6, 4), good, 'zigzag', 'block', group=dist.group.WORLD, dim=1)),
            ("the sequences of replica 0 have 22 positions, expected a multiple of cp=4", ValueError,
             lambda: ct.relayout(x, [0, 16, 22], 'whole', 'contiguous', group=dist.group.WORLD)),
            ("2 samples and the cut 'contiguous', which cuts one axis", ValueError,
             lambda: ct.relayout(torch.zeros(2, 6), None, 'contiguous', 'block', group=dist.group.WORLD, dim=1)),
            ("cu_seqlens begins with 1, expected 0", ValueError,
             lambda: ct.relayout(x, [1, 9], 'zigzag', 'block', group=dist.group.WORLD)),
            ("has 6 rows, expected 4", ValueError,
             lambda: ct.relayout(x, [0, 16], 'zigzag', 'block', group=dist.group.WORLD))):
        meet()
        with pytest.raises(kind, match=words):
            call()
        meet()
        assert swap(part(torch.zeros(24, 1), LENGTHS, 'zigzag', 4, rank)).shape == (6, 1)
    carry = ct.PackedBridge('cp=4', 'cp=4', group=dist.group.WORLD)
    p = cb.Packing(good)
    meet()
    for words, call in (("src is None, expected src= and dst=, colobridge.Packing", lambda: carry(x)),
                        ("dst is a NoneType, expected colobridge.Packing", lambda: carry(x, src=p))):
        with pytest.raises(ValueError, match=words):
            call()
        meet()
    carry.destroy()
    for words, options in (("packed with buffers 1; expected None or 0", dict(buffers=1)),
                           ("ranks \\[4, 5, 6, 7\\] of the src grid", {})):
        with pytest.raises(ValueError, match=words):
            ct.PackedBridge('cp=8' if not options else 'cp=4', 'cp=4', group=dist.group.WORLD, **options)
    with pytest.raises(ValueError, match="pieces are given, and split 'zigzag', cp 2 and first None; expected one way"):
        cb.Packing([0, 4], cp=2, pieces=[[(4, 0)]])
    with pytest.raises(ValueError, match='pieces has 2 entries, expected 1, one for each sequence'):
        cb.Packing([0, 4], pieces=[[(4, 0)], []])
    with pytest.raises(ValueError, match=r'sequence 1 has the piece \(4,\), expected \(positions, context rank\)'):
        cb.Packing([0, 4, 8], pieces=[[(4, 0)], [(4,)]])
    with pytest.raises(ValueError, match='pass layout= to say how many these are'):
        cb.Packing([0, 4]).rows(0)
    with pytest.raises(ValueError, match='cp has 2 entries, expected 1'):
        cb.Packing([0, 4], cp=[1, 2])


def test_bad_input_is_refused_on_all_ranks(world):
    world.run(bad_input)


def other_lengths(rank):
    meet()
    with pytest.raises(cb.MismatchError, match='src seq_len'):  # and the communicator lives on
        ct.relayout(torch.zeros(4, 1), [0, 16] if rank else [0, 8, 16], 'zigzag', 'block', group=dist.group.WORLD)
    assert swap(part(torch.zeros(24, 1), LENGTHS, 'zigzag', 4, rank)).shape == (6, 1)


def test_ranks_with_other_lengths_hear_of_the_table(world):
    world.run(other_lengths)
