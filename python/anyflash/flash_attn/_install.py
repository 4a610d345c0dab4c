"""``import flash_attn`` finds anyflash.flash_attn."""

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

# Of flash-attn, whose signatures and returns these are.
VERSION = "2.8.3"
_PACKAGE = "anyflash.flash_attn"
_METADATA = {
    "METADATA": (
        f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\n"
        "Summary: anyflash in the place of flash-attn\n"
    ),
    "top_level.txt": "flash_attn\nflash_attn_2_cuda\n",
}


def install(*, force: bool = False) -> None:
    """From now on, ``import flash_attn`` gives this package, for programs that cannot be changed.

    Also ``flash_attn.flash_attn_interface``, ``flash_attn.bert_padding``, ``flash_attn_2_cuda``,
    and ``torch.ops.flash_attn``; ``importlib.metadata.version("flash_attn")`` is the
    ``__version__`` here. Nothing is written to disk: it is for this process, and has to come before
    the import of what looks for flash-attn; a ``sitecustomize`` module is a place for it. Calling
    it again does nothing.

    Parameters
    ----------
    force : bool
        Take the place of a flash-attn that is installed, too. Modules that imported it before keep
        what they have.

    Raises
    ------
    RuntimeError
        Another flash_attn can be imported, and ``force`` is not set. Nothing has been changed.

    Examples
    --------
    ::

        import anyflash.flash_attn

        anyflash.flash_attn.install()
        from flash_attn import flash_attn_func  # anyflash.flash_attn.flash_attn_func
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    other = importlib.util.find_spec("flash_attn")
    if other is not None and not force:
        raise RuntimeError(
            f"anyflash.flash_attn.install: flash_attn is already here, from {other.origin}; "
            "force=True takes its place"
        )
    for name in list(sys.modules):
        if name.partition(".")[0] in ("flash_attn", "flash_attn_2_cuda"):
            del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    importlib.invalidate_caches()
    importlib.import_module(f"{_PACKAGE}._operators").register()


def _source(name: str) -> str:
    """The module here that is imported under this name."""
    if name == "flash_attn_2_cuda":
        return f"{_PACKAGE}.{name}"
    return f"anyflash.{name}"


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return _METADATA.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent.parent / path


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, _, rest = fullname.partition(".")
        if first not in ("flash_attn", "flash_attn_2_cuda") or rest.startswith("_"):
            return None
        try:
            here = importlib.util.find_spec(_source(fullname))
        except ModuleNotFoundError:  # of a parent
            return None
        if here is None:
            return None
        package = here.submodule_search_locations is not None
        spec = ModuleSpec(fullname, _Loader(), origin=here.origin, is_package=package)
        spec.has_location = True  # __file__ is the origin
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterable[_Distribution]:
        name = context.name
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == "flash-attn":
            return [_Distribution()]
        return []


class _Loader(Loader):
    """A module of its own, with a name and spec of its own, that holds the same objects."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = vars(importlib.import_module(_source(module.__name__)))
        own = vars(module)
        own.update({name: x for name, x in source.items() if name not in own})
        own["__doc__"] = source["__doc__"]
