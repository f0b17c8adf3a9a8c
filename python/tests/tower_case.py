# SPDX-License-Identifier: Apache-2.0
"""Random steps of a vision-language model whose towers lie on all ranks, and the same steps by hand: the whole tower over
all images, index_copy into the whole text. Of the library this uses nothing."""
import math
import random

import torch
import torch.distributed as dist

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
        got = p.grad
        got = torch.zeros_like(want) if got is None else got.full_tensor() if hasattr(got, 'full_tensor') else got
        out[name] = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
    return out
