"""TensorFlow's arrays: eager tensors on the CPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anyflash._arrays.base import CPU, FLOAT8, Device, Immutable, Instead

if TYPE_CHECKING:
    import numpy.typing as npt


class TensorFlow(Immutable):
    name = "TensorFlow"
    array = "a TensorFlow tensor"
    arrays = (
        "eager tensors are allowed, and a variable's value(); within a tf.function, call anyflash "
        "through tf.py_function"
    )
    as_bits = FLOAT8  # which DLPack export does not know
    to_int32 = ""  # tensors have no such method

    def read(self, x: Any, instead: Instead) -> tuple[tuple[int, ...], str, Device]:
        if _is_recorded(x):
            raise NotImplementedError(
                "is watched by a tf.GradientTape, and anyflash records nothing on it; use "
                f"tf.stop_gradient(), or the tape's stop_recording(); {instead.gradients}"
            )
        if "/device:CPU:" not in x.device:
            # Its stream cannot be had, which results would have to be ordered by.
            raise NotImplementedError(
                f"is on {x.device}; anyflash takes TensorFlow's tensors on the CPU only"
            )
        return tuple(x.shape), x.dtype.name, CPU

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        if x.dtype.name in FLOAT8:
            return sys.modules["numpy"].asarray(x).view("uint8")
        return x

    def finish(self, result: Any) -> Any:
        return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(result.__dlpack__())

    def draw_seed(self) -> int:
        tensorflow = sys.modules["tensorflow"]
        with tensorflow.device("CPU:0"):
            return int(tensorflow.random.uniform((), maxval=2**63 - 1, dtype="int64"))

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        tensorflow = sys.modules["tensorflow"]
        with tensorflow.device(like.device):
            return tensorflow.convert_to_tensor(x)


def _is_recorded(x: Any) -> bool:
    """Whether a gradient tape would want the gradient of what is computed from x.

    There is no public way to ask. Where TensorFlow lacks this module, tapes go unnoticed, and
    accumulators of forward mode (tf.autodiff) always do.
    """
    record = sys.modules.get("tensorflow.python.eager.record")
    return record is not None and bool(record.should_record_backprop([x]))
