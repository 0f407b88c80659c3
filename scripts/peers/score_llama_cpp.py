"""Logits of llama.cpp behind windows of text, through llama-cpp-python.

The first line of stdin is a request, each further one the ids of a window. For each window the
logits of all ids from `context` on but the last, decoded one by one, go to stdout as fp32.
"""

import json
import sys
from dataclasses import dataclass

import numpy as np
from llama_cpp import GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, Llama, llama_get_logits_ith

TYPES = {"f16": GGML_TYPE_F16, "q8_0": GGML_TYPE_Q8_0, "q4_0": GGML_TYPE_Q4_0}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one process scores; `kv` names the types of K and V, with flash attention or without."""

    checkpoint: str
    k_type: str
    v_type: str
    flash_attn: bool
    context: int
    cache_len: int
    threads: int


def main() -> None:
    request = Request(**json.loads(sys.stdin.readline()))
    llama = Llama(
        request.checkpoint,
        n_ctx=request.cache_len,
        n_threads=request.threads,
        n_threads_batch=request.threads,
        type_k=TYPES[request.k_type],
        type_v=TYPES[request.v_type],
        flash_attn=request.flash_attn,
        verbose=False,
    )
    for line in sys.stdin:
        ids = json.loads(line)
        llama.reset()
        llama.eval(ids[: request.context])
        for token_id in ids[request.context : -1]:
            llama.eval([token_id])
            logits = llama_get_logits_ith(llama.ctx, -1)
            values = np.ctypeslib.as_array(logits, (llama.n_vocab(),)).astype(np.float32)
            sys.stdout.buffer.write(values.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
