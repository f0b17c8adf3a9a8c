# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libcolobridge.so, declares its functions, turns statuses into exceptions.

Where it looks, the first that is there: COLOBRIDGE_LIBRARY (a file, or a folder that has it); next to
this package; where `meson install` put it (_installed.py, written then); pkg-config; the loader's own
search. A library of another version is refused, because structs may differ. Nothing is loaded
before the first call that needs it, so importing never fails for want of a library.

Calls release the GIL (ctypes.CDLL), so ranks that are threads can wait for each other.
"""
from __future__ import annotations

import ctypes as c
import importlib.resources
import os
import subprocess
import threading
from typing import Any

from . import _structs as s
from ._version import VERSION
from .errors import Error, FailedError, exception

SONAME = 'libcolobridge.so.0'
P, I32, I64, SIZE, CHARS, BOOL = c.c_void_p, c.c_int32, c.c_int64, c.c_size_t, c.c_char_p, c.c_bool
STATUS = c.c_int
_p = c.POINTER

# name: (returns, arguments). Handles are void pointers; tests/test_abi.py counts the arguments.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    'colo_status_string': (CHARS, [c.c_int]),
    'colo_status_name': (CHARS, [c.c_int]),
    'colo_last_error': (CHARS, []),
    'colo_version': (CHARS, []),
    'colo_version_number': (c.c_uint32, []),
    'colo_env_check': (STATUS, [CHARS]),
    'colo_env_value': (CHARS, [CHARS, _p(BOOL)]),
    'colo_dtype_size': (SIZE, [c.c_int]),
    'colo_dtype_name': (CHARS, [c.c_int]),
    'colo_tensor_check': (STATUS, [_p(s.Tensor), CHARS]),
    'colo_grid_init': (STATUS, [_p(s.Grid), _p(s.Dim), I32, I64, I64]),
    'colo_grid_parse_n': (STATUS, [_p(s.Grid), CHARS, SIZE, I64]),
    'colo_grid_print': (SIZE, [_p(s.Grid), CHARS, SIZE]),
    'colo_grid_hash': (c.c_uint64, [_p(s.Grid)]),
    'colo_grid_equal': (BOOL, [_p(s.Grid), _p(s.Grid)]),
    'colo_grid_coords': (STATUS, [_p(s.Grid), I64, _p(I64)]),
    'colo_grid_rank': (STATUS, [_p(s.Grid), _p(I64), _p(I64)]),
    'colo_grid_group': (STATUS, [_p(s.Grid), CHARS, I64, _p(s.Group)]),
    'colo_grid_group_as_given': (STATUS, [_p(s.Grid), CHARS, I64, _p(s.Group)]),
    'colo_grid_group_at': (STATUS, [_p(s.Grid), CHARS, I64, _p(s.Group)]),
    'colo_grid_key': (STATUS, [_p(s.Grid), CHARS, CHARS]),
    'colo_group_member': (I64, [_p(s.Group), I64]),
    'colo_comm_threads_run': (STATUS, [I32, s.RankFn, P]),
    'colo_comm_create_self': (STATUS, [_p(P)]),
    'colo_comm_create_bootstrap': (STATUS, [_p(s.Bootstrap), _p(P)]),
    'colo_comm_create_nccl': (STATUS, [P, I32, _p(P)]),
    'colo_comm_split': (STATUS, [P, _p(s.Grid), CHARS, _p(P)]),
    'colo_comm_split_color': (STATUS, [P, I64, I64, _p(P)]),
    'colo_comm_destroy': (None, [_p(P)]),
    'colo_comm_rank': (I32, [P]),
    'colo_comm_size': (I32, [P]),
    'colo_comm_world_rank': (I64, [P, I32]),
    'colo_comm_find': (I32, [P, I64]),
    'colo_comm_node': (I32, [P, I32]),
    'colo_comm_nodes': (I32, [P]),
    'colo_comm_set_world_ranks': (STATUS, [P, _p(I64)]),
    'colo_comm_backend': (CHARS, [P]),
    'colo_comm_set_name': (None, [P, CHARS]),
    'colo_comm_name': (CHARS, [P]),
    'colo_comm_set_timeout': (STATUS, [P, I64]),
    'colo_comm_set_check': (STATUS, [P, I32]),
    'colo_comm_check_level': (I32, [P]),
    'colo_comm_all_gather': (STATUS, [P, P, P, I64, c.c_int, P]),
    'colo_comm_all_reduce': (STATUS, [P, P, P, I64, c.c_int, c.c_int, P]),
    'colo_comm_reduce_scatter': (STATUS, [P, P, P, I64, c.c_int, c.c_int, P]),
    'colo_comm_broadcast': (STATUS, [P, P, I64, c.c_int, I32, P]),
    'colo_comm_barrier': (STATUS, [P, P]),
    'colo_comm_abort': (None, [P, CHARS]),
    'colo_comm_check': (STATUS, [P]),
    'colo_comm_stats': (None, [P, _p(s.Stats)]),
    'colo_comm_stats_reset': (None, [P]),
    'colo_comm_dump': (SIZE, [P, CHARS, SIZE]),
    'colo_comm_flight_record': (STATUS, [P, CHARS]),
    'colo_layout_init': (STATUS, [_p(s.Layout), _p(s.Grid)]),
    'colo_layout_init_src_extra': (STATUS, [_p(s.Layout), _p(s.Grid), c.c_char_p]),
    'colo_layout_init_dst_extra': (STATUS, [_p(s.Layout), _p(s.Grid), c.c_char_p]),
    'colo_layout_split': (STATUS, [_p(s.Layout), c.c_int, CHARS, c.c_int]),
    'colo_layout_split_context': (STATUS, [_p(s.Layout), CHARS, c.c_int]),
    'colo_layout_clear': (None, [_p(s.Layout), c.c_int]),
    'colo_layout_map_offset': (STATUS, [_p(s.Layout), I64, I64]),
    'colo_layout_map_table': (STATUS, [_p(s.Layout), _p(I64), I64, I64]),
    'colo_layout_stage': (STATUS, [_p(s.Layout), CHARS, I64]),
    'colo_layout_check': (STATUS, [_p(s.Layout), I64, I64, I64]),
    'colo_layout_holds': (BOOL, [_p(s.Layout), I64]),
    'colo_layout_owned': (STATUS, [_p(s.Layout), I64, _p(s.Shape), BOOL, _p(s.Owned),
                                   _p(s.Run), I64, _p(I64)]),
    'colo_layout_hash': (c.c_uint64, [_p(s.Layout)]),
    'colo_nodes_create': (STATUS, [_p(P), _p(I32), I64]),
    'colo_nodes_destroy': (None, [_p(P)]),
    'colo_plan_create': (STATUS, [_p(P), _p(s.PlanConfig), I64]),
    'colo_plan_destroy': (None, [_p(P)]),
    'colo_plan_rank': (I64, [P]),
    'colo_plan_sends': (_p(s.PlanMessage), [P, c.c_int, _p(I32)]),
    'colo_plan_recvs': (_p(s.PlanMessage), [P, c.c_int, _p(I32)]),
    'colo_plan_locals': (_p(s.Region), [P, c.c_int, _p(I64)]),
    'colo_plan_bytes': (s.PlanBytes, [P, c.c_int]),
    'colo_plan_addends': (I64, [P]),
    'colo_plan_direction': (c.c_int, [P]),
    'colo_plan_scale': (I64, [P]),
    'colo_plan_hash': (c.c_uint64, [P]),
    'colo_plan_collective_check': (STATUS, [_p(s.PlanConfig)]),
    'colo_bridge_create': (STATUS, [_p(P), _p(s.BridgeConfig), P]),
    'colo_bridge_destroy': (None, [_p(P)]),
    'colo_bridge_forward': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), P]),
    'colo_bridge_backward': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), P]),
    'colo_bridge_reshape': (STATUS, [P, _p(s.Shape)]),
    'colo_bridge_src_shape': (I32, [P, _p(I64)]),
    'colo_bridge_dst_shape': (I32, [P, _p(I64)]),
    'colo_bridge_plan': (P, [P]),
    'colo_bridge_workspace_size': (SIZE, [P]),
    'colo_segments_check': (STATUS, [_p(s.Segments), _p(s.Layout), _p(s.Layout)]),
    'colo_segments_gather': (STATUS, [_p(_p(s.Segments)), _p(s.Segments), P]),
    'colo_segments_free': (None, [_p(_p(s.Segments))]),
    'colo_balance': (STATUS, [P, P, I64, I64, P, c.c_double]),
    'colo_bridge_set_segments': (STATUS, [P, _p(s.Segments), _p(P)]),
    'colo_packing_rows': (STATUS, [_p(s.Packing), _p(s.Layout), I64, _p(I64)]),
    'colo_packing_index': (STATUS, [_p(s.Packing), _p(s.Layout), I64, _p(I64)]),
    'colo_bridge_set_packing': (STATUS, [P, _p(s.Packing), _p(s.Packing), _p(P)]),
    'colo_bridge_rows': (None, [P, _p(I64), _p(I64)]),
    'colo_batch_forward': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), I32, P]),
    'colo_batch_backward': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), I32, P]),
    'colo_bridge_forward_start': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), P, _p(P)]),
    'colo_bridge_backward_start': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), P, _p(P)]),
    'colo_batch_forward_start': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), I32, P, _p(P)]),
    'colo_batch_backward_start': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), I32, P, _p(P)]),
    'colo_bridge_finish': (STATUS, [_p(P), P]),
    'colo_batch_plan': (P, [P]),
    'colo_batch_runs': (I64, [P, _p(s.Run), I64]),
    'colo_batch_destroy': (None, [_p(P)]),
    'colo_memory_register': (STATUS, [P, P, SIZE, _p(P)]),
    'colo_memory_alloc': (STATUS, [P, SIZE, _p(P)]),
    'colo_memory_destroy': (None, [_p(P)]),
    'colo_memory_data': (P, [P]),
    'colo_memory_bytes': (SIZE, [P]),
    'colo_memory_is_p2p': (BOOL, [P]),
    'colo_memory_find': (BOOL, [P, P, SIZE]),
    'colo_memory_reaches': (BOOL, [P, I32, I32]),
    'colo_partition_check': (STATUS, [_p(s.Partition)]),
    'colo_partition_count': (I64, [_p(s.Partition)]),
    'colo_partition_index': (I64, [_p(s.Partition), I64]),
    'colo_partition_shard': (STATUS, [_p(s.Partition), _p(s.Tensor), I32, _p(s.Tensor), P]),
    'colo_partition_unshard': (STATUS, [_p(s.Partition), _p(s.Tensor), I32, _p(s.Tensor), P]),
    'colo_partition_next_token': (STATUS, [_p(s.Partition), _p(s.Tensor), I64, _p(s.Tensor), P]),
    'colo_partition_padded': (STATUS, [I64, I64, I64, BOOL, _p(I64)]),
    'colo_logprob_config_check': (STATUS, [_p(s.LogprobConfig)]),
    'colo_logprob_saved_size': (STATUS, [_p(s.LogprobConfig), c.c_int, I64, _p(SIZE)]),
    'colo_logprob_workspace_size': (STATUS, [_p(s.LogprobConfig), c.c_int, I64, I32, _p(SIZE)]),
    'colo_logprob_forward': (STATUS, [_p(s.LogprobConfig), _p(s.LogprobBatch), P,
                                      _p(s.LogprobOut), _p(s.LogprobSaved), P, P, P]),
    'colo_logprob_backward': (STATUS, [_p(s.LogprobSaved), _p(s.LogprobUpstream), _p(s.Tensor),
                                       P]),
    'colo_topk_config_check': (STATUS, [_p(s.TopkConfig)]),
    'colo_topk_saved_size': (STATUS, [_p(s.TopkConfig), I64, _p(SIZE)]),
    'colo_topk_workspace_size': (STATUS, [_p(s.TopkConfig), c.c_int, I64, I32, _p(SIZE)]),
    'colo_topk_forward': (STATUS, [_p(s.TopkConfig), _p(s.TopkBatch), P, _p(s.TopkOut), _p(s.TopkSaved),
                                   P, P, P]),
    'colo_topk_backward': (STATUS, [_p(s.TopkSaved), _p(s.TopkUpstream), _p(s.Tensor), P]),
    'colo_sampling_config_check': (STATUS, [_p(s.SamplingConfig)]),
    'colo_sampling_workspace_size': (STATUS, [_p(s.SamplingConfig), c.c_int, I64, I32, _p(SIZE)]),
    'colo_sampling_keep': (STATUS, [_p(s.SamplingConfig), _p(s.Tensor), _p(s.Tensor), P, P, P]),
    'colo_distill_config_check': (STATUS, [_p(s.DistillConfig)]),
    'colo_distill_saved_size': (STATUS, [_p(s.DistillConfig), I64, _p(SIZE)]),
    'colo_distill_workspace_size': (STATUS, [_p(s.DistillConfig), c.c_int, I64, I32, _p(SIZE)]),
    'colo_distill_forward': (STATUS, [_p(s.DistillConfig), _p(s.DistillBatch), P, _p(s.DistillOut),
                                      _p(s.DistillSaved), P, P, P]),
    'colo_distill_backward': (STATUS, [_p(s.DistillSaved), _p(s.DistillUpstream), _p(s.Tensor), P]),
    'colo_sequence_check': (STATUS, [_p(s.Sequence)]),
    'colo_sequence_count': (I64, [_p(s.Sequence)]),
    'colo_sequence_targets': (STATUS, [_p(s.Sequence), _p(s.Tensor), I64, _p(s.Tensor), P]),
    'colo_sequence_mask': (STATUS, [_p(s.Sequence), c.c_int, _p(s.Tensor), P]),
    'colo_sequence_workspace_size': (STATUS, [_p(s.Sequence), c.c_int, _p(SIZE)]),
    'colo_sequence_gather': (STATUS, [_p(s.Sequence), _p(s.Tensor), _p(s.Tensor), P, P, P]),
    'colo_sequence_gather_backward': (STATUS, [_p(s.Sequence), c.c_int, _p(s.Tensor), _p(s.Tensor), P, P,
                                               P]),
    'colo_sequence_pack': (STATUS, [_p(I64), I64, I64, I64, BOOL, _p(I64)]),
    'colo_lm_head_create': (STATUS, [_p(P), _p(s.LmHeadConfig), P]),
    'colo_lm_head_destroy': (None, [_p(P)]),
    'colo_lm_head_rows': (None, [P, _p(I64), _p(I64)]),
    'colo_lm_head_gathered_size': (SIZE, [P]),
    'colo_lm_head_bind': (STATUS, [P, _p(s.Tensor), _p(s.Tensor), P]),
    'colo_linear_logprob_create': (STATUS, [_p(P), _p(s.LinearConfig), P, P]),
    'colo_linear_logprob_destroy': (None, [_p(P)]),
    'colo_linear_logprob_mode': (c.c_int, [P, I64]),
    'colo_linear_logprob_chunk': (I64, [P, I64]),
    'colo_linear_logprob_saved_size': (STATUS, [P, I64, I64, _p(SIZE)]),
    'colo_linear_logprob_workspace_size': (STATUS, [P, c.c_int, I64, I64, _p(SIZE)]),
    'colo_linear_logprob_forward': (STATUS, [P, _p(s.LinearBatch), _p(s.LogprobOut),
                                             _p(s.LinearSaved), P, P, P]),
    'colo_linear_logprob_early': (STATUS, [P, _p(s.LinearBatch), _p(s.LinearUpstream),
                                           _p(s.LogprobOut), _p(s.LinearSaved), P, P, P]),
    'colo_linear_logprob_backward': (STATUS, [P, _p(s.LinearSaved), _p(s.LinearUpstream),
                                              _p(s.LinearGrads), P, P]),
    'colo_linear_logprob_loss': (STATUS, [P, _p(s.LinearBatch), _p(s.LinearUpstream),
                                          _p(s.LogprobOut), _p(s.LinearGrads), P, P]),
    'colo_loss_reduce': (STATUS, [P, c.c_int, P, I64, P, _p(s.Reduced), P]),
    'colo_loss_weighted_workspace_size': (SIZE, [I32]),
    'colo_loss_weighted_sum': (STATUS, [_p(s.Tensor), _p(s.Tensor), _p(s.Tensor), P, P, _p(s.Tensor), P, P]),
    'colo_loss_mean_forward': (STATUS, [_p(s.Tensor), P, BOOL, P, _p(s.LossMean), P, P]),
    'colo_loss_mean_backward': (STATUS, [P, _p(s.LossMeanUpstream), _p(s.Tensor), P]),
}


def _named(path: str) -> str | None:
    """The library's file in a folder, or the file itself."""
    if os.path.isdir(path):
        for name in (SONAME, 'libcolobridge.so'):
            if os.path.exists(os.path.join(path, name)):
                return os.path.join(path, name)
        return None
    return path if os.path.exists(path) else None


def _same_folder() -> str | None:
    """In this package. An editable install has it elsewhere, and its loader knows where."""
    there = importlib.resources.files('colobridge') / SONAME
    return str(there) if there.is_file() else None


def _pkg_config() -> str | None:
    try:
        done = subprocess.run(['pkg-config', '--variable=libdir', 'colobridge'], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return None
    return _named(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def _installed() -> str | None:
    try:
        from ._installed import LIBDIR  # type: ignore[import-not-found]
    except ImportError:
        return None
    return _named(os.path.join(os.path.dirname(__file__), LIBDIR))  # pyright: ignore[reportUnknownArgumentType]


def find() -> str:
    """Path of the library, or its name when only the loader may know. FailedError: none where
    COLOBRIDGE_LIBRARY points."""
    said = os.environ.get('COLOBRIDGE_LIBRARY')
    if said:
        path = _named(said)
        if path is None:
            raise FailedError("COLOBRIDGE_LIBRARY is '%s', where there is no %s" % (said, SONAME))
        return path
    return _same_folder() or _installed() or _pkg_config() or SONAME


def load(path: str) -> c.CDLL:
    """The library at @path with its functions declared. FailedError: not loadable, or of another
    version."""
    try:
        library = c.CDLL(path)
        number = library.colo_version_number
    except (OSError, AttributeError) as why:
        raise FailedError(
            "libcolobridge cannot be loaded (%s). Build and install it, or set COLOBRIDGE_LIBRARY to "
            "%s or its folder" % (why, SONAME)) from None
    number.restype, number.argtypes = c.c_uint32, []
    found = number()
    found = '%d.%d.%d' % (found >> 16, found >> 8 & 255, found & 255)
    if found != VERSION:
        raise FailedError("%s is version %s, this package is %s; install both from one source, or set "
                          "COLOBRIDGE_LIBRARY" % (path, found, VERSION))
    for name, (returns, arguments) in FUNCTIONS.items():
        try:
            fn = getattr(library, name)
        except AttributeError:
            raise FailedError("%s is version %s and has no %s; it is another build, install both from "
                              "one source" % (path, found, name)) from None
        fn.restype, fn.argtypes = returns, arguments
    return library


_library: c.CDLL | None = None
_lock = threading.Lock()


def lib() -> c.CDLL:
    """The library, loaded on first use."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = load(find())
    return _library


def error_message() -> str:
    """The last error message on this thread."""
    return lib().colo_last_error().decode('utf-8', 'replace')


def check(status: int) -> int:
    """@status when it is >= 0, else its exception. Call it on the thread of the call."""
    if status < 0:
        raise exception(status, error_message())
    return status


def call(name: str, *arguments: Any) -> int:
    """Calls a function that returns a status. Raises: the exception of a status < 0."""
    return check(getattr(lib(), name)(*arguments))


def text(value: str) -> bytes:
    """A name or spec as C takes it."""
    if '\0' in value:
        raise ValueError("%r has a NUL byte" % value)
    return value.encode()


class Unique:
    """An object of the library that has no copy: a copy of what holds it holds the same one."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("%s: found one to pickle, expected none: it belongs to this process; make one in each process"
                        % type(self).__name__)


def version() -> str:
    """Version of the loaded library."""
    return lib().colo_version().decode()


__all__ = ['Error', 'call', 'check', 'find', 'lib', 'load', 'error_message', 'text', 'version']
