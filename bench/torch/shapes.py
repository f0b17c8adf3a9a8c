# SPDX-License-Identifier: Apache-2.0
"""What a change of shape costs, on two GPUs: the host's time in the library, and a step through PyTorch.

usage: torchrun --standalone --nproc-per-node 2 bench/torch/shapes.py
"""
import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
import colobridge as cb  # noqa: E402
import colobridge.torch as ct  # noqa: E402

SRC, DST, ROWS, WIDTH = 'dp=2', 'tp=2,dp=1', 1024, 512


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def clock(work):
    begin = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - begin)


def in_the_library(rank, big):
    """Median and largest of 50 shapes after 10: reshape, the first call, the second."""
    comm = ct.Bridge(SRC, DST, group=dist.group.WORLD).comm(big.device)
    memory = cb.Memory.alloc(comm, 16 * ROWS * WIDTH * 2)
    assert memory.is_p2p
    bridge = cb.Bridge(comm, cb.Layout.src(SRC), cb.Layout.dst(DST), (16, ROWS, WIDTH), dtype='bf16', device='cuda',
                       transport='peer')
    stream = torch.cuda.current_stream().cuda_stream
    times = {'reshape': [], 'first call': [], 'second call': []}
    for k in range(60):
        n = 64 + 16 * (7 * k % 50)
        x = big[:, :n]
        y = torch.from_dlpack(memory.array('bf16', (16, n, WIDTH), device=rank).__dlpack__())
        dist.barrier()
        times['reshape'].append(clock(lambda: bridge.reshape((16, n, WIDTH))))
        times['first call'].append(clock(lambda: bridge.forward(x, y, stream)))
        times['second call'].append(clock(lambda: bridge.forward(x, y, stream)))
    torch.cuda.synchronize()
    for name, all_of in times.items():
        some = sorted(all_of[10:])
        say('%-12s %6.0f us, at most %6.0f' % (name, some[len(some) // 2], some[-1]))


def through_pytorch(rank, big):
    """Steps in a row, forward and backward, and memory of the GPU in use."""
    carry = ct.Bridge(SRC, DST, group=dist.group.WORLD)

    def step(n):
        x = big[:, :n].detach().requires_grad_()
        y = carry(x)
        y.backward(y.detach())
    step(ROWS), step(ROWS)
    for name, rows in (('12 lengths in turn', [256 + 64 * (k % 12) for k in range(120)]),
                       ('a new length each', [200 + 4 * k for k in range(120)]), ('one length', [512] * 120)):
        torch.cuda.synchronize(), dist.barrier()
        took = clock(lambda: ([step(n) for n in rows], torch.cuda.synchronize()))
        free, total = torch.cuda.mem_get_info()
        say('%-20s %6.0f us a step, %5.0f MiB in use' % (name, took / len(rows), (total - free) / 2**20))


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    rank = int(os.environ['LOCAL_RANK'])
    torch.cuda.set_device(rank)
    dist.init_process_group('gloo')
    big = torch.ones(8, ROWS, WIDTH, dtype=torch.bfloat16, device='cuda')
    in_the_library(rank, big)
    through_pytorch(rank, big)
    ct.shutdown()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
