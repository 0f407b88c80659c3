"""What a checkpoint says about its model: shapes, constants, and how rope is scaled."""

from dataclasses import dataclass

MOST_TURNS = 1e30
"""A bound of a blend that fp32, in which the frequencies are computed, holds with room to spare."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rope frequencies of a checkpoint differ from plain `theta ** (-2i / D)`.

    kind: "linear" divides all by `factor`; "llama3" and "yarn" divide the low ones and blend the
    middle, by turns in the original context and by channel; "factors" divides each by its entry of
    `freq_factors` (GGUF `rope_freqs.weight`).
    attention_factor: cos and sin are multiplied by it, whatever the kind.
    beta_fast, beta_slow: turns in the original context between which yarn blends.
    truncate: whether yarn's blend begins and ends at whole channels.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    freq_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def check(self) -> None:
        """Raises ValueError where the numbers describe no scaling."""
        if self.factor < 1:
            raise ValueError(f"rope factor {self.factor}: numbers from 1 on are supported")
        ranges = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": ("beta_slow", "beta_fast"),
        }
        if self.kind in ranges:
            low_name, high_name = ranges[self.kind]
            low, high = getattr(self, low_name), getattr(self, high_name)
            if not low < high:
                raise ValueError(f"{high_name} {high} is not above {low_name} {low}")
            if high > MOST_TURNS:
                raise ValueError(f"{high_name} {high}: numbers up to {MOST_TURNS} are supported")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one checkpoint, whatever format they were read from.

    Options beyond Llama: `qkv_bias` and `o_bias` add to the projections of attention; `qk_norm` is
    an RMSNorm over each head of q and k before rope.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads over {self.num_kv_heads} KV heads")
        if self.head_dim % 2 or not 4 <= self.head_dim <= 1024:
            raise ValueError(f"head_dim {self.head_dim}: even numbers from 4 to 1024 are supported")
        if self.rope_scaling:
            self.rope_scaling.check()
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta {self.rope_theta}: numbers above 1 are supported")
