# SPDX-License-Identifier: Apache-2.0
"""Host memory that is said to be reached by peers, and a pool in it, for tests of what GPUs do."""
import contextlib
import math

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import colobridge.torch as ct
from colobridge import memory
from colobridge._structs import DTYPES
from colobridge.tensor import torch_dtype
from colobridge.torch import arena
from colobridge.torch.ready import storage_of


class HostPool(arena.Pool):
    """A pool of the host's: a tensor lies in the first gap between those that are alive, or elsewhere."""

    def _block(self):
        self._stream, self._pool, self._places = None, torch.zeros(self.nbytes, dtype=torch.uint8), []
        return self._pool

    def _new(self, like, shape):
        need, offset = arena._padded(math.prod(shape), like.element_size()), 0
        self._places = [p for p in self._places if not p[2].expired()]
        for begin, end, _ in sorted(self._places, key=lambda p: p[0]):
            if offset + need <= begin:
                break
            offset = end
        if offset + need > self.nbytes:
            return like.new_empty(shape)
        t = torch.from_dlpack(self._memory.array(DTYPES[torch_dtype(like.dtype)], tuple(shape), offset, owner=self._pool))
        self._places.append((offset, offset + need, StorageWeakRef(storage_of(t))))
        return t


@contextlib.contextmanager
def pooled():
    """reached(), with pools for tensors of any size."""
    was = arena.Pool, arena._SMALL
    arena.Pool, arena._SMALL = HostPool, 0
    try:
        with reached():
            yield
    finally:
        arena.Pool, arena._SMALL = was


@contextlib.contextmanager
def reached(**options):
    """Bridges are made as between GPUs that reach each other, with @options."""
    was = arena.possible, memory.Memory.is_p2p, ct.Bridge.__init__.__kwdefaults__

    arena.possible = lambda comm, device: comm.size > 1
    memory.Memory.is_p2p = property(lambda self: True)
    ct.Bridge.__init__.__kwdefaults__ = {**was[2], **options}
    try:
        yield
    finally:
        arena.possible, memory.Memory.is_p2p, ct.Bridge.__init__.__kwdefaults__ = was
