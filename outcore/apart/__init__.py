"""Work on a client's text that may be slow or fatal, in processes of its own: templates, tokenizers, forms of answers.

`Bench` does that work; `Apart` calls it elsewhere, with limits of time and memory; `sandbox` runs code that nobody has
read. Without torch, so that a process begins in a moment and takes little RAM."""

from outcore.apart.bench import JSON_OPTIONS, TEXT_ONLY, Ask, Bench, first_line, for_forms, too_long_code
from outcore.apart.process import Apart, begin
