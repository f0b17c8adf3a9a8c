# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes with a gloo process group, kept for all tests of a file.

They are forked after torch was imported, which would take each of them seconds. run(fn, ...) calls
fn(rank, ...) on every rank and returns what they returned; what one raised is raised here, with its
traceback as text."""
import datetime
import itertools
import multiprocessing
import os
import socket
import time
import traceback
from multiprocessing import connection

import torch
import torch.distributed as dist


_barriers = itertools.count()


class RankFailed(AssertionError):
    pass


def deadline_ms():
    """Of a wait of the ranks."""
    return int(os.environ.get('COLO_TIMEOUT_MS', '20000'))


def _rank(rank, size, port, pipe):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
                      COLO_TIMEOUT_MS=str(deadline_ms()))
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=size)
    while True:
        job = pipe.recv()
        if job is None:
            break
        fn, args = job
        try:
            pipe.send((True, fn(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)


def meet():
    """All ranks are done with what they called, before one makes the mistake that the others are to hear of
    in their next call; one that failed is waited for no longer than it takes to say so."""
    store, number = dist.distributed_c10d._get_default_store(), next(_barriers)
    store.set('met/%d/%d' % (number, dist.get_rank()), b'')
    store.wait(['met/%d/%d' % (number, rank) for rank in range(dist.get_world_size())],
               datetime.timedelta(milliseconds=deadline_ms() // 2))


def with_deepspeed():
    """DeepSpeed over the process group: without collectives of its own in shared memory, which it would compile first."""
    os.environ['DS_ACCELERATOR'] = 'cpu'
    import deepspeed
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo')
    return deepspeed


class World:
    def __init__(self, size):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        context = multiprocessing.get_context('fork')
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, fn, *args, timeout=180):
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
            self.processes[rank].kill()
        if awaited:
            self.close()
        if failed:
            raise RankFailed('\n'.join('rank %d:\n%s' % of for of in sorted(failed.items())))
        return [results[rank] for rank in sorted(results)]

    def close(self):
        for pipe, process in zip(self.pipes, self.processes):
            try:
                pipe.send(None)
            except OSError:
                pass
            process.join(5)
            if process.is_alive():
                process.kill()
