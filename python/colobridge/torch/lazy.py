# SPDX-License-Identifier: Apache-2.0
"""PyTorch, which is imported when something of it is used first, so that importing this package needs none."""
from __future__ import annotations

import importlib
from typing import Any


def _later(name: str) -> Any:
    class Module:
        """A module's attributes, also those that are replaced after it was imported."""

        def __getattr__(self, attribute: str) -> Any:
            module = importlib.import_module(name)
            self.__dict__ = module.__dict__
            return getattr(module, attribute)
    return Module()


torch, dist = _later('torch'), _later('torch.distributed')
