# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""colobridge check: versions, devices, transports, then bridges, a loss and their gradients on
ranks that are threads and, with PyTorch, processes and GPUs.

What ranks must get comes from plain Python in this file, in double precision: positions by the definition
of the layouts, losses and gradients by their formulas. Nothing of the library makes an expectation.
"""
import argparse
import array
import ctypes as c
import importlib.util
import math
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from . import _lib
from . import _structs as s
from .bridge import Batch, Bridge
from .comm import Comm, run_threads
from .errors import Error
from .layout import Layout
from .segments import Segments
from .view import view

EXAMPLE = """example:
  colobridge check --ranks 8

It prints versions, devices and a table of transports. The last table has a row per bridge and loss, and a
column per kind of ranks. The exit status is 0 if every check passed, 1 if one failed, 2 for a wrong
argument."""
SECONDS = 50  # until processes that do not answer are ended
FEATURES, TOKENS, COLUMNS = 3, 5, 4  # features of an activation; tokens, and columns per rank, of the logits
TOLERANCE = 1e-5  # logits are below 4 and sums have 32 addends: f32 is at least five times as accurate

Values = list[float]
Carry = Callable[[Values, Values], tuple[Values, Values]]  # (x, gradient of y) -> (y, gradient of x)
Ragged = Callable[[Segments, Values, Values], tuple[Values, Values]]  # (tables, x, gradient of y) -> as Carry
Loss = Callable[[Values, list[int]], tuple[Values, Values, Values]]  # -> loss, entropy, gradient of the logits


# ---- what must come out ----

@dataclass(frozen=True)
class Pair:
    """Two layouts. full: every rank gets all rows of its samples, and context ranks' gradients add up."""
    src: tuple[tuple[str, int], ...]
    dst: tuple[tuple[str, int], ...]
    full: bool = False

    def __str__(self) -> str:
        return 'bridge %s -> %s, %s' % (spec(self.src), spec(self.dst), 'full' if self.full else 'sharded')


def spec(dims: tuple[tuple[str, int], ...]) -> str:
    """As Grid takes it."""
    return ','.join('%s=%d' % dim for dim in dims)


def pairs(ranks: int) -> list[Pair]:
    """Fan-out, context ranks, and both at once if the number of ranks is even."""
    found = [Pair((('dp', ranks),), (('tp', ranks),)), Pair((('dp', ranks),), (('cp', ranks),))]
    if ranks % 2 == 0:
        half = ranks // 2
        found += [Pair((('tp', 2), ('dp', half)), (('cp', 2), ('dp', half)), full) for full in (False, True)]
    return found


def at(dims: tuple[tuple[str, int], ...], rank: int) -> dict[str, int]:
    """Coordinates of a rank; the first dim is the fastest."""
    found: dict[str, int] = dict.fromkeys(('tp', 'cp', 'dp'), 0)
    for name, extent in dims:
        rank, found[name] = divmod(rank, extent)
    return found


def rows_of(cp: int, part: int, rows: int) -> list[int]:
    """Zigzag: of 2 cp chunks, those number part and 2 cp - 1 - part."""
    n = rows // (2 * cp)
    return [chunk * n + i for chunk in (part, 2 * cp - 1 - part) for i in range(n)]


def elements(dims: tuple[tuple[str, int], ...], rank: int, ranks: int, full: bool) -> Iterator[tuple[int, int, int]]:
    """(sample, row, feature) of what a rank holds, in memory's order, of [2 ranks, 2 ranks, FEATURES]"""
    extent, place = dict(dims), at(dims, rank)
    dp, cp = extent.get('dp', 1), extent.get('cp', 1)
    for b in range(2 * ranks * place['dp'] // dp, 2 * ranks * (place['dp'] + 1) // dp):
        for row in range(2 * ranks) if full else rows_of(cp, place['cp'], 2 * ranks):
            yield from ((b, row, h) for h in range(FEATURES))


def value(element: tuple[int, int, int], ranks: int) -> float:
    """Each element has its own; whole numbers below 2^24, so sums of them are exact in f32."""
    b, row, h = element
    return (b * 2.0 * ranks + row) * FEATURES + h


def gradient(element: tuple[int, int, int], part: int, ranks: int) -> float:
    """What context rank @part gives for an element of y."""
    return 2 * value(element, ranks) + 7 * part + 3


def check_bridge(pair: Pair, rank: int, ranks: int, carry: Carry) -> str:
    """'' or what is wrong."""
    cp = dict(pair.dst).get('cp', 1)
    mine = list(elements(pair.src, rank, ranks, True))
    theirs = list(elements(pair.dst, rank, ranks, pair.full))
    part = at(pair.dst, rank)['cp']
    y, d_x = carry([value(e, ranks) for e in mine], [gradient(e, part, ranks) for e in theirs])
    givers = {row: [k for k in range(cp) if pair.full or row in rows_of(cp, k, 2 * ranks)] for row in range(2 * ranks)}
    return differ('y', y, [value(e, ranks) for e in theirs], 0) or differ(
        'gradient of x', d_x, [sum(gradient(e, k, ranks) for k in givers[e[1]]) for e in mine], 0)


def check_ragged(rank: int, ranks: int, carry: Ragged) -> str:
    """Segment i, of dp rank i, has ranks + i rows from position 2 ranks i on of one sequence, which is cut over cp."""
    tables = Segments([ranks + i for i in range(ranks)], src=list(range(ranks)), seq=[0] * ranks,
                      pos=[2 * ranks * i for i in range(ranks)], seq_len=[2 * ranks * ranks], seq_dp=[0])

    def rows(part: int) -> list[tuple[int, int]]:
        """(segment, row) of a context rank, by position"""
        places = (divmod(position, 2 * ranks) for position in rows_of(ranks, part, 2 * ranks * ranks))
        return [(i, row) for i, row in places if row < ranks + i]

    def numbers(of: list[tuple[int, int]], part: int | None) -> Values:
        elements = [(i, row, h) for i, row in of for h in range(FEATURES)]
        return [value(e, ranks) if part is None else gradient(e, part, ranks) for e in elements]

    mine, theirs = [(rank, row) for row in range(ranks + rank)], rows(rank)
    y, d_x = carry(tables, numbers(mine, None), numbers(theirs, rank))
    owner = {row: part for part in range(ranks) for row in rows(part)}
    return differ('y', y, numbers(theirs, None), 0) or differ(
        'gradient of x', d_x, [v for row in mine for v in numbers([row], owner[row])], 0)


def check_loss(rank: int, ranks: int, run: Loss) -> str:
    """Cross entropy and entropy of logits [TOKENS, COLUMNS ranks], and the gradient of this rank's columns of
    mean(loss) + sum(entropy) / 8."""
    vocab = COLUMNS * ranks
    x = [[((7 * t + 13 * v * v + 5 * v) % 257 - 128) / 32 for v in range(vocab)] for t in range(TOKENS)]
    targets = [(3 * t + 1) % vocab for t in range(TOKENS)]
    mine = range(COLUMNS * rank, COLUMNS * (rank + 1))
    loss, entropy, d_x = run([row[v] for row in x for v in mine], targets)
    want_loss: Values = []
    want_entropy: Values = []
    want_d_x: Values = []
    for row, target in zip(x, targets):
        log_sum = math.log(math.fsum(map(math.exp, row)))
        p = [math.exp(v - log_sum) for v in row]
        h = math.fsum(-q * (v - log_sum) for q, v in zip(p, row))
        want_loss.append(log_sum - row[target])
        want_entropy.append(h)
        want_d_x += [(p[v] - (v == target)) / TOKENS - p[v] * (row[v] - log_sum + h) / 8 for v in mine]
    return (differ('loss', loss, want_loss, TOLERANCE) or differ('entropy', entropy, want_entropy, TOLERANCE)
            or differ('gradient of the logits', d_x, want_d_x, TOLERANCE))


def differ(what: str, have: Values, want: Values, tolerance: float) -> str:
    """'' or where they differ first; NaN differs."""
    if len(have) != len(want):
        return '%s: %d elements, expected %d' % (what, len(have), len(want))
    for i, (a, b) in enumerate(zip(have, want)):
        if not abs(a - b) <= tolerance:
            return '%s[%d]: found %.9g, expected %.9g' % (what, i, a, b)
    return ''


def names(ranks: int) -> list[str]:
    """What is checked."""
    return [*map(str, pairs(ranks)), 'ragged batch, dp=%d -> cp=%d' % (ranks, ranks),
            'cross entropy and entropy, vocabulary over %d ranks' % ranks]


def checks(rank: int, ranks: int, carry: Callable[[Pair], Carry], ragged: Ragged, loss: Loss) -> dict[str, str]:
    """What every kind of ranks does, with the means of that kind."""
    return dict(zip(names(ranks), [
        *(check_bridge(pair, rank, ranks, carry(pair)) for pair in pairs(ranks)),
        check_ragged(rank, ranks, ragged), check_loss(rank, ranks, loss)]))


# ---- ranks that are threads: the C library by itself ----

def with_threads(world: Comm) -> dict[str, str]:
    """One rank."""
    world.set_timeout(20)
    ranks = world.size

    def carry(pair: Pair) -> Carry:
        bridge = Bridge(world, Layout.src(spec(pair.src)), Layout.dst(spec(pair.dst)),
                        (2 * ranks, 2 * ranks, FEATURES), output='full' if pair.full else 'sharded')
        return lambda x, d_y: carried(bridge, bridge, (bridge.src_shape, bridge.dst_shape), x, d_y)

    def ragged(tables: Segments, x: Values, d_y: Values) -> tuple[Values, Values]:
        bridge = Bridge(world, Layout.src('dp=%d' % ranks), Layout.dst('cp=%d' % ranks), (FEATURES,),
                        kind='ragged', output='sharded')
        return carried(bridge, bridge.set_segments(tables), ((-1, FEATURES), (-1, FEATURES)), x, d_y)

    return checks(world.rank, ranks, carry, ragged, lambda logits, targets: core_loss(world, logits, targets))


def carried(bridge: Bridge, by: Bridge | Batch, shapes: tuple[tuple[int, ...], ...], x: Values, d_y: Values
            ) -> tuple[Values, Values]:
    """(y, gradient of x) by a bridge, or a batch of it; shapes of x and y"""
    y, d_x = array.array('f', bytes(4 * len(d_y))), array.array('f', bytes(4 * len(x)))
    by.forward(shaped(x, shapes[0]), shaped(y, shapes[1]))
    by.backward(shaped(d_y, shapes[1]), shaped(d_x, shapes[0]))
    bridge.destroy()
    return list(y), list(d_x)


def shaped(values: 'Values | array.array[float]', shape: tuple[int, ...]) -> Any:
    """A view of f32 values as a tensor; of the array itself if it is one."""
    held = values if isinstance(values, array.array) else array.array('f', values)
    shape = tuple(len(held) // FEATURES if n < 0 else n for n in shape)
    return view(memoryview(held).cast('B').cast('f', list(shape)))


def core_loss(world: Comm, logits: Values, targets: list[int]) -> tuple[Values, Values, Values]:
    """Loss by the C functions."""
    config = s.LogprobConfig(struct_size=c.sizeof(s.LogprobConfig), ignore_index=-100, want_entropy=True,
                             want_loss=True, logits=s.LogitsOptions(COLUMNS * world.size, COLUMNS * world.rank, 1.0, 1.0))
    x, d_x = shaped(logits, (TOKENS, COLUMNS)), array.array('f', bytes(4 * len(logits)))
    t = view(array.array('q', targets))
    logp, entropy, loss = ((c.c_float * TOKENS)() for _ in range(3))
    size = _lib.size_of('colo_logprob_saved_size', config, s.DTYPE['f32'], TOKENS)
    spare = _lib.size_of('colo_logprob_workspace_size', config, s.DTYPE['f32'], TOKENS, world.size)
    saved, held = s.LogprobSaved(c.sizeof(s.LogprobSaved)), [c.create_string_buffer(n + 256) for n in (size, spare)]
    places = [-(-c.addressof(memory) // 256) * 256 for memory in held]
    batch = s.LogprobBatch(c.sizeof(s.LogprobBatch), c.pointer(x), c.pointer(t))
    out = s.LogprobOut(c.sizeof(s.LogprobOut), *(c.pointer(view(memory)) for memory in (logp, entropy, loss)))
    _lib.call('colo_logprob_forward', config, batch, world.handle, out, saved, *places, None)
    d_entropy, d_loss = (c.c_float * TOKENS)(*[1 / 8] * TOKENS), (c.c_float * TOKENS)(*[1 / TOKENS] * TOKENS)
    upstream = s.LogprobUpstream(c.sizeof(s.LogprobUpstream), None, c.pointer(view(d_entropy)), c.pointer(view(d_loss)))
    _lib.call('colo_logprob_backward', saved, upstream, shaped(d_x, (TOKENS, COLUMNS)), None)
    return list(loss), list(entropy), list(d_x)


# ---- ranks that are processes, on the host or a GPU each: PyTorch ----

def with_torch(rank: int, ranks: int, store: str, gpu: bool, pipe: Connection) -> None:
    """One rank. Sends (what is checked: '' or what is wrong, how ranks talk), or an exception's text."""
    try:
        os.environ['COLO_TIMEOUT_MS'] = os.environ.get('COLO_TIMEOUT_MS') or '20000'
        import torch
        import torch.distributed as dist

        from . import torch as ct
        torch.set_num_threads(1)
        device = torch.device('cuda', rank) if gpu else torch.device('cpu')
        if gpu:
            torch.cuda.set_device(device)
        dist.init_process_group('gloo', init_method='file://' + store, rank=rank, world_size=ranks)
        world = dist.group.WORLD
        p2p: list[bool] = []

        def tensor(values: Values, shape: tuple[int, ...], grad: bool = False) -> Any:
            return torch.tensor(values, device=device).view(shape).requires_grad_(grad)

        def carry(pair: Pair) -> Carry:
            bridge = ct.Bridge(spec(pair.src), spec(pair.dst), group=world,
                               output='full' if pair.full else 'sharded')

            def run(x: Values, d_y: Values) -> tuple[Values, Values]:
                given = tensor(x, (-1, 2 * ranks, FEATURES), True)
                y = bridge(given)
                y.backward(tensor(d_y, tuple(y.shape)))
                p2p.append(bool(bridge.is_p2p))
                return y.flatten().tolist(), given.grad.flatten().tolist()
            return run

        def ragged(tables: Segments, x: Values, d_y: Values) -> tuple[Values, Values]:
            given = tensor(x, (-1, FEATURES), True)
            y = ct.RaggedBridge('dp=%d' % ranks, 'cp=%d' % ranks, group=world, output='sharded')(given, tables)
            y.backward(tensor(d_y, tuple(y.shape)))
            return y.flatten().tolist(), given.grad.flatten().tolist()

        def loss(logits: Values, targets: list[int]) -> tuple[Values, Values, Values]:
            x = tensor(logits, (TOKENS, COLUMNS), True)
            _, entropy, per_token = ct.logprob(x, torch.tensor(targets, device=device), tp_group=world,
                                               entropy=True, loss=True)
            (per_token.mean() + entropy.sum() / 8).backward()
            return per_token.tolist(), entropy.tolist(), x.grad.flatten().tolist()

        pipe.send((checks(rank, ranks, carry, ragged, loss), any(p2p)))
        dist.barrier()
    except BaseException as why:
        pipe.send(('%s: %s' % (type(why).__name__, why), False))
    finally:
        pipe.close()


def processes(ranks: int, gpu: bool, until: float) -> list[Any]:
    """What each rank sends. Ranks are forks of a process that has imported torch and used no GPU."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['torch', 'colobridge.torch', 'colobridge.check'])
    with tempfile.TemporaryDirectory(prefix='colobridge-') as folder:
        started: list[tuple[Any, Any]] = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=with_torch, daemon=True,
                                      args=(rank, ranks, os.path.join(folder, 'store'), gpu, theirs))
            process.start()
            theirs.close()
            started.append((process, mine))
        said: list[Any] = []
        for _, pipe in started:
            try:
                said.append(pipe.recv() if pipe.poll(max(until - time.monotonic(), 0)) else
                            ('did not answer within %d s' % SECONDS, False))
            except EOFError:
                said.append(('ended without an answer', False))
        for process, _ in started:
            process.join(max(min(until - time.monotonic(), 5), 0))
            process.kill()
        return said


def summary(said: list[Any], ranks: int) -> dict[str, str]:
    """{what is checked: '' or 'rank r: what is wrong'} of all ranks. A rank that raised failed everything."""
    found = dict.fromkeys(names(ranks), '')
    for rank, answer in enumerate(said):
        for name in found:
            wrong = answer if isinstance(answer, str) else answer[name]
            found[name] = found[name] or wrong and 'rank %d: %s' % (rank, wrong)
    return found


# ---- the machine ----

@dataclass(frozen=True)
class Gpu:
    """What the driver says of one."""
    name: str
    capability: tuple[int, int]
    peers: tuple[int, ...]  # GPUs whose memory it reaches


def gpus() -> tuple[list[Gpu], str]:
    """Those that the driver shows, and why there are none. It makes no context."""
    try:
        driver = c.CDLL('libcuda.so.1')
    except OSError as why:
        return [], 'no NVIDIA driver (%s)' % why
    status = driver.cuInit(0)
    count = c.c_int()
    if status or driver.cuDeviceGetCount(c.byref(count)) or not count.value:
        return [], 'the NVIDIA driver shows no GPU (cuInit: %d)' % status
    devices: list[tuple[c.c_int, str]] = []
    for i in range(count.value):
        device, name = c.c_int(), c.create_string_buffer(256)
        driver.cuDeviceGet(c.byref(device), i)
        driver.cuDeviceGetName(name, 256, device)
        devices.append((device, name.value.decode()))

    def number(call: str, *arguments: Any) -> int:
        got = c.c_int()
        return 0 if getattr(driver, call)(c.byref(got), *arguments) else got.value

    return [Gpu(name, (number('cuDeviceGetAttribute', 75, device), number('cuDeviceGetAttribute', 76, device)),
                tuple(j for j, (other, _) in enumerate(devices)
                      if j != i and number('cuDeviceCanAccessPeer', device, other)))
            for i, (device, name) in enumerate(devices)], ''


def backends() -> dict[str, bool]:
    """Which modules lie where the library looks for them."""
    folder = os.environ.get('COLO_BACKEND_DIR') or os.path.dirname(_lib.find())
    return {name: os.path.exists(os.path.join(folder, 'libcolobridge-%s.so' % name)) for name in ('cuda', 'nccl')}


def torch_version() -> str:
    """'' if there is no PyTorch."""
    if importlib.util.find_spec('torch') is None:
        return ''
    import torch
    return str(torch.__version__)


def table(head: list[str], rows: list[list[str]]) -> None:
    """Prints columns and an empty line."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        print('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print()


def members(count: int, kind: str = 'ranks') -> str:
    """"ranks 0-3"."""
    return '%s 0-%d' % (kind, count - 1) if count > 1 else kind[:-1] + ' 0'


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        'colobridge check', description='Versions, devices, transports; then bridges, a loss and their gradients, compared '
        'with formulas in plain Python.', epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ranks', type=int, default=4, choices=range(2, 9), help='how many ranks (default: 4)')
    parser.add_argument('--threads', action='store_true', help='ranks are threads only, even if PyTorch is there')
    o = parser.parse_args(arguments)
    ranks, only_threads = o.ranks, o.threads
    until = time.monotonic() + SECONDS

    try:
        path, version = _lib.find(), _lib.version()
    except Error as why:
        print(why)
        return 1
    pytorch, have, (devices, no_gpu) = torch_version(), backends(), gpus()
    table(['what', 'version'],
          [['colobridge', '%s; library %s, %s' % (s.VERSION, version, path)],
           ['Python', '%s, %s' % (platform.python_version(), ' '.join(platform.libc_ver()))],
           ['PyTorch', pytorch or 'not installed'],
           *(['backend ' + name, 'there' if there else 'not in this build'] for name, there in have.items())])
    table(['device', 'what it is'],
          [['CPU', '%s, %d cores' % (platform.machine(), os.cpu_count() or 1)]] + [
              ['GPU %d' % i, '%s, compute capability %d.%d' % (gpu.name, *gpu.capability)]
              for i, gpu in enumerate(devices)])

    columns: dict[str, dict[str, str]] = {}
    transports: list[list[str]] = []

    def add(kind: str, transport: str, between: str, said: list[Any]) -> None:
        columns[kind] = found = summary(said, len(said))
        wrong = next((w for w in found.values() if w), '')
        transports.append([transport, between, 'yes' if not all(found.values()) else 'no: ' + wrong])

    try:
        add('threads', 'threads', members(ranks), run_threads(ranks, with_threads))
    except Exception as why:
        add('threads', 'threads', members(ranks), ['%s: %s' % (type(why).__name__, why)] * ranks)
    on_gpus = min(len(devices), ranks)
    no_torch = '--threads' if only_threads else '' if pytorch else 'PyTorch is not installed'
    if no_torch:
        transports.append(['sockets', members(ranks), 'not tried: ' + no_torch])
    else:
        add('processes', 'sockets', members(ranks), [a for a, _ in processes(ranks, False, until)])
    no_nccl = no_gpu or no_torch or next(('backend %s: not in this build' % n for n in have if not have[n]), '')
    if no_nccl:
        transports += [['NCCL', 'GPUs', 'not tried: ' + no_nccl], ['peer memory', 'GPUs', 'not tried: ' + no_nccl]]
    else:
        said = processes(on_gpus, True, until)
        add('GPUs', 'NCCL', members(on_gpus, 'GPUs'), [a for a, _ in said])
        for i, gpu in enumerate(devices[:on_gpus]):
            for j in range(i + 1, on_gpus):
                reach = j in gpu.peers and i in devices[j].peers
                transports.append(['peer memory', 'GPUs %d and %d' % (i, j),
                                   'no: the driver lets neither reach the other' if not reach else
                                   'yes' if said[i][1] or said[j][1] else 'no: bridges did not use it'])
    table(['transport', 'between', 'works'], transports)

    names = list(dict.fromkeys(name for found in columns.values() for name in found))
    table(['check', *columns],
          [[name, *({'': 'ok', None: '-'}.get(found.get(name), 'FAILED') for found in columns.values())]
           for name in names])
    failed = ['%s, %s: %s' % (name, kind, wrong) for kind, found in columns.items()
              for name, wrong in found.items() if wrong]
    print('\n'.join(failed + ['%d passed, %d failed' % (sum(map(len, columns.values())) - len(failed), len(failed))]))
    return 1 if failed else 0
