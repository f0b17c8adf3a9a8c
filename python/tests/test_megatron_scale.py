# SPDX-License-Identifier: Apache-2.0
"""The encoder's gradient in Megatron's terms, where its DDP is over other ranks than the LLM's: each row of the table of
docs/guides/megatron.md, whose factor is read from there, against one process that has all samples."""
import re

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

from colobridge.megatron import ColocatedBridgeCommunicator, HyperCommGrid  # noqa: E402
from ragged_case import coord  # noqa: E402
from test_megatron import with_subgroups  # noqa: E402
from test_pages import DOCS  # noqa: E402

SAMPLES, ROWS, IN, H, MICRO = 8, 8, 3, 5, 2
PAIRS = [('tp=1,dp=4', 'tp=2,dp=2'), ('tp=2,dp=2', 'tp=1,cp=2,dp=2'), ('tp=1,cp=2,dp=2', 'tp=4,dp=1'), ('tp=4,dp=1', 'tp=2,cp=2,dp=1'),
         ('tp=1,dp=4', 'tp=1,cp=2,dp=2')]
LOSSES = ['own', 'own in the collective', 'legacy', 'per token', 'nll']


def factor(row, encoder, llm):
    """What the page has in a row of its table."""
    text = (DOCS / 'guides/megatron.md').read_text()
    table = re.findall(r'^\|.*\| `grad_scale=([EL/1 ]+)` \|$', text[text.index('\n## Scale of gradients'):], re.M)
    assert len(table) == len(LOSSES)
    return eval(table[LOSSES.index(row)], {'E': encoder, 'L': llm})


def zigzag(whole, at, n):
    chunks = whole.chunk(2 * n, 1)
    return whole if n == 1 else torch.cat((chunks[at], chunks[2 * n - 1 - at]), 1)


def held(spec, rank, whole):
    """This rank's [samples, rows] of a micro-batch."""
    (d, dp), (c, cp) = coord(spec, rank, 'dp'), coord(spec, rank, 'cp')
    return zigzag(whole.chunk(dp)[d], c, cp)


def case():
    make = torch.Generator().manual_seed(11)
    pixels = torch.randn(MICRO, SAMPLES, ROWS, IN, generator=make, dtype=torch.float64)
    counts = torch.rand(MICRO, SAMPLES, ROWS, generator=make) < torch.linspace(0.2, 0.9, SAMPLES).view(1, SAMPLES, 1)
    torch.manual_seed(3)
    return pixels, counts.double(), torch.nn.Linear(IN, H, dtype=torch.float64), torch.nn.Linear(H, 1, dtype=torch.float64)


def per_token(llm, hidden):
    return torch.tanh(llm(hidden)).squeeze(-1) ** 2


def whole(loss, spec):
    """Gradients of encoder and LLM by the formula of each loss, of one process."""
    pixels, counts, encoder, llm = case()
    dp, cp = coord(spec, 0, 'dp')[1], coord(spec, 0, 'cp')[1]
    total = 0
    for k in range(MICRO):
        tokens, mask = per_token(llm, encoder(pixels[k])), counts[k]
        parts = [[(zigzag(t, c, cp), zigzag(m, c, cp)) for c in range(cp)] for t, m in zip(tokens.chunk(dp), mask.chunk(dp))]
        if loss.startswith('own'):  # the mean of the means of all dp x cp ranks
            total = total + sum((t * m).sum() / m.sum() for of in parts for t, m in of) / (dp * cp * MICRO)
        elif loss == 'legacy':  # of the means of all replicas
            total = total + sum((t * m).sum() / m.sum() for t, m in zip(tokens.chunk(dp), mask.chunk(dp))) / (dp * MICRO)
        elif loss == 'nll':
            total = total + (tokens * mask).sum() / mask.sum() / MICRO
        else:
            total = total + (tokens * mask).sum() / counts.sum()
    total.backward()
    return [p.grad for model in (encoder, llm) for p in model.parameters()]


def grid(spec):
    dims = [dim.split('=') for dim in spec.split(',')]
    made = HyperCommGrid([int(n) for _, n in dims], [name for name, _ in dims])
    if 'cp' in made.dim_names:
        made.create_pg('cp')
    names = [name for name in ('cp', 'dp') if name in made.dim_names]
    return made, made.create_pg(names) if names != ['cp'] else made.get_pg('cp')


def reduced(model, group, average):
    """As Megatron's DDP leaves gradients: a sum if per token, else an average, which AVG of NCCL makes alike."""
    for p in model.parameters():
        p.grad /= dist.get_world_size(group) if average else 1
        dist.all_reduce(p.grad, group=group)


def step(rank, src, dst, loss, scaled):
    pixels, counts, encoder, llm = case()
    (src_grid, of_encoder), (dst_grid, of_llm) = grid(src), grid(dst)
    E, L = dist.get_world_size(of_encoder), dist.get_world_size(of_llm)
    bridge = ColocatedBridgeCommunicator(src_grid, dst_grid, algo='exact', output='sharded',
                                         grad_scale=factor(loss, E, L) if scaled else 1.0)
    seen = torch.zeros((), dtype=torch.float64)
    for k in range(MICRO):
        hidden = bridge.communicate(encoder(held(src, rank, pixels[k])))
        mask = held(dst, rank, counts[k])
        total = (per_token(llm, hidden) * mask).sum()
        if loss.startswith('own'):  # loss_func returns (sum, number, ..), the schedule divides
            total = total / mask.sum() / MICRO
        elif loss == 'legacy':  # it returns (part of the replica's mean, ..), the schedule multiplies by cp
            of_replica = counts[k].chunk(coord(dst, rank, 'dp')[1])[coord(dst, rank, 'dp')[0]]
            total = total / of_replica.sum() * coord(dst, rank, 'cp')[1] / MICRO
        elif loss == 'nll':
            total = total / counts[k].sum() * L / MICRO
        seen += mask.sum()
        total.backward()
    average = loss != 'per token'
    reduced(encoder, of_encoder, average), reduced(llm, of_llm, average)
    if not average:
        dist.all_reduce(seen, group=of_llm)
        for p in (*encoder.parameters(), *llm.parameters()):
            p.grad /= seen
    bridge.destroy(), src_grid.destroy(), dst_grid.destroy()
    off = [float((p.grad - want).abs().max() / want.abs().max()) for p, want in zip(
        (*encoder.parameters(), *llm.parameters()), whole(loss, dst))]
    return max(off[:2]), max(off[2:]), factor(loss, E, L)


def run(rank, *args):
    return with_subgroups(step, rank, *args)


@pytest.mark.parametrize('loss', LOSSES)
@pytest.mark.parametrize('src, dst', PAIRS)
def test_the_factor_of_the_table_gives_the_gradient_of_one_process(world, src, dst, loss):
    for encoder, llm, scale in world.run(run, src, dst, loss, True):
        assert encoder < 1e-12 and llm < 1e-12, (encoder, llm, scale)
    if scale != 1:
        for encoder, llm, scale in world.run(run, src, dst, loss, False):
            assert abs(encoder - abs(1 / scale - 1)) < 1e-9 and llm < 1e-12, (encoder, llm, scale)
