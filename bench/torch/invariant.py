#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The logits path with 8 segments of the vocabulary (invariant=True) and without, on one GPU.

    bench/torch/invariant.py [--tokens 8192] [--vocabulary 151936]

Both take turns twice; the smaller of two medians of 10 runs of 3 calls in a row.
"""
import argparse
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge.torch as ct  # noqa: E402
from support import median_us


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--tokens', type=int, default=8192)
    parser.add_argument('--vocabulary', type=int, default=151936)
    args = parser.parse_args()
    z = torch.randn(args.tokens, args.vocabulary, device='cuda', dtype=torch.bfloat16)
    t = torch.randint(0, args.vocabulary, (args.tokens,), device='cuda')
    leaf = z.detach().requires_grad_()

    def forward_us(**more):
        with torch.no_grad():
            return median_us(lambda: ct.logprob(z, t, **more), 10, 3)

    def backward_us(**more):
        out = ct.logprob(leaf, t, **more)
        out = out if isinstance(out, tuple) else (out,)
        up = [torch.ones_like(o) for o in out]
        return median_us(lambda: torch.autograd.grad(out, leaf, up, retain_graph=True), 10, 3)
    forward_us()
    print('%s, PyTorch %s, %d tokens, vocabulary %d, bf16' % (
        torch.cuda.get_device_name(), torch.__version__, args.tokens, args.vocabulary))
    print('| pass | us | with segments | times |\n|---|---:|---:|---:|')
    for name, us in (('forward', forward_us), ('backward', backward_us)):
        for entropy in (False, True):
            without, segments = (min(of) for of in zip(*[
                (us(entropy=entropy), us(entropy=entropy, invariant=True)) for _ in range(2)]))
            print('| %s%s | %.0f | %.0f | %.3f |' % (name, ', entropy' * entropy, without, segments, segments / without))


if __name__ == '__main__':
    main()
