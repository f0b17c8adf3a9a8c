# SPDX-License-Identifier: Apache-2.0
"""colobridge: an encoder and an LLM on the same ranks under different layouts.

This package is the C library by ctypes; it needs neither torch nor numpy. With PyTorch:
colobridge.torch (autograd functions), colobridge.megatron (HyperCommGrid,
ColocatedBridgeCommunicator), colobridge.compat (vocabulary-parallel losses under their usual names).
docs/guides/pytorch.md says what to change in a program that has those.
"""
from ._lib import version as library_version
from ._structs import VERSION as __version__
from .bridge import Batch, Bridge
from .comm import Comm, run_threads
from .errors import (ArgumentError, DeadlineError, Error, FailedError, MismatchError, NamingError)
from .grid import Grid, Group
from .layout import Layout, Owned
from .memory import Memory
from .packing import Packing
from .partition import Partition, padded
from .plan import Plan, collective_check
from .segments import Segments, balance

__all__ = ['ArgumentError', 'Batch', 'Bridge', 'Comm', 'DeadlineError', 'Error', 'FailedError', 'Grid', 'Group',
           'Layout', 'Memory', 'MismatchError', 'NamingError', 'Owned', 'Packing', 'Partition', 'Plan', 'Segments',
           '__version__', 'balance', 'collective_check', 'library_version', 'padded', 'run_threads']
