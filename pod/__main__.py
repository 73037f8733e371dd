"""`python -m pod COMMAND …` runs the command `pod` with that Python interpreter."""

from pod.commands import main

if __name__ == "__main__":
    main()
