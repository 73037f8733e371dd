"""Scripts that compare speeds and batches: what they conclude from made-up figures."""

import pytest


def test_the_verdict_is_taken_where_dense_is_fastest(script):
    module = script("tokens_per_second")

    def part(backend, own, full, limit):
        row = {
            "tokens_per_second": {"median": own},
            "full_tokens_per_second": {"median": full},
            "byte_ceiling": limit,
        }
        row |= {"speed_over_full": {"median": own / full}, "share_of_ceiling": own / full / limit}
        return {"batch": 4, "full": {"backend": backend}, "methods": {"pod": row}}

    parts = {"a": part("x", 15.0, 10.0, 1.34), "b": part("y", 15.4, 12.0, 1.34), "c": {"error": "no"}}
    best = module.headline(parts, 4)
    assert best["backend"] == "y"
    row = module.verdict("x", best, False)
    assert row["met"] is True and row["figure"] == pytest.approx(15.4 / 12 / 1.34)
    assert module.verdict("x", module.headline({"a": part("x", 12.0, 10.0, 1.34)}, 4), False)["met"] is False
    assert module.verdict("x", module.headline(parts, 1), False)["figure"] is None


@pytest.mark.parametrize("guess", [0, 1, 3, 40, 99, 1000])
def test_the_largest_batch_is_found_from_any_guess(script, guess):
    module = script("max_batch")
    for most in (0, 1, 2, 39, 40, 41, 64, 150):
        calls = []
        assert (
            module.largest(lambda batch, most=most, calls=calls: calls.append(batch) or batch <= most, guess)
            == most
        )
        assert len(calls) < 30 and min(calls) >= 1


def test_rows_by_bytes(script):
    module = script("max_batch")
    assert module.fractional({10: 1000 + 10 * 64, 20: 1000 + 20 * 64}, 1000 + 20.5 * 64) == pytest.approx(
        20.5
    )
