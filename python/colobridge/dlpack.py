# SPDX-License-Identifier: Apache-2.0
"""DLPack in and out, without a copy: legacy ("dltensor") and versioned ("dltensor_versioned") capsules.

In: from_dlpack(x).view is the library's view of any tensor. Out: Array(view, owner) is something
that torch.from_dlpack(), numpy.from_dlpack() and others take. C programs have <colobridge/dlpack.h>.
"""
import ctypes as c
from collections.abc import Callable
from typing import Any

from . import _structs as s
from .errors import ArgumentError
from .tensor import check_signs, contiguous, make

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY = 1
# (code, bits) of DLDataType; 6 is bool, a byte here
_DTYPES = {(2, 32): 'f32', (2, 64): 'f64', (4, 16): 'bf16', (2, 16): 'f16', (0, 8): 'i8',
           (1, 8): 'u8', (0, 16): 'i16', (0, 32): 'i32', (0, 64): 'i64', (6, 8): 'u8'}
_CODES = {name: code for code, name in reversed(list(_DTYPES.items()))}


class _Tensor(c.Structure):
    _fields_ = [('data', c.c_void_p), ('device_type', c.c_int32), ('device_id', c.c_int32),
                ('ndim', c.c_int32), ('code', c.c_uint8), ('bits', c.c_uint8),
                ('lanes', c.c_uint16), ('shape', c.POINTER(c.c_int64)),
                ('strides', c.POINTER(c.c_int64)), ('byte_offset', c.c_uint64)]


_Deleter = c.CFUNCTYPE(None, c.c_void_p)


class _Legacy(c.Structure):
    _fields_ = [('tensor', _Tensor), ('context', c.c_void_p), ('deleter', _Deleter)]


class _Versioned(c.Structure):
    _fields_ = [('major', c.c_uint32), ('minor', c.c_uint32), ('context', c.c_void_p),
                ('deleter', _Deleter), ('flags', c.c_uint64), ('tensor', _Tensor)]


_KINDS = {b'dltensor': _Legacy, b'dltensor_versioned': _Versioned}
_USED = {b'dltensor': b'used_dltensor', b'dltensor_versioned': b'used_dltensor_versioned'}
# Capsules are addresses here, also those that are being destroyed, of which none takes a reference.
_py = c.PyDLL(None)
_py.PyCapsule_GetName.restype, _py.PyCapsule_GetName.argtypes = c.c_char_p, [c.c_void_p]
_py.PyCapsule_GetPointer.restype, _py.PyCapsule_GetPointer.argtypes = c.c_void_p, [c.c_void_p, c.c_char_p]
_py.PyCapsule_SetName.restype, _py.PyCapsule_SetName.argtypes = c.c_int, [c.c_void_p, c.c_char_p]
_CapsuleEnd = c.CFUNCTYPE(None, c.c_void_p)
_py.PyCapsule_New.restype = c.py_object
_py.PyCapsule_New.argtypes = [c.c_void_p, c.c_char_p, _CapsuleEnd]


class Borrowed:
    """A tensor of another library, held until release().

    Args:
        capsule: of DLPack, named "dltensor" or "dltensor_versioned"; each is taken once.

    Attributes:
        view: the library's view of it.
        read_only: whether its maker says so.

    Raises:
        ValueError: a device or dtype unknown here.
    """

    def __init__(self, capsule: Any):
        name = _py.PyCapsule_GetName(id(capsule)) if type(capsule).__name__ == 'PyCapsule' else None
        if name not in _KINDS:
            raise ArgumentError("from_dlpack: a capsule named %r, expected 'dltensor' or "
                                "'dltensor_versioned'; each is taken once" % (name and name.decode()))
        managed = _KINDS[name].from_address(_py.PyCapsule_GetPointer(id(capsule), name))
        if isinstance(managed, _Versioned):
            if managed.major != 1:
                raise ArgumentError("from_dlpack: DLPack %d.%d, expected 1.x"
                                    % (managed.major, managed.minor))
        self.view = _view(managed.tensor)
        self.read_only = bool(isinstance(managed, _Versioned) and managed.flags & _READ_ONLY)
        _py.PyCapsule_SetName(id(capsule), _USED[name])
        self._managed: Any = managed

    def release(self) -> None:
        """Give it back; the second time does nothing."""
        managed, self._managed = self._managed, None
        if managed is not None and managed.deleter:
            managed.deleter(c.addressof(managed))

    def __del__(self) -> None:
        if getattr(self, '_managed', None) is not None:
            self.release()


def _view(t: _Tensor) -> s.Tensor:
    name = _DTYPES.get((t.code, t.bits))
    if name is None or t.lanes != 1:
        raise ArgumentError("from_dlpack: type code %d of %d bits and %d lanes, expected one of %s"
                            % (t.code, t.bits, t.lanes, ', '.join(s.DTYPES)))
    if t.device_type in (_CPU, _CUDA_HOST):
        mem, device = s.MEM_HOST, -1
    elif t.device_type in (_CUDA, _CUDA_MANAGED):
        mem, device = s.MEM_CUDA, t.device_id
    else:
        raise ArgumentError("from_dlpack: device type %d, expected CPU or CUDA" % t.device_type)
    shape = t.shape[:t.ndim]
    strides = t.strides[:t.ndim] if t.strides else contiguous(shape)
    return make((t.data or 0) + t.byte_offset, s.DTYPE[name], shape, strides, mem, device)


def from_dlpack(obj: Any) -> Borrowed:
    """Borrow a tensor from an object with __dlpack__ or from a capsule; versioned if its maker can. CUDA: ordered after the
    maker's stream by the caller.

    Args:
        obj: the object, or the capsule.

    Returns:
        The tensor, held until its release().

    Raises:
        ValueError: device or dtype unknown here.
    """
    if not hasattr(obj, '__dlpack__'):
        return Borrowed(obj)
    if hasattr(obj, 'is_neg'):  # which torch leaves out
        check_signs(obj, 'from_dlpack: the tensor')
    try:
        return Borrowed(obj.__dlpack__(max_version=(1, 1)))
    except TypeError:  # made before versions
        return Borrowed(obj.__dlpack__())


_given: dict[int, Any] = {}  # address of what was given away: all it needs, until its deleter runs


# Tensors may go when the interpreter does, after this module's names: nothing here is looked up in it.
def _take_back(address: int, given: dict[int, Any] = _given) -> None:
    end = getattr(given.pop(address, None), '_end', None)
    if end is not None:
        end()


def _capsule_end(capsule: int, kinds: Any = tuple(_KINDS), py: Any = _py,
                 take_back: Any = _take_back) -> None:
    """A capsule that no consumer took still owns its tensor."""
    name = py.PyCapsule_GetName(capsule)
    if name in kinds:
        take_back(py.PyCapsule_GetPointer(capsule, name))


_take_back_c, _capsule_end_c = _Deleter(_take_back), _CapsuleEnd(_capsule_end)
for _kept in (_take_back_c, _capsule_end_c):
    c.pythonapi.Py_IncRef(c.py_object(_kept))  # never freed


def _managed(name: bytes, v: s.Tensor, device: tuple[int, int]) -> tuple[Any, Any]:
    """What a capsule of that name points to, and what that points to."""
    shape, strides = (c.c_int64 * 8)(*v.shape), (c.c_int64 * 8)(*v.stride)
    code, bits = _CODES[s.DTYPES[v.dtype]]
    managed = _KINDS[name](deleter=_take_back_c)
    managed.tensor = _Tensor(v.data, device[0], device[1], v.ndim, code, bits, 1,
                             c.cast(shape, c.POINTER(c.c_int64)),
                             c.cast(strides, c.POINTER(c.c_int64)), 0)
    if isinstance(managed, _Versioned):
        managed.major, managed.minor = 1, 0
    return managed, (shape, strides)


class Array:
    """A view that other libraries can take through DLPack.

    Args:
        view: of the memory.
        owner: kept alive as long as they hold it.
    """

    def __init__(self, view: s.Tensor, owner: Any = None):
        self.view, self.owner = view, owner

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0) if self.view.mem == s.MEM_HOST else (_CUDA, self.view.device)

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError('this array is given as it is: no copy, no other device')
        name = b'dltensor' if max_version is None or max_version[0] < 1 else b'dltensor_versioned'
        managed, parts = _managed(name, self.view, self.__dlpack_device__())
        address = c.addressof(managed)
        _given[address] = (managed, parts, self.owner, self.view)
        return _py.PyCapsule_New(address, name, _capsule_end_c)


class Loan:
    """A view that is given away again and again, to one at a time; cheaper than an Array for each."""

    def __init__(self, view: s.Tensor):
        array = Array(view)
        self._held, self._parts = _managed(b'dltensor', view, array.__dlpack_device__())
        self._address = c.addressof(self._held)
        self._back: Callable[['Loan'], None] | None = None

    def give(self, back: Callable[['Loan'], None]) -> Any:
        """A capsule; back(self) is called when its last consumer has released it."""
        self._back = back
        _given[self._address] = self
        return _py.PyCapsule_New(self._address, b'dltensor', _capsule_end_c)

    def _end(self) -> None:
        back, self._back = self._back, None
        if back is not None:
            back(self)
