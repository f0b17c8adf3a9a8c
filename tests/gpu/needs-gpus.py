# SPDX-License-Identifier: Apache-2.0
"""Runs a program on GPUs: needs-gpus.py PROGRAM ARGUMENTS...

Output and exit status are the program's, but 77 where it says that there are too few.
"""
import re
import subprocess
import sys

TOO_FEW = re.compile(r'needs \d+ GPUs, found \d+')

done = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                      stderr=subprocess.PIPE, text=True, errors='replace')
few = TOO_FEW.search(done.stderr)
if few and done.returncode == 2:
    print('skipped: ' + few.group(0))
    sys.exit(77)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
sys.exit(done.returncode if 0 <= done.returncode < 256 else 1)
