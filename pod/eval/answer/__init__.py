"""What a method says to a prompt: the store of answers, and everything that runs a model to get one."""
