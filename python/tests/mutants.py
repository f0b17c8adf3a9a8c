# SPDX-License-Identifier: Apache-2.0
"""Bugs that are planted in the package, each with the test that must fail; test_mutants.py plants them. Those of bridges and
of what they stand on are in mutants_bridge.py."""
import sys

from mutants_bridge import BRIDGES

# name: (file, old, new, test file, test): old occurs once
MUTANTS = {
    'a program that the command becomes ignores closed pipes': (
        '__main__.py', 'signal.signal(ignored, signal.SIG_DFL)', 'pass', 'test_command.py', 'leaves_signals'),
    "help of the command has an example for this machine alone": (
        '__main__.py', ' --topology "package:2 pu:4"', ' --ranks-per-node 100000 --topology "package:2 pu:4"', 'test_command.py', 'examples'),
    'the command takes another build\'s programs': (
        '__main__.py', 'if library.exists() else [shutil.which(name)]', '+ [shutil.which(name)]', 'test_command.py',
        'says_where_it_looked'),
    'a rank without a record is not missed': (
        'flight.py', 'if rank not in records]', 'if False]', 'test_flight.py', 'left_no_record'),
    'a flight takes the operations of a rank without a record for alike': (
        'flight.py', 'alike\' if absent else', 'alike\' if not absent else', 'test_flight.py', 'left_no_record'),
    'what left the ring differs': (
        'flight.py', 'range(max(begun, default=1)', 'range(min(begun, default=1)', 'test_flight.py', 'from_where_all'),
    'operations of destroyed communicators are not numbered': (
        'flight.py', "int(record['ended'])", '0', 'test_flight.py', 'numbers_and_times'),
    'a record is written over what it is made of': (
        'flight.py', 'if any(os.path.exists(path) and', 'if any(False and', 'test_flight.py', 'write_over'),
    'the analyzer gets the first operations': (
        'flight.py', '[-LAST:]', '[:LAST]', 'test_flight.py', 'last_256'),
    'a flight blames ranks that still have a communicator': (
        'flight.py', 'what(rings[rank].get(number)), []).append(rank)', 'what(rings[rank].get(number)), []).append(rank)\n'
        "                else:\n                    alike.setdefault('nothing', []).append(rank)", 'test_flight.py', 'destroyed'),
    'a flight takes exchanges of two dtypes for alike': (
        'flight.py', "'exchange of %s' % op['dtype']", "'exchange'", 'test_flight.py', 'two_dtypes'),
    'two modules import each other': (
        'tensor.py', '    stride: list[int] = []', '    from .view import view as view\n    stride: list[int] = []', 'test_load.py',
        'in_a_circle'),
    'threads look for the library where no error is heard': (
        'comm.py', 'run_ranks = lib().colo_comm_threads_run', 'run_ranks = lambda *ranks: lib().colo_comm_threads_run(*ranks)',
        'test_load.py', 'threads_without'),
    'rows of a modality come without the text': (
        'megatron.py', 'segments, into=into)\n\n', 'segments)\n\n', 'test_megatron_ragged.py', 'modalities'),
    'each call of a packed bridge is prepared anew': (
        'torch/engine.py', 'made.src is src', 'made.src is None', 'test_torch_packed.py', 'prepared_once'),
    'segments are given to collectives': (
        'megatron.py', 'if given and self._exact:', 'if given:', 'test_megatron_ragged.py', 'without_exact'),
    'what one rank finds wrong in communicate() stays there': (
        'megatron.py', 'tell(why, (bridge,))', 'pass', 'test_refusals.py', 'communicate'),
    'a tower that one rank cannot make is waited for': (
        'torch/tower.py', '    @eager  # so that the others hear of an error\n', '', 'test_refusals.py', 'tower'),
    'a bridge that one rank cannot make is waited for': (
        'torch/engine.py', 'self._refuse(why, comm)', 'pass', 'test_refusals.py', 'new_bridge or new and bridge'),
    'tables that one rank lacks are waited for': (
        'torch/engine.py', '@eager  # all of it', '# all of it', 'test_refusals.py', 'tables'),
    'a bridge of its own that one rank cannot make is waited for': (
        'torch/engine.py', "if comm == 'own' and self._own is None and", 'if False and', 'test_refusals.py', 'of_its_own or own'),
    'what is no group is looked up in torch.distributed first': (
        'torch/ranks.py', 'not isinstance(group, dist.ProcessGroup)', 'False', 'test_torch_logprob.py', 'bad_arguments'),
    'a rank that knows no layout tells no rank': (
        'torch/engine.py', 'self._ranks = groups.group_ranks(self.group)', 'return', 'test_refusals.py', 'spec'),
    'temperatures of a graph get no gradient in silence': (
        'torch/compiled.py', "'group_weight', 'temperature', 'input'", "'group_weight', 'input'", 'test_torch_compiled.py',
        'flags and temperatures'),
    'temperatures of tokens with a gradient are taken': (
        'torch/support.py', 'if given.requires_grad and torch.is_grad_enabled():\n        raise ArgumentError("%s: %s requires', 'if False:\n        raise ArgumentError("%s: %s requires', 'test_torch_temperature.py', 'refused'),
    'temperatures lie as those of contiguous logits': (
        'torch/support.py', 'plan.rows.spread(heat.given.detach().to(torch.float32), 1.0)', 'heat.given.detach().to(torch.float32).contiguous()',
        'test_torch_temperature.py', 'any_strides'),
    'ranks do not compare temperatures': (
        'torch/alike.py', 'if heat is not None:', 'if False:',
        'test_torch_temperature.py', 'are_told'),
    'temperatures of ignored tokens are compared': (
        'torch/alike.py', '.masked_fill(ignored, 1.0)', '', 'test_torch_temperature.py', 'are_told'),
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
    'outputs that have no gradient get one in a graph': (
        'torch/logprob.py', 'if name not in DIFFERENTIABLE)\n\n\ndef names_of', 'if False)\n\n\ndef names_of', 'test_torch_compiled.py',
        'flags and logprob and outputs'),
    'names of outputs are numbers of a graph': (
        'torch/compiled.py', 'isinstance(value[0], str):  # names', 'False:', 'test_torch_compiled.py', 'flags and logprob and outputs'),
    'lse has no gradient': (
        'torch/logprob.py', "'ce', 'kl', 'lse', 'tail')", "'ce', 'kl', 'tail')", 'test_torch_outputs.py', 'z_loss'),
    'correct is a number': (
        'torch/logprob.py', "t.view(torch.bool) if name == 'correct' else t for", 't for', 'test_torch_outputs.py', 'whole_vocabulary'),
    'a mean over the vocabulary is taken of a support': (
        'torch/logprob.py', "if support is not None and 'mean_logits' in more:", 'if False:', 'test_torch_outputs.py', 'a_support'),
    'outputs have no order': (
        'torch/logprob.py', 'if not isinstance(more, (tuple, list)) or', 'if isinstance(more, str) or', 'test_torch_outputs.py', 'no_output'),
    'an output is asked for twice': (
        'torch/logprob.py', ' or len(set(more)) < len(more)', '', 'test_torch_outputs.py', 'no_output'),
    'a graph has no autocast': (
        'torch/compiled.py', ', under(asked.casts):', ':', 'test_torch_compiled.py', 'autocast_of_its_call'),
    'more dims are taken as tokens, not as PyTorch has them': (
        'torch/cross_entropy.py', 'if not 1 <= input.dim() <= 2:', 'if False:', 'test_torch_cross_entropy.py',
        'only_pytorch_takes'),
    'what one rank gives cross_entropy() that only PyTorch takes is waited for': (
        'torch/cross_entropy.py', '@operator(_alone)\ndef cross_entropy(', 'def cross_entropy(', 'test_torch_cross_entropy.py',
        'mistake_on_one_rank'),
    'the ranks that share a head do not hear what is wrong with linear_cross_entropy()': (
        'torch/calls.py', "head.bias, head.shard_group, head.tp_group", 'head.bias, head.shard_group', 'test_torch_cross_entropy.py', 'mistake_on_one_rank'),
    'the ranks of cross_entropy have means of their own': (
        'torch/cross_entropy.py', 'tp_group, reduce_group, vocab,', 'tp_group, None, vocab,', 'test_torch_cross_entropy.py',
        'over_ranks'),
    'linear_cross_entropy smooths nothing': (
        'torch/cross_entropy.py', 'of.scale, label_smoothing,', 'of.scale, 0.0,',
        'test_torch_cross_entropy.py', 'linear_layer'),
    'each rank weighs the first classes': (
        'torch/support.py', 'min(start, vocab) if len(given) == vocab else 0', '0', 'test_torch_cross_entropy.py', 'over_ranks'),
    'a mask is no part of what weighted tokens count': (
        'torch/nll.py', 'loss * weights, valid * weights, None', 'loss * weights, valid, None',
        'test_torch_cross_entropy.py', 'mask_and_a_z_loss'),
    'a linear loss counts tokens that a mask leaves out': (
        'torch/linear_plan.py', 'out = [t.reshape(-1) * weights for t in out]', 'out = [out[0].reshape(-1) * weights, out[1]]',
        'test_torch_cross_entropy.py', 'mask_and_a_z_loss'),
    'class weights with a gradient are taken': (
        'torch/support.py', 'if given.requires_grad and torch.is_grad_enabled():\n        raise ArgumentError("%s requires', 'if False:\n        raise ArgumentError("%s requires',
        'test_torch_cross_entropy.py', 'only_pytorch_takes'),
    'a copy of a loss has the options of the first': (
        'torch/modules.py', 'return _Options(self)', 'return self', 'test_torch_cross_entropy.py', 'modules_with_groups'),
    'class weights of a graph are constants': (
        'torch/compiled.py', ", 'weight.bias', 'class_weight'", ", 'weight.bias'", 'test_torch_compiled.py', 'class_weights'),
    'a graph of another autocast is taken': (
        'torch/compiled.py', 'autocasts(device),\n', '(),\n', 'test_torch_compiled.py', 'autocast_of_its_call'),
    'the sum of a graph has a gradient': (
        'torch/linear.py', "range(1 if options.get('mode', 'loss') == 'loss' else last,", 'range(last,', 'test_torch_compiled.py',
        'flags and linear_nll and loss'),
    'the tokens of a graph have a gradient': (
        'torch/nll.py', "fixed=lambda options: (2 + ('groups' in options),)", 'fixed=lambda options: ()', 'test_torch_compiled.py', 'flags and sum'),
    'a mask of a graph has a gradient': (
        'torch/compiled.py', 'else value.detach())', 'else value)', 'test_torch_compiled.py', 'flags and entropy'),
    'numbers of a graph are constants': (
        'torch/compiled.py', 'elif isinstance(value, float):', 'elif False:', 'test_torch_compiled.py', 'numbers_that_change'),
    'outputs of a graph lie as transposed logits do': (
        'torch/compiled.py', 't.detach().contiguous()', 't.detach()', 'test_torch_compiled.py', 'opcheck'),
    'each shape of a bridge is a graph': (
        'torch/engine.py', 'if isinstance(n, torch.SymInt) else 0', 'if False else 0', 'test_torch_compiled.py',
        'shapes_that_change'),
    'hidden states of tokens of its own are compared, too': (
        'torch/linear.py', 'if hidden.shape[:-1].numel() == target.numel():', 'if True:', 'test_torch_linear.py', 'own_tokens'),
    'a head group of one rank is another group': (
        'torch/placed.py', 'set(ranks or (torch.distributed.get_rank(),))', 'set(ranks or ())', 'test_torch_dtensor.py', 'one_rank'),
    'a bias of a drop-in is refused where its head is placed': (
        'torch/placed.py', "'lm_head_weight', 'lm_head_bias'", "'lm_head_weight'", 'test_torch_dtensor.py', 'drop_ins'),
    'all shapes of a bridge are cut evenly': (
        'torch/engine.py', 'if unit and n % unit == 0 else 0', 'if unit else 0', 'test_torch_compiled.py', 'are_symbols'),
    'rows of a bridge lie at their own positions': (
        'torch/engine.py', 'mapped or any(', 'any(', 'test_torch_compiled.py', 'are_symbols'),
    'a graph drops what its backward needs': (
        'torch/compiled.py', '_held[at] = ins, outs', '_held[at] = ins, [t.detach() for t in outs]', 'test_torch_compiled.py',
        'losses_in_a_graph'),
    'tables of a graph are others in each call': (
        'torch/compiled.py', 'requires_grad_(want) if t.is_floating_point() else t for', 'requires_grad_(want) for',
        'test_torch_compiled.py', 'relayout'),
    'lengths in a list are numbers of a graph': (
        'torch/compiled.py', 'if isinstance(value, list):', 'if False:', 'test_torch_compiled.py', 'relayout'),
    'a graph keeps what its backward needed': (
        'torch/compiled.py', 'weakref.finalize(token.untyped_storage(), _held.pop, at, None)', 'pass', 'test_torch_compiled.py',
        'opcheck'),
    'a graph\'s gradient is a part of another\'s memory': (
        'torch/compiled.py', 'g.clone() if g.untyped_storage().data_ptr() in others else g', 'g', 'test_torch_compiled.py',
        'a_bridge_in_a_graph'),
    'graphs of losses have outputs of the logits\' dtype': (
        'torch/logprob.py', 'return torch.float64 if dtype == torch.float64 else torch.float32', 'return torch.float32',
        'test_torch_compiled.py', 'opcheck'),
    'what writes over its logits goes into a graph': (
        'torch/compiled.py', "if given.get('inplace_backward') or", 'if', 'test_torch_compiled.py', 'writes_its_arguments'),
    'hidden states of a vocabulary\'s ranks are not compared': (
        'torch/linear.py', 'if comm.check_level > 1:', 'if False:', 'test_torch_linear.py', 'bring_other_things'),
    'targets of a vocabulary\'s ranks are not compared': (
        'torch/logprob.py', 'if not masked and comm.check_level > 1:', 'if False:', 'test_torch_linear.py', 'bring_other_things'),
    'ranks may weigh tokens otherwise': (
        'torch/alike.py', 'if weights is not None:', 'if False:', 'test_torch_linear.py', 'weigh_tokens'),
    'ranks may have other groups': (
        'torch/alike.py', 'if grouping is not None:', 'if False:', 'test_torch_linear.py', 'weigh_tokens'),
    'groups of ignored tokens are compared': (
        'torch/alike.py', '.long().masked_fill(ignored, 0)', '.long()', 'test_torch_linear.py', 'weigh_tokens'),
    'losses without a reduction may be weighed otherwise': (
        'torch/nll.py', 'beside=(weights,)))[0]', 'beside=()))[0]', 'test_torch_linear.py', 'weigh_tokens'),
    'hidden states of ignored tokens are compared': (
        'torch/alike.py', '[target.reshape(-1) != ignore_index]', '', 'test_torch_linear.py', 'bring_other_things'),
    **BRIDGES,
    'a head over tp is a head that its ranks share': (
        'torch/placed.py', 'if vocabulary in order:', 'if False:', 'test_torch_dtensor.py', 'mesh_of_one_dim and 16'),
    'a strided shard is cut before what it is behind': (
        'torch/placed.py', 'order.insert(place, i)', 'order.insert(0, i)', 'test_torch_dtensor.py', 'over_tensor_parallelism'),
    'copies of a head have gradients of their own': (
        'torch/placed.py', "comm.all_reduce(checked(g, 'gradient'), stream=stream_of(g.device))", 'pass',
        'test_torch_dtensor.py', 'mesh_of_two_dims and 16'),
    'ranks that bring the same tokens share a head': (
        'torch/placed.py', 'if len(same) > 1:', 'if False:', 'test_torch_dtensor.py', 'same_tokens'),
    'a head of FSDP2 has the sum where others have the mean': (
        'torch/placed.py', 'return ranks if own is None else own', 'return 1 if own is None else own',
        'test_torch_dtensor.py', 'unit_of_its_own and shape0'),
    'a head of FSDP2 has the mean where others have the sum': (
        'torch/placed.py', 'own = others.pop() if others else None', 'pass', 'test_torch_dtensor.py',
        'unit_of_its_own and shape0'),
    'grad_reduction of plain rows is not read': (
        'torch/linear.py', 'if of.grad_reduction is not None:', 'if False:', 'test_torch_dtensor.py', 'sum_or_a_mean'),
    'tokens of sequence parallelism are not gathered': (
        'torch/placed.py', 'if want != list(t.placements):', 'if False:', 'test_torch_dtensor.py', 'hidden_states_and'),
    'logits that all ranks have are shards': (
        'torch/placed.py', "given['tp_group'] = None", 'pass', 'test_torch_dtensor.py', 'test_logits and 23'),
    'a DTensor is read as the part that it is of': (
        'torch/placed.py', 'if name not in takes:', 'if False:', 'test_torch_dtensor.py', 'other_calls'),
    'the gradient of one row has strides that no tensor has': (
        'torch/placed.py', 'return g.as_strided(g.shape, strides) if g.is_contiguous()', 'return g if g.is_contiguous()',
        'test_torch_dtensor.py', 'strides_of_their_shape'),
    'a bridge takes a DTensor that src cuts in another way': (
        'torch/placed.py', 'if list(here) != list(want):', 'if False:', 'test_torch_dtensor.py', 'a_bridge_takes'),
    'equal shards are those of a whole DTensor': (
        'compat/shared.py', "if hasattr(weight, 'placements'):", 'if False:', 'test_torch_dtensor.py', 'drop_ins'),
    'a call fails while another thread imports DTensors': (
        'torch/functions.py', "getattr(sys.modules.get('torch.distributed.tensor'), 'DTensor', None)",
        "sys.modules['torch.distributed.tensor'].DTensor", 'test_torch_dtensor.py', 'another_thread'),
    'the gradient of an output may be a DTensor, which has no memory': (
        'torch/functions.py', 'if has_dtensor(grads):', 'if False:', 'test_torch_dtensor.py', 'other_calls'),
    'rows of over_chunks have the gradient of one rank': (
        'torch/placed.py', "comm.reduce_scatter(checked(whole, 'gradient'), checked(mine, 'gradient'), "
        'stream=stream_of(g.device))', 'mine.copy_(whole[each * comm.rank:each * (comm.rank + 1)])', 'test_torch_dtensor.py',
        'over_chunks'),
    'ranks with the same tokens may be in a group of other tokens': (
        'torch/ranks.py', 'if len(both) > 1:', 'if False:', 'test_torch_groups.py', 'groups_of_the_same'),
    'what records operations sees the library\'s': (
        'torch/calls.py', '            unrecorded()\n        if has_dtensor(args)', '            pass\n        if has_dtensor(args)', 'test_torch_recorded.py', 'test_what_records'),
    'what records operations sees the library\'s in backward': (
        'torch/functions.py', '            unrecorded()\n        if has_dtensor(grads)',
        '            pass\n        if has_dtensor(grads)', 'test_torch_recorded.py', 'test_what_records'),
    'whatever sees operations records them': (
        'torch/functions.py', 'for mode in modes) if name in _RECORDERS), None)', 'for mode in modes) if name in _RECORDERS), '
        "'a mode' if modes else None)", 'test_torch_recorded.py', 'test_what_records'),
    'signs of memory are those of a tensor': (
        'tensor.py', 'if t.is_neg():', 'if False:', 'test_dlpack.py', 'other_signs'),
    'signs of a tensor that lends itself are those of its memory': (
        'dlpack.py', "if hasattr(obj, 'is_neg'):", 'if False:', 'test_dlpack.py', 'other_signs'),
    'signs of a loss\'s tensors are seen in the first call alone': (
        'torch/ready.py', 'if t.is_neg() or ', 'if ', 'test_torch_losses.py', 'ids_of_other_signs'),
    'signs of upstream gradients are those of their memory': (
        'torch/functions.py', 'if g is not None and g.is_neg():', 'if False:', 'test_torch_losses.py', 'other_signs'),
    'signs of ids are those of their memory': (
        'torch/support.py', '.to(torch.int64).resolve_neg()', '.to(torch.int64)', 'test_torch_losses.py', 'other_signs'),
    'the gradient of padding is what its memory had': (
        'torch/linear_plan.py', 'd_weight[plan.owned:].zero_()', 'd_weight[plan.owned:].fill_(1)',
        'test_torch_head.py', 'test_flat_parts_of_zero3'),
    'a parameter without elements is empty': (
        'torch/linear.py', "if weight.numel() == 0 and hasattr(weight, 'ds_tensor'):", 'if False:',
        'test_torch_head.py', 'test_flat_parts_of_zero3'),
    'an exception that a launcher caught stays in its process': (
        'torch/ranks.py', 'sys.exc_info()[1] or ', '', 'test_torch_ended.py', 'launcher and plain'),
    'a rank that waits for others to meet lets PyTorch warn of it': (
        'torch/ranks.py', 'if self.store.check(keys):', 'import contextlib\n                with contextlib.suppress(Exception):\n                    self.store.wait(keys, _PART)\n                if self.store.check(keys):',
        'test_torch_bridge.py', 'says_nothing'),
    'an exception that multiprocessing prints stays in its process': (
        'torch/ranks.py', 'if sys._getframe(1).f_code in ends:', 'if False:', 'test_torch_ended.py', 'launcher and plain and fork'),
    'an uncaught exception is kept to itself': (
        'torch/ranks.py', '(words or of.host', '(of.host', 'test_torch_ended.py', 'cause and by'),
    'an exception that a script caught and showed stays in its process': (
        'torch/ranks.py', 'words = _failure[0]', 'pass', 'test_torch_ended.py', 'cause and shows'),
    'what a destroyed communicator did is counted': (
        'torch/ranks.py', ' is not None and of.host._handle]', ' is not None]', 'test_torch_bridge.py', 'destroyed_its'),
    'a communicator that was destroyed is aborted at the end': (
        'torch/ranks.py', 'if self.host is not None and self.host._handle:', 'if self.host is not None:', 'test_torch_bridge.py', 'destroyed_its'),
    'an end looks at a communicator that was destroyed': (
        'torch/ranks.py', 'of.host._handle and _is_dead(of.host))', '_is_dead(of.host))', 'test_torch_bridge.py', 'destroyed_its'),
    'exceptions that a script shows are not heard': (
        'torch/ranks.py', 'sys.excepthook = hook', 'pass', 'test_torch_ended.py', 'cause and own'),
    'an exception that was shown ends a rank that goes on': (
        'torch/ranks.py', ' and _failure[1] == _counted()', '', 'test_torch_ended.py', 'cause and goes'),
    'what ranks that meet were told is told again': (
        'torch/ranks.py', 'if id(of) not in _reached(why):', 'if True:', 'test_refusals.py', 'meeting_that_a_third'),
    'lists of no tokens have no address': (
        'torch/support.py', '= address, address + step', '= address, raw.data + step', 'test_torch_support.py',
        'test_lists_of_no_tokens'),
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
    'rows in any order are in one': (
        'torch/rows.py', 'if tuple(step for _, step in axes) == usual else', 'if axes or usual else',
        'test_torch_losses.py', 'other_orders'),
    'second derivatives of losses are nothing': (
        'torch/functions.py', '*(grads if linear else read)', '*grads', 'test_torch_losses.py',
        'test_a_gradient_penalty'),
    'second derivatives of what is linear are nothing': (
        'torch/functions.py', '*(grads if linear else read)', '*read[len(grads):]', 'test_torch_losses.py',
        'test_a_gradient_penalty'),
    'gradients that forward made depend on nothing': (
        'torch/linear.py', 'ctx.save_for_backward(anchor)', 'ctx.save_for_backward(anchor.detach())', 'test_torch_losses.py',
        'test_a_gradient_penalty'),
    'tokens are let go of before they are read': (
        'torch/sequence.py', "checked(tokens, 'tokens')", "checked(tokens.clone(), 'tokens')", 'test_torch_losses.py',
        'test_tokens_of_any_strides'),
    'values of any shape are gathered': (
        'torch/sequence.py', '_long(found) != _long(seq.shape) or ', '', 'test_torch_losses.py',
        'test_values_of_transposed'),
    'rows between those of a slice count': (
        'torch/rows.py', 'out = values.new_full((self.count,) + tail, fill)',
        'out = values.new_full((self.count,) + tail, 0)', 'test_torch_logprob.py',
        'test_logits_are_read_where_they_are'),
    'an expanded upstream gradient is read as if it were whole': (
        'torch/rows.py', '+ tail).contiguous()  # a sum', '+ tail)  # a sum',
        'test_torch_logprob.py', 'test_gradient_in_place'),
    'the dense gather does not add over cp': (
        'compat/packed.py', 'if ctx.add:', 'if False:', 'test_compat.py',
        'test_dense_batches_over_context_parallel_ranks'),
    'a target that was not kept has a log-probability': (
        'compat/shared.py', "logp + torch.zeros_like(logp).masked_fill(lost, -float('inf'))", 'logp', 'test_compat_names.py',
        'test_sampling_parameters'),
    'a target that was not kept is in the list': (
        'compat/shared.py', 'target.masked_fill(lost, -1)', 'target', 'test_compat_nemo_rl.py', 'next_tokens and 1-1-dense-4'),
    'a search takes any workspace': (
        'torch/sampling.py', 'min(chunk or count, count, (_WORKSPACE', 'max(chunk or count, count, (_WORKSPACE',
        'test_sampling.py', 'test_many_tokens'),
    'a target that top-p does not keep has a gradient': (
        'torch/sampling.py', '.masked_fill(lost, 0))', ')', 'test_sampling.py', 'test_a_target_that'),
    'the id that meets the mass is left out of a list': (
        'torch/sampling.py', 'mass.cumsum(-1) - mass >=', 'mass.cumsum(-1) >=', 'test_sampling.py', 'test_the_fewest'),
    'a top-p of 1 leaves out ids whose mass rounds to 0': (
        'torch/sampling.py', 'if top_p == 1:  # keeps', 'if False:  # keeps', 'test_sampling.py', 'top_p_of_1'),
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
    'entropy has no gradient of its own': (
        'torch/logprob.py', "            setattr(now.upstream, name, at)",
        "            setattr(now.upstream, name, None if name == 'd_entropy' else at)", 'test_compat.py',
        'test_logp_and_entropy_of_the_same_logits'),
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
    'invariant on one rank only': (
        'torch/logprob.py', '-(-vocab // 128) * 16', '-(-vocab // 16) * 16', 'test_torch_logprob.py',
        'test_invariant'),
    'invariant is dropped on the way': (
        'torch/ready.py', "-1 if invariant is True else int(float(invariant)))", '0)', 'test_torch_logprob.py',
        'test_invariant'),
    'rows whose mask is 0 are read': (
        'torch/logprob.py', 'self.launch(now, logits, target, more, comm,', 'self.launch(now, logits, target, None, comm,',
        'test_torch_losses.py', 'threads'),
    'soft labels are a teacher that is not normalised': (
        'torch/losses.py', '(int(bool(soft_labels)),', '(0,', 'test_torch_losses.py', 'threads'),
    'hidden states have no illegal targets': (
        'compat/shared.py', 'int(chunk or 0), True)', 'int(chunk or 0), False)', 'test_compat.py', 'where_no_rank_holds'),
    'two times a loss is a tuple of two': (
        'torch/nll.py', "'mul', 'rmul', ", '', 'test_torch_losses.py', 'is_its_scalar and times'),
    'a loss asks the token count for what a tensor has': (
        'torch/nll.py', 'return getattr(self[0], name)\n\n    def function', 'return getattr(self[2], name)\n\n    def function',
        'test_torch_losses.py', 'a_tuple_all_the_same'),
    'functions of torch do not know a loss': (
        'torch/nll.py', 'if isinstance(value, kind):', 'if False:', 'test_torch_losses.py', 'is_its_scalar and stacked'),
    'a smallest input on meta is taken': (
        'torch/tower.py', 'if given[0].is_meta:', 'if False:', 'test_torch_tower.py', 'without_values'),
    'a part of the vocabulary is a head of its own': (
        'torch/head.py', "and 'tp_group' not in options:", 'and False:', 'test_torch_head.py', 'a_part_of_the_vocabulary'),
    'advice about gradients is given where no rank has them': (
        'torch/ranks.py', ' and _FOLLOWED.search(str(why)):', ':', 'test_torch_requires_grad.py', 'advice_about'),
    'a function of logits is called by another name': (
        'torch/cross_entropy.py', "_WHAT = Named('cross_entropy', class", "_WHAT = Named('nll', class", 'test_torch_cross_entropy.py',
        'names_the_function_and_the_argument'),
    'plans of one function are those of another': (
        'torch/logprob.py', '    key = (what, logits.shape,', '    key = (logits.shape,', 'test_torch_cross_entropy.py',
        'names_the_function_and_the_argument'),
    'an argument is named as another function has it': (
        'torch/linear.py', "weight='linear_weight', bias", "bias", 'test_torch_cross_entropy.py', 'names_the_function_and_the_argument'),
    'the scale is dropped on the way': (
        'torch/ready.py', 'float(scale)', '1.0', 'test_torch_linear.py', 'on_threads_and_alone'),
    'the teacher has the temperature of the student': (
        'torch/losses.py', "number('distill: target_temperature', target_temperature)", 'float(temperature)', 'test_torch_losses.py', 'threads'),
    'a divergence is the one before it in the list': (
        'torch/losses.py', "DIVERGENCES.index(kind or 'forward_kl')", "max(0, DIVERGENCES.index(kind or 'forward_kl') - 1)",
        'test_torch_losses.py', 'threads'),
    'a mean of a divergence counts tokens that are masked': (
        'torch/losses.py', 'if mask is None else (mask != 0).sum()', 'if True else mask', 'test_torch_losses.py', 'reduced_over_ranks'),
    'a divergence of tokens that a mask weighs is that of tokens that it counts': (
        'torch/losses.py', 'None if weights is None else weights.to(loss.dtype), reduction', 'None, reduction',
        'test_torch_losses.py', 'reduced_over_ranks'),
    'ids that are ignored count in a divergence': (
        'torch/losses.py', 'lp = lp.double().masked_fill(ids == ignore_index, -torch.inf)', 'lp = lp.double()', 'test_torch_losses.py',
        'top_k_of_a_teacher_on_threads'),
    'a teacher without a tail leaves one': (
        'torch/losses.py', "int(bool(tail)),\n", "0,\n", 'test_torch_losses.py', 'top_k_of_a_teacher_on_threads'),
    'a step is made by a gradient that an infinite reverse KL does not have': (
        'torch/losses.py', 'by.masked_fill((d == torch.inf)[..., None], torch.nan) if reverse else by', 'by', 'test_torch_losses.py',
        'top_k_special'),
    'a teacher has the cap of the student': (
        'torch/linear_distill_plan.py', 'target_softcap=theirs.softcap', 'target_softcap=own.softcap', 'test_torch_linear_distill.py', 'alone'),
    'gradients that begin in forward are those of a sum': (
        'torch/linear_distill.py', 'run.backward(student, None, mask, by,', 'run.backward(student, None, mask, None,', 'test_torch_linear_distill.py',
        'dtypes'),
    'padding of a head is among its columns': (
        'torch/linear_distill.py', '(min(row[i], size), min(row[i + 2], size))', '(row[i], row[i + 2])', 'test_torch_linear_distill.py', 'alone'),
    'each rank has the gradient of its columns alone': (
        'torch/linear_distill.py', "of.d_hidden if comm.size > 1 else 'partial'", "'partial'", 'test_torch_linear_distill.py', 'on_threads'),
    'a second backward multiplies gradients again': (
        'torch/linear_distill.py', '    ctx.made = None\n    return', '    return', 'test_torch_linear_distill.py', 'one_backward'),
    'tokens that a mask leaves out have the weight of others': (
        'torch/linear_distill.py', '_count(losses, mask), up, mean, group)', '_count(losses, mask), None, mean, group)', 'test_torch_linear_distill.py', 'alone'),
    'shards of other columns are taken': (
        'torch/linear_distill.py', 'if [b for b in tables[0] if b[0] < b[1]] != [b for b in tables[1] if b[0] < b[1]] or', 'if False or',
        'test_torch_linear_distill.py', 'can_be_moved'),
    'an id that is none costs nothing where the teacher has 0': (
        'torch/losses.py', 'd.masked_fill(lp.isnan().any(-1), torch.nan)', 'd', 'test_torch_losses.py', 'top_k_special'),
    'one rank asks again for heads of another padding': (
        'torch/linear_distill.py', 'key = asked if most is None else', 'key = asked if True else', 'test_torch_linear_distill.py',
        'other_paddings'),
    'weights of tokens that are columns of a table are refused': (
        'torch/linear_distill.py', 'weights.to(run.real).contiguous()', 'weights.to(run.real)', 'test_torch_linear_distill.py', 'any_strides'),
    'rows of a head lie where they lay': (
        'torch/linear_distill.py', 'out[lo - first:hi - first] =', 'out[lo - begin:hi - begin] =', 'test_torch_linear_distill.py', 'rows_of_a_head'),
    'values of several numbers per token are spread as if of one': (
        'torch/rows.py', 'each = math.prod(tail)\n        out', 'each = 1\n        out', 'test_torch_losses.py',
        'test_logits_of_any_strides'),
    'entropy of tokens whose mask is 0': (
        'torch/losses.py', 'target.masked_fill_(mask == 0, -100)', 'pass', 'test_torch_losses.py', 'threads'),
    'a teacher is not kept for backward': (
        'torch/logprob.py', 'second if plan.KEEPS else None', 'second and None', 'test_torch_losses.py', 'hooks'),
    'the gradient of a sum is that of its mean': (
        'torch/losses.py', 'by + num * den', 'by + num', 'test_torch_losses.py', 'divided_once'),
    'a target beyond the vocabulary is weighed': (
        'torch/nll.py', 'target.clamp(0, vocab - 1)', 'target.clamp(0, vocab)', 'test_torch_mask.py', 'illegal_targets'),
    'an ignored id of the vocabulary is weighed': (
        'torch/nll.py', 'if 0 <= ignored < vocab:', 'if False:', 'test_torch_mask.py', 'illegal_targets'),
    'tokens that do not count are weighed': (
        'torch/losses.py', "(mask, 'mask')", "(None, 'mask')", 'test_torch_losses.py', 'divided_once'),
    'gradients of gathered values are never added': (
        'torch/sequence.py', '_ADJOINT[ctx.adjoint]', '0', 'test_torch_losses.py', 'over_context_ranks'),
    'rows are padded on the right always': (
        'torch/sequence.py', 'left_padded=bool(left_padded)', 'left_padded=False', 'test_torch_losses.py',
        'over_context_ranks'),
    'lists lie behind the end of those before': (
        'torch/support.py', 'address + step, address + 2 * step', 'address + step, address + step',
        'test_torch_support.py', 'threads_and_alone'),
    'lists that are not sorted are passed as they are': (
        'torch/support.py', 'order[token[order].sort(stable=True)[1]]', 'order', 'test_torch_support.py',
        'threads_and_alone'),
    'lists have the length of the first call that had any': (
        'torch/support.py', 'listed.data_ptr(), listed.numel()',
        'listed.data_ptr(), ids.shape[0] or listed.numel()', 'test_torch_support.py', 'differ_in_length'),
    'lists of slices are in the order of the slice': (
        'torch/support.py', 'rows.spread(t.reshape(rows.shape), 0)', 't', 'test_torch_support.py', 'any_strides'),
    'lists that a hook brought back are emptied': (
        'torch/support.py', 'self._listed(listed)',
        'self._listed(listed if raw.data == first.data_ptr() else listed.clone().zero_())', 'test_torch_support.py',
        'hooks'),
    'backward of chunks has no autocast': (
        'torch/chunks.py', ', under(product):', ':', 'test_torch_chunks.py',
        'as_autocast_had_it'),
    'chunks of an exception are kept to themselves': (
        'torch/chunks.py', 'groups.telling(comm)', 'groups.telling(None)', 'test_torch_chunks.py',
        'test_an_exception_of_one'),
    'gradients of chunks have the upstream of the first': (
        'torch/chunks.py', '(t, g[rows])', '(t, g[:len(z)])', 'test_torch_chunks.py', 'test_losses_of_chunks'),
    'the gradient of hidden states of a chunk is one ranks part': (
        'torch/chunks.py', 'comm.all_reduce(d_hidden', '(lambda *_a, **_o: None)(d_hidden',
        'test_torch_chunks.py', 'test_losses_of_chunks'),
    'the last chunk gives the gradient of the weight': (
        'torch/chunks.py', 'd_weight += d.t() @ h', 'd_weight = d.t() @ h', 'test_torch_chunks.py',
        'test_losses_of_chunks'),
    'sums of gradients lie as hidden states do': (
        'torch/chunks.py', 'torch.zeros_like(hidden, memory_format=torch.contiguous_format)', 'torch.zeros_like(hidden)',
        'test_torch_chunks.py', 'transposed'),
    'what fn captures is not looked for': (
        'torch/chunks.py', '        if grad:\n', '        if False:\n', 'test_torch_chunks.py', 'captured_and_not_in_params'),
    'what fn captures is looked for in its first chunk': (
        'torch/chunks.py', '        if grad:\n', '        if grad and not whole:\n', 'test_torch_chunks.py', 'last'),
    'what params were made of is looked for, too': (
        'torch/chunks.py', 'node in seen or edge in known', 'node in seen', 'test_torch_chunks.py', 'params_get'),
    'a captured tensor that is the output is not seen': (
        'torch/chunks.py', '[o] if o.requires_grad and', '[o] if False and', 'test_torch_chunks.py', 'leaf_as_output'),
    'params get the gradient of the last chunk': (
        'torch/chunks.py', 'd_params[i].add_(d) if', 'd if', 'test_torch_chunks.py', 'params_get'),
    'gradients of params are added up in their dtype': (
        'torch/chunks.py', 'd.to(_sums(d), copy=True)', 'd.clone()', 'test_torch_chunks.py', 'added_up_in_fp32'),
    'gradients of params are added to the upstream gradient': (
        'torch/chunks.py', 'd.to(_sums(d), copy=True)', 'd.to(_sums(d))', 'test_torch_chunks.py', 'is_not_written'),
    'backward of chunks draws other random numbers': (
        'torch/chunks.py', '            if states is not None:\n', '            if False:\n', 'test_torch_chunks.py',
        'numbers_of_forward'),
    'chunks draw the random numbers of the first one': (
        'torch/chunks.py', 'before, after = after, random.now()', 'before = after; random.now()', 'test_torch_chunks.py',
        'numbers_of_forward'),
    'backward of chunks leaves its random numbers behind': (
        'torch/chunks.py', 'ctx.random.restored(), ', '', 'test_torch_chunks.py', 'numbers_of_forward or same_numbers'),
    'a chunk may not be written': (
        'torch/chunks.py', 'return z.detach()\n', 'return z\n', 'test_torch_chunks.py', 'in_place'),
    'a buffer of all chunks has the last one': (
        'torch/chunks.py', 'for t, part in zip(whole, outs):', 'for t, part in zip(whole, outs) if rows.start else ():',
        'test_torch_chunks.py', 'one_buffer'),
    'outputs of chunks all require gradients': (
        'torch/chunks.py', 'if not any(some)', 'if not t.is_floating_point()', 'test_torch_chunks.py', 'as_without_chunks'),
    'other outputs in backward are taken': (
        'torch/chunks.py', '!= flags:', '!= flags and False:', 'test_torch_chunks.py', 'something_else_in_backward'),
    'outputs of a chunk may be of any kind': (
        'torch/chunks.py', '        if [(t.shape[1:]', '        if False and [(t.shape[1:]', 'test_torch_chunks.py', 'no_tokens'),
    'no tokens have no outputs': (
        'torch/chunks.py', 'max(len(hidden), 1)', 'len(hidden)', 'test_torch_chunks.py', 'test_losses_of_chunks'),
    'the gradient of a mean is added over ranks again': (
        'torch/nll.py', '= d_value.data_ptr(), now.at_d_value',
        '= d_value.mul_(2).data_ptr(), now.at_d_value', 'test_torch_logprob.py',
        'test_mean_is_divided_once_over_all_ranks'),
    'the upstream gradient that comes is not compared with the known one': (
        'torch/linear.py', 'elif not same:', 'elif False:', 'test_torch_upstream.py', 'test_another_upstream'),
    'a checkpoint adds to main_grad twice': (
        'torch/linear.py', "if saved_tensors(ctx, 'linear_nll')[1] != ctx.run:", 'if False:', 'test_torch_upstream.py',
        'test_a_checkpoint_that'),
    'gradients of weighted tokens are made without the known upstream gradient': (
        'torch/linear_plan.py', 'else weights * by', 'else weights', 'test_torch_upstream.py', 'after_forward'),
    'the sum over ranks of a loss made in forward is left out': (
        'torch/linear.py', 'mean and den is None, weights, group, out)', 'mean and den is None, weights, groups.alone(), out)',
        'test_torch_linear.py', 'test_loss_mode_and_the_others_agree'),
    'gradients made in forward ignore the upstream one': (
        'torch/linear.py', '(ctx.factor * g)', 'ctx.factor', 'test_torch_linear.py',
        'test_loss_mode_and_the_others_agree'),
    'no loss keeps gradients of logits': (
        'torch/linear_plan.py', "early = begins == 'loss' and", 'early = False and', 'test_torch_linear.py',
        'test_loss_mode_of_a_narrow_head'),
    'kept gradients of logits are multiplied by 1': (
        'torch/linear_plan.py', 'up.loss, up.d_loss = 1.0, c.pointer(self.by)', 'up.loss, up.d_loss = 1.0, None',
        'test_torch_linear.py', 'test_loss_mode_of_a_narrow_head'),
    'a gradient made over those of logits is copied': (
        'torch/linear_plan.py', 'else shared.detach()', 'else shared', 'test_torch_linear.py',
        'test_loss_mode_makes_the_gradient_of_a_large_weight'),
    'a second backward reads gradients of logits that are gone': (
        'torch/linear.py', 'if saved[9] is not None:', 'if False:', 'test_torch_linear.py',
        'test_loss_mode_makes_the_gradient_of_a_large_weight'),
    'a chunk size does not bind kept gradients of logits': (
        'torch/linear_plan.py', 'min(config.chunk_size or 2048, bound)', 'min(2048, bound)', 'test_torch_linear.py',
        'test_loss_mode_of_a_narrow_head'),
    'kept gradients of logits take any memory': (
        'torch/linear_plan.py', 'bound * hidden.element_size() <=', '0 <=', 'test_torch_linear.py',
        'test_loss_mode_of_a_narrow_head'),
    'the upstream gradient is rounded to 16 bits before it multiplies': (
        'torch/linear.py', '(ctx.factor * g).to(plan.real)', '(ctx.factor * g).to(plan.dtype)',
        'test_torch_upstream.py', 'test_an_upstream_gradient_multiplies_in_fp32'),
    'sums over tokens are rounded to 16 bits before they are a mean': (
        'torch/linear_plan.py', 'self.real if sums else weight.dtype', 'weight.dtype',
        'test_torch_upstream.py', 'test_a_mean_that_fp16_holds'),
    'a mask of floats counts tokens': (
        'torch/nll.py', 'mask.detach() if mask.dtype.is_floating_point else None', 'None',
        'test_torch_mask.py', 'test_a_float_mask_weighs_tokens'),
    'a weight that is NaN is taken': (
        'torch/nll.py', 'if bad.any():', 'if False:', 'test_torch_mask.py', 'test_a_weight_that_is_none'),
    'what is kept ends where its memory ends': (
        'torch/logprob.py', 'held[begin:begin + size + words + SLACK]', 'held[begin:]', 'test_torch_saved.py',
        'test_what_is_kept_has_one_size'),
    'the end of a recomputation is told as an error': (
        'torch/calls.py', 'except _ERRORS as why:',
        'except Exception as why:', 'test_torch_saved.py', 'test_an_exception_that_ends'),
    'shards are not asked for again after a mismatch': (
        'torch/ranks.py', "for known in ('_shards', '_distilled', '_logprobs', '_linear_plans'):", 'for known in ():', 'test_torch_logprob.py',
        'one_rank_corrects'),
    'plans of a head keep shards after a mismatch': (
        'torch/ranks.py', "'_logprobs', '_linear_plans')", "'_logprobs')", 'test_torch_logprob.py', 'one_rank_corrects'),
    'shards of two heads are not asked for again after a mismatch': (
        'torch/ranks.py', "'_distilled', ", '', 'test_torch_logprob.py', 'one_rank_corrects'),
    'a head that one rank cannot make is waited for': (
        'torch/linear_plan.py', 'groups.refuse(comm, why), groups.refuse(head_comm, why)', 'pass', 'test_refusals.py',
        'cannot_be_made or cannot and made'),
    'a sequence that one rank cannot make is waited for': (
        'torch/sequence.py', '    @eager  # so that the others hear of an error\n', '', 'test_refusals.py', 'new_sequence or new and sequence'),
    'an integer of too many bits is cut': (
        'torch/logprob.py', 'if isinstance(value, int) and getattr(at, member) != value:', 'if False:', 'test_refusals.py', 'names_it'),
    'a fraction is cut to an integer': (
        'torch/ready.py', "if not hasattr(value, '__index__'):", 'if False:', 'test_refusals.py', 'names_it'),
    'what is no number is told in the words of Python': (
        'torch/ready.py', 'except (TypeError, ValueError) as why:', 'except ZeroDivisionError as why:', 'test_refusals.py', 'names_it'),
    'the imaginary part of a weight is dropped': (
        'torch/losses.py', 'or weights is not None and weights.is_complex():', ':', 'test_refusals.py', 'names_it'),
    'the imaginary part of a mask is dropped': (
        'torch/tensors.py', 'if mask is not None and mask.is_complex():', 'if False:', 'test_refusals.py', 'names_it'),
    'what makes products is not said to the library': (
        'torch/linear_plan.py', 'gemm=self.gemm)', 'gemm=0)', 'test_torch_linear.py', 'products_on_the_host'),
    'a budget below 0 is none': (
        'torch/linear_plan.py', "if not 0 <= integer('budget', budget) < 2**64:", "if not integer('budget', budget) < 2**64:",
        'test_refusals.py', 'names_it'),
    'max_valid is cut': (
        'torch/linear_plan.py', '>= 2**63:', '>= 2**99:', 'test_refusals.py', 'names_it'),
    'the bias of over_chunks is not looked at': (
        'torch/chunks.py', ' or bias is not None and b != w[:1]:', ':', 'test_refusals.py', 'names_it'),
    'what is no support is used as one': (
        'torch/support.py', 'if not isinstance(self, Support):', 'if False:', 'test_refusals.py', 'names_it'),
    'main_grad of what is frozen is written': (
        'torch/placed.py', 'if not t.requires_grad:', 'if not t.requires_grad and not hasattr(t, "main_grad"):',
        'test_torch_linear.py', 'what_is_frozen'),
    'main_grad of what is frozen is needed': (
        'torch/placed.py', 'if not t.requires_grad:', 'if False:', 'test_torch_linear.py', 'what_is_frozen'),
    'strides of an empty shard count': (
        'torch/ready.py', 'if shape is None and not like.numel():', 'if False:', 'test_torch_linear.py', 'any_strides'),
    'main_grad is written over': (
        'torch/linear.py', 'd_head,\n                           main is not None, frozen',
        'd_head,\n                           False, frozen',
        'test_torch_linear.py', 'test_gradients_are_added_to_main_grad'),
    'a sequence-parallel rank reads its own tokens as all': (
        'torch/linear_plan.py', "scatter = d_hidden == 'reduce_scatter' and comm.size > 1",
        'scatter = False', 'test_torch_linear.py', 'test_d_hidden_partial_and_scattered'),
    'ranks of a mismatch do not tell each other what they were doing': (
        'torch/ranks.py', 'if doing and board is not None:', 'if False:',
        'test_torch_bridge.py', 'test_rows_that_differ_are_named_with_their_ranks'),
    'no group is the group of rank 0': (
        'torch/ranks.py', 'def alone(world_rank: int | None = None)',
        'def alone(world_rank: int | None = 0)', 'test_torch_head.py',
        'test_a_group_of_rank_0_alone_is_not_no_group'),
    'logits are written over without a word to autograd': (
        'torch/logprob.py', 'written(logits)', 'pass', 'test_torch_logprob.py',
        'test_gradient_in_place_of_logits_that_others_saved'),
    'saved numbers begin where the tensor begins': (
        'torch/logprob.py', 'held[begin:begin + size + words + SLACK]', 'held',
        'test_torch_saved.py', 'test_gradients_under_checkpointing'),
    'what a hook brought back is freed before it is read': (
        'torch/nll.py', 'made.backward(MeanCall(made), factor.data_ptr()',
        'del factor; made.backward(MeanCall(made), ctx.saved_tensors[0].data_ptr()', 'test_torch_saved.py',
        'test_gradients_of_saved_tensors'),
    'a buffer is resized under its view': (
        'view.py', 'raw.held = held  # a buffer', 'pass  # a buffer', 'test_dlpack.py', 'test_a_buffer_cannot'),
    'a thread that ends frees its tensors': (
        'torch/ranks.py', 'ended.append(self.comms)', 'self.comms.clear()', 'test_torch_logprob.py',
        'test_threads_without_a_group_end'),
    'a forked child uses the groups of one of its parent': (
        'torch/ranks.py', 'thread is None or thread.forks != comms._forks', 'thread is None',
        'test_torch_logprob.py', 'test_a_forked_child'),
    'groups of threads that ended are kept for ever': (
        'torch/ranks.py', '_ended.clear()', 'pass', 'test_torch_logprob.py',
        'test_threads_without_a_group_end'),
    'the lm_head keeps logits that no backward will ask for': (
        'torch/linear.py', 'backward = grad and (need[0] or d_head or d_lora)', 'backward = need[0] or d_head or d_lora',
        'test_torch_linear.py', 'test_without_gradients_nothing_is_kept'),
    'the store of a torch.distributed that is gone is kept': (
        'torch/ranks.py', 'store and weakref.ref(store)', '(lambda: store)', 'test_torch_bridge.py',
        'test_torch_distributed_may_be_initialised_again'),
    'calls of one shape and other strides share what they prepared': (
        'torch/logprob.py', 'logits.is_contiguous() else logits.stride(), logits.dtype',
        'True else logits.stride(), logits.dtype', 'test_torch_logprob.py',
        'test_calls_that_differ_in_one_thing'),
    'calls of other options share what they prepared': (
        'torch/linear.py', 'linear, values, members, support is None, meta(', 'linear, members, support is None, meta(',
        'test_torch_linear.py', 'test_calls_that_differ_in_one_thing'),
    'a head that moved is read where it was': (
        'torch/linear_plan.py',
        'elif core.bound == (self.number, self.weight.data, self.bias and self.bias.data):',
        'elif core.bound and core.bound[0] == self.number:', 'test_torch_linear.py',
        'test_calls_that_differ_in_one_thing'),
    'a saved tensor that came back with other strides is read with its own': (
        'torch/ready.py', 't = self._restored(t)', 'pass', 'test_torch_logprob.py',
        'test_saved_tensors_may_come_back'),
    'a storage that was freed is read': (
        'torch/ready.py', 'checked(t, self.what, saved=True)', 'pass', 'test_torch_linear.py',
        'test_a_storage_that_was_freed'),
    'the logits of the head are not scaled': (
        'compat/trl.py', '(float(logit_scale), float(final', '(1.0, float(final', 'test_compat.py',
        'test_head_and_loss_in_chunks'),
    'num_items_in_batch is not heard': (
        'compat/trl.py', 'if num_items_in_batch is not None:', 'if False:', 'test_compat.py',
        'test_head_and_loss_in_chunks'),
    'num_items_in_batch below 1 is 1': (
        'torch/linear.py', ' factor = 1 / den\n', ' factor = 1 / den.clamp_min(1)\n', 'test_compat.py',
        'test_head_and_loss_in_chunks'),
    'n_correct is an integer': (
        'compat/trl.py', 'f32(right.sum())', 'right.sum()', 'test_compat.py', 'test_head_and_loss_in_chunks'),
    'labels go before shift_labels': (
        'compat/trl.py', 'if shift_labels is None:', 'if labels is not None:', 'test_compat.py',
        'test_head_and_loss_of_labels_and_shift_labels'),
    'entropy_sum has no gradient': (
        'torch/linear.py', 'if g_entropy is not None:', 'if False:', 'test_compat.py',
        'test_entropy_of_the_head_has'),
    'the gradient of entropy_sum replaces that of the loss': (
        'torch/linear.py', 'd * by + e * by_more', 'e * by_more', 'test_compat.py', 'test_head_and_loss_in_chunks'),
    'gradients that may be asked for again are scaled in place': (
        'torch/linear.py', 'd.dtype is plan.dtype and not ctx.entropy', 'd.dtype is plan.dtype', 'test_compat.py',
        'test_head_and_loss_in_chunks'),
    'communicators that were destroyed are taken for the next call': (
        'torch/ranks.py', 'self.host.told[0] = True\n', 'pass\n', 'test_torch_bridge.py', 'test_a_graph_that_outlives'),
    'tokens that do not count are multiplied': (
        'compat/trl.py', ", max_valid=most)", ')', 'test_compat.py',
        'test_head_and_loss_of_few_tokens'),
    'the head of a LoRA layer is its frozen base': (
        'torch/head.py', "if hasattr(module, 'base_layer') and", 'if False and', 'test_torch_head.py', 'adapter'),
    'a Head has tp_group twice': (
        'torch/head.py', 'elif weight.tp_group is not None:', 'elif False:', 'test_torch_head.py', 'what_a_head_does'),
    'members of a Head that over_chunks() does not read are lost': (
        'torch/chunks.py', 'if name in _READ or', 'if True or', 'test_torch_head.py', 'what_a_head_does'),
    'members of a Head that are a DTensor\'s are lost without one': (
        'torch/chunks.py', 'name in _PLACED and is_placed or', 'name in _PLACED or', 'test_torch_head.py', 'what_a_head_does'),
    'a reduction over no ranks is taken': (
        'torch/linear.py', 'elif of.grad_reduction is not None or rows is not None:', 'elif rows is not None:', 'test_torch_head.py',
        'what_a_head_does'),
    'rows that no ranks share are taken': (
        'torch/linear.py', 'elif of.grad_reduction is not None or rows is not None:', 'elif of.grad_reduction is not None:',
        'test_torch_head.py', 'what_a_head_does'),
    'rows of a Head are not those that DeepSpeed has': (
        'torch/linear.py', 'if of.rows not in (None, rows):', 'if False:', 'test_torch_head.py', 'what_a_head_does'),
    'a Head\'s ranks do not hear of an error': (
        'torch/calls.py', 'talk += head.weight, head.bias, head.shard_group, head.tp_group', 'pass', 'test_refusals.py', 'linear and not bridge'),
    'a graph writes main_grad': (
        'torch/compiled.py', " or given.get('weight.main_grad')", '', 'test_torch_compiled.py', 'writes_its_arguments'),
    'an option that is a tensor is kept as it was': (
        'torch/ready.py', 'return (float(temperature)', 'return (temperature', 'test_torch_logprob.py',
        'test_an_option_that_is_a_tensor'),
    'what was kept is read from the next multiple of 256': (
        'torch/linear_plan.py', 'if t.data_ptr() % 256 == 0:', 'if True:', 'test_torch_linear.py',
        'test_what_is_kept_may_come_back'),
    'a refusal stays on its rank': (
        'torch/ranks.py', '            of.refuse(error)', '            pass', 'test_refusals.py', 'nll and list'),
    'a refusal stays on its rank if it has no group of its own': (
        'torch/ranks.py', "getattr(value, '_talks_to', None)", 'None', 'test_refusals.py', 'bridge'),
    'a refusal waits for a meeting': (
        'torch/ranks.py', '            _Meeting(self).refuse(_said(why))', '            refuse(_Meeting(self).comm(), why)',
        'test_refusals.py', 'third_rank'),
    'an error that the others have is told again': (
        'torch/ranks.py', '_reached(why).add(id(comm.told))  # the library', 'pass  #', 'test_torch_losses.py',
        'test_ranks_whose_rows'),
    'a refusal of this rank alone is one that it has heard of': (
        'torch/ranks.py', "if self.host is not None and not self.host.told[0]:", 'if self.host is not None:',
        'test_refusals.py', 'vocab_parallel_entropy'),
    'a head that ranks do not agree on is told to those of the head alone': (
        'torch/ranks.py', 'if len(several) == 1 or', 'if True or', 'test_refusals.py', 'other_rows or other and rows'),
    'those that a refusal finds at a meeting wait for the rest': (
        'torch/ranks.py', 'for key in self._keys(step):', 'for key in [self._keys(step)[self.of.me]]:', 'test_refusals.py',
        'third_rank'),
    'a rank that gave up a meeting says nothing': (
        'torch/ranks.py', '            self.refuse(_said(why))\n', '            pass\n', 'test_refusals.py', 'leaves_a_meeting'),
    'a rank that has ended is waited for where ranks meet': (
        'torch/ranks.py', 'if why_not:', 'if False:', 'test_refusals.py', 'has_ended'),
    'a rank that ends well after an error is waited for': (
        'torch/ranks.py', ' or of.host is not None and', ' or False and', 'test_torch_ended.py',
        'cause and well'),
    'a child of a rank says that the rank has ended': (
        'torch/ranks.py', 'if of.forks == comms._forks and', 'if', 'test_torch_ended.py', 'cause and child'),
    'a rank that ends says nothing at the next meeting': (
        'torch/ranks.py', 'len(self.ranks) > 1 and self.store is not None', 'False', 'test_torch_ended.py', 'cause and by'),
    'the group that is set for entropies hears of no refusal': (
        'compat/shared.py', '@eager\ndef entropy_of(', 'def entropy_of(', 'test_refusals.py', 'that_is_set'),
    'a world is made without what its program says of it': (
        'comm.py', 'None, c.pointer(config))', 'None)', 'test_core.py', 'says_what_holds'),
    'what a program does not say again is reset': (
        'comm.py', '_config(self._configured(), timeout', '_config(s.CommConfig(c.sizeof(s.CommConfig), 0, 1), timeout',
        'test_core.py', 'says_what_holds'),
    'what is left at exit ends when modules are gone': (
        'comm.py', 'atexit.register(_end)', 'pass', 'test_core.py', 'left_at_exit'),
    'bridges of all position maps are kept': (
        'torch/bridge.py', 'functools.lru_cache(maxsize=_LAYOUTS)', 'functools.lru_cache(maxsize=None)',
        'test_torch_layouts.py', 'by_last_use'),
    'ranks that are threads have one communicator for ever': (
        'torch/ranks.py', 'again = group.told[0] and', 'again = False and', 'test_refusals.py', 'threads and list'),
    'ranks that are threads are not told what differs': (
        'torch/ranks.py', 'if made is None and comm._run is not None:', 'if False:', 'test_torch_bridge.py', 'rows_that_differ'),
    'ranks that are threads are left behind by one that fails': (
        'comm.py', 'run.end(me, failed)', 'run.end(me, None)', 'test_refusals.py', 'made_anew'),
    'an exception of a rank meets a communicator that was destroyed': (
        'comm.py', '        if comm._handle:\n            comm.abort(why)', '        comm.abort(why)', 'test_refusals.py', 'made_anew'),
    'ranks of a loss do not tell what requires grad': (
        'torch/linear.py', 'doing=_doing(need, grad)):\n        ready = plan.ready(comm, head_comm, not',
        'doing=None):\n        ready = plan.ready(comm, head_comm, not', 'test_torch_requires_grad.py', 'losses and loss-True'),
    'the LoRA of a head with a sharded weight is that of its first rows': (
        'torch/placed.py', 't = part if shares is None else Gathered.apply(part, shares, found.rows)', 't = part',
        'test_torch_lora.py', 'fsdp2'),
    'gradients of a LoRA are not those of FSDP2': (
        'torch/placed.py', 'part, _ = averaged(what, part, None, t, of.grad_reduction, size, copies, False)', 'pass',
        'test_torch_lora.py', 'fsdp2'),
    'log-probabilities of large logits are differences of large numbers': (
        'compat/collectives.py', 'y = (y - most) / temperature', 'y = y / temperature - most / temperature',
        'test_compat_groups.py', 'large_logits'),
    'log-probabilities are relative to the largest logit of a rank': (
        'compat/collectives.py', "comm.all_reduce(most, op='max', stream=stream_of(most.device))", 'pass', 'test_compat_groups.py', 'large_logits'),
    'a split communicator has the ranks of its world to a relayout': (
        'torch/relayout.py', 'group=_counted(group) if isinstance(group, Comm) else group)', 'group=group)', 'test_torch_packed.py',
        'split_communicator'),
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
    'temperatures of tokens of a teacher are those of the student': (
        'torch/support.py', "order = [name for name in ('temperature', 'target_temperature') if name in found]", 'order = list(found)',
        'test_torch_temperature.py', 'divergences_of and reverse'),
    'the teacher of a student may have one temperature alone': (
        'torch/losses.py', 'isinstance(target_temperature, torch.Tensor) and target_temperature.dim()', 'False', 'test_torch_temperature.py',
        'divergences_of and reverse'),
    'temperatures of tokens beside a mask go unchecked': (
        'torch/support.py', "        _check_heat(what, name, value.given, shape, device)\n    order", '        pass\n    order', 'test_torch_temperature.py', 'no_temperature'),
    'parts of a head to distil into have any number of rows': (
        'torch/placed.py', 'if t.shape not in ((own, *tail), (own if tail else each, *tail)):', 'if False:', 'test_torch_linear_distill.py', 'parts_of_heads'),
    'the gradient of a shared head to distil into is summed whatever it says': (
        'torch/placed.py', 'part, _ = averaged(what, t, None, t, of.grad_reduction, comm.size, None, False)\n    return', 'part = t\n    return',
        'test_torch_linear_distill.py', 'parts_of_heads'),
    'factors of ZeRO-3 are those of this rank': (
        'torch/placed.py', 'return Gathered.apply(part, comm, count).view(shape)', 'return torch.cat([part] * comm.size)[:count].view(shape)',
        'test_torch_lora.py', 'zero3'),
    'chunks of any loss have no LoRA': (
        'torch/chunks.py', '    if a is None:\n        return z, None\n', '    if a is not None:\n        return z, torch.nn.functional.linear(h, a)\n    return z, None\n',
        'test_torch_lora.py', 'any_loss'),
    'the A of a LoRA in chunks learns from the columns of its rank': (
        'torch/chunks.py', 'if d_a is not None and comm.size > 1:', 'if False:', 'test_torch_lora.py', 'any_loss_has'),
    'hidden states of chunks learn as if there were no LoRA': (
        'torch/chunks.py', 'd @ w if d_narrow is None else torch.addmm(d @ w, d_narrow, a)', 'd @ w', 'test_torch_lora.py', 'any_loss_has'),
    'targets of multi-token prediction are the next tokens': (
        'torch/sequence.py', '        if depth:\n', '        if False:\n', 'test_torch_losses.py', 'over_context_ranks'),
    'tokens of a group are counted on this rank alone': (
        'torch/grouped.py', 'self.den = OverRanks.apply(_by_group(', 'self.den = (lambda x, _: x)(_by_group(', 'test_torch_grouped.py', 'all_ranks'),
    'a group without a token makes the total NaN': (
        'torch/grouped.py', 'torch.where(self.den == 0, 0.0, self.den.reciprocal())', 'self.den.reciprocal()', 'test_torch_grouped.py',
        'alone and loss'),
    'a group without weight is not divided': (
        'torch/grouped.py', 'torch.where(self.den == 0, 0.0,', 'torch.where(self.den == 0, 1.0,', 'test_torch_grouped.py', 'weigh_nothing'),
    'what rounding leaves of a teacher costs infinitely': (
        'torch/losses.py', '(left <= 4 * torch.finfo(logp.dtype).eps)', '(left <= 0)', 'test_torch_losses.py', 'top_k_special'),
    'a group has the weight of the first': (
        'torch/grouped.py', '((self.weight * self.factor)[self.index]', '((self.weight[0] * self.factor)[self.index]', 'test_torch_grouped.py',
        'alone and loss'),
    'a loss that is NaN makes that of all groups NaN': (
        'torch/grouped.py', 'torch.where(which == i, v, 0.0)', '((which == i) * v)', 'test_torch_grouped.py', 'its_own_group'),
    'a group that no weight has is the last': (
        'torch/grouped.py', 'if not captures and outside.any():', 'if False:', 'test_torch_grouped.py', 'wrong_groups'),
    'a token that does not count needs a group': (
        'torch/grouped.py', '        outside &= target != ignored\n', '', 'test_torch_grouped.py', 'alone and logits'),
    'a graph has weights of groups as integers': (
        'torch/compiled.py', "if key == 'group_weight' and isinstance(value, (list, tuple)):", 'if False:', 'test_torch_grouped.py', 'compiled'),
    'a graph takes groups without their number': (
        'torch/compiled.py', 'not _groups_fit(given)', 'False', 'test_torch_grouped.py', 'compiled'),
    'a graph has gradients of the losses of groups in mode loss': (
        'torch/linear.py', "last = 2 + ('groups' in options)", 'last = 2', 'test_torch_grouped.py', 'compiled and loss'),
    'weights of tokens do not count in groups': (
        'torch/nll.py', 'grouping.counts(counted(weights,', 'grouping.counts(counted(None,', 'test_torch_grouped.py', 'alone and logits'),
    'a group is divided by its tokens, whatever their classes weigh': (
        'torch/grouped.py', 'self.of_token.double() if of_class is None else', 'self.of_token.double() if True else',
        'test_torch_grouped.py', 'classes_weigh and logits'),
    'a rank counts the classes of its own columns alone': (
        'torch/nll.py', "comm.all_reduce(checked(made, 'class weights of targets'), stream=stream_of(made.device))", 'pass',
        'test_torch_grouped.py', 'all_ranks and logprob'),
    'the library hears of no LoRA': (
        'torch/linear_plan.py', 'lora=0 if self.lora is None else self.lora[0].shape[0]', 'lora=0', 'test_torch_lora.py', 'modes'),
    'a head trains its LoRA alone, and no loss knows': (
        'torch/linear.py', 'for t in (hidden, *head[1:3], *factors_of(head[0])))', 'for t in (hidden, *head[1:3]))',
        'test_torch_lora.py', 'what_is_frozen'),
    'the second of two adapters is left out': (
        'torch/head.py', 'if len(parts) < 2:', 'if True:', 'test_torch_lora.py', 'several_adapters'),
    'dropout of a LoRA is left out': (
        'torch/head.py', "if module.training and getattr(dropout, 'p', 0):", 'if False:', 'test_torch_lora.py', 'more_than_factors'),
    'the magnitudes of DoRA are left out': (
        'torch/head.py', "or getattr(module, 'use_dora', {}).get(name):", 'and False:', 'test_torch_lora.py', 'more_than_factors'),
    'a graph multiplies by the base of a LoRA alone': (
        'torch/compiled.py', "members['lora'] = tuple(members.pop(name) for name in _LORA)",
        "[members.pop(name) for name in _LORA]", 'test_torch_lora.py', 'compiled'),
    'ranks may have other factors A': (
        'torch/linear.py', '**({} if a is None else {"the LoRA\'s A": a})', '', 'test_torch_lora.py', 'other_factors'),
    'a rank that waits hears no signal': (
        '_lib.py', 'lib().colo_interrupt_set(_asked.fn, None)', 'pass', 'test_torch_interrupt.py', 'raises_nothing'),
    'what a handler raised while a rank waited is lost': (
        '_lib.py', '            raise why\n', '            pass\n', 'test_torch_interrupt.py', 'other_rank_hears and bridge'),
    'ranks that make a communicator wait in one piece': (
        'torch/ranks.py', "asks = hasattr(self.store, 'check')", 'asks = False', 'test_torch_interrupt.py',
        'make_a_communicator'),
    'an interrupted rank says nothing of it': (
        'torch/ranks.py', 'return str(why) or type(why).__name__', 'return str(why)', 'test_torch_interrupt.py', 'make_a_communicator'),
    'ranks begin though their start was interrupted': (
        'comm.py', 'if not run.interrupted:', 'if True:', 'test_core.py', 'before_there_are'),
    'a rank that begins after ctrl-c waits': (
        'comm.py', '        if self.interrupted:\n', '        if False:\n', 'test_core.py', 'while_ranks_begin'),
    'ctrl-c waits for the ranks': (
        'comm.py', '        run.interrupt()', '        pass', 'test_core.py', 'ctrl_c'),
    'plans are made of tensors without memory': (
        'torch/tensors.py', 'if not raw.data:', 'if False:', 'test_torch_recorded.py', 'without_memory'),
}
if sys.version_info >= (3, 13): # there multiprocessing has nothing left of what it caught
    del MUTANTS['an exception that a launcher caught stays in its process']

# Those that stop one rank, for which the others wait until their deadline.
WAITING = {
    'a bridge does not say whether a backward follows',
    'a bridge of its own that one rank cannot make is waited for',
    'a bridge that one rank cannot make is waited for',
    'a call like the last one does not say whether a backward follows',
    'a head that one rank cannot make is waited for',
    'a head that ranks do not agree on is told to those of the head alone',
    'a part of ranks that packings count has the first ones',
    'a rank that ends before its first plan is waited for',
    'a rank that ends says nothing at the next meeting',
    'a rank that ends well after an error is waited for',
    'a rank that failed before the others were there tries again without them',
    'a rank that gave up a meeting says nothing',
    'a rank that has ended is waited for where ranks meet',
    'a rank that knows no layout tells no rank',
    'a rank without rows does not come to backward',
    'a refusal of this rank alone is one that it has heard of',
    'a refusal stays on its rank',
    'a refusal stays on its rank if it has no group of its own',
    'a refusal waits for a meeting',
    'a sequence that one rank cannot make is waited for',
    'a tower that is loaded is on the rank that saved it',
    'a tower that one rank cannot make is waited for',
    'all ranks of a world hear of the error of a part',
    'an error that the others have is told again',
    'an error of a plan is told to no rank',
    'an exception of a rank meets a communicator that was destroyed',
    'context ranks of a sequence begin at the first',
    'ctrl-c waits for the ranks',
    'gradients that are added up are taken for ones that peers write',
    'each rank weighs the first classes',
    'images stay with the first rank that has them',
    'memory is asked for again of ranks that are elsewhere',
    'positions of rows are those of their first',
    'pre-rolled targets are those of all ranks',
    'ranks in neither grid are waited for',
    'ranks that are threads are left behind by one that fails',
    'tables that one rank lacks are waited for',
    'the gradient of padding is what its memory had',
    'the group that is set for entropies hears of no refusal',
    'the ranks that share a head do not hear what is wrong with linear_cross_entropy()',
    'those that a refusal finds at a meeting wait for the rest',
    'what a handler raised while a rank waited is lost',
    'what is wrong on one rank is told to no rank',
    'what one rank finds wrong in communicate() stays there',
    'what one rank gives cross_entropy() that only PyTorch takes is waited for',
}
