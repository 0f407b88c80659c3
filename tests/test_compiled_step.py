import pytest
import torch
from torch import nn

from compiled_step import CompiledStep

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


class Counter(nn.Module):
    """A model with a weight and a state that each step adds to."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), weight), requires_grad=False)
        self.register_buffer("state", torch.zeros(3))


def step(model, x, factor, noise):
    model.state.add_(x)
    y = model.weight * model.state * factor
    return y if noise is None else y + noise


def test_each_call_has_its_own_tensors_and_the_state_of_the_ones_before():
    model, compiled = Counter(2.0), CompiledStep(step, CPU)
    with torch.inference_mode():
        for i in range(1, 5):
            x, noise = torch.full((3,), float(i)), torch.full((3,), 0.5 * i)
            total = i * (i + 1) / 2
            expected = torch.full((3,), 2 * total * 10 + 0.5 * i)
            assert torch.equal(compiled(model, x, 10, noise), expected)
    assert model.state.tolist() == [10.0] * 3


def test_values_written_in_place_are_seen():
    model, compiled, x = Counter(1.0), CompiledStep(step, CPU), torch.ones(3)
    with torch.inference_mode():
        compiled(model, x, 1, None)
        x += 1
        model.weight.fill_(5.0)
        assert compiled(model, x, 1, None).tolist() == [15.0] * 3


def test_what_is_no_tensor_may_be_equal_and_no_other():
    model, compiled, x = Counter(1.0), CompiledStep(step, CPU), torch.ones(3)
    with torch.inference_mode():
        compiled(model, x, 1000, None)
        compiled(model, x, int("1000"), None)
        with pytest.raises(ValueError, match="compiled for another int"):
            compiled(model, x, 999, None)
        with pytest.raises(ValueError, match="compiled for another Counter"):
            compiled(Counter(1.0), x, 1000, None)


def test_steps_of_one_function_run_for_their_own_models():
    steps = [(CompiledStep(step, CPU), Counter(float(i))) for i in range(3)]
    with torch.inference_mode():
        for _ in range(2):
            results = [compiled(model, torch.ones(3), 1, None)[0] for compiled, model in steps]
    assert results == [0.0, 2.0, 4.0]


def test_a_first_call_that_was_interrupted_may_be_made_again(monkeypatch):
    model, compiled, x = Counter(2.0), CompiledStep(step, CPU), torch.ones(3)
    compile_graph, interruptions = torch._inductor.compile, [KeyboardInterrupt()]

    def compile_interrupted(*arguments, **options):
        run = compile_graph(*arguments, **options)

        def interrupted(*inputs):
            if interruptions:
                raise interruptions.pop()
            return run(*inputs)

        return interrupted

    monkeypatch.setattr(torch._inductor, "compile", compile_interrupted)
    with torch.inference_mode():
        with pytest.raises(KeyboardInterrupt):
            compiled(model, x, 1, None)
        for i in (1.0, 2.0):
            total = i * (i + 1) / 2
            assert compiled(model, x * i, 1, None).tolist() == [2 * total] * 3
