"""What runs inside a task: the same code for every engine."""
