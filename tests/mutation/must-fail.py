# SPDX-License-Identifier: Apache-2.0
"""Runs a program with a mutant and passes only if the program noticed.

usage: must-fail.py [--mutant RUN]... [--survives] [--may-skip] [--limit SECONDS] PROGRAM ARGS...
Killed is: a CMocka program that reports failed assertions, or a program whose last line is a JSON object with "ok": false
and whose exit status is 1. A crash, a hang, a skip, an error message instead of a verdict are not killed: a bug that
breaks the program in another way than the one it is planted for proves nothing. --survives: must pass instead.
--mutant: the program has several mutants, and runs with each that is named; each is a case of this test. RUN is its
name and, behind tabs, "killed" or "survived", more arguments, and the cases to run, "-" for none of these. Without
the mutant the case that noticed it passes, which is seen once for all that it noticed.
--may-skip: exit status 77 of the first run is handed on, so that a launcher that is missing counts as a skip.
A CMocka program that has a failed case and still runs is ended, because its other cases can only wait. So what comes
after that case, a crash too, is not looked at: whether it came before the end would depend on the machine.
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLAN = re.compile(r'^\[==========\] (?:.*: )?Running \d+ test\(s\)', re.M)
END = re.compile(r'^\[==========\] (?:.*: )?\d+ test\(s\) run', re.M)
FAILED = re.compile(r'^\[  FAILED  \] (?!.*listed below)(.*)$', re.M)


ENDED = 'ended'  # in place of an exit status: a case had failed


def run(args, env, limit):
    """(exit status, ENDED, or None where the time was over; stdout; stderr)"""
    end = time.monotonic() + limit
    program = subprocess.Popen(args, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, errors='replace', start_new_session=True)
    while True:
        try:
            out, err = program.communicate(timeout=max(0, min(0.1, end - time.monotonic())))
            return program.returncode, out, err
        except subprocess.TimeoutExpired as so_far:
            failed = FAILED.search((so_far.stderr or b'').decode(errors='replace'))
            if failed or time.monotonic() >= end:
                os.killpg(program.pid, signal.SIGKILL)
                out, err = program.communicate()
                return ENDED if failed else None, out, err


def verdict(code, out, err):
    """("killed" or "survived" or "broken", why)"""
    failed = sorted(set(FAILED.findall(out + err)))
    if failed and 'Test failed with exception' in err + out:
        return 'broken', 'a case crashed'
    if code == ENDED or code < 0 and failed:
        return 'killed', 'failed: %s; then it was ended' % '; '.join(failed)
    if code < 0:
        return 'broken', 'it died of signal %d' % -code
    if code == 77:
        return 'broken', 'it was skipped'
    if code > 125:
        return 'broken', 'exit status %d' % code
    if PLAN.search(out):
        if not END.search(out):
            return 'broken', 'it stopped before its last case'
        if code and failed:
            return 'killed', 'failed: ' + '; '.join(failed)
        if not code and not failed:
            return 'survived', 'all cases passed'
        return 'broken', 'exit status %d with %d failed cases' % (code, len(failed))
    lines = out.strip().splitlines()
    try:
        ok = json.loads(lines[-1])['ok']
    except (IndexError, ValueError, KeyError, TypeError):
        return 'broken', 'neither CMocka output nor a last line of JSON with "ok"; exit status %d' % code
    if ok is False and code == 1:
        return 'killed', lines[-1]
    if ok is True and code == 0:
        return 'survived', lines[-1]
    return 'broken', 'exit status %d with "ok": %s' % (code, ok)


def judge(args, env, want, limit, passes=None):
    """(is it what it must be, exit status). Where the program has several mutants, @passes says of the cases that
    noticed one whether they pass without."""
    mutant = env['T_MUTANT']
    code, out, err = run(args, env, limit)
    if code is None:
        color, why = 'broken', 'it ran longer than %g s' % limit
    else:
        color, why = verdict(code, out, err)
    noticed = FAILED.search(out + err)
    if mutant and color == want == 'killed' and noticed:
        key = noticed[1], *args
        if key not in passes:
            # It may end late, as a mutant may not.
            control, out, err = run(args, dict(env, T_CASES=noticed[1], T_MUTANT=''), 3 * limit)
            passes[key] = (control is not None and verdict(control, out, err)[0] == 'survived' and
                           '[       OK ] %s\n' % noticed[1] in out + err)
        if not passes[key]:
            color, why = 'broken', '%s does not pass without the mutant' % noticed[1]
    if mutant and color == want == 'survived' and not any(
            mutant.encode() + b'\0' in path.read_bytes() for path in map(Path, args) if path.is_file()):
        color, why = 'broken', 'it has no mutant "%s"' % mutant
    if color != want:
        # Indented, so that no count takes its cases as ours.
        print('\n'.join('    | ' + line for line in (out + err).splitlines()[-60:]))
    print('%s: %s (%s)' % (args[0], color, why))
    return color == want, code


def main(args):
    want, limit, may_skip, mutants, passes = 'killed', 100.0, False, [], {}
    while args and args[0].startswith('--'):
        option = args.pop(0)
        if option == '--survives':
            want = 'survived'
        elif option == '--may-skip':
            may_skip = True
        elif option == '--mutant' and args:
            mutants.append(args.pop(0))
        elif option == '--limit' and args:
            limit = float(args.pop(0))
        else:
            sys.exit(__doc__)
    if not args:
        sys.exit(__doc__)
    # Ranks that wait for a message that the bug swallowed give up soon and say so.
    env = dict(os.environ, COLO_TIMEOUT_MS=os.environ.get('COLO_TIMEOUT_MS', '5000'), T_MUTANT='')
    if not mutants:
        good, code = judge(args, env, want, limit)
        return 77 if may_skip and code == 77 else not good
    print('[==========] Running %d test(s)' % len(mutants))
    bad = 0
    for number, given in enumerate(mutants):
        mutant, color, words, cases = (given + '\t%s\t-\t-' % want).split('\t')[:4]
        name = ' '.join([mutant, *(w for w in (words, cases) if w != '-')])
        print('[ RUN      ] ' + name, flush=True)
        its_env = dict(env, T_MUTANT=mutant, **({} if cases == '-' else {'T_CASES': cases}))
        good, code = judge(args + words.split(' ') if words != '-' else args, its_env, color, limit, passes)
        if may_skip and code == 77 and number == 0:
            return 77
        bad += not good
        print('[%s] %s' % ('       OK ' if good else '  FAILED  ', name), flush=True)
    return bad > 0


if __name__ == '__main__':
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ['TMPDIR'] = folder  # for what a program leaves that is ended
        sys.exit(main(sys.argv[1:]))
