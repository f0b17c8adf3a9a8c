# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""TRL's losses from hidden states. How to use them: docs/guides/transformers.md."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ..errors import ArgumentError
from ..torch.calls import eager
from ..torch.head import Head, Named, read
from ..torch.linear import Linear, LinearLoss, prepare
from ..torch.ranks import alone
from .shared import NONE_IGNORED, f32

Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_TILE = 4096  # tokens of TRL's tile of logits
# TRL's names, in the order of its results, and ours
_OUTPUTS = {'entropy': 'entropy', 'log_sum_sq_probs': 'sum_p2', 'mean_logits': 'mean_logits', 'is_top1': 'correct'}


class ChunkedLogProbFunction:
    """TRL's function of that name, which its SFT, DPO, GRPO, KTO and RLOO trainers share: from hidden states and a head."""

    @staticmethod
    @eager
    def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float, chunk_size: int,
              final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
              outputs: Sequence[str] = ('entropy', 'log_sum_sq_probs', 'mean_logits', 'is_top1')) -> Outputs:
        """x = softcap * tanh(scale * logits / softcap) / temperature, without a softcap scale * logits / temperature, of the
        logits hidden x weight^T (+ bias), f32, of which no more than 4096 x chunk_size are made at a time, in one pass.

        Args:
            hidden: [N, H], f32, bf16, f16 or f64.
            weight: [V, H]; of another dtype, it is cast to hidden's.
            bias: [V] or None; of another dtype, it is cast, too.
            targets: [N], ids of an integer dtype.
            temperature: > 0.
            chunk_size: columns of TRL's tile of 4096 tokens.
            final_logit_softcapping: softcap, or None.
            logit_scale: scale.
            outputs: those that are wanted besides log_probs; the others are None.

        Returns:
            (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N] or None: log_sum_sq_probs is log sum p^2,
            mean_logits the mean of x over the vocabulary, both and the first two in f32, and is_top1, bool: is the target the
            first of the largest x? The first two are differentiable in hidden, weight and bias. A target outside of the
            vocabulary has log_probs 0.

        Raises:
            ValueError: weight is a parameter of DeepSpeed's ZeRO-3; shapes, dtypes, devices, options.
        """
        what = Named('ChunkedLogProbFunction', target='targets')
        if hasattr(weight, 'ds_tensor'):
            raise ArgumentError("%s: weight is a parameter of DeepSpeed's ZeRO-3, expected one that stays as it is until backward; "
                                "leave TRL its own function there" % what)
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        names = ('logp', *(name for asked, name in _OUTPUTS.items() if asked in outputs))
        tokens = max(1, _TILE * chunk_size // max(len(weight), 1))
        numbers: dict[str, Any] = dict(temperature=float(temperature), softcap=float(final_logit_softcapping or 0.0), scale=float(logit_scale),
                                       ignore_index=NONE_IGNORED, lenient_targets=True, chunk_size=tokens)
        found = dict(zip(names, Linear.apply(*prepare(
            what, hidden, read(what, Head(weight, bias, budget=_TILE * chunk_size * 4), None), targets, names, 'auto', None,
            tuple(numbers.values()), tuple(numbers)))))
        if 'correct' in found:
            found['correct'] = found['correct'].bool()
        if 'sum_p2' in found:
            found['sum_p2'] = found['sum_p2'].log()
        logp, *others = (None if name not in found else found[name] if name == 'correct' else found[name].float()
                         for name in ('logp', *_OUTPUTS.values()))
        return cast(Outputs, (logp, *others))


# ---- the head and its loss, chunk by chunk ----

_CHUNKED = Named('chunked_cross_entropy_loss', hidden='hidden_states', weight='lm_head_weight', bias='lm_head_bias', target='labels')


@eager
def chunked_cross_entropy_loss(hidden_states: torch.Tensor, lm_head_weight: torch.Tensor, chunk_size: int,
                               labels: torch.Tensor | None = None, shift_labels: torch.Tensor | None = None,
                               num_items_in_batch: float | torch.Tensor | None = None, logit_scale: float = 1.0,
                               final_logit_softcapping: float | None = None,
                               lm_head_bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """TRL's loss from hidden states, for chunk_size tokens at a time: logits of two chunks are all there is of them.

    linear_nll()'s loss, whose gradients are made in forward and scaled in backward. Backward through entropy_sum makes logits a
    second time; backward through loss alone does not.

    Args:
        hidden_states: [B, S, H], of a floating-point dtype; it is cast to lm_head_weight's.
        lm_head_weight: [V, H]; f64, f32, bf16 or f16.
        chunk_size: tokens, >= 1.
        labels: [B, S], ids of an integer dtype, which are shifted here. -100 is ignored and takes part in the products only to
            fill up a sixteenth of the tokens.
        shift_labels: [B, S], ids that are taken as they are, and override labels.
        num_items_in_batch: what divides the sum of the losses: a number or a tensor, also one below 1; None: n_valid.
        logit_scale: factor of the logits, before the cap.
        final_logit_softcapping: the soft cap; None: no cap.
        lm_head_bias: [V] or None.

    Returns:
        (loss, n_correct, entropy_sum, n_valid), each []. loss: sum / num_items_in_batch, by default 0 without a token.
        n_correct: how many targets are the likeliest id. entropy_sum: in nats. n_valid: how many tokens count, an integer. The
        first three are f32. loss and entropy_sum are differentiable in hidden_states, weight and bias, those that ask for it.

    Raises:
        ValueError: a label outside of [0, V) and not -100 (one wait for the GPU), chunk_size < 1, neither labels nor
            shift_labels; shapes, dtypes, devices.
    """
    what, hidden = _CHUNKED, hidden_states
    if labels is None and shift_labels is None:
        raise ArgumentError("chunked_cross_entropy_loss: At least one of labels and shift_labels is needed: found "
                            "neither; pass one")
    if chunk_size < 1:
        raise ArgumentError("chunked_cross_entropy_loss: chunk_size is %d, expected >= 1" % chunk_size)
    if shift_labels is None:
        hidden, shift_labels = hidden[..., :-1, :], cast(torch.Tensor, labels)[..., 1:]
    assert shift_labels is not None
    if hidden.shape[:-1] != shift_labels.shape:
        raise ArgumentError("chunked_cross_entropy_loss: labels are %s, expected %s"
                            % (list(shift_labels.shape), list(hidden.shape[:-1])))
    counted, outside = shift_labels != -100, (shift_labels < 0) | (shift_labels >= lm_head_weight.shape[0])
    valid, bad = torch.stack([counted.sum(), (counted & outside).sum()]).tolist()
    if bad:
        raise ArgumentError("chunked_cross_entropy_loss: %d labels are outside of [0, %d) and not -100"
                            % (bad, lm_head_weight.shape[0]))
    step = max(1, -(-shift_labels.numel() // 16))  # few sizes, for few plans
    most = min(shift_labels.numel(), -(-valid // step) * step) or None
    *tensors, o = prepare(
        what, hidden.to(lm_head_weight.dtype), read(what, Head(lm_head_weight, lm_head_bias, d_hidden='partial', max_valid=most), None),
        shift_labels, ('loss', 'n_valid', 'entropy', 'correct'), 'logprob', 'sums',
        (float(logit_scale), float(final_logit_softcapping or 0.0), -100, int(chunk_size)),
        ('scale', 'softcap', 'ignore_index', 'chunk_size'))
    den = None
    if num_items_in_batch is not None:
        device = tensors[0].device
        den = num_items_in_batch.to(device, torch.float64) if isinstance(num_items_in_batch, torch.Tensor) \
            else torch.full((), float(num_items_in_batch), dtype=torch.float64, device=device)
    side: list[Any] = []
    loss, entropy_sum = LinearLoss.apply(*tensors, (den, alone(), True, side, None, True, None, None), o)
    _, _, n_valid, _, right = side
    return f32(loss), f32(right.sum()), f32(entropy_sum), n_valid
