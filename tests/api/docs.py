# SPDX-License-Identifier: Apache-2.0
"""What the pages say can be found: error messages that docs/reference/errors.md quotes stand in the code,
links between pages lead to files and to headings in them, and so do the names of pages in the sources.

A quote is the code span a table row begins with; its "…" stand for what the code prints there. Text
of the sources is compared as the compiler sees it: string literals joined, conversions as "…".
"""
import re
import sys

from api import ROOT

# Where comments and error messages name pages
SOURCES = 'include', 'src', 'kernels', 'python', 'tools', 'tests', 'bench', 'examples', '.github'
SUFFIXES = '.h', '.c', '.cu', '.cuh', '.py', '.sh', '.build', '.yml'

LITERAL = r'"(?:[^"\\\n]|\\.)*"'
CONVERSION = r'%[-+ 0#]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|z|j|t)?[diouxXcsfgeEpG]'


def error_messages():
    """The texts of all C strings and shell lines, one a line, with … where a value goes."""
    found = []
    for folder in ('src', 'include', 'tools', 'examples/captioner'):
        for path in sorted((ROOT / folder).rglob('*.h' if folder == 'include' else '*.c')):
            text = re.sub(r'/\*.*?\*/', ' ', path.read_text(), flags=re.S)
            for run in re.findall(r'%s(?:\s*(?:PRI\w+|[A-Z_]{4,}|%s))*' % (LITERAL, LITERAL), text):
                parts = re.findall(r'%s|\w+' % LITERAL, run)
                said = ''.join(p[1:-1] if p[0] == '"' else '\0' for p in parts)
                said = re.sub(r'%[-+ 0#\d]*\0', '…', said).replace('\0', '…')
                said = re.sub(CONVERSION, '…', said).replace('%%', '%')
                found.append(re.sub(r'\\(.)', r'\1', said))
    for path in sorted((ROOT / 'tools').glob('*.sh')):
        found.append(re.sub(r'\$\{?\w+\}?', '…', path.read_text()))
    return '\n'.join(found)


def headings(path):
    """The headings of a page, as links name them."""
    text = re.sub(r'```.*?```', '', path.read_text(), flags=re.S)
    return [re.sub(r'[^\w\- ]', '', h.lower()).replace(' ', '-') for h in re.findall(r'^#+ (.*)$', text, re.M)]


def unread(text):
    """Lines that GitHub shows as a list, a table or code, and mkdocs as text"""
    code, before = False, ''
    for line in text.split('\n'):
        starts = not code and re.match(r'( *)(?:(?P<item>[-*]|\d+\.) |(?P<table>\|)|```)', line)
        goes_on = starts and (starts['item'] and re.match(r' |([-*]|\d+\.) ', before) or starts['table'] and before.startswith('|'))
        if starts and (starts['item'] and len(starts[1]) in (1, 2, 3) or not goes_on and before.strip() and before[:4] != '<!--'):
            yield line
        code ^= line.lstrip().startswith('```')
        before = line


def main():
    bad = 0
    code = error_messages()
    page = (ROOT / 'docs/reference/errors.md').read_text()
    quotes = re.findall(r'^\| (`.*?`) \| ', page, re.M)
    for quote in quotes:
        # `a …`…`b` is one error message that is not quoted without a gap.
        for key in re.findall(r'`([^`]*)`', quote):
            if len(key) > 2 and key not in code:
                bad += 1
                print('docs/reference/errors.md: nothing says "%s"' % key)
    links = 0
    pages = sorted((ROOT / 'docs').rglob('*.md'))
    for path in sorted(ROOT.glob('*.md')) + pages + sorted((ROOT / 'bench/results').glob('*.md')):
        for line in unread(path.read_text()):
            bad += 1
            print('%s: mkdocs wants an empty line, or 4 spaces, before "%s"' % (path.relative_to(ROOT), line))
        text = re.sub(r'```.*?```', '', path.read_text(), flags=re.S)
        for target, heading in re.findall(r'\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)', text):
            if '://' in target:
                continue
            links += 1
            to = path.parent / target if target else path
            if not to.exists() or (heading and heading not in headings(to)):
                bad += 1
                print('%s: there is no %s' % (path.relative_to(ROOT), target + '#' * bool(heading) + heading))
    for path in (path for folder in SOURCES for path in sorted((ROOT / folder).rglob('*')) if path.suffix in SUFFIXES):
        for target, heading in re.findall(r'\b((?:docs|bench/results)/[\w/-]+\.md)(?:#([\w-]+))?', path.read_text()):
            links += 1
            if not (ROOT / target).exists() or (heading and heading not in headings(ROOT / target)):
                bad += 1
                print('%s: there is no %s' % (path.relative_to(ROOT), target + '#' * bool(heading) + heading))
    index = (ROOT / 'docs/index.md').read_text()
    for name in (str(path.relative_to(ROOT / 'docs')) for path in pages):
        if name != 'index.md' and '(%s)' % name not in index:
            bad += 1
            print('docs/index.md: no link to %s' % name)
    print('%d quotes, %d links, %d bad' % (len(quotes), links, bad))
    return 1 if bad or not quotes or not links else 0


sys.exit(main())
