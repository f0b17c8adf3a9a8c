# SPDX-License-Identifier: Apache-2.0
"""Losses and uniform bridges under torch.compile(fullgraph=True): the bits of eager calls, opcheck, what is refused."""
import contextlib
import gc
import itertools
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 14):
    pytest.skip('this PyTorch %s is before 2.14' % torch.__version__, allow_module_level=True)

import torch._dynamo  # noqa: E402 # before ranks are forked
import torch._dynamo.testing  # noqa: E402
import torch._functorch.config  # noqa: E402
from colobridge.torch import compiled  # noqa: E402
from world import World  # noqa: E402

BACKEND = os.environ.get('COLO_TEST_BACKEND', 'aot_eager')  # inductor compiles C++, which takes a minute a case
V, H = 8, 4


@pytest.fixture(scope='module')
def world():
    """Ranks compile one after the other on a busy machine, and wait for each other meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('COLO_TIMEOUT_MS', '300000')
        four = World(4)
        yield four
        four.close()


def drawn(seed, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    return {'z': torch.randn(2, 3, V, generator=make, dtype=dtype), 'h': torch.randn(2, 3, H, generator=make, dtype=dtype),
            'w': torch.randn(V, H, generator=make, dtype=dtype), 't': torch.randint(0, 4 * V, (2, 3), generator=make),
            'm': torch.rand(2, 3, generator=make)}


def cases(tp, dp):
    """Functions of drawn tensors; targets are those of all ranks' columns."""
    return {
        'logprob': lambda z, t: (lambda a: (a[0] * 2 + a[1] * 3 + a[2]).sum())(ct.logprob(
            z * 1.5, t, tp_group=tp, entropy=True, loss=True, temperature=1.3, label_smoothing=0.1)),
        'logprob alone': lambda z, t: ct.logprob(z * 1.5, t, tp_group=tp).pow(2).sum(),
        'entropy': lambda z: ct.entropy(z * 1.5, tp_group=tp).pow(2).sum(),
        'nll': lambda z, t: ct.nll(z * 1.5, t, tp_group=tp, reduce_group=dp).loss * 3,
        'nll as its loss': lambda z, t: ct.nll(z * 1.5, t, tp_group=tp, reduce_group=dp, softcap=2., temperature=.7) * 3,
        'nll of weights': lambda z, t, m: ct.nll(z * 1.5, t, mask=m, tp_group=tp, reduce_group=dp).num * 3,
        'nll of groups': lambda z, t, m: ct.nll(z * 1.5, t, mask=m, tp_group=tp, reduce_group=dp, groups=t % 3, group_weight=[1, .5, -2.]) * 3,
        'nll per token': lambda z, t: ct.nll(z * 1.5, t, tp_group=tp, reduction='none').pow(2).sum(),
        'linear_logprob': lambda h, w, t: ct.linear_logprob(h * 2, w * 1, target=t, tp_group=tp).pow(2).sum(),
        'linear_nll': lambda h, w, t: ct.linear_nll(h * 2, w * 1, target=t, tp_group=tp, reduce_group=dp).loss * 2,
        'linear_nll of groups': lambda h, w, t: ct.linear_nll(
            h * 2, w * 1, target=t, tp_group=tp, reduce_group=dp, groups=t % 3, group_weight=torch.tensor([1, .5, -2.])).total * 2}


def alike(fn, given, backend=BACKEND):
    """Loss and gradients of two calls are the bits of eager's, and nothing is kept when they are over."""
    graph = torch.compile(fn, fullgraph=True, backend=backend)
    trains = [t.is_floating_point() and t.shape != (2, 3) for t in given]  # that is a mask
    for k in range(2):
        sides = [[(t * (1 + k) if want else t).clone().requires_grad_(want) for t, want in zip(given, trains)]
                 for _ in range(2)]
        made = []
        for call, side in zip((fn, graph), sides):
            made.append(call(*side))
            made[-1].backward()
        assert torch.equal(*made)
        for a, b in zip(*sides):
            assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))
    with torch.no_grad():
        assert torch.equal(fn(*given), graph(*given))
    del made
    gc.collect()
    assert not compiled._held


CONTEXTS = {'grad': contextlib.nullcontext, 'no_grad': torch.no_grad, 'inference_mode': torch.inference_mode,
            'bf16': lambda: torch.autocast('cpu', torch.bfloat16), 'fp16': lambda: torch.autocast('cpu', torch.float16)}


def seen(call, context, given, trains):
    """What a call gives in a context: the type of the result, and of each output the flags, the numbers, and the gradients
    of what trains, or that it has none. Strides are those of eager's
    only where tensors are contiguous: a graph's outputs are, and its gradients lie as what they are of."""
    leaves = [t.detach().clone().requires_grad_(name in trains) for name, t in given.items()]
    try:
        with CONTEXTS[context]():
            made = call(*leaves)
    except Exception as why:
        return type(why).__name__ if isinstance(why, (ValueError, TypeError)) else 'another error'
    outs = made if isinstance(made, tuple) else (made,)
    found = [type(made)]
    for out in outs:
        found += [(out.requires_grad, out.is_leaf, out.is_inference(), out.grad_fn is None, out.dtype, out.device,
                   tuple(out.shape), out.contiguous().stride()), out.detach().clone()]
        if out.requires_grad:
            grads = torch.autograd.grad(out.sum(), [t for t in leaves if t.requires_grad], retain_graph=True,
                                        allow_unused=True)
            found += [g if g is None else g.clone() for g in grads]
            found += [None if g is None else (g.dtype, g.requires_grad) for g in grads]
    return found


def same(got, want):
    """Also where one is NaN"""
    return len(got) == len(want) and all(
        torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25)) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else a is b is None or not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b
        for a, b in zip(got, want))


def compared(name, fn, given, trains, context, backend, dynamic=None):
    # backward runs once for each output, and each case has a graph
    with torch._functorch.config.patch(donated_buffer=False), torch._dynamo.config.patch(recompile_limit=64):
        want = seen(fn, context, given, trains)
        got = seen(torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic), context, given, trains)
    where = '%s under %s, %s, where %s train: eager %s, compiled %s' % (name, context, backend, trains, want, got)
    assert isinstance(want, str) == isinstance(got, str), where
    assert isinstance(want, str) or same(got, want), where


def losses(rank):
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    given = drawn(1)
    given['t'] = given['t'] % (2 * V)
    given['z'] = given['z'] * (1 + rank % 2 / 8)  # equal shards of calls without targets are refused
    for name, fn in cases(tp, dp).items():
        alike(fn, [given[arg] for arg in fn.__code__.co_varnames[:fn.__code__.co_argcount]])


def test_losses_in_a_graph_have_the_bits_of_eager_ones(world):
    world.run(losses, timeout=500)


def bridges(rank):
    for src, dst, options, shape in (('dp=4', 'tp=2,cp=2,dp=1', dict(output='sharded'), (1, 8, 3)),
                                     ('tp=2,dp=2', 'cp=2,dp=2', {}, (2, 4, 3)),
                                     ('dp=2,tp=2', 'tp=4,dp=1', dict(axes='sbh'), (4, 2, 3)),
                                     ('dp=4', 'tp=4,dp=1', {}, (1, 4, 3))):
        carry = ct.Bridge(src, dst, group=dist.group.WORLD, **options)
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank if src == 'dp=4' else 1))
        alike(lambda x: (carry(x * 2) ** 2).sum(), [x])
    for _ in range(3):  # eager backward of a fan-in returns a part of what it is given, an operator must not
        y, token = torch.ops.colobridge.run([x], len(compiled._asked) - 1, [True], [], [])
        d_y = torch.ones_like(y)
        d_x, = torch.ops.colobridge.run_backward(token, [d_y], [x], [True])
        assert d_x.untyped_storage().data_ptr() != d_y.untyped_storage().data_ptr()


def test_a_bridge_in_a_graph_has_the_bits_of_an_eager_one(world):
    world.run(bridges, timeout=500)


def shapes(rank):
    """What changes is a symbol of one graph, as far as all ranks have parts of one size; other shapes have graphs."""
    group = dist.group.WORLD
    mapped = cb.Layout.dst('cp=4').map_offset(0, 1024)
    for src, dst, options, whole, most in (
            ('dp=4', 'tp=2,cp=2,dp=1', dict(output='sharded'), lambda n: (1, n, 3), 2),
            ('dp=2,tp=2', 'tp=4,dp=1', dict(axes='sbh'), lambda n: (n, 2, 3), 2),
            ('dp=4', 'tp=2,cp=2,dp=1', {}, lambda n: (n // 4, 8, 3), 2),
            ('dp=4', 'cp=4,dp=1', {}, lambda n: (1, n + 1, 3), 8),  # uneven
            (cb.Layout.src('dp=4'), mapped, {}, lambda n: (1, n, 3), 8)):
        torch._dynamo.reset()
        carry, counted = ct.Bridge(src, dst, group=group, **options), torch._dynamo.testing.CompileCounterWithBackend(BACKEND)

        def fn(x):
            y = carry(x * 2)
            return y + y.new_zeros(y.shape)  # of the shape that the graph expects
        graph = torch.compile(fn, fullgraph=True, backend=counted)
        sizes = (8, 24, 48, 16, 40, 200) if most > 2 else range(8, 96, 8)
        for n in sizes:
            x = torch.randn(whole(n), generator=torch.Generator().manual_seed(rank), requires_grad=True)
            sides = [call(x) for call in (graph, fn)]
            assert torch.equal(*sides), (src, dst, n)
            assert torch.equal(*(torch.autograd.grad(y.pow(2).sum(), x)[0] for y in sides))
        assert counted.frame_count <= most, (src, dst, counted.frame_count)
    torch._dynamo.reset()
    carry, counted = ct.Bridge('dp=4', 'cp=4,dp=1', group=group), torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    graph = torch.compile(lambda x: carry(x, shape=(4 * x.shape[0], x.shape[1], x.shape[2])), fullgraph=True, backend=counted)
    for n in range(8, 48, 8):
        x = torch.randn(1, n, 3)
        assert torch.equal(graph(x), carry(x))
    assert counted.frame_count == 2
    x = torch.randn(1, 16, 3)
    for name, fn in {'bridge': carry, 'relayout': lambda x: ct.relayout(x, None, 'zigzag', 'block', group=group, dim=1)}.items():
        torch._dynamo.reset()
        for context in CONTEXTS:
            compared(name, fn, {'x': x}, ('x',), context, BACKEND)
    for trains in (('x',), ()):
        compared('bridge', carry, {'x': x}, trains, 'grad', 'eager')


def test_a_bridge_in_a_graph_takes_shapes_that_change(world):
    world.run(shapes, timeout=500)


def symbols(rank):
    """Each size of y for a size of x that is a symbol, as a graph is made, is the one for that number."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    mapped = [cb.Layout.dst('cp=2,dp=2').map_offset(3, 40), cb.Layout.dst('cp=2,dp=2').map_table([9, 3, 1, 0, 8, 15, 2, 7], 16)]
    kinds = ({'dst': 'cp=2,dp=2', 'output': 'sharded'}, {'dst': 'cp=4', 'output': 'sharded'}, {'dst': 'dp=4'},
             *({'dst': dst, 'output': 'sharded'} for dst in mapped))
    for kind in kinds:
        carry, seen = ct.Bridge('dp=4', group=dist.group.WORLD, **kind), 0
        for axis, n in itertools.product(range(2), range(1, 26)):
            shape = [4, 8, 3]
            shape[axis] = n
            try:
                want = carry._engine._shape_of_y(None, None, tuple(shape))
            except ValueError:
                continue  # no call has this shape
            env = ShapeEnv()
            name = ConstantSource('n%d' % n)
            shape[axis] = env.create_symintnode(env.create_symbol(n, name), hint=n, source=name)
            assert [int(m) for m in carry._engine._shape_of_y(None, None, tuple(shape))] == want, (kind, axis, n)
            seen += 1
        assert seen > 9, kind


def test_sizes_of_y_that_are_symbols_are_those_of_its_numbers(world):
    world.run(symbols)


def frozen(rank):
    carry = ct.Bridge('dp=4', 'tp=4,dp=1', group=dist.group.WORLD, frozen=True)
    alike(lambda x: (x * carry(x * 2)).sum(), [torch.ones(1, 4, 3)])
    in_graph = torch.compile(lambda x: carry(x * 2), fullgraph=True, backend=BACKEND)
    assert not in_graph(torch.ones(1, 4, 3, requires_grad=True)).requires_grad


def test_a_frozen_bridge_in_a_graph_lets_no_gradient_back(world):
    world.run(frozen, timeout=500)


def relayouts(rank):
    """Packed rows by a table on the host and by a list, of lengths that change; dense ones; heads; a table before x."""
    group, make = dist.group.WORLD, torch.Generator().manual_seed(rank)
    cu = torch.tensor([0, 16, 24])

    def fn(a, b, c, d):
        made = (ct.relayout(a * 2, cu, 'zigzag', 'block', group=group), ct.relayout(b * 2, cu, 'zigzag', 'heads', group=group),
                ct.relayout(group=group, src='block', dst='whole', cu_seqlens=cu, x=a * 3),
                ct.relayout(c * 2, [0, 16, 24], 'heads', 'block', group=group),
                ct.relayout(d * 2, None, 'zigzag', 'block', group=group, dim=-2))
        return sum((t ** 2).sum() for t in made)
    alike(fn, [torch.randn(shape, dtype=torch.float64, generator=make) for shape in ((6, 3), (6, 8, 3), (24, 2, 3), (2, 4, 3))])
    graph = torch.compile(lambda x, cu: ct.relayout(x, cu, 'zigzag', 'block', group=group), fullgraph=True, backend=BACKEND)
    for lengths in ([8, 16], [16, 8], [8, 8, 8]):
        edges = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
        x, table = torch.randn(6, 3, generator=make), torch.tensor(edges)
        want = ct.relayout(x, edges, 'zigzag', 'block', group=group)
        assert torch.equal(graph(x, edges), want)
        for _ in range(2):
            assert torch.equal(graph(x, table), want)
        padded = torch.compile(lambda x, cu: ct.relayout(x * 2, cu, 'block', 'zigzag', group=group, pad=True) * 2, backend=BACKEND)
        assert torch.equal(padded(x, table), 4 * ct.relayout(x, edges, 'block', 'zigzag', group=group, pad=True))
        kept = sys.modules['colobridge.torch.relayout']._tables  # so that one on a GPU is read once
        assert [of() is table for of, _, _ in kept].count(True) == 1
    x = torch.randn(6, 8, generator=make, requires_grad=True)
    for number, asked in enumerate(compiled._asked):
        if asked.name == 'relayout' and ('dst', 'heads') in asked.options and len(asked.tensors) == 2:
            result = torch.library.opcheck(torch.ops.colobridge.run.default, ([x, cu], number, [True, False], [], []))
            assert set(result.values()) == {'SUCCESS'}, (asked, result)
            break
    else:
        raise AssertionError(compiled._asked)


def test_a_relayout_in_a_graph_has_the_bits_of_an_eager_one(world):
    world.run(relayouts, timeout=500)


def refused(rank):
    """One rank's wrong argument is the others' error, in a graph, too."""
    group = dist.group.WORLD
    graph = torch.compile(lambda x: ct.relayout(x, None, 'zigzag', 'heads' if rank == 1 else 'block', group=group, dim=1),
                          fullgraph=True, backend=BACKEND)
    with pytest.raises((ValueError, RuntimeError), match='expected an axis of heads behind axis 1'):
        graph(torch.zeros(2, 4))


def test_a_relayout_that_is_refused_in_a_graph_is_every_ranks_error(world):
    world.run(refused, timeout=500)


def linear_losses():
    """Of hidden, weight, bias, target and mask"""
    made = {'linear_logprob': lambda h, w, b, t, m: ct.linear_logprob(h, ct.Head(w, b), t),
            'linear_logprob of all': lambda h, w, b, t, m: ct.linear_logprob(h, w, target=t, entropy=True, loss=True),
            'linear_logprob and outputs': lambda h, w, b, t, m: ct.linear_logprob(h, ct.Head(w, b), t, outputs=('lse', 'argmax')),
            'linear_nll of temperatures': lambda h, w, b, t, m: ct.linear_nll(h, ct.Head(w, b), t, temperature=m + 0.5),
            'linear_nll of an upstream': lambda h, w, b, t, m: ct.linear_nll(h, ct.Head(w, b), t, reduction='sum', upstream=1.0)}
    for mode, reduction in itertools.product(('loss', 'logprob', 'keep'), ('mean', 'sum', 'none')):
        made['linear_nll %s %s' % (mode, reduction)] = (
            lambda h, w, b, t, m, mode=mode, reduction=reduction: ct.linear_nll(
                h, ct.Head(w, b, softcap=30.0), t, mode=mode, reduction=reduction))
    made['linear_nll of weights'] = lambda h, w, b, t, m: ct.linear_nll(h, ct.Head(w, b), t, mask=m)
    return made


LOSSES = {
    'logprob': lambda z, t, m: ct.logprob(z, t),
    'logprob of all': lambda z, t, m: ct.logprob(z, t, entropy=True, loss=True, z_loss=0.1),
    'logprob and outputs': lambda z, t, m: ct.logprob(z, t, entropy=True, outputs=('correct', 'lse', 'sum_p2', 'argmax')),
    'logprob of temperatures': lambda z, t, m: ct.logprob(z, t, temperature=m + 0.5),
    'nll of temperatures': lambda z, t, m: ct.nll(z, t, temperature=m + 0.5),
    'logprob and no outputs': lambda z, t, m: ct.logprob(z, t, outputs=()),
    'logprob of an option that is not its': lambda z, t, m: ct.logprob(z, t, z_loss=0.1),
    'entropy': lambda z, t, m: ct.entropy(z),
    'entropy of a mask': lambda z, t, m: ct.entropy(z, mask=m),
    'nll': lambda z, t, m: ct.nll(z, t),
    'nll sum': lambda z, t, m: ct.nll(z, t, reduction='sum'),
    'nll none': lambda z, t, m: ct.nll(z, t, reduction='none'),
    'nll of no reduction': lambda z, t, m: ct.nll(z, t, reduction='no'),
    'nll of weights': lambda z, t, m: ct.nll(z, t, mask=m),
    'nll none of weights': lambda z, t, m: ct.nll(z, t, mask=m, reduction='none'),
    'nll of wrong weights': lambda z, t, m: ct.nll(z, t, mask=-m),
    'nll of no targets': lambda z, t, m: ct.nll(z, m)}


@pytest.mark.parametrize('name', [*LOSSES, *linear_losses()])
def test_outputs_of_a_graph_have_the_flags_of_eager_ones(name):
    made = drawn(3, torch.float32)
    if name in LOSSES:
        fn, all_of = LOSSES[name], {'z': made['z'], 't': made['t'] % V, 'm': made['m']}
        trained = [('z',), ('m',), ()]
        others = [dict(all_of, z=made['z'].transpose(0, 1).contiguous().transpose(0, 1)),
                  dict(all_of, z=made['z'].bfloat16())]
    else:
        fn, all_of = linear_losses()[name], {'h': made['h'], 'w': made['w'], 'b': made['w'].sum(1), 't': made['t'] % V,
                                             'm': made['m']}
        trained = [('h', 'w', 'b'), ('h', 'm'), ('m',)]
        others = [dict(all_of, h=made['h'].transpose(0, 1).contiguous().transpose(0, 1), w=made['w'].t().contiguous().t()),
                  {key: t.double() if key in 'hwb' else t for key, t in all_of.items()}]
    for backend in ('eager', BACKEND):
        torch._dynamo.reset()
        for context in CONTEXTS if backend == BACKEND else ('grad',):
            compared(name, fn, all_of, trained[0], context, backend)
        for trains in trained[1:]:
            compared(name, fn, all_of, trains, 'grad', backend)
        for given in others if backend == BACKEND else ():
            compared(name, fn, given, trained[0], 'grad', backend, dynamic=True)


def test_a_graph_has_the_autocast_of_its_call():
    given = drawn(4, torch.float32)
    h, w, t = given['h'], given['w'], given['t'] % V

    def mixed(h, w):
        with torch.autocast('cpu', torch.bfloat16):
            inside = ct.linear_logprob(h, w, target=t)
            with torch.autocast('cpu', enabled=False):
                without = ct.linear_logprob(h, w, target=t)
        return inside, without, ct.linear_logprob(h, w, target=t)
    plain, graphs = [], [torch.compile(mixed, fullgraph=True, backend=backend) for backend in ('eager', BACKEND)]
    for context in ('grad', 'bf16', 'grad', 'fp16'):  # one graph for each
        with CONTEXTS[context]():
            want = mixed(h, w)
            for graph in graphs:
                assert all(map(torch.equal, graph(h, w), want))
        plain.append(want)
    assert not torch.equal(plain[0][0], plain[0][1]) and not torch.equal(plain[1][2], plain[3][2])


def test_whole_numbers_that_change_are_symbols_of_a_graph():
    """Of other numbers each value has a graph."""
    z, t = drawn(5)['z'].requires_grad_(), drawn(5)['t'] % V
    for fn, numbers, most in ((lambda z, n: ct.logprob(z * 2, t, ignore_index=-n), (2, 3, 4, 5, 6), 2),
                              (lambda z, n: ct.logprob(z * 2, t, temperature=n), (0.7, 1.1, 1.3), 9)):
        torch._dynamo.reset()
        counted = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
        graph = torch.compile(fn, fullgraph=True, backend=counted)
        for n in numbers:
            got, want = graph(z, n), fn(z, n)
            assert torch.equal(got, want)
            assert torch.equal(*(torch.autograd.grad(y.sum(), z)[0] for y in (got, want)))
        assert counted.frame_count <= most


def test_torchs_opcheck_passes():
    given = drawn(2)
    given['t'] = given['t'] % V
    given.update(g=given['t'] % 3, k=torch.tensor([1, .5, -2.]))
    names = {'vocab_parallel_logits': 'z', 'hidden': 'h', 'weight': 'w', 'target': 't', 'mask': 'm', 'groups': 'g', 'group_weight': 'k'}
    before = len(compiled._asked)
    for fn in cases(None, None).values():
        alike(fn, [given[arg] for arg in fn.__code__.co_varnames[:fn.__code__.co_argcount]])
    assert len(compiled._asked) >= before + 8
    for number, asked in list(enumerate(compiled._asked))[before:]:
        for wanted, layout in ((True, torch.contiguous_format), (False, torch.contiguous_format), (True, 'transposed')):
            tensors = [given[names[key]].clone() for key in asked.tensors]
            if layout == 'transposed':
                tensors = [t if t.dim() < 2 else t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
            tensors = [t.requires_grad_(wanted and t.is_floating_point() and t.dim() > 1) for t in tensors]
            result = torch.library.opcheck(torch.ops.colobridge.run.default, (
                tensors, number, [t.requires_grad for t in tensors], [], [1., .5, 2.][:sum(abs(n) for _, n in asked.reals)]))
            assert set(result.values()) == {'SUCCESS'}, (asked, result)


FIRST = '''
import colobridge.torch as ct
import torch
z, t = torch.randn(3, 4), torch.tensor([0, 1, 2])
made = torch.compile(lambda z: ct.nll(z, t).loss, fullgraph=True, backend='eager')(z)
print(torch.equal(made, ct.nll(z, t).loss))
'''


def test_the_first_call_of_a_program_may_be_in_a_graph():
    done = subprocess.run([sys.executable, '-c', FIRST], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False)
    assert done.stdout == 'True\n', done.stdout


def test_a_graph_serves_other_shapes():
    fn = cases(None, None)['nll']
    graph = torch.compile(fn, fullgraph=True, backend=BACKEND, dynamic=True)
    for rows in (2, 3, 5):
        z, t = torch.randn(rows, 3, V), torch.randint(V, (rows, 3))
        assert torch.equal(fn(z, t), graph(z, t))


def test_an_error_in_a_graph_is_eagers():
    graph = torch.compile(cases(None, None)['logprob alone'], fullgraph=True, backend=BACKEND)
    with pytest.raises(ValueError, match=r'target is \[2, 4\], expected \[2, 3\]'):
        graph(torch.randn(2, 3, V), torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize('backend', ['eager', BACKEND])
def test_class_weights_that_want_a_gradient_are_refused_in_a_graph_too(backend):
    z, h, w, t = torch.randn(6, V), torch.randn(6, H), torch.randn(V, H), torch.randint(V, (6,))
    weights = torch.rand(V, requires_grad=True)
    for fn in (lambda z, h, w, weights: ct.cross_entropy(z, t, weights), lambda z, h, w, weights: ct.linear_nll(
            h, w, t, class_weight=weights).loss):
        graph = torch.compile(fn, fullgraph=True, backend=backend)
        for trains in (False, True):
            given = [x.clone().requires_grad_(trains) for x in (z, h, w)]
            for call in (fn, graph):
                with pytest.raises(ValueError, match='requires grad, expected a constant'):
                    call(*given, weights)
                with torch.no_grad():
                    assert torch.equal(call(*given, weights), fn(*given, weights.detach()))


def test_what_writes_its_arguments_leaves_the_graph():
    z, t = torch.randn(2, 3, V, requires_grad=True), torch.randint(V, (2, 3))

    def fn(z):
        return ct.logprob(z * 1, t, inplace_backward=True).sum()
    with pytest.raises(Exception, match='(?i)disable|graph break|skip'):
        torch.compile(fn, fullgraph=True, backend=BACKEND)(z)
    torch._dynamo.reset()
    torch.compile(fn, backend=BACKEND)(z).backward()
    got, z.grad = z.grad, None
    fn(z).backward()
    assert torch.equal(got, z.grad)


def test_export_and_vmap_are_refused_by_name():
    class Model(torch.nn.Module):
        def forward(self, z, t):
            return ct.logprob(z, t)
    z, t = torch.randn(2, 3, V), torch.randint(V, (2, 3))
    with pytest.raises(Exception, match='FakeTensorMode sees torch\'s operations alone'):
        torch.export.export(Model(), (z, t))
    with pytest.raises(Exception, match=r'torch.export\(\) of logprob\(\): its groups are of this process'):
        torch.export.export(Model(), (z, t), strict=True)
    with pytest.raises(RuntimeError, match='vmap.* ranks that exchange cannot do it once per sample|no memory of its own'):
        torch.func.vmap(lambda z: torch.ops.colobridge.run([z, t[0]], 0, [False, False], [], [])[0])(z)


def test_a_token_that_was_copied_is_an_error():
    graph = torch.compile(cases(None, None)['logprob alone'], fullgraph=True, backend=BACKEND)
    z = torch.randn(2, 3, V, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = graph(z, torch.randint(V, (2, 3)))
        with pytest.raises(RuntimeError, match='another token than forward returned'):
            loss.backward()
