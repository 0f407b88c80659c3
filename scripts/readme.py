"""Fill the generated blocks of README.md: flags from the parser, files from their docstrings, rows.

python scripts/readme.py [--check]
"""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from command import run  # noqa: E402
from config import UserError, flag  # noqa: E402
from reporting.select import newest, select, system_of  # noqa: E402
from reporting.table import make_table, markdown  # noqa: E402
from scripts.sweep_sections import SECTIONS  # noqa: E402
from summary import FLAG_WORDS  # noqa: E402

README = ROOT / "README.md"
CODE = [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("kernels/*.py")), ROOT / "kernels" / "csrc"]
CODE += [
    *sorted(ROOT.glob("reporting/*.py")),
    *sorted(ROOT.glob("scripts/*.py")),
    ROOT / "scripts" / "peers",
]
QUALITY_COLUMNS = "kv,context,kv_bytes_per_token,kl,kl_floor,ln_ppl_ratio,ln_ppl_ratio_se,top1"
OTHERS = {
    "kernels/csrc": "The C++ kernels of the CPU: decode attention, and products of few rows.",
    "scripts/gpu_check.sh": "The shell command of `gpu_check.py`.",
    "scripts/peers": "What compare_peers.py runs inside the environment of each peer.",
    "benchmarks.sh": "Sections of measurements: `scripts/sweep.py run`.",
    "benchmark_results.txt": "Rows, appended by the tool only.",
    "tests/": "A file per module; the name of a test is the sentence that must hold.",
}


@dataclass(frozen=True, kw_only=True)
class ReadmeConfig:
    """Bring the generated blocks of README.md up to date."""

    check: bool = flag(False, help="change nothing; fail when a block is out of date")
    debug: bool = flag(False, help="show the traceback of an error")


def flags() -> str:
    """The flags of generate.py."""
    return help_of("generate.py")


def sweep() -> str:
    """The flags of a sweep."""
    return help_of("scripts/sweep.py", "run")


def help_of(*words: str) -> str:
    """What the --help of a command says after its first lines."""
    command = [sys.executable, *words, "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return "```\n" + text.partition("options:\n")[2].rstrip() + "\n```"


def sections() -> str:
    """A line per section of benchmarks.sh."""
    return "\n".join(f"- `{name}`: {section.about}" for name, section in SECTIONS.items())


def doubts() -> str:
    """The flags of a row in words."""
    return "\n".join(f"  - `{name}`: {words}" for name, words in FLAG_WORDS.items())


def files() -> str:
    """A line per file: the first sentence of its docstring."""
    lines = []
    for path in CODE:
        name = str(path.relative_to(ROOT))
        if path.suffix != ".py":
            lines.append(f"- `{name}` — {OTHERS[name]}")
        elif docstring := ast.get_docstring(ast.parse(path.read_text())):
            lines.append(f"- `{name}` — {' '.join(docstring.split(chr(10) * 2)[0].split())}")
    others = [name for name in OTHERS if ROOT / name not in CODE]
    return "\n".join(lines + [f"- `{name}` — {OTHERS[name]}" for name in others])


def table() -> str:
    """The newest speed row of each setting on the machine of the last."""
    return rows_of("kind=speed,status=ok", "")


def quality() -> str:
    """What caches cost, likewise."""
    return rows_of("kind=quality,status=ok,reference=cache", QUALITY_COLUMNS)


def rows_of(conditions: str, columns: str) -> str:
    """The newest row of each setting on the machine of the last row, as a table."""
    rows = select(str(ROOT / "benchmark_results.txt"), conditions)
    machine = system_of(rows[-1])
    return markdown(make_table([row for row in newest(rows) if system_of(row) == machine], columns))


def filled(text: str) -> str:
    """README.md with every block between its markers made anew."""
    for make in (flags, sweep, sections, doubts, files, table, quality):
        name, block = make.__name__, make()
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not start or not end:
            raise UserError(f"README.md: no markers for {name}")
        text = before + start + block + "\n" + end + after
    return text


def main(config: ReadmeConfig) -> None:
    """Write README.md, or refuse when it is out of date."""
    text = README.read_text()
    if not config.check:
        README.write_text(filled(text))
    elif filled(text) != text:
        raise UserError("README.md: out of date; run python scripts/readme.py")


if __name__ == "__main__":
    sys.exit(run(main, ReadmeConfig))
