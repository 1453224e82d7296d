"""Convolutions and transposed convolutions without a norm that between them meet every form of the product kernel for Hopper."""

from __future__ import annotations

from typing import Any

from codegen.ops.windows import AXES


def product(
    rank: int, cin: int, cout: int, kernel: Any, size: Any, *, batch: int = 3, transposed: bool = False, tail: tuple = ("relu",), **values: Any
) -> dict[str, Any]:
    """A spec as data: the convolution `conv`, then `tail`. `size` is that of every axis, or one for each."""
    sizes = (size,) * rank if isinstance(size, int) else size
    given = {"in_channels": cin, "out_channels": cout, "kernel_size": kernel, **values}
    conv = {"name": "conv", **{key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}}
    name = f"conv{'_transpose' if transposed else ''}{rank}d"
    return {"name": "conv_product", "batch": batch, "input": dict(zip(AXES[rank], sizes, strict=True)), "chain": [{name: conv}, *tail]}


def scale(channels: int, rank: int) -> dict[str, Any]:
    return {"mul": {"name": "scale", "shape": [channels] + [1] * rank}}


CASES = {
    "padded": product(2, 64, 128, 3, (20, 24), padding=1),
    "strided": product(2, 64, 128, 3, (41, 37), stride=2, padding=1),
    "all_at_once": product(2, 96, 200, (3, 5), (29, 43), stride=(2, 3), dilation=(2, 1), padding=(2, 1), tail=("gelu",)),
    "pointwise": product(2, 64, 72, 1, (19, 21), tail=()),
    "few_channels": product(2, 3, 40, 5, (33, 35), padding=2, bias=False, tail=(scale(40, 2),)),
    "pairs_of_taps": product(2, 16, 64, 3, (26, 30), padding=1),
    "dilated": product(2, 128, 256, 3, (24, 25), dilation=3, padding=3),
    "few_results": product(3, 8, 16, 3, (5, 12, 30), tail=("relu", scale(16, 3))),
    "runs_apart": product(2, 20, 24, 3, (9, 21), dilation=(1, 5), padding=(1, 5), batch=1),
    "runs_of_phases_apart": product(2, 12, 30, 5, (5, 13), transposed=True, stride=2, dilation=(1, 5), padding=(1, 3), batch=1),
    "runs_without_a_gap": product(3, 16, 33, (3, 1, 1), (5, 4, 8), padding=(1, 0, 0), batch=1),
    "one_axis_few": product(1, 6, 12, 5, 301, padding=2, batch=1),
    "one_axis": product(1, 48, 80, 9, 301, stride=4, padding=4),
    "three_axes": product(3, 32, 64, 3, (9, 17, 18), padding=1),
    "three_axes_strided": product(3, 24, 24, 3, (11, 20, 23), stride=(2, 1, 2), padding=(1, 1, 0), dilation=(2, 2, 1)),
    "few_channels_apart": product(2, 4, 64, 3, (30, 31), stride=2, dilation=2, padding=2),
    "flipped": product(2, 64, 128, 3, (21, 23), transposed=True, padding=1),
    "flipped_few": product(3, 4, 64, 5, (6, 11, 13), transposed=True, padding=2),
    "phases": product(2, 64, 64, 4, (20, 22), transposed=True, stride=2, padding=1, tail=("tanh",)),
    "uneven_phases": product(2, 64, 128, 3, (19, 21), transposed=True, stride=2, padding=1, output_padding=1),
    "odd_width": product(2, 32, 72, 3, (19, 21), transposed=True, stride=2, padding=1),
    "no_overlap": product(2, 64, 64, 2, (20, 21), transposed=True, stride=2),
    "phases_of_rows": product(2, 32, 64, 3, (14, 19), transposed=True, stride=(2, 1), padding=1),
    "three_rows": product(2, 16, 48, 5, (13, 18), transposed=True, stride=(3, 2), padding=(2, 1), tail=(scale(48, 2),)),
    "phases_without_taps": product(2, 64, 64, 1, (14, 19), transposed=True, stride=2),
    "dilated_phases": product(2, 64, 64, 3, (17, 20), transposed=True, stride=2, dilation=3, padding=2),
    "eight_phases": product(3, 64, 128, 3, (5, 9, 12), transposed=True, stride=2, padding=1),
    "eight_phases_few": product(3, 3, 16, 3, (5, 9, 12), transposed=True, stride=2, padding=1),
    "phases_of_one_axis": product(1, 64, 128, 4, 201, transposed=True, stride=2, padding=1),
}

# In front of a norm, whose kernels follow; operators in between are theirs.
NORMED = product(2, 64, 128, 3, (40, 44), batch=5, padding=1, tail=("relu", {"instance_norm": {"name": "norm"}}))
