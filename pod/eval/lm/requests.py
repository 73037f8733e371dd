"""Turn requests of lm-eval into token ids, and shorten prompts that are too long by the task's own rule.

This needs a tokenizer and no model.

A prompt that fits the model is encoded exactly as `lm_eval.models.huggingface.HFLM` does it (lm-eval 0.4.13,
MIT). HFLM drops the start of a longer prompt, and loses with it the beginning-of-sequence token and, in a
chat template, the system message. Here the task's rule says which part is dropped.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from pod.eval.answer.budget import CacheSpan, length_class
from pod.eval.answer.reading import tokens_from
from pod.eval.lm.index import Rule, own_rule
from pod.eval.lm.lm_prompts import Unanswerable, shorten
from pod.eval.suites.task_base import prompt_hash

TOO_LONG = ("truncate", "skip", "error")
DEFAULT_NEW_TOKENS = 256  # HFLM.max_gen_toks
BLOCK = 256  # tokens of a long text that are scored after one compression


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One request as token ids.

    Attributes:
        key: its id within a run: request type, task, document, index, repeat.
        kind: lm-eval's type: `generate_until`, `loglikelihood` or `loglikelihood_rolling`.
        unit: the same for all choices of one document with one context: one prefill scores them.
        context, continuation: token ids. A generation has no continuation.
        windows: for a text scored whole (`loglikelihood_rolling`): pairs of context and continuation that
            follow one another.
        new_tokens: tokens to generate at most.
        settings: of the generation, normalized by lm-eval.
        num_asked: tokens at the end of the context that are its question. They are read after the text before
            them is compressed. 0 = the whole context is compressed at once.
        dropped: tokens by which the prompt was shortened.
        skipped: why the request is not answered; None if it is.
    """

    key: str
    kind: str
    unit: str
    context: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()
    windows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    new_tokens: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    num_asked: int = 0
    dropped: int = 0
    skipped: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The context, by the name that `pod.eval.answer.reading.Asked` needs."""
        return self.context

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, or of the whole text when that is what is scored."""
        if self.kind == "loglikelihood_rolling":
            return sum(len(continuation) for _, continuation in self.windows)
        return len(self.context)

    @property
    def prompt_hash(self) -> str:
        """Hash of the prompt as the model reads it (token ids)."""
        if self.kind != "loglikelihood_rolling":
            return prompt_hash(self.context)
        # The windows decide what stands before a token: a -1 marks the end of each of their parts.
        tokens: list[int] = []
        for context, continuation in self.windows:
            tokens += [*context, -1]
            tokens += [*continuation, -1]
        return prompt_hash(tokens)

    @property
    def span(self) -> CacheSpan:
        """The size of the cache for a generation."""
        return span_of(len(self.context), 0, self.new_tokens)

    def blocks(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Pairs of context and continuation that a compressed cache scores.

        A text that is scored whole is cut into blocks. Each block is scored after everything before it is
        compressed. Blocks have as many tokens as stand before them, so they double from 1 token up to
        `BLOCK` tokens.
        """
        if self.kind != "loglikelihood_rolling":
            return [(self.context, self.continuation)]
        found = []
        for context, continuation in self.windows:
            whole = context + continuation
            at = len(context)
            while at < len(whole):
                end = min(at + min(at, BLOCK), len(whole))
                found.append((whole[:at], whole[at:end]))
                at = end
        return found


def span_of(context: int, continuation: int, new_tokens: int = 0) -> CacheSpan:
    """The size of the cache for a context and its longest continuation or its new tokens (all in tokens).

    The request alone decides it, so that its budget does not depend on the other requests in its batch. The
    length is rounded up to a length class (`length_class`), the number of scored tokens to a power of two.

    Scoring holds the last context token out of the prompt and never feeds the last scored token. Generation
    never feeds its last token.
    """
    if continuation:  # there are many lengths; they are rounded up, so that few sizes exist
        return CacheSpan(length_class(context + continuation - 1), 1 << (continuation - 1).bit_length())
    # new_tokens is the same for a whole task, so it is not rounded up: that would take bytes from the prompt
    # in methods that keep every new token
    return CacheSpan(length_class(context + new_tokens - 1), new_tokens - 1)


def request_keys(requests: Iterable[Any]) -> list[str]:
    """The ids of lm-eval's instances within a run, in order: type, task, document, index (choice), repeat.

    With `repeats: k`, lm-eval gives the same object k times; the last number counts them.
    """
    seen, keys = Counter(), []
    for request in requests:
        base = f"{request.request_type}/{request.task_name}/{request.doc_id}/{request.idx}"
        keys.append(f"{base}/{seen[base]}")
        seen[base] += 1
    return keys


class RequestEncoder:
    """Turns lm-eval's requests into token ids under a length limit.

    Args:
        tokenizer: of the model.
        max_length: the longest sequence that the model reads (tokens).
        too_long: what happens to prompts that exceed it: `truncate` by the task's rule, `skip`, or `error`.
        question_aware: whether methods see questions when they compress. If not, the question of a generation
            (the end of its prompt, from the text `asked` of its document on) is read after the text before it
            is compressed.
    """

    def __init__(
        self, tokenizer: Any, max_length: int, too_long: str = "truncate", question_aware: bool = False
    ):
        if too_long not in TOO_LONG:
            raise ValueError(f"too_long = {too_long!r}: known are {', '.join(TOO_LONG)}")
        if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 2:
            raise ValueError(f"max_length = {max_length!r} must be a whole number of at least 2 tokens")
        self.tokenizer, self.max_length, self.too_long = tokenizer, max_length, too_long
        self.question_aware = question_aware
        self._user_part: dict[str, tuple[int, int]] = {}  # where the user's message is in a rendered chat

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: BOS, else EOS.

        Raises:
            ValueError: when the tokenizer has neither.
        """
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ValueError(
            "the tokenizer has neither a BOS nor an EOS token: set eos_token in its tokenizer_config.json"
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids, with special tokens as the tokenizer adds them.

        They are not added when the text begins with BOS already.
        """
        if special and text.startswith(self.tokenizer.decode(self.prefix_token_id)):
            special = False
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def requests(self, requests: Sequence[Any], rule: Rule | None = None) -> list[Encoded]:
        """Every request, in order.

        Args:
            rule: of their task. None = for each request the rule in its task's configuration.
        Raises:
            ValueError: for a prompt that is too long, if `too_long` is `error`.
        """
        keys = request_keys(requests)
        return [self.request(request, rule, key) for request, key in zip(requests, keys, strict=True)]

    def request(self, request: Any, rule: Rule | None = None, key: str | None = None) -> Encoded:
        """One request of lm-eval: `loglikelihood`, `loglikelihood_rolling` or `generate_until`."""
        encode = {
            "generate_until": self._generation,
            "loglikelihood_rolling": self._rolling,
            "loglikelihood": self._likelihood,
        }[request.request_type]
        key = key or request_keys([request])[0]
        try:
            return encode(request, rule or own_rule(str(request.task_name)), key)
        except Unanswerable as reason:
            return Encoded(key=key, kind=request.request_type, unit=key, skipped=str(reason))

    def _generation(self, request: Any, rule: Rule, key: str) -> Encoded:
        from lm_eval.models.utils import normalize_gen_kwargs

        text, given = request.args
        settings: dict[str, Any] = dict(normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS))
        new_tokens = int(settings.pop("max_gen_toks"))
        _check_generation(request.task_name, settings, new_tokens, self.max_length)
        ids = self.encode(text)
        text, dropped = self._fit(request, text, len(ids), rule, self.max_length - new_tokens)
        ids = self.encode(text) if dropped else ids
        return Encoded(
            key=key,
            kind="generate_until",
            unit=key,
            context=tuple(ids or [self.prefix_token_id]),
            new_tokens=new_tokens,
            settings=settings,
            num_asked=self._num_asked(request, text),
            dropped=dropped,
        )

    def _num_asked(self, request: Any, text: str) -> int:
        """Number of tokens of the question at the end of a prompt.

        It is 0 where the document names no question, and where methods may see it (`question_aware`).
        """
        question = str((request.doc or {}).get("asked") or "").strip()
        if self.question_aware or not question:
            return 0
        return tokens_from(self.encode, text, text.rfind(question))

    def _likelihood(self, request: Any, rule: Rule, key: str) -> Encoded:
        text, continuation = request.args
        context, ids = self.pair(text, continuation)
        if not ids:
            raise Unanswerable("the continuation is no token")
        room, dropped = self.max_length + 1 - len(ids), 0
        if text:
            text, dropped = self._fit(request, text, len(context), rule, room)
            context, ids = self.pair(text, continuation) if dropped else (context, ids)
        elif room < 1:
            raise self._too_long(request, len(ids), self.max_length)
        return Encoded(
            key=key,
            kind="loglikelihood",
            unit=f"{request.task_name}/{request.doc_id}/{prompt_hash(context)}",
            context=tuple(context),
            continuation=tuple(ids),
            dropped=dropped,
        )

    def _rolling(self, request: Any, rule: Rule, key: str) -> Encoded:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = get_rolling_token_windows(
            token_list=self.encode(request.args[0]),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        pairs = tuple((tuple(c), tuple(t)) for c, t in map(make_disjoint_window, windows))
        return Encoded(key=key, kind="loglikelihood_rolling", unit=key, windows=pairs)

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of its continuation.

        Both are encoded together, and split after as many ids as the context alone has (lm-eval's way).
        """
        if not context:
            ids = self.encode(continuation, special=False)
            if ids[0] == self.prefix_token_id and len(ids) > 1:
                return ids[:1], ids[1:]
            return [self.prefix_token_id], ids
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        ids = self.encode(context) or [self.prefix_token_id]
        whole = self.encode(context + continuation)
        return ids, whole[len(ids) :] if context else whole

    def _fit(self, request: Any, text: str, tokens: int, rule: Rule, room: int) -> tuple[str, int]:
        """A prompt shortened to `room` tokens and to the rule's own limit, and the number of tokens it lost.

        Args:
            tokens: number of tokens of `text`.
        Raises:
            Unanswerable: when it is too long and may not be shortened.
        """
        if rule.max_prompt_tokens is not None:
            room = min(room, rule.max_prompt_tokens)
        if tokens <= room:
            return text, 0
        if self.too_long != "truncate" or rule.truncation == "none" or room < 1:
            raise self._too_long(request, tokens, room)
        shorter = shorten(
            self.tokenizer,
            text,
            rule.truncation,
            room,
            lambda part: len(self.encode(part)),
            span=self._user_part.get(text),
            document=(request.doc or {}).get("document"),
            keep=rule.keep,
        )
        return shorter, tokens - len(self.encode(shorter))

    def _too_long(self, request: Any, tokens: int, room: int) -> Unanswerable:
        if self.too_long == "error":
            raise ValueError(
                f"{request.task_name}, document {request.doc_id}: a prompt of {tokens} tokens exceeds the "
                f"{max(room, 0)} tokens that fit: "
                "set too_long to truncate or skip, or lower the task's length"
            )
        # the text holds no numbers, because equal reasons are counted together
        skip = self.too_long == "skip"
        return Unanswerable("too long for the model" if skip else "too long, and may not be shortened")

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages in the tokenizer's chat template.

        When no generation prompt is added, a last message of the assistant is left open. If the template has
        no system role, the system message is put before the user's first message.

        Raises:
            ValueError: when the tokenizer has no chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template: set chat_template to off, "
                "or take an instruction-tuned model"
            )
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            text = self.tokenizer.apply_chat_template(messages, **options)
        except TemplateError:
            text = self.tokenizer.apply_chat_template(_system_merged(messages), **options)
        longest = max((m["content"].strip() for m in messages if m["role"] == "user"), key=len, default="")
        start = text.find(longest)
        if longest and start >= 0:
            self._user_part[text] = (start, start + len(longest))
        return text


def _check_generation(task: str, settings: dict[str, Any], new_tokens: int, max_length: int) -> None:
    if not 1 <= new_tokens < max_length:
        raise ValueError(
            f"{task} generates {new_tokens} tokens and the model reads {max_length}: "
            f"generate from 1 to {max_length - 1}"
        )
    for name in ("num_beams", "num_return_sequences"):
        if int(settings.get(name) or 1) > 1:
            raise ValueError(
                f"{task} asks for {name} = {settings[name]}: only one sequence per prompt is supported"
            )


def _system_merged(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    others = [dict(message) for message in messages if message["role"] != "system"]
    if system and others and others[0]["role"] == "user":
        others[0]["content"] = f"{system}\n\n{others[0]['content']}"
    return others
