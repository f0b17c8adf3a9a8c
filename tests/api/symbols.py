# SPDX-License-Identifier: Apache-2.0
"""The map, the headers and the library name the same functions; SONAME and needs are as promised.

usage: symbols.py LIBRARY SONAME     compare
       symbols.py --write            make src/colobridge.map from the headers
"""
import re
import sys

from api import MAP, declared, run

# hwloc where the build has it; nothing of CUDA, NCCL, MPI or BLAS.
NEEDS = re.compile(r'^(libc|libhwloc|libm|libpthread|libdl|librt|ld-linux[\w-]*)\.so\.\d+$')


def mapped():
    body = re.search(r'global:(.*?)local:\s*\*;', MAP.read_text(), re.S)
    return sorted(re.findall(r'([\w*]+);', body.group(1))) if body else []


def write():
    names = ''.join('    %s;\n' % name for name in declared())
    MAP.write_text('/* Every exported function, one by one: tests/api/symbols.py compares this list '
                   'with the\n * headers and the library, and --write makes it anew. */\n'
                   'COLOBRIDGE_0 {\n  global:\n%s  local: *;\n};\n' % names)


def compare(what, left, right):
    ok = True
    for name in sorted(set(left) ^ set(right)):
        print('%s: only in %s' % (name, what[0] if name in left else what[1]))
        ok = False
    return ok


def main(library, soname):
    table = [line.split() for line in run('nm', '-D', '--defined-only', library).splitlines()]
    # "0000 T colo_version@@COLOBRIDGE_0"; the version itself is an absolute symbol
    exported = [(f[-1].split('@')[0], f[-2]) for f in table if f[-2] != 'A']
    ok = compare(('the headers', 'the map'), declared(), mapped())
    ok &= compare(('the headers', 'the library'), declared(), [name for name, _ in exported])
    for name, kind in exported:
        if kind not in 'T':
            print('%s: exported as %s, only functions should be' % (name, kind))
            ok = False
    dynamic = run('readelf', '-dW', library)
    found = re.findall(r'\(SONAME\).*\[(.*)\]', dynamic)
    if found != [soname]:
        print('SONAME %s, expected %s' % (found, soname))
        ok = False
    for need in re.findall(r'\(NEEDED\).*\[(.*)\]', dynamic):
        if not NEEDS.match(need):
            print('the library needs %s; it should run with libc and hwloc alone' % need)
            ok = False
    print('%d declared, %d mapped, %d exported' % (len(declared()), len(mapped()), len(exported)))
    return 0 if ok and exported else 1


if sys.argv[1:] == ['--write']:
    write()
else:
    sys.exit(main(*sys.argv[1:]))
