"""A small transformer in training: on four ranks, by FSDP2 and tensor parallelism, as on one; and
attention of DTensors that are sharded on two axes of a mesh.

python -m calls.parallel_training FOLDER RANK 4
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from anyflash.torch import attention
from calls.dtensor_cases import compare, tensors
from run import ranks

WIDTH, HEADS, HEADS_K, STEPS = 32, 4, 2, 4


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head_dim = WIDTH // HEADS
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.q = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = torch.nn.Linear(WIDTH, HEADS_K * head_dim, bias=False)
        self.v = torch.nn.Linear(WIDTH, HEADS_K * head_dim, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.kinds: set[str] = set()  # of the tensors that attention was given

    def attend(self, x: Any) -> Any:
        x = self.norm(x)
        q = self.q(x).unflatten(-1, (HEADS, -1))
        k, v = (f(x).unflatten(-1, (HEADS_K, -1)) for f in (self.k, self.v))
        self.kinds.add(type(q).__name__)
        return self.out(attention(q, k, v, causal=True).flatten(2))

    def forward(self, x: Any) -> Any:
        x = x + checkpoint(self.attend, x, use_reentrant=False)
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 11)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def distribute(model: Model, mesh: Any) -> Model:
    """Attention is given DTensors, sharded on the heads, by no code of ours."""
    plan = {
        **{name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v")},
        "out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train(model: Any, part: int, parts: int) -> list[float]:
    """The losses of steps with a part of the batch, which are the mean of all parts'."""
    tokens = torch.randint(11, (4, 17), generator=torch.Generator().manual_seed(1))
    tokens = tokens.chunk(parts)[part]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    _, world_size = ranks.begin()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    for placements in ([Shard(0), Shard(2)], [Shard(2), Shard(0)], [Replicate(), Shard(2)]):
        compare(tensors(), mesh, placements, causal=True)
    sharded = distribute(model(), mesh)
    losses = torch.tensor(train(sharded, mesh["dp"].get_local_rank(), 2))
    dist.all_reduce(losses)  # ranks of tensor parallelism have the same
    kinds = sorted(set().union(*(layer.kinds for layer in sharded.layers)))
    ranks.finish({"losses": (losses / world_size).tolist(), "kinds": kinds})


if __name__ == "__main__":
    main()
