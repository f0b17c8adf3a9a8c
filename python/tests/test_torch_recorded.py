# SPDX-License-Identifier: Apache-2.0
"""Calls under what records, transforms or compiles PyTorch's operations: refused in words, or the same as without."""
import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip('torch')

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402

# name: call of logits [T, 29] and targets [T]
LIFELESS = {
    'logprob': lambda z, t: ct.logprob(z, t),
    'nll': lambda z, t: ct.nll(z, t).loss,
    'entropy': lambda z, t: ct.entropy(z),
    'topk_logprob': lambda z, t: ct.topk_logprob(z, 3)[0],
    'logprob_at': lambda z, t: ct.logprob_at(z, t[:, None]),
    'distill': lambda z, t: ct.distill(z, z.detach().flip(0)).kl,
    'a divergence': lambda z, t: ct.distill(z, z.detach().flip(0), kind='jsd').loss,
    'topk_distill': lambda z, t: ct.topk_distill(z, t[:, None], z.detach()[:, :1]).loss,
    'weighted_sum': lambda z, t: ct.weighted_sum(z[:, 0], t.float()).value,
    'shard': lambda z, t: ct.shard(z, cb.Partition(len(t)), dim=0),
    'linear_nll': lambda z, t: ct.linear_nll(z, z.detach()[:9] * 1, target=t % 9).loss,
    'linear_logprob': lambda z, t: ct.linear_logprob(z, z.detach()[:9] * 1, target=t % 9),
}


@pytest.mark.parametrize('tokens', [17, 18, 19])  # of shapes that no call before had: something is kept of each
@pytest.mark.parametrize('name', list(LIFELESS))
def test_tensors_without_memory_are_refused_and_not_kept(name, tokens):
    fake = FakeTensorMode()
    tokens += 3 * list(LIFELESS).index(name)
    call, z, t = LIFELESS[name], torch.randn(tokens, 29), torch.arange(tokens) % 29
    lifeless = fake.from_tensor(z).requires_grad_(tokens % 3 > 0), fake.from_tensor(t)
    with pytest.raises(ValueError, match='no memory of its own'):
        call(*lifeless)
    with fake, pytest.raises(RuntimeError, match='FakeTensorMode sees'):
        call(*lifeless)
    x = z.clone().requires_grad_(tokens % 3 < 2)
    out = call(x, t).sum()
    assert torch.isfinite(out)
    if x.requires_grad:
        out.backward()
        assert torch.isfinite(x.grad).all() and x.grad.any()


class Seen(TorchDispatchMode):
    """Some mode of the user's, which runs everything"""

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


@pytest.mark.parametrize('name', list(LIFELESS))
def test_what_records_operations_is_refused(name):
    z, t = torch.randn(17, 29), torch.arange(17)
    x = z.clone().requires_grad_()
    want, loss = LIFELESS[name](z, t), LIFELESS[name](x, t).sum()
    with pytest.raises(RuntimeError, match=r'make_fx\(\) sees'):
        make_fx(lambda z: LIFELESS[name](z, t))(z)
    with pytest.raises(RuntimeError, match=r'torch.jit.trace\(\) sees'):
        torch.jit.trace(lambda z: LIFELESS[name](z, t), (z,), check_trace=False)
    with pytest.raises(RuntimeError, match='FakeTensorMode sees'), FakeTensorMode():  # of tensors that are none
        LIFELESS['nll'](z, t)
    if 'pre_dispatch' in inspect.signature(make_fx).parameters:
        with pytest.raises(RuntimeError, match=r'make_fx\(\) sees'):
            make_fx(lambda z: LIFELESS[name](z, t), pre_dispatch=True)(z)
    if name != 'shard':  # a backward that is another forward
        with pytest.raises(RuntimeError, match=r'make_fx\(\) sees'):
            make_fx(lambda one: torch.autograd.grad(loss, x, one, retain_graph=True)[0])(torch.ones(()))
    with Seen():
        assert torch.equal(LIFELESS[name](z, t), want)
        loss.backward()


def test_tokens_of_what_is_recorded_are_refused():
    z = torch.randn(1)
    for call in (lambda z: ct.Sequence(1, 4).mask(), lambda z: ct.Sequence(1, 4).targets(torch.ones_like(z).long())):
        with pytest.raises(RuntimeError, match=r'make_fx\(\) sees'):
            make_fx(call)(z)


@pytest.mark.skipif(not hasattr(torch, 'func'), reason='this PyTorch %s has no torch.func' % torch.__version__)
@pytest.mark.parametrize('name', list(LIFELESS))
def test_transforms_of_functions_are_refused(name):
    z, t = torch.randn(2, 17, 29), torch.arange(17)

    def call(z):
        return LIFELESS[name](z, t).sum()
    for transformed in (lambda: torch.func.grad(call)(z[0]), lambda: torch.func.vmap(call)(z),
                        lambda: torch.func.jvp(call, (z[0],), (z[1],))):
        with pytest.raises((RuntimeError, ValueError), match='transforms'):
            transformed()
    assert torch.isfinite(call(z[0]))


EAGER = '''
import sys, torch
loaded = 'torch._dynamo' in sys.modules
import colobridge.torch as ct
z = torch.randn(4, 29, requires_grad=True)
ct.nll(z, torch.arange(4)).loss.backward()
assert z.grad.any() and ('torch._dynamo' in sys.modules) == loaded
'''


def test_a_call_loads_no_compiler():
    done = subprocess.run([sys.executable, '-c', EAGER], text=True, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(torch, 'compile') or not hasattr(torch, 'compiler'),
                    reason='this PyTorch %s has no torch.compile' % torch.__version__)
@pytest.mark.parametrize('name', list(LIFELESS))
def test_calls_in_functions_compiled_one_by_one_give_the_same(name):
    z, t, grads = torch.randn(17, 29), torch.arange(17), []

    def step(x):
        return (LIFELESS[name](torch.tanh(x), t) * 2).sum()
    for run in (step, torch.compile(step, backend='aot_eager')):
        for x in (z.clone().requires_grad_(), (z / 2).requires_grad_()):
            run(x).backward()
            grads.append(x.grad)
    assert grads[0].any()
    for plain, compiled in zip(grads[:2], grads[2:]):
        torch.testing.assert_close(compiled, plain)


def test_a_call_like_the_one_before_is_not_recorded():
    carry, x = ct.Bridge('dp=1', 'dp=1', group=cb.Comm.self()), torch.ones(1, 2, 3)
    assert torch.equal(carry(x), carry(x))
    with pytest.raises(RuntimeError, match=r'make_fx\(\) sees'):
        make_fx(carry)(x)
