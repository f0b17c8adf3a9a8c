# SPDX-License-Identifier: Apache-2.0
"""The drop-ins against plain PyTorch on the whole vocabulary and the whole sequence."""
import itertools

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import colobridge as cb  # noqa: E402
from colobridge import compat  # noqa: E402
from world import meet  # noqa: E402

V = 12
# f32 arithmetic on logits below 20: some 24 + 2 log V roundings of 2^-24 * 20 each, ~ 4e-5
NEAR = dict(rtol=1e-4, atol=1e-4)


def case(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, V, generator=rng) * 3, torch.randint(0, V, shape, generator=rng),
            torch.randn(*shape, generator=rng))


def plain_logp(z, t, dtype=torch.float32):
    """A target that no rank holds: 0, with the gradient -p."""
    z, held = z.to(dtype), (t >= 0) & (t < V)
    x = z.gather(-1, t.clamp(0, V - 1).unsqueeze(-1)).squeeze(-1)
    lse = torch.logsumexp(z, -1)
    return torch.where(held, x - lse, lse.detach() - lse)


def half(rank, size):
    each = V // size
    return rank * each, (rank + 1) * each


def parity(rank, size, group, dtype, odd):
    z, t, g = case(2, 9)
    if odd:
        t[0, :5] = torch.tensor([-100, -1, V, V + 100, 2**40])
    lo, hi = half(rank, size)
    z = z.to(dtype)
    whole = z.float().clone().requires_grad_()
    want = plain_logp(whole, t)
    (want * g).sum().backward()
    bits = None
    for chunk in (None, 1, 7, 16, 64, 512):
        mine = z[..., lo:hi].clone().requires_grad_()
        if chunk is None:
            got = compat.DistributedLogprob.apply(mine, t, lo, hi, group, False)
        else:
            got = compat.ChunkedDistributedLogprob.apply(mine, t, lo, hi, chunk, group)
        assert got.dtype == torch.float32 and got.shape == t.shape
        torch.testing.assert_close(got, want.detach(), **NEAR)
        (got * g).sum().backward()
        near = dict(rtol=2**-8, atol=1e-3) if dtype == torch.bfloat16 else NEAR
        torch.testing.assert_close(mine.grad.float(), whole.grad[..., lo:hi], **near)
        both = got.detach(), mine.grad
        assert bits is None or all(torch.equal(a, b) for a, b in zip(bits, both))
        bits = both
    assert odd == bool((bits[0][0, :5] == 0).all())
    for cls, args in ((compat.DistributedLogprob, (group, True)),
                      (compat.ChunkedDistributedLogprob, (7, group, True))):
        got = cls.apply(mine, t, lo, hi, *args)
        assert not got.requires_grad and torch.equal(got, bits[0])


def test_logprobs_of_hidden_states_are_0_where_no_rank_holds_the_target():
    _, t, g = case(2, 9)
    rng = torch.Generator().manual_seed(8)
    h, w = torch.randn(2, 9, 5, generator=rng), torch.randn(V, 5, generator=rng)
    t[0, ::4], t[1, 3] = -100, V
    held = (t >= 0) & (t < V)
    whole = [x.double().clone().requires_grad_() for x in (h, w)]
    lp = torch.log_softmax(whole[0] @ whole[1].t(), -1)
    want = torch.where(held, lp.gather(-1, t.clamp(0, V - 1)[..., None])[..., 0], 0.)
    x = torch.where(held, (whole[0] * whole[1][t.clamp(0, V - 1)]).sum(-1), 0.)  # such a target has the gradient -p
    ((x - torch.logsumexp(whole[0] @ whole[1].t(), -1)) * g).sum().backward()

    def rank(world):
        lo, hi = half(world.rank, world.size)
        mine = [x.clone().requires_grad_() for x in (h, w[lo:hi])]
        got = compat.FusedLinearChunkedDistributedLogprob.apply(*mine, t, lo, hi, 4, world)
        assert bool((got[~held] == 0).all())
        torch.testing.assert_close(got.double(), want.detach(), **NEAR)
        (got * g).sum().backward()
        torch.testing.assert_close(mine[1].grad.double(), whole[1].grad[lo:hi], **NEAR)
        quiet = compat.FusedLinearChunkedDistributedLogprob.apply(*mine, t, lo, hi, 4, world, True)
        assert not quiet.requires_grad and torch.equal(quiet, got)
        return mine[0].grad.double()
    for size in (1, 2):
        torch.testing.assert_close(sum(cb.run_threads(size, rank)), whole[0].grad, **NEAR)


def together(rank, size, group, dtype):
    """One backward through logp and entropy of the same logits, for every size of chunks."""
    z, t, g = case(2, 300)
    g_entropy = g.flip(1)
    t[0, ::7] = -100
    lo, hi = half(rank, size)
    z = z.to(dtype)
    whole = z.double().clone().requires_grad_()
    lp = torch.log_softmax(whole, -1)
    want = plain_logp(whole, t, torch.float64), -(lp.exp() * lp).sum(-1)
    (want[0] * g + want[1] * g_entropy).sum().backward()
    # bf16: each of the two gradients is rounded once, and their sum
    near = dict(rtol=2**-7, atol=2**-7 * float(whole.grad.abs().max())) if dtype == torch.bfloat16 else NEAR
    for chunk in (1, 7, 16, 64, 512, 601, 10**6):
        leaf = z[..., lo:hi].clone().requires_grad_()
        mine = leaf * 1
        logp = compat.ChunkedDistributedLogprob.apply(mine, t, lo, hi, chunk, group)
        entropy = compat.vocab_parallel_entropy(mine, chunk, tp_group=group)
        assert logp.dtype == torch.float32 and entropy.dtype == dtype
        torch.testing.assert_close(logp.double(), want[0].detach(), **NEAR)
        torch.testing.assert_close(entropy.double(), want[1].detach(), **near)
        (logp * g + entropy * g_entropy).sum().backward()
        near_grad = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else near
        torch.testing.assert_close(leaf.grad.double(), whole.grad[..., lo:hi], **near_grad)
        assert torch.equal(mine, z[..., lo:hi]) and mine._version == 0


def together_on_processes(rank, dtype):
    together(rank, 4, dist.group.WORLD, dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64])
def test_logp_and_entropy_of_the_same_logits_in_one_backward_agree_with_fp64(world, dtype):
    world.run(together_on_processes, dtype)
    cb.run_threads(2, lambda w: together(w.rank, 2, w, dtype))
    together(0, 1, cb.Comm.self(), dtype)


def on_processes(rank, dtype, odd):
    parity(rank, 4, dist.group.WORLD, dtype, odd)


@pytest.mark.parametrize('odd', [False, True])
def test_chunked_and_unchunked_logprobs_agree_with_pytorch(world, odd):
    for dtype in (torch.float32, torch.bfloat16):
        world.run(on_processes, dtype, odd)
        parity(0, 1, None, dtype, odd)
        cb.run_threads(2, lambda w: parity(w.rank, 2, w, dtype, odd))


def zigzag(tokens, cp, rank):
    """A cp rank's part of the last axis, written as chunks."""
    chunks = tokens.chunk(2 * cp, dim=-1)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]], dim=-1)


def dense(rank, seq, padded):
    """tp = {0,1}, {2,3}; cp = {0,2}, {1,3}."""
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, cp, me = groups[rank // 2], groups[2 + rank % 2], rank // 2
    z, tokens, _ = case(2, padded)
    tokens = tokens[:, :seq]
    g = torch.randn(2, seq - 1, generator=torch.Generator().manual_seed(5))
    lo, hi = half(rank % 2, 2)
    whole = z.clone().requires_grad_()
    rolled = F.pad(tokens.roll(-1, -1), (0, padded - seq))
    want = plain_logp(whole, rolled)[:, :seq - 1]
    (want * g).sum().backward()
    for chunk in (None, 3):
        part = zigzag(z.movedim(1, -1), 2, me).movedim(-1, 1)[..., lo:hi].clone().requires_grad_()
        got = compat.from_parallel_logits_to_logprobs(part, tokens, lo, hi, tp, cp_group=cp,
                                                      chunk_size=chunk)
        assert got.shape == (2, seq - 1)
        torch.testing.assert_close(got, want.detach(), **NEAR)
        # the sum over cp: rank 0 brings a third of the gradient, rank 1 the rest
        (got * g * (1 / 3 if me == 0 else 2 / 3)).sum().backward()
        grad = zigzag(whole.grad.movedim(1, -1), 2, me).movedim(-1, 1)[..., lo:hi]
        torch.testing.assert_close(part.grad, grad, **NEAR)
    full = z[..., lo:hi].clone().requires_grad_()
    got = compat.from_parallel_logits_to_logprobs(full, tokens, lo, hi, tp, True)
    assert not got.requires_grad
    torch.testing.assert_close(got, want.detach(), **NEAR)


@pytest.mark.parametrize('seq, padded', [(8, 8), (6, 8), (12, 12)])
def test_dense_batches_over_context_parallel_ranks(world, seq, padded):
    world.run(dense, seq, padded)


LENGTHS, PADDED = [3, 8, 5], [4, 8, 8]


def packed(rank):
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, cp, me = groups[rank // 2], groups[2 + rank % 2], rank // 2
    total, width = sum(PADDED), 9
    z, tokens, _ = case(1, total)
    cu = torch.tensor([0] + list(itertools.accumulate(PADDED)))
    lo, hi = half(rank % 2, 2)
    whole = z.clone().requires_grad_()
    rows, masked, subs = [], [], []
    mask = torch.zeros(3, width, dtype=torch.bool)
    for i, n in enumerate(LENGTHS):
        mask[i, width - n:] = True  # tokens at the right
        begin, end = int(cu[i]), int(cu[i + 1])
        want = plain_logp(whole[0, begin:end - 1], tokens[0, begin + 1:end])
        rows.append(F.pad(want, (0, width - 1 - len(want)))[:width - 1])
        masked.append(F.pad(want[:n - 1], (width - n, 0)))
        subs.append(want[:n - 1])
    none = lambda n: torch.zeros(n)  # noqa: E731
    # 3 tokens in columns 0-2, padded to 4, then 8 in 4-11; row 1: 5 in 0-4
    padded = torch.stack([torch.cat([subs[0], none(2), subs[1], none(3)]), torch.cat([subs[2], none(10)])])
    expected = {'rows': torch.stack(rows), 'masked': torch.stack(masked), 'subs': padded}
    more = {'rows': {}, 'masked': {'attention_mask': mask}, 'subs': {'sub_seq_lengths': [[3, 8], [5]]}}
    pieces = [zigzag(z[0, int(a):int(b)].t(), 2, me).t() for a, b in zip(cu, cu[1:])]
    for name, want in expected.items():
        g = torch.randn(want.shape, generator=torch.Generator().manual_seed(6))
        whole.grad = None
        (want * g).sum().backward(retain_graph=True)
        mine = torch.cat([zigzag(whole.grad[0, int(a):int(b)].t(), 2, me).t()
                          for a, b in zip(cu, cu[1:])])[:, lo:hi]
        part = torch.cat(pieces)[:, lo:hi].unsqueeze(0).clone().requires_grad_()
        got = compat.from_parallel_logits_to_logprobs_packed_sequences(
            part, tokens, cu, want.shape[1] + 1, lo, hi, tp, cp_group=cp,
            chunk_size=4, **more[name])
        torch.testing.assert_close(got, want.detach(), **NEAR)
        (got * g).sum().backward()  # the whole loss on every cp rank: no sum
        torch.testing.assert_close(part.grad[0], mine, **NEAR)
        alone = compat.from_parallel_logits_to_logprobs_packed_sequences(
            z[..., lo:hi], tokens, cu, want.shape[1] + 1, lo, hi, tp, **more[name])
        assert torch.equal(alone, got)


def test_packed_sequences_over_context_parallel_ranks(world):
    world.run(packed)


def test_sub_sequences_start_where_the_padded_ones_before_them_end():
    z, tokens, _ = case(1, 12)
    got = compat.from_parallel_logits_to_logprobs_packed_sequences(
        z, tokens, torch.tensor([0, 4, 12]), 13, 0, V, None, sub_seq_lengths=[[3, 5]])
    logp = plain_logp(z[0, :-1], tokens[0, 1:])
    want = torch.zeros(1, 12)
    for column in (0, 1, 4, 5, 6, 7):  # tokens in 0-2 and 4-8
        want[0, column] = logp[column]
    torch.testing.assert_close(got, want, **NEAR)


def test_sub_sequences_are_where_their_lengths_say_and_no_mask():
    # SkyRL's function ignores attention_mask together with sub_seq_lengths: 4 columns from 0 on and 7 from 8 on.
    for width, mask in ((16, [1] * 16), (10, [1] * 5 + [0] * 3 + [1] * 2), (16, [0] * 16)):
        wanted = [column for column in (*range(4), *range(8, 15)) if column < width - 1]
        for fn, source in ((compat.from_parallel_logits_to_logprobs_packed_sequences, (torch.zeros(1, 16, 4),)),
                           (compat.from_parallel_hidden_to_logprobs_packed_sequences,
                            (torch.zeros(1, 16, 3), torch.zeros(4, 3)))):
            got = fn(*source, torch.zeros(1, 16, dtype=torch.int64), torch.tensor([0, 8, 16]), width, 0, 4, None,
                     attention_mask=torch.tensor([mask]), sub_seq_lengths=[[5, 8]])
            want = torch.zeros(1, width - 1)
            want[0, wanted] = -torch.tensor(4.0).log()
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def tensor_parallel(rank):
    z, t, g = case(5, 3)
    lo, hi = half(rank, 4)
    with pytest.raises(RuntimeError, match='set_tensor_parallel_group'):
        compat.vocab_parallel_entropy(z[..., lo:hi])
    compat.set_tensor_parallel_group(dist.group.WORLD)
    whole = z.clone().requires_grad_()
    lp = torch.log_softmax(whole, -1)
    h = -(lp.exp() * lp).sum(-1)
    (h * g).sum().backward()
    for chunk in (None, 1, 4):
        mine = z[..., lo:hi].clone().requires_grad_()
        got = compat.vocab_parallel_entropy(mine, chunk)
        torch.testing.assert_close(got, h.detach(), **NEAR)
        (got * g).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad[..., lo:hi], **NEAR)
    odd = t.clone()
    odd[0] = torch.tensor([-100, V, -1])
    for smoothing, target in itertools.product((0.0, 0.2), (t, odd)):
        whole.grad = None
        top = whole.max(-1).values
        held = (target >= 0) & (target < V)
        x = whole.gather(-1, target.clamp(0, V - 1).unsqueeze(-1)).squeeze(-1)
        # x_t := M where no rank holds it, a constant: the gradient is p alone
        nll = torch.logsumexp(whole, -1) - torch.where(held, x, top.detach())
        eps = smoothing * V / (V - 1)
        want = (1 - eps) * nll - eps * torch.log_softmax(whole, -1).mean(-1)
        (want * g).sum().backward()
        mine = z[..., lo:hi].clone().requires_grad_()
        got = compat.vocab_parallel_cross_entropy(mine, target, smoothing)
        torch.testing.assert_close(got, want.detach(), **NEAR)
        (got * g).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad[..., lo:hi], **NEAR)
    compat.shared._tensor_parallel.clear()


def test_entropy_and_cross_entropy(world):
    world.run(tensor_parallel)


def own_columns(rank):
    """Megatron-LM's label smoothing, in its own words: ranks have different losses."""
    z, t, g = case(5, 3)
    lo, hi = half(rank, 4)
    n, smoothing = hi - lo, 0.1
    whole = z.clone().requires_grad_()
    log_probs = torch.log_softmax(whole, -1)
    e = smoothing * n / (n - 1)
    want = (1 - e) * -log_probs.gather(-1, t.unsqueeze(-1)).squeeze(-1) - e * log_probs[..., lo:hi].mean(-1)
    (want * g).sum().backward()
    mine = z[..., lo:hi].clone().requires_grad_()
    got = compat.vocab_parallel_cross_entropy(mine, t, smoothing, dist.group.WORLD, local_smoothing=True)
    torch.testing.assert_close(got, want.detach(), **NEAR)
    (got * g).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[..., lo:hi], **NEAR)
    return got.detach()


def test_local_smoothing_is_over_each_ranks_own_columns(world):
    losses = world.run(own_columns)
    assert not torch.allclose(losses[0], losses[3])


def plain_head(hidden, weight, bias, labels, scale, cap, items):
    """loss, n_correct, entropy_sum, n_valid by PyTorch, in f64"""
    z = (hidden @ weight.t() + (0 if bias is None else bias)) * scale
    z = cap * torch.tanh(z / cap) if cap else z
    flat, t = z.reshape(-1, z.shape[-1]), labels.reshape(-1).long()
    keep = t != -100
    flat, t = flat[keep], t[keep]
    lp = torch.log_softmax(flat, -1)
    return (F.nll_loss(lp, t, reduction='sum') / (max(len(t), 1) if items is None else items),
            int((flat.argmax(-1) == t).sum()), -(lp.exp() * lp).sum(), len(t))


def head_case(dtype=torch.float32):
    """hidden [2, 9, 5], weight, bias in @dtype, labels with ignored ones"""
    rng = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, generator=rng).to(dtype) for n in ((2, 9, 5), (V, 5), (V,)))
    labels = torch.randint(0, V, (2, 9), generator=rng)
    labels[0, 3], labels[1, 0] = -100, -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize('chunk', [1, 3, 100])
def test_head_and_loss_in_chunks(chunk):
    # bf16: inputs are rounded before both sides, gradients once per addend's sum and once scaled
    for dtype, near in ((torch.float64, dict(rtol=1e-6, atol=1e-6)), (torch.float32, NEAR),
                        (torch.bfloat16, dict(rtol=2e-2, atol=2e-2))):
        hidden, weight, bias, labels = head_case(dtype)
        for scale, cap, items, shifted, has_bias in (
                (1.0, None, None, False, True), (0.7, 4.0, 30, True, True), (2.0, None, None, True, False),
                (1.0, 3.0, torch.tensor(7), False, True), (1.0, None, 0.25, True, True),
                (1.0, None, torch.tensor(0.25), True, False)):
            leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
            wide = [x.double().requires_grad_() for x in (hidden, weight, bias)]
            if not has_bias:
                leaves[2] = wide[2] = None
            h, t = (wide[0], labels) if shifted else (wide[0][:, :-1], labels[:, 1:])
            want = plain_head(h, wide[1], wide[2], t, scale, cap, items if items is None else float(items))
            loss, right, entropy, valid = compat.chunked_cross_entropy_loss(
                leaves[0], leaves[1], chunk, **{'shift_labels' if shifted else 'labels': labels},
                num_items_in_batch=items, logit_scale=scale, final_logit_softcapping=cap,
                lm_head_bias=leaves[2])
            assert loss.dtype == right.dtype == entropy.dtype == torch.float32 and not right.requires_grad
            torch.testing.assert_close(loss.double(), want[0].detach(), rtol=1e-4, atol=1e-4)
            assert (int(right), int(valid)) == (want[1], want[3])
            torch.testing.assert_close(entropy.double(), want[2].detach(), rtol=1e-4, atol=1e-4)
            given, wide = [x for x in leaves if x is not None], [x for x in wide if x is not None]
            for by_loss, by_entropy in ((2, None), (None, -0.3), (2, -0.3)):
                got, true = (sum(x * by for x, by in ((pair[0], by_loss), (pair[1], by_entropy)) if by is not None)
                             for pair in ((loss, entropy), (want[0], want[2])))
                expected = torch.autograd.grad(true, wide, retain_graph=True)
                for _ in range(2):  # twice, which mode "loss" of linear_nll() would not do
                    for a, b in zip(torch.autograd.grad(got, given, retain_graph=True), expected):
                        torch.testing.assert_close(a.double(), b, **near)


def test_head_and_loss_of_labels_and_shift_labels_take_shift_labels():
    hidden, weight, bias, labels = head_case()
    shifted = labels.flip(1)
    want = compat.chunked_cross_entropy_loss(hidden, weight, 3, None, shifted, lm_head_bias=bias)
    # A context-parallel rank has labels of the whole sequence, and shift_labels of its part.
    for both in (labels, labels.repeat(1, 2)):
        got = compat.chunked_cross_entropy_loss(hidden, weight, 3, both, shifted, lm_head_bias=bias)
        assert all(map(torch.equal, got, want))
    other = compat.chunked_cross_entropy_loss(hidden, weight, 3, labels, lm_head_bias=bias)
    assert not torch.equal(other[0], want[0])


@pytest.mark.parametrize('trains', list(itertools.product((False, True), repeat=3)))
def test_entropy_of_the_head_has_the_gradients_that_are_asked_for(trains):
    hidden, weight, bias, labels = head_case(torch.float64)
    leaves = [x.clone().requires_grad_(on) for x, on in zip((hidden, weight, bias), trains)]
    entropy = compat.chunked_cross_entropy_loss(*leaves[:2], 3, labels, lm_head_bias=leaves[2])[2]
    assert entropy.requires_grad == any(trains)
    want = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    plain_head(want[0][:, :-1], *want[1:], labels[:, 1:], 1.0, None, None)[2].backward()
    if any(trains):
        entropy.backward()
        for x, true, on in zip(leaves, want, trains):
            assert (x.grad is not None) == on
            if on:
                torch.testing.assert_close(x.grad, true.grad, rtol=1e-6, atol=1e-6)


def test_head_and_loss_let_go_of_gradients_after_backward():
    hidden, weight, bias, labels = head_case()
    leaf = weight.clone().requires_grad_()
    loss = compat.chunked_cross_entropy_loss(hidden, leaf, 3, labels)[0]
    loss.backward()
    with pytest.raises(RuntimeError, match='second time'):
        loss.backward()


def test_head_and_loss_of_few_tokens_multiply_few(monkeypatch):
    prepare, most = compat.trl.prepare, []

    def spied(*args):
        most.append(args[2][0].max_valid)
        return prepare(*args)
    monkeypatch.setattr(compat.trl, 'prepare', spied)
    hidden, weight, bias, _ = head_case()
    tokens = torch.full((1, 320), -100)
    tokens[0, 5::40] = 1
    rows = torch.randn(1, 320, hidden.shape[-1])
    rows[0, 3] = float('nan')  # of an ignored token
    want = plain_head(rows[:, 5::40].double(), weight.double(), None, tokens[:, 5::40], 1.0, None, None)
    for _ in range(2):
        loss, right, entropy, valid = compat.chunked_cross_entropy_loss(rows, weight, 16, shift_labels=tokens)
        torch.testing.assert_close(loss.double(), want[0], rtol=1e-4, atol=1e-4)
        assert (int(right), int(valid)) == (want[1], want[3])
    assert want[3] == 8 and most == [20, 20]  # a sixteenth of 320


def test_head_and_loss_of_what_is_frozen_or_not_there():
    hidden, weight, bias, labels = head_case()
    want = plain_head(*(x.double() for x in (hidden[:, :-1], weight, bias)), labels[:, 1:], 1.0, None, None)
    for trains in itertools.product((False, True), repeat=3):
        leaves = [x.clone().requires_grad_(on) for x, on in zip((hidden, weight, bias), trains)]
        args = leaves[0], leaves[1], 3, labels.int()
        loss, right, _, valid = compat.chunked_cross_entropy_loss(*args, lm_head_bias=leaves[2])
        assert loss.requires_grad == any(trains) and (int(right), int(valid)) == (want[1], want[3])
        torch.testing.assert_close(loss.double(), want[0], rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            quiet = compat.chunked_cross_entropy_loss(*args, lm_head_bias=leaves[2])[0]
        assert torch.equal(quiet, loss.detach()) and not quiet.requires_grad
        if any(trains):
            loss.backward()
            assert [x.grad is not None for x in leaves] == list(trains)
    leaves = hidden.bfloat16().requires_grad_(), weight.clone().requires_grad_()  # two dtypes
    loss = compat.chunked_cross_entropy_loss(*leaves, 4, labels)[0]
    loss.backward()
    assert [x.grad.dtype for x in leaves] == [torch.bfloat16, torch.float32]
    for nothing in (torch.full((2, 9), -100), labels[:, :1]):
        some = hidden[:, :nothing.shape[1]].clone().requires_grad_()
        loss, right, entropy, valid = compat.chunked_cross_entropy_loss(some, weight, 4, nothing)
        loss.backward()
        assert [float(x) for x in (loss, right, entropy, valid)] == [0] * 4 and not some.grad.any()
    labels[1, 1] = V
    with pytest.raises(ValueError, match=r'1 labels are outside of \[0, 12\)'):
        compat.chunked_cross_entropy_loss(hidden, weight, 3, labels)


def wrong_memory(rank):
    z, _, _ = case(2, 4)
    lo, hi = half(rank, 4)
    for megabytes in (0, -1):
        with pytest.raises(ValueError if rank == 2 else RuntimeError,
                           match='chunk_memory_mb is %d, expected a number above 0' % megabytes):
            compat.vocab_parallel_entropy(z[..., lo:hi], chunk_memory_mb=megabytes if rank == 2 else 512,
                                          tp_group=dist.group.WORLD)
        compat.vocab_parallel_entropy(z[..., lo:hi], tp_group=dist.group.WORLD)
        meet()


def test_one_ranks_chunk_memory_below_1_is_every_ranks_error(world):
    world.run(wrong_memory)


def one_wrong(rank):
    z, t, _ = case(2, 4)
    lo, hi = half(rank, 4)
    mine, group = z[..., lo:hi], dist.group.WORLD
    cu = torch.tensor([0, 8])
    for bad, good in ((lambda: compat.from_parallel_logits_to_logprobs(mine, t[0], lo, hi, group),
                       lambda: compat.from_parallel_logits_to_logprobs(mine, t, lo, hi, group)),
                      (lambda: compat.from_parallel_logits_to_logprobs_packed_sequences(
                          mine, t, cu, 8, lo, hi, group),
                       lambda: compat.from_parallel_logits_to_logprobs_packed_sequences(
                           mine.reshape(1, 8, -1), t.reshape(1, 8), cu, 8, lo, hi, group))):
        with pytest.raises(ValueError if rank == 2 else RuntimeError, match='expected .(B|1), '):
            bad() if rank == 2 else good()
        good()
        meet()


def test_one_ranks_bad_shape_is_every_ranks_error(world):
    world.run(one_wrong)


def test_refusals():
    z, t, _ = case(2, 4)
    for call, words in (
            (lambda: compat.DistributedLogprob.apply(z, t[0], 0, V, None), r'target is \[4\]'),
            (lambda: compat.ChunkedDistributedLogprob.apply(z, t, 0, V, -3, None), 'chunk_size is -3'),
            (lambda: compat.from_parallel_logits_to_logprobs(z, t[:, :3].repeat(1, 2), 0, V, None), 'S divisible'),
            (lambda: compat.from_parallel_logits_to_logprobs_packed_sequences(
                z, t, torch.tensor([0, 8]), 8, 0, V, None), 'expected .1, T / cp, Vl.'),
            (lambda: compat.chunked_cross_entropy_loss(z, z[0], 0, t), 'chunk_size is 0'),
            (lambda: compat.chunked_cross_entropy_loss(z, z[0], 2), 'At least one of labels and shift_labels.*found neither')):
        with pytest.raises(ValueError, match=words):
            call()


def as_zero_3(w):
    """@w as a parameter of DeepSpeed's ZeRO-3 leaves it: no elements; all that the only rank of its group has in ds_tensor"""
    held = torch.nn.Parameter(torch.empty(0, dtype=w.dtype))
    held.ds_tensor, held.ds_shape, held.ds_process_group = w.detach().reshape(-1).clone(), w.shape, cb.Comm.self()
    return held


@pytest.mark.parametrize('size', (1, 3))
def test_a_head_of_zero_3_is_cut_by_the_rows_that_its_shards_have(size):
    rng = torch.Generator().manual_seed(4)
    each, tokens, width = 5, 6, 5
    h, w = (torch.randn(*n, generator=rng, dtype=torch.float64) for n in ((1, tokens, 4), (size * each, 4)))
    labels, cu = torch.randint(0, size * each, (1, tokens), generator=rng), torch.tensor([0, tokens])
    lp = torch.log_softmax(h @ w.T, -1)
    want, entropy = lp.gather(-1, labels[..., None]).squeeze(-1)[0], -(lp.exp() * lp).sum(-1)[0]

    def called(world):
        held = as_zero_3(w[world.rank * each:(world.rank + 1) * each])
        logp, got = compat.linear_cross_entropy(h, held, labels, dist_process_group=world)
        of_rows, of_packed = entropy[:width - 1].mean(), compat.from_parallel_hidden_to_entropy_packed_sequences(
            h, held, cu, width, width - 1, None, None, None, world)
        for a, b in ((logp, want), (got, entropy), (of_packed[0], of_rows), (of_packed[1], of_rows)):
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)
    cb.run_threads(size, called)
