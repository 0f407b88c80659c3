"""Shared by all tests: a tiny seeded model, and memory that is never silently zero."""

import dataclasses
import signal

import pytest
import torch
from attention_case import use_reference, use_tiles
from cache_case import INSTRUCTION_SETS  # builds the kernels, before xdist starts its processes

from model import Transformer
from model_config import ModelConfig
from scripts import tiny_checkpoint

# A shell starts what is in its background without SIGINT, which processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

TINY = dataclasses.replace(tiny_checkpoint.TINY, num_layers=3, max_seq_len=512)


def seeded_model(config: ModelConfig = TINY, dtype: torch.dtype = torch.float32) -> Transformer:
    """A random model whose logits have a spread of about one."""
    generator = torch.Generator().manual_seed(7)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            fan_in = 1 if "embed" in name or "bias" in name else parameter.shape[1]
            parameter.data.normal_(0, fan_in**-0.5, generator=generator)
    return model.to(dtype).requires_grad_(False)


@pytest.fixture
def tiny_model() -> Transformer:
    return seeded_model()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN, so that reading what was never written shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)


REFERENCES = {"reference": use_reference, "reference of tiles": use_tiles}


@pytest.fixture(params=[*REFERENCES, *INSTRUCTION_SETS])
def implementation(request, monkeypatch):
    """Every implementation of the attention op that this machine can run, in turn."""
    if request.param in REFERENCES:
        REFERENCES[request.param](monkeypatch)
        yield request.param
        return
    torch.ops.kv_fast.use_instruction_set(request.param)
    yield request.param
    torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
