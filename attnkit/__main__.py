"""Run the command line: `python -m attnkit`."""

from attnkit.cli import main

raise SystemExit(main())
