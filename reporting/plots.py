"""The plots: which there are, which rows each draws, and the command that writes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from config import MISSING, UserError, flag, printable
from reporting.canvas import save
from reporting.plot_memory import (
    draw_memory,
    draw_pareto,
    memory_points,
    pareto_points,
)
from reporting.plot_quality import (
    bytes_points,
    draw_bytes,
    draw_quality,
    quality_points,
)
from reporting.plot_speed import (
    decode_points,
    draw_decode,
    draw_prefill,
    draw_step,
    prefill_points,
    step_points,
)
from reporting.select import ALL_HELP, FILE_HELP, WHERE_HELP, select_newest
from reporting.series import Point
from results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot.

    Attributes:
        kind: of the rows that it draws.
        needs: fields that a row must have, unless it failed.
        points: of the rows, what is drawn of each: the CSV.
        draw: the rows and their points.
    """

    kind: str
    needs: tuple[str, ...]
    points: Callable[[Sequence[Row]], list[Point]]
    draw: "Callable[[Sequence[Row], Sequence[Point]], Figure]"

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Those that this plot draws; none where all of them failed."""
        own = [row for row in rows if row.kind == self.kind and self._draws(row)]
        return own if any(row.status == "ok" for row in own) else []

    def _draws(self, row: Row) -> bool:
        has_all = all(getattr(row, name) is not None for name in self.needs)
        return has_all or row.status not in ("ok", "interrupted")


SETTINGS = ("depth", "prompt_len", "new_tokens", "batch_size")
PLOTS: dict[str, Plot] = {
    "decode": Plot(
        kind="speed", needs=("decode_tok_s", *SETTINGS), points=decode_points, draw=draw_decode
    ),
    "step": Plot(
        kind="speed", needs=("decode_tok_s", *SETTINGS), points=step_points, draw=draw_step
    ),
    "prefill": Plot(
        kind="speed", needs=("prefill_tok_s", *SETTINGS), points=prefill_points, draw=draw_prefill
    ),
    "memory": Plot(
        kind="speed",
        needs=("cache_len", "model_size_gb", "kv_cache_gb", "expected_gb"),
        points=memory_points,
        draw=draw_memory,
    ),
    "pareto": Plot(
        kind="speed",
        needs=("decode_tok_s", "peak_mem_gb", "kv_cache_gb", *SETTINGS),
        points=pareto_points,
        draw=draw_pareto,
    ),
    "quality": Plot(
        kind="quality", needs=("kl_mean", "context"), points=quality_points, draw=draw_quality
    ),
    "bytes": Plot(
        kind="quality",
        needs=("kl_mean", "kv_bytes_per_token"),
        points=bytes_points,
        draw=draw_bytes,
    ),
}


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Draw rows as SVG and PNG, with the plotted numbers as CSV."""

    name: str = flag(MISSING, choices=("all", *PLOTS), help="which plot; all: each that has rows")
    file: str = flag(MISSING, help=FILE_HELP)
    out: Path = flag(Path("plots"), help="the folder for NAME.svg, NAME.png and NAME.csv")
    where: str = flag("", help=WHERE_HELP)
    all: bool = flag(False, help=ALL_HELP)
    debug: bool = flag(False, help="show the traceback of an error")


def plot(config: PlotConfig) -> None:
    """Write the plots that were asked for, and print the names of their files."""
    rows = select_newest(config.file, config.where, config.all)
    names = [name for name in PLOTS if config.name in (name, "all") and PLOTS[name].rows(rows)]
    if not names:
        needs = ", ".join(PLOTS[config.name].needs) if config.name in PLOTS else "what a plot needs"
        raise UserError(
            f"{printable(config.file)}: no row to draw: none that went well has {needs}"
        )
    for name in names:
        own = PLOTS[name].rows(rows)
        points = PLOTS[name].points(own)
        for path in save(PLOTS[name].draw(own, points), points, config.out / name):
            print(path)
