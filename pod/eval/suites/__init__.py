"""What is asked: a folder per suite with its tasks, prompts and scorers. `README.md` lists them; `data` reads their files."""
