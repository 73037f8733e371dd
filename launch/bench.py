"""Start `pod bench` from a checkout of the repository."""

from pod.commands import start

if __name__ == "__main__":
    start("bench")
