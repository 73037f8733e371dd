"""A model as others get it: a Hugging Face folder with code, card and licences, or an adapter."""

from pod.export.card import Origin
from pod.export.folder import export, export_adapter

__all__ = ["Origin", "export", "export_adapter"]
