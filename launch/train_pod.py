"""`pod train` from a checkout."""

from pod.commands import start

if __name__ == "__main__":
    start("train")
