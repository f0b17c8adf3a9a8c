# SPDX-License-Identifier: Apache-2.0
"""linear_nll() and its like with the members of a Head among their options, as tables of cases have them."""
import dataclasses
import functools

import colobridge.torch as ct

MEMBERS = {field.name for field in dataclasses.fields(ct.Head)}


def headed(run):
    """run() of weight and bias, which go into a Head with those of the options that are a Head's; if there are none of them,
    the weight is given as it is"""
    @functools.wraps(run)
    def call(*args, **options):
        args = list(args)
        if 'hidden' in options:
            args.append(options.pop('hidden'))
        at = 2 if run is ct.over_chunks else 1  # of the weight
        weight, bias = (options.pop(name) if name in options else args[i] if i < len(args) else None
                        for i, name in ((at, 'weight'), (at + 1, 'bias')))
        of = {name: options.pop(name) for name in [*options] if name in MEMBERS and name != 'tp_group'}
        if bias is not None or of:
            if 'tp_group' in options:
                of['tp_group'] = options.pop('tp_group')
            weight = ct.Head(weight, bias, **of)
        return run(*args[:at], weight, **options)
    return call


linear_logprob, linear_nll, over_chunks = map(headed, (ct.linear_logprob, ct.linear_nll, ct.over_chunks))
