# SPDX-License-Identifier: Apache-2.0
"""What users do: install into an empty folder, ask pkg-config, compile outside the tree, run.

usage: install.py MESON BUILD-FOLDER PREFIX COMPILER...
Builds two programs with the installed files only: one that takes the address of every function the
headers declare (as C and, where there is a C++ compiler, the linker sees the same names), and the
example of README.md, which must print what README.md says it prints. So must its colo-plan, if that was
installed.
"""
import os
import re
import sys
import tempfile
from pathlib import Path

from api import ROOT, declared, foreign, headers, run

TOUCH = '''%s#include <stdio.h>
typedef void (*any_fn)(void);
static const struct { const char *name; any_fn fn; } all[] = {
%s};
int main(void)
{
    size_t i, n = sizeof all / sizeof *all;
    for (i = 0; i < n; i++)
        if (!all[i].fn)
            return 1;
    printf("%%zu functions, version %%s\\n", n, colo_version());
    return 0;
}
'''


def readme(what):
    text = (ROOT / 'README.md').read_text()
    block = re.search(r'<!-- %s -->\n```\w*\n(.*?)```\n<!-- end -->' % what, text, re.S)
    if not block:
        sys.exit('README.md: no block between <!-- %s --> and <!-- end -->' % what)
    return block.group(1)


def main(meson, build, prefix, compiler):
    with tempfile.TemporaryDirectory() as name:
        work, stage = Path(name), Path(name) / 'stage'
        run(meson, 'install', '-C', build, '--no-rebuild', '--quiet', '--destdir', stage,
            '--tags', 'devel,runtime')
        include = stage / prefix.lstrip('/') / 'include'
        there = sorted(str(p.relative_to(include)) for p in include.rglob('*.h'))
        if there != headers():
            sys.exit('installed headers %s, expected %s' % (there, headers()))
        pc = list(stage.rglob('colobridge.pc'))
        if len(pc) != 1:
            sys.exit('%d colobridge.pc installed' % len(pc))
        env = dict(os.environ, PKG_CONFIG_PATH=str(pc[0].parent), PKG_CONFIG_SYSROOT_DIR=str(stage))
        flags = run('pkg-config', '--cflags', '--libs', 'colobridge', env=env).split()
        library = pc[0].parent.parent
        env.pop('LD_LIBRARY_PATH', None)
        flags.append('-Wl,-rpath,%s' % library)
        for link in ('libcolobridge.so', 'libcolobridge.so.0'):
            if not (library / link).exists():
                sys.exit('%s is not installed' % link)

        # Programs of a prefix of the user's own start without LD_LIBRARY_PATH.
        libdir = '/' + str(library.relative_to(stage))
        for program in sorted((stage / prefix.lstrip('/') / 'bin').iterdir()):
            dynamic = run('readelf', '-d', program)
            if 'libcolobridge.so' in dynamic and '[%s]' % libdir not in dynamic:
                sys.exit('%s finds no library: found no RUNPATH [%s] in\n%s'
                         % (program.name, libdir, dynamic))

        plan = stage / prefix.lstrip('/') / 'bin' / 'colo-plan'
        if plan.exists():
            command, *wanted = readme('plan').splitlines()
            said = run(plan, *command.split()[2:]).splitlines()
            for line in wanted:
                if line != '...' and line not in said:
                    sys.exit('README.md says that "%s" prints:\n%s' % (command, line))

        (work / 'touch.c').write_text(TOUCH % (
            ''.join('#include <%s>\n' % h for h in headers() if not foreign(h)),
            ''.join('    {"%s", (any_fn)%s},\n' % (f, f) for f in declared())))
        (work / 'readme.c').write_text(readme('example'))
        for program in ('touch', 'readme'):
            run(*compiler, '-std=c11', '-Wall', '-Wextra', '-Wpedantic', '-Werror', '-o', program,
                program + '.c', *flags, cwd=work, env=env)
        print(run(work / 'touch', env=env), end='')
        said = run(work / 'readme', env=env)
        print(said, end='')
        if said != readme('prints'):
            sys.exit('README.md says that its example prints:\n' + readme('prints'))


main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
