"""generated/index.yaml: which packages are checked in, as shipped spec x precision."""

from __future__ import annotations

from pathlib import Path

from codegen.spec.yaml_reader import read


def entries(out: Path) -> list[tuple[str, str]]:
    """(spec path, precision) of every checked-in package under `out`; empty where there is no index."""
    path = out / "index.yaml"
    if not path.is_file():
        return []
    data = read(path).plain()
    return [(item["spec"], precision) for item in data["packages"] for precision in item["precisions"]]
