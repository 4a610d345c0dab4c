"""Continues texts with the GPT of examples/train: continuous batches over a paged KV cache, whose
pages requests share, and a tree of guesses in every step (README.md says more)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "train"))  # its modules are not a package

import data
import others
from config import CONFIGS
from engine import Engine, Request
from gpt_torch import ATTENTION
from guesses import Guesses
from model import PagedGPT, load
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Answers all requests; returns how often the model ran, and how many tokens it was given.
Way = Callable[[list[Request]], tuple[int, int]]
INTRODUCTION = "The Python reference says about this subject, in its own words and with examples:\n"


@dataclass(frozen=True)
class Result:
    """Of one way to generate."""

    seconds: float
    tokens_per_second: float
    passes: int  # of the model
    fed: int  # tokens that the model was given
    answers: list[list[int]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("run"), help="where train.py wrote")
    parser.add_argument("--model", choices=CONFIGS, default="tiny", help="as it was trained")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--requests", type=int, default=16, help="made ones, without --prompt")
    parser.add_argument("--new", type=int, default=40, help="tokens of the longest answer")
    parser.add_argument("--arrivals", type=int, default=2, help="requests that come at every step")
    parser.add_argument("--batch", type=int, default=8, help="requests that run together")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a prompt in a step")
    parser.add_argument("--pages", type=int, default=128, help="of the cache")
    parser.add_argument("--page-size", type=int, default=8, help="tokens, a power of two")
    parser.add_argument("--guesses", type=int, default=8, help="tokens of a tree; 0: none")
    parser.add_argument("--no-sharing", action="store_true", help="of pages")
    parser.add_argument("--compare", action="store_true", help="with other ways to generate")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def requests_of(options: argparse.Namespace, tokenizer: Any, text: data.Tokens) -> list[Request]:
    """Those of --prompt; else pieces of the text behind one introduction, of several lengths."""
    if options.prompt:
        return [Request(tokenizer.encode(prompt).ids, options.new) for prompt in options.prompt]
    rng = np.random.default_rng(0)
    introduction = tokenizer.encode(INTRODUCTION).ids
    requests = []
    for _ in range(options.requests):
        start, size = rng.integers(0, len(text) - 32), rng.integers(4, 32)
        new = int(rng.integers((options.new + 1) // 2, options.new + 1))
        requests.append(Request(introduction + text[start : start + size].tolist(), new))
    return requests


def serve(engine: Engine, requests: list[Request], arrivals: int) -> None:
    """So many requests come before each step, until all are done."""
    waiting = list(requests)
    while waiting or engine.busy:
        for request in waiting[:arrivals]:
            engine.add(request)
        del waiting[:arrivals]
        engine.step()


def ways(options: argparse.Namespace, file: Path, text: data.Tokens) -> dict[str, Way]:
    """The one that was asked for comes last."""

    def loaded(attention: str) -> Any:
        return load(file, CONFIGS[options.model], ATTENTION[attention], options.device)

    def paged(sharing: bool, guesses: Guesses | None) -> Way:
        model = PagedGPT(loaded("anyflash"), options.pages, options.page_size)

        def way(requests: list[Request]) -> tuple[int, int]:
            engine = Engine(model, sharing, guesses, options.batch, options.chunk)
            serve(engine, requests, options.arrivals)
            return engine.steps, engine.fed

        return way

    guesses = Guesses(text.tolist(), options.guesses) if options.guesses else None
    names = ["paged cache"]
    if not options.no_sharing:
        names.append("+ shared pages")
    if guesses:
        names.append("+ trees of guesses")
    found: dict[str, Way] = {}
    if options.compare:
        plain = loaded("standard")
        found["plain loop"] = lambda requests: others.plain(plain, requests)
        if importlib.util.find_spec("transformers"):
            gpt2 = others.as_gpt2(plain)
            found["Hugging Face"] = lambda requests: others.hugging_face(
                gpt2, requests, options.batch
            )
        if len(names) > 1:
            found[names[0]] = paged(False, None)
        if len(names) > 2:
            found[names[1]] = paged(True, None)
    found[names[-1]] = paged(not options.no_sharing, guesses)
    return found


def measured(way: Way, asked: list[Request]) -> Result:
    way([Request([1], 2)])  # what is done once does not count
    requests = [Request(request.prompt, request.new) for request in asked]
    started = time.perf_counter()
    passes, fed = way(requests)
    seconds = time.perf_counter() - started
    new = sum(request.new for request in requests)
    return Result(seconds, new / seconds, passes, fed, [request.answer for request in requests])


def table(results: dict[str, Result]) -> Table:
    columns = ("way", "tokens/s", "passes", "tokens given", "as the first")
    shown = Table(*columns, title="The same requests, greedily")
    first = next(iter(results.values())).answers
    for name, result in results.items():
        same = "yes" if result.answers == first else "no"
        speed = f"{result.tokens_per_second:,.0f}"
        shown.add_row(name, speed, f"{result.passes:,}", f"{result.fed:,}", same)
    return shown


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Generates, prints, and returns what --json prints."""
    options = parse(arguments)
    file = options.folder / "checkpoint.safetensors"
    if not file.exists():
        raise SystemExit(f"{file} does not exist; examples/train/train.py writes it")
    tokenizer, text = data.load(options.folder, CONFIGS[options.model].vocab_size)
    asked = requests_of(options, tokenizer, text)
    try:
        results = {name: measured(way, asked) for name, way in ways(options, file, text).items()}
    except ValueError as error:  # a request that is too long
        raise SystemExit(str(error)) from None
    *_, own = results.values()
    answers = [
        {"prompt": tokenizer.decode(request.prompt), "answer": tokenizer.decode(answer)}
        for request, answer in zip(asked, own.answers, strict=True)
    ]
    document = {"ways": {name: asdict(x) for name, x in results.items()}, "answers": answers}
    console = Console()
    if options.json:
        print(json.dumps(document))
        return document
    for pair in answers[: len(answers) if options.prompt else 3]:
        prompt, answer = (" ".join(pair[part].split()) for part in ("prompt", "answer"))
        console.print(Text.assemble((prompt, "dim"), " ", (answer, "bold"), end="\n\n"))
    console.print(table(results))
    return document


if __name__ == "__main__":
    main()
