"""Where a checkpoint keeps its chat template, and which ids a conversation gets."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from material import LLAMA3_1_JSON, default_model, fetched
from test_tokenizer_real import gguf_fields
from tokenizer_kinds import (
    CONTROL_TEXT,
    FOLDER_KINDS,
    KINDS,
    byte_level_json,
    gguf_byte_level,
    gguf_sentencepiece,
    sentencepiece_json,
    sentencepiece_model,
    tiktoken_lines,
    write,
)

from chat_template import ChatTemplate
from config import UserError
from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer
from tokenizer_gguf import gguf_tokenizer

ECHO = "{% for m in messages %}{{ m.role }}={{ m.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "Hello"}]


def with_template(tokenizer: Tokenizer, text: str, **tokens: str) -> Tokenizer:
    return replace(tokenizer, chat_template=ChatTemplate("test", text, tokens))


def template_text(folder: Path) -> str | None:
    template = open_tokenizer(folder).chat_template
    return template and template.text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": None}}, None),
        ({"tokenizer_config.json": {"chat_template": []}}, None),
        ({"tokenizer_config.json": {"chat_template": "C"}}, "C"),
        ({"chat_template.jinja": "J\n"}, "J\n"),
        ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "C"}}, "J"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
    ],
)
@pytest.mark.parametrize("kind", FOLDER_KINDS)
def test_the_template_of_a_folder_is_found(
    kind: str, files: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    name, content = FOLDER_KINDS[kind]
    write(tmp_path, {name: content(), "config.json": {}} | files)
    assert template_text(tmp_path) == expected


def test_a_template_may_name_the_tokens_of_the_files(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"content": "<|eot_id|>", "lstrip": False},
    }
    others = {"pad_token": "<|pad|>", "eos_token": "<|end_of_text|>"}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": others}
    write(tmp_path, {"tokenizer.json": byte_level_json()} | files)
    template = open_tokenizer(tmp_path).chat_template
    assert template is not None
    assert template.render(HELLO) == "<|begin_of_text|>|<|eot_id|>|<|pad|>|"


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (3, "chat_template is 3; the text of a template"),
        (["a"], "chat_template is ['a']; objects with name and template"),
        ([{"name": "tool_use", "template": "T"}], "one of them has to be named default"),
        ([{"name": "default", "template": 5}], "the text of a template is needed"),
    ],
)
def test_a_template_of_another_type_is_named(value: Any, cause: str, tmp_path: Path) -> None:
    config = {"chat_template": value}
    write(tmp_path, {"tokenizer.json": byte_level_json(), "tokenizer_config.json": config})
    with pytest.raises(UserError) as caught:
        open_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/tokenizer_config.json: chat_template is ")
    assert cause in str(caught.value)


def test_a_template_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.json": byte_level_json(), "chat_template.jinja": b"\xff"})
    with pytest.raises(UserError, match=r"chat_template\.jinja: .*utf-8"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("fields", [gguf_byte_level, gguf_sentencepiece])
def test_the_template_of_a_gguf_file_is_found_with_its_tokens(
    fields: Callable[[], dict[str, Any]],
) -> None:
    assert gguf_tokenizer(fields()).chat_template is None
    key = "tokenizer.chat_template"
    template = gguf_tokenizer(fields() | {key: "{{ bos_token }}{{ eos_token }}"}).chat_template
    assert template is not None
    tokens = fields()["tokenizer.ggml.tokens"]
    bos_id = fields()["tokenizer.ggml.bos_token_id"]
    assert template.render(HELLO) == tokens[bos_id] + tokens[bos_id + 1]
    with pytest.raises(UserError, match="tokenizer.chat_template: is 7"):
        gguf_tokenizer(fields() | {key: 7})


def test_a_meta_folder_has_the_format_of_its_kind_of_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.model": tiktoken_lines(), "params.json": {}})
    llama3 = open_tokenizer(tmp_path)
    ids = llama3.control_ids
    turns = [("user", "Hello", "<|eot_id|>"), ("assistant", "", "")]
    expected = [llama3.bos_id]
    for role, content, end in turns:
        expected += [ids["<|start_header_id|>"], *llama3.encode_text(role)]
        expected += [ids["<|end_header_id|>"], *llama3.encode_text("\n\n" + content)]
        expected += [ids[end]] if end else []
    assert llama3.encode_chat(HELLO) == expected
    write(tmp_path, {"tokenizer.model": sentencepiece_model()})
    llama2 = open_tokenizer(tmp_path)
    assert llama2.encode_chat(HELLO) == llama2.encode("[INST] Hello [/INST]")


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--chat: the checkpoint has no chat template"):
        KINDS["tiktoken"](tmp_path).encode_chat(HELLO)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_one_bos_whether_or_not_the_template_writes_it(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind](tmp_path)
    bos = next(text for text, i in tokenizer.control_ids.items() if i == tokenizer.bos_id)
    for template in ("{{ bos_token }}" + ECHO, ECHO):
        ids = with_template(tokenizer, template, bos_token=bos).encode_chat(HELLO)
        assert ids == tokenizer.encode("user=Hello")
        assert ids.count(tokenizer.bos_id) == 1
    without = replace(tokenizer, bos_id=None)
    assert with_template(without, ECHO).encode_chat(HELLO) == tokenizer.encode("user=Hello")[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_control_text_inside_a_message_stays_text(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind](tmp_path)
    end = next(text for text, i in tokenizer.control_ids.items() if i in tokenizer.stop_ids)
    texts = [CONTROL_TEXT, end, f"<{end}>", f"{end[0]}{end}{end[1:]}", f"a\ue000b{end}"]
    for text in texts:
        chatting = with_template(tokenizer, ECHO + end)
        ids = chatting.encode_chat([{"role": "user", "content": text}])
        assert ids == [*tokenizer.encode(f"user={text}"), tokenizer.control_ids[end]]


def metaspace_json(scheme: str) -> str:
    """Newer conversions: Metaspace in place of the normalizer."""
    spec = json.loads(sentencepiece_json()) | {"normalizer": None}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return json.dumps(spec | {"pre_tokenizer": metaspace, "decoder": metaspace})


@pytest.mark.parametrize(
    "content",
    [byte_level_json, sentencepiece_json]
    + [lambda s=scheme: metaspace_json(s) for scheme in ("first", "always", "never")],
    ids=["byte-level", "sentencepiece", "metaspace-first", "metaspace-always", "metaspace-never"],
)
def test_the_ids_are_those_of_the_library_on_the_rendered_text(
    content: Callable[[], str], tmp_path: Path
) -> None:
    write(tmp_path, {"tokenizer.json": content()})
    tokenizer = open_tokenizer(tmp_path)
    bos, end = ("<|begin_of_text|>", "<|eot_id|>")
    if bos not in tokenizer.control_ids:
        bos, end = ("<s>", "</s>")
    template = "{{ bos_token }} [INST] a{{ eos_token }}b {{ eos_token }}{{ messages[0].content }}"
    chatting = with_template(tokenizer, template, bos_token=bos, eos_token=end)
    library = tokenizers.Tokenizer.from_str(content())
    text = f"{bos} [INST] a{end}b {end}Hello"
    assert chatting.encode_chat(HELLO) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.network
@pytest.mark.slow
def test_a_real_tokenizer_json_gives_a_chat_the_ids_of_its_library(tmp_path: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    contents = fetched(LLAMA3_1_JSON, *(f"models/{name}" for name in names))
    write(tmp_path, dict(zip(names, contents, strict=True)))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.chat_template is not None
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    rendered = tokenizer.chat_template.render(messages)
    ids = tokenizer.encode_chat(messages)
    assert ids == library.encode(rendered, add_special_tokens=False).ids
    assert ids.count(128000) == 1


FRANCE_IDS = (
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 "
    "1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"
)


@pytest.mark.network
def test_the_default_model_has_the_known_ids_of_a_chat() -> None:
    tokenizer = gguf_tokenizer(gguf_fields(default_model()))
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert ids == [int(i) for i in FRANCE_IDS.split()]


def test_a_template_may_hold_every_private_character_of_the_first_plane() -> None:
    tokenizer = gguf_tokenizer(gguf_byte_level())
    template = "{# " + "".join(map(chr, range(0xE000, 0xF900))) + " #}{{ messages[0].content }}"
    ids = with_template(tokenizer, template).encode_chat(HELLO)
    assert ids == tokenizer.encode("Hello")


def test_text_with_every_private_character_is_one_line() -> None:
    private = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)]))
    tokenizer = with_template(gguf_tokenizer(gguf_byte_level()), ECHO)
    with pytest.raises(UserError, match="all private characters"):
        tokenizer.encode_chat([{"role": "user", "content": private}])
