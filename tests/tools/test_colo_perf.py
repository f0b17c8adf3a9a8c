# SPDX-License-Identifier: Apache-2.0
"""colo-perf without a GPU: what it refuses, in one error message, and the pictures of recorded runs: well-formed,
every series with the figure that the record holds, nothing drawn of what moved nothing. Figures are computed here
from the JSON."""
import json
import os
from pathlib import Path

from tool import VERSION, GOLDEN, case, check, counted, equal, good, main, page, picture, refuses

RECORD, PICTURE = 'in.json', 'plot.svg'
os.environ['CUDA_VISIBLE_DEVICES'] = ''  # also where there are some


@case
def wrong_use_is_exit_2_with_the_option():
    for line, text in (
            ('', 'a subcommand is missing, expected link, bridge, logprob or plot; see'),
            ('lnk', '"lnk" is no subcommand, expected link, bridge, logprob or plot; see'),
            ('link -b 8X', '-b: "8X" is no size'),
            ('link -b 3', '-b: "3" is no size'),
            ('link -b 2048G', '-b: "2048G" is no size'),
            ('link -b 2M -e 1M', '-b 2097152 is larger than -e 1048576'),
            ('link -f 1', '-f: "1" is outside'),
            ('link -n 0', '-n: "0" is outside'),
            ('logprob --vocab x', '--vocab: "x"'),
            ('logprob -g 2', '-g 2: logprob measures one GPU'),
            ('bridge --tokens 4', '--tokens: not with bridge'),
            ('link --src dp=2', '--src: not with link'),
            ('bridge', '--src is missing'),
            ('bridge --src dp=2', '--dst is missing'),
            ('bridge --src dp=0 --dst dp=2', '--src: '),
            ('bridge --dst dp=2 --layouts dp=2->tp=2', '--dst: not with --layouts'),
            ('bridge --layouts dp=2->tp=2 tp=2', '--layouts entry 2: "tp=2" is not SRC->DST'),
            ('bridge --layouts dp=2->xx', '--layouts entry 1: '),
            ('bridge --layouts -n 5', '--layouts: a value is missing'),
            ('bridge --axes hbs', '--axes: found "hbs", expected one of bsh, sbh, th, both'),
            ('bridge --dtype i8', '--dtype: found "i8", expected one of bf16, f16, f32'),
            ('bridge --seq 8 -b 1M', '--seq: -b and -e choose it'),
            ('plot --svg x', 'plot: which file?'),
            ('plot x', '--svg is missing'),
            ('plot x --json', '--json: not with plot')):
        refuses(text, line)
    check('usage: colo-perf' in good('--help'), 'no usage')
    equal(good('--version'), 'colo-perf %s\n' % VERSION)


@case
def a_pair_as_long_as_the_line_is_refused():
    for length in [*range(500, 520), 520, 1220, 1920]:
        refuses('is not SRC->DST', 'bridge --layouts ' + length * '0')
        # past what is looked at, or before an empty side
        refuses('--layouts entry 1', 'bridge --layouts ' + (length - 2) * '0' + '->')


@case
def a_picture_that_cannot_be_written_is_told_before_anything_is_measured():
    for line in 'link', 'logprob', 'bridge --src dp=2 --dst tp=2', 'plot none.json':
        refuses('--svg: "none/plot.svg": No such file or directory', line + ' --svg none/plot.svg', code=1)


@case
def no_gpu_is_exit_2_and_says_so():
    for line in 'link', 'logprob --json', 'bridge --layouts dp=2->tp=2 dp=2->cp=2 -n 3':
        refuses('no CUDA device', line)


@case
def what_is_no_record_is_refused_and_leaves_no_picture():
    line = 'plot in.json --svg ' + PICTURE
    refuses('plot: unable to open in.json: No such file or directory', line)
    for text, words, code in (
            ('{"tool": ', 'in.json": line 1', 2),
            ('{"tool": "colo-plan"}', 'is not what --json prints', 2),
            ('[]', 'is not what --json prints', 2),
            ('{"tool": "colo-perf", "bridge": []}', 'nothing to draw', 1),
            ('{"tool": "colo-perf", "bridge": [{"op": "tuned", "time_us": -1}]}', 'nothing to draw', 1),
            ('{"tool": "colo-perf", "link": 7}', 'nothing to draw', 1)):
        Path(RECORD).write_text(text)
        refuses(words, line, code=code)
        equal(os.listdir(), [RECORD])
    refuses('Is a directory', 'plot %s --svg %s', GOLDEN / 'perf-sizes.json', os.getcwd(), code=1)


# ---- pictures ----

def drawn(record):
    equal(good('plot %s --svg ' + PICTURE, record), '')
    text = picture(PICTURE)
    counted(text, ('nan', 0), ('inf', 0))
    return text


def best_of(rows, way, op, replayed):
    """The best of one series of the record, as the legend writes it; 0: not there"""
    return max([(row['arrive_bytes'] or row['local_bytes']) / row['time_us'] * 1e-3 for row in rows
                if (row['way'], row['op'], row['replayed'], row['view']) == (way, op, replayed, False)], default=0)


def panel(text, title):
    """From the panel's title to the next panel"""
    check(title in text, 'no panel "%s"', title)
    return text.partition(title)[2].partition('<g class="panel')[0]


@case
def every_series_has_its_best_figure():
    text, rows = drawn(GOLDEN / 'perf-sizes.json'), json.loads(page('perf-sizes.json'))['bridge']
    for way in 'forward', 'backward':
        figures = []
        for op in 'exact-nccl', 'collective', 'reference', 'tuned':
            for replayed in False, True:
                best = best_of(rows, way, op, replayed)
                check(best > 0, 'no %s in %s', op, way)
                figures.append(('>%s%s: %.*f</text>' % (op, ', graph' if replayed else '', best < 10, best), 1))
        counted(panel(text, 'tp=1,dp=2 → tp=1,cp=2,dp=1, bsh, %s</text>' % way), *figures,
                ('GB/s of what must arrive', 1), ('<circle', 4 * 2 * 3),  # 3 sizes
                ('>limit: ', 1), ('>16K</text>', 1), ('>1M</text>', 1), ('>10</text>', 1))  # a decade of the other axis
    counted(text, ('<g class="panel"', 2))


@case
def one_size_is_bars_without_what_moved_nothing():
    text, rows = drawn(GOLDEN / 'perf-one-size.json'), json.loads(page('perf-one-size.json'))['bridge']
    limit, exact = (best_of(rows, 'backward', op, False) for op in ('copy', 'exact-nccl'))
    counted(panel(text, 'bsh, backward</text>'), ('GB/s copied; none arrives', 1),
            ('>%.0f, %.0f %%</text>' % (exact, 100 * exact / limit), 1), ('>reference</text>', 0),  # a view
            ('>collective</text>', 1))
    counted(panel(text, 'bsh, forward</text>'), ('>reference</text>', 1), ('class="best"', 1))  # the limit


@case
def what_does_not_fit_is_said():
    for panels in 32, 33:
        rows = [{'src': 'dp=%d' % (i // 2), 'dst': 'tp=2', 'axes': 'bsh', 'way': 'forward', 'op': 'tuned',
                 'bytes': 1024 << i % 2, 'local_bytes': 1024, 'time_us': 1}
                for i in range(2 * panels)]  # two sizes each
        Path(RECORD).write_text(json.dumps({'tool': 'colo-perf', 'bridge': rows}))
        counted(drawn(RECORD), ('<g class="panel"', 32),
                ('>The first 32 panels; the rest is not drawn.</text>', panels > 32))


@case
def links_and_losses_are_drawn_and_names_are_escaped():
    link = [row for i in range(3) for row in (
        {'op': 'push', 'gpus': 4, 'bytes': 1024 << i, 'time_us': 1, 'busbw_gbs': 100 + i},
        {'op': '<x>', 'gpus': 1, 'bytes': 1024 << i, 'time_us': 1, 'membw_gbs': 4000})]
    loss = {'tokens': 64, 'vocab': 9, 'dtype': 'bf16', 'rows': [{'op': 'forward', 'gbs': 4321}]}
    record = {'tool': 'colo-perf', 'device': '<&>', 'gpus': 4, 'link': link, 'logprob': loss}
    Path(RECORD).write_text(json.dumps(record))
    counted(drawn(RECORD), ('>4 GPUs</text>', 1), ('>push, the limit: 102</text>', 1), ('>Memory of one GPU</text>', 1),
            ('&lt;x&gt;: 4000</text>', 1), ('>T 64, V 9, bf16</text>', 1), ('>4321</text>', 1))


main('colo-perf')
