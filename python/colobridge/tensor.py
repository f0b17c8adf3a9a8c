# SPDX-License-Identifier: Apache-2.0
"""A caller's memory as the library's tensor: no copy, strides as they are.

view() takes a torch.Tensor, anything with __array_interface__ (numpy), with __dlpack__, or a
contiguous buffer (array.array, memoryview, ctypes arrays), and imports none of them.
"""
import ctypes as c
from typing import Any

from . import _structs as s
from .errors import ArgumentError

# array interface: kind and bytes of an element. bool is a byte here.
_TYPESTR = {'f4': 'f32', 'f8': 'f64', 'f2': 'f16', 'i1': 'i8', 'u1': 'u8', 'b1': 'u8', 'i2': 'i16',
            'i4': 'i32', 'i8': 'i64'}
_FORMAT = {'f': 'f32', 'd': 'f64', 'e': 'f16', 'b': 'i8', 'B': 'u8', 'c': 'u8', '?': 'u8',
           'h': 'i16', 'i': 'i32', 'l': 'i64', 'q': 'i64'}
_TORCH = {'float32': 'f32', 'float64': 'f64', 'bfloat16': 'bf16', 'float16': 'f16', 'int8': 'i8',
          'uint8': 'u8', 'bool': 'u8', 'int16': 'i16', 'int32': 'i32', 'int64': 'i64'}
torch_dtypes: dict[Any, int] = {}  # torch.dtype -> number, filled as they come


def make(data: int, dtype: int, shape: Any, stride: Any, mem: int = s.HOST,
         device: int = -1) -> s.Tensor:
    """A view from its parts; strides in elements."""
    ndim = len(shape)
    if ndim > s.MAX_NDIM:
        raise ArgumentError("a tensor of %d axes, at most %d" % (ndim, s.MAX_NDIM))
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
        mem, ordinal = s.HOST, -1
    elif device.type == 'cuda':
        mem, ordinal = s.CUDA, device.index
    else:
        raise ArgumentError("%s is on device '%s', expected cpu or cuda" % (what, device))
    return make(t.data_ptr(), torch_dtype(t.dtype, what), t.shape, t.stride(), mem, ordinal)


def _from_interface(a: dict[str, Any], what: str, writes: bool) -> s.Tensor:
    kind = a['typestr']
    if kind[0] == '>' or kind[1:] not in _TYPESTR:
        raise ArgumentError("%s is of type '%s', expected one of %s in native byte order"
                            % (what, kind, ', '.join(_TYPESTR)))
    if writes and a['data'][1]:
        raise ArgumentError('%s is read-only and would be written' % what)
    size = int(kind[2:])
    strides = a.get('strides')
    if strides is None:
        strides = [n * size for n in contiguous(a['shape'])]
    if any(n % size for n in strides):
        raise ArgumentError("%s has strides of %s bytes, which are no multiples of its %d-byte "
                            "elements" % (what, tuple(strides), size))
    return make(a['data'][0], s.DTYPE[_TYPESTR[kind[1:]]], a['shape'], [n // size for n in strides])


def view(obj: Any, what: str = 'tensor', *, dtype: str | None = None,
         writes: bool = False) -> s.Tensor:
    """The library's view of @obj, which must outlive it. The view may be all that holds memory which @obj
    gave away (DLPack), so the caller keeps it until calls with its address have returned. dtype: of raw
    bytes ("bf16"). writes: the library will write to it. ValueError: a type, device or dtype that the
    library does not know; a read-only buffer; read-only memory that would be written."""
    if isinstance(obj, s.Tensor):
        return obj
    if hasattr(obj, 'data_ptr') and hasattr(obj, 'stride'):
        return from_torch(obj, what)
    if hasattr(obj, '__array_interface__'):
        return _from_interface(obj.__array_interface__, what, writes)
    if hasattr(obj, '__dlpack__'):
        from .dlpack import from_dlpack
        held = from_dlpack(obj)
        if writes and held.read_only:
            raise ArgumentError('%s is read-only and would be written' % what)
        raw = s.Tensor.from_buffer_copy(held.view)
        raw.held = held  # what is given back is no longer there to be read
        return raw
    try:
        memory = memoryview(obj)
    except TypeError:
        raise ArgumentError("%s is a %s, expected a torch tensor, an array or a buffer"
                            % (what, type(obj).__name__)) from None
    if not memory.c_contiguous or memory.readonly:
        raise ArgumentError("%s is a %s buffer, expected a contiguous one that can be written"
                            % (what, 'read-only' if memory.readonly else 'strided'))
    name = dtype or _FORMAT.get(memory.format.lstrip('@=<') if memory.format else 'B')
    if name not in s.DTYPE:
        raise ArgumentError("%s is a buffer of format '%s', expected one of %s" % (what, dtype or memory.format, ' '.join(_FORMAT)))
    shape = memory.shape
    if dtype:
        shape = (memory.nbytes // s.DTYPE_SIZE[s.DTYPE[dtype]],)
    held = (c.c_char * memory.nbytes).from_buffer(memory) if memory.nbytes else None
    raw = make(c.addressof(held) if held else 0, s.DTYPE[name], shape, contiguous(shape))
    raw.held = held  # a buffer that is exported cannot be resized
    return raw
