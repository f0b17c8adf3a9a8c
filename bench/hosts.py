#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One level against two over a slow link, measured and by the model of colo-plan.

usage: bench/hosts.py [--mbit 100] [--library build/src/libcolobridge.so] [--plan build/tools/colo-plan]

Two network namespaces stand for two hosts, and a token bucket (tc tbf) on each end of the pair between them
for the network. Each has 8 ranks, processes over Unix sockets inside and UCX between. Needs root, ip and tc.
The model gets beta between nodes from the rate, shared by 8 ranks, and alpha and beta inside a node from a
bridge among the 8 ranks of one host that runs first.
"""
import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PER_NODE, REPETITIONS = 8, 5
PAYLOAD = 1448 / 1514  # of a full TCP segment of UCX in an Ethernet frame, which the token bucket counts
GRAD = {'forward': 'disjoint', 'backward': 'partial'}  # by way
SRC, DST, SHAPE = 'tp=8,dp=2', 'tp=4,cp=4,dp=1', (2, 2048, 256)  # f32: a node lacks one sample, 2 MiB
HOSTS = ['colo%d%s' % (os.getpid(), side) for side in 'ab']


def gather_in(folder, rank, size):
    calls = itertools.count()

    def all_gather(mine):
        path = '%s/%d-' % (folder, next(calls))
        with open(path + '%d.part' % rank, 'wb') as out:
            out.write(mine)
        os.rename(path + '%d.part' % rank, path + str(rank))
        while any(not os.path.exists(path + str(r)) for r in range(size)):
            time.sleep(0.01)
        return [open(path + str(r), 'rb').read() for r in range(size)]
    return all_gather


def times(comm, src, dst, shape, way='forward', **options):
    """Median of the slowest rank's seconds. Backward adds up the gradients of context ranks."""
    import numpy as np
    import colobridge as cb
    src, dst, me = cb.Layout.src(src), cb.Layout.dst(dst), comm.world_rank(comm.rank)
    bridge = cb.Bridge(comm, src, dst, shape, output='full', grad=GRAD[way], **options)
    x = np.full(bridge.src_shape, me, np.float32)
    y = np.zeros(bridge.dst_shape, np.float32)
    slowest = []
    for _ in range(REPETITIONS + 1):
        comm.barrier()
        begin = time.perf_counter()
        bridge.forward(x, y) if way == 'forward' else bridge.backward(y, x)
        mine = np.array([time.perf_counter() - begin])
        everyone = np.zeros(comm.size)
        comm.all_gather(mine, everyone)
        slowest.append(float(everyone.max()))
    return statistics.median(slowest[1:])


def one_rank(folder, rank, size):
    import colobridge as cb
    comm = cb.Comm.from_all_gather(rank, size, gather_in(folder, rank, size))
    half = comm.split_color(rank // PER_NODE)
    half.set_world_ranks(list(range(PER_NODE)))
    found = {'small': times(half, 'dp=8', 'tp=8,dp=1', (8, 1, 1)),
             'large': times(half, 'dp=8', 'tp=8,dp=1', (8, 2048, 32)),  # 7 messages of 256 KiB each
             **{'%s %d' % (way, one): times(comm, SRC, DST, SHAPE, way, one_level=one)
                for way in GRAD for one in (True, False)}}
    if rank == 0:
        print(json.dumps(found))


def ip(*words):
    subprocess.run(['ip', *words], check=True)


def measure(ask):
    for host in HOSTS:
        ip('netns', 'add', host)
        ip('-n', host, 'link', 'set', 'lo', 'up')
    ip('-n', HOSTS[0], 'link', 'add', 'veth0', 'type', 'veth', 'peer', 'name', 'veth0', 'netns', HOSTS[1])
    for i, host in enumerate(HOSTS):
        ip('-n', host, 'address', 'add', '10.213.78.%d/24' % (i + 1), 'dev', 'veth0')
        ip('-n', host, 'link', 'set', 'veth0', 'up')
        ip('netns', 'exec', host, 'tc', 'qdisc', 'add', 'dev', 'veth0', 'root', 'tbf', 'rate', '%dmbit' % ask.mbit,
           'burst', '64kb', 'latency', '200ms')
    names = ','.join('0' * PER_NODE + '1' * PER_NODE)
    env = dict(os.environ, COLOBRIDGE_LIBRARY=os.path.abspath(ask.library), COLO_NODE=names, UCX_NET_DEVICES='veth0',
               PYTHONPATH=os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'python'))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen(['ip', 'netns', 'exec', HOSTS[r // PER_NODE], sys.executable, __file__, '--rank',
                                   str(r), '--folder', folder], env=env, text=True, stdout=subprocess.PIPE)
                 for r in range(2 * PER_NODE)]
        said = [rank.communicate()[0] for rank in ranks]
    return json.loads(said[0])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument('--mbit', type=int, default=100)
    p.add_argument('--library', default='build/src/libcolobridge.so')
    p.add_argument('--plan', default='build/tools/colo-plan')
    p.add_argument('--rank', type=int, help=argparse.SUPPRESS)
    p.add_argument('--folder', help=argparse.SUPPRESS)
    ask = p.parse_args()
    if ask.folder:
        return one_rank(ask.folder, ask.rank, 2 * PER_NODE)
    try:
        found = measure(ask)
    finally:
        for host in HOSTS:
            subprocess.run(['ip', 'netns', 'delete', host], check=False)
    alpha = found['small'] / 7
    inside = 2048 * 32 * 4 / max(found['large'] / 7 - alpha, 1e-9) * 1e-9
    between = ask.mbit * 1e6 / 8 / PER_NODE * PAYLOAD * 1e-9
    done = subprocess.run([ask.plan, '--compare', *('%s->%s:full:%s' % (SRC, DST, grad) for grad in GRAD.values()),
                           '--batch', str(SHAPE[0]),
                           '--seq', str(SHAPE[1]), '--hidden', str(SHAPE[2]), '--dtype', 'f32', '--ranks-per-node',
                           str(PER_NODE), '--alpha', '%.3f' % (1e6 * alpha), '--beta',
                           '%.6f,%.6f' % (inside, between), '--json'], text=True, stdout=subprocess.PIPE, check=True)
    models = json.loads(done.stdout)['entries']
    print('alpha %.0f us, beta %.3f GB/s inside a node, %.6f GB/s of a rank between nodes (%d Mbit/s for %d ranks)'
          % (1e6 * alpha, inside, between, ask.mbit, PER_NODE))
    print('| way | route | into each node, MiB | measured, ms | model, ms |\n|---|---|---:|---:|---:|')
    for (way, grad), entry in ((item, e) for item in GRAD.items() for e in models if e['grad'] == item[1]):
        for one, key, seconds in ((True, 'slow_bytes_one_level', 'seconds_one_level'),
                                  (False, 'slow_bytes_total', 'seconds')):
            print('| %s, %s | %s | %.1f | %.1f | %.1f |' % (
                way, grad, 'one level' if one else 'two levels', entry[way][key] / 2 / 2**20,
                1e3 * found['%s %d' % (way, one)], 1e3 * entry[way][seconds]))
        print('measured: %.1f times as fast' % (found['%s 1' % way] / found['%s 0' % way]))


main()
