# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes with a gloo process group, kept for all tests of a file.

They are forked after torch was imported, which would take each of them seconds, and not from this process: a fork
has no backward if PyTorch has begun threads for one here, which it does where it knows a device besides the CPU.
run(fn, ...) calls fn(rank, ...) on every rank and returns what they returned; what one raised is raised here, with
its traceback as text."""
import datetime
import itertools
import multiprocessing
import os
import socket
import sys
import time
import traceback
from multiprocessing import connection, reduction

import pytest
import torch
import torch.distributed as dist


_meetings = None  # of this run: their names, in turn
RUN_SECONDS = 180  # of one call of World.run()


class RankFailed(AssertionError):
    pass


def deadline_ms():
    """Of a wait of the ranks."""
    return int(os.environ.get('COLO_TIMEOUT_MS', '20000'))


def _rank(rank, size, port, environ, *handles):
    for handle, fd in zip(handles, (1, 2)):
        os.dup2(handle, fd)
    sys.stdout, sys.stderr = (open(fd, 'w', buffering=1, closefd=False) for fd in (1, 2))
    pipe = connection.Connection(handles[2])
    os.environ.clear()
    os.environ.update(environ)
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
                      COLO_TIMEOUT_MS=str(deadline_ms()))
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=size)
    global _meetings
    for run in itertools.count():
        try:
            job = pipe.recv()
        except EOFError: # of the process that had it run tests
            break
        if job is None:
            break
        fn, args = job
        _meetings = ('met/%d/%d' % (run, n) for n in itertools.count())
        try:
            pipe.send((True, fn(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            _come()  # others may wait for this rank
    os._exit(0)


def _serve(asked):
    """Forks ranks and ends them, until whoever asks for it has ended."""
    processes = []
    while True:
        try:
            what, *of = asked.recv()
        except EOFError:
            break
        if what == 'start':
            handles = [reduction.recv_handle(asked) for _ in range(3)]
            processes.append(multiprocessing.get_context('fork').Process(target=_rank, args=(*of, *handles)))
            processes[-1].start()
            for handle in handles:
                os.close(handle)
            asked.send(len(processes) - 1)
        else:
            number, seconds = of
            processes[number].join(seconds)
            processes[number].kill()
            asked.send(None)
    for process in processes:
        process.kill()


_server = None


def ready():
    """Forks the process that forks ranks; pytest calls it when it has imported the tests, before it runs one."""
    global _server
    _server, theirs = multiprocessing.Pipe()
    if os.fork() == 0:
        try:
            _server.close()
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()


def _ask(*what, handles=()):
    _server.send(what)
    for handle in handles:
        reduction.send_handle(_server, handle, None)
    return _server.recv()


def _come():
    """Tells the store that this rank has come to its next meeting; the store, and the keys of all ranks."""
    store, name = dist.distributed_c10d._get_default_store(), next(_meetings)
    keys = ['%s/%d' % (name, rank) for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], b'')
    return store, keys


def meet():
    """All ranks are done with what they called, or have failed, before one makes the mistake that the others are to
    hear of in their next call. A busy machine may take longer than a deadline to run them all: World.run() ends what hangs."""
    store, keys = _come()
    store.wait(keys, datetime.timedelta(seconds=RUN_SECONDS))


def refused(call):
    """The words by which a call is refused here, which all ranks make; '' if it is not."""
    meet()  # a rank that is refused ends what another one is still in
    said = ''
    try:
        call()
    except (ValueError, RuntimeError, TimeoutError) as why:
        said = '%s: %s' % (type(why).__name__, why)
    meet()
    return said


def with_deepspeed():
    """DeepSpeed over the process group: without collectives of its own in shared memory, which it would compile first."""
    os.environ['DS_ACCELERATOR'] = 'cpu'
    import deepspeed
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo')
    return deepspeed


def _fsdp2_runs(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    layer = torch.nn.Linear(4, 4)
    fully_shard(layer, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))
    try:
        layer(torch.ones(1, 4))
    except AttributeError:
        return False
    return True


def needs_fsdp2(world):
    """Skips a test where PyTorch has no FSDP2, or one that does not run on processors, whatever it wraps, as that of 2.6."""
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except (ImportError, ValueError):  # of dataclasses, with PyTorch 1.13 and Python 3.11
        pytest.skip('this PyTorch %s has no FSDP2' % torch.__version__)
    if not all(world.run(_fsdp2_runs)):
        pytest.skip('FSDP2 of this PyTorch %s does not run on processors' % torch.__version__)


class World:
    def __init__(self, size):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        self.pipes, self.numbers = [], []
        for rank in range(size):
            mine, theirs = multiprocessing.Pipe()
            # What a rank prints is part of what its tests print.
            self.numbers.append(_ask('start', rank, size, port, dict(os.environ), handles=(1, 2, theirs.fileno())))
            self.pipes.append(mine)
            theirs.close()

    def run(self, fn, *args, timeout=RUN_SECONDS):
        """What fn(*args) returns, by rank. @timeout ends what hangs, however busy the machine is: a wait has its own deadline.
        Once one has failed, the others have twice that deadline, for gloo would have them wait half an hour."""
        for pipe in self.pipes:
            pipe.send((fn, args))
        awaited, results, failed = {pipe: rank for rank, pipe in enumerate(self.pipes)}, {}, {}
        until = time.monotonic() + timeout
        while awaited and (ready := connection.wait(list(awaited), max(0, until - time.monotonic()))):
            for pipe in ready:
                rank = awaited.pop(pipe)
                good, value = pipe.recv()
                (results if good else failed)[rank] = value
            if failed:
                until = min(until, time.monotonic() + 2e-3 * deadline_ms())
        for rank in awaited.values():
            failed[rank] = 'no answer in time'
            _ask('end', self.numbers[rank], 0)
        if awaited:
            self.close()
        if failed:
            raise RankFailed('\n'.join('rank %d:\n%s' % of for of in sorted(failed.items())))
        return [results[rank] for rank in sorted(results)]

    def close(self):
        for pipe, number in zip(self.pipes, self.numbers):
            try:
                pipe.send(None)
            except OSError:
                pass
            _ask('end', number, 5)
