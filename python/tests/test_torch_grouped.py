# SPDX-License-Identifier: Apache-2.0
"""Several losses in one call, groups= of nll() and linear_nll(), against PyTorch's cross entropy of each group; multi-token
prediction in ten lines, against a loop over tokens."""
import itertools
import re
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

import torch.nn.functional as F  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from linear_case import H, V, case, leaf, near  # noqa: E402

WEIGHTS = [1.0, 0.25, -2.0, 0.0, 3.0]
G = len(WEIGHTS)


def batch(dtype=torch.float64, seed=0, shape=(3, 7)):
    """hidden, weight, targets, groups (the last has no token), weights of tokens"""
    h, w, _, t, _ = case(shape, dtype, seed)
    rng = torch.Generator().manual_seed(seed + 50)
    g = torch.randint(0, G - 1, shape, generator=rng)
    g[t == -100] = 99  # of a token that does not count nothing is read
    return h, case(seed=9)[1].to(dtype), t, g, torch.rand(shape, generator=rng, dtype=torch.float64)


def plainly(sides, mean, weighs=False, up=None, classes=None, smoothing=0.0):
    """total, or with @up the sum of up times each loss; loss, num, den of each group; gradients of hidden of each side, and of
    weight; classes: weights of them"""
    w = leaf(sides[0][1].double())
    hs = [leaf(side[0].double()) for side in sides]
    num, den = [0.0] * G, [0.0] * G
    for h, (_, _, t, g, of) in zip(hs, sides):
        each = F.cross_entropy((h @ w.t()).flatten(0, -2), t.flatten(), classes, reduction='none', label_smoothing=smoothing).view(t.shape)
        for i in range(G):
            mine = ((g == i) & (t != -100)) * (of if weighs else torch.ones_like(of))
            num[i] = num[i] + (mine * each).sum()
            den[i] = den[i] + (mine if classes is None else mine * classes[t.clamp(min=0)]).sum()
    loss = [n / d if mean and d else n for n, d in zip(num, den)]
    total = sum(float(k) * x for k, x in zip(WEIGHTS if up is None else up, loss))
    total.backward()
    values = [torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in of]).detach() for of in (loss, num, den)]
    return total.detach(), *values, [h.grad for h in hs], w.grad


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('mode', ['loss', 'logprob', 'keep', 'logits'])
def test_groups_have_the_losses_that_each_has_alone(mode, dtype):
    side = batch(dtype)
    h, w, t, g, of = side
    for reduction, weighs, weights in itertools.product(('mean', 'sum'), (False, True), (WEIGHTS, torch.tensor(WEIGHTS))):
        want = plainly([side], reduction == 'mean', weighs)
        x, y = leaf(h), leaf(w)
        options = dict(groups=g, group_weight=weights, reduction=reduction, mask=of if weighs else None)
        made = ct.nll(x @ y.t(), t, **options) if mode == 'logits' else ct.linear_nll(x, y, t, mode=mode, chunk_size=5, **options)
        (made * 2).backward()  # as its total is
        if mode == 'logits' and dtype == torch.bfloat16:
            continue  # PyTorch's product rounds the logits
        for name, got, value in zip(('total', 'loss', 'num', 'den'), made, want):
            near(got.detach(), value, dtype, name)
        near(x.grad, 2 * want[4][0], dtype, 'hidden')
        near(y.grad, 2 * want[5], dtype, 'weight')


@pytest.mark.parametrize('mode', ['logprob', 'logits'])
def test_each_loss_takes_any_upstream(mode):
    side = batch()
    up = [0.5, -1.0, 2.0, 7.0, 1.0]
    want = plainly([side], True, up=up)
    x, y = leaf(side[0]), leaf(side[1])
    options = dict(groups=side[3], group_weight=WEIGHTS)
    made = ct.nll(x @ y.t(), side[2], **options) if mode == 'logits' else ct.linear_nll(x, y, side[2], mode=mode, **options)
    (made.loss * torch.tensor(up)).sum().backward()
    near(x.grad, want[4][0], torch.float64, 'hidden')
    near(y.grad, want[5], torch.float64, 'weight')


CLASSES = torch.rand(V, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
CLASSES[::5] = 0


@pytest.mark.parametrize('mode', ['loss', 'logprob', 'keep', 'logits'])
def test_classes_weigh_in_the_loss_and_in_what_it_is_divided_by(mode):
    for reduction, weighs, smoothing, dtype in itertools.product(('mean', 'sum'), (False, True), (0.0, 0.2), (torch.float64, torch.float32)):
        h, w, t, g, of = side = batch(dtype)
        want = plainly([side], reduction == 'mean', weighs, classes=CLASSES, smoothing=smoothing)
        x, y = leaf(h), leaf(w)
        options = dict(groups=g, group_weight=WEIGHTS, reduction=reduction, mask=of if weighs else None, class_weight=CLASSES,
                       label_smoothing=smoothing)
        made = ct.nll(x @ y.t(), t, **options) if mode == 'logits' else ct.linear_nll(x, y, t, mode=mode, chunk_size=5, **options)
        made.backward()
        for name, got, value in zip(('total', 'loss', 'num', 'den'), made, want):
            near(got.detach(), value, dtype, name)
        near(x.grad, want[4][0], dtype, 'hidden')
        near(y.grad, want[5], dtype, 'weight')
    only = torch.zeros(V).double()
    only[int(t[t != -100][0])] = 1.0  # the tokens of other classes count nowhere
    want = plainly([batch()], True, classes=only)
    made = ct.linear_nll(leaf(batch()[0]), batch()[1], t, groups=g, group_weight=WEIGHTS, class_weight=only, **(
        {} if mode == 'logits' else {'mode': mode}))
    near(made.loss.detach(), torch.where(want[3] > 0, want[1], torch.zeros(G).double()), torch.float64, 'loss')


@pytest.mark.parametrize('mode', ['loss', 'logprob', 'keep', 'logits'])
def test_a_group_whose_classes_weigh_nothing_has_a_mean_of_0(mode):
    """Its num is not 0: smoothing weighs the other classes."""
    h, w, t, g, _ = batch()
    none, counts = (g == 0) & (t != -100), t != -100
    t = torch.where(none, 0, torch.where(counts, 1 + t % 4, t))
    assert CLASSES[0] == 0 and none.any()
    x, y = leaf(h), leaf(w)
    options = dict(groups=g, group_weight=[1.0, 2.0, 1.0, 1.0, 1.0], class_weight=CLASSES, label_smoothing=0.2)
    made = ct.nll(x @ y.t(), t, **options) if mode == 'logits' else ct.linear_nll(x, y, t, mode=mode, **options)
    made.total.backward()
    assert made.den[0] == 0 and made.num[0] > 0 and made.loss[0] == 0 and (made.loss[1:3] > 0).all()
    near(made.total.detach(), (made.loss.detach() * torch.tensor(options['group_weight'])).sum(), torch.float64, 'total')
    assert (x.grad[none] == 0).all() and (x.grad[counts & ~none] != 0).any()


def divided(world, mode, part=False):
    """Two ranks share the vocabulary, two have other tokens"""
    tp, dp = world.split_color(world.rank // 2, world.rank), world.split_color(world.rank % 2, world.rank)
    sides = [batch(seed=i, shape=(3, 7 + i)) for i in range(2)]
    want = plainly(sides, True, classes=CLASSES if part else None)
    d, r = world.rank // 2, world.rank % 2
    lo, hi = (0, 9) if r == 0 else (9, V)
    h, w, t, g, _ = sides[d]
    x, y = leaf(h), leaf(w[lo:hi])
    dp.stats_reset()
    tp.stats_reset()
    made = ct.linear_nll(x, ct.Head(y, tp_group=tp, vocab=(lo, V)), t, groups=g, group_weight=WEIGHTS, reduce_group=dp, mode=mode,
                         chunk_size=4, class_weight=(CLASSES[lo:hi] if part == 'shard' else CLASSES) if part else None)
    assert tp.stats().get('user', {}).get('all_reduce', {'ops': 0})['ops'] == bool(part)  # the weights of targets
    reductions = dp.stats()
    made.total.backward()
    for name, got, value in zip(('total', 'loss', 'num', 'den'), made, want):
        near(got.detach(), value, torch.float64, name)
    near(x.grad, want[4][d], torch.float64, 'hidden')
    whole = y.grad.clone()
    dp.all_reduce(whole)
    near(whole, want[5][lo:hi], torch.float64, 'weight')
    assert reductions['user']['all_reduce']['ops'] == 2  # the tokens in front, the losses behind, of all groups


@pytest.mark.parametrize('mode', ['loss', 'logprob'])
def test_tokens_of_all_ranks_are_counted(mode):
    for part in (False, 'shard', 'whole'):
        cb.run_threads(4, lambda world: divided(world, mode, part))


def gathered_once(world):
    """A sharded head and four groups: one gather a pass, one reduce-scatter"""
    h, w, t, g, _ = batch(seed=world.rank)
    rows = -(-V // 2)
    x, y = leaf(h), leaf(w[rows * world.rank:rows * (world.rank + 1)])
    for _ in range(2):  # the first makes objects
        world.stats_reset()
        ct.linear_nll(x, ct.Head(y, shard_group=world, rows=V), t, groups=g, group_weight=WEIGHTS).total.backward()
    assert {op: of['ops'] for op, of in world.stats()['head'].items()} == {'all_gather': 1, 'reduce_scatter': 1}


def test_the_head_is_gathered_once_for_all_groups():
    cb.run_threads(2, gathered_once)


def test_a_target_outside_of_the_vocabulary_is_nan_in_its_own_group():
    h, w, t, g, _ = batch()
    at = (t != -100).nonzero()[0]
    t[tuple(at)] = V
    other = int(g[tuple(at)])
    for mode in ('loss', 'logprob'):
        made = ct.linear_nll(leaf(h), w, t, groups=g, group_weight=WEIGHTS, mode=mode)
        assert made.loss.isnan().tolist() == [i == other for i in range(G)]


def test_no_token_no_group_and_rows_with_gaps():
    h, w, t, g, _ = batch()
    made = ct.linear_nll(leaf(h), w, torch.full_like(t, -100), groups=g, group_weight=WEIGHTS)
    made.total.backward()
    assert made.total == 0 and not made.loss.any() and not made.den.any()
    want = plainly([(h[:, 1:], w, t[:, 1:], g[:, 1:], torch.ones(3, 6).double())], True)
    for mode in ('loss', 'logprob'):
        x = leaf(h)
        made = ct.linear_nll(x[:, 1:], w, t[:, 1:], groups=g[:, 1:], group_weight=WEIGHTS, mode=mode)
        made.total.backward()
        near(made.loss.detach(), want[1], torch.float64, 'loss')
        near(x.grad[:, 1:], want[4][0], torch.float64, 'hidden')


def test_an_upstream_that_is_known():
    h, w, t, g, _ = batch()
    want = plainly([batch()], False)
    x, y = leaf(h), leaf(w)
    y.main_grad = torch.zeros(V, H).double()
    made = ct.linear_nll(x, ct.Head(y, main_grad=True), t, groups=g, group_weight=WEIGHTS, reduction='sum', upstream=0.5)
    (made.total * 0.5).backward()
    near(x.grad, 0.5 * want[4][0], torch.float64, 'hidden')
    near(y.main_grad, 0.5 * want[5], torch.float64, 'main_grad')


@pytest.mark.parametrize('change, words', [
    ({'group_weight': None}, 'groups is given and group_weight is not, expected both'),
    ({'groups': None}, 'group_weight is given and groups is not, expected both'),
    ({'groups': torch.zeros(3, 6).long()}, r'groups are \[3, 6\] of torch.int64 on cpu, expected integers \[3, 7\]'),
    ({'groups': torch.zeros(3, 7)}, r'groups are \[3, 7\] of torch.float32'),
    ({'groups': torch.full((3, 7), G)}, r'groups: found 5 at \[0, 0\], expected \[0, 5\), as group_weight has 5'),
    ({'groups': torch.full((3, 7), -1)}, 'groups: found -1'),
    ({'group_weight': []}, r'group_weight is \[\], expected \[G\] numbers, 1 to 64'),
    ({'group_weight': [1.0] * 65}, '.*expected .G. numbers, 1 to 64'), ({'group_weight': 3.0}, 'group_weight is 3.0, expected'),
    ({'group_weight': ['x']}, '.*expected .G. numbers'), ({'group_weight': torch.ones(2, 2)}, r'group_weight is \[2, 2\]'),
    ({'group_weight': torch.ones(5, requires_grad=True)}, 'group_weight requires grad, expected constants'),
    ({'reduction': 'none'}, "groups with reduction 'none'")])
def test_wrong_groups_are_named(change, words):
    h, w, t, g, _ = batch()
    options = {'groups': g, 'group_weight': WEIGHTS, **change}
    with pytest.raises(ValueError, match='linear_nll: ' + words):
        ct.linear_nll(h, w, t, **{'mode': 'auto', **options})
    with pytest.raises(ValueError, match='nll: ' + words):
        ct.nll(h @ w.t(), t, **options)


@pytest.mark.skipif(not hasattr(torch, 'compile'), reason='this PyTorch %s has no torch.compile' % torch.__version__)
@pytest.mark.parametrize('mode', ['loss', 'logprob', 'logits'])
def test_compiled_code_has_them(mode):
    """Without a break of the graph, where calls of ours are in graphs"""
    h, w, t, g, _ = batch(torch.float32)
    torch.compiler.reset()  # step() is compiled anew for each
    learned = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 14)
    for weights in ([1, 0.25, -2.0, 0, 3.0], tuple(WEIGHTS), torch.tensor(WEIGHTS)):
        def step(x, y, groups):
            x = torch.tanh(x)
            options = dict(groups=groups, group_weight=weights, class_weight=CLASSES.float())
            made = ct.nll(x @ y.t(), t, **options) if mode == 'logits' else ct.linear_nll(x, y, t, mode=mode, **options)
            total = made.total * 2 + (made.loss * torch.arange(1.0, G + 1)).sum() + made.num.sum() if mode != 'loss' else made.total * 2
            return total, made.loss.detach(), made.num.detach(), made.den
        results = []
        for run in (step, torch.compile(step, backend='aot_eager', fullgraph=learned)):
            x, y = leaf(h), leaf(w)
            total, *rest = run(x, y, g.clamp(max=G - 1))
            total.backward()
            results.append([total.detach(), *rest, x.grad, y.grad])
        assert not results[1][3].requires_grad
        for one, other in zip(*results):
            near(other, one.double(), torch.float32, 'compiled')
            assert one.dtype == other.dtype
    with pytest.raises(Exception, match='groups is given and group_weight is not'):
        torch.compile(lambda x: ct.linear_nll(x, w, t, groups=g).loss, backend='aot_eager')(h)


def predicted(world, split):
    """Losses of three depths of a packed batch, tokens over context ranks, against a loop over the tokens of each sequence"""
    lengths, depths, weights = [5, 1, 9, 2], 3, [1.0, 0.3, 0.1]  # the page's
    cu = ct.Sequence.pack(lengths, cp=world.size)
    rng = torch.Generator().manual_seed(1)
    stream = torch.zeros(cu[-1], dtype=torch.int64)
    for b, n in enumerate(lengths):
        stream[cu[b]:cu[b] + n] = torch.randint(0, V, (n,), generator=rng)
    trunk, table, mixes = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((cu[-1], H), (V, H), (depths - 1, H)))
    of = [leaf(t) for t in (trunk, case(seed=9)[1])]
    want, state = [], of[0]
    for d in range(depths):  # position by position, each layer with the embedding of the token d ahead
        if d:
            state = torch.stack([torch.tanh(state[cu[b] + i] * mixes[d - 1] + table[stream[cu[b] + i + d] if i + d < n else 0])
                                 for b, n in enumerate(lengths) for i in range(cu[b + 1] - cu[b])])
        losses = [F.cross_entropy(state[cu[b] + i] @ of[1].t(), stream[cu[b] + i + d + 1]) for b, n in enumerate(lengths) for i in range(n - d - 1)]
        want.append(torch.stack(losses).mean())
    sum(k * x for k, x in zip(weights, want)).backward()
    mine = torch.tensor(cb.Partition(cu[-1], cp=world.size, cp_rank=world.rank, cu_padded=cu, split=split).index())
    x, head = leaf(trunk[mine]), torch.nn.Linear(H, V, bias=False)
    head.weight = torch.nn.Parameter(of[1].detach().clone())
    text = (Path(__file__).resolve().parents[2] / 'docs/guides/mtp.md').read_text()
    code = re.search(r'```python\n(.*?)```', text, re.S)[1]
    assert len(code.strip().split('\n')) - 2 == 10  # behind the import
    if split == 'contiguous':
        code = code.replace('cp_group=cp)', 'cp_group=cp, split="contiguous")')
    said = []
    names = dict(torch=torch, B=len(lengths), S=max(lengths), lengths=lengths, cu_seqlens=cu, cp=world, tp=None, dp_cp=world, tokens=stream,
                 embed=table.__getitem__, hidden=x, head=head, print=said.append,
                 mtp_layers=[lambda h, e, mix=mix: torch.tanh(h * mix + e) for mix in mixes])
    exec(compile(code, 'mtp.md', 'exec'), names)
    made = names['made']
    near(made.loss, torch.stack(want).detach(), torch.float64, 'losses of depths')
    assert said == [made.loss]
    near(x.grad, of[0].grad[mine], torch.float64, 'hidden')
    whole = head.weight.grad.clone()
    world.all_reduce(whole)
    near(whole, of[1].grad, torch.float64, 'head')


@pytest.mark.parametrize('split', ['zigzag', 'contiguous'])
def test_multi_token_prediction_over_context_ranks(split):
    cb.run_threads(2, lambda world: predicted(world, split))
