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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "train"))  # its modules are not a package

import about
import choices

try:
    import checkpoint
    import data
    import gpt_torch
    import numpy as np
    import others
    import serve
    from engine import Engine, Request
    from guesses import Guesses
    from model import PagedGPT, config_of, load
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise choices.missing(error, "torch") from None

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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
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
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=int, metavar="PORT", help="over HTTP, on this machine")
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


def engines(
    options: argparse.Namespace, file: Path, text: data.Tokens
) -> dict[str, Callable[[], Engine]]:
    """What makes them, by what they do; the last one does all that is asked for."""
    gpt = load(file, gpt_torch.ATTENTION["anyflash"], options.device)
    model = PagedGPT(gpt, options.pages, options.page_size)
    guesses = Guesses(text.tolist(), options.guesses) if options.guesses else None

    def maker(sharing: bool, guesses: Guesses | None) -> Callable[[], Engine]:
        return lambda: Engine(model, sharing, guesses, options.batch, options.chunk)

    found = {"paged cache": maker(False, None)}
    if not options.no_sharing:
        found["+ shared pages"] = maker(True, None)
    if guesses:
        found["+ trees of guesses"] = maker(not options.no_sharing, guesses)
    return found


def way_of(make: Callable[[], Engine], arrivals: int) -> Way:
    """So many requests come before each step."""

    def way(requests: list[Request]) -> tuple[int, int]:
        engine, waiting = make(), list(requests)
        while waiting or engine.busy:
            for request in waiting[:arrivals]:
                engine.add(request)
            del waiting[:arrivals]
            engine.step()
        return engine.steps, engine.fed

    return way


def ways(options: argparse.Namespace, file: Path, text: data.Tokens) -> dict[str, Way]:
    makers = engines(options, file, text)
    own = {name: way_of(make, options.arrivals) for name, make in makers.items()}
    if not options.compare:
        return dict([own.popitem()])
    plain = load(file, gpt_torch.ATTENTION["standard"], options.device)
    found: dict[str, Way] = {"plain loop": partial(others.plain, plain)}
    if importlib.util.find_spec("transformers"):
        gpt2 = others.as_gpt2(plain)
        found["Hugging Face"] = partial(others.hugging_face, gpt2, batch=options.batch)
    return found | own


def measured(way: Way, asked: list[Request], repeats: int) -> Result:
    """The fastest run counts."""
    way([Request([1], 2)])  # what is done once does not count
    taken = []
    for _ in range(repeats):
        requests = [Request(request.prompt, request.new) for request in asked]
        started = time.perf_counter()
        passes, fed = way(requests)
        taken.append(time.perf_counter() - started)
    new = sum(request.new for request in requests)
    answers = [request.answer for request in requests]
    return Result(min(taken), new / min(taken), passes, fed, answers)


def table(results: dict[str, Result]) -> Table:
    columns = ("way", "tokens/s", "passes", "tokens given", "as the first")
    shown = Table(*columns, title="The same requests, greedily")
    first = next(iter(results.values())).answers
    for name, result in results.items():
        same = sum(one == other for one, other in zip(result.answers, first, strict=True))
        speed, alike = f"{result.tokens_per_second:,.0f}", f"{same} of {len(first)}"
        shown.add_row(name, speed, f"{result.passes:,}", f"{result.fed:,}", alike)
    return shown


def show(answers: list[dict[str, str]], results: dict[str, Result]) -> None:
    console = Console()
    for pair in answers:
        prompt, answer = (" ".join(pair[part].split()) for part in ("prompt", "answer"))
        console.print(Text.assemble((prompt, "dim"), " ", (answer, "bold"), end="\n\n"))
    console.print(table(results))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    file = options.folder / "checkpoint.safetensors"
    if not file.exists():
        raise SystemExit(f"{file} does not exist; examples/train/train.py writes it")
    choices.framework_module("torch", "anyflash", options.device)  # is there a GPU?
    tokenizer, text = data.load(options.folder, config_of(file).vocab_size)
    checkpoint.check(file, vocabulary=data.digest(tokenizer))
    if options.serve is not None:
        *_, make = engines(options, file, text).values()
        serve.run(serve.Service(make(), tokenizer), options.serve)
        return
    asked = requests_of(options, tokenizer, text)
    try:
        found = ways(options, file, text)
        results = {name: measured(way, asked, options.repeats) for name, way in found.items()}
    except ValueError as error:  # a request that is too long
        raise SystemExit(str(error)) from None
    *_, own = results.values()
    answers = [
        {"prompt": tokenizer.decode(request.prompt), "answer": tokenizer.decode(answer)}
        for request, answer in zip(asked, own.answers, strict=True)
    ]
    if options.json:
        figures = {name: asdict(result) for name, result in results.items()}
        given = sys.argv[1:] if arguments is None else arguments
        facts = about.run(["generate.py", *given]) | about.device(gpt_torch, options.device)
        print(json.dumps({"about": facts, "ways": figures, "answers": answers}))
    else:
        show(answers if options.prompt else answers[:3], results)


if __name__ == "__main__":
    main()
