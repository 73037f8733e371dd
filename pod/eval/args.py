"""What an evaluation measures: the `eval` section of the recipe."""

from dataclasses import field
from typing import Any, Literal

from pydantic import PositiveInt

from pod.eval.answer.methods import check_names, find_method
from pod.eval.presets import with_preset
from pod.schema import AtLeast2, Share, section

TASKS = ("perplexity", "passkey", "efficiency")
STEPS = ("answer", "score", "report")


@section
class EvalArgs:
    """The `eval` section: which methods, on which tasks, at which lengths. Lengths are in tokens."""

    methods: list[str] = field(
        default_factory=lambda: ["full", "pod", "pod-unadapted", "streamingllm", "snapkv"]
    )
    """methods to compare; `pod` runs on the adapted export, `pod-unadapted` on the dense weights under the plan, the rest on
    the dense model. Any method of `pod eval --list-methods` and any combination, as `pod+snapkv`. The methods that drop
    tokens get the budget that fills the bytes that PoD holds at the same length with keys and values as the model computes
    them; what a method really holds is in its results."""

    method_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """parameters of methods by name, as `{razor: {heads: runs/x/plan/retrieval_heads.json}, h2o: {num_recent_tokens: 64}}`;
    `pod eval --list-methods` shows what each one takes. Variants of a method in one run have them in their names:
    `simlayerkv[threshold=0.8]`, `d2o[merge=average,alpha=2]@25%`"""

    preset: str | None = None
    """fills method_options as a paper set its methods and baselines: pod, simlayerkv, d2o, razorattention, duoattention or imdc
    (pod/eval/presets.py says what and where it is printed); what method_options say themselves goes first"""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """what to measure: perplexity, passkey, efficiency, the other tasks of `pod eval --list-tasks`, and any task or group of lm-eval,
    those of pod/eval/suites included (pod_longbench, pod_leval, pod_infinitebench_32k, pod_ruler_4k …)"""

    task_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """options of tasks by name, as `{niah: {lengths: [4096, 8192]}}`; `pod eval --list-tasks` shows what each one takes"""

    models: dict[str, str] = field(default_factory=dict)
    """more models to compare, by a name of yours: `{cla: runs/demo_cla/export}` is the method `model:cla`; a plan.json stands for the dense
    weights under that plan, and `…@16+240` gives either other windows (sink + recent tokens). `dense_trained` is the dense model trained
    on the tokens of PoD's adaptation: the report holds `pod` against it"""

    data_dir: str | None = None
    """folder with local copies of benchmark data in their official files, one folder per suite (pod/eval/suites/README.md lists them);
    without it they are read from the hub"""

    limit: PositiveInt | None = None
    """samples per lm-eval task, the first ones; null = all"""

    chat_template: Literal["auto", "on", "off"] = "auto"
    """put the prompts of lm-eval tasks into the tokenizer's chat template: each task's own rule (auto; tasks without one: off), always, never"""

    too_long: Literal["truncate", "skip", "error"] = "truncate"
    """lm-eval prompts that exceed what the model reads: shorten as the task says (its middle, where the task does not say), skip them
    (counted and named in the report), or stop before anything is computed"""

    max_length: PositiveInt | None = None
    """the longest sequence of lm-eval tasks (tokens), as 131072 for papers' prompts cut to 128K; default: what every compared model reads.
    Methods whose model reads less are not run, those that take input without end are (streamingllm, lm_infinite, fm, im, imdc)"""

    question_aware: bool = False
    """whether methods see a prompt's question when they compress it, as in most papers; false: the text is compressed first and asked about
    then, as where several questions follow or nobody knows them (passkey, niah and the suites of this package, where prompts end in one)"""

    unsafe_code: bool = False
    """allow tasks to run what the model writes without a sandbox (lm-eval's humaneval; pod_humaneval where bubblewrap is missing): only on
    machines where that may do harm"""

    pod_model: str | None = None
    """folder of the adapted PoD export; default is where `pod export` writes, <output_dir>/export"""

    text: list[str] | None = None
    """files or folders to measure perplexity on; default: the text that the prepared data holds out of training"""

    text_length: PositiveInt = 2048
    """length of each perplexity sequence (tokens)"""

    text_sequences: PositiveInt = 8
    """number of perplexity sequences; the confidence intervals are over these"""

    min_context: AtLeast2 = 256
    """shortest context before the first scored token (tokens): position buckets start here and double up to text_length"""

    scored_tokens: PositiveInt = 128
    """tokens scored at the end of every position bucket, at most; the rest of the bucket is context"""

    passkey_lengths: list[AtLeast2] = field(default_factory=lambda: [1024, 2048])
    """lengths of the passkey prompts (tokens, a chat template included)"""

    passkey_depths: list[Share] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """where the key stands in the prompt: 0 = start, 1 = end"""

    passkey_samples: PositiveInt = 2
    """prompts per length and depth"""

    passkey_new_tokens: PositiveInt = 12
    """tokens generated per passkey prompt"""

    passkey_chat_template: bool = False
    """put the passkey question into the tokenizer's chat template instead of asking it as plain text (the paper's format)"""

    batch_size: PositiveInt = 4
    """sequences or prompts run together"""

    efficiency_lengths: list[AtLeast2] = field(default_factory=lambda: [2048])
    """prompt lengths at which decode speed, time to first token and bytes are measured (tokens)"""

    efficiency_tokens: PositiveInt = 16
    """tokens decoded per repeat"""

    efficiency_repeats: PositiveInt = 5
    """timed repeats per method, interleaved between the methods"""

    reuse: bool = True
    """take answers that are kept for what is asked again; false asks the models once more"""

    steps: list[str] = field(default_factory=lambda: list(STEPS))
    """what to do: answer (ask the models what is not answered yet), score (make the result files of the answers) and report (write the page);
    the last two need no model and take seconds"""

    device: str = "auto"
    """torch device; auto = cuda when there is one, else cpu"""

    def __post_init__(self) -> None:
        check_names("method", self.methods, find_method)
        # which tasks exist is known where they are made (`pod.eval.evaluation.make_tasks`), before any computation
        check_names("task", self.tasks, str)
        if not self.steps or set(self.steps) - set(STEPS):
            given = ", ".join(self.steps) or "none"
            raise ValueError(f"eval.steps are some of {', '.join(STEPS)}, got {given}")
        for name in self.models:
            if not name.isidentifier() or name in ("dense", "unadapted", "adapted"):
                raise ValueError(f"eval.models: {name!r} must be a word other than dense, unadapted, adapted")
        # of methods not asked for now, too: a run may be narrower than its recipe
        for name in self.method_options:
            find_method(name)
        self.method_options = with_preset(self.preset, self.methods, self.method_options)
        for name in ("passkey_lengths", "passkey_depths", "efficiency_lengths"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, expected at least one")
        if self.text_length <= self.min_context:
            raise ValueError(
                f"min_context is {self.min_context}, it must be less than text_length = {self.text_length}"
            )

    def asked_when(self) -> str:
        """For tables: whether methods knew the question."""
        return (
            "seen when the text is compressed" if self.question_aware else "put after the text is compressed"
        )

    def longest_speed_run(self) -> int:
        """The longest sequence of the task `efficiency` (tokens)."""
        return max(self.efficiency_lengths) + self.efficiency_tokens * (self.efficiency_repeats + 1)
