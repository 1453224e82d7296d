"""The README and the pages under docs/ show what is emitted today, and name files and commands that exist."""

import re
from pathlib import Path

import pytest
from click import Context

from fixed_shape_kernels.api import explain
from fixed_shape_kernels.cli import COMMANDS

TOP = Path(__file__).parents[1]
PAGES = ["README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (TOP / "docs").glob("*.md"))]
EXEMPLAR = TOP / "generated" / "exemplars" / "gemm_groupnorm_hardtanh_fp16" / "group_norm_sm80.cu"


def text(page: str) -> str:
    return (TOP / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def test_the_kernel_excerpt_is_the_emitted_text():
    (excerpt,) = blocks("README.md", "cuda")
    pieces, source = excerpt.split("// ...\n"), EXEMPLAR.read_text(encoding="utf-8")
    assert len(pieces) > 1 and all(piece.strip() and piece in source for piece in pieces)


def test_the_spec_shown_is_the_shipped_one():
    (shown,) = blocks("README.md", "yaml")
    shipped = (TOP / "codegen" / "specs" / "default.yaml").read_text(encoding="utf-8")
    assert shown.split("\n", 1)[1] == shipped.split("\n", 1)[1]


def test_the_readme_fits_on_two_screens():
    assert len(text("README.md").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text(page)):
        assert ((TOP / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_lead_to_one(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", text(page)):
        there = (TOP / page).parent / target if target else TOP / page
        headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
        known = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in known, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_make_commands_exist(page):
    recipes = re.findall(r"^([a-z0-9-]+):", text("Makefile"), re.MULTILINE)
    for command in re.findall(r"(?:`|^)make ([a-z0-9-]+)", text(page), re.MULTILINE):
        assert command in recipes, command


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_fsk_and_their_options_exist(page):
    for name, rest in re.findall(r"(?:`|^)(?:fsk|python -m fixed_shape_kernels) ([a-z-]+)([^`\n#]*)", text(page), re.MULTILINE):
        assert name in COMMANDS, name
        command, word = COMMANDS[name].load(name, "fsk"), re.match(r" +([a-z]+)\b", rest)
        if hasattr(command, "commands") and word and word[1] in command.commands:
            command = command.commands[word[1]]
        known = {option for parameter in command.get_params(Context(command)) for option in (*parameter.opts, *parameter.secondary_opts)}
        for option in re.findall(r"(?<=\s)(--[a-z-]+)", rest):
            assert option in known, f"fsk {name} {option}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/chains.md", "docs/kernels.md", "docs/numerics.md", "docs/sweep.md"])
def test_files_named_in_full_exist(page):
    for path in re.findall(r"`((?:codegen|runtime|bench|tests|fixed_shape_kernels|generated)/[\w/.]*\w(?:\.\w+|/))`", text(page)):
        assert (TOP / path).exists(), path


def test_the_operator_shown_is_in_the_table():
    row, function = (
        block.strip() for block in blocks("docs/architecture.md", "python") if block.startswith(("_elementwise(", "Function("))
    )
    assert row in (TOP / "codegen" / "ops" / "table.py").read_text(encoding="utf-8")
    assert function in (TOP / "codegen" / "ops" / "functions.py").read_text(encoding="utf-8")


def test_the_chain_shown_is_explained_as_shown():
    (spec,), (shown,) = blocks("docs/chains.md", "yaml"), blocks("docs/chains.md", "text")
    assert shown.strip() in explain(spec, targets="sm_80").replace("\r", "")
