# SPDX-License-Identifier: Apache-2.0
"""The drill of refusals: a call that Python refuses on some ranks of a mesh tp x cp = 2 x 2 ends on all of them, each
refusal without a wait for another rank, and the next call works. What waits in vain is a TimeoutError here."""
import contextlib
import functools
import os
import threading
import time
import types
from concurrent import futures

import pytest

torch = pytest.importorskip('torch')
dist = pytest.importorskip('torch.distributed')
if not dist.is_available():
    pytest.skip('no torch.distributed', allow_module_level=True)

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from heads import linear_logprob, linear_nll, over_chunks  # noqa: E402
from colobridge import compat  # noqa: E402
from colobridge.torch import ranks  # noqa: E402
from colobridge.megatron import ColocatedBridgeCommunicator  # noqa: E402
from test_megatron import with_subgroups  # noqa: E402
from world import meet  # noqa: E402

T, H, V = 8, 4, 12  # tokens of a context rank, features, vocabulary
CU = torch.tensor([0, 2 * T])
DEADLINE_MS = os.environ.get('COLO_TIMEOUT_MS', '60000')  # of ranks that are threads, if not of a mutant


@functools.cache
def pairs():
    """Made once for all cases: a thread of each of Gloo's groups wakes 100 times a second until its process ends."""
    return {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}


def mesh(rank, world=None):
    """Groups and tensors of a rank. tp: pairs (0, 1) and (2, 3); cp, which is dp of the losses: (0, 2) and (1, 3).
    world: of ranks that are threads."""
    m, draw = types.SimpleNamespace(rank=rank, world=world or dist.group.WORLD), torch.Generator().manual_seed(1)
    if world is None:
        made = pairs()
        m.tp, m.cp = made[rank // 2 * 2, rank // 2 * 2 + 1], made[rank % 2, rank % 2 + 2]
    else:
        m.tp, m.cp = world.split_color(rank // 2, rank), world.split_color(rank % 2, rank)
    m.lo, m.hi = V // 2 * (rank % 2), V // 2 * (rank % 2) + V // 2
    z, m.h, w = (torch.randn(*shape, generator=draw) for shape in ((T, V), (T, H), (V, H)))
    m.z, m.w = z[:, m.lo:m.hi].clone(), w[m.lo:m.hi].clone()
    m.t, m.ids = torch.arange(T) % V, torch.arange(2 * T)[None] % V
    m.rows = m.w[rank // 2 * 3:rank // 2 * 3 + 3]  # of a head that cp shares
    m.columns = dict(tp_group=m.tp, vocab=(m.lo, V))
    m.mean = dict(m.columns, reduce_group=m.cp)
    m.head = dict(m.columns, shard_group=m.cp, rows=V // 2)
    m.bounds, m.packed = (m.lo, m.hi, m.tp), (CU, 2 * T)
    m.actions = 4, torch.ones(1, 2 * T), None, m.cp
    m.seq = ct.Sequence(1, 2 * T, cp_group=m.cp)
    return m


# name: (call of mesh() and a wrong argument, or None, which is right; the wrong argument)
SEGMENTS = cb.Segments([T] * 4, src=[0, 1, 2, 3], seq=[0] * 4, pos=[0, T, 2 * T, 3 * T], seq_len=[4 * T], seq_dp=[0])
PACKING = cb.Packing([0, 4 * T], split='block')
CALLS = {
    'nll': (lambda m, no: ct.nll(m.z, m.t if no is None else no, **m.mean).loss, torch.zeros(3, dtype=torch.int64)),
    'nll of a list': (lambda m, no: ct.nll(m.z, no or m.t, **m.mean).loss, [1, 2]),
    'nll per token': (lambda m, no: ct.nll(m.z, m.t, **m.mean, reduction='none', temperature=no or 1), -1),
    'nll by another reduction': (lambda m, no: ct.nll(m.z, m.t, reduction=no or 'sum', **m.mean).loss, 'most'),
    'nll of weights': (lambda m, no: ct.nll(m.z, m.t, mask=torch.full((T,), no or 0.5), **m.mean).loss, float('nan')),
    'nll over a group': (lambda m, no: ct.nll(m.z, m.t, **dict(m.mean, temperature=no or 1.)).loss, 'hot'),
    'linear_nll': (lambda m, no: linear_nll(m.h, m.w, target=m.t, mode=no or 'loss', **m.mean).loss, 'fast'),
    'linear_nll of a mode': (lambda m, no: linear_nll(m.h[:, :no], m.w, target=m.t, mode='keep', **m.mean).loss, 3),
    'linear_nll that trains': (lambda m, no: linear_nll(m.h.requires_grad_(), m.w, target=m.t[:no], **m.mean).loss, 3),
    'linear_nll with upstream': (lambda m, no: linear_nll(
        m.h.requires_grad_(), m.w, target=m.t, reduction='sum', upstream=no or 1., **m.mean).loss, float('inf')),
    'linear_nll of a head of cp': (lambda m, no: linear_nll(
        m.h, m.rows[:, :no], target=m.t, reduce_group=m.cp, **m.head).loss, 3),
    'linear_logprob of a head that cannot be made': (lambda m, no: linear_logprob(
        m.h, m.w, target=m.t, logits_dtype=no, **m.columns), torch.float16),
    'linear_logprob of a head of other rows': (lambda m, no: linear_logprob(
        m.h, m.rows, target=m.t, **dict(m.head, rows=no or 6)), 4),
    'linear_logprob of a head of cp': (lambda m, no: linear_logprob(
        m.h, m.rows, target=m.t if no is None else no, **m.head), 'none'),
    'weighted_sum': (lambda m, no: ct.weighted_sum(m.z, mask=no, reduce_group=m.cp).value, torch.ones(2)),
    'gather': (lambda m, no: m.seq.gather(m.z.new_zeros(1, T), no or 'sum'), 'mean'),
    'a new sequence': (lambda m, no: ct.Sequence(1, 2 * T, lengths=no, cp_group=m.cp).gather(m.z.new_zeros(1, T)), [1.5]),
    'topk_logprob': (lambda m, no: ct.topk_logprob(m.z, no or 3, **m.columns).logp, -1),
    'logprob_at': (lambda m, no: ct.logprob_at(m.z, no or m.t[:, None], **m.columns), [3]),
    'distill': (lambda m, no: ct.distill(m.z, m.z[:, :no], **m.columns).kl, 2),
    'linear_distill': (lambda m, no: ct.linear_distill(m.h, m.w, m.h, m.w, kind=no or 'tv', tp_group=m.tp, reduce_group=m.cp).loss,
                       'kl'),
    'reshard_head': (lambda m, no: ct.reshard_head(m.w, no or (0, 2), group=m.tp), (0, 99)),
    'a divergence': (lambda m, no: ct.distill(m.z, m.z, kind=no or 'tv', reduce_group=m.cp, **m.columns).loss, 'kl'),
    'topk_distill': (lambda m, no: ct.topk_distill(m.z, m.t[:, None], m.z[:, :1], kind=no or 'reverse_kl', reduction='none',
                                                   **m.columns), 'jsd'),
    'entropy': (lambda m, no: ct.entropy(m.z, mask=no, **m.columns), torch.ones(2)),
    'over_chunks': (lambda m, no: over_chunks(lambda z, rows: ct.entropy(z, **m.columns), m.h, m.w, tp_group=m.tp,
                                                 chunk_size=no or 4), -1),
    'a bridge': (lambda m, no: ct.bridge(m.z[None] if no is None else no, 'dp=4', 'cp=4',
                                         group=m.world), torch.ones(3)),
    'a new bridge': (lambda m, no: ct.Bridge('dp=4', 'cp=4', group=m.world, output=no or 'full')(m.z[None]), 'most'),
    'a new bridge of a spec': (lambda m, no: ct.bridge(m.z[None], 'dp=4', no or 'cp=4', group=m.world), 'cp='),
    'a new bridge of its own': (lambda m, no: in_own(m, no or 'bsh'), 'bhs!'),
    'a new tower': (lambda m, no: encodes(m, no or 'dp=4'), 'dp='),
    'a ragged bridge': (lambda m, no: carries(m)(m.h, no or SEGMENTS), [1]),
    'a ragged bridge without tables': (lambda m, no: carries(m).start(m.h, None if no else SEGMENTS).finish(), True),
    'a packed bridge': (lambda m, no: carries(m, packed=True)(
        m.h, src=PACKING, dst=None if no else PACKING.with_split('zigzag')), True),
    'vocab_parallel_entropy': (lambda m, no: compat.vocab_parallel_entropy(m.z, None, no or 1, m.tp), -1),
    'vocab_parallel_cross_entropy': (lambda m, no: compat.vocab_parallel_cross_entropy(
        m.z, m.t[:no], tp_group=m.tp), 3),
    'linear_cross_entropy': (lambda m, no: compat.linear_cross_entropy(
        m.h, m.w, m.t, reduction=no or 'none', dist_process_group=m.tp)[0], 'most'),
    'logits to logprobs': (lambda m, no: compat.from_parallel_logits_to_logprobs(
        m.z[None], m.ids if no is None else no, *m.bounds, cp_group=m.cp), torch.ones(2, 2 * T)),
    'logits to logprobs of top k': (lambda m, no: compat.from_parallel_logits_to_logprobs(
        m.z[None], m.ids, *m.bounds, cp_group=m.cp, sampling_params=types.SimpleNamespace(top_k=no or 3, top_p=.5)), -3),
    'logits of packed sequences to logprobs': (lambda m, no: compat.from_parallel_logits_to_logprobs_packed_sequences(
        m.z[None], m.ids[:, :no], *m.packed, *m.bounds, cp_group=m.cp), 3),
    'the same with lengths': (lambda m, no: compat.from_parallel_logits_to_logprobs_packed_sequences(
        m.z[None], m.ids, *m.packed, *m.bounds, cp_group=m.cp, sub_seq_lengths=no), [[1], [2]]),
    "the same of NeMo-RL's": (lambda m, no: compat.from_parallel_logits_to_logprobs_packed_sequences_nemo_rl(
        m.z[None], m.ids, *m.packed, *m.bounds, cp_group=m.cp, chunk_size=no), -1),
    'hidden to logprobs in chunks': (lambda m, no: compat.FusedLinearChunkedDistributedLogprob.apply(
        m.h, m.w, m.t, *m.bounds[:2], no or 2, m.tp), -1),
    'hidden to logprobs': (lambda m, no: compat.from_parallel_hidden_to_logprobs(
        m.h[None], m.w, m.ids, *m.bounds, cp_group=m.cp, chunk_size=no), -1),
    'hidden of packed sequences to logprobs': (lambda m, no: compat.from_parallel_hidden_to_logprobs_packed_sequences(
        m.h[None], m.w[:, :no], m.ids, *m.packed, *m.bounds, cp_group=m.cp), 2),
    'entropy of packed sequences': (lambda m, no: compat.vocab_parallel_entropy_packed_sequences(
        m.z[None], *m.packed, *m.actions, chunk_memory_mb=no or 1, tp_group=m.tp)[0], -1),
    'entropy of lengths': (lambda m, no: compat.vocab_parallel_entropy_packed_sequences(
        m.z[None], *m.packed, *m.actions, sub_seq_lengths=no, tp_group=m.tp)[0], [[1], [2]]),
    'entropy of hidden': (lambda m, no: compat.from_parallel_hidden_to_entropy_packed_sequences(
        m.h[None], m.w, *m.packed, *m.actions, m.tp, temperature=no or 1.)[0], -1.),
}
COMPARED = {'linear_logprob of a head of other rows', 'reshard_head'}  # by the ranks, which wait for each other
OVER = {1: ('nll per token', 'linear_logprob of a head that cannot be made', 'topk_logprob', 'logprob_at', 'distill', 'topk_distill', 'reshard_head', 'entropy', 'over_chunks', 'vocab_parallel_entropy', 'vocab_parallel_cross_entropy', 'linear_cross_entropy', 'hidden to logprobs in chunks'), 2: ('weighted_sum', 'gather', 'a new sequence')}  # a rank talks to the rank of this number xor its own, in other calls to all
WRONG = {'all ranks': {0, 1, 2, 3}, 'one rank': {1}, 'one row': {0, 1}, 'one column': {1, 3}}


def in_own(m, axes):
    carry = ct.Bridge('dp=4', 'cp=4', group=m.world, comm='own', axes=axes)
    try:
        return carry(m.z[None])
    finally:
        carry.destroy()


def encodes(m, llm):
    tower = torch.nn.Linear(6, 8)
    torch.nn.init.ones_(tower.weight), torch.nn.init.ones_(tower.bias)  # the same on all ranks
    vision = ct.EncoderParallel(tower, group=m.world, llm=llm, rows=lambda grid: 1,
                                run=lambda tower, pixels, grid: tower(pixels), smallest=(torch.zeros(1, 6), None))
    return vision(None, into=torch.zeros(1, 4, 8))


def carries(m, packed=False):
    if not hasattr(m, 'carry'):
        m.carry = (ct.PackedBridge if packed else ct.RaggedBridge)('cp=4' if packed else 'dp=4', 'cp=4', group=m.world)
    return m.carry


def drill(rank, name):
    call, wrong = CALLS[name]
    m, heard = mesh(rank), []
    for made in (False, True):  # before there are communicators, and after
        for which, wrongs in WRONG.items():
            if not made:
                meet()
                ct.shutdown()
                meet()
            late = made and len(wrongs) == 4 and name not in COMPARED
            if late and rank == 3:
                meet()  # the others have refused, while this one had not come
            others = [rank ^ bit for bit, names in OVER.items() if name in names] or range(4)
            for _ in range(1 + (which == 'one rank')):  # also of a call after a refusal
                said = contextlib.nullcontext() if wrongs.isdisjoint({rank, *others}) else pytest.raises(
                    (ValueError, TypeError, cb.MismatchError) if rank in wrongs else RuntimeError)
                with said as why:
                    call(m, wrong if rank in wrongs else None)
            heard.append((which, why and str(why.value)))
            if late and rank != 3:
                meet()
            meet()
            assert not torch.isnan(call(m, None)).any()
            meet()  # or the next refusal ends this call of a rank that is slower
    return heard


@pytest.mark.parametrize('name', list(CALLS))
def test_a_refusal_ends_the_call_of_all_ranks_at_once(world, name):
    heard = world.run(drill, name)
    for i, which in enumerate(said[0] for said in heard[0]):
        refused = [heard[rank][i][1].split('\n')[0][:60] for rank in WRONG[which]]
        for rank in {0, 1, 2, 3} - WRONG[which]:  # in the words of one that refused
            words = heard[rank][i][1]
            assert words is None or name in COMPARED or any(why in words for why in refused), (which, rank, words)


@pytest.mark.parametrize('name', list(CALLS))
def test_ranks_that_are_threads_go_on_after_a_refusal(name):
    call, wrong = CALLS[name]
    barrier = threading.Barrier(4)

    def one_rank(world):
        m = mesh(world.rank, world)
        for wrongs in ({0, 1, 2, 3}, {1}):
            for _ in range(2):
                barrier.wait(60)
                # An abort reaches all that were made from one world, so also ranks of no group with the wrong one, if
                # they are still at their call.
                said = pytest.raises((ValueError, TypeError, RuntimeError)) if world.rank in wrongs else \
                    contextlib.suppress(RuntimeError)
                with said:
                    call(m, wrong if world.rank in wrongs else None)
                barrier.wait(60)
                with contextlib.suppress(RuntimeError):  # of which such a rank may hear only now
                    call(m, None)
            barrier.wait(60)
            assert not torch.isnan(call(m, None)).any()

    cb.run_threads(4, one_rank)


NOT_NUMBERS = {
    'temperature is None': lambda z, t: ct.logprob(z, t, temperature=None),
    'softcap is [3.0]': lambda z, t: ct.topk_logprob(z, 2, softcap=[3.0]),
    "target_temperature is 'hot'": lambda z, t: ct.distill(z, z, target_temperature='hot'),
    'k is 1.5': lambda z, t: ct.topk_logprob(z, 1.5),
    'ignore_index is 1.5': lambda z, t: ct.logprob_at(z, t[..., None], ignore_index=1.5),
    'ignore_index is None': lambda z, t: ct.nll(z, t, ignore_index=None),
    'ignore_index is %d, which has too many bits' % 2**80: lambda z, t: ct.logprob(z, t, ignore_index=2**80),
    'chunk_size is 1.5': lambda z, t: linear_logprob(z, z[0], target=t, chunk_size=1.5),
    r"vocab is \('a', None\)": lambda z, t: ct.logprob(z, t, vocab=('a', None)),
    'max_valid is 1.5': lambda z, t: linear_logprob(z, z[0], target=t, max_valid=1.5),
    "upstream is 'x'": lambda z, t: linear_nll(z, z[0], target=t, reduction='sum', upstream='x'),
    'dim is 1.5': lambda z, t: ct.relayout(z, [0, 2], 'zigzag', 'block', group=cb.Comm.self(), dim=1.5),
    'cu_seqlens is a int': lambda z, t: ct.relayout(z, 2, 'zigzag', 'block', group=cb.Comm.self()),
    'chunk_size is None': lambda z, t: over_chunks(lambda z, rows: z, z, z[0], chunk_size=None),
    'lengths is a list, expected integers': lambda z, t: ct.Sequence(2, 3, lengths=[1.5, 2]),
    'expected floats and numbers': lambda z, t: ct.weighted_sum(z, z.to(torch.complex64)),
    'budget is -1': lambda z, t: linear_logprob(z, z[0], target=t, budget=-1),
    'budget is %d' % 2**64: lambda z, t: linear_nll(z, z[0], target=t, budget=2**64),
    'max_valid is %d, which has too many bits' % 2**64: lambda z, t: linear_nll(z, z[0], target=t, max_valid=2**64),
    'nll: mask is of torch.complex64': lambda z, t: ct.nll(z, t, mask=t * 1j),
    'linear_nll: mask is of torch.complex64': lambda z, t: linear_nll(z, z[0], target=t, mask=t * 1j),
    'entropy: mask is of torch.complex64': lambda z, t: ct.entropy(z, mask=t * 1j),
    'topk_logprob: mask is of torch.complex64': lambda z, t: ct.topk_logprob(z, 2, mask=t * 1j),
    'logprob_at: mask is of torch.complex64': lambda z, t: ct.logprob_at(z, t[..., None], mask=t * 1j),
    'distill: mask is of torch.complex64': lambda z, t: ct.distill(z, z, mask=t * 1j),
    'weighted_sum: mask is of torch.complex64': lambda z, t: ct.weighted_sum(z, mask=z * 1j),
    'support is a list': lambda z, t: ct.logprob(z, t, support=[[1]]),
    'bias is a int': lambda z, t: linear_logprob(z, z[0], 3, target=t),
    'src is None': lambda z, t: ct.Bridge(None, 'dp=1', group=cb.Comm.self()),
    'logits has layout': lambda z, t: ct.logprob(z.to_sparse(), t),
    'hidden has layout': lambda z, t: linear_logprob(z.to_sparse(), z[0], target=t),
    'y has layout|x has layout': lambda z, t: ct.Bridge('dp=1', 'dp=1', group=cb.Comm.self())(z.to_sparse()),
    "shape a NoneType": lambda z, t: ct.distill(None, z),
    'hidden is a NoneType': lambda z, t: over_chunks(lambda z, rows: z, None, z[0]),
    r'bias is \[5\]': lambda z, t: over_chunks(lambda z, rows: z, z, z[0], torch.ones(5)),
    'expected one dtype': lambda z, t: over_chunks(lambda z, rows: z, z, z[0].double()),
}


@pytest.mark.parametrize('words', list(NOT_NUMBERS))
def test_what_is_no_number_or_tensor_is_a_value_error_that_names_it(words):
    z, t = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=words.replace('[3.0]', r'\[3.0\]')):
        NOT_NUMBERS[words](z, t)


def test_an_exception_of_a_rank_reaches_communicators_that_were_made_anew():
    heard, through = [], threading.Barrier(4)

    def fails_later(world):
        z = mesh(world.rank, world).z
        for _ in range(2):  # so that one that was made anew has been destroyed, too
            with pytest.raises(ValueError):
                ct.entropy(z, mask=torch.ones(2), tp_group=world)
            assert ct.entropy(z, tp_group=world).isfinite().all()
            through.wait(60)  # or what a rank does next ends this call of a slower one
        if world.rank == 2:
            raise KeyError('no such row')
        with pytest.raises(RuntimeError) as why:
            ct.entropy(z, tp_group=world)
        heard.append('no such row' in str(why.value))

    with pytest.raises(KeyError, match='no such row'):
        cb.run_threads(4, fails_later)
    assert heard == [True] * 3


@pytest.mark.parametrize('how, words', [('with an exception', 'rank 1: KeyError'), ('well', 'rank 1 has ended'),
                                        ('before the others meet', 'rank 1: KeyError'), ('by Ctrl-C', 'interrupted')])
def test_a_rank_that_has_ended_is_not_waited_for_to_make_a_communicator(how, words):
    heard, over = [], threading.Event()

    def one_rank(world):
        z = mesh(world.rank, world).z
        with pytest.raises(ValueError):
            ct.entropy(z, mask=torch.ones(2), tp_group=world)
        if world.rank == 1:
            if how == 'by Ctrl-C':
                world._run.interrupt()
            over.set()
            if how in ('well', 'by Ctrl-C'):
                return
            raise KeyError('no such row')
        over.wait(60)
        if how == 'before the others meet':
            while 1 in world._run.worlds:
                time.sleep(0.01)
        with pytest.raises(RuntimeError) as why:
            ct.entropy(z, tp_group=world)
        heard.append(str(why.value))

    with pytest.raises(KeyError) if 'KeyError' in words else contextlib.nullcontext():
        cb.run_threads(4, one_rank)
    assert len(heard) == 3 and all(words in why for why in heard), heard


def step(carry, tensor):
    """Forward, in which nothing may move between ranks, and backward, in which it does then."""
    carry.communicate(tensor).sum().backward()


def communicates(rank):
    """communicate() on four ranks; what is wrong on one of them before its bridge is called."""
    full = [types.SimpleNamespace(shape=[tp, dp], dim_names=['tp', 'dp'], rank_offset=0) for tp, dp in ((1, 4), (4, 1))]
    ways = [ColocatedBridgeCommunicator(*full), ColocatedBridgeCommunicator(*full[::-1])]
    for carry, wrong in ((ways[0], torch.zeros(2, 3)), (ways[0], None), (ways[1], torch.zeros(2, 3, 4))):
        right = torch.ones(4, 3, 4, requires_grad=True)
        for wrongs in ({0, 1, 2, 3}, {2}):
            meet()
            with pytest.raises((ValueError, AttributeError) if rank in wrongs else RuntimeError) as why:
                step(carry, wrong if rank in wrongs else right)
            assert not isinstance(why.value, TimeoutError), why.value
            meet()
            step(carry, right)
            meet()
    meet()
    with pytest.raises(ValueError if rank == 3 else RuntimeError, match='only algo=\'exact\' carries ragged'):
        ways[0].communicate(right, segments=[1] if rank == 3 else None)


def run_communicates(rank):
    with_subgroups(communicates, rank)


def test_what_communicate_refuses_on_one_rank_is_every_ranks_error(world):
    world.run(run_communicates)


def group_that_is_set(rank):
    m = mesh(rank)
    compat.set_tensor_parallel_group(m.tp)
    right = lambda: compat.vocab_parallel_entropy(m.z)  # noqa: E731
    right()
    for hear, call in (
            ({0, 1}, lambda no: compat.vocab_parallel_entropy(m.z, chunk_memory_mb=no or 1)),
            ({0, 1}, lambda no: compat.vocab_parallel_cross_entropy(m.z, m.t[:no])),
            ({0, 1, 2, 3}, lambda no: compat.vocab_parallel_entropy_packed_sequences(
                m.z[None], *m.packed, *m.actions, sub_seq_lengths=[[no]] * 2 if no else None)[0])):
        meet()
        with pytest.raises(ValueError if rank == 1 else RuntimeError) if rank in hear else contextlib.nullcontext():
            call(-1 if rank == 1 else None)
        meet()
        right()


def test_a_refusal_reaches_the_tensor_parallel_group_that_is_set(world):
    world.run(group_that_is_set)


# ---- meetings ----

def meeting(store, me):
    return ranks._Ranks((0, 1, 2), me, store)


def test_a_refusal_ends_a_meeting_that_a_third_rank_has_not_come_to(monkeypatch):
    monkeypatch.setenv('COLO_TIMEOUT_MS', DEADLINE_MS)
    store, cpu = dist.HashStore(), torch.device('cpu')
    of = [meeting(store, me) for me in range(3)]
    with futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(of[0].comm, cpu)
        of[1].refuse(ValueError('no such shape'))
        with pytest.raises(RuntimeError, match='^rank 1: no such shape'):  # rank 2 is not here
            first.result()
        with pytest.raises(RuntimeError, match='^rank 1: no such shape'):  # all others have left
            of[2].comm(cpu)
        assert [made.size for made in pool.map(lambda one: one.comm(cpu), of)] == [3, 3, 3]


def test_a_rank_that_leaves_a_meeting_is_not_waited_for(monkeypatch):
    monkeypatch.setenv('COLO_TIMEOUT_MS', '1')
    store, cpu = dist.HashStore(), torch.device('cpu')
    of = [meeting(store, me) for me in range(3)]
    with pytest.raises(TimeoutError, match='rank 0 waited'):
        of[0].comm(cpu)
    monkeypatch.setenv('COLO_TIMEOUT_MS', DEADLINE_MS)
    for late in of[1:]:
        with pytest.raises(RuntimeError, match='rank 0: rank 0 waited'):
            late.comm(cpu)
    with futures.ThreadPoolExecutor(3) as pool:
        assert [made.size for made in pool.map(lambda one: one.comm(cpu), of)] == [3, 3, 3]


def test_many_ranks_that_are_threads_may_refuse_at_once():
    """Store.compare_set() of PyTorch 1.13 makes its result while another thread may run Python."""
    def refuse(me):
        store = dist.HashStore()
        for _ in range(1000):
            meeting(store, me).refuse(ValueError('no such shape'))

    with futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(refuse, range(3)))
