# SPDX-License-Identifier: Apache-2.0
"""shard(), unshard() and next_token() against chunks cut and strung together by PyTorch."""
import pytest

torch = pytest.importorskip('torch')

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402

SEGMENTS = [0, 4, 4, 12, 20]  # one is empty


def cut(whole, axis, cp, cp_rank, tp=1, tp_rank=0, segments=None):
    """This rank's part: 2 cp chunks of each sequence, two of them, then a block over tp."""
    if cp > 1:
        ends = segments or [0, whole.shape[axis]]
        parts = []
        for lo, hi in zip(ends, ends[1:]):
            if hi > lo:
                chunks = torch.chunk(whole.narrow(axis, lo, hi - lo), 2 * cp, axis)
                parts += [chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]]
        whole = torch.cat(parts, axis)
    return torch.chunk(whole, tp, axis)[tp_rank]


def ranks(segments=None, cp=2, tp=2):
    for c in range(cp):
        for t in range(tp):
            yield {'cp': cp, 'cp_rank': c, 'tp': tp, 'tp_rank': t}, segments


CASES = [(8, case) for case in ranks()] + [(20, case) for case in ranks(SEGMENTS, tp=1)] + \
    [(8, case) for case in ranks(cp=1)]


def numbers(*shape, dtype=torch.float64):
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_shards_are_chunks_and_add_up(dtype):
    for positions, (split, segments) in CASES:
        for axis, shape in ((1, (2, positions, 3)), (0, (positions, 2)), (-2, (3, positions, 2))):
            whole = numbers(*shape, dtype=dtype)
            for given in (whole, whole.transpose(0, -1).contiguous().transpose(0, -1)):
                part = cb.Partition(positions, **split, cu_padded=segments)
                got = ct.shard(given, part, axis)
                assert got.dtype == dtype and torch.equal(got, cut(whole, axis, **split, segments=segments))
                at = cut(torch.arange(positions), 0, **split, segments=segments)
                back = torch.zeros_like(whole).index_copy_(axis, at, got)
                assert torch.equal(ct.unshard(got, part, axis), back)


def test_gradients_are_each_other_s_adjoint():
    for positions, (split, segments) in CASES:
        part = cb.Partition(positions, **split, cu_padded=segments)
        x = torch.randn(2, positions, 3, dtype=torch.float64, requires_grad=True)
        y = torch.randn(2, len(part), 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda t: ct.shard(t, part), x)
        assert torch.autograd.gradcheck(lambda t: ct.unshard(t, part), y)
    assert torch.autograd.gradgradcheck(lambda t: ct.shard(t, part) ** 2, x)
    assert torch.autograd.gradgradcheck(lambda t: ct.unshard(t, part) ** 2, y)


def test_an_expanded_gradient_is_read_by_its_strides():
    part = cb.Partition(8, cp=2, cp_rank=1)
    x = numbers(2, 8, 3).requires_grad_()
    ct.shard(x, part).sum().backward()
    want = torch.zeros(2, 8, 3, dtype=torch.float64)
    want[:, 2:6] = 1
    assert torch.equal(x.grad, want)
    y = numbers(2, 4, 3).requires_grad_()
    ct.unshard(y, part).sum().backward()
    assert torch.equal(y.grad, torch.ones(2, 4, 3, dtype=torch.float64))


def test_targets_are_rolled_before_they_are_cut():
    tokens = numbers(2, 8, dtype=torch.int64)
    want = torch.roll(tokens, -1, 1)
    want[:, -1] = -100
    part = cb.Partition(8, cp=2, cp_rank=0)
    got = ct.next_token(tokens, part)
    assert torch.equal(got, want) and torch.equal(tokens, numbers(2, 8, dtype=torch.int64))
    assert ct.shard(got, part).tolist() == [[2, 3, 8, -100], [10, 11, 16, -100]]
    part.next_token(tokens, tokens)
    assert torch.equal(tokens, want)
    packed = cb.Partition(20, cp=2, cu_padded=SEGMENTS)
    ends = [end - 1 for end in (4, 12, 20)]
    want = [-7 if i in ends else i + 1 for i in range(20)]
    assert ct.next_token(torch.arange(20), packed, last=-7).tolist() == want


def test_what_does_not_fit_is_refused():
    part = cb.Partition(8, cp=2)
    for wrong in (lambda: ct.shard([1.0], part), lambda: ct.shard(torch.zeros(2, 8), part, 2),
                  lambda: ct.shard(torch.zeros(2, 7), part), lambda: ct.unshard(torch.zeros(2, 8), part),
                  lambda: ct.shard(torch.zeros(2, 8, dtype=torch.complex64), part),
                  lambda: ct.next_token(torch.zeros(2, 8), part),
                  lambda: ct.next_token(torch.zeros(2, 7, dtype=torch.int64), part)):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError, match='has 7 positions, expected 8'):
        ct.shard(torch.zeros(2, 7), part)
    with pytest.raises(ValueError, match='x has 2 dims, and none is dim 2'):
        ct.shard(torch.zeros(2, 8), part, 2)
