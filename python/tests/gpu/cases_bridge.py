# SPDX-License-Identifier: Apache-2.0
"""Bridges between GPUs: values, gradients, memory that peers write into, torch's own groups."""
import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import colobridge
import colobridge.torch as ct
from colobridge import megatron

sys.path.append(str(Path(__file__).resolve().parents[1]))
import halo_case  # noqa: E402
import ragged_case  # noqa: E402
from ragged_case import PAIRS, Case  # noqa: E402
from common import Skip, coded, layouts, me, pools, samples_of, size, transports


def carried(run, src, dst, dtype, cp):
    whole = coded(dtype)
    x = samples_of(src, whole).clone().requires_grad_()
    y = run(x)
    assert torch.equal(y, samples_of(dst, whole)), (src, dst)
    up = samples_of(dst, coded(torch.float32) % 7).to(dtype)  # summed over cp: below 256 / cp
    y.backward(up)
    assert torch.equal(x.grad, samples_of(src, (coded(torch.float32) % 7) * cp).to(dtype)), (src, dst)


def case_bridge_moves_every_value_and_sums_gradients_over_cp():
    for src, dst in layouts():
        for (options, p2p), dtype in itertools.product(transports(), (torch.bfloat16, torch.float32)):
            carry = ct.Bridge(src, dst, group=dist.group.WORLD, **options)
            for _ in range(3):
                carried(carry, src, dst, dtype, 2 if 'cp=2' in dst else 1)
            assert carry.is_p2p is p2p, (options, carry.is_p2p)
            carry.destroy()


def case_memory_of_a_bridge_is_pytorch_s():
    if size() < 2:
        raise Skip('two GPUs or more')
    before = torch.cuda.memory_allocated()
    carry = ct.Bridge('dp=%d' % size(), 'cp=2,dp=%d' % (size() // 2), group=dist.group.WORLD, transport='nccl')
    for _ in range(2):
        x = torch.ones(1, 64, 512, device='cuda', requires_grad=True)
        y = carry(x)
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad, torch.full_like(x, 2))
    nbytes = carry._engine._last[1].bridge.workspace_size
    del x, y
    assert torch.cuda.memory_allocated() - before >= nbytes > 0, (torch.cuda.memory_allocated(), before, nbytes)
    carry.destroy()
    assert torch.cuda.memory_allocated() == before, (torch.cuda.memory_allocated(), before)


def case_ragged_batches_are_those_of_the_oracle():
    if size() not in PAIRS:
        raise Skip('cases are for 1, 2 or 4 GPUs')
    for seed in range(30):
        case = Case(seed, size())
        carry = ct.RaggedBridge(*case.layouts(), group=dist.group.WORLD, output=case.output, grad=case.grad)
        segments = colobridge.Segments(**case.tables())
        for merged in (False, True):
            ragged_case.carried(me(), case, carry, segments, merged, 'cuda')
        carry.destroy()


def case_halos_have_the_bits_of_the_host():
    """By a loop over positions; gradients in small integers."""
    halo_case.halos(me(), size(), 1, dist.group.WORLD, None, range(60), 'cuda')
    groups = [dist.new_group([r]) for r in range(size())]
    halo_case.halos(me(), 1, size(), groups[me()], dist.group.WORLD, range(100, 120), 'cuda')


def late(rng):
    """The GPU of some rank is late, by up to 2 ms."""
    torch.cuda._sleep(int(torch.randint(0, 4, (1,), generator=rng)) * int(1e6))


def case_late_ranks_and_blocks_in_turn_do_no_harm():
    if size() == 1:
        raise Skip('needs two GPUs')
    for src, dst in layouts():
        for buffers, width in ((None, 16384), (0, 32), (1, 32), (3, 32)):  # of 8 MiB, or small
            carry = ct.Bridge(src, dst, group=dist.group.WORLD, buffers=buffers)
            rng, held, wrong = torch.Generator().manual_seed(me()), [], []
            streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
            for rep in range(60):
                cp = 2 if 'cp=2' in dst else 1
                now = streams[rep // 7 % 2]
                now.wait_stream(streams[1 - rep // 7 % 2])
                with torch.cuda.stream(now):
                    whole = coded(torch.float32, width=width) + rep
                    x = samples_of(src, whole).clone().requires_grad_()
                    late(rng)
                    y = carry(x)
                    late(rng)
                    # a block that somebody reuses too early shows a later repetition's values
                    held.append((y, samples_of(dst, whole)))
                    if len(held) > (rep + me()) % 4:
                        a, b = held.pop(0)
                        wrong.append((a != b).sum())
                        del a, b
                    y.backward(samples_of(dst, whole) * 2)
                    wrong.append((x.grad != samples_of(src, whole) * 2 * cp).sum())
                    del x, y, whole
            torch.cuda.synchronize()
            assert int(torch.stack(wrong).sum()) == 0, (src, dst, buffers)
            carry.destroy()


def case_outputs_are_pytorch_s_own_in_memory_that_peers_reach():
    if size() == 1 or not pools():
        raise Skip("needs two GPUs that reach each other, and a PyTorch with pools of its allocator's")
    src, dst = layouts()[0]
    whole = coded(torch.bfloat16, width=16384)
    want, up = samples_of(dst, whole), samples_of(src, whole)
    carry = ct.Bridge(src, dst, group=dist.group.WORLD)
    found = set()
    for step in range(4):
        x = up.clone().requires_grad_()
        y = carry(x)
        assert torch.equal(y, want) and not y._is_view()
        y.backward(want)
        assert torch.equal(x.grad, up)
        if step:  # the first gradient is a copy, because the call compares ranks
            found.add((y.data_ptr(), x.grad.data_ptr()))
        del y, x
    pool = carry._engine._last[1].core.region.pool
    assert carry.copied == 0 and len(found) == 1, (carry.copied, found)
    # A stream that PyTorch knows of keeps an output whose last owner has gone.
    other, y = torch.cuda.Stream(), carry(up)
    assert pool.holds(y)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(int(2e8))
        seen = y.clone()
    y.record_stream(other)
    del y
    for _ in range(3):
        late = carry(up + 1)
        assert torch.equal(late, want + 1)
    torch.cuda.current_stream().wait_stream(other)
    assert torch.equal(seen, want)
    del late
    # More outputs than fit, and one of another stream, are copied.
    torch.cuda.synchronize()
    before, kept = carry.copied, [carry(up + i) for i in range(3)]
    assert all(torch.equal(y, want + i) for i, y in enumerate(kept))
    assert carry.copied - before >= 2 and pool.holds(kept[0]) and not pool.holds(kept[2])
    with torch.cuda.stream(other):
        other.wait_stream(torch.cuda.default_stream())
        kept.append(carry(up))
        assert not pool.holds(kept[3]) and torch.equal(kept[3], want)
    torch.cuda.synchronize()
    carry.destroy()
    del carry, pool
    ct.shutdown()
    torch.cuda.empty_cache()
    junk = [torch.full_like(want, -1) for _ in range(4)]
    assert torch.equal(kept[0], want)  # tensors outlive all that made them
    del junk


def case_ragged_outputs_are_in_memory_that_peers_reach():
    if size() == 1 or not pools():
        raise Skip("needs two GPUs that reach each other, and a PyTorch with pools of its allocator's")
    n, width = size(), 4096
    rows = [300, 0, 700] * n
    tables = colobridge.Segments(rows, src=[e // 3 for e in range(3 * n)], seq=[e % 2 for e in range(3 * n)],
                                 pos=[e // 2 * 704 for e in range(3 * n)], seq_len=[2112 * n // 2 * 2] * 2, seq_dp=[0, 0])
    G = torch.arange(sum(rows), device='cuda', dtype=torch.float32)[:, None].expand(-1, width)
    x0 = G[1000 * me():1000 * me() + 1000].to(torch.bfloat16)
    results = {}
    for transport in ('nccl', 'auto'):
        carry = ct.RaggedBridge('dp=%d' % n, 'cp=%d' % n, group=dist.group.WORLD, output='sharded',
                          transport=transport)
        found = set()
        for step in range(4):
            x = (x0 + step).requires_grad_()
            y = carry(x, tables)
            y.backward(y.detach() * 2)
            assert torch.equal(x.grad, 2 * x.detach())
            results.setdefault(step, []).append(y.detach().clone())
            found.add((y.data_ptr(), x.grad.data_ptr()))
            del y, x
        if transport == 'auto':
            workspace = next(iter(carry._engine._ragged.values())).workspace
            assert workspace.copied == 0 and len(found) == 1, (workspace.copied, found)
            kept = [carry(x0 + step, tables) for step in range(4)]
            assert workspace.copied > 0 and all(map(torch.equal, kept, [results[step][0] for step in range(4)]))
        carry.destroy()
    assert all(torch.equal(*r) for r in results.values())


def case_blocks_are_handed_out_as_they_are():
    if size() == 1 or not transports()[2][1]:
        raise Skip('needs two GPUs that reach each other')
    src, dst = layouts()[0]
    whole = coded(torch.bfloat16)
    x, want = samples_of(src, whole).clone(), samples_of(dst, whole)
    carry = ct.Bridge(src, dst, group=dist.group.WORLD, buffers=2)
    ys = [carry(x) for _ in range(4)]
    arena = carry._engine._last[1].arena
    assert [arena.holds(y) for y in ys] == [True, True, False, False] and carry.copied == 2
    assert all(torch.equal(y, want) for y in ys)
    at = ys[0].data_ptr()
    if me() == 0:  # the others have none left: they copy, no rank waits
        ys[0] = None
    y = carry(x)
    assert (y.data_ptr() == at) == (me() == 0) and torch.equal(y, want)
    carry.destroy()
    del carry, arena
    ct.shutdown()
    assert torch.equal(ys[1], want)  # tensors outlive all that made them
    ys[1].add_(1)
    torch.cuda.synchronize()


def case_concurrent_bridges_take_ways_of_their_own():
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
    p2p = held[0].is_p2p
    assert p2p is transports()[1][1] and held[1].is_p2p is p2p
    bridges = [colobridge.Bridge(world, src, dst, (n, 4, 8), device='cuda', transport=way)
               for way in ('auto', 'nccl') + (('peer',) if p2p else ())]
    y = torch.from_dlpack(held[0].array('f32', (n, 4, 8), device=torch.cuda.current_device()))
    for bridge in bridges:
        for out in (y, held[1].owner):
            out.zero_()
            bridge.forward(x, out, stream)
            assert torch.equal(out, want)
    if p2p:
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
