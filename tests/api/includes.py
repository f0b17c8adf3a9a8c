# SPDX-License-Identifier: Apache-2.0
"""Reads what src/, kernels/ and tools/ include, and what they define, and fails on

- an include that runs back up: core <- grid <- comm <- bridge, loss <- cuda, nccl, direct <- tools,
- a circle among files,
- in src/, what NOT_NAMED has: an address family of the network, a wait by the wall clock, a file that children inherit,
- a struct tag or a COLO_ macro that two files define with a different meaning,
- an include guard, there and in include/, tests/, examples/ and bench/, that is not the words of its path.

usage: includes.py ROOT
A struct tag of a .c or .cu file is that file's own; tags that begin with colo_ are the library's.
"""
import re
import sys
import tempfile
from pathlib import Path

LEVEL = {'core': 0, 'grid': 1, 'comm': 2, 'process': 2, 'threads': 2, 'kernels': 2, 'bridge': 3, 'loss': 3,
         'nccl': 3, 'direct': 3, 'cuda': 4, 'tools': 5}
# Known ones, each with the reason why it is still there. Nothing may be added.
ALLOWED = {
    ('kernels/kernels.h', 'src/loss/linear/rows.h'): 'arguments that host and kernel read alike',
    ('kernels/kernels.h', 'src/loss/args.h'): 'arguments that host and kernel read alike',
    ('kernels/distill.cuh', 'src/loss/distill-merge.h'): 'a formula that host and kernel have alike',
    ('kernels/distill-pairs.cu', 'src/loss/distill-merge.h'): 'a formula that host and kernel have alike',
    ('kernels/distill-stats.cu', 'src/loss/distill-merge.h'): 'a formula that host and kernel have alike',
    ('kernels/logprob-stats.cu', 'src/loss/logprob-merge.h'): 'a formula that host and kernel have alike',
    ('kernels/logprob.cuh', 'src/loss/logprob-merge.h'): 'a formula that host and kernel have alike',
    ('kernels/logprob.cuh', 'src/loss/stat.h'): 'a formula that host and kernel have alike',
    ('kernels/sampling.cu', 'src/loss/sampling-args.h'): 'arguments that host and kernel read alike',
    ('kernels/sequence.cu', 'src/loss/sequence-place.h'): 'a formula that host and kernel have alike',
    ('kernels/mean.cu', 'src/loss/mean.h'): 'arguments that host and kernel read alike',
    ('kernels/topk-loss.cu', 'src/loss/topk-tail.h'): 'arguments that host and kernel read alike',
    ('kernels/topk.cu', 'src/loss/topk-args.h'): 'arguments that host and kernel read alike',
}
# What no file of src/ may have, and why.
NOT_NAMED = {
    r'\b(?:AF|PF)_INET6?\b|<netinet/': 'UCX talks between hosts',
    r'\b(?:pthread_\w+_timed(?:rd|wr)?lock|sem_timedwait|mtx_timedlock)\b':
        'a wait by the wall clock ends late if that is set back',
    r'\bfopen\([^;]*"[^"e]*"\)': 'a program that another thread starts inherits the file; add e to the mode',
}
# Headers whose guard is another one, or none, and why.
UNGUARDED = {
    'tests/api/baseline.h': 'the public headers of another time, in one file',
    'tests/core/dlpack_abi.h': "a program has either this or DLPack's own header",
    'tools/lint.h': 'the compiler includes it, once',
}


def guard_mistakes(root):
    found = []
    for path in sorted(p for top in ('src', 'kernels', 'include', 'tests', 'tools', 'examples', 'bench')
                       for p in (root / top).rglob('*') if p.suffix in ('.h', '.cuh')):
        name = str(path.relative_to(root))
        guard = re.sub(r'\W', '_', re.sub('^(include|src)/', '', name)).upper()
        if name.startswith(('src/', 'kernels/')):
            guard = 'COLO_' + guard
        if name not in UNGUARDED and '#ifndef %s\n#define %s\n' % (guard, guard) not in path.read_text():
            found.append('%s has another include guard than %s' % (name, guard))
    return found


def folder(path):
    """The part that a file belongs to: src/comm/nccl/x.c is nccl's, src/loss/host/x.c loss's."""
    parts = path.split('/')
    if parts[0] != 'src':
        return parts[0]
    return parts[2] if len(parts) > 3 and parts[2] in LEVEL else parts[1]


def included(text):
    return re.findall(r'^#include "([^"]+)"', text, re.M)


def mistakes(root):
    files = {str(p.relative_to(root)): p.read_text() for top in ('src', 'kernels', 'tools')
             for p in (root / top).rglob('*') if p.suffix in ('.c', '.h', '.cu', '.cuh')}
    edges, found = {}, []
    for path, text in files.items():
        edges[path] = []
        for name in included(text):
            near = [str(Path(path).parent / name), 'src/' + name, 'kernels/' + name, 'tools/' + name,
                    'tools/perf/' + name]
            edges[path] += [p for p in near if p in files][:1]
    for path, to in edges.items():
        for other in to:
            if LEVEL[folder(other)] > LEVEL[folder(path)] and (path, other) not in ALLOWED:
                found.append('%s includes %s, which is above it' % (path, other))
    found += ['%s names %s: %s' % (path, name, why) for path, text in files.items() if path.startswith('src/')
              for pattern, why in NOT_NAMED.items() for name in re.findall(pattern, text)]
    state = {}

    def visit(path, trail):
        state[path] = 'open'
        for other in edges[path]:
            if state.get(other) == 'open':
                found.append('a circle: ' + ' -> '.join(trail[trail.index(other):] + [other]))
            elif other not in state:
                visit(other, trail + [other])
        state[path] = 'done'

    for path in edges:
        if path not in state:
            visit(path, [path])
    for what, pattern in (('struct', r'^(?:typedef )?struct (colo_\w+) \{(.*?)^\}'),
                          ('macro', r'^#define (COLO_\w+)\b((?:.*\\\n)*.*)')):
        meanings = {}
        for path, text in files.items():
            for name, body in re.findall(pattern, text, re.M | re.S if what == 'struct' else re.M):
                meanings.setdefault(name, {}).setdefault(' '.join(body.split()), path)
        found += ['%s %s has %d meanings: %s' % (what, name, len(bodies), ', '.join(bodies.values()))
                  for name, bodies in meanings.items() if len(set(bodies.values())) > 1] # in one file: arms of an #if
    return found


def finds_what_is_planted():
    """A tree with one mistake of each kind: a check that finds nothing there is none."""
    with tempfile.TemporaryDirectory() as folder_:
        root = Path(folder_)
        for path, text in {
                'src/core/a.h': '#include "bridge/b.h"\n',
                'src/bridge/b.h': '#include "bridge/c.h"\nstruct colo_x {\n    int a;\n};\n',
                'src/comm/e.c': 'socket(AF_INET, 0, 0);\npthread_mutex_timedlock(&m, &t);\nfopen(path, "r");\n',
                'src/bridge/c.h': '#include "bridge/b.h"\n#define COLO_Y 1\n',
                'tools/d.c': '#define COLO_Y 2\nstruct colo_x {\n    int b;\n};\n'}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        found = mistakes(root) + guard_mistakes(root)
    wanted = ['src/core/a.h includes src/bridge/b.h', 'a circle: src/bridge/', 'struct colo_x has 2',
              'macro COLO_Y has 2', 'src/core/a.h has another include guard than COLO_CORE_A_H',
              'src/comm/e.c names AF_INET', 'src/comm/e.c names pthread_mutex_timedlock', 'src/comm/e.c names fopen(']
    return [w for w in wanted if not any(f.startswith(w) for f in found)]


def main(root):
    missed = finds_what_is_planted()
    found = ['this check does not find: ' + m for m in missed] + mistakes(Path(root)) + guard_mistakes(Path(root))
    print('\n'.join(found) or 'includes run one way')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1]))
