# SPDX-License-Identifier: Apache-2.0
"""Runs a GPU test on a backend with a mutant (tests/mutation/README.md).

usage: mutant.py MODULE NAME BACKENDS PROGRAM
MODULE takes the place of libcolobridge-NAME.so among the BACKENDS of the build.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main(module, name, backends, program):
    with tempfile.TemporaryDirectory() as folder:
        for so in Path(backends).resolve().glob('libcolobridge-*.so'):
            (Path(folder) / so.name).symlink_to(so)
        place = Path(folder) / f'libcolobridge-{name}.so'
        place.unlink()
        place.symlink_to(Path(module).resolve())
        return subprocess.run([program], env=dict(os.environ, COLO_BACKEND_DIR=folder)).returncode


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
