# SPDX-License-Identifier: Apache-2.0
"""The pictures of colo-plan: well-formed, every message of the hand-worked examples in them with its bytes, one part
of a large world with how many there are, and a file that is whole or not there. Expectations are closed forms of the
bridge's rules (docs/concepts/plan.md)."""
import os
import resource
import signal
from pathlib import Path

from tool import case, check, counted, equal, good, main, picture, refuses

PATH = 'plan.svg'
SIZES = ' --batch 8 --seq 8 --hidden 4 --dtype f32'


def drawn(line, *pairs, alone=False):
    """The picture that colo-plan draws on top of what it prints; it has each of @pairs: what, and how often."""
    printed = good(line + ' --svg ' + PATH)
    check(alone or printed == good(line), 'a picture changes what is printed')
    equal(os.listdir(), [PATH])
    text = picture(PATH)
    counted(text, ('http', 1), ('<script', 0), *pairs)  # http: the name space
    return text


def message(source, to, size, times=1):
    return '<title>rank %d to rank %d: %d bytes</title>' % (source, to, size), times


@case
def two_ranks_are_two_rows():
    """2 samples x 2 rows x 1 float: each of the two ranks lacks the 8 bytes of the other."""
    drawn('--src dp=2 --dst tp=2 --batch 2 --seq 2 --hidden 1 --dtype f32',
          message(0, 1, 8), message(1, 0, 8), (' to rank ', 2),
          ('2 messages, 16 B in all; at most 8 B into a rank.', 1),
          ('No messages: every rank already has its part.', 1),  # backward
          ('class="rank"', 2 * 2 * 2), ('fill="#f6f8fa"', 2 * 2 * 2), ('stroke="#2464a8"', 1),  # an arrow from rank 0
          ('<title>dp=2 → tp=2</title>', 1))


@case
def eight_ranks_show_every_message_with_its_bytes():
    """TP2/DP4 -> TP2/DP2/CP2, V = 1 KiB: 0-2, 1-3, 4-6, 5-7 exchange V/8 each way, nothing else."""
    drawn('--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --output sharded' + SIZES,
          *(message(a, a ^ 2, 128, 2) for a in range(8)), (' to rank ', 16), (' keeps 128 bytes', 16), ('>128 B<', 32),
          ('>rank 7<', 4), ('>tp 1  dp 3<', 2), ('>tp 1  cp 1<', 2 * 2), ('class="part"', 2 * 3),  # four pairs
          ('8 messages, 1 KiB in all; at most 128 B into a rank.', 2), ('>Forward: activations<', 1),
          ('>Backward: gradients<', 1),
          # ring all-gather of 2: V/4 a rank; ring all-reduce over 2: V/2 a rank
          ('An all-gather would move 2 KiB.', 1), ('An all-reduce would move 4 KiB.', 1))


@case
def arrows_between_nodes_are_thick():
    """Nodes of four: TP4/DP2 -> TP1/CP2/DP4 stays inside {0..3} and {4..7}. Nodes of two: of three peers one is on the
    node."""
    on_nodes_of = '--src tp=4,dp=2 --dst tp=1,cp=2,dp=4 --output sharded --one-level' + SIZES + ' --ranks-per-node '
    drawn(on_nodes_of + '4', ('<g class="flow h', 24), ('<g class="flow far h', 0), ('>4 ranks per node.<', 1))
    drawn(on_nodes_of + '2', ('<g class="flow h', 8), ('<g class="flow far h', 16))
    drawn('--src tp=2,dp=4 --dst tp=4,dp=2 --batch 8 --seq 8 --hidden 4 --ranks-per-node 2',
          ('>2 ranks per node. What several ranks of a node lack enters it once; they pass it on.<', 1))


@case
def sixty_four_ranks_are_all_drawn():
    """TP8/DP8 -> TP8/CP2/DP4, V = 8 KiB: r and r ^ 8 exchange V/16. All ranks are drawn."""
    drawn('--src tp=8,dp=8 --dst tp=8,cp=2,dp=4 --batch 64 --seq 8 --hidden 4 --dtype f32 --output sharded',
          *(message(a, a ^ 8, 512, 2) for a in range(64)), (' to rank ', 128), ('class="rank"', 2 * 2 * 64),
          ('Shown: one of', 0))


@case
def of_128_ranks_one_part_is_shown_and_counted():
    """The same with 128 ranks: 64 pairs, one is drawn."""
    line = '--src tp=8,dp=16 --dst tp=8,cp=2,dp=8 --batch 64 --seq 8 --hidden 4 --dtype f32 --output sharded'
    drawn(line, ('Shown: one of 64 parts', 1), ('it has 2 ranks.', 1), ('64 were looked at; they are alike.', 1),
          message(0, 8, 256, 2), message(8, 0, 256, 2), (' to rank ', 4))
    # --rank chooses the part: 90 = 64 + 26 and its partner 82
    drawn(line + ' --rank 90', message(82, 90, 256, 2), ('the 2 ranks that rank 90 exchanges with', 1))


@case
def ranks_of_one_role_are_one_row():
    """DP128 -> TP128, 128 samples of 4 bytes: all exchange with all and play one role."""
    drawn('--src dp=128 --dst tp=128 --batch 128 --seq 1 --hidden 1 --dtype f32', ('and 127 like it', 2 * 2),
          ('>127 × 4 B<', 1), ('16,256 messages, 63.5 KiB in all; at most 508 B', 1), ('class="rank"', 2 * 2))


@case
def what_is_not_drawn_is_said():
    """DP127 -> DP128: a chain in which every rank lacks another amount; 64 of 128 roles fit. Rank r of 128 wants
    [127 r, 127 r + 127); [127 r, 128 r) is of rank r - 1."""
    drawn('--src dp=127 --dst dp=128 --batch 16256 --seq 1 --hidden 1 --dtype f32', ('64 of 128 ranks are drawn; ', 1),
          ('class="rank"', 2 * 2 * 64), *(message(r - 1, r, 4 * r) for r in range(1, 64)))


@case
def of_a_million_ranks_one_part_is_drawn():
    """TP8/DP131072 -> TP8/CP2/DP65536, V = 256 MiB: r and r ^ 8 exchange V/2^18. Of one rank: no sweep of all."""
    drawn('--src tp=8,dp=131072 --dst tp=8,cp=2,dp=65536 --batch 131072 --seq 64 --hidden 16 --output sharded '
          '--rank 1048575', message(1048567, 1048575, 1024, 2), message(1048575, 1048567, 1024, 2), alone=True)


@case
def of_a_world_too_large_to_walk_parts_are_drawn_by_lot():
    """A few more ranks than the 65,536 of which the tool walks all"""
    drawn('--src tp=8,dp=8448 --dst tp=8,cp=2,dp=4224 --batch 8448 --seq 64 --hidden 16 --output sharded',
          ('Shown: one of 33,792 parts', 1), ('256 of them, drawn by lot, were looked at; they', 1), (' to rank ', 4),
          (': 1024 bytes</title>', 4), alone=True)


@case
def a_comparison_is_drawn_as_bars():
    drawn('--src tp=2,dp=4 --compare tp=2,cp=2,dp=2:sharded tp=4,dp=2->tp=1,cp=2,dp=4:sharded --batch 16 --seq 8192 '
          '--hidden 4096 --ranks-per-node 2 --one-level --alpha 10,20 --beta 100,50',
          ('>1  tp=2,dp=4 → tp=2,cp=2,dp=2, sharded<', 6), ('>2  tp=4,dp=2 → tp=1,cp=2,dp=4, sharded<', 6),
          ('>5.41 ms least bridge time<', 1), ('>6.76 ms<', 1),  # see test_plan_compare.py
          ('>384 MiB<', 1), ('>2 GiB<', 2),  # between nodes
          ('10 us and 100', 1))


@case
def pictures_say_where_the_rows_sit():
    sizes = ' --batch 4 --seq 8 --hidden 4 --dtype f32'
    drawn('--src dp=4 --dst cp=2,dp=2 --output sharded --llm-seq 64 --offset 4' + sizes,
          ('row 0 of a sample is position 4 of the LLM&#39;s 64.', 1))
    drawn('--src dp=4 --compare cp=2,dp=2 --llm-seq 64' + sizes,
          ('row 0 of a sample is position 0 of the LLM&#39;s 64.', 1))
    drawn('--src dp=4 --dst cp=2,dp=2' + sizes, ('row 0 of', 0))


@case
def pictures_of_worlds_of_different_size_warn():
    drawn('--src dp=4 --dst dp=8' + SIZES, ('warning: --src has 4 ranks, --dst 8', 1))
    drawn('--src dp=4 --compare tp=4 tp=8' + SIZES, ('warning: grids of 4 to 8 ranks are compared', 1),
          ('least bridge time', 0))


@case
def sixty_four_ranks_of_one_role_are_one_row():
    """64 ranks that all exchange with all are more arrows than an eye follows: one row a role."""
    drawn('--src dp=64 --dst tp=64 --batch 64 --seq 1 --hidden 1 --dtype f32', ('and 63 like it', 2 * 2),
          ('A row is a rank that stands for all that do the same', 1))


@case
def a_path_that_cannot_be_written_is_one_line():
    for path in 'none/plan.svg', os.getcwd(), '/dev/full', '':
        for option in '--dst', '--compare':
            refuses('colo-plan: --svg: "', '--src dp=2 %s tp=2 --batch 2 --seq 2 --hidden 1 --svg %s', option, path)
            equal(os.listdir(), [])


@case
def a_path_that_cannot_be_written_is_told_before_the_work():
    """Of a plan that the library refuses once it is made, the path is what is said."""
    Path('file').write_text('')
    for path in 'none/plan.svg', os.getcwd(), 'file/plan.svg', '':
        for line in '--src dp=8 --dst cp=4,dp=2', '--src dp=8 --compare cp=4,dp=2':
            refuses('colo-plan: --svg: "', line + ' --batch 8 --seq 12 --hidden 4 --grad disjoint --svg %s', path)
            equal(os.listdir(), ['file'])


@case
def a_pipe_is_opened_for_the_picture_alone():
    """This one has no reader, for whom opening it would wait."""
    os.mkfifo(PATH)
    refuses('12', '--src dp=8 --dst cp=4,dp=2 --batch 8 --seq 12 --hidden 4 --grad disjoint --svg ' + PATH, code=1,
            timeout=10)


def small_disk():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))


@case
def half_a_picture_is_no_picture():
    Path(PATH).write_text('old')
    refuses('File too large', '--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --output sharded' + SIZES + ' --svg ' + PATH,
            preexec_fn=small_disk)
    equal((Path(PATH).read_text(), os.listdir()), ('old', [PATH]))


@case
def layouts_without_a_plan_keep_the_old_picture():
    Path(PATH).write_text('old')
    refuses('12', '--src dp=8 --dst cp=4,dp=2 --batch 8 --seq 12 --hidden 4 --grad disjoint --svg ' + PATH, code=1)
    equal((Path(PATH).read_text(), os.listdir()), ('old', [PATH]))


main('colo-plan')
