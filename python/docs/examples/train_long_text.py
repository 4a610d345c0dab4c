"""Trains a small decoder on a text that is longer than one rank holds: FSDP2 shares the weights,
and context parallelism the rows of the text.

    torchrun --standalone --nproc-per-node 2 train_long_text.py

On GPUs with NCCL, else on the CPU with gloo. The text is made: words that come again after a long
while, so that only attention to what lies far behind can foresee them.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

from anyflash.torch.distributed import ContextParallel

VOCABULARY, WIDTH, HEADS, HEADS_K, LAYERS = 64, 64, 4, 2, 2


def text(length: int) -> Tensor:
    """(1, length + 1): a text of random letters, and then the same again."""
    half = torch.randint(VOCABULARY, (length // 2 + 1,), generator=torch.Generator().manual_seed(0))
    return torch.cat([half, half])[None, : length + 1]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864) of (batch, rows, heads, head_dim)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    def __init__(self, cp: ContextParallel, length: int) -> None:
        super().__init__()
        self.cp, self.length = cp, length
        columns = WIDTH // HEADS
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * columns, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (HEADS + 2 * HEADS_K, -1))
        q, k, v = heads.split([HEADS, HEADS_K, HEADS_K], 2)
        q, k = rotate(q, positions), rotate(k, positions)
        out = self.cp.attention(q, k, v, causal=True, seqlen=self.length)
        return self.out(out.flatten(2))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + checkpoint(self.attend, x, positions, use_reentrant=False)
        return x + self.down(gelu(self.up(self.norm_mlp(x))))


class Decoder(nn.Module):
    def __init__(self, cp: ContextParallel, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(cp, length) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small decoder on a long text.")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--method", default="ring")
    given = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh["cp"], method=given.method)

    torch.manual_seed(0)
    model = Decoder(cp, given.length).to(device, torch.bfloat16 if on_gpu else torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    whole = text(given.length).to(device)
    # Labels are shifted before they are shared: a rank's last row is followed by another rank's.
    tokens, labels = cp.shard(whole[:, :-1]), cp.shard(whole[:, 1:])
    positions = cp.positions(given.length, device)
    for step in range(given.steps):
        optimizer.zero_grad()
        logits = model(tokens, positions).float()
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # FSDP2 takes the mean over ranks, of which each has a part of the sum.
        (total * (dist.get_world_size() / given.length)).backward()
        optimizer.step()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item() / given.length:.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if not on_gpu:
        # Gloo's threads may hold tensors yet. To drop one while the interpreter ends aborts the
        # process (github.com/pytorch/pytorch/issues/190489), so it ends without that.
        os._exit(0)


if __name__ == "__main__":
    main()
