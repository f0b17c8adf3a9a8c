# SPDX-License-Identifier: Apache-2.0
"""examples/06_embedder.c as embedders build it: as C11 and as C++17, by gcc and by clang, with every warning as an
error; and under AddressSanitizer and valgrind, which find no error and no leak.

usage: embedder.py SOURCE INCLUDE LIBRARY     compilers, sanitizers and valgrind that are missing are left out, by name
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WARNINGS = '-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wno-long-long -Werror'.split()
SANITIZED = '-fsanitize=address,undefined', '-fno-sanitize-recover=all'
VALGRIND = 'valgrind --quiet --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite,indirect'.split()


def run(*command, **more):
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          **more)
    if done.returncode:
        sys.exit('$ %s\n%sexit status %d' % (' '.join(map(str, command)), done.stdout, done.returncode))
    return done.stdout


def main(source, include, library):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.symlink(os.path.realpath(library), folder / 'libcolobridge.so.0')
        env = dict(os.environ, LD_LIBRARY_PATH=name)
        for compiler, how in (('gcc', '-std=gnu11'), ('clang', '-std=gnu11'), ('g++', '-std=gnu++17'),
                              ('clang++', '-std=gnu++17')):
            if not shutil.which(compiler):
                print('no %s: left out' % compiler)
                continue
            program = folder / compiler
            language, probe = 'c++' if '++' in compiler else 'c', folder / 'probe'
            for flags in ((), SANITIZED):
                if flags and subprocess.run([compiler, '-x', language, '-', '-o', probe, *flags], input='int main() {}',
                                            text=True, stderr=subprocess.DEVNULL).returncode:
                    print('no %s of %s: left out' % (flags[0], compiler))
                    continue
                made = folder / 'sanitized' if flags else program
                run(compiler, '-x', language, how, *WARNINGS, *flags, '-I', include, source, '-x', 'none', '-o', made,
                    folder / 'libcolobridge.so.0', '-lm', '-pthread')
                print('%s %s %s\n%s' % (compiler, how, ' '.join(flags[:1]), run(made, env=env)), end='')
        if shutil.which('valgrind'):
            print('valgrind\n' + run(*VALGRIND, program, env=env), end='')
        else:
            print('no valgrind: left out')


main(*sys.argv[1:])
