# SPDX-License-Identifier: Apache-2.0
"""The core without torch: grids, layouts, plans, ranks that are threads or processes, errors."""
import array
import copy
import ctypes as c
import gc
import itertools
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref

import pytest

import colobridge as cb
from colobridge import _structs as s
from colobridge import comm as comms
from colobridge.view import view


def test_importing_needs_neither_torch_nor_numpy_nor_the_library():
    code = '''
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import colobridge
names = [m.name for m in pkgutil.walk_packages(colobridge.__path__, "colobridge.")
         if not m.name.endswith("_installed") and not m.name.split(".")[1].startswith(("torch", "compat", "megatron"))]
for name in names:
    importlib.import_module(name)
assert colobridge._lib._library is None, "loaded by an import"
print(len(names))
'''
    env = dict(os.environ, COLOBRIDGE_LIBRARY='/nonexistent/libcolobridge.so')
    done = subprocess.run([sys.executable, '-c', code], env=env, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout) >= 10


def strides(shape):
    return list(itertools.accumulate(shape[:-1], lambda a, b: a * b, initial=1))


def test_coordinates_and_groups_are_the_formulas():
    for shape, offset in (([2, 2, 2], 0), ([2, 3, 1, 2], 4), ([5], 1)):
        names = ['tp', 'cp', 'pp', 'dp'][:len(shape)]
        grid = cb.Grid(list(zip(names, shape)), offset=offset)
        assert grid.names == names and grid.shape == shape and grid.offset == offset
        assert grid == cb.Grid(dict(zip(names, shape)), offset=offset)
        where = {}
        for rank in grid.ranks():
            expect = [(rank - offset) // st % n for st, n in zip(strides(shape), shape)]
            where[rank] = dict(zip(names, expect))
            assert grid.coords(rank) == where[rank]
            assert grid.rank(where[rank]) == rank
        for k in range(1, len(names) + 1):
            for dims in itertools.combinations(names, k):
                members = {}
                for rank in grid.ranks():
                    rest = tuple(where[rank][n] for n in names if n not in dims)
                    members.setdefault(rest, []).append(rank)
                groups = [g.ranks() for g in grid.groups(dims)]
                assert sorted(groups) == sorted(members.values())
                for rank in grid.ranks():
                    group = grid.group('-'.join(reversed(dims)), rank)
                    assert rank == group[group.index] and group.ranks() in groups
                    assert list(group) == [group[i] for i in range(len(group))]


def test_order_as_given_and_key():
    grid = cb.Grid('a=2,b=2,c=2')
    assert [grid.group(['a', 'b'], r, as_given=True).ranks() for r in (0, 4)] == [[0, 2, 1, 3],
                                                                                [4, 6, 5, 7]]
    assert [g.ranks() for g in grid.groups('a-b')] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.key(['a', 'c']) == 'c-a' == grid.key('c-a')


@pytest.mark.parametrize('make, kind, words', [
    (lambda: cb.Grid('tp=2,tp=2'), ValueError, "byte 5: .*duplicate dim name 'tp'"),
    (lambda: cb.Grid([('tp', 0)]), ValueError, 'extent'),
    (lambda: cb.Grid([]), ValueError, 'dims'),
    (lambda: cb.Grid(8), ValueError, r'Grid: dims is 8, expected a spec .*, pairs .*, a dict of them, or a DeviceMesh'),
    (lambda: cb.Grid({'tp': 2.5}.items()), ValueError, "the extent of 'tp' is 2.5, expected an integer"),
    (lambda: cb.Grid({'tp': 2.5}), ValueError, "the extent of 'tp' is 2.5, expected an integer"),
    (lambda: cb.Grid([('tp', '2')]), ValueError, "the extent of 'tp' is '2', expected an integer"),
    (lambda: cb.Grid('tp=2', offset=1), ValueError, 'offset is 1 with a spec, which says it itself'),
    (lambda: cb.Grid({}), ValueError, 'dims'),
    (lambda: cb.Grid('tp=4', world=2), ValueError, 'world|2'),
    (lambda: cb.Grid('tp=2').coords(2), ValueError, 'rank 2'),
    (lambda: cb.Grid('tp=2').rank({'dp': 0}), ValueError, "'dp' is no dim"),
    (lambda: cb.Grid('tp=2').group('dp', 0), ValueError, "'dp' is not in the grid"),
    (lambda: cb.Grid('tp=2').group('t\0p', 0), ValueError, 'NUL'),
    (lambda: cb.Layout.src('dp=2').split('rows', 'cp'), ValueError, 'cp'),
    (lambda: cb.Layout('dp=2').split('batch', 'dp'), ValueError, "axis 'batch'"),
    (lambda: cb.Layout('dp=2').stage('dp', 'first'), ValueError, "'first'"),
    (lambda: cb.Layout.dst('cp=2').check(1, 6, 1), ValueError, '6'),
    (lambda: cb.Plan(cb.Layout.src('dp=2'), cb.Layout.dst('dp=2'), (1, 2), 0), ValueError, 'shape'),
    (lambda: cb.Plan(cb.Layout.src('dp=2'), cb.Layout.dst('dp=2'), (1, 2, -3), 0), ValueError, '-3'),
    (lambda: cb.Plan(cb.Layout.src('dp=2'), cb.Layout.dst('dp=2'), (1, 2, 3), 0, output='half'),
     ValueError, "output is 'half', expected 'full' or 'sharded'"),
    (lambda: cb.collective_check(cb.Layout.src('dp=2'), cb.Layout.dst('dp=2'), (2, 2, 2)), ValueError,
     "src grid must have 'tp' dimension"),
    (lambda: cb.Partition(6, cp=2), ValueError, '6'),
    (lambda: view('text'), ValueError, 'is a str'),
    (lambda: view(array.array('d', [1.0] * 2), dtype='f99'), ValueError, 'format'),
])
def test_bad_arguments_are_value_errors_with_the_error_message(make, kind, words):
    with pytest.raises(kind, match=words) as caught:
        make()
    assert not isinstance(caught.value, cb.Error) or caught.value.status <= 0


def test_exceptions_survive_pickling_and_print_as_they_are():
    for kind in (cb.ArgumentError, cb.NamingError, cb.FailedError, cb.DeadlineError,
                 cb.MismatchError):
        error = pickle.loads(pickle.dumps(kind('rank 3: "x" is [2]', -2)))
        assert (type(error), str(error), error.status) == (kind, 'rank 3: "x" is [2]', -2)
    assert issubclass(cb.NamingError, KeyError) and issubclass(cb.DeadlineError, TimeoutError)
    assert issubclass(cb.MismatchError, RuntimeError) and issubclass(cb.ArgumentError, ValueError)


def bytes_of(message):
    return sum((r.samples[1] - r.samples[0]) * (r.rows[1] - r.rows[0])
               * (r.features[1] - r.features[0]) for r in message.regions) * 4


def test_plan_is_that_of_the_worked_example():
    src, dst = cb.Layout.src('tp=2,dp=4'), cb.Layout.dst('tp=2,cp=2,dp=2')
    pairs = {0: 2, 2: 0, 1: 3, 3: 1, 4: 6, 6: 4, 5: 7, 7: 5}
    for rank in range(8):
        plan = cb.Plan(src, dst, (8, 16, 4), rank, output='sharded')
        assert (plan.direction, plan.scale, plan.rank) == ('fan_in', 2, rank)
        for way in ('forward', 'backward'):
            sends, recvs = plan.sends(way), plan.recvs(way)
            assert [m.peer for m in sends] == [m.peer for m in recvs] == [pairs[rank]]
            assert plan.bytes(way).recv == recvs[0].bytes == bytes_of(recvs[0]) == 8 * 16 * 4 * 4 // 8
    assert cb.Plan(cb.Layout.src('tp=2,dp=3'), cb.Layout.dst('tp=3,dp=2'), (6, 2, 2), 0).scale is None


def test_nodes_are_those_of_the_communicator(monkeypatch):
    monkeypatch.setenv('COLO_NODE', 'b,a,a,b')
    found = cb.run_threads(4, lambda comm: (comm.nodes, [comm.node(r) for r in (-1, 0, 1, 2, 3, 4)],
                                            comm.node_of_world_ranks(6)))
    assert found == [(2, [-1, 0, 1, 1, 0, -1], [0, 1, 1, 0, -1, -1])] * 4


def test_plans_by_nodes_bring_in_what_a_node_lacks_once():
    src, dst, shape = cb.Layout.src('tp=4,dp=2'), cb.Layout.dst('tp=8'), (2, 16, 8)

    def arrives(**nodes):  # bytes from the other node, over all ranks
        return sum(message.bytes for rank in range(8) for message in
                   cb.Plan(src, dst, shape, rank, **nodes).recvs('forward') if message.peer // 4 != rank // 4)
    lacks = 16 * 8 * 4  # one of two samples
    assert arrives(ranks_per_node=4) == arrives(nodes=[7] * 4 + [5] * 4) == 2 * lacks
    assert arrives(ranks_per_node=4, one_level=True) == 8 * lacks
    with pytest.raises(ValueError, match='nodes of 7 ranks'):
        cb.Plan(src, dst, shape, 0, nodes=[0] * 7)


def test_layout_with_an_undeclared_extra_dim_is_refused():
    for make in (cb.Layout.src, cb.Layout.dst):
        with pytest.raises(ValueError, match="dim 'gtp_remat' of extent 2 has no role"):
            make('tp=2,gtp_remat=2,dp=2')
        with pytest.raises(ValueError, match="dim 'gtp_remat' of extent 2 has no role"):
            make('tp=2,gtp_remat=2,dp=2', extra='gtp')
        with pytest.raises(ValueError, match='has a letter after a digit'):
            make('tp1dp4')
        for extra in ('gtp_remat', 'absent-gtp_remat', ['absent', 'gtp_remat']):
            layout = make('tp=2,gtp_remat=2,dp=2', extra=extra)
            assert [layout.owned(r, 4, 1, 1).samples for r in (0, 2, 4)] == [(0, 2), (0, 2), (2, 4)]


def test_layout_says_what_a_rank_owns():
    layout = cb.Layout.dst('tp=2,cp=2,dp=2').map_table([0, 1, 2, 3], 8)
    assert layout.owned(2, 4, 4, 5).rows == [2, 3]  # cp 1 holds positions 2..5 of 8
    assert layout.owned(2, 4, 4, 5, full_rows=True).rows == [0, 1, 2, 3]
    assert layout.owned(7, 4, 4, 5).samples == (2, 4) and layout.owned(7, 4, 4, 5).features == (0, 5)
    assert layout == cb.Layout.dst('tp=2,cp=2,dp=2').map_table([0, 1, 2, 3], 8)
    assert layout != cb.Layout.dst('tp=2,cp=2,dp=2')
    assert cb.Layout.src('dp=2,pp=2').holds(2) and not cb.Layout.src('dp=2,pp=2').holds(1)


def test_a_position_table_lives_as_long_as_what_was_made_with_it():
    one, shape = cb.Comm.self(), (1, 2, 1, 4)
    for make in (lambda *layouts: cb.Bridge(one, *layouts, shape), lambda *layouts: cb.Plan(*layouts, shape, 0)):
        layouts = [cb.Layout.src('dp=1'), cb.Layout.dst('dp=1').map_table([3, 0], 4)]
        first = weakref.ref(layouts[1]._table)
        made = make(*layouts)
        layouts[1].map_table([1, 2], 4)
        gc.collect()
        assert first() is not None and list(first()) == [3, 0]
        del made
        gc.collect()
        assert first() is None


def test_copies_of_layouts_and_partitions_have_memory_of_their_own():
    layout = cb.Layout('cp=2,dp=2').map_table([3, 0], 4).split('features', 'dp')
    parts = [layout, cb.Layout.src('dp=4').map_table([1], 2).map_offset(1, 8),
             cb.Partition(8, cp=2, cp_rank=1, tp=2, tp_rank=1), cb.Partition(12, cp=2, cp_rank=1, cu_padded=[0, 4, 12])]
    said = lambda x: x.index() if isinstance(x, cb.Partition) else (hash(x), x.owned(1, 4, 2, 4))  # noqa: E731
    want = [said(x) for x in parts]
    copies = [[copy.copy(x) for x in parts], copy.deepcopy(parts), pickle.loads(pickle.dumps(parts))]
    del parts, layout
    gc.collect()
    for made in copies:
        made[1].check(4, 2, 4)
        assert [said(x) for x in made] == want
    copies[1][0].clear('features')
    assert [said(x) for x in copies[0]] == [said(x) for x in copies[2]] == want


def test_a_layout_that_another_version_pickled_is_refused():
    again, (grid, raw, table) = cb.Layout('cp=2,dp=2').map_table([3, 0], 4).__reduce__()
    for other in raw[:-128], raw + bytes(8):  # of before it had room for more members; of a longer one
        with pytest.raises(ValueError, match='layout: found one of %d bytes to unpickle, expected %d' % (len(other), len(raw))):
            again(grid, other, table)


def test_a_communicator_and_what_was_made_with_it_have_no_copies():
    one, src = cb.Comm.self(), cb.Layout.src('dp=1')
    for made in (one, cb.Bridge(one, src, src, (1, 2, 1)), cb.Plan(src, src, (1, 2, 1), 0), cb.Memory.alloc(one, 8)):
        assert copy.copy(made) is made and copy.deepcopy({'held': made})['held'] is made
        with pytest.raises(TypeError, match='%s: found one to pickle, expected none' % type(made).__name__):
            pickle.dumps(made)
    one.barrier()


def coded(shape, ranges):
    """f32 values that say where they come from, b, s, h of the global tensor."""
    return array.array('f', [b * 10000 + r * 100 + h for b in ranges[0] for r in ranges[1]
                             for h in ranges[2]])


def test_long_name_of_a_communicator_is_cut_inside_a_letter():
    def one_rank(world):
        world.name = 'é' * 20  # of two bytes each
        return world.name
    assert cb.run_threads(1, one_rank) == ['é' * 15 + '\ufffd']


def test_bridge_moves_values_and_gradients_on_threads():
    src, dst = cb.Layout.src('tp=2,dp=4'), cb.Layout.dst('tp=2,cp=2,dp=2')

    def rank(world):
        bridge = cb.Bridge(world, src, dst, (8, 16, 4), output='sharded')
        mine = src.owned(world.rank, 8, 16, 4)
        x = coded(bridge.src_shape, (range(*mine.samples), range(16), range(4)))
        want = dst.owned(world.rank, 8, 16, 4)
        y = array.array('f', [-1.0]) * (4 * 8 * 4)
        shapes = bridge.src_shape, bridge.dst_shape
        assert shapes == ((2, 16, 4), (4, 8, 4))
        bridge.forward(shaped(x, shapes[0]), shaped(y, shapes[1]))
        assert y == coded(shapes[1], (range(*want.samples), want.rows, range(4)))
        d_x = array.array('f', [-1.0]) * len(x)
        bridge.backward(shaped(y, shapes[1]), shaped(d_x, shapes[0]))
        assert d_x == x
        assert world.stats()['bridge']['exchange']['ops'] == 2
        assert world.dump()['size'] == 8
        bridge.reshape((4, 16, 4))
        assert bridge.src_shape == (1, 16, 4)
        bridge.destroy()
        bridge.destroy()
        with pytest.raises(RuntimeError, match='was destroyed'):
            bridge.forward(None, None)
        return world.rank

    assert cb.run_threads(8, rank) == list(range(8))


class Owner:
    """An allocator in host memory, and what it was asked for."""

    def __init__(self):
        self.asked, self.live = 0, {}
        self.functions = s.Allocator(s.AllocateFn(self.allocate), s.ReleaseFn(self.release))

    def allocate(self, _, nbytes):
        memory = bytearray(nbytes + 255)
        address = c.addressof(c.c_char.from_buffer(memory)) + 255 & ~255
        self.asked += nbytes
        self.live[address] = memory
        return address

    def release(self, _, address):
        del self.live[address]


def test_memory_of_a_bridge_is_from_the_caller_s_allocator():
    def rank(world):
        owner = Owner()
        bridge = cb.Bridge(world, cb.Layout.src('dp=2'), cb.Layout.dst('cp=2,dp=1'), (2, 4, 8), allocator=owner.functions)
        assert owner.asked == bridge.workspace_size > 0 and len(owner.live) == 1
        y, d_x = (array.array('f', [1.0]) * math.prod(shape) for shape in (bridge.dst_shape, bridge.src_shape))
        bridge.backward(shaped(y, bridge.dst_shape), shaped(d_x, bridge.src_shape))
        assert set(d_x) == {2.0} and owner.asked == bridge.workspace_size
        bridge.destroy()
        return not owner.live

    assert cb.run_threads(2, rank) == [True, True]


def shaped(flat, shape):
    return memoryview(flat).cast('B').cast('f', list(shape))


def test_a_rank_that_raises_ends_the_others_waits():
    seen = []

    def rank(world):
        if world.rank == 1:
            raise KeyError('mine')
        try:
            world.barrier()
        except RuntimeError as why:
            seen.append(why)
            raise

    with pytest.raises(KeyError, match='mine'):
        cb.run_threads(3, rank)
    assert len(seen) == 2


def test_a_run_raises_the_error_of_the_rank_that_aborted():
    def rank(world):
        if world.rank == 0:
            world.barrier()
        world.abort('the file ends too early')
        while 0 not in world._run._left:  # rank 0 is back with the error of the abort before this one
            time.sleep(1e-3)
        raise KeyError('mine')

    with pytest.raises(KeyError, match='mine'):
        cb.run_threads(2, rank)


def test_disagreement_is_a_mismatch_error_on_all_ranks():
    kinds = []

    def rank(world):
        shape = (4, 8, 2 + (world.rank == 3))
        try:
            cb.Bridge(world, cb.Layout.src('dp=4'), cb.Layout.dst('dp=4'), shape)
        except cb.MismatchError as why:
            kinds.append(str(why))

    cb.run_threads(4, rank)
    assert len(kinds) == 4 and all('bridge create' in text for text in kinds)


def test_a_rank_that_does_not_come_is_a_timeout():
    def rank(world):
        world.set_timeout(0.2)
        if world.rank == 0:
            with pytest.raises(TimeoutError, match='barrier'):
                world.barrier()
        else:
            time.sleep(0.6)

    cb.run_threads(2, rank)


def test_threads_wait_for_each_other_without_the_interpreter_lock():
    def rank(world):
        total = array.array('d', [world.rank + 1.0])
        for _ in range(50):
            world.barrier()
        world.all_reduce(total)
        group = world.split(cb.Grid('tp=2,dp=2'), 'dp')
        assert [group.world_rank(i) for i in range(2)] == [world.rank % 2, world.rank % 2 + 2]
        assert group.gather_bytes(b'%d' % world.rank) == [b'%d' % group.world_rank(i) for i in (0, 1)]
        for n in 0, 9, 4088, 9000:  # one exchange, or two
            said = world.gather_bytes(bytes([world.rank]) * (n if world.rank == 2 else 5 * world.rank), ragged=True)
            assert said == [bytes([r]) * (n if r == 2 else 5 * r) for r in range(4)], n
        part = array.array('d', [0.0])
        world.reduce_scatter(array.array('d', [1.0, 2.0, 3.0, 4.0]), part)
        assert part[0] == 4.0 * (world.rank + 1)
        assert world.split_color(-1) is None
        return total[0]

    assert cb.run_threads(4, rank) == [10.0] * 4


def test_buffers_that_do_not_fit_are_refused():
    one = cb.Comm.self()
    with pytest.raises(ValueError, match='recv has 3 elements, expected 2'):
        one.all_gather(array.array('d', [1, 2]), array.array('d', [1, 2, 3]))
    with pytest.raises(ValueError, match='send is f64, recv f32'):
        one.all_gather(array.array('d', [1]), array.array('f', [1]))
    with pytest.raises(ValueError, match='is a read-only buffer, expected a contiguous one that can be written'):
        one.broadcast(b'abc')
    one.destroy()
    with pytest.raises(RuntimeError, match='was destroyed'):
        one.barrier()


def test_a_communicator_ends_bridges_that_live_longer():
    src, dst = cb.Layout.src('dp=2'), cb.Layout.dst('dp=2')
    kept = []

    def rank(world):
        group = world.split_color(0)
        kept.extend(cb.Bridge(comm, src, dst, (2, 1, 1)) for comm in (world, group))
        handles = [handle for handle, _ in group._users]
        group.destroy()
        assert len(handles) == 1 and not handles[0] and not group._users
        raise KeyError('the traceback holds them, too')

    with pytest.raises(KeyError):
        cb.run_threads(2, rank)
    assert len(kept) == 4 and not any(bridge._handle for bridge in kept)
    for bridge in kept:
        with pytest.raises(RuntimeError, match='this bridge was destroyed, or its communicator'):
            bridge.forward(None, None)
        bridge.destroy()
    one = cb.Comm.self()
    cb.Bridge(one, cb.Layout.src('dp=1'), cb.Layout.dst('dp=1'), (2, 1, 1)).destroy()
    assert not one._users  # nothing is kept for those that end before


INTERRUPTED = '''
import os, signal
import colobridge as cb
def one_rank(world):
    groups = world.split_color(0, 0), world.split_color(1, 0)
    world.barrier()
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGINT)
    try:  # each waits where the other one does not come
        groups[world.rank].barrier()
    except RuntimeError as why:
        heard.append('interrupted' in str(why))
heard = []
try:
    cb.run_threads(2, one_rank)
except KeyboardInterrupt:
    print(heard)
'''


def test_ctrl_c_ends_the_waits_of_all_ranks():
    done = subprocess.run([sys.executable, '-c', INTERRUPTED], text=True, capture_output=True, check=False)
    assert (done.stdout, done.returncode) == ('[True, True]\n', 0), done.stderr


def test_ctrl_c_before_there_are_ranks(monkeypatch):
    began, start = [], threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, 'start', interrupted)
        with pytest.raises(KeyboardInterrupt):
            cb.run_threads(2, lambda world: began.append(world.rank))
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(60)
    assert not began


def test_ctrl_c_while_ranks_begin(monkeypatch):
    begin, lock = comms._Run.begin, threading.Lock()

    def interrupted(run, comm):
        with lock:
            if not run.interrupted:
                run.interrupt()
        begin(run, comm)
    monkeypatch.setattr(comms._Run, 'begin', interrupted)
    with pytest.raises(RuntimeError, match='interrupted'):
        cb.run_threads(2, lambda world: world.barrier())


LATE = '''
import atexit
def end():  # as the interpreter ends: variables of modules go before objects that others hold
    module.c = module.lib = None
    kept.clear()
atexit.register(end)
import colobridge as cb
import colobridge.comm as module
world = cb.Comm.self()
kept = [cb.Bridge(world, cb.Layout.src('dp=1'), cb.Layout.dst('dp=1'), (2, 1, 1)), world]
del world
'''


def test_what_is_left_at_exit_ends_without_a_word():
    done = subprocess.run([sys.executable, '-c', LATE], text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, '')


PROCESS = '''
import array, os, sys, time
import colobridge as cb
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def gather(mine, box=[0]):
    box[0] += 1
    with open(f"{folder}/tmp{box[0]}.{rank}", "wb") as f:
        f.write(mine)
    os.rename(f"{folder}/tmp{box[0]}.{rank}", f"{folder}/{box[0]}.{rank}")
    paths = [f"{folder}/{box[0]}.{r}" for r in range(size)]
    while not all(map(os.path.exists, paths)):
        time.sleep(0.01)
    return [open(p, "rb").read() for p in paths]
world = cb.Comm.from_all_gather(rank, size, gather)
total = array.array("d", [rank + 1.0])
world.all_reduce(total)
assert total[0] == size * (size + 1) / 2, total
assert world.backend == "sockets", world.backend
child = os.fork()  # it has the connections, too, but its end must not matter
if child == 0:
    world.destroy()
    os._exit(0)
os.waitpid(child, 0)
world.barrier()
print("done", world)
'''


def test_processes_meet_through_an_all_gather(tmp_path):
    ranks = [subprocess.Popen([sys.executable, '-c', PROCESS, str(r), '3', str(tmp_path)], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for r in range(3)]
    said = [rank.communicate(timeout=180)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), said


def test_a_program_says_what_holds_for_its_communicators(monkeypatch, tmp_path):
    for name in ('TIMEOUT_MS', 'CHECK', 'TRANSPORT', 'FLIGHT_RECORDER'):
        monkeypatch.delenv('COLO_' + name, raising=False)

    def gather_alone(mine):
        return [mine]

    world = cb.Comm.from_all_gather(0, 1, gather_alone)
    assert world.config == {'timeout': 600.0, 'check': 1, 'transport': 'auto', 'flight_recorder': ''}
    ours = {'timeout': 4.5, 'check': 2, 'transport': 'nccl', 'flight_recorder': str(tmp_path / 'rank')}
    assert cb.Comm.from_all_gather(0, 1, gather_alone, **ours).config == ours
    world.configure(timeout=4.5, check=2)
    world.configure(transport='nccl', flight_recorder=tmp_path / 'rank')
    part = world.split_color(0)
    assert world.config == part.config == ours
    monkeypatch.setenv('COLO_TRANSPORT', 'peer')
    monkeypatch.setenv('COLO_TIMEOUT_MS', '77')
    world.configure(flight_recorder='')
    assert world.config == {**ours, 'timeout': .077, 'transport': 'peer', 'flight_recorder': ''}
    for wrong, words in (({'transport': 'tcp'}, "transport is 'tcp', expected 'auto' or"),
                         ({'check': 3}, 'config.check is 3, expected 0..2')):
        with pytest.raises(ValueError, match=words):
            world.configure(**wrong)
        with pytest.raises(ValueError, match=words):
            cb.Comm.from_all_gather(0, 1, gather_alone, **wrong)


def test_what_the_all_gather_raises_comes_out():
    def gather(mine):
        raise OSError('the store is gone')

    with pytest.raises(OSError, match='the store is gone'):
        cb.Comm.from_all_gather(0, 2, gather)
    with pytest.raises(ValueError, match=r'expected 2 of \d+'):
        cb.Comm.from_all_gather(0, 2, lambda mine: [mine])


def test_partition_is_the_zigzag():
    assert cb.Partition(8, cp=2, cp_rank=0).index() == [0, 1, 6, 7]
    assert cb.Partition(8, cp=2, cp_rank=1).index() == [2, 3, 4, 5]
    packed = cb.Partition(12, cp=2, cp_rank=1, cu_padded=[0, 4, 12])
    assert packed.index() == [1, 2, 6, 7, 8, 9]
    whole, local = array.array('q', range(12)), array.array('q', [0]) * 6
    packed.shard(whole, 0, local)
    assert list(local) == packed.index()
    back = array.array('q', [9]) * 12
    packed.unshard(local, 0, back)
    assert list(back) == [0, 1, 2, 0, 0, 0, 6, 7, 8, 9, 0, 0]
    targets = array.array('q', [0]) * 12
    packed.next_token(whole, targets)
    assert list(targets) == [1, 2, 3, -100, 5, 6, 7, 8, 9, 10, 11, -100]
    assert cb.padded(10, tp=2, cp=2) == 16


def test_views_of_arrays_and_bytes():
    t = view(array.array('i', range(6)))
    assert (s.DTYPES[t.dtype], t.ndim, t.shape[0], t.stride[0]) == ('i32', 1, 6, 1)
    raw = bytearray(8)
    assert (s.DTYPES[view(raw, dtype='bf16').dtype], view(raw, dtype='bf16').shape[0]) == ('bf16', 4)
    np = pytest.importorskip('numpy')
    a = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    t = view(a.transpose(2, 0, 1))
    assert list(t.shape[:3]) == [4, 2, 3] and list(t.stride[:3]) == [1, 12, 4]
    with pytest.raises(ValueError, match='native byte order'):
        view(a.astype('>f8'))


def test_read_only_memory_is_read_and_not_written():
    np = pytest.importorskip('numpy')
    one, fixed = cb.Comm.self(), np.array([1.0, 2.0])
    fixed.flags.writeable = False
    got = np.zeros(2)
    one.all_gather(fixed, got)
    assert got.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match='recv is read-only'):
        one.all_gather(got, fixed)
    with pytest.raises(ValueError, match='send|recv is read-only'):
        one.all_reduce(fixed)
    with pytest.raises(ValueError, match='local is read-only'):
        cb.Partition(2).shard(got, 0, fixed)
    bridge = cb.Bridge(one, cb.Layout.src('dp=1'), cb.Layout.dst('dp=1'), (1, 1, 2), dtype='f64')
    bridge.forward(fixed.reshape(1, 1, 2), got.reshape(1, 1, 2))
    with pytest.raises(ValueError, match='y is read-only'):
        bridge.forward(got.reshape(1, 1, 2), fixed.reshape(1, 1, 2))
    with pytest.raises(ValueError, match='d_x is read-only'):
        bridge.backward(got.reshape(1, 1, 2), fixed.reshape(1, 1, 2))


def test_one_library_in_many_threads():
    messages = {}

    def fail(i):
        for _ in range(200):
            with pytest.raises(ValueError) as caught:
                cb.Grid('tp=2').coords(100 + i)
            messages.setdefault(i, set()).add(str(caught.value))

    threads = [threading.Thread(target=fail, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(said) == 1 and str(100 + i) in next(iter(said)) for i, said in messages.items())
