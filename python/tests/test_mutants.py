# SPDX-License-Identifier: Apache-2.0
"""Mutants: a copy of the package with one bug in it must be killed by the tests that its row names."""
import shutil
from pathlib import Path

import pytest

from forked import pytest_in_fork
from mutants import MUTANTS

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize('name', list(MUTANTS))
def test_a_mutated_bug_is_seen(name, tmp_path):
    pytest.importorskip('torch')
    path, old, new, file, test = MUTANTS[name]
    shutil.copytree(HERE.parent / 'colobridge', tmp_path / 'colobridge',
                    ignore=shutil.ignore_patterns('__pycache__'))
    bugged = tmp_path / 'colobridge' / path
    text = bugged.read_text()
    assert text.count(old) == 1, 'say where the bug goes now: %s has it %d times' % (path, text.count(old))
    bugged.write_text(text.replace(old, new))
    # The ranks of a refusal that stays where it is wait until their deadline.
    patience = {'COLO_TIMEOUT_MS': '4000'} if \
        any(words in old for words in ('groups.refuse', 'groups.told', 'ERR_ARG', 'anchor', 'tell(why', '_sums if', 'nbytes > old')) else {}
    status = pytest_in_fork(tmp_path / 'log', tmp_path,
                            ['-q', '-x', '-p', 'no:cacheprovider', str(HERE / file), '-k', test], **patience)
    said = (tmp_path / 'log').read_text()
    assert status == 1 and ' failed' in said, said


def test_without_a_bug_nothing_is_seen(tmp_path):
    pytest.importorskip('torch')
    shutil.copytree(HERE.parent / 'colobridge', tmp_path / 'colobridge')
    status = pytest_in_fork(tmp_path / 'log', tmp_path, ['-q', '-p', 'no:cacheprovider',
                                                         str(HERE / 'test_compat.py'), '-k', 'context_parallel'])
    said = (tmp_path / 'log').read_text()
    assert status == 0 and ' passed' in said, said
