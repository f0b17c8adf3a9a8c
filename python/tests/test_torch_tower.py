# SPDX-License-Identifier: Apache-2.0
"""EncoderParallel on 4 ranks against the whole tower over all images: towers of transformers and one of ours, alone, in DDP,
sharded by FSDP2, with activation checkpointing, with accumulation; empty ranks, bad input, what moves."""
import copy
import math
import os
import pickle
import random
import subprocess
import sys
import zlib
from fractions import Fraction

import pytest

try:  # before ranks are forked
    import transformers
except ImportError:
    transformers = None
try:
    import numpy
except ImportError:
    numpy = None
torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge.torch.alike import checksums  # noqa: E402
from test_torch_mimo import torchrun  # noqa: E402
from world import deadline_ms, meet, needs_fsdp2, with_deepspeed  # noqa: E402
from tower_case import BATCH, DTYPE, H, LENGTH, Lm, Packed, Step, by_hand, coord, replica_sum, worst  # noqa: E402

SEED = int(os.environ.get('T_SEED', '1'))
# Sums of some 10^3 products of size 1 in another order, in fp64: 10^3 * 2^-53 = 1e-13 a layer; a wrong factor is 0.25.
BOUND = 1e-9
SPECS = 'tp=2,cp=2,dp=1', 'cp=2,dp=2', 'dp=4', 'tp=4,dp=1', 'tp=2,dp=2'


class Plain(torch.nn.Module):
    """Attention within each image, and 2 x 2 patches merged; two tensors, as DeepStack has them."""

    def __init__(self, deep=0):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.qkv = torch.nn.Linear(6, H, dtype=DTYPE), torch.nn.Linear(H, 3 * H, dtype=DTYPE)
        self.out = torch.nn.ModuleList([torch.nn.Linear(4 * H, H, dtype=DTYPE) for _ in range(1 + deep)])

    def forward(self, pixels, grid):
        x, parts = self.embed(pixels), []
        for image in x.split(grid.prod(1).tolist()):
            q, k, v = self.qkv(image).chunk(3, -1)
            parts.append(image + torch.softmax(q @ k.t() / H ** 0.5, -1) @ v)
        x = torch.cat(parts).view(-1, 4 * H)
        return [torch.tanh(layer(x)) for layer in self.out]


def plain_run(tower, pixels, grid):
    return tower(pixels, grid)


def here(world, *job):
    return world.run(*job, timeout=200)


GRIDS = (1, 2, 2), (1, 2, 4), (2, 2, 2), (1, 4, 4), (1, 4, 2)


def plain(deep=0, **options):
    tower = Plain(deep)
    return tower, plain_run, (6,), dict(run=plain_run, rows=lambda grid: grid[0] * grid[1] * grid[2] // 4,
                                        smallest=(torch.zeros(4, 6, dtype=DTYPE), [[1, 2, 2]]), cost=8.0, **options)


def hugging_face(name):
    """(tower, how the oracle runs it on one image, shape of a patch, options)"""
    torch.manual_seed(3)
    same = dict(depth=2, num_heads=2, patch_size=2, spatial_merge_size=2, temporal_patch_size=2)
    if name == 'siglip':
        from transformers.models.siglip import SiglipVisionConfig, SiglipVisionModel
        tower = SiglipVisionModel(SiglipVisionConfig(
            hidden_size=H, intermediate_size=16, num_hidden_layers=2, vision_use_head=False, num_attention_heads=2,
            image_size=4, patch_size=2)).to(DTYPE)
        return tower, lambda tower, pixels, grid: [tower(pixels).last_hidden_state.view(-1, H)], (3, 4, 4), {}
    if name == 'qwen2':
        from transformers.models.qwen2_vl import modeling_qwen2_vl as m
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        tower = m.Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(embed_dim=16, hidden_size=H, mlp_ratio=2, **same))
    elif name == 'qwen2.5':
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as m
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        tower = m.Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(
            hidden_size=16, out_hidden_size=H, intermediate_size=24, window_size=8, fullatt_block_indexes=[1], **same))
    else:
        from transformers.models.qwen3_vl import modeling_qwen3_vl as m
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        tower = m.Qwen3VLVisionModel(Qwen3VLVisionConfig(
            hidden_size=16, out_hidden_size=H, intermediate_size=24, num_position_embeddings=16,
            deepstack_visual_indexes=[0, 1], **same))

    def run(tower, pixels, grid):
        out = tower(pixels, grid)
        if isinstance(out, (torch.Tensor, tuple)):  # before transformers 5
            return [out] if isinstance(out, torch.Tensor) else [out[0], *out[1]]
        return [out.pooler_output, *(getattr(out, 'deepstack_features', None) or ())]
    return tower.to(DTYPE), run, (3 * 2 * 2 * 2,), {}


def made(name, **options):
    tower, run, patch, more = plain(2 if name == 'deep' else 0) if name in ('plain', 'deep') else hugging_face(name)
    return tower, run, patch, dict(more, **options)


def step_of(seed, spec, name, patch, most=3, kind=Step):
    if name == 'siglip':
        step = Step(seed, spec, 4, patch, [(1,)], 1, most=0)
        rng = torch.Generator().manual_seed(seed)
        for i in range(int(torch.randint(0, 4, (1,), generator=rng))):
            d = i % step.replicas
            step.images.append((d, i % BATCH, list(range(3 + 5 * (i // 2), 7 + 5 * (i // 2))), (1,),
                                torch.randn(1, *patch, generator=rng, dtype=DTYPE),
                                [r for r in range(4) if coord(spec, r, 'dp')[0] == d]))
        return step
    return kind(seed, spec, 4, patch, GRIDS, 2, most)


def carried(step, rank, vision, lm, grids=True, plan=None):
    """The loss of this rank's part: all ranks' add up to the whole one, if one tp rank of each counts."""
    embedded = lm.words(step.part(rank, step.text))
    given = step.given(rank, grids)
    hidden = vision(given['pixels'], plan=plan, into=embedded) if plan else vision(**given, into=embedded)
    hidden, deep = (hidden[0], hidden[1:]) if isinstance(hidden, list) else (hidden, [])
    return lm.loss(hidden, deep, vision.index() if deep else None, step.part(rank, step.weight))


def loss_is_whole(step, rank, loss, total):
    mine = loss.detach().clone() if coord(step.spec, rank, 'tp')[0] == 0 else torch.zeros_like(loss)
    dist.all_reduce(mine)
    assert abs(mine - total) <= 1e-9 * max(abs(float(total)), 1), (mine, total)


def compare(rank, name, wrap, spec, seeds, steps=1, kind=Step):
    """Raw gradients of every parameter of the tower, and of the words, against those by hand."""
    tower, run, patch, options = made(name)
    lm, oracle = Lm(3 if name in ('deep', 'qwen3') else 1), copy.deepcopy(tower)
    wrapped, more, sums = wrap(tower)
    vision = ct.EncoderParallel(wrapped, group=dist.group.WORLD, llm=spec, output='sharded', **dict(options, **more))
    own = Lm(len(lm.layers))
    for seed in seeds:
        wrapped.zero_grad(set_to_none=True), oracle.zero_grad(), lm.zero_grad(), own.zero_grad()
        for k in range(steps):
            step = step_of(seed * 10 + k, spec, name, patch, kind=kind)
            total = by_hand(step, oracle, run, lm)
            total.backward()
            last = k == steps - 1
            with wrapped.no_sync() if not last and hasattr(wrapped, 'no_sync') else torch.enable_grad():
                if hasattr(wrapped, 'set_requires_gradient_sync'):
                    wrapped.set_requires_gradient_sync(last)
                loss = carried(step, rank, vision, own, name != 'siglip')
                loss.backward()
            loss_is_whole(step, rank, loss, total.detach())
        if sums:
            replica_sum(wrapped)
        expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in oracle.named_parameters()}
        named = [(n.removeprefix('module.'), p) for n, p in wrapped.named_parameters()]
        assert len(named) == len(expected)
        differ = worst(named, expected)
        assert max(differ.values()) <= BOUND, (seed, max(differ, key=differ.get), max(differ.values()))
        if coord(spec, rank, 'tp')[0]:
            own.zero_grad(set_to_none=False)
        replica_sum(own)
        differ = worst(own.named_parameters(), {n: p.grad for n, p in lm.named_parameters()})
        assert max(differ.values()) <= BOUND, (seed, differ)


def alone(tower):
    return tower, {}, True


def ddp(tower):
    return torch.nn.parallel.DistributedDataParallel(tower), {'grad_scale': 4}, False


def sharded(tower):
    from torch.distributed.fsdp import fully_shard
    for block in getattr(tower, 'blocks', getattr(getattr(tower, 'encoder', None), 'layers', [])):
        fully_shard(block)
    fully_shard(tower)
    return tower, {'grad_scale': 4}, False


def sharded_by_one(tower):
    """FSDP2 that is told to add."""
    tower = sharded(tower)[0]
    for module in tower.modules():
        if hasattr(module, 'set_gradient_divide_factor'):
            module.set_gradient_divide_factor(1.0)
    return tower, {}, False


def checkpointing(tower):
    tower.gradient_checkpointing_enable() if hasattr(tower, 'gradient_checkpointing_enable') else None
    return tower.train(), {}, True


def need(world, name, wrap=None):
    if name not in ('plain', 'deep') and transformers is None:
        pytest.skip('there is no transformers')
    if wrap in ('sharded', 'sharded_by_one'):
        needs_fsdp2(world)


WRAPS = {f.__name__: f for f in (alone, ddp, sharded, sharded_by_one, checkpointing)}
HUGGING_FACE = 'qwen2', 'qwen2.5', 'qwen3', 'siglip'


@pytest.mark.parametrize('spec', SPECS)
@pytest.mark.parametrize('name', ['plain', 'deep'])
def test_gradients_of_random_steps_are_those_of_the_whole_tower(world, name, spec):
    here(world, compare, name, alone, spec, range(SEED, SEED + 8))


@pytest.mark.parametrize('spec', ['tp=2,cp=2,dp=1', 'cp=2,dp=2', 'cp=4,dp=1', 'dp=4'])
@pytest.mark.parametrize('name', ['plain', 'deep'])
def test_sequences_that_are_cut_by_themselves_get_their_rows(world, name, spec):
    here(world, compare, name, alone, spec, range(SEED + 60, SEED + 68), 1, Packed)


@pytest.mark.parametrize('wrap', list(WRAPS))
@pytest.mark.parametrize('name', HUGGING_FACE)
def test_towers_of_hugging_face_have_the_whole_towers_gradients(world, name, wrap):
    need(world, name, wrap)
    here(world, compare, name, WRAPS[wrap], SPECS[0], range(SEED + 20, SEED + 23))


@pytest.mark.parametrize('wrap', ['ddp', 'sharded'])
def test_gradients_add_up_over_steps_that_do_not_synchronize(world, wrap):
    need(world, 'deep', wrap)
    here(world, compare, 'deep', WRAPS[wrap], SPECS[1], range(SEED + 40, SEED + 43), 3)


def zero3(rank, name, spec, seeds):
    """DeepSpeed takes a tower of fp32. The last step is one of text alone. bound: as BOUND, of 2^-24 and four layers."""
    deepspeed, bound = with_deepspeed(), 4 * 1e3 * 2.0 ** -24
    tower, run, patch, options = made(name)
    oracle = copy.deepcopy(tower.float()).to(DTYPE)
    engine = deepspeed.initialize(model=tower, optimizer=torch.optim.SGD(tower.parameters(), lr=0.0), config={
        'train_micro_batch_size_per_gpu': 1, 'zero_allow_untested_optimizer': True,
        'zero_optimization': {'stage': 3, 'stage3_param_persistence_threshold': 0}})[0]
    assert all(p.shape == (0,) for p in tower.parameters())

    def cast(tower, pixels, grid):
        return [t.to(DTYPE) for t in run(tower, pixels.float(), grid)]
    vision = ct.EncoderParallel(engine, group=dist.group.WORLD, llm=spec, output='sharded', **dict(
        options, run=cast, grad_scale=4))
    lm, empty = Lm(3), 0
    for seed in seeds:
        oracle.zero_grad()
        step = step_of(seed, spec, name, patch, 0 if seed == seeds[-1] else 3)
        by_hand(step, oracle, run, lm).backward()
        engine.backward(carried(step, rank, vision, lm))
        expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in oracle.named_parameters()}
        for p in tower.parameters():
            p.whole = deepspeed.utils.safe_get_full_grad(p)
        differ = worst(tower.named_parameters(), expected)
        assert max(differ.values()) <= (bound if step.images else 0), (seed, differ)
        empty += bool(step.images) and 0 in vision.stats()['images']
        engine.step()  # by nothing, and gradients begin anew
    return empty


@pytest.mark.parametrize('name', ['deep', 'qwen3'])
def test_towers_in_zero3_have_the_whole_towers_gradients(world, name):
    pytest.importorskip('deepspeed', reason='no DeepSpeed in this Python')
    need(world, name)
    assert min(world.run(zero3, name, SPECS[0], range(SEED + 50, SEED + 55), timeout=400)) > 0


def text_only(rank):
    """Steps without images, alone and after steps with them: all parameters have a gradient, and it is 0."""
    tower, _, patch, options = made('deep')
    wrapped, more, _ = ddp(tower)
    vision, lm = ct.EncoderParallel(wrapped, group=dist.group.WORLD, llm=SPECS[0], output='sharded', **options, **more), Lm(3)
    for most in (0, 3, 0):
        step = step_of(SEED, SPECS[0], 'deep', patch, most)
        wrapped.zero_grad()
        carried(step, rank, vision, lm).backward()
        zero = [not bool(p.grad.any()) for p in tower.parameters()]
        assert all(zero) if most == 0 else not any(zero)


def test_a_step_of_text_has_a_gradient_of_zero(world):
    here(world, text_only)


def counts(rank):
    """Of a step: the tables by one all-gather, pixels by one exchange if any move, rows by one, and one in backward."""
    tower, _, patch, options = made('deep')
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm=SPECS[0], output='sharded', **options)
    lm, seen = Lm(3), set()
    comm = vision._comm()
    for seed in range(SEED, SEED + 6):
        step = step_of(seed, SPECS[0], 'deep', patch)
        carried(step, rank, vision, lm).backward()
        was = comm.stats()
        carried(step, rank, vision, lm).backward()  # of tables that have been compared
        moved = any(vision.stats()[way] for way in ('pixels_sent', 'pixels_received'))
        ops = {(owner, op): n['ops'] - was.get(owner, {}).get(op, {}).get('ops', 0)
               for owner, by in comm.stats().items() for op, n in by.items()}
        exchanges = ops[('bridge', 'exchange')]
        assert {key: n for key, n in ops.items() if n} == {('user', 'all_gather'): 1, ('bridge', 'exchange'): exchanges}, ops
        assert exchanges in ((3,) if moved else (2, 3))
        seen.add(exchanges)
    assert seen == {2, 3}


def test_collectives_of_a_step_are_counted(world):
    here(world, counts)


def only_what_is_missing(rank):
    """Images that all ranks of a replica have do not move; those that one has go to the others, and each rank gets no more
    than it encodes. The costs are level, and a plan may be made a step ahead."""
    tower, _, patch, options = made('plain')
    vision, lm = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=2,dp=2', **options), Lm(1)
    words = lm.words(torch.zeros(BATCH, LENGTH, dtype=torch.int64)).detach()
    pixels = [torch.full((4, 6), float(10 * (rank // 2) + k), dtype=DTYPE) for k in range(4)]
    given = dict(grid_thw=[[1, 2, 2]] * 4, seq=[0, 0, 1, 1], pos=[0, 5, 1, 7])
    vision(torch.cat(pixels), into=words * 1, **given).sum().backward()
    stats = vision.stats()
    assert stats['images'] == [2, 2, 2, 2] and stats['balance'] == 1 and stats['patches'] == [8] * 4
    assert stats['cost'] == [2 * 4 * (4 + 8)] * 4
    assert stats['pixels_sent'] == stats['pixels_received'] == 0 and stats['share'] is None
    here = rank == 2  # which alone has images, of its replica
    plan = vision.plan(torch.cat(pixels) if here else None, packing=[0, LENGTH, 2 * LENGTH], **(given if here else {}))
    assert plan.rank == [2, 0, 1, 3] or sorted(plan.rank) == [0, 1, 2, 3] and plan.cost == [48] * 4
    hidden = vision(torch.cat(pixels) if here else None, plan=plan, into=words * 1)
    want = words.detach().clone()
    if rank // 2:
        for k, (q, at) in enumerate(zip(given['seq'], given['pos'])):
            want[q, at] = Plain()(pixels[k], torch.tensor([[1, 2, 2]]))[0]
    assert torch.allclose(hidden, want, rtol=0, atol=1e-12)
    hidden.sum().backward()
    stats = vision.stats()
    one = 4 * 6 * 8  # bytes of an image's pixels
    assert stats['pixels_sent'] == (3 * one if here else 0) and stats['pixels_received'] == (0 if here else one)
    # ranks 2 and 3 take 4 rows of H f64 each, of which they made one
    assert stats['rows_received'] == (3 * H * 8 if rank // 2 else 0)
    assert 0 < stats['share'] and 0 < stats['seconds']


def level(rank):
    """Of two images on two ranks each is more than the mean of four, and no other rank would be less busy with it."""
    tower, _, _, options = made('plain')
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=4,dp=1', **options)
    here = {1: [[1, 2, 4]], 3: [[1, 2, 2]]}.get(rank, [])
    pixels = torch.zeros(math.prod(here[0]), 6, dtype=DTYPE) if here else None
    plan = vision.plan(pixels, here or None, seq=[0] * len(here), pos=[3 * rank] * len(here), packing=[0, LENGTH])
    assert plan.rank == [1, 3] and plan.patches == [8, 4]


def test_images_on_level_ranks_stay(world):
    here(world, level)


def test_pixels_go_to_the_rank_that_encodes_them_alone(world):
    here(world, only_what_is_missing)


def scattered(rank):
    """Rows of an image at positions of their own, on one rank; ranks of another pipeline stage hold no text."""
    tower, _, _, options = made('plain')
    vision, lm = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='dp=2,pp=2', **options), Lm(1)
    holds = rank < 2
    pixels, at = torch.arange(48.0, dtype=DTYPE).view(8, 6) / 40, [9, 3]
    words = lm.words(torch.zeros(BATCH, LENGTH, dtype=torch.int64)) if holds else None
    given = dict(pixels=pixels, grid_thw=[[1, 2, 4]], seq=[1], row_pos=at) if rank == 3 else dict(
        pixels=pixels, grid_thw=[[1, 2, 4]], seq=[0], pos=[4]) if rank == 0 else dict(pixels=None)
    hidden = vision(**given, into=words * 1 if holds else None)
    rows = Plain()(pixels, torch.tensor([[1, 2, 4]]))[0]
    if holds:
        want = words.detach().clone()
        where = (1, at) if rank else (0, [4, 5])
        want[where[0], where[1]] = rows
        assert torch.allclose(hidden, want, rtol=0, atol=1e-12)
    else:
        assert hidden.shape == (0, H)
    (hidden.sum() if holds else hidden.sum()).backward()
    replica_sum(tower)
    twice = Plain()
    (2 * twice(pixels, torch.tensor([[1, 2, 4]]))[0].sum()).backward()
    assert max(worst(tower.named_parameters(), {n: p.grad for n, p in twice.named_parameters()
                                                if p.grad is not None}).values()) <= BOUND


def test_rows_at_positions_of_their_own_and_other_stages(world):
    here(world, scattered)


PACKED = torch.zeros(BATCH * LENGTH, H, dtype=DTYPE)
BAD = {
    'too few pixels': (dict(pixels=torch.zeros(7, 6)), 'pixels has 7 patches, grid_thw [[1, 2, 4]] says 8'),
    'a grid of two': (dict(grid_thw=[[2, 4]]), 'expected grids of 3 numbers above 0'),
    'no pixels': (dict(pixels=None), 'grid_thw has 1 images, and pixels is None'),
    'a sequence too many': (dict(seq=[5]), 'is in sequence 5, expected one of the 2 sequences'),
    'a position too many': (dict(pos=[1, 2]), 'pos has 2 entries, expected 1, one for each image'),
    'no position': (dict(pos=None), 'neither of pos and row_pos'),
    'behind the end': (dict(pos=[15]), 'segment '),
    'no text': (dict(into=None), 'into is None on rank 1'),
    'another dtype': (dict(pixels=torch.zeros(8, 6)), 'f64 on a CPU'),
    'two images at a position': (dict(pixels=torch.zeros(16, 6, dtype=DTYPE), grid_thw=[[1, 2, 4]] * 2, seq=[0, 0], pos=[6, 6]),
                                 'images 0 and 1 of rank 1 are at position 6 of sequence 0; expected one image at a position'),
    'rows elsewhere': (dict(pos=None, row_pos=[4, 9]), 'ranks 0 and 1 bring an image of sequence 0 at position 4, with rows at '
                       'positions [4, 5] and [4, 9]; expected the same'),
    'text of four axes': (dict(into=torch.zeros(BATCH, 4, 4, H, dtype=DTYPE)), 'expected [batch, positions, H], or packing='),
    'another grid': (dict(grid_thw=[[1, 4, 2]]), 'bring an image of sequence 0 at position 4, with grids'),
    'other lengths': (dict(into=torch.zeros(BATCH, LENGTH - 4, H, dtype=DTYPE)), 'positions; expected the same'),
    'another cut': (dict(into=PACKED, packing=cb.Packing(seq_len=[LENGTH] * 2, split='block')),
                    'have [16, 16] and Packing(2 sequences of 32 positions, block) positions; expected the same'),
    'another split': (dict(into=PACKED, packing=cb.Packing(seq_len=[LENGTH] * 2)),
                      'ranks [0, 1, 2, 3] are cut in different ways, [16, 16] and Packing(2 sequences of 32 positions, zigzag) and', 'dp=4'),
    'a replica too many': (dict(into=PACKED, packing=cb.Packing(seq_len=[LENGTH] * 2, dp=[0, 2])),
                           'packing: sequence 1 is on replica 2, expected one of the 2 replicas'),
}


def bad(rank, change, words, llm='tp=2,dp=2'):
    tower, _, _, options = made('plain')
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm=llm, **options)

    def call(wrong):
        good = dict(pixels=torch.zeros(8, 6, dtype=DTYPE), grid_thw=[[1, 2, 4]], seq=[0], pos=[4],
                    into=torch.zeros(BATCH, LENGTH, H, dtype=DTYPE))
        return vision(**dict(good, **(change if wrong else {})))
    call(False)
    meet()
    with pytest.raises((ValueError, RuntimeError)) as why:
        call(rank == 1)
    assert words in str(why.value), why.value
    call(False)


@pytest.mark.parametrize('name', list(BAD))
def test_bad_input_of_one_rank_is_every_ranks_error(world, name):
    here(world, bad, *BAD[name])


class Odd:
    def __repr__(self):
        return 'odd'


COSTS = {'nan': math.nan, 'inf': math.inf, '-1.0': -1.0, 'None': None, "'7'": '7', 'odd': Odd(), '1j': 1j,
         'tensor([1., 2.])': torch.ones(2).cumsum(0), 'tensor([1.])': torch.ones(1), '1' + 99 * '0': 10 ** 400}


def costly(rank):
    """What one rank says an image costs is told by all. What is a number is taken as one."""
    tower, _, _, options = made('plain')
    cost = 3.0
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=2,dp=2', **dict(options, cost=lambda grid: cost))
    given = dict(pixels=torch.zeros(8, 6, dtype=DTYPE), grid_thw=[[1, 2, 4]], seq=[0], pos=[4], packing=[0, LENGTH])
    for words, bad in COSTS.items():
        cost = bad if rank == 1 else 3.0
        with pytest.raises(ValueError) as why:
            vision.plan(**given)
        assert 'cost of image 0 of rank 1, of grid (1, 2, 4), is %s; expected a finite number of at least 0' % words in str(why.value)
        with pytest.raises(ValueError, match='tower: cost is .* expected a function of an image\'s grid'):
            ct.EncoderParallel(tower, group=cb.Comm.self(), llm='dp=1', **dict(options, cost=-2.0 if bad is None else bad))
    for cost in (2, 2.0, Fraction(2), torch.tensor(2), torch.tensor(2.0), *((numpy.float32(2), numpy.int64(2)) if numpy else ())):
        assert vision.plan(**given).cost == [2, 0, 2, 0]
    cost = 1.0 + rank  # the first rank that brings it says what it costs
    assert vision.plan(**given).cost == [1, 0, 3, 0]
    good = vision.rows
    for rows in 2.0, None, torch.ones(2):
        vision.rows = (lambda grid: rows) if rank == 1 else good
        with pytest.raises((ValueError, RuntimeError), match=r'tower: rows of an image of grid \(1, 2, 4\).*expected a whole number'):
            vision.plan(**given)
        vision.rows = good
        assert vision.plan(**given).cost == [1, 0, 3, 0]
        meet()


def test_a_cost_that_is_no_number_is_every_ranks_error(world):
    here(world, costly)


def greedy(costs, ranks):
    """The loads of as many ranks, if all images are on the first one, exactly."""
    costs, load = [Fraction(c) for c in costs], [Fraction(0)] * ranks
    for c in sorted(costs, reverse=True):
        load[0 if load[0] + c <= sum(costs) / ranks else load.index(min(load))] += c
    return sorted(load)


def units(rank):
    """A cost in seconds is balanced as one in nanoseconds; a millionth of the largest counts."""
    tower, _, _, options = made('plain')
    for unit in (1.0, 1e-3, 1e-9, 1e-300, 5e-324 * 2 ** 20, 1e300):
        rng = random.Random(SEED)
        costs = [unit * c for c in ([1 + rng.random() for _ in range(17)] + [1e-6 * (k + rng.random()) for k in range(8)])]
        costs = costs[:17] if unit < 1e-300 else costs
        vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='dp=1,cp=1,tp=4', **dict(
            options, cost=lambda grid: costs[grid[2] // 2 - 1]))
        n = len(costs) if rank == 0 else 0
        grids = [[1, 2, 2 * k + 2] for k in range(n)]
        plan = vision.plan(torch.zeros(sum(map(math.prod, grids)), 6, dtype=DTYPE) if n else None, grids or None, seq=[0] * n,
                           pos=[40 * k for k in range(n)], packing=[0, 40 * 25])
        got = sorted(sum(Fraction(costs[e]) for e in plan.of(r)) for r in range(4))
        want, most = greedy(costs, 4), max(costs)
        assert all(abs(a - b) <= Fraction(most) / 10 ** 8 for a, b in zip(got, want)), (unit, got, want)
        assert sorted(plan.cost) == pytest.approx([float(load) for load in want], rel=1e-6)
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='dp=1,cp=1,tp=4', **dict(options, cost=lambda grid: 0))
    assert vision.plan(torch.zeros(4, 6, dtype=DTYPE), [[1, 2, 2]], seq=[0], pos=[0], packing=[0, 16]).cost == [0.0] * 4


def test_costs_of_any_unit_are_balanced_alike(world):
    here(world, units)


class Frames(Plain):
    """Attention within each frame."""

    def forward(self, pixels, grid):
        return super().forward(pixels, grid[:, 1:].repeat_interleave(grid[:, 0], 0))


def videos(rank):
    """A video of 8 frames, an image and a video of 3, of rank 0, on four ranks: rows and gradients; the balance is that of frames."""
    torch.manual_seed(5)
    tower, whole = Frames(), Frames()
    grids = [[8, 2, 2], [1, 2, 4], [3, 2, 2]]
    pixels, rows = torch.randn(32 + 8 + 12, 6, dtype=DTYPE), 8 + 2 + 3
    up = torch.randn(1, 40, H, dtype=DTYPE)
    out, at = whole(pixels, torch.tensor(grids))[0], [*range(2, 10), 20, 21, *range(30, 33)]
    want = torch.zeros(1, 40, H, dtype=DTYPE).index_copy(1, torch.tensor(at), out.view(1, rows, H))
    (want * up).sum().backward()
    options = dict(run=plain_run, rows=lambda grid: grid[0] * grid[1] * grid[2] // 4, smallest=(torch.zeros(4, 6, dtype=DTYPE), [[1, 2, 2]]))
    for split in (True, 'auto', False):  # a run of one's own has its frames together, unless it says so
        vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=4,dp=1', split_frames=split, **options)
        for where in ({'pos': [2, 20, 30]}, {'row_pos': at}):
            given = (pixels, torch.tensor(grids)) if rank == 0 else (None,)
            where = dict(where, seq=[0, 0, 0]) if rank == 0 else {}
            tower.zero_grad()
            h = vision(*given, into=torch.zeros(1, 40, H, dtype=DTYPE), **where)
            torch.testing.assert_close(h, want, rtol=1e-13, atol=1e-13)  # a product's bits may depend on how many rows it has
            (h * up).sum().backward()
            grads = [p.grad.clone() for p in tower.parameters()]
            for g, p in zip(grads, whole.parameters()):
                dist.all_reduce(g)
                torch.testing.assert_close(g, p.grad, rtol=1e-12, atol=1e-12)  # sums of some tens of terms
            stats = vision.stats()
            assert (stats['balance'] < 1.3) is (split is True) and sum(stats['images']) == (12 if split is True else 3)
    wrong = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=4,dp=1', split_frames=True, **dict(
        options, rows=lambda grid: grid[0] // 2 * grid[1] * grid[2] // 4))
    with pytest.raises((ValueError, RuntimeError), match='a video of 8 frames has 4 rows, and its frames'):
        wrong.plan(*((pixels[:32], [[8, 2, 2]]) if rank == 0 else (None,)), seq=[0] * (rank == 0), pos=[0] * (rank == 0) or None,
                   packing=[0, 40])


def test_a_video_is_shared_by_frames(world):
    here(world, videos)


def together(rank):
    """An image and a clip, of rank 0: each tower by itself leaves both there; the load of one, or a common plan, does not."""
    def made(width):
        return ct.EncoderParallel(torch.nn.Linear(width, H, dtype=DTYPE), group=dist.group.WORLD, llm='dp=4', run=lambda t, p, g: t(p),
                                  rows=math.prod, smallest=(torch.zeros(1, width, dtype=DTYPE), [[1, 1, 1]]), cost=lambda grid: float(math.prod(grid)))
    vision, audio = made(3), made(5)
    mine = rank == 0
    images = dict(pixels=torch.ones(8, 3, dtype=DTYPE), grid_thw=[[1, 2, 4]], seq=[0], pos=[2]) if mine else dict(pixels=None)
    clips = dict(pixels=torch.ones(12, 5, dtype=DTYPE), grid_thw=[[1, 8, 1], [1, 4, 1]], seq=[0, 0], pos=[12, 22]) if mine else dict(pixels=None)
    images['packing'] = clips['packing'] = [0, 40]
    alone = audio.plan(**clips)
    first = vision.plan(**images)
    assert first.cost == first.load == [8.0, 0, 0, 0] and alone.cost == [8.0, 4.0, 0, 0]
    then = audio.plan(**clips, load=first.load)
    assert then.cost == [0, 8.0, 4.0, 0] and then.load == [8.0, 8.0, 4.0, 0]
    both = ct.plan_towers((vision, images), (audio, clips))
    assert sorted(both[1].load) == [0, 4.0, 8.0, 8.0] and [a + b for a, b in zip(both[0].cost, both[1].cost)] == both[1].load
    text = torch.zeros(1, 40, H, dtype=DTYPE)
    h = vision(images['pixels'], plan=both[0], into=text)
    h = audio(clips['pixels'], plan=both[1], into=h)
    if mine:
        assert torch.equal(h[0, 2:10], vision.tower(images['pixels'])) and torch.equal(h[0, 12:20], audio.tower(clips['pixels'][:8]))
        assert torch.equal(h[0, 22:26], audio.tower(clips['pixels'][8:]))
    for words, call in (('load is .*expected the costs of 4 ranks', lambda: audio.plan(**clips, load=[1.0, 2.0])),
                        ('load is .*expected the costs of 4 ranks', lambda: audio.plan(**clips, load=[1.0, math.nan, 0, 0])),
                        ("unknown argument ..text", lambda: ct.plan_towers((vision, dict(images, text=1)))),
                        ('towers of the grids dp=4 and tp=2,dp=2, expected one', lambda: ct.plan_towers(
                            (vision, images), (ct.EncoderParallel(audio.tower, group=dist.group.WORLD, llm='tp=2,dp=2', run=lambda t, p, g: t(p),
                                                                  rows=math.prod, smallest=(torch.zeros(1, 5, dtype=DTYPE), [[1, 1, 1]])), clips)))):
        meet()
        with pytest.raises((ValueError, RuntimeError), match=words):
            call()
        meet()


def test_the_work_of_two_towers_is_balanced_together(world):
    here(world, together)


def one_position(rank):
    """[batch, 1, H] is a batch: of sequences of 2 positions, each on a context rank of its own."""
    llm = cb.Layout(cb.Grid('cp=2,dp=2')).split('samples', 'dp').split('rows', 'cp', 'block', context=True)
    tower, _, _, options = made('plain')
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm=llm, output='sharded', **options)
    pixels = torch.ones(4, 6, dtype=DTYPE)
    row = Plain()(pixels, torch.tensor([[1, 2, 2]]))[0]
    given = dict(pixels=pixels, grid_thw=[[1, 2, 2]], seq=[1], pos=[1]) if rank == 2 else dict(pixels=None)
    hidden = vision(**given, into=torch.zeros(3, 1, H, dtype=DTYPE))
    want = torch.zeros(3, 1, H, dtype=DTYPE)
    if rank == 3:
        want[1] = row
    assert torch.allclose(hidden, want, rtol=0, atol=1e-12)
    if rank == 2:  # of one sequence of 6
        given = dict(given, seq=[0], pos=[4])
    hidden = vision(**given, into=torch.zeros(3, 1, H, dtype=DTYPE), packing=[0, 6])
    assert torch.allclose(hidden, want, rtol=0, atol=1e-12)


def test_text_of_one_position_a_sequence_is_a_batch(world):
    here(world, one_position)


def views(rank):
    """Text that a module of FSDP2 returns as a view has the gradients of one that it returns whole."""
    from torch.distributed.fsdp import fully_shard

    class Words(torch.nn.Module):
        def __init__(self, view):
            super().__init__()
            torch.manual_seed(1)
            self.words, self.mix, self.view = torch.nn.Embedding(6, H, dtype=DTYPE), torch.nn.Linear(H, H, dtype=DTYPE), view

        def forward(self, ids):
            y = self.mix(self.words(ids))
            return y.transpose(0, 1) if self.view else y
    tower, _, _, options = made('plain')
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='dp=4', **options)
    given = dict(pixels=torch.ones(8, 6, dtype=DTYPE), grid_thw=[[1, 2, 4]], seq=[0], pos=[1])
    left = torch.ones(1, 6, 1, dtype=DTYPE)
    left[:, 1:3] = 0
    plain = Words(False)
    (2 * left * plain(torch.arange(6).view(1, 6)) ** 2).sum().backward()
    for view, inplace in ((False, None), (False, False), (True, None), (True, False)):
        words = Words(view)
        fully_shard(words)
        words.set_gradient_divide_factor(2.0)
        text = words(torch.arange(6).view(6, 1) if view else torch.arange(6).view(1, 6))
        hidden = vision(**given, into=text, inplace=inplace)
        assert (hidden is text) == (not view and inplace is None)
        (hidden ** 2).sum().backward()
        for p, q in zip(words.parameters(), plain.parameters()):
            assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12), (view, inplace)


def test_text_that_is_a_view_of_fsdp2s_keeps_its_hooks(world):
    needs_fsdp2(world)
    here(world, views)


def projected(rank, frozen):
    """What run() itself has learns, though the tower does not, or has nothing that could."""
    torch.manual_seed(7)
    tower, layer = torch.nn.Linear(6, 6, dtype=DTYPE) if frozen else torch.nn.Identity(), torch.nn.Linear(6, H, dtype=DTYPE)
    tower.requires_grad_(False)
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='dp=4', run=lambda tower, x, grid: layer(tower(x)),
                                rows=lambda grid: grid[0], smallest=(torch.zeros(1, 6, dtype=DTYPE), [[1]]))
    pixels = torch.arange(12.0, dtype=DTYPE).view(2, 6)
    hidden = vision(*((pixels, [[2]]) if rank == 1 else (None,)), seq=[0] * (rank == 1), pos=[3] if rank == 1 else None,
                    into=torch.zeros(1, 8, H, dtype=DTYPE))
    assert torch.allclose(hidden[0, 3:5], layer(tower(pixels)) * (rank == 1), rtol=0, atol=1e-12)
    (hidden * 3).sum().backward()
    replica_sum(layer)
    assert torch.allclose(layer.weight.grad, 3 * tower(pixels).sum(0).expand(H, 6), rtol=1e-12, atol=0)
    with torch.no_grad():
        assert not vision(None, into=torch.zeros(1, 8, H, dtype=DTYPE)).requires_grad


@pytest.mark.parametrize('frozen', [True, False])
def test_a_tower_that_learns_nothing_passes_gradients_to_run(world, frozen):
    here(world, projected, frozen)


def replicas(rank):
    """Ranks 0 and 1 are a replica, so are 2 and 3. What a replica or all towers have in common is compared in the first call,
    and at COLO_CHECK=2 in each."""
    tower, _, _, options = made('plain')
    rng = torch.Generator().manual_seed(rank // 2)
    pixels, text = torch.randn(8, 6, generator=rng, dtype=DTYPE), torch.randn(BATCH, LENGTH, H, generator=rng, dtype=DTYPE)

    def call(vision, pixels=pixels, text=text):
        return vision(pixels, [[1, 2, 4]], seq=[1], pos=[4], into=text.clone())

    def parallel(tower=tower, **more):
        return ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=2,dp=2', **dict(options, **more))

    def differs(vision, words, **given):
        with pytest.raises(cb.MismatchError) as why:
            call(vision, **given)
        assert str(why.value) == 'tower: %s; expected the same' % words, why.value
    other, elsewhere, under = pixels.clone(), text.clone(), text.clone()
    if rank == 3:
        other[7, 5] += 1e-15 + abs(other[7, 5]) * 2.0 ** -50
        elsewhere[1, 6, 0], under[1, 4:6] = 7, 7
    of_pixels = 'ranks [2] and [3] bring an image of sequence 1 at position 4, with other pixels'
    of_text = 'ranks [2] and [3] bring other text for one replica of tp=2,dp=2, in into beside the rows of images'
    vision, comm = parallel(), parallel()._comm()
    for wrong, words in (dict(pixels=other), of_pixels), (dict(text=elsewhere), of_text):
        differs(vision, words, **wrong)
    want = call(vision, text=under)
    call(vision, pixels=other), call(vision, text=elsewhere)  # not compared again
    meet()
    comm.set_check(2)
    for wrong, words in (dict(pixels=other), of_pixels), (dict(text=elsewhere), of_text):
        differs(vision, words, **wrong)
        assert torch.equal(call(vision, text=under), want)
    whole, weight = copy.deepcopy(tower.state_dict()), copy.deepcopy(tower.state_dict())
    weight['out.0.weight'] += rank == 2
    tower.load_state_dict(weight)
    differs(vision, 'the towers of ranks [0, 1, 3] and [2] have other values of parameter out.0.weight')
    tower.load_state_dict(whole)
    assert torch.equal(call(vision), want)
    meet()
    comm.set_check(1)
    more = Plain(rank == 1)
    differs(parallel(more), 'the towers of ranks [0, 2, 3] and [1] have other numbers of parameters')
    meet()
    comm.set_check(0)
    call(parallel(), pixels=other)
    meet()
    comm.set_check(1)


def test_replicas_that_bring_other_things_are_named(world):
    here(world, replicas)


def replicas_of_parts(rank):
    """Ranks of FSDP2 have parts of a tower; of two replicas of them the same ones. Context ranks have parts of the text."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    _, _, _, options = made('plain')
    text = torch.full((BATCH, LENGTH // 2, H), float(rank // 2), dtype=DTYPE)

    def call(tower, text=text):
        vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=2,cp=2,dp=1', output='sharded', **options)
        return vision(torch.ones(4, 6, dtype=DTYPE), [[1, 2, 2]], seq=[0], pos=[1], into=text.clone())
    hybrid, mesh = Plain(), init_device_mesh('cpu', (2, 2), mesh_dim_names=('replica', 'part'))
    fully_shard(hybrid.qkv, mesh=mesh), fully_shard(hybrid, mesh=mesh)
    call(sharded(Plain())[0]), call(hybrid)
    with torch.no_grad():
        hybrid.qkv.bias.to_local().add_(rank == 3)
    with pytest.raises(cb.MismatchError, match=r'the towers of ranks \[1\] and \[3\] have other values of parameter qkv.bias'):
        call(hybrid)
    with pytest.raises(cb.MismatchError, match=r'ranks \[2\] and \[3\] bring other text for one replica'):
        call(Plain(), text=text + (rank == 3))


def test_parts_are_compared_with_their_copies(world):
    needs_fsdp2(world)
    here(world, replicas_of_parts)


def test_checksums_are_those_of_bits_in_their_order():
    def by_hand(t):  # of words of 8 bytes, and of the elements behind the last one
        data, size, total = t.contiguous().view(-1).view(torch.uint8).tolist(), t.element_size(), 0
        ends = len(data) // 8 * 8
        for first, end, step in (0, ends, 8), (ends, len(data), size):
            for k, at in enumerate(range(first, end, step)):
                x = int.from_bytes(bytes(data[at:at + step]), 'little', signed=step > 1)
                x = (x ^ k * -7046029254386353131) * -4658895280553007687 % 2 ** 64
                x = x - 2 ** 64 if x >= 2 ** 63 else x
                x = (x ^ x >> 32) * -7723592293110705685 % 2 ** 64
                x = x - 2 ** 64 if x >= 2 ** 63 else x
                total += x ^ x >> 29
        return (total ^ zlib.crc32(repr((tuple(t.shape), t.dtype)).encode()) << 31) % 2 ** 64
    rng = torch.Generator().manual_seed(SEED)
    for n, dtype in ((0, torch.float32), (7, torch.bfloat16), (13, torch.uint8), (2 ** 17 + 5, torch.float32), (5, torch.float64)):
        t = torch.randint(0, 99, (n,), generator=rng).to(dtype)
        assert checksums([t, t]) == [by_hand(t)] * 2
        assert checksums([torch.cat((t[:1], t))[1:] if n else t]) == [by_hand(t)]
    t = torch.randn(6, 10, generator=rng)
    assert checksums([t.t().contiguous().t()]) == checksums([t]) != checksums([t.view(10, 6)])
    found = {checksums([t])[0]}
    for k in range(60):
        other = t.clone()
        other.view(-1).view(torch.int32)[k] ^= 1
        found.update(checksums([other, other.view(torch.int32)]))
    assert len(found) == 121
    assert len(set(checksums([torch.full((2 ** 20,), value) for value in (10., 11., 12.)]))) == 3


def a_row(grid):
    return math.prod(grid) // 4


def copies(rank):
    """A copy is another EncoderParallel, of the same ranks, whose tower is that of the module that is copied with it."""
    torch.manual_seed(2)
    model = torch.nn.Module()
    model.tower = Plain()
    model.vision = ct.EncoderParallel(model.tower, group=dist.group.WORLD, llm='tp=2,dp=2', output='sharded', run=plain_run, rows=a_row,
                                      smallest=(torch.zeros(4, 6, dtype=DTYPE), [[1, 2, 2]]), cost=8.0)
    model.vision.alpha, model.vision.grad_scale = 9.0, 2.0
    given = dict(pixels=torch.ones(8, 6, dtype=DTYPE), grid_thw=[[1, 2, 4]], seq=[0], pos=[4])

    def call(vision):
        hidden = vision(**given, into=torch.zeros(BATCH, LENGTH, H, dtype=DTYPE))
        hidden.sum().backward()
        return hidden.detach()
    want = call(model.vision)
    saved = [pickle.dumps(model)]
    dist.broadcast_object_list(saved)
    for other in copy.deepcopy(model), pickle.loads(saved[0]):
        vision = other.vision
        assert vision.tower is other.tower and vision.tower is not model.tower and vision.last is None
        assert (vision.alpha, vision.grad_scale, vision.group) == (9.0, 2.0, dist.group.WORLD)
        model.zero_grad(set_to_none=True), other.zero_grad(set_to_none=True)
        assert torch.equal(call(vision), want) and all(p.grad is None for p in model.tower.parameters())
        call(model.vision)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.tower.parameters(), other.tower.parameters()))
    shallow = copy.copy(model.vision)
    assert shallow.tower is model.tower and torch.equal(call(shallow), want)
    alone = ct.EncoderParallel(model.tower, group=cb.Comm.self(), llm='dp=1', run=plain_run, rows=a_row,
                               smallest=(torch.zeros(4, 6, dtype=DTYPE), [[1, 2, 2]]))
    assert copy.deepcopy(alone).group is alone.group
    with pytest.raises(TypeError, match='one of a group of its own to pickle'):
        pickle.dumps(alone)


def test_a_copy_of_a_tower_is_another_one_of_its_ranks(world):
    here(world, copies)


def fails(rank):
    """An exception of one rank's tower reaches the others in their bridge."""
    tower, run, _, options = made('plain')

    def breaks(tower, pixels, grid):
        if rank == 1 and not whole:
            raise ArithmeticError('no memory')
        return run(tower, pixels, grid)
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=4,dp=1', **dict(options, run=breaks))
    for whole in (True, False, True):
        given = dict(pixels=torch.zeros(8, 6, dtype=DTYPE), grid_thw=[[1, 2, 4]], seq=[0], pos=[4 * rank],
                     into=torch.zeros(BATCH, LENGTH, H, dtype=DTYPE))
        if whole:
            vision(**given)
            meet()
        else:
            with pytest.raises((ArithmeticError, RuntimeError), match='no memory'):
                vision(**given)


def test_a_tower_that_fails_on_one_rank_ends_the_others_waits(world):
    here(world, fails)


LOADER = '''
import torch, torch.distributed as dist, colobridge.torch as ct
dist.init_process_group('gloo')
torch.manual_seed(1)
tower = torch.nn.Linear(6, 8)
vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='dp=2', rows=lambda g: 1, run=lambda t, p, g: t(p),
                            smallest=(torch.zeros(1, 6), None))
def loader():
    yield torch.ones(1, 6), None
    yield torch.ones(1, 6), vision.plan(torch.ones(1, 6), seq=[0], pos=[1], packing=[0, 4]) if how == 'planned' else None
    if dist.get_rank() == 1:
        raise ValueError('the data ran out')
    yield torch.ones(1, 6), vision.plan(torch.ones(1, 6), seq=[0], pos=[1], packing=[0, 4]) if how != 'call' else None
try:
    for pixels, plan in loader():
        vision(pixels, seq=[0], pos=[1], plan=plan, into=torch.zeros(1, 4, 8)).sum().backward()
except RuntimeError as why:
    print(why)
'''


@pytest.mark.parametrize('how', ('call', 'first plan', 'planned'))
def test_a_data_loader_that_fails_on_one_rank_ends_the_others_waits(how):
    if not torchrun():
        pytest.skip('torchrun does not start here')
    import socket
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, '-c', 'how = %r' % how + LOADER], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              env=dict(os.environ, RANK=str(r), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1',
                                       MASTER_PORT=str(port), COLO_TIMEOUT_MS=str(3 * deadline_ms()))) for r in range(2)]
    said = [process.communicate(timeout=200) for process in ranks]
    assert 'the data ran out' in said[0][0], said
    assert ranks[1].returncode == 1 and 'ValueError: the data ran out' in said[1][1], said


def fitted(rank):
    tower, run, _, options = made('plain')
    seen = []

    def timed(tower, pixels, grid):  # as long as p (p + 100), in milliseconds / 1000
        import time
        p = len(pixels)
        time.sleep(p * (p + 100) * 4e-6)
        seen.append(p)
        return run(tower, pixels, grid)
    vision = ct.EncoderParallel(tower, group=dist.group.WORLD, llm='dp=4', **dict(options, run=timed))
    alpha = vision.fit((1, 8, 8), (1, 16, 16))
    assert seen == [64, 64, 256, 256] and 20 < alpha < 1e9 and vision.alpha == alpha
    assert vision.cost((2, 2, 4)) == 2 * 8 * (8 + alpha)
    return alpha


def test_alpha_is_fitted_from_two_calls_alike_on_all_ranks(world):
    assert len(set(here(world, fitted))) == 1


def test_a_smallest_input_without_values_is_refused():
    with pytest.raises(ValueError, match=r'tower: smallest has pixels \[4, 6\] on meta, expected a tensor with values'):
        ct.EncoderParallel(torch.nn.Linear(6, 8), group=cb.Comm.self(), llm='tp=1', run=plain_run, rows=math.prod,
                           smallest=(torch.zeros(4, 6, device='meta'), [[1, 2, 2]]))


def test_a_tower_without_a_smallest_input_is_refused():
    with pytest.raises(ValueError, match='pass smallest='):
        ct.EncoderParallel(torch.nn.Linear(2, 2), group=None, llm='dp=1')
