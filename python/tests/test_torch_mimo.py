# SPDX-License-Identifier: Apache-2.0
"""examples/torch_mimo on 4 processes: the library's bridge and losses against torch.distributed."""
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip('torch')
import torch.distributed as dist  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / 'examples/torch_mimo'
sys.path.insert(0, str(EXAMPLE))

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
import train  # noqa: E402


def run(rank, *argv):
    made = train.made(train.options(list(argv)))
    return made(), made.right


SMALL = ('--width', '16', '--batch', '24', '--dtype', 'float64')


@pytest.mark.parametrize('src, dst', [
    ('tp=2,dp=2', 'tp=2,cp=2,dp=1'), ('tp=1,dp=4', 'tp=4,cp=1,dp=1'), ('tp=4,dp=1', 'cp=2,tp=1,dp=2'),
    ('dp=2,tp=2', 'tp=1,cp=4,dp=1'), ('tp=2,dp=2', 'tp=2,cp=1,dp=2')])
def test_losses_and_gradients_agree_step_by_step(world, src, dst):
    said = world.run(run, '--src', src, '--dst', dst, '--compare', '--steps', '3', *SMALL)
    assert all(s == said[0] for s in said)


def test_a_run_is_the_same_under_other_layouts_and_exchanges(world):
    seen = [world.run(run, '--src', src, '--dst', dst, '--exchange', how, '--steps', '4', *SMALL)[0][0]
            for how, src, dst in (('plain', 'tp=1,dp=4', 'tp=1,cp=1,dp=4'),
                                  ('library', 'tp=2,dp=2', 'tp=2,cp=2,dp=1'),
                                  ('hidden', 'tp=1,dp=4', 'tp=2,cp=1,dp=2'))]
    for losses in seen[1:]:  # four steps of Adam make 1e-16 of a gradient larger
        assert losses == pytest.approx(seen[0], rel=1e-6)


def test_what_is_wrong_with_the_bridge_is_seen(world):
    with pytest.raises(AssertionError, match='loss or gradients differ'):
        world.run(broken)


def broken(rank):
    made = train.Run(train.options(['--compare', '--steps', '1', *SMALL]))
    carry = made.exchanges['library'].carry
    made.exchanges['library'].bridge = lambda x: carry(x.detach() + 0.5 * (x - x.detach()))
    made()


@pytest.mark.parametrize('src, dst', [('dp=4', 'tp=2,cp=2'), ('tp=2,dp=2', 'cp=2,dp=2'), ('cp=2,dp=2', 'cp=4')])
def test_ragged_losses_and_gradients_agree_step_by_step(world, src, dst):
    said = world.run(run, '--ragged', '--src', src, '--dst', dst, '--compare', '--steps', '2', *SMALL)
    assert all(s == said[0] for s in said)


def exchanges(rank, src):
    return list(train.made(train.options(['--ragged', '--compare', '--src', src, *SMALL])).exchanges)


def test_towers_are_compared_where_the_whole_encoder_is_on_every_rank(world):
    assert world.run(exchanges, 'dp=4')[0] == ['library', 'hidden', 'towers', 'plain']
    assert world.run(exchanges, 'tp=2,dp=2')[0] == ['library', 'hidden', 'plain']
    with pytest.raises(AssertionError, match='pass --ragged --src dp=4'):
        world.run(run, '--ragged', '--exchange', 'towers', *SMALL)


@pytest.mark.parametrize('wrong', ['the gradient is halved', 'a segment is one position off'])
def test_what_is_wrong_with_the_ragged_bridge_is_seen(world, wrong):
    with pytest.raises(AssertionError, match='loss or gradients differ'):
        world.run(broken_ragged, wrong)


def broken_ragged(rank, wrong):
    made = train.made(train.options(['--ragged', '--compare', '--steps', '1', *SMALL]))
    library, good = made.exchanges['library'], made.exchanges['library'].merge

    def merge(x, embedded, batch):
        if wrong == 'the gradient is halved':
            return good(x.detach() + 0.5 * (x - x.detach()), embedded, batch)
        pos = list(batch.tables['pos'])
        pos[0] += 1
        other = cb.Segments(**dict(batch.tables, pos=pos))
        return library.carry(x, other, into=embedded)
    library.merge = merge
    made()


def torchrun():
    """The command, None where it does not start: that of PyTorch 1.13 under Python 3.11, and of a 2.6
    that was built without libuv, as Debian 13's."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.api import Std
    try: # as torchrun makes it
        TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    except RuntimeError:
        return None
    return None if Std.from_str('0') is None else [
        sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '4', '--standalone']


def read(text):
    return [json.loads(line) if line.startswith('{') else line for line in text.splitlines()]


def launched(*argv):
    """What rank 0 printed, as JSON; by torchrun, or as torchrun would start them."""
    command = [str(EXAMPLE / 'train.py'), *argv]
    if torchrun():
        started = [subprocess.Popen(torchrun() + command, text=True, stdout=subprocess.PIPE)]
    else:
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        started = [subprocess.Popen([sys.executable] + command, text=True, stdout=subprocess.PIPE, env=dict(
            os.environ, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE='4', MASTER_ADDR='127.0.0.1',
            MASTER_PORT=str(port))) for r in range(4)]
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return read(said[0])


def test_it_trains_when_launched():
    lines = launched('--steps', '15', '--width', '32', '--batch', '32')
    assert lines[14]['loss'] < 0.6 * lines[0]['loss'] and 'exact' in lines[-1]


def printed(rank, *argv):
    dist.barrier()
    ct.shutdown()  # the table has what communicators carried since they were made
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train.made(train.options(list(argv)))()
    return read(out.getvalue())


def test_it_trains_on_ragged_batches_and_ends_with_a_table(world):
    lines, *others = world.run(printed, '--ragged', '--steps', '15', '--width', '32', '--batch', '24')
    assert others == [[]] * 3
    assert lines[14]['loss'] < 0.6 * lines[0]['loss'] and 'exact' in lines[15]
    table = {line.rpartition('  ')[0].strip(): line.split()[-1] for line in lines[16:] if line}
    before, after = float(table['each image where its sample is']), float(table['balanced'])
    assert 1 <= after < before and after < 1.1
    assert 0 < float(table['library']) < float(table['all-gather and all-reduce'])
