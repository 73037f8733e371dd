"""`pod explore` from a checkout."""

from pod.commands.explore import start

if __name__ == "__main__":
    start()
