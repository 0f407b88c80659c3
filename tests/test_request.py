"""A request is right, or refused with the numbers, before anything is loaded."""

import dataclasses
import hashlib
import io
import logging
import struct
import sys

import pytest
from conftest import TINY

from chat_template import ChatTemplate
from config import UserError, parse, to_argv
from generate_config import GenerateConfig
from request import cache_slots, clamp_new_tokens, read_inputs, read_prompt, resolve_request
from tokenizer import Tokenizer

BOS_ID, EOS_ID = 256, 257
SPECIAL_IDS = frozenset(range(256, 300))


def byte_tokenizer(bos_id=BOS_ID):
    """Byte b is id b; the ids from 256 on are special."""
    return Tokenizer(
        encode_text=lambda text: list(text.encode()),
        pieces=[bytes([byte]) for byte in range(256)] + [b""] * len(SPECIAL_IDS),
        bos_id=bos_id,
        stop_ids=frozenset({EOS_ID}),
        special_ids=SPECIAL_IDS,
        strips_leading_space=False,
    )


def resolved(tokenizer=None, **flags):
    config = GenerateConfig(**flags)
    return resolve_request(config, read_inputs(config), TINY, tokenizer or byte_tokenizer())


def refusal(call, *args, **keywords):
    with pytest.raises(UserError) as caught:
        call(*args, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_text_stands_behind_one_bos():
    request = resolved(prompt="hé")
    assert request.prompt_ids == (BOS_ID, *"hé".encode())
    assert request.depth_ids == ()
    assert request.stored == 4


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({"prompt": "abc"}, 4),
        ({"prompt": "abc", "depth": 20}, 23),
        ({"prompt_tokens": 9}, 9),
        ({"prompt_tokens": 9, "depth": 20}, 29),
        ({"prompt_tokens": 1}, 1),
        ({"prompt_tokens": 1, "depth": 1}, 2),
    ],
)
def test_bos_stands_exactly_once_and_at_position_0(flags, tokens):
    request = resolved(**flags)
    ids = request.depth_ids + request.prompt_ids
    assert len(ids) == tokens
    assert [position for position, i in enumerate(ids) if i == BOS_ID] == [0]
    plain = resolved(byte_tokenizer(bos_id=None), **flags)
    assert BOS_ID not in plain.depth_ids + plain.prompt_ids


def test_random_ids_are_never_special_and_differ():
    request = resolved(prompt_tokens=200, depth=200)
    ids = request.depth_ids[1:] + request.prompt_ids
    assert not SPECIAL_IDS & set(ids)
    assert len(set(ids)) > 150
    assert request.depth_ids[1:] != request.prompt_ids[1:]


def test_random_ids_depend_on_the_seed_alone():
    first, again, other = (resolved(prompt_tokens=50, depth=9, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first.prompt_ids != other.prompt_ids
    assert first.depth_ids != other.depth_ids


@pytest.mark.parametrize("depth", [0, 5])
def test_the_prompt_sha_covers_depth_and_prompt_ids(depth):
    request = resolved(prompt="abc", depth=depth)
    ids = request.depth_ids + request.prompt_ids
    data = b"".join(struct.pack("<i", i) for i in ids)
    assert request.prompt_sha == hashlib.sha256(data).hexdigest()[:12]


def test_a_synthetic_depth_takes_slots_and_no_ids():
    request = resolved(prompt_tokens=9, depth=300, depth_fill="synthetic", max_new_tokens=100)
    assert request.depth_ids == ()
    assert (request.depth, request.stored, request.cache_len) == (300, 309, 512)
    assert (request.depth_fill, request.largest_chunk) == ("synthetic", 9)
    assert BOS_ID not in request.prompt_ids  # its place is in front of the depth
    assert "leave no room" in refusal(resolved, depth=512, depth_fill="synthetic")


@pytest.mark.parametrize(("depth", "depth_fill"), [(0, "none"), (20, "prefill")])
def test_a_depth_is_prefilled_unless_asked_otherwise(depth, depth_fill):
    request = resolved(depth=depth)
    assert (request.depth, request.depth_fill) == (depth, depth_fill)


def test_an_empty_prompt_is_the_bos_alone_or_refused():
    assert resolved(prompt="").prompt_ids == (BOS_ID,)
    assert "--prompt: no tokens" in refusal(resolved, byte_tokenizer(bos_id=None), prompt="")


@pytest.mark.parametrize("bos_id", [BOS_ID, None])
@pytest.mark.parametrize("depth", [1, 5])
def test_an_empty_prompt_goes_on_behind_the_last_token_of_the_depth(depth, bos_id):
    request = resolved(byte_tokenizer(bos_id), prompt="", depth=depth)
    same = resolved(byte_tokenizer(bos_id), prompt="a", depth=depth)
    assert request.depth_ids + request.prompt_ids == same.depth_ids
    assert (len(request.prompt_ids), request.stored) == (1, depth)
    synthetic = resolved(
        byte_tokenizer(bos_id), prompt="", depth=depth, depth_fill="synthetic", max_new_tokens=3
    )
    assert (synthetic.synthetic_depth, synthetic.stored, synthetic.cache_len) == (
        depth - 1,
        depth,
        128,
    )
    assert (synthetic.prompt_ids == (bos_id,)) == (depth == 1 and bos_id is not None)
    assert not SPECIAL_IDS & set(synthetic.prompt_ids) - {bos_id}


def test_the_text_of_a_special_token_is_no_special_token():
    request = resolved(prompt="<|eot_id|>")
    assert not SPECIAL_IDS & set(request.prompt_ids[1:])


def test_the_text_of_a_special_token_is_that_token_where_it_is_asked_for():
    prompt = "a<eos>b"
    ids = resolved(chat_tokenizer(), prompt=prompt, parse_special=True).prompt_ids
    assert ids == (BOS_ID, ord("a"), EOS_ID, ord("b"))
    assert EOS_ID not in resolved(chat_tokenizer(), prompt=prompt).prompt_ids


def test_ids_beyond_the_vocabulary_are_refused_with_both_numbers():
    # TINY has 320 ids; a tokenizer of a larger model gives 320
    tokenizer = byte_tokenizer(bos_id=320)
    assert "token id 320 is beyond the model's vocabulary of 320" in refusal(resolved, tokenizer)
    assert resolved(byte_tokenizer(bos_id=319)).prompt_ids[0] == 319


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")]
)
def test_the_cache_has_the_dtype_of_the_run_unless_asked_otherwise(dtype, name):
    assert resolved(dtype=dtype).formats == (name, name)
    assert resolved(dtype=dtype, kv_cache_quantization="int8").formats == ("int8", "int8")
    assert resolved(dtype=dtype, kv_cache_quantization="bf16,int8").formats == ("bf16", "int8")


@pytest.mark.parametrize("spec", ["int3", "", "int8,", "int8,bf16,bf16", "INT8"])
def test_an_unknown_format_is_refused_with_those_there_are(spec):
    message = refusal(resolved, kv_cache_quantization=spec)
    assert message.startswith(f"--kv_cache_quantization {spec}: ")
    assert "bf16, fp16, fp32, int8" in message


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "cache_size", "new_tokens", "cache_len"),
    [
        (28, 100, None, 100, 128),
        (29, 100, None, 100, 256),
        (29, 99, 129, 99, 256),
        (1, 1, None, 1, 128),
        (10, 20, 30, 20, 128),
        (10, 20, 100_000, 20, 100_096),
        (10, 502, None, 502, 512),
        (10, 503, None, 502, 512),
        (511, 200, None, 1, 512),
    ],
)
def test_lengths_follow_the_request_the_context_of_512_and_steps_of_128(
    prompt_tokens, max_new_tokens, cache_size, new_tokens, cache_len
):
    request = resolved(
        prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, cache_size=cache_size
    )
    assert (request.new_tokens, request.cache_len) == (new_tokens, cache_len)


def test_a_long_context_allocates_what_the_run_needs():
    assert clamp_new_tokens(30, 100, 131072) == 100
    assert cache_slots(130, None) == 256


def test_fewer_new_tokens_than_asked_for_are_told_with_the_three_numbers(caplog):
    caplog.set_level(logging.INFO, "kv_fast")
    assert clamp_new_tokens(500, 12, 512) == 12
    assert not caplog.messages
    assert clamp_new_tokens(500, 13, 512) == 12
    [line] = caplog.messages
    assert "500 prompt tokens + 13 new tokens exceed the model's context of 512" in line
    assert "generating 12" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"prompt_tokens": 512}, "--prompt_tokens 512: 512 tokens"),
        ({"prompt_tokens": 12, "depth": 500}, "--depth 500 and --prompt_tokens 12: 512 tokens"),
        ({"prompt": 511 * "a"}, "--prompt of 512 tokens: 512 tokens"),
        ({"prompt": 12 * "a", "depth": 500}, "--depth 500 and --prompt of 12 tokens: 512 tokens"),
        ({"depth": 200_000}, "--depth 200000: 200000 tokens"),
        ({"depth": 512, "prompt": ""}, "--depth 512: 512 tokens"),
        ({"depth": 512, "depth_fill": "synthetic"}, "--depth 512: 512 tokens"),
    ],
)
def test_what_fills_the_context_is_refused_with_its_flags_and_both_numbers(flags, named):
    message = refusal(resolved, **flags)
    assert message.startswith(f"{named} leave no room in the checkpoint's context of 512; ")


def test_a_prompt_file_that_fills_the_context_is_named(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text(600 * "a")
    assert refusal(resolved, prompt_file=file).startswith("--prompt_file of 601 tokens: 601 ")


def test_everything_wrong_with_a_request_itself_is_told_together(tmp_path):
    config = GenerateConfig(kv_cache_quantization="int3", prompt_file=tmp_path / "none")
    with pytest.raises(UserError) as caught:
        read_inputs(config)
    formats, prompt = caught.value.args
    assert formats.startswith("--kv_cache_quantization int3: ")
    assert prompt.startswith(f"--prompt_file {tmp_path}/none: No such file")


CHAT = "{{ bos }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"


def chat_tokenizer(bos_id=BOS_ID):
    template = ChatTemplate("template", CHAT, {"bos": "<bos>"})
    control = {"<bos>": BOS_ID, "<eos>": EOS_ID}
    tokenizer = byte_tokenizer(bos_id)
    return dataclasses.replace(tokenizer, control_ids=control, chat_template=template)


@pytest.mark.parametrize("depth", [0, 7])
def test_a_chat_is_the_rendered_template_behind_one_bos(depth):
    request = resolved(
        chat_tokenizer(), chat=True, prompt="hé<eos>", system="be brief", depth=depth
    )
    text = "[system]be brief[user]hé<eos>>"
    assert request.prompt_ids[-len(text.encode()) :] == tuple(text.encode())
    ids = request.depth_ids + request.prompt_ids
    assert [position for position, i in enumerate(ids) if i == BOS_ID] == [0]
    assert EOS_ID not in ids


def test_a_chat_without_a_system_message_has_none():
    ids = resolved(chat_tokenizer(), chat=True, prompt="x").prompt_ids
    assert ids == (BOS_ID, *b"[user]x>")


def test_a_chat_needs_a_template():
    assert refusal(resolved, chat=True).startswith("--chat: the checkpoint has no chat template")


def test_a_cache_that_is_too_small_is_refused_with_both_numbers():
    message = refusal(resolved, prompt_tokens=10, max_new_tokens=20, cache_size=29)
    assert message.startswith("--cache_size 29: the run needs 30 slots")


@pytest.mark.parametrize("text", ["a\r\nb\n", "\ufeffbom", "nul\0", "\ufffd", " ", "한🦙"])
def test_a_prompt_file_is_taken_byte_for_byte(text, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    assert bytes(resolved(prompt_file=file).prompt_ids[1:]) == text.encode()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("a\r\nb 한\n".encode(), "a\r\nb 한\n"),
        (b"", "--prompt_file -: the file is empty"),
        (b"caf\xe9", "--prompt_file -: not UTF-8 at byte 3"),
        (None, "--prompt_file -: the file is empty"),  # closed
    ],
)
def test_a_dash_as_prompt_file_is_stdin_byte_for_byte(data, found, monkeypatch):
    stdin = None if data is None else io.TextIOWrapper(io.BytesIO(data))
    monkeypatch.setattr(sys, "stdin", stdin)
    config = parse(GenerateConfig, ["--prompt_file", "-"])
    assert parse(GenerateConfig, to_argv(config)) == config
    try:
        assert read_prompt(config.prompt_file) == found
    except UserError as error:
        assert str(error) == found


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "No such file or directory"),
        (b"", "the file is empty"),
        (b"caf\xe9", "not UTF-8 at byte 3"),
        (1832 * b"a" + b"\xff\xfe", "not UTF-8 at byte 1832"),
        ("folder", "Is a directory"),
    ],
)
def test_a_prompt_file_that_cannot_be_read_is_named_with_the_cause(content, cause, tmp_path):
    file = tmp_path / "prompt.txt"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    assert refusal(read_prompt, file) == f"--prompt_file {file}: {cause}"


def test_a_prompt_with_a_lone_surrogate_is_refused():
    assert "character 2" in refusal(resolved, prompt="ab\udcff")
