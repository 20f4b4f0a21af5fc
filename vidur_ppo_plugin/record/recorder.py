"""One row of metrics, to every place that wants it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from vidur_ppo_plugin.record.csv_writer import MetricsCsv
from vidur_ppo_plugin.record.tensorboard_sink import TensorboardSink
from vidur_ppo_plugin.record.wandb_sink import WandbSink


class Sink(Protocol):
    """A place for rows."""

    def write(self, row: Mapping[str, float | None]) -> None:
        """Write one row."""

    def close(self) -> None:
        """Finish; may be called twice."""


class Recorder:
    """Writes rows to the CSV file and, where given, to a W&B run and to TensorBoard.

    Close it after Vidur has written its output (see `WandbSink`). W&B and TensorBoard are imported only if used.
    """

    def __init__(
        self,
        names: Sequence[str],
        csv_path: Path,
        wandb_run: Any | None = None,
        tensorboard_dir: Path | None = None,
        others: Sequence[Sink] = (),
    ) -> None:
        """`others`: sinks that are told of every row too, and closed with the recorder."""
        self._sinks: list[Sink] = [MetricsCsv(csv_path, names)]  # first: it checks the names of a row
        try:
            if tensorboard_dir is not None:
                self._sinks.append(TensorboardSink(tensorboard_dir))
            if wandb_run is not None:
                self._sinks.append(WandbSink(wandb_run))
            self._sinks += others
        except BaseException:
            self.close()
            raise

    def record(self, row: Mapping[str, float | None]) -> None:
        """Write one row everywhere; a name that is not among `names` is an error."""
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """Close every sink, also if one of them fails; a second call does nothing."""
        failures = []
        while self._sinks:
            try:
                self._sinks.pop().close()
            except Exception as error:  # the others must still be closed
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
