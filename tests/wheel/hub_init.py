"""anyflash as a kernel of the Hugging Face Hub: the functions of flash-attn, by their names.

hub_kernel.py puts this file beside the package, as the ``__init__.py`` of a build variant.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "anyflash"


def load() -> None:
    """Its modules import one another by the name anyflash, of which a process has one."""
    if importlib.util.find_spec("nanobind_backend") is None:
        raise ImportError("anyflash: nanobind-backend is missing; pip install nanobind-backend")
    found = sys.modules.get("anyflash")
    if found is not None:
        if Path(str(found.__file__)).parent != PACKAGE:
            raise ImportError(
                f"anyflash: {found.__file__} has been imported; expected {PACKAGE}/__init__.py, "
                "for a process has one anyflash"
            )
        return
    spec = importlib.util.spec_from_file_location("anyflash", PACKAGE / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["anyflash"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["anyflash"]
        raise


load()
flash_attn = importlib.import_module("anyflash.flash_attn")
globals().update({name: getattr(flash_attn, name) for name in flash_attn.__all__})
__all__ = list(flash_attn.__all__)
