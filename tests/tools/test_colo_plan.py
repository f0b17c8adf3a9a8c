# SPDX-License-Identifier: Apache-2.0
"""colo-plan from outside: the worked examples of the bridge's rules as whole JSON documents and whole tables, written
down by hand from the rules (docs/concepts/plan.md); the tables are golden/plan-*.txt."""
import resource

from plan_world import Grid
from tool import VERSION, Skipped, case, check, counted, equal, good, main, page, planned, run, run_on_terminal

GRIDS = '--src tp=2,dp=4 --dst tp=2,cp=2,dp=2'


def rows(b0, b1, *ranges):
    return [{'b': [b0, b1], 's': list(s)} for s in ranges]


# A: TP2/DP4 -> TP2/DP2/CP2, 8 samples, 8 rows, 16 bytes a row: V = 1024. cp 0 owns rows 0-1 and 6-7, cp 1 owns rows
# 2-5. Pairs 0-2, 1-3, 4-6, 5-7, V/8 each way.
def outer(lo, hi):
    return rows(lo, hi, (0, 2), (6, 8))


def inner(lo, hi):
    return rows(lo, hi, (2, 6))


def all8(lo, hi):
    return rows(lo, hi, (0, 8))


# {(from, to): boxes}
A_FORWARD = {(2, 0): outer(2, 4), (3, 1): outer(2, 4), (0, 2): inner(0, 2), (1, 3): inner(0, 2),
             (6, 4): outer(6, 8), (7, 5): outer(6, 8), (4, 6): inner(4, 6), (5, 7): inner(4, 6)}
A_FORWARD_FULL = {(2, 0): all8(2, 4), (3, 1): all8(2, 4), (0, 2): all8(0, 2), (1, 3): all8(0, 2),
                  (6, 4): all8(6, 8), (7, 5): all8(6, 8), (4, 6): all8(4, 6), (5, 7): all8(4, 6)}
A_BACKWARD = {(2, 0): inner(0, 2), (3, 1): inner(0, 2), (0, 2): outer(2, 4), (1, 3): outer(2, 4),
              (6, 4): inner(4, 6), (7, 5): inner(4, 6), (4, 6): outer(6, 8), (5, 7): outer(6, 8)}

# B: TP4/DP2 -> TP1/DP4/CP2, the same tensor. Forward nothing; backward every rank of 0-3 (and of 4-7) owns another
# quarter of what all four need.
B_OWNS = {0: outer(0, 2), 1: inner(0, 2), 2: outer(2, 4), 3: inner(2, 4),
          4: outer(4, 6), 5: inner(4, 6), 6: outer(6, 8), 7: inner(6, 8)}
B_BACKWARD = {(a, b): boxes for a, boxes in B_OWNS.items() for b in B_OWNS if a != b and a // 4 == b // 4}

# C: TP2/DP3 -> TP3/DP2, 6 samples. Source dp owns 2 samples each, destination dp 3 each. Sample 2 is held by ranks 2,
# 3 and lacked by 0, 1 (2 divides 2: by ordinal 0, 1); sample 3 is held by 2, 3 and lacked by 4, 5 (ordinals 1, 2 of the
# replicas 3, 4, 5). Samples 0-1 are held by 0, 1 and lacked by 2 alone, samples 4-5 by 4, 5 and lacked by 3 alone: one
# destination, two candidates, below 64 KiB: the candidate of the piece's ordinal, which is 0. Backward sample 3 is
# lacked by 2 and held by 3, 4, 5: the first piece of samples 3-5, so candidate 0 of 3. Sample 2 is lacked by 3 and held
# by 0, 1, 2: the second piece of samples 0-2, so candidate 1 of 3.
C_FORWARD = {(2, 0): all8(2, 3), (3, 1): all8(2, 3), (0, 2): all8(0, 2),
             (4, 3): all8(4, 6), (3, 4): all8(3, 4), (2, 5): all8(3, 4)}
C_BACKWARD = {(3, 2): all8(3, 4), (1, 3): all8(2, 3)}

# The same with 9 rows of 16 KiB: pieces of 144 KiB and more are cut evenly where ordinals tie.
C_FORWARD_LARGE = {(2, 0): rows(2, 3, (0, 9)), (3, 1): rows(2, 3, (0, 9)), (0, 2): rows(0, 1, (0, 9)),
                   (1, 2): rows(1, 2, (0, 9)), (4, 3): rows(4, 5, (0, 9)), (5, 3): rows(5, 6, (0, 9)),
                   (3, 4): rows(3, 4, (0, 9)), (2, 5): rows(3, 4, (0, 9))}
C_BACKWARD_LARGE = {(3, 2): rows(3, 4, (0, 3)), (4, 2): rows(3, 4, (3, 6)), (5, 2): rows(3, 4, (6, 9)),
                    (0, 3): rows(2, 3, (0, 3)), (1, 3): rows(2, 3, (3, 6)), (2, 3): rows(2, 3, (6, 9))}


def document(src, dst, direction, scale, output, row_bytes, moves, totals):
    """@moves and @totals: forward, backward. Bytes are the rows of the boxes x @row_bytes."""
    def messages(of, rank, end):
        found = {m[end]: boxes for m, boxes in of.items() if m[1 - end] == rank}
        size = {peer: sum((b['b'][1] - b['b'][0]) * (b['s'][1] - b['s'][0]) for b in found[peer]) for peer in found}
        return [{'peer': peer, 'bytes': row_bytes * size[peer], 'boxes': found[peer]} for peer in sorted(found)]

    ways = dict(zip(('forward', 'backward'), moves))
    names = 'recv_bytes_max', 'recv_bytes_total', 'send_bytes_max', 'local_bytes_max', 'collective_recv_bytes_max'
    ranks = [{'rank': r, 'src': src.coords(r), 'dst': dst.coords(r),
              **{way: {'recv': messages(of, r, 0), 'send': messages(of, r, 1)} for way, of in ways.items()}}
             for r in range(src.end)]
    return {'world': src.end, 'direction': direction, 'scale': scale, 'output': output, 'ranks': ranks,
            **{way: dict(zip(names, t)) for way, t in zip(ways, totals)}}


@case
def the_worked_examples_are_planned_as_written_down():
    small = ' --batch %d --seq 8 --hidden 4 --dtype f32 --json '
    for line, src, dst, *wanted in (
            (GRIDS + small % 8 + '--output sharded', 'tp=2,dp=4', 'tp=2,cp=2,dp=2', 'fan_in', 2, 'sharded', 16,
             (A_FORWARD, A_BACKWARD), ((128, 1024, 128, 128, 256), (128, 1024, 128, 128, 512))),
            (GRIDS + small % 8 + '--grad disjoint', 'tp=2,dp=4', 'tp=2,cp=2,dp=2', 'fan_in', 2, 'full', 16,
             (A_FORWARD_FULL, A_BACKWARD), ((256, 2048, 256, 256, 256), (128, 1024, 128, 128, 512))),
            ('--src tp=4,dp=2 --dst tp=1,cp=2,dp=4' + small % 8 + '--output=sharded', 'tp=4,dp=2', 'tp=1,cp=2,dp=4',
             'fan_out', 2, 'sharded', 16, ({}, B_BACKWARD), ((0, 0, 0, 128, 0), (384, 3072, 384, 128, 512))),
            ('--src tp=2,dp=3 --dst tp=3,dp=2' + small % 6 + '--output full', 'tp=2,dp=3', 'tp=3,dp=2', 'fan_in', None,
             'full', 16, (C_FORWARD, C_BACKWARD), ((256, 1024, 256, 256, None), (128, 256, 128, 256, None))),
            ('--src tp2-dp3 --dst tp3-dp2 --batch 6 --seq 9 --hidden 4096 --dtype f32 --json', 'tp=2,dp=3', 'tp=3,dp=2',
             'fan_in', None, 'full', 16384, (C_FORWARD_LARGE, C_BACKWARD_LARGE),
             ((294912, 1179648, 294912, 294912, None), (147456, 294912, 49152, 294912, None)))):
        equal(planned(line), document(Grid(src), Grid(dst), *wanted))


@case
def the_table_reads_as_written_down():
    """In the last, single columns are as wide as their titles; a rank outside a grid has no coordinate. Ranks 0 and 1
    hold what 2 lacks: candidate (2 mod 2); 1 and 2 hold what 0 lacks: candidate (0 mod 2)."""
    for line, name in (
            (GRIDS + ' --batch 16 --seq 8192 --hidden 4096 --dtype bf16 --axes sbh --output sharded',
             'plan-fan-in.txt'),
            ('--src tp=4,dp=2 --dst tp=1,cp=2,dp=4 --batch 8 --seq 8 --hidden 4 --dtype f32 --grad disjoint',
             'plan-fan-out.txt'),
            ('--src d=2 --dst e=2@1 --batch 1 --seq 1 --hidden 1 --extra e-d', 'plan-narrow.txt')):
        equal(good(line), page(name))


@case
def grids_of_different_size_are_warned_of():
    """In the first line, whatever else is printed"""
    for more in '', ' --rank 3':
        found = good('--src tp=2,dp=4 --dst tp=4,dp=4 --batch 8 --seq 8 --hidden 4' + more)
        check(found.startswith('warning: --src has 8 ranks, --dst 16: '), found)


@case
def one_rank_is_shown_with_its_boxes():
    equal(good(GRIDS + ' --batch 8 --seq 8 --hidden 4 --dtype f32 --output sharded --axes sbh --rank 0'),
          page('plan-one-rank.txt'))


@case
def one_rank_as_json_keeps_the_totals_of_all():
    every = planned(GRIDS + ' --batch 8 --seq 8 --hidden 4 --dtype f32 --json')
    one = planned(GRIDS + ' --batch 8 --seq 8 --hidden 4 --dtype f32 --json --rank 5')
    equal(one, dict(every, ranks=[every['ranks'][5]]))


@case
def partial_gradients_come_from_every_context_rank():
    """The adjoint of a full-length output: every source rank gets its rows from all C siblings."""
    for more in ' --grad=partial', '':  # the library's default is the tool's
        doc = planned('--src tp=1,dp=2 --dst tp=1,cp=2,dp=1 --batch 4 --seq 8 --hidden 1 --dtype f32 --json' + more)
        for r in range(2):  # V = 128: rank r lacks the sibling's addend of its 2 samples
            equal(doc['ranks'][r]['backward']['recv'], [{'peer': 1 - r, 'bytes': 64, 'boxes': all8(2 * r, 2 * r + 2)}])


@case
def sizes_that_are_not_given_are_assumed_and_named():
    words = 'colo-plan assumed --batch 16, --seq 8192, --hidden 4096, '
    check(good(GRIDS).split('\n')[2].startswith(words), 'the third line does not name them')
    check(words in good('--src tp=2,dp=4 --compare tp=2,cp=2,dp=2'), 'a comparison does not name them')
    check('\ncolo-plan assumed --batch 16, because ' in good(GRIDS + ' --seq 8 --hidden=4'), 'it names more than one')
    given = planned(GRIDS + ' --batch 16 --seq 8192 --hidden 4096 --dtype f32 --json')
    assumed = planned(GRIDS + ' --dtype=f32 --json')
    check(assumed.pop('assumed').startswith(words), 'the JSON does not name them')
    equal(assumed, given)


@case
def a_box_names_features_only_where_they_are_cut():
    """One row of one sample and three candidates: only the features are left to cut. 3 does not divide them, so
    candidates 0 and 1 send one more; the piece is the first of its held block."""
    doc = planned('--src tp=2,dp=3 --dst tp=3,dp=2 --batch 6 --seq 1 --hidden 32768 --dtype f32 --json')
    h = [0, 10923, 21846, 32768]
    equal(doc['ranks'][2]['backward']['recv'],
          [{'peer': 3 + i, 'bytes': 4 * (h[i + 1] - h[i]), 'boxes': [{'b': [3, 4], 's': [0, 1], 'h': h[i:i + 2]}]}
           for i in range(3)])
    equal(sorted(doc['ranks'][2]['forward']['recv'][0]['boxes'][0]), ['b', 's'])


@case
def help_shows_an_example_and_version_a_number():
    check('colo-plan --src tp=2,dp=4 --dst tp=2,cp=2,dp=2' in good('--help'), 'no example')
    equal(good('--version'), 'colo-plan %s\n' % VERSION)


SMALL = '--src dp=2 --dst tp=2 --batch 2 --seq 2 --hidden 1'


@case
def output_that_is_no_terminal_has_no_colour():
    check('What this means' in good(SMALL) and '\033' not in good(SMALL), good(SMALL))


@case
def output_on_a_terminal_has_colour_unless_no_color_is_set():
    colour, plain = run_on_terminal(SMALL), run_on_terminal(SMALL, env={'NO_COLOR': '1'})
    if not colour:
        raise Skipped  # no pseudo-terminals here
    check('\033' in colour.out, colour.out)
    check('What this means' in plain.out and '\033' not in plain.out, plain.out)


@case
def a_terminal_gets_no_line_that_is_wider():
    """Lines are broken at blanks, and of a table the columns that do not fit come below, behind the first one."""
    for line in GRIDS, GRIDS + ' --ranks-per-node 2', GRIDS + ' --rank 3', '--src dp=8 --compare tp=8 cp=2,dp=4:sharded':
        for columns in 40, 80, 0:
            narrow = run_on_terminal(line, columns, env={'NO_COLOR': '1'})
            if not narrow:
                raise Skipped
            said, wide = narrow.out.replace('\r', ''), good(line)
            check(not columns or max(map(len, said.split('\n'))) <= columns, '%d columns: %s', columns, said)
            equal(set(said.replace('#', '').split()), set(wide.replace('#', '').split()))
            check(columns or said == wide, said)
    counted(run_on_terminal(GRIDS, 80, env={'NO_COLOR': '1'}).out, ('\n   7  ', 2), ('\nrank  ', 2))
    counted(run_on_terminal(GRIDS, 40, env={'NO_COLOR': '1'}).out, ('\n   7  ', 3), ('receives  from      sends  to\r', 2))


@case
def without_options_it_shows_the_example():
    equal(good(''), 'colo-plan %s\n\n%s' % (GRIDS, good(GRIDS)))
    check('\n  colo-plan %s\n' % GRIDS in good('-h'), 'another example is in the help')


@case
def a_system_without_terminals_is_no_crash_of_the_test():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    ran = run_on_terminal(SMALL)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    equal(ran, None)


main('colo-plan')
