"""The small JSON files beside a tokenizer: who ends a text, whether it begins with a BOS, chat."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chat_template import ChatTemplate
from checkpoint_fields import Fields
from config import UserError
from plain_files import is_given
from tokenizer_base import quoted

# Later ones say what the first leaves out.
TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")
END_FILES = ("config.json", "generation_config.json")
MOST_GAPS = 1 << 20  # ids without a token: more are a damaged file, and cost memory
TEMPLATE_FILE = "chat_template.jinja"


class SideFile:
    """The object in a JSON file, by key; empty where there is no such file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and type(value) is not bool:
            raise self.error(key, "true or false is needed")
        return value

    def token(self, key: str) -> str:
        """The text of a token, given as such or as an object with `content`; '' for none."""
        value = self.values.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and not isinstance(text, str):
            raise self.error(key, "the text of a token is needed")
        return text or ""

    def ids(self, key: str) -> list[int]:
        """One id or a list of them; none where the key is missing or null."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in ids):
            raise self.error(key, "give token ids")
        return ids

    def error(self, key: str, cure: str) -> UserError:
        return UserError(f"{self.path}: {key} is {quoted(self.values.get(key))}; {cure}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    return Fields.from_json(path).values if is_given(path) else {}


def may_add_bos(folder: Path) -> bool:
    return SideFile(folder / TOKEN_FILES[0]).flag("add_bos_token") is not False


def token_texts(folder: Path) -> dict[str, str]:
    """What the files call bos_token, eos_token and so on."""
    files = [SideFile(folder / name) for name in TOKEN_FILES]
    texts = {key: next(filter(None, (f.token(key) for f in files)), "") for key in TOKEN_KEYS}
    return {key: text for key, text in texts.items() if text}


def added_tokens(folder: Path, vocab_size: int) -> list[str]:
    """The tokens that added_tokens.json puts behind a vocabulary; '' for ids in between.

    Raises:
        UserError: not a table of ids, or ids far beyond the vocabulary.
    """
    file = SideFile(folder / "added_tokens.json")
    ids = {name: i for name in file.values for i in file.ids(name)}
    added = {i: name for name, i in ids.items() if i >= vocab_size}
    size = max(added, default=vocab_size - 1) + 1
    if size - vocab_size > MOST_GAPS:
        raise file.error(added[size - 1], "download it again")
    return [added.get(i, "") for i in range(vocab_size, size)]


def declared_stop_ids(folder: Path, ids: Mapping[str, int]) -> Iterator[int]:
    """The end ids that the files beside a tokenizer name, by id or by text."""
    for name in END_FILES:
        yield from SideFile(folder / name).ids("eos_token_id")
    for name in TOKEN_FILES:
        text = SideFile(folder / name).token("eos_token")
        if text and text in ids:
            yield ids[text]


def chat_template_of(folder: Path) -> ChatTemplate | None:
    """The folder's template, if it has one; a file of its own goes before the configuration."""
    path = folder / TEMPLATE_FILE
    if not is_given(path):
        config = SideFile(folder / TOKEN_FILES[0])
        text = default_template(config)
        return ChatTemplate(str(config.path), text, token_texts(folder)) if text else None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; download it again") from None
    return ChatTemplate(str(path), text, token_texts(folder))


def default_template(config: SideFile) -> str:
    """`chat_template`: a text, or several by name of which one is the default; '' for none."""
    value = config.values.get("chat_template")
    if isinstance(value, list):
        if not all(isinstance(item, dict) for item in value):
            raise config.error("chat_template", "objects with name and template are needed")
        texts = [item.get("template") for item in value if item.get("name") == "default"]
        value = texts[-1] if texts else "" if not value else None
        if value is None:
            raise config.error("chat_template", "one of them has to be named default")
    if value is not None and not isinstance(value, str):
        raise config.error("chat_template", "the text of a template is needed")
    return value or ""
