"""Decode with gpt-fast: its model and its compiled decode_one_token, imported from its clone."""

import importlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from harness import Request, serve
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# By name at run time: they are gpt-fast's generate.py and model.py, not ours.
generate = importlib.import_module("generate")
model = importlib.import_module("model")


class GptFastDecoder:
    def __init__(self, request: Request) -> None:
        torch.set_num_threads(request.threads)
        torch.set_grad_enabled(False)
        self.model = load_model(Path(request.checkpoint))
        self.model.setup_caches(max_batch_size=1, max_seq_length=request.cache_len)
        self.cache_len = self.model.max_seq_length
        self.compiled = torch.compile(
            generate.decode_one_token, mode="reduce-overhead", fullgraph=True
        )
        self.mask = generate.create_block_mask(
            generate.causal_mask, 1, 1, self.cache_len, self.cache_len, device="cpu"
        )

    def prefill(self, ids: list[int]) -> int:
        with patch.object(model, "flex_attention", causal_attention):
            prompt, positions = torch.tensor([ids]), torch.arange(len(ids))
            return int(generate.prefill(self.model, prompt, positions, temperature=0))

    def decode(self, token_id: int, start_pos: int, steps: int) -> list[int]:
        token, ids = torch.tensor([[token_id]], dtype=torch.int), []
        position = torch.tensor([start_pos], dtype=torch.int)
        for _ in range(steps):
            token, _ = self.compiled(self.model, token, position, self.mask, temperature=0)
            token, position = token.clone(), position + 1
            ids.append(int(token))
        return ids


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: object, enable_gqa: bool
) -> Tensor:
    """flex_attention of a prompt at position 0: on a CPU that takes minutes for a deep one."""
    k, v = (cached[:, :, : q.shape[2]] for cached in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)


def load_model(folder: Path) -> Any:
    """The weights of a Meta folder in gpt-fast's model, in bf16."""
    params = json.loads((folder / "params.json").read_text())
    weights = torch.load(folder / "consolidated.00.pth", mmap=True, weights_only=True)
    args = model.ModelArgs(
        block_size=params["max_seq_len"],
        vocab_size=params["vocab_size"],
        n_layer=params["n_layers"],
        n_head=params["n_heads"],
        n_local_heads=params["n_kv_heads"],
        dim=params["dim"],
        intermediate_size=weights["layers.0.feed_forward.w1.weight"].shape[0],
        rope_base=params["rope_theta"],
        norm_eps=params["norm_eps"],
    )
    with torch.device("meta"):
        transformer = model.Transformer(args)
    transformer.load_state_dict(weights, assign=True)
    return transformer.to(torch.bfloat16).eval()


if __name__ == "__main__":
    serve(GptFastDecoder, ["torch"])
