"""Heads divided among the processes of a mesh by DTensor: one import, and the call stays as it is.

With one process, as here, nothing is divided. On several GPUs: torchrun --nproc-per-node 4 examples/dtensor_heads.py
"""

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import multiattn
import multiattn.integrations.dtensor

device = "cuda" if torch.cuda.is_available() else "cpu"
ranks = int(os.environ.get("WORLD_SIZE", 1))  # as torchrun says
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if "WORLD_SIZE" not in os.environ:
    store, kind = torch.distributed.HashStore(), "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(kind, store=store, rank=0, world_size=1)
mesh = init_device_mesh(device, (ranks,))

torch.manual_seed(0)  # the same tensors everywhere, of which each process keeps its heads
BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4 * ranks, 64, 32
whole = [torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3)]
q, k, v = (distribute_tensor(it, mesh, [Shard(1)]).requires_grad_() for it in whole)

out = multiattn.fmha(q, k, v, causal=True)
out.float().square().sum().backward()
print(f"rank {mesh.get_rank()}: {out.to_local().shape[1]} of {HEADS} heads, placed {out.placements}")
assert out.placements == q.grad.placements == (Shard(1),)

gathered = out.detach().redistribute(mesh, [Replicate()]).to_local()
torch.testing.assert_close(gathered, multiattn.fmha(*whole, causal=True), atol=0.02, rtol=0.02)
torch.distributed.destroy_process_group()
