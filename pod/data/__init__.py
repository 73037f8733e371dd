"""What the model reads: documents → tokens → equal tokens per length interval → packed rows → loader."""

from pod.data.loader import PackedDataset, RowCursor
from pod.data.shards import write_packed_rows

__all__ = ["PackedDataset", "RowCursor", "write_packed_rows"]
