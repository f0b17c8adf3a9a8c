#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A vision tower divided over all ranks by EncoderParallel, against the tower replicated on every rank.

usage: torchrun --nproc-per-node N bench/torch/tower.py [--device cuda] [options]
       (COLOBRIDGE_LIBRARY=build/src)

The tower is a transformer of patches, with attention within an image. All ranks of an LLM replica load the same batch: images of
random sizes among the text of its sequences. Both ways put the images' rows among the embeddings that this context rank
holds, and take the gradient of these back to the tower's parameters:

  divided     ct.EncoderParallel: each image is encoded once, by one rank, and its rows travel
  replicated  each rank encodes all images of its replica, and keeps the rows of its own positions; nothing travels

A step is forward and backward; the sum of parameters' gradients over ranks, which both need, is not in it. In each repetition
both ways run, one after the other, so that the ratio is of one run. Times are medians of the slowest rank. Memory is the
most that a step takes beyond what was there before, on the rank with the most: on a GPU what PyTorch allocates, on the host
what autograd keeps. First a step in float32 compares embeddings and gradients of both ways: the program ends with 1 if
they differ by more than 1e-4, relative to their norm, which is much more than sums in another order make.

On one rank, --of N tells what the busiest of N ranks would have to encode; nothing travels then.
"""
import argparse
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402

LAYOUTS = {1: 'dp=1', 2: 'cp=2', 4: 'tp=2,cp=2', 8: 'tp=2,cp=2,dp=2'}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, lengths):
        qkv = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).transpose(0, 2)  # [heads, 3, patches, width / heads]
        images = [nn.functional.scaled_dot_product_attention(*one.unbind(1)) for one in qkv.split(lengths, 2)]
        x = x + self.out(torch.cat(images, 1).transpose(0, 1).reshape(len(x), -1))
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.front, self.back = nn.Linear(o.patch, o.width), nn.Linear(o.width, o.hidden)
        self.blocks = nn.ModuleList(Block(o.width, o.heads) for _ in range(o.layers))

    def forward(self, pixels, grid):
        lengths = [math.prod(g) for g in grid.tolist()]
        x = self.front(pixels.to(self.front.weight.dtype))
        for block in self.blocks:
            x = block(x, lengths)
        return self.back(x)


class Batch:
    """A replica's images among its text, the same on all of its ranks; which of the rows are at positions of this rank."""

    def __init__(self, o, llm, rank, replica):
        rng, make = random.Random(1000 + replica), torch.Generator().manual_seed(replica)
        self.grid, self.seq, self.pos, rows = [], [], [], []
        packing = cb.Packing(seq_len=[o.length] * o.sequences, dp=[replica] * o.sequences)
        own = {at: i for i, at in enumerate(zip(packing.sequence_ids(rank, llm), packing.positions(rank, llm)))}
        for q in range(o.sequences):
            at = 0
            for _ in range(o.images):
                h, w = (rng.randint(o.least, o.most) for _ in range(2))
                if at + h * w > o.length:
                    break
                rows += [(q, at + r) for r in range(h * w)]
                self.grid.append([1, h, w]), self.seq.append(q), self.pos.append(at)
                at += h * w + rng.randint(1, 32)
        kept = [i for i, place in enumerate(rows) if place in own]
        self.pixels = torch.randn(len(rows), o.patch, generator=make).to(o.device)
        self.thw = torch.tensor(self.grid, device=o.device)
        self.kept = torch.tensor(kept, dtype=torch.int64, device=o.device)
        self.index = torch.tensor([own[rows[i]] for i in kept], dtype=torch.int64, device=o.device)
        context = torch.Generator().manual_seed(7 + min(packing.positions(rank, llm), default=0) + 99 * replica)
        self.text, self.d_hidden = (torch.randn(o.sequences, len(own) // o.sequences, o.hidden, generator=context).to(o.device)
                                    for _ in range(2))


def ways_of(o, tower, llm, batch, dtype):
    """By name: what puts the images among the embeddings."""
    text = batch.text.to(dtype)
    replicated = {'replicated': lambda: text.view(-1, o.hidden).index_copy(
        0, batch.index, tower(batch.pixels, batch.thw).index_select(0, batch.kept)).view(text.shape)}
    if o.of:  # what the busiest of so many ranks encodes
        costs = [math.prod(g) * (math.prod(g) + 6 * o.width) for g in batch.grid]
        to = cb.balance(costs, o.of)
        busiest = max(range(o.of), key=lambda r: sum(c for c, t in zip(costs, to) if t == r))
        starts = [0]
        for g in batch.grid:
            starts.append(starts[-1] + math.prod(g))
        mine = [e for e, t in enumerate(to) if t == busiest]
        rows = torch.cat([torch.arange(starts[e], starts[e + 1]) for e in mine]).to(o.device)
        return None, {'divided': lambda: tower(batch.pixels.index_select(0, rows), batch.thw[mine]), **replicated}
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm=llm, output='sharded', rows=math.prod, cost=6 * o.width,
                                run=lambda tower, x, grid: tower(x, grid), smallest=(torch.zeros(1, o.patch), [[1, 1, 1]]))
    return vision, {'divided': lambda: vision(batch.pixels, batch.thw, seq=batch.seq, pos=batch.pos, into=text.clone()),
                    **replicated}


def step(tower, way, d_hidden):
    for p in tower.parameters():
        p.grad = None
    hidden = way()
    hidden.backward(d_hidden if hidden.shape == d_hidden.shape else torch.ones_like(hidden))
    return hidden.detach()


def clock(o, fn):
    dist.barrier()
    if o.device.type == 'cuda':
        torch.cuda.synchronize()
    begin = time.perf_counter()
    fn()
    if o.device.type == 'cuda':
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def memory(o, fn):
    """MiB that a step takes."""
    if o.device.type == 'cuda':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fn()
    return sum(kept.values()) / 2 ** 20


def differ(tower, ways, batch, tp):
    """The largest difference of embeddings and of a parameter's gradient, summed over all ranks."""
    found = {}
    for name, way in ways.items():
        hidden, grads = step(tower, way, batch.d_hidden), []
        for p in tower.parameters():
            dist.all_reduce(p.grad)
            grads.append(p.grad / (tp if name == 'replicated' else 1))  # ranks of tp have the same gradient
        found[name] = [hidden, *grads]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(*found.values()))


def most(values, device):
    said = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return said.tolist()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--device', default='cpu')
    p.add_argument('--llm', help='grid of the LLM; default: by the number of ranks')
    p.add_argument('--of', type=int, default=0, metavar='N')
    p.add_argument('--dtype', help='default: bfloat16 on a GPU, float32 on the host')
    for name, gpu, cpu in (('layers', 24, 2), ('width', 1152, 64), ('heads', 16, 4), ('hidden', 4096, 64), ('patch', 588, 48),
                           ('sequences', 2, 2), ('length', 8192, 256), ('images', 12, 4), ('least', 8, 3), ('most', 40, 9)):
        p.add_argument('--' + name, type=int, help='default: %d on a GPU, %d on the host' % (gpu, cpu))
        p.set_defaults(**{'_' + name: (cpu, gpu)})
    p.add_argument('--repetitions', type=int, default=9)
    o = p.parse_args()
    gpu = o.device == 'cuda'
    for name, value in list(vars(o).items()):
        if name.startswith('_') and getattr(o, name[1:]) is None:
            setattr(o, name[1:], value[gpu])
    if gpu:
        torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', 0)))
    o.device = torch.device('cuda', torch.cuda.current_device()) if gpu else torch.device('cpu')
    dtype = getattr(torch, o.dtype or ('bfloat16' if gpu else 'float32'))
    dist.init_process_group('nccl' if gpu else 'gloo')
    me, size = dist.get_rank(), dist.get_world_size()
    if o.of and size > 1:
        sys.exit('tower.py: --of is for one rank, found %d' % size)
    llm = o.llm or LAYOUTS.get(size, 'cp=%d' % size)
    grid = cb.Grid(llm)
    batch = Batch(o, llm, me, grid.coords(me).get('dp', 0))
    torch.manual_seed(5)
    tower = Tower(o).to(o.device)
    _, ways = ways_of(o, tower, llm, batch, torch.float32)
    off = 0.0 if o.of else most([differ(tower, ways, batch, grid.extent('tp'))], o.device)[0]
    tower.to(dtype)
    vision, ways = ways_of(o, tower, llm, batch, dtype)
    d_hidden, times, took = batch.d_hidden.to(dtype), {name: [] for name in ways}, {}
    for repetition in range(o.repetitions + 1):
        for name, way in ways.items():
            ms = most([clock(o, lambda way=way: step(tower, way, d_hidden))], o.device)[0]
            if repetition:  # the first one warms up
                times[name].append(ms)
    for name, way in ways.items():
        took[name] = most([memory(o, lambda way=way: step(tower, way, d_hidden))], o.device)[0]
    if me == 0:
        print('%s, %d ranks, LLM %s%s; %d images of %d patches in a replica; tower of %d layers, width %d, %s' % (
            torch.cuda.get_device_name() if gpu else 'CPU', size, llm, ', the busiest of %d ranks' % o.of if o.of else '',
            len(batch.grid), len(batch.pixels), o.layers, o.width, dtype))
        print('| tower | step, ms | memory, MiB |\n|---|---:|---:|')
        for name in ways:
            print('| %s | %.1f | %.1f |' % (name, statistics.median(times[name]), took[name]))
        print('| divided / replicated | %.2f | %.2f |' % (
            statistics.median(times['divided']) / statistics.median(times['replicated']), took['divided'] / took['replicated']))
        if vision:
            print('cost of ranks, most / mean: %.2f; embeddings and gradients differ by %.1e' % (vision.stats()['balance'], off))
    ct.shutdown()
    dist.destroy_process_group()
    sys.exit(off > 1e-4)


if __name__ == '__main__':
    main()
