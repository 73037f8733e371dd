"""Costs at random, as `pod explore` measures them, and settings to choose plans from them."""

import torch

from pod.plan.costs import cost_shapes
from pod.plan.measured_costs import MeasuredCosts
from pod.recipe import load_recipe

WINDOWS = {"num_sink_tokens": 2, "num_recent_tokens": 5}


def random_costs(layers=5, heads=3, groups=2, seed=0):
    """Costs on text and on repeated tokens, and an order of query heads. The costs of windows add up."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in cost_shapes(layers, heads).items():
        for end in ("", "_retrieval"):
            if name == "windows":
                alone = 2.5 * torch.rand(layers * heads, generator=generator, dtype=torch.float64)
                values[name + end] = alone.diag().view(shape)
            else:
                values[name + end] = torch.rand(shape, generator=generator, dtype=torch.float64)
    order = torch.rand(layers, layers, heads, heads, groups, generator=generator).argsort(-1)
    return MeasuredCosts(values | {"order": order}, {"model": "m"})


def explore_args(**changes):
    """Settings in which retrieval weighs as much as text, unless they say otherwise."""
    changes = {"retrieval_weight": 1.0} | changes
    recipe = load_recipe(None, [f"explore.{name}={value}" for name, value in changes.items()])
    return recipe.explore
