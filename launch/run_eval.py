"""`pod eval` from a checkout."""

from pod.commands.evaluate import start

if __name__ == "__main__":
    start()
