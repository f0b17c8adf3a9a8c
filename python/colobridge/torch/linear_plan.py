# SPDX-License-Identifier: Apache-2.0
"""What calls of linear_logprob() of the same shapes and options share, so that a call only fills in
addresses (ready.py), and how one runs: forward, backward, or both in one.
"""
import ctypes as c
import itertools
import math
import threading
from typing import Any

import torch

from .. import _structs as s
from .._lib import call, check, lib, size_of
from ..comm import Comm
from ..errors import STATUS, ArgumentError, Error, FailedError
from ..tensor import make, torch_dtype
from . import ranks as groups
from .head import Columns, Named
from .logprob import Plan, check_target, config_of, logprob_members, shard, targets_of
from .nll import Mean, MeanCall, mean_workspace
from .ready import SMALL, HostWorkspace, View, entry, integer, like, made_like, pointed, reserved, table
from .rows import rows_of, whole
from .support import Accompanied, ClassWeight, Support
from .tensors import checked, stream_of

MODES = {'auto': s.LINEAR_LOGPROB_AUTO, 'logprob': s.LINEAR_LOGPROB_LOGPROB, 'keep': s.LINEAR_LOGPROB_KEEP}
GEMMS = {'auto': s.GEMM_AUTO, 'cblas': s.GEMM_CBLAS, 'loops': s.GEMM_LOOPS}
D_HIDDEN = {'partial': 0, 'all_reduce': 1, 'reduce_scatter': 2}
_REAL = {'f64': 'f64'}  # dtype of sums and outputs of a head's dtype; f32 else
_CORES = 32  # C objects of other sizes or options, for a communicator
_HOST_WORKSPACE = 1 << 20  # bytes of workspace that a core keeps on the host
_SHARED = 1 << 20  # bytes of a weight whose gradient, before it is made, holds those of logits
_TILES = 88 << 20  # bytes of a forward that makes no logits
_clock = itertools.count()


def moved(t: Any, size: int) -> Any:
    """@t, of @size bytes; a copy, if a hook of saved tensors brought it back to a place not aligned"""
    if t.data_ptr() % 256 == 0:
        return t
    memory, address = reserved(size, t.device)
    return memory.narrow(0, address - memory.data_ptr(), size).view(t.dtype).view(t.shape).copy_(t)


class Core:
    """A colo_linear_logprob_t with its head: for one size, dtype, device and set of options."""

    def __init__(self, comm: Comm, head_comm: Comm | None, head: s.LmHeadConfig,
                 config: s.LinearLogprobConfig):
        self.comms = tuple(group for group in (comm, head_comm) if group is not None)  # live as long
        self.head, self.linear = c.c_void_p(), c.c_void_p()
        call('colo_lm_head_create', c.byref(self.head), head,
             head_comm.handle if head_comm is not None else None)
        for group in self.comms:
            group.serves(self.head, 'colo_lm_head_destroy')
        call('colo_linear_logprob_create', c.byref(self.linear), config, self.head, comm.handle)
        for group in self.comms:
            group.serves(self.linear, 'colo_linear_logprob_destroy')
        self.gathered = lib().colo_lm_head_gathered_size(self.head)
        self.used, self.kept = 0, True  # when; is it still among those of its communicator
        self.on_host = HostWorkspace()  # for the call that has the lock
        self.bound: Any = None  # what the head was last told of its parameters
        self.lock = threading.Lock()  # one call at a time: graphs of one thread may go backward on two

    def __del__(self) -> None:
        for group in self.comms:  # the second one finds NULL
            group.ends(self.linear, 'colo_linear_logprob_destroy')
            group.ends(self.head, 'colo_lm_head_destroy')

    def alive(self, what: str = 'linear_logprob') -> 'Core':
        """Itself. RuntimeError: a communicator of its was destroyed, by an error or shutdown()."""
        if not self.linear:
            raise FailedError(what + ': a communicator of the forward pass was destroyed since', STATUS['ERR_STATE'])
        return self

    def workspace(self, which: int, tokens: int, max_valid: int) -> int:
        return size_of('colo_linear_logprob_workspace_size', self.linear, which, tokens, max_valid)

    def saved(self, tokens: int, max_valid: int) -> int:
        return size_of('colo_linear_logprob_saved_size', self.linear, tokens, max_valid)


class LinearPlan(Plan):
    """Of hidden states, the head that multiplies them, and targets. Of losses whose gradients begin in forward, early: those
    of logits are kept; else those of weight and bias are, as the library sums them, in fp32 (fp64 of fp64)."""

    def __init__(self, what: Named, hidden: Any, weight: Any, bias: Any, target: Any, names: tuple[str, ...],
                 comm: Comm, tp_group: Any, columns: Columns, head_comm: Comm | None, rows_of_all: int | None,
                 flat: bool, linear: tuple[Any, ...], main: Any, members: dict[str, Any], support: Support | None,
                 class_weight: ClassWeight | None, lora: tuple[Any, ...] | None):
        """Checks the arguments of prepare(). main: main_grads() or None; lora: shape, dtype and device of A and of B, scale. copies_hidden, copies_weight: do they have to be
        copied?"""
        mode, d_hidden, gemm, budget, max_valid, logits_dtype, begins = linear
        if not 0 <= integer('budget', budget) < 2**64:
            raise ArgumentError("%s: budget is %d, expected bytes: 0 (the default) to 2**64 - 1" % (what, budget))
        if abs(integer('max_valid', max_valid or 0)) >= 2**63:
            raise ArgumentError("%s: max_valid is %d, which has too many bits" % (what, max_valid))
        if mode not in MODES or d_hidden not in D_HIDDEN or gemm not in GEMMS:
            raise ArgumentError("%s: mode is %r, d_hidden %r and gemm %r, expected one of %s, one of %s and one of %s"
                                % (what, mode, d_hidden, gemm, *(', '.join(words) for words in (MODES, D_HIDDEN, GEMMS))))
        if head_comm is not None and rows_of_all is None:
            raise ArgumentError("%s: shard_group is given, so rows= (the rows of all its ranks "
                                "together) is needed" % what)
        owned = None
        if flat and bias is not None:
            raise ArgumentError("%s: %s is %s, this rank's elements of a flattened weight, and %s is %s, expected none"
                                % (what, what.weight, list(weight.shape), what.bias, list(bias.shape)))
        if weight.numel() == 0 and weight.dim() == 1 and not flat:
            raise ArgumentError("%s: %s has 0 elements, which stand for a parameter that is partitioned elsewhere; "
                                "pass Head(this rank's part, shard_group=, rows=)" % (what, what.weight))
        if not flat and (hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]):
            raise ArgumentError("%s: %s is %s and %s %s, expected [..., H] and [Vl, H]"
                                % (what, what.hidden, list(hidden.shape), what.weight, list(weight.shape)))
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ArgumentError("%s: %s is %s, expected [%d], the weight's rows"
                                % (what, what.bias, list(bias.shape), weight.shape[0]))
        for name, t in ((what.weight, weight), (what.bias, bias)):
            if t is not None and (t.dtype != hidden.dtype or t.device != hidden.device):
                raise ArgumentError("%s: %s is %s on %s, %s is %s on %s"
                                    % (what, name, t.dtype, t.device, what.hidden, hidden.dtype, hidden.device))
        if not hidden.dtype.is_floating_point:
            raise ArgumentError("%s: %s is of %s, expected a floating-point dtype"
                                % (what, what.hidden, hidden.dtype))
        scatter = d_hidden == 'reduce_scatter' and comm.size > 1
        shape = list(hidden.shape[:-1])
        if scatter and shape:
            shape[0] *= comm.size
        check_target(what, target, shape, "%s's first axis times the group's %d ranks" % (what.hidden, comm.size) if scatter else
                     "%s's shape without the last axis" % what.hidden, hidden.device, what.hidden + ' is')
        rows_here = weight.shape[0] if head_comm is None else rows_of_all
        assert rows_here is not None
        if head_comm is not None and flat:
            elements = rows_here * hidden.shape[-1]
            each = -(-elements // head_comm.size)
            owned = max(min(elements - each * head_comm.rank, each), 0)
            if weight.shape[0] not in (owned, each):
                raise ArgumentError("%s: %s has %d elements, expected %d, or %d with padding: rank %d of %d's part of "
                                    "%d x %d" % (what, what.weight, weight.shape[0], owned, each, head_comm.rank, head_comm.size,
                                                 rows_here, hidden.shape[-1]))
        if lora is not None:
            (of_a, a_dtype, a_device), (of_b, b_dtype, b_device) = lora[:3], lora[3:6]
            if not (len(of_a) == len(of_b) == 2 and of_a[1] == hidden.shape[-1] and of_a[0] == of_b[1] > 0 and of_b[0] == rows_here
                    and a_dtype.is_floating_point and b_dtype.is_floating_point and a_device == b_device == hidden.device):
                raise ArgumentError("%s: the Head's lora is A %s of %s on %s and B %s of %s on %s, expected [r, %d] and [%d, r] of a "
                                    "floating-point dtype on %s" % (what, list(of_a), a_dtype, a_device, list(of_b), b_dtype, b_device,
                                                                    hidden.shape[-1], rows_here, hidden.device))
        start, vocab = shard(comm, tp_group, rows_here, *columns)
        config = config_of(what, 'logprob', start, vocab, **logprob_members(members, vocab, names, class_weight))
        copies_weight = weight.stride(-1) != 1 and weight.shape[-1] > 1
        if copies_weight:
            weight = weight.contiguous()
        if bias is not None:
            bias = bias.contiguous()
        if scatter:
            read = hidden.contiguous()
            rows = whole(tuple(shape), hidden.shape[-1])
        else:
            read, rows = rows_of(hidden)
        number = torch_dtype(hidden.dtype)
        logits = s.DTYPE[_REAL.get(s.DTYPES[number], 'f32')] if logits_dtype is None \
            else torch_dtype(logits_dtype, what + ': logits_dtype')
        bound = math.prod(shape) if max_valid is None else max_valid
        # Per column, kept gradients of logits take no more than sums of d_W and two chunks of 2,048 logits with gradients.
        chunk = min(config.chunk_size or 2048, bound)
        early = begins == 'loss' and head_comm is None and hidden.dtype != torch.float64 and \
            bound * hidden.element_size() <= 4 * hidden.shape[-1] + \
            2 * chunk * (s.DTYPE_SIZE[logits] + (hidden.element_size() if logits != number else 0))
        super().__init__(what, hidden, rows, config, names)
        self.scatter, self.head_rows, self.owned, self.names, self.early = scatter, rows_here, owned, names, early
        self.copies_hidden, self.copies_weight, self.dtype = read is not hidden, copies_weight, hidden.dtype
        self.gemm = GEMMS[gemm]
        # What forward needs where a GPU's product makes statistics, not logits: without a support, it reads no logits.
        self.tiled = hidden.is_cuda and hidden.element_size() == 2 and hidden.shape[-1] % 8 == 0 and \
            support is None and lora is None and (head_comm is not None or weight.stride(0) % 8 == 0)
        self.linear = {'mode': MODES[mode], 'logits_dtype': logits, 'budget': budget, 'd_hidden': D_HIDDEN[d_hidden],
                       'without_logits': _TILES if self.tiled else 0}
        self.max_valid = bound
        flat_shape, stride = (rows.count, rows.columns), (rows.stride, 1)
        named = '%s: %s' % (what, what.hidden)
        self.hidden = View(read, named) if scatter else View(read, named, flat_shape, stride)
        raw = self.hidden.raw
        mem, ordinal = raw.mem, raw.device
        self.tokens = make(0, number, flat_shape, stride, mem, ordinal) if scatter else raw
        self.targets = targets_of(what, rows, hidden, support, class_weight, start, vocab, rows_here, 'has_temperature' in members)
        self.weight = View(weight, '%s: %s' % (what, what.weight))
        self.bias = None if bias is None else View(bias, '%s: %s' % (what, what.bias))
        # A and B as they are multiplied, and their gradients, as they are summed
        self.lora = None if lora is None else tuple(
            View(like(tuple(of), self.dtype, self.device).contiguous(), "%s: the Head's lora" % what) for of in (lora[0], lora[3]))
        self.lora_scale = 1.0 if lora is None else lora[6]
        self.new_lora = None if lora is None else tuple(like(tuple(of), self.real, self.device) for of in (lora[0], lora[3]))
        # gradients: of hidden, contiguous; of weight and bias, contiguous or where main_grad is
        self.new_hidden = like(tuple(hidden.shape) if rows.plain or scatter else flat_shape, self.dtype, self.device)
        self.d_view = not (rows.plain or scatter)
        mine = math.prod(hidden.shape[:-1]) if scatter else rows.count
        width = max(rows.columns, 1)
        self.d_hidden = make(0, number, (mine, rows.columns), (width, 1), mem, ordinal)
        self.main = None if main is None else tuple(
            None if t is None else View(t, '%s: %s.main_grad' % (what, name))
            for name, t in zip((what.weight, what.bias), main))
        sums = begins in ('loss', 'sums') and not early
        self.d_dtype = (self.real if sums else weight.dtype) if main is None else main[0].dtype
        self.d_weight = make(0, torch_dtype(self.d_dtype, 'main_grad'), tuple(weight.shape),
                             (width, 1)[-weight.dim():], mem, ordinal)
        self.d_bias = make(0, self.d_weight.dtype, (weight.shape[0],), (1,), mem, ordinal)
        self.new_weight = like(tuple(weight.shape), self.d_dtype, self.device)
        # more gradients of logits than d_weight has memory, and enough of it that backward may run only once
        self.shared = math.prod(weight.shape) * weight.element_size()
        if self.shared < _SHARED or 2 * bound <= 3 * rows.columns or config.segment:
            self.shared = 0
        self.new_bias = like((weight.shape[0],), self.d_dtype, self.device)
        self.kept: dict[Any, _Ready] = {}
        # of losses that become one number, and that no caller sees: then they are no tensors
        self.mean = Mean(rows.count, self.real, self.device)
        self.unseen, self.weighs = names == ('loss', 'n_valid'), names == ('loss', 'weight')

    def ready(self, comm: Comm, head_comm: Comm | None, frozen_hidden: bool, frozen_weight: bool,
              add: bool, early: bool = False, frozen_lora: bool = False) -> '_Ready':
        """Of the gradients that are wanted. The C objects are kept with the communicator, and made at
        the first call, in the same order on all ranks."""
        share = early and self.shared > 0 and not add and not frozen_weight
        frozen_lora = frozen_lora or self.lora is None
        which = (frozen_hidden, frozen_weight, add, early, frozen_lora)
        ready = self.kept.get(which)
        if ready is not None and ready.core.kept:
            ready.core.used = next(_clock)
            return ready
        cores = comm.__dict__.setdefault('_linears', {})
        raw = self.hidden.raw
        members = dict(self.linear, frozen_hidden=frozen_hidden, frozen_weight=frozen_weight,
                       d_weight_add=add, d_weight_dtype=self.d_weight.dtype,
                       mode=s.LINEAR_LOGPROB_EARLY if early else self.linear['mode'], share_d_weight=share,
                       lora=0 if self.lora is None else self.lora[0].shape[0], frozen_lora=frozen_lora)
        head = dict(rows=self.head_rows, hidden=self.rows.columns, dtype=raw.dtype, mem=raw.mem,
                    device=raw.device, has_bias=self.bias is not None, partition=int(self.owned is not None),
                    gemm=self.gemm)
        key = (head_comm, bytes(self.config), tuple(members.items()), tuple(head.items()))
        core = cores.get(key)
        if core is None:
            try:
                core = cores[key] = Core(
                    comm, head_comm, s.LmHeadConfig(struct_size=c.sizeof(s.LmHeadConfig), **head),
                    s.LinearLogprobConfig(struct_size=c.sizeof(s.LinearLogprobConfig), logprob=self.config, **members))
            except Error as why:  # which the library tells no other rank, because it makes these alone
                groups.refuse(comm, why), groups.refuse(head_comm, why)
                raise
            if len(cores) > _CORES:  # the one used last longest ago goes, on all ranks the same
                old = min((k for k in cores if k != key), key=lambda k: cores[k].used)
                cores.pop(old).kept = False
                for plan in table(comm, '_linear_plans').kept.values():
                    plan.kept.clear()
        core.used = next(_clock)
        ready = self.kept[which] = _Ready(self, core, not frozen_hidden, not frozen_weight, not frozen_lora, add, share)
        return ready


class _Ready:
    """A plan with its C objects, and the C structs of a call, of which there is one at a time."""

    def __init__(self, plan: LinearPlan, core: Core, d_hidden: bool, d_weight: bool, d_lora: bool, add: bool, share: bool):
        self.plan, self.core, self.number, self.share = plan, core, next(_clock), share
        self.makes = d_hidden, d_weight
        self.sizes: dict[int, int] = {}  # workspaces of passes
        self.kept_size, self.kept_type = -1, None
        self.run_bind = entry('colo_lm_head_bind')
        self.run_forward = entry('colo_linear_logprob_forward')
        self.run_backward = entry('colo_linear_logprob_backward')
        self.run_loss = entry('colo_linear_logprob_loss')
        self.run_early = entry('colo_linear_logprob_early')
        self.weight = plan.weight.copy()
        self.bias = None if plan.bias is None else plan.bias.copy()
        saved, up = c.sizeof(s.LinearLogprobSaved), c.sizeof(s.LinearLogprobUpstream)
        self.saved = s.LinearLogprobSaved(saved, of=core.linear, hidden=plan.tokens, targets=plan.targets.raw,
                                          max_valid=plan.max_valid, valid=True)
        self.hidden, self.targets = self.saved.hidden, self.saved.targets  # views into it
        self.batch = s.LinearLogprobBatch(c.sizeof(s.LinearLogprobBatch), c.pointer(self.hidden),
                                          c.pointer(self.targets), plan.max_valid)
        if isinstance(plan.targets, Accompanied):
            self.support = plan.targets.attach(self.targets, self.saved, self.batch)
        if plan.lora is not None:
            self.saved.lora_a, self.saved.lora_b, self.saved.lora_scale = *(view.raw for view in plan.lora), plan.lora_scale
            self.factors = self.saved.lora_a, self.saved.lora_b
            self.lora = s.Lora(*map(c.pointer, self.factors), plan.lora_scale)
            self.batch.lora = c.pointer(self.lora)
        out = c.sizeof(s.LogprobOut)
        self.out, self.made, self.upstream = s.LogprobOut(out), s.LinearLogprobSaved(saved), s.LinearLogprobUpstream(up)
        self.outputs = pointed(self.out, {name: plan.view(name) for name, _ in plan.out})
        # of backward: of each token, and after an early loss() one number
        self.upstreams, self.by = plan.gradient_views(), plan.view('number')
        copy = s.Tensor.from_buffer_copy
        self.d_hidden = copy(plan.d_hidden) if d_hidden else None
        d_raw = plan.main if add and plan.main is not None else None
        self.d_weight = copy(plan.d_weight if d_raw is None else d_raw[0].raw) if d_weight else None
        self.d_bias = copy(plan.d_bias if d_raw is None else d_raw[1].raw) \
            if d_weight and plan.bias is not None else None
        self.d_lora = None if plan.lora is None or not d_lora else tuple(
            make(0, torch_dtype(plan.real), view.shape, (view.shape[1], 1), raw.mem, raw.device)
            for view, raw in zip(plan.lora, self.factors))
        self.grads = s.LinearLogprobGrads(c.sizeof(s.LinearLogprobGrads), *(
            None if t is None else c.pointer(t)
            for t in (self.d_hidden, self.d_weight, self.d_bias, *(self.d_lora or (None, None)))))
        self.at_parameters = (c.addressof(self.weight),
                              None if self.bias is None else c.addressof(self.bias))
        address = c.addressof
        self.at_batch, self.at_out, self.at_made = address(self.batch), address(self.out), address(self.made)
        self.at_saved, self.at_upstream, self.at_grads = (address(self.saved), address(self.upstream),
                                                          address(self.grads))
        self.whole, self.whole_entropy = s.LinearLogprobUpstream(up, loss=1.0), s.LinearLogprobUpstream(up, entropy=1.0)
        self.at_whole, self.at_entropy = address(self.whole), address(self.whole_entropy)
        # of loss() and total(), which only forwards call, one at a time
        self.weights = plan.view('loss')
        self.at_weights = c.pointer(self.weights)
        self.sums = s.LogprobOut(out)
        self.summed = pointed(self.sums, {name: plan.view(name) for name in ('loss', 'n_valid')} if plan.unseen else {})
        self.at_sums = address(self.sums)
        self.numbers, self.mean_call, self.addresses, self.placed = HostWorkspace(), MeanCall(plan.mean), (0, 0, 0), 0

    def bind(self, comm: Comm, hidden: Any, weight: Any, bias: Any, a: Any, b: Any, target: Any,
             place: Any) -> Any:
        """Says where the tokens and the head are; what it returns has to live as long as the call.
        place: View.point of a forward, View.again of a backward."""
        plan, core = self.plan, self.core
        whole = memory = workspace = None
        if plan.scatter:
            whole = torch.empty((plan.rows.count, plan.rows.columns), dtype=plan.dtype, device=plan.device)
            comm.all_gather(checked(hidden, plan.hidden.what, saved=place is View.again),
                            checked(whole, plan.hidden.what), stream=stream_of(plan.device))
            self.hidden.data = whole.data_ptr()
        else:
            hidden = place(plan.hidden, self.hidden, hidden)
        targets = plan.targets  # Accompanied has places of its own
        target = (targets.point if place is View.point else targets.again)(self.targets, target)
        weight = place(plan.weight, self.weight, weight)
        if bias is not None:
            bias = place(plan.bias, self.bias, bias)
        lora = None
        if plan.lora is not None:
            lora = [place(view, raw, t.to(plan.dtype).contiguous()) for view, raw, t in zip(plan.lora, self.factors, (a, b))]
        if core.gathered:
            memory, workspace = reserved(core.gathered, plan.device)
        elif core.bound == (self.number, self.weight.data, self.bias and self.bias.data):
            return whole, hidden, target, weight, bias, lora  # the head has just this already
        core.bound = None
        check(self.run_bind(core.head, *self.at_parameters, workspace))
        core.bound = self.number, self.weight.data, self.bias and self.bias.data
        return whole, hidden, target, weight, bias, lora, memory

    def run(self, function: Any, which: int, *addresses: Any) -> None:
        """A pass in C, with its workspace."""
        size = self.sizes.get(which)
        if size is None:
            size = self.sizes[which] = self.core.workspace(which, self.plan.rows.count,
                                                           self.plan.max_valid)
        work, workspace = self.core.on_host.reserve(size, self.plan.device, self.plan.cuda, _HOST_WORKSPACE)
        check(function(self.core.linear, *addresses, workspace, stream_of(self.plan.device) if self.plan.cuda else None))
        del work

    def gradients(self, bias: Any, main: Any, shared: Any = None) -> tuple[Any, ...]:
        """New ones of hidden, as it is shaped, weight, bias and the LoRA's A and B; @main: those of weight and bias, to be added
        to; @shared: weight's, from forward."""
        plan = self.plan
        d_hidden = d_weight = d_bias = d_a = d_b = None
        if self.makes[0]:
            d_hidden = torch.empty_like(plan.new_hidden)
            self.d_hidden.data = d_hidden.data_ptr()
            if plan.d_view:
                d_hidden = plan.rows.columns_of(d_hidden)
        if self.makes[1]:
            if main is not None:
                plan.main[0].point(self.d_weight, main[0])
                if bias is not None:
                    plan.main[1].point(self.d_bias, main[1])
            else:
                # an alias of what autograd saved: of a tensor that others have it would keep a copy
                d_weight = torch.empty_like(plan.new_weight) if shared is None else shared.detach()
                if plan.owned is not None:
                    d_weight[plan.owned:].zero_()  # padding
                self.d_weight.data = d_weight.data_ptr()
                if bias is not None:
                    d_bias = torch.empty_like(plan.new_bias)
                    self.d_bias.data = d_bias.data_ptr()
        if self.d_lora is not None and plan.new_lora is not None:
            d_a, d_b = map(torch.empty_like, plan.new_lora)
            self.d_lora[0].data, self.d_lora[1].data = d_a.data_ptr(), d_b.data_ptr()
        return d_hidden, d_weight, d_bias, d_a, d_b

    def forward(self, comm: Comm, hidden: Any, weight: Any, bias: Any, a: Any, b: Any, target: Any,
                backward: bool) -> tuple[list[Any], Any, Any]:
        """(outputs, the buffer that backward needs, as a tensor, or memory that is no tensor)"""
        if self.plan.tiled and weight.data_ptr() % 16:
            weight = weight.clone()  # a view from an odd element on: products are of 16-byte words
        with self.core.lock:
            held = self.bind(comm, hidden, weight, bias, a, b, target, View.point)
            out = made_like(self.plan.out, self.outputs)
            kept, small, buffer = self.keep() if backward else (None, None, None)
            self.run(self.run_forward, s.LINEAR_LOGPROB_FORWARD if backward else s.LINEAR_LOGPROB_INFERENCE,
                     self.at_batch, self.at_out, self.at_made if backward else None, buffer)
        del held
        return out, kept, small

    def keep(self) -> tuple[Any, Any, Any]:
        """Memory from forward to backward: as a tensor, or as memory that is none; its address."""
        plan = self.plan
        if self.kept_size < 0:
            self.kept_size = self.core.saved(plan.rows.count, plan.max_valid)
            if self.kept_size <= SMALL and not plan.cuda:  # a tensor would cost more
                self.kept_type = c.c_char * (self.kept_size + 255)
        if self.kept_type is not None:
            small = self.kept_type()
            return None, small, (c.addressof(small) + 255) & ~255
        kept, buffer = reserved(self.kept_size, plan.device)
        return kept.narrow(0, buffer - kept.data_ptr(), self.kept_size), None, buffer

    def backward(self, comm: Comm, saved: Any, small: Any, upstream: Any, main: Any,
                 by: Any = None) -> tuple[Any, ...]:
        """gradients(). by: the number, after an early loss()."""
        plan = self.plan
        hidden, weight, bias, a, b, target, ids, classes, kept, *shared = saved
        if isinstance(plan.targets, Accompanied):
            target = target, ids, classes
        with self.core.lock:
            held, up = [self.bind(comm, hidden, weight, bias, a, b, target, View.again)], self.upstream
            if by is not None:
                up.logp = up.entropy = 0.0
                self.by.data = by.data_ptr()
                up.loss, up.d_loss = 1.0, c.pointer(self.by)
            if by is None:
                for i, name in plan.grads:
                    setattr(up, name[2:], 0.0 if upstream[i] is None else 1.0)
                held.append(plan.gradients(self, upstream, 0))
            up.mean = False
            d_weight = moved(shared[0], plan.shared) if shared and shared[0] is not None else None
            self.saved.d_weight = None if d_weight is None else d_weight.data_ptr()
            grads = self.gradients(bias, main, d_weight)
            if small is not None:
                self.saved.memory = (c.addressof(small) + 255) & ~255
            else:
                kept = moved(kept, self.kept_size)
                self.saved.memory = kept.data_ptr()
            self.saved.valid = True
            self.run(self.run_backward, s.LINEAR_LOGPROB_BACKWARD, self.at_saved, self.at_upstream, self.at_grads)
        del held
        return grads

    def loss(self, comm: Comm, hidden: Any, weight: Any, bias: Any, a: Any, b: Any, target: Any, weights: Any, group: Comm, by: Any,
             main: Any, early: bool) -> tuple[list[Any], Any, Any]:
        """(outputs, [] if they are unseen; what total() adds up over the group; made). made: the gradients of the sum
        of losses, each times its weight [T], or 1 if @weights is None. by: the upstream gradient, or None: 1; if it is
        given, gradients of weight and bias are added to @main, if that is not None. early: made is (kept, small,
        shared), of which backward() makes the gradients times one number; kept and small are forward()'s, shared is
        memory of the weight's gradient that holds logits' gradients until then, or None."""
        plan = self.plan
        if by is not None:
            weights = by.expand(plan.rows.count).contiguous() if weights is None else weights * by
        with self.core.lock:
            if weights is not None:
                self.weights.data = weights.data_ptr()
            self.whole.d_loss = None if weights is None else self.at_weights
            held = self.bind(comm, hidden, weight, bias, a, b, target, View.point)
            out, at_out = ([], self.at_sums) if plan.unseen else (made_like(self.plan.out, self.outputs), self.at_out)
            losses = self.place(out, group)
            if not early:
                made = self._in_one_pass(comm, bias, self.at_whole, at_out, None if by is None else main)
            else:
                kept, small, buffer = self.keep()
                shared = None
                if self.share:
                    memory, self.made.d_weight = reserved(plan.shared, plan.device)
                    shared = memory.narrow(0, self.made.d_weight - memory.data_ptr(), plan.shared).view(
                        plan.d_dtype).view(plan.new_weight.shape)
                self.run(self.run_early, s.LINEAR_LOGPROB_FORWARD, self.at_batch, self.at_whole, at_out, self.at_made,
                         buffer)
                made = kept, small, shared
        del held
        return out, losses, made

    def entropy(self, comm: Comm, hidden: Any, weight: Any, bias: Any, a: Any, b: Any,
                target: Any) -> tuple[Any, ...]:
        """Gradients of the sum of entropies, of tensors that a forward saved."""
        with self.core.lock:
            held = self.bind(comm, hidden, weight, bias, a, b, target, View.again), made_like(self.plan.out, self.outputs)
            grads = self._in_one_pass(comm, bias, self.at_entropy, self.at_out, None)
        del held
        return grads

    def _in_one_pass(self, comm: Comm, bias: Any, upstream: int, out: int, main: Any) -> tuple[Any, ...]:
        """Outputs and gradients of what bind() was told."""
        if not any(self.makes) and self.d_lora is None and comm.size == 1:  # where a pass gathers depends on what it makes
            self.run(self.run_forward, s.LINEAR_LOGPROB_INFERENCE, self.at_batch, out, None, None)
            return (None,) * 5
        grads = self.gradients(bias, main)
        self.run(self.run_loss, s.LINEAR_LOGPROB_LOSS, self.at_batch, upstream, out, self.at_grads)
        return grads

    def place(self, out: list[Any], group: Comm) -> Any:
        """What holds the losses' number, workspace of their mean, and the losses where they are unseen."""
        if self.placed == group.size:
            return None
        mean = self.plan.mean
        parts = mean_workspace(group.size)
        size = parts + 8 + (mean.bytes if self.plan.unseen else 0)
        holds, workspace = self.numbers.reserve(size, self.plan.device, self.plan.cuda)
        valid = workspace + parts
        if self.plan.unseen:
            self.summed['n_valid'].data, self.summed['loss'].data = valid, valid + 8
            self.addresses = workspace, valid, valid + 8
            self.placed = group.size if holds is None else 0  # it stays where it is
        else:
            self.addresses = workspace, out[len(out) > 1].data_ptr(), out[0].data_ptr()  # n_valid, if that is made
        return holds

    def total(self, mean: bool, weights: Any, group: Comm, out: list[Any]) -> tuple[Any, Any, Any, Any]:
        """(value, num, den) of what loss() left, with the outputs @out, and d value / d num, fp64."""
        workspace, valid, losses = self.addresses
        if weights is not None and self.plan.weighs:
            out = [t.reshape(-1) * weights for t in out]
            losses, valid = (t.data_ptr() for t in out)
        elif weights is not None:
            return self.plan.mean.weighted(losses, weights, mean, group)
        factor = torch.empty_like(self.plan.mean.factor)
        return *self.plan.mean.forward(self.mean_call, losses, valid, factor.data_ptr(), workspace, mean,
                                       group, self.plan.weighs), factor
