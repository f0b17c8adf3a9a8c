# SPDX-License-Identifier: Apache-2.0
"""Random ragged batches, and what ragged batches mean, by hand on a matrix of all rows: index_select where rows
are taken, index_copy where they are merged. docs/concepts/ragged.md has the rules; of the library a Case uses its layouts alone.
carried() runs a bridge on a case."""
import random

import torch

import colobridge as cb

TEXT = -1234.0

# (source, destination, rows split over tp on the destination) of so many ranks. Dims: first varies fastest.
PAIRS = {
    1: [('dp=1', 'dp=1', False)],
    2: [('dp=2', 'cp=2,dp=1', False), ('tp=2,dp=1', 'dp=2', False), ('cp=2', 'tp=2', True)],
    4: [('tp=2,dp=2', 'tp=2,cp=2,dp=1', False), ('dp=4', 'cp=2,dp=2', False), ('dp=4', 'cp=4', False),
        ('tp=4,dp=1', 'tp=1,cp=2,dp=2', False), ('tp=2,dp=2', 'tp=2,cp=2', True), ('cp=2,dp=2', 'tp=4', True),
        ('cp=2,tp=2', 'cp=2,dp=2', False), ('dp=4', 'dp=4', False)],
}


def coord(spec, rank, name):
    """(coordinate, extent) of a rank along a dim."""
    for dim in spec.split(','):
        key, n = dim.split('=')
        if key == name:
            return rank % int(n), int(n)
        rank //= int(n)
    return 0, 1


class Case:
    """Tables, and G: all rows in the order of the tables, of small integers that sums keep exact."""

    def __init__(self, seed, size):
        rng = random.Random(seed)
        self.src, self.dst, self.sp = rng.choice(PAIRS[size])
        self.output = 'sharded' if self.sp else rng.choice(('full', 'sharded'))
        self.grad = rng.choice(('partial', 'disjoint')) if self.output == 'full' else 'partial'
        replicas, dp = coord(self.src, 0, 'dp')[1], coord(self.dst, 0, 'dp')[1]
        self.cp, tp = coord(self.dst, 0, 'cp')[1], coord(self.dst, 0, 'tp')[1]
        unit = 2 * self.cp * (tp if self.sp else 1)
        self.seq_len = [unit * rng.randrange(0, 5) for _ in range(rng.randrange(0, 6))]
        self.seq_dp = [rng.randrange(dp) for _ in self.seq_len]
        self.rows, self.seq, self.at = [], [], []  # at: the position of each row of each segment
        scattered = rng.random() < 0.4
        for q, length in enumerate(self.seq_len):
            free = list(range(length))
            while free and rng.random() < 0.8:
                if scattered:
                    where = rng.sample(free, rng.randrange(0, min(len(free), 6) + 1))
                else:
                    first = rng.choice(free)
                    most = next(n for n in range(length + 1) if first + n not in free)
                    where = list(range(first, first + rng.randrange(0, most + 1)))
                self.rows.append(len(where)), self.seq.append(q)
                self.at.append((where, where[0] if where else rng.randrange(length)))
                free = [p for p in free if p not in where]
        order = rng.sample(range(len(self.rows)), len(self.rows))
        self.rows, self.seq, self.at = ([t[i] for i in order] for t in (self.rows, self.seq, self.at))
        lazy = rng.random() < 0.3  # one replica makes no rows
        self.made = [rng.randrange(1 if lazy and replicas > 1 else 0, replicas) for _ in self.rows]
        self.first = [sum(self.rows[:e]) for e in range(len(self.rows))]  # of a segment, in G
        self.total = sum(self.rows)
        self.scattered = scattered

    def tables(self):
        where = {'row_pos': [p for at, _ in self.at for p in at]} if self.scattered else \
            {'pos': [first for _, first in self.at]}
        return dict(rows=self.rows, src=self.made, seq=self.seq, seq_len=self.seq_len, seq_dp=self.seq_dp, **where)

    def layouts(self):
        src, dst = cb.Layout.src(self.src), cb.Layout.dst(self.dst)
        if src.grid.extent('cp') > 1:
            src.clear('rows').split('rows', 'cp', context=True)  # the usual one is zigzag
        if self.sp:
            dst.split('rows', 'tp')
        return src, dst

    def values(self, width, seed=0, dtype=torch.float64):
        rng = torch.Generator().manual_seed(seed)
        return torch.randint(-99, 99, (self.total, width), generator=rng).to(dtype)

    def source(self, rank):
        """Rows of G in this rank's x."""
        d = coord(self.src, rank, 'dp')[0]
        axis = [self.first[e] + r for e in range(len(self.rows)) if self.made[e] == d
                for r in range(self.rows[e])]
        j, m = coord(self.src, rank, 'cp')
        return torch.tensor(axis[j * len(axis) // m:(j + 1) * len(axis) // m], dtype=torch.int64)

    def arrivals(self, rank, full=None):
        """(index in a merged y, row of G), ascending by sequence and position."""
        full = self.output == 'full' if full is None else full
        d, c = coord(self.dst, rank, 'dp')[0], coord(self.dst, rank, 'cp')[0]
        t, tp = coord(self.dst, rank, 'tp') if self.sp else (0, 1)
        out, base = [], 0
        for q, length in enumerate(self.seq_len):
            if self.seq_dp[q] != d:
                continue
            for e in range(len(self.rows)):
                for r, p in enumerate(self.at[e][0] if self.seq[e] == q else ()):
                    at = base + p
                    if not full:
                        at = self.local(base, length, p, c)
                    if at is not None:
                        out.append(((q, p), at, self.first[e] + r))
            base += length
        out = [(at, g) for _, at, g in sorted(out)]
        if full:
            return out
        block = base // self.cp // tp
        return [(at - t * block, g) for at, g in out if t * block <= at < (t + 1) * block]

    def local(self, base, length, p, c):
        """Index on context rank c, zigzag; None if another one owns it."""
        if self.cp == 1:
            return base + p
        chunk = length // (2 * self.cp)
        j = p // chunk
        if j not in (c, 2 * self.cp - 1 - c):
            return None
        return base // self.cp + (p - c * chunk if j == c else chunk + p - (2 * self.cp - 1 - c) * chunk)

    def axis(self, rank):
        """Positions of a merged y."""
        d, tp = coord(self.dst, rank, 'dp')[0], coord(self.dst, rank, 'tp')[1]
        whole = sum(n for n, at in zip(self.seq_len, self.seq_dp) if at == d)
        return whole if self.output == 'full' else whole // self.cp // (tp if self.sp else 1)

    def y(self, rank, G, text=None):
        """What arrives, as an expression of G and of the text that was there."""
        found = self.arrivals(rank)
        index, rows = (torch.tensor([a[k] for a in found], dtype=torch.int64) for k in (0, 1))
        taken = G.index_select(0, rows)
        return taken if text is None else text.index_copy(0, index, taken)

    def d_y(self, rank, like, merged):
        """A gradient: alike on replicas; zero where DISJOINT says so."""
        at = [coord(self.dst, rank, dim)[0] for dim in ('dp', 'cp') + (('tp',) if self.sp else ())]
        rng = torch.Generator().manual_seed(sum(a * 100 ** i for i, a in enumerate(at)) + 7)
        out = torch.randint(-9, 9, like.shape, generator=rng).to(like.dtype)
        if self.output == 'full' and self.grad == 'disjoint':
            mine = {g for _, g in self.arrivals(rank, full=False)}
            for i, (at, g) in enumerate(self.arrivals(rank)):
                if g not in mine:
                    out[at if merged else i] = 0
        return out

    def dst_ranks(self):
        """One of each set of replicas."""
        size = 1
        for dim in self.dst.split(','):
            size *= int(dim.split('=')[1])
        return [r for r in range(size) if self.sp or coord(self.dst, r, 'tp')[0] == 0]

    def d_G(self, merged, width, scale=1):
        """The gradient of all rows, by autograd on the whole."""
        G = torch.zeros(self.total, width, dtype=torch.float64, requires_grad=True)
        total = G.sum() * 0
        for rank in self.dst_ranks():
            text = torch.zeros(self.axis(rank), width, dtype=torch.float64) if merged else None
            y = self.y(rank, G, text)
            total = total + (y * self.d_y(rank, y.detach(), merged) * scale).sum()
        return torch.autograd.grad(total, G)[0]


def carried(rank, case, carry, segments, merged, device='cpu'):
    """Two tensors, and one without gradients: bits and gradients are the case's."""
    mine = case.source(rank)
    G, marks = case.values(4), case.values(1, 5, torch.int64)
    x = G.index_select(0, mine).to(device).requires_grad_()
    embedded = torch.full((case.axis(rank), 4), TEXT, dtype=torch.float64, device=device, requires_grad=True)
    masks = torch.full((case.axis(rank), 1), -7, dtype=torch.int64)
    into = (embedded * 1, masks.to(device).clone()) if merged else None
    y, marked = carry((x, marks.index_select(0, mine).to(device)), segments, into=into)
    assert not merged or (y is into[0] and marked is into[1])
    want = case.y(rank, G, embedded.detach().cpu() if merged else None)
    assert torch.equal(y.cpu(), want), (y, want)
    assert torch.equal(marked.cpu(), case.y(rank, marks, masks if merged else None)) and not marked.requires_grad
    d_y = case.d_y(rank, want, merged)
    given = d_y.to(device).clone()
    y.backward(given)
    assert torch.equal(given.cpu(), d_y)
    d_G = case.d_G(merged, 4)
    assert torch.equal(x.grad.cpu(), d_G.index_select(0, mine)), (x.grad, d_G.index_select(0, mine))
    if merged:  # what index_copy gives the text
        text = embedded.detach().cpu().clone().requires_grad_()
        case.y(rank, G, text).backward(d_y)
        assert torch.equal(embedded.grad.cpu(), text.grad), (embedded.grad, text.grad)
    else:
        assert carry.rows(segments, device) == (len(mine), len(want))
    with torch.no_grad():
        alone = carry(x, segments, into=(embedded * 1 if merged else None))
    assert torch.equal(alone.cpu(), want) and not alone.requires_grad
