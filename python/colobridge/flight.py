# SPDX-License-Identifier: Apache-2.0
"""colobridge flight reads flight records of ranks: it says which rank is missing or which operation differs.

A record is JSON, docs/runtime/comm.md: what dump() says of each communicator that a rank made from one world. With -o it is
written again as what the analyzer of PyTorch's Flight Recorder reads: a pickle with the keys of version 2.10 of that
format. The analyzer aligns ranks by record_id, so an operation has there its number among all operations of its rank.
"""
import argparse
import json
import os
import pickle
from typing import Any

from . import _structs as s

EXAMPLE = """example:
  COLO_FLIGHT_RECORDER=trace/rank ./train
  colobridge flight trace/rank*
  colobridge flight trace/rank* -o torch
  python -m torch.distributed.flight_recorder.fr_trace torch -p rank

The exit status is 1 if ranks differ or one has no record (0 with -o), and 2 if a file is no flight record."""
LAST = 256  # operations of a rank, all communicators together, that the analyzer gets
TORCH = {'split': 'all_gather', 'reduce_scatter': '_reduce_scatter_base', 'exchange': 'all_to_all',
         'barrier': 'all_reduce_barrier'}

Record = dict[str, Any]


def read(path: str) -> Record:
    """A rank's record. ValueError: it is none."""
    try:
        with open(path, 'rb') as f:
            record = json.load(f)
        first = record['comms'][0]
        for comm in record['comms']:
            comm['ring'] = [op for op in comm['ring'] if op['seq'] > 0 and op['dtype'] in s.DTYPE]
            comm['group'] = '%s-%s' % (comm['backend'], comm['id'])
            comm['epoch'] = comm['wall'] - comm['now']
            _ = comm['members'], comm['timeout_ms']
        _ = first['pid'], first['host'], first['status'], first['error']
        record['rank'], record['last'] = first['world_rank'], int(record['ended']) + sum(
            comm['seq'] for comm in record['comms'])
        return record
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as why:
        raise ValueError('%s: %s: %s; expected a file that COLO_FLIGHT_RECORDER named'
                         % (path, type(why).__name__, why)) from None


def of_torch(record: Record) -> Record:
    """The same as PyTorch's analyzer reads it."""
    ops = sorted(((comm, op) for comm in record['comms'] for op in comm['ring']),
                 key=lambda each: (each[1]['begin'], each[1]['seq']))[-LAST:]
    return {
        'version': '2.10', 'comm_lib_version': s.VERSION,
        'pg_config': {comm['group']: {'name': comm['name'], 'desc': comm['backend'], 'ranks': str(comm['members'])}
                      for comm in record['comms']},
        'pg_status': {comm['group']: {
            'last_enqueued_collective': comm['seq'], 'last_started_collective': comm['seq'],
            'last_completed_collective': max((op['seq'] for op in comm['ring'] if op['status'] == 'COLO_OK'), default=0),
        } for comm in record['comms']},
        'entries': [entry(comm, op, record['last'] - len(ops) + i + 1) for i, (comm, op) in enumerate(ops)]}


def entry(comm: Record, op: Record, number: int) -> Record:
    """One operation, number @number of its rank."""
    size, n = s.DTYPE_SIZE[s.DTYPE[op['dtype']]], len(comm['members'])
    given = got = op['count']
    if op['op'] in ('split', 'all_gather'):
        got = given * n
    elif op['op'] == 'reduce_scatter':
        given = got * n
    elif op['op'] == 'exchange':
        given, got = op['sent_bytes'] // size, op['recv_bytes'] // size
    begin, end = (None if at is None else int((comm['epoch'] + at) * 1e9) for at in (op['begin'], op['end']))
    done = op['status'] == 'COLO_OK'
    return {
        'record_id': number, 'op_id': number, 'pg_id': int(comm['id'], 16) >> 1,
        'process_group': (comm['group'], comm['backend']), 'collective_seq_id': op['seq'], 'p2p_seq_id': 0,
        'profiling_name': 'nccl:' + TORCH.get(op['op'], op['op']),
        'input_sizes': [[given]], 'output_sizes': [[got]], 'input_dtypes': [op['dtype']], 'output_dtypes': [op['dtype']],
        'state': 'completed' if done else 'started', 'time_created_ns': begin, 'time_discovered_started_ns': begin,
        'time_discovered_completed_ns': end if done else None, 'timeout_ms': comm['timeout_ms'],
        'retired': op['status'] != 'COLO_PENDING', 'is_p2p': False, 'frames': [],
        **({} if op['end'] is None else {'duration_ms': (op['end'] - op['begin']) * 1e3})}


def what(op: Record | None) -> str:
    """What ranks of a group must do alike."""
    if op is None:
        return 'nothing'
    if op['op'] == 'exchange':  # each rank has counts of its own
        return 'exchange of %s' % op['dtype']
    return op['op'] + (' of %d %s' % (op['count'], op['dtype']) if op['count'] else '')


def some(ranks: list[int]) -> str:
    """"rank 2", "ranks 0, 1, 3 and 17 more"."""
    shown = ', '.join(map(str, ranks[:8])) + (' and %d more' % (len(ranks) - 8) if ranks[8:] else '')
    return ('rank ' if len(ranks) == 1 else 'ranks ') + shown


def summary(records: dict[int, Record]) -> tuple[list[str], bool]:
    """Lines, and whether ranks differ or are missing. Of each group, smallest first, the first operation that does."""
    lines: list[str] = []
    found = False
    groups: dict[str, dict[int, Record]] = {}
    for rank, record in sorted(records.items()):
        first = record['comms'][0]
        lines.append('rank %d, process %d on %s: %d operations; %s: %s' % (
            rank, first['pid'], first['host'], record['last'], first['name'] or first['group'],
            first['status'] + (': ' + first['error'] if first['error'] else '')))
        for comm in record['comms']:
            groups.setdefault(comm['group'], {})[rank] = comm
    for group, comms in sorted(groups.items(), key=lambda each: (len(next(iter(each[1].values()))['members']), each[0])):
        any_comm = next(iter(comms.values()))
        title = '%s %s, %s: ' % (any_comm['name'] or 'no name', group, some(any_comm['members']))
        absent = [rank for rank in any_comm['members'] if rank not in records]
        if absent:
            lines.append('%sno record of %s' % (title, some(absent)))
        rings = {rank: {op['seq']: op for op in comm['ring']} for rank, comm in comms.items()}
        begun = [min(ring) for ring in rings.values() if ring]
        said = 'the operations of the other ranks are alike' if absent else 'all operations are alike'
        for number in range(max(begun, default=1), max((comm['seq'] for comm in comms.values()), default=0) + 1):
            alike: dict[str, list[int]] = {}
            for rank in any_comm['members']:
                if rank in rings:  # one that has destroyed this communicator tells nothing of it
                    alike.setdefault(what(rings[rank].get(number)), []).append(rank)
            if len(alike) > 1:
                said = 'operation %d differs: %s' % (number, '; '.join(
                    '%s on %s' % (name, some(ranks)) for name, ranks in sorted(
                        alike.items(), key=lambda each: -len(each[1]))))
                break
        found |= said.startswith('operation') or bool(absent)
        lines.append(title + said)
        for rank, ring in rings.items():
            late = [op for op in ring.values() if op['status'] != 'COLO_OK']
            lines += ['  rank %d: %s #%d did not end well: %s' % (rank, what(op), op['seq'], op['status']) for op in late[:1]]
    return lines, found


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser('colobridge flight', description=(__doc__ or '').split('\n')[0], epilog=EXAMPLE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('files', nargs='+', metavar='FILES', help='the files that COLO_FLIGHT_RECORDER named')
    parser.add_argument('-o', dest='out', metavar='OUT', help='a folder: rank0, rank1 and so on for the analyzer')
    o = parser.parse_args(arguments)
    files: list[str] = o.files
    out: str | None = o.out
    records: dict[int, Record] = {}
    try:
        for path in files:
            record = read(path)
            if records.setdefault(record['rank'], record) is not record:
                raise ValueError('%s: a second record of rank %d, expected files of one run' % (path, record['rank']))
        for rank, record in records.items() if out else ():
            os.makedirs(str(out), exist_ok=True)
            path = os.path.join(str(out), 'rank%d' % rank)
            if any(os.path.exists(path) and os.path.samefile(path, given) for given in files):
                raise ValueError('%s is one of FILES; name another folder' % path)
            with open(path, 'wb') as f:
                pickle.dump(of_torch(record), f, protocol=2)
    except (OSError, ValueError, KeyError, TypeError) as why:
        print('flight: %s' % why)
        return 2
    if out:
        return 0
    lines, found = summary(records)
    print('\n'.join(lines))
    return int(found)
