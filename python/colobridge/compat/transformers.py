# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The loss of transformers' causal LMs from hidden states, in their forward. How to use it: docs/guides/transformers.md."""
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from ..errors import ArgumentError
from ..torch.calls import compiling
from ..torch.cross_entropy import linear_cross_entropy
from ..torch.head import Head


@dataclasses.dataclass
class _Fused:
    """What a model's forward needs to know. It is copied with the model, so it has nothing of another model."""
    original: Any  # the forward that the model itself had, None: its class's
    output: Any  # class of what forward returns
    fields: frozenset[str]  # of it
    label_smoothing: float
    options: dict[str, Any]  # Head's
    active: bool = True


def _fused_of(model: Any) -> _Fused | None:
    return model.__dict__.get('_colobridge_fused')


def _class_of(model: Any) -> Any:
    return model.__class__  # fully_shard() gives a model another one


_NOT_THE_BACKBONES = 'labels', 'shift_labels', 'num_items_in_batch', 'ignore_index', 'return_dict', 'logits_to_keep'


def _counting(counts: Any) -> Callable[[], int | None]:
    """Asks how many tokens count; what it returns says it, up to a sixteenth of all, so that few sizes occur. A GPU has it
    before it begins with the backbone, whose kernels are only queued when the host asks."""
    if compiling() or counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return lambda: None
    found, event = counts.sum(), None
    if counts.is_cuda:
        found, event = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(found, non_blocking=True), torch.cuda.Event()
        event.record()

    def read() -> int | None:
        if event is not None:
            event.synchronize()
        step = max(1, -(-counts.numel() // 16))
        return min(counts.numel(), -(-int(found) // step) * step) or None
    return read


def _forward(model: Any, args: Any, kwargs: Any) -> Any:
    fused, of_class = _fused_of(model), _class_of(model).forward
    assert fused is not None
    given = {**dict(zip(list(inspect.signature(of_class).parameters)[1:], args)), **kwargs} if args else dict(kwargs)
    keep = given.get('logits_to_keep')
    keeps = keep is not None and not (isinstance(keep, int) and keep == 0)
    if not fused.active or given.get('labels') is None or given.get('fused_lm_head') or keeps:
        return fused.original(*args, **kwargs) if fused.original is not None else of_class(model, *args, **kwargs)
    labels, targets, items, ignored, as_dict, _ = (given.pop(name, None) for name in _NOT_THE_BACKBONES)
    ignored = -100 if ignored is None else ignored
    if targets is None:
        targets = torch.nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    count = _counting(targets != ignored)
    given.setdefault('use_cache', False)
    out = model.base_model(**given, return_dict=True)
    if out.get('router_logits') is not None or getattr(model.config.get_text_config(), 'output_router_logits', False):
        raise ArgumentError("fuse_lm_head: the model's loss has a term of its router (output_router_logits), which is not made here; "
                            "set it to False, or undo fuse_lm_head()")
    head = Head.of(model.get_output_embeddings(), **{'max_valid': count(), **fused.options})
    if hasattr(head.weight, 'ds_tensor'):
        raise ArgumentError("fuse_lm_head: the head is a parameter of DeepSpeed's ZeRO-3, whose gradient DeepSpeed would not find; "
                            "undo fuse_lm_head(), or call linear_nll() in a loop of your own (docs/guides/sharded-heads.md)")
    hidden = out[0].to(head.weight.device)
    loss = linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), head, targets.to(hidden.device).reshape(-1), ignore_index=ignored,
        label_smoothing=fused.label_smoothing, reduction='mean' if items is None else 'sum')
    if items is not None:
        loss = loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)
    made = fused.output(loss=loss, **{name: value for name, value in out.items() if name in fused.fields})
    return made.to_tuple() if as_dict is False else made


def fuse_lm_head(model: Any, *, label_smoothing: float = 0.0, **options: Any) -> Callable[[], None]:
    """Lets a causal LM of transformers compute its loss from hidden states, by linear_cross_entropy(), where forward is given
    labels: [B, S, V] logits never exist, and the output's logits are None. Without labels, with logits_to_keep, or with
    fused_lm_head=True of TRL, forward is as before.

    Labels are shifted, or shift_labels are taken as they are. num_items_in_batch divides the sum of the losses; without it
    the loss is their mean. ignore_index is -100, unless forward is given one. The call runs the model once, on five tokens
    with numbers of its own in the place of the head's, to see what the model does to logits (a scale, a softcap) and that
    its loss is the cross entropy of the next token.

    Args:
        model: a PreTrainedModel, or peft's around one, before DDP, Trainer or accelerate wrap it. One that fully_shard()
            changed in place may come later, on all ranks of its mesh.
        label_smoothing: in [0, 1], as TrainingArguments.label_smoothing_factor, which would ask for logits; leave that one 0.
        **options: Head's, such as grad_reduction.

    Returns:
        A function without arguments that undoes it.

    Raises:
        ValueError: the model's loss is another one, its head does not get what its backbone returns, or is one that
            Head.of() refuses, the model is on the meta device, or fused already. In forward: the loss has a term of a router, the
            head is a parameter of DeepSpeed's ZeRO-3.
    """
    model = model.get_base_model() if hasattr(model, 'peft_config') and hasattr(model, 'get_base_model') else model
    before = _fused_of(model)
    if before is not None and before.active:
        raise ArgumentError("fuse_lm_head: the model is fused already; undo that first")
    head = model.get_output_embeddings() if hasattr(model, 'get_output_embeddings') else None
    if head is None or model.base_model is model:
        raise ArgumentError("fuse_lm_head: model is a %s, which has no lm_head over a backbone, expected a causal LM of "
                            "transformers" % type(model).__name__)
    Head.of(head, **options)  # refuses an adapter that is no LoRA
    output, found = _measured(model, head)
    own: dict[str, Any] = model.__dict__
    fused = _Fused(own.get('forward'), output, frozenset(field.name for field in dataclasses.fields(output)),
                   float(label_smoothing), {**found, **options})

    @functools.wraps(_class_of(model).forward)  # whose arguments Trainer looks at
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, args, kwargs)
    ours = None
    if before is not None:  # undone under what had wrapped it, where its forward still is, and finds this
        fused.original = before.original
    else:
        ours = model.forward = types.MethodType(forward, model)
    model._colobridge_fused = fused

    def undo() -> None:
        fused.active = False  # where accelerate has wrapped it since
        if ours is not None and own.get('forward') is ours:
            del model.forward, model._colobridge_fused
            if fused.original is not None:
                model.forward = fused.original
    return undo


def _token_ids(config: dict[str, Any]) -> Iterator[int]:
    """Those that a config gives a meaning"""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _token_ids(cast(dict[str, Any], value))
        elif str(name).endswith(('_token_id', '_token_index')):
            yield from cast(list[int], value) if isinstance(value, list) else [value]


_SMALL, _LARGE = 2.0 ** -14, 2.0 ** 20  # a logit that no cap changes, and one beyond each cap


def _measured(model: Any, head: Any) -> tuple[Any, dict[str, Any]]:
    """(class of the output, Head's scale and softcap). ValueError: a loss that is not made of them."""
    what, device = 'fuse_lm_head: %s' % type(model).__name__, model.device
    if device.type == 'meta':
        raise ArgumentError(what + " is on the meta device, expected one that can run: call this when it has its weights")
    special = {*_token_ids(model.config.to_dict())}
    tokens = torch.tensor([[i for i in range(2, 1000) if i not in special][:5]], device=device)
    seen: dict[str, Any] = {}

    def backbone(_module: Any, _args: Any, out: Any) -> None:
        seen['hidden'] = out[0]

    def ours(_module: Any, args: Any, out: Any) -> Any:
        if 'hidden' not in seen or not torch.equal(seen['hidden'], args[0]):
            raise ArgumentError("its head does not get what base_model returns")
        z = torch.tensor([-40.0, 17.0, 0.5, 0.0, 3.0, -8.0, 29.0], device=out.device)
        z = z[torch.arange(out.numel(), device=out.device) % len(z)].reshape(out.shape)  # 7 and V: no two rows alike, mostly
        z[:, -1, 0::2], z[:, -1, 1::2] = _SMALL, _LARGE  # the loss has nothing of the last token
        seen['z'] = z
        return z.clone()
    hooks = [model.base_model.register_forward_hook(backbone), head.register_forward_hook(ours, prepend=True)]
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == 'cuda' else []):
            out = model(input_ids=tokens, labels=tokens, use_cache=False)
    except Exception as why:
        raise ArgumentError("%s cannot be fused: a forward of five tokens failed: %s" % (what, why)) from why
    finally:
        for hook in hooks:
            hook.remove()
    z, logits, own = seen['z'], out.logits, out.loss
    x = logits.float()
    scale, cap = float(x[0, -1, 0]) / _SMALL, float(x[0, -1, 1])
    softcap = None if abs(cap - scale * _LARGE) <= 1e-3 * abs(cap) else cap
    wanted = scale * z if softcap is None else softcap * torch.tanh(scale * z / softcap)
    if logits.dtype != torch.float32 or x.shape != z.shape or not torch.allclose(x, wanted, rtol=1e-4, atol=1e-4):
        raise ArgumentError("%s cannot be fused: what it does to its logits is neither scale nor softcap" % what)
    loss = torch.nn.functional.cross_entropy(x[0, :-1], tokens[0, 1:])
    if not torch.allclose(own.float(), loss, rtol=1e-4, atol=1e-4):
        raise ArgumentError("%s cannot be fused: its loss is %g where the mean cross entropy of its logits is %g" % (what, own, loss))
    return _class_of(out), {'scale': scale, 'softcap': softcap}
