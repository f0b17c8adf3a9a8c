# SPDX-License-Identifier: Apache-2.0
"""Programs that were compiled with the headers of baseline.h run with this library: abidiff finds no other change than
new functions, and new members at the end of structs that begin with struct_size or that the library alone makes.

usage: abi.py COMPILER...             compare; 77 where abidiff (Debian: abigail-tools) is missing
       abi.py --planted COMPILER...   are changes that break programs found, and others let pass?
       abi.py --write                 make baseline.h from the headers: after a release, or a change of what is not
                                      released yet

baseline.h is the public headers in one file, without comments. What is compared are two libraries of stubs, which a
compiler makes of these and of the headers: that the library has what the headers declare is symbols.py's.
"""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from api import INCLUDE, complaints, foreign, headers, statements

BASELINE = Path(__file__).with_name('baseline.h')
STRUCT = re.compile(r'typedef struct (\w+) \{(.*?)\} \1;', re.S)
SIZED = re.compile(r'typedef struct (\w+) \{(\s*size_t struct_size;.*?)\} \1;', re.S)


def flat(include=INCLUDE):
    """All public headers but those that need another library, each behind those that it includes."""
    done = []

    def add(header):
        if header in done or foreign(header):
            return
        text = re.sub(r'/\*.*?\*/', '', (include / header).read_text(), flags=re.S)
        for other in re.findall(r'^#include <(colobridge/.*)>', text, re.M):
            add(other)
        done.append(header)
        texts.append(re.sub(r'^#include <colobridge/.*\n', '', text, flags=re.M))

    texts = []
    for header in headers():
        add(header)
    return re.sub(r'[ \t]+$', '', re.sub(r'\n\s*\n', '\n', '\n'.join(texts)), flags=re.M).lstrip()


def stubs(text, folder, name, compiler):
    """A library with debug information of all functions that @text declares."""
    header, library = folder / (name + '.h'), folder / (name + '.so')
    header.write_text(text)
    source = '#include "%s"\n' % header + ''.join(
        'COLO_API %s { __builtin_trap(); }\n' % statement for statement in statements('COLO_API', [header]))
    said = complaints(compiler, 'gnu2x', source, '-g', '-O0', '-shared', '-fPIC', '-nostdlib', '-o', str(library), '-w')
    if said:
        sys.exit(said)
    return library


def grows(text):
    """Names of sized structs that may get members at their end: no other struct contains one."""
    fixed = set(re.findall(r'\n    (\w+) \w[^;*]*;', text))
    return [name for name, _ in SIZED.findall(text) if name not in fixed]


def handed_out(text):
    """Names of structs that the library alone makes and returns one by one, which may get members at their end."""
    returned = re.findall(r'COLO_API const (\w+) \*\s*\w+\(([^()]*)\);', text)
    return {name for name, arguments in returned if '*count' not in arguments and re.search(r'\} %s;' % name, text) and
            len(re.findall(r'\b%s\b' % name, text)) == 2 + sum(name == other for other, _ in returned)}


def with_room(old, new):
    """@new, in which each struct that has new members in place of reserved ones is that of @old; and a C text that does
    not compile if its size is another."""
    room = re.compile(r'typedef struct (\w+) \{(.*?)(\s*int64_t reserved\[\d+\];\s*)\} \1;', re.S)
    before, checks = {found[1]: found for found in room.finditer(old)}, []

    def take_back(found):
        was = before.get(found[1])
        if was is None or found[2] == was[2] or not found[2].startswith(was[2]):
            return found[0]
        checks.append('struct roomy_%s {%s};\n_Static_assert(sizeof(struct roomy_%s) == sizeof(%s), "%s has another size");\n'
                      % (found[1], was[2] + was[3], found[1], found[1], found[1]))
        return was[0]

    return room.sub(take_back, new), ''.join(checks)


def shortened(old, new):
    """@new, in which each struct that may grow and begins as in @old is that of @old; and a C text that does not compile if
    a member is new that lies in what was padding of the old one: old programs have left anything there."""
    growing = {*grows(old), *handed_out(old)}
    before, checks = {name: members for name, members in STRUCT.findall(old) if name in growing}, []

    def shorten(found):
        name, members = found.groups()
        if name not in before or not members.startswith(before[name]) or members == before[name]:
            return found[0]
        first = re.match(r'[^;,]*?(\w+)\s*(?:\[[^;,]*)?[;,]', members[len(before[name]):])[1]
        checks.append('struct old_%s {%s};\n_Static_assert(sizeof(struct old_%s) <= offsetof(%s, %s), "%s.%s lies in '
                      'padding");\n' % (name, before[name], name, name, first, name, first))
        return found[0].replace(members, before[name])

    return STRUCT.sub(shorten, new), ''.join(checks)


def changes(old, new, folder, compiler):
    """What breaks programs; "" if nothing does."""
    roomy, sizes = with_room(old, new)
    new_as_old, checks = shortened(old, roomy)
    (folder / 'all.h').write_text(new)
    said = complaints(compiler, 'c11', '#include "%s"\n%s' % (folder / 'all.h', checks + sizes), '-fsyntax-only', '-w')
    done = subprocess.run(['abidiff', '--no-added-syms', stubs(old, folder, 'old', compiler),
                           stubs(new_as_old, folder, 'new', compiler)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return said + (done.stdout if done.returncode else '')


def planted(folder, compiler):
    """Each change to the headers, and whether it breaks programs."""
    text = flat()
    config = re.search(r'typedef struct colo_plan_config_t \{.*?\}', text, re.S)[0]
    inner = re.search(r'typedef struct colo_logprob_config_t \{.*?\}', text, re.S)[0]
    made = re.search(r'typedef struct colo_topology_device_t \{.*?\}', text, re.S)[0]
    listed = re.search(r'typedef struct colo_plan_message_t \{.*?\}', text, re.S)[0]
    fixed = re.search(r'typedef struct colo_tensor_t \{.*?\}', text, re.S)[0]
    wrong = 0
    for name, breaks, before, after in (
            ('nothing', False, '', ''),
            ('a new function', False, 'COLO_API size_t colo_comm_dump(', 'COLO_API int colo_new(void);\n'
             'COLO_API size_t colo_comm_dump('),
            ('a function that is gone', True, 'COLO_API size_t colo_comm_dump(', 'size_t colo_comm_dump('),
            ('another argument', True, 'COLO_API size_t colo_comm_dump(', 'COLO_API size_t colo_comm_dump(int more, '),
            ('a member at the end of a sized struct', False, config, config[:-1] + '    int64_t more;\n}'),
            ('a member in the middle of one', True, config,
             config.replace('size_t struct_size;', 'size_t struct_size; int64_t more;')),
            ('one there and one at the end', True, config,
             config[:-1].replace('size_t struct_size;', 'size_t struct_size; int64_t more;') + '    int64_t most;\n}'),
            ('one at the end and another type before', True, config, config[:-1].replace('bool no_grad', 'int64_t no_grad')
             + '    int64_t more;\n}'),
            ('a member at the end of one inside of another', True, inner, inner[:-1] + '    int64_t more;\n}'),
            ('one in place of one that is reserved', False, inner,
             re.sub(r'int64_t reserved\[(\d+)\];', lambda m: 'int64_t more; int64_t reserved[%d];' % (int(m[1]) - 1), inner)),
            ('one in place of more than are reserved', True, inner,
             re.sub(r'int64_t reserved\[(\d+)\];', lambda m: 'int64_t more[2]; int64_t reserved[%d];' % (int(m[1]) - 1), inner)),
            ('one in padding at its end', True, config, config[:-1] + '    bool more;\n}'),
            ('one at the end of what the library makes', False, made, made[:-1] + '    int64_t more;\n}'),
            ('one in the middle of it', True, made, made.replace('{', '{\n    int64_t more;', 1)),
            ('one at the end of what it makes arrays of', True, listed, listed[:-1] + '    int64_t more;\n}'),
            ('a member at the end of a fixed struct', True, fixed, fixed[:-1] + '    int64_t more;\n}'),
            ('a new enumerator', False, 'COLO_ERR_UNBUILT = -10,', 'COLO_ERR_UNBUILT = -10, COLO_ERR_NEW = -99,'),
            ('another value of an enumerator', True, 'COLO_ERR_SHAPE = -2', 'COLO_ERR_SHAPE = -99')):
        if before and text.count(before) != 1:
            sys.exit('%s: the headers have %d times "%s"' % (name, text.count(before), before))
        found = changes(text, text.replace(before, after) if before else text, folder, compiler)
        print('%-40s %s' % (name, 'breaks programs' if found else 'lets programs be'))
        wrong += bool(found) != breaks
    return wrong


def main(args):
    if args == ['--write']:
        BASELINE.write_text('/* SPDX-License-Identifier: Apache-2.0 */\n/* Generated by abi.py --write. */\n' + flat())
        return 0
    if not shutil.which('abidiff'):
        print('no abidiff (Debian: abigail-tools)')
        return 77
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args[0] == '--planted':
            return 1 if planted(folder, args[1:]) else 0
        found = changes(BASELINE.read_text(), flat(), folder, args)
        if found:
            print(found + 'programs that were compiled with tests/api/baseline.h break; if there are none yet, run '
                  'tests/api/abi.py --write')
        return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
