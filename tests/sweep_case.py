"""A sweep without models, for tests: cases that are shell commands, and the plan they come from.

The last word of a case says what it does, a name of `BEHAVIOURS`; its depth and round are settings
of the row that it prints.
"""

import json
import shlex

from results import Row, to_json
from scripts import sweep_cases, sweep_lock
from scripts.sweep_cases import Plan, Planned

COLUMNS = {
    "kind": "speed",
    "model": "a model",
    "k_format": "int8",
    "v_format": "int8",
    "device_name": "a device",
    "torch": "2.11.0",
    "threads": 2,
    "commit": "abcdef0",
}
SAID = {"time": "2026-12-01T00:00:00Z", "status": "ok", "decode_tok_s": 10.0}
BEHAVIOURS = {
    "ok": 'printf %s "$1"',
    "slow": 'sleep 0.01; printf %s "$1"',
    "doubtful": 'printf %s "$1"; exit 1',
    "other": 'printf %s \'{"status": "ok", "repro": "python generate.py --seed 7"}\'',
    "empty": "true",
    "refused": 'printf %s \'{"status": "error", "error": "--depth 9: no room"}\'; exit 2',
    "oom": 'printf %s \'{"status": "error", "error": "OutOfMemoryError: CUDA"}\'; exit 1',
    "crash": "echo 'so far' >&2; kill -SEGV $$",
    "hang": "trap '' TERM; echo begun >&2; while :; do sleep 0.05; done",
    "interrupted": "trap 'echo \"sample 2: 30 tokens\" >&2; exit 130' INT; kill -INT $PPID;"
    " while :; do sleep 0.02; done",
}


def planned(depth: int, **changes) -> Planned:
    """A case of 128 * (depth + 1) slots that fits."""
    words = ("--depth", str(depth)) if depth else ()
    columns = COLUMNS | {"depth": depth, "cache_len": 128 * (depth + 1)}
    values = {
        "section": "kv",
        "program": "generate.py",
        "words": words,
        "repro": shlex.join(["python", "generate.py", *words]),
        "device": "a-device-of-tests",
        "columns": columns | changes.pop("columns", {}),
        "sizes": {"weights": 1000, "KV cache data": 500, "KV cache scales": 8, "workspace": 100},
        "free_bytes": 10**6,
        "seconds": 1.0,
    }
    return Planned(**values | changes)


def document(case: Planned) -> str:
    """What a case that goes well prints."""
    return json.dumps(to_json(Row(**SAID | dict(case.columns) | {"repro": case.repro})))


def install(patch, folder, behaviours: dict[str, Planned] | list[tuple[str, Planned]]) -> None:
    """Have sweeps run these cases, each as its behaviour says; logs and locks in `folder`."""
    pairs = behaviours if isinstance(behaviours, list) else list(behaviours.items())
    cases = tuple(case for _, case in pairs)
    by_words = {case.words: (name, case) for name, case in pairs}

    def command_of(program: str, words) -> list[str]:
        name, case = by_words[tuple(words)]
        return ["sh", "-c", BEHAVIOURS[name], "sh", document(case)]

    patch.setattr(sweep_cases, "ask_plan", lambda order: Plan(cases=cases))
    patch.setattr(sweep_cases, "command_of", command_of)
    patch.setattr(sweep_lock, "RUNS", folder / "runs")
    patch.setattr(sweep_lock.tempfile, "gettempdir", lambda: str(folder))
