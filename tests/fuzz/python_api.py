"""The public Python functions under hypothesis: python_calls.py says what must hold.

    python tests/fuzz/python_api.py [--calls N] [--seed S] [--modules M...]

Stops at the first call that breaks a rule, made as small as it can be.
"""

from __future__ import annotations

import argparse
import collections
import warnings

import hypothesis
from python_calls import changed_calls, check
from right_calls import MODULES, Call, calls


def run(count: int, seed: int, modules: tuple[str, ...] = tuple(MODULES)) -> dict[str, int]:
    """How many calls succeeded and failed, in batches: hypothesis remembers what it has tried."""
    counts: collections.Counter[str] = collections.Counter()
    found = calls(modules)
    batch = 2000

    def one(case: tuple[Call, dict[str, object]]) -> None:
        counts["returned" if check(*case) else "refused"] += 1

    rules = hypothesis.settings(
        max_examples=min(count, batch),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    while counts.total() < count:
        given = hypothesis.given(changed_calls(found))(one)
        hypothesis.seed(seed + counts.total())(rules(given))()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = run(arguments.calls, arguments.seed, tuple(arguments.modules))
    print(f"{sum(counts.values())} calls: {dict(counts)}, no finding")


if __name__ == "__main__":
    main()
