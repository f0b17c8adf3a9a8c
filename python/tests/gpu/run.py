# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of FILES on all GPUs of this host, one process each, and says what happened in the
words that tools/count-tests.py counts. Needs no pytest. Without CUDA in torch, or with it on no GPU, every
case is counted as skipped, by name.

usage: run.py [NAME...]     those cases only
"""
import importlib
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

FILES = 'cases_bridge', 'cases_loss', 'cases_originals', 'cases_stream'
HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1]
ENV = {'NCCL_NVLS_ENABLE': '0', 'TORCH_SYMM_MEM_DISABLE_MULTICAST': '1', 'COLO_TIMEOUT_MS': '30000',
       'OMP_NUM_THREADS': '1'}
PROBE = '''
try:
    import torch
    print(torch.cuda.device_count() if hasattr(torch, "compile") else "torch %s" % torch.__version__)
except ImportError:
    print("no torch")
'''


def names():
    """{case: its module} in order, without importing torch."""
    return {case: module for module in FILES
            for case in re.findall(r'^def (case_\w+)', (HERE / (module + '.py')).read_text(), re.M)}


def say(kind, name):
    print('[ RUN      ] %s\n[%s] %s' % (name, kind, name), flush=True)


def rank(wanted):
    """One process: every case on all ranks; rank 0 reports what any of them found."""
    import torch
    import torch.distributed as dist
    sys.path[:0] = [str(PACKAGE), str(HERE)]
    from common import Skip
    where = names()
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    dist.init_process_group('nccl', device_id=torch.device('cuda', int(os.environ['LOCAL_RANK'])))
    control = dist.new_group(backend='gloo')
    me, bad = dist.get_rank(), 0
    for name in wanted:
        outcome = ('       OK ', '')
        if me == 0:
            print('[ RUN      ] %s' % name, flush=True)
        try:
            getattr(importlib.import_module(where[name]), name)()
            torch.cuda.synchronize()
        except Skip as why:
            outcome = ('  SKIPPED ', str(why))
        except Exception:
            outcome = ('  FAILED  ', traceback.format_exc())
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, outcome, group=control)
        worst = next((s for s in said if 'FAILED' in s[0]), None) or \
            next((s for s in said if 'SKIPPED' in s[0]), said[0])
        if me == 0:
            for r, s in enumerate(said):
                if 'FAILED' in s[0]:
                    print('-- rank %d\n%s' % (r, s[1]))
            print('[%s] %s' % (worst[0], name), flush=True)
        bad += 'FAILED' in worst[0]
        torch.cuda.empty_cache()
    sys.stdout.flush()
    os._exit(1 if bad and me == 0 else 0)  # communicators of a failed case may wait for each other


def main():
    wanted = sys.argv[1:] or list(names())
    if 'LOCAL_RANK' in os.environ:
        rank(wanted)
    python = os.environ.get('COLO_PYTHON') or 'python3'
    done = subprocess.run([python, '-c', PROBE], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, check=False)
    found = done.stdout.strip()
    count = int(found) if found.isdigit() else 0
    print('[==========] Running %d test(s)' % len(wanted), flush=True)
    if not count:
        for name in wanted:
            say('  SKIPPED ', '%s: %s' % (name, 'no GPU' if found == '0' else found))
        return 0
    ranks = 1 << (min(count, 8).bit_length() - 1)
    env = dict(ENV, **os.environ)
    env['PYTHONPATH'] = os.pathsep.join([str(PACKAGE)] + env.get('PYTHONPATH', '').split(os.pathsep))
    return subprocess.run([python, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node',
                           str(ranks), str(HERE / 'run.py'), *wanted], env=env, check=False).returncode


if __name__ == '__main__':
    sys.exit(main())
