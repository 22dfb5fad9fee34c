"""Materials of a run beside its settings, known again by their content."""

from outcore.checkpoint.materials.material import SOURCE, Material, base_material, check_material, kept_material
