"""The checker finds initializers of many values without names, and nothing else."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from check_aggregates import check_cpp, initializers
from checker_runs import findings

CHECKER = Path(__file__).with_name("check_aggregates.py")
run = functools.partial(findings, CHECKER)


# The values of a struct; [...] stands for five of them.
FIELDS = (
    "Tile tile{[...]};\n",
    "const Tile tile = {[...]};\n",
    "Tile f() { return {[...]}; }\n",
    "Tile f() const { return Tile{[...]}; }\n",
    "void f() { g({[...]}, 1); }\n",
    "void f() { tiles.push_back({[...]}); }\n",
    "void f(Tile tile = {[...]}) {}\n",
    "struct A {\nA() : tile_{[...]} {}\nTile tile_;\n};\n",
    "void f() { tiles[0] = {[...]}; }\n",
    "void f() { if (a) x();\nelse tiles[0] = {[...]}; }\n",
    "const Tile tiles[] = {{[...]}, {}};\n",
    "const std::vector<Tile> tiles = {{[...]}};\n",
    "const std::array<int, 2> a = f({[...]});\n",
    "enum class Kind { kA };\nTile tile{[...]};\n",
    "namespace a {\nTile tile{[...]};\n}\n",
)
# Five values in each, of different kinds.
VALUES = (
    "a, b, c, d, e",
    '1, 2, 3, 4, "five"',
    "{1}, {2}, {3}, {4}, 5",
    "a, b, c, d, e,",
    "a < b, c > d, e, f->x, g",
    "a, B<int, 2>{}, {1, 2}, f(3, 4), [&] { return 5; }",
    "a,  // , b\n    b, /* , */ c, d, ','",
)
# What has as many values, or only seems to.
OTHERS = (
    "Tile tile{a, b, c, d};\n",
    "Tile tile{a, b, c, d,};\n",
    "Tile tile{a, b, B<int, 2, 3>{}, f(1, 2, 3, 4, 5)};\n",
    "Tile tile{{a, b}, {c, d, e}, f};\n",
    "Tile tile{};\n",
    # Alike.
    "const int x[] = {a, b, c, d, e};\n",
    "const int x[5]{a, b, c, d, e};\n",
    "const int x[2][5] = {{1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}};\n",
    "int* x = new int[]{a, b, c, d, e};\n",
    "std::vector<int> x{a, b, c, d, e};\n",
    "std::vector<int> x({a, b, c, d, e});\n",
    "const std::array<std::pair<int, int>, 5>& x = {a, b, c, d, e};\n",
    "void f() { g(std::set<std::string>{a, b, c, d, e}); }\n",
    "void f() { for (const int x : {a, b, c, d, e}) g(x); }\n",
    "void f() { for (auto* t : {&a, &b, &c, &d, &e}) g(t); }\n",
    "void f() { g(std::max({a, b, c, d, e})); }\n",
    "void f() { g({1, -2, 0x1p-3, 1'000, .5f}); }\n",
    'void f() { g({"a", "b, c", R"(d, "e")", "f" "g", \'h\'}); }\n',
    "void f() { g({{a, b}, {c}, {d}, Pair{e, f}, std::pair<int, int>{1, 2}}); }\n",
    "void f() { g({[] { return 1; }, [&] { return 2; }, [=] {}, [] {}, [] {}}); }\n",
    # Named.
    "struct tile t = {.a = 1, .b = x, .c = 2, .d = y, .e = 3};\n",
    # No values.
    "enum class Kind : int { kA, kB, kC = 3, kD, kE };\n",
    "void f(int a, int b, int c, int d, int e) { g<a, b, c, d, e>(1, 2, 3, 4, 5); }\n",
    "void f() const {\nint a, b, c, d, e;\n}\n",
    "void f() {\nfor (int a = 1, b, c, d, e; a < b;) {\n}\n}\n",
    "namespace a {\nB::B() : c_(1), d_(2), e_(3), f_(4), g_(5) {}\n}\n",
    "#define TILE {a, b, c, d, e}\n",
    "// Tile tile{a, b, c, d, e};\n",
    'const char* x = "{a, b, c, d, e}";\n',
)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("text", FIELDS)
def test_fields(text: str, values: str) -> None:
    (finding,) = check_cpp("a.h", text.replace("[...]", values))
    line = text[: text.index("[...]")].count("\n") + 1
    expected = f"a.h:{line}: the initializer has 5 values without names; at most 4 are allowed"
    assert finding == expected


@pytest.mark.parametrize("text", OTHERS)
def test_other_braces(text: str) -> None:
    assert list(check_cpp("a.cpp", text)) == []


@pytest.mark.parametrize("name", ["a.cpp", "a.cu", "a.h", "a.c", "a.h.in"])
def test_files(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, name, "Tile tile{a, b, c, d};\n") == []
    assert (
        len(run(tmp_path, name, "Tile t = {a, b, c, d, e, f};\nTile u = {a, b, c, d, e};\n")) == 2
    )


def test_other_files(tmp_path: Path) -> None:
    assert run(tmp_path, "a.py", "x = {a, b, c, d, e}\n") == []


def test_this_repository_is_read() -> None:
    """Whatever the checker says of it, it understands its files."""

    root = CHECKER.parents[2]
    table = (root / "cpp/src/tuned_tiles.cpp").read_text()
    rows = [x for x in initializers(table) if len(x.values) == 4]
    assert len(rows) >= 10
    assert all(row.values[-1].startswith("TileConfig::k") for row in rows)
