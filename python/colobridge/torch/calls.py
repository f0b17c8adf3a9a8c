# SPDX-License-Identifier: Apache-2.0
"""How public functions are called: this rank's parts of DTensors, the other ranks' notice of an error, torch.compile()."""
import ctypes as c
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import Error
from .functions import dispatch_modes, function_modes, has_dtensor, is_tracing, recorder, unrecorded
from .head import Head
from .placed import PARAMETERS, taken
from .ranks import tell

P = ParamSpec('P')
T = TypeVar('T')

compiled: Any = None  # the module of that name, if this PyTorch can have it
if tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 14):
    from . import compiled
OPERATORS: dict[str, Any] = {} if compiled is None else compiled.functions

# What ends a call, but not what checkpoint() ends a recomputation by, which is an Exception itself.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
           ValueError, c.ArgumentError, Error, KeyboardInterrupt, SystemExit)


def _run(fn: Any, args: Any, kwargs: Any) -> Any:
    try:
        if is_tracing() or dispatch_modes() or function_modes():
            unrecorded()
        if has_dtensor(args) or has_dtensor(kwargs.values()):
            return fn(**taken(fn, args, kwargs))
        return fn(*args, **kwargs)
    except _ERRORS as why:
        given = dict(zip(inspect.signature(fn).parameters, args), **kwargs)
        unused = 'reduce_group' if given.get('reduction') == 'none' else None
        talk = [value for name, value in given.items() if name != unused and (
            name in PARAMETERS or not hasattr(value, 'placements'))]  # DTensors of tokens do not talk
        for head in [value for value in given.values() if isinstance(value, Head)]:
            talk += head.weight, head.bias, head.shard_group, head.tp_group
        tell(why, talk)
        raise


compiling: Callable[[], bool] = getattr(getattr(torch, 'compiler', None), 'is_compiling', bool)  # does torch compile?
# Where it does. compiler.disable() would import torch._dynamo, which takes seconds; this does so when something compiles.
_outside = _run if compiling is bool else getattr(torch, '_disable_dynamo', torch.compiler.disable)(_run)


def watched() -> Any:
    """Does torch compile, or something record? Then a call is eager()'s."""
    return compiling() or (is_tracing() or dispatch_modes() or function_modes()) and recorder()


def eager(fn: Callable[P, T]) -> Callable[P, T]:
    """Runs @fn outside of torch.compile, as a graph break. The other ranks of the groups among its arguments hear of an
    error that it raises, in these groups and in no other, and wait for this rank no longer. The exception by which
    checkpoint() ends a recomputation is none of those errors."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (_outside if compiling() else _run)(fn, args, kwargs)
    return call


def called(fn: Any, args: Any, kwargs: Any) -> Any:
    """How operator() runs a function whose body is another one that eager() made, and that tells the others itself."""
    return fn(*args, **kwargs)


def operator(outputs: Callable[[dict[str, Any]], list[tuple[Any, Any]]], kind: Any = None, run: Any = _run,
             fixed: Callable[[dict[str, Any]], tuple[int, ...]] = lambda options: ()) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As eager(); but with PyTorch 2.14 or later torch.compile() puts the call into its graph, as an operator (compiled.py).
    outputs: of the arguments by name, the shape and dtype of each output; kind: what several make, if no tuple; run: how
    the function is called; fixed: of the options, which outputs never have a gradient."""

    def made(fn: Callable[P, T]) -> Callable[P, T]:
        names = tuple(inspect.signature(fn).parameters)
        OPERATORS[fn.__name__] = fn, outputs, run, fixed

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not compiling():
                return run(fn, args, kwargs)
            if compiled is not None:
                given = dict(zip(names, args), **kwargs)
                given = {**{name: given[name] for name in names if name in given}, **given}  # the first tensor is the input
                if not given.get('pad') and compiled.fits(given):  # of padding a graph does not know how much there is
                    return compiled.traced(fn.__name__, given, kind)
            return (_outside if run is _run else run)(fn, args, kwargs)
        return call
    return made
