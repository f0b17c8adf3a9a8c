# SPDX-License-Identifier: Apache-2.0
"""Checked views of torch tensors, and the current stream."""
import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import _structs as s
from ..errors import ArgumentError, FailedError
from ..tensor import from_torch

_NO_MEMORY = ("%s: this %s has no memory of its own; call it outside of FakeTensorMode, "
              "torch.export() and transforms of torch.func")


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


def written(t: Any) -> None:
    """Counts a write of the library as one of torch: autograd then refuses what saved @t before. An empty
    view shares the version counter, also in versions that have no increment_version()."""
    t.detach()[..., :0].zero_()
