# SPDX-License-Identifier: Apache-2.0
"""colo-plan --segments and --packing: the worked examples of docs/concepts/ragged.md as whole JSON documents,
whole tables (both in golden/) and pictures, written down by hand from these pages; and every file that is no such
table."""
import json
from pathlib import Path

from tool import case, check, equal, good, in_order, main, page, parsed, picture, planned, refuses

FILE, PICTURE = 'batch.json', 'batch.svg'
GRIDS = '--src dp=2 --dst cp=2,dp=1 --hidden 4 --dtype f32'
CP2 = '--src cp=2 --dst cp=2 --hidden 4 --dtype f32'


def batch(rows, src_dp, seq, pos, seq_len, seq_dp, **more):
    return dict(dict(rows=rows, src_dp=src_dp, seq=seq, seq_len=seq_len, seq_dp=seq_dp, **more),
                **{} if pos is None else {'pos': pos})


def packing(seq_len, src, dst, **more):
    """@more: tables of the destination"""
    return {'seq_len': seq_len, 'src': {'split': src}, 'dst': {'split': dst, **more}}


# P = 2, D = 1, C = 2, zigzag: docs/concepts/ragged.md. Rank 0 owns e0 row 0 and e2 row 0.
WORKED = batch([3, 0, 5], [0, 1, 1], [0, 0, 1], [2, 9, 1], [12, 8], [0, 0])


def on(tables, line):
    """The command line on these tables; only packings say how they are split."""
    Path(FILE).write_text(json.dumps(tables))
    return '%s %s %s' % (line, '--packing' if 'src' in tables else '--segments', FILE)


def planned_on(tables, line):
    return planned(on(tables, line) + ' --json')


def drawn(tables, line, *texts):
    """The picture, in which @texts come in this order."""
    good(on(tables, line) + ' --svg ' + PICTURE)
    svg = picture(PICTURE)
    in_order(svg, *texts)
    return svg


@case
def the_worked_example_is_planned_as_written_down():
    """16 bytes a row. To rank 0: e2 row 0 from rank 1. To rank 1: e0 rows 1 and 2 from rank 0."""
    equal(planned_on(WORKED, GRIDS + ' --output sharded'), parsed(page('plan-segments.json')))


@case
def positions_of_each_row_give_the_same_plan():
    tables = batch([3, 0, 5], [0, 1, 1], [0, 0, 1], None, [12, 8], [0, 0], row_pos=[2, 3, 4, 1, 2, 3, 4, 5])
    equal(planned_on(tables, GRIDS + ' --output sharded'), parsed(page('plan-segments.json')))


@case
def a_message_names_its_rows_by_segment():
    """A message with rows of two segments and a hole: replica 0 has e1, then e2; rank 1 owns, of its chunks 1 and 2
    (positions 2..5), e1's row 1 and e2's row 0."""
    doc = planned_on(batch([2, 2, 3], [1, 0, 0], [0, 1, 1], [0, 1, 5], [8, 8], [0, 0]),
                     GRIDS + ' --output sharded --rank 1')
    equal(doc['ranks'][0]['forward']['recv'], [{'peer': 0, 'bytes': 32, 'segments': [
        {'segment': 1, 'rows': [1, 2]}, {'segment': 2, 'rows': [0, 1]}]}])


@case
def no_segments_at_all_are_a_plan_without_messages():
    equal(planned_on(batch([], [], [], [], [], []), GRIDS)['forward']['messages_total'], 0)


@case
def the_worked_example_reads_as_written_down():
    line = on(WORKED, GRIDS + ' --output sharded')
    equal(good(line), page('plan-segments.txt'))
    in_order(good(line + ' --rank 0'), 'src: dp 0, 3 rows\ndst: cp 0 dp 0, 2 rows\n',
             'forward: the rank keeps 16 B of its own\n  receives 16 B from rank 1: segment 2 rows 0..0\n'
             '  sends 32 B to rank 1: segment 0 rows 1..2\n')


@case
def balance_lowers_the_load_of_the_busiest_replica():
    """Loads 9, 1, 2 of 12 rows: the mean is 4. Balanced 5, 4, 3."""
    doc = planned_on(batch([5, 4, 1, 2], [0, 0, 1, 2], [0, 0, 0, 0], [0, 5, 9, 10], [12], [2]),
                     '--src dp=3 --dst dp=3 --hidden 1')
    equal(doc['batch']['load'], {'src_dp': [0, 0, 1, 2], 'rows': [9, 1, 2], 'rows_max': 9, 'max_over_mean': 2.25})
    equal(doc['batch']['balanced'], {'src_dp': [0, 1, 2, 2], 'rows': [5, 4, 3], 'rows_max': 5, 'max_over_mean': 1.25})


# ---- pictures ----

@case
def a_picture_shows_the_way_of_one_segment():
    drawn(WORKED, GRIDS + ' --output sharded --segment 2',
          'replica 0: 3 rows; after colo_segments_balance() 5', 'replica 1: 5 rows; after colo_segments_balance() 3',
          'sequence 0: 12 positions, on LLM replica 0', 'sequence 1: 8 positions, on LLM replica 0',
          'Path of segment 2', 'encoder replica 1: its 5 rows', 'sequence 1: 8 positions',
          'rank 0: its axis of 10 positions', 'rank 1: its axis of 10 positions',
          'row 0: position 1, chunk 0, rank 0, index 7',
          'rows 1..2: position 2, chunk 1, rank 1, index 6', 'rows 3..4: position 4, chunk 2, rank 1, index 8',
          'Forward: activations', 'Backward: gradients')


@case
def a_picture_names_the_owner_of_each_chunk():
    """The chunks of one sequence over cp=4: 0, 1, 2, 3, 3, 2, 1, 0. Its 344 units are 16 positions; e0 begins at
    position 6."""
    svg = drawn(batch([4], [1], [0], [6], [16], [0]), '--src dp=4 --dst cp=4', 'LLM: packed sequences', 'class="owner"',
                *('>%d</text>' % owner for owner in (0, 1, 2, 3, 3, 2, 1, 0)))
    in_order(svg, 'LLM: packed sequences', '<rect class="seg h1" x="129.0"')


@case
def a_picture_of_a_full_output_ends_on_the_replicas_axis():
    drawn(WORKED, GRIDS + ' --segment 2', 'each rank of LLM replica 0: its axis of 20 positions',
          'row 0: from position 1, index 13')


@case
def a_picture_of_a_million_million_rows_is_drawn_at_once():
    """Counting them one by one would take hours."""
    drawn(batch([4 * 10**12], [1], [0], [0], [4 * 10**12], [0]), GRIDS + ' --output sharded --segment 0',
          'Its 4000000000000 rows in 4 parts', 'rows 0..999999999999: position 0, chunk 0, rank 0')


# ---- packings ----

# docs/concepts/ragged.md: rank 0 sends q0 6 7 and q1 3, and gets q0 2 3 and q1 1. 16 bytes a row.
PACKED = packing([8, 4], 'zigzag', 'block')


@case
def a_packed_batch_is_planned_as_written_down():
    equal(planned_on(PACKED, CP2), parsed(page('plan-packing.json')))


@case
def a_packed_batch_reads_as_written_down():
    every, one = good(on(PACKED, CP2)), good(on(PACKED, CP2) + ' --rank 0')
    in_order(every, 'cp=2 -> cp=2\n2 sequences of 12 positions, zigzag to block, 4 features, f32: 192 B\n'
             'gradients: each rank returns those of the rows and features that it has\n',
             '   0      0      0      6    6        48 B  1      48 B  1   ')
    check('colo_segments_balance' not in every, every)
    in_order(one, 'src: cp 0, 6 rows\ndst: cp 0, 6 rows\n',
             '  receives 48 B from rank 1: sequence 0 positions 2..3, sequence 1 positions 1..1\n')


@case
def a_contiguous_side_is_cut_once():
    """Of 12 rows rank 0 has positions 0..5 of sequence 0, which has 8; rank 1 has the others, and all of sequence 1."""
    tables = packing([8, 4], 'zigzag', 'contiguous')
    in_order(good(on(tables, CP2) + ' --rank 0'), 'src: cp 0, 6 rows\ndst: cp 0, 6 rows\n',
             '  receives 64 B from rank 1: sequence 0 positions 2..5\n')
    drawn(tables, CP2 + ' --sequence 0', '(zigzag), below', '(contiguous)', 'positions 4..5: rank 1, row 2 → rank 0, row 4',
          'positions 6..7: rank 0, row 2 → rank 1, row 0')


# Rank 0 has q0 0 1 and padding, q1 0; rank 1 q0 2..5, q1 1 2. Then all 10 rows are cut once: q0 0..4 and, behind two rows in
# front of each piece, q0 5 and q1 0 1 2 and padding.
HALO = {'seq_len': [6, 3], 'src': {'split': 'zigzag', 'seq_room': [8, 4]},
        'dst': {'split': 'contiguous', 'seq_room': [6, 4], 'halo_before': 2}}


@case
def a_side_may_have_padding_and_a_halo():
    in_order(good(on(HALO, CP2) + ' --rank 1'), 'zigzag to contiguous with 2 rows in front of each piece, 4 features',
             'src: cp 1, 6 rows\ndst: cp 1, 9 rows\n', 'keeps 80 B of its own\n',
             '  receives 16 B from rank 0: sequence 1 positions 0..0\n',
             '  sends 48 B to rank 0: sequence 0 positions 2..4\n',
             'backward: the rank keeps 80 B of its own\n',  # q0 3 4 have an addend in the halo, too
             '  receives 48 B from rank 0: sequence 0 positions 2..2, sequence 0 positions 3..4\n')
    equal(planned_on(HALO, CP2)['batch'], {'sequences': 2, 'positions': 9, 'src': 'zigzag', 'dst': 'contiguous', 'halo_before': 2})


@case
def a_picture_shows_padding_and_a_halo():
    """8 positions are 344 units; the halo is q0 3 4, and rank 1 has it in front of q0 5 on an axis of 9 rows."""
    svg = drawn(HALO, CP2 + ' --sequence 0', 'Padding is pale', '2 rows in front of each', 'class="seg h0 faded" x="258.0"',
                'class="seg h1" x="129.0"', 'height="5.0"', 'Path of sequence 0', 'destination rank 0: its 7 rows',
                'destination rank 1: its 9 rows', 'class="seg h1 faded" x="0.0"', 'class="seg h1" x="76.4"',
                'positions 0..1: rank 0, row 0 → rank 0, row 2', 'positions 2..3: rank 1, row 0 → rank 0, row 4',
                'positions 4..4: rank 1, row 2 → rank 0, row 6', 'positions 5..5: rank 1, row 3 → rank 1, row 2')
    check('positions 6' not in svg, svg)
    tp = '--src tp=2,cp=2 --dst tp=2,cp=2 --sp dst --hidden 4 --dtype f32 --sequence 0'
    drawn(packing([16], 'block', 'block', halo_before=1), tp,  # each rank of tp has a piece of 4 and a row in front
          'destination rank 0,1: its 10 rows', 'destination rank 2,3: its 10 rows',
          'positions 0..3: rank 0,1, row 0 → rank 0,1, row 1', 'positions 4..7: rank 0,1, row 4 → rank 0,1, row 6',
          'positions 8..11: rank 2,3, row 0 → rank 2,3, row 1')


@case
def a_side_may_have_all_rows_of_its_features_or_of_all():
    """Heads: rank 1 lacks features 2 and 3 of rank 0's rows. Whole: gradients come from both ranks."""
    doc = planned_on(packing([4], 'block', 'heads'), CP2 + ' --rank 1')
    equal(doc['ranks'][0]['forward']['recv'],
          [{'peer': 0, 'bytes': 16, 'sequences': [{'sequence': 0, 'positions': [0, 2], 'h': [2, 4]}]}])
    in_order(good(on(packing([4], 'heads', 'block'), CP2 + ' --rank 1')),
             'receives 16 B from rank 0: sequence 0 positions 2..3 features 0..1\n')
    in_order(good(on(packing([4], 'block', 'whole'), CP2 + ' --rank 1')),
             'gradients partial: each context rank returns all rows',
             'backward: the rank keeps 32 B of its own\n  receives 32 B')


@case
def a_picture_shows_both_cuts_and_the_path_of_one_sequence():
    """Sequence 1 begins behind the rows of sequence 0 on either side; its 344 units are 8 positions."""
    drawn(packing([4, 8], 'zigzag', 'table', piece_start=[0, 1, 4], piece_len=[4, 5, 0, 3], piece_owner=[0, 1, 0, 0]),
          CP2 + ' --sequence 1', 'Both cuts of the packed sequences', 'Above the source', '(zigzag), below', '(table)',
          'sequence 0: 4 positions', 'sequence 1: 8 positions',
          *('<rect class="seg h%d" x="%.1f"' % box for box in ((0, 0), (1, 86), (1, 172), (0, 258), (1, 0), (0, 215))),
          'Path of sequence 1', 'source rank 0: its 6 rows', 'source rank 1: its 6 rows',
          'destination rank 1: its 5 rows', 'destination rank 0: its 7 rows', 'sequence 1: 8 positions',
          'positions 0..1: rank 0, row 2 → rank 1, row 0',
          'positions 2..3: rank 1, row 2 → rank 1, row 2', 'positions 4..4: rank 1, row 4 → rank 1, row 4',
          'positions 5..5: rank 1, row 5 → rank 0, row 4', 'positions 6..7: rank 0, row 4 → rank 0, row 5',
          'Forward: activations')


@case
def a_picture_of_a_whole_side_and_other_replicas_names_their_ranks():
    svg = drawn(packing([4 * 10**12] + [0] * 13, 'block', 'whole', seq_dp=[1] + [0] * 13),
                '--src cp=2,dp=2 --dst cp=2,dp=2 --hidden 1 --dtype u8 --sequence 0',
                'sequence 0: 4000000000000 positions, replica 0 → 1', 'class="seg grey"', '>2,3</text>',
                'positions 0..1999999999999: rank 0, row 0 → rank 2,3, row 0')
    in_order(svg, '2 more sequences are not drawn.')


# ---- refusals ----

def segments(rows, rest='"pos":[0,4]'):
    return '{"rows":%s,"src_dp":[0,1],"seq":[0,0],%s,"seq_len":[8],"seq_dp":[0]}' % (rows, rest)


def segment(src_dp, seq_len):
    return json.dumps(batch([1], [src_dp], [0], [0], [seq_len], [0]))


def refuses_file(text, file, line, code=2):
    Path(FILE).write_text(file)
    refuses(text, line, code=code)


@case
def a_file_that_is_no_batch_is_refused_with_key_and_index():
    line = GRIDS + ' --segments ' + FILE
    for file, text in (
            ('', 'line 1, column 0: '),
            ('{"rows": [1,}', 'line 1, column 13: '),
            (segments('[1,2]') + 'x', 'line 1, column '),
            ('[1]', 'found a list, expected an object with rows, src_dp'),
            ('{}', 'key rows is missing'),
            ('{"rows": [1], "rows": [1]}', 'duplicate object key'),
            (segments('[1,2]', '"pos":[0,4],"colour":[1]'), 'unknown key "colour", expected rows,'),
            (segments('3'), 'rows: found an integer, expected a list of integers'),
            (segments('[1,2.5]'), 'rows[1]: found a number with a fraction'),
            (segments('["1",2]'), 'rows[0]: found a string, expected an integer'),
            (segments('[true,2]'), 'rows[0]: found a truth value'),
            (segments('[null,2]'), 'rows[0]: found null'),
            (segments('[1,9223372036854775808]'), 'too big integer'),
            (segments('[1,2,3]'), 'src_dp: found 2 entries, expected 3, as many as in rows'),
            (segments('[1,2]', '"pos":[1]'), 'pos: found 1 entries, expected 2'),
            (segments('[1,2]', '"pos":[0,4],"row_pos":[1,2,3]'), 'found both pos and row_pos'),
            (segments('[1,2]', '"row_pos":[1,2]'), 'row_pos: found 2 entries, expected 3, the sum of rows'),
            (segments('[-1,2]'), 'rows[0]: found -1, expected at least 0'),
            (segments('[1,2]', '"pos":[0,7]'), '--segments: segments: segment 1: row 1 of 2 is at position 8'),
            (segments('[5,2]'), 'segments 0 and 1 both have a row at position 4'),
            (segment(2, 8), 'segment 0: src_dp is 2, expected 0..1')):
        refuses_file(text, file, line)
    refuses_file('sequence 0 has 6 positions, expected a multiple of 2 * cp=2 = 4', segment(0, 6), line, code=1)


@case
def a_file_that_is_no_packing_is_refused_with_side_and_key():
    line, block = ' --packing ' + FILE, {'split': 'block'}
    for seq_len, src, dst, text in (
            ([8], 3, block, 'src: found an integer, expected an object with split, seq_dp'),
            ([8], block, {}, 'dst.split: found no string, expected "block", "zigzag"'),
            ([8], block, {'split': 'blocks'}, 'dst.split: found "blocks", expected'),
            ([8], dict(block, cp=[2]), block, 'src.unknown key "cp"'),
            (8, block, block, 'seq_len: found an integer, expected a list'),
            ([8], dict(block, seq_cp=[1.5]), block, 'src.seq_cp[0]: found a number with a fraction'),
            ([8], dict(block, seq_room=[8, 8]), block, 'src.seq_room: found 2 entries, expected 1, as many as in seq_len'),
            ([8], block, dict(block, halo_before=[1]), 'dst.halo_before: found a list, expected an integer'),
            ([8], dict(block, halo_before=1), block, '--packing: src packing: halo_before is 1, expected 0'),
            ([8], dict(block, seq_room=[6]), block, '--packing: src packing: sequence 0 has 8 positions and seq_room 6'),
            ([8], dict(block, seq_dp=[0, 0]), block, 'src.seq_dp: found 2 entries, expected 1, as many as in seq_len'),
            ([8], block, {'split': 'table', 'piece_start': [0]},
             'dst.piece_start: found 1 entries, expected 2, one more than in seq_len'),
            ([8], block, {'split': 'table', 'piece_start': [0, 2], 'piece_len': [8]},
             'dst.piece_len: found 1 entries, expected 2, the last of piece_start'),
            ([8], block, {'split': 'table', 'piece_start': [0, -1], 'piece_len': [8]},
             'dst.piece_len: found 1 entries, expected -1'),
            ([8], block, {'split': 'zigzag', 'seq_dp': [1]},
             '--packing: dst packing: sequence 0: seq_dp is 1, expected 0..0'),
            ([8], block, {'split': 'table'}, '--packing: dst packing: table piece_start is NULL')):
        refuses_file(text, json.dumps({'seq_len': seq_len, 'src': src, 'dst': dst}), CP2 + line)
    refuses_file('found a list, expected an object with seq_len, src, dst', '[1]', CP2 + line)
    refuses_file('key src is missing, expected seq_len, src, dst', '{"seq_len": [8]}', CP2 + line)
    refuses_file('--packing: src packing: sequence 0 has 7 positions, expected a multiple of cp=2',
                 json.dumps(packing([7], 'block', 'block')), CP2 + line, code=1)
    heads = json.dumps(packing([8], 'block', 'heads'))
    refuses_file('--packing: dst.split: heads:', heads, '--src dp=2 --dst dp=2' + line)
    refuses_file('--sp: ranks of tp share the rows of dst, whose split is heads', heads,
                 '--src tp=2,cp=2 --dst tp=2,cp=2 --sp dst' + line)


@case
def options_that_do_not_go_with_segments_are_refused():
    Path(FILE).write_text(json.dumps(WORKED))
    for line, text in (
            (GRIDS + ' --segments /no/such/file', '--segments: "/no/such/file": No such file'),
            (GRIDS + ' --segments /tmp', '--segments: "/tmp": Is a directory'),
            (GRIDS + ' --segments %s --batch 4', '--batch: not with --segments'),
            (GRIDS + ' --segments %s --seq 4', '--seq: not with --segments'),
            (GRIDS + ' --segments %s --axes th', '--axes: not with --segments'),
            (GRIDS + ' --segments %s --offset 4', '--offset: not with --segments'),
            (GRIDS + ' --segments %s --segment 1', '--segment: only with --segments and --svg'),
            (GRIDS + ' --svg batch.svg --segment 1', '--segment: only with --segments and --svg'),
            (GRIDS + ' --segments %s --svg %s --segment 3', '"3" is outside 0..2'),
            ('--compare dp=2->dp=1 --segments %s', '--segments: not with --compare'),
            ('--compare dp=2->dp=1 --packing %s', '--packing: not with --compare'),
            (GRIDS + ' --packing %s --segments %s', '--segments: not with --packing'),
            (GRIDS + ' --packing %s --output full', '--output: not with --packing'),
            (GRIDS + ' --packing %s --grad partial', '--grad: not with --packing'),
            (GRIDS + ' --packing %s --seq 4', '--seq: not with --packing'),
            (GRIDS + ' --packing %s --svg %s --segment 0', '--segment: only with --segments and --svg'),
            (GRIDS + ' --segments %s --svg %s --sequence 0', '--sequence: only with --packing and --svg')):
        refuses(text, line, FILE, PICTURE)


main('colo-plan')
