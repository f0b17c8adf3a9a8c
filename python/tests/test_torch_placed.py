# SPDX-License-Identifier: Apache-2.0
"""Rows of ragged batches that come packed and are placed by PyTorch: no buffer for some tensors, rows that are added,
buffers that are not written; against the oracle on all rows (ragged_case.py). Bridges that go before backward."""
import gc
import itertools
import os
import weakref

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
from ragged_case import Case  # noqa: E402
from test_torch_ragged import MINE, bridge_of, column, sharded, worked  # noqa: E402

SEED = int(os.environ.get('T_SEED', '1'))


def added(case, rank, G, text):
    """text + rows, each at its position, as an expression of both."""
    found = case.arrivals(rank)
    index, rows = (torch.tensor([a[k] for a in found], dtype=torch.int64) for k in (0, 1))
    return text.index_add(0, index, G.index_select(0, rows))


def places(rank, seeds):
    """Two tensors of one routing, the second packed: values, the gradient of all rows, and that of the text."""
    for seed in seeds:
        case = Case(seed, 4)
        carry, segments, mine = bridge_of(case, dist.group.WORLD), cb.Segments(**case.tables()), case.source(rank)
        G, deep = case.values(4), case.values(3, 1)
        words = torch.randint(-9, 9, (case.axis(rank), 4), generator=torch.Generator().manual_seed(rank)).double()
        for add, inplace in ((False, True), (False, False), (True, True), (True, False)):
            x, x_deep = (t.index_select(0, mine).requires_grad_() for t in (G, deep))
            text = words.clone().requires_grad_()
            into = text * 1
            y, packed = carry((x, x_deep), segments, into=(into, None), add=add, inplace=inplace)
            oracle = added if add else lambda case, *a: case.y(*a)
            whole = words.clone().requires_grad_()
            want, want_deep = oracle(case, rank, G, whole), case.y(rank, deep)
            assert torch.equal(y, want) and torch.equal(packed, want_deep), (seed, add, inplace)
            assert (y is into) == inplace and (inplace or torch.equal(into, text))
            d_y, d_packed = case.d_y(rank, want.detach(), True), case.d_y(rank, want_deep, False)
            torch.autograd.backward((y, packed), (d_y, d_packed))
            assert torch.equal(x.grad, case.d_G(True, 4).index_select(0, mine)), (seed, add, inplace)
            assert torch.equal(x_deep.grad, case.d_G(False, 3).index_select(0, mine)), (seed, add, inplace)
            want.backward(d_y)
            assert torch.equal(text.grad, whole.grad), (seed, add, inplace)
            index = carry.index(segments)
            assert index.tolist() == [at for at, _ in case.arrivals(rank)]
            assert torch.equal(y.detach()[index] - (words[index] if add else 0), case.y(rank, G))
        carry.destroy()


def test_rows_are_placed_as_the_oracle_places_them(world):
    world.run(places, range(SEED, SEED + 25))


def counts(rank):
    """Tensors with and without a buffer move in one exchange, and the next call needs no other."""
    carry, x = sharded(), column([[1., 2., 3.], [21., 22., 23., 24., 25.]][rank])
    for _ in range(2):
        before = carry.comm(x.device).stats()
        carry((x, x), worked(), into=(torch.zeros(10, 1), None))
    after = carry.comm(x.device).stats()
    assert {op: n['ops'] - before['bridge'][op]['ops'] for op, n in after['bridge'].items()} == {'exchange': 1}


def test_tensors_with_and_without_a_buffer_move_together(pair):
    pair.run(counts)


@pytest.mark.parametrize('change, words', [
    (dict(into=torch.zeros(9, 1)), 'into is [9, 1], of 9 positions, expected 10, as the tables have for this rank'),
    (dict(into=torch.zeros(10, 1).requires_grad_(), inplace=True), 'into is a leaf that requires grad'),
    (dict(into=torch.zeros(10, 2)), 'into is of features: 2, expected 1'),
    (dict(into=None), 'add=True is given without into')])
def test_a_wrong_buffer_of_one_rank_is_every_ranks_error(pair, change, words):
    pair.run(refused, change, words)


def refused(rank, change, words):
    carry = sharded()
    x, good = column([[1., 2., 3.], [21., 22., 23., 24., 25.]][rank]), dict(into=torch.zeros(10, 1), add=True)
    with pytest.raises((ValueError, RuntimeError)) as why:
        for _ in range(2):  # a rank that has what it needs of the first hears of it in the second
            carry(x, worked(), **dict(good, **(change if rank else {})))
    assert words in str(why.value)
    assert carry(x, worked(), into=torch.zeros(10, 1), add=True).sum() == [22, 99][rank]


def dropped(rank):
    """Before backward, of each kind of call: what it needs is there until then, and gone behind it, without a collection."""
    left = [[1, 1, 0, 1, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]][rank]
    ways = [({}, True)] + [(options, False) for options in (None, {}, dict(add=True), dict(inplace=False))]
    gc.collect(), gc.disable()
    for ticket, (options, is_frozen) in itertools.product((False, True), ways):
        carry = sharded(frozen=is_frozen)
        x, text = column(MINE[rank]).requires_grad_(), torch.ones(10, 1, requires_grad=True)
        given = {} if options is None else dict(options, into=text * 1)
        y = carry.start(x, worked(), **given).finish() if ticket else carry(x, worked(), **given)
        core = weakref.ref(carry._engine._ragged[x.device]._bridges[options == {}])
        del carry, given
        assert core() is not None
        y.sum().backward()
        del y
        assert core() is None, (options, is_frozen, ticket)
        assert x.grad is None if is_frozen else x.grad.flatten().tolist() == [1.] * len(x)
        assert options is None or text.grad.flatten().tolist() == ([1] * 10 if 'add' in options else left)
    gc.enable()


def test_a_dropped_bridge_is_gone_behind_its_last_backward(pair):
    pair.run(dropped)


def evaluated(rank):
    """A first call in inference mode leaves what later ones with the same tables need of autograd; so does an index that its
    reader writes to."""
    carry, x, want = sharded(), column(MINE[rank]), [22, 99][rank]
    with torch.inference_mode():
        assert carry(x, worked(), into=torch.zeros(10, 1), add=True).sum() == want
        index = carry.index(worked())
    for again in range(2):
        leaf, text = x.clone().requires_grad_(), torch.ones(10, 1, requires_grad=True)
        y = carry(leaf, worked(), into=text * 1, add=True)
        assert y.sum() == want + 10
        text.index_add(0, carry.index(worked()), carry(leaf, worked())).sum().backward(retain_graph=True)
        y.sum().backward()
        assert leaf.grad.flatten().tolist() == [2.] * len(x)
        index += 1


def test_a_first_call_in_inference_mode_leaves_later_ones_their_gradient(pair):
    pair.run(evaluated)
