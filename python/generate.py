#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes colobridge/_structs.py from the public headers: the version, the functions that the package names, and the
structs and enumerators that they and the package need.

usage: generate.py [--write]     without: exit 1 when the file is not what it would be
"""
import re
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / 'tests' / 'api'))
from api import INCLUDE, declarations, headers, split, version  # noqa: E402 # tests/api/api.py reads headers for all tests

FILE = HERE / 'colobridge' / '_structs.py'
SCALARS = {'void': 'None', 'bool': 'BOOL', 'char': 'c.c_char', 'int': 'INT', 'float': 'c.c_float', 'double': 'DOUBLE',
           'size_t': 'size_t', 'int32_t': 'i32', 'int64_t': 'i64', 'uint8_t': 'c.c_uint8', 'uint32_t': 'c.c_uint32',
           'uint64_t': 'u64', 'colo_status_t': 'INT', 'colo_stream_t': 'P'}
TUPLES = {'colo_dtype_t': 'DTYPES', 'colo_op_kind_t': 'OPS', 'colo_category_t': 'OWNERS'}  # of names, in place of numbers
TEXT = '''# SPDX-License-Identifier: Apache-2.0
"""The version, and the C structs, enumerators and functions that the package uses; python/generate.py makes this file."""
import ctypes as c
from typing import Any

P, BOOL, INT, DOUBLE, CHARS, _p = c.c_void_p, c.c_bool, c.c_int, c.c_double, c.c_char_p, c.POINTER
i32, i64, u64, size_t = c.c_int32, c.c_int64, c.c_uint64, c.c_size_t

%s

DTYPE = {name: i for i, name in enumerate(DTYPES)}
DTYPE_SIZE = tuple(int(''.join(filter(str.isdigit, name))) // 8 for name in DTYPES)


%s


# name: (returns, arguments). Structs that have no members in a header, and addresses of numbers, are void pointers.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
%s
}
'''


def camel(name):
    """colo_comm_stats_t: CommStats"""
    return ''.join(word.capitalize() for word in re.sub(r'^colo_|_t$|_fn$', '', name).split('_'))


def wrapped(first, items, end, indent):
    """A line, or several that break between items."""
    text = first.lstrip() + ', '.join(item.replace(' ', '\0') for item in items) + end
    return textwrap.fill(text, 118, initial_indent=' ' * (len(first) - len(first.lstrip())), subsequent_indent=' ' * indent,
                         break_long_words=False, break_on_hyphens=False).replace('\0', ' ')


class Headers:
    def __init__(self):
        text = '\n'.join(re.sub(r'/\*.*?\*/', ' ', (INCLUDE / h).read_text(), flags=re.S) for h in headers())
        self.structs = {name: re.sub(r'union \{([^;]*;)[^{}]*\};', r'\1', body) for body, name in re.findall(
            r'typedef struct \w+ \{((?:[^{}]|\{[^{}]*\})*)\} (colo_\w+);', text)}  # of a union its first member
        self.enums = {name: re.findall(r'(COLO_\w+) = (-?\d+)', body)
                      for body, name in re.findall(r'typedef enum \w+ \{([^{}]*)\} (\w+);', text)}
        self.defines = {name: value for name, value in re.findall(r'^#define (COLO_\w+) ([-()*\w ]+)$', text, re.M)
                        if re.fullmatch(r'[-()* \d]+', re.sub(r'COLO_\w+', '1', value))}
        self.callbacks = {name: (returned, arguments) for returned, name, arguments in re.findall(
            r'typedef (\w+) \(\*(colo_\w+)\)\(([^()]*)\);', text)}
        self.functions = {name: (returned, arguments) for returned, name, arguments in declarations()}
        self.needed = {}  # what a struct, by its name in C, is made of, in the order of need

    def of(self, kind):
        """A type of C as one of ctypes."""
        kind = re.sub(r'\bconst\b', '', kind).strip()
        if not kind.endswith('*'):
            if kind in self.structs:
                self.need(kind)
                return camel(kind)
            if kind in self.callbacks:
                self.needed.setdefault(kind, self.callback(camel(kind) + 'Fn', *self.callbacks[kind]))
                return camel(kind) + 'Fn'
            if kind not in self.enums and kind not in SCALARS:
                sys.exit('generate.py: a header has the type %s, expected an enum, a struct or one of SCALARS' % kind)
            return 'INT' if kind in self.enums else SCALARS[kind]
        to = kind[:-1].strip()
        if to == 'char':
            return 'CHARS'
        inner = self.of(to) if to.strip('* ') in self.structs else 'P' if to.endswith('*') else ''
        return '_p(%s)' % inner if inner else 'P'

    def callback(self, name, returned, arguments):
        types = [re.sub(r'(?<=[ *])\w+$', '', a) for a in split(arguments)]
        return wrapped('%s = c.CFUNCTYPE(' % name, [self.of(returned), *map(self.of, types)], ')', 4)

    def need(self, name):
        if name in self.needed:
            return
        fields, before = [], []
        for member in filter(None, (' '.join(m.split()) for m in self.structs[name].split(';'))):
            function = re.fullmatch(r'(.*?)\(\*(\w+)\)\((.*)\)', member)
            if function:
                kind = camel(function[2]) + 'Fn'
                before.append(self.callback(kind, function[1], function[3]))
                fields.append("('%s', %s)" % (function[2], kind))
                continue
            kind, words = re.fullmatch(r'((?:const )?\w+ )(.*)', member).groups()
            for word in words.split(','):
                stars, field, sizes = re.fullmatch(r'([ *]*)(\w+)((?:\[\w+\])*)', word).groups()
                made = self.of(kind + stars)
                for size in reversed(re.findall(r'\w+', sizes)):
                    count = 'len(%s)' % {e: TUPLES[k] for k, v in self.enums.items() if k in TUPLES for e, _ in v}[size] \
                        if size.endswith('_COUNT') else size.removeprefix('COLO_')
                    made = '%s * %s' % ('(%s)' % made if '*' in made else made, count)
                fields.append("('%s', %s)" % (field, made))
        self.needed[name] = '\n'.join([*before, '\n'] * bool(before) + ['class %s(c.Structure):' % camel(name), wrapped(
            '    _fields_ = [', fields, ']', 16)])


def made():
    said = '\n'.join(p.read_text() for p in sorted((HERE / 'colobridge').rglob('*.py')) if p != FILE)
    of = Headers()
    quoted = '|'.join(set(re.findall(r"'([a-z]\w*)'", said)))  # what may stand for %s
    named = re.compile('|'.join(word.replace('%s', '(?:%s)' % quoted) for word in set(re.findall(r'\bcolo_[\w%]+', said))))
    functions = [wrapped("    '%s': (%s, [" % (name, of.of(returned)), map(of.of, arguments), ']),', 8)
                 for name, (returned, arguments) in sorted(of.functions.items()) if named.fullmatch(name)]
    used = set(re.findall(r'\bs\.(\w+)', said))
    for name in of.structs:
        if camel(name) in used:
            of.need(name)
    structs = '\n\n\n'.join(of.needed.values())
    used |= set(re.findall(r'[A-Z]\w+', structs))
    numbers = ['%s = %s' % (name.removeprefix('COLO_'), value.replace('COLO_', '').strip(' ()'))
               for name, value in of.defines.items() if name.removeprefix('COLO_') in used]
    for kind, values in of.enums.items():
        names = [name.removeprefix('COLO_') for name, _ in values]
        if kind in TUPLES:
            start = len(re.match(r'((?:OP|CATEGORY)_)?', names[0])[0])
            numbers.append(wrapped('%s = ' % TUPLES[kind], ["'%s'" % n[start:].lower() for n in names[:-1]], '', 4)
                           .replace(' = ', ' = (', 1) + ')')
        elif used & set(names):
            numbers.append(wrapped('', names, ' = ' + ', '.join(v for _, v in values), 4))
    numbers.insert(0, "VERSION = '%s'" % version())
    return TEXT % ('\n'.join(numbers), structs, '\n'.join(functions))


def main():
    text = made()
    if sys.argv[1:] == ['--write']:
        FILE.write_text(text)
    elif FILE.read_text() != text:
        sys.exit('%s is not what the headers say; run python/generate.py --write' % FILE)


if __name__ == '__main__':
    main()
