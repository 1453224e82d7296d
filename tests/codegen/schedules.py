"""The schedule of an emitted kernel, run by a C++ compiler: which tiles its units are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def listed(folder: Path, text: str, first: str, last: str, loops: str, fields: str) -> list[tuple[int, ...]]:
    """What the function `last` of a kernel's source gives in `loops` over its constants: its result's `fields`, as in "t.sample, t.channel".

    Compiled is the text from the struct `first` to the end of that function, called as it is named in `fields` by `t`.
    """
    numbers = "\n".join(re.findall(r"^constexpr int k\w+ = [^;]+;", text, re.M))
    schedule = re.search(rf"struct {first} \{{.*?\b{re.escape(last.split('(')[0])}\([^)]*\) \{{.*?\n\}}\n", text, re.S)[0].replace("__device__ __forceinline__", "")
    counted = len(fields.split(","))
    main = f'int main() {{ {loops} {{ const auto t = {last}; std::printf("{" ".join(["%d"] * counted)}\\n", {fields}); }} }}'
    source, program = folder / "schedule.cpp", folder / "schedule"
    source.write_text(f"#include <cstdio>\n{numbers}\n{schedule}\n{main}\n")
    subprocess.run(["g++", "-std=c++17", "-o", program, source], check=True, timeout=120)
    lines = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [tuple(map(int, line.split())) for line in lines]
