# SPDX-License-Identifier: Apache-2.0
"""colo-info --world by four processes that a launcher told their ranks: world.py COLO_INFO PROGRAM_NEXT_TO_FAKES [ucx]"""
import os
import subprocess
import sys
import tempfile

INFO, FAKE = sys.argv[1], os.path.dirname(os.path.abspath(sys.argv[2]))
CLEAN = {name: value for name, value in os.environ.items() if not name.endswith(('RANK', '_SIZE', '_PROCID', '_NTASKS'))}


def run(folder, told, ranks=4, COLO_TIMEOUT_MS='20000', of_rank={}, **env):
    started = [subprocess.Popen(
        [INFO, '--world', folder], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=dict(CLEAN, COLO_TIMEOUT_MS=COLO_TIMEOUT_MS, **env, **of_rank.get(r, {}), **{told[0]: str(r), told[1]: str(ranks)} if told else {}))
        for r in range(ranks)]
    said = [process.communicate(timeout=60) for process in started]
    return [process.returncode for process in started], [s[0] for s in said], [s[1] for s in said]


def expect(what, found, wanted):
    if found != wanted:
        sys.exit('%s: found %r, expected %r' % (what, found, wanted))


with tempfile.TemporaryDirectory() as shared:
    new = os.path.join(shared, 'new')
    codes, out, err = run(new, ('RANK', 'WORLD_SIZE'), COLO_NODE='x,y,x,x')
    expect('exit', codes, [0] * 4)
    expect('output of ranks 1 to 3', out[1:], [''] * 3)
    lines = [line.split() for line in out[0].splitlines()]
    expect('first line', out[0].splitlines()[0], '4 ranks of torchrun on 2 nodes, as COLO_NODE says')
    expect('node 0', lines[3][::2], ['0', '0,2-3'])
    expect('node 1', lines[4][::2], ['1', '1'])
    expect('pairs', '  6 pairs by Unix socket, because they are on one host' in out[0], True)

    # Pairs that no socket connects have the transport that the library chose, under its name there.
    if 'ucx' in sys.argv[3:]:
        wanted = ['3 pairs by Unix socket, because they are on one host and one network namespace: 0-2 0-3 2-3',
                  '3 pairs by ucx, because they are on one host, and COLO_TRANSPORT names it: 0-1 1-2 1-3']
        for name, of_rank in ('ucx', {r: {'COLO_TRANSPORT': 'ucx'} for r in range(4)}), ('one', {2: {'COLO_TRANSPORT': 'ucx'}}):
            codes, out, err = run(os.path.join(shared, name), ('RANK', 'WORLD_SIZE'), COLO_NODE='x,y,x,x', of_rank=of_rank)
            pairs = [line.strip() for line in out[0].splitlines() if ' pairs by ' in line]
            expect('COLO_TRANSPORT=ucx of %s' % name, (codes, pairs[:2]), ([0] * 4, wanted))

    # Over a stand-in for CUDA whose devices' memory no other process opens.
    for transport, node_of, wanted in (
            ('auto', 'x,y,x,x', ['3 pairs by NCCL, because they are on two nodes: 0-1 1-2 1-3',
                                 "3 pairs by NCCL, because they do not reach each other's (COLO_LOG=info says why): 0-2 0-3 2-3"]),
            ('nccl', 'x,x,x,x', ['6 pairs by NCCL, because COLO_TRANSPORT is nccl: 0-1 0-2 0-3 1-2 1-3 2-3'])):
        codes, out, err = run(os.path.join(shared, transport), ('RANK', 'WORLD_SIZE'), COLO_NODE=node_of,
                              COLO_TRANSPORT=transport, COLO_BACKEND_DIR=FAKE, FAKE_DEVICES='4')
        gpus = out[0].partition('GPU memory that is registered; other GPU memory goes by NCCL\n')[2]
        expect('GPUs, %s' % transport, ([line.strip() for line in gpus.splitlines()], codes), (wanted, [0] * 4))

    codes, out, err = run(new, ('RANK', 'WORLD_SIZE'))
    expect('exit in a folder that was used', codes, [1] * 4)
    expect('its words', ['expected a new folder for each run' in text for text in err], [True] * 4)

    codes, out, err = run(os.path.join(shared, 'typo'), ('RANK', 'WORLD_SIZE'), ranks=2, COLO_TIMEOUT_MS='abc')
    expect('a deadline that is no number', (codes, ["COLO_TIMEOUT_MS is 'abc', expected a number" in text for text in err]),
           ([1] * 2, [True] * 2))

    codes, out, err = run(os.path.join(shared, 'mpirun'), ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'))
    expect('mpirun', (codes, out[0].splitlines()[0]), ([0] * 4, '4 ranks of mpirun (Open MPI) on 1 node'))

    codes, out, err = run(shared, None, ranks=1)
    expect('without a launcher', (codes, out, 'has started this process' in err[0]), ([2], [''], True))
    codes, out, err = run(shared, ('SLURM_PROCID', 'SLURM_NTASKS'), ranks=1, SLURM_JOB_ID='1')
    expect('one rank', (codes, out[0].splitlines()[0]), ([0], '1 ranks of srun on 1 node'))
    for rank, size in (('0x0', '1'), ('', '1'), ('0', '1 '), ('1', '1'), ('0', '99999999999999999999')):
        done = subprocess.run([INFO, '--world', shared], text=True, capture_output=True, timeout=60,
                              env=dict(CLEAN, RANK=rank, WORLD_SIZE=size))
        expect('rank %r of %r' % (rank, size), (done.returncode, done.stdout, "RANK is '%s'" % rank in done.stderr),
               (2, '', True))
