"""The questions: one package each."""
