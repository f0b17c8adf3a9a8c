# SPDX-License-Identifier: Apache-2.0
"""What ranks must have alike: tensors, compared by checksums, and samples, by their ids."""
import json
import operator
import struct
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from .. import _structs as s
from ..comm import Comm
from ..errors import STATUS, ArgumentError, MismatchError
from ..layout import Layout, part_of, splits_of
from . import ranks as groups

_BITS = {1: 'uint8', 2: 'int16', 4: 'int32', 8: 'int64'}
_ODD = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's constants


def checksums(tensors: Iterable[Any]) -> list[int]:
    """A number for each tensor, the same on every device: of its shape, dtype and bits, whatever its strides. The host waits
    for a GPU once."""
    sums, kinds = [], []
    for t in tensors:
        t = t.detach()
        kinds.append(zlib.crc32(repr((tuple(t.shape), t.dtype)).encode()))
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        sums.append(_sum((t.resolve_neg() if t.is_neg() else t).contiguous().view(-1)))
    return [(number ^ kind << 31) % 2 ** 64 for number, kind in zip((int(n) for n in _brought(sums)), kinds)]


def _brought(sums: list[Any]) -> list[Any]:
    """To the host, those of a device at once."""
    out: list[Any] = list(sums)
    for device in {n.device for n in sums}:
        at = [i for i, n in enumerate(sums) if n.device == device]
        for i, n in zip(at, torch.stack([sums[i] for i in at]).tolist()):
            out[i] = n
    return out


def _sum(flat: Any) -> Any:
    """Of a number of each word of 8 bytes, and of each element behind the last one, which depends on its place. Sums of
    integers do not depend on their order."""
    size, device = flat.element_size(), flat.device
    flat = flat.clone() if flat.data_ptr() % 8 or flat.storage_offset() * size % 8 else flat
    whole = len(flat) // (8 // size) * (8 // size)
    total = torch.zeros((), dtype=torch.int64, device=device)
    step = 1 << (24 if device.type == 'cuda' else 16)  # of the host: what its cache holds
    for words in flat[:whole].view(torch.int64), flat[whole:].view(getattr(torch, _BITS[size])):
        place = torch.arange(min(step, len(words)), dtype=torch.int64, device=device).mul_(_ODD[0])
        for first in range(0, len(words), step):
            x = words[first:first + step].to(torch.int64)
            x = (x ^ (place[:len(x)] + ((first * _ODD[0] + 2 ** 63) % 2 ** 64 - 2 ** 63))).mul_(_ODD[1])
            x = (x ^ (x >> 32)).mul_(_ODD[2])
            total += (x ^ (x >> 29)).sum()
    return total


def differing(held: dict[int, Any]) -> str:
    """"ranks [0, 2] and [1]", which have different values; '' if all are the same."""
    having: dict[Any, list[int]] = {}
    for rank, value in held.items():
        having.setdefault(value, []).append(rank)
    return 'ranks ' + ' and '.join(map(str, having.values())) if len(having) > 1 else ''


def compare(what: str, comm: Comm, group: Any, given: dict[str, Any]) -> None:
    """MismatchError on all ranks of a vocabulary group, unless they bring the same. group: of which @comm is the communicator.
    A rank whose stream is captured cannot look."""
    if comm.size == 1:
        return
    if any(t.is_cuda for t in given.values()) and torch.cuda.is_current_stream_capturing():
        return
    with groups.telling(comm):
        host = comm if comm.backend != 'nccl' else groups.comm_of(group, torch.device('cpu'))
        said = [struct.unpack('%dQ' % len(given), part) for part in host.gather_bytes(struct.pack('%dQ' % len(given), *checksums(
            given.values())))]
        for i, name in enumerate(given):
            ranks = differing({comm.world_rank(r): of[i] for r, of in enumerate(said)})
            if ranks:
                raise MismatchError("%s: %s bring other %s; expected the same on all ranks that share the vocabulary"
                                    % (what, ranks, name), STATUS['ERR_MISMATCH'])


def of_tokens(target: Any, heat: Any, ignore_index: int, weights: Any = None, grouping: Any = None) -> dict[str, Any]:
    """What is compared of targets, of temperatures (OfTokens), weights [..], and groups (Grouping), each of which may be None"""
    made, ignored = {'targets': target.long()}, target == ignore_index
    if heat is not None:
        made['temperatures'] = heat.given.detach().to(torch.float32).masked_fill(ignored, 1.0)
    if weights is not None:
        made['weights of tokens'] = weights.masked_fill(ignored, 0.0)
    if grouping is not None:
        made |= {'groups': grouping.index.view(target.shape).long().masked_fill(ignored, 0), 'group weights': grouping.weight}
    return made


def used(hidden: Any, target: Any, ignore_index: int) -> Any:
    """Hidden states of the tokens that are not ignored, the only ones that are read."""
    return hidden.detach().reshape(-1, hidden.shape[-1])[target.reshape(-1) != ignore_index]


def _ids(ids: Any) -> list[int] | None:
    try:
        return None if ids is None else [operator.index(i) for i in (ids.tolist() if hasattr(ids, 'tolist') else ids)]
    except TypeError:
        raise ArgumentError("bridge: ids of samples are %s, expected whole numbers" % (ids,)) from None


def _by_sample(layout: Layout, side: str, ids: dict[int, list[int] | None]) -> list[dict[int, list[int]]]:
    """For each sample: the ranks that call it by an id."""
    samples = Layout(layout.grid)  # of these alone, on all stages
    for split, _ in splits_of(layout, s.AXIS_SAMPLES):
        samples.split('samples', layout.grid.names[split.dim], {s.SPLIT_CEIL: 'ceil'}.get(split.kind, 'block'))
    given = {r: of or [] for r, of in ids.items() if samples.holds(r) and (of is not None or layout.holds(r))}
    total = sum({part_of(layout, s.AXIS_SAMPLES, r): len(of) for r, of in reversed(given.items())}.values())
    at = {r: samples.owned(r, total, 1, 1).samples for r in given}
    found, expected = {r: len(of) for r, of in given.items()}, {r: end - first for r, (first, end) in at.items()}
    if found != expected:
        raise MismatchError("bridge: ranks of the %s bring %s ids, expected those of %d samples, %s" % (side, found, total, expected),
                            STATUS['ERR_MISMATCH'])
    having: list[dict[int, list[int]]] = [{} for _ in range(total)]
    for r, of in given.items():
        for sample, i in enumerate(of, at[r][0]):
            having[sample].setdefault(i, []).append(r)
    return having


def samples(comm: Comm, src: Layout, dst: Layout, given: tuple[Any, Any]) -> None:
    """Bridge.check_samples()"""
    with groups.telling(comm):
        said = [json.loads(part) for part in comm.gather_bytes(json.dumps([*map(_ids, given)]).encode(), ragged=True)]
        sides = 'source', 'destination'
        of = [_by_sample(layout, sides[i], {comm.world_rank(r): ids[i] for r, ids in enumerate(said)})
              for i, layout in enumerate((src, dst))]
        if len(of[0]) != len(of[1]):
            raise MismatchError("bridge: the source has %d samples, the destination %d; expected the same" % (len(of[0]), len(of[1])),
                                STATUS['ERR_MISMATCH'])
        wrong = [i for i, having in enumerate(zip(*of)) if len({*having[0], *having[1]}) > 1]
        if wrong:
            raise MismatchError("bridge: sample %d of %d is %s; expected one id on all of them; %d %s" % (
                wrong[0], len(of[0]), ' and '.join('%d on ranks %s of the %s' % (i, ranks, side) for side, having in zip(
                    sides, (of[0][wrong[0]], of[1][wrong[0]])) for i, ranks in having.items()),
                len(wrong), 'samples differ' if len(wrong) > 1 else 'sample differs'), STATUS['ERR_MISMATCH'])
