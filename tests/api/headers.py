# SPDX-License-Identifier: Apache-2.0
"""Each public header compiles alone, strictly, without a word from the compiler, and its names can be found.

usage: headers.py c11|c++17|cuda17 own|opt-in COMPILER...
C11 and C++17 are also compiled by gcc and by clang where they are installed. A type has one name: the tag of a struct or
enum is its typedef, which no function can have. Enumerators begin with the name of their enum, whose last word they may
leave out: COLO_MAP_TABLE of colo_map_kind_t. No name is pasted by a macro.

"own" are the headers that need nothing but C's; "opt-in" those that include somebody else's, MPI's
say. Where that is not installed the header is left out, and when nothing remains it is a skip.
"cuda17" is nvcc, host and device compilation, of all headers in one file, because nvcc takes seconds
per file and the other compilers show that each header stands alone. What nvcc hands to the host's
compiler has line directives of a style that -Wpedantic does not like: that warning is not counted.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

from api import INCLUDE, complaints, foreign, headers

STRICT = ['-Wall', '-Wextra', '-Wconversion', '-Wpedantic', '-Wshadow', '-Werror']
OTHERS = {'c11': ('gcc', 'clang'), 'c++17': ('g++', 'clang++')}
# The names of numbers that are types, and of statuses, are known by themselves.
BARE = r'COLO_(?:OK|PENDING|ERR_\w+|B?F\d+|[IU]\d+)'
# How to ask where a header that is not on the compiler's path lives.
ASK = {'mpi.h': (['pkg-config', '--cflags', 'ompi-c'], ['mpicc', '--showme:compile'],
                 ['mpicc', '-compile_info'])}


# A warning or error of a compiler, but not the one that every file gives under nvcc.
COMPLAINT = re.compile(r'^\S.*?:\s*(?:fatal )?(?:warning|error)\b(?!.*style of line directive)')


def compiles_under_nvcc(compiler, flags, text):
    with tempfile.NamedTemporaryFile('w', suffix='.cu') as source:
        source.write(text)
        source.flush()
        done = subprocess.run(
            compiler + ['-std=c++17', '-I', str(INCLUDE), '-Xcompiler=-Wall,-Wextra,-Wpedantic', '-c',
                        '-o', os.devnull] + flags + [source.name],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = [line for line in done.stdout.splitlines() if COMPLAINT.search(line)]
    return done.returncode == 0 and not said, '\n'.join(said) or done.stdout


def compiles(compiler, std, flags, text):
    if std == 'cuda17':
        return compiles_under_nvcc(compiler, flags, text)
    of_c = [] if '++' in std else ['-Wstrict-prototypes', '-Wmissing-prototypes']
    said = complaints(compiler, std, text, '-fsyntax-only', *STRICT, *flags, *of_c)
    return not said, said


def found(compiler, std, names):
    """Flags with which somebody else's headers are found, or None."""
    flags = []
    for name in names:
        text = '#include <%s>\nextern int colo_api_test_;\n' % name
        options = [[]]
        for command in ASK.get(name, ()):
            if shutil.which(command[0]):
                said = subprocess.run(command, text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL).stdout.split()
                # As system headers: their warnings are not ours.
                options.append([w for flag in said if flag.startswith('-I')
                                for w in ('-isystem', flag[2:])])
        for more in options:
            if compiles(compiler, std, more, text)[0]:
                flags += more
                break
        else:
            return None
    return flags


def misnamed(text):
    """Names of a header that nobody finds, or that are two things."""
    text = re.sub(r'/\*.*?\*/', ' ', text, flags=re.S)
    yield from ('%s is %s, too' % pair for pair in re.findall(
        r'^typedef (?:struct|enum) (\w+) \{(?:[^{}]|\{[^{}]*\})*\} (?!\1;)(\w+);', text, re.M))
    for body, kind in re.findall(r'^typedef enum \w+ \{([^{}]*)\} colo_(\w+)_t;', text, re.M):
        starts = tuple('COLO_%s_' % noun.upper() for noun in (kind, kind.rpartition('_')[0]) if noun)
        yield from ('%s is of colo_%s_t' % (name, kind) for name in re.findall(r'\bCOLO_\w+', body)
                    if not name.startswith(starts) and not re.fullmatch(BARE, name))
    yield from ('%s is pasted' % paste for paste in re.findall(r'\w+\s*##\s*\w+', text))


def all_compilers(compiler, std):
    """The build's, and the others that are here, each once."""
    yield compiler
    for name in OTHERS.get(std, ()):
        if shutil.which(name) and [name] != compiler[-1:]:
            yield [name]
        elif [name] != compiler[-1:]:
            print('%s as %s: skipped, there is none here' % (name, std))


def main(std, kind, compiler):
    if len(list(misnamed('typedef struct a {\n    int x[2];\n} b;\n#define A(x) x##_c\n'
                         'typedef enum colo_d_t { COLO_D_E, COLO_E } colo_d_t;\n'))) != 3:
        print('this check does not see the names that it should')
        return 1
    results = [main_of(std, kind, each) for each in all_compilers(compiler, std)]
    return 1 if 1 in results else max(results)


def main_of(std, kind, compiler):
    checked = bad = 0
    together, flags_of_all = [], []
    for header in headers():
        needs = foreign(header)
        if bool(needs) != (kind == 'opt-in'):
            continue
        flags = found(compiler, std, needs)
        if flags is None:
            print('%s as %s: left out, no <%s> here' % (header, std, '> or <'.join(needs)))
            continue
        checked += 1
        for fault in misnamed((INCLUDE / header).read_text()):
            bad += 1
            print('%s: %s' % (header, fault))
        if std == 'cuda17':
            together.append(header)
            flags_of_all += flags
            continue
        # Twice: the guard holds. Nothing else is defined: no _GNU_SOURCE, no include before it.
        text = '#include <%s>\n#include <%s>\nextern int colo_api_test_;\n' % (header, header)
        good, said = compiles(compiler, std, flags, text)
        if not good:
            bad += 1
            print('%s as %s:\n%s' % (header, std, said))
    if together:
        text = ''.join('#include <%s>\n' % header for header in together)
        good, said = compiles(compiler, std, flags_of_all, text)
        if not good:
            bad += 1
            print('%s as %s:\n%s' % (', '.join(together), std, said))
    print('%d headers as %s by %s, %d bad' % (checked, std, ' '.join(compiler), bad))
    if bad:
        return 1
    return 0 if checked else 77 if kind == 'opt-in' else 1


sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
