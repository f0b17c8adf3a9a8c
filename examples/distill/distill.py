#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation (GKD) of a small language model from a wider one, straight from the hidden states of both.

usage: python examples/distill/distill.py [--steps 60] [--kind reverse_kl]
       torchrun --nproc-per-node 2 examples/distill/distill.py          # the heads' vocabulary over 2 ranks

The student writes sequences, the teacher judges each of their tokens, and neither model's logits exist as a whole. Prints the
divergence at the first step and at the last; exit status 1: it did not fall to two thirds. Downloads nothing; runs on processors.
"""
import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == '__main__':
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge.torch as ct  # noqa: E402

VOCAB, PADDED, LENGTH, BATCH = 61, 64, 12, 16


class Model(torch.nn.Module):
    """A language model that remembers by a GRU. Its head has the rows of a padded vocabulary."""

    def __init__(self, width, padded, seed):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed, self.body = torch.nn.Embedding(VOCAB, width), torch.nn.GRU(width, width, batch_first=True)
            self.head = torch.nn.Linear(width, padded)

    def forward(self, tokens):
        return self.body(self.embed(tokens))[0]  # hidden states [B, S, H]


def written(model, seed):
    """Sequences [BATCH, LENGTH] that the model writes; the same on all ranks, for the seed is"""
    rng, tokens = torch.Generator().manual_seed(seed), torch.zeros(BATCH, 1, dtype=torch.int64)
    with torch.no_grad():
        while tokens.shape[1] < LENGTH:
            p = model.head(model(tokens)[:, -1])[:, :VOCAB].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=rng)], 1)
    return tokens


def distilled(steps, kind, rank=0, ranks=1, group=None):
    """The divergence in each step"""
    student, teacher = Model(16, VOCAB, 1), Model(48, PADDED, 2)
    with torch.no_grad():
        teacher.head.weight.mul_(8)  # a teacher that is sure of something
    begin, end = VOCAB * rank // ranks, VOCAB * (rank + 1) // ranks
    rows = lambda model: ct.Head(model.head.weight[begin:end], model.head.bias[begin:end], tp_group=group, vocab=(begin, VOCAB))  # noqa: E731
    optimizer, seen = torch.optim.Adam(student.parameters(), lr=2e-2), []
    for step in range(steps):
        tokens = written(student, step)
        with torch.no_grad():
            judged = teacher(tokens)
        loss = ct.linear_distill(student(tokens), rows(student), judged, rows(teacher), kind=kind).loss
        optimizer.zero_grad()
        loss.backward()
        if ranks > 1:  # a rank has the gradient of its rows of the head, and all of the rest
            for p in student.head.parameters():
                dist.all_reduce(p.grad, group=group)
        optimizer.step()
        seen.append(loss.item())
    return seen


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ask.add_argument('--steps', type=int, default=60)
    ask.add_argument('--kind', default='reverse_kl', choices=['forward_kl', 'reverse_kl', 'jsd', 'tv', 'acceptance'])
    o = ask.parse_args()
    ranks = int(os.environ.get('WORLD_SIZE', 1))
    if ranks > 1:
        dist.init_process_group('gloo')
    rank = dist.get_rank() if ranks > 1 else 0
    seen = distilled(o.steps, o.kind, rank, ranks, dist.group.WORLD if ranks > 1 else None)
    if rank == 0:
        print('%s of %d tokens a step: %.4f at the first, %.4f at the last' % (o.kind, BATCH * LENGTH, seen[0], seen[-1]))
    ct.shutdown()
    if ranks > 1:
        dist.destroy_process_group()
    sys.exit(seen[-1] > seen[0] * 2 / 3)


if __name__ == '__main__':
    main()
