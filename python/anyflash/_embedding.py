"""Where the package keeps what C and C++ programs need to use its library."""

from __future__ import annotations

from pathlib import Path

from anyflash import _core


def _folder() -> Path:
    # The module lies beside the library, also where the package is installed in editable mode.
    return Path(_core.__file__).parent


def get_include() -> str:
    """The folder with the headers ``anyflash/anyflash.h`` (C), ``anyflash/attention.h`` (C++17) and
    ``dlpack/dlpack.h``, for a compiler's ``-I``.

    Returns:
        An absolute path. The library lies in ``lib`` beside it: ``-L``.

    Example:
        >>> import anyflash, os
        >>> os.path.basename(anyflash.get_include())
        'include'
    """
    return str(_folder() / "include")


def get_cmake_dir() -> str:
    """The folder with ``anyflash-config.cmake``, for CMake's ``-Danyflash_DIR``.

    Returns:
        An absolute path. ``find_package(anyflash CONFIG)`` then brings the target
        ``anyflash::anyflash``.

    Example:
        >>> import anyflash, os
        >>> os.path.basename(anyflash.get_cmake_dir())
        'anyflash'
    """
    return str(_folder() / "lib" / "cmake" / "anyflash")
