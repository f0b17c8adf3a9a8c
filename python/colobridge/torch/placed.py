# SPDX-License-Identifier: Apache-2.0
"""DTensors as arguments: which ranks share the rows of a head, which of them are the vocabulary's, which hold copies, and
what part of tokens or logits a rank has. Who passes a DTensor has imported torch.distributed.tensor; this file does not.

A head's gradient is a sum over the ranks that bring other tokens; what FSDP2 divides gradients by is read from its state.
"""
import functools
import hashlib
import inspect
import math
import sys
import weakref
from typing import Any, NamedTuple

import torch

from ..comm import Comm
from ..errors import ArgumentError, MismatchError
from ..mesh import among, lines
from . import ranks as groups
from .functions import Function
from .head import Columns, Head, Named, columns_of, partitioned
from .ready import number
from .tensors import checked, stream_of

# Names of arguments that may be heads which ranks share; 'weight' beside 'input' is of classes.
PARAMETERS = frozenset(('weight', 'bias', 'lm_head_weight', 'lm_head_bias', 'linear_weight', 'linear_bias', 'head', 'teacher_head'))
_SAMPLE = 4096  # elements of hidden states by which ranks compare them


def is_placed(t: Any) -> bool:
    """Is it a DTensor?"""
    return hasattr(t, 'placements') and hasattr(t, 'device_mesh')


def _local(t: Any, **how: Any) -> Any:
    """A DTensor's part on this rank."""
    part = t.to_local(**how)
    if part.requires_grad:
        part.register_hook(_row_major)
    return part


def _row_major(g: Any) -> Any:
    """A contiguous gradient with the strides that its shape has, also of axes with one element or none. From others PyTorch
    would derive another layout of the DTensor than its own, and PyTorch 2.6 makes a copy then, by a collective of some ranks."""
    strides = tuple(math.prod(g.shape[i + 1:]) for i in range(g.dim())) if g.numel() else g.new_empty(g.shape).stride()
    return g.as_strided(g.shape, strides) if g.is_contiguous() and g.stride() != strides else g


# ---- meshes ----

def _name(mesh: Any, i: int) -> str:
    names = mesh.mesh_dim_names
    return "mesh dim %s" % (i if names is None else "'%s'" % names[i])


def said(t: Any) -> str:
    """What errors call a DTensor."""
    mesh = t.device_mesh
    return 'a DTensor of %s with %s over %s' % (
        list(t.shape), ', '.join(map(repr, t.placements)), ', '.join(_name(mesh, i) for i in range(len(t.placements))))


def _shared(what: str, mesh: Any, tp: tuple[int, ...]) -> int | None:
    """The dim of a mesh whose ranks are @tp. ValueError: one that shares some of them."""
    found = None
    for i, line in enumerate(lines(mesh)):
        both = len(set(line) & set(tp))
        if len(tp) < 2 or both < 2:
            continue
        if both < len(tp) or both < len(line):
            raise ArgumentError("%s: its %s has ranks %s, of which tp_group %s has %d; expected all of them, or this rank "
                                "alone" % (what, _name(mesh, i), list(line), list(tp), both))
        found = i
    return found


def _cut(n: int, parts: int, at: int) -> tuple[int, int]:
    """As DTensor cuts."""
    each = -(-n // parts)
    return min(at * each, n), min((at + 1) * each, n)


# ---- a head ----

class Rows(NamedTuple):
    """What a parameter [V, ..] of a head is here. group: world ranks that share @rows of them, of which this rank has a
    part; None: it has all. columns: the ids of these rows, and V, if tp_group shares V. copies: world ranks that have the
    same part, and other tokens. whole: all ranks of tp_group have all of V."""
    group: tuple[int, ...] | None = None
    rows: int | None = None
    columns: tuple[int, int, int] | None = None
    copies: tuple[int, ...] | None = None
    whole: bool = False


@functools.lru_cache(maxsize=256)
def _rows(what: str, mesh: Any, placements: tuple[Any, ...], rows: int, tp: tuple[int, ...]) -> Rows:
    vocabulary, order, copies, whole = _shared(what, mesh, tp), [], [], False
    for i in reversed(range(len(placements))):  # each is applied before those to its right, or after some of them
        p, ranks = placements[i], len(lines(mesh)[i])
        if ranks == 1:
            continue
        if p.is_replicate():
            if i == vocabulary:
                whole = True
            else:
                copies.insert(0, i)
            continue
        strided = type(p).__name__ == '_StridedShard'
        if p.is_partial() or not (strided or p.is_shard()) or p.dim != 0:
            raise ArgumentError("%s has %r over %s, expected Shard(0) or Replicate()" % (what, p, _name(mesh, i)))
        before, place = p.split_factor if strided else 1, 0
        while before > 1 and place < len(order) and before % len(lines(mesh)[order[place]]) == 0:
            before //= len(lines(mesh)[order[place]])
            place += 1
        if before != 1:
            raise ArgumentError("%s has %r over %s, whose split factor is not that of mesh dims to its right"
                                % (what, p, _name(mesh, i)))
        order.insert(place, i)
    at, mine, columns, group = mesh.get_coordinate(), rows, None, None
    if vocabulary in order:
        if order[0] != vocabulary:
            raise ArgumentError("%s: %s cuts it before %s, whose ranks are tp_group, so that the ids of a rank of tp_group are "
                                "not contiguous; expected tp_group's cut first, as fully_shard() of a parallelized module "
                                "makes it" % (what, _name(mesh, order[0]), _name(mesh, vocabulary)))
        columns = (*_cut(rows, len(tp), at[vocabulary]), rows)
        mine, order = columns[1] - columns[0], order[1:]
    if order:
        group, parts = among(mesh, order), [(0, mine)]
        for i in order:
            ranks = len(lines(mesh)[i])
            parts = [(lo + a, lo + b) for lo, hi in parts for a, b in (_cut(hi - lo, ranks, r) for r in range(ranks))]
        if parts != [_cut(mine, len(group), r) for r in range(len(group))]:
            raise ArgumentError("%s: its %d rows are cut over several mesh dims into parts of %s, expected those of one dim, %s; "
                                "pad them, or flatten the mesh" % (
                                    what, mine, [b - a for a, b in parts],
                                    [b - a for a, b in (_cut(mine, len(group), r) for r in range(len(group)))]))
    return Rows(group, mine if group else None, columns, among(mesh, copies) if copies else None, whole)


def rows_of(what: str, t: Any, tp: tuple[int, ...]) -> tuple[Any, Rows]:
    """(this rank's part, what it is) of a parameter of a head. ValueError: a placement that no head has."""
    if not is_placed(t):
        return t, Rows()
    for entry in getattr(t._spec, 'shard_order', None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            raise ArgumentError("%s: %s, sharded in the order of mesh dims %s, expected theirs" % (
                what, said(t), list(entry.mesh_dims)))
    return _local(t), _rows(what, t.device_mesh, tuple(t.placements), t.shape[0], tp)


def differ(what: str, comm: Comm, key: Any, hidden: Any, target: Any, ignored: int) -> None:
    """MismatchError on all ranks: some that share a head, or have copies of it, bring the same tokens. Compared in the first
    call of a head, where ranks agree on its size already; a rank without a target says nothing."""
    seen = comm.__dict__.setdefault('_heads', set())
    if comm.size == 1 or key in seen or hidden.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    mine = b''
    if hidden.numel() and (target is None or bool((target != ignored).any())):
        flat = hidden.detach().reshape(-1)
        of = hashlib.sha256(repr(tuple(hidden.shape)).encode())
        for t in (flat[::max(1, len(flat) // _SAMPLE)].double(), *(
                () if target is None else (target.detach().reshape(-1).long(),))):
            of.update(bytes(t.cpu().contiguous().view(torch.uint8).tolist()))
        mine = of.digest()
    ranks = [comm.world_rank(r) for r in range(comm.size)]
    with groups.telling(comm):
        host = comm if comm.backend != 'nccl' else groups.comm_of_ranks(ranks, torch.device('cpu'))
        all_of = host.gather_bytes(mine.ljust(32, b'\0'))
    having: dict[bytes, list[int]] = {}
    for rank, digest in zip(ranks, all_of):
        having.setdefault(digest, []).append(rank)
    having.pop(bytes(32), None)
    for same in having.values():
        if len(same) > 1:
            why = MismatchError(
                "%s: ranks %s bring the same hidden states and targets to a weight that is a DTensor over ranks %s, whose "
                "gradient is a sum over ranks with different tokens; pass tp_group= the ranks that share the vocabulary, "
                "on all ranks, or %s, if the batch is the same on purpose"
                % (what, ', '.join(map(str, same)), ', '.join(map(str, ranks)),
                   'grad_reduction="sum" or "mean"' if target is None else "shard_group= the mesh dim's group"))
            groups._reached(why).add(id(comm.told))  # they all have it
            raise why
    seen.add(key)


# ---- its gradient ----

@Function
def OfAll(ctx: Any, t: Any, comm: Comm | None, divisor: float) -> Any:
    """(a parameter as this rank has it, ranks that hold copies, a number) -> the same; its gradient is summed over those and
    divided"""
    ctx.of = comm, divisor
    return t.view_as(t)


@OfAll.adjoint
def _(ctx: Any, g: Any) -> Any:
    comm, divisor = ctx.of
    if comm is not None:
        g = g.clone(memory_format=torch.contiguous_format)
        with groups.telling(comm):
            comm.all_reduce(checked(g, 'gradient'), stream=stream_of(g.device))
    return (g if divisor == 1 else g / divisor), None, None


@Function
def Gathered(ctx: Any, part: Any, comm: Comm, rows: int) -> Any:
    """(rows of this rank, or elements, ranks that share them, how many) -> all of them"""
    each = -(-rows // comm.size)
    ctx.of = comm, rows, each, len(part)
    tail = tuple(part.shape[1:])
    whole, mine = part.new_empty((each * comm.size, *tail)), part.new_zeros((each, *tail))
    mine[:len(part)] = part
    with groups.telling(comm):
        comm.all_gather(checked(mine, 'weight'), checked(whole, 'weight'), stream=stream_of(part.device))
    return whole[:rows]


@Gathered.adjoint
def _(ctx: Any, g: Any) -> Any:
    comm, rows, each, own = ctx.of
    real = torch.float64 if g.dtype == torch.float64 else torch.float32
    whole = torch.zeros((each * comm.size, *g.shape[1:]), dtype=real, device=g.device)
    whole[:rows] = g
    mine = whole.new_empty((each, *g.shape[1:]))
    with groups.telling(comm):
        comm.reduce_scatter(checked(whole, 'gradient'), checked(mine, 'gradient'), stream=stream_of(g.device))
    return mine[:own].to(g.dtype), None, None


_units: dict[int, Any] = {}  # by id() of a parameter: (weakref to it, weakref to FSDP2's state and group of it, or None)


def _unit(weight: Any) -> Any:
    """(state, group of parameters) of FSDP2 that have a parameter, or what was made of one; None: it has none."""
    fn = weight.grad_fn
    while fn is not None:
        if hasattr(fn, 'variable'):
            weight = fn.variable
            break
        more = [of for of, _ in fn.next_functions if of is not None]
        fn = more[0] if len(more) == 1 else None
    known = _units.get(id(weight))
    if known is not None and known[0]() is weight:
        return known[1] and tuple(of() for of in known[1])
    if len(_units) > 64:
        _units.clear()
    found = None
    states = getattr(sys.modules.get('torch.distributed._composable_state'), '_module_state_mapping', {})
    for state in list(states.values()):
        state = state() if isinstance(state, weakref.ref) else state
        for group in _groups(state):
            if any(p.sharded_param is weight for p in group.fsdp_params):
                found = weakref.ref(state), weakref.ref(group)
    _units[id(weight)] = weakref.ref(weight), found
    return found and tuple(of() for of in found)


def _groups(state: Any) -> list[Any]:
    several = getattr(state, '_fsdp_param_groups', None)
    if several is None:
        one = getattr(state, '_fsdp_param_group', None)
        return [] if one is None else [one]
    return list(several)


def _factor(what: str, group: Any) -> float | None:
    """What FSDP2 divides the gradients of a group by; None: by its ranks."""
    if hasattr(group, 'gradient_divide_factor'):
        return group.gradient_divide_factor
    if getattr(group, 'reduce_scatter_reduce_op', None) is None:
        return None
    raise ArgumentError("%s: this PyTorch does not tell by what FSDP2 divides gradients; pass grad_reduction='mean' or 'sum'" % what)


def divisor(what: str, weight: Any, reduction: str | None, ranks: int) -> float:
    """By what the sum of a head's gradient over its ranks is divided: as FSDP2 divides the gradients of a parameter of its;
    by nothing, if it is not FSDP2's."""
    if reduction is not None:
        if reduction not in ('mean', 'sum'):
            raise ArgumentError("%s: grad_reduction is %r, expected 'mean', 'sum' or None" % (what, reduction))
        return ranks if reduction == 'mean' else 1
    unit = _unit(weight) if is_placed(weight) else None
    if unit is None:
        return 1
    state, group = unit
    own = _factor(what, group)
    if own is None:  # as the others do
        context = getattr(state, '_state_ctx', None)
        others = {_factor(what, of) for one in getattr(context, 'all_states', ()) for of in _groups(one) if of is not group}
        if len(others) > 1:
            raise ArgumentError("%s: FSDP2 divides gradients of this model by %s; set one factor, or pass grad_reduction='mean' or "
                                "'sum'" % (what, ' and '.join(
                                    'the ranks' if n is None else str(n) for n in sorted(others, key=str))))
        own = others.pop() if others else None
    return ranks if own is None else own


def averaged(what: str, weight: Any, bias: Any, of: Any, reduction: str | None, ranks: int, copies: Comm | None,
             adds: bool) -> tuple[Any, Any]:
    """weight and bias as this rank has them, whose gradients are summed over @copies and divided; @of: the weight as it was
    given. adds: are the gradients added to main_grad, in memory that has earlier ones?"""
    by = divisor(what, of, reduction, ranks)
    if by == 1 and copies is None:
        return weight, bias
    if adds:
        raise ArgumentError("%s: main_grad=True adds sums over the ranks that share the weight, and its gradient is %s" % (
            what, 'summed over ranks with copies, too; leave main_grad out' if copies is not None else
            "divided by %g; pass grad_reduction='sum', or leave main_grad out" % by))
    weight, bias = (t if t is None or not t.requires_grad else OfAll.apply(t, copies, by) for t in (weight, bias))
    return weight, bias


def main_grads(what: Named, weight: Any, bias: Any) -> Any:
    """(main_grad of weight, main_grad of bias or None), or None if neither is trained. The gradient of one that is frozen,
    which is made together with the other's, goes into memory that is not read."""
    found: dict[str, Any] = {}
    given = {name: t for name, t in ((what.weight, weight), (what.bias, bias)) if t is not None}
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
    return (found[what.weight], found.get(what.bias)) if found else None


def head(what: Named, of: Head, columns: Columns, hidden: Any, weight: Any, bias: Any, target: Any, comm: Comm, ignored: int,
         adds: bool) -> tuple[Any, ...]:
    """(communicator of the vocabulary, of the ranks that share weight and bias or None, weight, bias, rows of these ranks,
    columns) of a head of DTensors, whose Head says @columns. adds: averaged()'s"""
    tp = groups.world_ranks(comm) if comm.size > 1 else ()
    given, (weight, found) = weight, rows_of('%s: %s' % (what, what.weight), weight, tp)
    if bias is not None:
        bias, other = rows_of('%s: %s' % (what, what.bias), bias, tp)
        if other[:3] != found[:3] or bias.requires_grad and other.copies != found.copies:
            raise ArgumentError("%s: %s is shared as %s, and %s as %s; shard both alike" % (
                what, what.weight, found, what.bias, other))
    if found.columns is not None:
        columns = _columns(what, columns, found.columns)
    if found.whole:
        if of.d_hidden != 'all_reduce':
            raise ArgumentError("%s: all ranks of tp_group have the whole weight, so each makes the whole gradient of %s; "
                                "found d_hidden=%r, expected 'all_reduce'" % (what, what.hidden, of.d_hidden))
        comm = groups.alone()
    asked = None if of.shard_group is None else set(groups.world_ranks(of.shard_group, what + ': shard_group'))
    if asked is not None and asked not in [set(ranks or (torch.distributed.get_rank(),)) for ranks in (found.group, found.copies)] or \
            found.rows is not None and of.rows not in (None, found.rows):
        raise ArgumentError("%s: shard_group is %s and rows %s, and %s is %s, whose rows %s share; leave both out" % (
            what, None if asked is None else sorted(asked), of.rows, what.weight, said(given), found.group or 'no ranks'))
    device = hidden.device
    shares, copies = (None if ranks is None else groups.comm_of_ranks(ranks, device)
                      for ranks in (found.group, found.copies))
    trains = torch.is_grad_enabled() and (weight.requires_grad or bias is not None and bias.requires_grad)
    if trains and not tp and asked is None and (target is not None or of.grad_reduction is None):
        for ranks in (shares, copies):
            if ranks is not None:
                differ(what, ranks, (tuple(given.shape), weight.dtype), hidden, target, ignored)
    if copies is not None:
        groups.require_apart(what, comm, 'the copies of weight', copies)
    size = (1 if shares is None else shares.size) * (1 if copies is None else copies.size)
    weight, bias = averaged(what, weight, bias, given, of.grad_reduction, size, copies, adds)
    return comm, shares, weight, bias, found.rows, columns


def gathered(what: Named, of: Head, hidden: Any, weight: Any, bias: Any, comm: Comm) -> tuple[Any, Any]:
    """weight and bias of this rank's columns, all rows of them; gradients go back to where the rows are."""
    made, shares, weight, bias, rows, _ = head(what, of, columns_of(what, of.vocab), hidden, weight, bias, None, comm, 0, False)
    if made is not comm:
        raise ArgumentError("%s: all ranks of tp_group have the whole weight, expected Shard(0) over tp_group, or no tp_group"
                            % what)
    if shares is None:
        return weight, bias
    groups.require_apart(what, comm, 'the ranks that share weight', shares)
    return Gathered.apply(weight, shares, rows), None if bias is None else Gathered.apply(bias, shares, rows)


def is_partitioned(t: Any) -> bool:
    """Is it a parameter of DeepSpeed's ZeRO-3, whose elements are elsewhere now?"""
    return hasattr(t, 'ds_tensor') and t.numel() == 0


def whole(what: Named, named: str, of: Head, t: Any, group: Any, shape: tuple[int, ...], device: Any, tp: Comm) -> Any:
    """All [shape] of a plain tensor of which each rank of a group has rows, or, flattened, elements, the last ones some of padding;
    or of a parameter of DeepSpeed's ZeRO-3. Gradients go back to where they are."""
    if is_partitioned(t):
        shape = tuple(t.ds_shape)
        t, group, _ = partitioned(t, group)
    comm = groups.comm_of(group, device, named)
    groups.require_apart(what, tp, 'the ranks that share ' + named.split(': ')[-1], comm)
    count = shape[0] if t.dim() == len(shape) else math.prod(shape)
    each = -(-count // comm.size)
    own, tail = max(min(count - each * comm.rank, each), 0), shape[1:] if t.dim() == len(shape) else ()
    if t.shape not in ((own, *tail), (own if tail else each, *tail)):
        raise ArgumentError("%s of %s is shared by %d ranks, and rank %d has %s of it, expected %s: its part" % (
            named, list(shape), comm.size, comm.rank, list(t.shape), [own, *tail] if tail else [each]))
    part, _ = averaged(what, t, None, t, of.grad_reduction, comm.size, None, False)
    return Gathered.apply(part, comm, count).view(shape)


def factors(what: Named, of: Head, hidden: Any, comm: Comm, uncut: bool) -> tuple[Any, Any, float]:
    """A and B of a Head's LoRA, whole but for rows of B that other ranks of the vocabulary @comm have, and its scale; gradients
    go back to where the rows are. uncut: all of these ranks have the whole weight."""
    given: Any = of.lora
    if not (isinstance(given, tuple) and len(given) == 3 and all(isinstance(t, torch.Tensor) for t in given[:2])):
        raise ArgumentError("%s: the Head's lora is %s, expected (A [r, H], B [Vl, r], scale)" % (
            what, 'a ' + type(given).__name__ if not isinstance(given, tuple) else [type(t).__name__ for t in given]))
    tp, made = groups.world_ranks(comm) if comm.size > 1 else (), []
    for name, t in zip('AB', given):
        named = "%s: %s of the Head's lora" % (what, name)
        if is_partitioned(t):
            t = whole(what, named, of, t, None, (), hidden.device, comm)
        if is_placed(t):
            part, found = rows_of(named, t, tp)
            if (found.columns is not None) if name == 'A' else found.whole and not uncut:
                raise ArgumentError("%s is %s, expected %s over tp_group" % (named, said(t), 'Replicate()' if name == 'A' else 'Shard(0)'))
            shares, copies = (None if ranks is None else groups.comm_of_ranks(ranks, hidden.device)
                              for ranks in (found.group, found.copies))
            for ranks in (shares, copies):
                if ranks is not None:
                    groups.require_apart(what, comm, "the ranks that share the Head's lora", ranks)
            size = (1 if shares is None else shares.size) * (1 if copies is None else copies.size)
            part, _ = averaged(what, part, None, t, of.grad_reduction, size, copies, False)
            t = part if shares is None else Gathered.apply(part, shares, found.rows)
        made.append(t)
    scale = number("%s: scale of the Head's lora" % what, given[2])
    if not math.isfinite(scale):
        raise ArgumentError("%s: scale of the Head's lora is %s, expected a finite number" % (what, scale))
    return made[0], made[1], scale


# ---- tokens, logits ----

def _tokens(what: str, t: Any, tp: tuple[int, ...], reduce: tuple[int, ...], features: bool, d_hidden: str) -> Any:
    """This rank's part of values per token [..] or [.., H]: all that a rank of tp_group must have."""
    mesh, want = t.device_mesh, list(t.placements)
    vocabulary, made = _shared(what, mesh, tp), list(t.placements)
    for i, line in enumerate(lines(mesh)):
        p = want[i]
        if len(line) == 1:
            continue
        if p.is_partial() or features and not p.is_replicate() and p.dim in (-1, t.dim() - 1):
            raise ArgumentError("%s is %s, expected Replicate(), or Shard() of an axis of tokens" % (what, said(t)))
        if i == vocabulary:
            if d_hidden == 'reduce_scatter' and features:
                if p.is_replicate() or p.dim != 0:
                    raise ArgumentError("%s is %s, and d_hidden is 'reduce_scatter', expected Shard(0) over tp_group"
                                        % (what, said(t)))
                continue
            for at in (want, made):
                at[i] = torch.distributed.tensor.Replicate()
            if d_hidden == 'partial' and features:
                made[i] = torch.distributed.tensor.Partial()
        elif p.is_replicate() and len(set(line) & set(reduce)) > 1:
            raise ArgumentError("%s is %s, and reduce_group has ranks %s, which would count the same tokens; expected Shard() "
                                "of an axis of tokens over them" % (what, said(t), list(reduce)))
    if want != list(t.placements):
        t = t.redistribute(placements=want)
    return _local(t, grad_placements=made)


def _logits(what: str, given: dict[str, Any], name: str, tp: tuple[int, ...], reduce: tuple[int, ...]) -> Any:
    """This rank's columns and tokens of logits [.., V]; into @given, which columns of which group they are."""
    t = given[name]
    mesh, cut = t.device_mesh, []
    vocabulary = _shared(what, mesh, tp)
    for i, line in enumerate(lines(mesh)):
        p = t.placements[i]
        if len(line) == 1:
            continue
        if p.is_partial():
            raise ArgumentError("%s is %s, expected Shard(-1) over tp_group" % (what, said(t)))
        if p.is_replicate():
            if i == vocabulary:
                given['tp_group'] = None  # each of its ranks has all columns
            elif len(set(line) & set(reduce)) > 1:
                raise ArgumentError("%s is %s, and reduce_group has ranks %s, which would count the same tokens"
                                    % (what, said(t), list(reduce)))
        elif p.dim in (-1, t.dim() - 1):
            cut.append(i)
        elif i == vocabulary:
            raise ArgumentError("%s is %s, expected Shard(-1) over tp_group" % (what, said(t)))
    if len(cut) > 1 or cut and type(t.placements[cut[0]]).__name__ != 'Shard' or cut and tp and cut[0] != vocabulary:
        raise ArgumentError("%s is %s, expected Shard(-1) over tp_group alone" % (what, said(t)))
    if cut:
        if vocabulary is None:
            given['tp_group'] = mesh.get_group(cut[0])
        start, _, vocab = _columns(what, columns_of(what, given.get('vocab')), (
            *_cut(t.shape[-1], len(lines(mesh)[cut[0]]), mesh.get_coordinate()[cut[0]]), t.shape[-1]))
        given['vocab'] = start, vocab
    return _local(t)


def _columns(what: str, given: Columns, found: tuple[int, int, int]) -> Columns:
    """Those of a placement, of which the caller may say fewer. ValueError: those that are given are others."""
    start, _, vocab = given
    if start not in (None, found[0]) or vocab is not None and vocab > found[2]:
        raise ArgumentError("%s: vocab is %s, and the placement of the DTensor says %s" % (
            what, (start, vocab), (found[0], found[2])))
    return found[0], found[1], found[2] if vocab is None else vocab


def _carried(bridge: Any, given: dict[str, Any]) -> None:
    """Into @given: this rank's part of x, and the shape of the whole, for a bridge from one uniform layout to another.
    ValueError: src gives this rank another part."""
    x, axes, me = given['x'], bridge.axes, torch.distributed.get_rank()
    mesh, at, ranges = x.device_mesh, x.device_mesh.get_coordinate(), [(0, n) for n in x.shape]
    if len(axes) != x.dim() or axes == 'th':
        raise ArgumentError("bridge: x is %s, expected an axis for each of samples, rows and features" % said(x))
    for i, p in enumerate(x.placements):
        ranks = len(lines(mesh)[i])
        if ranks == 1 or p.is_replicate():
            continue
        if type(p).__name__ != 'Shard':
            raise ArgumentError("bridge: x is %s, expected Shard() or Replicate()" % said(x))
        lo, hi = ranges[p.dim]
        a, b = _cut(hi - lo, ranks, at[i])
        ranges[p.dim] = lo + a, lo + b
    whole = dict(zip(axes, x.shape))
    shape = whole['b'], whole.get('s', 1), whole['h']
    owned = bridge.src.owned(me, *shape)
    for name, here, want in (('samples', range(*ranges[axes.index('b')]), range(*owned.samples)),
                             ('rows', range(*ranges[axes.index('s')]) if 's' in axes else range(1), owned.rows),
                             ('features', range(*ranges[axes.index('h')]), range(*owned.features))):
        if list(here) != list(want):
            raise ArgumentError("bridge: x is %s, which gives rank %d %s %s, and src gives it %s" % (
                said(x), me, name, _between(here), _between(want)))
    if given.get('shape') not in (None, shape, tuple(x.shape)) or given.get('samples') not in (None, shape[0]):
        raise ArgumentError("bridge: shape is %s and samples %s, and x is %s" % (given.get('shape'), given.get('samples'), said(x)))
    given.update(x=_local(x), shape=shape, samples=None)


def _between(ids: Any) -> str:
    ids = list(ids)
    return 'none' if not ids else '%d to %d' % (ids[0], ids[-1]) if ids == list(range(ids[0], ids[-1] + 1)) else str(ids[:8])


def taken(fn: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call, by name, with this rank's parts of DTensors in their place. Those of a head stay what they
    are. ValueError: a DTensor that the call does not take."""
    names = inspect.signature(fn).parameters
    given = dict(zip(names, args), **kwargs)
    before = dict(given)
    what = {'call': 'bridge', '_planned': 'EncoderParallel.plan', '_relayout': 'relayout', '_gather': 'Sequence.gather'}.get(fn.__name__, fn.__qualname__.replace('.forward', '').replace('.__init__', ''))
    head = next((value for value in given.values() if isinstance(value, Head)), None)
    takes = ('hidden', 'target', 'mask', 'ids', 'vocab_parallel_logits', 'targets', 'input') if {'vocab', 'support', 'input'} & set(
        names) else ('hidden',) if fn.__name__ == 'over_chunks' else ()
    hidden, logits = ('input', 'targets') if 'linear_weight' in names else ('hidden', 'input')
    places = None
    for name, t in before.items():
        if not is_placed(t) or name in PARAMETERS and not (name == 'weight' and 'input' in names):
            continue
        of = '%s: %s' % (what, name)
        if name == 'x' and what == 'bridge' and before['self'].kind == 'uniform':
            _carried(before['self'], given)
            continue
        if name not in takes:
            raise ArgumentError("%s is %s, expected a plain tensor, this rank's part" % (of, said(t)))
        places = places or [groups.world_ranks(of_call if of_call is not None else getattr(head, group, None), '%s: %s' % (what, group))
                            for group, of_call in ((group, before.get(group)) for group in ('tp_group', 'reduce_group'))]
        if name not in ('vocab_parallel_logits', 'targets', logits):
            given[name] = _tokens(of, t, *places, name == hidden, 'all_reduce' if head is None else head.d_hidden)
            continue
        for other in ('vocab_parallel_logits', 'targets'):
            if other in before and getattr(before[other], 'placements', None) != t.placements:
                raise ArgumentError("%s is %s, expected %s that are placed alike" % (of, said(t), other))
        given[name] = _logits(of, given, name, *places)
    return given
