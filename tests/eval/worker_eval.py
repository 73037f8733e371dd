"""A process of its own that evaluates: `python worker_eval.py SETTINGS.json [kill_after]`.

It is a rank when the environment says so. kill_after: SIGKILL comes that many batches after the start, in the
middle of the next line.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from pod.eval import runner  # noqa: E402 - threads first
from pod.eval.answer import answer_cache  # noqa: E402
from pod.eval.lm import index as lm_index  # noqa: E402 - threads first
from pod.eval.report import write  # noqa: E402
from pod.recipe import load_recipe  # noqa: E402

writes = 0


def last_line(descriptor):
    """The last line of a file; nothing when it is the end of a torn one."""
    line = Path(f"/proc/self/fd/{descriptor}").read_bytes().splitlines()[-1]
    return line if line.endswith(b"}") else b""


def counting(original, kill_after):
    def fsync(descriptor):
        global writes
        original(descriptor)
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".jsonl"):
            return
        writes += last_line(descriptor).startswith(b'{"answers": ')
        if writes == kill_after:
            os.write(descriptor, b'{"answers": {"torn')
            original(descriptor)
            os.kill(os.getpid(), signal.SIGKILL)

    return fsync


def break_on(rank):
    """StreamingLLM fails on one rank."""
    from pod.modeling.methods.windowed import StreamingLayer

    def attend(*_):
        raise RuntimeError("out of\nsinks")

    if os.environ.get("RANK") == rank:
        StreamingLayer.attend = attend


def small_index():
    """lm-eval's index of all its tasks takes ten seconds to build."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.__file__).parent / "tasks"
    manager = TaskManager(include_path=[folder / "arc", folder / "gsm8k"], include_defaults=False)
    lm_index.task_manager = lambda with_lm_eval: manager


def main():
    settings = json.loads(Path(sys.argv[1]).read_text())
    kill_after = int(sys.argv[2]) if len(sys.argv) > 2 else None
    break_on(settings.pop("break_on_rank", None))
    small_index()
    answer_cache.os.fsync = counting(os.fsync, kill_after)
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    write.write_report = lambda recipe: "none"
    try:
        runner.evaluate(recipe, log=lambda line: None)
    finally:
        Path(recipe.output_dir, f"writes.{os.environ.get('RANK', 0)}").write_text(str(writes))


if __name__ == "__main__":
    main()
