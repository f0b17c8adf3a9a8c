# SPDX-License-Identifier: Apache-2.0
"""Blocks, streams and lifetimes of the memory that peers write into, without processes."""
import contextlib
import gc
import itertools
import subprocess
import sys
import weakref

import pytest

torch = pytest.importorskip('torch')

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from colobridge import memory  # noqa: E402
from colobridge.torch import arena  # noqa: E402
from colobridge.torch.moves import reach  # noqa: E402


def made(sums=False, buffers=2):
    comm = cb.Comm.self()
    args = torch.float32 and 0, (True, True), sums
    counts = (6, 12)
    nbytes = arena.nbytes_of(counts, args[0], *args[1:], buffers)
    held = cb.Memory.alloc(comm, nbytes)
    region = arena.Region(held, torch.device('cpu'), args[0], counts, *args[1:], buffers)
    return arena.Arena(region, ((1, 2, 3), (2, 2, 3)), args[1])


def test_blocks_lie_apart_and_within():
    for sums, buffers in itertools.product((False, True), (0, 1, 3)):
        at = made(sums, buffers)
        parts = [s for s in at.workspace[:1] if s is not None]
        for side in (0, 1):
            while (t := at.lend(side, 1, None, None)) is not None:
                parts.append(t)
        assert len(parts) == 1 + buffers * (1 if sums else 2)
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * 4) for t in parts)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        assert at.region.begin <= spans[0][0] and spans[-1][1] <= at.region.end


@pytest.fixture
def waited(monkeypatch):
    """The streams that the current one was told to wait for."""
    streams = []
    monkeypatch.setattr(arena, '_behind', lambda device, last: streams.append(last))
    return streams


def test_another_stream_waits_for_the_one_that_had_the_block(waited):
    at = made(buffers=1)
    for stream, waits in ((1, []), (1, []), (2, [1]), (2, [1]), (1, [1, 2])):
        t = at.lend(1, stream, None, None)
        assert t is not None and waited == waits
        del t
    waited.clear()
    at, own = made(), torch.zeros(2, 2, 3)
    for stream, waits in ((1, []), (1, []), (2, [1]), (1, [1, 2])):
        assert at.instead(0, own, stream) is at.workspace[0] and waited == waits
    assert at.copied == 4


def test_captured_calls_take_the_workspace(waited):
    at = made()
    at.instead(0, torch.zeros(2, 2, 3), 1)
    at.region._capturing = lambda: True
    assert at.lend(0, 1, None, None) is None and at.lend(1, 1, None, None) is None
    at.instead(0, torch.zeros(2, 2, 3), 2)
    assert waited == []  # would end the capture
    at.region._capturing = lambda: False
    at.instead(0, torch.zeros(2, 2, 3), 1)
    assert waited == [] and at.lend(1, 1, None, None) is not None


def test_memory_of_pytorch_s_allocator_is_idle_when_a_bridge_gets_it(monkeypatch):
    did, device = [], torch.device('cuda', 0)

    class Stream:
        def synchronize(self):
            did.append('waited')

    def allocate(nbytes, on, stream):
        if nbytes > 1000:
            raise RuntimeError('CUDA out of memory')
        assert on == device and isinstance(stream, Stream)
        did.append('allocated %d' % nbytes)
        return 512
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda on: Stream())
    monkeypatch.setattr(torch.cuda, 'caching_allocator_alloc', allocate)
    monkeypatch.setattr(torch.cuda, 'caching_allocator_delete', lambda address: did.append('freed %d' % address))
    made = arena.allocator.__wrapped__(device)
    assert made.allocate(None, 1001) is None and did == []
    assert made.allocate(None, 100) == 512 and did == ['allocated 100', 'waited']
    made.release(None, 512)
    assert did[2:] == ['freed 512']
    assert arena.allocator(torch.device('cpu')) is None


def test_memory_of_the_host_is_not_reached_but_there():
    def rank(comm):
        held = cb.Memory.alloc(comm, 100 * comm.rank)
        assert held.nbytes == 256 * comm.rank and not held.is_p2p
        if comm.rank:
            t = torch.from_dlpack(held.array('bf16', (4, 8), 64))
            assert t.dtype == torch.bfloat16 and t.shape == (4, 8) and t.data_ptr() == held.data + 64
            for dtype, shape, offset in (('f32', (8, 8), 64), ('f32', (1,), -4), ('f31', (1,), 0)):
                with pytest.raises(ValueError, match='the memory has 256|one of f32'):
                    held.array(dtype, shape, offset)
            gone = weakref.ref(held)
            del held
            assert gone() is not None
            t.zero_()
            del t
            assert gone() is None
        mine = torch.zeros(4, 4)
        held = cb.Memory.register(comm, mine if comm.rank else None)
        assert (held.data, held.nbytes) == ((mine.data_ptr(), 64) if comm.rank else (0, 0))
        held.destroy()
        held.destroy()
        with pytest.raises(RuntimeError, match='this memory was destroyed'):
            held.data
    cb.run_threads(2, rank)
    with pytest.raises(ValueError, match='not contiguous'):
        cb.Memory.register(cb.Comm.self(), torch.zeros(4, 4).t())


def test_memory_that_a_failure_left_stays(monkeypatch):
    """A late peer may still write there; it is the process's until it ends."""
    real, ended = memory.lib(), []

    class Library:
        def __getattr__(self, name):
            return ended.append if name == 'colo_memory_destroy' else getattr(real, name)
    monkeypatch.setattr(memory, 'lib', Library)

    def rank(comm, fails, gone):
        held = cb.Memory.alloc(comm, 512)
        if fails:
            comm.abort('enough')
        if gone:
            comm.destroy()
        del held
    for gone in (False, True):
        ended.clear()
        cb.run_threads(2, lambda comm: rank(comm, False, gone))
        assert len(ended) == 2
        with contextlib.suppress(RuntimeError):  # of a rank whose alloc() the abort met
            cb.run_threads(2, lambda comm: rank(comm, True, gone))
        assert len(ended) == 2
    ended.clear()
    mine = [torch.zeros(4), torch.zeros(4)]
    held = list(map(weakref.ref, mine))

    def registered(comm):
        memory = cb.Memory.register(comm, mine[comm.rank])
        comm.barrier()
        if comm.rank == 0:
            comm.abort('enough')
        del memory
    with contextlib.suppress(RuntimeError):
        cb.run_threads(2, registered)
    mine.clear()
    gc.collect()
    assert held[0]() is not None  # nor is a caller's tensor free before


def test_what_is_reached_goes_by_the_hosts_too(monkeypatch):
    """On one level, also if ranks of a node share what they lack."""
    shape = (8, 16, 16)

    def rank(comm, src, dst, nodes):
        found = []
        for per in (0, 2):
            carry = ct.Bridge(src, dst, group=comm, ranks_per_node=per)
            plan = cb.Plan(carry.src, carry.dst, shape, comm.rank, ranks_per_node=per, one_level=True,
                           nodes=None if per else nodes)
            found.append(tuple(map(plan.reached, ('forward', 'backward'))))
            assert reach(carry.src, carry.dst, carry._engine._options, comm, shape, memory.s.DTYPES.index('f32'), False,
                          comm.rank)[0] == found[-1]
        return found[0] != found[1]
    for nodes in (None, [0, 1, 1, 0, 0, 1, 0, 1]):
        monkeypatch.setenv('COLO_NODE', ','.join(map(str, nodes)) if nodes else '')
        assert any(cb.run_threads(8, lambda comm: rank(comm, 'tp=2,dp=4', 'dp=2,cp=2,tp=2', nodes)))
        cb.run_threads(8, lambda comm: rank(comm, 'tp=4,dp=2', 'tp=2,cp=4', nodes))


def test_memory_is_made_when_garbage_is_gone(monkeypatch, request):
    """What cannot be opened is an error where bridges have memory already, and need more; the others go on without."""
    comm, alloc = cb.Comm.self(), memory.Memory.alloc
    gc.disable()  # or Python may be the one that collects it
    request.addfinalizer(gc.enable)
    garbage = type('Garbage', (), {})()
    garbage.itself, seen = garbage, weakref.ref(garbage)
    del garbage

    def without_garbage(comm, nbytes):
        if seen():
            raise cb.Error("memory: no more", cb.errors.STATUS['ERR_NOMEM'])
        return alloc(comm, nbytes)
    monkeypatch.setattr(memory.Memory, 'alloc', without_garbage)
    monkeypatch.setattr(memory.Memory, 'is_p2p', True)
    assert isinstance(arena.memory_of(comm, 256, True, True), memory.Memory)
    monkeypatch.setattr(memory.Memory, 'is_p2p', False)
    assert arena.memory_of(comm, 256, True, False) is None
    with pytest.raises(RuntimeError, match="ranks cannot open each other's memory"):
        arena.memory_of(comm, 256, False, True)


EXIT = '''
import gc, threading, sys
import torch, colobridge as cb
class Keep:
    pass
gc.disable()
k = Keep()
k.t = torch.from_dlpack(cb.Memory.alloc(cb.Comm.self(), 256).array('f32', (4,)))
k.me = threading._keep = k
'''


def test_tensors_may_go_with_the_interpreter():
    """In its last collection of garbage, when modules are gone."""
    done = subprocess.run([sys.executable, '-c', EXIT], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0 and 'ignored' not in done.stdout, done.stdout
