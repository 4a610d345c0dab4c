"""JAX's concrete arrays."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from anyflash._arrays.base import CPU, Device, Immutable, Instead

if TYPE_CHECKING:
    import numpy.typing as npt


@functools.cache
def _described(device: Any) -> Device:
    number = sys.modules["jax"].local_devices(backend="cpu").index(device)
    return Device("cpu", number) if number else CPU


class Jax(Immutable):
    """Concrete arrays on the CPU."""

    name = "JAX"
    array = "a JAX array"

    def read(self, x: Any, instead: Instead) -> tuple[tuple[int, ...], str, Device]:
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer):
            raise NotImplementedError(f"is a JAX tracer; {instead.traced}")
        devices = x.devices()
        device = next(iter(devices))
        if len(devices) != 1 or device.platform != "cpu":
            raise NotImplementedError(
                "is a JAX array that is not on one CPU device; anyflash takes JAX arrays on the "
                "CPU only"
            )
        x.block_until_ready()
        return x.shape, x.dtype.name, _described(device)

    def finish(self, result: Any) -> Any:
        jax, number = sys.modules["jax"], result.device.number
        if number == 0:
            return jax.dlpack.from_dlpack(result)
        # DLPack has one CPU, of which JAX may have made several devices.
        return jax.dlpack.from_dlpack(result, device=jax.local_devices(backend="cpu")[number])

    def draw_seed(self) -> int:
        raise ValueError(
            "needs a seed: JAX has no global random state to draw one from; pass seed=<int>, for "
            "example int(jax.random.bits(key, dtype='uint32')), or rng_state=(seed, offset)"
        )

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        return sys.modules["jax"].numpy.asarray(x, device=next(iter(like.devices())))
