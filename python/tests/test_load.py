# SPDX-License-Identifier: Apache-2.0
"""Which library is loaded, what is refused, and that an installed package finds its own."""
import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from colobridge import _lib
from colobridge._structs import VERSION

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY = _lib.find()


def run(code, *, python=sys.executable, cwd=None, **env):
    """Output of python -c @code with a clean path; None in @env removes a variable."""
    all_env = {k: v for k, v in dict(os.environ, **env).items() if v is not None}
    done = subprocess.run([str(python), '-c', code], env=all_env, text=True, cwd=cwd,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


FIRST = 'import colobridge as cb; print(cb.library_version(), cb._lib.find(), cb.__file__)'


@pytest.mark.parametrize('value, words', [
    ('/nonexistent', "COLOBRIDGE_LIBRARY is '/nonexistent', where there is no libcolobridge.so.0"),
    (os.path.dirname(__file__), 'where there is no libcolobridge.so.0'),
    (__file__, 'libcolobridge cannot be loaded'),
])
def test_a_missing_library_says_where_it_was_wanted(value, words):
    code, said = run(FIRST, COLOBRIDGE_LIBRARY=value)
    assert code != 0 and 'FailedError' in said and words in said, said


def test_threads_without_a_library_say_where_it_was_wanted():
    code, said = run('import colobridge as cb; cb.run_threads(2, print)', COLOBRIDGE_LIBRARY='/nonexistent')
    assert code == 1 and said.count('Traceback') == 1 and "COLOBRIDGE_LIBRARY is '/nonexistent'" in said, said


def test_the_environment_names_a_file_or_its_folder():
    for value in (LIBRARY, os.path.dirname(LIBRARY)):
        code, said = run(FIRST, COLOBRIDGE_LIBRARY=value)
        assert code == 0 and said.split()[1].startswith(os.path.dirname(LIBRARY)), said


@pytest.fixture
def fake(tmp_path):
    """Makes a library that says it is of another version."""
    compiler = shutil.which('cc') or shutil.which('gcc')
    if not compiler:
        pytest.skip('no C compiler')

    def make(number):
        source = tmp_path / 'fake.c'
        source.write_text('unsigned colo_version_number(void) { return %s; }\n' % number)
        path = tmp_path / 'libcolobridge.so.0'
        subprocess.run([compiler, '-shared', '-fPIC', '-o', str(path), str(source)], check=True)
        return str(path)
    return make


def test_another_version_is_refused(fake):
    with pytest.raises(RuntimeError, match='is version 9.8.7, this package is ' + VERSION):
        _lib.load(fake('9 << 16 | 8 << 8 | 7'))


def test_another_build_of_this_version_is_refused(fake):
    with pytest.raises(RuntimeError, match='is version %s and has no colo_' % VERSION):
        _lib.load(fake('%s << 16 | %s << 8 | %s' % tuple(VERSION.split('.'))))


def copy_of_package(folder):
    """The package alone, so that nothing of this checkout helps it."""
    shutil.copytree(PACKAGE / 'colobridge', folder / 'colobridge',
                    ignore=shutil.ignore_patterns('__pycache__'))
    return str(folder)


def test_losses_the_package_comes_before_pkg_config(tmp_path):
    path = copy_of_package(tmp_path)
    shutil.copy(os.path.realpath(LIBRARY), tmp_path / 'colobridge/libcolobridge.so.0')
    code, said = run(FIRST, cwd='/', PYTHONPATH=path, COLOBRIDGE_LIBRARY=None)
    assert code == 0 and said.split()[1] == str(tmp_path / 'colobridge/libcolobridge.so.0'), said


def test_pkg_config_is_asked(tmp_path):
    if not shutil.which('pkg-config'):
        pytest.skip('no pkg-config')
    path = copy_of_package(tmp_path)
    there = tmp_path / 'lib'
    there.mkdir()
    shutil.copy(os.path.realpath(LIBRARY), there / 'libcolobridge.so.0')
    (tmp_path / 'colobridge.pc').write_text('libdir=%s\nName: colobridge\nDescription: -\n'
                                            'Version: %s\n' % (there, VERSION))
    code, said = run(FIRST, cwd='/', PYTHONPATH=path, COLOBRIDGE_LIBRARY=None,
                     PKG_CONFIG_PATH=str(tmp_path))
    assert code == 0 and said.split()[1] == str(there / 'libcolobridge.so.0'), said


def test_meson_install_makes_a_package_that_finds_its_library(tmp_path):
    meson, build = os.environ.get('COLO_MESON'), os.environ.get('COLO_BUILD')
    if not build:
        pytest.skip('COLO_BUILD names no build folder')
    subprocess.run([meson, 'install', '-C', build, '--no-rebuild', '--quiet', '--destdir',
                    str(tmp_path), '--tags', 'runtime,python-runtime'], check=True,
                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    package = list(tmp_path.rglob('colobridge/py.typed'))
    assert len(package) == 1
    code, said = run(FIRST, cwd='/', PYTHONPATH=str(package[0].parents[1]),
                     COLOBRIDGE_LIBRARY=None, PKG_CONFIG_PATH=None)
    where = said.split()
    assert code == 0 and where[1].startswith(str(tmp_path)) and where[2].startswith(str(tmp_path)), said
    want = sorted(p.relative_to(PACKAGE / 'colobridge') for p in (PACKAGE / 'colobridge').rglob('*.py'))
    have = sorted(p.relative_to(package[0].parent) for p in package[0].parent.rglob('*.py'))
    assert [p for p in have if p.name != '_installed.py'] == want


def test_meson_installs_where_python_looks():
    info = Path(os.environ.get('COLO_BUILD') or '/nonexistent') / 'meson-info'
    if not info.is_dir():
        pytest.skip('COLO_BUILD names no build folder')
    options = {o['name']: o['value'] for o in json.loads((info / 'intro-buildoptions.json').read_text())}
    code, said = run('import json, site; print(json.dumps(site.getsitepackages()))', python='python3')
    sites = json.loads(said)
    if options['python.purelibdir'] or not any(s.startswith(options['prefix'] + '/') for s in sites):
        pytest.skip('the build installs to %s, which is not of this Python' % options['prefix'])
    where = json.loads((info / 'intro-installed.json').read_text()).values()
    assert {str(Path(p).parents[1]) for p in where if p.endswith('colobridge/py.typed')} <= set(sites)


def test_every_public_name_has_a_docstring():
    def missing(scope, where):
        for node in scope.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith('_'):
                if not ast.get_docstring(node) and not any(getattr(d, 'attr', '') == 'setter' or getattr(d, 'id', '') == 'overload'
                                                           for d in node.decorator_list):
                    yield '%s: %s' % (where, node.name)
                if isinstance(node, ast.ClassDef):
                    yield from missing(node, '%s: %s' % (where, node.name))
    files = list((PACKAGE / 'colobridge').glob('[!_]*.py'))
    assert len(files) > 10
    assert [name for file in files for name in missing(ast.parse(file.read_text()), file.name)] == []


def imports_of(package):
    """By module: the modules of a package that it imports, also inside of functions; not for checkers of types alone."""
    files = {'.'.join(path.relative_to(package.parent).with_suffix('').parts).removesuffix('.__init__'): path
             for path in package.rglob('*.py')}

    def found(name, path):
        within = name.split('.') if path.name == '__init__.py' else name.split('.')[:-1]
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and getattr(node.test, 'id', '') == 'TYPE_CHECKING')]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                of = '.'.join(within[:len(within) + 1 - node.level] * bool(node.level) + [node.module] * bool(node.module))
                yield from ('%s.%s' % (of, alias.name) if '%s.%s' % (of, alias.name) in files else of for alias in node.names)
    return {name: {of for of in found(name, path) if of in files and of != name} for name, path in files.items()}


def test_no_modules_import_each_other_in_a_circle():
    left = imports_of(Path(_lib.__file__).parent)
    assert len(left) > 40 and 'colobridge.torch.ranks' in left['colobridge.torch.calls']
    while True:
        ends = {name for name, of in left.items() if not of & left.keys()}
        if not ends:
            break
        left = {name: of for name, of in left.items() if name not in ends}
    assert not left, {name: sorted(of & left.keys()) for name, of in left.items()}
