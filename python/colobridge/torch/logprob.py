# SPDX-License-Identifier: Apache-2.0
"""Log-probability, entropy and loss of targets under vocabulary-parallel logits, as autograd functions.

Forward reads the logits once and does one all-gather over the vocabulary group; backward does none,
reads the logits again and writes their gradient. Formulas and special values: docs/logprob.md.
"""
from __future__ import annotations

import ctypes as c
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import _structs as s
from .._lib import call
from ..comm import Comm
from ..errors import ArgumentError, FailedError
from ..tensor import torch_dtype
from . import ranks as groups
from .tensors import checked, eager, once, saved_tensors, stream_of

_SIZE = c.c_size_t


@dataclass(frozen=True)
class Rows:
    """Logits [..., Vl] as the [T, Vl] rows that the library reads, without a copy.

    Row number of index (i, j, ..) is i * step[0] + j * step[1] + ..; with gaps (a slice of a longer
    sequence) T counts the rows between, too, whose targets are ignored, so that they are not read."""
    shape: tuple[int, ...]  # of the logits without their last axis
    step: tuple[int, ...]
    count: int
    gap: bool  # are there rows between
    stride: int  # elements from row to row
    columns: int

    def spread(self, values: Any, fill: Any) -> Any:
        """[T], contiguous, of per-token values [shape]."""
        if self.gap:
            out = values.new_full((self.count,), fill)
        elif len(self.shape) == 1 and self.step == (1,) and values.is_contiguous():
            return values
        elif self.step == _row_major(self.shape):
            return values.reshape(-1).contiguous()  # a sum's gradient is expanded
        else:
            out = values.new_empty(self.count)
        out.as_strided(self.shape, self.step).copy_(values)
        return out

    def gather(self, rows: Any) -> Any:
        """[shape] of [T]: a view."""
        if len(self.shape) == 1 and not self.gap and self.step == (1,):
            return rows
        return rows.as_strided(self.shape, self.step, rows.storage_offset())

    def columns_of(self, rows: Any) -> Any:
        """[shape, Vl] of [T, Vl] with rows Vl apart: a view."""
        if len(self.shape) == 1 and not self.gap and self.step == (1,):
            return rows
        return rows.as_strided(self.shape + (self.columns,),
                               tuple(n * self.columns for n in self.step) + (1,))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    step, n = [], 1
    for extent in reversed(shape):
        step.append(n)
        n *= extent
    return tuple(reversed(step))


@functools.lru_cache(maxsize=64)
def _whole(shape: tuple[int, ...], columns: int) -> Rows:
    return Rows(shape, _row_major(shape), math.prod(shape), False, max(columns, 1), columns)


def rows_of(logits: Any) -> tuple[Any, Rows]:
    """(logits, how to read them). Copies only where columns are not contiguous, rows overlap (expanded
    tensors), or more rows lie between than are meant."""
    shape, columns = tuple(logits.shape[:-1]), logits.shape[-1]
    if logits.is_contiguous():
        return logits, _whole(shape, columns)
    strides = logits.stride()
    count = math.prod(shape)
    if count == 0 or columns == 0:
        return logits.contiguous(), _whole(shape, columns)
    lead = [stride if n > 1 else 0 for n, stride in zip(shape, strides[:-1])]
    unit = math.gcd(*lead) if any(lead) else columns
    if columns == 1:
        unit = unit or 1
    rows = 1 + sum((n - 1) * (stride // unit) for n, stride in zip(shape, lead))
    order = sorted((stride, n) for n, stride in zip(shape, lead) if n > 1)
    reach, apart = columns, unit >= columns
    for stride, n in order:
        apart = apart and stride >= reach
        reach = stride * (n - 1) + reach
    if (columns > 1 and strides[-1] != 1) or not apart or rows > 2 * count:
        return rows_of(logits.contiguous())
    return logits, Rows(shape, tuple(stride // unit for stride in lead), rows, rows != count, unit,
                        columns)


@functools.lru_cache(maxsize=256)
def _config(start: int, vocab: int, **members: Any) -> s.LogprobConfig:
    raw = s.LogprobConfig(struct_size=c.sizeof(s.LogprobConfig), vocab=vocab, vocab_start=start,
                          temperature=1.0, scale=1.0, ignore_index=-100)
    for name, value in members.items():
        setattr(raw, name, value)
    call('colo_logprob_config_check', raw)
    return raw


class _Same:
    """A config as a key: _config() gives the same object for the same members."""

    def __init__(self, config: s.LogprobConfig):
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.config is other.config


@functools.lru_cache(maxsize=256)
def _sizes(config: _Same, dtype: int, tokens: int, ranks: int) -> tuple[int, int]:
    """Bytes of scratch and of saved statistics."""
    scratch, saved = _SIZE(), _SIZE()
    call('colo_logprob_scratch_size', config.config, dtype, tokens, ranks, c.byref(scratch))
    call('colo_logprob_saved_size', config.config, dtype, tokens, c.byref(saved))
    return scratch.value, saved.value


def shard(comm: Comm, control: Comm | None, columns: int, start: int | None, end: int | None,
          vocab: int | None) -> tuple[int, int]:
    """(first column, V) of this rank's shard. Without vocab_size it is the largest end of all shards,
    gathered once for a group and a shard; where a group serves vocabularies whose shards are equal on
    some ranks and differ on others, it has to be said."""
    size = comm.size
    if start is None:
        start = comm.rank * columns if vocab is None or size > 1 else 0
    if end is None:
        end = start + columns
    if end - start > columns or start < 0 or end < start:
        raise ArgumentError("vocab_start %d and vocab_end %d do not describe the %d columns of the "
                            "logits" % (start, end, columns))
    if vocab is not None:
        return start, vocab
    if size == 1:
        return start, end
    known = comm.__dict__.setdefault('_shards', {})
    if (start, end) not in known:
        host = control or comm
        with groups.telling(comm):
            ends = host.gather_bytes(b'%020d' % end)
        known[start, end] = max(map(int, ends))
    return start, known[start, end]


class Options(NamedTuple):
    """Of one call, for the autograd function."""
    config: s.LogprobConfig
    rows: Rows
    comm: Comm
    outputs: tuple[str, ...]  # of "logp", "entropy", "loss", "correct", "n_valid", "n_invalid"
    in_place: bool
    grad: bool  # is a backward to be prepared (inside of a function autograd does not say)


@functools.lru_cache(maxsize=None)
def function() -> Any:
    """The autograd function; made at the first call, for torch is imported then."""
    import torch

    class VocabParallel(torch.autograd.Function):
        """(logits, rows' targets [T], Options) -> the outputs that were asked for."""

        @staticmethod
        def forward(ctx: Any, logits: Any, targets: Any, o: Options) -> Any:
            rows, config, device = o.rows, o.config, logits.device
            wide = logits.dtype == torch.float64
            real = torch.float64 if wide else torch.float32
            kinds = {'correct': torch.uint8, 'n_valid': torch.int64, 'n_invalid': torch.int64}
            out = {name: torch.empty(1 if name[0] == 'n' else rows.count,
                                     dtype=kinds.get(name, real), device=device)
                   for name in o.outputs}
            scratch_size, saved_size = _sizes(_Same(config), torch_dtype(logits.dtype, 'logits'),
                                              rows.count, o.comm.size)
            scratch = torch.empty(scratch_size, dtype=torch.uint8, device=device)
            backward = o.grad and any(ctx.needs_input_grad)
            stats = torch.empty(saved_size // 8 if backward else 0, dtype=torch.float64,
                                device=device)
            saved = s.LogprobSaved() if backward else None
            with groups.telling(o.comm):
                call('colo_logprob_forward', config, two_axes(logits, 'logits', rows),
                     checked(targets, 'target'), o.comm.handle,
                     s.LogprobOut(**{name: t.data_ptr() for name, t in out.items()}), saved,
                     stats.data_ptr() if backward else None, scratch.data_ptr(), stream_of(device))
            ctx.o, ctx.ended = o, False
            ctx.save_for_backward(logits, targets, stats)
            results = tuple(t if name[0] == 'n' else rows.gather(t) for name, t in out.items())
            ctx.mark_non_differentiable(*(t for t, name in zip(results, o.outputs)
                                          if name in kinds))
            return results

        @staticmethod
        @once
        def backward(ctx: Any, *upstream: Any) -> Any:
            o: Options = ctx.o
            rows = o.rows
            if ctx.ended:
                raise FailedError("logprob: a second backward, but the first one wrote the gradient over "
                                  "the logits (inplace_backward=True)")
            logits, targets, stats = saved_tensors(ctx, 'logprob: the logits or the target')
            given = {'d_' + name: rows.spread(g, 0) for name, g in zip(o.outputs, upstream)
                     if name in ('logp', 'entropy', 'loss') and g is not None}
            saved = s.LogprobSaved(config=o.config,
                                   logits=two_axes(logits, 'logits', rows, saved=True),
                                   targets=checked(targets, 'target', saved=True),
                                   stats=stats.data_ptr(), valid=True)
            if o.in_place:
                d_rows, d_logits = saved.logits, logits.detach()
            else:
                grad = torch.empty((rows.count, rows.columns), dtype=logits.dtype,
                                   device=logits.device)
                d_rows, d_logits = checked(grad, 'd_logits'), rows.columns_of(grad)
            call('colo_logprob_backward', saved,
                 s.LogprobUpstream(**{name: g.data_ptr() for name, g in given.items()}), d_rows,
                 stream_of(logits.device))
            if o.in_place:
                ctx.ended = True
                bump = getattr(torch.autograd.graph, 'increment_version', None)
                if bump is not None:
                    bump(logits)
            return d_logits, None, None

    return VocabParallel


def two_axes(logits: Any, what: str, rows: Rows, *, saved: bool = False) -> s.Tensor:
    """The library's [T, Vl] view."""
    raw = checked(logits, what, saved=saved)
    raw.ndim = 2
    raw.shape[:2] = rows.count, rows.columns
    raw.stride[:2] = rows.stride, 1
    return raw


def outputs(logits: Any, target: Any, names: tuple[str, ...], *, tp_group: Any = None,
            vocab_start: int | None = None, vocab_end: int | None = None,
            vocab_size: int | None = None, inplace_backward: bool = False,
            what: str = 'logprob', **members: Any) -> tuple[Any, ...]:
    """The outputs @names of logits [..., Vl] and target [...]; @members are the C config's. What
    logprob(), nll() and colobridge.compat are made of."""
    import torch
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor):
        raise ArgumentError("%s: logits are a %s and target is a %s, expected torch tensors"
                            % (what, type(logits).__name__, type(target).__name__))
    comm = groups.comm_of(tp_group, logits.device, what + ': tp_group')
    try:
        if logits.dim() < 1 or not logits.dtype.is_floating_point:
            raise ArgumentError("%s: logits are %s of %s, expected [..., Vl] of a floating-point dtype"
                                % (what, list(logits.shape), logits.dtype))
        if target.shape != logits.shape[:-1]:
            raise ArgumentError("%s: target is %s, expected %s, the logits' shape without the last "
                                "axis" % (what, list(target.shape), list(logits.shape[:-1])))
        if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
            raise ArgumentError("%s: target is of %s, expected an integer dtype"
                                % (what, target.dtype))
        if target.device != logits.device:
            raise ArgumentError("%s: target is on %s, logits are on %s"
                                % (what, target.device, logits.device))
        start, vocab = shard(comm, _control(tp_group, comm), logits.shape[-1], vocab_start,
                             vocab_end, vocab_size)
        for name in ('entropy', 'loss', 'correct'):
            members['want_' + name] = name in names
        config = _config(start, vocab, **members)
        if inplace_backward and rows_of(logits)[0] is not logits:
            raise ArgumentError("%s: inplace_backward needs logits with contiguous columns whose rows do "
                                "not overlap, found shape %s and strides %s"
                                % (what, list(logits.shape), list(logits.stride())))
        logits, rows = rows_of(logits)
        if inplace_backward and rows.gap:
            raise ArgumentError("%s: inplace_backward would write the rows between those of a slice; "
                                "shape %s, strides %s" % (what, list(logits.shape),
                                                          list(logits.stride())))
    except Exception as why:
        groups.refuse(comm, why)
        raise
    if target.dtype is not torch.int64:
        target = target.to(torch.int64)
    target = rows.spread(target, config.ignore_index)
    return function().apply(logits, target, Options(config, rows, comm, names, inplace_backward,
                                                    torch.is_grad_enabled()))


def _control(group: Any, comm: Comm) -> Comm | None:
    """A host communicator of the same ranks, where @comm is one of GPUs."""
    if comm.size == 1 or comm.backend != 'nccl':
        return comm
    import torch
    return groups.comm_of(group, torch.device('cpu'))


@eager
def logprob(vocab_parallel_logits: Any, target: Any, *, tp_group: Any = None,
            vocab_start: int | None = None, vocab_end: int | None = None,
            vocab_size: int | None = None, entropy: bool = False, loss: bool = False,
            temperature: float = 1.0, softcap: float | None = None, label_smoothing: float = 0.0,
            z_loss: float = 0.0, ignore_index: int = -100, chunk_size: int | None = None,
            inplace_backward: bool = False) -> Any:
    """logp [...] of target [...] under logits [..., Vl]; with entropy= and loss=, a tuple of
    those, each differentiable. f32 (f64 for f64 logits), the same bits on every rank.

    tp_group: ranks that share the vocabulary (None: nobody). vocab_start, vocab_end: this rank's columns,
    by default equal shards in rank order; vocab_size: V where columns >= V are padding. Logits may
    have any strides; they are copied only where columns are not contiguous or rows overlap.
    logp = (x_t - M) - log Sum, x = logits / temperature (softcap * tanh(x / softcap)); it is never
    smoothed: label_smoothing and z_loss are for the loss. A target of ignore_index gives 0, one outside
    of [0, V) NaN. chunk_size bounds scratch and changes no bit. inplace_backward: the gradient is
    written over the logits.

    Raises ValueError (shapes, dtypes, devices, options), MismatchError (ranks that differ in targets,
    options, or shards with a hole), RuntimeError (destroyed group, another rank's error, logits
    written since forward), TimeoutError.
    """
    if not loss and (label_smoothing or z_loss):
        raise ArgumentError("logprob: label_smoothing and z_loss act on the loss, and logp is never "
                            "smoothed; ask for loss=True, or use nll()")
    names = ('logp',) + ('entropy',) * entropy + ('loss',) * loss
    out = outputs(vocab_parallel_logits, target, names, tp_group=tp_group, vocab_start=vocab_start,
                  vocab_end=vocab_end, vocab_size=vocab_size, inplace_backward=inplace_backward,
                  temperature=temperature, softcap=softcap or 0.0, label_smoothing=label_smoothing,
                  z_loss=z_loss, ignore_index=ignore_index, chunk_size=chunk_size or 0)
    return out if len(names) > 1 else out[0]


class Loss(NamedTuple):
    """loss = num / den (reduction "mean") or num ("sum"). Over all ranks of reduce_group."""
    loss: Any
    num: Any
    den: Any


@functools.lru_cache(maxsize=None)
def sum_over() -> Any:
    """The autograd function x -> its sum over ranks, added in rank order; backward hands on the gradient
    as it is, for each rank's part appears once in the sum."""
    import torch

    class SumOver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, comm: Comm) -> Any:
            total = x.clone()
            with groups.telling(comm):
                comm.all_reduce(total, stream=stream_of(x.device))
            return total

        @staticmethod
        def backward(ctx: Any, d_total: Any) -> Any:
            return d_total, None

    return SumOver


@eager
def nll(vocab_parallel_logits: Any, target: Any, *, reduction: str = 'mean', mask: Any = None,
        tp_group: Any = None, reduce_group: Any = None, vocab_start: int | None = None,
        vocab_end: int | None = None, vocab_size: int | None = None, temperature: float = 1.0,
        softcap: float | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
        ignore_index: int = -100, chunk_size: int | None = None,
        inplace_backward: bool = False) -> Any:
    """Cross entropy of target [...] under logits [..., Vl], the loss of docs/logprob.md.

    reduction "none": per token, 0 where ignored. "mean" and "sum": Loss(loss, num, den), where num
    is the sum over tokens and den their number (those with a legal target and, with mask [...], a mask
    that is not 0), added over reduce_group once: the dp x cp ranks, never tp. mean = num / den, 0
    when den is 0. Each rank's gradients are those of its own tokens in the whole mean: add them over
    the group, do not average. Other arguments and errors: logprob(). Nothing waits for the GPU.
    """
    import torch
    if reduction not in ('none', 'mean', 'sum'):
        raise ArgumentError("nll: reduction is %r, expected 'mean', 'sum' or 'none'" % (reduction,))
    logits = vocab_parallel_logits
    if mask is not None:
        check_mask('nll', mask, target, tp_group, reduce_group)
    names = ('loss',) if reduction == 'none' else ('loss', 'n_valid')
    out = outputs(logits, target, names, tp_group=tp_group, vocab_start=vocab_start,
                  vocab_end=vocab_end, vocab_size=vocab_size, inplace_backward=inplace_backward,
                  what='nll', temperature=temperature, softcap=softcap or 0.0,
                  label_smoothing=label_smoothing, z_loss=z_loss, ignore_index=ignore_index,
                  chunk_size=chunk_size or 0)
    loss = out[0]
    if mask is not None:
        counts = mask.to(torch.bool)
        loss = torch.where(counts, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))
    if reduction == 'none':
        return loss
    return reduced(loss, out[1][0] if mask is None else (counts & (target != ignore_index)).sum(),
                   reduction, reduce_group, 'nll')


def check_mask(what: str, mask: Any, target: Any, *of: Any) -> None:
    """ValueError, on all ranks of the groups: a mask that is no tensor or not of the target's shape."""
    found = list(mask.shape) if hasattr(mask, 'shape') else 'a ' + type(mask).__name__
    if hasattr(target, 'shape') and found != list(target.shape):
        raise groups.told(ArgumentError("%s: mask is %s, expected %s, the target's shape"
                                        % (what, found, list(target.shape))), target.device, *of)


def reduced(loss: Any, counted: Any, reduction: str, reduce_group: Any, what: str) -> Loss:
    """Mean or sum of a per-token loss and the number of tokens that count, over the group once."""
    import torch
    num, den = loss.sum(dtype=torch.float64), counted.to(torch.float64)
    if reduce_group is not None:
        comm = groups.comm_of(reduce_group, loss.device, what + ': reduce_group')
        if comm.size > 1:
            total = sum_over().apply(torch.stack((num, den)), comm)
            num, den = total[0], total[1].detach()
    value = num / den.clamp(min=1) if reduction == 'mean' else num
    return Loss(value.to(loss.dtype), num, den)
