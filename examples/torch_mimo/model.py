# SPDX-License-Identifier: Apache-2.0
"""The model: a vision encoder in one layout, a causal language model in another, plain PyTorch.

Letters: b samples of a rank, H width, S positions (16 image rows, 6 bytes, padding), V = 256 bytes.
Every weight is drawn whole from one seed and then cut, so a model is the same under all layouts. Linear
layers are cut over tp (first by rows, second by columns); attention's positions are cut over cp, zigzag,
and gathers keys and values.
"""
import torch
from torch import nn
from torch.nn import functional as F

from ranks import copy_to, gather_from, reduce_from

IMAGE_ROWS, PATCH, TEXT, VOCAB = 16, 4, 6, 256
MOST = 32  # positions that the weights know; cp decides how many are used


class Weights:
    """Draws whole matrices, hands out this rank's part."""

    def __init__(self, seed, side, dtype, device):
        self.rng = torch.Generator().manual_seed(seed)
        self.side, self.kind = side, {'dtype': dtype, 'device': device}

    def __call__(self, *shape, cut=None, scale=None):
        whole = torch.randn(*shape, generator=self.rng, dtype=torch.float64)
        whole = whole * (shape[-1] ** -0.5 if scale is None else scale)
        if cut is not None and self.side.extent('tp') > 1:
            whole = whole.chunk(self.side.extent('tp'), dim=cut)[self.side.coord('tp')]
        return nn.Parameter(whole.to(**self.kind).contiguous())

    def ones(self, n):
        return nn.Parameter(torch.ones(n, **self.kind))


class Mlp(nn.Module):
    """w2 gelu(w1 x), w1 cut by rows and w2 by columns: one all-reduce forward, one backward."""

    def __init__(self, w, inside, hidden, out):
        super().__init__()
        self.w1, self.w2 = w(hidden, inside, cut=0), w(out, hidden, cut=1)
        self.tp = w.side.group('tp')

    def forward(self, x):
        return reduce_from(F.linear(F.gelu(F.linear(copy_to(x, self.tp), self.w1)), self.w2), self.tp)


class Encoder(nn.Module):
    """[b, 16, 4] patches of 2 x 2 pixels -> [b, 16, H], the same on all ranks of a tp group"""

    def __init__(self, w, width):
        super().__init__()
        self.place = w(IMAGE_ROWS, width, scale=0.5)
        self.embed, self.mlp = Mlp(w, PATCH, 4 * width, width), Mlp(w, width, 4 * width, width)
        self.norm = w.ones(width)

    def forward(self, patches):
        x = self.embed(patches) + self.place
        return x + self.mlp(F.layer_norm(x, x.shape[-1:], self.norm))


class Attention(nn.Module):
    """Causal attention; heads over tp, positions over cp. Keys and values of all positions meet here."""

    def __init__(self, w, width, heads, positions):
        super().__init__()
        self.qkv = nn.ParameterList([w(width, width, cut=0) for _ in range(3)])
        self.out = w(width, width, cut=1)
        self.tp, self.cp = w.side.group('tp'), w.side.group('cp')
        self.heads = heads // w.side.extent('tp')
        self.size = width // heads
        # [S / C, S] in the order that the gather brings
        mine = positions[w.side.coord('cp')]
        self.mask = mine.unsqueeze(1) >= torch.cat(positions).unsqueeze(0)

    def forward(self, x):
        x = copy_to(x, self.tp)
        q, k, v = (F.linear(x, m).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
                   for m in self.qkv)
        # [C, 2, b, heads, S / C, size] -> [2, b, heads, S, size]
        k, v = gather_from(torch.stack((k, v)), self.cp).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        scores = (q @ k.transpose(-1, -2)) * self.size ** -0.5
        p = scores.masked_fill(~self.mask.to(x.device), float('-inf')).softmax(-1)
        return reduce_from(F.linear((p @ v).transpose(1, 2).flatten(2), self.out), self.tp)


class Block(nn.Module):
    def __init__(self, w, width, heads, positions):
        super().__init__()
        self.n1, self.n2 = w.ones(width), w.ones(width)
        self.attention = Attention(w, width, heads, positions)
        self.mlp = Mlp(w, width, 4 * width, width)

    def forward(self, x):
        x = x + self.attention(F.layer_norm(x, x.shape[-1:], self.n1))
        return x + self.mlp(F.layer_norm(x, x.shape[-1:], self.n2))


class LanguageModel(nn.Module):
    """image [b, 16, H] and bytes [b, 6] -> hidden [b, S / C, H] at this rank's positions"""

    def __init__(self, w, width, heads, layers):
        super().__init__()
        ranks = w.side.extent('cp')
        unit = 2 * ranks
        self.length = -(-(IMAGE_ROWS + TEXT) // unit) * unit
        chunks = torch.arange(self.length).chunk(unit)
        positions = [torch.cat((chunks[c], chunks[unit - 1 - c])) for c in range(ranks)]
        self.mine = positions[w.side.coord('cp')]
        self.words = w(VOCAB, width, scale=0.5)
        self.place = w(MOST, width, scale=0.5)
        self.blocks = nn.ModuleList([Block(w, width, heads, positions) for _ in range(layers)])
        self.norm = w.ones(width)
        self.head = w(VOCAB, width, cut=0)  # [V / tp, H]
        self.tp = w.side.group('tp')

    def merged(self, image, text):
        """[b, S, H]: image rows first"""
        pad = self.length - IMAGE_ROWS - TEXT
        return torch.cat((image, F.embedding(F.pad(text, (0, pad)), self.words)), 1) \
            + self.place[:self.length]

    def targets(self, text):
        """[b, S / C]: the byte that follows, -100 where none of the caption does"""
        whole = text.new_full((text.shape[0], self.length), -100)
        whole[:, IMAGE_ROWS - 1:IMAGE_ROWS - 1 + TEXT] = text
        for i in range(1, TEXT):  # nothing is learned from what comes after the caption's end
            whole[:, IMAGE_ROWS - 1 + i][text[:, i - 1] == 0] = -100
        return whole[:, self.mine.to(text.device)]

    def forward(self, image, text):
        x = self.merged(image, text)[:, self.mine.to(image.device)]
        for block in self.blocks:
            x = block(x)
        return F.layer_norm(x, x.shape[-1:], self.norm)
