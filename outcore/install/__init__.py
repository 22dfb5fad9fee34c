"""The installer behind `python setup.py`: detect, install, build, verify. Standard library only.

Kept free of imports so that `outcore.install.bootstrap` works in a bare and even too old interpreter; the two names
below are what the training script needs to find the extensions that the set-up has built."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from outcore.install.extensions import extension_environment, extensions_dir

__all__ = ["extension_environment", "extensions_dir"]


def __getattr__(name):  # lazily, see above
    if name in __all__:
        from outcore.install import extensions

        return getattr(extensions, name)
    raise AttributeError("module {!r} has no attribute {!r}".format(__name__, name))
