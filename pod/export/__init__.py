"""Export a trained model for others: a folder with weights, card and licences, or only its adapters.

The folder is made for transformers or for serving engines.
"""

from pod.export.card import Origin
from pod.export.folder import export, export_adapter
from pod.export.served import check_servable
from pod.export.served_card import serve_command

__all__ = ["Origin", "check_servable", "export", "export_adapter", "serve_command"]
