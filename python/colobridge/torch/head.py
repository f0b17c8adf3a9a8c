# SPDX-License-Identifier: Apache-2.0
"""What belongs to an lm_head, whatever is computed with it."""
from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import torch

from ..errors import ArgumentError
from .types import Group, Vocab

ORDINARY = torch.Tensor, torch.nn.Parameter, type(None)  # types of tensors that are no more than they seem
Columns = tuple[int | None, int | None, int | None]  # where a rank's begin and end, and V


class Named(str):
    """What errors call a function, and what it calls the arguments that others have under these names."""
    hidden, weight, bias, target, class_weight = 'hidden', 'weight', 'bias', 'target', 'class_weight'

    def __new__(cls, name: str, **arguments: str) -> 'Named':
        made = super().__new__(cls, name)
        made.__dict__.update(arguments)
        return made


def columns_of(what: str, vocab: Any) -> Columns:
    """What vocab= says of them."""
    if vocab is None:
        return None, None, None
    start, size = (None, vocab) if not isinstance(vocab, tuple) else (*vocab, None)[:2] if 0 < len(vocab) < 3 else ('', '')
    if any(n is not None and not hasattr(n, '__index__') for n in (start, size)):
        raise ArgumentError("%s: vocab is %r, expected V, or (the id of this rank's first column, V or None)" % (what, vocab))
    return start, None, size


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """A head's parameters and what is true of it in each call: linear_nll(), linear_logprob(), linear_cross_entropy() and
    over_chunks() take one in the place of a weight. It holds the tensors, and copies nothing.

    Args:
        weight: [Vl, H], this rank's rows: a tensor, a DTensor (docs/guides/sharded-heads.md#dtensors) or a parameter of
            DeepSpeed's ZeRO-3. With shard_group also [n]: this rank's elements of the flattened weight.
        bias: [Vl] or None.
        softcap: x = softcap * tanh(scale * logits / softcap) / temperature; None: no cap.
        scale: of the logits, before the cap.
        tp_group: the ranks that share the vocabulary; None: no others.
        vocab: logprob()'s, of this rank's rows.
        shard_group: the data parallel ranks that share the weight (docs/guides/sharded-heads.md#the-head-and-modes), if it is
            neither a DTensor nor DeepSpeed's; none but this one is in tp_group. All of them call, also with no token.
        rows: Vl, of all ranks of shard_group together.
        grad_reduction: over the ranks that share the weight, or have copies of it, the gradient is the "sum" or the "mean"; None:
            of a parameter of FSDP2's what FSDP2 makes of others (docs/guides/sharded-heads.md#sum-or-mean), else the sum.
        main_grad: the gradients of weight and bias are added to their main_grad, in f32, and autograd gets none.
        d_hidden: the gradient of hidden over tp_group: "all_reduce", "partial" (this rank's part) or "reduce_scatter".
        logits_dtype: of logits in memory: torch.float32 (None) or hidden's.
        budget: bytes of logits that mode "auto" keeps; 0: 1 GiB.
        max_valid: an upper bound of a call's tokens that are not ignored; products have that many rows.
        gemm: what makes products in host memory: a "cblas" (one that the process has loaded, else OpenBLAS), the library's own
            "loops", several times slower, or "auto": a CBLAS if the process has loaded one. COLO_GEMM overrides it.
        invariant: as in logprob(); the weight has the padding, and d_hidden is not "partial".
        lora: (A [r, H], B [Vl, r], scale): logits are hidden x weight^T + scale (hidden x A^T) x B^T (+ bias), and W + scale B A
            is never made. B has this rank's rows, A is the same on all ranks of tp_group, over which its gradient is summed.
            Factors are multiplied in hidden's dtype; their gradients are summed in f32 (f64). Whether or not the weight is
            sharded, a plain factor is whole and its gradient that of this rank's tokens; rows of a DTensor are gathered in
            forward and stay until backward, and so are elements of a parameter of DeepSpeed's ZeRO-3, whose gradient is added to
            its ds_tensor.grad. Only weight and bias have main_grad.

    Example:
        >>> import colobridge.torch as ct, torch
        >>> head = ct.Head.of(torch.nn.Linear(8, 16), softcap=30.0)
        >>> head.weight.shape, head.bias.shape
        (torch.Size([16, 8]), torch.Size([16]))
    """
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    _: dataclasses.KW_ONLY
    softcap: float | None = None
    scale: float = 1.0
    tp_group: Group | None = None
    vocab: Vocab | None = None
    shard_group: Group | None = None
    rows: int | None = None
    grad_reduction: Literal['sum', 'mean'] | None = None
    main_grad: bool = False
    d_hidden: Literal['all_reduce', 'partial', 'reduce_scatter'] = 'all_reduce'
    logits_dtype: torch.dtype | None = None
    budget: int = 0
    max_valid: int | None = None
    gemm: str = 'auto'
    invariant: bool | int = False
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None

    @classmethod
    def of(cls, module: torch.nn.Module | torch.Tensor, **options: Any) -> Head:
        """The Head of a module. It has the parameters that the module has now: make one for each call, as FSDP2 exchanges them.

        Args:
            module: one with a weight [Vl, H], and a bias [Vl] or none: an nn.Linear, as it is or as fully_shard() or DeepSpeed made
                it, an nn.Embedding that is tied to the head; or such a weight alone. Of a linear layer with a LoRA of peft's the
                Head has the factors, of several active adapters one behind the other.
            **options: Head's.

        Raises:
            ValueError: another adapter of peft's, or a LoRA with a dropout in training, DoRA or a bias; no weight of that
                shape; a layer of Megatron's or Transformer Engine's whose vocabulary is split over ranks, without tp_group=.
        """
        if isinstance(module, torch.Tensor):
            return cls(module, **options)
        what = 'Head.of: module is a %s' % type(module).__name__
        if hasattr(module, 'base_layer') and not (getattr(module, 'merged', False) or getattr(module, 'disable_adapters', False)):
            lora = _lora_of(module)
            if lora is not None and options.get('lora') is not None:
                raise ArgumentError("%s with a LoRA, and lora= is given; pass one of them" % what)
            return cls.of(module.base_layer, **{**options, **({} if lora is None else {'lora': lora})})
        weight, bias = getattr(module, 'weight', None), getattr(module, 'bias', None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 and not hasattr(weight, 'ds_tensor'):
            raise ArgumentError("%s, whose weight is %s, expected a module with a weight [Vl, H], such as an nn.Linear%s" % (
                what, list(weight.shape) if isinstance(weight, torch.Tensor) else 'a ' + type(weight).__name__,
                '; get_output_embeddings() returns that of this one' if hasattr(module, 'get_output_embeddings') else ''))
        if getattr(weight, 'tensor_model_parallel', False) and getattr(weight, 'partition_dim', -1) == 0 and 'tp_group' not in options:
            whole = next((n for n in (getattr(module, name, None) for name in ('output_size', 'num_embeddings')) if n is not None), None)
            if weight.shape[0] != whole and getattr(module, 'tp_size', None) != 1:
                raise ArgumentError("%s, whose weight %s is a part of the vocabulary%s, expected tp_group=, the ranks that share it, or "
                                    "tp_group=None, if the call has it" % (
                                        what, list(weight.shape), '' if whole is None else ' of %s' % whole))
        return cls(weight, bias, **options)


def _lora_of(module: Any) -> Any:
    """(A, B, scale) of a layer of peft's, or None if no adapter of its is active. ValueError: an adapter that is more than that."""
    def refuse(why: str) -> Any:
        raise ArgumentError(
            "Head.of: module is a %s.%s, an adapter over a base layer, %s: a loss of its weight would leave the adapter out, in the "
            "loss and in training; merge() it, leave the head out of target_modules, or put it into modules_to_save" % (
                type(module).__module__, type(module).__name__, why))
    known = getattr(module, 'lora_A', None)
    if not hasattr(known, 'keys') or not hasattr(module, 'lora_B') or not hasattr(module, 'scaling'):
        refuse("and no LoRA")
    active = [name for name in module.active_adapters if name in known]
    for name in module.active_adapters:
        if name in getattr(module, 'lora_embedding_A', ()):
            refuse("which has a LoRA of an embedding, '%s'" % name)
        if name in getattr(module, 'lora_variant', ()) or getattr(module, 'use_dora', {}).get(name):
            refuse("whose '%s' is no plain LoRA but a variant of it (DoRA)" % name)
    if getattr(module, 'fan_in_fan_out', False):
        refuse("whose weight is [H, Vl]")
    parts = []
    for name in active:
        a, b, dropout = known[name], module.lora_B[name], module.lora_dropout[name]
        if getattr(a, 'bias', None) is not None or getattr(b, 'bias', None) is not None:
            refuse("whose '%s' has a bias" % name)
        if module.training and getattr(dropout, 'p', 0):
            refuse("whose '%s' drops out hidden states (lora_dropout=%g) while it trains, which is not made here; expected "
                   "lora_dropout=0 or eval()" % (name, dropout.p))
        parts.append((a.weight, b.weight, float(module.scaling[name])))
    if len(parts) < 2:
        return parts[0] if parts else None
    if any(hasattr(t, 'ds_tensor') and t.numel() == 0 for a, b, _ in parts for t in (a, b)):
        refuse("of which %s are active and DeepSpeed's ZeRO-3 has the factors, which can not be laid one behind the other; expected "
               "one active adapter (set_adapter)" % ' and '.join("'%s'" % name for name in active))
    return torch.cat([a * scale for a, _, scale in parts]), torch.cat([b for _, b, _ in parts], 1), 1.0


FIELDS = tuple(field.name for field in dataclasses.fields(Head))
PLAIN = Head(cast(torch.Tensor, None))


def factors_of(head: Head) -> tuple[Any, ...]:
    """A and B of its LoRA, if there are any."""
    lora: Any = head.lora
    return lora[:2] if isinstance(lora, tuple) else ()


def read(what: Named, weight: Any, tp_group: Any) -> tuple[Head, Any, Any, Any]:
    """(what is true of the head, weight, bias, tp_group) of an argument that is a Head or a weight"""
    if not isinstance(weight, Head):
        return PLAIN, weight, None, tp_group
    if tp_group is None:
        tp_group = weight.tp_group
    elif weight.tp_group is not None:
        raise ArgumentError("%s: tp_group is given, and the Head has one; pass one of them" % what)
    return weight, weight.weight, weight.bias, tp_group


def partitioned(weight: Any, group: Any) -> tuple[Any, Any, int]:
    """(this rank's elements, the group that shares them, all rows) of a parameter of DeepSpeed's
    ZeRO-3, which has no elements itself while no module of DeepSpeed's gathers it. Its gradient is added to
    ds_tensor.grad, because autograd would want one without elements."""
    held = weight.ds_tensor
    part = held.detach()

    def add(g: Any) -> None:
        with torch.no_grad():
            held.grad = g.clone() if held.grad is None else held.grad.add_(g)
    if weight.requires_grad and torch.is_grad_enabled():
        part.requires_grad_().register_hook(add)
    if hasattr(weight, 'main_grad'):
        part.main_grad = weight.main_grad
    return part, weight.ds_process_group if group is None else group, weight.ds_shape[0]
