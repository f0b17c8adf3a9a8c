#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The bridge against COLLECTIVE, in all columns, as one page of markdown.

usage: bench/bridge-table.py [--perf build/tools/colo-perf] [--gpus N] [--layouts ENTRY...] [-n N]
                             [-w N] [--no-torch] [--keep FOLDER] [--out FILE]
       bench/bridge-table.py --from PERF.json [TORCH.json] [SMALL.json] [--out FILE]

Runs colo-perf bridge over the pairs of layouts that suit the GPUs, bsh and sbh, B=16 S=8192 H=4096,
bf16, sharded output; once more for small tensors; and the same with torch.distributed
(bench/torch/bridge_reference.py), where torchrun is. --from only writes the page. Python's standard
library; torchrun brings its own.
"""
import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAIRS = {
    2: ['tp=1,dp=2->tp=1,cp=2,dp=1', 'tp=2,dp=1->tp=1,cp=2,dp=1', 'tp=1,dp=2->tp=2,dp=1',
        'tp=2,dp=1->tp=1,dp=2'],
    4: ['tp=1,dp=4->tp=1,cp=2,dp=2', 'tp=1,dp=4->tp=1,cp=4,dp=1', 'tp=1,dp=4->tp=2,cp=2,dp=1',
        'tp=2,dp=2->tp=2,cp=2,dp=1', 'tp=2,dp=2->tp=1,cp=2,dp=2', 'tp=4,dp=1->tp=1,cp=2,dp=2',
        'tp=1,dp=4->tp=4,cp=1,dp=1'],
    8: ['tp=2,dp=4->tp=2,cp=2,dp=2', 'tp=1,dp=8->tp=1,cp=4,dp=2', 'tp=1,dp=8->tp=2,cp=4,dp=1',
        'tp=4,dp=2->tp=2,cp=2,dp=2', 'tp=4,dp=2->tp=1,cp=2,dp=4', 'tp=1,dp=8->tp=4,cp=1,dp=2'],
}
OPS = ['exact-peer', 'exact-nccl', 'reference', 'tuned', 'torch', 'torch-wide', 'collective']
MIB = 1 << 20


def short(spec):
    return spec.split('@')[0].replace('=', '').replace(',', '-')


def table(rows):
    """{(src, dst, axes, bytes): {(op, way, replayed): row}}"""
    all = {}
    for r in rows:
        at = all.setdefault((r['src'], r['dst'], r['axes'], r['bytes']), {})
        at[r['op'], r['way'], bool(r['replayed'])] = r
    return all


def ways(t, op, field='time_us', replayed=False):
    found = [t.get((op, way, replayed), {}).get(field) for way in ('forward', 'backward')]
    return None if None in found else found


def both(v, digits=0):
    return '–' if v is None else '%.*f / %.*f' % (digits, v[0], digits, v[1])


def ratio(a, b):
    return '–' if not a or not b else '%.2f' % (sum(a) / sum(b))


def limits(t):
    """us of push and of copy, forward and backward; 0 where nothing arrives or stays"""
    return [[t.get((op, way, False), {}).get('time_us', 0) for way in ('forward', 'backward')]
            for op in ('push', 'copy')]


def any_row(t):
    return next(r for (op, _, _), r in t.items() if op == 'exact-nccl')


def big(all):
    head = ['layout', 'tensor MiB', 'must arrive MiB', 'push µs', 'copy µs', 'EXACT peer', 'of limit',
            'EXACT nccl', 'reference', 'tuned', 'torch', 'torch, wide copies', 'library COLLECTIVE', 'reference / peer',
            'reference / nccl', 'tuned / peer', 'reference / torch', 'reference / wide']
    out = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
    for (src, dst, axes, size), t in all.items():
        push, copy = limits(t)
        time = {op: ways(t, op) for op in OPS}
        arrive = ways(t, 'exact-nccl', 'arrive_bytes')
        percent = ways(t, 'exact-peer', 'percent')
        out.append('| ' + ' | '.join([
            '%s → %s %s' % (short(src), short(dst), axes), '%.0f' % (size / MIB),
            '%.0f + %.0f' % tuple(a / MIB for a in arrive), both(push), both(copy),
            both(time['exact-peer']), '–' if not percent else '%.0f / %.0f %%' % tuple(percent),
            both(time['exact-nccl']), both(time['reference']), both(time['tuned']), both(time['torch']), both(time['torch-wide']),
            both(time['collective']), ratio(time['reference'], time['exact-peer']),
            ratio(time['reference'], time['exact-nccl']), ratio(time['tuned'], time['exact-peer']),
            ratio(time['reference'], time['torch']), ratio(time['reference'], time['torch-wide'])]) + ' |')
    return out


def small(all):
    out = ['| layout | tensor KiB | push µs | EXACT peer | in a graph | EXACT nccl | in a graph | '
           'reference | in a graph |', '|' + '---|' * 9]
    for (src, dst, axes, size), t in all.items():
        cells = ['%s → %s %s' % (short(src), short(dst), axes), '%.0f' % (size / 1024),
                 both(limits(t)[0], 1)]
        for op in ('exact-peer', 'exact-nccl', 'reference'):
            cells += [both(ways(t, op), 1), both(ways(t, op, replayed=True), 1)]
        out.append('| ' + ' | '.join(cells) + ' |')
    return out


def page(perf, torch, little):
    rows = list(perf['bridge'])
    if torch:
        rows += torch['bridge']
    all = {k: t for k, t in table(rows).items() if ways(t, 'exact-nccl')}
    first = any_row(next(iter(all.values())))
    wrong = sum(r['wrong'] for r in rows + (little['bridge'] if little else []))
    text = ['# The bridge against COLLECTIVE', '',
            'Measured %s on %d × %s of one host, CUDA %s, NCCL %s, %s, %s output, B=%d S=%d H=%d. Times are '
            'microseconds, forward / backward: medians of %d repetitions of 3 launches or more, of the slowest '
            'GPU, after %d that do not count. Results of every column were checked in the run: %d wrong.'
            % (perf.get('date', '?'), perf['gpus'], perf['device'], perf['cuda'], perf.get('nccl', '?'),
               first['dtype'], first['output'], first['batch'], first['seq'], first['hidden'],
               perf['iters'], perf['warmup'], wrong), '',
            '```', perf['command'], '```', '',
            '- *tensor*: the larger tensor of a rank; *must arrive*: at the rank that lacks most.',
            '- *push*, *copy*: the limit, in the same run: the plan\'s messages as plain stores into the '
            'peers, all at once; what stays, as one contiguous copy. *of limit*: the longer of the two over the time, since they can go on at once.',
            '- *EXACT*: this library, over the peers\' memory and over NCCL.',
            '- *reference*: the passes that runtimes run today, on NCCL from C: all-gather or narrow, the '
            'shard copy; scatter into zeros, clone, all-reduce over cp, narrow or all-gather; contiguous '
            'copies where samples are not outermost.',
            '- *tuned*: as few passes as collectives allow: shards taken straight from what was gathered, '
            'gradients of shards gathered instead of added to zeros.',
            '- *torch*: the same passes written on torch.distributed (`bench/torch/bridge_reference.py`), '
            'one process a GPU%s.' % (', torch %s, NCCL %s' % (torch['version'], torch['nccl']) if torch
                                     else ': not run'),
            '- *wide copies*: the same, each copy of a view as int64; PyTorch copies 2-byte elements of '
            'views at a third of the memory\'s bandwidth, which *reference* does not.',
            '- *library COLLECTIVE*: `COLO_ALGO_COLLECTIVE`, whose sums are in rank order.',
            '- Ratios: forward and backward together.', ''] + big(all)
    if little:
        text += ['', 'Small tensors, B=%d H=%d:' % (little['bridge'][0]['batch'],
                                                    little['bridge'][0]['hidden']), '',
                 '```', little['command'], '```', ''] + small(table(little['bridge']))
    return '\n'.join(text) + '\n'


def run(command, out, env):
    print('#', ' '.join("'%s'" % c if '>' in c else c for c in command), file=sys.stderr, flush=True)
    with open(out, 'w', encoding='utf-8') as f:
        subprocess.run(command, stdout=f, env=env, check=True)


def gpus():
    try:
        listed = subprocess.run(['nvidia-smi', '-L'], stdout=subprocess.PIPE, text=True).stdout
    except OSError:
        return 0
    return sum(line.startswith('GPU ') for line in listed.splitlines())


def torch_nccl():
    """The folder of PyTorch's NCCL, so that all columns use the same one."""
    ask = 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")'
    done = subprocess.run(['python3', '-c', ask], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip()


def measure(ask, folder):
    env = dict({'NCCL_NVLS_ENABLE': '0'}, **os.environ)
    with_torch = not ask.no_torch and shutil.which('torchrun')
    if with_torch and torch_nccl():
        env['LD_LIBRARY_PATH'] = ':'.join(filter(None, [torch_nccl(), env.get('LD_LIBRARY_PATH')]))
    n = gpus() if ask.gpus is None else ask.gpus
    if n < min(PAIRS):
        sys.exit('bridge-table.py: a bridge needs at least %d GPUs, %s %d'
                 % (min(PAIRS), '--gpus is' if ask.gpus is not None else 'found', n))
    used = max(k for k in PAIRS if k <= n)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = ask.layouts or PAIRS[used]
    count = ['-w', str(ask.w), '-n', str(ask.n)]
    run([ask.perf, 'bridge', '--layouts', *pairs, '--axes', 'both', *count, '--json'],
        folder / 'perf.json', env)
    fan_in = ['--layouts', *pairs[:2]]
    files = [folder / 'perf.json', None, None]
    if with_torch:
        files[1] = folder / 'torch.json'
        run(['torchrun', '--nproc-per-node', str(used),
             str(HERE / 'torch/bridge_reference.py'), '--layouts', *pairs, '--axes', 'both', *count,
             '--json', str(files[1])], folder / 'torch.txt', env)
    try:
        run([ask.perf, 'bridge', *fan_in, '--batch', '8', '--hidden', '256', '-b', '16K', '-e', '1M', '-f',
             '4', *count, '--json'], folder / 'small.json', env)
        files[2] = folder / 'small.json'
    except subprocess.CalledProcessError:
        print('the small tensors failed; they are left out', file=sys.stderr)
    return files


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ask.add_argument('--perf', default=str(HERE.parent / 'build/tools/colo-perf'))
    ask.add_argument('--gpus', type=int)
    ask.add_argument('--layouts', nargs='+')
    ask.add_argument('-n', type=int, default=20)
    ask.add_argument('-w', type=int, default=5)
    ask.add_argument('--no-torch', action='store_true')
    ask.add_argument('--keep', type=Path, default=Path('bridge-table'))
    ask.add_argument('--out')
    ask.add_argument('--from', dest='files', nargs='+')
    ask = ask.parse_args()
    docs = {'perf': None, 'torch': None, 'small': None}
    if ask.files:
        files = ask.files
    else:
        try:
            files = measure(ask, ask.keep)
        except (OSError, subprocess.CalledProcessError) as failed:
            sys.exit('bridge-table.py: %s' % failed)
    for name in filter(None, files):
        with open(name, encoding='utf-8') as f:
            doc = json.load(f)
        sizes = {r['bytes'] for r in doc['bridge']}
        kind = 'torch' if doc['tool'] == 'torch' else 'small' if max(sizes) <= 16 * MIB else 'perf'
        docs[kind] = doc
    if not docs['perf']:
        sys.exit('bridge-table.py: no JSON of colo-perf bridge at full size')
    docs['perf'].setdefault('date', datetime.date.today().isoformat())
    text = page(docs['perf'], docs['torch'], docs['small'])
    if ask.out:
        Path(ask.out).write_text(text, encoding='utf-8')
    else:
        sys.stdout.write(text)


if __name__ == '__main__':
    main()
