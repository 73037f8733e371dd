"""Ranks from the launcher's environment."""

import pytest

from pod.eval.answer.ranks import Ranks


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks = Ranks()
    assert (ranks.rank, ranks.world_size, ranks.is_first) == (0, 1, True)
    assert ranks.share([1, 2, 3]) == [1, 2, 3] and ranks.gather("x") == ["x"] and ranks.from_first(5) == 5
    ranks.close()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; it should be a whole number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, allowed are 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
    ],
)
def test_an_environment_that_is_not_whole_is_one_line(monkeypatch, environment, message):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Ranks()


def test_shares_are_disjoint_whole_and_spread():
    ranks = object.__new__(Ranks)
    ranks.world_size, found = 3, []
    for rank in range(3):
        ranks.rank = rank
        found.append(ranks.share(list(range(8))))
    assert found == [[0, 3, 6], [1, 4, 7], [2, 5]]
