"""The statements that tests/mutation/synchronisation.py leaves out, and the list beside it."""

from __future__ import annotations

import re

import pytest
import statements as st
import synchronisation
import units

SOURCE = """
// __syncthreads() in a comment
template <class T>
ANYFLASH_DEVICE void load(T& ring) {
  if (threadIdx.x == 0) ring.full[place.stage()].wait(place.parity() ^ 1);
  else if (last) __syncwarp();
  for (int i = 0; i < 3; ++i) {
    cute::cp_async_wait<0>();  // K is there
    cute::cp_async_wait<0>();
  }
  if (__syncthreads_or(!keys.is_finite()) == 0) return;
  const auto wait = [&] { ring.empty[0].arrive(); };
  both();
}
ANYFLASH_DEVICE void both() {
  __syncwarp();
  place_.advance();
}
ANYFLASH_DEVICE bool next() {
  __syncwarp();
  return tile.exists;
}
ANYFLASH_DEVICE void other() { wait(3); next(); }
"""


def found() -> list[st.Statement]:
    return st.all_statements([st.Source("sm80/x.h", SOURCE)])


def test_what_is_found() -> None:
    assert [statement.key for statement in found()] == [
        "sm80/x.h: load: ring.full[place.stage()].wait(place.parity() ^ 1);",
        "sm80/x.h: load: __syncwarp();",
        "sm80/x.h: load: cute::cp_async_wait<0>();",
        "sm80/x.h: load: cute::cp_async_wait<0>(); (2)",
        "sm80/x.h: load: __syncthreads_or(!keys.is_finite())",
        "sm80/x.h: load: ring.empty[0].arrive();",
        "sm80/x.h: load: both();",
        "sm80/x.h: both: __syncwarp();",
        "sm80/x.h: next: __syncwarp();",
    ]


def test_switches() -> None:
    (text,) = st.switched([st.Source("sm80/x.h", SOURCE)], found()).values()
    assert text.count("keeps(") == 9
    assert "else if (last) { if (keeps(2)) __syncwarp(); }\n" in text
    assert "if ((keeps(5) ? __syncthreads_or(x) : static_cast<int>(x)) == 0)" in text.replace(
        "!keys.is_finite()", "x"
    )
    assert text.count("\n") == SOURCE.count("\n")  # a barrier is known by its line


def test_what_kernels_wait_with_is_known() -> None:
    """A function of the headers with instructions is one that synchronises, or another."""
    names = {
        function.name
        for file in st.DEFINITIONS
        for function in st.cpp.functions((st.KERNELS / file).read_text())
    }
    assert len(names) > 30
    assert names - {*st.FUNCTIONS, *st.METHODS, *st.OTHERS} == set()


def test_the_program_knows_its_units(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else imports it: names that it takes from tests/emulator may have moved."""
    monkeypatch.setattr("sys.argv", ["synchronisation.py", "--list", "--only", "sm90/*"])
    assert synchronisation.main() == 0
    assert " statements in " in capsys.readouterr().out
    assert all(unit.cases for unit in units.UNITS.values())


@pytest.fixture(scope="module")
def statements() -> list[st.Statement]:
    return st.all_statements(st.sources())


def test_all_kernels_are_seen(statements: list[st.Statement]) -> None:
    """Each barrier of a line of its own is found, by a search that knows nothing of statements."""
    barrier = re.compile(r"^ *(?:if .*\) |else )?(?:cute::)?(?:__sync\w+|cp_async_\w+<?.*>?)\(.*;")
    for source in st.sources():
        lines = {s.line for s in statements if s.file == source.name}
        for number, line in enumerate(source.text.split("\n"), 1):
            assert number in lines or not barrier.match(line), f"{source.name}:{number}: {line}"


def test_explained_statements_exist(statements: list[st.Statement]) -> None:
    """A line of the list whose statement has changed since says nothing any more."""
    reasons = st.explained()
    assert reasons.keys() - {statement.key for statement in statements} == set()
    assert all(reasons.values())
