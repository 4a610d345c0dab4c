"""The checker finds long functions and templates of many parameters, and nothing else."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from check_functions import functions
from checker_runs import findings

CHECKER = Path(__file__).with_name("check_functions.py")
run = functools.partial(findings, CHECKER)


# What begins a function, and how it is called.
FUNCTIONS = {
    "int main() {\n...\n}\n": "main",
    "void f(int a,\n       int b) {\n...\n}\n": "f",
    "template <class T>\nauto g(T t) -> decltype(t) {\n...\n}\n": "g",
    "struct A {\nA(int x)\n : x_(x), y_{x} {\n...\n}\nint x_, y_;\n};\n": "A",
    "struct A {\nvoid f() const noexcept override {\n...\n}\n};\n": "f",
    "struct A {\nvoid operator()(int x) const {\n...\n}\n};\n": "operator()",
    "void A::f(int x = B{1}.y) {\n...\n}\n": "A::f",
    'ANYFLASH_DEVICE void f(const char* s = "{") ANYFLASH_INLINE {  // {\n...\n}\n': "f",
    "#define X {\nvoid f() {\nif (a) {\n} else {\n...\n}\n}\n": "f",
    "const auto step = [&](auto x) ANYFLASH_INLINE_LAMBDA {\n...\n};\n": "lambda",
    "const auto step = [this, &x] {\n...\n};\n": "lambda",
    "const int x = call(1, [](int a) mutable -> int {\n...\n});\n": "lambda",
}
# What is long and no function.
OTHERS = (
    "namespace a {\n...\n}\n",
    "struct A {\n...\n};\n",
    "class A : public B<C> {\n...\n};\n",
    "enum class A : int {\n...\n};\n",
    'extern "C" {\n...\n}\n',
    "const int x[] = {\n...\n};\n",
    "// int main() {\n...\n",
    "/* void f() {\n...\n} */\n",
)


@pytest.mark.parametrize("text", FUNCTIONS)
@pytest.mark.parametrize("name", ["a.h", "a.cu", "a.cpp"])
def test_functions(tmp_path: Path, name: str, text: str) -> None:
    called = FUNCTIONS[text]
    body = text[text.index("...") :]
    inner = body.index("}") if called != "f" or "if" not in text else body.index("}\n}") + 2
    before = text[: text.index("...")]
    first = before.splitlines()
    line = next(i for i, row in enumerate(first, 1) if _begins(row, called))
    fixed = len(first) - line + 1 + body[4 : inner + 1].count("\n") + 1
    short = before + "x;\n" * (80 - fixed) + body[4:]
    assert run(tmp_path, name, short) == []
    (finding,) = run(tmp_path, name, before + "x;\n" * (81 - fixed) + body[4:])
    assert finding == f"{name}:{line}: {called} has 81 lines; at most 80 are allowed"


def _begins(row: str, called: str) -> bool:
    return ("[" in row) if called == "lambda" else (f"{called}(" in row)


@pytest.mark.parametrize("text", OTHERS)
def test_other_braces(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, "a.h", text.replace("...\n", "x,\n" * 200)) == []


def test_kernels_may_be_longer(tmp_path: Path) -> None:
    kernel = (
        "template <class T>\n__global__ void __launch_bounds__(T::x)\n    k(const P p) {{\n{}}}\n"
    )
    assert run(tmp_path, "a.cu", kernel.format("x;\n" * 118)) == []
    (finding,) = run(tmp_path, "a.cu", kernel.format("x;\n" * 119))
    assert finding == "a.cu:3: k has 121 lines; at most 120 are allowed"


def test_template_parameters(tmp_path: Path) -> None:
    six = "template <class A, int b, bool c = (1, 2), class D = E<1, 2>, class F, class... G>\n"
    assert run(tmp_path, "a.h", f"{six}struct X {{}};\ntemplate <>\nstruct Y<1> {{}};\n") == []
    (finding,) = run(tmp_path, "a.h", "\n" + six.replace("class F", "class F, int h"))
    assert finding == "a.h:2: the template has 7 parameters; at most 6 are allowed"


def test_python(tmp_path: Path) -> None:
    text = "def f(\n    a,\n):\n    '''Long.\n" + "x\n" * 100 + "    '''\n" + "    a()\n" * 80
    assert run(tmp_path, "a.py", text) == []
    (finding,) = run(tmp_path, "a.py", text + "    a()\n")
    assert finding == "a.py:1: the statements of f have 81 lines; at most 80 are allowed"


def test_this_repository_is_read() -> None:
    """Whatever the checker says of it, it understands its files."""

    root = CHECKER.parents[2]
    kernel = (root / "cpp/kernels/sm80/forward/kernel.h").read_text()
    found = {function.name: function for function in functions(kernel)}
    assert found["forward_kernel"].is_kernel
    assert 10 < found["forward_kernel"].lines <= 120
