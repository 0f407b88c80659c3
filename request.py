"""A run's request, resolved before any weight is read: ids, lengths, formats, memory."""

import hashlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from chat_template import Message
from config import Faults, UserError
from generate_config import INTERACTIVE_SLOTS, GenerateConfig
from kernels.slots import SLOT_TILE
from kv_cache import parse_formats
from model_config import ModelConfig
from quantize import Scheme, parse_scheme
from tokenizer import Tokenizer

log = logging.getLogger("kv_fast")

STDIN = Path("-")
"""As a file for the prompt; a file of that name needs its folder in front."""

PLAIN_FORMAT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""The KV format of a cache in the run's own dtype."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one run will do.

    Attributes:
        depth_ids: stored before the timed prompt.
        prompt_ids: the timed prompt, at least one id.
        new_tokens: to generate, at most.
        cache_len: slots per sequence, a multiple of SLOT_TILE.
        formats: of K and of V, names in FORMATS.
        prefill_chunk: tokens per prefill step.
        synthetic_depth: slots to fill with random K and V instead of depth_ids.
        longest_prompt: of an interactive run, in tokens; None: that of prompt_ids.
    """

    depth_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    new_tokens: int
    cache_len: int
    formats: tuple[str, str]
    prefill_chunk: int
    synthetic_depth: int = 0
    longest_prompt: int | None = None

    @property
    def depth(self) -> int:
        """Tokens in the cache before the timed prefill."""
        return len(self.depth_ids) + self.synthetic_depth

    @property
    def depth_fill(self) -> str:
        """How they came there, as a row says it."""
        if not self.depth:
            return "none"
        return "synthetic" if self.synthetic_depth else "prefill"

    @property
    def stored(self) -> int:
        """Tokens in the cache after the timed prefill."""
        return self.depth + len(self.prompt_ids)

    @property
    def largest_chunk(self) -> int:
        """Tokens of the largest prefill step."""
        longest = self.longest_prompt or len(self.prompt_ids)
        return min(self.prefill_chunk, max(len(self.depth_ids), longest))

    @property
    def prompt_sha(self) -> str:
        """Identity of all ids."""
        return ids_sha(self.depth_ids + self.prompt_ids)


def ids_sha(ids: Sequence[int]) -> str:
    """12 hex digits of the SHA-256 of ids, as little-endian int32."""
    return hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest()[:12]


class Inputs(NamedTuple):
    """What a request says by itself, whatever the checkpoint.

    Attributes:
        formats: of K and of V, names in FORMATS.
        text: of the prompt; '' where it is made of random ids.
        scheme: of the weights; None: as the checkpoint has them.
    """

    formats: tuple[str, str]
    text: str
    scheme: Scheme | None = None


def read_inputs(config: GenerateConfig) -> Inputs:
    """Check what can be checked without a checkpoint.

    Raises:
        UserError: unknown format, prompt that cannot be read; all of them.
    """
    spec, scheme = config.kv_cache_quantization, None
    faults = Faults()
    if config.quantization is not None:
        scheme = faults.check(parse_scheme, config.quantization)
    formats = faults.check(parse_formats, PLAIN_FORMAT[config.dtype] if spec is None else spec)
    text = faults.check(_prompt_text, config)
    faults.refuse()
    assert formats is not None and text is not None
    return Inputs(formats, text, scheme)


def resolve_request(
    config: GenerateConfig, inputs: Inputs, model_config: ModelConfig, tokenizer: Tokenizer
) -> Request:
    """Check what was asked for against the model.

    Raises:
        UserError: no prompt, ids or lengths that do not fit.
    """
    # Before any id is made: counts can be absurd.
    check_room(config, config.prompt_tokens or 0, model_config.max_seq_len)
    generator = torch.Generator().manual_seed(config.seed)
    known = range(min(tokenizer.vocab_size, model_config.vocab_size))
    ordinary = [i for i in known if i not in tokenizer.special_ids]
    synthetic_depth = config.depth if config.depth_fill == "synthetic" else 0
    depth_ids = random_ids(config.depth - synthetic_depth, ordinary, generator, tokenizer.bos_id)
    prompt_ids = _prompt_ids(config, inputs.text, tokenizer, ordinary, generator)
    if not prompt_ids:  # the last token of the depth has to run again, for its logits
        last = random_ids(1, ordinary, generator, tokenizer.bos_id if config.depth == 1 else None)
        depth_ids, prompt_ids = depth_ids[:-1], depth_ids[-1:] or last
        synthetic_depth = max(0, synthetic_depth - 1)
    if (largest := max(depth_ids + prompt_ids)) >= model_config.vocab_size:
        raise UserError(
            f"--prompt: token id {largest} is beyond the model's vocabulary of"
            f" {model_config.vocab_size}; the tokenizer is not this checkpoint's"
        )
    if config.interactive:
        return _interactive_request(config, inputs, prompt_ids, model_config.max_seq_len)
    stored = len(depth_ids) + synthetic_depth + len(prompt_ids)
    check_room(config, stored - config.depth, model_config.max_seq_len)
    new_tokens = clamp_new_tokens(stored, config.max_new_tokens, model_config.max_seq_len)
    return Request(
        depth_ids=depth_ids,
        prompt_ids=prompt_ids,
        new_tokens=new_tokens,
        cache_len=cache_slots(stored + new_tokens, config.cache_size),
        formats=inputs.formats,
        prefill_chunk=config.prefill_chunk,
        synthetic_depth=synthetic_depth,
    )


def _interactive_request(
    config: GenerateConfig, inputs: Inputs, prompt_ids: tuple[int, ...], max_seq_len: int
) -> Request:
    """Room for prompts that come later; the one of the flags stands for them in the warm-up."""
    slots = min(max_seq_len, config.cache_size or INTERACTIVE_SLOTS)
    if len(prompt_ids) >= slots:
        raise UserError(f"--cache_size {slots}: no room for a prompt of {len(prompt_ids)} tokens")
    return Request(
        depth_ids=(),
        prompt_ids=prompt_ids,
        new_tokens=min(config.max_new_tokens, slots - len(prompt_ids)),
        cache_len=cache_slots(slots, None),
        formats=inputs.formats,
        prefill_chunk=config.prefill_chunk,
        longest_prompt=slots,
    )


def clamp_new_tokens(stored: int, new_tokens: int, max_seq_len: int) -> int:
    """As many new tokens as the model's context has room for, with a line if that is fewer."""
    room = max_seq_len - stored
    if new_tokens > room:
        log.info(
            "%d prompt tokens + %d new tokens exceed the model's context of %d: generating %d",
            stored,
            new_tokens,
            max_seq_len,
            room,
        )
    return min(new_tokens, room)


def check_room(config: GenerateConfig, prompt_len: int, max_seq_len: int) -> None:
    """Refuse a request that leaves no room for a new token, naming the flags that fill it.

    Args:
        config: its depth counts.
        prompt_len: tokens of the prompt; 0 as long as it is unknown.
        max_seq_len: that the checkpoint was made for.
    """
    stored = config.depth + prompt_len
    if stored < max_seq_len:
        return
    flags = [f"--depth {config.depth}"] if config.depth else []
    if config.prompt_tokens is not None:
        flags.append(f"--prompt_tokens {config.prompt_tokens}")
    elif prompt_len > 0:
        name = "--prompt_file" if config.prompt_file else "--prompt"
        flags.append(f"{name} of {prompt_len} tokens")
    raise UserError(
        f"{' and '.join(flags)}: {stored} tokens leave no room in the checkpoint's context of"
        f" {max_seq_len}; ask for fewer"
    )


def cache_slots(needed: int, cache_size: int | None) -> int:
    """Slots to allocate: what is needed, or --cache_size if larger, rounded up to SLOT_TILE."""
    if cache_size is not None and cache_size < needed:
        raise UserError(
            f"--cache_size {cache_size}: the run needs {needed} slots; leave it out or raise it"
        )
    return -(-max(needed, cache_size or 0) // SLOT_TILE) * SLOT_TILE


def random_ids(
    count: int, ordinary: Sequence[int], generator: torch.Generator, bos_id: int | None
) -> tuple[int, ...]:
    """`count` random ones of the `ordinary` ids, the first replaced by the BOS if there is one."""
    picks = torch.randint(len(ordinary), (count,), generator=generator).tolist()
    ids = [ordinary[pick] for pick in picks]
    if ids and bos_id is not None:
        ids[0] = bos_id
    return tuple(ids)


def _prompt_ids(
    config: GenerateConfig,
    text: str,
    tokenizer: Tokenizer,
    ordinary: Sequence[int],
    generator: torch.Generator,
) -> tuple[int, ...]:
    """The ids of the prompt; none where it is empty and the depth stands in front of it."""
    starts = config.depth == 0
    if config.prompt_tokens is not None:
        bos_id = tokenizer.bos_id if starts else None
        return random_ids(config.prompt_tokens, ordinary, generator, bos_id)
    if config.chat:
        ids = tokenizer.encode_chat(messages(config, text))
    else:
        ids = tokenizer.encode(text, parse_special=config.parse_special)
    if not starts and ids[:1] == [tokenizer.bos_id]:
        ids = ids[1:]  # it stands at position 0, in front of the depth ids
    if starts and not ids:
        raise UserError("--prompt: no tokens, and no BOS in front of them; give a text")
    return tuple(ids)


def messages(config: GenerateConfig, text: str) -> list[Message]:
    """The conversation of --chat."""
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    return [*system, {"role": "user", "content": text}]


def _prompt_text(config: GenerateConfig) -> str:
    if config.prompt_tokens is not None:
        return ""
    return read_prompt(config.prompt_file) if config.prompt_file else config.prompt


def read_prompt(path: Path) -> str:
    """The text of a prompt file, byte for byte; of what comes on stdin where the path is `-`.

    Raises:
        UserError: unreadable, empty or not UTF-8.
    """
    try:
        data = read_stdin() if path == STDIN else path.read_bytes()
        text = data.decode()
    except OSError as error:
        raise UserError(f"--prompt_file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt_file {path}: not UTF-8 at byte {error.start}") from None
    if not data:
        raise UserError(f"--prompt_file {path}: the file is empty")
    return text


def read_stdin() -> bytes:
    """All of it; nothing where it is closed."""
    return sys.stdin.buffer.read() if sys.stdin else b""
