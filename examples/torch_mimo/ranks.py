# SPDX-License-Identifier: Apache-2.0
"""Ranks of the two grids, their process groups, and the collectives that autograd runs backward."""
import torch
import torch.distributed as dist

import colobridge as cb


class Side:
    """One of the two layouts: this rank's coordinates, and its groups by dims ("tp", "dp", "cp-dp")."""

    def __init__(self, spec):
        self.grid = cb.Grid(spec)
        self.spec, self.kept = spec, {}
        self.at = self.grid.coords(dist.get_rank())

    def extent(self, dim):
        return self.grid.extent(dim)

    def coord(self, dim):
        return self.at.get(dim, 0)

    def group(self, *dims):
        """This rank's group of @dims; None when it is alone there. Collective the first time."""
        dims = [d for d in dims if self.extent(d) > 1]
        key = '-'.join(dims)
        if key not in self.kept:
            self.kept[key] = None
            if dims:
                for members in self.grid.groups(dims):
                    made = dist.new_group(members.ranks())
                    if dist.get_rank() in members.ranks():
                        self.kept[key] = made
        return self.kept[key]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class _Gather(torch.autograd.Function):
    """[..] -> [ranks, ..]; backward adds what every rank says about this rank's part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g[dist.get_rank(ctx.group)], None


def copy_to(x, group):
    """x as it is; its gradient is summed over the group."""
    return x if group is None else _Copy.apply(x, group)


def reduce_from(x, group):
    """The sum of x over the group; the gradient goes to every rank as it is."""
    return x if group is None else _Reduce.apply(x, group)


def gather_from(x, group):
    """[ranks, ...] of every rank's x."""
    return x.unsqueeze(0) if group is None else _Gather.apply(x, group)
