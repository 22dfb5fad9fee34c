"""Examples as tokens on the drive: encoded once, locked while built, checked when opened."""

from outcore.data.cache.arrays import Arrays, ArraysWriter, explained
from outcore.data.cache.checked import CheckedArray, DamagedCache
from outcore.data.cache.encode import DocumentEncoder, carries_loss, token_ids
from outcore.data.cache.lock import build_lock, open_or_build
from outcore.data.cache.targets import HiddenTargets, Target, facts_of, write_targets
from outcore.data.cache.tokens import RowLimit, TokenCache, cache_folder, digest_of, open_token_cache
