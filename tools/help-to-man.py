# SPDX-License-Identifier: Apache-2.0
"""A man page from what a tool says about itself, so that there is one text to keep right.

usage: help-to-man.py NAME VERSION "what it is, in one line" OUTPUT PROGRAM [ARGUMENT...]
Runs PROGRAM ARGUMENT... --help. Understood: "usage:" lines, paragraphs, options (lines that begin
with two blanks and "--", their text in the column that most of them use), "example:" blocks and the
exit statuses.
"""
import re
import subprocess
import sys
from collections import Counter


def plain(text):
    """Text that roff takes literally."""
    text = text.replace('\\', '\\e').replace('-', '\\-')
    return re.sub(r"^([.'])", r'\\&\1', text, flags=re.M)


def options(lines):
    """[(what to type, what it does)]"""
    columns = Counter(m.end() for line in lines if (m := re.match(r'  --.*? {2,}(?=\S)', line)))
    column = columns.most_common(1)[0][0] if columns else 80
    found = []
    for line in lines:
        left, right = line[:column].strip(), line[column:].strip()
        if re.match(r' {%d,}\S' % column, line):
            found[-1][1].append(line.strip())
        elif len(line) > column and line[column - 1] != ' ':  # too long for the column: all of it
            left, right = line.strip(), ''
            if found and not found[-1][1]:
                found[-1][0] += ' ' + left
            else:
                found.append([left, []])
        elif found and not found[-1][1] and not left.startswith('--'):
            found[-1][0] += ' ' + left
        else:
            found.append([left, [right] if right else []])
    return found


def page(name, version, what, text):
    usage, about, lines, examples, exits = [], [], [], [], []
    for block in text.strip('\n').split('\n\n'):
        rows = block.split('\n')
        if rows[0].startswith('usage:'):
            rest = [r for r in rows if not re.match(r'usage:|\s{6}', r)]
            usage += [re.sub(r'^usage:|^\s+', '', r).strip() for r in rows if r not in rest]
            about += [' '.join(rest)] if rest else []
        elif any(r.startswith('  --') for r in rows) and not re.match('example', rows[0], re.I):
            lines += rows
        elif re.match('example', rows[0], re.I):
            examples.append(rows)
        elif re.search(r'\bexit\b', block, re.I):
            exits.append(' '.join(rows))
        else:
            about.append(' '.join(rows))
    out = ['.TH %s 1 "" "colobridge %s" "User Commands"' % (name.upper(), version),
           '.SH NAME', plain(name) + ' \\- ' + plain(what), '.SH SYNOPSIS', '.nf']
    out += [plain(u) for u in usage] + ['.fi', '.SH DESCRIPTION']
    out += ['\n.PP\n'.join(plain(a) for a in about), '.SH OPTIONS']
    for left, right in options(lines):
        out += ['.TP', '.B ' + plain(left)] + [plain(re.sub(' {2,}', ' ', r)) for r in right]
    if exits:
        out += ['.SH EXIT STATUS'] + [plain(re.sub(r'^exit status: ', '', e)) for e in exits]
    if examples:
        out.append('.SH EXAMPLES')
    for rows in examples:
        shown = next((i for i, r in enumerate(rows) if r.startswith('  ')), len(rows))
        title, rows = re.sub(r'^example:\s*', '', ' '.join(rows[:shown]), flags=re.I), rows[shown:]
        if not rows:
            rows, title = ['  ' + title], ''
        out += ['.PP', plain(title)] if title else ['.PP']
        out += ['.nf'] + [plain(r) for r in rows] + ['.fi']
    others = [t for t in ('colo-plan', 'colo-info', 'colo-perf', 'colo-captioner') if t != name]
    out += ['.SH SEE ALSO', ', '.join('.BR %s (1)' % plain(t) for t in others).replace(', .BR', ',\n.BR')]
    return re.sub(r'\(1\),$', '(1),', '\n'.join(out), flags=re.M) + '\n'


def main(name, version, what, output, *program):
    done = subprocess.run([*program, '--help'], stdout=subprocess.PIPE, text=True, check=True)
    with open(output, 'w', encoding='utf-8') as f:
        f.write(page(name, version, what, done.stdout))


if __name__ == '__main__':
    main(*sys.argv[1:])
