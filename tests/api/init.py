# SPDX-License-Identifier: Apache-2.0
"""Every COLO_..._INIT of the public headers is valid C++17, and sets in C++ what it sets in C.

usage: init.py COMPILER... -- COMPILER...     the C compiler and the C++ compiler of the build
The headers are compiled with every warning as an error, by these and by gcc and clang where they are
installed. What C and C++ set is compared byte by byte, in static objects, whose padding is zero.
Defaults are 0, but for NOT_ZERO: where a program gives such a member another value in the same braces, compilers warn.
"""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from api import INCLUDE, complaints

# 0 is a value of its own: no temperature, no check, an id that a program may ignore.
NOT_ZERO = {'temperature', 'scale', 'target_temperature', 'target_scale', 'beta', 'ignore_index', 'check', 'logits', 'logprob', 'distill'}
WARNINGS = ['-Wall', '-Wextra', '-pedantic-errors', '-Werror']


def macros():
    """(macro, struct) of every initialiser: COLO_PLAN_CONFIG_INIT is one of colo_plan_config_t."""
    names = {name for path in INCLUDE.rglob('*.h')
             for name in re.findall(r'^#define (COLO_\w+_INIT)\b', path.read_text(), re.M)}
    return sorted((name, name[:-len('_INIT')].lower() + '_t') for name in names)


def defaults(text):
    """Members that the initialisers of a header set in C."""
    return {member for body in re.findall(r'^#define COLO_\w+_INIT\b(.*)', text.replace('\\\n', ' '), re.M)
            for member in re.findall(r'\.(\w+) =', body)} - {'struct_size'}


def objects(names, prefix):
    lines = ['#include <colobridge.h>']
    for name, struct in names:
        lines += ['extern %s %s_%s;' % (struct, prefix, name), '%s %s_%s = {%s};' % (struct, prefix, name, name)]
    return '\n'.join(lines) + '\n'


def compiled(compiler, standard, text, out):
    return complaints(compiler, standard, text, '-c', '-o', str(out), *WARNINGS)


def difference(names, c, cpp, folder, change=lambda text: text):
    """Compiles both and compares them; what is wrong."""
    main = ['#include <cstdio>', '#include <cstring>', '#include <colobridge.h>', 'extern "C" {']
    main += ['extern %s in_c_%s, in_cpp_%s;' % (struct, name, name) for name, struct in names]
    main += ['}', 'int main() { int bad = 0;']
    main += ['if (std::memcmp(&in_c_%s, &in_cpp_%s, sizeof in_c_%s)) { std::puts("%s differs in C and C++"); bad = 1; }'
             % (name, name, name, name) for name, _ in names]
    main += ['return bad; }']
    said = compiled(c, 'c11', objects(names, 'in_c'), folder / 'c.o')
    text = change('extern "C" {\n' + objects(names, 'in_cpp') + '}\n')
    said += compiled(cpp, 'c++17', text, folder / 'cpp.o')
    said += compiled(cpp, 'c++17', '\n'.join(main) + '\n', folder / 'main.o')
    if said:
        return said
    subprocess.run(cpp + ['-o', str(folder / 'run')] + [str(folder / n) for n in ('main.o', 'c.o', 'cpp.o')], check=True)
    return subprocess.run([str(folder / 'run')], text=True, stdout=subprocess.PIPE).stdout


def main(args):
    split = args.index('--')
    pairs = {' '.join(args[:split]): (args[:split], args[split + 1:])}
    for c, cpp in (('gcc', 'g++'), ('clang', 'clang++')):
        if shutil.which(c) and shutil.which(cpp):
            pairs[c] = ([c], [cpp])
    names, wrong = macros(), []
    found = set().union(*(defaults(path.read_text()) for path in INCLUDE.rglob('*.h')))
    if found != NOT_ZERO or defaults('#define COLO_A_INIT \\\n .struct_size = 1, .b = 2') != {'b'}:
        wrong.append('members with a default other than 0: %s, expected %s' % (sorted(found), sorted(NOT_ZERO)))
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        for name, (c, cpp) in pairs.items():
            said = difference(names, c, cpp, folder)
            wrong += ['%s:\n%s' % (name, said)] if said else []
        c, cpp = pairs[' '.join(args[:split])]
        name = names[0][0]
        for what, old, new in (('a designated initialiser', '{%s}' % name, '{.struct_size = 1}'),
                               ('another value', '};\n}\n', '};\nsize_t other = in_cpp_%s.struct_size++;\n}\n' % name)):
            if not difference(names, c, cpp, folder, lambda text: text.replace(old, new)):
                wrong.append('this check does not see %s' % what)
    print('\n'.join(wrong) or '%d initialisers, %d pairs of compilers' % (len(names), len(pairs)))
    return 1 if wrong or not names else 0


sys.exit(main(sys.argv[1:]))
