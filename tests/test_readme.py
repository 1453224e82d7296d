"""The README shows what is emitted today."""

import re
from pathlib import Path

TOP = Path(__file__).parents[1]


def test_the_kernel_excerpt_is_the_emitted_text():
    excerpt = re.search(r"```cuda\n(.*?)```", (TOP / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
    source = (TOP / "generated" / "exemplars" / "gemm_groupnorm_hardtanh_fp16" / "group_norm_sm80.cu").read_text(encoding="utf-8")
    assert excerpt.strip() and excerpt.strip() in source


def test_the_spec_shown_is_the_shipped_one():
    shown = re.search(r"```yaml\n(.*?)```", (TOP / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
    shipped = (TOP / "codegen" / "specs" / "default.yaml").read_text(encoding="utf-8")
    assert shown.split("\n", 1)[1] == shipped.split("\n", 1)[1]


def test_links_and_commands_exist():
    text = (TOP / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (TOP / target).exists(), target
    recipes = re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in re.findall(r"\bmake ([a-z-]+)", text):
        assert command in recipes, command


def test_the_operator_shown_is_in_the_table():
    text = (TOP / "README.md").read_text(encoding="utf-8")
    row, function = re.findall(r"```python\n((?:_elementwise|Function)\(.*?)\n```", text, re.DOTALL)
    assert row in (TOP / "codegen" / "ops" / "table.py").read_text(encoding="utf-8")
    assert function in (TOP / "codegen" / "ops" / "functions.py").read_text(encoding="utf-8")
