# SPDX-License-Identifier: Apache-2.0
"""What a new user writes: a model with an EncoderParallel and a Bridge as submodules, FSDP2 around it, one optimizer, saved and
resumed. test_torch_modules.py runs it, typed.py checks its types."""
from __future__ import annotations

from typing import Literal, TypedDict, cast

import torch
import torch.distributed as dist

import colobridge.torch as ct

H, WORDS, PATCH, SOUND = 8, 13, 6, 5


class Images(TypedDict, total=False):
    """Of this rank, as the data loader has them"""
    pixels: torch.Tensor | None
    grid_thw: list[list[int]]
    seq: list[int]
    pos: list[int]


class Tower(torch.nn.Module):
    """A row of H features of each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(PATCH, H), torch.nn.Linear(H, H)

    def forward(self, pixels: torch.Tensor, grid: torch.Tensor | None = None) -> torch.Tensor:
        return cast(torch.Tensor, self.second(torch.tanh(self.first(pixels))))


def patches(grid: tuple[int, ...]) -> int:
    return grid[0] * grid[1] * grid[2]


def encoder(tower: torch.nn.Module, group: ct.Group | None = None, llm: str = 'cp=2,dp=2',
            comm: Literal['shared', 'own'] = 'shared') -> ct.EncoderParallel:
    return ct.EncoderParallel(tower, group=group or dist.group.WORLD, llm=llm, output='sharded', rows=patches, comm=comm,
                              run=lambda tower, pixels, grid: tower(pixels, grid), smallest=(torch.zeros(1, PATCH), [[1, 1, 1]]))


class Model(torch.nn.Module):
    """Text of cp=2, dp=2, whose images and sound come from encoders that lie on all four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.sound = torch.nn.Embedding(WORDS, H), torch.nn.Linear(SOUND, H)
        self.vision = encoder(Tower())
        self.carry = ct.Bridge('dp=4', 'cp=2,dp=2', group=dist.group.WORLD, output='sharded')
        self.layers = torch.nn.ModuleList([torch.nn.Linear(H, H) for _ in range(2)])
        self.head = torch.nn.Linear(H, WORDS)

    def forward(self, text: torch.Tensor, target: torch.Tensor, sound: torch.Tensor, images: Images) -> torch.Tensor:
        hidden: torch.Tensor = self.words(text) + self.carry(self.sound(sound))
        hidden = self.vision(**images, into=hidden)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return ct.nll(self.head(hidden), target, reduce_group=dist.group.WORLD).loss


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)


def sharded(model: Model, whole_encoder: bool) -> None:
    """FSDP2 around the tower or the encoder, each layer, and the model"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    for module in (*model.layers, model.vision if whole_encoder else model.vision.tower):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> set[str]:
    """Names of what was saved of the model"""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    weights, states = get_state_dict(model, optimizer)
    dcp.save({'model': weights, 'optimizer': states}, checkpoint_id=folder)
    return set(weights)


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    weights, states = get_state_dict(model, optimizer)
    dcp.load({'model': weights, 'optimizer': states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
