# SPDX-License-Identifier: Apache-2.0
"""Programs that end with an exception on one rank: the others hear it, also if a launcher catches it."""
import os
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip('torch')

UNCAUGHT = '''
import sys, time, torch, torch.distributed as dist, colobridge.torch as ct
dist.init_process_group('gloo')
carry, x = ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD), torch.ones(1, 4, 2)
carry(x)
if dist.get_rank() == 1:
    raise ValueError('the data ran out')
try:
    carry(x)
except RuntimeError as why:
    print(why)
'''


def test_uncaught_exception_of_one_rank_is_told_to_the_others():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, '-c', UNCAUGHT], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, env=dict(
                                  os.environ, RANK=str(r), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1',
                                  MASTER_PORT=str(port), COLO_TIMEOUT_MS='60000')) for r in range(2)]
    said = [process.communicate(timeout=100) for process in ranks]
    assert ranks[1].returncode == 1 and 'the data ran out' in said[1][1]
    assert 'aborted by rank 1' in said[0][0] and 'ValueError: the data ran out' in said[0][0], said


CAUGHT = '''
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import colobridge.torch as ct
def main(rank, port):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=port, RANK=str(rank), WORLD_SIZE='2')
    dist.init_process_group('gloo')
    carry, x = ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD), torch.ones(1, 4, 2)
    carry(x)
    if rank == 1:
        raise ValueError('the data ran out')
    try:
        carry(x)
    except RuntimeError as why:
        print(why, flush=True)
if __name__ == '__main__':
    started = mp.start_processes(main, (sys.argv[1],), 2, join=False, start_method=sys.argv[2])
    for process in started.processes:
        process.join()
'''


@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_an_exception_that_a_launcher_caught_is_told_to_the_others(method, tmp_path):
    (tmp_path / 'caught.py').write_text(CAUGHT)
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    done = subprocess.run([sys.executable, str(tmp_path / 'caught.py'), str(port), method], text=True, check=False,
                          capture_output=True, env=dict(os.environ, COLO_TIMEOUT_MS='60000'), timeout=100)
    assert 'aborted by rank 1' in done.stdout and 'ValueError: the data ran out' in done.stdout, done
