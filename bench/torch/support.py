#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over a recorded support compared with those over the vocabulary, on one GPU.

    bench/torch/support.py [--tokens 4096] [--vocabulary 151936] [--ids 64,512,4096] [--sampling]

Medians of 20 runs of 10 calls in a row, between events of the stream: what the GPU takes if that is more than what
Python takes. The lists are random and in ascending order already, as a sampler keeps them. Limits of the same run:
torch.gather() of the same ids from the same logits, and writing zeros to the whole gradient.

--sampling: instead, compat.from_parallel_logits_to_logprobs() with top_k and top_p, and the same in plain torch: topk()
for top_k alone, else sort(), cumsum() and scatter(), then masked_fill(), log_softmax() and gather(). Medians of 5 calls.
Memory is the peak of forward and backward beyond what was there before. "differs": tokens whose logp is not within 1e-3
of plain torch's, where sums are in f32 and a top_k keeps all ids that equal the k-th.
"""
import argparse
import statistics
import sys
import types
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge import compat  # noqa: E402

SAMPLED = ((50, 1.0), (50, 0.95), (1024, 1.0), (1024, 0.95), (0, 0.95))  # top_k (0: all), top_p


def median_us(call, runs=20, in_a_row=10):
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(in_a_row):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / in_a_row)
    return statistics.median(times)


def plain(z, t, top_k, top_p):
    """logp [T] of t [T] over the ids of z [T, V] that top_k and top_p keep, without the library"""
    with torch.no_grad():
        if top_p == 1:
            mask = z >= z.topk(top_k)[0][:, -1:]
        else:
            ordered, ids = z.sort(descending=True)
            if top_k:
                ordered[:, top_k:] = -float('inf')
            p = ordered.float().softmax(1)
            mask = torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids, p.cumsum(1) - p < top_p)
    return z.masked_fill(~mask, -float('inf')).float().log_softmax(1).gather(1, t[:, None])[:, 0]


def sampling(z):
    t = z.topk(20)[1].gather(1, torch.randint(0, 20, (len(z), 1), device='cuda'))[:, 0]  # most of them are kept
    comm, leaf = cb.Comm.self(), z.detach().requires_grad_()

    def library(z, t, top_k, top_p):
        return compat.from_parallel_logits_to_logprobs(
            z[None], t[None], 0, z.shape[1], comm, sampling_params=types.SimpleNamespace(top_k=top_k, top_p=top_p),
            target_is_pre_rolled=True)[0]
    print('| top_k | top_p | way | forward, us | backward, us | memory, MiB | differs |')
    print('|---:|---:|---|---:|---:|---:|---:|')
    for top_k, top_p in SAMPLED:
        logp = {}
        for way in (plain, library):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = way(leaf, t, top_k, top_p)
            torch.autograd.grad(out.sum(), leaf, retain_graph=True)
            peak = torch.cuda.max_memory_allocated() - before
            ones = torch.ones_like(out)
            back = median_us(lambda: torch.autograd.grad(out, leaf, ones, retain_graph=True), 5, 1)
            logp[way] = out.detach()[:len(z) - 1]
            del out
            with torch.no_grad():
                forward = median_us(lambda: way(z, t, top_k, top_p), 5, 1)
            off = ~torch.isclose(logp[way], logp.get(plain, logp[way]), rtol=0, atol=1e-3)
            print('| %s | %g | %s | %.0f | %.0f | %.0f | %s |' % (
                top_k or 'all', top_p, way.__name__, forward, back, peak / 2**20, int(off.sum())), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--tokens', type=int, default=4096)
    parser.add_argument('--vocabulary', type=int, default=151936)
    parser.add_argument('--ids', default='64,512,4096')
    parser.add_argument('--sampling', action='store_true')
    args = parser.parse_args()
    z = torch.randn(args.tokens, args.vocabulary, device='cuda', dtype=torch.bfloat16)
    t = torch.randint(0, args.vocabulary, (args.tokens,), device='cuda')
    print('%s, PyTorch %s, %d tokens, vocabulary %d, bf16' % (
        torch.cuda.get_device_name(), torch.__version__, args.tokens, args.vocabulary))
    if args.sampling:
        return sampling(z)
    print('| ids per token | forward, us | of the full | gather of the ids, us | backward, us | of the full | '
          'of zeros |')
    print('|---:|---:|---:|---:|---:|---:|---:|')
    leaf = z.detach().requires_grad_()

    def backward_us(**more):
        out = ct.logprob(leaf, t, **more)
        ones = torch.ones_like(out)
        return median_us(lambda: torch.autograd.grad(out, leaf, ones, retain_graph=True))

    def forward_us(**more):
        with torch.no_grad():
            return median_us(lambda: ct.logprob(z, t, **more))
    full, full_back = forward_us(), backward_us()
    zeros = torch.empty_like(z)
    zero = median_us(zeros.zero_)
    print('| all | %.0f | 1 | | %.0f | 1 | %.2f |' % (full, full_back, full_back / zero))
    for width in map(int, args.ids.split(',')):
        ids = torch.randint(0, args.vocabulary, (args.tokens, width), device='cuda').sort(1)[0]
        support = ct.Support(ids, ascending=True)
        some, back = forward_us(support=support), backward_us(support=support)
        gather = median_us(lambda: torch.gather(z, 1, ids))
        print('| %d | %.0f | %.3f | %.0f | %.0f | %.3f | %.2f |' % (
            width, some, some / full, gather, back, back / full_back, back / zero))
    print('zeros to the gradient: %.0f us, %.2f TB/s' % (zero, zeros.numel() * 2 / zero * 1e-6))


if __name__ == '__main__':
    main()
