"""Bad steps: spikes by the running median, skips, rewinds, and the same verdicts after a restart."""

import json
import math

import pytest

from pod.training.args import TrainArgs
from pod.training.run.loss_spikes import LossSpikeDetector


def make_detector(**settings) -> LossSpikeDetector:
    return LossSpikeDetector(TrainArgs(**{"spike_factor": 2.0, "spike_window": 8, **settings}))


def feed(detector: LossSpikeDetector, losses: list[float], first_step: int = 1) -> list[str]:
    """Verdicts of steps with these losses, as the trainer asks: spike before the update, judge after it."""
    verdicts = []
    for step, loss in enumerate(losses, first_step):
        skipped = detector.is_spike(loss) or not math.isfinite(loss)
        verdicts.append(detector.judge(step, loss, skipped))
    return verdicts


def test_bar_is_the_factor_times_the_median_of_the_last_good_losses():
    detector = make_detector()
    feed(detector, [9.0, 9.0, 4.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 7.0])  # the two nines have left the window
    assert detector.spike_bar() == 2.0 * 4.5
    assert not detector.is_spike(9.0)
    assert detector.is_spike(9.000001)


def test_nothing_is_a_spike_before_a_quarter_of_the_window():
    detector = make_detector()
    feed(detector, [1.0])
    assert not detector.is_spike(100.0)
    feed(detector, [1.0], 2)
    assert detector.is_spike(100.0)


def test_without_a_factor_only_nan_and_infinity_are_bad():
    detector = make_detector(spike_factor=0.0)
    verdicts = feed(detector, [1.0] * 8 + [1e30, math.nan, 1.0, math.inf])
    assert verdicts == ["good"] * 9 + ["skip", "good", "skip"]


def test_bad_steps_do_not_move_the_median():
    detector = make_detector(max_skipped_steps=100)
    feed(detector, [1.0] * 8)
    assert feed(detector, [5.0] * 50, 9) == ["skip"] * 50
    assert detector.spike_bar() == 2.0


def test_run_stops_after_as_many_bad_steps_in_a_row():
    detector = make_detector(max_skipped_steps=3)
    feed(detector, [1.0] * 4 + [9.0, 9.0, 1.0, 9.0, 9.0])
    with pytest.raises(RuntimeError, match=r"^3 bad steps in a row \(at step 10 the loss was 9, above 2 = "):
        feed(detector, [9.0], 10)
    detector = make_detector(max_skipped_steps=2)
    feed(detector, [1.0, math.nan])
    with pytest.raises(RuntimeError, match="^2 bad steps in a row .*NaN or infinite"):
        feed(detector, [math.nan], 3)


def test_a_gradient_overflow_with_a_finite_loss_is_bad():
    detector = make_detector()
    assert detector.judge(1, 1.0, skipped=True) == "skip"
    assert list(detector.losses) == []


def test_rewinds_are_counted_over_the_run_and_then_stop_it():
    detector = make_detector(bad_step="rewind", max_rewinds=2, max_skipped_steps=1)
    saved = detector.state_dict()
    for step in (3, 9):
        assert detector.judge(step, math.nan, skipped=True) == "rewind"
        detector.rewound(saved)
        assert feed(detector, [1.0, 1.0]) == ["good", "good"]
    with pytest.raises(RuntimeError, match="^step 12 is bad .* after 2 rewinds"):
        detector.judge(12, math.nan, skipped=True)


def test_rewind_without_a_checkpoint_is_a_skip_and_not_counted():
    detector = make_detector(bad_step="rewind", max_rewinds=0, max_skipped_steps=2)
    assert detector.judge(1, math.nan, skipped=True, can_rewind=False) == "skip"
    assert detector.rewinds == 0
    with pytest.raises(RuntimeError, match="2 bad steps in a row"):
        detector.judge(2, math.nan, skipped=True, can_rewind=False)


def test_a_rewind_takes_the_losses_of_its_checkpoint_back():
    detector = make_detector(bad_step="rewind")
    feed(detector, [1.0, 1.1])
    saved = detector.state_dict()
    feed(detector, [1.9, 1.9, 1.9, 1.9], 3)
    assert feed(detector, [50.0], 7) == ["rewind"]
    detector.rewound(saved)
    assert list(detector.losses) == [1.0, 1.1]
    assert detector.rewinds == 1


def test_restart_anywhere_gives_the_same_verdicts():
    losses = [1 + 0.1 * ((7 * i) % 5) for i in range(30)]
    for at in (4, 11, 12, 20, 25):
        losses[at] *= 40
    losses[17] = math.nan
    whole = make_detector(max_skipped_steps=3)
    verdicts = feed(whole, losses)
    assert verdicts.count("skip") == 6
    for cut in range(len(losses)):
        first = make_detector(max_skipped_steps=3)
        begin = feed(first, losses[:cut])
        second = make_detector(max_skipped_steps=3)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert begin + feed(second, losses[cut:], cut + 1) == verdicts
        assert second.state_dict() == whole.state_dict()


def test_state_of_older_checkpoints_and_none_at_all():
    detector = make_detector()
    feed(detector, [1.0, 1.0, math.nan])
    detector.load_state_dict({"consecutive_skips": 2, "rewinds": 1})
    assert (detector.consecutive_skips, detector.rewinds, list(detector.losses)) == (2, 1, [])
    detector.load_state_dict({})
    assert (detector.consecutive_skips, detector.rewinds) == (0, 0)
