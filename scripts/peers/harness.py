"""What every peer's script shares: a request from stdin, decode timed, an answer to stdout.

Runs in the environment of a peer: standard library only.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one process measures.

    Attributes:
        checkpoint: path in the peer's own format.
        kv_format: the peer's name of it.
        new_tokens: of every sample, the first one out of the prefill included.
        num_samples: timed ones; one more warms up and compiles.
    """

    checkpoint: str
    kv_format: str
    prompt_ids: list[int]
    new_tokens: int
    num_samples: int
    threads: int

    @property
    def cache_len(self) -> int:
        return len(self.prompt_ids) + self.new_tokens


class Decoder(Protocol):
    """A loaded model with a cache of one sequence. Both methods are greedy."""

    def prefill(self, ids: list[int]) -> int:
        """Store ids from position 0 on; the next id."""

    def decode(self, token_id: int, start_pos: int, steps: int) -> list[int]:
        """The ids after token_id, which belongs at start_pos; forgets what was stored there."""


def serve(load: Callable[[Request], Decoder], packages: list[str]) -> None:
    """Answer with the median rate in tok/s, the ids of the last sample and versions of packages."""
    request = Request(**json.load(sys.stdin))
    decoder = load(request)
    first = decoder.prefill(request.prompt_ids)
    rates = []
    for _ in range(1 + request.num_samples):
        start_s = time.perf_counter()
        ids = decoder.decode(first, len(request.prompt_ids), request.new_tokens - 1)
        rates.append(len(ids) / (time.perf_counter() - start_s))
    answer = {
        "tok_s": statistics.median(rates[1:]),
        "ids": [first, *ids],
        "versions": {package: version(package) for package in packages},
    }
    print(json.dumps(answer))
