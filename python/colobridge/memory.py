# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks reach in each other, for bridges between GPUs of one host; docs/runtime/gpu.md."""
import atexit
import ctypes as c
from typing import Any, cast

from . import _structs as s
from . import comm as comms
from ._lib import Handle, lib, result
from .dlpack import Array
from .errors import ArgumentError
from .tensor import contiguous, make

_stays: list[Any] = []  # what late peers may still write to
_exiting: list[bool] = []  # the process gives everything back itself, and other libraries end before
atexit.register(_exiting.append, True)


class Memory(Handle):
    """Registered over a communicator, by Memory.alloc() or Memory.register(), which are collective and come before the bridges
    that use it; .handle is the colo_memory_t pointer. A bridge's y (d_x in backward; d_y where gradients are summed over cp) in
    such memory is written by other ranks themselves, in one launch; on all ranks or on none."""
    _gone = 'this memory was destroyed'

    def __init__(self, handle: c.c_void_p, comm: comms.Comm, owner: Any = None):
        self._handle, self.comm, self.owner, self._forks = handle, comm, owner, comms._forks
        self._view: s.Tensor | None = None  # holds what the owner gave away

    @classmethod
    def alloc(cls, comm: comms.Comm, nbytes: int) -> 'Memory':
        """The library allocates it where the communicator moves memory: on its GPU, or on the host.

        Args:
            comm: whose ranks reach it.
            nbytes: bytes; sizes may differ between ranks, and be 0.

        Returns:
            The memory.

        Raises:
            RuntimeError: no memory, too much registered, another rank's error; on all ranks or on none.
            TimeoutError: a rank did not come; on all ranks or on none.
        """
        return cls(result(c.c_void_p, 'colo_memory_alloc', comm.handle, nbytes), comm)

    @classmethod
    def register(cls, comm: comms.Comm, tensor: Any) -> 'Memory':
        """A caller's tensor, which is kept alive.

        Args:
            comm: whose ranks reach it.
            tensor: contiguous; None on a rank that brings none. torch's own are such memory, but not with expandable segments
                or cudaMallocAsync.

        Returns:
            The memory.

        Raises:
            ValueError: host memory, another device's, not made by cudaMalloc; on all ranks or on none.
            RuntimeError: as alloc().
            TimeoutError: as alloc().
        """
        t, nbytes = None, 0
        if tensor is not None:
            t, count = comms._flat(tensor, 'tensor', writes=True)
            nbytes = count * s.DTYPE_SIZE[cast(int, t.dtype)]
        memory = cls(result(c.c_void_p, 'colo_memory_register', comm.handle, t.data if t and nbytes else None, nbytes),
                     comm, tensor)
        memory._view = t
        return memory

    def destroy(self) -> None:
        """Local; when every rank's calls that use it have finished. The second time does nothing. It may
        come after the communicator's."""
        if self._handle and self._forks == comms._forks:
            lib().colo_memory_destroy(c.byref(self._handle))
        self._handle = c.c_void_p()

    def __del__(self) -> None:
        if not getattr(self, '_handle', None) or _exiting:
            return
        # After a failure a late peer may still write here: then it stays, until the process ends.
        if self.comm.died or self.comm._handle and lib().colo_comm_check(self.comm.handle) < 0:
            _stays.append(self.owner)
            return
        self.destroy()

    @property
    def data(self) -> int:
        """Address of the memory; 0 if it has none."""
        return lib().colo_memory_data(self.handle) or 0

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return lib().colo_memory_bytes(self.handle)

    @property
    def is_p2p(self) -> bool:
        """Do peers reach it? The same on all ranks. If not, bridges are staged, as without it."""
        return lib().colo_memory_is_p2p(self.handle)

    def array(self, dtype: str, shape: tuple[int, ...], offset: int = 0, *, device: int = -1,
              owner: Any = None) -> Array:
        """A part of it as something that torch.from_dlpack() takes, without a copy.

        Args:
            dtype: as Bridge's.
            shape: in elements.
            offset: in bytes.
            device: ordinal of the GPU that it is on, -1 for host memory.
            owner: what the array keeps alive; None: this object.

        Returns:
            The array.

        Raises:
            ValueError: a dtype that is none; it ends past the memory.
        """
        if dtype not in s.DTYPE:
            raise ArgumentError("dtype is %r, expected one of %s" % (dtype, ', '.join(s.DTYPES)))
        number, need = s.DTYPE[dtype], offset
        need += contiguous((1,) + tuple(shape))[0] * s.DTYPE_SIZE[number] if 0 not in shape else 0
        if offset < 0 or need > self.nbytes:
            raise ArgumentError("%s of %s at byte %d ends at %d, the memory has %d bytes"
                                % (dtype, list(shape), offset, need, self.nbytes))
        raw = make(self.data + offset, number, shape, contiguous(shape),
                   s.MEM_HOST if device < 0 else s.MEM_CUDA, device)
        return Array(raw, self if owner is None else owner)
