# SPDX-License-Identifier: Apache-2.0
"""Who adds up which gradient, by the table of docs/guides/pytorch.md: a captioner on four ranks, whose gradients are added up
as its rows say and no further, against one process."""
import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from ragged_case import coord  # noqa: E402
from test_pages import groups  # noqa: E402

SAMPLES, LENGTH, IN, H, WORDS = 4, 8, 3, 6, 24
ROWS, POS = [3, 0, 2, 4], [1, 0, 5, 2]  # of each sample's image
PAIRS = [('dp=4', 'tp=2,cp=2,dp=1'), ('tp=2,dp=2', 'tp=2,dp=2'), ('dp=4', 'cp=2,dp=2'), ('tp=2,dp=2', 'cp=4,dp=1'), ('cp=2,dp=2', 'tp=4,dp=1')]
HEADS = ['linear_nll', 'logits', 'replicated', 'sharded']


def along(spec, *names):
    """This rank's group of the ranks that differ in coordinates along these dims alone."""
    of = {}
    for r in range(4):
        of.setdefault(tuple(coord(spec, r, n)[0] for n in ('tp', 'cp', 'dp') if n not in names), []).append(r)
    return groups(*of.values())


def cut(spec, rank, whole):
    (d, dp), (c, cp) = coord(spec, rank, 'dp'), coord(spec, rank, 'cp')
    mine = whole.chunk(dp)[d]
    chunks = mine.chunk(2 * cp, 1)
    return mine if cp == 1 else torch.cat((chunks[c], chunks[2 * cp - 1 - c]), 1)


class Copied(torch.autograd.Function):
    """What goes to columns of a weight on each tp rank: its gradient is the sum over tp, as layers of Megatron have it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


def model():
    torch.manual_seed(8)
    make = dict(dtype=torch.float64)
    return torch.nn.ModuleDict({'encoder': torch.nn.Linear(IN, H, **make), 'words': torch.nn.Embedding(WORDS, H, **make),
                                'layer': torch.nn.Linear(H, H, **make), 'head': torch.nn.Linear(H, WORDS, bias=False, **make)})


def batch():
    make = torch.Generator().manual_seed(4)
    tokens, targets = torch.randint(0, WORDS, (2, SAMPLES, LENGTH), generator=make)
    targets[torch.rand(SAMPLES, LENGTH, generator=make) < 0.3] = -100
    return tokens, targets, [torch.randn(n, IN, generator=make, dtype=torch.float64) for n in ROWS]


def whole():
    net, (tokens, targets, images) = model(), batch()
    hidden = net['words'](tokens)
    index = torch.tensor([s * LENGTH + p + r for s, (n, p) in enumerate(zip(ROWS, POS)) for r in range(n)])
    hidden = hidden.view(-1, H).index_copy(0, index, net['encoder'](torch.cat(images)))
    loss = torch.nn.functional.cross_entropy(net['head'](torch.tanh(net['layer'](hidden))), targets.view(-1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters()}


def step(rank, src, dst, kind):
    net, (tokens, targets, images) = model(), batch()
    of_encoder, of_llm, tp = along(src, 'dp', 'cp'), along(dst, 'dp', 'cp'), along(dst, 'tp')
    (at, n), (t, ntp), (d, dp) = coord(src, rank, 'dp'), coord(dst, rank, 'tp'), coord(dst, rank, 'dp')
    segments = cb.Segments(ROWS, src=[s * n // SAMPLES for s in range(SAMPLES)], seq=range(SAMPLES), pos=POS, seq_len=[LENGTH] * SAMPLES,
                           seq_dp=[s * dp // SAMPLES for s in range(SAMPLES)])
    source = cb.Layout(cb.Grid(src)).split('samples', 'dp')
    if 'cp' in src:
        source.split('rows', 'cp', context=True)
    carry = ct.RaggedBridge(source, dst, group=dist.group.WORLD, output='sharded')
    own = torch.cat([images[s] for s in range(SAMPLES) if s * n // SAMPLES == at])
    c, cp = coord(src, rank, 'cp')
    own = own[len(own) * c // cp:len(own) * (c + 1) // cp]  # as ragged.md cuts them
    hidden = carry(net['encoder'](own), segments, into=net['words'](cut(dst, rank, tokens)))
    hidden = torch.tanh(net['layer'](hidden)).flatten(0, 1)
    wanted, weight = cut(dst, rank, targets).flatten(), net['head'].weight
    mine = slice(WORDS * t // ntp, WORDS * (t + 1) // ntp)
    part = torch.nn.Parameter(weight.detach()[mine if kind in ('linear_nll', 'logits') else slice(None)].clone())
    if kind == 'linear_nll':
        loss = ct.linear_nll(hidden, part, wanted, tp_group=tp, reduce_group=of_llm).loss
    elif kind == 'logits':
        loss = ct.nll(Copied.apply(hidden, tp) @ part.t(), wanted, tp_group=tp, reduce_group=of_llm).loss
    elif kind == 'replicated':
        loss = ct.linear_nll(hidden, part, wanted, reduce_group=of_llm).loss
    else:  # rows over dp x cp
        size, r = dist.get_world_size(of_llm), dist.get_rank(of_llm)
        part = torch.nn.Parameter(part.detach().chunk(size)[r].clone())
        loss = ct.linear_nll(hidden, ct.Head(part, shard_group=of_llm, rows=WORDS), wanted, reduce_group=of_llm).loss
    loss.backward()
    for p in net['encoder'].parameters():
        dist.all_reduce(p.grad, group=of_encoder)
    for p in (*net['words'].parameters(), *net['layer'].parameters(), *([part] if kind != 'sharded' else [])):
        dist.all_reduce(p.grad, group=of_llm)
    carry.destroy()
    total, wants = whole()
    if kind == 'sharded':
        wants['head.weight'] = wants['head.weight'].chunk(dist.get_world_size(of_llm))[dist.get_rank(of_llm)]
    elif kind != 'replicated':
        wants['head.weight'] = wants['head.weight'][mine]
    got = dict({name: p.grad for name, p in net.named_parameters()}, **{'head.weight': part.grad})
    off = {name: float((got[name] - want).abs().max() / want.abs().max()) for name, want in wants.items()}
    return dict(off, loss=abs(float(loss.detach() - total)))


@pytest.mark.parametrize('kind', HEADS)
@pytest.mark.parametrize('src, dst', PAIRS)
def test_what_the_table_says_is_enough(world, src, dst, kind):
    for off in world.run(step, src, dst, kind):
        assert max(off.values()) < 1e-12, off
