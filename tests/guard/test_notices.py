# SPDX-License-Identifier: Apache-2.0
"""Does the recorder notice what is planted, in those of its records that it is about, and in no other?

usage: test_notices.py RECORD {RECORDERS MUTANT}...
RECORDERS: names with commas between. Two runs of RECORD must be equal: else it would notice by luck.
"""
import subprocess
import sys

CASES, SEED = 250, 20261124
NAMES = 'plan', 'exchanges', 'transfers', 'boxes', 'outputs', 'status'


def records(program):
    """{case: its numbers}; a program that a bug has ended has fewer."""
    run = subprocess.run([program, '0', str(CASES), str(SEED)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True, timeout=100)
    lines = [line.split() for line in run.stdout.splitlines()]
    return {int(line[0]): line[1:] for line in lines if len(line) == 1 + len(NAMES)}


def differing(one, other):
    """{recorder: how many cases differ}"""
    return {name: n for k, name in enumerate(NAMES)
            if (n := sum(one[case][k] != other[case][k] for case in one.keys() & other.keys()))}


def main(record, *planted):
    base = records(record)
    again = records(record)
    wrong = []
    if len(base) != CASES or len(again) != CASES or differing(base, again):
        wrong.append('two runs of %d cases: %d and %d, which differ in %s'
                     % (CASES, len(base), len(again), differing(base, again)))
    for expected, program in zip(planted[::2], planted[1::2]):
        found = records(program)
        noticed = differing(base, found)
        print('%s: %d cases, %s' % (program.split('/')[-1], len(found), noticed))
        if len(found) != CASES or set(noticed) != set(expected.split(',')):
            wrong.append('%s: %d of %d cases, noticed in %s; expected in %s, all others equal'
                         % (program, len(found), CASES, ', '.join(noticed) or 'none', expected))
    print('\n'.join(wrong))
    sys.exit(bool(wrong) or not planted)


if __name__ == '__main__':
    main(*sys.argv[1:])
