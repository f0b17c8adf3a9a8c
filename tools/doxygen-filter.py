# SPDX-License-Identifier: Apache-2.0
"""Prints a public header with its comments as Doxygen reads them: "name() - what" is the brief, "@name: " a parameter,
the comment at the head the file's, and each comment of a member belongs to that member.

usage: doxygen-filter.py HEADER
"""
import re
import sys
from pathlib import Path


def plain(text):
    """What Doxygen would take for a command or for HTML is text."""
    return re.sub(r'[\\<>]', lambda found: {'\\': '\\\\', '<': '&lt;', '>': '&gt;'}[found[0]], text)


def call(found):
    body = re.sub(r'^(\s*\*?\s*)colo_\w+\(\) - ', r'\1@brief ', plain(found[2]), count=1)
    body = re.sub(r'^(\s*\* )@(\w+):', r'\1@param \2', body, flags=re.M)
    body = re.sub(r'^ \* (\w[\w ]*):(?= )', r' * @par \1:\n *', body, flags=re.M)
    return '/**%s%s*/' % (found[1], re.sub(r'@(?!brief\b|param\b|par\b)', '@@', body))


def members(found):
    """Comments between the braces of a struct or an enum."""
    body = re.sub(r'(?<=[;,]) */\* ', ' /**< ', found[0])                 # behind a member
    body = re.sub(r'(?<=\w) */\* (?=[^\n]*\*/\n\s*(?:\}|$))', ' /**< ', body)  # behind the last enumerator
    return re.sub(r'(?<=\n)( *)/\* ', r'\1/** ', body)


text = Path(sys.argv[1]).read_text()
text = re.sub(r'/\*\n \* ([\w.]+\.h) - (.*?)\*/', lambda found: '/** @file %s\n * @brief %s */' % (
    found[1], plain(found[2]).replace('@', '@@')), text, count=1, flags=re.S)
text = re.sub(r'^typedef (?:struct|enum) \w+ \{.*?^\}', members, text, flags=re.M | re.S)
text = re.sub(r'/\*\*(?! @file)(<?)((?:[^*]|\*(?!/))*)\*/', call, text)
text = re.sub(r'^#ifdef __cplusplus /\* C\+\+17.*?^#else\n(.*?)^#endif', r'\1', text, flags=re.M | re.S)
print(text)
