"""`--push_to_hub ORG/NAME`: the finished model to the Hugging Face hub, through huggingface_hub's own client.

The login is looked at before training, so that nobody trains for a day to learn that a token is missing. A failed
upload loses nothing: the model is in `final_model/`, and the message says how to send it."""

from __future__ import annotations

from pathlib import Path

from outcore.config import ConfigError


def check_login(repository: str) -> str:
    """The user's name at the hub. ConfigError without a token, or with one that the hub does not take."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    if huggingface_hub.get_token() is None:
        raise ConfigError(
            f"push_to_hub {repository}: there is no token for the hub on this machine. Log in with `hf auth login` (or "
            "set HF_TOKEN), or leave --push_to_hub out."
        )
    try:
        return str(api.whoami()["name"])
    except Exception as error:  # the client's own kinds: no network, a token that was revoked
        raise ConfigError(
            f"push_to_hub {repository}: the hub cannot be asked who you are ({type(error).__name__}: {error}). Check "
            "the network and `hf auth whoami`, or leave --push_to_hub out."
        ) from error


def push(folder: Path, repository: str, run: str) -> str:
    """Upload an exported model; its address. RuntimeError that says where the model is, and how to send it."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message=f"outcore run {run}")
    except Exception as error:
        raise RuntimeError(
            f"push_to_hub {repository}: the upload failed ({type(error).__name__}: {error}). The model is whole in "
            f"{folder}: send it with `hf upload {repository} {folder}`."
        ) from error
    return str(address)
