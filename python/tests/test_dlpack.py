# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules, both ways and both kinds."""
import array
import gc
import weakref

import pytest

import colobridge as cb
from colobridge import _structs as s
from colobridge import dlpack
from colobridge.view import view


gone = []  # memory of Owners that died, which is not freed: a late read sees what __del__ wrote


class Owner:
    """Memory with a death that can be seen."""

    def __init__(self, values):
        self.data = array.array('f', values)

    def __del__(self):
        self.data[:] = array.array('f', [-1.0] * len(self.data))
        gone.append(self.data)


def given(values=(1.0, 2.0, 3.0)):
    owner = Owner(values)
    return dlpack.Array(view(owner.data), owner), weakref.ref(owner)


@pytest.mark.parametrize('version', [None, (0, 8), (1, 0), (1, 3)])
def test_round_trip_is_the_same_memory(version):
    out, _ = given()
    capsule = out.__dlpack__(max_version=version)
    back = dlpack.from_dlpack(capsule)
    assert (back.view.data, back.view.dtype, back.view.ndim) == (out.view.data, out.view.dtype, 1)
    assert list(back.view.shape[:1]) == [3] and list(back.view.stride[:1]) == [1]
    assert not back.read_only and len(dlpack._given) == 1
    with pytest.raises(ValueError, match="'used_dltensor"):
        dlpack.from_dlpack(capsule)
    back.release()
    back.release()
    assert not dlpack._given


@pytest.mark.parametrize('version', [None, (1, 0)])
def test_the_owner_lives_as_long_as_somebody_has_it(version):
    out, alive = given()
    back = dlpack.from_dlpack(out.__dlpack__(max_version=version))
    del out
    gc.collect()
    assert alive() is not None
    del back
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize('version', [None, (1, 0)])
def test_a_capsule_that_no_consumer_takes_gives_its_tensor_back(version):
    out, alive = given()
    capsule = out.__dlpack__(max_version=version)
    del out
    del capsule
    gc.collect()
    assert alive() is None and not dlpack._given


def test_what_is_no_capsule_and_unknown_types_are_refused():
    with pytest.raises(ValueError, match='capsule named None'):
        dlpack.from_dlpack(3)
    out, _ = given()
    with pytest.raises(BufferError):
        out.__dlpack__(copy=True)
    capsule = out.__dlpack__()
    managed = dlpack._Legacy.from_address(dlpack._py.PyCapsule_GetPointer(id(capsule), b'dltensor'))
    for member, value, words in (('bits', 24, '24 bits'), ('lanes', 4, '4 lanes'),
                                 ('device_type', 7, 'device type 7')):
        kept = getattr(managed.tensor, member)
        setattr(managed.tensor, member, value)
        with pytest.raises(ValueError, match=words):
            dlpack.from_dlpack(capsule)
        setattr(managed.tensor, member, kept)


def test_numpy_gives_and_takes():
    np = pytest.importorskip('numpy')
    a = np.arange(12, dtype=np.int64).reshape(3, 4)[:, 1:]
    back = dlpack.from_dlpack(a)
    assert s.DTYPES[back.view.dtype] == 'i64' and list(back.view.stride[:2]) == [4, 1]
    assert back.view.data == a.ctypes.data
    out, _ = given([5.0, 6.0])
    taken = np.from_dlpack(out)
    assert taken.tolist() == [5.0, 6.0] and taken.ctypes.data == out.view.data


def test_torch_gives_and_takes():
    torch = pytest.importorskip('torch')
    t = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    back = dlpack.from_dlpack(t)
    assert s.DTYPES[back.view.dtype] == 'bf16' and list(back.view.stride[:2]) == [1, 3]
    assert back.view.data == t.data_ptr()
    out, alive = given([5.0, 6.0])
    taken = torch.from_dlpack(out)
    assert taken.tolist() == [5.0, 6.0] and taken.data_ptr() == out.view.data
    del out
    gc.collect()
    assert alive() is not None
    del taken
    gc.collect()
    assert alive() is None


class Maker:
    """Gives memory that no other object has."""
    alive = None

    def __dlpack__(self, **_):
        out, self.alive = given((5.0, 6.0))
        return out.__dlpack__(max_version=(1, 0))


def test_a_view_holds_what_it_was_given():
    maker = Maker()
    t = view(maker)
    gc.collect()
    assert maker.alive() is not None and maker.alive().data[1] == 6.0
    del t
    gc.collect()
    assert maker.alive() is None


def test_calls_hold_what_they_were_given_until_they_return():
    one, want = cb.Comm.self(), array.array('f', [5.0, 6.0])
    for name in ('all_gather', 'all_reduce', 'reduce_scatter'):
        maker, got = Maker(), array.array('f', [0.0, 0.0])
        getattr(one, name)(maker, got)
        assert got == want, name
        assert maker.alive() is None, name
    got = array.array('f', [0.0, 0.0])
    cb.Partition(2).shard(Maker(), 0, got)
    assert got == want


def test_registered_memory_holds_what_it_was_given():
    maker = Maker()
    memory = cb.Memory.register(cb.Comm.self(), maker)
    gc.collect()
    assert maker.alive() is not None
    del memory
    gc.collect()
    assert maker.alive() is None


def test_a_buffer_cannot_be_resized_while_a_view_of_it_lives():
    buffer = bytearray(8)
    t = view(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b'1')
    del t
    buffer.extend(b'1')


def test_a_tensor_of_other_signs_is_refused():
    torch = pytest.importorskip('torch')
    for take in (dlpack.from_dlpack, view):
        with pytest.raises(ValueError, match='tensor: its memory holds other signs'):
            take(torch._neg_view(torch.ones(3)))
