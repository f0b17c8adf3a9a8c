# SPDX-License-Identifier: Apache-2.0
"""colo-perf on GPUs: what it measures is right. Figures are not judged here; that they are there, and that their
results were checked, is. What needs no GPU is in tests/tools/."""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tools'))
from tool import Skipped, case, check, main, parsed, run  # noqa: E402

found = re.search(r'there are (\d+) GPUs', run('link -g 1024').err)
GPUS = int(found[1]) if found else 0
if GPUS == 0:
    print('skipped: needs 1 GPU: ' + run('link -g 1').err)
    sys.exit(77)


def measured(line):
    ran = run(line + ' --json')
    check(ran.exit == 0, 'exit %d: %s', ran.exit, ran.err)
    return parsed(ran.out)


def checked(rows, bandwidth, least, most=None):
    check(least <= len(rows) <= (most or len(rows)), '%d rows', len(rows))
    for row in rows:
        check(row['time_us'] > 0 and row[bandwidth] > 0 and (row['wrong'], type(row['wrong'])) == (0, int), '%s', row)


@case
def link_measures_four_ways_at_each_size():
    checked(measured('link -g 1 -b 64K -e 1M -f 4 -n 3')['link'], 'algbw_gbs', 12, 12)


@case
def logprob_is_checked_against_fp64():
    checked(measured('logprob --tokens 100 --vocab 5003 -n 3 --entropy')['logprob']['rows'], 'gbs', 5, 5)


@case
def links_are_measured_in_every_group():
    if GPUS < 2:
        raise Skipped
    groups = 3 if GPUS > 4 else 2 if GPUS > 2 else 1  # 2, 4, all; pairs from 4 on
    checked(measured('link -b 64K -e 1M -f 16 -n 2 -w 1')['link'], 'algbw_gbs', 2 * 4 + groups * 2 * 2)


@case
def every_way_of_a_bridge_is_right():
    """Every way, both outputs, both gradients, axes and dtypes: a wrong element is exit 1."""
    if GPUS < 2:
        raise Skipped
    pairs = ('tp=1,dp=4->tp=1,cp=2,dp=2 tp=4,dp=1->tp=1,cp=2,dp=2 tp=1,dp=4->tp=2,cp=2,dp=1' if GPUS >= 4 else
             'tp=1,dp=2->tp=1,cp=2,dp=1 tp=2,dp=1->tp=1,cp=2,dp=1 tp=2,dp=1->tp=1,dp=2')
    for more in ('--output sharded --dtype bf16', '--output full --grad partial', '--output full --grad disjoint',
                 '--output full --dtype f32', '--output sharded --dtype f16'):
        doc = measured('bridge --batch 8 --seq 24 --hidden 40 --axes both -n 2 -w 1 %s --layouts %s' % (more, pairs))
        # 3 pairs, 2 orders, 2 ways; launched and in a graph: exact, collective, reference, tuned
        checked(doc['bridge'], 'algbw_gbs', 3 * 2 * 2 * 4 * 2)


main('colo-perf')
