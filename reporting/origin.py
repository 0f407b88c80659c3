"""The rows that torchao's Llama benchmark published, as rows of ours. They are never written.

    20240831225155, tok/s=107.38, mem/s=1418.93 GB/s, peak_mem=13.88 GB, model_size=13.21 GB
    quant: None, mod: Llama-2-7b-chat-hf, kv_quant: False, ... repro: python generate.py ...

Their `tok/s` is of the whole run, prefill and all: `overall_tok_s`. Neither the machine nor the
prompt is told.
"""

import math
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from config import UserError, printable
from durable import ORIGIN
from results import Row, RowError

ORIGIN_FLAG = "origin"
PAIR = re.compile(r"([a-z_/]+)(?:=|: )\s*([^\s,]+)")
FIGURES = {"tok/s": "overall_tok_s", "peak_mem": "peak_mem_gb"}
TEXTS = {"quant": "weight_format", "mod": "model", "device": "device_name"}
SIZES = {"--cache_size": "cache_len", "--max_new_tokens": "new_tokens"}
GLUED = re.compile(r"(\d)--(?=[a-z])")  # `--cache_size 8192--kv_cache_quantization` was published


def scan_origin(path: Path) -> Iterator[Row | RowError]:
    """Each row of torchao's in a file, or what is wrong with it: `FILE:LINE: cause`."""
    name = printable(str(path))
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if ORIGIN.match(line):
            try:
                yield parse_origin(line.decode())
            except ValueError as error:
                yield RowError(f"{name}:{number}: row of torchao: {printable(str(error))}")


def parse_origin(line: str) -> Row:
    """A published row; names may be missing, a `nan` counts as missing.

    Raises:
        ValueError: naming what cannot be read.
    """
    head, _, repro = line.partition("repro: ")
    found = dict(PAIR.findall(head))
    values: dict[str, Any] = {
        FIGURES[name]: _figure(name, found[name]) for name in FIGURES if name in found
    }
    values |= {TEXTS[name]: found[name] for name in TEXTS if name in found}
    if "dtype" in found:
        values["dtype"] = found["dtype"].removeprefix("torch.")
    if "compile" in found:
        values["compile"] = _truth("compile", found["compile"])
    if "kv_quant" in found:
        is_int8 = _truth("kv_quant", found["kv_quant"])
        kv_format = "int8" if is_int8 else "bf16"
        values |= {"k_format": kv_format, "v_format": kv_format}
    repro = GLUED.sub(r"\1 --", repro.strip())
    for name, column in SIZES.items():
        if match := re.search(rf"{name}[ =](\d+)\b", repro):
            values[column] = int(match[1])
    values.setdefault("model", "unknown")
    return Row(time=_time(line[:14]), status="ok", flags=(ORIGIN_FLAG,), repro=repro, **values)


def _time(text: str) -> str:
    try:
        return datetime.strptime(text, "%Y%m%d%H%M%S").strftime("%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        raise ValueError(f"{text}: not a time") from None


def _figure(name: str, text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}={text}: not a number") from None
    return value if math.isfinite(value) else None


def _truth(name: str, text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"{name}: {text}: neither True nor False")
    return text == "True"
