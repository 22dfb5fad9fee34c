"""Tools for every room: files that survive a power cut, errors of the system in words for people."""

from outcore.common.files import (
    finish_publishing,
    fsync_file,
    fsync_folder,
    fsync_tree,
    inside,
    make_folder,
    publish_folder,
    read_object,
    remove_tree,
    replacing,
    stats_below,
    write_atomic,
    write_json,
)
from outcore.common.system_errors import (
    FileError,
    as_file_error,
    describe_errno,
    explain_error,
    file_errors,
    is_explained,
    system_number,
)
