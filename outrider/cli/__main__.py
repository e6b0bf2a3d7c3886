"""`python -m outrider.cli` is `outrider`."""

from outrider.cli.main import main

main()
