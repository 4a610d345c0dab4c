"""A GPT in PyTorch, its attention a function that one chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from config import INITIAL_STD, Config, Setup, last_std
from data import Tokens
from loop import BETAS, MAX_NORM, State
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import anyflash.torch

# Causal attention of (batch, seqlen, heads, head_dim) tensors.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _torch_attention(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out = nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
        return out.transpose(1, 2)

    return attention


def _anyflash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return anyflash.torch.attention(q, k, v, causal=True)


ATTENTION: dict[str, Attention] = {
    "anyflash": _anyflash_attention,
    "flash": _torch_attention(SDPBackend.FLASH_ATTENTION),
    "cudnn": _torch_attention(SDPBackend.CUDNN_ATTENTION),
    "standard": _torch_attention(SDPBackend.MATH),
}
# The compiler would see attention in standard attention's formula, and put a fused one there.
COMPILE_OPTIONS: dict[str, dict[str, Any]] = {"standard": {"pattern_matcher": False}}
# Of products. Parameters, gradients, AdamW and the residual stream are float32.
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def gpu() -> str | None:
    """Its name; None where there is none that PyTorch can use."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """Of what PyTorch brings with it."""
    cudnn = torch.backends.cudnn.version()
    return {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)} if gpu() else {}


def peak_memory(device: str) -> int | None:
    """In bytes, of tensors on the GPU until now; None on a CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention = attention
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(config.dim),
            nn.Linear(config.dim, 4 * config.dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.dim, config.dim),
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, seqlen, dim)
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(-3)  # (batch, seqlen, heads, head_dim)
        x = x + self.out(self.attention(q, k, v).flatten(-2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Logits of the next token: (batch, seqlen) to (batch, seqlen, vocab_size)."""

    def __init__(self, config: Config, attention: Attention, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.places = nn.Embedding(config.seqlen, config.dim)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            last = name.endswith(("out.weight", "mlp.3.weight"))
            nn.init.normal_(parameter, std=last_std(config) if last else INITIAL_STD)

    def features(self, tokens: Tensor) -> Tensor:
        """What the blocks make of the tokens: (batch, seqlen, dim)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x

    def logits(self, features: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(features), self.tokens.weight)  # tied

    def loss(self, features: Tensor, following: Tensor) -> Tensor:
        """In nats per token, of the tokens that follow: (batch, seqlen)."""
        logits = self.logits(features).flatten(0, 1)
        return nn.functional.cross_entropy(logits, following.flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.features(tokens))


class Trainer:
    """See loop.Trainer."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(setup.seed)
        self.device = torch.device(setup.device)
        if hasattr(torch.backends.cuda, "allow_fp16_bf16_reduction_math_sdp"):
            # Standard attention then keeps its matrices in bfloat16 instead of float32.
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        with self.device:  # a large model takes minutes to be made on a CPU, and to be moved
            self.model = GPT(setup.config, ATTENTION[setup.attention], setup.recompute)
        fused = self.device.type == "cuda"  # without temporary tensors of the model's size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=BETAS, fused=fused)
        self.loss = self.model.loss
        if setup.compiled:
            self._compile(COMPILE_OPTIONS.get(setup.attention))
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def _compile(self, options: dict[str, Any] | None) -> None:
        """Part by part: all blocks are one graph, which is compiled once."""
        for block in self.model.blocks:
            block.compile(options=options)
        self.loss = torch.compile(self.loss, options=options)

    def step(self, batch: Tokens, lr: float) -> float:
        tokens = torch.from_numpy(batch).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()  # first: its memory is needed for the logits
        dtype = DTYPES[self.device.type]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            loss = self.loss(self.model.features(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return loss.item()

    def state(self) -> State:
        tensors = {f"model.{name}": x for name, x in self.model.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": x for name, x in moments.items()}
        return {name: x.numpy(force=True) for name, x in tensors.items()}

    def restore(self, state: State) -> None:
        parameters: dict[str, Tensor] = {}
        moments: dict[int, dict[str, Tensor]] = {}
        for key, x in state.items():
            owner, _, name = key.partition(".")
            if owner == "model":
                parameters[name] = torch.from_numpy(x)
            else:
                index, _, name = name.partition(".")
                moments.setdefault(int(index), {})[name] = torch.from_numpy(x)
        self.model.load_state_dict(parameters)
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
