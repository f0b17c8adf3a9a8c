# SPDX-License-Identifier: Apache-2.0
"""Options that the captioner refuses: options.py CAPTIONER

Each command line must end with exit status 2 and this one line on stderr, before any rank starts.
"""
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
sys.exit(bad > 0)
