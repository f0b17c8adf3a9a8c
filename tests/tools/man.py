# SPDX-License-Identifier: Apache-2.0
"""A tool's man page has its sections, every option of its --help with a text, no stray roff, and no line that is wider
than a terminal.

usage: man.py PAGE PROGRAM
"""
import re
import subprocess
import sys
from pathlib import Path


def main(page, program):
    raw = Path(page).read_text()
    text = raw.replace('\\-', '-').replace('\\&', '').replace('\\e', '\\')
    said = subprocess.run([program, '--help'], stdout=subprocess.PIPE, text=True, check=True).stdout
    name = Path(program).name
    sections = re.findall(r'^\.SH (.*)$', text, re.M)
    expected = ['NAME', 'SYNOPSIS', 'DESCRIPTION', 'OPTIONS', 'EXIT STATUS', 'EXAMPLES', 'SEE ALSO']
    if sections != expected:
        sys.exit('sections %s, expected %s' % (sections, expected))
    if '\n%s - ' % name not in text:
        sys.exit('the NAME section does not begin with "%s - "' % name)
    body = text[text.index('.SH OPTIONS'):text.index('.SH EXIT STATUS')]
    heads = re.findall(r'^\.TP\n\.B (.*)$', body, re.M)
    for option in re.findall(r'^  (--[a-z-]+)', said, re.M):
        if not any(re.search(re.escape(option) + r'\b', h) for h in heads):
            sys.exit('%s is not in the page' % option)
    words = set(re.findall(r'[\w.]+', text))
    lost = [w for w in re.findall(r'[\w.]+', said) if w not in words and w.lower() not in
            ('usage', 'example', 'exit', 'status')]
    if lost:
        sys.exit('words of --help that are not in the page: %s' % lost)
    for line in raw.split('\n'):
        if re.match(r"[.']", line) and not re.match(r'\.(TH|SH|TP|PP|B|BR|nf|fi)\b', line):
            sys.exit('not one of our requests: %s' % line)
    # What is not filled is indented by 7 columns on a terminal of 80.
    long = [line for part in re.findall(r'^\.nf\n(.*?)^\.fi$', text, re.M | re.S) for line in part.split('\n')
            if len(line) > 73] + [line for line in said.split('\n') if len(line) > 80]
    if long:
        sys.exit('wider than 80 columns: %s' % long)
    if subprocess.run([program, '-h'], stdout=subprocess.PIPE, text=True, check=True).stdout != said:
        sys.exit('-h is not --help')
    print('%d options' % len(heads))


main(*sys.argv[1:])
