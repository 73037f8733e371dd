"""What `pod explore` takes for the first tokens where the recipe does not say it."""

import pytest
from plan_models import make_model

from pod.plan.exploration import Exploration, dense_config, sinks_of, windows_of
from pod.recipe import load_recipe


def recipe_of(*settings):
    return load_recipe(None, ["model.path=package:tiny", *settings])


@pytest.mark.parametrize(
    ("settings", "sinks", "windows"),
    [
        ([], "constant", (0, 4096)),
        (["model.num_recent_tokens=32"], "constant", (0, 32)),
        (["model.num_sink_tokens=4", "model.num_recent_tokens=28"], "tokens", (4, 28)),
        (["model.num_sink_tokens=0", "model.num_recent_tokens=28"], "none", (0, 28)),
        (["model.sinks=tokens"], "tokens", (16, 4080)),
        (["model.sinks=constant"], "constant", (0, 4096)),
        (["model.sinks=none"], "none", (0, 4096)),
        (["model.layout=window"], "constant", (0, 4096)),  # explore plans the dense model, whatever layout
        (["model.layout=dense"], "constant", (0, 4096)),
        (["explore.roles=follow"], "tokens", (16, 4080)),
        (["explore.roles=window"], "constant", (0, 4096)),
        (["explore.cost=similarity", "explore.roles=follow"], "tokens", (16, 4080)),
        (["explore.target=vllm"], "constant", (0, 4096)),
        (["explore.target=vllm", "model.sinks=none", "model.num_recent_tokens=7"], "none", (0, 7)),
    ],
)
def test_sinks_and_windows_of_a_recipe(settings, sinks, windows):
    recipe = recipe_of(*settings)
    assert sinks_of(recipe) == sinks
    assert tuple(windows_of(recipe, sinks).values()) == windows


def test_models_that_norm_keys_store_first_tokens(tmp_path):
    """Their constants have no keys, and stand worse for first tokens than those tokens."""
    for qk_norm in (True, False):
        folder = tmp_path / f"norm_{qk_norm}"
        make_model(4, 2, qk_norm=qk_norm).save_pretrained(folder)
        recipe = recipe_of(f"model.path={folder}")
        assert dense_config(recipe).qk_norm == qk_norm
        assert sinks_of(recipe) == ("tokens" if qk_norm else "constant")
        exploration = Exploration.of(recipe)
        assert exploration.sinks == sinks_of(recipe)
        assert exploration.windows == windows_of(recipe, exploration.sinks)


def test_vllm_stores_no_first_tokens():
    with pytest.raises(ValueError, match="num_sink_tokens is 4 with explore.target=vllm"):
        sinks_of(recipe_of("explore.target=vllm", "model.num_sink_tokens=4"))
