# SPDX-License-Identifier: Apache-2.0
"""Runs a test program on N MPI ranks: mpirun.py N PROGRAM ARGUMENTS...

Rank 0 prints; the exit status is the program's. Without an mpirun it is 77, a skip.
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
done = subprocess.run([mpirun, *more, '-n', sys.argv[1], *sys.argv[2:]], stdin=subprocess.DEVNULL)
sys.exit(done.returncode if 0 <= done.returncode < 256 else 1)
