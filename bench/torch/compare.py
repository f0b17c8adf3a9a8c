#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The library through PyTorch against the straightforward torch.distributed versions, in one torchrun.

usage: torchrun --nproc-per-node N bench/torch/compare.py [--device cuda] [--json FILE] [options]

Three tables, medians over repetitions of the slowest rank's time (overhead: the least), forward and backward
apart:
  overhead  tensors of a few elements on a group of one: the calling thread's CPU time (on a GPU the time
            that passes) of a call beyond an autograd.Function that does nothing with the same tensors.
            "python": the same with a C function that returns at once in the place of the library's, so
            Python, ctypes and what torch does. "c": the C call alone, again and again with the same
            arguments; on a GPU it enqueues, on the host it computes. Calls on packed sequences are on the
            group of all ranks that were launched, so with several of them "forward", "backward" and "c"
            have what ranks wait for each other.
  bridge    colobridge.torch.Bridge against all-gather / narrow (fan-in and fan-out) and clone + in-place
            all-reduce over cp in backward. On GPUs four ways: by NCCL; "peer", into tensors of PyTorch's
            in memory that peers reach (what a bridge does by default where it can); "copied", out of
            a workspace (buffers=0); "blocks", into blocks of the library's (buffers=2). "host" is when the call has come back, before the GPU is done; "row" a
            forward and backward of 20 in a row, without waiting in between.
  loss      nll() against the unfused chain (gather maximum, sum, target: three all-reduces, softmax kept)
            and against the same in chunks of tokens, recomputed in backward; linear_nll() against the
            product followed by the unfused chain. "MiB" is what the caching allocator had at most beyond
            inputs (on GPUs only).
PyTorch 2 or later. All versions get the same values; each row says by how much its result is off the first one's.
"""
import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge._lib import lib  # noqa: E402
from colobridge.torch.engine import ENGINES  # noqa: E402

DEVICE = torch.device('cpu')


def now():
    if DEVICE.type == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter()


def repetitions(fn, warmup, count):
    """[(forward, backward)] in seconds of fn() -> (forward, backward), the slowest rank's"""
    for _ in range(warmup):
        fn()
    seen = []
    for _ in range(count):
        dist.barrier()
        seen.append(fn())
    seen = torch.tensor(seen, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return seen.tolist()


def in_a_row(make, run, upstream, repeats=20):
    """fn() that times a forward and backward of @repeats, where the host may be ahead of the GPU"""
    def once():
        leaves = make()
        a = now()
        for _ in range(repeats):
            leaves[0].grad = None
            run(*leaves).backward(upstream)
        return ((now() - a) / repeats,)
    return once


def pair(make, run, upstream=None, host=False):
    """fn() that times run(*leaves) and its backward; with host, also when each has come back"""
    def once():
        leaves = make()
        a = now()
        y = run(*leaves)
        a_host = time.perf_counter()
        b = now()
        y.backward(upstream if upstream is not None else torch.ones_like(y))
        b_host = time.perf_counter()
        end = now()
        return (b - a, end - b) + ((a_host - a, b_host - b) if host else ())
    return once


# ---- overhead ----

class Nothing(torch.autograd.Function):
    """The same tensors in and out, no work"""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*[t for t in inputs if isinstance(t, torch.Tensor)])
        return torch.empty(inputs[-1], dtype=inputs[0].dtype, device=inputs[0].device)

    @staticmethod
    def backward(ctx, g):
        saved = ctx.saved_tensors
        return tuple(torch.empty_like(saved[i]) if need else None
                     for i, need in enumerate(ctx.needs_input_grad))


class Timed:
    """A C function that notes how long it takes, called again and again with the same arguments."""

    def __init__(self, fn, seen):
        self.fn, self.seen = fn, seen

    def __call__(self, *args):
        status = self.fn(*args)
        now()
        start = time.perf_counter()
        for _ in range(20):  # fewer than fill a GPU's queue
            self.fn(*args)
        self.seen.append(1e6 * (time.perf_counter() - start) / 20)
        return status


def at_once(fn, _seen):
    """A C function of the same arguments that does nothing."""
    stub = lib()['colo_version_number']
    stub.restype, stub.argtypes = fn.restype, fn.argtypes
    return stub


def seams(comm, carry):
    """(object, attribute, direction) of the C functions that calls on this communicator end in"""
    if carry is not None:
        return [(carry._engine._last[1], 'run', None)]
    if comm is None:
        return [(call, 'entries', None) for engine in ENGINES.values() for ragged in engine._ragged.values() for call in ragged.calls]
    kept = [found[0] if isinstance(found, tuple) else found for name in ('_logprobs', '_linear_plans', '_losses')
            for found in getattr(comm.__dict__.get(name), 'kept', {}).values()]
    plans = [getattr(found, 'plan', found) for found in kept]
    ready = [r for plan in plans for r in getattr(plan, 'kept', {}).values()] or plans
    ready += [plan.mean for plan in plans if getattr(plan, 'mean', None) is not None]
    return [(r, 'run_' + what, what) for r in ready for what in ('forward', 'backward', 'loss')
            if hasattr(r, 'run_' + what)]


class replaced:
    """Inside of it, C functions are what @wrap(function, list) gives, with a list of its own in @seen, by
    direction."""

    def __init__(self, found, wrap, seen):
        def new(fn, way):
            seen[way].append([])
            return wrap(fn, seen[way][-1])
        self.found, self.was = found, [getattr(o, name) for o, name, _ in found]
        self.new = [tuple(new(f, i) for i, f in enumerate(was)) if way is None
                    else new(was, way == 'backward') for (_, _, way), was in zip(found, self.was)]

    def __enter__(self):
        for (o, name, _), fn in zip(self.found, self.new):
            setattr(o, name, fn)

    def __exit__(self, *_):
        for (o, name, _), fn in zip(self.found, self.was):
            setattr(o, name, fn)


def overhead(repeats, count):
    """us a direction beyond Nothing with the same tensors: the least of the repetitions, which take turns, of a
    mean over repeats; whatever else runs only adds to it"""
    rows = []
    z, act = torch.randn(4, 2, device=DEVICE), torch.randn(1, 1, 2, device=DEVICE)
    t = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    w, teacher, ids = torch.randn(2, 2, device=DEVICE), torch.randn(4, 2, device=DEVICE), t[:, None].clone()
    lists = ct.Support(ids)
    carry = ct.Bridge('tp=1,dp=1', 'tp=1,dp=1', group=cb.Comm.self())
    world, size = dist.group.WORLD, dist.get_world_size()
    packed, cu = ct.PackedBridge('cp=%d' % size, 'cp=%d' % size, group=world), torch.tensor([0, 4 * size], device=DEVICE)
    zigzag = cb.Packing([0, 4 * size])
    block = zigzag.with_split('block')

    def swap(x, src, dst):
        return ct.relayout(x, cu, src, dst, group=world)
    cases = {'bridge': ((act,), (1, 1, 2), lambda _, x: carry(x)),
             'logprob': ((z, t), (4,), lambda c, x: ct.logprob(x, t, tp_group=c)),
             'linear_logprob': ((z, w, t), (4,), lambda c, x: ct.linear_logprob(x, w, target=t, tp_group=c)),
             'logprob of lists': ((z, t), (4,), lambda c, x: ct.logprob(x, t, tp_group=c, support=lists)),
             'topk_logprob': ((z,), (4, 1), lambda c, x: ct.topk_logprob(x, 1, tp_group=c).logp),
             'logprob_at': ((z, ids), (4, 1), lambda c, x: ct.logprob_at(x, ids, tp_group=c)),
             'distill': ((z, teacher), (4,), lambda c, x: ct.distill(x, teacher, tp_group=c).kl),
             'nll': ((z, t), (), lambda c, x: ct.nll(x, t, tp_group=c).loss),
             'linear_nll': ((z, w, t), (), lambda c, x: ct.linear_nll(x, w, target=t, tp_group=c).loss),
             'packed bridge': ((z,), (4, 2), lambda _, x: packed(x, zigzag, block)),
             'relayout': ((z,), (4, 2), lambda _, x: swap(x, 'zigzag', 'block')),
             'relayout there and back': ((z,), (4, 2), lambda _, x: swap(swap(x, 'zigzag', 'contiguous'), 'contiguous', 'zigzag')),
             'halo': ((z,), (5, 2), lambda _, x: ct.halo(x, cu, 1, group=world)[0])}
    on_all = list(cases)[-4:]  # ranks, by the bridges that are kept for these

    def measured(run, x):
        # On a GPU backward runs on a thread of autograd's: time what passes, not what this one does.
        clock = time.thread_time if DEVICE.type == 'cpu' else time.perf_counter
        now()
        a = clock()
        outs = [run(x) for _ in range(repeats)]
        b = clock()
        ups = [torch.ones_like(y) for y in outs]
        now()
        c = clock()
        for y, up in zip(outs, ups):
            torch.autograd.grad(y, x, up)
        return 1e6 * (b - a) / repeats, 1e6 * (clock() - c) / repeats

    for name, (inputs, shape, op) in cases.items():
        comm, x = None if name in on_all else cb.Comm.self(), inputs[0].clone().requires_grad_()
        run = lambda x, op=op, comm=comm: op(comm, x)  # noqa: E731
        empty = lambda x, rest=inputs[1:], shape=shape: Nothing.apply(x, *rest, shape)  # noqa: E731

        def warm(run=run, x=x):
            y = run(x)
            torch.autograd.grad(y, x, torch.ones_like(y))
        warm()
        found, seen = seams(comm, carry if name == 'bridge' else None), ([], [])
        with replaced(found, Timed, seen):
            for _ in range(2 * count):
                warm()
        times = {'nothing': [], 'whole': [], 'python': []}
        for _ in range(4 * count):
            times['nothing'].append(measured(empty, x))
            times['whole'].append(measured(run, x))
            with replaced(found, at_once, ([], [])):
                times['python'].append(measured(run, x))
        us = {what: [min(side) for side in zip(*all_of)] for what, all_of in times.items()}
        rows.append({'table': 'overhead', 'op': name, 'nothing_us': us['nothing'],
                     'forward_us': us['whole'][0] - us['nothing'][0],
                     'backward_us': us['whole'][1] - us['nothing'][1],
                     'python_us': [us['python'][i] - us['nothing'][i] for i in (0, 1)],
                     'c_us': [sum(min(s) for s in side if s) for side in seen]})
    return rows


# ---- bridge ----

def made_groups():
    kept = {}

    def groups(color, order):
        members = {}
        for r in sorted(range(dist.get_world_size()), key=lambda r: (order(r), r)):
            members.setdefault(color(r), []).append(r)
        mine = None
        for m in sorted(members.values()):
            if tuple(m) not in kept:
                kept[tuple(m)] = dist.new_group(m)
            mine = kept[tuple(m)] if dist.get_rank() in m else mine
        return mine
    return groups


def bridges(layouts, o):
    from bridge_reference import Bridge as Reference
    from bridge_reference import extent, grid
    groups, rows = made_groups(), []
    for shape, layout in itertools.product(o.sizes or [(o.batch, o.seq, o.hidden)], layouts):
        src, dst = layout.split('->')
        dp = extent(grid(src), 'dp')
        rng = torch.Generator(DEVICE).manual_seed(0)
        whole = torch.randn(*shape, generator=rng, dtype=o.dtype, device=DEVICE)
        each = shape[0] // dp
        mine = cb.Grid(src).coords(dist.get_rank()).get('dp', 0)
        x = whole.narrow(0, mine * each, each).clone()
        theirs = Reference(grid(src), grid(dst), 'bsh', groups)
        ours = {'colobridge': {}} if DEVICE.type == 'cpu' else {
            'colobridge nccl': {'transport': 'nccl'}, 'colobridge peer': {'transport': 'peer'},
            'colobridge copied': {'transport': 'peer', 'buffers': 0},
            'colobridge blocks': {'transport': 'peer', 'buffers': 2}}
        ours = {op: ct.Bridge(src, dst, group=dist.group.WORLD, **how) for op, how in ours.items()}
        cp = theirs.cp

        class Plain(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = theirs.gather(x) if theirs.way > 0 else \
                    theirs.narrow(x) if theirs.way < 0 else x.view_as(x)
                return y

            @staticmethod
            def backward(ctx, g):
                if cp > 1:
                    g = g.contiguous().clone()
                    dist.all_reduce(g, group=theirs.cp_group)
                return theirs.narrow(g) if theirs.way > 0 else theirs.gather(g) if theirs.way < 0 else g

        want = Plain.apply(x)
        g = torch.ones_like(want)
        for op, run in (('torch', Plain.apply), *ours.items()):
            y = run(x.clone().requires_grad_())
            wrong = int((y != want).sum())
            del y
            seen = repetitions(pair(lambda: (x.clone().requires_grad_(),), run, g, True), o.warmup, o.repetitions)
            us = [1e6 * statistics.median(side) for side in zip(*seen)]
            row = repetitions(in_a_row(lambda: (x.clone().requires_grad_(),), run, g), 1, max(o.repetitions // 3, 1))
            rows.append({'table': 'bridge', 'of': 'x'.join(map(str, shape)), 'layout': layout, 'op': op,
                         'bytes': want.numel() * want.element_size(), 'forward_us': us[0],
                         'backward_us': us[1], 'host_us': us[2:], 'off': wrong,
                         'row_us': 1e6 * statistics.median(side[0] for side in row)})
        for bridge in ours.values():
            bridge.destroy()
        del want, g, x, whole
    return rows


# ---- loss ----

def summed(x, op=dist.ReduceOp.SUM):
    if dist.get_world_size() > 1:
        dist.all_reduce(x, op=op)
    return x


class Unfused(torch.autograd.Function):
    """Sum of the cross entropy of vocabulary shards, as it is usually written."""

    @staticmethod
    def forward(ctx, z, t, lo):
        x = z.float()
        x = x - summed(x.max(-1).values, dist.ReduceOp.MAX).unsqueeze(-1)
        column = (t - lo).clamp(0, z.shape[-1] - 1)
        here = (t >= lo) & (t < lo + z.shape[-1])
        at = summed(torch.where(here, x.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0))
        e = x.exp()
        total = summed(e.sum(-1))
        ctx.save_for_backward(e.div_(total.unsqueeze(-1)), column, here)
        ctx.dtype = z.dtype
        return (total.log() - at).sum()

    @staticmethod
    def backward(ctx, g):
        p, column, here = ctx.saved_tensors
        d = p.scatter_add(-1, column.unsqueeze(-1), -here.to(p.dtype).unsqueeze(-1))
        return (d * g).to(ctx.dtype), None, None


class Chunked(torch.autograd.Function):
    """The same in chunks of tokens; statistics and softmax again in backward."""

    @staticmethod
    def forward(ctx, z, t, lo, size):
        ctx.save_for_backward(z, t)
        ctx.lo, ctx.size = lo, size
        with torch.no_grad():
            return sum(Unfused.apply(a, b, lo) for a, b in zip(z.split(size), t.split(size)))

    @staticmethod
    def backward(ctx, g):
        z, t = ctx.saved_tensors
        d = torch.empty_like(z)
        for a, b, to in zip(z.split(ctx.size), t.split(ctx.size), d.split(ctx.size)):
            with torch.enable_grad():
                leaf = a.detach().requires_grad_()
                to.copy_(torch.autograd.grad(Unfused.apply(leaf, b, ctx.lo), leaf, g)[0])
        return d, None, None, None


def losses(o):
    world, me = dist.get_world_size(), dist.get_rank()
    columns = o.vocab // world
    lo, rng = me * columns, torch.Generator().manual_seed(1)
    t = torch.randint(0, columns * world, (o.tokens,), generator=rng).to(DEVICE)
    h = torch.randn(o.tokens, o.width, generator=rng).to(o.dtype).to(DEVICE)
    rng = torch.Generator().manual_seed(2 + me)
    w = (torch.randn(columns, o.width, generator=rng) * o.width ** -0.5).to(o.dtype).to(DEVICE)
    z = (h @ w.t()).detach()
    group = dist.group.WORLD if world > 1 else None
    shard = {'tp_group': group, 'vocab': (lo, columns * world)}

    def product(x, y):
        return x @ y.t()

    cases = [
        ('logits', 'torch unfused', lambda x: Unfused.apply(x, t, lo), (z,)),
        ('logits', 'torch chunked', lambda x: Chunked.apply(x, t, lo, o.chunk), (z,)),
        ('logits', 'colobridge nll', lambda x: ct.nll(x, t, reduction='sum', **shard).loss, (z,)),
        ('hidden', 'torch unfused', lambda x, y: Unfused.apply(product(x, y), t, lo), (h, w))]
    for mode in ('loss', 'logprob', 'keep'):
        cases.append(('hidden', 'colobridge linear_nll ' + mode,
                      lambda x, y, mode=mode: ct.linear_nll(
                          x, ct.Head(y, d_hidden='partial', **shard), t, mode=mode, reduction='sum').loss, (h, w)))
    rows, first = [], {}
    for what, op, run, inputs in cases:
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = run(*leaves)
        value.backward()
        got = float(value.detach()), [x.grad for x in leaves]
        want = first.setdefault(what, got)
        off = max([abs(got[0] - want[0]) / abs(want[0])] +
                  [float((a.double() - b.double()).norm() / b.double().norm())
                   for a, b in zip(got[1], want[1])])
        del leaves, value, got
        make = lambda: [x.detach().requires_grad_() for x in inputs]  # noqa: E731
        seen = repetitions(pair(make, run), o.warmup, o.repetitions)
        peak = None
        if DEVICE.type == 'cuda':
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            pair(make, run)()
            peak = (torch.cuda.max_memory_allocated() - before) / 2 ** 20
        rows.append({'table': 'loss', 'of': what, 'op': op, 'off': off, 'peak_mib': peak,
                     'forward_us': 1e6 * statistics.median(s[0] for s in seen),
                     'backward_us': 1e6 * statistics.median(s[1] for s in seen)})
    return rows


def show(rows):
    for row in rows:
        print('%-9s %-12s %-44s %12.1f %12.1f  %s %s' % (
            row['table'], row.get('of') or '', '%s %s' % (row.get('layout', ''), row['op']),
            row['forward_us'], row['backward_us'],
            ('off %.1e' % row['off'] if 'off' in row else '') +
            (' host %.0f %.0f row %.1f' % (*row['host_us'], row['row_us']) if 'host_us' in row else '') +
            ('python %.1f %.1f c %.1f %.1f nothing %.1f %.1f'
             % (*row['python_us'], *row['c_us'], *row['nothing_us']) if 'c_us' in row else ''),
            '%.0f MiB' % row['peak_mib'] if row.get('peak_mib') is not None else ''), flush=True)


def layouts_of(world):
    """Fan-in, fan-out, equal, and with cp"""
    half = world // 2
    if world == 1:
        return ['tp=1,dp=1->tp=1,dp=1']
    return ['tp=1,dp=%d->tp=2,dp=%d' % (world, half), 'tp=2,dp=%d->tp=1,dp=%d' % (half, world),
            'tp=1,dp=%d->tp=1,cp=2,dp=%d' % (world, half)]


def main():
    global DEVICE
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ask.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    ask.add_argument('--only', nargs='+', default=['overhead', 'bridge', 'loss'])
    ask.add_argument('--layouts', nargs='*')
    ask.add_argument('--dtype', default='bfloat16')
    ask.add_argument('--sizes', nargs='*', type=lambda text: tuple(map(int, text.split('x'))),
                     metavar='BxSxH', help='of the bridge, instead of --batch, --seq and --hidden')
    for name, value in (('batch', 8), ('seq', 1024), ('hidden', 1024), ('tokens', 2048), ('width', 1024),
                        ('vocab', 32768), ('chunk', 512), ('repetitions', 11), ('warmup', 3)):
        ask.add_argument('--' + name, type=int, default=value)
    ask.add_argument('--json')
    o = ask.parse_args()
    o.dtype = getattr(torch, o.dtype)
    if o.device == 'cuda':
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
        DEVICE = torch.device('cuda', torch.cuda.current_device())
        dist.init_process_group('nccl')
    else:
        torch.set_num_threads(1)
        dist.init_process_group('gloo')
    rows = []
    if dist.get_rank() == 0:
        print('%-9s %-12s %-44s %12s %12s' % ('table', 'of', 'op', 'forward us', 'backward us'))
    for name in o.only:
        made = {'overhead': lambda: overhead(50, o.repetitions), 'loss': lambda: losses(o),
                'bridge': lambda: bridges(o.layouts or layouts_of(dist.get_world_size()), o)}[name]()
        rows += made
        if dist.get_rank() == 0:
            show(made)
    if dist.get_rank() == 0 and o.json:
        given = {k: str(v) for k, v in vars(o).items()}
        device = torch.cuda.get_device_name() if o.device == 'cuda' else 'cpu'
        Path(o.json).write_text(json.dumps({'tool': 'torch-compare', 'torch': torch.__version__,
                                            'device': device, 'ranks': dist.get_world_size(),
                                            'options': given, 'rows': rows}, indent=2) + '\n')
    dist.barrier()
    ct.shutdown()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
