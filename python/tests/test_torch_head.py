# SPDX-License-Identifier: Apache-2.0
"""lm_heads whose rows are sharded over data-parallel ranks, as plain rows and as FSDP2's DTensor."""
import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_logprob, linear_nll  # noqa: E402
from linear_case import H, V, case, expected, leaf, near  # noqa: E402
from world import meet, needs_fsdp2, with_deepspeed  # noqa: E402


def sharded(rank, rows, tp, mode):
    """dp = 4 / tp ranks share the rows of one vocabulary rank"""
    dp = 4 // tp
    tps = [dist.new_group(list(range(i * tp, i * tp + tp))) for i in range(dp)]
    dps = [dist.new_group(list(range(i, 4, tp))) for i in range(tp)]
    d, r = rank // tp, rank % tp
    group = dps[r]
    lo, hi = r * rows, (r + 1) * rows
    each = -(-rows // dp)
    first, last = min(d * each, rows), min((d + 1) * each, rows)
    sides = [case(seed=5 + i) for i in range(dp)]
    w, b = case(seed=9)[1][:rows * tp], case(seed=9)[2][:rows * tp]
    targets = [s[3] % (rows * tp) for s in sides]
    targets = [torch.where(s[3] == -100, s[3], y) for s, y in zip(sides, targets)]
    targets[-1].fill_(-100)  # a rank without tokens joins
    want_w, want_b = torch.zeros(rows * tp, H).double(), torch.zeros(rows * tp).double()
    for side, y in zip(sides, targets):
        want = expected(side[0], w, b, y, side[4])
        want_w += want[3]
        want_b += want[4]
    mine = expected(sides[d][0], w, b, targets[d], sides[d][4])
    args = {'target': targets[d], 'tp_group': tps[d], 'vocab': (lo, rows * tp),
            'shard_group': group, 'rows': rows}
    comm = ct.comm_of(group, w.device)
    for chunk in (None, 1):
        x = [leaf(sides[d][0]), leaf(w[lo:hi][first:last]), leaf(b[lo:hi][first:last])]
        comm.stats_reset()
        out = linear_logprob(*x, mode=mode, chunk_size=chunk, entropy=True, **args)
        near(out[0], mine[0], torch.float64, 'logp')
        ahead = {k: v['ops'] for k, v in comm.stats()['head'].items()}
        comm.stats_reset()
        (out[0] * sides[d][4][0] + out[1] * sides[d][4][1]).sum().backward()
        back = {k: v['ops'] for k, v in comm.stats()['head'].items()}
        assert (ahead, back) == ({'all_gather': 1}, {'all_gather': 1, 'reduce_scatter': 1})
        near(x[0].grad, mine[2], torch.float64, 'd_hidden')
        near(x[1].grad, want_w[lo:hi][first:last], torch.float64, 'd_weight')
        near(x[2].grad, want_b[lo:hi][first:last], torch.float64, 'd_bias')
        comm.stats_reset()
        y = leaf(w[lo:hi][first:last])
        y.main_grad = torch.ones(last - first, H).double()
        linear_nll(leaf(sides[d][0]), y, chunk_size=chunk, main_grad=True, **args).loss.backward()
        assert {k: v['ops'] for k, v in comm.stats()['head'].items()} == \
            {'all_gather': 1, 'reduce_scatter': 1}
    return last - first


def test_sharded_heads_one_gather_a_pass_and_one_reduce_scatter(world):
    for mode in ('logprob', 'keep'):
        assert world.run(sharded, 23, 1, mode) == [6, 6, 6, 5]
        assert world.run(sharded, 5, 1, mode) == [2, 2, 1, 0]
        assert world.run(sharded, 7, 2, mode) == [4, 4, 3, 3]


class Zero3(torch.nn.Parameter):
    """A parameter as DeepSpeed's ZeRO-3 leaves it: no elements; the part of this rank in ds_tensor."""


def partitioned(w):
    """@w [V, H] as a parameter of which the only rank of its group has all elements"""
    head = Zero3(torch.empty(0, dtype=w.dtype))
    head.ds_tensor, head.ds_shape, head.ds_process_group = w.detach().reshape(-1), w.shape, cb.Comm.self()
    return head


def with_bias(w):
    """A layer of which DeepSpeed has the weight"""
    layer = torch.nn.Linear(H, V, dtype=w.dtype)
    layer.weight = partitioned(w)
    return layer


def flat(rank, rows, mode, ranks):
    """DeepSpeed's formula: the flattened weight, padded to a multiple of the ranks, in equal parts."""
    group = [dist.new_group(list(range(n))) for n in (1, 3, 4)][(1, 3, 4).index(ranks)]
    if rank >= ranks:
        return None
    sides = [case(seed=5 + i) for i in range(ranks)]
    w = case(seed=9)[1][:rows]
    targets = [torch.where(s[3] == -100, s[3], s[3] % rows) for s in sides]
    if ranks > 1:
        targets[-1].fill_(-100)  # a rank without tokens joins
    zero = torch.zeros(rows)
    want = torch.zeros(rows, H).double()
    for side, y in zip(sides, targets):
        want += expected(side[0], w, zero, y, side[4])[3]
    mine = expected(sides[rank][0], w, zero, targets[rank], sides[rank][4])
    padding = -rows * H % ranks
    whole = torch.cat([w.reshape(-1), torch.full((padding,), float('nan'), dtype=w.dtype)])
    part = whole.chunk(ranks)[rank].clone()
    want = torch.cat([want.reshape(-1), torch.zeros(padding).double()]).chunk(ranks)[rank]
    args = {'target': targets[rank], 'shard_group': group, 'rows': rows}
    comm = ct.comm_of(group, w.device)
    for placeholder in (False, True):
        x, head = leaf(sides[rank][0]), leaf(part)
        if placeholder:
            head = Zero3(torch.empty(0, dtype=w.dtype))
            head.ds_tensor, head.ds_shape, head.ds_process_group = part.clone(), torch.Size([rows, H]), group
            args = {'target': targets[rank]}
        comm.stats_reset()
        out = linear_logprob(x, head, mode=mode, entropy=True, **args)
        near(out[0], mine[0], torch.float64, 'logp')
        (out[0] * sides[rank][4][0] + out[1] * sides[rank][4][1]).sum().backward()
        if ranks > 1:
            assert {k: v['ops'] for k, v in comm.stats()['head'].items()} == {'all_gather': 2, 'reduce_scatter': 1}
        near(x.grad, mine[2], torch.float64, 'd_hidden')
        near(head.ds_tensor.grad if placeholder else head.grad, want, torch.float64, 'd_weight')
        if placeholder:
            assert head.grad is None and head.shape == (0,)
        head = leaf(part)
        head.main_grad = torch.ones(len(part)).double()
        loss = linear_nll(leaf(sides[rank][0]), head, main_grad=True,
                          **dict(args, shard_group=group, rows=rows)).loss
        loss.backward()
        assert torch.isfinite(head.main_grad).all() and head.grad is None
    return len(part)


@pytest.mark.parametrize('mode', ['logprob', 'keep'])
def test_flat_parts_of_zero3_are_gathered_and_their_gradients_scattered(world, mode):
    assert world.run(flat, 23, mode, 4) == [-(-23 * H // 4)] * 4
    assert world.run(flat, 22, mode, 3)[:3] == [-(-22 * H // 3)] * 3
    assert world.run(flat, 1, mode, 4) == [-(-H // 4)] * 4
    assert world.run(flat, 23, mode, 1)[0] == 23 * H


def deepspeed_head(rank):
    """DeepSpeed itself cuts the weight, and says what it was; 23 x 8 elements over 4 ranks end inside of rows"""
    deepspeed = with_deepspeed()
    how = {'train_batch_size': 4, 'zero_optimization': {'stage': 3, 'stage3_param_persistence_threshold': 0}}
    with deepspeed.zero.Init(config_dict_or_path=how, dtype=torch.float32):
        head = torch.nn.Linear(H, V, bias=False).weight
    with deepspeed.zero.GatheredParameters([head]):
        whole = head.detach().clone().double()
    assert head.shape == (0,) and whole.shape == (V, H)
    kind = head.ds_tensor.dtype  # bf16, unless the accelerator has none
    want = torch.zeros(V, H).double()
    for r in range(4):
        h, _, _, t, g = case(seed=r)
        want += expected(h.to(kind), whole, None, t, g)[3]
    h, _, _, t, g = case(seed=rank)
    logp, entropy = linear_logprob(h.to(kind), head, target=t, entropy=True)
    near(logp, expected(h.to(kind), whole, None, t, g)[0], torch.float32, 'logp')
    (logp * g[0] + entropy * g[1]).sum().backward()
    near(head.ds_tensor.grad, want.reshape(-1).chunk(4)[rank], kind, 'd_weight')


def test_a_parameter_that_deepspeed_has_partitioned(world):
    pytest.importorskip('deepspeed', reason='no DeepSpeed in this Python')
    world.run(deepspeed_head, timeout=150)


def flat_refusals(rank):
    h, w, b, t, _ = case()
    args = {'target': t, 'shard_group': dist.group.WORLD, 'rows': V}
    said = []
    for weight, more in ((w.reshape(-1)[:5], {}), (w.reshape(-1)[:46], {'bias': b}), (torch.empty(0, dtype=w.dtype), {}),
                         (torch.empty(0, dtype=w.dtype), {'shard_group': None, 'rows': None})):
        try:
            linear_logprob(h, weight, **{**args, **more})
        except (ValueError, RuntimeError) as why:  # its own, or that of a rank that was faster
            said.append(str(why))
        meet()
    return said


def test_flat_parts_that_do_not_fit_are_refused_on_all_ranks(world):
    for said in world.run(flat_refusals):
        for words, one in zip(('weight has 5 elements, expected %d, or' % -(-V * H // 4),
                               "weight is [46], this rank's elements of a flattened weight, and bias is [%d]" % V,
                               'weight has 0 elements, expected', 'weight has 0 elements, which stand for a parameter'), said, strict=True):
            assert words in one, said


def dtensor(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    h, w, b, t, g = case(seed=rank)
    _, w, b, _, _ = case(seed=9)
    mesh = init_device_mesh('cpu', (4,))
    want_w = torch.zeros(V, H).double()
    for r in range(4):
        side = case(seed=r)
        want_w += expected(side[0], w, b, side[3], side[4])[3]
    mine = expected(h, w, b, t, g)
    weight = torch.nn.Parameter(distribute_tensor(w, mesh, [Shard(0)]))
    bias = torch.nn.Parameter(distribute_tensor(b, mesh, [Shard(0)]))
    x = leaf(h)
    out = linear_logprob(x, weight, bias, target=t, entropy=True)
    (out[0] * g[0] + out[1] * g[1]).sum().backward()
    near(out[0], mine[0], torch.float64, 'logp')
    near(x.grad, mine[2], torch.float64, 'd_hidden')
    assert weight.grad.placements == (Shard(0),) and weight.grad.shape == (V, H)
    near(weight.grad.full_tensor(), want_w, torch.float64, 'd_weight')
    whole = torch.nn.Parameter(distribute_tensor(w, mesh, [Replicate()]))
    near(linear_logprob(h, whole, b, target=t), mine[0], torch.float64, 'replicated')
    with pytest.raises(ValueError, match='shard: x is a DTensor of .* expected a plain tensor'):
        ct.shard(whole, cb.Partition(V), dim=0)
    try:
        linear_logprob(h, distribute_tensor(w, mesh, [Shard(1)]), target=t)
    except ValueError as why:
        return 'expected Shard(0) or Replicate()' in str(why)


@pytest.mark.skipif(not hasattr(torch.distributed, 'device_mesh'),
                    reason='this PyTorch %s has no DTensor' % torch.__version__)
def test_dtensor_heads_of_fsdp2(world):
    assert world.run(dtensor) == [True] * 4


def alone_or_no_group(rank):
    """Objects of a sharded head are made by all of its ranks, or by none."""
    h, w, b, t, _ = case()
    rows = -(-V // 4)
    args = dict(target=t, shard_group=dist.group.WORLD, rows=V)
    mine = [dist.new_group([r]) for r in range(4)][rank]
    for tp in (mine, None):
        linear_logprob(h, w[rows * rank:rows * (rank + 1)], tp_group=tp, **args)


def test_a_group_of_rank_0_alone_is_not_no_group(world):
    world.run(alone_or_no_group)


def fsdp2(rank):
    """a trunk under fully_shard() and a sharded head: gradients are those of the whole"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = init_device_mesh('cpu', (4,))
    torch.manual_seed(3)
    trunk = torch.nn.Linear(H, H).double()
    first = [leaf(p.detach()) for p in trunk.parameters()]
    sides, w = [case(seed=r) for r in range(4)], case(seed=9)[1]
    whole = leaf(w)
    total = sum(torch.nn.functional.cross_entropy(
        (torch.nn.functional.linear(s[0], *first) @ whole.t()).view(-1, V), s[3].view(-1),
        reduction='sum') for s in sides)
    mean = total / sum(int((s[3] != -100).sum()) for s in sides)
    mean.backward()
    fully_shard(trunk, mesh=mesh)
    head = torch.nn.Parameter(distribute_tensor(w, mesh, [Shard(0)]))
    for mode in ('loss', 'logprob'):
        trunk.zero_grad()
        head.grad = None
        loss = linear_nll(trunk(sides[rank][0]), head, target=sides[rank][3],
                             reduce_group=dist.group.WORLD, mode=mode).loss
        loss.backward()
        near(loss.detach(), mean.detach(), torch.float64, 'loss')
        near(head.grad.full_tensor(), whole.grad, torch.float64, 'd_head')
        # gloo has no divide factor, so fully_shard() averages
        near(trunk.weight.grad.full_tensor() * 4, first[0].grad, torch.float64, 'd_trunk')


def test_fsdp2_trunk_and_sharded_head(world):
    needs_fsdp2(world)
    world.run(fsdp2)


def counted_step(rank, mode, vocab, width, tokens, chunk, valid, pieces):
    """(the framework's collectives, the library's of the head) of a training step with optimizer, the loss of
    @tokens taken in so many pieces; the second step of two, because the first one connects"""
    from collections import Counter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Collectives(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if 'c10d' in func.namespace:
                self.seen[func._opname] += 1
            return func(*args, **(kwargs or {}))

    mesh = init_device_mesh('cpu', (4,))
    torch.manual_seed(5)
    trunk = torch.nn.Linear(width, width)
    fully_shard(trunk, mesh=mesh)
    head = torch.nn.Parameter(distribute_tensor(torch.randn(vocab, width), mesh, [Shard(0)]))
    target = torch.full((tokens,), -100)
    target[:valid[rank]] = torch.arange(valid[rank]) * 7919 % vocab
    optimizer = torch.optim.SGD([*trunk.parameters(), head], lr=0.1)
    comm = ct.comm_of(mesh.get_group(), torch.device('cpu'))
    for _ in range(2):
        comm.stats_reset()
        before = head.detach().to_local().clone()
        with Collectives() as counter:
            optimizer.zero_grad()
            hidden = trunk(torch.ones(tokens, width))
            each = tokens // pieces
            loss = sum(linear_nll(hidden[i:i + each], head, target=target[i:i + each], mode=mode, reduction='sum',
                                     chunk_size=chunk).loss for i in range(0, tokens, each))
            loss.backward()
            optimizer.step()
        assert (head.detach().to_local() != before).any() and torch.isfinite(head.detach().to_local()).all()
    return dict(counter.seen), {name: s['ops'] for name, s in comm.stats()['head'].items()}


def test_a_training_step_with_fsdp2_gathers_the_head_once_a_pass_for_any_chunk(world):
    needs_fsdp2(world)
    valid = (48, 0, 5, 17)  # tokens of a rank; one has none
    for mode, passes in (('loss', 1), ('logprob', 2)):
        one = world.run(counted_step, mode, V, H, 48, 48, valid, 1)
        assert one == one[:1] * 4 and one[0][1] == {'all_gather': passes, 'reduce_scatter': 1}
        assert sum(n for name, n in one[0][0].items() if 'gather' in name) <= 2  # those of the trunk
        assert world.run(counted_step, mode, V, H, 48, 3, valid, 1) == one  # 16 chunks
        theirs, ours = world.run(counted_step, mode, V, H, 48, 3, valid, 16)[0]  # a gather per chunk is seen
        assert theirs == one[0][0] and ours == {'all_gather': 16 * passes, 'reduce_scatter': 16}
    large = world.run(counted_step, 'loss', 151665, 4, 512, 256, (300, 0, 5, 17), 1)
    assert [s[1] for s in large] == [{'all_gather': 1, 'reduce_scatter': 1}] * 4 and large[0][0] == one[0][0]


def embedding(w, b):
    """A head that is tied to an embedding"""
    made = torch.nn.Embedding(*w.shape, dtype=w.dtype)
    head = torch.nn.Linear(H, V, bias=False, dtype=w.dtype)
    head.weight = made.weight
    return made, head


@pytest.mark.parametrize('bias', [False, True])
def test_a_head_is_read_from_a_module_and_holds_its_parameters(bias):
    h, w, b, t, g = case()
    lin = torch.nn.Linear(H, V, bias=bias, dtype=w.dtype)
    with torch.no_grad():
        lin.weight.copy_(w)
        lin.bias.copy_(b) if bias else None
    head = ct.Head.of(lin, softcap=5.0, scale=0.5)
    assert head.weight is lin.weight and head.bias is lin.bias and head.softcap == 5.0
    want = expected(h, w, b if bias else None, t, g, softcap=5.0, scale=0.5)
    out = ct.linear_logprob(h, head, t, entropy=True)
    (out[0] * g[0] + out[1] * g[1]).sum().backward()
    near(out[0], want[0], torch.float64, 'logp')
    near(lin.weight.grad, want[3], torch.float64, 'd_weight')
    assert not bias or near(lin.bias.grad, want[4], torch.float64, 'd_bias') is None
    loss = ct.linear_nll(h, head, t).loss
    assert torch.equal(loss, ct.linear_cross_entropy(h.reshape(-1, H), head, t.reshape(-1)))
    near(loss, -want[0].sum() / (t != -100).sum(), torch.float64, 'loss')


def test_tied_embeddings_and_weights_alone_are_heads():
    h, w, b, t, _ = case()
    tokens, lin = embedding(w, b)
    weight = torch.nn.Parameter(w)
    assert ct.Head.of(tokens).weight is ct.Head.of(lin).weight is tokens.weight and ct.Head.of(weight).weight is weight
    hidden = tokens(t.clamp(min=0))
    ct.linear_nll(hidden, ct.Head.of(lin), t).loss.backward()
    both = tokens.weight.grad.clone()
    tokens.weight.grad = None
    logits = tokens(t.clamp(min=0)) @ tokens.weight.t()
    torch.nn.functional.cross_entropy(logits.reshape(-1, V), t.reshape(-1)).backward()
    near(both, tokens.weight.grad, torch.float64, 'of both uses')


class Lora(torch.nn.Module):
    """As peft's other adapters: its weight is that of the layer below"""

    def __init__(self, base, merged=False):
        super().__init__()
        self.base_layer, self.merged = base, merged
        self.weight, self.bias = base.weight, base.bias


class ColumnParallel(torch.nn.Module):
    """As Megatron's: weight and sizes of a rank"""

    def __init__(self, whole, rows, **members):
        super().__init__()
        self.weight, self.bias, self.output_size = torch.nn.Parameter(torch.zeros(rows, H)), None, whole
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0
        vars(self).update(members)


def test_a_part_of_the_vocabulary_is_a_head_with_a_group():
    part = ColumnParallel(2 * V, V)
    with pytest.raises(ValueError, match=r'Head.of: module is a ColumnParallel, whose weight \[23, 8\] is a part of the vocabulary of '
                       '46, expected tp_group='):
        ct.Head.of(part)
    with pytest.raises(ValueError, match='is a part of the vocabulary, expected tp_group='):
        ct.Head.of(ColumnParallel(None, V))  # as Transformer Engine's
    me = cb.Comm.self()
    assert ct.Head.of(part, tp_group=me).tp_group is me and ct.Head.of(part, tp_group=None).weight is part.weight
    assert ct.Head.of(ColumnParallel(V, V)).weight.shape == (V, H)  # all of it
    assert ct.Head.of(ColumnParallel(None, V, tp_size=1)).weight.shape == (V, H)


def test_an_adapter_over_a_layer_is_no_head():
    base = torch.nn.Linear(H, V)
    with pytest.raises(ValueError, match=r'Head.of: module is a test_torch_head\.Lora, an adapter over a base layer, and no LoRA: a loss of its weight'):
        ct.Head.of(Lora(base))
    assert ct.Head.of(Lora(base, merged=True)).weight is base.weight


def test_a_head_that_peft_trains_as_a_whole():
    peft = pytest.importorskip('peft')
    model = torch.nn.ModuleDict({'body': torch.nn.Linear(H, H), 'lm_head': torch.nn.Linear(H, V)})
    saved = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=['body'], modules_to_save=['lm_head'])).base_model.model['lm_head']
    assert ct.Head.of(saved).weight.requires_grad and ct.Head.of(saved).weight is saved.modules_to_save['default'].weight


@pytest.mark.parametrize('call, words', [
    (lambda h, w, t: ct.Head.of(torch.nn.ReLU()), r'module is a ReLU, whose weight is a NoneType, expected a module with a weight'),
    (lambda h, w, t: ct.Head.of(torch.nn.LayerNorm(3)), r'module is a LayerNorm, whose weight is \[3\], expected'),
    (lambda h, w, t: ct.linear_nll(h, torch.nn.Linear(H, V), t), r'weight is a Linear, expected a torch.Tensor, or a Head: Head.of'),
    (lambda h, w, t: ct.linear_nll(h, ct.Head(w, tp_group=cb.Comm.self()), t, tp_group=cb.Comm.self()),
     'linear_nll: tp_group is given, and the Head has one'),
    (lambda h, w, t: ct.over_chunks(lambda z, rows: z, h, ct.Head(w, softcap=3.0)), 'over_chunks: the Head has softcap=3.0, which'),
    (lambda h, w, t: ct.over_chunks(lambda z, rows: z, h, ct.Head(w, main_grad=True)), 'over_chunks: the Head has main_grad=True'),
    (lambda h, w, t: ct.over_chunks(lambda z, rows: z, h, ct.Head(w, grad_reduction='sum')),
     "over_chunks: the Head has grad_reduction='sum', which .* no DTensor: .* leave it out"),
    (lambda h, w, t: ct.over_chunks(lambda z, rows: z, h, ct.Head(w, vocab=(0, None))), r'over_chunks: the Head has vocab=\(0, None\), which'),
    (lambda h, w, t: ct.over_chunks(lambda z, rows: z, h, ct.Head(w, vocab=V)), 'over_chunks: the Head has vocab=23, which'),
    (lambda h, w, t: ct.linear_nll(h, ct.Head(w, grad_reduction='mean'), t),
     "linear_nll: the Head has grad_reduction='mean', and no ranks share its weight: .* or leave it out"),
    (lambda h, w, t: ct.linear_logprob(h, ct.Head(w, grad_reduction='bogus'), t), "linear_logprob: the Head has grad_reduction='bogus'"),
    (lambda h, w, t: ct.linear_cross_entropy(h[0], ct.Head(w, rows=V), t[0]), "linear_cross_entropy: the Head has rows=23, and no ranks"),
    (lambda h, w, t: ct.linear_nll(h, ct.Head.of(with_bias(w)), t),
     r"linear_nll: weight is a parameter of DeepSpeed's ZeRO-3 and bias is \[23\], expected a head without one: bias=False"),
    (lambda h, w, t: ct.linear_nll(h, ct.Head(partitioned(w), rows=V + 1), t), "linear_nll: the Head has rows=24, and DeepSpeed's ZeRO-3 has 23"),
    (lambda h, w, t: ct.linear_cross_entropy(h[0], ct.Head(w), t[0], linear_bias=w[:, 0]), "expected the Head's bias alone")])
def test_what_a_head_does_not_say_is_refused(call, words):
    h, w, _, t, _ = case()
    with pytest.raises(ValueError, match=words):
        call(h, w, t)
