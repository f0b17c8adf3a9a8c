# SPDX-License-Identifier: Apache-2.0
"""Signals in a rank that waits for another one: their handlers run while it waits, what they raise ends the wait, and the
other rank hears of it. Ranks that are threads are test_core.py's."""
import contextlib
import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge.torch as ct  # noqa: E402
from world import meet  # noqa: E402

LATE, SOON = 1.6, .4  # seconds: when the other rank comes, and when the signal does


@contextlib.contextmanager
def signalled(number, handler):
    """A signal to this process SOON, while its main thread waits."""
    before = signal.signal(number, handler)
    timer = threading.Timer(SOON, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(number, before)


def stop(_number, _frame):
    raise ZeroDivisionError('stop')


def calls():
    carry = ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD)
    return {'bridge': lambda: carry(torch.ones(1, 4, 3)).sum().item() == 24,
            'relayout': lambda: ct.relayout(torch.ones(4, 3), [0, 8], 'zigzag', 'block', group=dist.group.WORLD, dim=0).sum() == 12,
            'nll': lambda: abs(ct.nll(torch.zeros(2, 3), torch.tensor([0, 4]), tp_group=dist.group.WORLD).loss.item() - 1.791759) < 1e-5}


def interrupted(rank, which):
    """Ctrl-C, or a handler of the program's that raises, in one rank."""
    call = calls()[which]
    assert call()
    for number, handler, raises in ((signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
                                    (signal.SIGUSR1, stop, ZeroDivisionError)):
        meet()
        begin = time.monotonic()
        if rank == 0:
            with signalled(number, handler), pytest.raises(raises):
                call()
            assert time.monotonic() - begin < SOON + 1
        else:
            time.sleep(LATE)
            with pytest.raises(RuntimeError, match='rank 0 was interrupted in .*, where it waited for rank 1'):
                call()
            assert time.monotonic() - begin < LATE + 1
        assert call()  # ranks go on, together


@pytest.mark.parametrize('which', ('bridge', 'relayout', 'nll'))
def test_what_a_handler_raises_ends_the_wait_and_the_other_rank_hears_it(pair, which):
    pair.run(interrupted, which)


def while_made(rank):
    """Rank 1 does not come to the communicator that they make."""
    meet()
    begin = time.monotonic()
    if rank == 0:
        with signalled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
            ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD, comm='own')
        assert time.monotonic() - begin < SOON + 1
    else:
        time.sleep(LATE)
        with pytest.raises(RuntimeError, match='rank 0: KeyboardInterrupt'):
            ct.Bridge('dp=2', 'cp=2', group=dist.group.WORLD, comm='own')
        assert time.monotonic() - begin < LATE + 1


@pytest.mark.skipif(not hasattr(dist.Store, 'check'), reason='torch before 2.0 waits for a store in one piece')
def test_ctrl_c_while_ranks_make_a_communicator(pair):
    pair.run(while_made)


def handled(rank):
    """A handler that raises nothing runs at once, and the call goes on."""
    call, ran = calls()['bridge'], []
    assert call()
    meet()
    begin = time.monotonic()
    if rank:
        time.sleep(LATE)
        assert call()
    else:
        with signalled(signal.SIGUSR1, lambda *_: ran.append(time.monotonic() - begin)):
            assert call()
        assert len(ran) == 1 and ran[0] < SOON + .8 and time.monotonic() - begin > LATE - .1


def test_a_handler_that_raises_nothing_runs_while_a_rank_waits(pair):
    pair.run(handled)
