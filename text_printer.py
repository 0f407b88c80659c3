"""Text of generated ids, as it comes and at once."""

from collections.abc import Sequence

from tokenizer_base import Tokenizer


class TextPrinter:
    """Prints the text of ids as far as its characters are complete.

    Args:
        prompt_ids: what the ids follow; their text stands in front, unless the answer alone is
            wanted, as of a chat, where a template is around the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, is_chat: bool) -> None:
        self._unseen = "" if is_chat else tokenizer.decode(prompt_ids)
        self._stream = tokenizer.stream(prompt_ids)

    def show(self, token_id: int) -> None:
        print(self._unseen + self._stream.push(token_id), end="", flush=True)
        self._unseen = ""

    def finish(self) -> None:
        print(self._stream.flush(), flush=True)


def text_of(
    ids: Sequence[int], prompt_ids: Sequence[int], tokenizer: Tokenizer, *, is_chat: bool = False
) -> str:
    """What `TextPrinter` prints of the same ids, without the line's end."""
    stream = tokenizer.stream(prompt_ids)
    prompt = "" if is_chat else tokenizer.decode(prompt_ids)
    return prompt + "".join(map(stream.push, ids)) + stream.flush()
