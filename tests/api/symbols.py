# SPDX-License-Identifier: Apache-2.0
"""The map, the headers and the library name the same functions; SONAME and needs are as promised.

usage: symbols.py LIBRARY SONAME     compare
       symbols.py --write            make src/colobridge.map from the headers
"""
import re
import sys

from api import MAP, declared, for_modules, run

# Parts of the C library: threads and dlopen() are libraries of their own before glibc 2.34, and thread-local
# variables need a function of ld.so. Nothing of hwloc, CUDA, NCCL, MPI or BLAS, which are found at run time.
NEEDS = re.compile(r'^(libc|libm|libpthread|libdl|librt|ld-linux[\w-]*)\.so\.\d+$')


# Each version of the map, and what declares its functions: programs call the first, modules both.
NODES = {'COLOBRIDGE_0': declared, 'COLOBRIDGE_PRIVATE_0': for_modules}


def mapped(node):
    body = re.search(r'^%s \{\n  global:(.*?)^(?:  local: \*;\n)?\};' % node, MAP.read_text(), re.S | re.M)
    return sorted(re.findall(r'([\w*]+);', body.group(1))) if body else []


def write():
    text = ('/* Every exported function, one by one: tests/api/symbols.py compares this list with the\n'
            ' * headers and the library, and --write makes it anew. Functions of COLOBRIDGE_PRIVATE_0 are\n'
            ' * COLO_FOR_MODULES in private headers: for modules of the same build alone. */\n')
    for node, names in NODES.items():
        text += '%s {\n  global:\n%s%s};\n' % (node, ''.join('    %s;\n' % n for n in names()),
                                               '  local: *;\n' if names is declared else '')
    MAP.write_text(text)


def compare(what, left, right):
    ok = True
    for name in sorted(set(left) ^ set(right)):
        print('%s: only in %s' % (name, what[0] if name in left else what[1]))
        ok = False
    return ok


def main(library, soname):
    table = [line.split() for line in run('nm', '-D', '--defined-only', library).splitlines()]
    # "0000 T colo_version@@COLOBRIDGE_0"; the version itself is an absolute symbol
    exported = [(*f[-1].split('@@'), f[-2]) for f in table if f[-2] != 'A']
    ok = True
    for node, names in NODES.items():
        there = [name for name, version, _ in exported if version == node]
        ok &= bool(there)
        ok &= compare(('the headers', 'the map, in ' + node), names(), mapped(node))
        ok &= compare(('the headers', 'the library, in ' + node), names(), there)
    for name, _, kind in exported:
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
            print('the library needs %s; it should run with libc alone' % need)
            ok = False
    print('%d declared, %d for modules, %d exported' % (len(declared()), len(for_modules()), len(exported)))
    return 0 if ok else 1


if sys.argv[1:] == ['--write']:
    write()
else:
    sys.exit(main(*sys.argv[1:]))
