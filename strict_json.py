"""The one reader of JSON out of a checkpoint's files; what readers take differently is refused."""

import json
import math
from collections import Counter
from typing import Any


def json_object(data: bytes) -> dict[str, Any]:
    """The one JSON object that `data` holds, in UTF-8.

    Raises:
        ValueError: anything else; a key that occurs twice; NaN or Infinity under a key.
    """
    try:
        values = json.loads(data.decode(), object_pairs_hook=_table)
    except RefusedTable:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError("is not a JSON object")
    return values


class RefusedTable(ValueError):
    """JSON to Python's reader, but not to every other."""


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise RefusedTable(f'"{twice}" occurs twice')
    for key, value in pairs:
        if type(value) is float and not math.isfinite(value):
            raise RefusedTable(f"{key} is {value}; a finite number is needed")
    return values
