"""The example that generates (examples/generate): its answers are those of a plain loop."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copy
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

EXAMPLES = Path(__file__).parents[3] / "python" / "docs" / "examples"
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The modules, whose names are everyday ones: they are forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there is little to do: threads would only wait for each other
    sys.path[:0] = [str(EXAMPLES / name) for name in ("generate", "train")]
    names = ("generate", "engine", "pages", "guesses", "model", "others", "serve", "train")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    torch.set_num_threads(threads)
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(EXAMPLES):
            del sys.modules[name]


@pytest.fixture(scope="module")
def folder(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that was trained for some steps."""
    folder = tmp_path_factory.mktemp("run")
    example.train.main(["--steps=12", "--batch-size=2", f"--folder={folder}"])
    return folder


@pytest.fixture(scope="module")
def restless(example: Any) -> Any:
    """A model whose next token depends on all before: a trained one's answers would hide mistakes.
    `plain` has its answers of a plain loop to `prompts`, which begin alike."""
    config = sys.modules["config"].Config(layers=2, dim=32, heads=2, seqlen=96, vocab_size=50)

    def gpt(attention: str) -> Any:
        torch.manual_seed(0)
        gpt = sys.modules["gpt_torch"]
        made = gpt.GPT(config, gpt.ATTENTION[attention]).eval()
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2:
                owner = name.partition(".")[0]
                parameter.data *= {"blocks": 40, "tokens": 5, "places": 20}[owner]
        return made

    rng = np.random.default_rng(0)
    common = rng.integers(50, size=14).tolist()
    prompts = [common[: 14 - i] + rng.integers(50, size=2 + 3 * i).tolist() for i in range(5)]
    asked = [example.engine.Request(prompt, 20 + 2 * i) for i, prompt in enumerate(prompts)]
    example.others.plain(gpt("standard"), asked)
    for request in asked:
        assert len(set(request.answer)) > 6
    return SimpleNamespace(gpt=gpt, prompts=prompts, plain=[request.answer for request in asked])


def requests(example: Any, restless: Any) -> list[Any]:
    pairs = zip(restless.prompts, restless.plain, strict=True)
    return [example.engine.Request(prompt, len(answer)) for prompt, answer in pairs]


def good_guesses(example: Any, restless: Any, size: int) -> Any:
    """Made of the answers, and of others that are alike: some guesses are right, and often not the
    most probable ones."""
    rng = np.random.default_rng(0)
    text = []
    for prompt, answer in zip(restless.prompts, restless.plain, strict=True):
        whole = np.array(prompt + answer)
        changed = np.where(
            rng.random((3, len(whole))) < 0.2, rng.integers(50, size=len(whole)), whole
        )
        text += [*whole.tolist(), *changed.ravel().tolist()]
    return example.guesses.Guesses(text, size)


def engine(example: Any, restless: Any, guesses: int = 0, **changes: Any) -> Any:
    given = {"sharing": True, "pages": 100, "batch": 3, "chunk": 5} | changes
    model = example.model.PagedGPT(restless.gpt("anyflash"), given.pop("pages"), PAGE_SIZE)
    guessed = good_guesses(example, restless, guesses) if guesses else None
    return example.engine.Engine(model, guesses=guessed, **given)


def serve_all(example: Any, served: Any, asked: list[Any]) -> None:
    """One request comes before each step."""
    example.generate.way_of(lambda: served, arrivals=1)(asked)


@pytest.mark.parametrize("guesses", [0, 1, 6])
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"batch": 1}, {"chunk": 100}, {"pages": 16, "batch": 5}], ids=str
)
def test_answers_of_a_plain_loop(
    example: Any, restless: Any, guesses: int, sharing: bool, changes: dict[str, int]
) -> None:
    served = engine(example, restless, guesses, sharing=sharing, **changes)
    asked = requests(example, restless)
    serve_all(example, served, asked)
    assert [request.answer for request in asked] == restless.plain
    assert set(served.pages.users) == {0}
    assert len(served.pages.free) == len(served.pages.users)


def test_right_guesses_save_passes(example: Any, restless: Any) -> None:
    moved = []
    steps = []
    for size in (0, 1, 6):
        served = engine(example, restless, size)
        keep = served.model.keep
        served.model.keep = lambda feed, path, keep=keep: (moved.append(path), keep(feed, path))
        serve_all(example, served, requests(example, restless))
        steps.append(served.steps)
    assert steps[0] > 1.3 * steps[1] > 1.3 * steps[2]
    assert any(path != list(range(len(path))) for path in moved)  # another branch than the first


def test_requests_share_the_pages_of_what_is_alike(example: Any, restless: Any) -> None:
    served = engine(example, restless, chunk=100)
    first, second, *_ = requests(example, restless)
    served.add(first)
    served.step()
    served.add(second)
    served.step()
    # Of 13 tokens that are alike 3 pages are full.
    assert first.pages[:3] == second.pages[:3]
    assert not set(first.pages[3:]) & set(second.pages[3:])
    assert [served.pages.users[page] for page in second.pages[:4]] == [2, 2, 2, 1]
    assert served.fed == len(first.prompt) + 1 + len(second.prompt) - 3 * PAGE_SIZE
    while first in served.running:
        served.step()
    assert [served.pages.users[page] for page in second.pages[:4]] == [1, 1, 1, 1]


def test_the_same_prompt_again(example: Any, restless: Any) -> None:
    """All its pages are full, and still its last token is given to the model."""
    served = engine(example, restless)
    prompt = restless.prompts[0]
    assert len(prompt) % PAGE_SIZE == 0
    for _ in range(2):
        again = example.engine.Request(prompt, len(restless.plain[0]))
        serve_all(example, served, [again])
        assert again.answer == restless.plain[0]
    assert served.fed == len(prompt) + PAGE_SIZE + 2 * (len(again.answer) - 1)


def test_as_hugging_face(example: Any, restless: Any) -> None:
    pytest.importorskip("transformers")
    asked = requests(example, restless)
    example.others.hugging_face(example.others.as_gpt2(restless.gpt("standard")), asked, batch=3)
    assert [request.answer for request in asked] == restless.plain


def test_a_page_is_known_until_its_room_is_needed(example: Any) -> None:
    pages = example.pages.Pages(3, 2, sharing=True)
    taken = [pages.take() for _ in range(3)]
    assert pages.take() is None
    tokens = [5, 6, 7, 8, 9, 1]
    pages.remember(taken, tokens, filled=5)  # the third page is not full
    pages.give_back(taken)
    assert pages.find(tokens[:3]) == taken[:1]
    assert pages.find(tokens) == taken[:2]
    assert pages.find([5, 5, 7, 8]) == []
    assert [pages.users[page] for page in taken] == [2, 1, 0]
    pages.give_back(taken[:1])
    pages.give_back(taken[:2])
    assert pages.take() == taken[2]  # nothing is known of it
    assert pages.take() == taken[1]  # without the first page nothing would find it
    assert pages.find(tokens) == taken[:1]


def test_a_tree_has_the_most_probable_continuations(example: Any) -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 5, 6]
    guesses = example.guesses.Guesses(text, size=4)
    assert guesses.tree([9, 1, 2], depth=3) == ([3, 4, 1, 5], [-1, 0, 1, -1])
    assert guesses.tree([9, 1, 2], depth=1) == ([3, 5], [-1, -1])
    assert guesses.tree([9, 1, 2], depth=0) == ([], [])
    assert guesses.tree([2], depth=3) == ([], [])
    # 3 with 3/5, and then 4 and 6 with a half each: less than 5 with 2/5.
    numbers = "1 2 3 4 0 1 2 3 6 0 1 2 3 4 0 1 2 5 0 1 2 5 0 2 3 6 0 2 3 6"
    text = [int(number) for number in numbers.split()]
    assert example.guesses.Guesses(text, size=2).tree([1, 2], depth=2) == ([3, 5], [-1, -1])


def test_a_request_that_never_fits_is_refused(example: Any, restless: Any) -> None:
    served = engine(example, restless, pages=5)
    with pytest.raises(ValueError, match=r"a prompt of 12 tokens and 9 new ones; .* 20 together"):
        served.add(example.engine.Request([1] * 12, 9))
    served.add(example.engine.Request([1] * 12, 8))
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        served.add(example.engine.Request([], 8))


def test_command(example: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--folder={folder}", "--requests=5", "--new=16", "--arrivals=1"]
    example.generate.main([*options, "--compare", "--json"])
    document = json.loads(capsys.readouterr().out)
    plain, _, *paged = document["ways"].values()
    assert list(document["ways"]) == [
        *("plain loop", "Hugging Face", "paged cache", "+ shared pages", "+ trees of guesses"),
    ]
    for way in document["ways"].values():
        assert way["answers"] == plain["answers"]
    assert paged[0]["fed"] > paged[1]["fed"]
    assert paged[1]["passes"] > paged[2]["passes"]
    assert len(document["answers"]) == 5

    example.generate.main([*options, "--prompt=The assignment", "--guesses=0", "--no-sharing"])
    printed = capsys.readouterr().out
    assert "The assignment" in printed
    assert "paged cache" in printed
    assert "shared" not in printed


@pytest.mark.cuda
def test_on_a_gpu(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16 two tokens may be as probable: not all answers need be alike."""
    folder = f"--folder={tmp_path}"
    example.train.main([folder, "--device=cuda", "--steps=100"])
    options = ["--device=cuda", "--requests=6", "--new=12", "--compare", "--json"]
    capsys.readouterr()
    example.generate.main([folder, *options])
    document = json.loads(capsys.readouterr().out)
    assert document["about"]["gpu"] == torch.cuda.get_device_name()
    plain, *others = document["ways"].values()
    for way in others:
        pairs = zip(way["answers"], plain["answers"], strict=True)
        assert sum(one == other for one, other in pairs) >= 3
        assert all(len(answer) for answer in way["answers"])


def post(port: int, body: bytes) -> tuple[int, dict[str, str]]:
    address = f"http://127.0.0.1:{port}/generate"
    try:
        with urlopen(Request(address, body), timeout=60) as reply:
            return reply.status, json.load(reply)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def service(example: Any, restless: Any) -> Any:
    """Of the restless model. Tokens are written as numbers."""
    numbers = SimpleNamespace(
        encode=lambda text: SimpleNamespace(ids=[int(word) for word in text.split()]),
        decode=lambda tokens: " ".join(map(str, tokens)),
    )
    return example.serve.Service(engine(example, restless, guesses=4), numbers)


@pytest.fixture
def port(example: Any, service: Any) -> Iterator[int]:
    with example.serve.server(service, 0) as served:
        Thread(target=served.serve_forever, args=(0.05,), daemon=True).start()
        yield served.server_port
        served.shutdown()


def test_serves_several_at_a_time(restless: Any, port: int) -> None:
    pairs = list(zip(restless.prompts, restless.plain, strict=True))
    bodies = [
        json.dumps({"prompt": " ".join(map(str, prompt)), "new": len(answer)}).encode()
        for prompt, answer in pairs
    ]
    with ThreadPoolExecutor(len(pairs)) as threads:
        replies = list(threads.map(post, [port] * len(pairs), bodies))
    assert replies == [(200, {"answer": " ".join(map(str, answer))}) for _, answer in pairs]


def test_says_what_is_wrong_with_a_request(port: int) -> None:
    status, reply = post(port, b'{"prompt": "1 2", "new": 1000}')
    assert status == 400
    assert "a prompt of 2 tokens and 1000 new ones" in reply["error"]
    for body in (b"no JSON", b"[1]", b'{"prompt": 1, "new": 1}', b'{"prompt": "1", "new": "1"}'):
        status, reply = post(port, body)
        assert status == 400
        assert "expected" in reply["error"]
    assert post(port, b'{"prompt": "1 2", "new": 3}')[0] == 200  # it still serves


def test_clients_are_told_that_the_model_failed(service: Any, port: int) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    service.engine.step = fail
    for _ in range(2):  # who waits, and who comes later
        status, reply = post(port, b'{"prompt": "1 2", "new": 3}')
        assert status == 500
        assert reply == {"error": "the model failed: RuntimeError('no memory')"}


def test_what_cannot_be(example: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a prompt of 2 tokens and 200 new ones"):
        example.generate.main([f"--folder={folder}", "--prompt=The value", "--new=200"])
    with pytest.raises(SystemExit, match=r"checkpoint\.safetensors does not exist"):
        example.generate.main([f"--folder={tmp_path}"])
    file = tmp_path / "checkpoint.safetensors"
    origin = {"framework": "jax", "model": "tiny", "seqlen": 128, "vocabulary": ""}
    metadata = {"origin": json.dumps(origin), "losses": "[]"}
    save_file({"model/tokens": torch.zeros(2)}, file, metadata)
    with pytest.raises(SystemExit, match=r"checkpoint\.safetensors is of framework jax"):
        example.generate.main([f"--folder={tmp_path}"])
    copy(folder / "checkpoint.safetensors", tmp_path)
    other = sys.modules["data"].train_tokenizer("other words than those of the text", 1024)
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SystemExit, match=r"checkpoint\.safetensors is of vocabulary"):
        example.generate.main([f"--folder={tmp_path}"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="--device cuda: torch finds no GPU"):
            example.generate.main([f"--folder={folder}", "--device=cuda"])


def test_says_how_to_install_what_is_missing() -> None:
    path = str(EXAMPLES / "generate")
    program = f"import sys; sys.path.append({path!r}); sys.modules['tokenizers'] = None"
    command = [sys.executable, "-c", f"{program}; import generate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith("the package tokenizers is missing; in the repository's root run: pip")
