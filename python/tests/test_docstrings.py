# SPDX-License-Identifier: Apache-2.0
"""Docstrings: their examples do what they say, and those of public names name each argument, in Google's form."""
import doctest
import enum
import importlib
import inspect
import pkgutil
import re

import pytest

torch = pytest.importorskip('torch')

import colobridge  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge import compat, dlpack, megatron, view  # noqa: E402

# torch.compile()'s operators, for PyTorch 2.14 or later
MODULES = [name for _, name, _ in pkgutil.walk_packages(colobridge.__path__, 'colobridge.') if not name.endswith(('__main__', 'compiled'))]
# Tuples that are results, and what is made by a call.
RESULTS = ('Distilled', 'Group', 'GroupedLoss', 'Loss', 'Ticket', 'TopK', 'TowerPlan', 'Weighted')
METHODS = ('forward', 'start', 'plan', 'of', 'targets', 'mask', 'gather', 'cost', 'fit', 'global_shape', 'index', 'pack',
           'stats')
CALLS = {name: getattr(ct, name) for name in ct.__all__ if name not in RESULTS}
CALLS.update({'%s.%s' % (name, method): getattr(of, method) for name, of in list(CALLS.items()) if inspect.isclass(of)
              for method in METHODS if method in vars(of)})

# What calls of the core return, and methods that are no user's (the pages leave them out, too).
MADE, OWN = ('Batch', 'Comm', 'Group', 'Memory', 'Owned'), ('ends', 'serves')


def core():
    """(name, function or class) of all but colobridge.torch, with the methods of classes, and what else the reference has"""
    names = {name: getattr(colobridge, name) for name in colobridge.__all__ if name != '__version__'}
    names.update(Borrowed=dlpack.Borrowed, from_dlpack=dlpack.from_dlpack, Array=dlpack.Array, view=view.view)
    names.update({'%s.%s' % (of.__name__, name): getattr(of, name) for of in (compat, megatron) for name in of.__all__})
    for name, of in names.items():
        if inspect.isclass(of) and issubclass(of, (Exception, enum.Enum)):
            continue
        if name not in MADE:
            yield name, of
        for method, member in vars(of).items() if inspect.isclass(of) else ():
            if method[0] != '_' and method not in OWN and callable(getattr(of, method)):
                yield '%s.%s' % (name, method), getattr(of, method)


CORE = dict(core())


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


def arguments(of):
    """Names of what it takes, as a docstring has them"""
    kinds = {inspect.Parameter.VAR_POSITIONAL: '*', inspect.Parameter.VAR_KEYWORD: '**'}
    return [('' if p.name == 'towers' else kinds.get(p.kind, '')) + p.name
            for p in inspect.signature(of).parameters.values() if p.name != 'self']


def wrong(of, returns):
    """What its docstring lacks"""
    found = sections(of.__doc__)
    named = re.findall(r'^    (\*{0,2}\w+): \S', found.get('Args', ''), re.M)
    if named != arguments(of):
        return 'Args'
    if returns and not found.get('Returns', '').strip():
        return 'Returns'
    return '' if all(re.match(r'    (\w+: \S|    \S)', line) for line in found.get('Raises', '').rstrip().splitlines()) else 'Raises'


@pytest.mark.parametrize('name', list(CALLS))
def test_each_argument_is_in_the_docstring(name):
    assert not wrong(CALLS[name], not inspect.isclass(CALLS[name]) and name not in ('shutdown', 'Head.of'))


@pytest.mark.parametrize('name', list(CORE))
def test_each_argument_of_the_core_is_in_the_docstring(name):
    of = CORE[name]
    # A function without arguments says in one sentence what it returns.
    returns = inspect.signature(of).return_annotation not in (None, 'None')
    assert not wrong(of, not inspect.isclass(of) and arguments(of) and returns)


# Those of others, whose signatures are theirs.
DROP_INS = ('compat.', 'megatron.')


def test_no_signature_has_more_than_sixteen_arguments():
    own = {**CALLS, **{name: of for name, of in CORE.items() if not name.startswith(DROP_INS)}}
    assert {name: len(arguments(of)) for name, of in own.items() if len(arguments(of)) > 16} == {
        'nll': 18, 'linear_nll': 18, 'Head': 17}  # two of the first are the groups', which come together


def test_what_a_docstring_lacks_is_found():
    def call(x: int) -> int:
        """Args:
            x: rows.

        Returns:
            Rows.

        Raises:
            ValueError: x.
        """
        return x
    assert len(CORE) > 80 and not wrong(call, True)
    for part, without in (('x: rows', 'Args'), ('Rows.', 'Returns'), ('ValueError: x.', 'Raises')):
        def bare(x: int) -> int:
            return call(x)
        bare.__doc__ = (call.__doc__ or '').replace(part, '' if part == 'Rows.' else 'no name')
        assert wrong(bare, True) == without
