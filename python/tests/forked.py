# SPDX-License-Identifier: Apache-2.0
"""pytest in a fork of this process."""
import os
import sys
import traceback

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook


def pytest_in_fork(log, package, arguments, **environment):
    """The exit status of pytest on a copy of the package, in a fork of this process, which has imported
    PyTorch: a new one would spend most of its time on that. Asserts are not rewritten to show values: that takes
    longer than most of the tests do, and some values are tensors of a million elements."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(out, 1), os.dup2(out, 2)
            sys.stdout = sys.stderr = open(1, 'w', buffering=1, closefd=False)
            os.environ.update(environment, COLO_PACKAGE=str(package))
            os.environ.pop('COLO_TESTS_CHILD', None)
            for module in [m for m in sys.modules if m.partition('.')[0] in ('colobridge', 'conftest', 'world')
                           or m.startswith('test_')]:
                del sys.modules[module]
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AssertionRewritingHook)]
            status = int(pytest.main(['-q', '-p', 'no:cacheprovider', '--assert=plain', *arguments]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
