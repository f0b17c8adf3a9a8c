# SPDX-License-Identifier: Apache-2.0
"""Tables of ragged batches and the plain bridge that carries them, without torch."""
import array
import copy
import gc
import itertools
import pickle

import pytest

import colobridge as cb

WORKED = dict(rows=[3, 0, 5], src=[0, 1, 1], seq=[0, 0, 1], pos=[2, 9, 1], seq_len=[12, 8], seq_dp=[0, 0])



class Rows:
    """[rows, 1] of doubles."""

    def __init__(self, values):
        self.memory = array.array('d', values)

    @property
    def __array_interface__(self):
        return {'shape': (len(self.memory), 1), 'typestr': '<f8', 'data': (self.memory.buffer_info()[0], False),
                'strides': None, 'version': 3}


def worked_example(world, output, placement):
    """Row r of segment e is 10 e + r + 1."""
    bridge = cb.Bridge(world, cb.Layout.src('dp=2'), cb.Layout.dst('cp=2,dp=1'), (1,), dtype='f64', output=output,
                       kind='ragged' if placement == 'packed' else placement)
    batch = bridge.set_segments(cb.Segments(**WORKED))
    x = Rows([1, 2, 3] if world.rank == 0 else [21, 22, 23, 24, 25])
    y, d_x = Rows([-1] * batch.rows[1]), Rows([0] * batch.rows[0])
    assert batch.rows[0] == len(x.memory)
    batch.forward(x, y)
    batch.backward([y], [d_x])
    recv = batch.bytes('forward').recv
    runs = [row for first, count in batch.runs() for row in range(first, first + count)]
    back = list(d_x.memory)
    bridge.destroy()
    with pytest.raises(RuntimeError, match='this batch was destroyed'):
        batch.forward(x, y)
    return list(y.memory), runs, recv, back == [v * (2 if output == 'full' else 1) for v in x.memory]


def test_worked_example_arrives_row_by_row():
    def run(*options):
        return cb.run_threads(2, lambda world: worked_example(world, *options))
    e = -1
    assert run('sharded', 'packed') == [([1, 21], [0, 1], 8, True),
                                        ([2, 3, 22, 23, 24, 25], [0, 1, 2, 3, 4, 5], 16, True)]
    assert run('sharded', 'merged') == [
        ([e, e, 1, e, e, e, e, 21, e, e], [2, 7], 8, True),
        ([2, 3, e, e, e, e, 22, 23, 24, 25], [0, 1, 6, 7, 8, 9], 16, True)]
    full = [e, e, 1, 2, 3] + [e] * 8 + [21, 22, 23, 24, 25, e, e]
    for (y, runs, recv, good), comes in zip(run('full', 'merged'), (40, 24)):
        assert y == full and recv == comes and good
        assert runs == [2, 3, 4, 13, 14, 15, 16, 17]


def test_several_tensors_go_together_and_ranks_without_rows_bring_none():
    tables = dict(rows=[2], src=[1], seq=[0], pos=[1], seq_len=[4], seq_dp=[0])

    def one_rank(world):
        bridge = cb.Bridge(world, cb.Layout.src('dp=2'), cb.Layout.dst('dp=2'), (1,), dtype='f64', kind='ragged')
        batch = bridge.set_segments(cb.Segments(**tables))
        xs = [Rows([1, 2]), Rows([3, 4])] if world.rank else None
        ys = None if world.rank else [Rows([0, 0]), Rows([0, 0])]
        batch.forward(xs, ys)
        if ys:
            return [list(y.memory) for y in ys]
        with pytest.raises(ValueError, match='expected as many tensors in both'):
            batch.forward(xs, [None])

    assert cb.run_threads(2, one_rank) == [[[1, 2], [3, 4]], None]


def kinds(values):
    """The same integers as every kind of table."""
    yield list(values)
    yield tuple(values)
    yield array.array('i', values)
    yield memoryview(array.array('q', values))
    numpy = pytest.importorskip('numpy')
    for dtype in ('int64', 'int32', 'int16', 'uint8'):
        yield numpy.array(values, dtype=dtype)
    yield numpy.array([n for v in values for n in (v, 99)])[::2]  # strided
    torch = pytest.importorskip('torch')
    for dtype in (torch.int64, torch.int32, torch.uint8):
        yield torch.tensor(values, dtype=dtype)
    yield torch.tensor([n for v in values for n in (v, 99)])[::2]


def test_tables_of_every_kind_are_the_same_tables():
    want = cb.Segments(**WORKED)
    assert (want.rows, want.src, want.pos, want.row_pos) == ([3, 0, 5], [0, 1, 1], [2, 9, 1], None)
    assert len(want) == 3 and repr(want) == 'Segments(3 segments of 8 rows in 2 sequences of 20 positions)'
    for name, values in WORKED.items():
        for table in kinds(values):
            made = cb.Segments(**dict(WORKED, **{name: table}))
            assert made == want and hash(made) == hash(want), (name, type(table))
    assert copy.deepcopy(want) == want == pickle.loads(pickle.dumps(want))
    for name, values in WORKED.items():
        assert cb.Segments(**dict(WORKED, **{name: [v + 1 for v in values]})) != want
    empty = cb.Segments([], src=[], seq=[], pos=[], seq_len=[], seq_dp=[])
    assert len(empty) == 0 and empty.rows == []


def test_cumulative_lengths_and_nested_tensors_are_lengths():
    want, rest = cb.Segments(**WORKED), {k: v for k, v in WORKED.items() if k not in ('rows', 'seq_len')}
    torch = pytest.importorskip('torch')
    for cu_rows, cu in (([0, 3, 3, 8], [0, 12, 20]),
                        (torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.tensor([0, 12, 20]))):
        assert cb.Segments(cu_rows=cu_rows, cu_seqlens=cu, **rest) == want

    class Jagged:
        """What torch.nested.nested_tensor(layout=torch.jagged) shows."""
        is_nested = True

        def __init__(self, *edges):
            self.edges = torch.tensor(edges)

        def offsets(self):
            return self.edges

        def lengths(self):
            return None

    assert cb.Segments(Jagged(0, 3, 3, 8), seq_len=Jagged(0, 12, 20), **rest) == want
    parts = [torch.zeros(n, 2) for n in WORKED['rows']]
    assert cb.Segments(torch.nested.nested_tensor(parts), seq_len=[12, 8], **rest) == want
    if hasattr(torch, 'jagged'):
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
        assert cb.Segments(jagged, seq_len=[12, 8], **rest) == want


@pytest.mark.parametrize('change, words', [
    (dict(rows=[3, 0]), 'src has 3 entries, expected 2, one for each segment'),
    (dict(src=[0, 1]), 'src has 2 entries, expected 3'),
    (dict(seq_dp=[0]), 'seq_dp has 1 entries, expected 2, one for each sequence'),
    (dict(pos=None, row_pos=[1, 2]), 'row_pos has 2 entries, expected 8, one for each row'),
    (dict(row_pos=[1] * 8), 'both pos and row_pos are given'),
    (dict(pos=None), 'neither of pos and row_pos are given'),
    (dict(rows=None), 'neither of rows and cu_rows are given'),
    (dict(cu_seqlens=[0, 1]), 'both seq_len and cu_seqlens are given'),
    (dict(rows=None, cu_rows=[1, 4]), 'cu_rows begins with 1, expected 0'),
    (dict(rows=None, cu_rows=[0, 4, 3, 9]), r'cu_rows\[2\] is 3 after 4'),
    (dict(src=[0, 1.5, 1]), 'src is a list, expected integers'),
    (dict(src=[0, 2 ** 63, 1]), 'src is a list, expected integers of at most 64 bits'),
    (dict(src='012'), 'src is a str, expected integers'),
])
def test_tables_that_cannot_be_are_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        cb.Segments(**dict(WORKED, **change))


def test_tensors_of_other_kinds_are_refused_by_name():
    torch = pytest.importorskip('torch')
    for table in (torch.tensor([0., 1., 1.]), torch.tensor([[0, 1, 1]]), torch.tensor([False, True, True])):
        with pytest.raises(ValueError, match='src is a tensor of . axes of torch'):
            cb.Segments(**dict(WORKED, src=table))


@pytest.mark.parametrize('change, words', [
    (dict(rows=[3, 0, -5]), 'segment 2'), (dict(src=[0, 1, 2]), 'segment 2: src_dp is 2, expected 0..1'),
    (dict(seq=[0, 0, 2]), 'segment 2: seq is 2, expected 0..1'), (dict(pos=[2, 9, 4]), 'segment 2: row 4'),
    (dict(seq_len=[12, 6]), 'sequence 1 has 6 positions'), (dict(seq_dp=[0, 1]), 'sequence 1: seq_dp is 1'),
    (dict(seq=[0, 0, 0]), 'position 2')])
def test_values_that_do_not_fit_are_refused_with_segment_or_sequence(change, words):
    layouts = cb.Layout.src('dp=2'), cb.Layout.dst('cp=2')
    cb.Segments(**WORKED).check(*layouts)
    with pytest.raises(ValueError, match=words):
        cb.Segments(**dict(WORKED, **change)).check(*layouts)


def test_tables_are_immutable_and_copied():
    rows = [3, 0, 5]
    made = cb.Segments(**dict(WORKED, rows=rows))
    rows[0] = 1
    made.rows[0] = 2
    assert made.rows == [3, 0, 5]
    with pytest.raises(AttributeError):
        made.rows = rows


@pytest.mark.parametrize('scattered, many', list(itertools.product((False, True), (1, 300))))
def test_gathered_tables_are_those_of_all_ranks_in_order(scattered, many):
    """Rank r has r segments of 2 rows, @many times, in a sequence of its own; rank 1 brings positions of rows."""
    def one_rank(world):
        n = world.rank * many
        where = {'row_pos': [p for e in range(n) for p in (2 * e, 2 * e + 1)]} \
            if scattered and world.rank == 1 else {'pos': [2 * e for e in range(n)]}
        local = cb.Segments([2] * n, src=[world.rank] * n, seq=[0] * n, seq_len=[4 * many], seq_dp=[world.rank],
                            **where)
        return cb.Segments.gather(local if world.rank else None, world)

    made = cb.run_threads(3, one_rank)
    assert made[0] == made[1] == made[2]
    owners = [1] * many + [2] * 2 * many
    want = dict(rows=[2] * 3 * many, src=owners, seq=[r - 1 for r in owners], seq_len=[4 * many] * 2, seq_dp=[1, 2])
    first = [2 * e for n in (many, 2 * many) for e in range(n)]
    assert made[0] == cb.Segments(**want, **({'row_pos': [p + r for p in first for r in (0, 1)]} if scattered
                                             else {'pos': first}))


def test_segments_without_rows_need_no_positions_of_rows():
    tables = dict(rows=[0, 0], src=[0, 1], seq=[0, 0], row_pos=[], seq_len=[4], seq_dp=[0])
    none = cb.Segments(**tables)
    none.check(cb.Layout.src('dp=2'), cb.Layout.dst('cp=2'))
    assert none.row_pos == [] and none.pos is None
    made = cb.run_threads(2, lambda world: cb.Segments.gather(none, world))
    assert made[0] == made[1] == cb.Segments(**dict(tables, rows=[0] * 4, src=[0, 1] * 2, seq=[0, 0, 1, 1],
                                                    seq_len=[4, 4], seq_dp=[0, 0]))


def test_a_rank_that_gathers_nonsense_is_every_ranks_error():
    def one_rank(world):
        local = cb.Segments([1], src=[0], seq=[world.rank], pos=[0], seq_len=[4], seq_dp=[0])
        with pytest.raises(ValueError if world.rank else RuntimeError, match='local segment 0: seq is 1'):
            cb.Segments.gather(local, world)
        return len(cb.Segments.gather(None, world))  # the communicator lives on

    assert cb.run_threads(2, one_rank) == [0, 0]


def test_balance_levels_the_loads():
    cost = [9, 1, 7, 3, 3, 5]
    made = cb.balance(cost, 2)  # 9 to 0, 7 and 5 to 1, 3 and 3 to 0, 1 to 1: loads of 15 and 13
    assert made == [0, 1, 1, 0, 0, 1]
    # both are below 1.1 times the mean: nothing moves
    assert cb.balance(cost, 2, current=made, stick=0.1) == made
    assert cb.balance(cost, 2, lists=True) == [[i for i, r in enumerate(made) if r == k] for k in (0, 1)]
    assert cb.balance([], 2, lists=True) == [[], []]
    assert cb.balance([], 3) == cb.balance([], 3, current=[]) == []
    with pytest.raises(ValueError, match='cost'):
        cb.balance([1, -2], 2)
    with pytest.raises(ValueError, match='current has 1 entries, expected 2'):
        cb.balance([1, 2], 2, current=[0])


def test_batches_of_a_collected_cycle_end_before_their_bridge(monkeypatch):
    """The collector clears weak references first, and ends the older object, the bridge, before its batch."""
    gc.collect()  # what other tests left
    ended, ends = [], cb.Comm.ends

    def note(self, handle, end):
        ended.append(end)
        if end != 'colo_bridge_destroy' or 'colo_batch_destroy' in ended:  # else its batch would read freed memory
            ends(self, handle, end)

    monkeypatch.setattr(cb.Comm, 'ends', note)
    world = cb.Comm.self()
    gc.disable()  # or a collection between these lines makes the batch the older one, which is right without the library
    try:
        cycle = [cb.Bridge(world, cb.Layout.src('dp=1'), cb.Layout.dst('dp=1'), (3,), kind='ragged')]
        cycle.append(cycle[0].set_segments(cb.Segments(**dict(WORKED, src=[0, 0, 0]))))
        cycle.append(cycle)
        del cycle
        gc.collect()
    finally:
        gc.enable()
    assert ended[:2] == ['colo_batch_destroy', 'colo_bridge_destroy'], ended


@pytest.mark.parametrize('wrong, words', [
    (lambda bridge, batch, x, y: bridge.set_segments(WORKED), 'segments is a dict, expected Segments'),
    (lambda bridge, batch, x, y: batch.forward([x], [y, y]), 'x and y are a list of 1 and a list of 2; expected as many tensors in both'),
    (lambda bridge, batch, x, y: batch.forward(3, y), 'int'),
    (lambda bridge, batch, x, y: batch.backward(y, 3), 'int'),
    (lambda bridge, batch, x, y: bridge.forward(3, y), 'int'),
    (lambda bridge, batch, x, y: cb.Bridge(bridge.comm, bridge._src, bridge._dst, (2, 2, 1), dtype='f7'), 'f7'),
])
def test_what_python_refuses_on_one_rank_ends_the_wait_of_the_others(wrong, words):
    def one_rank(world):
        world.set_timeout(10)
        bridge = cb.Bridge(world, cb.Layout.src('dp=2'), cb.Layout.dst('cp=2,dp=1'), (1,), dtype='f64', kind='ragged')
        batch = bridge.set_segments(cb.Segments(**WORKED))
        x, y = Rows([0] * batch.rows[0]), Rows([-1] * batch.rows[1])
        with pytest.raises(ValueError if world.rank else RuntimeError, match=words):
            wrong(bridge, batch, x, y) if world.rank else batch.forward(x, y)
        return set(y.memory) == {-1}

    assert cb.run_threads(2, one_rank) == [True, True]


def test_uniform_and_ragged_calls_are_not_mixed_up():
    def one_rank(world):
        layouts = cb.Layout.src('dp=1'), cb.Layout.dst('dp=1')
        uniform = cb.Bridge(world, *layouts, (1, 2, 3))
        with pytest.raises(ValueError, match='was created for uniform batches'):
            uniform.set_segments(cb.Segments(**dict(WORKED, src=[0, 0, 0])))
        ragged = cb.Bridge(world, *layouts, (3,), kind='ragged', max_rows=7)
        with pytest.raises(ValueError, match='segments is a dict, expected Segments'):
            ragged.set_segments(WORKED)
        with pytest.raises(ValueError, match='expected at most max_rows=7'):
            ragged.set_segments(cb.Segments(**dict(WORKED, src=[0, 0, 0])))
        with pytest.raises(ValueError, match="kind is 'scattered', expected 'uniform' or 'ragged' or 'merged' or 'packed'"):
            cb.Bridge(world, *layouts, (3,), kind='scattered')

    cb.run_threads(1, one_rank)
