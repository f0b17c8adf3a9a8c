# SPDX-License-Identifier: Apache-2.0
"""The Python declarations, which python/generate.py makes, say what a C compiler says: structs, enums, functions."""
import ctypes
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from colobridge import _lib, _structs, errors

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import generate  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / 'include'
ENUMS = {'COLO_' + name: value for name, value in vars(_structs).items() if name.isupper() and isinstance(value, int)}
ENUMS.update(('COLO_' + name.upper(), value) for name, value in _structs.DTYPE.items())
ENUMS.update(COLO_DTYPE_COUNT=len(_structs.DTYPES), COLO_OP_COUNT=len(_structs.OPS), COLO_CATEGORY_COUNT=len(_structs.OWNERS))
ENUMS.update(('COLO_' + name, value) for name, value in errors.STATUS.items())
STRUCTS = {name: getattr(_structs, generate.camel(name)) for name in generate.Headers().structs
           if hasattr(_structs, generate.camel(name))}


def texts():
    return {path.name: re.sub(r'/\*.*?\*/', ' ', path.read_text(), flags=re.S)
            for path in INCLUDE.rglob('*.h')}


@pytest.fixture(scope='module')
def compiled(tmp_path_factory):
    """What a C program prints: "struct member" -> (offset, size), enum -> value."""
    compiler = next(filter(shutil.which, (os.environ.get('CC', '').split() or ['cc'])[:1]), None) \
        or shutil.which('gcc')
    if not compiler:
        pytest.skip('no C compiler')
    lines = []
    for name, kind in STRUCTS.items():
        lines.append('    printf("%s . 0 %%zu\\n", sizeof(%s));' % (name, name))
        for field in kind._fields_:
            lines.append('    printf("%s %s %%zu %%zu\\n", offsetof(%s, %s), sizeof((%s *)0)->%s);'
                         .replace('sizeof((%s *)0)->%s', 'sizeof(((%s *)0)->%s)')
                         % (name, field[0], name, field[0], name, field[0]))
    for name in ENUMS:
        lines.append('    printf("= %s %%ld 0\\n", (long)%s);' % (name, name))
    folder = tmp_path_factory.mktemp('abi')
    (folder / 'abi.c').write_text('#include <colobridge.h>\n#include <stdio.h>\nint main(void)\n{\n'
                                  + '\n'.join(lines) + '\n    return 0;\n}\n')
    subprocess.run([compiler, '-std=c11', '-I', str(INCLUDE), '-o', str(folder / 'abi'),
                    str(folder / 'abi.c')], check=True)
    out = subprocess.run([str(folder / 'abi')], check=True, text=True, stdout=subprocess.PIPE).stdout
    return {(a, b): (int(x), int(y)) for a, b, x, y in (line.split() for line in out.splitlines())}


def test_structs_are_laid_out_as_in_c(compiled):
    wrong = []
    for name, kind in STRUCTS.items():
        if ctypes.sizeof(kind) != compiled[name, '.'][1]:
            wrong.append((name, ctypes.sizeof(kind), compiled[name, '.'][1]))
        for field in kind._fields_:
            mine = getattr(kind, field[0])
            if (mine.offset, mine.size) != compiled[name, field[0]]:
                wrong.append((name, field[0], mine.offset, mine.size, compiled[name, field[0]]))
    assert not wrong


def test_structs_and_functions_are_what_the_generator_makes():
    assert len(STRUCTS) > 40 and generate.FILE.read_text() == generate.made(), 'run python/generate.py --write'


def test_enums_have_the_values_of_the_header(compiled):
    wrong = {name: (value, compiled['=', name][0]) for name, value in ENUMS.items()
             if compiled['=', name][0] != value}
    assert not wrong


def test_every_status_of_the_header_is_known():
    names = re.findall(r'COLO_(ERR_\w+) = ', (INCLUDE / 'colobridge/status.h').read_text())
    assert sorted(names) == sorted(errors.STATUS)
    named = ctypes.CDLL(_lib.find()).colo_status_name
    named.restype = ctypes.c_char_p
    assert {name: named(value).decode() for name, value in errors.STATUS.items()} == {n: 'COLO_' + n for n in names}


def declaration(name):
    """(whether it returns nothing, how many arguments) in the headers, None when it is in none."""
    for text in texts().values():
        found = re.search(r'COLO_API\s+([\w\s*]+?)\b%s\(([^;]*)\);' % name, text, re.S)
        if found:
            words = found.group(2).strip()
            return (found.group(1).split() == ['void'],
                    0 if words == 'void' else words.count(',') + 1)
    return None


def test_functions_take_as_many_arguments_as_in_the_headers():
    wrong = {name: declaration(name) for name, (returns, arguments) in _structs.FUNCTIONS.items()
             if declaration(name) != (returns is None, len(arguments))}
    assert not wrong


def test_the_version_is_that_of_the_library():
    assert _lib.version() == _structs.VERSION == importlib.import_module('colobridge').__version__
    assert 'dynamic = ["version"]' in (ROOT / 'pyproject.toml').read_text()  # Meson's, which reads version.h
    assert '\nversion: %s\n' % _structs.VERSION in (ROOT / 'CITATION.cff').read_text()
    assert not re.search('[0-9][.][0-9]+[.][0-9]', (ROOT / 'meson.build').read_text().split('meson_version')[0])


MODULES = 'colobridge', 'colobridge.torch', 'colobridge.megatron', 'colobridge.compat'


def undocumented(module):
    """Names that a module exports, and public methods of its classes, which are functions, without a docstring of their own"""
    names = {name: getattr(module, name) for name in module.__all__ if name != '__version__'}
    of = [('%s.%s' % (name, key), member) for name, it in names.items() if inspect.isclass(it) for base in it.__mro__
          if base.__module__.startswith('colobridge') for key, member in vars(base).items() if key[0] != '_' and key != 'extra_repr']
    called = [(name, getattr(it, '__func__', it)) for name, it in [*names.items(), *of]]
    return [name for name, it in called if (inspect.isclass(it) or inspect.isfunction(it) and it.__name__ in name) and not it.__doc__]


@pytest.mark.parametrize('name', MODULES)
def test_each_exported_name_and_method_has_a_docstring(name):
    if name != 'colobridge':
        pytest.importorskip('torch')
    missing = undocumented(importlib.import_module(name))
    assert not missing


def test_a_name_without_a_docstring_is_found():
    class Bare:
        __module__ = 'colobridge.bare'

        def call(self):
            pass
    assert undocumented(types.SimpleNamespace(__all__=['Bare'], Bare=Bare)) == ['Bare', 'Bare.call']


@pytest.mark.parametrize('name', MODULES[2:])
def test_a_star_imports_no_more_than_a_module_exports(name):
    pytest.importorskip('torch')
    space = {}
    exec('from %s import *' % name, space)
    assert set(space) - {'__builtins__'} == set(importlib.import_module(name).__all__)
