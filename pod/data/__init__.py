"""What the model reads: documents → tokens → equal tokens per length interval → packed rows → loader."""

from pod.data.args import DataArgs
from pod.data.held_out import long_sequences
from pod.data.loader import PackedDataset, RowCursor
from pod.data.prepare import prepare
from pod.data.shards import write_packed_rows
from pod.data.sources import Document, load_documents
from pod.data.tokenizers import load_tokenizer, tokenizer_sha256

__all__ = [
    "DataArgs",
    "Document",
    "PackedDataset",
    "RowCursor",
    "load_documents",
    "load_tokenizer",
    "long_sequences",
    "prepare",
    "tokenizer_sha256",
    "write_packed_rows",
]
