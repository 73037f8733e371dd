"""L-Eval's prompts: the wording of get_sys_prompt in Baselines/LEval_config.py and of Baselines/llama2-chat-test.py.

Source: github.com/OpenLMLab/LEval, commit cd34b05. The spelling is theirs.
"""

_GSM = (
    "Given several question answer pairs, you need to follow a similar format to answer the last question. "
    "Make sure the response is end with The answer is _ . "
)
_TOPIC = (
    "Below is a record of our previous conversation on many different topics. You are the ASSISTANT, and I am the USER. "
    "At the beginning of each topic, the USER will say 'I would like to discuss the topic of <TOPIC>'. Memorize each <TOPIC>. "
    "At the end of the record, I will ask you to retrieve the first/second/third topic names. Now the record start. "
)
_COURSERA = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice questions, "
    "there could be a sinlge correct option or multiple correct options. Please only provide the letter corresponding to the "
    "answer (like A or AB) when answering. "
)
_CODE = (
    "Now you are given a code base consisting of a large amount of functions and the corresponding comments. In the end, I will "
    "call some functions defined in the code base. Please carefully read these codes and comments and answer the question."
)
_SCI_FI = (
    'Now you are given a scientific fiction. I will ask you some questions and the answer should be "True" or "False". Notice '
    "that you should answer the question based on the evidence in the document instead of your background knowledge."
)
_EXAM = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice questions, "
    "there is only a sinlge correct option. Please only provide the letter corresponding to the answer (like A or B) when "
    "answering. For other questions, please directly give the concise and accurate answer. "
)
_OPEN = (
    "Now you are given a very long document. Please follow the instruction after this document. These instructions may include "
    "summarizing a document, answering questions based on the document, or writing a required paragraph. "
)
SYSTEM = {
    "gsm100": _GSM,
    "topic_retrieval_longchat": _TOPIC,
    "coursera": _COURSERA,
    "codeU": _CODE,
    "sci_fi": _SCI_FI,
    "quality": _EXAM,
    "tpo": _EXAM,
}
"""system prompt by closed-ended task; the open-ended tasks share one"""

PLAIN = ("gsm100", "codeU", "topic_retrieval_longchat")
"""tasks whose prompt is the document and the question, with nothing around them"""

ANSWER_PREFIX = "\nAnswer:"
_IN_DOCUMENT = "based on the world described in the document."
_IN_WORLD = "based on the real-world knowledge and facts up until your last training"


def system_prompt(task: str) -> str:
    """What stands before the document: the system message of a chat, the start of a plain prompt."""
    return SYSTEM.get(task, _OPEN)


def user_prompt(task: str, document: str, instruction: str, words: int) -> str:
    """The user's message. words: length of the reference, which open-ended tasks are told (length-instruction-enhanced evaluation)."""
    if task in PLAIN:
        return f"{document}\n\n{instruction}"
    if task in SYSTEM:
        return (
            f"Document is as follows. {document} \nQuestion: {instruction}.  "
            "Please directly give the answer without any additional output or explanation "
        )
    return f"Document is as follows. {document} Instruction: {instruction} \nAnswer this question with {words} words."


def answer_prefix(task: str) -> str:
    """How the answer begins."""
    return ANSWER_PREFIX if task in SYSTEM and task not in PLAIN else ""


def fact_prompt(instruction: str) -> str:
    """The second question of `sci_fi`: the same statement about the real world, without the document."""
    question = instruction.replace(_IN_DOCUMENT, _IN_WORLD)
    return f"{question}Please directly answer without any additional output or explanation. "
