"""A run's data before the run: its settings, and rows with the tokens that bear loss."""

from outcore.data.look.rows import Look, look_at
from outcore.data.look.settings import data_settings_of
