"""What of two rows is compared: which figure, in which direction, and when it has changed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from derived import decode_rates, overall_tok_s, prefill_rates
from results import SPECS, Row

MIB_IN_GB = (1 << 20) / 1e9


class Kind(Enum):
    """How a change of a figure is judged; the two words say what it is if real."""

    SPEED = ("FASTER", "SLOWER")  # by an interval over processes
    BYTES = ("SMALLER", "LARGER")  # by size alone: runs of one setting take the same
    QUALITY = ("BETTER", "WORSE")  # by the standard errors that the rows carry, and their floor


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A compared figure.

    Attributes:
        name: of a column of `Row`.
        min_effect_pct: the least change worth a word, on a GPU and on a CPU.
        least_gb: of bytes: smaller changes are none.
        samples: of one process, in the figure's own unit.
    """

    name: str
    kind: Kind
    min_effect_pct: tuple[float, float] = (0.0, 0.0)
    least_gb: float = 0.0
    samples: Callable[[Row], list[float]] = lambda row: []

    @property
    def higher_is_better(self) -> bool:
        return SPECS[self.name].better == "higher"

    def value(self, row: Row) -> float | None:
        """The row's figure; of the rate over the whole run, as torchao counts, also of ours."""
        found = getattr(row, self.name)
        if found is None and self.name == "overall_tok_s":
            return overall_tok_s(row)
        return found

    def word(self, change: float) -> str:
        """The verdict on a real change of the figure."""
        good, bad = self.kind.value
        return good if (change > 0) == self.higher_is_better else bad


METRICS = {
    metric.name: metric
    for metric in (
        Metric(name="decode_tok_s", kind=Kind.SPEED, min_effect_pct=(2, 3), samples=decode_rates),
        Metric(name="prefill_tok_s", kind=Kind.SPEED, min_effect_pct=(3, 5), samples=prefill_rates),
        Metric(name="overall_tok_s", kind=Kind.SPEED, min_effect_pct=(3, 5)),
        Metric(name="compile_s", kind=Kind.SPEED, min_effect_pct=(20, 20)),
        Metric(name="peak_mem_gb", kind=Kind.BYTES, min_effect_pct=(1, 3), least_gb=64 * MIB_IN_GB),
        Metric(name="kv_cache_gb", kind=Kind.BYTES),
        Metric(name="model_size_gb", kind=Kind.BYTES),
        Metric(name="kl_mean", kind=Kind.QUALITY),
        Metric(name="ln_ppl_ratio", kind=Kind.QUALITY),
        Metric(name="needle_change", kind=Kind.QUALITY),
    )
}
DEFAULT_METRICS = (
    *("decode_tok_s", "prefill_tok_s", "peak_mem_gb", "kv_cache_gb"),
    *("kl_mean", "ln_ppl_ratio", "needle_change"),
)


def is_on_gpu(rows: Iterable[Row]) -> bool:
    """Whether rows were measured on a GPU, whose times vary less."""
    return any((row.device_name or "").startswith("NVIDIA") for row in rows)
