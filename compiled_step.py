"""A step compiled for one set of arguments, of which only a few change from call to call."""

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

Graph = Callable[..., tuple[Tensor, ...]]


class CompiledStep:
    """A function of a model, compiled once for all its calls; called like that function.

    Some 500 tensors go into the compiled graph, and for each token Dynamo would collect them from
    their modules again and compare them with those it compiled for: together a fifth of a small
    model's time on the CPU. None of them is ever another, so there are no guards, and the graph is
    called with the tensors of the first call.

    Args:
        step: called with what never changes and tensors that do, all by position, returns one
            tensor.
        device: it runs on.
    """

    def __init__(self, step: Callable[..., Tensor], device: torch.device) -> None:
        assert isinstance(step, FunctionType)
        # Compiled code is found by its code object: a copy of its own runs for no other model.
        own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
        self._options: dict[str, Any] = {
            "triton.cudagraphs": device.type == "cuda",
            "size_asserts": False,  # of every layer: a tenth of a token's time
        }
        self._step = torch.compile(
            own,
            fullgraph=True,
            dynamic=False,
            backend=self._compile,
            options={"guard_filter_fn": lambda guards: [False] * len(guards)},
        )
        self._graph: Graph | None = None
        self._inputs: list[Any] = []
        self._arguments: tuple[Any, ...] = ()
        self._places: list[list[int]] = []  # of each argument among the inputs

    def _compile(self, graph: fx.GraphModule, inputs: list[Any], **_: Any) -> Graph:
        with warnings.catch_warnings():
            # An embedding of codes makes bf16 rows from fp16 scales: one look-up per token.
            warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")
            run = torch._inductor.compile(graph, inputs, options=self._options)

        def remember(*inputs: Any) -> tuple[Tensor, ...]:
            result = run(*inputs)
            self._graph, self._inputs = run, list(inputs)  # not of a call that failed
            return result

        return remember

    def __call__(self, *arguments: Any) -> Tensor:
        """The step's result, from the graph of the first call with the tensors of this one.

        Raises:
            ValueError: something other than a tensor is not what it was in the first call.
        """
        if self._graph is None:
            return self._call_first(arguments)
        inputs = list(self._inputs)
        for first, now, places in zip(self._arguments, arguments, self._places, strict=True):
            if not isinstance(first, Tensor) and first != now:
                raise ValueError(f"compiled for another {type(first).__name__}")
            for place in places:
                inputs[place] = now
        return self._graph(*inputs)[0]

    def _call_first(self, arguments: tuple[Any, ...]) -> Tensor:
        result = self._step(*arguments)
        self._arguments = arguments
        self._places = [
            [place for place, each in enumerate(self._inputs) if each is argument]
            for argument in arguments
        ]
        return result
