# SPDX-License-Identifier: Apache-2.0
"""The C objects of linear_distill(), which are kept with a communicator, and how one runs: forward, backward, or both in one."""
import ctypes as c
import itertools
import threading
from typing import Any, NamedTuple

import torch

from .. import _structs as s
from .._lib import call, size_of
from ..comm import Comm
from ..errors import STATUS, ArgumentError, Error, FailedError
from ..tensor import torch_dtype
from . import ranks as groups
from .linear_plan import D_HIDDEN, GEMMS, moved
from .logprob import config_of, real_of
from .ready import HostWorkspace, reserved, table
from .tensors import checked, stream_of

_CORES = 32  # C objects of other sizes or options, for a communicator
_HOST_WORKSPACE = 1 << 20  # bytes of workspace that a core keeps on the host
_SHARED = 1 << 20  # bytes of a weight whose gradient, before it is made, holds those of logits
_clock = itertools.count()
_NAMES = ('head', 'teacher_head')


class Side(NamedTuple):
    """A head of one call, whole rows of this rank's columns."""
    softcap: float
    scale: float
    temperature: float
    lora_scale: float
    wide: bool  # logits in f32 whatever the dtype of hidden
    gemm: str


class Tensors(NamedTuple):
    """Of a side: all of one dtype. The last three, or four, may be None"""
    hidden: Any
    weight: Any
    bias: Any
    a: Any
    b: Any


class Work(NamedTuple):
    """What a call is, but for its tensors."""
    what: str
    kind: int
    beta: float
    sides: tuple[Side, Side]
    chunk_size: int
    budget: int
    comm: Comm
    start: int  # this rank's columns of the vocabulary begin there
    vocab: int
    d_hidden: str


def _sums(dtype: Any) -> Any:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Core:
    """A colo_linear_distill_t with its heads."""

    def __init__(self, comm: Comm, heads: tuple[s.LmHeadConfig, s.LmHeadConfig], config: s.LinearDistillConfig):
        self.comm = comm
        self.heads, self.distill = (c.c_void_p(), c.c_void_p()), c.c_void_p()
        for handle, of in zip(self.heads, heads):
            call('colo_lm_head_create', c.byref(handle), of, None)
            comm.serves(handle, 'colo_lm_head_destroy')
        call('colo_linear_distill_create', c.byref(self.distill), config, *self.heads, comm.handle)
        comm.serves(self.distill, 'colo_linear_distill_destroy')
        self.used, self.on_host = 0, HostWorkspace()
        self.lock = threading.Lock()  # one call at a time: graphs of one thread may go backward on two

    def __del__(self) -> None:
        self.comm.ends(self.distill, 'colo_linear_distill_destroy')
        for handle in self.heads:
            self.comm.ends(handle, 'colo_lm_head_destroy')


def run_of(work: Work, sides: tuple[Tensors, Tensors], need: tuple[bool, ...], early: bool, sums: bool) -> 'Run':
    """The Run of such a call, which is kept: a GPU waits for what is made before its first kernel."""
    key = (work, need, early, sums, sides[0].weight.device,
           *((t.dtype, t.shape) if t is not None else None for side in sides for t in side))
    runs = table(work.comm, '_distill_runs')
    found = runs.get(key)
    return found if found is not None and found.core.distill else runs.add(key, Run(work, sides, need, early, sums))


class Run:
    """Of tensors of these shapes and dtypes, for these gradients, of hidden, weight, bias, A and B: need. early: mode early, into
    whose d_weight gradients of logits may go first: shared, its bytes, or 0. sums: gradients of weight and bias as they are summed"""

    def __init__(self, work: Work, sides: tuple[Tensors, Tensors], need: tuple[bool, ...], early: bool, sums: bool):
        student, teacher = sides
        hidden, weight = student.hidden, student.weight
        self.work, self.early, self.device, self.tokens = work, early, hidden.device, len(hidden)
        self.real = real_of(hidden.dtype)
        self.d_head, self.d_lora = need[1] or need[2], student.a is not None and (need[3] or need[4])
        self.d_hidden = need[0]
        self.d_dtype = _sums(weight.dtype) if sums else weight.dtype
        size = weight.numel() * weight.element_size()
        self.share = early and not sums and size >= _SHARED and 2 * self.tokens > 3 * hidden.shape[1]
        own, theirs = work.sides
        logits = _sums(weight.dtype) if own.wide else weight.dtype
        y = teacher.weight.dtype if not theirs.wide and teacher.weight.dtype == logits else _sums(teacher.weight.dtype)
        distill = config_of(
            work.what, 'distill', work.start, work.vocab, divergence=work.kind, beta=work.beta, temperature=own.temperature,
            softcap=own.softcap, scale=own.scale, target_temperature=theirs.temperature, target_softcap=theirs.softcap,
            target_scale=theirs.scale)
        members = dict(
            mode=s.LINEAR_LOGPROB_EARLY if early else s.LINEAR_LOGPROB_LOGPROB, logits_dtype=torch_dtype(logits),
            teacher_logits_dtype=torch_dtype(y), budget=work.budget, chunk_size=work.chunk_size, d_hidden=D_HIDDEN[work.d_hidden],
            frozen_hidden=not self.d_hidden, frozen_weight=not self.d_head, d_weight_dtype=torch_dtype(self.d_dtype),
            share_d_weight=self.share, lora=0 if student.a is None else len(student.a), frozen_lora=not self.d_lora,
            teacher_lora=0 if teacher.a is None else len(teacher.a))
        cuda = hidden.is_cuda
        heads = tuple(dict(rows=len(t.weight), hidden=t.hidden.shape[1], dtype=torch_dtype(t.weight.dtype),
                           mem=s.MEM_CUDA if cuda else s.MEM_HOST, device=hidden.device.index if cuda else -1,
                           has_bias=t.bias is not None, gemm=GEMMS[side.gemm]) for t, side in zip(sides, work.sides))
        self.sizes: dict[int, int] = {}  # workspaces of passes
        self.saved_size = -1
        self.core = self._core((bytes(distill), *members.items(), *(item for of in heads for item in of.items())), heads, distill, members)

    def _core(self, key: Any, heads: Any, distill: Any, members: Any) -> Core:
        comm = self.work.comm
        cores = comm.__dict__.setdefault('_distillers', {})
        core = cores.get(key)
        if core is None or not core.distill:
            first, second = (s.LmHeadConfig(struct_size=c.sizeof(s.LmHeadConfig), **of) for of in heads)
            try:
                core = cores[key] = Core(comm, (first, second), s.LinearDistillConfig(
                    struct_size=c.sizeof(s.LinearDistillConfig), distill=distill, **members))
            except Error as why:  # which the library tells no other rank, because it makes these alone
                groups.refuse(comm, why)
                raise
            if len(cores) > _CORES:
                cores.pop(min((k for k in cores if k != key), key=lambda k: cores[k].used))
        core.used = next(_clock)
        return core

    # ---- calls ----

    def _view(self, t: Any, name: str, saved: bool = False) -> Any:
        """The library's view of a tensor, which lives as long as the call"""
        raw = checked(t, '%s: %s' % (self.work.what, name), saved=saved)
        self.held.append(raw)
        return raw

    def _at(self, t: Any, name: str) -> Any:
        return c.pointer(self._view(t, name))

    def _bind(self, sides: tuple[Tensors | None, ...]) -> None:
        for handle, side, name in zip(self.core.heads, sides, _NAMES):
            if side is not None:
                call('colo_lm_head_bind', handle, self._view(side.weight, 'weight of ' + name),
                     None if side.bias is None else self._view(side.bias, 'bias of ' + name), None)

    def _lora(self, side: Tensors, scale: float, name: str) -> Any:
        if side.a is None:
            return None
        self.held.append(of := s.Lora(self._at(side.a, 'A of ' + name), self._at(side.b, 'B of ' + name), scale))
        return c.pointer(of)

    def _batch(self, sides: tuple[Tensors, Tensors], mask: Any) -> s.LinearDistillBatch:
        student, teacher = sides
        return s.LinearDistillBatch(
            c.sizeof(s.LinearDistillBatch), self._at(student.hidden, 'hidden'), self._at(teacher.hidden, 'teacher_hidden'),
            None if mask is None else self._at(mask, 'mask'), -1, self._lora(student, self.work.sides[0].lora_scale, 'head'),
            self._lora(teacher, self.work.sides[1].lora_scale, 'teacher_head'))

    def _upstream(self, up: Any) -> s.LinearDistillUpstream:
        """up: None: 1"""
        return s.LinearDistillUpstream(c.sizeof(s.LinearDistillUpstream), 1.0, None if up is None else self._at(up, 'the gradient'))

    def _gradients(self, student: Tensors, shared: Any = None) -> tuple[list[Any], s.LinearLogprobGrads]:
        """New ones of hidden, weight, bias, A and B, each or None; shared: weight's"""
        real, hidden, weight, bias = _sums(student.weight.dtype), student.hidden, student.weight, student.bias
        made = [torch.empty(hidden.shape, dtype=hidden.dtype, device=self.device) if self.d_hidden else None,
                None if not self.d_head else shared if shared is not None else
                torch.empty(weight.shape, dtype=self.d_dtype, device=self.device),
                torch.empty(bias.shape, dtype=self.d_dtype, device=self.device) if self.d_head and bias is not None else None,
                *(torch.empty(t.shape, dtype=real, device=self.device) if self.d_lora else None for t in (student.a, student.b))]
        return made, s.LinearLogprobGrads(c.sizeof(s.LinearLogprobGrads), *(
            None if t is None else self._at(t, 'a gradient') for t in made))

    def _run(self, name: str, which: int, *arguments: Any) -> None:
        size = self.sizes.get(which)
        if size is None:
            size = self.sizes[which] = size_of('colo_linear_distill_workspace_size', self.core.distill, which, self.tokens, -1)
        work, workspace = self.core.on_host.reserve(size, self.device, self.device.type == 'cuda', _HOST_WORKSPACE)
        call(name, self.core.distill, *arguments, workspace, stream_of(self.device))
        del work

    def _losses(self) -> tuple[Any, s.LinearDistillOut]:
        losses = torch.empty(self.tokens, dtype=self.real, device=self.device)
        return losses, s.LinearDistillOut(c.sizeof(s.LinearDistillOut), self._at(losses, 'the divergence'))

    def forward(self, sides: tuple[Tensors, Tensors], mask: Any, keeps: bool, up: Any = None) -> tuple[Any, Any, Any]:
        """(divergence of each token, what backward needs or None, shared memory or None). up: of mode early"""
        with self.core.lock:
            self.held: list[Any] = []
            self._bind(sides)
            losses, out = self._losses()
            batch = self._batch(sides, mask)
            if not keeps:
                self._run('colo_linear_distill_forward', s.LINEAR_LOGPROB_INFERENCE, batch, out, None, None)
                return losses, None, None
            if self.saved_size < 0:
                self.saved_size = size_of('colo_linear_distill_saved_size', self.core.distill, self.tokens, -1)
            size = self.saved_size
            memory, address = reserved(size, self.device)
            saved, shared = s.LinearDistillSaved(c.sizeof(s.LinearDistillSaved)), None
            if self.share:
                whole, saved.d_weight = reserved(sides[0].weight.numel() * sides[0].weight.element_size(), self.device)
                shared = whole[saved.d_weight - whole.data_ptr():][:whole.numel() - 255].view(self.d_dtype).view(sides[0].weight.shape)
            if self.early:
                self._run('colo_linear_distill_early', s.LINEAR_LOGPROB_FORWARD, batch, self._upstream(up), out, saved, address)
            else:
                self._run('colo_linear_distill_forward', s.LINEAR_LOGPROB_FORWARD, batch, out, saved, address)
        return losses, memory[address - memory.data_ptr():][:size], shared

    def backward(self, student: Tensors, teacher: Tensors | None, mask: Any, up: Any, kept: Any, shared: Any) -> list[Any]:
        """Gradients of hidden, weight, bias, A and B, each or None. teacher: None in mode early, whose @up is one number"""
        if not self.core.distill:
            raise FailedError(self.work.what + ': a communicator of the forward pass was destroyed since', STATUS['ERR_STATE'])
        with self.core.lock:
            self.held = []
            self._bind((student, teacher))
            kept = moved(kept, kept.numel())
            if shared is not None:
                shared = moved(shared, shared.numel() * shared.element_size())
            saved = s.LinearDistillSaved(c.sizeof(s.LinearDistillSaved), of=self.core.distill, hidden=self._view(student.hidden, 'hidden', True),
                                         max_valid=-1, memory=kept.data_ptr(), valid=True)
            if shared is not None:
                saved.d_weight = shared.data_ptr()
            if mask is not None:
                saved.mask = self._view(mask, 'mask', True)
            for side, name, scale in ((student, '', self.work.sides[0].lora_scale), (teacher, 'teacher_', self.work.sides[1].lora_scale)):
                if side is not None and side.a is not None:
                    setattr(saved, name + 'lora_a', self._view(side.a, 'A', True))
                    setattr(saved, name + 'lora_b', self._view(side.b, 'B', True))
                    setattr(saved, name + 'lora_scale', scale)
            if teacher is not None:
                saved.teacher_hidden = self._view(teacher.hidden, 'teacher_hidden', True)
            made, grads = self._gradients(student, None if shared is None else shared.detach())
            self._run('colo_linear_distill_backward', s.LINEAR_LOGPROB_BACKWARD, saved, self._upstream(up), grads)
        return made

    def loss(self, sides: tuple[Tensors, Tensors], mask: Any, up: Any) -> tuple[Any, list[Any]]:
        """(divergence of each token, gradients of hidden, weight, bias, A and B, each or None)"""
        with self.core.lock:
            self.held = []
            self._bind(sides)
            losses, out = self._losses()
            made, grads = self._gradients(sides[0])
            self._run('colo_linear_distill_loss', s.LINEAR_LOGPROB_LOSS, self._batch(sides, mask), self._upstream(up), out, grads)
        return losses, made


def check_gemm(what: str, gemm: Any, argument: str) -> None:
    if gemm not in GEMMS:
        raise ArgumentError("%s: gemm of %s is %r, expected one of %s" % (what, argument, gemm, ', '.join(GEMMS)))
