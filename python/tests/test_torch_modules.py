# SPDX-License-Identifier: Apache-2.0
"""Bridges and EncoderParallel as modules of a model: on 4 ranks, in DDP, in FSDP2, compiled, saved and resumed, against the
same model of one process; copies, pickles, casts; plans on a thread."""
import contextlib
import copy
import pickle
import threading
import types

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402
from new_user import H, PATCH, SOUND, WORDS, Model, Tower, encoder, resume, save, sgd, sharded  # noqa: E402
from world import meet, needs_fsdp2  # noqa: E402

DTYPE = torch.float64
LENGTH = 16
CP, DP = 2, 2
# Sums of some 10^3 products of size 1 in another order, in fp64, are 1e-13 apart a layer; a wrong factor is 0.25.
BOUND = 1e-10


class Whole(torch.nn.Module):
    """The same model of one process: all text, sound and images."""

    def __init__(self):
        super().__init__()
        self.words, self.sound = torch.nn.Embedding(WORDS, H), torch.nn.Linear(SOUND, H)
        self.vision = torch.nn.Module()
        self.vision.tower = Tower()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(H, H) for _ in range(2)])
        self.head = torch.nn.Linear(H, WORDS)

    def forward(self, text, sound, images, target):
        hidden = (self.words(text) + self.sound(sound)).clone()
        for sequence, position, pixels in images:
            rows = self.vision.tower(pixels)
            hidden = torch.cat((hidden[:sequence], torch.cat((hidden[sequence, :position], rows, hidden[sequence, position + len(rows):])).unsqueeze(0),
                                hidden[sequence + 1:]))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return torch.nn.functional.cross_entropy(self.head(hidden).view(-1, WORDS), target.view(-1))


class Batch:
    """A step: four sequences of text, of which a replica has two and a rank the sound of one, and images of some ranks."""

    def __init__(self, seed):
        rng = torch.Generator().manual_seed(seed)
        self.text, self.target = (torch.randint(WORDS, (4, LENGTH), generator=rng) for _ in range(2))
        self.sound = torch.randn(4, LENGTH, SOUND, generator=rng, dtype=DTYPE)
        # (rank that has it, sequence of its replica, position, patches): rank 2 has none, rank 1 two
        self.images = [(rank, sequence, position, torch.randn(n, PATCH, generator=rng, dtype=DTYPE))
                       for rank, sequence, position, n in ((0, 0, 3, 4), (1, 0, 9, 2), (1, 1, 0, 5 + seed % 3), (3, 1, 4, 3))]

    def whole(self):
        return self.text, self.sound, [(rank // CP * 2 + sequence, position, pixels)
                                       for rank, sequence, position, pixels in self.images], self.target

    def of(self, rank):
        """What the data loader of a rank returns."""
        part = cb.Partition(LENGTH, cp=CP, cp_rank=rank % CP)
        replica = slice(rank // CP * 2, rank // CP * 2 + 2)
        mine = [i for i in self.images if i[0] == rank]
        images = {'pixels': torch.cat([i[3] for i in mine]), 'grid_thw': [[1, 1, len(i[3])] for i in mine],
                  'seq': [i[1] for i in mine], 'pos': [i[2] for i in mine]} if mine else {'pixels': None}
        return ct.shard(self.text[replica], part), ct.shard(self.target[replica], part), self.sound[rank:rank + 1], images


def made(kind, seed):
    torch.manual_seed(seed)
    return kind().to(DTYPE)


def full(t):
    return t.full_tensor() if hasattr(t, 'full_tensor') else t


def apart(named, expected):
    """The largest difference, relative to the largest entry."""
    return max(float((full(t) - expected[name]).abs().max() / expected[name].abs().max()) for name, t in named)


def by_name(model, of=lambda p: p):
    return [(name.replace('module.', '').replace('_orig_mod.', ''), of(p)) for name, p in model.named_parameters()]


def step(rank, model, optimizer, oracle, theirs, seed, factor):
    """One step of both; factor: what makes sums of the gradients that the wrapper leaves."""
    batch = Batch(seed)
    optimizer.zero_grad(), theirs.zero_grad()
    loss, want = model(*batch.of(rank)), oracle(*batch.whole())
    (loss * factor).backward(), want.backward()
    if factor == 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    assert abs(float(loss) - float(want)) <= BOUND * float(want)
    grads, expected = by_name(model, lambda p: p.grad), dict(by_name(oracle, lambda p: p.grad))
    assert sorted(name for name, _ in grads) == sorted(expected) and 'vision.tower.first.weight' in expected
    assert apart(grads, expected) <= BOUND
    optimizer.step(), theirs.step()
    assert apart(by_name(model, lambda p: p.detach()), dict(by_name(oracle, lambda p: p.detach()))) <= BOUND


def trained(rank, wrap):
    """Two steps of a model that an optimizer of model.parameters() trains, tower and all."""
    model, oracle, factor = made(Model, 1), made(Whole, 1), 1
    with torch.no_grad():
        for (_, p), (_, q) in zip(sorted(model.named_parameters()), sorted(oracle.named_parameters())):
            q.copy_(p)
    before = {name: p.detach().clone() for name, p in oracle.named_parameters()}
    if wrap == 'ddp':
        model, factor = torch.nn.parallel.DistributedDataParallel(model), dist.get_world_size()
    elif wrap == 'compiled':
        model = torch.compile(model, backend='aot_eager')
    optimizer, theirs = sgd(model), sgd(oracle)
    for seed in (1, 2):
        step(rank, model, optimizer, oracle, theirs, seed, factor)
    assert all(not torch.equal(p, before[name]) for name, p in oracle.named_parameters())


@pytest.mark.parametrize('wrap', ('nothing', 'ddp', 'compiled'))
def test_an_optimizer_of_the_model_trains_the_tower(world, wrap):
    if wrap == 'compiled' and not hasattr(torch, 'compile'):
        pytest.skip('this PyTorch %s has no torch.compile' % torch.__version__)
    world.run(trained, wrap)


def in_fsdp2(rank, folder, what):
    """fully_shard() around the model, one optimizer, saved after a step, and resumed by another model, which ends where the
    whole one does that never stopped."""
    def new(seed):
        model = made(Model, seed)
        sharded(model, what == 'encoder')
        return model, sgd(model)
    model, optimizer = new(1)
    oracle = made(Whole, 2)
    with torch.no_grad():
        for name, p in oracle.named_parameters():
            p.copy_(full(model.get_parameter(name)))
    theirs = sgd(oracle)
    step(rank, model, optimizer, oracle, theirs, 1, dist.get_world_size())
    assert save(model, optimizer, folder) == set(oracle.state_dict())  # nothing but the parameters of encoders and model
    again, resumed = new(3)
    resume(again, resumed, folder)
    for seed in (2, 3):
        step(rank, again, resumed, oracle, theirs, seed, dist.get_world_size())


@pytest.mark.parametrize('what', ('tower', 'encoder'))
def test_a_model_in_fsdp2_is_saved_and_resumed(world, tmp_path, what):
    needs_fsdp2(world)
    world.run(in_fsdp2, str(tmp_path / 'checkpoint'), what)


def a_module(rank):
    model, tower = made(Model, 1), 'vision.tower.first.weight'
    assert tower in dict(model.named_parameters()) and tower in model.state_dict()
    assert {name for name in model.state_dict() if not name.startswith(('words', 'sound', 'layers', 'head'))} == {
        'vision.tower.%s.%s' % (a, b) for a in ('first', 'second') for b in ('weight', 'bias')}
    assert [type(m).__name__ for m in model.children()][2:4] == ['EncoderParallel', 'Bridge']
    model.eval()
    assert not model.vision.tower.training and not model.carry.training
    model.train()
    assert model.vision.tower.training
    other = made(Model, 2)
    other.load_state_dict(model.state_dict())
    batch, heard = Batch(5).of(rank), []
    for module in (model.vision, model.carry):
        module.register_forward_hook(lambda module, given, out: heard.append((type(module).__name__, out.shape[-1])))
    assert torch.equal(model(*batch), other(*batch))
    assert heard == [('Bridge', H), ('EncoderParallel', H)]
    assert repr(model.carry) == 'Bridge(dp=4 -> cp=2,dp=2)' and repr(model.vision).startswith('EncoderParallel(\n  llm=cp=2,dp=2\n  (tower): Tower(')


def test_parameters_of_its_tower_are_those_of_an_encoder(world):
    world.run(a_module)


def cast(rank):
    """The smallest input, which ranks without images encode, goes where the tower goes, with its values."""
    vision = encoder(Tower())
    for dtype in (torch.float64, torch.bfloat16):
        vision.to(dtype)
        for grids in ([], [[1, 1, 2]] if rank == 1 else []):
            pixels = torch.ones(2, PATCH, dtype=dtype) if grids else None
            hidden = vision(pixels, grids or None, seq=[0] * len(grids), pos=[0] * len(grids), into=torch.zeros(1, 4, H, dtype=dtype))
            hidden.sum().backward()
            assert all(p.grad.dtype is dtype and torch.isfinite(p.grad).all() for p in vision.parameters())
        vision.zero_grad()
    model = torch.nn.ModuleList([encoder(Tower())])
    model[0]._smallest = torch.full((1, PATCH), 7.), (1, 1, 1)
    model._apply(lambda t: torch.full_like(t, float('nan'), dtype=torch.float64))  # as to_empty(), at its worst
    assert torch.equal(model[0]._smallest[0], torch.full((1, PATCH), 7., dtype=torch.float64))


def test_a_tower_that_is_cast_encodes_steps_without_images(world):
    world.run(cast)


def emptied(rank, how):
    """A model that is made on "meta", or goes there, and then has memory that nobody wrote, and weights: as FSDP2 begins."""
    def model():
        tower = Tower()
        tower.config = types.SimpleNamespace(patch_size=1, in_channels=PATCH, spatial_merge_size=1)
        return torch.nn.ModuleList([ct.EncoderParallel(tower, group=dist.group.WORLD, llm='tp=2', run=lambda tower, *of: tower(*of))])
    weights = made(model, 1)
    with torch.device('meta') if how == 'made' else contextlib.nullcontext():
        empty = model()
    empty.to('meta')
    assert all(p.is_meta for p in empty.parameters())
    empty.to(DTYPE).to_empty(device='cpu').load_state_dict(weights.state_dict())
    assert torch.equal(empty[0]._smallest[0], torch.zeros(1, PATCH, dtype=DTYPE))
    for vision in (weights[0], empty[0]):
        hidden = vision(torch.ones(2, PATCH, dtype=DTYPE) if rank else None, [[1, 1, 2]] if rank else None, seq=[0] * rank,
                        pos=[1] * rank, into=torch.zeros(1, 4, H, dtype=DTYPE))
        hidden.sum().backward()
        assert torch.equal(hidden[0, 1:3], vision.tower(torch.ones(2, PATCH, dtype=DTYPE)))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(weights.parameters(), empty.parameters()))


@pytest.mark.parametrize('how', (
    pytest.param('made', marks=pytest.mark.skipif(not hasattr(torch.device, '__enter__'), reason='this PyTorch makes no modules on "meta"')),
    'moved'))
def test_a_tower_on_meta_encodes_when_it_has_weights(pair, how):
    pair.run(emptied, how)


KINDS = 'uniform', 'ragged', 'packed'


def bridge_of(kind, group, **options):
    """A bridge, and its call of which y is the same on all ranks, the rank's number and 1."""
    if kind == 'uniform':
        return ct.Bridge('dp=2', 'cp=2', group=group, **options), lambda bridge, rank: bridge(torch.full((1, 2, 3), rank + 1.))
    if kind == 'packed':
        p = cb.Packing(seq_len=[8], split='zigzag')
        return ct.PackedBridge('cp=2', 'cp=2', group=group, **options), lambda bridge, rank: bridge(
            torch.full((4, 3), rank + 1.), p, p.with_split('block'))
    tables = cb.Segments([2, 3], src=[0, 1], seq=[0, 0], pos=[0, 4], seq_len=[8], seq_dp=[0])
    return ct.RaggedBridge('dp=2', 'cp=2', group=group, **options), lambda bridge, rank: bridge(torch.full((2 + rank, 3), rank + 1.), tables)


def copied(rank, kind):
    bridge, call = bridge_of(kind, dist.group.WORLD, grad_scale=2.)
    want = call(bridge, rank)
    model = torch.nn.Sequential(bridge, torch.nn.Linear(3, 3))
    for other in (copy.deepcopy(model)[0], copy.copy(bridge), pickle.loads(pickle.dumps(model))[0]):
        assert type(other) is type(bridge) and other is not bridge and (other.group, other.src, other.frozen) == (
            bridge.group, bridge.src, bridge.frozen)
        assert torch.equal(call(other, rank), want) and torch.equal(call(bridge, rank), want)
    assert pickle.loads(pickle.dumps(bridge))._engine.grad_scale == 2. and copy.deepcopy(bridge)._engine is bridge._engine
    deep, alone = copy.deepcopy(bridge), []
    deep.register_forward_hook(lambda *_: alone.append(1))
    call(deep, rank), call(bridge, rank)
    assert alone == [1]
    for words, of in (('one of a group of its own to pickle', bridge_of(kind, dist.new_group([0, 1]))[0]),
                      ("one with comm='own' to pickle", bridge_of(kind, dist.group.WORLD, comm='own')[0])):
        assert torch.equal(call(copy.deepcopy(of), rank), want)
        with pytest.raises(TypeError, match='found %s, expected .*save the state_dict' % words):
            pickle.dumps(of)
        of.destroy()
    assert torch.equal(call(bridge, rank), want)


@pytest.mark.parametrize('kind', KINDS)
def test_bridges_are_copied_and_pickled(pair, kind):
    pair.run(copied, kind)


# ---- plans on a thread ----

def images_of(rank, s):
    """(pixels, grid, position) of a step; each rank has an image in every second one."""
    n = (s + rank) % 4 + 1
    return (torch.full((n, PATCH), s + 1., dtype=DTYPE), [[1, 1, n]], [4 * rank]) if (s + rank) % 2 else (None, None, [])


def planned(vision, rank, s):
    pixels, grid, pos = images_of(rank, s)
    return vision.plan(pixels, grid, seq=[0] * len(pos), pos=pos, packing=[0, 8])


def beside(rank, group, comm, tower):
    """Plans are made on a thread while the main one calls: rank 0 waits in a plan until rank 1, which has called, makes
    it. On one communicator the call would find the plan there."""
    vision = encoder(tower, group, 'tp=2', comm=comm)
    ahead = planned(vision, rank, 0)
    for s in range(4):
        found, begun = [], threading.Event()

        def plan():
            begun.set()
            try:
                found.append(planned(vision, rank, s + 1))
            except Exception as why:
                found.append(why)
        thread = threading.Thread(target=plan)
        if rank == 0:
            thread.start(), begun.wait()
        hidden = vision(images_of(rank, s)[0], plan=ahead, into=torch.zeros(1, 8, H, dtype=DTYPE))
        hidden.sum().backward()
        if rank == 1:
            thread.start()
        thread.join()
        assert not isinstance(found[0], Exception), found[0]
        for r in range(2):
            pixels, _, pos = images_of(r, s)
            if pos:
                assert torch.allclose(hidden[0, pos[0]:pos[0] + len(pixels)], tower(pixels))
        ahead = found[0]


@pytest.mark.parametrize('comm', ('shared', 'own'))
def test_plans_are_made_on_another_thread(pair, comm):
    pair.run(beside, None, comm, made(Tower, 1))


@pytest.mark.parametrize('comm', ('shared', 'own'))
def test_ranks_of_threads_plan_on_other_threads(comm):
    tower = made(Tower, 1)  # not in the ranks, which share PyTorch's generator
    cb.run_threads(2, lambda world: beside(world.rank, world, comm, copy.deepcopy(tower)))


def of_processes(rank, tower):
    """The encoder of a Comm connects where it is made: a plan, on a thread, touches nothing that the main one calls."""
    def gather(mine):
        met = [None, None]
        dist.all_gather_object(met, mine)
        return met
    group, found = cb.Comm.from_all_gather(rank, 2, gather), []
    vision = encoder(tower, group, 'tp=2')
    before = group.stats()
    thread = threading.Thread(target=lambda: found.append(planned(vision, rank, 0)))
    thread.start(), thread.join()
    assert group.stats() == before
    hidden = vision(images_of(rank, 0)[0], plan=found[0], into=torch.zeros(1, 8, H, dtype=DTYPE))
    assert torch.allclose(hidden[0, 4:6], tower(torch.ones(2, PATCH, dtype=DTYPE)))
    vision.destroy(), group.destroy()


def test_an_encoder_of_a_communicator_connects_where_it_is_made(pair):
    pair.run(of_processes, made(Tower, 1))


def two(rank, group, tower):
    """Two encoders are at work at once, on two threads, and both plan, in other orders on the two ranks."""
    towers = [encoder(copy.deepcopy(tower), group, 'tp=2', comm='own') for _ in range(2)]
    failed = []

    def work(vision):
        try:
            for s in range(3) if vision is towers[0] else range(3, 6):  # images of other sizes
                plan = planned(vision, rank, s)
                vision(images_of(rank, s)[0], plan=plan, into=torch.zeros(1, 8, H, dtype=DTYPE)).sum().backward()
        except Exception as why:
            failed.append(why)
    threads = [threading.Thread(target=work, args=(vision,)) for vision in towers]
    first = threads[rank]
    first.start()
    if rank == 0:  # it cannot end before rank 1 begins with the other one
        first.join(.2)
    threads[1 - rank].start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    own = [comm for vision in towers for comm in (vision._comm(), vision._at().comm(torch.device('cpu')))]
    shared = ct.comm_of(group or dist.group.WORLD, torch.device('cpu'))
    assert len({id(comm) for comm in (*own, shared)}) == 5
    for vision in towers:
        vision.destroy(), vision.destroy()
    assert not any(comm._handle for comm in own) and shared._handle


def test_two_towers_of_their_own_work_at_once(pair):
    pair.run(two, None, made(Tower, 1))


def test_two_towers_of_their_own_of_threads_work_at_once():
    tower = made(Tower, 1)  # not in the ranks, which share PyTorch's generator
    cb.run_threads(2, lambda world: two(world.rank, world, tower))


def failing(rank):
    """Bad input of one rank's plan is an error of plan() on all, and calls go on."""
    vision = encoder(made(Tower, 1), None, 'tp=2')
    planned(vision, rank, 0)
    before = ct.comm_of(dist.group.WORLD, torch.device('cpu'))
    meet()
    with pytest.raises((ValueError, RuntimeError), match='pixels is None'):
        vision.plan(None, [[1, 1, 1]] if rank else None, seq=[0] * rank, pos=[0] * rank, packing=[0, 8])
    assert ct.comm_of(dist.group.WORLD, torch.device('cpu')) is before and not before.told[0]
    plan = planned(vision, rank, 1)
    vision(images_of(rank, 1)[0], plan=plan, into=torch.zeros(1, 8, H, dtype=DTYPE)).sum().backward()


def test_an_error_of_a_plan_is_every_ranks_and_ends_no_call(pair):
    pair.run(failing)
