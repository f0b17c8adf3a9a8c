# SPDX-License-Identifier: Apache-2.0
"""colo-info lists the version and every environment variable, wherever its value comes from."""
import os
from pathlib import Path

from tool import VERSION, case, check, equal, good, in_order, main, parsed, planned, refused, refuses, run


def variables(doc):
    return {variable['name']: variable for variable in doc['environment_variables']}


@case
def a_variable_shows_its_value_and_where_it_comes_from():
    os.environ.pop('COLO_CHECK', None)
    doc = planned('--json')
    equal((doc['version'], doc['header_version']), (VERSION, VERSION))
    equal(variables(doc)['COLO_TIMEOUT_MS']['default'], '600000')
    for value, source in (None, 'default'), ('2', 'environment'):
        found = variables(planned('--json', env={'COLO_CHECK': value} if value else {}))['COLO_CHECK']
        equal((found['value'], found['source'], found['default']), (value or '1', source, '1'))
    ran = run('--json', env={'COLO_CHECK': os.fsdecode(b'\xff')})  # no UTF-8: still one JSON document
    equal((ran.exit, variables(parsed(ran.out))['COLO_CHECK']['value']), (1, r'"\xff"'))
    check(ran.err, 'no word of it')


@case
def every_backend_is_listed():
    """Ranks as threads and over sockets need nothing; what needs a library may not be there."""
    found = planned('--json')['backends']
    equal(sorted(found), ['cuda', 'hwloc', 'nccl', 'sockets', 'threads', 'ucx'])
    equal((found['threads'], found['sockets']), (True, True))
    for name, built in found.items():
        check(isinstance(built, bool), '%s is %s', name, built)
        in_order(good(''), '\n  %-8s %-4s ' % (name, 'yes' if built else 'no'))


@case
def products_in_host_memory_say_by_what_and_why():
    text = good('')
    in_order(text, '\nproducts in host memory\n', '  loops: ')  # colo-info has loaded none
    if '-Dcblas=disabled' not in text:
        in_order(good('', env={'COLO_GEMM': 'loops'}), '\nproducts in host memory\n', '  loops: COLO_GEMM\n')


@case
def value_that_is_not_allowed_is_found_and_exit_1():
    for line, text in ('', 'not allowed'), ('--json', '"allowed": false'):
        ran = run(line, env={'COLO_CHECK': '3'})
        equal((ran.exit, ran.err), (1, "colo-info: COLO_CHECK is '3', expected a number from 0 to 2\n"))
        in_order(ran.out, text)


@case
def the_text_has_a_line_for_every_variable():
    names = variables(planned('--json'))
    check(len(names) >= 4, 'only %s', names)
    for name in names:
        in_order(good(''), name)


@case
def wrong_use_is_one_line_and_exit_2():
    for line in '--grid', '--json=1', '--json --json', 'x':
        refuses('', line)


# ---- --world ----

def world(folder, size):
    """Rank 0 of @size in @folder, without the other ranks"""
    return run('--world %s', folder, env={'RANK': '0', 'WORLD_SIZE': size, 'COLO_TIMEOUT_MS': '100'})


@case
def world_that_waits_says_for_which_rank():
    ran = world(os.getcwd(), '2')
    equal(ran.exit, 1)
    in_order(ran.err, 'rank 0 of 2 waits for the file of rank 1, 100 ms at most\n',
             'rank 1 has left no file after 100 ms\n')
    equal(ran.err.count('\n'), 2)
    equal(os.listdir(), ['colo-info-1-0'])


@case
def world_follows_no_link():
    """The folder may be another user's."""
    Path('other').touch()
    os.symlink(os.path.abspath('other'), 'colo-info-1-0.part')
    ran = world(os.getcwd(), '1')
    equal((ran.exit, Path('other').read_bytes()), (1, b''))
    in_order(ran.err, 'expected a new folder for each run')
    equal(ran.err.count('\n'), 1)


@case
def world_refuses_a_folder_whose_name_is_empty_or_too_long():
    for name in '', 481 * 'x':
        refused(world(name, '1'), '--world: the name of the folder has ')


@case
def world_stands_alone():
    for other in '--json', '--grid tp=2', '--bind':
        refuses(other.split()[0] + ': not with --world', '--world new ' + other)
    equal(os.listdir(), [])


main('colo-info')
