"""Traces of models for one call: what shapes tell is known, and a call that is otherwise runs the model's own modules."""

import pytest
import torch
from torch import nn

import fixed_shape_kernels as fsk


class Asks(nn.Module):
    """Asks for sizes, checks and unpacks them, loops over parts, and takes arguments that nobody gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, *further, scale=None, **named):
        if len(further) > 0 or named:
            raise ValueError("deprecated")
        assert x.shape[-1] == self.norm.normalized_shape[0] and x.dim() == 3
        batch, tokens, width = x.size()
        q, k, v = self.qkv(self.norm(x)).reshape(batch, tokens, 3, width).unbind(2)
        for part in (q, k):
            v = v + part.flatten(1).view(batch, tokens, -1)
        return torch.relu(self.out(v)) if len(x) > 1 else v


def test_a_forward_may_ask_for_what_shapes_tell(tmp_path):
    model, x = Asks().eval(), torch.randn(2, 5, 8)
    opt = fsk.optimize(model, x, min_gain=0.0, cache_dir=tmp_path)
    assert not [row for row in opt.report.rows if row.status == "not traced"] and any(row.chain.endswith("linear -> relu") for row in opt.report.replaced)
    with torch.no_grad():
        torch.testing.assert_close(opt(x), model(x), rtol=1e-5, atol=1e-6)
        with pytest.warns(UserWarning, match="x is"):
            assert torch.equal(opt(x[:1]), model(x[:1]))  # takes the other way
        with pytest.warns(UserWarning, match="further arguments"), pytest.raises(ValueError, match="deprecated"):
            opt(x, 1)
