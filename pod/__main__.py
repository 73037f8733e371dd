"""`python -m pod COMMAND …` does what the command `pod` does, with the interpreter that is named."""

from pod.commands import main

if __name__ == "__main__":
    main()
