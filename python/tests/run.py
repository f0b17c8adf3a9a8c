# SPDX-License-Identifier: Apache-2.0
"""Runs one file of these tests under pytest and says what happened in the words that
tools/count-tests.py counts: every pytest case is a case, what was left out is one, by name.

usage: run.py TEST-FILE

Which Python: the first of $COLO_PYTHON, python3 and /usr/bin/python3 that is 3.11 or later and has
pytest and torch, else the first with pytest. None: exit 77, a skip.
"""
import os
import subprocess
import sys

PROBE = '''
import importlib.util as u, sys
if sys.version_info < (3, 11) or not u.find_spec("pytest"):
    print("no")
else:
    print("torch" if u.find_spec("torch") else "pytest")
'''


def interpreter():
    found = {}
    for python in filter(None, (os.environ.get('COLO_PYTHON'), 'python3', '/usr/bin/python3')):
        try:
            done = subprocess.run([python, '-c', PROBE], text=True, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        except OSError:
            continue
        found.setdefault(done.stdout.strip(), python)
    return found.get('torch') or found.get('pytest')


class Cases:
    """A pytest plugin: prints cases as they end."""

    def __init__(self):
        self.state, self.outside = {}, 0

    def pytest_addoption(self, parser):
        # What the terminal plugin, which is off, would declare, and asserts ask for to show values.
        parser.addoption('--verbose', type=int, default=1)

    def pytest_configure(self, config):
        # That plugin's writer, which pytest 8 asks how to show them.
        from _pytest._io import TerminalWriter
        config.get_terminal_writer = TerminalWriter

    def say(self, kind, name):
        print('[ RUN      ] %s\n[%s] %s' % (name, kind, name), flush=True)

    def pytest_collection_modifyitems(self, items):
        print('[==========] Running %d test(s)' % len(items), flush=True)

    def pytest_collectreport(self, report):
        if report.outcome != 'passed': # a module that was left out, or could not be imported
            print('[==========] Running 1 test(s)')
            if report.failed:
                print(report.longrepr)
            self.say('  SKIPPED ' if report.skipped else '  FAILED  ', self.why(report))

    @staticmethod
    def why(report):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ''
        return ('%s: %s' % (report.nodeid, reason)).replace('\n', ' ').strip(': ')

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition('::')[2]
        if report.failed:
            print(report.longreprtext)
            for title, text in report.sections:
                print('-- %s\n%s' % (title, text))
        if report.when == 'setup' and report.outcome == 'passed':
            return
        if report.when == 'call' or report.outcome != 'passed':
            worst = self.state.get(name)
            if worst == 'failed':
                return
            self.state[name] = report.outcome
        if report.when == 'teardown' or report.skipped:
            outcome = self.state.pop(name, None)
            if outcome == 'skipped':
                self.say('  SKIPPED ', self.why(report).partition('::')[2] or name)
            elif outcome:
                self.say('       OK ' if outcome == 'passed' else '  FAILED  ', name)


def main(path):
    if os.environ.get('COLO_TESTS_CHILD'):
        import pytest
        # 5: nothing collected, because the module was left out as a whole
        code = pytest.main(['-p', 'no:cacheprovider', '-p', 'no:terminal', path], plugins=[Cases()])
        sys.exit(0 if code == 5 else int(code))
    python = interpreter()
    if python is None:
        print('no Python >= 3.11 with pytest here')
        sys.exit(77)
    os.environ['COLO_TESTS_CHILD'] = '1'
    os.environ['PYTHONDONTWRITEBYTECODE'] = '1'
    os.execvp(python, [python, os.path.abspath(__file__), os.path.abspath(path)])


main(sys.argv[1])
