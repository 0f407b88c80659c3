"""Which rows of results are set against which: of equal settings, on the same machine.

Nothing is matched by guess: what has no partner is refused, naming the settings that differ.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from config import UserError, printable
from derived import kv_name
from reporting.origin import ORIGIN_FLAG
from results import COLUMNS, KEY, SYSTEM, Row

SHORT = {"kv": ("k_format", "v_format")}  # of --vary
ORIGIN_KEY = ("model", "dtype", "k_format", "v_format")  # all that torchao's rows tell
WORTHLESS = {"check_failed", "streamed", "ragged"}  # flags: such a row is compared with nothing


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sides of equal settings, but for those in `differs`.

    Attributes:
        a, b: rows, one per process.
        differs: settings and things of the machine, the texts of both sides.
    """

    a: Sequence[Row]
    b: Sequence[Row]
    differs: dict[str, tuple[str, str]]

    @property
    def is_across_systems(self) -> bool:
        return bool(set(self.differs) & set(SYSTEM))

    @property
    def has_origin(self) -> bool:
        return any(ORIGIN_FLAG in row.flags for row in (*self.a, *self.b))


def varied(text: str) -> tuple[str, ...]:
    """The columns that `--vary` names.

    Raises:
        UserError: there is no such column.
    """
    names: list[str] = []
    for word in filter(None, text.split(",")):
        names += SHORT.get(word, (word,))
    for name in names:
        if name not in COLUMNS:
            raise UserError(f"--vary {printable(name)}: no column; known: kv, {', '.join(KEY)}")
    return tuple(names)


def usable(rows: Iterable[Row]) -> list[Row]:
    """The rows that measured something that counts."""
    return [row for row in rows if row.status == "ok" and not WORTHLESS & set(row.flags)]


def by_arm(rows: Sequence[Row]) -> list[Comparison]:
    """Arms A and B of each pairing of two commands."""
    runs = grouped([row for row in rows if row.arm in ("A", "B")], ("run",)).values()
    sides = [[[row for row in run if row.arm == arm] for arm in "AB"] for run in runs]
    return [compared(a, b) for a, b in sides if a and b]


def by_setting(
    rows: Sequence[Row], vary: Collection[str], base: str | None, *, across: bool
) -> list[Comparison]:
    """In each group of rows that differ in `vary` alone, the base against all others.

    Of each the newest commit, unless `vary` has it.

    Args:
        base: the values of the base in `vary`, with commas; None: what comes first in the rows.
        across: rows of several machines are one group.
    """
    same = [name for name in (*KEY, *SYSTEM) if name not in vary]
    if across:
        same = [name for name in same if name not in SYSTEM]
    found = []
    for group in grouped(rows, same).values():
        sides = {
            ",".join(values): side if "commit" in vary else of_newest_commit(side)
            for values, side in grouped(group, vary).items()
        }
        first = base if base is not None else next(iter(sides))
        if first in sides:
            found += [compared(sides[first], side) for at, side in sides.items() if at != first]
    return found


def by_file(
    a: Sequence[Row], b: Sequence[Row], vary: Collection[str], *, across: bool
) -> tuple[list[Comparison], list[str]]:
    """Rows of B against rows of A of the same settings, newest commit of each; and the refused."""
    if any(ORIGIN_FLAG in row.flags for row in (*a, *b)):
        same: list[str] = [name for name in ORIGIN_KEY if name not in vary]
        across = True
    else:
        same = [name for name in KEY if name not in vary]
    if not across:
        same += SYSTEM
    of_a, of_b = grouped(a, same), grouped(b, same)
    pairs = [(of_a[key], of_b[key]) for key in of_a if key in of_b]
    found = [
        compared(of_newest_commit(side_a), of_newest_commit(side_b)) for side_a, side_b in pairs
    ]
    refused = [refusal(of_b[key][-1], a, same) for key in of_b if key not in of_a]
    return found, refused


def grouped(rows: Iterable[Row], names: Collection[str]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by the values of some columns, in the order of their first."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(getattr(row, name)) for name in names), []).append(row)
    return groups


def of_newest_commit(rows: Sequence[Row]) -> list[Row]:
    """Those of the commit that was measured last: others are of another program."""
    return [row for row in rows if row.commit == rows[-1].commit]


def compared(a: Sequence[Row], b: Sequence[Row]) -> Comparison:
    names = ("model", *KEY, *SYSTEM, "commit", "attention")
    return Comparison(a=a, b=b, differs=differences(a[-1], b[-1], names))


def differences(a: Row, b: Row, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The columns in which two rows differ, with the texts of both."""
    texts = {name: (str(getattr(a, name)), str(getattr(b, name))) for name in names}
    return {name: both for name, both in texts.items() if both[0] != both[1]}


def refusal(row: Row, others: Sequence[Row], same: Iterable[str]) -> str:
    """Why a row has no partner: what the nearest of the others has otherwise."""
    names = tuple(same)
    if not others:
        return f"{label(row)}: there is no row to compare it with"
    nearest = min((differences(other, row, names) for other in others), key=len)
    cause = ", ".join(f"{name} {a} and {b}" for name, (a, b) in nearest.items())
    return f"{label(row)}: {cause}"


def label(row: Row) -> str:
    """A row in a few words."""
    cache = kv_name(row)
    stored = "" if row.depth is None else f"depth {row.depth}"
    weights = f"{row.weight_format} weights" if row.weight_format else ""
    return ", ".join(filter(None, [row.model, weights, f"{cache} cache" if cache else "", stored]))
