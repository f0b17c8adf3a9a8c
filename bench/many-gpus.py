#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All that a host of 8, 4 or 2 GPUs can tell: whether results are right, and the tables of bench/results/.

usage: bench/many-gpus.py [--gpus N] [--seconds 570] [--keep build-gpu/many-gpus] [--list] [STEP...]

Builds in build-gpu, then runs one step after the other. It begins no step that may not end within --seconds,
and the next call on the same commit goes on with the steps that are missing, so that all of them fit into calls
of ten minutes. Each step writes its output to KEEP/STEP.txt; KEEP/page.md is a table of the steps with the
commit, the date and the machine, followed by what the measuring steps printed. STEP runs these again, and no
others. Exit status: 1 if a step failed. A step whose package is missing is skipped, with the reason.
"""
import argparse
import datetime
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / 'build-gpu'
CORRECT, MEASURED = 'correctness', 'figures'


def meson(*words):
    every = ['colobridge:'] if words[0] == '--suite' else [] # every_test in tools/setup.sh says why
    return ['meson', 'test', '-C', str(BUILD), '--num-processes', '1', '--print-errorlogs', *words, *every]


def steps(n):
    """name: (kind, seconds it may take, command, the module that it needs)"""
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(n)]
    layouts = {2: ('tp=1,dp=2', 'tp=1,cp=2,dp=1'), 4: ('tp=2,dp=2', 'tp=2,cp=2,dp=1'),
               8: ('tp=2,dp=4', 'tp=2,cp=2,dp=2')}[n]
    mimo = [*torchrun, 'examples/torch_mimo/train.py', '--device', 'cuda', '--compare', '--steps', '20',
            '--src', layouts[0], '--dst', layouts[1]]
    return {
        # tools/gpu-test.sh, in parts
        'captioner': (CORRECT, 400, meson('gpu/captioner on %d' % n), None),
        'ranks': (CORRECT, 400, meson('--suite', 'gpu', '--no-suite', 'gpu-one', '--no-suite', 'slow',
                                      '--no-suite', 'gpu-mutants', '--no-suite', 'gpu-processes'), None),
        'processes': (CORRECT, 400, meson('--suite', 'gpu-processes'), None),
        'bridge': (MEASURED, 240, [sys.executable, 'bench/bridge-table.py', '--perf',
                                   str(BUILD / 'tools/colo-perf'), '--gpus', str(n)], None),
        'losses': (MEASURED, 120, [str(BUILD / 'bench/bench-loss-ranks'), str(n)], None),
        'nodes': (MEASURED, 120, [str(BUILD / 'bench/bench-nodes'), str(n)], None), # two hosts of n / 2
        'megatron': (CORRECT, 120, [*torchrun, 'python/tests/mimo_training.py'], 'megatron'),
        'torch_mimo': (CORRECT, 90, mimo, 'torch'),
        'torch_mimo-ragged': (CORRECT, 90, [*mimo, '--ragged'], 'torch'),
        'ragged': (MEASURED, 120, [*torchrun, 'bench/ragged_table.py'], 'torch'),
        'relayout': (MEASURED, 90, [*torchrun, 'bench/torch/relayout.py', '--device', 'cuda', '--rows', '65536', '--sequences', '16',
                                    '--features', '4096'], 'torch'),
        'overlap': (MEASURED, 90, [*torchrun, 'bench/torch/overlap.py'], 'torch'), # a product between start and finish
        'tower': (MEASURED, 120, [*torchrun, 'bench/torch/tower.py', '--device', 'cuda'], 'torch'), # replicated, or on all ranks
        'mutants': (CORRECT, 300, meson('--suite', 'gpu-mutants', '--no-suite', 'gpu-one'), None),
        'captioner-ragged': (CORRECT, 400, meson('gpu/captioner on %d, ragged' % n), None),
        'others': (CORRECT, 300, meson('gpu/captioner heads', 'gpu/captioner by collectives'), None),
        'one-GPU': (CORRECT, 300, meson('--suite', 'gpu-one'), None),
    }


def said(*command):
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return ''
    return done.stdout.strip()


def commit():
    return said('git', 'rev-parse', '--short', 'HEAD') or 'unknown'


def build():
    script = '''. tools/setup.sh
install_missing test
configure build-gpu --buildtype=release -Dcuda=enabled -Dnccl=enabled -Dtests=enabled -Dtools=enabled -Dexamples=enabled
build build-gpu all bench/bench-loss-ranks bench/bench-nodes $(linked build-gpu tests/gpu)'''
    subprocess.run(['bash', '-euo', 'pipefail', '-c', script], cwd=ROOT, check=True)


def run(name, limit, command, log):
    """(what became of it, seconds)"""
    env = dict(os.environ, NCCL_NVLS_ENABLE='0', COLOBRIDGE_LIBRARY=str(BUILD / 'src/libcolobridge.so'),
               COLO_BACKEND_DIR=str(BUILD / 'src'),
               PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT / 'python'), os.environ.get('PYTHONPATH')])))
    begin = time.time()
    with open(log, 'w') as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            rc = process.wait(limit)
            became = {0: 'passed', 77: 'skipped'}.get(rc, 'failed: exit status %d' % rc)
            counts = dict(re.findall(r'^(Ok|Skipped): +(\d+)', Path(log).read_text(errors='replace'), re.M))
            ok, skipped = int(counts.get('Ok', 0)), int(counts.get('Skipped', 0)) # newer Mesons print no zeros
            if rc == 0 and counts:
                became = 'passed %d, skipped %d' % (ok, skipped) if ok else 'skipped'
        except subprocess.TimeoutExpired:
            became = 'failed: not done after %d s' % limit
        finally:
            if process.poll() is None:
                process.terminate() # torchrun ends its ranks, which are not of its process group
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, 9)
                    process.wait()
    return became, time.time() - begin


def page(keep, n, state):
    device = said('nvidia-smi', '--query-gpu=name,driver_version', '--format=csv,noheader').splitlines()
    out = ['# %d GPUs' % n, '', '%s, commit %s, %d x %s.' % (
        datetime.date.today(), commit(), len(device),
        device[0] if device else 'no GPU'), '',
        '```', 'bench/many-gpus.py --gpus %d' % n, '```', '', '| step | kind | result | s |', '|---|---|---|---:|']
    for name, (kind, _, _, _) in steps(n).items():
        became, seconds = state.get(name, ('not run yet', 0))
        out.append('| %s | %s | %s | %.0f |' % (name, kind, became, seconds))
    for name, (kind, _, command, _) in steps(n).items():
        if kind == MEASURED and name in state:
            out += ['', '## ' + name, '', '    ' + shlex.join(command), '',
                    (keep / (name + '.txt')).read_text(errors='replace').strip()]
    (keep / 'page.md').write_text('\n'.join(out) + '\n')


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--gpus', type=int, choices=[2, 4, 8])
    p.add_argument('--seconds', type=float, default=570)
    p.add_argument('--keep', type=Path, default=BUILD / 'many-gpus')
    p.add_argument('--list', action='store_true', help='print the steps with their commands, and run none')
    p.add_argument('step', nargs='*')
    o = p.parse_args()
    begin = time.time()
    found = len(said('nvidia-smi', '-L').splitlines()) if not o.list else 0
    n = o.gpus or max((k for k in (2, 4, 8) if k <= found), default=8)
    todo = steps(n)
    if set(o.step) - set(todo):
        sys.exit('many-gpus.py: no step %s; there are: %s' % (', '.join(sorted(set(o.step) - set(todo))), ', '.join(todo)))
    if o.list:
        for name, (kind, limit, command, _) in todo.items():
            print('%-18s %-12s %4d s  %s' % (name, kind, limit, shlex.join(command)))
        return 0
    if found < n:
        sys.exit('many-gpus.py: found %d GPUs, expected %d; --gpus names fewer' % (found, n))
    build()
    o.keep.mkdir(parents=True, exist_ok=True)
    kept = o.keep / ('state-%d-%s.json' % (n, commit()))
    state = json.loads(kept.read_text()) if kept.exists() else {}
    for name, (_, limit, command, module) in todo.items():
        if name not in o.step if o.step else name in state:
            continue
        left = o.seconds - (time.time() - begin)
        if left < limit / 4:
            print('%-18s next time: %.0f s are left' % (name, left), flush=True)
            continue
        log = o.keep / (name + '.txt')
        if module and not importlib.util.find_spec(module):
            became, seconds = 'skipped: there is no Python module %s' % module, 0
            log.write_text(became + '\n')
        else:
            became, seconds = run(name, min(limit, left), command, log)
            if 'not done' in became and left < limit:
                print('%-18s next time: %.0f s were not enough' % (name, left), flush=True)
                continue
        print('%-18s %s, %.0f s' % (name, became, seconds), flush=True)
        state[name] = became, seconds
        kept.write_text(json.dumps(state))
    page(o.keep, n, state)
    print('%s has the table' % (o.keep / 'page.md'))
    return any(became.startswith('failed') for became, _ in state.values())


if __name__ == '__main__':
    sys.exit(main())
