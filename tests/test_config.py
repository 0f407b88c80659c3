"""Flags are parsed, written back and refused; a run ends with one line and the right code."""

import dataclasses
import json
import random
import shlex
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import config
from config import GenerateConfig, Terminated, UserError, flag, parse, repro_command, run, to_argv

ROOT = Path(config.__file__).parent
NASTY = [
    "", " ", "a b", "it's", '"quoted"', "-x", "--prompt", "--prompt=--x", "-1", "int8",
    "é ü 漢字 🦙", "a,b;c%d", ", repro: ", "line\nbreak", "\u2028", "$HOME `ls` \\",
    "*", "#", "x=--",
]  # fmt: skip

FLAGS = [
    "checkpoint_path", "prompt", "prompt_file", "prompt_tokens", "depth", "depth_fill",
    "max_new_tokens", "cache_size", "kv_cache_quantization", "prefill_chunk", "dtype",
    "device", "compile", "temperature", "top_k", "seed",
    "num_samples", "ignore_eos", "threads", "write_result", "json",
    "debug",
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
    values["write_result"] = None
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
        ("--prompt x --prompt_tokens 3", "--prompt and --prompt_tokens: exclude"),
        ("--prompt x --prompt_file a", "--prompt and --prompt_file: exclude"),
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


def test_a_field_without_default_is_an_argument(capsys):
    assert parse(Command, ["a b"]).file == Path("a b")
    assert run(lambda _: 0, Command, []) == 2
    assert capsys.readouterr().err == "error: the following arguments are required: file\n"


ENDINGS = [
    (UserError("m.gguf: version 1"), 2, "error", "m.gguf: version 1"),
    (RuntimeError("first\nsecond"), 1, "error", "RuntimeError: first"),
    (ValueError("x\x1b" + "y" * 500), 1, "error", "ValueError: x\\x1b" + "y" * 195 + "..."),
    (MemoryError(), 1, "error", "MemoryError"),
    (KeyboardInterrupt("SIGINT"), 130, "interrupted", "SIGINT"),
    (Terminated("SIGTERM"), 143, "interrupted", "SIGTERM"),
]


@pytest.mark.parametrize(("error", "code", "status", "message"), ENDINGS)
def test_an_error_is_one_line_and_one_document(error, code, status, message, capsys):
    def main(_: Command) -> None:
        raise error

    assert run(main, Command, ["f"]) == code
    assert capsys.readouterr() == ("", f"{status}: {message}\n")
    assert run(main, Command, ["f", "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"status": status, "error": message}
    assert captured.err == f"{status}: {message}\n"


def test_a_wrong_flag_gives_a_document_too(capsys):
    assert run(lambda _: 0, Command, ["f", "--json", "--nope"]) == 2
    assert json.loads(capsys.readouterr().out)["status"] == "error"


def test_a_traceback_is_shown_with_debug_and_the_line_is_last(capsys):
    def main(_: Command) -> None:
        raise RuntimeError("broke")

    assert run(main, Command, ["f", "--debug"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "error: RuntimeError: broke"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_the_code_of_main_is_the_exit_code(returned, code):
    assert run(lambda _: returned, Command, ["f"]) == code


def start(body: str, *argv: str, **options) -> subprocess.Popen:
    """A process whose main has `body`, and stdin, stdout, stderr as pipes unless told otherwise."""
    program = (
        "import sys, time, logging\nfrom config import *\n"
        "def main(settings):\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n"
        "sys.exit(run(main, GenerateConfig))\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen([sys.executable, "-c", program, *argv], **(pipes | options))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_lets_main_clean_up(number, code):
    body = """
        try:
            print("ready", flush=True); time.sleep(60)
        finally:
            print("cleaned up")
    """
    process = start(body)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (code, "cleaned up\n")
    assert err == f"interrupted: {number.name}\n"


def test_a_second_ctrl_c_ends_at_once():
    body = """
        try:
            print("ready", flush=True); time.sleep(60)
        except KeyboardInterrupt:
            print("cleaning", flush=True); time.sleep(60)
    """
    process = start(body)
    for expected in ("ready\n", "cleaning\n"):
        assert process.stdout.readline() == expected
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT  # 130 in a shell


def test_a_signal_the_parent_ignores_stays_ignored():
    process = start("print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)")
    assert process.communicate(timeout=10)[0] == "False\n"
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = start("print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)", **ignore)
    assert process.communicate(timeout=10)[0] == "True\n"


@pytest.mark.parametrize("body", ["for _ in range(10**5): print('x' * 80)", "print('short')"])
@pytest.mark.parametrize("argv", [[], ["--json"], ["--help"]])
def test_a_reader_that_leaves_early_is_no_error(body, argv):
    process = start("time.sleep(0.2)\n" + body, *argv)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=10) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        process = start("print('text')", stdout=full)
        err = process.communicate(timeout=10)[1]
    assert (process.returncode, err) == (1, "error: OSError: [Errno 28] No space left on device\n")


def test_progress_is_bare_lines_on_stderr_and_libraries_stay_quiet():
    body = """
        logging.getLogger("kv_fast").info("loading")
        logging.getLogger("httpx").info("GET")
        print("text")
    """
    process = start(body)
    assert process.communicate(timeout=10) == ("text\n", "loading\n")
    assert process.returncode == 0


def test_config_imports_no_torch():
    process = start("print('torch' in sys.modules)")
    assert process.communicate(timeout=10)[0] == "False\n"


def test_a_prompt_that_cannot_stand_in_a_row_is_shown_escaped_and_refused_for_a_row():
    settings = GenerateConfig(prompt="two\nlines\x1b[31m")
    assert repro_command("generate.py", settings) == (
        r"python generate.py --prompt 'two\nlines\x1b[31m'"
    )
    with pytest.raises(UserError, match="cannot be written to the --write_result row"):
        GenerateConfig(prompt="two\nlines", write_result=Path("rows.txt"))
