"""Tasks of lm-eval, those in `pod/eval/suites` included, as tasks of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from pod.eval.answer.answer_cache import AnswerCache
from pod.eval.answer.budget import ByteBudgets, CacheSpan, MethodRunner
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.lm import index as lm_index
from pod.eval.lm.payload import Leaf, group_payload, leaf_payload, primary_metric, token_counts
from pod.eval.suites import task_base, task_data
from pod.eval.suites.task_base import AnsweredTask
from pod.schema import section

_FEWSHOT_SEED = 1234  # lm-eval's own default: its command line draws the same examples


@section
class LmOptions:
    """Options of any task of lm-eval."""

    num_fewshot: NonNegativeInt | None = None
    """Number of examples before the question. null = the task's own number."""

    limit: PositiveInt | None = None
    """Use only so many samples of each task, the first ones. null = eval.limit."""

    metric: str | None = None
    """The metric for tables and intervals, for example exact_match or exact_match,flexible-extract. null =
    the task's first metric."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """Values for tasks that generate their prompts, for example {max_seq_lengths: [4096]} for lm-eval's
    ruler."""


def make_lm_tasks(run: task_base.Run, names: list[str]) -> dict[str, AnsweredTask]:
    """A task per name. A group or tag of lm-eval is one task.

    Raises:
        ValueError: for a name that neither this package nor lm-eval knows, naming the nearest, and for a task
            that cannot be run (no data, no chat template …).
    """
    lm_index.check_known(names)
    tasks: dict[str, AnsweredTask] = {}
    for name in names:
        options = task_base.make_options(LmTask, run.args.task_options.get(name, {}), name)
        metadata = {"pretrained": str(run.models.dense_path), **options.metadata}
        # loaded one by one: groups of different papers share tasks, which lm-eval refuses within one load
        tasks[name] = LmTask(run, options, lm_index.load(name, metadata))
    return tasks


class Answered(NamedTuple):
    """The answers to a leaf task.

    Attributes:
        logged: samples as lm-eval logs them, with its metrics but without their prompts.
        records: by request key, from our model class.
    """

    logged: Sequence[Mapping[str, Any]]
    records: dict[str, dict[str, Any]]


class LmTask(AnsweredTask):
    """A task, group or tag of lm-eval, with its prompts, filters and metrics.

    Our model class answers through the method's cache.
    """

    name = "lm-eval"
    title = "a task of lm-eval"
    length_setting = "eval.max_length"
    Options = LmOptions

    def __init__(self, run: task_base.Run, options: LmOptions, loaded: lm_index.Loaded):
        from pod.eval.lm.requests import RequestEncoder

        super().__init__(run, options)
        self.name = self.title = loaded.name
        self.loaded = loaded
        self.encoder = RequestEncoder(
            run.tokenizer, run.models.max_length(), run.args.too_long, run.args.question_aware
        )
        self.limit = options.limit or run.args.limit
        self.leaves = {name: self._leaf(name, task) for name, task in loaded.leaves.items()}
        for leaf in self.leaves.values():
            with lm_index.in_one_line(f"task {leaf.name}: its prompts cannot be built"):
                self._build(leaf)

    def _leaf(self, name: str, task: Any) -> Leaf:
        """A leaf task with its rule and metric, before its prompts are built.

        Raises:
            ValueError: for a task with pictures or sound, and for a metric or chat template that is missing.
        """
        if getattr(task, "MULTIMODAL", False):
            raise ValueError(f"task {name} asks about pictures or sound, which these models do not read")
        rule = lm_index.rule_of(task.config.metadata)
        if self.options.num_fewshot is not None:
            task.set_config(key="num_fewshot", value=self.options.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        metric, kind = primary_metric(name, task, rule, self.options.metric)
        rule = replace(rule, chat_template=self._chat(rule))
        return Leaf(name=name, task=task, rule=rule, metric=metric, kind=kind)

    def _chat(self, rule: lm_index.Rule) -> bool:
        """Whether the prompts of a leaf go into the chat template.

        A tokenizer without a template is an error only if `eval.chat_template` is `on`.
        """
        has = bool(getattr(self.run.tokenizer, "chat_template", None))
        if self.args.chat_template == "on" and not has:
            raise ValueError(
                f"eval.chat_template is on and the tokenizer of {self.run.recipe.model.path} has no chat "
                "template: set it to auto or off"
            )
        return {"on": True, "off": False}.get(self.args.chat_template, rule.chat_template and has)

    def _prompts(self, leaf: Leaf) -> None:
        """Build the requests of a leaf.

        They are the same ones every time, because the few-shot examples are drawn with a fixed seed.
        """
        leaf.task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        leaf.task.build_all_requests(
            limit=self.limit,
            rank=0,
            world_size=1,
            apply_chat_template=leaf.rule.chat_template,
            fewshot_as_multiturn=leaf.rule.chat_template,
            chat_template=self.encoder.apply_chat_template if leaf.rule.chat_template else None,
            tokenizer_name=str(self.run.recipe.model.path),
        )

    def _build(self, leaf: Leaf) -> None:
        """Encode the prompts of a leaf and keep only their sizes and counts, which the checks need.

        The prompts are built again when they are answered.
        """
        from pod.eval.lm.batches import spans_of

        with lm_index.quiet():
            self._prompts(leaf)
        encoded = self.encoder.requests(leaf.task.instances, leaf.rule)
        for request, item in zip(leaf.task.instances, encoded, strict=True):
            if item.skipped is None:
                lengths = [leaf.lengths.get(request.doc_id, 0), *(span.length for span in spans_of([item]))]
                leaf.lengths[request.doc_id] = max(lengths)
                read = max(len(context) + len(scored) for context, scored in item.blocks())
                leaf.longest = max(leaf.longest, read + item.new_tokens - 1)  # the last token is never fed
        answered = [item for item in encoded if item.skipped is None]
        leaf.spans = spans_of(answered)
        if leaf.task.OUTPUT_TYPE != "loglikelihood_rolling":
            unseen = any(item.num_asked for item in answered)
            leaf.question = self.args.asked_when() if unseen else "seen when the text is compressed"
        leaf.tokens = token_counts(answered, self.args.batch_size)
        leaf.task._instances = None  # prompts may have 100,000 tokens: keep those of one leaf at a time

    def spans(self) -> list[CacheSpan]:
        return sorted({span for leaf in self.leaves.values() for span in leaf.spans})

    def longest(self) -> int:
        return max((leaf.longest for leaf in self.leaves.values()), default=0)

    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        counts = [leaf.tokens[method.one_shot] for leaf in self.leaves.values()]
        return sum(prompt for prompt, _ in counts), sum(steps for _, steps in counts)

    def answer(self, runner: MethodRunner, answer_cache: AnswerCache) -> dict[str, Answered]:
        """By leaf, what lm-eval logs about its samples when our model class answers the requests."""
        from pod.eval.lm.model import PodLM

        lm = PodLM(runner, self.encoder, self.args.batch_size, answer_cache)
        return {name: self._answer_leaf(lm, leaf) for name, leaf in self.leaves.items()}

    def score(self, runner: MethodRunner, answers: dict[str, Answered]) -> dict[str, Any]:
        payloads = {
            name: self._score_leaf(leaf, answers[name], runner.budgets) for name, leaf in self.leaves.items()
        }
        if not self.loaded.is_group:
            return next(iter(payloads.values()))
        return group_payload(self.loaded, payloads)

    def _answer_leaf(self, lm: Any, leaf: Leaf) -> Answered:
        from lm_eval.evaluator import evaluate

        use = task_data.use(self.args.data_dir, self.run.tokenizer, self.args.unsafe_code)
        with lm_index.quiet(), lm.rules(leaf.rule), use:
            leaf.task.set_fewshot_seed(seed=_FEWSHOT_SEED)
            results = evaluate(
                lm=lm,
                task_dict={"tasks": {leaf.name: leaf.task}},
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=leaf.rule.chat_template,
                fewshot_as_multiturn=leaf.rule.chat_template,
                confirm_run_unsafe_code=self.args.unsafe_code,
            )
            records = dict(lm.records)
        leaf.task._instances = None
        assert results is not None and "samples" in results, "every rank is rank 0 of 1 to lm-eval"
        return Answered([_without_prompts(row) for row in results["samples"][leaf.name]], records)

    def _score_leaf(self, leaf: Leaf, answered: Answered, budgets: ByteBudgets) -> dict[str, Any]:
        return leaf_payload(
            leaf,
            answered.logged,
            answered.records,
            budgets=budgets,
            prefix=f"{leaf.name}/" if self.loaded.is_group else "",
            settings={
                "limit": self.limit,
                "too_long": self.args.too_long,
                **self.args.template_settings(),
            },
        )


def _without_prompts(logged: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as lm-eval logs it, without the row of its data set and without the prompts of its requests.

    A row and a prompt may have 100,000 tokens each, and a group keeps the samples of all its tasks until they
    are scored. The row's `cluster` stays, and so do the choices behind a prompt.
    """
    row = logged["doc"]
    requests = logged["arguments"]
    shared = {"cluster": row["cluster"]} if isinstance(row, Mapping) and "cluster" in row else {}
    return {**logged, "doc": shared, "arguments": [("", *request[1:]) for request in requests]}
