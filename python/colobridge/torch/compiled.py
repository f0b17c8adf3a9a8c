# SPDX-License-Identifier: Apache-2.0
"""Losses, uniform bridges and relayout() in graphs of torch.compile(): one operator of torch.library for all of them. docs/guides/pytorch.md.

A graph has tensors and numbers. Which function it is, its groups and its other options are a number here, which stands
for them in this process. The operator runs the function as it runs without a graph, and keeps what autograd recorded
of it until the token that it returns is freed: that is what backward needs, and the only thing that refers to it."""
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..comm import Comm
from ..errors import STATUS, FailedError
from .autocast import autocasts, under
from .head import FIELDS, Head
from .support import Support

# By name: the function, shapes and dtypes of its outputs, how it is run, and which of its outputs never have a gradient.
functions: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Any, Any, Any], Any], Callable[..., Any]]] = {}
# Arguments that get gradients, or are refused if they want one.
_LEARN = ('vocab_parallel_logits', 'hidden', 'weight', 'x', 'weight.weight', 'weight.bias', 'class_weight', 'group_weight', 'temperature', 'input', 'linear_weight',
          'linear_bias', 'linear_weight.weight', 'linear_weight.bias', 'weight.lora_a', 'weight.lora_b', 'linear_weight.lora_a',
          'linear_weight.lora_b')
_LORA = 'lora_a', 'lora_b', 'lora_scale'  # of a Head's lora


class _Asked(NamedTuple):
    """A function by its name, the names of the arguments that are tensors, of integers with how many each has (-1: it is
    one, no tuple) and of other numbers, likewise, which a graph may have as symbols, the other arguments, the autocast that it is
    called under, and its outputs that have no gradient."""
    name: str
    tensors: tuple[str, ...]
    integers: tuple[tuple[str, int], ...]
    reals: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]
    casts: Any
    fixed: tuple[int, ...]


_asked: list[_Asked] = []
_numbers: dict[_Asked, int] = {}
_held: dict[int, tuple[list[Any], list[Any]]] = {}  # by address of the token: inputs and outputs of a call
_BELOW = ('AutogradFunctionality', 'AutogradCPU', 'AutogradCUDA', 'AutogradOther', 'ADInplaceOrView')


def _number(name: str, tensors: tuple[str, ...], integers: tuple[tuple[str, int], ...], reals: tuple[tuple[str, int], ...],
            options: tuple[tuple[str, Any], ...], device: Any) -> int:
    """The number of a call. torch.compile() asks for it when it makes a graph, which is of one state of autocast."""
    if torch.compiler.is_exporting():
        raise FailedError("torch.export() of %s(): its groups are of this process and go into no file; export the model "
                          "without its loss" % name, STATUS['ERR_STATE'])
    options = tuple((key, getattr(value, 'real_obj', value)) for key, value in options)  # of a group
    asked = _Asked(name, tensors, integers, reals, options, autocasts(device),
                   functions[name][3]({**dict.fromkeys(tensors), **dict(options)}))
    if asked not in _numbers:
        _asked.append(asked)
        _numbers[asked] = len(_asked) - 1
    return _numbers[asked]


_number._dynamo_marked_constant = True  # type: ignore[attr-defined] # assume_constant_result(), which imports a compiler


def _given(asked: _Asked, tensors: list[Any], integers: list[Any], reals: list[Any]) -> dict[str, Any]:
    """The arguments by name"""
    numbers = {}
    for kinds, rest in ((asked.integers, iter(integers)), (asked.reals, iter(reals))):
        numbers.update({key: next(rest) if n < 0 else tuple(next(rest) for _ in range(n)) for key, n in kinds})
    given = dict(asked.options, **numbers, **dict(zip(asked.tensors, tensors)))
    heads: dict[str, dict[str, Any]] = {}
    for key in [key for key in given if '.' in key]:
        name, member = key.split('.')
        heads.setdefault(name, {})[member] = given.pop(key)
    for members in heads.values():
        if 'lora_a' in members:
            members['lora'] = tuple(members.pop(name) for name in _LORA)
    return {**given, **{name: Head(**members) for name, members in heads.items()}}


def _recorded() -> Any:
    """A context in which autograd records, as it does not inside of an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _BELOW:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@torch.library.custom_op('colobridge::run', mutates_args=())
def _run(tensors: list[torch.Tensor], number: int, wanted: list[bool], integers: list[int],
         reals: list[float]) -> list[torch.Tensor]:
    asked, token = _asked[number], torch.zeros(1, dtype=torch.uint8, device='cpu')
    fn, _, run, _ = functions[asked.name]
    with _recorded(), torch.set_grad_enabled(any(wanted)), under(asked.casts):
        # tables as they are, which relayout() knows again
        ins = [t.detach().requires_grad_(want) if t.is_floating_point() else t for t, want in zip(tensors, wanted)]
        made = run(fn, (), _given(asked, ins, integers, reals))
    outs = list(made) if isinstance(made, tuple) else [made]
    if any(wanted):
        at = token.data_ptr()
        _held[at] = ins, outs
        weakref.finalize(token.untyped_storage(), _held.pop, at, None)
    return [t.detach().contiguous() for t in outs] + [token]  # of transposed logits they are not


@_run.register_fake
def _(tensors: Any, number: Any, wanted: Any, integers: Any, reals: Any) -> Any:
    asked = _asked[number]
    likes = functions[asked.name][1](_given(asked, tensors, integers, reals))
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in likes] + [
        torch.empty(1, dtype=torch.uint8, device='cpu')]


@torch.library.custom_op('colobridge::run_backward', mutates_args=())
def _backward(token: torch.Tensor, grads: list[torch.Tensor], tensors: list[torch.Tensor],
              wanted: list[bool]) -> list[torch.Tensor]:
    held = _held.get(token.data_ptr())
    if held is None:
        raise FailedError("colobridge: a compiled call's backward comes with another token than forward returned; do not move "
                          "or copy saved tensors (save_on_cpu) of a graph that has one", STATUS['ERR_STATE'])
    ins, outs = held
    pairs = [(out, g) for out, g in zip(outs, grads) if out.requires_grad]
    with _recorded():
        made = torch.autograd.grad([out for out, _ in pairs], [t for t in ins if t.requires_grad], [g for _, g in pairs],
                                   retain_graph=True, allow_unused=True)
    given = iter(made)
    found = [next(given) for want in wanted if want]
    others = {x.untyped_storage().data_ptr() for x in grads}  # of which a bridge's gradient may be a part
    return [torch.zeros_like(t) if g is None else _laid(g.clone() if g.untyped_storage().data_ptr() in others else g, t)
            for g, t in zip(found, (t for t, want in zip(tensors, wanted) if want))]


def _laid(g: Any, t: Any) -> Any:
    """A gradient with the strides that a graph expects of it, those of empty_like()"""
    if g.is_contiguous() and t.is_contiguous() or g.stride() == torch.empty_like(t, device='meta').stride():
        return g
    return torch.empty_like(t).copy_(g)


@_backward.register_fake
def _(token: Any, grads: Any, tensors: Any, wanted: Any) -> Any:
    return [torch.empty_like(t) for t, want in zip(tensors, wanted) if want]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, number, ctx.wanted, integers, reals = inputs
    ctx.none = [None if numbers else [] for numbers in (integers, reals)]  # an empty list is one of tensors
    ctx.save_for_backward(output[-1], *tensors)
    ctx.mark_non_differentiable(*(output[i] for i in _asked[number].fixed if i < len(output) - 1))


def _derive(ctx: Any, grads: Any) -> Any:
    token, *tensors = ctx.saved_tensors
    made = iter(torch.ops.colobridge.run_backward(token, list(grads[:-1]), tensors, ctx.wanted))
    return [next(made) if want else None for want in ctx.wanted], None, None, *ctx.none


_run.register_autograd(_derive, setup_context=_setup)


def _no_vmap(*_: Any) -> Any:
    raise FailedError("torch.func.vmap() of a call of colobridge.torch: ranks that exchange cannot do it once per sample; "
                      "call it on the whole batch", STATUS['ERR_STATE'])


_run.register_vmap(_no_vmap)


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with those of a Head in its place"""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(value, Head):
            flat[key] = value
            continue
        members = {name: getattr(value, name) for name in FIELDS}
        if isinstance(value.lora, tuple) and len(value.lora) == 3:  # else it is refused where it runs
            members.update(zip(_LORA, members.pop('lora')))
        flat.update({'%s.%s' % (key, name): member for name, member in members.items()})
    return flat


def _groups_fit(given: dict[str, Any]) -> bool:
    """Are the groups of a call none, or such that their number is known?"""
    of, weight = given.get('groups'), given.get('group_weight')
    if isinstance(weight, torch.Tensor):
        return isinstance(of, torch.Tensor) and weight.dim() == 1
    return of is weight is None or isinstance(of, torch.Tensor) and isinstance(weight, (list, tuple)) and \
        all(isinstance(n, (int, float)) for n in weight)


def fits(given: dict[str, Any]) -> bool:
    """Is a call one that the operator makes: it writes no argument, its groups are torch's, its tensors plain."""
    given = _flat(given)
    if given.get('inplace_backward') or not _groups_fit(given) or given.get('weight.main_grad') or given.get('linear_weight.main_grad'):
        return False
    for value in given.values():
        if isinstance(value, (int, float)):  # perhaps a symbol
            continue
        if isinstance(value, (Comm, Support)) or hasattr(value, 'mesh_dim_names') or isinstance(value, torch.Tensor) and (
                type(value) not in (torch.Tensor, torch.nn.Parameter) or hasattr(value, 'ds_tensor')):
            return False
    return True


def traced(name: str, given: dict[str, Any], kind: Any) -> Any:
    """The call as torch.compile() sees it."""
    names, tensors, options, kinds, integers, called, reals = [], [], [], [], [], [], []
    for key, value in _flat(given).items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):  # names
            options.append((key, tuple(value)))
            continue
        if key == 'group_weight' and isinstance(value, (list, tuple)):
            called.append((key, len(value))), reals.extend(float(n) for n in value)
            continue
        if isinstance(value, list):  # a table, whose numbers may be others in the next call
            value = torch.tensor(value, dtype=torch.int64, device='cpu')
        if isinstance(value, torch.Tensor):
            names.append(key), tensors.append(
                value if key in _LEARN or not value.is_floating_point() else value.detach())
        elif isinstance(value, int) and not isinstance(value, bool):
            kinds.append((key, -1)), integers.append(value)
        elif isinstance(value, float):
            called.append((key, -1)), reals.append(value)
        elif isinstance(value, tuple):  # a shape, or a vocab, which may end with None
            value = [n for n in value if n is not None]
            kinds.append((key, len(value))), integers.extend(value)
        else:
            options.append((key, value))
    number = _number(name, tuple(names), tuple(kinds), tuple(called), tuple(options), tensors[0].device)
    grad = torch.is_grad_enabled()
    outs = torch.ops.colobridge.run(tensors, number, [grad and t.requires_grad for t in tensors], integers, reals)
    if len(outs) == 2 and given.get('outputs') is None:
        return outs[0]
    return tuple(outs[:-1]) if kind is None else kind(*outs[:-1])
