#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Types as a user's checkers see them, pyright and mypy, both strict: the snippets of README.md and docs/, one module each,
with declarations of the names that they take as given; typed_calls.py, where each public function is called; and the
files in FILES.

usage: typed.py        in a Python with PyTorch >= 2.6, pyright or basedpyright, and mypy. Exit: 0 all is as expected, 1 it is
                       not, 77 a tool is missing
"""
import ast
import builtins
import importlib.util
import json
import os
import re
import subprocess
import symtable
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CALLS = HERE / 'typed_calls.py'
FILES = [CALLS, HERE / 'new_user.py']

# What torch leaves untyped, such as Tensor.backward(), is no fault of its users.
PYRIGHT = {'typeCheckingMode': 'strict', 'reportUnknownMemberType': False, 'reportMissingTypeStubs': False,
           'reportMissingImports': False, 'reportPrivateImportUsage': False, 'reportMissingModuleSource': False, 'reportUnusedImport': False, 'reportPrivateUsage': False}
UNTYPED = ('# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownVariableType=false, '
           'reportUnknownArgumentType=false, reportUnknownLambdaType=false\n')  # of snippets with a def, or a third party's objects
TENSOR, GROUP, TABLE, LAYER = 'torch.Tensor', 'torch.distributed.ProcessGroup', 'list[int]', 'Callable[[torch.Tensor], torch.Tensor]'
STUB = """from collections.abc import Callable
from typing import Any
import torch
import torch.distributed.device_mesh
import colobridge
import colobridge.megatron
import colobridge.torch as ct
"""
# Names that snippets take as given.
GIVEN = {
    **dict.fromkeys(('images', 'pixels', 'grid_thw', 'embeddings', 'hidden', 'states', 'targets', 'tokens', 'logits', 'target', 'weight',
                     'mask', 'advantage', 'advantages', 'lora_A', 'lora_B', 'ref_logp', 'logp', 'ratio', 'length', 'old_logp', 'logp_new', 'logp_old', 'teacher_hidden', 'teacher_head',
                     'teacher_ids', 'teacher_logits', 'teacher_logp', 'kept_ids', 'offsets', 'x', 'x0', 'x1', 'labels', 'ids', 'my_rows',
                     'my_part'), TENSOR),
    **dict.fromkeys(('tp', 'dp', 'dp_cp', 'cp', 'cp_group', 'data_parallel'), GROUP),
    **dict.fromkeys(('rows', 'src', 'seq', 'pos', 'seq_len', 'seq_dp', 'lengths', 'cu_seqlens', 'counts'), TABLE),
    **dict.fromkeys(('encoder', 'llm', 'words', 'embed', 'scan'), LAYER),
    **dict.fromkeys(('B', 'S', 'vocabulary', 'alpha', 'rank'), 'int'), **dict.fromkeys(('scale', 'tokens_of_all'), 'float'),
    **dict.fromkeys(('model', 'ddp', 'peft', 'trl', 'args', 'data', 'tokenizer'), 'Any'),
    'audio: encoder': 'torch.nn.Module', 'audio: lengths': 'list[list[int]]',
    'mesh': 'torch.distributed.device_mesh.DeviceMesh', 'head': 'torch.nn.Linear', 'lm_head': 'torch.nn.Linear',
    'tower': 'torch.nn.Module', 'layers': 'list[%s]' % LAYER, 'mtp_layers': 'list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]', 'tables': 'list[colobridge.Segments]', 'texts': 'list[torch.Tensor]',
    'carry': 'ct.Bridge', 'logprob': 'ct.logprob', 'factor': 'float', 'frames': TENSOR, 'mel': TENSOR, 'durations': 'list[list[int]]',
    'whisper': 'Any', 'part': 'torch.nn.Module', 'stage': 'int', 'device': 'torch.device', 'pp': GROUP,
    'loss_fn': 'Callable[..., torch.Tensor]', 'train': 'Callable[[Any], None]', 'image_batch': 'dict[str, torch.Tensor]',
    'text_batch': 'dict[str, torch.Tensor]', 'bridge': 'colobridge.megatron.ColocatedBridgeCommunicator'}
IMPORTS = {'torch': 'import torch', 'ct': 'import colobridge.torch as ct', 'colobridge': 'import colobridge', 'cb': 'import colobridge as cb',
           'logprob': 'from colobridge.torch import logprob', 'fuse_lm_head': 'from colobridge.compat import fuse_lm_head'}


def free(code):
    """Names that code takes as given: those that it does not bind, or reads before"""
    top = symtable.symtable(code, 'snippet', 'exec')
    read, tables = set(), [top]
    for table in tables:
        read |= {of.get_name() for of in table.get_symbols() if of.is_referenced() and (table is top or of.is_global())}
        tables += table.get_children()
    bound, early = set(), set()
    for statement in ast.parse(code).body:
        names = {ctx: {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ctx)} for ctx in (ast.Load, ast.Store)}
        own = {n.id for n in ast.walk(statement.target) if isinstance(n, ast.Name)} if isinstance(statement, ast.For) else set()
        early |= names[ast.Load] & read - bound - own if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else set()
        bound |= names[ast.Store]
    made = {of.get_name() for of in top.get_symbols() if of.is_assigned() or of.is_imported()}
    in_loops = {n.id for s in ast.parse(code).body for n in ast.walk(s) if isinstance(s, ast.For) and isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    imported = {of.get_name() for of in top.get_symbols() if of.is_imported()} | {of.get_name() for of in top.get_symbols() if of.is_namespace()}
    return sorted(n for n in read if not hasattr(builtins, n) and (
        n not in made or n in early - imported and (n in GIVEN or n not in in_loops)))


def snippets():
    """(name of a module, its code, a stub with the names that it takes as given, which it imports) of each"""
    for page in (ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))):
        blocks = re.findall(r'^( *)```python\n(.*?)^\1```', page.read_text(), re.S | re.M)
        for i, (indent, code) in enumerate(blocks):
            code = re.sub('^' + indent, '', code, flags=re.M).replace(', ...]', ']')
            names = free(code)
            of = {n: GIVEN.get('%s: %s' % (page.stem, n), GIVEN.get(n)) for n in names if n not in IMPORTS}
            unknown = [n for n in of if of[n] is None]
            if unknown:
                sys.exit('%s: say in GIVEN of %s what %s is' % (page, Path(__file__).name, ', '.join(unknown)))
            loose = 'def ' in code or 'Any' in of.values() or '.split(' in code  # which torch leaves untyped
            name = re.sub(r'\W', '_', '%s_%d' % (page.relative_to(ROOT).with_suffix(''), i + 1))
            lines = [UNTYPED + '# mypy: allow-untyped-defs\n' if loose else '', *(IMPORTS[n] + '\n' for n in names if n in IMPORTS),
                     'from %s_given import %s\n' % (name, ', '.join(of)) if of else '']
            yield name, ''.join(lines) + code, STUB + ''.join('%s: %s\n' % item for item in of.items())


def pyright(tool, folder, files):
    """{(file, line): [message]}"""
    config = {**PYRIGHT, 'include': [str(f) for f in files], 'extraPaths': [str(ROOT / 'python')]}
    (folder / 'pyrightconfig.json').write_text(json.dumps(config))
    said = subprocess.run([sys.executable, '-m', tool, '-p', str(folder), '--pythonpath', sys.executable, '--outputjson'],
                          capture_output=True, text=True)
    try:
        found = json.loads(said.stdout)['generalDiagnostics']
    except ValueError:
        sys.exit('%s: %s' % (tool, said.stdout + said.stderr))
    out = {}
    for d in found:
        if d['severity'] in ('error', 'warning'):
            out.setdefault((d['file'], d['range']['start']['line'] + 1), []).append(d['message'])
    return out


def mypy(folder, files):
    said = subprocess.run([sys.executable, '-m', 'mypy', '--strict', '--allow-untyped-calls', '--implicit-reexport', '--ignore-missing-imports', '--no-error-summary',
                           '--follow-imports=silent', '--no-warn-unused-ignores', '--cache-dir', str(folder / 'cache'), *map(str, files)],
                          capture_output=True, text=True, env={**os.environ, 'MYPYPATH': str(ROOT / 'python')}, cwd=folder)
    out = {}
    for line in said.stdout.splitlines():
        match = re.match(r'(.*?):(\d+): error: (.*)', line)
        if match:
            out.setdefault((str((folder / match[1]).resolve()), int(match[2])), []).append(match[3])
    if said.returncode not in (0, 1) or said.returncode == 1 and not out:
        sys.exit('mypy: ' + said.stdout + said.stderr)
    return out


def uncalled():
    """Public names that typed_calls.py does not have"""
    text, missing = CALLS.read_text(), []
    for module in ('colobridge', 'colobridge.torch', 'colobridge.megatron', 'colobridge.compat'):
        path = ROOT / 'python' / module.replace('.', '/')
        path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == '__all__':
                missing += ['%s.%s' % (module, name) for name in ast.literal_eval(node.value)
                            if not name.startswith('__') and not re.search(r'\b%s\b' % name, text)]
    return missing


def main():
    tool = next((name for name in ('pyright', 'basedpyright') if importlib.util.find_spec(name)), None)
    if tool is None or importlib.util.find_spec('mypy') is None or importlib.util.find_spec('torch') is None:
        print('SKIP: no pyright, mypy or PyTorch in %s' % sys.executable)
        return 77
    import torch
    if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 6):
        print('SKIP: PyTorch %s has no DeviceMesh with types' % torch.__version__)
        return 77
    wrong, cases = ['%s is not called in %s' % (name, CALLS.name) for name in uncalled()], 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        files = []
        for name, code, given in snippets():
            files.append(folder / (name + '.py'))
            files[-1].write_text(code)
            (folder / (name + '_given.pyi')).write_text(given)
        for file in FILES:
            files.append(folder / file.name)
            files[-1].write_text(file.read_text())
        for name, found in ((tool, pyright(tool, folder, files)), ('mypy', mypy(folder, files))):
            for file in files:
                for i, line in enumerate(file.read_text().splitlines(), 1):
                    said = found.pop((str(file), i), [])
                    count = re.search(r'  # refused(?: (\d+) times)?$', line)
                    cases += 'assert_type' in line or count is not None
                    if count is None and said or count is not None and (not said or count[1] is not None and len(said) != int(count[1])):
                        wrong.append('%s: %s:%d: %s\n    %s' % (name, file.name, i, line.strip(), '\n    '.join(said) or 'it was taken'))
            wrong += ['%s: %s:%d: %s' % (name, *at, of) for at, of in found.items()]
    print('\n'.join(wrong) or '%d snippets and %d calls are as expected' % (len(files) - len(FILES), cases))
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
