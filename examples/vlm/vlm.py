#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small VLM of Hugging Face's (Llava over SigLIP and Llama, random weights) learns to read digits, 1 to 3 images a sample.

usage: torchrun --nproc-per-node 2 examples/vlm/vlm.py [--fsdp] [--steps 200] [--batch 16]

Each step runs on two models with the same weights: one is plain transformers, the other encodes each image on the rank that
has least to do (EncoderParallel) and makes its loss without logits (fuse_lm_head()). Both in DDP, or in FSDP2 with --fsdp.
Losses and gradients are compared; exit status 1: they differ. Needs transformers 5.
"""
import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
if __name__ == '__main__':
    sys.path[:0] = [str(ROOT / 'python')]
import colobridge.torch as ct  # noqa: E402
from colobridge.compat import fuse_lm_head  # noqa: E402

WORDS = '<pad> <end> <image> zero one two three four five six seven eight nine'.split()
PAD, END, IMAGE, ZERO = range(4)
ROWS, MOST = 4, 3  # of an image of 8 x 8 pixels, cut into patches of 4 x 4; images of a sample
LENGTH = MOST * (ROWS + 1) + 1


class Digits:
    """Samples of this rank: the images of 1 to 3 digits, then their names."""

    def __init__(self, seed):
        lines = (ROOT / 'examples/captioner/data/digits.csv').read_text().split()
        rows = torch.tensor([[int(v) for v in line.split(',')] for line in lines])
        self.images, self.labels = rows[:, :64].view(-1, 1, 8, 8) / 16.0, rows[:, 64]
        self.rng = torch.Generator().manual_seed(seed)

    def batch(self, samples):
        """What the models take; of each image also its sample and the position of its first row"""
        ids, pixels, seq, pos = torch.full((samples, LENGTH), PAD), [], [], []
        labels = torch.full_like(ids, -100)
        for i in range(samples):
            drawn = torch.randint(len(self.labels), (int(torch.randint(1, MOST + 1, (), generator=self.rng)),), generator=self.rng)
            text = torch.cat([ZERO + self.labels[drawn], torch.tensor([END])])
            first = ROWS * len(drawn)
            ids[i, :first], ids[i, first:first + len(text)], labels[i, first:first + len(text)] = IMAGE, text, text
            pixels.append(self.images[drawn])
            seq += [i] * len(drawn)
            pos += range(0, first, ROWS)
        return {'input_ids': ids, 'labels': labels, 'pixel_values': torch.cat(pixels)}, {'seq': seq, 'pos': pos}


def llava():
    torch.manual_seed(1)
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(
        vision_config=hf.SiglipVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                            num_channels=1, image_size=8, patch_size=4, vision_use_head=False),
        text_config=hf.LlamaConfig(vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                   num_attention_heads=4, max_position_embeddings=LENGTH, pad_token_id=PAD, eos_token_id=END),
        image_token_id=IMAGE, image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy='full'))


class Ours(torch.nn.Module):
    def __init__(self, group=None, made=None):
        super().__init__()
        self.llava = made or llava()
        fuse_lm_head(self.llava)
        size = dist.get_world_size() if group is None else group.size  # of ranks that are threads: vlm.ipynb
        self.vision = ct.EncoderParallel(  # the tower is what encodes images on one rank, here with the projector behind it
            self.llava.model, group=group or dist.group.WORLD, llm='dp=%d' % size, rows=lambda _grid: ROWS,
            run=lambda model, pixels, _grid: torch.cat(list(model.get_image_features(pixels).pooler_output)),
            smallest=(torch.zeros(1, 1, 8, 8), None))

    def forward(self, input_ids, pixel_values, seq, pos, **labels):
        embedded = self.vision(pixel_values, seq=seq, pos=pos, into=self.llava.get_input_embeddings()(input_ids))
        return self.llava(inputs_embeds=embedded, **labels)


def wrapped(model, fsdp):
    if not fsdp:
        return DistributedDataParallel(model, find_unused_parameters=True)  # SigLIP's last norm is
    from torch.distributed.fsdp import fully_shard
    layers = [m for m in model.modules() if type(m).__name__ in ('SiglipEncoderLayer', 'LlamaDecoderLayer')]
    for module in (*layers, model):
        fully_shard(module)
    return model


def gradients(model):
    return [getattr(p.grad, 'full_tensor', p.grad.clone)() for p in model.parameters() if p.grad is not None]


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument('--fsdp', action='store_true', help='FSDP2 in the place of DDP')
    p.add_argument('--steps', type=int, default=301)
    p.add_argument('--batch', type=int, default=16, help='samples of a rank')
    o = p.parse_args(argv)
    digits, size = Digits(dist.get_rank()), dist.get_world_size()
    models = {'plain': wrapped(llava(), o.fsdp), 'ours': wrapped(Ours(), o.fsdp)}
    plain, ours = ([p for p in model.parameters()] for model in models.values())
    adam, seconds = torch.optim.Adam(ours, lr=1e-3), dict.fromkeys(models, 0.0)
    for step in range(o.steps):
        given, places = digits.batch(o.batch)
        items = (given['labels'][:, 1:] != -100).sum()
        dist.all_reduce(items)  # the labels of all ranks
        losses, grads = {}, {}
        for name, model in models.items():
            model.zero_grad()
            begun = time.perf_counter()
            loss = model(**given, **(places if name == 'ours' else {}), num_items_in_batch=items).loss
            (loss * size).backward()  # DDP and FSDP2 divide by it
            seconds[name] += time.perf_counter() - begun
            losses[name], grads[name] = loss.detach(), gradients(model)
            dist.all_reduce(losses[name])
        largest = max(float(g.abs().max()) for g in grads['plain'])
        worst = max(float((a - b).abs().max()) / largest for a, b in zip(grads['plain'], grads['ours'], strict=True))
        if worst > 1e-5 or abs(losses['ours'] - losses['plain']) > 1e-5:  # f32: sums of some hundred tokens, in other orders
            raise SystemExit('step %d: losses %s, gradients differ by %g' % (step, losses, worst))
        if dist.get_rank() == 0 and step % 25 == 0:
            print('step %3d  plain %.5f  ours %.5f  gradients differ by %.0e' % (step, *losses.values(), worst), flush=True)
        adam.step()
        for mine, theirs in zip(ours, plain, strict=True):  # each step begins with the same weights
            theirs.data.copy_(mine.data)
    given, places = digits.batch(100)
    labels = given.pop('labels')[:, 1:]
    with torch.no_grad():  # without labels there are logits
        right = (models['ours'](**given, **places).logits[:, :-1].argmax(-1) == labels)[labels != -100].float().mean()
    if dist.get_rank() == 0:
        print('%.0f %% of the words are right; forward and backward: plain %.1f s, ours %.1f s' % (100 * right, *seconds.values()))
    return losses


if __name__ == '__main__':
    dist.init_process_group('gloo')
    main()
    dist.destroy_process_group()
