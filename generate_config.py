"""The flags of generate.py. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from config import UserError, check_one_line, flag

INTERACTIVE_SLOTS = 4096
"""Of a conversation's cache, where neither a flag nor the model's context says fewer."""

NOT_INTERACTIVE = (
    *("prompt", "prompt_file", "prompt_tokens", "depth", "num_samples"),
    *("memory_profile", "write_result", "json"),
)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Generate text from a Llama checkpoint, and measure what the run and its KV cache cost."""

    checkpoint_path: str | None = flag(
        None,
        help="HF folder, Meta folder, .gguf file, hub id or random:NAME;"
        " without it: SmolLM2-135M-Instruct",
    )
    prompt: str = flag("Hello, my name is", help="text to continue")
    prompt_file: Path | None = flag(None, help="read the prompt from this UTF-8 file; -: stdin")
    prompt_tokens: int | None = flag(
        None, minimum=1, help="this many random ordinary ids instead of a text"
    )
    chat: bool = flag(
        False, help="put the prompt as a user's message into the checkpoint's chat template"
    )
    system: str | None = flag(None, help="the system message of --chat")
    interactive: bool = flag(
        False,
        help="answer each line of stdin, with --chat as one conversation; Ctrl-D ends it, no row",
    )
    parse_special: bool = flag(
        False, help="let the text of a control token in the prompt be that token, not plain text"
    )
    depth: int = flag(0, minimum=0, help="tokens already in the cache before the timed prompt")
    depth_fill: str = flag(
        "prefill",
        choices=("prefill", "synthetic"),
        help="how --depth comes there: a real prefill, or random K and V, which take no time",
    )
    max_new_tokens: int = flag(200, minimum=1, help="tokens to generate after the prompt")
    cache_size: int | None = flag(
        None,
        minimum=1,
        maximum=2**40,
        help="slots to allocate; default: what the run needs"
        f", with --interactive up to {INTERACTIVE_SLOTS}",
    )
    kv_cache_quantization: str | None = flag(
        None,
        bare="int8",
        help="storage of K and V: one format name, or K,V; alone: int8; without: the run's dtype",
    )
    quantization: str | None = flag(
        None,
        help="weights: LAYERS[,HEAD], each int8[:GROUP], int4[:GROUP] or none;"
        " without: as the file has them",
    )
    prefill_chunk: int = flag(2048, minimum=1, maximum=2**31, help="prompt tokens per prefill step")
    dtype: str = flag(
        "bfloat16",
        choices=("bfloat16", "float16", "float32"),
        aliases=("precision",),
        help="arithmetic of the model",
    )
    device: str | None = flag(
        None, choices=("cpu", "cuda", "mps"), help="default: cuda if there is one, else cpu"
    )
    compile: bool = flag(True, help="compile the decode step")
    temperature: float = flag(0.8, minimum=0, help="randomness of sampling, 0 = greedy")
    top_k: int = flag(200, minimum=0, help="sample among this many likeliest tokens, 0 = off")
    seed: int = flag(
        1234, minimum=0, maximum=2**63 - 1, help="seed of the first sample; each further one adds 1"
    )
    num_samples: int = flag(1, minimum=1, help="timed repeats; rows of benchmarks.sh use 5")
    ignore_eos: bool = flag(False, help="go on after an end token, to exactly --max_new_tokens")
    check_tokens: int = flag(
        64, minimum=0, help="new tokens by which a quantised cache is checked at the end, 0 = off"
    )
    threads: int | None = flag(None, minimum=1, help="CPU threads; default: physical cores")
    memory_profile: Path | None = flag(
        None, repro=False, help="draw memory over time into this .png or .svg, and a .csv beside"
    )
    write_result: Path | None = flag(None, repro=False, help="append the row to this file")
    json: bool = flag(False, repro=False, help="print one JSON document instead of text")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")

    def __post_init__(self) -> None:
        sources = {
            "--prompt": self.prompt != type(self).prompt,
            "--prompt_file": self.prompt_file is not None,
            "--prompt_tokens": self.prompt_tokens is not None,
        }
        given = [name for name, is_given in sources.items() if is_given]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)}: exclude each other; give one")
        if self.interactive:
            self._check_interactive()
        if self.chat and self.prompt_tokens is not None:
            raise UserError("--chat and --prompt_tokens: exclude each other; give a text")
        if self.system is not None and not self.chat:
            raise UserError("--system: has no effect without --chat; give both")
        if self.parse_special and (self.chat or self.prompt_tokens is not None):
            other = "--chat" if self.chat else "--prompt_tokens"
            raise UserError(f"--parse_special and {other}: exclude each other; leave one out")
        if self.depth_fill == "synthetic" and not self.depth:
            raise UserError("--depth_fill synthetic: has no effect without --depth; give one")
        if self.write_result is not None and self.memory_profile is not None:
            raise UserError("--memory_profile and --write_result: what is watched is not measured")
        if self.write_result is not None:
            check_one_line(self, cure="--prompt_file takes any text")

    def _check_interactive(self) -> None:
        """Refuse what speaks of one prompt or of a row."""
        for name in NOT_INTERACTIVE:
            if getattr(self, name) != getattr(type(self), name):
                raise UserError(f"--interactive and --{name}: exclude each other; leave one out")
