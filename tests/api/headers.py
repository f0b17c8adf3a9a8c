# SPDX-License-Identifier: Apache-2.0
"""Each public header compiles alone, strictly, without a word from the compiler.

usage: headers.py c11|c++17 own|opt-in COMPILER...
"own" are the headers that need nothing but C's; "opt-in" those that include somebody else's, MPI's
say. Where that is not installed the header is left out, and when nothing remains it is a skip.
"""
import shutil
import subprocess
import sys

from api import INCLUDE, foreign, headers

STRICT = ['-Wall', '-Wextra', '-Wpedantic', '-Werror']
# How to ask where a header that is not on the compiler's path lives.
ASK = {'mpi.h': (['pkg-config', '--cflags', 'ompi-c'], ['mpicc', '--showme:compile'],
                 ['mpicc', '-compile_info'])}


def compiles(compiler, std, flags, text):
    language = 'c++' if '++' in std else 'c'
    if language == 'c':
        flags = flags + ['-Wshadow', '-Wstrict-prototypes', '-Wmissing-prototypes']
    done = subprocess.run(
        compiler + ['-std=' + std, '-x', language, '-fsyntax-only', '-I', str(INCLUDE)] + STRICT
        + flags + ['-'], input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode == 0 and not done.stdout, done.stdout


def found(compiler, std, names):
    """Flags with which somebody else's headers are found, or None."""
    flags = []
    for name in names:
        text = '#include <%s>\nextern int colo_api_test_;\n' % name
        options = [[]]
        for command in ASK.get(name, ()):
            if shutil.which(command[0]):
                said = subprocess.run(command, text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL).stdout.split()
                # As system headers: their warnings are not ours.
                options.append([w for flag in said if flag.startswith('-I')
                                for w in ('-isystem', flag[2:])])
        for more in options:
            if compiles(compiler, std, more, text)[0]:
                flags += more
                break
        else:
            return None
    return flags


def main(std, kind, compiler):
    checked = bad = 0
    for header in headers():
        needs = foreign(header)
        if bool(needs) != (kind == 'opt-in'):
            continue
        flags = found(compiler, std, needs)
        if flags is None:
            print('%s as %s: left out, no <%s> here' % (header, std, '> or <'.join(needs)))
            continue
        checked += 1
        # Twice: the guard holds. Nothing else is defined: no _GNU_SOURCE, no include before it.
        text = '#include <%s>\n#include <%s>\nextern int colo_api_test_;\n' % (header, header)
        good, said = compiles(compiler, std, flags, text)
        if not good:
            bad += 1
            print('%s as %s:\n%s' % (header, std, said))
    print('%d headers as %s, %d bad' % (checked, std, bad))
    if bad:
        return 1
    return 0 if checked else 77 if kind == 'opt-in' else 1


sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
