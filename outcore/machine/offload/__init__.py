"""A folder on a drive that takes what RAM does not hold: is it usable, and how much of it may be filled."""

from outcore.machine.offload.folder import (
    FREE_RESERVE,
    MIN_GB_PER_S,
    SPACE_SAFETY,
    NvmePathError,
    describe_folder,
    resolve_nvme_path,
    resolve_nvme_paths,
    slow_drive_warning,
    temporary_file,
    validate_nvme_path,
    write_and_read_back,
)
