"""One call of the backward operation: the gradients are allocated, then it runs."""

from __future__ import annotations

from typing import Any

from anyflash import _core
from anyflash._arrays.base import FLOATS, Instead
from anyflash._call import parsing
from anyflash._call.call import Call
from anyflash._call.operands import Operands
from anyflash._call.options import GradientRequest
from anyflash._call.results import ArrayT, AttentionGrads

_FLOAT32 = ("float32",)
_FLAGS = ("causal", *GradientRequest._fields[:4], "accumulate_dq", "accumulate_dkv")
_OTHERS = ("bias", "sinks", "alibi_slopes")


def dq_sums_size(
    operation: str, q: Any, head_dim_v: int, softmax_scale: float | None, softcap: float
) -> int:
    """Bytes of ``DqSums.memory`` for the rows of q, (batch, rows, heads, head_dim). 0: the kernel
    that computes their gradients keeps no such sums."""
    operands = Operands(operation, "q", q)
    _, dtype = operands.read("q", q)
    exported = operands.framework.export(q, operands.device, None)  # nothing reads it
    bits = operands.as_bits(dtype)
    return _core.dq_sums_size(operation, exported, bits, head_dim_v, softmax_scale, softcap)


class Backward(Call[ArrayT]):
    __slots__ = ()
    _instead = Instead(
        "anyflash.torch.attention and anyflash.jax.attention have gradients of gradients",
        "inside jax.jit, grad and vmap, jax.vjp of anyflash.jax.attention gives gradients",
    )

    def _draw_seed(self) -> int:
        raise ValueError(
            "needs the random state of the forward: pass the rng_state of its AttentionResult, or "
            "the seed that it was given"
        )

    def run(
        self, dout: Any, out: Any, lse: Any, dlse: Any, request: GradientRequest
    ) -> AttentionGrads[ArrayT]:
        operands = self._operands
        framework, device = operands.framework, operands.device
        causal, deterministic, *others_wanted, accumulate_dq, accumulate_dkv = parsing.flag_values(
            operands.operation,
            _FLAGS,
            (self._given.causal, *request[:4], request.accumulate_dq, request.accumulate_dkv),
        )
        allowed = _FLOAT32 if self._dtype == "float32" else (self._dtype, "float32")
        operands.read("dout", dout, allowed)
        operands.read("out", out, allowed)
        operands.read("lse", lse, _FLOAT32)
        if dlse is not None:
            operands.read("dlse", dlse, _FLOAT32)
        grad_dtype = request.grad_dtype
        if grad_dtype is not None:
            grad_dtype = operands.parse("grad_dtype", parsing.dtype, grad_dtype, allowed)
            allowed = (grad_dtype,)
        given = {"dq": request.dq, "dk": request.dk, "dv": request.dv}
        if accumulate_dq or accumulate_dkv:
            self._check_targets(given, accumulate_dq, accumulate_dkv)
        dtype = self._common_dtype(given, allowed)
        asked = {
            name: self._shape_and_dtype(name, grad_dtype)
            for name, wanted in zip(_OTHERS, others_wanted, strict=True)
            if wanted
        }
        written = {name: x for name, x in given.items() if x is not None}
        if written:
            self._check_apart(written, {"dout": dout, "out": out, "lse": lse, "dlse": dlse})
        softmax_scale, stream = self._numbers(request.stream)
        self._export_options(stream)

        gradients = [
            operands.empty(shape, dtype) if x is None else x
            for x, shape in zip(given.values(), self._shapes, strict=True)
        ]
        options: dict[str, Any] = {"deterministic": deterministic}
        if accumulate_dq or accumulate_dkv:
            options["accumulate_dq"], options["accumulate_dkv"] = accumulate_dq, accumulate_dkv
        if request.dq_sums is not None:
            memory, *rows = request.dq_sums
            options["dq_sums"] = (framework.export_out(memory, device), False)
            options["dq_sums_rows"] = tuple(rows)
        if dlse is not None:
            options["dlse"] = (framework.export(dlse, device, stream), False)
        others = {}
        for name, (shape, kind) in asked.items():
            others[name] = operands.empty(shape, kind)
            exported = framework.export_out(others[name], device)
            options[f"d{name}"] = (exported, operands.as_bits(kind))
        queue, allocate = self._launch(stream)
        read = (dout, *self._tensors, out, lse)
        _core.backward(
            operands.operation,
            (
                *[framework.export(x, device, stream) for x in read],
                *[framework.export_out(x, device) for x in gradients],
            ),
            softmax_scale,
            causal,
            queue,
            operands.as_bits(self._dtype),
            self._options or None,
            options,
            allocate,
        )
        return AttentionGrads(
            *[
                framework.finish(new) if old is None else old
                for new, old in zip(gradients, given.values(), strict=True)
            ],
            *[framework.finish(others[name]) if name in others else None for name in _OTHERS],
        )

    def _check_apart(self, written: dict[str, Any], others: dict[str, Any]) -> None:
        """What is given to be written: from one another, and from all that is read."""
        arrays = {name: x for name, (x, _) in self._arrays.items()}
        read = dict(zip("qkv", self._tensors, strict=True)) | others | arrays
        inputs = {name: x for name, x in read.items() if x is not None}
        self._operands.check_apart(written, inputs, {})

    def _check_targets(self, given: dict[str, Any], dq: bool, dkv: bool) -> None:
        """What is added to is given."""
        for option, is_set, names in (
            ("accumulate_dq", dq, ("dq",)),
            ("accumulate_dkv", dkv, ("dk", "dv")),
        ):
            for name in names:
                if is_set and given[name] is None:
                    raise ValueError(
                        f"{self._operands.operation}: {option} is set, but {name} is not given; "
                        "pass the array that the gradient is added to"
                    )

    def _common_dtype(self, given: dict[str, Any], allowed: tuple[str, ...]) -> str:
        """Of dq, dk and dv: that of those which are given, or else the first one allowed."""
        operands = self._operands
        first = None
        for name, x in given.items():
            if x is None:
                continue
            dtype = operands.output(name, x, allowed)
            if first is None:
                first = name, dtype
            elif dtype != first[1]:
                raise TypeError(
                    f"{operands.operation}: {name} is {dtype}, but {first[0]} is {first[1]}; dq, "
                    "dk and dv must have one dtype"
                )
        return allowed[0] if first is None else first[1]

    def _shape_and_dtype(self, name: str, grad_dtype: str | None) -> tuple[tuple[int, ...], str]:
        """Of the gradient of an option."""
        operands = self._operands
        if name not in self._arrays:
            raise ValueError(
                f"{operands.operation}: return_d{name} is set, but {name} is not given; pass the "
                f"{name} that the forward was given"
            )
        x, dtype = self._arrays[name]
        if dtype == "bool":
            raise TypeError(
                f"{operands.operation}: return_d{name} is set, but {name} is bool, a mask, which "
                "has no gradient"
            )
        shape, _ = operands.read(name, x, FLOATS)
        return shape, "float32" if grad_dtype == "float32" else dtype
