"""Trains a GPT in PyTorch or JAX, with an attention that one chooses (README.md says more)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import choices
from config import CONFIGS
from speed import peak_tflops


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    choices.add_to(parser)
    parser.add_argument("--model", choices=CONFIGS, default="tiny")
    parser.add_argument("--attention", choices=choices.ATTENTION, default="anyflash")
    number = {"type": choices.positive}
    parser.add_argument("--seqlen", **number, help="tokens of a sequence; default: the model's")
    parser.add_argument("--steps", **number, default=300, help="in all, with a checkpoint's")
    parser.add_argument("--batch-size", **number, default=8, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's, after 20 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", **number, default=100, metavar="STEPS")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="for all that is written")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="the device's, for model FLOPs utilization; default: an A100's, H100's or H200's",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; returns each step's loss."""
    options = parse(arguments)
    gpt = choices.framework_module(options.framework, options.attention, options.device)
    import loop  # behind what says which packages are missing

    setup = choices.setup_of(
        options, options.model, options.attention, options.seqlen, options.seed
    )
    known = peak_tflops(gpt.gpu()) if options.device == "cuda" else None
    plan = loop.Plan(
        steps=options.steps,
        batch_size=options.batch_size,
        lr=options.lr,
        seed=options.seed,
        save_every=options.save_every,
        folder=options.folder,
        peak_tflops=options.peak_tflops or known,
    )
    return loop.train(setup, plan, gpt.Trainer)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
