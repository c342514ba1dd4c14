"""The command `accuracy`: answers of every arm, by lm-eval."""
