"""The two ways in which a method that ranks tokens takes a prompt: whole (``exact``) or chunk by chunk (``streaming``)."""

from pod.modeling.methods.base import Request
from pod.modeling.methods.rows import FixedChunks

PREFILL_PARAMETERS = {
    "prefill": (
        "exact",
        "exact: compress when the prompt ends; streaming: after every chunk_size tokens of it",
    ),
    "chunk_size": (512, "tokens of a prompt after which streaming prefill compresses (tokens)"),
}


def chunks_of(request: Request) -> FixedChunks | None:
    """The chunks that a request asks for; None = exact prefill."""
    prefill, size = request.params["prefill"], request.params["chunk_size"]
    if prefill not in ("exact", "streaming"):
        raise ValueError(f"{request.spec}: prefill = {prefill!r}; choose exact or streaming")
    if size < 1:
        raise ValueError(f"{request.spec}: chunk_size = {size} must be at least 1 token")
    return FixedChunks(size) if prefill == "streaming" else None
