# SPDX-License-Identifier: Apache-2.0
"""tools/count-tests.py: the closing line is right for passes, failures, crashes, skips and reruns."""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from api import ROOT


def test(name, result='OK', code=0, *lines):
    return {'name': name, 'result': result, 'returncode': code, 'stdout': '\n'.join(lines)}


def cmocka(name, outcomes, announced=None, result=None, code=None):
    """A program's log; outcomes: OK, FAILED, SKIPPED or None where it died while running."""
    failed = outcomes.count('FAILED')
    lines = ['[==========] %s: Running %d test(s).' % (name, announced or len(outcomes))]
    for i, outcome in enumerate(outcomes):
        lines.append('[ RUN      ] case %d' % i)
        if outcome:
            lines.append('[ %8s ] case %d' % (outcome, i))
    return test(name, result or ('FAIL' if failed else 'OK'), failed if code is None else code, *lines)


GOOD = cmocka('a', ['OK', 'OK', 'OK'])
CASES = [
    # logs as (tests, status of meson test), more arguments, closing line, exit status
    ([([GOOD], 0)], [], '3 passed, 0 failed, 0 skipped', 0),
    ([([GOOD, cmocka('b', ['OK', 'FAILED', 'SKIPPED'])], 1)], [], '4 passed, 1 failed, 1 skipped', 1),
    # a crash: one OK, one running, two never begun
    ([([cmocka('b', ['OK', None], 4, 'FAIL', -11)], 1)], [], '1 passed, 3 failed, 0 skipped', 1),
    # all cases passed and the program still failed
    ([([cmocka('b', ['OK'], 1, 'FAIL', 23)], 1)], [], '1 passed, 1 failed, 0 skipped', 1),
    ([([cmocka('b', ['OK'], 2, 'TIMEOUT', -15)], 1)], [], '1 passed, 1 failed, 0 skipped', 1),
    # no CMocka: one case each; 77 is a skip
    ([([test('sh'), test('sh2', 'FAIL', 1), test('sh3', 'SKIP', 77)], 1)], [],
     '1 passed, 1 failed, 1 skipped', 1),
    ([([cmocka('b', ['OK', 'OK'], 2, 'SKIP', 77), GOOD], 0)], [], '3 passed, 0 failed, 2 skipped', 0),
    # the same name twice is two cases
    ([([test('b', 'OK', 0, '[==========] Running 2 test(s).', '[ RUN      ] x', '[       OK ] x',
             '[ RUN      ] x', '[       OK ] x')], 0)], [], '2 passed, 0 failed, 0 skipped', 0),
    # a rerun is not a second case, but its failure counts
    ([([GOOD], 0), ([GOOD], 0)], [], '3 passed, 0 failed, 0 skipped', 0),
    ([([GOOD], 0), ([cmocka('a', ['OK', 'FAILED', 'OK'])], 1)], [], '2 passed, 1 failed, 0 skipped', 1),
    ([([GOOD], 0), ([cmocka('a', ['OK', None], 3, 'FAIL', -6)], 1)], [],
     '1 passed, 2 failed, 0 skipped', 1),
    ([([GOOD], 0), ([cmocka('a', ['OK', 'OK', 'OK'], 3, 'FAIL', 23)], 1)], [],
     '3 passed, 1 failed, 0 skipped', 1),
    # meson test itself came to grief
    ([([GOOD], 1)], [], '3 passed, 1 failed, 0 skipped', 1),
    ([([GOOD], 0), (None, 1)], [], '3 passed, 1 failed, 0 skipped', 1),
    # nothing ran
    ([([], 0)], [], '0 passed, 0 failed, 0 skipped', 1),
    ([([test('sh', 'SKIP', 77)], 0)], [], '0 passed, 0 failed, 1 skipped', 1),
    # what the caller says in front of it: the test below wants that in this place
    ([([GOOD, test('sh', 'FAIL', 1), test('sh2', 'SKIP', 77)], 1)], ['--note', 'a word'],
     '3 passed, 1 failed, 1 skipped', 1),
    # what the caller judged
    ([([GOOD], 0)], ['--case', 'rerun under thread=skipped'], '3 passed, 0 failed, 1 skipped', 0),
    ([([GOOD], 0)], ['--case', 'a=b=passed', '--case', 'no warnings=failed'],
     '4 passed, 1 failed, 0 skipped', 1),
]

bad = 0
for number, (logs, more, line, code) in enumerate(CASES):
    with tempfile.TemporaryDirectory() as name:
        args = list(more)
        for i, (tests, status) in enumerate(logs):
            path = Path(name) / ('log%d.json' % i)
            if tests is not None:
                path.write_text(''.join(json.dumps(t) + '\n' for t in tests))
            args.append('%s=%d' % (path, status))
        done = subprocess.run([sys.executable, str(ROOT / 'tools' / 'count-tests.py'), *args],
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = done.stdout.splitlines() or ['']
        last = printed[-1]
        # what failed is told last but for notes, each program with the line that says so, once
        words = [text.split(':')[0] for text in printed[:-1] if not text.startswith(' ')]
        failed = ['    ' + text for tests, _ in logs for test in tests or []
                  for text in test['stdout'].splitlines() if 'FAILED' in text]
        told = words == sorted(words, reverse=True) and [
            text for text in printed if 'FAILED' in text] == failed
        if (last, done.returncode, told) != (line, code, True):
            bad += 1
            print('case %d: "%s", exit %d; expected "%s", exit %d\n%s'
                  % (number, last, done.returncode, line, code, done.stdout))
print('%d logs, %d counted wrong' % (len(CASES), bad))
sys.exit(1 if bad else 0)
