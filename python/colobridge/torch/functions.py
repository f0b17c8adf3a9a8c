# SPDX-License-Identifier: Apache-2.0
"""Autograd functions whose gradients have none, and which nothing records that sees torch's operations alone."""
import functools
import sys
from typing import Any

import torch

from ..errors import STATUS, ArgumentError, FailedError

# Is torch.jit.trace() at work? How many modes see torch's operations, and its functions? int: this PyTorch has none.
is_tracing, dispatch_modes, function_modes = (getattr(torch._C, name, int) for name in (
    '_is_tracing', '_len_torch_dispatch_stack', '_len_torch_function_stack'))
_RECORDERS = {'ProxyTorchDispatchMode': 'make_fx()', 'PreDispatchTorchFunctionMode': 'make_fx()',
              'FakeTensorMode': 'FakeTensorMode'}


def recorder() -> str | None:
    """What records torch's operations to run them again, or runs them on shapes alone; None: nothing does."""
    if is_tracing():
        return 'torch.jit.trace()'
    modes = [*map(torch._C._get_dispatch_stack_at, range(dispatch_modes())),
             *map(torch._C._get_function_stack_at, range(function_modes()))]
    return next((_RECORDERS[name] for name in (type(mode).__name__ for mode in modes) if name in _RECORDERS), None)


def unrecorded() -> None:
    """RuntimeError, if something records: it would see that outputs are allocated, and not that the library writes them."""
    by = recorder()
    if by is not None:
        raise FailedError("%s sees torch's operations alone, of which a call of colobridge.torch is none; make the call "
                          "outside of it, or use torch.compile(), under which it runs" % by, STATUS['ERR_STATE'])


def has_dtensor(values: Any) -> bool:
    kind = getattr(sys.modules.get('torch.distributed.tensor'), 'DTensor', None)  # another thread may import it right now
    return kind is not None and kind in map(type, values)


def saved_tensors(ctx: Any, what: str) -> Any:
    """ctx.saved_tensors, which once() hears of; an in-place write since forward is told in this function's words."""
    try:
        saved = ctx.saved_tensors
    except RuntimeError as why:
        if 'modified by an inplace operation' not in str(why):
            raise
        raise RuntimeError("%s was written in place after forward saved it; clone it before, or write "
                           "out of place (%s)" % (what, why)) from why
    read = ctx.__dict__.get('read')
    if read is not None:
        read += saved
    return saved


def once(backward: Any, linear: bool = False) -> Any:
    """@backward, of whose gradients a derivative is an error. They depend on the upstream gradients and, unless the
    function is @linear, on what backward asks saved_tensors() for: from each of these autograd must find the error,
    because it runs only what leads to the tensors that it makes gradients of. once_differentiable() leads to none."""

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        for g in grads:
            if g is not None and g.is_neg():  # as the gradient of a part of a conjugated tensor has it
                grads = tuple(g if g is None else g.resolve_neg() for g in grads)
                break
        if is_tracing() or dispatch_modes() or function_modes():
            unrecorded()
        if has_dtensor(grads):
            raise ArgumentError("backward: the gradient of an output is a DTensor, expected a plain tensor, as the output is")
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx.read = read = list(grads)
        with torch.no_grad():
            made = backward(ctx, *grads)
        del ctx.read
        made = made if isinstance(made, tuple) else (made,)
        out = iter(FirstOnly.apply(tuple(t for t in made if t is not None), *(grads if linear else read)))
        return tuple(None if t is None else next(out) for t in made)
    return call


class Function:
    """An autograd function: of forward(ctx, ..), which this decorates, and of what one of its methods decorates."""
    apply: Any

    def __init__(self, forward: Any):
        self._forward = forward

    def backward(self, fn: Any) -> None:
        """Decorates what makes gradients; see once()."""
        self.differentiable(once(fn))

    def adjoint(self, fn: Any) -> None:
        """The same of a function that is linear."""
        self.differentiable(once(fn, linear=True))

    def differentiable(self, fn: Any) -> None:
        """The same, if its gradients have gradients, too."""
        of = self._forward
        self.apply = type(of.__name__, (torch.autograd.Function,), {
            'forward': staticmethod(of), 'backward': staticmethod(fn), '__module__': of.__module__, '__doc__': of.__doc__}).apply


@Function
def FirstOnly(ctx: Any, made: Any, *of: Any) -> Any:
    """(a tuple of tensors, what they depend on) -> the tensors; an error where a derivative of them is asked for"""
    return tuple(t.detach() for t in made)


@FirstOnly.backward
def _(ctx: Any, *_: Any) -> Any:
    raise FailedError("this gradient was made by a function of colobridge.torch, which one cannot differentiate "
                      "twice; make the loss of a gradient penalty with torch's functions")


def anchor(*of: Any) -> Any:
    """An empty tensor that depends on tensors. A backward that reads none of them saves it: see once()."""
    return FirstOnly.apply((of[0].detach().new_empty(0),), *of)[0]
