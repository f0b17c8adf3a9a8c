# SPDX-License-Identifier: Apache-2.0
"""Does the recorder notice what is planted, in those of its records that it is about, and in no other?

usage: test_notices.py RECORD MUTANTS {RECORDERS MUTANT}...
MUTANTS: the program that has all of them. RECORDERS: names with commas between. Two runs of RECORD, and one of
MUTANTS without a mutant, must be equal: else it would notice by luck.
"""
import os
import subprocess
import sys

CASES, SEED = 250, 20261124
NAMES = 'plan', 'exchanges', 'transfers', 'boxes', 'outputs', 'status'


def records(program, mutant=''):
    """{case: its numbers}; a program that a bug has ended has fewer."""
    run = subprocess.run([program, '0', str(CASES), str(SEED)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True, timeout=100, env=dict(os.environ, T_MUTANT=mutant))
    lines = [line.split() for line in run.stdout.splitlines()]
    return {int(line[0]): line[1:] for line in lines if len(line) == 1 + len(NAMES)}


def differing(one, other):
    """{recorder: how many cases differ}"""
    return {name: n for k, name in enumerate(NAMES)
            if (n := sum(one[case][k] != other[case][k] for case in one.keys() & other.keys()))}


def main(record, mutants, *planted):
    base = records(record)
    wrong = []
    for again in records(record), records(mutants):
        if len(base) != CASES or len(again) != CASES or differing(base, again):
            wrong.append('two runs of %d cases: %d and %d, which differ in %s'
                         % (CASES, len(base), len(again), differing(base, again)))
    for expected, mutant in zip(planted[::2], planted[1::2]):
        found = records(mutants, mutant)
        noticed = differing(base, found)
        print('%s: %d cases, %s' % (mutant, len(found), noticed))
        if len(found) != CASES or set(noticed) != set(expected.split(',')):
            wrong.append('%s: %d of %d cases, noticed in %s; expected in %s, all others equal'
                         % (mutant, len(found), CASES, ', '.join(noticed) or 'none', expected))
    print('\n'.join(wrong))
    sys.exit(bool(wrong) or not planted)


if __name__ == '__main__':
    main(*sys.argv[1:])
