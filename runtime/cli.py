"""The commands ``fsk doctor``, ``build``, ``show`` and ``cache``: they look at the machine, the cache and a package, and compile ahead of time."""

import shutil
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import kernel_report, toolchain
from .build import ensure_built, plan_build
from .cache import LIBRARY, caches_in_use, default_cache
from .doctor import examine, examine_package
from .errors import PackageError
from .load import with_backwards
from .package import Package
from .process import run_program

SETTINGS = {"help_option_names": ["-h", "--help"]}
STYLES = {"ok": "green", "missing": "bold red", "optional": "yellow"}


@click.command(context_settings=SETTINGS)
@click.argument("package", type=click.Path(path_type=Path), required=False)
def doctor(package):
    """Say what was found, what is missing and what to install, and which targets run here; of PACKAGE (a folder), if one is named,
    which libraries this machine needs and which of them are built."""
    findings = examine() + (examine_package(Package(package)) if package else [])
    table = Table("what", "state", "detail", box=None)
    for finding in findings:
        table.add_row(finding.what, f"[{STYLES[finding.state]}]{finding.state}[/]", escape(finding.detail))
    _console().print(table)
    sys.exit(any(finding.state == "missing" for finding in findings))


@click.command(context_settings=SETTINGS)
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--target", "targets", multiple=True, help="Build for this target (repeatable); else for all emitted ones.")
@click.option("--capability", multiple=True, metavar="X.Y",
              help="Compile for devices of this compute capability (repeatable); else for every device of the target.")  # fmt: skip
@click.option("--backward/--no-backward", default=True, help="Also the libraries that gradients need.  [default: yes]")
def build(package, targets, capability, backward):
    """Compile PACKAGE (a generated folder) into the cache; no GPU is needed."""
    opened = Package(package)
    names = dict.fromkeys(targets) or list(opened.manifest.targets)
    wanted = [_capability(text) for text in capability] or [None]
    chosen = []
    for name in names:
        target = opened.target(name)
        able = [None] if target.arch is None else [entry for entry in wanted if entry is None or target.runs_on(entry)]
        for entry in wanted:
            if entry not in able and target.arch is not None:
                click.echo(f"{opened.manifest.name} {name}: not for capability {entry[0]}.{entry[1]}, which it does not run on", err=True)
        chosen += [(target, entry) for entry in able]
    for target, entry in with_backwards(opened, chosen) if backward else chosen:
        with _console(stderr=True).status(f"compiling {opened.manifest.name} for {target.name}"):
            path = ensure_built(plan_build(opened, target, entry))
        click.echo(f"{opened.manifest.name} {target.name}: {path}")
    if not chosen:
        raise PackageError(f"nothing of {opened.manifest.name} was built.")


@click.command(context_settings=SETTINGS)
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--target", "targets", multiple=True, help="Only this target (repeatable).")
@click.option("--arch", help="Architecture to compile a native target for, such as sm_86.")
@click.option("--backward/--no-backward", default=True, help="Also the sources that gradients need.  [default: yes]")
@click.option("--ptx", "form", flag_value="ptx", help="Print the PTX.")
@click.option("--sass", "form", flag_value="sass", help="Print the machine code (needs cuobjdump).")
@click.option("--resources", "form", flag_value="resources", default=True, help="Print registers, stack, spills (default).")
def show(package, targets, arch, backward, form):
    """Compile the CUDA sources of PACKAGE (a generated folder) and print what came out: the forward's, then the backward's."""
    opened = Package(package)
    chosen = [(opened.target(name), None) for name in targets] or [(t, None) for t in opened.manifest.targets.values() if t.arch]
    parts = {"forward": chosen}
    if backward:
        behind = with_backwards(opened, chosen)[len(chosen) :]
        parts["backward"] = list({entry[0].name: entry for entry in reversed(behind)}.values())  # each for its first device
    shown = False
    for part, entries in parts.items():
        units = [(*entry, source) for entry in entries for source in entry[0].sources if source.endswith(".cu")]
        if units:
            _show_part(opened, part, units, arch, form)
            shown = True
    if not shown:
        raise PackageError(f"{opened.manifest.name} has no CUDA sources among the targets asked for.")


def _show_part(package: Package, part: str, units: list, arch: str | None, form: str) -> None:
    """Prints what became of ``units`` (target, capability, source), under the heading ``part``."""
    title = f"{package.manifest.name}, {part}"
    table = Table("target", "source", "for", "kernel", "registers", "stack", "spills", "static shared", "double", box=None, title=title, title_justify="left")
    for target, capability, source in units:
        compiled_for = (arch or "sm_%d%d" % (capability or target.least_capability)) if target.arch == "native" else target.arch
        path = package.path / source
        if form != "resources":
            click.echo(f"// {title}: {target.name}: {source} for {compiled_for}")
            click.echo(_device_text(path, target.flags, compiled_for, form))
            continue
        report = kernel_report.compile_report(path, target.flags, compiled_for)
        for kernel in report.kernels:
            spills = kernel.spill_stores + kernel.spill_loads
            numbers = (kernel.registers, kernel.stack, spills, kernel.static_shared)
            table.add_row(target.name, source, compiled_for, kernel.short_name, *map(str, numbers), "yes" if report.uses_double else "no")
        for warning in report.warnings:
            click.echo(warning, err=True)
    if form == "resources":
        _console().print(table)


@click.group(context_settings=SETTINGS)
def cache():
    """Look at, check or empty the build cache."""


@cache.command("list")
def list_entries():
    """List what is in the cache."""
    for store in caches_in_use():
        table = Table("key", "package", "target", "size", "flags", box=None)
        for key in store.keys():
            try:
                record = store.record(key)
                size = (store.entries / key / LIBRARY).stat().st_size
                table.add_row(key[:12], *map(escape, (record.package, record.target, f"{size / 1e6:.1f} MB", " ".join(record.flags))))
            except (OSError, ValueError, KeyError, TypeError):
                table.add_row(key[:12], "damaged", "", "", "")
        click.echo(store.root)
        _console().print(table)


@cache.command()
def verify():
    """Check every entry against its digest; exit with 1 where one is damaged."""
    problems = {store.entries / key: store.problem_of(key) for store in caches_in_use() for key in store.keys()}
    for entry, problem in problems.items():
        if problem:
            click.echo(f"{entry} {problem}; it is built again when it is next needed.")
    damaged = sum(problem is not None for problem in problems.values())
    click.echo(f"{len(problems) - damaged} sound, {damaged} damaged")
    sys.exit(damaged > 0)


@cache.command()
def clear():
    """Remove all entries, reports and kept failures; running builds are left alone."""
    store = default_cache()
    click.echo(f"removed {store.clear()} entries from {store.root}")


def _device_text(path: Path, flags: tuple[str, ...], arch: str, form: str) -> str:
    if form == "sass":
        disassembler = toolchain.find_cuobjdump()  # before compiling: it may be missing
    made = kernel_report.device_code(path, flags, arch, "ptx" if form == "ptx" else "cubin")
    try:
        if form == "ptx":
            return made.read_text()
        return run_program([disassembler.path, "--dump-sass", made]).output
    finally:
        shutil.rmtree(made.parent, ignore_errors=True)


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise click.BadParameter(f"{text!r} is not a compute capability such as 8.6.")
    return int(major), int(minor)


def _console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 200, soft_wrap=not stream.isatty())
