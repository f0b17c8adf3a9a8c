# SPDX-License-Identifier: Apache-2.0
"""What the tests here share: the public headers, what they declare, and how a program is run."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / 'include'
MAP = ROOT / 'src' / 'colobridge.map'

# Headers that are not in colobridge.h, and the pkg-config modules that give what they include.
OPT_IN = {'colobridge/mpi.h': ('mpi-c', 'ompi-c', 'mpich')}


def opt_in_flags(header):
    """Compiler flags of an opt-in header; None where what it needs is not installed."""
    for module in OPT_IN[header]:
        done = subprocess.run(['pkg-config', '--cflags', module], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if done.returncode == 0:
            return done.stdout.replace('-I', '-isystem').split()
    return None


def complaints(compiler, standard, text, *flags):
    """What a compiler says of a text in C or C++ that includes the public headers; "" if nothing, and it succeeds."""
    language = 'c++' if '++' in standard else 'c'
    done = subprocess.run([*compiler, '-x', language, '-std=' + standard, '-I', str(INCLUDE), *flags, '-'], input=text,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout or ('' if done.returncode == 0 else 'exit status %d' % done.returncode)


def headers():
    """Public headers as one includes them: "colobridge.h", "colobridge/grid.h" ..."""
    return sorted(str(p.relative_to(INCLUDE)) for p in INCLUDE.rglob('*.h'))


def version():
    """As <colobridge/version.h> has it"""
    return '.'.join(re.findall('#define COLO_VERSION_[A-Z]+ ([0-9]+)', (INCLUDE / 'colobridge/version.h').read_text()))


def foreign(header):
    """What a public header includes that is neither ours nor C's: an opt-in header needs it."""
    names = re.findall(r'^\s*#\s*include\s*<([^>]+)>', (INCLUDE / header).read_text(), re.M)
    return [n for n in names if not n.startswith(('colobridge/', 'std', 'string.'))]


def declared():
    """Names of all functions that the public headers declare with COLO_API."""
    return marked('COLO_API', [INCLUDE / header for header in headers()])


def split(arguments):
    """Types and names, as declared, of what a function takes; of functions only that they are some."""
    arguments = re.sub(r'\((\*\w+)\)\s*\([^()]*\)', r'(\1)', arguments)
    return [a.strip() for a in arguments.split(',') if a.strip() != 'void']


def declarations():
    """(what it returns, its name, the types of its arguments) of all that the public headers declare."""
    for statement in statements('COLO_API', [INCLUDE / header for header in headers()]):
        returned, name, arguments = re.match(
            r'(.*?)\s*\b(colo_\w+)\s*\(((?:[^()]|\((?:[^()]|\(.*?\))*\))*)\)', statement).groups()
        yield returned, name, [re.sub(r'(?<=[ *])\w+$', '', a).strip() for a in split(arguments)]


def for_modules():
    """Names of all functions that private headers declare with COLO_FOR_MODULES."""
    return marked('COLO_FOR_MODULES', (ROOT / 'src').rglob('*.h'))


def statements(mark, paths):
    """What stands between @mark and a semicolon, in one line each."""
    for path in paths:
        text = path.read_text()
        text = re.sub(r'/\*.*?\*/', ' ', text, flags=re.S)
        text = re.sub(r'^\s*#(?:[^\n\\]|\\.|\\\n)*', '', text, flags=re.M | re.S)
        for statement in re.findall(r'\b%s\b([^;]*);' % mark, text):
            yield ' '.join(statement.split())


def marked(mark, paths):
    names = set()
    for statement in statements(mark, paths):
        # The first name before a parenthesis that is not an attribute's.
        found = re.search(r'\b(colo_\w+)\s*\(', statement)
        if not found:
            sys.exit('no function in "%s %s"' % (mark, statement))
        names.add(found.group(1))
    return sorted(names)


def run(*command, **more):
    """Runs a command; its output when it succeeds, else everything is printed and the test ends."""
    done = subprocess.run([str(c) for c in command], text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    if done.returncode:
        print('$ ' + ' '.join(str(c) for c in command))
        sys.exit('%sexit status %d' % (done.stdout, done.returncode))
    return done.stdout
