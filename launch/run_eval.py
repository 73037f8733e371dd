"""Start `pod eval` from a checkout of the repository."""

from pod.commands import start

if __name__ == "__main__":
    start("eval")
