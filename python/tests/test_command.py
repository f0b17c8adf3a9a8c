# SPDX-License-Identifier: Apache-2.0
"""The command colobridge: which program it becomes, and where that lies. Most cases have programs of their own, shell
scripts that say what they got; tools/wheel.sh runs the real ones from a wheel."""
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from colobridge import _lib
from colobridge.__main__ import HELP, program
from colobridge._structs import VERSION

COMMANDS = ['check', 'plan', 'info', 'perf', 'flight']


def command(*arguments, **env):
    return subprocess.run([sys.executable, '-m', 'colobridge', *arguments], env=dict(os.environ, **env), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)


def script(path, text='echo "$0:" "$@"\nexit 7\n'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\n' + text)
    path.chmod(0o755)
    return path


@pytest.fixture
def library(tmp_path):
    """A file of the library's name; nothing loads it."""
    path = tmp_path / 'lib' / 'folder' / _lib.SONAME
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_command_help_has_a_line_for_each_with_an_example():
    done = command('--help')
    assert done.returncode == 0 and not done.stderr and command('-h').stdout == done.stdout
    for name in COMMANDS:
        assert '\n  %-8s ' % name in done.stdout and '\n             colobridge %s ' % name in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert command('--version').stdout == 'colobridge %s\n' % VERSION


@pytest.mark.parametrize('name', ['plan', 'info'])
def test_command_examples_run_on_any_machine(name):
    try:
        program('colo-' + name)
    except FileNotFoundError as why:
        pytest.skip(str(why))
    done = command(*shlex.split(HELP[name][1]))
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr


@pytest.mark.parametrize('given, said', [(['plot'], "found 'plot'"), ([], 'a command is missing')])
def test_command_that_is_unknown_lists_them(given, said):
    done = command(*given)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == 'colobridge: %s, expected one of %s; see --help\n' % (said, ', '.join(COMMANDS))


@pytest.mark.parametrize('name', ['plan', 'info', 'perf'])
@pytest.mark.parametrize('where', ['lib/folder', 'lib/bin', 'bin', 'lib/tools'])
def test_command_becomes_the_program_beside_the_library(library, tmp_path, where, name):
    script(tmp_path / where / ('colo-' + name))
    done = command(name, '--help', 'a b', COLOBRIDGE_LIBRARY=str(library.parent))
    assert done.returncode == 7 and not done.stderr
    path, _, got = done.stdout.partition(': ')
    assert got == '--help a b\n' and os.path.samefile(path, tmp_path / where / ('colo-' + name))


def test_command_takes_the_first_that_is_there(library, tmp_path):
    found = []
    for where in ['lib/tools', 'bin', 'lib/bin', 'lib/folder']:
        script(tmp_path / where / 'colo-plan')
        found.append(Path(command('plan', COLOBRIDGE_LIBRARY=str(library)).stdout.split(':')[0]).parent.resolve())
    assert found == [tmp_path / where for where in ['lib/tools', 'bin', 'lib/bin', 'lib/folder']]


def test_command_without_its_program_says_where_it_looked(library, tmp_path):
    script(tmp_path / 'path' / 'colo-plan')  # another build's, perhaps
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin' / 'colo-plan').touch()  # no program
    done = command('plan', COLOBRIDGE_LIBRARY=str(library), PATH='%s:%s' % (tmp_path / 'path', os.environ['PATH']))
    assert done.returncode == 1 and not done.stdout
    where = ', '.join(str(tmp_path / folder / 'colo-plan') for folder in ['lib/folder', 'lib/bin', 'bin', 'lib/tools'])
    assert done.stderr.startswith('colobridge plan: no colo-plan in %s. ' % where) and 'libjansson-dev' in done.stderr


def test_command_asks_path_where_only_the_loader_knows_the_library(monkeypatch, tmp_path):
    from colobridge import __main__
    monkeypatch.setattr(_lib, 'find', lambda: _lib.SONAME)
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(FileNotFoundError, match='^no colo-plan in PATH. '):
        __main__.program('colo-plan')
    assert __main__.program('sh') if script(tmp_path / 'sh') else None


def test_command_without_a_library_fails_with_its_message():
    done = command('plan', COLOBRIDGE_LIBRARY='/nonexistent')
    assert done.returncode == 1 and done.stderr.startswith("colobridge plan: COLOBRIDGE_LIBRARY is '/nonexistent'")


def test_command_leaves_signals_to_its_program(library, tmp_path):
    script(tmp_path / 'bin' / 'colo-perf', 'exec grep -E "^Sig(Ign|Blk)" /proc/self/status\n')
    plain = subprocess.run([tmp_path / 'bin' / 'colo-perf'], text=True, stdout=subprocess.PIPE).stdout
    assert command('perf', COLOBRIDGE_LIBRARY=str(library)).stdout == plain and plain
    script(tmp_path / 'bin' / 'colo-perf', 'kill -TERM $$\n')
    assert command('perf', COLOBRIDGE_LIBRARY=str(library)).returncode == -signal.SIGTERM


def test_command_runs_the_programs_of_this_build():
    if not os.path.exists(os.path.join(os.path.dirname(_lib.find()), '../tools/colo-plan')):
        pytest.skip('the tools are not in this build')
    for name in 'plan', 'info', 'perf':
        assert command(name, '--version').stdout == 'colo-%s %s\n' % (name, VERSION)
    assert command('plan', '--dst', 'tp=2').returncode == 2
