# SPDX-License-Identifier: Apache-2.0
"""Reads mutants.json: tells Meson what to build, and writes sources with bugs in them.

usage: plant.py LIST --list                 lines for meson.build, fields separated by tabs, "-" empty
       plant.py LIST --plant NAME OUT       the mutant's source with its bug in place
       plant.py --sources LIST...           lines "source, what a build must have to compile it" of all mutants
       plant.py --plant-all FOLDER LIST...  each of these with all of its bugs; same ones stay untouched
       plant.py --check                     does each mutant of the tree still find its text?
A mutant's old text must occur exactly once in its source: code that moved on must not leave a mutant
behind that changes nothing, or something else. In a source with all of its bugs, a function that has some
is there once for each and once as it was, and T_MUTANT names the mutant that runs.
"""
import collections
import fnmatch
import functools
import importlib
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALONE = 'gpu', 'tests'  # folders of lists whose mutants are planted each in a copy of its own


def text(value):
    return '\n'.join(value) if isinstance(value, list) else value


def load(path):
    def once(pairs):
        """JSON itself lets the last one of two members of a name win."""
        for name, count in collections.Counter(name for name, _ in pairs).items():
            if count > 1:
                sys.exit('%s: two are named "%s"' % (path, name))
        return dict(pairs)
    what = json.loads(Path(path).read_text(), object_pairs_hook=once)
    # A name stands for one mutant, whatever its source.
    what['mutants'] = list(once([(name, {'name': name, 'source': source, **mutant})
                                 for source, of in what['mutants'].items() for name, mutant in of.items()]).values())
    return what


@functools.lru_cache(maxsize=None)
def read(source):
    """Its text. Headers of functions that host and kernels share (src/loss/stat.h) come first, before an include that
    would bring them without their bugs."""
    headers = []

    def shared(include):
        header = ROOT / 'src' / include[1]
        content = header.read_text() if header.exists() else ''
        if '\nCOLO_EITHER ' not in content:
            return include[0]
        headers.append(content)
        return '\n'
    text_of = re.sub(r'^#include "(loss/[\w-]+\.h)"\n', shared, (ROOT / source).read_text(), flags=re.M)
    headers.sort(key=lambda content: content.count('#include "loss/'))  # those that others include before these
    return re.sub(r'^(?=#include)', lambda _: ''.join(headers), text_of, count=1, flags=re.M)


def edit(mutant):
    """(source, where the old text begins, where it ends, new text)"""
    source = read(mutant['source'])
    old, new = text(mutant['old']), text(mutant['new'])
    count = source.count(old)
    if count != 1 or not old:
        sys.exit('mutant "%s": its old text occurs %d times in %s, expected once:\n%s'
                 % (mutant['name'], count, mutant['source'], old))
    if old == new and mutant.get('killed_by'):
        sys.exit('mutant "%s": changes nothing and expects to be killed' % mutant['name'])
    at = source.index(old)
    return source, at, at + len(old), new


def line_of(source, at):
    return source.count('\n', 0, at) + 1


def mutated(mutant):
    source, begin, end, new = edit(mutant)
    # Line numbers stay those of the source, whatever the length of the new text.
    head, tail = source[end:].split('\n', 1)
    return '#line 1 "%s"\n%s%s%s\n#line %d\n%s' % (
        mutant['source'], source[:begin], new, head, line_of(source, end) + 1, tail)


def function_of(mutant):
    """(where the body of the function begins that has the bug, where it ends, the body with the bug)"""
    source, begin, end, new = edit(mutant)
    # what both texts begin and end with may lie elsewhere
    same = len(os.path.commonprefix([source[begin:end], new]))
    begin, new = begin + same, new[same:]
    same = len(os.path.commonprefix([source[begin:end][::-1], new[::-1]]))
    end, new = end - same, new[:len(new) - same]
    for body in re.finditer(r'^\{\n.*?^\}$', source, re.M | re.S):
        if body.start() < begin and end < body.end():
            return body.start(), body.end(), source[body.start():begin] + new + source[end:body.end()]
    sys.exit('mutant "%s": its text in %s is in no function' % (mutant['name'], mutant['source']))


def block(body):
    """The body of a function as one of several blocks of it, with labels of its own"""
    labels = sorted(set(re.findall(r'^(\w+):$', body, re.M)))
    return body.replace('{', '{\n__label__ %s;' % ', '.join(labels), 1) if labels else body


CHOOSES = r"""
#include <stdlib.h>
#include <string.h>
__attribute__((constructor(101))) static void t_choose_mutant(void)
{
    static const char *const names[] = {%s};
    const char *name = getenv("T_MUTANT");
    for (int i = 0; name && i < (int)(sizeof names / sizeof names[0]); i++)
        if (strcmp(name, names[i]) == 0)
            t_mutant = i + 1;
}
"""


def with_all(path, mutants):
    """The source with all of these mutants"""
    source, out, done = read(path), ['static int t_mutant;\n#line 1 "%s"\n' % path], 0
    bugs = collections.defaultdict(list)
    for i, mutant in enumerate(mutants):
        begin, end, body = function_of(mutant)
        bugs[begin, end].append((i + 1, body))
    for (begin, end), bodies in sorted(bugs.items()):
        line = '\n#line %d\n' % line_of(source, begin)
        out += [source[done:begin], '{\n']
        out += ['if (t_mutant == %d)%s%s\nelse ' % (number, line, block(body)) for number, body in bodies]
        out += [line, block(source[begin:end]), '\n#line %d\n}' % line_of(source, end)]
        done = end
    out += [source[done:], CHOOSES % ', '.join('"%s"' % mutant['name'] for mutant in mutants)]
    return ''.join(out)


def sources(program):
    out = []
    for pattern in program['sources']:
        found = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob(pattern))
        if not found:
            sys.exit('mutants: no file %s' % pattern)
        out += found
    return out


def default_program(folder, name):
    """A test program: test_NAME.c next to the list, or else in another folder of tests/, in gpu if in no other; a judge is
    a test_NAME.py."""
    same = folder / ('test_%s.c' % name)
    every = [p for p in ROOT.glob('tests/*/test_%s.*' % name) if p.suffix in ('.c', '.py')]
    found = [same] if same.exists() else [p for p in every if p.parent.name != 'gpu'] or every
    if len(found) != 1:
        sys.exit('mutants: "%s" is not listed and %d files in tests/ are named %s, expected one'
                 % (name, len(found), same.name))
    return {'sources': [str(found[0].relative_to(ROOT))]}


@functools.lru_cache(maxsize=None)
def cases_in(source):
    """The cases of a CMocka program, or of one in Python that prints as it does, that T_CASES can choose; None if this is
    no such program."""
    content = (ROOT / source).read_text()
    if source.endswith('.py'):
        return re.findall(r'^@case.*\ndef (\w+)\(', content, re.M)
    if not re.search('T_CASE|cmocka_unit_test', content):
        return None
    named = r'^T_CASE(?:\w*_FOR\((?:[A-Z0-9]+, )?|_(?:ON|IF)\w*\((?:.*, )?|\()(\w+)[,)]'
    return re.findall(named, content, re.M)


def split_run(mutant, args, program):
    """(arguments, pattern of the cases to run): of CMocka programs all that follows the name is the pattern."""
    lists = [cases_in(source) for source in sources(program) if args and cases_in(source) is not None]
    if not lists:
        return args or '-', '-'
    if not any(fnmatch.filter(cases, args) for cases in lists):
        sys.exit('mutant "%s": no case of %s is named %s' % (mutant, ', '.join(sources(program)), args))
    return '-', args


def listing(what, folder):
    programs, judged, mutants = {}, {}, []
    for name, program in what.get('programs', {}).items():
        programs[name] = program
        judged.update({judge: name for judge in program.get('judges', [])})
    for mutant in what['mutants']:
        runs = [(color, run) for color in ('killed', 'survived') for run in mutant.get(color + '_by', [])]
        if not runs:
            sys.exit('mutant "%s": neither "killed_by" nor "survived_by"' % mutant['name'])
        for color, run in runs:
            called, _, args = run.partition(' ')
            name = judged.get(called, called)
            if name not in programs:
                programs[name] = default_program(folder, name)
            if not mutant['source'].startswith(('src/', 'kernels/')) and mutant['source'] not in sources(programs[name]):
                sys.exit('mutant "%s": program %s has no source %s' % (mutant['name'], name, mutant['source']))
            test = default_program(folder, called) if args and called in judged else programs[name]
            args, cases = split_run(mutant['name'], args, test)
            mutants.append(('mutant', mutant['name'], mutant['source'], color, called, args,
                            name, called if called in judged else '-', cases))
    for name, program in programs.items():
        needs = ','.join(program.get('needs', [])) or '-'
        c_args = ' '.join(program.get('c_args', [])).replace('@ROOT@', str(ROOT)) or '-'
        print('program', name, needs, ','.join(sources(program)), c_args, sep='\t')
    for fields in mutants:
        print(*fields, sep='\t')


def by_source(paths):
    """{source: its mutants}, {source: what every program needs that kills one of them}"""
    mutants, needs = collections.defaultdict(list), {}
    for path in paths:
        what = load(path)
        judged = {judge: p for p in what.get('programs', {}).values() for judge in p.get('judges', [])}
        for mutant in what['mutants']:
            mutants[mutant['source']].append(mutant)
            for run in mutant.get('killed_by', []) + mutant.get('survived_by', []):
                name = run.split(' ')[0]
                program = judged.get(name, what.get('programs', {}).get(name, {}))
                needs.setdefault(mutant['source'], set(program.get('needs', []))).intersection_update(program.get('needs', []))
    for source, of in mutants.items():
        names = [m['name'] for m in of]
        for name in names:
            if names.count(name) > 1:
                sys.exit('%s: two mutants are named "%s"' % (source, name))
    return mutants, needs


def planted_name(source):
    return 'planted-' + source.replace('/', '-')


def of_python():
    """The rows of python/tests/mutants.py."""
    sys.path.insert(0, str(ROOT / 'python/tests'))
    for name, (source, old, new, *_) in importlib.import_module('mutants').MUTANTS.items():
        yield {'name': name, 'source': 'python/colobridge/' + source, 'old': old, 'new': new}


def check():
    wrong = 0
    lists = {path: load(path)['mutants'] for path in sorted(ROOT.glob('tests/*/mutants.json'))}
    lists[ROOT / 'python/tests/mutants.py'] = list(of_python())
    for path, mutants in lists.items():
        for mutant in mutants:
            try:
                if path.parent.name in ALONE:
                    edit(mutant)
                else:
                    function_of(mutant)
            except (SystemExit, OSError) as e:
                wrong += 1
                print(e)
    print('%d mutants, %d do not find their text' % (sum(map(len, lists.values())), wrong))
    return wrong > 0


def main(args):
    if args == ['--check']:
        sys.exit(check())
    elif len(args) == 2 and args[1] == '--list':
        listing(load(args[0]), Path(args[0]).resolve().parent)
    elif len(args) == 4 and args[1] == '--plant':
        for mutant in load(args[0])['mutants']:
            if mutant['name'] == args[2]:
                Path(args[3]).write_text(mutated(mutant))
                return
        sys.exit('no mutant "%s"' % args[2])
    elif args[:1] == ['--sources']:
        for source, needs in by_source(args[1:])[1].items():
            print(source, planted_name(source), ','.join(sorted(needs)) or '-', sep='\t')
    elif len(args) > 2 and args[0] == '--plant-all':
        for source, mutants in by_source(args[2:])[0].items():
            out, content = Path(args[1], planted_name(source)), with_all(source, mutants)
            if not out.exists() or out.read_text() != content:
                out.write_text(content)
    else:
        sys.exit(__doc__)


if __name__ == '__main__':
    main(sys.argv[1:])
