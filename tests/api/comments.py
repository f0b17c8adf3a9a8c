# SPDX-License-Identifier: Apache-2.0
"""Every exported function has its own comment directly above its declaration in a public header.

The comment begins with the function's name, so that one comment cannot stand in for two functions.
"""
import re
import sys

from api import INCLUDE, declared, headers

DECLARATION = re.compile(r'^COLO_API\b[^;]*?\b(colo_\w+)\s*\([^;]*;', re.M)


def uncommented(text):
    """The functions of a header's text whose comment is missing, and all that it declares."""
    missing, names = [], []
    for found in DECLARATION.finditer(text):
        name = found.group(1)
        names.append(name)
        above = re.search(r'/\*\*((?:[^*]|\*(?!/))*)\*/\n\Z', text[:found.start()])
        if not above or not re.match(r'[\s*]*%s\(\) - \S' % name, above.group(1)):
            missing.append(name)
    return missing, names


def finds_what_is_planted():
    good = '/** colo_a() - does a thing */\nCOLO_API void colo_a(int x);\n'
    cases = {
        good: [],
        'COLO_API void colo_a(int x);\n': ['colo_a'],
        good + 'COLO_API int\ncolo_b(void);\n': ['colo_b'],
        '/** colo_a(), _b() - two things */\nCOLO_API void colo_a(void);\n': ['colo_a'],
        good.replace('*/\n', '*/\n\n'): ['colo_a'],
        good.replace('colo_a() -', 'colo_b() -'): ['colo_a'],
        good.replace('/**', '/*'): ['colo_a'],
    }
    return ['this check does not see what is wrong in:\n' + text
            for text, wanted in cases.items() if uncommented(text)[0] != wanted]


def main():
    wrong, seen = finds_what_is_planted(), []
    for header in headers():
        missing, names = uncommented((INCLUDE / header).read_text())
        seen += names
        wrong += ['%s: %s() has no comment of its own directly above; write /** %s() - ... */'
                  % (header, name, name) for name in missing]
    wrong += ['%s: this check does not see its declaration' % name
              for name in sorted(set(declared()) - set(seen))]
    print('\n'.join(wrong) or '%d exported functions, each with a comment' % len(seen))
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
