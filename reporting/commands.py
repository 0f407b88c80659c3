"""The commands of `results.py`: what each is called, its flags, and the function behind it."""

from dataclasses import dataclass
from pathlib import Path

from command import Command
from config import MISSING, flag
from reporting.compare import CompareConfig, compare
from reporting.export import ExportConfig, export
from reporting.html_report import ReportConfig, report
from reporting.origin import scan_origin
from reporting.plots import PlotConfig, plot
from reporting.table import TableConfig, table
from results import RowError, scan


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """Check every row of a file."""

    file: Path = flag(MISSING, help="the results file")
    debug: bool = flag(False, help="show the traceback of an error")


def validate(config: ValidateConfig) -> int:
    """Print each bad line, or the number of rows; 2 where there is a bad one."""
    entries, published = list(scan(config.file)), list(scan_origin(config.file))
    errors = [entry for entry in (*entries, *published) if isinstance(entry, RowError)]
    count = f"{len(entries)} rows" + f", {len(published)} of torchao" * bool(published)
    print("\n".join(map(str, errors)) or count)
    return 2 if errors else 0


COMMANDS: dict[str, Command] = {
    "compare": (compare, CompareConfig),
    "table": (table, TableConfig),
    "plot": (plot, PlotConfig),
    "report": (report, ReportConfig),
    "export": (export, ExportConfig),
    "validate": (validate, ValidateConfig),
}
