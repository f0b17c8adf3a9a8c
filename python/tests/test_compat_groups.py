# SPDX-License-Identifier: Apache-2.0
"""Drop-ins over context ranks, and of columns of the vocabulary: NeMo-RL's, SkyRL's and Megatron's, against PyTorch in fp64."""
import math

import pytest

torch = pytest.importorskip('torch')

from torch.nn import functional as F  # noqa: E402

import colobridge as cb  # noqa: E402
from colobridge import compat, megatron  # noqa: E402

V, B, S = 12, 2, 8
NEAR = dict(rtol=1e-5, atol=1e-5)


def drawn(seed=0, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(B, S, V, generator=rng, dtype=torch.float64)
    return z.to(dtype), torch.randint(0, V, (B, S), generator=rng)


def own(x, world, dim=1):
    """This rank's zigzag part"""
    chunks = x.chunk(2 * world.size, dim)
    return torch.cat([chunks[world.rank], chunks[2 * world.size - 1 - world.rank]], dim)


def columns(x, world):
    each = V // world.size
    return x[..., world.rank * each:(world.rank + 1) * each]


@pytest.mark.parametrize('size', (1, 2, 4))
@pytest.mark.parametrize('dtype', (torch.int64, torch.float32, torch.bfloat16, torch.bool))
def test_tokens_of_the_next_position(size, dtype):
    x = (torch.arange(B * S).reshape(B, S) * 3 % 17).to(dtype)

    def shifted(world):
        each = S // world.size
        mine = x[:, world.rank * each:(world.rank + 1) * each]
        got = compat.cp_shift_next(mine, world, fill=0)
        whole = torch.cat([x[:, 1:], torch.zeros(B, 1, dtype=dtype)], 1)
        assert torch.equal(got, whole[:, world.rank * each:(world.rank + 1) * each]) and got.dtype == dtype
    cb.run_threads(size, shifted)
    assert torch.equal(compat.cp_shift_next(x, fill=1)[:, :-1], x[:, 1:])
    with pytest.raises(ValueError, match='cp_shift_next: x is .* which requires grad'):
        compat.cp_shift_next(torch.zeros(1, 2, requires_grad=True), fill=0)


@pytest.mark.parametrize('size', (1, 2, 4))
@pytest.mark.parametrize('dim', (1, 0, -2))
def test_whole_sequences_and_windows_of_zigzag_parts(size, dim):
    x = torch.randn(S, 3) if dim == 0 else torch.randn(B, S, 3)
    g = [torch.randn(x.shape, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def gathered(world):
        mine = own(x, world, dim).clone().requires_grad_()
        whole = compat.allgather_cp_sharded_tensor(mine, world, dim)
        assert torch.equal(whole, x)
        (whole * g[world.rank]).sum().backward()
        torch.testing.assert_close(mine.grad, own(sum(g), world, dim))  # added over cp
        mine = own(x, world, dim).clone().requires_grad_()
        window = compat.cp_load_balanced_to_contiguous(mine, cp_group=world, seq_dim=dim)
        assert torch.equal(window, x.chunk(world.size, dim)[world.rank])
        (window * g[0].chunk(world.size, dim)[world.rank]).sum().backward()
        torch.testing.assert_close(mine.grad, own(g[0], world, dim))
    cb.run_threads(size, gathered)


@pytest.mark.parametrize('size', (1, 2))
@pytest.mark.parametrize('flat', (False, True))
def test_packed_sequences_of_zigzag_parts(size, flat):
    cu = torch.tensor([0, 4, 12, 16])
    x = torch.randn(16, 3)
    g = [torch.randn(16, 3, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def part(whole, world):
        return torch.cat([own(whole[a:b], world, 0) for a, b in zip(cu, cu[1:])])

    def gathered(world):
        mine = part(x, world).clone().requires_grad_()
        whole = compat.allgather_cp_sharded_packed_tensor(mine.unsqueeze(0) if flat else mine, cu, world)
        assert torch.equal(whole, x.unsqueeze(0) if flat else x)
        (whole * g[world.rank]).sum().backward()
        torch.testing.assert_close(mine.grad, part(g[world.rank], world))  # its own, without a sum
    cb.run_threads(size, gathered)


@pytest.mark.parametrize('size', (1, 3))
def test_sums_over_a_group(size):
    def summed(world):
        x = (torch.arange(4.0) + world.rank).requires_grad_()
        want = sum(torch.arange(4.0) + r for r in range(size))
        plain = compat.group_all_reduce_sum(x, world)
        assert torch.equal(plain.detach(), want) and (size == 1) == (plain is x)
        got = compat.group_all_reduce_sum_with_grad(x, world)
        (got * torch.arange(4.0)).sum().backward()
        assert torch.equal(got.detach(), want) and torch.equal(x.grad, torch.arange(4.0))
        assert compat.group_all_reduce_sum(x, None) is x and compat.group_all_reduce_sum_with_grad(x, None) is x
    cb.run_threads(size, summed)


@pytest.mark.parametrize('size', (1, 2, 3))
@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16))
def test_columns_of_the_vocabulary(size, dtype):
    z, _ = drawn(dtype=dtype)
    z[0, 0, 3] = z[0, 0, 9] = 20.0  # a tie
    g = torch.randn(B, S, V, generator=torch.Generator().manual_seed(9)).double()
    ids = torch.tensor([0, 11, 5, 5])
    near = NEAR if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)

    def of(world):
        whole, mine = z.double().clone().requires_grad_(), columns(z, world).clone().requires_grad_()
        want = torch.log_softmax(whole / 0.7, -1)
        (want * g).sum().backward()
        got = compat.vocab_parallel_log_softmax(mine, 0.7, tp_group=world)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), columns(want.detach(), world), **NEAR)
        (got * columns(g, world)).sum().backward()
        torch.testing.assert_close(mine.grad.double(), columns(whole.grad, world), **near)
        mine.grad = None
        full = compat.vocab_parallel_full_log_softmax(mine, 0.7, tp_group=world)
        torch.testing.assert_close(full.double(), want.detach(), **NEAR)
        (full * g).sum().backward()
        torch.testing.assert_close(mine.grad.double(), columns(whole.grad, world), **near)
        mine.grad, whole.grad = None, None
        some = compat.vocab_parallel_gather_columns(mine, ids, tp_group=world)
        assert some.dtype == torch.float32 and torch.equal(some, z[..., ids].float())
        (some * g[..., :4]).sum().backward()
        (whole[..., ids] * g[..., :4]).sum().backward()
        torch.testing.assert_close(mine.grad.double(), columns(whole.grad, world), **near)
        assert torch.equal(compat.vocab_parallel_argmax(mine, tp_group=world), z.argmax(-1))
        assert compat.vocab_parallel_argmax(mine, tp_group=world)[0, 0] == 3
        each = V // world.size
        values, at = compat.distributed_vocab_topk(mine, 4, world, vocab_start_index=world.rank * each, vocab_end_index=(world.rank + 1) * each)
        assert values.dtype == dtype and not values.requires_grad and torch.equal(values, z.gather(-1, at))
        assert torch.equal(values, z.topk(4, -1)[0]) and at[0, 0, :2].tolist() == [3, 9]
    cb.run_threads(size, of)
    with pytest.raises(ValueError, match=r'vocab_parallel_gather_columns: column_indices are \[1\] of torch.int64, expected \[K\], ids .* in \[0, 12\)'):
        compat.vocab_parallel_gather_columns(z, torch.tensor([12]))


@pytest.mark.parametrize('size', (1, 2, 3))
def test_log_softmax_of_large_logits_has_their_digits(size):
    """f32 logits near 5,000 are multiples of 2^-11, and differences of them exact: what is left are roundings of log p, below 30"""
    z = drawn(1)[0] + 5000
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-5)):
        given = z.to(dtype)
        given[0, 0, 5] = -float('inf')
        given[0, 1] = float('nan')
        given[0, 2] = -float('inf')

        def of(world):
            whole, mine = given.double().clone().requires_grad_(), columns(given, world).clone().requires_grad_()
            want = torch.log_softmax(whole / 0.9, -1)
            got = compat.vocab_parallel_log_softmax(mine, 0.9, tp_group=world)
            near = dict(rtol=0, atol=bound, equal_nan=True)
            torch.testing.assert_close(got.double(), columns(want.detach(), world), **near)
            want[1].sin().sum().backward()
            got[1].sin().sum().backward()
            assert mine.grad.dtype == dtype
            torch.testing.assert_close(mine.grad[1].double(), columns(whole.grad, world)[1], **near)
        cb.run_threads(size, of)
    for bad, temperature in ((z.long(), 1.0), (z, 0.0), (z[..., :0], 1.0)):
        with pytest.raises(ValueError, match='vocab_parallel_log_softmax: logits are .* and temperature %s, expected' % temperature):
            compat.vocab_parallel_log_softmax(bad, temperature)


@pytest.mark.parametrize('size', (1, 2))
def test_next_tokens_of_shards_and_of_whole_logits(size):
    z, t = drawn(1, torch.float32)
    want = torch.log_softmax(z.double(), -1)[:, :-1].gather(-1, t[:, 1:, None])[..., 0]

    def of(world):
        got = compat.get_next_token_logprobs_from_logits(t, columns(z, world), vocab_parallel_rank=world.rank, vocab_parallel_group=world)
        torch.testing.assert_close(got.double(), want, **NEAR)
    cb.run_threads(size, of)
    torch.testing.assert_close(compat.get_next_token_logprobs_from_logits(t, z).double(), want, **NEAR)
    for given, words in ((dict(vocab_parallel_group=cb.Comm.self()), 'vocab_parallel_rank is None'),
                         (dict(context_parallel_group=cb.Comm.self()), 'expected both')):
        with pytest.raises(ValueError, match=words):
            compat.get_next_token_logprobs_from_logits(t, z, **given)
    with pytest.raises(ValueError, match='expected a DTensor over a mesh with a dim "tp"'):
        compat.get_logprobs_from_vocab_parallel_logits(z, t)


@pytest.mark.parametrize('zero', (False, True))
@pytest.mark.parametrize('tp, cp', ((1, 1), (2, 1), (1, 2), (2, 2)))
def test_distillation_at_a_teachers_ids(tp, cp, zero):
    z, _ = drawn(2, torch.float32)
    teacher, k = drawn(3, torch.float32)[0], 3
    values, ids = teacher[:, :7].topk(k, -1)  # 7 positions of a sequence that is padded to 8
    g = torch.randn(B, 6, k, generator=torch.Generator().manual_seed(2)).double()
    whole = z.double().clone().requires_grad_()
    lp = torch.log_softmax(whole, -1)
    want = (lp[:, :7].gather(-1, ids) if zero else torch.log_softmax(whole[:, :7].gather(-1, ids), -1))[:, :-1]
    (want * g).sum().backward()

    def of(world):
        of_tp = type('Of', (), {'size': tp, 'rank': world.rank % tp})
        of_cp = type('Of', (), {'size': cp, 'rank': world.rank // tp})
        grid = cb.Grid('tp=%d,cp=%d' % (tp, cp))
        tp_group, cp_group = (world.split(grid, dim) if n > 1 else None for dim, n in (('tp', tp), ('cp', cp)))
        mine = own(columns(z, of_tp), of_cp).clone().requires_grad_()
        got, theirs, sums = compat.get_distillation_topk_logprobs_from_logits(mine, values, ids, zero, True, None, tp_group, cp_group)
        torch.testing.assert_close(got.double(), want.detach(), **NEAR)
        torch.testing.assert_close(theirs.double(), torch.log_softmax(values.double(), -1)[:, :-1], **NEAR)
        assert (sums is None) != zero
        if zero:
            torch.testing.assert_close(sums.double(), (lp.exp() * lp).sum(-1)[:, :6].detach(), **NEAR)
        (got * g / cp).sum().backward()  # each cp rank has a part of the loss
        torch.testing.assert_close(mine.grad.double(), own(columns(whole.grad, of_tp), of_cp), **NEAR)
    cb.run_threads(tp * cp, of)


@pytest.mark.parametrize('size', (1, 2, 3))
def test_cross_entropy_against_a_teacher(size):
    z, _ = drawn(4, torch.float32)
    teacher, mask = drawn(5, torch.float32)[0], torch.tensor([1, 0] * (S // 2)).expand(B, S)
    whole = z.double().clone().requires_grad_()
    ce = -(torch.softmax(teacher.double(), -1) * torch.log_softmax(whole, -1)).sum(-1)
    ce.sum().backward()
    d_ce, whole.grad = whole.grad, None
    (ce_mean := -(torch.softmax(teacher.double(), -1) * torch.log_softmax(whole, -1)).sum(-1).mul(mask).sum() / mask.sum()).backward()

    def of(world):
        mine = columns(z, world).clone().requires_grad_()
        got = compat.DistributedCrossEntropy.apply(mine, columns(teacher, world), world)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), ce.detach(), **NEAR)
        got.sum().backward()
        torch.testing.assert_close(mine.grad.double(), columns(d_ce, world), **NEAR)
        assert not compat.DistributedCrossEntropy.apply(mine, columns(teacher, world), world, True).requires_grad
        mine.grad = None
        mean = compat.draft_soft_ce(mine, columns(teacher, world), mask, vocab_parallel_group=world)
        torch.testing.assert_close(mean.double(), ce_mean.detach(), **NEAR)
        mean.backward()
        torch.testing.assert_close(mine.grad.double(), columns(whole.grad, world), **NEAR)
        torch.testing.assert_close(compat.draft_soft_ce(mine, columns(teacher, world), mask, 5.0, world).double(),
                                   ce_mean.detach() * mask.sum() / 5, **NEAR)
        assert compat.draft_soft_ce(mine, columns(teacher, world), 0 * mask, vocab_parallel_group=world) == 0
        each = V // world.size
        union = torch.cat([teacher[..., r * each:(r + 1) * each].topk(2, -1)[1] + r * each for r in range(world.size)], -1)
        x = z.double().clone().requires_grad_()
        want = -(torch.softmax(teacher.double().gather(-1, union), -1) * torch.log_softmax(x.gather(-1, union), -1)).sum(-1).mul(mask).sum() / mask.sum()
        want.backward()
        mine.grad = None
        got = compat.draft_soft_ce_topk(mine, columns(teacher, world), mask, 2, None, world)
        got.backward()
        torch.testing.assert_close(got.double(), want.detach(), **NEAR)
        torch.testing.assert_close(mine.grad.double(), columns(x.grad, world), **NEAR)
        some = mask * torch.tensor([.3, .1]).repeat(S // 2)
        for factor, by in ((None, 8 * .3), (torch.tensor(3.0), 3.0), (2, 2.0), (torch.tensor(0.25), 1.0), (0.25, 1.0)):
            loss = compat.draft_soft_ce(mine, columns(teacher, world), some, factor, world)
            torch.testing.assert_close(loss.double(), (ce * some).sum().detach() / by, **NEAR)
        loss = compat.draft_soft_ce(mine, columns(teacher, world), some / 10, None, world)  # of 0.24 tokens: divided by 1
        torch.testing.assert_close(loss.double(), (ce * some).sum().detach() / 10, **NEAR)
        padded, teachers = mine.detach().clone(), columns(teacher, world).clone()
        some = mask * torch.tensor([0., 0., 1., 0.]).repeat(S // 4)
        padded[:, ::4], padded[:, 1::4], teachers[:, 3::4] = math.nan, -math.inf, math.nan  # where some is 0
        for call in (compat.draft_soft_ce, lambda *given: compat.draft_soft_ce_topk(*given[:3], 99, *given[3:])):
            leaf = padded.clone().requires_grad_()
            loss = call(leaf, teachers, some, 2.0, world)
            torch.testing.assert_close(loss.double(), (ce * some).sum().detach() / 2, **NEAR)
            loss.backward()
            assert torch.equal(leaf.grad.abs().sum(-1) != 0, some != 0)
        for shift in (1, 3):
            moved = torch.cat([teacher[:, shift:], teacher[:, :shift]], 1).contiguous()
            alike = [compat.draft_soft_ce_topk(mine, columns(t, world), mask, k, None, world, roll)
                     for t, k, roll in ((moved, 2, 0), (teacher, 2, shift))]
            assert torch.equal(*alike) and not torch.equal(alike[0], got)
            assert torch.equal(*(torch.autograd.grad(loss, mine)[0] for loss in alike))
        whole_of = [compat.draft_soft_ce_topk(mine, columns(teacher, world), mask, k, None, world) for k in (V // world.size, 99)]
        assert torch.equal(*whole_of)
        torch.testing.assert_close(whole_of[0].double(), ce_mean.detach(), **NEAR)
    cb.run_threads(size, of)
    with pytest.raises(ValueError, match='teacher_logits require grad'):
        compat.draft_soft_ce(z, teacher.clone().requires_grad_(), mask)
    with pytest.raises(ValueError, match='draft_soft_ce_topk: k is 0 and roll_shift 0'):
        compat.draft_soft_ce_topk(z, teacher, mask, 0)
    with pytest.raises(ValueError, match=r'draft_soft_ce_topk: k is 2 and roll_shift 1 with student_logits \[8, 12\]'):
        compat.draft_soft_ce_topk(z[0], teacher[0], mask[0], 2, roll_shift=1)


@pytest.mark.parametrize('size', (1, 2))
def test_megatrons_cross_entropies(size):
    z, t = drawn(6, torch.float32)
    rng = torch.Generator().manual_seed(7)
    h, w = (torch.randn(*n, generator=rng, dtype=torch.float64) for n in ((S, B, 5), (V, 5)))
    labels = t.t().contiguous()
    labels[0, 0] = -100

    def of(world):
        each = V // world.size
        mine = columns(z, world).clone().requires_grad_()
        got = compat.fused_vocab_parallel_cross_entropy(mine, t, world)
        torch.testing.assert_close(got.double(), F.cross_entropy(z.double().reshape(-1, V), t.reshape(-1), reduction='none').reshape(B, S), **NEAR)
        for reduction in ('mean', 'sum', 'none'):
            for cut in (False, True):
                whole = [x.clone().requires_grad_() for x in (h, w)]
                want = F.cross_entropy((whole[0] @ whole[1].T).reshape(-1, V), labels.reshape(-1), reduction=reduction)
                want.sum().backward()
                part = slice(world.rank * S // world.size, (world.rank + 1) * S // world.size) if cut else slice(0, S)
                leaves = [x.clone().requires_grad_() for x in (h[part], w[world.rank * each:(world.rank + 1) * each])]
                loss = megatron.linear_cross_entropy(*leaves, labels, world, reduction, sequence_parallel=cut)
                torch.testing.assert_close(loss.reshape(-1), want.detach().reshape(-1))
                loss.sum().backward()
                torch.testing.assert_close(leaves[0].grad, whole[0].grad[part])
                torch.testing.assert_close(leaves[1].grad, whole[1].grad[world.rank * each:(world.rank + 1) * each])
    cb.run_threads(size, of)
    with pytest.raises(ValueError, match="linear_cross_entropy: reduction is 'most'"):
        megatron.linear_cross_entropy(h, w, labels, reduction='most')


def of_dtensors(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    z, t = drawn(8, torch.float32)
    whole = z.double().clone().requires_grad_()
    want = torch.log_softmax(whole, -1)[:, :-1].gather(-1, t[:, 1:, None])[..., 0]
    want.square().sum().backward()
    for shape, names in (((4,), ('tp',)), ((2, 2), ('dp', 'tp'))):
        mesh = init_device_mesh('cpu', shape, mesh_dim_names=names)
        placed = [Replicate()] * (len(shape) - 1) + [Shard(2)]
        for call in (lambda x: compat.get_logprobs_from_vocab_parallel_logits(x, t),
                     lambda x: compat.get_next_token_logprobs_from_logits(t, x, chunk_size=3)):
            mine = distribute_tensor(z, mesh, placed).requires_grad_()
            got = call(mine)
            torch.testing.assert_close(got.double(), want.detach(), **NEAR)
            got.square().sum().backward()
            torch.testing.assert_close(mine.grad.to_local().double(), distribute_tensor(whole.grad, mesh, placed).to_local(), **NEAR)
        uneven, ids = z[..., :V - 1], t.clamp(max=V - 2)
        torch.testing.assert_close(compat.get_logprobs_from_vocab_parallel_logits(distribute_tensor(uneven, mesh, placed), ids),
                                   torch.log_softmax(uneven, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0], **NEAR)
        group = mesh['tp'] if len(shape) > 1 else mesh
        mine = distribute_tensor(z, mesh, placed)
        assert torch.equal(compat.vocab_parallel_argmax(mine, tp_group=group), z.argmax(-1))
        assert torch.equal(compat.vocab_parallel_gather_columns(mine, torch.tensor([7]), tp_group=group), z[..., 7:8])
        full = compat.vocab_parallel_full_log_softmax(mine, 1.0, tp_group=group)
        torch.testing.assert_close(full.double(), torch.log_softmax(z.double(), -1), **NEAR)
        with pytest.raises(ValueError, match='seq_index is given and input_ids are .* expected both or neither'):
            compat.get_logprobs_from_vocab_parallel_logits(mine, t, torch.arange(S))
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('cp', 'tp'))
    for order in ((0, 1, 6, 7, 2, 3, 4, 5), (3, 0, 7, 5, 1, 2, 6, 4)):  # zigzag, and any
        order = torch.tensor(order)
        whole.grad = None
        torch.log_softmax(whole, -1)[:, :-1].gather(-1, t[:, 1:, None])[..., 0].square().sum().backward()
        ids = distribute_tensor(t[:, order], mesh, [Shard(1), Replicate()])
        for call in (lambda x: compat.get_logprobs_from_vocab_parallel_logits(x, ids, order),
                     lambda x: compat.get_next_token_logprobs_from_logits(ids, x, order, chunk_size=3)):
            mine = distribute_tensor(z[:, order], mesh, [Shard(1), Shard(2)]).requires_grad_()
            got = call(mine)
            torch.testing.assert_close(got.double(), want.detach(), **NEAR)
            got.square().sum().backward()
            torch.testing.assert_close(mine.grad.to_local().double(), distribute_tensor(
                whole.grad[:, order].contiguous(), mesh, [Shard(1), Shard(2)]).to_local(), **NEAR)
    for wrong, positions, words in ((ids, None, 'seq_index is None'), (ids, order[:4], r'seq_index is \[4\]'), (ids, order.clamp(min=1), 'each position once'),
                                    (distribute_tensor(t, mesh, [Replicate(), Replicate()]), order, 'expected Shard.1. over "cp"')):
        with pytest.raises(ValueError, match=words):
            compat.get_logprobs_from_vocab_parallel_logits(mine, wrong, positions)
    window = compat.cp_load_balanced_to_contiguous(own(z, type('Of', (), {'size': 4, 'rank': rank})), cp_group=torch.distributed.group.WORLD)
    assert torch.equal(window, z.chunk(4, 1)[rank])


def test_dtensors_are_taken_by_their_local_parts(world):
    pytest.importorskip('torch.distributed.tensor')
    world.run(of_dtensors)
