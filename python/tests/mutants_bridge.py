# SPDX-License-Identifier: Apache-2.0
"""Bugs of bridges, of communicators, plans, memory and grids; a part of mutants.py, which says what a row is."""

BRIDGES = {
    'what records operations sees a bridge\'s second call': (
        'torch/engine.py', 'comm.told, watched,', 'comm.told, bool,', 'test_torch_recorded.py', 'like_the_one_before'),
    'signs of what a bridge carries are those of its memory': (
        'torch/uniform.py', ' and not t.is_neg():', ':', 'test_torch_bridge.py', 'other_signs'),
    'a frozen bridge lets the gradient back': (
        'torch/uniform.py', 'if ready.core.no_grad:', 'if False:', 'test_torch_bridge.py', 'frozen'),
    'a frozen bridge of a graph lets the gradient back': (
        'torch/bridge.py', 'x.detach() if engine.frozen and x is not None else x', 'x', 'test_torch_compiled.py',
        'frozen'),
    'rows that are added replace what is there': (
        'torch/ragged.py', "('index_add' if add else 'index_copy')", "'index_copy'", 'test_torch_placed.py', 'oracle_places'),
    'a buffer that is not written in place is': (
        'torch/ragged.py', "+ '_' * inplace", "+ '_'", 'test_torch_placed.py', 'oracle_places'),
    'the length of a buffer that rows are placed in is not looked at': (
        'torch/ragged.py', 'if rows.shape[0] != where:', 'if False:', 'test_torch_placed.py', 'a_wrong_buffer'),
    'replicas have each other\'s lists of segments': (
        'segments.py', 'of[replica].append(segment)', 'of[-1 - replica].append(segment)', 'test_ragged.py', 'test_balance'),
    'signs of what a ragged bridge carries are those of its memory': (
        'torch/ragged.py', ' or t.is_neg():', ':', 'test_torch_ragged.py', 'other_signs'),
    'a class that a module exports is not in it': (
        '__init__.py', 'from .layout import Layout, Owned', 'from .layout import Layout', 'test_abi.py',
        'test_each_exported_name'),
    'a ragged bridge is made before its layouts are looked at': (
        'torch/engine.py', "if self.kind == 'ragged':", 'if False:',
        'test_torch_ragged.py', 'test_a_zigzag_source_is_refused'),
    'samples by ceil are taken for blocks': (
        'torch/moves.py', 'split.kind) for split', 's.SPLIT_BLOCK) for split', 'test_torch_layouts.py',
        'test_samples_by_ceil'),
    'the check compares nothing': (
        'check.py', 'if not abs(a - b) <= tolerance:', 'if False:', 'test_check.py', 'test_check_finds'),
    'a longer layout is unpickled without its end': (
        'layout.py', 'if len(raw) != c.sizeof(s.Layout):', 'if False:', 'test_core.py', 'another_version'),
    'the first dim of data is the fastest': (
        'layout.py', 'for split, extent in splits_of(layout, axis):', 'for split, extent in splits_of(layout, axis)[::-1]:', 'test_megatron.py',
        'test_dims_of_data'),
    'samples count over dp alone': (
        'torch/engine.py', 'parts_of(self.src, axis) for axis in',
        "parts_of(self.src, axis) if axis else self.src.grid.extent('dp') for axis in", 'test_megatron.py', 'test_samples_of_gtp'),
    'the whole sequence fits the recipe, not each part': (
        'partition.py', 'choice(\'recipe\', recipe, RECIPES) * cp', 'choice(\'recipe\', recipe, RECIPES)',
        'test_megatron_core.py', 'test_padding_by_the_name'),
    'names that other modules have imported stay': (
        'megatron.py', "if id(value) in old and module is not sys.modules[__name__]:",
        "if id(value) in old and module.__name__ in _UPSTREAM.values():", 'test_megatron_core.py', 'test_install_replaces'),
    'gradients of rows are not gathered over tp': (
        'megatron_shard.py', 'whole = g.new_empty((comm.size * g.shape[0], *g.shape[1:]))\n    comm.all_gather('
        'g.contiguous(), whole,', 'whole = g.repeat(comm.size, *[1] * (g.dim() - 1))\n    comm.all_gather('
        'g.contiguous(), whole.clone(),', 'test_megatron_core.py', 'test_partition_adapter_shards'),
    'packed batches are cut as if they were dense': (
        'megatron_shard.py', 'cp_rank=cp_rank, cu_padded=cu)', 'cp_rank=cp_rank)', 'test_megatron_core.py',
        'test_partition_adapter_shards'),
    'ids of the destination are compared with each other alone': (
        'torch/alike.py', 'len({*having[0], *having[1]}) > 1', 'max(map(len, having)) > 1', 'test_torch_samples.py',
        'named_on_all_ranks'),
    'a rank that brings no ids of its samples is not missed': (
        'torch/alike.py', '(of is not None or layout.holds(r))', 'of is not None', 'test_torch_samples.py', 'numbers_of_samples'),
    'samples are compared among ranks that exchange them': (
        'torch/engine.py', 'self._concerned(groups.group_ranks(self.group), _me()), torch', 'self._ranks, torch',
        'test_torch_samples.py', 'named_on_all_ranks'),
    'the communicator of megatron scales no gradient': (
        'megatron.py', "'grad_scale': grad_scale}", "'grad_scale': 1.0}", 'test_megatron_scale.py', 'one_process'),
    'the gradient of the encoder is doubled': (
        'torch/uniform.py', 'if own is not None and not (direction and arena.sums):', 'if direction and x is not None:\n'
        '                x.mul_(2)\n            if own is not None and not (direction and arena.sums):', 'test_check.py',
        'test_check_of_processes_passes'),
    'the place of a rank counts from the other side': (
        'megatron.py', 'SliceInfo(places[self.current_rank][0] % self.scale * size, size)',
        'SliceInfo(places[self.current_rank][0] // self.scale * size, size)',
        'test_megatron.py', 'test_map_b'),
    'a spec is no grid where a communicator is split': (
        'comm.py', 'grid = grid if isinstance(grid, Grid) else Grid(grid)', 'pass', 'test_torch_bridge.py',
        'test_an_all_reduce_that_was_forgotten'),
    'a world of no ranks is one': (
        'megatron.py', 'said.isdigit() and int(said) > 0', 'said.isdigit()',
        'test_megatron.py', 'test_constructor_refuses_in_these_words'),
    'a direction does not equal its string': (
        'megatron.py', 'class BridgeDirection(str, enum.Enum)', 'class BridgeDirection(enum.Enum)',
        'test_megatron.py', 'test_direction_equals_its_string'),
    'ranks along every dim are taken for copies': (
        'megatron.py', 'copies = _list(extra) if self._exact else', 'copies = _list(extra) if False else',
        'test_megatron.py', 'test_communicator_with_an_undeclared_extra_dim_is_refused'),
    'members of a gather group by rank, whatever their place': (
        'megatron.py', 'return [[rank for _, rank in sorted(members)]',
        'return [[rank for _, rank in members[::-1]]', 'test_megatron.py', 'test_map_a'),
    'context addends share a gather group': (
        'megatron.py', 'key, place = (src_dp, tp, cp), dp', 'key, place = (src_dp, tp, 0), dp',
        'test_megatron.py', 'test_map_b'),
    'a copy of a communicator ends it': (
        '_lib.py', 'class Handle(Unique):', 'class Handle:', 'test_core.py', 'have_no_copies'),
    'a name that was cut inside a letter is an error': (
        'comm.py', "self.handle).decode('utf-8', 'replace')", 'self.handle).decode()', 'test_core.py',
        'cut_inside_a_letter'),
    'copies of packed partitions are dense': (
        'partition.py', 'cu_padded=cu, split=', 'cu_padded=None, split=', 'test_core.py', 'have_memory_of_their_own'),
    'an interrupted allocation is an address that was never written': (
        'torch/arena.py', 'except BaseException:  # the library', 'except RuntimeError:  # the library', 'test_torch_arena.py',
        'test_allocator_that'),
    'memory that was given away for a call is gone before it': (
        'comm.py', '    return t, count', '    return s.Tensor.from_buffer_copy(t), count', 'test_dlpack.py',
        'test_calls_hold_what_they_were_given'),
    'memory that was given away to be registered is gone': (
        'memory.py', 'memory._view = t', 'pass', 'test_dlpack.py', 'test_registered_memory_holds'),
    'a plan reads the position table that its layout had': (
        'plan.py', 'self._tables = ', '_ = ', 'test_core.py', 'test_a_position_table_lives'),
    'a bridge reads the position table that its layout had': (
        'bridge.py', 'self._tables = ', '_ = ', 'test_core.py', 'test_a_position_table_lives'),
    'a bridge outlives its communicator': (
        'comm.py', 'for handle, end in reversed(users):', 'for handle, end in ():', 'test_core.py',
        'test_a_communicator_ends_bridges_that_live_longer'),
    'the adjoint of unshard takes the first positions': (
        'torch/partition.py', 'return Along.apply(d_y, *ctx.of), None',
        'return Along.apply(d_y, *ctx.of) if ctx.of[2] else d_y.narrow(ctx.of[1], 0, len(ctx.of[0])), None', 'test_torch_partition.py',
        'test_gradients_are_each_other_s_adjoint'),
    'targets are written over the tokens': (
        'torch/partition.py', 'targets = tokens.new_empty(tokens.shape)', 'targets = tokens',
        'test_torch_partition.py', 'test_targets_are_rolled_before_they_are_cut'),
    'the library allocates what the caller wants to': (
        'bridge.py', 'raw.allocator = allocator', 'pass', 'test_core.py', 'test_memory_of_a_bridge'),
    'bridges of PyTorch take memory past its allocator': (
        'torch/uniform.py', 'allocator=arenas.allocator(device),', '',
        'test_torch_arena.py', 'test_bridges_own_memory'),
    'peers are sent to an output that the pool had no place for': (
        'torch/uniform.py', 'arena.reached[direction]:', 'arena.reached[direction] and lent is None:', 'test_torch_arena.py',
        'test_outputs_are_in_the_pool'),
    'what has left the pool takes its space for ever': (
        'torch/arena.py', 'self._used -= one[1]', 'pass', 'test_torch_arena.py', 'test_outputs_are_in_the_pool'),
    'a call like the one before goes over a communicator that died': (
        'torch/engine.py', ' and not again[2][0] and', ' and', 'test_torch_bridge.py', 'test_a_graph_that_outlives'),
    'a call like the one before goes over a group that was destroyed': (
        'torch/engine.py', '(self._ranks is None or groups.alive(self.group))', 'True', 'test_torch_bridge.py',
        'test_what_cannot_be_is_refused'),
    'a call like the one before has its shape': (
        'torch/engine.py', 'again[1] == (x.shape, x.dtype, x.device, samples, shape)', 'True', 'test_torch_bridge.py',
        'test_rows_that_differ_are_named'),
    "what stays on a rank begins with the next one's sample": (
        'torch/moves.py', '0), first * unit,', '0), (first + 1) % 4 * unit,', 'test_torch_bridge.py',
        'test_a_gradient_that_stays'),
    'gradients of other context ranks are forgotten': (
        'torch/moves.py', 'if back or options', 'if options', 'test_torch_bridge.py', 'test_a_gradient_that_stays'),
    'samples that another rank has stay': (
        'torch/moves.py', 'if not 0 <= first < end <= given.b1 - given.b0:', 'if first == end:', 'test_torch_bridge.py',
        'test_a_gradient_that_stays'),
    'an output is a view of the input': (
        'torch/uniform.py', 'part if direction and', 'part if', 'test_torch_bridge.py', 'test_a_gradient_that_stays'),
    'memory of PyTorch is used before earlier work on it has ended': (
        'torch/arena.py', 'stream.synchronize()', 'pass', 'test_torch_blocks.py', 'test_memory_of_pytorch_s_allocator'),
    'each shape makes a bridge of its own': (
        'torch/engine.py', 'made = self._cores.get((dtype, device))', 'made = None', 'test_torch_arena.py',
        'test_shapes_share'),
    'what is known of shapes grows with each shape': (
        'torch/uniform.py', 'if len(self._fits) >= _FITTING:', 'if False:', 'test_torch_arena.py', 'test_shapes_share'),
    'memory grows for shapes that fit': (
        'torch/arena.py', 'return all(map(int.__le__, counts, self.counts)) and', 'return counts == self.counts and',
        'test_torch_arena.py', 'test_shapes_share'),
    'a backward runs in the shape of the last call': (
        'torch/uniform.py', 'if shape == self.shape:', 'if self.shape is not None and self.shape[2] == shape[2]:',
        'test_torch_arena.py', 'test_shapes_share'),
    'a block is given away twice': (
        'torch/arena.py', 'offset = free.popleft()', 'offset = free[0]', 'test_torch_arena.py',
        'test_blocks_come_back'),
    'outputs that lie elsewhere are taken for ones of the pool': (
        'torch/arena.py', 'return self._begin <= t.data_ptr() < self._begin + self.nbytes and', 'return', 'test_torch_arena.py',
        'test_outputs_are_in_the_pool'),
    'the pool of ragged batches has space for y alone': (
        'torch/ragged.py', '+ (0 if sums else back)', '', 'test_torch_arena.py', 'test_outputs_of_ragged'),
    'a registered tensor is given back under a late peer': (
        'memory.py', '_stays.append(self.owner)', 'pass', 'test_torch_blocks.py', 'test_memory_that_a_failure_left'),
    'a block is used again before the stream that had it is done': (
        'torch/arena.py', '_behind(region.device, last)', 'pass', 'test_torch_blocks.py',
        'test_another_stream_waits'),
    'the workspace is used again before the stream that had it is done': (
        'torch/arena.py', '_behind(device, self._last)', 'pass', 'test_torch_blocks.py',
        'test_another_stream_waits'),
    'a graph has a block that others get': (
        'torch/arena.py', 'not self.reached[1 - side] or region._capturing()', 'not self.reached[1 - side]', 'test_torch_blocks.py',
        'test_captured_calls'),
    'sums are read from a workspace that has something else': (
        'torch/arena.py', 'workspace.copy_(own)', 'pass', 'test_torch_arena.py', 'test_checkpointing'),
    'ranks out of reach end the program': (
        'torch/engine.py', "why.status != STATUS['ERR_UNBUILT']", 'True', 'test_torch_arena.py',
        'test_out_of_reach'),
    'memory is asked for again of ranks that are elsewhere': (
        'torch/arena.py', "why.status not in (STATUS['ERR_PEER'], STATUS['ERR_ARG'])", 'True',
        'test_torch_arena.py', 'test_without_memory'),
    'the same, when its communicator was destroyed before': (
        'comm.py', 'self.died = True', 'pass', 'test_torch_blocks.py', 'test_memory_that_a_failure_left'),
    'reached is what one host would reach': (
        'torch/moves.py', "ranks_per_node=options['ranks_per_node'], nodes", 'ranks_per_node=0, nodes',
        'test_torch_blocks.py', 'test_what_is_reached_goes_by_the_hosts'),
    'a plan forgets which rank is on which node': (
        'plan.py', 'raw.nodes = self._nodes', 'pass', 'test_core.py', 'test_plans_by_nodes'),
    'a plan asked for one level takes two': (
        'plan.py', 'one_level=one_level)', 'one_level=False)', 'test_core.py', 'test_plans_by_nodes'),
    'memory is exposed as if GPUs passed on what entered a node': (
        'torch/moves.py', 'one_level=True', 'one_level=False', 'test_torch_blocks.py',
        'test_what_is_reached_goes_by_the_hosts'),
    'memory is exposed as if all ranks shared a host': (
        'torch/moves.py', "nodes = None if options['ranks_per_node'] else", 'nodes = None and',
        'test_torch_blocks.py', 'test_what_is_reached_goes_by_the_hosts'),
    'masks come back as bytes': (
        'torch/uniform.py', "0 if owner.buffers and str(dtype) == 'torch.bool' else owner.buffers", 'owner.buffers',
        'test_torch_arena.py', 'test_masks_stay_masks'),
    'memory is freed under a late peer': (
        'memory.py', 'lib().colo_comm_check(self.comm.handle) < 0', 'False', 'test_torch_blocks.py',
        'test_memory_that_a_failure_left'),
    'a bridge by peers goes another way where there are none': (
        'torch/uniform.py', "self._needed and device.type != 'cuda' and not reachable", 'False', 'test_torch_arena.py',
        'test_what_cannot_be'),
    'a rank that failed before the others were there tries again without them': (
        'torch/arena.py', "why.status not in (STATUS['ERR_PEER'], STATUS['ERR_ARG'])",
        "why.status != STATUS['ERR_PEER']", 'test_torch_arena.py', 'test_an_error_before_the_ranks_met'),
    'text under an image keeps its gradient': (
        'torch/ragged.py', '.index_fill(0, ctx.ragged.written(call.held, d_y.device), 0)', '', 'test_torch_ragged.py',
        'test_random_batches_on_two_processes'),
    'the gradient of a view goes to what is carried': (
        'torch/ragged.py', 'return before, None, d_y', 'return d_y, None, before', 'test_torch_ragged.py', 'may_be_views'),
    'what is carried into views has no gradient': (
        'torch/ragged.py', 'Written.apply(buffer, call, y)', 'Written.apply(buffer, call, y.detach())', 'test_torch_ragged.py', 'may_be_views'),
    'rows that lose their gradient are counted from the wrong end of a run': (
        'torch/ragged.py', 'first - (count.cumsum(0) - count)', 'first - count', 'test_torch_ragged.py',
        'test_a_frozen_encoder'),
    'a segment begins one position late': (
        'segments.py', "'pos': pos, 'row_pos'", "'pos': pos and [p + 1 for p in pos], 'row_pos'", 'test_ragged.py',
        'test_worked_example'),
    'a rank goes on with its own tables': (
        'segments.py', 'cls(**tables)', 'cls(**(local._tables if local else tables))', 'test_torch_ragged.py',
        'test_tables_are_gathered'),
    'batches of as many segments are one': (
        'torch/ragged.py', 'key = merged, segments', 'key = merged, len(segments)', 'test_torch_ragged.py',
        'test_forwards_of_many_tables'),
    'a rank without rows does not come to backward': (
        'torch/ragged.py', 'anchor = torch.empty(0, device=device, requires_grad=True) if grad and',
        'anchor = None if grad and', 'test_torch_ragged.py', 'test_ranks_without_rows'),
    'tensors of another shape are taken for those of the call before': (
        'torch/ragged.py', 'and kinds == call.kinds', 'and [] != kinds', 'test_torch_ragged.py',
        'test_bad_input_of_one_rank'),
    'tables of a call that is prepared are the oldest': (
        'torch/ragged.py', 'self._batches.move_to_end((call.merged, call.segments))', 'pass', 'test_torch_packed.py', 'keep_the_same_tables'),
    'a call carries the tensors of the one before': (
        'torch/ragged.py', 'raw.data = address = t.data_ptr()', 'raw.data = address = raw.data or t.data_ptr()',
        'test_torch_ragged.py', 'test_calls_like_the_one_before'),
    'a capture sets tables': (
        'torch/ragged.py', 'carried and key not in self._batches) and self._capturing()', 'False) and False',
        'test_torch_ragged.py', 'test_a_capture_has_tables'),
    'indices that a graph reads go with their batch': (
        'torch/ragged.py', 'self._graphs[index.data_ptr()] = index', 'pass', 'test_torch_ragged.py',
        'test_what_a_graph_reads'),
    'text with positions first is written as it lies': (
        'torch/ragged.py', 'if min(length, count) > 1 and', 'if False and', 'test_torch_ragged.py', 'positions_first'),
    'a view with history is written in place': (
        'torch/ragged.py', 'into.requires_grad and into._base is not None', 'False', 'test_torch_ragged.py', 'views_of_what_learns'),
    'forward writes over a leaf': (
        'torch/ragged.py', 'if t is not None and t.is_leaf and t.requires_grad:', 'if False:',
        'test_torch_ragged.py', 'test_bad_input_of_one_rank'),
    'x is not where peers read it': (
        'torch/arena.py', 'here.copy_(t.view(here.dtype))', 'pass', 'test_torch_arena.py', 'test_ragged_batches_go'),
    'gradients stay where peers wrote them': (
        'torch/ragged.py', 't.copy_(here)', 'pass', 'test_torch_arena.py', 'test_ragged_batches_go'),
    'gradients that are added up are taken for ones that peers write': (
        'torch/ragged.py', 'not (self.sums if backward else self.merged)', 'backward or not self.merged',
        'test_torch_arena.py', 'test_ragged_batches_go'),
    'memory that peers reach stays as small as it was': (
        'torch/arena.py', 'if old is None or nbytes > old.nbytes or stale:', 'if old is None or stale:',
        'test_torch_arena.py', 'test_memory_of_ragged'),
    'dropped bridges take the memory that another one needs': (
        'torch/arena.py', 'gc.collect()', 'pass', 'test_torch_blocks.py', 'garbage_is_gone'),
    'a bridge whose memory cannot be opened goes on without': (
        'torch/arena.py', 'if grows and not memory', 'if False and not memory', 'test_torch_blocks.py', 'garbage_is_gone'),
    'a dropped bridge waits for the garbage collector': (
        'torch/ragged.py', 'weakref.proxy(owner)', 'owner', 'test_torch_placed.py', 'dropped'),
    'the same, by its last call': (
        'torch/ragged.py', '= weakref.ref(ragged), batch', '= (lambda: ragged), batch', 'test_torch_placed.py', 'dropped'),
    'the same, by what an error calls': (
        'torch/ragged.py', 'lambda me=weakref.proxy(self): me.forget()', 'self.forget', 'test_torch_placed.py', 'dropped'),
    'a dropped bridge is gone before the gradient of its buffer': (
        'torch/ragged.py', 'call, call.ragged(), y.shape', 'call, weakref.proxy(call.ragged()), y.shape', 'test_torch_placed.py',
        'dropped'),
    'memory of a call that was refused stays': (
        'torch/ragged.py', 'self.workspace.forget()', 'pass', 'test_torch_arena.py', 'test_features_that_differ'),
    'an argument that Python refuses stays on its rank': (
        'comm.py', "if not getattr(why, 'status', 0) and self._handle", 'if False and self._handle', 'test_ragged.py',
        'test_what_python_refuses'),
    'ragged tensors on the host are said to be reached': (
        'torch/ragged.py', "self.transport == 'peer' and told.device.type != 'cuda'", 'False',
        'test_torch_ragged.py', 'test_what_a_ragged_bridge_cannot'),
    'batches outlive their bridge': (
        'bridge.py', 'while self._batches:', 'while False:', 'test_ragged.py', 'test_batches_of_a_collected_cycle'),
    'a rank that asks for rows reorders its batches': (
        'torch/ragged.py', 'if not carried:', 'if False:', 'test_torch_ragged.py', 'test_rows_asked_by_one_rank'),
    'a batch that one rank asked for is kept twice': (
        'torch/ragged.py', 'if key not in self._batches:', 'if True:', 'test_torch_ragged.py',
        'test_rows_asked_by_one_rank'),
    'rows are counted on the default device': (
        'torch/ragged.py', '**host).index_add_', 'dtype=torch.int64).index_add_', 'test_torch_ragged.py', 'default_device'),
    'an empty table is passed as it is': (
        'segments.py', 'None if now is None else', 'now and', 'test_ragged.py', 'test_balance'),
    'a ticket that is dropped keeps its place': (
        'torch/ticket.py', 'self.end()\n            except', 'pass\n            except', 'test_torch_ticket.py', 'are_named'),
    'finish starts no gradient': (
        'torch/engine.py', 'd_ys[0], given, back)', 'd_ys[0], given)', 'test_torch_ticket.py', 'lies_between'),
    'finish starts no gradient of a ragged batch': (
        'torch/ragged.py', 'for i in range(call.n)], back)', 'for i in range(call.n)])', 'test_torch_ticket.py', 'lies_between'),
    'what finish returns is a view': (
        'torch/ticket.py', 'ctx.mark_dirty(*ys)  # so', '# so', 'test_torch_ticket.py', 'uniform_batches'),
    'a started call lies in a cycle with its output': (
        'torch/uniform.py', 'held=[t.detach() for t in (x, y) if t is not None]', 'held=(x, y)', 'test_torch_ticket.py',
        'next_step_right and uniform'),
    'a started ragged call lies in a cycle with its output': (
        'torch/ragged.py', 'held=[t.detach() for t in (*given, *out)]', 'held=(given, out)', 'test_torch_ticket.py',
        'next_step_right and ragged'),
    'a gradient under way when backward failed is taken for that of the next one': (
        'torch/ticket.py', 'ctx.flight.back = back, ctx.begun(d_ys, back)',
        'ctx.flight.back = ctx.flight.back or (back, ctx.begun(d_ys, back))', 'test_torch_ticket.py', 'next_step_right and uniform'),
    'a ticket of which nothing is under way outlives its bridge': (
        'torch/ticket.py', '_ = self._of.handle', '_ = self._of', 'test_torch_ticket.py', 'next_step_right and uniform'),
    'a bridge does not say whether a backward follows': (
        'torch/uniform.py', 'self.bridge.expect_backward(follows)', 'pass', 'test_torch_requires_grad.py', 'frozen_encoder_of_one_rank_is'),
    'a ragged bridge does not say whether a backward follows': (
        'torch/ragged.py', 'self.held.batch._bridge.expect_backward(follows)', 'pass', 'test_torch_requires_grad.py',
        'no_grad and merged'),
    'a call like the last one does not say whether a backward follows': (
        'torch/engine.py', 'True, None, x.requires_grad and torch.is_grad_enabled())', 'True, None, True)',
        'test_torch_requires_grad.py', 'frozen_encoder_of_one_rank_is'),
    'ranks do not tell which of them have a backward': (
        'torch/uniform.py', 'dict(self.doing, requires_grad=follows)', 'self.doing', 'test_torch_requires_grad.py',
        'only_backward_moves'),
    'a tower that is frozen on one rank is not told from others': (
        'torch/tower_plan.py', 'if len({t.trains for t in tables}) > 1:', 'if False:', 'test_torch_requires_grad.py', 'frozen_on_one_rank'),
    'a bridge does not scale its gradient': (
        'torch/uniform.py', 'return d_x if scale == 1 else', 'return d_x if True else', 'test_torch_bridge.py', 'grad_scale'),
    'a ragged bridge does not scale its gradient': (
        'torch/ragged.py', 'if call.grad_scale != 1:', 'if False:', 'test_torch_bridge.py', 'grad_scale'),
    'a ticket is finished twice': (
        'torch/ticket.py', 'if finished is None:', 'if False:', 'test_torch_ticket.py', 'are_named'),
    'the gradient of a tower is not multiplied for what averages it': (
        'torch/tower.py', 'if self.grad_scale != 1 and t.requires_grad:', 'if False:', 'test_torch_tower.py',
        'do_not_synchronize and ddp'),
    'a rank without images leaves its tower out of backward': (
        'torch/tower.py', 'outs = [t[:0] for t in outs]', 'outs = [t[:0].detach() for t in outs]', 'test_torch_tower.py',
        'a_step_of_text'),
    'an image that several ranks have is there several times': (
        'torch/tower_plan.py', 'if key in found:', 'if False:', 'test_torch_tower.py', 'encodes_them_alone'),
    'pixels come from another rank though there they are': (
        'torch/tower_plan.py', 'owner = to if to in brought_by else min', 'owner = min', 'test_torch_tower.py', 'encodes_them_alone'),
    'images stay with the first rank that has them': (
        'torch/tower_plan.py', 'key=lambda r: (busy[r], r)', 'key=lambda r: r', 'test_torch_tower.py',
        'encodes_them_alone'),
    'images move though they are level': (
        'torch/tower_plan.py', 'if max(busy) <= (1 + stick) * max(a + b for a, b in zip(begun, by_rank(costs, ranks, size))):', 'if False:', 'test_torch_tower.py', 'level_ranks_stay'),
    'pixels go as they lie, whichever are wanted': (
        'torch/tower.py', 'if own != list(had):', 'if False:', 'test_torch_tower.py', 'random_steps'),
    'a patch attends to other frames': (
        'torch/tower.py', 'frames * patches * (patches + self.alpha)', 'frames * patches * (frames * patches + self.alpha)',
        'test_torch_tower.py', 'alpha_is_fitted'),
    'alpha is that of each rank\'s own clock': (
        'torch/tower.py', "struct.pack('dd', *times))[0]", "struct.pack('dd', *times))[comm.rank]", 'test_torch_tower.py',
        'alpha_is_fitted'),
    'lengths of one replica need not agree': (
        'torch/tower_plan.py', 'if said != table.text:', 'if False:', 'test_torch_tower.py', 'other-lengths or lengths'),
    'splits of replicas need not agree': (
        'torch/tower_plan.py', "if len({getattr(text, 'split', None) for _, text in texts.values()}) > 1:", 'if False:',
        'test_torch_tower.py', 'another-split or split'),
    'a replica has the sequences of all': (
        'packing.py', 'q for q, of in enumerate(dp) if of == replica]', 'q for q in range(len(dp))]', 'test_torch_tower.py',
        'cut_by_themselves'),
    'sequences on all context ranks are on one, among others': (
        'packing.py', "cp=of('seq_cp', cp) if cut", "cp=of('seq_cp', 1) if cut", 'test_torch_tower.py', 'cut_by_themselves'),
    'the grid of an image is that of the first rank that brings it': (
        'torch/tower_plan.py', 'if mine != its:', 'if False:', 'test_torch_tower.py', 'another-grid or grid'),
    'a replica is a rank': (
        'layout.py', 'at = at * extent + coords[int(split.dim)]', 'at = rank', 'test_torch_tower.py', 'encodes_them_alone'),
    'positions of rows are those of their first': (
        'torch/tower_plan.py', 'return at if len(at) == rows else', 'return list(range(at[0], at[0] + rows)) if len(at) == rows else',
        'test_torch_tower.py', 'positions_of_their_own'),
    'positions of rows are those of the first rank that brings them': (
        'torch/tower_plan.py', 'if mine != its:', "if mine != its and what == 'grids':", 'test_torch_tower.py', 'elsewhere'),
    'a tower compares nothing': (
        'torch/tower.py', 'comm.check_level < 1 + self._compared', 'True', 'test_torch_tower.py', 'bring_other_things'),
    'a tower compares its first call alone': (
        'torch/tower.py', 'comm.check_level < 1 + self._compared', 'self._compared', 'test_torch_tower.py', 'bring_other_things'),
    'a tower compares text under images': (
        'torch/tower.py', 'if len(t) > most else t) for', 'if False else t) for', 'test_torch_tower.py', 'bring_other_things'),
    'text of context ranks is compared': (
        'torch/tower.py', "if self.output == 'sharded' else 0)\n", 'if False else 0)\n', 'test_torch_tower.py', 'parts_are_compared'),
    'parts of a parameter are compared with others': (
        'torch/tower.py', 'tuple(c for c, placed in zip(at, placements) if not placed.is_replicate())', '()', 'test_torch_tower.py',
        'parts_are_compared'),
    'a checksum forgets the place': (
        'torch/alike.py', 'x = (x ^ (place[:len(x)]', 'x = (x ^ 0 * (place[:len(x)]', 'test_torch_tower.py', 'checksums'),
    'a checksum begins anew in each step': (
        'torch/alike.py', '(first * _ODD[0] + 2 ** 63)', '2 ** 63', 'test_torch_tower.py', 'checksums'),
    'a checksum is that of memory, not of elements': (
        'torch/alike.py', 'flat = flat.clone() if', 'flat = flat if', 'test_torch_tower.py', 'checksums'),
    'two images of a rank at a position are one': (
        'torch/tower_plan.py', 'if r in self._brought[other]:', 'if False:', 'test_torch_tower.py', 'images-at-a-position or position'),
    'a cost below a half is none': (
        'torch/tower_plan.py', 'round(math.ldexp(cost, shift))', 'round(cost)', 'test_torch_tower.py', 'any_unit'),
    'a cost may be anything': (
        'torch/tower.py', '0 <= (found := float(value)) < math.inf', '(found := float(value)) is not None', 'test_torch_tower.py',
        'no_number'),
    'text of one position a sequence is one sequence': (
        'torch/tower.py', 'if like.dim() == 3 else 1', 'if like.dim() == 3 and like.shape[1] > 1 else 1', 'test_torch_tower.py',
        'one_position'),
    'what run() has learns only with the tower': (
        'torch/tower.py', 'itertools.chain(self.tower.parameters(), outs)', 'self.tower.parameters()', 'test_torch_tower.py',
        'learns_nothing'),
    'a tower runs where its first parameter is': (
        'torch/tower.py', ', self._smallest[:1])', ')', 'test_torch_tower.py', 'learns_nothing'),
    'a copy has the last call of what was copied': (
        'torch/tower.py', 'dict(self.__dict__, _last=None,', 'dict(self.__dict__,', 'test_torch_tower.py', 'another_one_of_its_ranks'),
    'a tower that is loaded is on the rank that saved it': (
        'torch/tower.py', '_rank=None, ', '', 'test_torch_tower.py', 'another_one_of_its_ranks'),
    'a tower is no part of its module': (
        'torch/tower.py', '        self.tower, self.stick,', "        self.__dict__['tower'], self.stick,", 'test_torch_modules.py',
        'parameters_of_its_tower'),
    'the smallest input stays what it was when the tower is cast': (
        'torch/tower.py', 'self._smallest = pixels.to(like.dtype if like.is_meta else like), grid', 'pass', 'test_torch_modules.py', 'cast'),
    'the smallest input is memory that nobody wrote': (
        'torch/tower.py', 'pixels.to(like.dtype if like.is_meta else like), grid', 'like, grid', 'test_torch_modules.py', 'cast'),
    'a tower goes to "meta" with its smallest input': (
        'torch/tower.py', 'like.dtype if like.is_meta else like)', 'like)', 'test_torch_modules.py', 'on_meta'),
    'a bridge of some ranks is loaded as one of all': (
        'torch/engine.py', 'self.group is not dist.group.WORLD or self._own', 'self._own', 'test_torch_modules.py', 'pickled'),
    'plans go over the communicator of calls': (
        'torch/ranks.py', 'key = own or Own(ranks, -1, ranks)', 'key = ranks', 'test_torch_modules.py', 'on_another_thread'),
    'two towers of their own plan over one communicator': (
        'torch/tower.py', 'groups.planning(self.group, self._plans,', 'groups.planning(self.group, None,', 'test_torch_modules.py', 'two_towers'),
    'a rank that ends before its first plan is waited for': (
        'torch/tower.py', '        else:\n            self._at()', '        elif isinstance(group, Comm):\n            self._at()',
        'test_torch_tower.py', 'data_loader'),
    'the first plan of a communicator is made on that of calls': (
        'torch/tower.py', '        else:\n            self._at()', '        elif not isinstance(group, Comm):\n            self._at()',
        'test_torch_modules.py', 'encoder_of_a_communicator'),
    'communicators of its own outlive their tower': (
        'torch/tower.py', 'groups.end(own)', 'pass', 'test_torch_modules.py', 'two_towers'),
    'an error of a plan is told to no rank': (
        'torch/ranks.py', '    if isinstance(value, _Ranks):\n        return value\n', '', 'test_torch_modules.py', 'error_of_a_plan'),
    'a tower writes in place, whatever is asked': (
        'torch/tower.py', 'inplace=inplace)', ')', 'test_torch_tower.py', 'keeps_its_hooks'),
    'sequences of a part are as long as the part': (
        'torch/tower.py', "parts_of(self.llm, s.AXIS_ROWS) if self.output == 'sharded' else 1", '1',
        'test_torch_tower.py',
        'random_steps'),
    'what is wrong on one rank is told to no rank': (
        'torch/tower.py', 'return self._own or self._pixels._talks_to', 'return None', 'test_torch_tower.py', 'bad_input_of_one_rank'),
    'a communicator of its own is that of all': (
        'torch/engine.py', "self._owned = comm == 'own'", 'self._owned = False', 'test_torch_own.py', 'bridges_of_threads'),
    'a communicator of its own outlives its bridge': (
        'torch/engine.py', 'groups.end(self._own)', 'pass', 'test_torch_own.py', 'at_work_at_once'),
    'the rest of what a rank brings comes first': (
        'comm.py', '(part + others)[:n]', '(others + part)[:n]', 'test_core.py', 'interpreter_lock'),
    'a group of packings has the ranks of the world': (
        'torch/engine.py', "tuple(range(len(inside))) if self.kind == 'packed' else inside", 'inside', 'test_torch_packed.py',
        'counts_its_ranks'),
    'heads are those of the first rank': (
        'torch/relayout.py', ".split('features', 'cp') if heads", ' if heads', 'test_torch_packed.py', 'on_threads'),
    'lengths of a tensor stay what they were': (
        'torch/relayout.py', 'of() is cu and version == cu._version', 'of() is cu', 'test_torch_packed.py', 'written_again'),
    'context ranks of a sequence begin at the first': (
        'packing.py', "[first] * n if isinstance(first, int) else first}", 'None}', 'test_torch_packed.py', 'ranks_of_its_own'),
    'a table of pieces has one owner': (
        'packing.py', 'piece_owner=[piece[1] for piece in flat]', 'piece_owner=[0 for piece in flat]', 'test_torch_packed.py',
        'ranks_of_its_own'),
    'the last dim of a mesh is the slowest': (
        'mesh.py', 'order = sorted(at, key=at.__getitem__)', 'order = sorted(at, key=lambda i: -at[i])', 'test_torch_mesh.py',
        'where_the_mesh_has_it'),
    'dims of a mesh are in its order, whatever its ranks': (
        'mesh.py', 'order = sorted(at, key=at.__getitem__)', 'order = list(at)', 'test_torch_mesh.py', 'where_the_mesh_has_it'),
    'ranks of a mesh that are apart are taken for consecutive ones': (
        'mesh.py', 'if found != expected:', 'if False:', 'test_torch_mesh.py', 'where_the_mesh_has_it'),
    'a mesh counts the ranks of a packed bridge in the world': (
        'mesh.py', 'ranks = tuple(count.index(rank) for rank in ranks)', 'pass', 'test_torch_mesh.py', 'side_by_side'),
    'a spec is not compared with the mesh of the call': (
        'torch/sides.py', 'any(theirs[name] != grid.coords(at)[name] for name in dims)', 'False', 'test_torch_mesh.py',
        'swaps_dims and mesh'),
    'a spec is not compared with the process groups of a mesh': (
        'torch/sides.py', 'if mine[name] not in made[name]:', 'if False:', 'test_torch_mesh.py', 'swaps_dims and world'),
    'a spec of other dims than the mesh is refused': (
        'torch/sides.py', 'if not all(made.values()):', 'if not any(made.values()):', 'test_torch_mesh.py',
        'swaps_dims and uniform-world'),
    'all dims of a mesh are a group of one': (
        'torch/ranks.py', 'if is_mesh(group) and group.mesh.dim() > 1:', 'if False:', 'test_torch_mesh.py', 'one_dim_of_a_mesh'),
    'a mesh is looked for where it may not be loaded': (
        'mesh.py', "getattr(sys.modules.get('torch.distributed.device_mesh'), 'DeviceMesh', None)",
        "__import__('torch.distributed.device_mesh', fromlist=['']).DeviceMesh", 'test_torch_mesh.py', 'nothing_is_imported'),
    'ranks in neither grid are waited for': (
        'torch/engine.py', 'return tuple(r for r in have if any(grid.has_rank(r) for grid in grids))', 'return have',
        'test_torch_outside.py', 'outside_need_not_call'),
    'a rank in neither grid waits for those that are': (
        'torch/engine.py', 'return me,', 'return tuple(r for r in have if r != me)', 'test_torch_outside.py', 'outside_may_call'),
    'a part of ranks that packings count has the first ones': (
        'torch/engine.py', 'self._own or groups.named(self._ranks, self._names)', 'self._own or (groups.counted_of('
        "self._ranks) if self.kind == 'packed' else self._ranks)", 'test_torch_outside.py', 'need_not_call and packed'),
    'a part that an error killed stays dead': (
        'torch/engine.py', 'return groups.comm_of_part(self.group, self._part, device)', 'return self.group.part(self._part)',
        'test_torch_outside.py', 'nothing_of_a_mismatch'),
    'all ranks of a world hear of the error of a part': (
        'comm.py', 'made._above, made._run = self, self._run', 'made._above, made._run, made.told = self, self._run, self.told',
        'test_torch_outside.py', 'nothing_of_a_mismatch'),
    'ranks of sequence parallelism have all rows of a context rank': (
        'torch/relayout.py', "return layout.split('rows', 'tp') if tp > 1 else layout", 'return layout', 'test_torch_packed.py',
        'tp_cuts'),
    'the dims of a relayout are swapped': (
        'torch/relayout.py', 'for a in cp for b in tp)', 'for b in tp for a in cp)', 'test_torch_packed.py', 'tp_cuts'),
    'padding of a contiguous cut forgets tp': (
        'torch/relayout.py', 'return cp * tp', 'return cp', 'test_torch_packed.py', 'tp_cuts'),
    'a packing that is made again has no padding': (
        'packing.py', "'pad_to': self._tables['seq_room'], ", '', 'test_torch_packed.py', 'padding_of'),
    'a dense batch is cut as one axis by Megatron\'s name': (
        'megatron_relayout.py', "lengths is not None or mode == 'zigzag'", 'True', 'test_megatron_relayout.py', 'dense'),
    'lengths of packed sequences are those without padding': (
        'megatron_relayout.py', 'return params.cu_seqlens_q if padded is None else padded', 'return params.cu_seqlens_q',
        'test_megatron_relayout.py', 'packed_rows'),
    'context ranks of a batch of its own are those of the model': (
        'megatron_relayout.py', 'own if own is not None else _group(cp_group', '_group(cp_group', 'test_megatron_relayout.py',
        'its_mode'),
    'a packed call goes to where the last one went': (
        'torch/ragged.py', 'if tables.dst is dst and tables.src is src', 'if tables.src is src', 'test_torch_packed.py', 'what_the_last_call_had'),
    'a packed call takes rows for those of the last one': (
        'torch/ragged.py', ' and call.kinds[0][0] == _kind(x):', ':', 'test_torch_packed.py', 'what_the_last_call_had'),
    'the last packed call had a gradient': (
        'torch/ragged.py', 'if grads and not x.requires_grad or ragged', 'if ragged', 'test_torch_packed.py', 'what_the_last_call_had'),
    'a halo of tensor ranks is that of context ranks': (
        'torch/halo.py', '_pieces(dst, cp, tp, me, x.device)', '_pieces(dst, cp, tp, c, x.device)', 'test_torch_halo.py', 'tensor_ranks'),
    'a halo takes rows by the cut of the result': (
        'torch/halo.py', 'rows = _rows(of, cp, tp, me)', 'rows = _rows(dst, cp, tp, me)', 'test_torch_halo.py', 'by_hand'),
    'a halo is not padded': (
        'torch/halo.py', 'src, split, (cp, tp) if pad else None)', 'src, split, None)', 'test_torch_halo.py', 'padded_each'),
    'the table of pieces is of the mode of the first call': (
        'torch/halo.py', 'with torch.inference_mode(False):', 'with torch.no_grad():', 'test_torch_halo.py', 'any_mode'),
    'a table of pieces that its reader wrote to is that of later calls': (
        'torch/halo.py', 'if made._version:', 'if False:', 'test_torch_halo.py', 'any_mode'),
    'places of rows are of the mode of the first call': (
        'torch/ragged.py', 'with torch.inference_mode(False):', 'with torch.no_grad():', 'test_torch_placed.py', 'inference_mode'),
    'rows go where the reader of an index wrote': (
        'torch/ragged.py', 'or self._written._version:', 'or False:', 'test_torch_placed.py', 'inference_mode'),
    'packings with and without halos are the same': (
        'packing.py', "b'%s %d ' % (self.split.encode(), self.halo)", 'self.split.encode()', 'test_torch_halo.py', 'moves_and_halos'),
    'a pickled packing loses its halo': (
        'packing.py', "for of in pieces], 'halo': self.halo}", 'for of in pieces]}', 'test_torch_halo.py', 'moves_and_halos'),
    'frames of a video lie on each other': (
        'torch/tower.py', 'at = [p + k * rows[a] for p', 'at = [p for p', 'test_torch_tower.py', 'by_frames'),
    'a run of ones own gets frames': (
        'torch/tower.py', "within = run is None and", 'within = True or', 'test_torch_tower.py', 'by_frames'),
    'any tower that merges patches gets frames': (
        'torch/tower.py', "within = run is None and str(getattr(self._config, 'model_type', '')).startswith('qwen')",
        'within = run is None and self._merge is not None', 'test_pages.py', 'vision'),
    'what a rank has beside its images is forgotten': (
        'torch/tower_plan.py', 'load, ranks = list(load), list(now)', 'load, ranks = [0] * len(load), list(now)', 'test_torch_tower.py',
        'balanced_together'),
    'two towers are planned one by one': (
        'torch/tower.py', 'share(plans, min(tower.stick for tower, _ in towers), None)', '[share([p], 0.0, None) for p in plans]',
        'test_torch_tower.py', 'balanced_together'),
    'the first sequence of any rank continues': (
        'packing.py', 'positions[0] + self.halo > 0', 'True', 'test_torch_packed.py', 'one_interval'),
    'dense samples are cut as one axis': (
        'torch/relayout.py', "if samples > 1 and 'contiguous' in (src, dst):", 'if False:', 'test_torch_packed.py',
        'bad_input'),
    'segments of other packings are the same batch': (
        'segments.py', 'self._key += packing._key', 'pass', 'test_torch_packed.py', 'segments_of_a_packing'),
}
