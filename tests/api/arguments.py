# SPDX-License-Identifier: Apache-2.0
"""No public function has more than eight arguments: what needs more takes a struct, so that a caller
names what it passes.
"""
import sys

from api import declarations, split

MOST = 8


def main():
    wrong = [] if len(split('int (*f)(int, int), int x')) == 2 else ['this check does not count 2 arguments']
    found = [(name, len(arguments)) for _, name, arguments in declarations()]
    wrong += ['%s() has %d arguments, expected at most %d; put them into a struct' % (name, n, MOST)
              for name, n in found if n > MOST]
    print('\n'.join(wrong) or '%d functions, at most %d arguments' % (len(found), max(n for _, n in found)))
    return 1 if wrong else 0


sys.exit(main())
