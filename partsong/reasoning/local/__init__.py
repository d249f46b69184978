"""Runs a transformers model in this process as an engine. Importing this package loads torch and transformers."""

from partsong.reasoning.local.engine import LocalEngine
from partsong.reasoning.local.speculation.draft_server import serve_drafts
from partsong.reasoning.local.speculation.saguaro import Saguaro

__all__ = ["LocalEngine", "Saguaro", "serve_drafts"]
