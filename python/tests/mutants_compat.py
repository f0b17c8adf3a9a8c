# SPDX-License-Identifier: Apache-2.0
"""Of mutants.py: bugs in colobridge.compat."""

DROP_INS = {
    'the last window of a sequence has the first token behind it': (
        'compat/nemo_rl_groups.py', 'if comm.rank + 1 < comm.size:\n            last = firsts[comm.rank + 1]', 'if True:\n            last = firsts[(comm.rank + 1) % comm.size]',
        'test_compat_groups.py', 'next_position'),
    'whole sequences take their own part of the gradient': (
        'compat/nemo_rl_groups.py', 'count, comm, True).movedim', 'count, comm, False).movedim', 'test_compat_groups.py', 'zigzag_parts'),
    'packed sequences add gradients': (
        'compat/skyrl.py', 'with_context(rows, cu, count, comm, False)', 'with_context(rows, cu, count, comm, True)', 'test_compat_groups.py',
        'packed_sequences_of'),
    'log-softmax of shards has the gradient of its own columns': (
        'compat/collectives.py', 'sums = sums if comm is None else summed(sums, comm)', 'pass', 'test_compat_groups.py', 'columns_of'),
    'a sum over a group sums gradients, too': (
        'compat/collectives.py', '@Sum.adjoint\ndef _(ctx: Any, g: Any) -> Any:\n    return g, None', '@Sum.adjoint\ndef _(ctx: Any, g: Any) -> Any:\n    return 2 * g, None',
        'test_compat_groups.py', 'sums_over'),
    'columns of other shards are those of this one': (
        'compat/nemo_rl_groups.py', '.masked_fill(~mine, 0.0)\n    return found', '\n    return found', 'test_compat_groups.py', 'columns_of'),
    'a draft is compared with the k ids of one shard': (
        'compat/skyrl.py', 'distill(student, teacher, tp_group=group,', 'distill(student, teacher, tp_group=None,', 'test_compat_groups.py', 'against_a_teacher'),
    'a draft reads what its mask leaves out': (
        'compat/skyrl.py', ', mask=mask != 0).ce', ').ce', 'test_compat_groups.py', 'against_a_teacher'),
    'columns of a DTensor are as many as the last rank has': (
        'compat/nemo_rl.py', 'rank() * -(-vocab // group.size()), vocab)', 'rank() * logits.shape[-1], vocab)', 'test_compat_groups.py', 'dtensors'),
    'the z-loss of Liger has class weights': (
        'compat/liger.py', 'None if z_loss is None else z_loss / valid', 'None if z_loss is None else z_loss / den', 'test_compat_liger.py', 'besides'),
    'a class weight of 0 makes the loss NaN': (
        'compat/liger.py', 'loss / den.masked_fill(den == 0, 1)', 'loss / den', 'test_compat_liger.py', 'no_weight'),
    'sequence parallelism of the fused cross entropy is ignored': (
        'compat/megatron.py', "'reduce_scatter' if sequence_parallel else 'all_reduce'", "'all_reduce'", 'test_compat_groups.py', 'megatrons'),
    'distillation has the last position': (
        'compat/nemo_rl.py', 'context_parallel_group)[:, :length - 1] for', 'context_parallel_group)[:, :length] for', 'test_compat_groups.py', 'teachers_ids'),
    'equal shards are those of a whole DTensor': (
        'compat/shared.py', "if hasattr(weight, 'placements'):", 'if False:', 'test_torch_dtensor.py', 'drop_ins'),
    'the mean of the logits is their log-sum-exp': (
        'compat/trl.py', "'mean_logits': 'mean_logits'", "'mean_logits': 'lse'", 'test_trl.py', 'of_fp64'),
    'logits of a chunk are not bound by TRL\'s tile': (
        'compat/trl.py', 'tokens = max(1, _TILE * chunk_size // max(len(weight), 1))', 'tokens = max(1, len(hidden))', 'test_trl.py',
        'than_the_tile'),
    'shards of a head of ZeRO-3 have no rows': (
        'compat/shared.py', "getattr(weight, 'ds_shape', weight.shape)[0]", 'weight.shape[0]', 'test_compat.py', 'zero_3'),
    'log sum p^2 is no logarithm': (
        'compat/trl.py', "found['sum_p2'] = found['sum_p2'].log()", 'pass', 'test_trl.py', 'of_fp64'),
    'a causal LM is fused whatever its head gets': (
        'compat/transformers.py', "if 'hidden' not in seen or not torch.equal(seen['hidden'], args[0]):", "if 'hidden' not in seen:", 'test_transformers.py',
        'cannot_be_fused'),
    'labels of a fused model are not shifted': (
        'compat/transformers.py', 'torch.nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]', 'labels', 'test_transformers.py',
        'are_those_of_the_model'),
    'a fused model divides by the tokens that it has': (
        'compat/transformers.py', "reduction='mean' if items is None else 'sum')", "reduction='mean')", 'test_transformers.py', 'are_those_of_the_model'),
    'products of a fused model have rows for labels that do not count': (
        'compat/transformers.py', "{'max_valid': count(), **fused.options}", 'fused.options', 'test_transformers.py', 'rows_for_the_labels'),
    'a star imports what compat is made of': (
        'compat/__init__.py', '__all__ = [', '_all = [', 'test_abi.py', 'star_imports'),
    'log-probabilities of sampled ids are as wide as the logits': (
        'compat/shared.py', 'return f32(outputs(what', 'return (outputs(what', 'test_compat_names.py', 'are_in_fp32'),
    'the dense gather does not add over cp': (
        'compat/packed.py', 'if ctx.add:', 'if False:', 'test_compat.py',
        'test_dense_batches_over_context_parallel_ranks'),
    'a target that was not kept has a log-probability': (
        'compat/shared.py', "logp + torch.zeros_like(logp).masked_fill(lost, -float('inf'))", 'logp', 'test_compat_names.py',
        'test_sampling_parameters'),
    'a target that was not kept is in the list': (
        'compat/shared.py', 'target.masked_fill(lost, -1)', 'target', 'test_compat_nemo_rl.py', 'next_tokens and 1-1-dense-4'),
    'a row of NaN has a list': (
        'compat/shared.py', 'Support(ids), vocab)', 'Support(ids.clamp(min=0)), vocab)', 'test_sampling.py',
        'test_rows_without'),
    'targets that are rolled are rolled again': (
        'compat/shared.py', 'rolled = target if pre_rolled else target[places.after]', 'rolled = target[places.after]',
        'test_compat_names.py', 'test_packed_sequences_over'),
    'pre-rolled targets of a part are cut again': (
        'compat/shared.py', 'if given != source.shape[1]:', 'if cp > 1:', 'test_compat_nemo_rl.py',
        'next_tokens and 1-2-packed-None-1'),
    'pre-rolled targets are those of all ranks': (
        'compat/shared.py', 'given * cp if pre_rolled and source.shape[1:2] == (given,) else given', 'given',
        'test_compat_nemo_rl.py', 'next_tokens and 1-2-packed-None-1'),
    'the entropy that is summed up has the other sign': (
        'compat/nemo_rl.py', 'return -f32(entropy_of', 'return f32(entropy_of', 'test_compat_nemo_rl.py', 'test_gathered'),
    'ids of no rank are gathered': (
        'compat/nemo_rl.py', '.masked_fill((global_indices < 0) | (global_indices >= vocab), -1)', '', 'test_compat_nemo_rl.py',
        'test_gathered'),
    'each rank samples from the first columns': (
        'compat/shared.py', 'start = size_and_rank(group, what)[1] * logits.shape[-1]', 'start = 0', 'test_compat_nemo_rl.py',
        'test_classes'),
    'the packed gather of NeMo-RL takes its own part': (
        'compat/nemo_rl.py', 'inference_only, what, sampling_params), True, target_is_pre_rolled)',
        'inference_only, what, sampling_params), False, target_is_pre_rolled)', 'test_compat_names.py',
        'test_packed_sequences_over'),
    'the mean of entropies is over a ranks own actions': (
        'compat/shared.py', 'comm.all_reduce(sums, stream=stream_of(device))', 'pass', 'test_compat_names.py',
        'test_packed_sequences_over'),
    'actions are read from the end of a packed row': (
        'compat/packed.py', 'torch.nn.functional.pad(values, (0, 2))', 'torch.nn.functional.pad(values, (2, 0))',
        'test_compat_names.py', 'test_packed_sequences_over'),
    'the gradient of hidden states is added over tp': (
        'compat/shared.py', "vocab=vocab, d_hidden='partial')", 'vocab=vocab)',
        'test_compat_names.py', 'test_verls_functions'),
    'the packed gather adds over cp': (
        'compat/packed.py', 'if ctx.add:', 'if True:', 'test_compat.py',
        'test_packed_sequences_over_context_parallel_ranks'),
    'the gradient of logp is written over logits that entropy reads': (
        'compat/shared.py', "('logp',), tp_group=group,", "('logp',), tp_group=group, in_place=True,", 'test_compat.py',
        'test_logp_and_entropy_of_the_same_logits'),
    'entropy is f32 whatever the logits are': (
        'compat/skyrl.py', 'what, chunk_memory_mb).to(\n        vocab_parallel_logits.dtype)', 'what, chunk_memory_mb)', 'test_compat.py',
        'test_logp_and_entropy_of_the_same_logits'),
    'no memory for chunks is enough': (
        'compat/shared.py', 'if chunk_memory_mb <= 0:', 'if chunk_memory_mb < 0:', 'test_compat.py',
        'test_one_ranks_chunk_memory'),
    'sub-sequences follow each other without their padding': (
        'compat/packed.py', 'first = cu[j] - cu[opened]', 'first = 0 * cu[j]', 'test_compat.py', 'test_sub_sequences_start'),
    'sub-sequences find their place in a mask': (
        'compat/packed.py', 'attention_mask = None  # the original', 'pass  # the original', 'test_compat.py',
        'test_sub_sequences_are_where'),
    'targets that no rank holds are ignored, gradient and all': (
        'compat/shared.py', 'lenient_targets=True, ignore_index=NONE_IGNORED, chunk', 'lenient_targets=True, ignore_index=-100, chunk',
        'test_compat.py', 'test_chunked_and_unchunked_logprobs_agree_with_pytorch'),
    'smoothing as PyTorch has it': (
        'compat/megatron.py', 'megatron_smoothing=True', 'megatron_smoothing=False', 'test_compat.py',
        'test_entropy_and_cross_entropy'),
    'smoothing over the own columns is that of all': (
        'compat/megatron.py', 'local_smoothing=bool(local_smoothing)', 'local_smoothing=False', 'test_compat.py',
        'test_local_smoothing'),
    'hidden states have no illegal targets': (
        'compat/shared.py', 'int(chunk or 0), True)', 'int(chunk or 0), False)', 'test_compat.py', 'where_no_rank_holds'),
    'the logits of the head are not scaled': (
        'compat/trl.py', '(float(logit_scale), float(final', '(1.0, float(final', 'test_compat.py',
        'test_head_and_loss_in_chunks'),
    'num_items_in_batch is not heard': (
        'compat/trl.py', 'if num_items_in_batch is not None:', 'if False:', 'test_compat.py',
        'test_head_and_loss_in_chunks'),
    'n_correct is an integer': (
        'compat/trl.py', 'f32(right.sum())', 'right.sum()', 'test_compat.py', 'test_head_and_loss_in_chunks'),
    'labels go before shift_labels': (
        'compat/trl.py', 'if shift_labels is None:', 'if labels is not None:', 'test_compat.py',
        'test_head_and_loss_of_labels_and_shift_labels'),
    'tokens that do not count are multiplied': (
        'compat/trl.py', ", max_valid=most)", ')', 'test_compat.py',
        'test_head_and_loss_of_few_tokens'),
    'the group that is set for entropies hears of no refusal': (
        'compat/shared.py', '@eager\ndef entropy_of(', 'def entropy_of(', 'test_refusals.py', 'that_is_set'),
    'log-probabilities of large logits are differences of large numbers': (
        'compat/collectives.py', 'y = (y - most) / temperature', 'y = y / temperature - most / temperature',
        'test_compat_groups.py', 'large_logits'),
    'log-probabilities are relative to the largest logit of a rank': (
        'compat/collectives.py', "comm.all_reduce(most, op='max', stream=stream_of(most.device))", 'pass', 'test_compat_groups.py', 'large_logits'),
    'tokens of context ranks are shifted in the order of their ranks': (
        'compat/nemo_rl.py', 'whole = Columns.apply(ids, comm)[:, places].roll(-1, 1)', 'whole = Columns.apply(ids, comm).roll(-1, 1)[:, places]',
        'test_compat_groups.py', 'dtensors'),
    'log-probabilities of context ranks are in the order of their ranks': (
        'compat/nemo_rl.py', 'return Columns.apply(logp, comm)[:, places][:, :-1]', 'return Columns.apply(logp, comm)[:, :-1]',
        'test_compat_groups.py', 'dtensors'),
    'a draft learns from a teacher of the position before': (
        'compat/skyrl.py', 't.roll(-roll_shift, 1)', 't.roll(roll_shift, 1)', 'test_compat_groups.py', 'against_a_teacher'),
    'a draft of less than a token is divided by less than 1': (
        'compat/skyrl.py', 'total.clamp(min=1.0)', 'total.clamp(min=1e-9)', 'test_compat_groups.py', 'against_a_teacher'),
    'the probability that scales a token has a gradient': (
        'compat/liger.py', "made['logp'].detach().exp()", "made['logp'].exp()", 'test_compat_liger.py', 'scaled_by and mean'),
    'the z-loss of a token is not scaled': (
        'compat/liger.py', 'loss * p, None if z_loss is None else z_loss * p', 'loss * p, z_loss', 'test_compat_liger.py', 'scaled_by and mean'),
}
