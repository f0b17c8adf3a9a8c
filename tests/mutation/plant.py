# SPDX-License-Identifier: Apache-2.0
"""Reads mutants.json: tells Meson what to build, and writes the source of one mutant.

usage: plant.py LIST --list              lines for meson.build, fields separated by tabs, "-" empty
       plant.py LIST --plant NAME OUT    the mutant's source with its bug in place
       plant.py LIST --plant-all FOLDER  those of all mutants, as mutant-NAME--SOURCE; same ones stay untouched
       plant.py --check                  does each mutant of the tree still find its text?
A mutant's old text must occur exactly once in its source: code that moved on must not leave a mutant
behind that changes nothing, or something else.
"""
import fnmatch
import functools
import importlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def text(value):
    return '\n'.join(value) if isinstance(value, list) else value


def load(path):
    what = json.loads(Path(path).read_text())
    names = [m['name'] for m in what['mutants']]
    for name in names:
        if names.count(name) > 1:
            sys.exit('%s: two mutants are named "%s"' % (path, name))
    return what


def mutated(mutant):
    source = (ROOT / mutant['source']).read_text()
    old, new = text(mutant['old']), text(mutant['new'])
    count = source.count(old)
    if count != 1 or not old:
        sys.exit('mutant "%s": its old text occurs %d times in %s, expected once:\n%s'
                 % (mutant['name'], count, mutant['source'], old))
    if old == new and mutant.get('killed_by'):
        sys.exit('mutant "%s": changes nothing and expects to be killed' % mutant['name'])
    at = source.index(old)
    line = source.count('\n', 0, at) + 1
    after = line + old.count('\n')
    rest = source[at + len(old):]
    # Line numbers stay those of the source, whatever the length of the new text.
    head, tail = rest.split('\n', 1)
    return '#line 1 "%s"\n%s%s%s\n#line %d\n%s' % (
        mutant['source'], source[:at], new, head, after + 1, tail)


def sources(program):
    out = []
    for pattern in program['sources']:
        found = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob(pattern))
        if not found:
            sys.exit('mutants: no file %s' % pattern)
        out += found
    return out


def default_program(folder, name):
    """A test program: test_NAME.c next to the list, or else in another folder of tests/."""
    same = folder / ('test_%s.c' % name)
    found = [same] if same.exists() else [
        p for p in ROOT.glob('tests/*/' + same.name) if p.parent.name != 'gpu']
    if len(found) != 1:
        sys.exit('mutants: "%s" is not listed and %d files in tests/ are named %s, expected one'
                 % (name, len(found), same.name))
    return {'sources': [str(found[0].relative_to(ROOT))]}


@functools.lru_cache(maxsize=None)
def cases_in(source):
    """The cases of a CMocka program that T_CASES can choose; None if this is no such program."""
    content = (ROOT / source).read_text()
    return re.findall(r'^T_CASE\((\w+)\)', content, re.M) if re.search('T_CASE|cmocka_unit_test', content) else None


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
            mine = sources(programs[name])
            own = [s for s in mine if s != mutant['source']] if mutant['source'] in mine else []
            test = default_program(folder, called) if args and called in judged else programs[name]
            args, cases = split_run(mutant['name'], args, test)
            mutants.append(('mutant', mutant['name'], mutant['source'], color, called, args,
                            ','.join(own) or '-', name, called if called in judged else '-', cases))
    for name, program in programs.items():
        needs = ','.join(program.get('needs', [])) or '-'
        c_args = ' '.join(program.get('c_args', [])).replace('@ROOT@', str(ROOT)) or '-'
        print('program', name, needs, ','.join(sources(program)), c_args, sep='\t')
    for fields in mutants:
        print(*fields, sep='\t')


def of_python():
    """The rows of python/tests/mutants.py."""
    sys.path.insert(0, str(ROOT / 'python/tests'))
    for name, (source, old, new, *_) in importlib.import_module('mutants').MUTANTS.items():
        yield {'name': name, 'source': 'python/colobridge/' + source, 'old': old, 'new': new}


def check():
    wrong = 0
    mutants = [m for path in sorted(ROOT.glob('tests/*/mutants.json')) for m in load(path)['mutants']]
    mutants += of_python()
    for mutant in mutants:
        try:
            mutated(mutant)
        except (SystemExit, OSError) as e:
            wrong += 1
            print(e)
    print('%d mutants, %d do not find their text' % (len(mutants), wrong))
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
    elif len(args) == 3 and args[1] == '--plant-all':
        for mutant in load(args[0])['mutants']:
            out = Path(args[2], 'mutant-%s--%s' % (mutant['name'], Path(mutant['source']).name))
            source = mutated(mutant)
            if not out.exists() or out.read_text() != source:
                out.write_text(source)
    else:
        sys.exit(__doc__)


if __name__ == '__main__':
    main(sys.argv[1:])
