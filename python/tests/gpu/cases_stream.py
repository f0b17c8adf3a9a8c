# SPDX-License-Identifier: Apache-2.0
"""Streams, graphs, memory and waiting; and a whole training step."""
import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import colobridge
import colobridge.torch as ct
from colobridge import Partition, Segments

sys.path.append(str(Path(__file__).resolve().parents[1]))
from ragged_case import PAIRS, TEXT, Case  # noqa: E402
from common import H, V, Skip, coded, cut, layouts, leaf, linear_case, logits_case, me, samples_of, size, \
    transports


def steps():
    """name -> (static inputs, fn of them that returns outputs and gradients)"""
    lo, hi = cut(V)
    z, t, g = logits_case()
    h, w, _ = linear_case()
    src, dst = layouts()[0]
    bridges = [ct.Bridge(src, dst, group=dist.group.WORLD, **options) for options, _ in transports()]
    summed = ct.Bridge(*layouts()[-2 if size() > 1 else 0], group=dist.group.WORLD)
    x = samples_of(src, coded(torch.float32)).clone()
    # an image of 5 rows from each rank, in a sequence of 8 positions for each
    n = size()
    ragged = ct.RaggedBridge('dp=%d' % n, 'cp=%d' % n, group=dist.group.WORLD)
    segments = Segments([5] * n, src=range(n), seq=range(n), pos=[2] * n, seq_len=[8 * n] * n, seq_dp=[0] * n)
    rows, text = coded(torch.float32)[0, :5].clone(), coded(torch.float32, 1, 8 * n * n)[0]
    g0 = g[0].float()

    # two packed sequences, whose rows move to another cut and get rows in front of them
    cu = [0, 32 * n, 48 * n]
    zigzag = colobridge.Packing(cu, split='zigzag')
    packed = ct.PackedBridge('cp=%d' % n, 'cp=%d' % n, group=dist.group.WORLD)
    halo = zigzag.with_split('contiguous').with_halo(5)
    z16 = torch.randn(48, 8, generator=torch.Generator().manual_seed(me())).bfloat16().cuda()

    def with_grad(run, *inputs):
        y = run(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y) * 2)]

    def loss(z):
        return ct.logprob(z, t, tp_group=dist.group.WORLD, vocab=(lo, V)) * g0

    def linear(h, w, mode):
        head = ct.Head(w, tp_group=dist.group.WORLD, vocab=(lo, V))
        return ct.linear_logprob(h, head, t, mode=mode) * g0

    def nll(z):
        return ct.nll(z, t, reduce_group=dist.group.WORLD).loss

    def linear_nll(h, w):
        return ct.linear_nll(h, w, target=t, reduce_group=dist.group.WORLD).loss

    def there_and_back(a):
        return ct.unshard(ct.shard(a, part), part)
    part = Partition(64, cp=2, cp_rank=1)
    return {
        'shard': ([leaf(torch.randn(3, 64, H, device='cuda'))], lambda a: with_grad(there_and_back, a)),
        'next_token': ([100 * torch.randn(3, 64, device='cuda')],
                       lambda a: [ct.next_token(a.long(), part)]),
        'bridge by NCCL': ([leaf(x)], lambda a: with_grad(bridges[0], a)),
        'bridge': ([leaf(x)], lambda a: with_grad(bridges[1], a)),
        'bridge with blocks': ([leaf(x)], lambda a: with_grad(bridges[2], a)),
        'bridge that sums': ([leaf(x)], lambda a: with_grad(summed, a)),
        'ragged bridge': ([leaf(rows)], lambda a: with_grad(lambda x: ragged(x, segments), a)),
        'ragged bridge into text': ([leaf(rows), leaf(text)], lambda a, b: with_grad(
            lambda x, t: ragged(x, segments, into=t * 1), a, b)),
        'relayout': ([leaf(z16)], lambda a: with_grad(
            lambda x: ct.relayout(x, cu, 'zigzag', 'contiguous', group=dist.group.WORLD), a)),
        'halo': ([leaf(z16)], lambda a: with_grad(lambda x: ct.halo(x, cu, 3, split='zigzag', group=dist.group.WORLD)[0], a)),
        'another cut with a halo': ([leaf(z16)], lambda a: with_grad(lambda x: packed(x, zigzag, halo), a)),
        'logprob': ([leaf(z[:, lo:hi])], lambda a: with_grad(loss, a)),
        'nll': ([leaf(z)], lambda a: with_grad(nll, a)),  # ranks with tokens of their own
        'linear logprob': ([leaf(h), leaf(w[lo:hi])],
                           lambda a, b: with_grad(lambda p, q: linear(p, q, 'logprob'), a, b)),
        'linear keep': ([leaf(h), leaf(w[lo:hi])],
                        lambda a, b: with_grad(lambda p, q: linear(p, q, 'keep'), a, b)),
        'linear_nll': ([leaf(h), leaf(w)], lambda a, b: with_grad(linear_nll, a, b))}


def case_cuda_graphs_replay_with_other_values():
    for name, (inputs, run) in steps().items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*inputs)
        for rep in range(2):
            with torch.no_grad():
                for x in inputs:
                    x.mul_(0.5 + rep)
            graph.replay()
            torch.cuda.synchronize()
            got = [o.clone() for o in out]
            for a, b in zip(got, run(*inputs)):
                assert torch.equal(a, b), name
        dist.barrier()


def case_a_graph_of_a_bridge_is_replayed_a_thousand_times():
    for src, dst in layouts():
        carry = ct.Bridge(src, dst, group=dist.group.WORLD, buffers=1)
        whole, cp = coded(torch.float32), 2 if 'cp=2' in dst else 1
        x, up = leaf(samples_of(src, whole)), samples_of(dst, whole).clone()

        def step():
            y = carry(x)
            return y.detach(), torch.autograd.grad(y, x, up)[0]

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        wrong = torch.zeros((), dtype=torch.int64, device='cuda')
        for rep in range(1000):
            with torch.no_grad():
                x.copy_(samples_of(src, whole) + rep)
                up.copy_(samples_of(dst, whole) + 2 * rep)
            graph.replay()
            wrong += (out[0] != samples_of(dst, whole) + rep).sum()
            wrong += (out[1] != (samples_of(src, whole) + 2 * rep) * cp).sum()
            if rep % 100 == 0:  # an eager call between replays, whose block is no graph's
                y = carry(x)
                wrong += (y.detach() != samples_of(dst, whole) + rep).sum()
        assert int(wrong) == 0, (src, dst)
        dist.barrier()
        del graph, out, y
        carry.destroy()


def case_a_graph_of_a_ragged_bridge_follows_its_inputs():
    if size() not in PAIRS:
        raise Skip('cases are for 1, 2 or 4 GPUs')
    for seed, (options, _), merged in itertools.product(range(6), transports()[:2], (False, True)):
        case = Case(seed, size())
        carry = ct.RaggedBridge(*case.layouts(), group=dist.group.WORLD, output=case.output, grad=case.grad,
                          **options)
        tables, mine = case.tables(), case.source(me())
        segments, x = Segments(**tables), leaf(case.values(4)[mine].cuda())
        text = leaf(torch.full((case.axis(me()), 4), TEXT, dtype=torch.float64, device='cuda'))
        d_y = case.d_y(me(), case.y(me(), case.values(4), text.detach().cpu() if merged else None), merged)
        up, inputs = d_y.cuda(), [x, text] if merged else [x]

        def step(segments):
            y = carry(x, segments, into=text * 1 if merged else None)
            return [y.detach(), *torch.autograd.grad(y, inputs, up)]

        def others(k):
            """Tables of the same rows; k more sequences have no positions."""
            return Segments(**dict(tables, seq_len=tables['seq_len'] + [0] * k, seq_dp=tables['seq_dp'] + [0] * k))

        def replays(rep):
            G, before = case.values(4, rep), text.detach().cpu() * rep
            with torch.no_grad():
                x.copy_(G[mine]), up.copy_(d_y * rep), text.copy_(before)
            graph.replay()
            torch.cuda.synchronize()
            before = before.requires_grad_()
            y = case.y(me(), G, before if merged else None)
            want = [y.detach(), case.d_G(merged, 4, rep)[mine]]
            if merged:  # of the text: that of index_copy
                want += torch.autograd.grad(y, before, d_y * rep)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(out, want)), (seed, options, merged, rep, out, want)
            return [o.clone() for o in out]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(segments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(segments)
        for rep in (1, 2):
            got = replays(rep)
            assert all(map(torch.equal, got, step(segments)))
        for k in range(1, 10):  # more tables than are kept
            assert all(map(torch.equal, got, step(others(k))))
        replays(3)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                step(segments)
            raise AssertionError('a capture had tables that are not kept')
        except RuntimeError as why:
            assert 'a capture has new tables: found Segments(' in str(why), why
        replays(4)
        assert all(map(torch.equal, replays(5), step(segments)))
        dist.barrier()
        del graph, out
        carry.destroy()


def case_the_current_stream_is_the_one():
    for name, (inputs, run) in steps().items():
        want = run(*inputs)
        torch.cuda.synchronize()
        values = [x.detach().clone() for x in inputs]
        with torch.no_grad():
            for x in inputs:
                x.zero_()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(2e8))  # 0.1 s: work on another stream would read the zeros
            with torch.no_grad():
                for x, v in zip(inputs, values):
                    x.copy_(v)
            got = run(*inputs)
        side.synchronize()
        for a, b in zip(got, want):
            assert torch.equal(a, b), name


def case_nothing_waits_for_the_gpu():
    for name, (inputs, run) in steps().items():
        for _ in range(2):
            run(*inputs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode('error')
        try:
            run(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode('default')


def case_the_host_is_ahead_of_the_gpu():
    """The library's own waits, which torch does not see: the GPU sleeps while the host goes on."""
    for name, (inputs, run) in steps().items():
        for _ in range(2):
            run(*inputs)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(int(2e9))  # 1 s
        run(*inputs)
        done.record()
        assert not done.query(), name + ': the host waited'
        torch.cuda.synchronize()


def peak(run):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = run()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


class Logits(torch.autograd.Function):
    """Makes logits that are there already from a parameter of one element, so that nothing but the loss
    holds their gradient."""

    @staticmethod
    def forward(ctx, one, z):
        return z.view_as(z)

    @staticmethod
    def backward(ctx, g):
        return g[0, :1].float(), None


def case_nothing_of_the_size_of_the_logits_is_allocated():
    tokens, columns = 8192, 32768
    t = torch.randint(0, columns * size(), (tokens,), generator=torch.Generator().manual_seed(1)).cuda()
    args = {'tp_group': dist.group.WORLD, 'vocab': (me() * columns, columns * size())}
    z = torch.randn(tokens, columns, device='cuda', dtype=torch.bfloat16)
    one = torch.ones(1, device='cuda', requires_grad=True)
    whole = z.numel() * 2

    def loss(**more):
        ct.logprob(Logits.apply(one, z), t, **args, **more).sum().backward()

    for run, most in ((lambda: ct.logprob(Logits.apply(one, z), t, **args), 0.05), (loss, 1.05),
                      (lambda: loss(inplace_backward=True), 0.05)):
        run()
        used = peak(run) / whole
        assert used < most, '%.3f of the logits, expected at most %.2f' % (used, most)
    del z
    torch.cuda.empty_cache()
    h = torch.randn(tokens, 512, device='cuda', dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(columns, 512, device='cuda', dtype=torch.bfloat16, requires_grad=True)

    def linear(mode):
        run = ct.linear_nll(h, ct.Head(w, **args), t, mode=mode, chunk_size=512)
        run.loss.backward()
        h.grad = w.grad = None

    # two chunks of 512 of 8192 tokens, f32 logits and bf16 gradients: 3 / 8 of bf16 logits; d_weight in
    # bf16 and f32: another 3 / 16
    for mode in ('loss', 'logprob'):
        linear(mode)
        used = peak(lambda: linear(mode)) / whole
        assert used < 0.7, '%s: %.3f of the logits' % (mode, used)


def case_torch_mimo_agrees_with_plain_torch():
    if size() < 2:
        raise Skip('needs two GPUs')
    example = Path(__file__).resolve().parents[3] / 'examples/torch_mimo'
    sys.path.insert(0, str(example))
    import train
    half = size() // 2
    pairs = [('tp=2,dp=%d' % half, 'tp=2,cp=2,dp=%d' % (half // 2))] if half > 1 else [
        ('tp=1,dp=2', 'tp=2,dp=1'), ('tp=2,dp=1', 'tp=1,cp=2,dp=1'), ('tp=1,dp=2', 'tp=1,cp=2,dp=1')]
    for src, dst in pairs:
        made = train.Run(train.options(['--device', 'cuda', '--compare', '--steps', '3', '--src', src,
                                        '--dst', dst, '--width', '32', '--batch', '32', '--dtype', 'float64']))
        assert len(made()) == 3
