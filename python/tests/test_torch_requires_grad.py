# SPDX-License-Identifier: Apache-2.0
"""A backward that some ranks come to and others do not: forward says so on all of them, with the ranks."""
import contextlib

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_nll  # noqa: E402

# by rank; the library says which rank's is the other one
WORDS = {r: 'rank 1.* without backward.*x requires grad and autograd records ' + ('elsewhere' if r else 'here') for r in (0, 1)}
SEGMENTS = dict(rows=[2, 3], src=[0, 1], seq=[0, 0], pos=[0, 4], seq_len=[8], seq_dp=[0])
CUTS = [dict(cu_seqlens=[0, 8], split=split) for split in ('zigzag', 'block')]


def calls(rank, group, kind):
    """(what calls a bridge of two ranks on x, x)"""
    if kind == 'uniform':
        carry, x = ct.Bridge('dp=2', 'cp=2', group=group), torch.ones(1, 4, 3)
        return carry, x
    if kind == 'started':
        carry, x = ct.Bridge('dp=2', 'cp=2', group=group), torch.ones(1, 4, 3)
        return lambda x: carry.start(x).finish(), x
    if kind == 'packed':
        carry, x = ct.PackedBridge('cp=2', 'cp=2', group=group), torch.ones(4, 3)
        return lambda x: carry(x, src=cb.Packing(**CUTS[0]), dst=cb.Packing(**CUTS[1])), x
    if kind == 'relayout':
        return lambda x: ct.relayout(x, [0, 8], 'zigzag', 'block', group=group, dim=0), torch.ones(4, 3)
    carry, x = ct.RaggedBridge('dp=2', 'cp=2', group=group), torch.ones(2 + rank, 3)
    into = (lambda: {'into': torch.zeros(8, 3)}) if kind == 'merged' else dict
    return lambda x: carry(x, cb.Segments(**SEGMENTS), **into()), x


def step(call, x, wants, how):
    x = x.clone().requires_grad_(wants or how == 'no_grad')
    with contextlib.nullcontext() if wants else torch.no_grad() if how == 'no_grad' else contextlib.nullcontext():
        y = call(x)
    if wants:
        y.sum().backward()
        assert x.grad is not None and x.grad.any()


def differs(rank, kind, how, group=None):
    """In the first call, or in one of a shape that ranks had before."""
    for before in (0, 2):
        call, x = calls(rank, group or dist.group.WORLD, kind)
        for _ in range(before):
            step(call, x, True, how), step(call, x, False, 'no_grad')
        with pytest.raises(cb.MismatchError, match=WORDS[rank]):
            step(call, x, rank == 0, how)
        step(call, x, True, how)  # ranks go on, together


@pytest.mark.parametrize('kind', ('uniform', 'started', 'ragged', 'merged', 'packed', 'relayout'))
def test_a_rank_under_no_grad_is_named_at_forward(pair, kind):
    pair.run(differs, kind, 'no_grad')
    cb.run_threads(2, lambda world: differs(world.rank, kind, 'no_grad', world))


def test_a_frozen_encoder_of_one_rank_is_named_at_forward(pair):
    pair.run(differs, 'uniform', 'frozen')
    cb.run_threads(2, lambda world: differs(world.rank, 'uniform', 'frozen', world))


def tables(rank, kind):
    """Where rows are in tables some ranks may have none, so y has a gradient on all of them, and that of x is right."""
    call, x = calls(rank, dist.group.WORLD, kind)
    grads = []
    for wants in (True, rank == 0):
        leaf = x.clone().requires_grad_(wants)
        y = call(leaf)
        (y * torch.arange(1., y.numel() + 1).view(y.shape)).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads) if rank == 0 else grads[1] is None


@pytest.mark.parametrize('kind', ('ragged', 'merged', 'packed', 'relayout'))
def test_a_frozen_encoder_of_one_rank_leaves_gradients_of_tables_right(pair, kind):
    pair.run(tables, kind)


def backward_alone(rank, group=None):
    """Forward moves nothing, and backward adds up: its ranks meet no other ones before."""
    stays, moves = (ct.Bridge(src, 'cp=2', group=group or dist.group.WORLD) for src in ('tp=2', 'dp=2'))
    x = torch.ones(1, 4, 3)
    stays(x), moves(x)
    x.requires_grad_(rank == 0)
    with pytest.raises(cb.MismatchError, match='requires_grad: rank 0 has True, rank 1 has False'):
        y = stays(x)
        if rank == 0:
            y.sum().backward()
        moves(x)


def test_where_only_backward_moves_it_names_them(pair):
    pair.run(backward_alone)


def tower(rank):
    vision = ct.EncoderParallel(torch.nn.Linear(3, 3), group=dist.group.WORLD, llm='dp=2', rows=lambda grid: 1,
                                run=lambda net, pixels, _: net(pixels), smallest=(torch.zeros(1, 3), None), cost=lambda grid: 1)
    given = dict(seq=[0], pos=[1])
    for frozen in (False, True, False):
        vision.tower.requires_grad_(not (frozen and rank))
        if frozen:
            with pytest.raises(cb.MismatchError, match=r'requires_grad of the tower.*ranks \[0\] have it, ranks \[1\]'):
                vision(torch.ones(1, 3), into=torch.zeros(1, 4, 3), **given)
        else:
            vision(torch.ones(1, 3), into=torch.zeros(1, 4, 3), **given).sum().backward()


def test_a_tower_that_is_frozen_on_one_rank_is_named(pair):
    pair.run(tower)


def loss(rank, group, needs, sharded, **options):
    """Of 4 tokens and 6 columns, half of the head's rows on each rank. needs: what requires grad here."""
    make = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(4, 2, generator=make), torch.randn(6, 2, generator=make)[3 * rank:3 * rank + 3]
    groups = {'shard_group': group, 'rows': 6} if sharded else {'tp_group': group}
    hidden.requires_grad_('hidden' in needs), weight.requires_grad_('weight' in needs)
    made = linear_nll(hidden, weight, target=torch.tensor([0, 5, 2, 3]), **groups, **options).loss
    if needs:
        made.backward()
    return made.detach(), hidden.grad, weight.grad


def of_losses(rank, mode, sharded, needs, words, group=None):
    group = group or dist.group.WORLD
    want = loss(rank, group, ('hidden', 'weight'), sharded, mode=mode)
    with pytest.raises(cb.MismatchError, match=words):
        loss(rank, group, needs[rank], sharded, mode=mode)
        loss(rank, group, needs[rank], sharded, mode=mode)  # where forwards are alike, a backward meets the next one
    for a, b in zip(want, loss(rank, group, ('hidden', 'weight'), sharded, mode=mode)):
        assert torch.equal(a, b)


@pytest.mark.parametrize('mode, sharded, needs, words', (
    ('logprob', False, (('hidden', 'weight'), ('weight',)), 'rank 1 adds up no gradients of hidden in backward, rank 0 does'),
    ('loss', False, (('hidden', 'weight'), ('weight',)), 'rank 1 adds up no gradients of hidden in backward, rank 0 does'),
    ('logprob', False, (('hidden',), ()), 'rank 1 adds up no gradients of hidden in backward, rank 0 does'),
    ('loss', False, (('hidden',), ()), 'requires_grad|adds up no gradients of hidden'),
    ('logprob', True, (('hidden', 'weight'), ('hidden',)), 'requires_grad: rank 0 has hidden, weight, rank 1 has hidden'),
    ('loss', True, (('weight',), ()), 'requires_grad: rank 0 has weight, rank 1 has nothing')))
def test_losses_from_hidden_states_name_ranks_without_their_gradients(pair, mode, sharded, needs, words):
    pair.run(of_losses, mode, sharded, needs, words)
    if not sharded:
        cb.run_threads(2, lambda world: of_losses(world.rank, mode, sharded, needs, words, world))


def at_forward(world):
    carry = ct.Bridge('tp=2', 'cp=2', group=world)
    with pytest.raises(cb.MismatchError, match='forward without backward'):
        carry(torch.ones(1, 4, 3, requires_grad=world.rank == 0))


def test_with_check_2_forward_names_them_there_too(monkeypatch):
    monkeypatch.setenv('COLO_CHECK', '2')
    cb.run_threads(2, at_forward)


def test_advice_about_gradients_is_given_where_ranks_differ_in_them():
    def refused(world, run):
        with pytest.raises((ValueError, RuntimeError, TimeoutError)) as why:
            run(ct.Bridge('dp=2', 'tp=2', group=world))
        return str(why.value)

    def shapes(carry):
        with torch.no_grad():
            carry(torch.ones(1, 2, 3))
            carry(torch.ones(1, 2 + carry.group.rank, 3))

    def gone(carry):
        with torch.no_grad():
            carry(torch.ones(1, 2, 3))
            if carry.group.rank:
                raise ValueError('its own')
            carry(torch.ones(1, 2, 3))

    for run in (shapes, gone):
        said = cb.run_threads(2, lambda world: refused(world, run))
        assert 'without backward' in said[0] and 'autograd records' not in ''.join(said), said
    said = cb.run_threads(2, lambda world: refused(
        world, lambda carry: carry(torch.ones(1, 2, 3, requires_grad=not carry.group.rank))))
    assert all('x requires grad and autograd records' in one for one in said), said
