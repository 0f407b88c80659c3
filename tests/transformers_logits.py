"""Logits of Hugging Face folders by transformers in fp32; runs in an environment that has it.

python transformers_logits.py ATTENTION IDS.json OUT.safetensors

{folder: ids} -> {"folder logits": [N, V], "folder frequencies": [D / 2]}, the latter of rope.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

attention, requests, out = sys.argv[1:]
results = {}
for folder, ids in json.loads(Path(requests).read_text()).items():
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    with torch.inference_mode():
        results[f"{folder} logits"] = model(torch.tensor([ids])).logits[0].clone()
    results[f"{folder} frequencies"] = model.model.rotary_emb.inv_freq.clone()
save_file(results, out)
