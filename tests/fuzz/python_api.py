"""The public Python functions under hypothesis: python_calls.py says what must hold.

    python tests/fuzz/python_api.py [--calls N] [--seed S] [--modules M...] [--device D] [--all]

Stops at the first call that breaks a rule, made as small as it can be. With --all it goes on, and
ends with one call of each kind. Where a GPU is lost, it ends with the call that did it.
"""

from __future__ import annotations

import argparse
import collections
import re
import time
import warnings

import hypothesis
from devices import DEVICES, modules, restart_on
from python_calls import changed_calls, check
from right_calls import MODULES, Call, calls

from anyflash import build_info

BATCH = 2000


def run(
    count: int,
    seed: int,
    modules: tuple[str, ...] = tuple(MODULES),
    device: str = "cpu",
    findings: dict[str, str] | None = None,
) -> dict[str, int]:
    """How many calls succeeded and failed, in batches: hypothesis remembers what it has tried.

    The first finding is made small and raised; with ``findings`` all are kept there, by their kind.
    """
    counts: collections.Counter[str] = collections.Counter()
    found = calls(modules, device)
    if device != "cpu":
        found = [call for call in found if is_served(call, findings)]

    def one(case: tuple[Call, dict[str, object]]) -> None:
        try:
            counts["returned" if check(*case) else "refused"] += 1
        except AssertionError as finding:
            if findings is None:
                raise
            counts["findings"] += 1
            kind = re.sub(r"[^A-Za-z_. ]", "", str(finding))[:80]
            findings.setdefault(kind, f"{finding}\n    with {case[1]!r}")

    rules = hypothesis.settings(
        max_examples=min(count, BATCH),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    while counts.total() < count:
        given = hypothesis.given(changed_calls(found))(one)
        hypothesis.seed(seed + counts.total())(rules(given))()
        if count > BATCH:
            print(f"{time.strftime('%H:%M:%S')}  {counts.total()} calls", flush=True)
    return counts


def is_served(call: Call, findings: dict[str, str] | None) -> bool:
    """A build of few kernels refuses some right calls on a GPU: they are named, and left out."""
    try:
        return check(call, {})
    except AssertionError as finding:
        if isinstance(finding.__context__, NotImplementedError):
            print(f"left out: {finding}", flush=True)
        elif findings is None:
            raise
        else:
            findings[str(finding)] = str(finding)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--modules", nargs="+", help="the default is all that the device has")
    parser.add_argument("--all", action="store_true", help="go on after a finding")
    arguments = parser.parse_args()
    if arguments.device.startswith("emulated"):
        restart_on(arguments.device)
    names = tuple(modules(arguments.device))
    wanted = tuple(arguments.modules or names)
    if not set(wanted) <= set(names):
        parser.error(f"--modules: {arguments.device} has {', '.join(names)}")
    warnings.simplefilter("ignore")
    findings: dict[str, str] | None = {} if arguments.all else None
    counts = run(arguments.calls, arguments.seed, wanted, arguments.device, findings)
    for text in (findings or {}).values():
        print(text, end="\n\n")
    if arguments.device != "cpu":
        launched = [kernel["name"] for kernel in build_info()["kernels"] if kernel["launches"]]
        print("kernels:", *(name for name in launched if name.startswith("sm")))
    print(
        f"{sum(counts.values())} calls on {arguments.device}, seed {arguments.seed}: "
        f"{dict(counts)}, {len(findings or {}) or 'no'} findings"
    )
    raise SystemExit(bool(findings))


if __name__ == "__main__":
    main()
