# SPDX-License-Identifier: Apache-2.0
"""A caller's memory as the library's tensor: no copy, strides as they are.

view() takes a torch.Tensor, anything with __array_interface__ (numpy), with __dlpack__, or a
contiguous buffer (array.array, memoryview, ctypes arrays), and imports none of them.
"""
import ctypes as c
from typing import Any

from . import _structs as s
from .dlpack import from_dlpack
from .errors import ArgumentError
from .tensor import contiguous, from_torch, make

# array interface: kind and bytes of an element. bool is a byte here.
_TYPESTR = {'f4': 'f32', 'f8': 'f64', 'f2': 'f16', 'i1': 'i8', 'u1': 'u8', 'b1': 'u8', 'i2': 'i16',
            'i4': 'i32', 'i8': 'i64'}
_FORMAT = {'f': 'f32', 'd': 'f64', 'e': 'f16', 'b': 'i8', 'B': 'u8', 'c': 'u8', '?': 'u8',
           'h': 'i16', 'i': 'i32', 'l': 'i64', 'q': 'i64'}


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
    """The library's view of an object, which must outlive it. The view may be all that holds memory which the object gave away
    (DLPack), so the caller keeps it until calls with its address have returned.

    Args:
        obj: a torch.Tensor, what has __array_interface__ or __dlpack__, or a contiguous buffer.
        what: its name in errors.
        dtype: of raw bytes ("bf16").
        writes: the library will write to it.

    Returns:
        The view.

    Raises:
        ValueError: a type, device or dtype that the library does not know; a read-only buffer; read-only memory that would be
            written.
    """
    if isinstance(obj, s.Tensor):
        return obj
    if hasattr(obj, 'data_ptr') and hasattr(obj, 'stride'):
        return from_torch(obj, what)
    if hasattr(obj, '__array_interface__'):
        return _from_interface(obj.__array_interface__, what, writes)
    if hasattr(obj, '__dlpack__'):
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
