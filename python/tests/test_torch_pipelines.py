# SPDX-License-Identifier: Apache-2.0
"""docs/guides/pipelines.md: an encoder on four ranks, an LLM in two stages, by each schedule, against one process."""
import inspect

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

from test_pages import groups, lines, run  # noqa: E402

SAMPLES, ROWS, LENGTH, IN, H, WORDS = 16, 3, 8, 3, 6, 20
PAGE = 'guides/pipelines.md'


class First(torch.nn.Module):
    """Words, the image's rows in front of them, and a layer that mixes positions."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = torch.nn.Embedding(WORDS, H, dtype=torch.float64), torch.nn.Linear(H, H, dtype=torch.float64)

    def forward(self, image, tokens):
        x = torch.cat((image, self.words(tokens)), 1)
        return torch.tanh(self.layer(x + x.mean(1, keepdim=True)))


class Last(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(H, H, dtype=torch.float64), torch.nn.Linear(H, WORDS, dtype=torch.float64)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x[:, ROWS:])))


def case():
    torch.manual_seed(2)
    make = dict(dtype=torch.float64)
    images = torch.randn(SAMPLES, ROWS, IN, **make)
    tokens, targets = torch.randint(0, WORDS, (2, SAMPLES, LENGTH))
    targets[torch.rand(SAMPLES, LENGTH) < 0.4] = -100
    return images, tokens, targets, torch.nn.Linear(IN, H, **make), [First(), Last()]


def whole():
    images, tokens, targets, encoder, parts = case()
    logits = parts[1](parts[0](encoder(images), tokens))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return [[p.grad for p in module.parameters()] for module in (encoder, *parts)]


def compared(encoder, parts, stage, dp):
    """Gradients, added up as the page says, against the whole's."""
    for p in encoder.parameters():
        dist.all_reduce(p.grad)
    for p in parts[stage].parameters():
        dist.all_reduce(p.grad, group=dp)
    wants = whole()
    return [float((p.grad - want).abs().max() / want.abs().max()) for module, of in ((encoder, wants[0]), (parts[stage], wants[1 + stage]))
            for p, want in zip(module.parameters(), of)]


def step(rank, schedule):
    images, tokens, targets, encoder, parts = case()
    stage, replica = rank // 2, slice(rank % 2 * SAMPLES // 2, (rank % 2 + 1) * SAMPLES // 2)
    pp, dp, count = groups((0, 2), (1, 3)), groups((0, 1), (2, 3)), (targets != -100).sum()
    code, seen = lines(PAGE), []

    def loss_fn(logits, wanted):
        seen.append(len(wanted))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction='sum') / count
    names = dict(encoder=encoder, images=images[4 * rank:][:4], part=parts[stage], stage=stage, pp=pp, device=torch.device('cpu'), loss_fn=loss_fn,
                 tokens=tokens[replica], targets=targets[replica])
    exec(compile(code.replace('Schedule1F1B', schedule), PAGE, 'exec'), names)
    assert set(seen) == ({2} if stage else set()) and len(seen) >= 4 * stage  # PyTorch also infers shapes by it
    assert names['y'].numel() == (0 if stage else 8 * ROWS * H)
    return compared(encoder, parts, stage, dp)


def own(rank):
    images, tokens, targets, encoder, parts = case()
    stage, replica = rank // 2, slice(rank % 2 * SAMPLES // 2, (rank % 2 + 1) * SAMPLES // 2)
    dp, count = groups((0, 1), (2, 3)), (targets != -100).sum()

    def train(inputs):
        for k in range(4):
            of = slice(2 * k, 2 * k + 2)
            if stage == 0:
                x = parts[0](next(inputs), tokens[replica][of])
                dist.send(x.detach(), rank + 2)
                d = torch.empty_like(x)
                dist.recv(d, rank + 2)
                x.backward(d)
            else:
                x = torch.empty(2, ROWS + LENGTH, H, dtype=torch.float64)
                dist.recv(x, rank - 2)
                logits = parts[1](x.requires_grad_())
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[replica][of].flatten(), reduction='sum') / count
                loss.backward()
                dist.send(x.grad, rank - 2)
    run(PAGE + '#Another schedule', encoder=encoder, images=images[4 * rank:][:4], stage=stage, train=train)
    return compared(encoder, parts, stage, dp)


def test_a_schedule_of_ones_own_does_too(world):
    for off in world.run(own):
        assert max(off) < 1e-12, off


@pytest.mark.parametrize('schedule', ('ScheduleGPipe', 'Schedule1F1B'))
def test_the_page_gives_the_gradients_of_one_process(world, schedule):
    has = pytest.importorskip('torch.distributed.pipelining', reason='this PyTorch %s has no pipelines' % torch.__version__)
    if 'scale_grads' not in inspect.signature(getattr(has, schedule)).parameters:
        pytest.skip('schedules of this PyTorch %s take no scale_grads' % torch.__version__)
    for off in world.run(step, schedule):
        assert max(off) < 1e-12, off
