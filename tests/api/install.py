# SPDX-License-Identifier: Apache-2.0
"""What users do: install into an empty folder, ask pkg-config or CMake, compile outside the tree, run.

usage: install.py shared MESON BUILD-FOLDER PREFIX COMPILER...
       install.py cmake  MESON BUILD-FOLDER PREFIX COMPILER...   77 where CMake is missing
       install.py static MESON COMPILER...
Builds two programs with the installed files only: one that takes the address of every function the
headers declare (as C and, where there is a C++ compiler, the linker sees the same names), and the
program of docs/guides/c.md, which must print what that says it prints. So must its colo-plan, if that was
installed. "static" builds -Ddefault_library=static first, without optimization and all that is not the library.
"""
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from api import ROOT, declared, for_modules, foreign, headers, run, version

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


def page(what, name='docs/guides/c.md'):
    text = (ROOT / name).read_text()
    block = re.search(r'<!-- %s -->\n```\w*\n(.*?)```\n<!-- end -->' % what, text, re.S)
    if not block:
        sys.exit('%s: no block between <!-- %s --> and <!-- end -->' % (name, what))
    return block.group(1)


# What CMake must find, and which versions it must not; @ is the installed version.
CMAKE = '''cmake_minimum_required(VERSION 3.13)
project(user C)
foreach(other 0.0.1 @)
  find_package(colobridge ${other} REQUIRED CONFIG)
endforeach()
foreach(other @.1 0.99 1.0)
  find_package(colobridge ${other} QUIET CONFIG)
  if(colobridge_FOUND)
    message(FATAL_ERROR "version @ is taken for ${other}")
  endif()
endforeach()
find_package(colobridge REQUIRED CONFIG)
add_executable(readme readme.c)
target_link_libraries(readme colobridge::colobridge)
'''


def write_programs(work):
    (work / 'touch.c').write_text(TOUCH % (
        ''.join('#include <%s>\n' % h for h in headers() if not foreign(h)),
        ''.join('    {"%s", (any_fn)%s},\n' % (f, f) for f in declared())))
    (work / 'readme.c').write_text(page('example'))


def run_readme(program, env):
    said = run(program, env=env)
    print(said, end='')
    if said != page('prints'):
        sys.exit('docs/guides/c.md says that its program prints:\n' + page('prints'))


def pkg_config(stage, *options):
    """The folder of the library, and what pkg-config says of it."""
    pc = list(stage.rglob('colobridge.pc'))
    if len(pc) != 1:
        sys.exit('%d colobridge.pc installed' % len(pc))
    env = dict(os.environ, PKG_CONFIG_PATH=str(pc[0].parent), PKG_CONFIG_SYSROOT_DIR=str(stage))
    return pc[0].parent.parent, run('pkg-config', '--cflags', '--libs', *options, 'colobridge', env=env).split()


def compile_and_run(work, compiler, flags):
    env = {name: value for name, value in os.environ.items() if name != 'LD_LIBRARY_PATH'}
    write_programs(work)
    for program in ('touch', 'readme'):
        run(*compiler, '-std=c11', '-Wall', '-Wextra', '-Wpedantic', '-Werror', '-o', program,
            program + '.c', *flags, cwd=work, env=env)
    print(run(work / 'touch', env=env), end='')
    run_readme(work / 'readme', env)


def cmake(work, prefix, compiler):
    """The installed folder is another one now, with a name that must be quoted."""
    work = work / 'by cmake'
    work.mkdir()
    moved = shutil.move(prefix, work / 'moved $here')
    write_programs(work)
    (work / 'CMakeLists.txt').write_text(CMAKE.replace('@', version()))
    env = {name: value for name, value in os.environ.items() if name not in ('LD_LIBRARY_PATH', 'CC')}
    run('cmake', '-S', work, '-B', work / 'build', '-DCMAKE_PREFIX_PATH=%s' % moved,
        '-DCMAKE_C_COMPILER=' + ';'.join(compiler), env=env)
    run('cmake', '--build', work / 'build', env=env)
    run_readme(work / 'build' / 'readme', env)


def hardened(library, options):
    """A release resolves and protects its tables when it is loaded, and its stack and buffers are guarded."""
    if options['optimization'] in ('plain', '0', 'g') or options['b_sanitize'] != 'none' or options['fuzz']:
        return
    said = run('readelf', '-d', library)
    if 'BIND_NOW' not in said:
        sys.exit('%s is not bound when it is loaded:\n%s' % (library, said))
    names = run('nm', '-D', '--undefined-only', library)
    for name in r'__stack_chk_fail\b', r'__\w+_chk\b':
        if not re.search(name, names):
            sys.exit('%s calls no %s' % (library, name))


def shared(work, stage, prefix, compiler):
    include = prefix / 'include'
    there = sorted(str(p.relative_to(include)) for p in include.rglob('*.h'))
    if there != headers():
        sys.exit('installed headers %s, expected %s' % (there, headers()))
    if (prefix / 'share/licenses/colobridge/LICENSE').read_text() != (ROOT / 'LICENSE').read_text():
        sys.exit('the installed licence is another')
    library, flags = pkg_config(stage)
    for link in ('libcolobridge.so', 'libcolobridge.so.0'):
        if not (library / link).exists():
            sys.exit('%s is not installed' % link)

    # Programs start without LD_LIBRARY_PATH, wherever they are now.
    alone = {name: value for name, value in os.environ.items() if name != 'LD_LIBRARY_PATH'}
    moved = Path(shutil.copytree(prefix, work / 'moved é', symlinks=True))
    for program in sorted((moved / 'bin').iterdir()):
        run(program, '--help', env=alone)
        used = re.search(r'libcolobridge\.so\.0 => (.*) \(', run('ldd', program, env=alone))
        if used and work / 'moved é' not in Path(used[1]).resolve().parents:
            sys.exit('%s runs with %s' % (program, used[1]))

    plan = prefix / 'bin' / 'colo-plan'
    if plan.exists():
        command, *wanted = page('plan', 'README.md').splitlines()
        said = run(plan, *command.removeprefix('$ colobridge plan').split()).splitlines()
        for line in wanted:
            if line != '...' and line not in said:
                sys.exit('README.md says that "%s" prints:\n%s' % (command, line))
    compile_and_run(work, compiler, [*flags, '-Wl,-rpath,%s' % library])


def static(work, stage, meson, compiler):
    lacks = ['tests', 'tools', 'examples', 'python', 'mpi', 'ucx', 'cuda', 'nccl']
    run(meson, 'setup', work / 'build', ROOT, '--buildtype=debug', '-Ddebug=false', '-Ddefault_library=static',
        '-Dwerror=true', *('-D%s=disabled' % lack for lack in lacks), env=dict(os.environ, CC=' '.join(compiler)))
    run('ninja', '-C', work / 'build')
    run(meson, 'install', '-C', work / 'build', '--no-rebuild', '--quiet', '--destdir', stage)
    if shared_ones := [path.name for path in stage.rglob('*.so*')]:
        sys.exit('-Ddefault_library=static installs %s' % shared_ones)
    library, flags = pkg_config(stage, '--static')
    for line in run('nm', '--defined-only', '-g', library / 'libcolobridge.a').splitlines():
        if re.search(r' [A-UX-Z] (?!colo_)', line):  # other than weak: the program may have it, too
            sys.exit('libcolobridge.a has the name: ' + line)
    compile_and_run(work, compiler, flags)
    needs = re.findall(r'\(NEEDED\).*\[(.*)\]', run('readelf', '-dW', work / 'readme'))
    if any('colobridge' in need or 'hwloc' in need for need in needs):
        sys.exit('the program with the archive in it needs %s' % needs)
    # where backends look for them
    exported = re.findall(r'\bcolo_\w+', run('nm', '-D', '--defined-only', work / 'readme'))
    if lost := set(for_modules()) - set(exported):
        sys.exit('the program with the archive in it hides %s' % sorted(lost))


def main(how, meson, *more):
    with tempfile.TemporaryDirectory() as name:
        work, stage = Path(name), Path(name) / 'stage'
        if how == 'cmake' and not shutil.which('cmake'):
            print('no cmake')
            return 77
        if how == 'static':
            static(work, stage, meson, more)
            if shutil.which('cmake'):
                cmake(work, stage / 'usr/local', more)
            return 0
        build, prefix, *compiler = more
        run(meson, 'install', '-C', build, '--no-rebuild', '--quiet', '--destdir', stage,
            '--tags', 'devel,runtime')
        prefix = stage / prefix.lstrip('/')
        hardened(next(stage.rglob('libcolobridge.so.0')), {option['name']: option['value'] for option in json.loads(
            run(meson, 'introspect', '--buildoptions', build))})
        shared(work, stage, prefix, compiler) if how == 'shared' else cmake(work, prefix, compiler)
        return 0


sys.exit(main(*sys.argv[1:]))
