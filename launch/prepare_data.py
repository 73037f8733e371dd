"""`pod data` from a checkout."""

from pod.commands.data import start

if __name__ == "__main__":
    start()
