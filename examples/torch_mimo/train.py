# SPDX-License-Identifier: Apache-2.0
"""Trains a small vision-encoder + language model whose halves lie on the same ranks in two layouts.

    torchrun --nproc-per-node 4 train.py                          # processes, gloo
    torchrun --nproc-per-node 4 train.py --device cuda            # GPUs
    torchrun --nproc-per-node 4 train.py --exchange plain         # bridge and loss on torch.distributed
    torchrun --nproc-per-node 4 train.py --compare --dtype float64 --steps 20
    torchrun --nproc-per-node 4 train.py --ragged                 # images of any size, 0 to 3 per sample
    torchrun --nproc-per-node 4 train.py --ragged --src dp=4 --exchange towers      # the encoder image by image

Rank 0 prints a JSON line a step and one at the end. --compare computes every step's loss and raw
gradients through all exchanges, from the same weights, and fails where they differ.
"""
import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from exchange import KINDS  # noqa: E402
from model import IMAGE_ROWS, TEXT, Encoder, LanguageModel, Weights  # noqa: E402
from ranks import Side  # noqa: E402

WORDS = 'zero one two three four five six seven eight nine'.split()
DIGITS = Path(__file__).resolve().parents[1] / 'captioner/data/digits.csv'


def options(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument('--src', default='tp=2,dp=2', help="the encoder's grid (default %(default)s)")
    p.add_argument('--dst', default='tp=2,cp=2,dp=1', help="the language model's (default %(default)s)")
    p.add_argument('--exchange', choices=[*KINDS, 'towers'], default='library')
    p.add_argument('--compare', action='store_true', help='all exchanges, at every step')
    p.add_argument('--ragged', action='store_true', help='0 to 3 images per sample, cropped to their ink')
    p.add_argument('--steps', type=int, default=200)
    p.add_argument('--batch', type=int, default=64, help='samples of all ranks')
    p.add_argument('--width', type=int, default=64)
    p.add_argument('--dtype', choices=['float32', 'float64'], default='float32')
    p.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    p.add_argument('--seed', type=int, default=1)
    return p.parse_args(argv)


def load(device, dtype):
    """(patches [n, 16, 4], bytes [n, 6])"""
    rows = torch.tensor([[int(v) for v in line.split(',')] for line in DIGITS.read_text().split()])
    image = rows[:, :64].view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, IMAGE_ROWS, 4)
    names = torch.zeros(10, TEXT, dtype=torch.int64)
    for i, word in enumerate(WORDS):
        names[i, :len(word)] = torch.tensor(list(word.encode()))
    return (image.to(dtype) / 16).to(device), names[rows[:, 64]].to(device)


class Run:
    kinds = KINDS

    def __init__(self, o):
        self.o = o
        self.device = torch.device('cuda', torch.cuda.current_device()) if o.device == 'cuda' \
            else torch.device('cpu')
        self.dtype = getattr(torch, o.dtype)
        self.src, self.dst = Side(o.src), Side(o.dst)
        for name, side in (('src', self.src), ('dst', self.dst)):
            if side.grid.size != dist.get_world_size() or o.batch % side.extent('dp'):
                raise SystemExit("--%s %s has %d ranks, there are %d; dp=%d must divide --batch %d"
                                 % (name, side.spec, side.grid.size, dist.get_world_size(),
                                    side.extent('dp'), o.batch))
        self.exchanges = {name: self.kinds[name](self.src, self.dst)
                          for name in (self.kinds if o.compare else [o.exchange]) if name != 'towers' or self.towers()}
        if not self.exchanges:
            raise SystemExit('--exchange towers has the whole encoder on every rank: pass --ragged --src dp=%d'
                             % dist.get_world_size())
        self.patches, self.text = load(self.device, self.dtype)
        test = torch.arange(len(self.text)) % 6 == 5
        self.train, self.test = (~test).nonzero().flatten(), test.nonzero().flatten()
        self.rng = torch.Generator().manual_seed(o.seed)
        self.models(o)
        self.parameters = list(self.encoder.parameters()) + list(self.lm.parameters())
        self.adam = torch.optim.Adam(self.parameters, lr=3e-3)

    def towers(self):
        """Is the whole encoder on every rank?"""
        return 'towers' in self.kinds and self.src.extent('dp') == dist.get_world_size()

    def models(self, o):
        self.encoder = Encoder(Weights(o.seed, self.src, self.dtype, self.device), o.width)
        self.lm = LanguageModel(Weights(o.seed + 1, self.dst, self.dtype, self.device), o.width, 4, 2)

    def draw(self, among, count):
        return among[torch.randint(len(among), (count,), generator=self.rng)]

    def groups(self):
        """Which ranks share the parameters of each half."""
        return (self.encoder, self.src.group('dp')), (self.lm, self.dst.group('cp', 'dp'))

    def after_step(self):
        pass

    def table(self):
        return []

    def mine(self, side, picked):
        """This rank's samples of a batch, by dp."""
        each = len(picked) // side.extent('dp')
        return picked.narrow(0, side.coord('dp') * each, each)

    def hidden(self, exchange, picked):
        image = exchange.bridge(self.encoder(self.patches[self.mine(self.src, picked)]))
        text = self.text[self.mine(self.dst, picked)]
        return self.lm(image, text), self.lm.targets(text)

    def step(self, exchange, picked):
        """(loss, raw gradients): forward, backward, sums over the ranks that share a parameter."""
        for p in self.parameters:
            p.grad = None
        hidden, targets = self.hidden(exchange, picked)
        loss = exchange.loss(hidden, self.lm.head, targets)
        loss.backward()
        for module, group in self.groups():
            for p in module.parameters():
                if group is not None:
                    dist.all_reduce(p.grad, group=group)
        return float(loss.detach()), [p.grad for p in self.parameters]

    def differ(self, want, got):
        """Largest relative difference of loss and gradients, over all ranks."""
        worst = abs(want[0] - got[0]) / max(abs(want[0]), 1e-30)
        for a, b in zip(want[1], got[1]):
            worst = max(worst, float((a - b).norm() / a.norm().clamp(min=1e-30)))
        worst = torch.tensor(worst, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def best(self, hidden):
        """The likeliest byte at each position."""
        best, at = (hidden @ self.lm.head.t()).max(-1)
        at = at + self.dst.coord('tp') * self.lm.head.shape[0]
        if self.dst.group('tp') is not None:
            top = best.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.dst.group('tp'))
            at = torch.where(best == top, at, torch.zeros_like(at))
            dist.all_reduce(at, op=dist.ReduceOp.MAX, group=self.dst.group('tp'))
        return at

    def accuracy(self):
        """Share of held-out captions whose every byte is the likeliest one, given those before it."""
        exchange = next(iter(self.exchanges.values()))
        unit = self.src.extent('dp') * self.dst.extent('dp')
        picked = self.test[:len(self.test) // unit * unit]
        with torch.no_grad():
            hidden, targets = self.hidden(exchange, picked)
            wrong = ((self.best(hidden) != targets) & (targets != -100)).sum(1)
            if self.dst.group('cp') is not None:
                dist.all_reduce(wrong, group=self.dst.group('cp'))
            right = (wrong == 0).sum().double()
            if self.dst.group('dp') is not None:
                dist.all_reduce(right, group=self.dst.group('dp'))
        return float(right) / len(picked)

    def __call__(self):
        """[losses]; raises where --compare finds a difference."""
        # f32: sums of some 10^4 terms in other orders; f64: the same with 2^-53.
        bound = 2e-4 if self.dtype == torch.float32 else 1e-10
        losses, say = [], dist.get_rank() == 0
        for step in range(self.o.steps):
            picked = self.draw(self.train, self.o.batch)
            seen = {}
            for name, exchange in self.exchanges.items():
                loss, grads = self.step(exchange, picked)
                seen[name] = loss, [g.clone() for g in grads] if self.o.compare else grads
            line = {'step': step, 'loss': loss}
            if self.o.compare:
                line['differ'] = {n: self.differ(seen['plain'], seen[n]) for n in seen if n != 'plain'}
                if not max(line['differ'].values()) <= bound:
                    raise AssertionError('step %d: loss or gradients differ by %s from plain, expected '
                                         'at most %g' % (step, line['differ'], bound))
            self.adam.step()
            self.after_step()
            losses.append(loss)
            if say:
                print(json.dumps(line), flush=True)
        self.right = self.accuracy()
        if say:
            print(json.dumps({'exact': self.right, 'steps': self.o.steps}), flush=True)
        for line in self.table():
            if say:
                print(line, flush=True)
        return losses


def made(o):
    """The run of these options."""
    if o.ragged:
        from ragged import RaggedRun
        return RaggedRun(o)
    return Run(o)


def main():
    o = options()
    local = int(os.environ.get('LOCAL_RANK', '0'))
    if o.device == 'cuda':
        torch.cuda.set_device(local)
        dist.init_process_group('nccl')
    else:
        torch.set_num_threads(1)
        dist.init_process_group('gloo')
    made(o)()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
