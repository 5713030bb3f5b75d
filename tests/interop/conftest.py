"""The small models of the engine's tests are what other projects' code is tried on, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))
