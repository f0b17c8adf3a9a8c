# SPDX-License-Identifier: Apache-2.0
"""cross_entropy() and linear_cross_entropy() against torch.nn.functional's: each option, PyTorch's own samples, shards of
the vocabulary, means over ranks, refusals."""
import contextlib
import copy
import itertools
import pickle
import re
import warnings

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import colobridge.torch as ct  # noqa: E402
from world import meet  # noqa: E402

T, V, H = 11, 13, 6
# Both sides are given the same numbers, PyTorch in f64. f32: sums of 13 terms below 10 a token, and of 11 tokens: some
# 143 * 10 * 2^-24 = 9e-5. Gradients are rounded to the dtype once: 2^-8 and 2^-11 of numbers below 3.
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-4, 1e-4), torch.bfloat16: (1e-4, 2e-2),
             torch.float16: (1e-4, 2e-3)}
WEIGHTS = [0.5, 0, 2, 1, 0.25, 3, 0, 1.5, 0.75, 1, 2.5, 0.1, 1]
OPTIONS = [dict(reduction=reduction, ignore_index=ignored, label_smoothing=smoothing, weight=weight)
           for reduction, ignored, smoothing, weight in itertools.product(
               ('none', 'mean', 'sum'), (-100, 3), (0.0, 0.1, 1.0), (None, WEIGHTS))]


def case(dtype, tokens=T, seed=0):
    """logits, hidden states, head, bias, targets of which some are 3 and some -100"""
    rng = torch.Generator().manual_seed(seed)
    z, h, w, b = ((2 * torch.randn(*shape, generator=rng, dtype=torch.float64)).to(dtype)
                  for shape in ((tokens, V), (tokens, H), (V, H), (V,)))
    t = torch.randint(0, V, (tokens,), generator=rng)
    t[1::4] = 3
    return z, h, w, b, t


def leaves(*given):
    return [t.detach().clone().requires_grad_() for t in given]


def wide(*given):
    return leaves(*(t.double() for t in given))


def given(options, dtype):
    """The options for a call of @dtype: weights are tensors, not rounded on any side but to f32"""
    weight = options['weight']
    if weight is not None:
        weight = torch.tensor(weight).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return dict(options, weight=weight)


def near(got, want, bound, what=''):
    torch.testing.assert_close(got.double(), want.double(), rtol=bound, atol=bound, msg=lambda m: '%s %s' % (what, m))


def targets(t, options):
    """-100 is a target that is ignored by that option alone"""
    t = t.clone()
    if options['ignore_index'] == -100:
        t[2::5] = -100
    return t


def scalar(loss):
    """Something with a gradient that is other in each token"""
    return (loss.double() * torch.arange(1, loss.numel() + 1, dtype=torch.float64).view(loss.shape)).sum()


@pytest.mark.parametrize('dtype', list(TOLERANCE))
def test_every_option_is_pytorchs(dtype):
    z, h, w, b, t = case(dtype)
    bound, bound_grad = TOLERANCE[dtype]
    for options in OPTIONS:
        target = targets(t, options)
        (x,), (y,) = leaves(z), wide(z)
        got = ct.cross_entropy(x, target, **given(options, dtype))
        want = F.cross_entropy(y, target, **given(options, torch.float64))
        assert got.shape == want.shape and got.dtype == (dtype if dtype == torch.float64 else torch.float32)
        near(got, want, bound, options)
        scalar(got).backward(), scalar(want).backward()
        assert x.grad.dtype == dtype
        near(x.grad, y.grad, bound_grad, options)


@pytest.mark.parametrize('dtype', list(TOLERANCE))
def test_every_option_of_a_linear_layer_is_pytorchs(dtype):
    _, h, w, b, t = case(dtype)
    bound, bound_grad = TOLERANCE[dtype]
    for options, bias in itertools.product(OPTIONS, (False, True)):
        target = targets(t, options)
        mine, theirs = leaves(h, w, b), wide(h, w, b)
        got = ct.linear_cross_entropy(mine[0], mine[1], target, linear_bias=mine[2] if bias else None,
                                      **given(options, dtype))
        want = F.cross_entropy(F.linear(theirs[0], theirs[1], theirs[2] if bias else None), target,
                               **given(options, torch.float64))
        assert got.shape == want.shape
        size = max(1.0, float(want.detach().abs().max()))
        near(got / size, want / size, bound, options)
        scalar(got).backward(), scalar(want).backward()
        for one, other in zip(mine[:2 + bias], theirs):
            size = max(1.0, float(other.grad.abs().max()))  # sums of up to 13 products or tokens, rounded once
            near(one.grad / size, other.grad / size, bound_grad, options)


def test_one_token_without_a_batch():
    z, h, w, b, t = case(torch.float64)
    for reduction in ('none', 'mean', 'sum'):
        (x,), (y,) = leaves(z[0]), leaves(z[0])
        got, want = (f(of, t[0], reduction=reduction) for f, of in ((ct.cross_entropy, x), (F.cross_entropy, y)))
        assert got.shape == want.shape == ()
        near(got, want, 1e-12)
        got.backward(), want.backward()
        near(x.grad, y.grad, 1e-12)
        mine = leaves(h[0], w, b)
        theirs = leaves(h[0], w, b)
        got = ct.linear_cross_entropy(mine[0], mine[1], t[0], linear_bias=mine[2], reduction=reduction)
        want = F.cross_entropy(F.linear(*theirs), t[0], reduction=reduction)
        assert got.shape == want.shape == ()
        got.backward(), want.backward()
        for one, other in zip(mine, theirs):
            near(one.grad, other.grad, 1e-12)


def test_no_token_that_counts_is_0():
    z, h, w, _, t = case(torch.float32)
    for tokens in (0, 4):
        (x,), mine = leaves(z[:tokens]), leaves(h[:tokens], w)
        nothing = torch.full((tokens,), -100)
        for loss in (ct.cross_entropy(x, nothing), ct.linear_cross_entropy(*mine, nothing)):
            assert loss.item() == 0
            loss.backward()
        assert all(not g.grad.any() for g in (x, *mine))


# ---- over ranks: tp pairs (0, 1), (2, 3), uneven shards; dp pairs (0, 2), (1, 3) with other tokens ----

CUT = 9


def on_ranks(rank, dtype):
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = groups[rank // 2], groups[2 + rank % 2]
    bound, bound_grad = TOLERANCE[dtype]
    of = [case(dtype, tokens, seed) for tokens, seed in ((T, 0), (T // 2, 1))]
    z, h, w, b, t = of[rank // 2]
    w, b = of[0][2:4]
    for options in OPTIONS:
        all_t = [targets(one[4], options) for one in of]
        mine_t, slot = all_t[rank // 2], slice(0, CUT) if rank % 2 == 0 else slice(CUT, V)
        tokens = slice(0, T) if rank < 2 else slice(T, T + T // 2)
        whole = wide(torch.cat([one[0] for one in of]), torch.cat([one[1] for one in of]), w, b)
        plain = given(options, torch.float64)
        want = F.cross_entropy(whole[0], torch.cat(all_t), **plain)
        scalar(want).backward()
        want_linear = F.cross_entropy(F.linear(*whole[1:]), torch.cat(all_t), **plain)
        scalar(want_linear).backward()
        (x,), mine = leaves(z[:, slot]), leaves(h, w[slot], b[slot])
        options = given(options, dtype)
        if options['weight'] is not None and options['ignore_index'] == 3:  # a shard of the weights, else all of them
            options['weight'] = options['weight'][slot]
        got = ct.cross_entropy(x, mine_t, tp_group=tp, reduce_group=dp, vocab=(slot.start, V), **options)
        got_linear = ct.linear_cross_entropy(
            mine[0], ct.Head(mine[1], mine[2], tp_group=tp, vocab=(slot.start, V)), mine_t, reduce_group=dp,
            **options)
        if options['reduction'] == 'none':
            want, want_linear = want[tokens], want_linear[tokens]
        size = max(1.0, float(want_linear.detach().abs().max()))
        near(got, want, bound * 2, options)
        near(got_linear / size, want_linear / size, bound, options)
        for loss in (got, got_linear):
            at = torch.arange(1, T + T // 2 + 1, dtype=torch.float64)[tokens] if loss.dim() else 1
            (loss.double() * at).sum().backward()
        near(x.grad, whole[0].grad[tokens, slot], bound_grad, options)
        grads = [one.grad.double() for one in mine]
        for grad in grads[1:]:  # of a rank's tokens; sum them over the ranks that have others
            dist.all_reduce(grad, group=dp)
        for one, other in zip(grads, (whole[1].grad[tokens], whole[2].grad[slot], whole[3].grad[slot])):
            size = max(1.0, float(other.abs().max()))
            near(one / size, other / size, 2 * bound_grad, options)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_shards_and_means_over_ranks(world, dtype):
    world.run(on_ranks, dtype)


def mistakes(rank):
    """Of rank 1, in arguments that only PyTorch takes. It is alone with 0 in the one group, and with 3 in the other."""
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = groups[rank // 2], groups[2 + rank % 2]
    z, h, w, b, t = case(torch.float32)
    slot = slice(0, CUT) if rank % 2 == 0 else slice(CUT, V)
    head = ct.Head(w[slot], tp_group=tp, vocab=(slot.start, V))

    def of_logits(x, t):
        return ct.cross_entropy(x, t, tp_group=tp, reduce_group=dp, vocab=(slot.start, V))

    def of_hidden(x, t, head=head, **options):
        return ct.linear_cross_entropy(x, head, t, reduce_group=dp, **options)
    whole, both = {'head': w[slot][:, None], 'tp_group': tp}, {'linear_bias': b[slot]}
    x = z[:, slot]
    for run, x, wrong, options, words in (
            (of_logits, x, (x, t.float()), {}, 'cross_entropy: target is .* of torch.float32'),
            (of_logits, x, (x, t[1:]), {}, 'cross_entropy: target is .* as input is'),
            (of_logits, x, (x[None], t), {}, 'cross_entropy: input is .* expected'),
            (of_hidden, h, (h, t.float()), {}, 'linear_cross_entropy: target is .* of torch.float32'),
            (of_hidden, h, (h, t), whole, 'linear_cross_entropy: linear_weight is .* expected'),
            (of_hidden, h, (h, t), both, 'linear_cross_entropy: linear_weight is a Head and')):
        with pytest.raises(ValueError if rank == 1 else RuntimeError, match=words):
            run(*wrong, **options) if rank == 1 else run(x, t)
        meet()
        assert run(x, t).isfinite()
        meet()
    if rank != 1:  # which has no part in the sum that its mistake would be in
        ct.cross_entropy(z, t, reduction='none', reduce_group=dp)
    else:
        with pytest.raises(ValueError, match='target is'):
            ct.cross_entropy(z, t.float(), reduction='none', reduce_group=dp)
    meet()
    assert of_logits(z[:, slot], t).isfinite()


@pytest.mark.parametrize('words, call', [
    ("cross_entropy: reduction is 'maen'", lambda z, h, w, t: ct.cross_entropy(z, t, reduction='maen')),
    ('cross_entropy: label_smoothing is 2, expected in', lambda z, h, w, t: ct.cross_entropy(z, t, label_smoothing=2.)),
    ("cross_entropy: temperature is 'x', expected a number", lambda z, h, w, t: ct.cross_entropy(z, t, temperature='x')),
    ('cross_entropy: weight is [3]', lambda z, h, w, t: ct.cross_entropy(z, t, torch.ones(3))),
    ('cross_entropy: the logits or the target was written', lambda z, h, w, t: changed(z, lambda z: ct.cross_entropy(z, t))),
    ("linear_cross_entropy: reduction is 'maen'", lambda z, h, w, t: ct.linear_cross_entropy(h, w, t, reduction='maen')),
    ('linear_cross_entropy: linear_weight is torch.float64 on cpu, input is torch.float32',
     lambda z, h, w, t: ct.linear_cross_entropy(h, w.double(), t)),
    ('linear_cross_entropy: linear_bias is [3]', lambda z, h, w, t: ct.linear_cross_entropy(h, w, t, linear_bias=w[0, :3])),
    ('linear_cross_entropy: weight is [3]', lambda z, h, w, t: ct.linear_cross_entropy(h, w, t, weight=torch.ones(3))),
    ('linear_cross_entropy: main_grad=True, but linear_weight has no',
     lambda z, h, w, t: ct.linear_cross_entropy(h, ct.Head(w.requires_grad_(), main_grad=True), t)),
    ('linear_cross_entropy: input, linear_weight, linear_bias or target was written',
     lambda z, h, w, t: changed(w, lambda w: ct.linear_cross_entropy(h, w, t))),
    ('linear_cross_entropy: a second backward', lambda z, h, w, t: twice(h, lambda h: ct.linear_cross_entropy(h, w, t))),
    ('nll: a second backward', lambda z, h, w, t: twice(z, lambda z: (  # of a shape that the other function has seen
        ct.cross_entropy(z, t, inplace_backward=True), ct.nll(z, t, inplace_backward=True).loss)[1])),
    ('entropy: temperature is 0, expected', lambda z, h, w, t: ct.entropy(z, temperature=0.)),
    ('topk_logprob: k is 0', lambda z, h, w, t: ct.topk_logprob(z, 0)),
])
def test_an_error_names_the_function_and_the_argument_that_were_called(words, call):
    z, h, w, t = torch.randn(4, V), torch.randn(4, 5), torch.randn(V, 5), torch.arange(4)
    with pytest.raises((ValueError, RuntimeError), match='^' + re.escape(words)):
        call(z, h, w, t)


def changed(x, call):
    """Backward of a tensor that is written after the call"""
    x = x.requires_grad_() * 1
    loss = call(x)
    x.mul_(2)
    loss.backward()


def twice(x, call):
    loss = call(x.requires_grad_() * 1)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def test_a_mistake_on_one_rank_is_every_ranks_error(world):
    world.run(mistakes)


def test_a_mistake_in_a_graph_is_eagers():
    if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 14):
        pytest.skip('an operator of torch.library needs PyTorch 2.14')
    z, h, w, _, t = case(torch.float32)
    for dynamic in (None, True):
        graph = torch.compile(lambda x, t: ct.cross_entropy(x, t) + ct.linear_cross_entropy(h, w, t), backend='eager', dynamic=dynamic)
        with pytest.raises(ValueError, match=r'cross_entropy: target is \[11\] of torch.float32, expected class indices'):
            graph(z, t.float())
        assert graph(z, t).isfinite()


def test_in_one_graph():
    if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 14):
        pytest.skip('an operator of torch.library needs PyTorch 2.14')
    z, h, w, b, t = case(torch.float32)

    weights = torch.tensor(WEIGHTS)

    def both(x, h, w):
        return ct.cross_entropy(x, t, weights, label_smoothing=0.1) + 2 * ct.linear_cross_entropy(
            h, w, t, weight=weights, reduction='sum')

    made = []
    for fn in (both, torch.compile(both, fullgraph=True, backend='eager')):
        tensors = leaves(z, h, w)
        loss = fn(*tensors)
        loss.backward()
        made.append([loss, *(x.grad for x in tensors)])
    assert all(torch.equal(*pair) for pair in zip(*made))


# ---- weights of classes, beyond PyTorch's ----

def weighted(x, t, weights, mask, smoothing, z_loss):
    """(sum, den): PyTorch's loss of each token, a z-loss that its class weighs, and a mask of floats"""
    weights, mask = weights.double(), mask.double()
    loss = F.cross_entropy(x, t, weights, reduction='none', label_smoothing=smoothing)
    counts = (t != -100) * mask
    w = weights[t.clamp(min=0)]
    return (counts * (loss + z_loss * w * torch.logsumexp(x, -1) ** 2)).sum(), (counts * w).sum()


@pytest.mark.parametrize('dtype', list(TOLERANCE))
def test_a_mask_and_a_z_loss_with_weights(dtype):
    z, h, w, b, t = case(dtype)
    bound, bound_grad = TOLERANCE[dtype]
    t[2::5] = -100
    mask = torch.arange(T) % 4 / 2
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    for smoothing, reduction, mode in itertools.product((0.0, 0.2), ('mean', 'sum'), ('loss', 'logprob', 'keep')):
        options = dict(mask=mask, class_weight=weights, z_loss=0.01, label_smoothing=smoothing, reduction=reduction)
        (x,), (y,) = leaves(z), wide(z)
        got = ct.nll(x, t, **options)
        num, den = weighted(y, t, weights, mask, smoothing, 0.01)
        want = num / den if reduction == 'mean' else num
        for one, other in zip(got, (want, num, den)):
            near(one, other, bound, options)
        got.loss.backward(), want.backward()
        near(x.grad, y.grad, bound_grad, options)
        mine, theirs = leaves(h, w, b), wide(h, w, b)
        got = ct.linear_nll(mine[0], ct.Head(*mine[1:]), t, mode=mode, **options)
        num, den = weighted(F.linear(*theirs), t, weights, mask, smoothing, 0.01)
        want = num / den if reduction == 'mean' else num
        for one, other in zip(got, (want, num, den)):
            size = max(1.0, float(other.detach().abs()))
            near(one / size, other / size, bound, options)
        got.loss.backward(), want.backward()
        for one, other in zip(mine, theirs):
            size = max(1.0, float(other.grad.abs().max()))
            near(one.grad / size, other.grad / size, bound_grad, options)


def test_weights_that_add_up_to_0_and_classes_without_weight():
    z, h, w, _, t = case(torch.float32)
    (x,), mine = leaves(z), leaves(h, w)
    for loss in (ct.cross_entropy(x, t, torch.zeros(V), label_smoothing=0.1),
                 ct.linear_cross_entropy(*mine, t, weight=torch.zeros(V))):
        assert loss.item() == 0
        loss.backward()
    assert all(not g.grad.any() for g in (x, *mine))
    x = z.clone()
    x[:, [1, 6]] = -float('inf')  # a class that is masked out; PyTorch: NaN
    t[t == 1] = 0
    t[t == 6] = 0
    kept = [j for j in range(V) if j not in (1, 6)]
    position = torch.tensor([kept.index(j) if j in kept else -1 for j in range(V)])
    weights = torch.tensor(WEIGHTS)
    got = ct.cross_entropy(x, t, weights, label_smoothing=0.1)
    # PyTorch's mean over the other classes: e / V there is of as many classes as there are
    smooth = 0.1 * len(kept) / V
    lp = torch.log_softmax(z[:, kept].double(), -1)
    of = weights[kept].double()
    at = position[t]
    want = (-0.9 * of[at] * lp[range(T), at] - smooth / len(kept) * (lp * of).sum(-1)).sum() / of[at].sum()
    near(got, want, 1e-4)


def test_weights_with_a_support_and_under_hooks_and_checkpoint():
    z, _, _, _, t = case(torch.float64)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    lists = torch.arange(V).expand(T, V)
    grads = []
    for how in ('plain', 'hooks', 'support'):
        (x,) = leaves(z)
        with torch.autograd.graph.save_on_cpu() if how == 'hooks' else contextlib.nullcontext():
            loss = ct.nll(x, t, class_weight=weights, support=ct.Support(lists) if how == 'support' else None).loss
        loss.backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    near(grads[2], grads[0], 1e-12)


def test_weights_that_were_written_since_forward():
    z, h, w, _, t = case(torch.float64)
    for call in (lambda x, weights: ct.cross_entropy(x, t, weights, label_smoothing=0.1),
                 lambda x, weights: ct.linear_cross_entropy(x @ torch.ones(V, H, dtype=torch.float64), w, t, weight=weights,
                                                            reduction='none', label_smoothing=0.1).sum()):
        (x,) = leaves(z)
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        loss = call(x, weights)
        weights.mul_(2)
        with pytest.raises(RuntimeError, match='written in place'):
            loss.backward()


# ---- PyTorch's own samples ----

def samples(name, dtype):
    pytest.importorskip('expecttest')
    pytest.importorskip('setuptools.command')  # which PyTorch's helpers of tests import
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of what the module finds, or not, on this machine
        from torch.testing._internal.common_methods_invocations import op_db
    found = [op for op in op_db if op.name == 'nn.functional.' + name]
    if not found:
        pytest.skip('this PyTorch has no ' + name)
    return found[0], list(found[0].sample_inputs('cpu', dtype, requires_grad=True))


def refused(input, target, linear_weight=None):
    """Is it what only PyTorch takes: more dims, class probabilities?"""
    return input.dim() > 2 or target.is_floating_point() or linear_weight is not None and linear_weight.dim() > 2


def copied(value, to):
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(to).requires_grad_(value.requires_grad)


@pytest.mark.parametrize('dtype', list(TOLERANCE))
@pytest.mark.parametrize('name', ['cross_entropy', 'linear_cross_entropy'])
def test_pytorchs_samples(name, dtype):
    op, found = samples(name, dtype)
    bound, bound_grad = TOLERANCE[dtype]
    ran = 0
    for sample in found:
        tensors = [sample.input, *sample.args]
        fn, options = getattr(ct, name), sample.kwargs
        target = tensors[-1]
        if refused(tensors[0], target, *tensors[1:-1]):
            with pytest.raises(ValueError):
                fn(*tensors, **options)
            continue
        ran += 1
        mine, theirs = ([copied(t, to) for t in tensors] for to in (dtype, torch.float64))
        extra = [{key: copied(value, to) for key, value in options.items()} for to in (dtype, torch.float64)]
        got, want = fn(*mine, **extra[0]), op.op(*theirs, **extra[1])
        assert got.shape == want.shape
        size = max(1.0, float(want.detach().abs().max()))
        near(got / size, want / size, bound, sample)
        scalar(got).backward(), scalar(want).backward()
        pairs = list(zip(mine, theirs)) + [(extra[0][key], extra[1][key]) for key in options]
        for one, other in pairs:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                size = max(1.0, float(other.grad.abs().max()))
                near(one.grad / size, other.grad / size, bound_grad, sample)
    assert ran >= 4


# ---- refusals ----

@pytest.mark.parametrize('call, words', [
    (lambda: ct.cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64)),
     r'cross_entropy: input is \[2, 3, 4\], expected \[T, V\] or \[V\]; nll\(\) takes'),
    (lambda: ct.cross_entropy(torch.zeros(2, 3), torch.zeros(2, 3)), r'target is \[2, 3\] of torch.float32, expected class indices'),
    (lambda: ct.cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)), r'target is \[3\], expected \[2\]'),
    (lambda: ct.cross_entropy(torch.tensor(0.0), torch.tensor(0)), r'input is \[\], expected'),
    (lambda: ct.cross_entropy([1.0], torch.tensor(0)), 'input is a list'),
    (lambda: ct.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), reduction='maen'), 'reduction is'),
    (lambda: ct.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(4)),
     r'^cross_entropy: weight is \[4\] of torch.float32 on cpu, expected \[3\], a number for each class'),
    (lambda: ct.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(3, dtype=torch.int64)),
     r'^cross_entropy: weight is \[3\] of torch.int64'),
    (lambda: ct.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), [1, 1, 1]), '^cross_entropy: weight is a list'),
    (lambda: ct.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(3, requires_grad=True)),
     '^cross_entropy: weight requires grad, expected a constant'),
    (lambda: ct.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64),
                                     weight=torch.ones(3)), r'^linear_cross_entropy: weight is \[3\]'),
    (lambda: ct.nll(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), class_weight=torch.ones(4)), r'^nll: class_weight is \[4\]'),
    (lambda: ct.linear_nll(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64), class_weight=[1]),
     '^linear_nll: class_weight is a list'),
    (lambda: ct.linear_cross_entropy(torch.zeros(2, 2, 3), torch.zeros(4, 3), torch.zeros(2, 2, dtype=torch.int64)),
     r'linear_cross_entropy: input is \[2, 2, 3\], expected \[T, H\] or \[H\]; linear_nll\(\) takes'),
    (lambda: ct.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 5, 3), torch.zeros(2, 5, dtype=torch.int64)),
     r'linear_weight is \[4, 5, 3\], expected \[V, H\]|target is \[2, 5\], expected \[2\]'),
    (lambda: ct.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 4)), 'class probabilities')])
def test_what_only_pytorch_takes_is_a_valueerror(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize('weighed', [False, True])
def test_modules_are_the_functions_with_their_options(weighed):
    z, h, w, b, t = case(torch.float32)
    weight = torch.tensor(WEIGHTS, dtype=torch.float32) if weighed else None
    options = {'reduction': 'sum', 'label_smoothing': 0.1}
    module = torch.nn.Sequential(ct.CrossEntropyLoss(weight, **options), ct.LinearCrossEntropyLoss(weight, **options))
    assert torch.equal(module[0](z, t), ct.cross_entropy(z, t, weight, **options))
    assert torch.equal(module[1](h, ct.Head(w, b), t), ct.linear_cross_entropy(h, w, t, linear_bias=b, weight=weight, **options))
    assert list(module.state_dict()) == ['0.weight', '1.weight'] * weighed and not list(module.parameters())
    assert 'label_smoothing=0.1' in repr(module)
    near(module[0](z, t), torch.nn.CrossEntropyLoss(weight, **options)(z, t), 1e-5, options)


def copies_of_modules(rank):
    """A model with a loss of a group is copied, as for an average of its weights, and has the same group."""
    z, h, w, _, t = case(torch.float32)
    group, weight = dist.new_group([0, 1]), torch.tensor(WEIGHTS)
    if rank > 1:
        return
    slot = slice(0, CUT) if rank == 0 else slice(CUT, V)
    columns = {'vocab': (slot.start, V)}
    for module, given in ((ct.CrossEntropyLoss(weight, tp_group=group, **columns), (z[:, slot], t)),
                          (ct.LinearCrossEntropyLoss(weight, tp_group=group), (h, ct.Head(w[slot], **columns), t)),
                          (ct.CrossEntropyLoss(weight, tp_group=ct.comm_of(group, z.device), **columns), (z[:, slot], t))):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), module)
        for made in (copy.deepcopy(model)[1], copy.copy(module)):
            assert made.options['tp_group'] is module.options['tp_group'] and made.options == module.options
            assert torch.equal(made(*given), module(*given))
        copied = copy.deepcopy(module)
        copied.options['reduction'] = 'sum'
        assert copied.weight is not module.weight and 'reduction' not in module.options
        with pytest.raises(TypeError, match=r"loss: found one with tp_group=.* to pickle, expected no group; save the state_dict\(\)"):
            pickle.dumps(model)


def test_modules_with_groups_are_copied_and_say_why_they_are_not_pickled(world):
    world.run(copies_of_modules)


def test_modules_without_groups_are_pickled():
    z, _, _, _, t = case(torch.float32)
    module = ct.CrossEntropyLoss(torch.tensor(WEIGHTS), label_smoothing=0.1, tp_group=None)
    for made in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert made.options == module.options and torch.equal(made(z, t), module(z, t))


def test_modules_in_one_graph():
    if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 14):
        pytest.skip('an operator of torch.library needs PyTorch 2.14')
    z, h, w, _, t = case(torch.float32)
    logits, hidden = ct.CrossEntropyLoss(reduction='sum'), ct.LinearCrossEntropyLoss(torch.tensor(WEIGHTS), z_loss=0.1)
    fn = lambda z, h, w: logits(z, t) + hidden(h, w, t)  # noqa: E731
    assert torch.equal(torch.compile(fn, fullgraph=True, backend='eager')(z, h, w), fn(z, h, w))


def test_a_module_refuses_options_that_its_function_has_not():
    for make in (lambda: ct.CrossEntropyLoss(axis=1), lambda: ct.LinearCrossEntropyLoss(linear_bias=None)):
        with pytest.raises(TypeError, match='got an unexpected option'):
            make()
