"""`pod demo` from a checkout."""

from pod.commands.demo import start

if __name__ == "__main__":
    start()
