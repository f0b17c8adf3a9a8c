# SPDX-License-Identifier: Apache-2.0
"""compat.ChunkedLogProbFunction against PyTorch in fp64, and against TRL's own where TRL is installed."""
import importlib.util

import pytest

torch = pytest.importorskip('torch')

from colobridge import compat  # noqa: E402

T, V, H = 13, 29, 6
NAMES = 'entropy', 'log_sum_sq_probs', 'mean_logits', 'is_top1'
# (temperature, softcap, scale, bias)
OPTIONS = [(1.0, None, 1.0, False), (0.7, None, 0.25, True), (1.0, 5.0, 1.0, True), (2.0, 3.0, 0.5, False)]
# Sums of 29 terms below 30 in f32; bf16: logits below 16 are rounded by up to 2^-4, or not at all, gradients once.
BOUND = {torch.float32: dict(rtol=1e-5, atol=2e-5), torch.bfloat16: dict(rtol=2e-2, atol=7e-2)}


def case(dtype, bias, tokens=T, seed=3):
    """hidden states, head, bias, targets; each number is one of bf16"""
    rng = torch.Generator().manual_seed(seed)
    h, w, b = (torch.randn(*n, generator=rng).bfloat16().to(dtype) for n in ((tokens, H), (V, H), (V,)))
    return h, w, b if bias else None, torch.randint(0, V, (tokens,), generator=rng)


def oracle(h, w, b, t, temperature, softcap, scale, outputs=NAMES):
    """fp64, with PyTorch's operations on whole logits"""
    z = scale * torch.nn.functional.linear(h.double(), w.double(), None if b is None else b.double())
    x = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    logp = torch.log_softmax(x, -1)
    all_of = {'entropy': -(logp.exp() * logp).sum(-1), 'log_sum_sq_probs': (2 * logp).logsumexp(-1).detach(),
              'mean_logits': x.mean(-1).detach(), 'is_top1': x.argmax(-1) == t}
    return (logp.gather(-1, t[:, None])[:, 0], *(all_of[name] if name in outputs else None for name in NAMES))


def ours(h, w, b, t, temperature, softcap, scale, outputs=NAMES, chunk=32768):
    return compat.ChunkedLogProbFunction.apply(h, w, b, t, temperature, chunk, softcap, scale, outputs)


def with_gradients(fn, given, t, options, **more):
    """outputs, and gradients of the inputs"""
    leaves = [None if x is None else x.clone().requires_grad_() for x in given]
    out = fn(*leaves, t, *options, **more)
    up = torch.randn(2, len(t), generator=torch.Generator().manual_seed(1)).double()
    sum((o.double() * u).sum() for o, u in zip(out, up) if o is not None).backward()
    return [None if o is None else o.detach() for o in out], [None if x is None else x.grad for x in leaves]


def compared(found, wanted, bound, flips=0):
    (out, grads), (want, d_want) = found, wanted
    assert [o is None for o in out] == [o is None for o in want]
    for name, a, b in zip(('log_probs', *NAMES), out, want):
        if name == 'is_top1' and b is not None:
            assert a.dtype == torch.bool and (a != b).sum() <= flips, name
        elif b is not None:
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b.double(), msg=lambda m: '%s: %s' % (name, m), **bound)
    for name, a, b in zip(('hidden', 'weight', 'bias'), grads, d_want):
        assert (a is None) == (b is None), name
        if b is not None:
            torch.testing.assert_close(a.double(), b.double(), msg=lambda m: 'd_%s: %s' % (name, m), **bound)


@pytest.mark.parametrize('chunk', (32768, 1))  # 1: 141 tokens at a time, of 300
@pytest.mark.parametrize('temperature, softcap, scale, bias', OPTIONS)
@pytest.mark.parametrize('dtype', BOUND)
def test_all_five_outputs_are_those_of_fp64(dtype, temperature, softcap, scale, bias, chunk):
    *given, t = case(dtype, bias, 300 if chunk == 1 else T)
    options = temperature, softcap, scale
    for outputs in (NAMES, (), ('mean_logits', 'is_top1'), ('log_sum_sq_probs',), ('log_probs', 'entropy')):
        bound = BOUND[dtype] if chunk > 1 else {name: 8 * of for name, of in BOUND[dtype].items()}  # 300 tokens' sums
        compared(with_gradients(ours, given, t, options, outputs=outputs, chunk=chunk),
                 with_gradients(oracle, [None if x is None else x.double() for x in given], t, options, outputs=outputs),
                 bound, flips=0 if dtype is torch.float32 else 3)


@pytest.mark.parametrize('outputs', (NAMES, ('is_top1',)))
def test_of_equal_logits_the_first_is_the_largest(outputs):
    h, w = torch.ones(3, H), torch.zeros(V, H)
    w[[4, 7, 9]] = 1.0
    for softcap in (None, 5.0):
        assert ours(h, w, None, torch.tensor([4, 7, 0]), 1.0, softcap, 1.0, outputs)[4].tolist() == [True, False, False]
        assert ours(0 * h, w, None, torch.tensor([0, 4, 28]), 1.0, softcap, 1.0, outputs)[4].tolist() == [True, False, False]


def test_no_token_is_a_gradient_of_zero():
    *given, t = case(torch.float32, True, 0)
    for outputs in (NAMES, ('entropy', 'mean_logits')):
        out, grads = with_gradients(ours, given, t, (1.0, None, 1.0), outputs=outputs)
        assert all(o.shape == (0,) for o in out if o is not None)
        assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(grads, given))


@pytest.mark.parametrize('outputs', (NAMES, ('entropy',)))
def test_a_head_of_another_dtype_is_taken_as_that_of_hidden(outputs):
    h, w, _, t = case(torch.bfloat16, False)
    found = with_gradients(ours, (h, w.float(), None), t, (1.0, None, 1.0), outputs=outputs)
    assert [g.dtype for g in found[1][:2]] == [torch.bfloat16, torch.float32]
    compared(found, with_gradients(oracle, (h, w, None), t, (1.0, None, 1.0), outputs=outputs), BOUND[torch.bfloat16], flips=3)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        compared(with_gradients(ours, (h.float(), w.float(), None), t, (1.0, None, 1.0), outputs=outputs),
                 with_gradients(oracle, (h, w, None), t, (1.0, None, 1.0), outputs=outputs), BOUND[torch.bfloat16], flips=3)


def test_logits_exist_for_no_more_tokens_than_the_tile_has(monkeypatch):
    plans, prepare = [], compat.trl.prepare
    monkeypatch.setattr(compat.trl, 'prepare', lambda *of: plans.append(prepare(*of)) or plans[-1])
    *given, t = case(torch.float32, False, 300)
    for outputs in (NAMES, ('log_sum_sq_probs',), ('mean_logits',), ()):
        with_gradients(ours, given, t, (1.0, 5.0, 1.0), outputs=outputs, chunk=1)
    assert 4096 // V == 141 and len(plans) == 4
    for *_, (plan, *_) in plans:  # kept if all of them are no more than the tile; those of the chunk are made at a time
        assert plan.config.chunk_size == 141 and plan.linear['budget'] == 4 * 4096


def test_a_parameter_of_zero_3_is_refused():
    h, w, _, t = case(torch.float32, False)
    w.ds_tensor = w
    with pytest.raises(ValueError, match='ZeRO-3'):
        ours(h, w, None, t, 1.0, None, 1.0)


@pytest.mark.parametrize('temperature, softcap, scale, bias', OPTIONS)
@pytest.mark.parametrize('dtype', BOUND)
def test_all_five_outputs_are_trls(dtype, temperature, softcap, scale, bias):
    if not importlib.util.find_spec('trl'):
        pytest.skip('trl is not installed')
    kernels = pytest.importorskip('trl.kernels')
    if not hasattr(kernels, 'ChunkedLogProbFunction'):
        pytest.skip('this trl has no ChunkedLogProbFunction')

    def theirs(h, w, b, t, temperature, softcap, scale, outputs, chunk=8):  # 29 = 3 * 8 + 5
        return kernels.ChunkedLogProbFunction.apply(h, w, b, t, temperature, chunk, softcap, scale, outputs)
    *given, t = case(dtype, bias)
    for outputs in (NAMES, ('entropy', 'is_top1', 'mean_logits'), ()):
        compared(*(with_gradients(fn, given, t, (temperature, softcap, scale), outputs=outputs) for fn in (ours, theirs)),
                 BOUND[dtype], flips=0 if dtype is torch.float32 else 3)
    same = torch.zeros(2, V)
    same[:, [4, 7]] = 1.0  # a tie, as logits of a head that is the identity
    tie = [fn(same, torch.eye(V), None, torch.tensor([4, 7]), 1.0, None, 1.0, NAMES)[4] for fn in (ours, theirs)]
    assert torch.equal(*tie) and tie[0].any()
