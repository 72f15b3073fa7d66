"""`python -m sfumato` is `sfumato`."""

from sfumato.cli.main import main

main(prog_name="sfumato")
