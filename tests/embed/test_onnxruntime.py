"""cpp/examples/onnxruntime: a transformer as an ONNX model, its attention once of ONNX Runtime's
own operators and once of ours, run by the onnxruntime package."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from programs import EXAMPLES

Array = npt.NDArray[Any]
Nodes = list[onnx.NodeProto]
LAYERS, BATCH, TOKENS, HEADS, HEADS_K, HEAD_DIM = 2, 2, 45, 8, 2, 16
WIDTH = HEADS * HEAD_DIM
# The header is in no package of PyPI: this folder has what the example needs of it.
HEADER = os.environ.get("ONNXRUNTIME_INCLUDE_DIR", str(Path(__file__).parent / "onnxruntime"))


class Graph:
    """Nodes in order; each method appends some and returns the name of the result."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.nodes: Nodes = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: Array) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def number(self, value: Any) -> str:
        return self.constant(np.asarray(value, self.dtype))

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def shaped(self, x: str, *shape: int) -> str:
        return self.add("Reshape", x, self.constant(np.array(shape, np.int64)))


def own_attention(g: Graph, q: str, k: str, v: str, bias: str) -> str:
    """softmax(q k^T / sqrt(head_dim) + bias) v, causal; q (batch, tokens, heads, head_dim)."""
    repeated = []
    for t in (k, v):
        ones = g.constant(np.array([1, 1, 1, HEADS // HEADS_K, 1], np.int64))
        spread = g.add("Expand", g.shaped(t, BATCH, TOKENS, HEADS_K, 1, HEAD_DIM), ones)
        repeated.append(g.shaped(spread, BATCH, TOKENS, HEADS, HEAD_DIM))
    queries = g.add("Transpose", q, perm=[0, 2, 1, 3])
    keys = g.add("Transpose", repeated[0], perm=[0, 2, 3, 1])
    values = g.add("Transpose", repeated[1], perm=[0, 2, 1, 3])
    scores = g.add("Mul", g.add("MatMul", queries, keys), g.number(HEAD_DIM**-0.5))
    hidden = g.number(np.triu(np.full((TOKENS, TOKENS), -np.inf), 1))
    scores = g.add("Add", g.add("Add", scores, bias), hidden)
    result = g.add("MatMul", g.add("Softmax", scores, axis=-1), values)
    return g.add("Transpose", result, perm=[0, 2, 1, 3])


def our_attention(g: Graph, q: str, k: str, v: str, bias: str) -> str:
    return g.add("Attention", q, k, v, bias, domain="anyflash", causal=1)


def model(attention: Callable[..., str], dtype: Any) -> bytes:
    rng = np.random.default_rng(3)
    g = Graph(dtype)

    def matrix(*shape: int) -> str:
        return g.number(rng.standard_normal(shape) / shape[0] ** 0.5)

    ones = g.number(np.ones(WIDTH))
    bias = g.number(rng.standard_normal((1, HEADS, TOKENS, TOKENS)))
    x = "x"
    for _ in range(LAYERS):
        y = g.add("LayerNormalization", x, ones)
        q = g.shaped(g.add("MatMul", y, matrix(WIDTH, WIDTH)), BATCH, TOKENS, HEADS, HEAD_DIM)
        k, v = (
            g.shaped(
                g.add("MatMul", y, matrix(WIDTH, HEADS_K * HEAD_DIM)),
                *(BATCH, TOKENS, HEADS_K, HEAD_DIM),
            )
            for _ in range(2)
        )
        result = g.shaped(attention(g, q, k, v, bias), BATCH, TOKENS, WIDTH)
        x = g.add("Add", x, g.add("MatMul", result, matrix(WIDTH, WIDTH)))
        y = g.add("MatMul", g.add("LayerNormalization", x, ones), matrix(WIDTH, 2 * WIDTH))
        x = g.add("Add", x, g.add("MatMul", g.add("Relu", y), matrix(2 * WIDTH, WIDTH)))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    g.nodes.append(helper.make_node("Identity", [x], ["y"]))
    shape = [BATCH, TOKENS, WIDTH]
    graph = helper.make_graph(
        g.nodes,
        "transformer",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, shape)],
        g.constants,
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("anyflash", 1)]
    made: bytes = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
    return made


@pytest.fixture(scope="module")
def options(build: Callable[..., Path], library: Path) -> onnxruntime.SessionOptions:
    config = library / "cmake" / "anyflash"
    folder = build(
        EXAMPLES / "onnxruntime",
        f"-Danyflash_DIR={config}",
        f"-DONNXRUNTIME_INCLUDE_DIR={HEADER}",
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(folder / "libanyflash_onnxruntime.so"))
    return options


def session(data: bytes, options: onnxruntime.SessionOptions | None) -> Any:
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def launches(library: Path) -> int:
    """Calls of our kernels in this process; the operator's library is loaded already."""
    ours = ctypes.CDLL(str(library / "libanyflash.so.0"))
    ours.anyflash_kernel_launches.restype = ctypes.c_uint64
    ours.anyflash_kernel_launches.argtypes = [ctypes.c_size_t]
    return sum(ours.anyflash_kernel_launches(i) for i in range(ours.anyflash_kernel_count()))


def test_model(options: onnxruntime.SessionOptions, library: Path) -> None:
    """Equal but for rounding, which the model in the next larger type measures."""
    for dtype, wider in ((np.float32, np.float64), (np.float16, np.float32)):
        x = np.random.default_rng(4).standard_normal((BATCH, TOKENS, WIDTH)).astype(dtype)
        reference = session(model(own_attention, wider), None).run(["y"], {"x": x.astype(wider)})[0]
        own = session(model(own_attention, dtype), None).run(["y"], {"x": x})[0]
        before = launches(library)
        ours = session(model(our_attention, dtype), options).run(["y"], {"x": x})[0]
        assert launches(library) - before == LAYERS
        assert ours.dtype == own.dtype == dtype and np.isfinite(ours).all()
        allowed = 2 * np.abs(own.astype(wider) - reference).max()
        assert np.abs(ours.astype(wider) - reference).max() <= allowed


def test_errors(options: onnxruntime.SessionOptions) -> None:
    """What the library refuses is ONNX Runtime's error, with its message."""
    value = helper.make_tensor_value_info
    shapes = {"q": [1, 3, 4, 8], "k": [1, 3, 3, 8], "v": [1, 3, 3, 8]}
    node = helper.make_node("Attention", [*shapes], ["y"], domain="anyflash", softmax_scale=0.5)
    graph = helper.make_graph(
        [node],
        "wrong",
        [value(name, TensorProto.FLOAT, ["a", "b", "c", "d"]) for name in shapes],
        [value("y", TensorProto.FLOAT, None)],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("anyflash", 1)]
    data = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
    runner = session(data, options)
    inputs = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(Exception, match="k has 3 heads, which does not divide q's 4"):
        runner.run(["y"], inputs)
    inputs["k"] = inputs["v"] = np.ones((1, 3, 2, 8), np.float32)
    assert np.array_equal(runner.run(["y"], inputs)[0], np.ones((1, 3, 4, 8), np.float32))
