# SPDX-License-Identifier: Apache-2.0
"""What colo-plan --json says is a plan: every element that a rank needs and does not hold arrives exactly once from a
rank that holds it, and the totals are the sums."""
import collections

from plan_world import Grid
from tool import case, check, equal, main, planned

BYTES = 3 * 2  # of an element: --hidden 3 --dtype bf16


class World:
    def __init__(self, what, src, dst, samples, rows, sharded=True, per_node=0, nodes=None, sp=(), **position):
        self.what, self.src, self.dst, self.sharded = what, Grid(src), Grid(dst), sharded
        self.size = max(self.src.end, self.dst.end)
        shape, placed = {'samples': samples, 'rows': rows}, dict({'offset': 0, 'positions': rows}, **position)
        # by rank: what it has of the input, and of the output; then what it needs of the output
        self.held = [[self.src.owned(r, True, **shape, sp='src' in sp) for r in range(self.size)],
                     [self.dst.owned(r, False, **shape, **placed, sp='dst' in sp) for r in range(self.size)]]
        self.output = [self.dst.owned(r, False, **shape, **placed, all_rows=not sharded, sp='dst' in sp)
                       for r in range(self.size)]
        self.node = nodes or (per_node and [r // per_node for r in range(self.size)])  # of each rank; 0: one node
        self.line = '--src %s --dst %s --batch %d --seq %d --hidden 3 --dtype bf16 --json --output %s ' \
            '--grad disjoint --offset %d --llm-seq %d --sp %s %s --max-ranks ' % (
                src, dst, samples, rows, 'sharded' if sharded else 'full', placed['offset'], placed['positions'],
                'both' if len(sp) == 2 else sp[0] if sp else 'none',
                '--nodes ' + ','.join(map(str, nodes)) if nodes else '--ranks-per-node %d' % per_node)

    def needed_and_held(self, forward):
        return (self.output, self.held[0]) if forward else (self.held[0], self.held[1])


WORLDS = {world.what: world for world in (
    World('fan-in', 'tp=2,dp=4', 'tp=2,cp=2,dp=2', 8, 8),
    World('fan-in, full', 'tp=2,dp=4', 'tp=2,cp=2,dp=2', 8, 8, False),
    World('fan-out', 'tp=4,dp=2', 'tp=1,cp=2,dp=4', 8, 8, False),
    World('fan-out by 8', 'tp=8,dp=1', 'tp=1,dp=8', 8, 3),
    World('equal', 'tp=4,dp=2', 'tp=2,cp=2,dp=2', 4, 8),
    World('dp that does not divide', 'tp=2,dp=3', 'tp=3,dp=2', 6, 5),
    World('batch that does not divide', 'tp=1,dp=6', 'tp=2,cp=1,dp=3', 7, 4, False),
    World('ranks without samples', 'dp=8', 'tp=2,dp=4', 3, 4),
    World('cp 3', 'tp=2,dp=6', 'cp=3,tp=2,dp=2', 6, 12),
    World('cp after dp', 'tp=2,dp=4', 'tp=2,dp=2,cp=2', 8, 8),
    World('dims in another order', 'dp=4,tp=2', 'dp=2,cp=2,tp=2', 8, 8),
    World('encoder with cp', 'tp=2,cp=2,dp=2', 'tp=1,cp=4,dp=2', 4, 16),
    World('an extra dim', 'tp=2,ep=2,dp=2', 'tp=2,cp=2,dp=2', 4, 8),
    World("pp on the LLM's side", 'tp=2,dp=4', 'tp=2,pp=2,dp=2', 8, 6),
    World('pp on both sides', 'tp=2,pp=2,dp=2', 'pp=2,cp=2,dp=2', 4, 8, False),
    World('two nodes', 'tp=2,dp=4', 'tp=4,dp=2', 8, 4, per_node=4),
    World('nodes of three', 'tp=2,dp=6', 'tp=6,dp=2', 12, 4, per_node=3),
    World('nodes that share what they lack', 'tp=4,dp=4', 'tp=2,cp=4,dp=2', 4, 8, False, per_node=4),
    World('a node of two besides three', 'tp=4,dp=2', 'tp=1,cp=4,dp=2', 4, 8, False, per_node=3),
    World('uneven, scattered nodes', 'tp=4,dp=2', 'tp=1,cp=4,dp=2', 4, 8, False, nodes=[0, 1, 1, 0, 1, 2, 1, 2]),
    World('grids with offsets', 'tp=2,dp=2@4', 'tp=1,dp=4@4', 4, 4),
    World('grids that only meet', 'tp=2,dp=3', 'tp=2,dp=2@3', 6, 4),
    World("rows inside the LLM's sequence", 'tp=2,dp=4', 'tp=2,cp=2,dp=2', 8, 6, positions=12),
    World('rows after text', 'tp=1,dp=8', 'cp=4,dp=2', 8, 7, offset=3, positions=16),
    World('sequence parallel', 'tp=2,dp=4', 'tp=2,cp=2,dp=2', 8, 8, sp=('src', 'dst')))}


def keys(found, names):
    equal(sorted(found), sorted(names.split()))


def elements(message):
    """The (sample, row) of a message, whose bytes are theirs."""
    found = []
    for box in message['boxes']:
        keys(box, 'b s')
        (b0, b1), (s0, s1) = box['b'], box['s']
        check(0 <= b0 < b1 and 0 <= s0 < s1, 'an empty box: %s', box)
        found += [(b, s) for b in range(b0, b1) for s in range(s0, s1)]
    check(found, 'an empty message')
    equal(message['bytes'], len(found) * BYTES)
    return found


def messages(doc, rank, forward, kind):
    """By peer; peers ascend, and are never the rank itself."""
    found = doc['ranks'][rank]['forward' if forward else 'backward'].get(kind, [])
    for message in found:
        keys(message, 'peer bytes boxes')
    peers = [message['peer'] for message in found]
    check(peers == sorted(set(peers) - {rank}), 'rank %d: %s: peers are %s', rank, kind, peers)
    return {message['peer']: message for message in found}


def check_rank(world, doc, rank, forward):
    """What it needs arrives once, from ranks that hold it. Returns bytes received, sent, and local."""
    needed, held = world.needed_and_held(forward)
    keys(doc['ranks'][rank]['forward' if forward else 'backward'],
         'recv send' + ' relay_recv relay_send sum_recv sum_send' * bool(world.node))
    arrived = collections.Counter()
    for kind in 'recv', 'relay_recv':
        for peer, message in messages(doc, rank, forward, kind).items():
            got = elements(message)
            arrived.update(got)
            from_it = set(got) <= held[peer] if kind == 'recv' else world.node[peer] == world.node[rank]
            check(from_it, 'rank %d gets from %d what that does not hold, or is on another node', rank, peer)
            mirror = messages(doc, peer, forward, kind.replace('recv', 'send'))[rank]
            equal((mirror['boxes'], mirror['bytes']), (message['boxes'], message['bytes']))
    equal(arrived, collections.Counter(needed[rank] - held[rank]))
    sent = 0
    for kind in 'send', 'relay_send':
        for peer, message in messages(doc, rank, forward, kind).items():
            check(rank in messages(doc, peer, forward, kind.replace('send', 'recv')), '%d expects nothing of %d', peer,
                  rank)
            sent += message['bytes']
    return sum(arrived.values()) * BYTES, sent, len(needed[rank] & held[rank]) * BYTES


def check_node(world, node, forward):
    """What ranks of a node need and none of them holds enters it, and nothing else. Returns these bytes."""
    needed, held = world.needed_and_held(forward)
    ranks = [r for r in range(world.size) if world.node[r] == node['node']]
    keys(node, 'node ranks forward backward')
    equal(node['ranks'], len(ranks))
    found = node['forward' if forward else 'backward']
    keys(found, 'in minimum one_level')
    least = BYTES * len(set().union(*(needed[r] for r in ranks)) - set().union(*(held[r] for r in ranks)))
    equal((found['in'], found['minimum']), (least, least))
    check(found['one_level'] >= least, 'fewer bytes enter on one level')
    return least


def check_world(world):
    doc = planned(world.line + '64')
    keys(doc, 'world direction scale output ranks forward backward' + ' nodes' * bool(world.node))
    equal((doc['world'], doc['output']), (world.size, 'sharded' if world.sharded else 'full'))
    equal([rank['rank'] for rank in doc['ranks']], list(range(world.size)))
    for r, rank in enumerate(doc['ranks']):
        keys(rank, 'rank src dst forward backward')
        equal((rank['src'], rank['dst']), (world.src.coords(r), world.dst.coords(r)))
    for forward in True, False:
        received, sent, local = zip(*(check_rank(world, doc, r, forward) for r in range(world.size)))
        totals = doc['forward' if forward else 'backward']
        wanted = {'recv_bytes_max': max(received), 'recv_bytes_total': sum(received), 'send_bytes_max': max(sent),
                  'local_bytes_max': max(local), 'collective_recv_bytes_max': totals['collective_recv_bytes_max']}
        if world.node:
            equal(len(doc['nodes']), max(world.node) + 1)
            entering = sum(check_node(world, node, forward) for node in doc['nodes'])
            check(totals['slow_bytes_one_level'] >= entering, 'fewer bytes enter nodes on one level')
            wanted |= {'slow_bytes_total': entering, 'slow_bytes_minimum': entering}
            wanted |= {key: totals[key] for key in ('slow_bytes_one_level', 'seconds', 'seconds_one_level')}
        equal(totals, wanted)


@case
def every_needed_element_arrives_exactly_once():
    for world in WORLDS.values():
        try:
            check_world(world)
        except AssertionError as error:
            raise AssertionError(world.what) from error


@case
def a_large_world_has_no_ranks_but_the_same_totals():
    for world in WORLDS.values():
        every, few = planned(world.line + '64'), planned(world.line + '2')
        every.pop('nodes', None)
        equal(few, dict(every, ranks=[]))


@case
def scale_and_collective_are_null_where_they_do_not_exist():
    for what, direction, scale, collective in (
            ('fan-in', 'fan_in', 2, True), ('fan-out', 'fan_out', 2, True), ('fan-out by 8', 'fan_out', 8, True),
            ('equal', 'equal', 1, True), ('dp that does not divide', 'fan_in', None, False),
            ('cp 3', 'fan_in', 3, True), ('cp after dp', 'fan_in', 2, False), ('encoder with cp', 'equal', 1, False),
            ('an extra dim', 'equal', 1, False), ("pp on the LLM's side", 'fan_in', 2, False),
            ('grids with offsets', 'fan_out', 2, True), ('grids that only meet', 'fan_in', None, False)):
        doc = planned(WORLDS[what].line + '64')
        equal((what, doc['direction'], doc['scale']), (what, direction, scale))
        for way in 'forward', 'backward':
            equal((what, type(doc[way]['collective_recv_bytes_max'])), (what, int if collective else type(None)))


main('colo-plan')
