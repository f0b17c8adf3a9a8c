# SPDX-License-Identifier: Apache-2.0
"""ColocatedBridgeCommunicator beyond what upstream does, on 8 processes: ragged batches of several modalities, and LLMs
with several pipeline stages."""
import pytest

torch = pytest.importorskip('torch')

import colobridge as cb  # noqa: E402
from colobridge.megatron import ColocatedBridgeCommunicator  # noqa: E402
from test_megatron import grid_of, integers, with_subgroups, world  # noqa: E402, F401

LENGTH = 8
# (encoder replica, sequence, first position, rows) of images and of sounds; two sequences of 8 positions in each replica
IMAGES = [(0, 0, 1, 2), (1, 2, 0, 3), (3, 3, 5, 1), (0, 1, 2, 4)]
SOUNDS = [(2, 0, 4, 3), (1, 1, 7, 1), (3, 2, 6, 2)]


def tables(modality):
    return cb.Segments([n for *_, n in modality], src=[s for s, *_ in modality], seq=[q for _, q, *_ in modality],
                       pos=[p for _, _, p, _ in modality], seq_len=[LENGTH] * 4, seq_dp=[0, 0, 1, 1])


def rows_of(modality, name):
    return [integers((n, 3), name, e) for e, (*_, n) in enumerate(modality)]


def ragged(rank, dest):
    """Rows of two modalities are written into one text; gradients of each row come from the ranks that hold it."""
    c = ColocatedBridgeCommunicator(grid_of(tp=2, dp=4), grid_of(**dest), algo='exact')
    stage = rank // 4 if 'pp' in dest else 0  # tp, dp, pp
    replica = rank // 2 % 2 if 'pp' in dest else rank // 4  # tp, cp, dp
    context = rank // 2 % 2 if 'cp' in dest else 0
    text = integers((2, LENGTH, 3), 'text', replica)
    into, leaves = (text if stage == 0 else text[:0]).clone(), []
    for modality, name in ((IMAGES, 'images'), (SOUNDS, 'sounds')):
        own = [rows for rows, (s, *_) in zip(rows_of(modality, name), modality) if s == rank // 2]
        x = torch.cat(own + [torch.zeros(0, 3)]).requires_grad_()
        leaves.append(x)
        into = c.communicate(x, segments=tables(modality), into=into)
    want = text.clone()
    for modality, name in ((IMAGES, 'images'), (SOUNDS, 'sounds')):
        for rows, (_, q, p, n) in zip(rows_of(modality, name), modality):
            if q // 2 == replica:
                want[q % 2, p:p + n] = rows
    assert torch.equal(into, want if stage == 0 else text[:0])
    g = [[integers((2, LENGTH, 3), 'g', d, k) for k in range(dest.get('cp', 1))] for d in (0, 1)]
    into.backward(g[replica][context] if stage == 0 else text[:0])
    for x, modality in zip(leaves, (IMAGES, SOUNDS)):
        parts = [sum(g[q // 2])[q % 2, p:p + n] for s, q, p, n in modality if s == rank // 2]
        assert torch.equal(x.grad, torch.cat(parts + [torch.zeros(0, 3)]))
    packed = c.communicate(leaves[0].detach(), segments=tables(IMAGES))
    here = sorted((q, p, rows) for rows, (_, q, p, _) in zip(rows_of(IMAGES, 'images'), IMAGES) if q // 2 == replica)
    assert torch.equal(packed, torch.cat([rows for *_, rows in here] if stage == 0 else [torch.zeros(0, 3)]))
    c.destroy()


@pytest.mark.parametrize('dest', [dict(tp=2, cp=2, dp=2), dict(tp=2, dp=2, pp=2)])
def test_modalities_are_written_into_the_text(world, dest):
    world.run(run_ragged, dest)


def run_ragged(rank, dest):
    with_subgroups(ragged, rank, dest)


def stages(rank):
    """A uniform batch to an LLM of two stages: the first one has it, and the gradient comes from there."""
    c = ColocatedBridgeCommunicator(grid_of(tp=2, dp=4), grid_of(tp=2, dp=2, pp=2), algo='exact')
    everything = integers((4, 4, 3), 'stages')
    x = everything[rank // 2:rank // 2 + 1].clone().requires_grad_()
    y = c.communicate(x)
    dp, first = rank // 2 % 2, rank < 4
    assert torch.equal(y, everything[2 * dp:2 * dp + 2]) if first else y.numel() == 0
    y.backward(integers((2, 4, 3), 'g', dp) if first else torch.zeros_like(y))
    assert torch.equal(x.grad, torch.cat([integers((2, 4, 3), 'g', d) for d in (0, 1)])[rank // 2:rank // 2 + 1])
    c.destroy()


def test_the_gradient_of_an_llm_of_two_stages_comes_from_the_first(world):
    world.run(run_stages)


def run_stages(rank):
    with_subgroups(stages, rank)


def refused(rank):
    c = ColocatedBridgeCommunicator(grid_of(tp=2, dp=4), grid_of(tp=4, dp=2))
    with pytest.raises(ValueError, match="only algo='exact' carries ragged batches"):
        c.communicate(torch.zeros(1, 3), segments=tables(IMAGES))
    torch.distributed.barrier()  # no rank ends a group of Gloo's to which another one still connects
    c.destroy()


def test_segments_without_exact_are_refused(world):
    world.run(run_refused)


def run_refused(rank):
    with_subgroups(refused, rank)
