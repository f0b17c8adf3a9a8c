#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a bridge costs per step from 8 to 65,536 nodes, by the model of colo-plan --compare.

usage: bench/scale.py [--plan build/tools/colo-plan] [--nodes 8,64,...] [--alpha A,B] [--beta A,B]

The layouts are those of docs/guides/choosing.md, on nodes of 8 ranks: data parallelism and the batch grow with
the number of nodes, everything else stays. A row has the bytes into one node in a step, and the time of
forward and backward, on one level and on two. Worlds above 65,536 ranks are estimated from 256 parts.
"""
import argparse
import json
import subprocess

PER_NODE, SAMPLES, ROWS, FEATURES = 8, 16, 8192, 4096  # samples of 8 ranks
LAYOUTS = [  # dp of 8 ranks: it is multiplied
    ('tp=2,dp={4}', 'tp=2,cp=2,dp={2}', 'sharded'),
    ('tp=2,dp={4}', 'tp=2,cp=2,dp={2}', 'partial'),
    ('tp=2,dp={4}', 'tp=4,dp={2}', 'partial'),
    ('dp={8}', 'tp=8,dp={1}', 'sharded'),
    ('tp=8,dp={1}', 'tp=4,cp=4,dp={0.5}', 'sharded'),
    ('tp=8,dp={1}', 'tp=4,cp=4,dp={0.5}', 'partial'),
    ('tp=4,dp={2}', 'tp=8,cp=8,dp={0.125}', 'partial'),
]


def spec(text, nodes):
    head, _, rest = text.partition('{')
    return head + str(int(float(rest.rstrip('}')) * nodes))


def count(ask, nodes):
    entries = ['%s->%s:%s' % (spec(s, nodes), spec(d, nodes), o) for s, d, o in LAYOUTS]
    command = [ask.plan, '--compare', *entries, '--batch', str(SAMPLES * nodes), '--seq', str(ROWS), '--hidden',
               str(FEATURES), '--ranks-per-node', str(PER_NODE), '--json']
    for name in ('alpha', 'beta'):
        if getattr(ask, name):
            command += ['--' + name, getattr(ask, name)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)['entries']


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument('--plan', default='build/tools/colo-plan')
    p.add_argument('--nodes', default='8,64,512,4096,65536')
    p.add_argument('--alpha')
    p.add_argument('--beta')
    ask = p.parse_args()
    print('| nodes | ranks | source | destination | output | into a node, one level, MiB | two levels, MiB '
          '| one level, ms | two levels, ms | times |')
    print('|---:|---:|---|---|---|---:|---:|---:|---:|---:|')
    for nodes in map(int, ask.nodes.split(',')):
        for (src, dst, output), e in zip(LAYOUTS, count(ask, nodes)):
            ways = [e['forward'], e['backward']]
            one, two = (sum(w[key] for w in ways) / nodes / 2**20
                        for key in ('slow_bytes_one_level', 'slow_bytes_total'))
            t1, t2 = (1e3 * sum(w[key] for w in ways) for key in ('seconds_one_level', 'seconds'))
            print('| %d | %d | %s | %s | %s | %.0f | %.0f | %.2f | %.2f | %s |' % (
                nodes, nodes * PER_NODE, spec(src, nodes), spec(dst, nodes), output, one, two, t1, t2,
                '%.1f' % (t1 / t2) if t2 else '-'))


main()
