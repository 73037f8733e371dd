"""Tasks that read texts: their own sources, or `eval.text`, or else text that training never sees."""

from collections.abc import Callable, Iterable
from typing import Any

from pod.data import held_out_documents, long_sequences, source_documents
from pod.eval.answer.answer_cache import AnswerCache, JsonObject, in_batches, key_of
from pod.eval.suites.task_base import AnsweredTask, prompt_hash


class TextTask(AnsweredTask):
    """A task over texts of equal length, each answered by itself.

    A task's options may have the fields `text`, `length` (tokens) and `sequences`. Without them,
    `eval.text`, `eval.text_length` and `eval.text_sequences` count.

    Attributes:
        text: the tokens of the texts [N, n]. Each starts with a document where documents are long enough.

    Raises:
        ValueError: when there is too little text; the message says how much there is.
    """

    def __init__(self, run: Any, options: Any):
        import torch

        super().__init__(run, options)
        recipe, own_text = run.recipe, getattr(options, "text", None)
        text = own_text or self.args.text
        if own_text:
            where = f"eval.task_options.{self.name}.text"
        elif text is not None:
            where = "eval.text"
        else:
            where = "held out of training"
        count = getattr(options, "sequences", self.args.text_sequences)
        length = getattr(options, "length", self.args.text_length)
        try:
            if text is None:
                documents = held_out_documents(recipe.data_dir, run.tokenizer)
            else:
                documents = source_documents(text, run.tokenizer)
            found = long_sequences(documents, count, length, recipe.seed)
        except ValueError as error:
            raise ValueError(f"text for {self.name} ({where}): {error}") from None
        self.text = torch.from_numpy(found)

    def on_device(self, numbers: list[int]) -> Any:
        """Some of the texts [B, n] on the models' device."""
        return self.text[numbers].to(self.run.models.device)

    def records(
        self,
        answer_cache: AnswerCache,
        asked: list[Any],
        compute: Callable[[Any], list[JsonObject]],
        end: int | None = None,
    ) -> list[JsonObject]:
        """A record per text. Only those that are not in `answer_cache` are computed.

        Args:
            asked: everything that decides a record besides the text's tokens before `end`.
            compute: returns the records of texts [B, n].
            end: number of tokens that are read of each text; None = all.
        """
        return answer_cache.answers(
            list(range(len(self.text))),
            key=lambda row: key_of(*asked, self.text[row][:end].tolist()),
            batches=lambda left: in_batches(left, self.args.batch_size),
            compute=lambda rows: compute(self.on_device(rows)),
        )

    def samples(self, rows: Iterable[JsonObject], end: int | None = None) -> list[JsonObject]:
        """Samples of a payload: each of `rows`, with its id and the number and hash of its text's tokens.

        Args:
            rows: one for each text.
            end: number of tokens that were read of each text; None = all.
        """
        texts = zip(self.text[:, :end].tolist(), rows, strict=True)
        return [
            {"id": str(number), "prompt_tokens": len(ids), "prompt_hash": prompt_hash(ids), **more}
            for number, (ids, more) in enumerate(texts)
        ]
