"""What the model reads.

Documents → tokens → equal tokens per length interval → packed rows → loader.
"""

from pod.data.args import DataArgs
from pod.data.read.documents import Document
from pod.data.read.sources import load_documents
from pod.data.rows.held_out import held_out_documents, long_sequences, source_documents
from pod.data.rows.loader import PackedDataset, RowCursor
from pod.data.rows.shards import write_packed_rows
from pod.data.run.prepare import prepare
from pod.data.tokens.tokenizers import tokenizer_sha256
from pod.tokenizer import load_tokenizer

__all__ = [
    "DataArgs",
    "Document",
    "PackedDataset",
    "RowCursor",
    "held_out_documents",
    "load_documents",
    "load_tokenizer",
    "long_sequences",
    "prepare",
    "source_documents",
    "tokenizer_sha256",
    "write_packed_rows",
]
