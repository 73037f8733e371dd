"""The message of an error as one line."""


def one_line(error: BaseException, *, with_class: bool = False, limit: int | None = None) -> str:
    """The message of an error without line breaks; without a message, the error's class.

    Args:
        with_class: put the class before the message of an error that was not expected, which is any other
            than a ValueError or an OSError.
        limit: characters after which the line is cut; None = no limit.
    """
    text = " ".join(str(error).split())
    name = type(error).__name__
    if not text:
        text = name
    elif with_class and not isinstance(error, (ValueError, OSError)):
        text = f"{name}: {text}"
    return text[:limit]
