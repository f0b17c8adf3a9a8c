# SPDX-License-Identifier: Apache-2.0
"""Ragged batches as an autograd function, against an oracle on all rows (ragged_case.py): processes over gloo,
ranks that are threads, checkpointing, autocast, nested tensors, bad input."""
import gc
import itertools
import os
import sys
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
import torch.overrides  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge.torch import arena  # noqa: E402
from host_pool import reached  # noqa: E402
from ragged_case import TEXT, Case, carried  # noqa: E402
from world import meet  # noqa: E402

SEED = int(os.environ.get('T_SEED', '1'))


def bridge_of(case, group, **options):
    return ct.RaggedBridge(*case.layouts(), group=group, output=case.output, grad=case.grad, **options)


def carries(rank, seeds, size, group=None):
    """Each case, packed and merged, two tensors and one: bits and gradients are the oracle's."""
    for seed in seeds:
        case = Case(seed, size)
        try:
            carry = bridge_of(case, group or dist.group.WORLD)
            segments = cb.Segments(**case.tables())
            for merged in (False, True):
                carried(rank, case, carry, segments, merged)
            carry.destroy()
        except Exception as why:
            why.args = ('T_SEED=%d: %s' % (seed, why),)
            raise


def test_random_batches_on_processes_are_those_of_the_oracle(world):
    world.run(carries, range(SEED, SEED + 25), 4)


def test_random_batches_on_two_processes_are_those_of_the_oracle(pair):
    pair.run(carries, range(SEED + 1000, SEED + 1015), 2)


@pytest.mark.parametrize('size', [2, 4])
def test_random_batches_on_threads_are_those_of_the_oracle(size):
    def one_rank(world):
        world.set_check(1 + seed % 2)  # 2: replicas and DISJOINT gradients are verified, too
        carries(world.rank, [seed], size, group=world)
    for seed in range(SEED + 2000, SEED + 2040):
        cb.run_threads(size, one_rank)


WORKED = dict(rows=[3, 0, 5], src=[0, 1, 1], seq=[0, 0, 1], pos=[2, 9, 1], seq_len=[12, 8], seq_dp=[0, 0])
MINE = [[1., 2., 3.], [21., 22., 23., 24., 25.]]  # row r of segment e: 10 e + r + 1


def worked(**change):
    return cb.Segments(**dict(WORKED, **change))


def column(values, **kind):
    return torch.tensor(values, **kind).reshape(-1, 1)


def sharded(group=None, **options):
    return ct.RaggedBridge('dp=2', 'cp=2,dp=1', group=group or dist.group.WORLD, output='sharded', **options)


def worked_example(rank):
    carry = sharded()
    x = column(MINE[rank]).requires_grad_()
    assert carry.rows(worked()) == (len(x), [2, 6][rank])
    y = carry(x, worked())
    assert y.flatten().tolist() == [[1, 21], [2, 3, 22, 23, 24, 25]][rank]
    text = torch.full((2, 5, 1), -1.)  # positions may be in several axes
    z = carry(x, worked(), into=text)
    e = -1
    assert z is text and z.flatten().tolist() == [[e, e, 1, e, e, e, e, 21, e, e],
                                                  [2, 3, e, e, e, e, 22, 23, 24, 25]][rank]
    (y.sum() + (10 * z).sum()).backward()
    assert x.grad.flatten().tolist() == [11.] * len(x)


def test_worked_example_arrives_row_by_row(pair):
    pair.run(worked_example)


def outstanding(rank, steps):
    """More tables than are kept; backward in another order than forward; tables that change afterwards."""
    carry, made = ct.RaggedBridge('dp=2', 'cp=2,dp=1', group=dist.group.WORLD), []
    for k in range(steps):
        tables = {name: torch.tensor(values) for name, values in WORKED.items()}
        at = k % 4, (k // 4) % 4
        tables['pos'][0], tables['pos'][2] = at
        both = [column(values, dtype=torch.float64) + 100 * k for values in MINE]
        want = torch.zeros(20, 1, dtype=torch.float64)
        want[at[0]:at[0] + 3], want[12 + at[1]:12 + at[1] + 5] = both
        x = both[rank].requires_grad_()
        y = carry(x, cb.Segments(**tables), into=torch.zeros_like(want))
        assert torch.equal(y, want)
        for table in tables.values():
            table.fill_(-5)
        del tables
        made.append((x, y))
    for k in range(steps):
        x, y = made[k * 5 % steps]
        y.backward(y.detach())
        assert torch.equal(x.grad, 2 * x.detach()), (k, x.grad)


def test_forwards_of_many_tables_may_be_outstanding(pair):
    pair.run(outstanding, 16)


def repeated(rank):
    """Calls like the one before use what it made; the same tables made anew, strides and several tensors do not."""
    carry, tables, kept = sharded(), worked(), []
    for k in range(1, 4):
        x = (column(MINE[rank]) * k).requires_grad_()
        wide = torch.cat([x.detach(), -x.detach()], 1)
        want = [[v * k for v in row] for row in ([1, 21], [2, 3, 22, 23, 24, 25])][rank]
        for given, segments in ((x, worked()), (wide[:, :1], tables), (x, tables), (x * 1, tables), (x, tables)):
            y = carry(given, segments)
            assert y.flatten().tolist() == want, (k, y)
            kept.append((y, want))
        y.backward(torch.ones(len(want), 2)[:, :1] * k)  # strided
        assert x.grad.flatten().tolist() == [float(k)] * len(x)
        for y in carry((x, x.detach().int()), tables), carry((x.detach().int(), x), tables)[::-1]:
            assert y[0].flatten().tolist() == y[1].flatten().tolist() == want and y[0].requires_grad
            assert [t.dtype for t in y] == [torch.float32, torch.int32]
    assert all(y.flatten().tolist() == want for y, want in kept)


def test_calls_like_the_one_before_carry_their_own_tensors(pair):
    pair.run(repeated)


def captures(rank):
    """What a capture refuses, without a GPU: tables that no call has brought, and those of too long ago."""
    was, now = arena.capturing, []
    arena.capturing = lambda device: lambda: bool(now)
    try:
        carry, x = sharded(), column(MINE[rank])
        tables = [worked(seq_len=[12, 8] + [0] * k, seq_dp=[0] * (2 + k)) for k in range(9)]
        for bad, before in ((0, []), (1, [0]), (0, range(9))):
            for k in before:
                carry(x, tables[k])
            now.append(1)
            for k in list(before)[-8:]:
                assert carry(x, tables[k]).flatten().tolist() == [[1, 21], [2, 3, 22, 23, 24, 25]][rank]
            with pytest.raises(RuntimeError, match=r'a capture has new tables: found Segments\(3 segments of 8 rows'):
                carry(x, tables[bad])
            now.clear()
        carry.rows(tables[0])  # plans them, but brings them to no call
        now.append(1)
        with pytest.raises(RuntimeError, match='run one step with them before'):
            carry(x, tables[0])
    finally:
        arena.capturing = was


def test_a_capture_has_tables_of_an_earlier_call(pair):
    pair.run(captures)


def graphs_keep(rank):
    """What a captured backward reads is there when the batch has long been forgotten, and no error ends that."""
    was, now, kept = arena.capturing, [], []
    arena.capturing = lambda device: lambda: bool(now)
    try:
        carry, x, text = sharded(), column(MINE[rank]).requires_grad_(), torch.zeros(10, 1, requires_grad=True)
        for k in range(10):
            y = carry(x, worked(seq_len=[12, 8] + [0] * k, seq_dp=[0] * (2 + k)), into=text * 1)
            now.extend([1] * (k == 0))
            y.sum().backward()
            now.clear()
            kept.append(weakref.ref(carry._engine._ragged[x.device].calls[-1].held.written(x.device)))
        with pytest.raises(ValueError, match='segment 2: seq is 7'):
            carry(x, worked(seq=[0, 0, 7]))
        carry._engine._ragged[x.device].forget()
        del y
        gc.collect()
        assert [index() is not None for index in kept] == [True] + [False] * 9
    finally:
        arena.capturing = was


def test_what_a_graph_reads_stays(pair):
    pair.run(graphs_keep)


def asked_alone(rank):
    """Rank 0 alone asks for the rows of tables that no call has brought, and of the oldest tables kept."""
    carry = ct.RaggedBridge('dp=2', 'cp=2,dp=1', group=dist.group.WORLD)
    tables = [cb.Segments(**dict(WORKED, pos=[k % 4, 9, k // 4])) for k in range(10)]
    x = column(MINE[rank])

    def run(k):
        carry(x, tables[k])

    for k in range(8):
        run(k)
    for k in (0, 9, 0) if rank == 0 else ():
        assert carry.rows(tables[k]) == (len(x), 8)
    for k in (8, 0, 1, 9, 2):
        run(k)


def test_rows_asked_by_one_rank_leave_the_batches_alike(pair):
    pair.run(asked_alone)


def test_a_zigzag_source_is_refused_when_the_bridge_is_made():
    def one_rank(world):
        with pytest.raises(ValueError, match="source layout splits rows ZIGZAG over 'cp', expected BLOCK"):
            ct.RaggedBridge('cp=2', 'dp=2', group=world)
        ct.RaggedBridge('cp=1,dp=2', 'cp=2', group=world)

    cb.run_threads(2, one_rank)


def nothing(rank):
    """No segment; segments without rows; rows on one rank only. Gradients flow on every rank."""
    carry = ct.RaggedBridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD)
    x = torch.ones(0, 3, requires_grad=True)
    for tables in (dict(rows=[], src=[], seq=[], pos=[], seq_len=[], seq_dp=[]),
                   dict(rows=[0, 0], src=[1, 2], seq=[0, 0], pos=[1, 3], seq_len=[4], seq_dp=[1])):
        for into in (None, torch.full((sum(tables['seq_len']) if rank // 2 else 0, 3), TEXT) * 1):
            y = carry(x, cb.Segments(**tables), into=into)
            assert y.requires_grad and torch.equal(y, torch.full_like(y, TEXT))
            y.sum().backward()
    before = carry.comm(x.device).stats()
    one = cb.Segments([2], src=[3], seq=[0], pos=[1], seq_len=[4], seq_dp=[0])
    for k in range(3):
        mine = torch.full((2 if rank == 3 else 0, 3), 5., requires_grad=rank == 3)  # a leaf on one rank only
        y = carry(mine if rank != 2 else None, one, like=torch.zeros(1, 3))
        assert y.requires_grad and torch.equal(y, torch.full((0 if rank // 2 else 2, 3), 5.))
        y.sum().backward()
        assert rank != 3 or torch.equal(mine.grad, torch.full((2, 3), 2.))
    ops = {op: n['ops'] - before['bridge'].get(op, {}).get('ops', 0)
           for op, n in carry.comm(x.device).stats()['bridge'].items()}
    assert set(ops) <= {'exchange'} or all(n == 0 for op, n in ops.items() if op != 'exchange'), ops


def test_ranks_without_rows_take_part_and_cost_no_collective(world):
    world.run(nothing)


class Model(torch.nn.Module):
    """An encoder, the bridge into the embeddings of the text, a decoder."""

    def __init__(self, carry, segments, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.decoder = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.words = torch.nn.Embedding(5, 4)
        self.to(dtype)
        self.carry, self.segments = carry, segments

    def forward(self, pixels, text):
        images = torch.tanh(self.encoder(pixels))
        embedded = self.words(text)
        return self.decoder(self.carry(images.to(embedded.dtype), self.segments, into=embedded)).tanh()


def drawn(rank, dtype=torch.float64):
    rng = torch.Generator().manual_seed(rank)
    return torch.randn(len(MINE[rank]), 3, generator=rng, dtype=dtype), torch.arange(10) % 5


def checkpointed(rank, how):
    model = Model(sharded(), worked())
    pixels, text = drawn(rank)
    pixels.requires_grad_()  # which the reentrant kind wants of an input
    if how == 'compiled':
        ways = [lambda: model(pixels, text), lambda: torch.compile(model, backend='eager')(pixels, text)]
    else:
        ways = [lambda: model(pixels, text), lambda: checkpoint(model, pixels, text, use_reentrant=False),
                lambda: checkpoint(model, pixels, text, use_reentrant=True)]
    grads = []
    for way in ways:
        model.zero_grad(), setattr(pixels, 'grad', None)
        way().square().sum().backward()
        grads.append([p.grad.clone() for p in [pixels, *model.parameters()]])
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other))
    return [g.sum().item() for g in grads[0]]


def test_checkpointing_of_both_kinds_runs_forward_again(pair):
    pair.run(checkpointed, 'checkpointed')


def test_compiled_code_breaks_the_graph_there(pair):
    if not hasattr(torch, 'compile') or not hasattr(torch, 'compiler'):
        pytest.skip('this torch has no torch.compile')
    assert pair.run(checkpointed, 'compiled') == pair.run(checkpointed, 'checkpointed')


def autocast(rank):
    model = Model(sharded(), worked(), torch.float32)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        x = model.encoder(drawn(rank, torch.float32)[0])
        assert x.dtype == torch.bfloat16
        assert model.carry(x, worked()).dtype == torch.bfloat16  # nothing is cast
        y = model(*drawn(rank, torch.float32))
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_autocast_casts_nothing(pair):
    pair.run(autocast)


def nested(rank):
    carry = sharded()
    parts = [[MINE[0]], [[], MINE[1]]][rank]
    kinds = [{}] + ([{'layout': torch.jagged}] if hasattr(torch, 'jagged') else [])
    for kind in kinds:
        leaf = column(MINE[rank]).requires_grad_()
        lengths = [len(p) for p in parts]
        x = torch.nested.as_nested_tensor(list(leaf.split(lengths)), **kind)
        y = carry(x, worked())
        assert torch.equal(y, carry(leaf.detach(), worked()))
        y.backward(y.detach())
        if leaf.grad is not None:  # torch 1.13 does not differentiate the making of one
            assert torch.equal(leaf.grad, leaf.detach())


def test_nested_tensors_are_their_rows(pair):
    pair.run(nested)


def dishonest(world):
    """A DISJOINT gradient that is not zero in rows of the other context rank."""
    world.set_check(2)
    carry = ct.RaggedBridge('dp=2', 'cp=2,dp=1', group=world, grad='disjoint')
    y = carry(column(MINE[world.rank]).requires_grad_(), worked())
    y.sum().backward()


def test_a_disjoint_gradient_that_is_not_is_found():
    with pytest.raises(ValueError, match='was declared DISJOINT, but row . is not zero'):
        cb.run_threads(2, dishonest)


def negative(world):
    carry = ct.RaggedBridge('dp=2', 'cp=2,dp=1', group=world)
    x = column(MINE[world.rank])
    assert torch.equal(carry(x, worked()), carry(x.clone(), worked()))
    carry(torch._neg_view(x), worked())


def test_memory_of_other_signs_is_never_carried():
    with pytest.raises(ValueError, match=r'x\[0\]: its memory holds other signs'):
        cb.run_threads(2, negative)


def buffers_that_are_views(rank):
    """x and text have the gradients that they would have, had the buffers no base: what position p of rank r gets is 100 r + p + 1."""
    carry = sharded()
    rows = [[2, 7], [0, 1, 6, 7, 8, 9]][rank]
    for count, learnt, halves, inplace in itertools.product((1, 2), (True, False), (True, False), (None, True)):
        x = column(MINE[rank]).requires_grad_()
        words = torch.full((count, 10, 1), -1.).requires_grad_(learnt)
        intos, heard = [(words * 1)[i].view(2, 5, 1) for i in range(count)], []
        for into in intos if learnt else ():
            into.register_hook(heard.append)
        xs = tuple(x * (i + 1) for i in range(count))
        out = carry.start(xs, worked(), into=intos, inplace=inplace).finish() if halves else carry(
            xs, worked(), into=intos, inplace=inplace)
        for y, into in zip(out, intos):  # one with history is copied, unless the caller wants it otherwise
            assert (y is into) == (bool(inplace) or not learnt) and torch.equal(into, y) == (y is into)
        up = (100. * rank + 1 + torch.arange(10.)).view(2, 5, 1)
        sum((y * up).sum() for y in out).backward()
        assert len(heard) == (count if learnt and not inplace else 0)  # PyTorch drops them
        scale = sum(range(count + 1))
        assert x.grad.flatten().tolist() == [scale * d for d in ([3, 101, 102], [8, 107, 108, 109, 110])[rank]]
        if learnt:
            left = up.flatten().index_fill(0, torch.tensor(rows), 0)
            assert torch.equal(words.grad.view(count, 10), left.expand(count, 10))


def test_buffers_may_be_views_of_what_learns(pair):
    pair.run(buffers_that_are_views)


def view_on_one_rank(rank):
    """Ranks need not have views alike. One of a leaf is copied."""
    carry, x = sharded(), column(MINE[rank]).requires_grad_()
    words = torch.full((10, 1), -1.).requires_grad_()
    y = carry(x, worked(), into=words[:] if rank else torch.full((10, 1), -1.))
    assert y.flatten().tolist() == [[-1, -1, 1, -1, -1, -1, -1, 21, -1, -1], [2, 3, -1, -1, -1, -1, 22, 23, 24, 25]][rank]
    y.sum().backward()
    assert x.grad.flatten().tolist() == [1.] * len(x)
    assert words.grad is None if rank == 0 else words.grad.flatten().tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert torch.equal(words, torch.full((10, 1), -1.))


def test_a_view_of_one_rank_is_written_elsewhere(pair):
    pair.run(view_on_one_rank)


def order(rank, output):
    """Tables of 2 sequences of 12 positions: a buffer of 2 and 12, or 12 and 2. Other shapes are as many positions."""
    parts = 2 if output == 'sharded' else 1
    carry = ct.RaggedBridge('dp=2', 'cp=2,dp=1', group=dist.group.WORLD, output=output)
    tables, x = worked(seq_len=[12, 12]), column(MINE[rank])
    each = 12 // parts
    y = carry(x, tables, into=torch.zeros(2, each, 1))
    for good in (2 * each,), (1, 2 * each), (2 * each, 1), (4, each // 2):
        assert torch.equal(carry(x, tables, into=torch.zeros(*good, 1)).flatten(), y.flatten())
    meet()
    with pytest.raises((ValueError, RuntimeError)) as why:
        carry(x, tables, into=torch.zeros(*((each, 2, 1) if rank else (2, each, 1))))
    assert 'into is [%d, 2, 1], and the tables have 2 sequences of 12 positions; expected [2, %d, 1]' % (each, each) in str(why.value)
    assert torch.equal(carry(x, tables, into=torch.zeros(2, each, 1)), y)


@pytest.mark.parametrize('output', ['full', 'sharded'])
def test_a_buffer_with_positions_first_is_refused(pair, output):
    pair.run(order, output)


def frozen(rank):
    carry = sharded(frozen=True)
    x = column(MINE[rank]).requires_grad_()
    assert not carry(x, worked()).requires_grad
    text = torch.ones(10, 1, requires_grad=True)
    carry(x, worked(), into=text * 1).sum().backward()  # no rank waits for another
    assert x.grad is None
    assert text.grad.flatten().tolist() == [[1, 1, 0, 1, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]][rank]


def test_a_frozen_encoder_leaves_the_text_its_gradient(pair):
    pair.run(frozen)


class Meta(torch.overrides.TorchFunctionMode):
    """A default device, for versions that have none, too."""

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        here = {'device': 'meta'} if fn in (torch.arange, torch.empty, torch.tensor, torch.zeros) else {}
        return fn(*args, **{**here, **(kwargs or {})})


def by_default_elsewhere(rank):
    x, text = column(MINE[rank]).requires_grad_(), torch.ones(10, 1, requires_grad=True)
    into = text * 1
    with reached(), Meta():
        sharded()(x, worked(), into=into).sum().backward()
    assert x.grad.flatten().tolist() == [1.] * len(x)
    assert text.grad.flatten().tolist() == [[1, 1, 0, 1, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]][rank]


def test_a_default_device_is_not_that_of_tables(pair):
    pair.run(by_default_elsewhere)


def gathers(rank):
    """Each rank knows its own samples, the ranks of a group make the tables from them."""
    local = cb.Segments(WORKED['rows'][:1] if rank == 0 else WORKED['rows'][2:], src=[rank], seq=[0],
                        pos=[[2], [1]][rank], seq_len=[[12], [8]][rank], seq_dp=[0])
    made = cb.Segments.gather(local, dist.group.WORLD)
    assert (made.rows, made.seq, made.seq_len) == ([3, 5], [0, 1], [12, 8])
    y = sharded()(column(MINE[rank]), made)
    assert y.flatten().tolist() == [[1, 21], [2, 3, 22, 23, 24, 25]][rank]


def test_tables_are_gathered_over_a_process_group(pair):
    pair.run(gathers)


def benched(rank, broken):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'bench'))
    import ragged_table as table
    o = table.options('--images 8 --least 2 --most 9 --packed 2 --hidden 4 -n 1 -w 0 --batch 1'.split())
    cpu, rows = torch.device('cpu'), [2, 9, 5, 3, 7, 2, 4, 6]
    if broken:
        table.Library.forward = lambda self, x, text: text
    for layout in table.LAYOUTS[4][1:]:
        _, took, wrong, _ = table.one_layout(o, layout, rows, cpu, None)
        assert (wrong.pop('library') > 0) == broken and not any(wrong.values()), (layout, wrong)
        assert all(us > 0 for us in took.values()) and len(took) == 8
    if not broken:
        took, wrong = table.uniform(o, layout, cpu, None)
        assert wrong == 0 and set(took) == {'ragged', 'uniform, auto'}
        assert table.balanced()[1] <= 1.05


@pytest.mark.parametrize('broken', (False, True))
def test_all_ways_of_the_bench_give_the_same_bits(world, broken):
    world.run(benched, broken)


# ---- bad input ----

def refused(rank, name):
    """What is wrong on rank 1 is an error on both, nothing is written, and the next call works."""
    wrong, words = BAD[name]
    carry, tables = sharded(), worked()
    x, text = column(MINE[rank]), torch.full((10, 1), -1.)
    call = dict(x=x, segments=tables, into=text)
    for first in (True, False):  # and after calls that were right
        if rank == 1:
            call.update(wrong(x, text))
        meet()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            carry(call.pop('x'), call.pop('segments'), **call)
        assert words in str(caught.value), caught.value
        assert rank != 1 or isinstance(caught.value, ValueError), caught.value
        assert torch.equal(text, torch.full_like(text, -1.))
        call = dict(x=x, segments=tables, into=text)
        meet()
        assert carry(x.clone(), tables, into=text.clone()).flatten().tolist() == [
            [-1, -1, 1, -1, -1, -1, -1, 21, -1, -1], [2, 3, -1, -1, -1, -1, 22, 23, 24, 25]][rank]


def leaf(t):
    return t.clone().requires_grad_()


def shared(x, t):
    whole = torch.zeros(13, 1)
    return {'x': whole[:5], 'into': whole[3:]}


BAD = {
    'a leaf that requires grad': (lambda x, t: {'into': leaf(t)}, 'into is a leaf that requires grad'),
    'a view of one': (lambda x, t: {'into': leaf(t)[:], 'inplace': True}, 'into is a view of a leaf that requires grad'),
    'another dtype': (lambda x, t: {'into': t.double()}, 'into is of dtype torch.float64, expected torch.float32'),
    'another device': (lambda x, t: {'into': t.to('meta')}, 'into is on meta, expected cpu'),
    'other features': (lambda x, t: {'into': t.expand(10, 2).clone()}, 'into is of features: 2, expected 1'),
    'too short': (lambda x, t: {'into': t[:9].clone()}, 'rank 1: y[0] has 9 rows, expected 10'),
    'too long': (lambda x, t: {'into': torch.cat((t, t))}, 'rank 1: y[0] has 20 rows, expected 10'),
    'positions that are apart': (lambda x, t: {'into': torch.full((3, 10, 1), -1.)[:2].transpose(0, 1)},
                                 'expected positions that lie one behind the other'),
    'rows on top of each other': (lambda x, t: {'into': t[:1].expand(10, 1)}, 'by which elements share an address'),
    'x with a row too few': (lambda x, t: {'x': x[1:]}, 'rank 1: x[0] has 4 rows, expected 5'),
    'x with three axes': (lambda x, t: {'x': x[None]}, 'x is [1, 5, 1], expected [rows, features]'),
    'x that is none': (lambda x, t: {'x': [1, 2]}, 'expected'),
    'two tensors into one buffer': (lambda x, t: {'x': (x, x)}, '2 tensors and 1 buffers'),
    'the same memory': (shared, 'rank 1: x[0] and y[0] overlap in memory'),
    'tables that are none': (lambda x, t: {'segments': WORKED}, 'segments is a dict, expected colobridge.Segments'),
    'tables that do not fit': (lambda x, t: {'segments': worked(src=[0, 1, 2])}, 'segment 2: src_dp is 2'),
}


@pytest.mark.parametrize('name', list(BAD))
def test_bad_input_of_one_rank_is_every_ranks_error(pair, name):
    pair.run(refused, name)


def different(rank, change, table):
    carry, x = sharded(), column(MINE[rank])
    theirs = worked(**(change if rank else {}))
    for merged in (False, True):
        text = torch.full((sum(theirs.seq_len) // 2, 1), -1.)
        with pytest.raises(cb.MismatchError) as caught:
            carry(x, theirs, into=text if merged else None)
        assert '%s: rank 1 of' % table in str(caught.value), caught.value
        assert torch.equal(text, torch.full_like(text, -1.))
        y = carry(x, worked(), into=torch.zeros(10, 1) if merged else None)  # the communicator lives on
        assert y.sum() == [22, 99][rank]


@pytest.mark.parametrize('change, table', [(dict(pos=[2, 9, 2]), 'pos'), (dict(seq_len=[16, 8]), 'seq_len'),
                                           (dict(src=[0, 0, 1]), 'src_dp'), (dict(seq=[0, 1, 1]), 'seq')])
def test_tables_that_differ_on_one_rank_are_named_on_all(pair, change, table):
    pair.run(different, change, table)


def same_tables_refused(rank):
    carry = sharded()
    for _ in range(2):
        with pytest.raises(ValueError, match='segment 2: seq is 7, expected 0..1'):
            carry(column(MINE[rank]), worked(seq=[0, 0, 7]))
        assert len(carry(column(MINE[rank]), worked())) == [2, 6][rank]


def test_tables_that_no_rank_takes_are_the_same_error_on_all(pair):
    pair.run(same_tables_refused)


def destroyed(rank):
    carry = sharded()
    x = column(MINE[rank]).requires_grad_()
    y = carry(x, worked())
    carry.destroy()
    with pytest.raises(RuntimeError, match='this batch was destroyed, or its bridge or communicator'):
        y.sum().backward()
    meet()
    carry(x, worked()).sum().backward()  # made anew
    assert x.grad.flatten().tolist() == [1.] * len(x)


def test_a_bridge_destroyed_before_backward_is_told(pair):
    pair.run(destroyed)


def impossible(rank):
    with pytest.raises(ValueError, match='segments is a NoneType, expected colobridge.Segments'):
        sharded()(column(MINE[rank]))
    with pytest.raises(ValueError, match="transport is 'peer' and x is on cpu"):
        sharded(transport='peer')(column(MINE[rank]), worked())
    with pytest.raises(ValueError, match='ragged with buffers 1; expected None or 0'):
        sharded(buffers=1)


def test_what_a_ragged_bridge_cannot_be_is_refused(pair):
    pair.run(impossible)
