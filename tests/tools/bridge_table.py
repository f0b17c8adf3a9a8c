# SPDX-License-Identifier: Apache-2.0
"""bench/bridge-table.py on rows with round figures: sums, ratios, missing columns, wrong results.

usage: bridge_table.py BENCH/BRIDGE-TABLE.PY
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MIB = 1 << 20


def row(op, way, us, arrive=128 * MIB, size=256 * MIB, wrong=0, **more):
    return dict(src='tp=1,dp=4', dst='tp=1,cp=2,dp=2', axes='bsh', dtype='bf16', output='sharded', batch=16,
                seq=8192, hidden=4096, way=way, op=op, replayed=False, view=False, bytes=size,
                arrive_bytes=arrive, local_bytes=0, time_us=us, best_us=us, percent=50, wrong=wrong, **more)


def doc(rows, **more):
    return dict({'tool': 'colo-perf', 'version': '0', 'date': '2000-01-02', 'device': 'D', 'gpus': 4,
                 'cuda': '13', 'command': 'colo-perf bridge x', 'warmup': 1, 'iters': 2, 'bridge': rows}, **more)


def page(script, *docs):
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, d in enumerate(docs):
            files.append(str(Path(folder) / ('%d.json' % i)))
            Path(files[-1]).write_text(json.dumps(d))
        return subprocess.run([sys.executable, '-B', script, '--from', *files], stdout=subprocess.PIPE, text=True,
                              check=True).stdout


def cells(text, title):
    lines = text.split('\n')
    head = next(i for i, l in enumerate(lines) if l.startswith('| ' + title))
    split = lambda l: [c.strip() for c in l.strip('|').split('|')]
    return dict(zip(split(lines[head]), split(lines[head + 2])))


def refused(script, *words):
    """The one error message of a run that cannot measure; nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        keep = Path(folder) / 'keep'
        done = subprocess.run([sys.executable, '-B', script, '--keep', str(keep), '--no-torch', *words],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 1 or done.stdout or len(done.stderr.strip().split('\n')) != 1 or keep.exists():
            sys.exit('%s: %d: %s' % (' '.join(words), done.returncode, done.stderr))
        return done.stderr


def want(found, **expected):
    for key, value in expected.items():
        key = key.replace('_', ' ').replace(' per ', ' / ')
        if found[key] != value:
            sys.exit('%s: %s, expected %s' % (key, found[key], value))


def main(script):
    rows = []
    for op, forward, backward in (('push', 400, 300), ('exact-nccl', 1000, 500), ('reference', 2000, 4000),
                                  ('tuned', 1500, 1500)):
        rows += [row(op, 'forward', forward), row(op, 'backward', backward, arrive=64 * MIB)]
    rows += [row('exact-peer', 'forward', 450), row('exact-peer', 'backward', 350, wrong=7)]
    torch = [row('torch', 'forward', 2500), row('torch', 'backward', 5000)]
    small = [dict(r, bytes=64 << 10, replayed=g, time_us=r['time_us'] / (100 if g else 10))
             for r in rows for g in (False, True)]
    text = page(script, doc(rows), doc(torch, tool='torch', nccl=1), doc(small))
    want(cells(text, 'layout | tensor MiB'), layout='tp1-dp4 → tp1-cp2-dp2 bsh', tensor_MiB='256',
         must_arrive_MiB='128 + 64', EXACT_peer='450 / 350', EXACT_nccl='1000 / 500',
         reference='2000 / 4000', torch='2500 / 5000', reference_per_peer='7.50',
         reference_per_nccl='4.00', tuned_per_peer='3.75', reference_per_torch='0.80',
         reference_per_wide='–', library_COLLECTIVE='–')
    found = cells(text, 'layout | tensor KiB')
    want(found, tensor_KiB='64', EXACT_peer='45.0 / 35.0', EXACT_nccl='100.0 / 50.0')
    if '| 4.5 / 3.5 |' not in text:
        sys.exit('no replayed time of the peer path')
    if ' 21 wrong' not in text: # of the table, and twice of the small one
        sys.exit('wrong results are not said: %s' % text)
    if cells(page(script, doc(rows)), 'layout | tensor MiB')['push µs'] != '400 / 300':
        sys.exit('the limit is another')
    text = page(script, doc([r for r in rows if r['op'] != 'exact-peer']))
    want(cells(text, 'layout | tensor MiB'), EXACT_peer='–', reference_per_peer='–', torch='–')
    if 'not run' not in text or ' 0 wrong' not in text:
        sys.exit('torch is not said to be missing')
    for n in (0, 1):
        said = refused(script, '--gpus', str(n))
        if 'a bridge needs at least 2 GPUs, --gpus is %d' % n not in said:
            sys.exit('--gpus %d: %s' % (n, said))
    print('2 pages')


main(*sys.argv[1:])
