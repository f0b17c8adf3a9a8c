# SPDX-License-Identifier: Apache-2.0
"""linear_distill() and reshard_head() against PyTorch in f64 on whole vocabularies: kinds, modes, chunks, heads of other
widths, dtypes and paddings, LoRAs, masks, processes, threads, products, refusals."""
import itertools
import math
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from test_torch_losses import BETA, KINDS  # noqa: E402
from test_torch_dtensor import DTensor  # noqa: E402
from world import meet  # noqa: E402

T, H, HT, V = 7, 6, 10, 23
PAD, PAD_T = 28, 24  # rows of the heads, of which those from V on are padding
MODES = 'loss', 'logprob'


class Models:
    """A student and a teacher in f64, whose leaves are on all ranks alike."""

    def __init__(self, dtype=torch.float64, pad=PAD, pad_t=PAD_T):
        rng = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)  # noqa: E731
        self.h, self.w, self.b = draw(T, H), draw(pad, H), draw(pad)
        self.a, self.lb = draw(3, H), draw(pad, 3)
        self.th, self.tw = draw(T, HT), draw(pad_t, HT) / 2
        self.mask = torch.tensor([1, 1, 0, 1, 1, 0, 1]).bool()
        self.weights = torch.rand(T, generator=rng, dtype=torch.float64) * self.mask
        self.up = draw(T).double()


OPTIONS = dict(softcap=7.0, scale=0.8), dict(softcap=5.0, scale=1.2)  # of the heads
LEAVES = 'h', 'w', 'b', 'a', 'lb'


def squashed(z, softcap, scale, temperature):
    return softcap * torch.tanh(scale * z / softcap) / temperature


def expected(m, kind, reduction, mask):
    """(value, gradients of LEAVES) of whole logits in f64"""
    leaves = [getattr(m, name).double().clone().requires_grad_() for name in LEAVES]
    h, w, b, a, lb = leaves
    z = squashed((h @ w.t() + b + 0.5 * (h @ a.t()) @ lb.t())[:, :V], temperature=1.5, **OPTIONS[0])
    y = squashed((m.th.double() @ m.tw.double().t())[:, :V], temperature=0.9, **OPTIONS[1])
    d = KINDS[kind](z.log_softmax(-1), y.log_softmax(-1))
    by = torch.ones(T, dtype=torch.float64) if mask is None else mask.double()
    value = d * by if reduction == 'none' else (d * by).sum() / (by.sum() if reduction == 'mean' else 1)
    grads = torch.autograd.grad((value * m.up).sum() if reduction == 'none' else value, leaves)
    return value.detach(), grads


def cut(rows, rank, size):
    """Of rows of a head: parts of V that the ranks have, and the last rank its padding"""
    ends = [V * r // size for r in range(size)] + [rows]
    return slice(ends[rank], ends[rank + 1])


def found(m, rank, size, group, kind, reduction, mask, mode, chunk_size):
    mine, theirs = cut(len(m.w), rank, size), cut(len(m.tw), rank, size)
    leaves = [(t if name in ('h', 'a') else t[mine]).clone().requires_grad_() for name, t in ((n, getattr(m, n)) for n in LEAVES)]
    h, w, b, a, lb = leaves
    vocab = mine.start, V
    value = ct.linear_distill(
        h, ct.Head(w, b, lora=(a, lb, 0.5), vocab=vocab, tp_group=group, **OPTIONS[0]), m.th,
        ct.Head(m.tw[theirs].clone().requires_grad_(), vocab=vocab, **OPTIONS[1]), kind=kind, beta=BETA, temperature=1.5,
        teacher_temperature=0.9, mask=mask, reduction=reduction, mode=mode, chunk_size=chunk_size)
    total = (value * m.up).sum() if reduction == 'none' else value.loss
    total.backward()
    return value if reduction == 'none' else value.loss, [t.grad for t in leaves], mine


def agrees(rank, size, group, chunks=(1, 3, T, T + 3)):
    m = Models()
    said = []
    for kind, mode in itertools.product(KINDS, MODES):
        for reduction, mask, chunk in ((r, mask, c) for r in ('mean', 'sum', 'none') for mask, c in zip(
                (None, m.mask, m.weights, m.mask), chunks)):
            if mode == 'loss' and reduction == 'none':
                continue
            want, d_want = expected(m, kind, reduction, mask)
            got, d_got, mine = found(m, rank, size, group, kind, reduction, mask, mode, chunk)
            torch.testing.assert_close(got.detach(), want, rtol=1e-10, atol=1e-12, msg='%s %s %s' % (kind, mode, reduction))
            for name, have, wanted in zip(LEAVES, d_got, d_want):
                torch.testing.assert_close(have, wanted if name in ('h', 'a') else wanted[mine], rtol=1e-9, atol=1e-11,
                                           msg='%s of %s %s %s' % (name, kind, mode, reduction))
            said.append(got.tolist())
    return said


def test_values_and_gradients_alone():
    agrees(0, 1, None)


def on_processes(rank):
    return agrees(rank, 4, dist.group.WORLD, (3,) * 4)


def test_values_and_gradients_on_processes(world):
    said = world.run(on_processes)
    assert all(s == said[0] for s in said)


def test_values_and_gradients_on_threads():
    for size in (2, 3, 8):
        cb.run_threads(size, lambda world: agrees(world.rank, size, world, (5,) * 4))


@pytest.mark.parametrize('mode', MODES)
def test_chunks_do_not_change_values(mode):
    m = Models(torch.float32)
    values = [found(m, 0, 1, None, 'reverse_kl', 'mean', None, mode, chunk) for chunk in (None, *range(1, T + 4))]
    for value, grads, _ in values:
        torch.testing.assert_close(value, values[0][0], rtol=1e-6, atol=0)
        for mine, first in zip(grads, values[0][1]):
            torch.testing.assert_close(mine, first, rtol=1e-4, atol=1e-5)


def test_collectives():
    m = Models(torch.float32, pad=V, pad_t=V)  # in f64 mode "loss" makes gradients of hidden in forward

    def one_rank(world):
        mine = cut(V, world.rank, 2)
        for kind, mode in itertools.product(KINDS, MODES):
            h, w = m.h.clone().requires_grad_(), m.w[mine].clone().requires_grad_()
            head, teacher = (ct.Head(t, vocab=(mine.start, V), tp_group=world) for t in (w, m.tw[mine]))
            run = lambda: ct.linear_distill(h, head, m.th, teacher, kind=kind, mode=mode, chunk_size=3).loss  # noqa: E731
            run()  # columns are compared
            world.stats_reset()
            loss = run()
            seen = {name: of['ops'] for ops in world.stats().values() for name, of in ops.items() if of['ops']}
            assert seen == {'all_gather': 6 if not kind.endswith('kl') else 3 if mode == 'loss' else 1}, (kind, mode)  # of 3 chunks
            world.stats_reset()
            loss.backward()
            seen = {name: of['ops'] for ops in world.stats().values() for name, of in ops.items() if of['ops']}
            assert seen == {'all_reduce': 1}, (kind, mode)  # of hidden's gradient
    cb.run_threads(2, one_rank)


@pytest.mark.parametrize('mode', MODES)
def test_tokens_of_mask_0_are_not_read(mode):
    m = Models(torch.float32)
    made = []
    for junk in (1.0, math.nan):
        for hidden in (m.h, m.th):
            hidden[~m.mask] = junk
        made.append(found(m, 0, 1, None, 'forward_kl', 'mean', m.mask, mode, 3))
    assert torch.equal(made[0][0], made[1][0])
    for name, want, got in zip(LEAVES, made[0][1], made[1][1]):
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=name)
    assert (made[1][1][0][~m.mask] == 0).all()


@pytest.mark.parametrize('mode', MODES)
def test_frozen_parts_get_no_gradient(mode):
    m = Models()
    for trained in itertools.product((False, True), repeat=3):
        h, w, b = (t.clone().requires_grad_(on) for t, on in zip((m.h, m.w, m.b), trained))
        loss = ct.linear_distill(h, ct.Head(w, b, vocab=V), m.th, ct.Head(m.tw, vocab=V), mode=mode, chunk_size=2).loss
        assert loss.requires_grad == any(trained)
        if any(trained):
            loss.backward()
        for t, on in zip((h, w, b), trained):
            assert (t.grad is not None) == on


def test_no_gradients_are_made_without_any():
    m = Models()
    w = m.w.clone().requires_grad_()
    with torch.no_grad():
        loss = ct.linear_distill(m.h, ct.Head(w, vocab=V), m.th, ct.Head(m.tw, vocab=V))
    assert not loss.loss.requires_grad


def test_mode_loss_has_one_backward():
    m = Models()
    h = m.h.clone().requires_grad_()
    loss = ct.linear_distill(h, ct.Head(m.w, vocab=V), m.th, ct.Head(m.tw, vocab=V)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='linear_distill: a second backward of mode "loss"'):
        loss.backward()


@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize('mode', MODES)
def test_dtypes(dtype, mode):
    m = Models(dtype)
    value, grads, _ = found(m, 0, 1, None, 'jsd', 'mean', m.mask, mode, 3)
    want, d_want = expected(m, 'jsd', 'mean', m.mask)
    near = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(value.double(), want, rtol=near, atol=near)
    for name, have, wanted in zip(LEAVES, grads, d_want):
        assert have.dtype == dtype
        torch.testing.assert_close(have.double(), wanted, rtol=4 * near, atol=near * float(wanted.abs().max()), msg=name)


def test_teachers_and_students_of_other_dtypes():
    m = Models(torch.float32)
    want = ct.linear_distill(m.h, ct.Head(m.w, vocab=V), m.th, ct.Head(m.tw, vocab=V)).loss
    for mine, theirs in itertools.product((torch.float32, torch.bfloat16, torch.float64), repeat=2):
        got = ct.linear_distill(m.h.to(mine), ct.Head(m.w.to(mine), vocab=V), m.th.to(theirs), ct.Head(m.tw.to(theirs), vocab=V)).loss
        torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize('mode', MODES)
def test_autocast_is_that_of_linear(mode):
    m = Models(torch.float32)
    h, w = m.h.clone().requires_grad_(), m.w.clone().requires_grad_()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = ct.linear_distill(h, ct.Head(w, vocab=V), m.th, ct.Head(m.tw, vocab=V), mode=mode, chunk_size=3).loss
    loss.backward()
    assert loss.dtype == torch.float32 and h.grad.dtype == w.grad.dtype == torch.float32
    low = ct.linear_distill(m.h.bfloat16(), ct.Head(m.w.bfloat16(), vocab=V), m.th.bfloat16(), ct.Head(m.tw.bfloat16(), vocab=V), chunk_size=3).loss
    assert loss.item() == low.item()


def reduces(rank):
    m = Models()
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = groups[rank // 2], groups[2 + rank % 2]
    tokens = slice(0, 3) if rank < 2 else slice(3, T)
    said = []
    for mode, mask in itertools.product(MODES, (None, m.mask, m.weights)):
        whole, mine = m.h.clone().requires_grad_(), m.h[tokens].clone().requires_grad_()
        rows = cut(PAD, rank % 2, 2), cut(PAD_T, rank % 2, 2)
        d = KINDS['reverse_kl']((whole @ m.w.t())[:, :V].log_softmax(-1), (m.th @ m.tw.t())[:, :V].log_softmax(-1))
        by = torch.ones(T, dtype=torch.float64) if mask is None else mask.double()
        want = (d * by).sum() / by.sum()
        want.backward()
        got = ct.linear_distill(mine, ct.Head(m.w[rows[0]], vocab=(rows[0].start, V), tp_group=tp), m.th[tokens],
                                ct.Head(m.tw[rows[1]], vocab=(rows[0].start, V), tp_group=tp), kind='reverse_kl', reduce_group=dp,
                                mask=None if mask is None else mask[tokens], mode=mode, chunk_size=2)
        torch.testing.assert_close(got.loss, want.detach(), rtol=1e-10, atol=0)
        torch.testing.assert_close(got.den, by.sum())
        got.backward()
        torch.testing.assert_close(mine.grad, whole.grad[tokens], rtol=1e-9, atol=1e-12)
        said.append(got.item())
    return said


def test_means_over_other_tokens(world):
    said = world.run(reduces)
    assert all(s == said[0] for s in said)


def sharded(rank):
    """Both heads over all ranks, which have other tokens, as FSDP2 and ZeRO-3 have them; two tokens a rank, one the last"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    m, mesh = Models(), init_device_mesh('cpu', (4,))
    tokens = slice(2 * rank, min(2 * rank + 2, T))
    for mode in MODES:
        whole = [t.clone().requires_grad_() for t in (m.h, m.w, m.b)]
        z, y = (whole[0] @ whole[1].t() + whole[2])[:, :V], (m.th @ m.tw.t())[:, :V]
        want = KINDS['jsd'](z.log_softmax(-1), y.log_softmax(-1)).mean()
        want.backward()
        w, b, tw = (torch.nn.Parameter(distribute_tensor(t, mesh, [Shard(0)])) for t in (m.w, m.b, m.tw))
        h = m.h[tokens].clone().requires_grad_()
        got = ct.linear_distill(h, ct.Head(w, b, vocab=V), m.th[tokens], ct.Head(tw, vocab=V), kind='jsd', beta=BETA, mode=mode,
                                chunk_size=1, reduce_group=dist.group.WORLD)
        torch.testing.assert_close(got.loss, want.detach(), rtol=1e-10, atol=0)
        got.backward()
        torch.testing.assert_close(h.grad, whole[0].grad[tokens], rtol=1e-9, atol=1e-12)
        for mine, other in ((w, whole[1]), (b, whole[2])):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-9, atol=1e-12)
        assert tw.grad is None


@pytest.mark.skipif(DTensor is None, reason='this PyTorch %s has no DTensor' % torch.__version__)
def test_sharded_heads(world):
    world.run(sharded)


def parts(rank):
    """Plain rows, elements of the flattened weight, and parameters of DeepSpeed's ZeRO-3, of 23 rows over 4 ranks; two tokens a
    rank, one the last"""
    m, all_of, tokens = Models(pad=V, pad_t=V), dist.group.WORLD, slice(2 * rank, 2 * rank + 2)

    def cut(t, flat):
        t = t.reshape(-1) if flat else t
        each = -(-len(t) // 4)
        padding = torch.full((4 * each - len(t), *t.shape[1:]), math.nan).to(t)
        return (torch.cat([t, padding]) if flat else t)[each * rank:each * rank + each].clone()

    def zero3(t):
        held = torch.nn.Parameter(torch.empty(0, dtype=t.dtype))
        held.ds_tensor, held.ds_shape, held.ds_process_group = cut(t, True), t.shape, all_of
        return held
    whole = [t.clone().requires_grad_() for t in (m.h, m.w, m.b)]
    want = KINDS['jsd']((whole[0] @ whole[1].t() + whole[2]).log_softmax(-1), (m.th @ m.tw.t()).log_softmax(-1)).mean()
    want.backward()
    for mode, how in itertools.product(('loss', 'logprob'), ('rows', 'flat', 'zero3')):
        if how == 'zero3':
            w, b, tw = map(zero3, (m.w, m.b, m.tw))
            heads = ct.Head(w, b), ct.Head(tw)
        else:
            w, b, tw = (cut(t, how == 'flat').requires_grad_() for t in (m.w, m.b, m.tw))
            heads = [ct.Head(*of, shard_group=all_of, rows=V) for of in ((w, b), (tw,))]
        h = m.h[tokens].clone().requires_grad_()
        got = ct.linear_distill(h, heads[0], m.th[tokens], heads[1], kind='jsd', beta=BETA, mode=mode, chunk_size=1, reduce_group=all_of)
        torch.testing.assert_close(got.loss, want.detach(), rtol=1e-10, atol=0)
        got.backward()
        torch.testing.assert_close(h.grad, whole[0].grad[tokens], rtol=1e-9, atol=1e-12)
        for mine, other in ((w, whole[1]), (b, whole[2])):
            grad = (mine.ds_tensor if how == 'zero3' else mine).grad
            torch.testing.assert_close(grad, cut(other.grad, how != 'rows').nan_to_num(0.0), rtol=1e-9, atol=1e-12)  # 0 of padding
        assert tw.grad is None and (how != 'zero3' or tw.ds_tensor.grad is None and w.grad is None)
    w = cut(m.w, False).requires_grad_()
    ct.linear_distill(h, ct.Head(w, cut(m.b, False), shard_group=all_of, rows=V, grad_reduction='mean'), m.th[tokens], ct.Head(m.tw),
                      kind='jsd', beta=BETA, reduce_group=all_of).backward()
    torch.testing.assert_close(w.grad, cut(whole[1].grad, False) / 4, rtol=1e-9, atol=1e-12)
    for head, words in ((ct.Head(cut(m.w, False)[1:], shard_group=all_of, rows=V), 'is shared by 4 ranks, and rank'),
                        (ct.Head(cut(m.w, False), shard_group=all_of), 'rows= .* is needed'), (ct.Head(m.w, rows=V), 'no ranks share its weight')):
        with pytest.raises(ValueError, match='linear_distill: the .* of head .*' + words):
            ct.linear_distill(h, head, m.th[tokens], ct.Head(m.tw))


def test_parts_of_heads_without_dtensors(world):
    world.run(parts)


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'examples/distill'))


def example(rank):
    from distill import distilled
    return distilled(4, 'reverse_kl', rank, 4, dist.group.WORLD)


def test_the_example_learns_and_does_so_alike_over_ranks(world):
    from distill import distilled
    for kind in KINDS:
        seen = distilled(15, kind)
        assert seen[-1] < 0.9 * seen[0], kind
    first = distilled(4, 'reverse_kl')
    for said in world.run(example):
        assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(said, first))


# ---- heads whose columns do not fit ----

def apart(rank):
    """Columns [0, 12) and [12, 23) of the student, [0, 8) and [8, 23) of the teacher"""
    m = Models(pad=V, pad_t=V)
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3])]
    tp, r = groups[rank // 2], rank % 2
    mine, theirs = (slice(0, 12), slice(12, V))[r], (slice(0, 8), slice(8, V))[r]
    student, teacher = ct.Head(m.w[mine], vocab=(mine.start, V), tp_group=tp), m.tw[theirs]
    with pytest.raises(ValueError) as why:
        ct.linear_distill(m.h, student, m.th, ct.Head(teacher, vocab=(theirs.start, V)))
    moved = ct.reshard_head(teacher, (mine.start, mine.stop), group=tp)
    assert torch.equal(moved, m.tw[mine])
    want = ct.linear_distill(m.h, m.w, m.th, m.tw).item()
    got = ct.linear_distill(m.h, student, m.th, ct.Head(moved, vocab=(mine.start, V))).item()
    assert math.isclose(got, want, rel_tol=1e-12)
    return str(why.value)


def test_shards_of_other_columns_are_refused_and_can_be_moved(world):
    for said in world.run(apart):
        assert said == ("linear_distill: ranks hold columns [0, 12) [12, 23) of head and [0, 8) [8, 23) of teacher_head, expected the "
                        "same; move the rows of a frozen teacher with colobridge.torch.reshard_head(weight, columns, group=)")


@pytest.mark.parametrize('mode', MODES)
def test_weights_of_tokens_have_any_strides(mode):
    m = Models(torch.float32)
    wide = torch.rand(T, 3, generator=torch.Generator().manual_seed(5))
    for weights in (wide[:, 1], torch.full((1,), 0.5).expand(T), wide[:, 1].double()):
        want, got = (found(m, 0, 1, None, 'jsd', 'sum', w, mode, 3) for w in (weights.contiguous(), weights))
        assert torch.equal(got[0], want[0])
        for name, have, wanted in zip(LEAVES, got[1], want[1]):
            assert torch.equal(have, wanted), name


def test_heads_of_other_paddings_on_one_group():
    """A rank without padding cannot see that the last one has another, so no rank may ask for that."""
    m = Models()

    def one_rank(world):
        said = []
        for more, more_t in ((0, 0), (5, 1), (0, 5), (5, 5)):
            h, rows = m.h.clone().requires_grad_(), [cut(V + n, world.rank, 2) for n in (more, more_t)]
            head, teacher = (ct.Head(w[of], vocab=(of.start, V), tp_group=world) for w, of in zip((m.w, torch.cat([m.tw, m.tw])), rows))
            ct.linear_distill(h, head, m.th, teacher).loss.backward()
            said.append(h.grad.clone())
        with pytest.raises(ValueError, match=re.escape('vocab of the heads is [22, 23]')):  # what was asked for is another pair
            ct.linear_distill(m.h, head, m.th, ct.Head(teacher.weight, vocab=(of_rank(world), V - 1), tp_group=world))
        return said

    def of_rank(world):
        return cut(V, world.rank, 2).start
    for said in cb.run_threads(2, one_rank):
        for grad in said:
            torch.testing.assert_close(grad, said[0], rtol=1e-12, atol=1e-14)


def moves(rank, monkey):
    if monkey:  # several rounds
        module = sys.modules['colobridge.torch.linear_distill']
        module._ROUND, before = 40, module._ROUND
    whole = torch.arange(40.).reshape(20, 2)
    sizes = (7, 0, 10, 3)
    begin = sum(sizes[:rank])
    for wanted in ([(0, 20), (5, 5), (3, 19), (19, 20)], [(0, 5), (5, 10), (10, 15), (15, 20)]):
        got = ct.reshard_head(whole[begin:begin + sizes[rank]], wanted[rank], group=dist.group.WORLD)
        assert torch.equal(got, whole[slice(*wanted[rank])]) and got.is_contiguous()
    with pytest.raises(ValueError, match='expected rows of the 20 that all ranks have') if rank == 1 else pytest.raises(RuntimeError):
        ct.reshard_head(whole[begin:begin + sizes[rank]], (0, 21 if rank == 1 else 20), group=dist.group.WORLD)
    meet()
    if monkey:
        module._ROUND = before


@pytest.mark.parametrize('rounds', (False, True))
def test_rows_of_a_head_move(world, rounds):
    world.run(moves, rounds)


def test_what_does_not_fit_is_refused():
    m = Models()
    calls = {
        "kind is 'kl'": dict(kind='kl'), "reduction is 'none'": dict(reduction='none'),
        "head has 28 columns and teacher_head 24, expected vocab=V": {},
        'vocab of the heads is [22, 23]': dict(head=ct.Head(m.w, vocab=V), teacher_head=ct.Head(m.tw, vocab=V - 1)),
        'vocab is 25, head has 28 columns and teacher_head 24': dict(head=ct.Head(m.w, vocab=25)),
        'expected the same tokens': dict(teacher_hidden=m.th[1:]), 'mask is ': dict(mask=m.mask[1:]),
        'beta is 2': dict(head=ct.Head(m.w, vocab=V), kind='jsd', beta=2.0), 'chunk_size is -1': dict(head=ct.Head(m.w, vocab=V), chunk_size=-1),
        'the Head of head has main_grad=True, which is not done here; leave it out, and add weight.grad': dict(head=ct.Head(m.w, main_grad=True)),
        "the Head of head has grad_reduction='sum', which is not done here; no ranks share": dict(head=ct.Head(m.w, grad_reduction='sum')),
        "d_hidden is 'reduce_scatter'": dict(head=ct.Head(m.w, d_hidden='reduce_scatter')),
        'weight of teacher_head is ': dict(teacher_head=m.tw[:, 1:]), 'expected one dtype': dict(teacher_head=m.tw.float()),
        'teacher_hidden is a NoneType': dict(teacher_hidden=None), "teacher_temperature is 'hot'": dict(teacher_temperature='hot'),
        'target_temperature is 0': dict(head=ct.Head(m.w, vocab=V), teacher_temperature=0),
    }
    for said, other in calls.items():
        with pytest.raises(ValueError, match='linear_distill: .*' + re.escape(said)):
            ct.linear_distill(**{**dict(hidden=m.h, head=m.w, teacher_hidden=m.th, teacher_head=m.tw), **other})
    for weight, columns, said in ((m.w, (0, 29), 'of the 28'), (m.w, 5, 'columns is 5'), ([1.0], (0, 1), 'weight is a list')):
        with pytest.raises(ValueError, match='reshard_head: .*' + re.escape(said)):
            ct.reshard_head(weight, columns, group=None)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_gradients_of_f32_factors_have_f32_range(dtype, mode):
    """Gradients of 2^-30, which f16 does not hold, and digits that neither does."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *n: torch.randn(*n, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    h, w, th, tw = draw(T, H), draw(V, H), draw(T, 3), draw(V, 3)
    a, b = draw(2, H).float().requires_grad_(), (draw(V, 2).float() / 8).requires_grad_()
    loss = ct.linear_distill(h, ct.Head(w, lora=(a, b, 2.0)), th, tw, mode=mode, reduction='sum').loss
    (loss * 2.0 ** -30).backward()
    z = h.double() @ (w.double() + 2 * b.double() @ a.double()).t()
    y = (th.double() @ tw.double().t()).log_softmax(-1)
    want = torch.autograd.grad((y.exp() * (y - z.log_softmax(-1))).sum() * 2.0 ** -30, (a, b))
    for have, wanted in zip((a.grad, b.grad), want):
        assert (have != have.to(dtype).float()).any()
        # each of the logits, of their gradients and of two factors is rounded once
        assert float((have - wanted).norm() / wanted.norm()) < 8 * torch.finfo(dtype).eps


def test_an_empty_batch_may_lie_anyhow():
    h = torch.randn(0, 16)[:, ::2].requires_grad_()
    for mode in MODES:
        loss = ct.linear_distill(h, torch.randn(V, 8), torch.randn(0, 6)[:, ::2], torch.randn(V, 3), mode=mode, reduction='sum').loss
        loss.backward()
        assert float(loss.detach()) == 0 and h.grad.shape == (0, 8)
