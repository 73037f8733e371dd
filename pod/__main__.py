"""`python -m pod COMMAND …`: what the command `pod` does, for the interpreter that is named."""

from pod.commands import main

if __name__ == "__main__":
    main()
