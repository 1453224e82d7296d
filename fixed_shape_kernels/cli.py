"""The command `fsk`: a table of commands, each imported when it is called, so that help needs no torch and no time."""

from __future__ import annotations

import difflib
import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from . import __version__
from .faults import sentences

_OURS = ("bench", "codegen", "fixed_shape_kernels", "runtime")
_COMPLETION = """\b
Completion of commands and options, for one shell or in its start-up file:
  eval "$(_FSK_COMPLETE=bash_source fsk)"            bash
  eval "$(_FSK_COMPLETE=zsh_source fsk)"             zsh
  _FSK_COMPLETE=fish_source fsk | source             fish
\b
Exit codes: 0 done; 1 it failed, or what was examined is wrong; 2 the call or the spec is wrong."""


@dataclass(frozen=True)
class Row:
    """A command: its section of the help, its origin as `module:attribute`, one line on it, and examples."""

    section: str
    origin: str
    summary: str
    examples: tuple[str, ...]

    def load(self, name: str, program: str) -> click.Command:
        """Import the command. Raises click.ClickException where a library that it needs is not installed."""
        try:
            module, _, attribute = self.origin.partition(":")
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] in _OURS:
                raise
            raise click.ClickException(
                f"fsk {name} needs {error.name}, which is not installed here: pip install {error.name.split('.')[0]}"
            ) from None
        command.name, command.short_help = name, self.summary
        lines = [f"  {program} {example}" for example in self.examples]
        command.epilog = "\n".join(["\b", "Example:" if len(lines) == 1 else "Examples:", *lines])
        return command


_EMIT, _RUN, _MEASURE = "From a spec", "Packages and this machine", "Right and fast"

COMMANDS = {
    "demo": Row(
        _EMIT, "bench.demo:main", "generate the shipped spec, build it, run it beside PyTorch",
        ("demo", "demo layer.yaml --precision bf16"),
    ),
    "generate": Row(
        _EMIT, "fixed_shape_kernels.emitting:generate", "emit the packages of specs",
        ("generate layer.yaml", "generate specs/default.yaml --precision bf16 --target sm_90a --out kernels"),
    ),
    "explain": Row(
        _EMIT, "fixed_shape_kernels.emitting:explain", "print plans: kernels, tiles, memory, floor",
        ("explain layer.yaml --target sm_90a --device-class h200",),
    ),
    "standalone": Row(
        _EMIT, "fixed_shape_kernels.emitting:standalone", "also write standalone.py, which imports nothing of ours",
        ("standalone layer.yaml",),
    ),
    "package": Row(
        _EMIT, "fixed_shape_kernels.packing:package", "wheels that need torch and no compiler",
        ("package layer.yaml --target sm_80 --target cpu", "package generated/layer --version 1.2.0"),
    ),
    "from-module": Row(
        _EMIT, "codegen.from_module.command:main", "the spec of a layer in a PyTorch file",
        ("from-module layers.py:Net --name layer --generate",),
    ),
    "optimize": Row(
        _EMIT, "fixed_shape_kernels.models.command:main", "replace the chains of a whole model",
        ("optimize model.py:build --explain", "optimize model.py:build --device cuda --report report.html"),
    ),
    "doctor": Row(
        _RUN, "runtime.cli:doctor", "what this machine has, lacks and should install",
        ("doctor", "doctor generated/layer"),
    ),
    "build": Row(
        _RUN, "runtime.cli:build", "compile a package ahead of time",
        ("build generated/layer --target sm_80 --capability 8.6",),
    ),
    "show": Row(
        _RUN, "runtime.cli:show", "registers, spills, PTX or machine code of a package",
        ("show generated/layer --resources", "show generated/layer --ptx --target sm_90a"),
    ),
    "cache": Row(
        _RUN, "runtime.cli:cache", "list, verify or clear the build cache",
        ("cache list", "cache verify", "cache clear"),
    ),
    "verify": Row(
        _MEASURE, "bench.verify:main", "is a model right, on ordinary and adversarial data?",
        ("verify layer.yaml --precision fp16",),
    ),
    "bench": Row(
        _MEASURE, "bench.run:main", "time a model beside PyTorch and other peers",
        ("bench layer.yaml --peers eager,compile", "bench layer.yaml --backward"),
    ),
    "evidence": Row(
        _MEASURE, "bench.evidence:main", "verify and time packages, and write records",
        ("evidence --budget-s 600", "evidence layer.yaml --results results"),
    ),
    "sweep": Row(
        _MEASURE, "bench.sweep.command:main", "random specs: right? how fast?",
        ("sweep --count 20 --small --device cpu",),
    ),
    "tune": Row(
        _MEASURE, "bench.tune.command:main", "measure the planner's candidates on this card",
        ("tune layer.yaml --precision fp16",),
    ),
    "parallel": Row(
        _MEASURE, "bench.parallel:main", "under torchrun: time chains divided among GPUs",
        ("parallel", "parallel layer.yaml --precision bf16"),
    ),
    "sanitize": Row(
        _MEASURE, "bench.sanitize:main", "compute-sanitizer over the kernels, at small shapes",
        ("sanitize specs/default.yaml --tool memcheck",),
    ),
    "kernelbench": Row(
        _MEASURE, "bench.kernelbench:main", "KernelBench's own harness over standalone.py",
        ("kernelbench --checkout KernelBench --problem 30 --precision fp32", "kernelbench --level 2 --no-harness --problem 30"),
    ),
    "models": Row(
        _MEASURE, "fixed_shape_kernels.models.measured:main", "time whole models with kernels, in and beside torch.compile",
        ("models --model convnext --precision bf16", "models --budget-s 150"),
    ),
    "rekey": Row(
        _MEASURE, "bench.rekey:main", "keep records whose sources changed and whose machine code did not",
        ("rekey --from HEAD~1", "rekey --from v1.2.0 --card h200 --dry-run"),
    ),
    "report": Row(
        _MEASURE, "bench.report:main", "a page with pictures, and the tables, from the records",
        ("report --out build/report",),
    ),
}  # fmt: skip


class Commands(click.Group):
    """A group that lists its commands from the table, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        row = COMMANDS.get(name)
        return row and row.load(name, ctx.find_root().info_name or "fsk")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            ctx.fail(
                f"{args[0]!r} is no command; "
                + (f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}")
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in (_EMIT, _RUN, _MEASURE):
            with formatter.section(section):
                formatter.write_dl([(name, row.summary) for name, row in COMMANDS.items() if row.section == section])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands from the table, without importing one; options as click finds them."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=row.summary) for name, row in COMMANDS.items() if name.startswith(incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        with sentences():
            return super().invoke(ctx)


@click.group(cls=Commands, name="fsk", context_settings={"help_option_names": ["-h", "--help"]}, epilog=_COMPLETION)
@click.version_option(__version__, prog_name="fsk")
def main() -> None:
    """Specialised GPU kernels for fixed shapes, from a YAML spec.

    `fsk COMMAND --help` shows a command's options and an example.
    """
    warnings.showwarning = lambda message, *_: click.echo(f"warning: {message}", err=True)
