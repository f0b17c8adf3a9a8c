# SPDX-License-Identifier: Apache-2.0
"""colobridge.compat compared with the functions that it takes the place of, values and gradients, where their packages are
installed; skipped by name elsewhere. Only the file of a function is imported: its package would want a GPU or
Megatron, whose process groups are given here."""
import importlib.machinery
import importlib.util
import sys
import types

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

from colobridge import compat  # noqa: E402

SKYRL = {'skyrl': 'backends/skyrl_train/distributed/megatron/model_utils.py',
         'skyrl_train': 'distributed/megatron/model_utils.py'}
V, H = 14, 6
_groups = {}


def file_of(package, path):
    """The module in a file of an installed package; skips where there is none"""
    spec = importlib.machinery.PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(package + ' is not installed')
    name = '_original_%s' % package
    if name not in sys.modules:
        loader = importlib.util.spec_from_file_location(name, '%s/%s' % (spec.submodule_search_locations[0], path))
        module = importlib.util.module_from_spec(loader)
        module.__package__ = '.'.join([package, *path.split('/')[:-1]])
        try:
            loader.loader.exec_module(module)
        except (ImportError, AttributeError) as why:  # it may want a later PyTorch
            pytest.skip('%s is installed, but does not run here: %s' % (package, why))
        sys.modules[name] = module
    return sys.modules[name]


def skyrl(package):
    parallel = types.ModuleType('megatron.core.parallel_state')
    parallel.get_tensor_model_parallel_group = lambda: _groups['tp']
    parallel.get_tensor_model_parallel_rank = lambda: dist.get_rank(_groups['tp'])
    parallel.get_tensor_model_parallel_world_size = lambda: 2
    packed = types.ModuleType('skyrl.backends.skyrl_train.utils.packed_tensor')
    packed.lengths_from_offsets = lambda cu: cu[1:] - cu[:-1]
    core = types.ModuleType('megatron.core')
    core.parallel_state = parallel
    for module in (types.ModuleType('megatron'), core, parallel, packed):
        sys.modules.setdefault(module.__name__, module)
    for parent in ('skyrl', 'skyrl.backends', 'skyrl.backends.skyrl_train', 'skyrl.backends.skyrl_train.utils'):
        sys.modules.setdefault(parent, types.ModuleType(parent))
    return file_of(package, SKYRL[package])


def groups(rank):
    """tp 0-1, 2-3 and cp 0-2, 1-3"""
    if 'tp' not in _groups:
        for name, sets in (('tp', ([0, 1], [2, 3])), ('cp', ([0, 2], [1, 3]))):
            for ranks in sets:
                group = dist.new_group(ranks)
                if rank in ranks:
                    _groups[name] = group
    compat.set_tensor_parallel_group(_groups['tp'])
    return _groups['tp'], _groups['cp']


def agree(fn, inputs, differentiable=True):
    """fn(their module or compat, *leaves) -> tensor or a tuple: values, and gradients of the inputs"""
    found = []
    for module in (_groups['module'], compat):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out = fn(module, *leaves)
        out = out if isinstance(out, tuple) else (out,)
        graph = [o for o in out if o.requires_grad]
        assert bool(graph) or not differentiable
        up = torch.Generator().manual_seed(5)
        if graph:
            sum((o.double() * torch.randn(o.shape, generator=up, dtype=torch.float64)).sum()
                for o in graph).backward()
        found.append(([o.detach().double() for o in out], [x.grad for x in leaves if x.is_floating_point()]))
    for theirs, ours in zip(*found):
        for a, b in zip(theirs, ours):
            # both are f32; gradients of W columns are sums of at most 16 products below 10
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b.double(), a.double(), rtol=2e-5, atol=2e-5)


def on_ranks(rank, package):
    # The same functions, without a compiler and a GPU
    torch.compile = lambda **_options: lambda fn: fn
    torch.Tensor.cuda = lambda self, **_options: self
    _groups['tensor'] = tensor = _groups.get('tensor', torch.tensor)
    torch.tensor = lambda *of, pin_memory=False, **options: tensor(*of, **options)
    tp, cp = groups(rank)
    _groups['module'] = skyrl(package)
    rng = torch.Generator().manual_seed(3)
    lo, hi = (0, V // 2) if dist.get_rank(tp) == 0 else (V // 2, V)
    whole = 3 * torch.randn(2, 8, V, generator=rng)
    states, head = torch.randn(2, 8, H, generator=rng), torch.randn(V, H, generator=rng)
    target = torch.randint(0, V, (2, 8), generator=rng)
    z, w = whole[..., lo:hi], head[lo:hi]
    agree(lambda m, z: m.DistributedLogprob.apply(z, target, lo, hi, tp, False), (z,))
    agree(lambda m, z: m.ChunkedDistributedLogprob.apply(z, target, lo, hi, 3, tp, False), (z,))
    for chunk in (None, 3):
        agree(lambda m, z: m.from_parallel_logits_to_logprobs(z, target, lo, hi, tp, chunk_size=chunk), (z,))
    agree(lambda m, z: m.vocab_parallel_entropy(z), (z,))
    c = dist.get_rank(cp)
    half = lambda x: torch.cat([x[:, 2 * c:2 * c + 2], x[:, 6 - 2 * c:8 - 2 * c]], 1)  # noqa: E731  # zigzag
    agree(lambda m, z: m.from_parallel_logits_to_logprobs(z, target, lo, hi, tp, cp_group=cp), (half(z),))
    # packed: sequences of 6 and 8 tokens, padded to 8 each
    cu, mask = torch.tensor([0, 8, 16]), torch.ones(2, 8, dtype=torch.bool)
    mask[0, :2] = False
    newer = hasattr(_groups['module'], 'vocab_parallel_entropy_packed_sequences')
    o = {'attention_mask': mask} if newer else {}
    name = 'from_parallel_logits_to_logprobs_packed_sequences'
    # The older one, which has no mask, adds gradients over cp, as NeMo-RL's does.
    packed = lambda m: getattr(m, name + ('_nemo_rl' if m is compat and not newer else ''))  # noqa: E731
    for part, group in ((z, None), (half(z), cp)):
        flat = part.reshape(1, -1, part.shape[-1])
        agree(lambda m, z: packed(m)(
            z, target.reshape(1, -1), cu, 8, lo, hi, tp, cp_group=group, **o), (flat,))
    if not newer:
        return
    weights = torch.randn(2, 8, generator=rng)
    agree(lambda m, z: m.vocab_parallel_entropy_weighted_sum(z, weights), (z,))
    loss_mask = torch.randint(0, 2, (2, 5), generator=rng)
    for part, hidden, group in ((z, states, None), (half(z), half(states), cp)):
        flat, states_flat = part.reshape(1, -1, part.shape[-1]), hidden.reshape(1, -1, H)
        for kept in (None, loss_mask):
            agree(lambda m, z: m.vocab_parallel_entropy_packed_sequences(z, cu, 8, 5, mask, kept, group), (flat,))
            with torch.no_grad():
                agree(lambda m, h, w: m.from_parallel_hidden_to_entropy_packed_sequences(
                    h, w, cu, 8, 5, mask, kept, group, tp, temperature=0.7), (states_flat, w), False)
        if not hasattr(_groups['module'], 'from_parallel_hidden_to_logprobs'):
            continue
        odd = target.where(target % 5 != 1, torch.tensor(-100)).where(target != 2, torch.tensor(V))
        agree(lambda m, h, w: m.FusedLinearChunkedDistributedLogprob.apply(h, w, odd, lo, hi, 3, tp), (states, w))
        agree(lambda m, h, w: m.from_parallel_hidden_to_logprobs_packed_sequences(
            h, w, target.reshape(1, -1), cu, 8, lo, hi, tp, cp_group=group, attention_mask=mask, temperature=0.7),
            (states_flat, w))
        if group is None:
            continue
        agree(lambda m, h, w: m.from_parallel_hidden_to_logprobs(
            h, w, target, lo, hi, tp, cp_group=cp, temperature=0.7), (hidden, w))


@pytest.mark.parametrize('package', list(SKYRL))
def test_functions_of_skyrl(world, package):
    if importlib.machinery.PathFinder.find_spec(package) is None:
        pytest.skip(package + ' is not installed')
    world.run(on_ranks, package)


@pytest.mark.parametrize('temperature', (1.0, 0.7))
def test_linear_cross_entropy_equals_verls_in_pytorch(temperature):
    # Its Triton kernels need a GPU; this is the module that verl takes instead of them.
    verl = file_of('verl', 'utils/experimental/torch_functional.py')
    rng = torch.Generator().manual_seed(6)
    h, w = torch.randn(3, 5, H, generator=rng), torch.randn(V, H, generator=rng)
    t, up = torch.randint(0, V, (3, 5), generator=rng), torch.randn(2, 15, generator=rng)
    found = []
    for fn in (verl.FusedLinearForPPO(4), compat.linear_cross_entropy):
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
        out = [o.reshape(-1) for o in fn(*leaves, t, temperature)]
        sum((o * u).sum() for o, u in zip(out, up)).backward()
        found.append([*out, *(x.grad for x in leaves)])
    for a, b in zip(*found):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
