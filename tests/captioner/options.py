# SPDX-License-Identifier: Apache-2.0
"""What the captioner refuses, a standard output that takes nothing, what a long check says: options.py CAPTIONER

Each command line in REFUSED must end with exit status 2 and this one line on stderr, before any rank starts.
"""
import json
import subprocess
import sys

REFUSED = {
    '--images 2': "--images: expected --ragged with it, found '2'",
    '--ragged --images 0-4': "--images: expected N-M with 0 <= N <= M <= 3, found '0-4'",
    '--ragged --images 2-1': "--images: expected N-M with 0 <= N <= M <= 3, found '2-1'",
    '--ragged --images 1-': "--images: expected N-M with 0 <= N <= M <= 3, found '1-'",
    '--ragged --images=-1': "--images: expected N-M with 0 <= N <= M <= 3, found '-1'",
    '--ragged --images many': "--images: expected N-M with 0 <= N <= M <= 3, found 'many'",
    '--ragged --algo collective': "--ragged: expected --algo exact, found 'collective'",
    '--dynamic-cp': "--dynamic-cp: expected --ragged with it, found 'none'",
    '--ragged=yes': "command line: expected an option of --help, found '--ragged=yes'",
}

bad = 0
for args, want in REFUSED.items():
    done = subprocess.run([sys.argv[1], *args.split()], text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if (done.returncode, done.stdout, done.stderr) != (2, '', 'colo-captioner: %s\n' % want):
        print('%s: exit status %d, expected 2 and %r:\n%s%s'
              % (args, done.returncode, want, done.stdout, done.stderr))
        bad += 1
for args in '--help', '--steps 0 --json --report /dev/null':
    with open('/dev/full', 'w') as full:
        done = subprocess.run([sys.argv[1], *args.split()], text=True, stdout=full, stderr=subprocess.PIPE)
    if done.returncode != 1 or not done.stderr.endswith('is the disk full?\n'):
        print('%s on a full disk: exit status %d, expected 1:\n%s' % (args, done.returncode, done.stderr))
        bad += 1
done = subprocess.run([sys.argv[1], *'--check-gradients --batch 1 --steps 2 --src dp=1 --dst dp=1'.split()], text=True,
                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
if done.stderr != ''.join('serial run %d of 2 in fp64: 1 samples\n' % run for run in (1, 2)):
    print('a serial run, of which a large one takes minutes, does not say that it begins:\n' + done.stderr)
    bad += 1
if not done.stdout.splitlines()[-1:] or json.loads(done.stdout.splitlines()[-1])['steps'] != [0, 2]:
    print('a check of 2 steps, expected gradients before and after them:\n' + done.stdout)
    bad += 1
sys.exit(bad > 0)
