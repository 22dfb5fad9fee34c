"""Keys and values of running sequences: pages, their users, shared beginnings."""

from outcore.infer.cache.drive import DriveMemory, open_memory
from outcore.infer.cache.kept import KeptPrefixes, KeptStates, PrefixesDamaged
from outcore.infer.cache.kv_cache import CacheSettings, GroupPlan, KvCache, PassTables, SequencePages, Span
from outcore.infer.cache.memory import KvMemory
from outcore.infer.cache.pages import OutOfPages, PageLedger
from outcore.infer.cache.prefix import ROOT, root_of
from outcore.infer.cache.states import SequenceStates
from outcore.infer.cache.store import KvShape, KvStore, rounded

__all__ = [
    "ROOT",
    "CacheSettings",
    "DriveMemory",
    "GroupPlan",
    "KeptPrefixes",
    "KeptStates",
    "KvCache",
    "KvMemory",
    "KvShape",
    "KvStore",
    "OutOfPages",
    "PageLedger",
    "PassTables",
    "PrefixesDamaged",
    "SequencePages",
    "SequenceStates",
    "Span",
    "open_memory",
    "root_of",
    "rounded",
]
