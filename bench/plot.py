#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/speed.svg, the plot in README.md, from the table "Two GPUs" of bench/results/bridge.md.

usage: plot.py [--write]     without: exit 1 if the plot is not what the table says
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLOT = ROOT / 'docs/speed.svg'
BARS = [('torch', 'PyTorch, collectives', '#94a3b8'), ('EXACT nccl', 'colobridge, NCCL', '#0d9488'),
        ('EXACT peer', 'colobridge, peer memory', '#2563eb')]
LEFT, WIDE, BAR, GAP, TOP = 190, 600, 13, 14, 64  # pixels


def total(cell):
    """"386 / 382" -> 768: forward and backward together"""
    return sum(float(part) for part in cell.split('/'))


def rows():
    """(layout, {column: µs}, µs of the limit) of each row whose samples are outermost"""
    text = (ROOT / 'bench/results/bridge.md').read_text().split('\n## Two GPUs\n')[1]
    lines = [line[2:-2] for line in re.search(r'(?:^\|.*\n)+', text, re.M)[0].splitlines()]
    names = lines[0].split(' | ')
    for line in lines[1:]:
        cells = dict(zip(names, line.split(' | ')))
        if not cells['layout'].endswith(' bsh'):
            continue
        pushes, copies = (cells[name].split('/') for name in ('push µs', 'copy µs'))
        limit = sum(max(float(push), float(copy)) for push, copy in zip(pushes, copies))
        yield cells['layout'][:-4], {name: total(cells[name]) for name, _, _ in BARS}, limit


def svg():
    found = list(rows())
    most = max(max(times.values()) for _, times, _ in found)
    high = TOP + len(found) * (len(BARS) * BAR + GAP) + 26
    scale = WIDE / most
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" '
           'aria-labelledby="t" font-family="system-ui, sans-serif" font-size="12">' % (*[LEFT + WIDE + 90, high] * 2,),
           '<title id="t">Forward and backward of a bridge on two H200 GPUs, in milliseconds</title>',
           '<rect width="%d" height="%d" rx="10" fill="#ffffff"/>' % (LEFT + WIDE + 90, high),
           '<text x="16" y="26" font-size="15" font-weight="700" fill="#0f172a">Forward + backward, ms: two H200, '
           '16 x 8192 x 4096 bf16</text>']
    at = 16
    for _, words, colour in BARS:
        out += ['<rect x="%d" y="38" width="12" height="12" fill="%s"/>' % (at, colour),
                '<text x="%d" y="48" fill="#334155">%s</text>' % (at + 18, words)]
        at += 40 + 7 * len(words)
    out += ['<path d="M%d 37v14" stroke="#dc2626" stroke-width="2"/>' % (at + 6),
            '<text x="%d" y="48" fill="#334155">the hardware\'s bound</text>' % (at + 18)]
    y = TOP
    for layout, times, limit in found:
        out.append('<text x="%d" y="%d" text-anchor="end" fill="#0f172a">%s</text>'
                   % (LEFT - 10, y + len(BARS) * BAR / 2 + 4, layout))
        for name, _, colour in BARS:
            out += ['<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>' % (LEFT, y, times[name] * scale, BAR - 1, colour),
                    '<text x="%.1f" y="%d" fill="#334155">%.2f</text>' % (LEFT + times[name] * scale + 5, y + BAR - 3, times[name] / 1e3)]
            y += BAR
        out.append('<path d="M%.1f %dv%d" stroke="#dc2626" stroke-width="2"/>'
                   % (LEFT + limit * scale, y - len(BARS) * BAR - 2, len(BARS) * BAR + 3))
        y += GAP
    return '\n'.join([*out, '</svg>']) + '\n'


if __name__ == '__main__':
    if sys.argv[1:] == ['--write']:
        PLOT.write_text(svg())
    elif not PLOT.exists() or PLOT.read_text() != svg():
        sys.exit('docs/speed.svg is not what bench/results/bridge.md says; bench/plot.py --write')
