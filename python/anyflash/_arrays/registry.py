"""To which framework an array belongs. None is imported unless one of its arrays was passed."""

from __future__ import annotations

from typing import Any

from anyflash._arrays.base import Framework
from anyflash._arrays.cupy import CuPy
from anyflash._arrays.jax import Jax
from anyflash._arrays.numpy import NumPy
from anyflash._arrays.paddle import Paddle
from anyflash._arrays.tensorflow import TensorFlow
from anyflash._arrays.torch import Torch

_FRAMEWORKS: dict[str, Framework] = {
    "numpy": NumPy(),
    "torch": Torch(),
    "cupy": CuPy(),
    "jax": (_jax := Jax()),
    "jaxlib": _jax,
    "tensorflow": TensorFlow(),
    "paddle": Paddle(),
}
_OTHER = Framework()


_by_type: dict[type, Framework] = {}


def _framework_of_type(kind: type) -> Framework:
    nearest = _OTHER
    for base in kind.__mro__:  # subclasses of a framework's array count
        framework = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if framework is not None and hasattr(base, "__dlpack__"):
            return framework
        nearest = framework or nearest
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _OTHER
    raise TypeError(f"is {kind.__name__}; {nearest.arrays}")


def framework_of(x: Any) -> Framework:
    """The framework that x belongs to; TypeError for what is not an array."""
    framework = _by_type.get(type(x))
    if framework is None:
        framework = _by_type[type(x)] = _framework_of_type(type(x))
    return framework


def dtype_name(dtype: Any) -> str:
    """Of a dtype object of any framework, or of a name."""
    if isinstance(dtype, str):
        return dtype
    # torch.float32 has neither attribute; numpy.float32 is a class; paddle.float32 is in capitals.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.").lower()
