# SPDX-License-Identifier: Apache-2.0
"""Random steps of a vision-language model whose towers lie on all ranks, and the same steps by hand: the whole tower over
all images, index_copy into the whole text. Of the library this uses the tables of a Packing alone."""
import math
import random

import torch
import torch.distributed as dist

import colobridge as cb
from ragged_case import coord

H, LENGTH, BATCH, WORDS = 8, 16, 2, 11
DTYPE = torch.float64


class Step:
    """Text of all replicas, images among it, and which rank's data loader has which image."""

    def __init__(self, seed, spec, size, patch, grids, merge, most=3):
        rng, make = random.Random(seed), torch.Generator().manual_seed(seed)
        self.spec, self.size = spec, size
        self.replicas = coord(spec, 0, 'dp')[1]
        self.text = torch.randint(WORDS, (self.replicas, BATCH, LENGTH), generator=make)
        self.weight = torch.randn(self.replicas, BATCH, LENGTH, H, generator=make, dtype=DTYPE)
        self.images = []  # (replica, sequence, positions, grid, pixels, ranks that have it)
        for d in range(self.replicas):
            members = [r for r in range(size) if coord(spec, r, 'dp')[0] == d]
            how = rng.choice(('all', 'first', 'each'))
            for b in range(BATCH):
                at = 0
                for _ in range(rng.randrange(0, most + 1)):
                    grid = rng.choice(grids)
                    n = math.prod(grid) // merge ** 2
                    at += rng.randrange(0, 3)
                    if at + n > LENGTH:
                        break
                    pixels = torch.randn(math.prod(grid), *patch, generator=make, dtype=DTYPE)
                    have = {'all': members, 'first': members[:1], 'each': [rng.choice(members)]}[how]
                    self.images.append((d, b, list(range(at, at + n)), grid, pixels, have))
                    at += n

    def mine(self, rank):
        return [i for i in self.images if rank in i[5]]

    def given(self, rank, grids=True):
        """What a rank's data loader has, as arguments."""
        mine = self.mine(rank)
        if not mine:
            return {'pixels': None}
        out = {'pixels': torch.cat([i[4] for i in mine]), 'seq': [i[1] for i in mine], 'pos': [i[2][0] for i in mine]}
        return dict(out, grid_thw=torch.tensor([i[3] for i in mine])) if grids else out

    def part(self, rank, whole):
        """[batch, positions of this context rank, ...] of this rank's replica, zigzag."""
        (d, _), (c, cp) = coord(self.spec, rank, 'dp'), coord(self.spec, rank, 'cp')
        chunks = whole[d].chunk(2 * cp, 1)
        return whole[d] if cp == 1 else torch.cat((chunks[c], chunks[2 * cp - 1 - c]), 1)


class Packed(Step):
    """The same text as packed sequences, each cut by itself: over context ranks of its own, or into pieces of any size."""

    def __init__(self, seed, *args):
        super().__init__(seed, *args)
        rng, cp = random.Random(seed), coord(self.spec, 0, 'cp')[1]
        self.split, self.cut = rng.choice(('zigzag', 'block', 'table')), []  # cut: of each replica and sequence
        self.alone = rng.random() < 0.5  # a replica says only how its own sequences are cut
        self.silent = [rng.random() < 0.5 for _ in range(self.replicas)]  # its sequences lie on all, which it does not say
        for q in range(self.replicas * BATCH):
            n = cp if self.silent[q // BATCH] else rng.choice([n for n in (1, 2, 4) if n <= cp])
            first, pieces = rng.randrange(cp - n + 1), []
            while sum(length for length, _ in pieces) < LENGTH:
                pieces.append((rng.randrange(0, LENGTH - sum(length for length, _ in pieces) + 1), rng.randrange(cp)))
            self.cut.append({'cp': n, 'first': first, 'pieces': pieces})

    def owners(self, q):
        """The context rank of each position."""
        n, first, pieces = self.cut[q]['cp'], self.cut[q]['first'], self.cut[q]['pieces']
        if self.split == 'table':
            return [c for length, c in pieces for _ in range(length)]
        each = LENGTH // (2 * n if self.split == 'zigzag' else n)
        return [first + (p // each if p // each < n else 2 * n - 1 - p // each) for p in range(LENGTH)]

    def packing(self, rank):
        d = coord(self.spec, rank, 'dp')[0]
        cut = self.cut[d * BATCH:(d + 1) * BATCH] if self.alone else self.cut
        dp = None if self.alone else [d for d in range(self.replicas) for _ in range(BATCH)]
        names = ('pieces',) if self.split == 'table' else () if self.alone and self.silent[d] else ('cp', 'first')
        return cb.Packing(seq_len=[LENGTH] * len(cut), dp=dp, split=self.split,
                          **{name: [of[name] for of in cut] for name in names})

    def part(self, rank, whole):
        """[rows, ..]"""
        d, c = coord(self.spec, rank, 'dp')[0], coord(self.spec, rank, 'cp')[0]
        return torch.cat([whole[d][b][[p for p, of in enumerate(self.owners(d * BATCH + b)) if of == c]] for b in range(BATCH)])

    def given(self, rank, grids=True):
        return dict(super().given(rank, grids), packing=self.packing(rank))


class Lm(torch.nn.Module):
    """Words, and layers that add the deep tensors; each position by itself."""

    def __init__(self, depth):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(WORDS, H, dtype=DTYPE)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(H, H, dtype=DTYPE) for _ in range(depth)])

    def loss(self, hidden, deep, index, weight):
        for k, layer in enumerate(self.layers):
            if k:
                hidden = hidden.reshape(-1, H).index_add(0, index, deep[k - 1]).view(hidden.shape)
            hidden = torch.tanh(layer(hidden))
        return (hidden * weight).sum()


def by_hand(step, tower, run, lm):
    """The loss of all replicas, for autograd: the tower over one image after the other."""
    rows = [run(tower, i[4], torch.tensor([i[3]])) for i in step.images]
    total = 0
    for d in range(step.replicas):
        whole = lm.words(step.text[d]).view(-1, H)
        here = [e for e, i in enumerate(step.images) if i[0] == d]
        index = torch.tensor([i[1] * LENGTH + p for e, i in enumerate(step.images) if i[0] == d for p in i[2]],
                             dtype=torch.int64)
        deep = []
        if here:
            tensors = [torch.cat([rows[e][k] for e in here]) for k in range(len(rows[0]))]
            whole, deep = whole.index_copy(0, index, tensors[0]), tensors[1:]
        else:
            deep = [whole[:0]] * len(lm.layers)
        total = total + lm.loss(whole.view(BATCH, LENGTH, H), deep, index, step.weight[d])
    return total


def replica_sum(module, group=None):
    for p in module.parameters():
        g = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(g, group=group)
        p.grad = g


def worst(named, expected):
    """Largest difference of gradients, relative to the largest entry of the expected one."""
    out = {}
    for name, p in named:
        want = expected[name]
        got = p.whole if hasattr(p, 'whole') else p.grad
        got = torch.zeros_like(want) if got is None else got.full_tensor() if hasattr(got, 'full_tensor') else got
        out[name] = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
    return out
