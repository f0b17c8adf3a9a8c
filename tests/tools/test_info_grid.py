# SPDX-License-Identifier: Apache-2.0
"""colo-info about grids, bridges and ranks, against pages written by hand, and what it says to topologies, grids and
options that cannot be.

How golden/ was derived. Compact binding puts rank l of a host on core l.
  one package:   all ranks are on it.
  four nodes:    ranks 4 apart are on another NUMA node, 8 apart on another package. tp and cp are 1 and 2 apart, dp 4:
                 4 groups {j, j + 4, j + 8, j + 12}, all across both.
  two packages:  dp 1, tp 4 apart: {j, j + 4, j + 8, j + 12} has both sides of 8. With tp first it is {4 j .. 4 j + 3}.
                 Scattered, odd ranks are on the other package.
  hosts:         012 345 67. tp pairs 01 23 45 67: one is split. cp pairs 02 13 46 57: three. dp pairs 04 15 26 37: all.
                 The bridge (docs/concepts/plan.md): 0 and 1 get theirs from 2, 2 from 0 or 1, on their host; 3 to 7 have no
                 source there. 4 and 5 need the same, and so do 6 and 7: 3 of 8 eighths of 1024 cross hosts, and two are
                 passed on.
"""
import os
import re
from pathlib import Path

from tool import case, case_if, check, equal, good, in_order, main, page, parsed, planned, refused, refuses, run

XML = Path(__file__).resolve().parents[1] / 'grid/topologies/two-packages-four-gpus.xml'
HOSTS = ' --ranks-per-node 3 --src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 16 --seq 8 --hidden 4 --dtype bf16 ' \
    '--output sharded'
HWLOC = planned('--json')['backends']['hwloc']


@case_if(HWLOC)
def text_is_as_written():
    os.symlink(XML, XML.name)  # since pages name it
    for name, topology, line in (
            ('info-one-package.txt', 'package:1 core:8 pu:1', '--grid tp=2,cp=2,dp=2'),
            ('info-four-nodes.txt', 'package:2 numa:2 core:4 pu:1', '--grid tp=2,cp=2,dp=4'),
            ('info-two-packages.txt', 'package:2 core:8 pu:1', '--grid dp=4,tp=4'),
            ('info-gpus.txt', XML.name, '--bind' + HOSTS)):
        equal(good('--topology %s ' + line, topology), page(name))


@case_if(HWLOC)
def json_is_as_written():
    for name, topology, line in (
            ('info-two-packages.json', 'package:2 core:8 pu:1', '--grid dp=4,tp=4'),
            ('info-hosts.json', 'package:1 core:4 pu:1', '--grid tp=2,cp=2,dp=2 --bind' + HOSTS),
            ('info-package.json', 'package:2 numa:2 core:2 pu:1', '--bind --ranks-per-node 2 --policy package')):
        equal(planned('--topology %s --json ' + line, topology), parsed(page(name)))


@case_if(HWLOC)
def the_machine_is_in_the_plain_page():
    name = os.path.join(XML.parent, *3 * ['..', XML.parent.name], XML.name)
    doc = planned('--topology %s --json', name)
    equal((doc['topology']['source'], doc['topology']['processors'], doc['topology_error']), (name, 16, None))
    equal(doc['topology']['devices'][3],
          {'kind': 'gpu', 'name': 'cuda2', 'bus': '0000:9b:00.0', 'numa': 1, 'package': 1})
    in_order(good(''), 'hwloc %s)' % doc['libraries']['hwloc'])
    check(re.match(r'\d+\.\d', doc['libraries']['hwloc']), 'no version: %s', doc['libraries'])


# ---- refused ----

@case_if(HWLOC)
def what_cannot_be_is_one_line_and_exit_2():
    Path('broken.xml').write_text('<?xml version="1.0"?>\n<topology>')
    Path('huge.xml').touch()
    os.truncate('huge.xml', 17 << 20)
    for text, topology, line in (
            ('line 2: no hwloc topology', 'broken.xml', '--grid tp=2'),
            ('line 2: no hwloc topology', 'broken.xml', None),
            ("'huge.xml': 17825792 bytes, at most 16777216", 'huge.xml', '--grid tp=2'),
            ('No such file or directory', 'missing.xml', '--grid tp=2'),
            ('not a regular file', './', '--grid tp=2'),
            ('neither a file', 'socket:eight', '--grid tp=2'),
            ('neither a file', '', '--grid tp=2'),
            ('more than 512 in one place', 'core:999999 pu:9', '--grid tp=2'),
            ('16 ranks on a host, the machine has 8 processors', 'package:2 core:4 pu:1', '--grid tp=4,dp=4'),
            ('9 ranks on a host, the machine has 8 processors', 'package:2 core:4 pu:1',
             '--grid tp=4,dp=40 --ranks-per-node 9'),
            ('--grid: ', 'core:8 pu:1', '--grid tp=2,tp=2'),
            ('--grid: 33554432 ranks', 'core:8 pu:1', '--grid tp=33554432'),
            ("--policy: bind: found 'gpu', expected one of", None, '--grid tp=2 --policy gpu'),
            ('--policy: no ranks are named', None, '--policy core'),
            ('--bind: the number of ranks is missing', None, '--bind'),
            ('--bind: 8192 ranks; up to 4096', None, '--bind --grid dp=8192 --ranks-per-node 8'),
            ('--dst is missing; --src needs it', None, '--src tp=2'),
            ('--src is missing; --dtype needs it', None, '--grid tp=2 --dtype bf16'),
            ('--hidden is missing', None, '--src tp=2 --dst dp=2 --batch 2 --seq 2'),
            ('--dtype: ', None, '--src tp=2 --dst dp=2 --batch 2 --seq 2 --hidden 2 --dtype bf17'),
            ('--ranks-per-node: "x" is no whole number', None, '--grid tp=2 --ranks-per-node x')):
        refuses(text, ' '.join(filter(None, ['--topology %s' if topology is not None else None, line])), topology)
    # layouts that do not fit are found, not misused
    refuses('3', '--topology %s --src dp=2 --dst cp=2 --batch 2 --seq 3 --hidden 2 --grad disjoint', 'core:8 pu:1',
            code=1)


@case_if(HWLOC)
def a_stdout_that_is_full_is_a_problem():
    for more in '', ' --json':
        with open(os.devnull, 'rb') as closed:
            ran = run('--topology %s --grid tp=2' + more, 'core:8 pu:1', stdout=closed)
        equal(ran.exit, 1)
        more or refused(ran, 'standard output', 1)


@case_if(HWLOC)
def hwloc_that_is_not_on_this_machine_is_the_same_as_none_in_the_build():
    """The loader finds an empty file first, whatever number it asks for."""
    for number in range(15, 40):
        Path('libhwloc.so.%d' % number).touch()
    without_hwloc(env={'LD_LIBRARY_PATH': os.getcwd()})


@case_if(not HWLOC)
def hwloc_that_is_not_in_the_build_is_missed_by_grids_alone():
    without_hwloc()


def without_hwloc(**more):
    """A grid is a problem with a remedy, and the rest is there all the same."""
    refuses('placement: ', '--topology %s --grid tp=2', 'core:8 pu:1', code=1, **more)
    doc = planned('--json', **more)
    equal((doc['topology'], doc['libraries']['hwloc'], doc['backends']['hwloc']), (None, None, False))
    in_order(doc['topology_error'], 'placement: ', 'install hwloc 2.9 or later')


main('colo-info')
