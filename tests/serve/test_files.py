"""Forms with files, as clients send them."""

import pytest

pytest.importorskip("fastapi")
from outcore.serve.errors import ApiError
from outcore.serve.jobs.files import parts_of

FORM = "multipart/form-data; boundary=xx"
TEXT = b'{"prompt": "--xx"}\r\n a line with --xx in it and --xx--\r\n\r\n'
"""Its boundary is within lines, which does not end a part."""


def form(*, end: bytes = b"\r\n--xx--\r\n", name: str = 'filename="in a.jsonl"') -> bytes:
    head = f'--xx\r\ncontent-disposition: form-data; name="file"; {name}\r\nContent-Type: text/plain\r\n\r\n'
    return b'--xx\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' + head.encode() + TEXT + end


def test_a_form_is_read_whatever_its_file_holds():
    assert parts_of(FORM, form()) == {"purpose": ("", b"batch"), "file": ("in a.jsonl", TEXT)}
    assert parts_of('multipart/form-data; boundary="xx"', form(name='filename="ä.jsonl"'))["file"] == ("ä.jsonl", TEXT)
    large = b"z" * (3 << 20)
    assert parts_of(FORM, form().replace(TEXT, large))["file"] == ("in a.jsonl", large)


def test_a_file_that_ends_early_is_not_taken():
    assert list(parts_of(FORM, form(end=b""))) == ["purpose"]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [("application/json", b"{}"), ("multipart/form-data", form()), (FORM, b"no form"), ("", b"")],
)
def test_what_is_no_form_is_refused(content_type, body):
    with pytest.raises(ApiError, match=r"multipart/form-data|form cannot be read"):
        parts_of(content_type, body)
