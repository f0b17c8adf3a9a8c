# SPDX-License-Identifier: Apache-2.0
"""Reads with nm which objects of the library use each other's symbols, and fails on

- a circle of objects of src/ that CIRCLES does not have, or one that has grown,
- an object of CIRCLES that is in none any more: it leaves the list, which only gets shorter,
- a use that runs up: core <- grid <- comm <- bridge, loss; inside src/bridge layout <- plan <- run <- ragged <-
  the files of bridge/ itself; or a use of comm/ or core/device by layout or plan.

usage: circles.py NM ARCHIVE [--table]
--table prints what the design of src/bridge is measured by, too; that is no verdict.
"""
import re
import subprocess
import sys

from api import ROOT

# Objects that use each other, directly or through others. Nothing may be added.
CIRCLES = (
)
FOLDERS = {'core': 0, 'grid': 1, 'comm': 2, 'bridge': 3, 'loss': 3}
LEVELS = {'layout': 0, 'plan': 1, 'run': 2, 'ragged': 3}
# Uses that run up. Nothing may be added.
UP = set()
LONG = 7  # parameters


def uses_of(nm, archive, sources):
    """{file: {files whose symbols it uses}} of the sources whose objects the archive has."""
    names = {path.replace('/', '_') + '.o': path for path in sources}
    defined, wanted = {}, {}
    for line in subprocess.run([*nm, '-A', '-P', '-g', archive], check=True, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL).stdout.splitlines():
        member, symbol, kind = re.match(r'.*\[(?:.*/)?([^/\]]+)\]: (\S+) (\S)', line).groups()
        path = names.get(member)
        if not path:
            continue
        wanted.setdefault(path, set())
        if kind in 'Uw':
            wanted[path].add(symbol)
        else:
            defined[symbol] = path
    return {path: {defined[s] for s in symbols if s in defined} - {path} for path, symbols in wanted.items()}


def circles_of(uses):
    """Sets of files that use each other, of two and more (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(path):
        index[path] = low[path] = len(index)
        stack.append(path)
        for other in sorted(uses[path]):
            if other not in index:
                visit(other)
            if other in stack:
                low[path] = min(low[path], low[other])
        if low[path] == index[path]:
            at = stack.index(path)
            if len(stack) - at > 1:
                found.append(frozenset(stack[at:]))
            del stack[at:]

    for path in sorted(uses):
        if path not in index:
            visit(path)
    return found


def level(path):
    """Where a file of src/bridge stands; None: another folder."""
    parts = path.split('/')
    return None if parts[0] != 'bridge' else LEVELS[parts[1]] if len(parts) > 2 else len(LEVELS)


def runs_up(path, other):
    if FOLDERS[other.split('/')[0]] > FOLDERS[path.split('/')[0]]:
        return True
    if level(path) is None:
        return False
    if level(other) is None:
        return level(path) < LEVELS['run'] and (other.startswith('comm/') or other == 'core/device-host.c')
    return level(other) > level(path)


def mistakes(uses, known, known_up):
    found, now = [], circles_of(uses)
    for circle in now:
        if not any(circle <= frozenset(k) for k in known):
            found.append('a circle that is new, or has grown: ' + ' '.join(sorted(circle)))
    for k in known:
        left = sorted(set(k) - {path for circle in now for path in circle})
        found += ['%s is in no circle any more; take it off the list' % path for path in left]
    up = {(path, other) for path in uses for other in uses[path] if runs_up(path, other)}
    found += ['%s uses %s, which is above it' % pair for pair in sorted(up - known_up)]
    found += ['%s does not use %s any more; take it off the list' % pair for pair in sorted(known_up - up)]
    return found


def finds_what_is_planted():
    uses = {'bridge/a.c': {'bridge/b.c'}, 'bridge/b.c': {'bridge/c.c'}, 'bridge/c.c': {'bridge/a.c'},
            'bridge/plan/d.c': {'bridge/a.c', 'comm/e.c'}, 'comm/e.c': set(), 'core/f.c': {'comm/e.c'}}
    wanted = {'a circle that is new, or has grown: bridge/a.c bridge/b.c bridge/c.c',
              'core/f.c is in no circle any more; take it off the list',
              'core/f.c uses comm/e.c, which is above it',
              'bridge/plan/d.c uses bridge/a.c, which is above it',
              'bridge/plan/d.c uses comm/e.c, which is above it',
              'bridge/c.c does not use bridge/b.c any more; take it off the list'}
    found = mistakes(uses, [('bridge/a.c', 'bridge/b.c'), ('core/f.c', 'comm/e.c')], {('bridge/c.c', 'bridge/b.c')})
    return sorted(wanted - set(found))


# ---- the table ----

def stripped(text):
    return re.sub(r'"(?:\\.|[^"\\])*"|/\*.*?\*/', ' ', text, flags=re.S)


def fields(text, struct):
    """Names that a struct declares; those of a struct in it count, too."""
    body = re.search(r'struct %s \{(.*?)\n\}' % struct, stripped(text), re.S)
    declarations = re.findall(r'[^;{}]+;', body.group(1)) if body else []
    return sum(len(re.split(r',', d)) for d in declarations)


def parameters(text):
    """(function, how many parameters) of all that a file defines."""
    for name, rest in re.findall(r'^[a-z][\w \*]*?\b(\w+)\(([^;{]*?)\)\s*\n\{', stripped(text), re.M | re.S):
        yield name, rest.count(',') + 1 - len(re.findall(r'\([^()]*,[^()]*\)', rest))


def table(uses):
    files = {p.relative_to(ROOT / 'src').as_posix(): p.read_text() for p in (ROOT / 'src/bridge').rglob('*.[ch]')}
    headers = '\n'.join(text for path, text in files.items() if path.endswith('.h'))
    pairs = [(path, other) for path in uses if level(path) is not None for other in uses[path]]
    inside = [pair for pair in pairs if level(pair[1]) is not None]
    words = [w for text in files.values() for w in re.findall(r'\b[A-Za-z_]\w*', stripped(text))]
    long = ['%s (%s)' % (name, path) for path, text in sorted(files.items()) for name, n in parameters(text) if n >= LONG]

    def that_test(pattern, own):
        return [p for p, text in files.items() if not re.search(own, p) and re.search(pattern, stripped(text))]
    rows = (('circles between objects in src/', len(circles_of(uses)), 0),
            ('arrows up inside src/bridge, of %d' % len(inside), sum(runs_up(*p) for p in inside), 0),
            ('files that test "ragged" outside their producer',
             len(that_test(r'(?:->|\.)ragged\b', r'ragged|segments')), 0),
            ('files that ask for reach outside their carrier', len(that_test(r'\bcolo_direct_near\b', r'direct|transfers')), 0),
            ('lines of src/bridge', sum(len(t.splitlines()) for t in files.values()), 8600),
            ('fields of colo_builder_t', fields(headers, 'colo_builder'), 25),
            ('fields of colo_bridge_t', fields(headers, 'colo_bridge'), 18),
            ('functions with %d parameters and more' % LONG, len(long), 8),
            ('words of one letter, percent', round(100 * sum(len(w) == 1 for w in words) / len(words), 1), 8))
    print('%-50s %8s %8s' % ('', 'now', 'goal'))
    for row in rows:
        print('%-50s %8s %8s' % row)
    print('\n'.join(['functions with %d parameters and more:' % LONG] + ['  ' + f for f in long]))


def main(nm, archive, *more):
    sources = [p.relative_to(ROOT / 'src').as_posix() for p in (ROOT / 'src').rglob('*.c')]
    uses = uses_of(nm.split(), archive, sources)
    found = ['this check does not find: ' + m for m in finds_what_is_planted()]
    found += mistakes(uses, CIRCLES, UP)
    if len(uses) < 50:
        found.append('%d objects in %s, expected those of src/' % (len(uses), archive))
    if '--table' in more:
        table(uses)
    print('\n'.join(found) or '%d objects; no circle or arrow that is not known' % len(uses))
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
