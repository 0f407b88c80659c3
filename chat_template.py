"""The chat template of a checkpoint: from messages to the text that the model was trained on."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from config import UserError, printable

Message = Mapping[str, str]
"""`role` and `content`."""

RENDERER = Path(__file__).resolve().parent / "chat_render.py"
WALL_S = 5

# Meta's folders hold no template. What their own code does: meta-llama/llama-models,
# models/llama3/chat_format.py; meta-llama/llama, llama/generation.py.
LLAMA3_CHAT = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
LLAMA2_CHAT = (
    "{% set turns = namespace(system='') %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}"
    "{% set turns.system = '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' %}"
    "{% elif message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (turns.system + message.content) | trim + ' [/INST]' }}"
    "{% set turns.system = '' %}"
    "{% else %}"
    "{{ ' ' + message.content | trim + ' ' + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class ChatTemplate:
    """A template as a checkpoint gives it.

    Attributes:
        source: the file, or the key in it, for messages.
        text: jinja2.
        tokens: what it may name: `bos_token`, `eos_token` and the like -> their text.
    """

    source: str
    text: str
    tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to where the assistant begins.

        Raises:
            UserError: the template is malformed, refuses the messages, or takes too much.
        """
        conversation = {"messages": list(messages), "add_generation_prompt": True}
        variables = {**self.tokens, **conversation, "tools": None, "documents": None}
        request = json.dumps({"template": self.text, "variables": variables})
        try:
            answer = _answer(request)
        except (subprocess.TimeoutExpired, ValueError):
            cause = f"no text within {WALL_S} s and half a gigabyte of memory"
            raise self._error(cause) from None
        if "error" in answer:
            raise self._error(printable(answer["error"]))
        if any("\ud800" <= character <= "\udfff" for character in answer["text"]):
            raise self._error("makes characters that are no valid text")
        return answer["text"]

    def _error(self, cause: str) -> UserError:
        return UserError(f"{self.source}: chat template: {cause}; leave --chat out")


def _answer(request: str) -> dict[str, str]:
    """What the renderer prints.

    Raises:
        subprocess.TimeoutExpired: nothing within WALL_S.
        ValueError: it died before.
    """
    command = [sys.executable, "-P", str(RENDERER)]
    done = subprocess.run(
        command, input=request.encode(), capture_output=True, timeout=WALL_S, check=False
    )
    return json.loads(done.stdout)
