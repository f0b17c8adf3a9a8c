# SPDX-License-Identifier: Apache-2.0
"""Programs and libraries of two versions, of which the newer has one more member at the end of each sized struct.

usage: old.py LIBRARY COMPILE-COMMANDS COMPILER...
The library is built from its sources with headers that have these members, and so is old.c, a program that gives each
sized struct to the library. The program of the headers as they are, and that of baseline.h, print the same with either
library. The newer program is served by the newer library; the older one refuses its structs, in words that say why.
"""
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from abi import BASELINE, SIZED, flat, grows
from api import INCLUDE, ROOT, run

OLD = Path(__file__).with_name('old.c')
OBJECTS = re.compile(r'src/lib(colo-core|range|unwinds)\.a\.p/')


def newer_headers(folder):
    """The public headers with one more member; which structs have it."""
    grown = grows(flat())
    shutil.copytree(INCLUDE, folder)
    for path in folder.rglob('*.h'):
        path.write_text(SIZED.sub(
            lambda found: found[0].replace('} %s;' % found[1], '    int64_t newer;\n} %s;' % found[1])
            if found[1] in grown else found[0], path.read_text()))
    return grown


def build(compile_commands, compiler, include, out):
    """The library as the build makes it, but with these headers and without optimization."""
    out.mkdir()
    env = dict(os.environ, CCACHE_DISABLE='1')

    def compile_one(unit):
        command, output = shlex.split(unit['command']), out / (re.sub(r'\W', '_', unit['output']) + '.o')
        where = command.index('-o')
        command[where + 1] = str(output)
        at = Path(unit['directory'])
        command = ['-I%s' % include if word.startswith('-I') and (at / word[2:]).resolve() == INCLUDE else word
                   for word in command if word not in ('-MD', '-MQ', '-MF', unit['output'], unit['output'] + '.d')]
        run(*command, '-O0', '-g0', cwd=at, env=env)
        return output

    units = [unit for unit in json.loads(Path(compile_commands).read_text()) if OBJECTS.match(unit['output'])]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, units))
    library = out / 'libcolobridge.so.0'
    run(*compiler, '-shared', '-Wl,-soname,libcolobridge.so.0', '-Wl,--version-script=%s' % (ROOT / 'src/colobridge.map'),
        '-Wl,--no-undefined', '-o', library, *objects, '-lm', '-ldl', '-pthread')
    return library


def program(compiler, include, library, out):
    run(*compiler, '-std=c11', '-Wall', '-Wextra', '-Wno-unused-parameter', '-Wno-missing-field-initializers', '-Werror',
        '-I', include, OLD, '-o', out, library)
    return out


def said(program, library):
    """What the program prints with the library of that folder."""
    return run(program, env=dict(os.environ, LD_LIBRARY_PATH=str(library.parent))).splitlines()


def main(library, compile_commands, compiler):
    failed = []

    def check(holds, *what):
        if not holds:
            failed.append(what)
            print(*what, sep='\n  ')

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        library = Path(library)
        (work / 'older').mkdir()
        shutil.copy(library, work / 'older/libcolobridge.so.0')
        older = work / 'older/libcolobridge.so.0'
        grown = newer_headers(work / 'newer-include')
        newer = build(compile_commands, compiler, work / 'newer-include', work / 'newer')
        (work / 'baseline').mkdir()
        shutil.copy(BASELINE, work / 'baseline/colobridge.h')
        of = {version: program(compiler, include, older, work / ('program-' + version)) for version, include in
              (('baseline', work / 'baseline'), ('older', INCLUDE), ('newer', work / 'newer-include'))}

        wanted = said(of['older'], older)
        print(*wanted, sep='\n')
        names = ['colo_%s_t' % line.split(':')[0] for line in wanted]
        check(sorted(names) == sorted(struct for struct, _ in SIZED.findall(flat())), 'old.c uses other structs:', names)
        for line in wanted:
            check(line.split(': ')[1] == 'COLO_OK' or 'topology' in line and ': COLO_ERR_UNBUILT: ' in line, line)
        released = set(struct for struct, _ in SIZED.findall(BASELINE.read_text()))
        for which in ('baseline', 'older', 'newer'):
            check(said(of[which], newer) == [line for struct, line in zip(names, wanted) if which != 'baseline' or struct in released], 'the %s program and the newer library:' % which,
                  *said(of[which], newer))
        check(said(of['baseline'], older) == [line for struct, line in zip(names, wanted) if struct in released], 'the baseline program:', *said(of['baseline'], older))
        for struct, line, served in zip(names, said(of['newer'], older), wanted):
            check('compiled with a newer header' in line or struct not in grown or 'UNBUILT' in served,
                  'the newer program and the older library: ' + line)
    for struct in sorted(set(names) - set(grown)):
        print('%s cannot grow: another struct has members behind it' % struct)
    return 1 if failed else 0


sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
