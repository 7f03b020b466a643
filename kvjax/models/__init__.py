"""Families that kvjax serves, by architecture name."""

from kvjax.models import gemma3, llama
from kvjax.models.family import Family

FAMILIES: dict[str, Family] = {f.architecture: f for f in (llama.FAMILY, gemma3.FAMILY)}
