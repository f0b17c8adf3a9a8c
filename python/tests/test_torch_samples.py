# SPDX-License-Identifier: Apache-2.0
"""check_samples(): ids of the encoder's samples against those of the LLM's. Whose sample is whose is counted here, rank by
rank: dims as specs have them, the first one fastest, samples in blocks over dp."""
import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge.megatron import ColocatedBridgeCommunicator, HyperCommGrid  # noqa: E402
from conftest import ranks  # noqa: E402
from ragged_case import coord  # noqa: E402
from test_megatron import with_subgroups  # noqa: E402
from test_pages import DOCS, run  # noqa: E402
from world import meet  # noqa: E402

SAMPLES = 12
FOUR = [('dp=4', 'tp=2,cp=2,dp=1'), ('tp=2,dp=2', 'dp=4'), ('cp=2,dp=2', 'cp=4'), ('dp=4', 'tp=2,dp=1,pp=2'),
        ('dp=2,tp=2', 'tp=2,dp=2'), ('dp=4', 'dp=4')]
EIGHT = [('tp=2,dp=4', 'cp=4,dp=2'), ('dp=4,pp=2', 'tp=2,pp=2,dp=2'), ('tp=2,cp=2,dp=2', 'tp=2,dp=4')]


@pytest.fixture(scope='module')
def eight():
    yield from ranks(8)


def mine(spec, rank, ids):
    at, n = coord(spec, rank, 'dp')
    return ids[at * SAMPLES // n:(at + 1) * SAMPLES // n]


def have(spec, size, sample):
    return [r for r in range(size) if sample in mine(spec, r, list(range(SAMPLES)))]


def holds(spec, rank, side):
    at, n = coord(spec, rank, 'pp')
    return at == (n - 1 if side == 'src' else 0)


def said(call):
    """What a call that all ranks make is refused by"""
    meet()
    try:
        call()
    except cb.MismatchError as why:
        return str(why)
    return ''


def checked(rank, src, dst):
    """Same ids, then one that differs, on all ranks that have it or on the last of them; the bridge goes on."""
    size = dist.get_world_size()
    ids = [2 ** 62 + 7 * i for i in range(SAMPLES)]
    carry = ct.Bridge(src, dst, group=dist.group.WORLD)
    x, y = (torch.tensor(mine(spec, rank, ids), dtype=torch.int64) for spec in (src, dst))
    carry.check_samples(x, y)
    carry.check_samples(x.tolist(), y)
    carry.check_samples(x if holds(src, rank, 'src') else None, y if holds(dst, rank, 'dst') else None)
    for sample in 0, 5, SAMPLES - 1:
        wrong = list(ids)
        wrong[sample] = 3
        a, b = (have(spec, size, sample) for spec in (src, dst))
        assert said(lambda: carry.check_samples(x, mine(dst, rank, wrong))) == (
            'bridge: sample %d of %d is %d on ranks %s of the source and 3 on ranks %s of the destination; expected one id on all '
            'of them; 1 sample differs' % (sample, SAMPLES, ids[sample], a, b))
        there = b[-1:]
        words = said(lambda: carry.check_samples(x, mine(dst, rank, wrong if rank in there else ids)))
        assert 'sample %d of %d is' % (sample, SAMPLES) in words and '3 on ranks %s of the destination;' % there in words, words
        if len(a) > 1:  # its copies on the source differ
            words = said(lambda: carry.check_samples(mine(src, rank, wrong if rank == a[0] else ids), y))
            assert '3 on ranks %s of the source' % a[:1] in words, words
    swapped = ids[1::-1] + ids[2:]
    assert said(lambda: carry.check_samples(mine(src, rank, swapped), y)).endswith('; 2 samples differ')
    carry.destroy()


@pytest.mark.parametrize('src, dst', FOUR)
def test_a_sample_that_differs_is_named_on_all_ranks(world, src, dst):
    world.run(checked, src, dst)


@pytest.mark.parametrize('src, dst', EIGHT)
def test_a_sample_that_differs_is_named_on_all_of_eight(eight, src, dst):
    eight.run(checked, src, dst)


def counts(rank):
    """Ranks bring other numbers of samples than the layouts cut; 10 samples do not divide by 4."""
    carry = ct.Bridge('dp=4', 'tp=2,dp=2', group=dist.group.WORLD)
    cut = [0, 2, 5, 7, 10]  # as the layout does: floor(10 j / 4)
    ids = list(range(10))
    carry.check_samples(ids[cut[rank]:cut[rank + 1]], ids[5 * (rank // 2):][:5])
    assert said(lambda: carry.check_samples([rank] * (2 + (rank == 2)), [0] * 4)) == (
        'bridge: ranks of the source bring {0: 2, 1: 2, 2: 3, 3: 2} ids, expected those of 9 samples, {0: 2, 1: 2, 2: 2, 3: 3}')
    assert said(lambda: carry.check_samples([rank], [0] * 4)) == \
        'bridge: the source has 4 samples, the destination 8; expected the same'
    assert 'ranks of the destination bring {0: 2, 1: 0,' in said(lambda: carry.check_samples([rank], None if rank == 1 else [0] * 2))
    carry.check_samples([rank], [rank // 2 * 2, rank // 2 * 2 + 1])
    meet()
    with pytest.raises(ValueError if rank == 2 else RuntimeError, match='expected whole numbers'):
        carry.check_samples([0.5] if rank == 2 else [rank], [rank // 2 * 2, rank // 2 * 2 + 1])
    meet()
    carry.check_samples([rank], [rank // 2 * 2, rank // 2 * 2 + 1])


def test_numbers_of_samples_that_differ_are_said_on_all_ranks(world):
    world.run(counts)


def in_megatron(rank):
    bridge = ColocatedBridgeCommunicator(HyperCommGrid([1, 4], ['tp', 'dp']), HyperCommGrid([2, 2], ['tp', 'dp']))
    ids = [100 + i for i in range(8)]
    images = {'id': torch.tensor(ids[2 * rank:][:2])}
    page = 'guides/megatron.md#The same samples on both sides'
    run(page, bridge=bridge, image_batch=images, text_batch={'id': torch.tensor(ids[rank // 2 * 4:][:4])})
    ids[7] = 1
    words = said(lambda: run(page, bridge=bridge, image_batch=images, text_batch={'id': torch.tensor(ids[rank // 2 * 4:][:4])}))
    assert words.startswith('bridge: sample 7 of 8 is 107 on ranks [3] of the source and 1 on ranks [2, 3] of the dest'), words
    assert words.split(';')[0] in ' '.join((DOCS / 'guides/megatron.md').read_text().split())


def run_in_megatron(rank):
    with_subgroups(in_megatron, rank)


def test_megatrons_communicator_compares_them(world):
    world.run(run_in_megatron)


def threads(world):
    carry = ct.Bridge('dp=2@1', 'tp=2@1', group=world)  # ranks 1 and 2 of four
    if world.rank in (1, 2):
        carry.check_samples([10 * world.rank], [10, 20])
        try:
            carry.check_samples([10 * world.rank], [10, 21])
        except cb.MismatchError as why:
            return str(why)
    return ''


def test_ranks_that_are_threads_compare_theirs():
    said = cb.run_threads(4, threads)
    assert said[0] == said[3] == '' and said[1] == said[2]
    assert said[1].startswith('bridge: sample 1 of 2 is 20 on ranks [2] of the source and 21 on ranks [1, 2] of the destination;')
