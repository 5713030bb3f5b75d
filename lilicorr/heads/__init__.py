"""The heads by name; a method is one file here and one line in `HEADS`."""

from lilicorr.heads.argmax import ArgmaxHead
from lilicorr.heads.base import Head
from lilicorr.heads.domino import DominoHead
from lilicorr.heads.dspark import DSparkHead
from lilicorr.heads.lilicorr import LiLiCorrHead

HEADS: dict[str, type[Head]] = {
    "argmax": ArgmaxHead,
    "domino": DominoHead,
    "dspark": DSparkHead,
    "lilicorr": LiLiCorrHead,
}
