# SPDX-License-Identifier: Apache-2.0
"""Docstrings: their examples do what they say, and those of colobridge.torch name each argument, in Google's form."""
import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

torch = pytest.importorskip('torch')

import colobridge  # noqa: E402
import colobridge.torch as ct  # noqa: E402

# torch.compile()'s operators, for PyTorch 2.14 or later
MODULES = [name for _, name, _ in pkgutil.walk_packages(colobridge.__path__, 'colobridge.') if not name.endswith(('__main__', 'compiled'))]
# Tuples that are results, and what is made by a call.
RESULTS = ('Distilled', 'Group', 'Loss', 'Ticket', 'TopK', 'TowerPlan', 'Weighted')
METHODS = ('forward', 'start', 'plan', 'of', 'targets', 'mask', 'gather')
CALLS = {name: getattr(ct, name) for name in ct.__all__ if name not in RESULTS}
CALLS.update({'%s.%s' % (name, method): getattr(of, method) for name, of in list(CALLS.items()) if inspect.isclass(of)
              for method in METHODS if method in vars(of) and 'CrossEntropyLoss' not in name})


def examples():
    finder = doctest.DocTestFinder()
    for name in MODULES:
        module = importlib.import_module(name)
        for test in finder.find(module, name):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize('test', list(examples()))
def test_an_example_does_what_it_says(test):
    said = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, ''.join(said)


def sections(text):
    """{heading: its lines} of a docstring in Google's form"""
    parts = re.split(r'^(Args|Returns|Raises|Example|Attributes):\n', inspect.cleandoc(text), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.mark.parametrize('name', list(CALLS))
def test_each_argument_is_in_the_docstring(name):
    of = CALLS[name]
    found = sections(of.__doc__)
    named = re.findall(r'^    (\*{0,2}\w+): \S', found.get('Args', ''), re.M)
    kinds = {inspect.Parameter.VAR_POSITIONAL: '*', inspect.Parameter.VAR_KEYWORD: '**'}
    wanted = [('' if p.name == 'towers' else kinds.get(p.kind, '')) + p.name
              for p in inspect.signature(of).parameters.values() if p.name != 'self']
    assert named == wanted
    assert inspect.isclass(of) or name in ('shutdown', 'Head.of') or found.get('Returns', '').strip()
    assert all(re.match(r'    (\w+: \S|    \S)', line) for line in found.get('Raises', '').rstrip().splitlines())
