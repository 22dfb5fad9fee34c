"""GGUF files: written from a folder that `from_pretrained` loads, and read as a packed checkpoint."""

from outcore.formats.gguf_files.read import GgufRefused, open_gguf
from outcore.formats.gguf_files.write import add_sizes, default_file, write_gguf
