"""A model with its caches and compiled steps, and the loop that generates with them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from checkpoint import Checkpoint
from compiled_step import CompiledStep
from kernels import ops
from kernels.huge_pages import empty_in_huge_pages
from kernels.quantized import QuantizedWeight
from model import Transformer
from progress import Advance, ignore, progress
from quantize import load_weights
from weight_formats import EMBEDDING, QuantizedEmbedding, QuantizedLinear, stored_bytes

MOST_PARTS = 3  # of a parameter: codes, scales, mins

DecodeStep = Callable[..., Tensor]
"""Called like `decode_step`."""


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen.

    Attributes:
        vocab_size: ids from here on are padding of the model's embedding and are never chosen.
        temperature: 0 is argmax.
        top_k: likeliest ids to choose from; 0 keeps all.
    """

    vocab_size: int
    temperature: float = 0.8
    top_k: int = 200

    def noise(self, batch_size: int, generator: torch.Generator) -> Tensor | None:
        """Gumbel noise for one `sample`: [B, top_k or vocab_size] fp32; None when greedy."""
        if self.temperature == 0:
            return None
        width = min(self.top_k, self.vocab_size) or self.vocab_size
        uniform = torch.empty(batch_size, width, device=generator.device)
        return -uniform.exponential_(generator=generator).log()

    def no_noise(self, device: torch.device) -> Tensor | None:
        """In place of `noise` for one row: the same step then chooses the likeliest id."""
        noise = self.noise(1, torch.Generator(device))
        return None if noise is None else torch.zeros_like(noise)


def sample(logits: Tensor, sampling: Sampling, noise: Tensor | None) -> Tensor:
    """The next id of each row: [B, V] fp32 -> [B, 1]; -1 where a row has a NaN or +inf.

    The argmax of scores plus Gumbel noise is distributed as their softmax. The noise is an
    argument, so one seed gives the same ids eager and compiled.
    """
    logits = logits[:, : sampling.vocab_size]
    if noise is None:
        choice = logits.argmax(-1, keepdim=True)
    else:
        values, ids = logits.topk(noise.shape[-1])
        choice = ids.gather(-1, (values / sampling.temperature + noise).argmax(-1, keepdim=True))
    # argmax of a NaN row is some id; folding the check into the id costs no extra host read.
    return torch.where(logits.amax(-1, keepdim=True).isfinite(), choice, -1)


def decode_step(
    model: Transformer,
    caches: nn.ModuleList,
    token: Tensor,
    start_pos: Tensor,
    sampling: Sampling,
    noise: Tensor | None,
) -> Tensor:
    """One token further: [B, 1] at positions start_pos [B] -> the next [B, 1]. Mutates caches."""
    x = model(token.clamp(min=0), start_pos, caches)
    return sample(model.logits(x[:, -1]), sampling, noise)


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    formats: Mapping[str, str] | None = None,
) -> Transformer:
    """The checkpoint's model in `dtype` on `device`, tensor by tensor, each converted as it comes.

    Args:
        formats: layouts of the weights held as codes, by name; None: those that the files hold so.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    formats = checkpoint.kept if formats is None else formats
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    model.rope_freqs = model.rope_freqs.to(device)
    sizes = stored_bytes(checkpoint.config, formats, dtype, device)
    total = sum(sizes.values())
    empty = empty_in_huge_pages(total, MOST_PARTS * len(sizes), device)
    with progress("loading weights", total, "B") as advance:
        for name, weight in load_weights(checkpoint, formats, device, dtype, empty):
            if isinstance(weight, QuantizedWeight):
                place_quantized(model, name, QuantizedLinear(weight, formats[name]), dtype)
            else:
                module, _, leaf = name.rpartition(".")
                parameter = nn.Parameter(weight, requires_grad=False)
                setattr(model.get_submodule(module), leaf, parameter)
            advance(weight.nbytes)
    tie_head(model)
    return model.eval()


def place_quantized(
    model: Transformer, name: str, linear: QuantizedLinear, dtype: torch.dtype
) -> None:
    """Put a layer of codes where the parameter `name` was; its bias stays."""
    path = name.rpartition(".")[0]
    if name == EMBEDDING:
        model.set_submodule(path, QuantizedEmbedding(linear, dtype))
        return
    linear.bias = model.get_submodule(path).bias  # type: ignore[assignment]
    model.set_submodule(path, linear)


def tie_head(model: Transformer) -> None:
    """Give a tied head what the embedding holds."""
    if not model.config.tie_embeddings:
        return
    if isinstance(model.embed_tokens, QuantizedEmbedding):
        model.lm_head = model.embed_tokens.linear
    else:
        model.lm_head.weight = model.embed_tokens.weight


class Engine:
    """Runs one model over one set of caches.

    Args:
        model: on its device, in its dtype.
        caches: one KVCache per layer, on the same device. A compiled engine keeps to this model and
            these caches: values may change, other tensors may not take their places.
        compile: compile the decode step; on CUDA as a CUDA graph.
        prefill_chunk: tokens per prefill call. A chunk sees itself in full precision and earlier
            chunks as stored, so with a quantised cache the chunk size can change results.

    Attributes:
        attention: name of what answers attention over the cache.
    """

    def __init__(
        self, model: Transformer, caches: nn.ModuleList, *, compile: bool, prefill_chunk: int = 2048
    ) -> None:
        self.model, self.caches = model, caches
        self.prefill_chunk = prefill_chunk
        self.device = model.norm.weight.device
        self.attention = ops.implementation(self.device)
        self.compile = compile
        self._steps: dict[tuple[Any, ...], DecodeStep] = {}

    @property
    def cache_len(self) -> int:
        """Slots per sequence."""
        return self.caches[0].shape[2]  # type: ignore[union-attr,index,return-value]

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, start: int = 0, advance: Advance = ignore) -> Tensor:
        """Store tokens [B, P] at slots start .. start + P - 1; logits [B, V] after the last.

        `advance` is told the tokens of each chunk.
        """
        for chunk in tokens.split(self.prefill_chunk, dim=1):
            start_pos = torch.full((len(chunk),), start, device=self.device)
            x = self.model(chunk, start_pos, self.caches, past_len=start)
            start += chunk.shape[1]
            advance(chunk.shape[1])
        return self.model.logits(x[:, -1])

    @torch.inference_mode()
    def decode(
        self, token: Tensor, start_pos: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Tensor:
        """The id [B, 1] after `token` [B, 1], which is stored at start_pos [B] on the way."""
        token, start_pos = token.contiguous(), start_pos.contiguous()
        if noise is not None:
            noise = noise.float().contiguous()
        changing = (token, start_pos) if noise is None else (token, start_pos, noise)
        kind = (sampling, *((each.shape, each.dtype) for each in changing))
        if kind not in self._steps:
            self._steps[kind] = (
                CompiledStep(decode_step, self.device) if self.compile else decode_step
            )
        token = self._steps[kind](self.model, self.caches, token, start_pos, sampling, noise)
        # The next replay of a CUDA graph overwrites its outputs; nothing else needs a copy.
        return token.clone()


@torch.inference_mode()  # as a whole: a first token made outside would compile a second graph
def generate(  # noqa: PLR0913  (six say what is generated, one watches)
    engine: Engine,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    start: int = 0,
    seed: int = 1234,
    advance: Advance = ignore,
) -> Iterator[Tensor]:
    """Yield max_new_tokens ids [B, 1], one by one, on the engine's device.

    Args:
        engine: its caches must hold `start` tokens; mutated from slot `start` on.
        prompt: [B, P], P >= 1.
        max_new_tokens: the caller stops earlier by leaving the loop.
        sampling: temperature and top_k.
        start: tokens stored before the prompt. Rewinding is this argument alone.
        seed: of this sequence's noise.
        advance: told the prompt's tokens as they are done, and each new one.

    Raises:
        ValueError: the tokens do not fit the cache.
    """
    batch_size, prompt_len = prompt.shape
    # The last new token is never stored.
    if start + prompt_len + max_new_tokens - 1 > engine.cache_len:
        raise ValueError(f"{start} + {prompt_len} + {max_new_tokens} tokens > {engine.cache_len}")
    generator = torch.Generator(engine.device).manual_seed(seed)
    logits = engine.prefill(prompt, start, advance)
    token = sample(logits, sampling, sampling.noise(batch_size, generator))
    yield token
    advance(1)
    start_pos = torch.full((batch_size,), start + prompt_len, device=engine.device)
    for _ in range(max_new_tokens - 1):
        noise = sampling.noise(batch_size, generator)
        token = engine.decode(token, start_pos, sampling, noise)
        yield token
        advance(1)
        start_pos += 1
