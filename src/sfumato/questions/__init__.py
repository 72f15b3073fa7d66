"""What can be asked: one package per question."""
