# SPDX-License-Identifier: Apache-2.0
"""The bridge as it is written on torch.distributed, timed like colo-perf bridge, same JSON rows.

usage: torchrun --nproc-per-node N bench/torch/bridge_reference.py --layouts 'SRC->DST'... [options]

The straightforward version: all_gather_into_tensor over the siblings (fan-in forward, fan-out
backward), narrow (the other way), clone and in-place all_reduce over cp in backward, contiguous()
where the samples are not the outermost axis; around it what a caller with a sharded output runs, the
zigzag shard copy and its scatter into zeros. bf16, sharded, one process a GPU. Values are position
codes, compared after the last launch.

op "torch" is that; op "torch-wide" the same with every copy of a view done as int64, since PyTorch
copies 2-byte elements of views at a third of the memory's bandwidth.
"""
import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist


def grid(spec):
    """[(name, extent)], the first varies fastest"""
    return [(d.split('=')[0], int(d.split('=')[1])) for d in spec.split(',')]


def coord(dims, rank, name):
    for n, extent in dims:
        if n == name:
            return rank % extent
        rank //= extent
    return 0


def extent(dims, name):
    return dict(dims).get(name, 1)


def narrow_words(x):
    return x


def wide_words(x):
    return x.view(torch.int64)


class Bridge:
    def __init__(self, src, dst, axes, groups):
        world, me = dist.get_world_size(), dist.get_rank()
        ds, dd = extent(src, 'dp'), extent(dst, 'dp')
        self.words = narrow_words                  # what copies of views move
        self.dim = 0 if axes == 'bsh' else 1       # of the samples
        self.seq_dim = 1 - self.dim
        self.way = (ds > dd) - (ds < dd)           # 1 fan-in, 0 equal, -1 fan-out
        self.k = max(ds, dd) // min(ds, dd)
        self.cp, self.level = extent(dst, 'cp'), coord(dst, me, 'cp')
        self.sibling = (coord(src, me, 'dp') if self.way > 0 else coord(dst, me, 'dp')) % self.k
        c = lambda g, r, *names: tuple(coord(g, r, n) for n in names)
        if self.way > 0:
            sibling = lambda r: (c(dst, r, 'dp'), c(src, r, 'tp'))
            order = lambda r: coord(src, r, 'dp')
        else:
            sibling = lambda r: (c(src, r, 'dp'), c(dst, r, 'tp', 'cp'))
            order = lambda r: coord(dst, r, 'dp')
        self.siblings = groups(sibling, order) if self.way else None
        self.cp_group = groups(lambda r: c(dst, r, 'dp', 'tp'), lambda r: coord(dst, r, 'cp')) \
            if self.cp > 1 else None

    def contiguous(self, x):
        return x if x.is_contiguous() else self.words(x).contiguous().view(x.dtype)

    def gather(self, x):
        if self.dim != 0:
            x = x.transpose(0, 1)
        x = self.contiguous(x)
        out = x.new_empty((x.shape[0] * self.k,) + x.shape[1:])
        dist.all_gather_into_tensor(out, x, group=self.siblings)
        return out if self.dim == 0 else self.contiguous(out.transpose(0, 1))

    def narrow(self, x):
        n = x.shape[self.dim] // self.k
        return self.contiguous(x.narrow(self.dim, self.sibling * n, n))

    def chunks(self, full):
        n = full.shape[self.seq_dim] // (2 * self.cp)
        return [full.narrow(self.seq_dim, i * n, n) for i in (self.level, 2 * self.cp - 1 - self.level)]

    def forward(self, x):
        y = self.gather(x) if self.way > 0 else self.narrow(x) if self.way < 0 else x
        if self.cp == 1:
            return y
        return torch.cat([self.words(c) for c in self.chunks(y)], dim=self.seq_dim).view(y.dtype)

    def backward(self, d_y):
        g = d_y
        if self.cp > 1:
            shape = list(d_y.shape)
            shape[self.seq_dim] *= self.cp
            g = d_y.new_zeros(shape)
            for to, part in zip(self.chunks(g), d_y.chunk(2, dim=self.seq_dim)):
                self.words(to).copy_(self.words(part))
            g = self.contiguous(g).clone()
            dist.all_reduce(g, group=self.cp_group)
        return self.narrow(g) if self.way > 0 else self.gather(g) if self.way < 0 else g


def code(samples, rows, hidden, axes, total_rows):
    """bf16 bit patterns of where an element comes from; finite, positive"""
    h = torch.arange(hidden, device='cuda', dtype=torch.int32)
    row = (samples[:, None] * total_rows + rows[None, :]).to(torch.int32)
    r = row[:, :, None] * 0x2c1b3c6d + h * 0x297a2d39
    r = (r ^ (r >> 12)).bitwise_and_(0x3fff).add_(0x0080).to(torch.int16).view(torch.bfloat16)
    return (r if axes == 'bsh' else r.transpose(0, 1)).contiguous()


def parts(dims, rank, batch, seq, sharded):
    d, dp, c, cp = coord(dims, rank, 'dp'), extent(dims, 'dp'), coord(dims, rank, 'cp'), extent(dims, 'cp')
    n = seq // (2 * cp)
    samples = torch.arange(batch * d // dp, batch * (d + 1) // dp, device='cuda')
    rows = torch.arange(seq, device='cuda')
    if sharded and cp > 1:
        rows = torch.cat([rows[c * n:(c + 1) * n], rows[(2 * cp - 1 - c) * n:(2 * cp - c) * n]])
    return samples, rows


def timed(fn, batch, warmup, iters):
    """Median over repetitions of the slowest rank's time a launch, and the best, in us."""
    for _ in range(warmup):
        fn()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ms = torch.zeros(iters)
    for i in range(iters):
        torch.cuda.synchronize()
        dist.barrier(group=HOST)
        a.record()
        for _ in range(batch):
            fn()
        b.record()
        b.synchronize()
        ms[i] = a.elapsed_time(b) / batch
    dist.all_reduce(ms, dist.ReduceOp.MAX, group=HOST)
    return 1e3 * statistics.median(ms.tolist()), 1e3 * ms.min().item()


def main():
    global HOST
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ask.add_argument('--layouts', nargs='+', required=True)
    ask.add_argument('--axes', default='bsh', choices=['bsh', 'sbh', 'both'])
    ask.add_argument('--batch', type=int, default=16)
    ask.add_argument('--seq', type=int, default=8192)
    ask.add_argument('--hidden', type=int, default=4096)
    ask.add_argument('-w', type=int, default=5)
    ask.add_argument('-n', type=int, default=20)
    ask.add_argument('--json')
    ask = ask.parse_args()
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    dist.init_process_group('nccl', device_id=torch.device('cuda', int(os.environ['LOCAL_RANK'])))
    HOST = dist.new_group(backend='gloo')
    world, me, made, rows = dist.get_world_size(), dist.get_rank(), {}, []

    def groups(color, order):
        members = {}
        for r in sorted(range(world), key=lambda r: (order(r), r)):
            members.setdefault(color(r), []).append(r)
        mine = None
        for m in sorted(members.values()):
            if tuple(m) not in made:  # in the same order on every rank
                made[tuple(m)] = dist.new_group(m)
            mine = made[tuple(m)] if me in m else mine
        return mine

    for layout in ask.layouts:
        src, dst = (grid(side) for side in layout.split('->'))
        for axes in ['bsh', 'sbh'] if ask.axes == 'both' else [ask.axes]:
            bridge = Bridge(src, dst, axes, groups)
            source, shard = parts(src, me, ask.batch, ask.seq, False), parts(dst, me, ask.batch, ask.seq, True)
            x, y = (code(*p, ask.hidden, axes, ask.seq) for p in (source, shard))
            size = torch.tensor([2 * max(x.numel(), y.numel())])
            dist.all_reduce(size, dist.ReduceOp.MAX, group=HOST)
            size = size.item()
            batch = min(20, max(3, (256 << 20) // size))
            given = dict(src=layout.split('->')[0], dst=layout.split('->')[1], axes=axes, dtype='bf16',
                         output='sharded', grad='partial', batch=ask.batch, seq=ask.seq,
                         hidden=ask.hidden, replayed=False, bytes=size)
            for op, bridge.words in (('torch', narrow_words), ('torch-wide', wide_words)):
                for way, fn, inp, want in (('forward', bridge.forward, x, y), ('backward', bridge.backward, y, x)):
                    us, best = timed(lambda: fn(inp), batch, ask.w, ask.n)
                    wrong = (fn(inp).view(torch.int16) != want.view(torch.int16)).sum().cpu()
                    dist.all_reduce(wrong, group=HOST)
                    rows.append(dict(given, op=op, way=way, time_us=us, best_us=best, wrong=wrong.item()))
                    if me == 0:
                        print('%14d  %6d  %10s  %8s  %s  %s  %9.2f  %7d' % (
                            size, ask.seq, op, way, layout, axes, us, wrong.item()), flush=True)
            del x, y
    if me == 0 and ask.json:
        doc = dict(tool='torch', version=torch.__version__, device=torch.cuda.get_device_name(), gpus=world,
                   nccl=int('%d%02d%02d' % torch.cuda.nccl.version()), bridge=rows)
        with open(ask.json, 'w', encoding='utf-8') as f:
            json.dump(doc, f, indent=2)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
