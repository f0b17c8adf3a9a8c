# SPDX-License-Identifier: Apache-2.0
"""The captioner's gradient check on GPUs: captioner.py CAPTIONER [--more ARGS] SRC:DST...

Every pair of layouts with each kind of output, one after the other: two programs on the same GPUs wait
for each other's time slices at every collective. With T_SCALE below 100 a pair has one kind, in turn.
Each must end by a verdict that has survived (must-fail.py). Fewer GPUs than ranks: exit status 77, with the
reason.
"""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location(
    'must_fail', HERE.parent / 'mutation' / 'must-fail.py')
judge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge)

KINDS = [['--grad', 'partial'], ['--grad', 'disjoint'], ['--output', 'sharded']]


def check(captioner, args):
    command = [sys.executable, '-B', str(HERE / 'needs-gpus.py'), captioner, '--ranks', 'nccl',
               '--check-gradients', *args]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors='replace')
    if done.returncode == 77:
        print(done.stdout, end='')
        sys.exit(77)
    color, why = judge.verdict(done.returncode, done.stdout, done.stderr)
    print('%s: %s: %s' % (color, ' '.join(args), why[:110]), flush=True)
    if color != 'survived':
        print('\n'.join('    | ' + line for line in (done.stdout + done.stderr).splitlines()[-60:]))
    return color == 'survived'


def main(captioner, words):
    common = []
    if words[:1] == ['--more']:
        common, words = words[1].split(), words[2:]
    good = True
    few = int(os.environ.get('T_SCALE', '100')) < 100
    for at, pair in enumerate(words):
        src, dst = pair.split(':')
        for kind in [KINDS[at % len(KINDS)]] if few else KINDS:
            good &= check(captioner, ['--src', src, '--dst', dst, *kind, *common])
    return 0 if good else 1


if __name__ == '__main__':
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
