"""A small transformer in training: on four ranks, by FSDP2 or HSDP, tensor parallelism, activation
checkpointing and torch.compile, as on one; and attention of DTensors on two axes of a mesh.

python -m calls.parallel_training FOLDER RANK 4
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from anyflash.torch import attention
from calls.dtensor_cases import compare, tensors
from run import ranks

WIDTH, HEADS, HEADS_K, STEPS = 32, 4, 2, 20
AXES = ("replicas", "shards", "tp")


class Setting(NamedTuple):
    """How four ranks share the work; a batch is divided among the replicas and their shards."""

    mesh: tuple[int, int, int]  # of AXES
    compiled: bool


SETTINGS = {
    "FSDP2-TP": Setting((1, 2, 2), compiled=False),
    "FSDP2-TP-compiled": Setting((1, 2, 2), compiled=True),
    "HSDP-TP-compiled": Setting((2, 1, 2), compiled=True),
    "HSDP-compiled": Setting((2, 2, 1), compiled=True),
}


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

    def attend(self, x: Any) -> Any:
        x = self.norm(x)
        q = self.q(x).unflatten(-1, (HEADS, -1))
        k, v = (f(x).unflatten(-1, (HEADS_K, -1)) for f in (self.k, self.v))
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
    """In float64, so that nothing but a mistake makes a difference."""
    torch.manual_seed(0)
    return Model().double()


def distribute(model: Model, mesh: Any, setting: Setting) -> Model:
    replicas, _, tp = setting.mesh
    data = mesh["replicas", "shards"] if replicas > 1 else mesh["shards"]
    for layer in model.layers:
        if tp > 1:
            share_heads(layer, mesh["tp"])
        if setting.compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, mesh=data)
    return fully_shard(model, mesh=data)


def share_heads(layer: Layer, mesh: Any) -> None:
    """Attention is given DTensors, sharded on the heads, by no code of ours."""
    plan = {
        **{name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v")},
        "out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    parallelize_module(layer, mesh, plan)
    with torch.no_grad():
        q = layer.q(torch.zeros(1, 1, WIDTH, dtype=torch.float64))
    assert isinstance(q, DTensor), type(q)
    assert q.placements == (Shard(2),), q.placements


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


def train_on_ranks(setting: Setting) -> dict[str, Any]:
    replicas, shards, _ = setting.mesh
    mesh = init_device_mesh("cpu", setting.mesh, mesh_dim_names=AXES)
    sharded = distribute(model(), mesh, setting)
    place = mesh.get_coordinate()
    torch._dynamo.reset()  # else graphs of the setting before would serve
    counters.clear()
    losses = torch.tensor(
        train(sharded, place[0] * shards + place[1], replicas * shards), dtype=torch.float64
    )
    dist.all_reduce(losses)  # ranks of tensor parallelism have the same
    return {
        "losses": (losses / dist.get_world_size()).tolist(),
        "graphs": counters["stats"]["unique_graphs"],
    }


def main() -> None:
    ranks.begin()
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), Shard(2)], [Shard(2), Shard(0)], [Replicate(), Shard(2)]):
        compare(tensors(), mesh, placements, causal=True)
    ranks.finish({name: train_on_ranks(setting) for name, setting in SETTINGS.items()})


if __name__ == "__main__":
    main()
