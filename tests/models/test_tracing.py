"""Traces of models for one call: what shapes tell is known, and a call that is otherwise runs the model's own modules."""

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
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


class Odd(nn.Module):
    """A linear layer behind something that a trace may get wrong."""

    def __init__(self, before) -> None:
        super().__init__()
        self.inner, self.before = nn.Linear(8, 8), before
        self.register_buffer("shift", torch.ones(8))
        self.plain, self.kept, self.number, self.seen = torch.ones(8), None, 0, []

    def forward(self, x):
        return torch.relu(self.inner(self.before(self, x)))


def zeros_written_over(self, x):
    made = torch.zeros(x.shape[0], 8)
    made += x
    return made


def copy_written_over(self, x):
    return x + self.plain.clone().add_(x[0])


def drawn(self, x):
    return x + 10.0 * torch.randn(x.shape)


def masked(self, x):
    return x.masked_fill(~torch.tril(torch.ones(8, 8, dtype=bool)), 0.0).to(float).float()


def dropped(self, x):
    return F.dropout(x, 0.5, True)


def buffer_read(self, x):
    return x * self.shift.exp()


def buffer_written(self, x):
    self.shift.add_(1.0)
    return x * self.shift


def kinds_asked(self, x):
    assert isinstance(self.inner.weight, nn.Parameter) and not isinstance(x, nn.Parameter)
    return x * 2.0 if isinstance(x, torch.Tensor) and torch.is_tensor(x) and not isinstance(x, (list, tuple)) else x


def without_gradients(self, x):
    with torch.no_grad():
        return torch.relu(self.inner(x))


def counted(self, x):
    self.number += 1
    return x * self.number


def kept(self, x):
    if self.kept is None:
        self.kept = x * 1.0
    return x + self.kept


def recurrent(self, x):
    self.plain = self.inner(x + self.plain)
    return self.plain


def listed(self, x):
    self.seen.append(x)
    return x * len(self.seen)


def python_s_dice(self, x):
    return x * random.random()


def number_taken(self, x):
    return x * float(self.shift[0])


def chosen_by_data(self, x):
    return x[:, self.shift.bool()]


def under_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + (x @ x.T).float()[:, :1]


TRACED = (zeros_written_over, copy_written_over, masked, drawn, dropped, buffer_read, buffer_written, kinds_asked, without_gradients)
LEFT = {
    counted: "its forward sets number", kept: "its forward sets kept", listed: "its forward sets seen", recurrent: "its forward sets plain", python_s_dice: "the trace gives other values than the module",
    number_taken: "a number is taken out of a tensor", chosen_by_data: "DynamicOutputShape", under_autocast: "switches autocast",
}  # fmt: skip


@pytest.mark.parametrize("before", [*TRACED, *LEFT], ids=lambda one: one.__name__)
def test_what_a_forward_does_beside_its_operators_is_done_at_each_call_or_named(before, tmp_path_factory):
    """Looking leaves no mark on the model, and call for call both do the same."""
    torch.manual_seed(0)
    model, x = Odd(before).eval(), torch.randn(8, 8)
    twin, attributes = copy.deepcopy(model), dict(vars(model))
    report = fsk.explain(model, x)
    assert vars(model) == attributes and not model.seen and torch.equal(model.shift, twin.shift)
    opt = fsk.optimize(model, x, min_gain=0.0, cache_dir=tmp_path_factory.getbasetemp() / "odd")
    said = [row.why for row in opt.report.rows if row.status == "not traced"]
    assert (not said and opt.report.replaced) if before in TRACED else any(LEFT[before] in why for why in said)
    if before is not python_s_dice:  # the one that only a comparison tells
        assert [row.why for row in report.rows if row.status == "not traced"] == said
    model.load_state_dict(twin.state_dict())
    vars(model).update(kept=None, number=0, seen=[], plain=torch.ones(8))
    with torch.no_grad():
        for step in range(3):
            results = []
            for each in (opt, twin):
                random.seed(step)
                torch.manual_seed(step)
                results.append(each(x + step))
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
            for each in (model, twin):
                each.shift.mul_(1.5)


def test_a_part_without_gradients_runs_itself_where_they_are_asked_for(tmp_path):
    torch.manual_seed(0)
    model, x = Odd(without_gradients).train(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    opt = fsk.optimize(model, x, min_gain=0.0, training=True, cache_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt(x).sum().backward()
    twin(x).sum().backward()
    assert torch.equal(model.inner.weight.grad, twin.inner.weight.grad) and any("a part of its forward runs without them" in why for _, why in opt.fallbacks)
    with torch.no_grad():
        torch.testing.assert_close(opt(x), twin(x), rtol=1e-5, atol=1e-5)
    assert opt.fallbacks.total() == 1
