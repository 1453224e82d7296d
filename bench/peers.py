"""What a generated model is compared with: PyTorch and the strongest alternatives, each at its best, at the same precision."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bench.subject import Emitted, Inputs, construct, emit_variant
from bench.timing import capture
from codegen.ir.fused_form import departure
from codegen.ops import Kind
from codegen.plan import Refusal
from codegen.torch_text import reference_lines, value_variable

EVIDENCE = ("eager", "graph", "compile", "library")
AUTOTUNED = ("max-autotune-no-cudagraphs", "max-autotune", "triton", "library-tail")
CHOICES = (*EVIDENCE, *AUTOTUNED)


@dataclass
class Peer:
    """One alternative. `call()` runs it on the fixed x; `chain` says that it computes the whole chain, so that its error counts."""

    name: str
    call: Callable[[], torch.Tensor]
    chain: bool = True
    note: str = ""
    setup_s: float = 0.0


Builder = Callable[[Emitted, nn.Module, Inputs], list[Peer]]


def _eager(emitted: Emitted, eager: nn.Module, inputs: Inputs) -> list[Peer]:
    eager(*inputs)  # where PyTorch lacks an operator for this type and device, the peer has failed
    return [Peer("eager", lambda: eager(*inputs))]


def _graph(emitted: Emitted, eager: nn.Module, inputs: Inputs) -> list[Peer]:
    if inputs[0].device.type != "cuda":
        return []
    held: dict[str, torch.Tensor] = {}
    graph = capture(lambda: held.update(y=eager(*inputs)), inputs[0].device)

    def call():
        graph.replay()
        return held["y"]

    return [Peer("eager in a CUDA graph", call)]


def _compiled(mode: str | None, name: str) -> Builder:
    def build(emitted: Emitted, eager: nn.Module, inputs: Inputs) -> list[Peer]:
        from torch._inductor import config

        if mode is not None:
            config.max_autotune_gemm_backends = config.max_autotune_conv_backends = "ATEN,TRITON"
        if mode == "max-autotune":
            for given in inputs:
                torch._dynamo.mark_static_address(given)  # else its CUDA graph copies it at each call
        compiled = torch.compile(eager, mode=mode, fullgraph=True, dynamic=False)
        for _ in range(3):  # CUDA graphs are recorded at the second call
            compiled(*inputs)
        return [Peer(name, lambda: compiled(*inputs), note=mode or "default")]

    return build


def _library(emitted: Emitted, eager: nn.Module, inputs: Inputs) -> list[Peer]:
    """The producer alone, by torch's library, of a chain that starts with one: what the rest of the chain costs nothing beside."""
    if not starts_with_producer(emitted):
        return []
    module, (x, *_) = producer_module(emitted, eager), inputs
    kind = "GEMM" if isinstance(module, nn.Linear) else "convolution"
    return [Peer(f"library {kind} alone", lambda: module(x), chain=False)]


def _library_tail(emitted: Emitted, eager: nn.Module, inputs: Inputs) -> list[Peer]:
    """Torch's GEMM or convolution behind which our norm kernel runs; fp32 and tf32 GEMMs get the compiled tail instead."""
    x = inputs[0]
    if x.device.type != "cuda" or departure(emitted.spec.chain) is not None:
        return []
    try:
        variant = emit_variant(emitted.spec, "sm_80", "library", gemm="library")
    except Refusal:
        tail = compiled_tail(emitted, eager)
        module = producer_module(emitted, eager)
        tail(module(x))
        return [Peer("library GEMM + compiled tail", lambda: tail(module(x)))]
    model = construct(variant, inputs[0].device, "sm_80")
    model.load_state_dict(eager.state_dict())
    return [Peer(f"library {emitted.spec.chain[0].operator.product} + our tail", lambda: model(*inputs))]


def _triton(emitted: Emitted, eager: nn.Module, inputs: Inputs) -> list[Peer]:
    """The autotuned Triton GEMM in three products, behind which the compiled tail runs. fp32 after a linear only."""
    x = inputs[0]
    if x.device.type != "cuda" or emitted.spec.precision.name != "fp32" or departure(emitted.spec.chain) is not None:
        return []
    module = producer_module(emitted, eager)
    if not isinstance(module, nn.Linear):
        return []
    from bench.triton_gemm import best_config, linear

    tail = compiled_tail(emitted, eager)
    peers = []
    for precision in ("tf32x3", "bf16x3"):
        run = lambda precision=precision: tail(linear(x, module.weight, module.bias, precision))  # noqa: E731
        run()
        peers.append(Peer(f"Triton GEMM {precision} + compiled tail", run, note=best_config(precision) or ""))
    return peers


def starts_with_producer(emitted: Emitted) -> bool:
    """Is the chain's first operator a linear or a convolution?"""
    return emitted.spec.chain[0].operator.kind is Kind.PRODUCER


def producer_module(emitted: Emitted, eager: nn.Module) -> nn.Module:
    """The reference's nn.Linear or nn.Conv2d."""
    return getattr(eager, emitted.spec.chain[0].name)


class _Tail(nn.Module):
    """The chain after its producer, from the operator table's own PyTorch calls."""

    def __init__(self, emitted: Emitted, eager: nn.Module):
        super().__init__()
        for step in emitted.spec.chain[1:]:
            if step.name and hasattr(eager, step.name):
                setattr(self, step.name, getattr(eager, step.name))
        body = "\n".join(f"    {line}" for line in reference_lines(emitted.spec)[1:])
        scope = {"torch": torch, "F": F}
        value = value_variable(emitted.spec)
        exec(f"def forward(self, {value}):\n{body}\n    return {value}\n", scope)  # noqa: S102 - text of our own operator table
        self.forward = scope["forward"].__get__(self)


def compiled_tail(emitted: Emitted, eager: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Everything after the producer, fused by torch.compile."""
    assert emitted.spec.chain[0].operator.kind is Kind.PRODUCER
    return torch.compile(_Tail(emitted, eager), fullgraph=True, dynamic=False)


BUILDERS: dict[str, Builder] = {
    "eager": _eager,
    "graph": _graph,
    "compile": _compiled(None, "compile"),
    "library": _library,
    "max-autotune-no-cudagraphs": _compiled("max-autotune-no-cudagraphs", "compile max-autotune, no graph"),
    "max-autotune": _compiled("max-autotune", "compile max-autotune"),
    "triton": _triton,
    "library-tail": _library_tail,
}


def build(names: tuple[str, ...], emitted: Emitted, eager: nn.Module, inputs: Inputs, report=None) -> tuple[list[Peer], dict[str, str]]:
    """The peers called `names`, ready to be timed, and why any could not be made. Call under no_grad with the precision's flags set."""
    peers, failed = [], {}
    torch._dynamo.reset()  # once: what is compiled below stays compiled while it is timed
    for name in names:
        if report:
            report(name)
        start = time.perf_counter()
        try:
            made = BUILDERS[name](emitted, eager, inputs)
        except Exception as error:  # noqa: BLE001 - a peer that its own authors' code cannot run is a fact to report, not a failure of ours
            failed[name] = failure_text(error)
            continue
        for peer in made:
            peer.setup_s = time.perf_counter() - start
        peers += made
    return peers, failed


def failure_text(error: Exception) -> str:
    """Why a peer could not be run, on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else 'no message'}"
