"""What `pod eval --list-methods` and `--list-tasks` print. Neither needs torch to be loaded twice."""

import contextlib
import hashlib
import textwrap
from pathlib import Path

from pod.eval.lm.tasks import LmTask
from pod.eval.speed.args import SpeedOptions
from pod.eval.suites import base
from pod.eval.suites.configs import suite_configs
from pod.files import atomic_write_text
from pod.models import cache_dir
from pod.schema import explain

_WIDTH = 130


def list_methods() -> str:
    """The text: every method of `pod.make_cache` with its parameters. Making it loads torch, so it is kept under a digest of the code."""
    sources = [
        Path(__file__).with_name("catalogue.py"),
        *sorted((Path(__file__).parents[1] / "modeling").rglob("*.py")),
    ]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    kept = cache_dir() / f"methods.{digest}.txt"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    import pod
    from pod.eval.catalogue import describe

    text = describe(pod.methods())
    with contextlib.suppress(OSError):  # a cache that cannot be written is not one
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(kept, text)
    return text


def list_tasks() -> str:
    """The text: our own tasks and their options, the suites in `pod/eval/suites`, and what lm-eval adds."""
    lines = ["Tasks of this package (options: eval.task_options.TASK.OPTION):"]
    for name in base.names():
        task = base.task_class(name)
        lines += ["", f"{name}: {task.title}", *explain(task.Options, "")]
    lines += ["", "efficiency: decode speed, time to first token, memory, largest batch, side by side"]
    lines += [*explain(SpeedOptions, ""), ""]
    lines += [
        "Suites (groups first; README.md in pod/eval/suites says source, licence, metric, prompt and truncation):"
    ]
    for suite, found in suite_configs().items():
        names = textwrap.fill(", ".join(sorted(found)), _WIDTH, break_on_hyphens=False)
        lines += ["", f"  {suite}:", textwrap.indent(names, "    ")]
    lines += [
        "",
        "Any task, group or tag of lm-eval (mmlu, hellaswag, arc_easy, arc_challenge, gsm8k, truthfulqa_mc1 …; `lm-eval ls tasks`).",
    ]
    lines += ["Options of every task of lm-eval and of the suites:", *explain(LmTask.Options, "")]
    return "\n".join(lines)
