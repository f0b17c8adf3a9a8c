# SPDX-License-Identifier: Apache-2.0
"""Every exported function may be given NULL and 0 for all that it takes, with or without memory for what it writes: a
function that returns a status names an argument that is NULL and writes nothing; others answer nothing (NULL, 0, -1,
false, "") but for those in ANSWERS, and write 0 or nothing; destructors do nothing.

usage: null.py LIBRARY
"""
import ctypes
import subprocess
import sys

from api import declarations

ANY = object()
ANSWERS = {
    'colo_comm_backend': b'none', 'colo_comm_dump': 4, 'colo_grid_extent': 1, 'colo_grid_equal': True,
    'colo_grid_hash': ANY, 'colo_layout_hash': ANY, 'colo_loss_weighted_workspace_size': 256, 'colo_last_error': ANY,
    # what 0 is, and what takes nothing
    'colo_op_name': b'all_gather', 'colo_category_name': b'user', 'colo_direction_name': b'equal',
    'colo_bind_name': b'none',
    'colo_status_string': b'ok', 'colo_status_name': b'COLO_OK', 'colo_dtype_name': b'f32', 'colo_dtype_size': 4,
    'colo_dtype_is_float': True, 'colo_env_count': ANY, 'colo_env_variable': ANY, 'colo_topology_version': ANY,
    'colo_version': ANY, 'colo_version_number': ANY, 'colo_tensor_host': ANY, 'colo_tensor_cuda': ANY,
    'colo_tensor_narrow': ANY,
}
# These return a status and want nothing more; these want a place for what they make; those refuse another argument.
FINE = 'colo_bootstrap_fail', 'colo_env_check'
MAKE = 'colo_comm_create_self', 'colo_tape_create', 'colo_sequence_pack', 'colo_gemm_describe'
OTHERS = {'colo_comm_threads_run': '0 ranks', 'colo_segments_balance': 'n is 0', 'colo_partition_padded': 'tp 0'}
NUMBERS = {'bool': ctypes.c_bool, 'int': ctypes.c_int, 'double': ctypes.c_double, 'float': ctypes.c_float,
           'size_t': ctypes.c_size_t, 'int32_t': ctypes.c_int32, 'int64_t': ctypes.c_int64, 'uint32_t': ctypes.c_uint32,
           'uint64_t': ctypes.c_uint64}
BYTES = 64
SIZE = 8  # of a text
BEFORE = b'\x07' * BYTES


class Structure(ctypes.Structure):
    _fields_ = [('word', ctypes.c_int64 * 64)]


STRUCTS = {'colo_tensor_t': Structure}


def kind(declared):
    """What ctypes makes of a type."""
    if '*' in declared or '(' in declared or declared.endswith(('_fn', '_stream_t')):
        return ctypes.c_char_p if declared == 'const char *' else ctypes.c_void_p
    return STRUCTS.get(declared) or NUMBERS.get(declared) or ctypes.c_int  # an enum


def given(declared, memory):
    """An argument: NULL or 0; with @memory, memory if the function writes numbers, a text or a pointer there."""
    what = kind(declared)
    if what in (ctypes.c_void_p, ctypes.c_char_p):
        base = declared.rstrip(' *')
        if not memory or declared.startswith('const') or '(' in declared:
            return None
        if declared.endswith('**'):
            return ctypes.create_string_buffer(BYTES)
        return ctypes.create_string_buffer(BEFORE, BYTES) if base in NUMBERS or base == 'char' else None
    return what() if declared in STRUCTS else what(SIZE if memory and declared == 'size_t' else 0)


def wrong_after(name, returned, value, written, error):
    """What is wrong with what a call returned and wrote; nothing: it is right."""
    for declared, buffer in written:
        before = bytes(BYTES) if declared.endswith('**') else BEFORE
        changed = buffer.raw != before
        if changed and (returned == 'colo_status_t' or buffer.raw.rstrip(b'\x07').strip(b'\0') not in (b'', b'null')):
            return 'it writes %r' % buffer.raw
    if returned == 'colo_status_t':
        if name in FINE:
            return None if value == 0 else 'status %d' % value
        text = OTHERS.get(name, 'is NULL') if 'is NULL' not in error else 'is NULL'
        good = value < 0 and text in error
        return None if good else 'status %d, error message "%s" lacks "%s"' % (value, error, text)
    want = ANSWERS.get(name, (None, 0, -1, b''))
    if isinstance(value, Structure):
        value = value.word[0]
    good = want is ANY or (value in want if isinstance(want, tuple) else value == want)
    return None if good else 'it answers %r' % (value,)


def call_all(library, memory):
    so = ctypes.CDLL(library)
    so.colo_last_error.restype = ctypes.c_char_p
    for returned, name, arguments in declarations():
        call = getattr(so, name, None)
        if call is None:
            continue  # of a module
        if memory and name in MAKE:
            continue
        call.restype = None if returned == 'void' else kind(returned)
        call.argtypes = [kind(a) for a in arguments]
        values = [given(a, memory) for a in arguments]
        written = [(a, v) for a, v in zip(arguments, values) if isinstance(v, ctypes.Array)]
        print(name, flush=True)
        value = call(*[ctypes.cast(v, ctypes.c_void_p) if isinstance(v, ctypes.Array) else v for v in values])
        wrong = wrong_after(name, returned, value, written, so.colo_last_error().decode())
        if wrong:
            print('wrong: %s(): %s' % (name, wrong), flush=True)


def finds_what_is_planted():
    memory = ctypes.create_string_buffer(BEFORE[1:], BYTES)
    return all((wrong_after('colo_a', 'colo_status_t', 0, [], 'a is NULL'), wrong_after('colo_a', 'int64_t', 7, [], ''),
                wrong_after('colo_a', 'colo_status_t', -1, [], 'a is 5'),
                wrong_after('colo_a', 'colo_status_t', -1, [('int *', memory)], 'a is NULL')))


def main(library):
    ended = not finds_what_is_planted()
    for memory in (False, True):
        done = subprocess.run([sys.executable, '-B', __file__, library, '1' if memory else ''], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = done.stdout.splitlines()
        wrong = [line for line in lines if line.startswith('wrong: ')]
        if done.returncode:
            wrong.append('%s() ends the program: exit status %d' % (lines[-1] if lines else '', done.returncode))
        print('\n'.join(wrong) or '%d functions take NULL %s memory for what they write'
              % (len(lines), 'with' if memory else 'without'))
        ended |= bool(wrong) or len(lines) < 200
    return ended


if len(sys.argv) > 2:
    call_all(sys.argv[1], bool(sys.argv[2]))
else:
    sys.exit(main(*sys.argv[1:]))
