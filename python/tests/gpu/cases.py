# SPDX-License-Identifier: Apache-2.0
"""What PyTorch on GPUs must do, on 1, 2, 4 or 8 of them; run.py runs each on all ranks at once.

Expected values come from the same whole tensors on every rank, by plain PyTorch in float64."""
import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import colobridge
import colobridge.torch as ct
from colobridge import Grid, Partition, megatron

V, H = 515, 64


class Skip(Exception):
    pass


def size():
    return dist.get_world_size()


def me():
    return dist.get_rank()


def cut(n):
    """[lo, hi) of this rank; uneven"""
    each = -(-n // size())
    return min(me() * each, n), min((me() + 1) * each, n)


def leaf(t):
    return t.detach().clone().requires_grad_()


def near(got, want, bound, what):
    got, want = got.detach(), want.detach()
    top = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    off = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
    assert got.shape == want.shape and off <= bound * top, '%s: off by %g of %g' % (what, off, top)


def logits_case(tokens=96, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    z = (torch.randn(tokens, V, generator=rng, dtype=torch.float64) * 3).to(dtype).cuda()
    t = torch.randint(0, V, (tokens,), generator=rng)
    t[1::7] = -100
    g = torch.randn(2, tokens, generator=rng, dtype=torch.float64)
    return z, t.cuda(), g.cuda()


def linear_case(tokens=96, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, H, generator=rng, dtype=torch.float64).to(dtype).cuda()
    w = torch.randn(V, H, generator=torch.Generator().manual_seed(77), dtype=torch.float64)
    return h, (w * 0.3).to(dtype).cuda(), logits_case(tokens)[1]


def plain(x, t):
    lp = torch.log_softmax(x, -1)
    keep = t != -100
    nothing = torch.zeros((), dtype=x.dtype, device=x.device)
    logp = torch.where(keep, lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1), nothing)
    return logp, torch.where(keep, -(lp.exp() * lp).sum(-1), nothing)


# ---- bridge ----

def layouts():
    n = size()
    if n == 1:
        return [('tp=1,dp=1', 'tp=1,dp=1')]
    return [('tp=1,dp=%d' % n, 'tp=%d,dp=1' % n), ('tp=%d,dp=1' % n, 'tp=1,dp=%d' % n),
            ('tp=1,dp=%d' % n, 'tp=1,cp=2,dp=%d' % (n // 2)), ('tp=2,dp=%d' % (n // 2),) * 2]


def samples_of(spec, whole):
    grid = Grid(spec)
    dp, at = grid.extent('dp'), grid.coords(me()).get('dp', 0)
    each = whole.shape[0] // dp
    return whole[at * each:(at + 1) * each]


def coded(dtype, n=8, rows=16, width=32):
    """Values that say where they come from, exact in every dtype of 8 bits: each 1 of 251 codes"""
    i = torch.arange(n * rows * width, device='cuda').view(n, rows, width)
    return ((i * 7 + i // 251) % 251).to(dtype)


def carried(run, src, dst, dtype, cp):
    whole = coded(dtype)
    x = samples_of(src, whole).clone().requires_grad_()
    y = run(x)
    assert torch.equal(y, samples_of(dst, whole)), (src, dst)
    up = samples_of(dst, coded(torch.float32) % 7).to(dtype)  # summed over cp: below 256 / cp
    y.backward(up)
    assert torch.equal(x.grad, samples_of(src, (coded(torch.float32) % 7) * cp).to(dtype)), (src, dst)


def transports():
    """Options of a bridge, and whether peers write into its memory then."""
    peers = size() > 1 and os.environ.get('COLO_TRANSPORT', 'auto') != 'nccl'
    return [({'transport': 'nccl'}, False), ({}, peers), ({'buffers': 2}, peers)]


def case_bridge_moves_every_value_and_sums_gradients_over_cp():
    for src, dst in layouts():
        for (options, direct), dtype in itertools.product(transports(), (torch.bfloat16, torch.float32)):
            carry = ct.Bridge(src, dst, group=dist.group.WORLD, **options)
            for _ in range(3):
                carried(carry, src, dst, dtype, 2 if 'cp=2' in dst else 1)
            assert carry.direct is direct, (options, carry.direct)
            carry.destroy()


def late(rng):
    """The GPU of some rank is late, by up to 2 ms."""
    torch.cuda._sleep(int(torch.randint(0, 4, (1,), generator=rng)) * int(1e6))


def case_late_ranks_and_blocks_in_turn_do_no_harm():
    if size() == 1:
        raise Skip('needs two GPUs')
    for src, dst in layouts():
        for buffers in (0, 1, 3):
            carry = ct.Bridge(src, dst, group=dist.group.WORLD, buffers=buffers)
            rng, held, wrong = torch.Generator().manual_seed(me()), [], []
            streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
            for turn in range(60):
                cp = 2 if 'cp=2' in dst else 1
                now = streams[turn // 7 % 2]
                now.wait_stream(streams[1 - turn // 7 % 2])
                with torch.cuda.stream(now):
                    whole = coded(torch.float32) + turn
                    x = samples_of(src, whole).clone().requires_grad_()
                    late(rng)
                    y = carry(x)
                    late(rng)
                    # a block that somebody reuses too early shows a later turn's values
                    held.append((y, samples_of(dst, whole)))
                    if len(held) > (turn + me()) % 4:
                        a, b = held.pop(0)
                        wrong.append((a != b).sum())
                        del a, b
                    y.backward(samples_of(dst, whole) * 2)
                    wrong.append((x.grad != samples_of(src, whole) * 2 * cp).sum())
                    del x, y, whole
            torch.cuda.synchronize()
            assert int(torch.stack(wrong).sum()) == 0, (src, dst, buffers)
            carry.destroy()


def case_blocks_are_handed_out_as_they_are():
    if size() == 1 or not transports()[2][1]:
        raise Skip('needs two GPUs that reach each other')
    src, dst = layouts()[0]
    whole = coded(torch.bfloat16)
    x, want = samples_of(src, whole).clone(), samples_of(dst, whole)
    carry = ct.Bridge(src, dst, group=dist.group.WORLD, buffers=2)
    ys = [carry(x) for _ in range(4)]
    arena = carry._last[1].arena
    assert [arena.holds(y) for y in ys] == [True, True, False, False] and carry.copied == 2
    assert all(torch.equal(y, want) for y in ys)
    at = ys[0].data_ptr()
    if me() == 0:  # the others have none left: they copy, nobody waits
        ys[0] = None
    y = carry(x)
    assert (y.data_ptr() == at) == (me() == 0) and torch.equal(y, want)
    carry.destroy()
    del carry, arena
    ct.shutdown()
    assert torch.equal(ys[1], want)  # tensors outlive all that made them
    ys[1].add_(1)
    torch.cuda.synchronize()


def case_bridges_beside_each_other_take_ways_of_their_own():
    """Memory of one bridge is nothing to another on the same communicator, also where a rank's tensors are
    empty: its first stage has the output, its last the input."""
    if size() == 1:
        raise Skip('needs two GPUs')
    half, like = size() // 2, torch.empty(0, device='cuda')
    spec, shape = 'dp=%d,pp=2' % half, (8, 16, 32)
    whole = coded(torch.float32)
    for options in ({'buffers': 1}, {'transport': 'nccl'}, {}, {'transport': 'nccl'}, {'buffers': 1}):
        carry = ct.Bridge(spec, spec, group=dist.group.WORLD, **options)
        mine = samples_of(spec, whole).clone().requires_grad_() if me() >= half else None
        y = carry(mine, shape=shape, like=like)
        assert torch.equal(y, samples_of(spec, whole) if me() < half else y[:0])
        y.backward(2 * y.detach())
        assert mine is None or torch.equal(mine.grad, 2 * mine.detach())


def case_registered_memory_without_autograd():
    if size() == 1:
        raise Skip('needs two GPUs')
    n = size()
    world = ct.comm_of(dist.group.WORLD, torch.device('cuda', torch.cuda.current_device()))
    src, dst = colobridge.Layout.src('dp=%d' % n), colobridge.Layout.dst('tp=%d' % n)
    x = torch.full((1, 4, 8), float(me()), device='cuda')
    want = torch.arange(n, device='cuda', dtype=torch.float32).view(n, 1, 1).expand(n, 4, 8)
    stream = torch.cuda.current_stream().cuda_stream
    held = [colobridge.Memory.alloc(world, n * 128), colobridge.Memory.register(
        world, torch.zeros(n, 4, 8, device='cuda'))]
    direct = held[0].is_direct
    assert direct is transports()[1][1] and held[1].is_direct is direct
    bridges = [colobridge.Bridge(world, src, dst, (n, 4, 8), device='cuda', transport=way)
               for way in ('auto', 'nccl') + (('peer',) if direct else ())]
    y = torch.from_dlpack(held[0].array('f32', (n, 4, 8), device=torch.cuda.current_device()))
    for bridge in bridges:
        for out in (y, held[1].owner):
            out.zero_()
            bridge.forward(x, out, stream)
            assert torch.equal(out, want)
    if direct:
        world.set_check(2)  # all hear of it, and the communicator lives
        bad = torch.zeros(n, 4, 8, device='cuda')
        try:
            bridges[2].forward(x, bad if me() == 1 else y, stream)
            raise AssertionError('not refused')
        except (ValueError, RuntimeError) as why:
            assert 'is not registered over comm' in str(why), why
        world.set_check(1)
        bridges[2].forward(x, y, stream)
        assert torch.equal(y, want)
        back = torch.zeros(1, 4, 8, device='cuda')
        bridges[2].backward(y, back, stream)  # nothing comes from others: it may lie anywhere
        assert torch.equal(back, x)
    torch.cuda.synchronize()
    dist.barrier()
    for bridge in bridges:
        bridge.destroy()
    del y
    for memory in held:
        memory.destroy()


def case_grid_and_communicator_on_nccl_groups():
    if size() == 1:
        raise Skip('needs two GPUs')
    n = size()

    def grid(tp, cp, dp):
        made = megatron.HyperCommGrid([tp, cp, 1, dp], ['tp', 'cp', 'pp', 'dp'], backend='nccl')
        for dims in (['tp'], ['cp'], ['pp'], ['dp'], ['dp', 'cp']):
            group = made.create_pg(dims)
            assert made.get_pg(dims) is group
        total = torch.ones(1, device='cuda')
        dist.all_reduce(total, group=made.get_pg(['dp', 'cp']))
        assert int(total) == dp * cp
        return made

    for a, b in (((1, 1, n), (n, 1, 1)), ((n, 1, 1), (1, 1, n)), ((1, 1, n), (1, 2, n // 2))):
        src, dst = grid(*a), grid(*b)
        comm = megatron.ColocatedBridgeCommunicator(src, dst, buffers=b[1])
        carried(comm.communicate, 'tp=%d,cp=%d,dp=%d' % a, 'tp=%d,cp=%d,dp=%d' % b, torch.bfloat16, b[1])
        comm.destroy()
        src.destroy()
        dst.destroy()


# ---- losses ----

def case_logprob_is_that_of_the_whole_vocabulary():
    lo, hi = cut(V)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        z, t, g = logits_case(dtype=dtype)
        whole = leaf(z.double())
        want = plain(whole, t)
        (want[0] * g[0] + want[1] * g[1]).sum().backward()
        seen = []
        for chunk in (None, 1, 7, 16, 64, 512):
            mine = leaf(z[:, lo:hi])
            logp, h = ct.logprob(mine, t, tp_group=dist.group.WORLD, vocab_start=lo, vocab_size=V,
                                 entropy=True, chunk_size=chunk)
            (logp.double() * g[0] + h.double() * g[1]).sum().backward()
            near(logp, want[0].detach(), min(bound, 1e-4), 'logp')
            near(h, want[1].detach(), min(bound, 1e-4), 'entropy')
            near(mine.grad, whole.grad[:, lo:hi], bound, 'd_logits')
            seen.append((logp.detach(), mine.grad))
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(seen, seen[1:]))


def case_linear_is_the_product_and_its_loss():
    lo, hi = cut(V)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 5e-4), (torch.bfloat16, 3e-2)):
        h, w, t = linear_case(dtype=dtype)
        _, _, g = logits_case()
        x, y = leaf(h.double()), leaf(w.double())
        want = plain(x @ y.t(), t)
        (want[0] * g[0] + want[1] * g[1]).sum().backward()
        for mode, chunk in (('logprob', None), ('keep', None), ('auto', 32)):
            a, b = leaf(h), leaf(w[lo:hi])
            out = ct.linear_logprob(a, b, target=t, tp_group=dist.group.WORLD, vocab_start=lo,
                                    vocab_size=V, entropy=True, mode=mode, chunk_size=chunk)
            (out[0].double() * g[0] + out[1].double() * g[1]).sum().backward()
            for got, right, name in ((out[0], want[0].detach(), 'logp'), (a.grad, x.grad, 'd_hidden'),
                                     (b.grad, y.grad[lo:hi], 'd_weight')):
                near(got, right, bound, (name, mode, dtype))
        x, y = leaf(h.double()), leaf(w.double())
        mean = torch.nn.functional.cross_entropy(x @ y.t(), t)
        (mean * 3).backward()
        a, b = leaf(h), leaf(w[lo:hi])
        b.main_grad = torch.ones(b.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32,
                                 device='cuda')
        loss = ct.linear_nll(a, b, target=t, tp_group=dist.group.WORLD, vocab_start=lo, vocab_size=V,
                             main_grad=True)
        (loss.loss * 3).backward()
        near(loss.loss.detach(), mean.detach(), bound, 'loss')
        near(a.grad, x.grad, bound, 'd_hidden of the loss')
        near(b.main_grad - 1, y.grad[lo:hi], bound, 'main_grad')


def case_checkpointed_runs_give_the_same_bits():
    lo, hi = cut(V)
    h, w, t = linear_case()

    def run(x, y):
        z = torch.nn.functional.linear(x.tanh(), y)
        a = ct.logprob(z, t, tp_group=dist.group.WORLD, vocab_start=lo, vocab_size=V)
        return a + ct.linear_logprob(x.tanh(), y, target=t, tp_group=dist.group.WORLD, vocab_start=lo,
                                     vocab_size=V)

    seen = []
    for way in (run, lambda x, y: checkpoint(run, x, y, use_reentrant=False)):
        x, y = leaf(h), leaf(w[lo:hi])
        way(x, y).sum().backward()
        seen.append((x.grad, y.grad))
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])


def case_compiled_code_goes_around_it():
    lo, hi = cut(V)
    h, w, t = linear_case()

    def step(x, y):
        z = torch.nn.functional.linear(torch.tanh(x) * 2, y)
        loss = ct.nll(z, t, tp_group=dist.group.WORLD, vocab_start=lo, vocab_size=V).loss
        return loss * 2 + ct.linear_nll(torch.tanh(x), y, target=t, tp_group=dist.group.WORLD,
                                        vocab_start=lo, vocab_size=V).loss

    seen = []
    for run in (step, torch.compile(step)):
        x, y = leaf(h), leaf(w[lo:hi])
        run(x, y).backward()
        seen.append((x.grad, y.grad))
    for a, b in zip(*seen):
        near(b, a, 1e-4, 'compiled')


def case_autocast_casts_linear_and_leaves_the_rest():
    h, w, t = linear_case()
    with torch.autocast('cuda', dtype=torch.bfloat16):
        out = ct.linear_logprob(leaf(h), leaf(w), target=t)
        z = torch.nn.functional.linear(h, w)
        assert z.dtype == torch.bfloat16 and ct.logprob(z, t).dtype == torch.float32
    assert torch.equal(out, ct.linear_logprob(h.bfloat16(), w.bfloat16(), target=t))


def case_fsdp2_trunk_and_sharded_head():
    if size() == 1:
        raise Skip('needs two GPUs')
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = init_device_mesh('cuda', (size(),))
    torch.manual_seed(3)
    trunk = torch.nn.Linear(H, H).cuda()
    first = [p.detach().clone() for p in trunk.parameters()]
    sides = [linear_case(seed=r) for r in range(size())]
    w = sides[0][1]
    # the whole: every rank's tokens, the loss of rank r counted once
    whole_w, whole_h = leaf(w), [leaf(p) for p in first]
    mean = sum(torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(s[0], whole_h[0], whole_h[1]) @ whole_w.t(), s[2], reduction='sum')
        for s in sides) / (size() * int((sides[0][2] != -100).sum()))
    mean.backward()
    fully_shard(trunk, mesh=mesh)
    trunk.set_gradient_divide_factor(1.0) if hasattr(trunk, 'set_gradient_divide_factor') else None
    head = torch.nn.Parameter(distribute_tensor(w.clone(), mesh, [Shard(0)]))
    h, _, t = sides[me()]
    for mode in ('loss', 'logprob'):
        trunk.zero_grad()
        head.grad = None
        loss = ct.linear_nll(trunk(h), head, target=t, reduce_group=dist.group.WORLD, mode=mode).loss
        loss.backward()
        near(loss.detach(), mean.detach(), 1e-4, 'loss')
        near(head.grad.full_tensor(), whole_w.grad, 1e-4, 'd_head')
        if hasattr(trunk, 'set_gradient_divide_factor'):
            near(trunk.weight.grad.full_tensor(), whole_h[0].grad, 1e-4, 'd_trunk')
    assert head.grad.to_local().shape[0] == max(0, cut(V)[1] - cut(V)[0])


# ---- shards ----

def case_shards_are_the_host_s():
    segments = [0, 8, 8, 24, 64]
    for cu in (None, segments):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            part = Partition(64, cp=4, cp_rank=1, cu_padded=cu)
            whole = torch.randint(0, 100, (3, 64, 5), dtype=dtype)
            for axes in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
                x = whole.permute(axes)
                axis = axes.index(1)
                local = ct.shard(x.cuda(), part, axis)
                assert torch.equal(local.cpu(), ct.shard(x, part, axis))
                assert torch.equal(ct.unshard(local, part, axis).cpu(),
                                   ct.unshard(local.cpu(), part, axis))
        tokens = torch.arange(3 * 64).reshape(3, 64)
        there = tokens.cuda()
        want = ct.next_token(tokens, part)
        assert torch.equal(ct.next_token(there, part).cpu(), want)
        part.next_token(there, there)
        assert torch.equal(there.cpu(), want)
    for bad in (lambda: part.shard(whole.cuda(), 1, whole[:, :16]),
                lambda: part.next_token(tokens, there)):
        try:
            bad()
        except ValueError as why:
            assert 'memory kind' in str(why), why
        else:
            raise AssertionError('two memories were taken')


# ---- streams, graphs, memory, waiting ----

def steps():
    """name -> (static inputs, fn of them that returns outputs and gradients)"""
    lo, hi = cut(V)
    z, t, g = logits_case()
    h, w, _ = linear_case()
    src, dst = layouts()[0]
    bridges = [ct.Bridge(src, dst, group=dist.group.WORLD, **options) for options, _ in transports()]
    summed = ct.Bridge(*layouts()[-2 if size() > 1 else 0], group=dist.group.WORLD)
    x = samples_of(src, coded(torch.float32)).clone()
    g0 = g[0].float()

    def with_grad(run, *inputs):
        y = run(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y) * 2)]

    def loss(z):
        return ct.logprob(z, t, tp_group=dist.group.WORLD, vocab_start=lo, vocab_size=V) * g0

    def linear(h, w, mode):
        return ct.linear_logprob(h, w, target=t, tp_group=dist.group.WORLD, vocab_start=lo, vocab_size=V,
                                 mode=mode) * g0

    def nll(h, w):
        return ct.linear_nll(h, w, target=t, tp_group=dist.group.WORLD, vocab_start=lo, vocab_size=V,
                             reduce_group=dist.group.WORLD).loss

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
        'logprob': ([leaf(z[:, lo:hi])], lambda a: with_grad(loss, a)),
        'linear logprob': ([leaf(h), leaf(w[lo:hi])],
                           lambda a, b: with_grad(lambda p, q: linear(p, q, 'logprob'), a, b)),
        'linear keep': ([leaf(h), leaf(w[lo:hi])],
                        lambda a, b: with_grad(lambda p, q: linear(p, q, 'keep'), a, b)),
        'linear_nll': ([leaf(h), leaf(w[lo:hi])], lambda a, b: with_grad(nll, a, b))}


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
        for turn in range(2):
            with torch.no_grad():
                for x in inputs:
                    x.mul_(0.5 + turn)
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
        for turn in range(1000):
            with torch.no_grad():
                x.copy_(samples_of(src, whole) + turn)
                up.copy_(samples_of(dst, whole) + 2 * turn)
            graph.replay()
            wrong += (out[0] != samples_of(dst, whole) + turn).sum()
            wrong += (out[1] != (samples_of(src, whole) + 2 * turn) * cp).sum()
            if turn % 100 == 0:  # an eager call between replays, whose block is no graph's
                y = carry(x)
                wrong += (y.detach() != samples_of(dst, whole) + turn).sum()
        assert int(wrong) == 0, (src, dst)
        dist.barrier()
        del graph, out, y
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
    args = {'tp_group': dist.group.WORLD, 'vocab_start': me() * columns, 'vocab_size': columns * size()}
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
        run = ct.linear_nll(h, w, target=t, mode=mode, chunk_size=512, **args)
        run.loss.backward()
        h.grad = w.grad = None

    # two chunks of 512 of 8192 tokens, f32 logits and bf16 gradients: 3 / 8 of bf16 logits; d_weight in
    # bf16 and f32: another 3 / 16
    for mode in ('loss', 'logprob'):
        linear(mode)
        used = peak(lambda: linear(mode)) / whole
        assert used < 0.7, '%s: %.3f of the logits' % (mode, used)


def case_torch_mimo_agrees_with_plain_torch():
    if size() < 4:
        raise Skip('needs four GPUs')
    example = Path(__file__).resolve().parents[3] / 'examples/torch_mimo'
    sys.path.insert(0, str(example))
    import train
    half = size() // 2
    made = train.Run(train.options(['--device', 'cuda', '--compare', '--steps', '3', '--src',
                                    'tp=2,dp=%d' % half, '--dst', 'tp=2,cp=2,dp=%d' % (half // 2),
                                    '--width', '32', '--batch', '32', '--dtype', 'float64']))
    assert len(made()) == 3
