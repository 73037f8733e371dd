"""L-Eval's prompts.

The wording is that of get_sys_prompt in Baselines/LEval_config.py and of Baselines/llama2-chat-test.py.

Source: github.com/OpenLMLab/LEval, commit cd34b05. The spelling is the official one.
"""

from pathlib import Path

from pod.files import read_json

SYSTEM: dict[str, str] = read_json(Path(__file__).with_name("prompts.json"))
"""System prompt by task. The open-ended tasks share the prompt of `open`."""

PLAIN = ("gsm100", "codeU", "topic_retrieval_longchat")
"""Tasks whose prompt is the document and the question, with nothing around them."""

_IN_DOCUMENT = "based on the world described in the document."
_IN_WORLD = "based on the real-world knowledge and facts up until your last training"


def system_prompt(task: str) -> str:
    """The text before the document: the system message of a chat, or the start of a plain prompt."""
    return SYSTEM.get(task, SYSTEM["open"])


def user_prompt(task: str, document: str, instruction: str, words: int) -> str:
    """The user's message.

    Args:
        words: number of words of the reference. The prompts of open-ended tasks name it
            (length-instruction-enhanced evaluation).
    """
    if task in PLAIN:
        return f"{document}\n\n{instruction}"
    if task in SYSTEM:
        return (
            f"Document is as follows. {document} \nQuestion: {instruction}.  "
            "Please directly give the answer without any additional output or explanation "
        )
    return (
        f"Document is as follows. {document} Instruction: {instruction} \n"
        f"Answer this question with {words} words."
    )


def answer_prefix(task: str) -> str:
    """The beginning of the answer, which the model continues; empty for some tasks."""
    return "\nAnswer:" if task in SYSTEM and task not in PLAIN else ""


def fact_prompt(instruction: str) -> str:
    """The second question of `sci_fi`: the same statement about the real world, without the document."""
    question = instruction.replace(_IN_DOCUMENT, _IN_WORLD)
    return f"{question}Please directly answer without any additional output or explanation. "
