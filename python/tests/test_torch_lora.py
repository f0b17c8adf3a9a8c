# SPDX-License-Identifier: Apache-2.0
"""Heads with a LoRA against PyTorch's product with W + scale B A: modes, dtypes, ranks, segments, chunks of any loss, FSDP2, ZeRO-3,
peft's layers, refusals."""
import itertools

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from linear_case import CUTS, H, V, case, leaf, near  # noqa: E402
from world import needs_fsdp2  # noqa: E402

R, SCALE = 3, 0.7
NAMES = 'hidden', 'weight', 'bias', 'A', 'B'


def factors(dtype=torch.float64, seed=3, rank=R):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype) for shape in ((rank, H), (V, rank))]


def whole(h, w, b, t, g, lora, loss=False):
    """logp and entropy by PyTorch, f64, and gradients of hidden, weight, bias, A and B of their weighted sum; or those of the
    mean loss, times 3"""
    x = [leaf(y.double()) for y in (h, w, b, *lora[:2])]
    z = torch.nn.functional.linear(x[0], x[1] + lora[2] * x[4] @ x[3], x[2])
    lp, counts = torch.log_softmax(z, -1), t != -100
    logp = torch.where(counts, lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1), torch.zeros((), dtype=torch.float64))
    entropy = torch.where(counts, -(lp.exp() * lp).sum(-1), torch.zeros((), dtype=torch.float64))
    out = (-3 * logp.sum() / counts.sum(),) if loss else (logp, entropy)
    (out[0] if loss else (out[0] * g[0] + out[1] * g[1]).sum()).backward()
    return [o.detach() for o in out], [y.grad for y in x]


def agrees(lo, hi, group, dtype, mode, chunk, of=torch.float64, **options):
    h, w, b, t, g = case(dtype=dtype)
    lora = [y.to(of) for y in factors(dtype)]
    outs, want = whole(h, w, b, t, g, (*lora, SCALE), mode == 'loss')
    x = [leaf(y) for y in (h, w[lo:hi], b[lo:hi], lora[0], lora[1][lo:hi])]
    head = ct.Head(x[1], x[2], vocab=(lo, V), tp_group=group, lora=(x[3], x[4], SCALE), **options)
    if mode == 'loss':
        got = ct.linear_nll(x[0], head, t, chunk_size=chunk).loss,
        (3 * got[0]).backward()
        outs[0] = outs[0] / 3
    else:
        got = ct.linear_logprob(x[0], head, t, entropy=True, mode=mode, chunk_size=chunk)
        (got[0] * g[0] + got[1] * g[1]).sum().backward()
    for name, o, s in zip(('logp', 'entropy'), got, outs):
        near(o.detach(), s, dtype, name)
    for name, y, d in zip(NAMES, x, want):
        if name in ('weight', 'bias', 'B'):
            d = d[lo:hi]
        if name != 'hidden' or options.get('d_hidden') != 'partial':
            near(y.grad, d, torch.float32 if (y.dtype, dtype) == (torch.float32, torch.float64) else dtype, name)
        assert y.grad.dtype == y.dtype
    return x[3].grad.tolist()


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_modes_and_chunks_alone(dtype):
    for mode, chunk in itertools.product(('logprob', 'keep', 'auto', 'loss'), (None, 4)):
        agrees(0, V, None, dtype, mode, chunk, of=dtype)
    agrees(0, V, None, dtype, 'logprob', None, of=torch.float32)  # as peft has factors of a 16-bit layer
    agrees(0, V, None, dtype, 'loss', None, of=torch.float32)


def shares(world, mode):
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    for how in ('partial', 'all_reduce'):
        world.stats_reset()
        made = agrees(lo, hi, world, torch.float64, mode, 4, d_hidden=how)
        assert world.stats()['loss']['all_reduce']['ops'] == 1 + (how == 'all_reduce')  # of A, and of hidden, whatever the chunks
    return made


@pytest.mark.parametrize('mode', ['logprob', 'keep', 'loss'])
def test_a_is_summed_over_the_ranks_of_the_vocabulary(mode):
    said = cb.run_threads(4, lambda world: shares(world, mode))
    assert all(s == said[0] for s in said)  # bit for bit: copies of A stay alike


def scattered(world):
    h, w, b, t, g = case((4, 6))
    lora = factors()
    outs, want = whole(h, w, b, t, g, (*lora, SCALE))
    lo, hi, r = CUTS[world.rank], CUTS[world.rank + 1], world.rank
    x = [leaf(y) for y in (h[r:r + 1], w[lo:hi], b[lo:hi], lora[0], lora[1][lo:hi])]
    got = ct.linear_logprob(x[0], ct.Head(x[1], x[2], vocab=(lo, V), tp_group=world, d_hidden='reduce_scatter',
                                          lora=(x[3], x[4], SCALE)), t, entropy=True)
    (got[0] * g[0] + got[1] * g[1]).sum().backward()
    near(x[0].grad, want[0][r:r + 1], torch.float64, 'hidden')
    near(x[3].grad, want[3], torch.float64, 'A')
    near(x[4].grad, want[4][lo:hi], torch.float64, 'B')


def test_sequence_parallel_tokens():
    cb.run_threads(4, scattered)


@pytest.mark.parametrize('mode', ['logprob', 'loss'])
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_right(mode):
    h, w, b, t, g = case()
    lora = factors()
    _, want = whole(h, w, b, t, g, (*lora, SCALE), mode == 'loss')
    for trains in itertools.product((False, True), repeat=5):
        x = [y.clone().requires_grad_(on) for y, on in zip((h, w, b, *lora), trains)]
        head = ct.Head(x[1], x[2], lora=(x[3], x[4], SCALE))
        if mode == 'loss':
            made = ct.linear_nll(x[0], head, t)
            got = 3 * made.loss
            assert not made.num.requires_grad  # logits are made once, also if the factors alone train
        else:
            out = ct.linear_logprob(x[0], head, t, entropy=True)
            got = (out[0] * g[0] + out[1] * g[1]).sum()
        assert got.requires_grad == any(trains)
        if any(trains):
            got.backward()
        for name, y, on, d in zip(NAMES, x, trains, want):
            assert (y.grad is not None) == on, name
            if on:
                near(y.grad, d, torch.float64, name)


def test_gradcheck_and_other_losses():
    h, w, b, t, _ = case((5,))
    x = [leaf(y) for y in (h, w, b, *factors())]

    def of(*y):
        head = ct.Head(y[1], y[2], lora=(y[3], y[4], SCALE), softcap=4.0)
        logp, loss = ct.linear_logprob(y[0], head, t, loss=True, z_loss=0.1, label_smoothing=0.1)
        return logp, loss, ct.linear_cross_entropy(y[0], head, t, reduction='none')
    assert torch.autograd.gradcheck(of, x)


def test_scales_and_ranks_of_calls_do_not_mix():
    h, w, b, t, g = case()
    for scale, rank in ((0.7, R), (-1.5, R), (0.0, R), (0.7, 1), (0.7, 40)):
        lora = (*factors(rank=rank), scale)
        outs, want = whole(h, w, b, t, g, lora)
        x = [leaf(y) for y in (h, w, b, *lora[:2])]
        got = ct.linear_logprob(x[0], ct.Head(x[1], x[2], lora=(x[3], x[4], scale)), t, entropy=True)
        (got[0] * g[0] + got[1] * g[1]).sum().backward()
        near(got[0].detach(), outs[0], torch.float64, (scale, rank))
        for name, y, d in zip(NAMES, x, want):
            near(y.grad, d, torch.float64, (name, scale, rank))


def test_factors_of_any_strides_under_autocast():
    h, w, b, t, _ = case(dtype=torch.float32)
    lora = factors(torch.float32)
    grads = []
    for cast in (True, False):
        x = [leaf(y if cast or i > 2 else y.bfloat16()) for i, y in enumerate((h, w, b, lora[0].t().contiguous(), lora[1].t().contiguous()))]
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=cast):
            out = ct.linear_logprob(x[0], ct.Head(x[1], x[2], lora=(x[3].t(), x[4].t(), SCALE)), t)
        out.sum().backward()
        grads.append([out, *(y.grad for y in x)])
        assert x[3].grad.dtype == torch.float32
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(*grads))


def test_main_grad_is_that_of_the_weight_alone():
    h, w, b, t, g = case()
    lora = factors()
    _, want = whole(h, w, b, t, g, (*lora, SCALE), True)
    x = [leaf(y) for y in (h, w, *lora)]
    x[1].main_grad = torch.ones(V, H).double()
    _, want = whole(h, w, torch.zeros(V).double(), t, g, (*lora, SCALE), True)
    (3 * ct.linear_nll(x[0], ct.Head(x[1], main_grad=True, lora=(x[2], x[3], SCALE)), t).loss).backward()
    near(x[1].main_grad - 1, want[1], torch.float64, 'main_grad')
    near(x[2].grad, want[3], torch.float64, 'A')
    assert x[1].grad is None


@pytest.mark.skipif(not hasattr(torch, 'compile'), reason='this PyTorch %s has no torch.compile' % torch.__version__)
def test_compiled_code_has_the_lora():
    h, w, b, t, _ = case(dtype=torch.float32)
    lora = factors(torch.float32)

    def step(*x):
        head = ct.Head(x[1], x[2], lora=(x[3], x[4], SCALE))
        return ct.linear_nll(torch.tanh(x[0]) * 2, head, t).loss * 2 + ct.linear_cross_entropy(x[0].flatten(0, -2), head, t.flatten())
    grads = []
    for run in (step, torch.compile(step, backend='aot_eager')):
        x = [leaf(y) for y in (h, w, b, *lora)]
        run(*x).backward()
        grads.append([y.grad for y in x])
    for name, one, other in zip(NAMES, *grads):
        near(other, one.double(), torch.float32, name)


def fsdp2(rank):
    """W, bias, A and B as fully_shard() leaves them: gradients are those of the mean over ranks, as FSDP2's others"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh('cpu', (4,))
    sides, lora = [case(seed=r) for r in range(4)], factors()
    w, b = case(seed=9)[1:3]
    total = [torch.zeros_like(y) for y in (w, b, *lora)]
    for r, side in enumerate(sides):
        _, found = whole(side[0], w, b, side[3], side[4], (*lora, SCALE))
        mine = found if r == rank else None if r > rank else locals().get('mine')
        total = [s + d for s, d in zip(total, found[1:])]
        if r == rank:
            own = found[0]
    module = torch.nn.Module()
    for name, y in zip(NAMES[1:], (w, b, *lora)):
        module.register_parameter(name, torch.nn.Parameter(y.clone()))
    fully_shard(module, mesh=mesh)
    x = leaf(sides[rank][0])
    head = ct.Head(module.weight, module.bias, lora=(module.A, module.B, SCALE))
    out = ct.linear_logprob(x, head, sides[rank][3], entropy=True, chunk_size=4)
    (out[0] * sides[rank][4][0] + out[1] * sides[rank][4][1]).sum().backward()
    near(x.grad, own, torch.float64, 'hidden')
    for name, d in zip(NAMES[1:], total):
        near(4 * getattr(module, name).grad.full_tensor(), d, torch.float64, name)
        assert getattr(module, name).grad.placements == getattr(module, name).placements


def test_factors_of_fsdp2(world):
    needs_fsdp2(world)
    world.run(fsdp2)


def sharded(rank):
    """Rows of the weight over four ranks; each has the factors, and their gradient is that of its tokens"""
    h, w, b, t, g = case(seed=rank)
    w, lora = case(seed=9)[1], factors()
    _, want = whole(h, w, torch.zeros(V).double(), t, g, (*lora, SCALE))
    rows = -(-V // 4)
    x = [leaf(h), leaf(w[rows * rank:rows * (rank + 1)]), *map(leaf, lora)]
    out = ct.linear_logprob(x[0], ct.Head(x[1], shard_group=dist.group.WORLD, rows=V, lora=(x[2], x[3], SCALE)), t, entropy=True)
    (out[0] * g[0] + out[1] * g[1]).sum().backward()
    near(x[0].grad, want[0], torch.float64, 'hidden')
    near(x[2].grad, want[3], torch.float64, 'A')
    near(x[3].grad, want[4], torch.float64, 'B')


def test_plain_factors_beside_a_sharded_weight(world):
    world.run(sharded)


def cut(t, ranks, rank):
    """A parameter as DeepSpeed's ZeRO-3 leaves it: no elements; equal parts of the flattened one in ds_tensor, the last with padding"""
    flat = torch.cat([t.detach().reshape(-1), torch.full((-t.numel() % ranks,), float('nan'), dtype=t.dtype)])
    held = torch.nn.Parameter(torch.empty(0, dtype=t.dtype))
    held.ds_tensor, held.ds_shape, held.ds_process_group = flat.chunk(ranks)[rank].clone(), t.shape, dist.group.WORLD
    return held


def zero3(rank):
    """Gradients are sums over the ranks, of the weight, too; 23 x 3 and 3 x 8 elements over 4 ranks end inside of rows"""
    sides, w, lora = [case(seed=r) for r in range(4)], case(seed=9)[1], factors()
    nothing, total = torch.zeros(V).double(), {}
    for r, side in enumerate(sides):
        _, found = whole(side[0], w, nothing, side[3], side[4], (*lora, SCALE))
        for name, d in zip(NAMES, found):
            total[name] = total.get(name, 0) + d
        if r == rank:
            own = found[0]
    h, _, _, t, g = sides[rank]
    for trains in (True, False):
        x, held = leaf(h), [cut(y, 4, rank).requires_grad_(trains or i > 0) for i, y in enumerate((w, *lora))]
        out = ct.linear_logprob(x, ct.Head(held[0], lora=(held[1], held[2], SCALE)), t, entropy=True, chunk_size=4)
        (out[0] * g[0] + out[1] * g[1]).sum().backward()
        near(x.grad, own, torch.float64, 'hidden')
        for name, y in zip(('weight', 'A', 'B'), held):
            assert y.grad is None and y.shape == (0,) and (y.ds_tensor.grad is None) == (name == 'weight' and not trains)
            if y.ds_tensor.grad is not None:
                each = -(-total[name].numel() // 4)
                want = torch.cat([total[name].reshape(-1), torch.zeros(-total[name].numel() % 4).double()])
                near(y.ds_tensor.grad, want[each * rank:each * rank + each], torch.float64, name)  # 0 of padding
    short = cut(lora[0], 4, rank)
    short.ds_tensor = short.ds_tensor[:3]
    with pytest.raises(ValueError, match=r"A of the Head's lora of \[3, 8\] is shared by 4 ranks, and rank %d has \[3\] of it, expected \[6\]" % rank):
        ct.linear_nll(h, ct.Head(w, lora=(short, lora[1], SCALE)), t)


def test_factors_of_zero3(world):
    world.run(zero3)


def in_segments(world, mode):
    """The weight as tp ranks have it: 23 columns in two segments of 16, the rest padding"""
    h, w, b, t, g = case()
    lora = factors()
    w, b, f = (torch.cat([y, torch.full((9, *y.shape[1:]), 7.0).double()]) for y in (w, b, lora[1]))
    mine = slice(32 // world.size * world.rank, 32 // world.size * (world.rank + 1))
    x = [leaf(y) for y in (h, w[mine], b[mine], lora[0], f[mine])]
    head = ct.Head(x[1], x[2], vocab=V, tp_group=world, lora=(x[3], x[4], SCALE), invariant=16)
    if mode == 'loss':
        (3 * ct.linear_nll(x[0], head, t).loss).backward()
    else:
        out = ct.linear_logprob(x[0], head, t, entropy=True, mode=mode)
        (out[0] * g[0] + out[1] * g[1]).sum().backward()
    return [y.grad for y in x]


@pytest.mark.parametrize('mode', ['logprob', 'keep', 'loss'])
def test_segments_give_the_same_bits_on_any_number_of_ranks(mode):
    h, w, b, t, g = case()
    _, want = whole(h, w, b, t, g, (*factors(), SCALE), mode == 'loss')
    one, = cb.run_threads(1, lambda world: in_segments(world, mode))
    for name, y, d in zip(NAMES, one, want):
        near(y[:len(d)], d, torch.float64, name)
    two = cb.run_threads(2, lambda world: in_segments(world, mode))
    for i, name in enumerate(NAMES):
        for rank, made in enumerate(two):
            part = one[i][16 * rank:16 * rank + 16] if name in ('weight', 'bias', 'B') else one[i]
            assert torch.equal(made[i], part), (name, rank)


def any_loss(world, chunk, how, dtype, cast=False):
    lo, hi = (CUTS[world.rank], CUTS[world.rank + 1]) if world.size == 4 else (0, V)
    h, w, b, t, g = case(dtype=dtype)
    lora = [y.to(torch.float32 if cast else dtype) for y in factors(dtype)]
    outs, want = whole(h, w, b, t, g, (*lora, SCALE))
    x = [leaf(y) for y in (h, w[lo:hi], b[lo:hi], lora[0], lora[1][lo:hi])]
    flat = t.flatten()
    got = ct.over_chunks(lambda z, rows: ct.logprob(z, flat[rows], tp_group=world, vocab=(lo, V), entropy=True), x[0],
                         ct.Head(x[1], x[2], tp_group=world, lora=(x[3], x[4], SCALE), d_hidden=how), chunk_size=chunk)
    (got[0] * g[0] + got[1] * g[1]).sum().backward()
    for name, o, s in zip(('logp', 'entropy'), got, outs):
        near(o.detach(), s, dtype, name)
    for name, y, d in zip(NAMES, x, want):
        assert y.grad.dtype == y.dtype
        if name != 'hidden' or how == 'all_reduce':
            near(y.grad, d[lo:hi] if name in ('weight', 'bias', 'B') else d, dtype, name)
    return x[3].grad


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_any_loss_has_the_lora(dtype):
    for chunk, how in ((4, 'all_reduce'), (100, 'partial')):
        cb.run_threads(1, lambda world: any_loss(world, chunk, how, dtype, dtype == torch.bfloat16))
        made = cb.run_threads(4, lambda world: any_loss(world, chunk, how, dtype))
        assert all(torch.equal(d, made[0]) for d in made)  # copies of A stay alike


def test_any_loss_trains_what_requires_a_gradient():
    h, w, b, t, _ = case()
    lora = factors()
    leaves = [leaf(y) for y in (h, w, b, *lora)]
    torch.nn.functional.linear(leaves[0], leaves[1] + SCALE * leaves[4] @ leaves[3], leaves[2]).logsumexp(-1).sum().backward()
    for trains in itertools.product((False, True), repeat=5):
        x = [y.clone().requires_grad_(on) for y, on in zip((h, w, b, *lora), trains)]
        out = ct.over_chunks(lambda z, rows: z.logsumexp(-1), x[0], ct.Head(x[1], x[2], lora=(x[3], x[4], SCALE)), chunk_size=4)
        assert out.requires_grad == any(trains)
        if any(trains):
            out.sum().backward()
        for name, y, on, of in zip(NAMES, x, trains, leaves):
            assert (y.grad is not None) == on, name
            if on:
                near(y.grad, of.grad, torch.float64, name)
    with pytest.raises(ValueError, match=r"over_chunks: the Head's lora is A \[3, 8\] of torch.float64 on cpu and B \[22, 3\] .* expected \[r, 8\] and \[23, r\]"):
        ct.over_chunks(lambda z, rows: z.sum(-1), h, ct.Head(w, lora=(lora[0], lora[1][1:], SCALE)))
    for i in range(2):
        pair = [leaf(y) * 1 for y in lora]
        out = ct.over_chunks(lambda z, rows: z.logsumexp(-1), h, ct.Head(w, lora=(*pair, SCALE)))
        with torch.no_grad():
            pair[i].add_(1)
        with pytest.raises(RuntimeError, match='lora or params was written in place after forward'):
            out.sum().backward()


def other_factors(world, level):
    h, w, b, t, _ = case()
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    a, f = factors()
    a = a + (world.rank == 2)
    world.set_check(level)
    ct.linear_logprob(h, ct.Head(w[lo:hi], vocab=(lo, V), tp_group=world, lora=(a, f[lo:hi], SCALE)), t)


def test_other_factors_on_a_rank_are_found_where_ranks_compare():
    with pytest.raises(cb.MismatchError, match="the LoRA's A"):
        cb.run_threads(4, lambda world: other_factors(world, 2))


def on_one(world, what):
    h, w, b, t, _ = case()
    lo, hi = CUTS[world.rank], CUTS[world.rank + 1]
    a, f = factors(rank=R + (what == 'rank' and world.rank == 1))
    trains = what == 'grad' and world.rank != 1
    lora = a.requires_grad_(trains), f[lo:hi].clone().requires_grad_(trains), SCALE
    ct.linear_logprob(leaf(h), ct.Head(w[lo:hi], vocab=(lo, V), tp_group=world, lora=lora), t)


@pytest.mark.parametrize('what, words', [('grad', 'rank 1 adds up no gradients of a LoRA in backward, rank 0 does'),
                                         ('rank', 'rank 1 has a LoRA of rank 4, rank 0 one of rank 3')])
def test_ranks_that_differ_in_their_lora_are_a_mismatch_in_forward(what, words):
    with pytest.raises(cb.MismatchError, match=words):
        cb.run_threads(4, lambda world: on_one(world, what))


def test_what_was_written_since_forward_is_found():
    h, w, b, t, _ = case()
    for i in range(2):
        lora = [leaf(y) * 1 for y in factors()]
        out = ct.linear_logprob(h, ct.Head(w, lora=(*lora, SCALE)), t)
        with torch.no_grad():
            lora[i].add_(1)
        with pytest.raises(RuntimeError, match='lora or target was written in place after forward'):
            out.sum().backward()


A, B = factors(torch.float32)


@pytest.mark.parametrize('lora, words', [
    (3, 'the Head.s lora is a int, expected'), ((A, B), r"lora is \['Tensor', 'Tensor'\], expected \(A \[r, H\]"), ([A, B, 1.0], 'lora is a list'),
    ((A, B, 'x'), "scale of the Head's lora is 'x', expected a number"), ((A, B, float('nan')), 'scale of the Head.s lora is nan, expected'),
    ((B, A, 1.0), r"lora is A \[23, 3\] of torch.float32 on cpu and B \[3, 8\]"), ((A[:2], B, 1.0), r'expected \[r, 8\] and \[23, r\]'),
    ((A[:0], B[:, :0], 1.0), r'lora is A \[0, 8\]'), ((A, B[1:], 1.0), r'B \[22, 3\]'), ((A.long(), B, 1.0), 'floating-point dtype'),
    ((A.to('meta'), B, 1.0), 'on meta and B')])
def test_a_lora_that_is_none_is_named(lora, words):
    h, w, _, t, _ = case(dtype=torch.float32)
    with pytest.raises(ValueError, match='linear_nll: .*' + words):
        ct.linear_nll(h, ct.Head(w, lora=lora), t)


# ---- peft ----

def adapted(names=('default',), **options):
    """The lm_head of a model with adapters of these names"""
    peft = pytest.importorskip('peft')
    model = torch.nn.ModuleDict({'body': torch.nn.Linear(H, H), 'lm_head': torch.nn.Linear(H, V)})
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=['lm_head'], **{'init_lora_weights': False, **options})
    made = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        made.add_adapter(name, peft.LoraConfig(r=4, lora_alpha=2, target_modules=['lm_head'], init_lora_weights=False))
    return made.base_model.model['lm_head']


def as_it_is(layer):
    h, _, _, t, _ = case(dtype=torch.float32)
    grads = []
    for ours in (False, True):
        x = leaf(h)
        loss = ct.linear_nll(x, ct.Head.of(layer), t).loss if ours else torch.nn.functional.cross_entropy(layer(x).view(-1, V), t.view(-1))
        loss.backward()
        grads.append({'loss': loss.detach(), 'hidden': x.grad, **{n: p.grad for n, p in layer.named_parameters() if p.grad is not None}})
        layer.zero_grad()
    assert grads[0].keys() == grads[1].keys()
    for name in grads[0]:
        near(grads[1][name], grads[0][name].double(), torch.float32, name)
    return grads[0].keys()


def test_the_lora_of_peft():
    layer = adapted()
    assert {'lora_A.default.weight', 'lora_B.default.weight'} <= as_it_is(layer)
    head = ct.Head.of(layer, softcap=3.0)
    assert head.weight is layer.base_layer.weight and head.lora[0] is layer.lora_A['default'].weight and head.lora[2] == 1.5
    with pytest.raises(ValueError, match='a LoRA, and lora= is given'):
        ct.Head.of(layer, lora=(A, B, 1.0))
    as_it_is(adapted(use_rslora=True))
    layer.enable_adapters(False)
    assert ct.Head.of(layer).lora is None
    layer.enable_adapters(True)
    layer.merge()
    assert ct.Head.of(layer).lora is None


def test_several_adapters_are_one_behind_the_other():
    layer = adapted(('default', 'other'))
    layer.set_adapter(['default', 'other'])
    assert {'lora_A.default.weight', 'lora_B.other.weight'} <= as_it_is(layer)
    layer.set_adapter('other')
    assert 'lora_A.default.weight' not in as_it_is(layer)


def test_adapters_that_are_more_than_factors_are_refused():
    peft = pytest.importorskip('peft')
    layer = adapted(('default', 'other'))
    layer.set_adapter(['default', 'other'])
    for name in ('default', 'other'):
        parameter = torch.nn.Parameter(torch.empty(0))
        parameter.ds_tensor = layer.lora_A[name].weight.detach()
        layer.lora_A[name].weight = parameter
    with pytest.raises(ValueError, match="'default' and 'other' are active and DeepSpeed's ZeRO-3 has the factors.*expected one active adapter"):
        ct.Head.of(layer)
    layer = adapted(lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"'default' drops out hidden states \(lora_dropout=0.1\) while it trains"):
        ct.Head.of(layer)
    as_it_is(layer.eval())
    with pytest.raises(ValueError, match="'default' is no plain LoRA but a variant of it"):
        ct.Head.of(adapted(use_dora=True))
    with pytest.raises(ValueError, match="'default' has a bias"):
        ct.Head.of(adapted(lora_bias=True))
    model = torch.nn.ModuleDict({'lm_head': torch.nn.Embedding(V, H)})
    with pytest.raises(ValueError, match="a LoRA of an embedding, 'default'"):
        ct.Head.of(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=['lm_head'])).base_model.model['lm_head'])
    model = torch.nn.ModuleDict({'lm_head': torch.nn.Linear(H, V)})
    with pytest.raises(ValueError, match='an adapter over a base layer, and no LoRA'):
        ct.Head.of(peft.get_peft_model(model, peft.LoHaConfig(r=2, target_modules=['lm_head'])).base_model.model['lm_head'])
