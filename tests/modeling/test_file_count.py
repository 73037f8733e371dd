"""Through how many of our files a prompt and a decoded token pass, from `generate()` to the arithmetic."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import StoppingCriteria

import pod

OURS = Path(pod.__file__).parent
MOST = 12


class Files:
    """Context: functions of ours that were called, by file."""

    def __enter__(self):
        self.called = Counter()
        self.before = sys.getprofile()
        sys.setprofile(self.see)
        return self

    def __exit__(self, *error):
        sys.setprofile(self.before)

    def see(self, frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and file.is_relative_to(OURS):
            self.called[str(file.relative_to(OURS))] += 1


class Watch(StoppingCriteria):
    """Begins to count after the first token, and ends after the second: between them lies one decoded token."""

    def __init__(self):
        self.files, self.tokens = Files(), 0

    def __call__(self, input_ids, scores, **kwargs):
        self.tokens += 1
        if self.tokens == 1:
            self.files.__enter__()
        elif self.tokens == 2:
            self.files.__exit__()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("plan", [True, False], ids=["pod", "full"])
@pytest.mark.parametrize("what", ["token", "prompt"])
def test_few_files_stand_between_generate_and_the_arithmetic(tools, plan, what):
    model, ids = tools.make_pod(dtype=torch.float32, plan=plan), tools.random_ids(2, 40)
    options = {"do_sample": False, "eos_token_id": None}
    model.generate(ids, max_new_tokens=3, **options)  # what is made once, is made
    watch = Watch()
    if what == "prompt":
        with Files() as files:
            model.generate(ids, max_new_tokens=1, **options)
    else:
        model.generate(ids, max_new_tokens=3, stopping_criteria=[watch], **options)
        files = watch.files
    found = dict(files.called.most_common())
    print(what, len(found), found)
    assert len(found) >= 5, "the profiler has seen nothing"
    assert len(found) <= MOST
