# SPDX-License-Identifier: Apache-2.0
"""What makes the losses' calls cheap in Python: everything that follows from shapes, strides, dtypes,
devices and options is made once and kept with the communicator; a call looks it up by these, fills
in addresses, and passes addresses.

A C struct of a call under way belongs to that call: it is taken from a list and put back, so threads
that run backward at once never share one. Outputs and what is kept for backward are torch's; workspace
that no one sees is a buffer of the call's own where it is small and on the host, for there the call is
over when it returns.
"""
import collections
import ctypes as c
import functools
from typing import Any, NamedTuple

import torch

from .. import _structs as s
from .._lib import lib
from ..errors import ArgumentError
from ..tensor import contiguous
from .tensors import checked, said

KEPT = 64  # sets of shapes and options, for a communicator
SMALL = 1 << 16  # bytes of workspace that are kept, or lie in one allocation with what is kept


@functools.lru_cache(maxsize=None)
def entry(name: str) -> Any:
    """A C function that returns a status, to be called with addresses only; check() what it returns."""
    fn = lib()[name]
    fn.restype, fn.argtypes = c.c_int, [c.c_void_p] * len(s.FUNCTIONS[name][1])
    return fn


def number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as why:
        raise ArgumentError("%s is %r, expected a number (%s)" % (name, value, why)) from None


def integer(name: str, value: Any) -> int:
    if not hasattr(value, '__index__'):
        raise ArgumentError("%s is %r, expected an integer" % (name, value))
    return value.__index__()


class OfTokens(NamedTuple):
    """Temperatures of tokens, in the place of the number for all"""
    given: torch.Tensor


def scalars(what: str, temperature: Any, softcap: Any, scale: Any = 1.0, label_smoothing: Any = 0.0, z_loss: Any = 0.0,
            ignore_index: Any = -100, chunk_size: Any = 0, invariant: Any = False, of_tokens: bool = False) -> tuple[Any, ...]:
    """Options of function @what as plain numbers: a tensor would be a key that changes, and be compared on its device.
    of_tokens: temperature may be a tensor with an axis: then it is OfTokens."""
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        if not of_tokens:
            raise ArgumentError("%s: temperature is %s, expected a number; nll(), logprob() and their like take one of each token" % (
                what, said(temperature)))
        return OfTokens(temperature), *scalars(what, 1.0, softcap, scale, label_smoothing, z_loss, ignore_index, chunk_size, invariant)[1:]
    try:
        return (float(temperature), float(softcap or 0.0), float(scale), float(label_smoothing), float(z_loss),
                ignore_index.__index__(), (chunk_size or 0).__index__(), -1 if invariant is True else int(float(invariant)))
    except (TypeError, ValueError, AttributeError):
        for name, value in (('temperature', temperature), ('softcap', softcap or 0.0), ('scale', scale),
                            ('label_smoothing', label_smoothing), ('z_loss', z_loss), ('invariant', invariant)):
            number('%s: %s' % (what, name), value)
        for name, value in (('ignore_index', ignore_index), ('chunk_size', chunk_size or 0)):
            integer('%s: %s' % (what, name), value)
        raise


storage_of: Any = getattr(torch.Tensor, 'untyped_storage', None) or torch.Tensor._storage  # before 2.0


def like(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """What empty_like() makes contiguous tensors of, in half the time of empty(); of one element itself."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def made_like(kinds: list[tuple[str, Any]], views: dict[str, s.Tensor]) -> list[Any]:
    """New tensors like those of @kinds, to whose addresses the views of these names are set."""
    made = []
    for name, kind in kinds:
        t = torch.empty_like(kind)
        views[name].data = t.data_ptr()
        made.append(t)
    return made


def pointed(raw: c.Structure, views: dict[str, s.Tensor]) -> dict[str, s.Tensor]:
    """@views, to which the members of these names of @raw now point."""
    for name, view in views.items():
        setattr(raw, name, c.pointer(view))
    return views


class View:
    """The library's view of tensors of one shape, stride, dtype and device: all but the address.
    what: its name in errors."""
    __slots__ = ('raw', 'reach', 'size', 'count', 'ordinal', 'what', 'shape', 'stride',
                 'dtype', 'device')

    def __init__(self, like: Any, what: str, shape: Any = None, stride: Any = None):
        """shape, stride: how the library sees it, where that is not how torch does."""
        self.raw = raw = s.Tensor.from_buffer_copy(checked(like, what))
        raw.data = None
        if shape is None and not like.numel():
            shape, stride = like.shape, contiguous(like.shape)  # Tensor.contiguous() leaves those of an empty tensor
        if shape is not None:
            raw.ndim = len(shape)
            raw.shape[:len(shape)] = shape
            raw.stride[:len(shape)] = stride
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.stride = None if like.is_contiguous() else like.stride()
        self.size, self.count, self.ordinal = like.element_size(), like.numel(), like.get_device()
        self.reach = self.size * (self.count and 1 + sum(
            (n - 1) * step for n, step in zip(like.shape, like.stride())))
        self.what = what

    def copy(self) -> s.Tensor:
        return s.Tensor.from_buffer_copy(self.raw)

    def point(self, raw: s.Tensor, t: Any) -> Any:
        """Lets a copy be a view of @t, which has this shape and stride. RuntimeError: a storage that is
        too small, for somebody freed or resized it. ValueError: the negative bit."""
        raw.data = t.data_ptr()
        if t.is_neg() or storage_of(t).nbytes() < t.storage_offset() * self.size + self.reach:
            checked(t, self.what)
        return t

    def again(self, raw: s.Tensor, t: Any) -> Any:
        """The same of a saved tensor, which it returns as it was: hooks (save_on_cpu) may give back other
        strides."""
        # of the same memory when contiguous, whatever the shape; as View sees it
        if self.stride is not None or not t.is_contiguous() or t.numel() != self.count or \
                t.dtype is not self.dtype or t.get_device() != self.ordinal:
            t = self._restored(t)
        raw.data = t.data_ptr()
        if storage_of(t).nbytes() < t.storage_offset() * self.size + self.reach:
            checked(t, self.what, saved=True)
        return t

    def _restored(self, t: Any) -> Any:
        if t.shape != self.shape or t.dtype is not self.dtype or t.device != self.device:
            raise ArgumentError(
                "%s came back from forward as %s of %s on %s, expected %s of %s on %s"
                % (self.what, list(t.shape), t.dtype, t.device, list(self.shape), self.dtype,
                   self.device))
        if self.stride is None or t.stride() == self.stride:
            return t if self.stride else t.contiguous()
        return torch.empty_strided(self.shape, self.stride, dtype=t.dtype, device=t.device).copy_(t)


SLACK = 31  # doubles that a block has in front of the first multiple of 256, at most


def aligned(address: int) -> int:
    """The first multiple of 256 from @address on: where the library takes workspace and saved memory."""
    return (address + 255) & ~255


def reserved(size: int, device: Any) -> tuple[Any, int]:
    """(the tensor that holds it, address of @size bytes at a multiple of 256)"""
    memory = torch.empty(size + 255, dtype=torch.uint8, device=device)
    return memory, aligned(memory.data_ptr())


class HostWorkspace:
    """Workspace of calls on the host, at a multiple of 256; grows."""
    __slots__ = ('memory', 'size', 'address')

    def __init__(self) -> None:
        self.size = -1

    def of(self, size: int) -> int:
        if size > self.size:
            self.memory = (c.c_char * (size + 255))()
            self.size, self.address = size, aligned(c.addressof(self.memory))
        return self.address

    def reserve(self, size: int, device: Any, cuda: bool, most: int = SMALL) -> tuple[Any, int]:
        """(what holds @size bytes on a device, None if this object does; their address). cuda: of @device, whose type
        takes 2 us of a backward to read."""
        return reserved(size, device) if cuda or size > most else (None, self.of(size))


class Table:
    """What is kept for the sets of shapes and options that were asked for last."""
    __slots__ = ('kept', 'key', 'found')

    def __init__(self) -> None:
        self.kept: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self.key = self.found = None

    def get(self, key: Any) -> Any:
        """None: not there."""
        found = self.kept.get(key)
        if found is not None:
            self.kept.move_to_end(key)
            self.key, self.found = key, found
        return found

    def add(self, key: Any, value: Any) -> Any:
        self.kept[key] = self.found = value
        self.key = key
        if len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return value


def table(comm: Any, name: str) -> Table:
    """The one of this name that is kept with a communicator."""
    found = comm.__dict__.get(name)
    if found is None:
        found = comm.__dict__[name] = Table()
    return found
