# SPDX-License-Identifier: Apache-2.0
"""colobridge check: it passes on what works, and finds a wrong gradient."""
import importlib.util
import os
import subprocess
import sys
import time

import pytest

from colobridge import bridge, check


def command(*arguments, **env):
    done = subprocess.run([sys.executable, '-m', 'colobridge', 'check', *arguments], env=dict(os.environ, **env),
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=150)
    return done.returncode, done.stdout


@pytest.mark.parametrize('ranks', [2, 3, 8])
def test_check_of_threads_passes(ranks):
    status, said = command('--ranks', str(ranks), '--threads')
    assert status == 0 and said.endswith('%d passed, 0 failed\n' % (4 if ranks % 2 else 6)), said
    for word in ('threads      ranks 0-%d  yes' % (ranks - 1), 'not tried: --threads', 'CPU', 'libcolobridge.so'):
        assert word in said, said


def test_check_of_processes_passes():
    if importlib.util.find_spec('torch') is None:
        pytest.skip('no torch in this Python')
    begun = time.monotonic()
    status, said = command('--ranks', '2')
    assert status == 0 and 'sockets      ranks 0-1  yes' in said and said.count(' ok') >= 12, said
    assert time.monotonic() - begun < 60


def test_check_help_shows_an_example():
    status, said = command('--help')
    assert status == 0 and '  colobridge check --ranks 8' in said


def test_check_of_nine_ranks_is_a_wrong_argument():
    assert command('--ranks', '9')[0] == 2


def test_check_without_a_library_fails_with_its_message():
    status, said = command(COLOBRIDGE_LIBRARY='/nonexistent')
    assert status == 1 and said.startswith("COLOBRIDGE_LIBRARY is '/nonexistent'") and said.count('\n') == 1


def test_check_finds_a_doubled_gradient_of_a_bridge(monkeypatch, capsys):
    backward = bridge.Bridge.backward

    def doubled(self, d_y, d_x, stream=None):
        backward(self, d_y, d_x, stream)
        first = (check.c.c_float * 1).from_address(d_x.data)
        first[0] *= 2
    monkeypatch.setattr(bridge.Bridge, 'backward', doubled)
    assert check.main(['--ranks', '2', '--threads']) == 1
    said = capsys.readouterr().out
    assert 'gradient of x[0]: found 6, expected 3' in said and '2 passed, 4 failed' in said, said


def test_check_finds_a_row_of_a_ragged_batch_that_is_elsewhere(monkeypatch, capsys):
    forward = bridge.Batch.forward

    def turned(self, x, y, stream=None):
        forward(self, x, y, stream)
        rows = (check.c.c_float * 2).from_address(y.data)
        rows[0], rows[1] = rows[1], rows[0]
    monkeypatch.setattr(bridge.Batch, 'forward', turned)
    assert check.main(['--ranks', '2', '--threads']) == 1
    said = capsys.readouterr().out
    assert 'y[0]: found' in said and '5 passed, 1 failed' in said, said


@pytest.mark.parametrize('which, what', [(0, 'loss'), (1, 'entropy'), (2, 'gradient of the logits')])
def test_check_finds_a_loss_that_is_off_by_a_ten_thousandth(monkeypatch, capsys, which, what):
    right = check.core_loss

    def wrong(*arguments):
        found = right(*arguments)
        found[which][1] *= 1.0001
        found[which][1] += 1e-4
        return found
    monkeypatch.setattr(check, 'core_loss', wrong)
    assert check.main(['--ranks', '2', '--threads']) == 1
    assert 'rank 0: %s[1]: found' % what in capsys.readouterr().out


def test_check_expects_what_a_person_computes():
    # two context ranks share eight rows: of four chunks of two the first rank has the outer ones
    assert check.rows_of(2, 0, 8) == [0, 1, 6, 7] and check.rows_of(2, 1, 8) == [2, 3, 4, 5]
    assert check.at((('tp', 2), ('dp', 2)), 1) == {'tp': 1, 'cp': 0, 'dp': 0}
    # four samples and rows of two ranks; the second of two dp ranks has samples 2 and 3
    assert list(check.elements((('dp', 2),), 1, 2, True))[0] == (2, 0, 0)


def test_check_tells_of_a_rank_that_died(monkeypatch, capsys):
    if importlib.util.find_spec('torch') is None:
        pytest.skip('no torch in this Python')
    monkeypatch.setattr(check, 'processes', lambda ranks, gpu, until: [('ended without an answer', False)] * ranks)
    assert check.main(['--ranks', '2']) == 1
    assert 'sockets      ranks 0-1  no: rank 0: ended without an answer' in capsys.readouterr().out
