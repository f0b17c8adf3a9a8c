# SPDX-License-Identifier: Apache-2.0
"""The library's tensor from its parts, or of a torch.Tensor."""
from typing import Any

from . import _structs as s
from .errors import ArgumentError

_TORCH = {'float32': 'f32', 'float64': 'f64', 'bfloat16': 'bf16', 'float16': 'f16', 'int8': 'i8',
          'uint8': 'u8', 'bool': 'u8', 'int16': 'i16', 'int32': 'i32', 'int64': 'i64'}
torch_dtypes: dict[Any, int] = {}  # torch.dtype -> number, filled as they come


def make(data: int, dtype: int, shape: Any, stride: Any, mem: int = s.MEM_HOST,
         device: int = -1) -> s.Tensor:
    """A view from its parts; strides in elements."""
    ndim = len(shape)
    if ndim > s.NDIM_MAX:
        raise ArgumentError("a tensor of %d axes, at most %d" % (ndim, s.NDIM_MAX))
    raw = s.Tensor(data, dtype, mem, device, ndim)
    raw.shape[:ndim] = shape
    raw.stride[:ndim] = stride
    return raw


def contiguous(shape: Any) -> list[int]:
    """Row-major strides in elements."""
    stride: list[int] = []
    n = 1
    for extent in reversed(shape):
        stride.append(n)
        n *= max(extent, 1)
    return stride[::-1]


def torch_dtype(dtype: Any, what: str = 'tensor') -> int:
    """Number of a torch dtype. ValueError: one that the library does not know."""
    number = torch_dtypes.get(dtype)
    if number is None:
        name = str(dtype).rpartition('.')[2]
        if name not in _TORCH:
            raise ArgumentError("%s is of dtype %s, expected one of %s"
                                % (what, dtype, ', '.join(_TORCH)))
        number = torch_dtypes[dtype] = s.DTYPE[_TORCH[name]]
    return number


def check_signs(t: Any, what: str) -> None:
    """ValueError: a torch.Tensor whose memory has other signs than it has. (What is conjugated alone is complex.)"""
    if t.is_neg():
        raise ArgumentError("%s: its memory holds other signs than it has (the negative bit, as conj().imag sets it); "
                            "pass resolve_neg() of it" % what)


def from_torch(t: Any, what: str = 'tensor') -> s.Tensor:
    """View of a torch.Tensor in host or CUDA memory; any strides. Borrows its memory."""
    check_signs(t, what)
    device = t.device
    if device.type == 'cpu':
        mem, ordinal = s.MEM_HOST, -1
    elif device.type == 'cuda':
        mem, ordinal = s.MEM_CUDA, device.index
    else:
        raise ArgumentError("%s is on device '%s', expected cpu or cuda" % (what, device))
    return make(t.data_ptr(), torch_dtype(t.dtype, what), t.shape, t.stride(), mem, ordinal)
