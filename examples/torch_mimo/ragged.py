# SPDX-License-Identifier: Apache-2.0
"""train.py --ragged: samples with 0 to 3 digits, each cropped to its ink, packed into sequences.

Letters: e images, n_e rows (patches with ink) of an image, q sequences of PACKED samples each, K positions of an
LLM replica. A sample is the rows of its images, a start byte, and its caption: "seven three", or "none".
balance() assigns images to encoder replicas, so that these have as much work as each other.

Packed sequences need a mask by sample, positions that count within a sample, and zigzag by sequence. The
model is that of model.py otherwise.
"""
import torch
import torch.distributed as dist
from torch.nn import functional as F

import colobridge as cb
import colobridge.torch as ct
from exchange import Hidden, Library, Plain
from model import IMAGE_ROWS, PATCH, Block, Encoder, Weights
from train import WORDS, Run

MOST_IMAGES, PACKED = 3, 2
START, PAD = 1, 0  # bytes
LONGEST = MOST_IMAGES * IMAGE_ROWS + 20  # positions of a sample


class Batch:
    """A batch as every rank knows it: tables, and what lies at each position of this rank."""

    def __init__(self, run, samples):
        src, dst = run.src, run.dst
        self.samples, replicas = samples, dst.extent('dp')
        images, rows, seq, pos, home = [], [], [], [], []
        axes = [[] for _ in range(replicas)]  # (byte, place in its sample, sample, target) of each position
        seq_len, seq_dp = [], []
        for s, digits in enumerate(samples):
            d = s * replicas // len(samples)
            if s % PACKED == 0:
                seq_len.append(0), seq_dp.append(d)
            before = 0  # rows of this sample
            for i in digits:
                images.append(i), rows.append(len(run.ink[i])), seq.append(len(seq_len) - 1)
                pos.append(seq_len[-1] + before), home.append(s * src.extent('dp') // len(samples))
                before += rows[-1]
            caption = ' '.join(WORDS[run.digit[i]] for i in digits) or 'none'
            text = [START, *caption.encode()]
            said = [(PAD, k, s, -100) for k in range(before)] + [
                (byte, before + k, s, target) for k, (byte, target) in enumerate(zip(text, text[1:] + [PAD]))]
            axes[d] += said
            seq_len[-1] += len(said)
            if s % PACKED == PACKED - 1:  # the last sample of a sequence pads it
                pad = -seq_len[-1] % (2 * dst.extent('cp'))
                axes[d] += [(PAD, 0, -1, -100)] * pad
                seq_len[-1] += pad
        self.images, self.home, self.rows = images, home, rows
        self.made = cb.balance(rows, src.extent('dp'), current=home)
        self.tables = dict(rows=rows, src=self.made, seq=seq, pos=pos, seq_len=seq_len, seq_dp=seq_dp)
        self.segments = cb.Segments(**self.tables)
        self.order = self.zigzag(dst)  # [C][K / C] the positions of each context rank
        self.mine = self.order[dst.coord('cp')]
        axis = torch.tensor(axes[dst.coord('dp')])
        self.byte, self.place, self.sample, self.target = axis[self.mine].to(run.device).unbind(1)
        there = axis[torch.cat(self.order), 2].to(run.device)
        at = self.mine[:, None] >= torch.cat(self.order)[None]
        # padding sees itself, so that no softmax is over nothing
        self.mask = (self.sample[:, None] == there[None]) & at.to(run.device)
        # this rank's rows: of its replica's images, cut over cp into equal blocks
        own = [(i, k) for i, d in zip(images, self.made) if d == src.coord('dp') for k in run.ink[i]]
        j, m = src.coord('cp'), src.extent('cp')
        own = own[j * len(own) // m:(j + 1) * len(own) // m]
        self.image, self.patch = torch.tensor(own, dtype=torch.int64).reshape(-1, 2).to(run.device).unbind(1)

    def zigzag(self, dst):
        parts, base, ranks = [[] for _ in range(dst.extent('cp'))], 0, dst.extent('cp')
        for length, d in zip(self.tables['seq_len'], self.tables['seq_dp']):
            if d == dst.coord('dp'):
                chunks = torch.arange(base, base + length).chunk(2 * ranks)
                for c in range(ranks):
                    parts[c] += [chunks[c], chunks[2 * ranks - 1 - c]]
                base += length
        return [torch.cat(p) for p in parts]

    def replica_rows(self, where, replicas):
        """Rows of each encoder replica, if image e is made by where[e]."""
        return [sum(n for n, d in zip(self.rows, where) if d == r) for r in range(replicas)]


class RaggedEncoder(Encoder):
    """[n, 4] patches and where each is in its image -> [n, H]; n may be 0"""

    def forward(self, patches, at):
        x = self.embed(patches) + self.place[at]
        return x + self.mlp(F.layer_norm(x, x.shape[-1:], self.norm))


class PackedModel(torch.nn.Module):
    """embed(batch) -> [K / C, H] of the text; forward of it with the images in it -> the same of hidden states"""

    def __init__(self, w, width, heads, layers):
        super().__init__()
        empty = [torch.arange(0)] * w.side.extent('cp')  # positions come with the batch
        self.words, self.place = w(256, width, scale=0.5), w(LONGEST, width, scale=0.5)
        self.blocks = torch.nn.ModuleList([Block(w, width, heads, empty) for _ in range(layers)])
        self.norm, self.head = w.ones(width), w(256, width, cut=0)

    def embed(self, batch):
        return F.embedding(batch.byte, self.words)

    def forward(self, merged, batch):
        x = (merged + self.place[batch.place]).unsqueeze(0)
        for block in self.blocks:
            block.attention.mask = batch.mask
            x = block(x)
        return F.layer_norm(x, x.shape[-1:], self.norm)


class RaggedLibrary(Library):
    """One call: rows go to their positions among the embeddings."""

    def __init__(self, src, dst):
        encoder = cb.Layout.src(src.spec)
        if src.extent('cp') > 1:  # blocks of rows; the usual split is zigzag
            encoder.clear('rows').split('rows', 'cp', context=True)
        self.carry = ct.RaggedBridge(encoder, dst.spec, group=dist.group.WORLD, output='sharded')
        self.tp, self.tokens = dst.group('tp'), dst.group('cp', 'dp')

    def merge(self, x, embedded, batch):
        return self.carry(x, batch.segments, into=embedded)


class RaggedHidden(RaggedLibrary, Hidden):
    """The same, with the loss straight from hidden states."""


class RaggedTowers(RaggedHidden):
    """The encoder on all ranks, image by image: each rank brings the images of its own samples, whichever rank encodes them."""
    vision = None

    def encode(self, run, embedded, batch):
        if self.vision is None:
            self.vision = ct.EncoderParallel(
                run.encoder, group=dist.group.WORLD, llm=run.dst.spec, output='sharded', rows=lambda grid: grid[2],
                run=lambda encoder, x, grid: encoder(x[:, :-1], x[:, -1].long()),
                smallest=(run.patches.new_zeros((1, PATCH + 1)), [[1, 1, 1]]))
        of = [q for q, d in enumerate(batch.tables['seq_dp']) if d == run.dst.coord('dp')]
        mine = [e for e, q in enumerate(batch.tables['seq']) if q in of]
        ink = [(batch.images[e], k) for e in mine for k in run.ink[batch.images[e]]]
        image, patch = torch.tensor(ink, dtype=torch.int64).reshape(-1, 2).to(run.device).unbind(1)
        pixels = torch.cat((run.patches[image, patch], patch.unsqueeze(1).to(run.dtype)), 1)  # and where each is in its image
        lengths = torch.tensor([0] + [batch.tables['seq_len'][q] for q in of]).cumsum(0)
        return self.vision(pixels, [[1, 1, batch.rows[e]] for e in mine], seq=[of.index(batch.tables['seq'][e]) for e in mine],
                           pos=[batch.tables['pos'][e] for e in mine], into=embedded, packing=lengths)


class RaggedPlain(Plain):
    """Rows are padded to the most of any rank, and all are gathered; each rank takes those that it needs."""

    def __init__(self, src, dst):
        super().__init__(src, dst)
        self.makers = [next(r for r in range(dist.get_world_size()) if (at := src.grid.coords(r)).get('dp', 0) == d
                            and at.get('cp', 0) == j)
                       for d in range(src.extent('dp')) for j in range(src.extent('cp'))]

    def merge(self, x, embedded, batch):
        t, m = batch.tables, self.src.extent('cp')
        made = batch.replica_rows(batch.made, self.src.extent('dp'))
        counts = [(j + 1) * n // m - j * n // m for n in made for j in range(m)]
        everything = _Gathered.apply(x, self, counts)  # by replica
        base, at_row, first = 0, {}, [sum(made[:d]) for d in range(len(made))]
        bases = []
        for length, d in zip(t['seq_len'], t['seq_dp']):
            bases.append(base if d == self.dst.coord('dp') else None)
            base += length if d == self.dst.coord('dp') else 0
        for n, d, q, pos in zip(t['rows'], t['src'], t['seq'], t['pos']):
            if bases[q] is not None:
                at_row.update((bases[q] + pos + k, first[d] + k) for k in range(n))
            first[d] += n
        here = [(i, at_row[p]) for i, p in enumerate(batch.mine.tolist()) if p in at_row]
        index, row = torch.tensor(here, dtype=torch.int64, device=x.device).reshape(-1, 2).unbind(1)
        return embedded.index_copy(0, index, everything.index_select(0, row))


class _Gathered(torch.autograd.Function):
    """[rows of this rank, H] -> [rows of all, H]; backward adds what every rank says about every row."""

    @staticmethod
    def forward(ctx, x, plain, counts):
        padded = x.new_zeros((max(counts), x.shape[1]))
        padded[:len(x)] = x
        parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, padded)
        ctx.plain, ctx.rows = plain, len(x)
        ctx.first = sum(counts[:plain.src.coord('dp') * plain.src.extent('cp') + plain.src.coord('cp')])
        return torch.cat([parts[r][:n] for r, n in zip(plain.makers, counts)])

    @staticmethod
    def backward(ctx, g):
        g = g.clone() if ctx.plain.dst.coord('tp') == 0 else torch.zeros_like(g)  # tp ranks say the same
        dist.all_reduce(g)
        return g[ctx.first:ctx.first + ctx.rows], None, None


KINDS = {'library': RaggedLibrary, 'hidden': RaggedHidden, 'towers': RaggedTowers, 'plain': RaggedPlain}


class RaggedRun(Run):
    kinds = KINDS

    def models(self, o):
        self.encoder = RaggedEncoder(Weights(o.seed, self.src, self.dtype, self.device), o.width)
        self.lm = PackedModel(Weights(o.seed + 1, self.dst, self.dtype, self.device), o.width, 4, 2)
        unit = PACKED * self.dst.extent('dp')
        if o.batch % unit:
            raise SystemExit('--batch %d, expected a multiple of %d: %d samples in a sequence, dp=%d'
                             % (o.batch, unit, PACKED, self.dst.extent('dp')))
        # of each image: the patches from the first column and row with ink to the last
        self.ink = []
        for has in (self.patches.cpu().amax(2) > 0.25).reshape(-1, 4, 4):
            r, c = has.any(1).nonzero().flatten(), has.any(0).nonzero().flatten()
            self.ink.append([int(4 * y + x) for y in range(r[0], r[-1] + 1) for x in range(c[0], c[-1] + 1)])
        self.digit = [WORDS.index(bytes(t.tolist()).rstrip(b'\0').decode()) for t in self.text.cpu()]
        self.libraries = [e for e in self.exchanges.values() if isinstance(e, RaggedLibrary)]
        self.seen = []

    def draw(self, among, count):
        """@count samples of 0 to 3 different images."""
        number = torch.randint(MOST_IMAGES + 1, (count,), generator=self.rng).tolist()
        return [among[torch.randperm(len(among), generator=self.rng)[:n]].tolist() for n in number]

    def hidden(self, exchange, samples):
        batch = Batch(self, samples)
        embedded = self.lm.embed(batch)
        if isinstance(exchange, RaggedTowers):
            merged = exchange.encode(self, embedded, batch)
        else:
            x = self.encoder(self.patches[batch.image, batch.patch], batch.patch)
            merged = exchange.merge(x, embedded, batch)
        self.batch = batch
        return self.lm(merged, batch), batch.target.unsqueeze(0)

    def groups(self):
        return (self.encoder, self.src.group('cp', 'dp')), (self.lm, self.dst.group('cp', 'dp'))

    def after_step(self):
        replicas = self.src.extent('dp')
        if self.libraries:  # one communicator serves all of them
            stats = self.libraries[0].carry.comm(self.device).stats()
            self.took = stats.get('bridge', {}).get('exchange', {}).get('recv', 0) / len(self.libraries)
        self.seen.append([self.batch.replica_rows(where, replicas) for where in (self.batch.home, self.batch.made)])

    def accuracy(self):
        samples = self.draw(self.test, self.o.batch)
        with torch.no_grad():
            hidden, targets = self.hidden(next(iter(self.exchanges.values())), samples)
            wrong = (self.best(hidden) != targets) & (targets != -100)
        of = torch.zeros(len(samples) + 1, dtype=torch.int64, device=self.device)
        of.index_add_(0, self.batch.sample % len(of), wrong[0].to(torch.int64))  # padding is the last
        if self.dst.group('cp', 'dp') is not None:
            dist.all_reduce(of, group=self.dst.group('cp', 'dp'))
        return float((of[:-1] == 0).double().mean())

    def table(self):
        """Rows of the encoder replicas and bytes of the ranks, a step."""
        rows = torch.tensor(self.seen, dtype=torch.float64)  # [steps, 2, replicas]
        level = (rows.amax(2) / rows.mean(2)).mean(0)
        out = ['', 'image rows of an encoder replica per step, most / mean',
               '  each image where its sample is  %5.2f' % level[0], '  balanced                        %5.2f' % level[1]]
        if self.libraries:
            took = torch.tensor([self.took / len(self.seen) / 1024], dtype=torch.float64, device=self.device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            width = self.o.width * self.patches.element_size() / 1024
            each = rows[:, 1].amax(1).mean() / self.src.extent('cp')
            others = dist.get_world_size() - 1
            gathered = others * float(each) * width
            summed = 2 * others / (others + 1) * float(rows[:, 1].sum(1).mean()) * width
            out += ['KiB that a rank receives per step, forward and backward',
                    '  library                       %7.1f' % took,
                    '  all-gather and all-reduce     %7.1f' % (gathered + summed)]
        return out
