# SPDX-License-Identifier: Apache-2.0
"""What a loss writes and the gradients that it is given are tensors: their dtype, length and memory can be checked. No
struct of outputs or of upstream gradients has a member that points to numbers, and next to a tensor a function takes
void * for memory only.
"""
import re
import sys

from api import INCLUDE, headers

STRUCT = re.compile(r'^typedef struct colo_\w+ \{\n((?: .*\n|\n)*)\} (colo_\w+_(?:out|upstream|mean|grads)_t);', re.M)
NUMBERS = r'(?:void|bool|float|double|u?int\d+_t) \*+(?:const )?(\w+)'
# Memory, and a stream. colo_loss_reduce() is left out: it takes a dtype and a count with its array.
UNTYPED = {'workspace', 'saved_memory', 'gathered', 'stream'}


def structs(text):
    """(struct, [member that points to numbers])"""
    return [(name, re.findall(NUMBERS, body)) for body, name in STRUCT.findall(re.sub(r'/\*.*?\*/', ' ', text, flags=re.S))]


def untyped(text):
    """(function, argument) of every void * next to a tensor that is not memory."""
    text = re.sub(r'/\*.*?\*/', ' ', text, flags=re.S)
    for name, rest in re.findall(r'^COLO_API\b[^;]*?\b(colo_\w+)\s*\(([^;]*)\)\s*;', text, re.M):
        if 'colo_tensor_t *' in rest:
            yield from ((name, arg) for arg in re.findall(r'\bvoid \*(\w+)', rest) if arg not in UNTYPED)


def main():
    wrong = []
    if structs('typedef struct colo_a {\n    size_t n;\n    union {\n        const float *x;\n    };\n'
               '    const colo_tensor_t *t;\n} colo_a_out_t;') != [('colo_a_out_t', ['x'])]:
        wrong.append('this check does not see a member that points to numbers')
    if list(untyped('COLO_API int colo_a(const colo_tensor_t *t, void *d_t, void *workspace);')) != [('colo_a', 'd_t')]:
        wrong.append('this check does not see an argument that is void *')
    texts = [(INCLUDE / header).read_text() for header in headers()]
    found = [pair for text in texts for pair in structs(text)]
    wrong += ['%s.%s points to numbers, expected a colo_tensor_t' % (name, member) for name, members in found
              for member in members]
    wrong += ['%s() takes any address as %s' % pair for text in texts for pair in untyped(text)]
    print('\n'.join(wrong) or '%d structs' % len(found))
    return 1 if wrong or len(found) < 8 else 0


sys.exit(main())
