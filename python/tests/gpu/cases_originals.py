# SPDX-License-Identifier: Apache-2.0
"""Functions of other packages that need a GPU, and ours, on the same inputs: values and gradients. A case is skipped
if its package is not installed."""
import importlib
import importlib.machinery
import sys
import types

import torch
import torch.distributed as dist

import colobridge.torch as ct
from colobridge import compat

from common import Skip, leaf, me, near, size

TOKENS, HIDDEN = 96, 128  # verl asks for a multiple of 128


def original(name):
    """The module of that name. Packages above it are entered but not run: they would want Ray, transformers, ..."""
    where = None
    for parent in ['.'.join(name.split('.')[:i]) for i in range(1, name.count('.') + 1)]:
        spec = importlib.machinery.PathFinder.find_spec(parent, where)
        if spec is None:
            raise Skip('%s is not installed' % parent)
        where = spec.submodule_search_locations
        if parent not in sys.modules:
            sys.modules[parent] = types.ModuleType(parent)
            sys.modules[parent].__path__ = where
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as why:
        raise Skip('%s: %s' % (name.split('.')[0], why)) from None


def head_case(vocabulary, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(TOKENS, HIDDEN, generator=rng).to(dtype).cuda()
    w = (torch.randn(vocabulary, HIDDEN, generator=rng) * 0.3).to(dtype).cuda()
    b = torch.randn(vocabulary, generator=rng).cuda()
    t = torch.randint(0, vocabulary, (TOKENS,), generator=rng)
    t[1::7] = -100
    return h, w, b, t.cuda(), torch.randn(TOKENS, generator=rng).cuda()


def agree(inputs, theirs, ours, bound, what):
    """Both take leaves and return one tensor or several; both sides' products are fp32 sums in another order."""
    found = []
    for function in (theirs, ours):
        leaves = [leaf(x) for x in inputs]
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        rng = torch.Generator().manual_seed(5)
        sum((o.double() * torch.randn(o.shape, generator=rng, dtype=torch.float64).cuda()).sum() for o in out).backward()
        found.append(([o.detach() for o in out], [x.grad for x in leaves]))
    for i, (a, b) in enumerate(zip(found[0][0] + found[0][1], found[1][0] + found[1][1])):
        near(b, a.double(), bound, (what, i))


def case_liger_fused_linear_cross_entropy():
    """Every argument that ours has: bias, class weights, ignore_index, z-loss, label smoothing, softcap, reductions."""
    liger = original('liger_kernel.ops.fused_linear_cross_entropy').LigerFusedLinearCrossEntropyFunction.apply
    vocabulary = 1000
    h, w, b, t, _ = head_case(vocabulary)
    per_class = torch.rand(vocabulary, generator=torch.Generator().manual_seed(3)).cuda() + 0.5
    of_target = per_class[t.clamp(min=0)] * (t != -100)
    for reduction in ('mean', 'sum', 'none'):
        for cap in (None, 5.0):
            for smoothing, z in ((0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2)):
                for ignored in (-100, 7):
                    targets = torch.where(t == -100, ignored, t)
                    more = dict(reduction=reduction, label_smoothing=smoothing, z_loss=z,
                                ignore_index=ignored, mode='auto' if reduction == 'none' else 'loss')

                    def ours(x, y, c, more=more, targets=targets, cap=cap):
                        out = ct.linear_nll(x, ct.Head(y, c, softcap=cap), targets, **more)
                        return out if reduction == 'none' else out.loss

                    def theirs(x, y, c, targets=targets, smoothing=smoothing, z=z, cap=cap, ignored=ignored):
                        return liger(x, y, targets, c, None, ignored, z, smoothing, reduction, cap)[0]
                    agree((h, w, b), theirs, ours, 2e-4, (reduction, cap, smoothing, z, ignored))
        agree((h, w), lambda x, y: liger(x, y, t, None, per_class, -100, 0.0, 0.0, reduction)[0],
              lambda x, y: (ct.linear_nll(x, y, target=t, reduction='none', mode='auto') * of_target
                            if reduction == 'none' else
                            ct.linear_nll(x, y, target=t, reduction=reduction, mask=of_target).loss),
              2e-4, ('class weights', reduction))


def case_verl_linear_cross_entropy():
    """Its kernels take the vocabulary over the ranks; d_hidden is summed over them inside."""
    verl = original('verl.utils.kernel.linear_cross_entropy').linear_cross_entropy
    whole = 1024
    each = whole // size()
    h, w, _, t, _ = head_case(whole, torch.bfloat16)
    t = t.clamp(min=0)
    mine = slice(me() * each, (me() + 1) * each)
    group = dist.group.WORLD if size() > 1 else None
    for temperature in (1.0, 0.7):
        for reduction in ('none', 'sum', 'mean'):
            agree((h, w[mine]), lambda x, y: verl(x, y, t, temperature, reduction, group),
                  lambda x, y: compat.linear_cross_entropy(x, y, t, temperature, reduction, group), 3e-2,
                  (temperature, reduction))
