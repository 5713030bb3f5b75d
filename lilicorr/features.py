"""The target's features of training rows: computed each time they are asked for, or once for all workers and runs.

Place in the flow: a `Trainer` asks its `FeatureSource` for the captured layers and final states of a micro-batch.
On a small corpus that is seen often the target's pass costs more than the drafter's step, so a `FeatureFile`
keeps what was computed. Several processes of one machine read and write it without a lock: what a row holds is
always the same, and a row counts only if its checksum is right, so a write that a kill cut short costs that row.
"""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lilicorr.blocks import TrainBatch
from lilicorr.corpus import TrainingSet
from lilicorr.target import Target

CHECKSUM_BYTES = 4


class FeatureFile:
    """Rows of bytes of known sizes in one sparse file, each behind its checksum."""

    def __init__(self, path: Path, sizes: np.ndarray) -> None:
        """Open `path`, made if it is not there; raises ValueError if the disk could not hold all rows."""
        self.path, self.sizes = path, sizes
        self.starts = np.concatenate([[0], np.cumsum(sizes + CHECKSUM_BYTES)])
        path.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        missing = int(self.starts[-1]) - os.fstat(self.fd).st_blocks * 512
        free = shutil.disk_usage(path.parent).free
        if missing > free:
            raise ValueError(
                f"train.cache_features needs {missing / 2**30:.1f} GiB more in {path.parent}, {free / 2**30:.1f} GiB "
                "are free; set it to false"
            )

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def read(self, row: int) -> bytes | None:
        """The row's bytes, None if it was never written whole."""
        record = os.pread(self.fd, CHECKSUM_BYTES + int(self.sizes[row]), int(self.starts[row]))
        checksum, data = record[:CHECKSUM_BYTES], record[CHECKSUM_BYTES:]
        return data if len(data) == self.sizes[row] and checksum == _checksum(data) else None

    def write(self, row: int, data: bytes) -> None:
        """Keep the row."""
        assert len(data) == self.sizes[row], f"row {row} has {self.sizes[row]} bytes, got {len(data)}"
        record = memoryview(_checksum(data) + data)
        done = 0
        while done < len(record):
            done += os.pwrite(self.fd, record[done:], int(self.starts[row]) + done)


def _checksum(data: bytes) -> bytes:
    """CRC-32, inverted: a hole in the file, all zeros, must not pass for a row."""
    return (zlib.crc32(data) ^ 0xFFFFFFFF).to_bytes(CHECKSUM_BYTES, "little")


class FeatureSource:
    """Features and final states of the rows of a training set, with `path` kept in a `FeatureFile` there.

    The file belongs to one target in one dtype and one training set: the caller's path says which.
    """

    def __init__(self, target: Target, training_set: TrainingSet, path: Path | None = None) -> None:
        self.target = target
        self.width = (len(target.layer_ids) + 1) * target.config.hidden_size
        self.dtype = target.embed.dtype
        sizes = training_set.lengths.astype(np.int64) * self.width * self.dtype.itemsize
        self.file = None if path is None else FeatureFile(path, sizes)

    def __call__(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """features [R, T, C * H] and final hidden [R, T, H]; what stands at padding is never read."""
        if self.file is None:
            output = self.target.forward(batch.input_ids)
            return output.features, output.hidden
        rows = [self._row(self.file, batch, index) for index in range(len(batch.lengths))]
        states = pad_sequence(rows, batch_first=True).to(batch.input_ids.device)
        hidden_size = self.target.config.hidden_size
        return states.split([self.width - hidden_size, hidden_size], dim=-1)

    def _row(self, file: FeatureFile, batch: TrainBatch, index: int) -> Tensor:
        """Features and final states [T, (C + 1) * H] of one row without padding, on the CPU."""
        sample_id, length = int(batch.sample_ids[index]), int(batch.lengths[index])
        data = file.read(sample_id)
        if data is not None:
            return torch.frombuffer(bytearray(data), dtype=self.dtype).view(length, self.width)
        output = self.target.forward(batch.input_ids[index : index + 1, :length])
        states = torch.cat([output.features[0], output.hidden[0]], dim=-1).cpu().contiguous()
        file.write(sample_id, states.view(torch.uint8).numpy().tobytes())
        return states
