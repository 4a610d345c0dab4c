"""The statements of cpp/kernels that synchronise: each is one mutant, which leaves it out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants import closing, cpp

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "cpp/kernels"
EXPLAINED = Path(__file__).with_name("synchronisation.txt")

# What has one instruction for each function, or a line: the calls are mutated, not these.
DEFINITIONS = (
    "sm90/ptx.h",
    "sm90/wgmma_atoms.h",
    "sm90/pipeline.h",
    "sm80/named_barrier.h",
    "common/dependent_launch.h",
)
# Of these files and of the toolkits.
FUNCTIONS = (
    *("__syncthreads", "__syncwarp", "__threadfence", "__threadfence_block"),
    *("named_barrier_sync", "sync_named", "arrive_named", "sync_consumers"),
    *("cp_async_fence", "cp_async_wait"),
    *("wgmma_fence", "wgmma_commit", "wgmma_wait"),
    *("commit_stores", "wait_stores_read", "wait_stores"),
    *("fence_barrier_init", "fence_smem_writes", "fence_all_writes"),
    *("cluster_arrive", "cluster_wait", "wait_for_sent"),
    *("release", "allow_next_kernel", "wait_previous_kernel"),
)
# Waits that also take what they waited for. Those that only wait are found (is_wrapper()).
WAITS = ("wait_values",)
# Of an Mbarrier.
METHODS = ("arrive", "arrive_expect", "wait")
# Barriers that also vote: a thread's own vote is what is left of them.
VOTES = ("__syncthreads_or", "__syncthreads_and", "__syncthreads_count")
# What else the files of DEFINITIONS hold.
OTHERS = (
    *("smem_address", "elect_lane", "release_registers", "acquire_registers", "init", "state"),
    *("mbarrier_init", "mbarrier_arrive", "mbarrier_arrive_expect", "mbarrier_try_wait"),
    *("prefetch_tensor_map", "load_box", "load_bytes", "add_floats", "store_box"),
    *("address_in_cta", "expect_sent", "send_to_cta", "arrive_at_cta", "store_transposed"),
    *("load_matrices", "load_transposed", "store_matrices", "with_smem", "with_registers"),
    *("pin_registers", "address", "spread_signs"),
    *("stage", "parity", "count", "advance", "next"),
)

# What stands before the name in a call that is a whole statement: an object, or a namespace.
OBJECT = re.compile(
    r"(?:\w+(?:<[^<>;]*>)?::|\w+(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\((?:[^()]|\([^()]*\))*\))*"
    r"(?:\.|->))*(?:template )?$"
)
CONTROL = re.compile(r"\s*(?:else\b\s*)?(?:if(?: constexpr)?|while|for)\s*\(|\s*(?:else|do)\b")
# What else a wrapper of such statements does: it counts, and returns early.
COMPANION = re.compile(
    r"(?:\w+(?:\.|->))*advance\([^;]*\)$|(?:const|constexpr|static_assert)\b[^;]*$"
    r"|\w+_ [|^]?= [^;]*$|return$|$"
)


@dataclass(frozen=True)
class Statement:
    file: str  # below cpp/kernels
    function: str
    text: str  # without a comment
    number: int  # of those with this text in this function, from 1
    begin: int
    end: int
    vote: bool = False
    line: int = 0

    @property
    def key(self) -> str:
        """Names it also when lines move."""
        which = "" if self.number == 1 else f" ({self.number})"
        return f"{self.file}: {self.function}: {self.text}{which}"

    def switched(self, source: str, number: int) -> str:
        """The statement, which is left out where mutation `number` is chosen."""
        old = source[self.begin : self.end]
        if not self.vote:
            return f"{{ if (keeps({number})) {old} }}"
        return f"(keeps({number}) ? {old} : static_cast<int>{old[old.index('(') :]})"


def statement_begin(text: str, at: int) -> int:
    """Where the statement begins that `at` is in, without if, for and else; -1 inside brackets."""
    depth, begin = 0, at
    while begin > 0:
        char = text[begin - 1]
        depth += (char in ")]") - (char in "([")
        if depth < 0:
            return -1
        if depth == 0 and char in ";{}":
            break
        begin -= 1
    while (found := CONTROL.match(text, begin)) is not None and found.end() <= at:
        begin = found.end()
        if text[begin - 1] == "(":
            begin = closing(text, begin - 1) + 1
    return begin + len(text[begin:at]) - len(text[begin:at].lstrip())


def calls(text: str, names: frozenset[str]) -> Iterator[tuple[int, int, bool]]:
    """Begin and end of each call that is a statement, with its semicolon, or that votes."""
    functions = names | {*FUNCTIONS, *WAITS}
    for found in re.finditer(r"\b(\w+)(?:<[^<>;]*>)?\(", text):
        name, end = found[1], closing(text, found.end() - 1)
        if name in VOTES:
            yield found.start(), end + 1, True
            continue
        begin = statement_begin(text, found.start())
        if begin < 0 or text[end + 1 : end + 2] != ";":
            continue
        before = text[begin : found.start()]
        is_method = before.rstrip().endswith((".", "->"))
        if name not in functions and not (name in METHODS and is_method):
            continue
        if OBJECT.match(before):
            yield begin, end + 2, False


def is_wrapper(text: str, names: frozenset[str]) -> bool:
    """Whether a function's body synchronises, and hardly does anything else."""
    places = [*calls(text, names)]
    end = 0
    for statement in re.finditer(r"[^;{}]*;", text):
        end = statement.end()
        begin = statement_begin(text, end - 1)
        if any(p[0] <= end - 1 < p[1] for p in places):
            continue
        if not COMPANION.match(text[begin : end - 1].strip()):
            return False
    return bool(places) and not text[end:].strip(" \n}")


class Source:
    """A file of the kernels, and its functions with what they do."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.blank = cpp.blank(text)
        self.functions = [f for f in cpp.functions(self.blank) if f.name != "lambda"]
        lines = self.blank.split("\n")
        self.bodies = [
            (f.name, "\n".join(lines[f.line - 1 : f.line - 1 + f.lines])) for f in self.functions
        ]

    def wrappers(self, names: frozenset[str]) -> set[str]:
        """Functions that only synchronise."""
        found = set()
        for name, text in self.bodies:
            head = text.find("{", closing(text, text.find("(", text.find(name))))
            if head >= 0 and is_wrapper(text[head + 1 :].rstrip(" \n};") + ";", names):
                found.add(name)
        return found

    def statements(self, names: frozenset[str]) -> Iterator[Statement]:
        seen: dict[tuple[str, str], int] = {}
        for begin, end, vote in sorted(calls(self.blank, names)):
            line = self.blank.count("\n", 0, begin) + 1
            around = [f for f in self.functions if f.line <= line < f.line + f.lines]
            function = min(around, key=lambda f: f.lines).name if around else ""
            words = " ".join(self.text[begin:end].split())
            number = seen[function, words] = seen.get((function, words), 0) + 1
            yield Statement(self.name, function, words, number, begin, end, vote, line)


def sources() -> list[Source]:
    """Of the kernels for GPUs."""
    files = {
        path.relative_to(KERNELS).as_posix(): path
        for folder in ("common", "variant", "cuda", "sm80", "sm90")
        for path in sorted((KERNELS / folder).rglob("*"))
        if path.suffix in (".h", ".cu")
    }
    return [
        Source(name, path.read_text()) for name, path in files.items() if name not in DEFINITIONS
    ]


def all_statements(files: list[Source]) -> list[Statement]:
    """In the order of the sources: a mutation's number is 1 + the place here."""
    names: dict[str, frozenset[str]] = {}  # of wrappers, by family
    while True:
        found: dict[str, frozenset[str]] = {}
        for file in files:
            family = file.name.split("/")[0]
            more = file.wrappers(names.get(family, frozenset()))
            found[family] = found.get(family, frozenset()) | more
        if found == names:
            break
        names = found
    return [s for file in files for s in file.statements(names[file.name.split("/")[0]])]


def switched(files: list[Source], statements: list[Statement]) -> dict[str, str]:
    """The files that have statements, with a switch at each."""
    changed = {file.name: file.text for file in files}
    for number, statement in reversed([*enumerate(statements, 1)]):
        text = changed[statement.file]
        code = statement.switched(text, number)
        changed[statement.file] = text[: statement.begin] + code + text[statement.end :]
    return {name: changed[name] for name in {s.file: None for s in statements}}


def explained() -> dict[str, str]:
    """The reason for each statement whose absence nothing on the emulated GPU could notice."""
    reasons: dict[str, str] = {}
    reason = ""
    for line in EXPLAINED.read_text().splitlines():
        if line.startswith("  "):
            reason = line.strip()
        elif line and not line.startswith("#"):
            reasons[line] = reason
    return reasons
