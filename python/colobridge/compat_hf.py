# SPDX-License-Identifier: Apache-2.0
"""What trainers of Hugging Face's transformers and TRL call, from hidden states. How to use it: docs/for-transformers.md."""
from collections.abc import Sequence
from typing import Any

import torch

from .errors import ArgumentError
from .torch.calls import eager
from .torch.chunks import over_chunks
from .torch.head import Head, read
from .torch.linear import Linear, prepare
from .torch.logprob import outputs as of_logits

_NONE_IGNORED = -2**63  # no token has this number
_TILE = 4096  # tokens of TRL's tile of logits


def _more(z: Any, softcap: float, scale: float, wanted: Sequence[str]) -> list[Any]:
    """log sum p^2 and the mean of x, those that are wanted, of a chunk's logits, in f32; temperature is in softcap and scale"""
    x = z.detach().float() * scale
    if softcap:
        x = (x / softcap).tanh_().mul_(softcap)
    made = {}
    if 'mean_logits' in wanted:
        made['mean_logits'] = x.mean(-1)
    if 'log_sum_sq_probs' in wanted:
        e = x.sub_(x.amax(-1, keepdim=True)).exp_()
        made['log_sum_sq_probs'] = -2 * e.sum(-1).log() + e.square_().sum(-1).log()
    return [made[name] for name in wanted]


class ChunkedLogProbFunction:
    """TRL's function of that name, which its SFT, DPO, GRPO, KTO and RLOO trainers share: (log_probs, entropy,
    log_sum_sq_probs, mean_logits, is_top1), each [N] or None, of targets [N] under the logits hidden [N, H] x weight [V, H]^T
    (+ bias [V]), of which no more than 4096 x chunk_size exist at a time."""

    @staticmethod
    @eager
    def apply(hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk_size: int,
              final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
              outputs: Sequence[str] = ('entropy', 'log_sum_sq_probs', 'mean_logits', 'is_top1')) -> Any:
        """outputs: those that are wanted besides log_probs; the others are None. log_probs and entropy are differentiable in
        hidden, weight and bias. f32, is_top1 bool: is the target the first of the largest logits? x = softcap * tanh(scale *
        logits / softcap) / temperature; log_sum_sq_probs is log sum p^2, mean_logits the mean of x over the vocabulary.
        A target outside of the vocabulary has log_probs 0. ValueError: a weight of DeepSpeed's ZeRO-3.
        """
        what = 'ChunkedLogProbFunction'
        if hasattr(weight, 'ds_tensor'):
            raise ArgumentError("%s: weight is a parameter of DeepSpeed's ZeRO-3, expected one that stays as it is until backward; "
                                "leave TRL its own function there" % what)
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        softcap, scale, temperature = float(final_logit_softcapping or 0.0), float(logit_scale), float(temperature)
        names = ('logp',) + ('entropy',) * ('entropy' in outputs) + ('correct',) * ('is_top1' in outputs)
        numbers = dict(temperature=temperature, softcap=softcap, scale=scale, ignore_index=_NONE_IGNORED, lenient_targets=True)
        tokens = max(1, _TILE * chunk_size // max(len(weight), 1))
        more = [name for name in ('log_sum_sq_probs', 'mean_logits') if name in outputs]
        made: dict[str, Any] = {}
        if more == ['mean_logits'] and not softcap:  # of a product it is the product with the mean
            more = []
            with torch.no_grad():
                real = torch.promote_types(hidden.dtype, torch.float32)
                mean = hidden.to(real) @ weight.mean(0, dtype=real)
                made['mean_logits'] = (mean if bias is None else mean + bias.mean(dtype=real)) * (scale / temperature)
        if more:
            begun: set[int] = set()

            def of_chunk(z: Any, rows: slice) -> Any:
                again = rows.start in begun  # backward's, which has no use for what has no gradient
                begun.add(rows.start)
                rest = [z.new_empty(len(z), dtype=torch.float32)] * len(more) if again else _more(
                    z, softcap / temperature, scale / temperature, more)
                return (*of_logits(what, z, targets[rows], names, in_place=True, **numbers), *rest)
            found: Any = over_chunks(of_chunk, hidden, weight if bias is None else Head(weight, bias), chunk_size=tokens)
        else:
            numbers['chunk_size'] = tokens
            found = Linear.apply(*prepare(what, hidden, read(what, Head(weight, bias, budget=_TILE * chunk_size * 4), None),
                                          targets, names, 'auto', None, tuple(numbers.values()), tuple(numbers)))
        made.update(zip((*names, *more), found))
        if 'correct' in made:
            made['is_top1'] = made.pop('correct').bool()
        logp, *others = (None if name not in made else made[name] if name == 'is_top1' else made[name].float()
                         for name in ('logp', 'entropy', 'log_sum_sq_probs', 'mean_logits', 'is_top1'))
        return (logp, *others)
