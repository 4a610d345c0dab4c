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

    Returns
    -------
    str
        An absolute path. The library lies in ``lib`` beside it: ``-L``.

    Examples
    --------
    >>> import anyflash, os
    >>> os.path.basename(anyflash.get_include())
    'include'
    """
    return str(_folder() / "include")


def get_cmake_dir() -> str:
    """The folder with ``anyflash-config.cmake``, for CMake's ``-Danyflash_DIR``.

    Returns
    -------
    str
        An absolute path. ``find_package(anyflash CONFIG)`` then brings the target
        ``anyflash::anyflash``.

    Examples
    --------
    >>> import anyflash, os
    >>> os.path.basename(anyflash.get_cmake_dir())
    'anyflash'
    """
    return str(_folder() / "lib" / "cmake" / "anyflash")


def get_tvm_ffi_library() -> str:
    """The library with the functions of the C ABI in tvm-ffi's calling convention, for
    ``tvm_ffi.load_module`` or the same in another language.

    Returns
    -------
    str
        An absolute path.

    Raises
    ------
    FileNotFoundError
        This build has no such library.

    Examples
    --------
    >>> import anyflash, numpy as np, tvm_ffi
    >>> functions = tvm_ffi.load_module(anyflash.get_tvm_ffi_library())
    >>> q, out = np.ones((1, 4, 2, 8), np.float32), np.zeros((1, 4, 2, 8), np.float32)
    >>> functions.forward(q, q, q, out, None, "causal", True)
    >>> bool((out == 1).all())
    True
    """
    library = _folder() / "lib" / "libanyflash_tvm_ffi.so"
    if not library.exists():
        raise FileNotFoundError(
            f"anyflash.get_tvm_ffi_library: this build has no {library.name}; build it where the "
            "package apache-tvm-ffi is installed, or with ANYFLASH_DLPACK_INCLUDE_DIR set to its "
            "include folder"
        )
    return str(library)
