# SPDX-License-Identifier: Apache-2.0
"""The lm_head of linear_logprob(): its C objects, and what a parameter may be (a DTensor, a tensor with a
main_grad, one that autocast casts)."""
import contextlib
import ctypes as c
import functools
import threading
from typing import Any

import torch

from .. import _structs as s
from .._lib import call, lib, size_of
from ..comm import Comm
from ..errors import STATUS, ArgumentError, FailedError
from .placed import is_placed
from .ready import HostWorkspace


class Core:
    """A colo_linear_logprob_t with its head: for one size, dtype, device and set of options."""

    def __init__(self, comm: Comm, head_comm: Comm | None, head: s.LmHeadConfig,
                 config: s.LinearLogprobConfig):
        self.comms = tuple(group for group in (comm, head_comm) if group is not None)  # live as long
        self.head, self.linear = c.c_void_p(), c.c_void_p()
        call('colo_lm_head_create', c.byref(self.head), head,
             head_comm.handle if head_comm is not None else None)
        for group in self.comms:
            group.serves(self.head, 'colo_lm_head_destroy')
        call('colo_linear_logprob_create', c.byref(self.linear), config, self.head, comm.handle)
        for group in self.comms:
            group.serves(self.linear, 'colo_linear_logprob_destroy')
        self.gathered = lib().colo_lm_head_gathered_size(self.head)
        self.used, self.kept = 0, True  # when; is it still among those of its communicator
        self.on_host = HostWorkspace()  # for the call that has the lock
        self.bound: Any = None  # what the head was last told of its parameters
        self.lock = threading.Lock()  # one call at a time: graphs of one thread may go backward on two

    def __del__(self) -> None:
        for group in self.comms:  # the second one finds NULL
            group.ends(self.linear, 'colo_linear_logprob_destroy')
            group.ends(self.head, 'colo_lm_head_destroy')

    def alive(self) -> 'Core':
        """Itself. RuntimeError: a communicator of its was destroyed, by an error or shutdown()."""
        if not self.linear:
            raise FailedError('linear_logprob: a communicator of the forward pass was destroyed since',
                              STATUS['ERR_STATE'])
        return self

    def workspace(self, which: int, tokens: int, max_valid: int) -> int:
        return size_of('colo_linear_logprob_workspace_size', self.linear, which, tokens, max_valid)

    def saved(self, tokens: int, max_valid: int) -> int:
        return size_of('colo_linear_logprob_saved_size', self.linear, tokens, max_valid)


def autocast(device: str) -> Any:
    """The dtype that autocast computes products in now, None outside of it."""
    enabled, dtype_of = _autocast(device)
    return dtype_of() if enabled() else None


def autocasts(device: Any) -> Any:
    """(type, dtype that products are computed in, None outside of autocast) of @device and of the host"""
    return tuple((kind, autocast(kind)) for kind in dict.fromkeys((device.type, 'cpu')))


@contextlib.contextmanager
def under(casts: Any) -> Any:
    """The autocast that autocasts() found"""
    with contextlib.ExitStack() as stack:
        for kind, dtype in casts:
            if dtype is not autocast(kind):  # which costs more
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        yield


def cast(t: Any, casts: Any) -> Any:
    """A tensor or None as autocast has it in a product on the first device of @casts. autocast itself would keep the copy
    of a parameter, before PyTorch 2.x one without its gradient."""
    dtype = casts[0][1]
    return t if t is None or dtype is None or t.dtype == torch.float64 else t.to(dtype)


@functools.lru_cache(maxsize=None)
def _autocast(device: str) -> tuple[Any, Any]:
    try:
        torch.is_autocast_enabled(device)
        return functools.partial(torch.is_autocast_enabled, device), \
            functools.partial(torch.get_autocast_dtype, device)
    except TypeError:  # before 2.4 the question has no argument
        if device == 'cuda':
            return torch.is_autocast_enabled, torch.get_autocast_gpu_dtype
        return torch.is_autocast_cpu_enabled, torch.get_autocast_cpu_dtype


@functools.lru_cache(maxsize=None)
def ordinary() -> tuple[Any, ...]:
    """Types of tensors that are no more than they seem, so that no caller has to look further."""
    return torch.Tensor, torch.nn.Parameter, type(None)


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
