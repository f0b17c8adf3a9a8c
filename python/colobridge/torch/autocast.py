# SPDX-License-Identifier: Apache-2.0
"""What torch.autocast() makes of products."""
import contextlib
import functools
from typing import Any

import torch


def autocast(device: str) -> Any:
    """The dtype that autocast computes products in now, None outside of it."""
    enabled, dtype_of = _autocast(device)
    return dtype_of() if enabled() else None


def autocasts(device: Any) -> Any:
    """(type, dtype that products are computed in, None outside of autocast) of @device and of the host"""
    return tuple((kind, autocast(kind)) for kind in dict.fromkeys((device.type, 'cpu')))


@contextlib.contextmanager
def under(casts: Any) -> Any:
    """The autocast that autocasts() found"""
    with contextlib.ExitStack() as stack:
        for kind, dtype in casts:
            if dtype is not autocast(kind):  # which costs more
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        yield


def cast(t: Any, casts: Any) -> Any:
    """A tensor or None as autocast has it in a product on the first device of @casts. autocast itself would keep the copy
    of a parameter, before PyTorch 2.x one without its gradient."""
    dtype = casts[0][1]
    return t if t is None or dtype is None or t.dtype == torch.float64 else t.to(dtype)


@functools.lru_cache(maxsize=None)
def _autocast(device: str) -> tuple[Any, Any]:
    try:
        torch.is_autocast_enabled(device)
        return functools.partial(torch.is_autocast_enabled, device), \
            functools.partial(torch.get_autocast_dtype, device)
    except TypeError:  # before 2.4 the question has no argument
        if device == 'cuda':
            return torch.is_autocast_enabled, torch.get_autocast_gpu_dtype
        return torch.is_autocast_cpu_enabled, torch.get_autocast_cpu_dtype
