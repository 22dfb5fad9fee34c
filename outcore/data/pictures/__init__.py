"""Pictures of rows: read, bounded, put where the text has room for them, and encoded by a model's own processor."""

from outcore.data.pictures.conversation import PictureTalk, conversation_of, in_order, marked
from outcore.data.pictures.encode import PictureEncoder, load_processor
from outcore.data.pictures.picture import PictureError, PictureLimits, picture_of
from outcore.data.pictures.rows import PictureRow, picture_rows
