# SPDX-License-Identifier: Apache-2.0
"""The lm_head of linear_logprob(): what a parameter may be (a part of DeepSpeed's, a tensor with a main_grad)."""
from typing import Any

import torch

from ..errors import ArgumentError
from .placed import is_placed

ORDINARY = torch.Tensor, torch.nn.Parameter, type(None)  # types of tensors that are no more than they seem


def partitioned(weight: Any, group: Any) -> tuple[Any, Any, int, str]:
    """(this rank's part, the group that shares them, all rows, how they are cut) of a parameter of DeepSpeed's
    ZeRO-3, which has no elements itself while no module of DeepSpeed's gathers it. Its gradient is added to
    ds_tensor.grad, because autograd would want one without elements."""
    held = weight.ds_tensor
    part = held.detach()

    def add(g: Any) -> None:
        with torch.no_grad():
            held.grad = g.clone() if held.grad is None else held.grad.add_(g)
    if weight.requires_grad and torch.is_grad_enabled():
        part.requires_grad_().register_hook(add)
    if hasattr(weight, 'main_grad'):
        part.main_grad = weight.main_grad
    return part, weight.ds_process_group if group is None else group, weight.ds_shape[0], 'flat'


def main_grads(what: str, weight: Any, bias: Any) -> Any:
    """(main_grad of weight, main_grad of bias or None), or None if neither is trained. The gradient of one that is frozen,
    which is made together with the other's, goes into memory that is not read."""
    found: dict[str, Any] = {}
    given = {name: t for name, t in (('weight', weight), ('bias', bias)) if t is not None}
    for name, t in given.items():
        if not t.requires_grad:
            continue
        grad = getattr(t, 'main_grad', None)
        if grad is None:
            raise ArgumentError("%s: main_grad=True, but %s has no attribute main_grad" % (what, name))
        grad = (grad.to_local() if is_placed(grad) else grad).detach()
        if grad.dtype not in (torch.float32, torch.float64):
            raise ArgumentError("%s: %s.main_grad is of %s, expected torch.float32 (or float64 of a "
                                "float64 head)" % (what, name, grad.dtype))
        found[name] = grad
    for grad in list(found.values())[:1]:
        for name in given.keys() - found.keys():
            t = given[name]
            found[name] = grad.new_zeros((t.to_local() if is_placed(t) else t).shape)
    return (found['weight'], found.get('bias')) if found else None
