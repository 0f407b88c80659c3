"""Decode with llama.cpp, through llama-cpp-python."""

import numpy as np
from harness import Request, serve
from llama_cpp import GGML_TYPE_F16, GGML_TYPE_Q8_0, Llama, llama_get_logits_ith

KV_FORMATS = {  # type of K and V, and flash attention
    "f16": (GGML_TYPE_F16, False),
    "f16-flash": (GGML_TYPE_F16, True),
    "q8_0-flash": (GGML_TYPE_Q8_0, True),
}


class LlamaCppDecoder:
    def __init__(self, request: Request) -> None:
        kv_type, flash_attn = KV_FORMATS[request.kv_format]
        self.llama = Llama(
            request.checkpoint,
            n_ctx=request.cache_len,
            n_threads=request.threads,
            n_threads_batch=request.threads,
            type_k=kv_type,
            type_v=kv_type,
            flash_attn=flash_attn,
            verbose=False,
        )

    def prefill(self, ids: list[int]) -> int:
        self.llama.eval(ids)
        return self.greedy()

    def decode(self, token_id: int, start_pos: int, steps: int) -> list[int]:
        self.llama.n_tokens = start_pos
        ids = [token_id]
        for _ in range(steps):
            self.llama.eval(ids[-1:])
            ids.append(self.greedy())
        return ids[1:]

    def greedy(self) -> int:
        logits = llama_get_logits_ith(self.llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self.llama.n_vocab(),)).argmax())


if __name__ == "__main__":
    serve(LlamaCppDecoder, ["llama-cpp-python"])
