# SPDX-License-Identifier: Apache-2.0
"""linear_logprob() and linear_nll() against PyTorch's product and log_softmax: modes, shards of the
vocabulary, main_grad, checkpoints, autocast, errors."""
import contextlib
import itertools

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_logprob, linear_nll  # noqa: E402
from linear_case import CUTS, H, V, case, expected, leaf, near, plain  # noqa: E402


def agrees(rank, size, group, dtype, mode, has_bias, chunk, options):
    h, w, b, t, g = case(dtype=dtype)
    b = b if has_bias else None
    want = expected(h, w, b, t, g, **options)
    lo, hi = (CUTS[rank], CUTS[rank + 1]) if size == 4 else (0, V)
    mine = [leaf(h), leaf(w[lo:hi]), leaf(None if b is None else b[lo:hi])]
    logp, entropy = linear_logprob(*mine, target=t, tp_group=group, vocab=(lo, None), entropy=True,
                                      mode=mode, chunk_size=chunk, **options)
    assert logp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    near(logp, want[0], dtype, 'logp')
    near(entropy, want[1], dtype, 'entropy')
    (logp * g[0] + entropy * g[1]).sum().backward()
    near(mine[0].grad, want[2], dtype, 'd_hidden')
    near(mine[1].grad, want[3][lo:hi], dtype, 'd_weight')
    if b is not None:
        near(mine[2].grad, want[4][lo:hi], dtype, 'd_bias')
    assert mine[1].grad.dtype == dtype
    return logp.tolist(), mine[0].grad.tolist()


def many(rank, dtype):
    return [agrees(rank, 4, dist.group.WORLD, dtype, mode, bias, chunk, options)
            for mode, bias, chunk, options in itertools.product(
                ('logprob', 'keep', 'auto'), (False, True), (None, 4),
                ({}, {'softcap': 5.0, 'temperature': 0.7, 'scale': 1.3}))]


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_and_gradients_on_processes(world, dtype):
    said = world.run(many, dtype)
    assert all(s == said[0] for s in said)  # the same bits everywhere


def test_outputs_and_gradients_on_threads_and_alone():
    for mode, chunk in itertools.product(('logprob', 'keep'), (None, 4)):
        cb.run_threads(4, lambda world: agrees(world.rank, 4, world, torch.float64, mode, True, chunk, {}))
        agrees(0, 1, None, torch.float32, mode, True, chunk, {'scale': 1.3})


def brings(world, what, level):
    """One rank brings something else: hidden states or targets. Those of ignored tokens are never read."""
    h, w, _, t, _ = case()
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    flat = t.reshape(-1)
    kept, ignored = (flat != -100).nonzero()[0], (flat == -100).nonzero()[0]
    good = h.clone()
    if world.rank == 2:
        good.view(-1, H)[ignored] = float('nan')
    bad_h, bad_t = good.clone(), t.clone()
    if world.rank == 2:
        bad_h.view(-1, H)[kept, 3] += 1e-9
        bad_t.view(-1)[kept] = (flat[kept] + 1) % V
    for fn in linear_logprob, linear_nll, ct.nll, ct.logprob:
        linear = fn in (linear_logprob, linear_nll)

        def call(h, t):
            return fn(*((h, w[lo:hi]) if linear else ((h.nan_to_num() @ w.t())[..., lo:hi],)), target=t, tp_group=world, vocab=(lo, None))
        world.set_check(level)
        call(good, t)
        if what == 'hidden states' and (not linear or level < 2):
            call(bad_h, t)  # logits of other hidden states are not compared
            continue
        with pytest.raises(cb.MismatchError) as why:
            call(*((bad_h, t) if what == 'hidden states' else (good, bad_t)))
        words = 'ranks [0, 1, 3] and [2] bring other %s; expected the same on all ranks that share the vocabulary' % what
        assert str(why.value) == '%s: %s' % (fn.__name__, words) if level > 1 else 'other targets' in str(why.value)
        call(good, t.int())


@pytest.mark.parametrize('level', [1, 2])
@pytest.mark.parametrize('what', ['hidden states', 'targets'])
def test_ranks_of_a_vocabulary_that_bring_other_things_are_named(what, level):
    cb.run_threads(4, lambda world: brings(world, what, level))


def weighs(world):
    h, w, _, t, _ = case((8,))
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    ignored = t == -100
    assert ignored.any()
    for fn in (linear_nll, ct.nll):
        args = (h, w[lo:hi]) if fn is linear_nll else (h.nan_to_num() @ w[lo:hi].t(),)

        def call(mask, groups, numbers, **options):
            given = {} if groups is None else dict(groups=groups, group_weight=numbers)
            return fn(*args, target=t, tp_group=world, vocab=(lo, None), mask=mask, **given, **options)
        world.set_check(2)
        mask, groups, numbers = torch.linspace(.5, 1, len(t)), torch.arange(len(t)) % 2, (1.0, 2.0)
        other = torch.arange(world.rank * 1.0, world.rank + len(t))
        call(torch.where(ignored, other, mask), torch.where(ignored, world.rank % 2, groups), numbers)  # nobody reads them
        bad = world.rank == 2
        for of, given in (('weights of tokens', (mask * (.9 if bad else 1), None, None)), ('groups', (mask, 1 - groups if bad else groups, numbers)),
                          ('group weights', (None, groups, (1.0, 2.0 + bad)))):
            with pytest.raises(cb.MismatchError, match=r'ranks \[0, 1, 3\] and \[2\] bring other %s; expected the same' % of):
                call(*given)
        with pytest.raises(cb.MismatchError, match='bring other weights of tokens'):
            call(mask * (.9 if bad else 1), None, None, reduction='none', **({'mode': 'auto'} if fn is linear_nll else {}))


def test_ranks_of_a_vocabulary_that_weigh_tokens_otherwise_are_named():
    cb.run_threads(4, weighs)


def scattered(world):
    h, w, _, t, _ = case((8,))
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    args = {'target': t, 'tp_group': world, 'vocab': (lo, None), 'd_hidden': 'reduce_scatter'}
    mine = h[2 * world.rank:2 * world.rank + 2]
    world.set_check(2)
    assert torch.equal(linear_logprob(mine, w[lo:hi], **args), linear_logprob(
        h, w[lo:hi], **{**args, 'd_hidden': 'all_reduce'}))
    if world.rank == 2:
        args['target'] = torch.where(t == -100, t, (t + 1) % V)
    with pytest.raises(cb.MismatchError, match='bring other targets'):
        linear_logprob(mine, w[lo:hi], **args)


def test_hidden_states_of_each_ranks_own_tokens_are_not_compared():
    cb.run_threads(4, scattered)


@pytest.mark.parametrize('fn', [linear_logprob, linear_nll])
def test_without_gradients_nothing_is_kept_for_a_backward(fn, monkeypatch):
    from colobridge import _structs
    from colobridge.torch.linear_plan import Core
    h, w, b, t, _ = case((2, 7))  # of no other test: sizes are asked for once
    passes, keeps = [], []
    workspace = Core.workspace
    monkeypatch.setattr(Core, 'workspace', lambda self, which, *sizes: (
        passes.append(which), workspace(self, which, *sizes))[1])
    monkeypatch.setattr(Core, 'saved', lambda *_: keeps.append(1))
    with torch.no_grad():  # parameters still say requires_grad
        fn(h, leaf(w), leaf(b), target=t, mode='keep')
    assert passes == [_structs.LINEAR_LOGPROB_INFERENCE] and not keeps


def test_a_head_says_what_makes_products_on_the_host(monkeypatch):
    from colobridge import _structs
    from colobridge.torch.linear_plan import Core
    h, w, b, t, _ = case()
    auto = linear_logprob(h, w, b, target=t)
    chosen, make = [], Core.__init__
    monkeypatch.setattr(Core, '__init__', lambda self, comm, head_comm, head, config: (
        chosen.append(head.gemm), make(self, comm, head_comm, head, config))[1])
    assert torch.allclose(linear_logprob(h, w, b, target=t, gemm='loops'), auto)
    assert torch.allclose(linear_logprob(h, w, b, target=t), auto)
    assert chosen == [_structs.GEMM_LOOPS]


def late(rank):
    h, w, b, t, _ = case()
    w = leaf(w[CUTS[rank]:CUTS[rank + 1]])
    args = dict(target=t, tp_group=dist.group.WORLD, vocab=(CUTS[rank], V))
    out = linear_logprob(h, w, **args)
    dist.barrier()
    ct.shutdown()
    with pytest.raises(RuntimeError, match='communicator of the forward pass was destroyed'):
        out.sum().backward()
    linear_logprob(h, w, **args).sum().backward()


def test_a_graph_that_outlives_its_communicator_is_told(world):
    world.run(late)


def test_chunks_modes_and_bounds_do_not_change_a_bit_of_outputs_and_d_hidden():
    h, w, b, t, g = case((6, 11), torch.float32)
    seen = []
    for mode, chunk in itertools.product(('logprob', 'keep'), (1, 7, 16, 64, None)):
        x = leaf(h)
        out = linear_logprob(x, leaf(w), leaf(b), target=t, mode=mode, chunk_size=chunk,
                                max_valid=None if chunk != 7 else int((t != -100).sum()))
        (out * g[0]).sum().backward()
        seen.append((out.detach(), x.grad))
    for out, grad in seen[1:]:
        assert torch.equal(out, seen[0][0]) and torch.equal(grad, seen[0][1])


@pytest.mark.parametrize('mode', ['logprob', 'keep', 'loss', 'known'])
def test_invariant_gives_the_same_bits_on_1_2_4_and_8_ranks(mode):
    rows, tokens, width = 128, 9, 24  # 100 is padded to 128: 8 segments of 16
    rng = torch.Generator().manual_seed(4)
    h, w = (torch.randn(n, width, generator=rng).bfloat16() for n in (tokens, rows))
    t = torch.randint(0, 100, (tokens,), generator=rng)

    def bits(world):
        each = rows // world.size
        x, y = h.clone().requires_grad_(), w[world.rank * each:(world.rank + 1) * each].clone().requires_grad_()
        shared = dict(target=t, tp_group=world, vocab=100, invariant=True, chunk_size=4 * world.size)
        if mode in ('loss', 'known'):
            known = {'upstream': 1 / 3} if mode == 'known' else {}
            loss, out = linear_nll(x, y, reduction='sum', **shared, **known)[0] / 3, []
        else:
            out = linear_logprob(x, y, entropy=True, mode=mode, **shared)
            loss = out[0].sum() + 2 * out[1].sum()
        loss.backward()
        return torch.stack([loss.detach().expand(tokens), *(o.detach() for o in out)]), x.grad, y.grad

    whole = cb.run_threads(1, bits)[0]
    for size in (2, 4, 8):
        parts = cb.run_threads(size, bits)
        assert all(torch.equal(p[0], whole[0]) and torch.equal(p[1], whole[1]) for p in parts)
        assert torch.equal(torch.cat([p[2] for p in parts]), whole[2])
    with pytest.raises(ValueError, match='the head has 100 rows here, expected 128'):
        linear_logprob(h, w[:100], target=t, invariant=True)


def test_gradcheck():
    h, w, b, t, _ = case((4,))
    for mode in ('logprob', 'keep'):
        assert torch.autograd.gradcheck(
            lambda *x: linear_logprob(*x, target=t, entropy=True, loss=True, mode=mode,
                                         label_smoothing=0.1, z_loss=0.01, temperature=0.7),
            (leaf(h), leaf(w), leaf(b)))


def test_calls_that_differ_in_one_thing_do_not_share_what_they_prepared():
    h, w, b, t, g = case((3, 5))
    spread = torch.full((V, 2 * H), float('nan'), dtype=torch.float64)
    spread[:, :H] = w
    other = (w * 1.5).clone()
    for _ in range(3):
        for name, (x, y, z, options) in {
                'as it is': (h, w, b, {}), 'another weight': (h, other, b, {}), 'another bias': (h, w, -b, {}),
                'no bias': (h, w, None, {}), 'weight with strides': (h, spread[:, :H], b, {}),
                'a transposed weight': (h, w.t().contiguous().t(), b, {}), 'softcap': (h, w, b, {'softcap': 2.0}), 'scale': (h, w, b, {'scale': -0.5}),
                'hidden with strides': (h.transpose(0, 1).contiguous().transpose(0, 1), w, b, {}),
                'keep': (h, w, b, {'mode': 'keep'}), 'as it was': (h, w, b, {})}.items():
            leaves = [None if v is None else v.detach().requires_grad_() for v in (x, y, z)]
            want = expected(x, y, z, t, g, **{k: v for k, v in options.items() if k != 'mode'})
            out = linear_logprob(*leaves, target=t, entropy=True, **options)
            (out[0] * g[0] + out[1] * g[1]).sum().backward()
            near(out[0], want[0], torch.float64, name)
            for v, grad in zip(leaves, want[2:]):
                if v is not None:
                    near(v.grad, grad, torch.float64, name)
    first, second = leaf(w), leaf(other)  # two forwards, then their backwards
    a, b_ = (linear_logprob(h, y, b, target=t).sum() for y in (first, second))
    a.backward()
    b_.backward()
    for y in (first, second):
        near(y.grad, expected(h, y.detach(), b, t, torch.stack((torch.ones_like(g[0]),
                                                                torch.zeros_like(g[0]))))[3],
             torch.float64, 'in turn')


def test_a_storage_that_was_freed_is_told():
    h, w, b, t, _ = case()
    for part, name in itertools.product((2, 0), ('hidden', 'weight', 'bias')):
        given = {'hidden': leaf(h), 'weight': leaf(w), 'bias': leaf(b)}
        given[name] = freed = given[name] * 1
        out = linear_logprob(given['hidden'], given['weight'], given['bias'], target=t)
        storage = freed.untyped_storage() if hasattr(freed, 'untyped_storage') else freed._storage()
        storage.resize_(part and storage.nbytes() // part)
        with pytest.raises(RuntimeError, match=name + r': its storage holds \d+ bytes.*after forward saved'):
            out.sum().backward()
        with pytest.raises(RuntimeError, match=name + r': its storage holds \d+ bytes'):
            linear_logprob(given['hidden'], given['weight'], given['bias'], target=t)


def test_what_is_kept_may_come_back_at_any_address():
    hidden, weight = torch.randn(6000, 3, requires_grad=True), torch.randn(9, 3, requires_grad=True)
    target = torch.randint(0, 9, (6000,))

    def elsewhere(saved):
        memory = torch.empty(saved.numel() * saved.element_size() + 512, dtype=torch.uint8)
        at = -memory.data_ptr() % 256 + 64
        moved = memory[at:at + saved.numel() * saved.element_size()].view(saved.dtype).view(saved.shape)
        return moved.copy_(saved)

    def grads():
        out = linear_logprob(hidden, weight, target=target, mode='keep')
        return torch.autograd.grad(out.sum(), (hidden, weight))
    want = grads()
    with torch.autograd.graph.saved_tensors_hooks(lambda s: s, elsewhere):
        assert all(map(torch.equal, grads(), want))


def test_hidden_of_any_strides_is_read_as_it_is():
    h, w, b, t, g = case((3, 5))
    want = expected(h, w, b, t, g)
    spread = torch.full((5, 9, 2 * H), float('nan'), dtype=torch.float64)
    spread[:, 2:5, :H] = h.transpose(0, 1)
    for view in (spread[:, 2:5, :H].transpose(0, 1), h.flip(0).flip(0),
                 h.transpose(0, 2).contiguous().transpose(0, 2)):
        x = view.detach().requires_grad_()
        got = linear_logprob(x, w, b, target=t, entropy=True)
        (got[0] * g[0] + got[1] * g[1]).sum().backward()
        near(got[0], want[0], torch.float64, 'logp')
        near(x.grad, want[2], torch.float64, 'd_hidden')


def test_what_is_frozen_gets_no_gradient_and_the_rest_is_right():
    h, w, b, t, g = case()
    want = expected(h, w, b, t, g)
    for trains in itertools.product((False, True), repeat=3):
        x = [y.clone().requires_grad_(on) for y, on in zip((h, w, b), trains)]
        got = linear_logprob(*x, target=t, entropy=True)
        if not any(trains):
            assert not got[0].requires_grad
            continue
        (got[0] * g[0] + got[1] * g[1]).sum().backward()
        for y, on, d in zip(x, trains, want[2:]):
            assert (y.grad is not None) == on
            if on:
                near(y.grad, d, torch.float64, trains)


def d_hidden_of(rank):
    h, w, b, t, g = case((4, 6))
    want = expected(h, w, b, t, g)
    lo, hi = CUTS[rank], CUTS[rank + 1]
    part = leaf(h)
    for how in ('partial', 'reduce_scatter'):
        x = leaf(h) if how == 'partial' else leaf(h[rank:rank + 1])
        out = linear_logprob(x, w[lo:hi].clone().requires_grad_(), target=t,
                                tp_group=dist.group.WORLD, vocab=(lo, None), entropy=True, d_hidden=how,
                                bias=b[lo:hi])
        near(out[0], want[0], torch.float64, how)
        (out[0] * g[0] + out[1] * g[1]).sum().backward()
        if how == 'partial':
            part = x.grad
        else:
            near(x.grad, want[2][rank:rank + 1], torch.float64, how)
    return part


def test_d_hidden_partial_and_scattered(world):
    parts = world.run(d_hidden_of)
    h, w, b, t, g = case((4, 6))
    near(sum(parts), expected(h, w, b, t, g)[2], torch.float64, 'the parts add up')
    assert float((parts[0] - parts[3]).abs().max()) > 0  # they are parts


def counted(rank):
    h, w, b, t, g = case()
    lo, hi = CUTS[rank], CUTS[rank + 1]
    comm = ct.comm_of(dist.group.WORLD, h.device)
    args = {'target': t, 'tp_group': dist.group.WORLD, 'vocab': (lo, None)}
    seen = {}
    for mode, chunk in itertools.product(('logprob', 'keep', 'loss'), (None, 1)):
        for rep in range(2):  # the first makes objects
            x, y = leaf(h), leaf(w[lo:hi])
            comm.stats_reset()
            out = (linear_nll(x, y, mode='loss', chunk_size=chunk, **args).loss if mode == 'loss'
                   else linear_logprob(x, y, mode=mode, chunk_size=chunk, **args))
            ahead = {k: v['ops'] for k, v in comm.stats()['loss'].items()}
            comm.stats_reset()
            out.sum().backward()
            back = {k: v['ops'] for k, v in comm.stats().get('loss', {}).items()}
        seen[mode, chunk] = ahead, back
    return seen


def test_collectives_over_the_vocabulary_group_do_not_depend_on_chunks(world):
    for seen in world.run(counted):
        for mode, chunk in itertools.product(('logprob', 'keep'), (None, 1)):
            assert seen[mode, chunk] == ({'all_gather': 1}, {'all_reduce': 1}), (mode, chunk)
        assert seen['loss', None] == ({'all_gather': 1, 'all_reduce': 1}, {})
        assert seen['loss', 1][0]['all_gather'] == 15 and seen['loss', 1][1] == {}  # one a token


def checkpointed(rank):
    h, w, b, t, g = case()
    lo, hi = CUTS[rank], CUTS[rank + 1]

    def run(x, y):
        return linear_logprob(x.tanh(), y, target=t, tp_group=dist.group.WORLD, vocab=(lo, None))

    results = []
    for way in (run, lambda x, y: checkpoint(run, x, y, use_reentrant=False)):
        x, y = leaf(h), leaf(w[lo:hi])
        out = way(x, y)
        (out * g[0]).sum().backward()
        results.append((out.detach(), x.grad, y.grad))
    return all(torch.equal(a, b) for a, b in zip(*results))


def test_checkpointed_runs_give_the_same_bits(world):
    assert world.run(checkpointed) == [True] * 4


# ---- linear_nll ----

def token_loss(h, w, b, t, smoothing=0.0, z_loss=0.0):
    x = h.double() @ w.double().t() + b.double()
    loss = torch.nn.functional.cross_entropy(x.reshape(-1, V), t.reshape(-1), reduction='none',
                                             label_smoothing=smoothing).view(t.shape)
    lse2 = torch.logsumexp(x, -1) ** 2
    return loss + z_loss * torch.where(t != -100, lse2, torch.zeros_like(lse2))


def losses(rank, groups_of):
    """dp 2 x tp 2: tokens differ over dp, and their number does"""
    tp, dp = groups_of
    pairs = [dist.new_group(r) for r in ([0, 1], [2, 3])], [dist.new_group(r) for r in ([0, 2], [1, 3])]
    tp_group, dp_group = pairs[0][rank // 2], pairs[1][rank % 2]
    lo, hi = (0, 9) if rank % 2 == 0 else (9, V)
    mine = case(seed=1 + rank // 2)
    h, w, b, t, g = mine
    w, b = case()[1], case()[2]  # the same weights everywhere
    if rank // 2:
        t.reshape(-1)[:7] = -100
    mask = torch.arange(t.numel()).view(t.shape) % 5 != 0
    results = []
    for reduction, mode, smoothing in itertools.product(('mean', 'sum'), ('loss', 'logprob', 'keep'),
                                                        (0.0, 0.1, 1.0)):
        sides = [case(seed=1)[0], case(seed=2)[0]]
        targets = [case(seed=1)[3], case(seed=2)[3]]
        targets[1].reshape(-1)[:7] = -100
        targets = [torch.where(mask, x, torch.full_like(x, -100)) for x in targets]
        whole = [leaf(sides[0]), leaf(sides[1]), leaf(w), leaf(b)]
        total = sum(token_loss(x, whole[2], whole[3], y, smoothing, 0.01).sum()
                    for x, y in zip(whole, targets))
        den = sum(int((x != -100).sum()) for x in targets)
        want = total / den if reduction == 'mean' else total
        (want * 3).backward()
        x = [leaf(h), leaf(w[lo:hi]), leaf(b[lo:hi])]
        got = linear_nll(*x, target=t, mask=mask, reduction=reduction, mode=mode, tp_group=tp_group,
                            vocab=(lo, V), reduce_group=dp_group,
                            label_smoothing=smoothing, z_loss=0.01, chunk_size=4)
        assert int(got.den) == den
        near(got.loss, want.detach(), torch.float64, 'loss')
        near(got.num, total.detach(), torch.float64, 'num')
        (got.loss * 3).backward()
        near(x[0].grad, whole[rank // 2].grad, torch.float64, 'd_hidden')
        for grad, name, all_of in ((x[1].grad, 'd_weight', whole[2].grad), (x[2].grad, 'd_bias',
                                                                            whole[3].grad)):
            summed = grad.clone()
            dist.all_reduce(summed, group=dp_group)
            near(summed, all_of[lo:hi], torch.float64, name)
        results.append(float(got.loss))
    return results


def test_loss_mode_and_the_others_agree_with_cross_entropy_of_everything(world):
    said = world.run(losses, (2, 2))
    assert all(s == said[0] for s in said)


def test_loss_without_gradients_none_and_no_valid_token():
    h, w, b, t, _ = case()
    with torch.no_grad():
        quiet = linear_nll(h, w, b, target=t)
    near(quiet.loss, token_loss(h, w, b, t).sum() / (t != -100).sum(), torch.float64, 'mean')
    per = linear_nll(h, w, b, target=t, reduction='none', mode='auto')
    near(per, token_loss(h, w, b, t), torch.float64, 'none')
    x, y = leaf(h), leaf(w)
    nothing = linear_nll(x, y, target=torch.full_like(t, -100))
    nothing.loss.backward()
    assert float(nothing.loss) == 0 and not x.grad.any() and not y.grad.any()


def test_loss_mode_of_a_narrow_head_keeps_gradients_of_logits(monkeypatch):
    from colobridge import _structs as st
    from colobridge.torch.linear_plan import Core
    h, w, b, t, _ = case((2, 9), torch.bfloat16)  # of no other test: sizes are asked for once
    want = [leaf(x.double()) for x in (h, w, b)]
    (3 * token_loss(*want, t).sum() / (t != -100).sum()).backward()
    passes = []
    workspace = Core.workspace
    monkeypatch.setattr(Core, 'workspace', lambda self, which, *sizes: (
        passes.append(which), workspace(self, which, *sizes))[1])
    leaves = [leaf(x) for x in (h, w, b)]
    loss = linear_nll(*leaves, target=t).loss
    first = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    assert passes == [st.LINEAR_LOGPROB_FORWARD, st.LINEAR_LOGPROB_BACKWARD]
    for got, again, x in zip(first, torch.autograd.grad(3 * loss, leaves), want):
        assert got.dtype == torch.bfloat16 and torch.equal(got, again)
        near(got, x.grad, torch.bfloat16, 'gradients')
    for most, chunk, trains, begins in ((None, None, False, st.LINEAR_LOGPROB_LOSS),  # nothing to sum
                                        (1 << 20, None, True, st.LINEAR_LOGPROB_LOSS),  # more than sums would take
                                        (4000, None, True, st.LINEAR_LOGPROB_FORWARD),
                                        (4000, 4, True, st.LINEAR_LOGPROB_LOSS)):  # more than a chunk, which is bound
        passes.clear()
        linear_nll(leaf(h), leaf(w) if trains else w, target=t, max_valid=most,
                      chunk_size=chunk).loss.backward()
        assert passes[0] == begins, (most, chunk)


def test_loss_mode_makes_the_gradient_of_a_large_weight_where_those_of_logits_are():
    tokens, width, words = 200, 64, 9001
    rng = torch.Generator().manual_seed(6)
    h, w, b = (torch.randn(*n, generator=rng).bfloat16() for n in ((tokens, width), (words, width), (words,)))
    t = torch.randint(0, words, (tokens,), generator=rng)
    want = [leaf(x.double()) for x in (h, w, b)]
    (3 * torch.nn.functional.cross_entropy(want[0] @ want[1].t() + want[2], t)).backward()
    kept = []

    def pack(x):
        kept.append(x.numel() * x.element_size())
        away = torch.zeros(x.numel() + 64, dtype=x.dtype)
        start = next(i for i in range(64) if away[i:].data_ptr() % 256)
        return away[start:start + x.numel()].view(x.shape).copy_(x)

    def both(hooks):
        leaves = [leaf(x) for x in (h, w, b)]
        with hooks:
            loss = linear_nll(*leaves, target=t).loss
        (3 * loss).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match='a second backward, but mode="loss" makes gradients once'):
            loss.backward()
        return [x.grad for x in leaves]

    plain, moved = both(contextlib.nullcontext()), both(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
    for got, again, x in zip(plain, moved, want):
        assert torch.equal(got, again)
        assert float((got.double() - x.grad).norm() / x.grad.norm()) < 2 ** -8  # two roundings to 8 bits
    assert plain[1].storage().nbytes() == words * width * 2 + 255  # what forward allocated, and no copy
    inputs = sum(x.numel() * x.element_size() for x in (h, w, b, t))
    assert sum(kept) - inputs < 1.03 * tokens * words * 2  # gradients of logits, of weight none besides


def test_loss_mode_runs_backward_once():
    h, w, b, t, _ = case()
    x = leaf(h)
    loss = linear_nll(x, w, target=t).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='a second backward, but mode="loss" makes gradients once'):
        loss.backward()
    with pytest.raises(ValueError, match="reduction is 'none'"):
        linear_nll(x, w, target=t, reduction='none')


# ---- main_grad ----

def test_gradients_are_added_to_main_grad():
    h, w, b, t, g = case(dtype=torch.bfloat16)
    for mode in ('logprob', 'keep', 'loss'):
        x, y, z = leaf(h), leaf(w), leaf(b)
        y.main_grad = torch.ones(V, H)
        z.main_grad = torch.full((V,), 2.0)
        for _ in range(2):
            if mode == 'loss':
                (linear_nll(x, y, z, target=t, reduction='sum', main_grad=True).loss * 0.5).backward()
            else:
                out = linear_logprob(x, y, z, target=t, main_grad=True, mode=mode)
                (out * -0.5).sum().backward()
        assert y.grad is None and z.grad is None
        want = expected(h, w, b, t, torch.stack((torch.full_like(g[0], -1.0), torch.zeros_like(g[0]))))
        near(y.main_grad, want[3] + 1, torch.bfloat16, mode)  # d_logits are rounded to bf16
        near(z.main_grad, want[4] + 2, torch.bfloat16, mode)
    with pytest.raises(ValueError, match='weight has no attribute main_grad'):
        linear_logprob(h, leaf(w), target=t, main_grad=True)


@pytest.mark.parametrize('mode', ('logprob', 'keep', 'loss'))
def test_main_grad_of_what_is_frozen_is_neither_needed_nor_written(mode):
    h, w, b, t, g = case(dtype=torch.float32)
    want = expected(h, w, b, t, torch.stack((torch.full_like(g[0], -1.0), torch.zeros_like(g[0]))))

    def run(x, y, z):
        got = linear_nll(x, y, z, target=t, reduction='sum', main_grad=True, mode=mode)
        got.loss.backward()
        near(x.grad, want[2], torch.float32, 'hidden')
    for has in (False, True):
        x, y, z = leaf(h), leaf(w), leaf(b)
        z.requires_grad_(False)
        y.main_grad = torch.zeros(V, H)
        if has:
            z.main_grad = torch.ones(V)
        run(x, y, z)
        near(y.main_grad, want[3], torch.float32, 'weight')
        assert not has or (z.main_grad == 1).all()
        x, y, z = leaf(h), w, leaf(b)
        z.main_grad = torch.zeros(V)
        if has:
            y = w.clone()
            y.main_grad = torch.ones(V, H)
        run(x, y, z)
        near(z.main_grad, want[4], torch.float32, 'bias')
        assert not has or (y.main_grad == 1).all()
    run(leaf(h), w, b)


def test_an_empty_shard_may_have_any_strides():
    h, w, b, t, _ = case()

    def rank(world):
        lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
        wide, doubled = torch.stack((w[lo:hi], w[lo:hi]), -1), torch.stack((b[lo:hi], b[lo:hi]), -1)
        out = linear_logprob(leaf(h), wide[..., 0], doubled[:, 0], target=t, tp_group=world, vocab=(lo, None))
        near(out, plain(h, w, b, t)[0], torch.float64, 'logp')
    cb.run_threads(4, rank)


# ---- around it ----

def test_autocast_casts_as_a_linear_layer_does():
    h, w, b, t, g = case(dtype=torch.float32)
    x, y = leaf(h), leaf(w)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = linear_logprob(x, y, target=t)
    out.sum().backward()
    assert x.grad.dtype == y.grad.dtype == torch.float32
    u, v = leaf(h.bfloat16()), leaf(w.bfloat16())
    same = linear_logprob(u, v, target=t)
    same.sum().backward()
    assert torch.equal(out, same) and torch.equal(x.grad, u.grad.float())
    assert torch.equal(y.grad, v.grad.float())


@pytest.mark.skipif(not hasattr(torch, 'compile'),
                    reason='this PyTorch %s has no torch.compile' % torch.__version__)
def test_compiled_code_goes_around_it():
    h, w, b, t, g = case(dtype=torch.float32)

    def step(x, y):
        return linear_nll(torch.tanh(x) * 2, y, target=t).loss * 2

    grads = []
    for run in (step, torch.compile(step, backend='aot_eager')):
        x, y = leaf(h), leaf(w)
        run(x, y).backward()
        grads.append((x.grad, y.grad))
    near(grads[1][0], grads[0][0].double(), torch.float32, 'd_hidden')
    near(grads[1][1], grads[0][1].double(), torch.float32, 'd_weight')


def test_what_was_written_since_forward_is_found():
    h, w, b, t, _ = case()
    for name in ('hidden', 'weight', 'bias'):
        x = {'hidden': leaf(h), 'weight': leaf(w), 'bias': leaf(b)}
        args = {k: v * 1 for k, v in x.items()}
        out = linear_logprob(args['hidden'], args['weight'], args['bias'], target=t)
        with torch.no_grad():
            args[name].add_(1)
        with pytest.raises(RuntimeError, match='was written in place after forward'):
            out.sum().backward()


@pytest.mark.parametrize('change, words', [
    ({'weight': torch.zeros(V, H + 1)}, r'hidden is \[3, 5, 8\] and weight \[23, 9\]'),
    ({'weight': torch.zeros(V, H, dtype=torch.float64)}, 'weight is torch.float64 on cpu, hidden is'),
    ({'bias': torch.zeros(V + 1)}, r'bias is \[24\], expected \[23\]'),
    ({'target': torch.zeros(3, 4, dtype=torch.int64)}, r'target is \[3, 4\], expected \[3, 5\]'),
    ({'target': torch.zeros(3, 5)}, 'target is of torch.float32, expected an integer dtype'),
    ({'mode': 'fast'}, "mode is 'fast'"),
    ({'d_hidden': 'sum'}, "d_hidden 'sum'"),
    ({'gemm': 'mkl'}, "gemm 'mkl', expected one of .* and one of auto, cblas, loops"),
    ({'weight': 3}, 'weight is a int, expected a torch.Tensor'),
    ({'chunk_size': -1}, 'chunk_size'),
    ({'max_valid': 2}, 'max_valid'),
    ({'label_smoothing': 0.1}, 'logp is never smoothed'),
])
def test_bad_arguments_are_named(change, words):
    h, w, b, t, _ = case(dtype=torch.float32)
    args = dict({'hidden': h, 'weight': w, 'target': t}, **change)
    with pytest.raises(ValueError, match=words):
        linear_logprob(**args)


def refused(rank):
    h, w, b, t, _ = case(dtype=torch.float32)
    lo, hi = CUTS[rank], CUTS[rank + 1]
    try:
        linear_logprob(h, w[lo:hi, :H - (rank == 2)], target=t, tp_group=dist.group.WORLD,
                          vocab=(lo, None))
    except Exception as why:
        return type(why).__name__, str(why)


def test_what_one_rank_did_wrong_reaches_all(world):
    said = world.run(refused)
    assert said[2][0] == 'ArgumentError'
    assert all('hidden is [3, 5, 8] and weight [13, 7]' in words for _, words in said)
    assert all(kind == 'FailedError' for rank, (kind, _) in enumerate(said) if rank != 2)
    assert world.run(many, torch.float32)  # and the next call works
