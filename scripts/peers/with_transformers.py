"""Decode with transformers: its static cache and its forward pass under torch.compile."""

import torch
from harness import Request, serve
from transformers import AutoModelForCausalLM, StaticCache


class TransformersDecoder:
    def __init__(self, request: Request) -> None:
        torch.set_num_threads(request.threads)
        torch.set_grad_enabled(False)
        model = AutoModelForCausalLM.from_pretrained(request.checkpoint, dtype=torch.bfloat16)
        self.model = model.eval()
        self.compiled = torch.compile(self.model.forward, fullgraph=True)
        self.cache = StaticCache(config=self.model.config, max_cache_len=request.cache_len)

    def prefill(self, ids: list[int]) -> int:
        output = self.model(torch.tensor([ids]), past_key_values=self.cache, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def decode(self, token_id: int, start_pos: int, steps: int) -> list[int]:
        self.cache.crop(start_pos - int(self.cache.get_seq_length()))
        token, ids = torch.tensor([[token_id]]), []
        for position in range(start_pos, start_pos + steps):
            output = self.compiled(
                token, past_key_values=self.cache, position_ids=torch.tensor([[position]])
            )
            token = output.logits[:, -1:].argmax(-1)
            ids.append(int(token))
        return ids


if __name__ == "__main__":
    serve(TransformersDecoder, ["torch", "transformers"])
