"""One problem of a benchmark, and how much arithmetic and memory traffic it is."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
CACHE_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # of caches of 8 bits
# Matrix products, of 2 * pairs * d each, with the head dims of q and k, and of v.
PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> float:
    """(query, key) pairs of one head. A square causal mask counts as half of them, as in
    FlashAttention-2's paper (exact would be half a row more); others are counted exactly."""
    if not causal:
        return seqlen_q * seqlen_k
    if seqlen_q == seqlen_k:
        return seqlen_q * seqlen_k / 2
    if seqlen_q > seqlen_k:  # the first queries see nothing
        return seqlen_k * (seqlen_k + 1) / 2
    return seqlen_q * (seqlen_k - seqlen_q) + seqlen_q * (seqlen_q + 1) / 2


def tree_lengths(seqlen: int) -> tuple[int, int]:
    """A prompt of half of the tokens, and each of eight answers to it."""
    return seqlen - seqlen // 16 * 8, seqlen // 16


def ranges_pairs(feature: str, seqlen: int) -> float:
    """Pairs that key_ranges leave, a causal triangle counted as half of its square."""
    if feature == "8 documents":
        return 8 * (seqlen / 8) ** 2 / 2
    if feature == "prefix of a quarter":
        return (seqlen**2 + (seqlen // 4) ** 2) / 2
    if feature == "tree of 8 answers":
        prompt, answer = tree_lengths(seqlen)
        return prompt**2 / 2 + 8 * (answer * prompt + answer**2 / 2)
    return seqlen**2 / 2  # of all


KEY_RANGES = ("ranges of all", "8 documents", "prefix of a quarter", "tree of 8 answers")


@dataclass(frozen=True)
class Case:
    """A problem: sizes, options, what is done with it, how it is timed, and the unit of the result.

    `op` is "forward", "backward", "both", "decode", or "call" (the cost of a call on the host).
    Packed problems have `lengths`, and `batch` is their number. `seqlen` is the longest one.
    """

    op: str
    batch: int
    seqlen: int
    heads: int
    d: int
    dtype: str
    heads_k: int = 0  # 0: as many as heads
    seqlen_k: int = 0  # 0: as many as seqlen
    causal: bool = False
    feature: str = ""
    lengths: tuple[int, ...] = ()
    packing: str = ""
    page_size: int = 0
    cache_dtype: str = ""  # "": dtype
    framework: str = ""
    model: str = ""  # whose block's attention it is
    timing: str = "events"  # or "graph": replayed from a CUDA graph; "memory": bytes, not seconds
    unit: str = "TFLOP/s"  # or "GFLOP/s", "ms", "us", "MiB"
    d_v: int = 0  # of v; 0: as q's
    # Of a sequence that several devices share; `flop` is then one's share.
    method: str = ""
    ranks: int = 1
    transport: str = ""  # "nccl", "gloo", or "alone": one device does a rank's work after the other

    @property
    def kv_heads(self) -> int:
        return self.heads_k or self.heads

    @property
    def keys(self) -> int:
        return self.seqlen_k or self.seqlen

    @property
    def rows(self) -> int:
        """Of a sequence, or of all that are packed together."""
        return sum(self.lengths) if self.lengths else self.seqlen

    @property
    def value_dim(self) -> int:
        return self.d_v or self.d

    @property
    def latent(self) -> bool:
        """Whether the values are the first columns of the keys, as MLA decodes."""
        return self.op == "decode" and self.d_v > 0

    @property
    def labels(self) -> dict[str, str]:
        """What tells cases apart, in the order of a table's columns."""
        grouped = self.kv_heads != self.heads
        labels = {
            "op": self.op,
            "framework": self.framework,
            "model": self.model,
            "dtype": self.dtype,
            "feature": self.feature,
            "ranks": str(self.ranks) if self.method else "",
            "method": self.method,
            "transport": self.transport,
            "heads": f"{self.heads}/{self.kv_heads}" if grouped else str(self.heads),
            "d": f"{self.d}/{self.d_v}" if self.d_v else str(self.d),
            "mask": "causal" if self.causal else "full",
            "packing": self.packing,
            "cache": self._cache if self.op == "decode" else "",
            "timing": "" if self.timing == "events" else self.timing,
            "batch": str(self.batch),
            "seqlen": str(self.seqlen),
            "tokens": str(self.rows) if self.method and self.lengths else "",
            "context": str(self.seqlen_k) if self.seqlen_k else "",
        }
        if self.op == "decode":
            labels["queries"] = labels.pop("seqlen")
            del labels["mask"]
        return {name: value for name, value in labels.items() if value}

    @property
    def _cache(self) -> str:
        layout = f"pages of {self.page_size}" if self.page_size else "contiguous"
        return f"{self.cache_dtype}, {layout}" if self.cache_dtype else layout

    @property
    def key(self) -> str:
        """The same in every run of the same problem."""
        return " ".join(f"{name}={value}" for name, value in self.labels.items())

    @property
    def flop(self) -> float:
        """Floating-point operations, as FlashAttention-2's paper counts them; 0 where a feature
        hides pairs, so that nobody could say."""
        if self.op not in PRODUCTS or self.feature not in {"", "plain", *KEY_RANGES}:
            return 0.0
        if self.feature in KEY_RANGES:
            pairs = self.batch * ranges_pairs(self.feature, self.seqlen)
        elif self.lengths:
            pairs = sum(visible_pairs(n, n, self.causal) for n in self.lengths)
        else:
            pairs = self.batch * visible_pairs(self.seqlen, self.keys, self.causal)
        with_d, with_d_v = PRODUCTS[self.op]
        columns = with_d * self.d + with_d_v * self.value_dim
        return 2 * pairs * self.heads * columns / self.ranks

    @property
    def bytes(self) -> int:
        """What a decoding step must read and write: K, V, Q and the output; else 0."""
        if self.op != "decode":
            return 0
        columns = self.d if self.latent else self.d + self.value_dim
        cache = self.batch * self.keys * self.kv_heads * columns
        rows = self.batch * self.seqlen * self.heads * (self.d + self.value_dim)
        item = ITEM_SIZES[self.dtype]
        return cache * (1 if self.cache_dtype else item) + rows * item

    @property
    def scores_bytes(self) -> int:
        """Of the matrix of scores in float32, which a program without tiles would write."""
        return 4 * self.batch * self.heads * self.seqlen * self.keys
