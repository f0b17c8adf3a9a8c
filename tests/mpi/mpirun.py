# SPDX-License-Identifier: Apache-2.0
"""Runs a test program on N MPI ranks: mpirun.py [--survive] N PROGRAM ARGUMENTS...

Rank 0 prints; the exit status is the program's. Without an mpirun it is 77, a skip. With --survive the
launcher lets the others live if a rank is killed, and N - 1 of them must say "told at once".
"""
import os
import re
import shutil
import subprocess
import sys

mpirun = shutil.which('mpirun') or shutil.which('mpiexec')
if not mpirun:
    print('skipped: no mpirun here (Debian and Ubuntu: openmpi-bin)')
    sys.exit(77)
says = subprocess.run([mpirun, '--version'], text=True, stdout=subprocess.PIPE,
                      stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).stdout
more = []
if 'Open MPI' in says or 'OpenRTE' in says:
    # More ranks than cores, as in a container; no output but the program's, where it can be had.
    more = ['--oversubscribe', '--bind-to', 'none']
    version = re.search(r'\(Open MPI\) (\d+)', says)
    if not version or int(version.group(1)) < 5: # which knows no such option
        more.append('--quiet')
    if os.getuid() == 0:
        more.append('--allow-run-as-root')
words = sys.argv[1:]
if words[0] == '--survive':
    if '(Open MPI) 4.' not in says:
        print('skipped: mpirun is not of Open MPI 4: how it lets ranks live is not known here')
        sys.exit(77)
    del words[0]
    said = subprocess.run([mpirun, *more, '--enable-recovery', '-n', *words], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, text=True).stdout
    print(said)
    sys.exit(said.count(': told at once: ') != int(words[0]) - 1)
done = subprocess.run([mpirun, *more, '-n', *words], stdin=subprocess.DEVNULL)
sys.exit(done.returncode if 0 <= done.returncode < 256 else 1)
