# SPDX-License-Identifier: Apache-2.0
"""Targets, masks and gathered per-token values of batches whose positions are split over context ranks:
docs/concepts/layouts.md."""
from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Iterable
from typing import Any, Literal

import torch

from .. import _structs as s
from .._lib import call, lib, size_of
from ..errors import ArgumentError
from ..partition import CUTS
from ..plan import choice
from ..tables import table
from . import ranks as groups
from .calls import eager
from .functions import Function
from .ready import integer, reserved
from .tensors import checked, stream_of
from .types import Device, Group, Integers

_ADJOINT = {'slice': 0, 'sum': 1}
_MASKS = {'tokens': 0, 'targets': 1}


def _long(shape: Iterable[int]) -> list[int]:
    """Axes that order elements"""
    return [n for n in shape if n != 1]


class Sequence:
    """B rows of S columns, of which a context rank sees local elements: docs/concepts/layouts.md.

    They are [B, padded / cp] of a dense batch, or with cu_padded [cu_padded[B] / cp] of a packed one. Every rank of cp_group has
    the same. Integers are in host memory; a tensor is copied to it, which waits for a GPU.

    Args:
        batch: B.
        positions: S.
        padded: columns of a dense row that the model sees, >= S; 0: S.
        lengths: [B], tokens of each row; None: S.
        cu_padded: [B + 1], where each row's segment of a packed batch begins.
        left_padded: tokens are a row's last columns.
        cp_group: the context ranks; None: this one alone.
        split: "zigzag" in each row; "contiguous": a rank has one interval of each dense row, or of the whole packed stream.

    Raises:
        ValueError: rows that do not fit, lengths that 2 cp does not divide; it names the row.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> seq = ct.Sequence(2, 4, lengths=[4, 3])
        >>> seq.targets(torch.arange(8).view(2, 4)).tolist()
        [[1, 2, 3, -100], [5, 6, -100, -100]]
    """

    @eager  # so that the others hear of an error
    def __init__(self, batch: int, positions: int, *, padded: int = 0, lengths: Integers | None = None,
                 cu_padded: Integers | None = None, left_padded: bool = False, cp_group: Group | None = None,
                 split: Literal['zigzag', 'contiguous'] = 'zigzag'):
        self.cp_group = cp_group
        cp, rank = groups.size_and_rank(cp_group, 'Sequence: cp_group')
        self.batch, self.positions, self.packed = int(batch), int(positions), cu_padded is not None
        self._raw = raw = s.Sequence(c.sizeof(s.Sequence), self.batch, self.positions, int(padded),
                                     left_padded=bool(left_padded), cp=cp, cp_rank=rank,
                                     contiguous=bool(choice('split', split, CUTS)))
        self._held: list[Any] = []
        self._host: dict[str, Any] = {}
        for name, given, count in (('lengths', lengths, self.batch), ('cu_padded', cu_padded, self.batch + 1)):
            if given is None:
                continue
            values = table('Sequence', name, given)
            if len(values) != count:
                raise ArgumentError("Sequence: %s has %d numbers, expected %d" % (name, len(values), count))
            self._host[name] = array = (c.c_int64 * max(count, 1))(*values)
            setattr(raw, name, c.addressof(array))
        call('colo_sequence_check', raw)
        self.count = lib().colo_sequence_count(raw)
        self.shape = (self.count,) if self.packed else (self.batch, int(padded or positions) // cp)
        self._on: dict[Any, Any] = {}

    def __reduce__(self) -> Any:
        held = {name: list(array)[:self.batch + (name == 'cu_padded')] for name, array in self._host.items()}
        return functools.partial(Sequence, padded=self._raw.padded, left_padded=self._raw.left_padded,
                                 cp_group=self.cp_group, split='contiguous' if self._raw.contiguous else 'zigzag',
                                 **held), (self.batch, self.positions)

    @staticmethod
    def pack(lengths: Iterable[int], *, tp: int = 1, cp: int = 1, fp8: bool = False) -> list[int]:
        """Where rows begin in a packed batch, each padded so that tp, 2 cp and, with fp8, 16 divide it.

        Args:
            lengths: [B], tokens of each row.
            tp: ranks of sequence parallelism.
            cp: context ranks.
            fp8: products in fp8 want rows of 16.

        Returns:
            cu_padded [B + 1].
        """
        values = table('Sequence.pack', 'lengths', lengths)
        given, made = (c.c_int64 * max(len(values), 1))(*values), (c.c_int64 * (len(values) + 1))()
        call('colo_sequence_pack', given, len(values), tp, cp, fp8, made)
        return list(made)

    def on(self, device: Any) -> Any:
        """The C struct for tensors of a device."""
        if device.type != 'cuda':
            return self._raw
        found = self._on.get(device)
        if found is None:
            found = s.Sequence.from_buffer_copy(self._raw)
            for name, array in self._host.items():
                copy = torch.tensor(list(array), dtype=torch.int64, device=device)
                setattr(found, 'device_' + name, copy.data_ptr())
                self._held.append(copy)
            self._on[device] = found
        return found

    @eager
    def targets(self, tokens: torch.Tensor, ignore: int = -100, *, depth: int = 0) -> torch.Tensor:
        """The next token of every local element, or for multi-token prediction a later one of its sequence.

        Args:
            tokens: int64 [B, S], or [cu_padded[B]] of a packed batch; every rank has all of them.
            ignore: what stands where there is none.
            depth: targets are 1 + depth tokens ahead, on whatever rank; the last 1 + depth tokens of a sequence have none.

        Returns:
            int64, of this Sequence's shape.

        Raises:
            ValueError: a shape or dtype that does not fit; a negative depth.
        """
        if not isinstance(tokens, torch.Tensor):
            raise ArgumentError("Sequence.targets: tokens are a %s, expected a torch.Tensor" % type(tokens).__name__)
        tokens = tokens.contiguous()  # held until the library has read it
        made = torch.empty(self.shape, dtype=torch.int64, device=tokens.device)
        raw = self.on(tokens.device)
        if depth:
            raw = s.Sequence.from_buffer_copy(raw)
            raw.depth = integer('Sequence.targets: depth', depth)
        call('colo_sequence_targets', raw, checked(tokens, 'tokens'), int(ignore),
             checked(made.view(-1), 'targets'), stream_of(tokens.device))
        return made

    @eager
    def mask(self, what: Literal['tokens', 'targets'] = 'tokens', device: Device = 'cpu') -> torch.Tensor:
        """Of every local element: does it hold a token, or one that has a target?

        Args:
            what: "tokens" or "targets".
            device: of the mask.

        Returns:
            bool, of this Sequence's shape.

        Raises:
            ValueError: another what.
        """
        if what not in _MASKS:
            raise ArgumentError("Sequence.mask: what is %r, expected 'tokens' or 'targets'" % (what,))
        made = torch.empty(self.shape, dtype=torch.bool, device=device)
        call('colo_sequence_mask', self.on(made.device), _MASKS[what],
             checked(made.view(torch.uint8).view(-1), 'mask'), stream_of(made.device))
        return made

    def gather(self, local: torch.Tensor, adjoint: Literal['slice', 'sum'] = 'slice') -> torch.Tensor:
        """Per-token values of all ranks. One gather.

        Args:
            local: f32 or f64, of the shape that targets() has.
            adjoint: "slice", if every context rank makes the same loss of it, which counts once: a rank's gradient is its own part,
                and nothing is sent. "sum": each rank's loss is a part of the whole; gradients are added.

        Returns:
            [B, S - 1], differentiable: column c of row b is the value of the token in column c, which predicts the one in c + 1; 0 if
            there is no target.

        Raises:
            ValueError: a shape or dtype that does not fit.
        """
        return _gather(self, local, adjoint, self.cp_group)


@eager
def _gather(seq: Sequence, local: Any, adjoint: str, cp_group: Any) -> Any:
    found = list(local.shape) if isinstance(local, torch.Tensor) else 'a ' + type(local).__name__
    dtype = getattr(local, 'dtype', None)
    if dtype not in (torch.float32, torch.float64) or _long(found) != _long(seq.shape) or adjoint not in _ADJOINT:
        raise ArgumentError(
            "Sequence.gather: values are %s of %s and adjoint is %r, expected a tensor %s of float32 or float64 and "
            "'slice' or 'sum'" % (found, dtype, adjoint, list(seq.shape)))
    comm = groups.comm_of(cp_group, local.device, 'cp_group')
    return _Gather.apply(local, seq, comm, adjoint)


def _workspace(raw: Any, like: Any) -> tuple[Any, int]:
    return reserved(size_of('colo_sequence_workspace_size', raw, checked(like, 'values').dtype), like.device)


@Function
def _Gather(ctx: Any, local: Any, seq: Sequence, comm: Any, adjoint: str) -> Any:
    """(values of this rank's elements, their Sequence, communicator, adjoint) -> those of all ranks"""
    with groups.telling(comm):
        raw, flat = seq.on(local.device), local.contiguous().view(-1)
        memory, address = _workspace(raw, flat)
        out = torch.empty(seq.batch, seq.positions - 1, dtype=local.dtype, device=local.device)
        call('colo_sequence_gather', raw, checked(flat, 'values'), checked(out, 'out'), comm.handle, address,
             stream_of(local.device))
    del memory
    ctx.seq, ctx.comm, ctx.adjoint, ctx.shape = seq, comm, adjoint, local.shape
    ctx.set_materialize_grads(False)
    return out


@_Gather.adjoint
def _(ctx: Any, d_out: Any) -> Any:
    if d_out is None and ctx.adjoint == 'slice':
        return None, None, None, None
    with groups.telling(ctx.comm):
        raw, d_out = ctx.seq.on(d_out.device), d_out.contiguous()
        d = torch.empty(ctx.shape, dtype=d_out.dtype, device=d_out.device)
        memory, address = _workspace(raw, d_out)
        call('colo_sequence_gather_backward', raw, _ADJOINT[ctx.adjoint], checked(d_out, 'd_out'),
             checked(d.view(-1), 'd_values'), ctx.comm.handle, address, stream_of(d_out.device))
    del memory
    return d, None, None, None
