"""What the attempts at a shard have left: who made them, and which conversations were open when their engine died.

Place in the flow: an actor of `pipelines/regenerate.py` begins an attempt before anything can go wrong and notes in
its file what it gives to the engine. From the files of the attempts that ended before, the next one learns how to make
the shard. They are one driver's: files `<number>-<worker>` of lines `begun CID`, `alone CID`, `done CID` and `error
TEXT`. A process that is killed writes no error; its file ends with what was open.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attempt:
    """One attempt at a shard, and what those before it have left whose process has ended."""

    path: Path
    number: int
    deaths: int  # attempts that ended; none of them made the shard
    error: str  # the last one that could be noted
    suspects: frozenset[str] | None  # content ids that were open when an engine died; None: nothing was noted
    guilty: frozenset[str]  # those that were alone in it

    def note(self, what: str, text: str) -> None:
        """Write `begun`, `alone` or `done` with a content id, or `error` with its text."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{what} {' '.join(text.split())}\n")


def begin(folder: Path, worker: int, others: frozenset[int]) -> Attempt:
    """A new attempt of `worker` at the shard of `folder`, whose workers of now are `others`.

    The newest attempt of each of these is still going on and counts for nothing.
    """
    folder.mkdir(exist_ok=True)
    files = sorted((*map(int, path.name.split("-")), path) for path in folder.iterdir())  # number, worker, file
    running = {of: path for _, of, path in files if of in others}
    ended = [path for _, of, path in files if running.get(of) != path]
    number = files[-1][0] + 1 if files else 1
    path = folder / f"{number}-{worker}"
    path.touch()
    error, noted, suspects, guilty = "", False, set(), set()
    for file in ended:
        left: dict[str, str] = {}  # how each open conversation was begun
        for what, _, text in (line.partition(" ") for line in file.read_text(encoding="utf-8").splitlines()):
            if what == "error":
                error = text
            elif what == "done":
                left.pop(text, None)
            else:
                left[text], noted = what, True
        suspects |= left.keys()
        guilty |= {cid for cid, how in left.items() if how == "alone"}
    return Attempt(path, number, len(ended), error, frozenset(suspects) if noted else None, frozenset(guilty))
