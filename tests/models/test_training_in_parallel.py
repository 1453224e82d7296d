"""Training with kernels in DDP, FSDP2 and activation checkpoints, on two processes over gloo: what a twin without kernels gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

import fixed_shape_kernels as fsk
from tests.models.ranks import Block, Net
from tests.models.twins import backward_both, same_gradients_and_buffers
from tests.parallel.processes import run_ranks

APART = 1e-4  # of results, gradients and parameters, relative: three steps of fp32 roundings; a gradient that is not averaged is off in the first digit
CHAINS = 6  # the front, two of each block, the head


def check(row, chains=CHAINS):
    assert max(row["result"], row["gradient"], row["state"]) < APART, row
    assert row["replaced"] >= chains and not row.get("left"), row


def test_two_ranks_train_in_ddp_and_in_fsdp(tmp_path):
    """One start of two processes: replicated, sharded as a whole, and sharded by blocks that `apart` names, or that nobody named."""
    names = ("refused", "replicated", "sharded", "sharded parts", "sharded parts unnamed")
    ended = run_ranks(tmp_path, 2, {name: {} for name in names}, worker="tests.models.ranks")
    assert ended.codes == [0, 0], ended.errors
    for rows in ended.results:
        assert rows.pop("refused") == [
            "(the model) is wrapped in DistributedDataParallel; optimise the model, then wrap what optimize gives", "front.0.weight is a DTensor; optimise the model, then shard it"
        ]  # fmt: skip
        for name, row in rows.items():
            check(row)
            unnamed = name.endswith("unnamed")
            assert row["fallbacks"] == (["a part of it has hooks by now; name such parts in `apart`"] if unnamed else []), name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chains"), [("sharded checkpoints", CHAINS), ("compiled replicated", CHAINS), ("compiled sharded", 1), ("compiled checkpoints", 1)])
def test_two_ranks_train_in_checkpoints_and_in_torch_compile(name, chains, tmp_path):
    """FSDP2 and checkpoints hide some of a model from torch.compile's backend."""
    ended = run_ranks(tmp_path, 2, {name: {}}, limit_s=500, worker="tests.models.ranks")
    assert ended.codes == [0, 0], ended.errors
    for rows in ended.results:
        check(rows[name], chains)


class Own(Net):
    """Its forward calls its blocks by way of checkpoints."""

    def forward(self, x):
        x = self.front(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return torch.tanh(self.head(x))


@pytest.mark.parametrize("way", ["named", "unnamed", "own"])
def test_a_checkpoint_computes_again_what_it_did(way, tmp_path):
    """The kernels run in the backward, too; parts that were wrapped without a word in `apart` run themselves."""
    torch.manual_seed(0)
    model, x = (Own() if way == "own" else Net()).train(), torch.randn(6, 8)
    twin = copy.deepcopy(model)
    opt = fsk.optimize(model, x, training=True, min_gain=0.0, cache_dir=tmp_path, apart=[Block] if way == "named" else ())
    if way != "own":
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
    backward_both(opt(x), twin(x))
    same_gradients_and_buffers(model, twin)
    said = {why for _, why in opt.fallbacks}
    assert said == ({"a part of it is another module by now; name such parts in `apart`"} if way == "unnamed" else set())


def test_apart_names_parts_of_the_model():
    with pytest.raises(ValueError, match="apart: Linear is no part of the model"):
        fsk.explain(Net().eval(), torch.randn(6, 8), apart=[torch.nn.Linear(2, 2)])
    whole, parts = (fsk.explain(Net().eval(), torch.randn(6, 8), apart=apart) for apart in ((), [Block]))
    assert {row.chain for row in whole.chains} == {row.chain for row in parts.chains}
