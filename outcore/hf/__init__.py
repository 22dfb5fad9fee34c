"""Models of Hugging Face's transformers, streamed in place: any trainer that takes the model trains it.

    model = outcore.hf.stream(AutoModelForCausalLM.from_pretrained(name), vram_gib=6.5)

The boundary is the decoder's list of layers (and a vision tower's): what lies between the layers and around them stays
transformers' own, and so do losses, heads and trainers."""

from outcore.hf.adamw import StreamedAdamW, optimizer
from outcore.hf.by_name import OutcoreConfig, OutcoreQuantizer
from outcore.hf.layer import room_bytes, staying
from outcore.hf.seen import TowerOutputs
from outcore.hf.stream import stream
from outcore.hf.vision import encoder_of, load_image_text, vision_parameters
