"""anyflash.flash_attn.install(): programs that import flash_attn find it. Each in a process."""

from __future__ import annotations

from pathlib import Path

from calls.flash_attn_programs import run


def test_installed() -> None:
    """Names, specs, metadata, operators; twice does what once does."""
    run("""
fa.install()
fa.install()
import flash_attn, flash_attn_2_cuda
import flash_attn.flash_attn_interface as interface
from flash_attn import flash_attn_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary
from anyflash.flash_attn import bert_padding, flash_attn_interface

assert flash_attn_func is fa.flash_attn_func is interface.flash_attn_func
assert interface._flash_attn_forward is flash_attn_interface._flash_attn_forward
assert unpad_input is bert_padding.unpad_input
assert callable(flash_attn_2_cuda.varlen_bwd)
assert flash_attn.__version__ == "2.8.3"
for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn_2_cuda", "flash_attn.ops.triton"):
    module, spec = sys.modules[name], importlib.util.find_spec(name)
    assert (spec.name, module.__name__, module.__spec__) == (name, name, spec)
    assert module.__file__ == spec.origin
assert fa.__spec__.name == "anyflash.flash_attn"
assert importlib.util.find_spec("flash_attn").submodule_search_locations is not None

for name in ("flash_attn", "flash-attn", "Flash.Attn"):
    assert importlib.metadata.version(name) == "2.8.3", name
assert importlib.metadata.metadata("flash_attn")["Name"] == "flash_attn"
found = importlib.metadata.packages_distributions()
assert found["flash_attn"] == found["flash_attn_2_cuda"] == ["flash_attn"]
for name in ("flash_attn_3", "flash"):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    raise AssertionError(name)
for name in ("flash_attn.modules", "flash_attn.losses.cross_entropy", "flash_attn._install"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert "flash_attn" in str(error)
        continue
    raise AssertionError(name)
assert importlib.util.find_spec("flash_attn_3") is None
""")


def test_operators() -> None:
    """torch.ops.flash_attn: schemas and fake tensors."""
    run("""
assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")
fa.install()
ops = torch.ops.flash_attn
q = torch.randn(2, 5, 4, 16)
k = torch.randn(2, 7, 2, 16)
cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 10], [0, 7, 14]))
dense = (0.0, 0.25, True, -1, -1, 0.0, None)
packing = (cu_q, cu_k, 5, 7)
fq, fk = q.flatten(0, 1), k.flatten(0, 1)
checks = ("test_schema", "test_faketensor")
for dropout_p in (0.0, 0.5):
    options = (dropout_p, *dense[1:])
    mask = dropout_p > 0
    for name, given in (
        ("_flash_attn_forward", (q, k, k, *options, mask)),
        ("_flash_attn_varlen_forward", (fq, fk, fk, *packing, *options, mask)),
    ):
        operator = getattr(ops, name).default
        if mask:  # whose results are random: the schema's check compares two calls
            checks = ("test_faketensor",)
        torch.library.opcheck(operator, given, test_utils=checks)
        asked = (*given[:-1], True)  # without dropout there is no mask
        torch.library.opcheck(operator, asked, test_utils=("test_faketensor",))
checks = ("test_schema", "test_faketensor")
out, lse, mask, state = ops._flash_attn_forward(q, k, k, *dense, False)
right, right_lse, _ = fa.flash_attn_func(
    q, k, k, softmax_scale=0.25, causal=True, return_attn_probs=True
)
assert torch.equal(out, right) and torch.equal(lse, right_lse)
grads = [torch.empty_like(x) for x in (q, k, k)]
given = (q, q, k, k, out, lse, *grads, *dense, False, None)
torch.library.opcheck(ops._flash_attn_backward.default, given, test_utils=checks)
ops._flash_attn_backward(*given)
given = (fq, fk, fk, *packing, *dense, False)
out, lse, _, _ = ops._flash_attn_varlen_forward(*given, num_splits=1)
flat = [torch.empty_like(x) for x in (fq, fk, fk)]
given = (fq, fq, fk, fk, out, lse, *flat, *packing, *dense, False, None, False)
torch.library.opcheck(ops._flash_attn_varlen_backward.default, given, test_utils=checks)
ops._flash_attn_varlen_backward(*given)
for x, y in zip(grads, flat):
    assert torch.equal(x.flatten(0, 1), y)
""")


def real(folder: Path) -> None:
    package = folder / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.0'\n")
    info = folder / "flash_attn-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.0\n")


def test_another_one_is_kept(tmp_path: Path) -> None:
    """And named; force takes its place, also where it was imported."""
    real(tmp_path)
    run(
        """
try:
    fa.install()
except RuntimeError as error:
    message = str(error)
assert message.startswith("anyflash.flash_attn.install: flash_attn is already here, from ")
assert "force=True" in message
assert importlib.metadata.version("flash_attn") == "2.0"
import flash_attn
assert flash_attn.__version__ == "2.0"
fa.install(force=True)
import flash_attn
assert flash_attn.flash_attn_func is fa.flash_attn_func
assert importlib.metadata.version("flash_attn") == "2.8.3"
""",
        tmp_path,
    )
