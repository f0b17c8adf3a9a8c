# SPDX-License-Identifier: Apache-2.0
"""The compiler refuses a tensor's address where a struct of arrays wants an array, in C11 and C++17.

usage: outputs.py COMPILER... -- COMPILER...     the C compiler and the C++ compiler of the build
The structs are those of the public headers that name the arrays of a loss. Each member takes an array of
its type; it takes neither a tensor's address nor, in a union of f32 and f64, the other type's array. Next to
tensors, a function of a loss takes void * for memory only.
"""
import re
import sys

from api import INCLUDE, complaints, headers

STRUCT = re.compile(r'^typedef struct colo_\w+ \{\n((?: .*\n|\n)*)\} (colo_\w+_(?:out|upstream|mean)_t);', re.M)
MEMBER = re.compile(r'^\s*(?:const )?(\w+) \*(\w+);', re.M)
# Memory, and a stream. colo_loss_reduce() is left out: it takes a dtype and a count with its array.
UNTYPED = {'workspace', 'saved_memory', 'gathered', 'stream'}
PLANTED = '\ntypedef struct colo_planted_out {\n    void *loss;\n    float *logp;\n} colo_planted_out_t;\n'


def structs(text):
    """(struct, [(type, member)]) of every struct of arrays."""
    for body, name in STRUCT.findall(re.sub(r'/\*.*?\*/', ' ', text, flags=re.S)):
        yield name, MEMBER.findall(body)


def untyped(text):
    """(function, argument) of every void * next to a tensor that is not memory."""
    text = re.sub(r'/\*.*?\*/', ' ', text, flags=re.S)
    for name, rest in re.findall(r'^COLO_API\b[^;]*?\b(colo_\w+)\s*\(([^;]*)\)\s*;', text, re.M):
        if 'colo_tensor_t *' in rest:
            yield from ((name, arg) for arg in re.findall(r'\bvoid \*(\w+)', rest) if arg not in UNTYPED)


def refused(compiler, standard, lines):
    """The members among [(member, statement)] whose statement does not compile."""
    text = '#include <colobridge.h>\n' + PLANTED + 'void f(void);\nvoid f(void)\n{\n'
    text += '    colo_tensor_t tensor;\n    (void)tensor;\n'
    first = text.count('\n') + 1
    text += ''.join('    { %s (void)x; }\n' % statement for _, statement in lines) + '}\n'
    of_c = [] if '++' in standard else ['-Werror=incompatible-pointer-types']
    said = complaints(compiler, standard, text, '-fsyntax-only', *of_c)
    at = {int(n) - first for n in re.findall(r'^<stdin>:(\d+):\d+: error', said, re.M)}
    if not at <= set(range(len(lines))) or bool(at) != bool(said):
        sys.exit('the program around the assignments does not compile:\n' + said)
    return [lines[i][0] for i in sorted(at)]


def faults(compiler, standard, name, members):
    """What the compiler accepts or refuses wrongly."""
    assign = '%s x; %s *array = 0; x.%s = array;'
    names = [member for _, member in members]
    for member in refused(compiler, standard, [(m, assign % (name, kind, m)) for kind, m in members]):
        yield '%s.%s refuses an array of its type' % (name, member)
    tensor = ['%s x; x.%%s = &tensor;' % name] + ([] if '++' in standard else ['%s x = {.%%s = &tensor};' % name])
    for statement in tensor:
        for member in set(names) - set(refused(compiler, standard, [(m, statement % m) for m in names])):
            yield '%s.%s takes the address of a tensor' % (name, member)
    other = [(m, assign % (name, {'float': 'double', 'double': 'float'}[kind], m))
             for kind, m in members if m.endswith('_f64') or m + '_f64' in names]
    for member in {m for m, _ in other} - set(refused(compiler, standard, other)):
        yield '%s.%s takes an array of the other type' % (name, member)


def main(args):
    split = args.index('--')
    wrong, count = [], 0
    found = [pair for header in headers() for pair in structs((INCLUDE / header).read_text())]
    wrong += ['%s() takes any address as %s' % pair for header in headers()
              for pair in untyped((INCLUDE / header).read_text())]
    if list(untyped('COLO_API int colo_a(const colo_tensor_t *t, void *d_t, void *workspace);')) != [('colo_a', 'd_t')]:
        wrong.append('this check does not see an argument that is void *')
    for compiler, standard in ((args[:split], 'c11'), (args[split + 1:], 'c++17')):
        for name, members in found:
            count += len(members)
            wrong += ['%s: %s' % (standard, fault) for fault in faults(compiler, standard, name, members)]
        planted = [fault for name, members in structs(PLANTED) for fault in faults(compiler, standard, name, members)]
        if set(planted) != {'colo_planted_out_t.loss takes the address of a tensor'}:
            wrong.append('%s: this check finds %s in the planted struct' % (standard, planted))
    print('\n'.join(wrong) or '%d members of %d structs' % (count // 2, len(found)))
    return 1 if wrong or not found else 0


sys.exit(main(sys.argv[1:]))
