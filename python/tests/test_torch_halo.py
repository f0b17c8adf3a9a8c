# SPDX-License-Identifier: Apache-2.0
"""Rows in front of each piece, against a loop over positions, and a convolution over pieces against one over sequences."""
import os
import pickle
import random

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from halo_case import halos, held, pieces_of, row_of  # noqa: E402
from world import refused  # noqa: E402

SEED = int(os.environ.get('T_SEED', '1'))


@pytest.mark.parametrize('cp', [1, 2, 3, 4, 8])
def test_halos_on_threads_are_those_by_hand(cp):
    cb.run_threads(cp, lambda world: halos(world.rank, cp, 1, world, None, range(SEED, SEED + 40)))


def over_both_groups(rank):
    cp, tp = ([dist.new_group(ranks) for ranks in of] for of in (((0, 2), (1, 3)), ((0, 1), (2, 3))))
    halos(rank, 2, 2, cp[rank % 2], tp[rank // 2], range(SEED + 100, SEED + 130))
    alone = [dist.new_group([r]) for r in range(4)]
    halos(rank, 1, 4, alone[rank], dist.group.WORLD, range(SEED + 200, SEED + 210))
    halos(rank, 4, 1, dist.group.WORLD, None, range(SEED + 300, SEED + 310))


def test_halos_on_processes_go_over_context_and_tensor_ranks(world):
    world.run(over_both_groups)


def cut_of(packing, lengths, cp, tp, rank, layout):
    """(sequence, position) of each row of a rank without halos, as rows() has them."""
    return list(zip(packing.sequence_ids(rank, layout), packing.positions(rank, layout)))


def convolution(rank, cp, tp, group, seeds):
    """A causal convolution over pieces, in fp64, of a width up to twice the longest piece: values and gradients of one over
    whole sequences, to the last digits of sums of as many terms, and for the weight of as many as there are rows."""
    layout = cb.Layout.dst('tp=%d,cp=%d' % (tp, cp))
    layout = layout.split('rows', 'tp') if tp > 1 else layout
    carry = ct.PackedBridge(layout, layout, group=group)
    for seed in seeds:
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        lengths = [2 * cp * tp * rng.randrange(0, 3) for _ in range(rng.randrange(1, 4))]
        src = cb.Packing(seq_len=lengths, split=rng.choice(('contiguous', 'zigzag', 'block')))
        owners = [[c for c in range(cp) for _ in range(n // cp)] for n in lengths]
        for of in owners:
            rng.shuffle(of)
        dst = rng.choice((src, src.with_split('contiguous'), src.with_split('zigzag'),
                          cb.Packing(seq_len=lengths, pieces=[[(1, c) for c in of] for of in owners])))
        cuts = [cut_of(dst, lengths, cp, tp, w, layout) for w in range(cp * tp)]
        before = rng.randrange(0, 1 + 2 * max((len(piece) for cut in cuts for piece in pieces_of(cut)), default=1))
        n, width = sum(lengths), before + 1
        whole, w, up = (torch.randn(of, 5, generator=g, dtype=torch.float64, requires_grad=True) for of in (n, width, n))
        parts = [torch.cat([whole.new_zeros(before, 5), part]) for part in whole.split(lengths)]
        y = torch.cat([sum(w[k] * part[k:len(part) - before + k] for k in range(width)) for part in parts])
        (y * up.detach()).sum().backward()
        at_src, at_dst = ([row_of(lengths, *at) for at in cut_of(of, lengths, cp, tp, rank, layout)] for of in (src, dst))
        x, v = whole.detach()[at_src].requires_grad_(), w.detach().clone().requires_grad_()
        halo = dst.with_halo(before)
        rows, cu = carry(x, src, halo), halo.cu_pieces(rank, layout)
        out = torch.cat([rows[:0], *(sum(v[k] * rows[a + k:b - before + k] for k in range(width)) for a, b in zip(cu, cu[1:]))])
        (out * up.detach()[at_dst]).sum().backward()
        rounding = dict(rtol=1e-15 * (8 + width), atol=1e-15 * 8 * (8 + width))  # terms are below 8 or so
        torch.testing.assert_close(out, y.detach()[at_dst], **rounding)
        torch.testing.assert_close(x.grad, whole.grad[at_src], **rounding)
        yield torch.zeros_like(w) if v.grad is None else v.grad, w.grad, n


@pytest.mark.parametrize('cp, tp', [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3), (3, 2)])
def test_a_convolution_over_pieces_is_that_over_sequences(cp, tp):
    found = cb.run_threads(cp * tp, lambda world: list(convolution(world.rank, cp, tp, world, range(SEED, SEED + 20))))
    for of_seed in zip(*found):
        bound = 1e-15 * (8 + of_seed[0][2])
        torch.testing.assert_close(sum(mine for mine, *_ in of_seed), of_seed[0][1], rtol=bound, atol=64 * bound)


def test_sums_of_16_bits_are_rounded_once():
    """Rows of one position each, so that a row is in front of many pieces; the owner's term comes first, and in bf16 each of
    the others would be lost."""
    def one_rank(world):
        x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        y, _ = ct.halo(x, [0, 4], 3, group=world)
        y.backward(torch.tensor([[1.], [1.], [1.], [256.]], dtype=torch.bfloat16))
        return x.grad.item()
    assert cb.run_threads(4, one_rank)[0] == 260.0  # 256 + 1 + 1 + 1 = 259, of which bf16 makes 260


def test_the_table_of_pieces_is_one_tensor_that_any_mode_may_use():
    """Kernels keep what they make of it by its identity, and for backward."""
    def one_rank(world):
        x, lengths = torch.arange(4.0)[:, None], [0, 3, 8]
        with torch.inference_mode():
            _, first = ct.halo(x, lengths, 1, group=world)
        y, cu = ct.halo(x.clone().requires_grad_(), lengths, 1, group=world)
        y.index_select(0, cu[:-1]).sum().backward()
        assert cu is first and not cu.is_inference()
        cu += 1  # the caller's own from here on
        return first.tolist(), ct.halo(x, lengths, 1, group=world)[1].tolist()
    for first, again in cb.run_threads(2, one_rank):
        assert again == [n - 1 for n in first]


# ---- packings with halos ----

def moves(rank, cp, tp, group, seeds):
    """From any cut to any other with halos of up to twice the longest piece, in one exchange; tables, too, and padding. Bits,
    and gradients in small integers."""
    layout = cb.Layout.dst('tp=%d,cp=%d' % (tp, cp))
    layout = layout.split('rows', 'tp') if tp > 1 else layout
    carry = ct.PackedBridge(layout, layout, group=group)
    for seed in seeds:
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        lengths = [2 * cp * tp * rng.randrange(0, 3) for _ in range(rng.randrange(1, 5))]
        src = cb.Packing(seq_len=lengths, split=rng.choice(('contiguous', 'zigzag', 'block')))
        if rng.random() < 0.4:  # pieces of one row at least, and each context rank has as many rows as tp divides
            owners = [[c for c in range(cp) for _ in range(n // cp)] for n in lengths]
            for of in owners:
                rng.shuffle(of)
            dst = cb.Packing(seq_len=lengths, pieces=[[(1, c) for c in of] for of in owners])
        else:
            split = rng.choice(('contiguous', 'zigzag', 'block'))
            dst = src.with_split(split, pad_to=rng.choice((None, 4 * cp * tp)))
        cuts = [cut_of(dst, lengths, cp, tp, w, layout) for w in range(cp * tp)]
        before = rng.randrange(0, 1 + 2 * max((len(of) for cut in cuts for of in pieces_of(cut)), default=1))
        halo = dst.with_halo(before)
        whole = torch.randint(-9, 9, (sum(lengths), 2), generator=g).to(rng.choice((torch.float32, torch.bfloat16)))
        d_whole = torch.zeros(whole.shape)

        def row(at):
            return row_of(lengths, *at)
        ys, d_ys = [], []
        for cut in cuts:
            y, d_y, cu = [], [], [0]
            for piece in pieces_of(cut):
                q, first = piece[0]
                for p in range(first - before, first + len(piece)):
                    real = 0 <= p < lengths[q] and first < lengths[q]
                    y.append(whole[row((q, p))] if real else torch.zeros_like(whole[0]))
                    d_y.append(torch.randint(-3, 4, (2,), generator=g).to(whole.dtype))
                    if real:
                        d_whole[row((q, p))] += d_y[-1].float()
                cu.append(len(y))
            ys.append((torch.stack(y) if y else whole[:0], cu))
            d_ys.append(torch.stack(d_y) if d_y else whole[:0])
        assert halo.cu_pieces(rank, layout) == ys[rank][1] and halo.rows(rank, layout) == len(ys[rank][0]), (seed, before)
        mine = [row(at) for at in cut_of(src, lengths, cp, tp, rank, layout)]
        x = whole[mine].clone().requires_grad_()
        ticket = carry.start(x, src, halo) if seed % 2 else None
        y = ticket.finish() if ticket else carry(x, src, halo)
        assert torch.equal(y, ys[rank][0]), (seed, src, halo)
        y.backward(d_ys[rank])
        assert torch.equal(x.grad.float(), d_whole[mine]), (seed, src, halo, 'gradient')


@pytest.mark.parametrize('cp', [1, 2, 3, 4])
def test_moves_and_halos_are_one_exchange(cp):
    cb.run_threads(cp, lambda world: moves(world.rank, cp, 1, world, range(SEED, SEED + 30)))
    cb.run_threads(2 * cp, lambda world: moves(world.rank, cp, 2, world, range(SEED + 50, SEED + 60)))
    p = cb.Packing([0, 8, 12], cp=2, split='zigzag')
    halo = p.with_halo(3)
    assert halo == cb.Packing([0, 8, 12], cp=2, halo=3) != p and halo.with_halo(0) == p and pickle.loads(pickle.dumps(halo)) == halo
    assert 'halo=3' in repr(halo) and hash(halo) != hash(p) and halo.with_split('block') == p.with_split('block')
    assert not halo.continues(0) and halo.continues(1) and p.cu_pieces(1) == [0, 4, 6]  # positions 2 3 4 5; 1 2
    for before in -1, 1.5, '3':
        with pytest.raises(ValueError, match='halo is %r, expected an integer >= 0' % (before,)):
            p.with_halo(before)
    with pytest.raises(ValueError, match='halo_before is 1, expected 0 with split WHOLE'):
        p.with_split('whole').with_halo(1).rows(0, 'cp=2')


def padded(rank):
    """Lengths of any kind: the packings of each side, their padding, and 0 in front of padding alone."""
    for seed in range(20):
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        lengths, before = [rng.randrange(0, 20) for _ in range(rng.randrange(1, 5))], rng.randrange(0, 9)
        src, split = (rng.choice(('contiguous', 'zigzag', 'block')) for _ in range(2))
        cu = [sum(lengths[:q]) for q in range(len(lengths) + 1)]

        def room(cut):
            return cb.Packing(cu, split=cut, pad_to=4 if cut != 'zigzag' else 8)
        whole = torch.randn(sum(lengths), 2, generator=g)
        at = cut_of(room(src), lengths, 4, 1, rank, 'cp=4')
        x = torch.stack([whole[row_of(lengths, q, p)] if p < lengths[q] else torch.full((2,), float(seed)) for q, p in at]
                        ) if at else whole[:0]
        rows, edges = ct.halo(x, cu, before, split=split, src=src, pad=True, group=dist.group.WORLD)
        want = []
        for piece in pieces_of(cut_of(room(split), lengths, 4, 1, rank, 'cp=4')):
            q, first = piece[0]
            want += [whole[row_of(lengths, q, p)] if 0 <= p < lengths[q] and first < lengths[q] else torch.zeros(2)
                     for p in range(first - before, first + len(piece))]
        assert torch.equal(rows, torch.stack(want) if want else whole[:0]) and edges[-1] == len(want), (seed, src, split, before)


def test_sides_of_a_halo_are_padded_each_in_its_way(world):
    world.run(padded)


def compiled(rank):
    """A graph with a halo in it has the bits of an eager one, and its gradients."""
    group = dist.group.WORLD

    def step(x, w, cu):
        rows, _ = ct.halo(x * 2, cu, 3, split='zigzag', group=group)
        return (rows * w).sum(0)
    torch._dynamo.reset()
    graph, cu = torch.compile(step, backend='aot_eager'), torch.tensor([0, 32, 64])
    for seed in range(3):
        g = torch.Generator().manual_seed(seed + rank)
        given = [torch.randn(16, 3, generator=g), torch.randn(3, generator=g)]
        eager, lazy = ([t.clone().requires_grad_() for t in given] for _ in range(2))
        want, got = step(*eager, cu), graph(*lazy, cu)
        (want.sum() * 3).backward()
        (got.sum() * 3).backward()
        assert torch.equal(want, got) and all(torch.equal(a.grad, b.grad) for a, b in zip(eager, lazy))


@pytest.mark.skipif(not hasattr(torch, 'compile'), reason='torch %s: no torch.compile()' % torch.__version__)
def test_a_halo_in_a_compiled_model_has_the_bits_of_an_eager_one(world):
    world.run(compiled, timeout=300)


def outside(rank):
    """Ranks that take no part neither call nor wait."""
    group = dist.new_group([1, 3])
    if rank % 2:
        x = torch.full((4, 1), float(rank), requires_grad=True)
        for _ in range(2):
            rows, cu = ct.halo(x, [0, 8], 2, group=group)
            rows.sum().backward()
        return rows.flatten().tolist(), cu.tolist(), x.grad.flatten().tolist()


def test_ranks_outside_of_a_halo_need_not_call(world):
    assert world.run(outside) == [None, ([0, 0, 1, 1, 1, 1], [0, 6], [2, 2, 4, 4]), None, ([1, 1, 3, 3, 3, 3], [0, 6], [2, 2, 2, 2])]


# ---- what is refused ----

def wrong(rank):
    x, world = torch.zeros(4, 2), dist.group.WORLD
    return [refused(lambda: ct.halo(x, [0, 16], 3, split='whole', group=world)),
            refused(lambda: ct.halo(x, [0, 16], -1, group=world)),
            refused(lambda: ct.halo(x, [0, 15], 1, group=world)),
            refused(lambda: ct.halo(x, [0, 6, 16], 1, split='zigzag', group=world)),
            refused(lambda: ct.halo(x[:3], [0, 16], 1, group=world)),
            refused(lambda: ct.halo(x.long(), [0, 16], 1, group=world)),
            refused(lambda: ct.halo(x, [0, 16], 1, group=world, tp_group=world)),
            refused(lambda: ct.halo(x, [0, 16], 1, group=world, src='heads')),
            ct.halo(x, [0, 16], 1, group=world)[0].shape]


def test_bad_input_is_refused_on_all_ranks(world):
    for said in world.run(wrong):
        for words, found in zip(("split is 'whole', expected one of zigzag, block, contiguous", 'before is -1', 'expected a multiple of cp=4',
                                 'sequence 0 has 6 positions', 'x has 3 rows, expected the 4', 'expected a float tensor of rows',
                                 'expected two dims of one grid', "src is 'heads', expected one of"), said):
            assert words in found and found.startswith('ArgumentError'), (words, found)
        assert said[-1] == (5, 2)


def on_one_rank_only(rank):
    """A rank that waits for no row of it may hear of it in its next call."""
    def call():
        ct.halo(torch.zeros(4 + (rank == 1), 2), [0, 16], 1, group=dist.group.WORLD)
    said = refused(call)
    return refused(lambda: None if said else call()) or said


def test_what_one_rank_did_wrong_reaches_all(world):
    for said in world.run(on_one_rank_only):
        assert 'x has 5 rows, expected the 4' in said, said
