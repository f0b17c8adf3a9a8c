# SPDX-License-Identifier: Apache-2.0
"""DTensors as arguments: heads of tensor and data parallelism over meshes of one and two dims, heads in FSDP2's units, tokens
and logits; what is refused; groups that may not overlap. Against plain PyTorch in f64 on one rank."""
import functools
import sys
import types

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_logprob, linear_nll, over_chunks  # noqa: E402
from linear_case import H, V, case, expected, leaf, near  # noqa: E402
from world import needs_fsdp2, refused  # noqa: E402

try:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:
    DTensor = None
placed = pytest.mark.skipif(DTensor is None, reason='this PyTorch %s has no DTensor' % torch.__version__)

def parameter(t, mesh, placements):
    return torch.nn.Parameter(distribute_tensor(t, mesh, placements))


def of_all(sides, w, b):
    """d_weight and d_bias that the tokens of all sides make"""
    made = [expected(s[0], w, b, s[3], s[4]) for s in sides]
    return sum(m[3] for m in made), sum(m[4] for m in made)


def heads(rank, shape, placements, tp, rows, sides_of):
    """Weight and bias of @rows rows, so placed on a mesh of this shape, whose dim @tp is the vocabulary; sides_of[rank]: which
    tokens a rank has"""
    mesh = init_device_mesh('cpu', shape, mesh_dim_names=('a', 'b', 'c')[:len(shape)])
    group = None if tp is None else mesh.get_group(tp)
    w, b = (t[:rows] for t in case(seed=9)[1:3])
    sides = {}
    for seed in set(sides_of):
        h, _, _, t, g = case(seed=seed)
        sides[seed] = h, None, None, torch.where(t == -100, t, t % rows), g
    side = sides[sides_of[rank]]
    want = expected(side[0], w, b, side[3], side[4])
    want_w, want_b = of_all(sides.values(), w, b)
    for mode in ('logprob', 'keep'):
        weight, bias, x = parameter(w, mesh, placements), parameter(b, mesh, placements), leaf(side[0])
        out = linear_logprob(x, weight, bias, target=side[3], tp_group=group, entropy=True, mode=mode)
        (out[0] * side[4][0] + out[1] * side[4][1]).sum().backward()
        near(out[0], want[0], torch.float64, 'logp')
        near(out[1], want[1], torch.float64, 'entropy')
        near(x.grad, want[2], torch.float64, 'd_hidden')
        for got, whole, name in ((weight, want_w, 'd_weight'), (bias, want_b, 'd_bias')):
            assert got.grad.placements == got.placements and got.grad.device_mesh == mesh
            near(got.grad.full_tensor(), whole, torch.float64, name)
            # what full_tensor() takes for granted: ranks with copies have the same
            near(got.grad.to_local(), distribute_tensor(whole, mesh, placements).to_local(), torch.float64, name + ' here')
    weight, x = parameter(w, mesh, placements), leaf(side[0])
    loss = linear_nll(x, weight, target=side[3], tp_group=group, reduction='sum').loss
    loss.backward()
    whole, first = leaf(w), leaf(side[0])
    F.cross_entropy((first @ whole.t()).view(-1, rows), side[3].view(-1), reduction='sum').backward()
    total = leaf(w)
    for s in sides.values():
        F.cross_entropy((s[0] @ total.t()).view(-1, rows), s[3].view(-1), reduction='sum').backward()
    near(x.grad, first.grad, torch.float64, 'd_hidden of a sum')
    near(weight.grad.full_tensor(), total.grad, torch.float64, 'd_weight of a sum')
    # a frozen head, and no gradient at all
    near(linear_logprob(leaf(side[0]), weight.detach(), target=side[3], tp_group=group).detach(),
         expected(side[0], w, torch.zeros(rows), side[3], side[4])[0], torch.float64, 'frozen')


@placed
@pytest.mark.parametrize('rows', [V, 5, 16])
def test_a_head_over_a_mesh_of_one_dim(world, rows):
    world.run(heads, (4,), [Shard(0)], 0, rows, [0, 0, 0, 0])  # TP
    world.run(heads, (4,), [Shard(0)], None, rows, [0, 1, 2, 3])  # FSDP
    world.run(heads, (4,), [Replicate()], None, rows, [0, 1, 2, 3])
    world.run(heads, (4,), [Replicate()], 0, rows, [0, 0, 0, 0])


@placed
@pytest.mark.parametrize('rows', [V, 5, 16])
def test_a_head_over_a_mesh_of_two_dims(world, rows):
    world.run(heads, (2, 2), [Replicate(), Shard(0)], None, rows, [0, 1, 2, 3])  # HSDP
    world.run(heads, (2, 2), [Replicate(), Shard(0)], 1, rows, [0, 0, 1, 1])  # TP in replicas
    world.run(heads, (2, 2), [Shard(0), Shard(0)], 0, rows, [0, 1, 0, 1])  # the vocabulary's dim is cut first
    world.run(heads, (2, 2), [Shard(0), Replicate()], 1, rows, [0, 0, 1, 1])  # FSDP, and all of tp have all
    world.run(heads, (2, 2), [Replicate(), Replicate()], 1, rows, [0, 0, 1, 1])
    world.run(heads, (4, 1), [Shard(0), Shard(0)], None, rows, [0, 1, 2, 3])
    if rows != 5:
        world.run(heads, (2, 2), [Shard(0), Shard(0)], None, rows if rows == 16 else 23, [0, 1, 2, 3])


def test_gradients_of_dtensors_have_the_strides_of_their_shape():
    """Else PyTorch 2.6 copies them, by a collective of those ranks alone that have one row or none."""
    from colobridge.torch.placed import _row_major
    for shape in ((1,), (0,), (1, 3), (0, 3), (2, 1, 3), (2, 3)):
        g = torch.empty_like(torch.empty(()).expand(shape))  # as ours are made
        assert _row_major(g).stride() == torch.empty(shape).stride() and _row_major(g).data_ptr() == g.data_ptr()
    assert _row_major(torch.ones(3, 2).t()).stride() == (1, 2)


def fsdp_over_tp(rank, shape, rows):
    """As runtimes make it: parallelize_module(), then fully_shard() over the other dims; the ranks of dp have other tokens"""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    names = ('rep', 'dp', 'tp')[-len(shape):]
    mesh = init_device_mesh('cpu', shape, mesh_dim_names=names)
    tp = shape[-1]
    head = torch.nn.Linear(H, rows, bias=False).double()
    with torch.no_grad():
        head.weight.copy_(case(seed=9)[1][:rows])
    w = head.weight.detach().clone()
    parallelize_module(head, mesh['tp'], ColwiseParallel())
    fully_shard(head, mesh=mesh[names[:-1]] if len(names) > 2 else mesh['dp'])
    h, _, _, t, _ = case(seed=rank // tp)
    t = torch.where(t == -100, t, t % rows)
    x, whole = leaf(h), leaf(w)
    for seed in range(4 // tp):
        hh, _, _, tt, _ = case(seed=seed)
        y = leaf(hh)
        loss = F.cross_entropy((y @ whole.t()).view(-1, rows), torch.where(tt == -100, tt, tt % rows).view(-1), reduction='sum')
        loss.backward()
        if seed == rank // tp:
            want, d_x = loss.detach(), y.grad
    for how in ('sum', 'mean', None):
        head.weight.grad = None
        x.grad = None
        loss = linear_nll(x, head.weight, target=t, tp_group=mesh.get_group('tp'), reduction='sum', grad_reduction=how).loss
        loss.backward()
        near(loss.detach(), want, torch.float64, 'loss')
        near(x.grad, d_x, torch.float64, 'd_hidden')
        by = 1 if how == 'sum' else 4 // tp
        assert head.weight.grad.placements == head.weight.placements
        near(head.weight.grad.full_tensor() * by, whole.grad, torch.float64, 'd_weight')
    return [str(p) for p in head.weight.placements]


@placed
def test_fsdp2_over_tensor_parallelism(world):
    needs_fsdp2(world)
    for rows in (16, 23, 5):
        world.run(fsdp_over_tp, (2, 2), rows)
    made = world.run(fsdp_over_tp, (2, 2), 16)
    assert 'trided' in made[0][0] or '_S' in made[0][0], made
    world.run(fsdp_over_tp, (1, 2, 2), 16)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.lm_head = torch.nn.Linear(H, H).double(), torch.nn.Linear(H, V, bias=False).double()

    def forward(self, x, y, ours):
        h = self.body(x)
        if ours:
            return linear_nll(h, self.lm_head.weight, target=y, reduction='sum', **ours).loss
        return F.cross_entropy(self.lm_head(h).view(-1, V), y.view(-1), reduction='sum')


def in_a_unit(rank, shape, factors, ours, want):
    """Gradients of a model with a head in a unit of its own, by what those of torch's loss on one rank are times @want"""
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh('cpu', shape, mesh_dim_names=('rep', 'shard')[-len(shape):])
    model = Model()
    plain = Model()
    for r in range(4):
        h, _, _, t, _ = case(seed=r)
        plain(h, t, None).backward()
    for unit in (model.body, model.lm_head, model):
        fully_shard(unit, mesh=mesh)
    for name, factor in factors.items():
        unit = getattr(model, name) if name else model
        unit.set_gradient_divide_factor(factor)
    for unit in (model.body, model.lm_head, model):
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for step in range(2):  # in the second one FSDP2 knows its modules
        model.zero_grad()
        h, _, _, t, _ = case(seed=rank)
        model(h, t, ours).backward()
        for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters()):
            by = want['lm_head' if 'lm_head' in name else 'body']
            assert p.grad.placements == p.placements
            near(p.grad.full_tensor() * by, q.grad, torch.float64, '%s of step %d' % (name, step))


@placed
@pytest.mark.parametrize('shape', [(4,), (2, 2)])
def test_a_head_in_a_unit_of_its_own_is_averaged_as_fsdp2_averages_the_others(world, shape):
    needs_fsdp2(world)
    from torch.distributed.fsdp import FSDPModule
    if not hasattr(FSDPModule, 'set_force_sum_reduction_for_comms'):
        pytest.skip('FSDP2 of this PyTorch %s does not let one choose sums' % torch.__version__)
    ours = {'mode': 'loss'}
    world.run(in_a_unit, shape, {}, None, {'body': 4, 'lm_head': 4})  # torch's own loss
    world.run(in_a_unit, shape, {}, ours, {'body': 4, 'lm_head': 4})
    world.run(in_a_unit, shape, {}, {'mode': 'logprob'}, {'body': 4, 'lm_head': 4})
    every = {'body': 1.0, 'lm_head': 1.0, '': 1.0}
    world.run(in_a_unit, shape, every, ours, {'body': 1, 'lm_head': 1})
    world.run(in_a_unit, shape, {name: 3.0 for name in every}, ours, {'body': 3, 'lm_head': 3})
    # a hand-written loop gives the others a factor of 1, and the head's unit, which reduces nothing, none
    world.run(in_a_unit, shape, {'body': 1.0, '': 1.0}, ours, {'body': 1, 'lm_head': 1})
    world.run(in_a_unit, shape, {'lm_head': 2.0}, ours, {'body': 4, 'lm_head': 2})
    world.run(in_a_unit, shape, {}, {'grad_reduction': 'sum'}, {'body': 4, 'lm_head': 1})
    world.run(in_a_unit, shape, every, {'grad_reduction': 'mean'}, {'body': 1, 'lm_head': 4})


def two_factors(rank):
    from torch.distributed.fsdp import fully_shard
    model = Model()
    model.body = torch.nn.Sequential(model.body, torch.nn.Linear(H, H).double())
    for unit in (*model.body, model.lm_head, model):
        fully_shard(unit, mesh=init_device_mesh('cpu', (4,)))
    model.body[0].set_gradient_divide_factor(2.0)
    h, _, _, t, _ = case(seed=rank)
    with torch.no_grad():
        model(h, t, None)
    return refused(lambda: model(h, t, {'mode': 'loss'}))


@placed
def test_two_factors_of_fsdp2_are_a_question(world):
    needs_fsdp2(world)
    for said in world.run(two_factors):
        assert 'FSDP2 divides gradients of this model by 2.0' in said and "grad_reduction='mean'" in said, said


def means_of_plain_rows(rank):
    """grad_reduction= of rows that are no DTensor, and of a DTensor that is not FSDP2's"""
    sides = [case(seed=r) for r in range(4)]
    w, each = case(seed=9)[1], -(-V // 4)
    h, _, _, t, g = sides[rank]
    total = of_all(sides, w, torch.zeros(V).double())[0]
    for how, by in (('sum', 1), ('mean', 4), (None, 1)):
        mine = leaf(w[each * rank:each * (rank + 1)])
        out = linear_logprob(h, mine, target=t, entropy=True, shard_group=dist.group.WORLD, rows=V, grad_reduction=how)
        (out[0] * g[0] + out[1] * g[1]).sum().backward()
        near(mine.grad * by, total[each * rank:each * (rank + 1)], torch.float64, how)
    if DTensor is None:
        return
    weight = parameter(w, init_device_mesh('cpu', (4,)), [Shard(0)])
    out = linear_logprob(h, weight, target=t, entropy=True, grad_reduction='mean')
    (out[0] * g[0] + out[1] * g[1]).sum().backward()
    near(weight.grad.full_tensor() * 4, total, torch.float64, 'd_weight')
    with pytest.raises(ValueError, match="grad_reduction is 'average', expected 'mean', 'sum' or None"):
        linear_logprob(h, weight, target=t, grad_reduction='average')


def test_a_head_gradient_is_a_sum_or_a_mean(world):
    world.run(means_of_plain_rows)


def same_tokens(rank):
    mesh = init_device_mesh('cpu', (4,))
    h, w, _, t, _ = case()
    weight = parameter(w, mesh, [Shard(0)])
    nll = lambda x=h, y=t, **more: linear_nll(x, weight, target=y, **more).loss  # noqa: E731
    with torch.no_grad():
        nll()  # a loss alone is right
    said = [refused(nll), refused(lambda: linear_logprob(h, parameter(w, mesh, [Replicate()]), target=t)),
            refused(lambda: over_chunks(lambda z, rows: ct.entropy(z), h, weight))]
    pair = case(seed=rank // 2)
    said.append(refused(lambda: nll(pair[0], pair[3])))
    assert refused(lambda: nll(shard_group=mesh.get_group()).backward()) == ''  # on purpose
    near(weight.grad.full_tensor(), 4 * torch.autograd.functional.jacobian(
        lambda w: F.cross_entropy((h @ w.t()).view(-1, V), t.view(-1)), w), torch.float64, 'd_weight')
    assert refused(lambda: nll(case(seed=rank)[0])) == ''
    assert refused(lambda: nll()) == ''  # of this head they agreed
    return said


@placed
def test_ranks_with_the_same_tokens_are_asked_for_tp_group(world):
    for said in world.run(same_tokens):
        for one in said[:3]:
            assert one.startswith('MismatchError') and 'ranks 0, 1, 2, 3 bring the same hidden' in one and \
                'pass tp_group=' in one, said
        assert 'MismatchError' in said[3] and 'ranks 0, 1 bring' in said[3], said


def placements_of_no_head(rank):
    mesh, square = init_device_mesh('cpu', (4,)), init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    h, w, b, t, _ = case()
    call = lambda weight, **more: lambda: linear_logprob(h, weight, target=t, **more)  # noqa: E731
    sharded = parameter(w, mesh, [Shard(0)])
    both = parameter(w, square, [Shard(0), Shard(0)])
    five = parameter(w[:5], square, [Shard(0), Shard(0)])
    partial = DTensor.from_local(w, mesh, [Partial()])
    return [refused(call(sharded, tp_group=halves)), refused(call(parameter(w, mesh, [Replicate()]), tp_group=halves)),
            refused(call(both, tp_group=square.get_group('tp'))), refused(call(both, tp_group=dist.group.WORLD)),
            refused(call(partial)), refused(call(parameter(w, mesh, [Shard(1)]))), refused(call(five)),
            refused(call(sharded, shard_group=halves)), refused(call(sharded, rows=V + 1)),
            refused(call(sharded, tp_group=mesh.get_group(), vocab=(1, None))),
            refused(call(sharded, bias=b)), refused(call(parameter(w, mesh, [Replicate()]), tp_group=mesh.get_group(),
                                                         d_hidden='partial')),
            refused(call(sharded, tp_group=mesh.get_group(), shard_group=mesh.get_group()))]


@placed
def test_placements_that_no_head_has_are_refused_on_all_ranks(world):
    for said in world.run(placements_of_no_head):
        for words, one in zip((
                'linear_logprob: weight: its mesh dim 0 has ranks [0, 1, 2, 3], of which tp_group',
                'linear_logprob: weight: its mesh dim 0 has ranks [0, 1, 2, 3], of which tp_group',
                "weight: mesh dim 'dp' cuts it before mesh dim 'tp'", 'of which tp_group [0, 1, 2, 3] has 2',
                'weight has Partial(sum) over mesh dim 0', 'weight has Shard(dim=1)', '5 rows are cut over several mesh dims',
                'shard_group is [', 'rows 24', 'vocab is (1, None), and the placement', 'shard both alike',
                "d_hidden='partial', expected 'all_reduce'", 'weight is a DTensor'), said, strict=True):
            assert words in one, (words, one)


def one_rank_of_two(rank):
    """shard_group of one rank, as a script has it that runs on one GPU, too"""
    mesh = init_device_mesh('cpu', (4, 1), mesh_dim_names=('tp', 'dp'))
    h, w, _, t, _ = case()
    weight = parameter(w, mesh, [Replicate(), Shard(0)])
    loss = linear_nll(h, weight, target=t, tp_group=mesh.get_group('tp'), shard_group=mesh.get_group('dp')).loss
    near(loss.detach(), F.cross_entropy((h @ w.t()).reshape(-1, V), t.reshape(-1)), torch.float64, 'a head of one rank')


@placed
def test_a_head_group_of_one_rank_is_no_group(world):
    world.run(one_rank_of_two)


def drop_ins(rank):
    """Heads over tp in the functions of NeMo-RL and verl"""
    from colobridge import compat
    mesh = init_device_mesh('cpu', (4,))
    tp = mesh.get_group()
    h, w, b, t, _ = case()
    t = t.clamp(min=0)
    lp = torch.log_softmax(h @ w.t(), -1)
    want, entropy = lp.gather(-1, t.unsqueeze(-1)).squeeze(-1), -(lp.exp() * lp).sum(-1)
    weight = parameter(w, mesh, [Shard(0)])
    got = compat.linear_cross_entropy(h, weight, t, dist_process_group=tp)
    near(got[0].detach(), want.reshape(-1), torch.float32, "verl's log-probabilities")
    near(got[1].detach(), entropy.reshape(-1), torch.float32, "verl's entropies")
    total = leaf(w)
    torch.log_softmax(h @ total.t(), -1).gather(-1, t.unsqueeze(-1)).sum().backward()
    got[0].sum().backward()
    near(weight.grad.full_tensor(), total.grad, torch.float32, "verl's d_weight")
    h3, labels = h.reshape(1, -1, H)[:, rank:], t.reshape(1, -1)[:, rank:]  # a rank's own tokens
    both = [compat.chunked_cross_entropy_loss(h3, of_w, 4, labels=labels, lm_head_bias=of_b)[0].detach() for of_w, of_b in (
        (w, b), (parameter(w, mesh, [Shard(0)]), parameter(b, mesh, [Shard(0)])))]
    near(both[1], both[0].double(), torch.float32, "TRL's, of a sharded weight and bias")
    start, end = 6 * rank, min(6 * rank + 6, V)
    near(compat.from_parallel_hidden_to_logprobs(h, weight, t, start, end, tp).detach(),
         lp[:, :-1].gather(-1, t[:, 1:].unsqueeze(-1)).squeeze(-1), torch.float32, "NeMo-RL's")
    return [refused(lambda: compat.from_parallel_hidden_to_logprobs(h, weight, t, start + 1, end, tp)),
            refused(lambda: compat.vocab_parallel_entropy(distribute_tensor(h, mesh, [Replicate()]), tp_group=tp))]


@placed
def test_drop_ins_take_heads_that_are_placed(world):
    for said in world.run(drop_ins):
        assert 'and the placement of the DTensor says' in said[0], said
        assert 'vocab_parallel_entropy: vocab_parallel_logits is a DTensor' in said[1], said


# ---- tokens and logits ----

def tokens_of_sequence_parallel(rank):
    """hidden as SequenceParallel leaves it, over tp, whose ranks need all tokens"""
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    tp, reduce = mesh.get_group('tp'), mesh.get_group('dp')
    h, _, _, t, g = case(shape=(4, 5), seed=rank // 2)
    w, b = case(seed=9)[1:3]
    want = expected(h, w, b, t, g)
    weight, bias = (parameter(x, mesh['tp'], [Shard(0)]) for x in (w, b))
    for placement, how in ((Shard(1), {}), (Shard(0), {}), (Replicate(), {}), (Shard(1), {'d_hidden': 'partial'}),
                           (Replicate(), {'d_hidden': 'partial'}), (Shard(0), {'d_hidden': 'reduce_scatter'})):
        x = leaf(distribute_tensor(h, mesh['tp'], [placement]))
        target = distribute_tensor(t, mesh['tp'], [placement]) if how.get('d_hidden') != 'reduce_scatter' else t
        out = linear_logprob(x, weight, bias, target=target, tp_group=tp, entropy=True, **how)
        (out[0] * g[0] + out[1] * g[1]).sum().backward()
        assert type(out[0]) is torch.Tensor
        near(out[0], want[0], torch.float64, 'logp')
        near(x.grad.full_tensor(), want[2], torch.float64, 'd_hidden of %s' % placement)
    # a rank of dp has tokens of its own: this rank's part of a DTensor over dp
    both = torch.cat([case(shape=(4, 5), seed=s)[0] for s in (0, 1)])
    mine, mask = torch.cat([case(shape=(4, 5), seed=s)[3] for s in (0, 1)]), torch.arange(40).view(8, 5) % 3 != 0
    x = leaf(distribute_tensor(both, mesh, [Shard(0), Shard(1)]))
    y, m = (distribute_tensor(v, mesh, [Shard(0), Replicate()]) for v in (mine, mask))
    loss = linear_nll(x, weight, target=y, mask=m, tp_group=tp, reduce_group=reduce).loss
    loss.backward()
    first, whole = leaf(both), leaf(w)
    ref = F.cross_entropy((first @ whole.t()).view(-1, V), torch.where(mask, mine, -100).view(-1))
    ref.backward()
    near(loss.detach(), ref.detach(), torch.float64, 'loss')
    near(x.grad.full_tensor(), first.grad, torch.float64, 'd_hidden over dp and tp')
    same = distribute_tensor(both, mesh, [Replicate(), Replicate()])
    return [refused(lambda: linear_nll(same, weight, target=mine, tp_group=tp, reduce_group=reduce)),
            refused(lambda: linear_nll(distribute_tensor(both, mesh['tp'], [Shard(2)]), weight, target=mine, tp_group=tp)),
            refused(lambda: linear_nll(both, weight, target=mine, tp_group=tp,
                                          mask=DTensor.from_local(mask.long(), mesh['tp'], [Partial()]))),
            refused(lambda: linear_nll(distribute_tensor(h, mesh['tp'], [Shard(1)]), weight, target=t, tp_group=tp,
                                          d_hidden='reduce_scatter'))]


@placed
def test_hidden_states_and_targets_that_are_placed(world):
    for said in world.run(tokens_of_sequence_parallel):
        for words, one in zip(('linear_nll: hidden is a DTensor of [8, 5, 8]', 'linear_nll: hidden is a DTensor',
                               'linear_nll: mask is a DTensor', "and d_hidden is 'reduce_scatter'"), said, strict=True):
            assert one.startswith('ArgumentError') and words in one, said


def placed_logits(rank, vocab):
    mesh = init_device_mesh('cpu', (4,), mesh_dim_names=('tp',))
    tp = mesh.get_group()
    h, w, b, t, g = case()
    z = (h @ w.t() + b)[..., :vocab]
    t = torch.where(t == -100, t, t % vocab)
    teacher = torch.randn(z.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ids = torch.stack([t.clamp(min=0), (t.clamp(min=0) + 1) % vocab], -1)

    def losses(z, q, logp):
        """The sum of all losses of logits z"""
        lp = torch.log_softmax(z, -1)
        picked = lp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        q = torch.softmax(q, -1)
        return [F.cross_entropy(z.reshape(-1, vocab), t.reshape(-1)), (picked * (t != -100) * g[0]).sum(),
                (-(lp.exp() * lp).sum(-1) * g[1]).sum(), lp.topk(min(3, vocab), -1)[0].sum(), lp.gather(-1, ids).sum(),
                (q * (q.log() - lp)).sum(), (lp.exp() * (lp - q.log())).sum()]
    first = leaf(z)
    want = losses(first, teacher, None)
    grads = [torch.autograd.grad(x, first, retain_graph=True)[0] for x in want]
    for placement, groups in ((Shard(-1), (tp, None)), (Shard(2), (tp,)), (Replicate(), (tp, None))):
        for group in groups:
            x = leaf(distribute_tensor(z, mesh, [placement]))
            q = distribute_tensor(teacher, mesh, [placement])
            got = [ct.nll(x, t, tp_group=group).loss, (ct.logprob(x, t, tp_group=group) * g[0]).sum(),
                   (ct.entropy(x, tp_group=group) * g[1]).sum(), ct.topk_logprob(x, min(3, vocab), tp_group=group).logp.sum(),
                   ct.logprob_at(x, ids, tp_group=group).sum(), ct.distill(x, q, tp_group=group).kl.sum(),
                   ct.distill(x, q, kind='reverse_kl', tp_group=group).num]
            for i, (mine, ref, d) in enumerate(zip(got, want, grads)):
                near(mine.detach(), ref.detach(), torch.float64, 'loss %d' % i)
                made = torch.autograd.grad(mine, x)[0]
                near(made.full_tensor(), d, torch.float64, 'gradient of loss %d' % i)
    x = distribute_tensor(z, mesh, [Shard(-1)])
    return [refused(lambda: ct.nll(DTensor.from_local(z, mesh, [Partial()]), t, tp_group=tp)),
            refused(lambda: ct.nll(distribute_tensor(z, mesh, [Shard(0)]), t, tp_group=tp)),
            refused(lambda: ct.distill(x, teacher, tp_group=tp)),
            refused(lambda: ct.nll(x, t, tp_group=[dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2])),
            refused(lambda: ct.nll(x, t, tp_group=tp, reduce_group=tp)),
            refused(lambda: ct.nll(x, t, vocab=vocab + 9))]


@placed
@pytest.mark.parametrize('vocab', [V, 5])
def test_logits_that_are_placed(world, vocab):
    for said in world.run(placed_logits, vocab):
        for words, one in zip(('nll: vocab_parallel_logits is a DTensor', 'expected Shard(-1) over tp_group',
                               'expected targets that are placed alike', 'of which tp_group', 'are in tp_group', 'vocab is'),
                              said, strict=True):
            assert words in one, (words, one)


def unplaced(rank):
    """Calls that take no DTensor say so, by the name of the argument, on all ranks"""
    mesh = init_device_mesh('cpu', (4,))
    world = dist.group.WORLD
    h, w, _, t, _ = case()
    one = lambda x: distribute_tensor(x, mesh, [Replicate()])  # noqa: E731
    flat = torch.arange(32.0).view(8, 4)
    bridge, sequence = ct.Bridge('tp=4', 'dp=4', group=world), ct.Sequence(2, 8, cp_group=world)
    ragged = ct.RaggedBridge('dp=4', 'dp=4', group=world)
    tables = cb.Segments([2] * 4, src=range(4), seq=range(4), pos=[0] * 4, seq_len=[2] * 4, seq_dp=range(4))
    calls = {
        'bridge: x': lambda: bridge(one(flat)), 'bridge: into': lambda: ragged(flat[:2], tables, into=one(flat[None, :2])),
        'relayout: x': lambda: ct.relayout(one(flat), [0, 16, 32], 'zigzag', 'block', group=world),
        'shard: x': lambda: ct.shard(one(flat), cb.Partition(8), dim=0),
        'weighted_sum: values': lambda: ct.weighted_sum(one(flat), reduce_group=world),
        'weighted_sum: weights': lambda: ct.weighted_sum(flat, one(flat), reduce_group=world),
        'unshard: y': lambda: ct.unshard(one(flat), cb.Partition(16), dim=1),
        'next_token: tokens': lambda: ct.next_token(one(flat.long()), cb.Partition(4)),
        'Sequence: lengths': lambda: ct.Sequence(2, 8, lengths=one(torch.tensor([8, 8])), cp_group=world),
        'Sequence.targets: tokens': lambda: sequence.targets(one(torch.ones(2, 8).long())),
        'Sequence.gather: local': lambda: sequence.gather(one(torch.ones(2, 2))),
        'bridge: like': lambda: bridge(None, like=one(flat), shape=(4, 2, 4)),
        'bridge: x[1]': lambda: ragged((flat[:2], one(flat[:2])), tables),
        'bridge: into[0]': lambda: ragged((flat[:2], flat[:2]), tables, into=(one(flat[None, :2]), None)),
        'linear_nll: upstream': lambda: linear_nll(h, w, target=t, reduction='sum', upstream=one(torch.ones(1))),
    }
    said = {name: refused(call) for name, call in calls.items()}
    with pytest.raises(ValueError, match='Support: ids are a DTensor'):
        ct.Support(one(torch.ones(3, 2).long()))
    logp = linear_logprob(leaf(h), w, target=t)
    said['upstream'] = refused(lambda: logp.backward(one(torch.ones_like(logp))))
    return said


@placed
def test_other_calls_refuse_a_dtensor_by_name(world):
    for each in world.run(unplaced):
        for name, said in each.items():
            if name != 'upstream':
                assert said.startswith('ArgumentError') and '%s is a DTensor' % name in said, (name, said)
            else:
                assert 'the gradient of an output is a DTensor' in said, said


def over_a_bridge(rank):
    """x as a DTensor: position-coded values, uneven cuts, copies; y and gradients have the values of their places"""
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    grid = cb.Grid('tp=2,dp=2')  # of a spec the first dim is the fastest, of a mesh the last
    everyone, said = dist.group.WORLD, []
    whole = torch.arange(5.0)[:, None] * 100 + torch.arange(6.0)  # [samples, features]
    rows = torch.arange(8.0)[:, None, None] * 100 + torch.arange(4.0)[:, None] * 10 + torch.arange(2.0)
    matrix = lambda *splits: functools.reduce(  # noqa: E731
        lambda of, split: of.split(*split, kind='ceil'), splits, cb.Layout(grid))
    samples, features = matrix(('samples', 'dp')), matrix(('samples', 'dp'), ('features', 'tp'))
    for src, placements, x, options, dst in (
            (features, [Shard(0), Shard(1)], whole, {'axes': 'bh'}, samples),
            (samples, [Shard(0), Replicate()], whole, {'axes': 'bh'}, features),
            (features, [Shard(0), Shard(-1)], whole, {'axes': 'bh'}, samples),
            ('tp=2,dp=2', [Shard(0), Replicate()], rows, {}, 'dp=4'), ('dp=4', [Shard(0), Shard(0)], rows, {}, 'tp=2,dp=2')):
        bridge = ct.Bridge(src, dst, group=everyone, **options)
        d = leaf(distribute_tensor(x, mesh, placements))
        for how in ({}, {'shape': tuple(x.shape)}, {'samples': len(x)}):
            y = bridge(d, **how)
            to = bridge.dst.owned(rank, x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1])
            assert type(y) is torch.Tensor
            assert torch.equal(y.detach(), x[slice(*to.samples)][..., slice(*to.features)])
        coded = 7 * x + 1
        mine = coded[slice(*to.samples)][..., slice(*to.features)]
        (y * mine).sum().backward()
        assert d.grad.placements == d.placements
        near(d.grad.full_tensor(), coded, torch.float64, 'd_x of %s' % (placements,))
        said.append(refused(lambda: bridge(distribute_tensor(x, mesh, [Shard(1), Shard(0)]), samples=len(x))))
    partial = DTensor.from_local(rows, mesh, [Partial(), Replicate()])
    said.append(refused(lambda: bridge(partial)))
    said.append(refused(lambda: bridge(d, shape=(9, 4, 2))))
    return said


@placed
def test_a_bridge_takes_x_that_is_placed_as_src_says(world):
    for said in world.run(over_a_bridge):
        assert all(one and 'bridge: x is a DTensor' in one or 'and x is a DTensor' in one for one in said), said


def over_chunks_of_dtensors(rank):
    square = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    mesh = init_device_mesh('cpu', (4,))
    w, b = case(seed=9)[1:3]
    h, _, _, t, _ = case(seed=rank)
    sides = [case(seed=r) for r in range(4)]
    total, whole = leaf(w), leaf(b)
    for s in sides:
        x = leaf(s[0])
        p = torch.log_softmax(x @ total.t() + whole, -1)
        (p.exp() * p).sum().backward()
        if s is sides[rank]:
            d_x = x.grad
    weight, bias, x = parameter(w, mesh, [Shard(0)]), parameter(b, mesh, [Shard(0)]), leaf(h)
    comm = ct.comm_of(mesh.get_group(), w.device)
    for step in range(2):
        x.grad = weight.grad = bias.grad = None
        comm.stats_reset()
        (-over_chunks(lambda z, rows: ct.entropy(z), x, weight, bias, chunk_size=4)).sum().backward()
        assert sum(v['ops'] for v in comm.stats()['user'].values()) == 4 + (step == 0)  # compared once
        near(x.grad, d_x, torch.float64, 'd_hidden')
        near(weight.grad.full_tensor(), total.grad, torch.float64, 'd_weight')
        near(bias.grad.full_tensor(), whole.grad, torch.float64, 'd_bias')
    # over tp, whose ranks have the tokens of one rank of dp
    tp = square.get_group('tp')
    pair = case(seed=rank // 2)
    whole = leaf(w)
    for s in sides[:2]:
        y = leaf(s[0])
        p = torch.log_softmax(y @ whole.t(), -1)
        (p.exp() * p).sum().backward()
        if s is sides[rank // 2]:
            d_x = y.grad
    for placements in ([Shard(0)], [Replicate(), Shard(0)]):
        of = square['tp'] if len(placements) == 1 else square
        weight, x = parameter(w, of, placements), leaf(pair[0])
        cut = -(-V // 2)
        (-over_chunks(lambda z, rows: ct.entropy(z, tp_group=tp, vocab=(rank % 2 * cut, V)), x, weight,
                         chunk_size=4, tp_group=tp)).sum().backward()
        near(x.grad, d_x, torch.float64, 'd_hidden')
        if of is square:
            near(weight.grad.full_tensor(), whole.grad, torch.float64, 'd_weight')
    return refused(lambda: over_chunks(lambda z, rows: ct.entropy(z), x, parameter(w, square['tp'], [Replicate()]),
                                          tp_group=tp))


@placed
def test_over_chunks_takes_heads_that_are_placed(world):
    for said in world.run(over_chunks_of_dtensors):
        assert 'all ranks of tp_group have the whole weight' in said, said


def test_a_call_while_another_thread_imports_dtensors(monkeypatch):
    """torch.testing imports them, for example, in the first comparison of a rank that is a thread."""
    x = torch.randn(3, 4)
    want = ct.nll(x, torch.zeros(3, dtype=torch.int64))
    monkeypatch.setitem(sys.modules, 'torch.distributed.tensor', types.ModuleType('torch.distributed.tensor'))
    assert torch.equal(ct.nll(x, torch.zeros(3, dtype=torch.int64)), want)
