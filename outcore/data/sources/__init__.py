"""Sources of rows: files, folders, saved data sets, the hub, the built-in text."""

from outcore.data.sources.embedded import EmbeddedSource
from outcore.data.sources.paths import is_windows_spelling, looks_like_hub_id, missing_file_error, translate
from outcore.data.sources.records import BadRow, BadRows, Record, RowError, Source, Where, half_a_pair, is_sound
from outcore.data.sources.source import check_hub_settings, open_source
