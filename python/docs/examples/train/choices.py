"""What the command lines here let one choose, and what is said where a choice cannot be."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from typing import Any

from config import CONFIGS, Setup

FRAMEWORKS = ("torch", "jax")
ATTENTION = ("anyflash", "flash", "cudnn", "standard")
PACKAGES = ("tokenizers", "safetensors", "rich", "matplotlib")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def add_to(parser: argparse.ArgumentParser) -> None:
    """The options that all of them have."""
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--compile", action="store_true", help="torch.compile; JAX always compiles")


def missing(error: ModuleNotFoundError, framework: str) -> SystemExit:
    """Says how to install what is missing."""
    name = str(error.name).partition(".")[0]
    packages = "." if name == "anyflash" else " ".join((*PACKAGES, framework))
    return SystemExit(
        f"the package {name} is missing; in the repository's root run: pip install {packages}"
    )


def framework_module(framework: str, attention: str, device: str) -> Any:
    """gpt_torch or gpt_jax; ends the program where it cannot do what was chosen."""
    try:
        gpt = importlib.import_module(f"gpt_{framework}")
    except ModuleNotFoundError as error:
        raise missing(error, framework) from None
    if attention not in gpt.ATTENTION:
        there = ", ".join(gpt.ATTENTION)
        raise SystemExit(f"--attention {attention}: in {framework} there is {there}")
    if attention == "cudnn" and device == "cpu":
        raise SystemExit("--attention cudnn needs a GPU; add --device cuda, or choose another")
    if device == "cuda" and gpt.gpu() is None:
        raise SystemExit(
            f"--device cuda: {framework} finds no GPU; leave the option out, or install a "
            f"{framework} with CUDA"
        )
    return gpt


def setup_of(
    options: argparse.Namespace, model: str, attention: str, seqlen: int | None, seed: int
) -> Setup:
    """By the options that all have; without `seqlen`, that of the model."""
    config = CONFIGS[model]
    return Setup(
        framework=options.framework,
        model=model,
        config=dataclasses.replace(config, seqlen=seqlen or config.seqlen),
        attention=attention,
        seed=seed,
        device=options.device,
        recompute=options.recompute,
        compiled=options.compile,
    )
