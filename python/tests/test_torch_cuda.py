# SPDX-License-Identifier: Apache-2.0
"""The same functions on GPUs, a rank each; skipped where there are fewer than two."""
import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge import compat  # noqa: E402
from colobridge.torch.alike import checksums  # noqa: E402
from world import World  # noqa: E402

GPUS = 4 if torch.cuda.device_count() >= 4 else 2 if torch.cuda.device_count() >= 2 else 0
V = 512


@pytest.fixture(scope='module')
def world():
    if not GPUS:
        pytest.skip('needs two GPUs')
    world = World(GPUS)
    yield world
    world.close()


def device(rank):
    torch.cuda.set_sync_debug_mode('default')  # a test that failed may have left another
    torch.cuda.set_device(rank)
    return torch.device('cuda', rank)


def carries(rank, dtype, axes):
    at = device(rank)
    src, dst = cb.Layout.src('dp=%d' % GPUS), cb.Layout.dst('cp=2,dp=%d' % (GPUS // 2))
    shape = (2 * GPUS, 8, 16)
    rng = torch.Generator().manual_seed(1)
    everything = torch.randint(-99, 99, shape, generator=rng).to(dtype)
    order = (0, 1, 2) if axes == 'bsh' else (1, 0, 2)
    bridge = ct.Bridge(src, dst, group=dist.group.WORLD, axes=axes)
    stream = torch.cuda.Stream(at)
    for again in range(3):
        x = everything[2 * rank:2 * rank + 2].permute(order).contiguous().to(at).requires_grad_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream if again == 2 else torch.cuda.current_stream(at)):
            if again == 1:
                torch.cuda.set_sync_debug_mode('error')
            y = bridge(x)
            y.backward(y.detach())
            torch.cuda.set_sync_debug_mode('default')
        torch.cuda.synchronize()
        first = rank // 2 * 4
        assert torch.equal(y.cpu(), everything[first:first + 4].permute(order))
        assert torch.equal(x.grad, 2 * x.detach())


def test_bridge_on_gpus(world):
    for dtype in (torch.float32, torch.bfloat16):
        for axes in ('bsh', 'sbh'):
            world.run(carries, dtype, axes)


def others(rank, dtype):
    """The other losses, lists and sequences: on a GPU what the host's passes give"""
    rng = torch.Generator().manual_seed(4)
    z, q = (3 * torch.randn(2, 8, 16, V, generator=rng)).to(dtype)
    t, ids = torch.randint(0, V, (8, 16), generator=rng), torch.randint(-V, V, (8, 16, 40), generator=rng)
    mask, weights = torch.rand(8, 16, generator=rng) < 0.7, torch.rand(8, 16, generator=rng)
    t[0, :3] = -100
    each, group = V // GPUS, dist.group.WORLD
    lo, found = rank * each, []
    for at in (torch.device('cpu'), device(rank)):
        cut = lambda x: x[..., lo:lo + each].to(at)  # noqa: E731
        lists, m, target, w, at_ids = (ct.Support(ids.to(at)), mask.to(at), t.to(at), weights.to(at),
                                       ids[..., :8].clamp(min=0).to(at))
        seq = ct.Sequence(8, 32, lengths=[32, 9, 0, 31, 32, 2, 1, 30][:8], cp_group=group)
        local = torch.randn(seq.shape, generator=torch.Generator().manual_seed(rank)).to(at).requires_grad_()
        tokens = torch.arange(8 * 32).reshape(8, 32).to(at)
        x, p, results = cut(z).requires_grad_(), cut(q), []
        seq.targets(tokens), seq.mask('targets', at), seq.gather(local)  # communicators and copies are made
        ct.weighted_sum(w, w, m, reduce_group=group)
        top = ct.topk_logprob(p, 8, tp_group=group)
        for again in range(2):
            if again and at.type == 'cuda':
                torch.cuda.set_sync_debug_mode('error')
            outs = [ct.topk_logprob(x, 20, mask=m, tp_group=group), (ct.logprob_at(x, at_ids, tp_group=group),),
                    ct.distill(x, p, mask=m, tp_group=group), (ct.entropy(x, mask=m, tp_group=group),),
                    ct.logprob(x, target, entropy=True, tp_group=group, support=lists),
                    *((ct.distill(x, p, kind=kind, beta=0.3, reduction='none', mask=m, tp_group=group),)
                      for kind in ('forward_kl', 'reverse_kl', 'jsd', 'tv', 'acceptance')),
                    *((ct.topk_distill(x, top.ids, top.logp, kind=kind, tail=tail, reduction='none', mask=m, tp_group=group),)
                      for kind in ('forward_kl', 'reverse_kl') for tail in (True, False)),
                    ct.distill(x, p, kind='jsd', mask=m, tp_group=group, reduction='sum')[:2],
                    ct.weighted_sum(x.float().sum(-1), w, m, reduce_group=group)[:2],
                    (seq.gather(local), seq.gather(local, 'sum'))]
            flat = [o for out in outs for o in out]
            grads = [torch.autograd.grad(o.square().sum(), local if i >= len(flat) - 2 else x, retain_graph=True)[0]
                     for i, o in enumerate(flat) if o.is_floating_point()]
            results = [*flat, *grads, seq.targets(tokens), seq.mask('targets', at)]
            torch.cuda.set_sync_debug_mode('default')
        found.append([r.detach().cpu() for r in results])
    for host, gpu in zip(*found):
        near = {torch.bfloat16: 2e-2}.get(host.dtype, 2e-4)
        torch.testing.assert_close(gpu, host, rtol=near, atol=near * max(1.0, float(host.double().abs().nan_to_num().max())))


def test_other_losses_on_gpus(world):
    for dtype in (torch.float32, torch.bfloat16):
        world.run(others, dtype)


def loses(rank, dtype):
    at = device(rank)
    rng = torch.Generator().manual_seed(2)
    z = (torch.randn(64, V, generator=rng) * 3).to(dtype)
    t = torch.randint(0, V, (64,), generator=rng)
    each = V // GPUS
    mine = z[:, rank * each:(rank + 1) * each].to(at).requires_grad_()
    targets = t.to(at)
    whole = z.double().requires_grad_()
    lp = torch.log_softmax(whole, -1)
    want = lp.gather(-1, t[:, None])[:, 0], -(lp.exp() * lp).sum(-1)
    (want[0].sum() + want[1].sum()).backward()
    for again in range(2):
        mine.grad = None
        if again:
            torch.cuda.set_sync_debug_mode('error')
        logp, h = ct.logprob(mine, targets, tp_group=dist.group.WORLD, entropy=True)
        (logp.sum() + h.sum()).backward()
        torch.cuda.set_sync_debug_mode('default')
    torch.testing.assert_close(logp.double().cpu(), want[0].detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(h.double().cpu(), want[1].detach(), rtol=1e-4, atol=1e-4)
    near = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(mine.grad.double().cpu(), whole.grad[:, rank * each:(rank + 1) * each],
                               rtol=near, atol=near)
    got = compat.DistributedLogprob.apply(mine.detach(), targets, rank * each, (rank + 1) * each,
                                          dist.group.WORLD, True)
    assert torch.equal(got, logp.detach())


def test_losses_on_gpus(world):
    for dtype in (torch.float32, torch.bfloat16):
        world.run(loses, dtype)


def captured(rank):
    at = device(rank)
    each = V // GPUS
    z = torch.randn(64, each, device=at, requires_grad=True)
    t = torch.randint(0, V, (64,), generator=torch.Generator().manual_seed(3)).to(at)

    def run():
        logp = ct.logprob(z, t, tp_group=dist.group.WORLD)
        return logp, torch.autograd.grad(logp.sum(), z)[0]

    side = torch.cuda.Stream(at)
    with torch.cuda.stream(side):
        for _ in range(3):
            want = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_losses_in_a_cuda_graph(world):
    world.run(captured)


def test_a_group_of_one_makes_nothing_but_the_gradient():
    if not torch.cuda.is_available():
        pytest.skip('needs a GPU')
    z = torch.randn(1024, 32768, device='cuda', dtype=torch.bfloat16, requires_grad=True)
    t = torch.randint(0, 32768, (1024,), device='cuda')
    size = z.numel() * z.element_size()
    ct.logprob(z, t, entropy=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, h = ct.logprob(z, t, entropy=True)
    (logp.sum() + h.sum()).backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.05 * size


def test_checksums_of_a_gpu_are_those_of_the_host():
    if not torch.cuda.is_available():
        pytest.skip('needs a GPU')
    given = [torch.randint(-99, 99, (n,), generator=torch.Generator().manual_seed(n)).to(dtype)
             for n, dtype in ((0, torch.float32), (7, torch.bfloat16), (2 ** 25 + 3, torch.float32), (300, torch.bool))]
    assert checksums([t.cuda() for t in given]) == checksums(given)
