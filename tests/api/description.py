# SPDX-License-Identifier: Apache-2.0
"""What a package index shows of README.md has no link that leads nowhere there, and the wheel's RECORD says its hash."""
import base64
import hashlib
import re
import sys
import tempfile
import zipfile
from pathlib import Path

from api import ROOT

sys.path.insert(0, str(ROOT / 'python'))
from description import absolute, describe  # noqa: E402


def links(text):
    return re.findall(r'\]\(([^)\s]+)\)', text)


def wheel(path, head, text):
    said = (head + '\n\n' + text).encode()
    with zipfile.ZipFile(path, 'w') as file:
        file.writestr('a.py', 'pass')
        file.writestr('a-1.0.dist-info/METADATA', said)
        file.writestr('a-1.0.dist-info/RECORD', 'a.py,sha256=x,4\na-1.0.dist-info/METADATA,sha256=x,1\na-1.0.dist-info/RECORD,,\n')


def main():
    text = (ROOT / 'README.md').read_text()
    assert len(links(text)) > 20
    there = absolute(text, 'https://example.org/of/colobridge/', '1.0')
    bad = [link for link in links(there) if not link.startswith('https://')]
    assert not bad and len(links(there)) == len(links(text)), bad
    assert '![' in there and '(https://example.org/of/colobridge/raw/v1.0/docs/picture.svg)' in there
    without = absolute(text, None, '1.0')
    assert not links(without) and 'vision towers' in without and '![' not in without
    assert absolute('```\n[a](b)\n```\n', None, '1') == '```\n[a](b)\n```\n'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'a-1.0-py3-none-any.whl'
        wheel(path, 'Name: a\nVersion: 1.0\nProject-URL: Source, https://example.org/a', text)
        describe(path)
        with zipfile.ZipFile(path) as file:
            said, record = file.read('a-1.0.dist-info/METADATA'), file.read('a-1.0.dist-info/RECORD').decode()
            assert file.testzip() is None and file.read('a.py') == b'pass'
    assert b'https://example.org/a/blob/v1.0/CONTRIBUTING.md' in said
    digest = base64.urlsafe_b64encode(hashlib.sha256(said).digest()).rstrip(b'=').decode()
    assert 'a-1.0.dist-info/METADATA,sha256=%s,%d\n' % (digest, len(said)) in record and 'a.py,sha256=x,4\n' in record, record


main()
