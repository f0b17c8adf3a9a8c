# SPDX-License-Identifier: Apache-2.0
"""The lines that pages of docs/guides begin with, as four ranks run them; what comes out is compared with PyTorch."""
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from linear_case import H, V, case, leaf, near, plain  # noqa: E402
from test_megatron import with_subgroups  # noqa: E402
from test_torch_mimo import torchrun as launcher  # noqa: E402
from test_torch_tower import GRIDS, Plain  # noqa: E402
from tower_case import Lm, Step, by_hand, replica_sum, worst  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / 'docs'


def lines(page):
    """The first lines of Python on a page, or under one of its headings, behind a heading and a paragraph."""
    page, _, heading = page.partition('#')
    text = (DOCS / page).read_text()
    if heading:
        text = text[text.index('\n## %s\n' % heading):]
    before, code = re.match(r'(.*?)```python\n(.*?)```', text, re.S).groups()
    assert before.strip().count('\n\n') <= 1 and len(re.findall(r'^\S', code, re.M)) <= 8, page
    return code


def run(page, **names):
    exec(compile(lines(page), page, 'exec'), names)
    return names


def front(mark, **names):
    """Runs a snippet of README.md, of at most four lines behind its imports."""
    code = re.search(r'<!-- %s -->\n```python\n(.*?)```\n<!-- end -->' % mark, (DOCS.parent / 'README.md').read_text(), re.S)[1]
    assert len(re.findall(r'^(?!import |from )\S', code, re.M)) <= 4, mark
    exec(compile(code, 'README.md', 'exec'), names)
    return names


def on_cpu():
    """init_device_mesh("cuda", ..) makes a mesh of this processor."""
    from torch.distributed.device_mesh import init_device_mesh
    return mock.patch('torch.distributed.device_mesh.init_device_mesh',
                      lambda _, *args, make=init_device_mesh, **kwargs: make('cpu', *args, **kwargs))


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
    names = with_subgroups(lambda: run('guides/megatron.md', encoder=lambda x: 2 * x, images=images))
    first = rank // 2 * 2  # dp rank of the LLM: it has the samples of two ranks
    want = torch.cat([2 * (100.0 * r + torch.arange(24.0)).view(2, 3, 4) for r in (first, first + 1)])
    assert torch.equal(names['hidden'], want)
    names['hidden'].sum().backward()
    assert torch.equal(images.grad, torch.full_like(images, 2.0))


def fsdp2(rank):
    from torch.distributed.device_mesh import init_device_mesh
    h, _, _, t, _ = case(seed=rank)
    hidden, weight = leaf(h), case(seed=9)[1]
    names = run('guides/sharded-heads.md', torch=torch, weight=weight, mesh=init_device_mesh('cpu', (4,)), hidden=hidden,
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
    names = run('guides/sharded-heads.md#DeepSpeed ZeRO-3', model=model, hidden=hidden, targets=t, dp=dist.group.WORLD)
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
    run('guides/rl.md', torch=torch, hidden=hidden, weight=w[11 * (rank % 2):][:11], tokens=tokens, tp=tp, old_logp=old,
        advantage=advantage, mask=mask)
    logp, entropy = plain(whole, w, None, tokens)
    ratio = (logp - old).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    ((policy - 0.01 * entropy) * mask).sum().div(mask.sum()).backward()
    near(hidden.grad, whole.grad, torch.float64, 'd_hidden')


def head_of(weight, tp):
    """Makes this tp rank's logits; the gradient of hidden is the sum over tp."""
    class Llm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x @ weight.t()

        @staticmethod
        def backward(ctx, g):
            d = g @ weight
            dist.all_reduce(d, group=tp)
            return d
    return Llm.apply


def torchrun(rank):
    tp, weight = groups((0, 1), (2, 3)), case(seed=9)[1][:22]
    make = torch.Generator().manual_seed(3)
    images = torch.randn(4, 8, H, generator=make, dtype=torch.float64)
    targets = torch.randint(0, 22, (4, 8), generator=make)
    mine, whole = leaf(images[2 * (rank // 2):][:2]), leaf(images)
    rows = [[0, 1, 6, 7], [2, 3, 4, 5]][rank // 2]

    with on_cpu():
        names = run('guides/quickstart.md', encoder=lambda x: 3 * x, images=mine, llm=head_of(weight[11 * (rank % 2):][:11], tp), targets=targets[:, rows])
    loss = torch.nn.functional.cross_entropy((3 * whole @ weight.t()).view(-1, 22), targets.view(-1))
    loss.backward()
    near(names['loss'].detach(), loss.detach(), torch.float64, 'loss')
    near(mine.grad, whole.grad[2 * (rank // 2):][:2], torch.float64, 'd_images')


class HuggingFace(Plain):
    """Takes and returns what Hugging Face's towers do."""
    config = types.SimpleNamespace(spatial_merge_size=2, in_channels=6, patch_size=1, hidden_size=8)

    def forward(self, pixels, grid):
        out = super().forward(pixels, grid)
        return types.SimpleNamespace(pooler_output=out[0], deepstack_features=out[1:])


def readme(rank):
    """The bridge of README.md, and its loss behind it: d_images is that of the plain mean."""
    make, weight = torch.Generator().manual_seed(3), case(seed=9)[1][:22]
    images = torch.randn(4, 8, H, generator=make, dtype=torch.float64)
    targets = torch.randint(0, 22, (4, 8), generator=make)
    mine, whole = leaf(images[2 * (rank // 2):][:2]), leaf(images)
    with on_cpu():
        names = front('bridge', encoder=lambda x: 3 * x, images=mine)
    rows = [[0, 1, 6, 7], [2, 3, 4, 5]][rank // 2]
    front('loss', ct=ct, mesh=names['mesh'], states=names['hidden'].flatten(0, 1), targets=targets[:, rows].flatten(),
          lm_head=types.SimpleNamespace(weight=weight[11 * (rank % 2):][:11]))
    torch.nn.functional.cross_entropy((3 * whole @ weight.t()).view(-1, 22), targets.view(-1)).backward()
    near(mine.grad, whole.grad[2 * (rank // 2):][:2], torch.float64, 'd_images')


def readme_tower(rank):
    encoded(rank, 'tower', 0, front)


def encoded(rank, page, deep, how=run):
    """A page's lines on a random step: the loss, and the tower's gradients, are those of the whole tower."""
    step = Step(5, 'tp=2,cp=2,dp=1', 4, (6,), GRIDS, 2, most=5)
    lm, tower, given = Lm(1 + deep), HuggingFace(deep), step.given(rank)
    layers = [lambda x, layer=layer: torch.tanh(layer(x)) for layer in lm.layers]
    names = how(page, ct=ct, tower=tower, pixels=given['pixels'], grid_thw=given.get('grid_thw'), seq=given.get('seq', ()),
                pos=given.get('pos'), embeddings=lm.words(step.part(rank, step.text)), layers=layers)
    loss = (layers[-1](names['hidden']) * step.part(rank, step.weight)).sum()
    loss.backward()
    replica_sum(tower)
    whole, same = Plain(deep), Lm(1 + deep)
    total = by_hand(step, whole, lambda tower, pixels, grid: tower(pixels, grid), same)
    total.backward()
    assert step.images
    assert max(worst(tower.named_parameters(), {n: p.grad for n, p in whole.named_parameters()}).values()) < 1e-9
    both = loss.detach().clone()
    dist.all_reduce(both)  # each position is on two tp ranks
    near(both / 2, total.detach(), torch.float64, 'loss')


def towers(rank):
    encoded(rank, 'guides/vision.md', 0)


def deepstack(rank):
    encoded(rank, 'guides/vision.md#Several tensors: DeepStack', 2)


def microbatches(rank):
    """Two micro-batches of a sequence of 8 positions each; ranks 0 and 3 have an image in the first, rank 1 in the second."""
    make, weight = torch.Generator().manual_seed(7), torch.arange(16, dtype=torch.float64).view(2, 8, 1)
    images = torch.randn(5, 6, generator=make, dtype=torch.float64)
    own = {0: images[0:2], 3: images[2:3], 1: images[3:5]}
    same = dict(seq_len=[8], seq_dp=[0])
    tables = [cb.Segments([2, 1], src=[0, 3], seq=[0, 0], pos=[1, 4], **same),
              cb.Segments([2], src=[1], seq=[0], pos=[6], **same)]
    torch.manual_seed(4)
    tower, words = torch.nn.Linear(6, 8, dtype=torch.float64), torch.zeros(9, 8, dtype=torch.float64)
    cut = [[0, 1, 6, 7], [2, 3, 4, 5]][rank // 2]
    seen = iter((0, 1))
    run('guides/vision.md#One encoder batch for several micro-batches', tower=tower, pixels=own.get(rank, images[:0]),
        counts={0: [2, 0], 3: [1, 0], 1: [0, 2]}.get(rank, [0, 0]), tables=tables,
        texts=[torch.arange(4), torch.arange(4, 8)], words=lambda tokens: words[tokens],
        llm=lambda x: (torch.tanh(x) * weight[next(seen)][cut]).sum())
    rows = tower.bias.grad.clone(), tower.weight.grad.clone()
    for g in rows:
        dist.all_reduce(g)
    whole = torch.nn.Linear(6, 8, dtype=torch.float64)
    whole.load_state_dict(tower.state_dict())
    scale = torch.cat((weight[0, [1, 2, 4]], weight[1, [6, 7]]))
    (torch.tanh(whole(images)) * scale).sum().backward()
    near(rows[0], whole.bias.grad, torch.float64, 'bias'), near(rows[1], whole.weight.grad, torch.float64, 'weight')


def threads(rank):
    names = run('concepts/bridge.md#Two bridges at once')
    here, x = torch.device('cpu'), torch.full((2, 3), rank + 1.0)
    segments = cb.Segments([2] * 4, src=range(4), seq=[0] * 4, pos=[0, 2, 4, 6], seq_len=[8], seq_dp=[0])
    for carry in names['sound'], names['images']:
        assert carry(x, segments).sum() == [3 * (2 * 1 + 2 * 4), 3 * (2 * 2 + 2 * 3)][rank // 2]
    assert len({id(carry.comm(here)) for carry in (names['sound'], names['images'])}) == 2


def all_calls(rank):
    """Samples are not outermost; hidden goes to a head of which tp ranks have their columns."""
    make, weight = torch.Generator().manual_seed(3), case(seed=9)[1][:22]
    images = torch.randn(8, 4, H, generator=make, dtype=torch.float64)
    targets = torch.randint(0, 22, (8, 4), generator=make)
    mine, whole, rows = leaf(images[:, 2 * (rank // 2):][:, :2]), leaf(images), [[0, 1, 6, 7], [2, 3, 4, 5]][rank // 2]
    tp = groups((0, 1), (2, 3))
    with on_cpu():
        names = run('guides/pytorch.md', encoder=lambda x: 3 * x, images=mine, S=8, targets=targets[rows],
                    llm=head_of(weight[11 * (rank % 2):][:11], tp))
    loss = torch.nn.functional.cross_entropy((3 * whole @ weight.t()).view(-1, 22), targets.view(-1))
    near(names['loss'].detach(), loss.detach(), torch.float64, 'loss')
    loss.backward()
    names['loss'].backward()
    near(mine.grad, whole.grad[:, 2 * (rank // 2):][:, :2], torch.float64, 'd_images')


def distillation(rank):
    tp = groups((0, 1), (2, 3))
    make = torch.Generator().manual_seed(6 + rank // 2)
    hidden, teacher = (torch.randn(5, H, generator=make, dtype=torch.float64) for _ in range(2))
    head, teacher_head = (torch.randn(22, H, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2))
    mine, whole = leaf(hidden), leaf(hidden)
    run('guides/distillation.md', hidden=mine, head=types.SimpleNamespace(weight=head[11 * (rank % 2):][:11]), tp=tp,
        dp_cp=groups((0, 2), (1, 3)), teacher_hidden=teacher, teacher_head=teacher_head[11 * (rank % 2):][:11])
    log_p, log_q = ((x @ w.t()).log_softmax(-1) for x, w in ((whole, head), (teacher, teacher_head)))
    ((log_q.exp() * (log_q - log_p)).sum(-1).mean() / 2).backward()  # the mean of the tokens of all ranks
    near(mine.grad, whole.grad, torch.float64, 'd_hidden')


PAGES = {'README.md': readme, 'README.md#tower': readme_tower, 'guides/quickstart.md': torchrun, 'guides/vision.md': towers, 'guides/vision.md#deepstack': deepstack,
         'guides/vision.md#micro-batches': microbatches, 'guides/megatron.md': megatron, 'guides/sharded-heads.md': fsdp2,
         'guides/sharded-heads.md#zero3': zero3, 'guides/rl.md': trainer, 'guides/distillation.md': distillation,
         'concepts/bridge.md#two': threads, 'guides/pytorch.md': all_calls}


@pytest.mark.parametrize('page', list(PAGES))
def test_first_lines_of_a_page_do_what_it_says(world, page):
    if page in ('README.md', 'guides/sharded-heads.md', 'guides/quickstart.md', 'guides/pytorch.md') and not hasattr(torch.distributed, 'device_mesh'):
        pytest.skip('this PyTorch %s has no DeviceMesh' % torch.__version__)
    world.run(PAGES[page])


@pytest.mark.skipif(not hasattr(dist, 'device_mesh'), reason='this PyTorch has no DeviceMesh')
def test_the_program_of_quickstart_prints_the_loss_of_one_process(tmp_path):
    if launcher() is None:
        pytest.skip('torchrun of this PyTorch %s does not start' % torch.__version__)
    page = (DOCS / 'guides/quickstart.md').read_text()
    code = re.search(r'<!-- first -->\n```python\n(.*?)```\n<!-- end -->', page, re.S)[1]
    (tmp_path / 'first.py').write_text(code.replace('torch.cuda.device_count()', '0'))
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '4', 'first.py'],
                          cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=250)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder, head = torch.nn.Linear(12, 16), torch.nn.Linear(16, 100, bias=False)
        images, labels = torch.randn(4, 8, 12), torch.randint(100, (4, 8))
    said = 'hidden (4, 4, 16), loss %.4f' % torch.nn.functional.cross_entropy(head(encoder(images)).flatten(0, 1), labels.flatten()).item()
    # ranks write to one pipe, a line and its end apart
    assert sorted(re.findall(r'rank \d: hidden .*?, loss \d\.\d{4}', done.stdout)) == [
        'rank %d: %s' % (rank, said) for rank in range(4)], done.stderr
    assert '`%s`' % said in page


def test_every_guide_is_run():
    others = ['guides/hybrid.md',    # by test_torch_packed.py
              'guides/audio.md',  # by test_torch_audio.py
              'guides/mtp.md',  # by test_torch_grouped.py
              'guides/pipelines.md',  # by test_torch_pipelines.py
              'guides/choosing.md',  # by tests/tools/test_plan_compare.py
              'guides/transformers.md',  # by test_transformers.py, test_trainers.py
              'guides/c.md']         # by tests/api/install.py
    assert sorted({p.split('#')[0] for p in PAGES if p.startswith('guides')} | set(others)) == sorted(
        'guides/' + p.name for p in DOCS.glob('guides/*.md'))
