"""Weight-only quantisation of a checkpoint; the table of formats is empty, all are refused.

python quantize.py SRC DST --quantization int8
"""

import sys

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

from dataclasses import MISSING, dataclass
from pathlib import Path

from torch import nn

from config import UserError, flag

WEIGHT_FORMATS: dict[str, type[nn.Module]] = {}
"""A weight format is a linear class with `from_linear`, `forward` and `nbytes`."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Write a checkpoint with quantised weights."""

    source: Path = flag(MISSING, help="checkpoint to read")
    target: Path = flag(MISSING, help="folder to write")
    quantization: str = flag("int8", help="weight format")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")


def quantize_(model: nn.Module, name: str) -> None:
    """Replace the linear layers of `model` by the weight format `name`, in place.

    Raises:
        UserError: no such format.
    """
    if name not in WEIGHT_FORMATS:
        known = ", ".join(WEIGHT_FORMATS) or "none yet"
        raise UserError(f"--quantization {name}: not a weight format; known: {known}")


def main(config: QuantizeConfig) -> None:
    """Refuse formats that do not exist before anything is read."""
    quantize_(nn.Module(), config.quantization)


if __name__ == "__main__":
    sys.exit(run(main, QuantizeConfig))
