"""What the generator emits is what tests/golden.json records: a change of one byte, or of one explanation, is made on purpose or not at all."""

import json
import re

import pytest

from codegen import render
from codegen.constants import with_constants
from codegen.manifest import Package
from codegen.plan.conv_product_sm90a.route import CONV_PRODUCT_SM90A
from codegen.plan.model import Kernel
from codegen.spec import load_spec
from codegen.targets import DEVICES
from tests.codegen.conv_product_cases import CASES
from tests.codegen.forced import request_for
from tests.codegen.test_segment_kernels import specs_of
from tests.golden import DIGITS, Case, cases, difference, hashed, recorded, texts


@pytest.mark.slow
def test_everything_emitted_and_explained_is_as_recorded(monkeypatch, tmp_path):
    """And no kernel's table has a constant that not one of these sources shows. Segments and products of convolutions have more forms than these chains take, so
    those of their own tests are asked too."""
    listed, seen = set(), set()

    def noting(kernel: Kernel, text: str) -> str:
        source = with_constants(kernel, text)
        defined = set(re.findall(r"^constexpr [\w:]+ (\w+) = ", source, re.MULTILINE))
        for constant in kernel.constants:
            (seen if constant.name in defined else listed).add((kernel.template, constant.name))
        return source

    monkeypatch.setattr(render, "with_constants", noting)
    known = recorded()
    names, different = set(), []
    for case in cases():
        names.add(case.name)
        found = difference(case, known.get(case.name))
        if found:
            different.append(found)
    different += [f"{name}: is recorded and no case any more" for name in known if name not in names]
    assert not different, f"{len(different)} cases; if that is meant, run make golden\n" + "\n".join(different[:40])
    for spec in specs_of(tmp_path, "fp32"):
        texts(spec, ("cpu", "sm_80"), None)
    for data in CASES.values():
        path = tmp_path / "product.yaml"
        path.write_text(json.dumps(data | {"gemm": "generated"}))
        for precision in ("fp32", "tf32", "fp16"):
            spec = load_spec(path, precision)
            asked = request_for(CONV_PRODUCT_SM90A, spec, DEVICES["h200"])
            for offer in CONV_PRODUCT_SM90A.offers(asked):
                render.render(Package(spec, (CONV_PRODUCT_SM90A.plan(asked, offer),)))
    assert not listed - seen, f"constants that no source shows: {sorted(listed - seen)}"


def test_a_difference_names_its_file():
    before = {"a.cu": "one", "explanation": "two"}
    same, other, fewer = (Case("case", lambda made=made: made) for made in (before, {**before, "a.cu": "One"}, {"refusal": "no"}))
    assert len(hashed(before)) == 2 * DIGITS and difference(same, hashed(before)) is None
    assert difference(other, hashed(before)) == "case: a.cu differs"
    assert "2 texts were recorded, and now there are 1: refusal" in difference(fewer, hashed(before))
    assert "is not in" in difference(same, None)
