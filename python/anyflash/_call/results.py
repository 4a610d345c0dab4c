"""What the functions return where they return several arrays."""

from __future__ import annotations

import sys
from collections import namedtuple
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

ArrayT = TypeVar("ArrayT")  # the framework's array

if TYPE_CHECKING or sys.version_info >= (3, 11):

    class AttentionResult(NamedTuple, Generic[ArrayT]):
        """What :func:`attention` can give besides its output; None where it was not asked for.

        Attributes
        ----------
        out : (batch, seqlen_q, heads, head_dim_v), packed: (total_q, heads, head_dim_v)
        lse : (batch, heads, seqlen_q), packed: (heads, total_q), float32
            Natural logarithm of the softmax's denominator.
        max_logits : (batch, heads), float32
            The largest score that no mask removed, -inf where there is none.
        rng_state : (seed, offset), or the array that was given
            What dropout was done with; give it as ``rng_state`` to repeat it.
        dropout_mask : (batch, heads, seqlen_q, seqlen_k), bool
            True where dropout kept the probability, whether or not a mask hides it.
        """

        out: ArrayT
        lse: ArrayT
        max_logits: ArrayT | None
        rng_state: Any
        dropout_mask: ArrayT | None

    class AttentionGrads(NamedTuple, Generic[ArrayT]):
        """What :func:`attention_backward` gives; None where it was not asked for.

        Attributes
        ----------
        dq, dk, dv : as q, k, v
        dbias : as bias
            Summed over the axes that bias is broadcast along.
        dsinks : as sinks
        dalibi_slopes : as alibi_slopes
        """

        dq: ArrayT
        dk: ArrayT
        dv: ArrayT
        dbias: ArrayT | None
        dsinks: ArrayT | None
        dalibi_slopes: ArrayT | None

else:  # Python 3.10, whose named tuples cannot be generic
    AttentionResult = namedtuple("AttentionResult", "out lse max_logits rng_state dropout_mask")
    AttentionGrads = namedtuple("AttentionGrads", "dq dk dv dbias dsinks dalibi_slopes")

# By a forward.
Returned: TypeAlias = "ArrayT | tuple[ArrayT, ArrayT] | AttentionResult[ArrayT]"

# Where pickle looks for them, wherever this file lies.
AttentionResult.__module__ = AttentionGrads.__module__ = "anyflash"
