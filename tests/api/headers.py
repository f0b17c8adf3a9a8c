# SPDX-License-Identifier: Apache-2.0
"""Each public header compiles alone, strictly, without a word from the compiler.

usage: headers.py c11|c++17 COMPILER...
"""
import subprocess
import sys

from api import INCLUDE, OPT_IN, headers, opt_in_flags

std, compiler = sys.argv[1], sys.argv[2:]
language = 'c++' if '++' in std else 'c'
strict = ['-Wall', '-Wextra', '-Wpedantic', '-Werror']
if language == 'c':
    strict += ['-Wshadow', '-Wstrict-prototypes', '-Wmissing-prototypes']
bad = 0
for header in headers():
    more = opt_in_flags(header) if header in OPT_IN else []
    if more is None:
        print('%s: what it includes is not installed' % header)
        continue
    # Twice: the guard holds. Nothing else is defined: no _GNU_SOURCE, no include before it.
    text = '#include <%s>\n#include <%s>\nextern int colo_api_test_;\n' % (header, header)
    done = subprocess.run(
        compiler + ['-std=' + std, '-x', language, '-fsyntax-only', '-I', str(INCLUDE)] + strict + more + ['-'],
        input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode or done.stdout:
        bad += 1
        print('%s as %s:\n%s' % (header, std, done.stdout))
print('%d headers as %s, %d bad' % (len(headers()), std, bad))
sys.exit(1 if bad or not headers() else 0)
