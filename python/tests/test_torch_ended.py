# SPDX-License-Identifier: Apache-2.0
"""Programs that end with an exception on one rank: the others hear it, also if a launcher catches it."""
import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip('torch')

# Two ranks for each way to end, which are forks of a process that has imported torch; it says how they ended.
ENDS = '''
import json, os, sys, torch, torch.distributed as dist, colobridge.torch as ct
ways, started = json.loads(sys.argv[1]), []
for number, rank in ((number, rank) for number in range(len(ways)) for rank in range(2)):
    started.append(os.fork())
    if not started[-1]:
        break
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]))
    sys.exit()
os.dup2(os.open('%d-%d' % (number, rank), os.O_WRONLY | os.O_CREAT), 1)
dist.init_process_group('gloo', init_method='file://%s/meet-%d' % (os.getcwd(), number), rank=rank, world_size=2)
carry, x = ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD), torch.ones(1, 4, 2)
carry(x)
if rank == 1:
    exec(ways[number])
for call in 'first', 'again':
    try:
        carry(x), carry(x)
    except Exception as why:
        print(call, why)
        if 'aborted' not in str(why):
            break
'''
# How rank 1 ends, its status, and what rank 0 hears, in the call after it, too (a pair: something else there, or nothing);
# None: that it has left, and no cause.
WAYS = {
    'by an exception': ("raise ValueError('the data ran out')", 1, 'ValueError: the data ran out'),
    'in a script that catches it': ('''
try:
    raise ValueError('the data ran out')
except Exception:
    sys.exit(3)''', 3, None),
    'in a script that catches and shows it': ('''
try:
    raise ValueError('the data ran out')
except Exception:
    sys.excepthook(*sys.exc_info())
    sys.exit(3)''', 3, 'ValueError: the data ran out'),
    'in a script whose own hook shows it': ('''
before = sys.excepthook
sys.excepthook = lambda *why: before(*why)
try:
    raise ValueError('the data ran out')
except Exception:
    sys.excepthook(*sys.exc_info())
    sys.exit(3)''', 3, 'ValueError: the data ran out'),
    'well, after an error': ('''
try:
    carry(x[0])
except ValueError:
    sys.exit(0)''', 0, ('3 axes', 'its process has ended')),
    'not, but a child of it, after an error': ('''
try:
    carry(x[0])
except ValueError:
    pass
child = os.fork()
if child == 0:
    sys.last_value = ValueError('the data ran out')  # as Python sets it at an exception that ends a program
    ct.ranks._end()  # PyTorch would wait for threads that it has not got
    os._exit(0)
os.waitpid(child, 0)''', 0, ('3 axes', None)),
    'well, behind an exception': ('''
try:
    raise ValueError('the data ran out')
except Exception:
    sys.exit(0)''', 0, None),
    'well, a script that shows an exception and goes on': ('''
try:
    raise ValueError('the data ran out')
except Exception:
    sys.excepthook(*sys.exc_info())
carry(x)
raise SystemExit''', 0, None),
}


@pytest.fixture(scope='module')
def ended(request, tmp_path_factory):
    """By way, of those that are tested: the status of rank 1, and what rank 0 says."""
    ways = [item.callspec.params['way'] for item in request.session.items if 'ended' in item.fixturenames]
    folder = tmp_path_factory.mktemp('ended')
    done = subprocess.run([sys.executable, '-c', ENDS, json.dumps([WAYS[way][0] for way in ways])],
                          text=True, stdout=subprocess.PIPE, cwd=folder, check=True, timeout=250,
                          env={'COLO_TIMEOUT_MS': '60000', **os.environ})
    statuses = json.loads(done.stdout)
    return {way: (statuses[2 * i + 1], (folder / ('%d-0' % i)).read_text()) for i, way in enumerate(ways)}


@pytest.mark.parametrize('way', list(WAYS))
def test_the_cause_of_a_ranks_end_is_told_to_the_others(way, ended):
    (_, status, words), (found, said) = WAYS[way], ended[way]
    assert found == status, said
    if words is None:
        assert said and 'aborted' not in said and 'data' not in said, said
    else:
        first, _, again = said.partition('again')
        in_first, in_again = words if isinstance(words, tuple) else (words, words)
        assert 'aborted by rank 1' in first and in_first in first, said
        assert 'rank 1: ' + in_again in again if in_again else not again, said


CAUGHT = '''
import multiprocessing, os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import colobridge.torch as ct
def main(rank, meet):
    dist.init_process_group('gloo', init_method='file://' + meet, rank=rank, world_size=2)
    carry, x = ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD), torch.ones(1, 4, 2)
    carry(x)
    if rank == 1:
        raise ValueError('the data ran out')
    try:
        carry(x)
    except RuntimeError as why:
        print(why, flush=True)
class Late(multiprocessing.get_context('fork').Process): # which runs what is left for the end as Python 3.13 does
    def _bootstrap(self, *args, **options):
        try:
            return super()._bootstrap(*args, **options)
        finally:
            at_exit()
if __name__ == '__main__':
    if sys.argv[2].startswith('plain'):
        Process = multiprocessing.get_context(sys.argv[2][6:] or 'fork').Process
        if sys.argv[2] == 'plain fork':
            from multiprocessing import util
            Process, at_exit, util._exit_function = Late, util._exit_function, lambda: None
        processes = [Process(target=main, args=(r, sys.argv[1])) for r in range(2)]
        for process in processes:
            process.start()
    else:
        started = mp.start_processes(main, (sys.argv[1],), 2, join=False, start_method=sys.argv[2])
        processes = started.processes
    for process in processes:
        process.join()
'''


@pytest.mark.parametrize('method', ['fork', 'spawn', 'plain', 'plain fork', 'plain spawn'])
def test_an_exception_that_a_launcher_caught_is_told_to_the_others(method, tmp_path):
    (tmp_path / 'caught.py').write_text(CAUGHT)
    done = subprocess.run([sys.executable, str(tmp_path / 'caught.py'), str(tmp_path / 'meet'), method], text=True, check=False,
                          capture_output=True, env=dict(os.environ, COLO_TIMEOUT_MS='60000'), timeout=250)
    assert 'aborted by rank 1' in done.stdout and 'ValueError: the data ran out' in done.stdout, done
