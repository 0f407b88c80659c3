"""What eval.py found: as columns of a row, as a table for people, and in full for --json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import accounting
from config import printable, repro_command
from engine import Engine
from eval_config import EvalConfig
from eval_plan import EvalPlan
from kv_cache import bytes_per_token
from needle import Found, lost
from quality import TokenScores, mean_and_error, summarise
from report import system_columns
from request import ids_sha
from results import Row

ByPlace = Mapping[int | None, Sequence[Found]]

KL_TABLE = (
    ("KL, nats per token", "kl_mean", "kl_se", ".2e"),
    ("KL, 99th percentile", "kl_p99", None, ".2e"),
    ("KL, largest", "kl_max", None, ".2e"),
    ("ln of the ratio of perplexities", "ln_ppl_ratio", "ln_ppl_ratio_se", ".2e"),
    ("same likeliest token, %", "top1_pct", "top1_se", ".2f"),
    ("RMS change of the text's probability, %", "rms_dp_pct", "rms_dp_se", ".3f"),
    ("tokens before the first other choice", "first_diff", None, ".1f"),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one run found.

    Attributes:
        columns: of the row.
        table: for people.
        details: what no row holds, for JSON.
    """

    columns: dict[str, Any]
    table: str
    details: dict[str, Any]


def kl_figures(tested: Sequence[TokenScores], floor: Sequence[TokenScores]) -> Figures:
    """Of windows scored by the tested stream, and by the reference cut otherwise."""
    found, noise = asdict(summarise(tested)), asdict(summarise(floor))
    columns = {name: value for name, value in found.items() if name in Row.__dataclass_fields__}
    columns |= {
        "windows": len(tested),
        "floor_windows": len(floor),
        "kl_floor": noise["kl_mean"],
        "ln_ppl_ratio_floor": noise["ln_ppl_ratio"],
        "top1_floor_pct": noise["top1_pct"],
        "rms_dp_floor_pct": noise["rms_dp_pct"],
        "first_diff_floor": noise["first_diff"],
    }
    lines: list[Sequence[str]] = [("", "tested", "noise floor")]
    for words, name, error, spec in KL_TABLE:
        lines.append((words, *(with_error(each, name, error, spec) for each in (found, noise))))
    lines.append(("perplexity", f"{found['ppl']:.4f}", ""))
    lines.append(("perplexity of the reference", f"{found['ppl_ref']:.4f}", ""))
    details = {"tested": found, "floor": noise, "windows": [of_window(each) for each in tested]}
    return Figures(columns=columns, table=aligned(lines), details=details)


def of_window(scores: TokenScores) -> dict[str, float]:
    return {name: values.mean().item() for name, values in scores._asdict().items()}


def with_error(values: Mapping[str, Any], name: str, error: str | None, spec: str) -> str:
    text = format(values[name], spec)
    se = values[error] if error else None
    return text if se is None else f"{text} ± {format(se, spec)}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    rows = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(row.rstrip() for row in rows)


def needle_figures(tested: ByPlace, reference: ByPlace, floor: ByPlace) -> Figures:
    """Of the same texts read by the tested stream, the reference, and the reference cut otherwise.

    A change is that of one key's NLL, its mean over the places; errors are over keys.
    """
    places = [place for place in tested if place is not None]
    change, change_se = mean_and_error(changes(tested, reference, places))
    noise, _ = mean_and_error(changes(floor, reference, places))
    nll = {place: fmean(each.nll for each in tested[place]) for place in tested}
    nll_ref = {place: fmean(each.nll for each in reference[place]) for place in reference}
    columns = {
        "needle_change": change,
        "needle_change_se": change_se,
        "needle_change_floor": noise,
        "needle_lost": sum(lost(tested[place], reference[place]) for place in places),
        "needle_nll": tuple(nll[place] for place in places),
        "needle_nll_ref": tuple(nll_ref[place] for place in places),
        "needle_nll_none": nll[None],
        "needle_nll_none_ref": nll_ref[None],
        "needle_place_pct": tuple(places),
        "needle_trials": len(tested[None]),
    }
    details = {
        "found_pct": found_pct(tested, places),
        "found_ref_pct": found_pct(reference, places),
    }
    return Figures(columns=columns, table=needle_table(columns, details), details=details)


def changes(found: ByPlace, reference: ByPlace, places: Sequence[int]) -> list[float]:
    """Of each key."""
    pairs = [zip(found[place], reference[place], strict=True) for place in places]
    by_place = [[each.nll - ref.nll for each, ref in pair] for pair in pairs]
    return [fmean(of_key) for of_key in zip(*by_place, strict=True)]


def found_pct(found: ByPlace, places: Sequence[int]) -> list[float]:
    """Keys whose every id was the likeliest, at each place."""
    return [100 * fmean(each.is_exact for each in found[place]) for place in places]


def needle_table(columns: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    lines: list[Sequence[str]] = [
        ("NLL of the key, nats", "tested", "reference", "found, %", "reference")
    ]
    for index, place in enumerate(columns["needle_place_pct"]):
        nll = (columns[name][index] for name in ("needle_nll", "needle_nll_ref"))
        pct = (details[name][index] for name in ("found_pct", "found_ref_pct"))
        lines.append(
            (f"needle at {place} %", *map("{:.3f}".format, nll), *map("{:.0f}".format, pct))
        )
    none = (columns[name] for name in ("needle_nll_none", "needle_nll_none_ref"))
    lines.append(("without the needle", *map("{:.3f}".format, none), "", ""))
    change = with_error(columns, "needle_change", "needle_change_se", ".2e")
    found_otherwise = f"{columns['needle_change_floor']:.2e}"
    return aligned(lines) + (
        f"\nchange with the needle {change} (noise floor {found_otherwise}),"
        f" keys lost {columns['needle_lost']}"
    )


def make_row(
    config: EvalConfig, plan: EvalPlan, engine: Engine, began: datetime, figures: Figures
) -> Row:
    """The row of a run that went well; `engine` is the tested one."""
    system = system_columns(engine)
    is_dirty = (system["commit"] or "").endswith("-dirty")
    texts = plan.windows or [t.ids for texts in plan.hidden.values() for t in texts]
    return Row(
        time=began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        kind="quality" if config.command == "kl" else "needle",
        status="ok",
        model=printable(plan.checkpoint.name),
        model_sha=plan.checkpoint.sha,
        prompt_sha=ids_sha(torch.cat(list(texts)).tolist()),
        repro=repro_command("eval.py", config),
        flags=("dirty",) if is_dirty else (),
        **settings(config, plan, engine),
        **system,
        **figures.columns,
    )


def settings(config: EvalConfig, plan: EvalPlan, engine: Engine) -> dict[str, Any]:
    """As found in the tested model and its caches."""
    model, caches = engine.model, engine.caches
    formats = (str(caches[0].k_format), str(caches[0].v_format))
    of_kl = {
        "text": printable(Path(config.text).name),
        "scored": config.scored,
        "score_width": config.score_width,
    }
    return {
        "k_format": formats[0],
        "v_format": formats[1],
        "reference": config.reference,
        "context": config.context,
        **(of_kl if plan.windows else {}),
        "kv_bytes_per_token": bytes_per_token(model.config, formats),
        "kv_cache_gb": accounting.kv_cache_bytes(caches) / 1e9,
        "model_size_gb": accounting.model_size_bytes(model) / 1e9,
        "weight_format": accounting.weight_format(model),
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "batch_size": 1,
        "prefill_chunk": config.prefill_chunk,
    }
