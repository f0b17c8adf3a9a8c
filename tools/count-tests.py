#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts test cases in Meson's test logs (one JSON object a line) and prints the closing line.

usage: count-tests.py [--case NAME=passed|failed|skipped]... [--note LINE]... LOG[=STATUS]...

The first log is the plain build, the others are reruns of it in other builds: a case that fails in
any of them is failed, and a case is counted once. --case adds one that the caller judged, --note a
line in front of the closing one. A CMocka
program counts as many cases as it announces; what it announced and did not report passed or skipped
is failed, so a crash cannot hide cases. Any other program is one case. Exit status 77 is a skip. A program whose status is bad though
all its cases passed (a leak found at exit, say) adds a case named "exits cleanly". STATUS is that
of `meson test`: a bad one that no case explains, or a log that cannot be read, is a failed case.
Failed cases come last, each with what its program printed before it failed and at its end.
Exit: 0 all well, 1 something failed or nothing ran.
"""
import json
import re
import sys

PLAN = re.compile(r'^\[==========\] (?:.*: )?Running (\d+) test\(s\)')
LINE = re.compile(r'^\[ *(RUN|OK|FAILED|SKIPPED) *\] (.*)$')
GOOD = ('OK', 'EXPECTEDFAIL', 'UNEXPECTEDPASS')
LINES = 30 # of a failed program's output


def cmocka_cases(stdout):
    """[(name, status)] of a CMocka program's output, or None when it is not one."""
    cases, announced, running = [], None, None
    for line in stdout.splitlines():
        plan = PLAN.match(line)
        if plan:
            announced = (announced or 0) + int(plan.group(1))
            continue
        found = LINE.match(line)
        if not found or announced is None:
            continue
        word, name = found.groups()
        if word == 'RUN':
            if running is not None:
                cases.append((running, 'failed'))
            running = name
        elif name == running:
            cases.append((name, {'OK': 'passed', 'SKIPPED': 'skipped', 'FAILED': 'failed'}[word]))
            running = None
    if announced is None:
        return None
    if running is not None:
        cases.append((running, 'failed'))
    for i in range(len(cases), announced):
        cases.append(('case %d, never begun' % (i + 1), 'failed'))
    return cases


def program_cases(test):
    """[(case name, status)] of one Meson test; a case's place in the list is its identity."""
    result, code = test['result'], test['returncode']
    cases = cmocka_cases(test.get('stdout') or '')
    if result == 'SKIP' or code == 77:
        return [(name, 'skipped') for name, _ in cases or [('', '')]]
    if cases is None:
        return [('', 'passed' if result in GOOD else 'failed')]
    if result not in GOOD and not any(status == 'failed' for _, status in cases):
        cases.append(('exits cleanly', 'failed'))
    return cases


def reason_of(test):
    """The last lines on stdout before the first failure, and the last ones on stderr."""
    out, err = ((test.get(stream) or '').splitlines() for stream in ('stdout', 'stderr'))
    failed = next((i for i, line in enumerate(out) if re.match(r'\[ *FAILED', line)), len(out))
    return ''.join('    %s\n' % line for line in out[:failed + 1][-LINES:] + err[-LINES:])


def main(args):
    cases, names, where, reasons, logs, notes = {}, {}, {}, {}, [], []
    total = {'passed': 0, 'failed': 0, 'skipped': 0}
    args = list(args)
    while args:
        if args[0] == '--case' and len(args) > 1:
            name, _, status = args[1].rpartition('=')
            if not name or status not in total:
                sys.exit(__doc__)
            cases[name, 0] = status
            names[name, 0] = ''
            args = args[2:]
        elif args[0] == '--note' and len(args) > 1:
            notes.append(args[1])
            args = args[2:]
        elif args[0].startswith('-'):
            sys.exit(__doc__)
        else:
            logs.append(args.pop(0))
    for log in logs:
        path, _, code = log.partition('=')
        bad = 'meson test ended with status %s' % code if code not in ('', '0') else ''
        tests = []
        try:
            with open(path, encoding='utf-8', errors='replace') as lines:
                tests = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as why:
            bad = str(why)
        for test in tests:
            for i, (name, status) in enumerate(program_cases(test)):
                key = test['name'], i
                names.setdefault(key, name)
                if status == 'failed':
                    where.setdefault(key, []).append(path)
                    reasons[path, test['name']] = reason_of(test)
                    bad = ''
                if status == 'failed' or cases.get(key, 'skipped') == 'skipped':
                    cases[key] = status
        if bad:
            cases[path, bad] = 'failed'
            names[path, bad] = bad
            where[path, bad] = [path]
    for key, status in cases.items():
        total[status] += 1
    for wanted in ('skipped', 'failed'):
        for key in (key for key, status in cases.items() if status == wanted):
            paths = where.get(key, [])
            print(('%s: %s %s %s' % (wanted, key[0], names[key], ', '.join(paths))).rstrip())
            for path in paths: # once, though several of its cases failed
                print(reasons.pop((path, key[0]), ''), end='')
    for note in notes:
        print(note)
    print('%(passed)d passed, %(failed)d failed, %(skipped)d skipped' % total, flush=True)
    return 1 if total['failed'] or not total['passed'] + total['failed'] else 0


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
