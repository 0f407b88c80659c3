"""Answers to what comes on stdin, line by line, from one engine and its cache."""

import io
import logging
import sys
from collections.abc import Iterator, Sequence

import torch

from chat_template import Message
from config import UserError, describe
from engine import generate
from generate_config import GenerateConfig
from measure import Recording, Runner
from text_printer import TextPrinter, text_of
from tokenizer_base import Tokenizer

log = logging.getLogger("kv_fast")

FORGET = "/clear"
"""The line that begins a new conversation."""


def converse(config: GenerateConfig, runner: Runner, tokenizer: Tokenizer) -> int:
    """Warm up, then answer each line of stdin until it ends; what is wrong with one is told."""
    runner.warm_up(f"warming up{', compiling the decode step' * config.compile}")
    log.info("a line is a prompt, %s forgets all before, Ctrl-D ends", FORGET)
    session = Session(config, runner, tokenizer)
    for text in _lines():
        try:
            session.answer(text)
        except UserError as error:
            log.info("error: %s", describe(error))
    return 0


class Session:
    """Turns over one cache. With --chat each sees those before, else it stands alone.

    Attributes:
        held: ids whose K and V lie in the cache, from slot 0 on.
        messages: of the conversation so far.
    """

    def __init__(self, config: GenerateConfig, runner: Runner, tokenizer: Tokenizer) -> None:
        self.config, self.runner, self.tokenizer = config, runner, tokenizer
        self.forget()

    def forget(self) -> None:
        """Begin a new conversation, as a fresh process would: stored tokens are not exact ones."""
        system = self.config.system
        self.held: list[int] = []
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def answer(self, text: str) -> None:
        """Print the answer as it comes and its figures, and keep both sides of a chat.

        Only what the cache does not hold yet is prefilled.

        Raises:
            UserError: no tokens, or more than there are slots; nothing is kept.
        """
        if text == FORGET or not self.config.chat:
            self.forget()
        if text == FORGET:
            return
        asked: Message = {"role": "user", "content": text}
        prompt_ids = self._ids(asked)
        ids = self._generate(prompt_ids)
        if self.config.chat:
            answer = text_of(ids, prompt_ids, self.tokenizer, is_chat=True)
            self.messages += [asked, {"role": "assistant", "content": answer}]

    def _ids(self, asked: Message) -> list[int]:
        if self.config.chat:
            return self.tokenizer.encode_chat([*self.messages, asked])
        return self.tokenizer.encode(asked["content"], parse_special=self.config.parse_special)

    def _room(self, prompt_ids: Sequence[int]) -> int:
        """New tokens there are slots for behind the prompt, at least one."""
        slots = self.runner.request.longest_prompt
        assert slots is not None
        if not prompt_ids:
            raise UserError("no tokens, and no BOS in front of them: not answered")
        if len(prompt_ids) < slots:
            return slots - len(prompt_ids)
        cures = [f"{FORGET} begins a new conversation"] * self.config.chat
        cures += ["--cache_size gives more"] * (slots < self.runner.engine.model.config.max_seq_len)
        raise UserError(
            f"{len(prompt_ids)} tokens leave no room in {slots} slots: not answered;"
            f" {', '.join(cures) or 'ask for less'}"
        )

    def _generate(self, prompt_ids: list[int]) -> list[int]:
        runner, room = self.runner, self._room(prompt_ids)
        start = min(common_prefix(self.held, prompt_ids), len(prompt_ids) - 1)
        self.held = self.held[:start]  # the rest is overwritten
        printer = TextPrinter(self.tokenizer, prompt_ids, is_chat=True)
        recording = Recording()
        tokens = generate(
            runner.engine,
            torch.tensor([prompt_ids[start:]], device=runner.engine.device),
            min(self.config.max_new_tokens, room),
            runner.sampling,
            start=start,
            seed=self.config.seed,
        )
        recording.run(tokens, runner.stop_ids, printer.show)
        printer.finish()
        self.held = prompt_ids + recording.ids[:-1]  # the last is never stored
        log.info(
            "%s; %d of %d slots",
            recording.statistics(),
            len(self.held),
            runner.request.longest_prompt,
        )
        return recording.ids


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def _lines() -> Iterator[str]:
    """Those of stdin that are not blank, without their ends; none where it is closed."""
    if sys.stdin is None:
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A byte that is no text becomes a surrogate, which is refused with its place.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if text := line.rstrip("\r\n"):
            yield text
