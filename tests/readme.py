#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/README.md: the kinds of tests, each file with the first sentence of its comment, each feature with the files
that name it most.

usage: readme.py [--write]     without: exit 1 if a file, or what it tests, is not what the page says
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'tests/README.md'

HEAD = '''# Tests

Made by `tests/readme.py --write`. How to run them: [CONTRIBUTING](../CONTRIBUTING.md#build-and-test); the rules:
[CONTRIBUTING](../CONTRIBUTING.md#tests).

## Which one you add

| kind | where | you add one |
|---|---|---|
| unit | `tests/<folder of src>/`, `python/tests/` | always: a case states a behaviour, its expectation is made by other code than what it tests |
| oracle | `tests/ref/` | with a new noun: plain serial code, or a formula in fp64, that shares nothing with `src/` |
| stand-in | `tests/fake/` | with a call of CUDA or NCCL: it counts calls and objects, makes one fail or wait; suite `fake` |
| GPU | `tests/gpu/`, `python/tests/gpu/` | with a kernel, a stream, a graph: only a GPU tells what a kernel computes |
| fault drill | `tests/faults/` | with a way in which a rank can fail or hang: the page [faults](../docs/runtime/faults.md) is made of it |
| soak | `tests/soak/` | with what is made and ended many times: leaks and rare orders |
| fuzz | `tests/fuzz/` | with what reads bytes or numbers from outside |
| mutants | [`tests/mutation/`](mutation/README.md), `python/tests/mutants*.py` | with each check: a planted bug that a test must notice |
| what is shipped | `tests/api/` | with what a header, a page, an installation must keep |
'''

# How a test names a feature
FEATURES = {
    'aborts': r'\babort', 'balance': r'balance', 'bf16 and fp16': r'BF16|bfloat16|F16\b|float16', 'bridge of collectives': r'COLLECTIVE|collective',
    'checkpointing': r'checkpoint', 'class weights': r'class_weight', 'configs, sized': r'struct_size', 'CUDA graphs': r'[Cc]aptur|CUDAGraph',
    'deadlines': r'timeout|TIMEOUT', 'deepstack': r'deep', 'distillation': r'distill', 'DTensor': r'DTensor|distribute_tensor',
    'entropy': r'entropy', 'environment variables': r'setenv|environ', 'flight records': r'flight', 'fork': r'\bfork\(', 'FSDP2': r'fully_shard',
    'grad_scale': r'grad_scale', 'heads, sharded': r'shard_group|lm_head_rows|COLO_LM_HEAD_FLAT', 'ignored tokens': r'ignore_index|ignored',
    'invariant (segments)': r'invariant|\.segment\b', 'label smoothing': r'smoothing', 'logits dtype': r'logits_dtype', 'main_grad': r'main_grad|d_weight_add',
    'meshes': r'init_device_mesh|DeviceMesh', 'mismatches': r'MISMATCH|MismatchError', 'no memory': r'NOMEM', 'nodes, two levels': r'COLO_NODE|colo_nodes|ranks_per_node',
    'packed sequences': r'Packing|colo_packing', 'partial gradients': r'PARTIAL|partial', 'peer memory': r'colo_memory_|is_p2p', 'ragged batches': r'RaggedBridge|ragged',
    'ranks outside of the grids': r'neither grid|in no grid|need not call|outside_of', 'recorded support': r'support', 'relayout': r'relayout', 'sampling': r'top_p', 'softcap': r'softcap',
    'special values': r'NAN\b|INFINITY|\bnan\b|\binf\b', 'strides': r'stride', 'temperature': r'temperature', 'tickets': r'ticket|\.start\(', 'top-k': r'topk|top_k',
    'torch.compile': r'torch\.compile|fullgraph', 'towers': r'EncoderParallel', 'upstream known before forward': r'upstream=|loss_early|linear_logprob_loss',
    'versions of saved tensors': r'MODIFIED|_version', 'ZeRO-3': r'ds_tensor|deepspeed', 'z-loss': r'z_loss', 'zigzag': r'zigzag|ZIGZAG'}


def sentence(path):
    """The first sentence of a file's comment"""
    text = path.read_text()
    if path.suffix == '.py':
        said = re.search(r'"""(.*?)"""', text, re.S)
    else:
        said = re.search(r'/\*(?! SPDX)(.*?)\*/', text, re.S)
    said = re.sub(r'\s*\n \*', '\n', said[1]) if said else ''
    said = re.sub(r'\s+', ' ', said).strip().removeprefix(path.name + ' - ')
    first = re.match(r'(.*?[.:])(?= [A-Z*]|$)', said)
    return (first[1] if first else said).rstrip('.:').replace('|', '\\|')


def page():
    names = [str(path.relative_to(ROOT)) for folder in ('tests', 'python/tests') for path in sorted((ROOT / folder).rglob('*.[cp]*'))]
    files = [Path(name) for name in names if re.search(
        r'/(test_\w+|cases_\w+)\.(c|py)$|^tests/(fuzz|soak)/\w+\.c$|drill\.py$|^tests/api/(?!api\.)\w+\.(c|py)$', name)]
    lines, missing = [HEAD, '## Files', ''], []
    for folder in sorted({path.parent for path in files}):
        lines += ['', '**`%s/`**' % folder, '', '| file | what it tests |', '|---|---|']
        for path in sorted(path for path in files if path.parent == folder):
            said = sentence(ROOT / path)
            if not said:
                missing.append(str(path))
            lines.append('| [`%s`](%s) | %s |' % (path.name, Path('..') / path, said))
    if missing:
        sys.exit('no comment says what these test: ' + ', '.join(missing))
    lines += ['', '## Features', '', 'The files that name a feature most often.', '', '| feature | files |', '|---|---|']
    texts = {path: (ROOT / path).read_text() for path in files}
    for feature, words in FEATURES.items():
        count = {path: len(re.findall(words, text)) for path, text in texts.items()}
        most = sorted((path for path in files if count[path]), key=lambda path: (-count[path], str(path)))[:6]
        if not most:
            sys.exit('no test names "%s"; mend FEATURES' % feature)
        lines.append('| %s | %s |' % (feature, ', '.join('[%s](%s)' % (path.stem.removeprefix('test_'), Path('..') / path) for path in most)))
    return re.sub(r'\n{3,}', '\n\n', '\n'.join(lines)) + '\n'


if __name__ == '__main__':
    if sys.argv[1:] == ['--write']:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text().split('\n## Features')[0] != page().split('\n## Features')[0]:
        sys.exit('tests/README.md is not what the tests say; python3 tests/readme.py --write')
