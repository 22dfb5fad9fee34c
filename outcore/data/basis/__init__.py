"""Base of every part of the data room: settings, and errors in words."""

from outcore.data.basis.settings import (
    DEFAULT_TEXT_EXTENSIONS,
    EMBEDDED,
    FORMATS,
    LONG_ROWS,
    CacheError,
    DataError,
    DataSettings,
    TemplateError,
    common_beginning,
    nearest,
    shorten,
)
