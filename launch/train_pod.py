"""`pod train` from a checkout."""

from pod.commands.train import start

if __name__ == "__main__":
    start()
