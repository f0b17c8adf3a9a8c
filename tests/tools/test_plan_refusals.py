# SPDX-License-Identifier: Apache-2.0
"""Every way to use colo-plan wrongly: one line on stderr that names the option, nothing on stdout."""
import os

from tool import case, equal, main, planned, refused, refuses, run

GRIDS = '--src tp=2,dp=4 --dst tp=2,cp=2,dp=2'
SIZES = '--batch 8 --seq 8 --hidden 4'
GOOD = GRIDS + ' ' + SIZES


@case
def a_wrong_option_is_named_in_one_line():
    for line, text in (
            ('--dst tp=2,dp=4', '--src is missing'),
            ('--src tp=2,dp=4', '--dst is missing'),
            (GOOD + ' --frobnicate', 'unknown option "--frobnicate"'),
            (GOOD + ' --jso', 'unknown option "--jso"'),
            (GOOD + ' -j', 'unknown option "-j"'),
            (GOOD + ' extra', 'argument 11: unknown option "extra"'),
            (GOOD + ' ', 'unknown option ""'),  # an empty one
            (GOOD + ' café', r'unknown option "caf\xc3\xa9"'),
            (GOOD + ' --dtype', '--dtype: a value is missing'),
            ('--src --dst tp=2', '--src: a value is missing'),
            (GOOD + ' --json=yes', '--json: takes no value, found "yes"'),
            (GOOD + ' --json --json', '--json: given twice'),
            (GRIDS + ' --src tp=8 ' + SIZES, '--src: given twice'),
            (GOOD + ' --batch=9', '--batch: given twice'),
            (GRIDS + ' --batch 0 --seq 8 --hidden 4', '--batch: "0" is outside 1..'),
            (GRIDS + ' --batch -4 --seq 8 --hidden 4', '--batch: "-4" is no whole number (byte 0)'),
            (GRIDS + ' --batch 8x --seq 8 --hidden 4', '"8x" is no whole number (byte 1)'),
            (GRIDS + ' --batch %s --seq 8 --hidden 4', '(byte 0)'),
            (GRIDS + ' --batch +8 --seq 8 --hidden 4', '(byte 0)'),
            (GRIDS + ' --batch 1e3 --seq 8 --hidden 4', '(byte 1)'),
            (GRIDS + ' --batch  --seq 8 --hidden 4', '--batch: "" is no whole number'),
            (GRIDS + ' --batch 8 --seq 9223372036854775808 --hidden 4', '--seq: "9223372036854775808" is outside'),
            (GRIDS + ' --batch 8 --seq 8 --hidden ' + '9' * 41, '--hidden: '),
            (GRIDS + ' --batch 4611686018427387904 --seq 8 --hidden 4', 'overflow'),
            (GOOD + ' --dtype fp7', '--dtype: "fp7"'),
            (GOOD + ' --dtype ' + os.fsdecode(b'\xff\xfe'), r'--dtype: "\xff\xfe"'),
            (GOOD + ' --axes hsb', '--axes: found "hsb", expected one of bsh, sbh, th'),
            (GOOD + ' --output half', '--output: found "half", expected one of full, sharded'),
            (GOOD + ' --grad all', '--grad: found "all", expected one of partial, disjoint'),
            (GOOD + ' --sp tp', '--sp: found "tp", expected one of none, src, dst, both'),
            ('--src dp=8 --dst dp=8 ' + SIZES + ' --sp src', '--sp: '),
            (GOOD + ' --src-stage 1', '--src-stage: stage 1 is outside 0..0, the pp of --src'),
            (GOOD + ' --dst-stage first', '--dst-stage: "first"'),
            ('--src pp=2,dp=4 --dst dp=8 ' + SIZES + ' --src-stage 2', 'stage 2 is outside 0..1, the pp of --src'),
            (GOOD + ' --offset -1', '--offset: "-1"'),
            (GOOD + ' --offset 9223372036854775807', '--offset: '),
            (GOOD + ' --llm-seq 7', '--llm-seq: 7 positions cannot hold --offset 0 and --seq 8'),
            (GOOD + ' --llm-seq 16 --offset 9', '--llm-seq: 16 positions'),
            (GOOD + ' --ranks-per-node x', '--ranks-per-node: "x"'),
            (GOOD + ' --nodes 0,0,1,x', '--nodes: "0,0,1,x" is not a list of at most 65536 numbers'),
            (GOOD + ' --nodes 0,', '(byte 2)'),
            (GOOD + ' --nodes 0,0,1', '--nodes: rank 7 has no node; give 8 numbers, one per rank'),
            (GOOD + ' --nodes 0,0,0,0,1,1,1,1,2', '--nodes: rank 8 does not exist; give 8 numbers, one per rank'),
            ('--src dp=2 --compare tp=2 dp=4->tp=4 --nodes 0,0,1', '--nodes: rank 3 has no node; give 4 numbers'),
            ('--src dp=2 --compare tp=2 dp=4->tp=4 --nodes 0,0,1,1,1', '--nodes: rank 4 does not exist; give 4'),
            (GOOD + ' --nodes 0,1 --ranks-per-node 1', '--nodes: not with --ranks-per-node'),
            (GOOD + ' --max-ranks -1', '--max-ranks: "-1"'),
            (GOOD + ' --rank 8', '--rank: "8" is outside 0..7')):
        refuses(text, line, ' 8')


@case
def a_bad_spec_is_refused_with_its_position():
    """Where reading stopped is in the error message, whatever else is."""
    for spec, byte in (('', 0), ('tp', 2), ('tp=', 3), ('tp=2,', 5), ('tp=2,,dp=4', 5), ('tp=2,dp=x', 8),
                       ('tp=2 ,dp=4', 4), (' tp=2', 0), ('tp=2,dp=4@', 10), ('tp=-2', 3), ('té=2', 1), ('tp=2\n', 4),
                       ('tp=2;dp=4', 4)):
        for option, line in ('--src: ', '--src %s --dst dp=8 '), ('--dst: ', '--src dp=8 --dst %s '):
            for text in 'byte %d' % byte, option:
                refuses(text, line + SIZES, spec)


@case
def a_spec_that_is_no_grid_is_refused():
    for spec in ('tp=0', 'tp=2,tp=2', 'tp=9223372036854775808', 'tp=4294967296,dp=4294967296',
                 'a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1,j=1,k=1,l=1,m=1,n=1,o=1,p=1,q=1', 'a_name_of_sixteen=2',
                 'tp=2,dp=4@9223372036854775807', 'dp=16777217', 'dp=8@16777216', '2tp=2', 'tp=2,dp4', 'tp1dp4',
                 'tp2-cp1dp4'):
        refuses('--src: ', '--src %s --dst dp=8 ' + SIZES, spec)


@case
def a_dim_without_a_role_is_refused_unless_declared():
    """A dim that splits nothing is a typing error, or its ranks hold different data."""
    for src, dst, extra, text in (
            ('tp1dp4', 'dp=4', None, "--src: grid spec, byte 0: grid: dim 0: the name 'tp1dp' has a letter after"),
            ('tp1_dp4', 'dp=4', None, "--src: layout: dim 'tp1_dp' of extent 4 has no role"),
            ('dp=4', 'gtp_remat=2,dp=2', None, "--dst: layout: dim 'gtp_remat' of extent 2 has no role"),
            ('dp=4', 'gtp_remat=2,dp=2', 'gtp_rema', "--dst: layout: dim 'gtp_remat' of extent 2 has no role"),
            ('dp=4', 'gtp_remat=2,dp=2', 'dp-gtp_remat', "--src: layout: extra dim 'dp'"),
            ('dp=4', 'tp=2,dp=2', 'gtp_remat', '--extra: "gtp_remat" names a dim that no grid has (byte 0)'),
            ('dp=4', 'gtp_remat=2,dp=2', 'gtp_remat-', 'names a dim that no grid has (byte 10)'),
            ('dp=4', 'tp=2,dp=2', '', '--extra: "" names a dim that no grid has')):
        refuses(text, '--src %s --dst %s ' + SIZES + ('' if extra is None else ' --extra %s'), src, dst, extra)
    equal(planned('--src tp=2,dp=4 --dst xp=2,cp=2,dp=2 ' + SIZES + ' --json --extra xp')['forward'],
          planned('--src tp=2,dp=4 --dst ep=2,cp=2,dp=2 ' + SIZES + ' --json')['forward'])


@case
def a_spec_of_100_kb_gives_one_short_line():
    for unit in b'x', b'tp=2,', b'\xff', b'\n', b'9', '€'.encode(), b'=', b'%n%s':
        spec = (unit * 102400)[:102400]
        for text, line in (('--src: ', '--src %s --dst dp=8 ' + SIZES),
                           ('--', GRIDS + ' --batch %s'),  # --seq is missing, too
                           ('--output: ', GOOD + ' --output %s'), ('--dtype: ', GOOD + ' --dtype %s'),
                           ('unknown option', '%s')):
            refuses(text, line, spec)


@case
def layouts_that_do_not_fit_are_a_problem():
    """Well-formed options, but no plan: a problem found, not wrong use."""
    refuses('12', '--src dp=8 --dst cp=4,dp=2 --batch 8 --seq 12 --hidden 4 --grad disjoint', code=1)
    refuses('6', '--src tp=4,dp=2 --dst dp=8 --batch 8 --seq 6 --hidden 4 --sp src', code=1)


@case
def an_output_that_cannot_be_written_is_a_problem():
    with open(os.devnull, 'rb') as closed:
        refused(run(GOOD, stdout=closed), 'standard output', 1)


main('colo-plan')
