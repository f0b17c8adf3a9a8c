# SPDX-License-Identifier: Apache-2.0
import os
import sys
from pathlib import Path

import pytest

# A copy with a mutant, or this one.
PACKAGE = Path(os.environ.get('COLO_PACKAGE') or Path(__file__).resolve().parents[1])
sys.path.insert(0, str(PACKAGE))
# Ranks are processes of this file's tests: they find the package, too.
os.environ['PYTHONPATH'] = os.pathsep.join(
    [str(PACKAGE), str(Path(__file__).parent)] + [p for p in [os.environ.get('PYTHONPATH')] if p])
os.environ.setdefault('OMP_NUM_THREADS', '1')
# Debian 13's PyTorch is built without libuv, which its own stores want unless told otherwise.
os.environ.setdefault('USE_LIBUV', '0')
if 'COLOBRIDGE_LIBRARY' not in os.environ and (PACKAGE.parent / 'build/src').is_dir():
    os.environ['COLOBRIDGE_LIBRARY'] = str(PACKAGE.parent / 'build/src')


def pytest_collection_finish():
    if 'torch' in sys.modules: # else no test has ranks
        import world
        world.ready()


def ranks(size):
    from world import World  # imports torch
    made = World(size)
    yield made
    made.close()


@pytest.fixture(scope='module')
def world():
    """Four ranks; a file that wants others than these or a pair has its own."""
    yield from ranks(4)


@pytest.fixture(scope='module')
def pair():
    yield from ranks(2)
