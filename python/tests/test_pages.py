# SPDX-License-Identifier: Apache-2.0
"""The lines that docs/for-*.md begin with, as four ranks run them; what comes out is compared with PyTorch."""
import re
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge.torch as ct  # noqa: E402
from linear_case import H, V, case, leaf, near, plain  # noqa: E402
from test_megatron import with_subgroups  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / 'docs'


def lines(page):
    """The first lines of Python on a page, behind nothing but a heading and a line of text."""
    text = (DOCS / page).read_text()
    before, code = re.match(r'(.*?)```python\n(.*?)```', text, re.S).groups()
    assert before.count('\n') <= 4 and len(re.findall(r'^\S', code, re.M)) <= 8, page
    return code


def run(page, **names):
    exec(compile(lines(page), page, 'exec'), names)
    return names


def groups(*ranks):
    """This rank's of groups that all ranks make"""
    made = [dist.new_group(list(r)) for r in ranks]
    return next(g for g, r in zip(made, ranks) if dist.get_rank() in r)


def all_tokens(weight, ranks=4):
    """(loss, d_weight) of the mean over the tokens of all ranks, and of hidden on rank 0, 1, .."""
    w, total, count, leaves = leaf(weight), 0, 0, []
    for r in range(ranks):
        h, _, _, t, _ = case(seed=r)
        leaves.append(leaf(h))
        total = total - plain(leaves[-1], w, None, t)[0].sum()
        count += int((t != -100).sum())
    (total / count).backward()
    return (total / count).detach(), w.grad, [x.grad for x in leaves]


def megatron(rank):
    images = (100.0 * rank + torch.arange(24.0)).view(2, 3, 4).requires_grad_()
    names = with_subgroups(lambda: run('for-megatron.md', encoder=lambda x: 2 * x, images=images))
    first = rank // 2 * 2  # dp rank of the LLM: it has the samples of two ranks
    want = torch.cat([2 * (100.0 * r + torch.arange(24.0)).view(2, 3, 4) for r in (first, first + 1)])
    assert torch.equal(names['hidden'], want)
    names['hidden'].sum().backward()
    assert torch.equal(images.grad, torch.full_like(images, 2.0))


def fsdp2(rank):
    from torch.distributed.device_mesh import init_device_mesh
    h, _, _, t, _ = case(seed=rank)
    hidden, weight = leaf(h), case(seed=9)[1]
    names = run('for-fsdp2.md', torch=torch, weight=weight, mesh=init_device_mesh('cpu', (4,)), hidden=hidden,
                targets=t)
    loss, d_weight, d_hidden = all_tokens(weight)
    near(names['loss'].detach(), loss, torch.float64, 'loss')
    near(names['head'].grad.full_tensor(), d_weight, torch.float64, 'd_weight')
    near(hidden.grad, d_hidden[rank], torch.float64, 'd_hidden')


def zero3(rank):
    h, _, _, t, _ = case(seed=rank)
    hidden, weight = leaf(h), case(seed=9)[1]
    model = torch.nn.Module()
    model.lm_head = torch.nn.Module()
    model.lm_head.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.float64))
    parameter = model.lm_head.weight
    parameter.ds_tensor, parameter.ds_shape = weight.reshape(4, -1)[rank].clone(), weight.shape
    parameter.ds_process_group = dist.group.WORLD
    assert V * H % 4 == 0
    names = run('for-zero3.md', model=model, hidden=hidden, targets=t, dp=dist.group.WORLD)
    loss, d_weight, d_hidden = all_tokens(weight)
    near(names['loss'].detach(), loss, torch.float64, 'loss')
    near(names['gradient'], d_weight.reshape(4, -1)[rank], torch.float64, 'd_weight')
    near(hidden.grad, d_hidden[rank], torch.float64, 'd_hidden')


def trainer(rank):
    tp = groups((0, 1), (2, 3))
    h, w, _, t, _ = case(seed=rank // 2)
    hidden, whole, w = leaf(h), leaf(h), w[:22]
    tokens = t.clamp(min=0) % 22
    mask, advantage = (t != -100).double(), torch.where(t % 2 == 0, 1.0, -1.0).double()
    old = plain(h, w, None, tokens)[0] + 0.1
    run('for-rl.md', torch=torch, hidden=hidden, weight=w[11 * (rank % 2):][:11], tokens=tokens, tp=tp, old_logp=old,
        advantage=advantage, mask=mask)
    logp, entropy = plain(whole, w, None, tokens)
    ratio = (logp - old).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    ((policy - 0.01 * entropy) * mask).sum().div(mask.sum()).backward()
    near(hidden.grad, whole.grad, torch.float64, 'd_hidden')


def torchrun(rank):
    tp, cp = groups((0, 1), (2, 3)), groups((0, 2), (1, 3))
    weight = case(seed=9)[1][:22]
    make = torch.Generator().manual_seed(3)
    images = torch.randn(4, 8, H, generator=make, dtype=torch.float64)
    targets = torch.randint(0, 22, (4, 8), generator=make)
    mine, whole = leaf(images[2 * (rank // 2):][:2]), leaf(images)
    rows = [[0, 1, 6, 7], [2, 3, 4, 5]][rank // 2]

    class Llm(torch.autograd.Function):
        """This tp rank's logits; the gradient of hidden is the sum over tp."""

        @staticmethod
        def forward(ctx, x):
            return x @ weight[11 * (rank % 2):][:11].t()

        @staticmethod
        def backward(ctx, g):
            d = g @ weight[11 * (rank % 2):][:11]
            dist.all_reduce(d, group=tp)
            return d

    names = run('for-torchrun.md', encoder=lambda x: 3 * x, images=mine, llm=Llm.apply, targets=targets[:, rows],
                tp=tp, cp=cp)
    loss = torch.nn.functional.cross_entropy((3 * whole @ weight.t()).view(-1, 22), targets.view(-1))
    loss.backward()
    near(names['loss'].detach(), loss.detach(), torch.float64, 'loss')
    near(mine.grad, whole.grad[2 * (rank // 2):][:2], torch.float64, 'd_images')


PAGES = {'for-megatron.md': megatron, 'for-fsdp2.md': fsdp2, 'for-zero3.md': zero3, 'for-rl.md': trainer,
         'for-torchrun.md': torchrun}


@pytest.mark.parametrize('page', list(PAGES))
def test_first_lines_of_a_page_do_what_it_says(world, page):
    if page == 'for-fsdp2.md' and not hasattr(torch.distributed, 'device_mesh'):
        pytest.skip('this PyTorch %s has no DTensor' % torch.__version__)
    world.run(PAGES[page])


def test_every_page_for_users_is_run():
    assert sorted(PAGES) == sorted(p.name for p in DOCS.glob('for-*.md'))
