"""``import flash_attn`` finds anyflash.flash_attn."""

from __future__ import annotations

import importlib

from anyflash._install import Replacement, replace

# Of flash-attn, whose signatures and returns these are.
VERSION = "2.8.3"
_PACKAGE = "anyflash.flash_attn"
_REPLACEMENT = Replacement(
    distribution="flash_attn",
    version=VERSION,
    modules={"flash_attn": _PACKAGE, "flash_attn_2_cuda": f"{_PACKAGE}.flash_attn_2_cuda"},
)


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
    if replace(_REPLACEMENT, force=force):
        importlib.import_module(f"{_PACKAGE}._operators").register()
