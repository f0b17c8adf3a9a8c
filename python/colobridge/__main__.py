# SPDX-License-Identifier: Apache-2.0
"""The command `colobridge`; `python -m colobridge` is the same. check and flight are in this package. The others are C
programs, which take its place: their arguments, output, signals and exit statuses are their own.

Where it looks for them, the first that is there: next to the library that the package loads, as in a wheel; in ../bin or
../../bin from there, as `meson install` puts them; in ../tools, as in a build folder. Where only the loader knows the
library: in PATH.
"""
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import _lib, check, flight
from ._structs import VERSION
from .errors import Error

RUN = {'check': check.main, 'flight': flight.main}
HELP = {
    'check': ('does this installation work on this machine?', 'check --ranks 8'),
    'plan': ('what moves where between two layouts, without a GPU', 'plan --src tp=2,dp=4 --dst tp=2,cp=2,dp=2'),
    'info': ('versions, backends, variables, and where ranks sit', 'info --grid tp=2,dp=4 --topology "package:2 pu:4"'),
    'perf': ('how fast GPUs, links, bridge and loss are', 'perf bridge --src dp=4 --dst cp=2,dp=2'),
    'flight': ('which rank is missing, or what differs, in flight records', 'flight trace/rank*'),
}
FOLDERS = '.', '../bin', '../../bin', '../tools'  # from the library's


def usage() -> str:
    """What --help prints."""
    return '\n'.join(['usage: colobridge COMMAND [ARGUMENTS]', '',
                      *('  %-8s %s\n             colobridge %s' % (name, what, example)
                        for name, (what, example) in HELP.items()), '',
                      'colobridge COMMAND --help says more. Exit: 0 ok, 1 found a problem, 2 wrong use.'])


def program(name: str) -> str:
    """Path of a C program. FileNotFoundError: there is none."""
    library = Path(_lib.find())
    found = [str(library.parent / folder / name) for folder in FOLDERS] if library.exists() else [shutil.which(name)]
    for path in found:
        if path and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(
        'no %s in %s. The wheel of colobridge has it; of a build from source it is a part where jansson is (Debian: '
        'libjansson-dev)' % (name, ', '.join(os.path.normpath(path) for path in found if path) or 'PATH'))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; a C program does not come back."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ['']
    if name in ('--help', '-h'):
        print(usage())
        return 0
    if name == '--version':
        print('colobridge ' + VERSION)
        return 0
    if name in RUN:
        return RUN[name](rest)
    if name not in HELP:
        print('colobridge: %s, expected one of %s; see --help' % (
            'found %r' % name if name else 'a command is missing', ', '.join(HELP)), file=sys.stderr)
        return 2
    try:
        path = program('colo-' + name)
        for ignored in signal.SIGPIPE, signal.SIGXFSZ:  # by Python, and a program inherits it
            signal.signal(ignored, signal.SIG_DFL)
        os.execv(path, [path, *rest])
    except (OSError, Error) as why:
        print('colobridge %s: %s' % (name, why), file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
