"""The heads by name; a method is one file here and one line in `HEADS`."""

from lilicorr.heads.argmax import ArgmaxHead
from lilicorr.heads.base import Head
from lilicorr.heads.lilicorr import LiLiCorrHead

HEADS: dict[str, type[Head]] = {"argmax": ArgmaxHead, "lilicorr": LiLiCorrHead}
