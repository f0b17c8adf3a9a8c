# SPDX-License-Identifier: Apache-2.0
"""HyperCommGrid and ColocatedBridgeCommunicator: names, texts, maps with mocked groups; values and
gradients on processes, compared with ==."""
import os
import zlib
from unittest import mock

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

from colobridge import megatron  # noqa: E402
from colobridge.megatron import (BridgeDirection, ColocatedBridgeCommunicator,  # noqa: E402
                                 HyperCommGrid)
from world import World  # noqa: E402


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '8')


@pytest.fixture
def subgroups(eight):
    """Every call makes a new object and is recorded."""
    with mock.patch('torch.distributed.new_subgroups_by_enumeration',
                    side_effect=lambda *a, **k: (mock.MagicMock(name='pg'), None)) as call:
        yield call


# ---- the grid ----

def test_attributes_are_copies(eight):
    shape, names = [2, 2, 2], ['tp', 'cp', 'dp']
    grid = HyperCommGrid(shape, names, rank_offset=0, backend='gloo')
    shape[0], names[0] = 9, 'x'
    assert grid.shape == [2, 2, 2] and grid.dim_names == ['tp', 'cp', 'dp']
    assert (grid.rank_offset, grid.backend, grid.size, grid._pgs) == (0, 'gloo', 8, {})
    assert type(grid._pgs) is dict
    base = grid._views['base']
    assert (base.name, base.shape, base.dim_names) == ('base', [2, 2, 2], ['tp', 'cp', 'dp'])
    base.shape[0] = 5
    assert grid.shape == [2, 2, 2]


def test_constructor_refuses_in_these_words(monkeypatch):
    monkeypatch.delenv('WORLD_SIZE', raising=False)
    with pytest.raises(ValueError, match=r'len\(shape\) .* != len\(dim_names\)'):
        HyperCommGrid([2, 2], ['tp'])
    with pytest.raises(RuntimeError, match='Cannot determine world size'):
        HyperCommGrid([2], ['tp'])
    with mock.patch('torch.distributed.is_initialized', return_value=True), \
            mock.patch('torch.distributed.get_world_size', return_value=4):
        assert HyperCommGrid([4], ['tp']).size == 4
        with pytest.raises(RuntimeError, match=r'Grid shape \[8\] is over sized'):
            HyperCommGrid([8], ['tp'])
    for said in 'eight', '', '0', '-8', '8.0':
        monkeypatch.setenv('WORLD_SIZE', said)
        with pytest.raises(ValueError, match="WORLD_SIZE is '%s', expected a number of ranks" % said):
            HyperCommGrid([2], ['tp'])
    monkeypatch.setenv('WORLD_SIZE', '8')  # comes before the process group
    with mock.patch('torch.distributed.is_initialized', return_value=True), \
            mock.patch('torch.distributed.get_world_size', return_value=4):
        assert HyperCommGrid([8], ['tp']).size == 8
    with pytest.raises(ValueError, match='rank_offset must be non-negative'):
        HyperCommGrid([2], ['tp'], rank_offset=-1)
    with pytest.raises(RuntimeError, match='Grid shape .* is over sized'):
        HyperCommGrid([4, 2], ['tp', 'dp'], rank_offset=1)


def test_nothing_asks_for_a_rank_before_there_is_one(eight):
    with mock.patch('torch.distributed.get_rank', side_effect=AssertionError):
        grid = HyperCommGrid([2, 4], ['tp', 'dp'])
        grid.register_view('v', [4, 2], ['ep', 'edp'])
        grid.get_rank_enum('tp')
        grid.destroy()
    for rank, inside in ((0, False), (4, True), (7, True), (8, False)):
        with mock.patch('torch.distributed.get_rank', return_value=rank):
            assert HyperCommGrid([2, 2], ['a', 'b'], rank_offset=4).is_current_rank_in_grid() is inside


def test_rank_enumerations(eight):
    grid = HyperCommGrid([2, 2, 2], ['a', 'b', 'c'])
    assert grid._gen_rank_enum(['a', 'b']) == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert grid._gen_rank_enum(['b', 'a']) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.get_rank_enum(['a', 'b']) == grid.get_rank_enum(['b', 'a']) == [[0, 1, 2, 3],
                                                                              [4, 5, 6, 7]]
    assert grid.get_rank_enum('c') == grid._gen_rank_enum('c') == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid._order_dims_for(['a', 'b', 'c'], ['a', 'c']) == (['c', 'a'], 'c-a')
    assert grid._order_dims_for(['a', 'b', 'c'], 'b') == (['b'], 'b')
    moved = HyperCommGrid([2, 2], ['tp', 'dp'], rank_offset=4)
    assert moved.get_rank_enum('dp') == [[4, 6], [5, 7]]
    long = HyperCommGrid([2, 4], ['a-dim-with-a-name-of-any-length', 'dp'])
    assert long.get_rank_enum('dp') == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_groups_are_made_stored_found_and_destroyed_once(subgroups):
    grid = HyperCommGrid([2, 2, 2], ['tp', 'cp', 'dp'], backend='nccl')
    group = grid.create_pg(['tp', 'dp'], timeout=3)
    assert subgroups.call_args == mock.call([[0, 1, 4, 5], [2, 3, 6, 7]], backend='nccl', timeout=3)
    assert list(grid._pgs) == ['dp-tp'] and grid._pgs['dp-tp'] is group
    assert grid.get_pg(['dp', 'tp']) is group and grid.get_pg(['tp', 'dp']) is group
    with pytest.raises(KeyError, match='Process group .* has already been created') as caught:
        grid.create_pg(['dp', 'tp'])
    assert '\\' not in str(caught.value)
    with pytest.raises(KeyError, match="Process group for .* hasn't been created") as caught:
        grid.get_pg('cp')
    assert '\\' not in str(caught.value)
    with pytest.raises(ValueError, match="'ep' is not in view 'base'"):
        grid.create_pg('ep')
    with pytest.raises(ValueError, match="'ep' is not in view 'base'"):
        grid.get_rank_enum(['tp', 'ep'])
    grid.create_pg('cp')
    grid._pgs['also'] = group
    grid._pgs['none'] = None
    grid._pgs['other'] = dist.GroupMember.NON_GROUP_MEMBER
    with mock.patch('torch.distributed.destroy_process_group') as destroy:
        grid.destroy()
    assert [c.args[0] for c in destroy.call_args_list].count(group) == 1
    assert destroy.call_count == 2 and grid._pgs == {}
    with mock.patch('colobridge.megatron.dist.new_subgroups_by_enumeration',
                    return_value=('mine', None)):
        assert grid.create_pg('tp') == 'mine'


def test_views_share_groups_or_have_their_own(subgroups):
    grid = HyperCommGrid([2, 1, 4], ['tp', 'cp', 'dp'])
    assert grid.register_view('expert', [2, 2, 2], ['tp', 'ep', 'edp'], shared_dims=['tp']) is None
    view = grid._views['expert']
    assert (view.shape, view.dim_names, view.shared_dims) == ([2, 2, 2], ['tp', 'ep', 'edp'], ['tp'])
    tp = grid.create_pg('tp', view='expert')
    assert list(grid._pgs) == ['tp'] and grid.get_pg('tp') is tp
    ep = grid.create_pg(['ep', 'tp'], view='expert')
    assert grid._pgs[('expert', ('ep', 'tp'))] is ep
    assert subgroups.call_args == mock.call([[0, 1, 2, 3], [4, 5, 6, 7]], backend=None)
    assert grid.get_pg(['tp', 'ep'], view='expert') is ep
    assert grid.get_rank_enum('edp', view='expert') == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(KeyError, match="for view 'expert' has already been created"):
        grid.create_pg(['tp', 'ep'], view='expert')
    with pytest.raises(KeyError, match="for view 'expert' hasn't been created") as caught:
        grid.get_pg('edp', view='expert')
    assert '\\' not in str(caught.value)
    with pytest.raises(KeyError, match="View 'x' is not registered"):
        grid.get_pg('tp', view='x')
    with pytest.raises(ValueError, match="'dp' is not in view 'expert'"):
        grid.create_pg('dp', view='expert')


def test_views_refuse_in_these_words(eight):
    grid = HyperCommGrid([2, 2, 2], ['tp', 'cp', 'dp'])
    grid.register_view('v', [8], ['ep'])
    for args, words in (
            (('v', [8], ['ep']), "'v' is already registered"),
            (('base', [8], ['ep']), "is already registered"),
            (('w', [4, 2], ['ep']), r'len\(shape\) .* != len\(dim_names\)'),
            (('w', [4, 2], ['ep', 'ep']), 'duplicate dim_names'),
            (('w', [0, 8], ['ep', 'x']), 'shape must be positive ints'),
            (('w', [8.0], ['ep']), 'shape must be positive ints'),
            (('w', [4], ['ep']), 'has size 4, but the grid size is 8'),
            (('w', [2, 4], ['tp', 'ep'], ['tp', 'tp']), 'duplicate shared_dims'),
            (('w', [2, 4], ['tp', 'ep'], ['ep']), "Shared dim 'ep' of view 'w' is not in the base view"),
            (('w', [2, 4], ['tp', 'ep'], ['dp']), "Shared dim 'dp' of view 'w' is not in the view's dim_names"),
            (('w', [4, 2], ['ep', 'tp'], ['tp']), "Shared dim 'tp' has different membership"),
            (('w', [2, 2, 2], ['tp', 'dp', 'cp'], ['tp', 'dp']), "Shared dim 'dp' has"),
    ):
        with pytest.raises(ValueError, match=words):
            grid.register_view(*args)
        assert 'w' not in grid._views
    np = pytest.importorskip('numpy')
    grid.register_view('n', [np.int64(8)], ['ep'])


# ---- the communicator's maps ----

def grid_of(**dims):
    offset = dims.pop('offset', 0)
    return HyperCommGrid(list(dims.values()), list(dims), rank_offset=offset)


def communicator(src, dst, rank=0, **more):
    with mock.patch('torch.distributed.get_rank', return_value=rank):
        return ColocatedBridgeCommunicator(grid_of(**src), grid_of(**dst), **more)


def test_map_a(subgroups):
    c = communicator(dict(tp=2, dp=4), dict(tp=2, cp=2, dp=2), 3)
    assert c.rank_to_src_pos == {r: (r // 2, r % 2) for r in range(8)}
    dst = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)]
    assert c.rank_to_dest_coords == dict(enumerate(dst))
    assert c.rank_to_dest_pos == {0: (0, 0), 1: (0, 1), 4: (1, 0), 5: (1, 1)}
    assert c.gather_group_ranks == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (c.direction, c.direction.value, c.scale) == (BridgeDirection.FAN_IN, 'fan_in', 2)
    assert c.is_fan_in() and not c.is_fan_out() and c.current_rank == 3
    assert (c.src_tp_size, c.src_dp_size, c.dest_tp_size, c.dest_dp_size, c.dest_cp_size) == \
        (2, 4, 2, 2, 2)
    for rank, block in enumerate([0, 0, 1, 1, 0, 0, 1, 1]):
        info = communicator(dict(tp=2, dp=4), dict(tp=2, cp=2, dp=2), rank).get_slice_info(6)
        assert (info.start, info.size) == (3 * block, 3)


def test_map_b(subgroups):
    c = communicator(dict(tp=4, dp=2), dict(tp=1, cp=2, dp=4))
    assert c.rank_to_src_pos == {r: (r // 4, r % 4) for r in range(8)}
    assert c.rank_to_dest_coords == {r: (r // 2, 0, r % 2) for r in range(8)}
    assert c.gather_group_ranks == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert c.is_fan_out() and c.scale == 2 and c.direction.value == 'fan_out'
    assert c.dest_cp_pg is not None
    with pytest.raises(ValueError, match='batch dim size 5 is not divisible by fan_out scale=2'):
        c.get_slice_info(5)
    for rank, block in enumerate([0, 0, 1, 1, 0, 0, 1, 1]):
        info = communicator(dict(tp=4, dp=2), dict(tp=1, cp=2, dp=4), rank).get_slice_info(4)
        assert (info.start, info.size) == (2 * block, 2)


def test_other_maps(subgroups):
    assert communicator(dict(tp=4, dp=2), dict(tp=2, dp=4)).gather_group_ranks == [
        [0, 2], [1, 3], [4, 6], [5, 7]]
    moved = communicator(dict(tp=2, dp=2, offset=4), dict(tp=1, dp=4, offset=4), 5)
    assert sorted(moved.rank_to_src_pos) == sorted(moved.rank_to_dest_coords) == [4, 5, 6, 7]
    assert moved.rank_to_src_pos[5] == (0, 1) and moved.rank_to_dest_pos[5] == (1, 0)
    assert moved.gather_group_ranks == [[4, 5], [6, 7]]
    equal = communicator(dict(tp=4, dp=2), dict(tp=2, cp=2, dp=2))
    assert (equal.direction.value, equal.scale, equal.gather_pg) == ('equal', 1, None)
    assert (equal.get_slice_info(7).start, equal.get_slice_info(7).size) == (0, 7)
    assert communicator(dict(tp=4, dp=2), dict(tp=4, dp=2)).dest_cp_pg is None


def test_communicator_refuses_in_this_order_and_these_words(subgroups):
    for src, dst, words in (
            (dict(dp=8), dict(tp=4, dp=1), "src grid must have 'tp' dimension"),
            (dict(tp=2, dp=4), dict(tp=8), "dest grid must have 'dp' dimension"),
            (dict(tp=2, pp=2, dp=2), dict(tp=2, dp=2), 'Grids must span same number of ranks'),
            (dict(tp=2, pp=1, dp=2, offset=4), dict(tp=2, pp=2, dp=1), 'Grids must have same rank offset'),
            (dict(tp=2, pp=2, dp=2), dict(tp=2, pp=2, dp=2), 'src PP must be 1'),
            (dict(tp=2, cp=2, dp=2), dict(tp=2, pp=2, dp=2), 'dest PP must be 1'),
            (dict(tp=2, cp=2, dp=2), dict(tp=2, dp=2, cp=2), 'Source CP must be 1'),
            (dict(tp=2, cp=2, dp=2), dict(tp=2, dp=2, cp=2), 'CP must be 1'),
            (dict(tp=2, dp=4), dict(tp=2, dp=2, cp=2), "dest_grid dim_names must have 'cp' before 'dp'"),
            (dict(tp=2, dp=3), dict(tp=3, dp=2), 'DP sizes must be evenly divisible')):
        calls = subgroups.call_count
        with pytest.raises(ValueError, match=words):
            communicator(src, dst)
        assert subgroups.call_count == calls
    for mapping in ({'b': 0}, {'b': 0, 's': 1, 'h': 3}, {'b': 0, 'x': 1, 'h': 2}):
        with pytest.raises(ValueError, match='dim_mapping'):
            communicator(dict(tp=2, dp=4), dict(tp=4, dp=2), dim_mapping=mapping)
    exact = communicator(dict(tp=2, dp=3), dict(tp=3, dp=2), algo='exact')
    assert exact.scale is None and exact.gather_pg is None
    with pytest.raises(ValueError, match="algo is 'fast'"):
        communicator(dict(tp=2, dp=4), dict(tp=4, dp=2), algo='fast')


def test_communicator_with_an_undeclared_extra_dim_is_refused(subgroups):
    src, dst = dict(tp=2, gtp_remat=2, dp=2), dict(tp=2, dp=4)
    for swap in False, True:
        pair = (dst, src) if swap else (src, dst)
        with pytest.raises(ValueError, match="dim 'gtp_remat' has extent 2; COLLECTIVE knows"):
            communicator(*pair)
        for more in {}, {'extra': 'gtp'}, {'output': 'sharded', 'algo': None}:
            with pytest.raises(ValueError, match="dim 'gtp_remat' of extent 2 has no role"):
                communicator(*pair, **{'algo': 'exact', **more})
        c = communicator(*pair, algo='exact', extra='gtp_remat')
        assert c._dst.grid.names == list(pair[1])
        communicator(*pair, algo='exact', extra=['absent', 'gtp_remat'])
    with pytest.raises(ValueError, match="extra dim 'dp'"):
        communicator(src, dst, algo='exact', extra=['gtp_remat', 'dp'])
    for names in (dict(tp=2, dp=4, gtp_remat=1),) * 2, (dict(dp=8, gtp_remat=1, tp=1),) * 2:
        assert communicator(*names).direction == 'equal'  # one rank: no data to share out
    with pytest.raises(ValueError, match="src grid must have 'tp' dimension"):
        communicator(dict(gtp_remat=2, dp=4), dst)


def test_dims_of_data_split_samples_inside_of_dp(subgroups):
    # Megatron's order is tp-gtp_remat-cp-ep-dp, and the rank in its group of data is gtp_remat + 2 dp.
    src, dst = dict(tp=2, gtp_remat=2, dp=2), dict(tp=2, dp=4)
    c = communicator(src, dst, algo='exact', data='gtp_remat')
    assert (c.src_dp_size, c.dest_dp_size, c.direction) == (4, 4, 'equal')
    assert c.rank_to_src_pos == {r: (r // 2, r % 2) for r in range(8)}
    c = communicator(dict(gtp_remat=2, tp=2, dp=2), dict(tp=4, dp=2), algo='exact', data=['gtp_remat'])
    assert c.direction == 'fan_in' and c.rank_to_src_pos[5] == (3, 0)
    assert c._src.owned(5, 8, 1, 1).samples == (6, 8)
    assert c.gather_group_ranks == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for wrong, words in ({'data': 'dp'}, 'other dims than dp'), ({'data': 'gtp_remat', 'extra': 'gtp_remat'}, 'each in'), \
            ({'data': 'gtp_remat', 'algo': None}, "only algo='exact'"):
        with pytest.raises(ValueError, match=words):
            communicator(src, dst, **{'algo': 'exact', **wrong})


def test_direction_equals_its_string(subgroups):
    for dp, word in (4, 'fan_in'), (2, 'equal'), (1, 'fan_out'):
        c = communicator(dict(tp=8 // dp, dp=dp), dict(tp=4, dp=2))
        assert c.direction == word and c.direction is BridgeDirection(word)
        assert isinstance(c.direction, str) and {word: 1}[c.direction] == 1
        assert c.direction != 'src'


def test_members_of_a_process_group_are_told_apart():
    from colobridge.megatron import _is_process_group_member
    assert not _is_process_group_member(None)
    assert not _is_process_group_member(dist.GroupMember.NON_GROUP_MEMBER)
    assert _is_process_group_member(object())


def test_destroy_is_idempotent(subgroups):
    c = communicator(dict(tp=2, dp=4), dict(tp=2, cp=2, dp=2))
    group = c.gather_pg
    assert group is not None
    with mock.patch('torch.distributed.destroy_process_group') as destroy:
        c.destroy()
        c.destroy()
    assert [call.args[0] for call in destroy.call_args_list].count(group) == 1
    assert c.gather_pg is None
    with pytest.raises(RuntimeError, match='was destroyed'):
        c.communicate(torch.zeros(1, 1, 1))


# ---- on processes ----

@pytest.fixture(scope='module')
def world():
    world = World(8)
    yield world
    world.close()


def with_subgroups(fn, *args):
    """torch 1.13 makes subgroups only where there is CUDA; then the same by new_group()."""
    def by_enumeration(lists, **kwargs):
        mine = None
        for ranks in lists:
            group = dist.new_group(ranks, backend=kwargs.get('backend'))
            mine = group if dist.get_rank() in ranks else mine
        return mine, None

    if int(torch.__version__.partition('.')[0]) >= 2 or torch.cuda.is_available():
        return fn(*args)
    with mock.patch('torch.distributed.new_subgroups_by_enumeration', by_enumeration):
        return fn(*args)


def integers(shape, *seed):
    rng = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randint(-99, 99, shape, generator=rng).to(torch.float32)


MAPPINGS = {'bsh': {'b': 0, 's': 1, 'h': 2}, 'sbh': {'s': 0, 'b': 1, 'h': 2}, 'th': {'b': 0, 'h': 1}}
CASES = [(dict(tp=2, dp=4), dict(tp=2, cp=2, dp=2)), (dict(tp=4, dp=2), dict(tp=1, cp=2, dp=4)),
         (dict(tp=4, dp=2), dict(tp=2, dp=4)), (dict(tp=1, dp=8), dict(tp=4, dp=2)),
         (dict(tp=4, dp=2), dict(tp=2, cp=2, dp=2)), (dict(tp=4, dp=2), dict(tp=4, dp=2)),
         (dict(tp=1, dp=8), dict(tp=1, cp=8, dp=1)),
         (dict(tp=2, dp=2, offset=4), dict(tp=1, dp=4, offset=4)),
         (dict(tp=1, dp=4, offset=2), dict(tp=1, cp=2, dp=2, offset=2))]


def communicates(rank, src, dst, how, more):
    axes = MAPPINGS[how]
    c = ColocatedBridgeCommunicator(grid_of(**src), grid_of(**dst), 'vision', 'llm', axes, **more)
    b, rows = 4, 5  # rows that no 2 cp divides
    few = 1 if how == 'th' else rows

    def tensor(batch, *seed):
        shape = {'bsh': (batch, few, 3), 'sbh': (few, batch, 3), 'th': (batch, 3)}[how]
        return integers(shape, *seed)

    cat = lambda parts: torch.cat(parts, dim=axes['b'])  # noqa: E731
    inside = rank in c.rank_to_src_pos
    if not inside:
        assert c.gather_pg is None
        return
    if c.direction is not BridgeDirection.EQUAL:
        assert c.gather_pg is not None
        members = next(g for g in c.gather_group_ranks if rank in g)
        # Named, so that it lives on: PyTorch 2.6 ends a group of gloo's with the GIL held, and waits for its threads,
        # and a thread that frees a temporary tensor wants the GIL.
        seen, mine = [torch.zeros(1) for _ in members], torch.tensor([float(rank)])
        dist.all_gather(seen, mine, group=c.gather_pg)
        assert [int(t) for t in seen] == sorted(members)
    else:
        assert c.gather_pg is None
    sdp, ddp = c.src_dp_size, c.dest_dp_size
    xs = {d: tensor(b, 'x', d) for d in range(sdp)}
    everything = cat([xs[d] for d in range(sdp)])
    each = everything.shape[axes['b']] // ddp
    dp, tp, cp = c.rank_to_dest_coords[rank]
    y_want = everything.narrow(axes['b'], dp * each, each)
    gs = {(d, k): tensor(each, 'g', d, k) for d in range(ddp) for k in range(c.dest_cp_size)}
    total = cat([sum(gs[d, k] for k in range(c.dest_cp_size)) for d in range(ddp)])
    x_want = total.narrow(axes['b'], c.rank_to_src_pos[rank][0] * b, b)
    for again in range(2):
        x = xs[c.rank_to_src_pos[rank][0]].clone().requires_grad_()
        y = c.communicate(x)
        assert torch.equal(y, y_want)
        d_y = gs[dp, cp].clone()
        y.backward(d_y)
        assert torch.equal(x.grad, x_want)
        assert torch.equal(d_y, gs[dp, cp])
    c.destroy()
    c.destroy()
    assert c.gather_pg is None


def gtp(rank):
    """Ranks along gtp_remat have samples of their own; the LLM's have them in Megatron's order of data."""
    c = ColocatedBridgeCommunicator(grid_of(tp=2, gtp_remat=2, dp=2), grid_of(tp=2, cp=2, dp=2), algo='exact',
                                    data='gtp_remat')
    everything = integers((8, 4, 3), 'gtp')
    mine = rank // 2  # gtp_remat + 2 dp
    x = everything[2 * mine:2 * mine + 2].clone().requires_grad_()
    y = c.communicate(x)
    dp, cp = rank // 4, rank // 2 % 2
    assert torch.equal(y, everything[4 * dp:4 * dp + 4])
    y.backward(integers((4, 4, 3), 'g', dp, cp))
    want = torch.cat([integers((4, 4, 3), 'g', d, 0) + integers((4, 4, 3), 'g', d, 1) for d in (0, 1)])
    assert torch.equal(x.grad, want[2 * mine:2 * mine + 2])
    c.destroy()


def run_gtp(rank):
    with_subgroups(gtp, rank)


def test_samples_of_gtp_remat_ranks_arrive_in_order(world):
    world.run(run_gtp)


def run_communicates(rank, *args):
    with_subgroups(communicates, rank, *args)


@pytest.mark.parametrize('src, dst', CASES)
def test_values_and_gradients(world, src, dst):
    for how in MAPPINGS:
        world.run(run_communicates, src, dst, how, {})


@pytest.mark.parametrize('src, dst', CASES[:2] + CASES[4:5])
def test_values_and_gradients_of_the_collective_way(world, src, dst):
    for how in MAPPINGS:
        world.run(run_communicates, src, dst, how, {'algo': 'collective'})


def beyond(rank):
    """What the reference limits forbid: source cp, another order, no divisor; rows of their own."""
    c = ColocatedBridgeCommunicator(grid_of(tp=2, cp=2, dp=2), grid_of(dp=4, tp=2), algo='exact')
    at = c._src.owned(rank, 4, 8, 2)
    everything = integers((4, 8, 2), 'beyond')
    x = everything[at.samples[0]:at.samples[1], at.rows].clone().requires_grad_()
    y = c.communicate(x)
    own = rank % 4
    assert torch.equal(y, everything[own:own + 1])
    y.backward(y.detach())
    assert torch.equal(x.grad, x.detach())
    c.destroy()
    s = ColocatedBridgeCommunicator(grid_of(tp=2, dp=4), grid_of(tp=2, cp=2, dp=2), output='sharded',
                                    positions=16, position_offset=0)
    mine = everything[rank // 2:rank // 2 + 1]
    y = s.communicate(mine)  # 8 rows of a sequence of 16: cp 0 has 0..3 and 12..15
    cp = rank // 2 % 2
    dp = rank // 4
    assert torch.equal(y, everything[2 * dp:2 * dp + 2, 4 * cp:4 * cp + 4])
    s.destroy()


def run_beyond(rank):
    with_subgroups(beyond, rank)


def test_keywords_lift_the_limits(world):
    world.run(run_beyond)


def real_grid(rank):
    grid = HyperCommGrid([2, 2, 2], ['tp', 'cp', 'dp'], backend='gloo')
    for dims in ('tp', ['cp', 'dp'], 'cp'):
        group = grid.create_pg(dims)
        members = next(g for g in grid.get_rank_enum(dims) if rank in g)
        assert dist.get_world_size(group) == len(members)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(members)
    c = ColocatedBridgeCommunicator(grid_of(tp=2, dp=4), grid)
    assert c.dest_cp_pg is grid.get_pg('cp')
    assert grid.is_current_rank_in_grid()
    c.destroy()
    still = torch.ones(1)
    dist.all_reduce(still, group=grid.get_pg('cp'))  # the grid's own is still there
    grid.destroy()


def run_real_grid(rank):
    with_subgroups(real_grid, rank)


def test_real_groups(world):
    world.run(run_real_grid)


def real_subgroups(rank):
    grid = HyperCommGrid([2, 4], ['tp', 'dp'])
    group = grid.create_pg('dp')
    assert dist.get_world_size(group) == 4
    grid.destroy()


def test_torch_makes_the_subgroups_itself(world):
    if int(torch.__version__.partition('.')[0]) < 2 and not torch.cuda.is_available():
        pytest.skip('new_subgroups_by_enumeration() of torch %s needs CUDA' % torch.__version__)
    world.run(real_subgroups)


def test_the_dist_module_is_there_for_patches():
    assert megatron.dist is dist
    assert os.environ.get('WORLD_SIZE') is None
    with pytest.raises(AttributeError):
        megatron.nothing


def test_the_dist_module_may_be_patched_as_a_whole(eight):
    with mock.patch('colobridge.megatron.dist') as patched:
        patched.new_subgroups_by_enumeration.return_value = ('mine', None)
        patched.get_rank.return_value = 3
        grid = HyperCommGrid([2, 4], ['tp', 'dp'])
        assert grid.create_pg('tp') == 'mine' and grid.is_current_rank_in_grid()
        grid.destroy()
        patched.destroy_process_group.assert_called_once_with('mine')
    assert megatron._dist() is dist
