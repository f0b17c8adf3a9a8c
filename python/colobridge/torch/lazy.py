# SPDX-License-Identifier: Apache-2.0
"""PyTorch, which is imported when something of it is used first, so that importing this package needs none."""
import importlib
import sys
from typing import Any


def _later(name: str) -> Any:
    class Module:
        """Stands for a module until its first use, and then gives its name to it in each module of this package: a
        name costs 5 ns in a module, and 50 here."""

        def __getattr__(self, attribute: str) -> Any:
            module = importlib.import_module(name)
            for of in [vars(of) for at, of in sys.modules.copy().items() if at.startswith('colobridge')]:
                of.update([(at, module) for at, value in list(of.items()) if value is self])
            return getattr(module, attribute)
    return Module()


torch, dist = _later('torch'), _later('torch.distributed')
