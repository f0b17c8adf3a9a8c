# SPDX-License-Identifier: Apache-2.0
"""No source file is longer than 600 lines (CONTRIBUTING.md): a longer one does more than one thing."""
import sys

from api import ROOT

MOST = 600
FOLDERS = 'include', 'src', 'kernels', 'tools', 'tests', 'bench', 'examples', 'python'
ENDINGS = '.c', '.h', '.cu', '.cuh', '.py', '.sh', '.build'


def longer(lengths):
    return ['%s: %d lines, expected at most %d; split it by what it does' % (name, n, MOST)
            for name, n in sorted(lengths.items()) if n > MOST]


def main():
    paths = [p for folder in FOLDERS for p in (ROOT / folder).rglob('*')
             if p.suffix in ENDINGS or p.name == 'meson.build']
    wrong = longer({str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in paths if p.is_file()})
    if len(longer({'a.c': MOST, 'b.c': MOST + 1})) != 1:
        wrong.append('this check does not find a file of %d lines' % (MOST + 1))
    print('\n'.join(wrong) or 'all %d files have at most %d lines' % (len(paths), MOST))
    return len(wrong) > 0


sys.exit(main())
