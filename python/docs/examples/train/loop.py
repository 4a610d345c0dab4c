"""What training does whatever the framework: steps, a progress bar, checkpoints, a plot."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import data
import matplotlib
import numpy as np
import numpy.typing as npt
from config import Config, flops_per_token
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.numpy import save_file

BETAS = (0.9, 0.95)  # of AdamW
MAX_NORM = 1.0  # of all gradients together
WARMUP = 20  # steps in which the learning rate grows

State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Setup:
    """What a model is made of."""

    config: Config
    attention: str  # a name of the framework's
    seed: int
    device: str  # cpu or cuda
    recompute: bool  # activations, in the backward pass
    compiled: bool


class Trainer(Protocol):
    """A model and its AdamW on one device; on a GPU products are made in bfloat16."""

    parameters: int

    def step(self, batch: data.Tokens, lr: float) -> float:
        """Learns from tokens of shape (batch, seqlen + 1), and returns the loss before."""

    def state(self) -> State:
        """All that another step depends on."""

    def restore(self, state: State) -> None:
        """Goes on from what state() gave."""


@dataclass(frozen=True)
class Plan:
    steps: int  # in all, with those that a checkpoint has
    batch_size: int
    lr: float
    seed: int
    save_every: int
    folder: Path
    peak_tflops: float  # of the device; 0: not known


def save(file: Path, trainer: Trainer, losses: list[float]) -> None:
    """Writes beside `file`, then puts it in its place: an interrupt spoils neither."""
    beside = file.with_suffix(".part")
    state = {name: np.ascontiguousarray(x) for name, x in trainer.state().items()}
    save_file(state, beside, metadata={"losses": json.dumps(losses)})
    beside.replace(file)


def load(file: Path, trainer: Trainer) -> list[float]:
    """Restores what save() wrote; returns the losses of the steps that were done."""
    with safe_open(file, framework="np") as saved:
        trainer.restore({name: saved.get_tensor(name) for name in saved.keys()})  # noqa: SIM118
        losses: list[float] = json.loads(saved.metadata()["losses"])
    return losses


def plot(file: Path, losses: list[float], title: str) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot  # after the choice of its backend

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def report(config: Config, plan: Plan, trainer: Trainer, steps: int, seconds: float) -> None:
    """Speed, by the wall clock, of steps that were done in so many seconds."""
    rate = steps * plan.batch_size * config.seqlen / seconds
    tflops = rate * flops_per_token(config, trainer.parameters) / 1e12
    share = f", {tflops / plan.peak_tflops:.1%} MFU" if plan.peak_tflops else ""
    print(f"{rate:,.0f} tokens/s, {tflops:.3g} TFLOP/s{share}")


def run(config: Config, plan: Plan, trainer: Trainer, title: str) -> list[float]:
    """Trains until `plan.steps` are done, from a checkpoint if there is one; each step's loss."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    _, tokens = data.load(plan.folder, config.vocab_size)
    file = plan.folder / "checkpoint.safetensors"
    losses = load(file, trainer) if file.exists() else []
    first = len(losses)
    started = time.perf_counter()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=plan.steps, completed=first)
        try:
            for step in range(first, plan.steps):
                pieces = data.batch(tokens, step, plan.seed, plan.batch_size, config.seqlen)
                losses.append(trainer.step(pieces, plan.lr * min(1, (step + 1) / WARMUP)))
                progress.update(bar, advance=1, description=f"loss {losses[-1]:.3f}")
                if step == first:
                    started = time.perf_counter()  # what is compiled once does not count
                if len(losses) % plan.save_every == 0:
                    save(file, trainer, losses)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from the last checkpoint")
            return losses
    if len(losses) > first:
        save(file, trainer, losses)
        plot(plan.folder / "loss.png", losses, title)
    if len(losses) > first + 1:
        report(config, plan, trainer, len(losses) - first - 1, time.perf_counter() - started)
    print(f"loss {losses[-1]:.3f} after {len(losses)} steps; {file}, {plan.folder / 'loss.png'}")
    return losses
