# SPDX-License-Identifier: Apache-2.0
"""What the autograd functions share: checked views of torch tensors, the current stream, graph breaks."""
import ctypes as c
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from .. import _structs as s
from ..errors import STATUS, ArgumentError, Error, FailedError
from ..tensor import from_torch

# What ends a call, but not what checkpoint() ends a recomputation by, which is an Exception itself.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
           ValueError, c.ArgumentError, Error, KeyboardInterrupt, SystemExit)
_NO_MEMORY = ("%s: this %s has no memory of its own; call it outside of FakeTensorMode, "
              "torch.export() and transforms of torch.func")


PARAMETERS = frozenset(('weight', 'bias', 'lm_head_weight', 'lm_head_bias'))  # names of arguments that may be heads which ranks share


def checked(t: Any, what: str, *, saved: bool = False) -> s.Tensor:
    """The library's view of a torch tensor. ValueError: no tensor, device, dtype, memory; RuntimeError: its
    storage is smaller than its shape says, because somebody freed or resized it."""
    if not isinstance(t, torch.Tensor):
        raise ArgumentError("%s is a %s, expected a torch.Tensor" % (what, type(t).__name__))
    if t.layout is not torch.strided:
        raise ArgumentError("%s has layout %s, expected torch.strided" % (what, t.layout))
    try:
        raw = from_torch(t, what)
    except RuntimeError as why:
        if hasattr(t, 'placements'):
            raise ArgumentError("%s is a DTensor with %s, expected a plain tensor, this rank's part" % (
                what, ', '.join(map(repr, t.placements)))) from why
        raise ArgumentError(_NO_MEMORY % (what, type(t).__name__)) from why
    reach = t.numel()
    if reach:
        if not t.is_contiguous():
            reach = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
        need = (t.storage_offset() + reach) * t.element_size()
        try:
            held = t.untyped_storage().nbytes()
        except AttributeError:  # before 2.0
            held = t.storage().nbytes()
        if held < need:
            raise FailedError("%s: its storage holds %d bytes, its shape %s needs %d; it was freed or "
                              "resized%s" % (what, held, list(t.shape), need,
                                             ' after forward saved it' if saved else ''))
        if not raw.data:
            raise ArgumentError(_NO_MEMORY % (what, type(t).__name__))
    return raw


def said(t: Any, words: str = '%(shape)s on %(device)s') -> str:
    """What an error says of an argument: these words of a tensor, the type of anything else."""
    return words % {'shape': list(t.shape), 'device': t.device, 'dtype': t.dtype} if isinstance(t, torch.Tensor) \
        else 'a ' + type(t).__name__


def of_integers(t: Any) -> bool:
    """Is it a tensor of integers?"""
    return isinstance(t, torch.Tensor) and not (
        t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool)


def refuse_complex(what: str, mask: Any) -> None:
    if mask is not None and mask.is_complex():
        raise ArgumentError("%s: mask is of %s, expected bools, integers or floats" % (what, mask.dtype))


def stream_of(device: Any) -> int | None:
    """The current CUDA stream, None on the host."""
    if device.type != 'cuda':
        return None
    raw = getattr(torch._C, '_cuda_getCurrentRawStream', None)  # without a Python object of it
    if raw is not None and device.index is not None:
        return raw(device.index)
    return torch.cuda.current_stream(device).cuda_stream


def stream_on(device: Any) -> Callable[[], int | None]:
    """stream_of(@device) as a function that asks for nothing else, in a third of the time."""
    raw = getattr(torch._C, '_cuda_getCurrentRawStream', None)
    if device.type == 'cuda' and raw is not None and device.index is not None:
        return functools.partial(raw, device.index)
    return functools.partial(stream_of, device)


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


def written(t: Any) -> None:
    """Counts a write of the library as one of torch: autograd then refuses what saved @t before. An empty
    view shares the version counter, also in versions that have no increment_version()."""
    t.detach()[..., :0].zero_()


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
        if _tracing() or _dispatching() or _functions():
            _unrecorded()
        if _has_dtensor(grads):
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
    """An autograd function: of forward(ctx, ..), which this decorates, and of what one of its methods decorates. It is made
    when it is applied first, because torch is imported then."""

    def __init__(self, forward: Any):
        self._forward = self._backward = forward

    def backward(self, fn: Any) -> None:
        """Decorates what makes gradients; see once()."""
        self._backward = once(fn)

    def adjoint(self, fn: Any) -> None:
        """The same of a function that is linear."""
        self._backward = once(fn, linear=True)

    def differentiable(self, fn: Any) -> None:
        """The same, if its gradients have gradients, too."""
        self._backward = fn

    @functools.cached_property
    def apply(self) -> Any:
        prepared()
        of = self._forward
        return type(of.__name__, (torch.autograd.Function,), {
            'forward': staticmethod(of), 'backward': staticmethod(self._backward), '__module__': of.__module__,
            '__doc__': of.__doc__}).apply


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


@functools.lru_cache(maxsize=None)
def compiling() -> Callable[[], bool]:
    """How torch is asked if it compiles."""
    return getattr(getattr(torch, 'compiler', None), 'is_compiling', bool)


# Of all functions, because those that eager() makes share the code that torch compiles: a variable of one of them that it
# writes may be another one's.
_asked: Any = None  # compiling(), from the first call on
_outside: Any = None  # _run() outside of torch.compile
_compiled: Any = None  # the module of that name, if this PyTorch can have it
_OPERATORS: dict[str, Any] = {}
_tracing: Any = None  # Is torch.jit.trace() at work?
_dispatching: Any = None  # how many modes see torch's operations
_functions: Any = None  # and its functions
_RECORDERS = {'ProxyTorchDispatchMode': 'make_fx()', 'PreDispatchTorchFunctionMode': 'make_fx()',
              'FakeTensorMode': 'FakeTensorMode'}


def prepared() -> bool:
    """Makes what calls need, once. torch.compile() runs it, too, while it makes a graph of a first call."""
    global _asked, _outside, _compiled, _tracing, _dispatching, _functions
    if _asked:
        return True
    if _compiled is None and tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 14):
        from . import compiled
        compiled.functions = _OPERATORS
        _compiled = compiled
    asked = compiling()
    _tracing, _dispatching, _functions = (getattr(torch._C, name, int) for name in (
        '_is_tracing', '_len_torch_dispatch_stack', '_len_torch_function_stack'))
    if asked is not bool:
        # compiler.disable() imports torch._dynamo, which takes seconds; this does so when something compiles
        _outside = getattr(torch, '_disable_dynamo', torch.compiler.disable)(_run)
    _asked = asked  # last: another thread may look whether all is prepared
    return True


prepared._dynamo_marked_constant = True  # type: ignore[attr-defined] # assume_constant_result(), which imports a compiler


def recorder() -> str | None:
    """What records torch's operations to run them again, or runs them on shapes alone; None: nothing does."""
    if _tracing():
        return 'torch.jit.trace()'
    modes = [*map(torch._C._get_dispatch_stack_at, range(_dispatching())),
             *map(torch._C._get_function_stack_at, range(_functions()))]
    return next((_RECORDERS[name] for name in (type(mode).__name__ for mode in modes) if name in _RECORDERS), None)


def _unrecorded() -> None:
    """RuntimeError, if something records: it would see that outputs are allocated, and not that the library writes them."""
    by = recorder()
    if by is not None:
        raise FailedError("%s sees torch's operations alone, of which a call of colobridge.torch is none; make the call "
                          "outside of it, or use torch.compile(), under which it runs" % by, STATUS['ERR_STATE'])


def watched() -> Any:
    """Does torch compile, or something record? Then a call is eager()'s."""
    return _asked() or (_tracing() or _dispatching() or _functions()) and recorder()


def _has_dtensor(values: Any) -> bool:
    tensor = sys.modules.get('torch.distributed.tensor')  # None: nobody can have made one
    return tensor is not None and tensor.DTensor in map(type, values)


def _run(fn: Any, args: Any, kwargs: Any) -> Any:
    try:
        if _tracing() or _dispatching() or _functions():
            _unrecorded()
        if _has_dtensor(args) or _has_dtensor(kwargs.values()):
            from .placed import taken
            return fn(**taken(fn, args, kwargs))
        return fn(*args, **kwargs)
    except _ERRORS as why:
        from .ranks import tell
        given = dict(zip(inspect.signature(fn).parameters, args), **kwargs)
        unused = 'reduce_group' if given.get('reduction') == 'none' else None
        tell(why, (value for name, value in given.items() if name != unused and (
            name in PARAMETERS or not hasattr(value, 'placements'))))  # DTensors of tokens do not talk
        raise


def eager(fn: Any) -> Any:
    """Runs @fn outside of torch.compile, as a graph break. The other ranks of the groups among its arguments hear of an
    error that it raises, in these groups and in no other, and wait for this rank no longer. The exception by which
    checkpoint() ends a recomputation is none of those errors."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        prepared()
        return (_outside if _asked() else _run)(fn, args, kwargs)
    return call


def called(fn: Any, args: Any, kwargs: Any) -> Any:
    """How operator() runs a function whose body is another one that eager() made, and that tells the others itself."""
    return fn(*args, **kwargs)


def operator(outputs: Callable[[dict[str, Any]], list[tuple[Any, Any]]], kind: Any = None, run: Any = _run,
             fixed: Callable[[dict[str, Any]], tuple[int, ...]] = lambda options: ()) -> Any:
    """As eager(); but with PyTorch 2.14 or later torch.compile() puts the call into its graph, as an operator (compiled.py).
    outputs: of the arguments by name, the shape and dtype of each output; kind: what several make, if no tuple; run: how
    the function is called; fixed: of the options, which outputs never have a gradient."""

    def made(fn: Any) -> Any:
        names = tuple(inspect.signature(fn).parameters)
        _OPERATORS[fn.__name__] = fn, outputs, run, fixed

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            prepared()
            if not _asked():
                return run(fn, args, kwargs)
            if _compiled is not None:
                given = dict(zip(names, args), **kwargs)
                given = {**{name: given[name] for name in names if name in given}, **given}  # the first tensor is the input
                if _compiled.fits(given):
                    return _compiled.traced(fn.__name__, given, kind)
            return (_outside if run is _run else run)(fn, args, kwargs)
        return call
    return made
