"""Modules that are imported under the names of another package."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Replacement(NamedTuple):
    """What takes the place of a package."""

    distribution: str
    version: str
    modules: dict[str, str]  # names on the top level, and the modules here that they become

    def source(self, name: str) -> str | None:
        """The module here that is imported under this name; None: it is not replaced."""
        first, _, rest = name.partition(".")
        if first not in self.modules or rest.startswith("_"):
            return None
        return f"{self.modules[first]}.{rest}" if rest else self.modules[first]


def replace(replacement: Replacement, *, force: bool) -> bool:
    """Whether something has changed, which a second call does not."""
    if any(isinstance(x, _Finder) and x.replacement == replacement for x in sys.meta_path):
        return False
    for name in replacement.modules:
        other = importlib.util.find_spec(name)
        if other is not None and not force:
            package = next(iter(replacement.modules.values()))
            raise RuntimeError(
                f"{package}.install: {name} is already here, from {other.origin}; force=True takes "
                "its place"
            )
    for name in list(sys.modules):
        if name.partition(".")[0] in replacement.modules:
            del sys.modules[name]
    sys.meta_path.insert(0, _Finder(replacement))
    importlib.invalidate_caches()
    return True


def is_replaced(module: ModuleType) -> bool:
    """Whether a module is one of anyflash's, under whatever name."""
    loader = getattr(module, "__loader__", None)
    return isinstance(loader, _Loader) or module.__name__.startswith("anyflash")


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, replacement: Replacement) -> None:
        self._files = {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {replacement.distribution}\n"
                f"Version: {replacement.version}\n"
                f"Summary: anyflash in the place of {replacement.distribution}\n"
            ),
            "top_level.txt": "".join(f"{name}\n" for name in replacement.modules),
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Finder(MetaPathFinder):
    def __init__(self, replacement: Replacement) -> None:
        self.replacement = replacement

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = self.replacement.source(fullname)
        if source is None:
            return None
        try:
            here = importlib.util.find_spec(source)
        except ModuleNotFoundError:  # of a parent
            return None
        if here is None:
            return None
        package = here.submodule_search_locations is not None
        spec = ModuleSpec(fullname, _Loader(source), origin=here.origin, is_package=package)
        spec.has_location = True  # __file__ is the origin
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterable[_Distribution]:
        name = context.name
        if name is None or _canonical(name) == _canonical(self.replacement.distribution):
            return [_Distribution(self.replacement)]
        return []


class _Loader(Loader):
    """A module of its own, with a name and spec of its own, that holds the same objects."""

    def __init__(self, source: str) -> None:
        self._source = source

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = vars(importlib.import_module(self._source))
        own = vars(module)
        own.update({name: x for name, x in source.items() if name not in own})
        own["__doc__"] = source["__doc__"]
