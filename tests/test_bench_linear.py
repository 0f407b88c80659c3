"""The microbenchmark of products with weights of codes."""

import pytest
import torch

from config import UserError
from kernels.quantized import QuantizedWeight
from scripts import bench_linear
from scripts.bench_linear import BenchLinearConfig, choose_methods, main

CPU = torch.device("cpu")


@pytest.mark.parametrize("text", ["", "64", "64x", "0x64", "64x40", "64x64x64", "ax64"])
def test_shapes_that_are_none_are_refused(text):
    with pytest.raises(UserError, match="--shapes"):
        bench_linear.parse_shapes(text)


@pytest.mark.parametrize("text", ["", "0", "17", "1,x"])
def test_rows_that_no_kernel_takes_are_refused(text):
    with pytest.raises(UserError, match="--rows"):
        bench_linear.parse_rows(text)


def test_a_format_counts_the_bytes_that_it_reads():
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    bytes_of = {method.name: method.read_bytes for method in choose_methods((96, 64), x)}
    assert bytes_of == {
        "bf16": 2 * 96 * 64,
        "bf16, F.linear": 2 * 96 * 64,
        "int8": 96 * 64 + 4 * 96,  # a scale per row, fp32
        "int4:32": 96 * 32 + 96 * 2 * (2 + 2),  # scales and mins of two groups, fp16
    }


def test_every_format_is_timed_with_its_own_weight(capsys, monkeypatch):
    seen = []

    def recorded(x, weight):
        kind = (weight.bits, weight.group) if isinstance(weight, QuantizedWeight) else (16, 0)
        seen.append((*kind, *x.shape))
        return x

    monkeypatch.setattr(bench_linear.kernels.product, "product", recorded)
    monkeypatch.setattr(bench_linear, "num_layers", lambda *_: 2)
    main(BenchLinearConfig(shapes="96x64", rows="3", repeats=2, device="cpu"))
    # A warm-up and two turns over two weights.
    assert sorted(seen) == [(4, 32, 3, 64)] * 6 + [(8, 64, 3, 64)] * 6 + [(16, 0, 3, 64)] * 6
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[2] for line in lines[4:]] == [
        *("bf16", "bf16, F.linear", "int8", "int4:32")
    ]


def test_codes_are_random_and_their_scales_are_those_of_the_format():
    weight = bench_linear.coded_weight((96, 64), CPU, 4, 32)
    assert isinstance(weight, QuantizedWeight)
    assert weight.dequantize().abs().max() <= 0.0801
    assert weight.dequantize().unique().numel() == 16
