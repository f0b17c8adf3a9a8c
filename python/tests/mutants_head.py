# SPDX-License-Identifier: Apache-2.0
"""Of mutants.py: bugs of losses from hidden states, and of what makes and places heads."""

HEADS = {
    'a linear loss counts tokens that a mask leaves out': (
        'torch/linear_plan.py', 'out = [t.reshape(-1) * weights for t in out]', 'out = [out[0].reshape(-1) * weights, out[1]]',
        'test_torch_cross_entropy.py', 'mask_and_a_z_loss'),
    'the sum of a graph has a gradient': (
        'torch/linear.py', "range(1 if options.get('mode', 'loss') == 'loss' else last,", 'range(last,', 'test_torch_compiled.py',
        'flags and linear_nll and loss'),
    'hidden states of tokens of its own are compared, too': (
        'torch/linear.py', 'if hidden.shape[:-1].numel() == target.numel():', 'if True:', 'test_torch_linear.py', 'own_tokens'),
    'a head group of one rank is another group': (
        'torch/placed.py', 'set(ranks or (torch.distributed.get_rank(),))', 'set(ranks or ())', 'test_torch_dtensor.py', 'one_rank'),
    'a bias of a drop-in is refused where its head is placed': (
        'torch/placed.py', "'lm_head_weight', 'lm_head_bias'", "'lm_head_weight'", 'test_torch_dtensor.py', 'drop_ins'),
    'hidden states of a vocabulary\'s ranks are not compared': (
        'torch/linear.py', 'if comm.check_level > 1:', 'if False:', 'test_torch_linear.py', 'bring_other_things'),
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
    'rows of over_chunks have the gradient of one rank': (
        'torch/placed.py', "comm.reduce_scatter(checked(whole, 'gradient'), checked(mine, 'gradient'), "
        'stream=stream_of(g.device))', 'mine.copy_(whole[each * comm.rank:each * (comm.rank + 1)])', 'test_torch_dtensor.py',
        'over_chunks'),
    'the gradient of padding is what its memory had': (
        'torch/linear_plan.py', 'd_weight[plan.owned:].zero_()', 'd_weight[plan.owned:].fill_(1)',
        'test_torch_head.py', 'test_flat_parts_of_zero3'),
    'a parameter without elements is empty': (
        'torch/linear.py', "if weight.numel() == 0 and hasattr(weight, 'ds_tensor'):", 'if False:',
        'test_torch_head.py', 'test_flat_parts_of_zero3'),
    'gradients that forward made depend on nothing': (
        'torch/linear.py', 'ctx.save_for_backward(anchor)', 'ctx.save_for_backward(anchor.detach())', 'test_torch_losses.py',
        'test_a_gradient_penalty'),
    'a part of the vocabulary is a head of its own': (
        'torch/head.py', "and 'tp_group' not in options:", 'and False:', 'test_torch_head.py', 'a_part_of_the_vocabulary'),
    'an argument is named as another function has it': (
        'torch/linear.py', "weight='linear_weight', bias", "bias", 'test_torch_cross_entropy.py', 'names_the_function_and_the_argument'),
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
    'one rank asks again for heads of another padding': (
        'torch/linear_distill.py', 'key = asked if most is None else', 'key = asked if True else', 'test_torch_linear_distill.py',
        'other_paddings'),
    'weights of tokens that are columns of a table are refused': (
        'torch/linear_distill.py', 'weights.to(run.real).contiguous()', 'weights.to(run.real)', 'test_torch_linear_distill.py', 'any_strides'),
    'rows of a head lie where they lay': (
        'torch/linear_distill.py', 'out[lo - first:hi - first] =', 'out[lo - begin:hi - begin] =', 'test_torch_linear_distill.py', 'rows_of_a_head'),
    'factors of a LoRA have gradients in the dtype of hidden': (
        'torch/linear_distill.py', 'lora = placed.factors(what, head, hidden, comm, False)',
        'lora = tuple(x.to(hidden.dtype) if i < 2 else x for i, x in enumerate(placed.factors(what, head, hidden, comm, False)))',
        'test_torch_linear_distill.py', 'f32_factors'),
    'strides of an empty batch are passed on': (
        'torch/linear_distill.py', 'if t is None or not t.numel():', 'if t is None:', 'test_torch_linear_distill.py', 'empty_batch'),
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
    'a head that one rank cannot make is waited for': (
        'torch/linear_plan.py', 'groups.refuse(comm, why), groups.refuse(head_comm, why)', 'pass', 'test_refusals.py',
        'cannot_be_made or cannot and made'),
    'what makes products is not said to the library': (
        'torch/linear_plan.py', 'gemm=self.gemm)', 'gemm=0)', 'test_torch_linear.py', 'products_on_the_host'),
    'a budget below 0 is none': (
        'torch/linear_plan.py', "if not 0 <= integer('budget', budget) < 2**64:", "if not integer('budget', budget) < 2**64:",
        'test_refusals.py', 'names_it'),
    'max_valid is cut': (
        'torch/linear_plan.py', '>= 2**63:', '>= 2**99:', 'test_refusals.py', 'names_it'),
    'the bias of over_chunks is not looked at': (
        'torch/chunks.py', ' or bias is not None and b != w[:1]:', ':', 'test_refusals.py', 'names_it'),
    'main_grad of what is frozen is written': (
        'torch/placed.py', 'if not t.requires_grad:', 'if not t.requires_grad and not hasattr(t, "main_grad"):',
        'test_torch_linear.py', 'what_is_frozen'),
    'main_grad of what is frozen is needed': (
        'torch/placed.py', 'if not t.requires_grad:', 'if False:', 'test_torch_linear.py', 'what_is_frozen'),
    'main_grad is written over': (
        'torch/linear.py', 'd_head,\n                           main is not None, frozen',
        'd_head,\n                           False, frozen',
        'test_torch_linear.py', 'test_gradients_are_added_to_main_grad'),
    'a sequence-parallel rank reads its own tokens as all': (
        'torch/linear_plan.py', "scatter = d_hidden == 'reduce_scatter' and comm.size > 1",
        'scatter = False', 'test_torch_linear.py', 'test_d_hidden_partial_and_scattered'),
    'the lm_head keeps logits that no backward will ask for': (
        'torch/linear.py', 'backward = grad and (need[0] or d_head or d_lora)', 'backward = need[0] or d_head or d_lora',
        'test_torch_linear.py', 'test_without_gradients_nothing_is_kept'),
    'calls of other options share what they prepared': (
        'torch/linear.py', 'linear, values, members, support is None, meta(', 'linear, members, support is None, meta(',
        'test_torch_linear.py', 'test_calls_that_differ_in_one_thing'),
    'a head that moved is read where it was': (
        'torch/linear_plan.py',
        'elif core.bound == (self.number, self.weight.data, self.bias and self.bias.data):',
        'elif core.bound and core.bound[0] == self.number:', 'test_torch_linear.py',
        'test_calls_that_differ_in_one_thing'),
    'num_items_in_batch below 1 is 1': (
        'torch/linear.py', ' factor = 1 / den\n', ' factor = 1 / den.clamp_min(1)\n', 'test_compat.py',
        'test_head_and_loss_in_chunks'),
    'entropy_sum has no gradient': (
        'torch/linear.py', 'if g_entropy is not None:', 'if False:', 'test_compat.py',
        'test_entropy_of_the_head_has'),
    'the gradient of entropy_sum replaces that of the loss': (
        'torch/linear.py', 'd * by + e * by_more', 'e * by_more', 'test_compat.py', 'test_head_and_loss_in_chunks'),
    'gradients that may be asked for again are scaled in place': (
        'torch/linear.py', 'd.dtype is plan.dtype and not ctx.entropy', 'd.dtype is plan.dtype', 'test_compat.py',
        'test_head_and_loss_in_chunks'),
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
    'what was kept is read from the next multiple of 256': (
        'torch/linear_plan.py', 'if t.data_ptr() % 256 == 0:', 'if True:', 'test_torch_linear.py',
        'test_what_is_kept_may_come_back'),
    'ranks of a loss do not tell what requires grad': (
        'torch/linear.py', 'doing=_doing(need, grad)):\n        ready = plan.ready(comm, head_comm, not',
        'doing=None):\n        ready = plan.ready(comm, head_comm, not', 'test_torch_requires_grad.py', 'losses and loss-True'),
    'the LoRA of a head with a sharded weight is that of its first rows': (
        'torch/placed.py', 't = part if shares is None else Gathered.apply(part, shares, found.rows)', 't = part',
        'test_torch_lora.py', 'fsdp2'),
    'gradients of a LoRA are not those of FSDP2': (
        'torch/placed.py', 'part, _ = averaged(what, part, None, t, of.grad_reduction, size, copies, False)', 'pass',
        'test_torch_lora.py', 'fsdp2'),
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
    'a graph has gradients of the losses of groups in mode loss': (
        'torch/linear.py', "last = 2 + ('groups' in options)", 'last = 2', 'test_torch_grouped.py', 'compiled and loss'),
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
    'ranks may have other factors A': (
        'torch/linear.py', '**({} if a is None else {"the LoRA\'s A": a})', '', 'test_torch_lora.py', 'other_factors'),
}
