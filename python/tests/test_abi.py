# SPDX-License-Identifier: Apache-2.0
"""The Python declarations say what the C headers say: structs, enums, functions."""
import ctypes
import importlib
import operator
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from colobridge import _lib, _structs, _version, errors

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / 'include'
ENUMS = {
    'COLO_F32': _structs.DTYPE['f32'], 'COLO_F64': _structs.DTYPE['f64'],
    'COLO_BF16': _structs.DTYPE['bf16'], 'COLO_F16': _structs.DTYPE['f16'],
    'COLO_I8': _structs.DTYPE['i8'], 'COLO_U8': _structs.DTYPE['u8'],
    'COLO_I16': _structs.DTYPE['i16'], 'COLO_I32': _structs.DTYPE['i32'],
    'COLO_I64': _structs.DTYPE['i64'], 'COLO_DTYPE_COUNT': len(_structs.DTYPES),
    'COLO_HOST': _structs.HOST, 'COLO_CUDA': _structs.CUDA,
    'COLO_FULL_SEQ': _structs.FULL_SEQ, 'COLO_SHARDED': _structs.SHARDED,
    'COLO_PARTIAL': _structs.PARTIAL, 'COLO_DISJOINT': _structs.DISJOINT,
    'COLO_EXACT': _structs.EXACT, 'COLO_COLLECTIVE': _structs.COLLECTIVE,
    'COLO_TRANSPORT_AUTO': _structs.AUTO, 'COLO_TRANSPORT_NCCL': _structs.NCCL,
    'COLO_TRANSPORT_PEER': _structs.PEER, 'COLO_PACKED': _structs.PACKED, 'COLO_MERGED': _structs.MERGED,
    'COLO_EQUAL': _structs.EQUAL, 'COLO_FAN_IN': _structs.FAN_IN,
    'COLO_FAN_OUT': _structs.FAN_OUT, 'COLO_FORWARD': _structs.FORWARD,
    'COLO_BACKWARD': _structs.BACKWARD, 'COLO_SAMPLES': _structs.SAMPLES,
    'COLO_ROWS': _structs.ROWS, 'COLO_FEATURES': _structs.FEATURES,
    'COLO_REPLICATE': _structs.REPLICATE, 'COLO_BLOCK': _structs.BLOCK,
    'COLO_ZIGZAG': _structs.ZIGZAG, 'COLO_SUM': _structs.SUM, 'COLO_MAX': _structs.MAX,
    'COLO_STAGE_ANY': _structs.STAGE_ANY, 'COLO_STAGE_LAST': _structs.STAGE_LAST,
    'COLO_MAX_NDIM': _structs.MAX_NDIM, 'COLO_MAX_DIMS': _structs.MAX_DIMS,
    'COLO_DIM_NAME_MAX': _structs.DIM_NAME_MAX, 'COLO_KEY_MAX': _structs.KEY_MAX,
    'COLO_MAX_SPLITS': _structs.MAX_SPLITS, 'COLO_OP_COUNT': len(_structs.OPS),
    'COLO_CATEGORY_COUNT': len(_structs.OWNERS),
    'COLO_LINEAR_FORWARD': _structs.LINEAR_FORWARD, 'COLO_LINEAR_BACKWARD': _structs.LINEAR_BACKWARD,
    'COLO_LINEAR_LOSS': _structs.LINEAR_LOSS, 'COLO_LINEAR_INFERENCE': _structs.LINEAR_INFERENCE,
    'COLO_LINEAR_AUTO': _structs.LINEAR_AUTO, 'COLO_LINEAR_LOGPROB': _structs.LINEAR_LOGPROB,
    'COLO_LINEAR_KEEP': _structs.LINEAR_KEEP, 'COLO_LINEAR_EARLY': _structs.LINEAR_EARLY,
}
ENUMS.update(('COLO_' + name, value) for name, value in errors.STATUS.items())


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
    for name, kind in _structs.C_NAMES.items():
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
    for name, kind in _structs.C_NAMES.items():
        if ctypes.sizeof(kind) != compiled[name, '.'][1]:
            wrong.append((name, ctypes.sizeof(kind), compiled[name, '.'][1]))
        for field in kind._fields_:
            mine = getattr(kind, field[0])
            if (mine.offset, mine.size) != compiled[name, field[0]]:
                wrong.append((name, field[0], mine.offset, mine.size, compiled[name, field[0]]))
    assert not wrong


def members(name):
    """Of a struct, as the header names them, of each union the first; None when no header has it."""
    for text in texts().values():
        text = re.sub(r'union \{([^;]*;)[^{}]*\};', r'\1', text)
        found = re.search(r'typedef struct \w+ \{([^{}]*)\} %s;' % name, text)
        if found:
            body = re.sub(r'\(\*(\w+)\)\([^)]*\)', r'\1', found.group(1))  # pointers to functions
            return [re.sub(r'\[.*', '', word).strip(' *') for line in body.split(';') if line.strip()
                    for word in re.sub(r'^\s*(?:const\s+)?\w+\s+(?:\*\s*)?', '', line).split(',')]
    return None


def test_structs_have_the_members_of_the_headers_in_order():
    wrong = {name: members(name) for name, kind in _structs.C_NAMES.items()
             if members(name) != [field[0] for field in kind._fields_]}
    assert not wrong


def test_enums_have_the_values_of_the_header(compiled):
    wrong = {name: (value, compiled['=', name][0]) for name, value in ENUMS.items()
             if compiled['=', name][0] != value}
    assert not wrong


def test_every_status_of_the_header_is_known():
    names = re.findall(r'X\((ERR_\w+), ', (INCLUDE / 'colobridge/status.h').read_text())
    assert sorted(names) == sorted(errors.STATUS)


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
    wrong = {name: declaration(name) for name, (returns, arguments) in _lib.FUNCTIONS.items()
             if declaration(name) != (returns is None, len(arguments))}
    assert not wrong


def test_versions_are_one():
    meson = (ROOT / 'meson.build').read_text()
    assert re.search(r"version: '(.*?)'", meson).group(1) == _version.VERSION
    assert 'dynamic = ["version"]' in (ROOT / 'pyproject.toml').read_text()  # meson.build's
    assert _lib.version() == _version.VERSION


def test_names_of_the_reference_page_are_where_it_says():
    pytest.importorskip('torch')
    lost, module = [], None
    for level, name in re.findall(r'^(##|###) `?([\w.]+)', (ROOT / 'docs/python-api.md').read_text(), re.M):
        if level == '##':
            module = importlib.import_module(name)
            continue
        try:
            operator.attrgetter(name)(module)
        except AttributeError:
            lost.append('%s.%s' % (module.__name__, name))
    assert module and not lost


def test_the_reference_page_is_made_from_the_docstrings():
    done = subprocess.run([sys.executable, str(ROOT / 'python/reference.py')], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
