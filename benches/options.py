"""Types of command-line options that several benches have. Nothing heavy is imported here."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """The type of an option that counts something: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
