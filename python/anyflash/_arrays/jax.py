"""JAX's concrete arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anyflash._arrays.base import CPU, Device, Immutable

if TYPE_CHECKING:
    import numpy.typing as npt


class Jax(Immutable):
    """Concrete arrays on the CPU."""

    name = "JAX"
    array = "a JAX array"

    def read(self, x: Any, gradients: str) -> tuple[tuple[int, ...], str, Device]:
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer):
            raise NotImplementedError(
                f"is a JAX tracer; use anyflash.jax inside jax.jit, grad or vmap; {gradients}"
            )
        devices = x.devices()
        if len(devices) != 1 or next(iter(devices)).platform != "cpu":
            raise NotImplementedError(
                "is a JAX array that is not on one CPU device; anyflash takes JAX arrays on the "
                "CPU only"
            )
        x.block_until_ready()
        return x.shape, x.dtype.name, CPU

    def finish(self, result: Any) -> Any:
        return sys.modules["jax"].dlpack.from_dlpack(result)

    def draw_seed(self) -> int:
        raise ValueError(
            "needs a seed: JAX has no global random state to draw one from; pass seed=<int>, for "
            "example int(jax.random.bits(key, dtype='uint32')), or rng_state=(seed, offset)"
        )

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        return sys.modules["jax"].numpy.asarray(x, device=next(iter(like.devices())))
