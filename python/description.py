# SPDX-License-Identifier: Apache-2.0
"""What a package index shows of README.md: its links lead to the repository that pyproject.toml names as "Source", at the tag
of the version. Without one they are words, and pictures are left out, because nothing of an index lies next to the page.
"""
import base64
import hashlib
import re
import zipfile


def absolute(text, source, version):
    """README.md for an index"""
    def one(found):
        picture, words, target = found.groups()
        if re.match(r'\w+:', target):
            return found[0]
        if source:
            return '%s[%s](%s/%s/v%s/%s)' % (picture, words, source.rstrip('/'), 'raw' if picture else 'blob', version, target)
        return '' if picture else words

    parts = re.split(r'(^```.*?^```$)', text, flags=re.S | re.M)
    return ''.join(part if i % 2 else re.sub(r'(!?)\[([^\]]*)\]\(([^)\s]+)\)', one, part) for i, part in enumerate(parts))


def describe(wheel):
    """Writes the description of a wheel anew, and what its RECORD says of it."""
    with zipfile.ZipFile(wheel) as file:
        there = [(info, file.read(info)) for info in file.infolist()]
    name = next(info.filename for info, _ in there if info.filename.endswith('.dist-info/METADATA'))
    head, text = dict((info.filename, data) for info, data in there)[name].decode().split('\n\n', 1)
    source = re.search(r'^Project-URL: Source, (\S+)$', head, re.M)
    version = re.search(r'^Version: (\S+)$', head, re.M)
    said = (head + '\n\n' + absolute(text, source and source[1], version[1])).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(said).digest()).rstrip(b'=').decode()
    with zipfile.ZipFile(wheel, 'w', zipfile.ZIP_DEFLATED) as file:
        for info, data in there:
            if info.filename == name:
                data = said
            elif info.filename.endswith('.dist-info/RECORD'):
                data = re.sub(r'^%s,.*$' % re.escape(name), '%s,sha256=%s,%d' % (name, digest, len(said)), data.decode(), flags=re.M).encode()
            file.writestr(info, data)
