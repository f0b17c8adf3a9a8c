# SPDX-License-Identifier: Apache-2.0
"""A DeviceMesh where a grid or a group is taken, and next to a spec. What each rank should have follows from the coordinates
that the mesh itself tells."""
import sys

import pytest

torch = pytest.importorskip('torch')
meshes = pytest.importorskip('torch.distributed.device_mesh', reason='this PyTorch has no DeviceMesh')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from conftest import ranks  # noqa: E402
from colobridge.megatron import ColocatedBridgeCommunicator, HyperCommGrid  # noqa: E402

DeviceMesh, init_device_mesh = meshes.DeviceMesh, meshes.init_device_mesh
ZIGZAG = [[0, 1, 6, 7], [2, 3, 4, 5]]


def mesh_of(ranks, *names):
    return DeviceMesh('cpu', torch.tensor(ranks), mesh_dim_names=names or None)


# ---- grids ----

GOOD = [([[0, 1], [2, 3]], ('dp', 'cp'), 'cp=2,dp=2'), ([[0, 2], [1, 3]], ('cp', 'dp'), 'cp=2,dp=2'),
        ([[0, 2], [1, 3]], ('dp', 'cp'), 'dp=2,cp=2'), ([1, 2], ('tp',), 'tp=2@1'), ([[[0], [1]], [[2], [3]]], ('dp', 'cp', 'tp'), None),
        ([[[0, 1, 2, 3]]], ('pp', 'dp', 'tp'), None), ([3], ('dp',), 'dp=1@3')]
BAD = [([0, 2], ('dp',), r'DeviceMesh \(dp=2\) of ranks \[0, 2\]; a grid has consecutive ranks'),
       ([1, 0], ('dp',), r'of ranks \[1, 0\]; a grid'), ([[0, 1], [3, 2]], ('dp', 'cp'), r'dp=2, cp=2\) of ranks \[0, 1, 3, 2\]'),
       ([[0, 1], [2, 3]], (), r'dim 0=2, dim 1=2\) .* has no mesh_dim_names')]


def grids(_rank):
    for ranks, names, spec in GOOD:
        mesh, tensor = mesh_of(ranks, *names), torch.tensor(ranks)
        grid = cb.Grid(mesh)
        assert spec is None or grid == cb.Grid(spec), (grid, spec)
        assert sorted(grid.ranks()) == sorted(tensor.flatten().tolist())
        for at in torch.ones_like(tensor).nonzero().tolist():
            assert grid.coords(int(tensor[tuple(at)])) == dict(zip(names, at)), (grid, at)
        assert cb.Layout(mesh).grid == grid
    for ranks, names, words in BAD:
        with pytest.raises(ValueError, match=words):
            cb.Grid(mesh_of(ranks, *names))
    with pytest.raises(ValueError, match='offset is 1 with a DeviceMesh'):
        cb.Grid(mesh_of([0, 1], 'dp'), offset=1)


def test_a_grid_has_each_rank_where_the_mesh_has_it(world):
    world.run(grids)


def sliced(rank):
    mesh = mesh_of([[[0, 1]], [[2, 3]]], 'pp', 'dp', 'cp')
    assert cb.Grid(mesh['dp', 'cp']) == cb.Grid('cp=2,dp=1@%d' % (rank // 2 * 2))
    with pytest.raises(ValueError, match=r'pp=2\) of ranks \[%d, %d\]; a grid' % (rank % 2, rank % 2 + 2)):
        cb.Grid(mesh['pp'])
    flat = mesh['pp', 'cp']._flatten('pp_cp')
    assert cb.Grid(flat) == cb.Grid('pp_cp=4') and ct.group_ranks(flat) == (0, 1, 2, 3)


def test_slices_of_a_mesh_and_flattened_ones(world):
    world.run(sliced)


# ---- bridges ----

def uniform(rank, group, order):
    mesh = mesh_of([[0, 1], [2, 3]], 'dp', 'cp') if order == 'dp, cp' else mesh_of([[0, 2], [1, 3]], 'dp', 'cp')
    dp, cp = mesh.get_local_rank('dp'), mesh.get_local_rank('cp')
    bridge = ct.Bridge('dp=4', mesh, group=mesh if group == 'mesh' else dist.group.WORLD, output='sharded')
    x = (torch.arange(8.) + 100 * rank).view(1, 8, 1).requires_grad_()
    y = bridge(x)
    assert y.flatten().tolist() == [100 * (2 * dp + b) + row for b in (0, 1) for row in ZIGZAG[cp]]
    (y * y.detach()).sum().backward()
    assert (x.grad == x.detach()).all()
    assert (ct.bridge(x, 'dp=4', mesh, group=mesh, output='sharded') == y).all()
    src = 'dp=4'
    if order == 'dp, cp':
        src = cb.Layout(mesh._flatten('dp_cp')).split('samples', 'dp_cp')
    ragged = ct.RaggedBridge(src, mesh, group=mesh)
    tables = cb.Segments([2] * 4, src=range(4), seq=[0, 0, 1, 1], pos=[0, 4, 0, 4], seq_len=[8, 8], seq_dp=[0, 1])
    y = ragged(torch.full((2, 1), float(rank)), tables)
    assert y.flatten().tolist() == [2 * dp] * 2 + [2 * dp + 1] * 2


@pytest.mark.parametrize('order', ('dp, cp', 'cp, dp'))
@pytest.mark.parametrize('group', ('mesh', 'world'))
def test_a_bridge_to_a_mesh(world, group, order):
    world.run(uniform, group, order)


def side_by_side(rank):
    """Slices of one mesh: each pair carries for itself, also one whose ranks are apart."""
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('stage', 'cp'))  # PyTorch 2.6 knows an equal slice from before
    slices = {name: mesh[name] for name in ('cp', 'stage')}
    for name, part in slices.items():
        me = mesh.get_local_rank(name)
        packing = cb.Packing(seq_len=[8], split='zigzag')
        bridge = ct.PackedBridge('cp=2', DeviceMesh.from_group(part.get_group(), 'cpu', mesh_dim_names=('cp',)), group=part)
        y = bridge(torch.tensor(ZIGZAG[me], dtype=torch.float32).view(4, 1), src=packing, dst=packing.with_split('block'))
        assert y.flatten().tolist() == [4 * me + i for i in range(4)]
        y = ct.relayout(y, None, 'block', 'zigzag', group=part)
        assert y.flatten().tolist() == ZIGZAG[me]
    y = ct.Bridge(cb.Layout.src('dp=2@%d' % (rank // 2 * 2)), slices['cp'], group=slices['cp'], output='sharded')(
        (torch.arange(8.) + 100 * rank).view(1, 8, 1))
    assert y.flatten().tolist() == [100 * (rank // 2 * 2 + b) + row for b in (0, 1) for row in ZIGZAG[rank % 2]]


def test_slices_carry_side_by_side(world):
    world.run(side_by_side)


def tower(_rank):
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'cp'))
    dp, cp = mesh.get_local_rank('dp'), mesh.get_local_rank('cp')
    encoder = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(encoder.weight)
    vision = ct.EncoderParallel(encoder, group=mesh, llm=mesh, output='sharded', run=lambda t, x, g: t(x), rows=lambda g: g[2],
                                smallest=(torch.zeros(1, 2), [[1, 1, 1]]))
    h = vision(torch.full((3, 2), 10. + dp), [[1, 1, 3]], seq=[0], pos=[1], into=torch.zeros(4, 2), packing=[0, 8])
    assert h[:, 0].tolist() == [10. + dp if 1 <= p < 4 else 0. for p in ZIGZAG[cp]]


def test_the_llm_of_a_tower_is_a_mesh(world):
    world.run(tower)


def communicator(rank):
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'cp'))
    both = ColocatedBridgeCommunicator(HyperCommGrid([1, 4], ['tp', 'dp']), mesh, algo='exact', output='sharded')
    y = both.communicate((torch.arange(8.) + 100 * rank).view(1, 8, 1))
    dp, cp = mesh.get_local_rank('dp'), mesh.get_local_rank('cp')
    assert both.dest_cp_pg is mesh.get_group('cp')
    assert y.flatten().tolist() == [100 * (2 * dp + b) + row for b in (0, 1) for row in ZIGZAG[cp]]


def test_a_grid_of_megatron_s_names_is_a_mesh(world):
    world.run(communicator)


# ---- groups along one dim ----

def losses(rank):
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    tp, dp = mesh.get_local_rank('tp'), mesh.get_local_rank('dp')
    torch.manual_seed(0)
    whole, target = torch.randn(2, 6, 8, dtype=torch.float64), torch.randint(8, (2, 6))
    logits = [whole[dp][:, 4 * tp:4 * tp + 4].clone().requires_grad_() for _ in range(2)]
    outs = [ct.nll(x, target[dp], tp_group=groups[0], reduce_group=groups[1]).loss for x, groups in zip(
        logits, ((mesh['tp'], mesh['dp']), (mesh.get_group('tp'), mesh.get_group('dp'))))]
    want = torch.nn.functional.cross_entropy(whole.flatten(0, 1), target.flatten())
    for out in outs:
        out.backward()
        assert abs(out.item() - want.item()) < 1e-12
    assert (logits[0].grad == logits[1].grad).all()
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    got = [ct.linear_logprob(hidden, weight[4 * tp:4 * tp + 4], target=target[0], tp_group=group) for group in (
        mesh['tp'], mesh.get_group('tp'))]
    assert (got[0] == got[1]).all()
    sequence, row = ct.Sequence(1, 8, cp_group=mesh['tp']), torch.arange(8.)
    assert sequence.gather(row[ZIGZAG[tp]].view(1, 4)).flatten().tolist() == row[:-1].tolist()  # of the next tokens
    assert ct.group_ranks(mesh['tp']) == ct.group_ranks(mesh.get_group('tp')) and ct.group_ranks(mesh) == (0, 1, 2, 3)
    for call in (lambda: ct.logprob(logits[0], target[dp], tp_group=mesh),
                 lambda: ct.nll(logits[0], target[dp], reduce_group=mesh),
                 lambda: ct.relayout(torch.ones(2, 1), None, 'block', 'zigzag', group=mesh)):
        with pytest.raises(ValueError, match=r"group is a DeviceMesh \(dp=2, tp=2\) .*, expected one dim of it, such as mesh\['tp'\]"):
            call()


def test_losses_take_one_dim_of_a_mesh(world):
    world.run(losses)


def outside(rank):
    mesh = mesh_of([1, 2], 'tp')
    if rank in (0, 3):
        with pytest.raises(ValueError, match=r'tp_group has ranks \[1, 2\], which is a group without this rank'):
            ct.logprob(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64), tp_group=mesh)


def test_a_rank_outside_of_a_mesh_is_in_no_group_of_it(world):
    world.run(outside)


# ---- a mesh and a spec ----

def make(what, group):
    """Calls that take a spec for the LLM."""
    if what == 'tower':
        return lambda spec: ct.EncoderParallel(torch.nn.Linear(2, 2), group=group, llm=spec, smallest=(torch.zeros(1, 2), None))
    src = cb.Layout.src('dp=4')
    if what == 'packed':
        return lambda spec: ct.PackedBridge('cp=2,dp=2', spec, group=group)
    return lambda spec: (ct.RaggedBridge if what == 'ragged' else ct.Bridge)(src, spec, group=group)


def compared(_rank, what, group):
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'cp'))
    call = make(what, mesh if group == 'mesh' else dist.group.WORLD)
    words = r"(dst|llm) is 'dp=2,cp=2', whose first dim is the fastest: rank \d .* whose last dim is the fastest, .*'cp=2,dp=2'"
    with pytest.raises(ValueError, match=words):
        call('dp=2,cp=2')
    call('cp=2,dp=2')
    call(mesh)
    if what != 'tower':
        call(cb.Grid('dp=2,cp=2'))  # is meant so
    if what == 'uniform':
        call('dp=4'), call('tp=2,dp=2'), call('dp=2,tp=2')  # other dims
        with pytest.raises(ValueError, match="src is 'dp=2,cp=2'"):  # the mesh is the other side
            ct.Bridge('dp=2,cp=2', mesh, group=dist.group.WORLD)


@pytest.fixture(scope='module')
def new_world():
    """Whose process groups are those of one mesh, made again and again."""
    yield from ranks(4)


@pytest.mark.parametrize('group', ('mesh', 'world'))
@pytest.mark.parametrize('what', ('uniform', 'ragged', 'packed', 'tower'))
def test_a_spec_that_swaps_dims_of_the_mesh_is_refused(new_world, what, group):
    new_world.run(compared, what, group)


def test_nothing_is_imported_to_know_a_mesh(monkeypatch):
    class Mesh:
        mesh, mesh_dim_names = torch.arange(2), ('dp',)
    monkeypatch.delitem(sys.modules, 'torch.distributed.device_mesh')
    with pytest.raises(ValueError, match='Grid: dims is .* expected a spec'):
        cb.Grid(Mesh())
    assert 'torch.distributed.device_mesh' not in sys.modules
