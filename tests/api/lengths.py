# SPDX-License-Identifier: Apache-2.0
"""No source file is longer than 600 lines (CONTRIBUTING.md): a longer one does more than one thing. No folder
of the table is longer than it may be.

usage: lengths.py [--table]
--table prints the folders' lines and how many of their words have one letter, too; that is no verdict.
"""
import re
import sys

from api import ROOT

MOST = 600
FOLDERS = 'include', 'src', 'kernels', 'tools', 'tests', 'bench', 'examples', 'python'
ENDINGS = '.c', '.h', '.cu', '.cuh', '.py', '.sh', '.build'
# (folders, the goal in lines, what they may have). Where the goal is not met, lower the last figure to what is there plus
# 1 % when you made a folder shorter, and to the goal plus 3 % at the end. Raise it only for a feature, in its commit.
ROWS = (
    (('src/comm',), 10200, 10952),
    (('src/bridge',), 8600, 11237),
    (('src/loss',), 7200, 7815),
    (('src/core', 'src/cuda', 'src/grid'), 6300, 7038),
    (('python/colobridge',), 8300, 10573),
    (('tools',), 10200, 11517),
    (('tests',), 57000, 60230),
)


def longer(lengths):
    return ['%s: %d lines, expected at most %d; split it by what it does' % (name, n, MOST)
            for name, n in sorted(lengths.items()) if n > MOST]


def of(folders, files):
    return {name: value for name, value in files.items() if name.startswith(tuple(f + '/' for f in folders))}


def lines_of(folders, lengths):
    return sum(of(folders, lengths).values())


def larger(rows, lengths):
    return ['%s: %d lines, expected at most %d (the goal is %d); say it shorter, or make another part of it shorter'
            % (' + '.join(folders), lines_of(folders, lengths), most, goal)
            for folders, goal, most in rows if lines_of(folders, lengths) > most]


def finds_what_is_planted():
    rows = ((('a',), 5, 6), (('b', 'c'), 5, 6))
    return (len(longer({'a.c': MOST, 'b.c': MOST + 1})) == 1
            and [m.split(':')[0] for m in larger(rows, {'a/x.c': 6, 'ab/y.c': 9, 'b/x.c': 4, 'c/y.c': 3})] == ['b + c'])


def words(text):
    """The words of a program without those of its comments and strings."""
    strings = r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.findall(r'\b[A-Za-z_]\w*', re.sub(strings + r'|/\*(?:.|\n)*?\*/|(?<!\w)# [^\n]*|//[^\n]*', ' ', text))


def table(lengths, texts):
    print('%-34s %7s %7s %7s %12s' % ('lines', 'now', 'goal', 'at most', 'one letter'))
    for folders, goal, most in ROWS:
        found = [w for text in of(folders, texts).values() for w in words(text)]
        print('%-34s %7d %7d %7d %10.1f %%' % (' + '.join(folders), lines_of(folders, lengths), goal, most,
                                              100 * sum(len(w) == 1 for w in found) / len(found)))


def main(*more):
    paths = [p for folder in FOLDERS for p in (ROOT / folder).rglob('*')
             if p.suffix in ENDINGS or p.name == 'meson.build']
    texts = {p.relative_to(ROOT).as_posix(): p.read_text() for p in paths if p.is_file()}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    wrong = longer(lengths) + larger(ROWS, lengths)
    if not finds_what_is_planted():
        wrong.append('this check does not find a file of %d lines, or a folder that is too long' % (MOST + 1))
    if '--table' in more:
        table(lengths, texts)
    print('\n'.join(wrong) or 'all %d files have at most %d lines, all folders what they may have' % (len(paths), MOST))
    return len(wrong) > 0


sys.exit(main(*sys.argv[1:]))
