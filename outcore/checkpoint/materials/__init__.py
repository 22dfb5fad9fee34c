"""What a run is made of beside its settings, known again by its content."""

from outcore.checkpoint.materials.material import SOURCE, Material, base_material, check_material, kept_material
