# SPDX-License-Identifier: Apache-2.0
"""docs/guides/audio.md: towers of one's own, of clips of any length and of Whisper's, against one process that encodes all clips
and writes them into the whole text."""
import types

import pytest

torch = pytest.importorskip('torch')

import torch.distributed as dist  # noqa: E402

from test_pages import run  # noqa: E402

H = 6
CUT = [[0, 1, 6, 7], [2, 3, 4, 5]]  # eighths of a sequence on each context rank


class Tower(torch.nn.Module):
    """A row of each four frames, the last ones fewer, which sees the whole clip."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layer, self.mix = torch.nn.Linear(80, H), torch.nn.Linear(H, H)

    def forward(self, clip):
        x = torch.stack([self.layer(piece).mean(0) for piece in clip.split(4)])
        return torch.tanh(x + self.mix(x.mean(0, keepdim=True)))


def compared(rank, page, tower, whole, text, weight, given, places, rows):
    """A step by the page's lines: loss and gradients of the whole."""
    eighth = text.shape[1] // 8
    index = torch.tensor([k * eighth + i for k in (CUT[0][:2] + CUT[0][2:] if rank < 2 else CUT[1]) for i in range(eighth)])
    names = run(page, **given, embeddings=text[:, index].clone())
    loss = (torch.tanh(names['hidden']) * weight[:, index]).sum()
    loss.backward()
    total = (torch.tanh(text.flatten(0, 1).index_copy(0, torch.tensor(places), rows)) * weight.flatten(0, 1)).sum()
    total.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    off = [abs(float(loss / 2 - total.detach())) / max(1.0, abs(float(total.detach())))]  # each position is on two tp ranks
    for p, want in zip(tower.parameters(), whole.parameters()):
        g = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(g)
        if not want.requires_grad:  # Whisper's positions
            continue
        size = float(want.grad.abs().max())
        off.append(float((g - want.grad).abs().max()) / (size if size > 1e-9 else 1.0))
    return max(off), names['audio'].stats()


def clips(rank):
    """Six clips of two ranks; the others' loaders have none."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        lengths, owner, seq, pos = [9, 4, 30, 1, 17, 6], [0, 0, 0, 2, 2, 2], [0, 0, 1, 1, 0, 1], [1, 5, 2, 12, 9, 20]
        all_clips = [torch.randn(n, 80) for n in lengths]
        text, weight = torch.randn(2, 2, 32, H)
        mine = [e for e in range(6) if owner[e] == rank]
        given = dict(frames=torch.cat([all_clips[e] for e in mine]) if mine else None, durations=[[lengths[e]] for e in mine] or None,
                     seq=[seq[e] for e in mine], pos=[pos[e] for e in mine] or None)
        tower, whole = Tower(), Tower()
        places = [32 * q + p + r for n, q, p in zip(lengths, seq, pos) for r in range(-(-n // 4))]
        off, stats = compared(rank, 'guides/audio.md', tower, whole, text, weight, dict(given, tower=tower), places,
                              torch.cat([whole(clip) for clip in all_clips]))
        work = [n * (n + 3072) for n in lengths]
        assert sum(stats['images']) == 6 and min(stats['images']) > 0 and sum(stats['cost']) == sum(work)
        assert max(stats['cost']) == max(work)  # the longest one alone
        return off
    finally:
        torch.set_default_dtype(torch.float32)


def test_clips_of_any_length_have_the_gradients_of_one_process(world):
    assert max(world.run(clips)) < 1e-12


def whisper(rank):
    from transformers.models.whisper import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(WhisperEncoder(WhisperConfig(d_model=H, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=8, dropout=0.0,
                                                 num_mel_bins=80)).double())
    torch.manual_seed(4)
    mel = torch.randn(2, 80, 3000, dtype=torch.float64)
    text, weight = torch.randn(2, 1, 4000, H, dtype=torch.float64)
    given = dict(mel=mel, seq=[0, 0], pos=[7, 2000]) if rank == 3 else dict(mel=None, seq=[], pos=None)
    torch.set_default_dtype(torch.float64)
    try:
        off, stats = compared(rank, 'guides/audio.md#Whisper: clips of one size', made[0], made[1], text, weight,
                              dict(given, whisper=types.SimpleNamespace(encoder=made[0])), [*range(7, 1507), *range(2000, 3500)],
                              made[1](mel).last_hidden_state.flatten(0, 1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert sorted(stats['images']) == [0, 0, 1, 1]
    return off


def test_whispers_encoder_has_the_gradients_of_one_process(world):
    pytest.importorskip('transformers.models.whisper', reason='no transformers with Whisper')
    assert max(world.run(whisper)) < 1e-9
