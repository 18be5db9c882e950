"""`python -m tunegen`."""

from .cli import main

main()
