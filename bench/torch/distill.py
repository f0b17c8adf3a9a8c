#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Distillation straight from hidden states, on one GPU, compared with four bare products and with what others have.

usage: bench/torch/distill.py [--kinds forward_kl reverse_kl jsd ..] [--tokens T --hidden H --teacher H --vocab V]
                              [--repetitions N] [--only WORD ..] [--chunks N ..] [--json FILE]

For each kind a table as head.py prints it: the median time of a forward and backward, all lines taking turns; its ratio to the
limit, which is three bare bf16 products with the student's head and one with the teacher's, one after another; memory beyond
inputs at its peak; the loss, and the relative error of the gradients of some tokens and some rows of the head against fp64.
"unfused": whole logits of both and PyTorch's functions. --chunks: lines of mode "loss" with so many tokens a chunk. "over_chunks": distill() in chunks of 2,048. Liger's
fused_linear_jsd and TRL's GKD loss of whole logits are left out where they are not installed.
"""
import argparse
import ast
import importlib.util
import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python'), str(Path(__file__).resolve().parent)]
import colobridge.torch as ct  # noqa: E402
from head import Line, show  # noqa: E402

BETA = {'forward_kl': 0.0, 'reverse_kl': 1.0, 'jsd': 0.5}  # GKD's: its ends are the two KLs


def divergence(kind, lp, lq):
    """D of each token, of the logarithms of the student's and of the teacher's probabilities"""
    if kind == 'forward_kl':
        return (lq.exp() * (lq - lp)).sum(-1)
    if kind == 'reverse_kl':
        return (lp.exp() * (lp - lq)).sum(-1)
    if kind == 'jsd':
        lm = torch.logaddexp(lp, lq) - torch.tensor(2.0, dtype=lp.dtype).log()
        return ((lq.exp() * (lq - lm)).sum(-1) + (lp.exp() * (lp - lm)).sum(-1)) / 2
    tv = (lp.exp() - lq.exp()).abs().sum(-1) / 2
    return tv if kind == 'tv' else -torch.log1p(-tv)


def trl_gkd():
    """The loss of TRL's GKDTrainer, out of its source: to import the trainer takes packages that the loss does not need"""
    source = Path(importlib.util.find_spec('trl').origin).with_name('experimental') / 'gkd' / 'gkd_trainer.py'
    loss, = (node for node in ast.walk(ast.parse(source.read_text()))
             if isinstance(node, ast.FunctionDef) and node.name == 'generalized_jsd_loss')
    loss.decorator_list = []
    names = {'torch': torch, 'F': torch.nn.functional}
    exec(compile(ast.Module([loss], []), str(source), 'exec'), names)
    return names['generalized_jsd_loss']


def peers(kind, x, w, tx, tw):
    """(name, fn) of what is installed and has the kind"""
    found = []
    if kind not in BETA:
        return found
    try:
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction
        found.append(('Liger, fused_linear_jsd', lambda: LigerFusedLinearJSDFunction.apply(x, w, tx, tw, None, BETA[kind])))
    except Exception as why:
        print('# no Liger: %s' % str(why).splitlines()[:1])
    try:
        gkd = trl_gkd()
        found.append(('TRL, generalized_jsd_loss of whole logits',
                      lambda: gkd(x[None] @ w.t(), (tx[None] @ tw.t()).detach(), beta=BETA[kind], reduction='sum') / len(x)))
    except Exception as why:
        print('# no TRL: %s' % str(why).splitlines()[:1])
    return found


def truth(kind, o, x, w, tx, tw, some, words):
    """(loss, gradients of hidden of tokens @some, and of rows @words of the head), fp64, some tokens at a time"""
    loss, d_w, d_x = 0.0, torch.zeros(len(words), x.shape[1], dtype=torch.float64, device=x.device), []
    wanted = set(some.tolist())
    w64, tw64 = w.detach().double(), tw.double()
    for at in range(0, len(x), 128):
        h = x.detach()[at:at + 128].double()
        z = (h @ w64.t()).requires_grad_()
        d = divergence(kind, z.log_softmax(-1), (tx[at:at + 128].double() @ tw64.t()).log_softmax(-1)).sum() / o.tokens
        g, = torch.autograd.grad(d, z)
        loss += float(d.detach())
        d_w += g[:, words].t() @ h
        keep = [i for i in range(len(h)) if at + i in wanted]
        d_x.append(g[keep] @ w64)
    return loss, torch.cat(d_x), d_w


def table(kind, o):
    rng = torch.Generator('cuda').manual_seed(1)
    draw = lambda *n: torch.randn(*n, generator=rng, device='cuda')  # noqa: E731
    x, tx = draw(o.tokens, o.hidden).bfloat16().requires_grad_(), draw(o.tokens, o.teacher).bfloat16()
    w, tw = ((draw(o.vocab, n) * n ** -0.5).bfloat16() for n in (o.hidden, o.teacher))
    w.requires_grad_()
    some, words = (torch.arange(0, n, max(n // 16, 1), device='cuda') for n in (o.tokens, o.vocab))
    loss, want_x, want_w = truth(kind, o, x, w, tx, tw, some, words)
    torch.cuda.empty_cache()
    print('# %s, T %d, H %d and %d, V %d: loss in fp64 %.6f' % (kind, o.tokens, o.hidden, o.teacher, o.vocab, loss))
    z, y, dh, dw = (torch.empty(*n, dtype=torch.bfloat16, device='cuda') for n in (
        (o.tokens, o.vocab), (o.tokens, o.vocab), (o.tokens, o.hidden), (o.vocab, o.hidden)))
    xd, wd = x.detach(), w.detach()

    def products(more):
        for _ in range(1 + more):
            torch.mm(xd, wd.t(), out=z)
            torch.mm(tx, tw.t(), out=y)
        torch.mm(z, wd, out=dh)
        torch.mm(z.t(), xd, out=dw)

    def unfused():
        lp, lq = (x @ w.t()).float().log_softmax(-1), (tx @ tw.t()).float().log_softmax(-1)
        return divergence(kind, lp, lq).mean()

    def chunked():
        return ct.over_chunks(lambda z, rows: ct.distill(z, tx[rows] @ tw.t(), kind=kind, reduction='none'), x, w).mean()

    four, six = 'four products', 'six products'
    lines = [Line(four, lambda: products(0), (), None), Line(six, lambda: products(1), (), None),
             Line('linear_distill, loss', lambda: ct.linear_distill(x, w, tx, tw, kind=kind).loss, (x, w), four),
             Line('linear_distill, logprob', lambda: ct.linear_distill(x, w, tx, tw, kind=kind, mode='logprob').loss, (x, w), six),
             Line('linear_distill, loss, bf16 logits', lambda: ct.linear_distill(
                 x, ct.Head(w, logits_dtype=torch.bfloat16), tx, ct.Head(tw, logits_dtype=torch.bfloat16), kind=kind).loss, (x, w), four),
             Line('over_chunks of distill', chunked, (x, w), four), Line('unfused PyTorch', unfused, (x, w), four)]
    for n in o.chunks:
        for name, dtype in (('', None), (', bf16 logits', torch.bfloat16)):
            lines.append(Line('linear_distill, loss, chunks of %d%s' % (n, name), lambda n=n, d=dtype: ct.linear_distill(
                x, ct.Head(w, logits_dtype=d), tx, ct.Head(tw, logits_dtype=d), kind=kind, chunk_size=n).loss, (x, w), four))
    lines += [Line(name, fn, (x, w), four) for name, fn in peers(kind, x, w, tx, tw)]
    lines = [line for line in lines if not o.only or 'products' in line.name or any(a in line.name for a in o.only)]
    wanted = {'want': lambda line: ((x.grad[some], want_x), (w.grad[words], want_w))}
    return [dict(row, kind=kind) for row in show(lines, wanted, o.repetitions)]


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (('tokens', 8192), ('hidden', 4096), ('teacher', 4096), ('vocab', 151936), ('repetitions', 10)):
        ask.add_argument('--' + name, type=int, default=value)
    ask.add_argument('--kinds', nargs='*', default=['forward_kl', 'reverse_kl', 'jsd'],
                     choices=['forward_kl', 'reverse_kl', 'jsd', 'tv', 'acceptance'])
    ask.add_argument('--only', nargs='*')
    ask.add_argument('--chunks', nargs='*', type=int, default=[])
    ask.add_argument('--json')
    o = ask.parse_args()
    rows = []
    for kind in o.kinds:
        rows += table(kind, o)
        torch.cuda.empty_cache()
    ct.shutdown()
    if o.json:
        Path(o.json).write_text(json.dumps({'gpu': torch.cuda.get_device_name(), 'torch': torch.__version__, 'rows': rows}, indent=1))


if __name__ == '__main__':
    main()
