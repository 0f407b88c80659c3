"""Flags are parsed, written back and refused; a run ends with one line and the right code."""

import dataclasses
import random
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

import config
from command import run
from config import MISSING, Faults, UserError, flag, help_text, parse, repro_command, to_argv
from generate_config import GenerateConfig

ROOT = Path(config.__file__).parent
NASTY = [
    "", " ", "a b", "it's", '"quoted"', "-x", "--prompt", "--prompt=--x", "-1", "int8",
    "é ü 漢字 🦙", "a,b;c%d", ", repro: ", "line\nbreak", "\u2028", "$HOME `ls` \\",
    "*", "#", "x=--",
]  # fmt: skip

FLAGS = [
    "checkpoint_path", "prompt", "prompt_file", "prompt_tokens", "chat", "system", "interactive",
    "parse_special",
    "depth", "depth_fill",
    "max_new_tokens", "cache_size", "kv_cache_quantization", "quantization", "prefill_chunk",
    "dtype",
    "device", "compile", "temperature", "top_k", "seed",
    "num_samples", "ignore_eos", "check_tokens", "threads", "memory_profile",
    "write_result", "json", "debug",
]  # fmt: skip


def random_value(item: dataclasses.Field, rng: random.Random) -> object:
    """Any legal value of a flag, and now and then its default."""
    spec, kind = item.metadata["flag"], config.plain_type(item.type)
    if rng.random() < 0.3:
        return item.default
    if spec.choices:
        return rng.choice(spec.choices)
    low, high = int(spec.minimum or 0), int(spec.maximum or 10**9)
    makers = {
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.randint(low, high),
        float: lambda: rng.choice([low, rng.uniform(low, 1e-9), rng.uniform(low, 1e9)]),
        str: lambda: "".join(rng.choices(NASTY, k=rng.randint(1, 3))),
        Path: lambda: Path("".join(rng.choices(NASTY, k=rng.randint(1, 3)))),
    }
    return makers[kind]()


def random_config(rng: random.Random) -> GenerateConfig:
    values = {f.name: random_value(f, rng) for f in dataclasses.fields(GenerateConfig)}
    sources = ["prompt", "prompt_file", "prompt_tokens"]
    for name in rng.sample(sources, 2):
        del values[name]
    values["write_result"] = values["memory_profile"] = None
    values["interactive"] = False
    if values.get("prompt_tokens") is not None:
        values["chat"] = False
    if not values["chat"]:
        values["system"] = None
    if values["chat"] or values.get("prompt_tokens") is not None:
        values["parse_special"] = False
    if not values["depth"]:
        values["depth_fill"] = "prefill"
    return GenerateConfig(**values)


def without_display(settings: GenerateConfig) -> GenerateConfig:
    return dataclasses.replace(settings, write_result=None, json=False, debug=False)


def test_parse_gives_back_the_config_that_to_argv_wrote():
    rng = random.Random(7)
    for _ in range(2000):
        settings = random_config(rng)
        assert parse(GenerateConfig, to_argv(settings)) == without_display(settings)
        command = shlex.split(repro_command("generate.py", settings))
        assert command[:2] == ["python", "generate.py"]
        if not any(config.NOT_IN_A_ROW.search(word) for word in to_argv(settings)):
            assert command[2:] == to_argv(settings)


@pytest.mark.parametrize(
    ("values", "argv"),
    [
        ({}, []),
        ({"max_new_tokens": 5}, ["--max_new_tokens", "5"]),
        ({"prompt": "--x"}, ["--prompt=--x"]),
        ({"kv_cache_quantization": "int8"}, ["--kv_cache_quantization"]),
        ({"kv_cache_quantization": "int8,int4"}, ["--kv_cache_quantization", "int8,int4"]),
        ({"compile": False, "ignore_eos": True}, ["--no-compile", "--ignore_eos"]),
        ({"dtype": "float32"}, ["--dtype", "float32"]),
        ({"json": True, "debug": True, "write_result": Path("r.txt")}, []),
    ],
)
def test_only_flags_that_change_a_result_are_written(values, argv):
    assert to_argv(GenerateConfig(**values)) == argv


def test_the_flags_are_these_in_the_order_of_help(capsys):
    assert [item.name for item in dataclasses.fields(GenerateConfig)] == FLAGS
    assert run(lambda _: pytest.fail("--help must not run"), GenerateConfig, ["--help"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert [line.split()[0].rstrip(",") for line in lines] == [f"--{name}" for name in FLAGS]
    for line, item in zip(lines, dataclasses.fields(GenerateConfig), strict=True):
        assert item.metadata["flag"].help in line
        if item.default is not None:
            assert f"default: {item.default}" in line


def test_an_alias_sets_the_same_field():
    assert parse(GenerateConfig, ["--precision", "float16"]).dtype == "float16"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--max_new_tokens 0", "--max_new_tokens 0: must be at least 1"),
        ("--prompt_file=", "--prompt_file : names nothing; give a path"),
        ("--top_k -1", "--top_k -1: must be at least 0"),
        ("--temperature nan", "--temperature nan: must be a finite number"),
        ("--temperature=inf", "--temperature inf: must be a finite number"),
        ("--temperature warm", "--temperature warm: must be a number"),
        ("--depth 1.5", "--depth 1.5: must be a whole number"),
        ("--seed 9223372036854775808", "--seed 9223372036854775808: must be at most"),
        ("--dtype int3", "--dtype int3: must be one of bfloat16, float16, float32"),
        ("--prompt", "--prompt: expected one argument"),
        ("--max_new 3", "--max_new: unknown flag"),
        ("--prompt=--", '--prompt=--: "--" is not a value'),
        ("--json=1", "ignored explicit argument '1'"),
        ("stray", "stray: unknown flag"),
        ("--prompt_file a --prompt_tokens 3", "--prompt_file and --prompt_tokens: exclude"),
        ("--parse_special --chat", "--parse_special and --chat: exclude each other"),
        ("--parse_special --prompt_tokens 3", "--parse_special and --prompt_tokens: exclude"),
        ("--prompt x --prompt_tokens 3", "--prompt and --prompt_tokens: exclude"),
        ("--prompt x --prompt_file a", "--prompt and --prompt_file: exclude"),
        ("--interactive --depth 3", "--interactive and --depth: exclude each other"),
        ("--interactive --num_samples 2", "--interactive and --num_samples: exclude"),
        ("--interactive --write_result a", "--interactive and --write_result: exclude"),
        ("--prompt 'a\nb' --write_result r.txt", r"--prompt_file takes any text"),
        ("--checkpoint_path 'a\udc80' --write_result r.txt", r"a\udc80: '\udc80' cannot"),
    ],
)
def test_a_wrong_flag_ends_with_one_line_and_2(argv, message, capsys):
    assert run(lambda _: pytest.fail("must not run"), GenerateConfig, shlex.split(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_any_prompt_is_allowed_when_no_row_is_written():
    assert parse(GenerateConfig, ["--prompt", "a\nb\x1b\udc80"]).prompt == "a\nb\x1b\udc80"


def test_text_from_outside_is_escaped_and_cut():
    assert config.printable("é\x1b[31m\n\u202e\udc80") == r"é\x1b[31m\n\u202e\udc80"
    assert config.printable("x" * 200) == "x" * 200
    assert config.printable("x" * 10**6) == "x" * 200 + "..."


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command with an argument."""

    file: Path = flag(dataclasses.MISSING, help="what to read")
    json: bool = flag(False, help="one document")
    debug: bool = flag(False, help="traceback")


def test_a_field_without_default_is_an_argument():
    assert parse(Command, ["a b"]).file == Path("a b")
    with pytest.raises(UserError, match="the following arguments are required: FILE"):
        parse(Command, [])


def test_a_prompt_that_cannot_stand_in_a_row_is_shown_escaped_and_refused_for_a_row():
    settings = GenerateConfig(prompt="two\nlines\x1b[31m")
    assert repro_command("generate.py", settings) == (
        r"python generate.py --prompt 'two\nlines\x1b[31m'"
    )
    with pytest.raises(UserError, match="cannot be written to the --write_result row"):
        GenerateConfig(prompt="two\nlines", write_result=Path("rows.txt"))


def refuse(*causes):
    raise UserError(*causes)


def test_all_faults_of_a_request_are_told_together_and_each_once():
    faults = Faults()
    assert faults.check(len, "abc") == 3
    faults.refuse()
    assert faults.check(refuse, "a", "b") is None
    assert faults.check(refuse, "b", "c") is None
    with pytest.raises(UserError) as caught:
        faults.refuse()
    assert caught.value.args == ("a", "b", "c")
    assert str(caught.value) == "a\nb\nc"


def test_the_line_of_usage_names_what_stands_without_a_flag():
    @dataclass(frozen=True)
    class Several:
        """Several."""

        source: str = flag(MISSING, help="first")
        other: str = flag("", positional=True, help="second")
        speed: int = flag(1, help="third")

    lines = help_text(Several, "go").splitlines()
    assert lines[0].endswith(" go SOURCE [OTHER] [flags]")
    assert any(line.split()[:1] == ["SOURCE"] for line in lines)
