# SPDX-License-Identifier: Apache-2.0
"""colo-plan --compare from outside: numbers from the closed forms of the bridge's rules and from the stated model, the
text as written down (golden/plan-compare.txt), and every way to use it wrongly.

V is the whole tensor, k = larger dp over smaller dp, C = cp of the destination, Ds and Dd the dp sizes. Fan-in receives
forward (k-1)/(kC) V/Dd sharded, backward (C-1)/(kC) V/Dd; fan-out forward 0, backward (kC-1)/C V/Dd, in messages of
V/(Dd C) here.
"""
import re
import shlex
import subprocess
from pathlib import Path

from tool import TOOL, case, check, equal, good, main, page, planned, refuses

SIZES = '--batch 16 --seq 8192 --hidden 4096'  # of bf16: V = 2^30
V = 1 << 30
MODEL = ' --alpha 10,20 --beta 100,50'
ON, OFF = (10e-6, 100e9), (20e-6, 50e9)  # of that model: inside a node, between nodes


def time(link, size):
    return link[0] + size / link[1]


def agrees(found, wanted, path=''):
    """All that @wanted has, by key. Integers are exact; of the model's sums a few units in the last of 12 printed
    digits may differ."""
    for key, value in wanted.items():
        where = '%s.%s' % (path, key)
        if isinstance(value, dict):
            agrees(found[key], value, where)
        elif isinstance(value, float):
            check(isinstance(found[key], float) and abs(found[key] - value) <= 1e-10 * value, '%s is %r, expected %r',
                  where, found[key], value)
        else:
            check((type(found[key]), found[key]) == (type(value), value), '%s is %r, expected %r', where, found[key],
                  value)


@case
def first_command_of_the_guide_prints_what_it_says():
    text = (Path(__file__).resolve().parents[2] / 'docs/guides/choosing.md').read_text()
    command, printed = re.findall(r'^```\n(.*?)^```', text, re.M | re.S)[:2]
    program, *words = shlex.split(command.replace('\\\n', ''))
    said = subprocess.run([TOOL, *words], check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    check(program == 'build/tools/colo-plan', 'the command begins with %s', program)
    missing = [line for line in printed.splitlines() if line not in said]
    check(not missing, 'not printed: %s', '\n'.join(missing))


@case
def fan_in_and_fan_out_are_their_closed_forms():
    doc = planned('--compare tp=2,dp=4->tp=2,cp=2,dp=2:sharded tp=4,dp=2->tp=1,cp=2,dp=4:sharded ' + SIZES +
                  ' --ranks-per-node 2 --one-level --json' + MODEL)
    agrees(doc, {'ranks_per_node': 2, 'best': 0})
    equal(doc['model'], {'alpha_us': [10.0, 20.0], 'beta_gb_s': [100.0, 50.0], 'default': False})
    fan_in, fan_out = doc['entries']
    # pairs 0-2, 1-3, 4-6, 5-7: always two nodes of two ranks, one message a rank and way
    way = {'recv_bytes_max': V // 8, 'recv_bytes_total': V, 'send_bytes_max': V // 8, 'local_bytes_max': V // 8,
           'messages_max': 1, 'messages_total': 8, 'slow_bytes_total': V, 'seconds': time(OFF, V // 8)}
    agrees(fan_in, {
        'src': 'tp=2,dp=4', 'dst': 'tp=2,cp=2,dp=2', 'output': 'sharded', 'grad': 'disjoint', 'sp': 'none', 'world': 8,
        'sampled': None, 'direction': 'fan_in', 'scale': 2,
        'forward': dict(way, collective_recv_bytes_max=V // 4), 'backward': dict(way, collective_recv_bytes_max=V // 2),
        'memory': {'input_bytes_max': V // 4, 'output_bytes_max': V // 4, 'staging_bytes_max': 0, 'bytes_max': V // 2},
        'seconds': 2 * time(OFF, V // 8), 'best': True})
    # an exchange inside {0,1,2,3} and {4,5,6,7}: of three messages one stays on the node
    agrees(fan_out, {
        'forward': {'recv_bytes_max': 0, 'messages_total': 0, 'seconds': 0.0},
        'backward': {'recv_bytes_max': 3 * V // 8, 'recv_bytes_total': 3 * V, 'messages_max': 3, 'messages_total': 24,
                     'slow_bytes_total': 2 * V, 'seconds': time(ON, V // 8) + 2 * time(OFF, V // 8)},
        'memory': {'input_bytes_max': V // 2, 'output_bytes_max': V // 8, 'bytes_max': 5 * V // 8}, 'best': False})


@case
def partial_gradients_need_staging():
    """V = 128 bytes, CP2 of one sample block: full output V, input V/2, and one partial sum as large as the input for
    the sibling's addend. Forward each lacks V/2, backward the sibling's V/2."""
    doc = planned('--src tp=1,dp=2 --compare tp=1,cp=2,dp=1:full:partial tp=1,cp=2,dp=1:disjoint --batch 4 --seq 8 '
                  '--hidden 1 --dtype f32 --json')
    agrees(doc, {'model': {'default': True}, 'best': 1})
    agrees(doc['entries'][0], {
        'memory': {'input_bytes_max': 64, 'output_bytes_max': 128, 'staging_bytes_max': 64, 'bytes_max': 256},
        'backward': {'recv_bytes_max': 64, 'seconds': 8e-6 + 64 / 285e9},  # the defaults, inside one node
        'grad': 'partial'})
    agrees(doc['entries'][1], {
        'memory': {'staging_bytes_max': 0, 'bytes_max': 192}, 'output': 'full',
        'backward': {'recv_bytes_max': 32}})  # (C-1)/(kC) V/Dd


@case
def a_rank_that_sends_longer_than_it_receives_counts():
    """TP2/DP3 -> TP3/DP2, 6 samples of 128 bytes: no rank receives more than one message forward, but rank 2 sends a
    sample to 0 and one to 5, and rank 3 to 1 and 4. Its sends take longest."""
    doc = planned('--src tp=2,dp=3 --compare tp=3,dp=2 --batch 6 --seq 8 --hidden 4 --dtype f32 --alpha 10 --beta 1 '
                  '--json')
    agrees(doc['entries'][0], {'forward': {'recv_bytes_max': 256, 'messages_max': 2, 'messages_total': 6,
                                           'seconds': 2 * 10e-6 + 256 / 1e9}})


@case
def two_levels_are_their_closed_form():
    """Each node of 8 holds a quarter of the batch and lacks another: on one level each rank brings it from its rail;
    on two levels each brings an eighth of it and sends that to 7 others."""
    doc = planned('--compare tp=8,dp=4->tp=4,cp=4,dp=2:full:disjoint ' + SIZES + ' --ranks-per-node 8 --json' + MODEL)
    agrees(doc['entries'][0], {'forward': {
        'slow_bytes_total': V, 'slow_bytes_minimum': V, 'slow_bytes_one_level': 8 * V, 'messages_max': 8,
        'seconds': time(OFF, V // 32) + 7 * time(ON, V // 32), 'seconds_one_level': time(OFF, V // 4)}})


@case
def nodes_that_add_up_are_their_closed_form():
    """Each node of 4 needs a quarter of the batch, V/4, and has 4 of its 8 addends. Each rank adds up a quarter of
    that, V/16: of 3 others it collects their addends for itself and for the rank of its rail, to which it sends one
    sum in fp32. Then it passes its part on to 3 others."""
    doc = planned('--compare tp=4,dp=4->tp=1,cp=8,dp=2:full:partial ' + SIZES + ' --ranks-per-node 4 --json' + MODEL)
    agrees(doc['entries'][0], {'backward': {
        'slow_bytes_total': 2 * V, 'slow_bytes_minimum': 2 * V, 'slow_bytes_one_level': 16 * V,
        'recv_bytes_max': V * 3 // 8 + V // 8 + V * 3 // 16, 'messages_max': 7,
        'seconds': 3 * time(ON, V // 8) + time(OFF, V // 8) + 3 * time(ON, V // 16)}})


@case
def a_million_ranks_are_estimated_from_their_parts():
    """TP8/DP131072 -> TP8/CP2/DP65536, V = 2^28: k = 2, C = 2, Dd = 2^16, V/(4 Dd) = 2^10 a rank and way. The partner
    is 8 ranks away, on the next node of 8."""
    doc = planned('--src tp=8,dp=131072 --compare tp=8,cp=2,dp=65536:sharded --batch 131072 --seq 64 --hidden 16 '
                  '--ranks-per-node 8 --one-level --json')
    agrees(doc['entries'][0], {
        'world': 1 << 20, 'sampled': {'parts': 256, 'ranks': 512, 'alike': True},
        'forward': {'recv_bytes_max': 1024, 'recv_bytes_total': 1 << 30, 'messages_total': 1 << 20},
        'backward': {'slow_bytes_total': 1 << 30, 'slow_bytes_minimum': 1 << 27,  # 8 replicas of a node need it
                     'slow_bytes_one_level': 1 << 30},
        'memory': {'bytes_max': 4096}})


@case
def unlike_parts_are_estimated_and_said_to_be():
    """Half of the ranks of each pp world hold nothing; the estimate of what the others move comes from ranks drawn by
    lot: 256 of them, so within 4 standard deviations of a fair coin, 4 x 1/16."""
    doc = planned('--src dp=65536,pp=2 --compare dp=32768,cp=2,pp=2:sharded --batch 65536 --seq 64 --hidden 16 '
                  '--src-stage 0 --json')
    agrees(doc['entries'][0], {'sampled': {'alike': False}})
    # V = 2^27; each of 65536 ranks with output gets 2 of 4 quarters of a sample's rows, half of it from its own sample
    # where it has it; whatever is local, at most V moves in all
    total = doc['entries'][0]['forward']['recv_bytes_total']
    check(0.5 * 0.75 * (1 << 27) < total < 1.25 * (1 << 27), 'found %s', total)


@case
def the_table_and_bars_read_as_written_down():
    equal(good('--compare tp=2,dp=4->tp=2,cp=2,dp=2:sharded tp=4,dp=2->tp=1,cp=2,dp=4:sharded ' + SIZES +
               ' --ranks-per-node 2 --one-level' + MODEL), page('plan-compare.txt'))


@case
def a_comparison_says_where_the_rows_sit():
    """The first lines say what was asked: the shape, and where the rows sit in the LLM's sequence."""
    found = good('--src dp=4 --compare cp=2,dp=2:sharded --batch 4 --seq 8 --hidden 4 --llm-seq 64 --offset 4')
    check(found.startswith('4 samples x 8 rows x 4 features, bf16; one node\n'
                           "row 0 of a sample is position 4 of the LLM's 64\n"
                           '*  1  dp=4 -> cp=2,dp=2, sharded: 4 ranks\n'), found)


@case
def worlds_of_different_size_have_no_best():
    """8 ranks against 16, in one entry or between two: neither is better than the other."""
    sizes = '--batch 16 --seq 8 --hidden 4 --compare '
    for entries, least in (('tp=2,dp=4->tp=4,dp=4', 8), ('tp=2,dp=4->tp=4,dp=2 tp=4,dp=4->tp=8,dp=2', 8),
                           ('dp=4@8->tp=4@8 dp=8->tp=8 dp=16->tp=16', 4)):
        warning = 'warning: grids of %d to 16 ranks are compared' % least
        text, doc = good(sizes + entries), planned(sizes + entries + ' --json')
        check(text.startswith(warning) and '*' not in text and 'least bridge time' not in text, text)
        check(doc['warning'].startswith(warning), doc['warning'])
        equal([doc['best']] + [entry['best'] for entry in doc['entries']], [None] + [False] * len(doc['entries']))
    # as many ranks elsewhere are not another size
    text = good(sizes + 'dp=8@8->tp=8@8 dp=8->tp=8')
    check('warning' not in text and 'least bridge time' in text, text)


@case
def entries_stay_in_order_and_the_first_of_equals_is_best():
    doc = planned('--src tp=2,dp=4 --compare tp=4,dp=2 tp=2,cp=2,dp=2:sharded tp=2,cp=2,dp=2:sharded:sp=src '
                  'tp=2,cp=2,dp=2:sharded --output full ' + SIZES + ' --json')
    equal([(entry['dst'], entry['sp']) for entry in doc['entries']],
          [('tp=4,dp=2', 'none'), ('tp=2,cp=2,dp=2', 'none'), ('tp=2,cp=2,dp=2', 'src'), ('tp=2,cp=2,dp=2', 'none')])
    equal([i for i, entry in enumerate(doc['entries']) if entry['best']], [doc['best']])
    check(doc['best'] != 3, 'the last of equals is best')


@case
def wrong_use_is_named_in_one_line():
    for line, text in (
            (' --compare', '--compare: a value is missing'),
            (' --compare=tp=2', '--compare: its values are arguments of their own'),
            (' --compare tp=2', '--compare entry 1: "tp=2" names no source; give --src'),
            (' --compare tp=2->tp=2 dp=2-', '--compare entry 2: "dp=2-" ends in -; put SRC->DST in quotes'),
            (' --src tp=2 --compare tp=2 ', '--compare entry 2: '),
            (' --compare ->tp=2', '--compare entry 1: grid spec, byte 0'),
            (' --compare tp=2->', '--compare entry 1: grid spec, byte 0'),
            (' --compare tp=2->dp=2->dp=2', '--compare entry 1: '),
            (' --src tp=2 --compare tp=2:full:sharded', '--compare entry 1: output given twice, again as sharded'),
            (' --src tp=2 --compare tp=2:sp=src:sp=src', '--compare entry 1: sp given twice, again as sp=src'),
            (' --src tp=2 --compare tp=2:partial:full:disjoint',
             '--compare entry 1: gradient given twice, again as disjoint'),
            (' --compare :full', '--compare entry 1: ":full" names no source'),
            (' --src tp=2 --compare tp=2:half', '--compare entry 1: found "half", expected one of full, sharded'),
            (' --src tp=2 --compare tp=2:', '--compare entry 1: found "", expected one of'),
            (' --src tp=2 --compare tp=2:sp=tp', '--compare entry 1: found "sp=tp"'),
            (' --src tp=2 --compare ' + 4999 * 'x', '--compare entry 1: 4999 bytes, at most 2047'),
            (' --src tp=2 --dst tp=2 --compare tp=2', '--dst: not with --compare'),
            (' --src tp=2 --rank 0 --compare tp=2', '--rank: not with --compare'),
            (' --src tp=2 --dst tp=2 --alpha 3', '--alpha: only with --compare'),
            (' --src tp=2 --dst tp=2 --beta 3', '--beta: only with --compare'),
            (' --src tp=2 --compare tp=2 --alpha 1,2,3', '--alpha: "1,2,3" is not one or two numbers'),
            (' --src tp=2 --compare tp=2 --alpha -1', '(byte 0)'),
            (' --src tp=2 --compare tp=2 --alpha 1.', '(byte 0)'),
            (' --src tp=2 --compare tp=2 --alpha nan', '(byte 0)'),
            (' --src tp=2 --compare tp=2 --beta 1e3', '(byte 1)'),
            (' --src tp=2 --compare tp=2 --beta 0', '--beta: "0" is outside'),
            (' --src tp=2 --compare' + 17 * ' a', '--compare: 17 entries, at most 16')):
        refuses(text, SIZES + line)
    refuses('--compare entry 2: 8192 positions do not split', SIZES + ' --src dp=8 --compare dp=8 cp=3,dp=8:disjoint',
            code=1)


main('colo-plan')
