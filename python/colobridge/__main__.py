# SPDX-License-Identifier: Apache-2.0
"""python -m colobridge check: does this installation work on this machine? See check.py.
python -m colobridge flight: what do the flight records of ranks say? See flight.py."""
import sys

from .check import main

if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
