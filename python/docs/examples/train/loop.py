"""What training does whatever the framework: steps, a progress bar, checkpoints, a plot."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import checkpoint
import data
import matplotlib
from checkpoint import Origin, State
from config import Config, Setup
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from speed import speed

BETAS = (0.9, 0.95)  # of AdamW
MAX_NORM = 1.0  # of all gradients together
WARMUP = 20  # steps in which the learning rate grows


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
    peak_tflops: float | None  # of the device; None: not known


class Interrupts:
    """SIGINT and SIGTERM end a run behind the step that they come in. A second one ends it at once,
    so that the last checkpoint counts."""

    def __enter__(self) -> Interrupts:
        self.number = 0  # of the signal that came
        signals = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self._note) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self.__exit__()


def plot(file: Path, losses: list[float], title: str) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot  # after the choice of its backend

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


@dataclass
class Run:
    """What changes in training, and the file that keeps it."""

    trainer: Trainer
    losses: list[float]  # of all steps so far
    origin: Origin
    file: Path

    def save(self) -> None:
        checkpoint.save(self.file, self.trainer.state(), self.losses, self.origin)


def begin(setup: Setup, plan: Plan, make: Callable[[Setup], Trainer]) -> tuple[Run, data.Tokens]:
    """From the folder's checkpoint if there is one; with the tokens of the text."""
    config, file = setup.config, plan.folder / "checkpoint.safetensors"
    plan.folder.mkdir(parents=True, exist_ok=True)
    if file.exists():
        checkpoint.check(file, framework=setup.framework, model=setup.model, seqlen=config.seqlen)
    tokenizer, tokens = data.load(plan.folder, config.vocab_size)
    if len(tokens) <= config.seqlen:
        raise SystemExit(f"--seqlen {config.seqlen}: the text has {len(tokens)} tokens")
    origin = Origin(setup.framework, setup.model, config.seqlen, data.digest(tokenizer))
    if file.exists():
        checkpoint.check(file, vocabulary=origin.vocabulary)
    run = Run(make(setup), [], origin, file)
    if file.exists():
        state, run.losses = checkpoint.load(file)
        run.trainer.restore(state)
    return run, tokens


def learn(run: Run, tokens: data.Tokens, config: Config, plan: Plan) -> int:
    """Until `plan.steps` are done, or a signal comes: its number, or 0."""
    losses, first = run.losses, len(run.losses)
    started = time.perf_counter()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Interrupts() as interrupts, Progress(*columns, TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=plan.steps, completed=first)
        while len(losses) < plan.steps and not interrupts.number:
            step = len(losses)
            pieces = data.batch(tokens, step, plan.seed, plan.batch_size, config.seqlen)
            losses.append(run.trainer.step(pieces, plan.lr * min(1, (step + 1) / WARMUP)))
            progress.update(bar, advance=1, description=f"loss {losses[-1]:.3f}")
            if step == first:
                started = time.perf_counter()  # what is compiled once does not count
            if len(losses) % plan.save_every == 0:
                begun = time.perf_counter()
                run.save()
                started += time.perf_counter() - begun  # nor does a save
        seconds = time.perf_counter() - started
        if len(losses) > first and len(losses) % plan.save_every:
            run.save()
    if (steps := len(losses) - first - 1) > 0:
        step_of = (plan.batch_size, seconds / steps)
        print(speed(config, run.trainer.parameters, step_of, plan.peak_tflops))
    return interrupts.number


def train(setup: Setup, plan: Plan, make: Callable[[Setup], Trainer]) -> list[float]:
    """Each step's loss, of all `plan.steps`. A signal ends the program with a shell's status."""
    run, tokens = begin(setup, plan, make)
    signalled = learn(run, tokens, setup.config, plan)
    if signalled:
        print(f"interrupted after {len(run.losses)} steps; the same command goes on from there")
        raise SystemExit(128 + signalled)
    picture = plan.folder / "loss.png"
    title = f"GPT {setup.model}, {setup.framework}, attention: {setup.attention}"
    plot(picture, run.losses, title)
    print(f"loss {run.losses[-1]:.3f} after {len(run.losses)} steps; {run.file}, {picture}")
    return run.losses
