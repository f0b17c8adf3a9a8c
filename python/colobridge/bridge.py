# SPDX-License-Identifier: Apache-2.0
"""Carry encoder activations into the LLM's layout, and gradients back; docs/bridge.md."""
from __future__ import annotations

import ctypes as c
from typing import Any

from . import _structs as s
from ._lib import call, lib, text
from .comm import Comm
from .errors import STATUS, FailedError
from .layout import Layout
from .plan import ALGOS, TRANSPORTS, choice, config
from .tensor import view


class Bridge:
    """Plan, communicator, workspace. Collective over @comm, whose world ranks are the grids' ranks.

    shape: (samples, rows, features[, positions of the LLM]), global. axes: "bsh", "sbh", any
    permutation, or "th" (samples and rows flattened). output: "full" or "sharded". grad: "partial"
    (summed over cp) or "disjoint". algo: "exact" or "collective". device: "cpu" or "cuda". transport,
    between GPUs, the same on all ranks: "auto" (as the memory of each call says), "nccl", or "peer" (what
    other ranks reach must be a Memory's); COLO_TRANSPORT goes before it.
    Raises ValueError, KeyError (a peer is not in @comm), MismatchError (on all ranks), RuntimeError,
    TimeoutError.
    """

    def __init__(self, comm: Comm, src: Layout, dst: Layout, shape: tuple[int, ...], *,
                 dtype: str = 'f32', axes: str = 'bsh', output: str = 'full',
                 grad: str = 'partial', algo: str = 'exact', no_grad: bool = False,
                 ranks_per_node: int = 0, device: str = 'cpu', transport: str = 'auto'):
        self._src, self._dst, self.comm = src, dst, comm
        raw = config(s.BridgeConfig, src, dst, shape, dtype, output, grad, no_grad, ranks_per_node)
        self._tables = src._table, dst._table  # borrowed; a layout may get another one
        raw.axes = text(axes)
        raw.algo = choice('algo', algo, ALGOS)
        raw.mem = choice('device', device, {'cpu': s.HOST, 'cuda': s.CUDA})
        raw.transport = choice('transport', transport, TRANSPORTS)
        self._handle = c.c_void_p()
        call('colo_bridge_create', c.byref(self._handle), raw, comm.handle)
        comm.serves(self._handle, 'colo_bridge_destroy')

    def destroy(self) -> None:
        """Local; the second time does nothing."""
        if self._handle:
            self.comm.ends(self._handle, 'colo_bridge_destroy')

    def __del__(self) -> None:
        if getattr(self, '_handle', None):
            self.destroy()

    @property
    def handle(self) -> c.c_void_p:
        """The colo_bridge_t pointer. RuntimeError after destroy(), its own or its communicator's."""
        if not self._handle:
            raise FailedError('this bridge was destroyed, or its communicator', STATUS['ERR_STATE'])
        return self._handle

    def forward(self, x: Any, y: Any, stream: int | None = None) -> None:
        """y = x under the destination's layout. x None on ranks that own nothing of the source."""
        call('colo_bridge_forward', self.handle, _arg(x, 'x'), _arg(y, 'y', True), stream)

    def backward(self, d_y: Any, d_x: Any, stream: int | None = None) -> None:
        """d_x = the gradient of x from the gradient of y, which is not written."""
        call('colo_bridge_backward', self.handle, _arg(d_y, 'd_y'), _arg(d_x, 'd_x', True), stream)

    def reshape(self, shape: tuple[int, ...]) -> None:
        """Another batch, length or width from now on; local, all ranks must do the same."""
        call('colo_bridge_reshape', self.handle, s.Shape(*shape))

    @property
    def src_shape(self) -> tuple[int, ...]:
        """Extents of this rank's x."""
        return self._shape('colo_bridge_src_shape')

    @property
    def dst_shape(self) -> tuple[int, ...]:
        """Extents of this rank's y."""
        return self._shape('colo_bridge_dst_shape')

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = (s.i64 * 3)()
        return tuple(shape[:getattr(lib(), name)(self.handle, shape)])

    workspace_size = property(lambda self: lib().colo_bridge_workspace_size(self.handle))


def _arg(t: Any, what: str, writes: bool = False) -> s.Tensor | None:
    return None if t is None else view(t, what, writes=writes)
