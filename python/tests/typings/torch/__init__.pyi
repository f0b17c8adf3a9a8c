# SPDX-License-Identifier: Apache-2.0
# PyTorch as pyright sees it here: everything is Any, whatever version is installed, or none.
from typing import Any

def __getattr__(name: str) -> Any: ...
