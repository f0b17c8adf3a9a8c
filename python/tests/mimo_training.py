# SPDX-License-Identifier: Apache-2.0
"""Trains megatron-core's MIMO model some steps with its own colocated communicator, then with ours.

Each rank runs it, under torchrun, on NCCL where each rank has a GPU, else on gloo:

    torchrun --nproc-per-node 2 python/tests/mimo_training.py [--steps 3] [--plant-factor 2]

The encoder is a TransformerBlock, the language model a GPTModel, both of the local layer specification. Samples
have different numbers of image tokens. Per pair of layouts the losses and the raw gradients of the encoder, before
an optimizer scales them, must have the same bits. --plant-factor multiplies the gradient that our bridge returns:
exit code 1 is right then, although losses after an Adam step hardly differ.
"""
import argparse
import logging
import os
import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist

warnings.simplefilter('ignore')
logging.disable(logging.WARNING)

from megatron.core import __version__, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.fusions import fused_softmax  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.models.mimo.config.base_configs import MimoModelConfig  # noqa: E402
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY  # noqa: E402
from megatron.core.models.mimo.model.base import MimoModel  # noqa: E402
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from colobridge import megatron  # noqa: E402

SAMPLES, SEQ, HIDDEN, VOCABULARY, IMAGE = 8, 24, 32, 64, 63
COUNTS = [6, 10, 4, 12, 1, 15, 8, 8]  # image tokens per sample; each two samples have 16


class Encoder(TransformerBlock):
    """Rows of each sample in turn, as many as its text has image tokens: the bridge cuts whole samples."""

    def forward(self, hidden_states, counts):  # [seq, samples, hidden]
        y = super().forward(hidden_states, attention_mask=None)
        return torch.cat([y[:n, i] for i, n in enumerate(counts)])


def groups(grid):
    """What the modules ask of a grid of tp, cp, pp and dp."""
    made = ProcessGroupCollection()
    for name in ('tp', 'cp', 'pp', 'dp'):
        setattr(made, name, grid.create_pg([name]))
    made.dp_cp = grid.create_pg(['cp', 'dp'])
    made.embd = made.pos_embd = made.ep = made.pp
    return made


def build(src, dst):
    grids = [sys.modules['megatron.core.hyper_comm_grid'].HyperCommGrid([tp, 1, 1, dp], ['tp', 'cp', 'pp', 'dp'])
             for tp, dp in (src, dst)]
    of_images, of_text = map(groups, grids)
    torch.manual_seed(7)
    config = [TransformerConfig(num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, hidden_dropout=0.0,
                                attention_dropout=0.0, use_cpu_initialization=True, tensor_model_parallel_size=tp,
                                masked_softmax_fusion=False) for tp, _ in (src, dst)]
    layer = get_gpt_layer_local_spec()
    encoder = ModuleSpec(module=Encoder, params={'config': config[0], 'spec': layer, 'pg_collection': of_images})
    language = ModuleSpec(module=GPTModel, params={
        'config': config[1], 'transformer_layer_spec': layer, 'vocab_size': VOCABULARY,
        'max_sequence_length': SEQ, 'pg_collection': of_text, 'position_embedding_type': 'learned_absolute'})
    model = MimoModel(MimoModelConfig(
        language_model_spec=language,
        modality_submodules_spec={'images': ModuleSpec(module=VisionModalitySubmodules,
                                                       submodules={'encoders': {'block': encoder}})},
        special_token_ids={'images': IMAGE},
        module_to_grid_map={'images': grids[0], MIMO_LANGUAGE_MODULE_KEY: grids[1]}))
    return model, of_images, of_text


def batch(microbatch, dp, rank, device, text):
    """Samples of a replica, out of a global microbatch: pixels and counts, or tokens and labels."""
    generator = torch.Generator().manual_seed(100 + microbatch)
    pixels = torch.randn(max(COUNTS), SAMPLES, HIDDEN, generator=generator)
    tokens = torch.randint(0, IMAGE, (SAMPLES, SEQ), generator=generator)
    for i, n in enumerate(COUNTS):
        tokens[i, i % 5:i % 5 + n] = IMAGE
    mine = slice(rank * SAMPLES // dp, (rank + 1) * SAMPLES // dp)
    if text:
        tokens = tokens[mine].to(device)
        return tokens, torch.arange(SEQ, device=device).expand_as(tokens), tokens.roll(-1, 1) % IMAGE
    return {'block': {'hidden_states': pixels[:, mine].to(device), 'counts': COUNTS[mine]}}


def train(src, dst, steps, microbatches, device):
    """Losses per step and the encoder's raw gradients per step."""
    model, of_images, of_text = build(src, dst)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for i in range(microbatches):
            number = step * microbatches + i
            tokens, positions, labels = batch(number, dst[1], of_text.dp.rank(), device, True)
            images = batch(number, src[1], of_images.dp.rank(), device, False)
            loss, _ = model(tokens, positions, labels=labels, modality_inputs={'images': images})
            loss = loss.sum() / (SAMPLES * SEQ * microbatches)
            loss.backward()
            total += loss.detach()
        for module, group in ((model.modality_submodules, of_images.dp), (model.language_model, of_text.dp)):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)
        dist.all_reduce(total, group=of_text.dp)
        losses.append(total.cpu())
        gradients.append([p.grad.clone().cpu() for p in model.modality_submodules.parameters()])
        optimizer.step()
    model.destroy()
    return losses, gradients


def layouts(world):
    sizes = [(tp, world // tp) for tp in (1, 2, 4, 8) if world % tp == 0 and world // tp <= SAMPLES // 2 and tp <= 4]
    return [(a, b) for a in sizes for b in sizes]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--steps', type=int, default=3)
    parser.add_argument('--plant-factor', type=float, default=1.0)
    args = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= int(os.environ['LOCAL_WORLD_SIZE'])
    device = torch.device('cuda', int(os.environ['LOCAL_RANK'])) if on_gpus else torch.device('cpu')
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group('nccl' if on_gpus else 'gloo')
    by_enumeration, failed = dist.new_subgroups_by_enumeration, 0
    with mock.patch('torch.distributed.new_subgroups_by_enumeration',  # theirs asks for NCCL also without GPUs
                    lambda lists, backend=None, **more: by_enumeration(lists, **more)):
        if not on_gpus:  # the tracker of random states is CUDA's; there is no dropout
            tensor_parallel.get_cuda_rng_tracker().fork = lambda *a: torch.random.fork_rng(devices=[])
            torch.cuda.current_device = lambda: 'cpu'  # where its attention makes a buffer, and its mask
            fused_softmax.get_default_causal_mask = lambda n: torch.ones(n, n).triu(1).bool()
        else:
            tensor_parallel.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
        parallel_state._set_global_memory_buffer()
        for src, dst in layouts(dist.get_world_size()):
            for microbatches in (1, 4):
                theirs = train(src, dst, args.steps, microbatches, device)
                megatron.install()
                carry = megatron.ColocatedBridgeCommunicator.communicate

                def planted(self, x):
                    y = carry(self, x)
                    y.register_hook(lambda g: g * args.plant_factor)
                    return y
                with mock.patch.object(megatron.ColocatedBridgeCommunicator, 'communicate', planted):
                    ours = train(src, dst, args.steps, microbatches, device)
                megatron.uninstall()
                off = max(float((a - b).abs().max()) for a, b in zip(theirs[0], ours[0]))
                wrong = max(float((a - b).abs().max() / a.abs().max())
                            for x, y in zip(theirs[1], ours[1]) for a, b in zip(x, y))
                worst = torch.tensor([off, wrong], device=device)
                dist.all_reduce(worst, dist.ReduceOp.MAX)
                failed += not worst.max() == 0  # NaN, too
                if dist.get_rank() == 0:
                    print('tp=%d,dp=%d -> tp=%d,dp=%d, %d microbatches: losses %s; loss off by %.1e, '
                          "encoder's gradient by %.1e" % (*src, *dst, microbatches, ' '.join(
                              '%.6f' % loss for loss in ours[0]), *worst.tolist()), flush=True)
    if dist.get_rank() == 0:
        print('megatron-core %s, PyTorch %s, %d ranks on %s: %s' % (
            __version__, torch.__version__, dist.get_world_size(), 'NCCL' if on_gpus else 'gloo',
            'the same bits everywhere' if not failed else '%d comparisons differ' % failed), flush=True)
    dist.destroy_process_group()
    return bool(failed)


if __name__ == '__main__':
    sys.exit(main())
