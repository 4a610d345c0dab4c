"""One call of the forward operation: its results are allocated, then it runs."""

from __future__ import annotations

from typing import Any

from anyflash import _core
from anyflash._call import parsing
from anyflash._call.call import Call
from anyflash._call.options import CAUSAL, OUTPUT_ALONE, PLAIN, OutputRequest
from anyflash._call.results import ArrayT, AttentionResult, Returned

_LSE = ("float32", "float64")
_IN_PLACE = {"out": ("prior_out",), "lse": ("prior_lse",)}
_FLAGS = ("causal", *OutputRequest._fields[:4])


class Forward(Call[ArrayT]):
    __slots__ = ()

    def run(self, outputs: OutputRequest) -> Returned[ArrayT]:
        given = self._given
        is_plain = given is PLAIN or given is CAUSAL
        if is_plain and outputs is OUTPUT_ALONE and not self._arrays:  # nothing is left to read
            result = self._operands.empty(self._out_shape, None)
            self._compute(result, None, None, given.causal, None)
            finished: ArrayT = self._operands.framework.finish(result)
            return finished
        return self._run(outputs)

    def _run(self, outputs: OutputRequest) -> Returned[ArrayT]:
        operands = self._operands
        framework = operands.framework
        out_dtype, out, stream, lse_given, prior = outputs[4:]
        flags = self._given.causal, *outputs[:4]
        causal, return_lse, return_max_logits, return_dropout_mask, return_result = (
            parsing.flag_values(operands.operation, _FLAGS, flags)
        )
        softmax_scale, stream = self._numbers(stream)
        if prior is not None:
            self._read_prior(prior)
        self._export_options(stream)

        result = self._out(out, out_dtype)
        batch, heads = self._batch, self._out_shape[-2]
        max_logits = dropout_mask = lse_target = None
        lse: Any = None
        if return_max_logits:
            max_logits = self._output("max_logits", (batch, heads), "float32")
        if return_dropout_mask:
            dropout_mask = self._output("dropout_mask", (batch, heads, *self._lengths), "bool")
        whole = return_result or return_max_logits or return_dropout_mask
        if lse_given is not None:
            operands.output("lse", lse_given, _LSE)
            lse = lse_given
        elif return_lse or whole:
            lse = self._new_lse()
        if out is not None or lse_given is not None:
            self._check_apart(dict(zip("qkv", self._tensors, strict=True)), out=out, lse=lse_given)
        if lse is not None:
            lse_target = framework.export_out(lse, operands.device)

        self._compute(result, lse_target, softmax_scale, causal, stream)
        if out is None:
            result = framework.finish(result)
        if lse is not None and lse_given is None:
            lse = framework.finish(lse)
        if whole:
            return AttentionResult(
                result,
                lse,
                None if max_logits is None else framework.finish(max_logits),
                self._rng_state,
                None if dropout_mask is None else framework.finish(dropout_mask),
            )
        return (result, lse) if return_lse else result

    def _compute(
        self, out: Any, lse: Any, softmax_scale: float | None, causal: bool, stream: int | None
    ) -> None:
        """Into the array ``out`` and the exported ``lse``."""
        operands = self._operands
        framework, device = operands.framework, operands.device
        q, k, v = self._tensors
        queue, allocate = self._launch(stream)
        _core.forward(
            operands.operation,
            framework.export(q, device, stream),
            framework.export(k, device, stream),
            framework.export(v, device, stream),
            framework.export_out(out, device),
            lse,
            softmax_scale,
            causal,
            queue,
            operands.as_bits(self._dtype),
            self._options or None,
            allocate,
        )

    def _read_prior(self, prior: Any) -> None:
        """The result over other keys."""
        if not isinstance(prior, (tuple, list)) or len(prior) != 2:
            is_sequence = isinstance(prior, (tuple, list))
            given = f"{len(prior)} values" if is_sequence else type(prior).__name__
            raise TypeError(
                f"{self._operands.operation}: prior is {given}; (out, lse) of other keys is allowed"
            )
        for name, x in zip(("prior_out", "prior_lse"), prior, strict=True):
            self._array(name, x, _LSE)

    def _check_apart(self, inputs: dict[str, Any], **outputs: Any) -> None:
        """What is given to be written: from one another, the inputs and the options."""
        inputs |= {name: x for name, (x, _) in self._arrays.items()}
        given = {name: x for name, x in outputs.items() if x is not None}
        self._operands.check_apart(given, inputs, _IN_PLACE)

    def _out(self, out: Any, out_dtype: Any) -> Any:
        """The array for the result."""
        operands = self._operands
        if out is None and out_dtype is None:
            return operands.empty(self._out_shape, None)
        allowed = tuple(dict.fromkeys((self._dtype, "float32")))
        if out_dtype is not None:
            allowed = (operands.parse("out_dtype", parsing.dtype, out_dtype, allowed),)
        if out is None:
            return operands.empty(self._out_shape, allowed[0])
        operands.output("out", out, allowed)
        return out

    def _new_lse(self) -> Any:
        length, heads = self._out_shape[-3:-1]
        return self._operands.empty((*self._out_shape[:-3], heads, length), "float32")

    def _output(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array that is written besides the result."""
        operands = self._operands
        array = operands.empty(shape, dtype)
        self._options[name] = (operands.framework.export_out(array, operands.device), False)
        return array
