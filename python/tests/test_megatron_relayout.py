# SPDX-License-Identifier: Apache-2.0
"""Megatron's names for another cut over context ranks, against indices by hand."""
from collections import namedtuple
from types import SimpleNamespace

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

from colobridge.megatron import (CpPartitionModeConverter, convert_cp_partition_mode,  # noqa: E402
                                 convert_module_input_tensors_cp_partition_mode, prebuild_thd_cp_partition_routes)
from world import refused  # noqa: E402

LENGTHS = [8, 4, 12]


def rows(mode, lengths, cp, c):
    """Of context rank c of cp, by index of the whole axis."""
    if mode == 'contiguous':
        each = sum(lengths) // cp
        return list(range(c * each, (c + 1) * each))
    out, at = [], 0
    for n in lengths:
        chunk = n // (2 * cp)
        out += [at + c * chunk + i for i in range(chunk)] + [at + n - (c + 1) * chunk + i for i in range(chunk)]
        at += n
    return out


def groups(rank):
    cp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return cp, tp, rank // 2, rank % 2


def params(lengths, **more):
    cu = torch.tensor([sum(lengths[:k]) for k in range(len(lengths) + 1)], dtype=torch.int32)
    return SimpleNamespace(qkv_format='thd', cu_seqlens_q=cu - 1, cu_seqlens_q_padded=cu, **more)


def packed(rank):
    """[rows, 1, hidden], and with sequence parallelism each rank of tp half of them; gradients go back the same way."""
    cp, tp, c, t = groups(rank)
    whole = torch.randn(sum(LENGTHS), 1, 3, generator=torch.Generator().manual_seed(1))
    of = params(LENGTHS)
    route = prebuild_thd_cp_partition_routes(of)
    assert route == (0, 8, 12, 24)
    for source, target in (('zigzag', 'contiguous'), ('contiguous', 'zigzag')):
        for sp in (False, True):
            def mine(mode):
                part = whole[rows(mode, LENGTHS, 2, c)]
                return part.chunk(2)[t] if sp else part
            x = mine(source).clone().requires_grad_()
            how = dict(source_partition_mode=source, target_partition_mode=target, sequence_parallel=sp, cp_group=cp, tp_group=tp)
            for lengths in ({'cu_seqlens': of.cu_seqlens_q_padded}, {'thd_cp_partition_route': route}):
                y = convert_cp_partition_mode(x, **lengths, **how)
                assert torch.equal(y, mine(target)), (source, sp)
            y.backward(mine(target) * 2)
            assert torch.equal(x.grad, 2 * mine(source)), (source, sp)
            back = convert_cp_partition_mode(x.transpose(0, 1), seq_dim=1, cu_seqlens=route, **how)
            assert torch.equal(back, mine(target).transpose(0, 1))
    same = convert_cp_partition_mode(x, source_partition_mode='zigzag', target_partition_mode='zigzag', cp_group=cp)
    assert same is x


def test_packed_rows_change_their_cut(world):
    world.run(packed)


def dense(rank):
    """[s, b, h]: each sample is cut by itself."""
    cp, tp, c, t = groups(rank)
    whole = torch.randn(16, 2, 3, generator=torch.Generator().manual_seed(2))
    x, want = (whole[rows(mode, [16], 2, c)] for mode in ('zigzag', 'contiguous'))
    y = convert_cp_partition_mode(x, source_partition_mode='zigzag', target_partition_mode='contiguous', cp_group=cp)
    assert torch.equal(y, want)
    y = convert_cp_partition_mode(x.transpose(0, 1), seq_dim=1, source_partition_mode='zigzag',
                                  target_partition_mode='contiguous', cp_group=cp)
    assert torch.equal(y, want.transpose(0, 1))


def test_a_dense_sample_is_cut_by_itself(world):
    world.run(dense)


Pair = namedtuple('Pair', 'mask x')


def a_layer(rank):
    """A layer's inputs, nested values, and the way back."""
    cp, tp, c, t = groups(rank)
    of, config = params(LENGTHS), SimpleNamespace(context_parallel_size=2)
    whole = torch.arange(24.).view(24, 1, 1)
    zigzag, straight = (whole[rows(mode, LENGTHS, 2, c)] for mode in ('zigzag', 'contiguous'))
    how = dict(packed_seq_params=of, target_partition_mode='contiguous', sequence_parallel=False, config=config, cp_group=cp)
    got, back = convert_module_input_tensors_cp_partition_mode(hidden_states=zigzag, **how)
    assert torch.equal(got, straight) and torch.equal(back.convert(got), zigzag)
    got, back = convert_module_input_tensors_cp_partition_mode(hidden_states=zigzag, **dict(how, target_partition_mode='zigzag'))
    assert got is zigzag and back is None
    of.cp_partition_mode = 'contiguous'
    assert convert_module_input_tensors_cp_partition_mode(hidden_states=straight, **how)[1] is None
    del of.cp_partition_mode
    converter = CpPartitionModeConverter(packed_seq_params=of, source_partition_mode='zigzag',
                                         target_partition_mode='contiguous', config=config, cp_group=cp)
    assert converter.conversion_needed
    flat = zigzag.view(1, -1)
    a, (b, none), pair = converter.convert((zigzag, [flat, None], Pair(None, zigzag)), seq_dim=lambda t: t.dim() == 2)
    assert torch.equal(a, straight) and torch.equal(b, straight.view(1, -1)) and none is None
    assert isinstance(pair, Pair) and torch.equal(pair.x, straight)
    everyone = dist.new_group([0, 1, 2, 3])  # of dynamic context parallelism: it goes before cp_group
    own = CpPartitionModeConverter(packed_seq_params=params([8, 16], cp_group=everyone), source_partition_mode='contiguous',
                                   target_partition_mode='zigzag', config=config, cp_group=cp)
    assert torch.equal(own.convert(whole[rows('contiguous', [8, 16], 4, rank)]), whole[rows('zigzag', [8, 16], 4, rank)])
    said = [refused(lambda given=given: convert_module_input_tensors_cp_partition_mode(hidden_states=zigzag, **how, **given))
            for given in ({'attention_mask': whole}, {'attention_bias': whole}, {'key_value_states': whole})]
    said.append(refused(lambda: converter.convert('x')))
    said.append(refused(lambda: convert_cp_partition_mode(zigzag, source_partition_mode='striped',
                                                          target_partition_mode='zigzag', cp_group=cp)))
    said.append(refused(lambda: convert_cp_partition_mode(zigzag, source_partition_mode='contiguous',
                                                          target_partition_mode='zigzag')))
    said.append(refused(lambda: convert_cp_partition_mode(
        zigzag, source_partition_mode='contiguous', target_partition_mode='zigzag', cp_group=cp, sequence_parallel=True)))
    said.append(refused(lambda: prebuild_thd_cp_partition_routes(SimpleNamespace(qkv_format='sbhd'))))
    return said


def test_a_layer_gets_its_mode_and_gives_it_back(world):
    for said in world.run(a_layer):
        for words, found in zip(('attention_mask is given', 'attention_bias is given', 'key_value_states is given',
                                 'expected a torch.Tensor, None', "source_partition_mode is 'striped'", 'cp_group is None',
                                 'tp_group is None', "qkv_format 'sbhd'"), said):
            assert words in found and found.startswith('ArgumentError'), (words, found)
