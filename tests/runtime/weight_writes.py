"""Ways to change the weights of a model with one parameter `scale` of eight numbers: those that a forward notices, and others."""

import torch
from torch import nn


def add_in_place(model):
    with torch.no_grad():
        model.scale += 1


def add_to_an_alias(model):
    model.scale.detach().view(2, 4)[0] += 1


def add_in_inference_mode(model):
    with torch.inference_mode():
        model.scale.add_(1)


def swap_the_parameter(model):
    model.scale = nn.Parameter(model.scale.detach() + 1)


def swap_by_one_in_the_same_memory(model):
    """Another object with the same version may come to lie where the old one was, in Python's memory."""
    alias, version = model.scale.data, model.scale._version
    del model.scale
    model.scale = nn.Parameter(alias)
    while model.scale._version < version or model.scale._version == 0:
        model.scale.detach().add_(1)


def other_data(model):
    model.scale.data = model.scale.data + 1


def freed_and_taken_again(model):
    """The allocator may hand out the address that was just given back."""
    values = (model.scale.detach() + 1).tolist()
    model.scale.data = torch.empty(0)
    model.scale.data = torch.tensor(values)


def other_place_in_the_same_storage(model):
    model.scale.data = torch.cat([model.scale.data, model.scale.data + 1])
    model.scale.data = model.scale.data[8:]


def load(model):
    model.load_state_dict({"scale": torch.full((8,), 3.0)})


def load_by_assigning(model):
    model.load_state_dict({"scale": torch.full((8,), 3.0)}, assign=True)


def swap_tensors(model):
    torch.utils.swap_tensors(model.scale, nn.Parameter(torch.full((8,), 3.0)))


def initialise(model):
    nn.init.uniform_(model.scale)


def from_a_vector(model):
    nn.utils.vector_to_parameters(torch.rand(8), model.parameters())


def to_half_and_back(model):
    model.scale.data += 1e-6  # not counted, and lost on the way
    model.half().float()


def write_to_data(model):
    model.scale.data.add_(1)


def write_through_numpy(model):
    model.scale.detach().numpy()[:] += 1


def write_through_dlpack(model):
    torch.from_dlpack(model.scale.detach()).add_(1)


NOTICED = [
    add_in_place, add_to_an_alias, add_in_inference_mode, swap_the_parameter, swap_by_one_in_the_same_memory, other_data, freed_and_taken_again,
    other_place_in_the_same_storage, load, load_by_assigning, swap_tensors, initialise, from_a_vector, to_half_and_back,
]  # fmt: skip
UNNOTICED = [write_to_data, write_through_numpy, write_through_dlpack]
