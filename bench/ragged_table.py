#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A ragged batch through the library, and in the ways in which it is written on torch.distributed, as one page.

usage: torchrun --nproc-per-node N bench/ragged_table.py [options] > page.md
       (COLOBRIDGE_LIBRARY=build/src)

64 images of 256 to 4,096 rows, H 4096, bf16. Encoder replica r has the images of its samples; sequences of 4
images with text between them are cut by zigzag over cp. All ways begin with the rows of this rank's images
and end with them among the embeddings of its own positions; backward takes the gradient of these embeddings
home. Each result is compared bit by bit.

  library     carry(x, segments, into=text), through autograd
  padded      rows padded to those of the fullest rank, all_gather_into_tensor, index_select, index_copy_;
              backward: a gradient of all rows, reduce_scatter_tensor
  gathered    all_gather of each rank's rows, index_select, index_copy_; backward: all_reduce, narrow
  all-to-all  index_select by destination, all_to_all_single with splits of the host, masked_scatter_; backward:
              index_select, all_to_all_single, index_copy_ (index_add_ from several)

Tables of indices are made before the clock starts, for all ways. In each repetition all ways run, one after the other,
so that ratios are of one run. Times are medians over repetitions of the slowest rank. On CPU (gloo) it is a
smoke test in f16: give it small sizes by options.
"""
import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / 'python')]
import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402

GAP = 32  # positions of text between images
LAYOUTS = {1: ['dp=1->dp=1'], 2: ['dp=2->cp=2'], 4: ['dp=4->cp=2,dp=2', 'dp=4->cp=4', 'dp=4->tp=2,cp=2'],
           8: ['dp=8->cp=4,dp=2', 'dp=8->cp=8', 'dp=8->tp=2,cp=4']}


def code(rows, width, device):
    """Bit patterns of where an element comes from; finite, positive. bf16; f16 for gloo, which has no bf16."""
    h = torch.arange(width, device=device, dtype=torch.int32)
    r = rows.to(device=device, dtype=torch.int32)[:, None] * 0x2c1b3c6d + h * 0x297a2d39
    bits = (r ^ (r >> 12)).bitwise_and_(0x3fff).add_(0x0080).to(torch.int16)
    return bits.view(torch.bfloat16 if torch.device(device).type == 'cuda' else torch.float16)


class Job:
    """Tables of a batch, and what this rank needs of them."""

    def __init__(self, o, src, dst, rows, device):
        me = dist.get_rank()
        self.src, self.dst = cb.Grid(src), cb.Grid(dst)
        parts, at = self.src.extent('dp'), self.dst.coords(me)
        cp, replicas, count = self.dst.extent('cp'), self.dst.extent('dp'), len(rows)
        if parts != dist.get_world_size():
            raise SystemExit('%s: the ways on torch.distributed have a dp rank per process' % src)
        self.made = [e * parts // count for e in range(count)]
        seq, pos, seq_len = [], [], []
        for e, n in enumerate(rows):
            if e % o.packed == 0:
                seq_len.append(0)
            seq.append(len(seq_len) - 1), pos.append(seq_len[-1] + GAP)
            seq_len[-1] += GAP + n
        seq_len = [-(-n // (2 * cp)) * 2 * cp for n in seq_len]
        seq_dp = [q * replicas // len(seq_len) for q in range(len(seq_len))]
        self.tables = dict(rows=rows, src=self.made, seq=seq, pos=pos, seq_len=seq_len, seq_dp=seq_dp)
        # all rows: where each one goes
        count_of = torch.tensor(rows)
        of = torch.repeat_interleave(torch.arange(count), count_of)  # image of a row
        first = torch.cumsum(count_of, 0) - count_of
        self.total = len(of)
        p = torch.tensor(pos)[of] + torch.arange(self.total) - first[of]
        q = torch.tensor(seq)[of]
        chunk = torch.tensor(seq_len)[q] // (2 * cp)
        j = p // chunk
        owner = torch.minimum(j, 2 * cp - 1 - j)
        base, axis = [], [0] * replicas
        for n, d in zip(seq_len, seq_dp):
            base.append(axis[d])
            axis[d] += n
        local = torch.tensor(base)[q] // cp + torch.where(j == owner, p - owner * chunk,
                                                          chunk + p - (2 * cp - 1 - owner) * chunk)
        replica = torch.tensor(seq_dp)[q]

        def taken(rank):
            c = self.dst.coords(rank)
            return ((replica == c.get('dp', 0)) & (owner == c.get('cp', 0))).nonzero().flatten()
        self.axis = axis[at.get('dp', 0)] // cp
        edges = [sum(n for n, d in zip(rows, self.made) if d < r) for r in range(parts + 1)]
        self.lo, self.hi, self.counts = edges[me], edges[me + 1], [b - a for a, b in zip(edges, edges[1:])]
        self.most, self.first_of_replicas = max(self.counts), at.get('tp', 0) == 0
        mine = taken(me)  # rows, ascending
        self.index = local[mine].to(device)
        self.rows = mine.to(device)
        maker = torch.tensor(self.made)[of]
        self.padded = (mine - torch.tensor(edges)[maker[mine]] + maker[mine] * self.most).to(device)
        # all-to-all: what goes to each rank, by row; what comes, by row; and from there by position
        sent = [taken(r) for r in range(parts)]
        sent = [g[(g >= self.lo) & (g < self.hi)] - self.lo for g in sent]
        self.out_splits = [len(g) for g in sent]
        self.sent = torch.cat(sent).to(device)
        self.in_splits = torch.bincount(maker[mine], minlength=parts).tolist()
        self.by_position = torch.argsort(local[mine]).to(device)
        self.mask = torch.zeros(self.axis, 1, dtype=torch.bool, device=device)
        self.mask[self.index] = True
        # replicas along tp say the same: backward hears the first of them
        speaks = [self.dst.coords(r).get('tp', 0) == 0 for r in range(parts)]
        self.back_in = [n if s else 0 for n, s in zip(self.out_splits, speaks)]
        self.heard = torch.cat([g for g, s in zip(sent, speaks) if s] or [sent[0][:0]]).to(device)
        self.back_out = self.in_splits if self.first_of_replicas else [0] * parts


class Library:
    name = 'library'

    def __init__(self, job, o):
        self.carry = ct.RaggedBridge(job.src_layout, job.dst_layout, group=dist.group.WORLD, output='sharded',
                                     transport=o.transport)
        self.segments, self.graph = cb.Segments(**job.tables), None

    def forward(self, x, text):
        with torch.no_grad():
            return self.carry(x, self.segments, into=text)

    def prepare(self, x, text):
        self.x = x.detach().requires_grad_()
        self.graph = self.carry(self.x, self.segments, into=text.clone())

    def backward(self, d_y):
        return torch.autograd.grad(self.graph, self.x, d_y, retain_graph=True)[0]


class Way:
    def __init__(self, job, o):
        self.job, self.gloo = job, dist.get_backend() == 'gloo'

    def prepare(self, x, text):
        pass


class Padded(Way):
    name = 'padded'

    def forward(self, x, text):
        job = self.job
        padded = x.new_zeros((job.most, x.shape[1]))
        padded[:len(x)] = x
        everything = x.new_empty((job.most * len(job.counts), x.shape[1]))
        gather(everything, padded)
        return text.index_copy_(0, job.index, everything.index_select(0, job.padded))

    def backward(self, d_y):
        job = self.job
        everything = d_y.new_zeros((job.most * len(job.counts), d_y.shape[1]))
        if job.first_of_replicas:
            everything.index_copy_(0, job.padded, d_y.index_select(0, job.index))
        if self.gloo:
            dist.all_reduce(everything)
            mine = everything[dist.get_rank() * job.most:]
        else:
            mine = everything.new_empty((job.most, d_y.shape[1]))
            dist.reduce_scatter_tensor(mine, everything)
        return mine[:job.hi - job.lo]


class Gathered(Way):
    name = 'gathered'

    def forward(self, x, text):
        job = self.job
        everything = x.new_empty((job.total, x.shape[1]))
        parts = list(everything.split(job.counts))
        if self.gloo:  # which gathers parts of one size only
            parts[dist.get_rank()].copy_(x)
            for r, part in enumerate(parts):
                dist.broadcast(part, r)
        else:
            dist.all_gather(parts, x)
        return text.index_copy_(0, job.index, everything.index_select(0, job.rows))

    def backward(self, d_y):
        job = self.job
        everything = d_y.new_zeros((job.total, d_y.shape[1]))
        if job.first_of_replicas:
            everything.index_copy_(0, job.rows, d_y.index_select(0, job.index))
        dist.all_reduce(everything)
        return everything[job.lo:job.hi].clone()


class AllToAll(Way):
    name = 'all-to-all'

    def forward(self, x, text):
        job = self.job
        came = x.new_empty((len(job.rows), x.shape[1]))
        all_to_all(came, x.index_select(0, job.sent), job.in_splits, job.out_splits)
        return text.masked_scatter_(job.mask, came.index_select(0, job.by_position))

    def backward(self, d_y):
        job = self.job
        sent = d_y.index_select(0, job.index[:sum(job.back_out)])
        came = d_y.new_empty((sum(job.back_in), d_y.shape[1]))
        all_to_all(came, sent, job.back_in, job.back_out)
        return d_y.new_empty((job.hi - job.lo, d_y.shape[1])).index_copy_(0, job.heard, came)


def gather(out, x):
    if hasattr(dist, 'all_gather_into_tensor') and dist.get_backend() != 'gloo':
        dist.all_gather_into_tensor(out, x)
    else:
        dist.all_gather(list(out.split(len(x))), x)


def all_to_all(out, x, out_splits, in_splits):
    dist.all_to_all_single(out, x, out_splits, in_splits)


class Clock:
    """µs of the slowest rank, medians over repetitions."""

    def __init__(self, device, host, batch):
        self.device, self.host, self.batch, self.took = device, host, batch, {}

    def wait(self):
        if self.device.type == 'cuda':
            torch.cuda.synchronize()

    def __call__(self, name, fn, counts):
        self.wait()
        dist.barrier(group=self.host)
        start = time.perf_counter()
        for _ in range(self.batch):
            fn()
        self.wait()
        us = torch.tensor([1e6 * (time.perf_counter() - start) / self.batch], dtype=torch.float64)
        dist.all_reduce(us, dist.ReduceOp.MAX, group=self.host)
        if counts:
            self.took.setdefault(name, []).append(us.item())

    def median(self, name):
        return statistics.median(self.took[name])


def layouts_of(job, src, dst):
    job.src_layout, job.dst_layout = cb.Layout.src(src), cb.Layout.dst(dst)
    return job


def bits(t):
    return t.contiguous().view(torch.int16)


def one_layout(o, layout, rows, device, host):
    """Times of all ways by (way, pass), wrong elements."""
    src, dst = layout.split('->')
    job = layouts_of(Job(o, src, dst, rows, device), src, dst)
    x = code(torch.arange(job.lo, job.hi), o.hidden, device)
    text = code(torch.arange(job.axis) + job.total, o.hidden, device)
    want = text.clone()
    want[job.index] = code(job.rows, o.hidden, device)
    ways = [kind(job, o) for kind in (Library, Padded, Gathered, AllToAll)]
    wrong = {}
    for way in ways:
        y = way.forward(x, text.clone())
        way.prepare(x, text)
        d_x = way.backward(want)
        bad = torch.tensor([int((bits(y) != bits(want)).sum() + (bits(d_x) != bits(x)).sum())
                            if d_x.shape == x.shape and y.shape == want.shape else -1])
        dist.all_reduce(bad, group=host)
        wrong[way.name] = bad.item()
        del y, d_x
    clock = Clock(device, host, o.batch)
    for rep in range(o.w + o.n):
        for way in ways:
            clock((way.name, 'forward'), lambda: way.forward(x, text), rep >= o.w)
            clock((way.name, 'backward'), lambda: way.backward(want), rep >= o.w)
    need = torch.tensor([2 * o.hidden * int(((job.rows < job.lo) | (job.rows >= job.hi)).sum())])
    dist.all_reduce(need, dist.ReduceOp.MAX, group=host)
    ways[0].carry.destroy()
    return job, {k: clock.median(k) for k in clock.took}, wrong, need.item() / 2 ** 20


def length_of(o):
    """Rows of a sample of the uniform batch: zigzag over up to 8 ranks divides them."""
    return -(-o.most // 32) * 16


def uniform(o, layout, device, host):
    """[µs forward, backward] of a ragged and of a uniform bridge on one uniform batch."""
    src, dst = layout.split('->')
    samples, length = o.images, length_of(o)
    each = samples // dist.get_world_size()
    x = code(torch.arange(each * length) + each * length * dist.get_rank(), o.hidden, device)
    options = dict(group=dist.group.WORLD, output='sharded')
    replicas = cb.Grid(dst).extent('dp')
    tables = cb.Segments([length] * samples, src=[e // each for e in range(samples)], seq=list(range(samples)),
                         pos=[0] * samples, seq_len=[length] * samples,
                         seq_dp=[e * replicas // samples for e in range(samples)])
    bridges = {'ragged': ct.RaggedBridge(src, dst, transport=o.transport, **options)}
    for transport in ('nccl', 'auto') if device.type == 'cuda' else ('auto',):
        bridges['uniform, ' + transport] = ct.Bridge(src, dst, transport=transport, **options)
    graphs, outputs = {}, {}
    for name, carry in bridges.items():
        leaf = (x if name == 'ragged' else x.view(each, length, -1)).detach().requires_grad_()
        y = carry(leaf, tables) if name == 'ragged' else carry(leaf)
        graphs[name], outputs[name] = (leaf, y), bits(y.detach()).flatten()
    wrong = max(int((t != outputs['ragged']).sum()) for t in outputs.values())
    clock = Clock(device, host, o.batch)
    for rep in range(o.w + o.n):
        for name, carry in bridges.items():
            leaf, y = graphs[name]
            with torch.no_grad():
                clock((name, 'forward'), lambda: carry(leaf, *([tables] if name == 'ragged' else [])), rep >= o.w)
            clock((name, 'backward'), lambda: torch.autograd.grad(y, leaf, y.detach(), retain_graph=True),
                  rep >= o.w)
    took = {name: [clock.median((name, way)) for way in ('forward', 'backward')] for name in bridges}
    for carry in bridges.values():
        carry.destroy()
    return took, wrong


def host_times(o, layout, job, count=10000):
    """µs of this rank's host: making Segments, set_segments(); of the batch, and of @count segments."""
    src, dst = layout.split('->')
    world = ct.comm_of(dist.group.WORLD, torch.device('cpu'))
    bridge = cb.Bridge(world, cb.Layout.src(src), cb.Layout.dst(dst), (1,), output='sharded', kind='ragged')
    cp, replicas, parts = (cb.Grid(g).extent(d) for g, d in ((dst, 'cp'), (dst, 'dp'), (src, 'dp')))
    many = dict(rows=[64] * count, src=[e * parts // count for e in range(count)], seq=list(range(count)),
                pos=[0] * count, seq_len=[64 * cp] * count, seq_dp=[e * replicas // count for e in range(count)])
    out = {}
    for name, tables in (('the batch', job.tables), ('%d segments' % count, many)):
        as_tensors = {k: torch.tensor(v) for k, v in tables.items()}
        made = cb.Segments(**tables)
        times = {'Segments': lambda: cb.Segments(**as_tensors), 'set_segments': lambda: bridge.set_segments(made)}
        for what, fn in times.items():
            took = []
            for _ in range(5 + 40):
                start = time.perf_counter()
                kept = fn()
                took.append(1e6 * (time.perf_counter() - start))
                del kept
            out[name, what] = statistics.median(took[5:])
    bridge.destroy()
    return out


def page(o, device, found, flat, hosts, loads):
    print('# Ragged batches: the library and the ways of torch.distributed\n')
    print('%s ranks, %s, PyTorch %s, %s; %d images of %d to %d rows (%d in all), H %d, %s; medians of %d repetitions, '
          'of the slowest rank; transport %s.\n' % (
              dist.get_world_size(), torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU',
              torch.__version__, dist.get_backend(), o.images, o.least, o.most, found[0][1].total, o.hidden,
              'bf16' if device.type == 'cuda' else 'f16', o.n,
              o.transport))
    print('Forward / backward in µs; *times*: as long as the library, forward and backward together.\n')
    names = ['library', 'padded', 'gathered', 'all-to-all']
    print('| layout | must arrive, MiB | ' + ' | '.join(names) + ' | ' + ' | '.join(n + ', times' for n in names[1:])
          + ' | wrong |')
    print('|' + '---|' * (len(names) * 2 + 2))
    for layout, _, took, wrong, need in found:
        both = {n: (took[n, 'forward'], took[n, 'backward']) for n in names}
        print('| %s | %.1f | ' % (layout.replace('->', ' → '), need)
              + ' | '.join('%.0f / %.0f' % both[n] for n in names) + ' | '
              + ' | '.join('%.2f' % (sum(both[n]) / sum(both['library'])) for n in names[1:])
              + ' | %d |' % sum(abs(n) for n in wrong.values()))
    print('\nA uniform batch, %d samples of %d rows, through both bridges (packed, sharded):\n' % (o.images, length_of(o)))
    print('| layout | bridge | forward / backward, µs | ragged takes, times | wrong |\n|---|---|---|---|---|')
    for layout, took, wrong in flat:
        for name, t in took.items():
            print('| %s | %s | %.0f / %.0f | %.3f | %d |' % (
                layout.replace('->', ' → '), name, *t, sum(took['ragged']) / sum(t), wrong))
    print('\nHost, µs, of one rank:\n\n| tables | Segments() from tensors | set_segments() |\n|---|---|---|')
    for name in dict.fromkeys(n for n, _ in hosts):
        print('| %s | %.0f | %.0f |' % (name, hosts[name, 'Segments'], hosts[name, 'set_segments']))
    print('\nbalance(), log-normal row counts, 16 images per rank, %d ranks: most / mean %.3f before, %.3f after.'
          % (dist.get_world_size(), *loads))


def balanced():
    """(most / mean before, after)"""
    n = dist.get_world_size()
    rng = torch.Generator().manual_seed(5)
    rows = (torch.randn(16 * n, generator=rng) * 0.8 + 6.5).exp().long().tolist()
    out = []
    for where in ([e // 16 for e in range(16 * n)], cb.balance(rows, n)):
        loads = [sum(r for r, w in zip(rows, where) if w == k) for k in range(n)]
        out.append(max(loads) * n / sum(loads))
    return out


def options(argv=None):
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ask.add_argument('--layouts', nargs='+', help="SRC->DST; SRC is dp=RANKS")
    ask.add_argument('--images', type=int, default=64)
    ask.add_argument('--least', type=int, default=256)
    ask.add_argument('--most', type=int, default=4096)
    ask.add_argument('--packed', type=int, default=4, help='images of a sequence')
    ask.add_argument('--hidden', type=int, default=4096)
    ask.add_argument('--transport', choices=['auto', 'nccl', 'peer'], default='auto')
    ask.add_argument('--batch', type=int, default=3, help='calls between two looks at the clock')
    ask.add_argument('-w', type=int, default=3, help='repetitions before those that count')
    ask.add_argument('-n', type=int, default=15)
    ask.add_argument('--seed', type=int, default=1)
    ask.add_argument('--json')
    return ask.parse_args(argv)


def main():
    o = options()
    cuda = torch.cuda.is_available()
    device = torch.device('cuda', int(os.environ['LOCAL_RANK'])) if cuda else torch.device('cpu')
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group('nccl' if cuda else 'gloo')
    host = dist.new_group(backend='gloo')
    rng = torch.Generator().manual_seed(o.seed)
    rows = torch.randint(o.least, o.most + 1, (o.images,), generator=rng).tolist()
    layouts = o.layouts or LAYOUTS[dist.get_world_size()]
    found = [(layout, *one_layout(o, layout, rows, device, host)) for layout in layouts]
    flat = [(layout, *uniform(o, layout, device, host)) for layout in layouts]
    hosts = host_times(o, layouts[0], found[0][1])
    wrong = sum(abs(n) for f in found for n in f[3].values()) + sum(f[2] for f in flat)
    if dist.get_rank() == 0:
        page(o, device, found, flat, hosts, balanced())
        if o.json:
            with open(o.json, 'w', encoding='utf-8') as f:
                json.dump({'options': vars(o), 'rows': rows, 'uniform': flat, 'host': [[*k, v] for k, v in hosts.items()],
                           'ways': [[f[0], [[*k, v] for k, v in f[2].items()], f[3], f[4]] for f in found]}, f, indent=2)
    dist.barrier(group=host)
    dist.destroy_process_group()
    return wrong > 0


if __name__ == '__main__':
    sys.exit(main())
