"""Logits of Hugging Face folders by transformers in fp32; runs in an environment that has it.

python transformers_logits.py IDS.json OUT.safetensors     {folder: ids} -> {folder: logits [N, V]}
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

requests = json.loads(Path(sys.argv[1]).read_text())
logits = {}
for folder, ids in requests.items():
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits[folder] = model(torch.tensor([ids])).logits[0].clone()
save_file(logits, sys.argv[2])
