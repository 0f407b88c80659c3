"""Messages become the text that transformers makes of them, or one line says why not."""

import hashlib
import time
from datetime import datetime

import pytest
from material import VECTORS, fetched

from chat_template import LLAMA2_CHAT, LLAMA3_CHAT, WALL_S, ChatTemplate
from config import UserError

TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
USER = {"role": "user", "content": " Qu'est-ce que c'est, 🦙 <b>&amp;?\n"}
SYSTEM = {"role": "system", "content": " Be brief. "}
CHATS = {"user": [USER], "system": [SYSTEM, USER]}

# Length and SHA-256 of what transformers 5.24 renders of CHATS with TOKENS, dates replaced.
RENDERED = {
    "meta-llama-Llama-3.1-8B-Instruct": {
        "user": (253, "8cecf8378227144d"),
        "system": (262, "bfebd3779c972913"),
    },
    "meta-llama-Llama-3.2-3B-Instruct": {
        "user": (247, "9d4e6efda2f9bbe5"),
        "system": (256, "539cf3275f8d54dc"),
    },
    "meta-llama-Llama-3.3-70B-Instruct": {
        "user": (253, "8cecf8378227144d"),
        "system": (262, "bfebd3779c972913"),
    },
    "Qwen-Qwen2.5-7B-Instruct": {
        "user": (182, "2ef7910ce89a9835"),
        "system": (125, "5938ff84b05ebc77"),
    },
    "HuggingFaceTB-SmolLM3-3B": {
        "user": (1372, "66bbd01897ef7bb2"),
        "system": (220, "8ab553d98e74da7b"),
    },
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {
        "user": (68, "f534bddc9d5d3f83"),
        "system": (79, "fd6b49515b97b3f8"),
    },
    "mistralai-Mistral-Nemo-Instruct-2407": {
        "user": (52, "6db0b167d6af0ef6"),
        "system": (65, "734debd431a6ba5b"),
    },
}


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERED)
def test_real_templates_give_the_text_that_transformers_gives(name: str) -> None:
    [data] = fetched(VECTORS, f"templates/{name}.jinja")
    template = ChatTemplate(name, data.decode(), TOKENS)
    for chat, expected in RENDERED[name].items():
        text = template.render(CHATS[chat])
        for layout in ("%d %b %Y", "%d %B %Y"):
            text = text.replace(datetime.now().strftime(layout), "TODAY")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        assert (len(text), digest) == expected, (chat, text)


@pytest.mark.parametrize(
    ("template", "chat", "text"),
    [
        (
            LLAMA3_CHAT,
            "system",
            "<BOS><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nQu'est-ce que c'est, 🦙 <b>&amp;?"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (LLAMA2_CHAT, "user", "<BOS>[INST] Qu'est-ce que c'est, 🦙 <b>&amp;? [/INST]"),
        (
            LLAMA2_CHAT,
            "system",
            "<BOS>[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\n Qu'est-ce que c'est, 🦙 <b>&amp;? "
            "[/INST]",
        ),
    ],
)
def test_metas_own_formats_are_those_of_its_code(template: str, chat: str, text: str) -> None:
    assert ChatTemplate("", template, TOKENS).render(CHATS[chat]) == text


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ raise_exception('system role\nnot supported') }}", r"system role\nnot supported"),
        ("{% if %}", "TemplateSyntaxError: Expected an expression"),
        ("{{ nothing.at_all }}", "UndefinedError: 'nothing' is undefined"),
        ("{{ ''.__class__.__base__ }}", "SecurityError: "),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "makes more than 4194304 char"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
        ("{{ '\\ud800' }}", "makes characters that are no valid text"),
        ("{% import 'os' as os %}", "TypeError: no loader"),
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "RecursionError: "),
    ],
)
def test_a_template_that_cannot_be_rendered_is_named_with_the_cause(
    template: str, cause: str
) -> None:
    with pytest.raises(UserError) as caught:
        ChatTemplate("a/chat_template.jinja", template, TOKENS).render([USER])
    message = str(caught.value)
    assert message.startswith("a/chat_template.jinja: chat template: ")
    assert cause in message
    assert "\n" not in message


def test_a_template_that_loops_for_ever_ends_in_one_line() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    start_s = time.monotonic()
    with pytest.raises(UserError, match=rf"^x: chat template: no text within {WALL_S} s"):
        ChatTemplate("x", loop, TOKENS).render([USER])
    assert time.monotonic() - start_s < 2 * WALL_S
