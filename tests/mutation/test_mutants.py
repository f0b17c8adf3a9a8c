# SPDX-License-Identifier: Apache-2.0
"""plant.py refuses text that is missing or occurs twice, here and in each list; must-fail.py takes no excuse."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = 'src/core/tensor.c'
bad = 0


def expect(what, got, want):
    global bad
    if got != want:
        bad += 1
        print('%s: %s, expected %s' % (what, got, want))


def plant(folder, old, new, *how, sources=(SOURCE,), **more):
    mutant = dict({'old': old, 'new': new, 'killed_by': ['p']}, **more)
    path = folder / 'list.json'
    path.write_text(json.dumps({'programs': {'p': {'sources': ['tests/mutation/sample.c']}},
                                'mutants': {source: {'m': mutant} for source in sources}}))
    how = how or ('--plant', 'm', str(folder / 'out.c'))
    done = subprocess.run([sys.executable, '-B', str(HERE / 'plant.py'), str(path), *how],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode


def choose(folder, mutants):
    """What a program does without a mutant and with each, which are (name, old text, new text) in its source"""
    path, source = folder / 'list.json', 'tests/mutation/chosen.c'
    path.write_text('{"mutants": {"%s": {%s}}}' % (source, ', '.join(
        '"%s": %s' % (name, json.dumps({'old': old, 'new': new, 'killed_by': ['p']})) for name, old, new in mutants)))
    planted, program = folder / 'planted-tests-mutation-chosen.c', folder / 'chosen'
    if subprocess.run([sys.executable, '-B', str(HERE / 'plant.py'), '--plant-all', str(folder), str(path)],
                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        return None
    subprocess.run([os.environ.get('CC', 'cc'), '-Wall', '-Werror', '-o', program, planted], check=True)
    return {name: subprocess.run([program], env={'T_MUTANT': name}, stdout=subprocess.PIPE, text=True).stdout.strip()
            for name in ['', *(name for name, _, _ in mutants)]}


def judge(folder, script, *options):
    program = folder / 'program.sh'
    program.write_text('#!/bin/sh\n' + script)
    program.chmod(0o755)
    return subprocess.run([sys.executable, '-B', str(HERE / 'must-fail.py'), *options, str(program)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT).returncode


RAN = '''echo '[==========] Running 1 test(s).'
echo '[ RUN      ] x'
echo '[  %8s] x'
echo '[==========] 1 test(s) run.'
'''
NONE = '''echo '[==========] Running 0 test(s).'
echo '[==========] 0 test(s) run.'
'''
FAILS, PASSES = RAN % 'FAILED  ', RAN % '     OK '

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    expect('text that occurs once', plant(folder, 'tensor.shape[axis] = length;', 'bug;'), 0)
    mutant = (folder / 'out.c').read_text()
    expect('the bug is in', mutant.count('bug;'), 1)
    expect('the old text is gone', mutant.count('tensor.shape[axis] = length;'), 0)
    expect('lines', plant(folder, ['    tensor.shape[axis] = length;', '    return tensor;'], 'x'), 0)
    expect('text that is not there', plant(folder, 'no such text', 'bug;'), 1)
    expect('text that occurs often', plant(folder, 'return', 'bug;'), 1)
    expect('no text', plant(folder, '', 'bug;'), 1)
    for program, code in (('p', 0), ('grid', 0), ('no_such_program', 1), ('linear', 0), ('ragged', 0)):
        expect('a list that names the program %s' % program,
               plant(folder, 'return', 'bug;', '--list', killed_by=[program]), code)
    for run, code in (('grid the_first_dim*', 0), ('grid no_such_case', 1), ('p no_such_case', 1),
                      ('product a_rows*', 0), ('product a_cblas_that*', 0)):
        expect('a list that runs %s' % run, plant(folder, 'return', 'bug;', '--list', killed_by=[run]), code)
    expect('two sources with mutants of a name', plant(
        folder, 'return', 'bug;', '--list', sources=(SOURCE, 'src/core/tape.c')), 1)
    expect('the lists of the tree', subprocess.run([sys.executable, '-B', str(HERE / 'plant.py'), '--check']).returncode, 0)
    expect('killed without a change', plant(folder, 'axis] = length;', 'axis] = length;'), 1)

    expect('a source with all of its mutants', choose(folder, [
        ('one', 'x == 1', 'x == 2'), ('two', 'return 10;', 'return 20;'), ('label', 'r += 100;\nout:', 'r += 200;\nout:'),
        ('across', '    return r;\n}\n\nint main(void)', '    return r + 1000;\n}\n\nint main(void)')]),
        {'': '10 0 100 line 27', 'one': '0 10 100 line 27', 'two': '20 0 100 line 27',
         'label': '10 0 200 line 27', 'across': '1010 1000 1100 line 27'})
    expect('text outside of functions', choose(folder, [('table', '{7}', '{8}')]), None)
    expect('two mutants of a name', choose(folder, [('one', 'x == 1', 'x == 2'), ('one', 'return 10;', '')]), None)

    expect('a failed case is killed', judge(folder, FAILS + 'exit 1'), 0)
    expect('a failed case has not survived', judge(folder, FAILS + 'exit 1', '--survives'), 1)
    expect('all passed is not killed', judge(folder, PASSES + 'exit 0'), 1)
    expect('all passed has survived', judge(folder, PASSES + 'exit 0', '--survives'), 0)
    expect('no case ran is not killed', judge(folder, NONE + 'exit 0'), 1)
    expect('a status that no case explains', judge(folder, PASSES + 'exit 3'), 1)
    expect('a signal', judge(folder, PASSES + 'kill -SEGV $$'), 1)
    expect('a signal behind a failed case', judge(folder, FAILS + 'kill -SEGV $$'), 0)
    expect('a crash that CMocka caught',
           judge(folder, FAILS + 'echo "Test failed with exception: Segmentation fault" >&2; exit 1'), 1)
    expect('an end before the last case', judge(folder, FAILS.rsplit('echo', 1)[0] + 'exit 1'), 1)
    expect('a skip', judge(folder, 'exit 77'), 1)
    expect('a skip has not survived', judge(folder, 'exit 77', '--survives'), 1)
    expect('a skip that may be', judge(folder, 'exit 77', '--survives', '--may-skip'), 77)
    expect('no skip where one may be', judge(folder, PASSES + 'exit 0', '--may-skip'), 1)
    expect('a hang', judge(folder, 'exec sleep 30', '--limit', '0.3'), 1)
    expect('a failed case that is followed by a long one',
           judge(folder, FAILS.replace('x\'\n', 'x\' >&2\n') + 'sleep 30', '--limit', '20'), 0)
    expect('a hang after a crash that CMocka caught',
           judge(folder, 'echo "Test failed with exception: Segmentation fault" >&2\n' + FAILS.replace('x\'\n', 'x\' >&2\n') +
                 'sleep 30', '--limit', '20'), 1)
    judge(folder, 'mktemp -d >%s/made\n' % folder + FAILS.replace('x\'\n', 'x\' >&2\n') + 'exec sleep 30',
          '--limit', '20')
    expect('the folder of a program that is ended', Path((folder / 'made').read_text().strip()).exists(), False)
    chosen = '[ "$T_MUTANT" = some ] || { ' + PASSES + ' exit 0; }\n'
    expect('a case that fails with a mutant only', judge(folder, chosen + FAILS + 'exit 1', '--mutant', 'some'), 0)
    expect('a case that fails without the mutant', judge(folder, FAILS + 'exit 1', '--mutant', 'some'), 1)
    for without in ('exit 77', NONE + 'exit 0'):
        expect('a case that does not run without the mutant', judge(
            folder, chosen.replace(PASSES + ' exit 0', without) + FAILS + 'exit 1', '--may-skip', '--mutant', 'some'), 1)
    expect('a program that has the mutant', judge(folder, PASSES + 'exit 0\nsome\0', '--survives', '--mutant', 'some'), 0)
    expect('a program that lacks the mutant', judge(folder, PASSES + 'exit 0', '--survives', '--mutant', 'some'), 1)
    each = chosen.replace('|| {', '|| { echo >>%s/without;' % folder) + FAILS + 'exit 1'
    expect('two mutants that a case notices', judge(folder, each, '--mutant', 'some', '--mutant', 'some\tkilled\t-\tx'), 0)
    expect('how often it ran without them', len((folder / 'without').read_text()), 1)
    expect('two mutants, of which one is not noticed', judge(folder, each, '--mutant', 'some', '--mutant', 'other'), 1)
    expect('a mutant with arguments of its own', judge(
        folder, '[ "$1 $2" = "a b" ] || exit 2\n' + each, '--mutant', 'some\tkilled\ta b\t-'), 0)
    expect('a mutant with cases of its own', judge(
        folder, '[ "$T_CASES" = x ] || exit 2\n' + each, '--mutant', 'some\tkilled\t-\tx'), 0)
    expect('two mutants that are skipped', judge(folder, 'exit 77', '--may-skip', '--mutant', 'some', '--mutant', 'other'), 77)
    expect('two mutants, of which one is skipped', judge(
        folder, '[ "$T_MUTANT" = some ] || exit 77\n' + PASSES + 'exit 0', '--may-skip', '--mutant', 'some', '--mutant', 'other'), 1)
    expect('a usage error', judge(folder, 'echo unknown option >&2; exit 2'), 1)
    expect('a verdict', judge(folder, 'echo \'{"ok": false}\'; exit 1'), 0)
    expect('a verdict with another status', judge(folder, 'echo \'{"ok": false}\'; exit 2'), 1)
    expect('a good verdict', judge(folder, 'echo \'{"ok": true}\'; exit 0'), 1)
    expect('a good verdict has survived', judge(folder, 'echo \'{"ok": true}\'', '--survives'), 0)
    expect('a program that is not there', judge(folder, 'exec /no/such/program'), 1)

print('%d wrong' % bad)
sys.exit(1 if bad else 0)
