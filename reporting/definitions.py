"""What the words of a report mean."""

DEFINITIONS = {
    "prefill": "the prompt's tokens, in chunks, up to the first new token: TTFT; prompt tokens by"
    " TTFT are its rate",
    "decode": "the N - 1 steps after the first new token; N - 1 by their time is the rate, the"
    " median over the samples of one process; ± is the 95 % interval of their mean",
    "depth": "tokens stored before the timed prompt",
    "filled length": "stored tokens that a decode step reads: depth + prompt + (N - 2) / 2, the"
    " mean over the steps",
    "cache_len": "slots allocated per sequence; memory follows them, time the filled length",
    "KV cache": "bytes of all parts of the cache, codes and scales",
    "expected memory": "weights + KV cache + declared scratch, on a CPU also Python and torch",
    "peak": "of the depth fill and the samples; reserved by the allocator on CUDA, resident on CPU",
    "roofline": "the rate at which each step's weights, K and V would be read at the memory"
    " bandwidth that the same process measured",
    "ratio to bf16": "the decode rate by that of the row which differs in the cache format alone;"
    " its range are both 95 % intervals together",
    "KL": "mean over scored tokens of the distance from the reference's next-token distribution, in"
    " nats; ± is its standard error over windows of text",
    "noise floor": "the same of the reference against itself, cut into other chunks",
    "top-1": "scored tokens for which both find the same token likeliest",
    "frontier": "rows that no other of the same depth and prompt beats in both speed and memory",
    "GB": "1e9 bytes; 1k tokens are 1024",
}
