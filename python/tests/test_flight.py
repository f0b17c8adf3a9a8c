# SPDX-License-Identifier: Apache-2.0
"""colobridge flight: what it says of records that are written here by hand, and of those of two threads. PyTorch's
analyzer reads what it makes in tests/faults/flight.py."""
import json
import pickle

import pytest

from colobridge import run_threads
from colobridge.comm import Comm
from colobridge.flight import main as command


def op(seq, count=4, status='COLO_OK', kind='all_gather', **more):
    return dict({'seq': seq, 'op': kind, 'category': 'user', 'dtype': 'f32', 'count': count, 'sent_bytes': 16, 'recv_bytes': 48,
                 'peers': 1, 'ticket': 0, 'status': status, 'begin': 10.0 + seq,
                 'end': None if status == 'COLO_PENDING' else 10.5 + seq}, **more)


def record(folder, rank, ops, members=(0, 1), ended=0):
    path = folder / ('rank%d' % rank)
    path.write_text(json.dumps({'ended': ended, 'comms': [{
        'id': '00000000000000ff', 'members': list(members), 'pid': 70 + rank, 'host': 'here', 'name': 'world',
        'backend': 'threads', 'rank': rank, 'size': len(members), 'world_rank': rank, 'seq': ops[-1]['seq'] if ops else 0,
        'status': 'COLO_ERR_TIMEOUT', 'error': 'too late', 'timeout_ms': 400, 'now': 20.0, 'wall': 1020.0, 'stats': [],
        'ring': ops}]}))
    return str(path)


def flight(capsys, *arguments):
    status = command(list(map(str, arguments)))
    return status, capsys.readouterr().out


def test_flight_says_which_rank_did_not_begin_an_operation(tmp_path, capsys):
    files = [record(tmp_path, 0, [op(1), op(2, 8, 'COLO_ERR_TIMEOUT')]), record(tmp_path, 1, [op(1)])]
    status, said = flight(capsys, *files)
    assert status == 1 and 'rank 0, process 70 on here: 2 operations; world: COLO_ERR_TIMEOUT: too late\n' in said
    assert 'operation 2 differs: all_gather of 8 f32 on rank 0; nothing on rank 1\n' in said
    assert 'rank 0: all_gather of 8 f32 #2 did not end well: COLO_ERR_TIMEOUT' in said


def test_flight_says_nothing_of_a_rank_that_has_destroyed_a_communicator(tmp_path, capsys):
    files = [record(tmp_path, 0, [op(1)]), record(tmp_path, 1, [op(1)])]
    with open(files[1]) as f:
        more = json.load(f)
    more['comms'].append(dict(more['comms'][0], id='00000000000000fe', name='pair'))
    with open(files[1], 'w') as f:
        json.dump(more, f)
    assert flight(capsys, *files)[0] == 0


def test_flight_tells_exchanges_of_two_dtypes_apart(tmp_path, capsys):
    files = [record(tmp_path, rank, [op(1, 0, kind='exchange', dtype=dtype)]) for rank, dtype in enumerate(['f32', 'bf16'])]
    status, said = flight(capsys, *files)
    assert status == 1 and 'operation 1 differs: exchange of f32 on rank 0; exchange of bf16 on rank 1\n' in said


@pytest.mark.parametrize('key', ['members', 'pid', 'timeout_ms'])
def test_flight_refuses_a_record_that_lacks_something(tmp_path, capsys, key):
    path = record(tmp_path, 0, [op(1)])
    with open(path) as f:
        given = json.load(f)
    del given['comms'][0][key]
    with open(path, 'w') as f:
        json.dump(given, f)
    assert flight(capsys, path) == (2, "flight: %s: KeyError: '%s'; expected a file that COLO_FLIGHT_RECORDER named\n" % (path, key))


def test_flight_says_which_rank_left_no_record(tmp_path, capsys):
    status, said = flight(capsys, record(tmp_path, 0, [op(1)]))
    assert status == 1 and 'world threads-00000000000000ff, ranks 0, 1: no record of rank 1\n' in said
    assert said.endswith('ranks 0, 1: the operations of the other ranks are alike\n'), said


def test_flight_compares_from_where_all_ranks_have_operations(tmp_path, capsys):
    """A ring keeps the last ones: that of rank 1 is one further."""
    files = [record(tmp_path, 0, [op(1), op(2), op(3)]), record(tmp_path, 1, [op(2), op(3)])]
    assert flight(capsys, *files)[0] == 0


def test_flight_writes_numbers_and_times_for_the_analyzer(tmp_path, capsys):
    ops = [op(1), op(2, 6, kind='reduce_scatter'), op(3, 0, 'COLO_PENDING', 'exchange', dtype='bf16')]
    assert flight(capsys, record(tmp_path, 1, ops, ended=40), '-o', tmp_path / 'out') == (0, '')
    made = pickle.loads((tmp_path / 'out' / 'rank1').read_bytes())
    assert [e['record_id'] for e in made['entries']] == [41, 42, 43]
    assert [(e['input_sizes'], e['output_sizes']) for e in made['entries']] == [
        ([[4]], [[8]]), ([[12]], [[6]]), ([[8]], [[24]])]
    assert made['entries'][0]['time_created_ns'] == 1011 * 10**9  # 11 s, and the clock began at 1000 s
    assert made['entries'][0]['time_discovered_completed_ns'] == 1011500000000
    assert [e['state'] for e in made['entries']] == ['completed', 'completed', 'started']
    assert made['entries'][2]['time_discovered_completed_ns'] is None and not made['entries'][2]['retired']
    assert made['pg_status']['threads-00000000000000ff']['last_completed_collective'] == 2


def test_flight_gives_the_analyzer_the_last_256_operations(tmp_path, capsys):
    ops = [op(seq) for seq in range(1, 301)]
    assert flight(capsys, record(tmp_path, 0, ops), '-o', tmp_path / 'out') == (0, '')
    entries = pickle.loads((tmp_path / 'out' / 'rank0').read_bytes())['entries']
    assert [(e['record_id'], e['collective_seq_id']) for e in entries] == [(i, i) for i in range(45, 301)]


@pytest.mark.parametrize('out, why', [('', 'one of FILES'), ('rank0', 'rank0')])
def test_flight_does_not_write_over_what_it_reads(tmp_path, capsys, out, why):
    path = record(tmp_path, 0, [op(1)])
    status, said = flight(capsys, path, '-o', tmp_path / out)
    assert status == 2 and said.startswith('flight: ') and why in said and json.loads(open(path).read())


def test_flight_reads_the_records_of_threads(tmp_path, capsys):
    def rank(world: Comm):
        world.barrier()
        world.flight_record(str(tmp_path / 'trace'))
    run_threads(2, rank)
    status, said = flight(capsys, tmp_path / 'trace0', tmp_path / 'trace1')
    assert status == 0 and said.endswith('ranks 0, 1: all operations are alike\n'), said
