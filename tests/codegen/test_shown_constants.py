"""A source shows those constants of its kernel's table that its code uses; what stands there to no purpose is an error."""

from dataclasses import replace

import pytest

from codegen.constants import ConstantError, place, with_constants
from codegen.ir.apply import Constant
from codegen.plan.model import Kernel

TABLE = (
    Constant("kRows", "8", "batch"),
    Constant("kGroupSize", "12", "values of a group"),
    Constant("kBytes", "4 * kGroupSize", "of kRows groups", "std::size_t"),
    Constant("kEps", "1e-5f", "added to kGroupSize", "float"),
)
KERNEL = Kernel("gemm", "gemm/mma.cu.j2", (), TABLE, "")


def source(code: str, kernel: Kernel = KERNEL) -> list[str]:
    return with_constants(kernel, f"#include <a>\n\n{place(kernel.constants)}\n\n{code}\n").splitlines()


def test_constants_are_shown_where_code_names_them():
    assert source("x = kRows * kEps;")[2:4] == ["constexpr int kRows = 8;  // batch", "constexpr float kEps = 1e-5f;  // added to group_size"]
    assert not any("constexpr" in line for line in source("x = 1;  // kRows"))


def test_a_value_that_is_shown_brings_those_that_it_names():
    assert source("x = kBytes;")[2:4] == ["constexpr int kGroupSize = 12;  // values of a group", "constexpr std::size_t kBytes = 4 * kGroupSize;  // of rows groups"]


def test_a_comment_says_in_words_what_is_not_shown():
    assert source("x = kRows;  // kRows of kGroupSize, not kOther")[-1] == "x = kRows;  // kRows of group_size, not kOther"


@pytest.mark.parametrize("own", ["constexpr int kOwn = 3;", "constexpr float kOwn[2] = {1, 2};"])
def test_a_constant_of_the_template_that_nothing_uses_is_an_error(own):
    assert source(f"{own}\nx = kOwn;")
    with pytest.raises(ConstantError, match=r"kernel gemm \(gemm/mma.cu.j2\): the template's kOwn is used by nothing"):
        source(f"{own}\nx = 3;  // kOwn")


def test_a_name_stands_once_in_a_table():
    with pytest.raises(ConstantError, match="kernel gemm .*: kRows stands twice"):
        source("x = kRows;", replace(KERNEL, constants=(*TABLE, TABLE[0])))
