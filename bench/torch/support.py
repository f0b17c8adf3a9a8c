#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over a recorded support compared with those over the vocabulary, on one GPU.

    bench/torch/support.py [--tokens 4096] [--vocabulary 151936] [--ids 64,512,4096]

Medians of 20 runs of 10 calls in a row, between events of the stream: what the GPU takes if that is more than what
Python takes. The lists are random and in ascending order already, as a sampler keeps them. Limits of the same run:
torch.gather() of the same ids from the same logits, and writing zeros to the whole gradient.
"""
import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge.torch as ct  # noqa: E402


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--tokens', type=int, default=4096)
    parser.add_argument('--vocabulary', type=int, default=151936)
    parser.add_argument('--ids', default='64,512,4096')
    args = parser.parse_args()
    z = torch.randn(args.tokens, args.vocabulary, device='cuda', dtype=torch.bfloat16)
    t = torch.randint(0, args.vocabulary, (args.tokens,), device='cuda')
    print('%s, PyTorch %s, %d tokens, vocabulary %d, bf16' % (
        torch.cuda.get_device_name(), torch.__version__, args.tokens, args.vocabulary))
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
