"""`torch.compile(model, backend="fixed_shapes")`: chains of a graph become operators of generated packages, and Inductor compiles the rest.

The same for those who call Inductor themselves: `inductor_pass` is a pass over its graphs before autograd.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import unset_fake_temporarily

from bench.packages import load_package
from bench.store import write_text

from .building import Candidate, build_all
from .captured import Captured
from .chains import Chain
from .judge import Judge, Judged, first_line
from .optimized import candidates_of, kind_of
from .report import REPLACED, NotReplaced, Report, Row

NAME = "fixed_shapes"
SOURCES = Path(__file__).resolve().parents[2]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What `options` may say beside Inductor's own.

    `min_gain` is how many times as fast as Inductor's code for the same operators a chain has to be; `against="eager"` compares with PyTorch's modules
    instead, which spares the time to compile those. `verify`, `precision`, `strict` and `cache_dir` are those of `optimize`. `on_report` is called with the
    report of each graph. Verdicts are kept in `cache_dir`, so that a second process compiles the same graph without judging again.
    """

    min_gain: float = 1.05
    verify: bool = True
    precision: str | None = None
    strict: bool = False
    against: str = "inductor"
    cache_dir: str | Path = "build/models"
    on_report: Callable[[Report], Any] | None = None

    def __post_init__(self) -> None:
        if self.precision not in (None, "tf32"):
            raise ValueError(f"precision: {self.precision!r}; tf32 or None, as the type of the tensors says the rest")
        if self.against not in ("inductor", "eager"):
            raise ValueError(f"against: {self.against!r}; inductor or eager")


def fixed_shapes(gm: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The backend of torch.compile: puts kernels into a graph where they are right and faster, and lets Inductor compile it.

    `mode` and what `options` holds beside `Settings` are Inductor's. Raises ValueError for an option that neither has, NotReplaced with `strict`.
    """
    settings, theirs = _parted(options or {})
    inductor = torch._TorchCompileInductorWrapper(mode, theirs, None)
    replace_in(gm, inputs, settings, inductor.config)
    return inductor(gm, inputs)


def inductor_pass(**options: Any) -> CustomGraphPass:
    """A pass of Inductor, for `torch._inductor.config.pre_grad_custom_pass` or among the `options` of torch.compile under that name.

    It does what the backend does, with random weights in the comparison, as a pass sees none. `options` are those of `Settings`. Where other passes are wanted as
    well, call it from theirs with the graph, and put its `uuid()` into theirs. Raises ValueError for a wrong option.
    """
    settings, theirs = _parted(options)
    if theirs:
        raise ValueError(f"{', '.join(theirs)}: no option of this pass; there are {', '.join(_ours())}")
    return _Pass(settings)


class _Pass(CustomGraphPass):
    """The pass. Operators of packages that it put into earlier graphs are defined when it is made, as Inductor may have those graphs in its cache."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.folder = settings, Path(settings.cache_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = self.folder / "folder.id"  # another folder holds other packages, and Inductor must not take a graph from its cache whose operators are gone
        if not mark.exists():
            write_text(mark, uuid.uuid4().hex)
        self.mark = mark.read_text()
        for path in sorted(self.folder.glob("used/*")):
            if (self.folder / path.name / "manifest.json").is_file():
                load_package(self.folder / path.name)

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        inputs = [None] * sum(node.op == "placeholder" for node in graph.nodes)
        for candidate in replace_in(gm, inputs, self.settings, {}):
            write_text(self.folder / "used" / candidate.folder.name, "")

    def uuid(self) -> str:
        """What Inductor's cache tells the pass by: our sources, the options, and the folder of packages."""
        told = {key: str(getattr(self.settings, key)) for key in _ours() if key != "on_report"}
        return hashlib.sha256(json.dumps([sources(), told, self.mark]).encode()).hexdigest()


def replace_in(gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, inductor: dict[str, Any]) -> list[Candidate]:
    """Put operators into a graph in the place of its chains; those that were put. `inductor` are the settings under which the rest is compiled."""
    tensors = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
    tensors = [fact for fact in tensors if isinstance(fact, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    report = Report("graph of torch.compile", kind_of(device))
    chosen: list[Candidate] = []
    if any(not isinstance(size, int) for fact in tensors for size in fact.shape):
        report.rows.append(Row("(graph)", "graph", "not traced", "sizes of its tensors change between calls, and kernels are for one; torch.compile(dynamic=False) makes a graph for each"))
    if why := _refused(gm, tensors):
        report.rows.append(Row("(graph)", "graph", "not traced", why))
    else:
        training = torch.is_grad_enabled() and any(fact.requires_grad for fact in tensors)
        with unset_fake_temporarily():
            captured, chosen = _apart(lambda: _judged(gm, inputs, settings, inductor, report, device, training))
        captured.put([(one.chain, one.model) for one in chosen])
    _log.info("%s", report)
    if settings.on_report:
        settings.on_report(report)
    if settings.strict and any(row.status != REPLACED for row in report.rows):
        raise NotReplaced(report)
    return chosen


def _apart(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread of its own: Dynamo's state of this compilation is the thread's, and `work` compiles other graphs.

    Dynamo's lock is lent to it, as a condition's wait does; a backward that is compiled below asks for it.
    """
    done, turn = Future(), Condition(compile_lock)

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it was waited for
            done.set_exception(error)
        with turn:
            turn.notify()

    with turn:
        Thread(target=run, name="judging").start()
        while not done.done():
            turn.wait()
    return done.result()


def _judged(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, inductor: dict[str, Any], report: Report, device: torch.device, training: bool
) -> tuple[Captured, list[Candidate]]:  # fmt: skip
    """The graph as a region, and its chains that are right and faster."""
    with torch.random.fork_rng(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        captured = Captured(gm, inputs)
        candidates = candidates_of(report, [captured.region], settings.precision, device)
        build_all(candidates, Path(settings.cache_dir))
        known = _Known(Path(settings.cache_dir) / "verdicts", [kind_of(device), torch.__version__, training, settings.verify, settings.against, repr(sorted(inductor.items()))])
        judge = Judge(settings.min_gain, settings.verify, training, _compiled_by(inductor) if settings.against == "inductor" else None, known)
        built = [one for one in candidates if one.model is not None]
        return captured, [one for one in built if judge.passes(one, [_drawn(captured.region.facts[used]) for used in one.chain.takes])]


def _refused(gm: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> str:
    """Why a whole graph is left to Inductor; empty where it is not."""
    devices = sorted({str(fact.device) for fact in tensors})
    if len(devices) > 1:
        return f"its tensors are on {' and '.join(devices)}"
    if devices and torch.is_autocast_enabled(tensors[0].device.type):
        return "autocast is on"
    if any(node.op == "call_function" and getattr(node.target, "__name__", "") == "_enter_autocast" for node in gm.graph.nodes):
        return "autocast is on in a part of it"
    return ""


def _drawn(fact: torch.Tensor) -> torch.Tensor:
    """Normal data like a tensor of the graph, in the same order in memory where that is dense."""
    made = torch.randn(fact.shape, dtype=torch.float32, device=fact.device).to(fact.dtype)
    strides = fact.stride()
    dense = sorted((stride, size) for stride, size in zip(strides, fact.shape, strict=True) if size > 1)
    step = 1
    for stride, size in dense:
        if stride != step:
            return made
        step *= size
    return torch.empty_strided(tuple(fact.shape), strides, dtype=fact.dtype, device=fact.device).copy_(made)


def _compiled_by(inductor: dict[str, Any]) -> Callable[[Chain, Sequence[torch.Tensor]], Callable[..., torch.Tensor]]:
    """What gives Inductor's code for a chain's operators; PyTorch's own modules where it has none."""

    def rival(chain: Chain, inputs: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
        part = fx.GraphModule(chain.eager, copy.deepcopy(chain.eager.graph))
        try:
            run = compile_fx(part, list(inputs), config_patches={**inductor, "pre_grad_custom_pass": None})
        except Exception as error:  # whatever Inductor raises of these operators it raises of the whole graph, too
            _log.warning("%s: Inductor does not compile the chain by itself (%s); it is timed beside PyTorch's modules", chain.path, first_line(error))
            return chain.eager
        return lambda *given: made[0] if isinstance(made := run(*given), (tuple, list)) else made

    return rival


class _Known:
    """Verdicts on disk, one a file: of a package's content on a kind of device under the same settings."""

    def __init__(self, folder: Path, setting: list[Any]) -> None:
        self.folder, self.setting = folder, setting

    def find(self, candidate: Candidate) -> Judged | None:
        try:
            return Judged(**json.loads(self._path(candidate).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def note(self, candidate: Candidate, found: Judged) -> None:
        write_text(self._path(candidate), json.dumps(asdict(found)) + "\n")

    def _path(self, candidate: Candidate) -> Path:
        told = json.dumps([candidate.model._package.content, *map(str, self.setting)])
        return self.folder / f"{candidate.chain.spec.package}_{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


def _ours() -> list[str]:
    return [field.name for field in fields(Settings)]


def _parted(options: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Our settings, and what is Inductor's. Raises ValueError."""
    ours = {key: value for key, value in options.items() if key in _ours()}
    theirs = {key: value for key, value in options.items() if key not in ours}
    known = torch._inductor.config.get_config_copy()
    for key in theirs:
        if key.replace("-", "_") not in known:
            near = difflib.get_close_matches(key, [*_ours(), *known], 1)
            raise ValueError(f"{key!r} is an option neither of {NAME} ({', '.join(_ours())}) nor of Inductor{f'; did you mean {near[0]}?' if near else ''}")
    return Settings(**ours), theirs


def sources() -> str:
    """A digest of what decides what is put into a graph."""
    told = hashlib.sha256()
    for folder in ("codegen", "fixed_shape_kernels", "runtime"):
        for path in sorted((SOURCES / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".j2", ".cu", ".cuh", ".h", ".cpp", ".yaml"):
                told.update(path.read_bytes())
    return told.hexdigest()
