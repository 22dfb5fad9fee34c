"""The probe's configuration file: read, refused, and changed with the user's keys kept."""

import json
import os
from pathlib import Path

import pytest

from outcore.common.quantities import GIB
from outcore.probe.report.config_file import ConfigFileError, apply_changes, read_config
from tests.refused import failing, refused


def test_missing_configuration_means_defaults_and_says_so(tmp_path: Path) -> None:
    config = read_config(tmp_path / "none.json")
    assert config.staging.staging_bytes == 8 * GIB and not config.exists
    assert "does not exist: using the defaults" in config.note


def test_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"outcore": {"staging_bytes": 4096, "write_combined": "off", "nvme_path": "/a"}}')
    config = read_config(path)
    assert (config.staging.staging_bytes, config.staging.write_combined) == (4096, "off")
    assert config.nvme_path == "/a" and config.exists
    path.write_text('{"zero_optimization": {"offload_optimizer": {"nvme_path": "/b"}}}')
    assert read_config(path).nvme_path == "/b"


@pytest.mark.parametrize(("text", "words"), [
    ('{"a": 1,}', "not valid JSON"), ("[]", "must hold a JSON object"),
    ('{"outcore": 3}', '"outcore" must be an object'),
    ('{"outcore": {"staging_bytes": "8GB"}}', "must be a positive whole number, got '8GB'"),
    ('{"outcore": {"staging_bytes": true}}', "must be a positive whole number"),
    ('{"outcore": {"write_combined": "maybe"}}', "one of auto, on, off"),
])  # fmt: skip
def test_bad_configurations_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    refused(ConfigFileError, words, lambda: read_config(path))


def test_apply_keeps_the_users_keys_their_order_and_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    user = {"zz": "ü", "aio": {"block_size": 1, "thread_count": 3}, "bf16": {"enabled": True}}
    old = json.dumps(user, indent=4, ensure_ascii=False)
    path.write_text(old, encoding="utf-8")
    path.chmod(0o640)
    changes = {"aio": {"block_size": 8, "use_gds": False}, "outcore": {"storage": {"threads": 4}}}
    said = apply_changes(path, changes)
    assert said == ["aio.block_size = 8 (was 1)", "aio.use_gds = false (new)", 'outcore.storage = {"threads": 4} (new)']
    new = json.loads(path.read_text(encoding="utf-8"))
    assert list(new) == ["zz", "aio", "bf16", "outcore"]
    assert new["aio"] == {"block_size": 8, "thread_count": 3, "use_gds": False}
    assert '\n    "zz": "ü"' in path.read_text(encoding="utf-8")
    assert (tmp_path / "c.json.bak").read_text(encoding="utf-8") == old
    assert path.stat().st_mode & 0o777 == 0o640
    assert apply_changes(path, changes) == []
    assert apply_changes(path, {"outcore": {"storage": {"engine": "posix"}}}) == [
        'outcore.storage.engine = "posix" (new)'
    ]
    assert json.loads(path.read_text())["outcore"]["storage"] == {"threads": 4, "engine": "posix"}
    assert sorted(os.listdir(tmp_path)) == ["c.json", "c.json.bak"]


def test_apply_follows_a_link_and_creates_only_when_asked(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    refused(ConfigFileError, "--create", lambda: apply_changes(real, {"aio": {"a": 1}}))
    apply_changes(real, {"aio": {"a": 1}}, create=True)
    assert json.loads(real.read_text()) == {"aio": {"a": 1}}
    link.symlink_to(real)
    apply_changes(link, {"aio": {"a": 2}})
    assert link.is_symlink() and json.loads(real.read_text()) == {"aio": {"a": 2}}
    real.write_text('{"aio": 5}')
    refused(ConfigFileError, '"aio" must be an object', lambda: apply_changes(real, {"aio": {"a": 1}}))


def test_a_change_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    path.write_text('{\t"aio": {}}')
    monkeypatch.setattr(os, "replace", failing(OSError(28, "No space left on device")))
    with pytest.raises(ConfigFileError, match="No space left on device; nothing was changed"):
        apply_changes(path, {"aio": {"a": 1}})
    assert path.read_text() == '{\t"aio": {}}'
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
