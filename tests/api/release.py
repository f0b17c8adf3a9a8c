# SPDX-License-Identifier: Apache-2.0
"""tools/release.sh says all steps of a release without doing one, and refuses a version that nothing is written of.

usage: release.py BASH
"""
import shutil
import subprocess
import sys

from api import ROOT, version as headers_version


def said(bash, *words):
    done = subprocess.run([bash, str(ROOT / 'tools/release.sh'), '--dry-run', *words], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def main(bash):
    if not shutil.which('git') or subprocess.run(['git', 'rev-parse'], cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
        return 77  # no git, or no repository
    version = headers_version()
    before = subprocess.run(['git', 'diff'], cwd=ROOT, stdout=subprocess.PIPE).stdout
    rc, text = said(bash, version)
    if f'there is a tag v{version}' not in text:
        wanted = ['version.h', 'CHANGELOG.md', 'CITATION.cff', 'tests/api/abi.py --write', '.ci/run', 'tools/systems.sh',
                  'tools/wheel.sh dist', 'meson dist', 'git commit', 'git tag -a v' + version]
        missing = [word for word in wanted if word not in text]
        if rc or missing:
            sys.exit('tools/release.sh --dry-run %s: status %d, without %s\n%s' % (version, rc, missing, text))
    for words in (['9.9.9'], ['1.0'], [], ['--from', 'nothing', version]):
        rc, text = said(bash, *words)
        if rc != 2:
            sys.exit('tools/release.sh --dry-run %s: status %d, expected 2\n%s' % (' '.join(words), rc, text))
    if subprocess.run(['git', 'diff'], cwd=ROOT, stdout=subprocess.PIPE).stdout != before:
        sys.exit('a dry run changed the tree')
    return 0


sys.exit(main(*sys.argv[1:]))
