"""Everything that can be wrong with a run of eval.py, looked at before any weight is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import accounting
import machine
from checkpoint import Checkpoint
from command import notes_held
from config import Faults, UserError
from durable import check_writable
from eval_config import EvalConfig, place_list
from kernels.linear import MAX_ROWS
from kernels.slots import SLOT_TILE
from kv_cache import bytes_per_token, channel_scales_bytes, parse_formats
from model_config import ModelConfig
from needle import Hidden, hide, keys
from preflight import Finder, check_apart, check_memory, find_model
from quantize import parse_scheme, planned_formats
from request import PLAIN_FORMAT, Request
from scoring import cut_windows
from texts import read_text
from tokenizer_base import Tokenizer
from weight_formats import stored_bytes

SCORE_BYTES = 6 * 8  # per logit of a scoring step: some copies in fp64


@dataclass(frozen=True, kw_only=True)
class EvalPlan:
    """A run that was found right.

    Attributes:
        formats, ref_formats: of K and V, tested and the reference's; names in FORMATS.
        weight_formats, ref_weight_formats: layouts of the weights held as codes, by name.
        cache_len: slots of each cache.
        windows: kl: ids [context + scored + 1] each.
        hidden: needle: a text per key, by place in percent; None: without the needle.
        expected_bytes: what it will hold, by part, beside the program.
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    device: torch.device
    formats: tuple[str, str]
    ref_formats: tuple[str, str]
    weight_formats: Mapping[str, str]
    ref_weight_formats: Mapping[str, str]
    cache_len: int
    windows: Sequence[Tensor] = ()
    hidden: Mapping[int | None, Sequence[Hidden]] = field(default_factory=dict)
    expected_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def same_weights(self) -> bool:
        """Whether the tested model is the reference's."""
        return self.weight_formats == self.ref_weight_formats

    @property
    def is_reference(self) -> bool:
        """Whether what is tested is the reference itself, so that its figures are the floor."""
        return self.same_weights and self.formats == self.ref_formats


@notes_held()
def eval_preflight(config: EvalConfig) -> EvalPlan:
    """Check flags, machine, checkpoint's headers, tokenizer, text and memory; reads no tensor.

    Raises:
        UserError: all that is wrong, a line each.
    """
    plan = make_plan(config)
    plan = replace(plan, **material(config, plan.tokenizer, plan.checkpoint.config))
    cure = "a smaller --context needs less"
    check_memory(plan.expected_bytes, plan.checkpoint.path, plan.device, cure)
    return plan


def make_plan(config: EvalConfig, find: Finder = find_model) -> EvalPlan:
    """The plan of a request but for its texts, whether or not it fits into memory.

    Args:
        config: the request.
        find: finds the model; a sweep keeps what it found for the next case.

    Raises:
        UserError: all that is wrong, a line each.
    """
    faults = Faults()
    if config.write_result:
        faults.check(check_writable, config.write_result)
    device = faults.check(machine.prepare_device, config.device, config.threads)
    plain = PLAIN_FORMAT[config.dtype]
    spec, scheme = config.kv_cache_quantization, None
    formats = faults.check(parse_formats, plain if spec is None else spec)
    if config.quantization is not None:
        scheme = faults.check(parse_scheme, config.quantization)
    checkpoint, tokenizer = find(faults, config.checkpoint_path, "")
    weight_formats = None
    if checkpoint:
        faults.check(check_apart, config.write_result, checkpoint)
        faults.check(check_length, config, checkpoint.config)
        weight_formats = faults.check(planned_formats, checkpoint, scheme)
    faults.refuse()
    assert checkpoint and tokenizer and device and formats and weight_formats is not None
    plan = EvalPlan(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        device=device,
        formats=formats,
        ref_formats=(plain, plain),
        weight_formats=weight_formats,
        ref_weight_formats=weight_formats if config.reference == "cache" else {},
        cache_len=-(-longest(config) // SLOT_TILE) * SLOT_TILE,
    )
    return replace(plan, expected_bytes=expected_bytes(config, plan))


def longest(config: EvalConfig) -> int:
    """Tokens that a cache will hold."""
    return config.context + (config.scored if config.command == "kl" else 0)


def check_length(config: EvalConfig, model_config: ModelConfig) -> None:
    """Refuse more tokens than the checkpoint was made for."""
    if (needed := longest(config)) > model_config.max_seq_len:
        flags = f"--context {config.context}"
        flags += f" and --scored {config.scored}" if config.command == "kl" else ""
        raise UserError(
            f"{flags}: {needed} tokens exceed the checkpoint's context of"
            f" {model_config.max_seq_len}; ask for fewer"
        )


def material(config: EvalConfig, tokenizer: Tokenizer, model_config: ModelConfig) -> dict[str, Any]:
    """`windows` of the text, or texts with a needle `hidden`."""
    if config.command == "kl":
        windows = text_windows(config, tokenizer)
        check_ids(windows, model_config)
        return {"windows": windows}
    hidden = hidden_texts(config, tokenizer)
    check_ids([text.ids for texts in hidden.values() for text in texts], model_config)
    return {"hidden": hidden}


def text_windows(config: EvalConfig, tokenizer: Tokenizer) -> list[Tensor]:
    """Windows of --text whose scored parts do not overlap.

    Raises:
        UserError: it cannot be read, or is too short.
    """
    ids = tokenizer.encode(read_text(config.text))
    ids = ids[1:] if ids[:1] == [tokenizer.bos_id] else ids
    length, count = config.context + config.scored + 1, config.windows
    needed = length + (count * config.scored if count > 1 else 0)
    if len(ids) < needed:
        raise UserError(
            f"--text {config.text}: {len(ids)} tokens, but {count} windows of {config.context} +"
            f" {config.scored} need {needed}; ask for fewer --windows or a smaller --context"
        )
    return cut_windows(torch.tensor(ids), count, length, tokenizer.bos_id)


def hidden_texts(config: EvalConfig, tokenizer: Tokenizer) -> dict[int | None, list[Hidden]]:
    """A text per place and key, and one per key without the needle.

    Raises:
        UserError: no place for the needle in so short a text.
    """
    hidden: dict[int | None, list[Hidden]] = {}
    for place in (*place_list(config.places), None):
        texts = [
            hide(tokenizer.encode, key, config.context, place)
            for key in keys(config.trials, config.seed)
        ]
        if None in texts:
            raise UserError(f"--context {config.context}: has no room for the needle; ask for more")
        hidden[place] = [text for text in texts if text is not None]
    return hidden


def check_ids(texts: Sequence[Tensor], model_config: ModelConfig) -> None:
    """Refuse ids that the model's embedding does not have."""
    if (largest := max(int(ids.max()) for ids in texts)) >= model_config.vocab_size:
        raise UserError(
            f"token id {largest} is beyond the model's vocabulary of {model_config.vocab_size};"
            " the tokenizer is not this checkpoint's"
        )


def expected_bytes(config: EvalConfig, plan: EvalPlan) -> dict[str, int]:
    """What the run will hold, by part: the tested cache, the reference's twice, and scratch."""
    model_config, dtype = plan.checkpoint.config, getattr(torch, config.dtype)
    request = Request(
        depth_ids=(),
        prompt_ids=(0,) * longest(config),
        new_tokens=1,
        cache_len=plan.cache_len,
        formats=plan.ref_formats,
        prefill_chunk=config.prefill_chunk,
    )
    weights = [plan.weight_formats] + ([] if plan.same_weights else [plan.ref_weight_formats])
    sizes = [stored_bytes(model_config, each, dtype, plan.device).values() for each in weights]
    tested = 0 if plan.is_reference else bytes_per_token(model_config, plan.formats)
    per_token = 2 * bytes_per_token(model_config, plan.ref_formats) + tested
    workspace = accounting.workspace_bytes(request, model_config, dtype)
    return {
        "weights": sum(map(sum, sizes)),
        "KV caches": plan.cache_len * per_token + channel_scales_bytes(model_config, plan.formats),
        "workspace": workspace + MAX_ROWS * model_config.vocab_size * SCORE_BYTES,
    }
