"""Run a case in a child process and always come back."""
