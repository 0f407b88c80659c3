"""A fact hidden in a long text, and how well it is found again: the NLL of its key.

Not by hits alone: a small model seldom answers exactly, but with the fact in its text the key is
far likelier than without.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quality import log_softmax
from scoring import Stream

FILLER = (
    "Rain fell on the harbour all morning. The boats stayed at their moorings. A clerk counted"
    " barrels on the quay. Nobody was in a hurry.\n"
)
NEEDLE = "The locker number is {key}. Keep it in mind: {key} is the locker number.\n"
QUESTION = "What is the locker number? The locker number is"
KEY_DIGITS = 5

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Hidden:
    """A text that ends before its key.

    Attributes:
        ids: [P] of the text, up to and with the question.
        key_ids: [K], of the blank and the digits.
    """

    ids: Tensor
    key_ids: Tensor


@dataclass(frozen=True)
class Found:
    """How likely the key was: its NLL in nats, and whether each of its ids was the likeliest."""

    nll: float
    is_exact: bool


def keys(trials: int, seed: int) -> list[str]:
    """Digits to hide, the same for one seed."""
    rng = random.Random(seed)
    return ["".join(rng.choices("0123456789", k=KEY_DIGITS)) for _ in range(trials)]


def hide(encode: Encode, key: str, context: int, place_pct: int | None) -> Hidden | None:
    """A text of at most `context` tokens with the key at a place; None where it does not fit.

    Args:
        encode: of a checkpoint's tokenizer, with a BOS where it wants one.
        key: of digits.
        context: key included.
        place_pct: of the filler that stands before the needle; None: no needle in it.
    """
    per_filler = len(encode(FILLER + FILLER)) - len(encode(FILLER))
    empty = hidden_in(encode, key, 0, place_pct)
    count = max(0, (context - length(empty)) // per_filler)
    text = hidden_in(encode, key, count, place_pct)
    while length(text) > context and count:  # pieces can join to more tokens than they are alone
        count -= 1
        text = hidden_in(encode, key, count, place_pct)
    return text if length(text) <= context else None


def length(text: Hidden) -> int:
    return len(text.ids) + len(text.key_ids)


def hidden_in(encode: Encode, key: str, count: int, place_pct: int | None) -> Hidden:
    """The text with `count` repeats of the filler."""
    before = round(count * (place_pct or 0) / 100)
    needle = "" if place_pct is None else NEEDLE.format(key=key)
    text = before * FILLER + needle + (count - before) * FILLER + QUESTION
    ids, whole = encode(text), encode(f"{text} {key}")
    shared = next((i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), len(ids))
    return Hidden(torch.tensor(whole[:shared]), torch.tensor(whole[shared:]))


def find(stream: Stream, text: Hidden, *, is_stored: bool = False) -> Found:
    """Read a text, and decode its key from what is then stored. Mutates the stream's caches.

    Args:
        is_stored: the stream read the same text last: the slots of its key alone are written anew.
    """
    last = len(text.ids) - 1
    if not is_stored:
        stream.prefill(text.ids[:last])
    fed = torch.cat((text.ids[last:], text.key_ids[:-1]))
    log_p = log_softmax(stream.logits(fed, last)).cpu()
    of_key = log_p.gather(1, text.key_ids[:, None])[:, 0]
    return Found(-of_key.sum().item(), bool((log_p.argmax(-1) == text.key_ids).all()))


def lost(found: Sequence[Found], found_ref: Sequence[Found]) -> int:
    """Keys that the reference finds exactly and the other does not."""
    return sum(
        ref.is_exact and not each.is_exact for each, ref in zip(found, found_ref, strict=True)
    )
