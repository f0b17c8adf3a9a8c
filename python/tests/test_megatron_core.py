# SPDX-License-Identifier: Apache-2.0
"""colobridge.megatron inside of megatron-core, where that is installed: install() finds every place, and the
PartitionAdapter does what theirs does. Without it, on modules that import as its modules do."""
import dataclasses
import importlib
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

from colobridge import megatron, padded  # noqa: E402
from colobridge.megatron import PartitionAdapter, PartitionConfig  # noqa: E402

IMPORTERS = ['megatron.core.pipeline_parallel.bridge_communicator', 'megatron.core.models.mimo.config.role',
             'megatron.core.models.mimo.config.base_configs', 'megatron.core.models.mimo.model.base',
             'megatron.core.models.mimo.comm.colocated_communicator']


@pytest.fixture
def core():
    """megatron-core's modules that import the two classes; the classes are put back afterwards."""
    pytest.importorskip('megatron.core', reason='no megatron-core in this Python')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            yield [importlib.import_module(name) for name in IMPORTERS]
        except ImportError as why:
            pytest.skip('this megatron-core has no MIMO model: %s' % why)
        finally:
            megatron.uninstall()


@pytest.fixture
def copies(monkeypatch):
    """Modules of the same names with classes of their own, where megatron-core is not."""
    def module(name, **names):
        made = types.ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
        return made
    for name in ('megatron', 'megatron.core', 'megatron.core.models', 'megatron.core.models.mimo',
                 'megatron.core.models.mimo.comm'):
        module(name, __path__=[])
    grid = module('megatron.core.hyper_comm_grid', HyperCommGrid=type('HyperCommGrid', (), {}))
    comm = module('megatron.core.models.mimo.comm.colocated_communicator', HyperCommGrid=grid.HyperCommGrid,
                  ColocatedBridgeCommunicator=type('ColocatedBridgeCommunicator', (), {}))
    role = module('megatron.core.models.mimo.config.role', Grid=grid.HyperCommGrid, other=3)
    yield grid, comm, role
    megatron.uninstall()


def test_install_replaces_the_names_that_modules_have_imported(copies):
    grid, comm, role = copies
    theirs = grid.HyperCommGrid
    places = megatron.install()
    assert sorted(places) == sorted([
        'megatron.core.hyper_comm_grid.HyperCommGrid', 'megatron.core.models.mimo.config.role.Grid',
        'megatron.core.models.mimo.comm.colocated_communicator.HyperCommGrid',
        'megatron.core.models.mimo.comm.colocated_communicator.ColocatedBridgeCommunicator'])
    assert grid.HyperCommGrid is comm.HyperCommGrid is role.Grid is megatron.HyperCommGrid and role.other == 3
    assert comm.ColocatedBridgeCommunicator is megatron.ColocatedBridgeCommunicator
    assert megatron.install() == []
    megatron.uninstall()
    assert grid.HyperCommGrid is role.Grid is theirs and megatron.HyperCommGrid is not theirs


def test_install_without_megatron_core_says_so(copies, monkeypatch):
    grid, *_ = copies
    del grid.HyperCommGrid
    with pytest.raises(ImportError, match='megatron-core has no megatron.core.hyper_comm_grid.HyperCommGrid'):
        megatron.install()


def test_install_in_megatron_core(core):
    before = {id(m): dict(vars(m)) for m in core}
    places = megatron.install()
    assert len(places) >= 7 and not [p for p in places if not p.startswith('megatron.core.')]
    left = [(m.__name__, name) for m in sys.modules.values() if m.__name__.startswith('megatron.')
            for name, value in list(vars(m).items()) if isinstance(value, type) and value.__name__ in megatron._UPSTREAM
            and not value.__module__.startswith('colobridge')]
    assert left == []
    megatron.uninstall()
    assert {id(m): dict(vars(m)) for m in core} == before


# ---- the partition adapter ----

@dataclasses.dataclass
class ModelParallel:
    """What is read of Megatron's ModelParallelConfig."""
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False


@dataclasses.dataclass
class Packed:
    """What is read of Megatron's PackedSeqParams."""
    cu_seqlens_q: object
    cu_seqlens_q_padded: object = None
    qkv_format: str = 'thd'


def groups():
    """cp and tp groups of four ranks, tp the fastest"""
    cps, tps = [dist.new_group([i, i + 2]) for i in (0, 1)], [dist.new_group([i, i + 1]) for i in (0, 2)]
    return cps[dist.get_rank() % 2], tps[dist.get_rank() // 2]


def adapts(rank, cut, seq_parallel):
    cp_group, tp_group = groups()
    cp_rank, tp_rank = rank // 2, rank % 2
    adapter = PartitionAdapter(PartitionConfig.from_mp_config(
        ModelParallel(2, seq_parallel), max_seq_len=16, cp_group=cp_group, tp_group=tp_group))
    embeddings = torch.arange(96.0).view(16, 2, 3)[:, :1 if cut else 2].clone().requires_grad_()
    labels = torch.arange(32).view(2, 16)[:embeddings.shape[1]]
    edges = cut or [0, 16]
    # zigzag by hand: each segment in four chunks, of which context rank c has chunks c and 3 - c
    rows = [r for a, b in zip(edges, edges[1:]) for chunk in (cp_rank, 3 - cp_rank)
            for r in range(a + chunk * (b - a) // 4, a + (chunk + 1) * (b - a) // 4)]
    packed = Packed(torch.tensor([0, 7, 15]), torch.tensor(cut)) if cut else None
    x, y, mask, same = adapter.shard(embeddings, labels, labels.float(), packed)
    mine = rows[4 * tp_rank:4 * tp_rank + 4] if seq_parallel else rows
    assert same is packed and torch.equal(y, labels[:, rows]) and torch.equal(mask, labels[:, rows].float())
    assert torch.equal(x, embeddings[mine])
    (x * (10.0 ** tp_rank if seq_parallel else 1)).sum().backward()
    want = torch.zeros_like(embeddings)
    for i, row in enumerate(rows):  # gathered over tp: each row has the gradient of the rank that has it
        want[row] = 10.0 ** (i // 4) if seq_parallel else 1
    assert torch.equal(embeddings.grad, want)
    assert adapter.shard(None, labels, None, packed)[0] is None


@pytest.mark.parametrize('seq_parallel', [False, True])
def test_partition_adapter_shards_over_the_groups_that_it_is_given(world, seq_parallel):
    world.run(adapts, None, seq_parallel)
    world.run(adapts, [0, 8, 16], seq_parallel)


def refuses(rank):
    cp_group, tp_group = groups()
    adapter = PartitionAdapter(PartitionConfig.from_mp_config(
        ModelParallel(2, True, True), max_seq_len=16, cp_group=cp_group, tp_group=tp_group))
    for rows, words in ((12, 'Sequence length should be divisible by 8 for Sequence/Context'), (24, 'TP Comm overlap')):
        with pytest.raises(AssertionError, match=words):
            adapter.shard(torch.zeros(rows, 1, 2), None, None)


def test_partition_adapter_refuses_in_megatrons_words(world):
    world.run(refuses)
    with pytest.raises(ValueError, match='cp_group is None, but context_parallel_size is 2'):
        PartitionConfig.from_mp_config(ModelParallel(2), max_seq_len=8)


def as_megatron(rank):
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.models.mimo.partition.utils import PartitionAdapter as Theirs, PartitionConfig as TheirConfig
    cp_group, tp_group = groups()
    for seq_parallel in (False, True):
        mp = ModelParallelConfig(context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=seq_parallel)
        args = dict(max_seq_len=16, cp_group=cp_group, tp_group=tp_group)
        x = torch.randn(16, 2, 3, generator=torch.Generator().manual_seed(rank // 2))
        labels, mask = torch.arange(32).view(2, 16), torch.ones(2, 16)
        found = []
        for adapter in (Theirs(TheirConfig.from_mp_config(mp, **args)), PartitionAdapter(TheirConfig.from_mp_config(mp, **args)),
                        PartitionAdapter(PartitionConfig.from_mp_config(mp, **args))):
            leaf = x.clone().requires_grad_()
            with mock.patch('torch.cuda.current_device', return_value='cpu'):  # theirs gathers on a GPU
                out = adapter.shard(leaf, labels, mask)
                (out[0] * (rank + 1)).sum().backward()
            found.append((*out[:3], leaf.grad))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other)), seq_parallel


def test_partition_adapter_does_what_megatrons_does(world, core):
    world.run(as_megatron)


@pytest.mark.parametrize('recipe, align', [('delayed', 16), ('blockwise', 16), ('mxfp8', 32), ('nvfp4', 128),
                                           ('grouped', 256)])
def test_padding_by_the_name_of_a_recipe_divides_for_every_rank(recipe, align):
    for tp, cp in (1, 1), (2, 1), (1, 2), (4, 3):
        for length in 1, 255, 256, 1000:
            n = padded(length, tp=tp, cp=cp, recipe=recipe)
            fits = [m for m in range(length, n + 1)
                    if m % (tp * cp * (2 if cp > 1 else 1)) == 0 and m // cp % align == 0]
            assert fits == [n]
    with pytest.raises(ValueError, match="recipe is 'int3', expected 'delayed' or"):
        padded(4, recipe='int3')


def test_padding_is_that_of_megatron_core(core):
    from megatron.core.enums import Fp4Recipe, Fp8Recipe
    from megatron.core.fp4_utils import get_fp4_align_size
    from megatron.core.fp8_utils import get_fp8_align_size
    for recipe in ('delayed', 'tensorwise', 'blockwise', 'mxfp8'):
        assert padded(1, recipe=recipe) == get_fp8_align_size(Fp8Recipe(recipe))
    assert padded(1, recipe='nvfp4') == get_fp4_align_size(Fp4Recipe.nvfp4)


def mimo_steps(rank, src, dst, planted=False):
    """What MimoModel does with communicators: makes them from a map of grids, carries embeddings [s b, h], lets go.
    With megatron-core's classes, then with ours; embeddings and raw gradients, before an optimizer scales them."""
    from megatron.core.models.mimo.model.base import MIMO_LANGUAGE_MODULE_KEY, MimoModel
    found = []
    by_enumeration = dist.new_subgroups_by_enumeration
    for ours in (False, True):
        places = megatron.install() if ours else []
        assert bool(places) is ours
        grid = sys.modules['megatron.core.hyper_comm_grid'].HyperCommGrid
        model = types.SimpleNamespace(colocated_comms={}, mimo_config=types.SimpleNamespace(
            modality_submodules_spec={'images': None},
            module_to_grid_map={'images': grid(*src), MIMO_LANGUAGE_MODULE_KEY: grid(*dst)}))
        with mock.patch('torch.distributed.new_subgroups_by_enumeration',  # theirs wants NCCL
                        lambda lists, backend=None, **more: by_enumeration(lists, backend='gloo', **more)):
            MimoModel._build_colocated_communicators(model)
        bridge = model.colocated_comms['images', MIMO_LANGUAGE_MODULE_KEY]
        assert isinstance(bridge, megatron.ColocatedBridgeCommunicator) is ours
        dp, tp = bridge.rank_to_src_pos[rank]
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(dp)).requires_grad_()
        y = MimoModel._apply_colocated_comms(model, {'images': x})['images']
        weight = torch.randn(64, 6, generator=torch.Generator().manual_seed(9))  # of the whole batch
        replica = bridge.rank_to_dest_pos[rank][0]
        g = weight[replica * len(y):(replica + 1) * len(y)]
        (y * g * (2 if planted and ours else 1)).sum().backward()
        found.append((y.detach(), x.grad))
        MimoModel.destroy(model)
        assert model.colocated_comms == {}
    megatron.uninstall()
    same = [torch.equal(a, b) for a, b in zip(*found)]
    assert same == [True, not planted]


@pytest.mark.parametrize('src, dst', [
    (([1, 4], ['tp', 'dp']), ([2, 2], ['tp', 'dp'])), (([2, 2], ['tp', 'dp']), ([1, 4], ['tp', 'dp'])),
    (([2, 2], ['tp', 'dp']), ([2, 2], ['tp', 'dp'])), (([1, 4], ['tp', 'dp']), ([4, 1], ['tp', 'dp']))])
def test_mimo_model_carries_the_same_with_our_classes(world, core, src, dst):
    world.run(mimo_steps, src, dst)


def test_a_doubled_gradient_is_seen_in_mimo_model(world, core):
    world.run(mimo_steps, ([1, 4], ['tp', 'dp']), ([2, 2], ['tp', 'dp']), True)


@pytest.mark.parametrize('factor', [1, 2])
def test_mimo_model_trains_the_same_with_our_classes(core, factor):
    """Whole steps with an encoder and a GPT: the same bits. A doubled gradient is seen before the optimizer."""
    program = Path(__file__).with_name('mimo_training.py')
    done = subprocess.run(
        [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', str(program),
         '--steps', '2', '--plant-factor', str(factor)], text=True, capture_output=True, timeout=240,
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': os.pathsep.join(sys.path)})
    said = done.stdout.splitlines()
    assert said and said[-1].endswith(
        'ranks on gloo: the same bits everywhere' if factor == 1 else 'ranks on gloo: 8 comparisons differ'), done
    assert (done.returncode == 0) is (factor == 1)
