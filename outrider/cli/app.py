"""All subcommands at once, for who runs them in a process of its own."""

from outrider.cli.main import application

app = application()
