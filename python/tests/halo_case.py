# SPDX-License-Identifier: Apache-2.0
"""Rows in front of each piece by a loop over positions, and random cases of halo() against it, on any device. Needs no
pytest."""
import random

import torch

import colobridge.torch as ct


def owner(split, lengths, cp, q, p):
    """The context rank of a position."""
    if split == 'contiguous':
        return (sum(lengths[:q]) + p) * cp // sum(lengths)
    pieces = 2 * cp if split == 'zigzag' and cp > 1 else cp
    k = p * pieces // lengths[q]
    return min(k, 2 * cp - 1 - k) if pieces == 2 * cp and cp > 1 else k


def held(split, lengths, cp, tp, rank):
    """(sequence, position) of each row of a rank, in order."""
    mine = [(q, p) for q, n in enumerate(lengths) for p in range(n) if owner(split, lengths, cp, q, p) == rank // tp]
    each = len(mine) // tp
    return mine[rank % tp * each:(rank % tp + 1) * each]


def pieces_of(rows):
    """Maximal runs of one sequence."""
    out = []
    for q, p in rows:
        if out and out[-1][-1] == (q, p - 1):
            out[-1].append((q, p))
        else:
            out.append([(q, p)])
    return out


def row_of(lengths, q, p):
    return sum(lengths[:q]) + p


def wanted(whole, lengths, pieces, before):
    """What halo() returns of these pieces, row by row."""
    out, cu = [], [0]
    for piece in pieces:
        q, p = piece[0]
        out += [whole[row_of(lengths, q, p - i)] if p - i >= 0 else torch.zeros_like(whole[0]) for i in range(before, 0, -1)]
        out += [whole[row_of(lengths, *at)] for at in piece]
        cu.append(len(out))
    return torch.stack(out) if out else whole[:0], cu


def lengths_for(rng, split, cp, tp):
    if split == 'contiguous':
        lengths = [rng.randrange(0, 9) for _ in range(rng.randrange(0, 5))]
        lengths.append(-sum(lengths) % (cp * tp))
        return lengths
    unit = (2 * cp if split == 'zigzag' and cp > 1 else cp) * tp
    return [unit * rng.randrange(0, 3) for _ in range(rng.randrange(0, 5))]


def halos(rank, cp, tp, group, tp_group, seeds, device='cpu'):
    """Bits of the result; the adjoint in small integers, summed in bf16 as well: each sum is exact."""
    for seed in seeds:
        rng = random.Random(seed)
        split = rng.choice(('contiguous', 'zigzag', 'block'))
        src = rng.choice((None, 'contiguous', 'zigzag', 'block'))
        lengths = lengths_for(rng, split if src is None else 'zigzag', cp, tp)
        mine = [row_of(lengths, *at) for at in held(src or split, lengths, cp, tp, rank)]
        g, dtype = torch.Generator().manual_seed(seed), rng.choice((torch.float32, torch.bfloat16, torch.float64))
        shape, before = rng.choice(((3,), (2, 2), ())), rng.randrange(0, 12)
        whole = torch.randn((sum(lengths), *shape), generator=g).to(dtype)
        pieces = [pieces_of(held(split, lengths, cp, tp, w)) for w in range(cp * tp)]
        x = whole[mine].to(device, copy=True).requires_grad_()
        cu = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
        want, want_cu = zip(*(wanted(whole, lengths, of, before) for of in pieces))
        for _ in range(2):
            y, at = ct.halo(x, rng.choice((cu, torch.tensor(cu))), before, split=split, group=group, tp_group=tp_group,
                            **({} if src is None else {'src': src}))
            assert torch.equal(y.cpu(), want[rank]) and at.tolist() == want_cu[rank] and at.dtype == torch.int32, (
                seed, split, lengths, before)
        d_y = [torch.randint(-3, 4, w.shape, generator=g).to(dtype) for w in want]
        y.backward(d_y[rank].to(device))
        expected = torch.zeros(whole.shape)
        for of, d in zip(pieces, d_y):
            at = 0
            for piece in of:
                q, p = piece[0]
                for i in [*range(before, 0, -1), *range(0, -len(piece), -1)]:
                    if p - i >= 0:
                        expected[row_of(lengths, q, p - i)] += d[at].float()
                    at += 1
        assert torch.equal(x.grad.float().cpu(), expected[mine]), (seed, src, split, lengths, before, 'gradient')
