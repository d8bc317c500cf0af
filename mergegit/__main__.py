"""``python -m mergegit``."""

from mergegit.cli import main

main()
