"""Trains a GPT in PyTorch or JAX, with an attention that one chooses (README.md says more)."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import loop
from config import CONFIGS


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--model", choices=CONFIGS, default="tiny")
    parser.add_argument(
        "--attention", choices=("anyflash", "flash", "cudnn", "standard"), default="anyflash"
    )
    parser.add_argument("--steps", type=int, default=300, help="in all, with a checkpoint's")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's, after 20 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--compile", action="store_true", help="torch.compile; JAX always compiles")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="for all that is written")
    parser.add_argument(
        "--peak-tflops", type=float, default=0, help="the device's, for model FLOPs utilization"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; returns each step's loss."""
    options = parse(arguments)
    gpt = importlib.import_module(f"gpt_{options.framework}")
    if options.attention not in gpt.ATTENTION:
        raise SystemExit(
            f"--attention {options.attention}: in {options.framework} there is "
            f"{', '.join(gpt.ATTENTION)}"
        )
    setup = loop.Setup(
        config=CONFIGS[options.model],
        attention=options.attention,
        seed=options.seed,
        device=options.device,
        recompute=options.recompute,
        compiled=options.compile,
    )
    plan = loop.Plan(
        steps=options.steps,
        batch_size=options.batch_size,
        lr=options.lr,
        seed=options.seed,
        save_every=options.save_every,
        folder=options.folder,
        peak_tflops=options.peak_tflops,
    )
    title = f"GPT {options.model}, {options.framework}, attention: {options.attention}"
    return loop.run(setup.config, plan, gpt.Trainer(setup), title)


if __name__ == "__main__":
    main()
