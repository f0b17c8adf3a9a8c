# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks with the same tokens (tp_group) and of ranks with other ones (reduce_group, shard_group) share one rank."""
import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_logprob, linear_nll  # noqa: E402
from linear_case import case, leaf, near  # noqa: E402
from world import refused  # noqa: E402


def overlapping(rank):
    """tp_group [0, 1] and [2, 3]; groups that contain one of them"""
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    world = dist.group.WORLD
    h, _, _, t, _ = case(seed=rank // 2)
    w = case(seed=9)[1][:22]
    t = torch.where(t == -100, t, t % 22)
    mine = leaf(w.chunk(2)[rank % 2])
    said = [refused(lambda: linear_nll(h, mine, target=t, tp_group=tp, reduce_group=world)),
            refused(lambda: linear_nll(h, mine, target=t, tp_group=tp, reduce_group=world, mode='logprob')),
            refused(lambda: linear_nll(h, mine, target=t, tp_group=tp, reduce_group=world, mask=(t > 3).double())),
            refused(lambda: ct.nll(h @ mine.t(), t, tp_group=tp, reduce_group=world)),
            refused(lambda: ct.nll(h @ mine.t(), t, tp_group=tp, reduce_group=tp, mask=(t > 3).double())),
            refused(lambda: linear_logprob(h, mine[:6 if rank < 2 else 5], target=t, tp_group=tp, shard_group=tp, rows=11)),
            refused(lambda: linear_nll(h, w[rank * 3:rank * 3 + 3], target=t, tp_group=tp, shard_group=world, rows=11))]
    # groups that may be the same, or have one rank alone in both
    whole = leaf(w)
    ref = sum(F.cross_entropy((s[0] @ whole.t()).view(-1, 22), torch.where(s[3] == -100, s[3], s[3] % 22).view(-1),
                              reduction='sum') for s in map(lambda i: case(seed=i), (0, 1)))
    count = sum(int((case(seed=i)[3] != -100).sum()) for i in (0, 1))
    (ref / count).backward()
    for loss in (lambda: linear_nll(h, mine, target=t, tp_group=tp, reduce_group=dp).loss,
                 lambda: ct.nll(h @ mine.t(), t, tp_group=tp, reduce_group=dp).loss):
        mine.grad = None
        made = loss()
        made.backward()
        near(made.detach(), (ref / count).detach(), torch.float64, 'loss')
        dist.all_reduce(mine.grad, group=dp)
        near(mine.grad, whole.grad.chunk(2)[rank % 2], torch.float64, 'd_weight')
    rows = leaf(mine.detach()[:6] if rank < 2 else mine.detach()[6:])
    linear_nll(h, rows, target=t, tp_group=tp, reduce_group=dp, shard_group=dp, rows=11).loss.backward()
    near(rows.grad, whole.grad.chunk(2)[rank % 2][:6 if rank < 2 else None][0 if rank < 2 else 6:], torch.float64, 'd_rows')
    return said


def test_groups_of_the_same_and_of_other_tokens_share_one_rank(world):
    for said in world.run(overlapping):
        for one in said:
            assert 'ValueError' in one or 'ArgumentError' in one, said
            assert 'are in tp_group [' in one and ('reduce_group [' in one or 'shard_group [' in one), said


def threads_overlap(rank, world, tp, dp):
    h, w, _, t, _ = case(seed=rank // 2)
    z = (h @ w.t())[..., :10]
    assert torch.isfinite(ct.nll(z, t % 20, tp_group=tp, reduce_group=dp).loss)
    with pytest.raises((ValueError, RuntimeError), match=r'ranks \[[02], [13]\] are in tp_group'):  # or another rank's words
        world.barrier()
        ct.nll(z, t % 20, tp_group=tp, reduce_group=world)


def test_groups_of_threads_share_one_rank():
    def run(comm):
        tp, dp = comm.split('tp=2,dp=2', 'tp'), comm.split('tp=2,dp=2', 'dp')
        threads_overlap(comm.rank, comm, tp, dp)
    cb.run_threads(4, run)
