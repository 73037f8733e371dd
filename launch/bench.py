"""`pod bench` from a checkout."""

from pod.commands.bench import start

if __name__ == "__main__":
    start()
