"""Settings that cannot work are refused before anything is read."""

import pytest

from pod.data.args import DataArgs


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sources": []}, "sources is empty"),
        ({"context_length": 1}, "context_length is 1: it should be greater than or equal to 2"),
        ({"shortest_interval": 4096}, "shortest_interval 4096 is longer than context_length 2048"),
        ({"target_tokens": 100}, "target_tokens 100 is less than one row of 2048"),
        ({"target_tokens": 0}, "target_tokens is 0: it should be greater than 0"),
        ({"held_out_tokens": -1}, "held_out_tokens is -1: it should be greater than or equal to 0"),
        ({"weights": [1.0]}, "weights has 1 numbers for 2 sources: give one per source or none"),
        ({"weights": [1.0, 0.0]}, r"weights must be above 0, got \[1.0, 0.0\]"),
        ({"weights": [1.0, float("nan")]}, r"weights\[1\] is nan: it should be a finite number"),
        ({"intervals": [512, 256]}, r"intervals must ascend and start at 2 tokens or more, got \[512, 256\]"),
        ({"intervals": [256, 256]}, "intervals must ascend"),
        ({"intervals": [1, 256]}, "start at 2 tokens or more"),
        ({"intervals": [2048]}, "the last of intervals starts at 2048, but context_length is 2048"),
        ({"min_tokens": 0}, "min_tokens is 0: it should be greater than 0"),
        ({"workers": 0}, "workers is 0: it should be greater than 0"),
        ({"token_bounds_field": "indices"}, "token_bounds_field is set, but token_field is not"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        DataArgs(**settings)
    assert "\n" not in str(error.value)
