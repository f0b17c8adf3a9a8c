# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportArgumentType=false
"""Changes of the context-parallel cut inside a hybrid model, under the names of Megatron-LM's dev branch (its
context_parallel_layout): relayout() with its modes and its PackedSeqParams. Import them from colobridge.megatron."""
from collections.abc import Callable
from typing import Any, Literal

import torch

from .errors import ArgumentError
from .torch.ranks import size_and_rank
from .torch.relayout import relayout
from .torch.tensors import said

Mode = Literal['zigzag', 'contiguous']
_MODES = ('zigzag', 'contiguous')


def _mode(name: str, given: Any) -> None:
    if given not in _MODES:
        raise ArgumentError("%s is %r, expected 'zigzag' or 'contiguous'" % (name, given))


def _group(given: Any, asked: str, needed: bool) -> Any:
    """@given, or Megatron's own, if it runs with global state."""
    if given is not None or not needed:
        return given
    import sys
    state = sys.modules.get('megatron.core.parallel_state')
    if state is None or not state.model_parallel_is_initialized():
        raise ArgumentError("%s is None, and megatron.core.parallel_state has none; pass the language model's group" % asked)
    return state.get_context_parallel_group() if asked == 'cp_group' else state.get_tensor_model_parallel_group()


def _packed(params: Any) -> Any:
    """cu_seqlens of packed sequences with their padding; None: the batch is dense."""
    if params is None or getattr(params, 'qkv_format', 'thd') != 'thd':
        return None
    padded = getattr(params, 'cu_seqlens_q_padded', None)
    return params.cu_seqlens_q if padded is None else padded


def prebuild_thd_cp_partition_routes(packed_seq_params: Any, cp_group: Any = None, *, device: Any = None) -> tuple[int, ...]:
    """The lengths of a packed batch on the host, for convert_cp_partition_mode(thd_cp_partition_route=), which then reads no
    tensor of a GPU, in any layer of the step.

    Args:
        packed_seq_params: Megatron's, with cu_seqlens_q_padded or cu_seqlens_q: integers [sequences + 1], the same on all
            ranks.
        cp_group: as upstream; not needed.
        device: as upstream; not needed.

    Returns:
        The cumulative lengths [sequences + 1].

    Raises:
        ValueError: packed_seq_params are not of a packed batch.
    """
    cu = _packed(packed_seq_params)
    if cu is None:
        raise ArgumentError("prebuild_thd_cp_partition_routes: packed_seq_params has qkv_format %r, expected 'thd'"
                            % getattr(packed_seq_params, 'qkv_format', None))
    return tuple(cu.tolist() if isinstance(cu, torch.Tensor) else cu)


def convert_cp_partition_mode(x: torch.Tensor, *, source_partition_mode: Mode, target_partition_mode: Mode, seq_dim: int = 0,
                              cu_seqlens: Any = None, sequence_parallel: bool = False, cp_group: Any = None,
                              tp_group: Any = None, tp_cp_group: Any = None,
                              thd_cp_partition_route: Any = None) -> torch.Tensor:
    """x by another cut over context ranks; with gradients. All ranks of the groups call.

    Args:
        x: this rank's rows, [.., rows, ..], of any dtype that a bridge carries.
        source_partition_mode: the cut of x: "zigzag", or "contiguous": one interval of the whole packed axis, or of each sample
            of a dense batch.
        target_partition_mode: the cut of the result, such a one.
        seq_dim: the axis of rows. Axes before it count samples of a dense batch; a packed one has size 1 there.
        cu_seqlens: integers [sequences + 1] of a packed batch, padding included; None: the batch is dense.
        sequence_parallel: rows are cut over tp_group, too; one exchange over both groups.
        cp_group: the context ranks: a torch process group; None: Megatron's own.
        tp_group: the ranks of sequence parallelism: a torch process group; None: Megatron's own.
        tp_cp_group: as upstream; not needed.
        thd_cp_partition_route: what prebuild_thd_cp_partition_routes() made, in the place of cu_seqlens.

    Returns:
        The rows that this rank holds by target_partition_mode; x itself if the modes are one, or there is one context rank.

    Raises:
        ValueError: a mode of another name, a group that is missing, lengths that the ranks do not divide, other shapes.
        MismatchError: ranks brought other lengths.
        RuntimeError: another rank failed.
        TimeoutError: a rank did not come.
    """
    _mode('source_partition_mode', source_partition_mode)
    _mode('target_partition_mode', target_partition_mode)
    cp = _group(cp_group, 'cp_group', True)
    if source_partition_mode == target_partition_mode or size_and_rank(cp, 'cp_group')[0] == 1:
        return x
    lengths = cu_seqlens if thd_cp_partition_route is None else thd_cp_partition_route
    # a dense sample is one sequence: its contiguous cut is a block of it
    modes = [mode if lengths is not None or mode == 'zigzag' else 'block'
             for mode in (source_partition_mode, target_partition_mode)]
    return relayout(x, lengths, *modes, group=cp, tp_group=_group(tp_group, 'tp_group', True) if sequence_parallel else None,
                    dim=seq_dim)


class CpPartitionModeConverter:
    """Converts the tensors of a layer, and back.

    Args:
        packed_seq_params: Megatron's of this batch; None: it is dense. Its cp_group, of dynamic context parallelism, goes
            before cp_group.
        source_partition_mode: "zigzag" or "contiguous", the cut of the tensors.
        target_partition_mode: "zigzag" or "contiguous", the cut of the results.
        config: Megatron's, of which context_parallel_size is asked if there is no group; may be None.
        cp_group: as in convert_cp_partition_mode().
        tp_group: as in convert_cp_partition_mode().
        tp_cp_group: as in convert_cp_partition_mode().

    Raises:
        ValueError: a mode of another name, a group that is missing.
    """

    def __init__(self, *, packed_seq_params: Any, source_partition_mode: Mode, target_partition_mode: Mode, config: Any,
                 cp_group: Any = None, tp_group: Any = None, tp_cp_group: Any = None):
        _mode('source_partition_mode', source_partition_mode)
        _mode('target_partition_mode', target_partition_mode)
        own = getattr(packed_seq_params, 'cp_group', None)
        needed = getattr(config, 'context_parallel_size', 2) > 1
        self.cp_group = own if own is not None else _group(cp_group, 'cp_group', needed)
        self.tp_group, self.source_partition_mode, self.target_partition_mode = (
            tp_group, source_partition_mode, target_partition_mode)
        self.cu_seqlens = _packed(packed_seq_params)

    @property
    def conversion_needed(self) -> bool:
        """Do the modes differ, and is there more than one context rank."""
        return self.source_partition_mode != self.target_partition_mode and \
            size_and_rank(self.cp_group, 'cp_group')[0] > 1

    def convert(self, value: Any, *, seq_dim: int | Callable[[torch.Tensor], int] = 0, sequence_parallel: bool = False) -> Any:
        """Converts tensors in nested tuples, lists and dicts.

        Args:
            value: a tensor [.., rows, ..], None, or tuples, lists and dicts of them.
            seq_dim: the axis of rows; or a function of a tensor that tells its own.
            sequence_parallel: as in convert_cp_partition_mode().

        Returns:
            The same of converted tensors; None stays None. value itself if nothing has to be converted.

        Raises:
            ValueError: something else than a tensor; as convert_cp_partition_mode().
        """
        if value is None or not self.conversion_needed:
            return value
        if isinstance(value, (tuple, list)):
            made = [self.convert(part, seq_dim=seq_dim, sequence_parallel=sequence_parallel) for part in value]
            return type(value)(*made) if hasattr(value, '_fields') else type(value)(made)
        if isinstance(value, dict):
            return {key: self.convert(part, seq_dim=seq_dim, sequence_parallel=sequence_parallel) for key, part in value.items()}
        if not isinstance(value, torch.Tensor):
            raise ArgumentError("CpPartitionModeConverter: value is %s, expected a torch.Tensor, None, or tuples and lists of "
                                "them" % said(value, '%(shape)s'))
        return convert_cp_partition_mode(
            value, source_partition_mode=self.source_partition_mode, target_partition_mode=self.target_partition_mode,
            seq_dim=seq_dim(value) if callable(seq_dim) else seq_dim, cu_seqlens=self.cu_seqlens,
            sequence_parallel=sequence_parallel, cp_group=self.cp_group, tp_group=self.tp_group)

    def back(self) -> 'CpPartitionModeConverter':
        """The converter back."""
        back = object.__new__(type(self))
        back.__dict__.update(self.__dict__, source_partition_mode=self.target_partition_mode,
                             target_partition_mode=self.source_partition_mode)
        return back


def convert_module_input_tensors_cp_partition_mode(
        *, hidden_states: torch.Tensor, packed_seq_params: Any, target_partition_mode: Mode, sequence_parallel: bool,
        config: Any, cp_group: Any = None, tp_group: Any = None, tp_cp_group: Any = None, attention_mask: Any = None,
        attention_bias: Any = None, key_value_states: Any = None) -> tuple[torch.Tensor, CpPartitionModeConverter | None]:
    """A layer's hidden states in the mode that it wants, and the converter back.

    The mode that they have is packed_seq_params.cp_partition_mode, or config.cp_partition_mode, or "zigzag".

    Args:
        hidden_states: [rows, batch, hidden], of any dtype that a bridge carries.
        packed_seq_params: Megatron's of this batch; None: it is dense.
        target_partition_mode: "zigzag" or "contiguous".
        sequence_parallel: as in convert_cp_partition_mode().
        config: as in CpPartitionModeConverter.
        cp_group: as in CpPartitionModeConverter.
        tp_group: as in CpPartitionModeConverter.
        tp_cp_group: as in CpPartitionModeConverter.
        attention_mask: None across a conversion.
        attention_bias: None across a conversion.
        key_value_states: None across a conversion.

    Returns:
        (the hidden states, the converter back); the latter is None if they are in that mode already.

    Raises:
        ValueError: a dense mask, a bias or key-value states across a conversion: they would need a cut of their own. As
            convert_cp_partition_mode().
    """
    source = getattr(packed_seq_params, 'cp_partition_mode', None) or getattr(config, 'cp_partition_mode', None) or 'zigzag'
    converter = CpPartitionModeConverter(packed_seq_params=packed_seq_params, source_partition_mode=source,
                                         target_partition_mode=target_partition_mode, config=config, cp_group=cp_group,
                                         tp_group=tp_group, tp_cp_group=tp_cp_group)
    if not converter.conversion_needed:
        return hidden_states, None
    for name, given in (('attention_mask', attention_mask), ('attention_bias', attention_bias),
                        ('key_value_states', key_value_states)):
        if given is not None:
            raise ArgumentError("convert_module_input_tensors_cp_partition_mode: %s is given, and hidden_states change from "
                                "%s to %s; expected None" % (name, source, target_partition_mode))
    return converter.convert(hidden_states, sequence_parallel=sequence_parallel), converter.back()
