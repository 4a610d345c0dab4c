"""The mutants of tests/mutation: what is made of a source, and that the listed ones exist."""

from __future__ import annotations

import mutants
import mutate

SOURCE = """
// if (a < b) in a comment
int twice(int a, int b) {
  if (a < b && "x < y") return f(a, b);
  count(a);
  const int c = a + 1;
  return c;
}
"""


def made(kind: str) -> set[str]:
    return {m.after for m in mutants.mutants_of("x.cpp", SOURCE) if m.kind == kind}


def test_operators() -> None:
    assert made("operator") == {
        'if (a <= b && "x < y") return f(a, b);',
        'if (a < b || "x < y") return f(a, b);',
        "const int c = a - 1;",
    }


def test_others() -> None:
    assert made("off by one") == {"const int c = a + 2;"}
    assert made("negated condition") == {'if (!(a < b && "x < y")) return f(a, b);'}
    assert ";" in made("dropped statement")
    assert made("swapped arguments") == {'if (a < b && "x < y") return f(b, a);'}
    assert made("early return") == {"int twice(int a, int b) { return {};"}


def test_a_mutant_is_applied() -> None:
    first = next(m for m in mutants.mutants_of("x.cpp", SOURCE) if m.kind == "off by one")
    assert first.apply(SOURCE) == SOURCE.replace("a + 1", "a + 2")


def test_skipped_functions() -> None:
    assert list(mutants.mutants_of("x.cpp", SOURCE, ("twice",))) == []


def test_equivalents_exist() -> None:
    """A line of the list whose source has changed since says nothing any more."""
    assert len(mutate.equivalents()) > 20
    assert mutate.equivalents() - {mutant.key for mutant in mutate.drawn(1)} == set()


def test_draws_are_the_same() -> None:
    assert [m.key for m in mutate.drawn(1)] == [m.key for m in mutate.drawn(1)]
    assert mutate.drawn(1)[0] != mutate.drawn(2)[0]
    assert len(mutate.drawn(1)) > 2000
