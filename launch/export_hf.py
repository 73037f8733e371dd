"""`pod export` from a checkout."""

from pod.commands.export import start

if __name__ == "__main__":
    start()
