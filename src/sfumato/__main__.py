"""`python -m sfumato` is `sfumato`."""

from sfumato.cli import main

main(prog_name="sfumato")
