#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# site.sh - the pages as a site in build/site: mkdocs with every link checked, the Python reference from docstrings and
# types, and the C reference by Doxygen, if it is here. Exit: 0 it is made, 1 a page is wrong, 77 this machine cannot
# make it (no pip, or no package index).
#
#   tools/site.sh                  builds it
#   tools/site.sh --serve          and shows it at http://localhost:8000, without the C reference, as pages change
set -euo pipefail
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

serve=no
read_options serve -- "$@"
python=$(python_with ensurepip) || { say "no site: no Python with ensurepip (Debian: python3-venv)" && exit 77; }
there=build-site
[ -x $there/bin/mkdocs ] || {
    say "making an environment for mkdocs"
    "$python" -m venv $there
    $there/bin/pip install --quiet --timeout 20 --retries 1 --disable-pip-version-check \
        'mkdocs-material>=9.5' 'mkdocstrings-python>=1.13' ruff || {
        rm -rf $there
        say "no site: no package index"
        exit 77
    }
}
export NO_MKDOCS_2_WARNING=1
export PATH=$root/$there/bin:$PATH
[ "$serve" = no ] || exec mkdocs serve
say "making the pages"
mkdocs build --quiet --strict
python3 - <<'END'
import ast, pathlib, re, sys
page = pathlib.Path('build/site/reference/python.html').read_text()
there, missing = set(re.findall(r'<h\d id="([^"]+)"', page)), []
for module in 'colobridge', 'colobridge.torch', 'colobridge.megatron', 'colobridge.compat':
    path = pathlib.Path('python', *module.split('.'))
    path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
    names = next(ast.literal_eval(node.value) for node in ast.parse(path.read_text()).body
                 if isinstance(node, ast.Assign) and node.targets[0].id == '__all__')
    missing += [module + '.' + name for name in names if name[0] != '_'
                and not {'%s.%s' % (module, name), '%s.%s.%s' % (module, name, name)} & there]
if missing:
    sys.exit('not in the Python reference: ' + ', '.join(missing))
print('%d names in the Python reference' % len(there))
END
if has doxygen; then
    say "making the C reference"
    doxygen tools/Doxyfile
else
    say "without Doxygen: no C reference"
    rm -r build/site/c
fi
say "done: build/site/index.html"
