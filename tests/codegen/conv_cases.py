"""Convolution chains that between them meet every form of the one-pass kernel for Hopper."""


def chain(cin=8, cout=64, size=64, kernel=3, groups=16, batch=16, before=(), after=(), pool=4, conv_groups=1, **conv):
    """A spec as data: conv2d, `before`, group_norm, a scale, max_pool2d (unless `pool` is 0), `after`. `size` is the height and width."""
    height, width = size if isinstance(size, tuple) else (size, size)
    conv |= {"groups": conv_groups} if conv_groups > 1 else {}
    steps = [{"conv2d": {"name": "conv", "in_channels": cin, "out_channels": cout, "kernel_size": list(kernel) if isinstance(kernel, tuple) else kernel, **conv}}, *before]
    steps += [{"group_norm": {"name": "norm", "num_groups": groups}}, {"mul": {"name": "scale", "shape": [cout, 1, 1]}}]
    steps += [{"max_pool2d": pool if isinstance(pool, dict) else {"kernel_size": pool}}] if pool else []
    return {"name": "conv_case", "batch": batch, "input": {"height": height, "width": width}, "chain": [*steps, *after]}


SHIFT = {"add": {"name": "shift", "shape": [64, 1, 1]}}
FAMILY = {
    "before": chain(before=("mish", SHIFT, {"hardtanh": {"min_val": -0.5, "max_val": 2.0}}), after=({"clamp": {"min": 0.0, "max": 1.0}},), batch=40),
    "padded": chain(cin=16, size=56, pool=2, padding=1, after=("relu",), batch=30),
    "channel_tiles": chain(cin=3, cout=128, size=72, kernel=5, groups=32, padding=2, batch=50),
    "column_tiles": chain(cin=3, cout=32, size=(64, 224), groups=8, padding=1, batch=6),
    "odd_width": chain(cin=5, cout=48, size=(37, 61), groups=6, pool=3, batch=9),
    "pool8": chain(size=66, pool=8, batch=70),
    "no_pool": chain(cout=32, size=16, groups=4, pool=0, batch=200, after=("sigmoid",)),
    "pointwise": chain(size=32, kernel=1, groups=64, pool=2, batch=64),
    "one_group": chain(cout=16, size=30, kernel=2, groups=1, pool=2, bias=False, batch=300),
    "after": chain(size=34, after=("gelu", {"mul": {"name": "factor", "shape": [64, 1, 1]}})),
}
# Of these the kernel for Hopper takes none.
STRIDED = {
    "stride2": chain(cin=16, cout=48, size=(29, 43), kernel=3, groups=6, pool=0, stride=2, padding=1, after=("silu",), batch=40),
    "stride_down": chain(cin=3, cout=32, size=(40, 37), kernel=(5, 4), groups=4, pool=2, stride=[3, 1], batch=40),
    "stride_across": chain(cin=5, cout=16, size=(22, 75), kernel=(2, 3), groups=2, pool=3, stride=[1, 2], padding=[1, 2], batch=40),
    "dilated": chain(cin=16, cout=64, size=(24, 30), kernel=2, groups=4, pool=2, dilation=3, after=("relu",), batch=40),
    "both": chain(cin=8, cout=40, size=(47, 41), kernel=3, groups=5, pool=2, stride=2, dilation=[2, 3], padding=[2, 3], batch=40),
    "beyond_windows": chain(cin=16, cout=16, size=(31, 33), kernel=2, groups=2, pool=0, stride=3, before=("mish",), batch=40),
}
