"""Time of a product of few rows with weights of 16, 8 and 4 bits.

    python scripts/bench_linear.py [--shapes 4096x14336,576x1536] [--rows 1,4,16]

All formats of a line run in turns in one process; a figure is the median over --repeats. A format
has as many weights as it takes to push each out of the processor's caches before its next turn.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.product
import machine
from config import UserError, flag
from kernels.quantized import QuantizedWeight
from scripts.attention_methods import Call, Method, Pass, interleaved_s, num_layers
from stats import median, spread_pct

BUDGET_BYTES = 1 << 30
"""Of all weights of one format."""

COLUMNS = ("N x C", "rows", "weights", "us", "spread %", "GB/s", "x bf16")


@dataclass(frozen=True, kw_only=True)
class BenchLinearConfig:
    """Time of a product of few rows with weights of 16, 8 and 4 bits."""

    shapes: str = flag("4096x14336,576x1536", help="rows x channels of a weight, a comma list")
    rows: str = flag("1,4,16", help="rows of x, a comma list")
    repeats: int = flag(15, minimum=2, help="timed turns of each format")
    device: str | None = flag(
        None, choices=("cpu", "cuda", "mps"), help="default: cuda if there is one, else cpu"
    )
    threads: int | None = flag(None, minimum=1, help="CPU threads; default: physical cores")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """[(N, C)] of "NxC,NxC".

    Raises:
        UserError: it is none, or C does not fill a group of 32.
    """
    try:
        shapes = [(int(n), int(c)) for n, c in (part.split("x") for part in text.split(","))]
    except ValueError:
        raise UserError(f"--shapes {text}: a comma list like 4096x14336 is wanted") from None
    if any(n < 1 or c < 32 or c % 32 for n, c in shapes):
        raise UserError(f"--shapes {text}: N from 1 on and multiples of 32 for C are supported")
    return shapes


def parse_rows(text: str) -> list[int]:
    """Raises UserError unless all are from 1 to 16."""
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = [0]
    if not all(1 <= count <= 16 for count in rows):
        raise UserError(f"--rows {text}: a comma list of numbers from 1 to 16 is wanted")
    return rows


def dense_weight(shape: tuple[int, int], device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def coded_weight(
    shape: tuple[int, int], device: torch.device, bits: int, group: int
) -> QuantizedWeight:
    """Random codes; groups of a row have fp16 scales and, of 4 bits, mins."""
    rows, width = shape
    dtype = torch.float32 if group == width else torch.float16
    scales = torch.full((rows, width // group), 0.01, dtype=dtype)
    if bits == 8:
        codes, mins = torch.randint(-128, 128, shape, dtype=torch.int8), None
    else:
        codes = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8)
        mins = torch.full_like(scales, -0.08)
    return QuantizedWeight(shape, codes, scales, mins).laid_out_for(device)


def choose_methods(shape: tuple[int, int], x: Tensor) -> Iterator[Method]:
    """Dense, also through the library, then what reads codes."""
    product: Callable[..., Tensor] = kernels.product.product
    if x.device.type == "cuda":
        product = torch.compile(product, dynamic=False)  # as a decode step is

    def dense(multiply: Callable[..., Tensor]) -> Callable[[], Call]:
        def make_layer() -> Call:
            weight = dense_weight(shape, x.device)
            return lambda: multiply(x, weight)

        return make_layer

    def coded(bits: int, group: int) -> Callable[[], Call]:
        def make_layer() -> Call:
            weight = coded_weight(shape, x.device, bits, group)
            return lambda: product(x, weight)

        return make_layer

    size = shape[0] * shape[1]
    yield Method("bf16", dense(product), 2 * size, 2 * size)
    yield Method("bf16, F.linear", dense(F.linear), 2 * size, 2 * size)
    for name, bits, group in (("int8", 8, shape[1]), ("int4:32", 4, 32)):
        nbytes = coded_weight(shape, torch.device("cpu"), bits, group).nbytes
        yield Method(name, coded(bits, group), nbytes, nbytes)


def measured(
    shape: tuple[int, int], rows: int, device: torch.device, repeats: int
) -> Iterator[tuple[str, ...]]:
    """A line per format."""
    x = torch.randn(rows, shape[1], device=device, dtype=torch.bfloat16)
    methods = list(choose_methods(shape, x))
    counts = [num_layers(method, device, BUDGET_BYTES) for method in methods]
    passes = [Pass(method, count, device) for method, count in zip(methods, counts, strict=True)]
    times = interleaved_s(passes, repeats, device)
    each = [median(turns) / count for turns, count in zip(times, counts, strict=True)]
    for method, turns, time_s in zip(methods, times, each, strict=True):
        yield (
            f"{shape[0]}x{shape[1]}",
            f"{rows}",
            method.name,
            f"{1e6 * time_s:.1f}",
            f"{spread_pct(turns):.1f}",
            f"{method.touched_bytes / time_s / 1e9:.1f}",
            f"{each[0] / time_s:.2f}",
        )


def main(config: BenchLinearConfig) -> None:
    """Print a table, a line as soon as it is measured."""
    shapes, rows = parse_shapes(config.shapes), parse_rows(config.rows)
    device = machine.prepare_device(config.device, config.threads)
    print(f"{machine.device_name(device)}, torch {torch.__version__}; GB/s of the weight's bytes\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---:|" * len(COLUMNS))
    for shape in shapes:
        for count in rows:
            for line in measured(shape, count, device, config.repeats):
                print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(run(main, BenchLinearConfig))
