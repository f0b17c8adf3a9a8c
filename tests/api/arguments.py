# SPDX-License-Identifier: Apache-2.0
"""No public function has more than eight arguments: what needs more takes a struct, so that a caller
names what it passes.
"""
import re
import sys

from api import INCLUDE, headers

MOST = 8


def counts(text):
    """(function, arguments) of all that a header's text declares."""
    text = re.sub(r'/\*.*?\*/', ' ', text, flags=re.S)
    for name, rest in re.findall(r'^COLO_API\b[^;]*?\b(colo_\w+)\s*\(([^;]*)\)\s*;', text, re.M):
        depth, commas = 0, 0
        for letter in rest:
            depth += (letter == '(') - (letter == ')')
            commas += letter == ',' and depth == 0
        yield name, 0 if rest.strip() == 'void' else commas + 1


def main():
    planted = 'COLO_API int colo_a(int (*f)(int, int, int), %s);\nCOLO_API void colo_b(void);\n'
    wrong = ['this check does not count %d arguments' % n for n in (8, 9)
             if list(counts(planted % ', '.join(['int x'] * (n - 1)))) != [('colo_a', n), ('colo_b', 0)]]
    found = [pair for header in headers() for pair in counts((INCLUDE / header).read_text())]
    wrong += ['%s() has %d arguments, expected at most %d; put them into a struct' % (name, n, MOST)
              for name, n in found if n > MOST]
    print('\n'.join(wrong) or '%d functions, at most %d arguments' % (len(found), max(n for _, n in found)))
    return 1 if wrong else 0


sys.exit(main())
