# SPDX-License-Identifier: Apache-2.0
"""logprob() and nll() against PyTorch on the whole vocabulary: processes, threads, strides, errors."""
import contextlib
import gc
import itertools
import multiprocessing
import weakref

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_logprob, linear_nll  # noqa: E402
from colobridge.torch import ranks as groups  # noqa: E402
from world import meet  # noqa: E402

V = 23


def case(shape, dtype=torch.float64, seed=0, spread=3.0):
    """Logits of the whole vocabulary, targets with an ignored one, upstream gradients."""
    rng = torch.Generator().manual_seed(seed)
    z = (torch.randn(*shape, V, generator=rng, dtype=torch.float64) * spread).to(dtype)
    t = torch.randint(0, V, shape, generator=rng)
    t.reshape(-1)[1] = -100
    g = torch.randn(2, *shape, generator=rng, dtype=torch.float64)
    return z, t, g


def plain(z, t, temperature=1.0, softcap=None, scale=1.0):
    """logp and entropy by PyTorch, in f64."""
    x = scale * z.double()
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    lp = torch.log_softmax(x / temperature, -1)
    keep = t != -100
    logp = torch.where(keep, lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1), torch.zeros(()).double())
    h = torch.where(keep, -(lp.exp() * lp).sum(-1), torch.zeros(()).double())
    return logp, h


# f32 arithmetic on logits of spread 3: some 23 + 2 log V roundings of values below 30, that is
# 50 * 30 * 2^-24 ~ 1e-4; gradients in bf16 are rounded once, to 2^-8.
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-4, 1e-4),
             torch.bfloat16: (1e-4, 1e-2), torch.float16: (1e-4, 2e-3)}


def shards(rank, size, how):
    """[start, end) of this rank, which may be uneven or empty."""
    if how == 'even':
        each = -(-V // size)  # the last one is smaller
        return min(rank * each, V), min((rank + 1) * each, V)
    cuts = [0, 1, 1, 20, V] if size == 4 else [0] + [V] * size
    return cuts[rank], cuts[rank + 1]


def agrees(rank, size, group, dtype, how, shape):
    z, t, g = case(shape, dtype)
    lo, hi = shards(rank, size, how)
    for temperature, softcap, scale in ((1.0, None, 1.0), (0.7, 5.0, 1.3), (0.7, None, 0.5)):
        whole = z.double().clone().requires_grad_()
        want = plain(whole, t, temperature, softcap, scale)
        (want[0] * g[0] + want[1] * g[1]).sum().backward()
        mine = z[..., lo:hi].clone().requires_grad_()
        logp, h = ct.logprob(mine, t, tp_group=group, vocab=(lo, None), entropy=True,
                             temperature=temperature / scale, softcap=softcap and softcap / scale)
        real = torch.float64 if dtype == torch.float64 else torch.float32
        assert logp.dtype == h.dtype == real
        near, near_grad = TOLERANCE[dtype]
        torch.testing.assert_close(logp.double(), want[0], rtol=near, atol=near)
        torch.testing.assert_close(h.double(), want[1], rtol=near, atol=near)
        (logp.double() * g[0] + h.double() * g[1]).sum().backward()
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), whole.grad[..., lo:hi], rtol=near_grad,
                                   atol=near_grad)
    return logp.tolist()


def in_process(rank, dtype, how):
    return agrees(rank, 4, dist.group.WORLD, dtype, how, (2, 5))


@pytest.mark.parametrize('dtype', list(TOLERANCE))
def test_outputs_and_gradients_on_processes(world, dtype):
    for how in ('even', 'odd'):
        said = world.run(in_process, dtype, how)
        assert all(s == said[0] for s in said)  # the same bits everywhere


def test_outputs_and_gradients_on_threads_and_alone():
    for dtype, how, size in itertools.product(TOLERANCE, ('even', 'odd'), (1, 4)):
        cb.run_threads(size, lambda world: agrees(world.rank, size, world, dtype, how, (3, 4)))
    agrees(0, 1, None, torch.float32, 'even', (7,))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_invariant_gives_the_same_bits_on_1_2_4_and_8_ranks(dtype):
    columns, tokens = 384, 6  # 300 is padded to 384: 8 segments of 48
    rng = torch.Generator().manual_seed(3)
    z = (torch.randn(tokens, columns, generator=rng) * 3).to(dtype)
    t = torch.randint(0, 300, (tokens,), generator=rng)

    def bits(world, tokens):
        each = columns // world.size
        mine = z[tokens, world.rank * each:(world.rank + 1) * each].clone().requires_grad_()
        logp, h = ct.logprob(mine, t[tokens], tp_group=world, vocab=300, entropy=True, invariant=True)
        loss = ct.nll(mine, t[tokens], tp_group=world, vocab=300, reduction='none', label_smoothing=0.1,
                      invariant=48)
        (logp + 2 * h + 3 * loss).sum().backward()
        return torch.stack([logp, h, loss]).detach(), mine.grad

    whole = cb.run_threads(1, lambda w: bits(w, slice(0, tokens)))[0]
    for size in (2, 4, 8):
        for lo, hi in ((0, 6), (0, 1), (1, 6)):
            parts = cb.run_threads(size, lambda w: bits(w, slice(lo, hi)))
            assert all(torch.equal(p[0], whole[0][:, lo:hi]) for p in parts)
            assert torch.equal(torch.cat([p[1] for p in parts], 1), whole[1][lo:hi])
    with pytest.raises(ValueError, match='pad the vocabulary to 384 columns and give each rank 192'):
        cb.run_threads(2, lambda w: ct.logprob(z[:, w.rank * 150:w.rank * 150 + 150], t, tp_group=w, invariant=True))


def counted(rank):
    z, t, _ = case((4, 8), torch.float32)
    lo, hi = shards(rank, 4, 'even')
    mine = z[..., lo:hi].clone().requires_grad_()
    ct.logprob(mine, t, tp_group=dist.group.WORLD, vocab=(lo, None))
    comm = ct.comm_of(dist.group.WORLD, mine.device)
    comm.stats_reset()
    out = ct.logprob(mine, t, tp_group=dist.group.WORLD, vocab=(lo, None), entropy=True)
    assert comm.stats()['loss'] == {'all_gather': dict(comm.stats()['loss']['all_gather'], ops=1)}
    assert set(comm.stats()) <= {'loss', 'check'}
    comm.stats_reset()
    sum(o.sum() for o in out).backward()
    assert comm.stats() == {}


def test_one_gather_forward_and_none_backward(world):
    world.run(counted)


def test_gradcheck():
    z, t, _ = case((2, 3))
    z.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: ct.logprob(z, t, entropy=True, loss=True, label_smoothing=0.1, z_loss=1e-2,
                             softcap=4.0, temperature=0.8), (z,))
    for reduction in ('sum', 'mean', 'none'):
        assert torch.autograd.gradcheck(
            lambda z: ct.nll(z, t, reduction=reduction, label_smoothing=0.2)[0], (z,))


VIEWS = {'a slice of a longer sequence': lambda z: z[:, :-1], 'sbh': lambda z: z.transpose(0, 1),
         'some columns': lambda z: z[..., 3:20], 'every second row': lambda z: z[:, ::2],
         'every second column': lambda z: z[..., ::2], 'one sample': lambda z: z[1],
         'repeated rows': lambda z: z[:, :1].expand(-1, 4, -1), 'no rows': lambda z: z[:, :0],
         'reordered': lambda z: z.permute(1, 2, 0), 'one token': lambda z: z[1, 2]}


@pytest.mark.parametrize('name', list(VIEWS))
def test_logits_are_read_where_they_are(name):
    from colobridge.torch.rows import rows_of
    z, _, _ = case((4, 6))
    cut = VIEWS[name]
    shape = cut(z).shape
    t = torch.randint(0, shape[-1], shape[:-1], generator=torch.Generator().manual_seed(4))
    whole, mine = z.clone().requires_grad_(), z.clone().requires_grad_()
    want, got = plain(cut(whole), t), ct.logprob(cut(mine), t, entropy=True)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    mean = ct.nll(cut(mine), t)  # rows between those of a slice are not tokens
    assert int(mean.den) == t.numel()
    torch.testing.assert_close(mean.loss, -want[0].sum() / max(t.numel(), 1), rtol=1e-12, atol=1e-12)
    weights = torch.arange(1.0, 1.0 + want[0].numel(), dtype=torch.float64).reshape(want[0].shape)
    ((want[0] + 2 * want[1]) * weights).sum().backward()
    ((got[0] + 2 * got[1]) * weights).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-11, atol=1e-11)
    copied = rows_of(cut(z))[0].data_ptr() != cut(z).data_ptr()
    assert copied == (name in ('every second column', 'repeated rows', 'reordered'))


def test_calls_that_differ_in_one_thing_do_not_share_what_they_prepared():
    z, t, _ = case((3, 4))
    wide = torch.full((3, 5, V + 4), float('nan'), dtype=torch.float64)
    wide[:, :4, 2:2 + V] = z
    t32 = t.to(torch.int32)
    calls = {
        'as it is': (z, t, {}), 'f32': (z.float(), t, {}), 'int32 targets': (z, t32, {}),
        'strides': (wide[:, :4, 2:2 + V], t, {}), 'other strides': (z.transpose(0, 1).contiguous().transpose(0, 1), t, {}),
        'targets with strides': (z, t.t().contiguous().t(), {}), 'temperature': (z, t, {'temperature': 0.5}),
        'softcap': (z, t, {'softcap': 3.0}), 'ignore_index': (z, t.where(t >= 0, torch.tensor(3)), {'ignore_index': 3}),
        'one axis': (z.reshape(12, V), t.reshape(12), {}), 'one token': (z[1, 2], t[1, 2], {}),
        'V': (z, t.clamp(max=9), {'vocab': 10})}
    for _ in range(3):
        for name, (logits, target, options) in calls.items():
            x = logits.detach().requires_grad_()
            out = ct.logprob(x, target, entropy=True, **options)
            whole = logits.detach().double().requires_grad_()
            keep = target if options.get('ignore_index') is None else target.where(target != 3, torch.tensor(-100))
            cut = whole[..., :10] if name == 'V' else whole
            want = plain(cut, keep.long(), options.get('temperature', 1.0), options.get('softcap'))
            near = TOLERANCE[logits.dtype][0] * 10
            for a, b in zip(out, want):
                torch.testing.assert_close(a.double(), b, rtol=near, atol=near, msg=name)
            (out[0] - 2 * out[1]).sum().backward()
            (want[0] - 2 * want[1]).sum().backward()
            torch.testing.assert_close(x.grad.double(), whole.grad, rtol=near, atol=near, msg=name)
    with torch.no_grad():  # the same shapes without a backward
        assert not ct.logprob(z.clone().requires_grad_(), t).requires_grad


def test_an_option_that_is_a_tensor_is_the_number_it_is_at_the_call():
    logits, target = torch.randn(5, 7), torch.randint(0, 7, (5,))
    tau = torch.tensor(1.)
    for value in (1., 2.):
        tau.fill_(value)
        want = torch.log_softmax(logits / value, -1).gather(1, target[:, None])[:, 0]
        for temperature in (tau, value):
            torch.testing.assert_close(ct.logprob(logits, target, temperature=temperature), want)


def test_saved_tensors_may_come_back_with_other_strides():
    z, t, _ = case((3, 5))
    for cut in (lambda z: z[:, :-1], lambda z: z.transpose(0, 1), lambda z: z[..., 3:20]):
        target = t[:, :-1] if cut(z).shape[1] == 4 else t.t() if cut(z).shape[0] == 5 else t % 17
        want, got = z.clone().requires_grad_(), z.clone().requires_grad_()
        ct.nll(cut(want), target).loss.backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda s: s.clone(memory_format=torch.contiguous_format),
                                                      lambda s: s):
            loss = ct.nll(cut(got), target).loss
        loss.backward()
        assert torch.equal(want.grad, got.grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda s: s, lambda s: s.float() if s.is_floating_point() else s):
        out = ct.logprob(z.clone().requires_grad_(), t)
    with pytest.raises((ValueError, RuntimeError), match='logits came back from forward as .*float32'):
        out.sum().backward()


def test_backward_on_many_threads_at_once():
    import concurrent.futures
    leaves = [case((40, 50), torch.float32, seed)[0].requires_grad_() for seed in range(8)]
    t = case((40, 50))[1]
    outs = [ct.logprob(z, t) for z in leaves]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pair: torch.autograd.grad(pair[0].sum(), pair[1])[0], zip(outs, leaves)))
    for z, grad in zip(leaves, got):
        assert torch.equal(grad, torch.autograd.grad(ct.logprob(z, t).sum(), z)[0])


def threads_come_and_go():
    z, t, _ = case((3, 7))
    seen = []

    def rank(_world):
        ct.logprob(z[:, :-1], t[:, :-1], entropy=True)  # the plan of a slice holds views
        seen.append(weakref.ref(groups.alone()))
    for _ in range(20):
        cb.run_threads(2, rank)
    assert not any(comm() for comm in seen[:-2])
    assert any(comm() for comm in seen[-2:])  # left to the next thread, which has not come


def test_threads_without_a_group_end_and_their_tensors_are_freed():
    process = multiprocessing.get_context('fork').Process(target=threads_come_and_go)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_forked_child_has_groups_of_one_of_its_own():
    def losses():
        z, t, _ = case((3, 7))
        return ct.nll(z, t).loss.item(), linear_nll(z.requires_grad_(), z[0].detach(), target=t % 7).loss.item()

    mine, theirs = losses(), multiprocessing.get_context('fork').Pipe(duplex=False)
    process = multiprocessing.get_context('fork').Process(target=lambda: theirs[1].send(losses()))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and theirs[0].recv() == mine


def test_nothing_of_the_size_of_the_logits_is_made_but_their_gradient():
    tokens, vocab = 64, 20000
    z = torch.randn(tokens, vocab, requires_grad=True)
    t = torch.randint(0, vocab, (tokens,))
    size = z.numel() * z.element_size()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as seen:
        ct.logprob(z, t, entropy=True)[0].sum().backward()
    made = [e.cpu_memory_usage for e in seen.events() if e.cpu_memory_usage > 0]
    big = [n for n in made if n > size // 8]
    assert big and all(n <= size * 1.01 for n in big), made
    # the gradient once, seen in a call and, at most, in those around it
    assert sum(n for n in made if n <= size // 8) < size // 8
    del seen
    gc.collect()


def reduced(rank):
    """Two tp ranks, two dp ranks with uneven masks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]),
              dist.new_group([1, 3])]
    tp, dp = groups[rank // 2], groups[2 + rank % 2]
    zs = [case((3, 4), torch.float64, seed)[0] for seed in (0, 1)]
    ts = [case((3, 4), torch.float64, seed)[1] for seed in (0, 1)]
    ts[1][0, 2:] = -100
    mask = torch.ones(3, 4)
    mask[2] = 0
    whole = [z.clone().requires_grad_() for z in zs]
    for masked in (False, True):
        losses = [torch.nn.functional.cross_entropy(w.reshape(-1, V), t.reshape(-1), reduction='none',
                                                    label_smoothing=0.1).reshape(3, 4)
                  for w, t in zip(whole, ts)]
        if masked:
            losses = [x * mask for x in losses]
        den = sum(int(((t != -100) & ((mask > 0) | (not masked))).sum()) for t in ts)
        want = (losses[0].sum() + losses[1].sum()) / den
        for w in whole:
            w.grad = None
        want.backward()
        half = slice(0, 12) if rank % 2 == 0 else slice(12, V)
        me = rank // 2
        z = zs[me][..., half].clone().requires_grad_()
        got = ct.nll(z, ts[me], mask=mask if masked else None, tp_group=tp, reduce_group=dp,
                     vocab=(half.start, None), label_smoothing=0.1)
        torch.testing.assert_close(got.loss, want.detach(), rtol=1e-12, atol=1e-12)
        assert int(got.den) == den and not got.den.requires_grad
        got.loss.backward()
        torch.testing.assert_close(z.grad, whole[me].grad[..., half], rtol=1e-11, atol=1e-12)
    none = ct.nll(z, torch.full((3, 4), -100), tp_group=tp, reduce_group=dp, vocab=(half.start, None))
    none.loss.backward()
    assert none.loss.item() == 0 and int(none.den) == 0


def test_mean_is_divided_once_over_all_ranks(world):
    world.run(reduced)


def test_writing_saved_logits_is_refused():
    z, t, _ = case((2, 3))
    leaf = z.clone().requires_grad_()
    logits = leaf * 1
    out = ct.logprob(logits, t)
    logits += 1
    with pytest.raises(RuntimeError, match='was written in place after forward saved it'):
        out.sum().backward()
    logits = leaf * 1
    out = ct.logprob(logits, t)
    (logits.untyped_storage() if hasattr(logits, 'untyped_storage') else logits.storage()).resize_(0)
    with pytest.raises(RuntimeError, match='logits: its storage holds 0 bytes.*freed or resized'):
        out.sum().backward()


def test_gradient_in_place_of_the_logits():
    z, t, _ = case((3, 4))
    want = z.clone().requires_grad_()
    plain(want, t)[0].sum().backward()
    leaf = z.clone().requires_grad_()
    logits = leaf * 1
    at = logits.data_ptr()
    out = ct.logprob(logits, t, inplace_backward=True)
    seen = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    out.sum().backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, want.grad, rtol=1e-12, atol=1e-12)
    assert seen == [at]
    with pytest.raises(RuntimeError, match='second backward'):
        out.sum().backward()
    with pytest.raises(ValueError, match='inplace_backward'):
        ct.logprob(z[:, :-1], t[:, :-1], inplace_backward=True)


@pytest.mark.parametrize('fn', [lambda z, t, **way: ct.nll(z, t, **way).loss,
                                lambda z, t, **way: ct.logprob(z, t, **way).sum()], ids=['nll', 'logprob'])
def test_gradient_in_place_of_logits_that_others_saved_is_refused_to_them(fn):
    z, t, _ = case((3, 4))
    leaf = z.clone().requires_grad_()
    logits = leaf * 1
    with pytest.raises(RuntimeError, match='written in place|modified by an inplace operation'):
        (fn(logits, t) + fn(logits, t, inplace_backward=True)).backward()  # the last one runs first
    logits = leaf.exp()  # saves its output
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        fn(logits, t, inplace_backward=True).backward()
    want, = torch.autograd.grad(2 * fn(leaf * 1, t), leaf)
    logits = leaf * 1
    got, = torch.autograd.grad(fn(logits, t, inplace_backward=True) + fn(logits, t), leaf)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = torch.nn.Linear(5, V).double()

    def forward(self, x, t):
        logp, h = ct.logprob(self.linear(x), t, entropy=True)
        return -(logp + 0.1 * h).sum()


def grads(fn, head):
    head.zero_grad()
    fn().backward()
    return [p.grad.clone() for p in head.parameters()]


def test_checkpointing_and_autocast():
    head = Head()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    _, t, _ = case((3, 4))
    want = grads(lambda: head(x, t), head)
    got = grads(lambda: checkpoint(head, x, t, use_reentrant=False), head)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    with torch.autograd.graph.saved_tensors_hooks(lambda s: s.clone(), lambda s: s.clone()):
        got = grads(lambda: head(x, t), head)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    half = Head().float()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = ct.logprob(half.linear(x.float()), t)
        assert half.linear(x.float()).dtype == torch.bfloat16 and out.dtype == torch.float32
        out.sum().backward()
    assert half.linear.weight.grad.dtype == torch.float32


def test_compiled_code_calls_it():
    if not hasattr(torch, 'compile') or not hasattr(torch, 'compiler'):
        pytest.skip('this torch has no torch.compile')
    head = Head()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    _, t, _ = case((3, 4))
    want = grads(lambda: head(x, t), head)
    got = grads(lambda: torch.compile(head, backend='eager')(x, t), head)
    assert all(torch.equal(a, b) for a, b in zip(want, got))


@pytest.mark.parametrize('call, words', [
    (lambda z, t: ct.logprob(z, t[0]), r'target is \[3\], expected \[2, 3\]'),
    (lambda z, t: ct.logprob(z, t.float()), 'target is of torch.float32, expected an integer'),
    (lambda z, t: ct.logprob(z.long(), t), 'logits are .* of torch.int64'),
    (lambda z, t: ct.logprob([1], t), 'logits are a list'),
    (lambda z, t: ct.logprob(z.to('meta'), t.to('meta')), 'meta'),
    (lambda z, t: ct.logprob(z, t.to('meta')), 'target is on meta, logits are on cpu'),
    (lambda z, t: ct.logprob(z, t, temperature=0.0), 'temperature is 0'),
    (lambda z, t: ct.logprob(z, t, vocab=(3, None)), r'columns \[3, 26\) on a group of one'),
    (lambda z, t: ct.logprob(z, t, vocab=(-1, None)), r'vocab: \[-1, 22\) are not the ids of 23 columns'),
    (lambda z, t: ct.nll(z, t, vocab=()), r'nll: vocab is \(\), expected V, or'),
    (lambda z, t: ct.nll(z, t, vocab=(0, V, V)), r'nll: vocab is \(0, 23, 23\), expected V, or'),
    (lambda z, t: ct.logprob(z, t, z_loss=0.1), 'act on the loss'),
    (lambda z, t: ct.logprob(z, t, tp_group='tp'), 'tp_group is a str, expected a torch process group'),
    (lambda z, t: ct.logprob(z, t, tp_group=dist.GroupMember.NON_GROUP_MEMBER), 'torch.distributed is not initialised'),
    (lambda z, t: ct.nll(z, t, reduction='avg'), "reduction is 'avg'"),
    (lambda z, t: ct.logprob(z, t.to(torch.complex128)), 'complex128, expected an integer'),
    (lambda z, t: linear_logprob(z, z[0], target=t.to(torch.complex64)), 'complex64, expected an'),
    (lambda z, t: linear_nll(z, z[0], target=t, mask=[1]), r'mask is a list, expected \[2, 3\]'),
    (lambda z, t: ct.nll(z, t, mask=t[0]), r'mask is \[3\] on cpu, expected \[2, 3\]'),
])
def test_bad_arguments_are_refused_in_words(call, words):
    z, t, _ = case((2, 3))
    with pytest.raises((ValueError, RuntimeError), match=words):
        call(z, t)


def mistakes(rank):
    z, t, _ = case((2, 3), torch.float32)
    mine = z[..., :6].clone()
    bad = t if rank != 1 else t[0]
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match=r'target is \[3\], expected'):
        ct.logprob(mine, bad, tp_group=dist.group.WORLD, vocab=24)
    assert ct.logprob(mine, t, tp_group=dist.group.WORLD, vocab=24).shape == (2, 3)
    meet()
    for fn in (lambda m: ct.nll(mine, t, mask=m, tp_group=dist.group.WORLD, vocab=24),
               lambda m: linear_nll(mine, mine[0, :, :6], target=t, mask=m, vocab=12,
                                       tp_group=dist.group.WORLD)):
        with pytest.raises(ValueError if rank == 1 else RuntimeError, match=r'mask is \[3\] on cpu, expected'):
            fn(t[0] if rank == 1 else t)
    other = t.clone()
    other[0, 0] = rank
    with pytest.raises(cb.MismatchError, match='other targets'):
        ct.logprob(mine, other, tp_group=dist.group.WORLD, vocab=24)
    pair = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match='without this rank|expected a torch'):
            ct.logprob(mine, t, tp_group=pair)
    else:
        ct.logprob(z[..., :12] if rank == 0 else z[..., 12:], t, tp_group=pair,
                   vocab=(12 * rank, None))
        dist.destroy_process_group(pair)
        with pytest.raises(RuntimeError, match='was destroyed'):
            ct.logprob(mine, t, tp_group=pair)


def test_one_ranks_mistake_is_every_ranks_error(world):
    world.run(mistakes)


@pytest.mark.parametrize('of', ('logprob', 'linear_logprob', 'linear_distill'))
def test_shards_that_one_rank_corrects_are_asked_for_again(of):
    def corrected(world):
        z, t, _ = case((2, 3), torch.float32)
        lo = 5 * world.rank

        def call(first):
            if of == 'linear_distill':
                head = ct.Head(torch.ones(5, 4), vocab=(first, None))
                return ct.linear_distill(z[..., :4], head, z[..., 4:8], head, reduction='none', mode='logprob', tp_group=world)
            if of == 'linear_logprob':
                return linear_logprob(z[..., :4], torch.ones(5, 4), target=t % 20, tp_group=world, vocab=(first, None))
            return ct.logprob(z[..., lo:lo + 5], t % 20, tp_group=world, vocab=(first, None))
        with pytest.raises(cb.MismatchError, match='of the vocabulary'):
            call(9 if world.rank == 1 else lo)
        for _ in range(2):
            assert call(lo).shape == (2, 3)

    cb.run_threads(4, corrected)


def without_memory(*_, **__):
    raise MemoryError('no memory for a copy')


def copies(rank):
    """What fails on one rank in copying, or in making outputs, ends the call on all of them at once."""
    z, t, _ = case((2, 3), torch.float32)
    mine, weight = z.repeat_interleave(2, -1)[..., :12:2], torch.randn(12, 6).t()  # both are copied
    wide, plain_weight = t.repeat_interleave(2, -1)[..., ::2], weight[:, :6].contiguous()
    args = {'tp_group': dist.group.WORLD, 'vocab': 24}
    runs = [lambda: ct.logprob(mine, t, **args), lambda: ct.nll(z[..., :6], wide, **args),
            lambda: linear_logprob(mine, weight[:, :6], target=t, **args),
            lambda: linear_nll(z[..., :6], weight[:, :6], target=t, **args),
            lambda: linear_nll(z[..., :6], plain_weight, target=wide, **args),
            lambda: ct.nll(z[..., :6], t, mask=t >= 0, **args)]
    for run in runs:
        for _ in range(2):  # the second finds what the first prepared
            was = torch.Tensor.contiguous, torch.Tensor.masked_fill
            try:
                if rank == 1:
                    torch.Tensor.contiguous = torch.Tensor.masked_fill = without_memory
                with pytest.raises(MemoryError if rank == 1 else RuntimeError, match='no memory for a copy'):
                    run()
            finally:
                torch.Tensor.contiguous, torch.Tensor.masked_fill = was
            run()
            meet()
    out = ct.logprob(z[..., :6], t, **args)
    meet()
    was, torch.empty_like = torch.empty_like, without_memory if rank == 1 else torch.empty_like
    with pytest.raises(MemoryError if rank == 1 else RuntimeError, match='no memory for a copy'):
        ct.logprob(z[..., :6], t, **args)
    torch.empty_like = was
    assert torch.equal(ct.logprob(z[..., :6], t, **args), out)


def test_a_rank_without_memory_for_a_copy_is_every_ranks_error(world):
    world.run(copies)


def reduced_mistakes(rank):
    """tp pairs (0, 1), (2, 3), dp pairs (0, 2), (1, 3). What rank 1 did wrong reaches 0, which does not come to
    2, and 3, which no other rank would tell."""
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = groups[rank // 2], groups[2 + rank % 2]
    z, t, _ = case((2, 3), torch.float32)
    half = slice(0, 12) if rank % 2 == 0 else slice(12, V)
    mine, weight = z[..., half].clone(), torch.randn(half.stop - half.start, V)
    args = {'tp_group': tp, 'reduce_group': dp, 'vocab': (half.start, V)}
    grads = weight.clone().requires_grad_()
    for run in (lambda t: ct.nll(mine, t, **args), lambda t: linear_nll(z, weight, target=t, **args),
                lambda t: linear_nll(z, grads, target=t, **args),
                lambda t: linear_nll(z, weight, target=t, mode='keep', **args)):
        with pytest.raises(ValueError if rank == 1 else RuntimeError, match=r'target is \[3\], expected'):
            run(t if rank != 1 else t[0])
        assert run(t).loss.isfinite()
        meet()
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match='reduce_group is a int, expected a torch') \
            if rank < 2 else contextlib.nullcontext():
        ct.nll(mine, t, **{**args, 'reduce_group': 3 if rank == 1 else None})


def test_a_mistake_reaches_the_ranks_that_the_loss_is_reduced_over(world):
    world.run(reduced_mistakes)
