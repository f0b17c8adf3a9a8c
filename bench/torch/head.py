#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The lm_head with its loss, and nll() of logits, through PyTorch on one GPU, compared with their limits and other
libraries' kernels, in one run.

usage: bench/torch/head.py [--tables head forward long logits cases] [--tokens T --hidden H --vocab V --repetitions N]
                           [--only WORD ..] [--json FILE]

Each line: the median of N repetitions of a forward and backward, in which all lines take turns in random order, so
that the clock of a warm GPU is the same for all, and none always follows one that draws more or less power; its ratio to the limit; the median of when the calls had come back, which
a GPU that has nothing to do waits for; what the caching allocator had at most beyond
inputs, gradients included, counted from a moment when no gradient exists; the loss and the relative error of
the gradients (Frobenius) against fp64 sums of a part of the rows. Limits: three or four bare bf16 products
one after another; for logits one read and one write. Libraries that are not installed are left out.
forward: log-probabilities alone, as a sampler's or a reference model's are made, against one product.
long: memory of many tokens (--tokens 262144), without products beside it.
cases: what users reported, each compared with the way that hurt.
"""
import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge.torch as ct  # noqa: E402

GIB = 2.0 ** 30


def event_ms(fn):
    """(ms of the GPU, ms until fn() has come back)"""
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    a.record()
    begin = time.perf_counter()
    fn()
    host = 1e3 * (time.perf_counter() - begin)
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b), host


class Line:
    """run() -> the loss, a scalar, or None of what has no gradient; leaves: what gets gradients"""

    def __init__(self, name, run, leaves, limit, main=None):
        self.name, self.run, self.leaves, self.limit, self.main = name, run, leaves, limit, main
        self.ms, self.peak, self.value, self.error = [], None, None, None

    def forget(self):
        for x in self.leaves:
            x.grad = None

    def once(self):
        self.forget()
        loss = self.run()
        if loss is not None:
            loss.backward()
        return loss

    def warm(self, want):
        for _ in range(2):
            loss = self.once()
        if loss is not None:
            self.value = float(loss.detach())
            if want:
                # main_grad has the sum of all calls so far
                if self.main is not None:
                    self.main.zero_()
                    self.once()
                self.error = [float((got.double() - w).norm() / w.norm()) for got, w in want(self)]
        del loss
        self.forget()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.once()
        torch.cuda.synchronize()
        self.peak = (torch.cuda.max_memory_allocated() - before) / GIB
        self.forget()


def peers(x, w, t):
    """(name, fn) of what is installed"""
    found = []
    try:
        from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import \
            liger_fused_linear_cross_entropy_sm90 as liger
        found.append(('Liger, CuTe DSL SM90', lambda: liger(x, w, t)))
    except Exception as why:
        print('# no Liger: %s' % str(why).splitlines()[:1])
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack
        # its default, 4096, refuses H = 4096: it cannot tell rows from columns then
        found.append(('QuACK, chunks of 2048', lambda: quack(x, w, t, chunk_size=2048)))
    except Exception as why:
        print('# no QuACK: %s' % str(why).splitlines()[:1])
    return found


def logit_peers(z, t):
    found = [('torch.compile cross_entropy', torch.compile(lambda: F.cross_entropy(z.float(), t)))]
    try:
        from quack.cross_entropy import cross_entropy
        found.append(('QuACK cross_entropy', lambda: cross_entropy(z, t).float().mean()))
    except Exception as why:
        print('# no QuACK: %s' % str(why).splitlines()[:1])
    return found


def show(lines, limits, repetitions):
    kept = []
    for line in lines:
        try:
            line.warm(limits['want'] if line.leaves else None)
            kept.append(line)
        except Exception as why:
            line.forget()
            print('# %s did not run: %s: %s' % (line.name, type(why).__name__, str(why)[:300]))
        torch.cuda.empty_cache()
    turns = random.Random(1)
    for _ in range(repetitions):
        for line in turns.sample(kept, len(kept)):
            line.ms.append(event_ms(line.once))
            line.forget()
    ms = {line.name: statistics.median(ms for ms, _ in line.ms) for line in kept}
    rows = []
    for line in kept:
        limit = ms.get(line.limit)
        host = statistics.median(host for _, host in line.ms)
        rows.append({'op': line.name, 'ms': ms[line.name], 'host_ms': host, 'limit': line.limit, 'gib': line.peak,
                     'times': limit and ms[line.name] / limit, 'loss': line.value, 'error': line.error})
        print('%-50s %8.3f ms  %s  host %6.3f ms  %6.2f GiB  %s' % (
            line.name, ms[line.name], '%.3f' % rows[-1]['times'] if limit else '     ', host, line.peak,
            '' if line.value is None else 'loss %.6f errors %s' % (
                line.value, ' '.join('%.1e' % e for e in line.error or []))), flush=True)
    return rows


def head(o):
    rng = torch.Generator('cuda').manual_seed(1)
    draw = lambda *n: torch.randn(*n, generator=rng, device='cuda')  # noqa: E731
    x = draw(o.tokens, o.hidden).bfloat16().requires_grad_()
    w = (draw(o.vocab, o.hidden) * o.hidden ** -0.5).bfloat16().requires_grad_()
    t = torch.randint(0, o.vocab, (o.tokens,), generator=rng, device='cuda')
    main = torch.zeros(o.vocab, o.hidden, device='cuda')
    w.main_grad = main
    # fp64: d_hidden of some tokens, d_weight of some words, without one matrix of all logits
    some, words = torch.arange(0, o.tokens, max(o.tokens // 16, 1), device='cuda'), torch.cat(
        (t[:8], torch.arange(0, o.vocab, max(o.vocab // 8, 1), device='cuda')))
    lse = torch.cat([torch.logsumexp(part.double() @ w.detach().double().t(), -1)
                     for part in x.detach().split(512)])
    p = (x.detach()[some].double() @ w.detach().double().t() - lse[some, None]).exp()
    p[torch.arange(len(some)), t[some]] -= 1
    want_x = p @ w.detach().double() / o.tokens
    q = (x.detach().double() @ w.detach()[words].double().t() - lse[:, None]).exp()
    q -= (t[:, None] == words[None]).double()
    want_w = q.t() @ x.detach().double() / o.tokens
    truth = float((lse - (x.detach().double() * w.detach()[t].double()).sum(-1)).mean())
    del p, q
    torch.cuda.empty_cache()
    print('# loss in fp64: %.6f' % truth)

    def want(line):
        grad = line.main if line.main is not None else w.grad
        return (x.grad[some], want_x), (grad[words], want_w)

    z, dh, dw = (torch.empty(n, m, dtype=torch.bfloat16, device='cuda')
                 for n, m in ((o.tokens, o.vocab), (o.tokens, o.hidden), (o.vocab, o.hidden)))
    torch.mm(x.detach(), w.detach().t(), out=z)
    dz = (z.float().softmax(-1)).bfloat16()
    xd, wd = x.detach(), w.detach()

    def products(times):
        for _ in range(times - 2):
            torch.mm(xd, wd.t(), out=z)
        torch.mm(dz, wd, out=dh)
        torch.mm(dz.t(), xd, out=dw)

    def mean(**options):
        head = ct.Head(w, **{name: options.pop(name) for name in ('main_grad', 'logits_dtype') if name in options})
        if 'upstream' not in options:
            return ct.linear_nll(x, head, t, **options).loss
        return ct.linear_nll(x, head, t, reduction='sum', **options).loss / o.tokens

    lines = [Line('three products', lambda: products(3), (), None),
             Line('four products', lambda: products(4), (), None)]
    for name, options, limit in (
            ('linear_nll, loss', {}, 3), ('linear_nll, keep', {'mode': 'keep'}, 3),
            ('linear_nll, logprob', {'mode': 'logprob'}, 4),
            ('linear_nll, loss, bf16 logits', {'logits_dtype': torch.bfloat16}, 3),
            ('linear_nll, keep, bf16 logits', {'mode': 'keep', 'logits_dtype': torch.bfloat16}, 3),
            ('linear_nll, logprob, bf16 logits', {'mode': 'logprob', 'logits_dtype': torch.bfloat16}, 4),
            ('linear_nll, loss, main_grad', {'main_grad': True}, 3),
            ('linear_nll, loss, main_grad, bf16 logits', {'main_grad': True, 'logits_dtype': torch.bfloat16}, 3),
            ('linear_nll, loss, main_grad, upstream', {'main_grad': True, 'upstream': 1 / o.tokens}, 3),
            ('linear_nll, loss, main_grad, upstream, bf16 logits',
             {'main_grad': True, 'upstream': 1 / o.tokens, 'logits_dtype': torch.bfloat16}, 3),
            ('linear_nll, logprob, main_grad', {'main_grad': True, 'mode': 'logprob'}, 4)):
        lines.append(Line(name, lambda options=options: mean(**options), (x, w),
                          {3: 'three products', 4: 'four products'}[limit],
                          main if 'main_grad' in options else None))
    for name, fn in peers(x, w, t):
        lines.append(Line(name, fn, (x, w), 'three products'))
    lines += [Line('torch, bf16 loss', lambda: F.cross_entropy(F.linear(x, w), t), (x, w), 'three products'),
              Line('torch, fp32 loss', lambda: F.cross_entropy(F.linear(x, w).float(), t), (x, w), 'three products'),
              Line('torch.compile, fp32 loss', torch.compile(lambda: F.cross_entropy(F.linear(x, w).float(), t)), (x, w),
                   'three products')]
    lines = [line for line in lines if not o.only or 'products' in line.name or any(a in line.name for a in o.only)]
    return show(lines, {'want': want}, o.repetitions)


def forward(o):
    rng = torch.Generator('cuda').manual_seed(1)
    draw = lambda *n: torch.randn(*n, generator=rng, device='cuda')  # noqa: E731
    x = draw(o.tokens, o.hidden).bfloat16()
    w = (draw(o.vocab, o.hidden) * o.hidden ** -0.5).bfloat16()
    b = draw(o.vocab).bfloat16()
    t = torch.randint(0, o.vocab, (o.tokens,), generator=rng, device='cuda')
    z = torch.empty(o.tokens, o.vocab, dtype=torch.bfloat16, device='cuda')
    some = torch.arange(0, o.tokens, max(o.tokens // 64, 1), device='cuda')
    exact = (x[some].double() @ w.double().t()).log_softmax(-1)
    of_target, of_all = exact.gather(1, t[some, None])[:, 0], -(exact.exp() * exact).sum(-1)
    del exact

    def ours(head=w, **options):
        with torch.no_grad():
            return ct.linear_logprob(x, head, t, **options)

    def torch_way():
        with torch.no_grad():
            return F.linear(x, w).float().log_softmax(-1).gather(1, t[:, None])

    def nll():
        with torch.no_grad():
            ct.linear_nll(x, w, t)

    def off(got, want):
        return float((got[some].double() - want).abs().max())

    logp, entropy = ours(entropy=True)
    print('# largest error of log-probabilities %.1e, of entropies %.1e; of those from bf16 logits %.1e' % (
        off(logp, of_target), off(entropy, of_all), off(F.linear(x, w).float().log_softmax(-1).gather(
            1, t[:, None])[:, 0], of_target) if o.tokens <= 8192 else float('nan')))
    lines = [Line('one product', lambda: [torch.mm(x, w.t(), out=z)] and None, (), None)]
    for name, fn in (('linear_logprob', ours), ('linear_logprob, entropy', lambda: ours(entropy=True)),
                     ('linear_logprob, bf16 logits', lambda: ours(ct.Head(w, logits_dtype=torch.bfloat16))),
                     ('linear_logprob, bias', lambda: ours(ct.Head(w, b))),
                     ('linear_logprob, softcap', lambda: ours(ct.Head(w, softcap=30.0))), ('linear_nll', nll),
                     ('torch, fp32 log_softmax', torch_way)):
        lines.append(Line(name, lambda fn=fn: [fn()] and None, (), 'one product'))
    lines = [line for line in lines if not o.only or 'product' in line.name or any(a in line.name for a in o.only)]
    return show(lines, {'want': None}, o.repetitions)


def long(o):
    """Memory of the tokens of a long context or of many: time and peak of one call each, after one that is not counted"""
    rng = torch.Generator('cuda').manual_seed(1)
    draw = lambda *n: torch.randn(*n, generator=rng, device='cuda', dtype=torch.bfloat16)  # noqa: E731
    x, w = draw(o.tokens, o.hidden).requires_grad_(), (draw(o.vocab, o.hidden) * o.hidden ** -0.5).requires_grad_()
    t = torch.randint(0, o.vocab, (o.tokens,), generator=rng, device='cuda')
    w.main_grad = torch.zeros(o.vocab, o.hidden, device='cuda')

    def ours(upstream=None, **options):
        loss = ct.linear_nll(x, ct.Head(w, logits_dtype=torch.bfloat16, **options), t, reduction='sum',
                             **({} if upstream is None else {'upstream': upstream})).loss
        return loss / o.tokens

    lines = [Line('linear_nll, loss', lambda: ct.linear_nll(x, w, t).loss, (x, w), None), Line('the same, bf16 logits', ours, (x, w), None),
             Line('the same, main_grad and upstream', lambda: ours(1 / o.tokens, main_grad=True), (x, w), None, w.main_grad)]
    lines += [Line(name, fn, (x, w), None) for name, fn in peers(x, w, t)]
    lines += [Line('torch.compile, fp32 loss', torch.compile(lambda: F.cross_entropy(F.linear(x, w).float(), t)), (x, w), None),
              Line('torch, bf16 loss', lambda: F.cross_entropy(F.linear(x, w), t), (x, w), None)]
    lines = [line for line in lines if not o.only or any(a in line.name for a in o.only)]
    return show(lines, {'want': None}, min(o.repetitions, 2))


def reader():
    """fn(x) that reads x once, 4 bytes an element, as fast as it goes"""
    import triton
    import triton.language as tl

    @triton.jit
    def read(x, out, n, SIZE: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        tl.store(out + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < n, other=0)))

    def run(x, size=16384):
        words = x.view(torch.int32).view(-1)
        blocks = -(-words.numel() // size)
        read[(blocks,)](words, torch.empty(blocks, dtype=torch.int32, device=x.device), words.numel(), SIZE=size,
                        num_warps=8)
    return run


def logits(o):
    read = reader()
    rng = torch.Generator('cuda').manual_seed(2)
    rows = []
    for tokens in (o.tokens, o.tokens // 2, o.tokens // 4, o.tokens // 8):
        z = torch.randn(tokens, o.vocab, generator=rng, device='cuda').bfloat16().requires_grad_()
        t = torch.randint(0, o.vocab, (tokens,), generator=rng, device='cuda')
        d = torch.empty_like(z)
        zd = z.detach()
        want_z = (zd[:32].double().softmax(-1) - F.one_hot(t[:32], o.vocab)) / tokens

        def both(zd, d):
            read(zd)
            d.copy_(zd)

        def forward(z=z, t=t):
            with torch.no_grad():
                ct.nll(z, t)

        print('# %d tokens' % tokens)
        lines = [Line('a read', lambda zd=zd: read(zd), (), None),
                 Line('a read and a copy', lambda: (zd.view(torch.float32).sum(), d.copy_(zd)) and None, (), None),
                 Line('nll, forward', forward, (), 'a read'),
                 Line('nll', lambda: ct.nll(z, t).loss, (z,), 'a read and a copy'),
                 Line('F.cross_entropy', lambda: F.cross_entropy(z, t), (z,), 'a read and a copy')]
        if tokens == o.tokens:
            lines += [Line(name, fn, (z,), 'a read and a copy') for name, fn in logit_peers(z, t)]
        for row in show(lines, {'want': lambda line: ((z.grad[:32], want_z),)}, o.repetitions):
            rows.append(dict(row, tokens=tokens))
        del z, d, zd, lines
    return rows


def cases(o):
    """What users reported, each compared with the way that hurt. One GPU: of a vocabulary over tp ranks its shard."""
    from torch.utils.checkpoint import checkpoint
    rows = []

    def section(title, lines):
        print('# ' + title)
        for row in show(lines, {'want': None}, max(o.repetitions // 3, 2)):
            rows.append(dict(row, case=title))

    def wanted(title):
        return not o.only or any(a in title for a in o.only)

    def plain(z, t):
        lp = torch.log_softmax(z.float(), -1)
        return lp.gather(-1, t[:, None]).sum() - 0.01 * (lp.exp() * lp).sum()

    def chunked(fn, size, *tensors):
        return sum(checkpoint(fn, *part, use_reentrant=False) for part in zip(*(x.split(size) for x in tensors)))

    def ours(z, t, **options):
        logp, entropy = ct.logprob(z, t, entropy=True, **options)
        return logp.sum() + 0.01 * entropy.sum()

    for title, tokens, vocab, chunk in (
            ('log-probability and entropy together, B 128, S 280, V 151936', 128 * 280, 151936, None),
            ('chunks of 16 tokens, T 16384, the shard of tp 4 (37984 columns)', 16384, 37984, 16)):
        if not wanted(title):
            continue
        z = torch.randn(tokens, vocab, dtype=torch.bfloat16, device='cuda').requires_grad_()
        t = torch.randint(0, vocab, (tokens,), device='cuda')
        lines = [Line('logprob, entropy=True', lambda z=z, t=t: ours(z, t), (z,), None)]
        lines += [Line('torch' + (', checkpointed chunks of %d' % n if n else ''),
                       lambda n=n, z=z, t=t: chunked(plain, n, z, t) if n else plain(z, t), (z,), None)
                  for n in {chunk, chunk or 1024}]
        section(title, lines)
        del z, t, lines
        gc.collect()
        torch.cuda.empty_cache()
    if not wanted('head'):
        return rows
    x = torch.randn(o.tokens, o.hidden, device='cuda').bfloat16().requires_grad_()
    w = (torch.randn(151665, o.hidden, device='cuda') * o.hidden ** -0.5).bfloat16().requires_grad_()
    t = torch.randint(0, 151665, (o.tokens,), device='cuda')

    def loss(part, target):
        return F.cross_entropy(F.linear(part, w).float(), target, reduction='sum')

    section('head of V 151665 in chunks of 256 tokens, T %d' % o.tokens, [
        Line('linear_nll, logprob, chunk_size=256',
             lambda: ct.linear_nll(x, w, target=t, mode='logprob', chunk_size=256, reduction='sum').loss, (x, w), None),
        Line('linear_nll', lambda: ct.linear_nll(x, w, target=t, reduction='sum').loss, (x, w), None),
        Line('torch, checkpointed chunks of 256', lambda: chunked(loss, 256, x, t), (x, w), None)])
    return rows


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (('tokens', 8192), ('hidden', 4096), ('vocab', 152064), ('repetitions', 10)):
        ask.add_argument('--' + name, type=int, default=value)
    ask.add_argument('--only', nargs='*')
    ask.add_argument('--tables', nargs='*', default=['head', 'logits'], choices=['head', 'forward', 'long', 'logits', 'cases'])
    ask.add_argument('--json')
    o = ask.parse_args()
    print('# %s, torch %s, T %d, H %d, V %d, bf16, medians of %d' % (
        torch.cuda.get_device_name(), torch.__version__, o.tokens, o.hidden, o.vocab, o.repetitions))
    rows = []
    for table in o.tables:
        rows += {'head': head, 'forward': forward, 'long': long, 'logits': logits, 'cases': cases}[table](o)
        gc.collect()
        torch.cuda.empty_cache()
    if o.json:
        Path(o.json).write_text(json.dumps({'device': torch.cuda.get_device_name(), 'torch': torch.__version__,
                                            'options': vars(o), 'rows': rows}, indent=2) + '\n')
    ct.shutdown()


if __name__ == '__main__':
    main()
