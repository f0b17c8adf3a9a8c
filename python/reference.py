#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/reference/python.md from the docstrings of the package, without importing it.

usage: reference.py [--write]     without: exit 1 when the page is not what it would be
"""
import ast
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / 'docs/reference/python.md'
MODULES = [('colobridge', ['grid', 'layout', 'plan', 'comm', 'bridge', 'packing', 'segments', 'memory', 'partition',
                           'dlpack', 'errors', '_lib']),
           ('colobridge.torch', ['torch/bridge', 'torch/relayout', 'torch/ticket', 'torch/logprob', 'torch/nll', 'torch/head', 'torch/linear', 'torch/cross_entropy',
                                 'torch/modules', 'torch/chunks', 'torch/losses', 'torch/sequence', 'torch/support', 'torch/partition', 'torch/tower', 'torch/ranks']),
           ('colobridge.megatron', ['megatron', 'megatron_shard']), ('colobridge.compat', ['compat', 'compat_hf'])]
# Public, but for code that extends the package.
INSIDE = {'alive', 'loss_of', 'per_token', 'real_of', 'end', 'Accompanied', 'Classes', 'ClassWeight', 'accompanied', 'meta', 'Own', 'Support.behind', 'config', 'choice', 'component', 'logprob.shard', 'outputs',
          'logprob.Plan', 'mean_workspace', 'Asked', 'targets_of', 'targets_for', 'LogprobPlan', 'Sequence.on', 'planned', 'prepare', 'across', 'factor_of',
          'Mean', 'MeanCall', 'NllPlan', 'size_and_rank', 'tell', 'masked', 'counted', 'reduced', 'refuse', 'heard', 'told', 'telling', 'alone', 'exception', 'views', 'head.read', 'head.partitioned',
          'bytes_of', 'part_lengths', 'parts_of', 'part_of', 'context_of', 'replica_of', 'splits_of', 'counted_of', 'Repacking', 'bridge.kept', 'logprob_members', 'config_of', 'arranged', 'check_target', 'require_alive', 'joined', 'Comm.serves', 'Comm.knows_world', 'world_ranks', 'require_apart', 'Comm.ends', 'Flight', 'extra_repr', 'another', 'planning'}


def head(node, name):
    """"name(a, b=1)" of a function, without self and annotations."""
    a = node.args
    plain = [x.arg for x in a.posonlyargs + a.args]
    words = list(plain)
    for i, default in enumerate(a.defaults):
        words[len(words) - len(a.defaults) + i] += '=' + ast.unparse(default)
    if a.vararg:
        words.append('*' + a.vararg.arg)
    elif a.kwonlyargs:
        words.append('*')
    words += [x.arg + ('' if d is None else '=' + ast.unparse(d))
              for x, d in zip(a.kwonlyargs, a.kw_defaults) if not x.arg.startswith('_')]
    if a.kwarg:
        words.append('**' + a.kwarg.arg)
    if plain[:1] in (['self'], ['cls']):
        words = words[1:]
    return '%s(%s)' % (name, ', '.join(words))


def members(node):
    """The same of a dataclass"""
    fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
    return '%s(%s)' % (node.name, ', '.join(
        '*' if ast.unparse(field.annotation) == 'dataclasses.KW_ONLY' else
        field.target.id + ('' if field.value is None else '=' + ast.unparse(field.value)) for field in fields))


def has(node, decorator):
    return any(ast.unparse(d) == decorator for d in node.decorator_list)


def entry(title, doc, level):
    text = ast.get_docstring(doc)
    if not text:
        sys.exit('%s has no docstring; write one, or name it in INSIDE' % title)
    return ['%s `%s`' % ('#' * level, title), '', text, '']


def class_entries(node, title, classes):
    """A class's own methods, and those of bases that have no entry."""
    bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id.startswith('_') and base.id in classes]
    made = {child.name: child for of in (node, *bases) for child in of.body if isinstance(child, ast.FunctionDef)
            and not any(ast.unparse(d).endswith('.setter') for d in child.decorator_list)}
    forwards = any(ast.unparse(base) in ('torch.nn.Module', '_Module', '_Loss') for base in node.bases)
    if any(ast.unparse(d).startswith('dataclasses.dataclass') for d in node.decorator_list):
        title = members(node)
    out = entry(head(made['__init__'], title) if '__init__' in made else title, node, 3)
    for name, child in made.items():
        if {name, '%s.%s' % (node.name, name)} & INSIDE:
            continue
        if name == '__call__' or not name.startswith('_'):
            title = name if has(child, 'property') else head(child, name)
            if name == '__call__' or name == 'forward' and forwards:
                title = title.replace(name, node.name.lower(), 1)
            out += entry(title, child, 4)
    return out


def exported(module):
    """The names in __all__ of a package, by what its files call them; None of a plain module, where each public name is one"""
    path, aliases = HERE / module.replace('.', '/') / '__init__.py', {}
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.ImportFrom):
            aliases.update({name.asname: name.name for name in node.names})
        if isinstance(node, ast.Assign) and node.targets[0].id == '__all__':
            return {aliases.get(name, name): name for name in ast.literal_eval(node.value) if name != '__version__'}
    return None


def page():
    lines = ['# Python reference', '', 'Made from the docstrings by `python3 python/reference.py --write`; '
             'how to use it is in [pytorch](../guides/pytorch.md).', '']
    for module, files in MODULES:
        lines += ['## ' + module, '']
        names = exported(module)
        missing = dict(names or {})
        for name in files:
            tree = ast.parse((HERE / 'colobridge' / (name + '.py')).read_text())
            classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
            for node in tree.body:
                own = getattr(node, 'name', '_')
                if own.startswith('_') or name.startswith('_') and own not in names or {own, '%s.%s' % (Path(name).name, own)} & INSIDE or has(node, 'Function'):
                    continue
                title = own if names is None else names.get(own, '%s.%s' % (Path(name).name, own))
                missing.pop(own, None)
                if isinstance(node, ast.ClassDef):
                    lines += class_entries(node, title, classes)
                elif isinstance(node, ast.FunctionDef):
                    lines += entry(head(node, title), node, 3)
        if missing:
            sys.exit('%s has no entry of %s; add its file to MODULES' % (module, ', '.join(missing.values())))
    return '\n'.join(lines).rstrip() + '\n'


if __name__ == '__main__':
    if sys.argv[1:] == ['--write']:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit('docs/reference/python.md is not what the docstrings say; python3 python/reference.py --write')
