# SPDX-License-Identifier: Apache-2.0
"""Bugs that are planted in the package, each with the test that must fail; test_mutants.py plants them. Those of bridges and
of what they stand on are in mutants_bridge.py, of drop-ins in mutants_compat.py, of the lm_head in mutants_head.py."""
import sys

from mutants_bridge import BRIDGES
from mutants_compat import DROP_INS
from mutants_head import HEADS

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
    'class weights with a gradient are taken': (
        'torch/support.py', 'if given.requires_grad and torch.is_grad_enabled():\n        raise ArgumentError("%s requires', 'if False:\n        raise ArgumentError("%s requires',
        'test_torch_cross_entropy.py', 'only_pytorch_takes'),
    'a copy of a loss has the options of the first': (
        'torch/modules.py', 'return _Options(self)', 'return self', 'test_torch_cross_entropy.py', 'modules_with_groups'),
    'class weights of a graph are constants': (
        'torch/compiled.py', ", 'weight.bias', 'class_weight'", ", 'weight.bias'", 'test_torch_compiled.py', 'class_weights'),
    'a graph of another autocast is taken': (
        'torch/compiled.py', 'autocasts(device),\n', '(),\n', 'test_torch_compiled.py', 'autocast_of_its_call'),
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
    **DROP_INS,
    **HEADS,
    'a call fails while another thread imports DTensors': (
        'torch/functions.py', "getattr(sys.modules.get('torch.distributed.tensor'), 'DTensor', None)",
        "sys.modules['torch.distributed.tensor'].DTensor", 'test_torch_dtensor.py', 'another_thread'),
    'the gradient of an output may be a DTensor, which has no memory': (
        'torch/functions.py', 'if has_dtensor(grads):', 'if False:', 'test_torch_dtensor.py', 'other_calls'),
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
    'rows in any order are in one': (
        'torch/rows.py', 'if tuple(step for _, step in axes) == usual else', 'if axes or usual else',
        'test_torch_losses.py', 'other_orders'),
    'second derivatives of losses are nothing': (
        'torch/functions.py', '*(grads if linear else read)', '*grads', 'test_torch_losses.py',
        'test_a_gradient_penalty'),
    'second derivatives of what is linear are nothing': (
        'torch/functions.py', '*(grads if linear else read)', '*read[len(grads):]', 'test_torch_losses.py',
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
    'a search takes any workspace': (
        'torch/sampling.py', 'min(chunk or count, count, (_WORKSPACE', 'max(chunk or count, count, (_WORKSPACE',
        'test_sampling.py', 'test_many_tokens'),
    'a target that top-p does not keep has a gradient': (
        'torch/sampling.py', '.masked_fill(lost, 0))', ')', 'test_sampling.py', 'test_a_target_that'),
    'the id that meets the mass is left out of a list': (
        'torch/sampling.py', 'mass.cumsum(-1) - mass >=', 'mass.cumsum(-1) >=', 'test_sampling.py', 'test_the_fewest'),
    'a top-p of 1 leaves out ids whose mass rounds to 0': (
        'torch/sampling.py', 'if top_p == 1:  # keeps', 'if False:  # keeps', 'test_sampling.py', 'top_p_of_1'),
    'entropy has no gradient of its own': (
        'torch/logprob.py', "            setattr(now.upstream, name, at)",
        "            setattr(now.upstream, name, None if name == 'd_entropy' else at)", 'test_compat.py',
        'test_logp_and_entropy_of_the_same_logits'),
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
    'two times a loss is a tuple of two': (
        'torch/nll.py', "'mul', 'rmul', ", '', 'test_torch_losses.py', 'is_its_scalar and times'),
    'a loss asks the token count for what a tensor has': (
        'torch/nll.py', 'return getattr(self[0], name)\n\n    def function', 'return getattr(self[2], name)\n\n    def function',
        'test_torch_losses.py', 'a_tuple_all_the_same'),
    'functions of torch do not know a loss': (
        'torch/nll.py', 'if isinstance(value, kind):', 'if False:', 'test_torch_losses.py', 'is_its_scalar and stacked'),
    'a smallest input on meta is taken': (
        'torch/tower.py', 'if given[0].is_meta:', 'if False:', 'test_torch_tower.py', 'without_values'),
    'advice about gradients is given where no rank has them': (
        'torch/ranks.py', ' and _FOLLOWED.search(str(why)):', ':', 'test_torch_requires_grad.py', 'advice_about'),
    'a function of logits is called by another name': (
        'torch/cross_entropy.py', "_WHAT = Named('cross_entropy', class", "_WHAT = Named('nll', class", 'test_torch_cross_entropy.py',
        'names_the_function_and_the_argument'),
    'plans of one function are those of another': (
        'torch/logprob.py', '    key = (what, logits.shape,', '    key = (logits.shape,', 'test_torch_cross_entropy.py',
        'names_the_function_and_the_argument'),
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
        'torch/losses.py', ' | (reverse & (d == torch.inf))', '', 'test_torch_losses.py', 'top_k_special'),
    'an id that is none costs nothing where the teacher has 0': (
        'torch/losses.py', 'lp.isnan() | lq', 'lq', 'test_torch_losses.py', 'top_k_special'),
    'a top-k divergence hides what is no number of the teacher': (
        'torch/losses.py', ' | lq.isnan() | (lq == torch.inf)', '', 'test_torch_losses.py', 'top_k_special'),
    'a top-k divergence that is NaN has a gradient': (
        'torch/losses.py', 'd.isnan() | (reverse', '(reverse', 'test_torch_losses.py', 'top_k_special'),
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
    'the gradient of a mean is added over ranks again': (
        'torch/nll.py', '= d_value.data_ptr(), now.at_d_value',
        '= d_value.mul_(2).data_ptr(), now.at_d_value', 'test_torch_logprob.py',
        'test_mean_is_divided_once_over_all_ranks'),
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
    'what is no support is used as one': (
        'torch/support.py', 'if not isinstance(self, Support):', 'if False:', 'test_refusals.py', 'names_it'),
    'strides of an empty shard count': (
        'torch/ready.py', 'if shape is None and not like.numel():', 'if False:', 'test_torch_linear.py', 'any_strides'),
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
    'the store of a torch.distributed that is gone is kept': (
        'torch/ranks.py', 'store and weakref.ref(store)', '(lambda: store)', 'test_torch_bridge.py',
        'test_torch_distributed_may_be_initialised_again'),
    'calls of one shape and other strides share what they prepared': (
        'torch/logprob.py', 'logits.is_contiguous() else logits.stride(), logits.dtype',
        'True else logits.stride(), logits.dtype', 'test_torch_logprob.py',
        'test_calls_that_differ_in_one_thing'),
    'a saved tensor that came back with other strides is read with its own': (
        'torch/ready.py', 't = self._restored(t)', 'pass', 'test_torch_logprob.py',
        'test_saved_tensors_may_come_back'),
    'a storage that was freed is read': (
        'torch/ready.py', 'checked(t, self.what, saved=True)', 'pass', 'test_torch_linear.py',
        'test_a_storage_that_was_freed'),
    'communicators that were destroyed are taken for the next call': (
        'torch/ranks.py', 'self.host.told[0] = True\n', 'pass\n', 'test_torch_bridge.py', 'test_a_graph_that_outlives'),
    'a Head\'s ranks do not hear of an error': (
        'torch/calls.py', 'talk += head.weight, head.bias, head.shard_group, head.tp_group', 'pass', 'test_refusals.py', 'linear and not bridge'),
    'a graph writes main_grad': (
        'torch/compiled.py', " or given.get('weight.main_grad')", '', 'test_torch_compiled.py', 'writes_its_arguments'),
    'an option that is a tensor is kept as it was': (
        'torch/ready.py', 'return (float(temperature)', 'return (temperature', 'test_torch_logprob.py',
        'test_an_option_that_is_a_tensor'),
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
    'a run raises the error that an abort told': (
        'comm.py', "STATUS['ERR_PEER'], STATUS['ERR_ABORTED']", "(STATUS['ERR_PEER'],)", 'test_core.py', 'rank_that_aborted'),
    'ranks that are threads are left behind by one that fails': (
        'comm.py', 'run.end(me, failed)', 'run.end(me, None)', 'test_refusals.py', 'made_anew'),
    'an exception of a rank meets a communicator that was destroyed': (
        'comm.py', '        if comm._handle:\n            comm.abort(why)', '        comm.abort(why)', 'test_refusals.py', 'made_anew'),
    'a split communicator has the ranks of its world to a relayout': (
        'torch/relayout.py', 'group=_counted(group) if isinstance(group, Comm) else group)', 'group=group)', 'test_torch_packed.py',
        'split_communicator'),
    'temperatures of tokens of a teacher are those of the student': (
        'torch/support.py', "order = [name for name in ('temperature', 'target_temperature') if name in found]", 'order = list(found)',
        'test_torch_temperature.py', 'divergences_of and reverse'),
    'the teacher of a student may have one temperature alone': (
        'torch/losses.py', 'isinstance(target_temperature, torch.Tensor) and target_temperature.dim()', 'False', 'test_torch_temperature.py',
        'divergences_of and reverse'),
    'temperatures of tokens beside a mask go unchecked': (
        'torch/support.py', "        _check_heat(what, name, value.given, shape, device)\n    order", '        pass\n    order', 'test_torch_temperature.py', 'no_temperature'),
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
    'weights of tokens do not count in groups': (
        'torch/nll.py', 'grouping.counts(counted(weights,', 'grouping.counts(counted(None,', 'test_torch_grouped.py', 'alone and logits'),
    'a group is divided by its tokens, whatever their classes weigh': (
        'torch/grouped.py', 'self.of_token.double() if of_class is None else', 'self.of_token.double() if True else',
        'test_torch_grouped.py', 'classes_weigh and logits'),
    'a rank counts the classes of its own columns alone': (
        'torch/nll.py', "comm.all_reduce(checked(made, 'class weights of targets'), stream=stream_of(made.device))", 'pass',
        'test_torch_grouped.py', 'all_ranks and logprob'),
    'a graph multiplies by the base of a LoRA alone': (
        'torch/compiled.py', "members['lora'] = tuple(members.pop(name) for name in _LORA)",
        "[members.pop(name) for name in _LORA]", 'test_torch_lora.py', 'compiled'),
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
    'a child of a rank says that the rank has ended',
    'a communicator that was destroyed is aborted at the end',
    'a halo of tensor ranks is that of context ranks',
    'a Head\'s ranks do not hear of an error',
    'a head that one rank cannot make is waited for',
    'a head that ranks do not agree on is told to those of the head alone',
    'a part of ranks that packings count has the first ones',
    'a ragged bridge does not say whether a backward follows',
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
    'an error of a plan is told to no rank',
    'an error that the others have is told again',
    'an exception of a rank meets a communicator that was destroyed',
    'context ranks of a sequence begin at the first',
    'ctrl-c waits for the ranks',
    'each rank weighs the first classes',
    'gradients that are added up are taken for ones that peers write',
    'images stay with the first rank that has them',
    'memory is asked for again of ranks that are elsewhere',
    'positions of rows are those of their first',
    'pre-rolled targets are those of all ranks',
    'ranks in neither grid are waited for',
    'ranks that are threads are left behind by one that fails',
    'rows of a head lie where they lay',
    'shards of other columns are taken',
    'tables that one rank lacks are waited for',
    'the gradient of padding is what its memory had',
    'the group that is set for entropies hears of no refusal',
    'the ranks that share a head do not hear what is wrong with linear_cross_entropy()',
    'those that a refusal finds at a meeting wait for the rest',
    'two towers of their own plan over one communicator',
    'what a handler raised while a rank waited is lost',
    'what is wrong on one rank is told to no rank',
    'what one rank finds wrong in communicate() stays there',
    'what one rank gives cross_entropy() that only PyTorch takes is waited for',
}
