# SPDX-License-Identifier: Apache-2.0
"""Mutants: a copy of the package with one bug in it must be killed by the tests that its row names."""
import compileall
import gc
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from forked import pytest_in_fork
from mutants import MUTANTS, WAITING

HERE = Path(__file__).resolve().parent
PART, PARTS = map(int, os.environ.get('T_PART', '1 of 1').split(' of '))


@pytest.fixture(scope='module')
def package(tmp_path_factory):
    """A copy of the package that was compiled once, in place of once per mutant."""
    pytest.importorskip('torch')
    # A collection of garbage in a fork would write to each of PyTorch's objects, and copy their pages.
    gc.collect()
    gc.freeze()
    copy = tmp_path_factory.mktemp('package') / 'colobridge'
    shutil.copytree(HERE.parent / 'colobridge', copy, ignore=shutil.ignore_patterns('__pycache__'))
    compileall.compile_dir(copy, quiet=1)
    yield copy
    gc.unfreeze()


@pytest.mark.parametrize('name', list(MUTANTS)[PART - 1::PARTS])
def test_a_mutated_bug_is_seen(name, package, tmp_path):
    path, old, new, file, test = MUTANTS[name]
    shutil.copytree(package, tmp_path / 'colobridge')
    bugged = tmp_path / 'colobridge' / path
    Path(importlib.util.cache_from_source(bugged)).unlink()
    text = bugged.read_text()
    assert text.count(old) == 1, 'say where the bug goes now: %s has it %d times' % (path, text.count(old))
    bugged.write_text(text.replace(old, new))
    # Where ranks wait in vain for one that the bug stopped, the wait is no longer than it need be.
    status = pytest_in_fork(tmp_path / 'log', tmp_path, ['-x', str(HERE / file), '-k', test],
                            COLO_TIMEOUT_MS='2000' if name in WAITING else '20000')
    said = (tmp_path / 'log').read_text()
    if status in (0, 5) and ' skipped' in said and ' passed' not in said:  # 5: a module was
        pytest.skip('%s -k %s is skipped here' % (file, test))
    assert status == 1 and ' failed' in said, said


def test_without_a_bug_nothing_is_seen(package, tmp_path):
    shutil.copytree(package, tmp_path / 'colobridge')
    status = pytest_in_fork(tmp_path / 'log', tmp_path, [str(HERE / 'test_compat.py'), '-k', 'context_parallel'])
    said = (tmp_path / 'log').read_text()
    assert status == 0 and ' passed' in said, said
