"""``import flash_attn_interface`` finds anyflash.flash_attn_3."""

from __future__ import annotations

from anyflash._install import Replacement, replace

# Of flash_attn_3, whose signatures and returns these are.
VERSION = "3.0.0"
_PACKAGE = "anyflash.flash_attn_3"
_REPLACEMENT = Replacement(
    distribution="flash_attn_3",
    version=VERSION,
    modules={
        "flash_attn_3": _PACKAGE,
        "flash_attn_interface": f"{_PACKAGE}.flash_attn_interface",
    },
)


def install(*, force: bool = False) -> None:
    """From now on, ``import flash_attn_interface`` gives FlashAttention-3's functions of anyflash,
    for programs that cannot be changed.

    Also ``flash_attn_3.flash_attn_interface``; ``importlib.metadata.version("flash_attn_3")`` is
    the ``__version__`` here. There is no ``flash_attn_3._C`` and no ``torch.ops.flash_attn_3``. The
    rest is as :func:`anyflash.flash_attn.install`.

    Parameters
    ----------
    force : bool
        Take the place of a FlashAttention-3 that is installed, too.

    Raises
    ------
    RuntimeError
        Another flash_attn_interface or flash_attn_3 can be imported, and ``force`` is not set.
        Nothing has been changed.

    Examples
    --------
    ::

        import anyflash.flash_attn_3

        anyflash.flash_attn_3.install()
        from flash_attn_interface import flash_attn_func
    """
    replace(_REPLACEMENT, force=force)
