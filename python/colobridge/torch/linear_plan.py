# SPDX-License-Identifier: Apache-2.0
"""What calls of linear_logprob() of the same shapes and options share, so that a call only fills in
addresses (ready.py), and how one runs: forward, backward, or both in one.
"""
import ctypes as c
import itertools
import math
from typing import Any

from .. import _structs as s
from .._lib import check
from ..comm import Comm
from ..tensor import make, torch_dtype
from .head import Core
from .lazy import torch
from .logprob import DIFFERENTIABLE, outputs_of, targets_of
from .nll import Mean, MeanCall
from .ready import SMALL, HostWorkspace, View, entry, like, made_like, reserved, table
from .rows import Rows
from .support import Listed
from .tensors import checked, stream_of

_CORES = 32  # C objects of other sizes or options, for a communicator
_HOST_WORKSPACE = 1 << 20  # bytes of workspace that a core keeps on the host
_SHARED = 1 << 20  # bytes of a weight whose gradient, before it is made, holds those of logits
_clock = itertools.count()


def _moved(t: Any, size: int) -> Any:
    """@t, of @size bytes; a copy, if a hook of saved tensors brought it back to a place not aligned"""
    if t.data_ptr() % 256 == 0:
        return t
    memory, address = reserved(size, t.device)
    return memory.narrow(0, address - memory.data_ptr(), size).view(t.dtype).view(t.shape).copy_(t)


class LinearPlan:
    """What calls of the same shapes, strides, dtypes, device and options share: views, config, outputs.
    hidden: as the library reads it, or this rank's slice of the tokens; main: main_grads or None. Of losses
    whose gradients begin in forward, early: those of logits are kept; sums: those of weight and bias are, as
    the library sums them, in fp32 (fp64 of fp64)."""

    def __init__(self, hidden: Any, weight: Any, bias: Any, main: Any, rows: Rows, scatter: bool,
                 config: s.LogprobConfig, head_rows: int, owned: int | None, linear: dict[str, int],
                 names: tuple[str, ...], max_valid: int, sums: bool, early: bool, listed: bool = False):
        self.rows, self.scatter, self.config, self.head_rows, self.owned = rows, scatter, config, head_rows, owned
        self.linear, self.max_valid, self.names, self.early = linear, max_valid, names, early
        self.plain = rows.plain
        self.grads = [(i, name, 'd_' + name) for i, name in enumerate(names) if name in DIFFERENTIABLE]
        self.counts = [i for i, name in enumerate(names) if name not in DIFFERENTIABLE]
        self.device, self.dtype = hidden.device, hidden.dtype
        self.cuda = hidden.device.type == 'cuda'
        self.real = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        shape, stride = (rows.count, rows.columns), (rows.stride, 1)
        self.hidden = View(hidden, 'hidden') if scatter else View(hidden, 'hidden', shape, stride)
        raw = self.hidden.raw
        mem, ordinal = raw.mem, raw.device
        self.tokens = make(0, raw.dtype, shape, stride, mem, ordinal) if scatter else raw
        self.targets = targets_of(rows, hidden.device, Listed if listed else View)
        self.weight = View(weight, 'weight')
        self.bias = None if bias is None else View(bias, 'bias')
        self.out = outputs_of(rows, names, self.real, self.device)
        # gradients: of hidden, contiguous; of weight and bias, contiguous or where main_grad is
        self.new_hidden = like(tuple(hidden.shape) if rows.plain or scatter else shape, self.dtype,
                               self.device)
        self.d_view = not (rows.plain or scatter)
        mine = math.prod(hidden.shape[:-1]) if scatter else rows.count
        width = max(rows.columns, 1)
        self.d_hidden = make(0, raw.dtype, (mine, rows.columns), (width, 1), mem, ordinal)
        self.main = None if main is None else tuple(
            None if t is None else View(t, name + '.main_grad')
            for name, t in zip(('weight', 'bias'), main))
        self.d_dtype = (self.real if sums else weight.dtype) if main is None else main[0].dtype
        self.d_weight = make(0, torch_dtype(self.d_dtype, 'main_grad'), tuple(weight.shape),
                             (width, 1)[-weight.dim():], mem, ordinal)
        self.d_bias = make(0, self.d_weight.dtype, (weight.shape[0],), (1,), mem, ordinal)
        self.new_weight = like(tuple(weight.shape), self.d_dtype, self.device)
        # more gradients of logits than d_weight has memory, and enough of it that backward may run only once
        self.shared = math.prod(weight.shape) * weight.element_size()
        if self.shared < _SHARED or 2 * max_valid <= 3 * rows.columns or config.segment:
            self.shared = 0
        self.new_bias = like((weight.shape[0],), self.d_dtype, self.device)
        self.kept: dict[Any, _Ready] = {}
        # of losses that become one number, and that no caller sees: then they are no tensors
        self.mean = Mean(rows.count, self.real, self.device)
        self.unseen = names == ('loss', 'n_valid')

    def ready(self, comm: Comm, head_comm: Comm | None, frozen_hidden: bool, frozen_weight: bool,
              add: bool, early: bool = False) -> '_Ready':
        """Of the gradients that are wanted. The C objects are kept with the communicator, and made at
        the first call, in the same order on all ranks."""
        share = early and self.shared > 0 and not add and not frozen_weight
        which = (frozen_hidden, frozen_weight, add, early)
        ready = self.kept.get(which)
        if ready is not None and ready.core.kept:
            ready.core.used = next(_clock)
            return ready
        cores = comm.__dict__.setdefault('_linears', {})
        raw = self.hidden.raw
        members = dict(self.linear, frozen_hidden=frozen_hidden, frozen_weight=frozen_weight,
                       d_weight_add=add, d_weight_dtype=self.d_weight.dtype,
                       mode=s.LINEAR_EARLY if early else self.linear['mode'], share_d_weight=share)
        head = dict(rows=self.head_rows, hidden=self.rows.columns, dtype=raw.dtype, mem=raw.mem,
                    device=raw.device, has_bias=self.bias is not None, partition=int(self.owned is not None))
        key = (head_comm, bytes(self.config), tuple(members.items()), tuple(head.items()))
        core = cores.get(key)
        if core is None:
            core = cores[key] = Core(
                comm, head_comm, s.LmHeadConfig(struct_size=c.sizeof(s.LmHeadConfig), **head),
                s.LinearLogprobConfig(struct_size=c.sizeof(s.LinearLogprobConfig), logprob=self.config,
                               **members))
            if len(cores) > _CORES:  # the one used last longest ago goes, on all ranks the same
                old = min((k for k in cores if k != key), key=lambda k: cores[k].used)
                cores.pop(old).kept = False
                for plan, _, _ in table(comm, '_linear_plans').kept.values():
                    plan.kept.clear()
        core.used = next(_clock)
        ready = self.kept[which] = _Ready(self, core, not frozen_hidden, not frozen_weight, add, share)
        return ready


class _Ready:
    """A plan with its C objects, and the C structs of a call, of which there is one at a time."""

    def __init__(self, plan: LinearPlan, core: Core, d_hidden: bool, d_weight: bool, add: bool, share: bool):
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
        self.saved = s.LinearLogprobSaved(of=core.linear, hidden=plan.tokens, targets=plan.targets.raw,
                                   max_valid=plan.max_valid, valid=True)
        self.hidden, self.targets = self.saved.hidden, self.saved.targets  # views into it
        self.batch = s.LinearBatch(c.pointer(self.hidden), c.pointer(self.targets), plan.max_valid)
        if isinstance(plan.targets, Listed):
            self.support = plan.targets.attach(self.targets, self.saved.support)
            self.batch.support = c.pointer(self.support)
        self.out, self.made, self.upstream = s.LogprobOut(), s.LinearLogprobSaved(), s.LinearUpstream()
        copy = s.Tensor.from_buffer_copy
        self.d_hidden = copy(plan.d_hidden) if d_hidden else None
        d_raw = plan.main if add and plan.main is not None else None
        self.d_weight = copy(plan.d_weight if d_raw is None else d_raw[0].raw) if d_weight else None
        self.d_bias = copy(plan.d_bias if d_raw is None else d_raw[1].raw) \
            if d_weight and plan.bias is not None else None
        self.grads = s.LinearGrads(*(None if t is None else c.pointer(t)
                                     for t in (self.d_hidden, self.d_weight, self.d_bias)))
        self.at_parameters = (c.addressof(self.weight),
                              None if self.bias is None else c.addressof(self.bias))
        address = c.addressof
        self.at_batch, self.at_out, self.at_made = address(self.batch), address(self.out), address(self.made)
        self.at_saved, self.at_upstream, self.at_grads = (address(self.saved), address(self.upstream),
                                                          address(self.grads))
        self.whole, self.whole_entropy = s.LinearUpstream(loss=1.0), s.LinearUpstream(entropy=1.0)
        self.at_whole, self.at_entropy = address(self.whole), address(self.whole_entropy)
        # of loss() and total(), which only forwards call, one at a time
        self.sums = s.LogprobOut()
        self.at_sums = address(self.sums)
        self.numbers, self.mean_call, self.addresses, self.placed = HostWorkspace(), MeanCall(plan.mean), (0, 0, 0), 0

    def bind(self, comm: Comm, hidden: Any, weight: Any, bias: Any, target: Any,
             place: Any) -> Any:
        """Says where the tokens and the head are; what it returns has to live as long as the call.
        place: View.point of a forward, View.again of a backward."""
        plan, core = self.plan, self.core
        whole = memory = workspace = None
        if plan.scatter:
            whole = torch.empty((plan.rows.count, plan.rows.columns), dtype=plan.dtype, device=plan.device)
            comm.all_gather(checked(hidden, 'hidden', saved=place is View.again),
                            checked(whole, 'hidden'), stream=stream_of(plan.device))
            self.hidden.data = whole.data_ptr()
        else:
            hidden = place(plan.hidden, self.hidden, hidden)
        targets = plan.targets  # Listed has places of its own
        target = (targets.point if place is View.point else targets.again)(self.targets, target)
        weight = place(plan.weight, self.weight, weight)
        if bias is not None:
            bias = place(plan.bias, self.bias, bias)
        if core.gathered:
            memory, workspace = reserved(core.gathered, plan.device)
        elif core.bound == (self.number, self.weight.data, self.bias and self.bias.data):
            return whole, hidden, target, weight, bias  # the head has just this already
        core.bound = None
        check(self.run_bind(core.head, *self.at_parameters, workspace))
        core.bound = self.number, self.weight.data, self.bias and self.bias.data
        return whole, hidden, target, weight, bias, memory

    def run(self, function: Any, which: int, *addresses: Any) -> None:
        """A pass in C, with its workspace."""
        size = self.sizes.get(which)
        if size is None:
            size = self.sizes[which] = self.core.workspace(which, self.plan.rows.count,
                                                           self.plan.max_valid)
        work, workspace = self.core.on_host.reserve(size, self.plan.device, self.plan.cuda, _HOST_WORKSPACE)
        check(function(self.core.linear, *addresses, workspace, stream_of(self.plan.device) if self.plan.cuda else None))
        del work

    def gradients(self, weight: Any, bias: Any, main: Any, shared: Any = None) -> tuple[Any, Any, Any]:
        """New ones of hidden, as it is shaped, weight and bias; @main: theirs, to be added to; @shared: weight's,
        from forward."""
        plan = self.plan
        d_hidden = d_weight = d_bias = None
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
        return d_hidden, d_weight, d_bias

    def forward(self, comm: Comm, hidden: Any, weight: Any, bias: Any, target: Any,
                backward: bool) -> tuple[list[Any], Any, Any]:
        """(outputs, the buffer that backward needs, as a tensor, or memory that is no tensor)"""
        with self.core.lock:
            held = self.bind(comm, hidden, weight, bias, target, View.point)
            out = made_like(self.plan.out, self.out)
            kept, small, buffer = self.keep() if backward else (None, None, None)
            self.run(self.run_forward, s.LINEAR_FORWARD if backward else s.LINEAR_INFERENCE, self.at_batch, self.at_out,
                     self.at_made if backward else None, buffer)
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
                 by: Any = None) -> tuple[Any, Any, Any]:
        """Gradients of hidden, weight and bias. by: the number, after an early loss()."""
        plan = self.plan
        hidden, weight, bias, target, ids, kept, *shared = saved
        target = target if ids is None else (target, ids)
        with self.core.lock:
            held, up = [self.bind(comm, hidden, weight, bias, target, View.again)], self.upstream
            if by is not None:
                up.logp = up.entropy = 0.0
                up.loss, up.d_loss = 1.0, by.data_ptr()
            for i, name, d_name in () if by is not None else plan.grads:
                g = upstream[i]
                setattr(up, name, 0.0 if g is None else 1.0)
                if g is not None:
                    if not (plan.plain and g.is_contiguous()):
                        g = plan.rows.spread(g, 0)
                    held.append(g)
                    g = g.data_ptr()
                setattr(up, d_name, g)
            up.mean = False
            d_weight = _moved(shared[0], plan.shared) if shared and shared[0] is not None else None
            self.saved.d_weight = None if d_weight is None else d_weight.data_ptr()
            grads = self.gradients(weight, bias, main, d_weight)
            if small is not None:
                self.saved.memory = (c.addressof(small) + 255) & ~255
            else:
                kept = _moved(kept, self.kept_size)
                self.saved.memory = kept.data_ptr()
            self.saved.valid = True
            self.run(self.run_backward, s.LINEAR_BACKWARD, self.at_saved, self.at_upstream, self.at_grads)
        del held
        return grads

    def loss(self, comm: Comm, hidden: Any, weight: Any, bias: Any, target: Any, weights: Any, group: Comm, by: Any,
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
            self.whole.d_loss = None if weights is None else weights.data_ptr()
            held = self.bind(comm, hidden, weight, bias, target, View.point)
            out, at_out = ([], self.at_sums) if plan.unseen else (made_like(self.plan.out, self.out), self.at_out)
            losses = self.place(out, group)
            if not early:
                made = self._in_one_pass(weight, bias, self.at_whole, at_out, None if by is None else main)
            else:
                kept, small, buffer = self.keep()
                shared = None
                if self.share:
                    memory, self.made.d_weight = reserved(plan.shared, plan.device)
                    shared = memory.narrow(0, self.made.d_weight - memory.data_ptr(), plan.shared).view(
                        plan.d_dtype).view(plan.new_weight.shape)
                self.run(self.run_early, s.LINEAR_FORWARD, self.at_batch, self.at_whole, at_out, self.at_made, buffer)
                made = kept, small, shared
        del held
        return out, losses, made

    def entropy(self, comm: Comm, hidden: Any, weight: Any, bias: Any,
                target: Any) -> tuple[Any, Any, Any]:
        """Gradients of the sum of entropies, of tensors that a forward saved."""
        with self.core.lock:
            held = self.bind(comm, hidden, weight, bias, target, View.again), made_like(self.plan.out, self.out)
            grads = self._in_one_pass(weight, bias, self.at_entropy, self.at_out, None)
        del held
        return grads

    def _in_one_pass(self, weight: Any, bias: Any, upstream: int, out: int, main: Any) -> tuple[Any, Any, Any]:
        """Outputs and gradients of what bind() was told."""
        grads = self.gradients(weight, bias, main)
        self.run(self.run_loss, s.LINEAR_LOSS, self.at_batch, upstream, out, self.at_grads)
        return grads

    def place(self, out: list[Any], group: Comm) -> Any:
        """What holds the losses' number, workspace of their mean, and the losses where they are unseen."""
        if self.placed == group.size:
            return None
        mean = self.plan.mean
        parts = mean.workspace(group)
        size = parts + 8 + (mean.bytes if self.plan.unseen else 0)
        holds, workspace = self.numbers.reserve(size, self.plan.device, self.plan.cuda)
        valid = workspace + parts
        if self.plan.unseen:
            self.sums.n_valid, self.sums.loss = valid, valid + 8
            self.addresses = workspace, valid, valid + 8
            self.placed = group.size if holds is None else 0  # it stays where it is
        else:
            self.addresses = workspace, out[1].data_ptr(), out[0].data_ptr()
        return holds

    def total(self, mean: bool, weights: Any, group: Comm) -> tuple[Any, Any, Any, Any]:
        """(value, num, den) of what loss() left, and d value / d num, fp64."""
        workspace, valid, losses = self.addresses
        if weights is not None:
            return self.plan.mean.weighted(losses, weights, mean, group)
        factor = torch.empty_like(self.plan.mean.factor)
        return *self.plan.mean.forward(self.mean_call, losses, valid, factor.data_ptr(), workspace, mean,
                                       group), factor
