# SPDX-License-Identifier: Apache-2.0
"""`ninja` and `meson install` build the library, tools and examples; no test, mutant or benchmark.

usage: targets.py NINJA BUILD-FOLDER
"""
import sys

from api import run

ninja, build = sys.argv[1:]
inputs = run(ninja, '-C', build, '-t', 'inputs', 'all').splitlines()
for needed in ('src/libcolobridge.so', 'tools/colo-plan'):
    if not any(needed in path for path in inputs):
        sys.exit('the target "all" lacks %s: found %d files' % (needed, len(inputs)))
extra = [path for path in inputs if path.startswith(('tests/', 'bench/'))]
if extra:
    sys.exit('the target "all" needs %d files of tests and benchmarks: found %s, expected none; '
             'see the top meson.build' % (len(extra), ', '.join(extra[:5])))
print('%d files, none of tests or benchmarks' % len(inputs))
