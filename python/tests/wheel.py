# SPDX-License-Identifier: Apache-2.0
"""What tools/wheel.sh runs in an environment that has the wheel: where the package and its libraries are,
that libraries in NVIDIA's wheels are found, the command, and the PyTorch program of docs/guides/vision.md.

usage: wheel.py PAGE
"""
import contextlib
import ctypes as c
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import colobridge
from colobridge import _lib

package = Path(colobridge.__file__).parent
assert package.parent.name == 'site-packages' and str(package).startswith(sys.prefix), package
assert Path(_lib.find()) == package / _lib.SONAME, _lib.find()
assert (package / 'py.typed').exists()
about = importlib.metadata.distribution('colobridge')
assert about.version == colobridge.__version__
licences = about.metadata.get_all('License-File')  # jansson's, which is in the tools, is MIT's
assert about.metadata['License-Expression'] == 'Apache-2.0' + ' AND MIT' * ('jansson' in licences), about.metadata['License-Expression']
for licence in licences:
    assert about.read_text('licenses/' + licence), licence
description = importlib.metadata.metadata('colobridge').get_payload()
assert 'The problem.' in description and not re.search(r'\]\((?!https:)', description), description


class Library(c.Structure):
    """colo_library_t"""
    _fields_ = [(name, c.c_char_p) for name in ('user', 'title', 'file', 'advice', 'expected')]


class Symbol(c.Structure):
    """colo_library_symbol_t"""
    _fields_ = [('name', c.c_char_p), ('at', c.POINTER(c.c_void_p))]


def finds(name):
    """Does the library find a library of this name, as it looks for NVIDIA's?"""
    found = c.c_void_p()
    of = Library(b'wheel', b'NVIDIA', name.encode(), b'', b'')
    return _lib.lib().colo_library_find(c.byref(of), c.byref(Symbol(b'PyInit__ctypes', c.pointer(found))), 1) == 0


# An environment of NVIDIA's wheels has these folders. The dynamic linker remembers which do not exist.
any_library = importlib.util.find_spec('_ctypes').origin
folders = [package.parent / 'nvidia' / name / 'lib' for name in ('nccl', 'cublas', 'cu13')]
made = [p for folder in folders for p in (folder, folder.parent, folder.parent.parent) if not p.exists()]
files = [folder / ('libcolobridge-test-%d.so.1' % i) for i, folder in enumerate(folders)]
try:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(any_library, file)
    for file in files:
        assert finds(file.name), 'not found: %s' % file
    assert not finds('libcolobridge-test-3.so.1')
finally:
    for p in (*files, *sorted(set(made), reverse=True)):
        p.rmdir() if p.is_dir() else p.unlink()



def command(*arguments, status=0, **env):
    """What the command prints; nothing of another colobridge is in PATH."""
    done = subprocess.run([Path(sys.prefix, 'bin', 'colobridge'), *arguments], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=dict(os.environ, PATH=str(Path(sys.prefix, 'bin')), **env))
    assert done.returncode == status, (arguments, done)
    return done.stdout


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    command('check', '--ranks', '2', '--threads')
    assert json.loads(command('plan', '--src', 'dp=2', '--dst', 'tp=2', '--json', '--svg', 'plan.svg'))['world'] == 2
    assert Path('plan.svg').read_text().startswith('<svg ')
    assert json.loads(command('info', '--json'))['backends']['threads'] is True
    assert command('perf', '--version') == 'colo-perf %s\n' % _lib.version()
    colobridge.run_threads(2, lambda comm: (comm.barrier(), comm.flight_record('rank')))
    assert command('flight', 'rank0', 'rank1').endswith('all operations are alike\n')
    assert 'no record of rank 1' in command('flight', 'rank0', status=1)
for name in 'plan', 'info', 'perf':
    assert command(name, '--help').startswith('usage: colo-%s ' % name)
    assert (package / ('colo-' + name)).stat().st_mode & 0o111, name
print('the command runs check, plan, info, perf, flight')

if importlib.util.find_spec('torch'):
    page = Path(sys.argv[1]).read_text()
    program, prints = (re.search('<!-- %s -->\n```\\w*\n(.*?)```' % kind, page, re.S).group(1)
                       for kind in ('python', 'python prints'))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(program, {'__name__': 'page'})
    assert said.getvalue() == prints, said.getvalue()
    print('the PyTorch program of %s prints what it says' % sys.argv[1])
print('the libraries are %s' % ' '.join(sorted(p.name for p in package.glob('*.so*'))))
