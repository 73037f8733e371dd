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
    """Cache methods to compare: names of `pod eval --list-methods`, joined by `+`, with parameters in
    brackets and a budget behind `@`, for example `pod+snapkv[window=16]+int4@25%`. `pod` runs on the
    trained export, `pod-unadapted` on the original weights under the plan, all others on the original
    model. Budgets: `@1024` (tokens), `@25%` (of each prompt), `@pod` (as many bytes as PoD takes at the
    same length). A method that drops tokens and has no budget gets `@pod`."""

    method_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameters of methods, by name: `{h2o: {num_recent_tokens: 64}}`. `pod eval --list-methods NAME`
    shows the parameters of a method. To compare several variants in one run, write parameters into the
    name: `simlayerkv[threshold=0.8]`."""

    preset: str | None = None
    """Parameters of all methods as a paper set them: pod, simlayerkv, d2o, razorattention, duoattention or
    imdc (sources in pod/eval/presets.py). method_options override them. null = no preset."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """What to measure: perplexity, passkey, efficiency, other tasks of `pod eval --list-tasks`, and any
    task or group of lm-eval, for example niah, pod_longbench, pod_ruler_4k or gsm8k."""

    task_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of tasks, by name: `{niah: {lengths: [4096, 8192]}}`. `pod eval --list-tasks NAME` shows the
    options of a task."""

    models: dict[str, str] = field(default_factory=dict)
    """More models to compare, under names of your own: `{cla: runs/demo_cla/export}` adds the method
    `model:cla`. A path of a plan.json means the original weights under that plan. `PATH@16+240` sets
    other windows (sink + recent tokens). The name `dense_trained` is for a dense model trained on the
    same tokens as PoD; the report then compares PoD with it."""

    data_dir: str | None = None
    """Folder with local copies of the benchmarks' data, one folder per suite (pod/eval/suites/README.md
    lists the files). null = read them from the Hugging Face hub."""

    limit: PositiveInt | None = None
    """Use only so many samples of each lm-eval task, the first ones, for a quick look. null = all."""

    chat_template: Literal["auto", "on", "off"] = "auto"
    """Whether lm-eval prompts are put into the tokenizer's chat template: `on`, `off`, or `auto` = as each
    task defines it (off where it defines nothing)."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the tokenizer's chat template, by name, for example `{enable_thinking: false}` for Qwen3.
    They apply wherever a task uses the template. Which variables there are depends on the template; one that
    it does not use gives a warning that lists those it uses. Answers and results with other variables are
    kept apart."""

    too_long: Literal["truncate", "skip", "error"] = "truncate"
    """What to do with lm-eval prompts that are longer than the model reads: `truncate` (as the task defines
    it; in the middle where the task defines nothing), `skip` (counted in the report), or `error` (end before
    anything is computed)."""

    max_length: PositiveInt | None = None
    """Longest sequence of lm-eval tasks, in tokens, for example 131072. null = the smallest limit of the
    compared models. Methods whose model reads less are left out; streamingllm, lm_infinite, fm, im and imdc
    read any length."""

    question_aware: bool = False
    """Whether a method sees the question when it compresses the text. true: text and question are
    compressed together, as in most papers. false: the text is compressed first and the question comes
    after it, as when several questions follow. Applies to passkey, niah and the suites of pod."""

    unsafe_code: bool = False
    """Allow tasks to run the model's own code without a sandbox: lm-eval's humaneval, and pod_humaneval where
    bubblewrap is not installed. Only for machines where such code can do no harm."""

    pod_model: str | None = None
    """Folder of the trained PoD export. null = where `pod export` writes it, <output_dir>/export."""

    text: list[str] | None = None
    """Files or folders for perplexity. null = the text that `pod data` held out of training."""

    text_length: PositiveInt = 2048
    """Tokens of each text for perplexity."""

    text_sequences: PositiveInt = 8
    """Number of texts for perplexity; more give narrower confidence intervals."""

    min_context: AtLeast2 = 256
    """Tokens before the first scored token. Scores are grouped by position: the first group starts here,
    each next one at twice the position, up to text_length."""

    scored_tokens: PositiveInt = 128
    """Tokens that are scored at the end of each group of positions, at most; the others are context."""

    passkey_lengths: list[AtLeast2] = field(default_factory=lambda: [1024, 2048])
    """Lengths of the passkey prompts in tokens, chat template included."""

    passkey_depths: list[Share] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """Where the key is in the prompt: 0 = at the beginning, 1 = at the end."""

    passkey_samples: PositiveInt = 2
    """Prompts for each length and depth."""

    passkey_new_tokens: PositiveInt = 12
    """Tokens generated for each passkey prompt."""

    passkey_chat_template: bool = False
    """Put the passkey question into the tokenizer's chat template; false = plain text, as in the paper."""

    batch_size: PositiveInt = 4
    """Texts or prompts that are processed together."""

    efficiency_lengths: list[AtLeast2] = field(default_factory=lambda: [2048])
    """Prompt lengths, in tokens, at which the task efficiency measures decode speed, time to first token
    and bytes."""

    efficiency_tokens: PositiveInt = 16
    """Tokens decoded in each timed round of the task efficiency."""

    efficiency_repeats: PositiveInt = 5
    """Timed rounds per method; the methods take turns."""

    reuse: bool = True
    """Use saved answers of earlier runs with the same model, method and prompt. false = compute all
    answers again."""

    steps: list[str] = field(default_factory=lambda: list(STEPS))
    """Parts of the work: answer (run the models on what has no saved answer), score (compute the result
    files), report (write the page). score and report need no model and take seconds."""

    device: str = "auto"
    """Torch device, for example cuda:1. auto = cuda when there is a GPU, else cpu; a model that does not fit
    on one GPU is spread over as many of this rank's GPUs as it needs. balanced = spread every model over all
    GPUs of this rank in equal shares. sequential = fill these GPUs one after the other."""

    def __post_init__(self) -> None:
        check_names("method", self.methods, find_method)
        self.methods = [find_method(name).name for name in self.methods]
        check_names("method", self.methods, find_method)  # two spellings of one method are now equal names
        # `pod.eval.runner.make_tasks` knows which tasks exist; it runs before any computation
        check_names("task", self.tasks, str)
        if not self.steps or set(self.steps) - set(STEPS):
            given = ", ".join(self.steps) or "none"
            raise ValueError(f"eval.steps are some of {', '.join(STEPS)}, got {given}")
        for name in self.models:
            if not name.isidentifier() or name in ("dense", "unadapted", "adapted"):
                raise ValueError(f"eval.models: {name!r} must be a word other than dense, unadapted, adapted")
        # method_options may name methods that are not in eval.methods: a run may compare fewer of them
        own = {find_method(name).name: options for name, options in self.method_options.items()}
        if len(own) < len(self.method_options):
            raise ValueError(f"method_options names one method twice: {', '.join(self.method_options)}")
        self.method_options = with_preset(self.preset, self.methods, own)
        for name in ("passkey_lengths", "passkey_depths", "efficiency_lengths"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, expected at least one")
        if self.text_length <= self.min_context:
            raise ValueError(
                f"min_context is {self.min_context}, it must be less than text_length = {self.text_length}"
            )

    def asked_when(self) -> str:
        """Text for tables: whether methods knew the question when they compressed the text."""
        return (
            "seen when the text is compressed" if self.question_aware else "put after the text is compressed"
        )

    def template_settings(self) -> dict[str, Any]:
        """`chat_template_kwargs` as an entry of identities and results; an empty mapping if none are set."""
        return {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}
